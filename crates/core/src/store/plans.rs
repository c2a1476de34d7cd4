//! Plans: what an operator repeats for many deliveries at once. A plan is a row of the store. It runs in
//! slices at a rate, shows its progress, can be cancelled, and continues after a restart.

use std::fmt;
use std::future::Future;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{Action, StoreError};
use crate::endpoint::EndpointId;

/// The plans of operators.
pub trait Plans: Send + Sync + 'static {
    /// How many deliveries a plan would change now. Never waits for a writer.
    fn count_plan(
        &self,
        work: DeliveryPlan,
    ) -> impl Future<Output = Result<PlanCount, StoreError>> + Send;

    /// Records a plan with its count and its instant, in one commit. It runs from then on.
    ///
    /// The instant is fixed: a delivery that dies, or a message that is published, after this commit is not
    /// part of the plan.
    fn create_plan(
        &self,
        plan: NewPlan,
        by: Action,
    ) -> impl Future<Output = Result<PlanCreated, StoreError>> + Send;

    /// Runs the next slice of the plan that has waited longest for one, at most `limit` deliveries. The slice
    /// and the progress are one commit, so that each delivery is taken once, whatever dies in between. Slices
    /// of one plan never run at the same time, on any node.
    fn run_plan(&self, limit: usize) -> impl Future<Output = Result<PlanRun, StoreError>> + Send;

    /// Ends a plan early. What it has done stays. A plan that has ended stays as it is. `None` where there is
    /// no such plan.
    fn cancel_plan(
        &self,
        id: PlanId,
        by: Action,
    ) -> impl Future<Output = Result<Option<Plan>, StoreError>> + Send;

    /// One plan.
    fn plan(&self, id: PlanId) -> impl Future<Output = Result<Option<Plan>, StoreError>> + Send;

    /// The newest plans, at most `limit`.
    fn plans(&self, limit: usize) -> impl Future<Output = Result<Vec<Plan>, StoreError>> + Send;
}

/// Our id of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PlanId(pub Uuid);

impl fmt::Display for PlanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Which deliveries of an endpoint a plan sends again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeliveryPlan {
    /// The endpoint.
    pub endpoint: EndpointId,
    /// Which of them.
    pub which: PlannedDeliveries,
    /// From this time on: when a dead delivery died, or when its message was published.
    pub since: Timestamp,
    /// Before this time, and in any case before the plan.
    pub until: Option<Timestamp>,
}

/// Which deliveries a plan takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PlannedDeliveries {
    /// Those that died in that time.
    Dead,
    /// Those whose messages were published in that time, the delivered ones included.
    All,
    /// Those that were never written: messages of the endpoint's tenant, published in that time, that the
    /// endpoint wants now and has no delivery of.
    Missing,
}

impl PlannedDeliveries {
    /// As text.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Dead => "dead",
            Self::All => "all",
            Self::Missing => "missing",
        }
    }

    /// From text.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Dead, Self::All, Self::Missing].into_iter().find(|one| one.as_str() == text)
    }
}

/// A plan to be recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewPlan {
    /// Its id, from the caller, so that a repeated request makes one plan.
    pub id: PlanId,
    /// What it does.
    pub work: DeliveryPlan,
    /// At most this many deliveries a second; `None` is as fast as the store allows.
    pub rate: Option<u32>,
}

/// How many deliveries a plan would change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlanCount {
    /// So many.
    Deliveries(u64),
    /// There is no such endpoint.
    UnknownEndpoint,
}

/// The answer to a new plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlanCreated {
    /// It is recorded, or was recorded before under the same id.
    Created(Box<Plan>),
    /// There is no such endpoint.
    UnknownEndpoint,
}

/// A plan with its progress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Its id.
    pub id: PlanId,
    /// What it does.
    pub work: DeliveryPlan,
    /// At most this many deliveries a second.
    pub rate: Option<u32>,
    /// How many deliveries it counted when it was recorded.
    pub total: u64,
    /// How many it has sent again.
    pub done: u64,
    /// How many needed nothing, because they were due or under way already.
    pub skipped: u64,
    /// Whether it runs.
    pub state: PlanState,
    /// Its instant.
    pub created_at: Timestamp,
    /// When it ended.
    pub ended_at: Option<Timestamp>,
    /// The operator.
    pub who: String,
    /// The operator's reason.
    pub reason: Option<String>,
}

/// Where a plan stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PlanState {
    /// It has more to do.
    Running,
    /// It has done everything.
    Done,
    /// An operator cancelled it, or its endpoint was deleted.
    Cancelled,
}

impl PlanState {
    /// As text.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Done => "done",
            Self::Cancelled => "cancelled",
        }
    }
}

/// The answer to a request for a slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlanRun {
    /// A slice of this plan ran, and there may be more that is due.
    Ran(PlanId),
    /// No plan is due before this.
    NotBefore(Timestamp),
    /// No plan runs.
    Idle,
}

/// How many slices a second a plan with a rate has: more would be commits for little, fewer would be bursts.
const SLICES_PER_SECOND: u32 = 4;

/// How many deliveries a slice of a plan takes, and how long after it the next slice is due.
pub fn plan_slice(rate: Option<u32>, limit: usize) -> (usize, std::time::Duration) {
    let limit = limit.max(1);
    let Some(rate) = rate.map(|rate| rate.max(1)) else {
        return (limit, std::time::Duration::ZERO);
    };
    let count = usize::try_from((rate / SLICES_PER_SECOND).max(1)).unwrap_or(limit).min(limit);
    let nanos = count as u64 * 1_000_000_000 / u64::from(rate);
    (count, std::time::Duration::from_nanos(nanos))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_keeps_its_rate_and_has_at_most_four_slices_a_second() {
        let check = |rate: Option<u32>, limit: usize, count: usize, millis: u64| {
            let (slice, wait) = plan_slice(rate, limit);
            assert_eq!((slice, wait.as_millis()), (count, u128::from(millis)), "{rate:?} {limit}");
        };
        check(None, 500, 500, 0);
        check(Some(100), 500, 25, 250);
        check(Some(1), 500, 1, 1_000);
        check(Some(4), 500, 1, 250);
        check(Some(1_000_000), 500, 500, 0);
        check(Some(0), 0, 1, 1_000);
    }
}
