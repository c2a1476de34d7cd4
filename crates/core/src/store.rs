//! The seam behind which every database stands: few methods, each one atomic business act.
//!
//! The caller decides, the store records; races are decided by the store's unique key alone. What
//! each act promises is written here once and checked for every store by one conformance suite.

use std::fmt;
use std::future::Future;
use std::net::IpAddr;
use std::sync::Arc;

use bytes::Bytes;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::key::{EventKey, SourceName, Tenant};
use crate::receipt::Receipt;

/// Our own id of an Event; the sender's is `event_id`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EventId(pub Uuid);

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// All events of one request, to be made durable together or not at all.
#[derive(Debug, Clone)]
pub struct Ingest {
    /// At least one.
    pub receipts: Vec<Receipt>,
    /// How they came.
    pub via: Via,
}

/// How an arrival came: what is told of it later.
#[derive(Debug, Clone)]
pub struct Via {
    /// When it was received, by this node's clock.
    pub received_at: Timestamp,
    /// The request id it was answered with.
    pub request_id: Uuid,
    /// Who sent it, as far as trusted proxies tell.
    pub remote: Option<IpAddr>,
    /// Which of the source's secrets verified.
    pub secret: usize,
    /// The signed timestamp.
    pub signed_at: Option<Timestamp>,
    /// The sender's headers as `name: value` lines, secrets left out.
    pub headers: Arc<str>,
}

/// What became of a Receipt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// New, or an on-time copy that promoted a late one out of review: it is ours to work on.
    Accepted(EventId),
    /// Seen before, with the same bytes.
    Duplicate(Known),
    /// Seen before, with other bytes: both are kept, nothing runs.
    Conflict(Known),
    /// New, authentic, and kept for a person to decide.
    Review(EventId),
}

impl Verdict {
    /// Our id of the event.
    pub fn id(&self) -> EventId {
        match self {
            Self::Accepted(id) | Self::Review(id) => *id,
            Self::Duplicate(known) | Self::Conflict(known) => known.id,
        }
    }
}

/// What is told of an event that was seen before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Known {
    /// Our id of it.
    pub id: EventId,
    /// Where it stands.
    pub status: Status,
    /// What its work came to.
    pub result: Option<Arc<str>>,
}

/// Where an event stands, over all of its jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Waiting for a person.
    Review,
    /// A person refused it.
    Discarded,
    /// No handler is for it.
    Ignored,
}

impl Status {
    /// The word of CONTRACT.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Review => "review",
            Self::Discarded => "discarded",
            Self::Ignored => "ignored",
        }
    }
}

/// Why an event waits for a person.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReviewReason {
    /// Signed before the window; an on-time copy promotes it.
    Late,
    /// The same signed bytes were seen under another id.
    Replay,
    /// The same derived key was seen with other bytes.
    Conflict,
}

impl ReviewReason {
    /// The word used in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Late => "late",
            Self::Replay => "replay",
            Self::Conflict => "conflict",
        }
    }
}

/// Why a store did not do what it was asked. None of these leaves anything half done.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StoreError {
    /// Nothing can be made durable now: the sender should come back.
    #[error("the store cannot write now: {0}")]
    Unavailable(Arc<str>),
    /// More is waiting than the store takes on.
    #[error("the store has too much waiting")]
    Busy,
    /// The store is going down.
    #[error("the store is closed")]
    Closed,
    /// A read failed.
    #[error("reading the store: {0}")]
    Read(Arc<str>),
}

/// Making events durable.
pub trait Store: Send + Sync + 'static {
    /// Commits every receipt of one request in one transaction and says what became of each, in
    /// their order. When this returns `Ok`, every accepted, reviewed or conflicting event is on
    /// disk. When it returns `Err`, the sender must try again and will then not be told
    /// "duplicate" of something that is not durable.
    ///
    /// Dropping the future does not undo the commit. Plain duplicates are counted behind the
    /// answer, within a second, and such counts may be lost in a crash.
    fn ingest(
        &self,
        ingest: Ingest,
    ) -> impl Future<Output = Result<Vec<Verdict>, StoreError>> + Send;

    /// Whether an event with this key is durable. A hint for logs and metrics, never for a race.
    fn knows(&self, key: &EventKey) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Whether the last write worked; `Err` says why not and since when nothing is accepted.
    fn writable(&self) -> Result<(), StoreError>;
}

/// The reads of dashboard, API and command line. They never wait for a writer.
pub trait Inspect: Send + Sync + 'static {
    /// Events that match, newest first.
    fn events(
        &self,
        filter: EventFilter,
    ) -> impl Future<Output = Result<Page<EventSummary>, StoreError>> + Send;

    /// One event by our id, or by the sender's where that is unambiguous.
    fn event(
        &self,
        name: &EventName,
    ) -> impl Future<Output = Result<Lookup<EventDetail>, StoreError>> + Send;
}

/// How a person names an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EventName {
    /// By our id.
    Ours(EventId),
    /// By the sender's.
    Theirs(Box<str>),
}

/// The answer to a name that may fit several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lookup<T> {
    /// Nothing has that name.
    None,
    /// Exactly one has.
    One(T),
    /// Several have; these are their ids.
    Ambiguous(Vec<EventId>),
}

/// Which events to list.
#[derive(Debug, Clone, Default)]
pub struct EventFilter {
    /// Of this tenant.
    pub tenant: Option<Tenant>,
    /// Of this source.
    pub source: Option<SourceName>,
    /// Of exactly this type.
    pub event_type: Option<String>,
    /// In this status.
    pub status: Option<Status>,
    /// Whose sender's id, our id or body contains this text.
    pub text: Option<String>,
    /// Received at or after.
    pub since: Option<Timestamp>,
    /// Received before.
    pub until: Option<Timestamp>,
    /// Older than this one: where the page before ended.
    pub before: Option<Cursor>,
    /// At most this many.
    pub limit: usize,
}

/// Where a page ends: opaque to everyone but the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cursor(pub u64);

/// One page of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page<T> {
    /// What is on it.
    pub items: Vec<T>,
    /// Where the next one begins, if there is one.
    pub next: Option<Cursor>,
}

/// An event in a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EventSummary {
    /// Our id.
    pub id: EventId,
    /// The sender's.
    pub event_id: String,
    /// Whose it is.
    pub tenant: String,
    /// Where it came from.
    pub source: String,
    /// What happened.
    pub event_type: Option<String>,
    /// When it happened, by the sender's clock.
    pub occurred_at: Option<Timestamp>,
    /// When it first arrived.
    pub received_at: Timestamp,
    /// Where it stands.
    pub status: Status,
    /// Why it waits for a person, if it does or did.
    pub review: Option<ReviewReason>,
    /// How often it arrived, the first time included.
    #[serde(rename = "arrival_count")]
    pub arrivals: u64,
    /// How many of those had other bytes.
    #[serde(rename = "conflict_count")]
    pub conflicts: u64,
}

/// An event with everything that is kept of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventDetail {
    /// What a list shows.
    pub summary: EventSummary,
    /// The first arrival, the newest few of the others, and every conflict that is kept, in the
    /// order they came.
    pub arrivals: Vec<ArrivalNote>,
    /// The sender's headers.
    pub headers: String,
    /// The event's bytes.
    pub body: Bytes,
}

/// One arrival of an event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ArrivalNote {
    /// What it was taken for.
    pub decision: Decision,
    /// When it came.
    pub received_at: Timestamp,
    /// The request id it was answered with.
    pub request_id: Uuid,
    /// Who sent it.
    pub remote: Option<IpAddr>,
    /// Which secret verified it.
    pub secret: usize,
    /// The signed timestamp.
    pub signed_at: Option<Timestamp>,
    /// The other bytes, where it is a conflict.
    #[serde(skip)]
    pub body: Option<Bytes>,
}

/// What one arrival was taken for: the word in `hapax-decision`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Decision {
    /// New.
    Accepted,
    /// A copy.
    Duplicate,
    /// The same id with other bytes.
    Conflict,
    /// Kept for a person.
    Review,
}

impl Decision {
    /// The word itself.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Accepted => "accepted",
            Self::Duplicate => "duplicate",
            Self::Conflict => "conflict",
            Self::Review => "review",
        }
    }
}
