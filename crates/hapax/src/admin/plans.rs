//! Routes that make, list, show and cancel plans. A plan sends many deliveries of an endpoint again, or decides about
//! many events, at a rate.

use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};
use hapax_core::endpoint::EndpointId;
use hapax_core::job::HandlerName;
use hapax_core::store::{
    DeliveryPlan, EventAct, EventFilter, EventPlan, NewPlan, PlanCount, PlanCreated, PlanId,
    PlanWork, Status,
};
use hapax_core::{KeyHash, SourceName, Tenant};
use serde::Serialize;
use uuid::Uuid;

use super::auth::Caller;
use super::events::{ago, instant};
use super::extract::{self, IdempotencyKeyHeader, JsonBody, PathId};
use super::problem::Problem;
use super::text_search::text_search;
use super::{Admin, AdminStore};
use crate::api::{EventPlanRequest, List, Plan, PlanRequest, Planned, ReasonRequest};

/// The highest rate of a plan.
const RATE_MAX: u32 = 100_000;

/// How many plans a list shows.
pub(super) const LISTED_MAX: usize = 100;

/// `POST /api/v1/endpoints/{id}/replay`.
pub(super) async fn create<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    IdempotencyKeyHeader(key): IdempotencyKeyHeader,
    PathId(id): PathId,
    JsonBody(asked): JsonBody<PlanRequest>,
) -> Result<Json<Planned>, Problem> {
    of_deliveries(&admin, key, id, asked)?.record(&admin, &caller).await
}

/// Makes a plan for a receiving party. The request is refused while another plan of the endpoint runs.
pub(super) async fn create_alone<S: AdminStore>(
    admin: &Admin<S>,
    caller: &Caller,
    key: IdempotencyKeyHeader,
    id: String,
    asked: PlanRequest,
) -> Result<Planned, Problem> {
    let asked = of_deliveries(admin, key.0, id, asked)?;
    let Json(planned) = AskedPlan { alone: true, ..asked }.record(admin, caller).await?;
    Ok(planned)
}

/// The plan over deliveries that a request asks for.
fn of_deliveries<S>(
    admin: &Admin<S>,
    key: Option<String>,
    id: String,
    asked: PlanRequest,
) -> Result<AskedPlan, Problem> {
    let endpoint = EndpointId(id.parse().map_err(|_| unknown_endpoint())?);
    let request = hash_of(&asked);
    let now = (admin.now)();
    let (since, until) = (instant(now, asked.since), asked.until.map(|at| instant(now, at)));
    if until.is_some_and(|until| until <= since) {
        return Err(Problem::bad_request("until must be later than since"));
    }
    Ok(AskedPlan {
        work: DeliveryPlan { endpoint, which: asked.status, since, until }.into(),
        subject: id,
        key,
        request,
        rate: asked.rate,
        dry_run: asked.dry_run,
        reason: extract::reason(asked.reason)?,
        alone: false,
    })
}

/// `POST /api/v1/events/replay`.
pub(super) async fn replay_events<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    IdempotencyKeyHeader(key): IdempotencyKeyHeader,
    JsonBody(asked): JsonBody<EventPlanRequest>,
) -> Result<Json<Planned>, Problem> {
    let act = EventAct::Replay { force: asked.force };
    of_events(&admin, &caller, act, key, asked).await?.record(&admin, &caller).await
}

/// `POST /api/v1/events/approve`.
pub(super) async fn approve_events<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    IdempotencyKeyHeader(key): IdempotencyKeyHeader,
    JsonBody(asked): JsonBody<EventPlanRequest>,
) -> Result<Json<Planned>, Problem> {
    of_events(&admin, &caller, EventAct::Approve, key, asked).await?.record(&admin, &caller).await
}

/// `POST /api/v1/events/reject`.
pub(super) async fn reject_events<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    IdempotencyKeyHeader(key): IdempotencyKeyHeader,
    JsonBody(asked): JsonBody<EventPlanRequest>,
) -> Result<Json<Planned>, Problem> {
    of_events(&admin, &caller, EventAct::Reject, key, asked).await?.record(&admin, &caller).await
}

/// `POST /api/v1/events/discard`.
pub(super) async fn discard_events<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    IdempotencyKeyHeader(key): IdempotencyKeyHeader,
    JsonBody(asked): JsonBody<EventPlanRequest>,
) -> Result<Json<Planned>, Problem> {
    of_events(&admin, &caller, EventAct::Discard, key, asked).await?.record(&admin, &caller).await
}

/// The plan over events that a request asks for.
async fn of_events<S: AdminStore>(
    admin: &Admin<S>,
    caller: &Caller,
    act: EventAct,
    key: Option<String>,
    asked: EventPlanRequest,
) -> Result<AskedPlan, Problem> {
    if !asked.all && !asked.dry_run && !asked.has_filter() {
        return Err(Problem::bad_request(
            "give a filter, such as source, type, status or since, or \"all\": true for every event",
        ));
    }
    let (now, request) = ((admin.now)(), hash_of(&asked));
    let since = asked.since.map(|at| instant(now, at));
    let until = asked.until.map(|at| instant(now, at));
    let reason = extract::reason(asked.reason)?;
    if since.zip(until).is_some_and(|(since, until)| until <= since) {
        return Err(Problem::bad_request("until must be later than since"));
    }
    let (only, takes_handler) = match act {
        EventAct::Replay { .. } => (None, true),
        EventAct::Approve | EventAct::Reject => (Some(Status::Review), false),
        EventAct::Discard => (Some(Status::Dead), true),
    };
    if let (Some(only), Some(status)) = (only, asked.status)
        && only != status
    {
        return Err(Problem::bad_request(&format!(
            "status must be \"{}\" or absent",
            only.as_str()
        )));
    }
    if asked.handler.is_some() && !takes_handler {
        return Err(Problem::bad_request(
            "handler cannot be given here: an event in review is decided as a whole",
        ));
    }
    match act {
        EventAct::Replay { force: true } if since.is_none() => {
            return Err(Problem::bad_request(
                "force needs since: it runs every finished job of that time again",
            ));
        }
        EventAct::Reject if reason.is_none() && !asked.dry_run => {
            return Err(Problem::bad_request(
                "reason is needed: it is recorded with the rejection",
            ));
        }
        EventAct::Replay { .. } | EventAct::Approve | EventAct::Reject | EventAct::Discard => {}
    }
    if asked.force && !matches!(act, EventAct::Replay { .. }) {
        return Err(Problem::bad_request("force is for replays only"));
    }
    let filter = EventFilter {
        tenant: asked.tenant.map(Tenant::new),
        source: asked.source.map(SourceName::new),
        event_type: asked.r#type,
        status: asked.status,
        text: text_search(admin, caller, asked.q).await?,
        since,
        until,
        unfinished_since: asked.unfinished_for.map(|span| ago(now, span)),
        ..EventFilter::default()
    };
    Ok(AskedPlan {
        work: EventPlan::new(act, asked.handler.map(HandlerName::new), filter).into(),
        subject: format!("events/{}", act.as_str()),
        key,
        request,
        rate: asked.rate,
        dry_run: asked.dry_run,
        reason,
        alone: false,
    })
}

/// A plan that a request asks for.
struct AskedPlan {
    work: PlanWork,
    /// The name from the route. If there is an Idempotency-Key, the plan's id is derived from the key and this name.
    subject: String,
    key: Option<String>,
    request: KeyHash,
    rate: Option<u32>,
    dry_run: bool,
    reason: Option<String>,
    /// Whether no other plan of the endpoint may run.
    alone: bool,
}

impl AskedPlan {
    async fn record<S: AdminStore>(
        self,
        admin: &Admin<S>,
        caller: &Caller,
    ) -> Result<Json<Planned>, Problem> {
        let Self { work, subject, key, request, rate, dry_run, reason, alone } = self;
        if rate.is_some_and(|rate| !(1..=RATE_MAX).contains(&rate)) {
            return Err(Problem::bad_request("rate must be from 1 to 100000 a second"));
        }
        if dry_run {
            return match admin.store.count_plan(work).await? {
                PlanCount::Counted(count) => Ok(Json(Planned { id: None, count })),
                PlanCount::UnknownEndpoint => Err(unknown_endpoint()),
            };
        }
        let who = caller.who();
        let id = key.map_or_else(new_id, |key| id_of(who, &subject, &key));
        let plan = NewPlan { id, work, rate, request, alone };
        match admin.store.create_plan(plan, caller.action(reason, (admin.now)())).await? {
            PlanCreated::Created(plan) => {
                let (id, count) = (plan.id, plan.total);
                let what = match &plan.work {
                    PlanWork::Deliveries(work) => {
                        format!("send {count} deliveries of endpoint {} again", work.endpoint)
                    }
                    PlanWork::Events(work) => format!("{} {count} events", work.act.as_str()),
                };
                tracing::info!(token = who, "{who} planned to {what}: plan {id}");
                Ok(Json(Planned { id: Some(id), count }))
            }
            PlanCreated::OtherRequest => Err(Problem::key_reused()),
            PlanCreated::UnknownEndpoint => Err(unknown_endpoint()),
            PlanCreated::EndpointBusy => Err(Problem::conflict(
                "deliveries of this endpoint are being sent again already: wait until that ends, or cancel it",
            )),
        }
    }
}

/// `GET /api/v1/replays`.
pub(super) async fn list<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
) -> Result<Json<List<Plan>>, Problem> {
    let plans = admin.store.plans(LISTED_MAX).await?;
    Ok(Json(List::whole(plans.into_iter().map(Plan::from).collect())))
}

/// `GET /api/v1/replays/{id}`.
pub(super) async fn show<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    PathId(id): PathId,
) -> Result<Json<Plan>, Problem> {
    let plan = admin.store.plan(parse(&id)?).await?;
    plan.map(|plan| Json(plan.into())).ok_or_else(unknown)
}

/// `POST /api/v1/replays/{id}/cancel`.
pub(super) async fn cancel<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    PathId(id): PathId,
    JsonBody(asked): JsonBody<ReasonRequest>,
) -> Result<Json<Plan>, Problem> {
    let reason = extract::reason(asked.reason)?;
    let by = caller.action(reason, (admin.now)());
    let plan = admin.store.cancel_plan(parse(&id)?, by).await?.ok_or_else(unknown)?;
    let who = caller.who();
    tracing::info!(token = who, "{who} cancelled the plan {id}, which had done {}", plan.done);
    Ok(Json(plan.into()))
}

fn parse(id: &str) -> Result<PlanId, Problem> {
    id.parse().map(PlanId).map_err(|_| unknown())
}

fn unknown() -> Problem {
    Problem::not_found("no plan has that id")
}

fn unknown_endpoint() -> Problem {
    Problem::not_found("no endpoint has that id")
}

fn new_id() -> PlanId {
    PlanId(Uuid::now_v7())
}

/// The hash of a request as the client sent it: "2h" is not converted into a time.
fn hash_of(asked: &impl Serialize) -> KeyHash {
    // A value that was read from JSON can be written as JSON.
    let text = serde_json::to_vec(asked).unwrap_or_default();
    KeyHash::of(b"request for a plan", [&text[..]])
}

/// The id of a plan under an Idempotency-Key: the same request of the same token is one plan.
fn id_of(who: &str, subject: &str, key: &str) -> PlanId {
    let KeyHash(bytes) =
        KeyHash::of(b"idempotency key of a plan", [who, subject, key].map(str::as_bytes));
    PlanId(Uuid::from_bytes(bytes))
}
