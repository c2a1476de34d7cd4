//! Connections: the pools and their purposes, and the errors of statements. A connection whose statement was
//! cut off is never used again. [`super::server`] has the URL of the server and the checks before it is used.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use deadpool_postgres::{
    Hook, HookError, Manager, ManagerConfig, Object, Pool, PoolError, RecyclingMethod, Runtime,
    Timeouts,
};
use hapax_core::store::{Cause, StoreError};
use tokio_postgres::Row;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::server::ServerAddress;
use crate::limits::{PUBLISH_ALONE_LOCK_MAX, PUBLISH_BATCH_LOCK_MAX};

/// How long connecting to one server may take.
pub(super) const CONNECT_MAX: Duration = Duration::from_secs(3);

/// How long a caller waits for a connection while all are in use.
const LEND_MAX: Duration = Duration::from_secs(5);

/// The timeouts of one kind of statement.
#[derive(Debug, Clone, Copy)]
pub(super) struct StatementTimeouts {
    /// The statement timeout on the server.
    statement: Duration,
    /// The part of the timeout for waiting for a lock.
    lock: Duration,
    /// How much longer than the server this node waits for an answer before it closes the
    /// connection.
    grace: Duration,
}

impl StatementTimeouts {
    /// All these timeouts together are well below the default lease of 30 s.
    pub(super) const WORK: Self = Self {
        statement: Duration::from_secs(10),
        lock: Duration::from_secs(5),
        grace: Duration::from_secs(2),
    };

    /// A sender or an API client waits for this statement, and later requests wait for the writer.
    /// Both are better served by a 503 and a try on a new connection than by waiting for a server
    /// that does not answer.
    pub(super) const INGEST: Self = Self {
        statement: Duration::from_secs(4),
        lock: Duration::from_secs(3),
        grace: Duration::from_millis(500),
    };

    /// The timeouts of a batch of messages. A message that must wait for another transaction leaves
    /// the batch after a short time.
    const PUBLISH: Self = Self { lock: PUBLISH_BATCH_LOCK_MAX, ..Self::INGEST };

    /// The timeouts of a message that waits alone for another transaction.
    const PUBLISH_WAITING: Self = Self {
        statement: Duration::from_secs(7),
        lock: PUBLISH_ALONE_LOCK_MAX,
        grace: Duration::from_millis(500),
    };

    fn answer(self) -> Duration {
        self.statement + self.grace
    }
}

/// How often a statement is tried if it loses a deadlock or a serialization race.
const TRIES: u32 = 5;

/// Why a database could not be opened. No error contains a password.
#[derive(Debug, thiserror::Error)]
pub enum PgOpenError {
    /// The URL is invalid.
    #[error("database_url: {0}")]
    Url(String),
    /// The server does not answer, or refuses the connection.
    #[error("cannot connect to PostgreSQL: {0}")]
    Connect(String),
    /// The server answers, but cannot keep the guarantees of Hapax.
    #[error("this PostgreSQL cannot be used: {0}")]
    Unfit(String),
    /// The server answers, but refuses the query.
    #[error("the query failed: {0}")]
    Query(String),
    /// The URL of the Redis cache is invalid.
    #[error("{0}")]
    Redis(String),
    /// The tables are not those that this version needs.
    #[error("migrating the database: {0}")]
    Migrate(String),
    /// Handlers cannot work as their configured role.
    #[error("handlers_database_url: {0}")]
    Handlers(String),
}

impl PgOpenError {
    /// The same error for the URL of handlers.
    pub(super) fn of_handlers(self) -> Self {
        match self {
            Self::Handlers(why) | Self::Url(why) => Self::Handlers(why),
            other => Self::Handlers(other.to_string()),
        }
    }
}

/// How many connections each kind of work may use. One more checks the epoch of the database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolSizes {
    /// Writers of arriving events: each connection commits for all waiting requests.
    pub ingest: usize,
    /// Claims, outcomes and renewals of jobs.
    pub work: usize,
    /// Transactions of SQL and Rust handlers.
    pub handlers: usize,
    /// Idempotency-Keys. These connections are opened with the first key.
    pub ledger: usize,
    /// Messages that the API publishes: each connection commits for all waiting requests. As many
    /// connections again are opened for messages that wait for users' transactions.
    pub publish: usize,
    /// Claims and outcomes of deliveries.
    pub send: usize,
    /// Operators' queries, retention and housekeeping.
    pub admin: usize,
}

impl Default for PoolSizes {
    fn default() -> Self {
        Self { ingest: 3, work: 4, handlers: 4, ledger: 4, publish: 2, send: 2, admin: 3 }
    }
}

/// Connections for lists, and for operators' queries over sending, opened with the first one. The sessions
/// of these connections never scan a table; those of `admin` may.
const LISTS: usize = 2;

/// The connections of one node.
#[derive(Debug)]
pub(super) struct Pools {
    pub(super) ingest: ClientPool,
    pub(super) work: ClientPool,
    pub(super) handlers: ClientPool,
    pub(super) ledger: ClientPool,
    pub(super) publish: ClientPool,
    /// For messages that wait for users' transactions.
    pub(super) publish_waiting: ClientPool,
    pub(super) send: ClientPool,
    pub(super) admin: ClientPool,
    /// Lists, and operators' queries over sending.
    pub(super) lists: ClientPool,
    /// For the epoch only: however busy the other pools are, the node knows whether the database
    /// answers.
    pub(super) watch: ClientPool,
}

impl Pools {
    /// The pools for `target`. Handlers work on connections to `handlers`, which is the same
    /// database, perhaps under another role.
    pub(super) fn new(
        target: &ServerAddress,
        handlers: &ServerAddress,
        sizes: PoolSizes,
    ) -> Result<Self, PgOpenError> {
        Ok(Self {
            ingest: ClientPool::by_one_plan(
                target,
                "hapax-ingest",
                sizes.ingest,
                StatementTimeouts::INGEST,
            )?,
            work: ClientPool::by_index(target, "hapax-work", sizes.work, StatementTimeouts::WORK)?,
            handlers: ClientPool::for_handlers(handlers, sizes.handlers)?,
            ledger: ClientPool::by_one_plan(
                target,
                "hapax-ledger",
                sizes.ledger,
                StatementTimeouts::INGEST,
            )?,
            publish: ClientPool::for_publishing(target, sizes.publish, StatementTimeouts::PUBLISH)?,
            publish_waiting: ClientPool::for_publishing(
                target,
                sizes.publish,
                StatementTimeouts::PUBLISH_WAITING,
            )?,
            send: ClientPool::by_index(target, "hapax-send", sizes.send, StatementTimeouts::WORK)?,
            admin: ClientPool::new(target, "hapax-admin", sizes.admin, StatementTimeouts::WORK)?,
            lists: ClientPool::by_index(target, "hapax-lists", LISTS, StatementTimeouts::WORK)?,
            watch: ClientPool::new(target, "hapax-watch", 1, StatementTimeouts::WORK)?,
        })
    }

    /// Closes every connection, because they lead to a server that is no longer the primary. A connection
    /// that is checked out is closed when it is returned. Statements on such connections may take long to
    /// fail, or return data that the new primary has lost.
    pub(super) fn renew(&self) {
        for client_pool in self.all() {
            // The second increment also outdates a connection that is checked out in between.
            client_pool.generation.fetch_add(1, Ordering::SeqCst);
            drop(client_pool.pool.retain(|_, _| false));
            client_pool.generation.fetch_add(1, Ordering::SeqCst);
        }
    }

    pub(super) fn close(&self) {
        for client_pool in self.all() {
            client_pool.pool.close();
        }
    }

    fn all(&self) -> [&ClientPool; 10] {
        [
            &self.ingest,
            &self.work,
            &self.handlers,
            &self.ledger,
            &self.publish,
            &self.publish_waiting,
            &self.send,
            &self.admin,
            &self.lists,
            &self.watch,
        ]
    }
}

/// One pool.
#[derive(Debug)]
pub(super) struct ClientPool {
    pool: Pool,
    timeouts: StatementTimeouts,
    /// A number that is raised when all connections must be closed.
    generation: Arc<AtomicU64>,
}

impl ClientPool {
    /// The number of connections.
    pub(super) fn connections_max(&self) -> usize {
        self.pool.status().max_size
    }

    pub(super) fn new(
        target: &ServerAddress,
        name: &str,
        size: usize,
        timeouts: StatementTimeouts,
    ) -> Result<Self, PgOpenError> {
        Self::with(target, name, size, timeouts, session(timeouts))
    }

    /// Sessions whose statements never scan a whole table: a plan may date from when the table was
    /// empty.
    fn by_index(
        target: &ServerAddress,
        name: &str,
        size: usize,
        timeouts: StatementTimeouts,
    ) -> Result<Self, PgOpenError> {
        let session = format!("SET enable_seqscan = off; {}", session(timeouts));
        Self::with(target, name, size, timeouts, session)
    }

    /// As [`ClientPool::by_index`], with one plan for each statement, whatever its values. Otherwise
    /// PostgreSQL would plan a small batch again each time, which takes longer than running it. These
    /// sessions also answer from earlier commits, so a new session first runs [`ALL_CONFIRMED`].
    fn by_one_plan(
        target: &ServerAddress,
        name: &str,
        size: usize,
        timeouts: StatementTimeouts,
    ) -> Result<Self, PgOpenError> {
        let session = format!(
            "SET enable_seqscan = off; SET plan_cache_mode = force_generic_plan; {}; {ALL_CONFIRMED}",
            session(timeouts)
        );
        Self::with(target, name, size, timeouts, session)
    }

    /// As [`ClientPool::by_index`], for sessions that also answer from earlier commits: a new session
    /// first runs [`ALL_CONFIRMED`].
    fn for_publishing(
        target: &ServerAddress,
        size: usize,
        timeouts: StatementTimeouts,
    ) -> Result<Self, PgOpenError> {
        let session = format!("SET enable_seqscan = off; {}; {ALL_CONFIRMED}", session(timeouts));
        Self::with(target, "hapax-publish", size, timeouts, session)
    }

    pub(super) fn for_handlers(target: &ServerAddress, size: usize) -> Result<Self, PgOpenError> {
        Self::with(target, "hapax-handlers", size, StatementTimeouts::WORK, handler_session())
    }

    fn with(
        target: &ServerAddress,
        name: &str,
        size: usize,
        timeouts: StatementTimeouts,
        session: String,
    ) -> Result<Self, PgOpenError> {
        let mut config = target.config.clone();
        config.application_name(name);
        if config.get_tcp_user_timeout().is_none() {
            config.tcp_user_timeout(timeouts.answer());
        }
        let manager_config = ManagerConfig { recycling_method: RecyclingMethod::Fast };
        let create_max = target.hosts.timeout(&config);
        let manager = Manager::from_connect(config, target.hosts.clone(), manager_config);
        let pool = Pool::builder(manager)
            .max_size(size.max(1))
            .runtime(Runtime::Tokio1)
            .timeouts(Timeouts {
                wait: Some(LEND_MAX),
                create: Some(create_max),
                recycle: Some(CONNECT_MAX),
            })
            .post_create(Hook::async_fn(move |client, _| {
                let session = session.clone();
                Box::pin(async move {
                    let begins = client.simple_query(&session);
                    match tokio::time::timeout(timeouts.answer(), begins).await {
                        Ok(begun) => begun.map(drop).map_err(HookError::Backend),
                        Err(_) => Err(HookError::message("the server is slow to begin a session")),
                    }
                })
            }))
            .build()
            .map_err(|error| PgOpenError::Connect(error.to_string()))?;
        Ok(Self { pool, timeouts, generation: Arc::default() })
    }

    /// A connection for exclusive use. No transaction is open on it: a connection is never returned
    /// with one, see [`PooledClient`].
    pub(super) async fn checkout(&self) -> Result<PooledClient, PgError> {
        // The generation is read before the connection is taken: a connection that is checked out during a
        // change counts as one from before the change.
        let checked_out_in = self.generation.load(Ordering::SeqCst);
        let client = self.pool.get().await?;
        Ok(self.pooled(client, checked_out_in))
    }

    /// [`Self::checkout`] for callers with their own deadline: waits as long as all connections are in
    /// use.
    pub(super) async fn checkout_in_turn(&self) -> Result<PooledClient, PgError> {
        let patient = Timeouts { wait: None, ..self.pool.timeouts() };
        let checked_out_in = self.generation.load(Ordering::SeqCst);
        let client = self.pool.timeout_get(&patient).await?;
        Ok(self.pooled(client, checked_out_in))
    }

    fn pooled(&self, client: Object, checked_out_in: u64) -> PooledClient {
        let generation = Arc::clone(&self.generation);
        PooledClient {
            client: Some(client),
            timeouts: self.timeouts,
            busy: false,
            checked_out_in,
            generation,
        }
    }
}

/// The settings of each session of Hapax. `synchronous_commit` is at least `on`; a stricter setting
/// of the server stays. The isolation level is the one that the functions are written for, whatever
/// the server's default is.
pub(super) fn session(timeouts: StatementTimeouts) -> String {
    format!(
        "SET statement_timeout = {}; SET lock_timeout = {}; \
         SET idle_in_transaction_session_timeout = {}; \
         SET default_transaction_isolation = 'read committed'; SET jit = off; \
         SET client_min_messages = warning; \
         SELECT set_config('synchronous_commit', 'on', false) \
         WHERE current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')",
        timeouts.statement.as_millis(),
        timeouts.lock.as_millis(),
        timeouts.statement.as_millis(),
    )
}

/// Waits until everything that the session sees is confirmed by the synchronous standby, if there is one. After a
/// crash, a primary shows commits that no standby has confirmed. An answer that only repeats such a commit
/// waits for nothing, and a failover would lose what it acknowledged. The message in the log is a
/// commit behind all of them, and nothing reads it. A commit is shown later only after its confirmation, so a session
/// needs one such wait.
const ALL_CONFIRMED: &str = "SELECT pg_catalog.pg_logical_emit_message(true, 'hapax', ''::text)";

/// The settings of a handler's session. An unqualified name in a handler's statement means a table
/// of the user. This rule holds even if the role is called `hapax`, like the schema, which PostgreSQL's
/// default search path would use first.
pub(super) fn handler_session() -> String {
    format!(
        "{}; SELECT set_config('search_path', coalesce((\
             SELECT string_agg(quote_ident(schema), ', ' ORDER BY place) \
             FROM unnest(current_schemas(false)) WITH ORDINALITY AS path (schema, place) \
             WHERE schema <> 'hapax'), 'public'), false)",
        session(StatementTimeouts::WORK)
    )
}

/// A connection on loan. The connection returns to the pool when this guard is dropped, unless a statement
/// on it was cut off or the database has changed since. In those cases the connection is closed: its next
/// answer may belong to that statement, a transaction may be open, or the connection leads to a server
/// that is no longer the primary.
#[derive(Debug)]
pub(super) struct PooledClient {
    client: Option<Object>,
    timeouts: StatementTimeouts,
    busy: bool,
    /// The generation of the pool when the connection was checked out; `generation` is the current one.
    checked_out_in: u64,
    generation: Arc<AtomicU64>,
}

impl PooledClient {
    /// Runs one statement and reads its rows. The statement is prepared once per connection.
    pub(super) async fn query(
        &mut self,
        sql: &str,
        values: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Row>, PgError> {
        self.busy = true;
        let client = self.client.as_ref().ok_or(PgError::Gone)?;
        let answer = tokio::time::timeout(self.timeouts.answer(), async {
            let statement = client.prepare_cached(sql).await?;
            client.query(&statement, values).await
        });
        let rows = answer.await.map_err(|_| PgError::Silent)?;
        self.busy = rows.as_ref().is_err_and(breaks_connection);
        Ok(rows?)
    }

    /// Runs one statement; returns the number of rows it touched.
    pub(super) async fn execute(
        &mut self,
        sql: &str,
        values: &[&(dyn ToSql + Sync)],
    ) -> Result<u64, PgError> {
        self.busy = true;
        let client = self.client.as_ref().ok_or(PgError::Gone)?;
        let answer = tokio::time::timeout(self.timeouts.answer(), async {
            let statement = client.prepare_cached(sql).await?;
            client.execute(&statement, values).await
        });
        let touched = answer.await.map_err(|_| PgError::Silent)?;
        self.busy = touched.as_ref().is_err_and(breaks_connection);
        Ok(touched?)
    }

    /// Sends SQL without parameters in one message, so that several statements are one transaction.
    /// Only the server's timeout applies.
    pub(super) async fn batch(&mut self, sql: &str) -> Result<(), PgError> {
        self.busy = true;
        let client = self.client.as_ref().ok_or(PgError::Gone)?;
        let done = client.batch_execute(sql).await;
        self.busy = done.as_ref().is_err_and(breaks_connection);
        Ok(done?)
    }

    /// The connection itself, for a transaction that stays open between calls. The caller must call
    /// [`PooledClient::clean`] once nothing is open; otherwise the connection is closed.
    pub(super) fn raw(&mut self) -> Result<&mut Object, PgError> {
        self.busy = true;
        self.client.as_mut().ok_or(PgError::Gone)
    }

    /// Closes the connection instead of returning it: it leads to the wrong server.
    pub(super) fn close_connection(mut self) {
        self.busy = true;
    }

    /// Records that no transaction is open on the connection.
    pub(super) fn clean(&mut self) {
        self.busy = false;
    }
}

impl Drop for PooledClient {
    fn drop(&mut self) {
        let is_outdated = self.generation.load(Ordering::SeqCst) != self.checked_out_in;
        if let Some(client) = self.client.take()
            && (self.busy || is_outdated)
        {
            drop(Object::take(client));
        }
    }
}

/// Whether a connection cannot be used again after this error. After an error of the statement
/// itself, the connection is as clean as after a success. A server that was demoted or is shutting
/// down stays so, and its address may lead to another server by now. An internal error may come
/// from a statement prepared with a type that no longer exists, because the schema was restored.
fn breaks_connection(error: &tokio_postgres::Error) -> bool {
    match error.code() {
        None => true,
        Some(code) => {
            *code == SqlState::READ_ONLY_SQL_TRANSACTION
                || is_void_plan(code)
                || code.code().starts_with("XX")
                || code.code().starts_with("08")
                || code.code().starts_with("57P")
        }
    }
}

/// Whether a statement was prepared for tables or functions that have changed since: a newer
/// version has migrated the database. No statement of Hapax is refused like this for another
/// reason. A new connection prepares the statement again.
fn is_void_plan(code: &SqlState) -> bool {
    *code == SqlState::FEATURE_NOT_SUPPORTED || *code == SqlState::INVALID_SQL_STATEMENT_NAME
}

/// Why a statement did not succeed.
#[derive(Debug, thiserror::Error)]
pub(super) enum PgError {
    #[error("{}", error_text(.0))]
    Sql(#[from] tokio_postgres::Error),
    #[error("no connection: {0}")]
    Pool(String),
    #[error("the server does not answer")]
    Silent,
    #[error("the connection was lost")]
    Gone,
    #[error("closed")]
    Closed,
}

impl From<PoolError> for PgError {
    fn from(error: PoolError) -> Self {
        match error {
            PoolError::Backend(error) => Self::Sql(error),
            PoolError::Closed => Self::Closed,
            PoolError::Timeout(_) => Self::Pool("all are busy or the server is slow".to_owned()),
            PoolError::PostCreateHook(HookError::Backend(error)) => Self::Sql(error),
            other => Self::Pool(other.to_string()),
        }
    }
}

impl PgError {
    /// The SQLSTATE, if the server returned one.
    pub(super) fn code(&self) -> Option<&SqlState> {
        match self {
            Self::Sql(error) => error.code(),
            Self::Pool(_) | Self::Silent | Self::Gone | Self::Closed => None,
        }
    }

    /// Whether the statement had no effect and an immediate retry may succeed.
    pub(super) fn is_race(&self) -> bool {
        self.code().is_some_and(|code| {
            *code == SqlState::T_R_SERIALIZATION_FAILURE
                || *code == SqlState::T_R_DEADLOCK_DETECTED
                || is_void_plan(code)
        })
    }

    /// Whether the server itself caused the error, not the statement.
    pub(super) fn is_outage(&self) -> bool {
        match self.code().map(SqlState::code) {
            None => true,
            Some(code) => {
                ["08", "25", "40", "53", "55", "57", "58", "XX"].iter().any(|c| code.starts_with(c))
            }
        }
    }
}

impl From<PgError> for StoreError {
    fn from(error: PgError) -> Self {
        match error {
            PgError::Closed => Self::Closed,
            other => Self::Unavailable(Cause::new(other)),
        }
    }
}

/// A short error text. The server's own message may quote a value, so it is used only for error
/// classes about the server's state.
pub(super) fn error_text(error: &tokio_postgres::Error) -> String {
    match error.as_db_error() {
        Some(db) => {
            let state = ["08", "25", "40", "53", "55", "57", "58", "28", "3D"];
            let code = db.code().code();
            if state.iter().any(|class| code.starts_with(class)) {
                format!("{} ({code})", db.message())
            } else {
                format!("refused by the database ({code})")
            }
        }
        None => {
            let mut words = error.to_string();
            let mut cause = std::error::Error::source(error);
            while let Some(inner) = cause {
                let inner_words = inner.to_string();
                if !words.contains(&inner_words) {
                    words = format!("{words}: {inner_words}");
                }
                cause = inner.source();
            }
            words
        }
    }
}

/// Repeats an atomic act that lost a race against another node.
pub(super) async fn retried<T, F>(mut act: impl FnMut() -> F) -> Result<T, PgError>
where
    F: Future<Output = Result<T, PgError>>,
{
    for turn in 1..TRIES {
        match act().await {
            Err(error) if error.is_race() => {
                let dice = u64::from(Uuid::now_v7().as_bytes()[15] % 16);
                tokio::time::sleep(Duration::from_millis(u64::from(turn) * (2 + dice))).await;
            }
            answer => return answer,
        }
    }
    act().await
}
