//! Pull workers: claim, renew, complete, fail. A worker in any language leases jobs here and settles them
//! with their fence. A lost fence is answered 409 and changes nothing.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::{Extension, Json};
use hapax_core::job::{Fence, HandlerName, JobId, Phase, Retry, WorkLocation};
use hapax_core::store::{
    AttemptNote, ClaimAsk, HandlerRef, HandlerSpec, Held, Inspect, JobDetail, NewMessage, Outcome,
    Settlement, Store, StoreError, TriedJob, TriedVerdict, Work,
};
use hapax_core::{SourceName, Timestamp};
use hapax_engine::{NotReady, Pulled};
use metrics::{counter, histogram};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::auth::Caller;
use super::extract::{JsonBody, PathId};
use super::jobs;
use super::problem::Problem;
use super::{Admin, AdminStore};
use crate::api::{
    self, ClaimRequest, Claimed, CompleteRequest, FailRequest, RenewRequest, RetryIn, Settled, Span,
};

/// The most jobs of one claim: a worker must be able to start all of them within the lease.
const CLAIM_MAX: usize = 100;

/// The longest wait of a claim: shorter than the timeouts of proxies.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// How often a waiting claim polls: notifications of the store may be missed.
const POLL: Duration = Duration::from_millis(500);

/// The shortest time between two polls: many notifications may be for other handlers.
const PAUSE: Duration = Duration::from_millis(20);

/// The longest stored error of an attempt, in characters.
const ERROR_MAX: usize = 2_000;

/// The most messages that one job may publish.
const PUBLISH_MAX: usize = 100;

pub(super) async fn claim<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    JsonBody(asked): JsonBody<ClaimRequest>,
) -> Result<Json<Claimed>, Problem> {
    let handler = HandlerRef {
        source: SourceName::new(&asked.source),
        handler: HandlerName::new(&asked.handler),
    };
    caller.may_claim(&handler)?;
    pull_handler(&admin, &handler)?;
    let limit = asked.limit.unwrap_or(1);
    if !(1..=CLAIM_MAX).contains(&limit) {
        return Err(Problem::bad_request("limit must be a number from 1 to 100"));
    }
    let wait = asked.wait.map_or(Duration::ZERO, |Span(wait)| wait);
    if wait > WAIT_MAX {
        return Err(Problem::bad_request("wait must be at most 60s"));
    }
    let worker = match asked.worker {
        Some(worker) => format!("{}/{}", caller.who(), truncated(&worker, 100)),
        None => caller.who().to_owned(),
    };
    let ask = ClaimAsk { handler, limit, worker: worker.into() };
    let claims = claim_within(&admin, ask, wait).await?;
    Ok(Json(Claimed { items: claims.into_iter().map(api::Claim::from).collect() }))
}

/// Claims due jobs; waits for them up to `wait`.
async fn claim_within<S: Store + Work>(
    admin: &Admin<S>,
    ask: ClaimAsk,
    wait: Duration,
) -> Result<Vec<Pulled>, StoreError> {
    let until = Instant::now() + wait;
    let handler = ask.handler.clone();
    loop {
        // During the shutdown no job is claimed, because its result could not be accepted.
        if let Err(NotReady::Draining) = admin.readiness.judge(&*admin.store) {
            return Ok(Vec::new());
        }
        let asked_at = Instant::now();
        // The hint is requested before the claim, so that a job which arrives meanwhile ends the
        // wait. The expected due time may be too early, so it does not shorten the poll.
        let poll = POLL.min(until.saturating_duration_since(asked_at));
        let hint = admin.store.wait(&handler, poll..=poll);
        let claims = claim_or_give_back(admin, ask.clone()).await?;
        if !claims.is_empty() || Instant::now() >= until {
            return Ok(claims);
        }
        hint.await;
        tokio::time::sleep_until(until.min(asked_at + PAUSE)).await;
    }
}

/// Claims on a separate task, and gives the claims back if the worker disconnects meanwhile. Otherwise a
/// disconnect during the commit would cost the jobs a lost attempt.
async fn claim_or_give_back<S: Store + Work>(
    admin: &Admin<S>,
    ask: ClaimAsk,
) -> Result<Vec<Pulled>, StoreError> {
    let (sender, receiver) = oneshot::channel();
    let (store, refetch) = (Arc::clone(&admin.store), Arc::clone(&admin.refetch));
    admin.unfinished.spawn(async move {
        let handler = ask.handler.clone();
        let pulled = match store.claim(ask).await {
            Ok(claims) if claims.is_empty() => Ok(Vec::new()),
            Ok(claims) => Ok(refetch(handler, claims).await),
            Err(error) => Err(error),
        };
        let Err(Ok(undelivered)) = sender.send(pulled) else { return };
        let claims =
            undelivered.iter().map(|Pulled { claim, .. }| (claim.job, claim.fence)).collect();
        if let Err(error) = store.give_back(claims).await {
            tracing::warn!("cannot give back the claims of a disconnected worker: {error}");
        }
    });
    receiver.await.unwrap_or(Err(StoreError::Closed))
}

pub(super) async fn renew<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    PathId(job): PathId,
    JsonBody(asked): JsonBody<RenewRequest>,
) -> Result<Json<Settled>, Problem> {
    let job = claimable_job(&admin, &caller, &job).await?;
    let lease = pull_handler(&admin, &handler_of(&job))?.policy.lease;
    let held = admin.store.renew(job.id, asked.fence, lease).await?;
    claim_state(&admin, job.id, asked.fence, held).await.map(|(settled, _)| Json(settled))
}

pub(super) async fn complete<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    PathId(job): PathId,
    JsonBody(asked): JsonBody<CompleteRequest>,
) -> Result<Json<Settled>, Problem> {
    if asked.publish.len() > PUBLISH_MAX {
        return Err(Problem::bad_request("publish must have at most 100 messages"));
    }
    let publish: Vec<NewMessage> = asked.publish.into_iter().map(NewMessage::from).collect();
    if let Some(fault) = publish.iter().find_map(NewMessage::fault) {
        return Err(Problem::bad_request(&fault));
    }
    let job = claimable_job(&admin, &caller, &job).await?;
    let outcome = Outcome::Done { result: asked.result, publish, answer: None };
    settled(&admin, job, asked.fence, outcome).await
}

pub(super) async fn fail<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    PathId(job): PathId,
    JsonBody(asked): JsonBody<FailRequest>,
) -> Result<Json<Settled>, Problem> {
    let job = claimable_job(&admin, &caller, &job).await?;
    let retry = match asked.retry_in {
        None => Retry::Schedule,
        Some(RetryIn::Span(Span(exactly))) => Retry::In(exactly),
        Some(RetryIn::Never) => Retry::Never,
    };
    let error = asked.error.filter(|error| !error.trim().is_empty());
    let error = error.as_deref().unwrap_or("the worker gave no error");
    let outcome = Outcome::Failed { error: truncated(error, ERROR_MAX), retry, answer: None };
    settled(&admin, job, asked.fence, outcome).await
}

/// The configured pull handler. Jobs of other handlers run inside the server and cannot be claimed.
fn pull_handler<S>(admin: &Admin<S>, handler: &HandlerRef) -> Result<HandlerSpec, Problem> {
    let found = (admin.configured)().into_iter().find(|spec| spec.handler == *handler);
    match found {
        Some(spec) if spec.workplace == WorkLocation::Pulled => Ok(spec),
        Some(_) => Err(Problem::conflict("that handler does not have pull = true")),
        None => Err(Problem::not_found("no such handler is configured")),
    }
}

/// The job, if the caller may settle it. Otherwise the answer is the same as for an unknown job.
async fn claimable_job<S: Inspect>(
    admin: &Admin<S>,
    caller: &Caller,
    job: &str,
) -> Result<JobDetail, Problem> {
    let job = jobs::find(&*admin.store, job).await?;
    match caller.may_claim(&handler_of(&job)) {
        Ok(()) => Ok(job),
        Err(_) => Err(Problem::not_found("no job has that id")),
    }
}

fn handler_of(job: &JobDetail) -> HandlerRef {
    HandlerRef { source: SourceName::new(&job.source), handler: job.handler.clone() }
}

/// Ends an attempt and counts it in the same metrics as attempts inside the server.
async fn settled<S: Work + Inspect>(
    admin: &Admin<S>,
    job: JobDetail,
    fence: Fence,
    outcome: Outcome,
) -> Result<Json<Settled>, Problem> {
    let (ended, if_done) = match &outcome {
        Outcome::Done { .. } => ("done", Held::Kept),
        // The job is already done, so the failure comes too late.
        Outcome::Failed { .. } => ("failed", Held::Lost),
    };
    let settlement = admin.store.settle(job.id, fence, outcome).await?;
    let held = match settlement {
        Settlement::Recorded => Held::Kept,
        Settlement::AlreadyDone => if_done,
        Settlement::Lost => Held::Lost,
    };
    let (settled, now) = claim_state(admin, job.id, fence, held).await?;
    // A repeated completion is answered again, but only the first one is counted.
    if settlement == Settlement::Recorded {
        count(&handler_of(&job), ended, now.attempts.last());
        count_tried(admin, &job, &now);
    }
    Ok(Json(settled))
}

fn count(handler: &HandlerRef, ended: &'static str, attempt: Option<&AttemptNote>) {
    let (source, handler) = (handler.source.to_string(), handler.handler.to_string());
    counter!("hapax_jobs_total", "source" => source.clone(), "handler" => handler.clone(),
        "outcome" => ended)
    .increment(1);
    let took = attempt.and_then(|it| Some(it.ended_at?.duration_since(it.started_at)));
    if let Some(took) = took {
        histogram!("hapax_handler_seconds", "source" => source, "handler" => handler)
            .record(took.as_secs_f64());
    }
}

/// Counts an attempt in the figures of its source. An event's id begins with the time of its arrival.
fn count_tried<S>(admin: &Admin<S>, before: &JobDetail, after: &JobDetail) {
    let Some(attempt) = after.attempts.last() else { return };
    let verdict = match after.phase {
        Phase::Done => TriedVerdict::Succeeded,
        Phase::Dead => TriedVerdict::Died,
        Phase::Ready => TriedVerdict::Failed,
        Phase::Leased
        | Phase::Stale
        | Phase::Held
        | Phase::Parked
        | Phase::Review
        | Phase::Discarded => return,
    };
    let ended = attempt.ended_at.unwrap_or(attempt.started_at);
    let received = before.event.0.get_timestamp().map(|at| at.to_unix());
    let received = received.and_then(|(seconds, nanos)| {
        Timestamp::new(i64::try_from(seconds).ok()?, i32::try_from(nanos).ok()?).ok()
    });
    let tried = TriedJob {
        received_at: received.unwrap_or(attempt.started_at),
        attempt: attempt.attempt,
        steps: before.progress.steps,
        run: before.run,
        verdict,
    };
    (admin.tried)(&SourceName::new(&before.source), &tried, attempt.started_at, ended);
}

async fn claim_state<S: Inspect>(
    admin: &Admin<S>,
    job: JobId,
    fence: Fence,
    held: Held,
) -> Result<(Settled, JobDetail), Problem> {
    match held {
        Held::Lost => Err(Problem::fence_lost()),
        Held::Kept => {
            let now = jobs::find(&*admin.store, &job.to_string()).await?;
            Ok((Settled { job, fence, status: now.phase, due_at: now.due_at }, now))
        }
    }
}

fn truncated(text: &str, characters_max: usize) -> String {
    text.chars().take(characters_max).collect()
}
