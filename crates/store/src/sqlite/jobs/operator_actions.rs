//! Acts of operators on jobs: approve, reject, discard and replay.

use hapax_core::Timestamp;
use hapax_core::job::{HandlerName, Phase};
use hapax_core::lifecycle::{Act, Unchanged, step};
use hapax_core::order::{OrderDecision, ResourcePosition};
use hapax_core::store::{JobScope, NewJob, ReplayAsk};
use rusqlite::Connection;

use super::change::Reported;
use super::row::JobRow;
use super::{EventAt, Lanes};
use crate::sqlite::order;
use crate::sqlite::row::{READY, timestamp};

impl Lanes {
    /// Applies an operator's act to the jobs of an event, or only to that of one handler. Returns
    /// false if the act fits none of them.
    pub(in crate::sqlite) fn operate(
        &mut self,
        conn: &Connection,
        seq: i64,
        handler: Option<&HandlerName>,
        act: &Act<'_>,
        scope: JobScope,
        now: Timestamp,
    ) -> rusqlite::Result<bool> {
        let mut changed = false;
        for row in JobRow::of_event(conn, seq)? {
            let of = self.by_lane.get(&row.lane).map(|lane| &lane.handler.handler);
            if (handler.is_none() || handler == of) && row.is_within(scope) {
                changed |= self.act(conn, &row, act, Reported::default(), now)?.is_ok();
            }
        }
        Ok(changed)
    }

    /// Decides whether a replay runs a job, and whether that changes anything. Applies the change
    /// unless it is a dry run. `None` if nothing can be done: a job that can never run stays dead or is not
    /// created, and a job outside the scope stays as it is.
    pub(in crate::sqlite) fn replay(
        &mut self,
        conn: &Connection,
        event: EventAt<'_>,
        job: &NewJob,
        ask: &ReplayAsk,
        scope: JobScope,
        now: Timestamp,
    ) -> rusqlite::Result<Option<(hapax_core::store::ReplayEffect, bool)>> {
        use hapax_core::store::ReplayEffect;
        let (force, act) = (ask.force, !ask.dry_run);
        let lane = self.lane(conn, event.pair, event.tenant, event.source, &job.handler)?;
        let order = self.spec_of(lane).and_then(|spec| spec.order.as_ref());
        let behind = match (order, &job.place) {
            (Some(order), Some(place)) => {
                let mark = order::mark(conn, lane, &place.resource)?;
                order.policy.decide(mark, place.position) == OrderDecision::Stale
            }
            (Some(_) | None, _) => false,
        };
        let Some(row) = JobRow::find(conn, event.seq, lane)? else {
            if job.hopeless.is_some() || !scope.adds_jobs {
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
        if !row.is_within(scope) {
            return Ok(None);
        }
        let replay = Act::Replay { force, is_behind: behind, is_hopeless: job.hopeless.is_some() };
        let decided = match act {
            true => {
                let after = self.act(conn, &row, &replay, Reported::default(), now)?;
                let phase = after.map(|change| change.phase);
                if phase == Ok(Phase::Ready) && row.state != READY {
                    // The configuration may now read another place from the event.
                    set_place(conn, &row, job.place.as_ref())?;
                }
                phase
            }
            false => step(&row.as_state(), &replay, now, 0.5).map(|change| change.phase),
        };
        Ok(match decided {
            Ok(Phase::Stale) => Some((ReplayEffect::Stale, true)),
            Ok(_ready) => Some((ReplayEffect::WouldRun, true)),
            Err(Unchanged::AlreadyApplied) => Some((ReplayEffect::AlreadyApplied, false)),
            Err(Unchanged::AlreadyStale) => Some((ReplayEffect::Stale, false)),
            Err(Unchanged::AlreadyDiscarded) => Some((ReplayEffect::Discarded, false)),
            Err(Unchanged::Hopeless) => None,
            Err(
                Unchanged::AlreadyOpen
                | Unchanged::AlreadyDone
                | Unchanged::NotClaimable
                | Unchanged::RightLost
                | Unchanged::NotWaiting,
            ) => Some((ReplayEffect::AlreadyOpen, false)),
        })
    }
}

impl JobRow {
    /// Whether an act of that scope may change the job.
    fn is_within(&self, scope: JobScope) -> bool {
        // `due_at` of an ended job is the time at which it ended.
        scope.holds(self.as_state().phase, timestamp(self.due_at))
    }
}

fn set_place(
    conn: &Connection,
    job: &JobRow,
    place: Option<&ResourcePosition>,
) -> rusqlite::Result<()> {
    conn.prepare_cached(
        "UPDATE hapax_job SET resource = ?3, position = ?4 WHERE event_seq = ?1 AND lane = ?2",
    )?
    .execute((
        job.seq,
        job.lane,
        place.map(|place| &*place.resource),
        place.map(|place| place.position.0),
    ))?;
    Ok(())
}
