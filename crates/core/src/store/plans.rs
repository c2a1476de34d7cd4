//! Plans: acts of an operator on many deliveries or events at once. A plan is a row of the store. A plan
//! runs in slices at a rate, shows its progress, can be cancelled, and continues after a restart.

use std::fmt;
use std::future::Future;

use bytes::Bytes;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{Action, EventFilter, EventId, Held, NewJob, Status, StoreError};
use crate::endpoint::EndpointId;
use crate::job::{HandlerName, Phase};
use crate::key::{KeyHash, SourceName, Tenant};

/// The plans of operators.
pub trait Plans: Send + Sync + 'static {
    /// The number of deliveries or events that a plan would take if it were recorded now. Never
    /// waits for a writer.
    fn count_plan(
        &self,
        work: PlanWork,
    ) -> impl Future<Output = Result<PlanCount, StoreError>> + Send;

    /// Records a plan with its count and its time, in one commit. The plan runs from then on.
    ///
    /// The plan takes only what existed at its time: no deliveries that die later, messages that are
    /// published later, events that arrive later, or jobs that end, die or go to review later.
    fn create_plan(
        &self,
        plan: NewPlan,
        by: Action,
    ) -> impl Future<Output = Result<PlanCreated, StoreError>> + Send;

    /// Runs one slice, of at most `limit` deliveries or events: the next slice of the plan that has been due
    /// longest. The slice and the progress are one commit, so that each delivery is taken once, even if a
    /// process dies in between. Slices of one plan never run at the same time, on any node. The plans in
    /// `except` are left to other nodes.
    ///
    /// A slice of events is only read: their jobs depend on the configuration, which the store does not know.
    /// [`Plans::take_slice`] commits it.
    fn run_plan(
        &self,
        limit: usize,
        except: Vec<PlanId>,
    ) -> impl Future<Output = Result<PlanRun, StoreError>> + Send;

    /// Applies the plan's act to the events of a slice, and moves the plan past them, in one
    /// commit. Each event is decided again in that commit: one that no longer needs anything is
    /// skipped. [`Held::Lost`] if another node took the slice, or the plan ended: then nothing has
    /// happened.
    fn take_slice(
        &self,
        slice: EventSlice,
    ) -> impl Future<Output = Result<Held, StoreError>> + Send;

    /// Ends a plan early. Changes that it has made stay. A plan that has ended stays as it is.
    /// `None` if there is no such plan.
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

/// The work of a plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlanWork {
    /// Sends deliveries.
    Deliveries(DeliveryPlan),
    /// Decides about events.
    Events(Box<EventPlan>),
}

impl From<DeliveryPlan> for PlanWork {
    fn from(plan: DeliveryPlan) -> Self {
        Self::Deliveries(plan)
    }
}

impl From<EventPlan> for PlanWork {
    fn from(plan: EventPlan) -> Self {
        Self::Events(Box::new(plan))
    }
}

/// A plan over events: an act, and the events that it applies to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventPlan {
    /// The act of the plan.
    pub act: EventAct,
    /// Only the jobs of this handler, if the act applies to jobs. `None`: all of them.
    pub handler: Option<HandlerName>,
    /// Which events the plan takes. Events that arrived after the plan are not taken. With the status `dead`
    /// the plan takes every event with a dead letter, whatever the status of its other jobs.
    pub filter: EventFilter,
}

impl EventPlan {
    /// A plan. Approving and rejecting apply to events in review, discarding to dead letters.
    pub fn new(act: EventAct, handler: Option<HandlerName>, filter: EventFilter) -> Self {
        let status = match act {
            EventAct::Replay { .. } => filter.status,
            EventAct::Approve | EventAct::Reject => Some(Status::Review),
            EventAct::Discard => Some(Status::Dead),
        };
        Self { act, handler, filter: EventFilter { status, ..filter } }
    }

    /// The jobs of its events that it may change, given the time of the plan. Only a plan that names a
    /// handler writes a job that an event never had.
    pub fn scope(&self, instant: Timestamp) -> JobScope {
        JobScope { ended_before: Some(instant), adds_jobs: self.handler.is_some() }
    }

    /// The end of the time in which its events arrived: never after the plan was made.
    pub fn until(&self, instant: Timestamp) -> Timestamp {
        self.filter.until.map_or(instant, |until| until.min(instant))
    }
}

/// Which jobs of an event an act of an operator may change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobScope {
    /// A job that ended, died or went to review at this time or later stays as it is.
    pub ended_before: Option<Timestamp>,
    /// Whether a replay writes a job for a handler that has none.
    pub adds_jobs: bool,
}

impl JobScope {
    /// All jobs, and those that are missing: the scope of an act on one event.
    pub const ALL: Self = Self { ended_before: None, adds_jobs: true };

    /// Whether a job that has been in its state since `since` may be changed.
    pub fn holds(&self, phase: Phase, since: Timestamp) -> bool {
        let has_ended = phase.is_over() || matches!(phase, Phase::Dead | Phase::Review);
        !has_ended || self.ended_before.is_none_or(|instant| since < instant)
    }
}

/// The act of a plan on each of its events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EventAct {
    /// Runs its jobs again, as [`Operate::replay`](super::Operate::replay), within [`EventPlan::scope`].
    Replay {
        /// Whether jobs that are done, stale or discarded run again too.
        force: bool,
    },
    /// Approves an event in review.
    Approve,
    /// Rejects an event in review.
    Reject,
    /// Discards its dead letters.
    Discard,
}

impl EventAct {
    /// As text.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Replay { .. } => "replay",
            Self::Approve => "approve",
            Self::Reject => "reject",
            Self::Discard => "discard",
        }
    }

    /// Whether it writes jobs, which the configuration decides by the event's body.
    pub fn writes_jobs(self) -> bool {
        match self {
            Self::Replay { .. } | Self::Approve => true,
            Self::Reject | Self::Discard => false,
        }
    }
}

/// A slice of a plan over events, read and not yet taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventSlice {
    /// The plan.
    pub plan: PlanId,
    /// The work of the plan.
    pub work: EventPlan,
    /// The events, oldest first. There may be none: then the plan only advances.
    pub events: Vec<PlannedEvent>,
    /// The range of events that the slice covers.
    pub span: SliceSpan,
}

/// One event of a slice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedEvent {
    /// Our id.
    pub id: EventId,
    /// The tenant.
    pub tenant: Tenant,
    /// The source.
    pub source: SourceName,
    /// The type.
    pub event_type: Option<String>,
    /// The event's bytes, if the plan [writes jobs](EventAct::writes_jobs).
    pub body: Bytes,
    /// Its jobs by the current configuration. The store leaves the jobs empty; the caller fills them in.
    pub jobs: Vec<NewJob>,
}

/// The part of all events that a slice covers. Only the store knows what the numbers mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SliceSpan {
    /// The number before the first of the slice. This number is the plan's fence: a slice that does
    /// not begin at the plan's position is not taken.
    pub after: u128,
    /// The last number of the slice.
    pub through: u128,
    /// Whether the plan ends with this slice.
    pub is_last: bool,
}

/// Which deliveries of an endpoint a plan sends again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeliveryPlan {
    /// The endpoint.
    pub endpoint: EndpointId,
    /// The kind of deliveries that it takes.
    pub which: PlannedDeliveries,
    /// From this time on: when a dead delivery died, or when its message was published.
    pub since: Timestamp,
    /// Before this time. The plan's own time is always an upper bound.
    pub until: Option<Timestamp>,
}

/// The kinds of deliveries that a plan can take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PlannedDeliveries {
    /// Deliveries that died in that time.
    Dead,
    /// Deliveries whose messages were published in that time, the delivered ones included.
    All,
    /// Deliveries that were never written, for messages of the endpoint's tenant that were
    /// published in that time and that the endpoint wants now.
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
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewPlan {
    /// Its id, from the caller, so that a repeated request makes one plan.
    pub id: PlanId,
    /// The work of the plan.
    pub work: PlanWork,
    /// At most this many deliveries or events a second; `None` is as fast as the store allows.
    pub rate: Option<u32>,
    /// A hash of the request as the client sent it. A repeated request is recognised by this hash and
    /// not by `work`: a relative time in the request gives other times in `work`.
    pub request: KeyHash,
    /// Whether the plan is recorded only if no other plan for deliveries of its endpoint runs. If several
    /// such plans are requested at once, on any nodes, only one of them is recorded.
    pub alone: bool,
}

/// The number of deliveries or events that a plan would take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlanCount {
    /// The number.
    Counted(u64),
    /// There is no such endpoint.
    UnknownEndpoint,
}

/// The answer to a new plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlanCreated {
    /// The plan is recorded, or was recorded before by the same request under the same id.
    Created(Box<Plan>),
    /// The id is that of a plan that another request has made.
    OtherRequest,
    /// There is no such endpoint.
    UnknownEndpoint,
    /// The plan was to run [alone](NewPlan::alone), and another plan for deliveries of its endpoint
    /// is running.
    EndpointBusy,
}

/// A plan with its progress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Its id.
    pub id: PlanId,
    /// The work of the plan.
    pub work: PlanWork,
    /// At most this many deliveries or events a second.
    pub rate: Option<u32>,
    /// How many deliveries or events it counted when it was recorded.
    pub total: u64,
    /// The number of items that the plan has changed: sent again, or decided.
    pub done: u64,
    /// How many needed nothing: they were due or under way already, or decided otherwise.
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
    /// The plan has more to do.
    Running,
    /// The plan has done everything.
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
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlanRun {
    /// A slice of this plan ran, and there may be more that is due.
    Ran(PlanId),
    /// A slice of this plan over events is due: see [`Plans::take_slice`].
    Events(Box<EventSlice>),
    /// Another node is working on a slice of this plan.
    Taken(PlanId),
    /// The slice of this plan failed, or the plan cannot be read, for this reason. Other plans may be due.
    Failed(PlanId, String),
    /// No plan is due before this.
    NotBefore(Timestamp),
    /// No plan runs.
    Idle,
}

/// How many slices a plan with a rate runs each second. With more slices, each commit would do
/// little; with fewer, deliveries would be sent in bursts.
const SLICES_PER_SECOND: u32 = 4;

/// How many deliveries or events a slice of a plan takes, and how long after it the next slice is due.
pub fn plan_slice(rate: Option<u32>, limit: usize) -> (usize, std::time::Duration) {
    let limit = limit.max(1);
    let Some(rate) = rate.map(|rate| rate.max(1)) else {
        return (limit, std::time::Duration::ZERO);
    };
    let count = usize::try_from((rate / SLICES_PER_SECOND).max(1)).unwrap_or(limit).min(limit);
    (count, slice_wait(Some(rate), count))
}

/// How long after a slice with this many deliveries or events the next slice is due.
pub fn slice_wait(rate: Option<u32>, taken: usize) -> std::time::Duration {
    let Some(rate) = rate else { return std::time::Duration::ZERO };
    let nanos = (taken as u64).saturating_mul(1_000_000_000) / u64::from(rate.max(1));
    std::time::Duration::from_nanos(nanos)
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
