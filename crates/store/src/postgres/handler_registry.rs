//! The handlers that this node has announced, with their numbers in the database, and where the
//! next claim of each begins. The registry is in memory. When a query shows that the database was
//! replaced, the handlers are announced again.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use hapax_core::order::{Machine, OrderDecision, OrderPolicy, Position};
use hapax_core::store::{HandlerRef, HandlerSpec};

use super::claim_hints::ClaimHints;

/// A handler that was announced.
#[derive(Debug)]
pub(super) struct AnnouncedHandler {
    /// Its number in the database.
    pub(super) number: i32,
    pub(super) spec: HandlerSpec,
    turn: Mutex<ClaimCursor>,
}

/// Where the next claim begins: the next lane, the next check of parked jobs, and the lanes that
/// need no query.
#[derive(Debug, Clone, Default)]
pub(super) struct ClaimCursor {
    pub(super) lane: Option<i32>,
    pub(super) look_lane: Option<i32>,
    pub(super) look_resource: Option<String>,
    pub(super) hints: ClaimHints,
}

impl AnnouncedHandler {
    pub(super) fn turn(&self) -> ClaimCursor {
        self.turn.lock().expect("no panic happens under this lock").clone()
    }

    pub(super) fn next_turn(&self, turn: ClaimCursor) {
        *self.turn.lock().expect("no panic happens under this lock") = turn;
    }
}

/// All handlers of this node.
#[derive(Debug, Default)]
pub(super) struct HandlerRegistry(RwLock<HashMap<HandlerRef, Arc<AnnouncedHandler>>>);

impl HandlerRegistry {
    pub(super) fn get(&self, handler: &HandlerRef) -> Option<Arc<AnnouncedHandler>> {
        self.0.read().expect("no panic happens under this lock").get(handler).cloned()
    }

    /// The handlers as last announced.
    pub(super) fn specs(&self) -> Vec<HandlerSpec> {
        let known = self.0.read().expect("no panic happens under this lock");
        known.values().map(|announced| announced.spec.clone()).collect()
    }

    /// Replaces the node's handlers. A handler that the node had before keeps its turn.
    pub(super) fn replace(&self, handlers: Vec<(i32, HandlerSpec)>) {
        let mut known = self.0.write().expect("no panic happens under this lock");
        let all = handlers.into_iter().map(|(number, spec)| {
            let turn = known.get(&spec.handler).map(|before| before.turn()).unwrap_or_default();
            let name = spec.handler.clone();
            (name, Arc::new(AnnouncedHandler { number, spec, turn: Mutex::new(turn) }))
        });
        *known = all.collect();
    }
}

/// A handler's policy as the table of handlers stores it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PolicyRow {
    pub(super) policy: Option<i16>,
    pub(super) start_at: Option<i64>,
    /// The machine's verdict on each step: from, to, verdict.
    pub(super) steps: (Vec<i64>, Vec<i64>, Vec<i16>),
}

impl PolicyRow {
    pub(super) fn of(policy: Option<&OrderPolicy>) -> Self {
        let plain = |policy, start_at| Self { policy, start_at, steps: Default::default() };
        match policy {
            None => plain(None, None),
            Some(OrderPolicy::Latest) => plain(Some(0), None),
            Some(OrderPolicy::Sequence { start }) => plain(Some(1), *start),
            Some(OrderPolicy::Machine(machine)) => {
                Self { policy: Some(2), start_at: None, steps: steps(policy, machine) }
            }
        }
    }
}

/// The machine's verdict on every pair of its states. Stale steps are left out, except that of a
/// state to itself, which records that the state exists.
fn steps(policy: Option<&OrderPolicy>, machine: &Machine) -> (Vec<i64>, Vec<i64>, Vec<i16>) {
    let mut steps = (Vec::new(), Vec::new(), Vec::new());
    let Some(policy) = policy else { return steps };
    for from in std::iter::once(None).chain(machine.states().map(Some)) {
        for to in machine.states() {
            let says = match policy.decide(from, to) {
                OrderDecision::Run => 0,
                OrderDecision::Stale if from == Some(to) => 1,
                OrderDecision::Stale => continue,
                OrderDecision::Hold => 2,
            };
            steps.0.push(from.map_or(-1, |Position(from)| from));
            steps.1.push(to.0);
            steps.2.push(says);
        }
    }
    steps
}

/// Microseconds for a column: at most ten years.
pub(super) fn micros(duration: Duration) -> i64 {
    const TEN_YEARS: i64 = 10 * 365 * 86_400 * 1_000_000;
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX).min(TEN_YEARS)
}
