//! The [`Work`] half of the store: each method is one act or slice on the writer.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::job::{Fence, JobId};
use hapax_core::store::{
    Claim, ClaimAsk, EventId, HandlerRef, HandlerSpec, Held, Horizon, Outcome, Ran, Settlement,
    SqlAsk, SqlRan, SqlRun, StoreError, Wake, Work,
};

use super::SqliteStore;
use super::jobs::ClaimParameters;
use super::operator_actions::FoundEvent;
use super::prune;
use super::transaction::Transaction;
use super::writer::Writer;
use crate::wait::{NextDue, wait};

impl Work for SqliteStore {
    async fn announce(&self, handlers: Vec<HandlerSpec>) -> Result<(), StoreError> {
        self.writer
            .act(move |writer| {
                let now = writer.now();
                writer.lanes.announce(&writer.conn, handlers, now)
            })
            .await
    }

    async fn claim(&self, ask: ClaimAsk) -> Result<Vec<Claim>, StoreError> {
        self.writer
            .slice(move |writer| {
                let now = writer.now();
                // The claim is synced before the work begins. If a power cut undid the claim, a second
                // external worker would get the same fence.
                let tx = Transaction::begin(&writer.conn)?;
                let asked = ClaimParameters {
                    handler: &ask.handler,
                    limit: ask.limit,
                    worker: &ask.worker,
                    guard: true,
                };
                let jobs = writer.lanes.claim(&writer.conn, &asked, now)?;
                let mut claims = Vec::with_capacity(jobs.len());
                for job in &jobs {
                    claims.extend(writer.lanes.claim_with_body(&writer.conn, job, now)?);
                }
                tx.commit()?;
                Ok(claims)
            })
            .await
    }

    async fn renew(&self, job: JobId, fence: Fence, lease: Duration) -> Result<Held, StoreError> {
        self.writer
            .act(move |writer| {
                let now = writer.now();
                writer.lanes.renew(&writer.conn, job, fence, lease, now)
            })
            .await
    }

    async fn settle(
        &self,
        job: JobId,
        fence: Fence,
        outcome: Outcome,
    ) -> Result<Settlement, StoreError> {
        self.act_and_notify(move |writer| {
            let now = writer.now();
            let Writer { lanes, outbox, conn, .. } = writer;
            lanes.settle(conn, outbox, job, fence, &outcome, now)
        })
        .await
    }

    async fn give_back(&self, claims: Vec<(JobId, Fence)>) -> Result<(), StoreError> {
        self.act_and_notify(move |writer| {
            let now = writer.now();
            for (job, fence) in claims {
                writer.lanes.give_back(&writer.conn, job, fence, now)?;
            }
            Ok(())
        })
        .await
    }

    async fn run_sql(&self, ask: SqlAsk) -> Result<SqlRan, StoreError> {
        self.writer.slice(move |writer| writer.run_sql(&ask)).await
    }

    async fn run_claimed(&self, run: SqlRun) -> Result<Ran, StoreError> {
        let shared = Arc::clone(&self.shared);
        self.writer
            .slice(move |writer| {
                let ran = writer.run_claimed(&run)?;
                if writer.lanes.take_woken() {
                    shared.arrived.notify_waiters();
                }
                Ok(ran)
            })
            .await
    }

    async fn hurry(&self, event: EventId) -> Result<(), StoreError> {
        self.writer
            .act(move |writer| {
                let Some(event) = FoundEvent::by_id(&writer.conn, event)? else { return Ok(()) };
                let now = writer.now();
                writer.lanes.hurry(&writer.conn, event.seq, now)
            })
            .await?;
        self.shared.arrived.notify_waiters();
        Ok(())
    }

    fn wait(
        &self,
        handler: &HandlerRef,
        span: RangeInclusive<Duration>,
    ) -> impl Future<Output = Wake> + Send {
        // The notification is created with the call, so that no later arrival is missed.
        let arrived = self.shared.arrived.notified();
        let handler = handler.clone();
        let next = self.writer.slice(move |writer| {
            let now = writer.now();
            let due = writer.lanes.next_due(&writer.conn, &handler, now)?;
            Ok(NextDue { due, now })
        });
        wait(arrived, next, span)
    }

    async fn prune(&self, horizon: Horizon, limit: usize) -> Result<bool, StoreError> {
        self.writer.behind(move |writer| prune::slice(writer, &horizon, limit)).await
    }
}

impl SqliteStore {
    /// Runs an act, then notifies waiting workers of the jobs that it readied.
    async fn act_and_notify<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Writer) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let shared = Arc::clone(&self.shared);
        self.writer
            .slice(move |writer| {
                let acted = writer.in_transaction(act)?;
                if writer.lanes.take_woken() {
                    shared.arrived.notify_waiters();
                }
                Ok(acted)
            })
            .await
    }
}
