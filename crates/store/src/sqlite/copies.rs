//! Copies and conflicts as rows: those gathered by [`crate::copies`], and those written at once.
//!
//! The newest few arrivals of an event are rows, and the others are only counted. Most copies therefore
//! cost one inserted row. The number of arrivals is the number of rows plus that count. Arrivals of an event
//! whose body was pruned are only counted, so that neither bodies nor addresses outlive it.

use hapax_core::store::ArrivalInfo;
use rusqlite::{CachedStatement, Connection, OptionalExtension as _};

use super::row::micros;
use crate::copies::{CopyRecord, UnwrittenCopies};
use crate::limits::{CONFLICTS_IN_FULL, COPIES_IN_FULL};

/// Writes copies within the transaction that is open on `conn`.
pub(super) fn write(
    conn: &Connection,
    copies: Vec<(i64, UnwrittenCopies)>,
) -> rusqlite::Result<()> {
    let mut insert = conn.prepare_cached(include_str!("sql/insert_arrival.sql"))?;
    let mut stored = conn.prepare_cached(include_str!("sql/stored_copies.sql"))?;
    let mut trim = conn.prepare_cached(include_str!("sql/trim_arrivals.sql"))?;
    for (seq, waiting) in copies {
        let mut only_counted = waiting.count as i64;
        for copy in &waiting.newest {
            only_counted -= insert_arrival(&mut insert, seq, copy, None)? as i64;
        }
        let stored: i64 = stored.query_row([seq], |row| row.get(0))?;
        if stored > COPIES_IN_FULL as i64 {
            only_counted += trim.execute((seq, COPIES_IN_FULL as i64 - 1))? as i64;
        }
        if only_counted > 0 {
            count(conn, seq, only_counted, 0)?;
        }
    }
    Ok(())
}

/// Writes a conflict within the transaction that is open on `conn`: the first few with their bodies, while the event
/// has its own.
pub(super) fn write_conflict(
    conn: &Connection,
    seq: i64,
    via: &ArrivalInfo,
    body: &[u8],
) -> rusqlite::Result<()> {
    let mut so_far =
        conn.prepare_cached("SELECT conflicts FROM hapax_copy WHERE event_seq = ?1")?;
    let so_far: Option<i64> = so_far.query_row([seq], |row| row.get(0)).optional()?;
    let mut only_counted = 1;
    if so_far.unwrap_or(0).unsigned_abs() < CONFLICTS_IN_FULL {
        let mut insert = conn.prepare_cached(include_str!("sql/insert_arrival.sql"))?;
        only_counted -= insert_arrival(&mut insert, seq, &via.into(), Some(body))? as i64;
    }
    count(conn, seq, only_counted, 1)
}

/// Counts arrivals that have no row, and conflicts. Nothing is counted for an event whose key was deleted
/// while its copies waited: that row would never be deleted.
fn count(conn: &Connection, seq: i64, only_counted: i64, conflicts: i64) -> rusqlite::Result<()> {
    let mut count = conn.prepare_cached(include_str!("sql/count_copies.sql"))?;
    count.execute((seq, only_counted, conflicts)).map(drop)
}

fn insert_arrival(
    insert: &mut CachedStatement<'_>,
    seq: i64,
    copy: &CopyRecord,
    conflict: Option<&[u8]>,
) -> rusqlite::Result<usize> {
    insert.execute((
        seq,
        micros(copy.received_at),
        copy.request_id.as_bytes(),
        conflict.is_some(),
        copy.remote.map(|address| address.to_string()),
        copy.secret as i64,
        copy.signed_at.map(micros),
        conflict,
    ))
}
