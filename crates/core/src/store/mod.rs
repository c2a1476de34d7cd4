//! The seam behind which every database stands: few methods, each one atomic business act.
//!
//! The caller decides, the store records; races are decided by the store's unique key alone. What
//! each act promises is written here once and checked for every store by one conformance suite.
//!
//! Three parts: [`Store`] makes events durable, [`Work`] is the life of their jobs, [`Inspect`] is
//! what people see. The keys of one's own API have a seam to themselves, [`crate::ledger`].

mod ingest;
mod inspect;
mod work;

use std::sync::Arc;

pub use ingest::*;
pub use inspect::*;
pub use work::*;

/// Why a store did not do what it was asked. None of these leaves anything half done.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StoreError {
    /// Nothing can be made durable now: the sender should come back.
    #[error("the store cannot write now: {0}")]
    Unavailable(Arc<str>),
    /// More is waiting than the store takes on.
    #[error("the store has too much waiting")]
    Busy,
    /// The store is going down.
    #[error("the store is closed")]
    Closed,
    /// A read failed.
    #[error("reading the store: {0}")]
    Read(Arc<str>),
}
