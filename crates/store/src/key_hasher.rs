//! Maps by [`hapax_core::KeyHash`]. Such keys are hashes already, so hashing them again takes a few
//! instructions. Senders choose the hashed content, so a random seed still decides a key's slot.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};

use hapax_core::KeyHash;

/// A map whose keys are hashes already.
pub(crate) type KeyMap<V> = HashMap<KeyHash, V, KeyHasherState>;

/// The random seeds of one map.
#[derive(Debug, Clone)]
pub(crate) struct KeyHasherState {
    seeds: [u64; 2],
}

impl Default for KeyHasherState {
    fn default() -> Self {
        let dice = RandomState::new();
        Self { seeds: [dice.hash_one(0), dice.hash_one(1)] }
    }
}

impl BuildHasher for KeyHasherState {
    type Hasher = Folded;

    fn build_hasher(&self) -> Folded {
        Folded { seeds: self.seeds, folded: 0 }
    }
}

/// Multiplies the halves of a key, each mixed with a seed, and folds the product.
#[derive(Debug)]
pub(crate) struct Folded {
    seeds: [u64; 2],
    folded: u64,
}

impl Hasher for Folded {
    fn write(&mut self, bytes: &[u8]) {
        for half in bytes.chunks(16) {
            let mut key = [0; 16];
            key[..half.len()].copy_from_slice(half);
            let key = u128::from_le_bytes(key);
            let (low, high) = (key as u64 ^ self.seeds[0], (key >> 64) as u64 ^ self.seeds[1]);
            let product = u128::from(low) * u128::from(high);
            self.folded ^= product as u64 ^ (product >> 64) as u64;
        }
    }

    /// The length of a key is always the same, so it is not hashed.
    fn write_usize(&mut self, _: usize) {}

    fn finish(&self) -> u64 {
        self.folded
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_differ_in_one_bit_fall_apart_and_two_maps_place_them_differently() {
        let (one, other) = (KeyHasherState::default(), KeyHasherState::default());
        let keys = (0..128).map(|bit| KeyHash((1_u128 << bit).to_le_bytes()));
        let places: Vec<u64> = keys.clone().map(|key| one.hash_one(key)).collect();
        let elsewhere: Vec<u64> = keys.map(|key| other.hash_one(key)).collect();
        assert_ne!(places, elsewhere);
        let mut distinct = places.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), places.len());
    }
}
