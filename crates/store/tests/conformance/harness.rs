//! What the cases need: a directory that goes away, and receipts made the only way there is, by
//! verifying signed requests.

use std::time::Duration;

use aws_lc_rs::hmac;
use bytes::Bytes;
use hapax_core::envelope::{EnvelopeSpec, IdSpec};
use hapax_core::scheme::CustomScheme;
use hapax_core::secret::{ActiveSecret, Secret};
use hapax_core::source::{Late, ReplayGuard, SourceSpec};
use hapax_core::store::{Ingest, Via};
use hapax_core::{Arrival, Receipt, Source, SourceName, Tenant, Timestamp, Verified, verify};
use hapax_store::{SqliteOptions, SqliteStore};
use http::{HeaderMap, HeaderValue, Method};
use uuid::Uuid;

pub(crate) struct Place(tempfile::TempDir);

impl Place {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary directory"))
    }

    pub(crate) fn open(&self) -> SqliteStore {
        SqliteStore::open(SqliteOptions::new(self.directory())).expect("opens")
    }

    pub(crate) fn directory(&self) -> std::path::PathBuf {
        self.0.path().to_owned()
    }

    pub(crate) fn file(&self) -> std::path::PathBuf {
        self.0.path().join("hapax.db")
    }
}

const SECRET: &str = "a secret of the conformance suite";

/// The instant at which every test begins.
pub(crate) fn noon() -> Timestamp {
    "2026-06-01T12:00:00Z".parse().expect("a timestamp")
}

pub(crate) fn after(seconds: i64) -> Timestamp {
    Timestamp::from_second(noon().as_second() + seconds).expect("in range")
}

/// A sender that signs time and body, with the event id in the body.
pub(crate) struct Sender {
    source: Source,
    timed: bool,
}

impl Sender {
    fn build(change: impl FnOnce(&mut SourceSpec, &mut CustomScheme)) -> Self {
        let secret = ActiveSecret::forever(Secret::new(SECRET));
        let mut spec = SourceSpec::new("shop", "custom", vec![secret]);
        let mut scheme = CustomScheme {
            algorithm: Some("hmac-sha256".into()),
            header: Some("x-signature".into()),
            encoding: Some("hex".into()),
            content: Some("{timestamp}.{body}".into()),
            timestamp: Some("header:x-timestamp".into()),
            ..CustomScheme::default()
        };
        spec.late = Some(Late::Review);
        spec.envelope = EnvelopeSpec {
            event_id: Some(IdSpec::Selector("/id".into())),
            event_type: Some("/type".into()),
            occurred_at: Some("/created".into()),
            ..EnvelopeSpec::default()
        };
        change(&mut spec, &mut scheme);
        let timed = scheme.timestamp.is_some();
        spec.custom = Some(scheme);
        Self { source: Source::build(spec).expect("a source"), timed }
    }

    pub(crate) fn plain() -> Self {
        Self::build(|_, _| {})
    }

    pub(crate) fn of(tenant: &str, source: &str) -> Self {
        Self::build(|spec, _| {
            spec.tenant = Tenant::new(tenant);
            spec.name = SourceName::new(source);
        })
    }

    pub(crate) fn of_several() -> Self {
        Self::build(|spec, _| spec.envelope.items = Some("/events".into()))
    }

    /// Neither id nor time is signed: the id is in a header.
    pub(crate) fn guarded() -> Self {
        Self::build(|spec, scheme| {
            spec.envelope.event_id = Some(IdSpec::Selector("header:x-id".into()));
            spec.replay_guard = Some(ReplayGuard::Body);
            scheme.content = Some("{body}".into());
            scheme.timestamp = None;
        })
    }

    /// No id at all: a hash of type and resource.
    pub(crate) fn derived(within: Option<Duration>) -> Self {
        Self::build(|spec, _| {
            spec.envelope.event_id =
                Some(IdSpec::Hash { fields: vec!["/type".into(), "/resource".into()], within });
        })
    }

    /// A derived key whose signed bytes are remembered as well.
    pub(crate) fn derived_and_guarded() -> Self {
        Self::build(|spec, _| {
            spec.name = SourceName::new("guarded");
            let fields = vec!["/type".into(), "/resource".into()];
            spec.envelope.event_id = Some(IdSpec::Hash { fields, within: None });
            spec.replay_guard = Some(ReplayGuard::Body);
        })
    }

    /// Receipts of a body signed at `signed` and received at `now`.
    pub(crate) fn receipts(
        &self,
        body: &str,
        header_id: &str,
        signed: Timestamp,
        now: Timestamp,
    ) -> Vec<Receipt> {
        let stamp = signed.as_second().to_string();
        let mut content = Vec::new();
        let mut headers = HeaderMap::new();
        if self.timed {
            content.extend_from_slice(format!("{stamp}.").as_bytes());
            headers.insert("x-timestamp", HeaderValue::from_str(&stamp).expect("digits"));
        }
        content.extend_from_slice(body.as_bytes());
        let key = hmac::Key::new(hmac::HMAC_SHA256, SECRET.as_bytes());
        let mac = hex::encode(hmac::sign(&key, &content));
        headers.insert("x-signature", HeaderValue::from_str(&mac).expect("hex"));
        headers.insert("x-id", HeaderValue::from_str(header_id).expect("an id"));
        let arrival = Arrival {
            method: Method::POST,
            url: "https://hooks.example.com/webhooks/shop".into(),
            headers,
            body: Bytes::copy_from_slice(body.as_bytes()),
        };
        match verify(&self.source, &arrival, now) {
            Ok(Verified::Events { receipts, .. }) => receipts,
            other => panic!("not verified: {other:?}"),
        }
    }

    /// On time.
    pub(crate) fn ingest(&self, body: &str) -> Ingest {
        self.ingest_at(body, noon(), noon())
    }

    pub(crate) fn ingest_at(&self, body: &str, signed: Timestamp, now: Timestamp) -> Ingest {
        Ingest {
            receipts: self.receipts(body, "unused", signed, now),
            jobs: Vec::new(),
            via: via(now),
        }
    }

    pub(crate) fn ingest_under(&self, header_id: &str, body: &str) -> Ingest {
        Ingest {
            receipts: self.receipts(body, header_id, noon(), noon()),
            jobs: Vec::new(),
            via: via(noon()),
        }
    }
}

pub(crate) fn via(received_at: Timestamp) -> Via {
    Via {
        received_at,
        request_id: Uuid::now_v7(),
        remote: Some([203, 0, 113, 9].into()),
        secret: 0,
        signed_at: None,
        headers: "content-type: application/json".into(),
    }
}

/// A body with this id.
pub(crate) fn body(id: &str) -> String {
    format!(r#"{{"id":"{id}","type":"payout.paid","created":1780315200,"amount":10000}}"#)
}
