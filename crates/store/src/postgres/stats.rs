//! The data of statistics and alerts: how far behind each handler is, and a sample of recent
//! events. Large tables are read through indexes only.

use std::collections::HashMap;

use hapax_core::job::HandlerName;
use hapax_core::limits::{COPIES_READ_MAX, LANE_COUNT_MAX};
use hapax_core::store::{
    EventSample, HandlerRef, LaneState, PausedHandler, SampleAsk, SampledEvent, StorageUse,
    StoreError, TableUse,
};
use hapax_core::{SourceName, Timestamp};
use tokio_postgres::Row;
use uuid::Uuid;

use super::Shared;
use super::connect::{PgError, PooledClient};
use super::reader::{SUMMARY, read, summary};
use super::row::first_id;

/// How far behind each handler is.
pub(super) async fn lanes(shared: &Shared) -> Result<Vec<LaneState>, StoreError> {
    let mut client = shared.pools.admin.checkout().await.map_err(read)?;
    let most = LANE_COUNT_MAX as i64;
    let rows = client.query(include_str!("sql/lanes.sql"), &[&most]).await.map_err(read)?;
    let count = |row: &Row, column| row.get::<_, i64>(column).unsigned_abs();
    let states = rows.iter().map(|row| LaneState {
        handler: HandlerRef {
            source: SourceName::new(row.get::<_, &str>(0)),
            handler: HandlerName::new(row.get::<_, &str>(1)),
        },
        oldest_due: row.get(2),
        ready: count(row, 3),
        leased: count(row, 4),
        held: count(row, 5),
        parked: count(row, 6),
        review: count(row, 7),
        dead: count(row, 8),
    });
    Ok(states.filter(|lane| lane.open() + lane.review + lane.dead > 0).collect())
}

/// The handlers that are paused.
pub(super) async fn paused_handlers(shared: &Shared) -> Result<Vec<PausedHandler>, StoreError> {
    let mut client = shared.pools.admin.checkout().await.map_err(read)?;
    let sql = "SELECT source, name, paused_at, paused_by, pause_reason FROM hapax.handler \
               WHERE paused_at IS NOT NULL ORDER BY source COLLATE \"C\", name COLLATE \"C\"";
    let rows = client.query(sql, &[]).await.map_err(read)?;
    let paused = rows.iter().map(|row| PausedHandler {
        handler: HandlerRef {
            source: SourceName::new(row.get::<_, &str>(0)),
            handler: HandlerName::new(row.get::<_, &str>(1)),
        },
        since: row.get(2),
        who: row.get::<_, Option<String>>(3).unwrap_or_default(),
        reason: row.get(4),
    });
    Ok(paused.collect())
}

/// Events in review, by source.
pub(super) async fn in_review(shared: &Shared) -> Result<Vec<(SourceName, u64)>, StoreError> {
    let mut client = shared.pools.admin.checkout().await.map_err(read)?;
    let most = LANE_COUNT_MAX as i64;
    let rows = client.query(include_str!("sql/in_review.sql"), &[&most]).await.map_err(read)?;
    let counted =
        |row: &Row| (SourceName::new(row.get::<_, &str>(0)), row.get::<_, i64>(1).unsigned_abs());
    Ok(rows.iter().map(counted).collect())
}

/// The disk space of the database and of each table.
pub(super) async fn storage(shared: &Shared) -> Result<StorageUse, StoreError> {
    let mut client = shared.pools.admin.checkout().await.map_err(read)?;
    let rows = client.query(include_str!("sql/storage.sql"), &[]).await.map_err(read)?;
    let count = |row: &Row, column| row.get::<_, i64>(column).unsigned_abs();
    let table =
        |row: &Row| TableUse { name: row.get(0), bytes: count(row, 1), rows: count(row, 2) };
    Ok(StorageUse {
        database_bytes: rows.first().map_or(0, |row| count(row, 3)),
        free_bytes: None,
        log_bytes: None,
        tables: rows.iter().map(table).collect(),
    })
}

/// Events of the span that arrived more than once: all of them, or an evenly spread part.
pub(super) async fn sample(shared: &Shared, ask: SampleAsk) -> Result<EventSample, StoreError> {
    let mut client = shared.pools.admin.checkout().await.map_err(read)?;
    sampled(&mut client, ask).await.map_err(read)
}

async fn sampled(client: &mut PooledClient, ask: SampleAsk) -> Result<EventSample, PgError> {
    // The id begins with the time, so a span is a range of the index. Within the first millisecond
    // of the span, the column decides.
    let from = first_id(ask.since);
    let copies = client
        .query(
            "SELECT event FROM hapax.arrival WHERE event >= $1 ORDER BY event DESC LIMIT $2",
            &[&from, &(COPIES_READ_MAX as i64)],
        )
        .await?;
    let is_cut = copies.len() == COPIES_READ_MAX;
    let mut copied: Vec<Uuid> = copies.iter().map(|row| row.get(0)).collect();
    copied.dedup();
    let limit = ask.limit.max(1);
    let step = copied.len().div_ceil(limit).max(1);
    let ids: Vec<Uuid> = copied.iter().copied().step_by(step).collect();
    let rows = client
        .query(
            &format!("{SUMMARY} WHERE e.id = ANY ($1) AND e.received_at >= $2 ORDER BY e.id DESC"),
            &[&ids, &ask.since],
        )
        .await?;
    let others = client
        .query(
            "SELECT event, received_at FROM hapax.arrival WHERE event = ANY ($1) \
             ORDER BY event, received_at, request_id",
            &[&ids],
        )
        .await?;
    let mut times: HashMap<Uuid, Vec<Timestamp>> = HashMap::new();
    for row in &others {
        times.entry(row.get(0)).or_default().push(row.get(1));
    }
    let event = |row: &Row| {
        let summary = summary(row);
        let later = times.remove(&summary.id.0).unwrap_or_default();
        let arrived_at = std::iter::once(summary.received_at).chain(later).collect();
        SampledEvent { summary, arrived_at }
    };
    let events: Vec<_> = rows.iter().map(event).collect();
    let is_whole = copied.len() <= limit && !is_cut;
    let total = if is_whole { events.len() } else { copied.len() + usize::from(is_cut) };
    Ok(EventSample { total: total as u64, events })
}
