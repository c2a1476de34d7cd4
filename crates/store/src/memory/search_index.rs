//! The index over the values that operators search for.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use hapax_core::KeyHash;
use hapax_core::search::SearchFields;
use hapax_core::store::{SearchIndex, StoreError};

use super::{EventNumber, MemoryStore, Model};

/// The indexed values, and how far the index has come for each set of fields.
#[derive(Debug, Default)]
pub(super) struct IndexedValues {
    rows: BTreeSet<(EventNumber, KeyHash)>,
    /// The number of the first event that is not indexed.
    next: HashMap<KeyHash, EventNumber>,
}

impl IndexedValues {
    pub(super) fn has(&self, event: EventNumber, hash: KeyHash) -> bool {
        self.rows.contains(&(event, hash))
    }

    /// Deletes the rows of an event.
    pub(super) fn forget(&mut self, event: EventNumber) {
        self.rows.retain(|(of, _)| *of != event);
    }
}

impl SearchIndex for MemoryStore {
    async fn index_values(
        &self,
        fields: Arc<SearchFields>,
        limit: usize,
    ) -> Result<bool, StoreError> {
        Ok(self.model().index_values(&fields, limit))
    }

    async fn count_events_with(&self, value: KeyHash, most: usize) -> Result<usize, StoreError> {
        let model = self.model();
        Ok(model.search_index.rows.iter().filter(|(_, hash)| *hash == value).take(most).count())
    }
}

impl Model {
    fn index_values(&mut self, fields: &SearchFields, limit: usize) -> bool {
        let next = self.search_index.next.entry(fields.fingerprint()).or_default();
        let mut count = 0;
        for (at, stored) in self.events.range(*next..).take(limit) {
            if !stored.gone {
                let values = fields.values_of(&stored.key.source, &stored.detail.body);
                self.search_index.rows.extend(values.into_iter().map(|hash| (*at, hash)));
            }
            *next = at + 1;
            count += 1;
        }
        count == limit
    }
}
