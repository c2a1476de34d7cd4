//! The figures of endpoints by the hour.

use std::collections::BTreeMap;

use hapax_core::Timestamp;
use hapax_core::endpoint::EndpointId;
use hapax_core::store::{
    ENDPOINT_HOURS_KEPT, EndpointFigures, EndpointHistory, EndpointHour, StoreError, hour_of,
};
use uuid::Uuid;

use super::MemoryStore;

/// The figures by endpoint, hour and node.
pub(super) type EndpointHours = BTreeMap<(EndpointId, i64, Uuid), EndpointFigures>;

impl EndpointHistory for MemoryStore {
    async fn record_endpoints(
        &self,
        node: Uuid,
        counts: Vec<EndpointHour>,
    ) -> Result<(), StoreError> {
        let kept_from = self.now().as_second() - ENDPOINT_HOURS_KEPT;
        let hours = &mut self.model().endpoint_hours;
        for EndpointHour { endpoint, at, figures } in counts {
            hours.insert((endpoint, hour_of(at), node), figures);
        }
        hours.retain(|(_, start, _), _| *start >= kept_from);
        Ok(())
    }

    async fn endpoint_hours(
        &self,
        endpoints: Vec<EndpointId>,
        from: Timestamp,
    ) -> Result<Vec<EndpointHour>, StoreError> {
        let mut sums: BTreeMap<(EndpointId, i64), EndpointFigures> = BTreeMap::new();
        for ((endpoint, start, _), figures) in &self.model().endpoint_hours {
            if endpoints.contains(endpoint) && *start >= hour_of(from) {
                sums.entry((*endpoint, *start)).or_default().add(figures);
            }
        }
        let hour = |((endpoint, start), figures)| EndpointHour {
            endpoint,
            at: Timestamp::from_second(start).unwrap_or(Timestamp::UNIX_EPOCH),
            figures,
        };
        Ok(sums.into_iter().map(hour).collect())
    }
}
