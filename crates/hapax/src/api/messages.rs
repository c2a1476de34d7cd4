//! Messages, their deliveries, and the attempts of each.

use hapax_core::Timestamp;
use hapax_core::delivery::{DeliveryId, DeliveryStatus};
use hapax_core::endpoint::EndpointId;
use hapax_core::message::{MessageData, NewMessage};
use hapax_core::store::{self, DeliveryDetail, MessageDetail};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::events::Action;
use super::values::DeliveryStatusWord;
use super::{Body, Moment};

/// The body of `POST /api/v1/messages`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct PublishRequest {
    /// The type of the message, such as `invoice.paid`.
    pub(crate) r#type: String,
    /// Any JSON. Endpoints get the content as it is given here, byte for byte.
    #[schema(value_type = Object)]
    pub(crate) data: MessageData,
    /// 1 to 128 of A-Z, a-z, 0-9, `_` and `-`. The same id twice is one message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) id: Option<String>,
    /// The order key: messages with the same key are numbered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) key: Option<String>,
    /// The owner; `default` if it is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tenant: Option<String>,
    /// The version of your API that `data` follows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) api_version: Option<String>,
}

impl From<PublishRequest> for NewMessage {
    fn from(request: PublishRequest) -> Self {
        let PublishRequest { r#type, data, id, key, tenant, api_version } = request;
        Self { r#type, data, key, tenant, id, api_version }
    }
}

/// The answer to `POST /api/v1/messages`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Published {
    pub(crate) id: String,
    /// How many endpoints get the message.
    pub(crate) deliveries: u64,
    /// True if the same message was published before.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) duplicate: bool,
}

/// The query of `GET /api/v1/messages`.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct MessagesQuery {
    /// Only messages of this tenant.
    pub(crate) tenant: Option<String>,
    /// Only messages of exactly this type.
    pub(crate) r#type: Option<String>,
    /// Only messages with exactly this order key.
    pub(crate) key: Option<String>,
    /// Only messages in this status: that of a delivery, or `none` for messages without one.
    pub(crate) status: Option<String>,
    /// Only messages published at or after this time: RFC 3339, or a duration before now such as `1h`.
    #[param(value_type = Option<String>)]
    pub(crate) since: Option<Moment>,
    /// Only messages published before this time.
    #[param(value_type = Option<String>)]
    pub(crate) until: Option<Moment>,
    /// `next` of the previous page.
    pub(crate) cursor: Option<String>,
    /// The most messages of one page.
    #[param(minimum = 1, maximum = 500, default = 50)]
    pub(crate) limit: Option<usize>,
}

/// The query of routes that name a message by its id.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct MessageQuery {
    /// The owner, where messages of several tenants have this id.
    pub(crate) tenant: Option<String>,
}

/// A message in a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct MessageSummary {
    pub(crate) id: String,
    pub(crate) tenant: String,
    pub(crate) r#type: String,
    #[schema(required)]
    pub(crate) key: Option<String>,
    /// Its number among the messages with the same key.
    #[schema(required)]
    pub(crate) sequence: Option<u64>,
    #[schema(required)]
    pub(crate) api_version: Option<String>,
    pub(crate) created_at: Timestamp,
    /// The first that applies over its deliveries: `dead`, `failed`, `held`, `sending`, `waiting`,
    /// `delivered`, `cancelled`; `none` without deliveries.
    pub(crate) status: String,
    pub(crate) delivery_count: u64,
}

impl MessageSummary {
    /// Its type. Templates cannot name the field, which is a keyword.
    pub(crate) fn kind(&self) -> &str {
        &self.r#type
    }
}

impl From<store::MessageSummary> for MessageSummary {
    fn from(message: store::MessageSummary) -> Self {
        Self {
            id: message.id,
            tenant: message.tenant,
            r#type: message.r#type,
            key: message.key,
            sequence: message.sequence,
            api_version: message.api_version,
            created_at: message.created_at,
            status: message.status.as_str().to_owned(),
            delivery_count: message.deliveries,
        }
    }
}

/// A message with its deliveries and every attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Message {
    #[serde(flatten)]
    pub(crate) summary: MessageSummary,
    /// The bytes that endpoints get.
    #[serde(flatten)]
    pub(crate) body: Body,
    pub(crate) deliveries: Vec<Delivery>,
}

impl From<MessageDetail> for Message {
    fn from(message: MessageDetail) -> Self {
        Self {
            summary: message.summary.into(),
            body: Body::of(&message.body),
            deliveries: message.deliveries.into_iter().map(Delivery::from).collect(),
        }
    }
}

/// The query of `GET /api/v1/deliveries`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct DeliveriesQuery {
    /// Only deliveries to this endpoint.
    #[param(value_type = Option<Uuid>)]
    pub(crate) endpoint: Option<EndpointId>,
    /// Only deliveries of the message with this id.
    pub(crate) message: Option<String>,
    /// Only deliveries of this tenant.
    pub(crate) tenant: Option<String>,
    /// Only deliveries in this status.
    #[param(value_type = Option<DeliveryStatusWord>)]
    pub(crate) status: Option<DeliveryStatus>,
    /// Only deliveries of messages with exactly this order key.
    pub(crate) key: Option<String>,
    /// Only deliveries published at or after this time: RFC 3339, or a duration before now such as `1h`.
    #[param(value_type = Option<String>)]
    pub(crate) since: Option<Moment>,
    /// Only deliveries published before this time.
    #[param(value_type = Option<String>)]
    pub(crate) until: Option<Moment>,
    /// `next` of the previous page.
    pub(crate) cursor: Option<String>,
    /// The most deliveries of one page.
    #[param(minimum = 1, maximum = 500, default = 50)]
    pub(crate) limit: Option<usize>,
}

/// One message for one endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Delivery {
    /// Hapax's id.
    #[schema(value_type = Uuid)]
    pub(crate) id: DeliveryId,
    /// The id of the message: `webhook-id`.
    pub(crate) message: String,
    pub(crate) r#type: String,
    #[schema(required)]
    pub(crate) key: Option<String>,
    pub(crate) tenant: String,
    #[schema(value_type = Uuid)]
    pub(crate) endpoint: EndpointId,
    /// The address of the endpoint, as it is now.
    pub(crate) url: String,
    #[schema(value_type = DeliveryStatusWord)]
    pub(crate) status: DeliveryStatus,
    /// Why the delivery has not succeeded.
    #[schema(required)]
    pub(crate) reason: Option<String>,
    /// Attempts so far.
    pub(crate) attempt: u32,
    pub(crate) created_at: Timestamp,
    /// When the next attempt is due.
    #[schema(required)]
    pub(crate) due_at: Option<Timestamp>,
    #[schema(required)]
    pub(crate) finished_at: Option<Timestamp>,
    /// The attempts that ended, oldest first.
    pub(crate) attempts: Vec<DeliveryAttempt>,
    /// The actions of operators on it and on its message, oldest first.
    #[serde(default)]
    pub(crate) actions: Vec<Action>,
}

impl Delivery {
    /// Its type. Templates cannot name the field, which is a keyword.
    pub(crate) fn kind(&self) -> &str {
        &self.r#type
    }
}

impl From<DeliveryDetail> for Delivery {
    fn from(delivery: DeliveryDetail) -> Self {
        Self {
            id: delivery.id,
            message: delivery.message,
            r#type: delivery.message_type,
            key: delivery.key,
            tenant: delivery.tenant,
            endpoint: delivery.endpoint,
            url: delivery.url,
            status: delivery.status,
            reason: delivery.reason,
            attempt: delivery.attempt,
            created_at: delivery.created_at,
            due_at: delivery.due_at,
            finished_at: delivery.finished_at,
            attempts: delivery.attempts.into_iter().map(DeliveryAttempt::from).collect(),
            actions: delivery.actions.into_iter().map(Action::from).collect(),
        }
    }
}

/// One attempt that ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct DeliveryAttempt {
    /// The number of the attempt.
    pub(crate) n: u32,
    pub(crate) at: Timestamp,
    /// Absent if the outcome was lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) took_ms: Option<u64>,
    /// The HTTP status of the answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) status: Option<u16>,
    /// Why the attempt failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
    /// The first KiB of the answer's body.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) answer: Option<String>,
    /// The node that made it.
    pub(crate) node: String,
}

impl From<store::DeliveryAttempt> for DeliveryAttempt {
    fn from(attempt: store::DeliveryAttempt) -> Self {
        let store::DeliveryAttempt { n, at, took_ms, status, error, answer, node } = attempt;
        Self { n, at, took_ms, status, error, answer, node }
    }
}

/// The answer to an action on deliveries: the ids of the changed deliveries.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct ChangedDeliveries {
    #[schema(value_type = Vec<Uuid>)]
    pub(crate) deliveries: Vec<DeliveryId>,
}

/// The answer to a replay of one delivery.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct ReplayedDelivery {
    #[schema(value_type = Uuid)]
    pub(crate) id: DeliveryId,
    /// `due` if it is attempted now; `already_open` if it was due or under way before.
    pub(crate) effect: DeliveryEffect,
}

/// The effect of a replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum DeliveryEffect {
    Due,
    AlreadyOpen,
}

/// The answer to a skip of one delivery.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct SkippedDelivery {
    #[schema(value_type = Uuid)]
    pub(crate) id: DeliveryId,
    /// `skipped`, or `already_over` if it was delivered or cancelled before.
    pub(crate) effect: SkipEffect,
}

/// The effect of a skip.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SkipEffect {
    Skipped,
    AlreadyOver,
}
