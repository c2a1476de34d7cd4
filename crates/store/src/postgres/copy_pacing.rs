//! Paces the answers to copies while new events are committed, so that a retry storm cannot starve new
//! events.
//!
//! While a commit of new events runs or waits, the answer to a copy is held. Each commit releases one held
//! answer for every four new events. No answer is held longer than [`COPY_WAIT_MAX`], and without new events
//! none is held at all.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use tokio::sync::oneshot;

use crate::limits::{COPY_WAIT_MAX, EVENTS_PER_COPY};

/// The held answers, and the number of requests to commit.
#[derive(Debug, Default)]
pub(super) struct CopyPacing {
    /// Requests that wait for a commit or are in one.
    committing: AtomicUsize,
    held: Mutex<VecDeque<oneshot::Sender<()>>>,
}

impl CopyPacing {
    /// Records a request that waits for a commit.
    pub(super) fn queued(&self) {
        self.committing.fetch_add(1, Ordering::AcqRel);
    }

    /// Records that a commit of `requests` has ended, with this many new events.
    pub(super) fn committed(&self, requests: usize, new_events: usize) {
        let rest = self.committing.fetch_sub(requests, Ordering::AcqRel) - requests;
        let mut held = self.held();
        let mut left = match (rest, new_events) {
            (0, _) | (_, 0) => held.len(),
            _ => new_events.div_ceil(EVENTS_PER_COPY),
        };
        while left > 0
            && let Some(copy) = held.pop_front()
        {
            // A copy that has waited for the maximum time is not counted.
            left -= usize::from(copy.send(()).is_ok());
        }
    }

    /// Waits until a copy may be answered.
    pub(super) async fn pass(&self) {
        let Some(released) = self.hold() else { return };
        let _late_or_released = tokio::time::timeout(COPY_WAIT_MAX, released).await;
    }

    fn hold(&self) -> Option<oneshot::Receiver<()>> {
        if self.committing.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut held = self.held();
        // Read again under the lock: the last commit may have released the others just now.
        if self.committing.load(Ordering::Acquire) == 0 {
            return None;
        }
        let (release, released) = oneshot::channel();
        held.push_back(release);
        Some(released)
    }

    fn held(&self) -> MutexGuard<'_, VecDeque<oneshot::Sender<()>>> {
        self.held.lock().expect("no panic happens under this lock")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(pacing: &CopyPacing) -> oneshot::Receiver<()> {
        pacing.hold().expect("a commit is in progress")
    }

    #[test]
    fn a_copy_is_held_only_while_requests_wait_for_a_commit() {
        let pacing = CopyPacing::default();
        assert!(pacing.hold().is_none());
        (0..2).for_each(|_| pacing.queued());
        let mut copies = [held(&pacing), held(&pacing), held(&pacing)];
        pacing.committed(2, 2);
        assert!(copies.iter_mut().all(|copy| copy.try_recv().is_ok()), "nothing is left to commit");
        assert!(pacing.hold().is_none());
    }

    #[test]
    fn a_commit_releases_the_oldest_copies_one_for_four_new_events() {
        let pacing = CopyPacing::default();
        (0..10).for_each(|_| pacing.queued());
        let mut copies: Vec<_> = (0..6).map(|_| held(&pacing)).collect();
        // The sender of the first copy has hung up, or the copy has waited for the maximum time.
        drop(copies.remove(0));
        pacing.committed(8, 8);
        let released = copies.iter_mut().map(|copy| copy.try_recv().is_ok());
        assert_eq!(released.collect::<Vec<_>>(), [true, true, false, false, false]);
        // A commit without new events delays no copy.
        pacing.committed(1, 0);
        assert!(copies.iter_mut().skip(2).all(|copy| copy.try_recv().is_ok()));
    }

    #[tokio::test]
    async fn a_copy_is_answered_at_last_even_if_no_commit_ends() {
        let pacing = CopyPacing::default();
        pacing.queued();
        // Without its deadline this would wait for ever.
        pacing.pass().await;
        assert_eq!(pacing.committing.load(Ordering::Acquire), 1);
    }
}
