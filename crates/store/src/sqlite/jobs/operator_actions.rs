//! What a person decides about jobs: let them go, refuse them, run them again.

use hapax_core::Timestamp;
use hapax_core::job::HandlerName;
use hapax_core::order::Guard;
use hapax_core::store::NewJob;
use rusqlite::Connection;

use super::row::JobRow;
use super::settle::note_attempt;
use super::{EventAt, Lanes};
use crate::sqlite::order;
use crate::sqlite::row::{
    DEAD, DISCARDED, DONE, HELD, LEASED, PARKED, READY, REVIEW, STALE, micros,
};

impl Lanes {
    /// A person lets the jobs of an event that are in review run; false when none is.
    pub(in crate::sqlite) fn approve(
        &mut self,
        conn: &Connection,
        seq: i64,
        now: Timestamp,
    ) -> rusqlite::Result<bool> {
        let lanes: Vec<i64> = conn
            .prepare_cached(
                "UPDATE hapax_job SET state = 0, due_at = ?2, wait = 0, forced = 1, error = NULL
                 WHERE event_seq = ?1 AND state = 7 RETURNING lane",
            )?
            .query_map((seq, micros(now)), |row| row.get(0))?
            .collect::<rusqlite::Result<_>>()?;
        for lane in &lanes {
            self.stir(*lane, micros(now));
        }
        Ok(!lanes.is_empty())
    }

    /// A person refuses the jobs of an event that are in review; false when none is.
    pub(in crate::sqlite) fn reject(
        &mut self,
        conn: &Connection,
        seq: i64,
        now: Timestamp,
    ) -> rusqlite::Result<bool> {
        let refused = conn
            .prepare_cached(
                "UPDATE hapax_job SET state = 8, due_at = ?2, fence = fence + 1
                 WHERE event_seq = ?1 AND state = 7",
            )?
            .execute((seq, micros(now)))?;
        Ok(refused > 0)
    }

    /// A person gives up the dead letters of an event, or only that of one handler; false when there
    /// is none.
    pub(in crate::sqlite) fn discard(
        conn: &Connection,
        seq: i64,
        handler: Option<&HandlerName>,
        now: Timestamp,
    ) -> rusqlite::Result<bool> {
        let given_up = conn
            .prepare_cached(
                "UPDATE hapax_job SET state = 8, due_at = ?2, fence = fence + 1
                 WHERE event_seq = ?1 AND state = 4 AND (?3 IS NULL OR lane IN (
                     SELECT l.lane FROM hapax_lane l JOIN hapax_handler h ON h.handler = l.handler
                     WHERE h.name = ?3))",
            )?
            .execute((seq, micros(now), handler.map(HandlerName::as_str)))?;
        Ok(given_up > 0)
    }

    /// Whether a job would run, and with `act` makes it so; and whether that changes anything. `None`
    /// where nothing can be done: what is hopeless stays buried, or is not begun.
    pub(in crate::sqlite) fn replay(
        &mut self,
        conn: &Connection,
        event: EventAt<'_>,
        job: &NewJob,
        force: bool,
        act: bool,
        now: Timestamp,
    ) -> rusqlite::Result<Option<(hapax_core::store::ReplayEffect, bool)>> {
        use hapax_core::store::ReplayEffect;
        let lane = self.lane(conn, event.pair, event.tenant, event.source, &job.handler)?;
        let order = self.spec_of(lane).and_then(|spec| spec.order.as_ref());
        let behind = match (order, &job.place) {
            (Some(order), Some(place)) => {
                let mark = order::mark(conn, lane, &place.resource)?;
                order.policy.decide(mark, place.position) == Guard::Stale
            }
            (Some(_) | None, _) => false,
        };
        let Some(row) = JobRow::find(conn, event.seq, lane)? else {
            if job.hopeless.is_some() {
                return Ok(None);
            }
            if act {
                self.write(conn, event, std::slice::from_ref(job), now)?;
                if force {
                    conn.execute(
                        "UPDATE hapax_job SET forced = 1 WHERE event_seq = ?1 AND lane = ?2",
                        (event.seq, lane),
                    )?;
                }
            }
            let stale = behind && !force;
            let effect = if stale { ReplayEffect::Stale } else { ReplayEffect::WouldRun };
            return Ok(Some((effect, true)));
        };
        if row.state == READY && row.due_at > micros(now) {
            // It waits for its next attempt: that is now, and else it stays as it is.
            if act {
                conn.execute(
                    "UPDATE hapax_job SET due_at = ?3, wait = 0 WHERE event_seq = ?1 AND lane = ?2",
                    (row.seq, lane, micros(now)),
                )?;
                self.stir(lane, micros(now));
            }
            return Ok(Some((ReplayEffect::WouldRun, true)));
        }
        match row.state {
            READY | LEASED | HELD | PARKED | REVIEW => {
                return Ok(Some((ReplayEffect::AlreadyOpen, false)));
            }
            DONE if !force => return Ok(Some((ReplayEffect::AlreadyApplied, false))),
            STALE if !force => return Ok(Some((ReplayEffect::Stale, false))),
            DISCARDED if !force => return Ok(Some((ReplayEffect::Discarded, false))),
            _ if job.hopeless.is_some() => return Ok(None),
            DEAD if behind && !force => {
                if act {
                    order::set_aside(conn, &row, STALE, now)?;
                }
                return Ok(Some((ReplayEffect::Stale, true)));
            }
            _ => {}
        }
        if act {
            let again = matches!(row.state, DONE | STALE | DISCARDED);
            if row.state == DONE {
                // The job's own row is about to tell of the new run.
                note_attempt(conn, &row, Some(row.due_at), "done", None)?;
            }
            let place = job.place.as_ref();
            conn.execute(
                "UPDATE hapax_job SET state = 0, due_at = ?3, wait = 0, fence = fence + 1, run = run + ?4,
                     attempt = iif(?4, 0, attempt), steps = 0,
                     lost = iif(?4, 0, min(lost, 1)), error = NULL,
                     result = NULL, resource = ?5, position = ?6, forced = ?7,
                     started_at = NULL, worker = NULL
                 WHERE event_seq = ?1 AND lane = ?2",
                (
                    row.seq,
                    lane,
                    micros(now),
                    i64::from(again),
                    place.map(|place| &*place.resource),
                    place.map(|place| place.position.0),
                    force,
                ),
            )?;
            self.stir(lane, micros(now));
        }
        Ok(Some((ReplayEffect::WouldRun, true)))
    }
}
