//! Handlers as the domain sees them: which events they are for, where their order is read, and the
//! SQL that runs in the transaction of "done".

use std::time::Duration;

use crate::envelope::SelectorError;
use crate::job::{HandlerName, Policy};
use crate::order::OrderPolicy;
use crate::store::NewJob;

/// A handler, checked.
#[derive(Debug)]
pub struct Handler {
    /// Its name.
    pub name: HandlerName,
    /// Which types it is for.
    pub types: Types,
    /// How often and how long.
    pub policy: Policy,
    /// How long one attempt may take.
    pub timeout: Duration,
    /// How many attempts at once.
    pub concurrency: usize,
    /// Where its order is read, and how it is kept.
    pub order: Option<Order>,
}

/// Globs over event types: `payout.*`. Empty means all.
#[derive(Debug, Clone, Default)]
pub struct Types(Vec<String>);

/// Where order is read.
#[derive(Debug)]
pub struct Order {
    /// The policy.
    pub policy: OrderPolicy,
}

/// The statements of an `sql` handler, with their named parameters found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SqlProgram {
    /// In their order; the last one's first value is the receipt's `result`.
    pub statements: Vec<SqlStatement>,
}

/// One statement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SqlStatement {
    /// Its text with `?1`, `?2` … in place of the named parameters.
    pub text: String,
    /// What to bind to each, in that order.
    pub parameters: Vec<SqlParameter>,
    /// The line of the program on which it begins, from 1.
    pub line: usize,
}

/// What a named parameter stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum SqlParameter {
    Tenant,
    Source,
    EventId,
    EventType,
    Id,
    IdempotencyKey,
    Body,
    ReceivedAt,
    OccurredAt,
    Resource,
    Attempt,
    Current,
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
    pub fn job_for(&self, _event: EventView<'_>) -> Option<NewJob> {
        None
    }
}

/// A handler that cannot be used.
pub type HandlerError = SelectorError;
