//! The one thread that writes. The writer takes the waiting commands, decides each race ([`decide`]), and
//! commits once for the whole batch. No request is answered before that commit.
//!
//! Requests that arrive during a commit are batched into the next one. If a commit does not return
//! OK, every request of its batch gets an error, and nothing of the batch stays in memory: see
//! [`recovery`]. Other threads send [`commands`].

mod command_queue;
mod commands;
mod decide;
mod recovery;

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hapax_core::job::{Fence, JobId};
use hapax_core::store::{
    ArrivalInfo, Cause, Ingest, Ran, SqlAsk, SqlRan, SqlRun, StoreError, Verdict,
};
use hapax_core::{KeyHash, SourceName, Tenant, Timestamp};
use hapax_core::{failpoint, tuned};
use rusqlite::Connection;
use tokio::sync::oneshot;

pub(super) use commands::{ActKind, BatchResult, WriterHandle, WriterSender};
use commands::{AnswerSender, Answerer, BatchedAct, Command, Commands, Slice, refuse};
use recovery::raise_epoch;

use super::Clock;
use super::Shared;
use super::checkpoint::{self, Checkpointer};
use super::clock::{self, ClockWatch};
use super::copies;
use super::jobs::{Lanes, NO_LANE_LEFT};
use super::key_index::{KeyIndex, MergeError};
use super::key_usage::KeyUsage;
use super::ledger::FenceBlock;
use super::lone_sender::{LoneSender, NEXT_REQUEST_WITHIN};
use super::meta;
use super::new_rows::NewRows;
use super::open::{self, DatabaseLocation, OpenError};
use super::outbox::Outbox;
use super::prune::PruneProgress;
use super::row::Ids;
use super::sandbox::Sandbox;
use super::sql_handlers::SqlRunner;
use super::transaction::{self, Transaction};
use crate::copies::UnwrittenCopies;
use crate::limits::{
    BATCH_BYTES_MAX, BATCH_RECEIPTS_MAX, COPIES_CHUNK, COPIES_FLUSH, LOG_RETRY, LOG_WARN,
    WAL_PAGES_CHECKPOINT, WAL_PAGES_MAX,
};
use crate::recent::Recent;

/// Whether writing works.
#[derive(Debug, Default)]
pub(super) struct WriteHealth(Mutex<Option<Cause>>);

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
    lone_sender: LoneSender,
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
            lone_sender: LoneSender::default(),
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
        let began = Instant::now();
        let next = match self.lone_sender.expects_next() && !at_most.is_zero() {
            true => waiting.receive_soon(NEXT_REQUEST_WITHIN, at_most),
            false => waiting.receive_within(at_most),
        };
        let waited = matches!(next, Next::Command(_)).then(|| began.elapsed());
        self.lone_sender.note_wait(waited);
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
        self.lone_sender.note_batch(batch.answers.len() + batch.answerers.len());
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
        let ended = ended.and_then(|()| match batch.wrote {
            true => transaction::commit(&self.conn),
            false => self.conn.prepare_cached("ROLLBACK")?.execute([]).map(drop),
        });
        // The system may report a failed sync of the log only once, and the checkpointer syncs it too.
        let ended = ended.and_then(|()| self.checkpointer.check());
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
            transaction::commit(&self.conn)?;
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
