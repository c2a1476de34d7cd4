//! A sender: signs requests as its provider does.

use bytes::Bytes;
use hapax_core::secret::{ActiveSecret, Secret};
use hapax_core::source::SourceSpec;
use hapax_core::{Arrival, Source, Timestamp};
use http::{HeaderMap, HeaderName, HeaderValue, Method};

/// One sender with its secret.
pub(crate) struct Sender {
    source: Source,
    path: String,
}

/// A request before it is written.
#[derive(Clone)]
pub(crate) struct Request {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

/// Seconds since 1970.
pub(crate) fn now() -> i64 {
    Timestamp::now().as_second()
}

/// The current Unix time with its fraction of a second.
pub(crate) fn now_exact() -> f64 {
    Timestamp::now().as_microsecond() as f64 / 1e6
}

/// A body in Stripe's format with this id.
pub(crate) fn event(id: &str) -> String {
    format!(r#"{{"id":"{id}","object":"event","type":"payout.paid","data":{{"object":{{}}}}}}"#)
}

impl Sender {
    /// A sender of this provider that posts to `path`.
    pub(crate) fn new(provider: &str, secret: &str, path: &str) -> Self {
        let secrets = vec![ActiveSecret::forever(Secret::new(secret))];
        Self::of(SourceSpec::new("test", provider, secrets), path)
    }

    pub(crate) fn of(spec: SourceSpec, path: &str) -> Self {
        Self { source: Source::build(spec).expect("a good spec"), path: path.to_owned() }
    }

    pub(crate) fn stripe(secret: &str) -> Self {
        Self::new("stripe", secret, "/webhooks/stripe")
    }

    /// A signed request with this body.
    pub(crate) fn request(&self, body: impl AsRef<[u8]>) -> Request {
        self.request_at(body, now())
    }

    /// A request with this body, signed at this Unix time in seconds.
    pub(crate) fn request_at(&self, body: impl AsRef<[u8]>, second: i64) -> Request {
        self.request_with(body, second, &[])
    }

    /// A request with headers that may be signed.
    pub(crate) fn request_with(
        &self,
        body: impl AsRef<[u8]>,
        second: i64,
        headers: &[(&str, &str)],
    ) -> Request {
        let mut map = HeaderMap::new();
        map.insert("content-type", HeaderValue::from_static("application/json"));
        for (name, value) in headers {
            let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
            map.insert(name, HeaderValue::from_str(value).unwrap());
        }
        let arrival = Arrival {
            method: Method::POST,
            url: format!("http://hooks.example.com{}", self.path),
            headers: map,
            body: Bytes::copy_from_slice(body.as_ref()),
        };
        let at = Timestamp::from_second(second).unwrap();
        let signed = self.source.scheme().sign(&arrival, None, at).unwrap();
        let arrival = signed.apply(&arrival).unwrap();
        let headers = arrival
            .headers
            .iter()
            .map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned()))
            .collect();
        let body = arrival.body.to_vec();
        Request { method: "POST".into(), path: self.path.clone(), headers, body }
    }

    /// A complete signed event as bytes.
    pub(crate) fn event(&self, id: &str) -> Vec<u8> {
        self.request(event(id)).bytes()
    }
}

impl Request {
    pub(crate) fn header(&self, name: &str) -> &str {
        let found = self.headers.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
        &found.unwrap_or_else(|| panic!("no {name}")).1
    }

    pub(crate) fn without(mut self, name: &str) -> Self {
        self.headers.retain(|(known, _)| !known.eq_ignore_ascii_case(name));
        self
    }

    pub(crate) fn with(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    pub(crate) fn instead(self, name: &str, value: &str) -> Self {
        self.without(name).with(name, value)
    }

    pub(crate) fn to(mut self, path: &str) -> Self {
        self.path = path.to_owned();
        self
    }

    /// The request with another body under the same headers.
    pub(crate) fn body(mut self, body: impl AsRef<[u8]>) -> Self {
        self.body = body.as_ref().to_vec();
        self
    }

    /// The head without the length of the body.
    pub(crate) fn head(&self) -> String {
        let mut head =
            format!("{} {} HTTP/1.1\r\nhost: hooks.example.com\r\n", self.method, self.path);
        for (name, value) in &self.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.head().into_bytes();
        bytes.extend_from_slice(format!("content-length: {}\r\n\r\n", self.body.len()).as_bytes());
        bytes.extend_from_slice(&self.body);
        bytes
    }
}
