//! The marks: how far each resource has come, per lane, who waits for whom, and for how long.

use std::collections::HashSet;

use hapax_core::Timestamp;
use hapax_core::order::{
    Guard, HELD_TOO_LONG, HELD_TOO_MANY, OnGap, OrderPolicy, OrderRule, Place, Position,
};
use rusqlite::{Connection, OptionalExtension};

use super::jobs::{JobRow, Lanes};
use super::row::{HELD, PARKED, READY, STALE, micros};

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

/// A sequence without a first number begins with what is claimed first: committed with the claim, so
/// that no other number is taken for the first should this one fail.
pub(super) fn begin(
    conn: &Connection,
    lane: i64,
    order: &OrderPolicy,
    place: &Place,
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

/// Whether a due job may be leased now.
pub(super) enum Admitted {
    Yes,
    /// Another of its resource is at work: it is parked.
    Busy,
    /// The guard says no: it is stale or held.
    SetAside,
}

/// Decides whether a due job may be leased now; records it as stale, held or parked if not.
pub(super) fn admit(
    conn: &Connection,
    lanes: &mut Lanes,
    job: &JobRow,
    rule: &OrderRule,
    place: &Place,
    now: Timestamp,
) -> rusqlite::Result<Admitted> {
    match guard(conn, job, &rule.policy, place)? {
        Guard::Stale => set_aside(conn, job, STALE, now)?,
        Guard::Hold => hold(conn, lanes, job, rule, place, now)?,
        Guard::Run if is_busy(conn, job.lane, &place.resource)? => {
            set_aside(conn, job, PARKED, now)?;
            return Ok(Admitted::Busy);
        }
        Guard::Run => return Ok(Admitted::Yes),
    }
    Ok(Admitted::SetAside)
}

/// What the guard says of a job by the mark as it is. A forced one does not ask.
pub(super) fn guard(
    conn: &Connection,
    job: &JobRow,
    policy: &OrderPolicy,
    place: &Place,
) -> rusqlite::Result<Guard> {
    if job.forced {
        return Ok(Guard::Run);
    }
    Ok(policy.decide(mark(conn, job.lane, &place.resource)?, place.position))
}

/// Holds a job: its deadline is fixed now. Beyond the most that may wait, the newest goes to a
/// person: in a machine, where nothing is newer by itself, the one arriving.
pub(super) fn hold(
    conn: &Connection,
    lanes: &mut Lanes,
    job: &JobRow,
    rule: &OrderRule,
    place: &Place,
    now: Timestamp,
) -> rusqlite::Result<()> {
    let hold = rule.gaps.hold.as_micros() as i64;
    let until = micros(now).saturating_add(hold);
    put(conn, job, HELD, until, hold)?;
    lanes.stir(job.lane, until);
    let most = i64::try_from(rule.gaps.hold_max).unwrap_or(i64::MAX - 1);
    let held: i64 = conn
        .prepare_cached(
            "SELECT count(*) FROM (SELECT 1 FROM hapax_job
             WHERE lane = ?1 AND resource = ?2 AND state = 5 LIMIT ?3)",
        )?
        .query_row((job.lane, &*place.resource, most + 1), |row| row.get(0))?;
    if held <= most {
        return Ok(());
    }
    let newest = match rule.policy {
        OrderPolicy::Machine(_) => job.seq,
        OrderPolicy::Latest | OrderPolicy::Sequence { .. } => conn
            .prepare_cached(
                "SELECT event_seq FROM hapax_job WHERE lane = ?1 AND resource = ?2 AND state = 5
                 ORDER BY position DESC, event_seq DESC LIMIT 1",
            )?
            .query_row((job.lane, &*place.resource), |row| row.get(0))?,
    };
    to_review(conn, job.lane, newest, HELD_TOO_MANY, now)
}

fn to_review(
    conn: &Connection,
    lane: i64,
    seq: i64,
    why: &str,
    now: Timestamp,
) -> rusqlite::Result<()> {
    conn.prepare_cached(
        "UPDATE hapax_job SET state = 7, due_at = ?3, error = ?4 WHERE event_seq = ?1 AND lane = ?2",
    )?
    .execute((seq, lane, micros(now), why))?;
    Ok(())
}

/// Jobs of one lane that are judged in one claim: the others wait for the next, which comes at once.
const JUDGED_MAX: usize = 64;

/// Who was held past the deadline goes to a person, or past the gap. True when any was readied.
pub(super) fn judge(
    conn: &Connection,
    lane: i64,
    rule: &OrderRule,
    now: Timestamp,
) -> rusqlite::Result<bool> {
    let mut gone = HashSet::new();
    for job in JobRow::overdue_in(conn, lane, micros(now), JUDGED_MAX)? {
        match (rule.gaps.on_gap, &job.place) {
            (OnGap::Review, _) => to_review(conn, lane, job.seq, HELD_TOO_LONG, now)?,
            // One gap at a time: what comes next is judged when this one has run.
            (OnGap::Go, Some(place)) if gone.insert(place.resource.clone()) => {
                go_past_the_gap(conn, lane, &place.resource, &rule.policy, now)?;
            }
            // Only what has a place is ever held.
            (OnGap::Go, Some(_) | None) => {}
        }
    }
    Ok(!gone.is_empty())
}

fn go_past_the_gap(
    conn: &Connection,
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
            move_mark(conn, lane, resource, before, policy, now)?;
            ready_held(conn, lane, resource, policy, now)?;
        }
        OrderPolicy::Machine(_) => {
            conn.prepare_cached(
                "UPDATE hapax_job SET state = 0, due_at = ?4, wait = 0, forced = 1
                 WHERE (event_seq, lane) IN (
                     SELECT event_seq, lane FROM hapax_job
                     WHERE lane = ?1 AND resource = ?2 AND position = ?3 AND state = 5
                     ORDER BY event_seq LIMIT 1)",
            )?
            .execute((lane, resource, first.0, micros(now)))?;
        }
    }
    Ok(())
}

/// The positions at which jobs of a resource are held, the one that came first first.
fn held_positions(conn: &Connection, lane: i64, resource: &str) -> rusqlite::Result<Vec<Position>> {
    conn.prepare_cached(
        "SELECT position FROM hapax_job WHERE lane = ?1 AND resource = ?2 AND state = 5
         GROUP BY position ORDER BY min(event_seq)",
    )?
    .query_map((lane, resource), |row| row.get(0).map(Position))?
    .collect()
}

/// Readies who is held and would not be by the mark as it is; how many.
fn ready_held(
    conn: &Connection,
    lane: i64,
    resource: &str,
    policy: &OrderPolicy,
    now: Timestamp,
) -> rusqlite::Result<usize> {
    match policy {
        OrderPolicy::Latest | OrderPolicy::Sequence { .. } => conn
            .prepare_cached(
                "UPDATE hapax_job SET state = 0, due_at = ?3, wait = 0
                 WHERE lane = ?1 AND resource = ?2 AND state = 5
                   AND position <= 1 + (SELECT position FROM hapax_mark
                                        WHERE lane = ?1 AND resource = ?2)",
            )?
            .execute((lane, resource, micros(now))),
        OrderPolicy::Machine(_) => {
            let current = mark(conn, lane, resource)?;
            let mut readied = 0;
            for position in held_positions(conn, lane, resource)? {
                if policy.decide(current, position) != Guard::Hold {
                    readied += conn
                        .prepare_cached(
                            "UPDATE hapax_job SET state = 0, due_at = ?4, wait = 0
                             WHERE lane = ?1 AND resource = ?2 AND position = ?3 AND state = 5",
                        )?
                        .execute((lane, resource, position.0, micros(now)))?;
                }
            }
            Ok(readied)
        }
    }
}

/// Readies all of a lane that the handler's order of today does not hold back: what waits was set
/// aside by the order of another day. They are decided again when they are claimed.
pub(super) fn let_go(
    conn: &Connection,
    lane: i64,
    order: Option<&OrderRule>,
    now: Timestamp,
) -> rusqlite::Result<()> {
    for job in JobRow::waiting_in(conn, lane)? {
        let waits = match (order, &job.place) {
            (Some(order), Some(place)) if job.state == HELD => {
                order.policy.decide(mark(conn, lane, &place.resource)?, place.position)
                    == Guard::Hold
            }
            (Some(_), Some(place)) => is_busy(conn, lane, &place.resource)?,
            (None, _) | (_, None) => false,
        };
        if !waits {
            set_aside(conn, &job, READY, now)?;
        }
    }
    Ok(())
}

fn is_busy(conn: &Connection, lane: i64, resource: &str) -> rusqlite::Result<bool> {
    conn.prepare_cached(
        "SELECT 1 FROM hapax_job WHERE lane = ?1 AND resource = ?2 AND state = 1 AND exclusive = 1",
    )?
    .exists((lane, resource))
}

/// Puts a job where it waits, or ends.
pub(super) fn set_aside(
    conn: &Connection,
    job: &JobRow,
    state: i64,
    now: Timestamp,
) -> rusqlite::Result<()> {
    put(conn, job, state, micros(now), 0)
}

fn put(conn: &Connection, job: &JobRow, state: i64, due: i64, wait: i64) -> rusqlite::Result<()> {
    conn.prepare_cached(
        "UPDATE hapax_job SET state = ?3, due_at = ?4, wait = ?5 WHERE event_seq = ?1 AND lane = ?2",
    )?
    .execute((job.seq, job.lane, state, due, wait))?;
    Ok(())
}

/// The mark moves with "done", and a number never back.
pub(super) fn advance(
    conn: &Connection,
    job: &JobRow,
    policy: &OrderPolicy,
    now: Timestamp,
) -> rusqlite::Result<()> {
    match &job.place {
        Some(place) => move_mark(conn, job.lane, &place.resource, place.position, policy, now),
        None => Ok(()),
    }
}

fn move_mark(
    conn: &Connection,
    lane: i64,
    resource: &str,
    position: Position,
    policy: &OrderPolicy,
    now: Timestamp,
) -> rusqlite::Result<()> {
    let after = policy.after(mark(conn, lane, resource)?, position);
    conn.prepare_cached(
        "INSERT INTO hapax_mark (lane, resource, position, moved_at) VALUES (?1, ?2, ?3, ?4)
         ON CONFLICT (lane, resource) DO UPDATE
         SET position = excluded.position, moved_at = max(moved_at, excluded.moved_at)",
    )?
    .execute((lane, resource, after.0, micros(now)))?;
    Ok(())
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

/// Deletes up to `limit` marks of a lane that have not moved since `before`; how many.
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

/// A job was set aside though its resource is free: whoever is parked behind it has nobody left to
/// wait for.
pub(super) fn ready_next_if_free(
    conn: &Connection,
    lanes: &mut Lanes,
    job: &JobRow,
    now: Timestamp,
) -> rusqlite::Result<()> {
    match &job.place {
        Some(place) if !is_busy(conn, job.lane, &place.resource)? => {
            ready_next(conn, lanes, job, now)
        }
        Some(_) | None => Ok(()),
    }
}

/// A job of this resource has ended: those that the mark lets go are ready now, and the first of
/// those that were parked. They are decided again when they are claimed. Who is held past the
/// deadline is judged by the next claim.
pub(super) fn ready_next(
    conn: &Connection,
    lanes: &mut Lanes,
    job: &JobRow,
    now: Timestamp,
) -> rusqlite::Result<()> {
    let Some(place) = &job.place else { return Ok(()) };
    let policy = lanes.policy_of(job.lane);
    let held = ready_held(conn, job.lane, &place.resource, &policy, now)?;
    let parked = conn
        .prepare_cached(
            "UPDATE hapax_job SET state = 0, due_at = ?3, wait = 0
             WHERE (event_seq, lane) IN (
                 SELECT event_seq, lane FROM hapax_job
                 WHERE lane = ?1 AND resource = ?2 AND state = 6
                 ORDER BY position, event_seq LIMIT 1)",
        )?
        .execute((job.lane, &*place.resource, micros(now)))?;
    let to_judge = conn
        .prepare_cached(
            "SELECT 1 FROM hapax_job INDEXED BY hapax_job_overdue
             WHERE lane = ?1 AND state = 5 AND due_at <= ?3 AND resource = ?2",
        )?
        .exists((job.lane, &*place.resource, micros(now)))?;
    if held + parked > 0 || to_judge {
        lanes.wake(job.lane, micros(now));
    }
    Ok(())
}
