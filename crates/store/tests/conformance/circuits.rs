//! The circuit of an endpoint, case by case: failures in a row pause it, one delivery tries it again, and an
//! endpoint that asks for it or never recovers is disabled.

use std::time::Duration;

use hapax_core::delivery::DeliveryStatus;
use hapax_core::endpoint::{DisabledBy, EndpointId, EndpointSettings};
use hapax_core::job::Retry;
use hapax_core::store::{AttemptVerdict, DeliveryClaim, EndpointFilter, EndpointSignal, Held};

use crate::harness::{LEASE, World};
use crate::sending::{
    ALL, REFUSED, Sending, delivered, failed, failed_saying, message, settings, wanting,
};

/// An endpoint whose failed deliveries are due again at once.
fn patient() -> EndpointSettings {
    EndpointSettings { retry: vec![Duration::ZERO; 400], ..settings() }
}

impl<S: Sending> World<S> {
    /// An endpoint with this many messages, named `m0`, `m1`, …, five of which have failed.
    async fn failing(&self, settings: EndpointSettings, messages: usize) -> EndpointId {
        let endpoint = self.add(settings).await;
        for n in 0..messages {
            self.send(message(&format!("m{n}"))).await;
        }
        for _ in 0..5 {
            let claim = self.take(1).await.remove(0);
            self.reported(&claim, failed(Retry::Schedule)).await;
        }
        endpoint
    }

    async fn reported(&self, claim: &DeliveryClaim, verdict: AttemptVerdict) {
        assert_eq!(self.report(claim, verdict).await, Held::Kept);
    }

    async fn is_quiet(&self) -> bool {
        self.take(ALL).await.is_empty()
    }
}

pub(crate) async fn five_failures_in_a_row_pause_an_endpoint_and_one_delivery_tries_it<
    S: Sending,
>(
    world: World<S>,
) {
    // An attempt that began before the circuit opened ends after it opened. The attempt must not
    // close the circuit or keep it open for longer.
    let endpoint = world.add(patient()).await;
    let other = world.add(wanting(&["other"])).await;
    for n in 0..7 {
        world.send(message(&format!("m{n}"))).await;
    }
    let claims = world.take(ALL).await;
    assert_eq!(claims.len(), 7);
    for claim in &claims[..4] {
        world.reported(claim, failed(Retry::Schedule)).await;
    }
    assert_eq!(world.endpoint(endpoint).await.failing, None);
    let failing_ones = async || {
        let filter = EndpointFilter { failing: true, limit: 10, ..EndpointFilter::default() };
        let page = world.store.endpoints(filter).await.expect("reads");
        page.items.into_iter().map(|one| one.id).collect::<Vec<_>>()
    };
    assert_eq!(failing_ones().await, []);
    world.reported(&claims[4], failed(Retry::Schedule)).await;
    assert_eq!(failing_ones().await, [endpoint]);
    let failing = world.endpoint(endpoint).await.failing.expect("it is failing");
    assert!(failing.contains("5 times") && failing.contains(REFUSED), "{failing}");
    let held = world.delivery(claims[0].delivery).await;
    assert_eq!((held.status, held.reason), (DeliveryStatus::Held, Some(failing)));
    world.reported(&claims[5], delivered()).await;
    world.reported(&claims[6], failed(Retry::Schedule)).await;
    let fresh =
        hapax_core::store::NewMessage { r#type: "invoice.paid".to_owned(), ..message("fresh") };
    world.send(fresh).await;
    world.pass(59);
    assert!(world.is_quiet().await, "it is open for a minute");
    let backlog = world.store.delivery_backlog().await.expect("reads");
    assert_eq!((backlog.held, backlog.waiting), (7, 0));
    world.pass(1);
    let probe = world.take_one().await;
    assert_eq!(probe.message, "fresh", "the least tried delivery");
    assert!(world.is_quiet().await, "one at a time");
    world.reported(&probe, failed(Retry::Schedule)).await;
    world.pass(119);
    assert!(world.is_quiet().await, "twice as long");
    world.pass(1);
    let probe = world.take_one().await;
    world.reported(&probe, delivered()).await;
    assert_eq!(world.endpoint(endpoint).await.failing, None);
    // Deliveries that were held do not all start together.
    let mut expected = 2;
    let mut left = 6;
    while left > 0 {
        let claims = world.take(ALL).await;
        assert_eq!(claims.len(), expected.min(left));
        left -= claims.len();
        for claim in &claims {
            world.reported(claim, delivered()).await;
        }
        expected *= 4;
    }
    assert!(world.is_quiet().await);
    assert_eq!(world.endpoint(other).await.failing, None);
}

pub(crate) async fn a_probe_without_an_answer_delays_the_next_one_and_nothing_else<S: Sending>(
    world: World<S>,
) {
    // The probe hangs until its lease ends, answers late, or is given back: the circuit must never stay
    // half-open.
    let endpoint = world.failing(patient(), 8).await;
    world.pass(60);
    let hangs = world.take_one().await;
    world.pass(LEASE - 1);
    assert!(world.is_quiet().await, "its lease runs");
    world.pass(1);
    let second = world.take_one().await;
    assert_ne!(second.message, hangs.message, "the lost one backs off");
    world.reported(&hangs, delivered()).await;
    assert!(world.endpoint(endpoint).await.failing.is_some(), "it answered for an older probe");
    assert!(world.is_quiet().await, "the second one is under way");
    world.reported(&second, AttemptVerdict::GivenBack).await;
    let third = world.take_one().await;
    world.reported(&third, failed(Retry::Unsent)).await;
    let fourth = world.take_one().await;
    world.reported(&fourth, delivered()).await;
    assert_eq!(world.endpoint(endpoint).await.failing, None);
}

pub(crate) async fn a_pause_that_an_endpoint_asks_for_holds_for_all_of_its_deliveries<
    S: Sending,
>(
    world: World<S>,
) {
    let endpoint = EndpointSettings { max_in_flight: 2, ..patient() };
    world.add(endpoint).await;
    world.add(EndpointSettings { ..wanting(&["other"]) }).await;
    for n in 0..4 {
        world.send(message(&format!("m{n}"))).await;
    }
    let claims = world.take(ALL).await;
    assert_eq!(claims.len(), 2);
    let wait = Duration::from_secs(100);
    let busy = failed_saying(Retry::NotBefore(wait), EndpointSignal::Pauses(wait));
    world.reported(&claims[0], busy).await;
    world.reported(&claims[1], delivered()).await;
    let other = hapax_core::store::NewMessage { r#type: "other".to_owned(), ..message("other") };
    world.send(other).await;
    assert_eq!(world.deliver_all().await, ["other"], "only that endpoint pauses");
    world.pass(99);
    assert!(world.is_quiet().await);
    world.pass(1);
    assert_eq!(world.take(ALL).await.len(), 2);
}

pub(crate) async fn an_endpoint_that_asks_for_it_is_disabled_and_comes_back_with_one_delivery<
    S: Sending,
>(
    world: World<S>,
) {
    let endpoint = world.add(patient()).await;
    for n in 0..4 {
        world.send(message(&format!("m{n}"))).await;
    }
    let version = world.endpoint(endpoint).await.version;
    let claim = world.take(1).await.remove(0);
    world.reported(&claim, failed_saying(Retry::Schedule, EndpointSignal::Disable)).await;
    let record = world.endpoint(endpoint).await;
    let disabled = record.disabled.expect("it is disabled");
    assert_eq!((disabled.at, disabled.reason.as_str()), (world.clock.now(), REFUSED));
    assert_eq!(disabled.by, DisabledBy::Automatic);
    assert!(record.version > version, "an operator's older change must not undo it");
    let held = world.delivery_of("m1").await;
    assert_eq!((held.status, held.reason.as_deref()), (DeliveryStatus::Held, Some(REFUSED)));
    world.pass(100_000);
    assert!(world.is_quiet().await);
    world.enable(endpoint).await;
    assert_eq!(world.status_of("m1").await, DeliveryStatus::Held, "until one was delivered");
    let probe = world.take_one().await;
    world.reported(&probe, delivered()).await;
    assert_eq!(world.endpoint(endpoint).await.failing, None);
    assert_eq!(world.deliver_all().await.len(), 3);
}

pub(crate) async fn an_endpoint_that_asks_with_a_success_is_disabled_after_that_delivery<
    S: Sending,
>(
    world: World<S>,
) {
    // The endpoint takes a delivery and asks not to be called again. The sender reports it twice.
    let reason = "the endpoint answered 200 OK and asked not to be called again".to_owned();
    let AttemptVerdict::Delivered(answer) = delivered() else { panic!("it is delivered") };
    let last = AttemptVerdict::DeliveredLast { answer: answer.clone(), reason: reason.clone() };
    let endpoint = world.add(patient()).await;
    let other = world.add(wanting(&["other"])).await;
    for n in 0..3 {
        world.send(message(&format!("m{n}"))).await;
    }
    let version = world.endpoint(endpoint).await.version;
    let claim = world.take(1).await.remove(0);
    for _ in 0..2 {
        world.reported(&claim, last.clone()).await;
        let taken = world.delivery(claim.delivery).await;
        assert_eq!((taken.status, taken.reason), (DeliveryStatus::Delivered, None));
        let attempts: Vec<_> = taken.attempts.iter().map(|one| one.answer.clone()).collect();
        assert_eq!(attempts, [Some(answer.body.clone())]);
        let record = world.endpoint(endpoint).await;
        let disabled = record.disabled.expect("it is disabled");
        assert_eq!((disabled.at, &disabled.reason), (world.clock.now(), &reason));
        assert_eq!((disabled.by, record.version), (DisabledBy::Automatic, version + 1));
    }
    assert_eq!(world.endpoint(other).await.disabled, None);
    let held = world.delivery_of("m1").await;
    assert_eq!((held.status, held.reason), (DeliveryStatus::Held, Some(reason)));
    world.pass(100_000);
    assert!(world.is_quiet().await);
    world.enable(endpoint).await;
    let probe = world.take_one().await;
    world.reported(&probe, delivered()).await;
    assert_eq!(world.endpoint(endpoint).await.failing, None);
    assert_eq!(world.deliver_all().await.len(), 1);
}

pub(crate) async fn days_of_nothing_but_failures_disable_an_endpoint<S: Sending>(world: World<S>) {
    // A success in between restarts the count of days. An endpoint may opt out.
    for auto_disable in [true, false] {
        let settings = EndpointSettings { auto_disable, ..wanting(&["invoice.*"]) };
        let settings = EndpointSettings { retry: vec![Duration::ZERO; 400], ..settings };
        let endpoint = world.add(settings).await;
        let name = format!("m_{auto_disable}");
        world.send(message(&name)).await;
        let mut hours = 0;
        while hours < 24 * 10 && world.endpoint(endpoint).await.disabled.is_none() {
            for claim in world.take(ALL).await {
                // After four days the endpoint works once.
                let verdict = if hours == 96 { delivered() } else { failed(Retry::Schedule) };
                world.reported(&claim, verdict).await;
                if hours == 96 {
                    world.replay_delivery(claim.delivery).await;
                }
            }
            world.pass(3_600);
            hours += 1;
        }
        let disabled = world.endpoint(endpoint).await.disabled;
        match auto_disable {
            true => {
                assert!(disabled.expect("disabled").reason.contains("5 days"), "{hours}");
                assert!((96 + 120..96 + 124).contains(&hours), "after {hours} hours");
            }
            false => assert_eq!(disabled, None),
        }
        world.delete(endpoint).await;
    }
}

pub(crate) async fn a_refused_message_says_nothing_against_its_endpoint<S: Sending>(
    world: World<S>,
) {
    let endpoint = world.add(patient()).await;
    for n in 0..8 {
        world.send(message(&format!("m{n}"))).await;
        let claim = world.take_one().await;
        world.reported(&claim, failed_saying(Retry::Never, EndpointSignal::Works)).await;
    }
    assert_eq!(world.endpoint(endpoint).await.failing, None);
    assert_eq!(world.status_of("m7").await, DeliveryStatus::Dead);
}
