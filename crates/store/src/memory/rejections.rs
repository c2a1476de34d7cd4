//! The last rejections of each source.

use hapax_core::SourceName;
use hapax_core::store::{REJECTIONS_KEPT, Rejection, RejectionRecords, StoreError};

use super::MemoryStore;

impl RejectionRecords for MemoryStore {
    async fn record_rejections(&self, rejections: Vec<Rejection>) -> Result<(), StoreError> {
        let mut model = self.model();
        for rejection in rejections {
            let kept = model.rejections.entry(rejection.source.clone()).or_default();
            if kept.iter().all(|one| one.request_id != rejection.request_id) {
                kept.push(rejection);
            }
            kept.sort_by_key(|one| (one.at, one.request_id));
            let surplus = kept.len().saturating_sub(REJECTIONS_KEPT);
            kept.drain(..surplus);
        }
        Ok(())
    }

    async fn rejections(&self, source: &SourceName) -> Result<Vec<Rejection>, StoreError> {
        let model = self.model();
        Ok(model.rejections.get(source).into_iter().flatten().rev().cloned().collect())
    }
}
