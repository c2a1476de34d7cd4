//! Publishing messages of the API: requests that arrive during a commit are batched into the next one.
//!
//! Publishers have connections of their own, and never share a statement with events. A message whose
//! id or key is held by a user's open transaction fails its batch after [`BATCH_LOCK_MAX`]. The
//! messages of the batch are then published one by one. The message that must wait does so alone on
//! another connection, for [`ALONE_LOCK_MAX`]. So a user's transaction delays only messages with the
//! same id or key for longer.
//!
//! [`BATCH_LOCK_MAX`]: crate::limits::PUBLISH_BATCH_LOCK_MAX
//! [`ALONE_LOCK_MAX`]: crate::limits::PUBLISH_ALONE_LOCK_MAX

use std::sync::Arc;

use hapax_core::message::NewMessage;
use hapax_core::store::{Cause, Published, PublishedMessage, StoreError};
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio_postgres::error::SqlState;
use uuid::Uuid;

use crate::limits::{PUBLISH_BATCH_BYTES_MAX, PUBLISH_BATCH_MAX, PUBLISH_WAITING_MAX};
use crate::postgres::Shared;
use crate::postgres::connect::{ClientPool, PgError, retried};
use crate::postgres::row::text;

/// The queue of messages that wait for a commit.
#[derive(Debug)]
pub(in crate::postgres) struct Publisher {
    to_write: mpsc::Sender<PendingMessage>,
    waiting: Mutex<mpsc::Receiver<PendingMessage>>,
}

/// A message, and the caller that waits for its answer.
#[derive(Debug)]
struct PendingMessage {
    row: MessageRow,
    answer: oneshot::Sender<Result<Published, StoreError>>,
}

/// A message as its columns.
#[derive(Debug)]
struct MessageRow {
    tenant: String,
    id: String,
    r#type: String,
    data: String,
    thin: String,
    key: Option<String>,
    api_version: Option<String>,
}

impl MessageRow {
    fn new(message: &NewMessage) -> Self {
        let NewMessage { r#type, data, key, tenant, id, api_version } = message;
        let optional = |value: &Option<String>| value.as_deref().map(text);
        Self {
            tenant: tenant.as_deref().map_or_else(|| "default".to_owned(), text),
            id: id.as_deref().map_or_else(|| format!("msg_{}", Uuid::now_v7().simple()), text),
            r#type: text(r#type),
            data: data.as_str().to_owned(),
            thin: data.thin(),
            key: optional(key),
            api_version: optional(api_version),
        }
    }

    fn bytes(&self) -> usize {
        self.data.len() + self.thin.len()
    }
}

impl Default for Publisher {
    fn default() -> Self {
        let (to_write, waiting) = mpsc::channel(PUBLISH_WAITING_MAX);
        Self { to_write, waiting: Mutex::new(waiting) }
    }
}

impl Publisher {
    /// Publishes one message with the next commit. Dropping the future does not undo it.
    pub(super) async fn publish(&self, message: NewMessage) -> Result<Published, StoreError> {
        let (answer, answered) = oneshot::channel();
        let waiting = PendingMessage { row: MessageRow::new(&message), answer };
        self.to_write.try_send(waiting).map_err(|refused| match refused {
            mpsc::error::TrySendError::Full(_) => StoreError::Busy,
            mpsc::error::TrySendError::Closed(_) => StoreError::Closed,
        })?;
        // The publishers drop the messages that are left in the queue when the store closes.
        answered.await.unwrap_or(Err(StoreError::Closed))
    }

    /// The next batch; empty once the queue is closed.
    async fn batch(&self) -> Vec<PendingMessage> {
        let mut waiting = self.waiting.lock().await;
        let mut batch = Vec::new();
        let Some(first) = waiting.recv().await else { return batch };
        let mut bytes = first.row.bytes();
        batch.push(first);
        while batch.len() < PUBLISH_BATCH_MAX && bytes < PUBLISH_BATCH_BYTES_MAX {
            let Ok(next) = waiting.try_recv() else { break };
            bytes += next.row.bytes();
            batch.push(next);
        }
        batch
    }

    /// Refuses further messages, and answers those in the queue.
    async fn close(&self) {
        let mut waiting = self.waiting.lock().await;
        waiting.close();
        while let Ok(PendingMessage { answer, .. }) = waiting.try_recv() {
            let _ = answer.send(Err(StoreError::Closed));
        }
    }
}

/// Starts as many publishers as there are connections for them.
pub(in crate::postgres) fn start(shared: &Arc<Shared>, publishers: usize) {
    for _ in 0..publishers.max(1) {
        shared.tasks.spawn(keep_publishing(Arc::clone(shared)));
    }
}

async fn keep_publishing(shared: Arc<Shared>) {
    while let Some(batch) = shared.closing.run_until_cancelled(shared.publisher.batch()).await {
        if batch.is_empty() {
            break;
        }
        publish_batch(&shared, batch).await;
    }
    shared.publisher.close().await;
}

/// Publishes a batch in one commit. If one of its messages must wait, publishes each message alone.
async fn publish_batch(shared: &Arc<Shared>, batch: Vec<PendingMessage>) {
    let rows: Vec<&MessageRow> = batch.iter().map(|waiting| &waiting.row).collect();
    let written = retried(|| write(shared, &shared.pools.publish, &rows)).await;
    match written {
        Ok(published) => {
            for (waiting, published) in batch.into_iter().zip(published) {
                // A caller that stopped waiting needs no answer.
                let _ = waiting.answer.send(Ok(published));
            }
        }
        Err(error) if must_wait(&error) => {
            let alone = batch.len() == 1;
            for waiting in batch {
                publish_alone(shared, waiting, alone).await;
            }
        }
        Err(error) => {
            let cause = Cause::new(error);
            for waiting in batch {
                let _ = waiting.answer.send(Err(StoreError::Unavailable(cause.clone())));
            }
        }
    }
}

/// Publishes one message. A message that must wait for another transaction waits on a task of its
/// own.
async fn publish_alone(shared: &Arc<Shared>, waiting: PendingMessage, has_waited: bool) {
    let alone = [&waiting.row];
    if !has_waited {
        match retried(|| write(shared, &shared.pools.publish, &alone)).await {
            Err(error) if must_wait(&error) => {}
            written => return answer(waiting, written),
        }
    }
    let shared_too = Arc::clone(shared);
    shared.tasks.spawn(async move {
        let (pool, alone) = (&shared_too.pools.publish_waiting, [&waiting.row]);
        let written = retried(|| write(&shared_too, pool, &alone)).await;
        answer(waiting, written);
    });
}

fn answer(waiting: PendingMessage, written: Result<Vec<Published>, PgError>) {
    let published = written.and_then(|mut all| all.pop().ok_or(PgError::Gone));
    let _ = waiting.answer.send(published.map_err(StoreError::from));
}

/// Whether another transaction holds the id or the key of a message.
fn must_wait(error: &PgError) -> bool {
    error.code() == Some(&SqlState::LOCK_NOT_AVAILABLE)
}

/// Writes messages in one commit, and returns the answers in their order.
async fn write(
    shared: &Shared,
    pool: &ClientPool,
    messages: &[&MessageRow],
) -> Result<Vec<Published>, PgError> {
    let column = |read: fn(&MessageRow) -> &str| -> Vec<&str> {
        messages.iter().map(|row| read(row)).collect()
    };
    let optional = |read: fn(&MessageRow) -> Option<&str>| -> Vec<Option<&str>> {
        messages.iter().map(|row| read(row)).collect()
    };
    let mut client = pool.checkout().await?;
    let rows = client
        .query(
            "SELECT place, verdict, deliveries \
             FROM hapax.publish_messages($1, $2, $3, $4, $5, $6, $7, $8)",
            &[
                &column(|row| &row.tenant),
                &column(|row| &row.id),
                &column(|row| &row.r#type),
                &column(|row| &row.data),
                &column(|row| &row.thin),
                &optional(|row| row.key.as_deref()),
                &optional(|row| row.api_version.as_deref()),
                &shared.now(),
            ],
        )
        .await?;
    let mut published: Vec<(i64, Published)> = Vec::with_capacity(rows.len());
    for row in &rows {
        let place: i64 = row.get(0);
        let at = usize::try_from(place - 1).map_err(|_| PgError::Gone)?;
        let id = messages.get(at).ok_or(PgError::Gone)?.id.clone();
        let deliveries = u64::try_from(row.get::<_, i32>(2)).unwrap_or(0);
        published.push((
            place,
            match row.get(1) {
                1 => Published::Accepted(PublishedMessage { id, deliveries }),
                2 => Published::Duplicate(PublishedMessage { id, deliveries }),
                _conflict => Published::Conflict { id },
            },
        ));
    }
    if published.len() != messages.len() {
        return Err(PgError::Gone);
    }
    published.sort_unstable_by_key(|(place, _)| *place);
    Ok(published.into_iter().map(|(_, published)| published).collect())
}
