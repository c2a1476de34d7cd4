//! What work in Rust needs of a store: the right to one transaction that also records what came of
//! it, and the proof that it was used. A handler's is to a job and records "done" ([`Transact`]); an
//! API's is to an Idempotency-Key and keeps the answer ([`Answering`]).
//!
//! The transaction's type belongs to the store ([`Transact::Tx`]). SQLite has one writer, so its
//! transaction is a closure that the writer runs; a database with a connection for each handler
//! hands out an open transaction to await on. One type for both would be the least of the two.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::Tenant;
use hapax_core::job::{Fence, JobId, Retry};
use hapax_core::ledger::{Reserved, StoredAnswer};
use hapax_core::limits::{ANSWER_BODY_BYTES_MAX, ANSWER_HEADER_BYTES_MAX};
use hapax_core::store::{Claim, StoreError};

use crate::postgres::PgDbError;

/// A store whose handlers can be written in Rust.
pub trait Transact: Send + Sync + 'static {
    /// The right to commit the effects of one claim, once.
    type Tx: Send + 'static;

    /// The right that goes with `claim`. Nothing is opened yet. `timeout` is how long the
    /// transaction may take once it is.
    fn right(self: &Arc<Self>, claim: &Claim, timeout: Duration) -> Self::Tx;
}

/// A store in which the answer of one's own API commits with the work that it answers for.
pub trait Answering: Send + Sync + 'static {
    /// The right to commit the effects of one reservation together with its answer, once. Its commit
    /// gives the answer back: what is kept, and what every retry gets.
    type Tx: Send + 'static;

    /// The right that goes with `reserved`. Nothing is opened yet. `timeout` is how long the
    /// transaction may take once it is.
    fn answering(self: &Arc<Self>, reserved: &Reserved, timeout: Duration) -> Self::Tx;
}

/// A right to a job, by a claim.
#[derive(Debug, Clone)]
pub struct JobRight {
    pub(crate) job: JobId,
    pub(crate) fence: Fence,
    pub(crate) tenant: Tenant,
}

impl JobRight {
    pub(crate) fn of(claim: &Claim) -> Self {
        Self { job: claim.job, fence: claim.fence, tenant: claim.event.key.tenant.clone() }
    }
}

/// A right to an Idempotency-Key, by a reservation.
#[derive(Debug, Clone)]
pub struct KeyRight(pub(crate) Reserved);

/// Whether an answer can be kept.
pub(crate) fn fits(answer: &StoredAnswer) -> Result<(), Failure> {
    let headers: usize = answer.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
    if answer.body.len() > ANSWER_BODY_BYTES_MAX || headers > ANSWER_HEADER_BYTES_MAX {
        return Err(Failure::new(format_args!(
            "the answer is too large to keep: at most {ANSWER_BODY_BYTES_MAX} bytes of body and \
             {ANSWER_HEADER_BYTES_MAX} of headers"
        )));
    }
    Ok(())
}

/// The proof that the effects of a job are committed together with "done". Only a commit makes one,
/// so a handler cannot report success without it.
#[derive(Debug)]
pub struct Committed {
    job: JobId,
    fence: Fence,
}

impl Committed {
    pub(crate) fn new(job: JobId, fence: Fence) -> Self {
        Self { job, fence }
    }

    /// Whether this is the proof for this claim, and not for another one.
    pub fn is_of(&self, claim: &Claim) -> bool {
        self.job == claim.job && self.fence == claim.fence
    }
}

/// Why an attempt failed, and when to try again. Made from any error with `?`.
///
/// It is no [`Error`] itself: only so can every error become one.
#[derive(Debug)]
pub struct Failure {
    error: String,
    ending: Ending,
}

/// How an attempt ends that was not committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// With a verdict: it uses a step of the schedule.
    Failed(Retry),
    /// With one that may be another at once: a race was lost against other transactions.
    Raced,
    /// Without one: the fence or the database was gone.
    Lost,
}

impl Failure {
    /// It failed, and is tried again by the handler's schedule.
    pub fn new(error: impl fmt::Display) -> Self {
        Self { error: error.to_string(), ending: Ending::Failed(Retry::Schedule) }
    }

    /// It ended without a verdict.
    pub(crate) fn lost(error: impl fmt::Display) -> Self {
        Self { error: error.to_string(), ending: Ending::Lost }
    }

    /// It lost a race, and may win it at once.
    pub(crate) fn raced(error: impl fmt::Display) -> Self {
        Self { error: error.to_string(), ending: Ending::Raced }
    }

    /// It cannot succeed as it is: a dead letter at once, for a person to look at.
    pub fn give_up(error: impl fmt::Display) -> Self {
        Self::new(error).with(Retry::Never)
    }

    /// To be tried again after exactly this long, as long as the schedule has steps left.
    pub fn retry_in(self, wait: Duration) -> Self {
        self.with(Retry::In(wait))
    }

    /// To be tried again by the schedule, but not before this long.
    pub fn not_before(self, wait: Duration) -> Self {
        self.with(Retry::NotBefore(wait))
    }

    /// Why it failed.
    pub fn error(&self) -> &str {
        &self.error
    }

    /// When to try again; `None` where the attempt ended without a verdict, because the fence or
    /// the database was gone.
    pub fn retry(&self) -> Option<Retry> {
        match self.ending {
            Ending::Failed(retry) => Some(retry),
            Ending::Raced => Some(Retry::Schedule),
            Ending::Lost => None,
        }
    }

    /// Whether only a race was lost against other transactions (a deadlock, say), so that the attempt
    /// is worth repeating at once.
    pub fn is_race(&self) -> bool {
        self.ending == Ending::Raced
    }

    fn with(self, retry: Retry) -> Self {
        match self.ending {
            Ending::Failed(_) | Ending::Raced => Self { ending: Ending::Failed(retry), ..self },
            // What was lost has no schedule to choose from.
            Ending::Lost => self,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.error)
    }
}

impl<E: Error + Send + Sync + 'static> From<E> for Failure {
    fn from(error: E) -> Self {
        let error: Box<dyn Error + Send + Sync> = Box::new(error);
        let error = match error.downcast::<TxError>() {
            Ok(error) => {
                return match *error {
                    TxError::Failed(failure) => failure,
                    lost @ (TxError::FenceLost | TxError::Store(_)) => Self::lost(lost),
                };
            }
            Err(error) => error,
        };
        match error.downcast::<PgDbError>() {
            Ok(error) => error.into_failure(),
            Err(error) => Self::new(with_sources(&*error)),
        }
    }
}

/// Why there is no proof of a commit. None of these leaves anything half done.
#[derive(Debug, thiserror::Error)]
pub enum TxError {
    /// The job was claimed again, replayed, discarded, or is done, or newer news of its resource was
    /// applied; the key was reserved again, abandoned or finished. What this attempt did is void.
    #[error("the claim was lost: the work is someone else's now")]
    FenceLost,
    /// The effects failed, took too long, or were against a constraint.
    #[error("{0}")]
    Failed(Failure),
    /// The database could not commit, or its answer was lost: the next claim of the job, or whoever
    /// asks for the key again, finds out.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The error and what it came from, in one line.
pub(crate) fn with_sources(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        // Many errors print their source themselves.
        if !text.ends_with(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        cause = error.source();
    }
    text
}
