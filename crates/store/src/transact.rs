//! The traits of a store for handlers and APIs in Rust: the right to one transaction that also
//! records its outcome, and the proof that it was committed. A handler's right belongs to a job and
//! records "done" ([`Transact`]). An API's right belongs to an Idempotency-Key and stores the
//! answer ([`Answering`]).
//!
//! The transaction's type belongs to the store ([`Transact::Tx`]). SQLite has one writer, so its
//! transaction is a closure that the writer runs. A database with a connection for each handler
//! returns an open transaction to await on. One type for both could only do what both can.

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

    /// The right of this claim. No transaction is opened yet. `timeout` is how long the transaction
    /// may take once it is open.
    fn right(self: &Arc<Self>, claim: &Claim, timeout: Duration) -> Self::Tx;
}

/// A store in which the answer of a user's API commits together with its effects.
pub trait Answering: Send + Sync + 'static {
    /// The right to commit the effects of one reservation together with its answer, once. The
    /// commit returns the stored answer, which every retry gets.
    type Tx: Send + 'static;

    /// The right of this reservation. No transaction is opened yet. `timeout` is how long the
    /// transaction may take once it is open.
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

/// Checks that an answer is small enough to be stored.
pub(crate) fn fits(answer: &StoredAnswer) -> Result<(), Failure> {
    let headers: usize = answer.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
    if answer.body.len() > ANSWER_BODY_BYTES_MAX || headers > ANSWER_HEADER_BYTES_MAX {
        return Err(Failure::new(format_args!(
            "the answer is too large to store: at most {ANSWER_BODY_BYTES_MAX} bytes of body and \
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

    /// Whether this proof belongs to this claim.
    pub fn is_of(&self, claim: &Claim) -> bool {
        self.job == claim.job && self.fence == claim.fence
    }
}

/// Why an attempt failed, and when to try again. Made from any error with `?`.
///
/// `Failure` does not implement [`Error`] itself, because then not every error could be converted
/// into it.
#[derive(Debug)]
pub struct Failure {
    error: String,
    ending: FailureKind,
}

/// How an attempt without a commit ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FailureKind {
    /// The attempt failed with a verdict: it uses a step of the schedule.
    Failed(Retry),
    /// A race against other transactions was lost: an immediate retry may succeed.
    Raced,
    /// The attempt ended without a verdict: the fence or the database was lost.
    Lost,
}

impl Failure {
    /// A failure that is retried by the handler's schedule.
    pub fn new(error: impl fmt::Display) -> Self {
        Self { error: error.to_string(), ending: FailureKind::Failed(Retry::Schedule) }
    }

    /// An attempt that ended without a verdict.
    pub(crate) fn lost(error: impl fmt::Display) -> Self {
        Self { error: error.to_string(), ending: FailureKind::Lost }
    }

    /// A lost race: an immediate retry may succeed.
    pub(crate) fn raced(error: impl fmt::Display) -> Self {
        Self { error: error.to_string(), ending: FailureKind::Raced }
    }

    /// A failure that no retry can cure: a dead letter at once, for an operator to decide about.
    pub fn give_up(error: impl fmt::Display) -> Self {
        Self::new(error).with(Retry::Never)
    }

    /// Retries after exactly this long, as long as the schedule has steps left.
    pub fn retry_in(self, wait: Duration) -> Self {
        self.with(Retry::In(wait))
    }

    /// Retries by the schedule, but not before this long.
    pub fn not_before(self, wait: Duration) -> Self {
        self.with(Retry::NotBefore(wait))
    }

    /// Why the attempt failed.
    pub fn error(&self) -> &str {
        &self.error
    }

    /// When to try again; `None` if the attempt ended without a verdict, because the fence or the
    /// database was lost.
    pub fn retry(&self) -> Option<Retry> {
        match self.ending {
            FailureKind::Failed(retry) => Some(retry),
            FailureKind::Raced => Some(Retry::Schedule),
            FailureKind::Lost => None,
        }
    }

    /// Whether only a race against other transactions was lost (a deadlock, for example), so that
    /// an immediate retry is worthwhile.
    pub fn is_race(&self) -> bool {
        self.ending == FailureKind::Raced
    }

    fn with(self, retry: Retry) -> Self {
        match self.ending {
            FailureKind::Failed(_) | FailureKind::Raced => {
                Self { ending: FailureKind::Failed(retry), ..self }
            }
            // A lost attempt uses no schedule.
            FailureKind::Lost => self,
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

/// Why there is no proof of a commit. None of these leaves a partial change.
#[derive(Debug, thiserror::Error)]
pub enum TxError {
    /// The job was claimed again, replayed, discarded, or is done, or a newer version of its
    /// resource was applied; or the key was reserved again, abandoned or finished. This attempt is
    /// void.
    #[error("the claim was lost: another attempt owns the work now")]
    FenceLost,
    /// The effects failed, took too long, or violated a constraint.
    #[error("{0}")]
    Failed(Failure),
    /// The database could not commit, or its answer was lost. The next claim of the job, or the
    /// next request with the key, finds out which.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The error and its sources, in one line.
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
