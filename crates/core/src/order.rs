//! Order: events do not arrive in the order in which they happened. The rules here decide whether a job
//! may run, given the mark of its resource (the last position applied), and where the mark is afterwards.
//! The store keeps the mark under a lock. State machines are in `state_machine`.

mod state_machine;

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use self::state_machine::{Machine, MachineError};

/// The error of a job in review whose predecessor did not arrive before the deadline.
pub const HELD_TOO_LONG: &str = "its predecessor did not arrive in time";

/// The error of a job that is stale because the mark passed it while it ran.
pub const OVERTAKEN: &str = "a newer version of its resource was applied meanwhile";

/// The error of a job in review because too many jobs of its resource are held.
pub const HELD_TOO_MANY: &str = "too many jobs of its resource wait for their predecessors";

/// A place in the order of one resource: a version, a sequence number or a time; for a machine the
/// number of a state's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Position(pub i64);

/// Where a job stands in the order of its resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResourcePosition {
    /// The resource, within tenant, source and handler.
    pub resource: Box<str>,
    /// Its position there.
    pub position: Position,
}

/// How a handler keeps order, and what it does about gaps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OrderRule {
    /// Which jobs may run.
    pub policy: OrderPolicy,
    /// How long the others wait, and what happens then.
    pub gaps: Gaps,
}

/// How a handler keeps order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OrderPolicy {
    /// A job that is older than the mark is stale. Equal positions run; gaps do not matter.
    Latest,
    /// One after the other without a gap.
    Sequence {
        /// The first number; `None`: the number that is claimed first.
        start: Option<i64>,
    },
    /// From state to state, along allowed transitions only.
    Machine(Arc<Machine>),
}

/// How many jobs wait for a missing predecessor, how long, and what happens then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gaps {
    /// How long a job is held. Its deadline is fixed when the hold begins.
    pub hold: Duration,
    /// The most held jobs of one resource; the newest beyond that go to review.
    pub hold_max: usize,
    /// The treatment of a gap after that time.
    pub on_gap: OnGap,
}

/// The treatment of a gap after its hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnGap {
    /// An operator decides.
    Review,
    /// The [`OrderPolicy::earliest`] held job of the resource runs. In a sequence the mark moves to
    /// just before it, and the missing numbers are stale from then on. In a machine the job runs as if an
    /// operator had forced it. The others follow in order, or are judged again.
    Go,
}

impl Default for Gaps {
    fn default() -> Self {
        Self { hold: Duration::from_secs(600), hold_max: 1_000, on_gap: OnGap::Review }
    }
}

/// The decision of the order rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OrderDecision {
    /// Run it; when its effects commit, the mark moves to [`OrderPolicy::after`].
    Run,
    /// A newer version was already applied.
    Stale,
    /// Its predecessor has not been applied yet.
    Hold,
}

impl OrderPolicy {
    /// Decides about a job at `position`, where `mark` was the last one applied.
    pub fn decide(&self, mark: Option<Position>, position: Position) -> OrderDecision {
        match (self, mark) {
            (Self::Latest, Some(mark)) if position < mark => OrderDecision::Stale,
            (Self::Latest, Some(_) | None) => OrderDecision::Run,
            (Self::Sequence { .. }, Some(mark)) if position <= mark => OrderDecision::Stale,
            (Self::Sequence { .. }, Some(Position(mark))) => {
                if mark.checked_add(1) == Some(position.0) {
                    OrderDecision::Run
                } else {
                    OrderDecision::Hold
                }
            }
            (Self::Sequence { start: None }, None) => OrderDecision::Run,
            (Self::Sequence { start: Some(start) }, None) => match position.0.cmp(start) {
                std::cmp::Ordering::Less => OrderDecision::Stale,
                std::cmp::Ordering::Equal => OrderDecision::Run,
                std::cmp::Ordering::Greater => OrderDecision::Hold,
            },
            (Self::Machine(machine), mark) => machine.decide(mark, position),
        }
    }

    /// The mark once a job at `position` is done, forced or not. A number never moves back; a state
    /// becomes the new one.
    pub fn after(&self, mark: Option<Position>, position: Position) -> Position {
        match self {
            Self::Latest | Self::Sequence { .. } => mark.map_or(position, |it| it.max(position)),
            Self::Machine(_) => position,
        }
    }

    /// The held position that runs first when the hold of a gap has ended: the lowest number, or
    /// the state that leads to most of the others.
    pub fn earliest(&self, held: impl IntoIterator<Item = Position>) -> Option<Position> {
        match self {
            Self::Latest | Self::Sequence { .. } => held.into_iter().min(),
            Self::Machine(machine) => machine.earliest(held),
        }
    }

    /// Whether a running job that was not forced may still report "done". Its lease may have ended,
    /// and another job of its resource may have been applied in its place. If this is false, the job has lost
    /// its fence.
    pub fn may_settle(&self, mark: Option<Position>, position: Position) -> bool {
        match self {
            Self::Latest | Self::Sequence { .. } => {
                self.decide(mark, position) != OrderDecision::Stale
            }
            Self::Machine(_) => self.decide(mark, position) == OrderDecision::Run,
        }
    }
}
