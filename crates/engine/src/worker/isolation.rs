//! Decides which attempts run in this process at the same time. An attempt that was lost before may
//! have ended the process. Such an attempt runs alone, so that no other attempt is lost if the
//! process ends again.
//!
//! No attempt waits for long. Attempts enter in the order of their requests, so an attempt that wants to
//! run alone starts when those before it have ended. Such an attempt waits for a bounded time
//! ([`ALONE_MAX`]) and runs alone for a bounded time. After that time the attempt runs alongside others, but
//! never alongside another lost one. Two lost jobs become due together repeatedly, and a harmless one would
//! become a dead letter with the harmful one.

use std::pin::pin;
use std::time::Duration;

use tokio::sync::{Mutex, RwLock};
use tokio::time::timeout;

use crate::limits::ALONE_MAX;

/// The lock of one process.
#[derive(Debug)]
pub(crate) struct Isolation {
    inside: RwLock<()>,
    lost_before: Mutex<()>,
    alone_max: Duration,
}

impl Default for Isolation {
    fn default() -> Self {
        Self::for_at_most(ALONE_MAX)
    }
}

impl Isolation {
    fn for_at_most(alone_max: Duration) -> Self {
        Self { inside: RwLock::default(), lost_before: Mutex::default(), alone_max }
    }

    /// Runs `work` alongside others.
    pub(crate) async fn beside<T>(&self, work: impl Future<Output = T>) -> T {
        let _inside = self.inside.read().await;
        work.await
    }

    /// Runs `work` alone, as far as the time limit allows.
    pub(crate) async fn alone<T>(&self, work: impl Future<Output = T>) -> T {
        let _only_one = self.lost_before.lock().await;
        let inside = timeout(self.alone_max, self.inside.write()).await.ok();
        let mut work = pin!(work);
        match timeout(self.alone_max, &mut work).await {
            Ok(done) => done,
            Err(_) => {
                drop(inside);
                work.await
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::sync::Notify;

    use super::*;

    #[tokio::test]
    async fn a_lost_attempt_waits_for_running_ones_and_blocks_the_next() {
        // The process may die while the lost attempt runs, so no other attempt may run at that
        // time.
        let isolation = Arc::new(Isolation::default());
        let inside = Arc::new(AtomicUsize::new(0));
        let (leave, arrived) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let beside = || {
            let (isolation, inside, leave, arrived) =
                (isolation.clone(), inside.clone(), leave.clone(), arrived.clone());
            tokio::spawn(async move {
                let work = async {
                    inside.fetch_add(1, Ordering::SeqCst);
                    arrived.notify_one();
                    leave.notified().await;
                    inside.fetch_sub(1, Ordering::SeqCst);
                };
                isolation.beside(work).await;
            })
        };
        let before = beside();
        arrived.notified().await;
        let alone = {
            let (isolation, inside) = (isolation.clone(), inside.clone());
            tokio::spawn(async move {
                isolation
                    .alone(async {
                        for _ in 0..100 {
                            tokio::task::yield_now().await;
                            assert_eq!(
                                inside.load(Ordering::SeqCst),
                                0,
                                "another attempt runs beside it"
                            );
                        }
                    })
                    .await;
            })
        };
        tokio::task::yield_now().await;
        let after = beside();
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        assert!(!alone.is_finished());
        leave.notify_one();
        before.await.unwrap();
        alone.await.unwrap();
        arrived.notified().await;
        leave.notify_one();
        after.await.unwrap();
    }

    #[tokio::test]
    async fn an_attempt_that_never_ends_delays_no_other_for_long() {
        // The app hangs in the lost attempt and in another attempt. Both keep waiting, and all
        // others run.
        let isolation = Arc::new(Isolation::for_at_most(Duration::from_millis(20)));
        let inside = Arc::new(Notify::new());
        let hang = || {
            let inside = inside.clone();
            async move {
                inside.notify_one();
                std::future::pending::<()>().await;
            }
        };
        let lost = {
            let (isolation, hang) = (isolation.clone(), hang());
            tokio::spawn(async move { isolation.alone(hang).await })
        };
        inside.notified().await;
        timeout(FOREVER, isolation.beside(async {})).await.expect("the lost one no longer blocks");
        lost.abort();
        let _ = lost.await;

        let neighbour = {
            let (isolation, hang) = (isolation.clone(), hang());
            tokio::spawn(async move { isolation.beside(hang).await })
        };
        inside.notified().await;
        timeout(FOREVER, isolation.alone(async {})).await.expect("it does not wait for ever");
        neighbour.abort();
    }

    #[tokio::test]
    async fn two_lost_attempts_never_run_together_not_even_past_their_time() {
        // Lost attempts become due together after each restart. If a harmless job ran alongside a
        // harmful one, both would be lost equally often, and both would become dead letters.
        let isolation = Arc::new(Isolation::for_at_most(Duration::ZERO));
        let inside = Arc::new(AtomicUsize::new(0));
        let lost = (0..8).map(|_| {
            let (isolation, inside) = (isolation.clone(), inside.clone());
            tokio::spawn(async move {
                isolation
                    .alone(async {
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two at once");
                        for _ in 0..10 {
                            tokio::task::yield_now().await;
                        }
                        inside.fetch_sub(1, Ordering::SeqCst);
                    })
                    .await;
            })
        });
        for one in lost.collect::<Vec<_>>() {
            one.await.unwrap();
        }
    }

    const FOREVER: Duration = Duration::from_secs(20);
}
