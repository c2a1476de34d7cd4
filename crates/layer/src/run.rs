//! The life of one request with a key: it is reserved, run, and what came of it is kept before it
//! is sent. All of it happens on a task of its own, so that a client that hangs up cuts nothing short.
//!
//! Every way out settles the key. What was done is kept; what surely was not frees it; and where
//! nobody knows (an error, a panic, an answer that breaks off) nothing is written and the key is in
//! progress to the end of its lease.

use std::future::poll_fn;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::failpoint;
use hapax_core::ledger::{Ledger, Reservation, ReserveAsk, Reserved, Settle, StoredAnswer};
use hapax_core::store::{Held, StoreError};
use http::{Request, Response};
use tokio::time::{Instant, sleep};
use tower::Service;

use crate::answer::{self, CollectedBody};
use crate::limits::{POLL_FIRST, POLL_MAX};
use crate::problem::IdempotencyProblem;
use crate::request_waiters::NotifyOnDrop;
use crate::service::{IdempotencyOutcome, Shared};
use crate::{Body, BoxError};

/// When the right to run a request is over at the latest; it stands among the extensions of the
/// request, beside its [`Reserved`]. Work that has not begun by then is somebody else's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeasedUntil(pub Instant);

/// A request that may have to be run, and what runs it.
pub(crate) struct PendingRequest<S> {
    pub(crate) ask: ReserveAsk,
    pub(crate) service: S,
    pub(crate) request: Request<Body>,
}

/// What came of an attempt at it.
pub(crate) enum AttemptResult<S, E> {
    /// This is the answer.
    Answered(Result<Response<Body>, E>),
    /// Somebody runs it, for at most this much longer; here it is back.
    Running { remaining: Duration, pending: Box<PendingRequest<S>> },
}

/// Reserves the key, and runs the request where it is ours to run.
pub(crate) async fn attempt<L, S, RB>(
    shared: &Shared<L>,
    pending: PendingRequest<S>,
) -> AttemptResult<S, S::Error>
where
    L: Ledger,
    S: Service<Request<Body>, Response = Response<RB>>,
    RB: http_body::Body<Data = Bytes> + Send + 'static,
    RB::Error: Into<BoxError>,
{
    // The lease begins at some time between the question and its answer, and that may take long.
    let asked_at = Instant::now();
    match shared.ledger.reserve(pending.ask.clone()).await {
        Ok(Reservation::Fresh(reserved)) => {
            shared.count(IdempotencyOutcome::Fresh);
            AttemptResult::Answered(run(shared, pending, reserved, asked_at).await)
        }
        Ok(Reservation::Replay(kept)) => {
            shared.count(IdempotencyOutcome::Replay);
            AttemptResult::Answered(Ok(IdempotencyOutcome::Replay.on(answer::replayed(kept))))
        }
        Ok(Reservation::InProgress { remaining }) => {
            AttemptResult::Running { remaining, pending: Box::new(pending) }
        }
        Ok(Reservation::Mismatch) => {
            shared.count(IdempotencyOutcome::Mismatch);
            AttemptResult::Answered(Ok(mismatch(shared)))
        }
        Ok(Reservation::OverQuota) => {
            shared.count(IdempotencyOutcome::OverQuota);
            let answer = answer::answered(IdempotencyProblem::OverQuota.answer());
            AttemptResult::Answered(Ok(IdempotencyOutcome::OverQuota.on(answer)))
        }
        Err(error) => AttemptResult::Answered(Ok(unavailable(shared, "reserving", &error))),
    }
}

async fn run<L, S, RB>(
    shared: &Shared<L>,
    pending: PendingRequest<S>,
    reserved: Reserved,
    asked_at: Instant,
) -> Result<Response<Body>, S::Error>
where
    L: Ledger,
    S: Service<Request<Body>, Response = Response<RB>>,
    RB: http_body::Body<Data = Bytes> + Send + 'static,
    RB::Error: Into<BoxError>,
{
    failpoint!("idem.after_reserve");
    let _notify_on_drop = NotifyOnDrop(shared.waiting.notify_of(&reserved.scope, &reserved.key));
    let until = later(asked_at, shared.rules.lease);
    let a_quarter = shared.rules.lease / 4;
    let most_of_the_lease = later(asked_at, a_quarter * 3);
    let PendingRequest { ask, mut service, mut request } = pending;
    if let Err(error) = poll_fn(|context| service.poll_ready(context)).await {
        // Nothing has begun.
        abandon(shared, &reserved).await;
        return Err(error);
    }
    // Reserving, or getting ready, took longer than the lease: another attempt may run by now.
    if Instant::now() >= until {
        tracing::warn!("an Idempotency-Key was reserved so late that its lease is over");
        abandon(shared, &reserved).await;
        shared.count(IdempotencyOutcome::Unavailable);
        return Ok(IdempotencyOutcome::Unavailable
            .on(answer::answered(IdempotencyProblem::Unavailable.answer())));
    }
    request.extensions_mut().insert(reserved.clone());
    request.extensions_mut().insert(LeasedUntil(until));
    let run = RunningRequest { shared, ask, reserved, until };
    let (head, body) = service.call(request).await?.into_parts();
    let chosen = head.extensions.get::<Settle>().copied();
    let settle = chosen.unwrap_or_else(|| Settle::by_status(head.status));
    let ours = |body| IdempotencyOutcome::Fresh.on(Response::from_parts(head, body));
    Ok(match settle {
        // An answer without end is settled while the key is still ours; one that only began late has
        // its time all the same.
        Settle::Keep => {
            match answer::collect(body, most_of_the_lease.max(after(a_quarter))).await {
                CollectedBody::Whole { body, trailers } => {
                    let ours = ours(Body::whole(body.clone(), trailers));
                    let kept = answer::kept(&ours, body);
                    run.keep(
                        kept.unwrap_or_else(|| IdempotencyProblem::AnswerTooLarge.answer()),
                        ours,
                    )
                    .await
                }
                CollectedBody::Unbounded(body) => {
                    run.keep(IdempotencyProblem::AnswerTooLarge.answer(), ours(Body::new(body)))
                        .await
                }
                CollectedBody::Broken(error) => {
                    tracing::warn!(%error, "an answer to a request with an Idempotency-Key broke off");
                    run.wait(
                        IdempotencyOutcome::Fresh
                            .on(answer::answered(IdempotencyProblem::BrokeOff.answer())),
                    )
                    .await
                }
            }
        }
        Settle::Free => run.free(ours(Body::new(body))).await,
        Settle::Wait => run.wait(ours(Body::new(body))).await,
    })
}

/// A request that was run.
struct RunningRequest<'a, L> {
    shared: &'a Shared<L>,
    ask: ReserveAsk,
    reserved: Reserved,
    /// When its lease is over.
    until: Instant,
}

impl<L: Ledger> RunningRequest<'_, L> {
    /// Keeps `answer`, and only then hands out `ours`.
    async fn keep(self, answer: StoredAnswer, ours: Response<Body>) -> Response<Body> {
        failpoint!("idem.after_work");
        let held = self.finish(&answer).await;
        failpoint!("idem.after_finish");
        match held {
            Ok(Held::Kept) => ours,
            Ok(Held::Lost) => self.superseded(answer, ours).await,
            Err(error) => unavailable(self.shared, "keeping an answer", &error),
        }
    }

    /// As long as the ledger fails, and the key is ours, it is asked again: what was done and is not
    /// kept would be done once more. Whether one of these was carried out after all does not matter:
    /// then the next is told that the right is lost.
    async fn finish(&self, answer: &StoredAnswer) -> Result<Held, StoreError> {
        let mut pause = POLL_FIRST;
        loop {
            match self.shared.ledger.finish(&self.reserved, answer).await {
                Err(error) if may_pass(&error) && Instant::now() + pause < self.until => {
                    tracing::warn!(%error, "an answer cannot be kept yet, trying again: {error}");
                    sleep(pause).await;
                    pause = POLL_MAX.min(pause * 2);
                }
                held => return held,
            }
        }
    }

    /// The right was lost, to an app that finished the key in its own transaction or to a later
    /// attempt: what is kept is what counts.
    async fn superseded(self, answer: StoredAnswer, ours: Response<Body>) -> Response<Body> {
        let Self { shared, ask, .. } = self;
        let asked_at = Instant::now();
        match shared.ledger.reserve(ask.clone()).await {
            Ok(Reservation::Replay(kept)) => IdempotencyOutcome::Fresh.on(answer::answered(kept)),
            Ok(Reservation::InProgress { remaining }) => in_progress(remaining),
            Ok(Reservation::Mismatch) => mismatch(shared),
            // The key is free: the app gave it up itself, or a later attempt came to nothing. What
            // succeeded must not run again all the same.
            Ok(Reservation::Fresh(reserved)) if ours.status().is_success() => {
                let until = later(asked_at, shared.rules.lease);
                let again = RunningRequest { shared, ask, reserved, until };
                match again.finish(&answer).await {
                    Ok(Held::Kept) => ours,
                    Ok(Held::Lost) => in_progress(Duration::ZERO),
                    Err(error) => unavailable(shared, "keeping an answer", &error),
                }
            }
            Ok(Reservation::Fresh(again)) => {
                abandon(shared, &again).await;
                ours
            }
            // The key is free, and may not be taken again: what was done is at least told.
            Ok(Reservation::OverQuota) => ours,
            Err(error) => unavailable(shared, "reading what is kept", &error),
        }
    }

    /// Nothing was done, unless the app finished the key in its own transaction: then that is what is
    /// sent. Otherwise `ours`, and the key is free.
    async fn free(self, ours: Response<Body>) -> Response<Body> {
        let Self { shared, ask, reserved, .. } = self;
        match shared.ledger.reserve(ask).await {
            Ok(Reservation::Replay(kept)) => {
                return IdempotencyOutcome::Fresh.on(answer::answered(kept));
            }
            Ok(Reservation::Fresh(again)) => abandon(shared, &again).await,
            Ok(Reservation::InProgress { .. } | Reservation::Mismatch | Reservation::OverQuota)
            | Err(_) => {
                abandon(shared, &reserved).await;
            }
        }
        ours
    }

    /// Nobody knows what was done, unless the app finished the key in its own transaction: then that
    /// is what is sent. Otherwise `ours`, and nothing is kept.
    async fn wait(self, ours: Response<Body>) -> Response<Body> {
        let Self { shared, ask, .. } = self;
        match shared.ledger.reserve(ask).await {
            Ok(Reservation::Replay(kept)) => IdempotencyOutcome::Fresh.on(answer::answered(kept)),
            // The lease is over, so the next one may try.
            Ok(Reservation::Fresh(again)) => {
                abandon(shared, &again).await;
                ours
            }
            Ok(Reservation::InProgress { .. } | Reservation::Mismatch | Reservation::OverQuota) => {
                ours
            }
            Err(error) => {
                // The client is told that it failed, and its retry will see what is kept.
                tracing::warn!(%error, "cannot read what is kept for an Idempotency-Key");
                ours
            }
        }
    }
}

/// Whether the same call may succeed a moment later.
fn may_pass(error: &StoreError) -> bool {
    match error {
        StoreError::Unavailable(_) | StoreError::Busy => true,
        StoreError::Closed | StoreError::Read(_) => false,
    }
}

/// Frees the key. Where that fails, its lease will.
async fn abandon<L: Ledger>(shared: &Shared<L>, reserved: &Reserved) {
    if let Err(error) = shared.ledger.abandon(reserved).await {
        tracing::warn!(%error, "cannot free an Idempotency-Key; it waits out its lease");
    }
}

/// What a retry is told while the first one runs.
pub(crate) fn in_progress(remaining: Duration) -> Response<Body> {
    IdempotencyOutcome::InProgress
        .on(answer::answered(IdempotencyProblem::InProgress(remaining).answer()))
}

fn mismatch<L>(shared: &Shared<L>) -> Response<Body> {
    let problem = IdempotencyProblem::Mismatch(shared.rules.mismatch_status);
    IdempotencyOutcome::Mismatch.on(answer::answered(problem.answer()))
}

fn unavailable<L>(shared: &Shared<L>, doing: &str, error: &StoreError) -> Response<Body> {
    tracing::error!(%error, realm = shared.rules.realm, "{doing} for an Idempotency-Key: {error}");
    shared.count(IdempotencyOutcome::Unavailable);
    IdempotencyOutcome::Unavailable.on(answer::answered(IdempotencyProblem::Unavailable.answer()))
}

/// That much later; where no clock reaches so far, as far as matters.
pub(crate) fn after(span: Duration) -> Instant {
    later(Instant::now(), span)
}

fn later(at: Instant, span: Duration) -> Instant {
    at.checked_add(span).unwrap_or_else(|| at + Duration::from_secs(365 * 24 * 60 * 60))
}
