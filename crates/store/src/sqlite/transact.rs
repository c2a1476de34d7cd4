//! Runs a Rust handler's closure over the user's tables on the writer, in the transaction that
//! records its outcome, if the fence still holds. The outcome is "done" for the claim of a job, and
//! the answer for the reservation of an Idempotency-Key.
//!
//! The writer does nothing else while the closure runs, so closures must be short. The limits of
//! SQL handlers apply ([`super::sandbox`]), and a closure that takes too long is rolled back.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use hapax_core::failpoint;
use hapax_core::ledger::{Reserved, StoredAnswer};
use hapax_core::lifecycle::Overtaken;
use hapax_core::store::{Claim, Held, NewMessage};
use hapax_core::{Tenant, Timestamp};
use rusqlite::{CachedStatement, Connection, Params, Row};

use super::SqliteStore;
use super::jobs::{JobRow, Lanes, row_and_lane};
use super::key_usage::KeyUsage;
use super::ledger::{self, AnswerRow};
use super::outbox::{DEFAULT_TENANT, For};
use super::row::{DISCARDED, DONE, STALE};
use super::sandbox::{Sandbox, SandboxGuard};
use super::sql_handlers::{is_the_users, is_the_users_at_commit};
use super::transaction::Transaction;
use super::writer::Writer;
use crate::transact::{Answering, Committed, Failure, JobRight, KeyRight, Transact, TxError, fits};

/// The right to commit the effects of one claim, or of one reservation, once. No transaction is
/// open yet: compute and call other services first, then commit the result.
///
/// A handler that drops this right has failed. If the right of a reservation is dropped, the key
/// stays in progress until its lease ends, unless it is finished or abandoned before.
#[must_use = "without a commit the attempt has failed"]
pub struct Tx<R = JobRight> {
    store: Arc<SqliteStore>,
    right: R,
    timeout: Duration,
}

impl Tx {
    /// Runs `effects` in a transaction on the database's one writer. The same transaction records
    /// "done" with the short result that they return (at most 200 characters are kept), and the
    /// messages that they publish. The whole transaction is on disk when this returns `Ok`, and no part of it
    /// when this returns `Err`.
    ///
    /// The effects run only if the claim still holds. An error, a panic, or more time than the
    /// handler's transactions may take roll everything back. Acks wait while they run: no network,
    /// no sleep, nothing but SQL and arithmetic.
    ///
    /// Dropping the future does not stop a commit that has begun.
    pub async fn commit(
        self,
        effects: impl FnOnce(&Db<'_>) -> Result<Option<String>, Failure> + Send + 'static,
    ) -> Result<Committed, TxError> {
        run_on_writer(self, effects).await
    }

    /// Records "done" for an event that needs no effect.
    pub async fn nothing_to_do(self, result: impl Into<String>) -> Result<Committed, TxError> {
        let result = result.into();
        self.commit(move |_| Ok(Some(result))).await
    }
}

impl Tx<KeyRight> {
    /// Runs `effects` as [`Tx::commit`] does for a job, and keeps the answer that they return in the same
    /// transaction. Effects and answer are on disk when this returns `Ok` with the answer, and neither is on
    /// disk when this returns `Err`.
    ///
    /// The effects run only if the key is still reserved under this right and has no answer.
    pub async fn commit(
        self,
        effects: impl FnOnce(&Db<'_>) -> Result<StoredAnswer, Failure> + Send + 'static,
    ) -> Result<StoredAnswer, TxError> {
        run_on_writer(self, effects).await
    }
}

impl<R: fmt::Debug> fmt::Debug for Tx<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Tx").field(&self.right).field(&self.timeout).finish()
    }
}

impl Transact for SqliteStore {
    type Tx = Tx;

    fn right(self: &Arc<Self>, claim: &Claim, timeout: Duration) -> Tx {
        Tx { store: Arc::clone(self), right: JobRight::of(claim), timeout }
    }
}

impl Answering for SqliteStore {
    type Tx = Tx<KeyRight>;

    fn answering(self: &Arc<Self>, reserved: &Reserved, timeout: Duration) -> Tx<KeyRight> {
        Tx { store: Arc::clone(self), right: KeyRight(reserved.clone()), timeout }
    }
}

/// The event that messages are published for, if there is one, and the tenant of messages that name
/// no tenant.
struct PublishedFor {
    tenant: Tenant,
    event: Option<i64>,
}

impl PublishedFor {
    fn as_for(&self) -> For<'_> {
        For { tenant: &self.tenant, event: self.event }
    }
}

/// A right to commit, and the outcome that its commit records.
trait CommitRight: Send + 'static {
    /// The value that the effects return.
    type Recorded;
    /// The value that the commit returns.
    type Proof: Send + 'static;
    /// The job or reservation, as found in the database.
    type Found;

    /// The job or reservation, and the tenant and event that its messages are recorded with; `None`
    /// if the fence is lost.
    fn find(
        &self,
        conn: &Connection,
        lanes: &mut Lanes,
        now: Timestamp,
    ) -> rusqlite::Result<Option<(Self::Found, PublishedFor)>>;

    /// Records the outcome; the inner error rolls everything back.
    fn record(
        &self,
        conn: &Connection,
        lanes: &mut Lanes,
        found: &Self::Found,
        said: Self::Recorded,
        now: Timestamp,
    ) -> rusqlite::Result<Result<Self::Proof, TxError>>;
}

impl CommitRight for JobRight {
    type Recorded = Option<String>;
    type Proof = Committed;
    type Found = JobRow;

    fn find(
        &self,
        conn: &Connection,
        lanes: &mut Lanes,
        now: Timestamp,
    ) -> rusqlite::Result<Option<(JobRow, PublishedFor)>> {
        let (seq, lane) = row_and_lane(self.job);
        // At most once per fence: a second "done" is refused, and its effects are rolled back.
        let open = |row: &JobRow| {
            row.is_under(self.fence) && !matches!(row.state, DONE | STALE | DISCARDED)
        };
        let Some(row) = JobRow::find(conn, seq, lane)?.filter(open) else { return Ok(None) };
        let (overtaken, _mark) = lanes.overtaken(conn, &row)?;
        if overtaken != Overtaken::No {
            // A newer version was applied: the rules record that this job is stale.
            let _lost = lanes.done(conn, &row, None, None, now)?;
            return Ok(None);
        }
        let of = PublishedFor { tenant: lanes.tenant_of(lane), event: Some(seq) };
        Ok(Some((row, of)))
    }

    fn record(
        &self,
        conn: &Connection,
        lanes: &mut Lanes,
        row: &JobRow,
        result: Option<String>,
        now: Timestamp,
    ) -> rusqlite::Result<Result<Committed, TxError>> {
        let done = lanes.done(conn, row, result.as_deref(), None, now)?;
        assert!(done.is_ok(), "the writer has just seen this fence hold");
        Ok(Ok(Committed::new(self.job, self.fence)))
    }
}

impl CommitRight for KeyRight {
    type Recorded = StoredAnswer;
    type Proof = StoredAnswer;
    type Found = ();

    fn find(
        &self,
        conn: &Connection,
        _lanes: &mut Lanes,
        _now: Timestamp,
    ) -> rusqlite::Result<Option<((), PublishedFor)>> {
        let of = PublishedFor { tenant: Tenant::new(DEFAULT_TENANT), event: None };
        Ok(ledger::is_open(conn, &self.0)?.then_some(((), of)))
    }

    fn record(
        &self,
        conn: &Connection,
        _lanes: &mut Lanes,
        (): &(),
        answer: StoredAnswer,
        now: Timestamp,
    ) -> rusqlite::Result<Result<StoredAnswer, TxError>> {
        if let Err(too_large) = fits(&answer) {
            return Ok(Err(TxError::Failed(too_large)));
        }
        let mut usage = KeyUsage::default();
        let row = AnswerRow::of(&answer);
        Ok(match ledger::finish(conn, &mut usage, &self.0, &row, now)? {
            Held::Kept => {
                usage.write(conn)?;
                Ok(answer)
            }
            Held::Lost => Err(TxError::FenceLost),
        })
    }
}

/// The user's tables, inside the transaction of [`Tx::commit`].
///
/// Runs one statement at a time, under the limits of SQL handlers: no transaction control, no
/// PRAGMA, ATTACH or change of the schema. Statements may read Hapax's own tables except
/// `hapax_reservation`, and may write only to `hapax_publish`.
pub struct Db<'a> {
    conn: &'a Connection,
    confined: &'a SandboxGuard<'a>,
    /// Set once a statement has ended the transaction: later statements would commit by themselves.
    ended: Cell<bool>,
    /// A failure of the database itself, which no error of the closure may hide.
    broken: RefCell<Option<rusqlite::Error>>,
}

impl Db<'_> {
    /// Runs one statement to its end and returns how many rows it changed.
    pub fn execute(&self, sql: &str, params: impl Params) -> Result<usize, DbError> {
        self.run(sql, |statement| statement.execute(params))
    }

    /// Every row of a query.
    pub fn query<T>(
        &self,
        sql: &str,
        params: impl Params,
        mut read: impl FnMut(&Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<Vec<T>, DbError> {
        let rows: Vec<_> =
            self.run(sql, |statement| statement.query_map(params, |row| Ok(read(row)))?.collect())?;
        // An error while reading a row is the handler's: it may even come from another database.
        rows.into_iter().collect::<Result<_, _>>().map_err(DbError::Statement)
    }

    /// The first row of a query, if there is one.
    pub fn query_row<T>(
        &self,
        sql: &str,
        params: impl Params,
        read: impl FnOnce(&Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<Option<T>, DbError> {
        let row = self.run(sql, |statement| Ok(statement.query(params)?.next()?.map(read)))?;
        row.transpose().map_err(DbError::Statement)
    }

    /// Publishes a message with this commit, or not at all. The same id twice is one message.
    pub fn publish(&self, message: &NewMessage) -> Result<(), DbError> {
        let NewMessage { r#type, data, key, tenant, id, api_version } = message;
        self.execute(
            "INSERT INTO hapax_publish (type, data, key, tenant, id, api_version)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
            (r#type, data.as_str(), key, tenant, id, api_version),
        )?;
        Ok(())
    }

    fn run<T>(
        &self,
        sql: &str,
        run: impl FnOnce(&mut CachedStatement<'_>) -> rusqlite::Result<T>,
    ) -> Result<T, DbError> {
        if self.ended.get() {
            return Err(DbError::Ended);
        }
        if self.confined.timed_out() {
            return Err(DbError::TimedOut);
        }
        // The user's statements are cached apart from our own, which were compiled without the limits: see
        // `sql_handlers::execute`.
        let prepared = self.conn.prepare_cached(&format!("/* handler */ {sql}"));
        let ran = prepared.and_then(|mut statement| run(&mut statement));
        self.ended.set(self.conn.is_autocommit());
        let error = match ran {
            Ok(value) if !self.ended.get() => return Ok(value),
            Ok(_) => return Err(DbError::Ended),
            Err(error) => error,
        };
        if self.confined.timed_out() {
            return Err(DbError::TimedOut);
        }
        if !is_the_users(&error) {
            let why = error.to_string();
            self.broken.borrow_mut().get_or_insert(error);
            return Err(DbError::Broken(why));
        }
        Err(DbError::Statement(error))
    }
}

impl fmt::Debug for Db<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Db").field("ended", &self.ended).finish_non_exhaustive()
    }
}

/// Why a statement of a handler did not run.
#[derive(Debug, thiserror::Error)]
pub enum DbError {
    /// The statement is wrong, not allowed here, or violates a constraint.
    #[error(transparent)]
    Statement(rusqlite::Error),
    /// The transaction has used up its time.
    #[error("the transaction has used up its time")]
    TimedOut,
    /// A statement ended the transaction (`OR ROLLBACK`, `RAISE(ROLLBACK)`); nothing runs after it.
    #[error("a statement ended the transaction")]
    Ended,
    /// The database itself failed: nothing can be committed now.
    #[error("the database failed: {0}")]
    Broken(String),
}

async fn run_on_writer<R: CommitRight>(
    tx: Tx<R>,
    effects: impl FnOnce(&Db<'_>) -> Result<R::Recorded, Failure> + Send + 'static,
) -> Result<R::Proof, TxError> {
    let Tx { store, right, timeout } = tx;
    let shared = Arc::clone(&store.shared);
    let committed = store.writer.slice(move |writer| {
        let committed = commit(writer, &right, timeout, effects)?;
        if writer.lanes.take_woken() {
            shared.arrived.notify_waiters();
        }
        Ok(committed)
    });
    committed.await?
}

/// Checks the right, runs the effects, records their outcome and commits. The outer error is the
/// database's own: the writer must recover from it.
fn commit<R: CommitRight>(
    writer: &mut Writer,
    right: &R,
    timeout: Duration,
    effects: impl FnOnce(&Db<'_>) -> Result<R::Recorded, Failure>,
) -> rusqlite::Result<Result<R::Proof, TxError>> {
    let now = writer.now();
    let tx = Transaction::begin(&writer.conn)?;
    let Some((found, event)) = right.find(&writer.conn, &mut writer.lanes, now)? else {
        // Commits the rows that `find` wrote, such as a stale job.
        tx.commit()?;
        return Ok(Err(TxError::FenceLost));
    };
    let said = match confined(&writer.conn, &writer.sandbox, timeout, effects)? {
        Ok(said) => said,
        Err(failure) => return Ok(Err(TxError::Failed(failure))),
    };
    let published = writer.outbox.publish_staged(&writer.conn, event.as_for(), now)?;
    if let Err(refused) = published {
        return Ok(Err(TxError::Failed(Failure::new(refused))));
    }
    failpoint!("code.mid_commit");
    let proof = match right.record(&writer.conn, &mut writer.lanes, &found, said, now)? {
        Ok(proof) => proof,
        Err(error) => return Ok(Err(error)),
    };
    failpoint!("code.before_commit");
    match tx.commit() {
        Ok(()) => {
            failpoint!("code.after_commit");
            Ok(Ok(proof))
        }
        Err(error) if is_the_users_at_commit(&error) => {
            Ok(Err(TxError::Failed(Failure::new(format_args!("at commit: {error}")))))
        }
        Err(error) => Err(error),
    }
}

/// Runs the user's closure within its limits. A panic in the closure must not stop the writer.
fn confined<T>(
    conn: &Connection,
    sandbox: &Sandbox,
    timeout: Duration,
    effects: impl FnOnce(&Db<'_>) -> Result<T, Failure>,
) -> rusqlite::Result<Result<T, Failure>> {
    let confined = sandbox.confine(conn, timeout)?;
    let db = Db { conn, confined: &confined, ended: Cell::new(false), broken: RefCell::new(None) };
    // After a panic only the transaction is left of the closure, and it is rolled back.
    let ran = catch_unwind(AssertUnwindSafe(|| effects(&db)));
    let (ended, broken) = (db.ended.get(), db.broken.take());
    let slow = confined.timed_out();
    drop(confined);
    if let Some(error) = broken {
        return Err(error);
    }
    Ok(match ran {
        Err(_panic) => Err(Failure::new("the handler panicked in its transaction")),
        Ok(Err(failure)) => Err(failure),
        Ok(Ok(_)) if slow => {
            Err(Failure::new(format_args!("the transaction took longer than {timeout:?}")))
        }
        Ok(Ok(_)) if ended => Err(Failure::new(DbError::Ended)),
        Ok(Ok(said)) => Ok(said),
    })
}
