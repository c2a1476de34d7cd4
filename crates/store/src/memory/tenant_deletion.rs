//! Deletion of all that is stored for one tenant.

use hapax_core::store::{Action, Status, StoreError, TenantDeletion, TenantDeletions};
use hapax_core::{Tenant, Timestamp};

use super::outbox::MessageNumber;
use super::{EventNumber, MemoryStore, Model, ReviewState};

/// A deletion, and where it ends: the first event that it does not cover, and the last message that it covers.
#[derive(Debug, Clone)]
pub(super) struct Deletion {
    shown: TenantDeletion,
    next_event: EventNumber,
    last_message: MessageNumber,
}

impl TenantDeletions for MemoryStore {
    async fn delete_tenant(
        &self,
        tenant: Tenant,
        _by: Action,
    ) -> Result<TenantDeletion, StoreError> {
        let begun = self.model().delete_tenant(tenant, self.now());
        self.operator_acts.count();
        Ok(begun)
    }

    async fn erase(&self, limit: usize) -> Result<bool, StoreError> {
        let more = self.model().erase(limit, self.now());
        self.hint();
        Ok(more)
    }

    async fn tenant_deletion(&self, tenant: Tenant) -> Result<Option<TenantDeletion>, StoreError> {
        Ok(self.model().deletions.get(&tenant).map(|deletion| deletion.shown.clone()))
    }
}

impl Model {
    fn delete_tenant(&mut self, tenant: Tenant, now: Timestamp) -> TenantDeletion {
        if let Some(known) = self.deletions.get(&tenant)
            && known.shown.ended_at.is_none()
        {
            return known.shown.clone();
        }
        self.source_secrets.delete_of(&tenant);
        self.portal.delete_of(&tenant);
        self.secrets.retain(|(_, of, _), _| *of != tenant);
        let mut endpoints = 0;
        for stored in self.endpoints.values_mut().filter(|one| one.record.tenant == tenant) {
            endpoints += u64::from(!stored.deleted);
            stored.deleted = true;
        }
        let shown = TenantDeletion {
            tenant: tenant.clone(),
            began_at: now,
            ended_at: None,
            endpoints,
            events: 0,
            messages: 0,
        };
        let (next_event, last_message) = (self.events_ever, self.messages_ever);
        let deletion = Deletion { shown: shown.clone(), next_event, last_message };
        self.deletions.insert(tenant, deletion);
        shown
    }

    fn erase(&mut self, limit: usize, now: Timestamp) -> bool {
        let running = self.deletions.values().find(|one| one.shown.ended_at.is_none());
        let Some(mut deletion) = running.cloned() else { return false };
        let shown = &mut deletion.shown;
        let covered = self.events.range(..deletion.next_event);
        let events: Vec<EventNumber> = covered
            .filter(|(_, stored)| !stored.gone && stored.key.tenant == shown.tenant)
            .map(|(at, _)| *at)
            .take(limit)
            .collect();
        let covered = self.messages.range(..=deletion.last_message);
        let messages: Vec<MessageNumber> = covered
            .filter(|(_, message)| !message.gone && message.tenant == shown.tenant)
            .map(|(at, _)| *at)
            .take(limit - events.len())
            .collect();
        shown.events += events.len() as u64;
        shown.messages += messages.len() as u64;
        let more = !events.is_empty() || !messages.is_empty();
        if !more {
            shown.ended_at = Some(now);
        }
        for at in events {
            self.erase_event(at);
        }
        for at in messages {
            self.deliveries.retain(|_, delivery| delivery.message != at);
            self.messages.get_mut(&at).expect("a message that was just found").gone = true;
        }
        self.deletions.insert(deletion.shown.tenant.clone(), deletion);
        more || self.deletions.values().any(|one| one.shown.ended_at.is_none())
    }

    /// An event that was not finished counts as discarded from now on.
    fn erase_event(&mut self, at: EventNumber) {
        let mut summary = self.summary(at);
        if !summary.status.is_final() || self.jobs_of(at).any(|job| !job.phase.is_over()) {
            summary.status = Status::Discarded;
        }
        summary.result = None;
        self.strip(at, summary);
        let stored = self.events.get_mut(&at).expect("an event that was just found");
        if stored.review_state == ReviewState::Review {
            stored.review_state = ReviewState::Discarded;
        }
    }
}
