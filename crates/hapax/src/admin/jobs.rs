//! Routes for jobs, including dead letters, and for the backlog of handlers.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use hapax_core::job::{HandlerName, JobId, Phase};
use hapax_core::store::{HandlerRef, Inspect, JobDetail, JobFilter, LaneState, ReadBound};
use hapax_core::{SourceName, Tenant};
use uuid::Uuid;

use super::extract::{PathId, QueryParams, cursor, limit};
use super::handlers::PausedHandlers;
use super::problem::Problem;
use super::{Admin, AdminStore};
use crate::api::{DeadLetters, DeadLettersQuery, Job, JobsQuery, Lane, List};

pub(super) async fn list<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    QueryParams(query): QueryParams<JobsQuery>,
) -> Result<Json<List<Job>>, Problem> {
    let filter = JobFilter {
        tenant: query.tenant.map(Tenant::new),
        source: query.source.map(SourceName::new),
        handler: query.handler.map(HandlerName::new),
        phase: query.status,
        error: query.error,
        forced: query.forced,
        before: cursor(query.cursor)?,
        limit: limit(query.limit)?,
        bound: ReadBound::default(),
    };
    let page = admin.store.jobs(filter).await?;
    Ok(Json(page.into()))
}

/// `GET /api/v1/dead`.
pub(super) async fn dead<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    QueryParams(query): QueryParams<DeadLettersQuery>,
) -> Result<Json<DeadLetters>, Problem> {
    let filter = JobFilter {
        tenant: query.tenant.map(Tenant::new),
        source: query.source.map(SourceName::new),
        handler: query.handler.map(HandlerName::new),
        phase: Some(Phase::Dead),
        limit: limit(query.limit)?,
        ..JobFilter::default()
    };
    Ok(Json(admin.store.dead_groups(filter).await?.into()))
}

pub(super) async fn show<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    PathId(id): PathId,
) -> Result<Json<Job>, Problem> {
    find(&*admin.store, &id).await.map(|job| Json(job.into()))
}

/// The job with this id.
pub(super) async fn find<S: Inspect>(store: &S, id: &str) -> Result<JobDetail, Problem> {
    let unknown = || Problem::not_found("no job has that id");
    let id = id.parse::<Uuid>().map_err(|_| unknown())?;
    store.job(JobId(id)).await?.ok_or_else(unknown)
}

pub(super) async fn lanes<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
) -> Result<Json<List<Lane>>, Problem> {
    let configured: Vec<HandlerRef> =
        (admin.configured)().into_iter().map(|spec| spec.handler).collect();
    let paused = PausedHandlers::of(&*admin.store).await?;
    let shown = |lane: LaneState| Lane {
        configured: configured.contains(&lane.handler),
        paused: paused.get(&lane.handler),
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
    Ok(Json(List::whole(lanes.into_iter().map(shown).collect())))
}
