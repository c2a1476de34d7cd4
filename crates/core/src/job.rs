//! Jobs: ids, phases, and the arithmetic of attempts. A job is one event for one handler.
//!
//! [`crate::lifecycle`] defines the transitions between phases.
//!
//! An attempt that fails or times out uses a step of the schedule. An attempt that is *lost* (the process
//! died, or the lease ran out) uses no step and backs off. A lost attempt that ran in this process may have
//! killed it. From then on the job is claimed alone, so that an event that kills the process takes no other
//! job with it. An app that is called, or a worker outside, cannot kill the process.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Our id of a Job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JobId(pub Uuid);

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The number that voids an old right: every claim, replay and rejection raises it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Fence(pub i64);

/// A handler by its name in the config, unique within its source.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct HandlerName(Arc<str>);

impl HandlerName {
    /// The name as written.
    pub fn new(name: impl AsRef<str>) -> Self {
        Self(Arc::from(name.as_ref()))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for HandlerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The phase of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// To be claimed once it is due.
    Ready,
    /// Claimed, until the lease ends.
    Leased,
    /// Its effects are committed. Only a forced replay runs it again.
    Done,
    /// A newer version was already applied; the job did nothing.
    Stale,
    /// A dead letter: an operator can replay or discard it.
    Dead,
    /// Waits for its predecessor.
    Held,
    /// Waits for another job of the same resource to end.
    Parked,
    /// Its predecessor is missing: an operator decides whether it runs.
    Review,
    /// An operator discarded the job.
    Discarded,
}

impl Phase {
    /// The phase as the API and the views write it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Leased => "leased",
            Self::Done => "done",
            Self::Stale => "stale",
            Self::Dead => "dead",
            Self::Held => "held",
            Self::Parked => "parked",
            Self::Review => "review",
            Self::Discarded => "discarded",
        }
    }

    /// Whether the job can still change without an operator.
    pub fn is_open(self) -> bool {
        match self {
            Self::Ready | Self::Leased | Self::Held | Self::Parked => true,
            Self::Done | Self::Stale | Self::Dead | Self::Review | Self::Discarded => false,
        }
    }

    /// Whether it has ended and waits for no operator: only then may it be pruned.
    pub fn is_over(self) -> bool {
        match self {
            Self::Done | Self::Stale | Self::Discarded => true,
            Self::Ready | Self::Leased | Self::Dead | Self::Held | Self::Parked | Self::Review => {
                false
            }
        }
    }
}

/// How many lost attempts of a job that ran alone make it a dead letter: enough to survive a few
/// bad restarts, and few enough that a poisonous event does not kill the process for hours.
pub const LOST_ALONE_MAX: u32 = 5;

/// The back-off after the first lost attempt; it doubles with each further one.
const LOST_BACKOFF: Duration = Duration::from_secs(1);

/// The longest back-off after a lost attempt.
const LOST_BACKOFF_MAX: Duration = Duration::from_secs(300);

/// How many requests that never left this process use no step of the schedule. Further ones use
/// steps like any failure: their cause lies in this process or its configuration, which an operator
/// must fix. Twenty such requests take more than an hour.
pub const UNSENT_MAX: u32 = 20;

/// Where the work of a handler is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkLocation {
    /// In this process (SQL, Rust): it may end the process.
    Inside,
    /// In an app that this process calls.
    Called,
    /// By workers that lease its jobs over the API: a restart of this process ends no lease.
    Pulled,
}

/// How often a job is tried, and how long each attempt may hold it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// The wait before each attempt; as many attempts as there are waits.
    pub retry: Vec<Duration>,
    /// How long a claim lasts unless renewed.
    pub lease: Duration,
}

impl Policy {
    /// Whether a failed attempt is the last one, if `steps` steps of the schedule were used before. Attempts that were
    /// never sent use no step.
    pub fn ends_with(&self, steps: u32, retry: Retry) -> bool {
        let is_last = self.retry.len() <= steps as usize + 1;
        match retry {
            Retry::Never => true,
            Retry::Unsent => false,
            Retry::Schedule | Retry::NotBefore(_) | Retry::In(_) => is_last,
        }
    }
}

/// The progress of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Progress {
    /// Claims so far, this run.
    pub attempt: u32,
    /// Verdicts so far: steps of the schedule that are used.
    pub steps: u32,
    /// Attempts that ended without a verdict.
    pub lost: u32,
}

/// The result of an expired lease, or of a claim whose process died.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AfterLoss {
    /// The job may be claimed again, alone, from `due` on.
    Again {
        /// The progress, with one more lost attempt.
        progress: Progress,
        /// When the job is due.
        due: Timestamp,
    },
    /// The job was lost too often.
    Bury {
        /// The progress, with one more lost attempt.
        progress: Progress,
    },
}

/// The result of a failed attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AfterFailure {
    /// The job is tried again from `due` on.
    Again {
        /// The progress, with one more step used if anything was tried.
        progress: Progress,
        /// When the job is due.
        due: Timestamp,
    },
    /// The schedule is used up, or no further attempt can succeed.
    Bury {
        /// The progress, with one more step used.
        progress: Progress,
    },
}

/// Whether and when a failed attempt is repeated, as far as its holder knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// By the schedule.
    Schedule,
    /// By the schedule, but not before this time has passed (Retry-After).
    NotBefore(Duration),
    /// After exactly this long.
    In(Duration),
    /// Never: another attempt cannot succeed.
    Never,
    /// The request never left this process, so nothing was tried. The first [`UNSENT_MAX`] such
    /// requests use no step of the schedule, and the wait doubles with each. Further ones follow
    /// the schedule.
    Unsent,
}

impl Progress {
    /// Whether the next claim must take this job alone.
    pub fn alone(self, at: WorkLocation) -> bool {
        self.lost > 0 && at == WorkLocation::Inside
    }

    /// The progress after a claim: one more attempt.
    pub fn claimed(self) -> Self {
        Self { attempt: self.attempt + 1, ..self }
    }

    /// The progress after a claim is returned before its work began: as if the claim had not been
    /// made.
    pub fn given_back(self) -> Self {
        Self { attempt: self.attempt.saturating_sub(1), ..self }
    }

    /// The attempt ended without a verdict at `at` (the end of its lease, or the restart). `dice` in
    /// 0..=1 chooses the jitter, so that jobs lost together do not become due together.
    pub fn lost(self, workplace: WorkLocation, at: Timestamp, dice: f64) -> AfterLoss {
        let progress = Self { lost: self.lost.saturating_add(1), ..self };
        if progress.lost > LOST_ALONE_MAX && workplace == WorkLocation::Inside {
            return AfterLoss::Bury { progress };
        }
        AfterLoss::Again { progress, due: later(at, backoff(progress.lost, dice)) }
    }

    /// The attempt failed at `now`. `dice` in 0..=1 chooses the jitter.
    pub fn failed(self, policy: &Policy, retry: Retry, now: Timestamp, dice: f64) -> AfterFailure {
        let unsent = self.attempt.saturating_sub(self.steps).saturating_sub(self.lost);
        if retry == Retry::Unsent && unsent <= UNSENT_MAX {
            return AfterFailure::Again { progress: self, due: later(now, backoff(unsent, dice)) };
        }
        let progress = Self { steps: self.steps + 1, ..self };
        let Some(scheduled) = policy.retry.get(progress.steps as usize) else {
            return AfterFailure::Bury { progress };
        };
        let wait = match retry {
            Retry::Schedule | Retry::Unsent => jittered(*scheduled, dice),
            Retry::NotBefore(least) => jittered(*scheduled, dice).max(least),
            Retry::In(exactly) => exactly,
            Retry::Never => return AfterFailure::Bury { progress },
        };
        AfterFailure::Again { progress, due: later(now, wait) }
    }

    /// Like [`Progress::failed`], for work whose schedule began again with a replay: the attempts before the replay
    /// used no part of that schedule.
    pub fn failed_since_replay(
        self,
        earlier_attempts: u32,
        policy: &Policy,
        retry: Retry,
        now: Timestamp,
        dice: f64,
    ) -> AfterFailure {
        let recent = Self { attempt: self.attempt.saturating_sub(earlier_attempts), ..self };
        let with_all = |progress| Self { attempt: self.attempt, ..progress };
        match recent.failed(policy, retry, now, dice) {
            AfterFailure::Again { progress, due } => {
                AfterFailure::Again { progress: with_all(progress), due }
            }
            AfterFailure::Bury { progress } => AfterFailure::Bury { progress: with_all(progress) },
        }
    }
}

/// The wait after this many attempts without a verdict.
fn backoff(attempts: u32, dice: f64) -> Duration {
    let doubled = LOST_BACKOFF.saturating_mul(1 << attempts.saturating_sub(1).min(16));
    jittered(doubled.min(LOST_BACKOFF_MAX), dice)
}

/// Varies a wait by ±20 %, so that jobs that failed together are not retried together.
pub fn jittered(wait: Duration, dice: f64) -> Duration {
    let seconds = wait.as_secs_f64() * (0.8 + 0.4 * dice.clamp(0.0, 1.0));
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

/// The idempotency key that is sent with a job: equal across attempts, restarts and replays; a
/// forced run appends its number.
pub fn idempotency_key(event: crate::store::EventId, handler: &HandlerName, run: u32) -> String {
    match run {
        0 | 1 => format!("{event}:{handler}"),
        run => format!("{event}:{handler}:{run}"),
    }
}

pub(crate) fn later(at: Timestamp, wait: Duration) -> Timestamp {
    SignedDuration::try_from(wait)
        .ok()
        .and_then(|wait| at.checked_add(wait).ok())
        .unwrap_or(Timestamp::MAX)
}
