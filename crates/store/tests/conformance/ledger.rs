//! Idempotency-Keys: one runs, everybody else is told the truth, and an old right is void.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::Timestamp;
use hapax_core::ledger::{
    Answer, Fingerprint, IdempotencyKey, Reservation, ReserveAsk, Reserved, Scope,
};
use hapax_core::store::{Held, Horizon};
use http::{Method, StatusCode};
use tokio::sync::Barrier;

use crate::harness::{Working, World};

/// How long a reservation of the cases is leased, and how long its answer is kept, in seconds.
const LEASED: i64 = 60;
const KEPT: i64 = 3_600;

pub(crate) fn scope(principal: &str) -> Scope {
    Scope::new("api", principal, &Method::POST, "/charges")
}

pub(crate) fn ask(key: &str, request: &str) -> ReserveAsk {
    ReserveAsk {
        scope: scope("acct_1"),
        key: IdempotencyKey::parse(key.as_bytes()).expect("a key"),
        fingerprint: Fingerprint::of(None, request.as_bytes(), &[]),
        lease: Duration::from_secs(LEASED.unsigned_abs()),
        ttl: Duration::from_secs(KEPT.unsigned_abs()),
    }
}

pub(crate) fn answer(body: &str) -> Answer {
    Answer { status: StatusCode::CREATED, headers: Vec::new(), body: body.to_owned().into() }
}

impl<S: Working> World<S> {
    async fn reserve(&self, key: &str) -> Reservation {
        self.store.reserve(ask(key, "request")).await.expect("reserves")
    }

    async fn fresh(&self, key: &str) -> Reserved {
        match self.reserve(key).await {
            Reservation::Fresh(reserved) => reserved,
            other => panic!("{key}: {other:?}"),
        }
    }

    async fn finish(&self, reserved: &Reserved, body: &str) -> Held {
        self.store.finish(reserved, &answer(body)).await.expect("finishes")
    }

    pub(crate) async fn prune_keys(&self, limit: usize) {
        let horizon = Horizon { events_before: Timestamp::MIN, keys_before: Vec::new() };
        for _ in 0..100 {
            if !self.store.prune(horizon.clone(), limit).await.expect("prunes") {
                return;
            }
        }
        panic!("pruning never ends");
    }

    /// What fifty are told who ask for this key at the same instant, on as many tasks.
    async fn fifty(&self, key: &str) -> Vec<Reservation> {
        let together = Arc::new(Barrier::new(50));
        let tasks: Vec<_> = (0..50)
            .map(|_| {
                let (store, together) = (Arc::clone(&self.store), Arc::clone(&together));
                let ask = ask(key, "request");
                tokio::spawn(async move {
                    together.wait().await;
                    store.reserve(ask).await.expect("reserves")
                })
            })
            .collect();
        let mut told = Vec::new();
        for task in tasks {
            told.push(task.await.expect("no panic"));
        }
        told
    }
}

/// The one that runs; all others wait for it.
fn only_fresh(told: &[Reservation]) -> &Reserved {
    let waits = |one: &&Reservation| matches!(one, Reservation::InProgress { .. });
    assert_eq!(told.iter().filter(waits).count(), told.len() - 1, "{told:?}");
    let fresh = told.iter().find_map(|one| match one {
        Reservation::Fresh(reserved) => Some(reserved),
        Reservation::Replay(_) | Reservation::InProgress { .. } | Reservation::Mismatch => None,
    });
    fresh.expect("one runs")
}

/// In an order that every store keeps: names may be moved, the values of one name may not.
fn by_name(answer: &Answer) -> Answer {
    let mut answer = answer.clone();
    answer.headers.sort_by(|one, other| one.0.cmp(&other.0));
    answer
}

pub(crate) async fn of_fifty_that_ask_at_once_one_runs<S: Working>(world: World<S>) {
    // B-5: whoever looks first and inserts then has two winners among these.
    for n in 0..4 {
        let told = world.fifty(&format!("k{n}")).await;
        let reserved = only_fresh(&told).clone();
        assert_eq!(reserved.attempt, 1);
        assert_eq!(world.finish(&reserved, "done").await, Held::Kept);
        let replayed = world.fifty(&format!("k{n}")).await;
        assert!(replayed.iter().all(|one| *one == Reservation::Replay(answer("done"))));
    }
}

pub(crate) async fn a_replay_is_the_answer_as_it_was_given<S: Working>(world: World<S>) {
    // Bytes that are no text, a name several times with others between, what JSON must escape, and
    // nothing at all.
    let header = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
    let headers = [
        ("x-request", "1"),
        ("link", "</a>; rel=\"next\""),
        ("content-type", "application/octet-stream"),
        ("link", "</b>"),
        ("x-empty", ""),
        ("link", "\\ \u{e4}"),
    ];
    let bytes: Vec<u8> = (0..=255).cycle().take(70_000).collect();
    for (key, given) in [
        (
            "full",
            Answer {
                status: StatusCode::ACCEPTED,
                headers: headers.map(header).into(),
                body: bytes.into(),
            },
        ),
        (
            "empty",
            Answer { status: StatusCode::NO_CONTENT, headers: Vec::new(), body: Bytes::new() },
        ),
        ("odd", Answer { status: StatusCode::from_u16(599).expect("a status"), ..answer("\0") }),
    ] {
        let reserved = world.fresh(key).await;
        let held = world.store.finish(&reserved, &given).await.expect("finishes");
        assert_eq!(held, Held::Kept);
        for _ in 0..2 {
            match world.reserve(key).await {
                Reservation::Replay(told) => assert_eq!(by_name(&told), by_name(&given)),
                other => panic!("{key}: {other:?}"),
            }
        }
    }
}

pub(crate) async fn another_request_under_the_same_key_is_a_mismatch_whatever_became_of_the_first<
    S: Working,
>(
    world: World<S>,
) {
    // S-41: told "in progress", a client would come again and again; told the answer, it would have
    // somebody else's.
    let other = async || world.store.reserve(ask("k", "other")).await.expect("reserves");
    let reserved = world.fresh("k").await;
    assert_eq!(other().await, Reservation::Mismatch, "while it runs");
    world.pass(LEASED + 1);
    assert_eq!(other().await, Reservation::Mismatch, "while nobody runs it");
    assert_eq!(world.finish(&reserved, "first").await, Held::Kept);
    assert_eq!(other().await, Reservation::Mismatch, "when it is done");
    assert_eq!(world.reserve("k").await, Reservation::Replay(answer("first")));
    world.pass(KEPT);
    assert!(matches!(other().await, Reservation::Fresh(_)), "when it is forgotten");
    assert_eq!(world.reserve("k").await, Reservation::Mismatch, "and now it is theirs");
}

pub(crate) async fn the_same_key_in_another_scope_is_another_key<S: Working>(world: World<S>) {
    // S-40: two accounts that count their requests from one.
    let reserved = world.fresh("1").await;
    assert_eq!(world.finish(&reserved, "ours").await, Held::Kept);
    let theirs = ReserveAsk { scope: scope("acct_2"), ..ask("1", "request") };
    match world.store.reserve(theirs).await.expect("reserves") {
        Reservation::Fresh(theirs) => {
            assert_eq!(world.finish(&theirs, "theirs").await, Held::Kept);
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(world.reserve("1").await, Reservation::Replay(answer("ours")));
}

pub(crate) async fn whoever_waits_is_told_how_long_at_most<S: Working>(world: World<S>) {
    // It becomes a Retry-After: too short and they come for nothing, too long and they wait for it.
    world.fresh("k").await;
    let left = |seconds: i64| Reservation::InProgress {
        remaining: Duration::from_secs(seconds.unsigned_abs()),
    };
    assert_eq!(world.reserve("k").await, left(LEASED));
    world.pass(LEASED - 1);
    assert_eq!(world.reserve("k").await, left(1));
    world.pass(1);
    assert!(matches!(world.reserve("k").await, Reservation::Fresh(_)));
    assert_eq!(world.reserve("k").await, left(LEASED), "a new lease");
}

pub(crate) async fn a_lease_that_ran_out_is_taken_over_and_the_old_right_is_void<S: Working>(
    world: World<S>,
) {
    // I-45, B-33: the first was paused, not dead, and comes back with its own answer.
    let first = world.fresh("k").await;
    assert_eq!(first.attempt, 1);
    world.pass(LEASED);
    let second = world.fresh("k").await;
    assert_eq!(second.attempt, 2);
    assert!(second.fence > first.fence, "{first:?}, {second:?}");
    assert_eq!(world.finish(&first, "late").await, Held::Lost);
    world.store.abandon(&first).await.expect("has nothing to give up");
    assert!(matches!(world.reserve("k").await, Reservation::InProgress { .. }));
    assert_eq!(world.finish(&second, "second").await, Held::Kept);
    assert_eq!(world.finish(&first, "later").await, Held::Lost);
    assert_eq!(world.reserve("k").await, Reservation::Replay(answer("second")));
}

pub(crate) async fn of_fifty_that_find_a_lease_over_one_takes_it<S: Working>(world: World<S>) {
    // No insert decides here: all of them see the same old row.
    for n in 0..4 {
        let key = format!("k{n}");
        let first = world.fresh(&key).await;
        world.pass(LEASED);
        let told = world.fifty(&key).await;
        let second = only_fresh(&told);
        assert_eq!(second.attempt, 2);
        assert!(second.fence > first.fence);
    }
}

pub(crate) async fn a_late_answer_counts_while_nobody_else_runs<S: Working>(world: World<S>) {
    // The work is done; to throw its answer away would be to do it again.
    let reserved = world.fresh("k").await;
    world.pass(LEASED + 1);
    assert_eq!(world.finish(&reserved, "late").await, Held::Kept);
    assert_eq!(world.reserve("k").await, Reservation::Replay(answer("late")));
}

pub(crate) async fn a_late_answer_beside_a_takeover_has_one_winner<S: Working>(world: World<S>) {
    // Both see a lease that ran out. Had both their way, the work would be done twice, or its answer
    // be lost.
    for n in 0..20 {
        let key = format!("k{n}");
        let first = world.fresh(&key).await;
        world.pass(LEASED);
        let (finishing, asking) = (Arc::clone(&world.store), Arc::clone(&world.store));
        let ask = ask(&key, "request");
        let finish =
            tokio::spawn(async move { finishing.finish(&first, &answer("late")).await.unwrap() });
        let reserve = tokio::spawn(async move { asking.reserve(ask).await.unwrap() });
        let (held, told) = (finish.await.expect("no panic"), reserve.await.expect("no panic"));
        match held {
            Held::Kept => assert_eq!(told, Reservation::Replay(answer("late"))),
            Held::Lost => assert!(matches!(told, Reservation::Fresh(_)), "{told:?}"),
        }
    }
}

pub(crate) async fn an_answer_is_kept_once_per_fence<S: Working>(world: World<S>) {
    // The same call again, as after an answer that was lost, and one with another answer.
    let reserved = world.fresh("k").await;
    assert_eq!(world.finish(&reserved, "first").await, Held::Kept);
    assert_eq!(world.finish(&reserved, "first").await, Held::Lost);
    assert_eq!(world.finish(&reserved, "second").await, Held::Lost);
    assert_eq!(world.reserve("k").await, Reservation::Replay(answer("first")));
    let made_up = Reserved { fence: hapax_core::job::Fence(1_000_000), ..world.fresh("l").await };
    assert_eq!(world.finish(&made_up, "made up").await, Held::Lost);
}

pub(crate) async fn an_abandoned_key_is_free_and_a_finished_one_cannot_be_abandoned<S: Working>(
    world: World<S>,
) {
    // Twice, and by who gave it up long ago while somebody else runs.
    let first = world.fresh("k").await;
    for _ in 0..2 {
        world.store.abandon(&first).await.expect("abandons");
    }
    let second = world.fresh("k").await;
    assert_eq!(second.attempt, 1, "nothing was done for it before");
    world.store.abandon(&first).await.expect("has nothing to give up");
    assert!(matches!(world.reserve("k").await, Reservation::InProgress { .. }));
    assert_eq!(world.finish(&first, "first").await, Held::Lost);
    assert_eq!(world.finish(&second, "second").await, Held::Kept);
    world.store.abandon(&second).await.expect("has nothing to give up");
    assert_eq!(world.reserve("k").await, Reservation::Replay(answer("second")));
}

pub(crate) async fn what_an_earlier_attempt_may_have_done_is_not_forgotten_with_a_later_one<
    S: Working,
>(
    world: World<S>,
) {
    // The first was cut in the middle, the second never began. Told that it is the first, the third
    // would not look for what is there already.
    let first = world.fresh("k").await;
    world.pass(LEASED);
    for _ in 0..3 {
        let second = world.fresh("k").await;
        assert_eq!(second.attempt, 2);
        world.store.abandon(&second).await.expect("abandons");
        world.store.abandon(&second).await.expect("has nothing to give up");
        assert_eq!(world.finish(&second, "second").await, Held::Lost);
    }
    assert_eq!(world.finish(&first, "first").await, Held::Lost);
    let other = world.store.reserve(ask("k", "other")).await.expect("reserves");
    assert_eq!(other, Reservation::Mismatch, "it is the key of the first");
    let third = world.fresh("k").await;
    assert_eq!(third.attempt, 2);
    assert_eq!(world.finish(&third, "third").await, Held::Kept);
    world.pass(KEPT);
    world.prune_keys(10).await;
    assert_eq!(world.fresh("k").await.attempt, 1);
}

pub(crate) async fn a_key_past_its_ttl_is_as_good_as_new<S: Working>(world: World<S>) {
    // The time is that of the answer, not of the request: a long one must not be forgotten early.
    let reserved = world.fresh("k").await;
    world.pass(LEASED / 2);
    assert_eq!(world.finish(&reserved, "first").await, Held::Kept);
    world.pass(KEPT - 1);
    assert_eq!(world.reserve("k").await, Reservation::Replay(answer("first")));
    world.pass(1);
    let anew = world.fresh("k").await;
    assert_eq!(anew.attempt, 1, "{anew:?}");
    assert!(anew.fence > reserved.fence);
    assert_eq!(world.finish(&reserved, "old").await, Held::Lost);
}

pub(crate) async fn pruning_forgets_what_is_past_its_ttl_and_nothing_else<S: Working>(
    world: World<S>,
) {
    // More than one slice takes; one that is leased for longer than it is kept, and one that was
    // answered late. What was forgotten is told by its attempt: a row that is left counts on.
    let short = |key: &str, lease: u64| ReserveAsk {
        lease: Duration::from_secs(lease),
        ttl: Duration::from_secs(20),
        ..ask(key, "request")
    };
    for n in 0..7 {
        let told = world.store.reserve(short(&format!("dead{n}"), 10)).await.expect("reserves");
        assert!(matches!(told, Reservation::Fresh(_)), "{told:?}");
    }
    world.store.reserve(short("leased", 100)).await.expect("reserves");
    let late = world.store.reserve(short("late", 10)).await.expect("reserves");
    world.pass(15);
    match late {
        Reservation::Fresh(late) => assert_eq!(world.finish(&late, "late").await, Held::Kept),
        other => panic!("{other:?}"),
    }
    world.prune_keys(2).await;
    for n in 0..7 {
        // Past its lease, not past its ttl: forgotten, it would be a first attempt.
        let told = world.store.reserve(short(&format!("dead{n}"), 10)).await.expect("reserves");
        assert!(matches!(told, Reservation::Fresh(Reserved { attempt: 2, .. })), "{told:?}");
    }
    world.pass(19);
    world.prune_keys(2).await;
    assert_eq!(world.reserve("late").await, Reservation::Replay(answer("late")));
    world.pass(1);
    world.prune_keys(2).await;
    for n in 0..7 {
        let told = world.store.reserve(short(&format!("dead{n}"), 10)).await.expect("reserves");
        assert!(matches!(told, Reservation::Fresh(Reserved { attempt: 1, .. })), "{told:?}");
    }
    let leased = world.reserve("leased").await;
    assert!(matches!(leased, Reservation::InProgress { .. }), "{leased:?}");
    assert!(matches!(world.reserve("late").await, Reservation::Fresh(_)));
}

pub(crate) async fn no_fence_comes_twice<S: Working>(world: World<S>) {
    // Whatever ends a reservation takes its row along, or leaves it: a fence that depends on the row
    // is given out again, and an old right with it.
    let mut fences = HashSet::new();
    for _ in 0..3 {
        let given_up = world.fresh("k").await;
        world.store.abandon(&given_up).await.expect("abandons");
        assert!(fences.insert(given_up.fence), "{given_up:?}");
        let dead = world.fresh("k").await;
        assert!(fences.insert(dead.fence), "{dead:?}");
        world.pass(LEASED);
        let done = world.fresh("k").await;
        assert!(fences.insert(done.fence), "{done:?}");
        assert_eq!(world.finish(&done, "done").await, Held::Kept);
        world.pass(KEPT);
        world.prune_keys(10).await;
        assert_eq!(world.finish(&done, "again").await, Held::Lost);
    }
}
