//! The one thread that writes. The writer takes the waiting commands, decides each race ([`decide`]), and
//! commits once for the whole batch. No request is answered before that commit.
//!
//! Requests that arrive during a commit are batched into the next one. If a commit does not return
//! OK, every request of its batch gets an error, and nothing of the batch stays in memory: see
//! [`Writer::recover`].

mod decide;

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SendError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hapax_core::job::{Fence, JobId};
use hapax_core::store::{
    ArrivalInfo, Cause, Ingest, Ran, SqlAsk, SqlRan, SqlRun, StoreError, Verdict,
};
use hapax_core::{KeyHash, SourceName, Tenant, Timestamp};
use hapax_core::{failpoint, tuned};
use rusqlite::Connection;
use tokio::sync::oneshot;

use super::Clock;
use super::Shared;
use super::checkpoint::{self, Checkpointer};
use super::clock::{self, ClockWatch};
use super::copies;
use super::jobs::{Lanes, NO_LANE_LEFT};
use super::key_index::{KeyIndex, MergeError};
use super::key_usage::KeyUsage;
use super::ledger::FenceBlock;
use super::log_rewrite::RewriteError;
use super::lone_sender::NEXT_REQUEST_WITHIN;
use super::meta;
use super::new_rows::NewRows;
use super::open::{self, DatabaseLocation, OpenError};
use super::outbox::Outbox;
use super::prune::PruneProgress;
use super::row::Ids;
use super::sandbox::Sandbox;
use super::sql_handlers::SqlRunner;
use super::transaction::Transaction;
use crate::copies::UnwrittenCopies;
use crate::limits::{
    BATCH_BYTES_MAX, BATCH_RECEIPTS_MAX, COPIES_CHUNK, COPIES_FLUSH, LOG_RETRY, LOG_WARN,
    RECOVERY_WAIT, WAITING_MAX, WAL_PAGES_CHECKPOINT, WAL_PAGES_MAX,
};
use crate::recent::Recent;

/// The writer thread, and the sender of its commands.
#[derive(Debug)]
pub(super) struct WriterHandle {
    sender: WriterSender,
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Sends commands to the writer thread.
#[derive(Debug, Clone)]
pub(super) struct WriterSender {
    commands: Sender<Command>,
    waiting: Arc<AtomicUsize>,
    /// Events and slices that were sent.
    demand: Arc<AtomicU64>,
}

impl WriterSender {
    /// Passes a request to the writer, which answers it.
    pub(super) fn ingest(&self, ingest: Ingest, answer: AnswerSender<Vec<Verdict>>) {
        self.demand.fetch_add(1, Ordering::Relaxed);
        if let Err(unsent) = self.send_or_return(Command::Ingest(ingest, answer)) {
            let (command, why) = *unsent;
            refuse(command, &why);
        }
    }

    /// Asks for the waiting copies to be written now, once until they are taken. A full queue may drop the
    /// request: copies are flushed periodically anyway.
    pub(super) fn flush_soon(&self) {
        let _ = self.send(Command::FlushCopies);
    }

    fn send(&self, command: Command) -> Result<(), StoreError> {
        self.send_or_return(command).map_err(|unsent| unsent.1)
    }

    /// Sends a command unless too many wait.
    fn send_or_return(&self, command: Command) -> Result<(), Box<(Command, StoreError)>> {
        if self.waiting.fetch_add(1, Ordering::Relaxed) >= WAITING_MAX {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            return Err(Box::new((command, StoreError::Busy)));
        }
        let sent = self.commands.send(command);
        sent.map_err(|SendError(command)| Box::new((command, StoreError::Closed)))
    }

    /// Asks the writer to end, after everything that waits.
    fn close(&self, closed: oneshot::Sender<()>) -> bool {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        self.commands.send(Command::Close(closed)).is_ok()
    }
}

/// The commands that wait. The queue takes memory only for those; their number is bounded by
/// [`WAITING_MAX`].
struct Commands {
    queue: Receiver<Command>,
    waiting: Arc<AtomicUsize>,
}

impl Commands {
    fn try_recv(&self) -> Option<Command> {
        let command = self.queue.try_recv().ok()?;
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        Some(command)
    }

    /// Looks for a command for a moment before [`Commands::receive_within`] lets the thread sleep.
    fn receive_soon(&self, moment: Duration, at_most: Duration) -> Next {
        let began = Instant::now();
        while began.elapsed() < moment {
            if self.waiting.load(Ordering::Relaxed) > 0
                && let Some(command) = self.try_recv()
            {
                return Next::Command(command);
            }
            // Another thread that could run on this core goes first.
            std::thread::yield_now();
        }
        self.receive_within(at_most)
    }

    fn receive_within(&self, at_most: Duration) -> Next {
        match self.queue.recv_timeout(at_most) {
            Ok(command) => {
                self.waiting.fetch_sub(1, Ordering::Relaxed);
                Next::Command(command)
            }
            Err(RecvTimeoutError::Timeout) => Next::Housekeeping,
            Err(RecvTimeoutError::Disconnected) => Next::NobodyLeft,
        }
    }
}

/// Whether writing works.
#[derive(Debug, Default)]
pub(super) struct WriteHealth(Mutex<Option<Cause>>);

type AnswerSender<T> = oneshot::Sender<Result<T, StoreError>>;

/// Called with the writer, or with the reason why the writer is not available.
type Slice = Box<dyn FnOnce(Result<&mut Writer, StoreError>) -> rusqlite::Result<()> + Send>;

/// Called with the writer inside the batch's transaction, or with the reason why the writer is not
/// available.
type BatchedAct = Box<
    dyn FnOnce(Result<&mut Writer, StoreError>) -> rusqlite::Result<BatchResult<Answerer>> + Send,
>;

/// Answers a batched act when its transaction has ended.
type Answerer = Box<dyn FnOnce(Result<(), StoreError>) + Send>;

/// The result of a batched act.
pub(super) struct BatchResult<T> {
    value: T,
    wrote: bool,
    /// Bytes that the act read and holds until the batch has ended.
    bytes: usize,
    kind: ActKind,
}

/// The kinds of batched acts. Each has its own points at which a test ends the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ActKind {
    /// An act on a reservation.
    Reservation,
    /// A message was published.
    Publish,
    /// Deliveries were settled and claimed.
    Exchange,
}

impl<T> BatchResult<T> {
    /// The act wrote: it must be on disk before its caller gets the answer.
    pub(super) fn wrote(value: T) -> Self {
        Self { value, wrote: true, bytes: 0, kind: ActKind::Reservation }
    }

    /// The act only read: it needs no commit.
    pub(super) fn only_read(value: T) -> Self {
        Self { value, wrote: false, bytes: 0, kind: ActKind::Reservation }
    }

    /// Declares how many bytes the act holds.
    pub(super) fn holding(self, bytes: usize) -> Self {
        Self { bytes, ..self }
    }

    /// The act is of this kind.
    pub(super) fn of(self, kind: ActKind) -> Self {
        Self { kind, ..self }
    }
}

enum Command {
    Ingest(Ingest, AnswerSender<Vec<Verdict>>),
    /// An act that shares the batch's transaction, and the number of its bytes.
    Batched(usize, BatchedAct),
    /// A batched act that lets waiting events go first.
    BehindEvents(BatchedAct),
    Find(Vec<KeyHash>, AnswerSender<Vec<Option<i64>>>),
    FlushCopies,
    /// A closure with its own transactions, which answers its caller itself, even when it is refused.
    Slice(Slice),
    Close(oneshot::Sender<()>),
    /// Lets a test reach the writer's own connection, to make it fail.
    #[cfg(test)]
    Tamper(Box<dyn FnOnce(&mut Connection) + Send>),
    #[cfg(test)]
    MergeNow,
}

impl WriteHealth {
    pub(super) fn check(&self) -> Result<(), StoreError> {
        match &*self.0.lock().expect("no panic happens under this lock") {
            None => Ok(()),
            Some(cause) => Err(StoreError::Unavailable(cause.clone())),
        }
    }

    /// Marks writing as ended, unless an earlier failure is already recorded.
    fn end(&self, why: &str) {
        self.0.lock().expect("no panic happens under this lock").get_or_insert_with(|| why.into());
    }

    fn set(&self, trouble: Option<Cause>) {
        *self.0.lock().expect("no panic happens under this lock") = trouble;
    }
}

impl WriterHandle {
    pub(super) fn start(
        place: Arc<DatabaseLocation>,
        shared: Arc<Shared>,
        clock: Clock,
    ) -> Result<Self, OpenError> {
        let (commands, queue) = channel();
        let sender = WriterSender { commands, waiting: Arc::default(), demand: Arc::default() };
        let commands = Commands { queue, waiting: Arc::clone(&sender.waiting) };
        let writer = Writer::open(place, Arc::clone(&shared), clock)?;
        let path = writer.place.path().to_owned();
        let thread = std::thread::Builder::new()
            .name("hapax-writer".into())
            .spawn(move || {
                let _last_word = WriterEnded(Arc::clone(&writer.shared));
                writer.run(&commands);
            })
            .map_err(|source| OpenError::Io { path, source })?;
        Ok(Self { sender, shared, thread: Mutex::new(Some(thread)) })
    }

    /// The sender of its commands.
    pub(super) fn sender(&self) -> WriterSender {
        self.sender.clone()
    }

    /// See [`WriterSender::ingest`].
    pub(super) fn ingest(&self, ingest: Ingest, answer: AnswerSender<Vec<Verdict>>) {
        self.sender.ingest(ingest, answer);
    }

    /// The rows with these keys.
    pub(super) async fn find(&self, keys: Vec<KeyHash>) -> Result<Vec<Option<i64>>, StoreError> {
        let (answer, found) = oneshot::channel();
        self.send(Command::Find(keys, answer))?;
        found.await.unwrap_or(Err(StoreError::Closed))
    }

    /// Runs `act` on the writer, in a transaction that is committed before this returns. Dropping
    /// the future does not undo it.
    pub(super) async fn act<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Writer) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.slice(move |writer| writer.in_transaction(act)).await
    }

    /// Runs `slice` on the writer between two batches; it manages its own transactions.
    pub(super) async fn slice<T: Send + 'static>(
        &self,
        slice: impl FnOnce(&mut Writer) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.sender.demand.fetch_add(1, Ordering::Relaxed);
        self.behind(slice).await
    }

    /// Runs `act` in the transaction of the next batch, and answers once that is committed. `act`
    /// must neither commit nor roll back. Dropping the future does not undo it.
    pub(super) async fn run_batched<T: Send + 'static>(
        &self,
        bytes: usize,
        act: impl FnOnce(&mut Writer) -> rusqlite::Result<BatchResult<T>> + Send + 'static,
    ) -> Result<T, StoreError> {
        let done = self.batched(act, |batched| Command::Batched(bytes, batched))?;
        self.shared.lone_sender.answer(done).await
    }

    /// Like [`WriterHandle::run_batched`], for an act that may take a while. Events that wait when the writer
    /// reaches it are committed first.
    pub(super) async fn run_behind_events<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Writer) -> rusqlite::Result<BatchResult<T>> + Send + 'static,
    ) -> Result<T, StoreError> {
        let done = self.batched(act, Command::BehindEvents)?;
        done.await.unwrap_or(Err(StoreError::Closed))
    }

    fn batched<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Writer) -> rusqlite::Result<BatchResult<T>> + Send + 'static,
        command: impl FnOnce(BatchedAct) -> Command,
    ) -> Result<oneshot::Receiver<Result<T, StoreError>>, StoreError> {
        self.sender.demand.fetch_add(1, Ordering::Relaxed);
        let (answer, done) = oneshot::channel();
        let batched: BatchedAct = Box::new(move |writer| match writer.map(act) {
            Ok(Ok(BatchResult { value, wrote, bytes, kind })) => {
                let answerer: Answerer = Box::new(move |ended: Result<(), StoreError>| {
                    let _ = answer.send(ended.map(|()| value));
                });
                Ok(BatchResult { value: answerer, wrote, bytes, kind })
            }
            Ok(Err(error)) => {
                let _ = answer.send(Err(unavailable(&error)));
                Err(error)
            }
            Err(refusal) => {
                let _ = answer.send(Err(refusal));
                Ok(BatchResult::only_read(Box::new(|_| {})))
            }
        });
        self.send(command(batched))?;
        Ok(done)
    }

    /// How many events and slices were sent, except those of [`WriterHandle::behind`].
    pub(super) fn foreground_requests(&self) -> u64 {
        self.sender.demand.load(Ordering::Relaxed)
    }

    /// Like [`WriterHandle::slice`], for background work: it does not count as demand.
    pub(super) async fn behind<T: Send + 'static>(
        &self,
        slice: impl FnOnce(&mut Writer) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (answer, done) = oneshot::channel();
        self.send(Command::Slice(Box::new(move |writer| match writer.map(slice) {
            Ok(Ok(value)) => {
                let _ = answer.send(Ok(value));
                Ok(())
            }
            Ok(Err(error)) => {
                let _ = answer.send(Err(unavailable(&error)));
                Err(error)
            }
            Err(refusal) => {
                let _ = answer.send(Err(refusal));
                Ok(())
            }
        })))?;
        done.await.unwrap_or(Err(StoreError::Closed))
    }

    /// See [`WriterSender::flush_soon`].
    pub(super) fn flush_soon(&self) {
        self.sender.flush_soon();
    }

    pub(super) async fn close(&self) {
        let (closed, wait) = oneshot::channel();
        if self.sender.close(closed) {
            let _ = wait.await;
        }
        let thread = self.thread.lock().expect("no panic happens under this lock").take();
        if let Some(thread) = thread {
            let joined = tokio::task::spawn_blocking(move || thread.join()).await;
            if !matches!(joined, Ok(Ok(()))) {
                tracing::error!("the writer panicked");
            }
        }
    }

    /// The thread, so that a test can wait for its end without closing the store.
    #[cfg(test)]
    pub(super) fn take_thread(&self) -> Option<JoinHandle<()>> {
        self.thread.lock().expect("no panic happens under this lock").take()
    }

    #[cfg(test)]
    pub(super) fn merge_now(&self) {
        self.send(Command::MergeNow).expect("the writer listens");
    }

    #[cfg(test)]
    pub(super) fn tamper(&self, tamper: impl FnOnce(&mut Connection) + Send + 'static) {
        self.send(Command::Tamper(Box::new(tamper))).expect("the writer listens");
    }

    fn send(&self, command: Command) -> Result<(), StoreError> {
        self.sender.send(command)
    }
}

/// When the writer thread ends, for whatever reason, the store is no longer writable and nothing is
/// answered from memory.
struct WriterEnded(Arc<Shared>);

impl Drop for WriterEnded {
    fn drop(&mut self) {
        let why =
            if std::thread::panicking() { "the writer panicked" } else { "the store is closed" };
        self.0.health.end(why);
        self.0.recent.clear();
    }
}

pub(super) struct Writer {
    place: Arc<DatabaseLocation>,
    pub(super) shared: Arc<Shared>,
    pub(super) conn: Connection,
    pub(super) lanes: Lanes,
    pub(super) outbox: Outbox,
    pub(super) sandbox: Sandbox,
    clock: Clock,
    pub(super) checkpointer: Checkpointer,
    pub(super) index: KeyIndex,
    pub(super) fences: FenceBlock,
    /// The usage of the callers of APIs, as the open transaction knows it.
    pub(super) key_usage: KeyUsage,
    /// The jobs that the running slice of an SQL handler has claimed.
    begun: Vec<(JobId, Fence)>,
    event_rate: EventRate,
    /// Acts that let the events of the last batch go first. The next batch begins with these acts.
    deferred: Vec<BatchedAct>,
    /// Keys whose entries in memory are wrong once the open transaction is committed.
    unlearned: Vec<KeyHash>,
    pub(super) prune_progress: PruneProgress,
    pub(super) clock_watch: ClockWatch,
    pub(super) pairs: HashMap<(Tenant, SourceName), i64>,
    ids: Ids,
    last_seq: i64,
    pub(super) wal_pages: Arc<AtomicU32>,
    /// The number of pages in the log when the checkpointer was last asked.
    asked_at: u32,
    copies_due: Instant,
    /// Copies that were taken and are not written yet, in the order of their events.
    copies_taken: std::vec::IntoIter<(i64, UnwrittenCopies)>,
    /// How often copies were taken.
    copies_round: u64,
    log_due: Instant,
    recovered_at: Option<Instant>,
    commit_seconds: metrics::Histogram,
    batch_size: metrics::Histogram,
}

/// How many events arrive, measured over [`EVENT_RATE_OVER`].
#[derive(Debug, Default)]
struct EventRate {
    since: Option<Instant>,
    count: usize,
    is_busy: bool,
}

/// The span over which events are counted: long enough that `is_busy` changes rarely. After each change, a
/// sender's next claim checks all endpoints.
const EVENT_RATE_OVER: Duration = Duration::from_millis(100);

/// Events within [`EVENT_RATE_OVER`] from which on the store counts as busy: a thousand a second.
const BUSY_EVENTS: usize = 100;

impl EventRate {
    fn is_busy(&mut self, now: Instant) -> bool {
        match self.since {
            Some(since) if now.duration_since(since) < EVENT_RATE_OVER => {}
            since => {
                // After a long time without this question, the count says little about the present.
                let is_recent =
                    since.is_some_and(|at| now.duration_since(at) < 2 * EVENT_RATE_OVER);
                self.is_busy = is_recent && self.count >= BUSY_EVENTS;
                (self.since, self.count) = (Some(now), 0);
            }
        }
        self.is_busy
    }
}

/// Answers that wait for the commit.
#[derive(Default)]
struct Batch {
    answers: Vec<(AnswerSender<Vec<Verdict>>, Vec<Verdict>)>,
    answerers: Vec<Answerer>,
    rows: NewRows,
    recent: Vec<(KeyHash, Recent)>,
    copies: Vec<(i64, ArrivalInfo)>,
    receipts: usize,
    bytes: usize,
    /// Whether anything was written; a batch of nothing but copies needs no commit.
    wrote: bool,
    /// Whether jobs were written.
    work: bool,
    /// The kinds of the acts that wrote.
    kinds: Vec<ActKind>,
}

impl Batch {
    /// Whether the batch's transaction has not begun.
    fn is_empty(&self) -> bool {
        self.answers.is_empty() && self.answerers.is_empty()
    }

    fn is_full(&self) -> bool {
        self.receipts + self.answerers.len() >= BATCH_RECEIPTS_MAX || self.bytes >= BATCH_BYTES_MAX
    }

    fn fail(self, error: &rusqlite::Error) {
        let why = unavailable(error);
        for (answer, _) in self.answers {
            let _ = answer.send(Err(why.clone()));
        }
        for answerer in self.answerers {
            answerer(Err(why.clone()));
        }
    }
}

/// The command that runs after a batch because it must not share it.
enum NextBatch {
    Nothing,
    Slice(Slice),
    Close(oneshot::Sender<()>),
}

/// The next step of the writer's loop.
enum Next {
    Command(Command),
    /// Acts were deferred.
    Deferred,
    Housekeeping,
    NobodyLeft,
}

impl Writer {
    fn open(
        place: Arc<DatabaseLocation>,
        shared: Arc<Shared>,
        clock: Clock,
    ) -> Result<Self, OpenError> {
        let fail = |source| place.error(source);
        let mut conn = place.writer().map_err(fail)?;
        place.rewrite_old_log(&conn)?;
        let settled = open::settle_log(&conn).map_err(fail)?;
        open::refuse_entangled(&place, &conn)?;
        open::migrate(&place, &mut conn)?;
        if !settled {
            // Another process reads the file and kept part of the log in place. The sync of this
            // commit makes durable what a dead process had written but not synced.
            raise_epoch(&conn).map_err(fail)?;
        }
        let wal_pages = Arc::new(AtomicU32::new(0));
        watch_log(&mut conn, &wal_pages).map_err(fail)?;
        let checkpointer = place.checkpointer().map_err(fail)?;
        let checkpointer = Checkpointer::start(checkpointer)
            .map_err(|source| OpenError::Io { path: place.path().to_owned(), source })?;
        let sandbox = Sandbox::on(&mut conn, place.value_bytes_max()).map_err(fail)?;
        let index = KeyIndex::load(&conn, Arc::clone(&shared.keys)).map_err(fail)?;
        let pairs = load_pairs(&conn).map_err(fail)?;
        let last_seq = last_seq(&conn).map_err(fail)?;
        let lanes = Lanes::load(&conn, HashMap::new(), false).map_err(fail)?;
        let outbox = Outbox::load(&conn, Arc::default()).map_err(fail)?;
        let mut writer = Self {
            shared,
            conn,
            lanes,
            outbox,
            sandbox,
            clock,
            begun: Vec::new(),
            deferred: Vec::new(),
            event_rate: EventRate::default(),
            unlearned: Vec::new(),
            prune_progress: PruneProgress::default(),
            clock_watch: ClockWatch::default(),
            checkpointer,
            index,
            fences: FenceBlock::default(),
            key_usage: KeyUsage::default(),
            pairs,
            ids: Ids::default(),
            last_seq,
            wal_pages,
            asked_at: 0,
            copies_due: Instant::now(),
            copies_taken: Vec::new().into_iter(),
            copies_round: 0,
            log_due: Instant::now(),
            recovered_at: None,
            commit_seconds: metrics::histogram!("hapax_store_commit_seconds"),
            batch_size: metrics::histogram!("hapax_store_batch_size"),
            place,
        };
        let freed = writer.in_transaction(|writer| {
            let now = writer.now();
            writer.outbox.free_leases(&writer.conn, now)
        });
        freed.map_err(|source| writer.place.error(source))?;
        Ok(writer)
    }

    /// Runs until closed. A broken invariant stops the writer with an error in the log: every later
    /// call answers `Closed`.
    fn run(mut self, waiting: &Commands) {
        loop {
            let worked = match self.next(waiting) {
                // Runs before the command, which searches for due work by the current clock.
                Next::Command(first) => match clock::handle_step(&mut self) {
                    Ok(()) => self.work(Some(first), waiting),
                    Err(error) => {
                        refuse(first, &unavailable(&error));
                        Err(error)
                    }
                },
                Next::Deferred => {
                    clock::handle_step(&mut self).and_then(|()| self.work(None, waiting))
                }
                Next::Housekeeping => {
                    clock::handle_step(&mut self).map(|()| ControlFlow::Continue(()))
                }
                Next::NobodyLeft => return,
            };
            if self.outbox.take_woken() {
                self.shared.deliveries.notify_one();
            }
            let kept = match worked {
                Ok(ControlFlow::Break(())) => return,
                Ok(ControlFlow::Continue(())) => self.housekeep(),
                Err(error) => Err(error.into()),
            };
            match kept {
                Ok(()) => {}
                Err(MergeError::Sqlite(error)) => {
                    if self.recover(waiting, &error).is_break() {
                        return;
                    }
                }
                Err(broken @ (MergeError::Broken { .. } | MergeError::Doubled { .. })) => {
                    tracing::error!(error = %broken, "the store stops: {broken}");
                    self.shared.health.set(Some(broken.to_string().into()));
                    self.shared.recent.clear();
                    return;
                }
            }
        }
    }

    fn next(&mut self, waiting: &Commands) -> Next {
        if !self.deferred.is_empty() {
            return Next::Deferred;
        }
        let has_more =
            self.copies_taken.len() > 0 || self.index.wants_merge() || self.index.wants_filter();
        let at_most = if has_more || self.clock_watch.is_pulling() {
            Duration::ZERO
        } else {
            self.copies_due.saturating_duration_since(Instant::now())
        };
        let lone_sender = &self.shared.lone_sender;
        let began = Instant::now();
        let next = match lone_sender.expects_next() && !at_most.is_zero() {
            true => waiting.receive_soon(NEXT_REQUEST_WITHIN, at_most),
            false => waiting.receive_within(at_most),
        };
        let waited = matches!(next, Next::Command(_)).then(|| began.elapsed());
        lone_sender.waited_for_next(waited);
        next
    }

    /// Takes the deferred acts, `first` and the commands waiting behind it into one transaction, commits it and
    /// answers.
    fn work(
        &mut self,
        first: Option<Command>,
        waiting: &Commands,
    ) -> rusqlite::Result<ControlFlow<()>> {
        let mut batch = Batch::default();
        let filled = self
            .run_deferred(&mut batch)
            .and_then(|()| self.fill(&mut batch, first, waiting))
            .and_then(|then| {
                if batch.answers.is_empty() {
                    self.run_deferred(&mut batch)?;
                }
                Ok(then)
            });
        let then = match filled {
            Ok(then) => then,
            Err(error) => {
                batch.fail(&error);
                self.refuse_deferred(&unavailable(&error));
                return Err(error);
            }
        };
        let committed = self.commit(batch);
        if let Err(error) = &committed {
            self.refuse_deferred(&unavailable(error));
        }
        match (committed, then) {
            (Ok(()), NextBatch::Nothing) => Ok(ControlFlow::Continue(())),
            (Ok(()), NextBatch::Slice(slice)) => {
                slice(Ok(self))?;
                Ok(ControlFlow::Continue(()))
            }
            (Err(error), NextBatch::Nothing) => Err(error),
            (Err(error), NextBatch::Slice(slice)) => {
                let _ = slice(Err(unavailable(&error)));
                Err(error)
            }
            (committed, NextBatch::Close(closed)) => {
                self.close(waiting, committed);
                let _ = closed.send(());
                Ok(ControlFlow::Break(()))
            }
        }
    }

    /// Refuses waiting commands, flushes copies and settles the log. Closing does not wait for a
    /// disk to recover: every answered commit is in the log and stays there. If a write has failed, nothing
    /// is copied from the log, which may have holes on disk.
    fn close(&mut self, waiting: &Commands, committed: rusqlite::Result<()>) {
        self.refuse_deferred(&StoreError::Closed);
        while let Some(command) = waiting.try_recv() {
            refuse(command, &StoreError::Closed);
        }
        self.checkpointer.stop();
        let flushed =
            committed.and_then(|()| self.checkpointer.check()).and_then(|()| self.flush_copies());
        if let Err(error) = flushed {
            tracing::warn!(
                %error,
                "closing the database: a write failed, so the last counts of duplicates may be missing, and \
                 the log was not copied; the next start copies it: {error}"
            );
        } else if let Err(error) = open::settle_log(&self.conn) {
            tracing::warn!(
                %error,
                "closing the database: its log could not be copied; the next start copies it: {error}"
            );
        }
    }

    /// Processes waiting commands until the batch is full or a command must not share it.
    fn fill(
        &mut self,
        batch: &mut Batch,
        first: Option<Command>,
        waiting: &Commands,
    ) -> rusqlite::Result<NextBatch> {
        let mut next = first.or_else(|| waiting.try_recv());
        while let Some(command) = next {
            match command {
                Command::Ingest(ingest, answer) => self.take(batch, ingest, answer)?,
                Command::Batched(bytes, batched) => self.run_in_batch(batch, bytes, batched)?,
                Command::BehindEvents(batched) => self.deferred.push(batched),
                Command::Find(keys, answer) => {
                    let found: Result<Vec<_>, _> =
                        keys.iter().map(|key| self.index.find(&self.conn, key)).collect();
                    let _ = answer.send(Ok(found?));
                }
                Command::FlushCopies => self.copies_due = Instant::now(),
                Command::Slice(slice) => return Ok(NextBatch::Slice(slice)),
                Command::Close(closed) => return Ok(NextBatch::Close(closed)),
                #[cfg(test)]
                Command::Tamper(tamper) => tamper(&mut self.conn),
                #[cfg(test)]
                Command::MergeNow => self.index.merge_soon(),
            }
            if batch.is_full() {
                break;
            }
            next = waiting.try_recv();
        }
        Ok(NextBatch::Nothing)
    }

    /// Decides every receipt of one request within the batch's transaction.
    fn take(
        &mut self,
        batch: &mut Batch,
        ingest: Ingest,
        answer: AnswerSender<Vec<Verdict>>,
    ) -> rusqlite::Result<()> {
        if !self.has_lanes_for(&ingest) {
            let _ = answer.send(Err(StoreError::Unavailable(NO_LANE_LEFT.into())));
            return Ok(());
        }
        if let Err(error) = self.begin(batch) {
            let _ = answer.send(Err(unavailable(&error)));
            return Err(error);
        }
        self.event_rate.count += ingest.receipts.len();
        let mut verdicts = Vec::with_capacity(ingest.receipts.len());
        batch.receipts += ingest.receipts.len();
        // The answer is stored first: if the decision fails, the sender of the request gets the
        // error.
        batch.answers.push((answer, Vec::new()));
        for (place, receipt) in ingest.receipts.iter().enumerate() {
            batch.bytes += receipt.body().len();
            let jobs = ingest.jobs.get(place).map_or(&[][..], Vec::as_slice);
            verdicts.push(self.decide(batch, receipt, jobs, &ingest.via)?);
        }
        if let Some((_, kept)) = batch.answers.last_mut() {
            *kept = verdicts;
        }
        Ok(())
    }

    /// Whether every job of a request has a lane, or a lane can be made. This is checked before the
    /// request is decided, so that it fails alone.
    fn has_lanes_for(&self, ingest: &Ingest) -> bool {
        let jobs = || ingest.receipts.iter().zip(&ingest.jobs);
        if self.lanes.has_room_for(jobs().map(|(_, jobs)| jobs.len()).sum()) {
            return true;
        }
        let missing = jobs().flat_map(|(receipt, jobs)| jobs.iter().map(move |job| (receipt, job)));
        let missing = missing.filter(|(receipt, job)| {
            let key = receipt.key();
            let pair = self.pairs.get(&(key.tenant.clone(), key.source.clone()));
            !pair.is_some_and(|pair| self.lanes.has(*pair, &key.source, &job.handler))
        });
        self.lanes.has_room_for(missing.count())
    }

    /// Runs an act within the batch's transaction.
    fn run_in_batch(
        &mut self,
        batch: &mut Batch,
        bytes: usize,
        batched: BatchedAct,
    ) -> rusqlite::Result<()> {
        if let Err(error) = self.begin(batch) {
            let _ = batched(Err(unavailable(&error)));
            return Err(error);
        }
        // The act may read rows of this batch, so they are inserted first.
        if let Err(error) = batch.rows.insert(&self.conn) {
            let _ = batched(Err(unavailable(&error)));
            return Err(error);
        }
        let BatchResult { value: answerer, wrote, bytes: held, kind } = batched(Ok(self))?;
        if wrote && !batch.kinds.contains(&kind) {
            batch.kinds.push(kind);
        }
        batch.answerers.push(answerer);
        batch.bytes += bytes + held;
        batch.wrote |= wrote;
        Ok(())
    }

    /// Runs the deferred acts within the batch's transaction.
    fn run_deferred(&mut self, batch: &mut Batch) -> rusqlite::Result<()> {
        let mut deferred = std::mem::take(&mut self.deferred).into_iter();
        let ran = deferred.try_for_each(|batched| self.run_in_batch(batch, 0, batched));
        // If one failed, the others are refused with the batch.
        self.deferred.extend(deferred);
        ran
    }

    fn refuse_deferred(&mut self, why: &StoreError) {
        for batched in self.deferred.drain(..) {
            let _ = batched(Err(why.clone()));
        }
    }

    fn begin(&self, batch: &Batch) -> rusqlite::Result<()> {
        if batch.is_empty() {
            self.conn.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        }
        Ok(())
    }

    /// Commits the batch and answers its requests. On an error, every request gets that error, and
    /// the caller must call [`Writer::recover`].
    fn commit(&mut self, mut batch: Batch) -> rusqlite::Result<()> {
        if batch.is_empty() {
            return Ok(());
        }
        let began = Instant::now();
        let receipts = batch.receipts;
        let end = if batch.wrote { "COMMIT" } else { "ROLLBACK" };
        let has_events = receipts > 0;
        if batch.wrote && has_events {
            failpoint!("ingress.before_commit");
        }
        for kind in &batch.kinds {
            match kind {
                ActKind::Reservation => {
                    failpoint!("idem.before_commit");
                }
                ActKind::Publish => {
                    failpoint!("publish.before_commit");
                }
                ActKind::Exchange => {
                    failpoint!("exchange.before_commit");
                }
            }
        }
        let ended = batch.rows.insert(&self.conn);
        let ended = ended.and_then(|()| self.key_usage.write(&self.conn));
        let ended = ended.and_then(|()| self.conn.prepare_cached(end)?.execute([]));
        // The system may report a failed sync of the log only once, and the checkpointer syncs it too.
        let ended = ended.and_then(|_| self.checkpointer.check());
        if let Err(error) = ended {
            batch.fail(&error);
            return Err(error);
        }
        self.index.committed();
        batch.rows.into_claimable().into_iter().for_each(|event| self.lanes.fresh.add(event));
        for (hash, recent) in &batch.recent {
            self.shared.recent.put(*hash, recent);
        }
        for (seq, via) in &batch.copies {
            if self.shared.copies.note(*seq, via) {
                self.copies_due = Instant::now();
            }
        }
        for kind in &batch.kinds {
            match kind {
                ActKind::Reservation => {
                    failpoint!("idem.after_commit");
                }
                ActKind::Publish => {
                    failpoint!("publish.after_commit");
                }
                ActKind::Exchange => {
                    failpoint!("exchange.after_commit");
                }
            }
        }
        if batch.wrote && has_events {
            failpoint!("ingress.after_commit_before_ack");
            self.commit_seconds.record(began.elapsed());
            self.batch_size.record(receipts as f64);
        }
        if batch.work {
            self.shared.arrived.notify_waiters();
        }
        let mut new_events = 0;
        for (answer, verdicts) in batch.answers {
            let accepted = |verdict: &&Verdict| matches!(verdict, Verdict::Accepted(_));
            new_events += verdicts.iter().filter(accepted).count();
            let _ = answer.send(Ok(verdicts));
        }
        for answerer in batch.answerers {
            answerer(Ok(()));
        }
        self.shared.pacing.committed(new_events);
        Ok(())
    }

    pub(super) fn now(&self) -> Timestamp {
        (self.clock)()
    }

    /// Whether many events arrive at present.
    pub(super) fn is_busy_with_events(&mut self) -> bool {
        self.event_rate.is_busy(Instant::now())
    }

    /// Runs `act` in its own transaction.
    pub(super) fn in_transaction<T>(
        &mut self,
        act: impl FnOnce(&mut Self) -> rusqlite::Result<T>,
    ) -> rusqlite::Result<T> {
        self.conn.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        let acted = act(self).and_then(|value| {
            self.conn.prepare_cached("COMMIT")?.execute([])?;
            Ok(value)
        });
        if acted.is_err() && !self.conn.is_autocommit() {
            self.conn.execute_batch("ROLLBACK")?;
        }
        for hash in self.unlearned.drain(..) {
            self.shared.recent.remove(&hash);
        }
        acted
    }

    /// Removes the event with this key from memory when the open transaction of
    /// [`Writer::in_transaction`] has ended. Until then the entry stays, because a reader might add the old
    /// entry again.
    pub(super) fn remove_from_memory(&mut self, hash: KeyHash) {
        self.unlearned.push(hash);
    }

    /// One slice of an SQL handler's work.
    pub(super) fn run_sql(&mut self, ask: &SqlAsk) -> rusqlite::Result<SqlRan> {
        let ran = self.with_sql_runner(|runner| runner.run(ask));
        if ran.is_ok() {
            self.begun.clear();
        }
        ran
    }

    /// One claimed job of an SQL handler.
    pub(super) fn run_claimed(&mut self, run: &SqlRun) -> rusqlite::Result<Ran> {
        self.with_sql_runner(|runner| runner.run_claimed(run))
    }

    fn with_sql_runner<T>(&mut self, work: impl FnOnce(&mut SqlRunner<'_>) -> T) -> T {
        work(&mut SqlRunner {
            conn: &self.conn,
            lanes: &mut self.lanes,
            outbox: &mut self.outbox,
            sandbox: &self.sandbox,
            now: &*self.clock,
            begun: &mut self.begun,
        })
    }

    /// Housekeeping between batches: flushes copies, merges a chunk of the index or rebuilds a part of its filter,
    /// bounds the log.
    fn housekeep(&mut self) -> Result<(), MergeError> {
        self.checkpointer.check()?;
        if self.copies_taken.len() == 0 && Instant::now() >= self.copies_due {
            self.take_copies();
        }
        self.write_copies()?;
        if self.index.wants_merge() {
            let tx = Transaction::begin_unsynced(&self.conn)?;
            self.index.merge_chunk(&self.conn)?;
            tx.commit()?;
            self.index.merged_chunk();
        } else if self.index.wants_filter() {
            self.index.rebuild_filter_chunk(&self.conn)?;
        }
        self.bound_log()?;
        Ok(())
    }

    /// Has the log copied into the database file as it grows. Near the bound the checkpointer runs
    /// first, so that the writer only copies the pages added during that round. Once the whole log
    /// is copied and no reader uses it, the next commit starts the log over.
    fn bound_log(&mut self) -> rusqlite::Result<()> {
        let pages = self.wal_pages.load(Ordering::Relaxed);
        if pages < self.asked_at {
            self.asked_at = 0;
        }
        let is_busy = self.checkpointer.is_busy();
        let step = tuned!("sqlite.checkpoint_pages", WAL_PAGES_CHECKPOINT);
        let most = tuned!("sqlite.log_pages", WAL_PAGES_MAX);
        if !is_busy && pages - self.asked_at >= step {
            self.checkpointer.ask();
            self.asked_at = pages;
            return Ok(());
        }
        if is_busy || pages < most || Instant::now() < self.log_due {
            return Ok(());
        }
        let (log, copied) = checkpoint::passive(&self.conn)?;
        if copied < log || log < 0 {
            self.log_due = Instant::now() + LOG_RETRY;
            if pages > most * 4 {
                tracing::warn!(pages, "a reader keeps the log from starting over: {pages} pages");
                self.log_due += LOG_WARN;
            }
        }
        Ok(())
    }

    /// Writes all copies that were counted so far.
    fn flush_copies(&mut self) -> rusqlite::Result<()> {
        let mut until = None;
        loop {
            until = self.flush_some_copies(until)?;
            if until.is_none() {
                return Ok(());
            }
        }
    }

    /// Writes some of the copies that were counted before the first call. While there are more, returns
    /// the `until` of the next call.
    pub(super) fn flush_some_copies(
        &mut self,
        until: Option<u64>,
    ) -> rusqlite::Result<Option<u64>> {
        let until = until.unwrap_or(self.copies_round + 1);
        if self.copies_taken.len() == 0 && self.copies_round < until {
            self.take_copies();
        }
        self.write_copies()?;
        let is_last = self.copies_round == until && self.copies_taken.len() == 0;
        Ok((self.copies_round <= until && !is_last).then_some(until))
    }

    fn take_copies(&mut self) {
        self.copies_due = Instant::now() + COPIES_FLUSH;
        self.copies_round += 1;
        self.copies_taken = self.shared.copies.take().into_iter();
    }

    /// Writes the copies of the next events that were taken: few, because acks wait meanwhile.
    fn write_copies(&mut self) -> rusqlite::Result<()> {
        let events = self.copies_taken.len().min(COPIES_CHUNK);
        if events == 0 {
            return Ok(());
        }
        let chunk: Vec<_> = self.copies_taken.by_ref().take(events).collect();
        let written = Transaction::begin_unsynced(&self.conn)
            .and_then(|tx| copies::write(&self.conn, chunk).and_then(|()| tx.commit()));
        self.shared.copies.wrote(events);
        written
    }

    /// Recovers from a failed write: nothing is answered from memory, and nothing is accepted until
    /// a write has succeeded.
    ///
    /// The failed transaction may be in the log, complete but unsynced. If the file were reopened
    /// now, that transaction could reappear in the page cache alone. Its retry would then be answered as a
    /// duplicate of an event that is not on disk. So a small commit on the same connection first overwrites
    /// the same place in the log. Once that commit is synced, the file is opened again and the index
    /// reloaded.
    ///
    /// A failed sync may also have lost unsynced commits before it, and the system reports that
    /// only once: on disk the log would end there, whatever is synced after it. So the writer
    /// rewrites the log in place, syncs it, copies it into the database file, and starts a new log.
    /// Without the rewrite, a power loss could leave newer pages in the file under an older log.
    fn recover(&mut self, waiting: &Commands, error: &rusqlite::Error) -> ControlFlow<()> {
        let began = Instant::now();
        let cause = cause_of(error);
        tracing::error!(%error, "a commit failed, nothing is accepted until writing works: {error}");
        self.shared.health.set(Some(cause.clone()));
        self.shared.recent.clear();
        let refusal = StoreError::Unavailable(cause);
        self.refuse_deferred(&refusal);
        let mut sync_failed = is_io(error);
        // Recovery writes so little that it may succeed where an event does not fit. Without a
        // pause, recovery and failed commits would alternate, and every round would make the log
        // longer.
        let mut next_try = self.recovered_at.map_or(began, |at| began.max(at + RECOVERY_WAIT));
        loop {
            if sync_failed {
                self.checkpointer.stop();
            }
            // The loop ends by the clock, not when the queue is empty: senders that retry at once would keep
            // the queue full forever.
            while let left = next_try.saturating_duration_since(Instant::now())
                && !left.is_zero()
            {
                match waiting.receive_within(left) {
                    Next::Command(Command::Close(closed)) => {
                        let _ = closed.send(());
                        return ControlFlow::Break(());
                    }
                    #[cfg(test)]
                    Next::Command(Command::Tamper(tamper)) => tamper(&mut self.conn),
                    Next::Command(command) => refuse(command, &refusal),
                    Next::Deferred | Next::Housekeeping => {}
                    Next::NobodyLeft => return ControlFlow::Break(()),
                }
            }
            match self.reopen(sync_failed).and_then(|()| Ok(self.release_begun()?)) {
                Ok(()) => break,
                Err(lost @ ReopenError::Rewrite(RewriteError::Lost { .. })) => {
                    tracing::error!(error = %lost, "the store stops: {lost}");
                    self.shared.health.set(Some(lost.to_string().into()));
                    return ControlFlow::Break(());
                }
                Err(error) => {
                    sync_failed |= error.is_io();
                    tracing::debug!(%error, "still not writable: {error}");
                }
            }
            next_try = Instant::now() + RECOVERY_WAIT;
        }
        self.recovered_at = Some(Instant::now());
        self.shared.recent.clear();
        self.shared.health.set(None);
        tracing::info!("writing works again");
        ControlFlow::Continue(())
    }

    /// Gives back the jobs that an SQL handler's slice had claimed when the database failed. The
    /// failure says nothing about those jobs, so none of them waits for the end of its lease. A job
    /// whose commit succeeded after all is done, and stays done.
    fn release_begun(&mut self) -> rusqlite::Result<()> {
        if self.begun.is_empty() {
            return Ok(());
        }
        let begun = self.begun.clone();
        self.in_transaction(|writer| {
            let now = writer.now();
            for (job, fence) in begun {
                writer.lanes.give_back(&writer.conn, job, fence, now)?;
            }
            Ok(())
        })?;
        self.begun.clear();
        self.shared.arrived.notify_waiters();
        Ok(())
    }

    fn reopen(&mut self, sync_failed: bool) -> Result<(), ReopenError> {
        if !self.conn.is_autocommit() {
            self.conn.execute_batch("ROLLBACK")?;
        }
        raise_epoch(&self.conn)?;
        if sync_failed {
            let no_other_writer = Transaction::begin(&self.conn)?;
            self.place.rewrite_log(self.wal_pages.load(Ordering::Relaxed))?;
            drop(no_other_writer);
            // If a reader keeps the log from starting over, the whole log is on disk nevertheless.
            open::settle_log(&self.conn)?;
        }
        let mut conn = self.place.writer()?;
        watch_log(&mut conn, &self.wal_pages)?;
        self.sandbox = Sandbox::on(&mut conn, self.place.value_bytes_max())?;
        let (specs, freed) = self.lanes.announced();
        self.lanes = Lanes::load(&conn, specs, freed)?;
        self.outbox = Outbox::load(&conn, self.outbox.vault_keys())?;
        self.index = KeyIndex::load(&conn, Arc::clone(&self.shared.keys))?;
        self.fences = FenceBlock::default();
        self.key_usage.clear();
        self.prune_progress = PruneProgress::default();
        self.pairs = load_pairs(&conn)?;
        self.last_seq = last_seq(&conn)?;
        self.conn = conn;
        if sync_failed {
            // The new connection of the checkpointer does not report the failed sync again.
            self.checkpointer = Checkpointer::start(self.place.checkpointer()?)?;
        }
        Ok(())
    }
}

/// Why the file could not be opened again after a failed write.
#[derive(Debug, thiserror::Error)]
enum ReopenError {
    #[error(transparent)]
    Sqlite(#[from] rusqlite::Error),
    #[error(transparent)]
    Rewrite(#[from] RewriteError),
    #[error("starting the checkpointer: {0}")]
    Thread(#[from] std::io::Error),
}

impl ReopenError {
    fn is_io(&self) -> bool {
        match self {
            Self::Sqlite(error) => is_io(error),
            Self::Rewrite(_) => true,
            Self::Thread(_) => false,
        }
    }
}

fn refuse(command: Command, why: &StoreError) {
    match command {
        Command::Ingest(_, answer) => drop(answer.send(Err(why.clone()))),
        Command::Find(_, answer) => drop(answer.send(Err(why.clone()))),
        Command::Batched(_, batched) | Command::BehindEvents(batched) => {
            drop(batched(Err(why.clone())));
        }
        Command::Slice(slice) => drop(slice(Err(why.clone()))),
        Command::FlushCopies => {}
        Command::Close(closed) => drop(closed.send(())),
        #[cfg(test)]
        Command::Tamper(_) | Command::MergeNow => {}
    }
}

/// A small, synced commit.
fn raise_epoch(conn: &Connection) -> rusqlite::Result<()> {
    let tx = Transaction::begin(conn)?;
    conn.execute("UPDATE hapax_meta SET value = value + 1 WHERE name = 'epoch'", [])?;
    tx.commit()
}

/// The error that callers get after a failed write.
fn unavailable(error: &rusqlite::Error) -> StoreError {
    StoreError::Unavailable(cause_of(error))
}

/// A copy of SQLite's error, with its code. The error itself goes to the writer's recovery, and cannot
/// be cloned; other kinds of error are copied as text.
fn cause_of(error: &rusqlite::Error) -> Cause {
    match error {
        rusqlite::Error::SqliteFailure(code, message) => {
            Cause::new(rusqlite::Error::SqliteFailure(*code, message.clone()))
        }
        other => Cause::from(other.to_string()),
    }
}

fn is_io(error: &rusqlite::Error) -> bool {
    error.sqlite_error_code() == Some(rusqlite::ErrorCode::SystemIoFailure)
}

fn watch_log(conn: &mut Connection, pages: &Arc<AtomicU32>) -> rusqlite::Result<()> {
    let pages = Arc::clone(pages);
    conn.wal_hook(Some(move |_: &mut rusqlite::hooks::Wal, now: std::ffi::c_int| {
        pages.store(u32::try_from(now).unwrap_or(0), Ordering::Relaxed);
        Ok(())
    }))
}

fn load_pairs(conn: &Connection) -> rusqlite::Result<HashMap<(Tenant, SourceName), i64>> {
    conn.prepare("SELECT pair, tenant, source FROM hapax_pair")?
        .query_map([], |row| {
            let tenant = Tenant::new(row.get_ref(1)?.as_str()?);
            Ok(((tenant, SourceName::new(row.get_ref(2)?.as_str()?)), row.get(0)?))
        })?
        .collect()
}

fn last_seq(conn: &Connection) -> rusqlite::Result<i64> {
    let newest: Option<i64> =
        conn.query_row("SELECT max(seq) FROM hapax_event", [], |row| row.get(0))?;
    Ok(newest.unwrap_or(0).max(meta(conn, "last_seq")?))
}
