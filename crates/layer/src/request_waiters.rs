//! Bells for those who wait for a running request of this process. A hint and no more: who hears
//! nothing looks again by itself.

use std::hash::{BuildHasher as _, RandomState};

use hapax_core::ledger::{IdempotencyKey, Scope};
use tokio::sync::Notify;

use crate::limits::BELLS;

/// A bell for every key, shared with others by chance.
pub(crate) struct Waiting {
    bells: [Notify; BELLS],
    hasher: RandomState,
}

impl Waiting {
    pub(crate) fn new() -> Self {
        Self { bells: std::array::from_fn(|_| Notify::new()), hasher: RandomState::new() }
    }

    /// The bell that rings when this key's request has ended.
    pub(crate) fn bell(&self, scope: &Scope, key: &IdempotencyKey) -> &Notify {
        let hash = self.hasher.hash_one((scope, key));
        &self.bells[(hash % BELLS as u64) as usize]
    }
}

/// Rings when it is dropped, so also when the work panics.
pub(crate) struct Ringing<'a>(pub(crate) &'a Notify);

impl Drop for Ringing<'_> {
    fn drop(&mut self) {
        self.0.notify_waiters();
    }
}
