//! The shared store: one PostgreSQL, any number of nodes, no other coordination.
//!
//! Every atomic act is one statement that commits itself: a paused node or a dropped future can hold no
//! key and leave no transaction open. [`connect`] lends connections, [`migrate`] updates the tables,
//! [`group_commit`] batches requests into commits, and [`ingest`] makes events durable. [`copy_lookup`]
//! answers copies in a retry storm, and [`crate::copy_pacing`] delays these answers so that they cannot starve
//! new events. [`outbox`] publishes messages and claims their deliveries. [`epoch`] detects when cached
//! answers are no longer valid, and [`reader`] serves queries of operators.

mod admin_records;
mod claim_hints;
mod connect;
mod copies;
mod copy_lookup;
mod endpoint_history;
mod epoch;
mod event_plans;
mod functions;
mod group_commit;
mod handler_registry;
mod handler_role;
mod hosts;
mod ingest;
mod ingest_rows;
mod jobs;
mod key_batches;
mod key_records;
mod lane_ids;
mod ledger;
mod lists;
mod migrate;
mod operator_actions;
mod outbox;
mod partitions;
mod plans;
mod portal_links;
mod prune;
mod reader;
mod rejections;
mod result_text;
mod row;
mod search_index;
mod server;
mod source_secrets;
mod sql_handlers;
mod stats;
mod tenant_deletion;
mod tls;
mod traffic_history;
mod transact;
mod verifiers;
mod work;

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::handler::SqlProgram;
use hapax_core::job::JobId;
use hapax_core::store::{
    ArrivalInfo, Cause, DeadGroups, EventDetail, EventFilter, EventId, EventName, EventSample,
    EventSummary, Ingest, Inspect, JobDetail, JobFilter, LaneState, Lookup, Page, PausedHandler,
    SampleAsk, StorageUse, Store, StoreError, StoreHints, Verdict,
};
use hapax_core::{EventKey, KeyHash, Receipt, SourceName, Timestamp};
use tokio::sync::{Notify, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use connect::{PgOpenError, PoolSizes};
pub use handler_role::HandlerRoleReport;
pub use migrate::MigrationStatus;
pub use transact::{PgDb, PgDbError, PgTx};

use crate::Clock;
use crate::copies::Copies;
use crate::limits::READ_FLUSH_MAX;
use crate::recent::{Recent, RecentEvents, ShardMoment, adds_nothing};
use crate::redis_cache::{CacheEntry, RedisCache};
use crate::sealed_values::SealedValue;
use connect::{ClientPool, Pools};
use copy_lookup::CopyLookup;
use epoch::{Epoch, EpochWatch};
use group_commit::GroupCommit;
use handler_registry::HandlerRegistry;
use key_batches::KeyBatches;
use lane_ids::LaneIds;
use row::Ids;
use server::ServerAddress;

/// How long closing waits for acts that have begun.
const CLOSE_MAX: Duration = Duration::from_secs(20);

/// How to open a database.
#[derive(Clone)]
pub struct PgOptions {
    /// `postgres://…`, or `key=value` pairs. `sslmode` and `sslrootcert` have the same meaning as
    /// for PostgreSQL's own clients.
    pub url: String,
    /// The same database under the role that handlers use; `None` is the role of `url`. The role
    /// needs rights on the user's tables. Its rights on Hapax's tables are granted when a node
    /// opens the database.
    pub handlers_url: Option<String>,
    /// A clock instead of the database's; for tests that move time.
    pub clock: Option<Clock>,
    /// The number of connections for each kind of work.
    pub pools: PoolSizes,
    /// A Redis cache, from which copies of known events may be answered.
    pub redis_url: Option<String>,
    /// The shortest retention of a key, if keys expire. Entries in Redis expire earlier than that.
    pub keys_kept: Option<Duration>,
}

impl PgOptions {
    /// Options for the database at `url`, with the database's own clock.
    pub fn new(url: impl Into<String>) -> Self {
        let pools = PoolSizes::default();
        Self {
            url: url.into(),
            handlers_url: None,
            clock: None,
            pools,
            redis_url: None,
            keys_kept: None,
        }
    }
}

// `Debug` is not derived, because the URL contains a password.
impl fmt::Debug for PgOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PgOptions").field("pools", &self.pools).finish_non_exhaustive()
    }
}

/// A database as [`PgStore::report`] found it.
#[derive(Debug)]
pub struct PgReport {
    /// The server's version as it reports it: `17.2`.
    pub version: String,
    /// Whether the server follows another one, and accepts no writes.
    pub is_standby: bool,
    /// The difference between the database's clock, which decides leases, and this machine's clock.
    pub clock_apart: Duration,
    /// Why a Hapax server would not start on this database, if there is a reason.
    pub unfit: Option<PgOpenError>,
    /// The status of each migration.
    pub steps: Vec<MigrationStatus>,
}

/// Events in one PostgreSQL, shared with other nodes.
#[derive(Debug)]
pub struct PgStore {
    shared: Arc<Shared>,
}

/// State shared by the parts of the store.
struct Shared {
    pools: Pools,
    clock: Option<Clock>,
    names: LaneIds,
    handlers: HandlerRegistry,
    ids: Ids,
    group_commit: GroupCommit,
    lookup: CopyLookup,
    key_batches: KeyBatches,
    publisher: outbox::Publisher,
    sending: outbox::SenderState,
    recent: RecentEvents,
    front: Option<RedisCache>,
    copies: Copies<EventId>,
    /// Notified when so many copies wait that they should be written now.
    copies_full: Notify,
    /// Held during a flush of copies, so that there is one at a time.
    flushing: tokio::sync::Mutex<()>,
    epoch: EpochWatch,
    prune_progress: tokio::sync::Mutex<prune::PruneProgress>,
    health: WriteHealth,
    /// Notified when jobs were written.
    arrived: Notify,
    /// Acts that run to their end, even if their caller stops waiting.
    tasks: TaskTracker,
    closing: CancellationToken,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("pools", &self.pools).finish_non_exhaustive()
    }
}

impl PgStore {
    /// Connects, checks that the server can keep the guarantees of Hapax, and migrates the tables.
    pub async fn open(options: PgOptions) -> Result<Self, PgOpenError> {
        let target = ServerAddress::parse(&options.url)?;
        target.check().await?;
        let front =
            options.redis_url.as_deref().map(|url| RedisCache::open(url, options.keys_kept));
        let front = front.transpose().map_err(|error| PgOpenError::Redis(error.to_string()))?;
        let handlers = options.handlers_url.as_deref().map(ServerAddress::parse).transpose();
        let handlers = handlers.map_err(PgOpenError::of_handlers)?;
        let pools = Pools::new(&target, handlers.as_ref().unwrap_or(&target), options.pools)?;
        migrate::up(&pools.admin).await?;
        if handlers.is_some() {
            handler_role::admit(&pools).await.map_err(PgOpenError::of_handlers)?;
        }
        let shared = Arc::new(Shared {
            pools,
            clock: options.clock,
            names: LaneIds::default(),
            handlers: HandlerRegistry::default(),
            ids: Ids::default(),
            group_commit: GroupCommit::new(),
            lookup: CopyLookup::new(),
            key_batches: KeyBatches::default(),
            publisher: outbox::Publisher::default(),
            sending: outbox::SenderState::default(),
            recent: RecentEvents::new(),
            front,
            copies: Copies::new(),
            copies_full: Notify::new(),
            flushing: tokio::sync::Mutex::default(),
            epoch: EpochWatch::default(),
            prune_progress: tokio::sync::Mutex::default(),
            health: WriteHealth::default(),
            arrived: Notify::new(),
            tasks: TaskTracker::new(),
            closing: CancellationToken::new(),
        });
        epoch::ask(&shared).await.map_err(|error| PgOpenError::Connect(error.to_string()))?;
        group_commit::start(&shared, options.pools.ingest).map_err(|error| {
            PgOpenError::Connect(format!("cannot start the writer thread: {error}"))
        })?;
        key_batches::start(&shared);
        outbox::start_publishers(&shared, options.pools.publish);
        shared.tasks.spawn(epoch::watch(Arc::clone(&shared)));
        shared.tasks.spawn(partitions::create_partitions_ahead(Arc::clone(&shared)));
        shared.tasks.spawn(copies::keep_writing(Arc::clone(&shared)));
        Ok(Self { shared })
    }

    /// The status of each migration in the database at `url`. Applies no migration.
    pub async fn migration_status(url: &str) -> Result<Vec<MigrationStatus>, PgOpenError> {
        let target = ServerAddress::parse(url)?;
        let pools = Pools::new(&target, &target, PoolSizes::default())?;
        migrate::status(&pools.admin).await
    }

    /// Which key of the vault each sealed value in the database at `url` needs; changes nothing.
    pub async fn sealed_values(url: &str) -> Result<Vec<SealedValue>, PgOpenError> {
        let target = ServerAddress::parse(url)?;
        let pools = Pools::new(&target, &target, PoolSizes::default())?;
        let values = source_secrets::sealed_values(&pools.admin).await;
        values.map_err(|error| PgOpenError::Query(error.to_string()))
    }

    /// Facts about the database at `url` for an operator, before a server starts on it or while one
    /// runs; changes nothing.
    pub async fn report(url: &str) -> Result<PgReport, PgOpenError> {
        let target = ServerAddress::parse(url)?;
        let server::ServerFacts { version, is_standby, clock_apart } = target.facts().await?;
        let unfit = target.check().await.err();
        let pools = Pools::new(&target, &target, PoolSizes::default())?;
        let steps = migrate::status(&pools.admin).await?;
        Ok(PgReport { version, is_standby, clock_apart, unfit, steps })
    }

    /// Facts about the role that handlers use, for an operator, before a server starts; changes
    /// nothing. `handlers_url` must lead to the database at `url`.
    pub async fn report_handler_role(
        url: &str,
        handlers_url: &str,
    ) -> Result<HandlerRoleReport, PgOpenError> {
        let handlers = ServerAddress::parse(handlers_url).map_err(PgOpenError::of_handlers)?;
        let pools = Pools::new(&ServerAddress::parse(url)?, &handlers, PoolSizes::default())?;
        handler_role::report(&pools).await
    }

    /// Prepares the statements of each program in the database at `url`, in a session like a
    /// handler's. Returns for each program why one of its statements cannot run. Changes nothing.
    pub async fn check_statements(
        url: &str,
        programs: &[Arc<SqlProgram>],
    ) -> Result<Vec<Option<String>>, PgOpenError> {
        let client_pool = ClientPool::for_handlers(&ServerAddress::parse(url)?, 1)?;
        let checked = sql_handlers::check(&client_pool, programs).await;
        checked.map_err(|error| PgOpenError::Connect(error.to_string()))
    }

    /// The first column of each row that `sql` returns at `url`, as text, in a read-only
    /// transaction. The database need not contain the tables of Hapax.
    pub async fn first_column(url: &str, sql: &str) -> Result<Vec<Option<String>>, PgOpenError> {
        ServerAddress::parse(url)?.first_column(sql).await
    }

    /// Migrates the tables of the database at `url`, and does nothing else.
    pub async fn migrate(url: &str) -> Result<(), PgOpenError> {
        let target = ServerAddress::parse(url)?;
        target.check().await?;
        migrate::up(&Pools::new(&target, &target, PoolSizes::default())?.admin).await
    }

    /// `hapax.once` and its table as a plain migration, for databases without a Hapax server.
    pub fn once_sql() -> &'static str {
        migrate::once()
    }

    /// Every migration as one script, for operators who apply it by hand.
    pub fn schema_sql() -> String {
        migrate::by_hand()
    }

    /// Finishes acts that have begun and closes every connection. Later calls return `Closed`.
    pub async fn close(&self) {
        self.shared.closing.cancel();
        self.shared.tasks.close();
        if tokio::time::timeout(CLOSE_MAX, self.shared.tasks.wait()).await.is_err() {
            tracing::warn!("closed the database while a call was still running");
        }
        copies::flush(&self.shared).await;
        if let Some(front) = &self.shared.front {
            front.close().await;
        }
        self.shared.pools.close();
    }
}

impl Drop for PgStore {
    fn drop(&mut self) {
        // A store that is dropped without `close` must not leave its tasks running.
        self.shared.closing.cancel();
    }
}

impl Store for PgStore {
    async fn ingest(&self, ingest: Ingest) -> Result<Vec<Verdict>, StoreError> {
        if let Some(verdicts) = self.all_recent(&ingest) {
            self.shared.group_commit.pacing.pass().await;
            return Ok(verdicts);
        }
        if let Some(verdicts) = self.all_in_front(&ingest).await {
            self.shared.group_commit.pacing.pass().await;
            return Ok(verdicts);
        }
        let (answer, verdicts) = oneshot::channel();
        let to_write = match self.shared.lookup.is_storm() {
            true => self.shared.lookup.ask(ingest, answer),
            false => Some((ingest, answer)),
        };
        if let Some((ingest, answer)) = to_write {
            self.shared.group_commit.queue(ingest, answer);
        }
        let verdicts = group_commit::wait(verdicts).await?;
        if verdicts.iter().all(|verdict| matches!(verdict, Verdict::Duplicate(_))) {
            self.shared.group_commit.pacing.pass().await;
        }
        Ok(verdicts)
    }

    fn writable(&self) -> Result<(), StoreError> {
        self.shared.health.check()
    }
}

impl StoreHints for PgStore {
    async fn knows(&self, key: &EventKey) -> Result<bool, StoreError> {
        let (shared, hash) = (Arc::clone(&self.shared), row::of_hash(key.hash()));
        let look = async move {
            let mut client = shared.pools.admin.checkout().await?;
            let sql = "SELECT EXISTS (SELECT FROM hapax.event WHERE hash = $1)";
            let rows = client.query(sql, &[&hash]).await?;
            Ok(rows.first().is_some_and(|row| row.get(0)))
        };
        self.shared.run_to_completion(look).await
    }

    /// The most batches of SQL at once: as many as there are connections.
    fn sql_batches_max(&self) -> usize {
        self.shared.pools.handlers.connections_max()
    }

    fn foreground_requests(&self) -> Option<u64> {
        Some(self.shared.group_commit.queued())
    }
}

impl Inspect for PgStore {
    async fn events(&self, filter: EventFilter) -> Result<Page<EventSummary>, StoreError> {
        lists::events(&self.shared, filter).await
    }

    async fn event(&self, name: &EventName) -> Result<Lookup<EventDetail>, StoreError> {
        reader::event(&self.shared, name.clone()).await
    }

    async fn events_traced_by(&self, id: &str) -> Result<Vec<EventId>, StoreError> {
        search_index::traced_by(&self.shared, id).await
    }

    async fn jobs(&self, filter: JobFilter) -> Result<Page<JobDetail>, StoreError> {
        lists::jobs(&self.shared, filter).await
    }

    async fn dead_groups(&self, filter: JobFilter) -> Result<DeadGroups, StoreError> {
        lists::dead_groups(&self.shared, filter).await
    }

    async fn job(&self, id: JobId) -> Result<Option<JobDetail>, StoreError> {
        reader::job(&self.shared, id).await
    }

    async fn lanes(&self) -> Result<Vec<LaneState>, StoreError> {
        stats::lanes(&self.shared).await
    }

    async fn flush_copies(&self) {
        if self.shared.copies.are_written() {
            return;
        }
        // On a slow database the flush continues in the background, and the counts are read as they
        // are.
        let shared = Arc::clone(&self.shared);
        let flush = self.shared.tasks.spawn(async move { copies::flush(&shared).await });
        let _ = tokio::time::timeout(READ_FLUSH_MAX, flush).await;
    }

    async fn paused_handlers(&self) -> Result<Vec<PausedHandler>, StoreError> {
        stats::paused_handlers(&self.shared).await
    }

    async fn in_review(&self) -> Result<Vec<(SourceName, u64)>, StoreError> {
        stats::in_review(&self.shared).await
    }

    async fn storage(&self) -> Result<StorageUse, StoreError> {
        stats::storage(&self.shared).await
    }

    async fn sample(&self, ask: SampleAsk) -> Result<EventSample, StoreError> {
        stats::sample(&self.shared, ask).await
    }
}

impl PgStore {
    /// The verdicts, if every receipt is a plain copy of a recently committed event, and the epoch
    /// of the database has not changed since.
    fn all_recent(&self, ingest: &Ingest) -> Option<Vec<Verdict>> {
        let epoch = self.shared.epoch.confirmed()?;
        let all: Option<Vec<_>> =
            ingest.receipts.iter().map(|receipt| self.shared.recent.get(receipt)).collect();
        let all = all?;
        // The epoch is checked again: if it has changed, the entries just read may belong to the
        // previous one.
        if self.shared.epoch.confirmed()? != epoch || self.shared.closing.is_cancelled() {
            return None;
        }
        let verdicts = all.into_iter().map(|known| {
            self.shared.note_copy(known.id, &ingest.via);
            Verdict::Duplicate(known)
        });
        Some(verdicts.collect())
    }
}

impl PgStore {
    /// As [`Self::all_recent`], from entries in Redis that carry a valid seal.
    async fn all_in_front(&self, ingest: &Ingest) -> Option<Vec<Verdict>> {
        let front = self.shared.front.as_ref()?;
        let (epoch, seal) = self.shared.epoch.sealed()?;
        let keys: Vec<KeyHash> = ingest.receipts.iter().map(Receipt::key_hash).collect();
        let moments: Vec<ShardMoment> =
            keys.iter().map(|key| self.shared.recent.moment(key)).collect();
        let entries: Option<Vec<CacheEntry>> = front.ask(&seal, &keys).await.into_iter().collect();
        let entries = entries?;
        let same = |(entry, receipt): (&CacheEntry, &Receipt)| {
            adds_nothing(receipt, entry.body_hash, entry.guard)
        };
        if !entries.iter().zip(&ingest.receipts).all(same) {
            return None;
        }
        // The epoch is checked again: the answer may date from before a failover.
        if self.shared.epoch.confirmed()? != epoch || self.shared.closing.is_cancelled() {
            return None;
        }
        let verdicts = entries.into_iter().zip(keys).zip(moments).map(|((entry, key), moment)| {
            let CacheEntry { body_hash, guard, known, .. } = entry;
            self.shared.note_copy(known.id, &ingest.via);
            let recent = Recent { body_hash, guard, known: known.clone(), review: None };
            let put = || self.shared.recent.put_since(moment, key, &recent);
            self.shared.epoch.within(Some(&epoch), put);
            Verdict::Duplicate(known)
        });
        Some(verdicts.collect())
    }
}

/// An event that may be cached.
#[derive(Debug)]
struct CacheableEvent {
    key: KeyHash,
    /// A moment before the event was read.
    moment: ShardMoment,
    recent: Recent,
}

impl Shared {
    /// Lets memory and Redis answer copies of committed events whose work has ended, as long as the
    /// database is the one that `epoch` names. An event whose key was removed from the caches since its
    /// moment is left out: the status may be older than an act of an operator. Called once for a whole
    /// commit.
    fn remember(&self, epoch: Option<&Epoch>, mut events: Vec<CacheableEvent>) {
        events.retain(|event| event.recent.known.status.is_final());
        if events.is_empty() {
            return;
        }
        self.write_to_front(epoch, &events);
        self.epoch.within(epoch, || {
            let put = |CacheableEvent { key, moment, recent }: &CacheableEvent| {
                self.recent.put_since(*moment, *key, recent);
            };
            events.iter().for_each(put);
        });
    }

    /// Queues the entries of these events for Redis.
    fn write_to_front(&self, epoch: Option<&Epoch>, events: &[CacheableEvent]) {
        let (Some(front), Some((now, seal))) = (&self.front, self.epoch.sealed()) else { return };
        if Some(&now) != epoch {
            return;
        }
        let is_unchanged =
            |event: &&CacheableEvent| self.recent.is_unchanged(event.moment, &event.key);
        let open = |event: &&CacheableEvent| event.recent.review.is_none();
        let written: Vec<_> = events.iter().filter(open).filter(is_unchanged).collect();
        let written_at = Timestamp::now();
        let entry = |event: &&CacheableEvent| {
            let Recent { body_hash, guard, known, .. } = event.recent.clone();
            (event.key, CacheEntry { body_hash, guard, known, written_at })
        };
        front.write(seal, written.iter().map(entry));
        // A key that is removed after this check is deleted from Redis after the entry was written, unless the queue
        // is full.
        let changed = written.iter().filter(|event| !is_unchanged(event));
        front.remove(changed.map(|event| event.key));
    }

    /// Removes these keys from memory and Redis, because their entries are no longer valid.
    fn remove_from_caches(&self, keys: &[KeyHash]) {
        // Memory comes first: see [`Shared::write_to_front`].
        keys.iter().for_each(|key| self.recent.remove(key));
        if let Some(front) = &self.front {
            front.remove(keys.iter().copied());
        }
    }

    /// The injected time; `None` means the database's own clock, which every statement reads
    /// itself.
    fn now(&self) -> Option<Timestamp> {
        self.clock.as_ref().map(|clock| clock())
    }

    /// Runs an act to its end even if its caller stops waiting.
    async fn run_to_completion<T: Send + 'static>(
        &self,
        act: impl Future<Output = Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StoreError> {
        if self.closing.is_cancelled() {
            return Err(StoreError::Closed);
        }
        match self.tasks.spawn(act).await {
            Ok(answer) => answer,
            Err(_) => Err(StoreError::Unavailable("the call was interrupted".into())),
        }
    }

    /// Clears everything cached, because the database was replaced by another one.
    fn forget_all(&self) {
        self.pools.renew();
        self.names.clear();
        self.recent.clear();
    }

    /// Counts a copy; the count is written later.
    fn note_copy(&self, event: EventId, via: &ArrivalInfo) {
        if self.copies.note(event, via) {
            self.copies_full.notify_one();
        }
    }
}

/// Whether writing works, as of the last attempt.
#[derive(Debug, Default)]
struct WriteHealth(Mutex<Option<Cause>>);

impl WriteHealth {
    fn check(&self) -> Result<(), StoreError> {
        match &*self.0.lock().expect("no panic happens under this lock") {
            None => Ok(()),
            Some(cause) => Err(StoreError::Unavailable(cause.clone())),
        }
    }

    fn works(&self) {
        let before = self.0.lock().expect("no panic happens under this lock").take();
        if before.is_some() {
            tracing::info!("the database accepts writes again");
        }
    }

    fn fails(&self, cause: &Cause) {
        let mut now = self.0.lock().expect("no panic happens under this lock");
        if now.replace(cause.clone()).is_none() {
            tracing::warn!("the database accepts no writes: {cause}");
        }
    }
}
