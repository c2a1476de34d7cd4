//! Which headers hold for one connection only, and so are neither kept nor passed on.

use http::header::CONNECTION;
use http::{HeaderMap, HeaderName};

/// Whether a header holds for one connection only, by its name alone.
pub fn is_hop_by_hop(name: &str) -> bool {
    matches!(
        name,
        "connection"
            | "keep-alive"
            | "proxy-authenticate"
            | "proxy-authorization"
            | "proxy-connection"
            | "te"
            | "trailer"
            | "transfer-encoding"
            | "upgrade"
    )
}

/// The headers that a Connection header declares to be about its connection.
#[derive(Debug)]
pub struct OfConnection<'a>(Vec<&'a str>);

impl<'a> OfConnection<'a> {
    /// As these headers declare them.
    pub fn named_in(headers: &'a HeaderMap) -> Self {
        let values = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
        Self(values.flat_map(|value| value.split(',')).map(str::trim).collect())
    }

    /// Whether this one is among them.
    pub fn contains(&self, name: &HeaderName) -> bool {
        self.0.iter().any(|named| named.eq_ignore_ascii_case(name.as_str()))
    }
}
