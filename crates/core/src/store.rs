//! The seam behind which every database stands: few methods, each one atomic business act.
//!
//! The caller decides, the store records; races are decided by the store's unique key alone. What
//! each act promises is written here once and checked for every store by one conformance suite.

use std::fmt;
use std::future::Future;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::job::{Fence, HandlerName, JobId, Phase, Policy, Progress, Retry};
use crate::key::{EventKey, SourceName, Tenant};
use crate::limits::MESSAGE_NAME_BYTES_MAX;
use crate::order::{OrderRule, Place};
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
    /// The work that each receipt promises, in the order of `receipts`: written in the same commit
    /// as its event, if that is accepted. Empty where no handler is for it.
    pub jobs: Vec<Vec<NewJob>>,
    /// How they came.
    pub via: Via,
}

/// A Job to be written with its event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewJob {
    /// For this handler.
    pub handler: HandlerName,
    /// Its place in the order of a resource, where the handler keeps order.
    pub place: Option<Place>,
    /// Set where the job cannot be worked on at all (its order value is missing): it is buried at
    /// once, and this is why.
    pub hopeless: Option<String>,
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
///
/// In the order in which the first that applies is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Waiting for a person.
    Review,
    /// A person refused it.
    Discarded,
    /// A job of it is buried.
    Dead,
    /// A job of it failed and will be tried again.
    Failed,
    /// A job of it waits for another event.
    Held,
    /// A job of it is being worked on.
    Processing,
    /// A job of it waits for its turn.
    Received,
    /// Every job is done, or done and stale.
    Processed,
    /// Newer news was applied before every job of it.
    Stale,
    /// No handler is for it.
    Ignored,
}

impl Status {
    /// The word of CONTRACT.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Review => "review",
            Self::Discarded => "discarded",
            Self::Dead => "dead",
            Self::Failed => "failed",
            Self::Held => "held",
            Self::Processing => "processing",
            Self::Received => "received",
            Self::Processed => "processed",
            Self::Stale => "stale",
            Self::Ignored => "ignored",
        }
    }

    /// Whether nothing but a person changes it any more. An event may be discarded for one of its
    /// handlers and open for another: what may be pruned, its jobs say.
    pub fn is_final(self) -> bool {
        match self {
            Self::Processed | Self::Stale | Self::Ignored | Self::Discarded => true,
            Self::Review
            | Self::Dead
            | Self::Failed
            | Self::Held
            | Self::Processing
            | Self::Received => false,
        }
    }

    /// The status of an event from its jobs: the first that applies.
    pub fn of_jobs(jobs: impl IntoIterator<Item = (Phase, u32)>) -> Self {
        let mut worst: Option<Self> = None;
        for (phase, steps) in jobs {
            let of_job = match phase {
                Phase::Dead => Self::Dead,
                Phase::Ready | Phase::Parked if steps > 0 => Self::Failed,
                Phase::Held => Self::Held,
                Phase::Leased => Self::Processing,
                Phase::Ready | Phase::Parked => Self::Received,
                Phase::Done => Self::Processed,
                Phase::Stale => Self::Stale,
                Phase::Review => Self::Review,
                Phase::Discarded => Self::Discarded,
            };
            worst = Some(worst.map_or(of_job, |worst| worst.min(of_job)));
        }
        worst.unwrap_or(Self::Ignored)
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

/// Working on what was accepted. Every method is one atomic act; a lost fence is an answer.
pub trait Work: Send + Sync + 'static {
    /// Tells the store which handlers this node has. Only their jobs are claimed. Called at start
    /// and after each reload, with all of them.
    fn announce(
        &self,
        handlers: Vec<HandlerSpec>,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Claims up to `limit` due jobs of one handler, over its tenants in turn. Commits attempt+1
    /// and a new fence for each before it returns. A job that was lost before comes alone.
    /// Expired leases are found here too; what is at its limit is buried here; and what was held
    /// past its deadline goes to review or goes on, once no job of its tenant and handler is due
    /// and no other of its resource is at work.
    fn claim(&self, ask: ClaimAsk) -> impl Future<Output = Result<Vec<Claim>, StoreError>> + Send;

    /// Lengthens the lease of a claim.
    fn renew(
        &self,
        job: JobId,
        fence: Fence,
        lease: Duration,
    ) -> impl Future<Output = Result<Held, StoreError>> + Send;

    /// Records how an attempt ended, if the fence still holds. `Done` again under the same fence is
    /// `Kept`: the answer to the first may have been lost. `Done` of a job that was not forced is
    /// `Lost` where the mark has passed it (see `OrderPolicy::may_settle`).
    fn settle(
        &self,
        job: JobId,
        fence: Fence,
        outcome: Outcome,
    ) -> impl Future<Output = Result<Held, StoreError>> + Send;

    /// Gives claims back that were never begun: uncounted.
    fn give_back(
        &self,
        claims: Vec<(JobId, Fence)>,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Whether a job is done under this fence or any later one: asked after every attempt over
    /// HTTP, since the app may have completed it in a transaction of its own.
    fn is_done(&self, job: JobId) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Claims due first attempts of an `sql` handler and runs its statements, effects and "done" in
    /// one transaction. First attempts may share it; any error, lost fence or failed commit rolls
    /// all of it back, and each job then runs alone under the same claim. One that was lost before
    /// is claimed and handed out instead ([`SqlRan::alone`]).
    fn run_sql(&self, ask: SqlAsk) -> impl Future<Output = Result<SqlRan, StoreError>> + Send;

    /// Runs the statements of a job that was claimed before, with "done" and the order's mark in
    /// the same transaction, if the fence still holds. What they do wrong is recorded as a failed
    /// attempt. A job that is done under this fence is `Done` and runs nothing: the answer to the
    /// first call may have been lost.
    fn run_claimed(&self, run: SqlRun) -> impl Future<Output = Result<Ran, StoreError>> + Send;

    /// How many [`Work::run_sql`] of one handler are worth having under way at once, where there is
    /// a backlog.
    fn sql_slices(&self) -> usize {
        1
    }

    /// When the next job of this handler is due, as far as the store knows: a hint for sleeping.
    fn next_due(
        &self,
        handler: &HandlerRef,
    ) -> impl Future<Output = Result<Option<Timestamp>, StoreError>> + Send;

    /// Makes the jobs of this event that wait for their next attempt due now: at a sync source the
    /// sender's next copy is the next attempt. Nothing else is touched; a store that does nothing
    /// here only makes the sender come back once more.
    fn hurry(&self, event: EventId) -> impl Future<Output = Result<(), StoreError>> + Send {
        let _ = event;
        std::future::ready(Ok(()))
    }

    /// Resolves when there may be new work: a hint, the poll is the truth.
    fn work_arrived(&self) -> impl Future<Output = ()> + Send;

    /// Runs a job again: a dead one as it is, a done one only with `force`, which gives it a new
    /// run number. A handler that has no job for the event yet gets one.
    fn replay(
        &self,
        ask: ReplayAsk,
    ) -> impl Future<Output = Result<Vec<Replayed>, StoreError>> + Send;

    /// A person lets an event out of review: its jobs are written in this commit, once, however
    /// many approve it or send on-time copies of it. Where jobs of it are in review instead, those
    /// are ready in this commit, and run whatever the order guard says; `jobs` is not looked at.
    fn approve(
        &self,
        event: EventId,
        jobs: Vec<NewJob>,
        by: Action,
    ) -> impl Future<Output = Result<Reviewed, StoreError>> + Send;

    /// A person refuses an event in review, or its jobs that are; those are discarded, and their
    /// fences void.
    fn reject(
        &self,
        event: EventId,
        by: Action,
    ) -> impl Future<Output = Result<Reviewed, StoreError>> + Send;

    /// Deletes what is finished and past its time, at most `limit` events. True when there may be
    /// more.
    fn prune(
        &self,
        horizon: Horizon,
        limit: usize,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// How often something was asked that might have to wait for a [`Work::prune`], so far: while the
    /// number stands still, pruning is in nobody's way. `None` where the store cannot tell.
    fn demand(&self) -> Option<u64> {
        None
    }
}

/// A handler of a source.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HandlerRef {
    /// Its source.
    pub source: SourceName,
    /// Its name.
    pub handler: HandlerName,
}

/// What a store needs to know of a handler.
#[derive(Debug, Clone)]
pub struct HandlerSpec {
    /// Which one.
    pub handler: HandlerRef,
    /// How often and how long.
    pub policy: Policy,
    /// How it keeps order; `None` where it does not.
    pub order: Option<OrderRule>,
    /// Whether its jobs are leased by workers outside this process: then a restart of ours does
    /// not end their leases.
    pub pulled: bool,
}

/// What to claim.
#[derive(Debug, Clone)]
pub struct ClaimAsk {
    /// Of this handler.
    pub handler: HandlerRef,
    /// At most this many.
    pub limit: usize,
    /// Who will work on them: told with the attempt.
    pub worker: Arc<str>,
}

/// The right to work on a job, with what is needed for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// The job.
    pub job: JobId,
    /// The fence of this claim.
    pub fence: Fence,
    /// Which attempt this is, from 1.
    pub attempt: u32,
    /// Which run: 1 unless a person forced another.
    pub run: u32,
    /// The key that travels on: equal across attempts, restarts and replays of this run.
    pub idempotency_key: String,
    /// When the lease ends.
    pub leased_until: Timestamp,
    /// Whether an attempt of it was lost before: it came by itself, and should it end the process
    /// again, nothing else should be at work there.
    pub alone: bool,
    /// The event.
    pub event: ClaimedEvent,
}

/// An event as a handler gets it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimedEvent {
    /// Our id.
    pub id: EventId,
    /// Tenant, source and the sender's id.
    pub key: EventKey,
    /// What happened.
    pub event_type: Option<String>,
    /// When it happened.
    pub occurred_at: Option<Timestamp>,
    /// When it first arrived.
    pub received_at: Timestamp,
    /// The resource of the order guard.
    pub resource: Option<String>,
    /// The sender's headers.
    pub headers: String,
    /// The event's bytes.
    pub body: Bytes,
}

/// Whether a fence still held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Held {
    /// It did, and what was asked is recorded.
    Kept,
    /// It did not: nothing was changed.
    Lost,
}

/// How an attempt ended.
#[derive(Debug, Clone)]
pub enum Outcome {
    /// Done, with a short result, and messages to publish in the same commit.
    Done {
        /// For the receipt: at most 200 characters are kept.
        result: Option<String>,
        /// The outbox.
        publish: Vec<NewMessage>,
    },
    /// It failed or timed out.
    Failed {
        /// Why.
        error: String,
        /// When to try again.
        retry: Retry,
    },
}

/// A message to be published with a commit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewMessage {
    /// What it is about.
    pub r#type: String,
    /// Its content.
    pub data: serde_json::Value,
    /// The order key.
    #[serde(default)]
    pub key: Option<String>,
    /// Whose it is; without one, of whom the event is that it is published for.
    #[serde(default)]
    pub tenant: Option<String>,
    /// Its id; the same id twice is one message.
    #[serde(default)]
    pub id: Option<String>,
}

impl NewMessage {
    /// Why no store can take it, if so: told to whoever made it, before it is part of a commit that
    /// would be refused each time.
    pub fn fault(&self) -> Option<String> {
        let names = [
            ("type", Some(&self.r#type)),
            ("key", self.key.as_ref()),
            ("tenant", self.tenant.as_ref()),
            ("id", self.id.as_ref()),
        ];
        names.into_iter().find_map(|(name, value)| match value?.len() {
            0 => Some(format!("the {name} of a message is empty")),
            1..=MESSAGE_NAME_BYTES_MAX => None,
            _too_long => Some(format!(
                "the {name} of a message is longer than {MESSAGE_NAME_BYTES_MAX} bytes"
            )),
        })
    }
}

/// What to run with SQL.
#[derive(Debug, Clone)]
pub struct SqlAsk {
    /// What to claim.
    pub claim: ClaimAsk,
    /// The statements.
    pub program: Arc<crate::handler::SqlProgram>,
    /// How long one job's statements may take.
    pub timeout: Duration,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SqlRan {
    /// Jobs whose effects are committed.
    pub done: usize,
    /// Jobs that were stale or are held.
    pub guarded: usize,
    /// Jobs that failed.
    pub failed: usize,
    /// The events of all of these: whoever waits for one of them should look.
    pub events: Vec<EventId>,
    /// A job that was lost before: it was claimed, alone, and not begun. It is for the caller to see
    /// that nothing else is at work beside it, and then to [`Work::run_claimed`] it.
    pub alone: Option<Box<Claim>>,
}

impl SqlRan {
    /// Whether there was nothing to do.
    pub fn is_idle(&self) -> bool {
        *self == Self::default()
    }
}

/// A claimed job of an `sql` handler, to be run by itself.
#[derive(Debug, Clone)]
pub struct SqlRun {
    /// The job.
    pub job: JobId,
    /// The fence of its claim.
    pub fence: Fence,
    /// The statements.
    pub program: Arc<crate::handler::SqlProgram>,
    /// How long they may take.
    pub timeout: Duration,
    /// The object as it is now, for `:current`.
    pub current: Option<Arc<str>>,
}

/// What came of one claimed job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ran {
    /// Its effects are committed.
    Done,
    /// The order guard set it aside: newer news was applied meanwhile, or a number is missing.
    Guarded,
    /// It failed, and that is recorded: why.
    Failed(String),
    /// The fence did not hold: nothing was changed.
    Lost,
}

/// What to run again.
#[derive(Debug, Clone)]
pub struct ReplayAsk {
    /// Of this event.
    pub event: EventId,
    /// Only for this handler; `None` for all of the source's that are for the event.
    pub handlers: Vec<NewJob>,
    /// Also what is done.
    pub force: bool,
    /// Only say what would happen.
    pub dry_run: bool,
    /// Who and why.
    pub by: Action,
}

/// What a replay does to one job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Replayed {
    /// The handler.
    pub handler: HandlerName,
    /// What happens.
    pub effect: ReplayEffect,
}

/// What a replay does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ReplayEffect {
    /// It runs (again).
    WouldRun,
    /// It is done, and stays so.
    AlreadyApplied,
    /// Newer news was applied: it would do nothing.
    Stale,
    /// It is waiting or running as it is.
    AlreadyOpen,
    /// A person refused it: only `force` runs it.
    Discarded,
}

/// Who did something by hand, and why: the audit record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Action {
    /// The token's name, or `loopback`.
    pub who: String,
    /// The reason given.
    pub reason: Option<String>,
    /// When.
    pub at: Timestamp,
}

/// The answer to an approval or a rejection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reviewed {
    /// It was waiting, and no longer is.
    Decided,
    /// It was not waiting for anyone.
    NotWaiting(Status),
    /// There is no such event.
    Unknown,
}

/// What may be deleted.
#[derive(Debug, Clone)]
pub struct Horizon {
    /// Bodies and history of events received before this.
    pub events_before: Timestamp,
    /// And their keys, per source, where received before this; a source that is not named here
    /// keeps its keys for ever.
    pub keys_before: Vec<(SourceName, Timestamp)>,
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
