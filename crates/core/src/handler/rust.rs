//! The trait of a handler in Rust: it gets a claim and returns the outcome. The handler commits its effects
//! through its store, which checks the fence.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use crate::job::Retry;
use crate::store::Claim;

/// Rust code that runs the claims of one handler. Each call is one attempt. The caller renews the
/// lease, drops the future when the time is over, and counts a panic as a failed attempt.
pub trait RustHandler: fmt::Debug + Send + Sync + 'static {
    /// Runs one claim. `current` is the refetched object, if the handler has a `refetch`.
    fn work(
        &self,
        claim: Claim,
        current: Option<Arc<str>>,
    ) -> Pin<Box<dyn Future<Output = RustOutcome> + Send + '_>>;
}

/// How an attempt in Rust ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RustOutcome {
    /// The effects are committed, and the job is recorded as done.
    Committed,
    /// The attempt failed; nothing was committed.
    Failed {
        /// The error.
        error: String,
        /// When to retry.
        retry: Retry,
    },
    /// The outcome is unknown, because the fence was lost or the database did not answer. The next claim
    /// of the job decides.
    Lost {
        /// The error.
        error: String,
    },
}
