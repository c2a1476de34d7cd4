//! The URL of an endpoint, parsed once. The same text is stored, checked, connected to and sent.
//!
//! Parsers disagree about odd spellings of a URL. So a URL is brought into the canonical form of the URL
//! standard, and every spelling that could be read in two ways is refused.

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};

use http::Uri;
use url::{Host, Url};

use super::guard_rules::{Blocked, GuardRules};
use crate::limits::{ENDPOINT_URL_BYTES_MAX, PARSED_URLS_MAX};

/// The URL of an endpoint in canonical form: http or https, a host, no user, no fragment.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct EndpointUrl {
    text: String,
    uri: Uri,
}

/// Why a URL cannot be an endpoint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UrlProblem {
    /// The URL is longer than any that is accepted.
    #[error("the URL is longer than {ENDPOINT_URL_BYTES_MAX} bytes")]
    TooLong,
    /// A character that some parsers drop and others keep.
    #[error("the URL contains a space, a control character or a backslash")]
    Character,
    /// Not `http://` or `https://`.
    #[error("the URL must begin with https:// or http://")]
    Scheme,
    /// No host after the scheme.
    #[error("the URL has no host")]
    NoHost,
    /// A user or a password.
    #[error("the URL contains a user name or a password; use a custom header instead")]
    User,
    /// A fragment, which HTTP does not send.
    #[error("the URL contains a fragment (#…), which is never sent")]
    Fragment,
    /// Port 0.
    #[error("port 0 cannot be connected to")]
    Port,
    /// The parser refused it.
    #[error("the URL is not valid: {0}")]
    Invalid(String),
    /// The rules block the host or the port.
    #[error("endpoints may not be at {host}: {why}")]
    Blocked {
        /// The host in canonical form.
        host: String,
        /// The rule.
        why: Blocked,
    },
}

/// URLs that were parsed before: an endpoint gets many messages, and parsing its URL costs as much as signing
/// one of them.
#[derive(Debug, Default)]
pub(crate) struct ParsedUrls(Mutex<HashMap<String, EndpointUrl>>);

impl ParsedUrls {
    /// As [`EndpointUrl::from_stored`].
    pub(crate) fn get(&self, text: &str) -> Result<EndpointUrl, UrlProblem> {
        let lock = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = lock().get(text) {
            return Ok(known.clone());
        }
        let parsed = EndpointUrl::from_stored(text)?;
        let mut known = lock();
        if known.len() >= PARSED_URLS_MAX {
            known.clear();
        }
        known.insert(text.to_owned(), parsed.clone());
        Ok(parsed)
    }
}

/// The host of a URL, as far as it can be judged without DNS.
pub(super) enum UrlHost<'a> {
    Address(IpAddr),
    /// `localhost`, or a name below it.
    Loopback,
    Name(&'a str),
}

impl EndpointUrl {
    /// Reads the URL of a new endpoint and makes all checks that need no DNS: its form, an address
    /// in it, and its port. The addresses of a name are checked at each connection.
    pub fn parse(text: &str, rules: &GuardRules) -> Result<Self, UrlProblem> {
        let url = Self::from_stored(text)?;
        url.check(rules)
            .map_err(|why| UrlProblem::Blocked { host: url.host().to_string(), why })?;
        Ok(url)
    }

    /// Reads a URL whose form was checked when it was stored. The rules may have changed since then, so
    /// they are left to [`EndpointClient::post`](super::EndpointClient::post).
    pub fn from_stored(text: &str) -> Result<Self, UrlProblem> {
        if text.len() > ENDPOINT_URL_BYTES_MAX {
            return Err(UrlProblem::TooLong);
        }
        if text.chars().any(|c| c == '\\' || c.is_control() || c.is_whitespace()) {
            return Err(UrlProblem::Character);
        }
        let (scheme, rest) = text.split_once("://").ok_or(UrlProblem::Scheme)?;
        if !["http", "https"].iter().any(|known| scheme.eq_ignore_ascii_case(known)) {
            return Err(UrlProblem::Scheme);
        }
        let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
        if authority.is_empty() {
            return Err(UrlProblem::NoHost);
        }
        if authority.contains('@') {
            return Err(UrlProblem::User);
        }
        canonical(Url::parse(text).map_err(|error| UrlProblem::Invalid(error.to_string()))?)
    }

    /// The canonical text, as it is stored and shown.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The host: a name, or an address (IPv6 in brackets).
    pub fn host(&self) -> &str {
        self.uri.host().unwrap_or_default()
    }

    /// The port, even if the URL leaves it to its scheme.
    pub fn port(&self) -> u16 {
        port_of(&self.uri)
    }

    /// Whether the connection is encrypted.
    pub fn is_https(&self) -> bool {
        self.uri.scheme_str() == Some("https")
    }

    /// The host if it is a name that DNS must be asked for.
    pub(super) fn name(&self) -> Option<&str> {
        match host_of(&self.uri)? {
            UrlHost::Name(name) => Some(name),
            UrlHost::Address(_) | UrlHost::Loopback => None,
        }
    }

    /// Makes all checks that need no DNS.
    pub(super) fn check(&self, rules: &GuardRules) -> Result<(), Blocked> {
        let port = self.port();
        match host_of(&self.uri).ok_or(Blocked::Address)? {
            UrlHost::Address(address) => rules.judge(address, port).map(drop),
            UrlHost::Loopback if rules.loopback().is_empty() => Err(Blocked::Address),
            UrlHost::Name(_) if !rules.may_use_port(port) => Err(Blocked::Port(port)),
            UrlHost::Loopback | UrlHost::Name(_) => Ok(()),
        }
    }

    pub(super) fn uri(&self) -> &Uri {
        &self.uri
    }
}

impl fmt::Display for EndpointUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Path and query may hold a token, so neither is printed.
impl fmt::Debug for EndpointUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EndpointUrl({}:{})", self.host(), self.port())
    }
}

/// The port of a URI, even if the URI leaves it to its scheme.
pub(super) fn port_of(uri: &Uri) -> u16 {
    uri.port_u16().unwrap_or(match uri.scheme_str() {
        Some("https") => 443,
        Some(_) | None => 80,
    })
}

/// The host of a URI in canonical form, or `None` if the host has another form.
pub(super) fn host_of(uri: &Uri) -> Option<UrlHost<'_>> {
    let text = uri.host()?;
    match Host::parse(text).ok()? {
        Host::Ipv4(address) => Some(UrlHost::Address(address.into())),
        Host::Ipv6(address) => Some(UrlHost::Address(address.into())),
        Host::Domain(name) if name != text => None,
        Host::Domain(_) => match text.rsplit('.').next() {
            Some("localhost") => Some(UrlHost::Loopback),
            Some(_) | None => Some(UrlHost::Name(text)),
        },
    }
}

/// The last checks, on the parsed URL.
fn canonical(mut url: Url) -> Result<EndpointUrl, UrlProblem> {
    if !url.username().is_empty() || url.password().is_some() {
        return Err(UrlProblem::User);
    }
    if url.fragment().is_some() {
        return Err(UrlProblem::Fragment);
    }
    if url.port() == Some(0) {
        return Err(UrlProblem::Port);
    }
    let Some(Host::Domain(name)) = url.host() else {
        return sendable(url);
    };
    // The dot at the end is removed: no certificate contains it, and two spellings of one host
    // would have two pools.
    let name = name.strip_suffix('.').unwrap_or(name).to_owned();
    if !is_host_name(&name) {
        return Err(UrlProblem::Invalid(format!("{name:?} is not a host name")));
    }
    url.set_host(Some(&name)).map_err(|error| UrlProblem::Invalid(error.to_string()))?;
    sendable(url)
}

/// Letters, digits, `-` and `_` in labels of at most 63 bytes; 253 bytes in all.
fn is_host_name(name: &str) -> bool {
    let fits = |label: &str| {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        matches!(label.len(), 1..=63) && label.bytes().all(plain)
    };
    name.len() <= 253 && name.split('.').all(fits)
}

/// The URL for the HTTP client, which must read the same parts in it.
fn sendable(url: Url) -> Result<EndpointUrl, UrlProblem> {
    let text = String::from(url.clone());
    if text.len() > ENDPOINT_URL_BYTES_MAX {
        return Err(UrlProblem::TooLong);
    }
    let uri: Uri = text.parse().map_err(|_| UrlProblem::Invalid("it cannot be sent".into()))?;
    let same = uri.scheme_str() == Some(url.scheme())
        && uri.host() == url.host_str()
        && Some(port_of(&uri)) == url.port_or_known_default()
        && uri.path() == url.path()
        && uri.query() == url.query()
        && host_of(&uri).is_some();
    if same {
        Ok(EndpointUrl { text, uri })
    } else {
        Err(UrlProblem::Invalid("parsers disagree about its parts".into()))
    }
}
