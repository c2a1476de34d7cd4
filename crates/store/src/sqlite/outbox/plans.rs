//! Slices of plans over the deliveries of an endpoint. [`crate::sqlite::plans`] has the rows of plans.

use hapax_core::Timestamp;
use hapax_core::delivery::DeliveryUnchanged;
use hapax_core::endpoint::EndpointId;
use hapax_core::job::jittered;
use hapax_core::store::{NewMessage, PlannedDeliveries, plan_slice};
use rusqlite::{Connection, OptionalExtension};

use super::change::Reported;
use super::endpoints::note_action;
use super::row::{COLUMNS, DeliveryRow};
use super::{Outbox, endpoints};
use crate::sqlite::plans::{PlanBounds, RunningPlan};
use crate::sqlite::row::micros;

/// Messages that one query of a count reads.
const COUNT_PART: usize = 10_000;

impl Outbox {
    /// Runs a slice of a plan, and records its place and its counts.
    pub(in crate::sqlite) fn run_slice(
        &mut self,
        conn: &Connection,
        plan: &mut RunningPlan,
        which: PlannedDeliveries,
        limit: usize,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        let (count, wait) = plan_slice(plan.plan.rate, limit);
        let is_over = match which {
            PlannedDeliveries::Dead => self.send_dead(conn, plan, count, now)?,
            PlannedDeliveries::All => self.send_all(conn, plan, count, now)?,
            PlannedDeliveries::Missing => {
                self.send_missing(conn, plan, count, limit.max(1), now)?
            }
        };
        self.woken = true;
        plan.advance(conn, wait, is_over, now)
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

    /// Writes deliveries that were never written, at most `count`, and reads no more than `limit`
    /// messages.
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
            self.note_due(plan.endpoint, due);
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
        candidate: &BackfillCandidate,
    ) -> rusqlite::Result<bool> {
        let Some(endpoint) = self.endpoints.get(&plan.endpoint) else { return Ok(false) };
        let wanted = endpoint.record.tenant.as_str() == candidate.tenant
            && endpoint.record.settings.wants(&candidate.message);
        Ok(wanted && DeliveryRow::find(conn, candidate.seq, plan.endpoint)?.is_none())
    }
}

/// A message that may have no delivery for an endpoint.
struct BackfillCandidate {
    seq: i64,
    tenant: String,
    created_at: i64,
    /// The message without its data: only type, version and key are set.
    message: NewMessage,
}

/// Whole messages after this number, from old to new.
fn candidates(
    conn: &Connection,
    passed: i64,
    last: i64,
    limit: usize,
) -> rusqlite::Result<Vec<BackfillCandidate>> {
    conn.prepare_cached(
        "SELECT m.seq, m.tenant, m.created_at, m.type, m.api_version, m.key
         FROM hapax_message m CROSS JOIN hapax_message_body b ON b.seq = m.seq
         WHERE m.seq > ?1 AND m.seq <= ?2 ORDER BY m.seq LIMIT ?3",
    )?
    .query_map((passed, last, limit as i64), |row| {
        let message = NewMessage::new(row.get::<_, String>(3)?, serde_json::Value::Null);
        Ok(BackfillCandidate {
            seq: row.get(0)?,
            tenant: row.get(1)?,
            created_at: row.get(2)?,
            message: NewMessage { api_version: row.get(4)?, key: row.get(5)?, ..message },
        })
    })?
    .collect()
}

/// The number of an endpoint that is not deleted.
pub(in crate::sqlite) fn endpoint_number(
    conn: &Connection,
    id: EndpointId,
) -> rusqlite::Result<Option<i64>> {
    conn.prepare_cached("SELECT endpoint FROM hapax_endpoint WHERE id = ?1 AND deleted_at IS NULL")?
        .query_row([id.0.as_bytes()], |row| row.get(0))
        .optional()
}

/// How many deliveries a plan would take. `None` for those that were never written: see [`MissingScan`].
pub(in crate::sqlite) fn count_deliveries(
    conn: &Connection,
    number: i64,
    which: PlannedDeliveries,
    span: &PlanBounds,
) -> rusqlite::Result<Option<u64>> {
    let counted = |sql: &str| -> rusqlite::Result<Option<u64>> {
        conn.prepare_cached(sql)?
            .query_row((number, span.since, span.until, span.first, span.last), |row| {
                row.get::<_, i64>(0).map(|count| Some(count.unsigned_abs()))
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
        PlannedDeliveries::Missing => Ok(None),
    }
}

/// A count of the messages that an endpoint wants and has no delivery of. SQL cannot decide whether
/// an endpoint wants a message, so the messages are read in parts and decided here.
#[derive(Debug, Clone, Copy)]
pub(in crate::sqlite) struct MissingScan {
    passed: i64,
    pub(in crate::sqlite) missing: u64,
    pub(in crate::sqlite) is_over: bool,
}

impl MissingScan {
    pub(in crate::sqlite) fn of(span: &PlanBounds) -> Self {
        Self { passed: span.first - 1, missing: 0, is_over: false }
    }

    /// Counts the next part.
    pub(in crate::sqlite) fn count_part(
        mut self,
        conn: &Connection,
        number: i64,
        span: &PlanBounds,
    ) -> rusqlite::Result<Self> {
        let sql = format!("SELECT {} FROM hapax_endpoint WHERE endpoint = ?1", endpoints::COLUMNS);
        let (_, endpoint) = conn.prepare_cached(&sql)?.query_row([number], endpoints::read)?;
        let part = candidates(conn, self.passed, span.last, COUNT_PART)?;
        self.is_over = part.len() < COUNT_PART;
        for candidate in &part {
            self.passed = candidate.seq;
            let wanted = span.holds(candidate.created_at)
                && endpoint.tenant.as_str() == candidate.tenant
                && endpoint.settings.wants(&candidate.message);
            let lacks = wanted && DeliveryRow::find(conn, candidate.seq, number)?.is_none();
            self.missing += u64::from(lacks);
        }
        Ok(self)
    }
}
