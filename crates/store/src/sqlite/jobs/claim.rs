//! Claiming: which jobs are due, which of them may run, and the claim that a worker gets.

use bytes::Bytes;
use hapax_core::job::{Fence, Retry, idempotency_key};
use hapax_core::lifecycle::{Act, Admission};
use hapax_core::store::{Claim, ClaimedEvent, DAMAGED_BODY, HandlerRef, HandlerSpec};
use hapax_core::{EventKey, KeyHash, Timestamp};
use rusqlite::Connection;

use super::change::Reported;
use super::row::{COLUMNS, JobRow, job_id};
use super::{Lanes, next_in};
use crate::limits::JOBS_ASIDE_AT_ONCE;
use crate::sqlite::fresh_events::EventContent;
use crate::sqlite::order;
use crate::sqlite::row::{HELD, LEASED, event_id, micros, timestamp};

/// The parameters of a claim.
pub(in crate::sqlite) struct ClaimParameters<'a> {
    pub(in crate::sqlite) handler: &'a HandlerRef,
    pub(in crate::sqlite) limit: usize,
    pub(in crate::sqlite) worker: &'a str,
    /// Whether the claim decides the order; otherwise the work's own transaction does.
    pub(in crate::sqlite) guard: bool,
}

impl Lanes {
    /// Claims up to `limit` due jobs of a handler, over its tenants in turn. Each claim increments
    /// the attempt and gets a new fence, committed before the work. With `guard` the order is
    /// decided here; without it, in the work's own transaction.
    pub(in crate::sqlite) fn claim(
        &mut self,
        conn: &Connection,
        ask: &ClaimParameters<'_>,
        now: Timestamp,
    ) -> rusqlite::Result<Vec<JobRow>> {
        let Some(spec) = self.specs.get(ask.handler).cloned() else { return Ok(Vec::new()) };
        if self.paused.contains(ask.handler) {
            return Ok(Vec::new());
        }
        let mut lanes: Vec<i64> = self
            .by_lane
            .iter()
            .filter(|(_, lane)| lane.handler == *ask.handler && lane.quiet_until <= micros(now))
            .map(|(lane, _)| *lane)
            .collect();
        lanes.sort_unstable();
        if lanes.is_empty() {
            return Ok(Vec::new());
        }
        let turn = self.turns.entry(ask.handler.clone()).or_default();
        let first = *turn % lanes.len();
        *turn = turn.wrapping_add(1);
        lanes.rotate_left(first);
        let share = ask.limit.div_ceil(lanes.len()).max(1);
        let (mut claimed, mut aside) = (Vec::new(), 0);
        // Two rounds: first each tenant's share, then the rest for tenants with more jobs.
        for round in 0..2 {
            for &lane in &lanes {
                let room = ask.limit.saturating_sub(claimed.len());
                let wanted = if round == 0 { room.min(share) } else { room };
                if wanted == 0 {
                    break;
                }
                if self.claim_in(conn, lane, wanted, ask, &spec, now, &mut claimed, &mut aside)? {
                    return Ok(claimed);
                }
            }
        }
        Ok(claimed)
    }

    /// Returns true if a job that must run alone was taken. `aside` counts the jobs that the whole claim has set aside:
    /// beyond a bound, each lane is read once.
    #[allow(clippy::too_many_arguments)]
    fn claim_in(
        &mut self,
        conn: &Connection,
        lane: i64,
        wanted: usize,
        ask: &ClaimParameters<'_>,
        spec: &HandlerSpec,
        now: Timestamp,
        claimed: &mut Vec<JobRow>,
        aside: &mut usize,
    ) -> rusqlite::Result<bool> {
        let at = micros(now);
        self.expire(conn, lane, at, now)?;
        let end = claimed.len() + wanted;
        loop {
            let (before, room) = (claimed.len(), end - claimed.len());
            let mut due = JobRow::due_in(conn, lane, at, room)?;
            // A due job may fill the gap: gaps are judged only when nothing is due.
            if let (true, Some(rule)) = (due.is_empty(), &spec.order)
                && order::judge(conn, self, lane, rule, now)?
            {
                due = JobRow::due_in(conn, lane, at, room)?;
            }
            let (read, mut is_last) = (due.len(), due.len() < room);
            if is_last {
                let next = next_in(conn, lane, at, at)?;
                if let Some(lane) = self.by_lane.get_mut(&lane) {
                    lane.quiet_until = next.unwrap_or(i64::MAX);
                }
            }
            let is_plain =
                |job: &JobRow| job.place.is_none() && !job.progress.alone(spec.workplace);
            if due.len() > 1 && due.iter().all(is_plain) {
                let lease = spec.policy.lease;
                claimed.extend(self.lease_all(conn, lane, due, lease, ask.worker, now)?);
                return Ok(false);
            }
            for job in due {
                if job.progress.alone(spec.workplace) && !claimed.is_empty() {
                    // The job stays ready, for a separate claim.
                    self.note_due(lane, at);
                    is_last = true;
                    continue;
                }
                let Some(job) = self.admit(conn, job, ask, spec, now)? else { continue };
                let alone = job.progress.alone(spec.workplace);
                claimed.push(job);
                if alone {
                    // The next claim takes the jobs that are due after this one.
                    self.note_due(lane, at);
                    return Ok(true);
                }
            }
            // A job that was set aside is no longer due: the jobs behind it may run.
            *aside += read - (claimed.len() - before);
            if is_last || claimed.len() == end || *aside >= JOBS_ASIDE_AT_ONCE {
                return Ok(false);
            }
        }
    }

    /// Leases a due job. If the order does not allow it now, the job is set aside.
    fn admit(
        &mut self,
        conn: &Connection,
        job: JobRow,
        ask: &ClaimParameters<'_>,
        spec: &HandlerSpec,
        now: Timestamp,
    ) -> rusqlite::Result<Option<JobRow>> {
        let mut admission = Admission::Run;
        if let (Some(rule), Some(place)) = (&spec.order, &job.place) {
            order::begin(conn, job.lane, &rule.policy, place, now)?;
            if ask.guard {
                admission = order::admission(conn, &job, rule, place)?;
            }
        }
        let claim = Act::Claim { admission, lease: spec.policy.lease };
        let reported = Reported {
            worker: ask.worker,
            with_resource: ask.guard && spec.order.is_some() && job.place.is_some(),
            ..Reported::default()
        };
        let Ok(change) = self.act(conn, &job, &claim, reported, now)? else { return Ok(None) };
        let job = job.claimed(&change, ask.worker, now);
        if let (HELD, Some(rule)) = (job.state, &spec.order) {
            order::limit_held(conn, self, &job, rule, now)?;
        }
        Ok((job.state == LEASED).then_some(job))
    }

    /// Leases that ended before `until` become lost attempts.
    pub(super) fn expire(
        &mut self,
        conn: &Connection,
        lane: i64,
        until: i64,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        let expired: Vec<JobRow> = conn
            .prepare_cached(&format!(
                "SELECT {COLUMNS} FROM hapax_job WHERE lane = ?1 AND state = 1 /* leased */ AND due_at <= ?2"
            ))?
            .query_map((lane, until), JobRow::read)?
            .collect::<rusqlite::Result<_>>()?;
        let workplace = self.workplace_of(lane);
        for job in expired {
            let lost =
                self.act(conn, &job, &Act::LeaseEnded { workplace }, Reported::default(), now)?;
            assert!(lost.is_ok(), "only leased jobs are read here");
        }
        Ok(())
    }

    /// The claim with its body. `None` if the body is not the one that was stored: no handler gets
    /// it, and the job becomes a dead letter in the open transaction.
    pub(in crate::sqlite) fn claim_with_body(
        &mut self,
        conn: &Connection,
        job: &JobRow,
        now: Timestamp,
    ) -> rusqlite::Result<Option<Claim>> {
        if let Some(event) = self.fresh.take(job.seq) {
            return Ok(Some(self.claim_of(job, event)));
        }
        let (event, body_hash) = read_event(conn, job.seq)?;
        let is_sound = KeyHash::of_body(&event.body) == body_hash;
        let claim = self.claim_of(job, event);
        if is_sound {
            return Ok(Some(claim));
        }
        let id = claim.event.id;
        tracing::error!(event.id = %id, job = %claim.job, "event {id}: {DAMAGED_BODY}");
        let buried = self.fail(conn, job, DAMAGED_BODY, Retry::Never, None, now)?;
        assert!(buried.is_ok(), "the writer has just claimed this job");
        Ok(None)
    }

    /// The claim as its holder gets it.
    fn claim_of(&self, job: &JobRow, event: EventContent) -> Claim {
        let lane = self.by_lane.get(&job.lane).expect("a job's lane is known");
        let id = event.id;
        Claim {
            job: job_id(id.0.as_bytes(), job.seq, job.lane),
            fence: Fence(job.fence),
            attempt: job.progress.attempt,
            steps: job.progress.steps,
            run: job.run,
            idempotency_key: idempotency_key(id, &lane.handler.handler, job.run),
            leased_until: timestamp(job.due_at),
            alone: job.progress.alone(self.workplace_of(job.lane)),
            event: ClaimedEvent {
                id,
                key: EventKey {
                    tenant: lane.tenant.clone(),
                    source: lane.handler.source.clone(),
                    event_id: event.event_id,
                },
                event_type: event.event_type.map(String::from),
                occurred_at: event.occurred_at.map(timestamp),
                received_at: timestamp(event.received_at),
                resource: job.place.as_ref().map(|place| place.resource.to_string()),
                headers: event.headers.to_string(),
                body: event.body,
            },
        }
    }
}

/// The content of an event, and the hash that its body must have.
fn read_event(conn: &Connection, seq: i64) -> rusqlite::Result<(EventContent, KeyHash)> {
    conn.prepare_cached(
        "SELECT e.id, e.event_id, b.event_type, b.occurred_at, e.received_at, b.headers, b.body, e.body_hash
         FROM hapax_event e JOIN hapax_body b ON b.seq = e.seq WHERE e.seq = ?1",
    )?
    .query_row([seq], |row| {
        let event = EventContent {
            id: event_id(row.get(0)?),
            event_id: row.get_ref(1)?.as_str()?.into(),
            event_type: row.get(2)?,
            occurred_at: row.get(3)?,
            received_at: row.get(4)?,
            headers: row.get(5)?,
            body: Bytes::from(row.get::<_, Vec<u8>>(6)?),
        };
        Ok((event, KeyHash(row.get(7)?)))
    })
}
