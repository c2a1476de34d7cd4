//! The endpoint that deliveries go to, a process of its own: it answers each with 1 KiB, once its gate is open.
//! While the gate is closed, a backlog can be published without being drained. [`Manner`] has the other ways in
//! which it treats deliveries.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::io::Write as _;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use hapax_engine::HttpLimits;
use hapax_engine::http::{Peer, Received, serve};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::publish::{AT, is_first_of_key, unix_us};
use crate::shared::load;
use crate::shared::server::Server;

const ANSWER_BYTES: usize = 1024;

/// A delivery that takes this long is stuck. Any backlog of a run takes less time.
const STUCK: Duration = Duration::from_secs(600);

const POLL: Duration = Duration::from_millis(5);

/// One in this many keys fails.
const FAILING_OF: u64 = 10;

/// How long [`Manner::Slow`] takes to answer: long enough for attempts to overlap, so that they can
/// be counted.
const SLOW: Duration = Duration::from_millis(2);

/// How the endpoint treats the deliveries to one of its paths.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Manner {
    /// Answers at once.
    Plain,
    /// Answers at once, and records each delivery.
    Recorded,
    /// Answers after a moment, and records each delivery.
    Slow,
    /// Answers at once and records each delivery, but the first attempt of the first message of
    /// each tenth key fails.
    TenthFails,
    /// Never answers.
    Hangs,
}

impl Manner {
    const ALL: [Self; 5] = [Self::Plain, Self::Recorded, Self::Slow, Self::TenthFails, Self::Hangs];

    fn path(self) -> &'static str {
        match self {
            Self::Plain => "/in",
            Self::Recorded => "/recorded",
            Self::Slow => "/slow",
            Self::TenthFails => "/tenth-fails",
            Self::Hangs => "/hangs",
        }
    }
}

/// A delivery that was recorded.
pub(crate) struct Arrival {
    /// The number of its message.
    pub(crate) n: u64,
    /// When its message was published, if its data says so.
    pub(crate) published_us: u64,
    pub(crate) arrived_us: u64,
    /// Attempts under way when it arrived, including its own.
    pub(crate) under_way: u32,
    pub(crate) is_ok: bool,
}

/// The state that the endpoint's connections share.
struct State {
    gate: watch::Sender<bool>,
    delivered: AtomicU64,
    under_way: AtomicU32,
    arrivals: Mutex<Vec<Arrival>>,
    /// Messages with a failed attempt.
    failed: Mutex<HashSet<u64>>,
}

/// Counts an attempt until it is answered or given up.
struct UnderWay<'a>(&'a AtomicU32);

impl<'a> UnderWay<'a> {
    fn begin(count: &'a AtomicU32) -> (Self, u32) {
        let before = count.fetch_add(1, Ordering::Relaxed);
        (Self(count), before + 1)
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Serves until killed.
pub(crate) fn run() -> anyhow::Result<()> {
    let state = Arc::new(State {
        gate: watch::Sender::new(true),
        delivered: AtomicU64::new(0),
        under_way: AtomicU32::new(0),
        arrivals: Mutex::default(),
        failed: Mutex::default(),
    });
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.context("listening")?;
        let mut out = std::io::stdout().lock();
        writeln!(out, "sink ready: http://{}", listener.local_addr()?)?;
        drop(out);
        let answer = move |request, _: Peer| answer(Arc::clone(&state), request);
        serve(listener, None, answer, HttpLimits::default(), CancellationToken::new()).await;
        Ok(())
    })
}

async fn answer(state: Arc<State>, request: Request<Received>) -> Response<Full<Bytes>> {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path();
    let manner = Manner::ALL.into_iter().find(|manner| manner.path() == path);
    let text = match (&parts.method, path, manner) {
        (&Method::POST, _, Some(manner)) => {
            let (_under_way, under_way) = UnderWay::begin(&state.under_way);
            let Ok(body) = body.collect().await else {
                return failed(StatusCode::BAD_REQUEST);
            };
            // The channel never closes, because the state holds its sender.
            let _ = state.gate.subscribe().wait_for(|is_open| *is_open).await;
            let is_ok = match manner {
                Manner::Plain => true,
                Manner::Hangs => std::future::pending().await,
                Manner::Recorded => {
                    state.record(&parts.headers, &body.to_bytes(), under_way, false)
                }
                Manner::Slow => {
                    tokio::time::sleep(SLOW).await;
                    state.record(&parts.headers, &body.to_bytes(), under_way, false)
                }
                Manner::TenthFails => {
                    state.record(&parts.headers, &body.to_bytes(), under_way, true)
                }
            };
            if !is_ok {
                return failed(StatusCode::INTERNAL_SERVER_ERROR);
            }
            state.delivered.fetch_add(1, Ordering::Relaxed);
            Bytes::from_static(&[b'.'; ANSWER_BYTES])
        }
        (&Method::POST, "/open", _) => {
            state.gate.send_replace(true);
            Bytes::new()
        }
        (&Method::POST, "/close", _) => {
            state.gate.send_replace(false);
            Bytes::new()
        }
        (&Method::POST, "/arrivals", _) => state.take_arrivals().into(),
        (&Method::GET, "/delivered", _) => {
            state.delivered.load(Ordering::Relaxed).to_string().into()
        }
        _ => return failed(StatusCode::NOT_FOUND),
    };
    Response::new(Full::new(text))
}

impl State {
    /// Records a delivery. Returns false if its attempt has to fail.
    fn record(&self, headers: &HeaderMap, body: &[u8], under_way: u32, tenth_fails: bool) -> bool {
        let arrived_us = unix_us();
        let n = headers.get("webhook-id").and_then(|id| id.to_str().ok());
        let n = n.and_then(|id| id.strip_prefix("msg_")?.parse().ok()).unwrap_or(0);
        let may_fail = tenth_fails && n % FAILING_OF == 0 && is_first_of_key(n);
        let is_ok = !may_fail || !lock(&self.failed).insert(n);
        let published_us = published_us(body).unwrap_or(0);
        lock(&self.arrivals).push(Arrival { n, published_us, arrived_us, under_way, is_ok });
        is_ok
    }

    /// One line for each delivery so far. Clears the list of deliveries, and the list of messages
    /// that have failed.
    fn take_arrivals(&self) -> String {
        lock(&self.failed).clear();
        let mut text = String::new();
        for arrival in std::mem::take(&mut *lock(&self.arrivals)) {
            let Arrival { n, published_us, arrived_us, under_way, is_ok } = arrival;
            let is_ok = u8::from(is_ok);
            // Writing to a string does not fail.
            let _ = writeln!(text, "{n} {published_us} {arrived_us} {under_way} {is_ok}");
        }
        text
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn published_us(body: &[u8]) -> Option<u64> {
    let from = body.windows(AT.len()).position(|window| window == AT.as_bytes())? + AT.len();
    let digits = body[from..].split(|byte| *byte == b'"').next()?;
    std::str::from_utf8(digits).ok()?.parse().ok()
}

fn failed(status: StatusCode) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::default());
    *response.status_mut() = status;
    response
}

/// The endpoint, from outside.
pub(crate) struct Sink(Server);

impl Sink {
    pub(crate) fn start() -> anyhow::Result<Self> {
        Ok(Self(Server::ourselves(&["--sink"])?))
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.0.address()
    }

    pub(crate) fn url(&self) -> String {
        self.url_of(Manner::Plain)
    }

    pub(crate) fn url_of(&self, manner: Manner) -> String {
        format!("http://{}{}", self.address(), manner.path())
    }

    pub(crate) async fn open(&self) -> anyhow::Result<()> {
        ask(self.address(), "POST", "/open", "").await.map(drop)
    }

    pub(crate) async fn close(&self) -> anyhow::Result<()> {
        ask(self.address(), "POST", "/close", "").await.map(drop)
    }

    /// How many deliveries were answered.
    pub(crate) async fn delivered(&self) -> anyhow::Result<u64> {
        let text = ask(self.address(), "GET", "/delivered", "").await?;
        Ok(std::str::from_utf8(&text)?.parse()?)
    }

    /// The recorded deliveries since the last call, in the order in which they were answered.
    pub(crate) async fn take_arrivals(&self) -> anyhow::Result<Vec<Arrival>> {
        let text = ask(self.address(), "POST", "/arrivals", "").await?;
        let arrival = |line: &str| -> anyhow::Result<Arrival> {
            let numbers: Vec<u64> = line.split(' ').map(str::parse).collect::<Result<_, _>>()?;
            let [n, published_us, arrived_us, under_way, is_ok] = numbers[..] else {
                anyhow::bail!("a line of arrivals: {line:?}")
            };
            let under_way = u32::try_from(under_way)?;
            Ok(Arrival { n, published_us, arrived_us, under_way, is_ok: is_ok == 1 })
        };
        std::str::from_utf8(&text)?.lines().map(arrival).collect()
    }

    /// Adds this endpoint to Hapax.
    pub(crate) async fn add_to(&self, hapax: &Server, in_flight: usize) -> anyhow::Result<()> {
        let settings = json!({ "max_in_flight": in_flight, "timeout": "60s" });
        self.add(hapax, Manner::Plain, settings).await.map(drop)
    }

    /// Adds an endpoint of that manner with these settings to Hapax, and returns its id.
    pub(crate) async fn add(
        &self,
        hapax: &Server,
        manner: Manner,
        mut settings: Value,
    ) -> anyhow::Result<String> {
        settings["url"] = self.url_of(manner).into();
        let body = settings.to_string();
        let added = ask(hapax.admin()?, "POST", "/api/v1/endpoints", &body).await?;
        let added: Value = serde_json::from_slice(&added)?;
        Ok(added["id"].as_str().context("the id of an endpoint")?.to_owned())
    }

    /// Waits until that many deliveries were answered.
    pub(crate) async fn has_delivered(&self, deliveries: u64) -> anyhow::Result<()> {
        let began = Instant::now();
        while self.delivered().await? < deliveries {
            ensure!(began.elapsed() < STUCK, "stuck at {} deliveries", self.delivered().await?);
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }

    /// Waits until that many deliveries were answered and Hapax has recorded every one of them.
    pub(crate) async fn drained(&self, hapax: &Server, deliveries: u64) -> anyhow::Result<Instant> {
        let began = Instant::now();
        while self.delivered().await? < deliveries || has_open_deliveries(hapax).await? {
            ensure!(began.elapsed() < STUCK, "stuck at {} deliveries", self.delivered().await?);
            tokio::time::sleep(POLL).await;
        }
        Ok(Instant::now())
    }
}

async fn has_open_deliveries(hapax: &Server) -> anyhow::Result<bool> {
    for status in ["waiting", "sending", "failed"] {
        let path = format!("/api/v1/deliveries?status={status}&limit=1");
        let page: Value = serde_json::from_slice(&ask(hapax.admin()?, "GET", &path, "").await?)?;
        let items = page["items"].as_array().context("a list of deliveries")?;
        if !items.is_empty() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Sends one request on a connection of its own, and returns the body of its answer, which must be
/// a 2xx.
pub(crate) async fn ask(
    to: SocketAddr,
    method: &str,
    path: &str,
    body: &str,
) -> anyhow::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(to).await.context("connecting")?;
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: {to}\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).await.context("asking")?;
    let mut buffer = Vec::with_capacity(4096);
    let body = load::answer(&mut stream, &mut buffer).await?;
    Ok(buffer[body].to_vec())
}
