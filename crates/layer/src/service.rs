//! The layer and its service: which requests are kept apart, and what each is told.

use std::fmt;
use std::future::ready;
use std::mem;
use std::pin::{Pin, pin};
use std::sync::Arc;
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
use crate::rules::Rules;
use crate::run::{self, AttemptResult, PendingRequest};
use crate::target::{self, BadPath, Path, is_passed_on};
use crate::{Body, BoxError};

/// Puts Idempotency-Keys before a service. Clones share everything.
pub struct IdempotencyLayer<L> {
    shared: Arc<Shared<L>>,
}

impl<L: Ledger> IdempotencyLayer<L> {
    /// A layer that keeps its keys in `ledger` and goes by `rules`.
    pub fn new(ledger: Arc<L>, rules: Arc<Rules>) -> Self {
        let running = TaskTracker::new();
        // So that waiting for it ends whenever nothing runs.
        running.close();
        Self { shared: Arc::new(Shared { ledger, rules, waiting: RequestWaiters::new(), running }) }
    }

    /// Returns when nothing runs any more, also of what clients did not wait for: between the last
    /// request and the end of the process.
    pub async fn drained(&self) {
        self.shared.running.wait().await;
    }
}

/// What all clones of a layer and their services share.
pub(crate) struct Shared<L> {
    pub(crate) ledger: Arc<L>,
    pub(crate) rules: Arc<Rules>,
    pub(crate) waiting: RequestWaiters,
    running: TaskTracker,
}

impl<L> Shared<L> {
    pub(crate) fn count(&self, outcome: IdempotencyOutcome) {
        let labels = [("realm", self.rules.realm.clone()), ("outcome", outcome.as_str().into())];
        metrics::counter!("hapax_idempotency_total", &labels).increment(1);
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

/// A service whose work is done once for each key.
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

/// What the layer made of a request. It stands in the extensions of every answer to a request that
/// has a key or needs one, and is the label `outcome` of `hapax_idempotency_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IdempotencyOutcome {
    /// It was run.
    Fresh,
    /// It was run before: this is the answer of then.
    Replay,
    /// It is being run.
    InProgress,
    /// Its key was used for another request.
    Mismatch,
    /// Its key is new, and its caller has as much kept as it may.
    OverQuota,
    /// It has no key, a bad one, does not say whose it is, or is too large.
    Refused,
    /// The ledger could not be asked, or could not keep the answer.
    Unavailable,
}

impl IdempotencyOutcome {
    pub(crate) fn on(self, mut response: Response<Body>) -> Response<Body> {
        response.extensions_mut().insert(self);
        response
    }

    /// As it is written in metrics and logs.
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
                // The one that is ready is used up, and a fresh one stays here.
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

/// A key, and within which it means one request.
struct ScopedKey {
    scope: Scope,
    key: IdempotencyKey,
}

/// What is known before the body is read. `None`: nothing is to be kept of it.
fn admit(rules: &Rules, parts: &Parts) -> Result<Option<ScopedKey>, IdempotencyProblem> {
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
    // All that the app may take it for: what a header put in the place of its method is another request.
    let method = target::all_methods(&parts.method, &parts.headers);
    let scope = Scope::new(&rules.realm, &principal, &method, path.normal());
    Ok(Some(ScopedKey { scope, key }))
}

/// What the inner service says, streamed.
fn pass_through<F, RB, E>(running: F) -> ResponseFuture<E>
where
    F: Future<Output = Result<Response<RB>, E>> + Send + 'static,
    RB: http_body::Body<Data = Bytes> + Send + 'static,
    RB::Error: Into<BoxError>,
{
    Box::pin(async move { Ok(running.await?.map(Body::new)) })
}

/// A request with a key, whose body is still to be read.
struct KeyedRequest<S, B> {
    scoped_key: ScopedKey,
    service: S,
    parts: Parts,
    body: B,
}

/// Runs a request unless it was run before.
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
        let Rules { lease, ttl, quota, .. } = *rules;
        let (scope_asked, key_asked) = (scope.clone(), key.clone());
        let ask = ReserveAsk { scope: scope_asked, key: key_asked, fingerprint, lease, ttl, quota };
        let mut pending = PendingRequest { ask, service, request };

        let notify = shared.waiting.notify_of(&scope, &key);
        let deadline = run::after(rules.wait);
        let mut pause = POLL_FIRST;
        loop {
            // Listening begins before the look: an end in between is heard.
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

/// All of a request's body.
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
