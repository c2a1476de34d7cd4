//! The life cycle of one request with a key: its key is reserved, the request runs, and its answer is
//! stored before it is sent. These steps run on their own task, so that a client that hangs up interrupts
//! nothing.
//!
//! Every outcome settles the key. If the work was done, the answer is stored. If the work was certainly
//! not done, the key is freed. If it is unknown whether the work was done (an error, a panic, an
//! interrupted
//! answer), nothing is written, and the key stays in progress until its lease ends.

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

/// When the right to run a request ends. This value is in the extensions of the request, next to
/// its [`Reserved`]. Work that has not begun by this time must not begin, because another attempt
/// may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeasedUntil(pub Instant);

/// A request that may have to be run, and the service that runs it.
pub(crate) struct PendingRequest<S> {
    pub(crate) ask: ReserveAsk,
    pub(crate) service: S,
    pub(crate) request: Request<Body>,
}

/// The result of an attempt.
pub(crate) enum AttemptResult<S, E> {
    /// The answer.
    Answered(Result<Response<Body>, E>),
    /// Another attempt runs the request, for at most `remaining`. Returns the request.
    Running { remaining: Duration, pending: Box<PendingRequest<S>> },
}

/// Reserves the key, and runs the request if the key was free.
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
    // The lease begins at some time during this call, and the call may take long.
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
        // The service has done nothing.
        abandon(shared, &reserved).await;
        return Err(error);
    }
    // Reserving, or waiting for the service, took longer than the lease: another attempt may run by now.
    if Instant::now() >= until {
        tracing::warn!("the lease of an Idempotency-Key ended before its request could run");
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
        // An endless stream must be settled before the lease ends. An answer that begins late still gets a
        // quarter of the lease.
        Settle::Keep => {
            match answer::collect(body, most_of_the_lease.max(after(a_quarter))).await {
                CollectedBody::Whole { body, trailers } => {
                    let ours = ours(Body::whole(body.clone(), trailers));
                    let kept = answer::kept(&ours, body);
                    run.store_answer(
                        kept.unwrap_or_else(|| IdempotencyProblem::AnswerTooLarge.answer()),
                        ours,
                    )
                    .await
                }
                CollectedBody::Unbounded(body) => {
                    run.store_answer(
                        IdempotencyProblem::AnswerTooLarge.answer(),
                        ours(Body::new(body)),
                    )
                    .await
                }
                CollectedBody::Broken(error) => {
                    tracing::warn!(%error, "the answer to a request with an Idempotency-Key was interrupted");
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

/// A request whose work has run.
struct RunningRequest<'a, L> {
    shared: &'a Shared<L>,
    ask: ReserveAsk,
    reserved: Reserved,
    /// When its lease ends.
    until: Instant,
}

impl<L: Ledger> RunningRequest<'_, L> {
    /// Stores `answer`, and returns `ours` only after that.
    async fn store_answer(self, answer: StoredAnswer, ours: Response<Body>) -> Response<Body> {
        failpoint!("idem.after_work");
        let held = self.finish(&answer).await;
        failpoint!("idem.after_finish");
        match held {
            Ok(Held::Kept) => ours,
            Ok(Held::Lost) => self.superseded(answer, ours).await,
            Err(error) => unavailable(self.shared, "storing an answer", &error),
        }
    }

    /// Stores the answer, and retries while the ledger fails and the lease lasts: work whose answer is not
    /// stored would be done again. If a failed call did store the answer, the next call returns `Lost`.
    async fn finish(&self, answer: &StoredAnswer) -> Result<Held, StoreError> {
        let mut pause = POLL_FIRST;
        loop {
            match self.shared.ledger.finish(&self.reserved, answer).await {
                Err(error) if may_pass(&error) && Instant::now() + pause < self.until => {
                    tracing::warn!(%error, "cannot store an answer yet, trying again: {error}");
                    sleep(pause).await;
                    pause = POLL_MAX.min(pause * 2);
                }
                held => return held,
            }
        }
    }

    /// Answers a request whose fence was lost, to an app that finished the key in its own transaction or to
    /// a later attempt. If an answer is stored, it is sent instead of `ours`.
    async fn superseded(self, answer: StoredAnswer, ours: Response<Body>) -> Response<Body> {
        let Self { shared, ask, .. } = self;
        let asked_at = Instant::now();
        match shared.ledger.reserve(ask.clone()).await {
            Ok(Reservation::Replay(kept)) => IdempotencyOutcome::Fresh.on(answer::answered(kept)),
            Ok(Reservation::InProgress { remaining }) => in_progress(remaining),
            Ok(Reservation::Mismatch) => mismatch(shared),
            // The key is free: the app abandoned it, or a later attempt did. A successful request must
            // still not run again, so its answer is stored under a new fence.
            Ok(Reservation::Fresh(reserved)) if ours.status().is_success() => {
                let until = later(asked_at, shared.rules.lease);
                let again = RunningRequest { shared, ask, reserved, until };
                match again.finish(&answer).await {
                    Ok(Held::Kept) => ours,
                    Ok(Held::Lost) => in_progress(Duration::ZERO),
                    Err(error) => unavailable(shared, "storing an answer", &error),
                }
            }
            Ok(Reservation::Fresh(again)) => {
                abandon(shared, &again).await;
                ours
            }
            // The key is free and cannot be reserved again. The client still gets the answer.
            Ok(Reservation::OverQuota) => ours,
            Err(error) => unavailable(shared, "reading a stored answer", &error),
        }
    }

    /// Answers a request that did nothing: the key is freed and `ours` is sent. If the app finished the
    /// key in its own transaction, the stored answer is sent instead.
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

    /// Answers a request whose outcome is unknown: nothing is stored and `ours` is sent. If the app
    /// finished the key in its own transaction, the stored answer is sent instead.
    async fn wait(self, ours: Response<Body>) -> Response<Body> {
        let Self { shared, ask, .. } = self;
        match shared.ledger.reserve(ask).await {
            Ok(Reservation::Replay(kept)) => IdempotencyOutcome::Fresh.on(answer::answered(kept)),
            // The lease has ended, so the next attempt may run.
            Ok(Reservation::Fresh(again)) => {
                abandon(shared, &again).await;
                ours
            }
            Ok(Reservation::InProgress { .. } | Reservation::Mismatch | Reservation::OverQuota) => {
                ours
            }
            Err(error) => {
                // The client gets the failure, and its retry gets the stored answer, if there is one.
                tracing::warn!(%error, "cannot read the stored answer of an Idempotency-Key");
                ours
            }
        }
    }
}

/// Whether the same call may succeed later.
fn may_pass(error: &StoreError) -> bool {
    match error {
        StoreError::Unavailable(_) | StoreError::Busy => true,
        StoreError::Closed | StoreError::Read(_) => false,
    }
}

/// Frees the key. If the call fails, the key is free when its lease ends.
async fn abandon<L: Ledger>(shared: &Shared<L>, reserved: &Reserved) {
    if let Err(error) = shared.ledger.abandon(reserved).await {
        tracing::warn!(%error, "cannot free an Idempotency-Key; it stays in progress until its lease ends");
    }
}

/// The answer to a retry while the first attempt runs.
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

/// The time after `span`. A span beyond the clock's range becomes a year.
pub(crate) fn after(span: Duration) -> Instant {
    later(Instant::now(), span)
}

fn later(at: Instant, span: Duration) -> Instant {
    at.checked_add(span).unwrap_or_else(|| at + Duration::from_secs(365 * 24 * 60 * 60))
}
