//! The messages that Hapax publishes about itself, in the commits of the changes that they report.

use hapax_core::delivery::EndpointStanding;
use hapax_core::message::OWN_TENANT;
use hapax_core::own_messages::{ALERT_RAISED, DEATHS_EVERY};
use hapax_core::store::{NewMessage, OwnMessages, StoreError};
use hapax_core::{Tenant, Timestamp};

use super::outbox::EndpointNumber;
use super::work::later;
use super::{MemoryStore, Model};

/// Dead deliveries of one endpoint that are not published yet.
#[derive(Debug, Default)]
pub(super) struct Deaths {
    count: u64,
    since: Option<Timestamp>,
    published_at: Option<Timestamp>,
}

impl OwnMessages for MemoryStore {
    async fn publish_deaths(&self, limit: usize) -> Result<bool, StoreError> {
        let more = self.model().publish_due_deaths(limit, self.now());
        self.hint_deliveries();
        Ok(more)
    }
}

impl Model {
    /// Publishes a message of Hapax itself, if an endpoint wants it.
    pub(super) fn publish_own(&mut self, message: Option<NewMessage>, now: Timestamp) {
        if let Some(message) = message.filter(|message| self.is_wanted(message)) {
            self.publish(None, &Tenant::new(OWN_TENANT), message, now);
        }
    }

    /// Whether an endpoint wants messages about raised alerts.
    pub(super) fn wants_alerts(&self) -> bool {
        self.is_wanted(&NewMessage::new(ALERT_RAISED, serde_json::Value::Null))
    }

    fn is_wanted(&self, message: &NewMessage) -> bool {
        self.endpoints.values().any(|one| {
            !one.deleted
                && one.record.tenant.as_str() == OWN_TENANT
                && one.record.settings.wants(message)
        })
    }

    /// Publishes the new standing of an endpoint, if it has changed.
    pub(super) fn publish_standing(
        &mut self,
        at: EndpointNumber,
        before: EndpointStanding,
        now: Timestamp,
    ) {
        let stored = &self.endpoints[&at];
        let (record, after) = (&stored.record, stored.standing());
        self.publish_own(record.subject().changed(before, after, record.failing_reason()), now);
    }

    /// Counts a dead delivery, and publishes the count unless the last message about the endpoint is too
    /// recent.
    pub(super) fn note_death(&mut self, at: EndpointNumber, now: Timestamp) {
        let stored = &self.endpoints[&at];
        let message = stored.record.subject().died(1, now).filter(|_| !stored.deleted);
        if message.is_none_or(|message| !self.is_wanted(&message)) {
            return;
        }
        let deaths = self.deaths.entry(at).or_default();
        deaths.count += 1;
        deaths.since.get_or_insert(now);
        self.publish_deaths_of(at, now);
    }

    /// Whether anything was due.
    fn publish_deaths_of(&mut self, at: EndpointNumber, now: Timestamp) -> bool {
        let Some(deaths) = self.deaths.get_mut(&at) else { return false };
        let Some(since) = deaths.since else { return false };
        if deaths.published_at.is_some_and(|published| later(published, DEATHS_EVERY) > now) {
            return false;
        }
        let count = std::mem::take(&mut deaths.count);
        *deaths = Deaths { published_at: Some(now), ..Deaths::default() };
        let stored = &self.endpoints[&at];
        let message = stored.record.subject().died(count, since).filter(|_| !stored.deleted);
        self.publish_own(message, now);
        true
    }

    fn publish_due_deaths(&mut self, limit: usize, now: Timestamp) -> bool {
        let endpoints: Vec<EndpointNumber> = self.deaths.keys().copied().collect();
        let due = endpoints.into_iter().filter(|at| self.publish_deaths_of(*at, now));
        due.take(limit).count() == limit
    }
}
