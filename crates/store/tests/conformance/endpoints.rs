//! Endpoints, case by case: created, changed under a version, disabled, deleted, and sealed under a key.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::Tenant;
use hapax_core::delivery::DeliveryStatus;
use hapax_core::endpoint::{
    AddressChoice, DisabledBy, EndpointAct, EndpointChanged, EndpointId, EndpointOrder,
    EndpointSettings, NewEndpoint, OnDead,
};
use hapax_core::job::Retry;
use hapax_core::limits::{ENDPOINTS_PER_TENANT_MAX, RECEIVER_ENDPOINTS_PER_TENANT_MAX};
use hapax_core::store::{
    DeliveryAsk, DeliveryReplayed, EndpointFilter, Held, MessageAct, NewMessage, Published,
};
use hapax_core::vault::SealContext;
use tokio::sync::Semaphore;
use uuid::Uuid;

use crate::harness::{LEASE, World};
use crate::sending::{
    ALL, Sending, ask, claimed, delivered, failed, key_id, message, sealed, settings, vault,
    wanting,
};

fn named(uid: &str) -> EndpointSettings {
    EndpointSettings { uid: Some(uid.to_owned()), ..settings() }
}

fn new(tenant: &Tenant, settings: EndpointSettings) -> NewEndpoint {
    let id = EndpointId(Uuid::now_v7());
    NewEndpoint { id, tenant: tenant.clone(), settings, sealed: sealed(id, tenant, 1) }
}

pub(crate) async fn an_endpoint_is_stored_with_every_setting<S: Sending>(world: World<S>) {
    // Text in any script, sealed bytes and the names of headers must come back as they were.
    let all = EndpointSettings {
        retry: [5, 7].map(std::time::Duration::from_millis).to_vec(),
        timeout: std::time::Duration::from_secs(3),
        payload: hapax_core::message::Payload::Thin,
        api_version: Some("v2".to_owned()),
        max_in_flight: 7,
        order: EndpointOrder::Key,
        on_dead: OnDead::Skip,
        auto_disable: false,
        rate_limit: Some("30/m".parse().expect("a rate")),
        uid: Some("billing é 日本".to_owned()),
        description: Some("a \"description\"\nof two lines".to_owned()),
        metadata: [("team".to_owned(), "payments \u{1f600}".to_owned())].into(),
        header_names: vec!["x-api-key".to_owned()],
        ..wanting(&["invoice.*", "order.{paid,sent}"])
    };
    let record = world.create(Tenant::new("acme"), all.clone(), 1).await;
    assert_eq!((record.settings.clone(), record.disabled.clone()), (all, None));
    assert_eq!((record.tenant.as_str(), record.created_at), ("acme", world.clock.now()));
    assert_eq!(record.sealed, sealed(record.id, &record.tenant, 1));
    assert_eq!(world.endpoint(record.id).await, record);
    assert_eq!(world.store.endpoint(EndpointId(Uuid::now_v7())).await.expect("reads"), None);
}

pub(crate) async fn of_twenty_changes_of_one_version_one_wins<S: Sending>(world: World<S>) {
    // Two operators edit the same endpoint. Neither operator may overwrite a change without having seen it.
    let id = world.add(settings()).await;
    for _ in 0..5 {
        let seen = world.endpoint(id).await;
        let tasks: Vec<_> = (0..20)
            .map(|n| {
                let (store, by) = (Arc::clone(&world.store), world.by("change"));
                let url = format!("https://example.com/{}/{n}", seen.version);
                let act = EndpointAct::Change {
                    version: seen.version,
                    settings: Box::new(EndpointSettings { url, ..settings() }),
                    sealed: seen.sealed.clone(),
                };
                tokio::spawn(async move { store.change_endpoint(id, act, by).await })
            })
            .collect();
        let mut winners = Vec::new();
        for task in tasks {
            match task.await.expect("no panic").expect("answers") {
                EndpointChanged::Changed(record) => winners.push(*record),
                EndpointChanged::VersionChanged => {}
                other => panic!("{other:?}"),
            }
        }
        let [winner] = &winners[..] else { panic!("{} winners", winners.len()) };
        assert!(winner.version > seen.version);
        assert_eq!(world.endpoint(id).await, *winner);
    }
}

pub(crate) async fn a_uid_names_one_endpoint_of_its_tenant<S: Sending>(world: World<S>) {
    // Twenty requests create an endpoint with the same uid at once. A deleted endpoint must not
    // keep its uid.
    let tenant = Tenant::default();
    let tasks: Vec<_> = (0..20)
        .map(|_| {
            let (store, by) = (Arc::clone(&world.store), world.by("add"));
            let endpoint = new(&tenant, named("billing"));
            tokio::spawn(async move { store.create_endpoint(endpoint, by).await })
        })
        .collect();
    let mut winner = None;
    for task in tasks {
        match task.await.expect("no panic").expect("answers") {
            EndpointChanged::Changed(record) => assert_eq!(winner.replace(record.id), None),
            EndpointChanged::UidTaken => {}
            other => panic!("{other:?}"),
        }
    }
    let winner = winner.expect("a winner");
    world.add_for(Tenant::new("acme"), named("billing")).await;
    let other = world.create(tenant.clone(), named("other"), 1).await;
    let rename = |version| EndpointAct::Change {
        version,
        settings: Box::new(named("billing")),
        sealed: other.sealed.clone(),
    };
    assert_eq!(world.change(other.id, rename(other.version)).await, EndpointChanged::UidTaken);
    assert_eq!(world.endpoint(other.id).await, other, "nothing changed");
    // An endpoint may keep its own uid, and endpoints without a uid do not conflict.
    world.set(winner, EndpointSettings { max_in_flight: 2, ..named("billing") }).await;
    for _ in 0..2 {
        world.add(settings()).await;
    }
    world.delete(winner).await;
    let changed = world.change(other.id, rename(other.version)).await;
    assert!(matches!(changed, EndpointChanged::Changed(_)), "{changed:?}");
    world.add(named("other")).await;
}

pub(crate) async fn a_receiver_neither_enables_nor_disables_again_what_an_operator_disabled<
    S: Sending,
>(
    world: World<S>,
) {
    let endpoint = world.add(settings()).await;
    let theirs = || EndpointAct::DisableByReceiver { reason: "theirs".to_owned() };
    let disabled = async || {
        let disabled = world.endpoint(endpoint).await.disabled.expect("it is disabled");
        (disabled.by, disabled.reason)
    };
    world.disable(endpoint).await;
    let before = world.endpoint(endpoint).await;
    assert_eq!(disabled().await.0, DisabledBy::Operator);
    let enabled = world.change(endpoint, EndpointAct::EnableByReceiver).await;
    assert_eq!(enabled, EndpointChanged::DisabledByOperator);
    world.pass(60);
    let again = world.change(endpoint, theirs()).await;
    assert_eq!(again, EndpointChanged::Changed(Box::new(before.clone())));
    assert_eq!(world.endpoint(endpoint).await, before, "nothing changed");

    // A receiver may enable an endpoint that the receiver disabled.
    world.enable(endpoint).await;
    world.change(endpoint, theirs()).await;
    assert_eq!(disabled().await, (DisabledBy::Receiver, "theirs".to_owned()));
    let enabled = world.change(endpoint, EndpointAct::EnableByReceiver).await;
    assert!(matches!(enabled, EndpointChanged::Changed(_)), "{enabled:?}");
    assert_eq!(world.endpoint(endpoint).await.disabled, None);

    // If an operator disables the endpoint too, the receiver may no longer enable it.
    world.change(endpoint, theirs()).await;
    world.disable(endpoint).await;
    assert_eq!(disabled().await.0, DisabledBy::Operator);
    let enabled = world.change(endpoint, EndpointAct::EnableByReceiver).await;
    assert_eq!(enabled, EndpointChanged::DisabledByOperator);
}

pub(crate) async fn a_tenant_has_at_most_so_many_endpoints<S: Sending>(world: World<S>) {
    // Many endpoints are created at once: the bound must hold although no request has seen the
    // others. A store may refuse a request that waited for its turn too long, so only some wait.
    let tenant = Tenant::default();
    let turns = Arc::new(Semaphore::new(64));
    let tasks: Vec<_> = (0..ENDPOINTS_PER_TENANT_MAX + 8)
        .map(|_| {
            let (store, by) = (Arc::clone(&world.store), world.by("add"));
            let (endpoint, turns) = (new(&tenant, settings()), Arc::clone(&turns));
            tokio::spawn(async move {
                let _turn = turns.acquire().await.expect("never closed");
                store.create_endpoint(endpoint, by).await
            })
        })
        .collect();
    let (mut created, mut refused) = (Vec::new(), 0);
    for task in tasks {
        match task.await.expect("no panic").expect("answers") {
            EndpointChanged::Changed(record) => created.push(record.id),
            EndpointChanged::TooMany => refused += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((created.len(), refused), (ENDPOINTS_PER_TENANT_MAX, 8));
    world.add_for(Tenant::new("acme"), settings()).await;
    assert_eq!(world.send(message("m1")).await, ENDPOINTS_PER_TENANT_MAX as u64);
    world.delete(created[0]).await;
    world.add(settings()).await;
}

pub(crate) async fn a_receiving_party_adds_at_most_so_many_endpoints<S: Sending>(world: World<S>) {
    // All requests arrive at once. The tenant also has endpoints of the operator, which do not
    // count.
    let tenant = Tenant::new("acme");
    let of_receiver = EndpointSettings { address_by: AddressChoice::Receiver, ..settings() };
    for _ in 0..3 {
        world.add_for(tenant.clone(), settings()).await;
    }
    let tasks: Vec<_> = (0..RECEIVER_ENDPOINTS_PER_TENANT_MAX + 5)
        .map(|_| {
            let (store, by) = (Arc::clone(&world.store), world.by("add"));
            let endpoint = new(&tenant, of_receiver.clone());
            tokio::spawn(async move { store.create_endpoint(endpoint, by).await })
        })
        .collect();
    let (mut created, mut refused) = (Vec::new(), 0);
    for task in tasks {
        match task.await.expect("no panic").expect("answers") {
            EndpointChanged::Changed(record) => created.push(record.id),
            EndpointChanged::TooMany => refused += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((created.len(), refused), (RECEIVER_ENDPOINTS_PER_TENANT_MAX, 5));
    let stored = world.endpoint(created[0]).await;
    assert_eq!(stored.settings.address_by, AddressChoice::Receiver);
    world.add_for(tenant.clone(), settings()).await;
    world.add_for(Tenant::new("shop"), of_receiver.clone()).await;
    world.delete(created[0]).await;
    world.add_for(tenant.clone(), of_receiver.clone()).await;
    world.send(message("m1").with_tenant("acme")).await;
    let claims = world.take(ALL).await;
    let by_receiver = claims.iter().filter(|it| it.endpoint.address_by == AddressChoice::Receiver);
    assert_eq!((by_receiver.count(), claims.len()), (RECEIVER_ENDPOINTS_PER_TENANT_MAX, 24));
}

pub(crate) async fn a_disabled_endpoint_holds_its_deliveries<S: Sending>(world: World<S>) {
    // Deliveries wait, fail, are lost or are published while the endpoint is disabled. No such delivery is
    // sent, and none disappears.
    let endpoint = world.add(settings()).await;
    for id in ["waits", "fails", "lost", "arrives"] {
        world.send(message(id)).await;
    }
    let claims = world.take(ALL).await;
    let of = |id: &str| claims.iter().find(|claim| claim.message == id).expect("claimed");
    assert_eq!(
        world.report(of("waits"), hapax_core::store::AttemptVerdict::GivenBack).await,
        Held::Kept
    );
    world.disable(endpoint).await;
    let disabled = world.endpoint(endpoint).await.disabled.expect("disabled");
    assert_eq!((disabled.at, disabled.reason.as_str()), (world.clock.now(), "it is being moved"));
    assert_eq!(world.report(of("fails"), failed(Retry::Schedule)).await, Held::Kept);
    assert_eq!(world.report(of("arrives"), delivered()).await, Held::Kept);
    assert_eq!(world.status_of("lost").await, DeliveryStatus::Sending);
    assert_eq!(world.send(message("later")).await, 1, "a held delivery is a delivery");
    world.pass(100_000);
    assert!(world.take(ALL).await.is_empty());
    for id in ["waits", "fails", "lost", "later"] {
        let held = world.delivery_of(id).await;
        assert_eq!(held.status, DeliveryStatus::Held, "{id}");
        assert_eq!(held.reason.as_deref(), Some("it is being moved"), "{id}");
    }
    assert_eq!(world.status_of("arrives").await, DeliveryStatus::Delivered);
    // A replay does not send to a disabled endpoint.
    let id = world.delivery_of("waits").await.id;
    world.replay_delivery(id).await;
    assert!(world.take(ALL).await.is_empty());
    world.enable(endpoint).await;
    assert_eq!(world.endpoint(endpoint).await.disabled, None);
    assert_eq!(world.deliver_all().await, ["fails", "later", "lost", "waits"]);
    // A held delivery uses no step: the one that failed once had two attempts left, and has used
    // one of them.
    assert_eq!(world.delivery_of("fails").await.attempt, 2);
}

pub(crate) async fn what_an_endpoint_has_held_is_spread_out_once_it_is_enabled<S: Sending>(
    world: World<S>,
) {
    // An endpoint that is enabled again must not get a week's messages in its first second. Other
    // endpoints do not wait, and after a minute only the endpoint's own limits count.
    let endpoint = world.add(EndpointSettings { max_in_flight: 500, ..settings() }).await;
    world.disable(endpoint).await;
    world.send_many("held", "invoice.paid", 200).await;
    world.enable(endpoint).await;
    // A claim may run ahead of the 100 a second by 50 ms.
    for second in 0..3 {
        let exchanged = world.exchange(Vec::new(), ask(ALL)).await;
        assert_eq!(exchanged.claims.len(), 6, "in second {second}");
        let next = exchanged.next_due.expect("more are due");
        assert!(next <= world.clock.now() + Duration::from_millis(10), "{next}");
        world.pass(1);
    }
    world.enable(endpoint).await;
    world.pass(57);
    let left = world.take(ALL).await.len();
    assert_eq!(left, 200, "enabling it again changes nothing, and the first leases have ended");
}

pub(crate) async fn a_deleted_endpoint_cancels_its_deliveries<S: Sending>(world: World<S>) {
    // Publishing races with the deletion. A delivery that commits later must not be sent or stay
    // open.
    let endpoint =
        world.add(EndpointSettings { max_in_flight: 2, ..wanting(&["invoice.*"]) }).await;
    world.send_many("before", "invoice.paid", 10).await;
    let claims = world.take(ALL).await;
    assert_eq!(claims.len(), 2);
    let tasks: Vec<_> = (0..50)
        .map(|n| {
            let store = Arc::clone(&world.store);
            let message = message(&format!("beside_{n}"));
            tokio::spawn(async move { store.publish(message).await.expect("publishes") })
        })
        .collect();
    world.delete(endpoint).await;
    for task in tasks {
        let published = task.await.expect("no panic");
        assert!(matches!(published, Published::Accepted(_)), "{published:?}");
    }
    assert_eq!(world.send(message("after")).await, 0);
    assert!(world.take(ALL).await.is_empty());
    let open: Vec<_> = world
        .all_deliveries()
        .await
        .into_iter()
        .filter(|one| one.status != DeliveryStatus::Cancelled)
        .collect();
    assert!(open.iter().all(|one| one.status == DeliveryStatus::Sending), "{open:?}");
    assert_eq!(open.len(), 2, "the two under way");
    world.cancel_orphans().await;
    for over in world.all_deliveries().await {
        assert_eq!(over.status, DeliveryStatus::Cancelled);
        assert!(over.reason.is_some(), "{over:?}");
        assert_eq!((over.due_at, over.finished_at), (None, Some(world.clock.now())));
        assert_eq!(over.url, "https://example.com/in", "it still says where it would have gone");
    }
    assert!(!world.store.cancel_orphans(100).await.expect("cancels"));
    // Both requests were under way: one was delivered, the other failed.
    assert_eq!(world.report(&claims[0], delivered()).await, Held::Kept);
    assert_eq!(world.report(&claims[1], failed(Retry::Schedule)).await, Held::Lost);
    assert_eq!(world.delivery(claims[0].delivery).await.status, DeliveryStatus::Delivered);
    assert_eq!(world.delivery(claims[1].delivery).await.status, DeliveryStatus::Cancelled);
    // No later act brings the endpoint back.
    for claim in &claims {
        assert_eq!(world.replay_delivery(claim.delivery).await, DeliveryReplayed::Gone);
    }
    let message = claims[1].message.clone();
    assert_eq!(world.act_on(&message, MessageAct::Replay).await, Some(Vec::new()));
    for act in [
        EndpointAct::Enable,
        EndpointAct::Disable { reason: "again".to_owned() },
        EndpointAct::EnableByReceiver,
        EndpointAct::DisableByReceiver { reason: "again".to_owned() },
        EndpointAct::Delete,
    ] {
        assert_eq!(world.change(endpoint, act).await, EndpointChanged::Unknown);
    }
    assert_eq!(world.store.endpoint(endpoint).await.expect("reads"), None);
    world.pass(100_000);
    assert!(world.take(ALL).await.is_empty());
}

pub(crate) async fn a_delivery_that_fails_after_its_endpoint_was_deleted_is_cancelled<
    S: Sending,
>(
    world: World<S>,
) {
    // The attempts fail and are lost after the deletion and before the janitor runs.
    let endpoint = world.add(settings()).await;
    world.send(message("fails")).await;
    world.send(message("lost")).await;
    let claims = world.take(ALL).await;
    world.delete(endpoint).await;
    let fails = claims.iter().find(|claim| claim.message == "fails").expect("claimed");
    assert_eq!(world.report(fails, failed(Retry::Schedule)).await, Held::Kept);
    world.pass(LEASE + 1_000);
    assert!(world.take(ALL).await.is_empty());
    for id in ["fails", "lost"] {
        assert_eq!(world.status_of(id).await, DeliveryStatus::Cancelled, "{id}");
    }
    world.cancel_orphans().await;
    for id in ["fails", "lost"] {
        let over = world.delivery_of(id).await;
        assert_eq!((over.status, over.due_at), (DeliveryStatus::Cancelled, None), "{id}");
        assert_eq!(over.attempts.len(), 1, "{id}: the attempt stays in the history");
    }
}

pub(crate) async fn a_changed_address_serves_what_was_queued_before<S: Sending>(world: World<S>) {
    // A receiver moves while deliveries wait: they must not be sent to the old address.
    let endpoint = world.add(settings()).await;
    world.send(message("m1")).await;
    world.send(message("m2")).await;
    let first = world.take(1).await.remove(0);
    assert_eq!(first.endpoint.url, "https://example.com/in");
    let moved = EndpointSettings {
        url: "https://example.net/new".to_owned(),
        timeout: std::time::Duration::from_secs(60),
        ..settings()
    };
    world.set(endpoint, moved).await;
    let second = world.take_one().await;
    assert_eq!(second.endpoint.url, "https://example.net/new");
    assert_eq!(second.endpoint.timeout.as_secs(), 60);
    assert_eq!(second.leased_until, crate::harness::after(120), "twice the timeout");
    assert_eq!(world.delivery(first.delivery).await.url, "https://example.net/new");
    assert_eq!(world.report(&first, failed(Retry::Schedule)).await, Held::Kept);
    world.pass(72);
    assert_eq!(world.take_one().await.endpoint.url, "https://example.net/new");
}

pub(crate) async fn rotated_secrets_sign_the_next_claim<S: Sending>(world: World<S>) {
    // A cached secret may be revoked: the first claim after the change must have the new secret.
    let endpoint = world.add(settings()).await;
    for n in 0..5 {
        world.send(message(&format!("m{n}"))).await;
        let seen = world.endpoint(endpoint).await;
        let owner = endpoint.to_string();
        let context = SealContext::endpoint_secrets(&seen.tenant, &owner);
        let secret = format!("secret {n}");
        let mut rotated = seen.sealed.clone();
        rotated.secrets = vault(1).seal(&context, secret.as_bytes(), [n; 12]);
        let act = EndpointAct::Change {
            version: seen.version,
            settings: Box::new(seen.settings),
            sealed: rotated.clone(),
        };
        let changed = world.change(endpoint, act).await;
        assert!(matches!(changed, EndpointChanged::Changed(_)), "{changed:?}");
        let claim = world.take_one().await;
        assert_eq!(claim.endpoint.sealed, rotated);
        let opened = vault(1).open(&context, &claim.endpoint.sealed.secrets).expect("opens");
        assert_eq!(&opened[..], secret.as_bytes());
        assert_eq!(world.report(&claim, delivered()).await, Held::Kept);
    }
}

pub(crate) async fn an_endpoint_is_served_only_by_nodes_that_hold_its_keys<S: Sending>(
    world: World<S>,
) {
    // A node without the key would fail every attempt. Such a node must leave the deliveries to other nodes,
    // and no attempt is counted.
    let kind = |kind: &str| NewMessage { r#type: kind.to_owned(), ..message(kind) };
    world.create(Tenant::default(), wanting(&["ours"]), 1).await;
    world.create(Tenant::default(), wanting(&["theirs"]), 2).await;
    // Secrets under one key, headers under another: both are needed.
    let mut mixed = new(&Tenant::default(), wanting(&["mixed"]));
    let owner = mixed.id.to_string();
    let headers = SealContext::endpoint_headers(&mixed.tenant, &owner);
    mixed.sealed.headers = Some(vault(2).seal(&headers, b"x-api-key: 1", [9; 12]));
    let (mixed_id, mixed_sealed) = (mixed.id, mixed.sealed.clone());
    let created = world.store.create_endpoint(mixed, world.by("add")).await.expect("creates");
    assert!(matches!(created, EndpointChanged::Changed(_)), "{created:?}");
    assert_eq!(world.endpoint(mixed_id).await.sealed, mixed_sealed);
    for name in ["ours", "theirs", "mixed"] {
        assert_eq!(world.send(kind(name)).await, 1);
    }
    let holding = |keys: &[u8]| DeliveryAsk {
        vault_keys: keys.iter().map(|key| key_id(*key)).collect(),
        ..ask(ALL)
    };
    let take = async |keys: &[u8]| world.exchange_all(Vec::new(), holding(keys)).await.claims;
    assert!(take(&[]).await.is_empty());
    assert!(take(&[3]).await.is_empty());
    assert_eq!(claimed(&take(&[1]).await), ["ours"]);
    assert_eq!(claimed(&take(&[2]).await), ["theirs"]);
    let waiting = world.delivery_of("mixed").await;
    assert_eq!((waiting.status, waiting.attempt), (DeliveryStatus::Waiting, 0));
    let claims = take(&[2, 1]).await;
    assert_eq!(claimed(&claims), ["mixed"]);
    assert_eq!((claims[0].attempt, &claims[0].endpoint.sealed), (1, &mixed_sealed));
}

pub(crate) async fn endpoints_are_listed_from_new_to_old_without_the_deleted<S: Sending>(
    world: World<S>,
) {
    // A page that ends at a deleted endpoint must not end the list.
    let mut added = Vec::new();
    for n in 0..7 {
        let tenant = Tenant::new(if n % 3 == 0 { "acme" } else { "default" });
        added.push(world.add_for(tenant, settings()).await);
        world.pass(1);
    }
    world.delete(added[3]).await;
    world.delete(added[5]).await;
    world.disable(added[2]).await;
    let list = async |tenant: Option<&str>| {
        let (mut listed, mut before) = (Vec::new(), None);
        loop {
            let tenant = tenant.map(Tenant::new);
            let filter = EndpointFilter { tenant, before, limit: 2, failing: false };
            let page = world.store.endpoints(filter).await.expect("reads");
            assert!(page.items.len() <= 2);
            listed.extend(page.items.into_iter().map(|one| one.id));
            before = page.next;
            if before.is_none() {
                return listed;
            }
        }
    };
    assert_eq!(list(None).await, [6, 4, 2, 1, 0].map(|n| added[n]));
    assert_eq!(list(Some("acme")).await, [6, 0].map(|n| added[n]));
    assert_eq!(list(Some("unknown")).await, []);
}
