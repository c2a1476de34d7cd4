//! SQL handlers on SQLite: effects and "done" in one transaction, whatever the statements do.
//! Ledgers here have no unique constraint, which would hide a double effect.

#[allow(dead_code)]
use std::sync::Arc;
use std::time::Duration;

use crate::harness::{DatabaseDirectory, Sender, body};
use hapax_core::SourceName;
use hapax_core::handler::{Dialect, SqlProgram};
use hapax_core::job::{HandlerName, Phase, Policy, WorkLocation};
use hapax_core::order::{Gaps, OrderPolicy, OrderRule, Position, ResourcePosition};
use hapax_core::store::{
    Claim, ClaimAsk, EventName, HandlerRef, HandlerSpec, Inspect, Lookup, NewJob, Ran, SqlAsk,
    SqlRan, SqlRun, Status, Store, TriedVerdict, Work,
};
use hapax_store::SqliteStore;
use rusqlite::Connection;

struct World {
    place: DatabaseDirectory,
    store: SqliteStore,
    program: Arc<SqlProgram>,
    timeout: Duration,
}

fn handler() -> HandlerRef {
    HandlerRef { source: SourceName::new("shop"), handler: HandlerName::new("fee") }
}

fn spec(retry: usize, order: Option<OrderPolicy>) -> HandlerSpec {
    let order = order.map(|policy| OrderRule { policy, gaps: Gaps::default() });
    let policy = Policy { retry: vec![Duration::ZERO; retry], lease: Duration::from_secs(30) };
    HandlerSpec { handler: handler(), policy, order, workplace: WorkLocation::Inside }
}

impl World {
    async fn new(sql: &str) -> Self {
        Self::with(sql, spec(3, None)).await
    }

    async fn with(sql: &str, spec: HandlerSpec) -> Self {
        let place = DatabaseDirectory::new();
        Connection::open(place.file())
            .expect("opens")
            .execute_batch(
                "CREATE TABLE ledger (event_id TEXT, amount INTEGER);
                 CREATE TABLE parent (id INTEGER PRIMARY KEY);
                 CREATE TABLE child (parent INTEGER REFERENCES parent DEFERRABLE INITIALLY DEFERRED);
                 CREATE TABLE picky (n INTEGER CHECK (n < 100));
                 CREATE TABLE once (event_id TEXT UNIQUE);",
            )
            .expect("the user's tables");
        let store = place.open();
        store.announce(vec![spec]).await.expect("announces");
        let program = Arc::new(SqlProgram::parse(sql, Dialect::Sqlite).expect("parses"));
        Self { place, store, program, timeout: crate::harness::FOREVER }
    }

    async fn accept(&self, id: &str, place: Option<ResourcePosition>) {
        let mut ingest = Sender::plain().ingest(&body(id));
        let job = NewJob { handler: handler().handler, place, hopeless: None };
        ingest.jobs = vec![vec![job]];
        self.store.ingest(ingest).await.expect("accepts");
    }

    async fn run(&self) -> SqlRan {
        let claim = ClaimAsk { handler: handler(), limit: 64, worker: "test".into() };
        let program = Arc::clone(&self.program);
        let ask = SqlAsk { claim, program, timeout: self.timeout };
        self.store.run_sql(ask).await.expect("runs")
    }

    /// Runs jobs until none is due.
    async fn drain(&self) -> SqlRan {
        let mut all = SqlRan::default();
        for _ in 0..1_000 {
            let ran = self.run().await;
            if ran.is_idle() {
                return all;
            }
            all.done += ran.done;
            all.failed += ran.failed;
            all.guarded += ran.guarded;
        }
        panic!("the work never ends: {all:?}");
    }

    fn rows(&self, sql: &str) -> Vec<String> {
        let conn = Connection::open(self.place.file()).expect("opens");
        let mut rows = conn.prepare(sql).expect("prepares");
        let rows = rows.query_map([], |row| row.get::<_, String>(0)).expect("queries");
        rows.collect::<Result<_, _>>().expect("reads")
    }

    async fn event(&self, id: &str) -> hapax_core::store::EventDetail {
        match self.store.event(&EventName::Theirs(id.into())).await.expect("reads") {
            Lookup::One(event) => event,
            other => panic!("{id}: {other:?}"),
        }
    }
}

const INSERT: &str = "INSERT INTO ledger SELECT :event_id, json_extract(:body, '$.amount') / 200;
                      SELECT 'fee ' || (json_extract(:body, '$.amount') / 200)";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_event_takes_effect_once_and_returns_its_result() {
    let world = World::new(INSERT).await;
    for n in 0..200 {
        world.accept(&format!("evt_{n:03}"), None).await;
        world.accept(&format!("evt_{n:03}"), None).await;
    }
    assert_eq!(world.drain().await, SqlRan { done: 200, ..SqlRan::default() });
    let wanted: Vec<_> = (0..200).map(|n| format!("evt_{n:03}")).collect();
    assert_eq!(world.rows("SELECT event_id FROM ledger ORDER BY 1"), wanted);
    assert_eq!(world.rows("SELECT DISTINCT CAST(amount AS TEXT) FROM ledger"), ["50"]);
    let event = world.event("evt_007").await;
    assert_eq!(event.summary.status, Status::Processed);
    assert_eq!(event.summary.result.as_deref(), Some("fee 50"));
    assert_eq!(event.jobs[0].attempts.len(), 1);
    // A copy now gets the outcome of the event.
    let again = world.store.ingest(Sender::plain().ingest(&body("evt_007"))).await;
    let again = again.expect("answers").remove(0);
    let hapax_core::store::Verdict::Duplicate(known) = again else { panic!("{again:?}") };
    assert_eq!((known.status, known.result.as_deref()), (Status::Processed, Some("fee 50")));
    world.store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_failure_of_a_job_is_told_from_the_others() {
    let world = World::new("INSERT INTO picky VALUES (100)").await;
    world.accept("evt_1", None).await;
    let mut tried = Vec::new();
    for _ in 0..4 {
        tried.extend(world.run().await.tried.iter().map(|job| (job.steps, job.verdict)));
    }
    let expected = [(0, TriedVerdict::Failed), (1, TriedVerdict::Failed), (2, TriedVerdict::Died)];
    assert_eq!(tried, expected);
    world.store.close().await;
}

/// One of 64 jobs fails in its own way. The others must take effect once, and this one not at all.
async fn one_bad_among_good(sql: &str, error: &str) {
    one_bad_among_good_within(crate::harness::FOREVER, sql, error).await;
}

async fn one_bad_among_good_within(timeout: Duration, sql: &str, error: &str) {
    let world = World { timeout, ..World::new(sql).await };
    for n in 0..64 {
        world.accept(&if n == 31 { "bad".to_owned() } else { format!("evt_{n:02}") }, None).await;
    }
    let ran = world.drain().await;
    assert_eq!((ran.done, ran.failed), (63, 3), "{sql}");
    let good = world.rows("SELECT event_id FROM ledger ORDER BY 1");
    assert_eq!(good.len(), 63, "{sql}: {good:?}");
    assert!(!good.contains(&"bad".to_owned()), "{sql}");
    let bad = world.event("bad").await;
    assert_eq!(bad.summary.status, Status::Dead, "{sql}");
    assert_eq!(bad.jobs[0].phase, Phase::Dead);
    assert_eq!(bad.jobs[0].attempts.len(), 3);
    let stored = bad.jobs[0].error.as_deref().unwrap_or_default();
    assert!(stored.contains(error), "{sql}: {stored}");
    world.store.close().await;
}

const LEDGER: &str = "INSERT INTO ledger VALUES (:event_id, 1);";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_constraint_stops_its_own_job_only() {
    let sql = format!("{LEDGER} INSERT INTO picky SELECT iif(:event_id = 'bad', 100, 1)");
    one_bad_among_good(&sql, "CHECK constraint failed").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_statement_that_ends_the_transaction_harms_no_other_job() {
    let sql =
        format!("{LEDGER} INSERT OR ROLLBACK INTO picky SELECT iif(:event_id = 'bad', 100, 1)");
    one_bad_among_good(&sql, "CHECK constraint failed").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_constraint_that_fails_only_at_commit_is_a_failure_of_that_job() {
    let world =
        World::new(&format!("{LEDGER} INSERT INTO child SELECT 77 WHERE :event_id = 'bad'")).await;
    world.store_pragma_foreign_keys().await;
    for n in 0..8 {
        world.accept(&if n == 3 { "bad".to_owned() } else { format!("evt_{n}") }, None).await;
    }
    let ran = world.drain().await;
    assert_eq!((ran.done, ran.failed), (7, 3));
    assert_eq!(world.rows("SELECT event_id FROM ledger").len(), 7);
    let stored = world.event("bad").await.jobs[0].error.clone().unwrap_or_default();
    assert!(stored.contains("at commit"), "{stored}");
    world.store.close().await;
}

impl World {
    /// Foreign keys are checked only if the user's schema has them; the writer's connection enables
    /// them, as users expect of a constraint they wrote.
    async fn store_pragma_foreign_keys(&self) {
        let on = self.rows("SELECT 'on' FROM pragma_foreign_keys LIMIT 1");
        assert_eq!(on, ["on"]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_statement_is_cut_off() {
    let sql = format!(
        "{LEDGER} WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n \
         WHERE x < iif(:event_id = 'bad', 1000000000, 1)) SELECT count(*) FROM n"
    );
    // The timeout is long enough for the good jobs, and short, because jobs before the bad one wait
    // for it repeatedly.
    one_bad_among_good_within(Duration::from_millis(200), &sql, "timed out").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_table_and_our_own_tables_are_clear_failures() {
    for (sql, error) in [
        ("INSERT INTO nowhere VALUES (1)", "statement 1 (line 1): no such table"),
        // Two statements on one line: the line number alone would be ambiguous.
        ("SELECT 1; INSERT INTO nowhere VALUES (1)", "statement 2 (line 1): no such table"),
        ("SELECT 1;\n\nINSERT INTO nowhere VALUES (1)", "statement 2 (line 3): no such table"),
        ("UPDATE hapax_body SET body = x''", "not authorized"),
        ("DELETE FROM hapax_job", "not authorized"),
        ("UPDATE hapax_reservation SET fence = 0", "not authorized"),
        ("DELETE FROM hapax_reservation", "not authorized"),
        // A stored answer is for its client, not for handlers.
        ("SELECT body FROM hapax_reservation", "prohibited"),
        ("SELECT count(*) FROM HAPAX_RESERVATION", "not authorized"),
        (
            "INSERT INTO hapax_message (tenant, id, type, created_at) VALUES ('a', 'b', 'c', 1)",
            "not authorized",
        ),
    ] {
        let world = World::with(sql, spec(1, None)).await;
        world.accept("evt_1", None).await;
        assert_eq!(world.drain().await.failed, 1, "{sql}");
        let stored = world.event("evt_1").await.jobs[0].error.clone().unwrap_or_default();
        assert!(stored.contains(error) && stored.contains("line "), "{sql}: {stored}");
        world.store.close().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn published_messages_are_recorded_with_the_effects_or_not_at_all() {
    let world = World::new(&format!(
        "{LEDGER} INSERT INTO hapax_publish (type, data, id)
         VALUES ('fee.charged', json_object('of', :event_id), 'msg_' || :event_id);
         INSERT INTO picky SELECT iif(:event_id = 'bad', 100, 1)"
    ))
    .await;
    for id in ["evt_1", "bad", "evt_2"] {
        world.accept(id, None).await;
    }
    world.drain().await;
    assert_eq!(world.rows("SELECT id FROM hapax_message ORDER BY id"), ["msg_evt_1", "msg_evt_2"]);
    let messages = world.event("evt_2").await.messages;
    assert_eq!(messages.len(), 1);
    assert_eq!(messages[0].id, "msg_evt_2");
    world.store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_names_no_tenant_is_of_its_events_and_nonsense_is_refused() {
    // Two tenants publish under the same id: the first must not use up the other's. Messages that
    // cannot be delivered are refused.
    let world = World::new(
        "INSERT INTO hapax_publish (type, data, id) VALUES ('fee', '{}', 'm1');
         INSERT INTO hapax_publish (type, data, id, tenant) VALUES ('fee', '{}', 'm2', 'named');
         INSERT INTO hapax_publish (type, data) VALUES ('fee', '{}')",
    )
    .await;
    let job = NewJob { handler: handler().handler, place: None, hopeless: None };
    for tenant in ["acme", "beta", "default"] {
        let mut ingest = Sender::of(tenant, "shop").ingest(&body(&format!("evt_{tenant}")));
        ingest.jobs = vec![vec![job.clone()]];
        world.store.ingest(ingest).await.expect("accepts");
    }
    assert_eq!(world.drain().await.done, 3);
    let named =
        "SELECT tenant || ' ' || id FROM hapax_message WHERE id NOT GLOB 'msg_*' ORDER BY 1";
    assert_eq!(world.rows(named), ["acme m1", "beta m1", "default m1", "named m2"]);
    let made = "SELECT tenant FROM hapax_message WHERE id GLOB 'msg_*' ORDER BY 1";
    assert_eq!(world.rows(made), ["acme", "beta", "default"]);
    assert_eq!(world.event("evt_beta").await.messages.len(), 2, "the second of one id is none");
    world.store.close().await;
    for (values, error) in [
        ("NULL, '{}'", "type and data must not be null"),
        ("'', '{}'", "type and id must not be empty"),
        ("'fee', NULL", "type and data must not be null"),
        ("printf('%256s', 'x'), '{}'", "at most 255 bytes of type, key, tenant and id"),
        ("'fee', json_quote(printf('%1048575s', ''))", "at most 1 MiB of data"),
        ("'fee', '{'", "data is not JSON"),
    ] {
        let sql = format!("INSERT INTO hapax_publish (type, data) VALUES ({values})");
        let world = World::with(&sql, spec(1, None)).await;
        world.accept("evt_1", None).await;
        assert_eq!(world.drain().await.failed, 1, "{values}");
        let stored = world.event("evt_1").await.jobs[0].error.clone().unwrap_or_default();
        assert!(stored.contains(error), "{values}: {stored}");
        assert_eq!(world.rows("SELECT id FROM hapax_message"), [""; 0], "{values}");
        world.store.close().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_older_version_never_overwrites_a_newer_one() {
    // Shuffled versions of many resources: each must end in its newest state.
    let world = World::with(
        "INSERT INTO ledger VALUES (:resource, CAST(substr(:event_id, -2) AS INTEGER))",
        spec(3, Some(OrderPolicy::Latest)),
    )
    .await;
    let mut versions: Vec<(u32, i64)> =
        (0..50).flat_map(|resource| (0..10).map(move |version| (resource, version))).collect();
    // A fixed shuffle: 7 and 500 have no common factor.
    let count = versions.len();
    versions = (0..count).map(|n| versions[n * 7 % count]).collect();
    for (resource, version) in versions {
        let place = ResourcePosition {
            resource: format!("r{resource}").into(),
            position: Position(version),
        };
        world.accept(&format!("e{resource}_{version:02}"), Some(place)).await;
        if resource % 5 == 0 {
            world.run().await;
        }
    }
    world.drain().await;
    let last = world.rows(
        "SELECT CAST(amount AS TEXT) FROM ledger l
         WHERE rowid = (SELECT max(rowid) FROM ledger WHERE event_id = l.event_id)",
    );
    assert_eq!(last.len(), 50);
    assert!(last.iter().all(|version| version == "9"), "{last:?}");
    world.store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_statements_do_not_hold_the_writer_for_a_whole_slice() {
    // Each job takes a good part of its timeout: sixty-four of them in one go would keep every ack
    // waiting for seconds.
    let slow = "INSERT INTO ledger SELECT :event_id, count(*) FROM (
                    WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 20000)
                    SELECT i FROM n)";
    let mut world = World::new(slow).await;
    world.timeout = Duration::from_secs(5);
    for n in 0..40 {
        world.accept(&format!("evt_{n}"), None).await;
    }
    let ran = world.run().await;
    assert!((1..40).contains(&ran.done), "{ran:?}");
    let waiting = world.event("evt_39").await.jobs.remove(0);
    assert_eq!(
        (waiting.phase, waiting.progress.attempt),
        (Phase::Ready, 0),
        "not begun: uncounted"
    );
    assert_eq!(ran.done + world.drain().await.done, 40);
    let doubles = "SELECT event_id FROM ledger GROUP BY event_id HAVING count(*) > 1";
    assert_eq!(world.rows(doubles), [""; 0]);
    assert_eq!(world.rows("SELECT CAST(count(*) AS TEXT) FROM ledger"), ["40"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_statement_with_the_text_of_a_hapax_statement_is_limited_too() {
    // Statements are cached by their text. A statement that the store itself has just used was
    // compiled without the limits: the same text in a handler must not use that one.
    let publish = "INSERT INTO hapax_publish (type, data) VALUES ('payout.seen', '{}')";
    let mut world = World::new(publish).await;
    world.accept("evt_1", None).await;
    assert_eq!(world.run().await.done, 1);
    // To publish, the store has used exactly this text.
    let theft = SqlProgram::parse("DELETE FROM hapax_staged", Dialect::Sqlite).expect("parses");
    world.program = Arc::new(theft);
    world.accept("evt_2", None).await;
    let ran = world.run().await;
    assert_eq!((ran.done, ran.failed), (0, 1), "{ran:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claimed_job_has_the_current_object_and_its_effects_commit_with_done() {
    // The event contains 10000, and the current object another value. A job without refetch has no
    // object.
    let world = World::new(
        "INSERT INTO ledger VALUES (:event_id, :current ->> '$.amount');
         SELECT coalesce(:current, 'none')",
    )
    .await;
    for (id, current, result) in
        [("evt_1", Some(r#"{"amount":7}"#), r#"{"amount":7}"#), ("evt_2", None, "none")]
    {
        world.accept(id, None).await;
        let ask = ClaimAsk { handler: handler(), limit: 64, worker: "test".into() };
        let claim = world.store.claim(ask).await.expect("claims").remove(0);
        let run = SqlRun {
            job: claim.job,
            fence: claim.fence,
            program: Arc::clone(&world.program),
            timeout: world.timeout,
            current: current.map(Arc::from),
        };
        assert_eq!(world.store.run_claimed(run.clone()).await.expect("runs"), Ran::Done);
        // The answer was lost and the request is repeated: nothing runs twice.
        assert_eq!(world.store.run_claimed(run).await.expect("runs"), Ran::Done);
        assert_eq!(world.event(id).await.summary.result.as_deref(), Some(result));
    }
    let amounts = world.rows("SELECT event_id || ' ' || coalesce(amount, '-') FROM ledger");
    assert_eq!(amounts, ["evt_1 7", "evt_2 -"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_statement_costs_those_before_it_its_timeout_only_once() {
    // The last job of a batch is slow. If each of the others were given back for lack of time,
    // every round would end one job and block the writer for the whole timeout.
    const SLOW: &str = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n
                            WHERE :event_id = 'evt_slow') SELECT max(i) FROM n;
                        INSERT INTO ledger SELECT :event_id, 1";
    let mut world = World::with(SLOW, spec(1, None)).await;
    world.timeout = Duration::from_secs(1);
    for n in 0..20 {
        world.accept(&format!("evt_{n:02}"), None).await;
    }
    world.accept("evt_slow", None).await;
    // The slow job is found in the first round, and is in no batch after that.
    let first = world.run().await;
    assert_eq!(first.failed, 1, "{first:?}");
    assert_eq!(world.event("evt_slow").await.jobs[0].phase, Phase::Dead);
    assert_eq!(first.done + world.drain().await.done, 20);
    assert_eq!(world.rows("SELECT event_id FROM ledger").len(), 20);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claimed_job_that_fails_is_an_attempt_and_leaves_nothing_behind() {
    // The second statement breaks a rule after the first one wrote.
    let world =
        World::new("INSERT INTO ledger VALUES (:event_id, 1); INSERT INTO picky VALUES (:current)")
            .await;
    world.accept("evt_1", None).await;
    let ask = ClaimAsk { handler: handler(), limit: 64, worker: "test".into() };
    let claim = world.store.claim(ask.clone()).await.expect("claims").remove(0);
    let run = |claim: &Claim, current: &str| SqlRun {
        job: claim.job,
        fence: claim.fence,
        program: Arc::clone(&world.program),
        timeout: world.timeout,
        current: Some(current.into()),
    };
    let failed = world.store.run_claimed(run(&claim, "100")).await.expect("runs");
    assert!(matches!(&failed, Ran::Failed(error) if error.contains("CHECK")), "{failed:?}");
    let job = world.event("evt_1").await.jobs.remove(0);
    assert_eq!((job.phase, job.progress.steps, job.attempts.len()), (Phase::Ready, 1, 1));
    assert!(job.error.is_some_and(|error| error.contains("CHECK")));
    assert!(world.rows("SELECT event_id FROM ledger").is_empty());
    // The fence of this claim is used up, and that of the next claim is not.
    assert_eq!(world.store.run_claimed(run(&claim, "1")).await.expect("runs"), Ran::Lost);
    let next = world.store.claim(ask).await.expect("claims").remove(0);
    assert_eq!(world.store.run_claimed(run(&claim, "1")).await.expect("runs"), Ran::Lost);
    assert_eq!(world.store.run_claimed(run(&next, "99")).await.expect("runs"), Ran::Done);
    assert_eq!(world.rows("SELECT event_id FROM ledger"), ["evt_1"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_under_a_used_id_is_one_message_or_fails_its_attempt_alone() {
    // Events of one batch publish under an id that is used, one of them with other content. The job
    // with other content must undo its own effects and nothing else. Another attempt publishes and
    // fails. Its retry publishes the same id, and must not count as a copy of the message that was
    // rolled back.
    let world = World::with(
        &format!(
            "{LEDGER} INSERT INTO hapax_publish (type, data, id)
             VALUES ('fee', iif(:event_id = 'other', '[2]', '[1]'), 'm1');
             INSERT INTO hapax_publish (type, data, id)
             SELECT 'again', '{{}}', 'm2' WHERE :event_id = 'retried';
             INSERT INTO picky SELECT iif(:event_id = 'retried' AND :attempt = 1, 100, 1)"
        ),
        spec(2, None),
    )
    .await;
    world.accept("first", None).await;
    assert_eq!(world.drain().await.done, 1);
    for id in ["other", "copy", "retried"] {
        world.accept(id, None).await;
    }
    let ran = world.drain().await;
    assert_eq!((ran.done, ran.failed), (2, 3), "{ran:?}");
    assert_eq!(
        world.rows("SELECT event_id FROM ledger ORDER BY event_id"),
        ["copy", "first", "retried"]
    );
    assert_eq!(world.rows("SELECT id FROM hapax_message ORDER BY id"), ["m1", "m2"]);
    assert_eq!(world.event("first").await.messages.len(), 1);
    let stored = world.event("other").await.jobs[0].error.clone().unwrap_or_default();
    assert!(stored.contains("m1 was used before, for other content"), "{stored}");
    world.store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_that_no_endpoint_may_get_are_refused_where_they_are_published() {
    for (values, error) in [
        ("'fee', '{}', NULL, 'a.b'", "at most 128 characters of A-Z"),
        ("'fee', '{}', NULL, printf('%0129d', 0)", "at most 128 characters of A-Z"),
        ("'fee', '{}', 'hapax', NULL", "reserved"),
        ("'hapax.alert.raised', '{}', NULL, NULL", "reserved"),
        ("'fee', x'7b7d', NULL, NULL", "data"),
        ("'fee' || char(10), '{}', NULL, NULL", "control character"),
    ] {
        let sql = format!("INSERT INTO hapax_publish (type, data, tenant, id) VALUES ({values})");
        let world = World::with(&sql, spec(1, None)).await;
        world.accept("evt_1", None).await;
        assert_eq!(world.drain().await.failed, 1, "{values}");
        let stored = world.event("evt_1").await.jobs[0].error.clone().unwrap_or_default();
        assert!(stored.contains("hapax_publish") && stored.contains(error), "{values}: {stored}");
        assert_eq!(world.rows("SELECT id FROM hapax_message"), [""; 0], "{values}");
        world.store.close().await;
    }
}
