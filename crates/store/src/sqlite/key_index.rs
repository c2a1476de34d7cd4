//! The key index: which events there are, by the hash of their key.
//!
//! A random key per event would dirty a page per event. So keys of fresh events are held in memory
//! by the single writer, merged into a young tree in sorted runs, and from there moved to the large
//! one in longer runs; an LSM in all but name, on plain tables. Its crash story:
//! - A key enters memory after its commit; within a batch it lives in a batch-local set.
//! - After a commit that did not return OK all memory is dropped and reloaded from the file.
//! - `merged_through` moves once, with the last chunk of a merge; until then a reload starts at the
//!   old mark. Merging is idempotent: the same hash for the same event is skipped, the same hash
//!   for another event stops the store loudly.
//! - A move copies and deletes in one transaction, so a key is always in one of the two trees, and a
//!   move that died halfway has nothing to finish.

use hapax_core::{EventKey, KeyHash, SourceName, Tenant, tuned};
use rusqlite::{Connection, OptionalExtension};

use super::key_filter::Filter;
use super::meta;
use crate::key_hasher::KeyMap;
use crate::limits::{FRESH_KEYS_MAX, MERGE_CHUNK, YOUNG_KEYS_MAX};

pub(super) struct KeyIndex {
    /// Keys of committed events that are not surely in the tree.
    fresh: KeyMap<i64>,
    /// Keys of the transaction that is open now.
    batch: KeyMap<i64>,
    merge: Option<Merge>,
    filter: Filter,
    /// How many fresh keys start a merge.
    fresh_max: usize,
    /// Keys in the young tree.
    young: usize,
    /// How many of those start a move.
    young_max: usize,
    /// Where a running move continues.
    moving: Option<KeyHash>,
    /// The keys that the open transaction moved.
    moved: Option<Moved>,
}

/// One chunk of a move: how many keys, and where the next one begins.
struct Moved {
    keys: usize,
    next: Option<KeyHash>,
}

const LOWEST: KeyHash = KeyHash([0; 16]);
const HIGHEST: KeyHash = KeyHash([0xff; 16]);

/// A running merge: its keys in order, and how many of them are in the tree. All of them can be
/// found here until the last one is in the tree.
struct Merge {
    keys: Vec<(KeyHash, i64)>,
    done: usize,
    through: i64,
}

impl Merge {
    fn of(fresh: &mut KeyMap<i64>) -> Self {
        // Drained, not taken: the map keeps its capacity for the next keys.
        let mut keys: Vec<_> = fresh.drain().collect();
        keys.sort_unstable();
        let through = keys.iter().map(|(_, seq)| *seq).max().unwrap_or(0);
        Self { keys, done: 0, through }
    }

    fn find(&self, hash: &KeyHash) -> Option<&i64> {
        let at = self.keys.binary_search_by(|(key, _)| key.cmp(hash)).ok()?;
        Some(&self.keys[at].1)
    }

    fn chunk(&self) -> &[(KeyHash, i64)] {
        let end = (self.done + MERGE_CHUNK).min(self.keys.len());
        &self.keys[self.done..end]
    }

    fn is_last_chunk(&self) -> bool {
        self.done + MERGE_CHUNK >= self.keys.len()
    }
}

/// Why a merge stopped.
#[derive(Debug, thiserror::Error)]
pub(super) enum MergeError {
    #[error(transparent)]
    Sqlite(#[from] rusqlite::Error),
    #[error("key {hash:?} belongs to event row {found} and to {ours}: the index is broken")]
    Broken { hash: KeyHash, found: i64, ours: i64 },
    #[error("{keys} keys were to move and {copied} could: the index is broken")]
    Doubled { keys: usize, copied: usize },
}

impl KeyIndex {
    /// Reads the index as the last commit left it.
    pub(super) fn load(conn: &Connection) -> rusqlite::Result<Self> {
        let merged_through = meta(conn, "merged_through")?;
        let mut fresh = KeyMap::default();
        let mut rows = conn.prepare(include_str!("sql/reload_keys.sql"))?;
        let mut rows = rows.query([merged_through])?;
        while let Some(row) = rows.next()? {
            let seq: i64 = row.get(0)?;
            let key = EventKey {
                tenant: Tenant::new(row.get_ref(1)?.as_str()?),
                source: SourceName::new(row.get_ref(2)?.as_str()?),
                event_id: row.get_ref(3)?.as_str()?.into(),
            };
            fresh.insert(key.hash(), seq);
            if let Some(guard) = row.get::<_, Option<[u8; 16]>>(4)? {
                fresh.insert(KeyHash(guard), seq);
            }
        }
        let (filter, young) = load_filter(conn)?;
        Ok(Self {
            fresh,
            batch: KeyMap::default(),
            merge: None,
            filter,
            fresh_max: tuned!("sqlite.fresh_keys", FRESH_KEYS_MAX),
            young,
            young_max: tuned!("sqlite.young_keys", YOUNG_KEYS_MAX),
            moving: None,
            moved: None,
        })
    }

    /// The event with this key, committed or in the open transaction.
    pub(super) fn find(&self, conn: &Connection, hash: &KeyHash) -> rusqlite::Result<Option<i64>> {
        let merging = || self.merge.as_ref().and_then(|merge| merge.find(hash));
        let fresh = self.batch.get(hash).or_else(|| self.fresh.get(hash));
        if let Some(seq) = fresh.or_else(merging) {
            return Ok(Some(*seq));
        }
        self.find_in_trees(conn, hash)
    }

    fn find_in_trees(&self, conn: &Connection, hash: &KeyHash) -> rusqlite::Result<Option<i64>> {
        if !self.filter.may_hold(&hash.0) {
            return Ok(None);
        }
        conn.prepare_cached(include_str!("sql/find_key.sql"))?
            .query_row([&hash.0[..]], |row| row.get(0))
            .optional()
    }

    /// Adds a key for an event of the open transaction.
    pub(super) fn claim(&mut self, hash: KeyHash, seq: i64) {
        let before = self.batch.insert(hash, seq);
        debug_assert!(before.is_none(), "a key is claimed once");
    }

    /// Records that the transaction was committed.
    pub(super) fn committed(&mut self) {
        self.fresh.extend(self.batch.drain());
    }

    /// Whether there is merging or moving to do.
    pub(super) fn wants_merge(&self) -> bool {
        self.wants_to_leave_memory() || self.moving.is_some() || self.young >= self.young_max
    }

    /// Whether memory is full. This is checked first: memory is the smaller space.
    fn wants_to_leave_memory(&self) -> bool {
        self.merge.is_some() || self.fresh.len() >= self.fresh_max
    }

    #[cfg(test)]
    pub(super) fn merge_soon(&mut self) {
        self.fresh_max = 1;
        self.young_max = 1;
    }

    /// Whether a merge is running.
    pub(super) fn is_merging(&self) -> bool {
        self.merge.is_some()
    }

    /// Removes a key from tree and memory in one step, within the transaction that is open on
    /// `conn`. Not during a merge: it would bring the key back.
    pub(super) fn forget(&mut self, conn: &Connection, hash: &KeyHash) -> rusqlite::Result<()> {
        debug_assert!(self.merge.is_none(), "no key is forgotten during a merge");
        conn.prepare_cached("DELETE FROM hapax_key WHERE hash = ?1")?.execute([&hash.0[..]])?;
        let young = conn
            .prepare_cached("DELETE FROM hapax_key_young WHERE hash = ?1")?
            .execute([&hash.0[..]])?;
        self.young = self.young.saturating_sub(young);
        self.fresh.remove(hash);
        Ok(())
    }

    /// One chunk of a merge or a move, within the transaction that is open on `conn`. Call
    /// [`KeyIndex::merged_chunk`] once that is committed.
    pub(super) fn merge_chunk(&mut self, conn: &Connection) -> Result<(), MergeError> {
        debug_assert!(self.batch.is_empty(), "a merge never shares a transaction with events");
        if !self.wants_to_leave_memory() {
            return self.move_chunk(conn);
        }
        self.merge.get_or_insert_with(|| Merge::of(&mut self.fresh));
        let Some(merge) = &self.merge else { return Ok(()) };
        let mut insert = conn.prepare_cached(include_str!("sql/insert_key.sql"))?;
        for (hash, seq) in merge.chunk() {
            match self.find_in_trees(conn, hash)? {
                None => {
                    insert.execute((&hash.0[..], seq))?;
                }
                Some(found) if found == *seq => {}
                Some(found) => {
                    return Err(MergeError::Broken { hash: *hash, found, ours: *seq });
                }
            }
        }
        if merge.is_last_chunk() {
            conn.execute(
                "UPDATE hapax_meta SET value = ?1 WHERE name = 'merged_through'",
                [merge.through],
            )?;
        }
        Ok(())
    }

    /// Moves the next keys from the young tree to the large one.
    fn move_chunk(&mut self, conn: &Connection) -> Result<(), MergeError> {
        let first = self.moving.unwrap_or(LOWEST);
        let last = conn
            .prepare_cached(
                "SELECT hash FROM hapax_key_young WHERE hash >= ?1 ORDER BY hash LIMIT 1 OFFSET ?2",
            )?
            .query_row((&first.0[..], MERGE_CHUNK as i64 - 1), |row| row.get(0))
            .optional()?
            .map(KeyHash);
        let range = (&first.0[..], &last.unwrap_or(HIGHEST).0[..]);
        let copied = conn.prepare_cached(include_str!("sql/move_keys.sql"))?.execute(range)?;
        let keys = conn
            .prepare_cached("DELETE FROM hapax_key_young WHERE hash >= ?1 AND hash <= ?2")?
            .execute(range)?;
        if copied != keys {
            return Err(MergeError::Doubled { keys, copied });
        }
        self.moved = Some(Moved { keys, next: last });
        Ok(())
    }

    /// Records that the chunk's transaction was committed.
    pub(super) fn merged_chunk(&mut self) {
        if let Some(moved) = self.moved.take() {
            self.young = self.young.saturating_sub(moved.keys);
            self.moving = moved.next;
            return;
        }
        let Some(merge) = &mut self.merge else { return };
        // Keys that a merge added before a crash are counted twice until the next start: the next
        // move then comes a little early.
        self.young += merge.chunk().len();
        for (hash, _) in merge.chunk() {
            self.filter.add(&hash.0);
        }
        if merge.is_last_chunk() {
            self.merge = None;
        } else {
            merge.done += MERGE_CHUNK;
        }
    }
}

/// The filter over both trees, and how many keys the young one holds.
fn load_filter(conn: &Connection) -> rusqlite::Result<(Filter, usize)> {
    let about: i64 = meta(conn, "merged_through")?;
    let mut filter = Filter::for_keys(usize::try_from(about).unwrap_or(0) * 5 / 4);
    let mut add_all = |sql: &str| -> rusqlite::Result<usize> {
        let mut rows = conn.prepare(sql)?;
        let mut rows = rows.query([])?;
        let mut keys = 0;
        while let Some(row) = rows.next()? {
            let hash: [u8; 16] = row.get(0)?;
            filter.add(&hash);
            keys += 1;
        }
        Ok(keys)
    };
    add_all("SELECT hash FROM hapax_key")?;
    let young = add_all("SELECT hash FROM hapax_key_young")?;
    Ok((filter, young))
}
