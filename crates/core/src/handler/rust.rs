//! The seam behind which a handler in Rust stands: it gets a claim and says how it went. What it
//! commits, and how that commit is fenced, is between it and its store.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use crate::job::Retry;
use crate::store::Claim;

/// Rust code that works on one handler's claims. Each call is one attempt; the caller renews the
/// lease, bounds its time by dropping the future, and takes a panic for a failed attempt.
pub trait RustHandler: fmt::Debug + Send + Sync + 'static {
    /// Works on one claim. `current` is the object as it is now, where the handler has it fetched.
    fn work(
        &self,
        claim: Claim,
        current: Option<Arc<str>>,
    ) -> Pin<Box<dyn Future<Output = RustOutcome> + Send + '_>>;
}

/// How an attempt in Rust ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RustOutcome {
    /// Effects and "done" are committed: nothing is left to record.
    Committed,
    /// It failed; nothing was committed.
    Failed {
        /// Why.
        error: String,
        /// When to try again.
        retry: Retry,
    },
    /// It ended without a verdict, because the fence or the database was gone: whoever claims the
    /// job next decides.
    Lost {
        /// What was gone.
        error: String,
    },
}
