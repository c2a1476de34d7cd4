//! Endpoints: the addresses that messages are sent to, the types that each one wants, and its
//! settings.
//!
//! An endpoint belongs to a tenant. Its settings can change at any time and hold for the next claim on
//! every node. Secrets and the values of custom headers are sealed before they reach a store; the types
//! here hold only sealed bytes.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::delivery::EndpointStanding;
use crate::endpoint_secret::Signing;
use crate::handler::TypeFilter;
use crate::job::Policy;
use crate::key::Tenant;
use crate::limits::DELIVERY_LEASE_MIN;
use crate::message::{NewMessage, Payload};
use crate::own_messages::EndpointSubject;
use crate::rate_limit::RateLimit;
use crate::tuned;
use crate::vault::{KeyId, Sealed};

/// Our id of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EndpointId(pub Uuid);

impl fmt::Display for EndpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The settings of an endpoint that an operator chooses. Stores keep the settings as JSON, so every field has
/// a default.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointSettings {
    /// The address, checked and in its normal form.
    pub url: String,
    /// The party that chose the address.
    #[serde(default)]
    pub address_by: AddressChoice,
    /// Globs over message types; empty matches all.
    #[serde(default)]
    pub types: TypeFilter,
    /// The wait before each attempt; as many attempts as there are waits.
    #[serde(default = "default_retry", with = "spans_in_ms")]
    pub retry: Vec<Duration>,
    /// The deadline of one attempt, from the name lookup to the last byte of the answer.
    #[serde(default = "default_timeout", with = "span_in_ms")]
    pub timeout: Duration,
    /// How much of a message it gets.
    #[serde(default)]
    pub payload: Payload,
    /// The only version of the publisher's API that it gets. Messages without a version match as well.
    #[serde(default)]
    pub api_version: Option<String>,
    /// How many attempts may be under way at once.
    #[serde(default = "default_max_in_flight")]
    pub max_in_flight: u32,
    /// How many attempts may begin in a time, over all nodes.
    #[serde(default)]
    pub rate_limit: Option<RateLimit>,
    /// The order of its deliveries.
    #[serde(default)]
    pub order: EndpointOrder,
    /// The treatment of later deliveries under the key of a dead one, if the endpoint keeps order.
    #[serde(default)]
    pub on_dead: OnDead,
    /// Whether the endpoint is disabled after days of nothing but failures.
    #[serde(default = "default_auto_disable")]
    pub auto_disable: bool,
    /// How the newest of its secrets signs. This setting changes only together with the secrets.
    #[serde(default)]
    pub signing: Signing,
    /// The public key of the newest secret, if it signs with a key pair.
    #[serde(default)]
    pub public_key: Option<String>,
    /// The ages of its secrets, the newest first. Like `signing`, it changes only together with the secrets. Empty if
    /// they are not known.
    #[serde(default)]
    pub secret_ages: Vec<SecretAge>,
    /// A name of the operator's own, unique within the tenant.
    #[serde(default)]
    pub uid: Option<String>,
    /// A description for operators.
    #[serde(default)]
    pub description: Option<String>,
    /// Key-value data for operators and scripts.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
    /// The names of custom headers. Their values are in [`EndpointSealed::headers`].
    #[serde(default)]
    pub header_names: Vec<String>,
}

/// The age of a secret of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecretAge {
    /// When it began to sign.
    pub since: Timestamp,
    /// When it ends, if it was replaced.
    pub until: Option<Timestamp>,
}

impl SecretAge {
    /// The age of a secret that signs from now on.
    pub fn new(now: Timestamp) -> Self {
        Self { since: now, until: None }
    }

    /// The ages after a rotation. The newest secret signs for `overlap` longer, and earlier ones keep their ends. An
    /// overlap of zero ends all of them.
    pub fn rotated(ages: &[Self], overlap: Duration, now: Timestamp) -> Vec<Self> {
        let until = now.checked_add(overlap).ok();
        let ends = ages.iter().map(|age| Self { until: age.until.or(until), ..*age });
        let still_signs = |age: &Self| !overlap.is_zero() && age.until.is_some_and(|at| now < at);
        std::iter::once(Self::new(now)).chain(ends.filter(still_signs)).collect()
    }
}

/// The party that chose the address of an endpoint, on which the allowed addresses depend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AddressChoice {
    /// An operator, through the API: the rules that the operator configured hold.
    #[default]
    Operator,
    /// The receiving party, in the portal: only public addresses, whatever the operator allows for others.
    Receiver,
}

/// The order of an endpoint's deliveries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EndpointOrder {
    /// None: a delivery that is retried never delays another.
    #[default]
    None,
    /// One at a time under each key, in the order of publishing.
    Key,
}

/// The treatment of later deliveries under the key of a dead one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnDead {
    /// Later deliveries wait until an operator replays or skips the dead one.
    #[default]
    Park,
    /// Later deliveries are sent without the dead one.
    Skip,
}

/// The wait before each attempt, unless the operator chooses another schedule.
pub fn default_retry() -> Vec<Duration> {
    [0, 60, 300, 1_800, 7_200, 36_000, 86_400].map(Duration::from_secs).to_vec()
}

/// The deadline of an attempt, unless the operator chooses another.
pub fn default_timeout() -> Duration {
    Duration::from_secs(10)
}

/// Attempts under way at once, unless the operator chooses another number.
pub fn default_max_in_flight() -> u32 {
    16
}

/// Whether an endpoint is disabled after days of nothing but failures, unless the operator chooses otherwise.
pub fn default_auto_disable() -> bool {
    true
}

impl EndpointSettings {
    /// An endpoint at this address, with defaults for everything else.
    pub fn at(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            address_by: AddressChoice::default(),
            types: TypeFilter::default(),
            retry: default_retry(),
            timeout: default_timeout(),
            payload: Payload::default(),
            api_version: None,
            max_in_flight: default_max_in_flight(),
            rate_limit: None,
            order: EndpointOrder::default(),
            on_dead: OnDead::default(),
            auto_disable: default_auto_disable(),
            signing: Signing::default(),
            public_key: None,
            secret_ages: Vec::new(),
            uid: None,
            description: None,
            metadata: BTreeMap::new(),
            header_names: Vec::new(),
        }
    }

    /// Whether it gets this message.
    pub fn wants(&self, message: &NewMessage) -> bool {
        let version_fits = match (&self.api_version, &message.api_version) {
            (Some(pinned), Some(version)) => pinned == version,
            (Some(_), None) | (None, Some(_) | None) => true,
        };
        version_fits && self.types.matches(Some(&message.r#type))
    }

    /// Whether deliveries under one key are sent one at a time, in order.
    pub fn keeps_order(&self) -> bool {
        self.order == EndpointOrder::Key
    }

    /// Whether a dead delivery parks its key.
    pub fn parks_dead(&self) -> bool {
        self.keeps_order() && self.on_dead == OnDead::Park
    }

    /// The schedule, and how long a claim lasts: every attempt ends within its timeout, and its outcome
    /// must be recorded before the lease ends.
    pub fn policy(&self) -> Policy {
        let least = tuned!("endpoint.lease_ms", DELIVERY_LEASE_MIN.as_millis() as u64);
        let lease = (self.timeout * 2).max(Duration::from_millis(least));
        Policy { retry: self.retry.clone(), lease }
    }
}

/// An endpoint to be created.
#[derive(Debug, Clone)]
pub struct NewEndpoint {
    /// The id that the caller made for it: sealed values are bound to it.
    pub id: EndpointId,
    /// The owner.
    pub tenant: Tenant,
    /// The settings.
    pub settings: EndpointSettings,
    /// The sealed values.
    pub sealed: EndpointSealed,
}

/// The sealed part of an endpoint, which only the vault can open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointSealed {
    /// Its [`EndpointSecrets`](crate::endpoint_secret::EndpointSecrets).
    pub secrets: Sealed,
    /// The values of its custom headers, if it has any.
    pub headers: Option<Sealed>,
}

impl EndpointSealed {
    /// The keys that a node must hold to send to this endpoint.
    pub fn key_ids(&self) -> impl Iterator<Item = KeyId> + '_ {
        std::iter::once(&self.secrets).chain(&self.headers).map(Sealed::key_id)
    }
}

/// An endpoint as it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointRecord {
    /// Our id.
    pub id: EndpointId,
    /// The owner.
    pub tenant: Tenant,
    /// The settings.
    pub settings: EndpointSettings,
    /// The sealed values.
    pub sealed: EndpointSealed,
    /// Grows with every change. A change names the version that it was made for.
    pub version: u64,
    /// When it was created.
    pub created_at: Timestamp,
    /// The time since which no delivery is attempted, and the reason. Its deliveries are held.
    pub disabled: Option<Disabled>,
    /// Why its deliveries are held although it is enabled: its circuit is open.
    pub failing: Option<String>,
}

impl EndpointRecord {
    /// Whether it takes deliveries. A deleted endpoint has no record.
    pub fn standing(&self) -> EndpointStanding {
        match (&self.disabled, &self.failing) {
            (Some(_), _) => EndpointStanding::Disabled,
            (None, Some(_)) => EndpointStanding::Failing,
            (None, None) => EndpointStanding::Active,
        }
    }

    /// Why it does not take deliveries, if so.
    pub fn failing_reason(&self) -> Option<&str> {
        self.disabled.as_ref().map(|disabled| disabled.reason.as_str()).or(self.failing.as_deref())
    }

    /// The endpoint as the subject of messages about it.
    pub fn subject(&self) -> EndpointSubject {
        EndpointSubject { id: self.id, tenant: self.tenant.clone() }
    }
}

/// Why an endpoint gets no deliveries.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disabled {
    /// Since when.
    pub at: Timestamp,
    /// The reason.
    pub reason: String,
    /// The party that disabled it.
    #[serde(default)]
    pub by: DisabledBy,
}

/// The party that disabled an endpoint. The party that may enable the endpoint again depends on this.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DisabledBy {
    /// An operator: only an operator enables it.
    #[default]
    Operator,
    /// The receiving party, in the portal.
    Receiver,
    /// Hapax, for its answers.
    Automatic,
}

impl DisabledBy {
    /// As text.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Operator => "operator",
            Self::Receiver => "receiver",
            Self::Automatic => "automatic",
        }
    }

    /// The value with this text. Any other text counts as an operator, so that only an operator can undo it.
    pub fn parse(text: Option<&str>) -> Self {
        match text {
            Some("receiver") => Self::Receiver,
            Some("automatic") => Self::Automatic,
            Some(_) | None => Self::Operator,
        }
    }
}

/// A change of an endpoint. Each change is one commit.
#[derive(Debug, Clone)]
pub enum EndpointAct {
    /// Replaces settings and sealed values, if the endpoint still has this version: another change or
    /// rotation is never overwritten. Deliveries that wait go to the new address.
    Change {
        /// The version that the change was made for.
        version: u64,
        /// All settings.
        settings: Box<EndpointSettings>,
        /// All sealed values.
        sealed: EndpointSealed,
    },
    /// Holds its deliveries until it is enabled.
    Disable {
        /// The reason.
        reason: String,
    },
    /// Attempts its deliveries again.
    Enable,
    /// Holds its deliveries, as its receiving party asks. An endpoint that is disabled already stays as it is.
    DisableByReceiver {
        /// The reason.
        reason: String,
    },
    /// Attempts its deliveries again, as its receiving party asks, unless an operator disabled it.
    EnableByReceiver,
    /// Removes the endpoint. Its open deliveries are cancelled.
    Delete,
}

/// The answer to a change of an endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EndpointChanged {
    /// The endpoint as it is now.
    Changed(Box<EndpointRecord>),
    /// It was deleted.
    Deleted,
    /// There is no such endpoint.
    Unknown,
    /// Another endpoint of the tenant has this uid.
    UidTaken,
    /// The tenant, or the database, has as many endpoints as it may have.
    TooMany,
    /// The endpoint was changed meanwhile.
    VersionChanged,
    /// An operator disabled it, so its receiving party cannot enable it.
    DisabledByOperator,
}

mod span_in_ms {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(span: &Duration, to: S) -> Result<S::Ok, S::Error> {
        u64::try_from(span.as_millis()).unwrap_or(u64::MAX).serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        u64::deserialize(from).map(Duration::from_millis)
    }
}

mod spans_in_ms {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(spans: &[Duration], to: S) -> Result<S::Ok, S::Error> {
        let in_ms = spans.iter().map(|span| u64::try_from(span.as_millis()).unwrap_or(u64::MAX));
        in_ms.collect::<Vec<_>>().serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Vec<Duration>, D::Error> {
        let in_ms = Vec::<u64>::deserialize(from)?;
        Ok(in_ms.into_iter().map(Duration::from_millis).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_survive_their_stored_form_and_a_field_that_is_missing_has_its_default() {
        let settings = EndpointSettings {
            types: TypeFilter::new(["invoice.*"]).unwrap(),
            api_version: Some("v2".to_owned()),
            ..EndpointSettings::at("https://example.com/in")
        };
        let stored = serde_json::to_string(&settings).unwrap();
        assert_eq!(serde_json::from_str::<EndpointSettings>(&stored).unwrap(), settings);
        let bare = serde_json::from_str::<EndpointSettings>("{\"url\":\"u\"}").unwrap();
        assert_eq!(bare, EndpointSettings::at("u"));
    }

    #[test]
    fn a_replaced_secret_signs_until_its_overlap_ends() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let age = |since, until: Option<i64>| SecretAge { since: at(since), until: until.map(at) };
        let hour = Duration::from_secs(3_600);
        let check = |before: &[SecretAge], overlap, now, expected: &[SecretAge]| {
            assert_eq!(SecretAge::rotated(before, overlap, at(now)), expected, "{before:?}");
        };
        check(&[age(0, None)], hour, 100, &[age(100, None), age(0, Some(3_700))]);
        let two = [age(100, None), age(0, Some(3_700))];
        let three = [age(200, None), age(100, Some(3_800)), age(0, Some(3_700))];
        check(&two, hour, 200, &three);
        check(&two, hour, 3_700, &[age(3_700, None), age(100, Some(7_300))]);
        check(&two, Duration::ZERO, 200, &[age(200, None)]);
        check(&[], hour, 100, &[age(100, None)]);
    }

    #[test]
    fn an_endpoint_gets_the_types_and_the_version_that_it_asked_for() {
        let check =
            |types: &[&str], pinned: Option<&str>, version: Option<&str>, expected: bool| {
                let settings = EndpointSettings {
                    types: TypeFilter::new(types.iter().copied()).unwrap(),
                    api_version: pinned.map(str::to_owned),
                    ..EndpointSettings::at("u")
                };
                let message = NewMessage {
                    api_version: version.map(str::to_owned),
                    ..NewMessage::new("invoice.paid", serde_json::json!({}))
                };
                assert_eq!(settings.wants(&message), expected, "{types:?} {pinned:?} {version:?}");
            };
        check(&[], None, None, true);
        check(&["invoice.*"], None, Some("v1"), true);
        check(&["order.*"], None, None, false);
        check(&["*"], Some("v1"), Some("v1"), true);
        check(&["*"], Some("v1"), Some("v2"), false);
        check(&["*"], Some("v1"), None, true);
    }
}
