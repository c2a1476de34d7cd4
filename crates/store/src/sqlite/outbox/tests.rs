//! Properties of SQLite alone: which state survives the end of the process and a failed write, and
//! that the cost of a claim does not depend on the backlog.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use hapax_core::Tenant;
use hapax_core::delivery::{DeliveryStatus, OUTCOME_LOST};
use hapax_core::endpoint::{
    EndpointAct, EndpointChanged, EndpointId, EndpointOrder, EndpointSealed, EndpointSettings,
    NewEndpoint,
};
use hapax_core::handler::TypeFilter;
use hapax_core::job::Retry;
use hapax_core::message::{MessageData, Payload};
use hapax_core::store::{
    Action, AttemptOutcome, AttemptVerdict, DeliveryAsk, DeliveryClaim, DeliveryDetail,
    DeliveryFilter, EndpointSignal, Exchanged, HandlerAnswer, Held, Horizon, InspectOutbox as _,
    MessageFilter, NewMessage, Outbox as _, Published, Store as _, StoreError, Work as _,
};
use hapax_core::vault::{KeyId, SealContext, Vault, VaultKey};
use rusqlite::Connection;
use uuid::Uuid;

use super::claim::{due_sql, least_tried_sql};
use super::operator_actions::orphans_sql;
use super::order::{BUSY_KEYS, EARLIER_DEAD, EARLIER_OPEN, first_open_sql, parked_sql};
use super::{LEASES, NEXT_DUE};
use crate::harness::{Clock, DatabaseDirectory, FOREVER, Sender, after, body, noon};
use crate::sqlite::{SqliteOptions, SqliteStore};

/// A data directory that outlives the stores that are opened in it.
struct Setup {
    place: DatabaseDirectory,
    clock: Clock,
}

fn vault() -> Vault {
    Vault::new(VaultKey::from_bytes(&[1; 32]), Vec::new()).expect("one key")
}

fn keys() -> Arc<[KeyId]> {
    vault().key_ids().collect()
}

fn by() -> Action {
    Action { who: "ops".to_owned(), reason: None, at: noon() }
}

impl Setup {
    fn new() -> Self {
        Self { place: DatabaseDirectory::new(), clock: Clock::default() }
    }

    fn open(&self) -> SqliteStore {
        let clock = self.clock.for_a_store();
        let options = SqliteOptions { clock, ..SqliteOptions::new(self.place.directory()) };
        SqliteStore::open(options).expect("opens")
    }

    /// Ends a store as a kill does: nothing is flushed, and no lease is given back.
    fn kill(&self, store: SqliteStore) {
        let thread = store.writer.take_thread().expect("it runs");
        drop(store);
        thread.join().expect("no panic");
    }

    fn read<T: rusqlite::types::FromSql>(&self, sql: &str) -> T {
        let conn = Connection::open(self.place.file()).expect("opens");
        conn.query_row(sql, [], |row| row.get(0)).expect("reads")
    }
}

fn new_endpoint(settings: EndpointSettings) -> NewEndpoint {
    let (id, tenant) = (EndpointId(Uuid::now_v7()), Tenant::default());
    let owner = id.to_string();
    let secrets = vault().seal(&SealContext::endpoint_secrets(&tenant, &owner), b"s", [7; 12]);
    NewEndpoint { id, tenant, settings, sealed: EndpointSealed { secrets, headers: None } }
}

async fn add(store: &SqliteStore, settings: EndpointSettings) -> EndpointId {
    match store.create_endpoint(new_endpoint(settings), by()).await.expect("creates") {
        EndpointChanged::Changed(record) => record.id,
        other => panic!("{other:?}"),
    }
}

fn settings() -> EndpointSettings {
    EndpointSettings::at("https://example.com/in")
}

fn of_type(glob: &str) -> TypeFilter {
    TypeFilter::new([glob]).expect("a glob")
}

fn message(id: &str) -> NewMessage {
    let data = MessageData::parse(format!("{{\"id\":\"{id}\"}}")).expect("JSON");
    NewMessage::new("invoice.paid", data).with_id(id)
}

fn large(id: &str) -> NewMessage {
    let data = serde_json::Value::from("x".repeat(200_000));
    NewMessage { data: data.into(), ..message(id) }
}

async fn publish(store: &SqliteStore, message: NewMessage) -> u64 {
    match store.publish(message).await.expect("publishes") {
        Published::Accepted(message) => message.deliveries,
        other => panic!("{other:?}"),
    }
}

fn ask(limit: usize) -> DeliveryAsk {
    DeliveryAsk {
        limit,
        bytes_max: usize::MAX >> 1,
        node: "node-1".into(),
        vault_keys: keys(),
        claims_ahead: false,
    }
}

async fn exchange(store: &SqliteStore, outcomes: Vec<AttemptOutcome>, limit: usize) -> Exchanged {
    store.exchange(outcomes, ask(limit)).await.expect("exchanges")
}

async fn claim(store: &SqliteStore, limit: usize) -> Vec<DeliveryClaim> {
    exchange(store, Vec::new(), limit).await.claims
}

fn delivered(claim: &DeliveryClaim) -> AttemptOutcome {
    let answer = HandlerAnswer { status: 204, body: String::new() };
    AttemptOutcome {
        delivery: claim.delivery,
        fence: claim.fence,
        took: Duration::from_millis(5),
        verdict: AttemptVerdict::Delivered(answer),
    }
}

async fn all(store: &SqliteStore) -> Vec<DeliveryDetail> {
    let filter = DeliveryFilter { limit: 500, ..DeliveryFilter::default() };
    store.deliveries(filter).await.expect("reads").items
}

/// Lets the file grow no further: the next large commit fails.
fn fail_commits(store: &SqliteStore) {
    store.writer.tamper(|conn| {
        let pages: i64 = conn.query_row("PRAGMA page_count", [], |row| row.get(0)).expect("counts");
        let set = format!("PRAGMA max_page_count = {pages}");
        conn.query_row(&set, [], |_| Ok(())).expect("sets");
    });
}

async fn writable_again(store: &SqliteStore) {
    tokio::time::timeout(FOREVER, async {
        while store.writable().is_err() {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("the store recovers by itself");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_a_fast_endpoint_gets_claims_ahead() {
    let setup = Setup::new();
    let store = setup.open();
    add(&store, EndpointSettings { max_in_flight: 2, ..settings() }).await;
    for n in 0..20 {
        publish(&store, message(&format!("m{n}"))).await;
    }
    let ahead = || DeliveryAsk { claims_ahead: true, ..ask(10) };
    let take = async |outcomes: Vec<AttemptOutcome>, ask: DeliveryAsk| {
        store.exchange(outcomes, ask).await.expect("exchanges").claims
    };
    let claims = take(Vec::new(), ahead()).await;
    assert_eq!(claims.len(), 2, "nothing is known about it yet");
    assert_eq!(claims[0].endpoint.max_in_flight, 2);
    let claims = take(vec![delivered(&claims[0])], ahead()).await;
    assert_eq!(claims.len(), 10, "one under way, and up to sixteen claims");
    let without = take(vec![delivered(&claims[0]), delivered(&claims[1])], ask(10)).await;
    assert_eq!(without.len(), 0, "this sender does not hold claims back");
    let slow = |claim| AttemptOutcome { took: Duration::from_secs(1), ..delivered(claim) };
    let claims = take(claims[2..].iter().map(slow).collect(), ahead()).await;
    assert_eq!(claims.len(), 1, "it is slow now");
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_endpoint_with_a_rate_limit_gets_no_claims_ahead() {
    let setup = Setup::new();
    let store = setup.open();
    let rate_limit = Some("100/s".parse().expect("a limit"));
    add(&store, EndpointSettings { max_in_flight: 2, rate_limit, ..settings() }).await;
    for n in 0..20 {
        publish(&store, message(&format!("m{n}"))).await;
    }
    let ahead = || DeliveryAsk { claims_ahead: true, ..ask(10) };
    let claims = store.exchange(Vec::new(), ahead()).await.expect("claims").claims;
    assert_eq!(claims.len(), 2);
    let outcomes = vec![delivered(&claims[0])];
    assert_eq!(store.exchange(outcomes, ahead()).await.expect("claims").claims.len(), 1);
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_process_loses_no_message_and_its_attempts_are_lost_ones() {
    // The process is killed with one message delivered, one under way and one that waits. Each must
    // be found as it was. The one under way must be claimed again under its own id, without waiting
    // for the end of its lease.
    let setup = Setup::new();
    let store = setup.open();
    add(&store, EndpointSettings { max_in_flight: 2, ..settings() }).await;
    for id in ["m1", "m2", "m3"] {
        assert_eq!(publish(&store, message(id)).await, 1);
    }
    let claims = claim(&store, 10).await;
    assert_eq!(claims.len(), 2, "as many as may be in flight");
    let settled = store.exchange(vec![delivered(&claims[0])], ask(0)).await.expect("settles");
    assert_eq!(settled.settled, [Held::Kept]);
    setup.kill(store);

    let store = setup.open();
    let lost = store.delivery(claims[1].delivery).await.expect("reads").expect("is there");
    assert_eq!(lost.status, DeliveryStatus::Waiting);
    assert_eq!(lost.attempts[0].error.as_deref(), Some(OUTCOME_LOST));
    setup.clock.pass(2);
    let again = claim(&store, 10).await;
    let mut found: Vec<_> =
        again.iter().map(|claim| (claim.message.as_str(), claim.attempt)).collect();
    found.sort_unstable();
    assert_eq!(found, [("m2", 2), ("m3", 1)]);
    let second = again.iter().find(|claim| claim.message == "m2").expect("claimed");
    assert_eq!(second.delivery, claims[1].delivery);
    assert_eq!(second.body, claims[1].body, "the same bytes");
    // The sender that died can no longer settle.
    let late = exchange(&store, vec![delivered(&claims[1])], 0).await;
    assert_eq!(late.settled, [Held::Lost]);
    let settled = exchange(&store, again.iter().map(delivered).collect(), 10).await;
    assert_eq!(settled.settled, [Held::Kept, Held::Kept]);
    assert!(settled.claims.is_empty());
    for id in ["m1", "m2", "m3"] {
        let again = store.publish(message(id)).await.expect("answers");
        assert!(matches!(again, Published::Duplicate(_)), "{id}: {again:?}");
    }
    store.close().await;
    assert_eq!(
        setup.read::<String>("SELECT group_concat(status, ' ') FROM hapax_deliveries"),
        "delivered delivered delivered"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_publish_whose_commit_failed_leaves_nothing_and_its_retry_is_delivered_once() {
    // A naive outbox would keep the id or the due time in memory, and would call the retry a
    // duplicate, or claim a delivery that is not on disk.
    let setup = Setup::new();
    let store = setup.open();
    add(&store, settings()).await;
    publish(&store, message("before")).await;
    fail_commits(&store);
    let failed = store.publish(large("m1")).await;
    assert!(matches!(failed, Err(StoreError::Unavailable(_))), "{failed:?}");
    writable_again(&store).await;
    assert_eq!(all(&store).await.len(), 1);
    assert_eq!(publish(&store, large("m1")).await, 1);
    let claims = claim(&store, 10).await;
    let mut found: Vec<_> = claims.iter().map(|claim| claim.message.as_str()).collect();
    found.sort_unstable();
    assert_eq!(found, ["before", "m1"]);
    assert!(claim(&store, 10).await.is_empty());
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exchange_whose_commit_failed_settles_nothing_and_frees_no_lease() {
    // The batch that fails settles one delivery and claims the next. Both must be rolled back, no
    // delivery may be claimed twice at once, and the outcome that is offered again counts once.
    let setup = Setup::new();
    let store = Arc::new(setup.open());
    add(&store, EndpointSettings { max_in_flight: 1, ..settings() }).await;
    publish(&store, message("m1")).await;
    publish(&store, message("m2")).await;
    let first = claim(&store, 10).await.remove(0);
    fail_commits(&store);
    // A publish too large for the file is in the same batch, or before it.
    let publishing = tokio::spawn({
        let store = Arc::clone(&store);
        async move { store.publish(large("m3")).await }
    });
    let failed = store.exchange(vec![delivered(&first)], ask(10)).await;
    let published = publishing.await.expect("no panic");
    assert!(matches!(published, Err(StoreError::Unavailable(_))), "{published:?}");
    writable_again(&store).await;
    let next = match failed {
        // The exchange had its own commit, before the one that failed.
        Ok(exchanged) => exchanged.claims,
        Err(_) => {
            assert!(claim(&store, 10).await.is_empty(), "the lease of this process stays");
            let again = exchange(&store, vec![delivered(&first)], 10).await;
            assert_eq!(again.settled, [Held::Kept]);
            again.claims
        }
    };
    assert_eq!(next.len(), 1);
    assert_eq!((next[0].message.as_str(), next[0].attempt), ("m2", 1));
    let again = exchange(&store, vec![delivered(&first), delivered(&next[0])], 10).await;
    assert_eq!(again.settled, [Held::Kept, Held::Kept]);
    assert!(again.claims.is_empty());
    assert!(all(&store).await.iter().all(|one| one.attempts.len() == 1));
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_endpoints_have_their_turn_and_a_claim_reads_no_backlog() {
    // One endpoint has a long backlog, the others one delivery each. All single deliveries must be
    // claimed in as few exchanges as their number needs, whatever waits for the first endpoint.
    let setup = Setup::new();
    let store = setup.open();
    let first = add(&store, settings()).await;
    store
        .writer
        .act(|writer| {
            let endpoint = new_endpoint(settings());
            let one = "INSERT INTO hapax_endpoint
                           (endpoint, id, tenant, settings, secrets, version, created_at)
                       VALUES (?1, randomblob(16), 'tenant' || ?1, ?2, ?3, 1, 0)";
            let settings = serde_json::to_string(&endpoint.settings).expect("JSON");
            for number in 2..=10_000 {
                let secrets = endpoint.sealed.secrets.as_bytes();
                writer.conn.prepare_cached(one)?.execute((number, &settings, secrets))?;
            }
            writer.conn.execute_batch(
                "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 30000)
                 INSERT INTO hapax_message (seq, tenant, id, type, fingerprint, created_at, deliveries)
                 SELECT i, 'default', 'm' || i, 't', zeroblob(16), 0, 1 FROM n;
                 INSERT INTO hapax_message_body (seq, body) SELECT seq, x'7b7d' FROM hapax_message;
                 INSERT INTO hapax_delivery (message_seq, endpoint, state, due_at)
                 SELECT seq, CASE WHEN seq <= 20000 THEN 1 ELSE seq - 20000 END, 0, 0
                 FROM hapax_message;",
            )
        })
        .await
        .expect("writes");
    setup.kill(store);

    let store = setup.open();
    let mut of_others = 0;
    let mut of_first = 0;
    // A slow machine claims less in the time that one exchange may take.
    for _ in 0..450 {
        let exchanged = exchange(&store, Vec::new(), 64).await;
        for claim in &exchanged.claims {
            if claim.endpoint.id == first {
                of_first += 1;
            } else {
                of_others += 1;
            }
        }
        let outcomes = exchanged.claims.iter().map(delivered).collect();
        exchange(&store, outcomes, 0).await;
        if of_others == 9_999 {
            break;
        }
    }
    assert_eq!(of_others, 9_999);
    assert!(of_first < 500, "{of_first} of the endpoint that would take all");
    store.close().await;
}

fn failed(claim: &DeliveryClaim, retry: Retry) -> AttemptOutcome {
    let error = "the endpoint answered 500".to_owned();
    let verdict =
        AttemptVerdict::Failed { error, answer: None, retry, says: EndpointSignal::Fails };
    AttemptOutcome { verdict, ..delivered(claim) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retention_keeps_what_can_still_be_sent_and_ids_as_long_as_keys() {
    // Old messages: one is delivered, one is dead, one waits for its retry, and one has no endpoint.
    // A publisher that repeats its publish late must not have it sent a second time.
    let setup = Setup::new();
    let store = setup.open();
    add(&store, EndpointSettings { types: of_type("invoice.*"), ..settings() }).await;
    for id in ["delivered", "dead", "waits"] {
        publish(&store, message(id)).await;
    }
    let unwanted = NewMessage { r#type: "other".to_owned(), ..message("unwanted") };
    assert_eq!(publish(&store, unwanted).await, 0);
    let outcomes = claim(&store, 10)
        .await
        .iter()
        .map(|claim| match claim.message.as_str() {
            "delivered" => delivered(claim),
            "dead" => failed(claim, Retry::Never),
            _waits => failed(claim, Retry::Schedule),
        })
        .collect();
    assert_eq!(exchange(&store, outcomes, 0).await.settled, [Held::Kept; 3]);
    let prune = async |ids_before: i64| {
        let (events_before, message_ids_before) = (after(600), after(ids_before));
        let horizon = Horizon { events_before, message_ids_before, ..Horizon::forever() };
        while store.prune(horizon.clone(), 2).await.expect("prunes") {}
    };
    let listed = async || {
        let filter = MessageFilter { limit: 10, ..MessageFilter::default() };
        let page = store.messages(filter).await.expect("reads").items;
        page.into_iter().map(|message| message.id).collect::<Vec<_>>()
    };
    prune(-600).await;
    assert_eq!(listed().await, ["waits", "dead"]);
    let again = store.publish(message("delivered")).await.expect("answers");
    assert!(matches!(&again, Published::Duplicate(known) if known.deliveries == 1), "{again:?}");
    let other = NewMessage { r#type: "invoice.void".to_owned(), ..message("delivered") };
    let other = store.publish(other).await.expect("answers");
    assert!(matches!(other, Published::Conflict { .. }), "{other:?}");
    let found = store.message("delivered", None).await.expect("reads");
    assert!(found[0].body.is_empty() && found[0].deliveries.is_empty(), "{found:?}");
    // Past its horizon the id is free. Its number is not used again.
    prune(600).await;
    assert_eq!(publish(&store, message("delivered")).await, 1);
    assert_eq!(listed().await, ["delivered", "waits", "dead"]);
    setup.clock.pass(3_600);
    let due = claim(&store, 10).await;
    let mut due: Vec<_> = due.iter().map(|claim| claim.message.as_str()).collect();
    due.sort_unstable();
    assert_eq!(due, ["delivered", "waits"]);
    store.close().await;
    assert_eq!(setup.read::<i64>("SELECT max(seq) FROM hapax_message"), 5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_that_was_set_back_delays_no_delivery() {
    // A retry waits a minute and a lease half a minute when the clock goes back by an hour: neither
    // may wait an hour more.
    let setup = Setup::new();
    let store = setup.open();
    add(&store, settings()).await;
    publish(&store, message("retried")).await;
    publish(&store, message("leased")).await;
    for one in claim(&store, 10).await {
        if one.message == "retried" {
            exchange(&store, vec![failed(&one, Retry::Schedule)], 0).await;
        }
    }
    setup.clock.pass(-3_600);
    assert!(claim(&store, 10).await.is_empty());
    // Passes the time of the retry's wait with its jitter, and then of the back-off after a lost
    // attempt.
    setup.clock.pass(90);
    let lost = exchange(&store, Vec::new(), 10).await;
    let mut due: Vec<_> = lost.claims.iter().map(|claim| claim.message.clone()).collect();
    setup.clock.pass(2);
    due.extend(claim(&store, 10).await.iter().map(|claim| claim.message.clone()));
    due.sort_unstable();
    assert_eq!(due, ["leased", "retried"]);
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_view_of_deliveries_has_the_ids_and_words_of_the_api() {
    // The view makes its ids and statuses in SQL, the API in Rust: they must never differ.
    let setup = Setup::new();
    let store = setup.open();
    for (uid, types) in [("a", "invoice.*"), ("b", "held"), ("c", "gone"), ("d", "keyed.*")] {
        let settings = EndpointSettings {
            uid: Some(uid.to_owned()),
            types: of_type(types),
            order: EndpointOrder::Key,
            ..settings()
        };
        let id = add(&store, settings).await;
        let kinds = match types {
            "invoice.*" => vec!["invoice.delivered", "invoice.dead", "invoice.failed"],
            "keyed.*" => vec!["keyed.sending", "keyed.parked"],
            other => vec![other],
        };
        for kind in kinds {
            let id = kind.replace('.', "_");
            let key = (types == "keyed.*").then(|| "k".to_owned());
            publish(&store, NewMessage { r#type: kind.to_owned(), key, ..message(&id) }).await;
        }
        let act = match types {
            "held" => EndpointAct::Disable { reason: "it answered 410".to_owned() },
            "gone" => EndpointAct::Delete,
            _active => continue,
        };
        store.change_endpoint(id, act, by()).await.expect("changes");
    }
    for one in claim(&store, 10).await {
        let outcome = match one.message.as_str() {
            "invoice_delivered" => delivered(&one),
            "invoice_dead" => failed(&one, Retry::Never),
            "invoice_failed" => failed(&one, Retry::Schedule),
            _sending => continue,
        };
        assert_eq!(exchange(&store, vec![outcome], 0).await.settled, [Held::Kept]);
    }
    publish(&store, NewMessage { r#type: "invoice.new".to_owned(), ..message("new") }).await;
    let conn = Connection::open(setup.place.file()).expect("opens");
    let mut statuses = Vec::new();
    for delivery in all(&store).await {
        let seen: (String, String, String, i64, bool) = conn
            .query_row(
                "SELECT message, endpoint, status, attempt, delivered_at IS NOT NULL
                 FROM hapax_deliveries WHERE id = ?1",
                [delivery.id.to_string()],
                |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?)),
            )
            .expect("the view has this id");
        let expected = (
            delivery.message.clone(),
            delivery.endpoint.to_string(),
            delivery.status.as_str().to_owned(),
            i64::from(delivery.attempt),
            delivery.status == DeliveryStatus::Delivered,
        );
        assert_eq!(seen, expected);
        assert_eq!(store.delivery(delivery.id).await.expect("reads"), Some(delivery.clone()));
        let filter = DeliveryFilter {
            status: Some(delivery.status),
            endpoint: Some(delivery.endpoint),
            limit: 10,
            ..DeliveryFilter::default()
        };
        assert_eq!(
            store.deliveries(filter).await.expect("reads").items,
            std::slice::from_ref(&delivery)
        );
        statuses.push(delivery.status);
    }
    statuses.sort_unstable();
    let every = [
        DeliveryStatus::Dead,
        DeliveryStatus::Failed,
        DeliveryStatus::Held,
        DeliveryStatus::Parked,
        DeliveryStatus::Sending,
        DeliveryStatus::Waiting,
        DeliveryStatus::Delivered,
        DeliveryStatus::Cancelled,
    ];
    assert_eq!(statuses, every);
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_query_of_sending_uses_its_index() {
    // A scan of all deliveries in a claim would make its cost grow with the backlog.
    let setup = Setup::new();
    let store = setup.open();
    store.close().await;
    drop(store);
    let conn = Connection::open(setup.place.file()).expect("opens");
    let plan_of = |sql: &str| {
        let mut plan = conn.prepare(&format!("EXPLAIN QUERY PLAN {sql}")).expect("prepares");
        let lines = plan.raw_query();
        let lines: Vec<String> =
            lines.mapped(|row| row.get(3)).collect::<Result<_, _>>().expect("explains");
        lines.join("; ")
    };
    let check = |sql: &str, index: &str| {
        let plan = plan_of(sql);
        assert!(plan.contains(index), "{sql}: {plan}");
        assert!(!plan.contains("SCAN"), "{sql}: {plan}");
        assert!(!plan.contains("TEMP B-TREE"), "{sql}: {plan}");
    };
    for payload in [Payload::Fat, Payload::Thin] {
        check(&due_sql(payload), "hapax_delivery_ready (endpoint=? AND due_at<?)");
        // The query sorts the few rows that its inner query takes from the index.
        let plan = plan_of(&least_tried_sql(payload));
        assert!(plan.contains("hapax_delivery_ready (endpoint=? AND due_at<?)"), "{plan}");
        assert!(!plan.contains("SCAN hapax_delivery") && !plan.contains("SCAN d"), "{plan}");
    }
    check(&orphans_sql(), "hapax_delivery_leased (endpoint=?)");
    check(BUSY_KEYS, "hapax_delivery_leased (endpoint=?)");
    check(EARLIER_OPEN, "hapax_delivery_key (endpoint=? AND key=? AND place<?)");
    check(EARLIER_DEAD, "hapax_delivery_dead_key (endpoint=? AND key=? AND place<?)");
    check(&first_open_sql(), "hapax_delivery_key (endpoint=? AND key=?)");
    check(&parked_sql(), "hapax_delivery_parked (endpoint=? AND message_seq>?)");
    check(NEXT_DUE, "hapax_delivery_ready (endpoint=?)");
    check(LEASES, "hapax_delivery_leased (endpoint=?)");
}

/// Polls a future once.
async fn is_pending(future: &mut (impl Future + Unpin)) -> bool {
    let mut future = Pin::new(future);
    std::future::poll_fn(|context| Poll::Ready(future.as_mut().poll(context).is_pending())).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_that_waits_is_committed_before_an_exchange() {
    // An exchange in the same commit would delay the ack by the time that all of its outcomes take.
    let setup = Setup::new();
    let store = Arc::new(setup.open());
    add(&store, settings()).await;
    publish(&store, message("m1")).await;
    let (began, begins) = std::sync::mpsc::channel::<()>();
    let (hold, held) = std::sync::mpsc::channel::<()>();
    let (first, waits) = std::sync::mpsc::channel::<()>();
    store.writer.tamper(move |conn| {
        let hook = move || {
            let _ = began.send(());
            let _ = held.recv();
            false
        };
        conn.commit_hook(Some(hook)).expect("a hook");
        let _ = waits.recv();
    });
    // Both requests wait in the queue, the exchange before the event.
    let mut exchange = Box::pin(store.exchange(Vec::new(), ask(10)));
    let sender = Sender::plain();
    let mut event = Box::pin(store.ingest(sender.ingest(&body("evt_1"))));
    assert!(is_pending(&mut exchange).await && is_pending(&mut event).await);
    drop(first);
    let begins = tokio::task::spawn_blocking(move || begins.recv().map(|()| begins));
    let begins = begins.await.expect("ends").expect("a commit");
    hold.send(()).expect("the first commit waits");
    tokio::time::timeout(FOREVER, event).await.expect("is acked").expect("accepts");
    // The writer waits in the commit of the exchange, or has not begun it.
    assert!(is_pending(&mut exchange).await, "one commit held both");
    drop((hold, begins));
    assert_eq!(exchange.await.expect("exchanges").claims.len(), 1);
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exchange_behind_an_event_that_cannot_be_written_gets_an_error() {
    let setup = Setup::new();
    let store = setup.open();
    add(&store, settings()).await;
    publish(&store, message("m1")).await;
    let (first, waits) = std::sync::mpsc::channel::<()>();
    store.writer.tamper(move |conn| {
        conn.execute_batch("PRAGMA query_only = on").expect("sets");
        let _ = waits.recv();
    });
    let mut exchange = Box::pin(store.exchange(Vec::new(), ask(10)));
    let sender = Sender::plain();
    let mut event = Box::pin(store.ingest(sender.ingest(&body("evt_1"))));
    assert!(is_pending(&mut exchange).await && is_pending(&mut event).await);
    drop(first);
    let both = async { tokio::join!(event, exchange) };
    let (event, exchange) = tokio::time::timeout(FOREVER, both).await.expect("both are answered");
    assert!(matches!(event, Err(StoreError::Unavailable(_))), "{event:?}");
    assert!(matches!(exchange, Err(StoreError::Unavailable(_))), "{exchange:?}");
    store.close().await;
}
