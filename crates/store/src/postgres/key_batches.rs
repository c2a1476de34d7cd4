//! Group commit of Idempotency-Keys: reservations and answers that arrive during a commit are batched
//! into the next one.
//!
//! A key may be locked by a user's open transaction. Then its batch fails after [`KEY_BATCH_LOCK_MAX`],
//! and each act of the batch runs alone, on its own connection, as if there were no batches.

use std::sync::Arc;

use hapax_core::failpoint;
use hapax_core::ledger::{Reservation, ReserveAsk, Reserved, StoredAnswer};
use hapax_core::store::{Cause, Held, StoreError};
use serde_json::Value;
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio_postgres::error::SqlState;

use super::Shared;
use super::connect::{PgError, retried};
use super::handler_registry::micros;
use super::ingest_rows::composite;
use super::ledger::{bounds, columns, finish, read_reservation, reserve, size_of};
use crate::limits::{
    BATCH_BYTES_MAX, KEY_BATCH_LOCK_MAX, KEY_BATCH_MAX, KEY_BATCHES_AT_ONCE, WAITING_MAX,
};

/// The queue of acts that wait for a commit.
#[derive(Debug)]
pub(super) struct KeyBatches {
    to_write: mpsc::Sender<PendingAct>,
    waiting: Mutex<mpsc::Receiver<PendingAct>>,
}

/// An act, and the caller that waits for its outcome.
#[derive(Debug)]
enum PendingAct {
    Reserve(ReserveAsk, oneshot::Sender<Result<Reservation, StoreError>>),
    Finish(Reserved, StoredAnswer, oneshot::Sender<Result<Held, StoreError>>),
}

impl PendingAct {
    fn bytes(&self) -> usize {
        match self {
            Self::Reserve(..) => 0,
            Self::Finish(_, answer, _) => answer.body.len(),
        }
    }

    /// The order in which a batch locks rows: answers first, then reservations, and both in the
    /// order of their keys.
    fn row_key(&self) -> (bool, &str, &str) {
        match self {
            Self::Finish(reserved, ..) => (false, reserved.scope.as_str(), reserved.key.as_str()),
            Self::Reserve(ask, _) => (true, ask.scope.as_str(), ask.key.as_str()),
        }
    }

    fn fail(self, error: StoreError) {
        match self {
            Self::Reserve(_, answer) => drop(answer.send(Err(error))),
            Self::Finish(_, _, answer) => drop(answer.send(Err(error))),
        }
    }
}

/// A `hapax.key_ask`.
#[derive(Debug)]
struct AskRow<'a> {
    scope: &'a str,
    key: &'a str,
    fingerprint: &'a [u8],
    lease_us: i64,
    ttl_us: i64,
    owner: Option<&'a str>,
    max_keys: Option<i64>,
    max_bytes: Option<i64>,
}

/// A `hapax.key_answer`.
#[derive(Debug)]
struct AnswerRow<'a> {
    scope: &'a str,
    key: &'a str,
    fence: i64,
    status: i32,
    headers: Value,
    body: &'a [u8],
    size: i64,
    owner: Option<&'a str>,
    max_keys: Option<i64>,
    max_bytes: Option<i64>,
}

composite!(AskRow<'_> { scope, key, fingerprint, lease_us, ttl_us, owner, max_keys, max_bytes });
composite!(AnswerRow<'_> {
    scope, key, fence, status, headers, body, size, owner, max_keys, max_bytes,
});

impl<'a> AskRow<'a> {
    fn new(ask: &'a ReserveAsk) -> Self {
        let (max_keys, max_bytes) = bounds(ask.quota);
        Self {
            scope: ask.scope.as_str(),
            key: ask.key.as_str(),
            fingerprint: &ask.fingerprint.0,
            lease_us: micros(ask.lease),
            ttl_us: micros(ask.ttl),
            owner: ask.quota.map(|_| ask.scope.owner().as_str()),
            max_keys,
            max_bytes,
        }
    }
}

impl<'a> AnswerRow<'a> {
    fn new(reserved: &'a Reserved, answer: &'a StoredAnswer) -> Self {
        let (max_keys, max_bytes) = bounds(reserved.quota);
        let (status, headers) = columns(answer);
        Self {
            scope: reserved.scope.as_str(),
            key: reserved.key.as_str(),
            fence: reserved.fence.0,
            status,
            headers,
            body: &answer.body,
            size: size_of(answer),
            owner: reserved.quota.map(|_| reserved.scope.owner().as_str()),
            max_keys,
            max_bytes,
        }
    }

    /// The answer that is stored if the caller has no room for its own.
    fn instead(answer: &'a StoredAnswer) -> Self {
        let (status, headers) = columns(answer);
        let (body, size) = (&answer.body[..], size_of(answer));
        let (owner, max_keys, max_bytes) = (None, None, None);
        Self {
            scope: "",
            key: "",
            fence: 0,
            status,
            headers,
            body,
            size,
            owner,
            max_keys,
            max_bytes,
        }
    }
}

/// The outcome of one act of a batch.
enum ActOutcome {
    Reserved(Reservation),
    Finished(Held),
    /// The batch left the act out, so the act runs alone.
    Later,
    /// The row of the act cannot be read: a newer node has changed the function.
    Unread(PgError),
}

impl Default for KeyBatches {
    fn default() -> Self {
        let (to_write, waiting) = mpsc::channel(WAITING_MAX);
        Self { to_write, waiting: Mutex::new(waiting) }
    }
}

impl KeyBatches {
    /// Reserves a key with the next commit. Dropping the future does not undo it.
    pub(super) async fn reserve(&self, ask: ReserveAsk) -> Result<Reservation, StoreError> {
        let (answer, answered) = oneshot::channel();
        self.queue(PendingAct::Reserve(ask, answer))?;
        answered.await.unwrap_or(Err(StoreError::Closed))
    }

    /// Stores an answer with the next commit. Dropping the future does not undo it.
    pub(super) async fn finish(
        &self,
        reserved: Reserved,
        answer: StoredAnswer,
    ) -> Result<Held, StoreError> {
        let (done, answered) = oneshot::channel();
        self.queue(PendingAct::Finish(reserved, answer, done))?;
        answered.await.unwrap_or(Err(StoreError::Closed))
    }

    fn queue(&self, act: PendingAct) -> Result<(), StoreError> {
        self.to_write.try_send(act).map_err(|refused| match refused {
            mpsc::error::TrySendError::Full(_) => StoreError::Busy,
            mpsc::error::TrySendError::Closed(_) => StoreError::Closed,
        })
    }

    /// The next batch; empty once the queue is closed.
    async fn batch(&self) -> Vec<PendingAct> {
        let mut waiting = self.waiting.lock().await;
        let mut batch = Vec::new();
        let Some(first) = waiting.recv().await else { return batch };
        let mut bytes = first.bytes();
        batch.push(first);
        while batch.len() < KEY_BATCH_MAX && bytes < BATCH_BYTES_MAX {
            let Ok(next) = waiting.try_recv() else { break };
            bytes += next.bytes();
            batch.push(next);
        }
        batch
    }

    /// Refuses further acts, and those in the queue.
    async fn close(&self) {
        let mut waiting = self.waiting.lock().await;
        waiting.close();
        while let Ok(act) = waiting.try_recv() {
            act.fail(StoreError::Closed);
        }
    }
}

/// Starts the tasks that commit batches.
pub(super) fn start(shared: &Arc<Shared>) {
    for _ in 0..KEY_BATCHES_AT_ONCE {
        shared.tasks.spawn(keep_committing(Arc::clone(shared)));
    }
}

async fn keep_committing(shared: Arc<Shared>) {
    while let Some(batch) = shared.closing.run_until_cancelled(shared.key_batches.batch()).await {
        if batch.is_empty() {
            break;
        }
        commit(&shared, batch).await;
    }
    shared.key_batches.close().await;
}

/// Commits a batch, or each act alone if the database refuses the batch.
async fn commit(shared: &Arc<Shared>, mut batch: Vec<PendingAct>) {
    // The sort is stable: of two acts on one key, the first is decided first.
    batch.sort_by(|one, other| one.row_key().cmp(&other.row_key()));
    failpoint!("idem.before_commit");
    match retried(|| write(shared, &batch)).await {
        Ok(outcomes) => {
            failpoint!("idem.after_commit");
            for (act, outcome) in batch.into_iter().zip(outcomes) {
                answer(shared, act, outcome);
            }
        }
        Err(error) if error.is_outage() && !is_rolled_back(&error) => {
            let cause = Cause::new(error);
            for act in batch {
                act.fail(StoreError::Unavailable(cause.clone()));
            }
        }
        Err(error) => {
            tracing::debug!(acts = batch.len(), "a batch of keys was refused: {error}");
            batch.into_iter().for_each(|act| run_alone(shared, act));
        }
    }
}

/// Whether the database has rolled the batch back because of other transactions or a timeout: one
/// act may be the cause, and the others must not fail with it.
fn is_rolled_back(error: &PgError) -> bool {
    error.is_race()
        || matches!(error.code(), Some(&SqlState::LOCK_NOT_AVAILABLE | &SqlState::QUERY_CANCELED))
}

fn answer(shared: &Arc<Shared>, act: PendingAct, outcome: ActOutcome) {
    match (act, outcome) {
        (PendingAct::Reserve(_, answer), ActOutcome::Reserved(reservation)) => {
            drop(answer.send(Ok(reservation)));
        }
        (PendingAct::Finish(_, _, answer), ActOutcome::Finished(held)) => {
            drop(answer.send(Ok(held)))
        }
        (act, ActOutcome::Later) => run_alone(shared, act),
        (act, ActOutcome::Unread(error)) => act.fail(StoreError::from(error)),
        (act, ActOutcome::Reserved(_) | ActOutcome::Finished(_)) => {
            act.fail(StoreError::Unavailable("a batch of keys was answered out of order".into()));
        }
    }
}

/// Runs one act in its own commit, even if its caller stops waiting.
fn run_alone(shared: &Arc<Shared>, act: PendingAct) {
    let shared_too = Arc::clone(shared);
    shared.tasks.spawn(async move {
        let shared = &shared_too;
        match act {
            PendingAct::Reserve(ask, answer) => {
                let reserved = retried(|| reserve(shared, &ask)).await;
                let _ = answer.send(reserved.map_err(StoreError::from));
            }
            PendingAct::Finish(reserved, stored, answer) => {
                let held = retried(|| finish(shared, &reserved, &stored)).await;
                let _ = answer.send(held.map_err(StoreError::from));
            }
        }
    });
}

/// Runs one statement for all acts, and returns the outcomes in their order.
async fn write(shared: &Shared, batch: &[PendingAct]) -> Result<Vec<ActOutcome>, PgError> {
    let (mut answers, mut asks) = (Vec::new(), Vec::new());
    for act in batch {
        match act {
            PendingAct::Finish(reserved, answer, _) => {
                answers.push(AnswerRow::new(reserved, answer))
            }
            PendingAct::Reserve(ask, _) => asks.push(AskRow::new(ask)),
        }
    }
    let not_kept = StoredAnswer::not_kept();
    let instead = AnswerRow::instead(&not_kept);
    let lock_ms = i32::try_from(KEY_BATCH_LOCK_MAX.as_millis()).unwrap_or(i32::MAX);
    let (bytes_max, now) = (BATCH_BYTES_MAX as i64, shared.now());
    let mut client = shared.pools.ledger.checkout().await?;
    let rows = client
        .query(
            "SELECT n, kept, outcome, fence, attempt, remaining_us, status, headers, body \
             FROM hapax.batch_keys($1, $2, $3, $4, $5, $6) ORDER BY n",
            &[&answers, &asks, &instead, &bytes_max, &lock_ms, &now],
        )
        .await?;
    if rows.len() != batch.len() {
        return Err(PgError::Gone);
    }
    let read = |(act, row): (&PendingAct, &tokio_postgres::Row)| match act {
        PendingAct::Finish(..) => {
            let kept: bool = row.get("kept");
            ActOutcome::Finished(if kept { Held::Kept } else { Held::Lost })
        }
        PendingAct::Reserve(..) if row.get::<_, &str>("outcome") == "later" => ActOutcome::Later,
        PendingAct::Reserve(ask, _) => match read_reservation(row, ask) {
            Ok(reservation) => ActOutcome::Reserved(reservation),
            Err(error) => ActOutcome::Unread(error),
        },
    };
    Ok(batch.iter().zip(&rows).map(read).collect())
}
