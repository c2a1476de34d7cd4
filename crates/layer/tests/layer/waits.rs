//! Retries that arrive while the first request runs.

use std::sync::Arc;
use std::time::Duration;

use hapax_layer::{IdempotencyLayer, IdempotencyOutcome, LeasedUntil};
use hapax_sim::Act;
use http::StatusCode;
use tokio::time::Instant;
use tower::Layer as _;

use crate::support::{Api, Failed, LEASE, Paused, answer, charge, hear, paused, rules, soon};

const WAIT: Duration = Duration::from_secs(30);

#[tokio::test]
async fn a_retry_of_a_running_request_gets_409_with_retry_after() {
    let Paused { api, begun, gate } = paused(rules());
    let first = tokio::spawn({
        let api = api.clone();
        async move { api.send(charge("k")).await }
    });
    soon(begun.notified()).await;
    let retry = api.send(charge("k")).await;
    assert_eq!((retry.status, retry.outcome), (409, Some(IdempotencyOutcome::InProgress)));
    assert_eq!(retry.problem().as_deref(), Some("idempotency_in_progress"));
    assert_eq!(retry.header("retry-after"), Some("5"));
    // Close to the end of the lease, Retry-After is shorter.
    api.ledger.pass(LEASE - Duration::from_secs(2));
    assert_eq!(api.send(charge("k")).await.header("retry-after"), Some("2"));
    // Another request under the key is refused at any time.
    assert_eq!(api.send(charge("k").body("{}")).await.outcome, Some(IdempotencyOutcome::Mismatch));

    gate.add_permits(1);
    assert_eq!(soon(first).await.unwrap().status, 201);
    assert!(api.send(charge("k")).await.is_replay());
    assert_eq!(api.effects.count(), 1);
}

// A waiter that only polls would answer its client up to a second too late.
#[tokio::test(start_paused = true)]
async fn a_waiting_retry_is_woken_when_the_request_ends() {
    let Paused { api, begun, gate } = paused(rules().wait(WAIT));
    let send = |api: Api| tokio::spawn(async move { api.send(charge("k")).await });
    let first = send(api.clone());
    soon(begun.notified()).await;
    let waiters: Vec<_> = (0..5).map(|_| send(api.clone())).collect();
    // By now the polls are a second apart, and the next is due in more than half a second.
    tokio::time::sleep(Duration::from_secs(10)).await;
    let ended = Instant::now();
    gate.add_permits(1);
    assert!(!first.await.unwrap().is_replay());
    for waiter in waiters {
        let heard = waiter.await.unwrap();
        assert_eq!((heard.status, &heard.body[..]), (201, &b"run 1"[..]));
        assert!(heard.is_replay());
    }
    assert_eq!(ended.elapsed(), Duration::ZERO);
    assert_eq!(api.effects.count(), 1);
}

// The request runs in another process, which does not wake the waiters of this one.
#[tokio::test(start_paused = true)]
async fn a_retry_that_waits_for_another_process_sees_the_end_by_polling() {
    let Paused { api, begun, gate } = paused(rules());
    let first = tokio::spawn({
        let api = api.clone();
        async move { api.send(charge("k")).await }
    });
    soon(begun.notified()).await;
    let work = |_, _| async { panic!("it runs elsewhere") };
    let other = Api::on(api.ledger.clone(), rules().wait(WAIT), work);
    let waiter = tokio::spawn(async move { other.send(charge("k")).await });
    tokio::time::sleep(Duration::from_secs(10)).await;
    let ended = Instant::now();
    gate.add_permits(1);
    assert!(waiter.await.unwrap().is_replay());
    assert!(ended.elapsed() <= Duration::from_secs(1), "{:?}", ended.elapsed());
    first.await.unwrap();
    // The waiting request polls, with pauses.
    assert!(api.ledger.faults.begun(Act::Reserve) < 25);
}

#[tokio::test(start_paused = true)]
async fn a_retry_gets_409_when_its_wait_is_over() {
    let Paused { api, begun, gate } = paused(rules().wait(WAIT));
    let first = tokio::spawn({
        let api = api.clone();
        async move { api.send(charge("k")).await }
    });
    soon(begun.notified()).await;
    let asked = Instant::now();
    let heard = api.send(charge("k")).await;
    assert_eq!(heard.outcome, Some(IdempotencyOutcome::InProgress));
    assert_eq!(asked.elapsed(), WAIT);
    gate.add_permits(1);
    first.await.unwrap();
}

// The first request died with its process. Its key must not be locked without an end.
#[tokio::test(start_paused = true)]
async fn a_waiting_retry_takes_over_when_the_lease_ends() {
    let Paused { api: dead, begun, .. } = paused(rules());
    let first = tokio::spawn({
        let dead = dead.clone();
        async move { dead.send(charge("k")).await }
    });
    soon(begun.notified()).await;
    let api = Api::on(dead.ledger.clone(), rules().wait(WAIT), |effects, _| async move {
        effects.add("taken over");
        Ok(answer(StatusCode::OK, "taken over"))
    });
    let waiter = tokio::spawn({
        let api = api.clone();
        async move { api.send(charge("k")).await }
    });
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(api.effects.count(), 0);
    dead.ledger.pass(LEASE);
    let heard = waiter.await.unwrap();
    assert_eq!(
        (heard.outcome, &heard.body[..]),
        (Some(IdempotencyOutcome::Fresh), &b"taken over"[..])
    );
    first.abort();
}

// A retry that waits for a refused request must not be refused with it.
#[tokio::test(start_paused = true)]
async fn a_retry_that_waits_for_a_freed_key_runs() {
    let Paused { api, begun, gate } = paused(rules().wait(WAIT));
    let turning_away = tower::service_fn({
        let (begun, gate) = (Arc::clone(&begun), Arc::clone(&gate));
        move |_| {
            let (begun, gate) = (Arc::clone(&begun), Arc::clone(&gate));
            async move {
                begun.notify_one();
                gate.acquire().await?.forget();
                Ok::<_, Failed>(answer(StatusCode::TOO_MANY_REQUESTS, "later"))
            }
        }
    });
    let first = tokio::spawn(hear(api.layer.layer(turning_away), charge("k").into_request()));
    soon(begun.notified()).await;
    let waiter = tokio::spawn({
        let api = api.clone();
        async move { api.send(charge("k")).await }
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    gate.add_permits(2);
    assert_eq!(first.await.unwrap().unwrap().status, 429);
    assert_eq!(waiter.await.unwrap().status, 201);
    assert_eq!(api.effects.count(), 1);
}

// A drain must wait for running work, and must not wait for work that has ended.
#[tokio::test]
async fn a_drain_ends_when_nothing_runs() {
    let Paused { api, begun, gate } = paused(rules());
    soon(api.layer.drained()).await;
    let client = tokio::spawn({
        let api = api.clone();
        async move { api.send(charge("k")).await }
    });
    soon(begun.notified()).await;
    client.abort();
    let layer: IdempotencyLayer<_> = api.layer.clone();
    let drained = tokio::spawn(async move { layer.drained().await });
    tokio::task::yield_now().await;
    assert!(!drained.is_finished());
    gate.add_permits(1);
    soon(drained).await.unwrap();
    assert!(api.send(charge("k")).await.is_replay());
}

#[tokio::test(start_paused = true)]
async fn the_lease_is_counted_from_the_question_and_not_from_its_answer() {
    // The ledger reserves at once and returns after most of the lease. If the lease were counted from the
    // return, the work would still run during the next attempt, which gets the key when the lease ends.
    let api = Api::new(rules(), |_, request| async move {
        let LeasedUntil(until) = *request.extensions().get().ok_or("no lease")?;
        let left = until.saturating_duration_since(Instant::now());
        Ok(answer(StatusCode::OK, left.as_secs().to_string()))
    });
    let permits = api.ledger.faults.block_answers(Act::Reserve);
    let asking = tokio::spawn({
        let api = api.clone();
        async move { api.send(charge("k")).await }
    });
    soon(api.ledger.reserved()).await;
    tokio::time::advance(LEASE - Duration::from_secs(7)).await;
    permits.add_permits(1);
    assert_eq!(soon(asking).await.unwrap().body, "7");
}
