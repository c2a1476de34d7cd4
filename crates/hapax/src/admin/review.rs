//! Decisions of operators about events in review and dead letters. Repeating a decision changes nothing;
//! contradicting one is a conflict.

use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};
use hapax_core::job::Phase;
use hapax_core::store::{EventDetail, Inspect, JobDetail, Reviewed, Status};

use super::auth::Caller;
use super::extract::{self, JsonBody, PathId};
use super::problem::Problem;
use super::replay::jobs_for_event;
use super::{Admin, AdminStore};
use super::{events, jobs};
use crate::api::{DecideRequest, Decided};

/// A decision about an event in review.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReviewDecision {
    Approve,
    Reject,
}

/// `POST /api/v1/events/{id}/approve`.
pub(super) async fn approve<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    PathId(name): PathId,
    JsonBody(body): JsonBody<DecideRequest>,
) -> Result<Json<Decided>, Problem> {
    let reason = extract::reason(body.reason)?;
    decide(ReviewDecision::Approve, &admin, &caller, &name, reason).await
}

/// `POST /api/v1/events/{id}/reject`.
pub(super) async fn reject<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    PathId(name): PathId,
    JsonBody(body): JsonBody<DecideRequest>,
) -> Result<Json<Decided>, Problem> {
    let reason = extract::reason(body.reason)?;
    if reason.is_none() {
        return Err(Problem::bad_request("reason is needed: it is recorded with the rejection"));
    }
    decide(ReviewDecision::Reject, &admin, &caller, &name, reason).await
}

async fn decide<S: AdminStore>(
    decision: ReviewDecision,
    admin: &Admin<S>,
    caller: &Caller,
    name: &str,
    reason: Option<String>,
) -> Result<Json<Decided>, Problem> {
    let event = events::find(&*admin.store, name).await?;
    let (id, who) = (event.summary.id, caller.who());
    let by = caller.action(reason, (admin.now)());
    let reviewed = match decision {
        ReviewDecision::Approve => {
            // Without its handlers the event would be approved and never run.
            let jobs = jobs_for_event(admin, &event).ok_or_else(|| {
                let source = &event.summary.source;
                Problem::conflict(&format!("no source \"{source}\" is configured on this server"))
            })?;
            admin.store.approve(id, jobs, by).await?
        }
        ReviewDecision::Reject => admin.store.reject(id, by).await?,
    };
    match (decision, reviewed) {
        (_, Reviewed::Decided) => {
            let done = match decision {
                ReviewDecision::Approve => "approved",
                ReviewDecision::Reject => "rejected",
            };
            tracing::info!(event.id = %id, token = who, "{who} {done} {id}");
            decided(admin, event).await
        }
        (_, Reviewed::Unknown) => Err(Problem::not_found("no event has that id")),
        (ReviewDecision::Approve, Reviewed::NotWaiting(Status::Discarded)) => {
            Err(Problem::conflict("the event was rejected before"))
        }
        // An on-time copy or another operator released the event first: its jobs run, as requested.
        (ReviewDecision::Approve, Reviewed::NotWaiting(status)) if was_in_review(&event) => {
            Ok(unchanged(event, status))
        }
        (ReviewDecision::Approve, Reviewed::NotWaiting(status)) => Err(Problem::conflict(
            &format!("the event never waited for review: its status is {}", status.as_str()),
        )),
        (ReviewDecision::Reject, Reviewed::NotWaiting(Status::Discarded)) => {
            Ok(unchanged(event, Status::Discarded))
        }
        (ReviewDecision::Reject, Reviewed::NotWaiting(status)) => Err(Problem::conflict(&format!(
            "the event does not wait for review: its status is {}",
            status.as_str()
        ))),
    }
}

/// `POST /api/v1/events/{id}/discard`: all dead letters of the event.
pub(super) async fn discard_of_event<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    PathId(name): PathId,
    JsonBody(body): JsonBody<DecideRequest>,
) -> Result<Json<Decided>, Problem> {
    let reason = extract::reason(body.reason)?;
    let event = events::find(&*admin.store, &name).await?;
    discard(&admin, &caller, event, None, reason).await
}

/// `POST /api/v1/jobs/{id}/discard`: one dead letter.
pub(super) async fn discard_of_job<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    PathId(id): PathId,
    JsonBody(body): JsonBody<DecideRequest>,
) -> Result<Json<Decided>, Problem> {
    let reason = extract::reason(body.reason)?;
    let job = jobs::find(&*admin.store, &id).await?;
    let event = events::find(&*admin.store, &job.event.to_string()).await?;
    discard(&admin, &caller, event, Some(job), reason).await
}

async fn discard<S: AdminStore>(
    admin: &Admin<S>,
    caller: &Caller,
    event: EventDetail,
    only: Option<JobDetail>,
    reason: Option<String>,
) -> Result<Json<Decided>, Problem> {
    let by = caller.action(reason, (admin.now)());
    let (id, who) = (event.summary.id, caller.who());
    let handler = only.as_ref().map(|job| job.handler.clone());
    match admin.store.discard(id, handler, by).await? {
        Reviewed::Decided => {
            tracing::info!(event.id = %id, token = who, "{who} discarded dead letters of {id}");
            decided(admin, event).await
        }
        Reviewed::NotWaiting(status) => {
            let phase = only.map(|job| job.phase);
            if phase == Some(Phase::Discarded) || (phase.is_none() && status == Status::Discarded) {
                return Ok(unchanged(event, status));
            }
            let is = match phase {
                Some(phase) => phase.as_str(),
                None => status.as_str(),
            };
            Err(Problem::conflict(&format!(
                "there is no dead letter to discard: the status is {is}"
            )))
        }
        Reviewed::Unknown => Err(Problem::not_found("no event has that id")),
    }
}

fn unchanged(event: EventDetail, status: Status) -> Json<Decided> {
    let summary = event.summary;
    Json(Decided { id: summary.id, event_id: summary.event_id, status, changed: false })
}

fn was_in_review(event: &EventDetail) -> bool {
    event.summary.review.is_some() || event.actions.iter().any(|done| done.action == "approve")
}

/// Reads the status of the event after the decision was committed.
async fn decided<S: Inspect>(
    admin: &Admin<S>,
    event: EventDetail,
) -> Result<Json<Decided>, Problem> {
    let after = events::find(&*admin.store, &event.summary.id.to_string()).await?.summary;
    let Json(result) = unchanged(event, after.status);
    Ok(Json(Decided { changed: true, ..result }))
}
