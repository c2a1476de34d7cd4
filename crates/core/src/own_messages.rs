//! The messages that Hapax publishes about itself, of the tenant [`OWN_TENANT`]: which change is published,
//! and with which content.
//!
//! A store publishes such a message in the commit of the change that it reports, and only if an endpoint of
//! that tenant wants it. Nothing is published about endpoints of that tenant: a failing one would otherwise
//! get messages about its own failures.

use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use crate::delivery::EndpointStanding;
use crate::endpoint::EndpointId;
use crate::key::{KeyHash, Tenant};
use crate::message::{MessageData, NewMessage, OWN_TENANT};

/// The circuit of an endpoint has opened.
pub const ENDPOINT_FAILING: &str = "hapax.endpoint.failing";

/// An endpoint was disabled.
pub const ENDPOINT_DISABLED: &str = "hapax.endpoint.disabled";

/// An endpoint that was failing or disabled gets deliveries again.
pub const ENDPOINT_RECOVERED: &str = "hapax.endpoint.recovered";

/// Deliveries of an endpoint became dead letters.
pub const DELIVERY_DEAD: &str = "hapax.delivery.dead";

/// Deliveries of an endpoint were dead, held or parked for so long that they are soon cancelled.
pub const DELIVERY_EXPIRING: &str = "hapax.delivery.expiring";

/// An alert is active.
pub const ALERT_RAISED: &str = "hapax.alert.raised";

/// An alert is no longer active.
pub const ALERT_CLEARED: &str = "hapax.alert.cleared";

/// The time between two messages about dead deliveries of one endpoint. An endpoint that refuses everything
/// would otherwise cause a message for each message that it gets.
pub const DEATHS_EVERY: Duration = Duration::from_secs(3_600);

/// The endpoint that such messages report on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointSubject {
    /// The endpoint.
    pub id: EndpointId,
    /// Its owner.
    pub tenant: Tenant,
}

impl EndpointSubject {
    /// Whether messages about this endpoint are published.
    pub fn is_published(&self) -> bool {
        self.tenant.as_str() != OWN_TENANT
    }

    /// The message about a change of its standing, if that change is published. `reason` says why it is
    /// failing or disabled.
    pub fn changed(
        &self,
        before: EndpointStanding,
        after: EndpointStanding,
        reason: Option<&str>,
    ) -> Option<NewMessage> {
        let kind = match (before, after) {
            (EndpointStanding::Active, EndpointStanding::Failing) => ENDPOINT_FAILING,
            (EndpointStanding::Active | EndpointStanding::Failing, EndpointStanding::Disabled) => {
                ENDPOINT_DISABLED
            }
            (EndpointStanding::Failing | EndpointStanding::Disabled, EndpointStanding::Active) => {
                ENDPOINT_RECOVERED
            }
            // The endpoint is enabled, and one delivery tries it: it has not recovered yet.
            (EndpointStanding::Disabled, EndpointStanding::Failing) => return None,
            (EndpointStanding::Active, EndpointStanding::Active)
            | (EndpointStanding::Failing, EndpointStanding::Failing)
            | (EndpointStanding::Disabled, EndpointStanding::Disabled)
            | (EndpointStanding::Deleted, _)
            | (_, EndpointStanding::Deleted) => return None,
        };
        self.message(kind, reason.map(|reason| ("reason", Value::from(reason))))
    }

    /// The message about deliveries that died: how many, and when the first of them did.
    pub fn died(&self, count: u64, since: Timestamp) -> Option<NewMessage> {
        self.message(DELIVERY_DEAD, [("count", json!(count)), ("since", json!(since))])
    }

    /// The message about deliveries that are soon cancelled. `since`: when the oldest of them became dead, held
    /// or parked. `cancelled_from`: none is cancelled earlier.
    pub fn expiring(&self, since: Timestamp, cancelled_from: Timestamp) -> Option<NewMessage> {
        let times = [("since", json!(since)), ("cancelled_from", json!(cancelled_from))];
        self.message(DELIVERY_EXPIRING, times)
    }

    /// A message with the endpoint as its order key, so that a receiver can sort messages about it.
    fn message(
        &self,
        kind: &str,
        more: impl IntoIterator<Item = (&'static str, Value)>,
    ) -> Option<NewMessage> {
        if !self.is_published() {
            return None;
        }
        let id = self.id.to_string();
        let about = [("endpoint", json!(id)), ("tenant", json!(self.tenant.as_str()))];
        let data: Map<String, Value> =
            about.into_iter().chain(more).map(|(name, value)| (name.to_owned(), value)).collect();
        let data = MessageData::from(Value::Object(data));
        Some(NewMessage::new(kind, data).with_tenant(OWN_TENANT).with_key(id))
    }
}

/// An alert that is active now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ActiveAlert {
    /// The subject of the alert. All nodes spell the same subject in the same way.
    pub subject: String,
    /// The content of the messages about it.
    pub data: MessageData,
}

impl ActiveAlert {
    /// The order key of the messages about this alert.
    pub fn key(&self) -> String {
        alert_key(&self.subject)
    }

    /// The message about the beginning of the alert.
    pub fn raised(&self) -> NewMessage {
        self.message(ALERT_RAISED)
    }

    /// The message about the end of the alert.
    pub fn cleared(&self) -> NewMessage {
        self.message(ALERT_CLEARED)
    }

    fn message(&self, kind: &str) -> NewMessage {
        let message = NewMessage::new(kind, self.data.clone());
        message.with_tenant(OWN_TENANT).with_key(self.key())
    }
}

/// The order key of an alert: a hash, because a subject may be longer than a key and may hold any
/// character.
fn alert_key(subject: &str) -> String {
    let hash = KeyHash::of(b"alert", [subject.as_bytes()]);
    let hex: String = hash.0.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("alert_{hex}")
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    #[test]
    fn every_trouble_of_an_endpoint_begins_with_one_message_and_ends_with_one() {
        // For a receiver that counts failures, each published failure must have a published end.
        use EndpointStanding::{Active, Deleted, Disabled, Failing};
        let subject = EndpointSubject { id: EndpointId(Uuid::nil()), tenant: Tenant::default() };
        let check = |before, after, expected: Option<&str>| {
            let message = subject.changed(before, after, Some("why"));
            assert_eq!(message.map(|message| message.r#type).as_deref(), expected);
        };
        check(Active, Failing, Some(ENDPOINT_FAILING));
        check(Active, Disabled, Some(ENDPOINT_DISABLED));
        check(Failing, Disabled, Some(ENDPOINT_DISABLED));
        check(Failing, Active, Some(ENDPOINT_RECOVERED));
        check(Disabled, Active, Some(ENDPOINT_RECOVERED));
        check(Disabled, Failing, None);
        check(Failing, Failing, None);
        check(Active, Deleted, None);
        let own = EndpointSubject { tenant: Tenant::new(OWN_TENANT), ..subject };
        assert_eq!(own.changed(Active, Failing, None), None, "no echo");
    }
}
