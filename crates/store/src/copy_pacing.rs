//! Paces the answers to copies while many new events are committed: a retry storm must not starve new events.
//!
//! Copies are cheaper than new events, so a storm would use most of the machine's time. For [`PACED_FOR`]
//! after each commit of many new events, a copy needs a turn. Each commit grants one turn per
//! [`EVENTS_PER_COPY`] new events. No copy waits longer than [`COPY_WAIT_MAX`]. Without commits of many new
//! events, no copy waits at all.
//!
//! Pacing delays an answer and never changes it: a copy is recognised before it is paced.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::limits::{COPY_WAIT_MAX, EVENTS_PER_COPY, FEW_EVENTS, PACED_FOR};

/// The turns that commits have granted, and the copies that wait for one.
#[derive(Debug, Default)]
pub(crate) struct CopyPacing {
    /// Whether copies may need a turn. While it is false, copies take no lock.
    is_on: AtomicBool,
    turns: Mutex<Turns>,
}

#[derive(Debug, Default)]
struct Turns {
    /// When the last commit of many new events ended.
    many_events_at: Option<Instant>,
    /// New events that are carried over, because they were not enough for a turn.
    events_left: usize,
    /// Turns of the last commit that no copy has taken.
    free: usize,
    waiting: VecDeque<oneshot::Sender<()>>,
}

impl CopyPacing {
    /// Waits until a copy may be answered.
    pub(crate) async fn pass(&self) {
        if !self.is_on.load(Ordering::Relaxed) {
            return;
        }
        let Some(turn) = self.take_turn() else { return };
        let _late_or_granted = tokio::time::timeout(COPY_WAIT_MAX, turn).await;
    }

    /// Records a commit of this many new events, and grants the turns that come with it. Turns of earlier
    /// commits expire: otherwise they would add up while few copies arrive.
    pub(crate) fn committed(&self, new_events: usize) {
        let are_many = new_events > FEW_EVENTS;
        if !are_many && !self.is_on.load(Ordering::Relaxed) {
            return;
        }
        let now = Instant::now();
        let mut turns = self.turns();
        if are_many {
            turns.many_events_at = Some(now);
            self.is_on.store(true, Ordering::Relaxed);
        }
        if !turns.are_needed(now) {
            return self.stop(&mut turns);
        }
        turns.grant(new_events);
    }

    /// A turn to wait for; `None` if the copy may be answered at once.
    fn take_turn(&self) -> Option<oneshot::Receiver<()>> {
        let mut turns = self.turns();
        if !turns.are_needed(Instant::now()) {
            self.stop(&mut turns);
            return None;
        }
        turns.take()
    }

    /// Lets every copy pass until the next commit of many new events.
    fn stop(&self, turns: &mut Turns) {
        self.is_on.store(false, Ordering::Relaxed);
        for copy in std::mem::take(turns).waiting {
            let _ = copy.send(());
        }
    }

    fn turns(&self) -> MutexGuard<'_, Turns> {
        self.turns.lock().expect("no panic happens under this lock")
    }
}

impl Turns {
    /// Whether many new events were committed recently.
    fn are_needed(&self, now: Instant) -> bool {
        let since = self.many_events_at.map(|at| now.saturating_duration_since(at));
        since.is_some_and(|since| since < PACED_FOR)
    }

    fn grant(&mut self, new_events: usize) {
        let events = self.events_left + new_events;
        (self.free, self.events_left) = (events / EVENTS_PER_COPY, events % EVENTS_PER_COPY);
        while self.free > 0
            && let Some(copy) = self.waiting.pop_front()
        {
            // A copy that has stopped waiting takes no turn.
            self.free -= usize::from(copy.send(()).is_ok());
        }
    }

    fn take(&mut self) -> Option<oneshot::Receiver<()>> {
        if self.free > 0 {
            self.free -= 1;
            return None;
        }
        let (copy, turn) = oneshot::channel();
        self.waiting.push_back(copy);
        Some(turn)
    }
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::task::Poll;
    use std::time::Duration;

    use super::*;

    /// Copies that arrive now, and how many of them still wait.
    struct Copies<'a>(Vec<Pin<Box<dyn Future<Output = ()> + 'a>>>);

    impl<'a> Copies<'a> {
        fn arrive(pacing: &'a CopyPacing, copies: usize) -> Self {
            Self((0..copies).map(|_| Box::pin(pacing.pass()) as Pin<Box<_>>).collect())
        }

        async fn waiting(&mut self) -> usize {
            std::future::poll_fn(|context| {
                self.0.retain_mut(|copy| copy.as_mut().poll(context).is_pending());
                Poll::Ready(self.0.len())
            })
            .await
        }
    }

    /// The fewest new events after which copies are paced.
    const MANY: usize = FEW_EVENTS + 1;

    #[tokio::test(start_paused = true)]
    async fn without_many_new_events_no_copy_waits() {
        // A retry storm without new events, or with only a few, must not get slower.
        let pacing = CopyPacing::default();
        assert_eq!(Copies::arrive(&pacing, 100).waiting().await, 0);
        (0..100).for_each(|_| pacing.committed(FEW_EVENTS));
        assert_eq!(Copies::arrive(&pacing, 100).waiting().await, 0);
        assert!(!pacing.is_on.load(Ordering::Relaxed));
    }

    #[tokio::test(start_paused = true)]
    async fn each_commit_grants_turns_by_its_new_events_and_the_rest_is_carried_over() {
        let pacing = CopyPacing::default();
        pacing.committed(MANY);
        let mut copies = Copies::arrive(&pacing, 1_000);
        let mut waiting = copies.waiting().await;
        assert_eq!(waiting, 1_000 - MANY / EVENTS_PER_COPY);
        let mut events = MANY % EVENTS_PER_COPY;
        // Most sizes are not multiples of [`EVENTS_PER_COPY`]: rounding each commit would lose or
        // add turns.
        for commit in [MANY + 2, 1, 0, 7 * EVENTS_PER_COPY + 1, 1, 2, 3, FEW_EVENTS, MANY, 61, 67] {
            pacing.committed(commit);
            events += commit;
            waiting -= events / EVENTS_PER_COPY;
            events %= EVENTS_PER_COPY;
            assert_eq!(copies.waiting().await, waiting, "after a commit of {commit}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn copies_that_come_between_two_commits_take_the_turns_that_are_left() {
        let pacing = CopyPacing::default();
        // Unused turns expire with the next commit. Otherwise a quiet hour would let a whole storm pass.
        (0..1_000).for_each(|_| pacing.committed(8 * EVENTS_PER_COPY));
        let mut copies = Copies::arrive(&pacing, 20);
        assert_eq!(copies.waiting().await, 12);
        pacing.committed(8 * EVENTS_PER_COPY);
        assert_eq!(copies.waiting().await, 4);
        let mut later = Copies::arrive(&pacing, 1);
        assert_eq!(later.waiting().await, 1, "the earlier copies are first");
        pacing.committed(8 * EVENTS_PER_COPY);
        assert_eq!((copies.waiting().await, later.waiting().await), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_copy_waits_no_longer_than_its_longest_time() {
        // No turn comes: other copies take all turns first, or the disk hangs.
        let pacing = CopyPacing::default();
        pacing.committed(MANY);
        pacing.turns().free = 0;
        let began = Instant::now();
        pacing.pass().await;
        assert_eq!(began.elapsed(), COPY_WAIT_MAX);
    }

    #[tokio::test(start_paused = true)]
    async fn a_copy_that_stopped_waiting_takes_no_turn() {
        let pacing = CopyPacing::default();
        pacing.committed(MANY);
        pacing.turns().free = 0;
        let mut gone = Copies::arrive(&pacing, 5);
        assert_eq!(gone.waiting().await, 5);
        let mut copies = Copies::arrive(&pacing, 5);
        assert_eq!(copies.waiting().await, 5);
        drop(gone);
        pacing.committed(5 * EVENTS_PER_COPY);
        assert_eq!(copies.waiting().await, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn soon_after_the_last_commit_of_many_events_all_copies_pass() {
        let pacing = CopyPacing::default();
        for ends_by_a_copy in [true, false] {
            pacing.committed(MANY);
            tokio::time::advance(PACED_FOR - Duration::from_millis(1)).await;
            let mut copies = Copies::arrive(&pacing, 10);
            assert!(copies.waiting().await > 0);
            tokio::time::advance(Duration::from_millis(1)).await;
            if ends_by_a_copy {
                assert_eq!(Copies::arrive(&pacing, 1).waiting().await, 0);
            } else {
                pacing.committed(1);
            }
            assert_eq!(copies.waiting().await, 0);
            assert!(!pacing.is_on.load(Ordering::Relaxed));
        }
    }
}
