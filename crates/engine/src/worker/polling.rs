//! Decides when a lane claims again: at a hint of the store, and at the latest after the poll
//! interval. While the store fails, a lane claims less often.

use std::ops::RangeInclusive;
use std::time::Duration;

use hapax_core::store::{StoreError, Wake, Work};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::{ClaimYield, HandlerWorkers, Workers};
use crate::limits::{GATHER, POLL_EVERY, STORE_PAUSE, STORE_PAUSE_MAX};

/// The first pause of a lane that found nothing although the store expected a due job. The pause doubles,
/// up to [`POLL_EVERY`], and bounds the cost of such hints.
const QUIET_PAUSE: Duration = Duration::from_millis(5);

/// Decides when a lane claims again.
pub(super) struct Polling<'a, S> {
    lane: &'a HandlerWorkers,
    workers: &'a Workers<S>,
    stop: &'a CancellationToken,
    quiet: u32,
    pause: StoreBackoff,
}

impl<'a, S: Work> Polling<'a, S> {
    pub(super) fn new(
        lane: &'a HandlerWorkers,
        workers: &'a Workers<S>,
        stop: &'a CancellationToken,
    ) -> Self {
        Self { lane, workers, stop, quiet: 0, pause: StoreBackoff::default() }
    }

    /// The store's next hint. The hint is requested before each claim, so that work which arrives between
    /// an empty claim and the wait after it is not missed.
    pub(super) fn hint(&self) -> impl Future<Output = Wake> + Send + use<'a, S> {
        self.workers.store.wait(&self.lane.handler, self.span())
    }

    /// Waits until another claim may find work.
    pub(super) async fn rest(
        &mut self,
        found: Result<ClaimYield, StoreError>,
        hint: impl Future<Output = Wake>,
    ) {
        match found {
            Ok(found) => {
                self.pause = StoreBackoff::default();
                match found {
                    ClaimYield::Full => self.quiet = 0,
                    ClaimYield::Some => {
                        self.quiet = 0;
                        self.stop.run_until_cancelled(sleep(GATHER)).await;
                    }
                    ClaimYield::Nothing => self.wait_for(hint).await,
                }
            }
            Err(error) => {
                self.pause.log_failure(&error, &self.lane.name);
                self.stop.run_until_cancelled(sleep(self.pause.next())).await;
            }
        }
    }

    async fn wait_for(&mut self, hint: impl Future<Output = Wake>) {
        // Work of any lane ends the wait. Without this pause, the idle lanes of a busy store would
        // poll all the time.
        let not_before = Instant::now() + GATHER;
        match self.stop.run_until_cancelled(hint).await {
            Some(Wake::Arrived) => {
                self.quiet = 0;
                self.stop.run_until_cancelled(sleep_until(not_before)).await;
            }
            Some(Wake::Elapsed { .. }) => self.quiet += 1,
            None => {}
        }
    }

    fn span(&self) -> RangeInclusive<Duration> {
        QUIET_PAUSE.saturating_mul(1 << self.quiet.min(16)).min(POLL_EVERY)..=POLL_EVERY
    }
}

/// Pauses that double while the store fails, with a log line for the first failure only.
#[derive(Debug, Default)]
pub(crate) struct StoreBackoff {
    failures: u32,
}

impl StoreBackoff {
    pub(crate) fn log_failure(&self, error: &StoreError, doing: &str) {
        if self.failures == 0 {
            warn!(%error, "{doing}: {error}; trying again");
        }
    }

    pub(crate) fn next(&mut self) -> Duration {
        let pause = STORE_PAUSE.saturating_mul(1 << self.failures.min(16)).min(STORE_PAUSE_MAX);
        self.failures += 1;
        pause
    }
}
