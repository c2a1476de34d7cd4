//! The marks: how far each resource has come, per lane, and who waits for whom.

use hapax_core::Timestamp;
use hapax_core::order::{Guard, OrderPolicy, Place, Position};
use rusqlite::{Connection, OptionalExtension};

use super::jobs::{HELD, JobRow, Lanes, PARKED, STALE};
use super::row::micros;

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

/// Decides whether a due job may be leased now; records it as stale, held or parked if not.
pub(super) fn admit(
    conn: &Connection,
    job: &JobRow,
    order: OrderPolicy,
    place: &Place,
    now: Timestamp,
) -> rusqlite::Result<bool> {
    match order.decide(mark(conn, job.lane, &place.resource)?, place.position) {
        Guard::Stale => set_aside(conn, job, STALE, now)?,
        Guard::Hold => set_aside(conn, job, HELD, now)?,
        Guard::Run if is_busy(conn, job.lane, &place.resource)? => {
            set_aside(conn, job, PARKED, now)?;
        }
        Guard::Run => return Ok(true),
    }
    Ok(false)
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

/// A job of this resource has ended: whoever waited for it is ready now. They are decided again
/// when they are claimed.
pub(super) fn ready_next(
    conn: &Connection,
    lanes: &mut Lanes,
    job: &JobRow,
    now: Timestamp,
) -> rusqlite::Result<()> {
    let Some(place) = &job.place else { return Ok(()) };
    let readied = conn
        .prepare_cached(
            "UPDATE hapax_job SET state = 0, due_at = ?3
             WHERE (event_seq, lane) IN (
                 SELECT event_seq, lane FROM hapax_job
                 WHERE lane = ?1 AND resource = ?2 AND state > 4
                 ORDER BY position, event_seq LIMIT 2)",
        )?
        .execute((job.lane, &*place.resource, micros(now)))?;
    if readied > 0 {
        lanes.stir(job.lane, micros(now));
    }
    Ok(())
}
