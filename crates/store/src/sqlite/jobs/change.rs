//! Applies the decision of [`hapax_core::lifecycle::step`] to a job's row. Every change of a job
//! goes through here.

use std::fmt::Write as _;
use std::time::Duration;

use hapax_core::Timestamp;
use hapax_core::job::Phase;
use hapax_core::lifecycle::{
    Act, Admission, Change, ErrorText, History, Holder, JobState, Overtaken, ResourceEffect,
    Unchanged, step,
};
use hapax_core::order::OVERTAKEN;
use hapax_core::store::HandlerAnswer;
use rusqlite::Connection;

use super::Lanes;
use super::row::JobRow;
use super::settle::note_attempt;
use crate::columns::{phase_of, state_of};
use crate::sqlite::order::{self, KnownMark};
use crate::sqlite::row::{micros, timestamp};

/// The values an act writes to columns that no rule reads.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::sqlite) struct Reported<'a> {
    /// The error of a failed attempt.
    pub(super) error: Option<&'a str>,
    /// The result of a job that is done.
    pub(super) result: Option<&'a str>,
    /// The app's answer to the attempt that ended.
    pub(super) answer: Option<&'a HandlerAnswer>,
    /// The worker that claims.
    pub(super) worker: &'a str,
    /// Whether the claim also leases the resource.
    pub(super) with_resource: bool,
    /// The mark of the job's resource, if it was read for this act.
    pub(super) mark: KnownMark,
}

/// The columns that a change computes from the row.
struct ColumnsAfter {
    state: i64,
    due_at: i64,
    fence: i64,
    run: u32,
    started_at: Option<i64>,
}

impl JobRow {
    pub(super) fn as_state(&self) -> JobState {
        JobState {
            phase: phase_of(self.state),
            progress: self.progress,
            earlier_attempts: self.earlier_attempts,
            due: timestamp(self.due_at),
            forced: self.forced,
        }
    }

    /// The row after a claim by this worker.
    pub(super) fn claimed(self, change: &Change, worker: &str, now: Timestamp) -> Self {
        let ColumnsAfter { state, due_at, fence, run, started_at } =
            self.columns_after(change, now);
        let worker = match change.holder {
            Holder::Keep => self.worker,
            Holder::Set => Some(worker.to_owned()),
            Holder::Clear => None,
        };
        let (progress, forced) = (change.progress, change.forced);
        Self { state, due_at, fence, run, started_at, worker, progress, forced, ..self }
    }

    fn columns_after(&self, change: &Change, now: Timestamp) -> ColumnsAfter {
        ColumnsAfter {
            state: state_of(change.phase),
            due_at: micros(change.due),
            fence: self.fence + i64::from(change.voids_fence),
            run: self.run + u32::from(change.new_run),
            started_at: match change.holder {
                Holder::Keep => self.started_at,
                Holder::Set => Some(micros(now)),
                Holder::Clear => None,
            },
        }
    }
}

impl Lanes {
    /// Decides the change that an act makes to a job, records it, and returns it.
    pub(in crate::sqlite) fn act(
        &mut self,
        conn: &Connection,
        row: &JobRow,
        act: &Act<'_>,
        reported: Reported<'_>,
        now: Timestamp,
    ) -> rusqlite::Result<Result<Change, Unchanged>> {
        let change = match step(&row.as_state(), act, now, self.dice.roll()) {
            Ok(change) => change,
            Err(unchanged) => return Ok(Err(unchanged)),
        };
        record_history(conn, row, &change, reported, now)?;
        write_change(conn, row, &change, reported, now)?;
        let mut mark = reported.mark;
        match change.phase {
            Phase::Ready | Phase::Leased | Phase::Held => {
                self.note_due(row.lane, micros(change.due))
            }
            Phase::Done => mark = order::advance(conn, row, &self.policy_of(row.lane), mark, now)?,
            Phase::Parked | Phase::Stale | Phase::Dead | Phase::Review | Phase::Discarded => {}
        }
        match change.turn {
            ResourceEffect::Keep => {}
            ResourceEffect::Release => order::ready_next(conn, self, row, mark, now)?,
            ResourceEffect::Pass => order::ready_next_if_free(conn, self, row, mark, now)?,
        }
        Ok(Ok(change))
    }
}

impl Lanes {
    /// Claims due jobs of one lane that keep no order. One statement claims all these jobs, because most of
    /// its cost is opening the indexes. Returns the rows afterwards.
    pub(super) fn lease_all(
        &mut self,
        conn: &Connection,
        lane: i64,
        due: Vec<JobRow>,
        lease: Duration,
        worker: &str,
        now: Timestamp,
    ) -> rusqlite::Result<Vec<JobRow>> {
        let claim = Act::Claim { admission: Admission::Run, lease };
        let mut until = None;
        let mut leased = Vec::with_capacity(due.len());
        for row in due {
            debug_assert!(row.lane == lane && row.place.is_none());
            let Ok(change) = step(&row.as_state(), &claim, now, self.dice.roll()) else { continue };
            assert_eq!(*until.get_or_insert(change.due), change.due, "one lease for all of them");
            leased.push(row.claimed(&change, worker, now));
        }
        let Some(until) = until else { return Ok(leased) };
        let due_at = micros(until);
        let wait = (due_at - micros(now)).max(0);
        let jobs = seqs_of(leased.iter().map(|row| row.seq));
        let values = (lane, jobs, due_at, micros(now), worker, wait);
        let written =
            conn.prepare_cached(include_str!("../sql/lease_jobs.sql"))?.execute(values)?;
        assert_eq!(written, leased.len(), "the writer has just read these rows");
        self.note_due(lane, due_at);
        Ok(leased)
    }

    /// Records "done" of jobs that were just claimed, keep no order and have no result, with one statement
    /// for each lane and fence.
    pub(in crate::sqlite) fn all_done(
        &mut self,
        conn: &Connection,
        mut jobs: Vec<&JobRow>,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        jobs.sort_unstable_by_key(|job| (job.lane, job.fence, job.seq));
        for alike in jobs.chunk_by(|one, next| (one.lane, one.fence) == (next.lane, next.fence)) {
            let Some(JobRow { lane, fence, .. }) = alike.first() else { continue };
            for row in alike {
                let done = Act::Done { overtaken: Overtaken::No };
                let change = step(&row.as_state(), &done, now, self.dice.roll());
                let is_done = change.is_ok_and(|change| change.phase == Phase::Done);
                assert!(is_done && row.place.is_none(), "a claimed job without an order ends");
            }
            let seqs = seqs_of(alike.iter().map(|row| row.seq));
            let written = conn.prepare_cached(include_str!("../sql/jobs_done.sql"))?.execute((
                lane,
                seqs,
                fence,
                micros(now),
            ))?;
            assert_eq!(written, alike.len(), "the writer has just claimed these jobs");
        }
        Ok(())
    }
}

/// Event numbers as a JSON array, for statements over many jobs.
fn seqs_of(seqs: impl Iterator<Item = i64>) -> String {
    let mut text = String::from("[");
    for seq in seqs {
        if text.len() > 1 {
            text.push(',');
        }
        // Writing to a String cannot fail.
        let _ = write!(text, "{seq}");
    }
    text.push(']');
    text
}

fn write_change(
    conn: &Connection,
    row: &JobRow,
    change: &Change,
    reported: Reported<'_>,
    now: Timestamp,
) -> rusqlite::Result<()> {
    let after = row.columns_after(change, now);
    let wait = (after.due_at - micros(now)).max(0);
    let written = match change.phase {
        // The two phases that every job passes through write the fewest columns.
        Phase::Leased => conn.prepare_cached(include_str!("../sql/lease_job.sql"))?.execute((
            row.seq,
            row.lane,
            after.due_at,
            after.fence,
            change.progress.attempt,
            after.started_at,
            reported.worker,
            reported.with_resource,
            wait,
        ))?,
        Phase::Done => conn.prepare_cached(include_str!("../sql/done.sql"))?.execute((
            row.seq,
            row.lane,
            after.fence,
            after.due_at,
            reported.result,
            reported.answer.map(|answer| answer.status),
            reported.answer.map(|answer| &answer.body),
        ))?,
        Phase::Ready
        | Phase::Held
        | Phase::Parked
        | Phase::Stale
        | Phase::Dead
        | Phase::Review
        | Phase::Discarded => {
            let error = match change.error {
                ErrorText::Keep | ErrorText::Clear => None,
                ErrorText::Set(text) => Some(text),
                ErrorText::Reported => reported.error,
            };
            conn.prepare_cached(include_str!("../sql/change_job.sql"))?.execute(
                rusqlite::params![
                    row.seq,
                    row.lane,
                    row.fence,
                    after.state,
                    after.due_at,
                    wait,
                    after.fence,
                    after.run,
                    change.progress.attempt,
                    change.progress.steps,
                    change.progress.lost,
                    change.forced,
                    change.error != ErrorText::Keep,
                    error,
                    change.error == ErrorText::Clear,
                    change.holder == Holder::Clear,
                    change.earlier_attempts,
                ],
            )?
        }
    };
    assert_eq!(written, 1, "the writer has just read this row, and nothing else writes it");
    Ok(())
}

fn record_history(
    conn: &Connection,
    row: &JobRow,
    change: &Change,
    reported: Reported<'_>,
    now: Timestamp,
) -> rusqlite::Result<()> {
    let ended_now = Some(micros(now));
    match change.history {
        History::Keep => Ok(()),
        History::Lost(why) => note_attempt(conn, row, None, "lost", Some(why), None),
        History::Overtaken => {
            note_attempt(conn, row, ended_now, "lost", Some(OVERTAKEN), reported.answer)
        }
        History::Failed => {
            note_attempt(conn, row, ended_now, "failed", reported.error, reported.answer)
        }
        History::Done => {
            // From now on the job's row describes the new run, so its last attempt is copied first.
            let answer = row.answer(conn)?;
            note_attempt(conn, row, Some(row.due_at), "done", None, answer.as_ref())
        }
        History::Remove => conn
            .prepare_cached(
                "DELETE FROM hapax_attempt
                 WHERE event_seq = ?1 AND lane = ?2 AND run = ?3 AND attempt = ?4",
            )?
            .execute((row.seq, row.lane, row.run, row.progress.attempt))
            .map(|_| ()),
    }
}
