//! Routes for jobs, including dead letters, for the configured handlers and for their backlog.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use hapax_core::job::{HandlerName, JobId, Phase, Workplace};
use hapax_core::store::{Cursor, HandlerRef, Inspect, JobDetail, JobFilter, LaneState};
use hapax_core::{SourceName, Tenant, Timestamp};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::extract::{PathId, QueryParams, cursor, limit};
use super::problem::Problem;
use super::{Admin, AdminStore};

/// The query of `GET /api/v1/jobs`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ListQuery {
    tenant: Option<String>,
    source: Option<String>,
    handler: Option<String>,
    status: Option<Phase>,
    cursor: Option<String>,
    limit: Option<usize>,
}

#[derive(Debug, Serialize)]
pub(super) struct List {
    items: Vec<JobDetail>,
    next: Option<String>,
}

pub(super) async fn list<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    QueryParams(query): QueryParams<ListQuery>,
) -> Result<Json<List>, Problem> {
    let filter = JobFilter {
        tenant: query.tenant.map(Tenant::new),
        source: query.source.map(SourceName::new),
        handler: query.handler.map(HandlerName::new),
        phase: query.status,
        before: cursor(query.cursor)?,
        limit: limit(query.limit)?,
    };
    let page = admin.store.jobs(filter).await?;
    let next = page.next.map(|Cursor(next)| next.to_string());
    Ok(Json(List { items: page.items, next }))
}

pub(super) async fn show<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    PathId(id): PathId,
) -> Result<Json<JobDetail>, Problem> {
    find(&*admin.store, &id).await.map(Json)
}

/// The job with this id.
pub(super) async fn find<S: Inspect>(store: &S, id: &str) -> Result<JobDetail, Problem> {
    let unknown = || Problem::not_found("no job has that id");
    let id = id.parse::<Uuid>().map_err(|_| unknown())?;
    store.job(JobId(id)).await?.ok_or_else(unknown)
}

/// `GET /api/v1/handlers`.
#[derive(Debug, Serialize)]
pub(super) struct Handlers {
    items: Vec<ShownHandler>,
    next: Option<String>,
}

#[derive(Debug, Serialize)]
struct ShownHandler {
    source: String,
    handler: HandlerName,
    pull: bool,
    attempts_max: usize,
    lease_seconds: f64,
}

pub(super) async fn handlers<S: AdminStore>(State(admin): State<Arc<Admin<S>>>) -> Json<Handlers> {
    let shown = |spec: hapax_core::store::HandlerSpec| ShownHandler {
        source: spec.handler.source.to_string(),
        handler: spec.handler.handler,
        pull: spec.workplace == Workplace::Pulled,
        attempts_max: spec.policy.retry.len(),
        lease_seconds: spec.policy.lease.as_secs_f64(),
    };
    Json(Handlers { items: (admin.configured)().into_iter().map(shown).collect(), next: None })
}

/// `GET /api/v1/lanes`.
#[derive(Debug, Serialize)]
pub(super) struct Lanes {
    items: Vec<ShownLane>,
    next: Option<String>,
}

/// The backlog of one handler; counts stop at 10,000.
#[derive(Debug, Serialize)]
struct ShownLane {
    source: String,
    handler: HandlerName,
    /// Whether such a handler is configured; without one its jobs are never claimed.
    configured: bool,
    oldest_due: Option<Timestamp>,
    ready: u64,
    leased: u64,
    held: u64,
    parked: u64,
    review: u64,
    dead: u64,
}

pub(super) async fn lanes<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
) -> Result<Json<Lanes>, Problem> {
    let configured: Vec<HandlerRef> =
        (admin.configured)().into_iter().map(|spec| spec.handler).collect();
    let shown = |lane: LaneState| ShownLane {
        configured: configured.contains(&lane.handler),
        source: lane.handler.source.to_string(),
        handler: lane.handler.handler,
        oldest_due: lane.oldest_due,
        ready: lane.ready,
        leased: lane.leased,
        held: lane.held,
        parked: lane.parked,
        review: lane.review,
        dead: lane.dead,
    };
    let lanes = admin.store.lanes().await?;
    Ok(Json(Lanes { items: lanes.into_iter().map(shown).collect(), next: None }))
}
