//! `hapax listen`: a local endpoint for developers. The command prints each delivery and whether its
//! signature is valid. Options make it fail a share of the deliveries or pass them on to an app.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::endpoint_secret::{Signing, SigningSecret};
use hapax_core::secret::{ActiveSecret, Secret};
use hapax_core::source::SourceSpec;
use hapax_core::{Arrival, Source, Timestamp, Verified, verify};
use hapax_storm::{HttpClient, http_client};
use http::{Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use zeroize::Zeroizing;

use super::admin_client;
use super::output::{self, CommandFailure, Exit};
use super::sender;

/// The largest delivery that is read.
const BODY_BYTES_MAX: usize = 4 << 20;

/// The timeout of the app that deliveries are passed on to.
const FORWARD_TIMEOUT: Duration = Duration::from_secs(30);

/// How much of a body is printed.
const BODY_SHOWN_CHARS: usize = 400;

/// `hapax listen`.
#[derive(Debug, clap::Args)]
pub(super) struct Listen {
    /// The address to listen on; port 0 chooses a free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:9000")]
    listen: SocketAddr,
    /// The secret of the endpoint: whsec_ and base64, or its public key: whpk_ and base64. Without it a new
    /// secret is made and printed
    #[arg(long)]
    secret: Option<String>,
    /// The endpoint signs with t=…,v1=… (--signing timestamped)
    #[arg(long)]
    timestamped: bool,
    /// The share of deliveries that are answered with a 500: 0.3
    #[arg(long, value_name = "RATE", default_value_t = 0.0, value_parser = rate)]
    fail: f64,
    /// Pass each delivery on to this URL, and return its answer
    #[arg(long, value_name = "URL")]
    forward_to: Option<String>,
    /// Stop after this many deliveries
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    /// Print one JSON object per delivery
    #[arg(long)]
    json: bool,
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if (0.0..=1.0).contains(&rate) => Ok(rate),
        Ok(_) | Err(_) => Err("expected a number from 0 to 1, such as 0.3".to_owned()),
    }
}

impl Listen {
    pub(super) fn run(self) -> Result<Exit, CommandFailure> {
        admin_client::run(self.serve())
    }

    async fn serve(self) -> Result<Exit, CommandFailure> {
        let secret = self.verification_secret()?;
        let forward_to = match self.forward_to.as_deref() {
            None => None,
            Some(url) => Some(sender::target("--forward-to", url)?),
        };
        let active = ActiveSecret::forever(Secret::new(secret.as_str()));
        let mut spec = SourceSpec::new("listen", "standardwebhooks", vec![active]);
        if self.timestamped {
            spec.params.insert("signing".to_owned(), "timestamped".to_owned());
        }
        let source = Source::build(spec).map_err(|error| {
            CommandFailure::usage(
                format!("--secret: {}", error.problem),
                "omit it to get a new secret",
            )
        })?;
        let listener = TcpListener::bind(self.listen).await.map_err(|error| {
            CommandFailure::unreachable(format!("listening on {}: {error}", self.listen))
        })?;
        let at = listener.local_addr()?;
        output::data(&format!("listening on http://{at}"))?;
        if self.secret.is_none() {
            let signing = if self.timestamped { " --signing timestamped" } else { "" };
            output::data(&format!("secret {}", secret.as_str()))?;
            output::words(&format!(
                "add it as an endpoint:\n  hapax endpoints add http://{at}/in --secret {}{signing}",
                secret.as_str()
            ));
        }
        let count = self.count;
        let (received, mut receipts) = tokio::sync::mpsc::unbounded_channel();
        let endpoint = Arc::new(Endpoint {
            source,
            fail: self.fail,
            json: self.json,
            forward_to,
            client: http_client(),
            received,
        });
        let mut connections = JoinSet::new();
        let mut seen = 0;
        loop {
            tokio::select! {
                accepted = listener.accept() => {
                    let Ok((stream, _)) = accepted else { continue };
                    connections.spawn(serve_connection(Arc::clone(&endpoint), stream));
                }
                Some(()) = receipts.recv() => {
                    seen += 1;
                    if count.is_some_and(|count| seen >= count) {
                        return Ok(Exit::Done);
                    }
                }
                Some(_) = connections.join_next(), if !connections.is_empty() => {}
                stopped = tokio::signal::ctrl_c() => {
                    stopped?;
                    return Ok(Exit::Done);
                }
            }
        }
    }
}

impl Listen {
    /// The secret or public key that deliveries are verified with: the given one, or a new shared secret.
    fn verification_secret(&self) -> Result<Zeroizing<String>, CommandFailure> {
        let kind = if self.timestamped { Signing::Timestamped } else { Signing::Standard };
        let is_public = |given: &str| given.starts_with("whpk_") && !self.timestamped;
        let secret = match self.secret.as_deref() {
            Some(given) if is_public(given) => return Ok(Zeroizing::new(given.to_owned())),
            Some(given) => SigningSecret::parse(kind, given).map_err(|error| {
                CommandFailure::usage(format!("--secret: {error}"), "omit it to get a new secret")
            })?,
            None => {
                let mut random = Zeroizing::new([0; 32]);
                aws_lc_rs::rand::fill(&mut *random)
                    .map_err(|_| CommandFailure::unreachable("the system has no random numbers"))?;
                SigningSecret::generate(kind, &random)
            }
        };
        Ok(secret.expose().expect("a shared secret has a text"))
    }
}

/// The endpoint that deliveries are posted to.
struct Endpoint {
    source: Source,
    fail: f64,
    json: bool,
    forward_to: Option<Uri>,
    client: HttpClient,
    /// Gets a message for each delivery that was answered.
    received: tokio::sync::mpsc::UnboundedSender<()>,
}

async fn serve_connection(endpoint: Arc<Endpoint>, stream: TcpStream) {
    let answer = service_fn(move |request| {
        let endpoint = Arc::clone(&endpoint);
        async move { Ok::<_, Infallible>(endpoint.answer(request).await) }
    });
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new());
    let _ = http.serve_connection(TokioIo::new(stream), answer).await;
}

impl Endpoint {
    async fn answer(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        let (parts, body) = request.into_parts();
        let Ok(body) = Limited::new(body, BODY_BYTES_MAX).collect().await else {
            return plain(StatusCode::PAYLOAD_TOO_LARGE, "the body is too large\n");
        };
        let arrival = Arrival {
            method: parts.method,
            url: parts.uri.to_string(),
            headers: parts.headers,
            body: body.to_bytes(),
        };
        let verdict = match verify(&self.source, &arrival, Timestamp::now()) {
            Ok(Verified::Events { .. } | Verified::Reply(_) | Verified::Empty) => Ok(()),
            Err(refusal) => Err(refusal.reason()),
        };
        let response = match verdict {
            Err(_) => plain(StatusCode::UNAUTHORIZED, "the signature is not valid\n"),
            Ok(()) if rand_below(self.fail) => {
                plain(StatusCode::INTERNAL_SERVER_ERROR, "failed on request (--fail)\n")
            }
            Ok(()) => self.forward(&arrival).await,
        };
        self.print(&arrival, verdict, response.status());
        let _ = self.received.send(());
        response
    }

    /// Passes a delivery on, or accepts it.
    async fn forward(&self, arrival: &Arrival) -> Response<Full<Bytes>> {
        let Some(to) = &self.forward_to else { return plain(StatusCode::OK, "ok\n") };
        let mut request = Request::new(Full::new(arrival.body.clone()));
        *request.method_mut() = arrival.method.clone();
        *request.uri_mut() = to.clone();
        for (name, value) in &arrival.headers {
            if *name != http::header::HOST && *name != http::header::CONTENT_LENGTH {
                request.headers_mut().append(name, value.clone());
            }
        }
        let exchange = async {
            let (head, body) = self.client.request(request).await.ok()?.into_parts();
            let body = Limited::new(body, BODY_BYTES_MAX).collect().await.ok()?.to_bytes();
            let mut response = Response::new(Full::new(body));
            *response.status_mut() = head.status;
            Some(response)
        };
        match tokio::time::timeout(FORWARD_TIMEOUT, exchange).await {
            Ok(Some(response)) => response,
            Ok(None) | Err(_) => plain(StatusCode::BAD_GATEWAY, "the app did not answer\n"),
        }
    }

    fn print(&self, arrival: &Arrival, verdict: Result<(), &str>, status: StatusCode) {
        let header = |name| arrival.header_text(name).unwrap_or_default().into_owned();
        let body = String::from_utf8_lossy(&arrival.body);
        let kind = serde_json::from_slice::<serde_json::Value>(&arrival.body)
            .ok()
            .and_then(|body| body.get("type")?.as_str().map(str::to_owned));
        let signature = match verdict {
            Ok(()) => "signature ok".to_owned(),
            Err(reason) => format!("signature WRONG ({reason})"),
        };
        let printed = if self.json {
            output::json(&serde_json::json!({
                "id": header("webhook-id"),
                "type": kind,
                "verified": verdict.is_ok(),
                "reason": verdict.err(),
                "answered": status.as_u16(),
                "body": body,
            }))
        } else {
            let shown: String = body.chars().take(BODY_SHOWN_CHARS).collect();
            let line = format!(
                "{}  {}  {}  {signature}  answered {}  {shown}",
                crate::format::at(Timestamp::now()),
                header("webhook-id"),
                kind.as_deref().unwrap_or("-"),
                status.as_u16(),
            );
            output::data(&output::shown(&line))
        };
        // A closed stdout does not stop the endpoint.
        let _ = printed;
    }
}

fn plain(status: StatusCode, text: &'static str) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from_static(text.as_bytes())));
    *response.status_mut() = status;
    response
}

/// True with this probability.
fn rand_below(rate: f64) -> bool {
    let mut random = [0; 4];
    if rate <= 0.0 || aws_lc_rs::rand::fill(&mut random).is_err() {
        return false;
    }
    f64::from(u32::from_be_bytes(random)) / f64::from(u32::MAX) < rate
}
