//! Events, with their arrivals, attempts, actions and messages.

use std::net::IpAddr;

use hapax_core::delivery::{DeliveryId, DeliveryStatus};
use hapax_core::job::{HandlerName, JobId};
use hapax_core::store::{
    ActionNote, ArrivalNote, AttemptNote, Decision, DeliveryDetail, EventDetail, EventId,
    JobDetail, MessageNote, ReviewReason, Status,
};
use hapax_core::{EventKey, Timestamp};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::values::{DecisionWord, DeliveryStatusWord, ReviewReasonWord, StatusWord};
use super::{Attempt, Body, Job, Moment, Span};

/// The query of `GET /api/v1/events`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct EventsQuery {
    /// Only events of this tenant.
    pub(crate) tenant: Option<String>,
    /// Only events of this source.
    pub(crate) source: Option<String>,
    /// Only events of exactly this type.
    pub(crate) r#type: Option<String>,
    /// Only events in this status.
    #[param(value_type = Option<StatusWord>)]
    pub(crate) status: Option<Status>,
    /// Only events that this text finds. First come the events that have the text as an id (of the event, a
    /// job, a request, a message or a delivery), and events with this value in a field that their source
    /// names in `search`. Then come the events whose sender's id or body contains the text.
    pub(crate) q: Option<String>,
    /// Only events received at or after this time: RFC 3339, or a duration before now such as `1h`.
    #[param(value_type = Option<String>)]
    pub(crate) since: Option<Moment>,
    /// Only events received before this time: RFC 3339, or a duration before now such as `1h`.
    #[param(value_type = Option<String>)]
    pub(crate) until: Option<Moment>,
    /// Only unfinished events that were received at least this long ago.
    pub(crate) unfinished_for: Option<Span>,
    /// Only events that arrived more than once.
    #[serde(default)]
    pub(crate) copied: bool,
    /// `next` of the previous page.
    pub(crate) cursor: Option<String>,
    /// The most events of one page.
    #[param(minimum = 1, maximum = 500, default = 50)]
    pub(crate) limit: Option<usize>,
}

/// An event in a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct EventSummary {
    /// Hapax's id.
    #[schema(value_type = Uuid)]
    pub(crate) id: EventId,
    /// The sender's id.
    pub(crate) event_id: String,
    pub(crate) tenant: String,
    pub(crate) source: String,
    #[schema(required)]
    pub(crate) event_type: Option<String>,
    /// When it happened, by the sender's clock.
    #[schema(required)]
    pub(crate) occurred_at: Option<Timestamp>,
    /// When it first arrived.
    pub(crate) received_at: Timestamp,
    /// The first status that applies to any of its jobs.
    #[schema(value_type = StatusWord)]
    pub(crate) status: Status,
    /// Why it is or was in review.
    #[schema(required, value_type = Option<ReviewReasonWord>)]
    pub(crate) review: Option<ReviewReason>,
    /// How often it arrived, including the first time.
    pub(crate) arrival_count: u64,
    /// How many arrivals had other bytes.
    pub(crate) conflict_count: u64,
    /// When the last of its jobs ended.
    #[schema(required)]
    pub(crate) processed_at: Option<Timestamp>,
    /// The result of its first job.
    #[schema(required)]
    pub(crate) result: Option<String>,
    /// The id that a suspected replay came under. That id is not signed, so it stays free for the event that
    /// it belongs to, and `event_id` is derived from it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) came_under: Option<String>,
}

impl From<hapax_core::store::EventSummary> for EventSummary {
    fn from(summary: hapax_core::store::EventSummary) -> Self {
        let came_under = match summary.review {
            Some(ReviewReason::Replay) => EventKey::replayed_id(&summary.event_id),
            Some(ReviewReason::Late | ReviewReason::Conflict) | None => None,
        };
        Self {
            came_under: came_under.map(str::to_owned),
            id: summary.id,
            event_id: summary.event_id,
            tenant: summary.tenant,
            source: summary.source,
            event_type: summary.event_type,
            occurred_at: summary.occurred_at,
            received_at: summary.received_at,
            status: summary.status,
            review: summary.review,
            arrival_count: summary.arrivals,
            conflict_count: summary.conflicts,
            processed_at: summary.processed_at,
            result: summary.result,
        }
    }
}

/// An event with everything that is stored about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Event {
    #[serde(flatten)]
    pub(crate) summary: EventSummary,
    /// The first arrival, the newest few of the others, and every stored conflict, in the order of arrival.
    pub(crate) arrivals: Vec<Arrival>,
    pub(crate) jobs: Vec<Job>,
    /// The attempts of all jobs that ended, oldest first.
    pub(crate) attempts: Vec<EventAttempt>,
    /// The messages that its handlers published.
    pub(crate) messages: Vec<PublishedMessage>,
    /// The actions of operators, oldest first.
    pub(crate) actions: Vec<Action>,
    /// Name and value of each header, in their order.
    #[schema(value_type = Vec<Vec<String>>)]
    pub(crate) headers: Vec<(String, String)>,
    #[serde(flatten)]
    pub(crate) body: Body,
    /// The values of the event that its source names in `search`, and how many events have the same. A value that is
    /// redacted for the caller is left out.
    #[serde(default)]
    pub(crate) same_values: Vec<SameValue>,
}

/// A value of an event in a field that its source names in `search`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct SameValue {
    /// The field, as a JSON Pointer.
    pub(crate) field: String,
    /// The value.
    pub(crate) value: String,
    /// How many events of the source have this value in this field, including this one. The count stops at 100.
    pub(crate) event_count: u64,
    /// Whether the count stopped, so that there may be more events.
    pub(crate) has_more: bool,
}

impl SameValue {
    /// The last key of the field, such as `customer` of `/data/object/customer`. A number alone says nothing, so the
    /// whole pointer stands for it.
    pub(crate) fn name(&self) -> &str {
        let last = self.field.rsplit('/').next().unwrap_or_default();
        match last.is_empty() || last.bytes().all(|byte| byte.is_ascii_digit()) {
            true => &self.field,
            false => last,
        }
    }
}

impl From<EventDetail> for Event {
    fn from(detail: EventDetail) -> Self {
        let mut attempts: Vec<_> = detail.jobs.iter().flat_map(attempts_of).collect();
        attempts.sort_by_key(|attempt| attempt.attempt.started_at);
        Self {
            summary: detail.summary.into(),
            arrivals: detail.arrivals.into_iter().map(Arrival::from).collect(),
            jobs: detail.jobs.into_iter().map(Job::from).collect(),
            attempts,
            messages: detail.messages.into_iter().map(PublishedMessage::from).collect(),
            actions: detail.actions.into_iter().map(Action::from).collect(),
            headers: header_pairs(&detail.headers),
            body: Body::of(&detail.body),
            same_values: Vec::new(),
        }
    }
}

/// Splits `name: value` lines into pairs.
pub(super) fn header_pairs(lines: &str) -> Vec<(String, String)> {
    let pairs = lines.lines().filter_map(|line| line.split_once(": "));
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// One arrival of an event. A conflict has its own bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Arrival {
    #[schema(value_type = DecisionWord)]
    pub(crate) decision: Decision,
    pub(crate) received_at: Timestamp,
    /// The id of the request that was answered.
    pub(crate) request_id: Uuid,
    /// The client's address.
    #[schema(required, value_type = Option<String>)]
    pub(crate) remote: Option<IpAddr>,
    /// The provider whose scheme verified it, or `custom`; null if that is not recorded.
    #[serde(default)]
    #[schema(required)]
    pub(crate) scheme: Option<String>,
    /// The secret that verified it, as the config refers to it, such as `env:STRIPE_SECRET`; null if that is not
    /// recorded.
    #[serde(default)]
    #[schema(required)]
    pub(crate) secret: Option<String>,
    /// The signed timestamp.
    #[schema(required)]
    pub(crate) signed_at: Option<Timestamp>,
    #[serde(flatten)]
    pub(crate) body: Body,
}

impl From<ArrivalNote> for Arrival {
    fn from(note: ArrivalNote) -> Self {
        let (scheme, secret) = note.verifier.map(|by| (by.scheme, by.secret)).unzip();
        Self {
            decision: note.decision,
            received_at: note.received_at,
            request_id: note.request_id,
            remote: note.remote,
            scheme,
            secret,
            signed_at: note.signed_at,
            body: note.body.as_deref().map(Body::of).unwrap_or_default(),
        }
    }
}

/// An attempt, in the list over all jobs of an event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct EventAttempt {
    #[schema(value_type = Uuid)]
    pub(crate) job: JobId,
    #[schema(value_type = String)]
    pub(crate) handler: HandlerName,
    #[serde(flatten)]
    pub(crate) attempt: Attempt,
    /// How long the attempt took; absent for a lost attempt whose end is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) took_ms: Option<u64>,
}

fn attempts_of(job: &JobDetail) -> impl Iterator<Item = EventAttempt> + '_ {
    let took_ms = |note: &AttemptNote| {
        let took = note.ended_at?.duration_since(note.started_at);
        u64::try_from(took.as_millis()).ok()
    };
    job.attempts.iter().map(move |note| EventAttempt {
        job: job.id,
        handler: job.handler.clone(),
        took_ms: took_ms(note),
        attempt: note.clone().into(),
    })
}

/// An action of an operator on an event or a delivery.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Action {
    /// `replay`, `approve`, `reject`, `discard` or `cancel`.
    pub(crate) action: String,
    /// The name of the token, or `loopback`.
    pub(crate) who: String,
    #[schema(required)]
    pub(crate) reason: Option<String>,
    pub(crate) at: Timestamp,
}

impl From<ActionNote> for Action {
    fn from(ActionNote { action, who, reason, at }: ActionNote) -> Self {
        Self { action, who, reason, at }
    }
}

/// A message that a handler of an event published.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct PublishedMessage {
    pub(crate) id: String,
    /// Its owner.
    pub(crate) tenant: String,
    pub(crate) r#type: String,
    pub(crate) created_at: Timestamp,
    /// The first that applies over its deliveries: `dead`, `failed`, `held`, `sending`, `waiting`,
    /// `delivered`, `cancelled`; `none` without deliveries.
    pub(crate) status: String,
    /// The deliveries of the message and their states; at most the first deliveries of the first
    /// messages.
    #[serde(default)]
    pub(crate) deliveries: Vec<PublishedDelivery>,
    /// Whether the message has deliveries that are not shown here.
    #[serde(default)]
    pub(crate) has_more_deliveries: bool,
}

/// A delivery of a message that a handler of an event published.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct PublishedDelivery {
    #[schema(value_type = Uuid)]
    pub(crate) id: DeliveryId,
    pub(crate) url: String,
    #[schema(value_type = DeliveryStatusWord)]
    pub(crate) status: DeliveryStatus,
    /// Why the delivery has not succeeded.
    #[schema(required)]
    pub(crate) reason: Option<String>,
    pub(crate) attempt: u32,
    #[schema(required)]
    pub(crate) finished_at: Option<Timestamp>,
    /// The actions of operators on it and on its message, oldest first.
    #[serde(default)]
    pub(crate) actions: Vec<Action>,
}

impl From<DeliveryDetail> for PublishedDelivery {
    fn from(delivery: DeliveryDetail) -> Self {
        Self {
            id: delivery.id,
            url: delivery.url,
            status: delivery.status,
            reason: delivery.reason,
            attempt: delivery.attempt,
            finished_at: delivery.finished_at,
            actions: delivery.actions.into_iter().map(Action::from).collect(),
        }
    }
}

impl From<MessageNote> for PublishedMessage {
    fn from(MessageNote { id, tenant, r#type, created_at, status }: MessageNote) -> Self {
        let (status, deliveries) = (status.as_str().to_owned(), Vec::new());
        Self { id, tenant, r#type, created_at, status, deliveries, has_more_deliveries: false }
    }
}
