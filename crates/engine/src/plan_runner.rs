//! Runs the plans of operators, a slice at a time. The store decides which plan is due and takes each delivery
//! or event once, so any number of nodes may run this; [`hapax_core::store::Plans`] has the contract.
//!
//! A plan that this node cannot run is left alone for a while, so that it delays no other plan.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::failpoint;
use hapax_core::handler::EventView;
use hapax_core::store::{
    EventSlice, Held, NewJob, PlanId, PlanRun, PlannedEvent, Plans, StoreError,
};
use hapax_core::{SourceName, Tenant};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::ingress::Now;
use crate::limits::{
    PLAN_BATCH, PLAN_PAUSE, PLAN_RETRY_MAX, PLAN_TAKEN_PAUSE, PLANS_LEFT_MAX, POLL_EVERY,
};

/// The jobs of an event by the current configuration, for replays and approvals. `None` if this
/// node has no such source and therefore does not know the jobs.
pub type JobsFor =
    Arc<dyn Fn(&SourceName, &Tenant, EventView<'_>) -> Option<Vec<NewJob>> + Send + Sync>;

/// Runs slices until `stop`. A slice is committed as a whole or not at all; after a restart the
/// plan continues from there.
pub async fn run_plans<S: Plans>(
    store: Arc<S>,
    jobs_for: Option<JobsFor>,
    now: Now,
    stop: CancellationToken,
) {
    let (mut failing, mut left) = (false, LeftPlans::default());
    loop {
        let except = left.until(Instant::now());
        let slice = run_slice(&*store, jobs_for.as_ref(), except);
        let wait = match stop.run_until_cancelled(slice).await {
            None => return,
            Some(Err(error)) => {
                if !std::mem::replace(&mut failing, true) {
                    warn!(%error, "running the plans of operators: {error}; trying again");
                }
                POLL_EVERY
            }
            Some(Ok(ran)) => {
                failing = false;
                match ran {
                    SliceOutcome::Kept(plan) => {
                        left.forget(plan);
                        PLAN_PAUSE
                    }
                    SliceOutcome::Taken(plan) => {
                        left.leave(plan, PLAN_TAKEN_PAUSE);
                        PLAN_PAUSE
                    }
                    SliceOutcome::Failed(plan, reason) => {
                        if left.failed(plan) == 1 {
                            warn!(%reason, "the plan {plan} cannot continue on this node: {reason}; trying again");
                        }
                        PLAN_PAUSE
                    }
                    SliceOutcome::NotBefore(at) => {
                        match Duration::try_from(at.duration_since(now())) {
                            Ok(wait) if !wait.is_zero() => wait.clamp(PLAN_PAUSE, POLL_EVERY),
                            // The plan is not due yet by the clock of the database.
                            Ok(_) | Err(_) => PLAN_TAKEN_PAUSE,
                        }
                    }
                    SliceOutcome::Nothing => POLL_EVERY,
                }
            }
        };
        if stop.run_until_cancelled(sleep(wait)).await.is_none() {
            return;
        }
    }
}

/// The result of one request for a slice.
enum SliceOutcome {
    /// A slice of this plan ran.
    Kept(PlanId),
    /// Another node runs or has to run this plan, or the plan has ended.
    Taken(PlanId),
    /// A slice of this plan failed, or this node must not run it.
    Failed(PlanId, String),
    /// No plan is due before this.
    NotBefore(hapax_core::Timestamp),
    /// Nothing runs.
    Nothing,
}

/// Runs one slice. A slice over events is taken here, with the jobs that the configuration has for
/// them.
async fn run_slice<S: Plans>(
    store: &S,
    jobs_for: Option<&JobsFor>,
    except: Vec<PlanId>,
) -> Result<SliceOutcome, StoreError> {
    let mut slice = match store.run_plan(PLAN_BATCH, except).await? {
        PlanRun::Events(slice) => slice,
        PlanRun::Ran(plan) => return Ok(SliceOutcome::Kept(plan)),
        PlanRun::Taken(plan) => return Ok(SliceOutcome::Taken(plan)),
        PlanRun::Failed(plan, reason) => return Ok(SliceOutcome::Failed(plan, reason)),
        PlanRun::NotBefore(at) => return Ok(SliceOutcome::NotBefore(at)),
        PlanRun::Idle => return Ok(SliceOutcome::Nothing),
    };
    let plan = slice.plan;
    match jobs_for {
        // A node without workers knows no handlers: an approved event would get no job.
        None => return Ok(SliceOutcome::Taken(plan)),
        Some(jobs_for) => {
            if let Err(source) = fill_jobs(&mut slice, jobs_for) {
                let reason = format!(
                    "it has an event of the source \"{source}\", which this node does not have"
                );
                return Ok(SliceOutcome::Failed(plan, reason));
            }
        }
    }
    failpoint!("plans.before_slice");
    let held = store.take_slice(*slice).await;
    failpoint!("plans.after_slice");
    Ok(match held {
        Ok(Held::Kept) => SliceOutcome::Kept(plan),
        Ok(Held::Lost) => SliceOutcome::Taken(plan),
        Err(error @ (StoreError::Unavailable(_) | StoreError::Read(_))) => {
            SliceOutcome::Failed(plan, error.to_string())
        }
        Err(error @ (StoreError::Busy | StoreError::Closed)) => return Err(error),
    })
}

/// Fills in the jobs of each event. `Err` with a source that this node does not have.
fn fill_jobs(slice: &mut EventSlice, jobs_for: &JobsFor) -> Result<(), SourceName> {
    if !slice.work.act.writes_jobs() {
        return Ok(());
    }
    for PlannedEvent { tenant, source, event_type, body, jobs, .. } in &mut slice.events {
        let view = EventView { event_type: event_type.as_deref(), body };
        *jobs = jobs_for(source, tenant, view).ok_or_else(|| source.clone())?;
        if let Some(only) = &slice.work.handler {
            jobs.retain(|job| job.handler == *only);
        }
    }
    Ok(())
}

/// The plans that this node leaves alone for a while.
#[derive(Default)]
struct LeftPlans(HashMap<PlanId, LeftPlan>);

struct LeftPlan {
    until: Instant,
    /// Failures in a row.
    failures: u32,
}

impl LeftPlans {
    /// The plans to leave alone at `now`.
    fn until(&self, now: Instant) -> Vec<PlanId> {
        self.0.iter().filter(|(_, left)| left.until > now).map(|(plan, _)| *plan).collect()
    }

    fn forget(&mut self, plan: PlanId) {
        self.0.remove(&plan);
    }

    fn leave(&mut self, plan: PlanId, time: Duration) {
        let until = Instant::now() + time;
        self.entry(plan).until = until;
    }

    /// Counts a failure, and leaves the plan alone for twice as long as after the previous failure.
    fn failed(&mut self, plan: PlanId) -> u32 {
        let left = self.entry(plan);
        let factor = 2_u32.saturating_pow(left.failures);
        left.failures = left.failures.saturating_add(1);
        left.until = Instant::now() + POLL_EVERY.saturating_mul(factor).min(PLAN_RETRY_MAX);
        left.failures
    }

    fn entry(&mut self, plan: PlanId) -> &mut LeftPlan {
        if self.0.len() >= PLANS_LEFT_MAX && !self.0.contains_key(&plan) {
            self.0.clear();
        }
        self.0.entry(plan).or_insert(LeftPlan { until: Instant::now(), failures: 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    #[tokio::test(start_paused = true)]
    async fn a_plan_that_fails_is_left_alone_for_longer_each_time_and_not_for_ever() {
        let (mut left, plan) = (LeftPlans::default(), PlanId(Uuid::from_u128(1)));
        let mut waits = Vec::new();
        for _ in 0..9 {
            left.failed(plan);
            assert_eq!(left.until(Instant::now()), [plan]);
            let began = Instant::now();
            while !left.until(Instant::now()).is_empty() {
                sleep(Duration::from_millis(500)).await;
            }
            waits.push(began.elapsed().as_secs());
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
        left.forget(plan);
        assert_eq!(left.failed(plan), 1);
    }
}
