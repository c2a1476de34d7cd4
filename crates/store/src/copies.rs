//! Copies of known events that wait to be written: they are counted at once, and stored by a
//! deferred write within a second. A crash may lose waiting copies; nothing else depends on them.
//! Each store writes copies in its own way.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, RandomState};
use std::net::IpAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use hapax_core::Timestamp;
use hapax_core::store::ArrivalInfo;
use uuid::Uuid;

use crate::limits::{COPIES_IN_FULL, COPIES_WAITING_MAX};

/// The number of locks, so that connections on different threads rarely contend.
const SHARDS: usize = 16;

/// The copies that arrived since the last flush, by the key that the store uses for their event.
#[derive(Debug)]
pub(crate) struct Copies<K> {
    shards: [Mutex<HashMap<K, UnwrittenCopies>>; SHARDS],
    dice: RandomState,
    events: AtomicUsize,
    /// Events whose copies were taken and are not written yet.
    taken: AtomicUsize,
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
            taken: AtomicUsize::new(0),
        }
    }

    /// Counts a copy of this event. Returns true when enough copies wait that they should be
    /// flushed now.
    pub(crate) fn note(&self, event: K, via: &ArrivalInfo) -> bool {
        let place = self.dice.hash_one(event) as usize % SHARDS;
        let mut shard = self.shards[place].lock().expect("no panic happens under this lock");
        let waiting = shard.entry(event).or_insert_with(|| {
            self.events.fetch_add(1, Ordering::Relaxed);
            // The list has room for one copy, because most events in a retry storm arrive once
            // more.
            UnwrittenCopies { newest: Vec::with_capacity(1), ..UnwrittenCopies::default() }
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
        let mut all = Vec::new();
        for shard in &self.shards {
            let mut shard = shard.lock().expect("no panic happens under this lock");
            // The copies are added to `taken` before they leave `events`, so that none seems to be
            // written in between.
            self.taken.fetch_add(shard.len(), Ordering::AcqRel);
            self.events.fetch_sub(shard.len(), Ordering::AcqRel);
            all.extend(shard.drain());
        }
        all.sort_unstable_by_key(|(event, _)| *event);
        all
    }
}
