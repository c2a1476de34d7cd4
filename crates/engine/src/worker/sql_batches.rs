//! Lanes of `sql` handlers: the store claims and runs slices itself; a job that was lost before
//! runs alone.

use std::sync::Arc;

use hapax_core::handler::SqlProgram;
use hapax_core::store::{Claim, SqlAsk, SqlRun, StoreError, StoreHints, Work};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::panics::log_panic;
use super::polling::Polling;
use super::{ClaimYield, HandlerWorkers, StoreStep, Workers};
use crate::limits::SQL_SLICE;

impl HandlerWorkers {
    /// Runs slice after slice; the store claims and runs the jobs.
    pub(super) async fn work_sql<S: Work + StoreHints>(
        self: &Arc<Self>,
        workers: &Arc<Workers<S>>,
        program: &Arc<SqlProgram>,
        stop: &CancellationToken,
    ) {
        let most = workers.store.sql_batches_max().min(self.config.concurrency);
        let mut polling = Polling::new(self, workers, stop);
        while !stop.is_cancelled() {
            let hint = polling.hint();
            let found = match workers.isolation.beside(self.slice(workers, program)).await {
                // One slice at a time is enough for a lane that keeps up. Several slices run only
                // for a backlog.
                Ok((ClaimYield::Full, None)) if most > 1 => {
                    self.slices(workers, program, most, stop).await
                }
                Ok((found, None)) => Ok(found),
                Ok((_, Some(lost))) => self.alone(workers, program, &lost).await,
                Err(error) => Err(error),
            };
            polling.rest(found, hint).await;
        }
    }

    /// Several slices at once, each followed by another as long as there is more.
    async fn slices<S: Work>(
        self: &Arc<Self>,
        workers: &Arc<Workers<S>>,
        program: &Arc<SqlProgram>,
        most: usize,
        stop: &CancellationToken,
    ) -> Result<ClaimYield, StoreError> {
        let mut running = JoinSet::new();
        let begin = |running: &mut JoinSet<_>| {
            let (lane, workers, program) = (self.clone(), workers.clone(), program.clone());
            running.spawn(
                async move { workers.isolation.beside(lane.slice(&workers, &program)).await },
            );
        };
        (0..most).for_each(|_| begin(&mut running));
        let (mut found, mut lost) = (Ok(ClaimYield::Some), Vec::new());
        while let Some(ended) = running.join_next().await {
            let go_on = !stop.is_cancelled() && found.is_ok() && lost.is_empty();
            match ended {
                Ok(Ok((_, Some(claim)))) => lost.push(claim),
                Ok(Ok((ClaimYield::Full, None))) if go_on => begin(&mut running),
                Ok(Ok((ClaimYield::Full | ClaimYield::Some | ClaimYield::Nothing, None))) => {}
                Ok(Err(error)) => found = Err(error),
                Err(panic) => log_panic(Err(panic)),
            }
        }
        let mut lost = lost.into_iter();
        if let Some(first) = lost.next() {
            // If the process ended with this job, claims that wait behind it would be lost with it.
            let others: Vec<Claim> = lost.map(|claim| *claim).collect();
            if !others.is_empty() {
                self.give_back(workers, others).await;
            }
            found = self.alone(workers, program, &first).await.and(found);
        }
        found
    }

    /// Runs one slice. Also returns the claim of a job that was lost before, if one is due.
    async fn slice<S: Work>(
        &self,
        workers: &Workers<S>,
        program: &Arc<SqlProgram>,
    ) -> Result<(ClaimYield, Option<Box<Claim>>), StoreError> {
        let (began, began_at) = (Instant::now(), (workers.now)());
        let ran = workers.store.run_sql(SqlAsk {
            claim: self.ask(workers, SQL_SLICE),
            program: program.clone(),
            timeout: self.config.timeout,
        });
        let ran = ran.await?;
        let all = ran.done + ran.guarded + ran.failed;
        if all > 0 {
            self.counts.done.increment(ran.done as u64);
            self.counts.guarded.increment(ran.guarded as u64);
            self.counts.failed.increment(ran.failed as u64);
            // The jobs shared a transaction, so each gets an equal share of its time.
            self.counts.seconds.record_many(began.elapsed() / all as u32, all);
            let ended_at = (workers.now)();
            ran.tried.iter().for_each(|job| self.tally.count_attempt(job, began_at, ended_at));
            workers.event_waiters.notify_each(&ran.events);
        }
        if ran.failed > 0 && self.lines.admit((workers.now)()) {
            let (lane, failed) = (&*self.name, ran.failed);
            // The line leaves out the reason: a database quotes values in its errors, and those
            // come from the sender.
            warn!(
                lane,
                "attempts of {lane} failed ({failed}): `hapax events list --status failed` and \
                 `hapax dead list` name them, `hapax explain` says why"
            );
        }
        let found = match all {
            0 => ClaimYield::Nothing,
            some if some < SQL_SLICE => ClaimYield::Some,
            _full => ClaimYield::Full,
        };
        Ok((found, ran.alone))
    }

    /// Runs a job that was lost before, with nothing else in flight.
    async fn alone<S: Work>(
        &self,
        workers: &Workers<S>,
        program: &Arc<SqlProgram>,
        lost: &Claim,
    ) -> Result<ClaimYield, StoreError> {
        tokio::select! {
            found = workers.isolation.alone(self.lost_ones(workers, program, lost)) => found,
            never = self.keep_lease(workers, lost) => match never {},
        }
    }

    /// Runs jobs that were lost before, one after the other, while there are any: many jobs are
    /// often lost together, and other attempts should wait only once for all of them.
    async fn lost_ones<S: Work>(
        &self,
        workers: &Workers<S>,
        program: &Arc<SqlProgram>,
        first: &Claim,
    ) -> Result<ClaimYield, StoreError> {
        self.run_lost(workers, program, first).await;
        loop {
            match self.slice(workers, program).await? {
                (_, Some(next)) => self.run_lost(workers, program, &next).await,
                // A lost job has run, so more jobs may be due.
                (ClaimYield::Nothing, None) => return Ok(ClaimYield::Some),
                (found, None) => return Ok(found),
            }
        }
    }

    async fn run_lost<S: Work>(
        &self,
        workers: &Workers<S>,
        program: &Arc<SqlProgram>,
        claim: &Claim,
    ) {
        let began = Instant::now();
        let run = SqlRun {
            job: claim.job,
            fence: claim.fence,
            program: program.clone(),
            timeout: self.config.timeout,
            current: None,
        };
        let ended = self.record(workers, claim, &StoreStep::Run(run)).await;
        self.end(workers, claim, &ended, Some(began.elapsed()));
    }
}
