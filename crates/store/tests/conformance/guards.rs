//! An event has two keys: its id recognises retries, its guard recognises replays. Each case's first
//! comment says how it tries to get a second effect out of one signature.

use std::sync::Arc;

use hapax_core::store::{EventId, Horizon, Ingest, ReviewReason, Reviewed, Status, Store, Verdict};
use hapax_core::{SourceName, Timestamp};

use crate::harness::{Sender, Working, World, after, job, noon, spec};

async fn one<S: Store>(store: &S, ingest: Ingest) -> Verdict {
    store.ingest(ingest).await.expect("ingests").remove(0)
}

fn is_copy_of(verdict: &Verdict, id: EventId) -> bool {
    matches!(verdict, Verdict::Duplicate(known) if known.id == id)
}

pub(crate) async fn what_was_signed_is_one_event_under_whatever_derived_key<S: Working>(
    world: World<S>,
) {
    // Whatever the signature leaves out is changed: other bytes under the same key, other keys.
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
    // The key may be too coarse: other bytes under another signature are for a person.
    let conflict = arrive("t3", "a", "other bytes").await;
    assert!(matches!(conflict, Verdict::Review(_)), "{conflict:?}");
    for (id, unsigned) in [("a", "other bytes"), ("d", ""), ("b", "more")] {
        let copy = arrive("t3", id, unsigned).await;
        assert!(is_copy_of(&copy, conflict.id()), "{id} {unsigned}: {copy:?}");
        assert!(matches!(&copy, Verdict::Duplicate(known) if known.status == Status::Review));
    }
    assert_eq!(world.claim("fee", 10).await.len(), 2);
}

pub(crate) async fn of_many_ids_at_once_one_has_the_guard<S: Working>(world: World<S>) {
    // All at the same instant, each under an id of its own.
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

pub(crate) async fn a_suspected_replay_waits_for_a_person_however_often_it_comes<S: Working>(
    world: World<S>,
) {
    // Late and replayed at once; then the copies come on time, signed again.
    world.announce([spec("fee")]).await;
    let (sender, fee) = (Sender::signing_again(), [job("fee")]);
    let arrive = |id, query, signed, now| {
        one(&*world.store, sender.ingest_signed(id, query, signed, now, &fee))
    };
    let first = arrive("d1", "?1", noon(), noon()).await;
    assert!(matches!(first, Verdict::Accepted(_)), "{first:?}");
    let replay = arrive("d2", "?1", noon(), after(3_600)).await;
    let Verdict::Review(replay) = replay else { panic!("{replay:?}") };
    assert_eq!(world.event("d2").await.summary.review, Some(ReviewReason::Replay));
    for query in ["?1", "?2", "?3", "?3"] {
        let copy = arrive("d2", query, after(3_600), after(3_600)).await;
        assert!(is_copy_of(&copy, replay), "{query}: {copy:?}");
        assert!(matches!(&copy, Verdict::Duplicate(known) if known.status == Status::Review));
    }
    assert_eq!(world.do_all("fee").await, ["d1"]);
    // A person lets it through: once, and no other replay with it.
    let approved = world.store.approve(replay, fee.to_vec(), world.by("it is another one")).await;
    assert_eq!(approved.expect("approves"), Reviewed::Decided);
    assert!(is_copy_of(&arrive("d2", "?1", noon(), noon()).await, replay));
    assert_eq!(world.do_all("fee").await, ["d2"]);
    assert!(is_copy_of(&arrive("d2", "?1", noon(), noon()).await, replay));
    let third = arrive("d3", "?1", noon(), noon()).await;
    assert!(matches!(third, Verdict::Review(_)), "{third:?}");
    assert!(world.claim_next("fee").await.is_empty());
}

pub(crate) async fn what_a_person_refused_does_not_come_back_under_another_id<S: Working>(
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
    assert_eq!(world.event("d2").await.summary.review, Some(ReviewReason::Replay));
    assert!(world.claim_next("fee").await.is_empty());
}

pub(crate) async fn content_that_ran_promotes_no_late_event_of_another_id<S: Working>(
    world: World<S>,
) {
    // An old capture waits for its lateness; then the signature of an event that ran comes under its id.
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
    // Its own retry, signed again, is on time.
    let retry = arrive("d2", after(3_601), after(3_601)).await;
    assert!(matches!(&retry, Verdict::Accepted(id) if *id == late.id()), "{retry:?}");
    assert_eq!(world.do_all("fee").await, ["d2"]);
}

pub(crate) async fn a_copy_that_was_signed_again_is_guarded_too<S: Working>(world: World<S>) {
    // What is captured is not the first delivery but a retry with a signature of its own; some retries
    // are answered from memory, because the work has ended by then.
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
    let horizon = Horizon { events_before: before, keys_before: keys };
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
    // Everything may go a moment after it came, while the signature is inside the window.
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
        assert_eq!(world.event(id).await.summary.review, Some(ReviewReason::Replay));
    }
    // Past twice the window the signature is too old, and nothing has to be known of it.
    world.pass(86_402);
    prune(&world, after(500), true).await;
    let late = arrive("x3", "?1", after(300), after(87_001)).await;
    assert!(matches!(late, Verdict::Review(_)), "{late:?}");
    assert_eq!(world.event("x3").await.summary.review, Some(ReviewReason::Late));
}

pub(crate) async fn a_guard_without_a_signed_time_is_kept_as_long_as_the_key<S: Working>(
    world: World<S>,
) {
    // Without a time a signature is good for ever.
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
