//! The index over values of events that operators search for. Deferred writes fill the index after the acks.

use std::future::Future;
use std::sync::Arc;

use super::StoreError;
use crate::key::KeyHash;
use crate::search::SearchFields;

/// The index over the values that sources name in `search`. Its rows are deleted with the bodies of their events.
pub trait SearchIndex: Send + Sync + 'static {
    /// Indexes the next events, at most `limit`, from old to new. Returns true if there may be more of them now.
    ///
    /// Each set of fields has a mark: the last event that is indexed. The mark moves in the commit of the
    /// last row that it covers. A crash therefore loses nothing: the next call indexes the same events
    /// again, which changes no row. If the fields change, all events that still have a body are indexed
    /// again. One node indexes at a time; while another node does, this returns false.
    fn index_values(
        &self,
        fields: Arc<SearchFields>,
        limit: usize,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// The number of events that are indexed with this value, at most `most`. An event counts from its indexing until its
    /// body is pruned.
    fn count_events_with(
        &self,
        value: KeyHash,
        most: usize,
    ) -> impl Future<Output = Result<usize, StoreError>> + Send;
}
