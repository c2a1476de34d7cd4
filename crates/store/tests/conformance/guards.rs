//! An event has two keys: its id recognises retries, its guard recognises replays. The first
//! comment of each case says how it tries to get a second effect out of one signature.

use std::sync::Arc;

use hapax_core::store::{EventId, Horizon, Ingest, ReviewReason, Reviewed, Status, Store, Verdict};
use hapax_core::{EventKey, SourceName, Timestamp};

use crate::harness::{Sender, Working, World, after, done, job, noon, spec, via};

async fn one<S: Store>(store: &S, ingest: Ingest) -> Verdict {
    store.ingest(ingest).await.expect("ingests").remove(0)
}

fn is_copy_of(verdict: &Verdict, id: EventId) -> bool {
    matches!(verdict, Verdict::Duplicate(known) if known.id == id)
}

/// Checks that the event waits as a suspected replay under an id of its own, which contains the id
/// it arrived under.
async fn is_suspected<S: Working>(world: &World<S>, id: EventId, came_under: &str) {
    let summary = world.event_by_our_id(id).await.summary;
    assert_eq!((summary.status, summary.review), (Status::Review, Some(ReviewReason::Replay)));
    assert_eq!(EventKey::replayed_id(&summary.event_id), Some(came_under), "{summary:?}");
}

/// An ingest request for a body that arrives under this id in an unsigned header.
fn under(sender: &Sender, id: &str, body: &str, signed: Timestamp) -> Ingest {
    let receipts = sender.receipts(body, id, signed, signed);
    Ingest { jobs: vec![vec![job("fee")]; receipts.len()], receipts, via: via(signed) }
}

pub(crate) async fn a_suspected_replay_leaves_its_id_to_the_event_that_it_belongs_to<S: Working>(
    world: World<S>,
) {
    // The captured body of event A arrives under the id that event B will have or has. B must run,
    // whichever arrives first.
    world.announce([spec("fee")]).await;
    for (place, sender) in [Sender::signing_again(), Sender::guarded()].iter().enumerate() {
        for forged_first in [true, false] {
            let of = |name: &str| format!("{name}-{place}-{forged_first}");
            let (a, b) = (of("a"), of("b"));
            let body = |id: &str| format!(r#"{{"type":"push","of":"{id}"}}"#);
            let arrive =
                |id: &str, bytes: &str| one(&*world.store, under(sender, id, &body(bytes), noon()));
            let first = arrive(&a, &a).await;
            assert!(matches!(first, Verdict::Accepted(_)), "{first:?}");
            let mut genuine = None;
            if !forged_first {
                genuine = Some(arrive(&b, &b).await);
            }
            let forged = arrive(&b, &a).await;
            assert!(matches!(forged, Verdict::Review(_)), "{forged:?}");
            is_suspected(&world, forged.id(), &b).await;
            let genuine = match genuine {
                Some(genuine) => genuine,
                None => arrive(&b, &b).await,
            };
            assert!(matches!(genuine, Verdict::Accepted(_)), "{genuine:?}");
            // Copies of each event are duplicates of that event, and no conflict with the other.
            for _ in 0..2 {
                assert!(is_copy_of(&arrive(&b, &b).await, genuine.id()));
                assert!(is_copy_of(&arrive(&b, &a).await, forged.id()));
                assert!(is_copy_of(&arrive(&a, &a).await, first.id()));
            }
            assert_eq!(world.event(&b).await.summary.conflicts, 0);
            let mut ran = world.do_all("fee").await;
            ran.sort();
            assert_eq!(ran, [a, b.clone()]);
            // An operator approves the suspected replay: it runs once, under its own id.
            let by = world.by("it is another one");
            let approved = world.store.approve(forged.id(), vec![job("fee")], by).await;
            assert_eq!(approved.expect("approves"), Reviewed::Decided);
            let claim = world.claim_one("fee").await;
            assert_eq!(claim.event.id, forged.id());
            world.settle(&claim, done("done")).await;
            assert!(is_copy_of(&arrive(&b, &of("a")).await, forged.id()));
            assert!(is_copy_of(&arrive(&b, &b).await, genuine.id()));
            assert!(world.claim("fee", 10).await.is_empty());
        }
    }
}

pub(crate) async fn forged_copies_beside_the_genuine_event_never_keep_it_from_running<
    S: Working,
>(
    world: World<S>,
) {
    // Copies of A under B's id, B, and copies of B arrive at the same instant.
    world.announce([spec("fee")]).await;
    let sender = Sender::signing_again();
    for round in 0..20 {
        let (a, b) = (format!("a{round}"), format!("b{round}"));
        let body = |id: &str| format!(r#"{{"type":"push","of":"{id}"}}"#);
        let first = one(&*world.store, under(&sender, &a, &body(&a), noon())).await;
        assert!(matches!(first, Verdict::Accepted(_)), "{first:?}");
        let tasks: Vec<_> = (0..24)
            .map(|n| {
                let bytes = if n % 3 == 0 { body(&b) } else { body(&a) };
                let ingest = under(&sender, &b, &bytes, noon());
                let store = Arc::clone(&world.store);
                tokio::spawn(async move { (n % 3 == 0, one(&*store, ingest).await) })
            })
            .collect();
        let (mut genuine, mut forged) = (Vec::new(), Vec::new());
        for task in tasks {
            let (is_genuine, verdict) = task.await.expect("no panic");
            if is_genuine { &mut genuine } else { &mut forged }.push(verdict);
        }
        let accepted = |verdict: &&Verdict| matches!(verdict, Verdict::Accepted(_));
        let review = |verdict: &&Verdict| matches!(verdict, Verdict::Review(_));
        let copies = |verdict: &&Verdict| matches!(verdict, Verdict::Duplicate(_));
        assert_eq!(genuine.iter().filter(accepted).count(), 1, "{genuine:?}");
        assert_eq!(genuine.iter().filter(copies).count(), 7, "{genuine:?}");
        assert_eq!(forged.iter().filter(review).count(), 1, "{forged:?}");
        assert_eq!(forged.iter().filter(copies).count(), 15, "{forged:?}");
        let mut ran = world.do_all("fee").await;
        ran.sort();
        assert_eq!(ran, [a, b]);
    }
}

pub(crate) async fn signed_content_is_one_event_under_any_derived_key<S: Working>(world: World<S>) {
    // Every unsigned part is changed, so that other bytes arrive under the same key, and the same
    // bytes under other keys.
    world.announce([spec("fee")]).await;
    let (store, sender, fee) = (&*world.store, Sender::one_time_token(), [job("fee")]);
    let arrive = |token, id, unsigned| one(store, sender.ingest_token(token, id, unsigned, &fee));
    let first = arrive("t1", "a", "").await;
    assert!(matches!(first, Verdict::Accepted(_)), "{first:?}");
    for (id, unsigned) in [("a", ""), ("a", "other bytes"), ("b", ""), ("c", "other bytes")] {
        let copy = arrive("t1", id, unsigned).await;
        assert!(is_copy_of(&copy, first.id()), "{id} {unsigned}: {copy:?}");
    }
    let other = arrive("t2", "b", "").await;
    assert!(matches!(other, Verdict::Accepted(id) if id != first.id()), "{other:?}");
    // The key may be too coarse: other bytes under another signature go to review.
    let conflict = arrive("t3", "a", "other bytes").await;
    assert!(matches!(conflict, Verdict::Review(_)), "{conflict:?}");
    for (id, unsigned) in [("a", "other bytes"), ("d", ""), ("b", "more")] {
        let copy = arrive("t3", id, unsigned).await;
        assert!(is_copy_of(&copy, conflict.id()), "{id} {unsigned}: {copy:?}");
        assert!(matches!(&copy, Verdict::Duplicate(known) if known.status == Status::Review));
    }
    assert_eq!(world.claim("fee", 10).await.len(), 2);
}

pub(crate) async fn an_attempt_with_another_number_is_a_copy_and_not_a_conflict<S: Working>(
    world: World<S>,
) {
    // The number of the attempt is in the signed body. Attempts arrive one after the other, and many at the same
    // instant; then other bytes arrive under the same id.
    world.announce([spec("fee")]).await;
    let (store, sender) = (&*world.store, Sender::counting_attempts());
    let first = one(store, sender.ingest_attempt("a", 1, "")).await;
    assert!(matches!(first, Verdict::Accepted(_)), "{first:?}");
    for attempt in [1, 2, 10, 2] {
        let copy = one(store, sender.ingest_attempt("a", attempt, "")).await;
        assert!(is_copy_of(&copy, first.id()), "{attempt}: {copy:?}");
    }
    let tasks: Vec<_> = (0..16)
        .map(|attempt| {
            let (store, ingest) =
                (Arc::clone(&world.store), sender.ingest_attempt("b", attempt, ""));
            tokio::spawn(async move { one(&*store, ingest).await })
        })
        .collect();
    let (mut accepted, mut copies) = (0, 0);
    for task in tasks {
        match task.await.expect("no panic") {
            Verdict::Accepted(_) => accepted += 1,
            Verdict::Duplicate(_) => copies += 1,
            other @ (Verdict::Conflict(_) | Verdict::Review(_)) => panic!("{other:?}"),
        }
    }
    assert_eq!((accepted, copies), (1, 15));
    assert_eq!(world.event("a").await.summary.conflicts, 0);
    for conflicts in 1..=2 {
        let conflict = one(store, sender.ingest_attempt("a", 3, "other bytes")).await;
        assert!(is_conflict_with(&conflict, first.id()), "{conflict:?}");
        assert_eq!(world.event("a").await.summary.conflicts, conflicts);
    }
    let mut ran = world.do_all("fee").await;
    ran.sort();
    assert_eq!(ran, ["a", "b"]);
}

fn is_conflict_with(verdict: &Verdict, id: EventId) -> bool {
    matches!(verdict, Verdict::Conflict(known) if known.id == id)
}

pub(crate) async fn a_conflict_promotes_no_late_event_of_a_sender_that_counts<S: Working>(
    world: World<S>,
) {
    // A late event waits for review. Attempts with its id and another content arrive on time, and differ from each
    // other in their counter only.
    world.announce([spec("fee")]).await;
    let (store, sender) = (&*world.store, Sender::counting_attempts_and_timed());
    let arrive = |attempt, note, signed| {
        one(store, sender.ingest_timed_attempt("a", attempt, note, signed, after(3_600)))
    };
    let late = arrive(1, "", noon()).await;
    assert!(matches!(late, Verdict::Review(_)), "{late:?}");
    for attempt in [1, 2, 2, 3] {
        let conflict = arrive(attempt, "other bytes", after(3_600)).await;
        assert!(is_conflict_with(&conflict, late.id()), "{attempt}: {conflict:?}");
        assert!(world.claim_next("fee").await.is_empty());
    }
    assert_eq!(world.event("a").await.summary.conflicts, 4);
    // The late event's own next attempt is on time.
    let retry = arrive(2, "", after(3_600)).await;
    assert!(matches!(&retry, Verdict::Accepted(id) if *id == late.id()), "{retry:?}");
    assert_eq!(world.do_all("fee").await, ["a"]);
}

pub(crate) async fn of_many_ids_at_once_one_has_the_guard<S: Working>(world: World<S>) {
    // All copies arrive at the same instant, each under another id.
    let (given, derived) = (Sender::signing_again(), Sender::one_time_token());
    for round in 0..5 {
        let mut ingests = Vec::new();
        for n in 0..32 {
            let query = format!("?round={round}");
            ingests.push(given.ingest_signed(&format!("{round}-{n}"), &query, noon(), noon(), &[]));
            ingests.push(derived.ingest_token(
                &format!("t{round}"),
                &format!("{round}-{n}"),
                "",
                &[],
            ));
        }
        let tasks: Vec<_> = ingests
            .into_iter()
            .map(|ingest| {
                let store = Arc::clone(&world.store);
                tokio::spawn(async move { one(&*store, ingest).await })
            })
            .collect();
        let (mut accepted, mut reviews, mut copies) = (0, 0, 0);
        for task in tasks {
            match task.await.expect("no panic") {
                Verdict::Accepted(_) => accepted += 1,
                Verdict::Review(_) => reviews += 1,
                Verdict::Duplicate(_) => copies += 1,
                other @ Verdict::Conflict(_) => panic!("{other:?}"),
            }
        }
        assert_eq!((accepted, reviews, copies), (2, 31, 31));
    }
}

pub(crate) async fn a_suspected_replay_waits_for_review_however_often_it_comes<S: Working>(
    world: World<S>,
) {
    // An event is late and a replay at the same time. Then copies arrive on time, signed again.
    world.announce([spec("fee")]).await;
    let (sender, fee) = (Sender::signing_again(), [job("fee")]);
    let arrive = |id, query, signed, now| {
        one(&*world.store, sender.ingest_signed(id, query, signed, now, &fee))
    };
    let first = arrive("d1", "?1", noon(), noon()).await;
    assert!(matches!(first, Verdict::Accepted(_)), "{first:?}");
    let replay = arrive("d2", "?1", noon(), after(3_600)).await;
    let Verdict::Review(replay) = replay else { panic!("{replay:?}") };
    is_suspected(&world, replay, "d2").await;
    for query in ["?1", "?2", "?3", "?3"] {
        let copy = arrive("d2", query, after(3_600), after(3_600)).await;
        assert!(is_copy_of(&copy, replay), "{query}: {copy:?}");
        assert!(matches!(&copy, Verdict::Duplicate(known) if known.status == Status::Review));
    }
    assert_eq!(world.do_all("fee").await, ["d1"]);
    // An operator approves it: it runs once, and no other replay runs with it.
    let approved = world.store.approve(replay, fee.to_vec(), world.by("it is another one")).await;
    assert_eq!(approved.expect("approves"), Reviewed::Decided);
    assert!(is_copy_of(&arrive("d2", "?1", noon(), noon()).await, replay));
    let ran = world.do_all("fee").await;
    assert_eq!(ran.len(), 1);
    assert_eq!(EventKey::replayed_id(&ran[0]), Some("d2"), "{ran:?}");
    assert!(is_copy_of(&arrive("d2", "?1", noon(), noon()).await, replay));
    let third = arrive("d3", "?1", noon(), noon()).await;
    assert!(matches!(third, Verdict::Review(_)), "{third:?}");
    assert!(world.claim_next("fee").await.is_empty());
}

pub(crate) async fn a_rejected_event_does_not_come_back_under_another_id<S: Working>(
    world: World<S>,
) {
    // The refused event keeps its guard.
    world.announce([spec("fee")]).await;
    let (sender, fee) = (Sender::signing_again(), [job("fee")]);
    let arrive =
        |id, signed, now| one(&*world.store, sender.ingest_signed(id, "?1", signed, now, &fee));
    let late = arrive("d1", noon(), after(3_600)).await;
    assert!(matches!(late, Verdict::Review(_)), "{late:?}");
    let rejected = world.store.reject(late.id(), world.by("not ours")).await;
    assert_eq!(rejected.expect("rejects"), Reviewed::Decided);
    let again = arrive("d2", noon(), noon()).await;
    assert!(matches!(again, Verdict::Review(_)), "{again:?}");
    is_suspected(&world, again.id(), "d2").await;
    assert!(world.claim_next("fee").await.is_empty());
}

pub(crate) async fn content_that_ran_promotes_no_late_event_of_another_id<S: Working>(
    world: World<S>,
) {
    // An old captured request is in review because it is late; then the signature of a processed
    // event arrives under the id of that request.
    world.announce([spec("fee")]).await;
    let (sender, fee) = (Sender::signing_again(), [job("fee")]);
    let arrive =
        |id, signed, now| one(&*world.store, sender.ingest_signed(id, "?1", signed, now, &fee));
    let ran = arrive("d1", after(3_600), after(3_600)).await;
    assert!(matches!(ran, Verdict::Accepted(_)), "{ran:?}");
    let late = arrive("d2", noon(), after(3_600)).await;
    assert!(matches!(late, Verdict::Review(_)), "{late:?}");
    let replay = arrive("d2", after(3_600), after(3_600)).await;
    assert!(is_copy_of(&replay, late.id()), "{replay:?}");
    assert_eq!(world.do_all("fee").await, ["d1"]);
    // The retry of the late event, signed again, is on time.
    let retry = arrive("d2", after(3_601), after(3_601)).await;
    assert!(matches!(&retry, Verdict::Accepted(id) if *id == late.id()), "{retry:?}");
    assert_eq!(world.do_all("fee").await, ["d2"]);
}

pub(crate) async fn a_copy_that_was_signed_again_is_guarded_too<S: Working>(world: World<S>) {
    // The captured request is not the first delivery but a retry with its own signature; some
    // retries are answered from memory, because the work has ended by then.
    world.announce([spec("fee")]).await;
    let (sender, fee) = (Sender::signing_again(), [job("fee")]);
    let arrive =
        |id, query| one(&*world.store, sender.ingest_signed(id, query, noon(), noon(), &fee));
    let first = arrive("d1", "?1").await.id();
    assert!(is_copy_of(&arrive("d1", "?2").await, first));
    let replay = arrive("x2", "?2").await;
    assert!(matches!(replay, Verdict::Review(_)), "{replay:?}");
    assert_eq!(world.do_all("fee").await, ["d1"]);
    for query in ["?1", "?1", "?3", "?3", "?1", "?4"] {
        assert!(is_copy_of(&arrive("d1", query).await, first), "{query}");
    }
    for (id, query) in [("x1", "?1"), ("x3", "?3"), ("x4", "?4")] {
        let replay = arrive(id, query).await;
        assert!(matches!(replay, Verdict::Review(_)), "{query}: {replay:?}");
    }
    assert!(world.claim_next("fee").await.is_empty());
}

/// Prunes until there is no more.
async fn prune<S: Working>(world: &World<S>, before: Timestamp, keys: bool) {
    let keys = if keys { vec![(SourceName::new("shop"), before)] } else { Vec::new() };
    let horizon = Horizon { events_before: before, keys_before: keys, ..Horizon::forever() };
    for _ in 0..100 {
        if !world.store.prune(horizon.clone(), 1).await.expect("prunes") {
            return;
        }
    }
    panic!("pruning never ends");
}

pub(crate) async fn a_guard_outlives_the_body_and_a_key_that_is_kept_for_less<S: Working>(
    world: World<S>,
) {
    // Everything may be deleted a moment after its arrival, while the signature is inside the
    // window.
    let sender = Sender::signing_again();
    let arrive = |id, query, signed, now| {
        one(&*world.store, sender.ingest_signed(id, query, signed, now, &[]))
    };
    let first = arrive("d1", "?1", after(300), noon()).await;
    assert!(matches!(first, Verdict::Accepted(_)), "{first:?}");
    assert!(is_copy_of(&arrive("d1", "?2", after(300), noon()).await, first.id()));
    world.pass(599);
    prune(&world, after(500), true).await;
    for (id, query) in [("x1", "?1"), ("x2", "?2")] {
        let replay = arrive(id, query, after(300), after(599)).await;
        assert!(matches!(replay, Verdict::Review(_)), "{replay:?}");
        is_suspected(&world, replay.id(), id).await;
    }
    // After twice the window the signature is too old, and its guard is no longer needed.
    world.pass(86_402);
    prune(&world, after(500), true).await;
    let late = arrive("x3", "?1", after(300), after(87_001)).await;
    assert!(matches!(late, Verdict::Review(_)), "{late:?}");
    assert_eq!(world.event("x3").await.summary.review, Some(ReviewReason::Late));
}

pub(crate) async fn a_guard_without_a_signed_time_is_kept_as_long_as_the_key<S: Working>(
    world: World<S>,
) {
    // Without a signed time a signature is valid for ever.
    let sender = Sender::signing_no_time();
    let arrive =
        |id, query| one(&*world.store, sender.ingest_signed(id, query, noon(), noon(), &[]));
    let first = arrive("d1", "?1").await.id();
    assert!(is_copy_of(&arrive("d1", "?2").await, first));
    world.pass(100_000);
    prune(&world, after(500), false).await;
    for (id, query) in [("x1", "?1"), ("x2", "?2")] {
        let replay = arrive(id, query).await;
        assert!(matches!(replay, Verdict::Review(_)), "{replay:?}");
        let rejected = world.store.reject(replay.id(), world.by("a replay")).await;
        assert_eq!(rejected.expect("rejects"), Reviewed::Decided);
    }
    world.pass(100_000);
    prune(&world, after(500), true).await;
    for (id, query) in [("y1", "?1"), ("y2", "?2")] {
        let again = arrive(id, query).await;
        assert!(matches!(again, Verdict::Accepted(_)), "{again:?}");
    }
}
