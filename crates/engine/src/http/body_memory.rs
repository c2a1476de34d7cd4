//! The memory that unfinished bodies share. Only received bytes count. When memory is short, the
//! slowest bodies are dropped, not the newest one. Bodies of a client that holds more than half of
//! the memory are dropped first.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::http::body::BodyFault;
use crate::http::client_address::party;
use crate::limits::SPARE_SHARE;

/// Memory for bodies that arrive in pieces, shared by all connections.
#[derive(Debug, Clone)]
pub(crate) struct BodyMemory(Arc<Memory>);

#[derive(Debug)]
struct Memory {
    bytes_max: usize,
    /// The time for which a new body is not dropped, and the span over which its speed is measured.
    window: Duration,
    pool: Mutex<Pool>,
}

#[derive(Debug, Default)]
struct Pool {
    used: usize,
    bodies: HashMap<u64, BodyEntry>,
    clients: HashMap<IpAddr, usize>,
    next: u64,
}

#[derive(Debug)]
struct BodyEntry {
    client: IpAddr,
    bytes: usize,
    course: Arc<BodyProgress>,
}

/// The progress of one body. Only the body's reader writes the numbers.
#[derive(Debug)]
struct BodyProgress {
    began: Instant,
    received: AtomicUsize,
    /// The arrival of the last piece, in microseconds after `began`.
    last_us: AtomicU64,
    /// The start of the current window, and the bytes received by then.
    mark_us: AtomicU64,
    mark_bytes: AtomicUsize,
    /// Bytes per second in the previous window.
    rate: AtomicU64,
    whole: AtomicBool,
    gave_way: AtomicBool,
    reader: Mutex<Option<Waker>>,
}

/// The memory that one body holds, until this is dropped.
#[derive(Debug)]
pub(crate) struct BodyPermit {
    memory: Arc<Memory>,
    client: IpAddr,
    /// Set from the first byte on.
    entry: Option<(u64, Arc<BodyProgress>)>,
    bytes: usize,
}

impl BodyMemory {
    pub(crate) fn new(bytes_max: usize, window: Duration) -> Self {
        Self(Arc::new(Memory { bytes_max, window, pool: Mutex::default() }))
    }

    /// A holder of memory for the body of a request of this client, without any memory yet.
    pub(crate) fn hold(&self, client: IpAddr) -> BodyPermit {
        BodyPermit { memory: Arc::clone(&self.0), client: party(client), entry: None, bytes: 0 }
    }
}

impl BodyPermit {
    /// Records the number of bytes received in all.
    pub(crate) fn received(&mut self, total: usize) {
        if let Some((_, course)) = &self.entry {
            course.note(total, self.memory.window);
        }
    }

    /// The bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Holds `bytes` in all. If memory is short, slower bodies are dropped; if none is slower, this
    /// one is.
    pub(crate) fn grow_to(&mut self, bytes: usize) -> Result<(), BodyFault> {
        let more = bytes.saturating_sub(self.bytes);
        if more == 0 {
            return Ok(());
        }
        let mut pool = self.memory.pool();
        let (id, course) = self.entry.get_or_insert_with(|| pool.enter(self.client));
        if course.gave_way.load(Ordering::Relaxed) {
            return Err(BodyFault::Crowded);
        }
        if pool.used.saturating_add(more) > self.memory.bytes_max {
            pool.make_room(more, *id, &self.memory)?;
        }
        pool.used += more;
        *pool.clients.entry(self.client).or_default() += more;
        if let Some(entry) = pool.bodies.get_mut(id) {
            entry.bytes += more;
        }
        self.bytes = bytes;
        Ok(())
    }

    /// Ready when this body was dropped for another.
    pub(crate) fn poll_gave_way(&self, cx: &mut Context<'_>) -> Poll<()> {
        let Some((_, course)) = &self.entry else { return Poll::Pending };
        *course.reader.lock().unwrap_or_else(PoisonError::into_inner) = Some(cx.waker().clone());
        match course.gave_way.load(Ordering::Acquire) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    }

    /// Records that the body is complete. A complete body still holds its memory, but is not dropped for a
    /// newer one.
    pub(crate) fn is_whole(&self) {
        if let Some((_, course)) = &self.entry {
            course.whole.store(true, Ordering::Relaxed);
        }
    }
}

impl Drop for BodyPermit {
    fn drop(&mut self) {
        if let Some((id, _)) = &self.entry {
            self.memory.pool().leave(*id);
        }
    }
}

impl Memory {
    fn pool(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pool {
    fn enter(&mut self, client: IpAddr) -> (u64, Arc<BodyProgress>) {
        let course = Arc::new(BodyProgress {
            began: Instant::now(),
            received: AtomicUsize::new(0),
            last_us: AtomicU64::new(0),
            mark_us: AtomicU64::new(0),
            mark_bytes: AtomicUsize::new(0),
            rate: AtomicU64::new(u64::MAX),
            whole: AtomicBool::new(false),
            gave_way: AtomicBool::new(false),
            reader: Mutex::default(),
        });
        self.next += 1;
        let entry = BodyEntry { client, bytes: 0, course: Arc::clone(&course) };
        self.bodies.insert(self.next, entry);
        (self.next, course)
    }

    /// Frees the memory of a body. A dropped body has freed its memory already.
    fn leave(&mut self, id: u64) -> Option<Arc<BodyProgress>> {
        let BodyEntry { client, bytes, course } = self.bodies.remove(&id)?;
        self.used -= bytes;
        if let Some(held) = self.clients.get_mut(&client) {
            *held -= bytes;
            if *held == 0 {
                self.clients.remove(&client);
            }
        }
        Some(course)
    }

    /// Drops the slowest bodies until `more` bytes fit, and then a few more, so that the next
    /// pieces find free memory without a search.
    fn make_room(&mut self, more: usize, newcomer: u64, memory: &Memory) -> Result<(), BodyFault> {
        let now = Instant::now();
        let mut slow: Vec<_> = self
            .bodies
            .iter()
            .filter_map(|(id, entry)| {
                let (rate, last) = entry.course.pace(now, memory.window)?;
                let held = self.clients.get(&entry.client).copied().unwrap_or_default();
                let is_modest = held <= memory.bytes_max / 2;
                Some((is_modest, rate, last, *id))
            })
            .collect();
        slow.sort_unstable();
        let spare = memory.bytes_max / SPARE_SHARE;
        let mut slow = slow.into_iter().peekable();
        while self.used.saturating_add(more).saturating_add(spare) > memory.bytes_max {
            let fits = self.used.saturating_add(more) <= memory.bytes_max;
            match slow.next_if(|(.., id)| !fits || *id != newcomer) {
                Some((.., id)) if id == newcomer => return Err(BodyFault::Crowded),
                Some((.., id)) => {
                    if let Some(course) = self.leave(id) {
                        course.give_way();
                    }
                }
                None if fits => return Ok(()),
                None => return Err(BodyFault::Crowded),
            }
        }
        Ok(())
    }
}

impl BodyProgress {
    fn note(&self, total: usize, window: Duration) {
        let now_us = micros(self.began.elapsed());
        let since_us = now_us - self.mark_us.load(Ordering::Relaxed).min(now_us);
        if since_us >= micros(window) {
            let more = total.saturating_sub(self.mark_bytes.load(Ordering::Relaxed)) as u64;
            self.rate.store(more.saturating_mul(1_000_000) / since_us.max(1), Ordering::Relaxed);
            self.mark_us.store(now_us, Ordering::Relaxed);
            self.mark_bytes.store(total, Ordering::Relaxed);
        }
        self.last_us.store(now_us, Ordering::Relaxed);
        self.received.store(total, Ordering::Relaxed);
    }

    /// Its recent bytes per second and the time of the last piece; `None` while it is too new to be
    /// dropped.
    fn pace(&self, now: Instant, window: Duration) -> Option<(u64, Instant)> {
        let age = now.saturating_duration_since(self.began);
        if age < window || self.whole.load(Ordering::Relaxed) {
            return None;
        }
        let last = self.began + Duration::from_micros(self.last_us.load(Ordering::Relaxed));
        let is_stalled = now.saturating_duration_since(last) >= window;
        let rate = match self.rate.load(Ordering::Relaxed) {
            _ if is_stalled => 0,
            u64::MAX => {
                let received = self.received.load(Ordering::Relaxed) as u64;
                received.saturating_mul(1_000_000) / micros(age).max(1)
            }
            rate => rate,
        };
        Some((rate, last))
    }

    fn give_way(&self) {
        self.gave_way.store(true, Ordering::Release);
        let reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(reader) = reader {
            reader.wake();
        }
    }
}

fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(last: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, last])
    }

    fn gave_way(held: &BodyPermit) -> bool {
        held.poll_gave_way(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    /// A body of that client with `bytes` received.
    fn body(memory: &BodyMemory, of: u8, bytes: usize) -> BodyPermit {
        let mut held = memory.hold(client(of));
        held.grow_to(bytes).expect("room");
        held.received(bytes);
        held
    }

    #[test]
    fn the_body_that_has_waited_longest_is_dropped_for_a_new_one() {
        let memory = BodyMemory::new(100, Duration::ZERO);
        let (oldest, next) = (body(&memory, 1, 30), body(&memory, 1, 30));
        let newcomer = body(&memory, 1, 60);
        assert!(gave_way(&oldest) && !gave_way(&next) && !gave_way(&newcomer));
        // The memory of the dropped body is free, and is not freed twice.
        drop(oldest);
        assert!(memory.0.pool().used == 90);
    }

    #[test]
    fn a_complete_or_new_body_is_not_dropped() {
        let memory = BodyMemory::new(100, Duration::ZERO);
        let whole = body(&memory, 1, 60);
        whole.is_whole();
        assert_eq!(memory.hold(client(1)).grow_to(60), Err(BodyFault::Crowded));
        assert!(!gave_way(&whole));
        let memory = BodyMemory::new(100, Duration::from_secs(3600));
        let new = body(&memory, 1, 60);
        assert_eq!(memory.hold(client(2)).grow_to(60), Err(BodyFault::Crowded));
        assert!(!gave_way(&new));
        drop(new);
        body(&memory, 1, 100);
    }

    #[test]
    fn bodies_of_a_client_with_more_than_half_are_dropped_first() {
        let memory = BodyMemory::new(100, Duration::ZERO);
        let modest = body(&memory, 1, 20);
        let (greedy, too) = (body(&memory, 2, 40), body(&memory, 2, 40));
        let newcomer = body(&memory, 3, 30);
        assert!(gave_way(&greedy) && !gave_way(&modest) && !gave_way(&too));
        drop(newcomer);
    }

    #[test]
    fn the_slowest_body_cannot_displace_a_faster_one() {
        let memory = BodyMemory::new(100, Duration::ZERO);
        let mut slowest = body(&memory, 1, 10);
        let faster = body(&memory, 1, 90);
        assert_eq!(slowest.grow_to(20), Err(BodyFault::Crowded));
        assert!(!gave_way(&faster));
    }
}
