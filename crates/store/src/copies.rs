//! Copies of known events that wait to be written: they are counted at once, and stored by a
//! deferred write within a second. A crash may lose waiting copies; nothing else depends on them.
//! Each store writes copies in its own way.
//!
//! While no write ends, because the disk hangs, at most [`COPY_RECORDS_MAX`] records wait, besides those that are
//! being written. Beyond that, copies of events that have waiting copies are only counted, and copies of further events are left out. Passing them to
//! the writer would fill its queue, and new events would be refused.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasher, Hash, RandomState};
use std::net::IpAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use hapax_core::Timestamp;
use hapax_core::store::ArrivalInfo;
use uuid::Uuid;

use crate::limits::{COPIES_IN_FULL, COPIES_WAITING_MAX, COPY_RECORDS_MAX};

/// The number of locks, so that connections on different threads rarely contend.
const SHARDS: usize = 16;

/// The copies that arrived since the last flush, by the key that the store uses for their event.
#[derive(Debug)]
pub(crate) struct Copies<K> {
    shards: [Mutex<HashMap<K, UnwrittenCopies>>; SHARDS],
    dice: RandomState,
    events: AtomicUsize,
    /// The records of these events.
    records: AtomicUsize,
    /// Events whose copies were taken and are not written yet.
    taken: AtomicUsize,
    /// Whether a flush was requested since the copies were last taken.
    flush_requested: AtomicBool,
    /// Copies that were left out since the copies were last taken.
    left_out: AtomicU64,
}

/// Copies of one event.
#[derive(Debug, Default)]
pub(crate) struct UnwrittenCopies {
    /// The number of copies.
    pub(crate) count: u64,
    /// The newest few, in no order.
    pub(crate) newest: Vec<CopyRecord>,
    next: usize,
}

/// The record of a copy: how it arrived, without its headers.
#[derive(Debug)]
pub(crate) struct CopyRecord {
    pub(crate) received_at: Timestamp,
    pub(crate) request_id: Uuid,
    pub(crate) remote: Option<IpAddr>,
    pub(crate) secret: usize,
    pub(crate) signed_at: Option<Timestamp>,
}

impl From<&ArrivalInfo> for CopyRecord {
    fn from(via: &ArrivalInfo) -> Self {
        Self {
            received_at: via.received_at,
            request_id: via.request_id,
            remote: via.remote,
            secret: via.secret,
            signed_at: via.signed_at,
        }
    }
}

impl<K: Copy + Eq + Ord + Hash> Copies<K> {
    pub(crate) fn new() -> Self {
        Self {
            shards: std::array::from_fn(|_| Mutex::default()),
            dice: RandomState::new(),
            events: AtomicUsize::new(0),
            records: AtomicUsize::new(0),
            taken: AtomicUsize::new(0),
            flush_requested: AtomicBool::new(false),
            left_out: AtomicU64::new(0),
        }
    }

    /// Counts a copy of this event. Returns true if the caller should request a flush, because the copies
    /// of many events wait. Only one call returns true until the copies are taken.
    pub(crate) fn note(&self, event: K, via: &ArrivalInfo) -> bool {
        let place = self.dice.hash_one(event) as usize % SHARDS;
        let mut shard = self.shards[place].lock().expect("no panic happens under this lock");
        let has_room = self.records.load(Ordering::Relaxed) < COPY_RECORDS_MAX;
        let waiting = match shard.entry(event) {
            Entry::Occupied(waiting) => waiting.into_mut(),
            Entry::Vacant(first) if has_room => {
                self.events.fetch_add(1, Ordering::Relaxed);
                // The list has room for one copy, because most events in a retry storm arrive once
                // more.
                let newest = Vec::with_capacity(1);
                first.insert(UnwrittenCopies { newest, ..UnwrittenCopies::default() })
            }
            Entry::Vacant(_) => {
                self.left_out.fetch_add(1, Ordering::Relaxed);
                return self.should_request_flush();
            }
        };
        waiting.count += 1;
        if waiting.newest.is_empty() || (has_room && waiting.newest.len() < COPIES_IN_FULL) {
            self.records.fetch_add(1, Ordering::Relaxed);
            waiting.newest.push(via.into());
        } else {
            let oldest = waiting.next % waiting.newest.len();
            waiting.newest[oldest] = via.into();
            waiting.next = oldest + 1;
        }
        self.should_request_flush()
    }

    /// A request for every copy would fill the queue of a writer that hangs.
    fn should_request_flush(&self) -> bool {
        self.events.load(Ordering::Relaxed) >= COPIES_WAITING_MAX
            && !self.flush_requested.load(Ordering::Relaxed)
            && !self.flush_requested.swap(true, Ordering::Relaxed)
    }

    /// Whether every counted copy is written or was dropped.
    pub(crate) fn are_written(&self) -> bool {
        self.events.load(Ordering::Acquire) == 0 && self.taken.load(Ordering::Acquire) == 0
    }

    /// Records that copies from [`Copies::take`] are written, or were dropped.
    pub(crate) fn wrote(&self, events: usize) {
        self.taken.fetch_sub(events, Ordering::AcqRel);
    }

    /// Takes all waiting copies, in the order of the events. Once they are written or dropped, the
    /// caller reports it with [`Copies::wrote`].
    pub(crate) fn take(&self) -> Vec<(K, UnwrittenCopies)> {
        // A copy that is counted from here on may need another flush.
        self.flush_requested.store(false, Ordering::Relaxed);
        let left_out = self.left_out.swap(0, Ordering::Relaxed);
        if left_out > 0 {
            tracing::warn!(
                copies = left_out,
                "{left_out} copies are missing from the counts of their events: copies could not be written, \
                 and {COPY_RECORDS_MAX} of them waited already"
            );
        }
        let mut all = Vec::new();
        for shard in &self.shards {
            let mut shard = shard.lock().expect("no panic happens under this lock");
            // The copies are added to `taken` before they leave `events`, so that none seems to be
            // written in between.
            self.taken.fetch_add(shard.len(), Ordering::AcqRel);
            self.events.fetch_sub(shard.len(), Ordering::AcqRel);
            let records = shard.values().map(|waiting| waiting.newest.len()).sum();
            self.records.fetch_sub(records, Ordering::Relaxed);
            all.extend(shard.drain());
        }
        all.sort_unstable_by_key(|(event, _)| *event);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn via() -> ArrivalInfo {
        ArrivalInfo {
            request_id: Uuid::nil(),
            received_at: Timestamp::UNIX_EPOCH,
            remote: None,
            headers: "".into(),
            secret: 0,
            signed_at: None,
        }
    }

    fn requests(copies: &Copies<usize>, events: std::ops::Range<usize>) -> usize {
        events.filter(|event| copies.note(*event, &via())).count()
    }

    #[test]
    fn a_flush_is_requested_once_until_the_copies_are_taken() {
        // A request for each copy fills the writer's queue while the disk hangs.
        let copies = Copies::new();
        for _ in 0..2 {
            assert_eq!(requests(&copies, 0..COPIES_WAITING_MAX - 1), 0);
            assert_eq!(requests(&copies, 0..2 * COPIES_WAITING_MAX), 1);
            assert_eq!(requests(&copies, 0..2 * COPIES_WAITING_MAX), 0);
            let taken = copies.take();
            assert_eq!(taken.len(), 2 * COPIES_WAITING_MAX);
            copies.wrote(taken.len());
        }
        assert!(copies.are_written());
    }

    #[test]
    fn memory_for_waiting_copies_is_bounded_and_events_that_have_some_are_counted_further() {
        // Copies are answered while the disk hangs, however long that takes.
        let copies = Copies::new();
        let half = COPY_RECORDS_MAX / 2;
        requests(&copies, 0..half);
        (0..4).for_each(|_| assert_eq!(requests(&copies, 0..half + 10), 0));
        let taken = copies.take();
        assert!(taken.iter().all(|(_, waiting)| waiting.count == 5));
        assert_eq!(
            taken.iter().map(|(event, _)| *event).collect::<Vec<_>>(),
            Vec::from_iter(0..half)
        );
        let records: usize = taken.iter().map(|(_, waiting)| waiting.newest.len()).sum();
        assert_eq!(records, COPY_RECORDS_MAX);
        copies.wrote(taken.len());
        requests(&copies, half..half + 1);
        assert_eq!(copies.take().len(), 1, "after the write every event is counted again");
    }

    #[test]
    fn the_newest_copies_of_an_event_are_kept() {
        let copies = Copies::new();
        for n in 0..3 * COPIES_IN_FULL as i64 + 3 {
            let received_at = Timestamp::from_second(n).expect("a time");
            copies.note(1, &ArrivalInfo { received_at, ..via() });
        }
        let (_, waiting) = copies.take().remove(0);
        let mut kept: Vec<i64> =
            waiting.newest.iter().map(|copy| copy.received_at.as_second()).collect();
        kept.sort_unstable();
        let count = 3 * COPIES_IN_FULL as i64 + 3;
        assert_eq!(kept, Vec::from_iter(count - COPIES_IN_FULL as i64..count));
        assert_eq!(waiting.count, count as u64);
    }
}
