//! How much each source sent over time: counts by the minute, later by the hour and by the day.

use std::time::Duration;

use jiff::Timestamp;
use uuid::Uuid;

use super::StoreError;
use crate::key::SourceName;

/// The requests that a node counted for one source in one minute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrafficCount {
    /// The source.
    pub source: SourceName,
    /// The minute: any time in it.
    pub at: Timestamp,
    /// Arrivals of new events.
    pub new: u64,
    /// Arrivals of known events.
    pub copies: u64,
    /// Arrivals of known events with another body; they are copies too.
    pub conflicts: u64,
    /// Requests that failed verification.
    pub rejected: u64,
    /// Requests that were answered with 503: they could not be made durable, and the sender must retry.
    pub unavailable: u64,
}

/// Which counts to read.
#[derive(Debug, Clone)]
pub struct TrafficAsk {
    /// Only this source; `None` for all together.
    pub source: Option<SourceName>,
    /// From this time on.
    pub from: Timestamp,
    /// Before this time.
    pub to: Timestamp,
    /// The length of one point, at least a second.
    pub step: Duration,
}

/// The counts of one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrafficPoint {
    /// The start of the step: a multiple of its length since 1970.
    pub at: Timestamp,
    /// Arrivals of new events.
    pub new: u64,
    /// Arrivals of known events.
    pub copies: u64,
    /// Arrivals of known events with another body; they are copies too.
    pub conflicts: u64,
    /// Requests that failed verification.
    pub rejected: u64,
    /// Requests that were answered with 503: they could not be made durable, and the sender must retry.
    pub unavailable: u64,
}

/// The history of traffic.
pub trait TrafficHistory: Send + Sync + 'static {
    /// Writes what `node`, a process that is named only once, has counted in whole minutes. A count replaces the one
    /// that the node wrote for the same minute and source, so an act that is repeated counts nothing twice. The same
    /// act merges a bounded number of old counts ([`NODES_MERGED_AFTER`], [`MERGES`]) and deletes those older than
    /// [`TRAFFIC_KEPT`].
    fn record_traffic(
        &self,
        node: Uuid,
        counts: Vec<TrafficCount>,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// The steps with a count, in their order. Old counts are as coarse as they are kept.
    fn traffic(
        &self,
        ask: TrafficAsk,
    ) -> impl Future<Output = Result<Vec<TrafficPoint>, StoreError>> + Send;

    /// The same for each source: a count for each step and source that has one, in the order of time.
    fn traffic_by_source(
        &self,
        ask: TrafficAsk,
    ) -> impl Future<Output = Result<Vec<TrafficCount>, StoreError>> + Send;
}

/// The length of a count as it is recorded, in seconds.
pub const MINUTE_SECONDS: i64 = 60;

/// The counts of all nodes for a minute are merged once they are older than so many seconds. No node writes a
/// minute any more that is this old.
pub const NODES_MERGED_AFTER: i64 = 2 * 3_600;

/// Counts of one length that are merged into a longer one once they are older than so many seconds: minutes
/// into hours after 48 hours, hours into days after 90 days.
pub const MERGES: [(i64, i64, i64); 2] = [(60, 3_600, 48 * 3_600), (3_600, 86_400, 90 * 86_400)];

/// How long the counts of a day are kept, in seconds: two years.
pub const TRAFFIC_KEPT: i64 = 2 * 366 * 86_400;

/// The most counts that one act merges or deletes.
pub const MERGED_MAX: usize = 500;
