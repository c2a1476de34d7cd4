//! A filter over the keys in the tree: it answers "certainly not there" without reading a page.
//!
//! The filter has no false negatives, and keeps keys that were deleted. The filter grows by layers, each twice as
//! large as the layer before, so that the number of keys need not be known in advance.

/// Bits that are set and tested for each key. With [`BITS_PER_KEY`] bits, about one unknown key in
/// a hundred causes a lookup.
const PROBES: u32 = 6;
const BITS_PER_KEY: usize = 10;

/// Keys that the first layer is made for.
const FIRST_LAYER_KEYS: usize = 256 * 1024;

#[derive(Debug, Default)]
pub(super) struct Filter {
    layers: Vec<Layer>,
}

#[derive(Debug)]
struct Layer {
    words: Box<[u64]>,
    keys: usize,
    keys_max: usize,
}

impl Filter {
    /// An empty filter that takes `expected` keys in its first layer.
    pub(super) fn for_keys(expected: usize) -> Self {
        Self { layers: vec![Layer::for_keys(expected.max(FIRST_LAYER_KEYS))] }
    }

    pub(super) fn add(&mut self, hash: &[u8; 16]) {
        let full = self.layers.last().is_none_or(|layer| layer.keys >= layer.keys_max);
        if full {
            let larger = self.layers.last().map_or(FIRST_LAYER_KEYS, |layer| layer.keys_max * 2);
            self.layers.push(Layer::for_keys(larger));
        }
        if let Some(layer) = self.layers.last_mut() {
            layer.add(hash);
        }
    }

    /// How many keys were added.
    pub(super) fn keys(&self) -> usize {
        self.layers.iter().map(|layer| layer.keys).sum()
    }

    /// Returns false only for a key that was never added.
    pub(super) fn may_hold(&self, hash: &[u8; 16]) -> bool {
        self.layers.iter().any(|layer| layer.may_hold(hash))
    }
}

impl Layer {
    fn for_keys(keys: usize) -> Self {
        // The filter consists of whole cache lines: all probes of a key fall into one line.
        let lines = (keys * BITS_PER_KEY).div_ceil(512).next_power_of_two();
        Self { words: vec![0; lines * 8].into(), keys: 0, keys_max: lines * 512 / BITS_PER_KEY }
    }

    fn add(&mut self, hash: &[u8; 16]) {
        let (line, probes) = self.locate(hash);
        for bit in probes {
            self.words[line + (bit / 64) as usize] |= 1 << (bit % 64);
        }
        self.keys += 1;
    }

    fn may_hold(&self, hash: &[u8; 16]) -> bool {
        let (line, mut probes) = self.locate(hash);
        probes.all(|bit| self.words[line + (bit / 64) as usize] & (1 << (bit % 64)) != 0)
    }

    /// The keys are hashes already: their own bits choose the line and the bits in it.
    fn locate(&self, hash: &[u8; 16]) -> (usize, impl Iterator<Item = u64> + use<>) {
        let (low, high) = hash.split_at(8);
        let low = u64::from_le_bytes(low.try_into().expect("half of sixteen bytes"));
        let high = u64::from_le_bytes(high.try_into().expect("half of sixteen bytes"));
        let line = (low as usize % (self.words.len() / 8)) * 8;
        (line, (0..PROBES).map(move |probe| (high >> (probe * 9)) & 511))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hapax_core::KeyHash;

    fn key(n: u32) -> [u8; 16] {
        KeyHash::of(b"test", [&n.to_be_bytes()[..]]).0
    }

    #[test]
    fn a_filter_never_denies_a_key_it_was_given_and_seldom_affirms_another() {
        // More than one layer, so that growth is tried too.
        let mut filter = Filter::for_keys(1);
        for n in 0..1_000_000 {
            filter.add(&key(n));
        }
        assert!(filter.layers.len() > 1);
        assert_eq!(filter.keys(), 1_000_000);
        assert!((0..1_000_000).all(|n| filter.may_hold(&key(n))));
        let vain = (1_000_000..1_100_000).filter(|n| filter.may_hold(&key(*n))).count();
        assert!(vain < 10_000, "{vain} of 100000 foreign keys would be looked up");
    }
}
