//! [`hapax_core::store::Outbox`] and [`InspectOutbox`] for the store: each method is one act on the
//! writer, or one query of a reader.

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

use super::DEFAULT_TENANT;
use super::publish::For;
use super::reader;
use crate::sqlite::SqliteStore;
use crate::sqlite::writer::{ActKind, BatchResult, Writer};

impl Outbox for SqliteStore {
    async fn publish(&self, message: NewMessage) -> Result<Published, StoreError> {
        let bytes = message.data.as_str().len();
        self.writer
            .run_batched(bytes, move |writer| {
                let now = writer.now();
                let tenant = Tenant::new(DEFAULT_TENANT);
                let of = For { tenant: &tenant, event: None };
                let published = writer.outbox.publish(&writer.conn, &message, of, now)?;
                Ok(writer.batched(ActKind::Publish, published))
            })
            .await
    }

    async fn exchange(
        &self,
        outcomes: Vec<AttemptOutcome>,
        ask: DeliveryAsk,
    ) -> Result<Exchanged, StoreError> {
        self.writer
            .run_behind_events(move |writer| {
                let now = writer.now();
                // Events have priority: with claims ahead, the attempts would use most of the machine's time.
                let claims_ahead = ask.claims_ahead && !writer.is_busy_with_events();
                let ask = DeliveryAsk { claims_ahead, ..ask };
                let (exchanged, bytes) =
                    writer.outbox.exchange(&writer.conn, &outcomes, &ask, now)?;
                Ok(writer.batched(ActKind::Exchange, exchanged).holding(bytes))
            })
            .await
    }

    /// The second exchange waits in the writer's queue, so the writer starts it as soon as the first is
    /// synced.
    fn exchanges_at_once(&self) -> usize {
        2
    }

    fn operator_acts(&self) -> u64 {
        self.shared.operator_acts.so_far()
    }

    async fn wait_for_deliveries(&self, at_most: Duration) {
        // The writer keeps a notification for the next sender that waits, so no notification is
        // missed.
        let _ = tokio::time::timeout(at_most, self.shared.deliveries.notified()).await;
    }

    async fn create_endpoint(
        &self,
        endpoint: NewEndpoint,
        by: Action,
    ) -> Result<EndpointChanged, StoreError> {
        self.writer.act(move |writer| writer.outbox.create(&writer.conn, endpoint, &by)).await
    }

    async fn change_endpoint(
        &self,
        endpoint: EndpointId,
        act: EndpointAct,
        by: Action,
    ) -> Result<EndpointChanged, StoreError> {
        let change =
            move |writer: &mut Writer| writer.outbox.change(&writer.conn, endpoint, act, &by);
        let changed = self.writer.act(change).await;
        self.shared.operator_acts.count();
        changed
    }

    async fn replay_delivery(
        &self,
        delivery: DeliveryId,
        by: Action,
    ) -> Result<DeliveryReplayed, StoreError> {
        self.writer
            .act(move |writer| {
                let now = writer.now();
                writer.outbox.replay_delivery(&writer.conn, delivery, &by, now)
            })
            .await
    }

    async fn skip_delivery(
        &self,
        delivery: DeliveryId,
        by: Action,
    ) -> Result<DeliverySkipped, StoreError> {
        self.writer
            .act(move |writer| {
                let now = writer.now();
                writer.outbox.skip_delivery(&writer.conn, delivery, &by, now)
            })
            .await
    }

    async fn change_message(
        &self,
        message: MessageRef,
        act: MessageAct,
        by: Action,
    ) -> Result<Option<Vec<DeliveryId>>, StoreError> {
        let changed = self
            .writer
            .act(move |writer| {
                let now = writer.now();
                writer.outbox.change_message(&writer.conn, &message, act, &by, now)
            })
            .await;
        self.shared.operator_acts.count();
        changed
    }

    async fn cancel_orphans(&self, limit: usize) -> Result<bool, StoreError> {
        self.writer
            .behind(move |writer| {
                writer.in_transaction(|writer| {
                    let now = writer.now();
                    writer.outbox.cancel_orphans(&writer.conn, limit, now)
                })
            })
            .await
    }
}

impl Writer {
    /// The result of an act of sending: it needs a commit if it has changed a row.
    fn batched<T>(&mut self, kind: ActKind, value: T) -> BatchResult<T> {
        let result = match self.outbox.take_wrote() {
            true => BatchResult::wrote(value),
            false => BatchResult::only_read(value),
        };
        result.of(kind)
    }
}

impl InspectOutbox for SqliteStore {
    async fn endpoints(&self, filter: EndpointFilter) -> Result<Page<EndpointRecord>, StoreError> {
        self.readers.run(move |conn| reader::endpoints(conn, &filter)).await
    }

    async fn endpoint(&self, id: EndpointId) -> Result<Option<EndpointRecord>, StoreError> {
        self.readers.run(move |conn| reader::endpoint(conn, id)).await
    }

    async fn messages(&self, filter: MessageFilter) -> Result<Page<MessageSummary>, StoreError> {
        self.readers.search(move |conn| reader::messages(conn, &filter)).await
    }

    async fn message(
        &self,
        id: &str,
        tenant: Option<Tenant>,
    ) -> Result<Vec<MessageDetail>, StoreError> {
        let id = id.to_owned();
        self.readers.run(move |conn| reader::message(conn, &id, tenant.as_ref())).await
    }

    async fn deliveries(&self, filter: DeliveryFilter) -> Result<Page<DeliveryDetail>, StoreError> {
        match filter.message {
            // The deliveries of one message are few.
            Some(_) => self.readers.run(move |conn| reader::deliveries(conn, &filter)).await,
            None => self.readers.search(move |conn| reader::deliveries(conn, &filter)).await,
        }
    }

    async fn delivery(&self, id: DeliveryId) -> Result<Option<DeliveryDetail>, StoreError> {
        self.readers.run(move |conn| reader::delivery(conn, id)).await
    }

    async fn delivery_backlog(&self) -> Result<DeliveryBacklog, StoreError> {
        self.readers.run(reader::backlog).await
    }
}
