//! The door through which Rust handlers reach the writer: a closure over the user's tables, run in
//! the transaction that records "done", if the fence still holds.
//!
//! The closure has the writer to itself while it runs, so it is short: the limits of SQL handlers
//! hold for it too ([`super::sandbox`]), and what takes too long is rolled back.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use hapax_core::failpoint;
use hapax_core::job::{Fence, JobId};
use hapax_core::store::{Claim, NewMessage};
use rusqlite::{CachedStatement, Connection, Params, Row};

use super::SqliteStore;
use super::jobs::{JobRow, place_of};
use super::row::{DISCARDED, DONE, STALE, micros};
use super::run::{is_the_users, is_the_users_at_commit};
use super::sandbox::Confined;
use super::transaction::Transaction;
use super::writer::Writer;
use crate::transact::{Committed, Failure, Transact, TxError};

/// The right to commit the effects of one claim, once. It is not an open transaction: compute, call
/// others and take your time first, then [`Tx::commit`] what came of it.
///
/// A handler that drops it has failed.
#[must_use = "without a commit the attempt has failed"]
pub struct Tx {
    store: Arc<SqliteStore>,
    right: Right,
}

/// What a commit goes by.
#[derive(Debug, Clone, Copy)]
struct Right {
    job: JobId,
    fence: Fence,
    timeout: Duration,
}

impl Tx {
    /// Runs `effects` on the database's one writer, in a transaction that also records "done" with
    /// the short result they return (at most 200 characters are kept) and what they publish. All of
    /// it is on disk when this returns `Ok`; nothing of it is there when it returns `Err`.
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
        let Self { store, right } = self;
        let shared = Arc::clone(&store.shared);
        let committed = store.writer.slice(move |writer| {
            let committed = commit(writer, right, effects)?;
            if writer.lanes.take_woken() {
                shared.arrived.notify_waiters();
            }
            Ok(committed)
        });
        committed.await?
    }

    /// Records "done" for an event that needs no effect.
    pub async fn nothing_to_do(self, result: impl Into<String>) -> Result<Committed, TxError> {
        let result = result.into();
        self.commit(move |_| Ok(Some(result))).await
    }
}

impl fmt::Debug for Tx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.right.fmt(f)
    }
}

impl Transact for SqliteStore {
    type Tx = Tx;

    fn right(self: &Arc<Self>, claim: &Claim, timeout: Duration) -> Tx {
        let right = Right { job: claim.job, fence: claim.fence, timeout };
        Tx { store: Arc::clone(self), right }
    }
}

/// The user's tables, inside the transaction of [`Tx::commit`].
///
/// One statement at a time, under the limits of SQL handlers: no transaction control, no PRAGMA,
/// ATTACH or change of the schema, and of our own tables only reading (all but `hapax_reservation`)
/// and `hapax_publish`.
pub struct Db<'a> {
    conn: &'a Connection,
    confined: &'a Confined<'a>,
    /// Set once a statement has ended the transaction: what ran after it would commit by itself.
    ended: Cell<bool>,
    /// The database's own failure, should there be one: no error of the closure hides it.
    broken: RefCell<Option<rusqlite::Error>>,
}

impl Db<'_> {
    /// Runs one statement to its end and says how many rows it changed.
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
        // What went wrong in reading is the handler's own: it may even be of another database.
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
        let NewMessage { r#type, data, key, tenant, id } = message;
        self.execute(
            "INSERT INTO hapax_publish (type, data, key, tenant, id) VALUES (?1, ?2, ?3, ?4, ?5)",
            (r#type, data.to_string(), key, tenant, id),
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
        // Kept apart from our own statements, which nobody judged: see `run::execute`.
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
    /// It is wrong, not allowed here, or against a constraint.
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

/// Guard, effects, "done" and commit. The outer error is the database's own: the writer must
/// recover from it.
fn commit(
    writer: &mut Writer,
    right: Right,
    effects: impl FnOnce(&Db<'_>) -> Result<Option<String>, Failure>,
) -> rusqlite::Result<Result<Committed, TxError>> {
    let now = writer.now();
    let Right { job, fence, timeout } = right;
    let tx = Transaction::begin(&writer.conn)?;
    let (seq, lane) = place_of(job);
    // At most once per fence: a second "done" is refused, and what goes with it rolled back.
    let open = |row: &JobRow| row.is_under(fence) && !matches!(row.state, DONE | STALE | DISCARDED);
    let Some(row) = JobRow::find(&writer.conn, seq, lane)?.filter(open) else {
        return Ok(Err(TxError::FenceLost));
    };
    if writer.lanes.was_passed(&writer.conn, &row)? {
        writer.lanes.overtaken(&writer.conn, &row, now)?;
        tx.commit()?;
        return Ok(Err(TxError::FenceLost));
    }
    writer
        .conn
        .prepare_cached("UPDATE hapax_current SET event_seq = ?1, at = ?2")?
        .execute((seq, micros(now)))?;
    let result = match confined(writer, timeout, effects)? {
        Ok(result) => result,
        Err(failure) => return Ok(Err(TxError::Failed(failure))),
    };
    failpoint!("code.mid_commit");
    writer.lanes.finish(&writer.conn, &row, result.as_deref(), now)?;
    failpoint!("code.before_commit");
    match tx.commit() {
        Ok(()) => {
            failpoint!("code.after_commit");
            Ok(Ok(Committed::new(job, fence)))
        }
        Err(error) if is_the_users_at_commit(&error) => {
            Ok(Err(TxError::Failed(Failure::new(format_args!("at commit: {error}")))))
        }
        Err(error) => Err(error),
    }
}

/// Runs the user's closure within its limits. A panic of it must not take the writer down.
fn confined(
    writer: &Writer,
    timeout: Duration,
    effects: impl FnOnce(&Db<'_>) -> Result<Option<String>, Failure>,
) -> rusqlite::Result<Result<Option<String>, Failure>> {
    let confined = writer.sandbox.confine(timeout);
    let db = Db {
        conn: &writer.conn,
        confined: &confined,
        ended: Cell::new(false),
        broken: RefCell::new(None),
    };
    // Nothing of the closure is seen after a panic but the transaction, which is rolled back.
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
        Ok(Ok(result)) => Ok(result),
    })
}
