//! Publishing, case by case: one message per id, the endpoints that get it, and the bytes that they get.

use std::sync::Arc;

use hapax_core::Tenant;
use hapax_core::delivery::{DeliveryStatus, MessageStatus};
use hapax_core::endpoint::{EndpointId, EndpointSettings};
use hapax_core::job::{Phase, Retry};
use hapax_core::message::Payload;
use hapax_core::store::{
    AttemptVerdict, Held, Horizon, NewMessage, Outcome, Published, PublishedMessage, Settlement,
};

use crate::harness::{FOREVER, LEASE, Sender, World, job, spec};
use crate::sending::{ALL, Sending, claimed, delivered, json, message, settings, wanting};

pub(crate) async fn the_same_message_again_is_a_duplicate_and_other_content_is_a_conflict<
    S: Sending,
>(
    world: World<S>,
) {
    // A publisher retries, then reuses the id for other content. Neither request may send another
    // delivery.
    world.add(settings()).await;
    let first = message("m1").with_key("acct_1").with_api_version("v1");
    let known = PublishedMessage { id: "m1".to_owned(), deliveries: 1 };
    assert_eq!(world.publish(first.clone()).await, Published::Accepted(known.clone()));
    // An endpoint that is added later does not change the answer.
    world.add(settings()).await;
    assert_eq!(world.publish(first.clone()).await, Published::Duplicate(known));
    let others = [
        NewMessage { data: json("{\"id\":\"m1\", \"amount\":5}"), ..first.clone() },
        NewMessage { r#type: "invoice.due".to_owned(), ..first.clone() },
        NewMessage { key: Some("acct_2".to_owned()), ..first.clone() },
        NewMessage { key: None, ..first.clone() },
        NewMessage { api_version: Some("v2".to_owned()), ..first.clone() },
        NewMessage { api_version: None, ..first.clone() },
    ];
    for other in others {
        let conflict = Published::Conflict { id: "m1".to_owned() };
        assert_eq!(world.publish(other.clone()).await, conflict, "{other:?}");
    }
    let stored = world.message("m1").await;
    assert_eq!(stored.summary.key.as_deref(), Some("acct_1"));
    assert_eq!(stored.summary.api_version.as_deref(), Some("v1"));
    assert_eq!(world.deliver_all().await, ["m1"]);
    assert!(
        matches!(world.publish(first).await, Published::Duplicate(_)),
        "delivered is known too"
    );
    assert_eq!(world.deliver_all().await, [""; 0]);
}

pub(crate) async fn the_same_id_of_another_tenant_is_another_message<S: Sending>(world: World<S>) {
    // Two tenants use the same message ids: neither may get the messages of the other, or use up
    // its ids.
    let acme = world.add_for(Tenant::new("acme"), settings()).await;
    let globex = world.add_for(Tenant::new("globex"), settings()).await;
    assert_eq!(world.send(message("m1").with_tenant("acme")).await, 1);
    let other = NewMessage { data: json("2"), ..message("m1").with_tenant("globex") };
    assert_eq!(world.send(other).await, 1);
    assert_eq!(world.send(message("m1")).await, 0, "the default tenant has no endpoint");
    let claims = world.take(ALL).await;
    assert_eq!(claims.len(), 2);
    for claim in claims {
        let owner = if claim.endpoint.id == acme { "acme" } else { "globex" };
        assert_eq!(claim.endpoint.tenant.as_str(), owner);
        let is_two = String::from_utf8_lossy(&claim.body).contains("\"data\":2");
        assert_eq!(is_two, claim.endpoint.id == globex);
    }
    let all = world.store.message("m1", None).await.expect("reads");
    let mut tenants: Vec<_> = all.iter().map(|one| one.summary.tenant.as_str()).collect();
    tenants.sort_unstable();
    assert_eq!(tenants, ["acme", "default", "globex"]);
}

pub(crate) async fn of_a_thousand_publishes_of_one_id_one_wins<S: Sending>(world: World<S>) {
    // Half of the publishes have other content. There must be one message and one delivery,
    // whichever came first.
    world.add(settings()).await;
    let tasks: Vec<_> = (0..1_000)
        .map(|n| {
            let store = Arc::clone(&world.store);
            let message = NewMessage { data: json(&(n % 2).to_string()), ..message("m1") };
            tokio::spawn(async move { (n % 2, store.publish(message).await.expect("publishes")) })
        })
        .collect();
    let (mut winner, mut duplicates, mut conflicts) = (None, [0, 0], [0, 0]);
    for task in tasks {
        let (half, published) = task.await.expect("no panic");
        match published {
            Published::Accepted(one) => {
                assert_eq!(one.deliveries, 1);
                assert_eq!(winner.replace(half), None, "two winners");
            }
            Published::Duplicate(_) => duplicates[half] += 1,
            Published::Conflict { .. } => conflicts[half] += 1,
        }
    }
    let winner = winner.expect("a winner");
    assert_eq!((duplicates[winner], conflicts[1 - winner]), (499, 500));
    let claim = world.take_one().await;
    assert!(String::from_utf8_lossy(&claim.body).contains(&format!("\"data\":{winner}")));
    assert_eq!(world.all_deliveries().await.len(), 1);
}

pub(crate) async fn a_message_without_an_id_gets_one_that_no_other_has<S: Sending>(
    world: World<S>,
) {
    // The same content twice without an id is two messages.
    world.add(settings()).await;
    let unnamed = NewMessage { id: None, ..message("any") };
    for _ in 0..2 {
        assert_eq!(world.send(unnamed.clone()).await, 1);
    }
    let claims = world.take(ALL).await;
    assert_eq!(claims.len(), 2);
    assert_ne!(claims[0].message, claims[1].message);
    for claim in claims {
        assert_eq!(hapax_core::message::id_fault(&claim.message), None);
    }
}

pub(crate) async fn the_endpoints_that_want_a_message_when_it_is_published_get_it<S: Sending>(
    world: World<S>,
) {
    // Later changes of types, and later endpoints, must not add or remove a delivery.
    let invoices = world.add(wanting(&["invoice.*"])).await;
    let orders = world.add(wanting(&["order.*", "shipment.sent"])).await;
    let pinned =
        world.add(EndpointSettings { api_version: Some("v2".into()), ..wanting(&["*"]) }).await;
    let elsewhere = world.add_for(Tenant::new("acme"), settings()).await;
    let gone = world.add(settings()).await;
    world.delete(gone).await;
    let kinds = |id: &str, kind: &str| NewMessage { r#type: kind.into(), ..message(id) };
    assert_eq!(world.send(kinds("m1", "invoice.paid")).await, 2, "no version fits every pin");
    assert_eq!(world.send(kinds("m2", "invoice.paid").with_api_version("v1")).await, 1);
    assert_eq!(world.send(kinds("m3", "invoice.paid").with_api_version("v2")).await, 2);
    assert_eq!(world.send(kinds("m4", "shipment.sent").with_api_version("v1")).await, 1);
    assert_eq!(world.send(kinds("m5", "shipment.lost").with_api_version("v1")).await, 0);
    world.set(invoices, wanting(&["nothing"])).await;
    world.set(orders, settings()).await;
    world.add(settings()).await;
    let mut got: Vec<(EndpointId, String)> =
        world.take(ALL).await.into_iter().map(|one| (one.endpoint.id, one.message)).collect();
    got.sort();
    let mut expected = [
        (invoices, "m1"),
        (invoices, "m2"),
        (invoices, "m3"),
        (orders, "m4"),
        (pinned, "m1"),
        (pinned, "m3"),
    ]
    .map(|(endpoint, id)| (endpoint, id.to_owned()));
    expected.sort();
    assert_eq!(got, expected);
    assert!(got.iter().all(|(endpoint, _)| *endpoint != elsewhere && *endpoint != gone));
    // No endpoint receives this message: the answer reports that, and the message is kept.
    let unheard = world.message("m5").await.summary;
    assert_eq!((unheard.deliveries, unheard.status), (0, MessageStatus(None)));
    assert!(matches!(
        world.publish(kinds("m5", "shipment.lost").with_api_version("v1")).await,
        Published::Duplicate(PublishedMessage { deliveries: 0, .. })
    ));
}

pub(crate) async fn an_endpoint_gets_the_bytes_that_were_published<S: Sending>(world: World<S>) {
    // The data has numbers that no parser holds exactly, keys in an unusual order, spaces and
    // letters of any script. One changed byte would break the signature.
    let fat = world.add(settings()).await;
    let thin = world.add(EndpointSettings { payload: Payload::Thin, ..settings() }).await;
    let data = [
        "{\"b\" : 1e400, \"a\":9007199254740993, \"big\":123456789012345678901234567890,\"z\":-0.0}",
        "{\"object\":\"invoice\" ,\"id\": 12.0,\"nul\":\"\\u0000\",\"s\":\"\\u00e9 é 日本 \u{1f600} \\/\"}",
        "{\"b\":1,\"a\":2,\"b\":3}",
        "  [ 1 , 2 ]  ",
        "\"text\"",
        "null",
    ];
    for (n, data) in data.iter().enumerate() {
        let (id, data) = (format!("m{n}"), data.trim());
        let published = NewMessage { data: json(data), ..message(&id) };
        let published = published.with_key(format!("k{n}")).with_api_version("v\"1");
        assert_eq!(world.send(published.clone()).await, 2);
        let detail = world.message(&id).await;
        let stamp = hapax_core::message::Stamp {
            id: &id,
            created_at: world.clock.now(),
            sequence: Some(detail.summary.sequence.expect("a key has a number")),
        };
        let expected =
            [Payload::Fat, Payload::Thin].map(|payload| published.envelope(&stamp, payload));
        assert!(expected[0].contains(&format!("\"data\":{data},")), "{}", expected[0]);
        assert_eq!(String::from_utf8_lossy(&detail.body), expected[0]);
        // Every attempt, including those of a replay, has the same bytes.
        for _ in 0..2 {
            let claims = world.take(ALL).await;
            assert_eq!(claims.len(), 2);
            for claim in claims {
                assert_eq!(claim.message, id);
                let at = usize::from(claim.endpoint.id == thin);
                assert!(at == 1 || claim.endpoint.id == fat);
                assert_eq!(String::from_utf8_lossy(&claim.body), expected[at]);
                assert_eq!(world.report(&claim, delivered()).await, Held::Kept);
                world.replay_delivery(claim.delivery).await;
            }
        }
        assert_eq!(world.deliver_all().await, [id.clone(), id]);
    }
}

pub(crate) async fn messages_of_one_key_are_numbered_in_the_order_of_their_commits<S: Sending>(
    world: World<S>,
) {
    // Fifty messages are published at once: no number is used twice, and none is smaller than that
    // of an earlier message.
    let number = async |id: &str| world.message(id).await.summary.sequence;
    world.send(message("first").with_key("acct_1")).await;
    let tasks: Vec<_> = (0..50)
        .map(|n| {
            let store = Arc::clone(&world.store);
            let message = message(&format!("m{n}")).with_key("acct_1");
            tokio::spawn(async move { store.publish(message).await.expect("publishes") })
        })
        .collect();
    for task in tasks {
        task.await.expect("no panic");
    }
    world.send(message("last").with_key("acct_1")).await;
    let (first, last) = (number("first").await, number("last").await);
    let mut numbers = Vec::new();
    for n in 0..50 {
        let between = number(&format!("m{n}")).await;
        assert!(first < between && between < last, "{first:?} {between:?} {last:?}");
        numbers.push(between);
    }
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), 50, "a number twice");
    // A duplicate takes no new number, and other keys and tenants have numbers of their own.
    assert!(matches!(
        world.publish(message("first").with_key("acct_1")).await,
        Published::Duplicate(_)
    ));
    assert_eq!(number("first").await, first);
    world.send(message("keyless")).await;
    assert_eq!(number("keyless").await, None);
    world.send(message("other").with_key("acct_2")).await;
    assert!(number("other").await.is_some());
}

pub(crate) async fn messages_of_a_job_are_sent_with_its_done_or_not_at_all<S: Sending>(
    world: World<S>,
) {
    // A failed attempt, a lost fence and a second "done" must publish nothing; the retry must publish.
    world.add(settings()).await;
    world.announce([spec("fee")]).await;
    world.accept("evt_1", &[job("fee")]).await;
    let publishing = |ids: &[&str]| Outcome::Done {
        result: None,
        publish: ids.iter().map(|id| message(id)).collect(),
        answer: None,
    };
    let claim = world.claim_one("fee").await;
    let broken = Outcome::Failed { error: "x".into(), retry: Retry::Schedule, answer: None };
    assert_eq!(world.settle(&claim, broken).await, Settlement::Recorded);
    assert!(world.take(ALL).await.is_empty());
    world.pass(80);
    let late = world.claim_one("fee").await;
    world.pass(LEASE + 2);
    let claim = world.claim_one("fee").await;
    assert_eq!(world.settle(&late, publishing(&["m1", "m2"])).await, Settlement::Lost);
    assert!(world.store.message("m1", None).await.expect("reads").is_empty());
    assert!(world.take(ALL).await.is_empty());
    assert_eq!(world.settle(&claim, publishing(&["m1", "m2", "m1"])).await, Settlement::Recorded);
    assert_eq!(
        world.settle(&claim, publishing(&["m3"])).await,
        Settlement::AlreadyDone,
        "done already"
    );
    assert_eq!(claimed(&world.take(ALL).await), ["m1", "m2"]);
    let mut noted: Vec<_> =
        world.event("evt_1").await.messages.into_iter().map(|note| note.id).collect();
    noted.sort();
    assert_eq!(noted, ["m1", "m2"]);
    // A message that the API published before stays as it is, and the job is done.
    world.send(message("m4")).await;
    world.accept("evt_2", &[job("fee")]).await;
    let claim = world.claim_one("fee").await;
    assert_eq!(world.settle(&claim, publishing(&["m4"])).await, Settlement::Recorded);
    assert_eq!(claimed(&world.take(ALL).await), ["m4"]);
}

pub(crate) async fn messages_of_a_job_go_to_the_tenant_of_its_event<S: Sending>(world: World<S>) {
    // A handler of one tenant must not reach another tenant's endpoint unless it names that tenant.
    let acme = world.add_for(Tenant::new("acme"), settings()).await;
    let initech = world.add_for(Tenant::new("initech"), settings()).await;
    world.add(settings()).await;
    world.announce([spec("fee")]).await;
    world.arrive(&Sender::of("acme", "shop"), "evt_1", &[job("fee")]).await;
    let claim = world.claim_one("fee").await;
    let publish = vec![message("m1"), message("m2").with_tenant("initech")];
    let outcome = Outcome::Done { result: None, publish, answer: None };
    assert_eq!(world.settle(&claim, outcome).await, Settlement::Recorded);
    let mut got: Vec<(String, EndpointId)> =
        world.take(ALL).await.into_iter().map(|one| (one.message, one.endpoint.id)).collect();
    got.sort();
    assert_eq!(got, [("m1".to_owned(), acme), ("m2".to_owned(), initech)]);
}

pub(crate) async fn a_waiting_sender_is_notified_of_new_deliveries<S: Sending>(world: World<S>) {
    // A sender that waits only for the hint must not miss a message, including one that a job
    // publishes.
    world.add(settings()).await;
    let notified = async {
        tokio::join!(world.store.wait_for_deliveries(FOREVER), world.send(message("m1")));
    };
    tokio::time::timeout(FOREVER / 2, notified).await.expect("notified");
    assert_eq!(world.deliver_all().await, ["m1"]);
    world.announce([spec("fee")]).await;
    world.accept("evt_1", &[job("fee")]).await;
    let claim = world.claim_one("fee").await;
    let publish = vec![message("m2")];
    let settled = world.settle(&claim, Outcome::Done { result: None, publish, answer: None });
    let notified = async {
        tokio::join!(world.store.wait_for_deliveries(FOREVER), settled);
    };
    tokio::time::timeout(FOREVER / 2, notified).await.expect("notified");
    assert_eq!(world.deliver_all().await, ["m2"]);
    // No wait is longer than requested.
    let short = std::time::Duration::from_millis(1);
    tokio::time::timeout(FOREVER / 2, world.store.wait_for_deliveries(short)).await.expect("ends");
}

pub(crate) async fn a_message_with_an_open_or_dead_delivery_is_not_pruned<S: Sending>(
    world: World<S>,
) {
    // Retention must not delete messages that are still to be sent, or that wait for an operator.
    let active = world.add(wanting(&["invoice.*"])).await;
    let held = world.add(wanting(&["held.*"])).await;
    world.disable(held).await;
    for id in ["delivered", "cancelled", "dead", "leased", "waiting"] {
        world.send(message(id)).await;
    }
    world.send(NewMessage::new("held.one", json("1")).with_id("held")).await;
    world.send(NewMessage::new("other", json("1")).with_id("unheard")).await;
    world.act_on("cancelled", hapax_core::store::MessageAct::Cancel).await;
    for claim in world.take(ALL).await {
        let verdict = match claim.message.as_str() {
            "delivered" => delivered(),
            "dead" => crate::sending::failed(Retry::Never),
            "waiting" => AttemptVerdict::GivenBack,
            _other => continue,
        };
        assert_eq!(world.report(&claim, verdict).await, Held::Kept);
    }
    world.pass(1_000);
    let prune = async || {
        let horizon = Horizon { events_before: world.clock.now(), ..Horizon::forever() };
        while world.store.prune(horizon.clone(), 2).await.expect("prunes") {}
    };
    prune().await;
    for id in ["delivered", "cancelled", "unheard"] {
        assert!(world.all_deliveries().await.iter().all(|one| one.message != id), "{id}");
    }
    for id in ["dead", "leased", "waiting", "held"] {
        assert_eq!(world.message(id).await.deliveries.len(), 1, "{id}");
    }
    assert_eq!(world.status_of("dead").await, DeliveryStatus::Dead);
    // Messages that were kept can still be sent, as they were published.
    world.enable(held).await;
    let dead = world.delivery_of("dead").await.id;
    world.replay_delivery(dead).await;
    world.pass(2);
    assert_eq!(world.deliver_all().await, ["dead", "held", "leased", "waiting"]);
    world.pass(1_000);
    prune().await;
    assert!(world.all_deliveries().await.is_empty());
    assert!(!world.endpoint(active).await.settings.url.is_empty(), "endpoints stay");
}

pub(crate) async fn a_job_that_publishes_other_content_under_a_used_id_fails<S: Sending>(
    world: World<S>,
) {
    // A handler reuses a message id by mistake. No message may be dropped silently, and none
    // published in part.
    world.add(settings()).await;
    world.announce([spec("fee")]).await;
    world.send(message("used")).await;
    let other = |id: &str| NewMessage { data: json("2"), ..message(id) };
    let lists = [
        vec![message("m1"), other("used")],
        vec![message("m1"), other("m1")],
        vec![message("m1"), message("used")],
    ];
    for (n, publish) in lists.into_iter().enumerate() {
        let event = format!("evt_{n}");
        world.accept(&event, &[job("fee")]).await;
        let claim = world.claim_one("fee").await;
        let outcome = Outcome::Done { result: None, publish, answer: None };
        assert_eq!(world.settle(&claim, outcome).await, Settlement::Recorded);
        let is_done = world.job(&event, "fee").await.phase == Phase::Done;
        assert_eq!(is_done, n == 2, "only the last list has no conflict");
        if n < 2 {
            let error = world.job(&event, "fee").await.error.expect("a reason");
            assert!(error.contains(["used", "m1"][n]), "{error}");
            assert!(world.store.message("m1", None).await.expect("reads").is_empty());
        }
    }
    assert_eq!(world.deliver_all().await, ["m1", "used"]);
}

pub(crate) async fn the_id_of_a_pruned_message_is_known_until_its_horizon<S: Sending>(
    world: World<S>,
) {
    // A publisher that retries after a month must not send a second time.
    world.add(settings()).await;
    world.send(message("m1")).await;
    assert_eq!(world.deliver_all().await, ["m1"]);
    world.pass(1_000);
    let prune = async |ids: i64| {
        let horizon = Horizon {
            events_before: crate::harness::after(500),
            message_ids_before: crate::harness::after(ids),
            ..Horizon::forever()
        };
        while world.store.prune(horizon.clone(), 2).await.expect("prunes") {}
    };
    prune(-500).await;
    assert!(world.all_deliveries().await.is_empty(), "its history is gone");
    let known = PublishedMessage { id: "m1".to_owned(), deliveries: 1 };
    assert_eq!(world.publish(message("m1")).await, Published::Duplicate(known));
    let other = NewMessage { data: json("2"), ..message("m1") };
    assert_eq!(world.publish(other.clone()).await, Published::Conflict { id: "m1".to_owned() });
    assert_eq!(world.deliver_all().await, [""; 0]);
    prune(500).await;
    assert_eq!(world.send(other).await, 1, "the id is free");
}
