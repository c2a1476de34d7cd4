//! Committed events whose duplicates are answered from memory, so that a flood of copies costs
//! neither the database nor the disk.
//!
//! An entry is added only after the commit of its event returned. All entries are dropped when they
//! may be wrong: a commit failed, or the database is another one. A miss proves nothing: the
//! database then decides.
//!
//! An entry has 28 bytes, so that a few megabytes hold the last hour of a busy source. The entry
//! does not store the key, the body's hash and the guard themselves, but a tag of the key and 64 bits of
//! a hash over all three: a copy with the same three adds nothing to the event.

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
    /// The seeds of the proofs: others than those that choose a slot.
    proving: KeyHasherState,
    shards: Box<[Mutex<Shard>]>,
}

/// A part of the table, with its own lock. Keys with the same hash share a set of slots. The three parts of a slot are
/// kept apart, because most keys are new, and a search for them reads the tags only: half a cache line.
///
/// Allocated when its first key arrives; memory that no entry was written to is not resident.
#[derive(Debug, Default)]
struct Shard {
    /// The tag of each slot's key. [`EMPTY`] is an empty slot.
    tags: Box<[[u32; WAYS]]>,
    proofs: Box<[[u64; WAYS]]>,
    /// The id of each slot's event, with its status.
    ids: Box<[[u128; WAYS]]>,
    /// Grows when keys are removed.
    removals: u64,
}

const EMPTY: u32 = 0;

impl Shard {
    /// The slot of a key, if it has one.
    fn find(&self, at: &SlotPosition) -> Option<usize> {
        self.tags.get(at.set)?.iter().position(|tag| *tag == at.tag)
    }

    fn allocate(&mut self) {
        self.tags = vec![[EMPTY; WAYS]; SETS_PER_SHARD].into();
        self.proofs = vec![[0; WAYS]; SETS_PER_SHARD].into();
        self.ids = vec![[0; WAYS]; SETS_PER_SHARD].into();
    }

    /// Moves a slot to the front of its set, as the most recently used one.
    fn move_to_front(&mut self, at: &SlotPosition, slot: usize) {
        self.tags[at.set][..=slot].rotate_right(1);
        self.proofs[at.set][..=slot].rotate_right(1);
        self.ids[at.set][..=slot].rotate_right(1);
    }
}

/// A version of a key's shard: see [`RecentEvents::moment`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ShardMoment(u64);

/// Bytes of a slot: its tag, its proof and its id.
const SLOT_BYTES: usize = size_of::<u32>() + size_of::<u64>() + size_of::<u128>();

const SETS_PER_SHARD: usize = RECENT_BYTES_MAX / SHARDS / WAYS / SLOT_BYTES;

// All entries stay within the bound, and there are enough entries for an hour of a busy source.
const _: () = assert!(SHARDS * SETS_PER_SHARD * WAYS * SLOT_BYTES <= RECENT_BYTES_MAX);
const _: () = assert!(SHARDS * SETS_PER_SHARD * WAYS >= 200_000);

/// The bits of an id of version 7 that are the same in all of them: the status is stored there.
const VERSION_SHIFT: u32 = 76;

impl RecentEvents {
    pub(crate) fn new() -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        let (spread, proving) = (KeyHasherState::default(), KeyHasherState::default());
        Self { spread, proving, shards }
    }

    /// The event that this receipt is a plain copy of.
    pub(crate) fn get(&self, receipt: &Receipt) -> Option<KnownEvent> {
        let guard = receipt.guard().map(|guard| guard.hash);
        self.find(receipt.key_hash(), receipt.body_hash(), guard)
    }

    fn find(&self, key: KeyHash, body_hash: KeyHash, guard: Option<KeyHash>) -> Option<KnownEvent> {
        let at = self.locate(&key);
        let mut shard = self.lock(at.shard);
        // Most keys are new: the tags alone show that, and nothing is hashed.
        let slot = shard.find(&at)?;
        if shard.proofs[at.set][slot] != self.proof(key, body_hash, guard) {
            return None;
        }
        shard.move_to_front(&at, slot);
        Some(known_of(shard.ids[at.set][0]))
    }

    /// The present moment, for [`RecentEvents::put_since`].
    pub(crate) fn moment(&self, hash: &KeyHash) -> ShardMoment {
        ShardMoment(self.lock(self.locate(hash).shard).removals)
    }

    pub(crate) fn put(&self, hash: KeyHash, recent: &Recent) {
        self.put_if(hash, recent, |_| true);
    }

    /// Whether no keys were removed since `moment`, so that an entry that was read after `moment` may be cached.
    pub(crate) fn is_unchanged(&self, moment: ShardMoment, hash: &KeyHash) -> bool {
        self.moment(hash) == moment
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
        let proof = self.proof(hash, recent.body_hash, recent.guard);
        let at = self.locate(&hash);
        let mut shard = self.lock(at.shard);
        if !allows(&shard) {
            return;
        }
        if shard.tags.is_empty() {
            shard.allocate();
        }
        let slot = shard.find(&at).unwrap_or(WAYS - 1);
        shard.move_to_front(&at, slot);
        shard.tags[at.set][0] = at.tag;
        shard.proofs[at.set][0] = proof;
        shard.ids[at.set][0] = id_with_status(&recent.known);
    }

    /// Removes a key. The caller must have committed the change that makes its entry wrong, so that
    /// no reader adds it again.
    pub(crate) fn remove(&self, hash: &KeyHash) {
        let at = self.locate(hash);
        let mut shard = self.lock(at.shard);
        shard.removals += 1;
        if let Some(slot) = shard.find(&at) {
            shard.tags[at.set][slot] = EMPTY;
        }
    }

    pub(crate) fn clear(&self) {
        for shard in &self.shards {
            let mut shard = shard.lock().expect("no panic happens under this lock");
            *shard = Shard { removals: shard.removals + 1, ..Shard::default() };
        }
    }

    fn lock(&self, shard: usize) -> MutexGuard<'_, Shard> {
        self.shards[shard].lock().expect("no panic happens under this lock")
    }

    /// 64 bits of a hash over the three values that a copy must have, beside the tag of its key. The values are hashes
    /// already, and the seeds are secret.
    fn proof(&self, key: KeyHash, body_hash: KeyHash, guard: Option<KeyHash>) -> u64 {
        let hash = |value: KeyHash| self.proving.hash_one(value);
        // The rotations keep equal values in different places from cancelling out.
        let known_values = hash(key) ^ hash(body_hash).rotate_left(21);
        known_values ^ guard.map_or(0, |guard| hash(guard).rotate_left(42))
    }

    fn locate(&self, hash: &KeyHash) -> SlotPosition {
        let spread = self.spread.hash_one(hash);
        let place = spread as u32 as usize;
        SlotPosition {
            shard: place % SHARDS,
            set: place / SHARDS % SETS_PER_SHARD,
            tag: ((spread >> 32) as u32).max(EMPTY + 1),
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
