//! Copies and conflicts as rows: those gathered by [`crate::copies`], and those written at once.

use hapax_core::store::ArrivalInfo;
use rusqlite::{CachedStatement, Connection};

use super::row::micros;
use crate::copies::{CopyRecord, Waiting};
use crate::limits::COPIES_IN_FULL;

/// Writes copies within the transaction that is open on `conn`.
pub(super) fn write(conn: &Connection, copies: Vec<(i64, Waiting)>) -> rusqlite::Result<()> {
    let mut count = conn.prepare_cached(include_str!("sql/count_copies.sql"))?;
    let mut insert = conn.prepare_cached(include_str!("sql/insert_arrival.sql"))?;
    let mut trim = conn.prepare_cached(include_str!("sql/trim_arrivals.sql"))?;
    let mut event = conn.prepare_cached("SELECT 1 FROM hapax_event WHERE seq = ?1")?;
    for (seq, waiting) in copies {
        // The event was pruned while its copies waited here: their rows would never be deleted.
        if !event.exists([seq])? {
            continue;
        }
        count.execute((seq, waiting.count as i64, 0, micros(waiting.last_at())))?;
        for copy in &waiting.newest {
            insert_arrival(&mut insert, seq, copy, None)?;
        }
        trim.execute((seq, COPIES_IN_FULL as i64 - 1))?;
    }
    Ok(())
}

/// Writes a conflict with its body within the transaction that is open on `conn`.
pub(super) fn write_conflict(
    conn: &Connection,
    seq: i64,
    via: &ArrivalInfo,
    body: &[u8],
) -> rusqlite::Result<()> {
    let mut insert = conn.prepare_cached(include_str!("sql/insert_arrival.sql"))?;
    insert_arrival(&mut insert, seq, &via.into(), Some(body))?;
    Ok(())
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
