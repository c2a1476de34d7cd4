//! Routes for plans: many deliveries of an endpoint sent again, at a rate, with progress.

use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};
use hapax_core::KeyHash;
use hapax_core::endpoint::EndpointId;
use hapax_core::store::{DeliveryPlan, NewPlan, PlanCount, PlanCreated, PlanId};
use uuid::Uuid;

use super::auth::Caller;
use super::events::instant;
use super::extract::{self, IdempotencyKey, JsonBody, PathId};
use super::problem::Problem;
use super::{Admin, AdminStore};
use crate::api::{List, Plan, PlanRequest, Planned, ReasonRequest};

/// The highest rate of a plan.
const RATE_MAX: u32 = 100_000;

/// How many plans a list shows.
const LISTED_MAX: usize = 100;

/// `POST /api/v1/endpoints/{id}/replay`.
pub(super) async fn create<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    IdempotencyKey(key): IdempotencyKey,
    PathId(id): PathId,
    JsonBody(asked): JsonBody<PlanRequest>,
) -> Result<Json<Planned>, Problem> {
    let reason = extract::reason(asked.reason)?;
    let endpoint = EndpointId(id.parse().map_err(|_| unknown_endpoint())?);
    let now = (admin.now)();
    if asked.rate.is_some_and(|rate| !(1..=RATE_MAX).contains(&rate)) {
        return Err(Problem::bad_request("rate must be from 1 to 100000 deliveries a second"));
    }
    let (since, until) = (instant(now, asked.since), asked.until.map(|at| instant(now, at)));
    if until.is_some_and(|until| until <= since) {
        return Err(Problem::bad_request("until must be later than since"));
    }
    let work = DeliveryPlan { endpoint, which: asked.status, since, until };
    if asked.dry_run {
        return match admin.store.count_plan(work).await? {
            PlanCount::Deliveries(count) => Ok(Json(Planned { id: None, count })),
            PlanCount::UnknownEndpoint => Err(unknown_endpoint()),
        };
    }
    let who = caller.who();
    let plan = NewPlan {
        id: key.map_or_else(new_id, |key| id_of(who, &id, &key)),
        work,
        rate: asked.rate,
    };
    match admin.store.create_plan(plan, caller.action(reason, now)).await? {
        PlanCreated::Created(plan) => {
            let (id, count) = (plan.id, plan.total);
            tracing::info!(
                endpoint.id = %endpoint, token = who,
                "{who} planned to send {count} deliveries of endpoint {endpoint} again: plan {id}"
            );
            Ok(Json(Planned { id: Some(id), count }))
        }
        PlanCreated::UnknownEndpoint => Err(unknown_endpoint()),
    }
}

/// `GET /api/v1/replays`.
pub(super) async fn list<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
) -> Result<Json<List<Plan>>, Problem> {
    let plans = admin.store.plans(LISTED_MAX).await?;
    Ok(Json(List { items: plans.into_iter().map(Plan::from).collect(), next: None }))
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
    tracing::info!(token = who, "{who} cancelled the plan {id} after {} deliveries", plan.done);
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

/// The id of a plan under an Idempotency-Key: the same request of the same token is one plan.
fn id_of(who: &str, endpoint: &str, key: &str) -> PlanId {
    let KeyHash(bytes) =
        KeyHash::of(b"idempotency key of a plan", [who, endpoint, key].map(str::as_bytes));
    PlanId(Uuid::from_bytes(bytes))
}
