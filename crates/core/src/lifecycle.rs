//! The life of a job on one page: [`step`] is one `match` over every act and every phase.
//!
//! SQLite applies what [`step`] returns. PostgreSQL repeats these rules in SQL, because users call its
//! functions inside their own transactions. A test compares the two for every act in every phase.
//! docs/lifecycle.md has the same table in words, and a test compares it with this file.
//!
//! The store checks the fence first: an act under an older fence never reaches this function. The
//! description of each act says whether it needs a fence.

use std::time::Duration;

use jiff::Timestamp;

use crate::job::{AfterFailure, AfterLoss, Phase, Policy, Progress, Retry, WorkLocation, later};
use crate::order::{HELD_TOO_LONG, HELD_TOO_MANY, OVERTAKEN};

/// The error of a job whose lease ended without a result.
pub const LEASE_ENDED: &str = "the lease ran out";

/// The error of a job that was given up after too many lost attempts.
pub const LOST_TOO_OFTEN: &str =
    "every attempt was lost: the process died or the lease ran out each time";

/// The part of a job that its rules depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobState {
    /// The phase.
    pub phase: Phase,
    /// Attempts in this run, and failures and losses since the last replay. A replay keeps one of the losses before it.
    pub progress: Progress,
    /// The attempts of this run before the last replay, without the loss that the replay kept.
    pub earlier_attempts: u32,
    /// When a ready job is due, a lease ends, or a hold ends; for other phases, when it began.
    pub due: Timestamp,
    /// Whether the order rule is skipped.
    pub forced: bool,
}

/// An act on a job: by a worker, by an operator, or because of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act<'a> {
    /// A worker asks for due jobs, and the order rule has judged this one.
    Claim {
        /// The judgement.
        admission: Admission,
        /// How long the claim lasts.
        lease: Duration,
    },
    /// The end of a lease has passed, or the process that held it has died.
    LeaseEnded {
        /// Where the attempt ran.
        workplace: WorkLocation,
    },
    /// The holder reports that the work is done. Needs the fence.
    Done {
        /// Whether the order mark has passed the job meanwhile.
        overtaken: Overtaken,
    },
    /// The holder reports that the attempt failed. Needs the fence.
    Failed {
        /// When to try again, as far as the holder knows.
        retry: Retry,
        /// The handler's schedule.
        policy: &'a Policy,
    },
    /// The holder returns a claim that it never began. Needs the fence.
    GivenBack,
    /// The order rule refuses the job inside the transaction of its work. Needs the fence.
    SetAside {
        /// How long to hold it if a predecessor is missing; `None` if it is stale.
        hold: Option<Duration>,
    },
    /// The predecessor that a job was held for is done, or its resource is free again.
    Woken,
    /// The hold has ended and the predecessor is still missing.
    HoldEnded {
        /// Whether the handler continues without it (`on_gap = "go"`).
        go: bool,
    },
    /// Too many jobs of one resource are held.
    TooManyHeld,
    /// A copy of the event asks a synchronous source for its outcome.
    Hurry,
    /// An operator runs the job again.
    Replay {
        /// Whether a job that has ended runs too, and the order rule is skipped.
        force: bool,
        /// Whether the order mark has passed the job.
        is_behind: bool,
        /// Whether the event has no usable order value, so that the job can never run.
        is_hopeless: bool,
    },
    /// An operator approves a job in review.
    Approve,
    /// An operator rejects a job in review.
    Reject,
    /// An operator gives up a dead letter.
    Discard,
}

/// The decision of the order rule about a due job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// The job may run now.
    Run,
    /// Another job of its resource is running.
    Busy,
    /// A newer version was already applied.
    Stale,
    /// Its predecessor is missing: hold it for this long.
    Hold(Duration),
}

/// Whether the order mark has passed a running job: its lease may have ended, and another job of its
/// resource may have been applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overtaken {
    /// The mark has not passed the job, or the job keeps no order, or the job is forced.
    No,
    /// A newer version was applied, so that the job can only be stale.
    Stale,
    /// The job may not settle now, but its turn may come.
    NotItsTurn,
}

/// Why an act changes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unchanged {
    /// The job is not ready, or not due yet.
    NotClaimable,
    /// The job is done under this very fence: the answer to the first report was lost.
    AlreadyDone,
    /// The holder no longer has the right: the attempt has ended already.
    RightLost,
    /// The job waits or runs, and needs no operator.
    AlreadyOpen,
    /// The job is done. Only `force` runs it again.
    AlreadyApplied,
    /// The job is stale. Only `force` runs it again.
    AlreadyStale,
    /// An operator discarded the job. Only `force` runs it again.
    AlreadyDiscarded,
    /// The event has no usable order value.
    Hopeless,
    /// The act is meant for another phase.
    NotWaiting,
}

/// The change that an act makes to a job. Everything that is not named here stays as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// The phase afterwards.
    pub phase: Phase,
    /// See [`JobState::due`].
    pub due: Timestamp,
    /// See [`JobState::progress`].
    pub progress: Progress,
    /// See [`JobState::earlier_attempts`].
    pub earlier_attempts: u32,
    /// Whether the order rule is skipped from now on.
    pub forced: bool,
    /// Whether the fence grows, so that the last holder no longer has the right.
    pub voids_fence: bool,
    /// Whether another run begins, with another idempotency key.
    pub new_run: bool,
    /// The change of the holder: the worker's name and when it began.
    pub holder: Holder,
    /// The change of the error text.
    pub error: ErrorText,
    /// The change to the history of attempts.
    pub history: History,
    /// The effect on other jobs of its resource.
    pub turn: ResourceEffect,
}

/// The change of the holder of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holder {
    /// The last holder stays on record; its fence may still be valid.
    Keep,
    /// The worker that claims.
    Set,
    /// None.
    Clear,
}

/// The change of the error text of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorText {
    /// It stays.
    Keep,
    /// The text is deleted, together with the result of an earlier run.
    Clear,
    /// The text is replaced by this one.
    Set(&'static str),
    /// The error that the holder reports.
    Reported,
}

/// The change to the history of attempts. A later record of the same attempt replaces the earlier
/// one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum History {
    /// Nothing.
    Keep,
    /// The attempt was lost, with this error; it has no end time.
    Lost(&'static str),
    /// The attempt was lost now, because the job was overtaken.
    Overtaken,
    /// The attempt failed now, with the error that the holder reports.
    Failed,
    /// The attempt that is done moves from the job's row to the history, because another run begins.
    Done,
    /// The record of this attempt is deleted: the attempt was recorded as lost or failed and was
    /// only slow.
    Remove,
}

/// The effect of an act on other jobs of the resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResourceEffect {
    /// Nothing.
    Keep,
    /// The resource is free: jobs that waited for it, or for this job, are ready.
    Release,
    /// The job did not use its turn: if the resource is free, the next job is ready.
    Pass,
}

/// Decides what `act` does to `job` at `now`. `dice` in 0..=1 chooses the jitter of a wait.
pub fn step(job: &JobState, act: &Act<'_>, now: Timestamp, dice: f64) -> Result<Change, Unchanged> {
    use Phase::{Dead, Discarded, Done, Held, Leased, Parked, Ready, Review, Stale};

    let to = |phase, due| Change::only(job, phase, due);
    match (*act, job.phase) {
        // Workers.
        (Act::Claim { admission, lease }, Ready) if job.due <= now => Ok(match admission {
            Admission::Run => Change {
                progress: job.progress.claimed(),
                voids_fence: true,
                holder: Holder::Set,
                ..to(Leased, later(now, lease))
            },
            Admission::Busy => to(Parked, now),
            Admission::Stale => Change { turn: ResourceEffect::Pass, ..to(Stale, now) },
            Admission::Hold(hold) => {
                Change { turn: ResourceEffect::Pass, ..to(Held, later(now, hold)) }
            }
        }),
        (
            Act::Claim { .. },
            Ready | Leased | Held | Parked | Review | Done | Stale | Dead | Discarded,
        ) => Err(Unchanged::NotClaimable),

        (Act::LeaseEnded { workplace }, Leased) => {
            let ended = job.due.min(now);
            let change = match job.progress.lost(workplace, ended, dice) {
                AfterLoss::Again { progress, due } => {
                    Change { progress, error: ErrorText::Set(LEASE_ENDED), ..to(Ready, due) }
                }
                AfterLoss::Bury { progress } => {
                    Change { progress, error: ErrorText::Set(LOST_TOO_OFTEN), ..to(Dead, now) }
                }
            };
            Ok(Change {
                history: History::Lost(LEASE_ENDED),
                turn: ResourceEffect::Release,
                ..change
            })
        }
        (
            Act::LeaseEnded { .. },
            Ready | Held | Parked | Review | Done | Stale | Dead | Discarded,
        ) => Err(Unchanged::NotWaiting),

        (Act::Done { overtaken: Overtaken::Stale }, Leased) => Ok(Change {
            error: ErrorText::Set(OVERTAKEN),
            history: History::Overtaken,
            turn: ResourceEffect::Release,
            ..to(Stale, now)
        }),
        (
            Act::Done { overtaken: Overtaken::Stale | Overtaken::NotItsTurn },
            Ready | Leased | Held | Parked | Review | Dead,
        ) => Err(Unchanged::RightLost),
        // The effects are committed, even if the attempt was recorded as lost or failed since: a
        // fence is valid until the next claim, replay, rejection or discard.
        (
            Act::Done { overtaken: Overtaken::No },
            Ready | Leased | Held | Parked | Review | Dead,
        ) => Ok(Change {
            forced: false,
            error: ErrorText::Clear,
            history: if job.phase == Leased { History::Keep } else { History::Remove },
            turn: ResourceEffect::Release,
            ..to(Done, now)
        }),
        (Act::Done { .. }, Done) => Err(Unchanged::AlreadyDone),
        (Act::Done { .. }, Stale | Discarded) => Err(Unchanged::RightLost),

        (Act::Failed { retry, policy }, Leased) => {
            let earlier = job.earlier_attempts;
            let after = job.progress.failed_since_replay(earlier, policy, retry, now, dice);
            let (phase, progress, due) = match after {
                AfterFailure::Again { progress, due } => (Ready, progress, due),
                AfterFailure::Bury { progress } => (Dead, progress, now),
            };
            Ok(Change {
                progress,
                error: ErrorText::Reported,
                history: History::Failed,
                turn: ResourceEffect::Release,
                ..to(phase, due)
            })
        }
        (Act::Failed { .. }, Ready | Held | Parked | Review | Done | Stale | Dead | Discarded) => {
            Err(Unchanged::RightLost)
        }

        // A returned claim and a refusal by the order rule do not count as attempts.
        (Act::GivenBack, Leased) => Ok(job.uncounted(to(Ready, now))),
        (Act::SetAside { hold: Some(hold) }, Leased) => {
            Ok(Change { turn: ResourceEffect::Pass, ..job.uncounted(to(Held, later(now, hold))) })
        }
        (Act::SetAside { hold: None }, Leased) => {
            Ok(Change { turn: ResourceEffect::Pass, ..job.uncounted(to(Stale, now)) })
        }
        (
            Act::GivenBack | Act::SetAside { .. },
            Ready | Held | Parked | Review | Done | Stale | Dead | Discarded,
        ) => Err(Unchanged::RightLost),

        // Order.
        (Act::Woken, Held | Parked) => Ok(to(Ready, now)),
        (Act::Woken, Ready | Leased | Review | Done | Stale | Dead | Discarded) => {
            Err(Unchanged::NotWaiting)
        }
        (Act::HoldEnded { go: true }, Held) => Ok(Change { forced: true, ..to(Ready, now) }),
        (Act::HoldEnded { go: false }, Held) => {
            Ok(Change { error: ErrorText::Set(HELD_TOO_LONG), ..to(Review, now) })
        }
        (Act::TooManyHeld, Held) => {
            Ok(Change { error: ErrorText::Set(HELD_TOO_MANY), ..to(Review, now) })
        }
        (
            Act::HoldEnded { .. } | Act::TooManyHeld,
            Ready | Leased | Parked | Review | Done | Stale | Dead | Discarded,
        ) => Err(Unchanged::NotWaiting),

        // Senders.
        (Act::Hurry, Ready) if job.due > now => Ok(to(Ready, now)),
        (Act::Hurry, Ready | Leased | Held | Parked | Review | Done | Stale | Dead | Discarded) => {
            Err(Unchanged::NotWaiting)
        }

        // Operators.
        (Act::Replay { .. }, Ready) if job.due > now => Ok(to(Ready, now)),
        (Act::Replay { .. }, Ready | Leased | Held | Parked | Review) => {
            Err(Unchanged::AlreadyOpen)
        }
        (Act::Replay { force: false, .. }, Done) => Err(Unchanged::AlreadyApplied),
        (Act::Replay { force: false, .. }, Stale) => Err(Unchanged::AlreadyStale),
        (Act::Replay { force: false, .. }, Discarded) => Err(Unchanged::AlreadyDiscarded),
        (Act::Replay { is_hopeless: true, .. }, Done | Stale | Discarded | Dead) => {
            Err(Unchanged::Hopeless)
        }
        (Act::Replay { force: false, is_behind: true, .. }, Dead) => Ok(to(Stale, now)),
        // The schedule begins again. A job that was lost before still runs alone.
        (Act::Replay { force, .. }, Dead) => Ok(Change {
            progress: Progress { steps: 0, lost: job.progress.lost.min(1), ..job.progress },
            earlier_attempts: job.progress.attempt.saturating_sub(job.progress.lost.min(1)),
            ..Change::again(job, force, now)
        }),
        (Act::Replay { force: true, .. }, Done | Stale | Discarded) => Ok(Change {
            progress: Progress::default(),
            earlier_attempts: 0,
            new_run: true,
            history: if job.phase == Done { History::Done } else { History::Keep },
            ..Change::again(job, true, now)
        }),
        (Act::Approve, Review) => {
            Ok(Change { forced: true, error: ErrorText::Clear, ..to(Ready, now) })
        }
        (Act::Reject, Review) | (Act::Discard, Dead) => {
            Ok(Change { voids_fence: true, ..to(Discarded, now) })
        }
        (
            Act::Approve | Act::Reject,
            Ready | Leased | Held | Parked | Done | Stale | Dead | Discarded,
        )
        | (Act::Discard, Ready | Leased | Held | Parked | Review | Done | Stale | Discarded) => {
            Err(Unchanged::NotWaiting)
        }
    }
}

impl Change {
    /// Only the phase changes.
    fn only(job: &JobState, phase: Phase, due: Timestamp) -> Self {
        Self {
            phase,
            due,
            progress: job.progress,
            earlier_attempts: job.earlier_attempts,
            forced: job.forced,
            voids_fence: false,
            new_run: false,
            holder: Holder::Keep,
            error: ErrorText::Keep,
            history: History::Keep,
            turn: ResourceEffect::Keep,
        }
    }

    /// A job that had ended is ready again.
    fn again(job: &JobState, force: bool, now: Timestamp) -> Self {
        Self {
            forced: force,
            voids_fence: true,
            holder: Holder::Clear,
            error: ErrorText::Clear,
            ..Self::only(job, Phase::Ready, now)
        }
    }
}

impl JobState {
    /// The claim did not become an attempt.
    fn uncounted(&self, change: Change) -> Change {
        Change {
            progress: self.progress.given_back(),
            voids_fence: true,
            holder: Holder::Clear,
            turn: ResourceEffect::Release,
            ..change
        }
    }
}
