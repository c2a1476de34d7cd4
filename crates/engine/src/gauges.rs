//! How far behind each lane is, for the metrics: looked up every few seconds through the reading
//! side, which never waits for a writer.

use std::sync::Arc;

use hapax_core::job::Phase;
use hapax_core::store::{Inspect, JobFilter, StoreError, Work};
use metrics::gauge;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::ingress::Now;
use crate::limits::{DEAD_COUNTED_MAX, GAUGES_EVERY};
use crate::worker::Lane;

/// Keeps the gauges of these lanes until `stop`.
pub(crate) async fn watch<S: Work + Inspect>(
    store: Arc<S>,
    now: Now,
    lanes: Vec<Arc<Lane>>,
    stop: CancellationToken,
) {
    let mut beats = interval(GAUGES_EVERY);
    beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while stop.run_until_cancelled(beats.tick()).await.is_some() {
        for lane in &lanes {
            let looked = stop.run_until_cancelled(look(&*store, &now, lane)).await;
            if let Some(Err(error)) = looked {
                debug!(lane = lane.name, %error, "looking up the gauges: {error}");
            }
        }
    }
}

async fn look<S: Work + Inspect>(store: &S, now: &Now, lane: &Lane) -> Result<(), StoreError> {
    let due = store.next_due(&lane.handler).await?;
    let overdue = due.map_or(0.0, |due| now().duration_since(due).as_secs_f64().max(0.0));
    gauge!("hapax_oldest_job_seconds", "lane" => lane.name.clone()).set(overdue);
    let dead = JobFilter {
        source: Some(lane.handler.source.clone()),
        handler: Some(lane.handler.handler.clone()),
        phase: Some(Phase::Dead),
        limit: DEAD_COUNTED_MAX,
        ..JobFilter::default()
    };
    let dead = store.jobs(dead).await?.items.len();
    gauge!("hapax_dead_letters", "lane" => lane.name.clone()).set(dead as f64);
    Ok(())
}
