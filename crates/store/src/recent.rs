//! Committed events whose duplicates are answered from memory, so that a flood of copies costs
//! neither the database nor the disk.
//!
//! An entry is added only after the commit of its event returned. All entries are dropped when they
//! may be wrong: a commit failed, or the database is another one. A miss proves nothing: the
//! database then decides.
//!
//! An entry has 32 bytes, so that a few megabytes hold the last hour of a busy source. The entry
//! does not store the key, the body's hash and the guard themselves, but one hash over all three: a
//! copy with the same three adds nothing to the event.

use std::hash::BuildHasher as _;
use std::sync::{Mutex, MutexGuard};

use hapax_core::store::{EventId, KnownEvent, ReviewReason, Status};
use hapax_core::{KeyHash, Receipt};
use uuid::Uuid;

use crate::key_hasher::KeyHasherState;
use crate::limits::RECENT_BYTES_MAX;

/// The number of locks: enough that threads rarely contend.
const SHARDS: usize = 64;

/// Slots in which a key may be stored: few enough to search each of them.
const WAYS: usize = 8;

/// The facts of a committed event that decide whether memory may answer its copies.
#[derive(Debug, Clone)]
pub(crate) struct Recent {
    pub(crate) body_hash: KeyHash,
    /// The guard of the newest arrival: it is committed with the event.
    pub(crate) guard: Option<KeyHash>,
    pub(crate) known: KnownEvent,
    /// Set while the event waits for review.
    pub(crate) review: Option<ReviewReason>,
}

impl Recent {
    /// Whether an entry can answer copies for a long time. Only an operator may still change the answer,
    /// and the answer must fit: an entry has no room for a result, or for an id that is not of version 7.
    fn is_lasting(&self) -> bool {
        let KnownEvent { id, status, result } = &self.known;
        let fits = result.is_none() && id.0.get_version_num() == 7;
        self.review.is_none() && status.is_final() && fits
    }
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

/// An event: first the proof, then its id with the status. Zero is an empty slot.
type Entry = [u128; 2];

/// The slots that keys with the same hash share.
type Set = [Entry; WAYS];

const EMPTY: Entry = [0; 2];

/// Allocated when its first key arrives; memory that no entry was written to is not resident.
#[derive(Debug, Default)]
struct Shard {
    sets: Box<[Set]>,
    /// Grows when keys are removed.
    removals: u64,
}

/// A version of a key's shard: see [`RecentEvents::moment`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ShardMoment(u64);

const SETS_PER_SHARD: usize = RECENT_BYTES_MAX / SHARDS / size_of::<Set>();

// All entries stay within the bound, and there are enough entries for an hour of a busy source.
const _: () = assert!(SHARDS * SETS_PER_SHARD * size_of::<Set>() <= RECENT_BYTES_MAX);
const _: () = assert!(SHARDS * SETS_PER_SHARD * WAYS >= 200_000);

/// The bits of an id of version 7 that are the same in all of them: the status is stored there.
const VERSION_SHIFT: u32 = 76;

impl RecentEvents {
    pub(crate) fn new() -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        Self { spread: KeyHasherState::default(), shards }
    }

    /// The event that this receipt is a plain copy of.
    pub(crate) fn get(&self, receipt: &Receipt) -> Option<KnownEvent> {
        let guard = receipt.guard().map(|guard| guard.hash);
        self.find(receipt.key_hash(), receipt.body_hash(), guard)
    }

    fn find(&self, key: KeyHash, body_hash: KeyHash, guard: Option<KeyHash>) -> Option<KnownEvent> {
        let at = self.locate(&key);
        let mut shard = self.lock(at.shard);
        let ways = shard.sets.get_mut(at.set)?;
        // Most keys are new: the tag alone shows that, and nothing is hashed.
        let found = ways.iter().position(|way| at.is_tag_of(way))?;
        if ways[found][0] != at.proof(key, body_hash, guard) {
            return None;
        }
        ways[..=found].rotate_right(1);
        Some(known_of(ways[0][1]))
    }

    /// The present moment, for [`RecentEvents::put_since`].
    pub(crate) fn moment(&self, hash: &KeyHash) -> ShardMoment {
        ShardMoment(self.lock(self.locate(hash).shard).removals)
    }

    pub(crate) fn put(&self, hash: KeyHash, recent: &Recent) {
        self.put_if(hash, recent, |_| true);
    }

    /// Adds an entry that was read from the database after `moment`, unless keys were removed since:
    /// the entry may be one of them.
    pub(crate) fn put_since(&self, moment: ShardMoment, hash: KeyHash, recent: &Recent) {
        self.put_if(hash, recent, |shard| shard.removals == moment.0);
    }

    fn put_if(&self, hash: KeyHash, recent: &Recent, allows: impl FnOnce(&Shard) -> bool) {
        if !recent.is_lasting() {
            return;
        }
        let at = self.locate(&hash);
        let mut shard = self.lock(at.shard);
        if !allows(&shard) {
            return;
        }
        if shard.sets.is_empty() {
            shard.sets = vec![[EMPTY; WAYS]; SETS_PER_SHARD].into();
        }
        let ways = &mut shard.sets[at.set];
        let same = ways.iter().position(|way| at.is_tag_of(way));
        ways[..=same.unwrap_or(WAYS - 1)].rotate_right(1);
        ways[0] = [at.proof(hash, recent.body_hash, recent.guard), id_with_status(&recent.known)];
    }

    /// Removes a key. The caller must have committed the change that makes its entry wrong, so that
    /// no reader adds it again.
    pub(crate) fn remove(&self, hash: &KeyHash) {
        let at = self.locate(hash);
        let mut shard = self.lock(at.shard);
        shard.removals += 1;
        for way in shard.sets.get_mut(at.set).into_iter().flatten() {
            if at.is_tag_of(way) {
                *way = EMPTY;
            }
        }
    }

    pub(crate) fn clear(&self) {
        for shard in &self.shards {
            let mut shard = shard.lock().expect("no panic happens under this lock");
            *shard = Shard { sets: Box::default(), removals: shard.removals + 1 };
        }
    }

    fn lock(&self, shard: usize) -> MutexGuard<'_, Shard> {
        self.shards[shard].lock().expect("no panic happens under this lock")
    }

    fn locate(&self, hash: &KeyHash) -> SlotPosition {
        let spread = self.spread.hash_one(hash);
        let place = spread as u32 as usize;
        SlotPosition {
            shard: place % SHARDS,
            set: place / SHARDS % SETS_PER_SHARD,
            tag: (spread >> 32) as u32,
        }
    }
}

/// Where a key's entry is, if there is one. The tag finds the entry of a key whose body is unknown. Two
/// keys of one set may have the same tag: then the entry of one replaces the entry of the other.
struct SlotPosition {
    shard: usize,
    set: usize,
    tag: u32,
}

impl SlotPosition {
    /// The tag, and 96 bits of the hash over the three values that a copy must have.
    fn proof(&self, key: KeyHash, body_hash: KeyHash, guard: Option<KeyHash>) -> u128 {
        let guard = guard.as_ref().map_or(&[][..], |guard| &guard.0[..]);
        let hash = KeyHash::of(b"recent", [&key.0[..], &body_hash.0[..], guard]);
        let hash = u128::from_le_bytes(hash.0) >> 32 << 32;
        // An empty slot is zero; an entry is never zero.
        (hash | u128::from(self.tag)).max(1)
    }

    fn is_tag_of(&self, way: &Entry) -> bool {
        *way != EMPTY && way[0] as u32 == self.tag
    }
}

fn id_with_status(known: &KnownEvent) -> u128 {
    let status: u128 = match known.status {
        Status::Processed => 1,
        Status::Stale => 2,
        Status::Ignored => 3,
        Status::Discarded => 4,
        Status::Review
        | Status::Dead
        | Status::Failed
        | Status::Held
        | Status::Processing
        | Status::Received => unreachable!("only an event that has ended is added"),
    };
    let id = known.id.0.as_u128();
    id & !(0xf << VERSION_SHIFT) | status << VERSION_SHIFT
}

fn known_of(entry: u128) -> KnownEvent {
    let status = match entry >> VERSION_SHIFT & 0xf {
        1 => Status::Processed,
        2 => Status::Stale,
        3 => Status::Ignored,
        _ => Status::Discarded,
    };
    let id = entry & !(0xf << VERSION_SHIFT) | 7 << VERSION_SHIFT;
    KnownEvent { id: EventId(Uuid::from_u128(id)), status, result: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENTRIES: usize = SHARDS * SETS_PER_SHARD * WAYS;

    fn key(n: usize) -> KeyHash {
        KeyHash::of(b"test", [&n.to_be_bytes()[..]])
    }

    fn recent(n: usize) -> Recent {
        let id = EventId(Uuid::from_u128(n as u128 | 7 << VERSION_SHIFT));
        let known = KnownEvent { id, status: Status::Ignored, result: None };
        Recent { body_hash: key(n), guard: None, known, review: None }
    }

    /// A copy of event `n`, without the rest of a receipt.
    fn asked(events: &RecentEvents, n: usize) -> Option<KnownEvent> {
        events.find(key(n), key(n), None)
    }

    fn number(known: &KnownEvent) -> usize {
        (known.id.0.as_u128() & u128::from(u64::MAX)) as usize
    }

    #[test]
    fn a_key_in_use_stays_while_unused_keys_are_evicted() {
        let events = RecentEvents::new();
        for n in 0..ENTRIES * 2 {
            events.put(key(n), &recent(n));
            assert_eq!(number(&asked(&events, 0).expect("asked for all the time")), 0);
        }
        let kept = (0..ENTRIES * 2).filter(|n| asked(&events, *n).is_some()).count();
        assert!(kept <= ENTRIES);
        assert!(asked(&events, ENTRIES * 2 - 1).is_some());
    }

    #[test]
    fn clearing_forgets_every_key_in_every_slot() {
        // A remaining entry would answer for another database.
        let events = RecentEvents::new();
        (0..10_000).for_each(|n| events.put(key(n), &recent(n)));
        events.clear();
        assert!((0..10_000).all(|n| asked(&events, n).is_none()));
    }

    #[test]
    fn a_key_has_one_entry_and_the_last_value_counts() {
        let events = RecentEvents::new();
        for n in 0..WAYS * 2 {
            events.put(key(1), &Recent { body_hash: key(1), ..recent(n) });
        }
        assert_eq!(asked(&events, 1).as_ref().map(number), Some(WAYS * 2 - 1));
        // Another body under the same key replaces it too.
        events.put(key(1), &recent(2));
        assert_eq!(asked(&events, 1), None);
    }

    #[test]
    fn a_removed_key_is_gone_and_its_neighbours_stay() {
        // Full sets, so that removing a key leaves a hole in the middle of one.
        let events = RecentEvents::new();
        (0..ENTRIES).for_each(|n| events.put(key(n), &recent(n)));
        let kept: Vec<_> = (0..ENTRIES).filter(|n| asked(&events, *n).is_some()).collect();
        let (gone, stay): (Vec<_>, Vec<_>) = kept.into_iter().partition(|n| n % 3 == 0);
        assert!(gone.len() > 1_000 && stay.len() > 1_000);
        gone.iter().for_each(|n| events.remove(&key(*n)));
        assert!(gone.iter().all(|n| asked(&events, *n).is_none()));
        let left = stay.iter().filter(|n| asked(&events, **n).as_ref().map(number) == Some(**n));
        // A key that shares its tag with another key may be missing.
        assert!(left.count() + 3 >= stay.len());
        // A key that is added again is found again.
        events.put(key(gone[0]), &recent(gone[0]));
        assert_eq!(asked(&events, gone[0]).as_ref().map(number), Some(gone[0]));
    }

    #[test]
    fn only_a_copy_that_brings_the_same_key_body_and_guard_is_answered() {
        let events = RecentEvents::new();
        events.put(key(1), &Recent { guard: Some(key(7)), ..recent(1) });
        let ask = |k, body, guard: Option<usize>| {
            events.find(key(k), key(body), guard.map(key)).is_some()
        };
        assert!(ask(1, 1, Some(7)));
        assert!(!ask(1, 2, Some(7)), "another body is a conflict");
        assert!(!ask(1, 1, Some(8)), "a guard that is not stored yet");
        assert!(!ask(2, 1, Some(7)), "another key");
        assert!(!ask(1, 1, None));
    }

    #[test]
    fn only_an_event_that_has_ended_is_added_and_its_status_comes_back() {
        let events = RecentEvents::new();
        let of = |status, result: Option<&str>, review| {
            let known = KnownEvent { status, result: result.map(Into::into), ..recent(1).known };
            Recent { known, review, ..recent(1) }
        };
        for open in [Status::Received, Status::Processing, Status::Failed, Status::Dead] {
            events.put(key(1), &of(open, None, None));
        }
        events.put(key(1), &of(Status::Processed, Some("a result"), None));
        events.put(key(1), &of(Status::Discarded, None, Some(ReviewReason::Late)));
        assert_eq!(asked(&events, 1), None);
        for status in [Status::Processed, Status::Stale, Status::Ignored, Status::Discarded] {
            let ended = of(status, None, None);
            events.put(key(1), &ended);
            assert_eq!(asked(&events, 1), Some(ended.known));
        }
    }

    #[test]
    fn what_was_read_before_a_removal_is_not_added_after_it() {
        // A reader read an event as processed; then an operator replayed it, and its key was removed.
        let events = RecentEvents::new();
        let before = events.moment(&key(1));
        events.remove(&key(1));
        events.put_since(before, key(1), &recent(1));
        assert_eq!(asked(&events, 1), None);
        let after = events.moment(&key(1));
        events.put_since(after, key(1), &recent(1));
        assert!(asked(&events, 1).is_some());
        events.clear();
        events.put_since(after, key(1), &recent(1));
        assert_eq!(asked(&events, 1), None, "a failed commit came in between");
    }
}
