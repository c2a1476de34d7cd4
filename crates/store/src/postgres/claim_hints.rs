//! The claim hint of a node: the time up to which the node has seen all due work. With the hint, a
//! claim does not pass the dead index entries of everything that was claimed before.
//!
//! The hint decides nothing. A slow commit or a locked row may lie before its time, so a node
//! claims without hints every 1 to 5 s.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use hapax_core::Timestamp;

/// How often a node checks everything that may be due, whatever the hints are.
const LOOK_AT_ALL: Duration = Duration::from_secs(1);

/// The longest time between two such checks: if a lock made one check slow, the next one may be
/// fast.
const LOOK_AT_ALL_MAX: Duration = Duration::from_secs(5);

/// The most lanes or endpoints with a hint: as many as one claim reads.
const PLACES_MAX: usize = 64;

/// The hints of the claims of one handler, or of all deliveries.
#[derive(Debug, Clone, Default)]
pub(super) struct ClaimHints {
    /// For each lane or endpoint, by its number: the time before which no due work is left.
    places: BTreeMap<i32, Timestamp>,
    /// All leases that ended before this time have been seen.
    leases: Option<Timestamp>,
    /// The time of the last full check, and how long it took.
    all_seen: Option<(Instant, Duration)>,
}

impl ClaimHints {
    /// Clears the hints and returns true if a full check is due. After a longer check, the next one
    /// is due later.
    pub(super) fn take_full_check(&mut self) -> bool {
        let pause = |took: Duration| took.saturating_mul(20).clamp(LOOK_AT_ALL, LOOK_AT_ALL_MAX);
        let is_due = self.all_seen.is_none_or(|(at, took)| at.elapsed() > pause(took));
        if is_due {
            self.forget();
        }
        is_due
    }

    /// Records a full check that began at `began` and has just ended.
    pub(super) fn note_full_check(&mut self, began: Instant) {
        self.all_seen = Some((Instant::now(), began.elapsed()));
    }

    /// Clears the hints: work may have become due at an earlier time.
    pub(super) fn forget(&mut self) {
        self.places.clear();
        self.leases = None;
    }

    /// The lanes or endpoints with a hint, sorted.
    pub(super) fn hinted(&self) -> Vec<i32> {
        self.places.keys().copied().collect()
    }

    /// The times of the hints, in the order of [`ClaimHints::hinted`].
    pub(super) fn since(&self) -> Vec<Timestamp> {
        self.places.values().copied().collect()
    }

    /// The time up to which ended leases have been seen.
    pub(super) fn leases(&self) -> Option<Timestamp> {
        self.leases
    }

    /// Records how far a claim has read in each lane or endpoint, and up to which time it has ended
    /// leases. A claim of a paused handler has ended none.
    pub(super) fn record_claim(
        &mut self,
        places: Vec<i32>,
        until: Vec<Timestamp>,
        leases: Option<Timestamp>,
    ) {
        self.places.extend(places.into_iter().zip(until));
        while self.places.len() > PLACES_MAX {
            self.places.pop_first();
        }
        self.leases = leases;
    }
}
