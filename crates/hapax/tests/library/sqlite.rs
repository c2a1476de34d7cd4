//! Apps that embed Hapax: handlers in Rust, the router, and their guarantees together. The ledger
//! has no unique constraint, so a second effect is a second row.

use std::net::SocketAddr;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::support::ledger::{self, Ledger};
use crate::support::sender::{self, Request};
use crate::support::{FOREVER, Lines, Sender, until};
use axum::Router;
use axum::body::{Body, to_bytes};
use axum::response::Response;
use hapax::{
    BuildError, Committed, Event, Failure, Gaps, Handler, HandlerSetup, Hapax, NewMessage, Order,
    OrderPolicy, OrderRule, Running, Source, SqliteOptions, SqliteStore, Timestamp, Tx, handler,
    handler_fn,
};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::Semaphore;
use tower::ServiceExt as _;

const SECRET: &str = "whsec_library";
const AT_ONCE: [Duration; 3] = [Duration::ZERO; 3];
/// The transaction timeout in tests about timeouts.
const SHORT: Duration = Duration::from_secs(1);

/// An app with one source and its ledger.
struct App {
    dir: TempDir,
    hapax: Hapax,
    working: Running,
    ledger: Ledger,
}

impl App {
    /// An app with long transaction timeouts, for a busy machine.
    async fn with(setup: HandlerSetup) -> Self {
        Self::hurried(setup.transaction_timeout(FOREVER)).await
    }

    /// An app with the timeout of the setup.
    async fn hurried(setup: HandlerSetup) -> Self {
        Self::made(setup, |builder, directory| builder.data_dir(directory)).await
    }

    async fn made(
        setup: HandlerSetup,
        place: impl FnOnce(hapax::Builder, &Path) -> hapax::Builder,
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::at(&dir.path().join("hapax.db"));
        ledger.execute(ledger::SCHEMA);
        let stripe = Source::new("stripe", "stripe").secret(SECRET).handler(setup);
        let builder = place(Hapax::builder(), dir.path()).source(stripe);
        let hapax = builder.open().await.unwrap();
        let working = hapax.spawn();
        Self { dir, hapax, working, ledger }
    }

    async fn send(&self, id: &str) -> Value {
        let event = Sender::stripe(SECRET).request(sender::event(id));
        let (status, body) = ask(self.hapax.router(), &event).await;
        assert_eq!(status, 200, "{body}");
        body
    }

    #[track_caller]
    fn wait_for(&self, id: &str, status: &str) {
        let sql = format!(
            "SELECT count(*) FROM hapax_processed_events \
             WHERE event_id = '{id}' AND status = '{status}'"
        );
        until(&format!("{id} is {status}"), || (self.ledger.number(&sql) == 1).then_some(()));
    }

    /// The different errors of the failed attempts of an event.
    fn errors(&self, id: &str) -> Vec<String> {
        let sql = format!(
            "SELECT error, attempt FROM hapax_attempts \
             WHERE event_id = '{id}' AND outcome = 'failed'"
        );
        self.ledger.counts(&sql).into_keys().collect()
    }

    async fn stop(self) {
        self.working.stop().await;
        drop(self.dir);
    }
}

pub(crate) async fn ask(router: Router, request: &Request) -> (u16, Value) {
    let mut asked = http::Request::builder().method(&*request.method).uri(&request.path);
    for (name, value) in &request.headers {
        asked = asked.header(name, value);
    }
    let asked = asked.body(Body::from(request.body.clone())).unwrap();
    let answer: Response = router.oneshot(asked).await.unwrap();
    let status = answer.status().as_u16();
    let body = to_bytes(answer.into_body(), 1 << 20).await.unwrap();
    (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
}

/// Writes one row and increments the balance.
fn effect(db: &hapax::Db<'_>, event_id: &str, attempt: u32) -> Result<Option<String>, Failure> {
    db.execute("INSERT INTO ledger VALUES (?1, 'rust', ?2)", (event_id, attempt))?;
    db.execute("UPDATE account SET balance = balance + 1", [])?;
    let sum = db.query_row("SELECT balance FROM account", [], |row| row.get::<_, i64>(0))?;
    Ok(sum.map(|sum| format!("the balance is {sum}")))
}

struct Charge;

impl Handler for Charge {
    async fn handle(&self, event: Event, tx: Tx) -> Result<Committed, Failure> {
        let committed = tx.commit(move |db| effect(db, &event.event_id, event.attempt));
        Ok(committed.await?)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_copies_at_once_have_one_effect_and_its_result_is_returned() {
    let app = App::with(handler("charge", Charge)).await;
    let mut all = tokio::task::JoinSet::new();
    for _ in 0..50 {
        let router = app.hapax.router();
        all.spawn(async move {
            ask(router, &Sender::stripe(SECRET).request(sender::event("evt_1"))).await
        });
    }
    let answers = all.join_all().await;
    let accepted = answers.iter().filter(|(_, body)| body["decision"] == "accepted").count();
    assert_eq!(accepted, 1, "{answers:?}");
    app.wait_for("evt_1", "processed");
    app.ledger.is_once_each(1);
    assert_eq!(app.send("evt_1").await["result"], "the balance is 1");
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_is_a_failed_attempt_wherever_it_happens() {
    // The handler panics first outside the transaction, then inside it, on the writer, after a
    // write.
    let setup = handler_fn(|event: Event, tx: Tx| async move {
        assert!(event.attempt != 1, "outside");
        let committed = tx.commit(move |db| {
            let done = effect(db, &event.event_id, event.attempt);
            assert!(event.attempt != 2, "inside");
            done
        });
        Ok(committed.await?)
    });
    let app = App::with(handler("charge", setup).retry(AT_ONCE)).await;
    app.send("evt_1").await;
    app.wait_for("evt_1", "processed");
    app.ledger.is_once_each(1);
    assert_eq!(
        app.errors("evt_1"),
        ["the handler panicked", "the handler panicked in its transaction"]
    );
    // The writer still runs.
    assert_eq!(app.send("evt_2").await["decision"], "accepted");
    app.stop().await;
}

/// Runs `effects` in the first attempt, which must fail with `error` and leave no change. The
/// second attempt does the ordinary work.
async fn check_fails(
    effects: impl Fn(&hapax::Db<'_>) -> Result<Option<String>, Failure> + Send + Sync + 'static,
    error: &str,
) {
    check_fails_within(FOREVER, effects, error).await;
}

async fn check_fails_within(
    limit: Duration,
    effects: impl Fn(&hapax::Db<'_>) -> Result<Option<String>, Failure> + Send + Sync + 'static,
    error: &str,
) {
    let effects = Arc::new(effects);
    let setup = handler_fn(move |event: Event, tx: Tx| {
        let effects = Arc::clone(&effects);
        async move {
            let committed = tx.commit(move |db| match event.attempt {
                1 => effects(db),
                _later => effect(db, &event.event_id, event.attempt),
            });
            Ok(committed.await?)
        }
    });
    let setup = handler("charge", setup).retry(AT_ONCE).transaction_timeout(limit);
    let app = App::hurried(setup).await;
    app.ledger.execute(
        "CREATE TABLE parent (id INTEGER PRIMARY KEY);
         CREATE TABLE child (parent INTEGER REFERENCES parent DEFERRABLE INITIALLY DEFERRED);
         CREATE TABLE single (id INTEGER UNIQUE); INSERT INTO single VALUES (1);",
    );
    app.send("evt_1").await;
    app.wait_for("evt_1", "processed");
    app.ledger.is_once_each(1);
    assert_eq!(app.ledger.number("SELECT count(*) FROM hapax_message"), 0);
    assert_eq!(app.ledger.number("SELECT count(*) FROM single"), 1);
    let errors = app.errors("evt_1");
    assert!(errors.len() == 1 && errors[0].contains(error), "{errors:?} is not {error:?}");
    app.stop().await;
}

fn message(id: Option<&str>) -> NewMessage {
    let message = NewMessage::new("fee.charged", json!({ "fee": 50 }));
    NewMessage { id: id.map(str::to_owned), ..message }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_after_effects_and_a_message_rolls_all_of_it_back() {
    let effects = |db: &hapax::Db<'_>| {
        effect(db, "evt_1", 1)?;
        db.publish(&message(None))?;
        Err(Failure::new("changed my mind"))
    };
    check_fails(effects, "changed my mind").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deferred_constraint_that_fails_at_commit_is_a_failed_attempt() {
    let effects = |db: &hapax::Db<'_>| {
        db.execute("INSERT INTO child VALUES (7)", [])?;
        effect(db, "evt_1", 1)
    };
    check_fails(effects, "at commit: FOREIGN KEY constraint failed").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_runs_after_a_statement_that_ended_the_transaction() {
    // The closure ignores the error: without a check its next write would be committed at once,
    // alone.
    let effects = |db: &hapax::Db<'_>| {
        effect(db, "evt_1", 1)?;
        let _ = db.execute("INSERT OR ROLLBACK INTO single VALUES (1)", []);
        let _ = db.execute("INSERT INTO single VALUES (2)", []);
        Ok(None)
    };
    check_fails(effects, "a statement ended the transaction").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_without_an_end_is_cut_off() {
    let effects = |db: &hapax::Db<'_>| {
        effect(db, "evt_1", 1)?;
        let endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)
                       SELECT count(*) FROM n";
        db.query_row(endless, [], |_| Ok(()))?;
        Ok(None)
    };
    check_fails_within(SHORT, effects, "the transaction has used up its time").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_that_took_too_long_outside_sql_is_rolled_back() {
    let effects = |db: &hapax::Db<'_>| {
        effect(db, "evt_1", 1)?;
        let began = Instant::now();
        while began.elapsed() <= SHORT {
            std::hint::spin_loop();
        }
        Ok(None)
    };
    check_fails_within(SHORT, effects, "the transaction took longer than 1s").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_limits_of_sql_handlers_hold_in_rust_too() {
    for forbidden in [
        "COMMIT",
        "PRAGMA foreign_keys = OFF",
        "ATTACH ':memory:' AS other",
        "DROP TABLE ledger",
        "DELETE FROM hapax_job",
        "UPDATE hapax_job SET state = 2",
        "INSERT INTO hapax_message DEFAULT VALUES",
    ] {
        let effects = move |db: &hapax::Db<'_>| {
            effect(db, "evt_1", 1)?;
            db.execute(forbidden, [])?;
            Ok(None)
        };
        check_fails(effects, "not authorized").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_published_message_is_recorded_with_its_event_once() {
    // The first attempt publishes and fails; one id is used twice.
    let setup = handler_fn(|event: Event, tx: Tx| async move {
        let committed = tx.commit(move |db| {
            db.publish(&message(None))?;
            db.publish(&message(Some("msg_1")))?;
            db.publish(&message(Some("msg_1")))?;
            match event.attempt {
                1 => Err(Failure::new("not yet")),
                _later => Ok(None),
            }
        });
        Ok(committed.await?)
    });
    let app = App::with(handler("publish", setup).retry(AT_ONCE)).await;
    app.send("evt_1").await;
    app.wait_for("evt_1", "processed");
    let messages = "SELECT count(*) FROM hapax_message m JOIN hapax_event e ON e.seq = m.event_seq
                WHERE e.event_id = 'evt_1' AND m.type = 'fee.charged'";
    assert_eq!(app.ledger.number(messages), 2);
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_that_gives_up_is_a_dead_letter_at_once() {
    let setup = handler_fn(|event: Event, tx: Tx| async move {
        if event.event_type.is_some() {
            return Err(Failure::give_up("no such account"));
        }
        Ok(tx.nothing_to_do("never").await?)
    });
    let app = App::with(handler("charge", setup).retry(AT_ONCE)).await;
    app.send("evt_1").await;
    app.wait_for("evt_1", "dead");
    assert_eq!(app.errors("evt_1"), ["no such account"]);
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_never_ends_is_cut_off_and_tried_again() {
    let setup = handler_fn(|event: Event, tx: Tx| async move {
        if event.attempt == 1 {
            std::future::pending::<()>().await;
        }
        Ok(tx.nothing_to_do("at last").await?)
    });
    // More than enough attempts: on a busy machine the second one may time out as well.
    let setup = handler("slow", setup).retry([Duration::ZERO; 50]);
    let app = App::with(setup.timeout(Duration::from_millis(50))).await;
    app.send("evt_1").await;
    app.wait_for("evt_1", "processed");
    assert_eq!(app.errors("evt_1"), ["timed out after 50ms"]);
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_proof_of_one_job_is_no_proof_of_another() {
    // The proof of the first event's commit is kept and returned for the second event.
    let kept = Arc::new(Mutex::new(None::<Committed>));
    let setup = handler_fn(move |event: Event, tx: Tx| {
        let kept = Arc::clone(&kept);
        async move {
            if let Some(stolen) = kept.lock().unwrap().take() {
                drop(tx);
                return Ok(stolen);
            }
            let committed = tx.commit(move |db| effect(db, &event.event_id, event.attempt)).await?;
            *kept.lock().unwrap() = Some(committed);
            Err(Failure::new("hid the proof"))
        }
    });
    let app = App::with(handler("thief", setup).concurrency(1).retry([Duration::ZERO])).await;
    app.send("evt_1").await;
    // A committed job is done, whatever the handler returns afterwards.
    app.wait_for("evt_1", "processed");
    app.send("evt_2").await;
    app.wait_for("evt_2", "dead");
    app.ledger.is_once_each(1);
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_handler_cannot_commit_a_job_that_was_claimed_again() {
    // The clock passes the lease while the first attempt computes. When it commits, the second
    // attempt owns the job.
    let skew = Arc::new(AtomicI64::new(0));
    let clock = {
        let skew = Arc::clone(&skew);
        let ahead = move || jiff::SignedDuration::from_secs(skew.load(Ordering::Relaxed));
        Arc::new(move || Timestamp::now().checked_add(ahead()).unwrap())
    };
    let (begun, gate) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let refused = Arc::new(Mutex::new(Vec::new()));
    let setup = {
        let (begun, gate, refused) = (begun.clone(), gate.clone(), refused.clone());
        handler_fn(move |event: Event, tx: Tx| {
            let (begun, gate, refused) = (begun.clone(), gate.clone(), refused.clone());
            async move {
                if event.attempt == 1 {
                    begun.add_permits(1);
                    drop(gate.acquire().await);
                }
                let done = tx.commit(move |db| effect(db, &event.event_id, event.attempt)).await;
                if let Err(error) = &done {
                    refused.lock().unwrap().push(error.to_string());
                }
                Ok(done?)
            }
        })
    };
    let setup = handler("zombie", setup)
        .retry(AT_ONCE)
        .timeout(Duration::from_secs(300))
        .transaction_timeout(FOREVER)
        .lease(Duration::from_secs(600));
    let app = App::made(setup, |builder, directory| {
        let options = SqliteOptions { clock, ..SqliteOptions::new(directory) };
        builder.store(Arc::new(SqliteStore::open(options).unwrap()))
    })
    .await;
    app.send("evt_1").await;
    drop(begun.acquire().await.unwrap());
    skew.store(3_600, Ordering::Relaxed);
    let attempt = "SELECT attempt FROM hapax_job";
    until("it is claimed again", || (app.ledger.number(attempt) == 2).then_some(()));
    gate.add_permits(1);
    until("the late one is refused", || (!refused.lock().unwrap().is_empty()).then_some(()));
    app.wait_for("evt_1", "processed");
    assert_eq!(*refused.lock().unwrap(), ["the claim was lost: another attempt owns the work now"]);
    app.ledger.is_once_each(1);
    assert_eq!(app.ledger.number("SELECT attempt FROM ledger"), 2);
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_older_version_is_stale_for_a_rust_handler_too() {
    // The newer version is applied, then the older one arrives.
    let rule = OrderRule { policy: OrderPolicy::Latest, gaps: Gaps::default() };
    let order = Order::build("/data/object/id", "/created", rule);
    let app = App::with(handler("charge", Charge).order(order.unwrap())).await;
    for (id, created, status) in [("evt_2", 2, "processed"), ("evt_1", 1, "stale")] {
        let body = json!({
            "id": id, "object": "event", "type": "payout.paid", "created": created,
            "data": { "object": { "id": "po_1" } },
        });
        let event = Sender::stripe(SECRET).request(body.to_string());
        assert_eq!(ask(app.hapax.router(), &event).await.0, 200);
        app.wait_for(id, status);
    }
    app.ledger.is_once_each(1);
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_handlers_delay_no_ack() {
    // Every handler waits until all events are acked: an ack that waits for a handler would never
    // come.
    const EVENTS: usize = 100;
    let gate = Arc::new(Semaphore::new(0));
    let setup = {
        let gate = Arc::clone(&gate);
        handler_fn(move |event: Event, tx: Tx| {
            let gate = Arc::clone(&gate);
            async move {
                drop(gate.acquire().await);
                Ok(tx.commit(move |db| effect(db, &event.event_id, event.attempt)).await?)
            }
        })
    };
    let app = App::with(handler("slow", setup).timeout(FOREVER).concurrency(8)).await;
    let acks = async {
        for n in 0..EVENTS {
            assert_eq!(app.send(&format!("evt_{n}")).await["decision"], "accepted");
        }
    };
    tokio::time::timeout(FOREVER, acks).await.expect("an ack waited for a handler");
    assert_eq!(app.ledger.number("SELECT count(*) FROM ledger"), 0);
    gate.add_permits(1);
    let done = "SELECT balance FROM account";
    until("all is done", || (app.ledger.number(done) == EVENTS as i64).then_some(()));
    app.ledger.is_once_each(EVENTS);
    app.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_lets_running_jobs_end_and_a_later_start_runs_the_rest() {
    let begun = Arc::new(Semaphore::new(0));
    let gate = Arc::new(Semaphore::new(0));
    let setup = || {
        let (begun, gate) = (Arc::clone(&begun), Arc::clone(&gate));
        handler_fn(move |event: Event, tx: Tx| {
            let (begun, gate) = (Arc::clone(&begun), Arc::clone(&gate));
            async move {
                begun.add_permits(1);
                drop(gate.acquire().await);
                Ok(tx.commit(move |db| effect(db, &event.event_id, event.attempt)).await?)
            }
        })
    };
    let App { dir, hapax, working, ledger } =
        App::with(handler("slow", setup()).concurrency(1)).await;
    for id in ["evt_1", "evt_2"] {
        let event = Sender::stripe(SECRET).request(sender::event(id));
        assert_eq!(ask(hapax.router(), &event).await.0, 200);
    }
    drop(begun.acquire().await.unwrap());
    let stopping = tokio::spawn(working.stop());
    // The running attempt continues; no other one starts.
    gate.add_permits(1);
    stopping.await.unwrap();
    let done = ledger.effects();
    assert!(done.contains_key("evt_1"), "{done:?}");
    // The database is closed too: no event is acked that cannot be stored.
    let late = Sender::stripe(SECRET).request(sender::event("evt_3"));
    assert_eq!(ask(hapax.router(), &late).await.0, 503);
    drop(hapax);
    let stripe = Source::new("stripe", "stripe").secret(SECRET).handler(handler("slow", setup()));
    let hapax = Hapax::builder().data_dir(dir.path()).source(stripe).open().await.unwrap();
    let working = hapax.spawn();
    until("the rest is done", || (ledger.number("SELECT balance FROM account") == 2).then_some(()));
    working.stop().await;
    ledger.is_once_each(2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_router_works_at_any_path_and_verifies_the_raw_body() {
    // Square signs the whole URL; a tenant has its own path and secret.
    let dir = tempfile::tempdir().unwrap();
    let square = Source::new("square", "square").secret(SECRET).tenant("acme", "another");
    let hapax = Hapax::builder()
        .data_dir(dir.path())
        .public_url("http://hooks.example.com/")
        .source(square)
        .open()
        .await
        .unwrap();
    let app: Router = Router::new().nest("/api/v2", hapax.router());
    let body = |id: &str| json!({ "type": "payment.updated", "event_id": id }).to_string();
    let check = async |secret: &str, path: &str, expected: u16| {
        let request = Sender::new("square", secret, path).request(body("e1"));
        let (status, answer) = ask(app.clone(), &request).await;
        assert_eq!(status, expected, "{path}: {answer}");
    };
    check(SECRET, "/api/v2/webhooks/square", 200).await;
    check("another", "/api/v2/webhooks/acme/square", 200).await;
    check(SECRET, "/api/v2/webhooks/acme/square", 401).await;
    check(SECRET, "/api/v2/webhooks/stripe", 404).await;
    // The request was signed for another path.
    let elsewhere = Sender::new("square", SECRET, "/webhooks/square").request(body("e2"));
    assert_eq!(ask(app.clone(), &elsewhere.to("/api/v2/webhooks/square")).await.0, 401);
    // The body has one more byte, although the JSON has the same meaning.
    let request = Sender::new("square", SECRET, "/api/v2/webhooks/square").request(body("e3"));
    let padded = request.clone().body(body("e3") + " ");
    assert_eq!(ask(app.clone(), &padded).await.0, 401);
    let large = request.body(vec![b' '; (1 << 20) + 1]);
    assert_eq!(ask(app.clone(), &large).await.0, 413);
    hapax.store().close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mistake_is_an_error_before_anything_is_served() {
    async fn check(expected: &str, build: impl FnOnce(hapax::Builder) -> hapax::Builder) {
        let dir = tempfile::tempdir().unwrap();
        let error = build(Hapax::builder().data_dir(dir.path())).open().await.unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
    let stripe = || Source::new("stripe", "stripe").secret(SECRET);
    check("unknown provider", |builder| builder.source(Source::new("a", "strpe").secret("x")))
        .await;
    check("secrets", |builder| builder.source(Source::new("stripe", "stripe"))).await;
    check("the same secret", |builder| builder.source(stripe().tenant("acme", SECRET))).await;
    check("the same secret", |builder| {
        builder.source(stripe()).source(Source::new("test", "stripe").secret(SECRET))
    })
    .await;
    check("two sources answer", |builder| builder.source(stripe()).source(stripe())).await;
    check("have the name charge", |builder| {
        let both = stripe().handler(handler("charge", Charge)).handler(handler("charge", Charge));
        builder.source(both)
    })
    .await;
    check("there would be no attempt", |builder| {
        builder.source(stripe().handler(handler("charge", Charge).retry([])))
    })
    .await;
    check("exactly one handler", |builder| builder.source(stripe().sync(FOREVER))).await;
    let error = Hapax::builder().source(stripe()).open().await.unwrap_err();
    assert!(matches!(error, BuildError::NoStore), "{error}");
}

/// The variable with the directory of the app below. Without the variable, that "test" does
/// nothing.
const PAUSED_APP: &str = "HAPAX_TEST_PAUSED_APP";

/// This is not a test, but the process that the next test stops and continues.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[allow(clippy::print_stdout, reason = "it reports its progress to the test")]
async fn app_to_be_paused() {
    let Ok(dir) = std::env::var(PAUSED_APP) else { return };
    let attempts = Arc::new(AtomicU32::new(0));
    let go = Path::new(&dir).join("go");
    let charge = handler_fn(move |event: Event, tx: Tx| {
        let (attempts, go) = (Arc::clone(&attempts), go.clone());
        async move {
            if attempts.fetch_add(1, Ordering::Relaxed) == 0 {
                println!("attempt begun");
                while !go.exists() {
                    tokio::task::yield_now().await;
                }
            }
            Ok(tx.commit(move |db| effect(db, &event.event_id, event.attempt)).await?)
        }
    });
    // More than enough attempts: on a busy machine some time out.
    let charge = handler("charge", charge)
        .retry([Duration::ZERO; 50])
        .transaction_timeout(FOREVER)
        .timeout(Duration::from_millis(250))
        .lease(Duration::from_millis(500));
    let stripe = Source::new("stripe", "stripe").secret(SECRET).handler(charge);
    let hapax = Hapax::builder().data_dir(&dir).source(stripe).open().await.unwrap();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("app ready: {}", listener.local_addr().unwrap());
    let serve = async {
        let mut connections = tokio::task::JoinSet::new();
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let router = hapax.router();
            connections.spawn(async move {
                let service = hyper_util::service::TowerToHyperService::new(router);
                let io = hyper_util::rt::TokioIo::new(stream);
                let _ =
                    hyper::server::conn::http1::Builder::new().serve_connection(io, service).await;
            });
        }
    };
    tokio::join!(hapax.run(std::future::pending()), serve);
}

#[test]
fn an_app_stopped_past_its_lease_commits_each_effect_once_when_it_continues() {
    // The process is stopped in the middle of an attempt until timeout and lease are long over.
    // When it continues, the attempt, its timeout, the renewal and the next claim race.
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::at(&dir.path().join("hapax.db"));
    ledger.execute(ledger::SCHEMA);
    let mut app = Command::new(std::env::current_exe().unwrap())
        .args(["library::sqlite::app_to_be_paused", "--exact", "--nocapture"])
        .env(PAUSED_APP, dir.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let stdout = Lines::of(app.stdout.take().unwrap());
    let ready = stdout.wait_for("app ready: ");
    let address: SocketAddr = ready.rsplit(' ').next().unwrap().parse().unwrap();
    let signal = |name: &str| {
        let script = format!("kill -{name} {}", app.id());
        assert!(Command::new("sh").args(["-c", &script]).status().unwrap().success());
    };
    let mut wire = crate::support::Wire::connect(address);
    wire.write(Sender::stripe(SECRET).event("evt_1"));
    wire.answer().is("accepted");
    stdout.wait_for("attempt begun");
    signal("STOP");
    let stopped = Instant::now();
    std::fs::write(dir.path().join("go"), "").unwrap();
    until("the lease is over", || (stopped.elapsed() > Duration::from_millis(700)).then_some(()));
    signal("CONT");
    let done = "SELECT count(*) FROM hapax_processed_events WHERE status = 'processed'";
    until("it is done", || (ledger.number(done) == 1).then_some(()));
    ledger.is_once_each(1);
    app.kill().unwrap();
    assert_eq!(app.wait().unwrap().signal(), Some(9));
    ledger.is_once_each(1);
}
