//! The event list and the single event.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use hapax_core::store::{
    ArrivalNote, Cursor, EventDetail, EventFilter, EventId, EventName, EventSummary, Inspect,
    Lookup, Status, Store,
};
use hapax_core::{SourceName, Tenant, Timestamp};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::Admin;
use super::problem::Problem;

const LIMIT_DEFAULT: usize = 50;
const LIMIT_MAX: usize = 500;

/// The query of `GET /api/v1/events`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ListQuery {
    tenant: Option<String>,
    source: Option<String>,
    r#type: Option<String>,
    status: Option<Status>,
    q: Option<String>,
    since: Option<Timestamp>,
    until: Option<Timestamp>,
    cursor: Option<u64>,
    limit: Option<usize>,
}

#[derive(Debug, Serialize)]
pub(super) struct List {
    items: Vec<EventSummary>,
    next: Option<String>,
}

pub(super) async fn list<S: Store + Inspect>(
    State(admin): State<Arc<Admin<S>>>,
    query: Result<Query<ListQuery>, QueryRejection>,
) -> Result<Json<List>, Problem> {
    let Query(query) = query.map_err(|error| Problem::bad_request(&error.body_text()))?;
    let limit = query.limit.unwrap_or(LIMIT_DEFAULT);
    if !(1..=LIMIT_MAX).contains(&limit) {
        return Err(Problem::bad_request("limit is a number from 1 to 500"));
    }
    let filter = EventFilter {
        tenant: query.tenant.map(Tenant::new),
        source: query.source.map(SourceName::new),
        event_type: query.r#type,
        status: query.status,
        text: query.q.filter(|text| !text.is_empty()),
        since: query.since,
        until: query.until,
        before: query.cursor.map(Cursor),
        limit,
    };
    let page = admin.store.events(filter).await?;
    let next = page.next.map(|Cursor(next)| next.to_string());
    Ok(Json(List { items: page.items, next }))
}

/// `GET /api/v1/events/{id}`.
#[derive(Debug, Serialize)]
pub(super) struct Shown {
    #[serde(flatten)]
    summary: EventSummary,
    arrivals: Vec<ShownArrival>,
    headers: Vec<(String, String)>,
    #[serde(flatten)]
    body: ShownBody,
}

#[derive(Debug, Serialize)]
struct ShownArrival {
    #[serde(flatten)]
    note: ArrivalNote,
    #[serde(flatten)]
    body: Option<ShownBody>,
}

/// Bytes as text where they are text.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum ShownBody {
    Body(String),
    BodyBase64(String),
}

impl ShownBody {
    fn of(bytes: &[u8]) -> Self {
        match std::str::from_utf8(bytes) {
            Ok(text) => Self::Body(text.to_owned()),
            Err(_) => Self::BodyBase64(BASE64_STANDARD.encode(bytes)),
        }
    }
}

pub(super) async fn show<S: Store + Inspect>(
    State(admin): State<Arc<Admin<S>>>,
    Path(name): Path<String>,
) -> Result<Json<Shown>, Problem> {
    let theirs = EventName::Theirs(name.as_str().into());
    let found = match name.parse::<Uuid>() {
        // A sender may use UUIDs too: ours first, then theirs.
        Ok(ours) => match admin.store.event(&EventName::Ours(EventId(ours))).await? {
            Lookup::None => admin.store.event(&theirs).await?,
            found => found,
        },
        Err(_) => admin.store.event(&theirs).await?,
    };
    match found {
        Lookup::One(detail) => Ok(Json(shown(detail))),
        Lookup::None => Err(Problem::not_found("no event has that id")),
        Lookup::Ambiguous(candidates) => Err(Problem::ambiguous(candidates)),
    }
}

fn shown(detail: EventDetail) -> Shown {
    let headers = detail
        .headers
        .lines()
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    let arrival = |note: ArrivalNote| {
        let body = note.body.as_deref().map(ShownBody::of);
        ShownArrival { note, body }
    };
    Shown {
        summary: detail.summary,
        arrivals: detail.arrivals.into_iter().map(arrival).collect(),
        headers,
        body: ShownBody::of(&detail.body),
    }
}
