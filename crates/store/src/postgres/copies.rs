//! Copies as rows: the copies gathered by [`crate::copies`] are written within a second, in
//! statements of up to 2,000 events. If a write fails, its copies are dropped: such counts may be
//! lost.

use std::sync::Arc;

use hapax_core::Timestamp;
use hapax_core::store::EventId;
use uuid::Uuid;

use super::Shared;
use super::connect::{PgError, retried};
use super::ingest_rows::composite;
use super::row::stamp;
use crate::copies::{CopyRecord, UnwrittenCopies};
use crate::limits::{COPIES_FLUSH, COPIES_IN_FULL};

/// Events whose copies are written by one statement.
const EVENTS_PER_WRITE: usize = 2_000;

/// Among events with one new copy, one in this many is checked for too many rows. So an event that
/// is copied all the time keeps about that many more rows, and most copies of a retry storm need no
/// check.
const CHECKED_ONE_IN: u8 = 8;

/// A `hapax.copied`.
#[derive(Debug)]
struct CopyRow {
    event: Uuid,
    received_at: Timestamp,
    request_id: Uuid,
    remote: Option<std::net::IpAddr>,
    secret: i32,
    signed_at: Option<Timestamp>,
}

composite!(CopyRow { event, received_at, request_id, remote, secret, signed_at });

impl CopyRow {
    fn new(event: EventId, copy: &CopyRecord) -> Self {
        Self {
            event: event.0,
            received_at: copy.received_at,
            request_id: copy.request_id,
            remote: copy.remote,
            secret: i32::try_from(copy.secret).unwrap_or(i32::MAX),
            signed_at: copy.signed_at.map(stamp),
        }
    }
}

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

/// Writes waiting copies. A write that is in progress ends first.
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

async fn write(shared: &Shared, copies: &[(EventId, UnwrittenCopies)]) -> Result<(), PgError> {
    // The rows are in the order of their events, so that the rows of one page are written together.
    let rows: Vec<CopyRow> = copies
        .iter()
        .flat_map(|(event, waiting)| waiting.newest.iter().map(|copy| CopyRow::new(*event, copy)))
        .collect();
    let only_counted = copies.iter().filter_map(|(event, waiting)| {
        let others = waiting.count.saturating_sub(waiting.newest.len() as u64);
        (others > 0).then_some((event.0, others as i64))
    });
    let (many, counts): (Vec<Uuid>, Vec<i64>) = only_counted.unzip();
    let crowded = copies.iter().filter(|(_, waiting)| is_checked(waiting));
    let crowded: Vec<Uuid> = crowded.map(|(event, _)| event.0).collect();
    let keep = COPIES_IN_FULL as i32;
    retried(|| async {
        let mut client = shared.pools.admin.checkout().await?;
        client
            .query(
                "SELECT hapax.count_copies($1, $2, $3, $4, $5)",
                &[&rows, &many, &counts, &crowded, &keep],
            )
            .await
            .map(drop)
    })
    .await
}

/// Whether the event is checked for too many rows.
fn is_checked(waiting: &UnwrittenCopies) -> bool {
    let random = |copy: &CopyRecord| copy.request_id.as_bytes()[15];
    waiting.count > 1 || waiting.newest.iter().any(|copy| random(copy) % CHECKED_ONE_IN == 0)
}
