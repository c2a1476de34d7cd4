//! Replays: of one event, one job or many dead letters. A done job runs again only with `force`. A dry run
//! reports for each job what would happen.

use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};
use hapax_core::handler::EventView;
use hapax_core::job::{HandlerName, Phase};
use hapax_core::store::{
    self, Action, Cursor, EventDetail, JobDetail, JobFilter, NewJob, ReplayAsk, Status,
};
use hapax_core::{SourceName, Tenant};

use super::auth::Caller;
use super::extract::{self, JsonBody, PathId, cursor, limit};
use super::problem::Problem;
use super::{Admin, AdminStore};
use super::{events, jobs};
use crate::api::{
    ReplayEffect, ReplayEventRequest, ReplayItem, ReplayJobRequest, ReplayJobsRequest, Replayed,
};

pub(super) async fn event<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    PathId(name): PathId,
    JsonBody(asked): JsonBody<ReplayEventRequest>,
) -> Result<Json<Replayed>, Problem> {
    let by = caller.action(extract::reason(asked.reason)?, (admin.now)());
    let event = events::find(&*admin.store, &name).await?;
    let mut handlers = jobs_for_event(&admin, &event).unwrap_or_default();
    if let Some(only) = &asked.handler {
        handlers.retain(|job| job.handler.as_str() == only);
        if handlers.is_empty() {
            let detail = format!("no configured handler \"{only}\" takes this event");
            return Err(Problem::not_found(&detail));
        }
    }
    let options = ReplayOptions { dry_run: asked.dry_run, force: asked.force };
    let items = replay(&admin, &event, handlers, options, by).await?;
    Ok(Json(Replayed { dry_run: asked.dry_run, items, next: None }))
}

pub(super) async fn job<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    PathId(id): PathId,
    JsonBody(asked): JsonBody<ReplayJobRequest>,
) -> Result<Json<Replayed>, Problem> {
    let by = caller.action(extract::reason(asked.reason)?, (admin.now)());
    let job = jobs::find(&*admin.store, &id).await?;
    let options = ReplayOptions { dry_run: asked.dry_run, force: asked.force };
    let item = replay_job(&admin, &job, options, by).await?;
    if let (ReplayEffect::NoHandler | ReplayEffect::NoOrder, Some(detail)) =
        (item.effect, &item.detail)
    {
        return Err(Problem::conflict(detail));
    }
    Ok(Json(Replayed { dry_run: asked.dry_run, items: vec![item], next: None }))
}

/// Replays one page of dead letters. Each dead letter is replayed in its own commit: if one fails, the earlier
/// ones stay replayed, and the same request continues with the rest.
pub(super) async fn many<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    JsonBody(asked): JsonBody<ReplayJobsRequest>,
) -> Result<Json<Replayed>, Problem> {
    let by = caller.action(extract::reason(asked.reason)?, (admin.now)());
    match asked.status {
        None | Some(Phase::Dead) => {}
        Some(_) => return Err(Problem::bad_request("status must be \"dead\" or absent")),
    }
    let filter = JobFilter {
        tenant: asked.tenant.map(Tenant::new),
        source: asked.source.map(SourceName::new),
        handler: asked.handler.map(HandlerName::new),
        phase: Some(Phase::Dead),
        before: cursor(asked.cursor)?,
        limit: limit(asked.limit)?,
        ..JobFilter::default()
    };
    let page = admin.store.jobs(filter).await?;
    let options = ReplayOptions { dry_run: asked.dry_run, force: false };
    let mut items = Vec::with_capacity(page.items.len());
    for job in &page.items {
        items.push(replay_job(&admin, job, options, by.clone()).await?);
    }
    let next = page.next.map(|Cursor(next)| next.to_string());
    Ok(Json(Replayed { dry_run: asked.dry_run, items, next }))
}

/// The jobs of the event by the current configuration. `None` if its source is not configured here.
pub(super) fn jobs_for_event<S>(admin: &Admin<S>, event: &EventDetail) -> Option<Vec<NewJob>> {
    let summary = &event.summary;
    let view = EventView { event_type: summary.event_type.as_deref(), body: &event.body };
    (admin.handlers)(&SourceName::new(&summary.source), &Tenant::new(&summary.tenant), view)
}

#[derive(Debug, Clone, Copy)]
struct ReplayOptions {
    dry_run: bool,
    force: bool,
}

async fn replay_job<S: AdminStore>(
    admin: &Admin<S>,
    job: &JobDetail,
    options: ReplayOptions,
    by: Action,
) -> Result<ReplayItem, Problem> {
    let event = events::find(&*admin.store, &job.event.to_string()).await?;
    let mut handlers = jobs_for_event(admin, &event).unwrap_or_default();
    handlers.retain(|new| new.handler == job.handler);
    let item = match handlers.is_empty() {
        true => None,
        false => replay(admin, &event, handlers, options, by).await?.pop(),
    };
    Ok(item.unwrap_or_else(|| ReplayItem {
        job: Some(job.id),
        event: job.event,
        event_id: job.event_id.clone(),
        handler: job.handler.clone(),
        effect: ReplayEffect::NoHandler,
        detail: Some(no_handler(&job.source, &job.handler)),
    }))
}

fn no_handler(source: &str, handler: &HandlerName) -> String {
    format!(
        "no configured handler \"{handler}\" of {source} takes this event: add the handler, or the event's type \
         to its `types`, reload, and replay; or discard the dead letter"
    )
}

fn no_order(source: &str, handler: &HandlerName, why: &str) -> String {
    format!(
        "{why}: correct [sources.{source}.handlers.{handler}.order] so that it fits this event, reload, \
         and replay; or discard the dead letter"
    )
}

async fn replay<S: AdminStore>(
    admin: &Admin<S>,
    event: &EventDetail,
    handlers: Vec<NewJob>,
    ReplayOptions { dry_run, force }: ReplayOptions,
    by: Action,
) -> Result<Vec<ReplayItem>, Problem> {
    match event.summary.status {
        // For an event with jobs, the store decides about each job.
        Status::Review if event.jobs.is_empty() => {
            return Err(Problem::conflict(
                "the event waits for review: approve or reject it first",
            ));
        }
        Status::Discarded if event.jobs.is_empty() => {
            return Err(Problem::conflict("the event was rejected"));
        }
        Status::Review
        | Status::Discarded
        | Status::Dead
        | Status::Failed
        | Status::Held
        | Status::Processing
        | Status::Received
        | Status::Processed
        | Status::Stale
        | Status::Ignored => {}
    }
    let id = event.summary.id;
    let who = by.who.clone();
    let hopeless: Vec<(HandlerName, String)> = handlers
        .iter()
        .filter_map(|new| Some((new.handler.clone(), new.hopeless.clone()?)))
        .collect();
    let replayed =
        admin.store.replay(ReplayAsk { event: id, handlers, force, dry_run, by }).await?;
    if !dry_run {
        tracing::info!(event.id = %id, token = %who, force, "{who} replayed {id}");
    }
    let item = |store::Replayed { handler, effect }| ReplayItem {
        job: event.jobs.iter().find(|job| job.handler == handler).map(|job| job.id),
        event: id,
        event_id: event.summary.event_id.clone(),
        handler,
        detail: None,
        effect: match (effect, dry_run) {
            (store::ReplayEffect::WouldRun, true) => ReplayEffect::WouldRun,
            (store::ReplayEffect::WouldRun, false) => ReplayEffect::Runs,
            (store::ReplayEffect::AlreadyApplied, _) => ReplayEffect::AlreadyApplied,
            (store::ReplayEffect::Stale, _) => ReplayEffect::Stale,
            (store::ReplayEffect::AlreadyOpen, _) => ReplayEffect::AlreadyOpen,
            (store::ReplayEffect::Discarded, _) => ReplayEffect::Discarded,
        },
    };
    // The store skips these jobs unless they are open or done already.
    let left_out: Vec<_> = hopeless
        .into_iter()
        .filter(|(handler, _)| !replayed.iter().any(|item| item.handler == *handler))
        .collect();
    let cannot = |(handler, why): (HandlerName, String)| ReplayItem {
        job: event.jobs.iter().find(|job| job.handler == handler).map(|job| job.id),
        event: id,
        event_id: event.summary.event_id.clone(),
        effect: ReplayEffect::NoOrder,
        detail: Some(no_order(&event.summary.source, &handler, &why)),
        handler,
    };
    Ok(replayed.into_iter().map(item).chain(left_out.into_iter().map(cannot)).collect())
}
