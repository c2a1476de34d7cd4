//! How values are stored in this database: ids that contain their time, and states as small
//! numbers.

use std::hash::{BuildHasher, RandomState};
use std::sync::Mutex;

use hapax_core::store::{EventId, ReviewReason, Status};
use hapax_core::{KeyHash, Timestamp};
use uuid::{Builder, Uuid};

pub(super) use crate::columns::{phase_of, state_of};
use crate::columns::{ranked, status_of};

/// Creates ids: version 7 UUIDs that end in 24 zero bits, where the ids of the event's jobs have
/// their lane. Ids that one node creates in the same millisecond increase, so that a list by id is
/// a list by arrival. 49 random bits make the ids of two nodes differ.
#[derive(Debug, Default)]
pub(super) struct Ids {
    dice: RandomState,
    last: Mutex<LastId>,
}

#[derive(Debug, Default)]
struct LastId {
    millis: u64,
    count: u64,
    made: u64,
}

/// The low bits of an event's id, which are zero.
pub(super) const LANE_BITS: u32 = 24;

/// Bits of the counter within a millisecond. The counter starts at a random number in the lower
/// half of its range.
const COUNT_BITS: u32 = 26;

impl Ids {
    pub(super) fn make(&self, at: Timestamp) -> EventId {
        let millis = u64::try_from(at.as_millisecond()).unwrap_or(0);
        let mut last = self.last.lock().expect("no panic happens under this lock");
        last.made += 1;
        let chance = self.dice.hash_one((millis, last.made));
        last.count = match millis == last.millis {
            true => last.count + 1,
            false => chance & ((1 << (COUNT_BITS - 1)) - 1),
        };
        last.millis = millis;
        // 12 bits before the variant, 38 after it: the counter, then random bits.
        let count = last.count & ((1 << COUNT_BITS) - 1);
        let bits = (u128::from(count) << 24) | u128::from(chance >> 40);
        let tail = (bits >> 38 << 64) | ((bits & ((1 << 38) - 1)) << LANE_BITS);
        let mut bytes = [0; 10];
        bytes.copy_from_slice(&tail.to_be_bytes()[6..]);
        EventId(Builder::from_unix_timestamp_millis(millis, &bytes).into_uuid())
    }
}

/// The first id of this instant, to find events that arrived before or after it.
pub(super) fn first_id(at: Timestamp) -> Uuid {
    let millis = u128::try_from(at.as_millisecond()).unwrap_or(0);
    Uuid::from_u128(millis << 80)
}

/// The first id that is certainly after this instant.
pub(super) fn past(at: Timestamp) -> Uuid {
    first_id(at.checked_add(jiff::SignedDuration::from_millis(1)).unwrap_or(at))
}

/// A hash as it is stored: a uuid has exactly sixteen bytes, so it is stored and compared more
/// cheaply than a byte string.
pub(super) fn of_hash(hash: KeyHash) -> Uuid {
    Uuid::from_bytes(hash.0)
}

/// The hash of a stored uuid.
pub(super) fn hash_of(kept: Uuid) -> KeyHash {
    KeyHash(kept.into_bytes())
}

/// Text for a `text` column, which cannot contain a NUL: the symbol for NUL replaces it.
pub(super) fn text(text: &str) -> String {
    text.replace('\0', "\u{2400}")
}

/// A time as the database can store it. A sender's time may be any [`Timestamp`], and the earliest
/// time here is earlier than the database's.
pub(super) fn stamp(at: Timestamp) -> Timestamp {
    at.max(Timestamp::constant(-62_135_596_800, 0))
}

/// The state of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EventState {
    pub(super) status: Status,
    /// Why the event was put in review, if it ever was.
    pub(super) review: Option<ReviewReason>,
    /// Why the event is in review, if it is in review now.
    pub(super) waiting: Option<ReviewReason>,
}

impl EventState {
    /// From the columns `state`, `review` and `pruned` of an event, and the lowest rank of its jobs.
    pub(super) fn new(state: i16, review: i16, pruned: Option<&str>, rank: Option<i32>) -> Self {
        let review = match review {
            1 => Some(ReviewReason::Late),
            2 => Some(ReviewReason::Replay),
            3 => Some(ReviewReason::Conflict),
            _ => None,
        };
        let status = match (pruned, state) {
            (Some(word), _) => status_of(word),
            (None, 0) => ranked(rank.map(i64::from)),
            (None, 1) => Status::Review,
            // An unknown value counts as discarded: such an event never runs.
            (None, _) => Status::Discarded,
        };
        Self { status, review, waiting: review.filter(|_| state == 1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_one_millisecond_are_in_order_and_leave_room_for_the_lane() {
        // Two events of the same instant would otherwise be listed in any order.
        let ids = Ids::default();
        let noon = Timestamp::constant(1_790_000_000, 0);
        let mut before = first_id(noon);
        for _ in 0..100_000 {
            let id = ids.make(noon).0;
            assert!(id > before, "{id} after {before}");
            assert_eq!(id.as_u128() & ((1 << LANE_BITS) - 1), 0);
            assert_eq!((id.get_version_num(), id.get_variant()), (7, uuid::Variant::RFC4122));
            before = id;
        }
        assert!(before < first_id(Timestamp::constant(1_790_000_000, 1_000_000)));
    }

    #[test]
    fn two_nodes_do_not_make_the_same_id() {
        let nodes = [Ids::default(), Ids::default()];
        let noon = Timestamp::constant(1_790_000_000, 0);
        let made: std::collections::HashSet<_> =
            nodes.iter().flat_map(|ids| (0..10_000).map(|_| ids.make(noon))).collect();
        assert_eq!(made.len(), 20_000);
    }
}
