//! The embedded store: one SQLite file, one thread that writes it, and separate readers.
//!
//! Read [`writer`] first: it owns the connection and decides every race. [`key_index`] finds keys,
//! [`open`] opens and locks the file. [`crate::recent`] answers copies from memory, [`copy_answers`]
//! those of all other committed events, and [`reader_threads`] runs queries of operators.

mod admin_records;
mod checkpoint;
mod clock;
mod copies;
mod copy_answers;
mod endpoint_history;
mod event_plans;
mod existing;
mod filter_rebuild;
mod fresh_events;
mod functions;
mod jobs;
mod key_filter;
mod key_index;
mod key_records;
mod key_usage;
mod ledger;
mod lists;
mod log_rewrite;
mod log_writes;
mod lone_sender;
mod new_rows;
mod open;
mod operator_actions;
mod order;
mod outbox;
mod plans;
mod portal_links;
mod prune;
mod reader;
mod reader_threads;
mod rejections;
mod row;
mod sandbox;
mod search_index;
mod source_secrets;
mod sql_handlers;
mod stats;
mod tenant_deletion;
#[cfg(test)]
mod tests;
mod traffic_history;
mod transact;
mod transaction;
mod verifiers;
mod work;
mod writer;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hapax_core::handler::SqlProgram;
use hapax_core::job::JobId;
use hapax_core::store::{
    DeadGroups, EventDetail, EventFilter, EventId, EventName, EventSample, EventSummary, Ingest,
    Inspect, JobDetail, JobFilter, LaneState, Lookup, Page, PausedHandler, SampleAsk, StorageUse,
    Store, StoreError, StoreHints, Verdict,
};
use hapax_core::{EventKey, SourceName, Timestamp};
use rusqlite::Connection;
use tokio::sync::{Notify, oneshot};

pub use open::OpenError;
pub use transact::{Db, DbError, Tx};

use crate::copies::Copies;
use crate::copy_pacing::CopyPacing;
use crate::known_nodes::KnownNodes;
use crate::limits::READ_FLUSH_MAX;
use crate::operator_acts::OperatorActs;
use crate::recent::RecentEvents;
use crate::sealed_values::SealedValue;
use copy_answers::CopyAnswers;
use key_index::{KeyLocation, KnownKeys};
use reader_threads::Readers;
use writer::{WriteHealth, Writer, WriterHandle};

/// The source of time for leases and due times.
pub type Clock = Arc<dyn Fn() -> Timestamp + Send + Sync>;

/// How to open a database.
#[derive(Clone)]
pub struct SqliteOptions {
    /// The directory that holds `hapax.db`; created if it does not exist.
    pub directory: PathBuf,
    /// The clock.
    pub clock: Clock,
    /// The longest accepted body; it bounds the values that a handler's statements may build.
    pub max_body: usize,
}

impl SqliteOptions {
    /// A database in `directory`, on the system's clock.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self { directory: directory.into(), clock: Arc::new(Timestamp::now), max_body: 1 << 20 }
    }
}

/// Events in one SQLite file, owned by this process.
#[derive(Debug)]
pub struct SqliteStore {
    writer: WriterHandle,
    copy_answers: CopyAnswers,
    readers: Readers,
    shared: Arc<Shared>,
    path: PathBuf,
    clock: ReadClock,
}

/// The clock of reads that depend on the time.
struct ReadClock(Clock);

impl fmt::Debug for ReadClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReadClock")
    }
}

/// State shared by the writer and the store's methods.
#[derive(Debug)]
struct Shared {
    recent: RecentEvents,
    /// The keys of committed events, as far as they are in memory.
    keys: Arc<KnownKeys>,
    copies: Copies<i64>,
    health: WriteHealth,
    /// Paces the answers to copies.
    pacing: CopyPacing,
    /// The nodes that checked in: those of this process, which owns the file.
    nodes: Mutex<KnownNodes>,
    /// Notified when jobs were written.
    arrived: Notify,
    /// Holds a notification while deliveries may be due and no sender has asked for them.
    deliveries: Notify,
    operator_acts: OperatorActs,
}

impl Shared {
    fn nodes(&self) -> MutexGuard<'_, KnownNodes> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SqliteStore {
    /// Opens or creates the database. Blocks until every key is loaded: nothing is accepted before
    /// that.
    pub fn open(options: SqliteOptions) -> Result<Self, OpenError> {
        let place = Arc::new(
            open::DatabaseLocation::own(&options.directory)?.for_bodies_of(options.max_body),
        );
        let shared = Arc::new(Shared {
            recent: RecentEvents::new(),
            keys: Arc::default(),
            copies: Copies::new(),
            health: WriteHealth::default(),
            pacing: CopyPacing::default(),
            nodes: Mutex::default(),
            arrived: Notify::new(),
            deliveries: Notify::new(),
            operator_acts: OperatorActs::default(),
        });
        let path = place.path().to_owned();
        let clock = ReadClock(Arc::clone(&options.clock));
        let writer = WriterHandle::start(Arc::clone(&place), Arc::clone(&shared), options.clock)?;
        let copy_answers = CopyAnswers::start(&place, &shared, writer.sender())?;
        let readers = Readers::open(&place)?;
        Ok(Self { writer, copy_answers, readers, shared, path, clock })
    }

    /// Prepares the statements of each program against the database at `file`, as a handler would
    /// run them. Returns for each program why one of its statements cannot run. Changes nothing; a
    /// server may have the file open. Without a file, only statements that fail on every database
    /// are found.
    pub fn check_statements(
        file: &Path,
        programs: &[Arc<SqlProgram>],
    ) -> Result<Vec<Option<String>>, rusqlite::Error> {
        sql_handlers::check(file, programs)
    }

    /// The database file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes pending copies, closes the file and releases its lock. Later calls answer `Closed`.
    pub async fn close(&self) {
        self.copy_answers.close();
        self.writer.close().await;
        // The readers close last, because they cannot write. SQLite copies the log into the file when the last
        // connection closes, and after a failed sync the log may have holes on disk.
        self.readers.close();
    }
}

impl Store for SqliteStore {
    async fn ingest(&self, ingest: Ingest) -> Result<Vec<Verdict>, StoreError> {
        if let Some(verdicts) = self.all_recent(&ingest) {
            self.shared.pacing.pass().await;
            return Ok(verdicts);
        }
        let (answer, verdicts) = oneshot::channel();
        if self.copy_answers.may_answer(&ingest) {
            self.copy_answers.ask(ingest, answer);
        } else {
            self.writer.ingest(ingest, answer);
        }
        let verdicts = verdicts.await.unwrap_or(Err(StoreError::Closed))?;
        if verdicts.iter().all(|verdict| matches!(verdict, Verdict::Duplicate(_))) {
            self.shared.pacing.pass().await;
        }
        Ok(verdicts)
    }

    fn writable(&self) -> Result<(), StoreError> {
        self.shared.health.check()
    }
}

impl StoreHints for SqliteStore {
    async fn knows(&self, key: &EventKey) -> Result<bool, StoreError> {
        let hash = key.hash();
        if let KeyLocation::At(_) = self.shared.keys.locate(&hash) {
            return Ok(true);
        }
        Ok(self.writer.find(vec![hash]).await?.iter().any(Option::is_some))
    }

    fn foreground_requests(&self) -> Option<u64> {
        Some(self.writer.foreground_requests())
    }
}

impl SqliteStore {
    /// Which key of the vault each sealed value in `hapax.db` of this directory needs. Opens the file for
    /// reading only, while a server may be running.
    pub fn sealed_values(directory: &Path) -> Result<Vec<SealedValue>, rusqlite::Error> {
        source_secrets::sealed_values(&directory.join(open::FILE))
    }

    /// The verdicts, if every receipt is a plain copy of an event that was committed recently.
    fn all_recent(&self, ingest: &Ingest) -> Option<Vec<Verdict>> {
        let all: Option<Vec<_>> =
            ingest.receipts.iter().map(|receipt| self.shared.recent.get(receipt)).collect();
        let mut full = false;
        let verdicts = all?
            .into_iter()
            .map(|known| {
                full |= self.shared.copies.note(row::seq_of(known.id), &ingest.via);
                Verdict::Duplicate(known)
            })
            .collect();
        if full {
            self.writer.flush_soon();
        }
        Some(verdicts)
    }
}

impl Inspect for SqliteStore {
    async fn events(&self, filter: EventFilter) -> Result<Page<EventSummary>, StoreError> {
        self.readers.search(move |conn| lists::events(conn, &filter)).await
    }

    async fn event(&self, name: &EventName) -> Result<Lookup<EventDetail>, StoreError> {
        let seqs = match name {
            EventName::Ours(id) => vec![row::seq_of(*id)],
            EventName::Theirs(event_id) => {
                let pairs = self.readers.run(reader::pairs).await?;
                let hashes = pairs
                    .into_iter()
                    .map(|(tenant, source)| {
                        EventKey { tenant, source, event_id: event_id.clone() }.hash()
                    })
                    .collect();
                self.writer.find(hashes).await?.into_iter().flatten().collect()
            }
        };
        let name = name.clone();
        self.readers.run(move |conn| reader::event(conn, &name, &seqs)).await
    }

    async fn events_traced_by(&self, id: &str) -> Result<Vec<EventId>, StoreError> {
        let id = id.to_owned();
        self.readers.run(move |conn| reader::traced_by(conn, &id)).await
    }

    async fn jobs(&self, filter: JobFilter) -> Result<Page<JobDetail>, StoreError> {
        self.readers.search(move |conn| lists::jobs(conn, &filter)).await
    }

    async fn dead_groups(&self, filter: JobFilter) -> Result<DeadGroups, StoreError> {
        self.readers.search(move |conn| lists::dead_groups(conn, &filter)).await
    }

    async fn job(&self, id: JobId) -> Result<Option<JobDetail>, StoreError> {
        self.readers.run(move |conn| reader::job(conn, id)).await
    }

    async fn lanes(&self) -> Result<Vec<LaneState>, StoreError> {
        self.readers.run(stats::lanes).await
    }

    async fn flush_copies(&self) {
        if self.shared.copies.are_written() {
            return;
        }
        // The copies are written in pieces, so that acks wait for one piece at most.
        let flush = async {
            let mut until = None;
            loop {
                let flush = move |writer: &mut Writer| writer.flush_some_copies(until);
                match self.writer.behind(flush).await {
                    Ok(Some(more)) => until = Some(more),
                    Ok(None) | Err(_) => return,
                }
            }
        };
        // If the flush takes longer, the counts are read as they are.
        let _ = tokio::time::timeout(READ_FLUSH_MAX, flush).await;
    }

    async fn paused_handlers(&self) -> Result<Vec<PausedHandler>, StoreError> {
        self.readers.run(stats::paused_handlers).await
    }

    async fn in_review(&self) -> Result<Vec<(SourceName, u64)>, StoreError> {
        self.readers.run(stats::in_review).await
    }

    async fn storage(&self) -> Result<StorageUse, StoreError> {
        self.readers.run(stats::storage).await
    }

    async fn sample(&self, ask: SampleAsk) -> Result<EventSample, StoreError> {
        self.readers.run(move |conn| stats::sample(conn, ask)).await
    }
}

/// A number of `hapax_meta`.
fn meta(conn: &Connection, name: &str) -> rusqlite::Result<i64> {
    conn.query_row("SELECT value FROM hapax_meta WHERE name = ?1", [name], |row| row.get(0))
}
