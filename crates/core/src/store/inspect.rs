//! Looking: what lists, stories and figures are made of.

use std::future::Future;
use std::net::IpAddr;

use bytes::Bytes;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{EventId, HandlerRef, ReviewReason, Status, StoreError};
use crate::job::{Fence, HandlerName, JobId, Phase, Progress};
use crate::key::{SourceName, Tenant};

/// The reads of dashboard, API and command line. They never wait for a writer.
pub trait Inspect: Send + Sync + 'static {
    /// Writes the copies that are only counted in memory yet, as far as that can be done at once: what
    /// is read after this includes every copy that was answered before it. A store that counts them
    /// at once has nothing to do.
    fn flush_copies(&self) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }

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

    /// Jobs that match, newest first.
    fn jobs(
        &self,
        filter: JobFilter,
    ) -> impl Future<Output = Result<Page<JobDetail>, StoreError>> + Send;

    /// One job.
    fn job(&self, id: JobId) -> impl Future<Output = Result<Option<JobDetail>, StoreError>> + Send;

    /// How far behind each handler is, over all of its tenants: one entry for every handler that
    /// has a job which is open or dead, whether any node knows that handler or not, sorted by
    /// source and name. Costs little however much waits: only indexes are read, and counting stops
    /// at [`LANE_COUNT_MAX`](crate::limits::LANE_COUNT_MAX).
    fn lanes(&self) -> impl Future<Output = Result<Vec<LaneState>, StoreError>> + Send;

    /// Events that were first received at or after `ask.since` and are still kept whole, newest
    /// first: all of them where they are at most `ask.limit`, else about that many, spread evenly
    /// over the span, and [`Sample::total`] is then an estimate.
    fn sample(&self, ask: SampleAsk) -> impl Future<Output = Result<Sample, StoreError>> + Send;
}

/// How far behind one handler is. Every number stops at
/// [`LANE_COUNT_MAX`](crate::limits::LANE_COUNT_MAX): that one means "so many or more".
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaneState {
    /// Which handler.
    pub handler: HandlerRef,
    /// When something is next to be done for it: the earliest time at which a ready job is due or a
    /// lease ends. In the past, it says how long the job that is due longest has been due; `None`
    /// where nothing is ready or leased.
    pub oldest_due: Option<Timestamp>,
    /// Jobs to be claimed, now or once they are due.
    pub ready: u64,
    /// Jobs that are claimed.
    pub leased: u64,
    /// Jobs that wait for the number before them.
    pub held: u64,
    /// Jobs that wait for another one of their resource.
    pub parked: u64,
    /// Jobs that a person decides about.
    pub review: u64,
    /// Buried jobs.
    pub dead: u64,
}

impl LaneState {
    /// Jobs that are not at their end; like its parts it may mean "so many or more".
    pub fn open(&self) -> u64 {
        self.ready + self.leased + self.held + self.parked + self.review
    }
}

/// Which events to sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleAsk {
    /// First received at or after this.
    pub since: Timestamp,
    /// At least one: more than these are sampled.
    pub limit: usize,
}

/// Events of a span of time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// How many there are: exact where `events` holds all of them.
    pub total: u64,
    /// All of them, or some.
    pub events: Vec<SampledEvent>,
}

impl Sample {
    /// Whether `events` are some of many.
    pub fn is_partial(&self) -> bool {
        (self.events.len() as u64) < self.total
    }
}

/// One event of a sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SampledEvent {
    /// What a list shows.
    pub summary: EventSummary,
    /// When it arrived, in order: the times of what [`EventDetail::arrivals`] would hold.
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
    /// Older than this one: where the page before ended.
    pub before: Option<Cursor>,
    /// At most this many.
    pub limit: usize,
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
    /// Whose it is.
    pub tenant: String,
    /// Where it came from.
    pub source: String,
    /// For which handler.
    pub handler: HandlerName,
    /// Where it stands.
    #[serde(rename = "status")]
    pub phase: Phase,
    /// Which run.
    pub run: u32,
    /// How far it has come.
    #[serde(flatten)]
    pub progress: Progress,
    /// The fence.
    pub fence: Fence,
    /// When it is due, or when its lease ends.
    pub due_at: Option<Timestamp>,
    /// What it came to.
    pub result: Option<String>,
    /// Why the last attempt failed.
    pub error: Option<String>,
    /// When it ended.
    pub finished_at: Option<Timestamp>,
    /// The key that travels on.
    pub idempotency_key: String,
    /// The resource of its order guard.
    pub resource: Option<String>,
    /// Attempts that ended, oldest first.
    pub attempts: Vec<AttemptNote>,
}

/// One attempt that ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AttemptNote {
    /// Which run.
    pub run: u32,
    /// Which attempt.
    pub attempt: u32,
    /// When it began.
    pub started_at: Timestamp,
    /// When it ended; `None` for a lost one.
    pub ended_at: Option<Timestamp>,
    /// `done`, `failed` or `lost`.
    pub outcome: String,
    /// Why it failed.
    pub error: Option<String>,
    /// Who worked on it.
    pub worker: String,
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
    /// Received before this and still not finished: its status is not
    /// [final](Status::is_final). What is dead or waits for a person is not finished either.
    pub unfinished_since: Option<Timestamp>,
    /// Older than this one: where the page before ended.
    pub before: Option<Cursor>,
    /// At most this many.
    pub limit: usize,
}

/// Where a page ends: opaque to everyone but the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cursor(pub u128);

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
    /// When the last of its jobs ended.
    pub processed_at: Option<Timestamp>,
    /// What its first job came to.
    pub result: Option<String>,
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
    /// Its jobs, by handler.
    pub jobs: Vec<JobDetail>,
    /// What people did to it, oldest first.
    pub actions: Vec<ActionNote>,
    /// What its handlers published.
    pub messages: Vec<MessageNote>,
}

/// What a person did to an event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ActionNote {
    /// `replay`, `approve` or `reject`.
    pub action: String,
    /// Who.
    pub who: String,
    /// Why.
    pub reason: Option<String>,
    /// When.
    pub at: Timestamp,
}

/// A published message in the story of an event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MessageNote {
    /// Its id.
    pub id: String,
    /// What it is about.
    pub r#type: String,
    /// When it was published.
    pub created_at: Timestamp,
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
