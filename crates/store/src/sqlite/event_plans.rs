//! Slices of plans over events. A connection apart from the writer reads a slice, so that plans over very many
//! events delay no ack. The writer then takes the slice in one commit.

use bytes::Bytes;
use hapax_core::store::{
    Action, EventAct, EventFilter, EventPlan, EventSlice, JobScope, PlannedEvent, ReplayAsk,
    ReplayEffect, Reviewed, SliceSpan, Status,
};
use hapax_core::{SourceName, Tenant, Timestamp};
use rusqlite::types::Value;
use rusqlite::{Connection, Row, params_from_iter};

use super::lists::LISTED;
use super::plans::{PlanBounds, RunningPlan};
use super::reader::{self, RANK};
use super::row::{DEAD, REVIEW, event_id, micros};
use super::writer::Writer;
use crate::limits::{PLAN_BYTES, PLAN_SCAN, PLAN_SEARCH};

/// The place of an event in a [`SliceSpan`].
pub(super) fn place(seq: i64) -> u128 {
    u128::from(seq.max(0).unsigned_abs())
}

/// The inverse of [`place`].
pub(super) fn seq_of_place(place: u128) -> i64 {
    i64::try_from(place).unwrap_or(i64::MAX)
}

/// The next slice of a plan, with at most `count` events.
pub(super) fn slice(
    conn: &Connection,
    plan: &RunningPlan,
    work: EventPlan,
    count: usize,
) -> rusqlite::Result<EventSlice> {
    let needs_bodies = work.act.writes_jobs();
    let (mut events, mut bytes) = (Vec::new(), 0);
    let instant = plan.plan.created_at;
    let body = if needs_bodies { "b.body" } else { "NULL" };
    let scan = EventScan::run(conn, &work, &plan.span, instant, plan.passed, body, |row| {
        let body = match needs_bodies {
            true => Bytes::from(row.get::<_, Vec<u8>>(4)?),
            false => Bytes::new(),
        };
        bytes += body.len();
        events.push(PlannedEvent {
            id: event_id(row.get(0)?),
            tenant: Tenant::new(row.get_ref(1)?.as_str()?),
            source: SourceName::new(row.get_ref(2)?.as_str()?),
            event_type: row.get(3)?,
            body,
            jobs: Vec::new(),
        });
        Ok(events.len() < count && bytes < PLAN_BYTES)
    })?;
    let (after, through) = (place(plan.passed), place(scan.through));
    let span = SliceSpan { after, through, is_last: scan.is_last };
    Ok(EventSlice { plan: plan.plan.id, work, events, span })
}

/// One bounded read of the events after a place.
pub(super) struct EventScan {
    /// Events that the plan takes.
    pub(super) count: usize,
    /// The last event that was read.
    pub(super) through: i64,
    /// Whether this is the last slice.
    pub(super) is_last: bool,
}

impl EventScan {
    /// Counts the events that a plan of this instant takes.
    pub(super) fn count(
        conn: &Connection,
        work: &EventPlan,
        span: &PlanBounds,
        instant: Timestamp,
        after: i64,
    ) -> rusqlite::Result<Self> {
        Self::run(conn, work, span, instant, after, "NULL", |_| Ok(true))
    }

    /// Calls `take` with each event that the plan takes, oldest first, until it returns false. `body` is the
    /// expression for the body: reading one takes as long as the body is large.
    fn run(
        conn: &Connection,
        work: &EventPlan,
        span: &PlanBounds,
        instant: Timestamp,
        after: i64,
        body: &str,
        mut take: impl FnMut(&Row<'_>) -> rusqlite::Result<bool>,
    ) -> rusqlite::Result<Self> {
        // A text search reads the body of every event, which may be large.
        let most = if work.filter.text.is_some() { PLAN_SEARCH } else { PLAN_SCAN };
        let candidates = candidates(conn, work.filter.status, after, span.last, most)?;
        let (condition, values) = condition(work, span, instant);
        let mut statement = conn.prepare_cached(&format!(
            "SELECT e.id, p.tenant, p.source, b.event_type, {body}
             FROM hapax_event e JOIN hapax_body b ON b.seq = e.seq JOIN hapax_pair p ON p.pair = e.pair
             WHERE e.seq = ?{condition}"
        ))?;
        let mut scan = Self { count: 0, through: after, is_last: candidates.len() < most };
        for (n, seq) in candidates.iter().enumerate() {
            scan.through = *seq;
            let bound = std::iter::once(Value::Integer(*seq)).chain(values.iter().cloned());
            let mut rows = statement.query(params_from_iter(bound))?;
            let Some(row) = rows.next()? else { continue };
            scan.count += 1;
            if !take(row)? {
                scan.is_last &= n + 1 == candidates.len();
                break;
            }
        }
        Ok(scan)
    }
}

/// Events after a place that may be in the plan, at most `most`, oldest first. Dead letters and jobs in review
/// are found by their index.
fn candidates(
    conn: &Connection,
    status: Option<Status>,
    after: i64,
    last: i64,
    most: usize,
) -> rusqlite::Result<Vec<i64>> {
    let state = match status {
        Some(Status::Dead) => Some(DEAD),
        Some(Status::Review) => Some(REVIEW),
        Some(
            Status::Discarded
            | Status::Failed
            | Status::Held
            | Status::Processing
            | Status::Received
            | Status::Processed
            | Status::Stale
            | Status::Ignored,
        )
        | None => None,
    };
    let bound = (after, last, most as i64);
    let Some(state) = state else {
        return conn
            .prepare_cached(
                "SELECT seq FROM hapax_body WHERE seq > ?1 AND seq <= ?2 ORDER BY seq LIMIT ?3",
            )?
            .query_map(bound, |row| row.get(0))?
            .collect();
    };
    let mut found: Vec<i64> = Vec::new();
    if state == REVIEW {
        let mut waiting = conn.prepare_cached(
            "SELECT seq FROM hapax_event WHERE state <> 0 /* open */ AND state = 1 /* review */
               AND seq > ?1 AND seq <= ?2 ORDER BY seq LIMIT ?3",
        )?;
        for seq in waiting.query_map(bound, |row| row.get(0))? {
            found.push(seq?);
        }
    }
    let mut of_state = conn.prepare_cached(&format!(
        "SELECT event_seq FROM hapax_job INDEXED BY hapax_job_listed WHERE {LISTED} AND state = {state}
           AND event_seq > ?1 AND event_seq <= ?2 ORDER BY event_seq LIMIT ?3"
    ))?;
    for seq in of_state.query_map(bound, |row| row.get(0))? {
        found.push(seq?);
    }
    found.sort_unstable();
    found.dedup();
    found.truncate(most);
    Ok(found)
}

/// The condition for an event of the plan, beginning with AND, and its values.
fn condition(work: &EventPlan, span: &PlanBounds, instant: Timestamp) -> (String, Vec<Value>) {
    let filter = EventFilter { status: None, unfinished_since: None, ..work.filter.clone() };
    let (mut sql, mut values) = reader::filtered(&filter);
    let mut require = |said: &str, said_of: Vec<Value>| {
        sql.push_str(" AND ");
        sql.push_str(said);
        values.extend(said_of);
    };
    require("e.received_at < ?", vec![Value::Integer(span.until)]);
    if let Some(since) = work.filter.unfinished_since {
        let unfinished = format!(
            "? > e.received_at AND (e.state = 1 /* review */
             OR e.state = 0 /* open */ AND {RANK} IN (0, 2, 3, 4, 5, 6) /* not final */)"
        );
        require(&unfinished, vec![Value::Integer(micros(since))]);
    }
    // Only jobs that were dead or in review before the plan: a job that dies or goes to review
    // later is not part of it.
    let was_so = |state: i64| {
        let mut said = format!(
            "EXISTS (SELECT 1 FROM hapax_job j JOIN hapax_lane l ON l.lane = j.lane
                     JOIN hapax_handler h ON h.handler = l.handler
                     WHERE j.event_seq = e.seq AND j.state = {state} AND j.due_at < ?"
        );
        let mut values = vec![Value::Integer(micros(instant))];
        if let Some(handler) = &work.handler {
            said.push_str(" AND h.name = ?");
            values.push(Value::Text(handler.to_string()));
        }
        said.push(')');
        (said, values)
    };
    let ranked = |rank: i64| format!("e.state = 0 /* open */ AND {RANK} = {rank}");
    match work.filter.status {
        None => {}
        Some(Status::Dead) => {
            let (said, of) = was_so(DEAD);
            require(&said, of);
        }
        Some(Status::Review) => {
            let (said, of) = was_so(REVIEW);
            require(&format!("(e.state = 1 /* review */ OR {said})"), of);
        }
        Some(Status::Discarded) => {
            require(&format!("(e.state = 2 /* discarded */ OR {})", ranked(1)), Vec::new());
        }
        Some(Status::Failed) => require(&ranked(3), Vec::new()),
        Some(Status::Held) => require(&ranked(4), Vec::new()),
        Some(Status::Processing) => require(&ranked(5), Vec::new()),
        Some(Status::Received) => require(&ranked(6), Vec::new()),
        Some(Status::Processed) => require(&ranked(7), Vec::new()),
        Some(Status::Stale) => require(&ranked(8), Vec::new()),
        Some(Status::Ignored) => {
            require(&format!("e.state = 0 /* open */ AND {RANK} IS NULL"), Vec::new());
        }
    }
    (sql, values)
}

impl Writer {
    /// Applies the plan's act to an event. Returns false if the event needs nothing.
    pub(super) fn decide_planned(
        &mut self,
        work: &EventPlan,
        event: PlannedEvent,
        scope: JobScope,
        by: &Action,
    ) -> rusqlite::Result<bool> {
        let reviewed = match work.act {
            EventAct::Replay { force } => {
                let ask = ReplayAsk {
                    event: event.id,
                    handlers: event.jobs,
                    force,
                    dry_run: false,
                    by: by.clone(),
                };
                let replayed = self.replay(&ask, scope)?;
                return Ok(replayed.iter().any(|one| one.effect == ReplayEffect::WouldRun));
            }
            EventAct::Approve => self.approve(event.id, &event.jobs, scope, by)?,
            EventAct::Reject => self.reject(event.id, scope, by)?,
            EventAct::Discard => self.discard(event.id, work.handler.as_ref(), scope, by)?,
        };
        Ok(reviewed == Reviewed::Decided)
    }
}
