//! Notifies requests that wait for the work on an event. A notification is a hint: a waiter reads the
//! event itself, and also polls without one.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hapax_core::store::EventId;
use tokio::sync::Notify;

/// The requests that wait, by event. Clones share the same list.
#[derive(Debug, Clone, Default)]
pub struct EventWaiters(Arc<Mutex<HashMap<EventId, Waiters>>>);

#[derive(Debug, Default)]
struct Waiters {
    count: usize,
    notify: Arc<Notify>,
}

/// One waiting request. Dropping the waiter removes it from the list.
#[derive(Debug)]
pub(crate) struct EventWaiter {
    event_waiters: EventWaiters,
    event: EventId,
    notify: Arc<Notify>,
}

impl EventWaiters {
    /// Wakes the requests that wait for this event.
    pub(crate) fn notify(&self, event: EventId) {
        if let Some(waiters) = self.waiters().get(&event) {
            waiters.notify.notify_waiters();
        }
    }

    /// Wakes the requests that wait for any of these events.
    pub(crate) fn notify_each(&self, events: &[EventId]) {
        let all = self.waiters();
        if all.is_empty() {
            return;
        }
        for waiters in events.iter().filter_map(|event| all.get(event)) {
            waiters.notify.notify_waiters();
        }
    }

    pub(crate) fn wait_for(&self, event: EventId) -> EventWaiter {
        let mut all = self.waiters();
        let waiters = all.entry(event).or_default();
        waiters.count += 1;
        EventWaiter { event_waiters: self.clone(), event, notify: waiters.notify.clone() }
    }

    fn waiters(&self) -> MutexGuard<'_, HashMap<EventId, Waiters>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl EventWaiter {
    /// The next notification after this call. A notification that arrives before the future is
    /// awaited is not lost.
    pub(crate) fn notify(&self) -> impl Future<Output = ()> + use<> {
        Arc::clone(&self.notify).notified_owned()
    }
}

impl Drop for EventWaiter {
    fn drop(&mut self) {
        let mut all = self.event_waiters.waiters();
        if let Some(waiters) = all.get_mut(&self.event) {
            waiters.count -= 1;
            if waiters.count == 0 {
                all.remove(&self.event);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use uuid::Uuid;

    use super::*;

    #[test]
    fn only_the_waiters_of_an_event_are_woken() {
        // A waiter that is woken needlessly reads its whole event from the store.
        let event_waiters = EventWaiters::default();
        let [ended, other] = [1, 2].map(|n| EventId(Uuid::from_u128(n)));
        let (theirs, others) = (event_waiters.wait_for(ended), event_waiters.wait_for(other));
        let (mut theirs, mut others) = (pin!(theirs.notify()), pin!(others.notify()));
        let mut cx = Context::from_waker(Waker::noop());
        assert_eq!(theirs.as_mut().poll(&mut cx), Poll::Pending);
        assert_eq!(others.as_mut().poll(&mut cx), Poll::Pending);
        event_waiters.notify_each(&[EventId(Uuid::from_u128(3)), ended]);
        assert_eq!(theirs.poll(&mut cx), Poll::Ready(()));
        assert_eq!(others.poll(&mut cx), Poll::Pending);
    }
}
