//! Runs the plans of operators, a slice at a time. The store decides which plan is due and takes each delivery
//! or event once, so any number of nodes may run this; [`hapax_core::store::Plans`] has the contract.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::failpoint;
use hapax_core::handler::EventView;
use hapax_core::store::{EventSlice, NewJob, PlanRun, PlannedEvent, Plans, StoreError};
use hapax_core::{SourceName, Tenant};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::ingress::Now;
use crate::limits::{PLAN_BATCH, PLAN_PAUSE, POLL_EVERY};

/// The jobs of an event by the current configuration, for replays and approvals.
pub type JobsFor = Arc<dyn Fn(&SourceName, &Tenant, EventView<'_>) -> Vec<NewJob> + Send + Sync>;

/// Runs slices until `stop`. A slice that was begun is committed or not at all; after a restart the plan goes
/// on from there.
pub async fn run_plans<S: Plans>(
    store: Arc<S>,
    jobs_for: Option<JobsFor>,
    now: Now,
    stop: CancellationToken,
) {
    let mut failing = false;
    loop {
        let wait = match stop.run_until_cancelled(run_slice(&*store, jobs_for.as_ref())).await {
            None => return,
            Some(Ok(ran)) => {
                failing = false;
                match ran {
                    PlanRun::Ran(_) | PlanRun::Events(_) => PLAN_PAUSE,
                    PlanRun::NotBefore(at) => {
                        let wait = at.duration_since(now());
                        Duration::try_from(wait).unwrap_or_default().clamp(PLAN_PAUSE, POLL_EVERY)
                    }
                    PlanRun::Idle => POLL_EVERY,
                }
            }
            Some(Err(error)) => {
                if !std::mem::replace(&mut failing, true) {
                    warn!(%error, "running the plans of operators: {error}; trying again");
                }
                POLL_EVERY
            }
        };
        if stop.run_until_cancelled(sleep(wait)).await.is_none() {
            return;
        }
    }
}

/// Runs one slice. One over events is taken here, with the jobs that the configuration has for them.
async fn run_slice<S: Plans>(store: &S, jobs_for: Option<&JobsFor>) -> Result<PlanRun, StoreError> {
    let mut slice = match store.run_plan(PLAN_BATCH).await? {
        // A node without workers knows no handlers: an approved event would get no job.
        PlanRun::Events(_) if jobs_for.is_none() => return Ok(PlanRun::Idle),
        PlanRun::Events(slice) => slice,
        ran @ (PlanRun::Ran(_) | PlanRun::NotBefore(_) | PlanRun::Idle) => return Ok(ran),
    };
    if let Some(jobs_for) = jobs_for {
        fill_jobs(&mut slice, jobs_for);
    }
    failpoint!("plans.before_slice");
    let plan = slice.plan;
    // If the slice was lost, another node took it, or the plan was cancelled.
    store.take_slice(*slice).await?;
    failpoint!("plans.after_slice");
    Ok(PlanRun::Ran(plan))
}

fn fill_jobs(slice: &mut EventSlice, jobs_for: &JobsFor) {
    if !slice.work.act.writes_jobs() {
        return;
    }
    for PlannedEvent { tenant, source, event_type, body, jobs, .. } in &mut slice.events {
        let view = EventView { event_type: event_type.as_deref(), body };
        *jobs = jobs_for(source, tenant, view);
        if let Some(only) = &slice.work.handler {
            jobs.retain(|job| job.handler == *only);
        }
    }
}
