//! How values are stored in the database: times as microseconds, states as small numbers, and ids
//! that contain the number of their row.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use hapax_core::Timestamp;
use hapax_core::store::{EventId, ReviewReason, Status};
use rusqlite::Connection;
use uuid::{Builder, Uuid};

pub(super) use crate::columns::{
    DEAD, DISCARDED, DONE, HELD, LEASED, PARKED, READY, REVIEW, STALE, phase_of, ranked, state_of,
};

/// The column `pruned` of an event that ended with this status.
pub(super) fn pruned_as(status: Status) -> i64 {
    match status {
        Status::Discarded => 11,
        Status::Stale => 18,
        Status::Ignored => 19,
        _processed => 17,
    }
}

/// The status that an event ended with, from the column `pruned`; `None` while the event is whole.
/// An unknown value counts as processed.
pub(super) fn status_of_pruned(pruned: i64) -> Option<Status> {
    match pruned {
        -1 => None,
        11 => Some(Status::Discarded),
        18 => Some(Status::Stale),
        19 => Some(Status::Ignored),
        _processed => Some(Status::Processed),
    }
}

/// The low bits of an id that hold the row's number: a million million events.
pub(super) const SEQ_BITS: u32 = 40;

/// The bits of the lane in a job's id, before those of the row: four million lanes.
pub(super) const LANE_BITS: u32 = 22;

/// Makes ids: UUIDs of version 7 whose last bits are the row's number, so that an event is found by
/// its id without a further index. The rest is random enough that two databases never produce the
/// same id.
#[derive(Debug, Default)]
pub(super) struct Ids {
    dice: RandomState,
}

impl Ids {
    pub(super) fn make(&self, at: Timestamp, seq: i64) -> EventId {
        let millis = u64::try_from(at.as_millisecond()).unwrap_or(0);
        let noise = self.dice.hash_one((millis, seq));
        let low = (noise << SEQ_BITS) | (seq as u64 & ((1 << SEQ_BITS) - 1));
        let mut tail = [0; 10];
        tail[..2].copy_from_slice(&noise.to_be_bytes()[..2]);
        tail[2..].copy_from_slice(&low.to_be_bytes());
        EventId(Builder::from_unix_timestamp_millis(millis, &tail).into_uuid())
    }
}

/// Random numbers for jitter: they need not be good, only different each time.
#[derive(Debug, Default)]
pub(super) struct Dice {
    seed: RandomState,
    rolls: u64,
}

impl Dice {
    /// A number in 0..1.
    pub(super) fn roll(&mut self) -> f64 {
        self.rolls += 1;
        self.seed.hash_one(self.rolls) as f64 / u64::MAX as f64
    }
}

/// The status of an event by its jobs, and the result of the first of them.
pub(super) fn standing_of_jobs(
    conn: &Connection,
    seq: i64,
) -> rusqlite::Result<(Status, Option<Arc<str>>)> {
    let mut jobs = conn.prepare_cached(
        "SELECT state, steps, result FROM hapax_job WHERE event_seq = ?1 ORDER BY lane",
    )?;
    let rows = jobs.query_map([seq], |row| {
        Ok((phase_of(row.get(0)?), row.get::<_, u32>(1)?, row.get::<_, Option<String>>(2)?))
    })?;
    let rows: Vec<_> = rows.collect::<rusqlite::Result<_>>()?;
    let status = Status::of_jobs(rows.iter().map(|(phase, steps, _)| (*phase, *steps)));
    let result = rows.into_iter().find_map(|(_, _, result)| result);
    Ok((status, result.map(Arc::from)))
}

/// The status of an event whose own columns hold `event_state`: if those leave it open, its jobs
/// decide.
pub(super) fn status_at(
    conn: &Connection,
    seq: i64,
    event_state: EventState,
) -> rusqlite::Result<Status> {
    match event_state.status() {
        Status::Ignored => Ok(standing_of_jobs(conn, seq)?.0),
        status => Ok(status),
    }
}

/// The row number in an id. The id may belong to another database, so the caller compares the whole
/// id.
pub(super) fn seq_of(id: EventId) -> i64 {
    (id.0.as_u128() as u64 & ((1 << SEQ_BITS) - 1)) as i64
}

pub(super) fn micros(at: Timestamp) -> i64 {
    at.as_microsecond()
}

pub(super) fn timestamp(micros: i64) -> Timestamp {
    Timestamp::from_microsecond(micros).unwrap_or(Timestamp::UNIX_EPOCH)
}

pub(super) fn event_id(blob: [u8; 16]) -> EventId {
    EventId(Uuid::from_bytes(blob))
}

/// The columns `state` and `review` of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EventState {
    pub(super) state: EventPhase,
    pub(super) review: Option<ReviewReason>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EventPhase {
    Open,
    Review,
    Discarded,
}

impl EventState {
    pub(super) fn new(review: Option<ReviewReason>) -> Self {
        let state = if review.is_some() { EventPhase::Review } else { EventPhase::Open };
        Self { state, review }
    }

    /// An unknown value counts as discarded: such an event never runs.
    pub(super) fn from_columns(state: i64, review: i64) -> Self {
        let state = match state {
            0 => EventPhase::Open,
            1 => EventPhase::Review,
            _ => EventPhase::Discarded,
        };
        let review = match review {
            1 => Some(ReviewReason::Late),
            2 => Some(ReviewReason::Replay),
            3 => Some(ReviewReason::Conflict),
            _ => None,
        };
        Self { state, review }
    }

    pub(super) fn columns(self) -> (i64, i64) {
        let state = match self.state {
            EventPhase::Open => 0,
            EventPhase::Review => 1,
            EventPhase::Discarded => 2,
        };
        let review = match self.review {
            None => 0,
            Some(ReviewReason::Late) => 1,
            Some(ReviewReason::Replay) => 2,
            Some(ReviewReason::Conflict) => 3,
        };
        (state, review)
    }

    pub(super) fn status(self) -> Status {
        match self.state {
            EventPhase::Open => Status::Ignored,
            EventPhase::Review => Status::Review,
            EventPhase::Discarded => Status::Discarded,
        }
    }

    /// Why the event is in review now; `None` after it was approved or rejected.
    pub(super) fn waiting(self) -> Option<ReviewReason> {
        self.review.filter(|_| self.state == EventPhase::Review)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_contains_the_number_of_its_row() {
        let ids = Ids::default();
        for seq in [1, 2, 77, 1 << 20, (1 << SEQ_BITS) - 1] {
            let id = ids.make(Timestamp::from_second(1_790_000_000).unwrap(), seq);
            assert_eq!(seq_of(id), seq);
            assert_eq!(id.0.get_version_num(), 7);
        }
    }
}
