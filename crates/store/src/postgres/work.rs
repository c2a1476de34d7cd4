//! The [`Work`] and [`Operate`] parts of the store: each method is one call of the database, run to its
//! end even if its caller stops waiting.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::Timestamp;
use hapax_core::job::{Fence, HandlerName, JobId};
use hapax_core::store::{
    Action, Claim, ClaimAsk, EventId, HandlerRef, HandlerSpec, Held, Horizon, NewJob, Operate,
    Outcome, PauseAnswer, Ran, ReplayAsk, Replayed, Reviewed, Settlement, SqlAsk, SqlRan, SqlRun,
    StoreError, Wake, Work,
};

use super::connect::{PgError, retried};
use super::handler_registry::micros;
use super::jobs::{self, OrderCheck, only};
use super::operator_actions::{self, ReviewAction};
use super::{PgStore, Shared, prune, sql_handlers};
use crate::wait::{NextDue, wait};

impl Work for PgStore {
    async fn announce(&self, handlers: Vec<HandlerSpec>) -> Result<(), StoreError> {
        self.act(|shared| async move { jobs::announce(&shared, handlers).await }).await?;
        self.shared.arrived.notify_waiters();
        Ok(())
    }

    async fn claim(&self, ask: ClaimAsk) -> Result<Vec<Claim>, StoreError> {
        let begun = self
            .act(|shared| async move { jobs::claim(&shared, &ask, OrderCheck::ByTheClaim).await })
            .await?;
        Ok(begun.taken.into_iter().map(|taken| taken.claim).collect())
    }

    async fn renew(&self, job: JobId, fence: Fence, lease: Duration) -> Result<Held, StoreError> {
        self.act(move |shared| async move {
            let ask = "SELECT hapax.renew($1, $2, $3, $4)";
            let mut client = shared.pools.work.checkout().await?;
            let rows =
                client.query(ask, &[&job.0, &fence.0, &micros(lease), &shared.now()]).await?;
            Ok(if only(&rows)?.get(0) { Held::Kept } else { Held::Lost })
        })
        .await
    }

    async fn settle(
        &self,
        job: JobId,
        fence: Fence,
        outcome: Outcome,
    ) -> Result<Settlement, StoreError> {
        let publishes = matches!(&outcome, Outcome::Done { publish, .. } if !publish.is_empty());
        let settled = self
            .act(move |shared| async move {
                retried(|| jobs::settle(&shared, job, fence, &outcome)).await
            })
            .await?;
        if publishes {
            self.shared.sending.hint();
        }
        Ok(settled)
    }

    async fn give_back(&self, claims: Vec<(JobId, Fence)>) -> Result<(), StoreError> {
        self.act(move |shared| async move { retried(|| jobs::give_back(&shared, &claims)).await })
            .await?;
        self.shared.arrived.notify_waiters();
        Ok(())
    }

    async fn run_sql(&self, ask: SqlAsk) -> Result<SqlRan, StoreError> {
        let shared = Arc::clone(&self.shared);
        let ran = self
            .shared
            .run_to_completion(async move { sql_handlers::slice(&shared, &ask).await })
            .await?;
        if ran.done > 0 {
            // The jobs' statements may have published messages.
            self.shared.sending.hint();
        }
        Ok(ran)
    }

    async fn run_claimed(&self, run: SqlRun) -> Result<Ran, StoreError> {
        let shared = Arc::clone(&self.shared);
        let ran = self
            .shared
            .run_to_completion(async move { sql_handlers::claimed(&shared, &run).await })
            .await?;
        // Jobs parked behind this job may be ready, and its statements may have published messages.
        self.shared.sending.hint();
        self.shared.arrived.notify_waiters();
        Ok(ran)
    }

    async fn hurry(&self, event: EventId) -> Result<(), StoreError> {
        self.act(move |shared| async move {
            let mut client = shared.pools.work.checkout().await?;
            client.query("SELECT hapax.hurry($1, $2)", &[&event.0, &shared.now()]).await?;
            Ok(())
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
        let next = self.act(|shared| async move {
            let due = jobs::next_due(&shared, &handler).await?;
            Ok(NextDue { due, now: shared.now().unwrap_or_else(Timestamp::now) })
        });
        wait(arrived, next, span)
    }

    async fn prune(&self, horizon: Horizon, limit: usize) -> Result<bool, StoreError> {
        self.act(move |shared| async move { prune::slice(&shared, &horizon, limit).await }).await
    }
}

impl Operate for PgStore {
    async fn replay(&self, ask: ReplayAsk) -> Result<Vec<Replayed>, StoreError> {
        let replayed =
            self.act(|shared| async move { operator_actions::replay(&shared, &ask).await }).await?;
        self.shared.arrived.notify_waiters();
        Ok(replayed)
    }

    async fn approve(
        &self,
        event: EventId,
        jobs: Vec<NewJob>,
        by: Action,
    ) -> Result<Reviewed, StoreError> {
        let reviewed = self
            .act(move |shared| async move {
                operator_actions::decide(&shared, event, ReviewAction::Approve(&jobs), &by).await
            })
            .await?;
        self.shared.arrived.notify_waiters();
        Ok(reviewed)
    }

    async fn reject(&self, event: EventId, by: Action) -> Result<Reviewed, StoreError> {
        self.act(move |shared| async move {
            operator_actions::decide(&shared, event, ReviewAction::Reject, &by).await
        })
        .await
    }

    async fn discard(
        &self,
        event: EventId,
        handler: Option<HandlerName>,
        by: Action,
    ) -> Result<Reviewed, StoreError> {
        self.act(move |shared| async move {
            operator_actions::discard(&shared, event, handler.as_ref(), &by).await
        })
        .await
    }

    async fn pause_handler(
        &self,
        handler: HandlerRef,
        by: Action,
    ) -> Result<PauseAnswer, StoreError> {
        self.act(move |shared| async move {
            operator_actions::set_paused(&shared, &handler, Some(&by)).await
        })
        .await
    }

    async fn resume_handler(
        &self,
        handler: HandlerRef,
        _by: Action,
    ) -> Result<PauseAnswer, StoreError> {
        let answer = self
            .act(move |shared| async move {
                operator_actions::set_paused(&shared, &handler, None).await
            })
            .await?;
        self.shared.arrived.notify_waiters();
        Ok(answer)
    }
}

impl PgStore {
    /// Runs one act to its end, even if the caller's future is dropped.
    pub(super) async fn act<T, F>(
        &self,
        act: impl FnOnce(Arc<Shared>) -> F + Send + 'static,
    ) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, PgError>> + Send,
    {
        let shared = Arc::clone(&self.shared);
        self.shared.run_to_completion(async move { Ok(act(shared).await?) }).await
    }
}
