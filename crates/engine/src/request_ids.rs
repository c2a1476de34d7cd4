//! Request ids: version 7 UUIDs, made without a system call or a lock for each.

use std::sync::atomic::{AtomicU64, Ordering};

use jiff::Timestamp;
use uuid::{Builder, Uuid};

/// Gives out request ids. The ids are unique, not secret.
#[derive(Debug)]
pub(crate) struct RequestIds {
    seed: u64,
    count: AtomicU64,
}

impl RequestIds {
    /// `seed` makes the ids of two processes differ.
    pub(crate) fn new(seed: u64) -> Self {
        Self { seed, count: AtomicU64::new(0) }
    }

    pub(crate) fn next(&self, now: Timestamp) -> Uuid {
        let count = self.count.fetch_add(1, Ordering::Relaxed);
        let mut random = [0; 10];
        random[..8].copy_from_slice(&scatter(self.seed.wrapping_add(count)).to_be_bytes());
        // Version and variant replace six bits of the other bytes; these bytes make consecutive ids
        // differ.
        random[8..].copy_from_slice(&(count as u16).to_be_bytes());
        let millis = u64::try_from(now.as_millisecond()).unwrap_or(0);
        Builder::from_unix_timestamp_millis(millis, &random).into_uuid()
    }
}

/// The finisher of SplitMix64: one-to-one, and consecutive numbers give very different results.
fn scatter(count: u64) -> u64 {
    let mut z = count.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn ids_of_one_instant_differ_and_are_version_7() {
        let ids = RequestIds::new(42);
        let now = Timestamp::from_second(1_700_000_000).unwrap();
        let made: HashSet<Uuid> = (0..100_000).map(|_| ids.next(now)).collect();
        assert_eq!(made.len(), 100_000);
        assert!(made.iter().all(|id| id.get_version_num() == 7));
    }
}
