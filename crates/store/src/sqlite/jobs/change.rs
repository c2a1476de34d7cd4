//! Applies to a job's row what [`hapax_core::lifecycle::step`] decided about it. Every change of a job
//! goes through here.

use hapax_core::Timestamp;
use hapax_core::job::Phase;
use hapax_core::lifecycle::{
    Act, Change, ErrorText, History, Holder, JobState, Turn, Unchanged, step,
};
use hapax_core::order::OVERTAKEN;
use hapax_core::store::HandlerAnswer;
use rusqlite::Connection;

use super::Lanes;
use super::row::JobRow;
use super::settle::note_attempt;
use crate::columns::{phase_of, state_of};
use crate::sqlite::order;
use crate::sqlite::row::{micros, timestamp};

/// The values an act writes to columns that no rule reads.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::sqlite) struct Reported<'a> {
    /// The error of a failed attempt.
    pub(super) error: Option<&'a str>,
    /// The result of a job that is done.
    pub(super) result: Option<&'a str>,
    /// What the app answered to the attempt that ended.
    pub(super) answer: Option<&'a HandlerAnswer>,
    /// The worker that claims.
    pub(super) worker: &'a str,
    /// Whether the claim also leases the resource.
    pub(super) with_resource: bool,
}

impl JobRow {
    pub(super) fn as_state(&self) -> JobState {
        JobState {
            phase: phase_of(self.state),
            progress: self.progress,
            due: timestamp(self.due_at),
            forced: self.forced,
        }
    }
}

impl Lanes {
    /// Decides what an act does to a job, and records it. Returns the row as it is afterwards.
    pub(in crate::sqlite) fn act(
        &mut self,
        conn: &Connection,
        row: &JobRow,
        act: &Act<'_>,
        reported: Reported<'_>,
        now: Timestamp,
    ) -> rusqlite::Result<Result<JobRow, Unchanged>> {
        let change = match step(&row.as_state(), act, now, self.dice.roll()) {
            Ok(change) => change,
            Err(unchanged) => return Ok(Err(unchanged)),
        };
        self.apply(conn, row, &change, reported, now).map(Ok)
    }

    fn apply(
        &mut self,
        conn: &Connection,
        row: &JobRow,
        change: &Change,
        reported: Reported<'_>,
        now: Timestamp,
    ) -> rusqlite::Result<JobRow> {
        record_history(conn, row, change, reported, now)?;
        let mut after = JobRow {
            state: state_of(change.phase),
            due_at: micros(change.due),
            fence: row.fence + i64::from(change.voids_fence),
            run: row.run + u32::from(change.new_run),
            progress: change.progress,
            forced: change.forced,
            ..row.clone()
        };
        match change.holder {
            Holder::Keep => {}
            Holder::Set => {
                after.started_at = Some(micros(now));
                after.worker = Some(reported.worker.to_owned());
            }
            Holder::Clear => {
                after.started_at = None;
                after.worker = None;
            }
        }
        write(conn, row, &after, change, reported, now)?;
        match change.phase {
            Phase::Ready | Phase::Leased | Phase::Held => self.stir(after.lane, after.due_at),
            Phase::Done => order::advance(conn, &after, &self.policy_of(after.lane), now)?,
            Phase::Parked | Phase::Stale | Phase::Dead | Phase::Review | Phase::Discarded => {}
        }
        match change.turn {
            Turn::Keep => {}
            Turn::Release => order::ready_next(conn, self, &after, now)?,
            Turn::Pass => order::ready_next_if_free(conn, self, &after, now)?,
        }
        Ok(after)
    }
}

fn write(
    conn: &Connection,
    before: &JobRow,
    after: &JobRow,
    change: &Change,
    reported: Reported<'_>,
    now: Timestamp,
) -> rusqlite::Result<()> {
    let wait = (after.due_at - micros(now)).max(0);
    let written = match change.phase {
        // The two phases that every job passes through write the fewest columns.
        Phase::Leased => conn.prepare_cached(include_str!("../sql/lease_job.sql"))?.execute((
            after.seq,
            after.lane,
            after.due_at,
            after.fence,
            after.progress.attempt,
            after.started_at,
            reported.worker,
            reported.with_resource,
            wait,
        ))?,
        Phase::Done => conn.prepare_cached(include_str!("../sql/done.sql"))?.execute((
            after.seq,
            after.lane,
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
                    after.seq,
                    after.lane,
                    before.fence,
                    after.state,
                    after.due_at,
                    wait,
                    after.fence,
                    after.run,
                    after.progress.attempt,
                    after.progress.steps,
                    after.progress.lost,
                    after.forced,
                    change.error != ErrorText::Keep,
                    error,
                    change.error == ErrorText::Clear,
                    change.holder == Holder::Clear,
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
            // The job's own row is about to tell of the new run.
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
