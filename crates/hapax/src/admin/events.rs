//! The event list and the single event.

use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};
use hapax_core::store::{
    DeliveryFilter, EventDetail, EventFilter, EventId, EventName, HandlerRef, Inspect, Lookup,
    ReadBound,
};
use hapax_core::{SourceName, Tenant, Timestamp};
use jiff::SignedDuration;
use uuid::Uuid;

use super::auth::Caller;
use super::extract::{PathId, QueryParams, cursor, limit};
use super::handlers::PausedHandlers;
use super::problem::Problem;
use super::text_search::text_search;
use super::{Admin, AdminStore};
use crate::api::{
    Event, EventSummary, EventsQuery, List, Moment, PublishedDelivery, SameValue, Span,
};

/// Messages of an event whose deliveries are shown with it.
const MESSAGES_FOLLOWED_MAX: usize = 10;

/// The most events with the same value that are counted.
const SAME_VALUES_MAX: usize = 100;

/// Deliveries of one message that are shown with its event.
const DELIVERIES_SHOWN_MAX: usize = 20;

pub(super) async fn list<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    QueryParams(query): QueryParams<EventsQuery>,
) -> Result<Json<List<EventSummary>>, Problem> {
    let limit = limit(query.limit)?;
    let text = text_search(&admin, &caller, query.q).await?;
    let filter = EventFilter {
        tenant: query.tenant.map(Tenant::new),
        source: query.source.map(SourceName::new),
        event_type: query.r#type,
        status: query.status,
        text,
        since: query.since.map(|moment| instant((admin.now)(), moment)),
        until: query.until.map(|moment| instant((admin.now)(), moment)),
        unfinished_since: query.unfinished_for.map(|span| ago((admin.now)(), span)),
        has_copies: query.copied,
        before: cursor(query.cursor)?,
        limit,
        bound: ReadBound::default(),
    };
    admin.store.flush_copies().await;
    let page = admin.store.events(filter).await?;
    Ok(Json(page.into()))
}

/// The instant that a query names.
pub(super) fn instant(now: Timestamp, moment: Moment) -> Timestamp {
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

pub(super) async fn show<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    PathId(name): PathId,
) -> Result<Json<Event>, Problem> {
    admin.store.flush_copies().await;
    let mut event = Event::from(find(&*admin.store, &name).await?);
    if !caller.sees_payloads() {
        admin.redactions.mask(&mut event);
    }
    event.same_values = same_values(&admin, &caller, &event).await?;
    let paused = PausedHandlers::of(&*admin.store).await?;
    for job in event.jobs.iter_mut().filter(|job| job.status.is_open()) {
        let source = SourceName::new(&job.source);
        let handler = HandlerRef { source, handler: job.handler.clone() };
        job.handler_paused_at = paused.get(&handler).map(|pause| pause.since);
    }
    for message in event.messages.iter_mut().skip(MESSAGES_FOLLOWED_MAX) {
        message.has_more_deliveries = message.status != "none";
    }
    for message in event.messages.iter_mut().take(MESSAGES_FOLLOWED_MAX) {
        let filter = DeliveryFilter {
            message: Some(message.id.clone()),
            tenant: Some(Tenant::new(&message.tenant)),
            limit: DELIVERIES_SHOWN_MAX,
            ..DeliveryFilter::default()
        };
        let page = admin.store.deliveries(filter).await?;
        message.has_more_deliveries = page.next.is_some();
        message.deliveries = page.items.into_iter().map(PublishedDelivery::from).collect();
    }
    Ok(Json(event))
}

/// The values by which events of the same customer, order or the like are found. The body is the one that the caller
/// sees, so a masked value is never read; a field that is masked is left out.
async fn same_values<S: AdminStore>(
    admin: &Admin<S>,
    caller: &Caller,
    event: &Event,
) -> Result<Vec<SameValue>, Problem> {
    let Some(body) = &event.body.body else { return Ok(Vec::new()) };
    let source = SourceName::new(&event.summary.source);
    let fields = admin.search_fields.load();
    let may_see = |field| caller.sees_payloads() || admin.redactions.shows(&source, field);
    let mut same = Vec::new();
    for found in fields.found_in(&source, body.as_bytes()) {
        if !may_see(found.field) {
            continue;
        }
        let count = admin.store.count_events_with(found.hash, SAME_VALUES_MAX + 1).await?;
        same.push(SameValue {
            field: found.field.as_str().to_owned(),
            value: found.text,
            // The event itself may not be indexed yet.
            event_count: count.clamp(1, SAME_VALUES_MAX) as u64,
            has_more: count > SAME_VALUES_MAX,
        });
    }
    Ok(same)
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
