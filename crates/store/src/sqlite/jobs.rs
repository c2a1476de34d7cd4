//! Jobs in SQLite: written with their event, claimed by state, settled through the fence.
//!
//! Every function here runs on the writer's connection inside a transaction that its caller opens
//! and commits. What to do is decided by the pure life cycle in [`hapax_core::job`]; this file finds
//! the rows and records the answers. Order is in [`super::marks`], SQL handlers in [`super::run`].

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::job::{
    AfterFailure, AfterLoss, Fence, HandlerName, JobId, Policy, Progress, Retry, idempotency_key,
    jittered,
};
use hapax_core::order::{Guard, OVERTAKEN, OrderPolicy, Place, Position};
use hapax_core::store::{
    Claim, ClaimedEvent, HandlerRef, HandlerSpec, Held, NewJob, NewMessage, Outcome,
};
use hapax_core::{EventKey, SourceName, Tenant, Timestamp};
use rusqlite::{Connection, OptionalExtension, Row};
use uuid::Uuid;

use super::marks::{self, Admitted};
use super::row::{
    DEAD, DISCARDED, DONE, Dice, HELD, LANE_BITS, LEASED, PARKED, READY, REVIEW, SEQ_BITS, STALE,
    event_id, micros, timestamp,
};
use crate::limits::{ERROR_CHARS_MAX, RESULT_CHARS_MAX};

/// Lanes that are asked for the next due time before "soon" is answer enough.
const LANES_ASKED_MAX: usize = 16;

/// The lanes of this database, and what the node knows of their handlers.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    handlers: HashMap<HandlerRef, i64>,
    lanes: HashMap<(i64, i64), i64>,
    by_lane: HashMap<i64, Lane>,
    specs: HashMap<HandlerRef, Arc<HandlerSpec>>,
    /// Where the next claim of a handler begins its round over the tenants.
    turns: HashMap<HandlerRef, usize>,
    freed: bool,
    /// Whether a job was readied that nobody who waits for work has heard of.
    woken: bool,
    /// For the jitter of waits.
    dice: Dice,
}

#[derive(Debug)]
struct Lane {
    handler: HandlerRef,
    tenant: Tenant,
    /// No job of it is due before this, as far as is known: most lanes need no look.
    quiet_until: i64,
}

/// A row of `hapax_job`.
#[derive(Debug, Clone)]
pub(super) struct JobRow {
    pub(super) seq: i64,
    pub(super) lane: i64,
    pub(super) state: i64,
    pub(super) due_at: i64,
    pub(super) fence: i64,
    pub(super) run: u32,
    pub(super) progress: Progress,
    pub(super) place: Option<Place>,
    pub(super) started_at: Option<i64>,
    pub(super) worker: Option<String>,
    /// It runs whatever the order guard says.
    pub(super) forced: bool,
}

const COLUMNS: &str = "event_seq, lane, state, due_at, fence, run, attempt, steps, lost, resource, \
                       position, started_at, worker, forced";

/// Of a job `held`: nobody works on its resource, in the writer or elsewhere. Few are leased at a
/// time, so they are looked through.
const AT_REST: &str = "NOT EXISTS (SELECT 1 FROM hapax_job AS busy \
     WHERE busy.lane = held.lane AND busy.resource = held.resource AND busy.state = 1)";

pub(super) fn overdue_sql() -> String {
    format!(
        "SELECT {COLUMNS} FROM hapax_job AS held
         WHERE lane = ?1 AND state = 5 AND due_at <= ?2 AND {AT_REST}
         ORDER BY due_at, event_seq LIMIT ?3"
    )
}

impl JobRow {
    fn read(row: &Row<'_>) -> rusqlite::Result<Self> {
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
            place: resource.zip(position).map(|(resource, position)| Place {
                resource: resource.into(),
                position: Position(position),
            }),
            started_at: row.get(11)?,
            worker: row.get(12)?,
            forced: row.get(13)?,
        })
    }

    /// The jobs of a lane that are held or parked.
    pub(super) fn waiting_in(conn: &Connection, lane: i64) -> rusqlite::Result<Vec<Self>> {
        conn.prepare_cached(&format!(
            "SELECT {COLUMNS} FROM hapax_job WHERE lane = ?1 AND state = 5
             UNION ALL SELECT {COLUMNS} FROM hapax_job WHERE lane = ?1 AND state = 6"
        ))?
        .query_map([lane], Self::read)?
        .collect()
    }

    /// Jobs of a lane that may be claimed, the one due longest first.
    fn due_in(conn: &Connection, lane: i64, now: i64, limit: usize) -> rusqlite::Result<Vec<Self>> {
        conn.prepare_cached(&format!(
            "SELECT {COLUMNS} FROM hapax_job WHERE lane = ?1 AND state = 0 AND due_at <= ?2
             ORDER BY due_at, event_seq LIMIT ?3"
        ))?
        .query_map((lane, now, limit as i64), Self::read)?
        .collect()
    }

    /// Jobs of a lane whose deadline is over while nobody works on their resource: the first of
    /// them, by deadline.
    pub(super) fn overdue_in(
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
    pub(super) fn find(conn: &Connection, seq: i64, lane: i64) -> rusqlite::Result<Option<Self>> {
        conn.prepare_cached(&format!(
            "SELECT {COLUMNS} FROM hapax_job WHERE event_seq = ?1 AND lane = ?2"
        ))?
        .query_row((seq, lane), Self::read)
        .optional()
    }

    /// Whether somebody was given this fence, and it still holds. A job that was never claimed, given
    /// back or replayed has a number too, but nobody has that right.
    pub(super) fn is_under(&self, fence: Fence) -> bool {
        self.fence == fence.0 && self.started_at.is_some()
    }
}

/// The id of a job: its event's first half, then lane and row.
pub(super) fn job_id(event: &[u8; 16], seq: i64, lane: i64) -> JobId {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&event[..8]);
    let low = (1 << 63) | ((lane as u64) << SEQ_BITS) | seq as u64;
    bytes[8..].copy_from_slice(&low.to_be_bytes());
    JobId(Uuid::from_bytes(bytes))
}

/// The row and lane that a job's id stands for; whether there is such a job is for the row to say.
pub(super) fn place_of(job: JobId) -> (i64, i64) {
    let low = job.0.as_u128() as u64;
    let seq = low & ((1 << SEQ_BITS) - 1);
    let lane = (low >> SEQ_BITS) & ((1 << LANE_BITS) - 1);
    (seq as i64, lane as i64)
}

impl Lanes {
    /// Reads the lanes as the last commit left them, keeping what this node announced.
    pub(super) fn load(
        conn: &Connection,
        specs: HashMap<HandlerRef, Arc<HandlerSpec>>,
        freed: bool,
    ) -> rusqlite::Result<Self> {
        let mut loaded = Self { specs, freed, ..Self::default() };
        let mut rows = conn.prepare(
            "SELECT l.lane, l.pair, l.handler, h.source, h.name, p.tenant
             FROM hapax_lane l JOIN hapax_handler h ON h.handler = l.handler
             JOIN hapax_pair p ON p.pair = l.pair",
        )?;
        let mut rows = rows.query([])?;
        while let Some(row) = rows.next()? {
            let (lane, pair, handler): (i64, i64, i64) = (row.get(0)?, row.get(1)?, row.get(2)?);
            let name = HandlerRef {
                source: SourceName::new(row.get_ref(3)?.as_str()?),
                handler: HandlerName::new(row.get_ref(4)?.as_str()?),
            };
            let tenant = Tenant::new(row.get_ref(5)?.as_str()?);
            loaded.handlers.insert(name.clone(), handler);
            loaded.lanes.insert((pair, handler), lane);
            loaded.by_lane.insert(lane, Lane { handler: name, tenant, quiet_until: i64::MIN });
        }
        Ok(loaded)
    }

    /// What must survive a reload.
    pub(super) fn announced(&self) -> (HashMap<HandlerRef, Arc<HandlerSpec>>, bool) {
        (self.specs.clone(), self.freed)
    }

    /// The node's handlers. The first time, what a process that died had leased is freed at once;
    /// workers outside keep their leases.
    pub(super) fn announce(
        &mut self,
        conn: &Connection,
        handlers: Vec<HandlerSpec>,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        self.specs =
            handlers.into_iter().map(|spec| (spec.handler.clone(), Arc::new(spec))).collect();
        for lane in self.by_lane.values_mut() {
            lane.quiet_until = i64::MIN;
        }
        let first_time = !std::mem::replace(&mut self.freed, true);
        for lane in self.by_lane.keys().copied().collect::<Vec<_>>() {
            let Some(spec) = self.spec_of(lane).cloned() else { continue };
            if first_time && !spec.pulled {
                self.expire(conn, lane, i64::MAX, now)?;
            }
            marks::let_go(conn, lane, spec.order.as_ref(), now)?;
        }
        Ok(())
    }

    pub(super) fn spec_of(&self, lane: i64) -> Option<&Arc<HandlerSpec>> {
        self.specs.get(&self.by_lane.get(&lane)?.handler)
    }

    fn lane(
        &mut self,
        conn: &Connection,
        pair: i64,
        tenant: &Tenant,
        source: &SourceName,
        name: &HandlerName,
    ) -> rusqlite::Result<i64> {
        let handler_ref = HandlerRef { source: source.clone(), handler: name.clone() };
        let handler = match self.handlers.get(&handler_ref) {
            Some(handler) => *handler,
            None => {
                conn.execute(
                    "INSERT INTO hapax_handler (source, name) VALUES (?1, ?2)",
                    (source.as_str(), name.as_str()),
                )?;
                let handler = conn.last_insert_rowid();
                self.handlers.insert(handler_ref.clone(), handler);
                handler
            }
        };
        if let Some(lane) = self.lanes.get(&(pair, handler)) {
            return Ok(*lane);
        }
        conn.execute("INSERT INTO hapax_lane (pair, handler) VALUES (?1, ?2)", (pair, handler))?;
        let lane = conn.last_insert_rowid();
        assert!(lane < 1 << LANE_BITS, "four million lanes");
        self.lanes.insert((pair, handler), lane);
        let tenant = tenant.clone();
        self.by_lane.insert(lane, Lane { handler: handler_ref, tenant, quiet_until: i64::MAX });
        Ok(lane)
    }

    /// Writes the jobs of an event in the event's own transaction. True if any waits for work.
    pub(super) fn write(
        &mut self,
        conn: &Connection,
        event: EventAt<'_>,
        jobs: &[NewJob],
        now: Timestamp,
    ) -> rusqlite::Result<bool> {
        let mut waits = false;
        for job in jobs {
            let lane = self.lane(conn, event.pair, event.tenant, event.source, &job.handler)?;
            let first_wait = self
                .spec_of(lane)
                .and_then(|spec| spec.policy.retry.first().copied())
                .unwrap_or(Duration::ZERO);
            let wait = jittered(first_wait, self.dice.roll());
            let (state, due) = match job.hopeless {
                Some(_) => (DEAD, micros(now)),
                None => (READY, micros(now).saturating_add(wait.as_micros() as i64)),
            };
            conn.prepare_cached(include_str!("sql/insert_job.sql"))?.execute((
                event.seq,
                lane,
                state,
                due,
                job.place.as_ref().map(|place| &*place.resource),
                job.place.as_ref().map(|place| place.position.0),
                job.hopeless.as_deref(),
            ))?;
            if state == READY {
                waits = true;
                self.stir(lane, due);
            }
        }
        Ok(waits)
    }

    /// A job of this lane is due from `due` on.
    pub(super) fn stir(&mut self, lane: i64, due: i64) {
        if let Some(lane) = self.by_lane.get_mut(&lane) {
            lane.quiet_until = lane.quiet_until.min(due);
        }
    }

    /// A job that waited for others is ready now: whoever waits for work is to hear of it.
    pub(super) fn wake(&mut self, lane: i64, due: i64) {
        self.stir(lane, due);
        self.woken = true;
    }

    /// Whether there is something to tell since this was last asked.
    pub(super) fn take_woken(&mut self) -> bool {
        std::mem::take(&mut self.woken)
    }

    /// When the next job of a handler is due, or its lease ends. What is known of the lanes may be
    /// too early; the earliest ones are asked until one holds.
    pub(super) fn next_due(
        &mut self,
        conn: &Connection,
        handler: &HandlerRef,
        now: Timestamp,
    ) -> rusqlite::Result<Option<Timestamp>> {
        for _ in 0..LANES_ASKED_MAX {
            let lanes = self.by_lane.iter().filter(|(_, lane)| lane.handler == *handler);
            let earliest = lanes.min_by_key(|(_, lane)| lane.quiet_until);
            let Some((&number, known)) = earliest.map(|(number, lane)| (number, lane.quiet_until))
            else {
                return Ok(None);
            };
            let exact = next_in(conn, number, i64::MIN, micros(now))?.unwrap_or(i64::MAX);
            if let Some(lane) = self.by_lane.get_mut(&number) {
                lane.quiet_until = exact;
            }
            if exact == known {
                return Ok((exact != i64::MAX).then(|| timestamp(exact)));
            }
        }
        Ok(Some(Timestamp::UNIX_EPOCH))
    }

    /// Leases that ended before `until` are lost attempts.
    fn expire(
        &mut self,
        conn: &Connection,
        lane: i64,
        until: i64,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        let expired: Vec<JobRow> = conn
            .prepare_cached(&format!(
                "SELECT {COLUMNS} FROM hapax_job WHERE lane = ?1 AND state = 1 AND due_at <= ?2"
            ))?
            .query_map((lane, until), JobRow::read)?
            .collect::<rusqlite::Result<_>>()?;
        for job in expired {
            let ended = timestamp(job.due_at).min(now);
            note_attempt(conn, &job, None, "lost", None)?;
            let (state, due, progress) = match job.progress.lost(ended, self.dice.roll()) {
                AfterLoss::Again { progress, due } => (READY, micros(due), progress),
                AfterLoss::Bury { progress } => (DEAD, micros(now), progress),
            };
            let error = (state == DEAD).then_some(
                "every attempt was lost: the process died or the lease ran out each time",
            );
            conn.prepare_cached(
                "UPDATE hapax_job SET state = ?4, due_at = ?5, lost = ?6, error = coalesce(?7, error)
                 WHERE event_seq = ?1 AND lane = ?2 AND fence = ?3",
            )?
            .execute((job.seq, lane, job.fence, state, due, progress.lost, error))?;
            self.stir(lane, due);
            marks::ready_next(conn, self, &job, now)?;
        }
        Ok(())
    }

    /// Claims up to `limit` due jobs of a handler, over its tenants in turn: attempt+1 and a new
    /// fence, committed before the work. With `guard` the order is decided here; without, in the
    /// work's own transaction.
    pub(super) fn claim(
        &mut self,
        conn: &Connection,
        ask: &Asked<'_>,
        now: Timestamp,
    ) -> rusqlite::Result<Vec<JobRow>> {
        let Some(spec) = self.specs.get(ask.handler).cloned() else { return Ok(Vec::new()) };
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
        let mut claimed = Vec::new();
        // Two rounds: everyone's share first, then what is left to whoever has more.
        for round in 0..2 {
            for &lane in &lanes {
                let room = ask.limit.saturating_sub(claimed.len());
                let wanted = if round == 0 { room.min(share) } else { room };
                if wanted == 0 {
                    break;
                }
                if self.claim_in(conn, lane, wanted, ask, &spec, now, &mut claimed)? {
                    return Ok(claimed);
                }
            }
        }
        Ok(claimed)
    }

    /// True when a job was taken that must be alone.
    #[allow(clippy::too_many_arguments)]
    fn claim_in(
        &mut self,
        conn: &Connection,
        lane: i64,
        wanted: usize,
        ask: &Asked<'_>,
        spec: &HandlerSpec,
        now: Timestamp,
        claimed: &mut Vec<JobRow>,
    ) -> rusqlite::Result<bool> {
        let at = micros(now);
        self.expire(conn, lane, at, now)?;
        let mut due = JobRow::due_in(conn, lane, at, wanted)?;
        // What is due may be what is missing: gaps are judged once nothing else is.
        if let (true, Some(rule)) = (due.is_empty(), &spec.order)
            && marks::judge(conn, lane, rule, now)?
        {
            due = JobRow::due_in(conn, lane, at, wanted)?;
        }
        if due.len() < wanted {
            let next = next_in(conn, lane, at, at)?;
            if let Some(lane) = self.by_lane.get_mut(&lane) {
                lane.quiet_until = next.unwrap_or(i64::MAX);
            }
        }
        for mut job in due {
            if job.progress.alone() && !claimed.is_empty() {
                // It stays ready, for a claim of its own.
                self.stir(lane, at);
                continue;
            }
            if let (Some(rule), Some(place)) = (&spec.order, &job.place) {
                marks::begin(conn, lane, &rule.policy, place)?;
                if ask.guard {
                    match marks::admit(conn, self, &job, rule, place, now)? {
                        Admitted::Yes => {}
                        Admitted::Busy => continue,
                        Admitted::SetAside => {
                            // It may have been woken to take its turn: that passes to the next.
                            marks::ready_next_if_free(conn, self, &job, now)?;
                            continue;
                        }
                    }
                }
            }
            job.progress = job.progress.claimed();
            job.fence += 1;
            job.state = LEASED;
            job.due_at = at.saturating_add(spec.policy.lease.as_micros() as i64);
            job.started_at = Some(at);
            job.worker = Some(ask.worker.to_owned());
            conn.prepare_cached(include_str!("sql/lease_job.sql"))?.execute((
                job.seq,
                job.lane,
                job.due_at,
                job.fence,
                job.progress.attempt,
                at,
                ask.worker,
                ask.guard && spec.order.is_some() && job.place.is_some(),
            ))?;
            let alone = job.progress.alone();
            self.stir(lane, job.due_at);
            claimed.push(job);
            if alone {
                // Whoever is due behind it comes with the next claim.
                self.stir(lane, at);
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// What a claim's holder needs, read beside the claim.
    pub(super) fn describe(&self, conn: &Connection, job: &JobRow) -> rusqlite::Result<Claim> {
        let lane = self.by_lane.get(&job.lane).expect("a job's lane is known");
        let (id, event) = conn
            .prepare_cached(
                "SELECT id, event_id, event_type, occurred_at, received_at, headers, body
                 FROM hapax_event WHERE seq = ?1",
            )?
            .query_row([job.seq], |row| {
                let id: [u8; 16] = row.get(0)?;
                let body: Vec<u8> = row.get(6)?;
                Ok((
                    id,
                    ClaimedEvent {
                        id: event_id(id),
                        key: EventKey {
                            tenant: lane.tenant.clone(),
                            source: lane.handler.source.clone(),
                            event_id: row.get_ref(1)?.as_str()?.into(),
                        },
                        event_type: row.get(2)?,
                        occurred_at: row.get::<_, Option<i64>>(3)?.map(timestamp),
                        received_at: timestamp(row.get(4)?),
                        resource: job.place.as_ref().map(|place| place.resource.to_string()),
                        headers: row.get(5)?,
                        body: Bytes::from(body),
                    },
                ))
            })?;
        Ok(Claim {
            job: job_id(&id, job.seq, job.lane),
            fence: Fence(job.fence),
            attempt: job.progress.attempt,
            run: job.run,
            idempotency_key: idempotency_key(event.id, &lane.handler.handler, job.run),
            leased_until: timestamp(job.due_at),
            alone: job.progress.alone(),
            event,
        })
    }

    /// Records how an attempt ended, if the fence still holds.
    pub(super) fn settle(
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

    /// Whether the mark has passed a job that was let run, and lost its lease on the way.
    pub(super) fn was_passed(&self, conn: &Connection, job: &JobRow) -> rusqlite::Result<bool> {
        let order = self.spec_of(job.lane).and_then(|spec| spec.order.as_ref());
        let (Some(rule), Some(place), false) = (order, &job.place, job.forced) else {
            return Ok(false);
        };
        let mark = marks::mark(conn, job.lane, &place.resource)?;
        Ok(mark.is_some() && !rule.policy.may_settle(mark, place.position))
    }

    /// The mark passed a job while it was at work. Where it can only be stale from then on, it is so
    /// at once: nobody has to wait for the end of its lease.
    pub(super) fn overtaken(
        &mut self,
        conn: &Connection,
        job: &JobRow,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        let Some(place) = job.place.as_ref().filter(|_| job.state == LEASED) else {
            return Ok(());
        };
        if marks::guard(conn, job, &self.policy_of(job.lane), place)? != Guard::Stale {
            return Ok(());
        }
        note_attempt(conn, job, Some(micros(now)), "lost", Some(OVERTAKEN))?;
        conn.prepare_cached(
            "UPDATE hapax_job SET state = 3, due_at = ?4, error = ?5
             WHERE event_seq = ?1 AND lane = ?2 AND fence = ?3",
        )?
        .execute((job.seq, job.lane, job.fence, micros(now), OVERTAKEN))?;
        marks::ready_next(conn, self, job, now)
    }

    /// How order is kept in a lane. One that keeps none any more had marks that only grew.
    pub(super) fn policy_of(&self, lane: i64) -> OrderPolicy {
        let order = self.spec_of(lane).and_then(|spec| spec.order.as_ref());
        order.map_or(OrderPolicy::Latest, |rule| rule.policy.clone())
    }

    /// A person lets the jobs of an event that are in review run; false when none is.
    pub(super) fn approve(
        &mut self,
        conn: &Connection,
        seq: i64,
        now: Timestamp,
    ) -> rusqlite::Result<bool> {
        let lanes: Vec<i64> = conn
            .prepare_cached(
                "UPDATE hapax_job SET state = 0, due_at = ?2, forced = 1, error = NULL
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
    pub(super) fn reject(
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

    /// "Done", in the transaction of the effects; the mark moves with it.
    pub(super) fn finish(
        &mut self,
        conn: &Connection,
        job: &JobRow,
        result: Option<&str>,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        let result = result.map(|result| shortened(result, RESULT_CHARS_MAX));
        let done = conn.prepare_cached(include_str!("sql/finish_job.sql"))?.execute((
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
        marks::advance(conn, job, &policy)?;
        marks::ready_next(conn, self, job, now)
    }

    /// A verdict: one step of the schedule.
    pub(super) fn fail(
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
            "UPDATE hapax_job SET state = ?4, due_at = ?5, steps = ?6, error = ?7
             WHERE event_seq = ?1 AND lane = ?2 AND fence = ?3",
        )?
        .execute((job.seq, job.lane, job.fence, state, due, progress.steps, &error))?;
        self.stir(job.lane, due);
        marks::ready_next(conn, self, job, now)
    }

    /// Lengthens a lease.
    pub(super) fn renew(
        &mut self,
        conn: &Connection,
        job: JobId,
        fence: Fence,
        lease: Duration,
        now: Timestamp,
    ) -> rusqlite::Result<Held> {
        let (seq, lane) = place_of(job);
        let until = micros(now).saturating_add(lease.as_micros() as i64);
        let renewed = conn
            .prepare_cached(
                "UPDATE hapax_job SET due_at = max(due_at, ?4)
                 WHERE event_seq = ?1 AND lane = ?2 AND fence = ?3 AND state = 1",
            )?
            .execute((seq, lane, fence.0, until))?;
        Ok(if renewed == 1 { Held::Kept } else { Held::Lost })
    }

    /// Work that was claimed but not begun: as if it had not been claimed.
    pub(super) fn give_back(
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
        marks::set_aside(conn, &row, READY, now)?;
        self.wake(lane, micros(now));
        marks::ready_next(conn, self, &row, now)
    }

    /// Makes the waiting jobs of an event due now.
    pub(super) fn hurry(
        &mut self,
        conn: &Connection,
        seq: i64,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        let lanes: Vec<i64> = conn
            .prepare_cached(
                "UPDATE hapax_job SET due_at = ?2
                 WHERE event_seq = ?1 AND state = 0 AND due_at > ?2 RETURNING lane",
            )?
            .query_map((seq, micros(now)), |row| row.get(0))?
            .collect::<rusqlite::Result<_>>()?;
        for lane in lanes {
            self.stir(lane, micros(now));
        }
        Ok(())
    }

    /// Whether a job would run, and with `act` makes it so. `None` where nothing can be done: what
    /// is hopeless stays buried, or is not begun.
    pub(super) fn replay(
        &mut self,
        conn: &Connection,
        event: EventAt<'_>,
        job: &NewJob,
        force: bool,
        act: bool,
        now: Timestamp,
    ) -> rusqlite::Result<Option<hapax_core::store::ReplayEffect>> {
        use hapax_core::store::ReplayEffect;
        let lane = self.lane(conn, event.pair, event.tenant, event.source, &job.handler)?;
        let order = self.spec_of(lane).and_then(|spec| spec.order.as_ref());
        let behind = match (order, &job.place) {
            (Some(order), Some(place)) => {
                let mark = marks::mark(conn, lane, &place.resource)?;
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
            return Ok(Some(if stale { ReplayEffect::Stale } else { ReplayEffect::WouldRun }));
        };
        match row.state {
            READY | LEASED | HELD | PARKED | REVIEW => return Ok(Some(ReplayEffect::AlreadyOpen)),
            DONE if !force => return Ok(Some(ReplayEffect::AlreadyApplied)),
            STALE if !force => return Ok(Some(ReplayEffect::Stale)),
            DISCARDED if !force => return Ok(Some(ReplayEffect::Discarded)),
            _ if job.hopeless.is_some() => return Ok(None),
            DEAD if behind && !force => {
                if act {
                    marks::set_aside(conn, &row, STALE, now)?;
                }
                return Ok(Some(ReplayEffect::Stale));
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
                "UPDATE hapax_job SET state = 0, due_at = ?3, fence = fence + 1, run = run + ?4,
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
        Ok(Some(ReplayEffect::WouldRun))
    }
}

/// When the first job of a lane is due after `after`, its first lease ends or its first deadline
/// passes. One that has passed counts only while nobody works on its resource: until then nothing
/// happens to it.
fn next_in(conn: &Connection, lane: i64, after: i64, now: i64) -> rusqlite::Result<Option<i64>> {
    conn.prepare_cached(&format!(
        "SELECT min(due_at) FROM (
             SELECT min(due_at) AS due_at FROM hapax_job WHERE lane = ?1 AND state = 0 AND due_at > ?2
             UNION ALL
             SELECT min(due_at) FROM hapax_job WHERE lane = ?1 AND state = 1
             UNION ALL
             SELECT min(due_at) FROM hapax_job WHERE lane = ?1 AND state = 5 AND due_at > ?3
             UNION ALL
             SELECT * FROM (SELECT due_at FROM hapax_job AS held
                            WHERE lane = ?1 AND state = 5 AND due_at <= ?3 AND {AT_REST}
                            ORDER BY due_at LIMIT 1))"
    ))?
    .query_row((lane, after, now), |row| row.get(0))
}

/// What to claim.
pub(super) struct Asked<'a> {
    pub(super) handler: &'a HandlerRef,
    pub(super) limit: usize,
    pub(super) worker: &'a str,
    /// Whether order is decided by the claim.
    pub(super) guard: bool,
}

/// An event that jobs are written for.
#[derive(Debug, Clone, Copy)]
pub(super) struct EventAt<'a> {
    pub(super) seq: i64,
    pub(super) pair: i64,
    pub(super) tenant: &'a Tenant,
    pub(super) source: &'a SourceName,
}

/// Records a message with the commit that publishes it. The same id twice is one message; one that
/// names no tenant is of its event's, so that no tenant can use up another's ids. What handlers
/// publish by SQL goes by the same rules, in the trigger of `hapax_publish`.
fn write_message(
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
pub(super) fn uncount(conn: &Connection, job: &JobRow) -> rusqlite::Result<()> {
    conn.prepare_cached(
        "UPDATE hapax_job SET attempt = ?4, fence = fence + 1, started_at = NULL, worker = NULL
         WHERE event_seq = ?1 AND lane = ?2 AND fence = ?3",
    )?
    .execute((job.seq, job.lane, job.fence, job.progress.given_back().attempt))?;
    Ok(())
}

fn note_attempt(
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

fn shortened(text: &str, chars_max: usize) -> String {
    text.chars().take(chars_max).collect()
}
