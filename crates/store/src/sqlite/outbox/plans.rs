//! Plans of operators over the deliveries of an endpoint. A slice changes its deliveries, its place and its
//! counts in one commit of the writer.

use hapax_core::Timestamp;
use hapax_core::delivery::DeliveryUnchanged;
use hapax_core::endpoint::EndpointId;
use hapax_core::job::jittered;
use hapax_core::store::{
    Action, DeliveryPlan, NewMessage, NewPlan, Plan, PlanCount, PlanCreated, PlanId, PlanRun,
    PlanState, PlannedDeliveries, Plans, StoreError, plan_slice,
};
use rusqlite::types::Type;
use rusqlite::{Connection, OptionalExtension, Row};
use uuid::Uuid;

use super::change::Reported;
use super::endpoints::note_action;
use super::row::{COLUMNS, DeliveryRow};
use super::{Outbox, endpoints};
use crate::sqlite::SqliteStore;
use crate::sqlite::row::{micros, timestamp};

/// A plan, as [`read`] reads it, and where it is.
const PLAN: &str = "SELECT p.plan, p.id, e.id, p.which, p.since_at, p.asked_until, p.rate, p.total, p.done, \
                    p.skipped, p.state, p.created_at, p.ended_at, p.who, p.reason, p.endpoint, p.until_at, \
                    p.next_at, p.passed_at, p.passed, p.last_message, e.deleted_at IS NOT NULL \
                    FROM hapax_plan p JOIN hapax_endpoint e ON e.endpoint = p.endpoint";

/// Times of messages differ from the order of their numbers by at most this, in microseconds: a clock that was
/// set back further delays nothing, but a plan may then leave out messages of that hour.
const TIME_SLACK: i64 = 3_600_000_000;

impl Plans for SqliteStore {
    async fn count_plan(&self, work: DeliveryPlan) -> Result<PlanCount, StoreError> {
        self.readers
            .run(move |conn| {
                let until = work.until.unwrap_or(Timestamp::MAX);
                let Some(number) = number_of(conn, work.endpoint)? else {
                    return Ok(PlanCount::UnknownEndpoint);
                };
                let span = Span::of(conn, &work, until)?;
                Ok(PlanCount::Deliveries(count(conn, number, work.which, &span)?))
            })
            .await
    }

    async fn create_plan(&self, plan: NewPlan, by: Action) -> Result<PlanCreated, StoreError> {
        self.writer
            .act(move |writer| {
                let now = writer.now();
                create(&writer.conn, &plan, &by, now)
            })
            .await
    }

    async fn run_plan(&self, limit: usize) -> Result<PlanRun, StoreError> {
        self.writer
            .behind(move |writer| {
                writer.in_transaction(|writer| {
                    let now = writer.now();
                    writer.outbox.run_plan(&writer.conn, limit, now)
                })
            })
            .await
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
                    .query_map([limit as i64], |row| Ok(read(row)?.plan))?
                    .collect()
            })
            .await
    }
}

/// A plan and its place.
struct RunningPlan {
    number: i64,
    plan: Plan,
    endpoint: i64,
    is_orphaned: bool,
    next_at: i64,
    passed_at: i64,
    passed: i64,
    span: Span,
}

/// The times and the numbers of the messages that a plan is about.
#[derive(Debug, Clone, Copy)]
struct Span {
    since: i64,
    until: i64,
    first: i64,
    last: i64,
}

impl Span {
    fn of(conn: &Connection, work: &DeliveryPlan, until: Timestamp) -> rusqlite::Result<Self> {
        let (since, until) = (micros(work.since), micros(until));
        let newest: Option<i64> =
            conn.query_row("SELECT max(seq) FROM hapax_message", [], |row| row.get(0))?;
        let newest = newest.unwrap_or(0);
        let first = first_published(conn, since.saturating_sub(TIME_SLACK), newest)?;
        let last = first_published(conn, until.saturating_add(TIME_SLACK), newest)?.min(newest);
        Ok(Self { since, until, first, last })
    }

    fn holds(&self, at: i64) -> bool {
        self.since <= at && at < self.until
    }
}

/// The number of the first message that was published at this time or later, by bisection: numbers grow with
/// the time. One more than `newest` if there is none.
fn first_published(conn: &Connection, at: i64, newest: i64) -> rusqlite::Result<i64> {
    let (mut low, mut high) = (0, newest + 1);
    let mut next = conn.prepare_cached(
        "SELECT seq, created_at FROM hapax_message WHERE seq >= ?1 ORDER BY seq LIMIT 1",
    )?;
    while low < high {
        let middle = low + (high - low) / 2;
        let found: Option<(i64, i64)> =
            next.query_row([middle], |row| Ok((row.get(0)?, row.get(1)?))).optional()?;
        match found {
            Some((seq, created_at)) if created_at < at => low = seq + 1,
            Some(_) | None => high = middle,
        }
    }
    Ok(low)
}

impl Outbox {
    fn run_plan(
        &mut self,
        conn: &Connection,
        limit: usize,
        now: Timestamp,
    ) -> rusqlite::Result<PlanRun> {
        let due: Option<RunningPlan> = conn
            .prepare_cached(&format!(
                "{PLAN} WHERE p.state = 'running' ORDER BY p.next_at LIMIT 1"
            ))?
            .query_row([], read)
            .optional()?;
        let Some(mut plan) = due else { return Ok(PlanRun::Idle) };
        if plan.next_at > micros(now) {
            return Ok(PlanRun::NotBefore(timestamp(plan.next_at)));
        }
        if plan.is_orphaned {
            conn.prepare_cached(
                "UPDATE hapax_plan SET state = 'cancelled', ended_at = ?2 WHERE plan = ?1",
            )?
            .execute((plan.number, micros(now)))?;
            return Ok(PlanRun::Ran(plan.plan.id));
        }
        let (count, wait) = plan_slice(plan.plan.rate, limit);
        let is_over = match plan.plan.work.which {
            PlannedDeliveries::Dead => self.send_dead(conn, &mut plan, count, now)?,
            PlannedDeliveries::All => self.send_all(conn, &mut plan, count, now)?,
            PlannedDeliveries::Missing => {
                self.send_missing(conn, &mut plan, count, limit.max(1), now)?
            }
        };
        self.woken = true;
        let wait = i64::try_from(wait.as_micros()).unwrap_or(i64::MAX);
        let next_at = plan.next_at.max(micros(now).saturating_sub(1_000_000)).saturating_add(wait);
        conn.prepare_cached(
            "UPDATE hapax_plan SET passed_at = ?2, passed = ?3, done = ?4, skipped = ?5, next_at = ?6,
                 state = iif(?7, 'done', 'running'), ended_at = iif(?7, ?8, NULL)
             WHERE plan = ?1",
        )?
        .execute((
            plan.number,
            plan.passed_at,
            plan.passed,
            plan.plan.done as i64,
            plan.plan.skipped as i64,
            next_at,
            is_over,
            micros(now),
        ))?;
        Ok(PlanRun::Ran(plan.plan.id))
    }

    fn send_dead(
        &mut self,
        conn: &Connection,
        plan: &mut RunningPlan,
        count: usize,
        now: Timestamp,
    ) -> rusqlite::Result<bool> {
        let rows: Vec<DeliveryRow> = conn
            .prepare_cached(&format!(
                "SELECT {COLUMNS} FROM hapax_delivery d INDEXED BY hapax_delivery_died
                 WHERE d.endpoint = ?1 AND d.state = 3 /* dead */ AND d.due_at >= ?2 AND d.due_at < ?3
                   AND (d.due_at, d.message_seq) > (?4, ?5)
                 ORDER BY d.due_at, d.message_seq LIMIT ?6"
            ))?
            .query_map(
                (
                    plan.endpoint,
                    plan.span.since,
                    plan.span.until,
                    plan.passed_at,
                    plan.passed,
                    count as i64,
                ),
                DeliveryRow::read,
            )?
            .collect::<rusqlite::Result<_>>()?;
        for row in &rows {
            (plan.passed_at, plan.passed) = (row.due_at, row.seq);
            self.send_planned(conn, plan, row, now)?;
        }
        Ok(rows.len() < count)
    }

    fn send_all(
        &mut self,
        conn: &Connection,
        plan: &mut RunningPlan,
        count: usize,
        now: Timestamp,
    ) -> rusqlite::Result<bool> {
        let rows: Vec<(DeliveryRow, i64)> = conn
            .prepare_cached(&format!(
                "SELECT {COLUMNS}, m.created_at
                 FROM hapax_delivery d INDEXED BY hapax_delivery_to
                 CROSS JOIN hapax_message m ON m.seq = d.message_seq
                 WHERE d.endpoint = ?1 AND d.message_seq > ?2 AND d.message_seq <= ?3
                 ORDER BY d.message_seq LIMIT ?4"
            ))?
            .query_map((plan.endpoint, plan.passed, plan.span.last, count as i64), |row| {
                Ok((DeliveryRow::read(row)?, row.get("created_at")?))
            })?
            .collect::<rusqlite::Result<_>>()?;
        for (row, created_at) in &rows {
            plan.passed = row.seq;
            if plan.span.holds(*created_at) {
                self.send_planned(conn, plan, row, now)?;
            }
        }
        Ok(rows.len() < count)
    }

    fn send_planned(
        &mut self,
        conn: &Connection,
        plan: &mut RunningPlan,
        row: &DeliveryRow,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        let replay = self.replay_of(row);
        match self.act(conn, row, &replay, Reported::default(), now)? {
            Ok(_) => {
                plan.plan.done += 1;
                note_action(conn, Some(row.endpoint), Some(row.seq), "replay", &plan.action())
            }
            Err(DeliveryUnchanged::AlreadyOpen) => {
                plan.plan.skipped += 1;
                Ok(())
            }
            Err(unchanged) => unreachable!("a replay is refused only if it is open: {unchanged:?}"),
        }
    }

    /// Writes deliveries that were never written, at most `count`, and looks at no more than `limit` messages.
    fn send_missing(
        &mut self,
        conn: &Connection,
        plan: &mut RunningPlan,
        count: usize,
        limit: usize,
        now: Timestamp,
    ) -> rusqlite::Result<bool> {
        let candidates = candidates(conn, plan.passed, plan.span.last, limit)?;
        let (looked, mut written) = (candidates.len(), 0);
        for candidate in candidates {
            if written == count {
                return Ok(false);
            }
            plan.passed = candidate.seq;
            if !plan.span.holds(candidate.created_at) || !self.lacks(conn, plan, &candidate)? {
                continue;
            }
            let first_wait = self.endpoints[&plan.endpoint].policy.retry.first().copied();
            let wait = jittered(first_wait.unwrap_or_default(), self.dice.roll());
            let wait = i64::try_from(wait.as_micros()).unwrap_or(i64::MAX);
            let due = micros(now).saturating_add(wait);
            let key = candidate.message.key.as_deref();
            let place = key.map(|_| self.last_place(conn)).transpose()?;
            conn.prepare_cached(
                "INSERT INTO hapax_delivery (message_seq, endpoint, state, due_at, wait, key, place)
                 VALUES (?1, ?2, 0, ?3, ?4, ?5, ?6)",
            )?
            .execute((candidate.seq, plan.endpoint, due, wait, key, place))?;
            self.stir(plan.endpoint, due);
            let (endpoint, seq) = (Some(plan.endpoint), Some(candidate.seq));
            note_action(conn, endpoint, seq, "backfill", &plan.action())?;
            plan.plan.done += 1;
            written += 1;
        }
        Ok(looked < limit)
    }

    /// Whether the endpoint of a plan wants this message and has no delivery of it.
    fn lacks(
        &self,
        conn: &Connection,
        plan: &RunningPlan,
        candidate: &Candidate,
    ) -> rusqlite::Result<bool> {
        let Some(endpoint) = self.endpoints.get(&plan.endpoint) else { return Ok(false) };
        let wanted = endpoint.record.tenant.as_str() == candidate.tenant
            && endpoint.record.settings.wants(&candidate.message);
        Ok(wanted && DeliveryRow::find(conn, candidate.seq, plan.endpoint)?.is_none())
    }
}

impl RunningPlan {
    fn action(&self) -> Action {
        let Plan { who, reason, created_at, .. } = &self.plan;
        Action { who: who.clone(), reason: reason.clone(), at: *created_at }
    }
}

/// A message that an endpoint may lack.
struct Candidate {
    seq: i64,
    tenant: String,
    created_at: i64,
    /// With the type, the version and the key, and no data.
    message: NewMessage,
}

/// Whole messages after this number, from old to new.
fn candidates(
    conn: &Connection,
    passed: i64,
    last: i64,
    limit: usize,
) -> rusqlite::Result<Vec<Candidate>> {
    conn.prepare_cached(
        "SELECT m.seq, m.tenant, m.created_at, m.type, m.api_version, m.key
         FROM hapax_message m CROSS JOIN hapax_message_body b ON b.seq = m.seq
         WHERE m.seq > ?1 AND m.seq <= ?2 ORDER BY m.seq LIMIT ?3",
    )?
    .query_map((passed, last, limit as i64), |row| {
        let message = NewMessage::new(row.get::<_, String>(3)?, serde_json::Value::Null);
        Ok(Candidate {
            seq: row.get(0)?,
            tenant: row.get(1)?,
            created_at: row.get(2)?,
            message: NewMessage { api_version: row.get(4)?, key: row.get(5)?, ..message },
        })
    })?
    .collect()
}

/// The number of an endpoint that is not deleted.
fn number_of(conn: &Connection, id: EndpointId) -> rusqlite::Result<Option<i64>> {
    conn.prepare_cached("SELECT endpoint FROM hapax_endpoint WHERE id = ?1 AND deleted_at IS NULL")?
        .query_row([id.0.as_bytes()], |row| row.get(0))
        .optional()
}

fn create(
    conn: &Connection,
    plan: &NewPlan,
    by: &Action,
    now: Timestamp,
) -> rusqlite::Result<PlanCreated> {
    let NewPlan { id, work, rate } = plan;
    if let Some(known) = find(conn, *id)? {
        return Ok(PlanCreated::Created(Box::new(known)));
    }
    let Some(number) = number_of(conn, work.endpoint)? else {
        return Ok(PlanCreated::UnknownEndpoint);
    };
    let until = work.until.map_or(now, |until| until.min(now));
    let span = Span::of(conn, work, until)?;
    let total = count(conn, number, work.which, &span)?;
    conn.prepare_cached(
        "INSERT INTO hapax_plan (id, endpoint, which, since_at, until_at, asked_until, rate, total, next_at,
             passed_at, passed, last_message, who, reason, created_at)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?9)",
    )?
    .execute(rusqlite::params![
        id.0.as_bytes(),
        number,
        work.which.as_str(),
        span.since,
        span.until,
        work.until.map(micros),
        rate.map(|rate| rate.max(1)),
        total as i64,
        micros(now),
        i64::MIN,
        span.first - 1,
        span.last,
        by.who,
        by.reason,
    ])?;
    let created = find(conn, *id)?.expect("a plan that was just written");
    Ok(PlanCreated::Created(Box::new(created)))
}

fn count(
    conn: &Connection,
    number: i64,
    which: PlannedDeliveries,
    span: &Span,
) -> rusqlite::Result<u64> {
    let counted = |sql: &str| -> rusqlite::Result<u64> {
        conn.prepare_cached(sql)?
            .query_row((number, span.since, span.until, span.first, span.last), |row| {
                row.get::<_, i64>(0).map(i64::unsigned_abs)
            })
    };
    match which {
        PlannedDeliveries::Dead => counted(
            "SELECT count(*) FROM hapax_delivery INDEXED BY hapax_delivery_died
             WHERE endpoint = ?1 AND state = 3 /* dead */ AND due_at >= ?2 AND due_at < ?3
               AND ?4 IS NOT NULL AND ?5 IS NOT NULL",
        ),
        PlannedDeliveries::All => counted(
            "SELECT count(*) FROM hapax_delivery d INDEXED BY hapax_delivery_to
             CROSS JOIN hapax_message m ON m.seq = d.message_seq
             WHERE d.endpoint = ?1 AND d.message_seq BETWEEN ?4 AND ?5
               AND m.created_at >= ?2 AND m.created_at < ?3",
        ),
        PlannedDeliveries::Missing => count_missing(conn, number, span),
    }
}

/// Messages that an endpoint wants and has no delivery of. What an endpoint wants is decided here, so the
/// messages are read in parts.
fn count_missing(conn: &Connection, number: i64, span: &Span) -> rusqlite::Result<u64> {
    const PART: usize = 10_000;
    let sql = format!("SELECT {} FROM hapax_endpoint WHERE endpoint = ?1", endpoints::COLUMNS);
    let (_, endpoint) = conn.prepare_cached(&sql)?.query_row([number], endpoints::read)?;
    let (mut passed, mut missing) = (span.first - 1, 0);
    loop {
        let part = candidates(conn, passed, span.last, PART)?;
        let Some(last) = part.last() else { return Ok(missing) };
        passed = last.seq;
        for candidate in &part {
            let wanted = span.holds(candidate.created_at)
                && endpoint.tenant.as_str() == candidate.tenant
                && endpoint.settings.wants(&candidate.message);
            let lacks = wanted && DeliveryRow::find(conn, candidate.seq, number)?.is_none();
            missing += u64::from(lacks);
        }
    }
}

fn find(conn: &Connection, id: PlanId) -> rusqlite::Result<Option<Plan>> {
    let found = conn
        .prepare_cached(&format!("{PLAN} WHERE p.id = ?1"))?
        .query_row([id.0.as_bytes()], read)
        .optional()?;
    Ok(found.map(|found| found.plan))
}

fn read(row: &Row<'_>) -> rusqlite::Result<RunningPlan> {
    let count = |at: usize| row.get::<_, i64>(at).map(i64::unsigned_abs);
    let moment = |at: usize| -> rusqlite::Result<Option<Timestamp>> {
        Ok(row.get::<_, Option<i64>>(at)?.map(timestamp))
    };
    let which: String = row.get(3)?;
    let which = PlannedDeliveries::parse(&which).ok_or_else(|| {
        rusqlite::Error::FromSqlConversionFailure(3, Type::Text, "an unknown kind of plan".into())
    })?;
    let plan = Plan {
        id: PlanId(Uuid::from_bytes(row.get(1)?)),
        work: DeliveryPlan {
            endpoint: EndpointId(Uuid::from_bytes(row.get(2)?)),
            which,
            since: timestamp(row.get(4)?),
            until: moment(5)?,
        },
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
        endpoint: row.get(15)?,
        is_orphaned: row.get(21)?,
        next_at: row.get(17)?,
        passed_at: row.get(18)?,
        passed: row.get(19)?,
        span: Span {
            since: row.get(4)?,
            until: row.get(16)?,
            first: row.get::<_, i64>(19)? + 1,
            last: row.get(20)?,
        },
    })
}
