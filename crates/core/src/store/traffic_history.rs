//! How much each source sent over time: counts by the minute, later by the hour and by the day.

use std::time::Duration;

use jiff::Timestamp;

use super::StoreError;
use crate::key::SourceName;

/// The requests that a node counted for one source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrafficCount {
    /// The source.
    pub source: SourceName,
    /// When it was counted. It is kept to the minute.
    pub at: Timestamp,
    /// Arrivals of new events.
    pub new: u64,
    /// Arrivals of known events.
    pub copies: u64,
    /// Requests that failed verification.
    pub rejected: u64,
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
    /// Requests that failed verification.
    pub rejected: u64,
}

/// The history of traffic.
pub trait TrafficHistory: Send + Sync + 'static {
    /// Adds the counts of this node to those of all nodes. After an error they may have been added
    /// or not. The same act merges a bounded number of old counts ([`MERGES`]) and deletes those
    /// older than [`TRAFFIC_KEPT`].
    fn record_traffic(
        &self,
        counts: Vec<TrafficCount>,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// The steps with a count, in their order. Old counts are as coarse as they are kept.
    fn traffic(
        &self,
        ask: TrafficAsk,
    ) -> impl Future<Output = Result<Vec<TrafficPoint>, StoreError>> + Send;
}

/// The length of a count as it is recorded, in seconds.
pub const MINUTE_SECONDS: i64 = 60;

/// Which counts are merged into longer ones, and after how many seconds: minutes into hours after
/// 48 hours, hours into days after 90 days.
pub const MERGES: [(i64, i64, i64); 2] = [(60, 3_600, 48 * 3_600), (3_600, 86_400, 90 * 86_400)];

/// How long the counts of a day are kept, in seconds: two years.
pub const TRAFFIC_KEPT: i64 = 2 * 366 * 86_400;

/// The most counts that one act merges or deletes.
pub const MERGED_MAX: usize = 500;
