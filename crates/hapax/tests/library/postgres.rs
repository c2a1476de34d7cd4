//! Apps that embed Hapax and share one PostgreSQL: handlers in Rust with an open transaction, in
//! this process and in nodes that are killed, stopped and restarted. The ledger has no unique
//! constraint, so a second effect is a second row.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::support::load::Load;
use crate::support::nodes::{Database, wait};
use crate::support::process::{POINTS_OF_RUST, Process, dies_at};
use crate::support::{FOREVER, Sender, Wire, sender, until};
use axum::Router;
use hapax::{
    Committed, Event, Failure, Gaps, Handler, HandlerSetup, Hapax, NewMessage, Order, OrderPolicy,
    OrderRule, PgDb, PgStore, PgTx, Running, Source, TxError, handler, handler_fn,
};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::Barrier;
use tokio::task::JoinHandle;

const SECRET: &str = "whsec_library";
const AT_ONCE: [Duration; 4] = [Duration::ZERO; 4];
/// More attempts than any event needs: on a busy machine some of them time out.
const PATIENTLY: [Duration; 50] = [Duration::from_millis(50); 50];

/// An app in this process, on a database that others may share.
struct App {
    database: Database,
    hapax: Hapax<PgStore>,
    working: Running,
    serving: JoinHandle<()>,
    address: SocketAddr,
}

impl App {
    fn with(label: &str, setup: HandlerSetup<PgStore>) -> Self {
        Self::on(Database::shared(label), setup)
    }

    fn on(database: Database, setup: HandlerSetup<PgStore>) -> Self {
        wait(async {
            let stripe = Source::new("stripe", "stripe").secret(SECRET).handler(setup);
            let builder = Hapax::builder().database_url(&database.url).source(stripe);
            let hapax = builder.open().await.unwrap();
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let router: Router = Router::new().nest("/api", hapax.router());
            let serving = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
            Self { working: hapax.spawn(), hapax, database, serving, address }
        })
    }

    fn send(&self, id: &str) -> Value {
        self.send_body(sender::event(id))
    }

    fn send_body(&self, body: impl AsRef<[u8]>) -> Value {
        let request = Sender::stripe(SECRET).request(body).to("/api/webhooks/stripe");
        let mut wire = Wire::connect(self.address);
        wire.write(request.bytes());
        let answer = wire.answer();
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()
    }

    #[track_caller]
    fn wait_for(&self, id: &str, status: &str) {
        wait_for(&self.database, id, status);
    }

    /// The errors of the failed attempts of an event, in their order.
    fn errors(&self, id: &str) -> Vec<String> {
        let sql = format!(
            "SELECT error FROM hapax.attempts WHERE event_id = '{id}' AND outcome = 'failed' \
             ORDER BY attempt"
        );
        self.database.execute(&sql).into_iter().flatten().collect()
    }

    fn stop(self) -> Database {
        self.serving.abort();
        wait(self.working.stop());
        drop(self.hapax);
        self.database
    }
}

#[track_caller]
fn wait_for(database: &Database, id: &str, status: &str) {
    let sql = format!(
        "SELECT count(*) FROM hapax.processed_events \
         WHERE event_id = '{id}' AND status = '{status}'"
    );
    until(&format!("{id} is {status}"), || (database.number(&sql) == 1).then_some(()));
}

/// Writes one row and increments the balance.
async fn effect(db: &mut PgDb, event: &Event) -> Result<String, Failure> {
    let attempt = i32::try_from(event.attempt)?;
    db.execute("INSERT INTO ledger VALUES ($1, 'rust', $2)", &[&&*event.event_id, &attempt])
        .await?;
    let step = "UPDATE account SET balance = balance + 1 RETURNING balance";
    let row = db.query_row(step, &[]).await?.ok_or(Failure::new("no account"))?;
    Ok(format!("the balance is {}", row.get::<_, i64>(0)))
}

struct Charge;

impl Handler<PgStore> for Charge {
    async fn handle(&self, event: Event, tx: PgTx) -> Result<Committed, Failure> {
        let mut db = tx.begin().await?;
        let result = effect(&mut db, &event).await?;
        Ok(db.commit(Some(result)).await?)
    }
}

#[test]
fn fifty_copies_at_once_on_two_nodes_have_one_effect_and_its_result_is_returned() {
    // Half of the copies go to each node.
    let one = App::with("rust_copies", handler("charge", Charge));
    let database = Database { url: one.database.url.clone() };
    let other = App::on(database, handler("charge", Charge));
    let accepted: usize = std::thread::scope(|scope| {
        let send = |n: usize| {
            let node = if n.is_multiple_of(2) { &one } else { &other };
            move || usize::from(node.send("evt_1")["decision"] == "accepted")
        };
        let sending: Vec<_> = (0..50).map(|n| scope.spawn(send(n))).collect();
        sending.into_iter().map(|one| one.join().unwrap()).sum()
    });
    assert_eq!(accepted, 1);
    one.wait_for("evt_1", "processed");
    for node in [&one, &other] {
        assert_eq!(node.send("evt_1")["result"], "the balance is 1");
    }
    one.database.is_once_each(1);
    other.stop();
    one.stop();
}

#[test]
fn a_panic_is_a_failed_attempt_wherever_it_happens() {
    // The handler panics first outside the transaction, then inside it, after a write.
    let setup = handler_fn(|event: Event, tx: PgTx| async move {
        assert!(event.attempt != 1, "outside");
        let mut db = tx.begin().await?;
        let result = effect(&mut db, &event).await?;
        assert!(event.attempt != 2, "inside");
        Ok(db.commit(Some(result)).await?)
    });
    let app = App::with("rust_panic", handler("charge", setup).retry(AT_ONCE));
    app.send("evt_1");
    app.wait_for("evt_1", "processed");
    app.database.is_once_each(1);
    assert_eq!(app.errors("evt_1"), ["the handler panicked", "the handler panicked"]);
    app.stop();
}

#[test]
fn every_way_to_fail_rolls_back_and_is_tried_again() {
    // The attempts end with an error after effects and a message, with an SQL error that is
    // ignored, with a constraint that is deferred to the commit, and finally with the ordinary
    // work.
    let setup = handler_fn(|event: Event, tx: PgTx| async move {
        let mut db = tx.begin().await?;
        let result = effect(&mut db, &event).await?;
        db.publish(&NewMessage::new("fee.charged", json!({ "fee": 50 }))).await?;
        match event.attempt {
            1 => return Err(Failure::new("changed my mind")),
            2 => drop(db.execute("INSERT INTO nowhere VALUES (1)", &[]).await),
            3 => drop(db.execute("INSERT INTO child VALUES (7)", &[]).await),
            _last => {}
        }
        Ok(db.commit(Some(result)).await?)
    });
    let database = Database::shared("rust_fails");
    database.execute("CREATE TABLE parent (id int PRIMARY KEY)");
    database
        .execute("CREATE TABLE child (parent int REFERENCES parent DEFERRABLE INITIALLY DEFERRED)");
    let app = App::on(database, handler("charge", setup).retry(AT_ONCE));
    app.send("evt_1");
    app.wait_for("evt_1", "processed");
    app.database.is_once_each(1);
    assert_eq!(app.database.number("SELECT balance FROM account"), 1);
    assert_eq!(app.database.number("SELECT count(*) FROM hapax.message"), 1);
    assert_eq!(app.database.number("SELECT count(*) FROM child"), 0);
    let errors = app.errors("evt_1");
    let expected = ["changed my mind", "relation \"nowhere\" does not exist", "at commit: "];
    assert_eq!(errors.len(), expected.len(), "{errors:?}");
    for (error, expected) in errors.iter().zip(expected) {
        assert!(error.contains(expected), "{error:?} is not {expected:?}");
    }
    app.stop();
}

#[test]
fn a_handler_that_hangs_with_its_transaction_open_is_cut_off_and_blocks_no_other_attempt() {
    // The handler has locked the row that the next attempt needs.
    let setup = handler_fn(|event: Event, tx: PgTx| async move {
        let mut db = tx.begin().await?;
        let result = effect(&mut db, &event).await?;
        if event.attempt == 1 {
            std::future::pending::<()>().await;
        }
        Ok(db.commit(Some(result)).await?)
    });
    let setup = handler("slow", setup).retry(PATIENTLY).timeout(Duration::from_millis(500));
    let app = App::with("rust_hangs", setup);
    app.send("evt_1");
    app.wait_for("evt_1", "processed");
    app.database.is_once_each(1);
    assert_eq!(app.errors("evt_1")[0], "timed out after 500ms");
    app.stop();
}

#[test]
fn a_transaction_that_lost_a_deadlock_runs_again_within_its_attempt() {
    // Two handlers lock two rows in opposite order, and each waits until the other has one.
    let (meeting, calls) = (Arc::new(Barrier::new(2)), Arc::new(AtomicUsize::new(0)));
    let called = Arc::clone(&calls);
    let setup = handler_fn(move |event: Event, tx: PgTx| {
        let (meeting, nth) = (Arc::clone(&meeting), called.fetch_add(1, Ordering::Relaxed));
        async move {
            let mut db = tx.begin().await?;
            let [first, second] = if &*event.event_id == "evt_1" { [1, 2] } else { [2, 1] };
            let step = "UPDATE pair SET n = n + 1 WHERE id = $1";
            db.execute(step, &[&first]).await?;
            if nth < 2 {
                meeting.wait().await;
            }
            db.execute(step, &[&second]).await?;
            db.execute("INSERT INTO ledger VALUES ($1, 'rust', 1)", &[&&*event.event_id]).await?;
            Ok(db.commit(None).await?)
        }
    });
    let database = Database::shared("rust_deadlock");
    database.execute("CREATE TABLE pair (id int, n int)");
    database.execute("INSERT INTO pair VALUES (1, 0), (2, 0)");
    let setup = handler("charge", setup).retry([Duration::ZERO]).timeout(FOREVER);
    let app = App::on(database, setup);
    app.send("evt_1");
    app.send("evt_2");
    app.wait_for("evt_1", "processed");
    app.wait_for("evt_2", "processed");
    app.database.is_once_each(2);
    assert_eq!(app.database.number("SELECT min(n) * 10 + max(n) FROM pair"), 22);
    assert_eq!(calls.load(Ordering::Relaxed), 3, "one of them lost");
    assert_eq!(app.database.number("SELECT max(attempt) FROM hapax.job"), 1);
    app.stop();
}

#[test]
fn an_older_version_is_stale_for_a_rust_handler_too() {
    // The newer version is applied, then the older one arrives.
    let rule = OrderRule { policy: OrderPolicy::Latest, gaps: Gaps::default() };
    let order = Order::build("/data/object/id", "/created", rule);
    let app = App::with("rust_order", handler("charge", Charge).order(order.unwrap()));
    for (id, created, status) in [("evt_2", 2, "processed"), ("evt_1", 1, "stale")] {
        let body = json!({
            "id": id, "object": "event", "type": "payout.paid", "created": created,
            "data": { "object": { "id": "po_1" } },
        });
        app.send_body(body.to_string());
        app.wait_for(id, status);
    }
    app.database.is_once_each(1);
    app.stop();
}

#[test]
fn a_shutdown_lets_running_jobs_end_and_a_later_start_runs_the_rest() {
    // Many jobs wait for few handlers at the shutdown.
    const EVENTS: usize = 60;
    let app = App::with("rust_stop", handler("charge", Charge).concurrency(2));
    for n in 0..EVENTS {
        app.send(&format!("evt_{n}"));
    }
    let database = app.stop();
    let begun = database.number("SELECT count(*) FROM hapax.job WHERE state = 1");
    assert_eq!(begun, 0, "what was begun has ended");
    let app = App::on(database, handler("charge", Charge));
    let done = "SELECT balance FROM account";
    until("the rest is done", || (app.database.number(done) == EVENTS as i64).then_some(()));
    app.stop().is_once_each(EVENTS);
}

/// The variable with the URL of the database for the node below. Without the variable, that "test"
/// does nothing.
const NODE: &str = "HAPAX_TEST_NODE";
/// The variable with the path of a file that the first attempt waits for, with its transaction
/// open.
const WAITS_FOR: &str = "HAPAX_TEST_WAITS_FOR";

/// This is not a test, but the process that the other tests kill and stop.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[allow(clippy::print_stdout, reason = "it reports its progress to the test")]
async fn node_of_an_app() {
    let Ok(url) = std::env::var(NODE) else { return };
    let waits_for = std::env::var(WAITS_FOR).map(PathBuf::from).ok();
    let charge = handler_fn(move |event: Event, tx: PgTx| {
        let go = waits_for.clone().filter(|_| event.attempt == 1);
        async move {
            let mut db = tx.begin().await?;
            let attempt = i32::try_from(event.attempt)?;
            let row = "INSERT INTO ledger VALUES ($1, 'rust', $2)";
            db.execute(row, &[&&*event.event_id, &attempt]).await?;
            if let Some(go) = go {
                println!("transaction open");
                while !go.exists() {
                    tokio::task::yield_now().await;
                }
            }
            let ended = db.commit(None).await;
            if let Err(TxError::FenceLost) = &ended {
                println!("refused");
            }
            Ok(ended?)
        }
    });
    let (timeout, lease) = match std::env::var_os(WAITS_FOR) {
        // The test decides when the lease is over.
        Some(_) => (FOREVER, 2 * FOREVER),
        None => (Duration::from_millis(500), Duration::from_secs(1)),
    };
    let charge = handler("charge", charge).retry(PATIENTLY).timeout(timeout).lease(lease);
    let stripe = Source::new("stripe", "stripe").secret(SECRET).handler(charge);
    let hapax = Hapax::builder().database_url(url).source(stripe).open().await.unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("app ready: {}", listener.local_addr().unwrap());
    let router: Router = hapax.router();
    let serve = async { axum::serve(listener, router).await.unwrap() };
    tokio::join!(hapax.run(std::future::pending()), serve);
}

/// A node in a process of its own.
fn node(database: &Database, env: &[(&str, &str)]) -> Process {
    Process::start(
        Command::new(std::env::current_exe().unwrap())
            .args(["library::postgres::node_of_an_app", "--exact", "--nocapture"])
            .env(NODE, &database.url)
            .envs(env.iter().copied()),
    )
}

/// Waits until this many events are processed, and checks that each had its effect once.
#[track_caller]
fn all_once(database: &Database, events: usize) {
    let done = "SELECT count(*) FROM hapax.processed_events WHERE status = 'processed'";
    until("all events are processed", || (database.number(done) >= events as i64).then_some(()));
    database.is_once_each(events);
    assert_eq!(database.number("SELECT count(*) FROM hapax.dead_letters"), 0);
}

#[test]
fn a_death_at_each_step_of_the_handler_neither_loses_nor_doubles_an_effect() {
    // A node aborts at the named moment; another one takes over its jobs.
    const EVENTS: usize = 12;
    let dir = TempDir::new().unwrap();
    let hit_file = dir.path().join("hits");
    let database = Database::shared("rust_dies");
    let mut events = 0;
    for (turn, point) in POINTS_OF_RUST.into_iter().enumerate() {
        let at = 1 + turn % 3;
        let mut load = Load::events(2, &Sender::stripe(SECRET), events..events + EVENTS);
        events += EVENTS;
        dies_at(point, at, &hit_file, &mut load, |env| node(&database, env));
        let next = node(&database, &[]);
        load.send_all(next.address);
        all_once(&database, events);
        drop(next);
    }
}

#[test]
fn a_node_killed_beside_another_neither_loses_nor_doubles_an_effect() {
    // A node is killed with SIGKILL, repeatedly, while both work on the same jobs; the other node
    // continues.
    const EVENTS: usize = 150;
    const BLOWS: usize = 3;
    let database = Database::shared("rust_killed");
    let stays = node(&database, &[]);
    for blow in 0..BLOWS {
        let (from, to) = (blow * EVENTS, (blow + 1) * EVENTS);
        let mut load = Load::events(6, &Sender::stripe(SECRET), from..to);
        let dies = node(&database, &[]);
        load.send(dies.address, |acked| {
            let due = EVENTS / 4 + blow * EVENTS / 5;
            until("some are acked", || (acked.load(Ordering::Relaxed) >= due).then_some(()));
            drop(dies);
        });
        load.send_all(stays.address);
    }
    all_once(&database, BLOWS * EVENTS);
}

#[test]
fn a_node_stopped_past_its_lease_cannot_commit_a_job_that_another_has_done() {
    // A node gets a SIGSTOP with the effect written and the transaction open. The other node does
    // the job. Then the first node continues, and its commit is refused.
    let dir = TempDir::new().unwrap();
    let go = dir.path().join("go");
    let waits_for = (WAITS_FOR, go.to_str().unwrap());
    let database = Database::shared("rust_zombie");
    let zombie = node(&database, &[waits_for]);
    let mut wire = Wire::connect(zombie.address);
    wire.write(Sender::stripe(SECRET).event("evt_1"));
    wire.answer().is("accepted");
    zombie.stdout.wait_for("transaction open");
    zombie.signal("STOP");
    database.execute("UPDATE hapax.job SET due_at = now() - interval '1 minute'");
    let other = node(&database, &[]);
    wait_for(&database, "evt_1", "processed");
    let attempt = database.number("SELECT attempt FROM ledger");
    assert!(attempt > 1, "the first one is stopped");
    std::fs::write(&go, "").unwrap();
    zombie.signal("CONT");
    zombie.stdout.wait_for("refused");
    drop(zombie);
    drop(other);
    all_once(&database, 1);
    assert_eq!(database.number("SELECT attempt FROM ledger"), attempt);
}
