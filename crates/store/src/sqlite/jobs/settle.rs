//! Records how an attempt ended, under its fence; renews, gives back and hurries leases.

use std::time::Duration;

use hapax_core::Timestamp;
use hapax_core::job::{Fence, JobId, Phase, Policy, Retry};
use hapax_core::lifecycle::{Act, Change, Overtaken, Unchanged};
use hapax_core::limits::{ERROR_CHARS_MAX, RESULT_CHARS_MAX};
use hapax_core::order::OrderDecision;
use hapax_core::store::{HandlerAnswer, Held, NewMessage, Outcome, Settlement};
use rusqlite::Connection;

use super::Lanes;
use super::change::Reported;
use super::row::{JobRow, row_and_lane};
use crate::sqlite::order::{self, KnownMark};
use crate::sqlite::outbox::{For, Outbox};
use crate::sqlite::row::{DONE, micros};

/// The report of an attempt that succeeded.
struct Done<'a> {
    result: Option<&'a str>,
    answer: Option<&'a HandlerAnswer>,
    publish: &'a [NewMessage],
}

impl Lanes {
    /// Records how an attempt ended, if the fence still holds. A job that is done under the fence stays
    /// done, and only the app's answer is added.
    pub(in crate::sqlite) fn settle(
        &mut self,
        conn: &Connection,
        outbox: &mut Outbox,
        job: JobId,
        fence: Fence,
        outcome: &Outcome,
        now: Timestamp,
    ) -> rusqlite::Result<Settlement> {
        let (seq, lane) = row_and_lane(job);
        let Some(row) = JobRow::find(conn, seq, lane)? else { return Ok(Settlement::Lost) };
        if !row.is_under(fence) {
            return Ok(Settlement::Lost);
        }
        let (Outcome::Done { answer, .. } | Outcome::Failed { answer, .. }) = outcome;
        let answer = answer.as_ref();
        if row.state == DONE {
            if let Some(answer) = answer {
                add_answer(conn, &row, answer)?;
            }
            return Ok(Settlement::AlreadyDone);
        }
        match outcome {
            Outcome::Done { result, publish, .. } => {
                let done = Done { result: result.as_deref(), answer, publish };
                if publish.is_empty() {
                    return self.done_and_published(conn, outbox, &row, done, now);
                }
                // An error ends the whole transaction, and the savepoint with it.
                conn.execute_batch("SAVEPOINT hapax_done")?;
                let settled = self.done_and_published(conn, outbox, &row, done, now)?;
                conn.execute_batch("RELEASE hapax_done")?;
                Ok(settled)
            }
            Outcome::Failed { error, retry, .. } => {
                Ok(match self.fail(conn, &row, error, *retry, answer, now)? {
                    Ok(_) => Settlement::Recorded,
                    Err(_lost) => Settlement::Lost,
                })
            }
        }
    }

    /// Records "done" and publishes the messages of the job, or none of it. If there are messages, the
    /// savepoint `hapax_done` is open.
    fn done_and_published(
        &mut self,
        conn: &Connection,
        outbox: &mut Outbox,
        job: &JobRow,
        Done { result, answer, publish }: Done<'_>,
        now: Timestamp,
    ) -> rusqlite::Result<Settlement> {
        let done = self.done(conn, job, result, answer, now)?;
        if !done.is_ok_and(|change| change.phase == Phase::Done) {
            return Ok(Settlement::Lost);
        }
        let tenant = self.tenant_of(job.lane);
        let of = For { tenant: &tenant, event: Some(job.seq) };
        for message in publish {
            if let Err(refused) = outbox.publish_with(conn, message, of, now)? {
                // "Done" and all messages of the job are rolled back: the attempt has failed.
                conn.execute_batch("ROLLBACK TO hapax_done")?;
                return Ok(match self.fail(conn, job, &refused, Retry::Schedule, answer, now)? {
                    Ok(_) => Settlement::Recorded,
                    // The job's lease had ended: only a "done" would still have counted.
                    Err(_lost) => Settlement::Lost,
                });
            }
        }
        Ok(Settlement::Recorded)
    }

    /// Records "done" in the transaction of the effects, and moves the mark. A job that was
    /// overtaken while it ran becomes stale instead.
    pub(in crate::sqlite) fn done(
        &mut self,
        conn: &Connection,
        job: &JobRow,
        result: Option<&str>,
        answer: Option<&HandlerAnswer>,
        now: Timestamp,
    ) -> rusqlite::Result<Result<Change, Unchanged>> {
        let result = result.map(|result| shortened(result, RESULT_CHARS_MAX));
        let (overtaken, mark) = self.overtaken(conn, job)?;
        let reported = Reported { result: result.as_deref(), answer, mark, ..Reported::default() };
        self.act(conn, job, &Act::Done { overtaken }, reported, now)
    }

    /// Records a failed attempt: one step of the schedule.
    pub(in crate::sqlite) fn fail(
        &mut self,
        conn: &Connection,
        job: &JobRow,
        error: &str,
        retry: Retry,
        answer: Option<&HandlerAnswer>,
        now: Timestamp,
    ) -> rusqlite::Result<Result<Change, Unchanged>> {
        let error = shortened(error, ERROR_CHARS_MAX);
        let reported = Reported { error: Some(&error), answer, ..Reported::default() };
        let unknown = Policy { retry: Vec::new(), lease: Duration::ZERO };
        let spec = self.spec_of(job.lane).cloned();
        let policy = spec.as_ref().map_or(&unknown, |spec| &spec.policy);
        self.act(conn, job, &Act::Failed { retry, policy }, reported, now)
    }

    /// Whether the mark has passed a job that was claimed and then lost its lease, and the mark if it was
    /// read for that.
    pub(in crate::sqlite) fn overtaken(
        &self,
        conn: &Connection,
        job: &JobRow,
    ) -> rusqlite::Result<(Overtaken, KnownMark)> {
        let order = self.spec_of(job.lane).and_then(|spec| spec.order.as_ref());
        let (Some(rule), Some(place), false) = (order, &job.place, job.forced) else {
            return Ok((Overtaken::No, KnownMark::Unread));
        };
        let mark = order::mark(conn, job.lane, &place.resource)?;
        let overtaken = if mark.is_none() || rule.policy.may_settle(mark, place.position) {
            Overtaken::No
        } else {
            match rule.policy.decide(mark, place.position) {
                OrderDecision::Stale => Overtaken::Stale,
                OrderDecision::Run | OrderDecision::Hold => Overtaken::NotItsTurn,
            }
        };
        Ok((overtaken, KnownMark::Read(mark)))
    }

    /// Extends a lease.
    pub(in crate::sqlite) fn renew(
        &mut self,
        conn: &Connection,
        job: JobId,
        fence: Fence,
        lease: Duration,
        now: Timestamp,
    ) -> rusqlite::Result<Held> {
        let (seq, lane) = row_and_lane(job);
        let lease = lease.as_micros() as i64;
        let until = micros(now).saturating_add(lease);
        let renewed = conn
            .prepare_cached(
                "UPDATE hapax_job SET due_at = max(due_at, ?4), wait = max(wait, ?5)
                 WHERE event_seq = ?1 AND lane = ?2 AND fence = ?3 AND state = 1 /* leased */",
            )?
            .execute((seq, lane, fence.0, until, lease))?;
        Ok(if renewed == 1 { Held::Kept } else { Held::Lost })
    }

    /// Returns work that was claimed but not begun, as if it had not been claimed.
    pub(in crate::sqlite) fn give_back(
        &mut self,
        conn: &Connection,
        job: JobId,
        fence: Fence,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        let (seq, lane) = row_and_lane(job);
        let Some(row) = JobRow::find(conn, seq, lane)? else { return Ok(()) };
        if row.fence == fence.0
            && self.act(conn, &row, &Act::GivenBack, Reported::default(), now)?.is_ok()
        {
            self.wake(lane, micros(now));
        }
        Ok(())
    }

    /// Makes the waiting jobs of an event due now.
    pub(in crate::sqlite) fn hurry(
        &mut self,
        conn: &Connection,
        seq: i64,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        for row in JobRow::of_event(conn, seq)? {
            // A job that is not waiting stays as it is.
            let _unchanged = self.act(conn, &row, &Act::Hurry, Reported::default(), now)?;
        }
        Ok(())
    }
}

/// Adds the app's answer to a job that the app completed itself.
fn add_answer(conn: &Connection, job: &JobRow, answer: &HandlerAnswer) -> rusqlite::Result<()> {
    conn.prepare_cached(
        "UPDATE hapax_job SET answer_status = ?4, answer = ?5
         WHERE event_seq = ?1 AND lane = ?2 AND fence = ?3 AND answer_status IS NULL",
    )?
    .execute((job.seq, job.lane, job.fence, answer.status, &answer.body))?;
    Ok(())
}

pub(super) fn note_attempt(
    conn: &Connection,
    job: &JobRow,
    ended_at: Option<i64>,
    outcome: &str,
    error: Option<&str>,
    answer: Option<&HandlerAnswer>,
) -> rusqlite::Result<()> {
    conn.prepare_cached(
        "INSERT OR REPLACE INTO hapax_attempt
             (event_seq, lane, run, attempt, started_at, ended_at, outcome, error, worker,
              answer_status, answer)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)",
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
        answer.map(|answer| answer.status),
        answer.map(|answer| &answer.body),
    ))?;
    Ok(())
}

pub(super) fn shortened(text: &str, chars_max: usize) -> String {
    text.chars().take(chars_max).collect()
}
