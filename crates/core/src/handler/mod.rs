//! Handlers: which events they want, what their jobs run, and how often. [`type_filter`] matches events,
//! [`order`] reads a job's place in the order, [`sql`] parses the user's statements, [`refetch`] builds
//! the URL of the current object, and [`rust`] is the trait of handlers in Rust. Nothing here runs a job.

pub mod order;
pub mod refetch;
pub mod rust;
pub mod sql;
pub mod type_filter;

use std::sync::Arc;
use std::time::Duration;

use http::Uri;

pub use self::order::Order;
pub use self::refetch::{Refetch, RefetchError, RefetchUrl};
pub use self::rust::{RustHandler, RustOutcome};
pub use self::sql::{
    Dialect, PostgresType, SqlError, SqlParameter, SqlPlace, SqlProgram, SqlStatement,
};
pub use self::type_filter::TypeFilter;
use crate::envelope::SelectorError;
use crate::job::{HandlerName, Policy, WorkLocation};
use crate::key::SourceName;
use crate::secret::Secret;
use crate::source::Source;
use crate::store::{HandlerRef, HandlerSpec, NewJob};

/// A handler whose config was checked.
#[derive(Debug)]
pub struct Handler {
    /// Its name.
    pub name: HandlerName,
    /// The way its jobs run.
    pub kind: HandlerKind,
    /// The event types that it wants.
    pub types: TypeFilter,
    /// The retry schedule and the lease.
    pub policy: Policy,
    /// How long one attempt may take. Pulled jobs have their lease instead.
    pub timeout: Duration,
    /// How many attempts run at once.
    pub concurrency: usize,
    /// The order of its jobs, if it keeps one.
    pub order: Option<Order>,
    /// The place from which the current object is fetched before an attempt, if there is one.
    pub refetch: Option<Refetch>,
}

/// The way a handler's jobs run.
#[derive(Debug, Clone)]
pub enum HandlerKind {
    /// SQL statements, in the transaction that records "done".
    Sql(Arc<SqlProgram>),
    /// A request to the user's app, with no transaction open.
    Http(HttpTarget),
    /// Nothing: the user's workers claim the jobs over the API.
    Pull,
    /// Rust code of this process, which records "done" in its own short transaction.
    Rust(Arc<dyn RustHandler>),
}

/// Where an `http` handler posts to.
#[derive(Debug, Clone)]
pub struct HttpTarget {
    /// The URL: `http` or `https`, with a host, without user or fragment.
    pub url: Uri,
    /// The scheme of the signature.
    pub sign_as: SignAs,
    /// The secret as configured.
    pub secret: Option<Secret>,
    /// Signs with `secret`, in the scheme of `sign_as`. Set if the handler has a secret.
    pub signer: Option<Arc<Source>>,
}

/// The scheme in which a request to the user's app is signed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignAs {
    /// Standard Webhooks.
    Standard,
    /// The sender's own scheme, so that code that verifies that sender keeps working.
    Provider,
}

/// The parts of an event that decide whether a handler wants it.
#[derive(Debug, Clone, Copy)]
pub struct EventView<'a> {
    /// The type.
    pub event_type: Option<&'a str>,
    /// The event's bytes.
    pub body: &'a [u8],
}

impl Handler {
    /// The job of an event for this handler, or `None` if the handler does not want it. A job whose order
    /// value is missing or cannot be compared is written as dead.
    pub fn job_for(&self, event: EventView<'_>) -> Option<NewJob> {
        if !self.types.matches(event.event_type) {
            return None;
        }
        let (place, hopeless) = match self.order.as_ref().map(|order| order.place(event.body)) {
            None => (None, None),
            Some(Ok(place)) => (Some(place), None),
            Some(Err(reason)) => (None, Some(reason)),
        };
        Some(NewJob { handler: self.name.clone(), place, hopeless })
    }

    /// The part of the config that a store needs, as a handler of `source`.
    pub fn spec(&self, source: &SourceName) -> HandlerSpec {
        HandlerSpec {
            handler: HandlerRef { source: source.clone(), handler: self.name.clone() },
            policy: self.policy.clone(),
            order: self.order.as_ref().map(|order| order.rule.clone()),
            workplace: match self.kind {
                HandlerKind::Sql(_) | HandlerKind::Rust(_) => WorkLocation::Inside,
                HandlerKind::Http(_) => WorkLocation::Called,
                HandlerKind::Pull => WorkLocation::Pulled,
            },
        }
    }
}

impl HttpTarget {
    /// The signer of a request about an event of `source`. `None` if the request is sent unsigned.
    pub fn signer<'a>(&'a self, source: &'a Source) -> Option<&'a Source> {
        match (self.sign_as, &self.signer) {
            (SignAs::Standard | SignAs::Provider, Some(signer)) => Some(signer),
            (SignAs::Provider, None) => Some(source),
            (SignAs::Standard, None) => None,
        }
    }
}

/// Why a handler is refused: a type or a selector is wrong. `field` is the config key below
/// `[sources.NAME.handlers.H]`.
pub type HandlerError = SelectorError;
