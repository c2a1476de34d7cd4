//! The data of statistics and alerts: how far behind each handler is, and a sample of recent
//! events. Large tables are read through indexes only.

use hapax_core::job::HandlerName;
use hapax_core::limits::LANE_COUNT_MAX;
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

/// The most events of a span that are counted one by one. For more events the number is an
/// estimate, and the sample is spread over time instead of over the events.
const COUNT_MAX: i64 = 500_000;

/// How far behind each handler is.
pub(super) async fn lanes(shared: &Shared) -> Result<Vec<LaneState>, StoreError> {
    let mut lent = shared.pools.admin.lend().await.map_err(read)?;
    let most = LANE_COUNT_MAX as i64;
    let rows = lent.query(include_str!("sql/lanes.sql"), &[&most]).await.map_err(read)?;
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
    let mut lent = shared.pools.admin.lend().await.map_err(read)?;
    let sql = "SELECT source, name, paused_at, paused_by, pause_reason FROM hapax.handler \
               WHERE paused_at IS NOT NULL ORDER BY source COLLATE \"C\", name COLLATE \"C\"";
    let rows = lent.query(sql, &[]).await.map_err(read)?;
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
    let mut lent = shared.pools.admin.lend().await.map_err(read)?;
    let most = LANE_COUNT_MAX as i64;
    let rows = lent.query(include_str!("sql/in_review.sql"), &[&most]).await.map_err(read)?;
    let counted =
        |row: &Row| (SourceName::new(row.get::<_, &str>(0)), row.get::<_, i64>(1).unsigned_abs());
    Ok(rows.iter().map(counted).collect())
}

/// The disk space of the database and of each table.
pub(super) async fn storage(shared: &Shared) -> Result<StorageUse, StoreError> {
    let mut lent = shared.pools.admin.lend().await.map_err(read)?;
    let rows = lent.query(include_str!("sql/storage.sql"), &[]).await.map_err(read)?;
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

/// Events of the span, all or evenly spread.
pub(super) async fn sample(shared: &Shared, ask: SampleAsk) -> Result<EventSample, StoreError> {
    let mut lent = shared.pools.admin.lend().await.map_err(read)?;
    sampled(&mut lent, ask).await.map_err(read)
}

async fn sampled(lent: &mut PooledClient, ask: SampleAsk) -> Result<EventSample, PgError> {
    let limit = i64::try_from(ask.limit.max(1)).unwrap_or(i64::MAX);
    let (from, most) = (first_id(ask.since), COUNT_MAX);
    // The id begins with the time, so a span is a range of the index; within its first millisecond
    // the column decides.
    let counted = lent
        .query(
            "WITH w AS (SELECT b.id FROM hapax.body b \
             WHERE b.id >= $1 AND (b.id >= $2 \
                 OR (SELECT e.received_at FROM hapax.event e WHERE e.id = b.id) >= $3) \
             ORDER BY b.id DESC LIMIT $4) \
             SELECT count(*), (SELECT id FROM w ORDER BY id LIMIT 1), \
             (SELECT id FROM w ORDER BY id DESC LIMIT 1) FROM w",
            &[&from, &next_millisecond(from), &ask.since, &most],
        )
        .await?;
    let Some(row) = counted.first() else {
        return Ok(EventSample { total: 0, events: Vec::new() });
    };
    let total: i64 = row.get(0);
    let (Some(oldest), Some(newest)) =
        (row.get::<_, Option<Uuid>>(1), row.get::<_, Option<Uuid>>(2))
    else {
        return Ok(EventSample { total: 0, events: Vec::new() });
    };
    let (total, ids) = if total < COUNT_MAX {
        let step = (total - 1) / limit + 1;
        (total, every(lent, oldest, newest, step).await?)
    } else {
        let covered = (millis(newest) - millis(oldest)).max(1);
        let span = (millis(newest) - ask.since.as_millisecond()).max(covered);
        let estimate = (total as f64 * span as f64 / covered as f64) as i64;
        (estimate, over_time(lent, from, newest, limit).await?)
    };
    let rows =
        lent.query(&format!("{SUMMARY} WHERE e.id = ANY ($1) ORDER BY e.id DESC"), &[&ids]).await?;
    let others = lent
        .query(
            "SELECT event, received_at FROM hapax.arrival WHERE event = ANY ($1) \
             ORDER BY event, received_at, request_id",
            &[&ids],
        )
        .await?;
    let events: Vec<_> = rows
        .iter()
        .map(|row| {
            let summary = summary(row);
            let of_event = others.iter().filter(|row| row.get::<_, Uuid>(0) == summary.id.0);
            let times = of_event.map(|row| row.get::<_, Timestamp>(1));
            let arrived_at = std::iter::once(summary.received_at).chain(times).collect();
            SampledEvent { summary, arrived_at }
        })
        .collect();
    Ok(EventSample { total: total.unsigned_abs().max(events.len() as u64), events })
}

/// Each `step`-th event from the newest on.
async fn every(
    lent: &mut PooledClient,
    oldest: Uuid,
    newest: Uuid,
    step: i64,
) -> Result<Vec<Uuid>, PgError> {
    let rows = lent
        .query(
            "SELECT w.id FROM (SELECT id, row_number() OVER (ORDER BY id DESC) AS n \
             FROM hapax.body WHERE id >= $1 AND id <= $2) w \
             WHERE (w.n - 1) % $3 = 0",
            &[&oldest, &newest, &step],
        )
        .await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

/// The events at `limit` evenly spaced moments of the span.
async fn over_time(
    lent: &mut PooledClient,
    from: Uuid,
    newest: Uuid,
    limit: i64,
) -> Result<Vec<Uuid>, PgError> {
    let (first, last) = (millis(from), millis(newest));
    let moments: Vec<Uuid> = (0..limit)
        .map(|n| {
            let at = last - (last - first) * n / limit;
            Uuid::from_u128(((at as u128 + 1) << 80) - 1)
        })
        .collect();
    let rows = lent
        .query(
            "SELECT DISTINCT e.id FROM unnest($1::uuid[]) AS m (moment), LATERAL ( \
             SELECT id FROM hapax.body WHERE id <= m.moment AND id >= $2 \
             ORDER BY id DESC LIMIT 1) e",
            &[&moments, &from],
        )
        .await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

/// The time in an id.
fn millis(id: Uuid) -> i64 {
    (id.as_u128() >> 80) as i64
}

fn next_millisecond(id: Uuid) -> Uuid {
    Uuid::from_u128(((id.as_u128() >> 80) + 1) << 80)
}
