//! The guarded client: calls endpoints that came through the API. One request per call, over HTTP/1.1,
//! within one deadline; no redirect is followed, nothing is unpacked, nothing is sent twice.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hapax_core::Timestamp;
use http::header::{
    CONNECTION, CONTENT_LENGTH, EXPECT, HOST, RETRY_AFTER, TRANSFER_ENCODING, USER_AGENT,
};
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode};
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper_rustls::ConfigBuilderExt;
use hyper_util::client::legacy::{self, Client};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore};

use super::OutboundTlsError;
use super::endpoint_url::{EndpointUrl, UrlProblem};
use super::guard_rules::GuardRules;
use super::guarded_connector::{GuardedConnector, PROGRESS, RequestProgress};
use super::resolver::{DnsResolver, Resolve};
use super::retry_after::retry_after;
use super::send_error::{SendError, Stage, chain};
use crate::limits::{
    ANSWER_KEPT_BYTES, ENDPOINT_ANSWER_BODY_BYTES_MAX, ENDPOINT_ANSWER_HEAD_BYTES_MAX,
    ENDPOINT_IDLE_MAX, OUTBOUND_IDLE,
};

/// The client for endpoints, with its connections. Clones share the connections; no other client does.
#[derive(Clone)]
pub struct EndpointClient {
    client: Client<GuardedConnector, Tracked>,
    connector: GuardedConnector,
}

/// The answer of an endpoint.
#[derive(Debug, Clone)]
pub struct EndpointAnswer {
    /// The status. Only 2xx is success.
    pub status: StatusCode,
    /// The raw value of the header Retry-After; see [`EndpointAnswer::retry_after`].
    pub retry_after_header: Option<HeaderValue>,
    /// The request of the endpoint in the answer header `webhook-delivery`.
    pub webhook_delivery: Option<WebhookDelivery>,
    /// The first KiB of the body, unchanged.
    pub body_start: Bytes,
    /// Whether the body is longer than `body_start`.
    pub truncated: bool,
    /// The time from the call to the last byte that was read.
    pub took: Duration,
}

/// The request of a receiver in the answer header `webhook-delivery`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WebhookDelivery {
    /// Disable the endpoint.
    Disable,
    /// Do not retry this delivery.
    AbortMessage,
}

impl EndpointClient {
    /// A client under these rules that trusts the public certificate authorities and asks the name
    /// servers of this machine.
    pub fn new(rules: GuardRules) -> Result<Self, OutboundTlsError> {
        Self::with(rules, Arc::new(DnsResolver::system()), &[])
    }

    /// [`Self::new`] with another resolver, and with further roots for the certificates of test
    /// servers.
    #[doc(hidden)]
    pub fn with(
        rules: GuardRules,
        resolver: Arc<dyn Resolve>,
        roots: &[CertificateDer<'_>],
    ) -> Result<Self, OutboundTlsError> {
        let tls = TlsConnector::from(Arc::new(tls_config(roots)?));
        Ok(Self::through(GuardedConnector::new(rules, resolver, tls)))
    }

    /// A separate client for endpoints whose address the receiving party chose: through the same proxy, under
    /// the strictest rules ([`GuardRules::strictest`]).
    pub fn strictest(&self) -> Self {
        Self::through(self.connector.under(self.rules().strictest()))
    }

    fn through(connector: GuardedConnector) -> Self {
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(OUTBOUND_IDLE)
            .pool_max_idle_per_host(ENDPOINT_IDLE_MAX)
            .retry_canceled_requests(false)
            .http1_max_buf_size(ENDPOINT_ANSWER_HEAD_BYTES_MAX)
            .http1_ignore_invalid_headers_in_responses(true)
            .build(connector.clone());
        Self { client, connector }
    }

    /// The rules that every connection of this client is opened under.
    pub fn rules(&self) -> &GuardRules {
        self.connector.rules()
    }

    /// Checks a new endpoint as far as possible: its address or port, and, where the rules depend
    /// on them, the addresses that its name has now. Every connection is checked again.
    pub async fn check(&self, url: &EndpointUrl) -> Result<(), UrlProblem> {
        let blocked = |why| UrlProblem::Blocked { host: url.host().to_owned(), why };
        url.check(self.rules()).map_err(blocked)?;
        match url.name() {
            Some(name) if self.rules().needs_addresses(url.port()) => {
                self.connector.blocked_now(name, url.port()).await.map_err(blocked)
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Sends one POST and reads the beginning of the answer. `deadline` covers every step: name lookup,
    /// connection, TLS, request, head and body. `Host` and `Content-Length` are set here.
    ///
    /// The request is written at most once. Dropping the future closes the connection; the endpoint may
    /// have seen the request by then.
    pub async fn post(
        &self,
        url: &EndpointUrl,
        headers: HeaderMap,
        body: Bytes,
        deadline: Duration,
    ) -> Result<EndpointAnswer, SendError> {
        let kept = AnswerLimits { bytes: ANSWER_KEPT_BYTES, read: ENDPOINT_ANSWER_BODY_BYTES_MAX };
        self.send(url, request(url, Method::POST, headers), body, deadline, kept).await
    }

    /// Fetches a document of at most `bytes_max` bytes: by POST if there is a body, else by GET. The rules are
    /// those of [`EndpointClient::post`].
    pub(crate) async fn fetch(
        &self,
        url: &EndpointUrl,
        headers: HeaderMap,
        body: Option<Bytes>,
        deadline: Duration,
        bytes_max: usize,
    ) -> Result<EndpointAnswer, SendError> {
        let method = if body.is_some() { Method::POST } else { Method::GET };
        let kept = AnswerLimits { bytes: bytes_max, read: bytes_max };
        let body = body.unwrap_or_default();
        self.send(url, request(url, method, headers), body, deadline, kept).await
    }

    async fn send(
        &self,
        url: &EndpointUrl,
        request: Request<()>,
        body: Bytes,
        deadline: Duration,
        kept: AnswerLimits,
    ) -> Result<EndpointAnswer, SendError> {
        let started = Instant::now();
        // An open connection in the pool does not pass the connector again, and the rules may be newer
        // than the endpoint.
        url.check(self.rules()).map_err(|why| SendError::blocked(url.host(), why))?;
        let progress = Arc::new(RequestProgress::default());
        let request = request.map(|()| Tracked::new(body, &progress));
        let exchange = self.exchange(request, &progress, kept);
        let exchange = PROGRESS.scope(Arc::clone(&progress), exchange);
        match timeout(deadline, exchange).await {
            Ok(answered) => {
                answered.map(|answered| EndpointAnswer { took: started.elapsed(), ..answered })
            }
            Err(_) => Err(SendError::timeout(progress.stage(), deadline)),
        }
    }

    async fn exchange(
        &self,
        request: Request<Tracked>,
        progress: &RequestProgress,
        kept: AnswerLimits,
    ) -> Result<EndpointAnswer, SendError> {
        let response = self.client.request(request).await.map_err(unanswered)?;
        progress.reach(Stage::Body);
        let (head, body) = response.into_parts();
        let (body_start, truncated) = beginning(body, kept).await?;
        Ok(EndpointAnswer {
            status: head.status,
            retry_after_header: head.headers.get(RETRY_AFTER).cloned(),
            webhook_delivery: webhook_delivery(&head.headers),
            body_start,
            truncated,
            took: Duration::ZERO,
        })
    }
}

impl fmt::Debug for EndpointClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EndpointClient").field("rules", self.rules()).finish_non_exhaustive()
    }
}

impl EndpointAnswer {
    /// How long the endpoint asks not to be called, at most a day. A value that is neither seconds nor a
    /// date is ignored.
    pub fn retry_after(&self, now: Timestamp) -> Option<Duration> {
        self.retry_after_header.as_ref().and_then(|value| retry_after(value, now))
    }
}

fn tls_config(roots: &[CertificateDer<'_>]) -> Result<ClientConfig, OutboundTlsError> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    let builder = match roots {
        [] => builder.with_webpki_roots(),
        roots => {
            let mut store = RootCertStore::empty();
            for root in roots {
                store.add(root.clone().into_owned())?;
            }
            builder.with_root_certificates(store)
        }
    };
    let mut config = builder.with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

fn request(url: &EndpointUrl, method: Method, mut headers: HeaderMap) -> Request<()> {
    // How the request is framed and routed follows from its URL and body alone.
    for name in [HOST, CONTENT_LENGTH, TRANSFER_ENCODING, CONNECTION, EXPECT] {
        headers.remove(name);
    }
    let agent = HeaderValue::from_static(concat!("hapax/", env!("CARGO_PKG_VERSION")));
    headers.entry(USER_AGENT).or_insert(agent);
    let mut request = Request::new(());
    *request.method_mut() = method;
    *request.uri_mut() = url.uri().clone();
    *request.headers_mut() = headers;
    request
}

/// How much of an answer's body is kept, and how much is read.
#[derive(Clone, Copy)]
struct AnswerLimits {
    bytes: usize,
    read: usize,
}

/// The beginning of a body, and whether there is more. A short body is read to its end, so that its
/// connection can be used again; a longer one is dropped with its connection.
async fn beginning(mut body: Incoming, limits: AnswerLimits) -> Result<(Bytes, bool), SendError> {
    let mut kept = BytesMut::new();
    let mut read = 0_usize;
    while read <= limits.read {
        let Some(frame) = body.frame().await else { break };
        let Ok(bytes) = frame.map_err(|error| SendError::broken(&error))?.into_data() else {
            continue;
        };
        let room = limits.bytes - kept.len();
        kept.extend_from_slice(&bytes[..bytes.len().min(room)]);
        read += bytes.len();
    }
    Ok((kept.freeze(), read > limits.bytes))
}

fn webhook_delivery(headers: &HeaderMap) -> Option<WebhookDelivery> {
    let value = headers.get("webhook-delivery")?.to_str().ok()?.trim();
    match value.to_ascii_lowercase().as_str() {
        "disable" => Some(WebhookDelivery::Disable),
        "abort-message" => Some(WebhookDelivery::AbortMessage),
        _ => None,
    }
}

fn unanswered(error: legacy::Error) -> SendError {
    if let Some(failed) = chain(&error).find_map(|error| error.downcast_ref::<SendError>()) {
        return failed.clone();
    }
    let canceled = chain(&error)
        .filter_map(|error| error.downcast_ref::<hyper::Error>())
        .any(hyper::Error::is_canceled);
    // If there is no connection although the connector did not fail, a connection of the pool was
    // already closed.
    match canceled || error.is_connect() {
        true => SendError::never_sent(),
        false => SendError::broken(&error),
    }
}

/// A body that records when its connection began to send.
struct Tracked {
    body: Option<Bytes>,
    progress: Arc<RequestProgress>,
}

impl Tracked {
    fn new(body: Bytes, progress: &Arc<RequestProgress>) -> Self {
        if body.is_empty() {
            // An empty body is never polled, so the request counts as sent from the start.
            progress.reach(Stage::Answer);
        }
        Self { body: Some(body).filter(|body| !body.is_empty()), progress: Arc::clone(progress) }
    }
}

impl Body for Tracked {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        self.progress.reach(Stage::Answer);
        Poll::Ready(self.body.take().map(|body| Ok(Frame::data(body))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.body.as_ref().map_or(0, |body| body.len() as u64))
    }
}
