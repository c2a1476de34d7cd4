//! Pruned events stay pruned: no request of an operator brings their jobs back. Marks are pruned
//! only when no job can still need them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hapax_core::job::Retry;
use hapax_core::order::{Machine, OrderPolicy};
use hapax_core::store::{
    ClaimAsk, HandlerRef, HandlerSpec, Horizon, NewMessage, Outcome, ReplayAsk, ReplayEffect,
    Reviewed, Settlement, Status, Verdict,
};
use hapax_core::{SourceName, Timestamp};

use crate::harness::{
    Replay, Sender, Working, World, after, done, failed, job, ordered, placed, spec,
};

/// Bodies and messages of the first 500 seconds are pruned; keys stay.
fn bodies_go() -> Horizon {
    let (events_before, message_ids_before) = (after(500), after(500));
    Horizon { events_before, message_ids_before, ..Horizon::forever() }
}

pub(crate) async fn replay_of_a_pruned_event_does_nothing<S: Working>(world: World<S>) {
    // The event's body is deleted: a job would run without a body, under the idempotency key of the
    // first job.
    world.announce([spec("fee"), spec("mail")]).await;
    let id = world.accept("evt_1", &[job("fee")]).await;
    assert_eq!(world.do_all("fee").await, ["evt_1"]);
    world.pass(1_000);
    while world.store.prune(bodies_go(), 10).await.expect("prunes") {}
    // A copy still reports how the event ended, though nothing else of it can be read.
    let copy = world.arrive(&Sender::plain(), "evt_1", &[job("fee")]).await;
    let Verdict::Duplicate(known) = &copy else { panic!("{copy:?}") };
    assert_eq!((known.id, known.status), (id, Status::Processed));
    // `mail` never had a job for this event: a replay would write one.
    let both = [job("fee"), job("mail")];
    for how in [Replay::Dry, Replay::DryForce, Replay::Plain, Replay::Force] {
        assert_eq!(world.replay(id, &both, how).await, [], "{how:?}");
        assert!(world.claim("fee", 10).await.is_empty(), "{how:?}");
        assert!(world.claim("mail", 10).await.is_empty(), "{how:?}");
    }
    let approved = world.store.approve(id, both.to_vec(), world.by("again")).await;
    assert_eq!(approved.expect("approves"), Reviewed::Unknown);
    let rejected = world.store.reject(id, world.by("again")).await;
    assert_eq!(rejected.expect("rejects"), Reviewed::Unknown);
    assert!(world.claim("fee", 10).await.is_empty());
}

pub(crate) async fn replays_beside_pruning_run_nothing_twice<S: Working>(world: World<S>) {
    // The event is whole when it is read and stripped when it is replayed.
    const EVENTS: usize = 60;
    world.announce([spec("fee")]).await;
    let mut events = Vec::new();
    for n in 0..EVENTS {
        events.push(world.accept(&format!("evt_{n}"), &[job("fee")]).await);
    }
    assert_eq!(world.do_all("fee").await.len(), EVENTS);
    world.pass(1_000);
    let over = Arc::new(AtomicBool::new(false));
    let replays: Vec<_> = (0..3)
        .map(|_| {
            let (store, over, events) =
                (Arc::clone(&world.store), Arc::clone(&over), events.clone());
            let by = world.by("everything since Monday");
            tokio::spawn(async move {
                let mut rounds = 0;
                while rounds == 0 || !over.load(Ordering::Relaxed) {
                    for event in &events {
                        let ask = ReplayAsk {
                            event: *event,
                            handlers: vec![job("fee")],
                            force: false,
                            dry_run: false,
                            by: by.clone(),
                        };
                        store.replay(ask).await.expect("replays");
                    }
                    rounds += 1;
                }
            })
        })
        .collect();
    while world.store.prune(bodies_go(), 1).await.expect("prunes") {}
    over.store(true, Ordering::Relaxed);
    for task in replays {
        task.await.expect("no panic");
    }
    assert_eq!(world.do_all("fee").await, Vec::<String>::new());
}

const DAY: i64 = 86_400;

/// Events are kept for five days and keys for ten days; the keys of the source `other` are kept for ever.
fn kept_for_days<S: Working>(world: &World<S>) -> Horizon {
    let ago = |days: i64| {
        Timestamp::from_second(world.clock.now().as_second() - days * DAY).expect("in range")
    };
    let keys_before = vec![(SourceName::new("shop"), ago(10))];
    Horizon { events_before: ago(5), keys_before, ..Horizon::forever() }
}

/// Prunes until there is no more, a little at a time.
async fn prune_all<S: Working>(world: &World<S>, horizon: Horizon) {
    for _ in 0..200 {
        if !world.store.prune(horizon.clone(), 2).await.expect("prunes") {
            return;
        }
    }
    panic!("pruning never ends");
}

/// Whether an event of this version runs: it does if no newer version is known to be applied.
async fn runs<S: Working>(world: &World<S>, resource: &str, version: i64) -> bool {
    let id = format!("{resource}_v{version}_{}", world.clock.now().as_second());
    world.accept(&id, &[placed("fee", resource, version)]).await;
    world.do_all("fee").await.contains(&id)
}

pub(crate) async fn a_mark_is_forgotten_once_no_older_event_can_arrive_or_be_replayed<
    S: Working,
>(
    world: World<S>,
) {
    // An older event may arrive for as long as keys are kept, and be replayed for as long as events
    // are. If a mark were deleted a day before the sum of both times, the older event could undo a
    // newer one.
    world.announce([ordered("fee", OrderPolicy::Latest)]).await;
    for n in 0..5 {
        assert!(runs(&world, &format!("early_{n}"), 5).await);
        assert!(runs(&world, &format!("gone_{n}"), 5).await);
    }
    assert!(runs(&world, "moved", 5).await);
    world.pass(4 * DAY);
    assert!(runs(&world, "moved", 6).await);
    world.pass(10 * DAY);
    prune_all(&world, kept_for_days(&world)).await;
    for n in 0..5 {
        assert!(!runs(&world, &format!("early_{n}"), 4).await, "{n}: it may still be replayed");
    }
    world.pass(2 * DAY);
    prune_all(&world, kept_for_days(&world)).await;
    for n in 0..5 {
        assert!(runs(&world, &format!("gone_{n}"), 4).await, "{n}: nothing can need its mark");
    }
    assert!(!runs(&world, "moved", 5).await, "it moved four days later");
    assert!(runs(&world, "moved", 6).await);
    // The next version of a forgotten resource begins a new mark.
    assert!(!runs(&world, "gone_0", 3).await);
}

pub(crate) async fn a_mark_stays_while_anything_older_is_unfinished<S: Working>(world: World<S>) {
    // A dead letter and an event in review may be of any age, and hold an older version than the
    // applied one.
    world.announce([ordered("fee", OrderPolicy::Latest)]).await;
    let dead = world.accept("dead", &[placed("fee", "died", 1)]).await;
    world.settle(&world.claim_one("fee").await, failed(Retry::Never)).await;
    let waiting = world.arrive_late("waiting", &[placed("fee", "waited", 1)]).await;
    for resource in ["died", "waited", "other"] {
        assert!(runs(&world, resource, 5).await);
    }
    world.pass(60 * DAY);
    prune_all(&world, kept_for_days(&world)).await;
    let died = [placed("fee", "died", 1)];
    let overtaken = [ReplayEffect::Stale];
    assert_eq!(world.replay(dead, &died, Replay::Dry).await, overtaken);
    assert_eq!(world.replay(dead, &died, Replay::Plain).await, overtaken);
    prune_all(&world, kept_for_days(&world)).await;
    let approved =
        world.store.approve(waiting, vec![placed("fee", "waited", 1)], world.by("late")).await;
    assert_eq!(approved.expect("approves"), Reviewed::Decided);
    assert_eq!(world.do_all("fee").await, [""; 0], "a newer version was applied");
    // Once both events are finished and past their time, nothing is left that needs a mark.
    prune_all(&world, kept_for_days(&world)).await;
    for resource in ["died", "waited", "other"] {
        assert!(runs(&world, resource, 1).await, "{resource}");
    }
}

pub(crate) async fn a_mark_stays_where_the_next_event_needs_it_or_keys_are_kept_for_ever<
    S: Working,
>(
    world: World<S>,
) {
    // In a sequence and in a machine the mark determines the next job: without it the second number
    // would wait for the first, and a refund for its payment.
    let machine = Machine::parse(Some("paid"), &["paid -> refunded"]).expect("a machine");
    let other = HandlerRef {
        source: SourceName::new("other"),
        handler: hapax_core::job::HandlerName::new("fee"),
    };
    world
        .announce([
            ordered("sequence", OrderPolicy::Sequence { start: Some(1) }),
            ordered("machine", OrderPolicy::Machine(Arc::new(machine.clone()))),
            HandlerSpec { handler: other.clone(), ..ordered("fee", OrderPolicy::Latest) },
        ])
        .await;
    let state = |name: &str| machine.position(name).expect("a state").0;
    world.accept("one", &[placed("sequence", "s", 1)]).await;
    world.accept("paid", &[placed("machine", "m", state("paid"))]).await;
    assert_eq!(world.do_all("sequence").await, ["one"]);
    assert_eq!(world.do_all("machine").await, ["paid"]);
    let elsewhere = Sender::of("default", "other");
    let in_other = async |id: &str, version| {
        world.arrive(&elsewhere, id, &[placed("fee", "o", version)]).await;
        let ask = ClaimAsk { handler: other.clone(), limit: 10, worker: "worker-1".into() };
        let mut ran = Vec::new();
        for claim in world.store.claim(ask).await.expect("claims") {
            assert_eq!(world.settle(&claim, done("done")).await, Settlement::Recorded);
            ran.push(claim.event.key.event_id.to_string());
        }
        ran
    };
    assert_eq!(in_other("new", 5).await, ["new"]);
    world.pass(60 * DAY);
    prune_all(&world, kept_for_days(&world)).await;
    world.accept("two", &[placed("sequence", "s", 2)]).await;
    world.accept("refunded", &[placed("machine", "m", state("refunded"))]).await;
    assert_eq!(world.do_all("sequence").await, ["two"]);
    assert_eq!(world.do_all("machine").await, ["refunded"]);
    assert_eq!(in_other("old", 4).await, [""; 0], "its source keeps keys for ever");
}

pub(crate) async fn messages_go_with_the_history_of_their_time<S: Working>(world: World<S>) {
    // The event that published a message stays, because another of its handlers failed. The message
    // must still be pruned, and a younger message must stay.
    world.announce([spec("fee"), spec("mail")]).await;
    let publish = async |event: &str, message: &str| {
        world.accept(event, &[job("fee"), job("mail")]).await;
        world.settle(&world.claim_one("mail").await, failed(Retry::Never)).await;
        let message = NewMessage::new("fee.charged", serde_json::json!({})).with_id(message);
        let done = Outcome::Done { result: None, publish: vec![message], answer: None };
        let claim = world.claim_one("fee").await;
        assert_eq!(world.settle(&claim, done).await, Settlement::Recorded);
    };
    let messages_of = async |event: &str| -> Vec<String> {
        world.event(event).await.messages.into_iter().map(|note| note.id).collect()
    };
    for n in 0..5 {
        publish(&format!("old_{n}"), &format!("m{n}")).await;
    }
    world.pass(1_000);
    publish("young", "m9").await;
    // The id of a message that is still known is taken.
    publish("again", "m0").await;
    assert_eq!(messages_of("again").await, [""; 0]);
    prune_all(&world, bodies_go()).await;
    for n in 0..5 {
        assert_eq!(messages_of(&format!("old_{n}")).await, [""; 0]);
    }
    assert_eq!(messages_of("young").await, ["m9"]);
    publish("later", "m0").await;
    assert_eq!(messages_of("later").await, ["m0"]);
}
