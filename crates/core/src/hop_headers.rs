//! Headers that are neither stored nor forwarded: hop-by-hop headers, and headers that an app would
//! mistake for headers of Hapax.
//!
//! Many servers (CGI, WSGI, Rack, PHP) treat `_` and `-` in a name as the same, so `hapax_fence` is
//! `hapax-fence` to them. Names are therefore compared by [`dashed`].

use std::borrow::Cow;
use std::collections::HashSet;

use http::header::CONNECTION;
use http::{HeaderMap, HeaderName};

/// The name of a header as read by a server that treats `_` as `-`.
pub fn dashed(name: &HeaderName) -> Cow<'_, str> {
    match name.as_str().contains('_') {
        true => Cow::Owned(name.as_str().replace('_', "-")),
        false => Cow::Borrowed(name.as_str()),
    }
}

/// Whether only Hapax may set this header, in either spelling.
pub fn is_ours(name: &HeaderName) -> bool {
    dashed(name).starts_with("hapax-")
}

/// Removes each header with a `_` in its name that an app could mistake for another header. The other header
/// affects how a request is handled (`also` adds more of those), or is present in another spelling too. Other
/// headers with a `_` stay.
pub fn drop_lookalikes(headers: &mut HeaderMap, also: impl Fn(&str) -> bool) {
    if !headers.keys().any(|name| name.as_str().contains('_')) {
        return;
    }
    let mut seen = HashSet::new();
    let mut twice = HashSet::new();
    for name in headers.keys() {
        let read_as = dashed(name).into_owned();
        if !seen.insert(read_as.clone()) {
            twice.insert(read_as);
        }
    }
    let is_lookalike = |name: &&HeaderName| {
        let read_as = dashed(name);
        name.as_str().contains('_')
            && (decides(&read_as) || also(&read_as) || twice.contains(&*read_as))
    };
    for name in headers.keys().filter(is_lookalike).cloned().collect::<Vec<_>>() {
        headers.remove(name);
    }
}

/// Whether a header of this name (with dashes) identifies the caller or affects how a request is read.
fn decides(name: &str) -> bool {
    let begins = ["hapax-", "webhook-", "x-forwarded-"];
    is_hop_by_hop(name)
        || begins.iter().any(|begin| name.starts_with(begin))
        || matches!(
            name,
            "authorization"
                | "content-encoding"
                | "content-length"
                | "content-type"
                | "cookie"
                | "expect"
                | "forwarded"
                | "host"
                | "idempotency-key"
                | "x-http-method"
                | "x-http-method-override"
                | "x-method-override"
                | "x-real-ip"
        )
}

/// Whether a header is hop-by-hop, by its name alone.
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

/// The headers that a Connection header declares to be hop-by-hop.
#[derive(Debug)]
pub struct ConnectionHeaders<'a>(Vec<&'a str>);

impl<'a> ConnectionHeaders<'a> {
    /// The headers that these headers declare.
    pub fn named_in(headers: &'a HeaderMap) -> Self {
        let values = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
        Self(values.flat_map(|value| value.split(',')).map(str::trim).collect())
    }

    /// Whether this header is among them.
    pub fn contains(&self, name: &HeaderName) -> bool {
        self.0.iter().any(|named| named.eq_ignore_ascii_case(name.as_str()))
    }

    /// Whether `is_needed` holds for one of them, by its name in lower case and with dashes.
    pub fn any(&self, is_needed: impl Fn(&str) -> bool) -> bool {
        self.0.iter().any(|named| is_needed(&named.to_ascii_lowercase().replace('_', "-")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(names: &[&str], also: &str) -> Vec<String> {
        let mut headers = HeaderMap::new();
        for name in names {
            headers.append(HeaderName::try_from(*name).unwrap(), "v".parse().unwrap());
        }
        drop_lookalikes(&mut headers, |name| name == also);
        let mut left: Vec<_> = headers.keys().map(ToString::to_string).collect();
        left.sort_unstable();
        left
    }

    #[test]
    fn a_name_that_some_server_reads_as_another_is_dropped() {
        for name in [
            "hapax_fence",
            "hapax-fence_x",
            "hapax_scope",
            "idempotency_key",
            "Idempotency_Key",
            "webhook_id",
            "webhook-id_",
            "x_forwarded_for",
            "x-forwarded_host",
            "transfer_encoding",
            "content_type",
            "x_account_id",
            "x-account_id",
        ] {
            assert_eq!(left(&[name], "x-account-id"), Vec::<String>::new(), "{name}");
        }
        // A header with such a name stays, unless another spelling of it is present too.
        assert_eq!(left(&["api_key", "x-plain"], ""), ["api_key", "x-plain"]);
        assert_eq!(left(&["api_key", "api-key"], ""), ["api-key"]);
        assert_eq!(left(&["x_api_key", "x-api_key"], ""), Vec::<String>::new());
        assert_eq!(left(&["idempotency-key", "webhook-id"], ""), ["idempotency-key", "webhook-id"]);
    }

    #[test]
    fn a_connection_may_name_headers_under_either_spelling() {
        let mut headers = HeaderMap::new();
        headers.append(CONNECTION, "close, X_Account-Id".parse().unwrap());
        let named = ConnectionHeaders::named_in(&headers);
        assert!(named.any(|name| name == "x-account-id"));
        assert!(!named.any(|name| name == "authorization"));
    }
}
