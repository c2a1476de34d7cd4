//! Sending on PostgreSQL: each act is one call of a function in the database, and so one commit.
//!
//! [`publish`] writes messages of the API on connections of its own. So a user's open transaction with
//! the same message id delays neither events nor other messages. [`exchange`] settles attempts and
//! claims deliveries, [`endpoints`] and [`operator_actions`] carry out the acts of operators, and
//! [`reader`] serves their queries. [`prune`] deletes messages past their retention. The rules are
//! in `functions/`; a test compares them with [`hapax_core::delivery::step`].

mod alert_records;
mod endpoints;
mod exchange;
mod expire;
mod operator_actions;
mod own_messages;
mod prune;
mod publish;
mod reader;
mod row;

use std::sync::atomic::AtomicI32;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use hapax_core::Tenant;
use hapax_core::delivery::DeliveryId;
use hapax_core::endpoint::{EndpointAct, EndpointChanged, EndpointId, EndpointRecord, NewEndpoint};
use hapax_core::store::{
    Action, AttemptOutcome, DeliveryAsk, DeliveryBacklog, DeliveryDetail, DeliveryFilter,
    DeliveryReplayed, DeliverySkipped, EndpointFilter, Exchanged, InspectOutbox, MessageAct,
    MessageDetail, MessageFilter, MessageRef, MessageSummary, NewMessage, Outbox, Page, Published,
    StoreError,
};
use tokio::sync::Notify;

use super::PgStore;
use super::claim_hints::ClaimHints;
use super::connect::retried;
use crate::limits::DELIVERY_POLL_EVERY;
use crate::operator_acts::OperatorActs;

pub(super) use prune::{MessageRound, slice as prune_messages};
pub(super) use publish::{Publisher, start as start_publishers};
pub(super) use reader::ranked;

/// The state of sending that a node keeps in memory.
#[derive(Debug, Default)]
pub(super) struct SenderState {
    /// Notified when deliveries may be due.
    due: Notify,
    turn: Mutex<ExchangeCursor>,
    /// The last endpoint that this round of expiry has checked.
    expired_up_to: AtomicI32,
    operator_acts: OperatorActs,
}

/// Where the next exchange begins.
#[derive(Debug, Clone, Default)]
struct ExchangeCursor {
    /// The endpoint whose turn was last.
    endpoint: i32,
    hints: ClaimHints,
}

impl SenderState {
    fn turn(&self) -> MutexGuard<'_, ExchangeCursor> {
        self.turn.lock().expect("no panic happens under this lock")
    }

    /// Counts an act of an operator and wakes the sender. The hints are cleared, because deliveries may
    /// be due since an earlier time.
    pub(super) fn changed(&self) {
        self.operator_acts.count();
        self.turn().hints.forget();
        self.hint();
    }

    /// Wakes the sender of this process. A sender that begins to wait later finds the notification.
    pub(super) fn hint(&self) {
        self.due.notify_one();
    }
}

impl Outbox for PgStore {
    async fn publish(&self, message: NewMessage) -> Result<Published, StoreError> {
        let published = self.shared.publisher.publish(message).await?;
        self.shared.sending.hint();
        Ok(published)
    }

    /// About as long as an exchange without outcomes and claims takes.
    fn outcomes_gathered_for(&self) -> Duration {
        Duration::from_millis(2)
    }

    async fn exchange(
        &self,
        outcomes: Vec<AttemptOutcome>,
        ask: DeliveryAsk,
    ) -> Result<Exchanged, StoreError> {
        self.act(move |shared| async move {
            retried(|| exchange::exchange(&shared, &outcomes, &ask)).await
        })
        .await
    }

    fn operator_acts(&self) -> u64 {
        self.shared.sending.operator_acts.so_far()
    }

    async fn wait_for_deliveries(&self, at_most: Duration) {
        // Other nodes, and users' transactions, publish without notifying this one.
        let wait = at_most.min(DELIVERY_POLL_EVERY);
        let _ = tokio::time::timeout(wait, self.shared.sending.due.notified()).await;
    }

    async fn create_endpoint(
        &self,
        endpoint: NewEndpoint,
        by: Action,
    ) -> Result<EndpointChanged, StoreError> {
        self.act(move |shared| async move {
            retried(|| endpoints::create(&shared, &endpoint, &by)).await
        })
        .await
    }

    async fn change_endpoint(
        &self,
        endpoint: EndpointId,
        act: EndpointAct,
        by: Action,
    ) -> Result<EndpointChanged, StoreError> {
        let changed = self
            .act(move |shared| async move {
                retried(|| endpoints::change(&shared, endpoint, &act, &by)).await
            })
            .await;
        self.shared.sending.changed();
        changed
    }

    async fn replay_delivery(
        &self,
        delivery: DeliveryId,
        by: Action,
    ) -> Result<DeliveryReplayed, StoreError> {
        let replayed = self
            .act(move |shared| async move {
                retried(|| operator_actions::replay_delivery(&shared, delivery, &by)).await
            })
            .await?;
        self.shared.sending.changed();
        Ok(replayed)
    }

    async fn skip_delivery(
        &self,
        delivery: DeliveryId,
        by: Action,
    ) -> Result<DeliverySkipped, StoreError> {
        let skipped = self
            .act(move |shared| async move {
                retried(|| operator_actions::skip_delivery(&shared, delivery, &by)).await
            })
            .await?;
        self.shared.sending.changed();
        Ok(skipped)
    }

    async fn change_message(
        &self,
        message: MessageRef,
        act: MessageAct,
        by: Action,
    ) -> Result<Option<Vec<DeliveryId>>, StoreError> {
        let changed = self
            .act(move |shared| async move {
                retried(|| operator_actions::change_message(&shared, &message, act, &by)).await
            })
            .await;
        self.shared.sending.changed();
        changed
    }

    async fn cancel_orphans(&self, limit: usize) -> Result<bool, StoreError> {
        self.act(move |shared| async move {
            retried(|| operator_actions::cancel_orphans(&shared, limit)).await
        })
        .await
    }
}

impl InspectOutbox for PgStore {
    async fn endpoints(&self, filter: EndpointFilter) -> Result<Page<EndpointRecord>, StoreError> {
        reader::endpoints(&self.shared, filter).await
    }

    async fn endpoint(&self, id: EndpointId) -> Result<Option<EndpointRecord>, StoreError> {
        reader::endpoint(&self.shared, id).await
    }

    async fn messages(&self, filter: MessageFilter) -> Result<Page<MessageSummary>, StoreError> {
        reader::messages(&self.shared, filter).await
    }

    async fn message(
        &self,
        id: &str,
        tenant: Option<Tenant>,
    ) -> Result<Vec<MessageDetail>, StoreError> {
        reader::message(&self.shared, id, tenant).await
    }

    async fn deliveries(&self, filter: DeliveryFilter) -> Result<Page<DeliveryDetail>, StoreError> {
        reader::deliveries(&self.shared, filter).await
    }

    async fn delivery(&self, id: DeliveryId) -> Result<Option<DeliveryDetail>, StoreError> {
        reader::delivery(&self.shared, id).await
    }

    async fn delivery_backlog(&self) -> Result<DeliveryBacklog, StoreError> {
        reader::backlog(&self.shared).await
    }
}
