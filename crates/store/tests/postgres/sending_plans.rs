//! Every statement of sending finds its rows by index, whatever the statistics are, as [`crate::plans`] checks
//! it for receiving.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::delivery::DeliveryStatus;
use hapax_core::endpoint::{EndpointAct, EndpointId, EndpointSettings, NewEndpoint};
use hapax_core::job::Retry;
use hapax_core::store::{
    Action, DeliveryFilter, DeliveryPlan, ExpiryAsk, Horizon, InspectOutbox, MessageAct,
    MessageFilter, MessageRef, NewPlan, Outbox, OutboxRetention, PlanId, PlannedDeliveries, Plans,
    Work,
};
use hapax_core::{KeyHash, Tenant};
use hapax_sim::Postgres;
use hapax_store::{PgOptions, PgStore};
use tokio_postgres::Client;
use uuid::Uuid;

use crate::connect;
use crate::harness::noon;
use crate::sending::{ask, delivered, failed, message, outcome, sealed, settings};

/// The hash of every request here.
const REQUEST: KeyHash = KeyHash([7; 16]);

/// Messages and deliveries besides those of the measured work, most of them delivered or far from due.
const ROWS: i64 = 20_000;

/// The tables that grow with the messages, or with the endpoints.
const TABLES: [&str; 6] =
    ["message", "delivery", "delivery_attempt", "endpoint", "endpoint_state", "sending_action"];

/// The statistics that the planner has when a session makes its plans, and when the tables are
/// filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Statistics {
    /// Never analysed; the plans are made while the tables are empty.
    NoneAtFirst,
    /// Analysed while the tables were empty.
    Stale,
    /// Analysed when the tables were full.
    Full,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_statement_of_sending_reads_a_whole_table_whatever_the_statistics_say() {
    let server = Postgres::with_settings(&[("autovacuum", "off")]).await;
    for statistics in [Statistics::NoneAtFirst, Statistics::Stale, Statistics::Full] {
        check(&server, statistics).await;
    }
}

async fn check(server: &Postgres, statistics: Statistics) {
    let url = server.create_database("sending_plans").await;
    let user = connect(&url).await;
    PgStore::migrate(&url).await.expect("migrates");
    if statistics == Statistics::Stale {
        user.batch_execute("VACUUM ANALYZE").await.expect("analyses");
    }
    if statistics == Statistics::Full {
        fill(&user).await;
        user.batch_execute("VACUUM ANALYZE").await.expect("analyses");
    }
    let store = Arc::new(PgStore::open(PgOptions::new(&url)).await.expect("opens"));
    let endpoint = add(&store).await;
    // A session keeps a plan after the fifth time that it runs a statement.
    for n in 0..6 {
        round(&store, endpoint, &format!("before{n}")).await;
    }
    if statistics != Statistics::Full {
        fill(&user).await;
    }
    let before = rows_scanned(&user).await;
    for n in 0..2 {
        round(&store, endpoint, &format!("after{n}")).await;
    }
    store.close().await;
    crate::until("its sessions are over", async || {
        let others = "SELECT FROM pg_stat_activity WHERE datname = current_database() \
                      AND pid <> pg_backend_pid() AND backend_type = 'client backend'";
        user.query(others, &[]).await.expect("asks").is_empty()
    })
    .await;
    for (table, scanned) in rows_scanned(&user).await {
        let scanned = scanned - before.get(&table).copied().unwrap_or_default();
        // A single full scan of a filled table would read more rows than all rounds together.
        assert!(scanned < ROWS, "{statistics:?}: {scanned} rows of {table} read by full scans");
    }
}

/// Per table, the rows read by full scans.
async fn rows_scanned(user: &Client) -> BTreeMap<String, i64> {
    user.batch_execute("SELECT pg_stat_force_next_flush()").await.expect("flushes");
    let sql = "SELECT t.relname::text, t.seq_tup_read FROM pg_stat_user_tables t
               WHERE t.schemaname = 'hapax' AND t.relname = ANY ($1)";
    let tables: Vec<&str> = TABLES.to_vec();
    let rows = user.query(sql, &[&tables]).await.expect("reads");
    assert_eq!(rows.len(), TABLES.len());
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

fn by() -> Action {
    Action { who: "ops".into(), reason: None, at: noon() }
}

async fn add(store: &PgStore) -> EndpointId {
    let (id, tenant) = (EndpointId(Uuid::now_v7()), Tenant::default());
    let sealed = sealed(id, &tenant, 1);
    let settings = EndpointSettings { max_in_flight: 100, ..settings() };
    let new = NewEndpoint { id, tenant, settings, sealed };
    store.create_endpoint(new, by()).await.expect("creates");
    id
}

/// Every act of sending.
async fn round(store: &Arc<PgStore>, endpoint: EndpointId, name: &str) {
    for n in 0..4 {
        let keyed = message(&format!("{name}_{n}")).with_key(format!("k{n}"));
        store.publish(keyed.clone()).await.expect("publishes");
        store.publish(keyed).await.expect("answers");
    }
    let claims = store.exchange(Vec::new(), ask(50)).await.expect("claims").claims;
    assert!(claims.len() >= 4, "{name}: {}", claims.len());
    let outcomes = claims
        .iter()
        .enumerate()
        .map(|(n, claim)| match n % 3 {
            0 => outcome(claim, failed(Retry::Never)),
            1 => outcome(claim, failed(Retry::Schedule)),
            _delivered => outcome(claim, delivered()),
        })
        .collect();
    store.exchange(outcomes, ask(0)).await.expect("settles");
    store.replay_delivery(claims[0].delivery, by()).await.expect("replays");
    let named = MessageRef { tenant: Tenant::default(), id: format!("{name}_3") };
    store.change_message(named, MessageAct::Cancel, by()).await.expect("cancels");
    lists(store, endpoint, name).await;
    let other = add(store).await;
    store.change_endpoint(other, EndpointAct::Delete, by()).await.expect("deletes");
    store.cancel_orphans(20).await.expect("cancels");
    let now = hapax_core::Timestamp::now();
    let horizon = Horizon { events_before: now, message_ids_before: now, ..Horizon::forever() };
    store.prune(horizon, 20).await.expect("prunes");
    let (kept, notice) = (Duration::from_secs(86_400), Duration::from_secs(3_600));
    store.expire_deliveries(ExpiryAsk { kept, notice, limit: 20 }).await.expect("expires");
    let since = now - Duration::from_secs(60);
    for which in [PlannedDeliveries::Dead, PlannedDeliveries::All] {
        let work = DeliveryPlan { endpoint, which, since, until: None };
        let id = PlanId(Uuid::now_v7());
        let plan = NewPlan { id, work: work.into(), rate: None, request: REQUEST, alone: false };
        store.create_plan(plan, by()).await.expect("plans");
        store.run_plan(5, Vec::new()).await.expect("runs");
        store.cancel_plan(id, by()).await.expect("cancels");
    }
}

async fn lists(store: &PgStore, endpoint: EndpointId, name: &str) {
    store.message(&format!("{name}_0"), None).await.expect("reads");
    store.messages(MessageFilter { limit: 20, ..MessageFilter::default() }).await.expect("reads");
    store.delivery_backlog().await.expect("reads");
    let all = || DeliveryFilter { limit: 20, ..DeliveryFilter::default() };
    let statuses = [
        DeliveryStatus::Dead,
        DeliveryStatus::Failed,
        DeliveryStatus::Sending,
        DeliveryStatus::Waiting,
        DeliveryStatus::Delivered,
    ];
    let filters = statuses.map(|status| DeliveryFilter { status: Some(status), ..all() });
    let of_message = DeliveryFilter { message: Some(format!("{name}_0")), ..all() };
    let of_endpoint = DeliveryFilter { endpoint: Some(endpoint), ..all() };
    let of_key = DeliveryFilter { key: Some("k1".to_owned()), ..all() };
    for filter in filters.into_iter().chain([all(), of_message, of_endpoint, of_key]) {
        store.deliveries(filter).await.expect("reads");
    }
}

/// Fills every table, by statements that are not measured.
async fn fill(user: &Client) {
    let fill = format!(
        "INSERT INTO hapax.endpoint (id, tenant, settings, types, is_thin, max_in_flight, retry, lease,
                                     secrets, key_ids, created_at)
         SELECT gen_random_uuid(), 'tenant_' || n, '{{\"url\":\"u\"}}', '{{}}', false, 16, '{{0}}', 30000000,
                '', '{{}}', now()
         FROM generate_series(1, {ROWS}) n;
         INSERT INTO hapax.endpoint_state (endpoint) SELECT endpoint FROM hapax.endpoint
         ON CONFLICT DO NOTHING;
         INSERT INTO hapax.message (message, tenant, id, type, fingerprint, deliveries, created_at, body)
         SELECT nextval('hapax.message_number'), 'tenant_' || n, 'filled' || n, 't', gen_random_uuid(), 1,
                now() - interval '1 hour', '{{}}'
         FROM generate_series(1, {ROWS}) n;
         INSERT INTO hapax.delivery (message, endpoint, state, due_at)
         SELECT m.message, (SELECT max(endpoint) FROM hapax.endpoint) - m.message % 100,
                (ARRAY[0, 2, 2, 2, 3, 4])[1 + m.message % 6], now() + interval '1 day'
         FROM hapax.message m WHERE m.id LIKE 'filled%';
         INSERT INTO hapax.delivery_attempt (message, endpoint, attempt, started_at, node)
         SELECT d.message, d.endpoint, 1, now(), '' FROM hapax.delivery d
         ON CONFLICT DO NOTHING;
         INSERT INTO hapax.sending_action (message, what, who, at)
         SELECT m.message, 'replay', 'ops', now() FROM hapax.message m"
    );
    user.batch_execute(&fill).await.expect("fills");
}
