//! The index over values of events that operators search for. It is written after the acks, by deferred writes.

use std::future::Future;
use std::sync::Arc;

use super::StoreError;
use crate::search::SearchFields;

/// The index over the values that sources name in `search`. Its rows are deleted with the bodies of their events.
pub trait SearchIndex: Send + Sync + 'static {
    /// Indexes the next events, at most `limit`, from old to new. Returns true if there may be more of them now.
    ///
    /// How far the index has come is kept for each set of fields, and moves in the commit of the last row that it
    /// covers. A crash therefore loses nothing: the next call indexes the same events again, which changes no row.
    /// With other fields than before, all events that are still whole are gone over again. Nodes share the work;
    /// if another node is at it, this returns false.
    fn index_values(
        &self,
        fields: Arc<SearchFields>,
        limit: usize,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send;
}
