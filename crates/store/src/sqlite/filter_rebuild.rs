//! Makes a new key filter without deleted keys. A filter cannot remove a key, so without a rebuild its memory would
//! grow with every key that was ever merged, and each deleted key would cost a lookup.
//!
//! The rebuild reads the keys of both trees in the order of their hashes, one chunk at a time, between batches. Merges,
//! moves and deletions happen between its chunks. A move keeps the hash of a key, so it hides no key from the
//! rebuild. A key that a merge adds behind the position of the rebuild is added to the new filter at once, and a key
//! ahead of this position is read later. So the new filter ends up with every key of both trees.

use hapax_core::KeyHash;
use rusqlite::Connection;

use super::key_filter::Filter;

/// The progress of a rebuild. Dropped when the key index is reloaded.
#[derive(Debug)]
pub(super) struct FilterRebuild {
    filter: Filter,
    /// The highest hash that was read.
    passed: Option<KeyHash>,
    /// Keys of the new filter that were deleted since the rebuild began.
    deleted: usize,
}

impl FilterRebuild {
    /// A rebuild for about this many keys.
    pub(super) fn for_keys(expected: usize) -> Self {
        Self { filter: Filter::for_keys(expected), passed: None, deleted: 0 }
    }

    /// Adds the next keys of both trees, at most `chunk`. Returns true once there are no more: then the new filter
    /// must replace the old one before any key is merged. No transaction may be open on `conn`.
    pub(super) fn read_chunk(&mut self, conn: &Connection, chunk: usize) -> rusqlite::Result<bool> {
        let passed = self.passed;
        let passed = passed.as_ref().map_or(&[][..], |hash| &hash.0[..]);
        let mut next = conn.prepare_cached(include_str!("sql/next_keys.sql"))?;
        let mut rows = next.query((passed, chunk as i64))?;
        let mut keys = 0;
        while let Some(row) = rows.next()? {
            let hash = KeyHash(row.get(0)?);
            self.filter.add(&hash.0);
            self.passed = Some(hash);
            keys += 1;
        }
        Ok(keys < chunk)
    }

    /// Records that a merge has committed this key.
    pub(super) fn merged(&mut self, hash: &KeyHash) {
        if self.has_passed(hash) {
            self.filter.add(&hash.0);
        }
    }

    /// Records that this key was deleted from a tree.
    pub(super) fn deleted(&mut self, hash: &KeyHash) {
        self.deleted += usize::from(self.has_passed(hash));
    }

    /// The new filter, and how many of its keys are deleted.
    pub(super) fn finish(self) -> (Filter, usize) {
        (self.filter, self.deleted)
    }

    fn has_passed(&self, hash: &KeyHash) -> bool {
        self.passed.is_some_and(|passed| *hash <= passed)
    }
}
