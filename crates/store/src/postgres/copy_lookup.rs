//! Answers copies during a retry storm: one statement that only reads looks up all requests that wait,
//! and the writers of [`super::group_commit`] continue with new events. A request with anything but
//! plain copies is passed on to the writers.
//!
//! While a lookup takes long, perhaps because its connection is silent, requests go to the writers without a
//! lookup.
//!
//! A lookup finds nothing for a new event, and costs a statement. So requests are looked up only while
//! more than a fifth of the last receipts were copies. The result of a lookup is cached in memory. So a
//! lookup reads only committed rows, on a server whose epoch is confirmed before and after it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use hapax_core::store::{Ingest, StoreError, Verdict};
use tokio::sync::{Notify, oneshot};

use super::group_commit::SLOW;
use super::{Shared, ingest};
use crate::limits::{BATCH_RECEIPTS_MAX, WAITING_MAX};

/// The share of copies, as a part of [`WHOLE`], above which requests are looked up first. A lookup
/// costs the database about a fifth of an insert.
const STORM: u32 = WHOLE / 5;

const WHOLE: u32 = 1 << 16;

/// The number of receipts whose verdicts weigh as much as all earlier ones.
const HALF_LIFE: u64 = 128;

/// The queue of lookups.
#[derive(Debug)]
pub(super) struct CopyLookup {
    line: Mutex<LookupQueue>,
    arrived: Notify,
    /// The share of copies among the last receipts, as a part of [`WHOLE`].
    share: AtomicU32,
}

#[derive(Debug)]
struct LookupQueue {
    waiting: VecDeque<PendingLookup>,
    /// Whether the running lookup takes longer than [`SLOW`].
    is_slow: bool,
    open: bool,
}

#[derive(Debug)]
struct PendingLookup {
    ingest: Ingest,
    answer: AnswerSender,
}

type AnswerSender = oneshot::Sender<Result<Vec<Verdict>, StoreError>>;

impl CopyLookup {
    pub(super) fn new() -> Self {
        let line = LookupQueue { waiting: VecDeque::new(), is_slow: false, open: true };
        Self { line: Mutex::new(line), arrived: Notify::new(), share: AtomicU32::new(0) }
    }

    /// Records how many of the receipts that were just decided were copies. Two writers may overwrite
    /// each other's share, because it is only an estimate.
    pub(super) fn note(&self, copies: usize, receipts: usize) {
        if receipts == 0 {
            return;
        }
        let (copies, receipts) = (copies as u64, receipts as u64);
        let share = copies * u64::from(WHOLE) / receipts;
        let weight = receipts.min(HALF_LIFE);
        let before = u64::from(self.share.load(Ordering::Relaxed));
        let now = (before * (HALF_LIFE * 2 - weight) + share * weight) / (HALF_LIFE * 2);
        self.share.store(u32::try_from(now).unwrap_or(WHOLE), Ordering::Relaxed);
    }

    /// Whether requests should be looked up before they are written.
    pub(super) fn is_storm(&self) -> bool {
        self.share.load(Ordering::Relaxed) > STORM
    }

    /// Queues a request. Returns it if the queue is full or closed, or if a lookup is slow.
    pub(super) fn ask(
        &self,
        ingest: Ingest,
        answer: AnswerSender,
    ) -> Option<(Ingest, AnswerSender)> {
        let mut line = self.line();
        if !line.open || line.is_slow || line.waiting.len() >= WAITING_MAX {
            return Some((ingest, answer));
        }
        line.waiting.push_back(PendingLookup { ingest, answer });
        if line.waiting.len() == 1 {
            self.arrived.notify_one();
        }
        None
    }

    fn take(&self) -> Vec<PendingLookup> {
        let mut line = self.line();
        let mut receipts = 0;
        let whole = line.waiting.iter().take_while(|asked| {
            receipts += asked.ingest.receipts.len();
            receipts <= BATCH_RECEIPTS_MAX
        });
        // A request with more receipts than that is looked up alone.
        let count = whole.count().max(1).min(line.waiting.len());
        line.waiting.drain(..count).collect()
    }

    fn line(&self) -> MutexGuard<'_, LookupQueue> {
        self.line.lock().expect("no panic happens under this lock")
    }
}

/// Looks requests up until the store is closed. If the task ends for any reason, the writers get the
/// waiting requests and all later ones.
pub(super) async fn keep_answering(shared: Arc<Shared>) {
    let _ended = TaskEnded(&shared);
    loop {
        let batch = shared.lookup.take();
        if !batch.is_empty() {
            tokio::pin! { let answering = answer(&shared, batch); }
            if tokio::time::timeout(SLOW, &mut answering).await.is_err() {
                let _slow = SlowLookup::begin(&shared);
                answering.await;
            }
            continue;
        }
        tokio::select! {
            () = shared.closing.cancelled() => return,
            () = shared.lookup.arrived.notified() => {}
        }
    }
}

async fn answer(shared: &Shared, batch: Vec<PendingLookup>) {
    let (ingests, answers): (Vec<_>, Vec<_>) =
        batch.into_iter().map(|asked| (asked.ingest, asked.answer)).unzip();
    let found = ingest::plain_copies(shared, &ingests).await;
    // All other receipts are counted when the writers decide them.
    let copies = found.iter().flatten().map(Vec::len).sum();
    shared.lookup.note(copies, copies);
    for ((ingest, answer), verdicts) in ingests.into_iter().zip(answers).zip(found) {
        match verdicts {
            Some(verdicts) => {
                let _ = answer.send(Ok(verdicts));
            }
            None => shared.group_commit.queue(ingest, answer),
        }
    }
}

/// A lookup that takes long. Until this is dropped, the writers get all requests.
struct SlowLookup<'a>(&'a Shared);

impl<'a> SlowLookup<'a> {
    fn begin(shared: &'a Shared) -> Self {
        let mut line = shared.lookup.line();
        line.is_slow = true;
        pass_on(shared, line);
        Self(shared)
    }
}

impl Drop for SlowLookup<'_> {
    fn drop(&mut self) {
        self.0.lookup.line().is_slow = false;
    }
}

/// Passes the waiting requests to the writers.
fn pass_on(shared: &Shared, mut line: MutexGuard<'_, LookupQueue>) {
    let rest = std::mem::take(&mut line.waiting);
    drop(line);
    rest.into_iter().for_each(|asked| shared.group_commit.queue(asked.ingest, asked.answer));
}

struct TaskEnded<'a>(&'a Shared);

impl Drop for TaskEnded<'_> {
    fn drop(&mut self) {
        let mut line = self.0.lookup.line();
        line.open = false;
        pass_on(self.0, line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_storm_begins_with_many_copies_and_ends_with_new_events() {
        let lookup = CopyLookup::new();
        lookup.note(0, 0);
        lookup.note(1, 40);
        assert!(!lookup.is_storm(), "a few copies are ordinary");
        (0..4).for_each(|_| lookup.note(64, 64));
        assert!(lookup.is_storm());
        // Requests of a mixed load are looked up first too.
        (0..20).for_each(|_| lookup.note(32, 64));
        assert!(lookup.is_storm());
        (0..20).for_each(|_| lookup.note(0, 64));
        assert!(!lookup.is_storm());
    }
}
