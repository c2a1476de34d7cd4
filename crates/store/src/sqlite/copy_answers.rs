//! Answers copies of committed events without the writer: a few threads read the events of waiting
//! requests, many in one snapshot. A request with anything but plain copies is passed to the
//! writer, which decides it.
//!
//! A snapshot holds only committed rows, and a commit becomes visible after its sync. So a copy is
//! answered only as a duplicate of an event that is on the disk. While writing fails, nothing is
//! answered here.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

use hapax_core::store::{Ingest, StoreError, Verdict};
use hapax_core::{KeyHash, Receipt};
use rusqlite::Connection;
use tokio::sync::oneshot;

use super::Shared;
use super::existing::Existing;
use super::key_index::{KeyLocation, find_at};
use super::open::{DatabaseLocation, OpenError};
use super::row::seq_of;
use super::writer::WriterSender;
use crate::limits::WAITING_MAX;
use crate::recent::{Recent, ShardMoment};

/// How many threads read at most. The second thread starts when many requests wait.
const THREADS: usize = 2;

/// How many waiting requests justify a second thread: waking a thread costs as much as several
/// lookups.
const WORTH_A_THREAD: usize = 32;

/// Requests that share a snapshot. A longer snapshot would delay the first answers.
const REQUESTS_AT_ONCE: usize = 64;

type AnswerSender = oneshot::Sender<Result<Vec<Verdict>, StoreError>>;

/// The threads and their queue.
#[derive(Debug)]
pub(super) struct CopyAnswers {
    queue: Arc<Queue>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Queue {
    line: Mutex<LookupQueue>,
    arrived: Condvar,
    shared: Arc<Shared>,
    writer: WriterSender,
}

#[derive(Debug)]
struct LookupQueue {
    waiting: VecDeque<PendingLookup>,
    /// Threads that are reading.
    at_work: usize,
    open: bool,
}

#[derive(Debug)]
struct PendingLookup {
    ingest: Ingest,
    answer: AnswerSender,
}

/// The locations of a receipt's key and guard in memory, read before the snapshot began.
struct RememberedKeys {
    key: KeyLocation,
    guard: Option<KeyLocation>,
    moment: ShardMoment,
}

impl CopyAnswers {
    pub(super) fn start(
        place: &DatabaseLocation,
        shared: &Arc<Shared>,
        writer: WriterSender,
    ) -> Result<Self, OpenError> {
        let line = LookupQueue { waiting: VecDeque::new(), at_work: 0, open: true };
        let queue = Arc::new(Queue {
            line: Mutex::new(line),
            arrived: Condvar::new(),
            shared: Arc::clone(shared),
            writer,
        });
        let answers = Self { queue, threads: Mutex::default() };
        for _ in 0..THREADS {
            let conn = place.reader().map_err(|source| place.error(source))?;
            let thread = answers.spawn(conn);
            let failed = |source| OpenError::Io { path: place.path().to_owned(), source };
            answers.threads().push(thread.map_err(failed)?);
        }
        Ok(answers)
    }

    fn spawn(&self, conn: Connection) -> io::Result<JoinHandle<()>> {
        let queue = Arc::clone(&self.queue);
        std::thread::Builder::new().name("hapax-copies".into()).spawn(move || {
            let _ended = ThreadEnded(Arc::clone(&queue));
            while let Some((batch, _at_work)) = queue.take() {
                queue.answer(&conn, batch);
            }
        })
    }

    /// Whether this request may be nothing but copies of committed events.
    pub(super) fn may_answer(&self, ingest: &Ingest) -> bool {
        let keys = &self.queue.shared.keys;
        ingest.receipts.iter().all(|one| keys.locate(&one.key_hash()) != KeyLocation::Nowhere)
    }

    /// Answers this request, or passes it to the writer.
    pub(super) fn ask(&self, ingest: Ingest, answer: AnswerSender) {
        let mut line = self.queue.line();
        if !line.open || line.waiting.len() >= WAITING_MAX {
            drop(line);
            return self.queue.writer.ingest(ingest, answer);
        }
        line.waiting.push_back(PendingLookup { ingest, answer });
        if line.should_start() {
            self.queue.arrived.notify_one();
        }
    }

    /// Ends the threads. Waiting requests and every later one are passed to the writer.
    pub(super) fn close(&self) {
        self.queue.close();
        for thread in self.threads().drain(..) {
            if thread.join().is_err() {
                tracing::error!("a reader of copies panicked");
            }
        }
    }

    fn threads(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock().expect("no panic happens under this lock")
    }
}

impl Drop for CopyAnswers {
    fn drop(&mut self) {
        self.queue.close();
    }
}

impl LookupQueue {
    /// Whether a thread should start to read. A lone thread takes any request. While another thread
    /// reads, this one waits for enough requests, because the other will take them when it is done.
    fn should_start(&self) -> bool {
        self.waiting.len() >= if self.at_work == 0 { 1 } else { WORTH_A_THREAD }
    }
}

impl Queue {
    fn line(&self) -> MutexGuard<'_, LookupQueue> {
        self.line.lock().expect("no panic happens under this lock")
    }

    /// Waits for requests; `None` once the queue is closed.
    fn take(&self) -> Option<(Vec<PendingLookup>, ActiveReader<'_>)> {
        let mut line = self.line();
        while line.open && !line.should_start() {
            line = self.arrived.wait(line).expect("no panic happens under this lock");
        }
        if !line.open {
            return None;
        }
        let some = line.waiting.len().min(REQUESTS_AT_ONCE);
        let batch = line.waiting.drain(..some).collect();
        line.at_work += 1;
        Some((batch, ActiveReader(self)))
    }

    fn close(&self) {
        let mut line = self.line();
        line.open = false;
        let rest = std::mem::take(&mut line.waiting);
        drop(line);
        self.arrived.notify_all();
        rest.into_iter().for_each(|asked| self.writer.ingest(asked.ingest, asked.answer));
    }

    /// Answers the requests that are nothing but plain copies, and passes the others to the writer.
    fn answer(&self, conn: &Connection, batch: Vec<PendingLookup>) {
        // Memory is read before the snapshot begins, so that the snapshot holds all keys that
        // memory knows now.
        let receipts = batch.iter().flat_map(|asked| &asked.ingest.receipts);
        let spots: Vec<RememberedKeys> =
            receipts.map(|receipt| self.find_in_memory(receipt)).collect();
        let read = self.shared.health.check().is_ok().then(|| read(conn, &batch, &spots));
        let mut found = match read {
            Some(Ok(found)) => found,
            Some(Err(error)) => {
                tracing::warn!(%error, "reading copies failed, the writer decides: {error}");
                Vec::new()
            }
            None => Vec::new(),
        };
        // A write may have failed meanwhile: then nothing is answered here until writing works
        // again.
        if self.shared.health.check().is_err() {
            found.clear();
        }
        let (mut found, mut spots) = (found.into_iter(), spots.into_iter());
        let mut is_full = false;
        for PendingLookup { ingest, answer } in batch {
            let count = ingest.receipts.len();
            let events: Vec<_> = found.by_ref().take(count).flatten().collect();
            let spots = spots.by_ref().take(count);
            if events.len() < count {
                spots.for_each(drop);
                self.writer.ingest(ingest, answer);
                continue;
            }
            let mut verdicts = Vec::with_capacity(count);
            for ((receipt, spot), recent) in ingest.receipts.iter().zip(spots).zip(events) {
                self.shared.recent.put_since(spot.moment, receipt.key_hash(), &recent);
                is_full |= self.shared.copies.note(seq_of(recent.known.id), &ingest.via);
                verdicts.push(Verdict::Duplicate(recent.known));
            }
            let _ = answer.send(Ok(verdicts));
        }
        if is_full {
            self.writer.flush_soon();
        }
    }

    fn find_in_memory(&self, receipt: &Receipt) -> RememberedKeys {
        let (keys, hash) = (&self.shared.keys, receipt.key_hash());
        RememberedKeys {
            moment: self.shared.recent.moment(&hash),
            key: keys.locate(&hash),
            guard: receipt.guard().map(|guard| keys.locate(&guard.hash)),
        }
    }
}

/// The events that these receipts are plain copies of, all in one snapshot.
fn read(
    conn: &Connection,
    batch: &[PendingLookup],
    spots: &[RememberedKeys],
) -> rusqlite::Result<Vec<Option<Recent>>> {
    conn.prepare_cached("BEGIN")?.execute([])?;
    let receipts = batch.iter().flat_map(|asked| &asked.ingest.receipts);
    let found = receipts.zip(spots).map(|(receipt, spot)| copied(conn, receipt, spot));
    let found: rusqlite::Result<Vec<_>> = found.collect();
    let ended = conn.prepare_cached("ROLLBACK").and_then(|mut end| end.execute([]));
    found.and_then(|found| ended.map(|_| found))
}

/// The event that this receipt is a plain copy of: the same bytes, no review, and signed content that
/// is stored already. See `Writer::decide_known` for all the other cases.
fn copied(
    conn: &Connection,
    receipt: &Receipt,
    spot: &RememberedKeys,
) -> rusqlite::Result<Option<Recent>> {
    let Some(seq) = find_at(conn, &receipt.key_hash(), spot.key)? else { return Ok(None) };
    let Some(Existing { recent, .. }) = Existing::at(conn, seq)? else { return Ok(None) };
    if recent.body_hash != receipt.body_hash() || recent.review.is_some() {
        return Ok(None);
    }
    let guard = receipt.guard().map(|guard| guard.hash);
    if let (Some(hash), Some(place)) = (guard, spot.guard)
        && find_at(conn, &hash, place)?.is_none()
        && !is_further_guard(conn, &hash)?
    {
        return Ok(None);
    }
    Ok(Some(Recent { guard, ..recent }))
}

/// Whether a copy with this signed content arrived before.
fn is_further_guard(conn: &Connection, hash: &KeyHash) -> rusqlite::Result<bool> {
    conn.prepare_cached(include_str!("sql/find_guard.sql"))?.exists([&hash.0[..]])
}

/// A thread that is reading; dropped when it is done.
struct ActiveReader<'a>(&'a Queue);

impl Drop for ActiveReader<'_> {
    fn drop(&mut self) {
        self.0.line().at_work -= 1;
    }
}

/// If a thread panics, the writer answers from then on.
struct ThreadEnded(Arc<Queue>);

impl Drop for ThreadEnded {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.close();
        }
    }
}
