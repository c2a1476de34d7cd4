//! The plans of operators: their rows, and which of them is due. A slice over deliveries is one commit of the
//! writer ([`super::outbox`]). A slice over events is read apart from the writer and then taken in one commit
//! ([`super::event_plans`]).

use hapax_core::endpoint::EndpointId;
use hapax_core::store::{
    Action, DeliveryPlan, EventPlan, EventSlice, Held, Horizon, NewPlan, Plan, PlanCount,
    PlanCreated, PlanId, PlanRun, PlanState, PlanWork, PlannedDeliveries, Plans, StoreError,
    plan_slice, slice_wait,
};
use hapax_core::{KeyHash, Timestamp};
use rusqlite::types::Type;
use rusqlite::{Connection, OptionalExtension, Row};
use uuid::Uuid;

use super::SqliteStore;
use super::event_plans::{self, EventScan};
use super::lists::Numbered;
use super::outbox::{MissingScan, count_deliveries, endpoint_number};
use super::row::{micros, timestamp};
use super::writer::Writer;
use crate::columns::{json_of_plan, plan_of_json};

/// A plan, as [`read`] reads it, and its position.
const PLAN: &str = "SELECT p.plan, p.id, e.id, p.which, p.since_at, p.asked_until, p.rate, p.total, p.done, \
                    p.skipped, p.state, p.created_at, p.ended_at, p.who, p.reason, p.endpoint, p.until_at, \
                    p.next_at, p.passed_at, p.passed, p.last, e.deleted_at IS NOT NULL, p.events \
                    FROM hapax_plan p LEFT JOIN hapax_endpoint e ON e.endpoint = p.endpoint";

/// Why a plan whose row cannot be read does not run.
const UNREADABLE: &str =
    "this version cannot read the plan's row: run it on a node with the version that wrote it";

impl Plans for SqliteStore {
    async fn count_plan(&self, work: PlanWork) -> Result<PlanCount, StoreError> {
        let now = self.writer_now().await?;
        Ok(match self.count(&work, now).await? {
            Some((_, total)) => PlanCount::Counted(total),
            None => PlanCount::UnknownEndpoint,
        })
    }

    async fn create_plan(&self, plan: NewPlan, by: Action) -> Result<PlanCreated, StoreError> {
        // Counting may take long, so it is done apart from the writer. The time of the plan is fixed
        // before the count.
        let now = self.writer_now().await?;
        let (id, request) = (plan.id, plan.request);
        let known = self.readers.run(move |conn| created_before(conn, id, request)).await?;
        if let Some(known) = known {
            return Ok(known);
        }
        let Some((span, total)) = self.count(&plan.work, now).await? else {
            return Ok(PlanCreated::UnknownEndpoint);
        };
        self.writer.act(move |writer| insert(&writer.conn, &plan, &by, &span, total, now)).await
    }

    async fn run_plan(&self, limit: usize, except: Vec<PlanId>) -> Result<PlanRun, StoreError> {
        let due = self.writer.behind(move |writer| writer.next_plan(&except)).await?;
        let plan = match due {
            DueSlice::Answered(run) => return Ok(run),
            DueSlice::Plan(plan) => plan,
        };
        let id = plan.plan.id;
        let ran = match plan.plan.work.clone() {
            PlanWork::Events(work) => self
                .readers
                .run(move |conn| {
                    let count = plan_slice(plan.plan.rate, limit).0;
                    event_plans::slice(conn, &plan, *work, count)
                })
                .await
                .map(|slice| PlanRun::Events(Box::new(slice))),
            PlanWork::Deliveries(_) => {
                self.writer
                    .behind(move |writer| writer.in_transaction(|it| it.run_plan(id, limit)))
                    .await
            }
        };
        match ran {
            Err(error @ (StoreError::Unavailable(_) | StoreError::Read(_))) => {
                Ok(PlanRun::Failed(id, error.to_string()))
            }
            ran => ran,
        }
    }

    async fn take_slice(&self, slice: EventSlice) -> Result<Held, StoreError> {
        let held = self
            .writer
            .behind(move |writer| writer.in_transaction(|writer| writer.take_slice(slice)))
            .await;
        self.shared.arrived.notify_waiters();
        held
    }

    async fn cancel_plan(&self, id: PlanId, _by: Action) -> Result<Option<Plan>, StoreError> {
        self.writer
            .act(move |writer| {
                let now = micros(writer.now());
                writer
                    .conn
                    .prepare_cached(
                        "UPDATE hapax_plan SET state = 'cancelled', ended_at = ?2
                         WHERE id = ?1 AND state = 'running'",
                    )?
                    .execute((id.0.as_bytes(), now))?;
                find(&writer.conn, id)
            })
            .await
    }

    async fn plan(&self, id: PlanId) -> Result<Option<Plan>, StoreError> {
        self.readers.run(move |conn| find(conn, id)).await
    }

    async fn plans(&self, limit: usize) -> Result<Vec<Plan>, StoreError> {
        self.readers
            .run(move |conn| {
                conn.prepare_cached(&format!("{PLAN} ORDER BY p.plan DESC LIMIT ?1"))?
                    .query_map([limit as i64], |row| Ok(readable(row)?.map(|found| found.plan)))?
                    .filter_map(Result::transpose)
                    .collect()
            })
            .await
    }
}

impl SqliteStore {
    async fn writer_now(&self) -> Result<Timestamp, StoreError> {
        self.writer.slice(|writer| Ok(writer.now())).await
    }

    /// The range and the count of a plan that is made at this time. `None`: its endpoint is
    /// unknown. Every query is bounded, so that a count over very many rows takes several.
    async fn count(
        &self,
        work: &PlanWork,
        now: Timestamp,
    ) -> Result<Option<(PlanBounds, u64)>, StoreError> {
        match work {
            PlanWork::Deliveries(work) => self.count_deliveries(*work, now).await,
            PlanWork::Events(work) => self.count_events(work, now).await.map(Some),
        }
    }

    async fn count_deliveries(
        &self,
        work: DeliveryPlan,
        now: Timestamp,
    ) -> Result<Option<(PlanBounds, u64)>, StoreError> {
        let until = work.until.map_or(now, |until| until.min(now));
        let counted = self.readers.run(move |conn| {
            let Some(number) = endpoint_number(conn, work.endpoint)? else { return Ok(None) };
            let span = PlanBounds::of(conn, Numbered::Messages, work.since, until)?;
            let total = count_deliveries(conn, number, work.which, &span)?;
            Ok(Some((number, span, total)))
        });
        let Some((number, span, total)) = counted.await? else { return Ok(None) };
        let mut total = total.unwrap_or(0);
        if work.which == PlannedDeliveries::Missing {
            let mut scan = MissingScan::of(&span);
            while !scan.is_over {
                scan = self.readers.run(move |conn| scan.count_part(conn, number, &span)).await?;
            }
            total = scan.missing;
        }
        Ok(Some((span, total)))
    }

    async fn count_events(
        &self,
        work: &EventPlan,
        now: Timestamp,
    ) -> Result<(PlanBounds, u64), StoreError> {
        let (since, until) = (work.filter.since.unwrap_or(Timestamp::MIN), work.until(now));
        let span =
            self.readers.run(move |conn| PlanBounds::of(conn, Numbered::Events, since, until));
        let span = span.await?;
        let (mut after, mut total) = (span.first - 1, 0);
        loop {
            let work = work.clone();
            let scan =
                self.readers.run(move |conn| EventScan::count(conn, &work, &span, now, after));
            let scan = scan.await?;
            total += scan.count as u64;
            if scan.is_last {
                return Ok((span, total));
            }
            after = scan.through;
        }
    }
}

/// The writer's answer to a request for a slice.
enum DueSlice {
    /// The answer: no slice is due, or the plan cannot be read.
    Answered(PlanRun),
    /// A slice of this plan is due.
    Plan(Box<RunningPlan>),
}

impl Writer {
    /// The plan that has waited longest for a slice. Changes nothing.
    fn next_plan(&self, except: &[PlanId]) -> rusqlite::Result<DueSlice> {
        let mut running = self
            .conn
            .prepare_cached(&format!("{PLAN} WHERE p.state = 'running' ORDER BY p.next_at"))?;
        let mut rows = running.query([])?;
        while let Some(row) = rows.next()? {
            let id = PlanId(Uuid::from_bytes(row.get(1)?));
            if except.contains(&id) {
                continue;
            }
            let next_at: i64 = row.get(17)?;
            if next_at > micros(self.now()) {
                return Ok(DueSlice::Answered(PlanRun::NotBefore(timestamp(next_at))));
            }
            return Ok(match readable(row)? {
                Some(plan) => DueSlice::Plan(Box::new(plan)),
                None => DueSlice::Answered(PlanRun::Failed(id, UNREADABLE.to_owned())),
            });
        }
        Ok(DueSlice::Answered(PlanRun::Idle))
    }

    /// Runs a slice of a plan over deliveries.
    fn run_plan(&mut self, id: PlanId, limit: usize) -> rusqlite::Result<PlanRun> {
        let now = self.now();
        let plan = self
            .conn
            .prepare_cached(&format!("{PLAN} WHERE p.id = ?1 AND p.state = 'running'"))?
            .query_row([id.0.as_bytes()], readable)
            .optional()?;
        // An operator may have cancelled the plan meanwhile.
        let Some(mut plan) = plan.flatten() else { return Ok(PlanRun::Taken(id)) };
        let PlanWork::Deliveries(work) = plan.plan.work else { return Ok(PlanRun::Taken(id)) };
        if plan.is_orphaned {
            plan.end(&self.conn, PlanState::Cancelled, now)?;
        } else {
            self.outbox.run_slice(&self.conn, &mut plan, work.which, limit, now)?;
        }
        Ok(PlanRun::Ran(id))
    }

    /// Applies the plan's act to each event of the slice, unless another slice was taken meanwhile.
    fn take_slice(&mut self, slice: EventSlice) -> rusqlite::Result<Held> {
        let now = self.now();
        let plan: Option<RunningPlan> = self
            .conn
            .prepare_cached(&format!("{PLAN} WHERE p.id = ?1 AND p.state = 'running'"))?
            .query_row([slice.plan.0.as_bytes()], readable)
            .optional()?
            .flatten();
        let stands = |plan: &RunningPlan| event_plans::place(plan.passed) == slice.span.after;
        let Some(mut plan) = plan.filter(stands) else { return Ok(Held::Lost) };
        let by = plan.action();
        let (taken, span) = (slice.events.len(), slice.span);
        let scope = slice.work.scope(plan.plan.created_at);
        for event in slice.events {
            match self.decide_planned(&slice.work, event, scope, &by)? {
                true => plan.plan.done += 1,
                false => plan.plan.skipped += 1,
            }
        }
        plan.passed = event_plans::seq_of_place(span.through);
        let wait = slice_wait(plan.plan.rate, taken);
        plan.advance(&self.conn, wait, span.is_last, now)?;
        Ok(Held::Kept)
    }
}

/// A plan and its place.
pub(super) struct RunningPlan {
    number: i64,
    pub(super) plan: Plan,
    /// The endpoint of a plan over deliveries; 0 otherwise.
    pub(super) endpoint: i64,
    is_orphaned: bool,
    next_at: i64,
    pub(super) passed_at: i64,
    pub(super) passed: i64,
    pub(super) span: PlanBounds,
}

impl RunningPlan {
    pub(super) fn action(&self) -> Action {
        let Plan { who, reason, created_at, .. } = &self.plan;
        Action { who: who.clone(), reason: reason.clone(), at: *created_at }
    }

    /// Records the plan's place and counts after a slice. The next slice is due after `wait`.
    pub(super) fn advance(
        &self,
        conn: &Connection,
        wait: std::time::Duration,
        is_over: bool,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        let wait = i64::try_from(wait.as_micros()).unwrap_or(i64::MAX);
        let next_at = self.next_at.max(micros(now).saturating_sub(1_000_000)).saturating_add(wait);
        conn.prepare_cached(
            "UPDATE hapax_plan SET passed_at = ?2, passed = ?3, done = ?4, skipped = ?5, next_at = ?6
             WHERE plan = ?1",
        )?
        .execute((
            self.number,
            self.passed_at,
            self.passed,
            self.plan.done as i64,
            self.plan.skipped as i64,
            next_at,
        ))?;
        if is_over { self.end(conn, PlanState::Done, now) } else { Ok(()) }
    }

    fn end(&self, conn: &Connection, state: PlanState, now: Timestamp) -> rusqlite::Result<()> {
        conn.prepare_cached("UPDATE hapax_plan SET state = ?2, ended_at = ?3 WHERE plan = ?1")?
            .execute((self.number, state.as_str(), micros(now)))?;
        Ok(())
    }
}

/// The times and the numbers of the messages or events of a plan.
#[derive(Debug, Clone, Copy)]
pub(super) struct PlanBounds {
    pub(super) since: i64,
    pub(super) until: i64,
    pub(super) first: i64,
    pub(super) last: i64,
}

impl PlanBounds {
    fn of(
        conn: &Connection,
        numbered: Numbered,
        since: Timestamp,
        until: Timestamp,
    ) -> rusqlite::Result<Self> {
        let numbers = numbered.range(conn, Some(since), Some(until))?;
        let (since, until) = (micros(since), micros(until));
        Ok(Self { since, until, first: numbers.start, last: numbers.end - 1 })
    }

    pub(super) fn holds(&self, at: i64) -> bool {
        self.since <= at && at < self.until
    }
}

/// Records a plan, unless one with its id was recorded meanwhile.
fn insert(
    conn: &Connection,
    plan: &NewPlan,
    by: &Action,
    span: &PlanBounds,
    total: u64,
    now: Timestamp,
) -> rusqlite::Result<PlanCreated> {
    let NewPlan { id, work, rate, request, alone } = plan;
    let (endpoint, which, events, asked_until) = match work {
        PlanWork::Deliveries(work) => {
            let Some(endpoint) = endpoint_number(conn, work.endpoint)? else {
                return Ok(PlanCreated::UnknownEndpoint);
            };
            (Some(endpoint), Some(work.which.as_str()), None, work.until)
        }
        PlanWork::Events(work) => (None, None, Some(json_of_plan(work)), work.filter.until),
    };
    // Only the writer records plans, so no plan can begin between this check and the insertion.
    if *alone && created_before(conn, *id, *request)?.is_none() {
        let sql =
            "SELECT EXISTS (SELECT 1 FROM hapax_plan WHERE state = 'running' AND endpoint = ?1)";
        if conn.prepare_cached(sql)?.query_row([endpoint], |row| row.get(0))? {
            return Ok(PlanCreated::EndpointBusy);
        }
    }
    conn.prepare_cached(
        "INSERT INTO hapax_plan (id, endpoint, which, since_at, until_at, asked_until, rate, total, next_at,
             passed_at, passed, last, who, reason, created_at, events, request)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?9, ?15, ?16)
         ON CONFLICT (id) DO NOTHING",
    )?
    .execute(rusqlite::params![
        id.0.as_bytes(),
        endpoint,
        which,
        span.since,
        span.until,
        asked_until.map(micros),
        rate.map(|rate| rate.max(1)),
        total as i64,
        micros(now),
        i64::MIN,
        span.first - 1,
        span.last,
        by.who,
        by.reason,
        events,
        request.0,
    ])?;
    // If the row exists and cannot be read, another request wrote it.
    Ok(created_before(conn, *id, *request)?.unwrap_or(PlanCreated::OtherRequest))
}

/// The answer if there is a plan with this id.
fn created_before(
    conn: &Connection,
    id: PlanId,
    request: KeyHash,
) -> rusqlite::Result<Option<PlanCreated>> {
    let made_by: Option<[u8; 16]> = conn
        .prepare_cached("SELECT request FROM hapax_plan WHERE id = ?1")?
        .query_row([id.0.as_bytes()], |row| row.get(0))
        .optional()?;
    if made_by.is_some_and(|made_by| made_by != request.0) {
        return Ok(Some(PlanCreated::OtherRequest));
    }
    Ok(find(conn, id)?.map(|plan| PlanCreated::Created(Box::new(plan))))
}

/// Deletes plans that ended before the horizon of events, at most `limit`. True if there may be more.
pub(super) fn forget(
    writer: &mut Writer,
    horizon: &Horizon,
    limit: usize,
) -> rusqlite::Result<bool> {
    let sql = "DELETE FROM hapax_plan WHERE plan IN
                   (SELECT plan FROM hapax_plan WHERE ended_at IS NOT NULL AND ended_at < ?1 LIMIT ?2)";
    let bound = (micros(horizon.events_before), limit as i64);
    Ok(writer.conn.prepare_cached(sql)?.execute(bound)? >= limit)
}

fn find(conn: &Connection, id: PlanId) -> rusqlite::Result<Option<Plan>> {
    let found = conn
        .prepare_cached(&format!("{PLAN} WHERE p.id = ?1"))?
        .query_row([id.0.as_bytes()], readable)
        .optional()?;
    Ok(found.flatten().map(|found| found.plan))
}

/// `None` if the row was changed by hand, or written by a newer version, so that it cannot be read.
/// An error would count as an error of the file, after which the writer starts again.
fn readable(row: &Row<'_>) -> rusqlite::Result<Option<RunningPlan>> {
    match read(row) {
        Ok(plan) => Ok(Some(plan)),
        Err(error @ rusqlite::Error::SqliteFailure(..)) => Err(error),
        Err(_unreadable) => Ok(None),
    }
}

fn read(row: &Row<'_>) -> rusqlite::Result<RunningPlan> {
    let count = |at: usize| row.get::<_, i64>(at).map(i64::unsigned_abs);
    let moment = |at: usize| -> rusqlite::Result<Option<Timestamp>> {
        Ok(row.get::<_, Option<i64>>(at)?.map(timestamp))
    };
    let unknown = |at: usize| {
        let error = "an unknown kind of plan".into();
        rusqlite::Error::FromSqlConversionFailure(at, Type::Text, error)
    };
    let work = match row.get_ref(22)?.as_str_or_null()? {
        Some(events) => PlanWork::from(plan_of_json(events).ok_or_else(|| unknown(22))?),
        None => PlanWork::from(DeliveryPlan {
            endpoint: EndpointId(Uuid::from_bytes(row.get(2)?)),
            which: PlannedDeliveries::parse(row.get_ref(3)?.as_str()?).ok_or_else(|| unknown(3))?,
            since: timestamp(row.get(4)?),
            until: moment(5)?,
        }),
    };
    let plan = Plan {
        id: PlanId(Uuid::from_bytes(row.get(1)?)),
        work,
        rate: row.get(6)?,
        total: count(7)?,
        done: count(8)?,
        skipped: count(9)?,
        state: match row.get_ref(10)?.as_str()? {
            "running" => PlanState::Running,
            "done" => PlanState::Done,
            _cancelled => PlanState::Cancelled,
        },
        created_at: timestamp(row.get(11)?),
        ended_at: moment(12)?,
        who: row.get(13)?,
        reason: row.get(14)?,
    };
    Ok(RunningPlan {
        number: row.get(0)?,
        plan,
        endpoint: row.get::<_, Option<i64>>(15)?.unwrap_or(0),
        is_orphaned: row.get::<_, Option<bool>>(21)?.unwrap_or(false),
        next_at: row.get(17)?,
        passed_at: row.get(18)?,
        passed: row.get(19)?,
        span: PlanBounds {
            since: row.get(4)?,
            until: row.get(16)?,
            first: row.get::<_, i64>(19)? + 1,
            last: row.get(20)?,
        },
    })
}
