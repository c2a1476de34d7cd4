//! Headers that a user adds to the deliveries of an endpoint, checked when they are configured. A header that
//! could change how a delivery is read, or that Hapax sets itself, is refused.

use std::collections::HashSet;
use std::fmt;

use hapax_core::hop_headers::{dashed, is_hop_by_hop};
use http::{HeaderMap, HeaderName, HeaderValue};

use crate::limits::{CUSTOM_HEADER_NAME_BYTES_MAX, CUSTOM_HEADERS_BYTES_MAX, CUSTOM_HEADERS_MAX};

/// The custom headers of one endpoint. Their values may be secrets: they are never printed.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct CustomHeaders {
    headers: Vec<(HeaderName, HeaderValue)>,
}

/// Why custom headers were refused. The texts contain names, never values.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeaderProblem {
    /// More headers than an endpoint may have.
    #[error("an endpoint has at most {CUSTOM_HEADERS_MAX} custom headers")]
    TooMany,
    /// More bytes than an endpoint may have.
    #[error("custom headers have at most {CUSTOM_HEADERS_BYTES_MAX} bytes in all")]
    TooLong,
    /// Not a header name.
    #[error("{0:?} is not a valid header name")]
    Name(String),
    /// A name that Hapax or the connection sets.
    #[error("the header {0} is set by Hapax and cannot be a custom header")]
    Reserved(String),
    /// A name that occurs twice, in any spelling.
    #[error("the header {0} occurs twice")]
    Twice(String),
    /// A value with other characters than visible ASCII and inner spaces.
    #[error(
        "the value of the header {0} contains a line break, or other characters than visible ASCII"
    )]
    Value(String),
}

impl CustomHeaders {
    /// Checks names and values. The names are compared without case, and `_` counts as `-`.
    pub fn parse<'a>(
        pairs: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Self, HeaderProblem> {
        let mut headers = Vec::new();
        let mut seen = HashSet::new();
        let mut bytes = 0_usize;
        for (name, value) in pairs {
            if headers.len() == CUSTOM_HEADERS_MAX {
                return Err(HeaderProblem::TooMany);
            }
            let name = header_name(name)?;
            let value = header_value(&name, value)?;
            if !seen.insert(dashed(&name).into_owned()) {
                return Err(HeaderProblem::Twice(name.to_string()));
            }
            bytes += name.as_str().len() + value.len();
            if bytes > CUSTOM_HEADERS_BYTES_MAX {
                return Err(HeaderProblem::TooLong);
            }
            headers.push((name, value));
        }
        Ok(Self { headers })
    }

    /// Adds the headers to those of a delivery. A header that is already there stays as it is.
    pub fn add_to(&self, headers: &mut HeaderMap) {
        for (name, value) in &self.headers {
            headers.entry(name).or_insert_with(|| value.clone());
        }
    }

    /// Names in lower case, with their values, in the order in which they were given.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes()))
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.headers.is_empty()
    }
}

impl fmt::Debug for CustomHeaders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.headers.iter().map(|(name, _)| name.as_str())).finish()
    }
}

fn header_name(text: &str) -> Result<HeaderName, HeaderProblem> {
    let shown = || text.chars().take(CUSTOM_HEADER_NAME_BYTES_MAX).collect::<String>();
    if text.len() > CUSTOM_HEADER_NAME_BYTES_MAX {
        return Err(HeaderProblem::Name(shown()));
    }
    let name: HeaderName = text.parse().map_err(|_| HeaderProblem::Name(shown()))?;
    if is_reserved(&dashed(&name)) {
        return Err(HeaderProblem::Reserved(name.to_string()));
    }
    Ok(name)
}

fn header_value(name: &HeaderName, text: &str) -> Result<HeaderValue, HeaderProblem> {
    let problem = || HeaderProblem::Value(name.to_string());
    let visible = text.bytes().all(|byte| matches!(byte, b' '..=b'~'));
    // Receivers drop outer spaces, so the value that is shown would not be the value that arrives.
    if !visible || text.trim() != text {
        return Err(problem());
    }
    let mut value = HeaderValue::from_str(text).map_err(|_| problem())?;
    value.set_sensitive(true);
    Ok(value)
}

/// Whether Hapax or the connection sets this header (its name with dashes), or a server or gateway reads
/// it as part of how the request is framed, routed or attributed.
fn is_reserved(name: &str) -> bool {
    let begins = ["hapax-", "webhook-", "proxy-", "x-forwarded-", "sec-"];
    is_hop_by_hop(name)
        || begins.iter().any(|begin| name.starts_with(begin))
        || matches!(
            name,
            "accept-encoding"
                | "content-encoding"
                | "content-length"
                | "content-range"
                | "content-type"
                | "date"
                | "expect"
                | "forwarded"
                | "host"
                | "http2-settings"
                | "idempotency-key"
                | "max-forwards"
                | "range"
                | "via"
                | "x-http-method"
                | "x-http-method-override"
                | "x-method-override"
                | "x-real-ip"
        )
}
