//! Idempotency-Keys: one request runs, every other one gets the right answer, and an old fence is
//! void.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::ledger::{
    Fingerprint, IdempotencyKey, Quota, Reservation, ReserveAsk, Reserved, Scope, StoredAnswer,
};
use hapax_core::store::{Held, Horizon, KeyDeleted, KeyFilter, KeyPosition, KeyRecord};
use http::{Method, StatusCode};
use tokio::sync::Barrier;

use crate::harness::{Working, World};

/// How long a reservation of the cases is leased, and how long its answer is stored, in seconds.
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
        quota: None,
    }
}

pub(crate) fn answer(body: &str) -> StoredAnswer {
    StoredAnswer { status: StatusCode::CREATED, headers: Vec::new(), body: body.to_owned().into() }
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
        let horizon = Horizon::forever();
        for _ in 0..100 {
            if !self.store.prune(horizon.clone(), limit).await.expect("prunes") {
                return;
            }
        }
        panic!("pruning never ends");
    }

    /// The answers to fifty requests that reserve this key at the same instant, on as many tasks.
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
        let mut reservations = Vec::new();
        for task in tasks {
            reservations.push(task.await.expect("no panic"));
        }
        reservations
    }
}

/// The one request that runs; all others wait for it.
fn only_fresh(reservations: &[Reservation]) -> &Reserved {
    let waits = |one: &&Reservation| matches!(one, Reservation::InProgress { .. });
    assert_eq!(
        reservations.iter().filter(waits).count(),
        reservations.len() - 1,
        "{reservations:?}"
    );
    let fresh = reservations.iter().find_map(|one| match one {
        Reservation::Fresh(reserved) => Some(reserved),
        Reservation::Replay(_)
        | Reservation::InProgress { .. }
        | Reservation::Mismatch
        | Reservation::OverQuota => None,
    });
    fresh.expect("one runs")
}

/// The headers of an answer in an order that every store keeps: names may be moved, the values of
/// one name may not.
fn by_name(answer: &StoredAnswer) -> StoredAnswer {
    let mut answer = answer.clone();
    answer.headers.sort_by(|one, other| one.0.cmp(&other.0));
    answer
}

pub(crate) async fn of_fifty_concurrent_requests_one_runs<S: Working>(world: World<S>) {
    // A store that checks first and inserts afterwards would let two of these requests run.
    for n in 0..4 {
        let reservations = world.fifty(&format!("k{n}")).await;
        let reserved = only_fresh(&reservations).clone();
        assert_eq!(reserved.attempt, 1);
        assert_eq!(world.finish(&reserved, "done").await, Held::Kept);
        let replayed = world.fifty(&format!("k{n}")).await;
        assert!(replayed.iter().all(|one| *one == Reservation::Replay(answer("done"))));
    }
}

pub(crate) async fn a_replay_is_the_answer_as_it_was_given<S: Working>(world: World<S>) {
    // Bytes that are not text, a repeated name with others between, characters that JSON must
    // escape, and an empty answer.
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
            StoredAnswer {
                status: StatusCode::ACCEPTED,
                headers: headers.map(header).into(),
                body: bytes.into(),
            },
        ),
        (
            "empty",
            StoredAnswer {
                status: StatusCode::NO_CONTENT,
                headers: Vec::new(),
                body: Bytes::new(),
            },
        ),
        (
            "odd",
            StoredAnswer { status: StatusCode::from_u16(599).expect("a status"), ..answer("\0") },
        ),
    ] {
        let reserved = world.fresh(key).await;
        let held = world.store.finish(&reserved, &given).await.expect("finishes");
        assert_eq!(held, Held::Kept);
        for _ in 0..2 {
            match world.reserve(key).await {
                Reservation::Replay(stored) => assert_eq!(by_name(&stored), by_name(&given)),
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
    // With the answer "in progress" a client would retry for ever; with the stored answer it would
    // get another request's.
    let other = async || world.store.reserve(ask("k", "other")).await.expect("reserves");
    let reserved = world.fresh("k").await;
    assert_eq!(other().await, Reservation::Mismatch, "while it runs");
    world.pass(LEASED + 1);
    assert_eq!(other().await, Reservation::Mismatch, "while no attempt runs");
    assert_eq!(world.finish(&reserved, "first").await, Held::Kept);
    assert_eq!(other().await, Reservation::Mismatch, "when it is done");
    assert_eq!(world.reserve("k").await, Reservation::Replay(answer("first")));
    world.pass(KEPT);
    assert!(matches!(other().await, Reservation::Fresh(_)), "when it is forgotten");
    assert_eq!(world.reserve("k").await, Reservation::Mismatch, "and now it is theirs");
}

pub(crate) async fn the_same_key_in_another_scope_is_another_key<S: Working>(world: World<S>) {
    // Two accounts number their requests from one.
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

pub(crate) async fn a_waiting_request_gets_the_longest_wait<S: Working>(world: World<S>) {
    // The wait becomes a Retry-After. If Retry-After is too short, the retry fails again; if it is too
    // long, the client waits for nothing.
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
    // The first attempt was paused, not dead, and reports its own answer late.
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
    // No insert decides this race: all requests see the same old row.
    for n in 0..4 {
        let key = format!("k{n}");
        let first = world.fresh(&key).await;
        world.pass(LEASED);
        let reservations = world.fifty(&key).await;
        let second = only_fresh(&reservations);
        assert_eq!(second.attempt, 2);
        assert!(second.fence > first.fence);
    }
}

pub(crate) async fn a_late_answer_counts_while_no_other_attempt_runs<S: Working>(world: World<S>) {
    // The work is done; without its answer it would be done again.
    let reserved = world.fresh("k").await;
    world.pass(LEASED + 1);
    assert_eq!(world.finish(&reserved, "late").await, Held::Kept);
    assert_eq!(world.reserve("k").await, Reservation::Replay(answer("late")));
}

pub(crate) async fn a_late_answer_beside_a_takeover_has_one_winner<S: Working>(world: World<S>) {
    // Two requests find an expired lease. If both succeeded, the work would be done twice, or its
    // answer would be lost.
    for n in 0..20 {
        let key = format!("k{n}");
        let first = world.fresh(&key).await;
        world.pass(LEASED);
        let (finishing, asking) = (Arc::clone(&world.store), Arc::clone(&world.store));
        let ask = ask(&key, "request");
        let finish =
            tokio::spawn(async move { finishing.finish(&first, &answer("late")).await.unwrap() });
        let reserve = tokio::spawn(async move { asking.reserve(ask).await.unwrap() });
        let (held, reservation) =
            (finish.await.expect("no panic"), reserve.await.expect("no panic"));
        match held {
            Held::Kept => assert_eq!(reservation, Reservation::Replay(answer("late"))),
            Held::Lost => assert!(matches!(reservation, Reservation::Fresh(_)), "{reservation:?}"),
        }
    }
}

pub(crate) async fn an_answer_is_kept_once_per_fence<S: Working>(world: World<S>) {
    // The same call is repeated, as after a lost answer, and then another call has another answer.
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
    // A key is abandoned twice, and once more by the same old request while another one runs.
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

pub(crate) async fn effects_of_an_earlier_attempt_are_not_forgotten_with_a_later_one<S: Working>(
    world: World<S>,
) {
    // The first attempt was cut in the middle, the second never began. If the third were reported
    // as the first, its app would not look for existing effects.
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
    // The time starts with the answer, not with the request: the answer to a long request must not
    // expire early.
    let reserved = world.fresh("k").await;
    world.pass(LEASED / 2);
    assert_eq!(world.finish(&reserved, "first").await, Held::Kept);
    world.pass(KEPT - 1);
    assert_eq!(world.reserve("k").await, Reservation::Replay(answer("first")));
    world.pass(1);
    let second = world.fresh("k").await;
    assert_eq!(second.attempt, 1, "{second:?}");
    assert!(second.fence > reserved.fence);
    assert_eq!(world.finish(&reserved, "old").await, Held::Lost);
}

pub(crate) async fn pruning_forgets_what_is_past_its_ttl_and_nothing_else<S: Working>(
    world: World<S>,
) {
    // There are more keys than one slice takes. One is leased for longer than its TTL, and one was
    // answered late. The attempt number shows whether a key was deleted: a row that remains
    // continues its count.
    let short = |key: &str, lease: u64| ReserveAsk {
        lease: Duration::from_secs(lease),
        ttl: Duration::from_secs(20),
        ..ask(key, "request")
    };
    for n in 0..7 {
        let reservation =
            world.store.reserve(short(&format!("dead{n}"), 10)).await.expect("reserves");
        assert!(matches!(reservation, Reservation::Fresh(_)), "{reservation:?}");
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
        // The key is past its lease, but not past its TTL. If the key were deleted, the next attempt would be
        // a first one.
        let reservation =
            world.store.reserve(short(&format!("dead{n}"), 10)).await.expect("reserves");
        assert!(
            matches!(reservation, Reservation::Fresh(Reserved { attempt: 2, .. })),
            "{reservation:?}"
        );
    }
    world.pass(19);
    world.prune_keys(2).await;
    assert_eq!(world.reserve("late").await, Reservation::Replay(answer("late")));
    world.pass(1);
    world.prune_keys(2).await;
    for n in 0..7 {
        let reservation =
            world.store.reserve(short(&format!("dead{n}"), 10)).await.expect("reserves");
        assert!(
            matches!(reservation, Reservation::Fresh(Reserved { attempt: 1, .. })),
            "{reservation:?}"
        );
    }
    let leased = world.reserve("leased").await;
    assert!(matches!(leased, Reservation::InProgress { .. }), "{leased:?}");
    assert!(matches!(world.reserve("late").await, Reservation::Fresh(_)));
}

pub(crate) async fn no_fence_comes_twice<S: Working>(world: World<S>) {
    // Some ends of a reservation delete its row, others keep it: a fence that depends on the row
    // would be issued again, and an old reservation would be valid.
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

/// A request of this caller, with a quota of this many keys and bytes.
fn limited(principal: &str, key: &str, keys: u64, bytes: u64) -> ReserveAsk {
    let quota = Some(Quota { keys, bytes });
    ReserveAsk { scope: scope(principal), quota, ..ask(key, "request") }
}

impl<S: Working> World<S> {
    async fn limited(&self, principal: &str, key: &str, keys: u64, bytes: u64) -> Reservation {
        self.store.reserve(limited(principal, key, keys, bytes)).await.expect("reserves")
    }

    /// The right to a new key under this quota.
    async fn admitted(&self, principal: &str, key: &str, keys: u64, bytes: u64) -> Reserved {
        match self.limited(principal, key, keys, bytes).await {
            Reservation::Fresh(reserved) => reserved,
            other => panic!("{principal} {key}: {other:?}"),
        }
    }
}

const ROOMY: u64 = 1 << 40;

pub(crate) async fn a_caller_keeps_as_many_keys_as_its_quota_says_and_known_ones_are_never_refused<
    S: Working,
>(
    world: World<S>,
) {
    // A flood of new keys would fill the store; but if a retry were refused because of a quota, it
    // would never get its answer.
    let running = world.admitted("acct_1", "k1", 3, ROOMY).await;
    let done = world.admitted("acct_1", "k2", 3, ROOMY).await;
    assert_eq!(world.finish(&done, "done").await, Held::Kept);
    world.admitted("acct_1", "k3", 3, ROOMY).await;
    for n in 4..7 {
        let reservation = world.limited("acct_1", &format!("k{n}"), 3, ROOMY).await;
        assert_eq!(reservation, Reservation::OverQuota);
    }
    let reservation = world.limited("acct_1", "k1", 3, ROOMY).await;
    assert!(matches!(reservation, Reservation::InProgress { .. }), "{reservation:?}");
    let reservation = world.limited("acct_1", "k2", 3, ROOMY).await;
    assert_eq!(reservation, Reservation::Replay(answer("done")));
    let other = ReserveAsk { quota: limited("", "k1", 3, ROOMY).quota, ..ask("k1", "other") };
    assert_eq!(world.store.reserve(other).await.expect("reserves"), Reservation::Mismatch);
    // An expired lease is taken over although the quota is used up, and under a quota that has
    // become smaller.
    world.pass(LEASED);
    let second = world.admitted("acct_1", "k1", 1, ROOMY).await;
    assert_eq!(second.attempt, 2);
    assert_eq!(world.finish(&running, "late").await, Held::Lost);
    assert_eq!(world.finish(&second, "second").await, Held::Kept);
    assert_eq!(world.limited("acct_1", "k4", 3, ROOMY).await, Reservation::OverQuota);
    // A refused request has left nothing behind.
    assert_eq!(world.admitted("acct_1", "k4", 4, ROOMY).await.attempt, 1);
}

pub(crate) async fn of_fifty_new_keys_at_once_as_many_run_as_there_is_room_for<S: Working>(
    world: World<S>,
) {
    // Each request, checked alone, would find room.
    let together = Arc::new(Barrier::new(50));
    let tasks: Vec<_> = (0..50)
        .map(|n| {
            let (store, together) = (Arc::clone(&world.store), Arc::clone(&together));
            // Each new key is sent twice, so that a copy may find the last place taken by its own
            // key.
            let ask = limited("acct_1", &format!("k{}", n / 2), 7, ROOMY);
            tokio::spawn(async move {
                together.wait().await;
                store.reserve(ask).await.expect("reserves")
            })
        })
        .collect();
    let (mut fresh, mut waiting, mut refused) = (0, 0, 0);
    for task in tasks {
        match task.await.expect("no panic") {
            Reservation::Fresh(_) => fresh += 1,
            Reservation::InProgress { .. } => waiting += 1,
            Reservation::OverQuota => refused += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(fresh, 7, "{waiting} waiting, {refused} refused");
    assert!(
        waiting <= 7 && fresh + waiting + refused == 50,
        "{waiting} waiting, {refused} refused"
    );
    assert_eq!(world.limited("acct_1", "one more", 7, ROOMY).await, Reservation::OverQuota);
}

pub(crate) async fn whatever_ends_a_key_gives_its_place_back<S: Working>(world: World<S>) {
    // Each way to end a reservation is used in turn, more often than the quota allows, so that a
    // place that is not freed, or freed twice, shows.
    for round in 0..4 {
        let key = |what: &str| format!("{what}{round}");
        let given_up = world.admitted("acct_1", &key("given up"), 2, ROOMY).await;
        world.store.abandon(&given_up).await.expect("abandons");
        world.store.abandon(&given_up).await.expect("has nothing to give up");
        let done = world.admitted("acct_1", &key("done"), 2, ROOMY).await;
        assert_eq!(world.finish(&done, "done").await, Held::Kept);
        assert_eq!(world.finish(&done, "again").await, Held::Lost);
        // The first holder dies. The second takes the key over and abandons it. The third dies too.
        world.admitted("acct_1", &key("dead"), 2, ROOMY).await;
        assert_eq!(world.limited("acct_1", "more", 2, ROOMY).await, Reservation::OverQuota);
        world.pass(LEASED);
        let second = world.admitted("acct_1", &key("dead"), 2, ROOMY).await;
        world.store.abandon(&second).await.expect("abandons");
        world.admitted("acct_1", &key("dead"), 2, ROOMY).await;
        assert_eq!(world.limited("acct_1", "more", 2, ROOMY).await, Reservation::OverQuota);
        // Past its TTL a key is new again, and takes its own place.
        world.pass(KEPT);
        let again = world.admitted("acct_1", &key("done"), 2, ROOMY).await;
        assert_eq!(world.finish(&again, "done again").await, Held::Kept);
        assert_eq!(world.limited("acct_1", "more", 2, ROOMY).await, Reservation::OverQuota);
        world.pass(KEPT);
        world.prune_keys(1).await;
    }
}

pub(crate) async fn a_caller_with_too_many_bytes_keeps_no_more_answers_and_nothing_runs_again<
    S: Working,
>(
    world: World<S>,
) {
    let large = "x".repeat(600);
    // All three are admitted while there is room.
    let one = world.admitted("acct_1", "k1", 100, 1_000).await;
    let two = world.admitted("acct_1", "k2", 100, 1_000).await;
    let three = world.admitted("acct_1", "k3", 100, 1_000).await;
    assert_eq!(world.finish(&one, &large).await, Held::Kept);
    assert_eq!(
        world.limited("acct_1", "k1", 100, 1_000).await,
        Reservation::Replay(answer(&large))
    );
    // The answer that exceeds the quota is stored completely, and no further new key is admitted.
    assert_eq!(world.finish(&two, &large).await, Held::Kept);
    assert_eq!(
        world.limited("acct_1", "k2", 100, 1_000).await,
        Reservation::Replay(answer(&large))
    );
    assert_eq!(world.limited("acct_1", "k4", 100, 1_000).await, Reservation::OverQuota);
    // The third has done its work: its key stays used, with a note in place of its answer.
    assert_eq!(world.finish(&three, &large).await, Held::Kept);
    let reservation = world.limited("acct_1", "k3", 100, 1_000).await;
    assert_eq!(reservation, Reservation::Replay(StoredAnswer::not_kept()));
    assert_eq!(world.finish(&three, &large).await, Held::Lost);
    world.pass(KEPT);
    world.prune_keys(10).await;
    let again = world.admitted("acct_1", "k1", 100, 1_000).await;
    assert_eq!(world.finish(&again, &large).await, Held::Kept);
    world.admitted("acct_1", "k2", 100, 1_000).await;
}

pub(crate) async fn over_the_total_only_callers_above_their_fair_share_are_refused<S: Working>(
    world: World<S>,
) {
    // Each caller may have two keys, and all together 32: sixteen callers use up the total.
    for n in 0..16 {
        for key in ["a", "b"] {
            world.admitted(&format!("acct_{n}"), key, 2, ROOMY).await;
        }
    }
    // The next caller may have one key and no second: 32 divided by seventeen is less than two.
    for n in 16..20 {
        let caller = format!("acct_{n}");
        world.admitted(&caller, "a", 2, ROOMY).await;
        assert_eq!(world.limited(&caller, "b", 2, ROOMY).await, Reservation::OverQuota);
    }
    // Callers of another API have their own quota.
    let elsewhere = Scope::new("other", "acct_16", &Method::POST, "/charges");
    for key in ["a", "b"] {
        let ask = ReserveAsk { scope: elsewhere.clone(), ..limited("", key, 2, ROOMY) };
        let reservation = world.store.reserve(ask).await.expect("reserves");
        assert!(matches!(reservation, Reservation::Fresh(_)), "{reservation:?}");
    }
    // Twelve more callers get one key each. The next caller gets no key: new callers cannot fill
    // the store either, however many there are.
    for n in 20..32 {
        world.admitted(&format!("acct_{n}"), "a", 2, ROOMY).await;
    }
    let reservation = world.limited("acct_32", "a", 2, ROOMY).await;
    assert_eq!(reservation, Reservation::OverQuota, "32 among 33 is less than one");
    // Once the store is empty again, each caller has its full quota.
    world.pass(KEPT);
    world.prune_keys(100).await;
    for key in ["a", "b"] {
        world.admitted("acct_16", key, 2, ROOMY).await;
    }
}

pub(crate) async fn callers_have_quotas_of_their_own<S: Working>(world: World<S>) {
    // Requests without a caller are one caller, and cannot use up the quota of others.
    for n in 0..3 {
        let reservation = world.limited("", &format!("k{n}"), 2, ROOMY).await;
        assert_eq!(reservation == Reservation::OverQuota, n == 2, "{reservation:?}");
    }
    world.admitted("acct_1", "k1", 2, ROOMY).await;
    // Another path is another key of the same caller.
    let refunds = Scope::new("api", "acct_1", &Method::POST, "/refunds");
    let refund = |key: &str| ReserveAsk { scope: refunds.clone(), ..limited("", key, 2, ROOMY) };
    let reservation = world.store.reserve(refund("k1")).await.expect("reserves");
    assert!(matches!(reservation, Reservation::Fresh(_)), "{reservation:?}");
    let reservation = world.store.reserve(refund("k2")).await.expect("reserves");
    assert_eq!(reservation, Reservation::OverQuota);
    // Without a quota nothing is counted, and no request is refused.
    for n in 0..5 {
        assert!(matches!(world.reserve(&format!("free{n}")).await, Reservation::Fresh(_)));
    }
}

pub(crate) async fn operators_read_keys_in_pages_and_find_one<S: Working>(world: World<S>) {
    for n in 0..5_usize {
        let reserved = world.fresh(&format!("k{n}")).await;
        if n.is_multiple_of(2) {
            assert_eq!(world.finish(&reserved, "answer").await, Held::Kept);
        }
    }
    let other = ReserveAsk { scope: scope("acct_2"), ..ask("k1", "request") };
    world.store.reserve(other).await.expect("reserves");
    let read = async |scope: Option<&str>, key: Option<&str>| {
        let (mut read, mut after) = (Vec::new(), None);
        loop {
            let (scope, key) = (scope.map(str::to_owned), key.map(str::to_owned));
            let page = world.store.keys(KeyFilter { scope, key, after, limit: 2 }).await;
            let page = page.expect("reads");
            assert!(page.items.len() <= 2);
            let name = |it: KeyRecord| (it.scope, it.key, it.status, it.bytes);
            read.extend(page.items.into_iter().map(name));
            after = page.next;
            if after.is_none() {
                return read;
            }
        }
    };
    let key = |caller: &str, n: usize| {
        let answered = caller == "acct_1" && n.is_multiple_of(2);
        let scope = format!("api/{caller}/POST /charges");
        (scope, format!("k{n}"), answered.then_some(201), if answered { 6 } else { 0 })
    };
    let first: Vec<_> = (0..5).map(|n| key("acct_1", n)).collect();
    let all: Vec<_> = first.iter().cloned().chain([key("acct_2", 1)]).collect();
    assert_eq!(read(None, None).await, all);
    assert_eq!(read(Some("api/acct_1/"), None).await, first);
    assert_eq!(read(None, Some("k1")).await, [key("acct_1", 1), key("acct_2", 1)]);
    assert_eq!(read(Some("api/acct_2"), Some("k1")).await, [key("acct_2", 1)]);
    assert_eq!(read(Some("other"), None).await, []);
}

pub(crate) async fn a_deleted_key_is_new_again_and_one_that_runs_is_not_deleted<S: Working>(
    world: World<S>,
) {
    let running = world.fresh("running").await;
    let done = world.fresh("done").await;
    world.finish(&done, "answer").await;
    let delete = async |key: &str| {
        let scope = scope("acct_1").as_str().to_owned();
        let name = KeyPosition { scope, key: key.to_owned() };
        world.store.delete_key(name).await.expect("deletes")
    };
    assert_eq!(delete("never").await, KeyDeleted::Unknown);
    assert_eq!(delete("done").await, KeyDeleted::Deleted);
    assert_eq!(delete("done").await, KeyDeleted::Unknown);
    world.fresh("done").await;
    // If the key were deleted, a second request would run alongside the first.
    assert_eq!(delete("running").await, KeyDeleted::Busy);
    world.clock.pass(LEASED + 1);
    assert_eq!(delete("running").await, KeyDeleted::Deleted);
    assert_eq!(world.finish(&running, "late").await, Held::Lost);
    let second = world.fresh("running").await;
    assert_eq!(world.finish(&running, "late").await, Held::Lost);
    assert_eq!(world.finish(&second, "answer").await, Held::Kept);
}
