//! Rust handlers on PostgreSQL: an open transaction over the user's tables, whose commit also
//! records its outcome, if the fence still holds. The outcome is "done" for the claim of a job, and
//! the answer for the reservation of an Idempotency-Key.
//!
//! Begin, "done", the mark, the commit and the cleanup of the connection are shared with SQL
//! handlers ([`super::sql_handlers`]). This module handles what an open transaction adds: between
//! two statements the user's code may do anything, or never return.

use std::fmt;
use std::future::Future;
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use deadpool_postgres::Object;
use hapax_core::Tenant;
use hapax_core::failpoint;
use hapax_core::handler::{Dialect, SqlError, SqlProgram};
use hapax_core::ledger::{Reserved, StoredAnswer};
use hapax_core::store::{Claim, NewMessage, StoreError};
use tokio::runtime::Handle;
use tokio::time::{Instant, error::Elapsed, timeout, timeout_at};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{Json, ToSql};
use tokio_postgres::{Row, Statement};

use super::connect::{PgError, PooledClient};
use super::sql_handlers::{self, ConnectionLeftovers, DoneJobs, GRACE, NotRun};
use super::{PgStore, Shared, jobs, ledger, row};
use crate::limits::{HANDLER_IDLE_MIN, HANDLER_STATEMENTS_MAX};
use crate::transact::{Answering, Committed, Failure, JobRight, KeyRight, Transact, TxError, fits};

/// The right to commit the effects of one claim, or of one reservation, once. Nothing is open yet:
/// compute and call other services first, then begin.
///
/// A handler that drops this right has failed. If the right of a reservation is dropped, the key
/// stays in progress until its lease ends, unless it is finished or abandoned before.
#[must_use = "without a commit the attempt has failed"]
pub struct PgTx<R = JobRight> {
    shared: Arc<Shared>,
    right: R,
    /// How long the transaction may take.
    time: Duration,
}

impl Transact for PgStore {
    type Tx = PgTx;

    fn right(self: &Arc<Self>, claim: &Claim, timeout: Duration) -> PgTx {
        PgTx { shared: Arc::clone(&self.shared), right: JobRight::of(claim), time: timeout }
    }
}

impl Answering for PgStore {
    type Tx = PgTx<KeyRight>;

    fn answering(self: &Arc<Self>, reserved: &Reserved, timeout: Duration) -> PgTx<KeyRight> {
        let right = KeyRight(reserved.clone());
        PgTx { shared: Arc::clone(&self.shared), right, time: timeout }
    }
}

impl PgTx {
    /// Opens the transaction, if the claim still holds, on a connection reserved for handlers.
    /// Waits while all of them are in use.
    ///
    /// From here on the transaction's timeout runs, and the rows that the handler touches are
    /// locked: no network, no sleep, nothing but SQL and arithmetic.
    pub async fn begin(self) -> Result<PgDb, TxError> {
        begin(self).await
    }

    /// Records "done" for an event that needs no effect.
    pub async fn nothing_to_do(self, result: impl Into<String>) -> Result<Committed, TxError> {
        self.begin().await?.commit(Some(result.into())).await
    }
}

impl PgTx<KeyRight> {
    /// Opens the transaction as [`PgTx::begin`] does for a job, if the key is still reserved under
    /// this fence and has no answer.
    pub async fn begin(self) -> Result<PgDb<KeyRight>, TxError> {
        begin(self).await
    }
}

impl<R: fmt::Debug> fmt::Debug for PgTx<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PgTx").field(&self.right).field(&self.time).finish()
    }
}

/// Access to the user's tables, inside an open transaction that its commit ends.
///
/// Runs one statement at a time, with `$1`, `$2` … for its parameters, under the limits of SQL
/// handlers: no transaction control, no change of the schema or the session. Once a statement has
/// failed, the transaction cannot be committed. Dropping this rolls everything back.
#[must_use = "without a commit everything is rolled back"]
pub struct PgDb<R = JobRight> {
    /// Present until this is dropped or the connection is being returned.
    connection: Option<PooledClient>,
    shared: Arc<Shared>,
    right: R,
    /// The tenant of messages that name no tenant.
    tenant: Option<Tenant>,
    /// How long the transaction may take.
    time: Duration,
    /// The deadline of the transaction.
    until: Instant,
    state: TxState,
}

/// The state of the transaction.
#[derive(Debug)]
enum TxState {
    Open,
    /// A statement was sent, and its answer has not been read; its caller may have stopped waiting.
    Sent,
    /// A statement failed for this reason; the connection can still be used.
    Failed(String),
    /// A statement failed for this reason; the connection cannot be used again.
    Spoilt(String),
    /// The connection or the database is gone.
    Gone(String),
    Committed,
}

impl<R> PgDb<R> {
    /// Runs one statement and returns how many rows it touched.
    pub async fn execute(
        &mut self,
        sql: &str,
        params: &[&(dyn ToSql + Sync)],
    ) -> Result<u64, PgDbError> {
        let statement = self.prepared(sql).await?;
        let cut_at = self.until + GRACE;
        let ran = timeout_at(cut_at, self.connection()?.raw()?.execute(&statement, params)).await;
        self.judged(ran)
    }

    /// Every row of a query.
    pub async fn query(
        &mut self,
        sql: &str,
        params: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Row>, PgDbError> {
        let statement = self.prepared(sql).await?;
        let cut_at = self.until + GRACE;
        let ran = timeout_at(cut_at, self.connection()?.raw()?.query(&statement, params)).await;
        self.judged(ran)
    }

    /// The first row of a query, if there is one.
    pub async fn query_row(
        &mut self,
        sql: &str,
        params: &[&(dyn ToSql + Sync)],
    ) -> Result<Option<Row>, PgDbError> {
        Ok(self.query(sql, params).await?.into_iter().next())
    }

    /// Publishes a message with this commit, or not at all. The same id twice is one message. A
    /// message with a key blocks others with that key until this commit: publish last.
    pub async fn publish(&mut self, message: &NewMessage) -> Result<(), PgDbError> {
        let NewMessage { r#type, data, key, tenant, id, api_version } = message;
        let plain = |text: &String| row::text(text);
        let (kind, data) = (row::text(r#type), Json(jobs::data_without_nul(data)));
        let (key, id) = (key.as_ref().map(plain), id.as_ref().map(plain));
        let version = api_version.as_ref().map(plain);
        let ours = self.tenant.clone().unwrap_or_default();
        let tenant = tenant.as_ref().map_or_else(|| ours.to_string(), plain);
        self.query(
            "SELECT hapax.publish($1, $2, $3, $4, $5, $6)",
            &[&kind, &data, &key, &tenant, &id, &version],
        )
        .await?;
        Ok(())
    }

    /// Prepares the statement; from here on it counts as sent.
    async fn prepared(&mut self, sql: &str) -> Result<Statement, PgDbError> {
        self.is_sound()?;
        if let Err(error) = SqlProgram::may_begin(sql, Dialect::Postgres) {
            self.state = TxState::Failed(error.to_string());
            return Err(PgDbError::Refused(error));
        }
        self.state = TxState::Sent;
        let cut_at = self.until + GRACE;
        let client = self.connection()?.raw()?;
        if client.statement_cache.size() >= HANDLER_STATEMENTS_MAX {
            client.statement_cache.clear();
        }
        match timeout_at(cut_at, client.prepare_cached(sql)).await {
            Ok(Ok(statement)) => Ok(statement),
            failed => self.judged(failed),
        }
    }

    /// Checks whether another statement, or the commit, may be sent.
    fn is_sound(&mut self) -> Result<(), PgDbError> {
        match &self.state {
            TxState::Open if Instant::now() > self.until => {
                let error = PgDbError::TimedOut(self.time);
                self.state = TxState::Failed(error.to_string());
                Err(error)
            }
            TxState::Open => Ok(()),
            TxState::Failed(why) | TxState::Spoilt(why) => Err(PgDbError::Void(why.clone())),
            TxState::Gone(why) => Err(PgDbError::Broken(why.clone())),
            TxState::Sent => Err(PgDbError::Void("it was broken off".to_owned())),
            TxState::Committed => Err(PgDbError::Void("the transaction is over".to_owned())),
        }
    }

    /// Turns the outcome of a statement into the caller's result and the transaction's state.
    fn judged<T>(
        &mut self,
        ran: Result<Result<T, tokio_postgres::Error>, Elapsed>,
    ) -> Result<T, PgDbError> {
        let error = match ran {
            Ok(Ok(answer)) => {
                self.state = TxState::Open;
                return Ok(answer);
            }
            Err(_) => PgDbError::TimedOut(self.time),
            Ok(Err(error)) => PgDbError::of(error, self.time),
        };
        let text = error.to_string();
        // If the server answered, the connection is sound and waits for the end of the transaction.
        let waits = error.code().is_some() && !error.is_race();
        self.state = match &error {
            PgDbError::Broken(why) => TxState::Gone(why.clone()),
            PgDbError::Statement(_) if waits => TxState::Failed(text),
            PgDbError::Statement(_)
            | PgDbError::Refused(_)
            | PgDbError::TimedOut(_)
            | PgDbError::Void(_) => TxState::Spoilt(text),
        };
        Err(error)
    }

    fn connection(&mut self) -> Result<&mut PooledClient, PgError> {
        self.connection.as_mut().ok_or(PgError::Gone)
    }
}

impl PgDb {
    /// Records "done" with this short result (at most 200 characters are kept) and commits. The whole
    /// transaction is durable when this returns `Ok`.
    ///
    /// Nothing is committed after `FenceLost` or `Failed`. After [`TxError::Store`] the outcome is
    /// unknown: the answer to the commit was lost. The next claim of the job finds the work done, or does it.
    ///
    /// Dropping the future does not stop a commit that has begun.
    pub async fn commit(self, result: Option<String>) -> Result<Committed, TxError> {
        commit(self, result).await
    }
}

impl PgDb<KeyRight> {
    /// Stores the answer and commits as [`PgDb::commit`] does for a job: effects and answer are
    /// durable when this returns `Ok` with it. After [`TxError::Store`] the next request with the
    /// key gets the answer, or does the work once the lease is over.
    pub async fn commit(self, answer: StoredAnswer) -> Result<StoredAnswer, TxError> {
        commit(self, answer).await
    }
}

/// A right to commit, and the outcome that its commit records.
trait CommitRight: Clone + Send + Sync + 'static {
    /// The outcome.
    type Recorded: Send + Sync + 'static;
    /// The value that the commit returns.
    type Proof: Send + 'static;

    /// The tenant of the effects, if it is known.
    fn tenant(&self) -> Option<Tenant>;

    /// SQL that the transaction begins with.
    fn opening(&self) -> String;

    /// Whether the right holds, as far as is known without a lock.
    fn holds(&self, client: &Object) -> impl Future<Output = Result<bool, NotRun>> + Send;

    /// Records the outcome, under the fence.
    fn record(
        &self,
        shared: &Shared,
        client: &Object,
        said: &Self::Recorded,
    ) -> impl Future<Output = Result<(), NotRun>> + Send;

    /// Whether the outcome is recorded by this right; asked when the answer to a commit was lost.
    fn is_recorded(
        &self,
        shared: &Shared,
        said: &Self::Recorded,
    ) -> impl Future<Output = Result<bool, PgError>> + Send;

    /// Called after the commit; returns its proof.
    fn committed(&self, shared: &Shared, said: Self::Recorded) -> Self::Proof;
}

impl CommitRight for JobRight {
    type Recorded = Option<String>;
    type Proof = Committed;

    fn tenant(&self) -> Option<Tenant> {
        Some(self.tenant.clone())
    }

    fn opening(&self) -> String {
        format!("; SELECT hapax.works_for('{}')", self.job.0)
    }

    async fn holds(&self, client: &Object) -> Result<bool, NotRun> {
        let ask = "SELECT hapax.is_held($1, $2)";
        let ask = client
            .prepare_cached(ask)
            .await
            .map_err(|error| sql_handlers::of_hapax(error.into()))?;
        let row = client.query_one(&ask, &[&self.job.0, &self.fence.0]).await;
        Ok(row.map_err(|error| sql_handlers::of_hapax(error.into()))?.get(0))
    }

    async fn record(
        &self,
        shared: &Shared,
        client: &Object,
        result: &Option<String>,
    ) -> Result<(), NotRun> {
        let mut done = DoneJobs::default();
        done.push(self.job, self.fence, result.clone());
        sql_handlers::finish(shared, client, &done).await
    }

    async fn is_recorded(&self, shared: &Shared, _: &Option<String>) -> Result<bool, PgError> {
        jobs::is_done_under(shared, self.job, self.fence).await
    }

    fn committed(&self, shared: &Shared, _: Option<String>) -> Committed {
        // Other jobs of the resource may be ready.
        shared.arrived.notify_waiters();
        shared.sending.hint();
        Committed::new(self.job, self.fence)
    }
}

impl CommitRight for KeyRight {
    type Recorded = StoredAnswer;
    type Proof = StoredAnswer;

    fn tenant(&self) -> Option<Tenant> {
        None
    }

    fn opening(&self) -> String {
        String::new()
    }

    async fn holds(&self, client: &Object) -> Result<bool, NotRun> {
        ledger::is_open(client, &self.0).await
    }

    async fn record(
        &self,
        shared: &Shared,
        client: &Object,
        answer: &StoredAnswer,
    ) -> Result<(), NotRun> {
        fits(answer).map_err(|too_large| NotRun::Statement(too_large.to_string()))?;
        sql_handlers::check_constraints(client).await?;
        ledger::finish_within(shared, client, &self.0, answer).await
    }

    async fn is_recorded(&self, shared: &Shared, answer: &StoredAnswer) -> Result<bool, PgError> {
        ledger::is_kept(shared, &self.0, answer).await
    }

    fn committed(&self, _: &Shared, answer: StoredAnswer) -> StoredAnswer {
        answer
    }
}

async fn begin<R: CommitRight>(tx: PgTx<R>) -> Result<PgDb<R>, TxError> {
    if tx.shared.closing.is_cancelled() {
        return Err(StoreError::Closed.into());
    }
    let began = match open(&tx).await {
        // The connection may have died while it was idle. Nothing has begun, so a second try is
        // safe.
        Err(NotRun::Outage(_)) => open(&tx).await,
        began => began,
    };
    began.map_err(TxError::from)
}

async fn open<R: CommitRight>(tx: &PgTx<R>) -> Result<PgDb<R>, NotRun> {
    let time = tx.time;
    let connection = tx.shared.pools.handlers.checkout_in_turn().await.map_err(NotRun::Outage)?;
    let mut db = PgDb {
        connection: Some(connection),
        shared: Arc::clone(&tx.shared),
        right: tx.right.clone(),
        tenant: tx.right.tenant(),
        time,
        until: Instant::now() + time,
        state: TxState::Sent,
    };
    // A node that stops in the middle must not keep rows locked.
    let more = format!(
        "; SET LOCAL idle_in_transaction_session_timeout = {}{}",
        time.max(HANDLER_IDLE_MIN).as_millis(),
        tx.right.opening()
    );
    let held = timeout(time + GRACE, async {
        let client = db.connection()?.raw()?;
        sql_handlers::begin(client, time, &more).await?;
        tx.right.holds(client).await
    });
    let held = held.await.map_err(|_: Elapsed| NotRun::Outage(PgError::Silent))??;
    db.state = TxState::Open;
    if held { Ok(db) } else { Err(NotRun::Fence) }
}

async fn commit<R: CommitRight>(db: PgDb<R>, said: R::Recorded) -> Result<R::Proof, TxError> {
    let shared = Arc::clone(&db.shared);
    shared.run_to_completion(async move { Ok(end(db, said).await) }).await?
}

async fn end<R: CommitRight>(mut db: PgDb<R>, said: R::Recorded) -> Result<R::Proof, TxError> {
    db.is_sound().map_err(|error| TxError::Failed(error.into()))?;
    failpoint!("code.mid_commit");
    db.state = TxState::Sent;
    let (shared, right) = (Arc::clone(&db.shared), db.right.clone());
    let ended = timeout(db.time + GRACE, async {
        let client = db.connection()?.raw()?;
        right.record(&shared, client, &said).await?;
        failpoint!("code.before_commit");
        sql_handlers::commit(client).await
    });
    let ended = ended.await.unwrap_or(Err(NotRun::Outage(PgError::Silent)));
    match ended {
        Ok(()) => db.state = TxState::Committed,
        Err(NotRun::Outage(error)) => {
            // The record is valid only for this fence: another attempt has another fence.
            return match right.is_recorded(&shared, &said).await {
                Ok(true) => Ok(right.committed(&shared, said)),
                Ok(false) | Err(_) => Err(TxError::Store(error.into())),
            };
        }
        Err(refused) => {
            db.state = match &refused {
                // The prepared statements of the connection may be invalid.
                NotRun::Race(why) => TxState::Spoilt(why.clone()),
                NotRun::Statement(why) => TxState::Failed(why.clone()),
                NotRun::Fence | NotRun::Waits | NotRun::Outage(_) => TxState::Failed(String::new()),
            };
            return Err(refused.into());
        }
    }
    failpoint!("code.after_commit");
    Ok(right.committed(&shared, said))
}

impl<R> Drop for PgDb<R> {
    fn drop(&mut self) {
        let left = match mem::replace(&mut self.state, TxState::Sent) {
            TxState::Open | TxState::Failed(_) => ConnectionLeftovers::Open,
            TxState::Committed => ConnectionLeftovers::Ended,
            // Closing the connection ends its running statement and rolls back.
            TxState::Sent | TxState::Spoilt(_) | TxState::Gone(_) => return,
        };
        if let (Some(mut connection), Ok(runtime)) = (self.connection.take(), Handle::try_current())
        {
            let tidied = async move {
                drop(timeout(GRACE, sql_handlers::reset_connection(&mut connection, left)).await)
            };
            self.shared.tasks.spawn_on(tidied, &runtime);
        }
    }
}

impl<R> fmt::Debug for PgDb<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PgDb").field("state", &self.state).finish_non_exhaustive()
    }
}

/// Why a statement of a handler did not run. In every case its transaction can no longer be
/// committed.
#[derive(Debug, thiserror::Error)]
pub enum PgDbError {
    /// The statement may not run in a handler: it would end the transaction, change the schema or
    /// the session, or reach a table of Hapax.
    #[error("{} ({})", .0, .0.hint)]
    Refused(SqlError),
    /// The statement is wrong, violates a constraint, or does not match its parameters.
    #[error("{}", error_text(.0))]
    Statement(tokio_postgres::Error),
    /// The transaction has used up its time.
    #[error("the transaction took longer than {0:?}")]
    TimedOut(Duration),
    /// An earlier statement failed, and its error was ignored.
    #[error("an earlier statement failed: {0}")]
    Void(String),
    /// The connection or the database is gone.
    #[error("the database failed: {0}")]
    Broken(String),
}

impl PgDbError {
    /// The SQLSTATE, if the database returned one.
    pub fn code(&self) -> Option<&SqlState> {
        match self {
            Self::Statement(error) => error.code(),
            Self::Refused(_) | Self::TimedOut(_) | Self::Void(_) | Self::Broken(_) => None,
        }
    }

    fn of(error: tokio_postgres::Error, time: Duration) -> Self {
        match error.code() {
            Some(code) if *code == SqlState::QUERY_CANCELED => Self::TimedOut(time),
            Some(code) if sql_handlers::is_outage(code) => Self::Broken(error_text(&error)),
            None if error.is_closed() => Self::Broken(error_text(&error)),
            Some(_) | None => Self::Statement(error),
        }
    }

    /// Whether an immediate retry may succeed: after a deadlock, or when an `ALTER` made a plan
    /// invalid.
    fn is_race(&self) -> bool {
        match self {
            Self::Statement(error) => sql_handlers::is_race(error),
            Self::Refused(_) | Self::TimedOut(_) | Self::Void(_) | Self::Broken(_) => false,
        }
    }

    /// How an attempt with this error ends.
    pub(crate) fn into_failure(self) -> Failure {
        match &self {
            Self::Broken(_) => Failure::lost(self),
            _ if self.is_race() => Failure::raced(self),
            Self::Refused(_) | Self::Statement(_) | Self::TimedOut(_) | Self::Void(_) => {
                Failure::new(self)
            }
        }
    }
}

impl From<PgError> for PgDbError {
    fn from(error: PgError) -> Self {
        Self::Broken(error.to_string())
    }
}

impl From<PgError> for NotRun {
    fn from(error: PgError) -> Self {
        Self::Outage(error)
    }
}

impl From<NotRun> for TxError {
    fn from(why: NotRun) -> Self {
        match why {
            NotRun::Statement(error) => Self::Failed(Failure::new(error)),
            NotRun::Race(error) => Self::Failed(Failure::raced(error)),
            NotRun::Fence => Self::FenceLost,
            NotRun::Waits => Self::Failed(Failure::raced("its resource is busy".to_owned())),
            NotRun::Outage(error) => Self::Store(error.into()),
        }
    }
}

/// An error in the format of SQL handlers' errors.
fn error_text(error: &tokio_postgres::Error) -> String {
    match error.as_db_error() {
        Some(db) => format!("{} ({})", db.message(), db.code().code()),
        None => crate::transact::with_sources(error),
    }
}
