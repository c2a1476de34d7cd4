//! The nodes that work on one database.

use hapax_core::Timestamp;
use hapax_core::store::NodeRecord;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

/// A node that runs or is missing. A node that shut down normally is neither.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Node {
    /// Names the process, and only this one.
    pub(crate) id: Uuid,
    /// Its host, and its port for senders.
    pub(crate) name: String,
    pub(crate) started_at: Timestamp,
    /// When it last checked in. A node checks in every ten seconds.
    pub(crate) seen_at: Timestamp,
    /// Whether it has checked in within 30 seconds. A node that has not is missing. A missing node is listed for an
    /// hour, or until another node of that name runs.
    pub(crate) alive: bool,
}

impl From<NodeRecord> for Node {
    fn from(NodeRecord { node, name, started_at, seen_at, is_alive }: NodeRecord) -> Self {
        Self { id: node, name, started_at, seen_at, alive: is_alive }
    }
}
