//! Decisions of operators about events, jobs and handlers: replay, approve, reject, discard, pause, resume.

use std::future::Future;

use jiff::Timestamp;
use serde::Serialize;

use super::{EventId, HandlerRef, NewJob, Status, StoreError};
use crate::job::HandlerName;

/// Decisions of operators.
///
/// Every method is one commit that holds the change, the record of the action, and the jobs that become
/// ready. A crash leaves the whole commit or nothing. An act that changes nothing records no action, so every
/// act may be repeated. Dropping the future does not undo an act that has begun.
pub trait Operate: Send + Sync + 'static {
    /// Runs jobs again. A dead job runs with a new schedule. With `force`, a job that is done, stale or
    /// discarded runs too, under a new run number. A handler without a job for the event gets one.
    /// A job that waits for its next attempt becomes due now.
    fn replay(
        &self,
        ask: ReplayAsk,
    ) -> impl Future<Output = Result<Vec<Replayed>, StoreError>> + Send;

    /// Approves an event in review: `jobs` are written. The jobs are written once, however many approvals
    /// and on-time copies race. If jobs of the event are in review instead, these jobs become ready and run
    /// whatever the order rule decides, and `jobs` is ignored.
    fn approve(
        &self,
        event: EventId,
        jobs: Vec<NewJob>,
        by: Action,
    ) -> impl Future<Output = Result<Reviewed, StoreError>> + Send;

    /// Rejects an event in review, or the jobs of an event that are in review. Such jobs are discarded,
    /// and their fences are void.
    fn reject(
        &self,
        event: EventId,
        by: Action,
    ) -> impl Future<Output = Result<Reviewed, StoreError>> + Send;

    /// Discards the dead jobs of an event, or only that of one handler. Their fences are void. This also
    /// works for a handler that is no longer configured.
    fn discard(
        &self,
        event: EventId,
        handler: Option<HandlerName>,
        by: Action,
    ) -> impl Future<Output = Result<Reviewed, StoreError>> + Send;

    /// Pauses a handler: from then on no node claims a job of it, even after a restart. Jobs are
    /// written as before. An attempt that was claimed before ends as usual. While the handler is
    /// paused no attempt is counted, no job is lost, and no held job goes to review or past its
    /// gap.
    fn pause_handler(
        &self,
        handler: HandlerRef,
        by: Action,
    ) -> impl Future<Output = Result<PauseAnswer, StoreError>> + Send;

    /// Ends the pause of a handler: all jobs that became due meanwhile can be claimed.
    fn resume_handler(
        &self,
        handler: HandlerRef,
        by: Action,
    ) -> impl Future<Output = Result<PauseAnswer, StoreError>> + Send;
}

/// The answer to a pause, or to the end of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PauseAnswer {
    /// It is recorded.
    Changed,
    /// The handler was paused already, or was not paused.
    AlreadySo,
    /// No node has ever announced such a handler.
    Unknown,
}

/// A request to run jobs of an event again.
#[derive(Debug, Clone)]
pub struct ReplayAsk {
    /// The event.
    pub event: EventId,
    /// The jobs to replay, one for each handler. Other jobs of the event stay as they are.
    pub handlers: Vec<NewJob>,
    /// Whether jobs that are done, stale or discarded run again too.
    pub force: bool,
    /// Whether to report the effects without changing anything.
    pub dry_run: bool,
    /// The record of the action.
    pub by: Action,
}

/// The effect of a replay on one job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Replayed {
    /// The handler.
    pub handler: HandlerName,
    /// The effect.
    pub effect: ReplayEffect,
}

/// An effect of a replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ReplayEffect {
    /// The job runs, or runs again.
    WouldRun,
    /// The job is done and stays done.
    AlreadyApplied,
    /// A newer version was applied: the job would do nothing.
    Stale,
    /// The job is already waiting or running.
    AlreadyOpen,
    /// An operator rejected or discarded the job: only `force` runs it.
    Discarded,
}

/// The audit record of an operator's action.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Action {
    /// The name of the token, or `loopback`.
    pub who: String,
    /// The reason that the operator gave.
    pub reason: Option<String>,
    /// When the action was requested.
    pub at: Timestamp,
}

/// The answer to an approval, a rejection or a discard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reviewed {
    /// The event or its jobs were waiting for the decision, which is recorded.
    Decided,
    /// Nothing was waiting: the event has this status.
    NotWaiting(Status),
    /// There is no such event, or it was pruned.
    Unknown,
}
