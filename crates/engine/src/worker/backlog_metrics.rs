//! How far behind each lane is, for the metrics: read every few seconds through the store's
//! readers, which never wait for a writer.

use std::collections::HashSet;
use std::sync::Arc;

use hapax_core::store::{Inspect, LaneState, StoreError};
use metrics::gauge;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::ingress::Now;
use crate::limits::GAUGES_EVERY;
use crate::worker::HandlerWorkers;

/// Updates the gauges of these lanes until `stop`, and those of lanes that only the store knows.
pub(crate) async fn watch<S: Inspect>(
    store: Arc<S>,
    now: Now,
    lanes: Vec<Arc<HandlerWorkers>>,
    stop: CancellationToken,
) {
    let mut names: HashSet<String> = lanes.iter().map(|lane| lane.name.clone()).collect();
    let mut beats = interval(GAUGES_EVERY);
    beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while stop.run_until_cancelled(beats.tick()).await.is_some() {
        if let Some(Err(error)) = stop.run_until_cancelled(look(&*store, &now, &mut names)).await {
            debug!(%error, "reading the gauges: {error}");
        }
    }
}

async fn look<S: Inspect>(
    store: &S,
    now: &Now,
    names: &mut HashSet<String>,
) -> Result<(), StoreError> {
    let behind = store.lanes().await?;
    let mut idle = names.clone();
    for lane in &behind {
        let name = format!("{}/{}", lane.handler.source, lane.handler.handler);
        idle.remove(&name);
        set(&name, overdue_seconds(lane, now), lane.dead);
        names.insert(name);
    }
    // Lanes that had jobs before, and have none now.
    for name in idle {
        set(&name, 0.0, 0);
    }
    Ok(())
}

fn overdue_seconds(lane: &LaneState, now: &Now) -> f64 {
    lane.oldest_due.map_or(0.0, |due| now().duration_since(due).as_secs_f64().max(0.0))
}

fn set(name: &str, overdue_seconds: f64, dead: u64) {
    gauge!("hapax_oldest_job_seconds", "lane" => name.to_owned()).set(overdue_seconds);
    gauge!("hapax_dead_letters", "lane" => name.to_owned()).set(dead as f64);
}
