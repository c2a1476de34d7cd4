//! Group commit: a queue of requests and a few writers on their own thread, each with a connection.
//! Requests that arrive while a statement runs are batched into the next one.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};
use std::{io, thread};

use hapax_core::failpoint;
use hapax_core::store::{Ingest, StoreError, Verdict};
use tokio::runtime;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinSet;

use super::{Shared, copy_lookup, ingest};
use crate::copy_pacing::CopyPacing;
use crate::limits::{ACK_MAX, BATCH_BYTES_MAX, BATCH_RECEIPTS_MAX, WAITING_MAX, WORTH_A_COMMIT};

/// How long a commit may take before its writer is no longer counted. Then waiting requests get
/// another writer. A lookup of copies may take as long before requests go to the writers without one.
pub(super) const SLOW: Duration = Duration::from_millis(25);

/// The queue.
#[derive(Debug)]
pub(super) struct GroupCommit {
    waiting: Mutex<CommitQueue>,
    writer_wanted: Notify,
    /// Paces the answers to copies.
    pub(super) pacing: CopyPacing,
}

#[derive(Debug)]
struct CommitQueue {
    requests: VecDeque<PendingIngest>,
    /// Requests queued so far.
    queued: u64,
    /// Writers that are committing, except slow ones.
    at_work: usize,
    open: bool,
}

impl CommitQueue {
    /// Whether a writer should start a commit now. A lone writer takes any request. While another writer
    /// commits, this writer waits for enough requests to justify a second commit. If there are fewer, the
    /// other writer takes them after its commit. Once the queue is closed, no further requests arrive, so
    /// any request is enough.
    fn should_start(&self) -> bool {
        let least = if self.at_work == 0 || !self.open { 1 } else { WORTH_A_COMMIT };
        self.requests.len() >= least
    }
}

#[derive(Debug)]
struct PendingIngest {
    ingest: Ingest,
    answer: AnswerSender,
}

type AnswerSender = oneshot::Sender<Result<Vec<Verdict>, StoreError>>;

/// Waits for the verdicts as long as a sender would.
pub(super) async fn wait(
    verdicts: oneshot::Receiver<Result<Vec<Verdict>, StoreError>>,
) -> Result<Vec<Verdict>, StoreError> {
    let lost = |why: &str| Err(StoreError::Unavailable(why.into()));
    match tokio::time::timeout(ACK_MAX, verdicts).await {
        Ok(Ok(verdicts)) => verdicts,
        Ok(Err(_)) => lost("the commit was interrupted"),
        Err(_) => lost("the database did not answer in time"),
    }
}

impl GroupCommit {
    pub(super) fn new() -> Self {
        let line = CommitQueue { requests: VecDeque::new(), queued: 0, at_work: 0, open: true };
        let pacing = CopyPacing::default();
        Self { waiting: Mutex::new(line), writer_wanted: Notify::new(), pacing }
    }

    /// Queues a request for a commit, which answers it. The commit happens even if the caller stops
    /// waiting, so its outcome is then unknown.
    pub(super) fn queue(&self, ingest: Ingest, answer: AnswerSender) {
        let mut line = self.line();
        let refusal = match line.open {
            false => Some(StoreError::Closed),
            true => (line.requests.len() >= WAITING_MAX).then_some(StoreError::Busy),
        };
        if let Some(why) = refusal {
            let _ = answer.send(Err(why));
            return;
        }
        line.queued += 1;
        line.requests.push_back(PendingIngest { ingest, answer });
        if line.should_start() {
            self.writer_wanted.notify_one();
        }
    }

    /// The number of requests queued so far.
    pub(super) fn queued(&self) -> u64 {
        self.line().queued
    }

    /// Stops accepting requests.
    fn shut(&self) {
        self.line().open = false;
    }

    /// Takes waiting requests, as many as one commit should hold, if they justify one.
    fn take(&self) -> Option<(Vec<PendingIngest>, ActiveWriter<'_>)> {
        let mut line = self.line();
        if !line.should_start() {
            return None;
        }
        let (mut batch, mut receipts, mut bytes) = (Vec::new(), 0, 0);
        while receipts < BATCH_RECEIPTS_MAX && bytes < BATCH_BYTES_MAX {
            let Some(next) = line.requests.pop_front() else { break };
            receipts += next.ingest.receipts.len();
            bytes += next.ingest.receipts.iter().map(|one| one.body().len()).sum::<usize>();
            batch.push(next);
        }
        line.at_work += 1;
        Some((batch, ActiveWriter { queue: self, counts: true }))
    }

    fn line(&self) -> std::sync::MutexGuard<'_, CommitQueue> {
        self.waiting.lock().expect("no panic happens under this lock")
    }
}

/// A writer that is committing; dropped when it is done.
struct ActiveWriter<'a> {
    queue: &'a GroupCommit,
    counts: bool,
}

impl ActiveWriter<'_> {
    /// Stops counting this writer, so that the next one starts as if it were alone.
    fn is_slow(&mut self) {
        self.stop_counting();
        self.queue.writer_wanted.notify_one();
    }

    fn stop_counting(&mut self) {
        if std::mem::take(&mut self.counts) {
            self.queue.line().at_work -= 1;
        }
    }
}

impl Drop for ActiveWriter<'_> {
    fn drop(&mut self) {
        self.stop_counting();
    }
}

/// Starts the writers on their own thread, because every sender waits for their commits. On the
/// threads of a busy server, the next commit would wait until responses are written.
pub(super) fn start(shared: &Arc<Shared>, writers: usize) -> io::Result<()> {
    let (shared, counted) = (Arc::clone(shared), shared.tasks.token());
    let (began, begins) = mpsc::sync_channel(1);
    thread::Builder::new().name("hapax-ingest".into()).spawn(move || {
        match runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => {
                let _ = began.send(Ok(()));
                runtime.block_on(write_all(shared, writers));
                runtime.shutdown_background();
            }
            Err(error) => drop(began.send(Err(error))),
        }
        drop(counted);
    })?;
    begins.recv().map_err(io::Error::other)?
}

async fn write_all(shared: Arc<Shared>, writers: usize) {
    let mut running = JoinSet::new();
    let looking = tokio::spawn(copy_lookup::keep_answering(Arc::clone(&shared)));
    for _ in 0..writers.max(1) {
        running.spawn(keep_writing(Arc::clone(&shared)));
    }
    while let Some(ended) = running.join_next().await {
        if ended.is_err() {
            // The requests of the writer that panicked got an error. Another writer takes its
            // place.
            shared.health.fails(&"a writer panicked".into());
            running.spawn(keep_writing(Arc::clone(&shared)));
        }
    }
    if looking.await.is_err() {
        tracing::error!("the lookup of copies panicked");
    }
}

/// One writer: commits waiting requests until the store is closed and none waits.
async fn keep_writing(shared: Arc<Shared>) {
    let queue = &shared.group_commit;
    loop {
        let taken = match queue.take() {
            Some(taken) => taken,
            None if !shared.closing.is_cancelled() => {
                tokio::select! {
                    () = shared.closing.cancelled() => {}
                    () = queue.writer_wanted.notified() => {}
                }
                continue;
            }
            None => {
                queue.shut();
                // Requests queued just before closing are still served.
                match queue.take() {
                    Some(taken) => taken,
                    None => return,
                }
            }
        };
        let (batch, mut at_work) = taken;
        tokio::pin! { let commit = commit(&shared, batch); }
        if tokio::time::timeout(SLOW, &mut commit).await.is_err() {
            at_work.is_slow();
            commit.await;
        }
    }
}

/// Commits a batch and answers each request.
async fn commit(shared: &Shared, batch: Vec<PendingIngest>) {
    let began = Instant::now();
    let (ingests, answers): (Vec<_>, Vec<_>) =
        batch.into_iter().map(|waiting| (waiting.ingest, waiting.answer)).unzip();
    failpoint!("ingress.before_commit");
    let decided = ingest::decide(shared, &ingests).await;
    failpoint!("ingress.after_commit_before_ack");
    let receipts: usize = ingests.iter().map(|ingest| ingest.receipts.len()).sum();
    metrics::histogram!("hapax_store_commit_seconds").record(began.elapsed());
    metrics::histogram!("hapax_store_batch_size").record(receipts as f64);
    let mut new_events = 0;
    for (answer, verdicts) in answers.into_iter().zip(decided) {
        let all = verdicts.iter().flatten();
        new_events += all.filter(|verdict| matches!(verdict, Verdict::Accepted(_))).count();
        let _ = answer.send(verdicts);
    }
    shared.group_commit.pacing.committed(new_events);
}
