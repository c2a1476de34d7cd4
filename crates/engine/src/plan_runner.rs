//! Runs the plans of operators, a slice at a time. The store decides which plan is due and takes each delivery
//! once, so any number of nodes may run this; [`hapax_core::store::Plans`] has the contract.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::{PlanRun, Plans};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::ingress::Now;
use crate::limits::{PLAN_BATCH, PLAN_PAUSE, POLL_EVERY};

/// Runs slices until `stop`. A slice that was begun is committed or not at all; after a restart the plan goes
/// on from there.
pub async fn run_plans<S: Plans>(store: Arc<S>, now: Now, stop: CancellationToken) {
    let mut failing = false;
    loop {
        let wait = match stop.run_until_cancelled(store.run_plan(PLAN_BATCH)).await {
            None => return,
            Some(Ok(ran)) => {
                failing = false;
                match ran {
                    PlanRun::Ran(_) => PLAN_PAUSE,
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
