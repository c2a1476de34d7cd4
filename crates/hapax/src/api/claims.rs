//! The requests of pull workers, and the answers to them.

use hapax_core::Timestamp;
use hapax_core::job::{Fence, JobId, Phase};
use hapax_core::message::MessageData;
use hapax_core::store::{self, EventId};
use hapax_engine::Pulled;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::events::header_pairs;
use super::values::PhaseWord;
use super::{Body, RetryIn, Span};

/// The body of `POST /api/v1/claims`.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ClaimRequest {
    pub(crate) source: String,
    pub(crate) handler: String,
    /// The most jobs to claim.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 100, default = 1)]
    pub(crate) limit: Option<usize>,
    /// How long to wait for a job, at most 60 s.
    #[serde(default)]
    pub(crate) wait: Option<Span>,
    /// Recorded with the attempt, after the name of the token.
    #[serde(default)]
    pub(crate) worker: Option<String>,
}

/// The claimed jobs.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct Claimed {
    pub(crate) items: Vec<Claim>,
}

/// A claimed job.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct Claim {
    #[schema(value_type = Uuid)]
    pub(crate) job: JobId,
    #[schema(value_type = i64)]
    pub(crate) fence: Fence,
    pub(crate) attempt: u32,
    pub(crate) run: u32,
    pub(crate) idempotency_key: String,
    pub(crate) leased_until: Timestamp,
    pub(crate) event: ClaimedEvent,
    /// The current object exactly as it was fetched, if the handler has `refetch`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub(crate) current: Option<Box<RawValue>>,
}

/// The event of a claimed job.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct ClaimedEvent {
    /// Hapax's id.
    #[schema(value_type = Uuid)]
    pub(crate) id: EventId,
    /// The sender's id.
    pub(crate) event_id: String,
    pub(crate) tenant: String,
    pub(crate) source: String,
    #[schema(required)]
    pub(crate) event_type: Option<String>,
    pub(crate) received_at: Timestamp,
    #[schema(required)]
    pub(crate) occurred_at: Option<Timestamp>,
    #[schema(required)]
    pub(crate) resource: Option<String>,
    /// Name and value of each header, in their order.
    #[schema(value_type = Vec<Vec<String>>)]
    pub(crate) headers: Vec<(String, String)>,
    #[serde(flatten)]
    pub(crate) body: Body,
}

impl From<Pulled> for Claim {
    fn from(Pulled { claim, current }: Pulled) -> Self {
        let event = claim.event;
        Self {
            job: claim.job,
            fence: claim.fence,
            attempt: claim.attempt,
            run: claim.run,
            idempotency_key: claim.idempotency_key,
            leased_until: claim.leased_until,
            event: ClaimedEvent {
                id: event.id,
                event_id: event.key.event_id.to_string(),
                tenant: event.key.tenant.to_string(),
                source: event.key.source.to_string(),
                event_type: event.event_type,
                received_at: event.received_at,
                occurred_at: event.occurred_at,
                resource: event.resource,
                headers: header_pairs(&event.headers),
                body: Body::of(&event.body),
            },
            // The fetch checked that it is JSON.
            current: current.and_then(|current| RawValue::from_string(current.to_string()).ok()),
        }
    }
}

/// The body of `renew`.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RenewRequest {
    #[schema(value_type = i64)]
    pub(crate) fence: Fence,
}

/// The body of `complete`.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CompleteRequest {
    #[schema(value_type = i64)]
    pub(crate) fence: Fence,
    /// At most 200 characters are stored.
    #[serde(default)]
    pub(crate) result: Option<String>,
    /// Messages that are published in the same commit.
    #[serde(default)]
    #[schema(max_items = 100)]
    pub(crate) publish: Vec<NewMessage>,
}

/// A message to publish.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewMessage {
    /// Endpoints choose messages by their type, such as `invoice.paid`.
    pub(crate) r#type: String,
    /// Any JSON.
    #[schema(value_type = Value)]
    pub(crate) data: MessageData,
    /// The order key: messages with the same key are numbered in the order of their commits.
    #[serde(default)]
    pub(crate) key: Option<String>,
    /// The tenant; without one, the tenant of the event.
    #[serde(default)]
    pub(crate) tenant: Option<String>,
    /// The same id twice is one message.
    #[serde(default)]
    pub(crate) id: Option<String>,
    /// The version of the publisher's API that `data` follows.
    #[serde(default)]
    pub(crate) api_version: Option<String>,
}

impl From<NewMessage> for store::NewMessage {
    fn from(message: NewMessage) -> Self {
        let NewMessage { r#type, data, key, tenant, id, api_version } = message;
        Self { r#type, data, key, tenant, id, api_version }
    }
}

/// The body of `fail`.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct FailRequest {
    #[schema(value_type = i64)]
    pub(crate) fence: Fence,
    #[serde(default)]
    pub(crate) error: Option<String>,
    /// When to retry; without it the retry schedule decides.
    #[serde(default)]
    pub(crate) retry_in: Option<RetryIn>,
}

/// A job after it was renewed or settled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Settled {
    #[schema(value_type = Uuid)]
    pub(crate) job: JobId,
    #[schema(value_type = i64)]
    pub(crate) fence: Fence,
    #[schema(value_type = PhaseWord)]
    pub(crate) status: Phase,
    /// When the lease ends, or when the job is due again.
    #[schema(required)]
    pub(crate) due_at: Option<Timestamp>,
}
