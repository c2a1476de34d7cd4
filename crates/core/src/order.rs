//! Order: arrival order is not event order. What a handler's guard decides about a job, given the
//! mark of its resource; where the mark is kept, and under which lock, is the store's.

use serde::{Deserialize, Serialize};

/// A place in the order of one resource: a version, a sequence number or a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Position(pub i64);

/// Where a job stands in the order of its resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The resource, within tenant, source and handler.
    pub resource: Box<str>,
    /// Its position there.
    pub position: Position,
}

/// How a handler keeps order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OrderPolicy {
    /// Strictly older than what was applied is stale; ties run; gaps do not matter.
    Latest,
    /// One after the other without a gap.
    Sequence {
        /// The first number; `None` takes whatever comes first.
        start: Option<i64>,
    },
}

/// What the guard says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Guard {
    /// Run it; when its effects commit, the mark moves to its position.
    Run,
    /// Newer news was applied already.
    Stale,
    /// A number before it has not been applied yet.
    Hold,
}

impl OrderPolicy {
    /// Decides about a job at `position`, where `mark` was the last one applied.
    pub fn decide(self, mark: Option<Position>, position: Position) -> Guard {
        match (self, mark) {
            (Self::Latest, Some(mark)) if position < mark => Guard::Stale,
            (Self::Latest, Some(_) | None) => Guard::Run,
            (Self::Sequence { .. }, Some(mark)) if position <= mark => Guard::Stale,
            (Self::Sequence { .. }, Some(Position(mark))) => {
                if mark.checked_add(1) == Some(position.0) { Guard::Run } else { Guard::Hold }
            }
            (Self::Sequence { start: None }, None) => Guard::Run,
            (Self::Sequence { start: Some(start) }, None) => match position.0.cmp(&start) {
                std::cmp::Ordering::Less => Guard::Stale,
                std::cmp::Ordering::Equal => Guard::Run,
                std::cmp::Ordering::Greater => Guard::Hold,
            },
        }
    }
}
