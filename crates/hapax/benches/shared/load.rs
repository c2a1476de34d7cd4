//! The load: a closed loop over keep-alive connections, each with one request in flight. The client
//! implements only as much of HTTP as the two servers use: a client as expensive as the server
//! would be half of the measurement.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::task::{JoinSet, LocalSet};

use super::events::Events;
use super::server::{Server, Usage};

/// The kind of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Load {
    /// Events that were never sent before.
    New,
    /// Only copies of a few known events, repeatedly.
    Copies,
    /// Each event that was sent before, once more.
    Again,
}

impl Load {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::New => "new events",
            Self::Copies => "only duplicates",
            Self::Again => "each event once more",
        }
    }
}

/// The length of a slice.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Length {
    Time(Duration),
    Events(u64),
}

/// The result of one slice, or of several of the same kind.
#[derive(Default)]
pub(crate) struct Measured {
    pub(crate) requests: u64,
    pub(crate) seconds: f64,
    pub(crate) cpu_seconds: f64,
    /// Bytes that the server caused to be written to a disk.
    pub(crate) written_bytes: u64,
    /// The usage at the end of the last slice, while its connections were still open.
    pub(crate) usage: Usage,
    latencies_us: Vec<u32>,
}

impl Measured {
    /// One request for each latency. `before` is the usage at the start, `usage` the usage at the
    /// end.
    pub(crate) fn new(
        seconds: f64,
        before: Usage,
        usage: Usage,
        mut latencies_us: Vec<u32>,
    ) -> Self {
        latencies_us.sort_unstable();
        Self {
            requests: latencies_us.len() as u64,
            seconds,
            cpu_seconds: usage.cpu_seconds - before.cpu_seconds,
            written_bytes: usage.written_bytes.saturating_sub(before.written_bytes),
            usage,
            latencies_us,
        }
    }

    pub(crate) fn join(&mut self, other: Self) {
        self.requests += other.requests;
        self.seconds += other.seconds;
        self.cpu_seconds += other.cpu_seconds;
        self.written_bytes += other.written_bytes;
        self.usage = other.usage;
        self.latencies_us.extend(other.latencies_us);
        self.latencies_us.sort_unstable();
    }

    pub(crate) fn per_second(&self) -> f64 {
        self.requests as f64 / self.seconds
    }

    pub(crate) fn cpu_us_per_request(&self) -> f64 {
        self.cpu_seconds * 1e6 / self.requests as f64
    }

    pub(crate) fn written_bytes_per_request(&self) -> f64 {
        self.written_bytes as f64 / self.requests as f64
    }

    /// The quantile `share` of the latencies.
    pub(crate) fn latency_us(&self, share: f64) -> f64 {
        let at = (self.latencies_us.len() as f64 * share) as usize;
        let at = at.min(self.latencies_us.len().saturating_sub(1));
        self.latencies_us.get(at).copied().unwrap_or(0).into()
    }
}

/// Loads `servers`, with the connections spread over them, and measures it, after a warm-up if
/// there is one. Every answer is checked: an error, or a new event that is called a duplicate, ends
/// the run.
pub(crate) async fn run(
    servers: &[&Server],
    events: &Rc<RefCell<Events>>,
    load: Load,
    connections: usize,
    length: Length,
    warm_up: Option<Duration>,
) -> anyhow::Result<Measured> {
    if load == Load::Copies {
        events.borrow_mut().prepare_copies();
    }
    let mut streams = Vec::with_capacity(connections);
    for server in servers.iter().cycle().take(connections) {
        let stream = TcpStream::connect(server.address()).await.context("connecting")?;
        stream.set_nodelay(true)?;
        streams.push((stream, expected(server, load)));
    }
    let events_max = match length {
        Length::Time(_) => u64::MAX,
        Length::Events(events) => events,
    };
    let slice = Rc::new(Slice {
        load,
        events: Rc::clone(events),
        left: Cell::new(events_max),
        measuring: Cell::new(warm_up.is_none()),
        latencies_us: RefCell::default(),
        all_sent: Notify::new(),
    });
    let here = LocalSet::new();
    let mut clients = JoinSet::new();
    for (stream, decision) in streams {
        clients.spawn_local_on(client(stream, decision, Rc::clone(&slice)), &here);
    }
    let clients = async {
        while let Some(ended) = clients.join_next().await {
            ended.context("a client panicked")??;
        }
        anyhow::Ok(())
    };
    let conduct = async {
        tokio::time::sleep(warm_up.unwrap_or_default()).await;
        slice.measuring.set(true);
        let (before, began) = (Usage::of(servers)?, Instant::now());
        match length {
            Length::Time(time) => tokio::time::sleep(time).await,
            Length::Events(_) => slice.all_sent.notified().await,
        }
        slice.measuring.set(false);
        let (usage, seconds) = (Usage::of(servers)?, began.elapsed().as_secs_f64());
        slice.left.set(0);
        Ok(Measured::new(seconds, before, usage, slice.latencies_us.take()))
    };
    let both = async { tokio::try_join!(conduct, clients) };
    let (measured, ()) = here.run_until(both).await?;
    Ok(measured)
}

/// Shared by the clients of one slice.
struct Slice {
    load: Load,
    events: Rc<RefCell<Events>>,
    left: Cell<u64>,
    measuring: Cell<bool>,
    latencies_us: RefCell<Vec<u32>>,
    all_sent: Notify,
}

/// The start of every answer of `server`, if it has a body.
pub(super) fn expected(server: &Server, load: Load) -> Option<&'static [u8]> {
    match load {
        Load::New | Load::Copies | Load::Again if !server.decides() => None,
        Load::New => Some(br#"{"decision":"accepted""#),
        Load::Copies | Load::Again => Some(br#"{"decision":"duplicate""#),
    }
}

async fn client(
    mut stream: TcpStream,
    decision: Option<&'static [u8]>,
    slice: Rc<Slice>,
) -> anyhow::Result<()> {
    let mut request = slice.events.borrow().blank();
    let mut buffer = Vec::with_capacity(4096);
    while slice.left.get() > 0 {
        slice.left.set(slice.left.get() - 1);
        match slice.load {
            Load::New => slice.events.borrow_mut().renew(&mut request),
            Load::Copies => request.copy_from_slice(slice.events.borrow_mut().copy()),
            Load::Again => slice.events.borrow_mut().again(&mut request),
        }
        let began = Instant::now();
        stream.write_all(&request).await.context("sending")?;
        let body = answer(&mut stream, &mut buffer).await?;
        check(&buffer[body], decision)?;
        if slice.measuring.get() {
            slice.latencies_us.borrow_mut().push(us_since(began));
        }
    }
    slice.all_sent.notify_one();
    Ok(())
}

pub(super) fn check(body: &[u8], decision: Option<&[u8]>) -> anyhow::Result<()> {
    let as_expected = decision.is_none_or(|decision| body.starts_with(decision));
    ensure!(as_expected, "answered {}", String::from_utf8_lossy(body));
    Ok(())
}

pub(crate) fn us_since(began: Instant) -> u32 {
    u32::try_from(began.elapsed().as_micros()).unwrap_or(u32::MAX)
}

/// Reads one answer into `buffer` and returns the position of its body.
pub(crate) async fn answer(
    stream: &mut TcpStream,
    buffer: &mut Vec<u8>,
) -> anyhow::Result<std::ops::Range<usize>> {
    buffer.clear();
    loop {
        ensure!(stream.read_buf(buffer).await.context("reading")? > 0, "the server hung up");
        let Some(head) = buffer.windows(4).position(|window| window == b"\r\n\r\n") else {
            continue;
        };
        if !buffer.starts_with(b"HTTP/1.1 20") {
            bail!("answered {}", String::from_utf8_lossy(buffer));
        }
        let body = head + 4;
        let length = content_length(&buffer[..head]).context("an answer without its length")?;
        if buffer.len() >= body + length {
            return Ok(body..body + length);
        }
    }
}

fn content_length(head: &[u8]) -> Option<usize> {
    let mut lines = head.split(|byte| *byte == b'\n');
    let value = lines.find_map(|line| line.strip_prefix(b"content-length: "))?;
    std::str::from_utf8(value.trim_ascii_end()).ok()?.parse().ok()
}
