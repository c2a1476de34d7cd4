//! The index over the values that operators search for: written in sorted merges between the batches of acks, and read
//! block by block.
//!
//! A pass reads the events after the mark on a connection of readers, and keeps only the hashes of their
//! values. The writer then adds the rows in the order of the index, a few at a time. The mark moves in the
//! commit of the last row. None of these commits waits for the disk. A power loss removes commits from the
//! end of the log, so the mark is never ahead of the rows.

use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use hapax_core::search::SearchFields;
use hapax_core::store::{SearchIndex, StoreError, TextSearch};
use hapax_core::{KeyHash, SourceName, failpoint};
use rusqlite::types::Value;
use rusqlite::{Connection, OptionalExtension};

use super::SqliteStore;
use super::row::seq_of;
use super::transaction::Transaction;
use super::writer::Writer;
use crate::limits::{INDEX_CHUNK, INDEX_READ, INDEX_READ_BYTES};

/// A block holds 2^16 events: see `hapax_search_value_block`.
const BLOCK_BITS: u32 = 16;

/// A row of the index, in its order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct IndexRow {
    block: i64,
    hash: KeyHash,
    seq: i64,
}

/// Values that were read.
#[derive(Debug, Default)]
struct ReadValues {
    rows: Vec<IndexRow>,
    /// The last event that was read.
    through: i64,
    /// Whether events follow.
    more: bool,
}

impl SearchIndex for SqliteStore {
    async fn index_values(
        &self,
        fields: Arc<SearchFields>,
        limit: usize,
    ) -> Result<bool, StoreError> {
        let fingerprint = fields.fingerprint();
        let mark = self.readers.run(move |conn| mark(conn, fingerprint)).await?;
        let (mut rows, mut through) = (Vec::new(), mark);
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let more = loop {
            let fields = Arc::clone(&fields);
            let most = INDEX_READ.min(limit - (through - mark)).max(1);
            let read = self.readers.run(move |conn| read(conn, &fields, through, most)).await?;
            rows.extend(read.rows);
            through = read.through;
            if !read.more || through - mark >= limit {
                break read.more;
            }
        };
        if through == mark {
            return Ok(false);
        }
        failpoint!("search.values_read");
        rows.sort_unstable();
        let mut rest = rows.as_slice();
        while rest.len() > INDEX_CHUNK {
            let (chunk, after) = rest.split_at(INDEX_CHUNK);
            let chunk = chunk.to_vec();
            self.writer.behind(move |writer| add(writer, &chunk, None)).await?;
            failpoint!("search.chunk_written");
            rest = after;
        }
        let last = rest.to_vec();
        let moved = Some((fingerprint, through));
        self.writer.behind(move |writer| add(writer, &last, moved)).await?;
        failpoint!("search.mark_moved");
        Ok(more)
    }

    async fn count_events_with(&self, value: KeyHash, most: usize) -> Result<usize, StoreError> {
        self.readers.run(move |conn| count(conn, value, most)).await
    }
}

/// The last event that is indexed for these fields.
fn mark(conn: &Connection, fields: KeyHash) -> rusqlite::Result<i64> {
    let sql = "SELECT through FROM hapax_search_mark WHERE fields = ?1";
    let mark = conn.prepare_cached(sql)?.query_row([&fields.0[..]], |row| row.get(0)).optional()?;
    Ok(mark.unwrap_or(0))
}

/// Counts the events with a value block by block, from the newest on.
fn count(conn: &Connection, value: KeyHash, most: usize) -> rusqlite::Result<usize> {
    let matches = ExactMatches { named: Vec::new(), values: vec![value] };
    // Two queries: SQLite reads the whole index for one query with both ends.
    let sql = "SELECT (SELECT min(seq) FROM hapax_search_value), (SELECT max(seq) FROM hapax_search_value)";
    let ends = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?));
    let (oldest, newest): (Option<i64>, Option<i64>) =
        conn.prepare_cached(sql)?.query_row([], ends)?;
    let range = oldest.unwrap_or(0)..newest.map_or(0, |newest| newest.saturating_add(1));
    let mut found = 0;
    matches.numbers(conn, range, |_| {
        if found < most {
            found += 1;
        }
        Ok(if found < most { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
    })?;
    Ok(found)
}

/// Reads the values of the next events, of at most `most` numbers.
fn read(
    conn: &Connection,
    fields: &SearchFields,
    after: i64,
    most: i64,
) -> rusqlite::Result<ReadValues> {
    let snapshot = conn.unchecked_transaction()?;
    let end = |sql: &str| -> rusqlite::Result<Option<i64>> {
        snapshot.prepare_cached(sql)?.query_row([], |row| row.get(0))
    };
    let oldest = end("SELECT min(seq) FROM hapax_body")?;
    let newest = end("SELECT max(seq) FROM hapax_body")?;
    let Some((oldest, newest)) = oldest.zip(newest) else {
        return Ok(ReadValues { through: after, ..ReadValues::default() });
    };
    let after = after.max(oldest - 1);
    let last = after.saturating_add(most).min(newest).max(after);
    let mut pairs: Vec<(i64, SourceName)> = Vec::new();
    let mut of_source = snapshot.prepare_cached("SELECT pair FROM hapax_pair WHERE source = ?1")?;
    for source in fields.sources() {
        for pair in of_source.query_map([source.as_str()], |row| row.get(0))? {
            pairs.push((pair?, source.clone()));
        }
    }
    let mut of_pair = snapshot.prepare_cached(
        "SELECT e.seq, e.pair FROM hapax_event e WHERE e.seq > ?1 AND e.seq <= ?2 ORDER BY e.seq",
    )?;
    let mut body = snapshot.prepare_cached("SELECT body FROM hapax_body WHERE seq = ?1")?;
    let mut events = of_pair.query((after, last))?;
    let (mut found, mut bytes) = (ReadValues { through: last, ..ReadValues::default() }, 0);
    while let Some(event) = events.next()? {
        let (seq, pair): (i64, i64) = (event.get(0)?, event.get(1)?);
        let Some((_, source)) = pairs.iter().find(|(one, _)| *one == pair) else { continue };
        if bytes >= INDEX_READ_BYTES {
            found.through = seq - 1;
            break;
        }
        let mut rows = body.query([seq])?;
        let Some(row) = rows.next()? else { continue };
        let body = row.get_ref(0)?.as_blob()?;
        bytes += body.len();
        let row = |hash| IndexRow { block: seq >> BLOCK_BITS, hash, seq };
        found.rows.extend(fields.values_of(source, body).into_iter().map(row));
    }
    found.more = found.through < newest;
    Ok(found)
}

/// Adds rows, and moves the mark if these are the last ones. An event that lost its body meanwhile gets none.
fn add(
    writer: &mut Writer,
    rows: &[IndexRow],
    moved: Option<(KeyHash, i64)>,
) -> rusqlite::Result<()> {
    let tx = Transaction::begin_unsynced(&writer.conn)?;
    let mut insert = writer.conn.prepare_cached(
        "INSERT OR IGNORE INTO hapax_search_value (seq, hash)
         SELECT ?1, ?2 WHERE EXISTS (SELECT 1 FROM hapax_body WHERE seq = ?1)",
    )?;
    for row in rows {
        insert.execute((row.seq, &row.hash.0[..]))?;
    }
    drop(insert);
    if let Some((fields, through)) = moved {
        // The marks of other fields would claim that events are indexed for those fields, although
        // they are not.
        writer
            .conn
            .prepare_cached("DELETE FROM hapax_search_mark WHERE fields <> ?1")?
            .execute([&fields.0[..]])?;
        writer
            .conn
            .prepare_cached(
                "INSERT INTO hapax_search_mark (fields, through) VALUES (?1, ?2)
                 ON CONFLICT (fields) DO UPDATE SET through = max(through, excluded.through)",
            )?
            .execute((&fields.0[..], through))?;
    }
    tx.commit()
}

/// The exact matches of a search.
pub(super) struct ExactMatches {
    named: Vec<i64>,
    values: Vec<KeyHash>,
}

impl ExactMatches {
    pub(super) fn of(text: &TextSearch) -> Self {
        Self {
            named: text.named.iter().map(|id| seq_of(*id)).collect(),
            values: text.values.clone(),
        }
    }

    /// Calls `take` with their numbers within the range, from the newest on, until it breaks.
    pub(super) fn numbers(
        &self,
        conn: &Connection,
        range: Range<i64>,
        mut take: impl FnMut(i64) -> rusqlite::Result<ControlFlow<()>>,
    ) -> rusqlite::Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let mut of_block = conn.prepare_cached(
            "SELECT seq FROM hapax_search_value INDEXED BY hapax_search_value_block
             WHERE seq >> 16 = ?1 AND hash = ?2 AND seq >= ?3 AND seq < ?4",
        )?;
        for block in (range.start >> BLOCK_BITS..=(range.end - 1) >> BLOCK_BITS).rev() {
            let is_here = |seq: &&i64| **seq >> BLOCK_BITS == block && range.contains(*seq);
            let mut found: Vec<i64> = self.named.iter().filter(is_here).copied().collect();
            for hash in &self.values {
                let bounds = (block, &hash.0[..], range.start, range.end);
                for seq in of_block.query_map(bounds, |row| row.get(0))? {
                    found.push(seq?);
                }
            }
            found.sort_unstable_by(|a, b| b.cmp(a));
            found.dedup();
            for seq in found {
                if take(seq)?.is_break() {
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

/// The condition for an event `e` that matches a search exactly, with `?` for each value.
pub(super) fn finds_exactly(text: &TextSearch) -> (String, Vec<Value>) {
    let named: Vec<String> = text.named.iter().map(|id| seq_of(*id).to_string()).collect();
    let marks = vec!["?"; text.values.len()].join(", ");
    let condition = format!(
        "(e.seq IN ({}) OR EXISTS (SELECT 1 FROM hapax_search_value v
                                   WHERE v.seq = e.seq AND v.hash IN ({marks})))",
        named.join(", ")
    );
    let values = text.values.iter().map(|hash| Value::Blob(hash.0.to_vec())).collect();
    (condition, values)
}
