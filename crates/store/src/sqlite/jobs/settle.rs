//! How an attempt ended, recorded through its fence; leases lengthened, given back and hurried.

use std::time::Duration;

use hapax_core::job::{AfterFailure, Fence, JobId, Policy, Retry};
use hapax_core::order::{Guard, OVERTAKEN};
use hapax_core::store::{Held, NewMessage, Outcome};
use hapax_core::{Tenant, Timestamp};
use rusqlite::Connection;
use uuid::Uuid;

use super::Lanes;
use super::row::{JobRow, place_of};
use crate::limits::{ERROR_CHARS_MAX, RESULT_CHARS_MAX};
use crate::sqlite::order;
use crate::sqlite::row::{DEAD, DISCARDED, DONE, LEASED, READY, STALE, micros};

impl Lanes {
    /// Records how an attempt ended, if the fence still holds.
    pub(in crate::sqlite) fn settle(
        &mut self,
        conn: &Connection,
        job: JobId,
        fence: Fence,
        outcome: &Outcome,
        now: Timestamp,
    ) -> rusqlite::Result<Held> {
        let (seq, lane) = place_of(job);
        let Some(row) = JobRow::find(conn, seq, lane)? else { return Ok(Held::Lost) };
        if !row.is_under(fence) {
            return Ok(Held::Lost);
        }
        match outcome {
            Outcome::Done { .. } if row.state == DONE => Ok(Held::Kept),
            // A fence is valid until the next claim, replay or reject: a late "done" still counts.
            Outcome::Done { .. } if self.was_passed(conn, &row)? => {
                self.overtaken(conn, &row, now)?;
                Ok(Held::Lost)
            }
            Outcome::Done { result, publish } if !matches!(row.state, STALE | DISCARDED) => {
                self.finish(conn, &row, result.as_deref(), now)?;
                let of = &self.by_lane.get(&lane).expect("a job's lane is known").tenant;
                for message in publish {
                    write_message(conn, message, of, row.seq, now)?;
                }
                Ok(Held::Kept)
            }
            Outcome::Failed { error, retry } if row.state == LEASED => {
                self.fail(conn, &row, error, *retry, now)?;
                Ok(Held::Kept)
            }
            Outcome::Done { .. } | Outcome::Failed { .. } => Ok(Held::Lost),
        }
    }

    /// "Done", in the transaction of the effects; the mark moves with it.
    pub(in crate::sqlite) fn finish(
        &mut self,
        conn: &Connection,
        job: &JobRow,
        result: Option<&str>,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        let result = result.map(|result| shortened(result, RESULT_CHARS_MAX));
        let done = conn.prepare_cached(include_str!("../sql/finish_job.sql"))?.execute((
            job.seq,
            job.lane,
            job.fence,
            micros(now),
            result,
        ))?;
        assert_eq!(done, 1, "the writer has just seen this fence hold");
        if job.state != LEASED {
            // It was written off as lost or failed, and was only slow: one attempt has one end.
            conn.prepare_cached(
                "DELETE FROM hapax_attempt
                 WHERE event_seq = ?1 AND lane = ?2 AND run = ?3 AND attempt = ?4",
            )?
            .execute((job.seq, job.lane, job.run, job.progress.attempt))?;
        }
        let policy = self.policy_of(job.lane);
        order::advance(conn, job, &policy, now)?;
        order::ready_next(conn, self, job, now)
    }

    /// A verdict: one step of the schedule.
    pub(in crate::sqlite) fn fail(
        &mut self,
        conn: &Connection,
        job: &JobRow,
        error: &str,
        retry: Retry,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        let error = shortened(error, ERROR_CHARS_MAX);
        note_attempt(conn, job, Some(micros(now)), "failed", Some(&error))?;
        let unknown = Policy { retry: Vec::new(), lease: Duration::ZERO };
        let dice = self.dice.roll();
        let policy = self.spec_of(job.lane).map_or(&unknown, |spec| &spec.policy);
        let (state, due, progress) = match job.progress.failed(policy, retry, now, dice) {
            AfterFailure::Again { progress, due } => (READY, micros(due), progress),
            AfterFailure::Bury { progress } => (DEAD, micros(now), progress),
        };
        conn.prepare_cached(
            "UPDATE hapax_job SET state = ?4, due_at = ?5, steps = ?6, error = ?7, wait = ?5 - ?8
             WHERE event_seq = ?1 AND lane = ?2 AND fence = ?3",
        )?
        .execute((
            job.seq,
            job.lane,
            job.fence,
            state,
            due,
            progress.steps,
            &error,
            micros(now),
        ))?;
        self.stir(job.lane, due);
        order::ready_next(conn, self, job, now)
    }

    /// Whether the mark has passed a job that was let run, and lost its lease on the way.
    pub(in crate::sqlite) fn was_passed(
        &self,
        conn: &Connection,
        job: &JobRow,
    ) -> rusqlite::Result<bool> {
        let order = self.spec_of(job.lane).and_then(|spec| spec.order.as_ref());
        let (Some(rule), Some(place), false) = (order, &job.place, job.forced) else {
            return Ok(false);
        };
        let mark = order::mark(conn, job.lane, &place.resource)?;
        Ok(mark.is_some() && !rule.policy.may_settle(mark, place.position))
    }

    /// The mark passed a job while it was at work. Where it can only be stale from then on, it is so
    /// at once: nobody has to wait for the end of its lease.
    pub(in crate::sqlite) fn overtaken(
        &mut self,
        conn: &Connection,
        job: &JobRow,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        let Some(place) = job.place.as_ref().filter(|_| job.state == LEASED) else {
            return Ok(());
        };
        if order::guard(conn, job, &self.policy_of(job.lane), place)? != Guard::Stale {
            return Ok(());
        }
        note_attempt(conn, job, Some(micros(now)), "lost", Some(OVERTAKEN))?;
        conn.prepare_cached(
            "UPDATE hapax_job SET state = 3, due_at = ?4, error = ?5
             WHERE event_seq = ?1 AND lane = ?2 AND fence = ?3",
        )?
        .execute((job.seq, job.lane, job.fence, micros(now), OVERTAKEN))?;
        order::ready_next(conn, self, job, now)
    }

    /// Lengthens a lease.
    pub(in crate::sqlite) fn renew(
        &mut self,
        conn: &Connection,
        job: JobId,
        fence: Fence,
        lease: Duration,
        now: Timestamp,
    ) -> rusqlite::Result<Held> {
        let (seq, lane) = place_of(job);
        let lease = lease.as_micros() as i64;
        let until = micros(now).saturating_add(lease);
        let renewed = conn
            .prepare_cached(
                "UPDATE hapax_job SET due_at = max(due_at, ?4), wait = max(wait, ?5)
                 WHERE event_seq = ?1 AND lane = ?2 AND fence = ?3 AND state = 1",
            )?
            .execute((seq, lane, fence.0, until, lease))?;
        Ok(if renewed == 1 { Held::Kept } else { Held::Lost })
    }

    /// Work that was claimed but not begun: as if it had not been claimed.
    pub(in crate::sqlite) fn give_back(
        &mut self,
        conn: &Connection,
        job: JobId,
        fence: Fence,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        let (seq, lane) = place_of(job);
        let Some(row) = JobRow::find(conn, seq, lane)? else { return Ok(()) };
        if row.fence != fence.0 || row.state != LEASED {
            return Ok(());
        }
        uncount(conn, &row)?;
        order::set_aside(conn, &row, READY, now)?;
        self.wake(lane, micros(now));
        order::ready_next(conn, self, &row, now)
    }

    /// Makes the waiting jobs of an event due now.
    pub(in crate::sqlite) fn hurry(
        &mut self,
        conn: &Connection,
        seq: i64,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        let lanes: Vec<i64> = conn
            .prepare_cached(
                "UPDATE hapax_job SET due_at = ?2, wait = 0
                 WHERE event_seq = ?1 AND state = 0 AND due_at > ?2 RETURNING lane",
            )?
            .query_map((seq, micros(now)), |row| row.get(0))?
            .collect::<rusqlite::Result<_>>()?;
        for lane in lanes {
            self.stir(lane, micros(now));
        }
        Ok(())
    }
}

/// Records a message with the commit that publishes it. The same id twice is one message; one that
/// names no tenant is of its event's, so that no tenant can use up another's ids. What handlers
/// publish by SQL goes by the same rules, in the trigger of `hapax_publish`.
pub(super) fn write_message(
    conn: &Connection,
    message: &NewMessage,
    of: &Tenant,
    event_seq: i64,
    now: Timestamp,
) -> rusqlite::Result<()> {
    let id = match &message.id {
        Some(id) => id.clone(),
        None => format!("msg_{}", Uuid::now_v7().simple()),
    };
    conn.prepare_cached(
        "INSERT INTO hapax_message (tenant, id, type, data, key, event_seq, created_at)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7) ON CONFLICT (tenant, id) DO NOTHING",
    )?
    .execute((
        message.tenant.as_deref().unwrap_or(of.as_str()),
        id,
        &message.r#type,
        message.data.to_string(),
        &message.key,
        event_seq,
        micros(now),
    ))?;
    Ok(())
}

/// The claim came to nothing but a look at the job: it was no attempt, and its right is void.
pub(in crate::sqlite) fn uncount(conn: &Connection, job: &JobRow) -> rusqlite::Result<()> {
    conn.prepare_cached(
        "UPDATE hapax_job SET attempt = ?4, fence = fence + 1, started_at = NULL, worker = NULL
         WHERE event_seq = ?1 AND lane = ?2 AND fence = ?3",
    )?
    .execute((job.seq, job.lane, job.fence, job.progress.given_back().attempt))?;
    Ok(())
}

pub(super) fn note_attempt(
    conn: &Connection,
    job: &JobRow,
    ended_at: Option<i64>,
    outcome: &str,
    error: Option<&str>,
) -> rusqlite::Result<()> {
    conn.prepare_cached(
        "INSERT OR REPLACE INTO hapax_attempt
             (event_seq, lane, run, attempt, started_at, ended_at, outcome, error, worker)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
    )?
    .execute((
        job.seq,
        job.lane,
        job.run,
        job.progress.attempt,
        job.started_at.unwrap_or(0),
        ended_at,
        outcome,
        error,
        job.worker.as_deref().unwrap_or(""),
    ))?;
    Ok(())
}

pub(super) fn shortened(text: &str, chars_max: usize) -> String {
    text.chars().take(chars_max).collect()
}
