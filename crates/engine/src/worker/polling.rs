//! When a lane looks again: at a hint, at the next due time, and by the poll; slower while the store is
//! in trouble.

use std::future::Future;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use hapax_core::store::{StoreError, Work};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::{Found, Lane, Workers};
use crate::limits::{GATHER, POLL_EVERY, STORE_PAUSE, STORE_PAUSE_MAX};

/// The first pause of a lane that found nothing; it doubles, up to [`POLL_EVERY`]. It bounds what a
/// hint costs that promises work where there is none.
const QUIET_PAUSE: Duration = Duration::from_millis(5);

/// When a lane looks for work again.
pub(super) struct Polling<'a, S> {
    lane: &'a Lane,
    shop: &'a Workers<S>,
    stop: &'a CancellationToken,
    arrived: Pin<Box<dyn Future<Output = ()> + Send + 'a>>,
    has_arrived: bool,
    quiet: u32,
    pause: Pause,
}

impl<'a, S: Work> Polling<'a, S> {
    pub(super) fn new(lane: &'a Lane, shop: &'a Workers<S>, stop: &'a CancellationToken) -> Self {
        Self {
            lane,
            shop,
            stop,
            arrived: Box::pin(shop.store.work_arrived()),
            has_arrived: false,
            quiet: 0,
            pause: Pause::default(),
        }
    }

    /// From here on work that arrives is heard of, so that none slips in between a look that finds
    /// nothing and the wait that follows.
    pub(super) async fn listen(&mut self) {
        if self.has_arrived {
            self.has_arrived = false;
            self.arrived = Box::pin(self.shop.store.work_arrived());
        }
        poll_fn(|cx| {
            self.has_arrived = self.arrived.as_mut().poll(cx).is_ready();
            Poll::Ready(())
        })
        .await;
    }

    /// Waits until it is worth looking again.
    pub(super) async fn rest(&mut self, found: Result<Found, StoreError>) {
        match found {
            Ok(found) => {
                self.pause = Pause::default();
                match found {
                    Found::Full => self.quiet = 0,
                    Found::Some => {
                        self.quiet = 0;
                        self.stop.run_until_cancelled(sleep(GATHER)).await;
                    }
                    Found::Nothing => self.wait_for_work().await,
                }
            }
            Err(error) => {
                self.pause.say(&error, &self.lane.name);
                self.stop.run_until_cancelled(sleep(self.pause.next())).await;
            }
        }
    }

    async fn wait_for_work(&mut self) {
        if self.has_arrived {
            // Heard while we looked; other lanes' work sounds the same, so not at once.
            self.stop.run_until_cancelled(sleep(GATHER)).await;
            return;
        }
        let due = self.shop.store.next_due(&self.lane.handler).await.ok().flatten();
        let until_due = due.map_or(POLL_EVERY, |due| {
            Duration::try_from(due.duration_since((self.shop.now)())).unwrap_or_default()
        });
        let least = QUIET_PAUSE.saturating_mul(1 << self.quiet.min(16));
        self.quiet += 1;
        let wait = until_due.max(least).min(POLL_EVERY);
        tokio::select! {
            () = &mut self.arrived => {
                self.has_arrived = true;
                self.quiet = 0;
            }
            () = sleep(wait) => {}
            () = self.stop.cancelled() => {}
        }
    }
}

/// Pauses that double while the store fails, and a line for the first failure only.
#[derive(Debug, Default)]
pub(crate) struct Pause {
    failures: u32,
}

impl Pause {
    pub(crate) fn say(&self, error: &StoreError, doing: &str) {
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
