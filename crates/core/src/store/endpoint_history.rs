//! The figures of each endpoint by the hour: how many attempts succeeded, and how long the endpoint took to answer.

use std::future::Future;

use jiff::Timestamp;
use uuid::Uuid;

use super::{StoreError, Tallies};
use crate::endpoint::EndpointId;

/// The figures of one endpoint in one hour.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointHour {
    /// The endpoint.
    pub endpoint: EndpointId,
    /// The hour: any time in it when it is written, its start when it is read.
    pub at: Timestamp,
    /// The figures.
    pub figures: EndpointFigures,
}

/// The figures of an endpoint for a time. Attempts that never left the process are not counted.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EndpointFigures {
    /// Attempts that the endpoint answered with a 2xx.
    pub delivered: u64,
    /// Attempts that failed: another answer, or none.
    pub failed: u64,
    /// The sum of the durations of all these attempts, in microseconds.
    pub micros: u64,
    /// The durations by bucket: [`TallyKind::Attempt`](super::TallyKind::Attempt).
    pub tallies: Tallies,
}

impl EndpointFigures {
    /// Adds figures of another node or another time.
    pub fn add(&mut self, other: &Self) {
        self.delivered = self.delivered.saturating_add(other.delivered);
        self.failed = self.failed.saturating_add(other.failed);
        self.micros = self.micros.saturating_add(other.micros);
        self.tallies.add(&other.tallies);
    }
}

/// The figures of endpoints.
pub trait EndpointHistory: Send + Sync + 'static {
    /// Writes what `node`, a process that is named only once, has counted in whole hours. A count replaces the one that
    /// the node wrote for the same hour and endpoint, so an act that is repeated counts nothing twice. The same act
    /// deletes a bounded number of counts that are older than [`ENDPOINT_HOURS_KEPT`].
    fn record_endpoints(
        &self,
        node: Uuid,
        counts: Vec<EndpointHour>,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// The figures of these endpoints since the hour of `from`, over all nodes, by endpoint and hour.
    fn endpoint_hours(
        &self,
        endpoints: Vec<EndpointId>,
        from: Timestamp,
    ) -> impl Future<Output = Result<Vec<EndpointHour>, StoreError>> + Send;
}

/// The length of a count, in seconds.
pub const HOUR_SECONDS: i64 = 3_600;

/// How long the figures of an hour are kept, in seconds: two weeks.
pub const ENDPOINT_HOURS_KEPT: i64 = 14 * 86_400;

/// The start of the hour that contains a time, in seconds since 1970.
pub fn hour_of(at: Timestamp) -> i64 {
    let second = at.as_second();
    second - second.rem_euclid(HOUR_SECONDS)
}
