//! The event list and the single event.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use hapax_core::job::{HandlerName, JobId};
use hapax_core::store::{
    ActionNote, ArrivalNote, AttemptNote, Cursor, EventDetail, EventFilter, EventId, EventName,
    EventSummary, Inspect, JobDetail, Lookup, MessageNote, ReviewReason, Status,
};
use hapax_core::{EventKey, SourceName, Tenant, Timestamp};
use jiff::SignedDuration;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::extract::{Moment, PathId, QueryParams, Span, cursor, limit};
use super::problem::Problem;
use super::{Admin, AdminStore};

/// The query of `GET /api/v1/events`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ListQuery {
    tenant: Option<String>,
    source: Option<String>,
    r#type: Option<String>,
    status: Option<Status>,
    q: Option<String>,
    since: Option<Moment>,
    until: Option<Moment>,
    unfinished_for: Option<Span>,
    cursor: Option<String>,
    limit: Option<usize>,
}

#[derive(Debug, Serialize)]
pub(super) struct List {
    items: Vec<ShownSummary>,
    next: Option<String>,
}

pub(super) async fn list<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    QueryParams(query): QueryParams<ListQuery>,
) -> Result<Json<List>, Problem> {
    let limit = limit(query.limit)?;
    let filter = EventFilter {
        tenant: query.tenant.map(Tenant::new),
        source: query.source.map(SourceName::new),
        event_type: query.r#type,
        status: query.status,
        text: query.q.filter(|text| !text.is_empty()),
        since: query.since.map(|moment| instant((admin.now)(), moment)),
        until: query.until.map(|moment| instant((admin.now)(), moment)),
        unfinished_since: query.unfinished_for.map(|span| ago((admin.now)(), span)),
        before: cursor(query.cursor)?,
        limit,
    };
    admin.store.flush_copies().await;
    let page = admin.store.events(filter).await?;
    let next = page.next.map(|Cursor(next)| next.to_string());
    Ok(Json(List { items: page.items.into_iter().map(ShownSummary::of).collect(), next }))
}

/// An event in a list or alone.
#[derive(Debug, Serialize)]
struct ShownSummary {
    #[serde(flatten)]
    summary: EventSummary,
    /// The id that a suspected replay came under; the event's own is derived from it.
    #[serde(skip_serializing_if = "Option::is_none")]
    came_under: Option<String>,
}

impl ShownSummary {
    fn of(summary: EventSummary) -> Self {
        let came_under = match summary.review {
            Some(ReviewReason::Replay) => EventKey::replayed_id(&summary.event_id),
            Some(ReviewReason::Late | ReviewReason::Conflict) | None => None,
        };
        Self { came_under: came_under.map(str::to_owned), summary }
    }
}

fn instant(now: Timestamp, moment: Moment) -> Timestamp {
    match moment {
        Moment::At(at) => at,
        Moment::Ago(span) => ago(now, span),
    }
}

/// The time that lies `span` before `now`.
pub(super) fn ago(now: Timestamp, Span(span): Span) -> Timestamp {
    let span = SignedDuration::try_from(span).ok();
    span.and_then(|span| now.checked_sub(span).ok()).unwrap_or(Timestamp::MIN)
}

/// `GET /api/v1/events/{id}`.
#[derive(Debug, Serialize)]
pub(super) struct Shown {
    #[serde(flatten)]
    summary: ShownSummary,
    arrivals: Vec<ShownArrival>,
    jobs: Vec<JobDetail>,
    attempts: Vec<ShownAttempt>,
    messages: Vec<MessageNote>,
    actions: Vec<ActionNote>,
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

/// An attempt, in the list over all jobs of an event.
#[derive(Debug, Serialize)]
struct ShownAttempt {
    job: JobId,
    handler: HandlerName,
    #[serde(flatten)]
    note: AttemptNote,
    #[serde(skip_serializing_if = "Option::is_none")]
    took_ms: Option<u64>,
}

/// A body: text if it is UTF-8, else base64.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ShownBody {
    Body(String),
    BodyBase64(String),
}

impl ShownBody {
    pub(super) fn of(bytes: &[u8]) -> Self {
        match std::str::from_utf8(bytes) {
            Ok(text) => Self::Body(text.to_owned()),
            Err(_) => Self::BodyBase64(BASE64_STANDARD.encode(bytes)),
        }
    }
}

pub(super) async fn show<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    PathId(name): PathId,
) -> Result<Json<Shown>, Problem> {
    admin.store.flush_copies().await;
    find(&*admin.store, &name).await.map(|detail| Json(shown(detail)))
}

/// The event with this id: Hapax's, or the sender's if only one event has it.
pub(super) async fn find<S: Inspect>(store: &S, name: &str) -> Result<EventDetail, Problem> {
    let theirs = EventName::Theirs(name.into());
    let found = match name.parse::<Uuid>() {
        // A sender may use UUIDs too, so Hapax's ids are looked up first.
        Ok(ours) => match store.event(&EventName::Ours(EventId(ours))).await? {
            Lookup::None => store.event(&theirs).await?,
            found @ (Lookup::One(_) | Lookup::Ambiguous(_)) => found,
        },
        Err(_) => store.event(&theirs).await?,
    };
    match found {
        Lookup::One(detail) => Ok(detail),
        Lookup::None => Err(Problem::not_found("no event has that id")),
        Lookup::Ambiguous(candidates) => Err(Problem::ambiguous(candidates)),
    }
}

/// Splits `name: value` lines into pairs.
pub(super) fn header_pairs(lines: &str) -> Vec<(String, String)> {
    let pairs = lines.lines().filter_map(|line| line.split_once(": "));
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

fn shown(detail: EventDetail) -> Shown {
    let arrival = |note: ArrivalNote| {
        let body = note.body.as_deref().map(ShownBody::of);
        ShownArrival { note, body }
    };
    let attempts = detail.jobs.iter().flat_map(|job| {
        let of = |note: &AttemptNote| ShownAttempt {
            job: job.id,
            handler: job.handler.clone(),
            took_ms: note.ended_at.and_then(|ended| {
                u64::try_from(ended.duration_since(note.started_at).as_millis()).ok()
            }),
            note: note.clone(),
        };
        job.attempts.iter().map(of)
    });
    let mut attempts: Vec<_> = attempts.collect();
    attempts.sort_by_key(|attempt| attempt.note.started_at);
    Shown {
        summary: ShownSummary::of(detail.summary),
        arrivals: detail.arrivals.into_iter().map(arrival).collect(),
        jobs: detail.jobs,
        attempts,
        messages: detail.messages,
        actions: detail.actions,
        headers: header_pairs(&detail.headers),
        body: ShownBody::of(&detail.body),
    }
}
