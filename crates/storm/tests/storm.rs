//! A storm inside a test suite: no server of Hapax, no database, only an endpoint and its ledger.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::presets;
use hapax_core::secret::{ActiveSecret, Secret};
use hapax_core::source::SourceSpec;
use hapax_storm::{LawVerdict, Probe, Report, Sender, Storm, StormErrorKind, StormSize};
use http::Response;
use http_body_util::{BodyExt as _, Full};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;

/// The event id of each effect. The ledger has no unique key, so a double effect is visible.
type Ledger = Arc<Mutex<Vec<String>>>;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Endpoint {
    /// Remembers ids, checks and acts under one lock.
    Sound,
    /// Acts on every copy.
    Naive,
}

/// Serves an endpoint on a free port and returns its URL.
async fn serve(endpoint: Endpoint, ledger: Ledger) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/webhooks/stripe", listener.local_addr().unwrap());
    tokio::spawn(async move {
        let seen = Arc::new(Mutex::new(BTreeSet::new()));
        while let Ok((stream, _)) = listener.accept().await {
            let (ledger, seen) = (Arc::clone(&ledger), Arc::clone(&seen));
            let answer = service_fn(move |request: http::Request<hyper::body::Incoming>| {
                let (ledger, seen) = (Arc::clone(&ledger), Arc::clone(&seen));
                async move {
                    let body = request.into_body().collect().await.unwrap().to_bytes();
                    let event: serde_json::Value = serde_json::from_slice(&body).unwrap();
                    let id = event["id"].as_str().unwrap().to_owned();
                    let is_new = seen.lock().unwrap().insert(id.clone());
                    if is_new || endpoint == Endpoint::Naive {
                        ledger.lock().unwrap().push(id);
                    }
                    Ok::<_, Infallible>(Response::new(Full::new(Bytes::new())))
                }
            });
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), answer));
        }
    });
    url
}

fn storm(url: &str, seed: u64) -> Storm {
    let secret = ActiveSecret::forever(Secret::new("whsec_storm_test_secret"));
    let spec = SourceSpec::new("stripe", "stripe", vec![secret]);
    let preset = presets::find("stripe").unwrap();
    let sender = Sender::new(preset, spec, url, url.parse().unwrap()).unwrap();
    let shape = StormSize {
        event_type: None,
        events: 5,
        copies: 4,
        concurrency: 8,
        stale: false,
        forged: false,
        shuffle: false,
    };
    Storm::new(sender, shape, seed, hapax_core::Timestamp::now()).unwrap()
}

async fn run(endpoint: Endpoint) -> Report {
    let ledger = Ledger::default();
    let url = serve(endpoint, Arc::clone(&ledger)).await;
    let probe = Probe::Rows(Box::new(move || {
        let rows = ledger.lock().unwrap().clone();
        Box::pin(std::future::ready(Ok(rows)))
    }));
    let storm = storm(&url, 7).with_probe(Some(probe), Duration::from_secs(10));
    assert_eq!(storm.requests(), 20);
    storm.run(Arc::new(|| {})).await.unwrap()
}

fn verdict(report: &Report, law: &str) -> LawVerdict {
    report.laws.iter().find(|judged| judged.name == law).unwrap().verdict
}

#[tokio::test]
async fn a_sound_endpoint_keeps_every_law() {
    let report = run(Endpoint::Sound).await;
    assert_eq!(report.verdict(), LawVerdict::Held);
    assert_eq!(verdict(&report, "one_effect"), LawVerdict::Held);
    assert!(report.junit().contains("failures=\"0\""));
}

#[tokio::test]
async fn an_endpoint_that_acts_on_every_copy_breaks_the_law_of_one_effect() {
    // The endpoint answers 200 to everything: only the ledger shows the flaw.
    let report = run(Endpoint::Naive).await;
    assert_eq!(report.verdict(), LawVerdict::Broken);
    assert_eq!(verdict(&report, "answered"), LawVerdict::Held);
    assert_eq!(verdict(&report, "one_effect"), LawVerdict::Broken);
    let summary = report.json().pop().unwrap();
    assert_eq!((&summary["summary"], &summary["effects"]["before"]), (&"broken".into(), &0.into()));
}

#[tokio::test]
async fn an_endpoint_that_nothing_listens_on_is_an_error_and_no_verdict() {
    // A closed port must not count as an endpoint that keeps or breaks a law.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/webhooks/stripe", listener.local_addr().unwrap());
    drop(listener);
    let error = storm(&url, 1).run(Arc::new(|| {})).await.err().unwrap();
    assert_eq!(error.kind, StormErrorKind::Unreachable);
    assert!(error.message.contains("cannot connect"), "{error}");
}
