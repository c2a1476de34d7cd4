//! What was pruned stays pruned: nothing that a person asks for brings its work back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hapax_core::store::{Horizon, ReplayAsk, Reviewed};

use crate::harness::{Replay, Working, World, after, job, spec};

/// Bodies of everything that came in the first 500 seconds; keys stay.
fn bodies_go() -> Horizon {
    Horizon { events_before: after(500), keys_before: Vec::new() }
}

pub(crate) async fn replay_of_a_pruned_event_does_nothing<S: Working>(world: World<S>) {
    // Its body is gone: a job of it would run with nothing, under the idempotency key of the first.
    world.announce([spec("fee"), spec("mail")]).await;
    let id = world.accept("evt_1", &[job("fee")]).await;
    assert_eq!(world.do_all("fee").await, ["evt_1"]);
    world.pass(1_000);
    while world.store.prune(bodies_go(), 10).await.expect("prunes") {}
    // `mail` never had a job for it: a replay would write one.
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
    // The event is whole when it is looked at and stripped when it is acted on.
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
