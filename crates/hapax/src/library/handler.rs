//! Handlers in Rust: the trait a user implements, the event it is given, and how one becomes the
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

/// What is done with an event. Write it with `async fn`.
///
/// The handler is generic over the store, because its transaction is the store's own kind
/// ([`Transact::Tx`]): a closure on the one writer of SQLite, an open transaction to await on where
/// a database has a connection for each handler. Which one a handler is for, its type says.
///
/// It may be called again for the same event: after a failure, a crash, a lost lease, and within one
/// attempt where its transaction lost a race against others (a deadlock). What it
/// commits through `tx` happens once; what it does elsewhere may happen again, and
/// [`Event::idempotency_key`] is the same each time. To fail, return an error; a panic, more time
/// than the handler's timeout, and dropping `tx` are failures too.
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
    /// Our id.
    pub id: EventId,
    /// Whose it is.
    pub tenant: Tenant,
    /// Where it came in.
    pub source: SourceName,
    /// The sender's id.
    pub event_id: Box<str>,
    /// What happened.
    pub event_type: Option<String>,
    /// When it happened, as the sender says.
    pub occurred_at: Option<Timestamp>,
    /// When it first arrived.
    pub received_at: Timestamp,
    /// The resource of the handler's order, where it keeps one.
    pub resource: Option<String>,
    /// The sender's headers as `name: value` lines, secrets left out.
    pub headers: String,
    /// The bytes as the sender signed them.
    pub body: Bytes,
    /// Which attempt this is, from 1.
    pub attempt: u32,
    /// The same across attempts, restarts and replays: for whatever is done outside the database.
    pub idempotency_key: String,
    /// The object as it is now, where the handler has it fetched ([`HandlerSetup::refetch`]).
    ///
    /// [`HandlerSetup::refetch`]: crate::HandlerSetup::refetch
    pub current: Option<Arc<str>>,
}

impl Event {
    /// The body as JSON. One that does not fit never will: it goes to the dead letters at once.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T, Failure> {
        serde_json::from_slice(&self.body)
            .map_err(|error| Failure::give_up(format_args!("reading the event: {error}")))
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

/// A handler over its store, as the workers call it.
pub(super) struct HandlerAdapter<H, S> {
    pub(super) handler: H,
    pub(super) store: Arc<S>,
    /// How long its transactions may take.
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
                Ok(_) => failed(Failure::give_up("the handler returned the proof of another job")),
                Err(failure) => failed(failure),
            }
        })
    }
}

/// How often a handler whose transaction lost a race (a deadlock, say) is called again within its
/// attempt; its transaction did nothing, and others may have let go by then.
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
