//! The end of deliveries that were dead, held or parked for too long.

use std::time::Duration;

use hapax_core::Tenant;
use hapax_core::delivery::{DeliveryStatus, EXPIRED};
use hapax_core::endpoint::{EndpointId, EndpointOrder, EndpointSettings};
use hapax_core::job::Retry;
use hapax_core::store::{
    AttemptVerdict, Expiry, ExpiryAsk, ExpiryNotice, Held, Horizon, NewMessage,
};

use crate::harness::{LEASE, World, after};
use crate::sending::{ALL, Sending, delivered, failed, message, settings, wanting};

/// Deliveries are kept for a day, and announced for the last hour of it.
const KEPT: i64 = 86_400;
const NOTICE: i64 = 3_600;

/// Runs one round of expiry, in slices of at most `limit`.
async fn expire<S: Sending>(world: &World<S>, limit: usize) -> Expiry {
    let seconds = |count: i64| Duration::from_secs(count.unsigned_abs());
    let ask = ExpiryAsk { kept: seconds(KEPT), notice: seconds(NOTICE), limit };
    let mut round = Expiry::default();
    for _ in 0..100 {
        let slice = world.store.expire_deliveries(ask).await.expect("expires");
        let cancelled: u64 = slice.cancelled.iter().map(|(_, count)| count).sum();
        assert!(cancelled <= limit as u64, "{slice:?}");
        round.announced.extend(slice.announced);
        for (endpoint, count) in slice.cancelled {
            match round.cancelled.iter_mut().find(|(known, _)| *known == endpoint) {
                Some((_, total)) => *total += count,
                None => round.cancelled.push((endpoint, count)),
            }
        }
        if !slice.more {
            round.announced.sort_by_key(|notice| notice.endpoint.0);
            round.cancelled.sort_by_key(|(endpoint, _)| endpoint.0);
            return round;
        }
    }
    panic!("the round never ends");
}

fn nothing() -> Expiry {
    Expiry::default()
}

fn announced(endpoint: EndpointId, oldest: i64) -> ExpiryNotice {
    ExpiryNotice { endpoint, tenant: Tenant::default(), oldest: after(oldest) }
}

fn of_type(kind: &str, id: &str) -> NewMessage {
    NewMessage { r#type: kind.to_owned(), ..message(id) }
}

/// Makes every delivery that is due now a dead letter.
async fn bury_all<S: Sending>(world: &World<S>) {
    for claim in world.take(ALL).await {
        assert_eq!(world.report(&claim, failed(Retry::Never)).await, Held::Kept);
    }
}

pub(crate) async fn what_is_dead_or_held_too_long_is_announced_once_and_then_cancelled<
    S: Sending,
>(
    world: World<S>,
) {
    // The expiry is announced while an operator has time to act. Younger, waiting and delivered
    // deliveries stay.
    let dying = world.add(wanting(&["dying"])).await;
    let disabled = world.add(wanting(&["held"])).await;
    let active = world.add(wanting(&["active"])).await;
    for n in 0..3 {
        world.send(of_type("dying", &format!("dead{n}"))).await;
    }
    bury_all(&world).await;
    world.pass(10);
    world.disable(disabled).await;
    for n in 0..3 {
        world.send(of_type("held", &format!("held{n}"))).await;
    }
    world.send(of_type("active", "failing")).await;
    let claim = world.take_one().await;
    let later = Retry::In(Duration::from_secs(KEPT.unsigned_abs() * 9));
    assert_eq!(world.report(&claim, failed(later)).await, Held::Kept);
    world.send(of_type("active", "done")).await;
    assert_eq!(world.deliver_all().await, ["done"]);
    world.pass(KEPT / 2);
    world.send(of_type("dying", "young")).await;
    bury_all(&world).await;
    world.send(of_type("held", "held_young")).await;

    assert_eq!(expire(&world, 2).await, nothing(), "nothing is near its end");
    world.pass(KEPT / 2 - NOTICE + 1);
    let mut expected = vec![announced(dying, 0), announced(disabled, 10)];
    expected.sort_by_key(|notice| notice.endpoint.0);
    assert_eq!(expire(&world, 2).await, Expiry { announced: expected, ..nothing() });
    assert_eq!(expire(&world, 2).await, nothing(), "once");
    world.pass(NOTICE - 1);
    assert_eq!(expire(&world, 2).await, nothing(), "the announcement is not old enough");
    world.pass(1);
    let mut expected = vec![(dying, 3), (disabled, 3)];
    expected.sort_by_key(|(endpoint, _)| endpoint.0);
    assert_eq!(expire(&world, 2).await, Expiry { cancelled: expected, ..nothing() });
    assert_eq!(expire(&world, 2).await, nothing());
    for id in ["dead0", "dead1", "dead2", "held0", "held1", "held2"] {
        let delivery = world.delivery_of(id).await;
        assert_eq!(delivery.status, DeliveryStatus::Cancelled, "{id}");
        assert_eq!(delivery.reason.as_deref(), Some(EXPIRED), "{id}");
        assert_eq!(delivery.finished_at, Some(world.clock.now()), "{id}");
    }
    assert_eq!(world.delivery_of("dead0").await.attempts.len(), 1, "its history stays");
    for (id, status) in [
        ("young", DeliveryStatus::Dead),
        ("held_young", DeliveryStatus::Held),
        ("failing", DeliveryStatus::Failed),
        ("done", DeliveryStatus::Delivered),
    ] {
        assert_eq!(world.status_of(id).await, status, "{id}");
    }
    // An expired delivery has ended, and is pruned like other deliveries of its age.
    world.enable(disabled).await;
    assert_eq!(world.deliver_all().await, ["held_young"]);
    world.pass(1);
    let horizon = Horizon { events_before: world.clock.now(), ..Horizon::forever() };
    while world.store.prune(horizon.clone(), 2).await.expect("prunes") {}
    let left: Vec<_> = world.all_deliveries().await.into_iter().map(|one| one.message).collect();
    assert_eq!(left, ["young", "failing"]);
    let _ = active;
}

pub(crate) async fn an_endpoint_that_was_repaired_is_announced_again<S: Sending>(world: World<S>) {
    // An announcement of a year ago does not cover the next dead letters: they are announced again.
    let endpoint = world.add(settings()).await;
    world.send(message("m1")).await;
    bury_all(&world).await;
    world.pass(KEPT);
    assert_eq!(expire(&world, 10).await.announced, [announced(endpoint, 0)]);
    let dead = world.delivery_of("m1").await.id;
    world.replay_delivery(dead).await;
    assert_eq!(world.deliver_all().await, ["m1"]);
    assert_eq!(expire(&world, 10).await, nothing());
    world.send(message("m2")).await;
    bury_all(&world).await;
    world.pass(2 * KEPT);
    assert_eq!(expire(&world, 10).await.announced, [announced(endpoint, KEPT)]);
    assert_eq!(world.status_of("m2").await, DeliveryStatus::Dead);
    world.pass(NOTICE);
    assert_eq!(expire(&world, 10).await.cancelled, [(endpoint, 1)]);
    assert_eq!(world.status_of("m2").await, DeliveryStatus::Cancelled);
}

pub(crate) async fn a_delivery_is_held_since_it_was_due_or_its_endpoint_disabled<S: Sending>(
    world: World<S>,
) {
    // A dead letter that is replayed to a disabled endpoint waits from then on, however old it is.
    // An endpoint that was enabled in between no longer holds anything.
    let endpoint = world.add(settings()).await;
    world.send(message("m1")).await;
    bury_all(&world).await;
    world.disable(endpoint).await;
    world.pass(KEPT - NOTICE / 2);
    world.replay_delivery(world.delivery_of("m1").await.id).await;
    world.pass(NOTICE);
    assert_eq!(expire(&world, 10).await, nothing());
    world.pass(KEPT - NOTICE);
    let oldest = KEPT - NOTICE / 2;
    assert_eq!(expire(&world, 10).await.announced, [announced(endpoint, oldest)]);
    world.enable(endpoint).await;
    world.pass(NOTICE);
    assert_eq!(expire(&world, 10).await, nothing(), "it is sent again");
    assert_eq!(world.deliver_all().await, ["m1"]);
}

pub(crate) async fn a_request_that_got_through_counts_although_its_delivery_expired<S: Sending>(
    world: World<S>,
) {
    // The sender hung for a day. The receiver has the message, so the delivery must not be shown as
    // cancelled.
    let endpoint = world.add(settings()).await;
    world.send(message("m1")).await;
    let claim = world.take_one().await;
    world.pass(LEASE + 1);
    world.disable(endpoint).await;
    assert!(world.take(ALL).await.is_empty());
    world.pass(KEPT);
    assert_eq!(expire(&world, 10).await.announced.len(), 1);
    world.pass(NOTICE);
    assert_eq!(expire(&world, 10).await.cancelled, [(endpoint, 1)]);
    assert_eq!(world.report(&claim, AttemptVerdict::GivenBack).await, Held::Lost);
    assert_eq!(world.report(&claim, delivered()).await, Held::Kept);
    assert_eq!(world.status_of("m1").await, DeliveryStatus::Delivered);
}

pub(crate) async fn dead_deliveries_of_a_deleted_endpoint_expire_without_an_announcement<
    S: Sending,
>(
    world: World<S>,
) {
    // These deliveries can never be replayed, so an operator could do nothing about them in time.
    let endpoint = world.add(settings()).await;
    world.send(message("m1")).await;
    bury_all(&world).await;
    world.delete(endpoint).await;
    world.pass(KEPT);
    assert_eq!(expire(&world, 10).await, nothing());
    world.pass(1);
    let expected = Expiry { cancelled: vec![(endpoint, 1)], ..nothing() };
    assert_eq!(expire(&world, 10).await, expected);
    assert_eq!(world.status_of("m1").await, DeliveryStatus::Cancelled);
}

pub(crate) async fn what_is_parked_too_long_expires_before_the_dead_one_that_it_waits_for<
    S: Sending,
>(
    world: World<S>,
) {
    // If the dead delivery ended first, messages of a month ago would be sent. A delivery that was
    // parked later is sent.
    let ordered = EndpointSettings { order: EndpointOrder::Key, ..settings() };
    let endpoint = world.add(ordered).await;
    for id in ["head", "second", "third"] {
        world.send(message(id).with_key("k")).await;
    }
    let head = world.take_one().await;
    assert_eq!(world.report(&head, failed(Retry::Never)).await, Held::Kept);
    assert!(world.take(ALL).await.is_empty(), "its key is parked");
    world.pass(KEPT / 2);
    world.send(message("young").with_key("k")).await;
    assert!(world.take(ALL).await.is_empty());
    world.pass(KEPT / 2);
    assert_eq!(expire(&world, 10).await.announced, [announced(endpoint, 0)]);
    world.pass(NOTICE);
    assert_eq!(expire(&world, 1).await.cancelled, [(endpoint, 3)]);
    for id in ["head", "second", "third"] {
        assert_eq!(world.delivery_of(id).await.reason.as_deref(), Some(EXPIRED), "{id}");
    }
    assert_eq!(world.deliver_all().await, ["young"]);
}
