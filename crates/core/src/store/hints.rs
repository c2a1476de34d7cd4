//! Hints for logs and pacing. Hints change nothing and decide no race.

use std::future::Future;

use super::StoreError;
use crate::key::EventKey;

/// Hints that a store gives its callers.
pub trait StoreHints: Send + Sync + 'static {
    /// Whether an event with this key is durable, for logs and metrics.
    fn knows(&self, key: &EventKey) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// The most [`Work::run_sql`](super::Work::run_sql) calls of one handler that are worth running at
    /// once while there is a backlog.
    fn sql_batches_max(&self) -> usize {
        1
    }

    /// The number of requests so far that may have had to wait for a
    /// [`Work::prune`](super::Work::prune). While it stays the same, pruning delays no request. `None` if
    /// the store does not count them.
    fn foreground_requests(&self) -> Option<u64> {
        None
    }
}
