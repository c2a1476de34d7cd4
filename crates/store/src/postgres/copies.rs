//! Copies as rows: those gathered by [`crate::copies`] are written within a second, all in one
//! statement. If the write fails they are dropped: such counts may be lost.

use std::sync::Arc;

use hapax_core::Timestamp;
use hapax_core::store::EventId;
use uuid::Uuid;

use super::Shared;
use super::connect::{PgError, retried};
use crate::copies::Waiting;
use crate::limits::{COPIES_FLUSH, COPIES_IN_FULL};

/// Events whose copies are written by one statement.
const EVENTS_PER_WRITE: usize = 2_000;

/// Writes waiting copies repeatedly, until the store is closed.
pub(super) async fn keep_writing(shared: Arc<Shared>) {
    loop {
        tokio::select! {
            () = shared.closing.cancelled() => return,
            () = shared.copies_full.notified() => {}
            () = tokio::time::sleep(COPIES_FLUSH) => {}
        }
        flush(&shared).await;
    }
}

/// Writes waiting copies, after a write that is in progress.
pub(super) async fn flush(shared: &Shared) {
    let _turn = shared.flushing.lock().await;
    let mut waiting = shared.copies.take();
    while !waiting.is_empty() {
        let rest = waiting.split_off(waiting.len().min(EVENTS_PER_WRITE));
        if let Err(error) = write(shared, &waiting).await {
            tracing::warn!(events = waiting.len(), "copies were not counted: {error}");
        }
        shared.copies.wrote(waiting.len());
        waiting = rest;
    }
}

async fn write(shared: &Shared, copies: &[(EventId, Waiting)]) -> Result<(), PgError> {
    let events: Vec<Uuid> = copies.iter().map(|(event, _)| event.0).collect();
    let counts: Vec<i64> = copies.iter().map(|(_, waiting)| waiting.count as i64).collect();
    let lasts: Vec<Timestamp> = copies.iter().map(|(_, waiting)| waiting.last_at()).collect();
    let seen: Vec<_> = copies
        .iter()
        .flat_map(|(event, waiting)| waiting.newest.iter().map(|copy| (event.0, copy)))
        .collect();
    let of: Vec<Uuid> = seen.iter().map(|(event, _)| *event).collect();
    let at: Vec<Timestamp> = seen.iter().map(|(_, copy)| copy.received_at).collect();
    let request_ids: Vec<Uuid> = seen.iter().map(|(_, copy)| copy.request_id).collect();
    let remotes: Vec<_> = seen.iter().map(|(_, copy)| copy.remote).collect();
    let secrets: Vec<i32> = seen.iter().map(|(_, copy)| copy.secret as i32).collect();
    let signed: Vec<_> = seen.iter().map(|(_, copy)| copy.signed_at).collect();
    let keep = COPIES_IN_FULL as i32;
    retried(|| async {
        let mut lent = shared.pools.admin.lend().await?;
        lent.query(
            "SELECT hapax.count_copies($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
            &[&events, &counts, &lasts, &of, &at, &request_ids, &remotes, &secrets, &signed, &keep],
        )
        .await
        .map(drop)
    })
    .await
}
