//! Records the figures of endpoints by the hour. Every ten seconds this process writes its own figures of the current
//! hour, if they have grown. A process that is killed loses at most ten seconds.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::{EndpointHistory, InspectOutbox, Outbox};
use hapax_core::tuned;
use hapax_engine::{Now, Sender};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// How often counts are recorded.
const RECORD_EVERY: Duration = Duration::from_secs(10);

/// How long one record may take: a store that does not answer must not delay the shutdown.
const RECORD_MAX: Duration = Duration::from_secs(2);

/// The most counts of one record.
const RECORDED_AT_ONCE: usize = 500;

/// Records until `stop`, and once more after it.
pub(crate) async fn run<S: EndpointHistory + Outbox + InspectOutbox>(
    store: Arc<S>,
    node: Uuid,
    sender: Arc<Sender<S>>,
    now: Now,
    stop: CancellationToken,
) {
    let every = tuned!("traffic.every_ms", RECORD_EVERY.as_millis() as u64);
    let mut beats = interval(Duration::from_millis(every));
    beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let is_over = stop.run_until_cancelled(beats.tick()).await.is_none();
        let counts = sender.endpoint_tallies().waiting();
        for counts in counts.chunks(RECORDED_AT_ONCE) {
            match timeout(RECORD_MAX, store.record_endpoints(node, counts.to_vec())).await {
                Ok(Ok(())) => sender.endpoint_tallies().written(counts, now()),
                // The next round writes these counts again.
                Ok(Err(error)) => tracing::debug!(%error, "recording endpoints: {error}"),
                Err(_) => tracing::debug!("recording endpoints takes too long"),
            }
        }
        if is_over {
            return;
        }
    }
}
