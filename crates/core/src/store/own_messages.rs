//! The messages of Hapax about itself that no other act of a store publishes.

use std::future::Future;
use std::time::Duration;

use super::StoreError;
use crate::own_messages::ActiveAlert;

/// Publishes the messages of Hapax about itself: those that have waited, and the alerts that nodes
/// report.
pub trait OwnMessages: Send + Sync + 'static {
    /// Publishes the number of dead deliveries of each endpoint whose last such message is
    /// [`DEATHS_EVERY`](crate::own_messages::DEATHS_EVERY) old, of at most `limit` endpoints. The first dead delivery
    /// after such a pause is published in the commit that ends it; those that follow wait for this call. True
    /// when there may be more.
    fn publish_deaths(&self, limit: usize)
    -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Records the alerts that are active on this node, in one commit. A subject that no node has reported is
    /// raised: it is recorded and published, once for all nodes. A subject that no node has reported for `quiet` is
    /// cleared, at most [`ALERTS_CLEARED_MAX`](crate::limits::ALERTS_CLEARED_MAX) of them with one call. So a restart
    /// raises nothing again, and an alert that comes and goes is raised and cleared once in `quiet` at most.
    fn note_alerts(
        &self,
        active: Vec<ActiveAlert>,
        quiet: Duration,
    ) -> impl Future<Output = Result<AlertsNoted, StoreError>> + Send;
}

/// The result of a commit of alerts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AlertsNoted {
    /// Alerts that were raised.
    pub raised: usize,
    /// Alerts that were cleared.
    pub cleared: usize,
}
