//! The key index: the number of each event, by the hash of its key.
//!
//! A random key per event would dirty a page per event. So the single writer holds keys of fresh
//! events in memory, and merges them into a young tree in sorted runs. From there, longer runs move the keys
//! to the large tree. The result is an LSM tree on plain tables. The index survives a crash as follows:
//! - A key enters memory after its commit; within a batch it lives in a batch-local set.
//! - After a commit that did not return OK, all memory is dropped and reloaded from the file.
//! - `merged_through` moves once, with the last chunk of a merge; until then a reload starts at the
//!   old mark. Merging is idempotent: the same hash for the same event is skipped, the same hash
//!   for another event stops the store loudly.
//! - A move copies and deletes in one transaction, so a key is always in one of the two trees, and a
//!   move that died halfway has nothing to finish.
//!
//! Deleted keys stay in the filter until [`FilterRebuild`] replaces it.
//!
//! Only the writer changes the index. Readers of copies see the part in memory ([`KnownKeys`]), and the
//! trees through their own connections.

use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};

use hapax_core::{EventKey, KeyHash, SourceName, Tenant, tuned};
use rusqlite::{Connection, OptionalExtension};

use super::filter_rebuild::FilterRebuild;
use super::key_filter::Filter;
use super::meta;
use crate::key_hasher::KeyMap;
use crate::limits::{FILTER_DELETED_MAX, FRESH_KEYS_MAX, MERGE_CHUNK, YOUNG_KEYS_MAX};

pub(super) struct KeyIndex {
    /// Keys of committed events.
    known: Arc<KnownKeys>,
    /// Keys of the transaction that is open now.
    batch: KeyMap<i64>,
    /// The progress of the running merge.
    progress: MergeProgress,
    /// How many fresh keys start a merge.
    fresh_max: usize,
    /// Keys in the young tree.
    young: usize,
    /// How many keys in the young tree start a move.
    young_max: usize,
    /// Where a running move continues.
    moving: Option<KeyHash>,
    /// The keys that the open transaction moved.
    moved: Option<Moved>,
    /// Keys of the filter that were deleted.
    deleted: usize,
    /// How many deleted keys start a rebuild of the filter.
    deleted_max: usize,
    /// The running rebuild of the filter.
    rebuild: Option<FilterRebuild>,
    /// How many keys a chunk of a rebuild reads.
    rebuild_chunk: usize,
}

/// The part of the index in memory: keys of committed events, and nothing of an open transaction.
#[derive(Debug, Default)]
pub(super) struct KnownKeys(RwLock<KeysInMemory>);

#[derive(Debug, Default)]
struct KeysInMemory {
    /// Keys that are not surely in the tree.
    fresh: FreshKeys,
    /// The running merge. A shard stays until its last key is in the tree.
    merge: Option<FreshKeys>,
    /// The keys in the trees.
    filter: Filter,
}

/// Where a key is, as far as memory knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KeyLocation {
    /// No committed event has the key.
    Nowhere,
    /// The event with this number.
    At(i64),
    /// Perhaps in a tree.
    PerhapsInTree,
}

impl KnownKeys {
    /// Where a key is. If this call does not return [`KeyLocation::Nowhere`], a reader that begins to read
    /// the trees afterwards finds the key, unless it was deleted in between.
    pub(super) fn locate(&self, hash: &KeyHash) -> KeyLocation {
        self.read().locate(hash)
    }

    fn read(&self) -> RwLockReadGuard<'_, KeysInMemory> {
        self.0.read().expect("no panic happens under this lock")
    }

    fn write(&self) -> RwLockWriteGuard<'_, KeysInMemory> {
        self.0.write().expect("no panic happens under this lock")
    }
}

impl KeysInMemory {
    fn locate(&self, hash: &KeyHash) -> KeyLocation {
        let merging = || self.merge.as_ref().and_then(|merge| merge.get(hash));
        match self.fresh.get(hash).or_else(merging) {
            Some(seq) => KeyLocation::At(*seq),
            None if self.filter.may_hold(&hash.0) => KeyLocation::PerhapsInTree,
            None => KeyLocation::Nowhere,
        }
    }
}

/// One chunk of a move: how many keys, and where the next one begins.
struct Moved {
    keys: usize,
    next: Option<KeyHash>,
}

const LOWEST: KeyHash = KeyHash([0; 16]);
const HIGHEST: KeyHash = KeyHash([0xff; 16]);

/// Keys in memory, in shards by their first bits: a merge sorts one shard at a time, and no shard's map
/// grows for long. Sorting or growing all keys at once would keep acks waiting.
#[derive(Debug, Default)]
struct FreshKeys {
    /// Empty until the first key arrives.
    shards: Box<[KeyMap<i64>]>,
    keys: usize,
    /// The highest event number ever added.
    through: i64,
}

/// Bits of a key that choose its shard. A shard of [`FRESH_KEYS_MAX`] keys is less than one chunk of a
/// merge.
const SHARD_BITS: u32 = 7;

impl FreshKeys {
    fn get(&self, hash: &KeyHash) -> Option<&i64> {
        self.shards.get(shard_of(hash))?.get(hash)
    }

    fn insert(&mut self, hash: KeyHash, seq: i64) {
        if self.shards.is_empty() {
            self.shards = (0..1 << SHARD_BITS).map(|_| KeyMap::default()).collect();
        }
        self.through = self.through.max(seq);
        self.keys += usize::from(self.shards[shard_of(&hash)].insert(hash, seq).is_none());
    }

    fn remove(&mut self, hash: &KeyHash) {
        let removed = self.shards.get_mut(shard_of(hash)).and_then(|shard| shard.remove(hash));
        self.keys -= usize::from(removed.is_some());
    }

    fn len(&self) -> usize {
        self.keys
    }

    /// The keys of a shard, in order. All keys of the next shard are higher.
    fn sorted(&self, shard: usize) -> Vec<(KeyHash, i64)> {
        let shard = self.shards.get(shard).into_iter().flatten();
        let mut keys: Vec<_> = shard.map(|(hash, seq)| (*hash, *seq)).collect();
        keys.sort_unstable();
        keys
    }
}

fn shard_of(hash: &KeyHash) -> usize {
    usize::from(hash.0[0] >> (u8::BITS - SHARD_BITS))
}

/// The progress of a merge: the keys of one shard in order, and how many of all keys are left.
#[derive(Debug, Default)]
struct MergeProgress {
    run: Vec<(KeyHash, i64)>,
    /// How many of `run` are in the tree.
    done: usize,
    next_shard: usize,
    /// Keys of the merge that are not in the tree yet, including those of `run`.
    left: usize,
}

impl MergeProgress {
    /// The next keys.
    fn chunk(&self) -> &[(KeyHash, i64)] {
        let end = (self.done + MERGE_CHUNK).min(self.run.len());
        &self.run[self.done..end]
    }

    /// The shard whose last key is in the tree, right after that.
    fn ended_shard(&self) -> Option<usize> {
        if self.done == self.run.len() { self.next_shard.checked_sub(1) } else { None }
    }

    fn is_last_chunk(&self) -> bool {
        self.chunk().len() == self.left
    }

    /// Sorts the next shards until there is a key.
    fn load(&mut self, merge: &FreshKeys) {
        while self.done == self.run.len() && self.left > 0 {
            self.run = merge.sorted(self.next_shard);
            self.done = 0;
            self.next_shard += 1;
        }
    }
}

/// Why a merge stopped.
#[derive(Debug, thiserror::Error)]
pub(super) enum MergeError {
    #[error(transparent)]
    Sqlite(#[from] rusqlite::Error),
    #[error("key {hash:?} belongs to event rows {found} and {ours}: the key index is broken")]
    Broken { hash: KeyHash, found: i64, ours: i64 },
    #[error("only {copied} of {keys} keys could be moved: the key index is broken")]
    Doubled { keys: usize, copied: usize },
}

impl KeyIndex {
    /// Reads the index as the last commit left it, and makes it the one that readers see.
    pub(super) fn load(conn: &Connection, known: Arc<KnownKeys>) -> rusqlite::Result<Self> {
        let merged_through = meta(conn, "merged_through")?;
        let mut fresh = FreshKeys::default();
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
        *known.write() = KeysInMemory { fresh, merge: None, filter };
        Ok(Self {
            known,
            batch: KeyMap::default(),
            progress: MergeProgress::default(),
            fresh_max: tuned!("sqlite.fresh_keys", FRESH_KEYS_MAX),
            young,
            young_max: tuned!("sqlite.young_keys", YOUNG_KEYS_MAX),
            moving: None,
            moved: None,
            deleted: 0,
            deleted_max: tuned!("sqlite.filter_deleted", FILTER_DELETED_MAX),
            rebuild: None,
            rebuild_chunk: MERGE_CHUNK,
        })
    }

    /// The event with this key, committed or in the open transaction.
    pub(super) fn find(&self, conn: &Connection, hash: &KeyHash) -> rusqlite::Result<Option<i64>> {
        if let Some(seq) = self.batch.get(hash) {
            return Ok(Some(*seq));
        }
        find_at(conn, hash, self.known.locate(hash))
    }

    /// Adds a key for an event of the open transaction.
    pub(super) fn claim(&mut self, hash: KeyHash, seq: i64) {
        let before = self.batch.insert(hash, seq);
        debug_assert!(before.is_none(), "a key is claimed once");
    }

    /// Records that the transaction was committed.
    pub(super) fn committed(&mut self) {
        if !self.batch.is_empty() {
            let mut known = self.known.write();
            self.batch.drain().for_each(|(hash, seq)| known.fresh.insert(hash, seq));
        }
    }

    /// Whether there is merging or moving to do.
    pub(super) fn wants_merge(&self) -> bool {
        self.is_memory_full() || self.moving.is_some() || self.young >= self.young_max
    }

    /// Whether memory is full. Memory is checked first, because it is the smaller space.
    fn is_memory_full(&self) -> bool {
        let known = self.known.read();
        known.merge.is_some() || known.fresh.len() >= self.fresh_max
    }

    #[cfg(test)]
    pub(super) fn merge_soon(&mut self) {
        self.fresh_max = 1;
        self.young_max = 1;
    }

    #[cfg(test)]
    pub(super) fn rebuild_filter_soon(&mut self, chunk: usize) {
        self.deleted_max = 0;
        self.rebuild_chunk = chunk;
    }

    /// The number of keys in the filter, and how many of them are deleted.
    #[cfg(test)]
    pub(super) fn filter_keys(&self) -> (usize, usize) {
        (self.known.read().filter.keys(), self.deleted)
    }

    /// Whether a merge is running.
    pub(super) fn is_merging(&self) -> bool {
        self.known.read().merge.is_some()
    }

    /// Removes a key from tree and memory in one step, within the transaction that is open on
    /// `conn`. This must not run during a merge, which would bring the key back.
    pub(super) fn forget(&mut self, conn: &Connection, hash: &KeyHash) -> rusqlite::Result<()> {
        debug_assert!(!self.is_merging(), "no key is forgotten during a merge");
        let old =
            conn.prepare_cached("DELETE FROM hapax_key WHERE hash = ?1")?.execute([&hash.0[..]])?;
        let young = conn
            .prepare_cached("DELETE FROM hapax_key_young WHERE hash = ?1")?
            .execute([&hash.0[..]])?;
        self.young = self.young.saturating_sub(young);
        self.known.write().fresh.remove(hash);
        if old + young > 0 {
            self.deleted += 1;
            self.rebuild.iter_mut().for_each(|rebuild| rebuild.deleted(hash));
        }
        Ok(())
    }

    /// One chunk of a merge or a move, within the transaction that is open on `conn`. Call
    /// [`KeyIndex::merged_chunk`] once that is committed.
    pub(super) fn merge_chunk(&mut self, conn: &Connection) -> Result<(), MergeError> {
        debug_assert!(self.batch.is_empty(), "a merge never shares a transaction with events");
        if !self.is_memory_full() {
            return self.move_chunk(conn);
        }
        self.begin_merge();
        let known = self.known.read();
        let Some(merge) = &known.merge else { return Ok(()) };
        self.progress.load(merge);
        let mut insert = conn.prepare_cached(include_str!("sql/insert_key.sql"))?;
        for (hash, seq) in self.progress.chunk() {
            let in_trees =
                if known.filter.may_hold(&hash.0) { find_in_trees(conn, hash)? } else { None };
            match in_trees {
                None => {
                    insert.execute((&hash.0[..], seq))?;
                }
                Some(found) if found == *seq => {}
                Some(found) => {
                    return Err(MergeError::Broken { hash: *hash, found, ours: *seq });
                }
            }
        }
        if self.progress.is_last_chunk() {
            conn.execute(
                "UPDATE hapax_meta SET value = ?1 WHERE name = 'merged_through'",
                [merge.through],
            )?;
        }
        Ok(())
    }

    /// Turns the fresh keys into a merge, unless one is running.
    fn begin_merge(&mut self) {
        if self.is_merging() {
            return;
        }
        let mut known = self.known.write();
        let keys = std::mem::take(&mut known.fresh);
        self.progress = MergeProgress { left: keys.len(), ..MergeProgress::default() };
        known.merge = Some(keys);
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
        // Keys that a merge added before a crash are counted twice until the next start: the next
        // move then comes a little early.
        let chunk = self.progress.chunk().len();
        let is_last = self.progress.is_last_chunk();
        let mut known = self.known.write();
        for (hash, _) in self.progress.chunk() {
            known.filter.add(&hash.0);
            self.rebuild.iter_mut().for_each(|rebuild| rebuild.merged(hash));
        }
        self.young += chunk;
        self.progress.done += chunk;
        self.progress.left -= chunk;
        if is_last {
            known.merge = None;
        } else if let (Some(merge), Some(shard)) = (&mut known.merge, self.progress.ended_shard()) {
            // The filter and the tree contain the keys of this shard. Keeping all shards until the
            // end of the merge would take much memory.
            merge.shards[shard] = KeyMap::default();
        }
    }
}

impl KeyIndex {
    /// Whether a rebuild of the filter is running, or enough keys are deleted to start one.
    pub(super) fn wants_filter(&self) -> bool {
        self.rebuild.is_some()
            || (self.deleted > self.deleted_max
                && self.deleted > self.known.read().filter.keys() / 2)
    }

    /// One chunk of a rebuild of the filter. No transaction may be open on `conn`.
    pub(super) fn rebuild_filter_chunk(&mut self, conn: &Connection) -> rusqlite::Result<()> {
        let kept = self.known.read().filter.keys().saturating_sub(self.deleted);
        // The new filter has room for keys that are merged later, as after a start.
        let mut rebuild =
            self.rebuild.take().unwrap_or_else(|| FilterRebuild::for_keys(kept / 4 * 5));
        if !rebuild.read_chunk(conn, self.rebuild_chunk)? {
            self.rebuild = Some(rebuild);
            return Ok(());
        }
        let (filter, deleted) = rebuild.finish();
        self.deleted = deleted;
        // The old filter is freed after the lock is released.
        let _old = std::mem::replace(&mut self.known.write().filter, filter);
        Ok(())
    }
}

/// The event with a key whose place is known in memory.
pub(super) fn find_at(
    conn: &Connection,
    hash: &KeyHash,
    place: KeyLocation,
) -> rusqlite::Result<Option<i64>> {
    match place {
        KeyLocation::Nowhere => Ok(None),
        KeyLocation::At(seq) => Ok(Some(seq)),
        KeyLocation::PerhapsInTree => find_in_trees(conn, hash),
    }
}

fn find_in_trees(conn: &Connection, hash: &KeyHash) -> rusqlite::Result<Option<i64>> {
    conn.prepare_cached(include_str!("sql/find_key.sql"))?
        .query_row([&hash.0[..]], |row| row.get(0))
        .optional()
}

/// The filter over both trees, and how many keys the young one holds.
fn load_filter(conn: &Connection) -> rusqlite::Result<(Filter, usize)> {
    // Keys of deleted events are in neither tree.
    let through = meta(conn, "merged_through")?;
    let oldest: Option<i64> =
        conn.query_row("SELECT min(seq) FROM hapax_event", [], |row| row.get(0))?;
    let about = oldest.map_or(0, |oldest| through - oldest);
    let mut filter = Filter::for_keys(usize::try_from(about).unwrap_or(0) / 4 * 5);
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
