//! Guarantees that only PostgreSQL needs: many nodes on one database, users' own transactions, and
//! handlers' SQL on connections that are reused. The conformance suite covers what every store
//! guarantees.

#[allow(dead_code)]
#[path = "../conformance/harness.rs"]
mod harness;

#[allow(dead_code)]
#[path = "../conformance/sending.rs"]
mod sending;

mod crowd;
mod delivery_lifecycle;
mod event_plans;
mod faults;
mod functions;
mod handlers;
mod ledger;
mod lifecycle;
mod nodes;
mod outbox;
mod plans;
mod redis_cache;
mod retention;
mod sending_plans;
mod transact;
mod views;
mod work;

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hapax_core::SourceName;
use hapax_core::handler::{Dialect, SqlProgram};
use hapax_core::job::{HandlerName, Policy, WorkLocation};
use hapax_core::order::{OrderRule, Position, ResourcePosition};
use hapax_core::store::{
    Claim, ClaimAsk, HandlerRef, HandlerSpec, NewJob, Ran, SqlAsk, SqlRan, SqlRun, Store, Work,
};
use hapax_sim::Postgres;
use hapax_store::{PgOptions, PgStore};
use harness::{Sender, body, noon};
use tokio::sync::Mutex;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, NoTls, Row, Statement};

/// Far beyond any expected wait: a test that waits this long would wait for ever.
const FOREVER: Duration = Duration::from_secs(120);

/// A separate database, and one node on it.
struct Base {
    url: String,
    store: Arc<PgStore>,
    sql: Client,
}

fn handler() -> HandlerRef {
    HandlerRef { source: SourceName::new("shop"), handler: HandlerName::new("fee") }
}

fn spec(attempts: usize) -> HandlerSpec {
    let policy = Policy { retry: vec![Duration::ZERO; attempts], lease: Duration::from_secs(30) };
    HandlerSpec { handler: handler(), policy, order: None, workplace: WorkLocation::Inside }
}

fn ordered(order: OrderRule) -> HandlerSpec {
    HandlerSpec { order: Some(order), ..spec(3) }
}

/// For thousands of small commits of one test, none of which has to survive.
const WITHOUT_SYNC: &str = "SET synchronous_commit = off";

async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("connects");
    tokio::spawn(connection);
    client
}

/// A session that prepares each statement once, for thousands of cases of one test.
struct PreparingClient {
    client: Client,
    statements: Mutex<HashMap<&'static str, Statement>>,
}

impl PreparingClient {
    fn new(client: Client) -> Self {
        Self { client, statements: Mutex::default() }
    }

    async fn prepared(&self, sql: &'static str) -> Statement {
        let mut statements = self.statements.lock().await;
        if let Some(statement) = statements.get(sql) {
            return statement.clone();
        }
        let statement = self.client.prepare(sql).await.expect(sql);
        statements.insert(sql, statement.clone());
        statement
    }

    async fn rows(&self, sql: &'static str, values: &[&(dyn ToSql + Sync)]) -> Vec<Row> {
        self.query(&self.prepared(sql).await, values).await.expect(sql)
    }

    async fn row(&self, sql: &'static str, values: &[&(dyn ToSql + Sync)]) -> Row {
        self.query_one(&self.prepared(sql).await, values).await.expect(sql)
    }
}

impl Deref for PreparingClient {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl Base {
    async fn new(label: &str, spec: HandlerSpec) -> Self {
        let server = Postgres::shared().await;
        let url = server.create_database(label).await;
        let store = Self::node(&url, spec).await;
        let sql = connect(&url).await;
        sql.batch_execute("CREATE TABLE ledger (event_id text, note text)").await.expect("a table");
        Self { url, store, sql }
    }

    /// Another node on a database.
    async fn node(url: &str, spec: HandlerSpec) -> Arc<PgStore> {
        let store = PgStore::open(PgOptions::new(url)).await.expect("opens");
        store.announce(vec![spec]).await.expect("announces");
        Arc::new(store)
    }

    async fn accept(&self, id: &str, place: Option<(&str, i64)>) {
        let place = place.map(|(resource, position)| ResourcePosition {
            resource: resource.into(),
            position: Position(position),
        });
        let job = NewJob { handler: handler().handler, place, hopeless: None };
        let ingest = Sender::plain().ingest_for(&body(id), noon(), noon(), &[job]);
        self.store.ingest(ingest).await.expect("accepts");
    }

    /// Accepts many events at once: `evt_0`, `evt_1` …
    async fn accept_many(&self, count: usize) {
        let sender = Arc::new(Sender::plain());
        let tasks: Vec<_> = (0..16)
            .map(|task| {
                let (store, sender) = (Arc::clone(&self.store), Arc::clone(&sender));
                tokio::spawn(async move {
                    for n in (task..count).step_by(16) {
                        let job =
                            NewJob { handler: handler().handler, place: None, hopeless: None };
                        let id = format!("evt_{n}");
                        let ingest = sender.ingest_for(&body(&id), noon(), noon(), &[job]);
                        store.ingest(ingest).await.expect("accepts");
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.expect("no panic");
        }
    }

    /// Tables with a foreign key that is checked only at the commit.
    async fn deferred_tables(&self) {
        self.sql
            .batch_execute(
                "CREATE TABLE parent (id int PRIMARY KEY);
                 CREATE TABLE child (parent int REFERENCES parent DEFERRABLE INITIALLY DEFERRED)",
            )
            .await
            .expect("tables");
    }

    async fn claim(&self, limit: usize) -> Vec<Claim> {
        claim(&self.store, limit).await
    }

    async fn one(&self, sql: &str) -> String {
        let rows = self.sql.query(sql, &[]).await.expect(sql);
        rows.first().and_then(|row| row.get(0)).unwrap_or_default()
    }

    async fn run(&self, sql: &str) -> SqlRan {
        run(&self.store, sql, Duration::from_secs(30)).await
    }

    /// Runs jobs until none is due.
    async fn drain(&self, sql: &str) -> (usize, usize, usize) {
        let (mut done, mut guarded, mut failed) = (0, 0, 0);
        for _ in 0..1_000 {
            let ran = self.run(sql).await;
            if ran.is_idle() {
                return (done, guarded, failed);
            }
            done += ran.done;
            guarded += ran.guarded;
            failed += ran.failed;
        }
        panic!("the work never ends");
    }

    /// The error of the only job.
    async fn error(&self) -> String {
        self.one("SELECT coalesce(error, '') FROM hapax.job").await
    }
}

async fn claim(store: &PgStore, limit: usize) -> Vec<Claim> {
    let ask = ClaimAsk { handler: handler(), limit, worker: "test".into() };
    store.claim(ask).await.expect("claims")
}

fn asked(sql: &str, timeout: Duration) -> SqlAsk {
    let program = SqlProgram::parse(sql, Dialect::Postgres).expect("parses");
    let claim = ClaimAsk { handler: handler(), limit: 64, worker: "test".into() };
    SqlAsk { claim, program: Arc::new(program), timeout }
}

async fn run(store: &PgStore, sql: &str, timeout: Duration) -> SqlRan {
    let ask = asked(sql, timeout);
    let program = ask.program.clone();
    let mut ran = store.run_sql(ask).await.expect("runs");
    if let Some(claim) = ran.alone.take() {
        let (job, fence) = (claim.job, claim.fence);
        let run = SqlRun { job, fence, program, timeout, current: None };
        match store.run_claimed(run).await.expect("runs") {
            Ran::Done => ran.done += 1,
            Ran::Guarded => ran.guarded += 1,
            Ran::Failed(_) => ran.failed += 1,
            Ran::Lost => {}
        }
    }
    ran
}

/// Polls until the condition holds. The pause grows with the wait: a short wait ends at once, and a long one
/// leaves the cores to the server.
async fn until<F: Future<Output = bool>>(what: &str, mut holds: impl FnMut() -> F) {
    let began = Instant::now();
    while !holds().await {
        assert!(began.elapsed() < FOREVER, "never: {what}");
        let pause = (began.elapsed() / 8).clamp(LOOK_EVERY, LOOK_AT_LEAST_EVERY);
        tokio::time::sleep(pause).await;
    }
}

/// The shortest and the longest pause between two checks of [`until`].
const LOOK_EVERY: Duration = Duration::from_millis(1);
const LOOK_AT_LEAST_EVERY: Duration = Duration::from_millis(50);
