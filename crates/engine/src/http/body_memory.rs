//! The memory that unfinished bodies share. Only what was received counts. When it is short the slowest
//! bodies give way, those first whose client holds more than half of it, and not the newcomer.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::http::body::BodyFault;
use crate::http::client_address::party;
use crate::limits::SPARE_SHARE;

/// Memory for bodies that come in pieces, shared by all connections.
#[derive(Debug, Clone)]
pub(crate) struct BodyMemory(Arc<Memory>);

#[derive(Debug)]
struct Memory {
    bytes_max: usize,
    /// How long a body is left alone, and over which its speed is measured.
    window: Duration,
    pool: Mutex<Pool>,
}

#[derive(Debug, Default)]
struct Pool {
    used: usize,
    bodies: HashMap<u64, Entry>,
    clients: HashMap<IpAddr, usize>,
    next: u64,
}

#[derive(Debug)]
struct Entry {
    client: IpAddr,
    bytes: usize,
    course: Arc<Course>,
}

/// How one body comes. Only its reader writes the numbers.
#[derive(Debug)]
struct Course {
    began: Instant,
    received: AtomicUsize,
    /// When the last piece came, in microseconds after `began`.
    last_us: AtomicU64,
    /// When the current window began, and how much had been received by then.
    mark_us: AtomicU64,
    mark_bytes: AtomicUsize,
    /// Bytes per second in the window before it.
    rate: AtomicU64,
    whole: AtomicBool,
    gave_way: AtomicBool,
    reader: Mutex<Option<Waker>>,
}

/// What one body holds of the memory, until this is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    memory: Arc<Memory>,
    client: IpAddr,
    /// From its first byte on.
    entry: Option<(u64, Arc<Course>)>,
    bytes: usize,
}

impl BodyMemory {
    pub(crate) fn new(bytes_max: usize, window: Duration) -> Self {
        Self(Arc::new(Memory { bytes_max, window, pool: Mutex::default() }))
    }

    /// For the body of a request of this client; it holds nothing yet.
    pub(crate) fn hold(&self, client: IpAddr) -> Held {
        Held { memory: Arc::clone(&self.0), client: party(client), entry: None, bytes: 0 }
    }
}

impl Held {
    /// Notes that so many bytes have been received in all.
    pub(crate) fn received(&mut self, total: usize) {
        if let Some((_, course)) = &self.entry {
            course.note(total, self.memory.window);
        }
    }

    /// How much is held.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Holds `bytes` in all. Where there are not as many, slower bodies give way; where none is slower,
    /// this one does.
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

    /// Ready when this body has to give way.
    pub(crate) fn poll_gave_way(&self, cx: &mut Context<'_>) -> Poll<()> {
        let Some((_, course)) = &self.entry else { return Poll::Pending };
        *course.reader.lock().unwrap_or_else(PoisonError::into_inner) = Some(cx.waker().clone());
        match course.gave_way.load(Ordering::Acquire) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    }

    /// The body is whole: it still holds its memory, but does not give way any more.
    pub(crate) fn is_whole(&self) {
        if let Some((_, course)) = &self.entry {
            course.whole.store(true, Ordering::Relaxed);
        }
    }
}

impl Drop for Held {
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
    fn enter(&mut self, client: IpAddr) -> (u64, Arc<Course>) {
        let course = Arc::new(Course {
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
        let entry = Entry { client, bytes: 0, course: Arc::clone(&course) };
        self.bodies.insert(self.next, entry);
        (self.next, course)
    }

    /// What it held is free. A body that gave way has left already.
    fn leave(&mut self, id: u64) -> Option<Arc<Course>> {
        let Entry { client, bytes, course } = self.bodies.remove(&id)?;
        self.used -= bytes;
        if let Some(held) = self.clients.get_mut(&client) {
            *held -= bytes;
            if *held == 0 {
                self.clients.remove(&client);
            }
        }
        Some(course)
    }

    /// Lets the slowest give way until `more` fit, and some more, so that not each piece has to search.
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

impl Course {
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

    /// Its bytes per second of late and when it last received any; `None` where it is left alone.
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

    fn gave_way(held: &Held) -> bool {
        held.poll_gave_way(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    /// A body of that client which has received `bytes`.
    fn body(memory: &BodyMemory, of: u8, bytes: usize) -> Held {
        let mut held = memory.hold(client(of));
        held.grow_to(bytes).expect("room");
        held.received(bytes);
        held
    }

    #[test]
    fn the_one_that_has_waited_longest_gives_way_to_a_newcomer() {
        let memory = BodyMemory::new(100, Duration::ZERO);
        let (oldest, next) = (body(&memory, 1, 30), body(&memory, 1, 30));
        let newcomer = body(&memory, 1, 60);
        assert!(gave_way(&oldest) && !gave_way(&next) && !gave_way(&newcomer));
        // What it held is free, and not freed twice.
        drop(oldest);
        assert!(memory.0.pool().used == 90);
    }

    #[test]
    fn one_that_is_whole_or_has_only_just_begun_does_not_give_way() {
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
    fn a_client_that_holds_more_than_half_gives_way_first() {
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
