//! Finds out whether a single sender sends its requests one after the other, each as soon as the one before is
//! answered. Then the writer looks for the next request for a moment before it sleeps, and the task of a request looks
//! for its answer: waking a sleeping core takes longer than everything else but the sync.
//!
//! While several requests wait at once, no thread looks for anything: the cores have other work.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use hapax_core::store::StoreError;
use tokio::sync::oneshot;
use tokio::sync::oneshot::error::TryRecvError;

use crate::limits::LONE_COMMIT_WITHIN;

/// How long the writer looks for the next request: as long as an answer and a request need to and from a sender
/// nearby. A sender that is slower costs this time once.
pub(super) const NEXT_REQUEST_WITHIN: Duration = Duration::from_micros(100);

/// How many requests in a row must have been alone. Among many senders, a few requests in a row are alone by chance.
const ALONE_IN_A_ROW: u32 = 32;

/// What is known about the requests of the last moments. All of it only decides who looks for what, so no order
/// between threads is needed.
#[derive(Debug, Default)]
pub(super) struct LoneSender {
    /// Requests that wait for the writer now.
    waiting: AtomicUsize,
    /// How many requests in a row waited alone and were answered within [`LONE_COMMIT_WITHIN`].
    alone: AtomicU32,
    /// Whether the last command came within [`NEXT_REQUEST_WITHIN`] of the end of a batch.
    was_quick: AtomicBool,
}

impl LoneSender {
    /// Waits for the answer to a request.
    pub(super) async fn answer<T>(
        &self,
        mut answer: oneshot::Receiver<Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let request = WaitingRequest::new(self);
        while self.is_alone() && request.began.elapsed() < LONE_COMMIT_WITHIN {
            match answer.try_recv() {
                Ok(answer) => return answer,
                Err(TryRecvError::Closed) => return Err(StoreError::Closed),
                // Another thread that could run on this core goes first.
                Err(TryRecvError::Empty) => std::thread::yield_now(),
            }
        }
        answer.await.unwrap_or(Err(StoreError::Closed))
    }

    /// Whether the next request may follow at once.
    pub(super) fn expects_next(&self) -> bool {
        self.is_alone() && self.was_quick.load(Ordering::Relaxed)
    }

    /// Records how long the writer waited for its next command; `None` if no command came.
    pub(super) fn waited_for_next(&self, waited: Option<Duration>) {
        let was_quick = waited.is_some_and(|waited| waited < NEXT_REQUEST_WITHIN);
        self.was_quick.store(was_quick, Ordering::Relaxed);
    }

    fn is_alone(&self) -> bool {
        self.alone.load(Ordering::Relaxed) >= ALONE_IN_A_ROW
    }
}

/// A request that waits for the writer, until this is dropped.
struct WaitingRequest<'a> {
    of: &'a LoneSender,
    began: Instant,
}

impl<'a> WaitingRequest<'a> {
    fn new(of: &'a LoneSender) -> Self {
        if of.waiting.fetch_add(1, Ordering::Relaxed) > 0 {
            of.alone.store(0, Ordering::Relaxed);
        }
        Self { of, began: Instant::now() }
    }
}

impl Drop for WaitingRequest<'_> {
    fn drop(&mut self) {
        self.of.waiting.fetch_sub(1, Ordering::Relaxed);
        let in_a_row = match self.began.elapsed() <= LONE_COMMIT_WITHIN {
            true => self.of.alone.load(Ordering::Relaxed).saturating_add(1),
            false => 0,
        };
        self.of.alone.store(in_a_row, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUICK: Duration = Duration::ZERO;

    /// A sender whose requests were all alone, and answered in no time.
    fn lone() -> LoneSender {
        let sender = LoneSender::default();
        sender.alone.store(u32::MAX, Ordering::Relaxed);
        sender.waited_for_next(Some(QUICK));
        sender
    }

    #[test]
    fn the_next_request_is_expected_only_of_a_lone_sender_that_was_quick() {
        // Looking at any other time would use a core while nothing arrives, or take a core from a busy server.
        let sender = lone();
        assert!(sender.expects_next());
        sender.waited_for_next(Some(NEXT_REQUEST_WITHIN));
        assert!(!sender.expects_next(), "the sender took too long");
        sender.waited_for_next(Some(QUICK));
        assert!(sender.expects_next());
        sender.waited_for_next(None);
        assert!(!sender.expects_next(), "no request arrived");
    }

    #[test]
    fn senders_whose_requests_overlap_are_never_taken_for_one() {
        let sender = lone();
        for _ in 0..10 * ALONE_IN_A_ROW {
            let first = WaitingRequest::new(&sender);
            let second = WaitingRequest::new(&sender);
            assert!(!sender.is_alone());
            drop(first);
            drop(second);
            assert!(!sender.is_alone());
        }
    }

    #[test]
    fn one_sender_is_recognised_after_a_few_requests_and_not_on_a_slow_disk() {
        let sender = LoneSender::default();
        for _ in 0..ALONE_IN_A_ROW {
            assert!(!sender.is_alone());
            let mut request = WaitingRequest::new(&sender);
            // The test must not depend on the speed of this machine.
            request.began += Duration::from_secs(3600);
        }
        assert!(sender.is_alone());
        WaitingRequest::new(&sender).began -= 2 * LONE_COMMIT_WITHIN;
        assert!(!sender.is_alone(), "its commit took too long");
    }

    #[tokio::test]
    async fn an_answer_arrives_whether_the_request_is_alone_or_not() {
        for sender in [lone(), LoneSender::default()] {
            let (answer, waits) = oneshot::channel();
            answer.send(Ok(7)).expect("the receiver waits");
            assert_eq!(sender.answer(waits).await.expect("an answer"), 7);
            let (answer, waits) = oneshot::channel::<Result<(), StoreError>>();
            let closes = std::thread::spawn(move || drop(answer));
            assert!(matches!(sender.answer(waits).await, Err(StoreError::Closed)));
            closes.join().expect("no panic");
        }
    }
}
