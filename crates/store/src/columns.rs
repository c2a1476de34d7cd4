//! The numbers and words of phases and statuses in columns: the same in every database. Each
//! dialect has its own SQL that ranks them.

use hapax_core::job::Phase;
use hapax_core::store::Status;

/// The column `state` of a job.
pub(crate) const READY: i64 = 0;
pub(crate) const LEASED: i64 = 1;
pub(crate) const DONE: i64 = 2;
pub(crate) const STALE: i64 = 3;
pub(crate) const DEAD: i64 = 4;
pub(crate) const HELD: i64 = 5;
pub(crate) const PARKED: i64 = 6;
pub(crate) const REVIEW: i64 = 7;
pub(crate) const DISCARDED: i64 = 8;

/// A job's phase from its column. An unknown number counts as dead, so that an operator looks at
/// it.
pub(crate) fn phase_of(state: i64) -> Phase {
    match state {
        READY => Phase::Ready,
        LEASED => Phase::Leased,
        DONE => Phase::Done,
        STALE => Phase::Stale,
        HELD => Phase::Held,
        PARKED => Phase::Parked,
        REVIEW => Phase::Review,
        DISCARDED => Phase::Discarded,
        _ => Phase::Dead,
    }
}

/// The column of a job's phase.
pub(crate) fn state_of(phase: Phase) -> i64 {
    match phase {
        Phase::Ready => READY,
        Phase::Leased => LEASED,
        Phase::Done => DONE,
        Phase::Stale => STALE,
        Phase::Dead => DEAD,
        Phase::Held => HELD,
        Phase::Parked => PARKED,
        Phase::Review => REVIEW,
        Phase::Discarded => DISCARDED,
    }
}

/// The rank that a database gave the jobs of an event, as a status.
pub(crate) fn ranked(rank: Option<i64>) -> Status {
    match rank {
        None => Status::Ignored,
        Some(0) => Status::Review,
        Some(1) => Status::Discarded,
        Some(2) => Status::Dead,
        Some(3) => Status::Failed,
        Some(4) => Status::Held,
        Some(5) => Status::Processing,
        Some(6) => Status::Received,
        Some(8) => Status::Stale,
        Some(_) => Status::Processed,
    }
}

/// A status from the column `pruned`; an unknown word counts as processed.
pub(crate) fn status_of(word: &str) -> Status {
    match word {
        "ignored" => Status::Ignored,
        "stale" => Status::Stale,
        "discarded" => Status::Discarded,
        _processed => Status::Processed,
    }
}
