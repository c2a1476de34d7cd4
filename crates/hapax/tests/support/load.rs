//! Clients that behave like real senders: each event is sent until it is acked, and now and then
//! once more.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{Sender, Wire};

/// A few clients with their events, each sent in order.
pub(crate) struct Load {
    clients: Vec<Client>,
    /// Acked events so far, over all clients.
    acked: AtomicUsize,
}

struct Client {
    events: Vec<Vec<u8>>,
    next: usize,
}

impl Load {
    /// Divides `requests` among `clients`.
    pub(crate) fn new(clients: usize, requests: Vec<Vec<u8>>) -> Self {
        let mut shares: Vec<Client> =
            (0..clients).map(|_| Client { events: Vec::new(), next: 0 }).collect();
        for (n, request) in requests.into_iter().enumerate() {
            shares[n % clients].events.push(request);
        }
        Self { clients: shares, acked: AtomicUsize::new(0) }
    }

    /// Events `from..to` with ids `evt_N`.
    pub(crate) fn events(clients: usize, sender: &Sender, ids: std::ops::Range<usize>) -> Self {
        Self::new(clients, ids.map(|n| sender.event(&format!("evt_{n}"))).collect())
    }

    /// The number of acked events so far.
    pub(crate) fn acked(&self) -> usize {
        self.acked.load(Ordering::Relaxed)
    }

    /// Sends until all events are acked or the server is gone, while `meanwhile` runs. Returns true
    /// if all are acked.
    pub(crate) fn send<T>(
        &mut self,
        to: SocketAddr,
        meanwhile: impl FnOnce(&AtomicUsize) -> T,
    ) -> bool {
        let acked = &self.acked;
        std::thread::scope(|scope| {
            for client in &mut self.clients {
                scope.spawn(move || client.send(to, acked));
            }
            meanwhile(acked);
        });
        self.clients.iter().all(|client| client.next == client.events.len())
    }

    /// Sends all events to a server that keeps running.
    #[track_caller]
    pub(crate) fn send_all(&mut self, to: SocketAddr) {
        assert!(self.send(to, |_| ()), "the server went away");
    }
}

impl Client {
    fn send(&mut self, to: SocketAddr, acked: &AtomicUsize) {
        let Ok(mut wire) = Wire::try_connect(to) else { return };
        while let Some(request) = self.events.get(self.next) {
            // If an earlier process committed the event and its answer was lost, this answer is
            // `duplicate`. Otherwise this answer is `accepted`.
            let Some(answer) = wire.try_ask(request) else { return };
            assert_eq!(answer.status, 200, "{answer:?}");
            self.next += 1;
            acked.fetch_add(1, Ordering::Relaxed);
            if self.next.is_multiple_of(7) {
                let Some(again) = wire.try_ask(request) else { return };
                again.is("duplicate");
                assert_eq!(again.id(), answer.id());
            }
        }
    }
}

/// Random numbers, not secret but different in each run: they choose the moment of a fault.
pub(crate) struct Dice(u64);

impl Dice {
    /// Seeded by the process id. The seed is printed, so that a failed run can be repeated.
    pub(crate) fn new() -> Self {
        let seed = u64::from(std::process::id()) | 1;
        #[allow(clippy::print_stderr, reason = "shown where a test fails")]
        {
            eprintln!("dice seeded with {seed}");
        }
        Self(seed)
    }

    /// A number in `0..below`.
    pub(crate) fn below(&mut self, below: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for end in (1..items.len()).rev() {
            items.swap(end, self.below(end as u64 + 1) as usize);
        }
    }
}
