//! Plans: many deliveries of an endpoint sent again, at a rate.

use hapax_core::Timestamp;
use hapax_core::endpoint::EndpointId;
use hapax_core::store::{self, PlanId, PlanState, PlannedDeliveries};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Moment;
use super::values::{PlanStateWord, PlannedDeliveriesWord};

/// The body of `POST /api/v1/endpoints/{id}/replay`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct PlanRequest {
    /// `dead`: what died in that time. `all`: everything that was published in that time, what was delivered
    /// included. `missing`: what was published in that time and the endpoint never got.
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

/// The answer to `POST /api/v1/endpoints/{id}/replay`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Planned {
    /// The id of the plan; null for a dry run.
    #[schema(value_type = Option<Uuid>, required)]
    pub(crate) id: Option<PlanId>,
    /// How many deliveries it is about.
    pub(crate) count: u64,
}

/// A plan with its progress.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Plan {
    #[schema(value_type = Uuid)]
    pub(crate) id: PlanId,
    #[schema(value_type = Uuid)]
    pub(crate) endpoint: EndpointId,
    #[schema(value_type = PlannedDeliveriesWord)]
    pub(crate) status: PlannedDeliveries,
    pub(crate) since: Timestamp,
    #[schema(required)]
    pub(crate) until: Option<Timestamp>,
    /// At most this many deliveries a second.
    #[schema(required)]
    pub(crate) rate: Option<u32>,
    /// How many deliveries it counted when it was recorded.
    pub(crate) total: u64,
    /// How many it has sent again, or for the first time.
    pub(crate) done: u64,
    /// How many needed nothing, because they were due or under way already.
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

impl From<store::Plan> for Plan {
    fn from(plan: store::Plan) -> Self {
        Self {
            id: plan.id,
            endpoint: plan.work.endpoint,
            status: plan.work.which,
            since: plan.work.since,
            until: plan.work.until,
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
