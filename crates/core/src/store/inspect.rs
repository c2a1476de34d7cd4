//! Reads for operators: lists, details and statistics.

use std::future::Future;
use std::net::IpAddr;
use std::time::Duration;

use bytes::Bytes;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{EventId, HandlerAnswer, HandlerRef, ReviewReason, Status, StoreError, Verifier};
use crate::delivery::MessageStatus;
use crate::job::{Fence, HandlerName, JobId, Phase, Progress};
use crate::key::{KeyHash, SourceName, Tenant};
use crate::limits::LIST_READ_MAX;

/// The reads of the dashboard, the API and the command line. They never wait for a writer.
pub trait Inspect: Send + Sync + 'static {
    /// Writes the copies that are counted in memory only. Reads after this include every copy that was
    /// answered before it. A store that writes each copy at once has nothing to do.
    fn flush_copies(&self) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }

    /// Events that match, newest first. The page ends when it is full, or at the filter's [`ReadBound`]: then
    /// it says how far back it searched, and its cursor continues the search from there.
    fn events(
        &self,
        filter: EventFilter,
    ) -> impl Future<Output = Result<Page<EventSummary>, StoreError>> + Send;

    /// One event by our id, or by the sender's if that is unambiguous.
    fn event(
        &self,
        name: &EventName,
    ) -> impl Future<Output = Result<Lookup<EventDetail>, StoreError>> + Send;

    /// The events that belong to an id. The id is that of a request in which they first arrived or arrived as
    /// one of the newest copies, or that of a message that their handlers published. At most
    /// [`TRACED_EVENTS_MAX`](crate::limits::TRACED_EVENTS_MAX).
    fn events_traced_by(
        &self,
        id: &str,
    ) -> impl Future<Output = Result<Vec<EventId>, StoreError>> + Send;

    /// Jobs that match, newest first, bounded like [`Inspect::events`].
    fn jobs(
        &self,
        filter: JobFilter,
    ) -> impl Future<Output = Result<Page<JobDetail>, StoreError>> + Send;

    /// The dead letters that tenant, source and handler of the filter name, by their error. Dead letters are
    /// read from the newest event to the oldest, within the bound of the filter. At most `limit` groups are
    /// returned, the largest first.
    fn dead_groups(
        &self,
        filter: JobFilter,
    ) -> impl Future<Output = Result<DeadGroups, StoreError>> + Send;

    /// One job.
    fn job(&self, id: JobId) -> impl Future<Output = Result<Option<JobDetail>, StoreError>> + Send;

    /// The backlog of each handler over all of its tenants, sorted by source and name. There is one
    /// entry for every handler with an open or dead job, even if no node has that handler in its config.
    /// The cost does not grow with the backlog: only indexes are read, and counting stops at
    /// [`LANE_COUNT_MAX`](crate::limits::LANE_COUNT_MAX).
    fn lanes(&self) -> impl Future<Output = Result<Vec<LaneState>, StoreError>> + Send;

    /// The handlers that operators have paused, sorted by source and name.
    fn paused_handlers(
        &self,
    ) -> impl Future<Output = Result<Vec<PausedHandler>, StoreError>> + Send;

    /// How many events of each source wait for a decision before any of their jobs is written, sorted by
    /// source. Jobs that wait for one are in [`Inspect::lanes`]. Reads an index only, and stops
    /// counting at [`LANE_COUNT_MAX`](crate::limits::LANE_COUNT_MAX) over all sources.
    fn in_review(&self) -> impl Future<Output = Result<Vec<(SourceName, u64)>, StoreError>> + Send;

    /// Events that arrived more than once, were first received at or after `ask.since` and still have their body,
    /// newest first. If at most `ask.limit` events match, all are returned. Otherwise about that many are, spread
    /// evenly over the span. If the span has more than [`COPIES_READ_MAX`](crate::limits::COPIES_READ_MAX) copies,
    /// the newest of them are sampled.
    fn sample(
        &self,
        ask: SampleAsk,
    ) -> impl Future<Output = Result<EventSample, StoreError>> + Send;

    /// The disk space that the store uses. The cost does not grow with the database.
    fn storage(&self) -> impl Future<Output = Result<StorageUse, StoreError>> + Send;
}

/// The disk space that a store uses.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StorageUse {
    /// The size of the database, without its write-ahead log.
    pub database_bytes: u64,
    /// The part of this space that deleted rows left free for new ones; `None` if that is not
    /// known.
    pub free_bytes: Option<u64>,
    /// The log of writes that are not yet in the database file; `None` if the database keeps it elsewhere.
    pub log_bytes: Option<u64>,
    /// The tables with their indexes, the largest first; empty if the sizes are not known.
    pub tables: Vec<TableUse>,
}

/// The disk space that one table uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableUse {
    /// Its name.
    pub name: String,
    /// The table and its indexes.
    pub bytes: u64,
    /// An estimate of its rows.
    pub rows: u64,
}

/// The backlog of one handler. Every number stops at
/// [`LANE_COUNT_MAX`](crate::limits::LANE_COUNT_MAX), which means "this many or more".
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaneState {
    /// The handler.
    pub handler: HandlerRef,
    /// The earliest time at which a ready job is due or a lease ends. A time in the past shows how long
    /// the oldest due job has waited. `None` if nothing is ready or leased.
    pub oldest_due: Option<Timestamp>,
    /// Jobs that can be claimed, now or when they are due.
    pub ready: u64,
    /// Jobs that are claimed.
    pub leased: u64,
    /// Jobs that wait for an earlier version of their resource.
    pub held: u64,
    /// Jobs that wait while another job of their resource runs.
    pub parked: u64,
    /// Jobs in review.
    pub review: u64,
    /// Dead jobs.
    pub dead: u64,
}

impl LaneState {
    /// Jobs that have not ended. Like its parts, the sum may mean "this many or more".
    pub fn open(&self) -> u64 {
        self.ready + self.leased + self.held + self.parked + self.review
    }
}

/// A handler that an operator has paused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PausedHandler {
    /// The handler.
    pub handler: HandlerRef,
    /// Since when.
    pub since: Timestamp,
    /// The name of the token that was used.
    pub who: String,
    /// The reason.
    pub reason: Option<String>,
}

/// Which events to sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleAsk {
    /// First received at or after this.
    pub since: Timestamp,
    /// The most events to return, at least one. If more match, a sample of them is returned.
    pub limit: usize,
}

/// Events of a span of time that arrived more than once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventSample {
    /// How many were found. If this number is larger than the length of `events`, there may be more still.
    pub total: u64,
    /// All events of the span, or a sample of them.
    pub events: Vec<SampledEvent>,
}

impl EventSample {
    /// Whether `events` is only a sample.
    pub fn is_partial(&self) -> bool {
        (self.events.len() as u64) < self.total
    }
}

/// One event of a sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SampledEvent {
    /// The event as in a list.
    pub summary: EventSummary,
    /// The times of the arrivals that [`EventDetail::arrivals`] would hold, in order.
    pub arrived_at: Vec<Timestamp>,
}

/// Which jobs to list.
#[derive(Debug, Clone, Default)]
pub struct JobFilter {
    /// Of this tenant.
    pub tenant: Option<Tenant>,
    /// Of this source.
    pub source: Option<SourceName>,
    /// Of this handler.
    pub handler: Option<HandlerName>,
    /// In this phase.
    pub phase: Option<Phase>,
    /// Whose last attempt ended with exactly this error. An empty error is that of jobs without one.
    pub error: Option<String>,
    /// Only jobs in a run that an operator forced.
    pub forced: bool,
    /// Only entries older than this: the end of the previous page.
    pub before: Option<Cursor>,
    /// The most jobs to return.
    pub limit: usize,
    /// How much the page may read.
    pub bound: ReadBound,
}

/// Dead letters by their error.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeadGroups {
    /// The largest groups. Groups of one size are sorted by the newest dead letter, then by error.
    pub groups: Vec<DeadGroup>,
    /// The number of dead letters that were read and match, those of other groups included.
    pub letters: u64,
    /// The number of different errors among them.
    pub errors: u64,
    /// If the bound ended the search: everything since this time was read.
    pub searched_to: Option<Timestamp>,
}

/// Dead letters with the same error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeadGroup {
    /// The error of the last attempt; empty if none is known.
    pub error: String,
    /// How many there are.
    pub count: u64,
    /// When the first of them ended.
    pub first: Timestamp,
    /// When the last of them ended.
    pub last: Timestamp,
}

/// A job with its attempts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct JobDetail {
    /// Our id.
    pub id: JobId,
    /// The event.
    pub event: EventId,
    /// The sender's id of the event.
    pub event_id: String,
    /// The tenant.
    pub tenant: String,
    /// The source.
    pub source: String,
    /// The handler.
    pub handler: HandlerName,
    /// The phase.
    #[serde(rename = "status")]
    pub phase: Phase,
    /// The number of its run.
    pub run: u32,
    /// Its attempts and steps so far.
    #[serde(flatten)]
    pub progress: Progress,
    /// The fence.
    pub fence: Fence,
    /// When it is due, or when its lease ends.
    pub due_at: Option<Timestamp>,
    /// The result.
    pub result: Option<String>,
    /// Why the last attempt failed.
    pub error: Option<String>,
    /// When it ended.
    pub finished_at: Option<Timestamp>,
    /// The `idempotency-key` that handlers and apps get.
    pub idempotency_key: String,
    /// The resource that it is ordered by.
    pub resource: Option<String>,
    /// Attempts that ended, oldest first.
    pub attempts: Vec<AttemptNote>,
}

/// One attempt that ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AttemptNote {
    /// The number of the run.
    pub run: u32,
    /// The number of the attempt.
    pub attempt: u32,
    /// When it began.
    pub started_at: Timestamp,
    /// When it ended. `None` for a lost attempt whose end is not known.
    pub ended_at: Option<Timestamp>,
    /// `done`, `failed` or `lost`.
    pub outcome: String,
    /// Why it failed.
    pub error: Option<String>,
    /// The worker that ran it.
    pub worker: String,
    /// The app's answer, if an app answered.
    #[serde(flatten)]
    pub answer: Option<HandlerAnswer>,
}

/// How an operator names an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EventName {
    /// By our id.
    Ours(EventId),
    /// By the sender's id.
    Theirs(Box<str>),
}

/// The result of a lookup by a name that may match several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lookup<T> {
    /// No match.
    None,
    /// Exactly one match.
    One(T),
    /// Several matches, by their ids.
    Ambiguous(Vec<EventId>),
}

/// Which events to list.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventFilter {
    /// Of this tenant.
    pub tenant: Option<Tenant>,
    /// Of this source.
    pub source: Option<SourceName>,
    /// Only events of exactly this type.
    pub event_type: Option<String>,
    /// In this status.
    pub status: Option<Status>,
    /// Only events that this text finds.
    pub text: Option<TextSearch>,
    /// Only events that were received at or after this time.
    pub since: Option<Timestamp>,
    /// Received before.
    pub until: Option<Timestamp>,
    /// Only events that were received before this time and are not finished: the status is not
    /// [final](Status::is_final). Dead events and events in review are not finished.
    pub unfinished_since: Option<Timestamp>,
    /// Only events that arrived more than once.
    #[serde(skip)]
    pub has_copies: bool,
    /// Only entries older than this: the end of the previous page.
    #[serde(skip)]
    pub before: Option<Cursor>,
    /// The most events to return.
    #[serde(skip)]
    pub limit: usize,
    /// How much the page may read.
    #[serde(skip)]
    pub bound: ReadBound,
}

/// A text that operators search for. An event is an exact match if the text is one of its ids or one of its
/// indexed values. A list shows the exact matches first, then the events whose sender's id or body contains
/// the text. Both parts are sorted from new to old.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TextSearch {
    /// The text.
    pub text: String,
    /// The events that have the text as an id: of the event itself, a job, a request, a message or a
    /// delivery.
    pub named: Vec<EventId>,
    /// The hashes of the text as an indexed value ([`SearchFields::hashes`](crate::search::SearchFields::hashes)).
    pub values: Vec<KeyHash>,
    /// The sources whose bodies may be searched; `None` is all of them.
    pub sources: Option<Vec<SourceName>>,
}

impl TextSearch {
    /// A search for the text in ids and bodies.
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), ..Self::default() }
    }

    /// Whether there can be exact matches.
    pub fn is_exact(&self) -> bool {
        !self.named.is_empty() || !self.values.is_empty()
    }
}

impl From<&str> for TextSearch {
    fn from(text: &str) -> Self {
        Self::new(text)
    }
}

/// How much one page of a list may read before it returns what it found. Every page reads at least one row,
/// so that a search always advances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadBound {
    /// A time for which the page may read.
    Time(Duration),
    /// About this many rows: a bound that does not depend on the machine.
    Rows(usize),
}

impl Default for ReadBound {
    fn default() -> Self {
        Self::Time(LIST_READ_MAX)
    }
}

/// The end of a page. Only the store knows the meaning of the number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cursor(pub u128);

/// One page of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page<T> {
    /// The items of the page.
    pub items: Vec<T>,
    /// The start of the next page, if there is one.
    pub next: Option<Cursor>,
    /// Set if the page ended at its [`ReadBound`] before it was full: everything since this time was searched.
    /// `next` continues the search.
    pub searched_to: Option<Timestamp>,
}

impl<T> Page<T> {
    /// A page of a list that was read as far as the page needed.
    pub fn new(items: Vec<T>, next: Option<Cursor>) -> Self {
        Self { items, next, searched_to: None }
    }

    /// The same page with other items.
    pub fn map<U>(self, item: impl FnMut(T) -> U) -> Page<U> {
        let items = self.items.into_iter().map(item).collect();
        Page { items, next: self.next, searched_to: self.searched_to }
    }
}

/// An event in a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EventSummary {
    /// Our id.
    pub id: EventId,
    /// The sender's id.
    pub event_id: String,
    /// The tenant.
    pub tenant: String,
    /// The source.
    pub source: String,
    /// The type.
    pub event_type: Option<String>,
    /// When it happened, by the sender's clock.
    pub occurred_at: Option<Timestamp>,
    /// When it first arrived.
    pub received_at: Timestamp,
    /// The status.
    pub status: Status,
    /// Why it is or was in review.
    pub review: Option<ReviewReason>,
    /// How often it arrived, including the first time.
    #[serde(rename = "arrival_count")]
    pub arrivals: u64,
    /// How many arrivals had other bytes.
    #[serde(rename = "conflict_count")]
    pub conflicts: u64,
    /// When the last of its jobs ended.
    pub processed_at: Option<Timestamp>,
    /// The result of its first job.
    pub result: Option<String>,
}

/// An event with everything that is stored about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventDetail {
    /// The event as in a list.
    pub summary: EventSummary,
    /// The first arrival, the newest few of the others, and every conflict that is stored, in the order
    /// of arrival.
    pub arrivals: Vec<ArrivalNote>,
    /// The sender's headers.
    pub headers: String,
    /// The event's bytes.
    pub body: Bytes,
    /// Its jobs, by handler.
    pub jobs: Vec<JobDetail>,
    /// The actions of operators, oldest first.
    pub actions: Vec<ActionNote>,
    /// The messages that its handlers published.
    pub messages: Vec<MessageNote>,
}

/// An operator's action on an event or a delivery.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ActionNote {
    /// `replay`, `approve`, `reject`, `discard` or `cancel`.
    pub action: String,
    /// The name of the token that was used.
    pub who: String,
    /// The reason.
    pub reason: Option<String>,
    /// The time of the action.
    pub at: Timestamp,
}

/// A message that a handler of an event published.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MessageNote {
    /// Its id.
    pub id: String,
    /// Its owner. A handler may publish for another tenant than the event's.
    pub tenant: String,
    /// Its type.
    pub r#type: String,
    /// When it was published.
    pub created_at: Timestamp,
    /// Its status over all deliveries.
    pub status: MessageStatus,
}

/// One arrival of an event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ArrivalNote {
    /// The decision about it.
    pub decision: Decision,
    /// When it was received.
    pub received_at: Timestamp,
    /// The request id it was answered with.
    pub request_id: Uuid,
    /// The client's address.
    pub remote: Option<IpAddr>,
    /// The number of the [`Verifier`] that accepted it.
    pub secret: usize,
    /// Its name; `None` if it is not recorded.
    pub verifier: Option<Verifier>,
    /// The signed timestamp.
    pub signed_at: Option<Timestamp>,
    /// The other bytes, if it is a conflict.
    #[serde(skip)]
    pub body: Option<Bytes>,
}

/// The decision about one arrival, as `hapax-decision` carries it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Decision {
    /// New.
    Accepted,
    /// A copy.
    Duplicate,
    /// The same id with other bytes.
    Conflict,
    /// Stored for review.
    Review,
}

impl Decision {
    /// The decision as text.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Accepted => "accepted",
            Self::Duplicate => "duplicate",
            Self::Conflict => "conflict",
            Self::Review => "review",
        }
    }
}
