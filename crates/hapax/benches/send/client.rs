//! The floor: a bare hyper client that signs messages as Hapax does and posts them, 64 at once, in a process of its
//! own with the same allocator. The client stores nothing and retries nothing, so no sender can be faster.

use std::io::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use hapax_core::Timestamp;
use hapax_core::endpoint_secret::{EndpointSecrets, Signing, SigningSecret};
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::IN_FLIGHT;
use crate::publish::data;

/// Posts that many messages to `/in` at the address, and prints the seconds that it took.
pub(crate) fn run(to: SocketAddr, messages: u64) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let seconds = runtime.block_on(async {
        let secrets =
            Arc::new(EndpointSecrets::new(SigningSecret::generate(Signing::Standard, &[7; 32])));
        let next = Arc::new(AtomicU64::new(0));
        let began = Instant::now();
        let mut connections = JoinSet::new();
        for _ in 0..IN_FLIGHT {
            let (secrets, next) = (Arc::clone(&secrets), Arc::clone(&next));
            connections.spawn(async move { post(to, messages, &secrets, &next).await });
        }
        while let Some(ended) = connections.join_next().await {
            ended.context("a connection panicked")??;
        }
        anyhow::Ok(began.elapsed().as_secs_f64())
    })?;
    writeln!(std::io::stdout(), "{seconds}")?;
    Ok(())
}

async fn post(
    to: SocketAddr,
    messages: u64,
    secrets: &EndpointSecrets,
    next: &AtomicU64,
) -> anyhow::Result<()> {
    let stream = TcpStream::connect(to).await.context("connecting")?;
    stream.set_nodelay(true)?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let mut driver = JoinSet::new();
    driver.spawn(connection);
    let host = to.to_string();
    loop {
        let n = next.fetch_add(1, Ordering::Relaxed);
        if n >= messages {
            return Ok(());
        }
        let (id, now) = (format!("msg_{n:020}"), Timestamp::now());
        let data = data();
        let body = format!(
            "{{\"id\":\"{id}\",\"type\":\"bench.sent\",\"created_at\":\"{now}\",\"data\":{data}}}"
        );
        let request = Request::post("/in")
            .header(header::HOST, &host)
            .header(header::CONTENT_TYPE, "application/json")
            .header("webhook-id", &id)
            .header("webhook-timestamp", now.as_second())
            .header("webhook-signature", secrets.sign(&id, now, body.as_bytes()))
            .header("idempotency-key", &id)
            .body(Full::new(Bytes::from(body)))?;
        let answer = sender.send_request(request).await?;
        ensure!(answer.status() == StatusCode::OK, "answered {}", answer.status());
        answer.into_body().collect().await?;
    }
}
