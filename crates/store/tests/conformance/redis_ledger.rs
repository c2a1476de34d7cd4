//! Idempotency-Keys in a real Redis, which is flushed, killed and used by many clients at once.
//! `hapax_core::ledger` has the contract; the clock here is Redis's own, so leases are short and
//! waited for.

use std::time::{Duration, Instant};

use bytes::Bytes;
use hapax_core::ledger::{
    Fingerprint, IdempotencyKey, Ledger, Quota, Reservation, ReserveAsk, Reserved, Scope,
    StoredAnswer,
};
use hapax_core::store::{Held, StoreError};
use hapax_sim::Redis;
use hapax_store::RedisLedger;
use http::{Method, StatusCode};

/// Far beyond any expected wait: a test that waits this long would wait for ever.
const FOREVER: Duration = Duration::from_secs(60);
const LONG: Duration = Duration::from_secs(3_600);
const SHORT: Duration = Duration::from_millis(40);

fn ask(key: &str, print: u8, lease: Duration) -> ReserveAsk {
    ReserveAsk {
        scope: Scope::new("api", "acct_42", &Method::POST, "/charges"),
        key: IdempotencyKey::parse(key.as_bytes()).unwrap(),
        fingerprint: Fingerprint([print; 32]),
        lease,
        ttl: LONG,
        quota: None,
    }
}

fn created() -> StoredAnswer {
    StoredAnswer {
        status: StatusCode::CREATED,
        headers: [("content-type", "application/json"), ("set-cookie", "a"), ("set-cookie", "b")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into(),
        body: Bytes::from_static(b"{\"charge\":\"\xff\0\"}"),
    }
}

async fn fresh(ledger: &RedisLedger, ask: ReserveAsk) -> Reserved {
    match ledger.reserve(ask).await.unwrap() {
        Reservation::Fresh(reserved) => reserved,
        other => panic!("{other:?}"),
    }
}

/// The reservation that succeeds once the current lease has expired.
async fn fresh_at_last(ledger: &RedisLedger, ask: ReserveAsk) -> Reserved {
    let until = Instant::now() + FOREVER;
    loop {
        match ledger.reserve(ask.clone()).await.unwrap() {
            Reservation::Fresh(reserved) => return reserved,
            Reservation::InProgress { remaining } => {
                assert!(remaining <= SHORT && Instant::now() < until, "{remaining:?}");
                tokio::task::yield_now().await;
            }
            other => panic!("{other:?}"),
        }
    }
}

// A ledger that reads first and writes afterwards gives two requests the same key.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_fifty_concurrent_requests_one_runs() {
    let redis = Redis::start().await;
    let (one, two) = (
        RedisLedger::connect(&redis.url()).await.unwrap(),
        RedisLedger::connect(&redis.url()).await.unwrap(),
    );
    for round in 0..20 {
        let tasks: Vec<_> = (0..50)
            .map(|n| {
                let ledger = if n % 2 == 0 { one.clone() } else { two.clone() };
                let ask = ask(&format!("round-{round}"), 1, LONG);
                tokio::spawn(async move { ledger.reserve(ask).await.unwrap() })
            })
            .collect();
        let mut runs = 0;
        for task in tasks {
            match task.await.unwrap() {
                Reservation::Fresh(reserved) => {
                    assert_eq!(reserved.attempt, 1);
                    runs += 1;
                }
                Reservation::InProgress { remaining } => assert!(remaining <= LONG),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(runs, 1);
    }
}

#[tokio::test]
async fn the_answer_is_kept_once_and_replayed_byte_for_byte() {
    let redis = Redis::start().await;
    let ledger = RedisLedger::connect(&redis.url()).await.unwrap();
    let reserved = fresh(&ledger, ask("k", 1, LONG)).await;
    // The mismatch of the fingerprint is reported first, although another request runs.
    assert_eq!(ledger.reserve(ask("k", 2, LONG)).await.unwrap(), Reservation::Mismatch);
    assert_eq!(ledger.finish(&reserved, &created()).await.unwrap(), Held::Kept);
    assert_eq!(ledger.finish(&reserved, &created()).await.unwrap(), Held::Lost);
    ledger.abandon(&reserved).await.unwrap();
    let replay = ledger.reserve(ask("k", 1, LONG)).await.unwrap();
    assert_eq!(replay, Reservation::Replay(created()));
    assert_eq!(ledger.reserve(ask("k", 2, LONG)).await.unwrap(), Reservation::Mismatch);
    // Another scope is another key.
    let elsewhere = Scope::new("api", "acct_43", &Method::POST, "/charges");
    fresh(&ledger, ReserveAsk { scope: elsewhere, ..ask("k", 2, LONG) }).await;
}

// A worker that was only slow must not overwrite the answer of its successor.
#[tokio::test]
async fn a_lease_that_ran_out_is_taken_over_and_the_old_right_is_void() {
    let redis = Redis::start().await;
    let ledger = RedisLedger::connect(&redis.url()).await.unwrap();
    let slow = fresh(&ledger, ask("k", 1, SHORT)).await;
    let next = fresh_at_last(&ledger, ask("k", 1, LONG)).await;
    assert!(next.fence > slow.fence);
    assert_eq!((slow.attempt, next.attempt), (1, 2));
    assert_eq!(ledger.finish(&slow, &created()).await.unwrap(), Held::Lost);
    ledger.abandon(&slow).await.unwrap();
    assert!(matches!(
        ledger.reserve(ask("k", 1, LONG)).await.unwrap(),
        Reservation::InProgress { .. }
    ));
    ledger.abandon(&next).await.unwrap();
    assert_eq!(ledger.finish(&next, &created()).await.unwrap(), Held::Lost);
    // The key is free, but keeps the fingerprint of the first request, which may have been carried out.
    assert_eq!(ledger.reserve(ask("k", 2, LONG)).await.unwrap(), Reservation::Mismatch);
    // No fence is issued twice, not even by a Redis that has lost everything.
    let third = fresh(&ledger, ask("k", 1, LONG)).await;
    assert_eq!(third.attempt, 2);
    assert!(third.fence > next.fence);
    redis.flush_all().await;
    let fourth = fresh(&ledger, ask("k", 2, LONG)).await;
    assert!(fourth.fence > third.fence);
    assert_eq!(ledger.finish(&third, &created()).await.unwrap(), Held::Lost);
}

#[tokio::test]
async fn a_finish_after_the_lease_counts_until_the_key_is_reserved_again() {
    let redis = Redis::start().await;
    let ledger = RedisLedger::connect(&redis.url()).await.unwrap();
    let slow = fresh(&ledger, ask("late", 1, SHORT)).await;
    // This lease is as long and began later: once it is over, the first one is over too.
    fresh(&ledger, ask("clock", 1, SHORT)).await;
    fresh_at_last(&ledger, ask("clock", 1, SHORT)).await;
    assert_eq!(ledger.finish(&slow, &created()).await.unwrap(), Held::Kept);
    let replay = ledger.reserve(ask("late", 1, LONG)).await.unwrap();
    assert_eq!(replay, Reservation::Replay(created()));
}

#[tokio::test]
async fn a_key_past_its_ttl_is_as_good_as_new() {
    let redis = Redis::start().await;
    let ledger = RedisLedger::connect(&redis.url()).await.unwrap();
    let brief = |print| ReserveAsk { ttl: SHORT, ..ask("k", print, SHORT) };
    let reserved = fresh(&ledger, brief(1)).await;
    assert_eq!(ledger.finish(&reserved, &created()).await.unwrap(), Held::Kept);
    let until = Instant::now() + FOREVER;
    // Another request under the same key is refused for as long as the first is known.
    loop {
        match ledger.reserve(brief(2)).await.unwrap() {
            Reservation::Fresh(again) => break assert_eq!(again.attempt, 1),
            Reservation::Mismatch => assert!(Instant::now() < until),
            other => panic!("{other:?}"),
        }
        tokio::task::yield_now().await;
    }
}

// If Redis deleted a key while its request runs, a second request would run alongside it.
#[tokio::test]
async fn a_key_is_not_forgotten_while_its_request_may_run() {
    let redis = Redis::start().await;
    let ledger = RedisLedger::connect(&redis.url()).await.unwrap();
    fresh(&ledger, ReserveAsk { ttl: SHORT, ..ask("k", 1, LONG) }).await;
    // This lease lasts as long as the TTL and began later: once it is over, the TTL is over too.
    fresh(&ledger, ask("clock", 1, SHORT)).await;
    fresh_at_last(&ledger, ask("clock", 1, SHORT)).await;
    let reservation = ledger.reserve(ask("k", 1, LONG)).await.unwrap();
    assert!(matches!(reservation, Reservation::InProgress { .. }), "{reservation:?}");
}

#[tokio::test]
async fn an_unreachable_redis_is_an_error_and_is_used_again_later() {
    let redis = Redis::start().await;
    let ledger = RedisLedger::connect(&redis.url()).await.unwrap();
    fresh(&ledger, ask("before", 1, LONG)).await;
    redis.kill().await;
    let gone = ledger.reserve(ask("gone", 1, LONG)).await;
    assert!(matches!(gone, Err(StoreError::Unavailable(_))), "{gone:?}");
    redis.start_again().await;
    let until = Instant::now() + FOREVER;
    while ledger.reserve(ask("after", 1, LONG)).await.is_err() {
        assert!(Instant::now() < until);
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_url_with_a_password_is_never_repeated() {
    let error = RedisLedger::connect("redis://:hunter2@127.0.0.1:1/").await.unwrap_err();
    assert!(!format!("{error} {error:?}").contains("hunter2"));
    let error = RedisLedger::connect("hunter2").await.unwrap_err();
    assert!(!format!("{error} {error:?}").contains("hunter2"));
}

/// A request of this caller under a quota.
fn limited(caller: &str, key: &str, keys: u64, bytes: u64) -> ReserveAsk {
    let scope = Scope::new("api", caller, &Method::POST, "/charges");
    ReserveAsk { scope, quota: Some(Quota { keys, bytes }), ..ask(key, 1, LONG) }
}

// With a check outside the script, several requests would get the last place.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_caller_keeps_as_many_keys_as_its_quota_says_whatever_ends_them() {
    let redis = Redis::start().await;
    let ledger = RedisLedger::connect(&redis.url()).await.unwrap();
    let tasks: Vec<_> = (0..50)
        .map(|n| {
            let (ledger, ask) = (ledger.clone(), limited("a", &format!("k{n}"), 5, 1 << 30));
            tokio::spawn(async move { ledger.reserve(ask).await.unwrap() })
        })
        .collect();
    let mut rights = Vec::new();
    for task in tasks {
        match task.await.unwrap() {
            Reservation::Fresh(reserved) => rights.push(reserved),
            Reservation::OverQuota => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(rights.len(), 5);
    let more = || limited("a", "more", 5, 1 << 30);
    // Known keys are never refused, another caller has a quota of its own.
    assert_eq!(ledger.finish(&rights[0], &created()).await.unwrap(), Held::Kept);
    let known = limited("a", rights[0].key.as_str(), 5, 1 << 30);
    assert_eq!(ledger.reserve(known).await.unwrap(), Reservation::Replay(created()));
    assert_eq!(ledger.reserve(more()).await.unwrap(), Reservation::OverQuota);
    fresh(&ledger, limited("b", "more", 5, 1 << 30)).await;
    // A key that is abandoned, or expires, frees its place once.
    for _ in 0..2 {
        ledger.abandon(&rights[1]).await.unwrap();
    }
    fresh(&ledger, ReserveAsk { ttl: SHORT, lease: SHORT, ..more() }).await;
    let until = Instant::now() + FOREVER;
    let after = limited("a", "after", 5, 1 << 30);
    loop {
        match ledger.reserve(after.clone()).await.unwrap() {
            Reservation::Fresh(_) => break,
            Reservation::OverQuota => assert!(Instant::now() < until),
            other => panic!("{other:?}"),
        }
        tokio::task::yield_now().await;
    }
    let last = limited("a", "last", 5, 1 << 30);
    assert_eq!(ledger.reserve(last).await.unwrap(), Reservation::OverQuota);
}

#[tokio::test]
async fn bytes_and_fair_shares_hold_in_redis_too() {
    let redis = Redis::start().await;
    let ledger = RedisLedger::connect(&redis.url()).await.unwrap();
    let large = StoredAnswer { body: vec![b'x'; 600].into(), ..created() };
    let mut rights = Vec::new();
    for key in ["k1", "k2", "k3"] {
        rights.push(fresh(&ledger, limited("a", key, 100, 1_000)).await);
    }
    for right in &rights {
        assert_eq!(ledger.finish(right, &large).await.unwrap(), Held::Kept);
    }
    for (key, expected) in [("k1", &large), ("k2", &large), ("k3", &StoredAnswer::not_kept())] {
        let reservation = ledger.reserve(limited("a", key, 100, 1_000)).await.unwrap();
        assert_eq!(reservation, Reservation::Replay(expected.clone()), "{key}");
    }
    let reservation = ledger.reserve(limited("a", "k4", 100, 1_000)).await.unwrap();
    assert_eq!(reservation, Reservation::OverQuota);
    // Each caller may have two keys, and all together 32.
    redis.flush_all().await;
    for n in 0..16 {
        for key in ["a", "b"] {
            fresh(&ledger, limited(&format!("acct_{n}"), key, 2, 1 << 30)).await;
        }
    }
    fresh(&ledger, limited("acct_16", "a", 2, 1 << 30)).await;
    let reservation = ledger.reserve(limited("acct_16", "b", 2, 1 << 30)).await.unwrap();
    assert_eq!(reservation, Reservation::OverQuota);
}
