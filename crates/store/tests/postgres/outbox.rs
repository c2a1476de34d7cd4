//! Sending where only PostgreSQL can fail: nodes that share endpoints, users' transactions that publish, and
//! endpoints that change while messages are published.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::Tenant;
use hapax_core::delivery::DeliveryStatus;
use hapax_core::endpoint::{
    EndpointAct, EndpointChanged, EndpointId, EndpointSettings, NewEndpoint,
};
use hapax_core::store::{
    Action, AttemptOutcome, DeliveryAsk, DeliveryClaim, DeliveryFilter, Held, InspectOutbox,
    NewMessage, Outbox, Published, Store, StoreError, Verdict,
};
use hapax_store::PgStore;
use tokio::task::JoinHandle;
use uuid::Uuid;

use crate::harness::{Sender, body, noon};
use crate::sending::{ask, delivered, json, message, outcome, sealed, settings};
use crate::{Base, connect, spec, until};

fn by() -> Action {
    Action { who: "ops".into(), reason: None, at: noon() }
}

pub(crate) async fn add(store: &PgStore, settings: EndpointSettings) -> EndpointId {
    let (id, tenant) = (EndpointId(Uuid::now_v7()), Tenant::default());
    let sealed = sealed(id, &tenant, 1);
    let new = NewEndpoint { id, tenant, settings, sealed };
    let created = store.create_endpoint(new, by()).await.expect("creates");
    assert!(matches!(created, EndpointChanged::Changed(_)), "{created:?}");
    id
}

async fn take(store: &PgStore, limit: usize) -> Vec<DeliveryClaim> {
    store.exchange(Vec::new(), ask(limit)).await.expect("exchanges").claims
}

fn publishing(
    store: &Arc<PgStore>,
    message: NewMessage,
) -> JoinHandle<Result<Published, StoreError>> {
    let store = Arc::clone(store);
    tokio::spawn(async move { store.publish(message).await })
}

/// Claims and delivers until nothing is due. Returns the ids of the messages, in the order of their
/// claims.
pub(crate) async fn deliver_all(store: &PgStore) -> Vec<String> {
    let mut arrived = Vec::new();
    loop {
        let claims = take(store, 64).await;
        if claims.is_empty() {
            return arrived;
        }
        let outcomes = claims.iter().map(|claim| outcome(claim, delivered())).collect();
        let settled = store.exchange(outcomes, ask(0)).await.expect("exchanges").settled;
        assert!(settled.iter().all(|held| *held == Held::Kept), "{settled:?}");
        arrived.extend(claims.into_iter().map(|claim| claim.message));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn two_nodes_share_the_bound_of_an_endpoint() {
    // Both nodes claim at the same instant, again and again. A count that one node makes before the
    // other commits would admit twice as many.
    let base = Base::new("share", spec(3)).await;
    let other = Base::node(&base.url, spec(3)).await;
    for _ in 0..3 {
        add(&base.store, EndpointSettings { max_in_flight: 2, ..settings() }).await;
    }
    for n in 0..40 {
        base.store.publish(message(&format!("m{n}"))).await.expect("publishes");
    }
    let mut arrived = Vec::new();
    while arrived.len() < 3 * 40 {
        let tasks: Vec<_> = (0..8)
            .map(|n| {
                let store = Arc::clone(if n % 2 == 0 { &base.store } else { &other });
                tokio::spawn(async move { take(&store, 10).await })
            })
            .collect();
        let mut claims = Vec::new();
        for task in tasks {
            claims.extend(task.await.expect("no panic"));
        }
        let mut of_endpoint = std::collections::HashMap::new();
        for claim in &claims {
            *of_endpoint.entry(claim.endpoint.id).or_insert(0) += 1;
        }
        assert!(of_endpoint.values().all(|under_way| *under_way <= 2), "{of_endpoint:?}");
        let outcomes = claims.iter().map(|claim| outcome(claim, delivered())).collect();
        // Any node may report.
        let settled = other.exchange(outcomes, ask(0)).await.expect("exchanges").settled;
        assert!(settled.iter().all(|held| *held == Held::Kept), "{settled:?}");
        arrived.extend(claims.into_iter().map(|claim| claim.delivery));
    }
    assert_eq!(arrived.iter().collect::<HashSet<_>>().len(), 120, "one was claimed twice");
    other.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_message_is_published_with_the_user_s_commit_or_not_at_all() {
    // One transaction commits late, after others with higher numbers; one rolls back, and its id is used
    // again.
    let base = Base::new("commit", spec(3)).await;
    add(&base.store, settings()).await;
    let mut late = connect(&base.url).await;
    let late = late.transaction().await.expect("begins");
    late.execute("SELECT hapax.publish('t', '{}', id => 'late')", &[]).await.expect("publishes");
    let mut undone = connect(&base.url).await;
    let undone = undone.transaction().await.expect("begins");
    undone.execute("SELECT hapax.publish('t', '1', id => 'again')", &[]).await.expect("publishes");
    base.store.publish(message("other")).await.expect("publishes");
    assert_eq!(deliver_all(&base.store).await, ["other"]);
    undone.rollback().await.expect("rolls back");
    base.one("SELECT hapax.publish('t', '2', id => 'again')").await;
    assert_eq!(deliver_all(&base.store).await, ["again"]);
    late.commit().await.expect("commits");
    // The time of the late delivery lies before that of deliveries that this node has claimed, so
    // only a full check finds it.
    crate::until("the late one is claimed", async || match &*deliver_all(&base.store).await {
        [] => false,
        claimed => {
            assert_eq!(claimed, ["late"]);
            true
        }
    })
    .await;
    let view = "SELECT string_agg(message || ' ' || status, ',' ORDER BY created_at, message) \
                FROM hapax.deliveries";
    let shown = base.one(view).await;
    assert_eq!(shown.matches("delivered").count(), 3, "{shown}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_api_and_hapax_publish_agree_on_what_the_same_message_is() {
    // A publisher moves from SQL to the API: equal text is the same message, and other content of the same
    // id is refused in both.
    let base = Base::new("agree", spec(3)).await;
    add(&base.store, settings()).await;
    let sql = |data: &str| {
        format!(
            "SELECT hapax.publish('invoice.paid', '{data}', key => 'acct\"é', id => 'm1', \
             api_version => 'v1')"
        )
    };
    base.one(&sql(r#"{"b": 1, "a": [1, 2]}"#)).await;
    let api = |data: &str| {
        NewMessage::new("invoice.paid", json(data))
            .with_key("acct\"é")
            .with_id("m1")
            .with_api_version("v1")
    };
    let text = base
        .one("SELECT (convert_from(body, 'UTF8')::json -> 'data')::text FROM hapax.message")
        .await;
    let same = base.store.publish(api(&text)).await.expect("publishes");
    assert!(matches!(same, Published::Duplicate(_)), "{same:?}");
    let conflict = base.store.publish(api("{}")).await.expect("publishes");
    assert_eq!(conflict, Published::Conflict { id: "m1".to_owned() });
    let refused = base.sql.query(&sql("{}"), &[]).await.expect_err("other content");
    assert_eq!(refused.code().map(|code| code.code()), Some("XH002"));
    base.one(&sql(r#"{"a":[1,2],"b":1}"#)).await;
    assert_eq!(deliver_all(&base.store).await, ["m1"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_user_s_open_transaction_delays_only_publishers_of_its_id_or_key() {
    // The transaction holds an id and a key for longer than any publisher waits. Messages of the same batch,
    // and events, must not wait for that transaction.
    let base = Base::new("held", spec(3)).await;
    add(&base.store, settings()).await;
    let mut sql = connect(&base.url).await;
    let held = sql.transaction().await.expect("begins");
    held.execute("SELECT hapax.publish('t', '1', 'k', id => 'held')", &[])
        .await
        .expect("publishes");
    let waiting: Vec<_> = [
        NewMessage::new("t", json("1")).with_id("held"),
        NewMessage::new("t", json("1")).with_id("same_key").with_key("k"),
    ]
    .into_iter()
    .map(|message| publishing(&base.store, message))
    .collect();
    let others: Vec<_> =
        (0..100).map(|n| publishing(&base.store, message(&format!("m{n}")))).collect();
    for other in others {
        let published = other.await.expect("no panic").expect("publishes");
        assert!(matches!(published, Published::Accepted(_)), "{published:?}");
    }
    let ingest = Sender::plain().ingest_for(&body("evt_1"), noon(), noon(), &[]);
    let verdicts = base.store.ingest(ingest).await.expect("accepts");
    assert!(matches!(verdicts[..], [Verdict::Accepted(_)]), "{verdicts:?}");
    for one in waiting {
        let refused = one.await.expect("no panic");
        assert!(matches!(refused, Err(StoreError::Unavailable(_))), "{refused:?}");
    }
    held.commit().await.expect("commits");
    assert_eq!(deliver_all(&base.store).await.len(), 101);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_publisher_that_waits_for_a_transaction_gets_its_end() {
    // The transaction commits the same message, another one, or rolls back, while the API waits for it.
    let base = Base::new("ends", spec(3)).await;
    add(&base.store, settings()).await;
    let waits = "SELECT count(*)::text FROM pg_stat_activity WHERE application_name = 'hapax-publish' \
                 AND wait_event_type = 'Lock' AND datname = current_database()";
    for (id, commits, data) in [("same", true, "1"), ("other", true, "2"), ("undone", false, "1")] {
        let mut sql = connect(&base.url).await;
        let open = sql.transaction().await.expect("begins");
        let publish = format!("SELECT hapax.publish('t', '1', id => '{id}')");
        open.execute(&publish, &[]).await.expect("publishes");
        let api = publishing(&base.store, NewMessage::new("t", json(data)).with_id(id));
        until("the publisher waits", async || base.one(waits).await == "1").await;
        match commits {
            true => open.commit().await.expect("commits"),
            false => open.rollback().await.expect("rolls back"),
        }
        let published = api.await.expect("no panic").expect("publishes");
        match id {
            "same" => assert!(matches!(published, Published::Duplicate(_)), "{published:?}"),
            "other" => assert!(matches!(published, Published::Conflict { .. }), "{published:?}"),
            _undone => assert!(matches!(published, Published::Accepted(_)), "{published:?}"),
        }
    }
    let mut arrived = deliver_all(&base.store).await;
    arrived.sort();
    assert_eq!(arrived, ["other", "same", "undone"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn endpoints_that_change_under_load_lose_no_delivery() {
    // Endpoints are created, disabled, enabled, moved and deleted while messages are published and sent by
    // two nodes. Every delivery that was written must end: at its endpoint, or cancelled with its reason.
    let base = Base::new("changes", spec(3)).await;
    let other = Base::node(&base.url, spec(3)).await;
    add(&base.store, settings()).await;
    let publishers: Vec<_> = (0..4)
        .map(|task| {
            let store = Arc::clone(if task % 2 == 0 { &base.store } else { &other });
            tokio::spawn(async move {
                let mut written = 0;
                for n in 0..40 {
                    let message = message(&format!("m{task}_{n}"));
                    match store.publish(message).await.expect("publishes") {
                        Published::Accepted(one) => written += one.deliveries,
                        refused => panic!("{refused:?}"),
                    }
                }
                written
            })
        })
        .collect();
    let changer = {
        let store = Arc::clone(&other);
        tokio::spawn(async move {
            for _ in 0..8 {
                let id = add(&store, settings()).await;
                let acts = [
                    EndpointAct::Disable { reason: "it moves".to_owned() },
                    EndpointAct::Enable,
                    EndpointAct::Change {
                        version: 3,
                        settings: Box::new(EndpointSettings::at("https://example.net/new")),
                        sealed: sealed(id, &Tenant::default(), 1),
                    },
                    EndpointAct::Delete,
                ];
                for act in acts {
                    let changed = store.change_endpoint(id, act, by()).await.expect("changes");
                    let is_changed =
                        matches!(changed, EndpointChanged::Changed(_) | EndpointChanged::Deleted);
                    assert!(is_changed, "{changed:?}");
                }
                store.cancel_orphans(10).await.expect("cancels");
            }
        })
    };
    let mut written = 0;
    for publisher in publishers {
        deliver_all(&base.store).await;
        written += publisher.await.expect("no panic");
    }
    changer.await.expect("no panic");
    deliver_all(&base.store).await;
    while base.store.cancel_orphans(10).await.expect("cancels") {}
    let counted = base.one("SELECT count(*)::text FROM hapax.delivery").await;
    assert_eq!(counted, written.to_string());
    let open = DeliveryFilter { limit: 500, ..DeliveryFilter::default() };
    let mut before = None;
    loop {
        let page = base.store.deliveries(DeliveryFilter { before, ..open.clone() }).await;
        let page = page.expect("reads");
        for one in &page.items {
            match one.status {
                DeliveryStatus::Delivered => assert_eq!(one.attempts.len(), 1, "{one:?}"),
                DeliveryStatus::Cancelled => assert!(one.reason.is_some(), "{one:?}"),
                DeliveryStatus::Dead
                | DeliveryStatus::Failed
                | DeliveryStatus::Held
                | DeliveryStatus::Parked
                | DeliveryStatus::Sending
                | DeliveryStatus::Waiting => panic!("{one:?}"),
            }
        }
        before = page.next;
        if before.is_none() {
            break;
        }
    }
    other.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_delivery_that_commits_after_its_endpoint_was_deleted_is_cancelled() {
    // The user's transaction saw the endpoint, and commits after the janitor has run.
    let base = Base::new("orphan", spec(3)).await;
    let endpoint = add(&base.store, settings()).await;
    let mut sql = connect(&base.url).await;
    let open = sql.transaction().await.expect("begins");
    open.execute("SELECT hapax.publish('t', '1', id => 'm1')", &[]).await.expect("publishes");
    let deleted = base.store.change_endpoint(endpoint, EndpointAct::Delete, by()).await;
    assert_eq!(deleted.expect("does not wait"), EndpointChanged::Deleted);
    assert!(!base.store.cancel_orphans(10).await.expect("cancels"));
    open.commit().await.expect("commits");
    assert!(take(&base.store, 10).await.is_empty());
    assert!(!base.store.cancel_orphans(10).await.expect("cancels"));
    let found = base.store.message("m1", None).await.expect("reads").remove(0);
    assert_eq!(found.deliveries[0].status, DeliveryStatus::Cancelled);
    assert!(found.deliveries[0].finished_at.is_some());
    // The endpoint is not checked again, unless another of its deliveries appears.
    let looked = "SELECT string_agg(orphans::text, ',') FROM hapax.endpoint";
    assert!(!base.store.cancel_orphans(10).await.expect("cancels"));
    until("every older transaction has ended", async || {
        base.store.cancel_orphans(10).await.expect("cancels");
        base.one(looked).await == "false"
    })
    .await;
    base.sql
        .batch_execute("UPDATE hapax.delivery SET state = 0, due_at = now() - interval '1 hour'")
        .await
        .expect("a delivery that committed late");
    assert!(take(&base.store, 10).await.is_empty());
    assert_eq!(base.one(looked).await, "true");
    assert!(!base.store.cancel_orphans(10).await.expect("cancels"));
    let found = base.store.message("m1", None).await.expect("reads").remove(0);
    assert!(found.deliveries[0].finished_at.is_some());
    // The secrets of a deleted endpoint are deleted with it.
    let sealed = "SELECT concat(octet_length(secrets), headers, key_ids) FROM hapax.endpoint";
    assert_eq!(base.one(sealed).await, "0{}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn one_exchange_looks_past_many_endpoints_that_may_not_be_served() {
    // More endpoints have waiting or held deliveries than one exchange checks. The due delivery
    // behind them must be found soon, and until then the store must report that there may be more.
    let base = Base::new("many", spec(3)).await;
    base.sql
        .batch_execute(
            "INSERT INTO hapax.endpoint (id, tenant, settings, types, is_thin, max_in_flight, retry, lease,
                                         secrets, key_ids, created_at)
             SELECT gen_random_uuid(), 'crowd', '{\"url\":\"u\"}', '{}', false, 16, '{0}', 30000000, '',
                    '{}', now()
             FROM generate_series(1, 3000);
             INSERT INTO hapax.endpoint_state (endpoint) SELECT endpoint FROM hapax.endpoint;
             INSERT INTO hapax.delivery (message, endpoint, state, due_at)
             SELECT 1, endpoint, 0, now() + interval '1 day' FROM hapax.endpoint;",
        )
        .await
        .expect("fills");
    add(&base.store, settings()).await;
    base.store.publish(message("m1")).await.expect("publishes");
    let mut found = Vec::new();
    for _ in 0..5 {
        let exchanged = base.store.exchange(Vec::new(), ask(10)).await.expect("exchanges");
        found.extend(exchanged.claims);
        if !found.is_empty() {
            break;
        }
        let due = exchanged.next_due.expect("there may be more");
        let soon = hapax_core::Timestamp::now() + Duration::from_secs(3_600);
        assert!(due < soon, "{due}");
    }
    assert_eq!(found.len(), 1);
    // Disabled endpoints with deliveries that are long due: the next message of the other one is found in
    // the first exchange.
    base.sql
        .batch_execute(
            "UPDATE hapax.endpoint SET disabled_at = now() WHERE tenant = 'crowd';
             UPDATE hapax.delivery SET due_at = now() - interval '1 day' WHERE state = 0;",
        )
        .await
        .expect("disables");
    for n in 2..5 {
        base.store.publish(message(&format!("m{n}"))).await.expect("publishes");
        let claims = take(&base.store, 10).await;
        assert_eq!(claims.len(), 1, "m{n}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_list_that_finds_little_stops_after_a_bounded_number_of_rows() {
    // The only held delivery lies behind 25,000 that are delivered: each page reads a part of them and
    // returns a cursor, and the held one is still found.
    let base = Base::new("long_list", spec(3)).await;
    let held = add(&base.store, settings()).await;
    base.store.publish(message("held")).await.expect("publishes");
    let disable = EndpointAct::Disable { reason: "moved".to_owned() };
    base.store.change_endpoint(held, disable, by()).await.expect("disables");
    add(&base.store, settings()).await;
    base.sql
        .batch_execute(
            "INSERT INTO hapax.message (message, tenant, id, type, fingerprint, deliveries, created_at, body)
             SELECT nextval('hapax.message_number'), 'default', 'm' || n, 't', gen_random_uuid(), 1, now(),
                    '{}' FROM generate_series(1, 25000) n;
             INSERT INTO hapax.delivery (message, endpoint, state, due_at)
             SELECT m.message, (SELECT max(endpoint) FROM hapax.endpoint),
                    hapax.delivery_state('delivered'), now()
             FROM hapax.message m WHERE m.id <> 'held'",
        )
        .await
        .expect("deliveries");
    let filter = DeliveryFilter {
        status: Some(DeliveryStatus::Held),
        limit: 10,
        ..DeliveryFilter::default()
    };
    let (mut found, mut before, mut pages) = (Vec::new(), None, 0);
    loop {
        let page = base.store.deliveries(DeliveryFilter { before, ..filter.clone() }).await;
        let page = page.expect("reads");
        found.extend(page.items.into_iter().map(|one| one.message));
        pages += 1;
        before = page.next;
        if before.is_none() {
            break;
        }
    }
    assert_eq!((found, pages), (vec!["held".to_owned()], 3));
    // Rows older than `since` end the list.
    let since = Some(hapax_core::Timestamp::now() + jiff::SignedDuration::from_hours(48));
    let young = DeliveryFilter { since, ..filter };
    assert_eq!(base.store.deliveries(young).await.expect("reads").next, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn two_nodes_share_the_rate_limit_of_an_endpoint() {
    // Both nodes claim as often as they can, on the database's own clock. Under any load, both
    // together must never begin more attempts than the limit and its slack allow.
    let base = Base::new("rate", spec(3)).await;
    let other = Base::node(&base.url, spec(3)).await;
    let rate_limit = Some("100/s".parse().expect("a rate"));
    add(&base.store, EndpointSettings { rate_limit, max_in_flight: 1_000, ..settings() }).await;
    for n in 0..400 {
        base.store.publish(message(&format!("m{n}"))).await.expect("publishes");
    }
    let tasks: Vec<_> = [&base.store, &other]
        .map(|store| {
            let store = Arc::clone(store);
            tokio::spawn(async move {
                let mut claims = Vec::new();
                let began = std::time::Instant::now();
                while began.elapsed() < Duration::from_secs(2) {
                    claims.extend(take(&store, 64).await);
                }
                claims.len()
            })
        })
        .into_iter()
        .collect();
    for task in tasks {
        task.await.expect("no panic");
    }
    let spans = "SELECT coalesce(max(n), 0)::text FROM (
                     SELECT count(*) OVER (ORDER BY started_at RANGE BETWEEN CURRENT ROW
                         AND interval '999 milliseconds' FOLLOWING) AS n
                     FROM hapax.delivery WHERE started_at IS NOT NULL) s";
    let most: u32 = base.one(spans).await.parse().expect("a number");
    assert!((20..=106).contains(&most), "{most} attempts within a second");
    other.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn only_a_node_that_holds_all_claims_of_a_fast_endpoint_gets_claims_ahead() {
    let base = Base::new("ahead", spec(3)).await;
    add(&base.store, EndpointSettings { max_in_flight: 2, ..settings() }).await;
    for n in 0..20 {
        base.store.publish(message(&format!("m{n}"))).await.expect("publishes");
    }
    let of = |node: &str| DeliveryAsk { claims_ahead: true, node: node.into(), ..ask(10) };
    let took = |claim: &DeliveryClaim, took| AttemptOutcome { took, ..outcome(claim, delivered()) };
    let (fast, slow) = (Duration::from_millis(5), Duration::from_secs(1));
    let take = async |outcomes: Vec<AttemptOutcome>, ask: DeliveryAsk| {
        base.store.exchange(outcomes, ask).await.expect("exchanges").claims
    };
    let first = take(Vec::new(), of("a")).await;
    assert_eq!(first.len(), 2, "nothing is known about the endpoint yet");
    let ahead = take(vec![took(&first[0], fast)], of("a")).await;
    assert_eq!(ahead.len(), 7, "one under way, and up to eight claims");
    assert_eq!(take(Vec::new(), of("b")).await.len(), 0, "the claims ahead count");
    // Seven of the eight claims of the first node end, and the other node takes the place that is free.
    let ended = std::iter::once(&first[1]).chain(&ahead[..6]);
    let ended = ended.map(|claim| took(claim, fast)).collect();
    assert_eq!(take(ended, ask(0)).await.len(), 0);
    let other = take(Vec::new(), of("b")).await;
    assert_eq!(other.len(), 1);
    let after = take(vec![took(&ahead[6], fast)], of("a")).await;
    assert_eq!(after.len(), 1, "another node has a claim: at most two over both");
    let after = take(vec![took(&other[0], slow)], of("a")).await;
    assert_eq!(after.len(), 1, "the endpoint is slow");
}
