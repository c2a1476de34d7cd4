//! The endpoint that deliveries go to, a process of its own: it answers each with 1 KiB, once its gate is open.
//! While the gate is closed, a backlog can be published without being drained.

use std::io::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use hapax_engine::HttpLimits;
use hapax_engine::http::{Peer, Received, serve};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::shared::load;
use crate::shared::server::Server;

const ANSWER_BYTES: usize = 1024;

/// Longer than any backlog of a run takes: then something is stuck.
const STUCK: Duration = Duration::from_secs(600);

const POLL: Duration = Duration::from_millis(5);

/// What the endpoint's connections share.
struct State {
    gate: watch::Sender<bool>,
    delivered: AtomicU64,
}

/// Serves until killed.
pub(crate) fn run() -> anyhow::Result<()> {
    let state = Arc::new(State { gate: watch::Sender::new(true), delivered: AtomicU64::new(0) });
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
    let text = match (&parts.method, parts.uri.path()) {
        (&Method::POST, "/in") => {
            if body.collect().await.is_err() {
                return failed(StatusCode::BAD_REQUEST);
            }
            // The sender never goes away: the state holds it.
            let _ = state.gate.subscribe().wait_for(|is_open| *is_open).await;
            state.delivered.fetch_add(1, Ordering::Relaxed);
            Bytes::from_static(&[b'.'; ANSWER_BYTES])
        }
        (&Method::POST, "/open") => {
            state.gate.send_replace(true);
            Bytes::new()
        }
        (&Method::POST, "/close") => {
            state.gate.send_replace(false);
            Bytes::new()
        }
        (&Method::GET, "/delivered") => state.delivered.load(Ordering::Relaxed).to_string().into(),
        _ => return failed(StatusCode::NOT_FOUND),
    };
    Response::new(Full::new(text))
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
        format!("http://{}/in", self.address())
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

    /// Adds this endpoint to Hapax.
    pub(crate) async fn add_to(&self, hapax: &Server, in_flight: usize) -> anyhow::Result<()> {
        let body = json!({ "url": self.url(), "max_in_flight": in_flight, "timeout": "60s" });
        ask(hapax.admin()?, "POST", "/api/v1/endpoints", &body.to_string()).await.map(drop)
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

/// One request on a connection of its own; the body of its answer, which must be a 2xx.
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
