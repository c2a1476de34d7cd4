//! Committed events that answer their own duplicates from memory, so that a flood of copies costs
//! neither the database nor the disk.
//!
//! The writer of the event adds an entry only after its commit returned. All entries are dropped
//! when they may be wrong: a commit failed, or the database is another one. A miss proves nothing:
//! the database then decides.

use std::hash::BuildHasher as _;
use std::sync::Mutex;

use hapax_core::store::{KnownEvent, ReviewReason};
use hapax_core::{KeyHash, Receipt};

use crate::key_hasher::KeyHasherState;
use crate::limits::RECENT_MAX;

/// Number of locks, so that threads seldom contend.
const SHARDS: usize = 64;

/// Slots in which a key may be stored: few enough to search each of them.
const WAYS: usize = 4;

/// The cached facts of a committed event.
#[derive(Debug, Clone)]
pub(crate) struct Recent {
    pub(crate) body_hash: KeyHash,
    /// The guard of the newest arrival: it is committed with the event.
    pub(crate) guard: Option<KeyHash>,
    pub(crate) known: KnownEvent,
    /// Set while the event waits for review.
    pub(crate) review: Option<ReviewReason>,
}

/// Whether a copy adds nothing to a known event: the same bytes, and no signed content that was not
/// seen with it. Content that was signed again must be stored first.
pub(crate) fn adds_nothing(receipt: &Receipt, body_hash: KeyHash, guard: Option<KeyHash>) -> bool {
    body_hash == receipt.body_hash()
        && receipt.guard().is_none_or(|brought| guard == Some(brought.hash))
}

/// A table of fixed size: a key has a few slots, the most recently used comes first, and a new key
/// evicts the least recently used.
#[derive(Debug)]
pub(crate) struct RecentEvents {
    spread: KeyHasherState,
    shards: Box<[Mutex<Shard>]>,
}

/// The slots that keys with the same hash share.
type Set = [Option<(KeyHash, Recent)>; WAYS];

/// Allocated when its first key arrives.
#[derive(Debug, Default)]
struct Shard {
    sets: Box<[Set]>,
}

const SETS_PER_SHARD: usize = RECENT_MAX / SHARDS / WAYS;

impl RecentEvents {
    pub(crate) fn new() -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        Self { spread: KeyHasherState::default(), shards }
    }

    pub(crate) fn get(&self, hash: &KeyHash) -> Option<Recent> {
        let (shard, set) = self.place(hash);
        let mut shard = shard.lock().expect("no panic happens under this lock");
        let ways = shard.sets.get_mut(set)?;
        let at = ways.iter().position(|way| way.as_ref().is_some_and(|(key, _)| key == hash))?;
        ways[..=at].rotate_right(1);
        ways[0].as_ref().map(|(_, recent)| recent.clone())
    }

    pub(crate) fn put(&self, hash: KeyHash, recent: Recent) {
        let (shard, set) = self.place(&hash);
        let mut shard = shard.lock().expect("no panic happens under this lock");
        if shard.sets.is_empty() {
            shard.sets = (0..SETS_PER_SHARD).map(|_| Set::default()).collect();
        }
        let ways = &mut shard.sets[set];
        let same = ways.iter().position(|way| way.as_ref().is_some_and(|(key, _)| *key == hash));
        ways[..=same.unwrap_or(WAYS - 1)].rotate_right(1);
        ways[0] = Some((hash, recent));
    }

    pub(crate) fn remove(&self, hash: &KeyHash) {
        let (shard, set) = self.place(hash);
        let mut shard = shard.lock().expect("no panic happens under this lock");
        for way in shard.sets.get_mut(set).into_iter().flatten() {
            way.take_if(|(key, _)| key == hash);
        }
    }

    pub(crate) fn clear(&self) {
        for shard in &self.shards {
            *shard.lock().expect("no panic happens under this lock") = Shard::default();
        }
    }

    fn place(&self, hash: &KeyHash) -> (&Mutex<Shard>, usize) {
        let place = self.spread.hash_one(hash) as usize;
        (&self.shards[place % SHARDS], place / SHARDS % SETS_PER_SHARD)
    }
}

#[cfg(test)]
mod tests {
    use hapax_core::store::{EventId, Status};
    use uuid::Uuid;

    use super::*;

    fn key(n: usize) -> KeyHash {
        KeyHash::of(b"test", [&n.to_be_bytes()[..]])
    }

    fn recent(n: usize) -> Recent {
        let id = EventId(Uuid::from_u128(n as u128));
        let known = KnownEvent { id, status: Status::Ignored, result: None };
        Recent { body_hash: key(n), guard: None, known, review: None }
    }

    fn number(recent: &Recent) -> usize {
        recent.known.id.0.as_u128() as usize
    }

    #[test]
    fn a_key_in_use_stays_while_unused_keys_are_evicted() {
        let events = RecentEvents::new();
        for n in 0..RECENT_MAX * 2 {
            events.put(key(n), recent(n));
            let asked = events.get(&key(0)).expect("asked for all the time");
            assert_eq!(number(&asked), 0);
        }
        let kept = (0..RECENT_MAX * 2).filter(|n| events.get(&key(*n)).is_some()).count();
        assert!(kept <= RECENT_MAX);
        assert!(events.get(&key(RECENT_MAX * 2 - 1)).is_some());
    }

    #[test]
    fn clearing_forgets_every_key_in_every_slot() {
        // A remaining entry would answer for another database.
        let events = RecentEvents::new();
        (0..10_000).for_each(|n| events.put(key(n), recent(n)));
        events.clear();
        assert!((0..10_000).all(|n| events.get(&key(n)).is_none()));
    }

    #[test]
    fn a_key_has_one_entry_and_the_last_value_counts() {
        let events = RecentEvents::new();
        (0..WAYS * 2).for_each(|n| events.put(key(1), recent(n)));
        assert_eq!(events.get(&key(1)).as_ref().map(number), Some(WAYS * 2 - 1));
    }

    #[test]
    fn a_removed_key_is_gone_and_its_neighbours_stay() {
        // Full sets, so that removing a key leaves a hole in the middle of one.
        let events = RecentEvents::new();
        (0..RECENT_MAX).for_each(|n| events.put(key(n), recent(n)));
        let kept: Vec<_> = (0..RECENT_MAX).filter(|n| events.get(&key(*n)).is_some()).collect();
        let (gone, stay): (Vec<_>, Vec<_>) = kept.into_iter().partition(|n| n % 3 == 0);
        assert!(gone.len() > 1_000 && stay.len() > 1_000);
        gone.iter().for_each(|n| events.remove(&key(*n)));
        assert!(gone.iter().all(|n| events.get(&key(*n)).is_none()));
        assert!(stay.iter().all(|n| events.get(&key(*n)).as_ref().map(number) == Some(*n)));
        // A key that is added again is found again.
        events.put(key(gone[0]), recent(1));
        assert_eq!(events.get(&key(gone[0])).as_ref().map(number), Some(1));
    }
}
