//! The data of figures and alerts: how far behind each handler is, and a sample of recent events.
//! Both read only partial indexes and single rows, so their cost does not grow with the database.

use hapax_core::limits::{COPIES_READ_MAX, LANE_COUNT_MAX};
use hapax_core::store::{
    EventSample, HandlerRef, LaneState, PausedHandler, SampleAsk, SampledEvent, StorageUse,
};
use hapax_core::{SourceName, Timestamp};
use rusqlite::{Connection, OptionalExtension};

use super::jobs::handler_of;
use super::lists::Numbered;
use super::reader::{SUMMARY, summary};
use super::row::{DEAD, HELD, LEASED, PARKED, READY, REVIEW, micros, timestamp};

/// The states that are counted. Each is written out exactly as in its partial index, so that this index is
/// used.
pub(super) const CONDITIONS: [(i64, &str); 6] = [
    (READY, "state = 0 /* ready */"),
    (LEASED, "state = 1 /* leased */"),
    (HELD, "state = 5 /* held */"),
    (PARKED, "state = 6 /* parked */"),
    (REVIEW, "state = 7 /* review */"),
    (DEAD, "state = 4 /* dead */"),
];

/// How far behind each handler is.
pub(super) fn lanes(conn: &Connection) -> rusqlite::Result<Vec<LaneState>> {
    let mut lanes = conn.prepare_cached(
        "SELECT l.lane, h.source, h.name FROM hapax_lane l
         JOIN hapax_handler h ON h.handler = l.handler ORDER BY h.source, h.name",
    )?;
    let mut rows = lanes.query([])?;
    let mut states: Vec<LaneState> = Vec::new();
    while let Some(row) = rows.next()? {
        let lane: i64 = row.get(0)?;
        let handler = handler_of(row, 1)?;
        if states.last().is_none_or(|last| last.handler != handler) {
            states.push(nothing(handler));
        }
        if let Some(state) = states.last_mut() {
            add_lane(conn, lane, state)?;
        }
    }
    states.retain(|lane| lane.open() + lane.dead > 0);
    Ok(states)
}

/// The handlers that are paused.
pub(super) fn paused_handlers(conn: &Connection) -> rusqlite::Result<Vec<PausedHandler>> {
    conn.prepare_cached(
        "SELECT source, name, paused_at, paused_by, pause_reason FROM hapax_handler
         WHERE paused_at IS NOT NULL ORDER BY source, name",
    )?
    .query_map([], |row| {
        Ok(PausedHandler {
            handler: handler_of(row, 0)?,
            since: timestamp(row.get(2)?),
            who: row.get(3)?,
            reason: row.get(4)?,
        })
    })?
    .collect()
}

/// Events in review, by source.
pub(super) fn in_review(conn: &Connection) -> rusqlite::Result<Vec<(SourceName, u64)>> {
    conn.prepare_cached(include_str!("sql/in_review.sql"))?
        .query_map([LANE_COUNT_MAX as i64], |row| {
            Ok((SourceName::new(row.get_ref(0)?.as_str()?), row.get::<_, i64>(1)?.unsigned_abs()))
        })?
        .collect()
}

/// The disk space of the database files. The size of each table would need a read of every page.
pub(super) fn storage(conn: &Connection) -> rusqlite::Result<StorageUse> {
    let number = |pragma: &str| {
        let found: i64 = conn.pragma_query_value(None, pragma, |row| row.get(0))?;
        Ok::<_, rusqlite::Error>(found.unsigned_abs())
    };
    let page = number("page_size")?;
    let log = conn.path().and_then(|path| std::fs::metadata(format!("{path}-wal")).ok());
    Ok(StorageUse {
        database_bytes: page * number("page_count")?,
        free_bytes: Some(page * number("freelist_count")?),
        log_bytes: Some(log.map_or(0, |file| file.len())),
        tables: Vec::new(),
    })
}

fn nothing(handler: HandlerRef) -> LaneState {
    LaneState {
        handler,
        oldest_due: None,
        ready: 0,
        leased: 0,
        held: 0,
        parked: 0,
        review: 0,
        dead: 0,
    }
}

/// Adds one tenant's jobs.
fn add_lane(conn: &Connection, lane: i64, totals: &mut LaneState) -> rusqlite::Result<()> {
    for (state, condition) in CONDITIONS {
        let count = match state {
            READY => &mut totals.ready,
            LEASED => &mut totals.leased,
            HELD => &mut totals.held,
            PARKED => &mut totals.parked,
            REVIEW => &mut totals.review,
            _dead => &mut totals.dead,
        };
        let more: i64 = conn
            .prepare_cached(&format!(
                "SELECT count(*) FROM
                 (SELECT 1 FROM hapax_job WHERE lane = ?1 AND {condition} LIMIT ?2)"
            ))?
            .query_row((lane, (LANE_COUNT_MAX - *count) as i64), |row| row.get(0))?;
        *count += more.unsigned_abs();
    }
    for condition in ["state = 0 /* ready */", "state = 1 /* leased */"] {
        let earliest: Option<i64> = conn
            .prepare_cached(&format!(
                "SELECT due_at FROM hapax_job WHERE lane = ?1 AND {condition}
                 ORDER BY due_at LIMIT 1"
            ))?
            .query_row([lane], |row| row.get(0))
            .optional()?;
        totals.oldest_due = totals.oldest_due.into_iter().chain(earliest.map(timestamp)).min();
    }
    Ok(())
}

/// Events of the span that arrived more than once, all or evenly spread.
pub(super) fn sample(conn: &Connection, ask: SampleAsk) -> rusqlite::Result<EventSample> {
    let since = micros(ask.since);
    // One snapshot, so that the copies of each event are those that were found.
    let snapshot = conn.unchecked_transaction()?;
    let oldest = Numbered::Events.since(&snapshot, ask.since)?;
    let mut copied: Vec<i64> = snapshot
        .prepare_cached(
            "SELECT event_seq FROM hapax_arrival WHERE event_seq >= ?1
             ORDER BY event_seq DESC LIMIT ?2",
        )?
        .query_map((oldest, COPIES_READ_MAX as i64), |row| row.get(0))?
        .collect::<rusqlite::Result<_>>()?;
    let is_cut = copied.len() == COPIES_READ_MAX;
    copied.dedup();
    let limit = ask.limit.max(1);
    let mut one =
        snapshot.prepare_cached(&format!("{SUMMARY} WHERE e.seq = ?1 AND e.received_at >= ?2"))?;
    let mut events = Vec::new();
    for seq in copied.iter().step_by(copied.len().div_ceil(limit).max(1)) {
        if let Some((seq, summary)) = one.query_row((seq, since), summary).optional()? {
            let mut arrived_at = vec![summary.received_at];
            arrived_at.extend(other_arrivals(&snapshot, seq)?);
            events.push(SampledEvent { summary, arrived_at });
        }
    }
    // Events near the beginning of the span may lie before it.
    let is_whole = copied.len() <= limit && !is_cut;
    let total = if is_whole { events.len() } else { copied.len() + usize::from(is_cut) };
    Ok(EventSample { total: total as u64, events })
}

/// The times of the arrivals after the first that are kept.
fn other_arrivals(conn: &Connection, seq: i64) -> rusqlite::Result<Vec<Timestamp>> {
    conn.prepare_cached(
        "SELECT received_at FROM hapax_arrival WHERE event_seq = ?1
         ORDER BY received_at, request_id",
    )?
    .query_map([seq], |row| row.get(0).map(timestamp))?
    .collect()
}
