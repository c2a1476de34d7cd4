//! The layer and its service: which requests are kept apart, and what each is told.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use hapax_core::ledger::Ledger;
use http::{Request, Response};
use http_body_util::BodyExt as _;
use tower::{Layer, Service};

use crate::rules::Rules;
use crate::{Body, BoxError};

/// Puts Idempotency-Keys before a service. Clones share everything.
pub struct IdempotencyLayer<L> {
    shared: Arc<Shared<L>>,
}

/// What all clones of a layer and their services share.
struct Shared<L> {
    ledger: Arc<L>,
    rules: Arc<Rules>,
}

impl<L: Ledger> IdempotencyLayer<L> {
    /// A layer that keeps its keys in `ledger` and goes by `rules`.
    pub fn new(ledger: Arc<L>, rules: Arc<Rules>) -> Self {
        Self { shared: Arc::new(Shared { ledger, rules }) }
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
pub enum Outcome {
    /// It was run.
    Fresh,
    /// It was run before: this is the answer of then.
    Replay,
    /// It is being run.
    InProgress,
    /// Its key was used for another request.
    Mismatch,
    /// It has no key, a bad one, does not say whose it is, or is too large.
    Refused,
    /// The ledger could not be asked, or could not keep the answer.
    Unavailable,
}

impl Outcome {
    /// As it is written in metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Fresh => "fresh",
            Self::Replay => "replay",
            Self::InProgress => "in_progress",
            Self::Mismatch => "mismatch",
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
    type Future = Answering<S::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        passed_on(self.inner.call(request.map(boxed)))
    }
}

type Answering<E> = Pin<Box<dyn Future<Output = Result<Response<Body>, E>> + Send>>;

/// What the inner service says, streamed.
fn passed_on<F, RB, E>(running: F) -> Answering<E>
where
    F: Future<Output = Result<Response<RB>, E>> + Send + 'static,
    RB: http_body::Body<Data = Bytes> + Send + 'static,
    RB::Error: Into<BoxError>,
{
    Box::pin(async move { Ok(running.await?.map(boxed)) })
}

/// A body as the layer passes it on: streamed, as it came.
fn boxed<B>(body: B) -> Body
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    body.map_err(Into::into).boxed_unsync()
}
