//! Counts the acts of operators that may end claims of deliveries. A sender compares the count with that of its claims.

use std::sync::atomic::{AtomicU64, Ordering};

/// The acts of this process so far.
#[derive(Debug, Default)]
pub(crate) struct OperatorActs(AtomicU64);

impl OperatorActs {
    /// Counts an act that is committed and not answered yet.
    pub(crate) fn count(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn so_far(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}
