//! The end of deliveries that were dead, held or parked for too long. The rule is written here a second time, without
//! [`hapax_core::store::ExpiryTimes`], so that the conformance suite can compare the other stores with it.

use hapax_core::Timestamp;
use hapax_core::delivery::{DeliveryPhase, EXPIRED, EndpointStanding};
use hapax_core::store::{Expiry, ExpiryAsk, ExpiryNotice, OutboxRetention, StoreError};
use jiff::SignedDuration;

use super::outbox::{Delivery, EndpointNumber};
use super::{MemoryStore, Model};

impl OutboxRetention for MemoryStore {
    async fn expire_deliveries(&self, ask: ExpiryAsk) -> Result<Expiry, StoreError> {
        Ok(self.model().expire_deliveries(ask, self.now()))
    }
}

impl Model {
    fn expire_deliveries(&mut self, ask: ExpiryAsk, now: Timestamp) -> Expiry {
        let kept = SignedDuration::try_from(ask.kept).expect("a span that a test can wait for");
        let notice = SignedDuration::try_from(ask.notice).expect("a span that a test can wait for");
        let (mut expiry, mut room) = (Expiry::default(), ask.limit);
        for at in self.endpoints.keys().copied().collect::<Vec<_>>() {
            let ages = self.deliveries.values().filter_map(|one| self.given_up_since(at, one));
            let oldest = ages.min();
            let age = oldest.map(|since| now.duration_since(since));
            let announced_at = self.expiry_announced.get(&at).copied();
            let endpoint = &self.endpoints[&at];
            let is_near = age.is_some_and(|age| age > kept - notice);
            if !endpoint.deleted {
                match (is_near, announced_at) {
                    (true, None) => {
                        self.expiry_announced.insert(at, now);
                        let (id, tenant) = (endpoint.record.id, endpoint.record.tenant.clone());
                        let oldest = oldest.expect("something is near its end");
                        let cancelled_from = (oldest + kept).max(now + notice);
                        let message = endpoint.record.subject().expiring(oldest, cancelled_from);
                        expiry.announced.push(ExpiryNotice { endpoint: id, tenant, oldest });
                        self.publish_own(message, now);
                        continue;
                    }
                    (false, _) => {
                        self.expiry_announced.remove(&at);
                        continue;
                    }
                    (true, Some(then)) if now.duration_since(then) < notice => continue,
                    (true, Some(_)) => {}
                }
            }
            let id = endpoint.record.id;
            let is_past = |one: &Delivery| {
                let since = self.given_up_since(at, one);
                since.is_some_and(|since| now.duration_since(since) > kept)
            };
            let deliveries = self.deliveries.iter().filter(|(_, one)| is_past(one));
            let mut old: Vec<_> = deliveries.map(|(number, _)| *number).collect();
            // Parked deliveries end first, because the end of the dead delivery that they wait for would
            // send them.
            old.sort_by_key(|number| self.deliveries[number].phase != DeliveryPhase::Parked);
            old.truncate(room);
            for number in &old {
                self.delivery_mut(*number).give_up(EXPIRED.to_owned(), now);
            }
            self.wake_parked(now);
            room -= old.len();
            if !old.is_empty() {
                expiry.cancelled.push((id, old.len() as u64));
            }
        }
        expiry.more = room == 0;
        expiry
    }

    /// The time since which a delivery of this endpoint has been dead, held or parked.
    fn given_up_since(&self, at: EndpointNumber, delivery: &Delivery) -> Option<Timestamp> {
        let endpoint = &self.endpoints[&at];
        let disabled = endpoint.record.disabled.as_ref().map(|disabled| disabled.at);
        match (delivery.phase, endpoint.standing()) {
            _ if delivery.endpoint != at => None,
            (DeliveryPhase::Dead, _) => delivery.finished_at,
            (DeliveryPhase::Ready, EndpointStanding::Disabled) => {
                disabled.map(|disabled| disabled.max(delivery.due))
            }
            // An endpoint that fails is tried again, or disabled after some days.
            (
                DeliveryPhase::Ready,
                EndpointStanding::Active | EndpointStanding::Failing | EndpointStanding::Deleted,
            ) => None,
            (
                DeliveryPhase::Parked,
                EndpointStanding::Active | EndpointStanding::Failing | EndpointStanding::Disabled,
            ) => Some(delivery.due),
            (DeliveryPhase::Parked, EndpointStanding::Deleted) => None,
            (DeliveryPhase::Leased | DeliveryPhase::Delivered | DeliveryPhase::Cancelled, _) => {
                None
            }
        }
    }
}
