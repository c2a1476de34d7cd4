//! The life of a claim, whatever its job runs. The lease is renewed while the job runs, the outcome is
//! recorded through the fence, and a claim whose work never began is given back.

use std::time::Duration;

use hapax_core::Timestamp;
use hapax_core::job::Retry;
use hapax_core::store::{
    Claim, ClaimAsk, Held, Outcome, Ran, Settlement, SqlRun, StoreError, TriedJob, TriedVerdict,
    Work,
};
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep};
use tracing::{debug, info, warn};

use super::polling::StoreBackoff;
use super::{AttemptEnd, HandlerWorkers, StoreStep, Workers};

/// The shortest time between two renewals: a shorter time would only cost more commits.
const LEASE_BEAT_MIN: Duration = Duration::from_millis(10);

impl HandlerWorkers {
    pub(super) fn ask<S>(&self, workers: &Workers<S>, limit: usize) -> ClaimAsk {
        ClaimAsk { handler: self.handler.clone(), limit, worker: workers.id.clone() }
    }

    /// Renews the lease for as long as this future is polled.
    pub(super) async fn keep_lease<S: Work>(
        &self,
        workers: &Workers<S>,
        claim: &Claim,
    ) -> std::convert::Infallible {
        let lease = self.config.policy.lease;
        let every = (lease / 3).max(LEASE_BEAT_MIN);
        let mut beats = interval_at(Instant::now() + every, every);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            beats.tick().await;
            match workers.store.renew(claim.job, claim.fence, lease).await {
                Ok(Held::Kept) => {}
                // The work continues, because the app may have completed the job and may be about
                // to answer. Settling is fenced.
                Ok(Held::Lost) => std::future::pending().await,
                Err(error) => debug!(lane = self.name, %error, "could not renew a lease: {error}"),
            }
        }
    }

    /// Records the outcome in the store. While recording fails and the lease may hold, recording is retried:
    /// otherwise a successful attempt would be repeated.
    pub(super) async fn record<S: Work>(
        &self,
        workers: &Workers<S>,
        claim: &Claim,
        next: &StoreStep,
    ) -> AttemptEnd {
        let give_up = Instant::now() + self.config.policy.lease;
        let mut pause = StoreBackoff::default();
        loop {
            let recorded = match next {
                StoreStep::Settle(outcome) => self.try_settle(workers, claim, outcome).await,
                StoreStep::Run(run) => self.try_run(workers, claim, run).await,
                StoreStep::Committed => return AttemptEnd::Done,
                StoreStep::Lost => return AttemptEnd::Lost,
            };
            let error = match recorded {
                Ok(ended) => return ended,
                Err(error) => error,
            };
            pause.log_failure(&error, "recording an attempt");
            if Instant::now() >= give_up {
                return AttemptEnd::Lost;
            }
            sleep(pause.next()).await;
        }
    }

    async fn try_settle<S: Work>(
        &self,
        workers: &Workers<S>,
        claim: &Claim,
        outcome: &Outcome,
    ) -> Result<AttemptEnd, StoreError> {
        let settlement = workers.store.settle(claim.job, claim.fence, outcome.clone()).await?;
        Ok(match (settlement, outcome) {
            // The app completed the job in a transaction of its own, or the answer to an earlier call of
            // ours was lost.
            (Settlement::AlreadyDone, _) => AttemptEnd::Done,
            (Settlement::Recorded, Outcome::Done { .. }) => AttemptEnd::Done,
            (Settlement::Recorded, Outcome::Failed { error, retry, .. }) => {
                let is_last = self.config.policy.ends_with(claim.steps, *retry);
                AttemptEnd::Failed { error: error.clone(), is_last }
            }
            (Settlement::Lost, _) => AttemptEnd::Lost,
        })
    }

    async fn try_run<S: Work>(
        &self,
        workers: &Workers<S>,
        claim: &Claim,
        run: &SqlRun,
    ) -> Result<AttemptEnd, StoreError> {
        Ok(match workers.store.run_claimed(run.clone()).await? {
            Ran::Done => AttemptEnd::Done,
            Ran::Guarded => AttemptEnd::Guarded,
            // This error is for the log, so it leaves out the reason: a database quotes values in
            // its errors.
            Ran::Failed(_) => AttemptEnd::Failed {
                error: "see `hapax explain`".into(),
                is_last: self.config.policy.ends_with(claim.steps, Retry::Schedule),
            },
            Ran::Lost => AttemptEnd::Lost,
        })
    }

    /// Logs, counts and announces an attempt that has ended. `took` is `None` if its work did not begin.
    pub(super) fn end<S>(
        &self,
        workers: &Workers<S>,
        claim: &Claim,
        ended: &AttemptEnd,
        took: Option<Duration>,
    ) {
        let now = (workers.now)();
        if let Some(took) = took {
            self.counts.seconds.record(took);
        }
        self.counts.of(ended).increment(1);
        let verdict = match ended {
            AttemptEnd::Done => Some(TriedVerdict::Succeeded),
            AttemptEnd::Failed { is_last: false, .. } => Some(TriedVerdict::Failed),
            AttemptEnd::Failed { is_last: true, .. } => Some(TriedVerdict::Died),
            AttemptEnd::Guarded | AttemptEnd::Lost => None,
        };
        if let Some(verdict) = verdict {
            let began = now.checked_sub(took.unwrap_or_default()).unwrap_or(now);
            self.tally.count_attempt(&TriedJob::of(claim, verdict), began, now);
        }
        self.log_end(claim, ended, now);
        workers.event_waiters.notify(claim.event.id);
    }

    pub(super) fn log_end(&self, claim: &Claim, ended: &AttemptEnd, now: Timestamp) {
        let (lane, event_id, attempt) = (&*self.name, &*claim.event.key.event_id, claim.attempt);
        let why = match ended {
            AttemptEnd::Done | AttemptEnd::Guarded => {
                debug!(lane, event_id, job = %claim.job, attempt, "{lane} did {event_id}");
                return;
            }
            AttemptEnd::Lost => "its claim was lost",
            AttemptEnd::Failed { error, .. } => error,
        };
        if self.lines.admit(now) {
            warn!(
                lane,
                event_id = %crate::ingress::stored_headers::Plain(event_id),
                job = %claim.job,
                attempt,
                "attempt {attempt} of {lane} failed: {}", crate::ingress::stored_headers::Plain(why)
            );
        }
    }

    pub(super) async fn give_back<S: Work>(&self, workers: &Workers<S>, claims: Vec<Claim>) {
        let count = claims.len();
        let claims = claims.iter().map(|claim| (claim.job, claim.fence)).collect();
        match workers.store.give_back(claims).await {
            Ok(()) => info!(lane = self.name, count, "gave back {count} jobs that had not started"),
            Err(error) => warn!(lane = self.name, %error, "could not give back jobs: {error}"),
        }
    }
}
