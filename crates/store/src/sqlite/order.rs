//! The marks: the last applied position of each resource per lane, and the jobs that wait for it.

use std::collections::HashSet;

use hapax_core::Timestamp;
use hapax_core::lifecycle::{Act, Admission};
use hapax_core::order::{OnGap, OrderDecision, OrderPolicy, OrderRule, Position, ResourcePosition};
use rusqlite::{Connection, OptionalExtension};

use super::jobs::{JobRow, Lanes, Reported};
use super::row::{HELD, micros};

/// The mark of a resource, if an act may have read it before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum KnownMark {
    /// The mark was not read in this transaction.
    #[default]
    Unread,
    /// The mark was read, and has not moved since.
    Read(Option<Position>),
}

impl KnownMark {
    fn get(
        self,
        conn: &Connection,
        lane: i64,
        resource: &str,
    ) -> rusqlite::Result<Option<Position>> {
        match self {
            Self::Unread => mark(conn, lane, resource),
            Self::Read(mark) => Ok(mark),
        }
    }
}

/// The last position applied to a resource.
pub(super) fn mark(
    conn: &Connection,
    lane: i64,
    resource: &str,
) -> rusqlite::Result<Option<Position>> {
    conn.prepare_cached("SELECT position FROM hapax_mark WHERE lane = ?1 AND resource = ?2")?
        .query_row((lane, resource), |row| row.get(0).map(Position))
        .optional()
}

/// Begins a sequence that has no first number with the number that is claimed first. The first
/// number is committed with the claim: if it fails, no other number becomes the first.
pub(super) fn begin(
    conn: &Connection,
    lane: i64,
    order: &OrderPolicy,
    place: &ResourcePosition,
    now: Timestamp,
) -> rusqlite::Result<()> {
    match order {
        OrderPolicy::Sequence { start: None } => {
            let before = place.position.0.saturating_sub(1);
            conn.prepare_cached(
                "INSERT INTO hapax_mark (lane, resource, position, moved_at)
                 VALUES (?1, ?2, ?3, ?4) ON CONFLICT DO NOTHING",
            )?
            .execute((lane, &*place.resource, before, micros(now)))?;
        }
        OrderPolicy::Sequence { start: Some(_) }
        | OrderPolicy::Latest
        | OrderPolicy::Machine(_) => {}
    }
    Ok(())
}

/// The order rule's decision on a due job.
pub(super) fn admission(
    conn: &Connection,
    job: &JobRow,
    rule: &OrderRule,
    place: &ResourcePosition,
) -> rusqlite::Result<Admission> {
    Ok(match guard(conn, job, &rule.policy, place)? {
        OrderDecision::Stale => Admission::Stale,
        OrderDecision::Hold => Admission::Hold(rule.gaps.hold),
        OrderDecision::Run if is_busy(conn, job.lane, &place.resource)? => Admission::Busy,
        OrderDecision::Run => Admission::Run,
    })
}

/// The guard's decision on a job, by the current mark. A forced job is always admitted.
pub(super) fn guard(
    conn: &Connection,
    job: &JobRow,
    policy: &OrderPolicy,
    place: &ResourcePosition,
) -> rusqlite::Result<OrderDecision> {
    if job.forced {
        return Ok(OrderDecision::Run);
    }
    Ok(policy.decide(mark(conn, job.lane, &place.resource)?, place.position))
}

/// Limits the held jobs of a resource after a job was held. If too many jobs wait, the newest goes
/// to review. In a machine, whose states have no order by age, the job just held goes to review.
pub(super) fn limit_held(
    conn: &Connection,
    lanes: &mut Lanes,
    job: &JobRow,
    rule: &OrderRule,
    now: Timestamp,
) -> rusqlite::Result<()> {
    let Some(place) = &job.place else { return Ok(()) };
    let most = i64::try_from(rule.gaps.hold_max).unwrap_or(i64::MAX - 1);
    let held: i64 = conn
        .prepare_cached(
            "SELECT count(*) FROM (SELECT 1 FROM hapax_job
             WHERE lane = ?1 AND resource = ?2 AND state = 5 /* held */ LIMIT ?3)",
        )?
        .query_row((job.lane, &*place.resource, most + 1), |row| row.get(0))?;
    if held <= most {
        return Ok(());
    }
    let newest = match rule.policy {
        OrderPolicy::Machine(_) => job.seq,
        OrderPolicy::Latest | OrderPolicy::Sequence { .. } => conn
            .prepare_cached(
                "SELECT event_seq FROM hapax_job WHERE lane = ?1 AND resource = ?2 AND state = 5 /* held */
                 ORDER BY position DESC, event_seq DESC LIMIT 1",
            )?
            .query_row((job.lane, &*place.resource), |row| row.get(0))?,
    };
    let newest = JobRow::find(conn, newest, job.lane)?.expect("its number was just read");
    let review = lanes.act(conn, &newest, &Act::TooManyHeld, Reported::default(), now)?;
    assert!(review.is_ok(), "a held job was read");
    Ok(())
}

/// Jobs of one lane that are judged in one claim: the next claim, which follows at once, takes the
/// others.
const JUDGED_MAX: usize = 64;

/// Sends jobs held past their deadline to review, or lets the handler continue without the missing
/// one. Returns true if any was readied.
pub(super) fn judge(
    conn: &Connection,
    lanes: &mut Lanes,
    lane: i64,
    rule: &OrderRule,
    now: Timestamp,
) -> rusqlite::Result<bool> {
    let mut gone = HashSet::new();
    for job in JobRow::overdue_in(conn, lane, micros(now), JUDGED_MAX)? {
        match (rule.gaps.on_gap, &job.place) {
            (OnGap::Review, _) => {
                let ended = Act::HoldEnded { go: false };
                let review = lanes.act(conn, &job, &ended, Reported::default(), now)?;
                assert!(review.is_ok(), "only held jobs are read here");
            }
            // One gap is judged at a time: the next one when this job has run.
            (OnGap::Go, Some(place)) if gone.insert(place.resource.clone()) => {
                go_past_the_gap(conn, lanes, lane, &place.resource, &rule.policy, now)?;
            }
            // Only a job with a place is ever held.
            (OnGap::Go, Some(_) | None) => {}
        }
    }
    Ok(!gone.is_empty())
}

fn go_past_the_gap(
    conn: &Connection,
    lanes: &mut Lanes,
    lane: i64,
    resource: &str,
    policy: &OrderPolicy,
    now: Timestamp,
) -> rusqlite::Result<()> {
    let Some(first) = policy.earliest(held_positions(conn, lane, resource)?) else {
        return Ok(());
    };
    match policy {
        OrderPolicy::Latest | OrderPolicy::Sequence { .. } => {
            let before = Position(first.0.saturating_sub(1));
            let mark = mark(conn, lane, resource)?;
            let moved = move_mark(conn, lane, resource, mark, before, policy, now)?;
            ready_held(conn, lanes, lane, resource, Some(moved), policy, now)?;
        }
        OrderPolicy::Machine(_) => {
            if let Some(job) = JobRow::held_at(conn, lane, resource, first.0, first.0)?.first() {
                let ended = Act::HoldEnded { go: true };
                let ready = lanes.act(conn, job, &ended, Reported::default(), now)?;
                assert!(ready.is_ok(), "only held jobs are read here");
            }
        }
    }
    Ok(())
}

/// The positions at which jobs of a resource are held, in order of arrival.
fn held_positions(conn: &Connection, lane: i64, resource: &str) -> rusqlite::Result<Vec<Position>> {
    conn.prepare_cached(
        "SELECT position FROM hapax_job WHERE lane = ?1 AND resource = ?2 AND state = 5 /* held */
         GROUP BY position ORDER BY min(event_seq)",
    )?
    .query_map((lane, resource), |row| row.get(0).map(Position))?
    .collect()
}

/// Readies the held jobs that the mark no longer holds back; returns how many.
fn ready_held(
    conn: &Connection,
    lanes: &mut Lanes,
    lane: i64,
    resource: &str,
    mark: Option<Position>,
    policy: &OrderPolicy,
    now: Timestamp,
) -> rusqlite::Result<usize> {
    let highest = match (policy, mark) {
        (OrderPolicy::Latest | OrderPolicy::Sequence { .. }, Some(Position(mark))) => {
            mark.saturating_add(1)
        }
        (OrderPolicy::Latest | OrderPolicy::Sequence { .. }, None) => return Ok(0),
        (OrderPolicy::Machine(_), _) => i64::MAX,
    };
    let mut readied = 0;
    for job in JobRow::held_at(conn, lane, resource, i64::MIN, highest)? {
        let is_free = match (policy, &job.place) {
            (OrderPolicy::Machine(_), Some(place)) => {
                policy.decide(mark, place.position) != OrderDecision::Hold
            }
            (OrderPolicy::Latest | OrderPolicy::Sequence { .. }, _) | (_, None) => true,
        };
        if is_free {
            wake(conn, lanes, &job, now)?;
            readied += 1;
        }
    }
    Ok(readied)
}

fn wake(
    conn: &Connection,
    lanes: &mut Lanes,
    job: &JobRow,
    now: Timestamp,
) -> rusqlite::Result<()> {
    let woken = lanes.act(conn, job, &Act::Woken, Reported::default(), now)?;
    assert!(woken.is_ok(), "only held and parked jobs are woken");
    Ok(())
}

/// Readies all jobs of a lane that the handler's current order does not hold back: an earlier
/// configuration set them aside. Their order is decided again when they are claimed.
pub(super) fn ready_unheld(
    conn: &Connection,
    lanes: &mut Lanes,
    lane: i64,
    order: Option<&OrderRule>,
    now: Timestamp,
) -> rusqlite::Result<()> {
    for job in JobRow::waiting_in(conn, lane)? {
        let waits = match (order, &job.place) {
            (Some(order), Some(place)) if job.state == HELD => {
                order.policy.decide(mark(conn, lane, &place.resource)?, place.position)
                    == OrderDecision::Hold
            }
            (Some(_), Some(place)) => is_busy(conn, lane, &place.resource)?,
            (None, _) | (_, None) => false,
        };
        if !waits {
            wake(conn, lanes, &job, now)?;
        }
    }
    Ok(())
}

fn is_busy(conn: &Connection, lane: i64, resource: &str) -> rusqlite::Result<bool> {
    conn.prepare_cached(
        "SELECT 1 FROM hapax_job WHERE lane = ?1 AND resource = ?2 AND state = 1 /* leased */ AND exclusive = 1",
    )?
    .exists((lane, resource))
}

/// Moves the mark with "done"; a number never moves back. Returns the mark afterwards.
pub(super) fn advance(
    conn: &Connection,
    job: &JobRow,
    policy: &OrderPolicy,
    mark: KnownMark,
    now: Timestamp,
) -> rusqlite::Result<KnownMark> {
    let Some(place) = &job.place else { return Ok(mark) };
    let mark = mark.get(conn, job.lane, &place.resource)?;
    let moved = move_mark(conn, job.lane, &place.resource, mark, place.position, policy, now)?;
    Ok(KnownMark::Read(Some(moved)))
}

fn move_mark(
    conn: &Connection,
    lane: i64,
    resource: &str,
    mark: Option<Position>,
    position: Position,
    policy: &OrderPolicy,
    now: Timestamp,
) -> rusqlite::Result<Position> {
    let after = policy.after(mark, position);
    conn.prepare_cached(
        "INSERT INTO hapax_mark (lane, resource, position, moved_at) VALUES (?1, ?2, ?3, ?4)
         ON CONFLICT (lane, resource) DO UPDATE
         SET position = excluded.position, moved_at = max(moved_at, excluded.moved_at)",
    )?
    .execute((lane, resource, after.0, micros(now)))?;
    Ok(after)
}

/// Whether any mark of a lane has not moved since `before`.
pub(super) fn has_old_marks(
    conn: &Connection,
    lane: i64,
    before: Timestamp,
) -> rusqlite::Result<bool> {
    conn.prepare_cached("SELECT 1 FROM hapax_mark WHERE lane = ?1 AND moved_at < ?2 LIMIT 1")?
        .exists((lane, micros(before)))
}

/// Deletes up to `limit` marks of a lane that have not moved since `before`; returns how many.
pub(super) fn forget_marks(
    conn: &Connection,
    lane: i64,
    before: Timestamp,
    limit: usize,
) -> rusqlite::Result<usize> {
    conn.prepare_cached(
        "DELETE FROM hapax_mark WHERE lane = ?1 AND resource IN (
             SELECT resource FROM hapax_mark INDEXED BY hapax_mark_age
             WHERE lane = ?1 AND moved_at < ?2 ORDER BY moved_at LIMIT ?3)",
    )?
    .execute((lane, micros(before), limit as i64))
}

/// Readies the next parked job if a job was set aside while its resource is free: the parked job
/// has nothing left to wait for.
pub(super) fn ready_next_if_free(
    conn: &Connection,
    lanes: &mut Lanes,
    job: &JobRow,
    mark: KnownMark,
    now: Timestamp,
) -> rusqlite::Result<()> {
    match &job.place {
        Some(place) if !is_busy(conn, job.lane, &place.resource)? => {
            ready_next(conn, lanes, job, mark, now)
        }
        Some(_) | None => Ok(()),
    }
}

/// Readies jobs after a job of this resource has ended: those that the mark admits, and the first
/// parked one. Their order is decided again when they are claimed. The next claim judges jobs held
/// past the deadline.
pub(super) fn ready_next(
    conn: &Connection,
    lanes: &mut Lanes,
    job: &JobRow,
    mark: KnownMark,
    now: Timestamp,
) -> rusqlite::Result<()> {
    let Some(place) = &job.place else { return Ok(()) };
    let policy = lanes.policy_of(job.lane);
    let mark = mark.get(conn, job.lane, &place.resource)?;
    let held = ready_held(conn, lanes, job.lane, &place.resource, mark, &policy, now)?;
    let parked = JobRow::first_parked(conn, job.lane, &place.resource)?;
    if let Some(next) = &parked {
        wake(conn, lanes, next, now)?;
    }
    let to_judge = conn
        .prepare_cached(
            "SELECT 1 FROM hapax_job INDEXED BY hapax_job_due
             WHERE lane = ?1 AND state = 5 /* held */ AND due_at <= ?3 AND resource = ?2",
        )?
        .exists((job.lane, &*place.resource, micros(now)))?;
    if held > 0 || parked.is_some() || to_judge {
        lanes.wake(job.lane, micros(now));
    }
    Ok(())
}
