//! Which headers are neither kept nor passed on: the ones that hold for one connection only, and the
//! ones that an app behind would take for headers of ours.
//!
//! Many servers (CGI, WSGI, Rack, PHP) read `_` and `-` in a name as the same, so `hapax_fence` is
//! `hapax-fence` to them. Names are therefore compared by [`dashed`].

use std::borrow::Cow;
use std::collections::HashSet;

use http::header::CONNECTION;
use http::{HeaderMap, HeaderName};

/// A header's name as a server reads it that takes `_` for `-`.
pub fn dashed(name: &HeaderName) -> Cow<'_, str> {
    match name.as_str().contains('_') {
        true => Cow::Owned(name.as_str().replace('_', "-")),
        false => Cow::Borrowed(name.as_str()),
    }
}

/// Whether only Hapax says what this header says, under either spelling.
pub fn is_ours(name: &HeaderName) -> bool {
    dashed(name).starts_with("hapax-")
}

/// Removes each header that is spelled with `_` and that an app could take for another one: for one
/// that decides something (`also` names more of them), or for one that is there as well under
/// another spelling. Headers that are simply called so stay.
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

/// Whether a header of this name (with dashes) says who calls, what a request is or how it came.
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
pub struct ConnectionHeaders<'a>(Vec<&'a str>);

impl<'a> ConnectionHeaders<'a> {
    /// As these headers declare them.
    pub fn named_in(headers: &'a HeaderMap) -> Self {
        let values = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
        Self(values.flat_map(|value| value.split(',')).map(str::trim).collect())
    }

    /// Whether this one is among them.
    pub fn contains(&self, name: &HeaderName) -> bool {
        self.0.iter().any(|named| named.eq_ignore_ascii_case(name.as_str()))
    }

    /// Whether one of them is a header for which `is_needed` holds, by its name in lower case and with
    /// dashes.
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
        // One that is only called so stays, unless another spelling of it is there too.
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
