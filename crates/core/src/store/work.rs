//! Running the jobs of accepted events: claim, lease, outcome, retention.
//!
//! Decisions of operators are in [`super::operate`], hints for pacing in [`super::hints`].

use std::future::Future;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

use super::{EventId, StoreError};
use crate::job::{Fence, HandlerName, JobId, Policy, Retry, WorkLocation};
use crate::key::{EventKey, SourceName};
use crate::message::NewMessage;
use crate::order::OrderRule;

/// Running the jobs of accepted events.
///
/// Every method except [`Work::wait`] is one act. After `Ok` the act is durable. After `Err` the act may
/// or may not have been committed, and the caller may repeat it: fences make every act safe to repeat.
/// Dropping the future does not undo an act that has begun. A lost fence is an answer, not an error.
pub trait Work: Send + Sync + 'static {
    /// Announces all handlers of this node, at start and after each reload. Only jobs of announced
    /// handlers are claimed.
    ///
    /// Atomic for each handler. A crash in the middle leaves some handlers with their old policy, and the
    /// next start announces all of them again.
    fn announce(
        &self,
        handlers: Vec<HandlerSpec>,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Claims up to `limit` due jobs of one handler, in turn over its tenants. A job that was lost before
    /// is claimed alone if its work is done in this process.
    ///
    /// One commit, before the claims are returned: each claimed job has its attempt counted and a new
    /// fence. The same commit ends expired leases, makes dead letters of jobs that were lost too often, and
    /// sends jobs that were held past their deadline to review or lets them run. A deadline counts only while
    /// no job of the same tenant and handler is due and no job of the resource is leased. A crash afterwards
    /// leaves the jobs leased until their leases expire; then the attempts are lost.
    fn claim(&self, ask: ClaimAsk) -> impl Future<Output = Result<Vec<Claim>, StoreError>> + Send;

    /// Extends the lease of a claim, never shortens it.
    ///
    /// One fenced update. After a crash the old or the new end of the lease holds.
    fn renew(
        &self,
        job: JobId,
        fence: Fence,
        lease: Duration,
    ) -> impl Future<Output = Result<Held, StoreError>> + Send;

    /// Records how an attempt ended, if the fence still holds.
    ///
    /// One commit: the outcome, the order mark, the published messages, and the jobs that become ready.
    /// A job that is done under this fence stays done, whatever the outcome says: the app may have
    /// completed the job in a transaction of its own, or the answer to an earlier call was lost. Then
    /// only the app's answer is added to the attempt, if it has none.
    /// `Done` of a job that was not forced is lost if the order mark has passed the job (see
    /// `OrderPolicy::may_settle`).
    /// A crash before the commit leaves the job leased, and the attempt is lost when the lease expires.
    fn settle(
        &self,
        job: JobId,
        fence: Fence,
        outcome: Outcome,
    ) -> impl Future<Output = Result<Settlement, StoreError>> + Send;

    /// Returns claims whose work was never begun. Their attempts do not count, and their fences are void.
    ///
    /// One commit. Claims whose fence is lost are skipped. After a crash before the commit, the claims
    /// expire like those of a dead worker.
    fn give_back(
        &self,
        claims: Vec<(JobId, Fence)>,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Claims due first attempts of an `sql` handler and runs the handler's statements.
    ///
    /// Effects, "done" and order marks are one commit. First attempts may share this commit. Any error, lost
    /// fence or failed commit rolls all of it back, and each job then runs alone under the same claim. A job
    /// that was lost before is claimed and returned instead of run ([`SqlRan::alone`]). A crash leaves
    /// effects and "done" together, or neither of them and the jobs leased.
    fn run_sql(&self, ask: SqlAsk) -> impl Future<Output = Result<SqlRan, StoreError>> + Send;

    /// Runs the statements of a job that was claimed before, if the fence still holds.
    ///
    /// Effects, "done" and the order mark are one commit. An error of the statements is recorded as a
    /// failed attempt in a commit of its own. A job that is done under this fence is `Done` and runs
    /// nothing: the answer to an earlier call may have been lost.
    /// A crash leaves effects and "done" together, or neither of them and the job leased.
    fn run_claimed(&self, run: SqlRun) -> impl Future<Output = Result<Ran, StoreError>> + Send;

    /// Makes the jobs of an event that wait for their next attempt due now. At a sync source, the
    /// sender's next copy is the next attempt.
    ///
    /// One commit. If this change is lost in a crash, the jobs run at their scheduled time.
    fn hurry(&self, event: EventId) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Waits until there may be work for this handler. The answer is a hint: only [`Work::claim`]
    /// decides, and a caller must also poll without a hint.
    ///
    /// Arrivals count from the moment of the call, not from the first poll of the future. A caller that
    /// calls `wait`, then claims nothing, then awaits, misses no arrival. Any arrival ends the wait. The
    /// due time of the next job also ends the wait, but never before the start of `span`. The end of
    /// `span` always ends the wait. `span` counts from the first poll. The call changes nothing.
    fn wait(
        &self,
        handler: &HandlerRef,
        span: RangeInclusive<Duration>,
    ) -> impl Future<Output = Wake> + Send;

    /// Deletes finished events that are past the horizon, at most `limit` of them. Returns true if there
    /// may be more.
    ///
    /// A call may make several commits. After each of them, an event is complete, or has lost its body
    /// and history, or is deleted with its key. A crash in the middle leaves the rest to the next call.
    fn prune(
        &self,
        horizon: Horizon,
        limit: usize,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send;
}

/// A handler of a source.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HandlerRef {
    /// Its source.
    pub source: SourceName,
    /// Its name.
    pub handler: HandlerName,
}

/// The properties of a handler that a store needs.
#[derive(Debug, Clone)]
pub struct HandlerSpec {
    /// Its source and name.
    pub handler: HandlerRef,
    /// Its retry schedule and lease.
    pub policy: Policy,
    /// How it keeps order; `None` if it keeps none.
    pub order: Option<OrderRule>,
    /// Where its work is done.
    pub workplace: WorkLocation,
}

/// A request for claims.
#[derive(Debug, Clone)]
pub struct ClaimAsk {
    /// The handler whose jobs are claimed.
    pub handler: HandlerRef,
    /// The most jobs to claim.
    pub limit: usize,
    /// The name of the worker, recorded with each attempt.
    pub worker: Arc<str>,
}

/// The right to work on a job, with its event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// The job.
    pub job: JobId,
    /// The fence of this claim.
    pub fence: Fence,
    /// The number of this attempt, from 1.
    pub attempt: u32,
    /// The steps of the schedule that earlier attempts used: how many of them failed.
    pub steps: u32,
    /// The number of this run: 1 unless an operator forced another.
    pub run: u32,
    /// The Idempotency-Key for effects: equal across attempts, restarts and replays of this run.
    pub idempotency_key: String,
    /// When the lease ends.
    pub leased_until: Timestamp,
    /// Whether an earlier attempt was lost and may have ended the process. Such a job is claimed alone,
    /// and should run while no other job runs in its process.
    pub alone: bool,
    /// The event.
    pub event: ClaimedEvent,
}

/// An event as a handler gets it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimedEvent {
    /// Our id of the event.
    pub id: EventId,
    /// Tenant, source and the sender's id.
    pub key: EventKey,
    /// The type that the sender gave it.
    pub event_type: Option<String>,
    /// When it happened, according to the sender.
    pub occurred_at: Option<Timestamp>,
    /// When its first copy arrived.
    pub received_at: Timestamp,
    /// Its resource, if the handler is ordered.
    pub resource: Option<String>,
    /// The sender's headers.
    pub headers: String,
    /// The event's bytes.
    pub body: Bytes,
}

/// Whether a fence still held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Held {
    /// The fence held, and the act is recorded.
    Kept,
    /// The fence was lost: nothing was changed.
    Lost,
}

/// The answer to [`Work::settle`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settlement {
    /// The fence held, and the outcome is recorded.
    Recorded,
    /// The job was done under this fence before the call, and stays done.
    AlreadyDone,
    /// The fence was lost: nothing was changed.
    Lost,
}

/// Why [`Work::wait`] ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    /// Jobs of some handler were written or became ready.
    Arrived,
    /// Time passed.
    Elapsed {
        /// When the next job of the handler is due, its lease ends or its deadline passes. The time may be
        /// too early but never too late. `None` if the store knows of no such job.
        due: Option<Timestamp>,
    },
}

/// How an attempt ended.
#[derive(Debug, Clone)]
pub enum Outcome {
    /// Done, with a short result, and messages to publish in the same commit.
    Done {
        /// Stored with the job, cut after 200 characters.
        result: Option<String>,
        /// Messages for the outbox. If an id was used before for other content, the attempt has failed and
        /// none of them is published.
        publish: Vec<NewMessage>,
        /// The app's answer, if the job is a call of an app.
        answer: Option<HandlerAnswer>,
    },
    /// The attempt failed or timed out.
    Failed {
        /// The reason.
        error: String,
        /// When to retry.
        retry: Retry,
        /// The app's answer, if it gave one.
        answer: Option<HandlerAnswer>,
    },
}

/// The error of a job that is a dead letter because its event's body does not match the stored hash.
pub const DAMAGED_BODY: &str = "the stored body does not match its hash: the database was damaged or \
                                changed by hand, and no handler gets it";

/// The answer of an app to one attempt. The answer is stored with the attempt, whether the attempt
/// succeeded or not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HandlerAnswer {
    /// The HTTP status.
    pub status: u16,
    /// The beginning of the body, as text.
    #[serde(rename = "answer", skip_serializing_if = "String::is_empty")]
    pub body: String,
}

/// A request to claim jobs and run their SQL.
#[derive(Debug, Clone)]
pub struct SqlAsk {
    /// Which jobs to claim.
    pub claim: ClaimAsk,
    /// The statements.
    pub program: Arc<crate::handler::SqlProgram>,
    /// The longest time that the statements of one job may take.
    pub timeout: Duration,
}

/// The result of [`Work::run_sql`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SqlRan {
    /// Jobs whose effects are committed.
    pub done: usize,
    /// Jobs that were stale or are held.
    pub guarded: usize,
    /// Jobs that failed.
    pub failed: usize,
    /// The jobs that are done or failed, for statistics.
    pub tried: Vec<TriedJob>,
    /// The events of all of these jobs. Requests that wait for one of them should be notified.
    pub events: Vec<EventId>,
    /// A job that was lost before. The job is claimed and not begun. The caller must wait until no other job
    /// runs in the process, and then call [`Work::run_claimed`].
    pub alone: Option<Box<Claim>>,
}

/// An attempt that ended with a verdict.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TriedJob {
    /// When the first copy of the event arrived.
    pub received_at: Timestamp,
    /// The number of the attempt, from 1.
    pub attempt: u32,
    /// The steps of the schedule that earlier attempts used.
    pub steps: u32,
    /// The number of the run: above 1 if an operator forced it.
    pub run: u32,
    /// The verdict.
    pub verdict: TriedVerdict,
}

/// The verdict of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TriedVerdict {
    /// The job is done.
    Succeeded,
    /// The attempt failed, and another one follows.
    Failed,
    /// The attempt failed, and the job is a dead letter.
    Died,
}

impl TriedJob {
    /// The attempt of a claim, with its verdict.
    pub fn of(claim: &Claim, verdict: TriedVerdict) -> Self {
        let Claim { attempt, steps, run, event, .. } = claim;
        let (attempt, steps, run) = (*attempt, *steps, *run);
        Self { received_at: event.received_at, attempt, steps, run, verdict }
    }
}

impl SqlRan {
    /// Whether no job was found.
    pub fn is_idle(&self) -> bool {
        *self == Self::default()
    }
}

/// A claimed job of an `sql` handler, to be run alone.
#[derive(Debug, Clone)]
pub struct SqlRun {
    /// The job.
    pub job: JobId,
    /// The fence of its claim.
    pub fence: Fence,
    /// The statements.
    pub program: Arc<crate::handler::SqlProgram>,
    /// The most time that they may take.
    pub timeout: Duration,
    /// The refetched object, for `:current`.
    pub current: Option<Arc<str>>,
}

/// The result of [`Work::run_claimed`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ran {
    /// The effects are committed.
    Done,
    /// The order rule stopped the job: a newer version was applied meanwhile, or its predecessor is
    /// missing.
    Guarded,
    /// The attempt failed, which is recorded. Holds the reason.
    Failed(String),
    /// The fence was lost: nothing was changed.
    Lost,
}

/// The times before which stored data may be deleted.
#[derive(Debug, Clone)]
pub struct Horizon {
    /// The time on the clock of the node that computed the bounds. A store with a clock of its own moves the
    /// bounds back if this time is ahead of that clock. The earliest time if the bounds come from no clock.
    pub at: Timestamp,
    /// Bodies and history are deleted if the event was received, or the message published, before
    /// this.
    pub events_before: Timestamp,
    /// Keys of a source are deleted if the event was received before this. A source that is not listed
    /// keeps its keys for ever.
    pub keys_before: Vec<(SourceName, Timestamp)>,
    /// The id of a message is deleted if the message was published before this and its bytes are
    /// gone.
    pub message_ids_before: Timestamp,
}

impl Horizon {
    /// Keeps everything for ever.
    pub fn forever() -> Self {
        Self {
            at: Timestamp::MIN,
            events_before: Timestamp::MIN,
            keys_before: Vec::new(),
            message_ids_before: Timestamp::MIN,
        }
    }

    /// By how much the clock that the bounds come from is ahead of `now`.
    pub fn ahead_of(&self, now: Timestamp) -> SignedDuration {
        self.at.duration_since(now).max(SignedDuration::ZERO)
    }

    /// All bounds, moved back by this much.
    pub fn moved_back(&self, by: SignedDuration) -> Self {
        let moved = |at: Timestamp| at.checked_sub(by).unwrap_or(Timestamp::MIN);
        let keys = self.keys_before.iter();
        Self {
            at: moved(self.at),
            events_before: moved(self.events_before),
            keys_before: keys.map(|(source, before)| (source.clone(), moved(*before))).collect(),
            message_ids_before: moved(self.message_ids_before),
        }
    }

    /// An order mark of this source may be deleted if it last moved before the returned time: no event
    /// can need such a mark. `unfinished` is the arrival time of the oldest event that retention keeps
    /// only because it is not finished.
    ///
    /// A mark keeps older versions of a resource from being applied. The sender made an older version
    /// before the mark moved, and keys outlive every sender's retries. So an older version arrives within
    /// the retention of keys after the mark moved. The bodies of all events that arrived until then must
    /// also be deleted, because an operator may still run an event that has one. `None` if keys are kept
    /// for ever.
    pub fn marks_before(
        &self,
        source: &SourceName,
        now: Timestamp,
        unfinished: Option<Timestamp>,
    ) -> Option<Timestamp> {
        let (_, keys_before) = self.keys_before.iter().find(|(named, _)| named == source)?;
        let arrives_within = now.duration_since(*keys_before).max(SignedDuration::ZERO);
        let none_left_before = self.events_before.min(unfinished.unwrap_or(now)).min(now);
        none_left_before.checked_sub(arrives_within).ok()
    }
}
