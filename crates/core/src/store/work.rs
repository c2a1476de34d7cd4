//! Working on what was accepted: claims, outcomes, and what people decide.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

use super::{EventId, NewJob, Status, StoreError};
use crate::job::{Fence, HandlerName, JobId, Policy, Retry, Workplace};
use crate::key::{EventKey, SourceName};
use crate::message::NewMessage;
use crate::order::OrderRule;

/// Working on what was accepted. Every method is one atomic act; a lost fence is an answer.
pub trait Work: Send + Sync + 'static {
    /// Tells the store which handlers this node has. Only their jobs are claimed. Called at start
    /// and after each reload, with all of them.
    fn announce(
        &self,
        handlers: Vec<HandlerSpec>,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Claims up to `limit` due jobs of one handler, over its tenants in turn. Commits attempt+1
    /// and a new fence for each before it returns. A job that was lost before comes alone, if its
    /// work is done in this process.
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

    /// A person gives up the dead letters of an event, or only that of one handler: they are
    /// discarded, and their fences void. Such an event is finished, whether or not its handler still
    /// exists.
    fn discard(
        &self,
        event: EventId,
        handler: Option<HandlerName>,
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
    /// Where its work is done.
    pub workplace: Workplace,
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
    /// Whether an attempt of it was lost before that may have ended the process: it came by itself,
    /// and should it do so again, nothing else should be at work there.
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
        /// What the app answered, where one was asked.
        answer: Option<HandlerAnswer>,
    },
    /// It failed or timed out.
    Failed {
        /// Why.
        error: String,
        /// When to try again.
        retry: Retry,
        /// What the app answered, if it did.
        answer: Option<HandlerAnswer>,
    },
}

/// Why a job was buried whose event has another body than was stored.
pub const DAMAGED_BODY: &str = "the stored body does not match its hash: the database was damaged or \
                                changed by hand, and no handler gets it";

/// What an app answered to one attempt: kept with it, whether it succeeded or not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HandlerAnswer {
    /// The HTTP status.
    pub status: u16,
    /// The beginning of its body, as text.
    #[serde(rename = "answer", skip_serializing_if = "String::is_empty")]
    pub body: String,
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
    /// The order rule set it aside: a newer version was applied meanwhile, or its predecessor is missing.
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
    /// A newer version was applied: the job would do nothing.
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

/// The answer to an approval, a rejection or a discard.
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

impl Horizon {
    /// Order marks of this source that have not moved since then may be deleted: no event can need them.
    /// `unfinished` is when the oldest event was received that is past its time and not finished.
    ///
    /// A mark keeps older versions of a resource from being applied. The sender made an older version
    /// before the mark moved, and keys outlive every sender's retries. So an older version arrives at most
    /// as long after the mark moved as keys are kept. All that arrived until then must be finished and past
    /// its time as well, because a person may still run it. `None` where keys are kept for ever.
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
