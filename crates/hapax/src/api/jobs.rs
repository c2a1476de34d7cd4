//! Jobs with their attempts, the configured handlers, and their backlog.

use hapax_core::Timestamp;
use hapax_core::job::{Fence, HandlerName, JobId, Phase};
use hapax_core::store::{AttemptNote, EventId, JobDetail, PausedHandler};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::values::PhaseWord;

/// The query of `GET /api/v1/jobs`.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct JobsQuery {
    /// Only jobs of this tenant.
    pub(crate) tenant: Option<String>,
    /// Only jobs of this source.
    pub(crate) source: Option<String>,
    /// Only jobs of this handler.
    pub(crate) handler: Option<String>,
    /// Only jobs in this phase: `dead` for dead letters.
    #[param(value_type = Option<PhaseWord>)]
    pub(crate) status: Option<Phase>,
    /// Only jobs whose last attempt ended with exactly this error.
    pub(crate) error: Option<String>,
    /// Only jobs in a run that an operator forced.
    #[serde(default)]
    pub(crate) forced: bool,
    /// `next` of the previous page.
    pub(crate) cursor: Option<String>,
    /// The most jobs of one page.
    #[param(minimum = 1, maximum = 500, default = 50)]
    pub(crate) limit: Option<usize>,
}

/// A job with its attempts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Job {
    #[schema(value_type = Uuid)]
    pub(crate) id: JobId,
    /// Hapax's id of its event.
    #[schema(value_type = Uuid)]
    pub(crate) event: EventId,
    /// The sender's id of its event.
    pub(crate) event_id: String,
    pub(crate) tenant: String,
    pub(crate) source: String,
    #[schema(value_type = String)]
    pub(crate) handler: HandlerName,
    #[schema(value_type = PhaseWord)]
    pub(crate) status: Phase,
    /// The number of its run: a forced replay starts the next one.
    pub(crate) run: u32,
    /// Attempts of this run.
    pub(crate) attempt: u32,
    /// Steps of the retry schedule that are used.
    pub(crate) steps: u32,
    /// Attempts that ended without a verdict.
    pub(crate) lost: u32,
    #[schema(value_type = i64)]
    pub(crate) fence: Fence,
    /// When it is due, or when its lease ends.
    #[schema(required)]
    pub(crate) due_at: Option<Timestamp>,
    #[schema(required)]
    pub(crate) result: Option<String>,
    /// Why the last attempt failed.
    #[schema(required)]
    pub(crate) error: Option<String>,
    /// When it ended.
    #[schema(required)]
    pub(crate) finished_at: Option<Timestamp>,
    /// The `idempotency-key` that handlers and apps get.
    pub(crate) idempotency_key: String,
    /// The resource that it is ordered by.
    #[schema(required)]
    pub(crate) resource: Option<String>,
    /// Attempts that ended, oldest first.
    pub(crate) attempts: Vec<Attempt>,
    /// With an event: the pause of its handler, which keeps the job from being claimed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) handler_paused_at: Option<Timestamp>,
}

impl From<JobDetail> for Job {
    fn from(job: JobDetail) -> Self {
        Self {
            id: job.id,
            event: job.event,
            event_id: job.event_id,
            tenant: job.tenant,
            source: job.source,
            handler: job.handler,
            status: job.phase,
            run: job.run,
            attempt: job.progress.attempt,
            steps: job.progress.steps,
            lost: job.progress.lost,
            fence: job.fence,
            due_at: job.due_at,
            result: job.result,
            error: job.error,
            finished_at: job.finished_at,
            idempotency_key: job.idempotency_key,
            resource: job.resource,
            attempts: job.attempts.into_iter().map(Attempt::from).collect(),
            handler_paused_at: None,
        }
    }
}

/// An attempt that ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Attempt {
    /// The number of the run.
    pub(crate) run: u32,
    /// The number of the attempt.
    pub(crate) attempt: u32,
    pub(crate) started_at: Timestamp,
    /// When it ended; null for a lost attempt whose end is not known.
    #[schema(required)]
    pub(crate) ended_at: Option<Timestamp>,
    /// `done`, `failed` or `lost`.
    pub(crate) outcome: String,
    /// Why it failed.
    #[schema(required)]
    pub(crate) error: Option<String>,
    /// The worker that ran it.
    pub(crate) worker: String,
    /// The HTTP status of the app, if an app answered.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) status: Option<u16>,
    /// The beginning of that answer, at most 1 KiB; absent if it was empty.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) answer: Option<String>,
}

impl From<AttemptNote> for Attempt {
    fn from(note: AttemptNote) -> Self {
        let (status, answer) = match note.answer {
            Some(answer) => (Some(answer.status), Some(answer.body)),
            None => (None, None),
        };
        Self {
            run: note.run,
            attempt: note.attempt,
            started_at: note.started_at,
            ended_at: note.ended_at,
            outcome: note.outcome,
            error: note.error,
            worker: note.worker,
            status,
            answer: answer.filter(|answer| !answer.is_empty()),
        }
    }
}

/// A configured handler.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Handler {
    pub(crate) source: String,
    #[schema(value_type = String)]
    pub(crate) handler: HandlerName,
    /// Whether workers outside claim its jobs.
    pub(crate) pull: bool,
    /// How many attempts its retry schedule has.
    pub(crate) attempts_max: usize,
    pub(crate) lease_seconds: f64,
    /// Set while it is paused: its jobs are not claimed.
    #[serde(default)]
    #[schema(required)]
    pub(crate) paused: Option<Pause>,
}

/// The pause of a handler.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Pause {
    pub(crate) since: Timestamp,
    /// The name of the token, or `loopback`.
    pub(crate) who: String,
    #[schema(required)]
    pub(crate) reason: Option<String>,
}

impl From<PausedHandler> for Pause {
    fn from(paused: PausedHandler) -> Self {
        Self { since: paused.since, who: paused.who, reason: paused.reason }
    }
}

/// A handler after it was paused or resumed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct HandlerPause {
    pub(crate) source: String,
    #[schema(value_type = String)]
    pub(crate) handler: HandlerName,
    /// Null if it is not paused.
    #[schema(required)]
    pub(crate) paused: Option<Pause>,
    /// False if nothing changed.
    #[serde(default)]
    pub(crate) changed: bool,
}

impl From<PausedHandler> for HandlerPause {
    fn from(paused: PausedHandler) -> Self {
        Self {
            source: paused.handler.source.to_string(),
            handler: paused.handler.handler.clone(),
            paused: Some(paused.into()),
            changed: false,
        }
    }
}

/// The backlog of one handler. Counts stop at 10,000, which means "this many or more".
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Lane {
    pub(crate) source: String,
    #[schema(value_type = String)]
    pub(crate) handler: HandlerName,
    /// Whether such a handler is configured; without one its jobs are never claimed.
    pub(crate) configured: bool,
    /// Set while it is paused: its jobs are not claimed.
    #[serde(default)]
    #[schema(required)]
    pub(crate) paused: Option<Pause>,
    /// The earliest time at which a ready job is due or a lease ends.
    #[schema(required)]
    pub(crate) oldest_due: Option<Timestamp>,
    /// Jobs that can be claimed, now or when they are due.
    pub(crate) ready: u64,
    /// Jobs that are claimed.
    pub(crate) leased: u64,
    /// Jobs that wait for an earlier version of their resource.
    pub(crate) held: u64,
    /// Jobs that wait while another job of their resource runs.
    pub(crate) parked: u64,
    /// Jobs in review.
    pub(crate) review: u64,
    /// Dead letters.
    pub(crate) dead: u64,
}
