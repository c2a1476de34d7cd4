//! Writes the requests that this process refused to the store, every few seconds and at most a hundred of each source.
//! A process that is killed loses those of the last seconds.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::{REJECTIONS_KEPT, Rejection, RejectionRecords};
use tokio::sync::Mutex;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;

/// How often rejections are written.
const RECORD_EVERY: Duration = Duration::from_secs(5);

/// How long one write may take: a store that does not answer must not delay the shutdown.
const RECORD_MAX: Duration = Duration::from_secs(2);

/// The most rejections that wait for a store that cannot write. The oldest are dropped.
const WAITING_MAX: usize = 20 * REJECTIONS_KEPT;

/// Takes the rejections that the ingress noted, and writes them.
pub(crate) struct RejectionRecorder {
    take: Box<dyn Fn() -> Vec<Rejection> + Send + Sync>,
    waiting: Mutex<Vec<Rejection>>,
}

impl RejectionRecorder {
    /// `take` returns the rejections since its last call.
    pub(crate) fn new(take: Box<dyn Fn() -> Vec<Rejection> + Send + Sync>) -> Self {
        Self { take, waiting: Mutex::default() }
    }

    /// Records until `stop`, and once more after it.
    pub(crate) async fn run<S: RejectionRecords>(&self, store: Arc<S>, stop: CancellationToken) {
        let mut beats = interval(RECORD_EVERY);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let is_over = stop.run_until_cancelled(beats.tick()).await.is_none();
            self.record(&*store).await;
            if is_over {
                return;
            }
        }
    }

    /// Writes all noted rejections, so that a later read contains them.
    pub(crate) async fn record<S: RejectionRecords>(&self, store: &S) {
        let mut waiting = self.waiting.lock().await;
        waiting.extend((self.take)());
        let surplus = waiting.len().saturating_sub(WAITING_MAX);
        waiting.drain(..surplus);
        if waiting.is_empty() {
            return;
        }
        match timeout(RECORD_MAX, store.record_rejections(waiting.clone())).await {
            Ok(Ok(())) => waiting.clear(),
            // The next round writes them too: a rejection that is written twice is stored once.
            Ok(Err(error)) => tracing::debug!(%error, "recording rejections: {error}"),
            Err(_) => tracing::debug!("recording rejections takes too long"),
        }
    }
}
