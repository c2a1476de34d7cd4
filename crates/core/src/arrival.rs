//! An [`Arrival`]: a request as received, unverified. Nothing in a request may be trusted before
//! [`mod@crate::verify`] has accepted it.

use std::borrow::Cow;

use bytes::Bytes;
use http::{HeaderMap, Method};

/// One HTTP request, as received.
#[derive(Debug, Clone)]
pub struct Arrival {
    /// The request method, upper case.
    pub method: Method,
    /// The full public URL as the sender wrote it, query included: some senders sign it.
    pub url: String,
    /// All headers, repeated ones kept.
    pub headers: HeaderMap,
    /// The body, byte for byte.
    pub body: Bytes,
}

impl Arrival {
    /// The value of a header. Repeated lines are joined with `", "`, as HTTP allows.
    pub fn header(&self, name: &str) -> Option<Cow<'_, [u8]>> {
        merged(&self.headers, name)
    }

    /// The header as text, or `None` if it is missing or not UTF-8.
    pub fn header_text(&self, name: &str) -> Option<Cow<'_, str>> {
        match self.header(name)? {
            Cow::Borrowed(raw) => std::str::from_utf8(raw).ok().map(Cow::Borrowed),
            Cow::Owned(raw) => String::from_utf8(raw).ok().map(Cow::Owned),
        }
    }

    /// The part of the URL after the first `?`, without any fragment; empty if there is none.
    pub fn query(&self) -> &str {
        let url = self.url.split('#').next().unwrap_or_default();
        url.split_once('?').map(|(_, query)| query).unwrap_or_default()
    }
}

fn merged<'a>(headers: &'a HeaderMap, name: &str) -> Option<Cow<'a, [u8]>> {
    let mut lines = headers.get_all(name).iter();
    let first = lines.next()?.as_bytes();
    let mut all = Cow::Borrowed(first);
    for line in lines {
        let all = all.to_mut();
        all.extend_from_slice(b", ");
        all.extend_from_slice(line.as_bytes());
    }
    Some(all)
}
