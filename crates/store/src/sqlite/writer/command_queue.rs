//! The queue of commands from any thread to the writer. The writer takes all waiting commands with one lock.
//!
//! The queue never calls `sched_yield`. Lock-free queues do, while a sender that was interrupted has reserved a slot
//! and not filled it. On a busy machine Linux then runs other threads for milliseconds, and all acks wait.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Room for commands that the queue keeps while it is empty.
const ROOM_KEPT: usize = 1_024;

/// Returns both ends of a new queue.
pub(super) fn command_queue<T>() -> (QueueSender<T>, QueueReceiver<T>) {
    let queue = Arc::new(Queue { state: Mutex::default(), changed: Condvar::new() });
    let receiver = QueueReceiver { queue: Arc::clone(&queue), taken: RefCell::default() };
    (QueueSender::of(queue), receiver)
}

struct Queue<T> {
    state: Mutex<QueueState<T>>,
    /// Notified when the receiver sleeps and the state changes.
    changed: Condvar,
}

struct QueueState<T> {
    commands: VecDeque<T>,
    senders: usize,
    is_receiver_asleep: bool,
    /// The receiver is dropped.
    is_closed: bool,
}

impl<T> Default for QueueState<T> {
    fn default() -> Self {
        Self { commands: VecDeque::new(), senders: 0, is_receiver_asleep: false, is_closed: false }
    }
}

impl<T> Queue<T> {
    fn state(&self) -> MutexGuard<'_, QueueState<T>> {
        self.state.lock().expect("no panic happens under this lock")
    }

    /// Wakes the receiver if it sleeps.
    fn wake(&self, state: MutexGuard<'_, QueueState<T>>) {
        // The flag stays until the receiver has the lock again: if this sender is interrupted now, the next one wakes
        // the receiver.
        let is_asleep = state.is_receiver_asleep;
        // The lock is free when the receiver wakes up.
        drop(state);
        if is_asleep {
            self.changed.notify_one();
        }
    }
}

/// Adds commands to the queue.
pub(super) struct QueueSender<T>(Arc<Queue<T>>);

impl<T> QueueSender<T> {
    fn of(queue: Arc<Queue<T>>) -> Self {
        queue.state().senders += 1;
        Self(queue)
    }

    /// Adds a command, or returns it if the receiver is gone.
    pub(super) fn send(&self, command: T) -> Result<(), T> {
        let mut state = self.0.state();
        if state.is_closed {
            return Err(command);
        }
        state.commands.push_back(command);
        self.0.wake(state);
        Ok(())
    }
}

impl<T> Clone for QueueSender<T> {
    fn clone(&self) -> Self {
        Self::of(Arc::clone(&self.0))
    }
}

impl<T> Drop for QueueSender<T> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.senders -= 1;
        self.0.wake(state);
    }
}

impl<T> fmt::Debug for QueueSender<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("QueueSender")
    }
}

/// Takes commands from the queue, in the order in which they were sent.
pub(super) struct QueueReceiver<T> {
    queue: Arc<Queue<T>>,
    /// Commands that were taken with the last lock and are not returned yet.
    taken: RefCell<VecDeque<T>>,
}

/// Why no command was received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NotReceived {
    /// None arrived in time.
    TimedOut,
    /// The queue is empty, and every sender is dropped.
    NoSenderLeft,
}

impl<T> QueueReceiver<T> {
    /// Returns the next command, if there is one.
    pub(super) fn try_receive(&self) -> Option<T> {
        let mut taken = self.taken.borrow_mut();
        if taken.is_empty() {
            take_all(&mut self.queue.state().commands, &mut taken);
        }
        taken.pop_front()
    }

    /// Returns the next command, and waits for one if there is none.
    pub(super) fn receive_within(&self, at_most: Duration) -> Result<T, NotReceived> {
        if let Some(command) = self.try_receive() {
            return Ok(command);
        }
        let until = Instant::now() + at_most;
        let mut state = self.queue.state();
        while state.commands.is_empty() {
            if state.senders == 0 {
                return Err(NotReceived::NoSenderLeft);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(NotReceived::TimedOut);
            }
            state.is_receiver_asleep = true;
            let waited = self.queue.changed.wait_timeout(state, left);
            state = waited.expect("no panic happens under this lock").0;
            state.is_receiver_asleep = false;
        }
        let mut taken = self.taken.borrow_mut();
        take_all(&mut state.commands, &mut taken);
        Ok(taken.pop_front().expect("there was a command"))
    }
}

impl<T> Drop for QueueReceiver<T> {
    fn drop(&mut self) {
        let mut state = self.queue.state();
        state.is_closed = true;
        let unreceived = std::mem::take(&mut state.commands);
        // The commands are dropped without the lock, because that wakes their senders.
        drop(state);
        drop(unreceived);
    }
}

/// Moves all commands. A queue that was long does not keep its memory.
fn take_all<T>(commands: &mut VecDeque<T>, taken: &mut VecDeque<T>) {
    taken.shrink_to(ROOM_KEPT);
    std::mem::swap(commands, taken);
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const SOON: Duration = Duration::ZERO;
    const FOREVER: Duration = Duration::from_secs(3_600);

    #[test]
    fn every_command_is_received_once_and_each_sender_keeps_its_order() {
        // The senders race with each other and with a receiver that sleeps and wakes up all the time.
        const SENDERS: usize = 4;
        const EACH: usize = 20_000;
        let (sender, receiver) = command_queue();
        let senders = (0..SENDERS).map(|from| {
            let sender = sender.clone();
            thread::spawn(move || {
                (0..EACH).for_each(|nth| sender.send((from, nth)).expect("the receiver listens"));
            })
        });
        let senders: Vec<_> = senders.collect();
        drop(sender);
        let mut next = [0; SENDERS];
        loop {
            match receiver.receive_within(FOREVER) {
                Ok((from, nth)) => {
                    assert_eq!(nth, next[from]);
                    next[from] += 1;
                }
                Err(why) => break assert_eq!(why, NotReceived::NoSenderLeft),
            }
        }
        assert_eq!(next, [EACH; SENDERS]);
        senders.into_iter().for_each(|sender| sender.join().expect("ends"));
    }

    #[test]
    fn a_receiver_that_sleeps_notices_the_last_sender_leave() {
        // Otherwise a store that is dropped without being closed leaves its thread behind.
        let (sender, receiver) = command_queue::<()>();
        let asleep = Arc::clone(&receiver.queue);
        let receiving = thread::spawn(move || receiver.receive_within(FOREVER));
        while !asleep.state().is_receiver_asleep {
            thread::yield_now();
        }
        drop(sender);
        assert_eq!(receiving.join().expect("ends"), Err(NotReceived::NoSenderLeft));
    }

    #[test]
    fn commands_of_a_receiver_that_is_gone_are_dropped_or_returned() {
        // Their callers wait for an answer, which the command holds.
        let (sender, receiver) = command_queue();
        let waiting = Arc::new(());
        for _ in 0..3 {
            sender.send(Arc::clone(&waiting)).expect("the receiver listens");
        }
        assert!(receiver.receive_within(SOON).is_ok());
        assert_eq!(Arc::strong_count(&waiting), 3, "one is dropped, two wait");
        drop(receiver);
        assert_eq!(Arc::strong_count(&waiting), 1);
        assert!(sender.send(waiting).is_err());
    }

    #[test]
    fn a_long_queue_does_not_keep_its_memory() {
        let (sender, receiver) = command_queue();
        for _ in 0..2 {
            (0..50_000).for_each(|n| sender.send(n).expect("the receiver listens"));
            while receiver.try_receive().is_some() {}
        }
        assert_eq!(receiver.receive_within(SOON), Err(NotReceived::TimedOut));
        assert!(receiver.taken.borrow().capacity() < 2 * ROOM_KEPT);
        assert!(receiver.queue.state().commands.capacity() < 2 * ROOM_KEPT);
    }
}
