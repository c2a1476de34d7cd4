//! The pages of handlers, dead letters, sources and the audit trail.

use std::sync::Arc;

use askama::Template;
use axum::extract::State;
use axum::{Extension, Json};
use hapax_core::Timestamp;

use super::super::extract::{PathId, QueryParams};
use super::super::problem::Problem;
use super::super::{
    Admin, AdminStore, audit, events, handlers, jobs as api_jobs, rejections, source_secrets, stats,
};
use super::filters::Filters;
use super::{Frame, Page, PageReader, plans};
use crate::api::{
    AuditEntry, AuditQuery, DeadLetters, DeadLettersQuery, EventSummary, EventsQuery, Figures,
    Handler, Job, JobsQuery, Lane, Pause, Rejection, SourceSecret, StatsQuery,
};

/// The most frequent errors that the page of dead letters shows.
const ERRORS_SHOWN: usize = 20;

#[derive(Template)]
#[template(path = "dead.html")]
pub(in crate::admin) struct Dead {
    frame: Frame,
    source: Option<String>,
    handler: Option<String>,
    tenant: Option<String>,
    /// The error that all letters of the list have.
    error: Option<String>,
    /// The errors of all dead letters that match.
    errors: DeadLetters,
    items: Vec<Job>,
    older: Option<String>,
    searched_to: Option<Timestamp>,
    /// Actions on all dead letters that match.
    bulk: Vec<(&'static str, String)>,
}

impl Dead {
    /// The list of the dead letters with an error, within the filter of this page.
    fn link_to(&self, error: &str) -> String {
        let fields =
            [("source", &self.source), ("handler", &self.handler), ("tenant", &self.tenant)];
        let filters = fields.into_iter().fold(Filters::default(), |filters, (name, value)| {
            value.as_ref().map_or_else(|| filters.clone(), |value| filters.with(name, value))
        });
        filters.with("error", error).link("/dead")
    }
}

/// `GET /dead`.
pub(in crate::admin) async fn dead<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    reader: PageReader,
    filters: Filters,
) -> Result<Page<Dead>, Problem> {
    let frame = reader.frame(&admin, "/dead").await;
    let filters = filters.with("status", "dead");
    let query = filters.query::<JobsQuery>()?;
    let Json(page) = api_jobs::list(State(Arc::clone(&admin)), query).await?;
    let asked = DeadLettersQuery {
        tenant: filters.get("tenant"),
        source: filters.get("source"),
        handler: filters.get("handler"),
        limit: Some(ERRORS_SHOWN),
    };
    let Json(errors) = api_jobs::dead(State(admin), QueryParams(asked)).await?;
    let acts: &[_] = match frame.may_operate && !page.items.is_empty() {
        true => &[("Replay", "replay"), ("Discard", "discard")],
        false => &[],
    };
    let bulk = acts.iter().filter_map(|(name, act)| Some((*name, plans::link(act, &filters)?)));
    let page = Dead {
        older: filters.older(&frame.base, "/dead", page.next.as_deref()),
        frame,
        source: filters.get("source"),
        handler: filters.get("handler"),
        tenant: filters.get("tenant"),
        error: filters.get("error"),
        errors,
        searched_to: page.searched_to,
        items: page.items,
        bulk: bulk.collect(),
    };
    Ok(reader.page(page))
}

/// The states that a job can have.
const PHASES: [&str; 9] =
    ["ready", "leased", "done", "stale", "dead", "held", "parked", "review", "discarded"];

#[derive(Template)]
#[template(path = "jobs.html")]
pub(in crate::admin) struct Jobs {
    frame: Frame,
    source: Option<String>,
    handler: Option<String>,
    tenant: Option<String>,
    status: Option<String>,
    error: Option<String>,
    is_forced: bool,
    statuses: [&'static str; 9],
    items: Vec<Job>,
    older: Option<String>,
    searched_to: Option<Timestamp>,
    is_first: bool,
}

/// `GET /jobs`.
pub(in crate::admin) async fn jobs<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    reader: PageReader,
    filters: Filters,
) -> Result<Page<Jobs>, Problem> {
    let frame = reader.frame(&admin, "/handlers").await;
    let query = filters.query::<JobsQuery>()?;
    let is_forced = query.0.forced;
    let Json(page) = api_jobs::list(State(admin), query).await?;
    let page = Jobs {
        older: filters.older(&frame.base, "/jobs", page.next.as_deref()),
        frame,
        source: filters.get("source"),
        handler: filters.get("handler"),
        tenant: filters.get("tenant"),
        status: filters.get("status"),
        error: filters.get("error"),
        is_forced,
        statuses: PHASES,
        searched_to: page.searched_to,
        items: page.items,
        is_first: filters.get("cursor").is_none(),
    };
    Ok(reader.page(page))
}

#[derive(Template)]
#[template(path = "handlers.html")]
pub(in crate::admin) struct Handlers {
    frame: Frame,
    rows: Vec<HandlerRow>,
    done: Option<String>,
}

/// A handler that is configured or has jobs.
struct HandlerRow {
    source: String,
    handler: String,
    configured: Option<Handler>,
    lane: Option<Lane>,
    paused: Option<Pause>,
}

impl HandlerRow {
    /// The handler's id, which a path contains as one segment.
    fn id(&self) -> String {
        format!("{}/{}", self.source, self.handler)
    }
}

/// `GET /handlers`.
pub(in crate::admin) async fn handlers<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    reader: PageReader,
    filters: Filters,
) -> Result<Page<Handlers>, Problem> {
    let frame = reader.frame(&admin, "/handlers").await;
    let Json(configured) = handlers::list(State(Arc::clone(&admin))).await?;
    let Json(lanes) = api_jobs::lanes(State(admin)).await?;
    let mut rows: Vec<HandlerRow> = Vec::new();
    for handler in configured.items {
        rows.push(HandlerRow {
            source: handler.source.clone(),
            handler: handler.handler.to_string(),
            paused: handler.paused.clone(),
            configured: Some(handler),
            lane: None,
        });
    }
    for lane in lanes.items {
        let same = |row: &&mut HandlerRow| {
            row.source == lane.source && row.handler == lane.handler.as_str()
        };
        match rows.iter_mut().find(same) {
            Some(row) => row.lane = Some(lane),
            None => rows.push(HandlerRow {
                source: lane.source.clone(),
                handler: lane.handler.to_string(),
                configured: None,
                paused: lane.paused.clone(),
                lane: Some(lane),
            }),
        }
    }
    rows.sort_by(|a, b| (&a.source, &a.handler).cmp(&(&b.source, &b.handler)));
    Ok(reader.page(Handlers { frame, rows, done: filters.done() }))
}

#[derive(Template)]
#[template(path = "source.html")]
pub(in crate::admin) struct SourcePage {
    frame: Frame,
    name: String,
    window: String,
    /// The beginning of the window.
    since: Timestamp,
    figures: Option<Figures>,
    lanes: Vec<Lane>,
    events: Vec<EventSummary>,
    rejections: Vec<Rejection>,
    secrets: Vec<SourceSecret>,
}

/// `GET /sources/{name}`.
pub(in crate::admin) async fn source<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    reader: PageReader,
    PathId(name): PathId,
    filters: Filters,
) -> Result<Page<SourcePage>, Problem> {
    let frame = reader.frame(&admin, "/").await;
    let QueryParams(query) = filters.query::<StatsQuery>()?;
    let stats = stats::with_gaps(&admin, &query).await?;
    let since = stats.since;
    let figures = stats.sources.and_then(|mut sources| sources.remove(&name));
    let Json(mut lanes) = api_jobs::lanes(State(Arc::clone(&admin))).await?;
    lanes.items.retain(|lane| lane.source == name);
    let newest =
        EventsQuery { source: Some(name.clone()), limit: Some(20), ..EventsQuery::default() };
    let caller = Extension(reader.caller()?);
    let Json(events) = events::list(State(Arc::clone(&admin)), caller, QueryParams(newest)).await?;
    let Json(secrets) =
        source_secrets::list(State(Arc::clone(&admin)), PathId(name.clone())).await?;
    let Json(rejections) =
        rejections::list(State(Arc::clone(&admin)), PathId(name.clone())).await?;
    let is_configured =
        admin.watch.traffic().sources().iter().any(|source| source.as_str() == name);
    let is_known = figures.is_some() || !lanes.items.is_empty() || !events.items.is_empty();
    if !is_configured && !is_known && rejections.items.is_empty() {
        return Err(Problem::not_found(
            "no source of that name has an event, a job or a failed verification",
        ));
    }
    let page = SourcePage {
        frame,
        name,
        window: filters.get("window").unwrap_or_else(|| "1h".to_owned()),
        since,
        figures,
        lanes: lanes.items,
        events: events.items,
        rejections: rejections.items,
        secrets: secrets.items,
    };
    Ok(reader.page(page))
}

#[derive(Template)]
#[template(path = "audit.html")]
pub(in crate::admin) struct AuditPage {
    frame: Frame,
    who: Option<String>,
    items: Vec<AuditEntry>,
    older: Option<String>,
}

/// `GET /audit`.
pub(in crate::admin) async fn audit<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    reader: PageReader,
    filters: Filters,
) -> Result<Page<AuditPage>, Problem> {
    let frame = reader.frame(&admin, "/audit").await;
    let Json(page) = audit::list(State(admin), filters.query::<AuditQuery>()?).await?;
    let page = AuditPage {
        older: filters.older(&frame.base, "/audit", page.next.as_deref()),
        frame,
        who: filters.get("who"),
        items: page.items,
    };
    Ok(reader.page(page))
}
