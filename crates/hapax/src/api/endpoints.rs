//! Endpoints: the settings that an operator sends, and the fields that the API shows. Secrets are shown
//! once, and the values of custom headers never.

use std::collections::BTreeMap;

use hapax_core::Timestamp;
use hapax_core::endpoint::{EndpointId, EndpointOrder, EndpointRecord, OnDead, SecretAge};
use hapax_core::endpoint_secret::Signing;
use hapax_core::message::Payload;
use hapax_core::rate_limit::RateLimit;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use utoipa::{IntoParams, ToSchema};

use super::Span;
use super::values::{EndpointOrderWord, OnDeadWord, PayloadWord, SigningWord};

/// The body of `POST /api/v1/endpoints`, and of `PATCH /api/v1/endpoints/{id}`. A field that is missing
/// keeps its value in a change; null brings back its default.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct EndpointRequest {
    /// Where deliveries are posted: http or https, at a public address unless `[outbound] allow` names its
    /// net. Required for a new endpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) url: Option<String>,
    /// The owner; `default` if it is missing. The owner cannot be changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tenant: Option<String>,
    /// A secret of your own: `whsec_` and base64 of 24 to 64 bytes, or with `"signing":"ed25519"` a private
    /// key, `whsk_` and base64. Without this field Hapax makes a secret. Rotate the endpoint to change the
    /// secret.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) secret: Option<String>,
    /// Globs over message types, such as `invoice.*`. Default: all types.
    #[serde(default, skip_serializing_if = "Patch::is_keep")]
    #[schema(value_type = Option<Vec<String>>)]
    pub(crate) types: Patch<Vec<String>>,
    /// The wait before each attempt. Default: 0s, 1m, 5m, 30m, 2h, 10h, 24h.
    #[serde(default, skip_serializing_if = "Patch::is_keep")]
    #[schema(value_type = Option<Vec<Span>>)]
    pub(crate) retry: Patch<Vec<Span>>,
    /// The deadline of one attempt, from the name lookup to the last byte of the answer. Default: 10s.
    #[serde(default, skip_serializing_if = "Patch::is_keep")]
    #[schema(value_type = Option<Span>)]
    pub(crate) timeout: Patch<Span>,
    /// `thin` sends only `data.id` and `data.object`. Default: `fat`.
    #[serde(default, skip_serializing_if = "Patch::is_keep")]
    #[schema(value_type = Option<PayloadWord>)]
    pub(crate) payload: Patch<Payload>,
    /// How many attempts may be under way at once, from 1 to 1000. Default: 16.
    #[serde(default, skip_serializing_if = "Patch::is_keep")]
    #[schema(value_type = Option<u32>)]
    pub(crate) max_in_flight: Patch<u32>,
    /// How many attempts may begin in a time, over all nodes: `100/s`, `1000/m` or `10/h`. Default: no limit.
    #[serde(default, skip_serializing_if = "Patch::is_keep")]
    #[schema(value_type = Option<String>)]
    pub(crate) rate_limit: Patch<RateLimit>,
    /// Whether the endpoint is disabled after five days of nothing but failures. Default: true.
    #[serde(default, skip_serializing_if = "Patch::is_keep")]
    #[schema(value_type = Option<bool>)]
    pub(crate) auto_disable: Patch<bool>,
    /// The only version of your API that the endpoint gets; messages without a version match as well.
    #[serde(default, skip_serializing_if = "Patch::is_keep")]
    #[schema(value_type = Option<String>)]
    pub(crate) api_version: Patch<String>,
    /// A name of your own, unique within the tenant.
    #[serde(default, skip_serializing_if = "Patch::is_keep")]
    #[schema(value_type = Option<String>)]
    pub(crate) uid: Patch<String>,
    /// A description for people.
    #[serde(default, skip_serializing_if = "Patch::is_keep")]
    #[schema(value_type = Option<String>)]
    pub(crate) description: Patch<String>,
    /// Names and values of your own, for people and scripts.
    #[serde(default, skip_serializing_if = "Patch::is_keep")]
    #[schema(value_type = Option<BTreeMap<String, String>>)]
    pub(crate) metadata: Patch<BTreeMap<String, String>>,
    /// Headers that every delivery carries. Their values are never shown again.
    #[serde(default, skip_serializing_if = "Patch::is_keep")]
    #[schema(value_type = Option<BTreeMap<String, String>>)]
    pub(crate) headers: Patch<BTreeMap<String, String>>,
    /// `key` sends deliveries under one key one at a time, in the order of publishing. Default: `none`.
    #[serde(default, skip_serializing_if = "Patch::is_keep")]
    #[schema(value_type = Option<EndpointOrderWord>)]
    pub(crate) order: Patch<EndpointOrder>,
    /// With `"order":"key"`: whether a dead delivery keeps the later ones under its key waiting, until an
    /// operator replays or skips it (`park`), or they are sent without it (`skip`). Default: `park`.
    #[serde(default, skip_serializing_if = "Patch::is_keep")]
    #[schema(value_type = Option<OnDeadWord>)]
    pub(crate) on_dead: Patch<OnDead>,
    /// How deliveries are signed: `standard` and `ed25519` as in Standard Webhooks (`v1` and `v1a`), or
    /// `timestamped` with `t=…,v1=…`. Default: `standard`. Rotate the endpoint to change this setting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<SigningWord>)]
    pub(crate) signing: Option<Signing>,
}

/// A field of a change.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum Patch<T> {
    /// The field is missing.
    #[default]
    Keep,
    /// The field is null.
    Clear,
    Set(T),
}

impl<T> Patch<T> {
    pub(crate) fn is_keep(&self) -> bool {
        matches!(self, Self::Keep)
    }

    /// The value after the change of `before`.
    pub(crate) fn applied(self, before: T, default: impl FnOnce() -> T) -> T {
        match self {
            Self::Keep => before,
            Self::Clear => default(),
            Self::Set(value) => value,
        }
    }

    /// The value after the change of an optional field.
    pub(crate) fn applied_to_option(self, before: Option<T>) -> Option<T> {
        match self {
            Self::Keep => before,
            Self::Clear => None,
            Self::Set(value) => Some(value),
        }
    }
}

impl<T> From<Option<T>> for Patch<T> {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Keep, Self::Set)
    }
}

impl<T: Serialize> Serialize for Patch<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Keep | Self::Clear => serializer.serialize_none(),
            Self::Set(value) => value.serialize(serializer),
        }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Patch<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Option::deserialize(deserializer)?.map_or(Self::Clear, Self::Set))
    }
}

/// The body of `POST /api/v1/endpoints/{id}/rotate`.
#[derive(Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RotateRequest {
    /// How long the old secret still signs. Default: 24h; `0s` revokes every old secret now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) overlap: Option<Span>,
    /// A secret of your own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) secret: Option<String>,
    /// How the new secret signs. Default: as the endpoint does now. During the overlap each delivery carries
    /// signatures of both kinds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<SigningWord>)]
    pub(crate) signing: Option<Signing>,
}

/// The body of `POST /api/v1/endpoints/{id}/disable`, and of actions that take only a reason.
#[derive(Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReasonRequest {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
}

/// The query of `GET /api/v1/endpoints`.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct EndpointsQuery {
    /// Only endpoints of this tenant.
    pub(crate) tenant: Option<String>,
    /// `next` of the previous page.
    pub(crate) cursor: Option<String>,
    /// The most endpoints of one page.
    #[param(minimum = 1, maximum = 500, default = 50)]
    pub(crate) limit: Option<usize>,
}

/// An endpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Endpoint {
    /// Hapax's id.
    #[schema(value_type = Uuid)]
    pub(crate) id: EndpointId,
    pub(crate) tenant: String,
    pub(crate) url: String,
    /// `active` or `disabled`.
    pub(crate) status: EndpointStatus,
    /// The time since which it is disabled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) disabled_at: Option<Timestamp>,
    /// Why it is disabled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) disabled_reason: Option<String>,
    /// Why its deliveries are held although it is enabled: it failed too often in a row, and is tried again
    /// with one delivery at a time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) failing_reason: Option<String>,
    pub(crate) types: Vec<String>,
    pub(crate) retry: Vec<Span>,
    pub(crate) timeout: Span,
    #[schema(value_type = PayloadWord)]
    pub(crate) payload: Payload,
    pub(crate) max_in_flight: u32,
    #[schema(required, value_type = Option<String>)]
    pub(crate) rate_limit: Option<RateLimit>,
    pub(crate) auto_disable: bool,
    #[schema(required)]
    pub(crate) api_version: Option<String>,
    #[schema(required)]
    pub(crate) uid: Option<String>,
    #[schema(required)]
    pub(crate) description: Option<String>,
    pub(crate) metadata: BTreeMap<String, String>,
    /// The names of its custom headers. Their values are never shown.
    pub(crate) headers: Vec<String>,
    #[schema(value_type = EndpointOrderWord)]
    pub(crate) order: EndpointOrder,
    #[schema(value_type = OnDeadWord)]
    pub(crate) on_dead: OnDead,
    #[schema(value_type = SigningWord)]
    pub(crate) signing: Signing,
    /// With `"signing":"ed25519"`: the key that receivers verify deliveries with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) public_key: Option<String>,
    pub(crate) created_at: Timestamp,
    /// The ages of its secrets, the newest first. Empty if they are not known.
    #[serde(default)]
    pub(crate) secrets: Vec<EndpointSecretAge>,
    /// The secret that was just made, and is never shown again. A private key is never shown at all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) secret: Option<String>,
}

/// The age of a secret of an endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct EndpointSecretAge {
    /// When it began to sign.
    pub(crate) since: Timestamp,
    /// When it ends, if it was replaced.
    #[schema(required)]
    pub(crate) until: Option<Timestamp>,
}

impl From<SecretAge> for EndpointSecretAge {
    fn from(SecretAge { since, until }: SecretAge) -> Self {
        Self { since, until }
    }
}

/// Whether deliveries are attempted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum EndpointStatus {
    Active,
    Disabled,
}

impl EndpointStatus {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Disabled => "disabled",
        }
    }
}

impl Endpoint {
    /// The state in one word: an enabled endpoint whose deliveries are held is failing.
    pub(crate) fn state(&self) -> &'static str {
        match (self.status, &self.failing_reason) {
            (EndpointStatus::Active, Some(_)) => "failing",
            (status, _) => status.as_str(),
        }
    }
}

impl From<EndpointRecord> for Endpoint {
    fn from(record: EndpointRecord) -> Self {
        let settings = record.settings;
        let status = match record.disabled {
            None => EndpointStatus::Active,
            Some(_) => EndpointStatus::Disabled,
        };
        let (disabled_at, disabled_reason) =
            record.disabled.map(|disabled| (disabled.at, disabled.reason)).unzip();
        Self {
            id: record.id,
            tenant: record.tenant.to_string(),
            url: settings.url,
            status,
            disabled_at,
            disabled_reason,
            failing_reason: record.failing,
            types: settings.types.into(),
            retry: settings.retry.into_iter().map(Span).collect(),
            timeout: Span(settings.timeout),
            payload: settings.payload,
            max_in_flight: settings.max_in_flight,
            rate_limit: settings.rate_limit,
            auto_disable: settings.auto_disable,
            api_version: settings.api_version,
            uid: settings.uid,
            description: settings.description,
            metadata: settings.metadata,
            headers: settings.header_names,
            order: settings.order,
            on_dead: settings.on_dead,
            signing: settings.signing,
            public_key: settings.public_key,
            created_at: record.created_at,
            secrets: settings.secret_ages.into_iter().map(EndpointSecretAge::from).collect(),
            secret: None,
        }
    }
}

/// The answer to `DELETE /api/v1/endpoints/{id}`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Deleted {
    pub(crate) deleted: bool,
}

/// The answer to `POST /api/v1/endpoints/{id}/ping`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct PingAnswer {
    /// Whether the endpoint answered with a 2xx.
    pub(crate) ok: bool,
    /// The `webhook-id` that was sent.
    pub(crate) id: String,
    pub(crate) took_ms: u64,
    /// The HTTP status, if the endpoint answered.
    #[schema(required)]
    pub(crate) status: Option<u16>,
    /// Why it failed.
    #[schema(required)]
    pub(crate) error: Option<String>,
    /// The beginning of the answer's body.
    #[schema(required)]
    pub(crate) answer: Option<String>,
}
