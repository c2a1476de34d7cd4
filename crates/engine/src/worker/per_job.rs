//! Lanes whose jobs run one by one: claimed, run while the lease is renewed, and settled.

use std::sync::Arc;

use hapax_core::Timestamp;
use hapax_core::failpoint;
use hapax_core::handler::{RustHandler, RustOutcome};
use hapax_core::job::Retry;
use hapax_core::store::{Claim, Outcome, SqlRun, Work};
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error};

use super::panics::{catch_panic, log_panic};
use super::polling::Polling;
use super::{ClaimYield, HandlerWorkers, StoreStep, WorkerKind, Workers};
use crate::limits::CLAIM_MAX;

impl HandlerWorkers {
    /// Runs single jobs, several at once, because each of them waits for another system.
    pub(super) async fn work_singly<S: Work>(
        self: &Arc<Self>,
        workers: &Arc<Workers<S>>,
        stop: &CancellationToken,
    ) {
        let mut polling = Polling::new(self, workers, stop);
        let mut running = JoinSet::new();
        while let Some(mut permits) = stop.run_until_cancelled(self.free()).await {
            while let Some(ended) = running.try_join_next() {
                log_panic(ended);
            }
            let hint = polling.hint();
            let limit = permits.len();
            // The claim is not cancelled at a stop: a claimed job must be started or given back.
            let claimed = workers.store.claim(self.ask(workers, limit)).await;
            let found = match claimed {
                Err(error) => Err(error),
                Ok(claims) if claims.is_empty() => {
                    drop(permits);
                    Ok(ClaimYield::Nothing)
                }
                Ok(claims) if stop.is_cancelled() => {
                    self.give_back(workers, claims).await;
                    break;
                }
                Ok(claims) => {
                    let found =
                        if claims.len() < limit { ClaimYield::Some } else { ClaimYield::Full };
                    if let [claim] = &claims[..]
                        && claim.alone
                    {
                        let emptied = self.emptied(workers, claim, limit);
                        let Some(rest) = stop.run_until_cancelled(emptied).await else {
                            self.give_back(workers, claims).await;
                            break;
                        };
                        permits.push(rest);
                        running.spawn(self.clone().attempt(
                            workers.clone(),
                            claim.clone(),
                            permits,
                        ));
                        polling.rest(Ok(ClaimYield::Full), hint).await;
                        continue;
                    }
                    for (claim, permit) in claims.into_iter().zip(permits) {
                        running.spawn(self.clone().attempt(workers.clone(), claim, vec![permit]));
                    }
                    Ok(found)
                }
            };
            polling.rest(found, hint).await;
        }
        while let Some(ended) = running.join_next().await {
            log_panic(ended);
        }
    }

    /// Waits for a free permit, then takes all free permits, at most [`CLAIM_MAX`].
    async fn free(&self) -> Vec<OwnedSemaphorePermit> {
        let first = self.permits.clone().acquire_owned().await.expect("never closed");
        let more = std::iter::from_fn(|| self.permits.clone().try_acquire_owned().ok());
        std::iter::once(first).chain(more).take(CLAIM_MAX).collect()
    }

    /// Waits until no other attempt of this lane is in flight, while the lease of `claim` is
    /// renewed: takes all permits except those already `held`.
    async fn emptied<S: Work>(
        &self,
        workers: &Workers<S>,
        claim: &Claim,
        held: usize,
    ) -> OwnedSemaphorePermit {
        let others = self.config.concurrency.max(1) - held;
        let others = u32::try_from(others).expect("concurrency is a small number");
        tokio::select! {
            all = self.permits.clone().acquire_many_owned(others) => all.expect("never closed"),
            never = self.keep_lease(workers, claim) => match never {},
        }
    }

    /// One claim from its start to its recorded end.
    async fn attempt<S: Work>(
        self: Arc<Self>,
        workers: Arc<Workers<S>>,
        claim: Claim,
        _permits: Vec<OwnedSemaphorePermit>,
    ) {
        let work = async {
            let began = Instant::now();
            let next = catch_panic(self.run(&workers, &claim)).await.unwrap_or_else(|panic| {
                error!(lane = self.name, job = %claim.job, "the attempt panicked: {panic}");
                let error = "the handler panicked".to_owned();
                StoreStep::Settle(Outcome::Failed { error, retry: Retry::Schedule, answer: None })
            });
            let ended = self.record(&workers, &claim, &next).await;
            failpoint!("http.after_settle");
            (ended, began.elapsed())
        };
        let inside = async {
            match claim.alone {
                true => workers.isolation.alone(work).await,
                false => workers.isolation.beside(work).await,
            }
        };
        let (ended, took) = tokio::select! {
            ended = inside => ended,
            never = self.keep_lease(&workers, &claim) => match never {},
        };
        self.end(&workers, &claim, &ended, Some(took));
    }

    /// The part of an attempt outside the store.
    async fn run<S>(&self, workers: &Workers<S>, claim: &Claim) -> StoreStep {
        let current = match self.fetch(claim, (workers.now)()).await {
            Ok(current) => current,
            Err(outcome) => return StoreStep::Settle(outcome),
        };
        match &self.kind {
            WorkerKind::Http(app) => {
                StoreStep::Settle(app.call(claim, current.as_deref(), (workers.now)()).await)
            }
            WorkerKind::Rust(code) => self.run_code(&**code, claim, current).await,
            WorkerKind::Sql(program) => StoreStep::Run(SqlRun {
                job: claim.job,
                fence: claim.fence,
                program: program.clone(),
                timeout: self.config.timeout,
                current,
            }),
            WorkerKind::Pull => unreachable!("pulled jobs are run elsewhere"),
        }
    }

    /// Runs the user's Rust code until its timeout. A commit that has begun by then continues: a job that
    /// is done under its fence stays done, whatever is settled afterwards.
    async fn run_code(
        &self,
        code: &dyn RustHandler,
        claim: &Claim,
        current: Option<Arc<str>>,
    ) -> StoreStep {
        failpoint!("code.before_handler");
        let time = self.config.timeout;
        let ran = timeout(time, code.work(claim.clone(), current)).await;
        failpoint!("code.after_handler");
        match ran {
            Ok(RustOutcome::Committed) => StoreStep::Committed,
            Ok(RustOutcome::Failed { error, retry }) => {
                StoreStep::Settle(Outcome::Failed { error, retry, answer: None })
            }
            Ok(RustOutcome::Lost { error }) => {
                debug!(lane = self.name, job = %claim.job, "the attempt was lost: {error}");
                StoreStep::Lost
            }
            Err(_) => {
                let error = format!("timed out after {time:?}");
                StoreStep::Settle(Outcome::Failed { error, retry: Retry::Schedule, answer: None })
            }
        }
    }

    /// The current object, if the handler wants it; the error is the attempt's outcome.
    pub(super) async fn fetch(
        &self,
        claim: &Claim,
        now: Timestamp,
    ) -> Result<Option<Arc<str>>, Outcome> {
        let Some(current) = &self.current else { return Ok(None) };
        let fetched = current.fetch(claim, now).await?;
        failpoint!("refetch.after_answer");
        Ok(Some(fetched))
    }
}
