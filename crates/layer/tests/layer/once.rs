//! One key, one run, one answer.

use std::collections::BTreeMap;

use hapax_core::json::Pointer;
use hapax_layer::{IdempotencyOutcome, RoutePattern};
use hapax_sim::Act;
use http::{Method, StatusCode};
use tokio::task::JoinSet;

use crate::support::{Api, answer, charge, rules, soon};

// With a lookup before the insert, fifty concurrent requests would all find nothing stored, and all run.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn fifty_at_once_with_one_key_are_one_run() {
    let api = Api::new(rules(), |effects, _| async move {
        let run = effects.add("charged");
        // Lets the other requests arrive in the middle of this run.
        tokio::task::yield_now().await;
        Ok(answer(StatusCode::CREATED, format!("{{\"id\":\"ch_{run}\"}}")))
    });
    let mut sent = JoinSet::new();
    for _ in 0..50 {
        let api = api.clone();
        sent.spawn(async move { api.send(charge("one")).await });
    }
    let heard = soon(sent.join_all()).await;

    assert_eq!(api.effects.count(), 1);
    let mut outcomes = BTreeMap::<_, usize>::new();
    for one in &heard {
        *outcomes.entry(one.outcome.unwrap().as_str()).or_default() += 1;
        match one.outcome.unwrap() {
            IdempotencyOutcome::Fresh | IdempotencyOutcome::Replay => {
                assert_eq!((one.status, &one.body[..]), (201, &b"{\"id\":\"ch_1\"}"[..]));
            }
            IdempotencyOutcome::InProgress => {
                assert_eq!((one.status, one.header("retry-after")), (409, Some("5")))
            }
            other => panic!("{other:?} is nothing that can happen here"),
        }
    }
    assert_eq!(outcomes["fresh"], 1, "{outcomes:?}");

    let first = heard.iter().find(|one| one.outcome == Some(IdempotencyOutcome::Fresh)).unwrap();
    for _ in 0..3 {
        let replay = api.send(charge("one")).await;
        assert!(replay.is_replay());
        assert_eq!((replay.status, &replay.body), (first.status, &first.body));
        assert_eq!(replay.header("content-type"), first.header("content-type"));
    }
    assert_eq!(api.effects.count(), 1);
}

// A retry that quotes its key as in the IETF draft must not count as another request.
#[tokio::test]
async fn a_quoted_key_is_the_same_key() {
    let api = Api::counting(rules());
    assert!(!api.send(charge("abc")).await.is_replay());
    assert!(api.send(charge("\"abc\"")).await.is_replay());
    assert_eq!(api.effects.count(), 1);
}

// A malformed key must not be ignored, or the work would run without protection.
#[tokio::test]
async fn a_bad_key_is_refused_and_nothing_runs() {
    let api = Api::counting(rules());
    for bad in ["", "\"open", "\"\"", &"k".repeat(256)] {
        let heard = api.send(charge(bad)).await;
        assert_eq!(heard.problem().as_deref(), Some("idempotency_key_malformed"), "{bad}");
        assert_eq!((heard.status, heard.outcome), (400, Some(IdempotencyOutcome::Refused)));
    }
    assert_eq!(api.effects.count(), 0);
}

#[tokio::test]
async fn requests_without_a_key_bypass_the_layer_unless_their_route_requires_one() {
    let required = [RoutePattern::parse("POST /charges").unwrap()];
    let api = Api::counting(rules().required(required));
    let heard = api.send(charge("").without("idempotency-key")).await;
    assert_eq!((heard.status, heard.problem().as_deref()), (400, Some("idempotency_key_missing")));
    assert_eq!(api.effects.count(), 0);

    for elsewhere in [
        charge("").without("idempotency-key").path("/refunds"),
        charge("").without("idempotency-key").method(Method::PUT),
        // Safe requests need no key, and ignore one.
        charge("k").method(Method::GET),
        charge("k").method(Method::GET),
        charge("\"bad").method(Method::OPTIONS),
    ] {
        let heard = api.send(elsewhere).await;
        assert_eq!((heard.status, heard.outcome), (201, None));
    }
    assert_eq!(api.effects.count(), 5);
    assert_eq!(api.ledger.given(), "");
}

// Another request under a used key must neither run nor get the answer of the first.
#[tokio::test]
async fn a_key_used_for_another_request_is_refused() {
    let pointer = |text| Pointer::parse(text).unwrap();
    let ignoring = rules().fingerprint_ignore(vec![pointer("/client_ts")]);
    let api = Api::counting(ignoring.clone());
    let first = charge("k").body("{\"amount\":100,\"client_ts\":1}");
    api.send(first.clone()).await;

    for other in [
        first.clone().body("{\"amount\":999,\"client_ts\":1}"),
        first.clone().body("{\"amount\":100,\"client_ts\":1} "),
        first.clone().body(""),
        first.clone().path("/charges?dry=1"),
    ] {
        let heard = api.send(other).await;
        assert_eq!((heard.status, heard.outcome), (409, Some(IdempotencyOutcome::Mismatch)));
        assert_eq!(heard.problem().as_deref(), Some("idempotency_key_reused"));
        assert!(heard.header("retry-after").is_none(), "coming back does not help");
    }
    // An ignored value that changes with each retry does not make another request.
    assert!(api.send(first.body("{\"amount\":100,\"client_ts\":22}")).await.is_replay());
    assert_eq!(api.effects.count(), 1);

    let strict = Api::counting(ignoring.mismatch_status(StatusCode::UNPROCESSABLE_ENTITY));
    strict.send(charge("k")).await;
    assert_eq!(strict.send(charge("k").body("{}")).await.status, 422);
}

// A body with a key is collected into memory, so it must be bounded.
#[tokio::test]
async fn a_body_past_the_bound_is_refused() {
    let api = Api::counting(rules().body_max(100));
    assert_eq!(api.send(charge("k").body(vec![b'x'; 100])).await.status, 201);
    let heard = api.send(charge("l").body(vec![b'x'; 101])).await;
    assert_eq!((heard.status, heard.problem().as_deref()), (413, Some("too_large")));
    // Without a key nothing is collected.
    let heard = api.send(charge("").without("idempotency-key").body(vec![b'x'; 101])).await;
    assert_eq!(heard.status, 201);
    assert_eq!(api.effects.count(), 2);
}

// A key must be deleted after its ttl, and not before.
#[tokio::test]
async fn a_key_is_forgotten_after_its_ttl() {
    let hour = std::time::Duration::from_secs(3_600);
    let api = Api::counting(rules().ttl(24 * hour));
    api.send(charge("k")).await;
    api.ledger.pass(23 * hour);
    assert!(api.send(charge("k")).await.is_replay());
    api.ledger.pass(2 * hour);
    assert!(!api.send(charge("k")).await.is_replay());
    assert_eq!(api.effects.count(), 2);
}

#[tokio::test]
async fn every_outcome_is_counted() {
    let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
    let handle = recorder.handle();
    // The recorder is local to this thread, on which the whole test runs.
    let _guard = metrics::set_default_local_recorder(&recorder);
    let api = Api::counting(rules().realm("shop"));
    api.send(charge("k")).await;
    api.send(charge("k")).await;
    api.send(charge("k")).await;
    api.send(charge("k").body("{}")).await;
    api.send(charge("")).await;
    api.ledger.fail(Act::Reserve);
    api.send(charge("k")).await;
    let text = handle.render();
    for (outcome, count) in
        [("fresh", 1), ("replay", 2), ("mismatch", 1), ("refused", 1), ("unavailable", 1)]
    {
        let line =
            format!("hapax_idempotency_total{{realm=\"shop\",outcome=\"{outcome}\"}} {count}");
        assert!(text.contains(&line), "{line} in {text}");
    }
}
