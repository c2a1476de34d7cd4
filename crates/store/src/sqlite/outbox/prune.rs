//! Retention of messages. A message past its time whose deliveries are over loses its bytes, its deliveries
//! and their attempts. The message keeps a narrow row, so that its id stays known until the horizon of ids.
//! A message with a delivery that is open or dead stays.

use std::time::Instant;

use hapax_core::Tenant;
use hapax_core::store::Horizon;
use rusqlite::Connection;

use super::Outbox;
use super::row::{CANCELLED, DELIVERED};
use crate::limits::PRUNE_SLICE_MAX;
use crate::sqlite::row::micros;
use crate::sqlite::tenant_deletion::Erased;
use crate::sqlite::transaction::Transaction;
use crate::sqlite::writer::Writer;

/// The progress of the rounds.
#[derive(Debug, Default)]
pub(in crate::sqlite) struct MessageScan {
    /// The message that was checked last for its bytes.
    whole: i64,
    /// The message that was checked last for its id.
    narrow: i64,
    /// The horizon whose round over the bytes is over. Without this record, rounds of different
    /// lengths would each begin again while the other is not over, and retention would never end.
    stripped: Option<i64>,
    /// The horizon whose round over the ids is over.
    forgotten: Option<i64>,
}

/// The tables that are deleted with the bytes of a message, and the column that names the message.
const HISTORY: [(&str, &str); 4] = [
    ("hapax_message_body", "seq"),
    ("hapax_delivery", "message_seq"),
    ("hapax_delivery_attempt", "message_seq"),
    ("hapax_sending_action", "message_seq"),
];

/// Checks up to `limit` messages for each horizon, for a few milliseconds. Returns true if there may be
/// more.
pub(in crate::sqlite) fn slice(
    writer: &mut Writer,
    horizon: &Horizon,
    limit: usize,
) -> rusqlite::Result<bool> {
    let before = micros(horizon.events_before);
    let ids_before = micros(horizon.message_ids_before);
    let more_whole = writer.prune_progress.messages.stripped != Some(before) && {
        let more = strip(writer, before, limit)?;
        writer.prune_progress.messages.stripped = (!more).then_some(before);
        more
    };
    let more_narrow = writer.prune_progress.messages.forgotten != Some(ids_before) && {
        let more = forget(writer, ids_before, limit)?;
        // Rows that the other round has yet to strip are left to the next round.
        let is_over = !more && !more_whole;
        writer.prune_progress.messages.forgotten = is_over.then_some(ids_before);
        more
    };
    Ok(more_whole || more_narrow)
}

fn strip(writer: &mut Writer, before: i64, limit: usize) -> rusqlite::Result<bool> {
    let until = Instant::now() + PRUNE_SLICE_MAX;
    let passed = writer.prune_progress.messages.whole;
    let mut looked = whole_after(&writer.conn, passed, limit)?;
    let found = looked.len();
    // A message with a future time was published while the clock was wrong. Messages after it may be
    // old.
    let ends_here = before..=micros(writer.now());
    looked.truncate(looked.iter().take_while(|(_, at)| !ends_here.contains(at)).count());
    let is_last = looked.len() < found || found < limit;
    let mut reached = passed;
    if !looked.is_empty() {
        let tx = Transaction::begin_unsynced(&writer.conn)?;
        for (seq, created_at) in &looked {
            if *created_at < before && is_over(&writer.conn, *seq, before)? {
                for (table, column) in HISTORY {
                    let delete = format!("DELETE FROM {table} WHERE {column} = ?1");
                    writer.conn.prepare_cached(&delete)?.execute([seq])?;
                }
            }
            reached = *seq;
            if Instant::now() >= until {
                break;
            }
        }
        tx.commit()?;
    }
    let is_cut = looked.last().is_some_and(|(last, _)| *last > reached);
    let more = !is_last || is_cut;
    writer.prune_progress.messages.whole = if more { reached } else { 0 };
    Ok(more)
}

impl Outbox {
    /// Deletes bytes, deliveries and order keys of up to `limit` messages of a tenant after
    /// `passed` and up to `last`, in the open transaction.
    pub(in crate::sqlite) fn erase(
        &mut self,
        conn: &Connection,
        tenant: &Tenant,
        passed: i64,
        last: i64,
        limit: usize,
    ) -> rusqlite::Result<Erased> {
        let found: Vec<i64> = conn
            .prepare_cached(
                "SELECT seq FROM hapax_message
                 WHERE seq > ?1 AND seq <= ?2 AND tenant = ?3 ORDER BY seq LIMIT ?4",
            )?
            .query_map((passed, last, tenant.as_str(), limit as i64), |row| row.get(0))?
            .collect::<rusqlite::Result<_>>()?;
        let mut count = 0;
        for seq in &found {
            for (table, column) in HISTORY {
                let delete = format!("DELETE FROM {table} WHERE {column} = ?1");
                let deleted = conn.prepare_cached(&delete)?.execute([seq])?;
                // Retention has deleted the bytes of the other messages.
                count += if table == "hapax_message_body" { deleted } else { 0 };
            }
            conn.prepare_cached("UPDATE hapax_message SET key = NULL WHERE seq = ?1")?
                .execute([seq])?;
        }
        // This includes messages of endpoints that were deleted since.
        self.leased.clear();
        // An endpoint that was added since may have got some of these messages.
        for number in self.of_tenant.get(tenant).cloned().unwrap_or_default() {
            self.refresh(conn, number)?;
        }
        let reached = found.last().filter(|_| found.len() == limit).copied().unwrap_or(last);
        Ok(Erased { reached, count })
    }
}

fn whole_after(conn: &Connection, passed: i64, limit: usize) -> rusqlite::Result<Vec<(i64, i64)>> {
    conn.prepare_cached(
        "SELECT b.seq, m.created_at FROM hapax_message_body b CROSS JOIN hapax_message m ON m.seq = b.seq
         WHERE b.seq > ?1 ORDER BY b.seq LIMIT ?2",
    )?
    .query_map((passed, limit as i64), |row| Ok((row.get(0)?, row.get(1)?)))?
    .collect()
}

/// Whether every delivery of a message ended before this time.
fn is_over(conn: &Connection, seq: i64, before: i64) -> rusqlite::Result<bool> {
    let lives = conn
        .prepare_cached(
            "SELECT 1 FROM hapax_delivery
             WHERE message_seq = ?1 AND (state NOT IN (?2, ?3) OR due_at >= ?4)",
        )?
        .exists((seq, DELIVERED, CANCELLED, before))?;
    Ok(!lives)
}

/// Deletes the narrow rows of messages that no longer have bytes.
fn forget(writer: &mut Writer, before: i64, limit: usize) -> rusqlite::Result<bool> {
    let passed = writer.prune_progress.messages.narrow;
    let mut looked: Vec<(i64, i64, bool)> = writer
        .conn
        .prepare_cached(
            "SELECT m.seq, m.created_at, b.seq IS NULL
             FROM hapax_message m LEFT JOIN hapax_message_body b ON b.seq = m.seq
             WHERE m.seq > ?1 ORDER BY m.seq LIMIT ?2",
        )?
        .query_map((passed, limit as i64), |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?
        .collect::<rusqlite::Result<_>>()?;
    let found = looked.len();
    let ends_here = before..=micros(writer.now());
    looked.truncate(looked.iter().take_while(|(_, at, _)| !ends_here.contains(at)).count());
    let more = looked.len() == found && found == limit;
    let is_old = |(_, at, narrow): &&(i64, i64, bool)| *at < before && *narrow;
    let gone: Vec<i64> = looked.iter().filter(is_old).map(|(seq, ..)| *seq).collect();
    if let Some(last) = gone.last() {
        let tx = Transaction::begin_unsynced(&writer.conn)?;
        for seq in &gone {
            writer
                .conn
                .prepare_cached("DELETE FROM hapax_message WHERE seq = ?1")?
                .execute([seq])?;
        }
        // The highest number ever assigned stays known, even after its message is deleted.
        writer
            .conn
            .prepare_cached(
                "UPDATE hapax_meta SET value = max(value, ?1) WHERE name = 'last_message'",
            )?
            .execute([last])?;
        tx.commit()?;
    }
    let reached = looked.last().map_or(passed, |(seq, ..)| *seq);
    writer.prune_progress.messages.narrow = if more { reached } else { 0 };
    Ok(more)
}
