//! Handlers in Rust: the trait that a user implements, its event, and the adapter to the
//! [`RustHandler`] that the workers run.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::handler::{RustHandler, RustOutcome};
use hapax_core::store::{Claim, ClaimedEvent, EventId};
use hapax_core::{SourceName, Tenant, Timestamp};
use hapax_store::{Committed, Failure, SqliteStore, Transact};
use serde::de::DeserializeOwned;

/// A handler of events. Implement it with `async fn`.
///
/// The trait is generic over the store, because each store has its own kind of transaction
/// ([`Transact::Tx`]): a closure that runs on SQLite's one writer, or an open transaction on a PostgreSQL
/// connection.
///
/// A handler may be called again for the same event: after a failure, a crash or a lost lease, and
/// within one attempt if its transaction lost a race (a deadlock). Changes that the handler commits
/// through `tx` happen once. Other effects may happen again; [`Event::idempotency_key`] is the same
/// each time. To fail, return an error. A panic, a timeout and dropping `tx` are failures too.
pub trait Handler<S: Transact = SqliteStore>: Send + Sync + 'static {
    /// One attempt.
    fn handle(
        &self,
        event: Event,
        tx: S::Tx,
    ) -> impl Future<Output = Result<Committed, Failure>> + Send;
}

/// A closure as a handler; see [`handler_fn`].
pub struct HandlerFn<F>(F);

/// Makes a handler of `async` code: `handler_fn(|event, tx: Tx| async move { … })`.
pub fn handler_fn<F>(handle: F) -> HandlerFn<F> {
    HandlerFn(handle)
}

impl<S, F, R> Handler<S> for HandlerFn<F>
where
    S: Transact,
    F: Fn(Event, S::Tx) -> R + Send + Sync + 'static,
    R: Future<Output = Result<Committed, Failure>> + Send + 'static,
{
    fn handle(
        &self,
        event: Event,
        tx: S::Tx,
    ) -> impl Future<Output = Result<Committed, Failure>> + Send {
        (self.0)(event, tx)
    }
}

impl<F> fmt::Debug for HandlerFn<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HandlerFn")
    }
}

/// A verified event, durable, and claimed for this attempt.
#[derive(Debug, Clone)]
pub struct Event {
    /// Hapax's id.
    pub id: EventId,
    /// The tenant.
    pub tenant: Tenant,
    /// The source.
    pub source: SourceName,
    /// The sender's id.
    pub event_id: Box<str>,
    /// The type.
    pub event_type: Option<String>,
    /// When it happened, according to the sender.
    pub occurred_at: Option<Timestamp>,
    /// When it first arrived.
    pub received_at: Timestamp,
    /// The resource, if the handler has an order.
    pub resource: Option<String>,
    /// The sender's headers as `name: value` lines, without secrets.
    pub headers: String,
    /// The bytes as the sender signed them.
    pub body: Bytes,
    /// The number of this attempt, from 1.
    pub attempt: u32,
    /// A key that stays the same across attempts, restarts and replays. Use it for effects outside the database.
    pub idempotency_key: String,
    /// The current object, if the handler has a refetch ([`HandlerSetup::refetch`]).
    ///
    /// [`HandlerSetup::refetch`]: crate::HandlerSetup::refetch
    pub current: Option<Arc<str>>,
}

impl Event {
    /// Parses the body as JSON. If that fails, the job becomes a dead letter at once: a retry would not help.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T, Failure> {
        serde_json::from_slice(&self.body)
            .map_err(|error| Failure::give_up(format_args!("cannot parse the event: {error}")))
    }
}

impl Event {
    fn of(claim: &Claim, current: Option<Arc<str>>) -> Self {
        let ClaimedEvent { id, key, event_type, occurred_at, received_at, resource, .. } =
            claim.event.clone();
        Self {
            id,
            tenant: key.tenant,
            source: key.source,
            event_id: key.event_id,
            event_type,
            occurred_at,
            received_at,
            resource,
            headers: claim.event.headers.clone(),
            body: claim.event.body.clone(),
            attempt: claim.attempt,
            idempotency_key: claim.idempotency_key.clone(),
            current,
        }
    }
}

/// Adapts a handler and its store to the [`RustHandler`] that the workers call.
pub(super) struct HandlerAdapter<H, S> {
    pub(super) handler: H,
    pub(super) store: Arc<S>,
    /// The timeout of its transactions.
    pub(super) transaction_timeout: Duration,
}

impl<S: Transact, H: Handler<S>> RustHandler for HandlerAdapter<H, S> {
    fn work(
        &self,
        claim: Claim,
        current: Option<Arc<str>>,
    ) -> Pin<Box<dyn Future<Output = RustOutcome> + Send + '_>> {
        Box::pin(async move {
            let event = Event::of(&claim, current);
            let mut races = 0;
            let ended = loop {
                let tx = self.store.right(&claim, self.transaction_timeout);
                match self.handler.handle(event.clone(), tx).await {
                    Err(failure) if failure.is_race() && races < RACES_MAX => races += 1,
                    ended => break ended,
                }
            };
            match ended {
                Ok(committed) if committed.is_of(&claim) => RustOutcome::Committed,
                Ok(_) => {
                    failed(Failure::give_up("the handler returned the `Committed` of another job"))
                }
                Err(failure) => failed(failure),
            }
        })
    }
}

/// How often a handler is called again within one attempt after its transaction lost a race, such as a
/// deadlock. That transaction was rolled back.
const RACES_MAX: u32 = 3;

impl<H, S> fmt::Debug for HandlerAdapter<H, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HandlerAdapter")
    }
}

fn failed(failure: Failure) -> RustOutcome {
    let error = failure.error().to_owned();
    match failure.retry() {
        Some(retry) => RustOutcome::Failed { error, retry },
        None => RustOutcome::Lost { error },
    }
}
