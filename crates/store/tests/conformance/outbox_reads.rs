//! The reads of sending: lists, filters, pages, details and the backlog.

use hapax_core::Tenant;
use hapax_core::delivery::{DeliveryId, DeliveryStatus, MessageStatus};
use hapax_core::job::Retry;
use hapax_core::store::{
    DeliveryBacklog, DeliveryDetail, DeliveryFilter, Held, MessageAct, MessageFilter, NewMessage,
    Outcome, Settlement,
};
use uuid::Uuid;

use crate::harness::{LEASE, World, after, job, noon, spec};
use crate::sending::{ALL, Sending, delivered, failed, json, message, settings, wanting};

/// All pages of a list of messages, as ids.
async fn messages<S: Sending>(world: &World<S>, filter: MessageFilter) -> Vec<String> {
    let (mut listed, mut before) = (Vec::new(), None);
    loop {
        let page = MessageFilter { before, limit: 2, ..filter.clone() };
        let page = world.store.messages(page).await.expect("reads");
        assert!(page.items.len() <= 2);
        listed.extend(page.items.into_iter().map(|one| one.id));
        before = page.next;
        if before.is_none() {
            return listed;
        }
    }
}

/// All pages of a list of deliveries, as the ids of their messages.
async fn deliveries<S: Sending>(world: &World<S>, filter: DeliveryFilter) -> Vec<String> {
    let (mut listed, mut before) = (Vec::new(), None);
    loop {
        let page = DeliveryFilter { before, limit: 2, ..filter.clone() };
        let page = world.store.deliveries(page).await.expect("reads");
        assert!(page.items.len() <= 2);
        listed.extend(page.items.into_iter().map(|one| one.message));
        before = page.next;
        if before.is_none() {
            return listed;
        }
    }
}

pub(crate) async fn messages_are_listed_from_new_to_old_and_filtered<S: Sending>(world: World<S>) {
    // Seven messages fill four pages. Their statuses follow from their deliveries alone.
    let endpoint = world.add(wanting(&["invoice.*"])).await;
    world.add(wanting(&["invoice.*"])).await;
    world.add_for(Tenant::new("acme"), settings()).await;
    let of = |id: &str, kind: &str| NewMessage { r#type: kind.to_owned(), ..message(id) };
    for (id, kind) in [
        ("m0", "invoice.paid"),
        ("m1", "order.paid"),
        ("m2", "invoice.due"),
        ("m3", "invoice.paid"),
        ("m4", "order.paid"),
    ] {
        world.send(of(id, kind)).await;
        world.pass(1);
    }
    world.send(message("m5").with_tenant("acme").with_key("k\"1").with_api_version("v1")).await;
    world.pass(1);
    world.send(message("m6").with_key("k\"1")).await;
    let all = MessageFilter::default;
    assert_eq!(messages(&world, all()).await, ["m6", "m5", "m4", "m3", "m2", "m1", "m0"]);
    let tenant = Some(Tenant::new("acme"));
    assert_eq!(messages(&world, MessageFilter { tenant, ..all() }).await, ["m5"]);
    let message_type = Some("invoice.paid".to_owned());
    let paid = messages(&world, MessageFilter { message_type, ..all() }).await;
    assert_eq!(paid, ["m6", "m5", "m3", "m0"]);
    let key = Some("k\"1".to_owned());
    assert_eq!(messages(&world, MessageFilter { key, ..all() }).await, ["m6", "m5"]);
    let (since, until) = (Some(after(1)), Some(after(3)));
    assert_eq!(messages(&world, MessageFilter { since, until, ..all() }).await, ["m2", "m1"]);
    let none = Some(MessageStatus(None));
    assert_eq!(messages(&world, MessageFilter { status: none, ..all() }).await, ["m4", "m1"]);
    // The status of a message is that of the delivery that most needs attention.
    for claim in world.take(ALL).await {
        let verdict = match (claim.message.as_str(), claim.endpoint.id == endpoint) {
            ("m0", true) => failed(Retry::Never),
            ("m2", true) => failed(Retry::Schedule),
            ("m0" | "m2" | "m3", _) => delivered(),
            _under_way => continue,
        };
        assert_eq!(world.report(&claim, verdict).await, Held::Kept);
    }
    for (status, expected) in [
        (DeliveryStatus::Dead, &["m0"][..]),
        (DeliveryStatus::Failed, &["m2"]),
        (DeliveryStatus::Delivered, &["m3"]),
        (DeliveryStatus::Sending, &["m6", "m5"]),
        (DeliveryStatus::Waiting, &[]),
        (DeliveryStatus::Cancelled, &[]),
    ] {
        let filter = MessageFilter { status: Some(MessageStatus(Some(status))), ..all() };
        assert_eq!(messages(&world, filter).await, expected, "{status:?}");
    }
    let page = MessageFilter { tenant: Some(Tenant::new("acme")), limit: 10, ..all() };
    let page = world.store.messages(page).await.expect("reads");
    let [summary] = &page.items[..] else { panic!("{page:?}") };
    assert_eq!((summary.id.as_str(), summary.tenant.as_str()), ("m5", "acme"));
    assert_eq!((summary.r#type.as_str(), summary.created_at), ("invoice.paid", after(5)));
    assert_eq!(summary.api_version.as_deref(), Some("v1"));
    assert_eq!((summary.key.as_deref(), summary.deliveries), (Some("k\"1"), 1));
    assert!(summary.sequence.is_some());
}

pub(crate) async fn a_message_is_read_with_its_deliveries_and_their_attempts<S: Sending>(
    world: World<S>,
) {
    // One message has a delivery that is lost once, fails once and is then delivered, and another
    // delivery to a second endpoint.
    let first = world.add(settings()).await;
    let second = world.add(settings()).await;
    world.send(message("m1").with_key("acct_1")).await;
    world.send(message("m2")).await;
    let claims = world.take(ALL).await;
    let other = claims
        .iter()
        .find(|claim| claim.endpoint.id == second && claim.message == "m1")
        .expect("claimed");
    assert_eq!(world.report(other, failed(Retry::Never)).await, Held::Kept);
    world.pass(LEASE + 2);
    let again = |claims: Vec<hapax_core::store::DeliveryClaim>| {
        let of = |claim: &hapax_core::store::DeliveryClaim| {
            claim.message == "m1" && claim.endpoint.id == first
        };
        claims.into_iter().find(of).expect("claimed again")
    };
    let claim = again(world.take(ALL).await);
    assert_eq!(world.report(&claim, failed(Retry::Schedule)).await, Held::Kept);
    world.pass(72);
    let claim = again(world.take(ALL).await);
    assert_eq!(world.report(&claim, delivered()).await, Held::Kept);
    let detail = world.message("m1").await;
    assert_eq!(detail.summary.status, MessageStatus(Some(DeliveryStatus::Dead)));
    assert_eq!(detail.deliveries.len(), 2);
    for delivery in &detail.deliveries {
        assert_eq!(world.delivery(delivery.id).await, *delivery, "one delivery, one description");
        assert_eq!((delivery.message.as_str(), delivery.tenant.as_str()), ("m1", "default"));
        assert_eq!(delivery.message_type, "invoice.paid");
        assert_eq!((delivery.key.as_deref(), delivery.created_at), (Some("acct_1"), noon()));
        let story: Vec<_> = delivery
            .attempts
            .iter()
            .map(|one| (one.n, one.at, one.took_ms, one.status, one.error.is_some()))
            .collect();
        if delivery.endpoint == first {
            assert_eq!(
                story,
                [
                    (1, noon(), None, None, true),
                    (2, after(LEASE + 2), Some(40), Some(500), true),
                    (3, after(LEASE + 74), Some(40), Some(202), false),
                ]
            );
        } else {
            assert_eq!(delivery.endpoint, second);
            assert_eq!(story, [(1, noon(), Some(40), Some(500), true)]);
        }
    }
    assert!(world.store.message("m1", Some(Tenant::new("acme"))).await.expect("reads").is_empty());
    assert!(world.store.message("unknown", None).await.expect("reads").is_empty());
    assert_eq!(world.store.delivery(DeliveryId(Uuid::now_v7())).await.expect("reads"), None);
}

pub(crate) async fn deliveries_are_listed_from_new_to_old_and_filtered<S: Sending>(
    world: World<S>,
) {
    // Each filter is tested alone, over several pages.
    let invoices = world.add(wanting(&["invoice.*"])).await;
    let orders = world.add(wanting(&["order.*"])).await;
    world.add_for(Tenant::new("acme"), settings()).await;
    for n in 0..3 {
        world.send(message(&format!("i{n}")).with_key(format!("k{}", n % 2))).await;
        world.pass(1);
        world.send(NewMessage::new("order.paid", json("1")).with_id(format!("o{n}"))).await;
        world.pass(1);
    }
    world.send(message("i0").with_tenant("acme")).await;
    world.disable(orders).await;
    let all = DeliveryFilter::default;
    assert_eq!(deliveries(&world, all()).await, ["i0", "o2", "i2", "o1", "i1", "o0", "i0"]);
    let endpoint = Some(invoices);
    let of_invoices = deliveries(&world, DeliveryFilter { endpoint, ..all() }).await;
    assert_eq!(of_invoices, ["i2", "i1", "i0"]);
    let of_i0 = DeliveryFilter { message: Some("i0".to_owned()), ..all() };
    assert_eq!(deliveries(&world, of_i0.clone()).await, ["i0", "i0"]);
    let of_acme = DeliveryFilter { tenant: Some(Tenant::new("acme")), ..of_i0 };
    assert_eq!(deliveries(&world, of_acme).await, ["i0"]);
    let of_acme = DeliveryFilter { tenant: Some(Tenant::new("acme")), ..all() };
    assert_eq!(deliveries(&world, of_acme).await, ["i0"]);
    let key = Some("k0".to_owned());
    assert_eq!(deliveries(&world, DeliveryFilter { key, ..all() }).await, ["i2", "i0"]);
    let (since, until) = (Some(after(1)), Some(after(4)));
    let between = deliveries(&world, DeliveryFilter { since, until, ..all() }).await;
    assert_eq!(between, ["o1", "i1", "o0"]);
    for claim in world.take(ALL).await {
        let verdict = match claim.message.as_str() {
            "i0" if claim.endpoint.id == invoices => delivered(),
            "i1" => failed(Retry::Never),
            "i2" => failed(Retry::Schedule),
            _under_way => continue,
        };
        assert_eq!(world.report(&claim, verdict).await, Held::Kept);
    }
    world.act_on("o1", MessageAct::Cancel).await;
    for (status, expected) in [
        (DeliveryStatus::Delivered, &["i0"][..]),
        (DeliveryStatus::Dead, &["i1"]),
        (DeliveryStatus::Failed, &["i2"]),
        (DeliveryStatus::Held, &["o2", "o0"]),
        (DeliveryStatus::Cancelled, &["o1"]),
        (DeliveryStatus::Sending, &["i0"]),
        (DeliveryStatus::Waiting, &[]),
    ] {
        let filter = DeliveryFilter { status: Some(status), ..all() };
        assert_eq!(deliveries(&world, filter).await, expected, "{status:?}");
    }
    world.enable(orders).await;
    let waiting = DeliveryFilter { status: Some(DeliveryStatus::Waiting), ..all() };
    assert_eq!(deliveries(&world, waiting.clone()).await, ["o2", "o0"]);
    world.delete(orders).await;
    assert_eq!(deliveries(&world, waiting).await, [""; 0]);
    let cancelled = DeliveryFilter { status: Some(DeliveryStatus::Cancelled), ..all() };
    assert_eq!(deliveries(&world, cancelled).await, ["o2", "o1", "o0"]);
}

pub(crate) async fn the_backlog_counts_what_is_open_and_what_is_dead<S: Sending>(world: World<S>) {
    // Held, delivered and cancelled deliveries must not be counted as work that waits.
    let empty = DeliveryBacklog::default();
    assert_eq!(world.store.delivery_backlog().await.expect("reads"), empty);
    let active = world.add(wanting(&["invoice.*"])).await;
    let held = world.add(wanting(&["held"])).await;
    world.disable(held).await;
    let gone = world.add(wanting(&["gone"])).await;
    for id in ["delivered", "dead", "failed", "sending"] {
        world.send(message(id)).await;
    }
    for claim in world.take(ALL).await {
        let verdict = match claim.message.as_str() {
            "delivered" => delivered(),
            "dead" => failed(Retry::Never),
            "failed" => failed(Retry::Schedule),
            _sending => continue,
        };
        assert_eq!(world.report(&claim, verdict).await, Held::Kept);
    }
    for kind in ["held", "gone"] {
        world.send(NewMessage { r#type: kind.to_owned(), ..message(kind) }).await;
    }
    world.delete(gone).await;
    world.pass(5);
    world.send(message("waiting")).await;
    world.pass(3);
    let backlog = world.store.delivery_backlog().await.expect("reads");
    let oldest_due = Some(after(5));
    let expected =
        DeliveryBacklog { waiting: 2, sending: 1, held: 1, parked: 0, dead: 1, oldest_due };
    assert_eq!(backlog, expected);
    world.disable(active).await;
    let backlog = world.store.delivery_backlog().await.expect("reads");
    assert_eq!((backlog.waiting, backlog.held, backlog.oldest_due), (0, 3, None));
}

pub(crate) async fn what_operators_did_is_part_of_the_story_of_a_delivery<S: Sending>(
    world: World<S>,
) {
    // One action applies to the whole message, one to one of its deliveries, and one changed nothing.
    let first = world.add(settings()).await;
    world.add(settings()).await;
    world.send(message("m1")).await;
    world.act_on("m1", MessageAct::Cancel).await;
    assert_eq!(world.act_on("m1", MessageAct::Cancel).await, Some(Vec::new()));
    let of = |delivery: &DeliveryDetail| delivery.endpoint == first;
    let replayed = world.message("m1").await.deliveries.into_iter().find(of).expect("is there");
    world.replay_delivery(replayed.id).await;
    for delivery in world.message("m1").await.deliveries {
        let story: Vec<_> = delivery.actions.iter().map(|one| one.action.as_str()).collect();
        let expected = if of(&delivery) { &["cancel", "replay"][..] } else { &["cancel"] };
        assert_eq!(story, expected);
        assert_eq!(world.delivery(delivery.id).await.actions, delivery.actions);
        let [cancel, ..] = &delivery.actions[..] else { panic!("{delivery:?}") };
        assert_eq!(cancel.who, world.by("").who);
        assert_eq!(cancel.reason.as_deref(), Some("an operator's reason"));
    }
}

pub(crate) async fn the_messages_of_an_event_have_their_tenant_and_status<S: Sending>(
    world: World<S>,
) {
    // Two tenants have a message with the same id, and only one of them was published for this
    // event.
    world.announce([spec("fee")]).await;
    world.add(settings()).await;
    world.add_for(Tenant::new("acme"), settings()).await;
    world.accept("evt_1", &[job("fee")]).await;
    world.send(message("m1")).await;
    assert_eq!(world.deliver_all().await, ["m1"]);
    let publish = vec![message("m1").with_tenant("acme"), message("m2").with_tenant("initech")];
    let done = Outcome::Done { result: None, publish, answer: None };
    let claim = world.claim_one("fee").await;
    assert_eq!(world.settle(&claim, done).await, Settlement::Recorded);
    let messages = world.event("evt_1").await.messages;
    let notes: Vec<_> =
        messages.iter().map(|note| (note.id.as_str(), note.tenant.as_str(), note.status)).collect();
    let waiting = MessageStatus(Some(DeliveryStatus::Waiting));
    assert_eq!(notes, [("m1", "acme", waiting), ("m2", "initech", MessageStatus(None))]);
}
