//! Handlers in Rust on PostgreSQL: an open transaction whose commit records "done", whatever the
//! code in it does or fails to do. Ledgers here have no unique constraint, which would hide a
//! double effect.

use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use hapax_core::job::Retry;
use hapax_core::order::{Gaps, OrderPolicy, OrderRule};
use hapax_core::store::{Claim, NewJob, NewMessage, Outcome, Store, StoreError, Work};
use hapax_sim::{Postgres, READY_FOR_QUERY, TcpProxy, Trap};
use hapax_store::{Failure, PgDb, PgDbError, PgStore, PgTx, Transact, TxError};
use serde_json::json;
use tokio_postgres::error::SqlState;

use crate::harness::{Sender, body, noon};
use crate::{Base, FOREVER, LOOK_EVERY, claim, connect, handler, ordered, spec, until};

const TIME: Duration = Duration::from_secs(30);
const ROW: &str = "INSERT INTO ledger VALUES ($1, 'rust')";
const ROWS: &str = "SELECT count(*) || ' ' || count(DISTINCT event_id) FROM ledger";

impl Base {
    /// The only job, claimed, and its right.
    async fn right(&self) -> (Claim, PgTx) {
        let claim = self.claim(1).await.pop().expect("something is due");
        let tx = self.store.right(&claim, TIME);
        (claim, tx)
    }

    /// A transaction of the only job, with a row in the ledger.
    async fn begun(&self) -> (Claim, PgDb) {
        let (claim, tx) = self.right().await;
        (claim.clone(), begun(tx, &claim).await)
    }
}

async fn begun(tx: PgTx, claim: &Claim) -> PgDb {
    let mut db = tx.begin().await.expect("begins");
    db.execute(ROW, &[&&*claim.event.key.event_id]).await.expect("inserts");
    db
}

fn failed(error: TxError) -> Failure {
    match error {
        TxError::Failed(failure) => failure,
        other => panic!("not failed: {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn effects_done_and_messages_are_one_commit_once_per_fence() {
    // The same right is used a second time: nothing of the second use may stay.
    let base = Base::new("rust_once", spec(1)).await;
    base.accept("evt_1", None).await;
    let (claim, tx) = base.right().await;
    for (n, tx) in [tx, base.store.right(&claim, TIME)].into_iter().enumerate() {
        let mut db = match tx.begin().await {
            Ok(db) => db,
            Err(error) => {
                assert!(n == 1 && matches!(error, TxError::FenceLost), "{error:?}");
                continue;
            }
        };
        assert_eq!(db.execute(ROW, &[&"evt_1"]).await.expect("inserts"), 1);
        for id in ["msg_1", "msg_1", "msg_2"] {
            let data = json!({ "fee": 50, "note": "a\0b" });
            let message = NewMessage::new("fee.charged", data).with_key("acct").with_id(id);
            db.publish(&message).await.expect("publishes");
        }
        let rows = db.query("SELECT note FROM ledger", &[]).await.expect("reads");
        assert_eq!(rows.len(), 1, "it sees its own effects");
        assert_eq!(base.one(ROWS).await, "0 0", "and other sessions do not");
        let committed = db.commit(Some("ß".repeat(500))).await.expect("commits");
        assert!(committed.is_of(&claim));
    }
    assert_eq!(base.one(ROWS).await, "1 1");
    let query = "SELECT state || ' ' || length(result) FROM hapax.job";
    assert_eq!(base.one(query).await, "2 200");
    let query = "SELECT count(*) || ' ' || count(e.id) || ' ' || min(m.tenant)
                FROM hapax.message m LEFT JOIN hapax.event e ON e.id = m.event";
    assert_eq!(base.one(query).await, "2 2 default");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_names_no_tenant_is_of_its_events() {
    // Two tenants publish under the same id: the first must not use up the other's.
    let base = Base::new("rust_tenants", spec(1)).await;
    for tenant in ["acme", "beta"] {
        let job = NewJob { handler: handler().handler, place: None, hopeless: None };
        let ingest = Sender::of(tenant, "shop").ingest_for(&body("evt_1"), noon(), noon(), &[job]);
        base.store.ingest(ingest).await.expect("accepts");
        let (_, mut db) = base.begun().await;
        for named in [None, Some("named".to_owned())] {
            let (r#type, data, id) = ("fee".to_owned(), json!({}), Some("msg_1".to_owned()));
            let message = NewMessage { tenant: named, id, ..NewMessage::new(r#type, data) };
            db.publish(&message).await.expect("publishes");
        }
        db.commit(None).await.expect("commits");
    }
    let query = "SELECT string_agg(m.tenant || '=' || e.tenant, ',' ORDER BY m.tenant)
                FROM hapax.message m JOIN hapax.event e ON e.id = m.event";
    assert_eq!(base.one(query).await, "acme=acme,beta=beta,named=acme");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_was_begun_continues_when_its_caller_is_gone() {
    // The attempt times out in the middle of the commit: the commit must still take full effect.
    let base = Base::new("rust_unawaited", spec(1)).await;
    base.accept("evt_1", None).await;
    let (claim, db) = base.begun().await;
    let mut commit = Box::pin(db.commit(None));
    let is_done = poll_fn(|cx| Poll::Ready(commit.as_mut().poll(cx).is_ready())).await;
    assert!(!is_done, "a commit asks the server");
    drop(commit);
    // The failure that the timeout reports waits for the commit, or the commit replaces it.
    let outcome = Outcome::Failed { error: "timed out".into(), retry: Retry::Never, answer: None };
    base.store.settle(claim.job, claim.fence, outcome).await.expect("settles");
    let state = "SELECT state::text FROM hapax.job";
    until("it is done", || async { base.one(state).await == "2" }).await;
    assert_eq!(base.one(ROWS).await, "1 1");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_begins_or_commits_on_a_store_that_is_closed() {
    // A node that is shutting down has reported that its work has ended.
    let base = Base::new("rust_closed", spec(1)).await;
    base.accept("evt_1", None).await;
    let (claim, db) = base.begun().await;
    base.store.close().await;
    let closed = |error: &TxError| matches!(error, TxError::Store(StoreError::Closed));
    let ended = db.commit(None).await.expect_err("closed");
    assert!(closed(&ended), "{ended:?}");
    let ended = base.store.right(&claim, TIME).begin().await.expect_err("closed");
    assert!(closed(&ended), "{ended:?}");
    assert_eq!(base.one(ROWS).await, "0 0");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_commits_of_one_fence_at_once_are_one() {
    // Both have begun and written before either commits.
    let base = Base::new("rust_twins", spec(1)).await;
    base.accept("evt_1", None).await;
    let (claim, tx) = base.right().await;
    let one = begun(tx, &claim).await;
    let other = begun(base.store.right(&claim, TIME), &claim).await;
    let (one, other) = tokio::join!(one.commit(None), other.commit(None));
    assert!(one.is_ok() != other.is_ok(), "{one:?} {other:?}");
    assert_eq!(base.one(ROWS).await, "1 1");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_transaction_is_rolled_back_and_its_connection_is_reused() {
    // More transactions are dropped than there are connections: by the handler's end, by a panic in
    // it, and while a statement runs.
    let base = Base::new("rust_dropped", spec(1)).await;
    base.accept("evt_1", None).await;
    let (claim, tx) = base.right().await;
    drop(tx);
    for n in 0..18 {
        let mut db = begun(base.store.right(&claim, TIME), &claim).await;
        match n % 3 {
            0 => drop(db),
            1 => {
                let panicked = tokio::spawn(async move {
                    db.execute(ROW, &[&"evt_1"]).await.expect("inserts");
                    panic!("in the middle");
                });
                assert!(panicked.await.is_err());
            }
            _slow => {
                let cut = tokio::time::timeout(Duration::from_millis(20), async move {
                    db.execute("SELECT pg_sleep(20)", &[]).await
                });
                assert!(cut.await.is_err());
            }
        }
    }
    assert_eq!(base.one(ROWS).await, "0 0");
    let db = begun(base.store.right(&claim, TIME), &claim).await;
    db.commit(None).await.expect("commits");
    assert_eq!(base.one(ROWS).await, "1 1");
}

/// Runs `spoil` in a transaction with an effect, ignores its errors, and commits: that must be
/// refused with `expected`, and leave nothing behind.
async fn check_void<F: Future<Output = PgDb>>(
    base: &Base,
    expected: &str,
    spoil: impl FnOnce(PgDb) -> F,
) {
    base.accept("evt_1", None).await;
    let (claim, db) = base.begun().await;
    let mut db = spoil(db).await;
    // This error is ignored too.
    let _ = db.execute(ROW, &[&"evt_2"]).await;
    let failure = failed(db.commit(Some("fine".into())).await.expect_err("is void"));
    assert!(failure.error().contains(expected), "{failure}");
    assert_eq!(failure.retry(), Some(Retry::Schedule));
    assert_eq!(base.one(ROWS).await, "0 0");
    assert_eq!(base.one("SELECT string_agg(state::text, ',') FROM hapax.job").await, "1");
    let outcome =
        Outcome::Failed { error: failure.error().into(), retry: Retry::Never, answer: None };
    base.store.settle(claim.job, claim.fence, outcome).await.expect("settles");
    base.sql.batch_execute("DELETE FROM hapax.job; DELETE FROM hapax.event").await.expect("clean");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ignored_error_voids_the_transaction() {
    // PostgreSQL answers COMMIT in an aborted transaction with success, and rolls back.
    let base = Base::new("rust_swallowed", spec(1)).await;
    base.sql.batch_execute("CREATE TABLE single (id int UNIQUE)").await.expect("a table");
    base.sql.batch_execute("INSERT INTO single VALUES (1)").await.expect("a row");
    check_void(&base, "an earlier statement failed: duplicate key", async |mut db| {
        let error = db.execute("INSERT INTO single VALUES (1)", &[]).await.expect_err("refused");
        assert_eq!(error.code(), Some(&SqlState::UNIQUE_VIOLATION));
        db
    })
    .await;
    check_void(&base, "relation \"nowhere\" does not exist (42P01)", async |mut db| {
        let _ = db.query("SELECT * FROM nowhere", &[]).await;
        db
    })
    .await;
    check_void(&base, "error serializing parameter 0", async |mut db| {
        let error = db.execute(ROW, &[&1i64]).await.expect_err("a number is no text");
        assert!(matches!(error, PgDbError::Statement(_)), "{error:?}");
        db
    })
    .await;
    check_void(&base, "expected 1 parameters but got 0", async |mut db| {
        let _ = db.execute(ROW, &[]).await;
        db
    })
    .await;
    check_void(&base, "it was broken off", async |mut db| {
        let slow = db.execute("SELECT pg_sleep(20)", &[]);
        assert!(tokio::time::timeout(Duration::from_millis(20), slow).await.is_err());
        db
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_statement_ends_the_transaction_or_touches_the_session() {
    // Each statement would commit the effects before "done", or leave something behind for the
    // connection's next user.
    let base = Base::new("rust_tricks", spec(1)).await;
    base.sql
        .batch_execute("CREATE PROCEDURE sneaky() LANGUAGE plpgsql AS $$ BEGIN COMMIT; END $$")
        .await
        .expect("a procedure");
    for (trick, expected) in [
        ("COMMIT", "cannot begin with COMMIT"),
        (" /* (SELECT 1) */ -- x\n commit and chain", "cannot begin with COMMIT"),
        ("END", "cannot begin with END"),
        ("ROLLBACK", "cannot begin with ROLLBACK"),
        ("ABORT", "cannot begin with ABORT"),
        ("SAVEPOINT a", "cannot begin with SAVEPOINT"),
        ("PREPARE TRANSACTION 'a'", "cannot begin with PREPARE"),
        ("SET search_path = x", "cannot begin with SET"),
        ("CREATE TABLE t ()", "cannot begin with CREATE"),
        ("", "there is no statement"),
        (";COMMIT", "cannot begin with ;"),
        ("SELECT 1; COMMIT", "cannot insert multiple commands"),
        ("CALL sneaky()", "invalid transaction termination"),
        ("DO $$ BEGIN COMMIT; END $$", "invalid transaction termination"),
        ("DO $$ BEGIN EXECUTE 'ROLLBACK'; END $$", "EXECUTE of transaction commands"),
    ] {
        check_void(&base, expected, async |mut db| {
            let error = db.execute(trick, &[]).await.expect_err(trick).to_string();
            assert!(error.contains(expected), "{trick}: {error}");
            db
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_colon_in_a_statement_is_the_databases_own() {
    // The parser of SQL handlers would read these as parameters.
    let base = Base::new("rust_colon", spec(1)).await;
    base.accept("evt_1", None).await;
    let (_, mut db) = base.begun().await;
    let row = db
        .query_row("SELECT '{1,2,3}'::int[] AS a, (ARRAY[7, 8, 9])[2:$1::int] -- :nothing", &[&3])
        .await
        .expect("runs")
        .expect("a row");
    assert_eq!(row.get::<_, Vec<i32>>(1), [8, 9]);
    db.commit(None).await.expect("commits");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deferred_constraint_is_a_failure_and_leaves_nothing() {
    // The error comes at the commit, when "done" would already be written.
    let base = Base::new("rust_deferred", spec(1)).await;
    base.deferred_tables().await;
    base.accept("evt_1", None).await;
    let (_, mut db) = base.begun().await;
    db.execute("INSERT INTO child VALUES (7)", &[]).await.expect("not checked yet");
    let failure = failed(db.commit(None).await.expect_err("the parent is missing"));
    let error = failure.error();
    assert!(error.starts_with("at commit: ") && error.ends_with("(23503)"), "{error}");
    assert_eq!(base.one(ROWS).await, "0 0");
    assert_eq!(base.one("SELECT state::text FROM hapax.job").await, "1");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changes_of_the_session_are_undone() {
    // One connection, so that the next transaction uses the changed one.
    let mut base = Base::new("rust_session", spec(1)).await;
    base.store = narrow(&base.url).await;
    base.accept("evt_1", None).await;
    let (claim, mut db) = base.begun().await;
    for dirt in [
        "SELECT set_config('search_path', 'nowhere', false)",
        "SELECT set_config('statement_timeout', '1h', false)",
        "SELECT pg_advisory_lock(42)",
        "DO $$ BEGIN EXECUTE 'CREATE TEMP TABLE left_behind (n int)'; \
         EXECUTE 'LISTEN gossip'; END $$",
    ] {
        db.query(dirt, &[]).await.expect(dirt);
    }
    let pid = "SELECT pg_backend_pid()";
    let before: i32 = db.query_row(pid, &[]).await.expect("asks").expect("a row").get(0);
    db.commit(None).await.expect("commits");
    base.accept("evt_2", None).await;
    let (_, mut db) = base.begun().await;
    let after: i32 = db.query_row(pid, &[]).await.expect("asks").expect("a row").get(0);
    assert_eq!(before, after, "the same connection");
    let look = "SELECT concat_ws('|', to_regclass('pg_temp.left_behind'),
                    (SELECT count(*) FROM pg_listening_channels()),
                    (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 42),
                    current_setting('search_path'), current_setting('statement_timeout'))";
    let found: String = db.query_row(look, &[]).await.expect("looks").expect("a row").get(0);
    assert_eq!(found, "0|0|public|30s");
    drop((claim, db));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rust_handler_cannot_reach_a_table_of_hapax() {
    // The handler names the tables directly, and in ways that show only at run time.
    let base = Base::new("rust_own_tables", spec(3)).await;
    let wipe = "CREATE FUNCTION wipe() RETURNS void LANGUAGE plpgsql AS
                $$ BEGIN DELETE FROM hapax.event; END $$";
    base.sql.batch_execute(wipe).await.expect("a function");
    base.accept("evt_1", None).await;
    for (nth, sql) in
        ["DELETE FROM hapax.event", "SELECT wipe()", "UPDATE \"hapax\" . job SET state = $1"]
            .into_iter()
            .enumerate()
    {
        let (claim, mut db) = base.begun().await;
        db.execute("INSERT INTO ledger VALUES ('x', '')", &[]).await.expect("writes");
        let refused = db.execute(sql, &[]).await.expect_err(sql).to_string();
        let expected = if nth == 1 { "(42501)" } else { "belongs to Hapax" };
        assert!(refused.contains(expected), "{sql}: {refused}");
        db.commit(None).await.expect_err("nothing of it");
        base.store.give_back(vec![(claim.job, claim.fence)]).await.expect("gives back");
    }
    assert_eq!(base.one("SELECT count(*)::text FROM hapax.event").await, "1");
    assert_eq!(base.one("SELECT count(*)::text FROM ledger").await, "0");
}

async fn narrow(url: &str) -> Arc<PgStore> {
    let mut options = hapax_store::PgOptions::new(url);
    options.pools.handlers = 1;
    let store = PgStore::open(options).await.expect("opens");
    store.announce(vec![spec(3)]).await.expect("announces");
    Arc::new(store)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_without_a_free_connection_waits_for_one() {
    // One connection and many handlers: none of them may fail because of it.
    let mut base = Base::new("rust_queue", spec(1)).await;
    base.store = narrow(&base.url).await;
    base.accept_many(24).await;
    let mut tasks = tokio::task::JoinSet::new();
    for claim in base.claim(24).await {
        let tx = base.store.right(&claim, TIME);
        tasks.spawn(async move { begun(tx, &claim).await.commit(None).await.map(drop) });
    }
    for ended in tasks.join_all().await {
        ended.expect("commits");
    }
    assert_eq!(base.one(ROWS).await, "24 24");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_timeout_is_a_failure_wherever_the_time_was_spent() {
    // A transaction that took longer than its timeout must not be committed because the clock was
    // not checked.
    let base = Base::new("rust_slow", spec(1)).await;
    base.accept("evt_1", None).await;
    let (claim, _) = base.right().await;
    // The timeout is long enough to begin and to write a row on a busy machine.
    let short = Duration::from_secs(2);
    // The time ends inside a statement: the server cuts it off.
    let mut db = begun(base.store.right(&claim, short), &claim).await;
    let error = db.execute("SELECT pg_sleep(30)", &[]).await.expect_err("too slow");
    assert!(matches!(error, PgDbError::TimedOut(_)), "{error:?}");
    drop(db);
    // The time ends between two statements: the timeout is noticed only at the commit.
    let mut db = begun(base.store.right(&claim, short), &claim).await;
    let began = Instant::now();
    while began.elapsed() < 2 * short {
        tokio::task::yield_now().await;
    }
    let error = db.execute(ROW, &[&"evt_1"]).await.expect_err("too late");
    assert!(matches!(error, PgDbError::TimedOut(_)), "{error:?}");
    let failure = failed(db.commit(None).await.expect_err("too late"));
    assert!(failure.error().contains("took longer than 2s"), "{failure}");
    assert_eq!(base.one(ROWS).await, "0 0");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abandoned_transaction_releases_its_locks() {
    // The transaction stays open, as if its node had stopped: the server itself must release the
    // rows.
    let base = Base::new("rust_stopped", spec(1)).await;
    base.sql.batch_execute("CREATE TABLE account (balance int)").await.expect("a table");
    base.sql.batch_execute("INSERT INTO account VALUES (0)").await.expect("a row");
    base.accept("evt_1", None).await;
    let (claim, _) = base.right().await;
    let mut db = begun(base.store.right(&claim, Duration::from_secs(2)), &claim).await;
    let step = "UPDATE account SET balance = balance + 1";
    db.execute(step, &[]).await.expect("updates");
    let theirs = connect(&base.url).await;
    let update = tokio::time::timeout(FOREVER, theirs.execute(step, &[]));
    update.await.expect("is let in").expect("updates");
    assert!(matches!(db.commit(None).await, Err(TxError::Failed(_))));
    assert_eq!(base.one("SELECT balance::text FROM account").await, "1");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_transaction_cannot_commit_a_job_that_was_claimed_again() {
    // The lease of a handler ends after it has written its effects. Another node claims the job, and commits
    // before it or after it.
    for the_late_one_is_first in [false, true] {
        let base = Base::new("rust_late", spec(3)).await;
        let other = Base::node(&base.url, spec(3)).await;
        base.accept("evt_1", None).await;
        let (_, late) = base.begun().await;
        if the_late_one_is_first {
            // The job has not been claimed again: its handler was only slow.
            base.one("UPDATE hapax.job SET state = 0 RETURNING ''").await;
            late.commit(None).await.expect("the fence is still its own");
            assert!(claim(&other, 1).await.is_empty(), "done is done");
        } else {
            base.one("UPDATE hapax.job SET due_at = now() - interval '1 h' RETURNING ''").await;
            let again = claimed(&other).await;
            assert_eq!(again.attempt, 2);
            let db = begun(other.right(&again, TIME), &again).await;
            let ended = late.commit(None).await;
            assert!(matches!(ended, Err(TxError::FenceLost)), "{ended:?}");
            db.commit(None).await.expect("commits");
        }
        assert_eq!(base.one(ROWS).await, "1 1");
    }
}

/// The only job, as soon as it can be claimed.
async fn claimed(store: &PgStore) -> Claim {
    let began = Instant::now();
    loop {
        if let Some(claim) = claim(store, 1).await.pop() {
            return claim;
        }
        assert!(began.elapsed() < FOREVER, "never claimed");
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_that_the_mark_has_passed_is_not_done_by_a_late_transaction() {
    // While its transaction is open, a newer event of the resource is applied.
    let rule = OrderRule { policy: OrderPolicy::Latest, gaps: Gaps::default() };
    let base = Base::new("rust_mark", ordered(rule)).await;
    base.accept("evt_1", Some(("po_1", 1))).await;
    let (_, db) = base.begun().await;
    base.one("UPDATE hapax.mark SET position = 2 RETURNING ''").await;
    let ended = db.commit(None).await;
    assert!(matches!(ended, Err(TxError::FenceLost)), "{ended:?}");
    assert_eq!(base.one(ROWS).await, "0 0");
    assert_eq!(base.one("SELECT position::text FROM hapax.mark").await, "2");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_mark_moves_with_the_commit_and_not_before() {
    // A mark that moved without its effects would make the next attempt stale, and lose the event.
    let rule = OrderRule { policy: OrderPolicy::Latest, gaps: Gaps::default() };
    let base = Base::new("rust_moves", ordered(rule)).await;
    base.accept("evt_2", Some(("po_1", 2))).await;
    let mark = "SELECT coalesce(position::text, 'none') FROM hapax.mark";
    let (claim, db) = base.begun().await;
    drop(db);
    assert_eq!(base.one(mark).await, "none");
    begun(base.store.right(&claim, TIME), &claim).await.commit(None).await.expect("commits");
    assert_eq!(base.one(mark).await, "2");
    base.accept("evt_1", Some(("po_1", 1))).await;
    assert!(base.claim(1).await.is_empty(), "an older version");
    assert_eq!(
        base.one("SELECT string_agg(state::text, ',' ORDER BY state) FROM hapax.job").await,
        "2,3"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attempt_whose_connection_dies_is_lost_and_not_failed() {
    // The server process of a transaction is killed between two statements, and the handler ignores
    // the error.
    let base = Base::new("rust_killed", spec(3)).await;
    base.accept("evt_1", None).await;
    let (_, mut db) = base.begun().await;
    let kill = "SELECT count(pg_terminate_backend(pid))::text FROM pg_stat_activity
                WHERE datname = current_database() AND application_name = 'hapax-handlers'";
    assert_ne!(base.one(kill).await, "0");
    let error = db.execute(ROW, &[&"evt_1"]).await.expect_err("it is dead");
    assert_eq!(Failure::from(error).retry(), None);
    let ended = db.commit(None).await.expect_err("it is dead");
    assert_eq!(Failure::from(ended).retry(), None);
    assert_eq!(base.one(ROWS).await, "0 0");
    assert_eq!(base.one("SELECT state || ' ' || steps FROM hapax.job").await, "1 0");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_whose_answer_is_lost_is_decided_by_the_fence() {
    // The connection is cut as COMMIT is sent. In one case COMMIT arrives and only its answer is
    // lost; in the other case it does not arrive. Neither case may be reported as the other, and
    // the next attempt must not double the effects.
    let mut base = Base::new("rust_cut", spec(3)).await;
    let proxy = TcpProxy::to_port(Postgres::shared().await.port()).await;
    base.store = Base::node(&proxy.through(&base.url), spec(3)).await;
    let commit = b"COMMIT\0".to_vec();
    base.accept("evt_1", None).await;
    let (claim, db) = base.begun().await;
    proxy.arm(Trap::Answer { request: commit.clone(), answer: READY_FOR_QUERY.to_vec() });
    let committed = db.commit(None).await.expect("it was committed, and the fence shows it");
    assert!(committed.is_of(&claim));
    proxy.wait_sprung(1).await;
    assert_eq!(base.one(ROWS).await, "1 1");

    base.accept("evt_2", None).await;
    let (claim, db) = base.begun().await;
    proxy.arm(Trap::Request(commit));
    let ended = db.commit(None).await.expect_err("it never arrived");
    assert!(matches!(ended, TxError::Store(_)), "{ended:?}");
    proxy.wait_sprung(2).await;
    assert_eq!(base.one(ROWS).await, "1 1");
    begun(base.store.right(&claim, TIME), &claim).await.commit(None).await.expect("commits");
    assert_eq!(base.one(ROWS).await, "2 2");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn every_event_takes_effect_once_on_whichever_node() {
    // Two nodes work at once; some attempts are dropped with their effects written, or commit when
    // another node has the job.
    const EVENTS: usize = 400;
    let base = Base::new("rust_nodes", spec(50)).await;
    base.accept_many(EVENTS).await;
    let other = Base::node(&base.url, spec(50)).await;
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..6usize {
        let store = Arc::clone(if n % 2 == 0 { &base.store } else { &other });
        let sql = connect(&base.url).await;
        tasks.spawn(async move {
            let open = "SELECT count(*) FROM hapax.job WHERE state <> 2";
            let began = Instant::now();
            for turn in n.. {
                assert!(began.elapsed() < FOREVER, "it never ends");
                for claim in claim(&store, 4).await {
                    let db = begun(store.right(&claim, TIME), &claim).await;
                    let late = claim.event.key.event_id.ends_with("50") && claim.attempt == 1;
                    if late {
                        // Another node claims the job, and this node continues anyway.
                        let end = "UPDATE hapax.job SET due_at = now() WHERE job = $1";
                        sql.execute(end, &[&claim.job.0]).await.expect("ends");
                        let taken = "SELECT fence > $2 FROM hapax.job WHERE job = $1";
                        while !sql
                            .query_one(taken, &[&claim.job.0, &claim.fence.0])
                            .await
                            .expect("looks")
                            .get::<_, bool>(0)
                        {
                            assert!(began.elapsed() < FOREVER, "another worker must claim it");
                            tokio::time::sleep(LOOK_EVERY).await;
                        }
                    }
                    match turn % 7 {
                        0 => drop(db),
                        _other => match db.commit(None).await {
                            Ok(_) => continue,
                            Err(TxError::FenceLost) => {}
                            Err(error) => panic!("{error:?}"),
                        },
                    }
                    let (error, retry) = ("dropped".to_owned(), Retry::In(Duration::ZERO));
                    let outcome = Outcome::Failed { error, retry, answer: None };
                    store.settle(claim.job, claim.fence, outcome).await.expect("settles");
                }
                if sql.query_one(open, &[]).await.expect("counts").get::<_, i64>(0) == 0 {
                    return;
                }
            }
        });
    }
    tasks.join_all().await;
    assert_eq!(base.one(ROWS).await, format!("{EVENTS} {EVENTS}"));
}
