//! The one HTTP client: every request that leaves Hapax goes through here. The client follows no redirect,
//! reads no proxy from the environment, unpacks nothing, and reads no more than it may. The client never
//! repeats a request that a server may have seen: retries are decided where attempts are counted.
//!
//! The client has two kinds of pools, which never share a connection:
//! - [`Outbound`] is *trusted*: it calls addresses that the operator configured (HTTP handlers,
//!   refetch, proxies), without restrictions.
//! - [`EndpointClient`] is *guarded*: it calls endpoints that came through the API, at addresses that
//!   [`GuardRules`] accept. This client takes an [`EndpointUrl`] and nothing else.

mod custom_headers;
mod endpoint_client;
mod endpoint_url;
mod guard_rules;
mod guarded_connector;
mod public_address;
mod resolver;
mod retry_after;
mod send_error;

use std::error::Error;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Request, Response, StatusCode, Uri};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Either, Full};
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{self, Client};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio::time::timeout;
use tokio_rustls::rustls;
use tower::Service;

pub use self::custom_headers::{CustomHeaders, HeaderProblem};
pub use self::endpoint_client::{EndpointAnswer, EndpointClient, WebhookDelivery};
pub(crate) use self::endpoint_url::ParsedUrls;
pub use self::endpoint_url::{EndpointUrl, UrlProblem};
pub use self::guard_rules::{Blocked, ENDPOINT_PORTS, EgressProxy, EgressProxyProblem, GuardRules};
pub use self::public_address::is_public;
pub use self::resolver::{DnsResolver, LookupError, LookupFuture, Resolve};
pub(crate) use self::retry_after::retry_after;
use self::send_error::deepest;
pub use self::send_error::{SendError, SendErrorClass};
use crate::limits::{
    ANSWER_BYTES_MAX, CONNECT_DEADLINE, OUTBOUND_IDLE, OUTBOUND_IDLE_MAX, PASSING_IDLE,
};

/// The client for addresses that the operator configured, with its connections. Clones share them.
#[derive(Debug, Clone)]
pub struct Outbound {
    client: Client<InTime<HttpsConnector<HttpConnector>>, OutboundBody>,
}

/// A body to send: whole, or as a stream.
pub(crate) type OutboundBody =
    Either<Full<Bytes>, UnsyncBoxBody<Bytes, Box<dyn Error + Send + Sync>>>;

/// The treatment of a request whose connection was closed before a byte was written, so that no
/// server has seen the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unseen {
    /// The caller gets [`OutboundError::Unsent`].
    Reported,
    /// The request is sent on another connection.
    SentAgain,
}

/// An answer, as far as it was read.
#[derive(Debug)]
pub(crate) struct BufferedAnswer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    /// Whether `body` is only the beginning of the answer's body.
    pub(crate) cut: bool,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OutboundError {
    #[error("timed out after {0:?}")]
    TimedOut(Duration),
    #[error("{0}")]
    Connect(String),
    /// The connection closed before the request was written: no server has seen it.
    #[error("the connection was closed before the request was sent")]
    Unsent,
    #[error("the connection broke: {0}")]
    Broken(String),
}

/// The client's TLS could not be set up.
#[derive(Debug, thiserror::Error)]
#[error("setting up TLS for outbound requests: {0}")]
pub struct OutboundTlsError(#[from] rustls::Error);

impl Outbound {
    /// A client for any address that the operator configured. The client trusts the public certificate
    /// authorities.
    pub fn trusted() -> Result<Self, OutboundTlsError> {
        Self::build(Unseen::Reported)
    }

    /// [`Self::trusted`] for a proxy that passes requests on: if a connection closes before the
    /// request was written, the request takes another connection.
    pub fn passing_on() -> Result<Self, OutboundTlsError> {
        Self::build(Unseen::SentAgain)
    }

    /// A client for endpoints that came through the API. This client shares no connection with any other
    /// client.
    pub fn guarded(rules: GuardRules) -> Result<EndpointClient, OutboundTlsError> {
        EndpointClient::new(rules)
    }

    fn build(unseen: Unseen) -> Result<Self, OutboundTlsError> {
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(CONNECT_DEADLINE));
        let provider = rustls::crypto::aws_lc_rs::default_provider();
        let connector = HttpsConnectorBuilder::new()
            .with_provider_and_webpki_roots(provider)?
            .https_or_http()
            .enable_http1()
            .wrap_connector(tcp);
        let idle = match unseen {
            Unseen::Reported => OUTBOUND_IDLE,
            Unseen::SentAgain => PASSING_IDLE,
        };
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(idle)
            .pool_max_idle_per_host(OUTBOUND_IDLE_MAX)
            .retry_canceled_requests(unseen == Unseen::SentAgain)
            .build(InTime { connector });
        Ok(Self { client })
    }

    /// Sends `request` and waits for the head of its answer, without a deadline. Dropping the future, or
    /// the answer's body before its end, closes the connection.
    pub(crate) async fn pass(
        &self,
        request: Request<OutboundBody>,
    ) -> Result<Response<Incoming>, OutboundError> {
        self.client.request(request).await.map_err(unanswered)
    }

    /// Sends `request` once and reads the answer. `deadline` covers everything from the name lookup to the
    /// last byte that is read. Dropping the future closes the connection.
    pub(crate) async fn send(
        &self,
        request: Request<Full<Bytes>>,
        deadline: Duration,
    ) -> Result<BufferedAnswer, OutboundError> {
        self.send_reading(request, deadline, ANSWER_BYTES_MAX).await
    }

    /// [`Self::send`], but reads up to `bytes_max` of the answer.
    pub(crate) async fn send_reading(
        &self,
        request: Request<Full<Bytes>>,
        deadline: Duration,
        bytes_max: usize,
    ) -> Result<BufferedAnswer, OutboundError> {
        let exchange = async {
            let (head, mut body) = self.pass(request.map(Either::Left)).await?.into_parts();
            let (body, cut) = beginning(&mut body, bytes_max).await?;
            Ok(BufferedAnswer { status: head.status, headers: head.headers, body, cut })
        };
        timeout(deadline, exchange).await.unwrap_or(Err(OutboundError::TimedOut(deadline)))
    }
}

/// The first bytes of a body, and whether there are more.
async fn beginning(body: &mut Incoming, bytes_max: usize) -> Result<(Bytes, bool), OutboundError> {
    let mut read = BytesMut::new();
    while let Some(bytes) = next(body).await? {
        let room = bytes_max - read.len();
        read.extend_from_slice(&bytes[..bytes.len().min(room)]);
        if bytes.len() > room {
            return Ok((read.freeze(), true));
        }
    }
    Ok((read.freeze(), false))
}

/// The next bytes of an answer, or `None` at its end. Trailers are dropped.
pub(crate) async fn next(body: &mut Incoming) -> Result<Option<Bytes>, OutboundError> {
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| OutboundError::Broken(deepest(&error)))?;
        if let Ok(bytes) = frame.into_data() {
            return Ok(Some(bytes));
        }
    }
    Ok(None)
}

/// A connector with one deadline from the name lookup to the end of the handshake. When this
/// deadline passes, nothing was sent.
#[derive(Debug, Clone)]
struct InTime<C> {
    connector: C,
}

/// A connection, once it is open.
type Connecting<T> = Pin<Box<dyn Future<Output = Result<T, Box<dyn Error + Send + Sync>>> + Send>>;

impl<C> Service<Uri> for InTime<C>
where
    C: Service<Uri, Error = Box<dyn Error + Send + Sync>>,
    C::Future: Send + 'static,
{
    type Response = C::Response;
    type Error = C::Error;
    type Future = Connecting<C::Response>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), C::Error>> {
        self.connector.poll_ready(cx)
    }

    fn call(&mut self, to: Uri) -> Self::Future {
        let connecting = self.connector.call(to);
        Box::pin(async move {
            timeout(CONNECT_DEADLINE, connecting)
                .await
                .unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into()))
        })
    }
}

fn unanswered(error: legacy::Error) -> OutboundError {
    let unsent = error
        .source()
        .and_then(|source| source.downcast_ref::<hyper::Error>())
        .is_some_and(hyper::Error::is_canceled);
    match (error.is_connect(), unsent) {
        (true, _) => OutboundError::Connect(deepest(&error)),
        (false, true) => OutboundError::Unsent,
        (false, false) => OutboundError::Broken(deepest(&error)),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    /// A handler of the operator has an open connection to loopback, and then an endpoint with the same
    /// address is called. A shared pool would send the delivery on that connection.
    #[tokio::test]
    async fn an_endpoint_never_uses_a_connection_that_a_trusted_handler_opened() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let url = format!("http://{at}/");
        let serve = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut bytes = [0_u8; 4_096];
            assert!(stream.read(&mut bytes).await.unwrap() > 0);
            stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await.unwrap();
            stream
        };
        let trusted = Outbound::trusted().unwrap();
        let request = Request::post(&url).body(Full::default()).unwrap();
        let deadline = Duration::from_secs(60);
        let (heard, mut kept_open) = tokio::join!(trusted.send(request, deadline), serve);
        assert_eq!(heard.unwrap().status, StatusCode::NO_CONTENT);

        let guarded = Outbound::guarded(GuardRules::default()).unwrap();
        let endpoint = EndpointUrl::from_stored(&url).unwrap();
        let body = Bytes::from_static(b"{}");
        let error = guarded.post(&endpoint, HeaderMap::new(), body, deadline).await.unwrap_err();
        assert_eq!(error.class, SendErrorClass::Blocked, "{error}");

        // No request arrived on the open connection, and no other connection was opened.
        drop(trusted);
        let mut rest = Vec::new();
        kept_open.read_to_end(&mut rest).await.unwrap();
        assert_eq!(rest, b"");
        let ours = TcpStream::connect(at).await.unwrap();
        assert_eq!(listener.accept().await.unwrap().1, ours.local_addr().unwrap());
    }
}
