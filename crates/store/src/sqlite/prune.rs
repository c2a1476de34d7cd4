//! Retention: what is finished and past its time goes, in small slices between the batches.
//!
//! Bodies and keys have horizons of their own. An event past the first loses its body, its history
//! and its jobs, and keeps a narrow row, so that a late copy is still known; past the second the row
//! and its key go too. Nothing that is open, dead or waits for a person is touched. Idempotency-Keys
//! have a time of their own each ([`ledger::forget`]).
//!
//! The broom goes over the events from old to new. What was not finished when it passed is looked at
//! again each time; once a day it begins anew, should there have been too much of that.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use hapax_core::store::{Horizon, Status};
use hapax_core::{EventKey, KeyHash, SourceName, Tenant, Timestamp};
use rusqlite::Connection;

use super::row::{Standing, micros, status_at};
use super::writer::Writer;
use super::{ledger, messages};

/// How often the broom begins anew.
const BEGIN_ANEW: Duration = Duration::from_secs(86_400);

/// Unfinished events that are remembered.
const LEFT_MAX: usize = 10_000;

/// Where the broom is.
#[derive(Debug)]
pub(super) struct Broom {
    passed: i64,
    /// Passed, old enough, and not finished at that time.
    left: BTreeSet<i64>,
    /// Sources whose keys are forgotten some day; with another set it begins anew.
    sources: Vec<SourceName>,
    began: Instant,
}

impl Default for Broom {
    fn default() -> Self {
        Self { passed: 0, left: BTreeSet::new(), sources: Vec::new(), began: Instant::now() }
    }
}

/// An event as the broom sees it.
struct Swept {
    seq: i64,
    tenant: Tenant,
    source: SourceName,
    event_id: String,
    received_at: i64,
    guard: Option<[u8; 16]>,
    guard_until: Option<i64>,
    standing: Standing,
    pruned: bool,
}

/// Looks at `limit` events and as many Idempotency-Keys; true when there may be more.
pub(super) fn slice(
    writer: &mut Writer,
    horizon: &Horizon,
    limit: usize,
) -> rusqlite::Result<bool> {
    let more_keys = ledger::forget(writer, limit)?;
    let more_messages = messages::forget(writer, horizon.events_before, limit)?;
    let more_events = events(writer, horizon, limit)?;
    Ok(more_keys || more_messages || more_events)
}

fn events(writer: &mut Writer, horizon: &Horizon, limit: usize) -> rusqlite::Result<bool> {
    let sources: Vec<_> = horizon.keys_before.iter().map(|(source, _)| source.clone()).collect();
    if writer.broom.began.elapsed() > BEGIN_ANEW || writer.broom.sources != sources {
        writer.broom = Broom { sources, ..Broom::default() };
    }
    // A merge would bring forgotten keys back; it is over in a moment.
    if writer.index.is_merging() {
        return Ok(false);
    }
    writer.in_transaction(|writer| {
        for seq in writer.broom.left.iter().copied().take(limit).collect::<Vec<_>>() {
            for event in look(&writer.conn, seq - 1, 1)?.iter().filter(|event| event.seq == seq) {
                sweep(writer, event, horizon)?;
            }
        }
        let swept = look(&writer.conn, writer.broom.passed, limit)?;
        for event in &swept {
            if event.received_at >= micros(horizon.events_before) {
                return Ok(false);
            }
            sweep(writer, event, horizon)?;
            writer.broom.passed = event.seq;
        }
        Ok(swept.len() == limit)
    })
}

fn look(conn: &Connection, passed: i64, limit: usize) -> rusqlite::Result<Vec<Swept>> {
    conn.prepare_cached(
        "SELECT e.seq, p.tenant, p.source, e.event_id, e.received_at, e.guard_hash, e.state,
                e.review, e.pruned IS NOT NULL, e.guard_until
         FROM hapax_event e JOIN hapax_pair p ON p.pair = e.pair
         WHERE e.seq > ?1 ORDER BY e.seq LIMIT ?2",
    )?
    .query_map((passed, limit as i64), |row| {
        Ok(Swept {
            seq: row.get(0)?,
            tenant: Tenant::new(row.get_ref(1)?.as_str()?),
            source: SourceName::new(row.get_ref(2)?.as_str()?),
            event_id: row.get(3)?,
            received_at: row.get(4)?,
            guard: row.get(5)?,
            standing: Standing::from_columns(row.get(6)?, row.get(7)?),
            pruned: row.get(8)?,
            guard_until: row.get(9)?,
        })
    })?
    .collect()
}

fn sweep(writer: &mut Writer, event: &Swept, horizon: &Horizon) -> rusqlite::Result<()> {
    if !event.pruned {
        let status = status_at(&writer.conn, event.seq, event.standing)?;
        if !status.is_final() || !jobs_are_over(&writer.conn, event.seq)? {
            if writer.broom.left.len() < LEFT_MAX {
                writer.broom.left.insert(event.seq);
            }
            return Ok(());
        }
        strip(&writer.conn, event.seq, status)?;
    }
    let keep_from = |before: &Timestamp| event.received_at < micros(*before);
    let key_is_old = horizon
        .keys_before
        .iter()
        .any(|(source, before)| *source == event.source && keep_from(before));
    if key_is_old && guards_are_over(writer, event)? {
        forget(writer, event)?;
        writer.broom.left.remove(&event.seq);
    } else if horizon.keys_before.iter().any(|(source, _)| *source == event.source)
        && writer.broom.left.len() < LEFT_MAX
    {
        // Its key has a horizon of its own, still to come.
        writer.broom.left.insert(event.seq);
    } else {
        writer.broom.left.remove(&event.seq);
    }
    Ok(())
}

/// What was signed for an event is known for its own time, also where its key is kept for less. It
/// stays until the key goes: taking it from the index alone would cost a page for each event.
fn guards_are_over(writer: &Writer, event: &Swept) -> rusqlite::Result<bool> {
    let now = micros(writer.now());
    if event.guard_until.is_some_and(|until| until > now) {
        return Ok(false);
    }
    let holds = writer
        .conn
        .prepare_cached("SELECT 1 FROM hapax_guard WHERE event_seq = ?1 AND until > ?2")?
        .exists((event.seq, now))?;
    Ok(!holds)
}

/// An event that was discarded for one handler may still be needed by another.
fn jobs_are_over(conn: &Connection, seq: i64) -> rusqlite::Result<bool> {
    let open = conn
        .prepare_cached("SELECT 1 FROM hapax_job WHERE event_seq = ?1 AND state NOT IN (2, 3, 8)")?
        .exists([seq])?;
    Ok(!open)
}

/// Takes body and history from an event.
fn strip(conn: &Connection, seq: i64, status: Status) -> rusqlite::Result<()> {
    conn.prepare_cached(
        "UPDATE hapax_event SET pruned = ?2, body = x'', headers = '' WHERE seq = ?1",
    )?
    .execute((seq, status.as_str()))?;
    delete_history(conn, seq)
}

fn delete_history(conn: &Connection, seq: i64) -> rusqlite::Result<()> {
    for table in ["hapax_job", "hapax_attempt", "hapax_arrival", "hapax_copy", "hapax_action"] {
        conn.prepare_cached(&format!("DELETE FROM {table} WHERE event_seq = ?1"))?
            .execute([seq])?;
    }
    Ok(())
}

/// Forgets the event and its key.
fn forget(writer: &mut Writer, event: &Swept) -> rusqlite::Result<()> {
    let key = EventKey {
        tenant: event.tenant.clone(),
        source: event.source.clone(),
        event_id: event.event_id.as_str().into(),
    };
    for hash in std::iter::once(key.hash()).chain(event.guard.map(KeyHash)) {
        writer.index.forget(&writer.conn, &hash)?;
        writer.shared.recent.remove(&hash);
    }
    writer
        .conn
        .prepare_cached("DELETE FROM hapax_guard WHERE event_seq = ?1")?
        .execute([event.seq])?;
    // Copies that came since its body went were counted all the same.
    delete_history(&writer.conn, event.seq)?;
    // The highest number ever given stays known, also when its event is gone.
    writer
        .conn
        .prepare_cached("UPDATE hapax_meta SET value = max(value, ?1) WHERE name = 'last_seq'")?
        .execute([event.seq])?;
    writer.conn.prepare_cached("DELETE FROM hapax_event WHERE seq = ?1")?.execute([event.seq])?;
    Ok(())
}
