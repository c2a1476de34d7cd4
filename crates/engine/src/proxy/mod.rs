//! A proxy: Idempotency-Keys in front of an app in any language. This file holds the steps that
//! every request and every answer take. `hapax_layer` decides whether a request runs, [`forward`]
//! sends it, and [`upstream`] determines its target.
//!
//! A request with a key runs to its end even if its client hangs up. A request without one is
//! streamed, and ends with its client.

mod body;
mod forward;
mod log;
mod problem;
mod upstream;

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use bytes::Bytes;
use hapax_core::Timestamp;
use hapax_core::hop_headers::{ConnectionHeaders, dashed};
use hapax_core::ledger::{IDEMPOTENCY_KEY, Ledger};
use hapax_layer::{
    Body, Idempotency, IdempotencyLayer, IdempotencyOutcome, IdempotencyRules, is_passed_on,
};
use http::header::CONNECTION;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, Version};
use ipnet::IpNet;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tower::{Layer as _, ServiceExt as _};
use uuid::Uuid;

pub use self::upstream::{Upstream, UpstreamError};

use self::body::{UploadMode, UploadResult, Uploaded};
use self::forward::Forwarder;
use self::log::ProxyLog;
use self::problem::Problem;
use crate::http::body_memory::{BodyMemory, BodyPermit};
use crate::http::client_address::remote;
use crate::http::{self as http_loop, Drained, Peer};
use crate::ingress::Now;
use crate::ingress::respond::{REQUEST_ID, RequestId};
use crate::limits::{BodyLimits, HttpLimits, KEYED_MAX, TEND_EVERY};
use crate::outbound::Outbound;
use crate::request_ids::RequestIds;
use crate::run_to_completion::BackgroundTasks;
use crate::serve::{Background, run_until_drained};

/// The settings of a proxy. All settings can change while the proxy runs.
#[derive(Debug, Clone)]
pub struct ProxySpec {
    /// The app that requests are forwarded to.
    pub upstream: Upstream,
    /// The rules of keys. Their lease is ignored: [`ProxySpec::lease`] replaces it.
    pub rules: IdempotencyRules,
    /// How long a request with a key may take; the upstream has a little less.
    pub lease: Duration,
    /// How long a client may take to send a body that is buffered, and how long a streamed body may
    /// pause.
    pub body_timeout: Duration,
    /// The proxies whose headers about the client are trusted.
    pub trusted_proxies: Vec<IpNet>,
}

/// One proxy over the ledger that stores its keys.
pub struct Proxy<L> {
    ledger: Arc<L>,
    outbound: Outbound,
    now: Now,
    ids: RequestIds,
    afterwards: BackgroundTasks,
    log: Arc<ProxyLog>,
    /// Memory for bodies that are being buffered.
    unfinished: BodyMemory,
    /// A permit for each request with a key, because such a request continues even if its client
    /// hangs up.
    keyed: Arc<Semaphore>,
    configured: ArcSwap<ConfiguredService<L>>,
}

/// The layer with its forwarder, as one configuration.
struct ConfiguredService<L> {
    service: Idempotency<Forwarder, L>,
    /// The header that names the owner of a key.
    scoped_by: Option<HeaderName>,
    body_timeout: Duration,
    trusted: Box<[IpNet]>,
}

/// The facts about a request that its answer and its log line need. The proxy keeps these facts in the
/// request's extensions.
#[derive(Debug, Clone, Copy)]
struct ProxyContext {
    request_id: RequestId,
    received_at: Timestamp,
    peer: SocketAddr,
}

impl<L: Ledger> Proxy<L> {
    /// Must be called on the runtime that will serve it: a request whose client hangs up continues
    /// there. `name` is part of every key's scope. `outbound` should be [`Outbound::passing_on`].
    pub fn new(name: &str, ledger: Arc<L>, outbound: Outbound, now: Now, spec: ProxySpec) -> Self {
        let log = Arc::new(ProxyLog::new(name));
        let configured =
            ConfiguredService::new(Arc::clone(&ledger), &outbound, Arc::clone(&log), spec);
        let body = BodyLimits::default();
        Self {
            ledger,
            outbound,
            now,
            ids: RequestIds::new(Uuid::now_v7().as_u64_pair().1),
            afterwards: BackgroundTasks::here(),
            log,
            unfinished: BodyMemory::new(body.unfinished_bytes_max, body.left_alone),
            keyed: Arc::new(Semaphore::new(KEYED_MAX)),
            configured: ArcSwap::from_pointee(configured),
        }
    }

    /// The proxy's name in the config.
    pub fn name(&self) -> &str {
        self.log.proxy()
    }

    /// Applies `spec` from the next request on. Requests that have started keep the old settings.
    pub fn reload(&self, spec: ProxySpec) {
        let (ledger, log) = (Arc::clone(&self.ledger), Arc::clone(&self.log));
        self.configured.store(Arc::new(ConfiguredService::new(ledger, &self.outbound, log, spec)));
    }

    /// Answers one request.
    pub async fn answer<B>(
        self: Arc<Self>,
        request: Request<B>,
        peer: impl Into<Peer>,
    ) -> Response<Body>
    where
        B: hyper::body::Body<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Into<hapax_layer::BoxError>,
    {
        let received_at = (self.now)();
        let request_id = RequestId { uuid: self.ids.next(received_at) };
        let peer = peer.into();
        let call = ProxyContext { request_id, received_at, peer: peer.address() };
        let client = remote(call.peer, request.headers(), &self.configured.load().trusted);
        peer.is_for(client);
        let has_key = request.headers().contains_key(IDEMPOTENCY_KEY)
            && !is_passed_on(request.method(), request.headers());
        if hides_what_the_app_must_see(request.headers(), &self.configured.load()) {
            return self.refuse(Problem::Connection, &request, &call);
        }
        if !has_key {
            return passed(&peer, self.answer_call(request, call, None).await);
        }
        let Ok(permit) = Arc::clone(&self.keyed).try_acquire_owned() else {
            return self.refuse(Problem::Crowded, &request, &call);
        };
        let afterwards = self.afterwards.clone();
        let held = self.unfinished.hold(client);
        let answering = self.answer_call(request, call, Some(held));
        let answering = async move {
            let answer = answering.await;
            drop(permit);
            answer
        };
        passed(&peer, afterwards.run_to_completion(answering).await)
    }

    /// Answers a request after reading only its head.
    fn refuse<B>(
        &self,
        problem: Problem,
        request: &Request<B>,
        call: &ProxyContext,
    ) -> Response<Body> {
        let mut answer = problem.answer(call).map(Body::new);
        self.log.answered(call, Some(IdempotencyOutcome::Refused), answer.status());
        answer.headers_mut().insert(REQUEST_ID, call.request_id.header());
        if request.version() < Version::HTTP_2 {
            answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        answer
    }

    async fn answer_call<B>(
        self: Arc<Self>,
        request: Request<B>,
        call: ProxyContext,
        held: Option<BodyPermit>,
    ) -> Response<Body>
    where
        B: hyper::body::Body<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Into<hapax_layer::BoxError>,
    {
        let configured = self.configured.load_full();
        let version = request.version();
        let taken = match held {
            Some(held) => UploadMode::Whole(configured.body_timeout, held),
            None => UploadMode::InPieces(configured.body_timeout),
        };
        let (head, body) = request.into_parts();
        let (body, upload) = Uploaded::new(body, taken);
        let mut request = Request::from_parts(head, body);
        request.extensions_mut().insert(call);
        let service = configured.service.clone();
        let answer = service.oneshot(request).await.unwrap_or_else(|never| match never {});
        let outcome = answer.extensions().get::<IdempotencyOutcome>().copied();
        let state = upload.state();
        // The reader of the body sees only that the body broke, and not why.
        let mut answer = match state {
            UploadResult::Unread | UploadResult::Ended => answer,
            UploadResult::Slow => Problem::SlowBody.answer(&call).map(Body::new),
            UploadResult::Crowded => Problem::Crowded.answer(&call).map(Body::new),
        };
        self.log.answered(&call, outcome, answer.status());
        let headers = answer.headers_mut();
        headers.insert(REQUEST_ID, call.request_id.header());
        // The rest of the request must not be read as another one, and its bytes must not reset the
        // answer.
        if version < Version::HTTP_2 && state != UploadResult::Ended {
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        answer
    }

    /// Logs the numbers of suppressed lines, until `stop`.
    async fn maintain(&self, stop: CancellationToken) {
        let mut beats = interval(TEND_EVERY);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while stop.run_until_cancelled(beats.tick()).await.is_some() {
            self.log.log_suppressed_lines();
        }
        self.log.log_suppressed_lines();
    }
}

impl<L: Ledger> ConfiguredService<L> {
    fn new(ledger: Arc<L>, outbound: &Outbound, log: Arc<ProxyLog>, spec: ProxySpec) -> Self {
        let ProxySpec { upstream, rules, lease, body_timeout, trusted_proxies } = spec;
        let rules = rules.realm(log.proxy()).lease(lease);
        let scoped_by = rules.principal_header();
        let trusted = trusted_proxies.clone().into();
        let forwarder = Forwarder::new(
            upstream,
            outbound.clone(),
            lease,
            trusted_proxies,
            scoped_by.as_ref().map(with_dashes),
            log,
        );
        let service = IdempotencyLayer::new(ledger, Arc::new(rules)).layer(forwarder);
        Self { service, scoped_by: scoped_by.as_ref().map(with_dashes), body_timeout, trusted }
    }
}

/// Whether the Connection header makes a proxy remove a header that the app must see. Hapax would
/// read the header that scopes the key, and the app would not. The app would then act for all
/// callers, or for the wrong one, and the answer would be stored for the caller that the header
/// names.
fn hides_what_the_app_must_see<L>(headers: &HeaderMap, configured: &ConfiguredService<L>) -> bool {
    let scoped_by = configured.scoped_by.as_ref().map(HeaderName::as_str);
    ConnectionHeaders::named_in(headers).any(|name| Some(name) == scoped_by || is_needed(name))
}

/// The headers that every app may depend on: the caller (`authorization`, `cookie`), the address
/// (`host`, `forwarded`, `x-forwarded-*`), the body (`content-*`), and the headers of Hapax.
fn is_needed(name: &str) -> bool {
    let begins = ["content-", "hapax-", "webhook-", "x-forwarded-"];
    begins.iter().any(|begin| name.starts_with(begin))
        || matches!(name, "authorization" | "cookie" | "forwarded" | "host" | "idempotency-key")
        || hapax_layer::METHOD_OVERRIDES.iter().any(|method| method == name)
}

fn with_dashes(name: &HeaderName) -> HeaderName {
    HeaderName::try_from(&*dashed(name)).unwrap_or_else(|_| name.clone())
}

impl<L> fmt::Debug for Proxy<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Proxy").field("name", &self.log.proxy()).finish_non_exhaustive()
    }
}

/// The app decides whether a client is genuine: the connection of a client that it serves is closed
/// last when slots are short.
fn passed(peer: &Peer, answer: Response<Body>) -> Response<Body> {
    if answer.status().as_u16() < 400 {
        peer.has_verified();
    }
    answer
}

/// Serves one proxy until `stop`. When this returns, every received request is answered and its key
/// settled, as far as `limits.drain` allowed. The ledger may then be closed.
pub async fn serve_proxy<L: Ledger>(
    listener: TcpListener,
    proxy: Arc<Proxy<L>>,
    limits: HttpLimits,
    stop: CancellationToken,
) -> Drained {
    // If the operator allows more connections than the default, each of them can run a request with
    // a key.
    proxy.keyed.add_permits(limits.connections_max.saturating_sub(KEYED_MAX));
    let answer = {
        let proxy = Arc::clone(&proxy);
        move |request, peer: Peer| Arc::clone(&proxy).answer(request, peer)
    };
    let serving = |stop| http_loop::serve(listener, None, answer, limits.clone(), stop);
    // Requests with a key whose clients were cut or hung up.
    let background =
        Background { finish: proxy.afterwards.finish(), maintain: |served| proxy.maintain(served) };
    run_until_drained(serving, background, limits.drain, stop).await
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::pin;
    use std::task::Poll;

    use hapax_sim::{Act, FaultyStore};
    use hapax_store::MemoryStore;
    use http::StatusCode;
    use http_body_util::Full;
    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn clients_that_hang_up_cannot_exceed_the_limit_of_running_requests() {
        // Each request starts and continues without its client. If such requests were not counted,
        // memory would be the only bound.
        let spec = ProxySpec {
            upstream: Upstream::parse("http://127.0.0.1:1").unwrap(),
            rules: IdempotencyRules::default(),
            lease: Duration::from_secs(60),
            body_timeout: Duration::from_secs(60),
            trusted_proxies: Vec::new(),
        };
        let outbound = Outbound::passing_on().unwrap();
        let now: Now = Arc::new(|| Timestamp::UNIX_EPOCH);
        let ledger = Arc::new(FaultyStore::new(MemoryStore::new()));
        let _never_answers = ledger.block(Act::Reserve);
        let mut proxy = Proxy::new("api", ledger, outbound, now, spec);
        proxy.keyed = Arc::new(Semaphore::new(2));
        let proxy = Arc::new(proxy);
        let peer = SocketAddr::from(([127, 0, 0, 1], 1));
        let charge = || {
            let request = Request::post("/charges").header(IDEMPOTENCY_KEY, "k");
            let request = request.body(Full::new(Bytes::from_static(b"{}"))).unwrap();
            Arc::clone(&proxy).answer(request, peer)
        };
        for _ in 0..2 {
            // The request is dropped at the end of the loop's body, as if its client had hung up.
            let mut hung_up = pin!(charge());
            let begun = poll_fn(|context| Poll::Ready(hung_up.as_mut().poll(context))).await;
            assert!(begun.is_pending());
        }
        let answer = timeout(Duration::from_secs(60), charge()).await;
        let answer = answer.expect("it is answered at once");
        assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert!(answer.headers().contains_key("retry-after"));
        assert_eq!(answer.headers()[CONNECTION], "close");
    }
}
