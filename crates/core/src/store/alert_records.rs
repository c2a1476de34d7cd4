//! Alerts that are stored: one row for each subject, over all nodes and restarts.

use std::collections::HashSet;
use std::future::Future;
use std::time::Duration;

use uuid::Uuid;

use super::{HandlerRef, StoreError};
use crate::alert_board::{AlertReport, AlertsNoted, StoredAlert};

/// The alerts of all nodes. Every method is one atomic act.
pub trait AlertRecords: Send + Sync + 'static {
    /// Records that a node is alive and which handlers it has, and takes or renews the lease of the judge. Only one node
    /// holds the lease at a time, by the store's clock. A node counts as alive for
    /// [`LISTED_FOR`](crate::alert_board::LISTED_FOR).
    fn check_in(&self, node: CheckIn)
    -> impl Future<Output = Result<CheckedIn, StoreError>> + Send;

    /// Records the findings of a node, as [`note`](crate::alert_board::note) decides. Rows, messages and the
    /// check of the lease are one commit, and reports follow each other. After an error the report may or may
    /// not have been counted; the next report repeats it.
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

/// A node that is alive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckIn {
    /// Names the process, and only this one.
    pub node: Uuid,
    /// How long it judges the data of all nodes if it gets the lease.
    pub lease: Duration,
    /// The handlers in its configuration.
    pub handlers: Vec<HandlerRef>,
}

/// The state of all nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CheckedIn {
    /// Whether the node holds the lease of the judge.
    pub is_judge: bool,
    /// The handlers of all nodes that are alive, each once.
    pub handlers: HashSet<HandlerRef>,
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
