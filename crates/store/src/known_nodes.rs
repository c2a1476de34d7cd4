//! The nodes of a store that one process owns: they are kept in memory and end with the process.

use std::collections::{BTreeMap, HashSet};

use hapax_core::Timestamp;
use hapax_core::alert_board::LISTED_FOR;
use hapax_core::store::{HandlerRef, NODE_MISSING_FOR, NodeRecord, SeenNode, listed_nodes};
use uuid::Uuid;

/// The nodes that checked in recently, and the handlers of each.
#[derive(Debug, Default)]
pub(crate) struct KnownNodes(BTreeMap<Uuid, (SeenNode, Vec<HandlerRef>)>);

impl KnownNodes {
    /// Records a check-in. Returns the handlers of all nodes that are alive.
    pub(crate) fn check_in(
        &mut self,
        node: Uuid,
        name: String,
        handlers: Vec<HandlerRef>,
        now: Timestamp,
    ) -> HashSet<HandlerRef> {
        let started_at = self.0.get(&node).map_or(now, |(seen, _)| seen.started_at);
        let seen = SeenNode { node, name, started_at, seen_at: now, is_stopped: false };
        self.0.insert(node, (seen, handlers));
        let age = |seen: &SeenNode| now.duration_since(seen.seen_at);
        self.0.retain(|_, (seen, _)| age(seen) <= NODE_MISSING_FOR);
        let alive = self.0.values().filter(|(seen, _)| age(seen) <= LISTED_FOR);
        alive.flat_map(|(_, handlers)| handlers.clone()).collect()
    }

    /// Records that a node shut down normally.
    pub(crate) fn check_out(&mut self, node: Uuid) {
        if let Some((seen, _)) = self.0.get_mut(&node) {
            seen.is_stopped = true;
        }
    }

    /// The nodes that run or are missing.
    pub(crate) fn listed(&self, now: Timestamp) -> Vec<NodeRecord> {
        listed_nodes(self.0.values().map(|(seen, _)| seen.clone()).collect(), now)
    }
}
