//! An API to send requests to, and what it saw.

use std::fmt;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::Timestamp;
use hapax_core::store::StoreError;
use hapax_layer::{
    Body, BoxError, Idempotency, IdempotencyLayer, IdempotencyOutcome, IdempotencyRules, Principal,
};
use hapax_sim::{Act, FaultyStore, PLANNED};
use hapax_store::MemoryStore;
use http::{HeaderMap, HeaderName, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use tokio::sync::{Notify, Semaphore};
use tower::util::BoxCloneSyncService;
use tower::{Layer as _, Service, ServiceExt as _, service_fn};

/// How long a test waits for an expected event, even on a slow machine.
pub(crate) const WAIT_MAX: Duration = Duration::from_secs(60);

pub(crate) const LEASE: Duration = Duration::from_secs(60);

/// The memory ledger with injected faults, and a clock that the test moves.
#[derive(Clone)]
pub(crate) struct TestLedger {
    pub(crate) faults: Arc<FaultyStore<MemoryStore>>,
    clock: Arc<AtomicI64>,
}

impl TestLedger {
    pub(crate) fn new() -> Self {
        let clock = Arc::new(AtomicI64::new(1_700_000_000));
        let seconds = Arc::clone(&clock);
        let now = move || Timestamp::from_second(seconds.load(Ordering::SeqCst)).unwrap();
        let memory = MemoryStore::with_clock(Arc::new(now));
        Self { faults: Arc::new(FaultyStore::new(memory)), clock }
    }

    pub(crate) fn pass(&self, span: Duration) {
        self.clock.fetch_add(span.as_secs().try_into().unwrap(), Ordering::SeqCst);
    }

    /// Makes every later call of `act` fail.
    pub(crate) fn fail(&self, act: Act) {
        self.faults.fail(act, StoreError::Unavailable(PLANNED.into()));
    }

    /// The arguments of all calls so far.
    pub(crate) fn given(&self) -> String {
        let acts = [Act::Reserve, Act::Finish, Act::Abandon];
        acts.map(|act| self.faults.arguments(act).join("\n")).concat()
    }

    /// Waits until a key is reserved.
    pub(crate) async fn reserved(&self) {
        self.faults.until(|faults| faults.ended(Act::Reserve) > 0).await;
    }
}

/// The effects of the work, in a list without a unique constraint.
#[derive(Clone, Default)]
pub(crate) struct Effects(Arc<Mutex<Vec<String>>>);

impl Effects {
    /// Adds an effect, and returns the number of effects so far.
    pub(crate) fn add(&self, effect: impl Into<String>) -> usize {
        let mut effects = self.0.lock().unwrap();
        effects.push(effect.into());
        effects.len()
    }

    pub(crate) fn count(&self) -> usize {
        self.0.lock().unwrap().len()
    }
}

/// Why the work failed.
#[derive(Debug)]
pub(crate) struct Failed(pub(crate) String);

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<E: Into<BoxError>> From<E> for Failed {
    fn from(error: E) -> Self {
        Self(error.into().to_string())
    }
}

/// The service behind the layer.
pub(crate) type Inner = BoxCloneSyncService<Request<Body>, Response<Body>, Failed>;

/// One API behind the layer.
#[derive(Clone)]
pub(crate) struct Api {
    pub(crate) ledger: TestLedger,
    pub(crate) layer: IdempotencyLayer<FaultyStore<MemoryStore>>,
    pub(crate) effects: Effects,
    pub(crate) service: Idempotency<Inner, FaultyStore<MemoryStore>>,
}

impl Api {
    /// `work` gets the effects so far, and the request.
    pub(crate) fn new<W, F>(rules: IdempotencyRules, work: W) -> Self
    where
        W: Fn(Effects, Request<Body>) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Result<Response<Body>, Failed>> + Send + 'static,
    {
        Self::on(TestLedger::new(), rules, work)
    }

    /// Builds the API on a ledger that others may use as well.
    pub(crate) fn on<W, F>(ledger: TestLedger, rules: IdempotencyRules, work: W) -> Self
    where
        W: Fn(Effects, Request<Body>) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Result<Response<Body>, Failed>> + Send + 'static,
    {
        let effects = Effects::default();
        let seen = effects.clone();
        let inner = service_fn(move |request| work(seen.clone(), request));
        let layer = IdempotencyLayer::new(Arc::clone(&ledger.faults), Arc::new(rules));
        let service = layer.layer(BoxCloneSyncService::new(inner));
        Self { ledger, layer, effects, service }
    }

    /// An API that counts its runs: the first one answers `{"run":1}`.
    pub(crate) fn counting(rules: IdempotencyRules) -> Self {
        Self::new(rules, |effects, request| async move {
            let run = effects.add(request.uri().path());
            Ok(answer(StatusCode::CREATED, format!("{{\"run\":{run}}}")))
        })
    }

    pub(crate) async fn send(&self, request: Ask) -> Heard {
        self.try_send(request).await.expect("the work did not fail")
    }

    pub(crate) async fn try_send(&self, request: Ask) -> Result<Heard, Failed> {
        hear(self.service.clone(), request.into_request()).await
    }
}

/// Rules under which the header `x-account-id` names the caller.
pub(crate) fn rules() -> IdempotencyRules {
    IdempotencyRules::default()
        .lease(LEASE)
        .principal(Principal::Header(HeaderName::from_static("x-account-id")))
}

pub(crate) fn answer(status: StatusCode, body: impl Into<Bytes>) -> Response<Body> {
    let response = Response::builder().status(status).header("content-type", "application/json");
    response.body(Body::from(body.into())).unwrap()
}

/// A request on its way.
#[derive(Debug, Clone)]
pub(crate) struct Ask {
    method: Method,
    path: String,
    headers: Vec<(String, String)>,
    body: Bytes,
}

/// `POST /charges` of `acct_1` with this key.
pub(crate) fn charge(key: &str) -> Ask {
    let headers = vec![("x-account-id".into(), "acct_1".into())];
    let body = Bytes::from_static(b"{\"amount\":100}");
    let bare = Ask { method: Method::POST, path: "/charges".into(), headers, body };
    bare.header("idempotency-key", key)
}

impl Ask {
    pub(crate) fn method(self, method: Method) -> Self {
        Self { method, ..self }
    }

    pub(crate) fn path(self, path: &str) -> Self {
        Self { path: path.into(), ..self }
    }

    pub(crate) fn body(self, body: impl Into<Bytes>) -> Self {
        Self { body: body.into(), ..self }
    }

    /// Replaces the header.
    pub(crate) fn header(self, name: &str, value: &str) -> Self {
        let mut bare = self.without(name);
        bare.headers.push((name.into(), value.into()));
        bare
    }

    pub(crate) fn without(mut self, name: &str) -> Self {
        self.headers.retain(|(known, _)| known != name);
        self
    }

    pub(crate) fn into_request(self) -> Request<Full<Bytes>> {
        let mut request = Request::builder().method(self.method).uri(self.path);
        for (name, value) in self.headers {
            request = request.header(name, value);
        }
        request.body(Full::new(self.body)).unwrap()
    }
}

/// An answer, read to its end.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Heard {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) trailers: Option<HeaderMap>,
    pub(crate) outcome: Option<IdempotencyOutcome>,
}

impl Heard {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    pub(crate) fn is_replay(&self) -> bool {
        assert_eq!(
            self.header("idempotency-replayed") == Some("true"),
            self.outcome == Some(IdempotencyOutcome::Replay),
            "the header says what the outcome is: {self:?}"
        );
        self.outcome == Some(IdempotencyOutcome::Replay)
    }

    /// The type of the problem, if the layer itself answered with one.
    pub(crate) fn problem(&self) -> Option<String> {
        (self.header("content-type") == Some("application/problem+json")).then(|| {
            let body: serde_json::Value = serde_json::from_slice(&self.body).unwrap();
            assert_eq!(body["status"], self.status, "{body}");
            body["type"].as_str().unwrap().strip_prefix("urn:hapax:problem:").unwrap().to_owned()
        })
    }
}

pub(crate) async fn hear<S, B, RB>(service: S, request: Request<B>) -> Result<Heard, Failed>
where
    S: Service<Request<B>, Response = Response<RB>>,
    S::Error: Into<Failed>,
    RB: http_body::Body<Data = Bytes>,
    RB::Error: Into<BoxError>,
{
    let (head, body) = service.oneshot(request).await.map_err(Into::into)?.into_parts();
    let body = body.collect().await.map_err(Into::into)?;
    let trailers = body.trailers().cloned();
    Ok(Heard {
        status: head.status.as_u16(),
        outcome: head.extensions.get().copied(),
        headers: head.headers,
        body: body.to_bytes(),
        trailers,
    })
}

/// Waits for a future that must end within [`WAIT_MAX`].
pub(crate) async fn soon<F: Future>(what: F) -> F::Output {
    tokio::time::timeout(WAIT_MAX, what).await.expect("it happens within WAIT_MAX")
}

/// An API whose work waits until the test lets it continue.
pub(crate) struct Paused {
    pub(crate) api: Api,
    /// Notified when a run begins.
    pub(crate) begun: Arc<Notify>,
    /// A permit for each run that may continue.
    pub(crate) gate: Arc<Semaphore>,
}

pub(crate) fn paused(rules: IdempotencyRules) -> Paused {
    let (begun, gate) = (Arc::new(Notify::new()), Arc::new(Semaphore::new(0)));
    let (started, wait) = (Arc::clone(&begun), Arc::clone(&gate));
    let api = Api::new(rules, move |effects, _| {
        let (started, wait) = (Arc::clone(&started), Arc::clone(&wait));
        async move {
            let run = effects.add("charged");
            started.notify_one();
            wait.acquire().await?.forget();
            Ok(answer(StatusCode::CREATED, format!("run {run}")))
        }
    });
    Paused { api, begun, gate }
}
