//! Every statement of the hot paths finds its rows by index, whatever the statistics are: a session
//! keeps a plan that was made for empty tables while the tables grow.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::job::{Phase, Retry};
use hapax_core::ledger::{
    Fingerprint, IdempotencyKey, Ledger, Quota, Reservation, ReserveAsk, Reserved, Scope,
    StoredAnswer,
};
use hapax_core::order::{Gaps, OrderPolicy, OrderRule};
use hapax_core::search::SearchFields;
use hapax_core::store::{
    Action, ClaimAsk, EventFilter, HandlerAnswer, HandlerRef, HandlerSpec, Horizon, Inspect,
    JobFilter, NewMessage, Operate, Outcome, ReadBound, ReplayAsk, SearchIndex, Settlement, Status,
    Store, TextSearch, Verdict, Work,
};
use hapax_core::{SourceName, job::HandlerName};
use hapax_sim::Postgres;
use hapax_store::{Answering, PgOptions, PgStore, Transact};
use http::{Method, StatusCode};
use tokio_postgres::Client;

use crate::harness::{Sender, after, body, job, noon, placed};
use crate::{connect, run, spec, until};

/// Rows in every table besides those of the measured work.
const ROWS: usize = 10_000;

/// Every table that grows with the events or the keys.
const TABLES: &str = "'event', 'body', 'body_20260601', 'job', 'attempt', 'copy', 'arrival', \
                      'action', 'seen', 'mark', 'message', 'reservation', 'once_key', 'lane', \
                      'ended', 'search_value'";

/// The statistics that the planner has when a session makes its plans, and when the tables are
/// filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Statistics {
    /// The tables were never analysed, and the session makes its plans while they are empty.
    NoneAtFirst,
    /// The tables were never analysed, and the session makes its plans once they are full.
    None,
    /// The tables were analysed while they were empty.
    Stale,
    /// The tables were analysed when they were full.
    Full,
}

/// The counters of rows read since the tables were filled.
struct Watch<'a> {
    server: &'a Postgres,
    log_from: usize,
    scanned_before: Vec<(String, i64)>,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_statement_of_a_hot_path_scans_a_table_whatever_the_statistics_say() {
    // Only this test analyses the tables. Plans, and the rows that each of them read, are in the
    // server's log: a join that reads a whole index is not a scan, but costs the same. (The
    // server's own counters of index entries include dead entries, of which there are many without
    // autovacuum.)
    let server = Postgres::with_settings(&[
        ("autovacuum", "off"),
        ("session_preload_libraries", "auto_explain"),
        ("auto_explain.log_min_duration", "0"),
        ("auto_explain.log_nested_statements", "on"),
        ("auto_explain.log_verbose", "on"),
        ("auto_explain.log_analyze", "on"),
        ("auto_explain.log_timing", "off"),
    ])
    .await;
    for statistics in
        [Statistics::NoneAtFirst, Statistics::None, Statistics::Stale, Statistics::Full]
    {
        check(&server, statistics).await;
    }
}

async fn check(server: &Postgres, statistics: Statistics) {
    let url = server.create_database("plans").await;
    let user = connect(&url).await;
    PgStore::migrate(&url).await.expect("migrates");
    user.batch_execute(
        "CREATE TABLE ledger (event_id text, note text);
         SELECT hapax.make_partition('2026-06-01')",
    )
    .await
    .expect("tables");
    let first = open(&url).await;
    round(&first, &first, &user, "first").await;
    gone(vec![first], &user).await;
    if statistics == Statistics::Stale {
        let empty = "TRUNCATE hapax.event, hapax.body, hapax.job, hapax.attempt, hapax.copy, \
                     hapax.arrival, hapax.action, hapax.seen, hapax.mark, hapax.message, \
                     hapax.reservation, hapax.once_key, hapax.ended, hapax.search_value";
        user.batch_execute(empty).await.expect("empties");
        user.batch_execute("VACUUM ANALYZE").await.expect("analyses");
    }
    if matches!(statistics, Statistics::None | Statistics::Full) {
        fill(&user).await;
    }
    if statistics == Statistics::Full {
        user.batch_execute("VACUUM ANALYZE").await.expect("analyses");
    }
    // A session keeps a plan after the fifth time it runs a statement.
    let (one, other) = (open(&url).await, open(&url).await);
    for n in 0..6 {
        round(&one, &other, &user, &format!("before{n}")).await;
    }
    if matches!(statistics, Statistics::NoneAtFirst | Statistics::Stale) {
        fill(&user).await;
    }
    let watch = Watch::begin(server, &user).await;
    for n in 0..2 {
        round(&one, &other, &user, &format!("after{n}")).await;
    }
    gone(vec![one, other], &user).await;
    watch.end(&user, statistics).await;
}

impl<'a> Watch<'a> {
    async fn begin(server: &'a Postgres, user: &Client) -> Self {
        let scanned_before = rows_scanned(user).await;
        let log_from = server.log().len();
        Self { server, log_from, scanned_before }
    }

    async fn end(self, user: &Client, statistics: Statistics) {
        let log = self.server.log();
        let tables: Vec<&str> = TABLES.split(", ").map(|name| name.trim_matches('\'')).collect();
        // An entry of the log begins with its time and a query, and has its plan below.
        let mut scanned = std::collections::BTreeSet::new();
        for entry in log[self.log_from..].split("LOG:").skip(1) {
            for line in entry.lines().filter(|line| line.contains("Seq Scan on hapax.")) {
                let (_, name) = line.split_once("Seq Scan on hapax.").expect("is there");
                let name = name.split_whitespace().next().unwrap_or_default();
                if tables.contains(&name) {
                    let query: String = entry.chars().take(300).collect();
                    let (_, query) = query.split_once("Query Text:").unwrap_or(("", &query));
                    scanned.insert(format!("{name}: {query}"));
                }
            }
        }
        assert!(scanned.is_empty(), "{statistics:?}: scanned: {scanned:#?}");
        assert!(log[self.log_from..].contains("Index Scan"), "no plan was logged");
        // One read of a whole table would read more rows than all rounds together.
        let rows = rows_of_plans(&log[self.log_from..], &tables);
        assert!(rows.contains_key("job") && rows.contains_key("event"), "none logged: {rows:?}");
        for (table, read) in rows {
            assert!(
                read < ROWS,
                "{statistics:?}: {read} rows of {table} read by index, most by {}",
                greediest(&log[self.log_from..], &table)
            );
        }
        for ((table, scanned), (_, before)) in
            rows_scanned(user).await.into_iter().zip(self.scanned_before)
        {
            let scanned = scanned - before;
            // Rows read in the first rounds may be counted late.
            assert!(scanned < ROWS as i64, "{statistics:?}: {scanned} rows of {table} scanned");
        }
    }
}

/// Per table, the rows that all plans of a log read, including those that a filter dropped.
fn rows_of_plans(log: &str, tables: &[&str]) -> std::collections::BTreeMap<String, usize> {
    let number = |text: &str| -> f64 {
        let end = text.find(|letter: char| !letter.is_ascii_digit() && letter != '.');
        text[..end.unwrap_or(text.len())].parse().unwrap_or_default()
    };
    let mut rows = std::collections::BTreeMap::new();
    let (mut table, mut loops) = (None, 0.0);
    for line in log.lines() {
        if let Some((_, node)) = line.split_once("->").or_else(|| line.split_once("Plan:")) {
            table = None;
            loops = 0.0;
            let Some((_, named)) = node.split_once(" on hapax.") else { continue };
            let Some((_, actual)) = named.split_once("(actual rows=") else { continue };
            table = named.split_whitespace().next().filter(|name| tables.contains(name));
            loops = actual.split_once("loops=").map_or(0.0, |(_, loops)| number(loops));
            if let Some(table) = table {
                *rows.entry(table.to_owned()).or_default() += (number(actual) * loops) as usize;
            }
        } else if let (Some((_, removed)), Some(table)) = (line.split_once("Removed by "), table) {
            let removed = removed.split_once(": ").map_or(0.0, |(_, count)| number(count));
            *rows.entry(table.to_owned()).or_default() += (removed * loops) as usize;
        }
    }
    rows
}

/// The entry of a log whose plan read the most rows of a table.
fn greediest(log: &str, table: &str) -> String {
    let read = |entry: &&str| rows_of_plans(entry, &[table]).get(table).copied().unwrap_or(0);
    let most = log.split("LOG:").max_by_key(read).unwrap_or_default();
    most.chars().take(6_000).collect()
}

/// Per table, the rows read by full scans.
async fn rows_scanned(user: &Client) -> Vec<(String, i64)> {
    user.batch_execute("SELECT pg_stat_force_next_flush()").await.expect("flushes");
    let sql = format!(
        "SELECT t.relname::text, t.seq_tup_read FROM pg_stat_user_tables t
         WHERE t.schemaname = 'hapax' AND t.relname IN ({TABLES}) ORDER BY 1"
    );
    let rows = user.query(&sql, &[]).await.expect("reads");
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

fn ordered_handler() -> HandlerRef {
    HandlerRef { source: SourceName::new("shop"), handler: HandlerName::new("ordered") }
}

async fn open(url: &str) -> Arc<PgStore> {
    let store = PgStore::open(PgOptions::new(url)).await.expect("opens");
    let order = OrderRule { policy: OrderPolicy::Latest, gaps: Gaps::default() };
    let ordered = HandlerSpec { handler: ordered_handler(), order: Some(order), ..spec(3) };
    store.announce(vec![spec(3), ordered]).await.expect("announces");
    Arc::new(store)
}

/// Closes nodes and waits until their sessions have ended: only then are all their rows counted.
async fn gone(stores: Vec<Arc<PgStore>>, user: &Client) {
    for store in stores {
        store.close().await;
    }
    until("its sessions are over", async || {
        let others = "SELECT FROM pg_stat_activity WHERE datname = current_database() \
                      AND pid <> pg_backend_pid() AND backend_type = 'client backend'";
        user.query(others, &[]).await.expect("asks").is_empty()
    })
    .await;
}

/// Runs every act of the hot paths on two nodes. Neither node knows the other's events from memory.
async fn round(one: &Arc<PgStore>, other: &Arc<PgStore>, user: &Client, name: &str) {
    ingest(one, other, name).await;
    work(one, user, name).await;
    keys(one, user, name).await;
    lists(one).await;
    let horizon = Horizon {
        events_before: after(86_400),
        keys_before: vec![(SourceName::new("shop"), after(86_400))],
        message_ids_before: after(86_400),
        ..Horizon::forever()
    };
    one.prune(horizon, 20).await.expect("prunes");
    // A node calls this at the end of a round over the events, and the events here are never
    // finished.
    let marks = "SELECT hapax.forget_marks(ARRAY['shop'], ARRAY[now()], 0, '', 20)";
    user.execute(marks, &[]).await.expect("forgets marks");
}

async fn ingest(one: &PgStore, other: &PgStore, name: &str) {
    let (plain, guarded) = (Sender::plain(), Sender::guarded());
    let derived = Sender::derived(Some(Duration::from_secs(60)));
    for n in 0..4 {
        let id = format!("{name}_{n}");
        let jobs = [job("fee"), placed("ordered", &format!("r_{id}"), 1)];
        let verdicts = one.ingest(plain.ingest_for(&body(&id), noon(), noon(), &jobs)).await;
        assert!(matches!(verdicts.expect("ingests")[..], [Verdict::Accepted(_)]), "{id}");
        for node in [one, other] {
            let copy = node.ingest(plain.ingest_for(&body(&id), noon(), noon(), &jobs)).await;
            assert!(matches!(copy.expect("ingests")[..], [Verdict::Duplicate(_)]), "{id}");
        }
    }
    let events: Vec<String> = (0..100).map(|n| body(&format!("{name}_many_{n}"))).collect();
    let many = format!(r#"{{"events":[{}]}}"#, events.join(","));
    for node in [one, other] {
        node.ingest(Sender::of_several().ingest(&many)).await.expect("ingests");
    }
    // These arrivals need the function for ingest.
    let late =
        plain.ingest_for(&body(&format!("{name}_late")), noon(), after(7_200), &[job("fee")]);
    let verdicts = one.ingest(late).await.expect("ingests");
    let [Verdict::Review(waiting)] = verdicts[..] else { panic!("{verdicts:?}") };
    let by = || Action { who: "ops".into(), reason: None, at: noon() };
    one.approve(waiting, vec![job("fee")], by()).await.expect("approves");
    one.hurry(waiting).await.expect("hurries");
    let other_bytes = body(&format!("{name}_0")).replace("10000", "9");
    let verdicts = other.ingest(plain.ingest(&other_bytes)).await.expect("ingests");
    assert!(matches!(verdicts[..], [Verdict::Conflict(_)]), "{verdicts:?}");
    let text = format!(r#"{{"type":"payout.paid","resource":"{name}"}}"#);
    for id in ["a", "b"] {
        one.ingest(guarded.ingest_under(&format!("{name}_{id}"), &text)).await.expect("ingests");
        one.ingest(derived.ingest(&text)).await.expect("ingests");
    }
}

async fn work(store: &Arc<PgStore>, user: &Client, name: &str) {
    let done =
        || Outcome::Done { result: Some("ok".into()), publish: vec![message(name)], answer: None };
    let claim = async |handler: HandlerRef, limit| {
        let ask = ClaimAsk { handler, limit, worker: "test".into() };
        store.claim(ask).await.expect("claims")
    };
    let mut claims = claim(crate::handler(), 4).await;
    assert_eq!(claims.len(), 4);
    let (back, failing) = (claims.remove(0), claims.remove(0));
    store.give_back(vec![(back.job, back.fence)]).await.expect("gives back");
    let failed = Outcome::Failed { error: "closed".into(), retry: Retry::Schedule, answer: None };
    store.settle(failing.job, failing.fence, failed).await.expect("settles");
    // An app completes one job in its own transaction, and a Rust handler completes another.
    let (theirs, rust) = (claims.remove(0), claims.remove(0));
    let lease = Duration::from_secs(30);
    store.renew(theirs.job, theirs.fence, lease).await.expect("renews");
    user.execute("SELECT hapax.complete($1, $2, 'mine')", &[&theirs.job.0, &theirs.fence.0])
        .await
        .expect("completes");
    let answer = Some(HandlerAnswer { status: 500, body: String::new() });
    let failed = Outcome::Failed { error: "closed".into(), retry: Retry::Schedule, answer };
    let settlement = store.settle(theirs.job, theirs.fence, failed).await.expect("settles");
    assert_eq!(settlement, Settlement::AlreadyDone);
    let mut db = store.right(&rust, lease).begin().await.expect("begins");
    db.publish(&message(&format!("{name}_rust"))).await.expect("publishes");
    db.commit(None).await.expect("commits");
    for claim in claim(ordered_handler(), 2).await {
        store.settle(claim.job, claim.fence, done()).await.expect("settles");
        let ask = ReplayAsk {
            event: claim.event.id,
            handlers: vec![job("ordered")],
            force: false,
            dry_run: false,
            by: Action { who: "ops".into(), reason: None, at: noon() },
        };
        store.replay(ask).await.expect("replays");
    }
    // The remaining jobs run in handlers' own transactions, including jobs with an order.
    run(store, "INSERT INTO ledger VALUES (:event_id, 'sql')", lease).await;
    let mut ask = crate::asked("INSERT INTO ledger VALUES (:event_id, 'sql')", lease);
    ask.claim.handler = ordered_handler();
    store.run_sql(ask).await.expect("runs");
    store.wait(&crate::handler(), Duration::ZERO..=Duration::ZERO).await;
}

/// The lists of operators, with every filter that has an index of its own; the others are bounded.
async fn lists(store: &PgStore) {
    let any = || EventFilter { limit: 5, bound: ReadBound::Rows(20), ..EventFilter::default() };
    let statuses = [
        Status::Review,
        Status::Discarded,
        Status::Dead,
        Status::Failed,
        Status::Held,
        Status::Stale,
        Status::Processed,
        Status::Ignored,
    ];
    let filters = statuses.map(|status| EventFilter { status: Some(status), ..any() });
    let of_source = EventFilter { source: Some(SourceName::new("shop")), ..any() };
    let of_time = EventFilter { since: Some(noon()), until: Some(after(60)), ..any() };
    for filter in filters.into_iter().chain([any(), of_source, of_time]) {
        store.events(filter).await.expect("reads");
    }
    let pointer = hapax_core::json::Pointer::parse("/amount").expect("a pointer");
    let fields = Arc::new(SearchFields::new([(SourceName::new("shop"), vec![pointer])]));
    store.index_values(Arc::clone(&fields), 10).await.expect("indexes");
    let values = fields.hashes("10000", |_, _| true);
    let text = Some(TextSearch { values, ..TextSearch::new("10000") });
    store.events(EventFilter { text, ..any() }).await.expect("reads");
    store.events_traced_by("0197271c-0000-7000-8000-000000000000").await.expect("reads");
    for phase in [Phase::Dead, Phase::Held, Phase::Review, Phase::Stale, Phase::Ready] {
        let bound = ReadBound::Rows(20);
        let filter = JobFilter { phase: Some(phase), limit: 5, bound, ..JobFilter::default() };
        store.jobs(filter).await.expect("reads");
    }
}

fn message(id: &str) -> NewMessage {
    NewMessage::new("fee.charged", serde_json::json!({}))
        .with_key("acct")
        .with_id(format!("msg_{id}"))
}

async fn keys(store: &Arc<PgStore>, user: &Client, name: &str) {
    let ask = |key: String| ReserveAsk {
        scope: Scope::new("api", "acct_1", &Method::POST, "/charges"),
        key: IdempotencyKey::parse(key.as_bytes()).expect("a key"),
        fingerprint: Fingerprint::of(None, b"request", &[]),
        lease: Duration::from_secs(60),
        ttl: Duration::from_secs(3_600),
        quota: Some(Quota { keys: 1_000_000, bytes: 1 << 28 }),
    };
    let fresh = async |key: &str| -> Reserved {
        match store.reserve(ask(format!("{name}_{key}"))).await.expect("reserves") {
            Reservation::Fresh(reserved) => reserved,
            other => panic!("{key}: {other:?}"),
        }
    };
    let kept = StoredAnswer { status: StatusCode::CREATED, headers: Vec::new(), body: "ok".into() };
    store.finish(&fresh("finished").await, &kept).await.expect("finishes");
    store.abandon(&fresh("abandoned").await).await.expect("abandons");
    store.reserve(ask(format!("{name}_finished"))).await.expect("replays");
    let lease = Duration::from_secs(30);
    let db = store.answering(&fresh("in_tx").await, lease).begin().await.expect("begins");
    db.commit(kept).await.expect("commits");
    for act in [
        "SELECT hapax.reserve('s', $1, 'x')",
        "SELECT hapax.finish('s', $1, (SELECT fence FROM hapax.reserve('s', $1 || '2', 'x')), 200,
                             '{}', '') WHERE false",
        "SELECT hapax.abandon('s', $1, 1)",
        "SELECT hapax.once('s', $1)",
        "SELECT hapax.publish('t', '{}', $1, 'default', $1)",
    ] {
        user.execute(act, &[&name]).await.expect(act);
    }
}

/// Fills every table, by statements that are not measured.
async fn fill(user: &Client) {
    let fill = format!(
        "CREATE TEMP TABLE filled AS
         SELECT n, (lpad(to_hex({noon} + n), 12, '0') || substr(md5(n::text), 1, 14)
                    || '000000')::uuid AS id
         FROM generate_series(1, {ROWS}) n;
         INSERT INTO hapax.lane (handler, tenant)
         SELECT h.handler, 'tenant_' || n FROM hapax.handler h, generate_series(1, {ROWS}) n
         WHERE h.name = 'fee';
         INSERT INTO hapax.event (id, hash, tenant, source, event_id, received_at, body_hash,
                                  request_id, secret, has_jobs)
         SELECT id, gen_random_uuid(), 'default', CASE WHEN n % 2 = 0 THEN 'shop' ELSE 'old' END,
                n::text::bytea, to_timestamp(({noon} + n) / 1000.0), gen_random_uuid(),
                gen_random_uuid(), 0, true
         FROM filled;
         INSERT INTO hapax.body SELECT id, '', 'x' FROM filled WHERE n % 2 = 0;
         INSERT INTO hapax.ended SELECT id, 'stale' FROM filled WHERE n % 2 = 1;
         INSERT INTO hapax.job (job, event, handler, lane, state, due_at, resource, position)
         SELECT hapax.job_id(f.id, l.lane), f.id, l.handler, l.lane,
                (ARRAY[0, 0, 2, 4, 5, 6, 7])[1 + n % 7], now() + interval '1 day', 'r_' || n, 1
         FROM filled f, hapax.lane l JOIN hapax.handler h ON h.handler = l.handler
         WHERE h.name = 'ordered';
         INSERT INTO hapax.job (job, event, handler, lane, state, due_at)
         SELECT hapax.job_id(f.id, l.lane), f.id, l.handler, l.lane, 0, now() + interval '1 day'
         FROM filled f, hapax.lane l JOIN hapax.handler h ON h.handler = l.handler
         WHERE h.name = 'fee' AND l.tenant = 'default';
         INSERT INTO hapax.attempt (job, run, attempt, started_at, outcome, worker)
         SELECT id, 1, 1, now(), 'failed', '' FROM filled;
         INSERT INTO hapax.copy SELECT id, 20, 0 FROM filled;
         INSERT INTO hapax.arrival (event, received_at, request_id, conflict, secret)
         SELECT id, now(), gen_random_uuid(), false, 0 FROM filled;
         INSERT INTO hapax.action (event, what, who, at) SELECT id, 'replay', 'ops', now() FROM filled;
         INSERT INTO hapax.seen SELECT gen_random_uuid(), id FROM filled;
         INSERT INTO hapax.search_value SELECT id, gen_random_uuid() FROM filled;
         INSERT INTO hapax.mark
         SELECT l.lane, 'r_' || n, 1, now() + (CASE n % 2 WHEN 0 THEN 1 ELSE -1 END) * interval '1 day'
         FROM filled, hapax.lane l JOIN hapax.handler h ON h.handler = l.handler
         WHERE h.name = 'ordered' ON CONFLICT DO NOTHING;
         INSERT INTO hapax.message (message, tenant, id, type, event, fingerprint, deliveries,
                                    created_at, body)
         SELECT nextval('hapax.message_number'), 'default', 'filled' || n, 't', id, gen_random_uuid(),
                1, now(), '{{}}'
         FROM filled;
         INSERT INTO hapax.endpoint (id, tenant, settings, types, is_thin, max_in_flight, retry, lease,
                                     secrets, key_ids, created_at)
         SELECT gen_random_uuid(), 'tenant_' || n, '{{\"url\":\"u\"}}', '{{}}', false, 16, '{{0}}',
                30000000, '', '{{}}', now()
         FROM filled;
         INSERT INTO hapax.endpoint_state (endpoint) SELECT endpoint FROM hapax.endpoint
         ON CONFLICT DO NOTHING;
         INSERT INTO hapax.delivery (message, endpoint, state, due_at)
         SELECT m.message, e.endpoint, (ARRAY[0, 0, 2, 3, 4])[1 + m.message % 5],
                now() + interval '1 day'
         FROM hapax.message m CROSS JOIN (SELECT min(endpoint) AS endpoint FROM hapax.endpoint) e
         WHERE m.id LIKE 'filled%';
         INSERT INTO hapax.delivery_attempt (message, endpoint, attempt, started_at, node)
         SELECT d.message, d.endpoint, 1, now(), '' FROM hapax.delivery d;
         INSERT INTO hapax.reservation (scope, key, fingerprint, fence, leased_until, ttl, expires_at)
         SELECT 's', 'filled' || n, 'x', n, now(), '1 day', now() + interval '1 day' FROM filled;
         INSERT INTO hapax.once_key (tenant, scope, key, expires_at)
         SELECT 'default', 's', 'filled' || n, now() + interval '1 day' FROM filled;
         DROP TABLE filled",
        noon = noon().as_millisecond(),
    );
    user.batch_execute(&fill).await.expect("fills");
}
