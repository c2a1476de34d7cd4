//! Alerts that are stored: one row for each subject, over all nodes and restarts.

use std::collections::HashSet;
use std::future::Future;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use uuid::Uuid;

use super::{HandlerRef, StoreError};
use crate::alert_board::{AlertReport, AlertsNoted, StoredAlert};

/// The alerts of all nodes. Every method is one atomic act.
pub trait AlertRecords: Send + Sync + 'static {
    /// Records that a node is alive and which handlers it has, and takes or renews the lease of the judge. Only one node
    /// holds the lease at a time, by the store's clock. The handlers of a node count for
    /// [`LISTED_FOR`](crate::alert_board::LISTED_FOR) after each check-in.
    fn check_in(&self, node: CheckIn)
    -> impl Future<Output = Result<CheckedIn, StoreError>> + Send;

    /// Records that a node shuts down normally, so that it is not listed as missing. Its handlers count for as long
    /// as those of a node that died, so that a restart is not mistaken for handlers that are gone. The next
    /// check-in undoes the check-out.
    fn check_out(&self, node: Uuid) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// The nodes that run, and those that stopped without checking out, as [`listed_nodes`] decides by the store's
    /// clock.
    fn nodes(&self) -> impl Future<Output = Result<Vec<NodeRecord>, StoreError>> + Send;

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
    /// its silence if `span` is zero. Returns the alert as it is then, or `None` if there is no such alert.
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
    /// Its host and address. A node that starts again has the same one.
    pub name: String,
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
    /// The handlers of all nodes that checked in within
    /// [`LISTED_FOR`](crate::alert_board::LISTED_FOR), each once.
    pub handlers: HashSet<HandlerRef>,
}

/// An operator's request to silence an alert, or to end its silence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SilenceAsk {
    /// The id of the alert.
    pub id: String,
    /// How long. Zero ends the silence.
    pub span: Duration,
    /// The reason.
    pub reason: String,
    /// The name of the token that is used.
    pub who: String,
}

/// A node, as it last checked in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeenNode {
    /// Names the process, and only this one.
    pub node: Uuid,
    /// Its host and address.
    pub name: String,
    /// The first check-in.
    pub started_at: Timestamp,
    /// The last check-in.
    pub seen_at: Timestamp,
    /// Whether it has checked out since.
    pub is_stopped: bool,
}

/// A node that runs or is missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeRecord {
    /// Names the process, and only this one.
    pub node: Uuid,
    /// Its host and address.
    pub name: String,
    /// The first check-in.
    pub started_at: Timestamp,
    /// The last check-in.
    pub seen_at: Timestamp,
    /// Whether it has checked in within [`NODE_ALIVE_FOR`]. Otherwise it is missing.
    pub is_alive: bool,
}

/// How long after its last check-in a node counts as running. Nodes check in every ten seconds.
pub const NODE_ALIVE_FOR: SignedDuration = SignedDuration::from_secs(30);

/// How long a node is listed as missing.
pub const NODE_MISSING_FOR: SignedDuration = SignedDuration::from_hours(1);

/// The nodes that run or are missing, by name and start. A node that checked out is not missing. A node that was
/// replaced is not missing either: another node started under the same name after the last check-in of the first. The
/// other node may have stopped since.
pub fn listed_nodes(seen: Vec<SeenNode>, now: Timestamp) -> Vec<NodeRecord> {
    let starts: Vec<(Uuid, String, Timestamp)> =
        seen.iter().map(|node| (node.node, node.name.clone(), node.started_at)).collect();
    let is_replaced = |node: &SeenNode| {
        starts.iter().any(|(other, name, started_at)| {
            *other != node.node && *name == node.name && *started_at > node.seen_at
        })
    };
    let age = |node: &SeenNode| now.duration_since(node.seen_at);
    let mut listed: Vec<NodeRecord> = seen
        .into_iter()
        .filter(|node| !node.is_stopped && age(node) <= NODE_MISSING_FOR && !is_replaced(node))
        .map(|node| NodeRecord {
            is_alive: age(&node) <= NODE_ALIVE_FOR,
            node: node.node,
            name: node.name,
            started_at: node.started_at,
            seen_at: node.seen_at,
        })
        .collect();
    listed.sort_by(|a, b| (&a.name, a.started_at, a.node).cmp(&(&b.name, b.started_at, b.node)));
    listed
}
