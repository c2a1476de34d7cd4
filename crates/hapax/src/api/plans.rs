//! Plans, which send many deliveries of an endpoint again, or decide about many events, at a rate.

use hapax_core::Timestamp;
use hapax_core::endpoint::EndpointId;
use hapax_core::store::{
    self, DeliveryPlan, EventAct, EventPlan, PlanId, PlanState, PlanWork, PlannedDeliveries, Status,
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::values::{PlanStateWord, PlannedDeliveriesWord, StatusWord};
use super::{Moment, Span};

/// The body of `POST /api/v1/endpoints/{id}/replay`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct PlanRequest {
    /// `dead`: deliveries that became dead in that time. `all`: every delivery of messages that were published in
    /// that time, including those that were delivered. `missing`: messages that were published in that
    /// time and that the endpoint never got.
    #[schema(value_type = PlannedDeliveriesWord)]
    pub(crate) status: PlannedDeliveries,
    /// From this time on: RFC 3339, or a duration before now such as `1h`.
    #[schema(value_type = String)]
    pub(crate) since: Moment,
    /// Before this time; never after the request itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub(crate) until: Option<Moment>,
    /// At most this many deliveries a second; as fast as possible if it is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 100000)]
    pub(crate) rate: Option<u32>,
    /// Only count.
    #[serde(default)]
    pub(crate) dry_run: bool,
    /// Recorded with each delivery.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
}

/// The body of `POST /api/v1/events/replay`, `approve`, `reject` and `discard`: which events, as the query of
/// `GET /api/v1/events` names them.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct EventPlanRequest {
    /// Only events of this tenant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tenant: Option<String>,
    /// Only events of this source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) source: Option<String>,
    /// Only events of exactly this type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) r#type: Option<String>,
    /// Only events in this status. `dead` takes every event with a dead letter. `approve` and `reject`
    /// apply to events in review, `discard` to dead letters; they accept no other status.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<StatusWord>)]
    pub(crate) status: Option<Status>,
    /// Only events that this text finds: as one of their ids, as a value that their source names in `search`,
    /// or as part of the sender's id or the body.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) q: Option<String>,
    /// Only events received at or after this time: RFC 3339, or a duration before now such as `1h`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub(crate) since: Option<Moment>,
    /// Only events received before this time; never after the request itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub(crate) until: Option<Moment>,
    /// Only unfinished events that were received at least this long ago.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) unfinished_for: Option<Span>,
    /// `replay` and `discard`: only the jobs of this handler.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) handler: Option<String>,
    /// Every event, if no filter is given.
    #[serde(default)]
    pub(crate) all: bool,
    /// `replay`: also run jobs that are done, under a new run number. Needs `since`.
    #[serde(default)]
    pub(crate) force: bool,
    /// At most this many events a second; as fast as possible if it is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 100000)]
    pub(crate) rate: Option<u32>,
    /// Only count.
    #[serde(default)]
    pub(crate) dry_run: bool,
    /// Recorded with each event; `reject` needs one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
}

impl EventPlanRequest {
    /// Whether the request selects events, by a filter or by `all`.
    pub(crate) fn has_filter(&self) -> bool {
        let texts = [&self.tenant, &self.source, &self.r#type, &self.q, &self.handler];
        texts.into_iter().any(Option::is_some)
            || self.status.is_some()
            || self.since.is_some()
            || self.until.is_some()
            || self.unfinished_for.is_some()
    }
}

/// The answer to a request that makes a plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Planned {
    /// The id of the plan; null for a dry run.
    #[schema(value_type = Option<Uuid>, required)]
    pub(crate) id: Option<PlanId>,
    /// The number of deliveries or events in the plan.
    pub(crate) count: u64,
}

/// A plan with its progress. Its other fields are those of the request that created it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Plan {
    #[schema(value_type = Uuid)]
    pub(crate) id: PlanId,
    #[serde(flatten)]
    pub(crate) work: PlannedWork,
    /// At most this many deliveries or events a second.
    #[schema(required)]
    pub(crate) rate: Option<u32>,
    /// The number of deliveries or events when the plan was recorded.
    pub(crate) total: u64,
    /// The number of deliveries or events that were changed: sent again or for the first time, or decided.
    pub(crate) done: u64,
    /// The number that was skipped, because they were already due, under way or done, or decided otherwise.
    pub(crate) skipped: u64,
    #[schema(value_type = PlanStateWord)]
    pub(crate) state: PlanState,
    pub(crate) created_at: Timestamp,
    #[schema(required)]
    pub(crate) ended_at: Option<Timestamp>,
    /// The name of the token, or `loopback`.
    pub(crate) who: String,
    #[schema(required)]
    pub(crate) reason: Option<String>,
}

/// The action of a plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "of", rename_all = "lowercase")]
pub(crate) enum PlannedWork {
    /// Sends deliveries of an endpoint.
    Deliveries {
        #[schema(value_type = Uuid)]
        endpoint: EndpointId,
        #[schema(value_type = PlannedDeliveriesWord)]
        status: PlannedDeliveries,
        since: Timestamp,
        #[schema(required)]
        until: Option<Timestamp>,
    },
    /// Decides about events.
    Events {
        /// `replay`, `approve`, `reject` or `discard`.
        action: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        tenant: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        source: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        handler: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        r#type: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        #[schema(value_type = Option<StatusWord>)]
        status: Option<Status>,
        #[serde(skip_serializing_if = "Option::is_none")]
        q: Option<String>,
        #[schema(required)]
        since: Option<Timestamp>,
        #[schema(required)]
        until: Option<Timestamp>,
        /// Only events that were received before this and are not finished.
        #[serde(skip_serializing_if = "Option::is_none")]
        unfinished_since: Option<Timestamp>,
        /// Whether jobs that are done run again too.
        #[serde(default)]
        force: bool,
    },
}

impl From<PlanWork> for PlannedWork {
    fn from(work: PlanWork) -> Self {
        match work {
            PlanWork::Deliveries(DeliveryPlan { endpoint, which, since, until }) => {
                Self::Deliveries { endpoint, status: which, since, until }
            }
            PlanWork::Events(work) => {
                let EventPlan { act, handler, filter } = *work;
                Self::Events {
                    action: act.as_str().to_owned(),
                    tenant: filter.tenant.map(|tenant| tenant.to_string()),
                    source: filter.source.map(|source| source.to_string()),
                    handler: handler.map(|handler| handler.to_string()),
                    r#type: filter.event_type,
                    status: filter.status,
                    q: filter.text.map(|search| search.text),
                    since: filter.since,
                    until: filter.until,
                    unfinished_since: filter.unfinished_since,
                    force: matches!(act, EventAct::Replay { force: true }),
                }
            }
        }
    }
}

impl From<store::Plan> for Plan {
    fn from(plan: store::Plan) -> Self {
        Self {
            id: plan.id,
            work: plan.work.into(),
            rate: plan.rate,
            total: plan.total,
            done: plan.done,
            skipped: plan.skipped,
            state: plan.state,
            created_at: plan.created_at,
            ended_at: plan.ended_at,
            who: plan.who,
            reason: plan.reason,
        }
    }
}
