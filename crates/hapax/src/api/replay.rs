//! Replays, and the decisions of operators about events and dead letters.

use hapax_core::job::{HandlerName, JobId, Phase};
use hapax_core::store::{EventId, Status};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::values::{PhaseWord, StatusWord};

/// The body of `POST /api/v1/events/{id}/replay`.
#[derive(Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReplayEventRequest {
    /// Only report what would happen.
    #[serde(default)]
    pub(crate) dry_run: bool,
    /// Replay only the job of this handler.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) handler: Option<String>,
    /// Also run jobs that are done, under a new run number.
    #[serde(default)]
    pub(crate) force: bool,
    /// Recorded with the action.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
}

/// The body of `POST /api/v1/jobs/{id}/replay`.
#[derive(Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReplayJobRequest {
    /// Only report what would happen.
    #[serde(default)]
    pub(crate) dry_run: bool,
    /// Also run a job that is done, under a new run number.
    #[serde(default)]
    pub(crate) force: bool,
    /// Recorded with the action.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
}

/// The body of `POST /api/v1/jobs/replay`: which dead letters to replay.
#[derive(Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReplayJobsRequest {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) source: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) handler: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tenant: Option<String>,
    /// `dead` or absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<PhaseWord>)]
    pub(crate) status: Option<Phase>,
    /// `next` of the previous page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cursor: Option<String>,
    /// The most dead letters of one page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 500, default = 50)]
    pub(crate) limit: Option<usize>,
    /// Only report what would happen.
    #[serde(default)]
    pub(crate) dry_run: bool,
    /// Recorded with the actions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
}

/// The effects of a replay, job by job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Replayed {
    pub(crate) dry_run: bool,
    pub(crate) items: Vec<ReplayItem>,
    /// The cursor of the next page; null on the last one.
    #[schema(required)]
    pub(crate) next: Option<String>,
}

/// The effect of a replay on one job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct ReplayItem {
    /// Absent if the handler had no job for the event before.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Uuid>)]
    pub(crate) job: Option<JobId>,
    #[schema(value_type = Uuid)]
    pub(crate) event: EventId,
    pub(crate) event_id: String,
    #[schema(value_type = String)]
    pub(crate) handler: HandlerName,
    pub(crate) effect: ReplayEffect,
    /// With `no_handler` and `no_order`: what is wrong, and what to change.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) detail: Option<String>,
}

/// The effect of a replay on one job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ReplayEffect {
    /// A dry run: the job would run.
    WouldRun,
    /// The job is due now.
    Runs,
    /// The job is done: nothing happens.
    AlreadyApplied,
    /// A newer version was applied: nothing happens.
    Stale,
    /// The job is due or running already.
    AlreadyOpen,
    /// The job was rejected or discarded: nothing happens without `force`.
    Discarded,
    /// No configured handler takes the event: nothing happens.
    NoHandler,
    /// The handler keeps order, and the event's position cannot be read: nothing happens.
    NoOrder,
}

/// The body of `approve`, `reject` and `discard`.
#[derive(Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct DecideRequest {
    /// Recorded with the action; `reject` needs one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
}

/// The event after a decision.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Decided {
    #[schema(value_type = Uuid)]
    pub(crate) id: EventId,
    pub(crate) event_id: String,
    #[schema(value_type = StatusWord)]
    pub(crate) status: Status,
    /// False if the same decision was made before.
    pub(crate) changed: bool,
}
