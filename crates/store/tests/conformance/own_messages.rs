//! The messages that Hapax publishes about itself: each change is published once, and never about
//! an endpoint that receives them.

use std::time::Duration;

use hapax_core::Tenant;
use hapax_core::endpoint::{EndpointAct, EndpointChanged, EndpointId, EndpointSettings};
use hapax_core::job::Retry;
use hapax_core::message::OWN_TENANT;
use hapax_core::store::{
    AttemptVerdict, DeliveryClaim, EndpointSignal, ExpiryAsk, Held, MessageFilter, NewMessage,
};
use serde_json::{Value, json};

use crate::harness::{World, after};
use crate::sending::{ALL, REFUSED, Sending, delivered, failed, failed_saying, message, wanting};

pub(crate) fn own() -> Tenant {
    Tenant::new(OWN_TENANT)
}

impl<S: Sending> World<S> {
    /// All messages of Hapax about itself so far, oldest first: their types and contents.
    pub(crate) async fn own_messages(&self) -> Vec<(String, Value)> {
        let filter = MessageFilter { tenant: Some(own()), limit: 500, ..MessageFilter::default() };
        let mut found = self.store.messages(filter).await.expect("reads").items;
        found.reverse();
        let mut all = Vec::new();
        for summary in found {
            let mut details = self.store.message(&summary.id, Some(own())).await.expect("reads");
            let body: Value = serde_json::from_slice(&details.remove(0).body).expect("JSON");
            assert_eq!(body["type"], json!(summary.r#type));
            assert!(body["sequence"].is_u64(), "{body}");
            all.push((summary.r#type, body["data"].clone()));
        }
        all
    }

    /// Claims everything, and returns the claims of this endpoint. The others are given back.
    async fn take_of(&self, endpoint: EndpointId) -> Vec<DeliveryClaim> {
        let (its, others): (Vec<_>, Vec<_>) =
            self.take(ALL).await.into_iter().partition(|claim| claim.endpoint.id == endpoint);
        for claim in others {
            assert_eq!(self.report(&claim, AttemptVerdict::GivenBack).await, Held::Kept);
        }
        its
    }

    async fn settle_next(&self, endpoint: EndpointId, verdict: AttemptVerdict) {
        let claims = self.take_of(endpoint).await;
        let (first, rest) = claims.split_first().expect("a due delivery");
        assert_eq!(self.report(first, verdict).await, Held::Kept);
        for claim in rest {
            assert_eq!(self.report(claim, AttemptVerdict::GivenBack).await, Held::Kept);
        }
    }
}

fn patient(types: &[&str]) -> EndpointSettings {
    EndpointSettings { retry: vec![Duration::ZERO; 400], ..wanting(types) }
}

fn of_type(kind: &str, id: &str) -> NewMessage {
    NewMessage { r#type: kind.to_owned(), ..message(id) }
}

fn about(kind: &str, endpoint: EndpointId, more: Value) -> (String, Value) {
    let mut data = json!({"endpoint": endpoint.to_string(), "tenant": "default"});
    for (name, value) in more.as_object().expect("an object") {
        data[name] = value.clone();
    }
    (kind.to_owned(), data)
}

pub(crate) async fn the_trouble_of_an_endpoint_is_published_with_the_change<S: Sending>(
    world: World<S>,
) {
    // Each failure is published once at its beginning and once at its end. A probe that fails is
    // not a second failure, and an enabled endpoint has recovered only after a successful delivery.
    world.add_for(own(), wanting(&["hapax.endpoint.*"])).await;
    let endpoint = world.add(patient(&["invoice.*"])).await;
    for n in 0..9 {
        world.send(message(&format!("m{n}"))).await;
    }
    for _ in 0..4 {
        world.settle_next(endpoint, failed(Retry::Schedule)).await;
    }
    assert_eq!(world.own_messages().await, []);
    world.settle_next(endpoint, failed(Retry::Schedule)).await;
    let reason = world.endpoint(endpoint).await.failing.expect("it is failing");
    let mut expected = vec![about("hapax.endpoint.failing", endpoint, json!({"reason": reason}))];
    assert_eq!(world.own_messages().await, expected);
    world.pass(60);
    world.settle_next(endpoint, failed(Retry::Schedule)).await;
    assert_eq!(world.own_messages().await, expected, "the same trouble");
    world.pass(120);
    world.settle_next(endpoint, delivered()).await;
    expected.push(about("hapax.endpoint.recovered", endpoint, json!({})));
    assert_eq!(world.own_messages().await, expected);

    let gone = failed_saying(Retry::Never, EndpointSignal::Disable);
    world.settle_next(endpoint, gone).await;
    expected.push(about("hapax.endpoint.disabled", endpoint, json!({"reason": REFUSED})));
    assert_eq!(world.own_messages().await, expected);
    world.enable(endpoint).await;
    assert_eq!(world.own_messages().await, expected, "nothing has shown that it works");
    world.settle_next(endpoint, delivered()).await;
    expected.push(about("hapax.endpoint.recovered", endpoint, json!({})));
    assert_eq!(world.own_messages().await, expected);

    world.disable(endpoint).await;
    world.disable(endpoint).await;
    let why = json!({"reason": "it is being moved"});
    expected.push(about("hapax.endpoint.disabled", endpoint, why));
    assert_eq!(world.own_messages().await, expected);
    world.enable(endpoint).await;
    expected.push(about("hapax.endpoint.recovered", endpoint, json!({})));
    assert_eq!(world.own_messages().await, expected);
    world.set(endpoint, patient(&["invoice.*", "other"])).await;
    world.delete(endpoint).await;
    assert_eq!(world.own_messages().await, expected, "no trouble");
}

pub(crate) async fn a_receiver_of_own_messages_gets_none_about_itself<S: Sending>(world: World<S>) {
    // A failing receiver that got messages about its own failures would cause new messages without
    // end.
    let receiver = world.add_for(own(), wanting(&[])).await;
    let endpoint = world.add(wanting(&["invoice.*"])).await;
    world.disable(endpoint).await;
    assert_eq!(world.own_messages().await.len(), 1);
    world.settle_next(receiver, failed_saying(Retry::Never, EndpointSignal::Disable)).await;
    assert!(world.endpoint(receiver).await.disabled.is_some());
    world.enable(receiver).await;
    world.disable(receiver).await;
    world.pass(80_000);
    let expired = world.store.expire_deliveries(ask_expiry()).await.expect("expires");
    assert_eq!(expired.announced.len(), 1, "the log names it");
    world.pass(7_200);
    while world.store.publish_deaths(2).await.expect("publishes") {}
    assert_eq!(world.own_messages().await.len(), 1);
}

pub(crate) async fn what_no_endpoint_wants_is_not_stored<S: Sending>(world: World<S>) {
    // A message that no endpoint wants is not published later either: a new endpoint gets messages
    // from its creation on.
    let endpoint = world.add(wanting(&["invoice.*"])).await;
    world.add_for(own(), wanting(&["hapax.alert.*"])).await;
    world.send(message("m0")).await;
    world.settle_next(endpoint, failed(Retry::Never)).await;
    world.disable(endpoint).await;
    assert_eq!(world.own_messages().await, []);
    let late = world.add_for(own(), wanting(&["hapax.*"])).await;
    world.pass(7_200);
    while world.store.publish_deaths(2).await.expect("publishes") {}
    assert_eq!(world.own_messages().await, []);
    world.enable(endpoint).await;
    assert_eq!(world.own_messages().await.len(), 1);
    assert_eq!(world.change(late, EndpointAct::Delete).await, EndpointChanged::Deleted);
    world.disable(endpoint).await;
    assert_eq!(world.own_messages().await.len(), 1, "only for endpoints that are there");
}

pub(crate) async fn dead_deliveries_are_published_once_an_hour_with_their_number<S: Sending>(
    world: World<S>,
) {
    // An endpoint that refuses everything must not cause a message for each of its messages, and no dead
    // delivery may be missing from the numbers.
    world.add_for(own(), wanting(&["hapax.delivery.dead"])).await;
    let endpoint = world.add(wanting(&["invoice.*"])).await;
    let other = world.add(wanting(&["other"])).await;
    let bury = async |endpoint: EndpointId, id: &str, kind: &str| {
        world.send(of_type(kind, id)).await;
        let refused = failed_saying(Retry::Never, EndpointSignal::Works);
        for claim in world.take_of(endpoint).await {
            assert_eq!(world.report(&claim, refused.clone()).await, Held::Kept);
        }
    };
    let start = world.clock.now();
    let dead = |endpoint, count: u64, since: i64| {
        let since = start + Duration::from_secs(since.unsigned_abs());
        about("hapax.delivery.dead", endpoint, json!({"count": count, "since": since}))
    };
    bury(endpoint, "m0", "invoice.paid").await;
    let mut expected = vec![dead(endpoint, 1, 0)];
    assert_eq!(world.own_messages().await, expected, "the first one at once");
    world.pass(10);
    bury(endpoint, "m1", "invoice.paid").await;
    bury(other, "o1", "other").await;
    expected.push(dead(other, 1, 10));
    world.pass(100);
    bury(endpoint, "m2", "invoice.paid").await;
    assert!(!world.store.publish_deaths(2).await.expect("publishes"));
    assert_eq!(world.own_messages().await, expected, "each endpoint has its own hour");
    world.pass(3_600 - 111);
    assert!(!world.store.publish_deaths(2).await.expect("publishes"));
    assert_eq!(world.own_messages().await, expected);
    world.pass(1);
    while world.store.publish_deaths(1).await.expect("publishes") {}
    expected.push(dead(endpoint, 2, 10));
    assert_eq!(world.own_messages().await, expected);
    // The next delivery that dies after the hour is announced too.
    world.pass(5);
    bury(endpoint, "m3", "invoice.paid").await;
    world.pass(3_600);
    bury(endpoint, "m4", "invoice.paid").await;
    expected.push(dead(endpoint, 2, 3_605));
    assert_eq!(world.own_messages().await, expected);
    world.pass(3_600);
    assert!(!world.store.publish_deaths(2).await.expect("publishes"));
    assert_eq!(world.own_messages().await, expected);
}

fn ask_expiry() -> ExpiryAsk {
    let hours = |count: u64| Duration::from_secs(count * 3_600);
    ExpiryAsk { kept: hours(24), notice: hours(3), limit: 10 }
}

pub(crate) async fn deliveries_that_expire_soon_are_published_once_for_each_endpoint<S: Sending>(
    world: World<S>,
) {
    world.add_for(own(), wanting(&["hapax.delivery.expiring"])).await;
    let endpoint = world.add(wanting(&["invoice.*"])).await;
    for n in 0..2 {
        world.send(message(&format!("m{n}"))).await;
    }
    for claim in world.take_of(endpoint).await {
        assert_eq!(world.report(&claim, failed(Retry::Never)).await, Held::Kept);
    }
    world.pass(20 * 3_600);
    world.store.expire_deliveries(ask_expiry()).await.expect("expires");
    assert_eq!(world.own_messages().await, []);
    world.pass(2 * 3_600);
    for _ in 0..3 {
        world.store.expire_deliveries(ask_expiry()).await.expect("expires");
    }
    // Two hours are left, and the announcement must be visible for three.
    let times = json!({"since": after(0), "cancelled_from": after(25 * 3_600)});
    let expected = vec![about("hapax.delivery.expiring", endpoint, times)];
    assert_eq!(world.own_messages().await, expected);
}
