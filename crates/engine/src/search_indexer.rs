//! The search indexer: adds the values that sources name in `search` to the index of the store, after the
//! acks and in small commits. If no source names a field, the indexer does nothing.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use hapax_core::search::SearchFields;
use hapax_core::store::SearchIndex;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::limits::{INDEX_BATCH, INDEX_EVERY, PRUNE_PAUSE};

/// Indexes values every few seconds.
pub struct SearchIndexer<S> {
    store: Arc<S>,
    fields: Arc<ArcSwap<SearchFields>>,
    every: Duration,
}

impl<S> SearchIndexer<S> {
    /// An indexer for these fields, which may be replaced at any time.
    pub fn new(store: Arc<S>, fields: Arc<ArcSwap<SearchFields>>) -> Self {
        Self { store, fields, every: INDEX_EVERY }
    }
}

impl<S: SearchIndex> SearchIndexer<S> {
    /// Indexes in rounds, until `stop`.
    pub async fn run(&self, stop: CancellationToken) {
        let mut failing = false;
        loop {
            match stop.run_until_cancelled(self.round()).await {
                Some(Err(error)) if !failing => {
                    failing = true;
                    warn!(%error, "indexing values for searches: {error}; trying again");
                }
                Some(Err(_)) | None => {}
                Some(Ok(())) => failing = false,
            }
            if stop.run_until_cancelled(sleep(self.every)).await.is_none() {
                return;
            }
        }
    }

    /// Indexes everything that is there now. A pause after each batch, as long as the batch took, leaves the store to
    /// other work.
    async fn round(&self) -> Result<(), hapax_core::store::StoreError> {
        loop {
            let fields = self.fields.load_full();
            let began = Instant::now();
            if fields.is_empty() || !self.store.index_values(fields, INDEX_BATCH).await? {
                return Ok(());
            }
            sleep(began.elapsed().max(PRUNE_PAUSE)).await;
        }
    }
}

impl<S> std::fmt::Debug for SearchIndexer<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SearchIndexer").field("fields", &self.fields).finish_non_exhaustive()
    }
}
