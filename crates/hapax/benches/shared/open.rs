//! The load of real senders: an open loop. Requests are sent at planned instants, whatever the
//! answers do, and latency counts from the planned instant. A server that stops for a while is late
//! for all requests of that time; a generator that falls behind counts in the same way.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::{JoinSet, LocalSet};

use super::events::Events;
use super::load::{Load, Measured, answer, check, expected, us_since};
use super::server::Server;

/// Connections at the start; more are opened when none is free.
const CONNECTIONS: usize = 64;

/// The most connections. Beyond this number, requests wait for a connection, and the wait is part
/// of their latency.
const CONNECTIONS_MAX: usize = 1_024;

/// Makes the requests of a load, each of them new.
pub(crate) trait Requests {
    /// A request to that address, of the form that [`Requests::renew`] fills in.
    fn blank(&self, to: SocketAddr) -> Vec<u8>;

    /// Turns `request` into the next one.
    fn renew(&mut self, request: &mut [u8]);
}

impl Requests for Events {
    fn blank(&self, _to: SocketAddr) -> Vec<u8> {
        Self::blank(self)
    }

    fn renew(&mut self, request: &mut [u8]) {
        Self::renew(self, request);
    }
}

/// New requests at a fixed rate.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) per_second: f64,
    pub(crate) time: Duration,
    /// The unmeasured time before the load, at the same rate.
    pub(crate) warm_up: Duration,
}

/// The result.
pub(crate) struct Paced {
    pub(crate) measured: Measured,
    /// How much later than planned each request was sent, in microseconds.
    sent_late_us: Vec<u32>,
    pub(crate) connections: usize,
}

impl Paced {
    pub(crate) fn join(&mut self, other: Self) {
        self.measured.join(other.measured);
        self.sent_late_us.extend(other.sent_late_us);
        self.sent_late_us.sort_unstable();
        self.connections = self.connections.max(other.connections);
    }

    /// The p99 of the generator's own delay, which is part of the measured latencies.
    pub(crate) fn sent_late_us_p99(&self) -> u32 {
        let at = self.sent_late_us.len() * 99 / 100;
        self.sent_late_us.get(at).copied().unwrap_or(0)
    }
}

/// Sends new events to `server` as planned and waits for all answers, each of which is checked.
pub(crate) async fn run(
    server: &Server,
    events: &Rc<RefCell<Events>>,
    plan: Plan,
) -> anyhow::Result<Paced> {
    run_at(server, server.address(), expected(server, Load::New), events, plan).await
}

/// Sends `requests` to one of the addresses of `server` as planned and waits for all answers. Each of them is a
/// 2xx, and begins with `decision` if there is one.
pub(crate) async fn run_at<R: Requests + 'static>(
    server: &Server,
    to: SocketAddr,
    decision: Option<&'static [u8]>,
    requests: &Rc<RefCell<R>>,
    plan: Plan,
) -> anyhow::Result<Paced> {
    ensure!(plan.per_second > 0.0, "a rate above zero");
    let road = Rc::new(Road {
        to,
        requests: Rc::clone(requests),
        decision,
        free: RefCell::default(),
        waiting: RefCell::default(),
        latencies_us: RefCell::default(),
        sent_late_us: RefCell::default(),
    });
    for _ in 0..CONNECTIONS {
        let connection = Connection::open(&road).await?;
        road.free.borrow_mut().push_back(connection);
    }
    let here = LocalSet::new();
    here.run_until(drive(server, road, plan)).await
}

async fn drive<R: Requests + 'static>(
    server: &Server,
    road: Rc<Road<R>>,
    plan: Plan,
) -> anyhow::Result<Paced> {
    let (plans, mut planned) = mpsc::unbounded_channel();
    let began = Instant::now();
    let measured_from = began + plan.warm_up;
    let until = measured_from + plan.time;
    // A separate thread: the runtime's timer has a resolution of milliseconds only.
    let pacer = std::thread::spawn(move || pace(began, until, plan.per_second, &plans));
    let mut requests = JoinSet::new();
    let mut connections = CONNECTIONS;
    let mut before = None;
    while let Some(at) = planned.recv().await {
        if at >= measured_from && before.is_none() {
            before = Some(server.usage()?);
        }
        let at = Planned { at, is_measured: at >= measured_from };
        let free = road.free.borrow_mut().pop_front();
        match free {
            Some(connection) => drop(requests.spawn_local(travel(connection, at, road.clone()))),
            None if connections < CONNECTIONS_MAX => {
                connections += 1;
                let connection = Connection::open(&road).await?;
                requests.spawn_local(travel(connection, at, road.clone()));
            }
            None => road.waiting.borrow_mut().push_back(at),
        }
        while let Some(ended) = requests.try_join_next() {
            ended.context("a request panicked")??;
        }
    }
    let usage = server.usage()?;
    while let Some(ended) = requests.join_next().await {
        ended.context("a request panicked")??;
    }
    pacer.join().map_err(|_| anyhow::anyhow!("the pacer panicked"))?;
    let seconds = plan.time.as_secs_f64();
    let mut sent_late_us = road.sent_late_us.take();
    sent_late_us.sort_unstable();
    Ok(Paced {
        measured: Measured::new(seconds, before.unwrap_or(usage), usage, road.latencies_us.take()),
        sent_late_us,
        connections,
    })
}

/// Sends each planned instant once it is reached.
fn pace(began: Instant, until: Instant, per_second: f64, plans: &mpsc::UnboundedSender<Instant>) {
    for n in 0_u64.. {
        let at = began + Duration::from_secs_f64(n as f64 / per_second);
        if at >= until {
            return;
        }
        let wait = at.saturating_duration_since(Instant::now());
        if !wait.is_zero() {
            std::thread::sleep(wait);
        }
        if plans.send(at).is_err() {
            return;
        }
    }
}

/// Shared by the requests of one run.
struct Road<R> {
    to: SocketAddr,
    requests: Rc<RefCell<R>>,
    decision: Option<&'static [u8]>,
    /// Connections are used in turn, because a server closes connections that are idle for long.
    free: RefCell<VecDeque<Connection>>,
    waiting: RefCell<VecDeque<Planned>>,
    latencies_us: RefCell<Vec<u32>>,
    sent_late_us: RefCell<Vec<u32>>,
}

#[derive(Clone, Copy)]
struct Planned {
    at: Instant,
    is_measured: bool,
}

struct Connection {
    stream: TcpStream,
    request: Vec<u8>,
    buffer: Vec<u8>,
}

impl Connection {
    async fn open<R: Requests>(road: &Road<R>) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(road.to).await.context("connecting")?;
        stream.set_nodelay(true)?;
        let request = road.requests.borrow().blank(road.to);
        Ok(Self { stream, request, buffer: Vec::with_capacity(4096) })
    }
}

/// Sends one request, and then the requests that waited for a connection.
async fn travel<R: Requests>(
    mut connection: Connection,
    mut planned: Planned,
    road: Rc<Road<R>>,
) -> anyhow::Result<()> {
    loop {
        let Connection { stream, request, buffer } = &mut connection;
        road.requests.borrow_mut().renew(request);
        let late_us = us_since(planned.at);
        stream.write_all(request).await.context("sending")?;
        let body = answer(stream, buffer).await?;
        check(&buffer[body], road.decision)?;
        if planned.is_measured {
            road.latencies_us.borrow_mut().push(us_since(planned.at));
            road.sent_late_us.borrow_mut().push(late_us);
        }
        let next = road.waiting.borrow_mut().pop_front();
        match next {
            Some(next) => planned = next,
            None => break,
        }
    }
    road.free.borrow_mut().push_back(connection);
    Ok(())
}
