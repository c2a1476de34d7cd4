//! A handler that commits its effects and its answer together, on a real database.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use axum::extract::State;
use axum::routing::post;
use axum::{Extension, Router};
use bytes::Bytes;
use hapax_core::Timestamp;
use hapax_layer::{
    Body, IdempotencyLayer, IdempotencyOutcome, Reserved, Settle, StoredAnswer, answered,
};
use hapax_store::{Answering as _, SqliteOptions, SqliteStore, TxError};
use http::{Response, StatusCode};
use tempfile::TempDir;
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinSet;

use crate::support::{Heard, LEASE, charge, hear, rules, soon};

const TIME: Duration = Duration::from_secs(30);

/// The way a handler ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Well,
    /// The handler dies between its commit and its answer.
    DiesAfterCommit,
    /// The handler's effects cannot be committed.
    IsRefused,
    /// The handler waits before its commit until the test lets it continue.
    StandsStill,
}

#[derive(Clone)]
struct Shop {
    store: Arc<SqliteStore>,
    fate: Fate,
    begun: Arc<Notify>,
    gate: Arc<Semaphore>,
}

/// The handler of docs/idempotency.md: it computes, and then commits effects and answer together.
async fn charges(
    State(shop): State<Shop>,
    Extension(reserved): Extension<Reserved>,
    body: Bytes,
) -> Response<Body> {
    if shop.fate == Fate::StandsStill && reserved.attempt == 1 {
        shop.begun.notify_one();
        shop.gate.acquire().await.unwrap().forget();
    }
    let attempt = reserved.attempt;
    let committed = shop.store.answering(&reserved, TIME).commit(move |db| {
        db.execute("INSERT INTO charges (body) VALUES (?1)", [&body[..]])?;
        if shop.fate == Fate::IsRefused {
            db.execute("INSERT INTO nowhere VALUES (1)", [])?;
        }
        let headers = vec![("content-type".to_owned(), "text/plain".to_owned())];
        let body = format!("charged by attempt {attempt}").into();
        Ok(StoredAnswer { status: StatusCode::CREATED, headers, body })
    });
    match committed.await {
        Ok(_) if shop.fate == Fate::DiesAfterCommit => panic!("killed before it could answer"),
        Ok(answer) => answered(answer),
        Err(error) => failed(&error),
    }
}

fn failed(error: &TxError) -> Response<Body> {
    let mut response = Response::new(Body::empty());
    match error {
        // The transaction was rolled back, and the handler did nothing outside it.
        TxError::Failed(_) => {
            *response.status_mut() = StatusCode::UNPROCESSABLE_ENTITY;
            response.extensions_mut().insert(Settle::Free);
        }
        // Another attempt has the key, or the outcome is unknown.
        TxError::FenceLost | TxError::Store(_) => {
            *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE
        }
    }
    response
}

/// The shop on the database in `directory`, and its routes.
struct Setup {
    shop: Shop,
    app: Router,
    clock: Arc<AtomicI64>,
}

impl Setup {
    fn open(directory: &Path, fate: Fate) -> Self {
        let clock = Arc::new(AtomicI64::new(1_700_000_000));
        let seconds = Arc::clone(&clock);
        let mut options = SqliteOptions::new(directory);
        let now = move || Timestamp::from_second(seconds.load(Ordering::SeqCst)).unwrap();
        options.clock = Arc::new(now);
        let store = Arc::new(SqliteStore::open(options).unwrap());
        let (begun, gate) = (Arc::new(Notify::new()), Arc::new(Semaphore::new(0)));
        let shop = Shop { store: Arc::clone(&store), fate, begun, gate };
        let app = Router::new()
            .route("/charges", post(charges))
            .layer(IdempotencyLayer::new(store, Arc::new(rules())))
            .with_state(shop.clone());
        Self { shop, app, clock }
    }

    async fn send(&self) -> Heard {
        send(self.app.clone()).await
    }
}

async fn send(app: Router) -> Heard {
    hear(app, charge("k").into_request()).await.unwrap()
}

/// A database with the user's table, which has no unique constraint.
fn database() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    let conn = rusqlite::Connection::open(directory.path().join("hapax.db")).unwrap();
    conn.execute_batch("CREATE TABLE charges (body)").unwrap();
    directory
}

fn charged(directory: &TempDir) -> i64 {
    let conn = rusqlite::Connection::open(directory.path().join("hapax.db")).unwrap();
    conn.query_row("SELECT count(*) FROM charges", [], |row| row.get(0)).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn effects_and_answer_are_one_commit_for_fifty_at_once() {
    let directory = database();
    let setup = Setup::open(directory.path(), Fate::Well);
    let mut sent = JoinSet::new();
    for _ in 0..50 {
        sent.spawn(send(setup.app.clone()));
    }
    let heard = soon(sent.join_all()).await;
    assert_eq!(
        heard.iter().filter(|one| one.outcome == Some(IdempotencyOutcome::Fresh)).count(),
        1
    );
    for one in heard.iter().filter(|one| one.status != 409) {
        assert_eq!((one.status, &one.body[..]), (201, &b"charged by attempt 1"[..]));
        assert_eq!(one.header("content-type"), Some("text/plain"));
    }
    assert!(setup.send().await.is_replay());
    assert_eq!(charged(&directory), 1);
}

// The process is killed after the effect and before its answer is known; then it starts again.
#[tokio::test]
async fn a_handler_that_dies_after_its_commit_has_answered() {
    let directory = database();
    let setup = Setup::open(directory.path(), Fate::DiesAfterCommit);
    assert_eq!(setup.send().await.status, 500);
    let replay = setup.send().await;
    assert!(replay.is_replay());
    assert_eq!((replay.status, &replay.body[..]), (201, &b"charged by attempt 1"[..]));
    setup.shop.store.close().await;
    drop(setup);

    let again = Setup::open(directory.path(), Fate::Well);
    assert_eq!(again.send().await.body, replay.body);
    assert_eq!(charged(&directory), 1);
}

#[tokio::test]
async fn effects_that_cannot_be_committed_leave_no_answer_either() {
    let directory = database();
    let setup = Setup::open(directory.path(), Fate::IsRefused);
    assert_eq!(setup.send().await.status, 422);
    assert_eq!(charged(&directory), 0);
    // The handler reported that nothing was done.
    assert_eq!(setup.send().await.outcome, Some(IdempotencyOutcome::Fresh));
    assert_eq!(charged(&directory), 0);
}

// A handler that continues after its lease would charge a second time.
#[tokio::test]
async fn a_handler_that_lost_its_lease_has_no_effect() {
    let directory = database();
    let setup = Setup::open(directory.path(), Fate::StandsStill);
    let zombie = tokio::spawn(send(setup.app.clone()));
    soon(setup.shop.begun.notified()).await;
    setup.clock.fetch_add(i64::try_from(LEASE.as_secs()).unwrap(), Ordering::SeqCst);
    assert_eq!(setup.send().await.body, "charged by attempt 2");
    setup.shop.gate.add_permits(1);
    // The caller of the late attempt gets the stored answer.
    let late = soon(zombie).await.unwrap();
    assert_eq!((late.status, &late.body[..]), (201, &b"charged by attempt 2"[..]));
    assert_eq!(charged(&directory), 1);
}
