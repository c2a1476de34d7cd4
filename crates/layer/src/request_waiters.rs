//! Wakes requests that wait for a running request of this process. A wake-up is only a hint: a waiting
//! request also polls the ledger.

use std::hash::{BuildHasher as _, RandomState};

use hapax_core::ledger::{IdempotencyKey, Scope};
use tokio::sync::Notify;

use crate::limits::NOTIFY_SHARDS;

/// A notifier for every key. Keys with the same hash share a notifier.
pub(crate) struct RequestWaiters {
    shards: [Notify; NOTIFY_SHARDS],
    hasher: RandomState,
}

impl RequestWaiters {
    pub(crate) fn new() -> Self {
        Self { shards: std::array::from_fn(|_| Notify::new()), hasher: RandomState::new() }
    }

    /// The notifier of this key's request.
    pub(crate) fn notify_of(&self, scope: &Scope, key: &IdempotencyKey) -> &Notify {
        let hash = self.hasher.hash_one((scope, key));
        &self.shards[(hash % NOTIFY_SHARDS as u64) as usize]
    }
}

/// Wakes the waiters when it is dropped, and therefore also when the work panics.
pub(crate) struct NotifyOnDrop<'a>(pub(crate) &'a Notify);

impl Drop for NotifyOnDrop<'_> {
    fn drop(&mut self) {
        self.0.notify_waiters();
    }
}
