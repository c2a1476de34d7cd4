//! Who is at work in this process at once. An attempt that was lost before may have ended the
//! process; it runs while nobody else does, so that it takes no neighbour with it if it does so
//! again.
//!
//! Nobody waits for long. Attempts share the gate in the order they came, so that one who wants it
//! alone gets it once those inside are out; that one waits for a while at most ([`ALONE_MAX`]), and
//! keeps it for as long at most. Past that it goes on beside others, but never beside another one that was lost:
//! two of those come due together again and again, and one that is harmless would be buried with the
//! one that is not.

use std::pin::pin;
use std::time::Duration;

use tokio::sync::{Mutex, RwLock};
use tokio::time::timeout;

use crate::limits::ALONE_MAX;

/// The gate of one process.
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

    /// Does `work` beside others.
    pub(crate) async fn beside<T>(&self, work: impl Future<Output = T>) -> T {
        let _inside = self.inside.read().await;
        work.await
    }

    /// Does `work` with nobody beside it, as far as the time goes.
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
    async fn one_that_was_lost_waits_for_those_inside_and_keeps_the_next_out() {
        // A process that dies with it inside must not have had anyone else inside.
        let gate = Arc::new(Isolation::default());
        let inside = Arc::new(AtomicUsize::new(0));
        let (leave, arrived) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let beside = || {
            let (gate, inside, leave, arrived) =
                (gate.clone(), inside.clone(), leave.clone(), arrived.clone());
            tokio::spawn(async move {
                let work = async {
                    inside.fetch_add(1, Ordering::SeqCst);
                    arrived.notify_one();
                    leave.notified().await;
                    inside.fetch_sub(1, Ordering::SeqCst);
                };
                gate.beside(work).await;
            })
        };
        let before = beside();
        arrived.notified().await;
        let alone = {
            let (gate, inside) = (gate.clone(), inside.clone());
            tokio::spawn(async move {
                gate.alone(async {
                    for _ in 0..100 {
                        tokio::task::yield_now().await;
                        assert_eq!(inside.load(Ordering::SeqCst), 0, "somebody is beside it");
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
    async fn one_that_takes_for_ever_holds_nobody_up_for_long() {
        // An app that hangs, once as the lost one and once as the neighbour: both go on waiting, and
        // everyone else comes through.
        let gate = Arc::new(Isolation::for_at_most(Duration::from_millis(20)));
        let inside = Arc::new(Notify::new());
        let hang = || {
            let inside = inside.clone();
            async move {
                inside.notify_one();
                std::future::pending::<()>().await;
            }
        };
        let lost = {
            let (gate, hang) = (gate.clone(), hang());
            tokio::spawn(async move { gate.alone(hang).await })
        };
        inside.notified().await;
        timeout(FOREVER, gate.beside(async {})).await.expect("the lost one let go");
        lost.abort();
        let _ = lost.await;

        let neighbour = {
            let (gate, hang) = (gate.clone(), hang());
            tokio::spawn(async move { gate.beside(hang).await })
        };
        inside.notified().await;
        timeout(FOREVER, gate.alone(async {})).await.expect("it does not wait for ever");
        neighbour.abort();
    }

    #[tokio::test]
    async fn two_that_were_lost_are_never_inside_together_not_even_past_their_time() {
        // They come due together after each restart; beside a poisonous one a harmless one would be
        // lost as often, and buried with it.
        let gate = Arc::new(Isolation::for_at_most(Duration::ZERO));
        let inside = Arc::new(AtomicUsize::new(0));
        let lost = (0..8).map(|_| {
            let (gate, inside) = (gate.clone(), inside.clone());
            tokio::spawn(async move {
                gate.alone(async {
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
