//! Copies of known events, on their way to disk: counted at once, written behind within a second.
//! A crash may lose what waits here; nothing else depends on it.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use hapax_core::store::Via;
use rusqlite::{CachedStatement, Connection};
use uuid::Uuid;

use super::row::micros;
use crate::limits::{COPIES_IN_FULL, COPIES_WAITING_MAX};

/// Locks, so that connections on different threads seldom meet.
const SHARDS: usize = 16;

/// The copies that came since the last flush.
#[derive(Debug)]
pub(super) struct Copies {
    shards: [Mutex<HashMap<i64, Waiting>>; SHARDS],
    events: AtomicUsize,
}

#[derive(Debug, Default)]
pub(super) struct Waiting {
    count: u64,
    newest: Vec<Sighting>,
    next: usize,
}

/// What is kept of a copy: how it came, without its headers.
#[derive(Debug)]
struct Sighting {
    received_at: i64,
    request_id: Uuid,
    remote: Option<IpAddr>,
    secret: usize,
    signed_at: Option<i64>,
}

impl From<&Via> for Sighting {
    fn from(via: &Via) -> Self {
        Self {
            received_at: micros(via.received_at),
            request_id: via.request_id,
            remote: via.remote,
            secret: via.secret,
            signed_at: via.signed_at.map(micros),
        }
    }
}

impl Copies {
    pub(super) fn new() -> Self {
        Self { shards: std::array::from_fn(|_| Mutex::default()), events: AtomicUsize::new(0) }
    }

    /// Counts a copy of the event `seq`. True when so much waits that it should be flushed now.
    pub(super) fn note(&self, seq: i64, via: &Via) -> bool {
        let mut shard =
            self.shards[seq as usize % SHARDS].lock().expect("no panic happens under this lock");
        let waiting = shard.entry(seq).or_insert_with(|| {
            self.events.fetch_add(1, Ordering::Relaxed);
            Waiting::default()
        });
        waiting.count += 1;
        if waiting.newest.len() < COPIES_IN_FULL {
            waiting.newest.push(via.into());
        } else {
            waiting.newest[waiting.next] = via.into();
            waiting.next = (waiting.next + 1) % COPIES_IN_FULL;
        }
        self.events.load(Ordering::Relaxed) >= COPIES_WAITING_MAX
    }

    /// Takes everything that waits.
    pub(super) fn take(&self) -> Vec<(i64, Waiting)> {
        let mut all = Vec::new();
        for shard in &self.shards {
            let mut shard = shard.lock().expect("no panic happens under this lock");
            self.events.fetch_sub(shard.len(), Ordering::Relaxed);
            all.extend(shard.drain());
        }
        all.sort_unstable_by_key(|(seq, _)| *seq);
        all
    }
}

/// Writes copies within the transaction that is open on `conn`.
pub(super) fn write(conn: &Connection, copies: Vec<(i64, Waiting)>) -> rusqlite::Result<()> {
    let mut count = conn.prepare_cached(include_str!("sql/count_copies.sql"))?;
    let mut insert = conn.prepare_cached(include_str!("sql/insert_arrival.sql"))?;
    let mut trim = conn.prepare_cached(include_str!("sql/trim_arrivals.sql"))?;
    let mut event = conn.prepare_cached("SELECT 1 FROM hapax_event WHERE seq = ?1")?;
    for (seq, waiting) in copies {
        // Forgotten while its copies waited here: nobody would ever delete them.
        if !event.exists([seq])? {
            continue;
        }
        let last = waiting.newest.iter().map(|copy| copy.received_at).max().unwrap_or(0);
        count.execute((seq, waiting.count as i64, 0, last))?;
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
    via: &Via,
    body: &[u8],
) -> rusqlite::Result<()> {
    let mut insert = conn.prepare_cached(include_str!("sql/insert_arrival.sql"))?;
    insert_arrival(&mut insert, seq, &via.into(), Some(body))?;
    Ok(())
}

fn insert_arrival(
    insert: &mut CachedStatement<'_>,
    seq: i64,
    copy: &Sighting,
    conflict: Option<&[u8]>,
) -> rusqlite::Result<usize> {
    insert.execute((
        seq,
        copy.received_at,
        copy.request_id.as_bytes(),
        conflict.is_some(),
        copy.remote.map(|address| address.to_string()),
        copy.secret as i64,
        copy.signed_at,
        conflict,
    ))
}
