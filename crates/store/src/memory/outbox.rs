//! Sending: messages, endpoints, and the life of deliveries. Each function is one commit, and every
//! settlement is checked against the fence.
//!
//! The rules are written here a second time, without [`hapax_core::delivery::step`], so that random plans
//! can compare the other stores with them. [`super::outbox_reader`] has the queries.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use hapax_core::delivery::{DeliveryId, DeliveryPhase, EndpointStanding, OUTCOME_LOST};
use hapax_core::endpoint::{
    AddressChoice, Disabled, DisabledBy, EndpointAct, EndpointChanged, EndpointId, EndpointRecord,
    NewEndpoint,
};
use hapax_core::job::{AfterFailure, AfterLoss, Fence, Progress, Retry, WorkLocation, jittered};
use hapax_core::limits::{
    ENDPOINTS_PER_TENANT_MAX, ERROR_CHARS_MAX, RECEIVER_ENDPOINTS_PER_TENANT_MAX,
};
use hapax_core::message::Stamp;
use hapax_core::store::{
    Action, ActionNote, AttemptOutcome, AttemptVerdict, DeliveryAsk, DeliveryAttempt,
    DeliveryClaim, DeliveryReplayed, DeliverySkipped, DeliveryTarget, Exchanged, HandlerAnswer,
    Held, Horizon, MessageAct, MessageRef, NewMessage, Outbox, Published, PublishedMessage,
    StoreError,
};
use hapax_core::{KeyHash, Tenant, Timestamp};
use uuid::Uuid;

use super::circuit::EndpointHealth;
use super::work::{dice_of, later, shortened};
use super::{EventNumber, MemoryStore, Model};

pub(super) type MessageNumber = u64;
pub(super) type DeliveryNumber = u64;
pub(super) type EndpointNumber = u64;

/// The reason of a delivery that was cancelled because its endpoint was deleted.
const ENDPOINT_DELETED: &str = "its endpoint was deleted";

/// A message, as it was published.
#[derive(Debug)]
pub(super) struct StoredMessage {
    pub(super) id: String,
    pub(super) tenant: Tenant,
    /// The event whose handler published it.
    pub(super) event: Option<EventNumber>,
    pub(super) new: NewMessage,
    pub(super) fingerprint: KeyHash,
    pub(super) sequence: Option<u64>,
    pub(super) created_at: Timestamp,
    /// How many deliveries were written with it.
    deliveries: u64,
    /// Its body and deliveries are pruned; only its id is still known.
    pub(super) gone: bool,
}

/// An endpoint. A deleted one stays, because its deliveries name it.
#[derive(Debug)]
pub(super) struct StoredEndpoint {
    pub(super) record: EndpointRecord,
    pub(super) deleted: bool,
    /// The recent answers of the endpoint.
    pub(super) health: EndpointHealth,
}

impl StoredEndpoint {
    pub(super) fn standing(&self) -> EndpointStanding {
        match (self.deleted, &self.record.disabled, &self.record.failing) {
            (true, _, _) => EndpointStanding::Deleted,
            (false, Some(_), _) => EndpointStanding::Disabled,
            (false, None, Some(_)) => EndpointStanding::Failing,
            (false, None, None) => EndpointStanding::Active,
        }
    }
}

/// One message for one endpoint.
#[derive(Debug)]
pub(super) struct Delivery {
    pub(super) id: DeliveryId,
    pub(super) message: MessageNumber,
    pub(super) endpoint: EndpointNumber,
    /// The order key of its message.
    pub(super) key: Option<String>,
    /// Its place among the deliveries under that key.
    pub(super) place: u64,
    pub(super) phase: DeliveryPhase,
    pub(super) progress: Progress,
    /// The attempts before the last replay.
    earlier_attempts: u32,
    pub(super) fence: Fence,
    /// When a ready delivery is due, or a lease ends.
    pub(super) due: Timestamp,
    /// The last claim. The store keeps the claim after its lease, because the sender may still
    /// report.
    taken: Option<DeliveryLease>,
    /// The last error, or why it was cancelled.
    pub(super) reason: Option<String>,
    pub(super) finished_at: Option<Timestamp>,
    pub(super) attempts: Vec<DeliveryAttempt>,
    /// The actions of operators on this delivery and on its message.
    pub(super) actions: Vec<ActionNote>,
}

#[derive(Debug, Clone)]
struct DeliveryLease {
    node: Arc<str>,
    at: Timestamp,
    /// The number of the endpoint's circuit at the claim.
    circuit: u64,
}

impl Outbox for MemoryStore {
    async fn publish(&self, message: NewMessage) -> Result<Published, StoreError> {
        let published = self.model().publish(None, &Tenant::default(), message, self.now());
        self.hint_deliveries();
        Ok(published)
    }

    async fn exchange(
        &self,
        outcomes: Vec<AttemptOutcome>,
        ask: DeliveryAsk,
    ) -> Result<Exchanged, StoreError> {
        let exchanged = self.model().exchange(outcomes, &ask, self.now());
        if !exchanged.settled.is_empty() {
            self.hint_deliveries();
        }
        Ok(exchanged)
    }

    fn operator_acts(&self) -> u64 {
        self.operator_acts.so_far()
    }

    async fn wait_for_deliveries(&self, at_most: Duration) {
        // The caller does the same after a notification and after the timeout.
        let _ = tokio::time::timeout(at_most, self.deliveries_due.notified()).await;
    }

    async fn create_endpoint(
        &self,
        endpoint: NewEndpoint,
        _by: Action,
    ) -> Result<EndpointChanged, StoreError> {
        Ok(self.model().create_endpoint(endpoint, self.now()))
    }

    async fn change_endpoint(
        &self,
        endpoint: EndpointId,
        act: EndpointAct,
        _by: Action,
    ) -> Result<EndpointChanged, StoreError> {
        let changed = self.model().change_endpoint(endpoint, act, self.now());
        self.operator_acts.count();
        self.hint_deliveries();
        Ok(changed)
    }

    async fn replay_delivery(
        &self,
        delivery: DeliveryId,
        by: Action,
    ) -> Result<DeliveryReplayed, StoreError> {
        let replayed = self.model().replay_delivery(delivery, by, self.now());
        self.hint_deliveries();
        Ok(replayed)
    }

    async fn skip_delivery(
        &self,
        delivery: DeliveryId,
        by: Action,
    ) -> Result<DeliverySkipped, StoreError> {
        let skipped = self.model().skip_delivery(delivery, &by, self.now());
        self.hint_deliveries();
        Ok(skipped)
    }

    async fn change_message(
        &self,
        message: MessageRef,
        act: MessageAct,
        by: Action,
    ) -> Result<Option<Vec<DeliveryId>>, StoreError> {
        let changed = self.model().change_message(&message, act, &by, self.now());
        self.operator_acts.count();
        self.hint_deliveries();
        Ok(changed)
    }

    async fn cancel_orphans(&self, limit: usize) -> Result<bool, StoreError> {
        Ok(self.model().cancel_orphans(limit, self.now()))
    }
}

impl Model {
    /// Writes a message and its deliveries. The same id twice is one message. A message that names no
    /// tenant belongs to `of`, so that no tenant can use up another's ids.
    pub(super) fn publish(
        &mut self,
        event: Option<EventNumber>,
        of: &Tenant,
        new: NewMessage,
        now: Timestamp,
    ) -> Published {
        let tenant = new.tenant.as_ref().map_or_else(|| of.clone(), Tenant::new);
        let id = new.id.clone().unwrap_or_else(|| Uuid::now_v7().to_string());
        let fingerprint = new.fingerprint();
        if let Some(known) = self.message_numbered(&tenant, &id) {
            let known = &self.messages[&known];
            let deliveries = known.deliveries;
            return match known.fingerprint == fingerprint {
                true => Published::Duplicate(PublishedMessage { id, deliveries }),
                false => Published::Conflict { id },
            };
        }
        let sequence = new.key.clone().map(|key| {
            let last = self.sequences.entry((tenant.clone(), key)).or_default();
            *last += 1;
            *last
        });
        self.messages_ever += 1;
        let number = self.messages_ever;
        let wanting = |(_, endpoint): &(&EndpointNumber, &StoredEndpoint)| {
            endpoint.record.tenant == tenant
                && !endpoint.deleted
                && endpoint.record.settings.wants(&new)
        };
        let targets: Vec<EndpointNumber> =
            self.endpoints.iter().filter(wanting).map(|(at, _)| *at).collect();
        let published = PublishedMessage { id: id.clone(), deliveries: targets.len() as u64 };
        for endpoint in targets {
            self.write_delivery(number, endpoint, new.key.clone(), now);
        }
        let (created_at, deliveries, gone) = (now, published.deliveries, false);
        let message = StoredMessage {
            id,
            tenant,
            event,
            new,
            fingerprint,
            sequence,
            created_at,
            deliveries,
            gone,
        };
        self.messages.insert(number, message);
        Published::Accepted(published)
    }

    pub(super) fn write_delivery(
        &mut self,
        message: MessageNumber,
        endpoint: EndpointNumber,
        key: Option<String>,
        now: Timestamp,
    ) -> DeliveryNumber {
        let id = DeliveryId(Uuid::now_v7());
        let first_wait = self.endpoints[&endpoint].record.settings.retry.first();
        let wait = first_wait.map(|wait| jittered(*wait, dice_of(id.0, 0))).unwrap_or_default();
        let delivery = Delivery {
            id,
            message,
            endpoint,
            key,
            place: self.next_place(),
            phase: DeliveryPhase::Ready,
            progress: Progress::default(),
            earlier_attempts: 0,
            fence: Fence(0),
            due: later(now, wait),
            taken: None,
            reason: None,
            finished_at: None,
            attempts: Vec::new(),
            actions: Vec::new(),
        };
        self.deliveries_ever += 1;
        self.deliveries.insert(self.deliveries_ever, delivery);
        self.deliveries_ever
    }

    /// A place after all places so far.
    fn next_place(&mut self) -> u64 {
        self.places_ever += 1;
        self.places_ever
    }

    /// Records outcomes first, so that a report that arrives with the end of its lease still counts.
    /// Then ends the leases that ran out, and then claims deliveries.
    fn exchange(
        &mut self,
        outcomes: Vec<AttemptOutcome>,
        ask: &DeliveryAsk,
        now: Timestamp,
    ) -> Exchanged {
        let settled =
            outcomes.into_iter().map(|outcome| self.settle_attempt(outcome, now)).collect();
        self.wake_parked(now);
        self.lose_expired_deliveries(now);
        let claims = self.claim_deliveries(ask, now);
        Exchanged { settled, claims, next_due: self.next_delivery_due() }
    }

    fn settle_attempt(&mut self, outcome: AttemptOutcome, now: Timestamp) -> Held {
        let AttemptOutcome { delivery, fence, took, verdict } = outcome;
        let held = |at: &DeliveryNumber| {
            let delivery = &self.deliveries[at];
            delivery.fence == fence && delivery.taken.is_some()
        };
        let Some(at) = self.delivery_numbered(delivery).filter(held) else { return Held::Lost };
        let number = self.deliveries[&at].taken.as_ref().map(|taken| taken.circuit);
        let endpoint = self.deliveries[&at].endpoint;
        let before = self.endpoints[&endpoint].standing();
        let was_delivered = self.deliveries[&at].phase == DeliveryPhase::Delivered;
        let said = verdict.clone();
        let held = match verdict {
            AttemptVerdict::Delivered(answer)
            | AttemptVerdict::DeliveredLast { answer, reason: _ } => {
                self.delivered(at, took, answer, now)
            }
            AttemptVerdict::Failed { error, answer, retry, says: _ } => {
                self.attempt_failed(at, took, &error, answer, retry, now)
            }
            AttemptVerdict::GivenBack => self.give_delivery_back(at, now),
        };
        if let (Held::Kept, false, Some(number)) = (held, was_delivered, number) {
            let stored = self.endpoints.get_mut(&endpoint).expect("a delivery has an endpoint");
            stored.answered(number, &said, now);
            if self.deliveries[&at].phase == DeliveryPhase::Dead {
                self.note_death(endpoint, now);
            }
            self.publish_standing(endpoint, before, now);
        }
        held
    }

    /// Records a delivery as delivered under its fence, even if the attempt was recorded as lost
    /// since: the receiver has the message.
    fn delivered(
        &mut self,
        at: DeliveryNumber,
        took: Duration,
        answer: HandlerAnswer,
        now: Timestamp,
    ) -> Held {
        let delivery = self.delivery_mut(at);
        match delivery.phase {
            DeliveryPhase::Delivered => return Held::Kept,
            DeliveryPhase::Ready
            | DeliveryPhase::Leased
            | DeliveryPhase::Parked
            | DeliveryPhase::Dead
            | DeliveryPhase::Cancelled => {}
        }
        delivery.note(Some(took), None, Some(answer));
        delivery.end(DeliveryPhase::Delivered, now);
        Held::Kept
    }

    fn attempt_failed(
        &mut self,
        at: DeliveryNumber,
        took: Duration,
        error: &str,
        answer: Option<HandlerAnswer>,
        retry: Retry,
        now: Timestamp,
    ) -> Held {
        let policy = self.endpoints[&self.deliveries[&at].endpoint].record.settings.policy();
        let delivery = self.delivery_mut(at);
        if delivery.phase != DeliveryPhase::Leased {
            return Held::Lost;
        }
        delivery.note(Some(took), Some(shortened(error, ERROR_CHARS_MAX)), answer);
        let dice = dice_of(delivery.id.0, delivery.progress.attempt);
        let earlier = delivery.earlier_attempts;
        match delivery.progress.failed_since_replay(earlier, &policy, retry, now, dice) {
            AfterFailure::Again { progress, due } => {
                delivery.progress = progress;
                delivery.phase = DeliveryPhase::Ready;
                delivery.due = due;
            }
            AfterFailure::Bury { progress } => {
                delivery.progress = progress;
                delivery.end(DeliveryPhase::Dead, now);
            }
        }
        Held::Kept
    }

    /// Undoes the claim; its fence is void and no longer settles anything.
    fn give_delivery_back(&mut self, at: DeliveryNumber, now: Timestamp) -> Held {
        let delivery = self.delivery_mut(at);
        if delivery.phase != DeliveryPhase::Leased {
            return Held::Lost;
        }
        delivery.progress = delivery.progress.given_back();
        delivery.phase = DeliveryPhase::Ready;
        delivery.due = now;
        delivery.void();
        Held::Kept
    }

    /// Ends the leases that ran out, including those of disabled and deleted endpoints. A delivery
    /// may be lost any number of times: a request cannot end this process.
    fn lose_expired_deliveries(&mut self, now: Timestamp) {
        let expired = |delivery: &&mut Delivery| {
            delivery.phase == DeliveryPhase::Leased && delivery.due <= now
        };
        for delivery in self.deliveries.values_mut().filter(expired) {
            delivery.note(None, Some(OUTCOME_LOST.to_owned()), None);
            let dice = dice_of(delivery.id.0, delivery.progress.attempt);
            match delivery.progress.lost(WorkLocation::Called, delivery.due, dice) {
                AfterLoss::Again { progress, due } => {
                    delivery.progress = progress;
                    delivery.due = due;
                    delivery.phase = DeliveryPhase::Ready;
                }
                AfterLoss::Bury { .. } => unreachable!("only work inside the process is buried"),
            }
        }
    }

    fn claim_deliveries(&mut self, ask: &DeliveryAsk, now: Timestamp) -> Vec<DeliveryClaim> {
        let mut claims: Vec<DeliveryClaim> = Vec::new();
        let mut bytes = 0;
        while claims.len() < ask.limit {
            let Some(at) = self.next_delivery_in_turn(&claims, ask, now) else { break };
            if self.must_wait(at) {
                let delivery = self.delivery_mut(at);
                delivery.phase = DeliveryPhase::Parked;
                delivery.due = now;
                continue;
            }
            let body = self.body_of(at);
            bytes += body.len();
            if bytes > ask.bytes_max && !claims.is_empty() {
                break;
            }
            claims.push(self.take_delivery(at, body, ask, now));
        }
        claims
    }

    /// The delivery whose turn it is. The endpoint with the fewest claims in this exchange comes first,
    /// then the endpoint that was served longest ago. Of its deliveries, the one due longest comes first,
    /// then the oldest.
    fn next_delivery_in_turn(
        &self,
        claims: &[DeliveryClaim],
        ask: &DeliveryAsk,
        now: Timestamp,
    ) -> Option<DeliveryNumber> {
        let served = |endpoint: EndpointId| {
            claims.iter().filter(|claim| claim.endpoint.id == endpoint).count()
        };
        let open: BTreeSet<EndpointNumber> =
            self.endpoints.keys().copied().filter(|at| self.may_send(*at, ask, now)).collect();
        self.deliveries
            .iter()
            .filter(|(_, delivery)| {
                delivery.phase == DeliveryPhase::Ready
                    && delivery.due <= now
                    && open.contains(&delivery.endpoint)
            })
            .min_by_key(|(at, delivery)| {
                let last = self.endpoint_turns.get(&delivery.endpoint).copied().unwrap_or_default();
                let endpoint = &self.endpoints[&delivery.endpoint].record;
                // At an endpoint that fails, the delivery with the fewest attempts comes first.
                let tried = match endpoint.failing {
                    Some(_) => delivery.progress.attempt,
                    None => 0,
                };
                (served(endpoint.id), last, delivery.endpoint, tried, delivery.due, **at)
            })
            .map(|(at, _)| *at)
    }

    /// Whether a delivery must wait at an endpoint that keeps order: an earlier delivery under its key
    /// has not ended, or another one is under way.
    fn must_wait(&self, at: DeliveryNumber) -> bool {
        let delivery = &self.deliveries[&at];
        let settings = &self.endpoints[&delivery.endpoint].record.settings;
        if !settings.keeps_order() || delivery.key.is_none() {
            return false;
        }
        let same_key = |one: &&Delivery| {
            one.endpoint == delivery.endpoint && one.key == delivery.key && one.id != delivery.id
        };
        self.deliveries.values().filter(same_key).any(|one| match one.phase {
            DeliveryPhase::Leased => true,
            DeliveryPhase::Ready | DeliveryPhase::Parked => one.place < delivery.place,
            DeliveryPhase::Dead => settings.parks_dead() && one.place < delivery.place,
            DeliveryPhase::Delivered | DeliveryPhase::Cancelled => false,
        })
    }

    /// Readies every parked delivery that no longer waits for anything.
    pub(super) fn wake_parked(&mut self, now: Timestamp) {
        let parked = self.deliveries.iter().filter(|(_, one)| one.phase == DeliveryPhase::Parked);
        let woken: Vec<DeliveryNumber> =
            parked.map(|(at, _)| *at).filter(|at| !self.must_wait(*at)).collect();
        for at in woken {
            let delivery = self.delivery_mut(at);
            delivery.phase = DeliveryPhase::Ready;
            delivery.due = now;
        }
    }

    /// Whether this node may begin another attempt at this endpoint.
    fn may_send(&self, endpoint: EndpointNumber, ask: &DeliveryAsk, now: Timestamp) -> bool {
        let under_way = |delivery: &&Delivery| {
            delivery.endpoint == endpoint && delivery.phase == DeliveryPhase::Leased
        };
        let stored = &self.endpoints[&endpoint];
        let stands = match stored.standing() {
            EndpointStanding::Active | EndpointStanding::Failing => true,
            EndpointStanding::Disabled | EndpointStanding::Deleted => false,
        };
        stands
            && stored.within_rate(now)
            && stored.record.sealed.key_ids().all(|key| ask.vault_keys.contains(&key))
            && self.deliveries.values().filter(under_way).count() < stored.slots(now) as usize
    }

    fn take_delivery(
        &mut self,
        at: DeliveryNumber,
        body: String,
        ask: &DeliveryAsk,
        now: Timestamp,
    ) -> DeliveryClaim {
        let message = self.messages[&self.deliveries[&at].message].id.clone();
        let endpoint = self.deliveries[&at].endpoint;
        let record = &self.endpoints[&endpoint].record;
        let target = DeliveryTarget::of(record);
        let leased_until = later(now, record.settings.policy().lease);
        let stored = self.endpoints.get_mut(&endpoint).expect("a delivery has an endpoint");
        let circuit = stored.claimed(leased_until, now);
        self.turns_ever += 1;
        self.endpoint_turns.insert(endpoint, self.turns_ever);
        let delivery = self.delivery_mut(at);
        delivery.void();
        delivery.phase = DeliveryPhase::Leased;
        delivery.progress = delivery.progress.claimed();
        delivery.due = leased_until;
        delivery.taken = Some(DeliveryLease { node: Arc::clone(&ask.node), at: now, circuit });
        DeliveryClaim {
            delivery: delivery.id,
            fence: delivery.fence,
            attempt: delivery.progress.attempt,
            message,
            body: body.into(),
            leased_until,
            endpoint: Arc::new(target),
        }
    }

    fn body_of(&self, at: DeliveryNumber) -> String {
        let delivery = &self.deliveries[&at];
        let payload = self.endpoints[&delivery.endpoint].record.settings.payload;
        self.messages[&delivery.message].body(payload)
    }

    fn next_delivery_due(&self) -> Option<Timestamp> {
        let to_come = |delivery: &&Delivery| match delivery.phase {
            DeliveryPhase::Ready => match self.endpoints[&delivery.endpoint].standing() {
                EndpointStanding::Active | EndpointStanding::Failing => true,
                EndpointStanding::Disabled | EndpointStanding::Deleted => false,
            },
            DeliveryPhase::Leased => true,
            DeliveryPhase::Parked
            | DeliveryPhase::Delivered
            | DeliveryPhase::Dead
            | DeliveryPhase::Cancelled => false,
        };
        let from = |delivery: &Delivery| match delivery.phase {
            DeliveryPhase::Ready => self.endpoints[&delivery.endpoint]
                .opens_at()
                .map_or(delivery.due, |at| at.max(delivery.due)),
            DeliveryPhase::Leased
            | DeliveryPhase::Parked
            | DeliveryPhase::Delivered
            | DeliveryPhase::Dead
            | DeliveryPhase::Cancelled => delivery.due,
        };
        self.deliveries.values().filter(to_come).map(from).min()
    }

    fn create_endpoint(&mut self, new: NewEndpoint, now: Timestamp) -> EndpointChanged {
        let NewEndpoint { id, tenant, settings, sealed } = new;
        let of_tenant = |one: &&StoredEndpoint| !one.deleted && one.record.tenant == tenant;
        let by_receiver =
            |one: &&StoredEndpoint| one.record.settings.address_by == AddressChoice::Receiver;
        let siblings = || self.endpoints.values().filter(of_tenant);
        let is_full = match settings.address_by {
            AddressChoice::Operator => false,
            AddressChoice::Receiver => {
                siblings().filter(by_receiver).count() >= RECEIVER_ENDPOINTS_PER_TENANT_MAX
            }
        };
        if is_full || siblings().count() >= ENDPOINTS_PER_TENANT_MAX {
            return EndpointChanged::TooMany;
        }
        if self.uid_taken(id, &tenant, settings.uid.as_deref()) {
            return EndpointChanged::UidTaken;
        }
        let (version, created_at, disabled, failing) = (1, now, None, None);
        let record =
            EndpointRecord { id, tenant, settings, sealed, version, created_at, disabled, failing };
        self.endpoints_ever += 1;
        let stored = StoredEndpoint {
            record: record.clone(),
            deleted: false,
            health: EndpointHealth::default(),
        };
        self.endpoints.insert(self.endpoints_ever, stored);
        EndpointChanged::Changed(Box::new(record))
    }

    fn change_endpoint(
        &mut self,
        id: EndpointId,
        act: EndpointAct,
        now: Timestamp,
    ) -> EndpointChanged {
        let Some(at) = self.endpoint_numbered(id) else { return EndpointChanged::Unknown };
        let current = &self.endpoints[&at].record;
        if let EndpointAct::Change { version, settings, .. } = &act {
            if current.version != *version {
                return EndpointChanged::VersionChanged;
            }
            if self.uid_taken(id, &current.tenant, settings.uid.as_deref()) {
                return EndpointChanged::UidTaken;
            }
        }
        match (&act, &current.disabled) {
            (EndpointAct::DisableByReceiver { .. }, Some(_)) => {
                return EndpointChanged::Changed(Box::new(current.clone()));
            }
            (EndpointAct::EnableByReceiver, Some(disabled))
                if disabled.by == DisabledBy::Operator =>
            {
                return EndpointChanged::DisabledByOperator;
            }
            (_, _) => {}
        }
        let stored = self.endpoints.get_mut(&at).expect("an endpoint that was just found");
        let before = stored.standing();
        let record = &mut stored.record;
        record.version += 1;
        match act {
            EndpointAct::Change { settings, sealed, .. } => {
                record.settings = *settings;
                record.sealed = sealed;
            }
            EndpointAct::Disable { reason } => {
                record.disabled = Some(Disabled { at: now, reason, by: DisabledBy::Operator });
            }
            EndpointAct::DisableByReceiver { reason } => {
                record.disabled = Some(Disabled { at: now, reason, by: DisabledBy::Receiver });
            }
            EndpointAct::Enable | EndpointAct::EnableByReceiver => {
                let was_disabled = record.disabled.take().is_some();
                stored.enabled(was_disabled, now);
            }
            EndpointAct::Delete => {
                stored.deleted = true;
                return EndpointChanged::Deleted;
            }
        }
        let changed = stored.record.clone();
        self.publish_standing(at, before, now);
        // The change may have ended the endpoint's order, or the blocking of a key by a dead
        // delivery.
        self.wake_parked(now);
        EndpointChanged::Changed(Box::new(changed))
    }

    fn uid_taken(&self, by: EndpointId, tenant: &Tenant, uid: Option<&str>) -> bool {
        let has_it = |one: &StoredEndpoint| {
            !one.deleted
                && one.record.id != by
                && one.record.tenant == *tenant
                && one.record.settings.uid.as_deref() == uid
        };
        uid.is_some() && self.endpoints.values().any(has_it)
    }

    fn replay_delivery(&mut self, id: DeliveryId, by: Action, now: Timestamp) -> DeliveryReplayed {
        let Some(at) = self.delivery_numbered(id) else { return DeliveryReplayed::Unknown };
        let delivery = &self.deliveries[&at];
        if self.endpoints[&delivery.endpoint].deleted {
            return DeliveryReplayed::Gone;
        }
        let is_due = self.send_again(at, now);
        self.wake_parked(now);
        match is_due {
            true => {
                self.delivery_mut(at).actions.push(action_note("replay", by));
                DeliveryReplayed::Due
            }
            false => DeliveryReplayed::AlreadyOpen,
        }
    }

    /// Sends a delivery again. A delivery that had ended goes behind all others under its key, unless it is
    /// the dead one that these wait for.
    pub(super) fn send_again(&mut self, at: DeliveryNumber, now: Timestamp) -> bool {
        let parks = self.endpoints[&self.deliveries[&at].endpoint].record.settings.parks_dead();
        let last = self.next_place();
        let delivery = self.delivery_mut(at);
        match delivery.phase {
            DeliveryPhase::Dead if parks => {}
            DeliveryPhase::Delivered | DeliveryPhase::Dead | DeliveryPhase::Cancelled => {
                delivery.place = last;
            }
            DeliveryPhase::Ready | DeliveryPhase::Leased | DeliveryPhase::Parked => {}
        }
        delivery.send_again(now)
    }

    fn skip_delivery(&mut self, id: DeliveryId, by: &Action, now: Timestamp) -> DeliverySkipped {
        let Some(at) = self.delivery_numbered(id) else { return DeliverySkipped::Unknown };
        let delivery = self.delivery_mut(at);
        match delivery.phase {
            DeliveryPhase::Leased => return DeliverySkipped::Sending,
            DeliveryPhase::Delivered | DeliveryPhase::Cancelled => {
                return DeliverySkipped::AlreadyOver;
            }
            DeliveryPhase::Ready | DeliveryPhase::Parked | DeliveryPhase::Dead => {}
        }
        delivery.reason =
            Some(by.reason.clone().unwrap_or_else(|| format!("skipped by {}", by.who)));
        delivery.end(DeliveryPhase::Cancelled, now);
        delivery.actions.push(action_note("skip", by.clone()));
        self.wake_parked(now);
        DeliverySkipped::Skipped
    }

    fn change_message(
        &mut self,
        message: &MessageRef,
        act: MessageAct,
        by: &Action,
        now: Timestamp,
    ) -> Option<Vec<DeliveryId>> {
        let number = self.message_numbered(&message.tenant, &message.id)?;
        let of_message = self.deliveries.iter().filter(|(_, one)| one.message == number);
        let of_message: Vec<DeliveryNumber> = of_message.map(|(at, _)| *at).collect();
        let mut changed = Vec::new();
        for at in of_message {
            let Delivery { id, phase, endpoint, .. } = self.deliveries[&at];
            let is_changed = match act {
                MessageAct::Cancel => self.delivery_mut(at).cancel(
                    by.reason.clone().unwrap_or_else(|| format!("cancelled by {}", by.who)),
                    now,
                ),
                MessageAct::Replay => {
                    phase != DeliveryPhase::Delivered
                        && !self.endpoints[&endpoint].deleted
                        && self.send_again(at, now)
                }
            };
            if is_changed {
                changed.push(id);
            }
        }
        self.wake_parked(now);
        if !changed.is_empty() {
            let what = match act {
                MessageAct::Cancel => "cancel",
                MessageAct::Replay => "replay",
            };
            for delivery in self.deliveries.values_mut().filter(|one| one.message == number) {
                delivery.actions.push(action_note(what, by.clone()));
            }
        }
        Some(changed)
    }

    fn cancel_orphans(&mut self, limit: usize, now: Timestamp) -> bool {
        let endpoints = &self.endpoints;
        let mut orphans = self
            .deliveries
            .values_mut()
            .filter(|delivery| delivery.phase.is_open() && endpoints[&delivery.endpoint].deleted);
        for orphan in orphans.by_ref().take(limit) {
            orphan.cancel(ENDPOINT_DELETED.to_owned(), now);
        }
        orphans.next().is_some()
    }

    /// The id of a message that cannot be published, because it was used before for other content.
    pub(super) fn id_in_conflict(&self, of: &Tenant, publish: &[NewMessage]) -> Option<String> {
        let mut seen: HashMap<(Tenant, &str), KeyHash> = HashMap::new();
        publish.iter().find_map(|new| {
            let id = new.id.as_deref()?;
            let tenant = new.tenant.as_ref().map_or_else(|| of.clone(), Tenant::new);
            let stored =
                self.message_numbered(&tenant, id).map(|at| self.messages[&at].fingerprint);
            let first = *seen.entry((tenant, id)).or_insert(stored.unwrap_or(new.fingerprint()));
            (first != new.fingerprint()).then(|| id.to_owned())
        })
    }

    /// Deletes bodies and deliveries of messages that were published before the horizon and whose deliveries
    /// ended before it. A dead delivery has not ended: an operator has to decide about it. The ids of
    /// messages have a horizon of their own.
    pub(super) fn prune_messages(&mut self, horizon: &Horizon) {
        let before = horizon.events_before;
        let needed = |at: MessageNumber| {
            self.deliveries_of(at).any(|delivery| {
                let over = match delivery.phase {
                    DeliveryPhase::Delivered | DeliveryPhase::Cancelled => true,
                    DeliveryPhase::Ready
                    | DeliveryPhase::Leased
                    | DeliveryPhase::Parked
                    | DeliveryPhase::Dead => false,
                };
                !over || delivery.finished_at.is_none_or(|ended| ended >= before)
            })
        };
        let old = self.messages.iter().filter(|(_, message)| message.created_at < before);
        let gone: Vec<MessageNumber> = old.map(|(at, _)| *at).filter(|at| !needed(*at)).collect();
        self.deliveries.retain(|_, delivery| !gone.contains(&delivery.message));
        for at in gone {
            self.messages.get_mut(&at).expect("a message that was just found").gone = true;
        }
        let ids_before = horizon.message_ids_before;
        self.messages.retain(|_, message| !message.gone || message.created_at >= ids_before);
    }

    pub(super) fn message_numbered(&self, tenant: &Tenant, id: &str) -> Option<MessageNumber> {
        let is_it = |message: &StoredMessage| message.tenant == *tenant && message.id == id;
        self.messages.iter().find(|(_, message)| is_it(message)).map(|(at, _)| *at)
    }

    pub(super) fn delivery_numbered(&self, id: DeliveryId) -> Option<DeliveryNumber> {
        self.deliveries.iter().find(|(_, one)| one.id == id).map(|(at, _)| *at)
    }

    pub(super) fn endpoint_numbered(&self, id: EndpointId) -> Option<EndpointNumber> {
        let is_it = |one: &StoredEndpoint| one.record.id == id && !one.deleted;
        self.endpoints.iter().find(|(_, one)| is_it(one)).map(|(at, _)| *at)
    }

    pub(super) fn deliveries_of(&self, message: MessageNumber) -> impl Iterator<Item = &Delivery> {
        self.deliveries.values().filter(move |delivery| delivery.message == message)
    }

    pub(super) fn delivery_mut(&mut self, at: DeliveryNumber) -> &mut Delivery {
        self.deliveries.get_mut(&at).expect("a number is only taken from a delivery that is there")
    }
}

fn action_note(action: &str, by: Action) -> ActionNote {
    let Action { who, reason, at } = by;
    ActionNote { action: action.to_owned(), who, reason, at }
}

impl StoredMessage {
    pub(super) fn body(&self, payload: hapax_core::message::Payload) -> String {
        let stamp = Stamp { id: &self.id, created_at: self.created_at, sequence: self.sequence };
        self.new.envelope(&stamp, payload)
    }
}

impl Delivery {
    /// Raises the fence, so that the last claim can no longer settle the delivery.
    fn void(&mut self) {
        self.fence = Fence(self.fence.0 + 1);
        self.taken = None;
    }

    fn end(&mut self, phase: DeliveryPhase, now: Timestamp) {
        self.phase = phase;
        self.finished_at = Some(now);
    }

    /// Cancels an open delivery. Its fence stays valid: if a request got through, the delivery is
    /// delivered.
    fn cancel(&mut self, reason: String, now: Timestamp) -> bool {
        if !self.phase.is_open() {
            return false;
        }
        self.give_up(reason, now);
        true
    }

    /// Ends a delivery that is not delivered.
    pub(super) fn give_up(&mut self, reason: String, now: Timestamp) {
        self.reason = Some(reason);
        self.end(DeliveryPhase::Cancelled, now);
    }

    /// Makes a delivery due now. A delivery that waits keeps its place in the schedule, and an ended
    /// one begins the schedule again. Returns false if the delivery is due, parked or under way.
    fn send_again(&mut self, now: Timestamp) -> bool {
        match self.phase {
            DeliveryPhase::Ready if self.due > now => self.due = now,
            DeliveryPhase::Ready | DeliveryPhase::Leased | DeliveryPhase::Parked => return false,
            DeliveryPhase::Delivered | DeliveryPhase::Dead | DeliveryPhase::Cancelled => {
                self.phase = DeliveryPhase::Ready;
                self.progress.steps = 0;
                self.progress.lost = 0;
                self.earlier_attempts = self.progress.attempt;
                self.due = now;
                self.reason = None;
                self.finished_at = None;
                self.void();
            }
        }
        true
    }

    /// Records how the attempt ended. A later record of the same attempt replaces the earlier one.
    fn note(
        &mut self,
        took: Option<Duration>,
        error: Option<String>,
        answer: Option<HandlerAnswer>,
    ) {
        let Some(taken) = &self.taken else { return };
        let n = self.progress.attempt;
        self.attempts.retain(|attempt| attempt.n != n);
        self.reason.clone_from(&error);
        self.attempts.push(DeliveryAttempt {
            n,
            at: taken.at,
            took_ms: took.map(|took| u64::try_from(took.as_millis()).unwrap_or(u64::MAX)),
            status: answer.as_ref().map(|answer| answer.status),
            error,
            answer: answer.map(|answer| answer.body).filter(|body| !body.is_empty()),
            node: taken.node.to_string(),
        });
    }
}
