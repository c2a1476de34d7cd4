//! Helpers for the cases of sending: endpoints with sealed secrets, messages, and senders that
//! claim and report, all on a [`World`] with its clock.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::Tenant;
use hapax_core::delivery::{DeliveryId, DeliveryStatus};
use hapax_core::endpoint::{
    EndpointAct, EndpointChanged, EndpointId, EndpointRecord, EndpointSealed, EndpointSettings,
    NewEndpoint,
};
use hapax_core::handler::TypeFilter;
use hapax_core::job::Retry;
use hapax_core::message::MessageData;
use hapax_core::store::{
    AlertRecords, AttemptOutcome, AttemptVerdict, DeliveryAsk, DeliveryClaim, DeliveryDetail,
    DeliveryFilter, DeliveryReplayed, EndpointSignal, Exchanged, HandlerAnswer, Held,
    InspectOutbox, MessageAct, MessageDetail, MessageRef, NewMessage, Outbox, OutboxRetention,
    OwnMessages, Plans, Published, SourceSecretStore, TenantDeletions,
};
use hapax_core::vault::{KeyId, SealContext, Vault, VaultKey};
use uuid::Uuid;

use crate::harness::{Working, World};

/// A store that also sends.
pub(crate) trait Sending:
    Working
    + AlertRecords
    + Outbox
    + InspectOutbox
    + OutboxRetention
    + OwnMessages
    + Plans
    + SourceSecretStore
    + TenantDeletions
{
}
impl<S> Sending for S where
    S: Working
        + AlertRecords
        + Outbox
        + InspectOutbox
        + OutboxRetention
        + OwnMessages
        + Plans
        + SourceSecretStore
        + TenantDeletions
{
}

/// More claims than any case has deliveries.
pub(crate) const ALL: usize = 10_000;

/// The error of every attempt that fails.
pub(crate) const REFUSED: &str = "the endpoint answered 500";

/// The vault with the key of this number.
pub(crate) fn vault(key: u8) -> Vault {
    Vault::new(VaultKey::from_bytes(&[key; 32]), Vec::new()).expect("one key")
}

pub(crate) fn key_id(key: u8) -> KeyId {
    vault(key).current_key_id()
}

/// Values of an endpoint, sealed with the key of this number.
pub(crate) fn sealed(id: EndpointId, tenant: &Tenant, key: u8) -> EndpointSealed {
    let owner = id.to_string();
    let context = SealContext::endpoint_secrets(tenant, &owner);
    EndpointSealed { secrets: vault(key).seal(&context, b"a secret", [7; 12]), headers: None }
}

/// An endpoint for everything. The first attempt is due at once, the next after about a minute and about
/// five; a lease lasts [`LEASE`](crate::harness::LEASE).
pub(crate) fn settings() -> EndpointSettings {
    EndpointSettings {
        retry: [0, 60, 300].map(Duration::from_secs).to_vec(),
        ..EndpointSettings::at("https://example.com/in")
    }
}

/// An endpoint for these types.
pub(crate) fn wanting(types: &[&str]) -> EndpointSettings {
    let types = TypeFilter::new(types.iter().copied()).expect("globs");
    EndpointSettings { types, ..settings() }
}

/// A message that names no tenant.
pub(crate) fn message(id: &str) -> NewMessage {
    NewMessage::new("invoice.paid", json(&format!("{{\"id\":\"{id}\",\"amount\":5}}"))).with_id(id)
}

pub(crate) fn json(text: &str) -> MessageData {
    MessageData::parse(text).expect("JSON")
}

pub(crate) fn ask(limit: usize) -> DeliveryAsk {
    DeliveryAsk {
        limit,
        bytes_max: usize::MAX >> 1,
        node: "node-1".into(),
        vault_keys: Arc::from([key_id(1)]),
        claims_ahead: false,
    }
}

pub(crate) fn delivered() -> AttemptVerdict {
    AttemptVerdict::Delivered(HandlerAnswer { status: 202, body: "thanks".to_owned() })
}

pub(crate) fn failed(retry: Retry) -> AttemptVerdict {
    let says = match retry {
        Retry::Unsent => EndpointSignal::Nothing,
        Retry::Schedule | Retry::NotBefore(_) | Retry::In(_) | Retry::Never => {
            EndpointSignal::Fails
        }
    };
    failed_saying(retry, says)
}

pub(crate) fn failed_saying(retry: Retry, says: EndpointSignal) -> AttemptVerdict {
    let answer = Some(HandlerAnswer { status: 500, body: "not now".to_owned() });
    AttemptVerdict::Failed { error: REFUSED.to_owned(), answer, retry, says }
}

pub(crate) fn outcome(claim: &DeliveryClaim, verdict: AttemptVerdict) -> AttemptOutcome {
    let took = Duration::from_millis(40);
    AttemptOutcome { delivery: claim.delivery, fence: claim.fence, took, verdict }
}

/// The messages that were claimed, sorted.
pub(crate) fn claimed(claims: &[DeliveryClaim]) -> Vec<&str> {
    let mut messages: Vec<&str> = claims.iter().map(|claim| claim.message.as_str()).collect();
    messages.sort_unstable();
    messages
}

impl<S: Sending> World<S> {
    pub(crate) async fn add(&self, settings: EndpointSettings) -> EndpointId {
        self.add_for(Tenant::default(), settings).await
    }

    pub(crate) async fn add_for(&self, tenant: Tenant, settings: EndpointSettings) -> EndpointId {
        self.create(tenant, settings, 1).await.id
    }

    /// An endpoint whose values are sealed with the key of this number.
    pub(crate) async fn create(
        &self,
        tenant: Tenant,
        settings: EndpointSettings,
        key: u8,
    ) -> EndpointRecord {
        let id = EndpointId(Uuid::now_v7());
        let sealed = sealed(id, &tenant, key);
        let new = NewEndpoint { id, tenant, settings, sealed };
        match self.store.create_endpoint(new, self.by("add")).await.expect("creates") {
            EndpointChanged::Changed(record) => *record,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) async fn change(&self, endpoint: EndpointId, act: EndpointAct) -> EndpointChanged {
        self.store.change_endpoint(endpoint, act, self.by("change")).await.expect("changes")
    }

    /// Replaces the settings, whatever version the endpoint has.
    pub(crate) async fn set(&self, endpoint: EndpointId, settings: EndpointSettings) {
        let now = self.endpoint(endpoint).await;
        let (version, sealed) = (now.version, now.sealed);
        let act = EndpointAct::Change { version, settings: Box::new(settings), sealed };
        let changed = self.change(endpoint, act).await;
        assert!(matches!(changed, EndpointChanged::Changed(_)), "{changed:?}");
    }

    pub(crate) async fn disable(&self, endpoint: EndpointId) {
        let act = EndpointAct::Disable { reason: "it is being moved".to_owned() };
        let changed = self.change(endpoint, act).await;
        assert!(matches!(changed, EndpointChanged::Changed(_)), "{changed:?}");
    }

    pub(crate) async fn enable(&self, endpoint: EndpointId) {
        let changed = self.change(endpoint, EndpointAct::Enable).await;
        assert!(matches!(changed, EndpointChanged::Changed(_)), "{changed:?}");
    }

    pub(crate) async fn delete(&self, endpoint: EndpointId) {
        assert_eq!(self.change(endpoint, EndpointAct::Delete).await, EndpointChanged::Deleted);
    }

    pub(crate) async fn cancel_orphans(&self) {
        while self.store.cancel_orphans(2).await.expect("cancels") {}
    }

    pub(crate) async fn endpoint(&self, id: EndpointId) -> EndpointRecord {
        self.store.endpoint(id).await.expect("reads").expect("is there")
    }

    pub(crate) async fn publish(&self, message: NewMessage) -> Published {
        assert_eq!(message.fault(), None);
        self.store.publish(message).await.expect("publishes")
    }

    /// Publishes a new message, and returns the number of its deliveries.
    pub(crate) async fn send(&self, message: NewMessage) -> u64 {
        match self.publish(message).await {
            Published::Accepted(published) => published.deliveries,
            other => panic!("{other:?}"),
        }
    }

    /// Publishes that many messages at once, named `{prefix}_{n}`.
    pub(crate) async fn send_many(&self, prefix: &str, kind: &str, count: usize) {
        let tasks: Vec<_> = (0..count)
            .map(|n| {
                let store = Arc::clone(&self.store);
                let id = format!("{prefix}_{n}");
                let message = NewMessage { r#type: kind.to_owned(), ..message(&id) };
                tokio::spawn(async move { store.publish(message).await.expect("publishes") })
            })
            .collect();
        for task in tasks {
            let published = task.await.expect("no panic");
            assert!(matches!(published, Published::Accepted(_)), "{published:?}");
        }
    }

    pub(crate) async fn exchange(
        &self,
        outcomes: Vec<AttemptOutcome>,
        ask: DeliveryAsk,
    ) -> Exchanged {
        let (limit, reported) = (ask.limit, outcomes.len());
        let exchanged = self.store.exchange(outcomes, ask).await.expect("exchanges");
        assert_eq!(exchanged.settled.len(), reported, "an answer to each outcome");
        assert!(exchanged.claims.len() <= limit, "more than was asked for");
        exchanged
    }

    /// Claims up to `limit` deliveries. A store may return before it has claimed all that is due, so that a
    /// long exchange delays no ack: with [`ALL`] this asks until nothing is left.
    pub(crate) async fn take(&self, limit: usize) -> Vec<DeliveryClaim> {
        self.exchange_all(Vec::new(), ask(limit)).await.claims
    }

    /// Settles, and claims up to the limit in as many exchanges as that takes.
    pub(crate) async fn exchange_all(
        &self,
        outcomes: Vec<AttemptOutcome>,
        ask: DeliveryAsk,
    ) -> Exchanged {
        let mut all = self.exchange(outcomes, ask.clone()).await;
        let mut empty_in_a_row = 0;
        // A delivery can stay due and unclaimed because its endpoint takes no more. The bound on
        // empty rounds ends the loop then.
        while empty_in_a_row < 8 {
            let left = ask.limit - all.claims.len();
            let now = self.clock.now();
            let is_over = all.next_due.is_none_or(|due| due > now);
            if left == 0 || is_over {
                break;
            }
            let more = DeliveryAsk { limit: left, ..ask.clone() };
            let Exchanged { claims, next_due, .. } = self.exchange(Vec::new(), more).await;
            empty_in_a_row = if claims.is_empty() { empty_in_a_row + 1 } else { 0 };
            all.claims.extend(claims);
            all.next_due = next_due;
        }
        all
    }

    /// The one delivery that can be claimed now.
    pub(crate) async fn take_one(&self) -> DeliveryClaim {
        let mut claims = self.take(ALL).await;
        assert_eq!(claims.len(), 1, "one claim, not {:?}", claimed(&claims));
        claims.remove(0)
    }

    /// Reports how an attempt ended, and claims nothing.
    pub(crate) async fn report(&self, claim: &DeliveryClaim, verdict: AttemptVerdict) -> Held {
        self.exchange(vec![outcome(claim, verdict)], ask(0)).await.settled.remove(0)
    }

    /// Delivers all due deliveries, and returns the ids of their messages, sorted.
    pub(crate) async fn deliver_all(&self) -> Vec<String> {
        let mut messages = Vec::new();
        loop {
            let claims = self.take(ALL).await;
            if claims.is_empty() {
                messages.sort();
                return messages;
            }
            for claim in claims {
                assert_eq!(self.report(&claim, delivered()).await, Held::Kept);
                messages.push(claim.message);
            }
        }
    }

    pub(crate) async fn message(&self, id: &str) -> MessageDetail {
        let mut found = self.store.message(id, Some(Tenant::default())).await.expect("reads");
        assert_eq!(found.len(), 1, "one message {id}");
        found.remove(0)
    }

    pub(crate) async fn delivery(&self, id: DeliveryId) -> DeliveryDetail {
        self.store.delivery(id).await.expect("reads").expect("is there")
    }

    /// The one delivery of a message.
    pub(crate) async fn delivery_of(&self, message: &str) -> DeliveryDetail {
        let mut deliveries = self.message(message).await.deliveries;
        assert_eq!(deliveries.len(), 1, "one delivery of {message}");
        deliveries.remove(0)
    }

    pub(crate) async fn status_of(&self, message: &str) -> DeliveryStatus {
        self.delivery_of(message).await.status
    }

    pub(crate) async fn all_deliveries(&self) -> Vec<DeliveryDetail> {
        // A list ends early on a busy machine, and then has a cursor.
        let mut filter = DeliveryFilter { limit: 500, ..DeliveryFilter::default() };
        let mut all = Vec::new();
        loop {
            let page = self.store.deliveries(filter.clone()).await.expect("reads");
            all.extend(page.items);
            match page.next {
                Some(cursor) => filter.before = Some(cursor),
                None => return all,
            }
        }
    }

    pub(crate) async fn replay_delivery(&self, id: DeliveryId) -> DeliveryReplayed {
        self.store.replay_delivery(id, self.by("again")).await.expect("replays")
    }

    pub(crate) async fn act_on(&self, message: &str, act: MessageAct) -> Option<Vec<DeliveryId>> {
        let message = MessageRef { tenant: Tenant::default(), id: message.to_owned() };
        self.store
            .change_message(message, act, self.by("an operator's reason"))
            .await
            .expect("acts")
    }
}
