//! The marks: how far each resource has come, per lane, and who waits for whom.

use hapax_core::Timestamp;
use hapax_core::order::{Guard, OrderPolicy, OrderRule, Place, Position};
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
) -> rusqlite::Result<()> {
    match order {
        OrderPolicy::Sequence { start: None } => {
            conn.prepare_cached(
                "INSERT INTO hapax_mark (lane, resource, position) VALUES (?1, ?2, ?3)
                 ON CONFLICT DO NOTHING",
            )?
            .execute((lane, &*place.resource, place.position.0.saturating_sub(1)))?;
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
    job: &JobRow,
    order: &OrderPolicy,
    place: &Place,
    now: Timestamp,
) -> rusqlite::Result<Admitted> {
    let (admitted, state) =
        match order.decide(mark(conn, job.lane, &place.resource)?, place.position) {
            Guard::Stale => (Admitted::SetAside, STALE),
            Guard::Hold => (Admitted::SetAside, HELD),
            Guard::Run if is_busy(conn, job.lane, &place.resource)? => (Admitted::Busy, PARKED),
            Guard::Run => return Ok(Admitted::Yes),
        };
    set_aside(conn, job, state, now)?;
    Ok(admitted)
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
    conn.prepare_cached(
        "UPDATE hapax_job SET state = ?3, due_at = ?4 WHERE event_seq = ?1 AND lane = ?2",
    )?
    .execute((job.seq, job.lane, state, micros(now)))?;
    Ok(())
}

/// The mark moves with "done", and never back.
pub(super) fn advance(conn: &Connection, job: &JobRow) -> rusqlite::Result<()> {
    let Some(place) = &job.place else { return Ok(()) };
    conn.prepare_cached(
        "INSERT INTO hapax_mark (lane, resource, position) VALUES (?1, ?2, ?3)
         ON CONFLICT (lane, resource) DO UPDATE SET position = max(position, excluded.position)",
    )?
    .execute((job.lane, &*place.resource, place.position.0))?;
    Ok(())
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

/// A job of this resource has ended: the number after the mark is ready now, and the first of those
/// that were parked. They are decided again when they are claimed.
pub(super) fn ready_next(
    conn: &Connection,
    lanes: &mut Lanes,
    job: &JobRow,
    now: Timestamp,
) -> rusqlite::Result<()> {
    let Some(place) = &job.place else { return Ok(()) };
    let held = conn
        .prepare_cached(
            "UPDATE hapax_job SET state = 0, due_at = ?3
             WHERE lane = ?1 AND resource = ?2 AND state = 5 AND state > 4
               AND position <= 1 + (SELECT position FROM hapax_mark
                                    WHERE lane = ?1 AND resource = ?2)",
        )?
        .execute((job.lane, &*place.resource, micros(now)))?;
    let parked = conn
        .prepare_cached(
            "UPDATE hapax_job SET state = 0, due_at = ?3
             WHERE (event_seq, lane) IN (
                 SELECT event_seq, lane FROM hapax_job
                 WHERE lane = ?1 AND resource = ?2 AND state = 6 AND state > 4
                 ORDER BY position, event_seq LIMIT 1)",
        )?
        .execute((job.lane, &*place.resource, micros(now)))?;
    if held + parked > 0 {
        lanes.wake(job.lane, micros(now));
    }
    Ok(())
}
