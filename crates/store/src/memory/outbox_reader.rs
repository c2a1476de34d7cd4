//! Queries of messages, endpoints and deliveries: everything here only reads.

use bytes::Bytes;
use hapax_core::Tenant;
use hapax_core::delivery::{
    DeliveryId, DeliveryPhase, DeliveryStatus, EndpointStanding, KEY_WAITS, MessageStatus,
};
use hapax_core::endpoint::{EndpointId, EndpointRecord};
use hapax_core::limits::LANE_COUNT_MAX;
use hapax_core::message::Payload;
use hapax_core::store::{
    DeliveryBacklog, DeliveryDetail, DeliveryFilter, EndpointFilter, InspectOutbox, MessageDetail,
    MessageFilter, MessageSummary, Page, ReadBound, StoreError,
};

use super::outbox::{Delivery, MessageNumber, StoredMessage};
use super::reader::page;
use super::{MemoryStore, Model};

/// The most messages that one id finds.
const MESSAGES_OF_ONE_ID_MAX: usize = 10;

impl InspectOutbox for MemoryStore {
    async fn endpoints(&self, filter: EndpointFilter) -> Result<Page<EndpointRecord>, StoreError> {
        let model = self.model();
        let wanted = model.endpoints.iter().rev().filter(|(_, one)| {
            !one.deleted
                && (!filter.failing || one.standing() == EndpointStanding::Failing)
                && filter.tenant.as_ref().is_none_or(|tenant| one.record.tenant == *tenant)
        });
        let records =
            wanted.map(|(at, one)| (*at, one.record.created_at, Some(one.record.clone())));
        Ok(page(records, filter.before, filter.limit, ReadBound::Rows(usize::MAX)))
    }

    async fn endpoint(&self, id: EndpointId) -> Result<Option<EndpointRecord>, StoreError> {
        let model = self.model();
        Ok(model.endpoint_numbered(id).map(|at| model.endpoints[&at].record.clone()))
    }

    async fn messages(&self, filter: MessageFilter) -> Result<Page<MessageSummary>, StoreError> {
        let model = self.model();
        let there = model.messages.iter().rev().filter(|(_, one)| !one.gone);
        let rows = there.map(|(at, one)| {
            let summary = model.message_summary(*at, one);
            let fits = message_fits(&filter, &summary);
            (*at, one.created_at, fits.then_some(summary))
        });
        Ok(page(rows, filter.before, filter.limit, filter.bound))
    }

    async fn message(
        &self,
        id: &str,
        tenant: Option<Tenant>,
    ) -> Result<Vec<MessageDetail>, StoreError> {
        let model = self.model();
        let wanted = model.messages.iter().filter(|(_, one)| {
            one.id == id && tenant.as_ref().is_none_or(|tenant| one.tenant == *tenant)
        });
        let details = wanted.map(|(at, one)| model.message_detail(*at, one));
        Ok(details.take(MESSAGES_OF_ONE_ID_MAX).collect())
    }

    async fn deliveries(&self, filter: DeliveryFilter) -> Result<Page<DeliveryDetail>, StoreError> {
        let model = self.model();
        let rows = model.deliveries.iter().rev().map(|(at, one)| {
            let detail = model.delivery_detail(one);
            let fits = delivery_fits(&filter, &detail);
            (*at, detail.created_at, fits.then_some(detail))
        });
        Ok(page(rows, filter.before, filter.limit, filter.bound))
    }

    async fn delivery(&self, id: DeliveryId) -> Result<Option<DeliveryDetail>, StoreError> {
        let model = self.model();
        Ok(model.delivery_numbered(id).map(|at| model.delivery_detail(&model.deliveries[&at])))
    }

    async fn delivery_backlog(&self) -> Result<DeliveryBacklog, StoreError> {
        Ok(self.model().delivery_backlog())
    }
}

impl Model {
    pub(super) fn message_status(&self, at: MessageNumber) -> MessageStatus {
        MessageStatus::of(self.deliveries_of(at).map(|delivery| self.status_of(delivery)))
    }

    fn message_summary(&self, at: MessageNumber, message: &StoredMessage) -> MessageSummary {
        MessageSummary {
            id: message.id.clone(),
            tenant: message.tenant.as_str().to_owned(),
            r#type: message.new.r#type.clone(),
            key: message.new.key.clone(),
            sequence: message.sequence,
            api_version: message.new.api_version.clone(),
            created_at: message.created_at,
            status: self.message_status(at),
            deliveries: self.deliveries_of(at).count() as u64,
        }
    }

    fn message_detail(&self, at: MessageNumber, message: &StoredMessage) -> MessageDetail {
        let deliveries = self.deliveries_of(at).map(|delivery| self.delivery_detail(delivery));
        MessageDetail {
            summary: self.message_summary(at, message),
            body: match message.gone {
                true => Bytes::new(),
                false => message.body(Payload::Fat).into(),
            },
            deliveries: deliveries.collect(),
        }
    }

    fn delivery_detail(&self, delivery: &Delivery) -> DeliveryDetail {
        let message = &self.messages[&delivery.message];
        let endpoint = &self.endpoints[&delivery.endpoint].record;
        let status = self.status_of(delivery);
        let disabled = endpoint.disabled.as_ref().map(|disabled| &disabled.reason);
        let held = disabled.or(endpoint.failing.as_ref());
        let held = held.filter(|_| status == DeliveryStatus::Held);
        let parked = (status == DeliveryStatus::Parked).then(|| KEY_WAITS.to_owned());
        DeliveryDetail {
            id: delivery.id,
            message: message.id.clone(),
            message_type: message.new.r#type.clone(),
            key: message.new.key.clone(),
            tenant: message.tenant.as_str().to_owned(),
            endpoint: endpoint.id,
            url: endpoint.settings.url.clone(),
            status,
            reason: held.cloned().or(parked).or_else(|| delivery.reason.clone()),
            attempt: delivery.progress.attempt,
            created_at: message.created_at,
            due_at: match delivery.phase {
                DeliveryPhase::Ready | DeliveryPhase::Leased => Some(delivery.due),
                // A parked delivery has no time of its own.
                DeliveryPhase::Parked
                | DeliveryPhase::Delivered
                | DeliveryPhase::Dead
                | DeliveryPhase::Cancelled => None,
            },
            finished_at: delivery.finished_at,
            attempts: delivery.attempts.clone(),
            actions: delivery.actions.clone(),
        }
    }

    fn status_of(&self, delivery: &Delivery) -> DeliveryStatus {
        let standing = self.endpoints[&delivery.endpoint].standing();
        match (delivery.phase, standing) {
            (DeliveryPhase::Leased, _) => DeliveryStatus::Sending,
            (DeliveryPhase::Delivered, _) => DeliveryStatus::Delivered,
            (DeliveryPhase::Dead, _) => DeliveryStatus::Dead,
            (DeliveryPhase::Cancelled, _)
            | (DeliveryPhase::Ready | DeliveryPhase::Parked, EndpointStanding::Deleted) => {
                DeliveryStatus::Cancelled
            }
            (
                DeliveryPhase::Ready | DeliveryPhase::Parked,
                EndpointStanding::Disabled | EndpointStanding::Failing,
            ) => DeliveryStatus::Held,
            (DeliveryPhase::Parked, EndpointStanding::Active) => DeliveryStatus::Parked,
            (DeliveryPhase::Ready, EndpointStanding::Active) => match delivery.progress.steps {
                0 => DeliveryStatus::Waiting,
                _used => DeliveryStatus::Failed,
            },
        }
    }

    fn delivery_backlog(&self) -> DeliveryBacklog {
        let mut backlog = DeliveryBacklog::default();
        for delivery in self.deliveries.values() {
            let count = match self.status_of(delivery) {
                DeliveryStatus::Waiting | DeliveryStatus::Failed => &mut backlog.waiting,
                DeliveryStatus::Sending => &mut backlog.sending,
                DeliveryStatus::Held => &mut backlog.held,
                DeliveryStatus::Parked => &mut backlog.parked,
                DeliveryStatus::Dead => &mut backlog.dead,
                DeliveryStatus::Delivered | DeliveryStatus::Cancelled => continue,
            };
            *count = (*count + 1).min(LANE_COUNT_MAX);
        }
        let to_active = self.deliveries.values().filter(|delivery| {
            delivery.phase.is_open()
                && delivery.phase != DeliveryPhase::Parked
                && self.endpoints[&delivery.endpoint].standing() == EndpointStanding::Active
        });
        backlog.oldest_due = to_active.map(|delivery| delivery.due).min();
        backlog
    }
}

fn message_fits(filter: &MessageFilter, summary: &MessageSummary) -> bool {
    filter.tenant.as_ref().is_none_or(|tenant| summary.tenant == tenant.as_str())
        && filter.message_type.as_ref().is_none_or(|wanted| summary.r#type == *wanted)
        && (filter.key.is_none() || filter.key == summary.key)
        && filter.status.is_none_or(|status| summary.status == status)
        && filter.since.is_none_or(|since| summary.created_at >= since)
        && filter.until.is_none_or(|until| summary.created_at < until)
}

fn delivery_fits(filter: &DeliveryFilter, detail: &DeliveryDetail) -> bool {
    filter.tenant.as_ref().is_none_or(|tenant| detail.tenant == tenant.as_str())
        && filter.endpoint.is_none_or(|endpoint| detail.endpoint == endpoint)
        && filter.message.as_ref().is_none_or(|message| detail.message == *message)
        && filter.status.is_none_or(|status| detail.status == status)
        && (filter.key.is_none() || filter.key == detail.key)
        && filter.since.is_none_or(|since| detail.created_at >= since)
        && filter.until.is_none_or(|until| detail.created_at < until)
}
