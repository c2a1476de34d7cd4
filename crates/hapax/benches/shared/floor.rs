//! The floor: the cost of receiving a webhook over HTTP and verifying it, and nothing else. The
//! floor uses the same loop and the same `verify` as Hapax, in a separate process, with the same
//! allocator.

use std::io::Write as _;
use std::sync::Arc;

use anyhow::Context as _;
use bytes::Bytes;
use hapax_core::secret::{ActiveSecret, Secret};
use hapax_core::source::SourceSpec;
use hapax_core::{Arrival, Source, Timestamp, Verified, verify};
use hapax_engine::HttpLimits;
use hapax_engine::http::{Peer, Received, serve};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use tokio_util::sync::CancellationToken;

use super::events::SECRET;

/// Serves until killed.
pub(crate) fn run() -> anyhow::Result<()> {
    let source = Arc::new(source()?);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.context("listening")?;
        let mut out = std::io::stdout().lock();
        writeln!(out, "floor ready: ingress http://{}", listener.local_addr()?)?;
        drop(out);
        let answer = move |request, _: Peer| answer(Arc::clone(&source), request);
        serve(listener, None, answer, HttpLimits::default(), CancellationToken::new()).await;
        Ok(())
    })
}

/// The sender that every server verifies.
pub(crate) fn source() -> anyhow::Result<Source> {
    let secret = ActiveSecret::forever(Secret::new(SECRET));
    Ok(Source::build(SourceSpec::new("stripe", "stripe", vec![secret]))?)
}

async fn answer(source: Arc<Source>, request: Request<Received>) -> Response<Full<Bytes>> {
    let (parts, body) = request.into_parts();
    let verified = match body.collect().await {
        Ok(body) => {
            let url = parts.uri.to_string();
            let headers = parts.headers;
            let arrival = Arrival { method: parts.method, url, headers, body: body.to_bytes() };
            verify(&source, &arrival, Timestamp::now())
        }
        Err(_) => return status(StatusCode::BAD_REQUEST),
    };
    match verified {
        Ok(Verified::Events { .. }) => status(StatusCode::OK),
        Ok(Verified::Reply(_) | Verified::Empty) | Err(_) => status(StatusCode::UNAUTHORIZED),
    }
}

fn status(status: StatusCode) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::default());
    *response.status_mut() = status;
    response
}
