//! The layer and its service: which requests need a key, and how each is answered.

use std::fmt;
use std::future::ready;
use std::mem;
use std::pin::{Pin, pin};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use bytes::Bytes;
use hapax_core::ledger::{Fingerprint, IdempotencyKey, Ledger, ReserveAsk, Scope};
use http::request::Parts;
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;
use tower::{Layer, Service};
use tracing::Instrument as _;

use crate::answer;
use crate::limits::{POLL_FIRST, POLL_MAX};
use crate::principal::{self, PrincipalError};
use crate::problem::IdempotencyProblem;
use crate::request_waiters::RequestWaiters;
use crate::rules::IdempotencyRules;
use crate::run::{self, AttemptResult, PendingRequest};
use crate::target::{self, BadPath, Path, is_passed_on};
use crate::{Body, BoxError};

/// A tower layer that adds Idempotency-Keys to a service. Clones share their state.
pub struct IdempotencyLayer<L> {
    shared: Arc<Shared<L>>,
}

impl<L: Ledger> IdempotencyLayer<L> {
    /// A layer that stores its keys in `ledger`.
    pub fn new(ledger: Arc<L>, rules: Arc<IdempotencyRules>) -> Self {
        let running = TaskTracker::new();
        // A closed tracker lets `drained` return whenever nothing runs.
        running.close();
        let waiting = RequestWaiters::new();
        let counters = Default::default();
        Self { shared: Arc::new(Shared { ledger, rules, waiting, running, counters }) }
    }

    /// Returns when no request is running, including those whose clients have hung up. Call this between the
    /// last request and the end of the process.
    pub async fn drained(&self) {
        self.shared.running.wait().await;
    }
}

/// The state that all clones of a layer and their services share.
pub(crate) struct Shared<L> {
    pub(crate) ledger: Arc<L>,
    pub(crate) rules: Arc<IdempotencyRules>,
    pub(crate) waiting: RequestWaiters,
    running: TaskTracker,
    /// The counter of each outcome, created at its first use. Looking a counter up by its labels
    /// would allocate.
    counters: [OnceLock<metrics::Counter>; IdempotencyOutcome::COUNT],
}

impl<L> Shared<L> {
    pub(crate) fn count(&self, outcome: IdempotencyOutcome) {
        let counter = self.counters[outcome as usize].get_or_init(|| {
            let realm = self.rules.realm.clone();
            let labels = [("realm", realm), ("outcome", outcome.as_str().into())];
            metrics::counter!("hapax_idempotency_total", &labels)
        });
        counter.increment(1);
    }

    fn refuse(&self, problem: IdempotencyProblem) -> Response<Body> {
        self.count(IdempotencyOutcome::Refused);
        IdempotencyOutcome::Refused.on(answer::answered(problem.answer()))
    }
}

impl<L> Clone for IdempotencyLayer<L> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<L> fmt::Debug for IdempotencyLayer<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyLayer")
            .field("rules", &self.shared.rules)
            .finish_non_exhaustive()
    }
}

impl<S, L> Layer<S> for IdempotencyLayer<L> {
    type Service = Idempotency<S, L>;

    fn layer(&self, inner: S) -> Self::Service {
        Idempotency { inner, shared: Arc::clone(&self.shared) }
    }
}

/// A service that runs each key's request once.
pub struct Idempotency<S, L> {
    inner: S,
    shared: Arc<Shared<L>>,
}

impl<S: Clone, L> Clone for Idempotency<S, L> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), shared: Arc::clone(&self.shared) }
    }
}

impl<S: fmt::Debug, L> fmt::Debug for Idempotency<S, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Idempotency")
            .field("inner", &self.inner)
            .field("rules", &self.shared.rules)
            .finish_non_exhaustive()
    }
}

/// How the layer answered a request. This outcome is in the extensions of every answer to a request that has
/// or needs a key, and is the label `outcome` of `hapax_idempotency_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IdempotencyOutcome {
    /// The request was run.
    Fresh,
    /// The request was run before, and got its stored answer.
    Replay,
    /// Another attempt runs the request.
    InProgress,
    /// The key was used for another request.
    Mismatch,
    /// The key is new, and the caller is over its quota.
    OverQuota,
    /// The request has no key or a malformed one, does not identify its caller, or is too large.
    Refused,
    /// The ledger was unavailable, or could not store the answer.
    Unavailable,
}

impl IdempotencyOutcome {
    const COUNT: usize = Self::Unavailable as usize + 1;

    pub(crate) fn on(self, mut response: Response<Body>) -> Response<Body> {
        response.extensions_mut().insert(self);
        response
    }

    /// Its name in metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Fresh => "fresh",
            Self::Replay => "replay",
            Self::InProgress => "in_progress",
            Self::Mismatch => "mismatch",
            Self::OverQuota => "over_quota",
            Self::Refused => "refused",
            Self::Unavailable => "unavailable",
        }
    }
}

impl<S, L, B, RB> Service<Request<B>> for Idempotency<S, L>
where
    S: Service<Request<Body>, Response = Response<RB>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    L: Ledger,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
    RB: http_body::Body<Data = Bytes> + Send + 'static,
    RB::Error: Into<BoxError>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = ResponseFuture<S::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (parts, body) = request.into_parts();
        match admit(&self.shared.rules, &parts) {
            Ok(None) => pass_through(self.inner.call(Request::from_parts(parts, Body::new(body)))),
            Ok(Some(scoped_key)) => {
                // Only `self.inner` was polled ready, so this call takes it and leaves a clone in
                // its place.
                let fresh = self.inner.clone();
                let service = mem::replace(&mut self.inner, fresh);
                let request = KeyedRequest { scoped_key, service, parts, body };
                run_once(Arc::clone(&self.shared), request)
            }
            Err(problem) => {
                let refused = self.shared.refuse(problem);
                Box::pin(ready(Ok(refused)))
            }
        }
    }
}

type ResponseFuture<E> = Pin<Box<dyn Future<Output = Result<Response<Body>, E>> + Send>>;

/// A key and its scope.
struct ScopedKey {
    scope: Scope,
    key: IdempotencyKey,
}

/// Makes the decisions that do not need the body. `None`: the request has no key and needs none.
fn admit(rules: &IdempotencyRules, parts: &Parts) -> Result<Option<ScopedKey>, IdempotencyProblem> {
    if is_passed_on(&parts.method, &parts.headers) {
        return Ok(None);
    }
    let path = Path::of(parts.uri.path()).map_err(|BadPath| IdempotencyProblem::Path)?;
    let key = match IdempotencyKey::of(&parts.headers) {
        Ok(Some(key)) => key,
        Ok(None) if rules.requires(&parts.method, &parts.headers, &path) => {
            return Err(IdempotencyProblem::KeyMissing);
        }
        Ok(None) => return Ok(None),
        Err(error) => return Err(IdempotencyProblem::KeyMalformed(error)),
    };
    let principal = principal::name_of(rules, parts).map_err(|error| match error {
        PrincipalError::Missing => IdempotencyProblem::PrincipalMissing,
        PrincipalError::Refused => IdempotencyProblem::TokenRefused,
    })?;
    // The scope holds every method that the app may use. So a request with an override header does not
    // share its key with a request without one.
    let method = target::all_methods(&parts.method, &parts.headers);
    let scope = Scope::new(&rules.realm, &principal, &method, path.normal());
    Ok(Some(ScopedKey { scope, key }))
}

/// The answer of the inner service, streamed.
fn pass_through<F, RB, E>(running: F) -> ResponseFuture<E>
where
    F: Future<Output = Result<Response<RB>, E>> + Send + 'static,
    RB: http_body::Body<Data = Bytes> + Send + 'static,
    RB::Error: Into<BoxError>,
{
    Box::pin(async move { Ok(running.await?.map(Body::new)) })
}

/// A request with a key, before its body is read.
struct KeyedRequest<S, B> {
    scoped_key: ScopedKey,
    service: S,
    parts: Parts,
    body: B,
}

/// Runs a request, unless it was run before.
fn run_once<L, S, B, RB>(
    shared: Arc<Shared<L>>,
    request: KeyedRequest<S, B>,
) -> ResponseFuture<S::Error>
where
    L: Ledger,
    S: Service<Request<Body>, Response = Response<RB>> + Send + 'static,
    S::Future: Send,
    S::Error: Send + 'static,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
    RB: http_body::Body<Data = Bytes> + Send + 'static,
    RB::Error: Into<BoxError>,
{
    Box::pin(async move {
        let KeyedRequest { scoped_key: ScopedKey { scope, key }, service, parts, body } = request;
        let rules = Arc::clone(&shared.rules);
        let (body, trailers) = match read(body, rules.body_max).await {
            Ok(read) => read,
            Err(problem) => return Ok(shared.refuse(problem)),
        };
        let fingerprint = Fingerprint::of(
            parts.uri.path_and_query().map(|target| target.as_str()),
            &body,
            &rules.fingerprint_ignore,
        );
        let request = Request::from_parts(parts, Body::whole(body, trailers));
        let IdempotencyRules { lease, ttl, quota, .. } = *rules;
        let (scope_asked, key_asked) = (scope.clone(), key.clone());
        let ask = ReserveAsk { scope: scope_asked, key: key_asked, fingerprint, lease, ttl, quota };
        let mut pending = PendingRequest { ask, service, request };

        let notify = shared.waiting.notify_of(&scope, &key);
        let deadline = run::after(rules.wait);
        let mut pause = POLL_FIRST;
        loop {
            // The waiter is registered before the ledger is asked, so that a request that ends in
            // between wakes it.
            let mut ended = pin!(notify.notified());
            ended.as_mut().enable();
            let attempt = {
                let shared = Arc::clone(&shared);
                async move { run::attempt(&shared, pending).await }
            };
            let remaining = match shared.running.spawn(attempt.in_current_span()).await {
                Ok(AttemptResult::Answered(answer)) => return answer,
                Ok(AttemptResult::Running { remaining, pending: unused }) => {
                    pending = *unused;
                    remaining
                }
                Err(error) => {
                    tracing::error!(%error, "the work for an Idempotency-Key ended unexpectedly");
                    return Ok(IdempotencyOutcome::Fresh
                        .on(answer::answered(IdempotencyProblem::Crashed.answer())));
                }
            };
            let now = Instant::now();
            if now >= deadline {
                shared.count(IdempotencyOutcome::InProgress);
                return Ok(run::in_progress(remaining));
            }
            let poll_at = deadline.min(now + pause.min(remaining));
            tokio::select! {
                () = ended => {}
                () = tokio::time::sleep_until(poll_at) => {}
            }
            pause = POLL_MAX.min(pause * 2);
        }
    })
}

/// Reads the whole body of a request.
async fn read<B>(body: B, body_max: usize) -> Result<(Bytes, Option<HeaderMap>), IdempotencyProblem>
where
    B: http_body::Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    if body.size_hint().lower() > body_max as u64 {
        return Err(IdempotencyProblem::BodyTooLarge);
    }
    match Limited::new(body, body_max).collect().await {
        Ok(read) => {
            let trailers = read.trailers().cloned();
            Ok((read.to_bytes(), trailers))
        }
        Err(error) if error.is::<LengthLimitError>() => Err(IdempotencyProblem::BodyTooLarge),
        Err(_) => Err(IdempotencyProblem::BodyUnreadable),
    }
}
