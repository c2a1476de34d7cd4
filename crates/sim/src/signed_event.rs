//! Events for tests of a store: each is a signed request that was verified, because only
//! [`verify()`] makes receipts.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::envelope::{EnvelopeSpec, IdSpec};
use hapax_core::scheme::CustomScheme;
use hapax_core::secret::{ActiveSecret, Secret};
use hapax_core::source::{LatePolicy, ReplayGuard, SourceSpec};
use hapax_core::store::{ArrivalInfo, Ingest, NewJob};
use hapax_core::{Arrival, Source, Timestamp, Verified, verify};
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use uuid::Uuid;

/// An event of tenant `default`. Its id is in a header.
#[derive(Debug, Clone)]
pub struct SignedEvent {
    /// The source.
    pub source: String,
    /// The sender's id.
    pub event_id: String,
    /// Where the type is in the body: `/type`. Without it, the body need not be JSON.
    pub type_at: Option<&'static str>,
    /// The headers to store, as `name: value` lines.
    pub headers: String,
    /// The body.
    pub body: String,
    /// When it was received.
    pub received_at: Timestamp,
    /// Whether the event was signed long before it was received. A late event goes to review.
    pub is_late: bool,
}

impl SignedEvent {
    /// An event that was signed and received at `received_at`.
    pub fn new(source: &str, event_id: &str, received_at: Timestamp) -> Self {
        Self {
            source: source.to_owned(),
            event_id: event_id.to_owned(),
            type_at: None,
            headers: "content-type: application/json\n".to_owned(),
            body: "{}".to_owned(),
            received_at,
            is_late: false,
        }
    }

    /// The verified request, with these jobs.
    pub fn ingest(&self, jobs: Vec<NewJob>) -> Ingest {
        let source = self.source();
        let late_by = Duration::from_secs(if self.is_late { 86_400 } else { 0 });
        let mut arrival = Arrival {
            method: Method::POST,
            url: format!("https://hooks.example.com/webhooks/{}", self.source),
            headers: HeaderMap::new(),
            body: self.body.clone().into(),
        };
        let id = HeaderValue::from_str(&self.event_id).expect("an id fits into a header");
        arrival.headers.insert("x-id", id);
        let signed = source.scheme().sign(&arrival, None, self.received_at - late_by);
        for (name, value) in signed.expect("a custom scheme signs").headers {
            let name: HeaderName = name.parse().expect("a header name");
            arrival.headers.insert(name, HeaderValue::from_str(&value).expect("a header value"));
        }
        let receipts = match verify(&source, &arrival, self.received_at) {
            Ok(Verified::Events { receipts, .. }) => receipts,
            other => panic!("the event does not verify: {other:?}"),
        };
        let via = ArrivalInfo {
            received_at: self.received_at,
            request_id: Uuid::now_v7(),
            remote: None,
            secret: 0,
            signed_at: None,
            headers: Arc::from(self.headers.as_str()),
        };
        Ingest { receipts, jobs: vec![jobs], via }
    }

    fn source(&self) -> Source {
        let secret = ActiveSecret::forever(Secret::new("a secret of the tests"));
        let mut spec = SourceSpec::new(self.source.as_str(), "custom", vec![secret]);
        spec.late = Some(LatePolicy::Review);
        spec.replay_guard = Some(ReplayGuard::Off);
        spec.custom = Some(CustomScheme {
            algorithm: Some("hmac-sha256".into()),
            header: Some("x-signature".into()),
            content: Some("{timestamp}.{header:x-id}.{body}".into()),
            timestamp: Some("header:x-timestamp".into()),
            ..CustomScheme::default()
        });
        spec.envelope = EnvelopeSpec {
            event_id: Some(IdSpec::Selector("header:x-id".into())),
            event_type: self.type_at.map(str::to_owned),
            ..EnvelopeSpec::default()
        };
        Source::build(spec).expect("a good source")
    }
}
