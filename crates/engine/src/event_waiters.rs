//! Rings when the work on an event may have ended, for those who wait for exactly that. A hint like
//! any other: who waits looks for itself, and also when nothing rings.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hapax_core::store::EventId;
use tokio::sync::Notify;

/// Between those who work and those who wait. Clones are one bell.
#[derive(Debug, Clone, Default)]
pub struct Bell(Arc<Mutex<HashMap<EventId, Waiters>>>);

#[derive(Debug, Default)]
struct Waiters {
    count: usize,
    notify: Arc<Notify>,
}

/// One who waits; it is forgotten when this is dropped.
#[derive(Debug)]
pub(crate) struct Waiting {
    bell: Bell,
    event: EventId,
    notify: Arc<Notify>,
}

impl Bell {
    /// Something happened to this event.
    pub(crate) fn ring(&self, event: EventId) {
        if let Some(waiters) = self.waiters().get(&event) {
            waiters.notify.notify_waiters();
        }
    }

    /// Something happened to each of these.
    pub(crate) fn ring_each(&self, events: &[EventId]) {
        let all = self.waiters();
        if all.is_empty() {
            return;
        }
        for waiters in events.iter().filter_map(|event| all.get(event)) {
            waiters.notify.notify_waiters();
        }
    }

    pub(crate) fn wait_for(&self, event: EventId) -> Waiting {
        let mut all = self.waiters();
        let waiters = all.entry(event).or_default();
        waiters.count += 1;
        Waiting { bell: self.clone(), event, notify: waiters.notify.clone() }
    }

    fn waiters(&self) -> MutexGuard<'_, HashMap<EventId, Waiters>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    /// The next ring after this call, whenever it is awaited.
    pub(crate) fn ring(&self) -> impl Future<Output = ()> + use<> {
        Arc::clone(&self.notify).notified_owned()
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut all = self.bell.waiters();
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
    fn only_those_who_wait_for_what_ended_are_woken() {
        // Every other waiter that wakes reads a whole event for nothing.
        let bell = Bell::default();
        let [ended, other] = [1, 2].map(|n| EventId(Uuid::from_u128(n)));
        let (theirs, others) = (bell.wait_for(ended), bell.wait_for(other));
        let (mut theirs, mut others) = (pin!(theirs.ring()), pin!(others.ring()));
        let mut cx = Context::from_waker(Waker::noop());
        assert_eq!(theirs.as_mut().poll(&mut cx), Poll::Pending);
        assert_eq!(others.as_mut().poll(&mut cx), Poll::Pending);
        bell.ring_each(&[EventId(Uuid::from_u128(3)), ended]);
        assert_eq!(theirs.poll(&mut cx), Poll::Ready(()));
        assert_eq!(others.poll(&mut cx), Poll::Pending);
    }
}
