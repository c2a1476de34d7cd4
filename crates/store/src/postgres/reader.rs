//! Queries of operators. Each read is a few short statements; none waits for a writer.

use bytes::Bytes;
use hapax_core::job::{Fence, HandlerName, JobId, Phase, Progress, idempotency_key};
use hapax_core::store::{
    ActionNote, ArrivalNote, AttemptNote, Cause, Decision, EventDetail, EventFilter, EventId,
    EventName, EventSummary, HandlerAnswer, JobDetail, Lookup, MessageNote, Status, StoreError,
};
use hapax_core::{EventKey, SourceName, Tenant, Timestamp};
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::Shared;
use super::connect::{PgError, PooledClient};
use super::outbox;
use super::row::{EventState, first_id, of_hash, past, phase_of};
use super::search_index::finds_exactly;
use super::verifiers;
use crate::limits::COPIES_IN_FULL;

/// An event with its status over all jobs.
pub(super) const SUMMARY: &str = "SELECT e.id, e.event_id, e.tenant, e.source, e.event_type, e.occurred_at, \
     e.received_at, e.state, e.review, \
     coalesce(c.only_counted, 0) \
         + (SELECT count(*) FROM hapax.arrival a WHERE a.event = e.id), c.conflicts, j.rank, j.ended_at, j.result, \
     e.request_id, e.remote, e.secret, e.signed_at \
     FROM hapax.body w JOIN hapax.event e ON e.id = w.id LEFT JOIN hapax.copy c ON c.event = e.id \
     LEFT JOIN LATERAL (SELECT min(hapax.rank(j.state, j.steps)) AS rank, \
         max(j.due_at) AS ended_at, \
         (array_agg(j.result ORDER BY j.job) FILTER (WHERE j.result IS NOT NULL))[1] AS result \
         FROM hapax.job j WHERE j.job >= e.id AND j.job <= hapax.last_job(e.id)) j ON true";

/// The condition for an event that has not ended.
const UNFINISHED: &str = "(e.state = hapax.event_state('review') \
         OR e.state = hapax.event_state('open') \
            AND hapax.status(j.rank) NOT IN ('discarded', 'processed', 'stale', 'ignored'))";

/// Conditions with their values.
#[derive(Default)]
pub(super) struct Conditions {
    said: Vec<String>,
    values: Vec<Box<dyn ToSql + Send + Sync>>,
}

impl Conditions {
    /// Adds a condition, in which `?` stands for the value.
    pub(super) fn add(&mut self, condition: &str, value: impl ToSql + Send + Sync + 'static) {
        self.values.push(Box::new(value));
        self.said.push(condition.replace('?', &format!("${}", self.values.len())));
    }

    /// Adds a value for a condition that is added later. Returns the parameter's name, such as
    /// `$3`.
    pub(super) fn bind(&mut self, value: impl ToSql + Send + Sync + 'static) -> String {
        self.values.push(Box::new(value));
        format!("${}", self.values.len())
    }

    pub(super) fn require(&mut self, condition: impl Into<String>) {
        self.said.push(condition.into());
    }

    /// Removes all conditions and keeps their values, which another part of the statement uses.
    pub(super) fn forget_said(&mut self) {
        self.said.clear();
    }

    /// A statement with these conditions, to be used inside another statement.
    pub(super) fn subquery(&self, head: &str) -> String {
        let said = if self.said.is_empty() { "true" } else { &self.said.join(" AND ") };
        format!("{head} WHERE {said}")
    }

    pub(super) async fn query(
        &self,
        client: &mut PooledClient,
        head: &str,
        tail: &str,
    ) -> Result<Vec<Row>, PgError> {
        let sql = format!("{} {tail}", self.subquery(head));
        let values: Vec<&(dyn ToSql + Sync)> =
            self.values.iter().map(|value| &**value as &(dyn ToSql + Sync)).collect();
        client.query(&sql, &values).await
    }
}

/// Adds the conditions of a filter, except those on its status and its position.
pub(super) fn filtered(asked: &mut Conditions, filter: &EventFilter) {
    if let Some(tenant) = &filter.tenant {
        asked.add("e.tenant = ?", tenant.to_string());
    }
    if let Some(source) = &filter.source {
        // No index of sources may be used here: the rows are known already, and are only checked.
        asked.add("e.source || '' = ?", source.to_string());
    }
    if let Some(event_type) = &filter.event_type {
        asked.add("e.event_type = ?", event_type.clone().into_bytes());
    }
    if let Some(since) = filter.since {
        // The id begins with the time, so the index finds it; the column decides exactly.
        asked.add("w.id >= ?", first_id(since));
        asked.add("e.received_at >= ?", since);
    }
    if let Some(until) = filter.until {
        asked.add("w.id < ?", past(until));
        asked.add("e.received_at < ?", until);
    }
    if let Some(since) = filter.unfinished_since {
        asked.add("w.id < ?", past(since));
        asked.add("e.received_at < ?", since);
        asked.require(UNFINISHED);
    }
    if filter.has_copies {
        asked.require(
            "(c.event IS NOT NULL OR EXISTS (SELECT FROM hapax.arrival a WHERE a.event = e.id))",
        );
    }
    if let Some(search) = &filter.text {
        let exactly = match search.is_exact() {
            true => finds_exactly(asked, search),
            false => "false".to_owned(),
        };
        let may_read = match &search.sources {
            None => "true".to_owned(),
            Some(sources) => {
                let names: Vec<String> = sources.iter().map(ToString::to_string).collect();
                format!("e.source || '' = ANY ({})", asked.bind(names))
            }
        };
        let needle = asked.bind(search.text.clone().into_bytes());
        asked.require(format!(
            "({exactly} OR position({needle} IN e.event_id) > 0 \
              OR {may_read} AND EXISTS (SELECT FROM hapax.body b \
                                        WHERE b.id = e.id AND position({needle} IN b.body) > 0))"
        ));
    }
}

/// The condition for a status.
pub(super) fn status_condition(status: Status) -> String {
    let word = status.as_str();
    let open = format!("e.state = hapax.event_state('open') AND hapax.status(j.rank) = '{word}'");
    match status {
        Status::Review | Status::Discarded => {
            format!("(e.state = hapax.event_state('{word}') OR {open})")
        }
        Status::Dead
        | Status::Failed
        | Status::Held
        | Status::Processing
        | Status::Received
        | Status::Processed
        | Status::Stale
        | Status::Ignored => open,
    }
}

/// The event with this name, with all its data.
pub(super) async fn event(
    shared: &Shared,
    name: EventName,
) -> Result<Lookup<EventDetail>, StoreError> {
    let mut client = shared.pools.admin.checkout().await.map_err(read)?;
    let mut asked = Conditions::default();
    match name {
        EventName::Ours(id) => asked.add("e.id = ?", id.0),
        EventName::Theirs(event_id) => {
            let sql = "SELECT tenant, source FROM hapax.pair";
            let pairs = client.query(sql, &[]).await.map_err(read)?;
            let hash = |row: &Row| {
                let (tenant, source) = (Tenant::new(text(row, 0)), SourceName::new(text(row, 1)));
                of_hash(EventKey { tenant, source, event_id: event_id.clone() }.hash())
            };
            let hashes: Vec<Uuid> = pairs.iter().map(hash).collect();
            asked.add("e.hash = ANY (?)", hashes);
        }
    }
    let rows = asked.query(&mut client, SUMMARY, "ORDER BY e.id").await.map_err(read)?;
    match &rows[..] {
        [] => Ok(Lookup::None),
        [row] => Ok(match detail(&mut client, row).await.map_err(read)? {
            Some(detail) => Lookup::One(detail),
            None => Lookup::None,
        }),
        several => Ok(Lookup::Ambiguous(several.iter().map(|row| EventId(row.get(0))).collect())),
    }
}

/// All data of an event; `None` if it was pruned after its row was read.
async fn detail(client: &mut PooledClient, row: &Row) -> Result<Option<EventDetail>, PgError> {
    let summary = summary(row);
    let id = summary.id;
    let number: i32 = row.get(16);
    let sql = "SELECT b.headers, b.body, v.scheme, v.secret FROM hapax.body b \
               LEFT JOIN hapax.verifier v ON v.number = $2 WHERE b.id = $1";
    let bodies = client.query(sql, &[&id.0, &number]).await?;
    let Some(body) = bodies.first() else { return Ok(None) };
    let first = ArrivalNote {
        decision: if summary.review.is_some() { Decision::Review } else { Decision::Accepted },
        received_at: summary.received_at,
        request_id: row.get(14),
        remote: row.get(15),
        secret: usize::try_from(number).unwrap_or(0),
        verifier: verifiers::read(body, 2),
        signed_at: row.get(17),
        body: None,
    };
    let others = client
        .query(
            "SELECT a.received_at, a.request_id, a.conflict, a.remote, a.secret, a.signed_at, a.body, \
                    v.scheme, v.secret \
             FROM hapax.arrival a LEFT JOIN hapax.verifier v ON v.number = a.secret \
             WHERE a.event = $1 ORDER BY a.received_at, a.request_id",
            &[&id.0],
        )
        .await?;
    // The table may hold a few more plain copies than the newest, which are not shown.
    let plain = others.iter().filter(|row| !row.get::<_, bool>(2)).count();
    let mut older = plain.saturating_sub(COPIES_IN_FULL);
    let mut is_shown = |row: &&Row| {
        let is_old = !row.get::<_, bool>(2) && older > 0;
        older -= usize::from(is_old);
        !is_old
    };
    let others = others.iter().filter(|row| is_shown(row)).map(arrival);
    let arrivals = std::iter::once(first).chain(others).collect();
    let mut asked = Conditions::default();
    asked.add("j.job >= ?", id.0);
    asked.add("j.job <= hapax.last_job(?)", id.0);
    let jobs = read_jobs(client, &asked, "ORDER BY j.job").await?;
    let actions = client
        .query(
            "SELECT what, who, reason, at FROM hapax.action WHERE event = $1 ORDER BY action",
            &[&id.0],
        )
        .await?;
    let messages = client
        .query(
            "SELECT m.id, m.tenant, m.type, m.created_at, s.rank FROM hapax.message m \
             CROSS JOIN LATERAL ( \
                 SELECT min(hapax.delivery_rank(d.state, d.steps, \
                     e.disabled_at IS NOT NULL OR e.failing IS NOT NULL, e.deleted_at IS NOT NULL)) AS rank \
                 FROM hapax.delivery d JOIN hapax.endpoint e ON e.endpoint = d.endpoint \
                 WHERE d.message = m.message) s \
             WHERE m.event = $1 AND m.body IS NOT NULL ORDER BY m.message",
            &[&id.0],
        )
        .await?;
    let action = |row: &Row| ActionNote {
        action: row.get(0),
        who: row.get(1),
        reason: row.get(2),
        at: row.get(3),
    };
    let message = |row: &Row| MessageNote {
        id: row.get(0),
        tenant: row.get(1),
        r#type: row.get(2),
        created_at: row.get(3),
        status: outbox::ranked(row.get(4)),
    };
    Ok(Some(EventDetail {
        summary,
        arrivals,
        headers: lossy(body.get(0)),
        body: Bytes::copy_from_slice(body.get(1)),
        jobs,
        actions: actions.iter().map(action).collect(),
        messages: messages.iter().map(message).collect(),
    }))
}

/// One job.
pub(super) async fn job(shared: &Shared, id: JobId) -> Result<Option<JobDetail>, StoreError> {
    let mut asked = Conditions::default();
    asked.add("j.job = ?", id.0);
    let mut client = shared.pools.admin.checkout().await.map_err(read)?;
    Ok(read_jobs(&mut client, &asked, "").await.map_err(read)?.pop())
}

pub(super) async fn read_jobs(
    client: &mut PooledClient,
    asked: &Conditions,
    tail: &str,
) -> Result<Vec<JobDetail>, PgError> {
    let head = "SELECT j.job, j.state, j.due_at, j.fence, j.run, j.attempt, j.steps, j.lost, \
                j.resource, j.started_at, j.worker, j.result, j.error, e.id, e.event_id, \
                e.tenant, e.source, h.name, j.answer_status, j.answer \
                FROM hapax.job j JOIN hapax.event e ON e.id = j.event \
                JOIN hapax.handler h ON h.handler = j.handler";
    let rows = asked.query(client, head, tail).await?;
    let ids: Vec<Uuid> = rows.iter().map(|row| row.get(0)).collect();
    let notes = client
        .query(
            "SELECT job, run, attempt, started_at, ended_at, outcome, error, worker, answer_status, \
             answer \
             FROM hapax.attempt WHERE job = ANY ($1) ORDER BY job, run, attempt",
            &[&ids],
        )
        .await?;
    let mut jobs: Vec<JobDetail> = rows.iter().map(job_row).collect();
    for job in &mut jobs {
        // The successful attempt is in the job itself, and `job_row` has added it.
        let done = std::mem::take(&mut job.attempts);
        let of_job = notes.iter().filter(|row| row.get::<_, Uuid>(0) == job.id.0);
        job.attempts = of_job.map(attempt).chain(done).collect();
    }
    Ok(jobs)
}

fn job_row(row: &Row) -> JobDetail {
    let phase = phase_of(row.get::<_, i16>(1).into());
    let at: Timestamp = row.get(2);
    let (run, attempt) = (count(row, 4), count(row, 5));
    let started: Option<Timestamp> = row.get(9);
    let event = EventId(row.get(13));
    let handler = HandlerName::new(text(row, 17));
    let done = started.filter(|_| phase == Phase::Done).map(|started_at| AttemptNote {
        run,
        attempt,
        started_at,
        ended_at: Some(at),
        outcome: "done".to_owned(),
        error: None,
        worker: row.get::<_, Option<String>>(10).unwrap_or_default(),
        answer: answer_of(row, 18),
    });
    JobDetail {
        id: JobId(row.get(0)),
        event,
        event_id: lossy(row.get(14)),
        tenant: row.get(15),
        source: row.get(16),
        phase,
        run,
        progress: Progress { attempt, steps: count(row, 6), lost: count(row, 7) },
        fence: Fence(row.get(3)),
        due_at: phase.is_open().then_some(at),
        result: row.get(11),
        error: row.get(12),
        finished_at: (!phase.is_open() && phase != Phase::Review).then_some(at),
        idempotency_key: idempotency_key(event, &handler, run),
        handler,
        resource: row.get(8),
        attempts: done.into_iter().collect(),
    }
}

/// An answer, from its two columns.
fn answer_of(row: &Row, at: usize) -> Option<HandlerAnswer> {
    let status: i32 = row.get::<_, Option<i32>>(at)?;
    let body = row.get::<_, Option<String>>(at + 1).unwrap_or_default();
    Some(HandlerAnswer { status: u16::try_from(status).unwrap_or_default(), body })
}

fn attempt(row: &Row) -> AttemptNote {
    AttemptNote {
        run: count(row, 1),
        attempt: count(row, 2),
        started_at: row.get(3),
        ended_at: row.get(4),
        outcome: row.get(5),
        error: row.get(6),
        worker: row.get(7),
        answer: answer_of(row, 8),
    }
}

fn arrival(row: &Row) -> ArrivalNote {
    let conflict: bool = row.get(2);
    ArrivalNote {
        decision: if conflict { Decision::Conflict } else { Decision::Duplicate },
        received_at: row.get(0),
        request_id: row.get(1),
        remote: row.get(3),
        secret: usize::try_from(row.get::<_, i32>(4)).unwrap_or(0),
        verifier: verifiers::read(row, 7),
        signed_at: row.get(5),
        body: row.get::<_, Option<&[u8]>>(6).map(Bytes::copy_from_slice),
    }
}

pub(super) fn summary(row: &Row) -> EventSummary {
    let event_state = EventState::new(row.get(7), row.get(8), None, row.get(11));
    let copies: Option<i64> = row.get(9);
    let conflicts: Option<i64> = row.get(10);
    let ended: Option<Timestamp> = row.get(12);
    EventSummary {
        id: EventId(row.get(0)),
        event_id: lossy(row.get(1)),
        tenant: row.get(2),
        source: row.get(3),
        event_type: row.get::<_, Option<&[u8]>>(4).map(lossy),
        occurred_at: row.get(5),
        received_at: row.get(6),
        status: event_state.status,
        review: event_state.review,
        arrivals: 1 + copies.unwrap_or(0).unsigned_abs(),
        conflicts: conflicts.unwrap_or(0).unsigned_abs(),
        processed_at: ended.filter(|_| event_state.status.is_final()),
        result: row.get(13),
    }
}

/// The sender's text, which was validated on arrival.
pub(super) fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn text(row: &Row, column: usize) -> &str {
    row.get(column)
}

fn count(row: &Row, column: usize) -> u32 {
    u32::try_from(row.get::<_, i32>(column)).unwrap_or(0)
}

pub(super) fn read(error: PgError) -> StoreError {
    match error {
        PgError::Closed => StoreError::Closed,
        other => StoreError::Read(Cause::new(other)),
    }
}
