//! Apps that finish a key themselves, in the transaction of their effects, and fences that were lost: the stored
//! answer counts.

use std::sync::Arc;

use bytes::Bytes;
use hapax_core::ledger::{Ledger as _, Reserved, Settle, StoredAnswer};
use hapax_core::limits::ANSWER_BODY_BYTES_MAX;
use hapax_layer::{Body, BoxError, IdempotencyOutcome};
use http::StatusCode;
use http_body_util::{BodyExt as _, Full};
use tokio::sync::{Notify, Semaphore};

use crate::support::{Api, LEASE, TestLedger, answer, charge, rules, soon};

/// The app's answer after it has settled the key itself.
#[derive(Clone, Copy)]
enum Then {
    Says(u16),
    /// An answer that is too large to store.
    SaysTooMuch,
    BreaksOff,
    Fails,
}

#[derive(Clone, Copy)]
enum Itself {
    Finishes,
    Abandons,
}

/// An app that settles its key itself, and then returns something.
fn app(itself: Itself, then: Then) -> Api {
    let ledger = TestLedger::new();
    let theirs = Arc::clone(&ledger.faults);
    Api::on(ledger, rules(), move |effects, request| {
        let ledger = Arc::clone(&theirs);
        async move {
            let reserved = request.extensions().get::<Reserved>().ok_or("no right")?;
            effects.add("in its own transaction");
            match itself {
                Itself::Finishes => {
                    let kept = StoredAnswer {
                        status: StatusCode::CREATED,
                        headers: vec![
                            ("content-type".into(), "text/plain".into()),
                            ("content-length".into(), "999".into()),
                            ("no header".into(), "at all\n".into()),
                        ],
                        body: Bytes::from_static(b"kept by the app"),
                    };
                    ledger.finish(reserved, &kept).await?;
                }
                Itself::Abandons => ledger.abandon(reserved).await?,
            }
            match then {
                Then::Says(status) => {
                    Ok(answer(StatusCode::from_u16(status)?, format!("said {status}")))
                }
                Then::SaysTooMuch => {
                    Ok(answer(StatusCode::OK, vec![b'x'; ANSWER_BODY_BYTES_MAX + 1]))
                }
                Then::BreaksOff => {
                    let mut answer = answer(StatusCode::OK, "");
                    *answer.body_mut() = broken();
                    Ok(answer)
                }
                Then::Fails => Err("died".into()),
            }
        }
    })
}

fn broken() -> Body {
    let half = Full::new(Bytes::from_static(b"half")).map_err(|never| match never {});
    Body::new(half.with_trailers(async { Some(Err(BoxError::from("reset"))) }))
}

#[tokio::test]
async fn an_answer_that_the_app_finished_itself_wins_over_its_response() {
    let said = [200, 429, 500, 502].map(Then::Says);
    for then in said.into_iter().chain([Then::BreaksOff]) {
        let api = app(Itself::Finishes, then);
        let first = api.send(charge("k")).await;
        assert_eq!((first.status, &first.body[..]), (201, &b"kept by the app"[..]));
        assert_eq!(first.outcome, Some(IdempotencyOutcome::Fresh), "its own request ran");
        assert_eq!(first.header("idempotency-replayed"), None);
        let replay = api.send(charge("k")).await;
        assert!(replay.is_replay());
        assert_eq!((replay.status, &replay.body), (201, &first.body));
        // The app wrote this header by hand, and the layer checks it before it is sent.
        assert_eq!(replay.header("content-type"), Some("text/plain"));
        assert_eq!(replay.header("content-length"), None);
        assert_eq!(api.effects.count(), 1);
    }
}

// The app is killed between its commit and its answer.
#[tokio::test]
async fn an_app_that_finished_and_died_is_replayed() {
    let api = app(Itself::Finishes, Then::Fails);
    assert_eq!(api.try_send(charge("k")).await.unwrap_err().to_string(), "died");
    let replay = api.send(charge("k")).await;
    assert!(replay.is_replay());
    assert_eq!((replay.status, &replay.body[..]), (201, &b"kept by the app"[..]));
    assert_eq!(api.effects.count(), 1);
}

#[tokio::test]
async fn a_key_that_the_app_abandoned_is_free_unless_its_response_is_a_success() {
    let api = app(Itself::Abandons, Then::Says(422));
    for run in 1..=2 {
        let heard = api.send(charge("k")).await;
        assert_eq!((heard.status, heard.outcome), (422, Some(IdempotencyOutcome::Fresh)));
        assert_eq!(api.effects.count(), run);
    }
    // The response is a success, so the work was done.
    for then in [Then::Says(200), Then::SaysTooMuch] {
        let api = app(Itself::Abandons, then);
        assert_eq!(api.send(charge("k")).await.status, 200);
        assert!(api.send(charge("k")).await.is_replay());
        assert_eq!(api.effects.count(), 1);
    }
}

/// An API with two runs, each of which waits for its own permit.
fn two_at_a_time(settle: Option<Settle>) -> (Api, Arc<Notify>, [Arc<Semaphore>; 2]) {
    let begun = Arc::new(Notify::new());
    let gates = [(); 2].map(|()| Arc::new(Semaphore::new(0)));
    let (started, wait) = (Arc::clone(&begun), gates.clone());
    let api = Api::new(rules(), move |effects, request| {
        let (started, wait) = (Arc::clone(&started), wait.clone());
        async move {
            let attempt = request.extensions().get::<Reserved>().ok_or("no right")?.attempt;
            let run = effects.add(format!("attempt {attempt}"));
            started.notify_one();
            wait[run - 1].acquire().await?.forget();
            let mut answer = answer(StatusCode::OK, format!("attempt {attempt}"));
            if let Some(settle) = settle {
                answer.extensions_mut().insert(settle);
            }
            Ok(answer)
        }
    });
    (api, begun, gates)
}

// A run that took too long must neither overwrite nor free the key that a later run holds.
#[tokio::test]
async fn a_late_run_gets_the_answer_of_its_successor() {
    let (api, begun, [first_gate, second_gate]) = two_at_a_time(None);
    let send = |api: Api| tokio::spawn(async move { api.send(charge("k")).await });
    let first = send(api.clone());
    soon(begun.notified()).await;
    api.ledger.pass(LEASE);
    let second = send(api.clone());
    soon(begun.notified()).await;
    second_gate.add_permits(1);
    assert_eq!(soon(second).await.unwrap().body, "attempt 2");
    first_gate.add_permits(1);
    assert_eq!(soon(first).await.unwrap().body, "attempt 2");
    assert_eq!(api.send(charge("k")).await.body, "attempt 2");
}

#[tokio::test]
async fn a_late_run_cannot_settle_the_key_of_a_running_successor() {
    for settle in [None, Some(Settle::Free), Some(Settle::Wait)] {
        let (api, begun, [first_gate, second_gate]) = two_at_a_time(settle);
        let send = |api: Api| tokio::spawn(async move { api.send(charge("k")).await });
        let first = send(api.clone());
        soon(begun.notified()).await;
        api.ledger.pass(LEASE);
        let second = send(api.clone());
        soon(begun.notified()).await;
        first_gate.add_permits(1);
        let late = soon(first).await.unwrap();
        match settle {
            // The run's own answer is not the one that is stored.
            None => {
                assert_eq!((late.status, late.outcome), (409, Some(IdempotencyOutcome::InProgress)))
            }
            Some(_) => assert_eq!((late.status, &late.body[..]), (200, &b"attempt 1"[..])),
        }
        assert_eq!(
            api.send(charge("k")).await.outcome,
            Some(IdempotencyOutcome::InProgress),
            "{settle:?}"
        );
        second_gate.add_permits(1);
        assert_eq!(soon(second).await.unwrap().body, "attempt 2");
        assert_eq!(api.effects.count(), 2);
    }
}
