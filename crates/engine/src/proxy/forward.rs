//! Forwards one request to the app behind a proxy, and decides from the answer how the key is
//! settled. The decision depends on whether the app can have seen the request. If not, the key is
//! free at once. If the app may have seen the request and did not answer, no other request may run
//! until the lease is over.

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::BytesMut;
use hapax_core::Timestamp;
use hapax_core::hop_headers::{ConnectionHeaders, drop_lookalikes, is_hop_by_hop, is_ours};
use hapax_core::ledger::{IDEMPOTENCY_KEY, Reserved};
use hapax_core::limits::ANSWER_BODY_BYTES_MAX;
use hapax_layer::{Body, LeasedUntil};
use http::header::{CONTENT_LENGTH, COOKIE, EXPECT, FORWARDED, HOST, TRANSFER_ENCODING, UPGRADE};
use http::request::Parts;
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Version, response,
};
use http_body_util::{BodyExt as _, Either, Full};
use hyper::body::{Body as _, Incoming};
use ipnet::IpNet;
use tokio::time::{Instant, timeout_at};
use tower::Service;
use uuid::Uuid;

use super::ProxyContext;
use super::body::UpstreamBody;
use super::log::ProxyLog;
use super::problem::Problem;
use super::upstream::{UnjoinableTarget, Upstream};
use crate::ingress::respond::RequestId;
use crate::limits::{UPSTREAM_MARGIN_MAX, UPSTREAM_MARGIN_MIN};
use crate::outbound::{self, Outbound, OutboundBody, OutboundError};

/// Forwards requests to one upstream. Clones share its connections.
#[derive(Debug, Clone)]
pub(super) struct Forwarder(Arc<ForwarderParts>);

#[derive(Debug)]
struct ForwarderParts {
    upstream: Upstream,
    outbound: Outbound,
    /// How long a request with a key may take, and how long before the end of its lease it must be
    /// over.
    time: Duration,
    margin: Duration,
    trusted: Vec<IpNet>,
    /// The header that names the owner of a key, with dashes.
    scoped_by: Option<HeaderName>,
    log: Arc<ProxyLog>,
}

impl Forwarder {
    pub(super) fn new(
        upstream: Upstream,
        outbound: Outbound,
        lease: Duration,
        trusted: Vec<IpNet>,
        scoped_by: Option<HeaderName>,
        log: Arc<ProxyLog>,
    ) -> Self {
        let margin = (lease / 10).clamp(UPSTREAM_MARGIN_MIN, UPSTREAM_MARGIN_MAX);
        let time = lease.saturating_sub(margin);
        Self(Arc::new(ForwarderParts { upstream, outbound, time, margin, trusted, scoped_by, log }))
    }
}

impl Service<Request<Body>> for Forwarder {
    type Response = Response<UpstreamBody>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<UpstreamBody>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let way = Arc::clone(&self.0);
        Box::pin(async move { Ok(way.send_on(request).await) })
    }
}

impl ForwarderParts {
    async fn send_on(&self, request: Request<Body>) -> Response<UpstreamBody> {
        let (mut head, body) = request.into_parts();
        let reserved = head.extensions.remove::<Reserved>();
        let leased = head.extensions.remove::<LeasedUntil>();
        let call = head.extensions.remove::<ProxyContext>().unwrap_or_else(unknown_call);
        if wants_another_protocol(&head) {
            return Problem::Upgrade.answer(&call);
        }
        let Ok(onward) =
            self.upstream_request(&head, reserved.as_ref(), &call, body.is_end_stream())
        else {
            return Problem::Target.answer(&call);
        };
        match reserved {
            Some(_) => self.send_once(onward, body, self.by(leased), &call).await,
            None => self.pass(onward, body, &call).await,
        }
    }

    /// The request as the upstream gets it, without its body.
    fn upstream_request(
        &self,
        head: &Parts,
        reserved: Option<&Reserved>,
        call: &ProxyContext,
        is_empty: bool,
    ) -> Result<Request<()>, UnjoinableTarget> {
        let mut onward = Request::new(());
        *onward.method_mut() = head.method.clone();
        *onward.uri_mut() = self.upstream.url(&head.uri)?;
        let mut headers = end_to_end(&head.headers);
        headers.remove(EXPECT);
        join_cookies(&mut headers);
        for name in headers.keys().filter(|name| is_ours(name)).cloned().collect::<Vec<_>>() {
            headers.remove(name);
        }
        // Many servers read `x_account_id` as `x-account-id`, the header that the key was scoped
        // by.
        let scoped_by = self.scoped_by.as_ref().map(HeaderName::as_str);
        drop_lookalikes(&mut headers, |name| Some(name) == scoped_by);
        // `Host` is end-to-end, so it is kept even if the client's Connection header names it.
        let host = head.headers.get(HOST).cloned();
        let host = host.or_else(|| HeaderValue::from_str(head.uri.authority()?.as_str()).ok());
        if let Some(host) = &host {
            headers.insert(HOST, host.clone());
        }
        // Without this header hyper treats the body of a GET as absent.
        if head.headers.contains_key(TRANSFER_ENCODING) && !is_empty {
            headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        }
        self.add_forwarded_headers(&mut headers, call.peer, host);
        if let Some(reserved) = reserved {
            add_key_headers(&mut headers, reserved);
        }
        *onward.headers_mut() = headers;
        Ok(onward)
    }

    /// Sets `x-forwarded-*`. The host and the scheme of the client are taken from a trusted proxy
    /// only. Each hop appends to the list of addresses, so the list is read from its end.
    fn add_forwarded_headers(
        &self,
        headers: &mut HeaderMap,
        peer: SocketAddr,
        host: Option<HeaderValue>,
    ) {
        let peer: IpAddr = peer.ip().to_canonical();
        if !self.trusted.iter().any(|net| net.contains(&peer)) {
            for name in [X_FORWARDED_PROTO, X_FORWARDED_HOST, FORWARDED] {
                headers.remove(name);
            }
        }
        let before = headers.get_all(X_FORWARDED_FOR).iter().map(HeaderValue::as_bytes);
        let mut hops = before.collect::<Vec<_>>().join(&b", "[..]);
        if !hops.is_empty() {
            hops.extend_from_slice(b", ");
        }
        hops.extend_from_slice(peer.to_string().as_bytes());
        if let Ok(hops) = HeaderValue::from_bytes(&hops) {
            headers.insert(X_FORWARDED_FOR, hops);
        }
        headers.entry(X_FORWARDED_PROTO).or_insert(HeaderValue::from_static("http"));
        if let Some(host) = host {
            headers.entry(X_FORWARDED_HOST).or_insert(host);
        }
    }

    /// Forwards a request without a key as a stream, in both directions.
    async fn pass(
        &self,
        onward: Request<()>,
        body: Body,
        call: &ProxyContext,
    ) -> Response<UpstreamBody> {
        match self.ask(onward.map(|()| Either::Right(body.boxed_unsync()))).await {
            Ok((answer, body)) => answer.map(|()| UpstreamBody::streamed(body)),
            Err(error) => self.failed(error, call),
        }
    }

    /// The head of the upstream's answer as the client gets it, and its body.
    async fn ask(
        &self,
        request: Request<OutboundBody>,
    ) -> Result<(Response<()>, Incoming), OutboundError> {
        let (head, body) = self.outbound.pass(request).await?.into_parts();
        // The client asked for no upgrade, and the bytes that follow are not an answer.
        if head.status.is_informational() {
            let error = format!("it answered {}", head.status.as_u16());
            return Err(OutboundError::Broken(error));
        }
        Ok((taken(&head), body))
    }

    /// The time by which the upstream must have answered: the answer can then still be stored under
    /// the lease.
    fn by(&self, leased: Option<LeasedUntil>) -> Instant {
        let by = Instant::now() + self.time;
        let kept_by = leased.and_then(|LeasedUntil(until)| until.checked_sub(self.margin));
        kept_by.map_or(by, |kept_by| kept_by.min(by))
    }

    /// Forwards a request with a key, its whole body, in time. A failure says whether the upstream
    /// can have seen the request.
    async fn send_once(
        &self,
        onward: Request<()>,
        body: Body,
        by: Instant,
        call: &ProxyContext,
    ) -> Response<UpstreamBody> {
        let Ok(body) = body.collect().await else {
            return Problem::Target.answer(call);
        };
        // The reservation took so long that another request may have the key by now.
        if Instant::now() >= by {
            self.log.upstream(
                call,
                "did not send a request to",
                "too little of the lease of its key was left",
            );
            return Problem::NotReached.answer(call);
        }
        let request = onward.map(|()| OutboundBody::Left(Full::new(body.to_bytes())));
        let heard = timeout_at(by, async {
            let (answer, body) = self.ask(request).await?;
            read(body, by).await.map(|body| answer.map(|()| body))
        });
        match heard.await {
            Ok(Ok(answer)) if speaks_for_another(answer.status()) => {
                let status = format!("it answered {}", answer.status().as_u16());
                self.log.upstream(call, "unknown outcome of a request to", &status);
                Problem::UnknownOutcome.answer(call)
            }
            Ok(Ok(mut answer)) => {
                // Only Hapax decides whether an answer is a replay.
                answer.headers_mut().remove(IDEMPOTENCY_REPLAYED);
                answer
            }
            Ok(Err(error)) => self.failed(error, call),
            Err(_) => self.failed(OutboundError::TimedOut(self.time), call),
        }
    }

    fn failed(&self, error: OutboundError, call: &ProxyContext) -> Response<UpstreamBody> {
        let (problem, what) = match &error {
            OutboundError::Connect(_) | OutboundError::Unsent => {
                (Problem::NotReached, "cannot reach")
            }
            OutboundError::TimedOut(_) | OutboundError::Broken(_) => {
                (Problem::UnknownOutcome, "unknown outcome of a request to")
            }
        };
        self.log.upstream(call, what, &error.to_string());
        problem.answer(call)
    }
}

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const IDEMPOTENCY_REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");
const HAPAX_SCOPE: HeaderName = HeaderName::from_static("hapax-scope");
const HAPAX_FENCE: HeaderName = HeaderName::from_static("hapax-fence");
const HAPAX_ATTEMPT: HeaderName = HeaderName::from_static("hapax-attempt");

/// The headers that an app needs to store the answer itself, in its own transaction.
fn add_key_headers(headers: &mut HeaderMap, reserved: &Reserved) {
    let values = [
        (IDEMPOTENCY_KEY, HeaderValue::from_str(reserved.key.as_str())),
        (HAPAX_SCOPE, HeaderValue::from_str(reserved.scope.as_str())),
        (HAPAX_FENCE, Ok(HeaderValue::from(reserved.fence.0))),
        (HAPAX_ATTEMPT, Ok(HeaderValue::from(reserved.attempt))),
    ];
    for (name, value) in values {
        headers.insert(name, value.expect("keys and scopes are printable"));
    }
}

/// The end-to-end headers: those that are not for one connection only.
fn end_to_end(headers: &HeaderMap) -> HeaderMap {
    let of_connection = ConnectionHeaders::named_in(headers);
    let mut kept = HeaderMap::with_capacity(headers.len());
    for (name, value) in headers {
        if !is_hop_by_hop(name.as_str()) && !of_connection.contains(name) {
            kept.append(name, value.clone());
        }
    }
    kept
}

/// HTTP/2 may split a cookie header into several, and many apps read only the first one.
fn join_cookies(headers: &mut HeaderMap) {
    let crumbs: Vec<_> = headers.get_all(COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if crumbs.len() > 1
        && let Ok(whole) = HeaderValue::from_bytes(&crumbs.join(&b"; "[..]))
    {
        headers.insert(COOKIE, whole);
    }
}

/// Whether the client wants a tunnel or a websocket: neither has one answer to one request. An
/// offer to upgrade to HTTP/2 is ignored.
fn wants_another_protocol(head: &Parts) -> bool {
    let offers = head.headers.get_all(UPGRADE).iter();
    let mut offers = offers.flat_map(|offer| offer.as_bytes().split(|byte| *byte == b','));
    head.method == Method::CONNECT
        || offers.any(|offer| !offer.trim_ascii().eq_ignore_ascii_case(b"h2c"))
}

/// The head of an answer as the client gets it.
fn taken(head: &response::Parts) -> Response<()> {
    let mut taken = Response::new(());
    *taken.status_mut() = head.status;
    *taken.version_mut() = Version::HTTP_11;
    *taken.headers_mut() = end_to_end(&head.headers);
    // If both length and transfer encoding are present, the length must be ignored (RFC 9112, 6.3). If the length were
    // forwarded, a reader could take the rest of the answer for another answer.
    if head.headers.contains_key(TRANSFER_ENCODING) {
        taken.headers_mut().remove(CONTENT_LENGTH);
    }
    taken
}

/// Reads an answer to its end, or up to the largest size that is stored. A larger answer is
/// streamed.
async fn read(mut body: Incoming, by: Instant) -> Result<UpstreamBody, OutboundError> {
    let mut whole = BytesMut::new();
    while let Some(bytes) = outbound::next(&mut body).await? {
        whole.extend_from_slice(&bytes);
        if whole.len() > ANSWER_BODY_BYTES_MAX {
            return Ok(UpstreamBody::begun(whole.freeze(), body, by));
        }
    }
    Ok(UpstreamBody::whole(whole))
}

/// Whether the status comes from a gateway in between, which may have lost the answer or never sent
/// the request.
fn speaks_for_another(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT
    )
}

/// A request that did not come through [`Proxy::answer`](super::Proxy::answer).
fn unknown_call() -> ProxyContext {
    ProxyContext {
        request_id: RequestId { uuid: Uuid::nil() },
        received_at: Timestamp::UNIX_EPOCH,
        peer: SocketAddr::from(([0, 0, 0, 0], 0)),
    }
}

#[cfg(test)]
mod tests {
    use hapax_core::job::Fence;
    use hapax_core::ledger::{IdempotencyKey, Scope, Settle};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    /// A forwarder to an upstream that answers every connection with these bytes.
    async fn to_an_upstream_that_sends(answer: &'static str) -> Forwarder {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let _ = stream.read(&mut [0; 4_096]).await;
                let _ = stream.write_all(answer.as_bytes()).await;
                // The connection stays open: only the answer's headers define where the answer
                // ends.
                tokio::spawn(async move { stream.read(&mut [0; 1]).await });
            }
        });
        forwarder_to(at)
    }

    fn forwarder_to(at: SocketAddr) -> Forwarder {
        let upstream = Upstream::parse(&format!("http://{at}")).unwrap();
        let (outbound, lease) = (Outbound::passing_on().unwrap(), Duration::from_secs(60));
        let log = Arc::new(ProxyLog::new("api"));
        Forwarder::new(upstream, outbound, lease, Vec::new(), None, log)
    }

    /// A request, with a reserved key or without one.
    fn charge(is_keyed: bool) -> Request<Body> {
        let mut request = Request::post("/charges").body(Body::empty()).unwrap();
        if is_keyed {
            request.extensions_mut().insert(Reserved {
                scope: Scope::new("api", "acct_1", &Method::POST, "/charges"),
                key: IdempotencyKey::parse(b"k").unwrap(),
                fence: Fence(1),
                attempt: 1,
                quota: None,
            });
        }
        request
    }

    #[tokio::test]
    async fn an_answer_with_two_lengths_is_forwarded_with_the_true_one() {
        // The rest of such an answer would be read as the beginning of the next one.
        for both in [
            "content-length: 5\r\ntransfer-encoding: chunked",
            "transfer-encoding: chunked\r\ncontent-length: 5",
        ] {
            let answer = format!("HTTP/1.1 200 OK\r\n{both}\r\n\r\na\r\n0123456789\r\n0\r\n\r\n");
            let answer: &str = answer.leak();
            for is_keyed in [true, false] {
                let mut way = to_an_upstream_that_sends(answer).await;
                let answer = way.call(charge(is_keyed)).await.unwrap();
                assert_eq!(answer.headers().get(CONTENT_LENGTH), None, "{both} {is_keyed}");
                let body = answer.into_body().collect().await.unwrap().to_bytes();
                assert_eq!(body, "0123456789", "{both} {is_keyed}");
            }
        }
    }

    #[tokio::test]
    async fn a_request_whose_lease_is_over_before_it_was_sent_is_not_sent() {
        // The database took so long to reserve the key that the next request with the key may run
        // by now. Forwarding this request too would cause two effects.
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut way = forwarder_to(listener.local_addr().unwrap());
        let mut request = charge(true);
        request.extensions_mut().insert(LeasedUntil(Instant::now()));
        let answer = way.call(request).await.unwrap();
        assert_eq!(answer.status(), StatusCode::BAD_GATEWAY);
        assert_eq!(answer.extensions().get(), Some(&Settle::Free));
        let came = std::future::poll_fn(|context| Poll::Ready(listener.poll_accept(context))).await;
        assert!(came.is_pending(), "no upstream was asked");
    }

    #[tokio::test]
    async fn a_split_cookie_header_is_forwarded_as_one() {
        // HTTP/2 may split the cookie header: an app that reads one header would see a part of the
        // cookies.
        let mut request = charge(false);
        for crumb in ["session=1", "theme=dark"] {
            request.headers_mut().append(COOKIE, HeaderValue::from_static(crumb));
        }
        let (head, _) = request.into_parts();
        let way = forwarder_to(SocketAddr::from(([127, 0, 0, 1], 1)));
        let onward = way.0.upstream_request(&head, None, &unknown_call(), true).unwrap();
        let sent: Vec<_> = onward.headers().get_all(COOKIE).iter().collect();
        assert_eq!(sent, ["session=1; theme=dark"]);
    }

    #[tokio::test]
    async fn a_protocol_switch_that_was_not_requested_is_no_answer() {
        // If the answer were stored, every retry would get it; if it were forwarded, the client
        // would switch protocols.
        let answer =
            "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n";
        for is_keyed in [true, false] {
            let mut way = to_an_upstream_that_sends(answer).await;
            let answer = way.call(charge(is_keyed)).await.unwrap();
            assert_eq!(answer.status(), StatusCode::BAD_GATEWAY, "{is_keyed}");
            assert_eq!(answer.extensions().get(), Some(&Settle::Wait), "{is_keyed}");
        }
    }
}
