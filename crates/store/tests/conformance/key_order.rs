//! Order per key, case by case: one delivery at a time under each key, in the order of publishing, whatever
//! fails, dies, is cancelled or replayed in between.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::delivery::{DeliveryId, DeliveryStatus, KEY_WAITS};
use hapax_core::endpoint::{EndpointOrder, EndpointSettings, OnDead};
use hapax_core::job::Retry;
use hapax_core::store::{
    DeliveryAsk, DeliveryClaim, DeliveryReplayed, DeliverySkipped, EndpointSignal, Held,
    MessageAct, NewMessage,
};
use uuid::Uuid;

use crate::harness::{LEASE, World};
use crate::sending::{
    ALL, Sending, ask, claimed, delivered, failed, failed_saying, message, outcome, settings,
};

/// An endpoint that keeps the order of keys.
pub(crate) fn ordered(on_dead: OnDead) -> EndpointSettings {
    EndpointSettings { order: EndpointOrder::Key, on_dead, ..settings() }
}

fn keyed(id: &str, key: &str) -> NewMessage {
    message(id).with_key(key)
}

impl<S: Sending> World<S> {
    /// Publishes messages named by their key and number: `a1`, `a2`, …
    async fn send_keyed(&self, ids: &[&str]) {
        for id in ids {
            self.send(keyed(id, &id[..1])).await;
        }
    }

    async fn skip(&self, id: DeliveryId) -> DeliverySkipped {
        self.store.skip_delivery(id, self.by("not needed")).await.expect("skips")
    }

    async fn statuses(&self, ids: &[&str]) -> Vec<&'static str> {
        let mut statuses = Vec::new();
        for id in ids {
            statuses.push(self.status_of(id).await.as_str());
        }
        statuses
    }

    /// Claims the one delivery that can be claimed, and reports it as delivered.
    async fn deliver_one(&self, expected: &str) {
        let claim = self.take_one().await;
        assert_eq!(claim.message, expected);
        assert_eq!(self.report(&claim, delivered()).await, Held::Kept);
    }
}

pub(crate) async fn one_delivery_of_a_key_is_sent_at_a_time_and_in_order<S: Sending>(
    world: World<S>,
) {
    // Everything is due at once, and there is room for all of it. Messages without a key never wait.
    world.add(EndpointSettings { max_in_flight: 100, ..ordered(OnDead::Park) }).await;
    world.send_keyed(&["a1", "b1", "a2", "a3", "b2"]).await;
    world.send(message("free1")).await;
    world.send(message("free2")).await;
    let mut claims = world.take(ALL).await;
    assert_eq!(claimed(&claims), ["a1", "b1", "free1", "free2"]);
    assert_eq!(world.statuses(&["a2", "a3", "b2"]).await, ["parked"; 3]);
    let parked = world.delivery_of("a2").await;
    assert_eq!((parked.attempt, parked.reason.as_deref()), (0, Some(KEY_WAITS)));
    assert_eq!((parked.due_at, parked.finished_at), (None, None));
    let backlog = world.store.delivery_backlog().await.expect("reads");
    assert_eq!((backlog.parked, backlog.sending, backlog.waiting), (3, 4, 0));
    let mut arrived = Vec::new();
    while !claims.is_empty() {
        // The commit that ends one delivery claims the next one under its key.
        let ended = claims.iter().map(|claim| outcome(claim, delivered())).collect();
        arrived.extend(claims.into_iter().map(|claim| claim.message));
        claims = world.exchange_all(ended, ask(ALL)).await.claims;
    }
    let of = |key: &str| -> Vec<&str> {
        arrived.iter().map(String::as_str).filter(|id| id.starts_with(key)).collect()
    };
    assert_eq!((of("a"), of("b")), (vec!["a1", "a2", "a3"], vec!["b1", "b2"]));
    assert_eq!(arrived.len(), 7);
}

pub(crate) async fn a_failing_delivery_blocks_only_its_own_key<S: Sending>(world: World<S>) {
    // The first delivery of a key fails, is lost and is given back. No later delivery of the key may overtake
    // the first.
    world.add(ordered(OnDead::Park)).await;
    world.send_keyed(&["a1", "a2", "b1", "b2"]).await;
    let head = |claims: Vec<DeliveryClaim>| {
        claims.into_iter().find(|claim| claim.message == "a1").expect("the head")
    };
    let claims = world.take(ALL).await;
    assert_eq!(claimed(&claims), ["a1", "b1"]);
    let b1 = claims.iter().find(|claim| claim.message == "b1").expect("claimed").clone();
    assert_eq!(world.report(&head(claims), failed(Retry::Schedule)).await, Held::Kept);
    assert_eq!(world.report(&b1, delivered()).await, Held::Kept);
    assert_eq!(claimed(&world.take(ALL).await), ["b2"], "a1 waits a minute, and a2 for a1");
    assert_eq!(world.statuses(&["a1", "a2"]).await, ["failed", "parked"]);
    // The leases of a1 and b2 end.
    world.pass(72);
    let lost = head(world.take(ALL).await);
    world.pass(LEASE + 2);
    let again = head(world.take(ALL).await);
    assert_eq!(world.report(&lost, delivered()).await, Held::Lost, "the fence of a lost attempt");
    assert_eq!(world.status_of("a2").await, DeliveryStatus::Parked);
    assert_eq!(
        world.report(&again, hapax_core::store::AttemptVerdict::GivenBack).await,
        Held::Kept
    );
    let once_more = head(world.take(ALL).await);
    assert_eq!(world.report(&once_more, delivered()).await, Held::Kept);
    assert!(claimed(&world.take(ALL).await).contains(&"a2"));
}

pub(crate) async fn a_dead_delivery_parks_its_key_until_an_operator_decides<S: Sending>(
    world: World<S>,
) {
    let endpoint = world.add(ordered(OnDead::Park)).await;
    world.send_keyed(&["a1", "a2", "a3"]).await;
    let claim = world.take_one().await;
    assert_eq!(world.report(&claim, failed(Retry::Never)).await, Held::Kept);
    assert!(world.take(ALL).await.is_empty(), "the dead one blocks its key");
    assert_eq!(world.statuses(&["a1", "a2", "a3"]).await, ["dead", "parked", "parked"]);
    // These messages are published after the delivery of a1 died.
    world.send_keyed(&["a4", "b1"]).await;
    world.deliver_one("b1").await;
    // A replay is sent before the deliveries that wait for it.
    let a1 = world.delivery_of("a1").await.id;
    assert_eq!(world.replay_delivery(a1).await, DeliveryReplayed::Due);
    let claim = world.take_one().await;
    assert_eq!(claim.message, "a1");
    assert_eq!(world.skip(a1).await, DeliverySkipped::Sending);
    assert_eq!(world.report(&claim, failed(Retry::Never)).await, Held::Kept);
    assert!(world.take(ALL).await.is_empty());
    // An operator skips the dead delivery.
    assert_eq!(world.skip(a1).await, DeliverySkipped::Skipped);
    let skipped = world.delivery_of("a1").await;
    assert_eq!(skipped.status, DeliveryStatus::Cancelled);
    assert_eq!(skipped.reason.as_deref(), Some("not needed"));
    assert_eq!(world.skip(a1).await, DeliverySkipped::AlreadyOver);
    assert_eq!(world.skip(DeliveryId(Uuid::now_v7())).await, DeliverySkipped::Unknown);
    world.deliver_one("a2").await;
    // A waiting delivery can be skipped too, also in the middle.
    let a4 = world.delivery_of("a4").await.id;
    assert_eq!(world.skip(a4).await, DeliverySkipped::Skipped);
    world.deliver_one("a3").await;
    assert!(world.take(ALL).await.is_empty());
    // While the endpoint is disabled, a parked delivery is held.
    world.send_keyed(&["c1", "c2"]).await;
    let c1 = world.take_one().await;
    world.disable(endpoint).await;
    assert_eq!(world.statuses(&["c1", "c2"]).await, ["sending", "held"]);
    assert_eq!(world.report(&c1, delivered()).await, Held::Kept);
    world.enable(endpoint).await;
    world.deliver_one("c2").await;
}

pub(crate) async fn a_dead_delivery_is_passed_over_where_the_endpoint_says_so<S: Sending>(
    world: World<S>,
) {
    world.add(ordered(OnDead::Skip)).await;
    world.send_keyed(&["a1", "a2", "a3"]).await;
    let claim = world.take_one().await;
    let claims = world.exchange(vec![outcome(&claim, failed(Retry::Never))], ask(ALL)).await.claims;
    assert_eq!(claimed(&claims), ["a2"], "in the commit that made it dead");
    // Later deliveries were sent, so a replay takes the last place.
    let a1 = world.delivery_of("a1").await.id;
    assert_eq!(world.replay_delivery(a1).await, DeliveryReplayed::Due);
    assert!(world.take(ALL).await.is_empty(), "a2 is under way");
    assert_eq!(world.report(&claims[0], delivered()).await, Held::Kept);
    world.deliver_one("a3").await;
    world.deliver_one("a1").await;
    // The replay of a delivered delivery takes the last place too.
    world.send_keyed(&["a4"]).await;
    assert_eq!(world.replay_delivery(a1).await, DeliveryReplayed::Due);
    world.deliver_one("a4").await;
    world.deliver_one("a1").await;
}

pub(crate) async fn cancelling_a_message_lets_the_next_one_of_its_key_go<S: Sending>(
    world: World<S>,
) {
    // One message is cancelled while its delivery waits, one while it is sent. Its sender reports
    // late.
    world.add(ordered(OnDead::Park)).await;
    world.send_keyed(&["a1", "a2", "a3", "a4"]).await;
    let a1 = world.take_one().await;
    world.act_on("a2", MessageAct::Cancel).await;
    assert!(world.take(ALL).await.is_empty(), "a1 is still under way");
    world.act_on("a1", MessageAct::Cancel).await;
    let a3 = world.take_one().await;
    assert_eq!(a3.message, "a3");
    assert_eq!(world.report(&a1, delivered()).await, Held::Kept, "it got through");
    assert!(world.take(ALL).await.is_empty(), "a3 is under way");
    world.act_on("a2", MessageAct::Replay).await;
    assert_eq!(world.report(&a3, delivered()).await, Held::Kept);
    world.deliver_one("a4").await;
    world.deliver_one("a2").await;
}

pub(crate) async fn a_changed_order_holds_for_what_waits_already<S: Sending>(world: World<S>) {
    // More deliveries are parked than one claim releases.
    let many = 600;
    let settings = EndpointSettings { max_in_flight: 1_000, ..ordered(OnDead::Park) };
    let endpoint = world.add(settings.clone()).await;
    for n in 0..many {
        world.send(keyed(&format!("m{n}"), "a")).await;
    }
    let head = world.take_one().await;
    assert_eq!(head.message, "m0");
    let backlog = world.store.delivery_backlog().await.expect("reads");
    assert_eq!(backlog.parked, many - 1);
    assert_eq!(world.report(&head, failed(Retry::Never)).await, Held::Kept);
    assert!(world.take(ALL).await.is_empty());
    // Dead deliveries no longer block their key: the order stays.
    world.set(endpoint, EndpointSettings { on_dead: OnDead::Skip, ..settings.clone() }).await;
    let next = world.take_one().await;
    assert_eq!(next.message, "m1");
    // The endpoint keeps no order: every delivery may be claimed.
    world.set(endpoint, EndpointSettings { order: EndpointOrder::None, ..settings.clone() }).await;
    assert_eq!(world.take(ALL).await.len() as u64, many - 2);
    // The endpoint keeps order again while all deliveries are under way: a new message waits for these
    // deliveries.
    world.set(endpoint, EndpointSettings { on_dead: OnDead::Skip, ..settings }).await;
    world.send(keyed("last", "a")).await;
    assert!(world.take(ALL).await.is_empty());
    assert_eq!(world.report(&next, delivered()).await, Held::Kept);
    assert!(world.take(ALL).await.is_empty());
    assert_eq!(world.status_of("last").await, DeliveryStatus::Parked);
}

pub(crate) async fn order_that_begins_during_a_later_attempt_blocks_no_key<S: Sending>(
    world: World<S>,
) {
    // The earlier delivery is parked behind the later one. If the later one fails or is lost, both
    // stay open.
    for (is_lost, ids) in [(false, ["a1", "a2"]), (true, ["b1", "b2"])] {
        let unordered = EndpointSettings { order: EndpointOrder::None, ..settings() };
        let endpoint = world.add(unordered).await;
        world.send_keyed(&ids).await;
        let claims = world.take(ALL).await;
        assert_eq!(claimed(&claims), ids);
        world.report(&claims[0], failed(Retry::In(Duration::from_secs(1)))).await;
        world.set(endpoint, ordered(OnDead::Park)).await;
        world.pass(2);
        assert_eq!(claimed(&world.take(ALL).await), [""; 0], "the later one is still under way");
        match is_lost {
            false => {
                world.report(&claims[1], failed(Retry::In(Duration::from_secs(1)))).await;
            }
            true => world.pass(LEASE + 1),
        }
        for id in ids {
            world.take(0).await;
            world.pass(400);
            world.deliver_one(id).await;
        }
        world.delete(endpoint).await;
        world.cancel_orphans().await;
    }
}

pub(crate) async fn order_holds_while_everything_happens_at_once<S: Sending>(world: World<S>) {
    // Senders claim, fail and deliver while publishers publish, all in parallel.
    // Under each key no two attempts may run at once, and none may overtake an earlier message.
    const KEYS: usize = 5;
    const OF_EACH: usize = 24;
    let retry = vec![Duration::ZERO; 50];
    world.add(EndpointSettings { retry, max_in_flight: 64, ..ordered(OnDead::Park) }).await;
    let publishers: Vec<_> = (0..KEYS)
        .map(|key| {
            let store = Arc::clone(&world.store);
            tokio::spawn(async move {
                for n in 0..OF_EACH {
                    let message = keyed(&format!("k{key}_{n}"), &format!("k{key}"));
                    store.publish(message).await.expect("publishes");
                }
            })
        })
        .collect();
    let watch = Arc::new(Mutex::new(Watch::default()));
    let senders: Vec<_> = (0..4)
        .map(|task: usize| {
            let (store, watch) = (Arc::clone(&world.store), Arc::clone(&watch));
            tokio::spawn(async move {
                let mut ended = Vec::new();
                let mut rounds = 0;
                while watch.lock().expect("a lock").over.len() < KEYS * OF_EACH {
                    rounds += 1;
                    assert!(rounds < 20_000, "a key is stuck: {:?}", watch.lock());
                    let ask = DeliveryAsk { node: format!("n{task}").into(), ..ask(8) };
                    let exchanged =
                        store.exchange(std::mem::take(&mut ended), ask).await.expect("exchanges");
                    for claim in exchanged.claims {
                        let mut watch = watch.lock().expect("a lock");
                        watch.begins(&claim.message);
                        let verdict = match (rounds + task) % 5 {
                            // The failure must not open the circuit, which is another case.
                            0 => failed_saying(Retry::Schedule, EndpointSignal::Works),
                            _fine => {
                                watch.over.push(claim.message.clone());
                                delivered()
                            }
                        };
                        // An attempt ends before its outcome is recorded: the store cannot know
                        // earlier.
                        watch.under_way.remove(key_of(&claim.message));
                        ended.push(outcome(&claim, verdict));
                    }
                    tokio::task::yield_now().await;
                }
                store.exchange(ended, ask(0)).await.expect("exchanges");
            })
        })
        .collect();
    for task in publishers.into_iter().chain(senders) {
        task.await.expect("no panic");
    }
    assert!(world.take(ALL).await.is_empty());
}

fn key_of(message: &str) -> &str {
    message.split('_').next().expect("a key")
}

/// The deliveries that the receivers of all keys have seen.
#[derive(Debug, Default)]
struct Watch {
    under_way: HashMap<String, String>,
    over: Vec<String>,
}

impl Watch {
    fn begins(&mut self, message: &str) {
        let (key, n) = message.split_once('_').expect("a key and a number");
        let n: usize = n.parse().expect("a number");
        let before = self.under_way.insert(key.to_owned(), message.to_owned());
        assert_eq!(before, None, "two attempts of one key at once");
        let over = self.over.iter().filter(|one| key_of(one) == key).count();
        assert_eq!(n, over, "{message} came after {over} others of its key");
    }
}
