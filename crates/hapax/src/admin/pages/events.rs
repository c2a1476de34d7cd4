//! The pages of events: the list, the review, and the search for an id. One event has a page of its own
//! ([`super::event`]).

use std::sync::Arc;

use askama::Template;
use axum::extract::State;
use axum::{Extension, Json};
use hapax_core::Timestamp;
use hapax_core::delivery::DeliveryId;
use hapax_core::job::JobId;
use uuid::Uuid;

use super::super::problem::Problem;
use super::super::{Admin, AdminStore, events as api_events};
use super::filters::Filters;
use super::{Frame, Page, PageReader, SeeOther, plans};
use crate::api::{EventSummary, EventsQuery};
use crate::format::url_part;

/// The states that an event can have, as the filter offers them.
const STATUSES: [&str; 10] = [
    "received",
    "processing",
    "processed",
    "failed",
    "dead",
    "review",
    "held",
    "stale",
    "discarded",
    "ignored",
];

#[derive(Template)]
#[template(path = "events.html")]
pub(in crate::admin) struct Events {
    frame: Frame,
    filters: EventFields,
    items: Vec<EventSummary>,
    older: Option<String>,
    searched_to: Option<Timestamp>,
    statuses: [&'static str; 10],
    is_review: bool,
    /// Whether the page is the first one, which shows new events by itself.
    is_first: bool,
    /// Actions on all events that match.
    bulk: Vec<(&'static str, String)>,
}

/// The values of the filter form.
struct EventFields {
    source: Option<String>,
    tenant: Option<String>,
    kind: Option<String>,
    status: Option<String>,
    q: Option<String>,
    since: Option<String>,
    until: Option<String>,
    unfinished_for: Option<String>,
    is_copied: bool,
}

/// `GET /events`.
pub(in crate::admin) async fn events<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    reader: PageReader,
    filters: Filters,
) -> Result<Page<Events>, Problem> {
    list(admin, reader, filters, "/events").await
}

/// `GET /review`: the events that wait for a decision.
pub(in crate::admin) async fn review<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    reader: PageReader,
    filters: Filters,
) -> Result<Page<Events>, Problem> {
    list(admin, reader, filters.with("status", "review"), "/review").await
}

async fn list<S: AdminStore>(
    admin: Arc<Admin<S>>,
    reader: PageReader,
    filters: Filters,
    path: &'static str,
) -> Result<Page<Events>, Problem> {
    let frame = reader.frame(&admin, path).await;
    let query = filters.query::<EventsQuery>()?;
    let caller = Extension(reader.caller()?);
    let Json(page) = api_events::list(State(admin), caller, query).await?;
    let acts: &[_] = match path {
        _ if !frame.may_operate || page.items.is_empty() => &[],
        "/review" => &[("Approve", "approve"), ("Reject", "reject")],
        _ => &[("Replay", "replay")],
    };
    let bulk = acts.iter().filter_map(|(name, act)| Some((*name, plans::link(act, &filters)?)));
    let page = Events {
        older: filters.older(&frame.base, path, page.next.as_deref()),
        frame,
        filters: EventFields {
            source: filters.get("source"),
            tenant: filters.get("tenant"),
            kind: filters.get("type"),
            status: filters.get("status"),
            q: filters.get("q"),
            since: filters.get("since"),
            until: filters.get("until"),
            unfinished_for: filters.get("unfinished_for"),
            is_copied: filters.get("copied").as_deref() == Some("true"),
        },
        searched_to: page.searched_to,
        items: page.items,
        statuses: STATUSES,
        is_review: path == "/review",
        is_first: filters.get("cursor").is_none(),
        bulk: bulk.collect(),
    };
    Ok(reader.page(page))
}

/// `GET /find`: redirects to the event, job, delivery or message with this id. Without one, the list of
/// events that contain the text.
pub(in crate::admin) async fn find<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    filters: Filters,
) -> Result<SeeOther, Problem> {
    let text = filters.get("q").unwrap_or_default();
    let text = text.trim();
    if let Ok(id) = text.parse::<Uuid>() {
        if let Some(job) = admin.store.job(JobId(id)).await? {
            return Ok(SeeOther(format!("/events/{}", job.event)));
        }
        if admin.store.delivery(DeliveryId(id)).await?.is_some() {
            return Ok(SeeOther(format!("/deliveries/{id}")));
        }
    }
    let by_id = match api_events::find(&*admin.store, text).await {
        Ok(event) => Some(format!("/events/{}", event.summary.id)),
        Err(_) => None,
    };
    if let Some(path) = by_id {
        return Ok(SeeOther(path));
    }
    let is_request = text.parse::<Uuid>().is_ok();
    if is_request && let [event] = admin.store.events_traced_by(text).await?[..] {
        return Ok(SeeOther(format!("/events/{event}")));
    }
    if admin.store.message(text, None).await?.len() == 1 {
        return Ok(SeeOther(format!("/messages/{}", url_part(text))));
    }
    Ok(SeeOther(filters.with("q", text).link("/events")))
}
