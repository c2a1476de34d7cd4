//! Committed events that answer their own duplicates from memory, so that a flood of copies costs
//! neither the writer nor the disk.
//!
//! An entry is made only after its commit returned, by the writer, and all are dropped when a
//! commit fails. A miss proves nothing: then the writer is asked.

use std::collections::HashMap;
use std::sync::Mutex;

use hapax_core::KeyHash;
use hapax_core::store::{Known, ReviewReason};

use crate::limits::RECENT_MAX;

/// Locks, so that connections on different threads seldom meet.
const SHARDS: usize = 16;

/// What is known of a committed event.
#[derive(Debug, Clone)]
pub(super) struct Recent {
    pub(super) seq: i64,
    pub(super) body_hash: KeyHash,
    pub(super) known: Known,
    /// Set while it waits for a person.
    pub(super) review: Option<ReviewReason>,
}

/// Two generations per shard: when the young one is full it becomes the old one, and what is asked
/// for in the old one becomes young again. What nobody asks for is dropped with its generation.
#[derive(Debug)]
pub(super) struct RecentEvents {
    shards: [Mutex<Generations>; SHARDS],
}

#[derive(Debug, Default)]
struct Generations {
    young: HashMap<KeyHash, Recent>,
    old: HashMap<KeyHash, Recent>,
}

impl RecentEvents {
    pub(super) fn new() -> Self {
        Self { shards: std::array::from_fn(|_| Mutex::default()) }
    }

    pub(super) fn get(&self, hash: &KeyHash) -> Option<Recent> {
        let mut shard = self.shard(hash).lock().expect("no panic happens under this lock");
        if let Some(recent) = shard.young.get(hash) {
            return Some(recent.clone());
        }
        let recent = shard.old.remove(hash)?;
        shard.keep(*hash, recent.clone());
        Some(recent)
    }

    pub(super) fn put(&self, hash: KeyHash, recent: Recent) {
        self.shard(&hash).lock().expect("no panic happens under this lock").keep(hash, recent);
    }

    pub(super) fn remove(&self, hash: &KeyHash) {
        let mut shard = self.shard(hash).lock().expect("no panic happens under this lock");
        shard.young.remove(hash);
        shard.old.remove(hash);
    }

    pub(super) fn clear(&self) {
        for shard in &self.shards {
            *shard.lock().expect("no panic happens under this lock") = Generations::default();
        }
    }

    fn shard(&self, hash: &KeyHash) -> &Mutex<Generations> {
        &self.shards[hash.0[15] as usize % SHARDS]
    }
}

impl Generations {
    fn keep(&mut self, hash: KeyHash, recent: Recent) {
        if self.young.len() >= RECENT_MAX / SHARDS / 2 {
            self.old = std::mem::take(&mut self.young);
        }
        self.old.remove(&hash);
        self.young.insert(hash, recent);
    }
}
