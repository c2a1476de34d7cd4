//! Alerts that are stored: one row for each subject, over all nodes and restarts.

use std::future::Future;
use std::time::Duration;

use uuid::Uuid;

use super::StoreError;
use crate::alert_board::{AlertReport, AlertsNoted, StoredAlert};

/// The alerts of all nodes. Every method is one atomic act.
pub trait AlertRecords: Send + Sync + 'static {
    /// Takes or renews the lease of the judge. True if the node holds it now, for `lease` by the store's clock.
    /// Only one node holds it at a time.
    fn hold_alert_lease(
        &self,
        node: Uuid,
        lease: Duration,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Records what a node has found, as [`note`](crate::alert_board::note) decides. Rows, messages and the check of
    /// the lease are one commit, and reports follow each other. After an error the report may count or not; the
    /// next one repeats it.
    fn note_alerts(
        &self,
        report: AlertReport,
    ) -> impl Future<Output = Result<AlertsNoted, StoreError>> + Send;

    /// The alerts whose problem exists now, sorted by subject. A silence that has ended is left out.
    fn alerts(&self) -> impl Future<Output = Result<Vec<StoredAlert>, StoreError>> + Send;

    /// Silences an alert by its id ([`ActiveAlert::key`](crate::own_messages::ActiveAlert::key)) from now on, or ends
    /// its silence if `span` is zero. The alert as it is then; `None` if there is no such alert.
    fn silence_alert(
        &self,
        ask: SilenceAsk,
    ) -> impl Future<Output = Result<Option<StoredAlert>, StoreError>> + Send;
}

/// An operator's wish for silence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SilenceAsk {
    /// Which alert.
    pub id: String,
    /// How long. Zero ends the silence.
    pub span: Duration,
    /// Why.
    pub reason: String,
    /// The name of the token that is used.
    pub who: String,
}
