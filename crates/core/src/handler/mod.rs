//! Handlers as the domain sees them: which events they are for, what their jobs run, and how often.
//! [`type_filter`] matches events, [`order`] reads a job's place in the order, [`sql`] takes the user's
//! statements apart, [`refetch`] says where the current object is, [`rust`] is the seam to handlers in
//! Rust. Nothing here runs anything.

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
use crate::job::{HandlerName, Policy, Workplace};
use crate::key::SourceName;
use crate::secret::Secret;
use crate::source::Source;
use crate::store::{HandlerRef, HandlerSpec, NewJob};

/// A handler, checked.
#[derive(Debug)]
pub struct Handler {
    /// Its name.
    pub name: HandlerName,
    /// What its jobs run.
    pub kind: HandlerKind,
    /// Which types it is for.
    pub types: TypeFilter,
    /// How often and how long.
    pub policy: Policy,
    /// How long one attempt may take. Work that is pulled has its lease instead.
    pub timeout: Duration,
    /// How many attempts at once.
    pub concurrency: usize,
    /// Where its order is read, and how it is kept.
    pub order: Option<Order>,
    /// Where the current object is fetched before the work; `None` where the event is enough.
    pub refetch: Option<Refetch>,
}

/// What a handler's jobs run.
#[derive(Debug, Clone)]
pub enum HandlerKind {
    /// Statements, in the transaction of "done".
    Sql(Arc<SqlProgram>),
    /// A request to the user's app, with no transaction open.
    Http(HttpTarget),
    /// Nothing here: the user's workers lease them.
    Pull,
    /// Rust code of this process, which records "done" in its own short transaction.
    Rust(Arc<dyn RustHandler>),
}

/// Where an `http` handler posts to.
#[derive(Debug, Clone)]
pub struct HttpTarget {
    /// The URL: `http` or `https`, with a host, without user or fragment.
    pub url: Uri,
    /// In whose scheme it is signed.
    pub sign_as: SignAs,
    /// The secret as configured.
    pub secret: Option<Secret>,
    /// What signs with `secret`, in the scheme of `sign_as`; set wherever there is a secret.
    pub signer: Option<Arc<Source>>,
}

/// In whose scheme a request to the user's app is signed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignAs {
    /// Standard Webhooks.
    Standard,
    /// The sender's own, so that code which verifies that sender keeps working.
    Provider,
}

/// What a handler looks at to decide whether an event is for it.
#[derive(Debug, Clone, Copy)]
pub struct EventView<'a> {
    /// What happened.
    pub event_type: Option<&'a str>,
    /// The event's bytes.
    pub body: &'a [u8],
}

impl Handler {
    /// The job that an event promises to this handler, if it is for it. One whose order value is
    /// missing or cannot be compared is hopeless: it is written and buried at once.
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

    /// What a store needs to know of it, as a handler of `source`.
    pub fn spec(&self, source: &SourceName) -> HandlerSpec {
        HandlerSpec {
            handler: HandlerRef { source: source.clone(), handler: self.name.clone() },
            policy: self.policy.clone(),
            order: self.order.as_ref().map(|order| order.rule.clone()),
            workplace: match self.kind {
                HandlerKind::Sql(_) | HandlerKind::Rust(_) => Workplace::Inside,
                HandlerKind::Http(_) => Workplace::Called,
                HandlerKind::Pull => Workplace::Pulled,
            },
        }
    }
}

impl HttpTarget {
    /// What signs a request about an event that came in through `source`; `None` where it is sent
    /// unsigned.
    pub fn signer<'a>(&'a self, source: &'a Source) -> Option<&'a Source> {
        match (self.sign_as, &self.signer) {
            (SignAs::Standard | SignAs::Provider, Some(signer)) => Some(signer),
            (SignAs::Provider, None) => Some(source),
            (SignAs::Standard, None) => None,
        }
    }
}

/// A handler that cannot be used: a type or a selector of it is wrong. `field` is the config key
/// below `[sources.NAME.handlers.H]`.
pub type HandlerError = SelectorError;
