//! The rows of jobs: how one is read, found and named.

use hapax_core::job::{Fence, JobId, Progress};
use hapax_core::order::{Position, ResourcePosition};
use hapax_core::store::HandlerAnswer;
use rusqlite::{Connection, OptionalExtension, Row};
use uuid::Uuid;

use crate::sqlite::row::{LANE_BITS, SEQ_BITS};

pub(super) const COLUMNS: &str = "event_seq, lane, state, due_at, fence, run, attempt, steps, lost, resource, \
                       position, started_at, worker, forced, earlier_attempts";
/// Condition on a job `held`: no job of its resource is leased. Few jobs are leased at a time, so
/// this scans them.
pub(super) const AT_REST: &str = "NOT EXISTS (SELECT 1 FROM hapax_job AS busy \
     WHERE busy.lane = held.lane AND busy.resource = held.resource AND busy.state = 1 /* leased */)";

/// A row of `hapax_job`.
#[derive(Debug, Clone)]
pub(in crate::sqlite) struct JobRow {
    pub(in crate::sqlite) seq: i64,
    pub(in crate::sqlite) lane: i64,
    pub(in crate::sqlite) state: i64,
    pub(in crate::sqlite) due_at: i64,
    pub(in crate::sqlite) fence: i64,
    pub(in crate::sqlite) run: u32,
    pub(in crate::sqlite) progress: Progress,
    pub(in crate::sqlite) place: Option<ResourcePosition>,
    pub(in crate::sqlite) started_at: Option<i64>,
    pub(in crate::sqlite) worker: Option<String>,
    /// The job runs whatever the order rule decides.
    pub(in crate::sqlite) forced: bool,
    /// The attempts of this run before the last replay.
    pub(in crate::sqlite) earlier_attempts: u32,
}

impl JobRow {
    pub(super) fn read(row: &Row<'_>) -> rusqlite::Result<Self> {
        let resource: Option<String> = row.get(9)?;
        let position: Option<i64> = row.get(10)?;
        Ok(Self {
            seq: row.get(0)?,
            lane: row.get(1)?,
            state: row.get(2)?,
            due_at: row.get(3)?,
            fence: row.get(4)?,
            run: row.get(5)?,
            progress: Progress { attempt: row.get(6)?, steps: row.get(7)?, lost: row.get(8)? },
            place: resource.zip(position).map(|(resource, position)| ResourcePosition {
                resource: resource.into(),
                position: Position(position),
            }),
            started_at: row.get(11)?,
            worker: row.get(12)?,
            forced: row.get(13)?,
            earlier_attempts: row.get(14)?,
        })
    }

    /// The jobs of a lane that are held or parked.
    pub(in crate::sqlite) fn waiting_in(
        conn: &Connection,
        lane: i64,
    ) -> rusqlite::Result<Vec<Self>> {
        conn.prepare_cached(&format!(
            "SELECT {COLUMNS} FROM hapax_job WHERE lane = ?1 AND state = 5 /* held */
             UNION ALL SELECT {COLUMNS} FROM hapax_job WHERE lane = ?1 AND state = 6 /* parked */"
        ))?
        .query_map([lane], Self::read)?
        .collect()
    }

    /// Jobs of a lane that may be claimed, the one due longest first.
    pub(super) fn due_in(
        conn: &Connection,
        lane: i64,
        now: i64,
        limit: usize,
    ) -> rusqlite::Result<Vec<Self>> {
        conn.prepare_cached(&format!(
            "SELECT {COLUMNS} FROM hapax_job WHERE lane = ?1 AND state = 0 /* ready */ AND due_at <= ?2
             ORDER BY due_at, event_seq LIMIT ?3"
        ))?
        .query_map((lane, now, limit as i64), Self::read)?
        .collect()
    }

    /// The jobs of a lane whose deadline is over while no job of their resource is leased, by
    /// deadline.
    pub(in crate::sqlite) fn overdue_in(
        conn: &Connection,
        lane: i64,
        now: i64,
        limit: usize,
    ) -> rusqlite::Result<Vec<Self>> {
        conn.prepare_cached(&overdue_sql())?
            .query_map((lane, now, limit as i64), Self::read)?
            .collect()
    }

    /// The row of a job.
    pub(in crate::sqlite) fn find(
        conn: &Connection,
        seq: i64,
        lane: i64,
    ) -> rusqlite::Result<Option<Self>> {
        conn.prepare_cached(&format!(
            "SELECT {COLUMNS} FROM hapax_job WHERE event_seq = ?1 AND lane = ?2"
        ))?
        .query_row((seq, lane), Self::read)
        .optional()
    }

    /// The jobs of an event.
    pub(super) fn of_event(conn: &Connection, seq: i64) -> rusqlite::Result<Vec<Self>> {
        conn.prepare_cached(&format!("SELECT {COLUMNS} FROM hapax_job WHERE event_seq = ?1"))?
            .query_map([seq], Self::read)?
            .collect()
    }

    /// The jobs of a resource that are held at these positions, or at any.
    pub(in crate::sqlite) fn held_at(
        conn: &Connection,
        lane: i64,
        resource: &str,
        lowest: i64,
        highest: i64,
    ) -> rusqlite::Result<Vec<Self>> {
        conn.prepare_cached(&format!(
            "SELECT {COLUMNS} FROM hapax_job
             WHERE lane = ?1 AND resource = ?2 AND state = 5 /* held */ AND position BETWEEN ?3 AND ?4
             ORDER BY event_seq"
        ))?
        .query_map((lane, resource, lowest, highest), Self::read)?
        .collect()
    }

    /// The first job that is parked at a resource.
    pub(in crate::sqlite) fn first_parked(
        conn: &Connection,
        lane: i64,
        resource: &str,
    ) -> rusqlite::Result<Option<Self>> {
        conn.prepare_cached(&format!(
            "SELECT {COLUMNS} FROM hapax_job WHERE lane = ?1 AND resource = ?2 AND state = 6 /* parked */
             ORDER BY position, event_seq LIMIT 1"
        ))?
        .query_row((lane, resource), Self::read)
        .optional()
    }

    /// The app's answer to the successful attempt.
    pub(super) fn answer(&self, conn: &Connection) -> rusqlite::Result<Option<HandlerAnswer>> {
        conn.prepare_cached(
            "SELECT answer_status, answer FROM hapax_job WHERE event_seq = ?1 AND lane = ?2",
        )?
        .query_row((self.seq, self.lane), |row| answer_of(row, 0))
    }

    /// Whether this fence was given to a claim and still holds. A job that was never claimed, was
    /// given back or was replayed has a fence too, but no claim holds it.
    pub(in crate::sqlite) fn is_under(&self, fence: Fence) -> bool {
        self.fence == fence.0 && self.started_at.is_some()
    }
}

/// An answer, from its two columns.
pub(in crate::sqlite) fn answer_of(
    row: &Row<'_>,
    at: usize,
) -> rusqlite::Result<Option<HandlerAnswer>> {
    let status: Option<u16> = row.get(at)?;
    let body: Option<String> = row.get(at + 1)?;
    Ok(status.map(|status| HandlerAnswer { status, body: body.unwrap_or_default() }))
}

pub(in crate::sqlite) fn overdue_sql() -> String {
    format!(
        "SELECT {COLUMNS} FROM hapax_job AS held
         WHERE lane = ?1 AND state = 5 /* held */ AND due_at <= ?2 AND {AT_REST}
         ORDER BY due_at, event_seq LIMIT ?3"
    )
}

/// The id of a job: its event's first half, then lane and row.
pub(in crate::sqlite) fn job_id(event: &[u8; 16], seq: i64, lane: i64) -> JobId {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&event[..8]);
    let low = (1 << 63) | ((lane as u64) << SEQ_BITS) | seq as u64;
    bytes[8..].copy_from_slice(&low.to_be_bytes());
    JobId(Uuid::from_bytes(bytes))
}

/// The row and lane of a job's id; such a job need not exist.
pub(in crate::sqlite) fn row_and_lane(job: JobId) -> (i64, i64) {
    let low = job.0.as_u128() as u64;
    let seq = low & ((1 << SEQ_BITS) - 1);
    let lane = (low >> SEQ_BITS) & ((1 << LANE_BITS) - 1);
    (seq as i64, lane as i64)
}
