//! Queries of operators, which [`super::reader_threads`] runs: single events and jobs, and the rows of lists.

use bytes::Bytes;
use hapax_core::job::{Fence, HandlerName, JobId, Phase, Progress, idempotency_key};
use hapax_core::limits::{REQUEST_TIME_MAX, TRACED_EVENTS_MAX};
use hapax_core::store::{
    ActionNote, ArrivalNote, AttemptNote, Decision, EventDetail, EventFilter, EventId, EventName,
    EventSummary, JobDetail, Lookup, Status,
};
use hapax_core::{SourceName, Tenant};
use rusqlite::types::Value;
use rusqlite::{Connection, OptionalExtension, Row, params_from_iter};
use uuid::Uuid;

use super::jobs::{answer_of, job_id, row_and_lane};
use super::lists::Numbered;
use super::outbox;
use super::row::{EventState, LANE_BITS, event_id, micros, phase_of, ranked, timestamp};
use super::search_index;
use super::verifiers;
use crate::limits::{TRACE_ROWS_AFTER, TRACE_ROWS_BEFORE};
use crate::page_search::began_at;

/// Every (tenant, source) that ever had an event.
pub(super) fn pairs(conn: &Connection) -> rusqlite::Result<Vec<(Tenant, SourceName)>> {
    conn.prepare_cached("SELECT tenant, source FROM hapax_pair")?
        .query_map([], |row| {
            let tenant = Tenant::new(row.get_ref(0)?.as_str()?);
            Ok((tenant, SourceName::new(row.get_ref(1)?.as_str()?)))
        })?
        .collect()
}

/// The place of an event's status in the order of [`Status`], from its jobs; NULL without any.
macro_rules! rank {
    () => {
        "(SELECT min(CASE j.state WHEN 7 THEN 0 WHEN 8 THEN 1 WHEN 4 THEN 2 WHEN 5 THEN 4 WHEN 1 THEN 5 \
         WHEN 2 THEN 7 WHEN 3 THEN 8 ELSE CASE WHEN j.steps > 0 THEN 3 ELSE 6 END END) \
         FROM hapax_job j WHERE j.event_seq = e.seq)"
    };
}
pub(super) const RANK: &str = rank!();

pub(super) const SUMMARY: &str = concat!(
    "SELECT e.seq, e.id, e.event_id, p.tenant, p.source, b.event_type, \
     b.occurred_at, e.received_at, e.state, e.review, \
     coalesce(c.only_counted, 0) \
     + (SELECT count(*) FROM hapax_arrival a WHERE a.event_seq = e.seq), \
     coalesce(c.conflicts, 0), ",
    rank!(),
    ", (SELECT CASE WHEN min(j.state IN (2 /* done */, 3 /* stale */, 8 /* discarded */)) THEN max(j.due_at) END \
      FROM hapax_job j WHERE j.event_seq = e.seq), \
     (SELECT j.result FROM hapax_job j WHERE j.event_seq = e.seq AND j.result IS NOT NULL \
      ORDER BY j.lane LIMIT 1) \
     FROM hapax_event e JOIN hapax_body b ON b.seq = e.seq JOIN hapax_pair p ON p.pair = e.pair \
     LEFT JOIN hapax_copy c ON c.event_seq = e.seq"
);

pub(super) fn summary(row: &Row<'_>) -> rusqlite::Result<(i64, EventSummary)> {
    let event_state = EventState::from_columns(row.get(8)?, row.get(9)?);
    let copies: i64 = row.get(10)?;
    let conflicts: i64 = row.get(11)?;
    let status = match event_state.status() {
        Status::Ignored => ranked(row.get(12)?),
        waiting => waiting,
    };
    let ended: Option<i64> = row.get(13)?;
    let summary = EventSummary {
        id: event_id(row.get(1)?),
        event_id: row.get(2)?,
        tenant: row.get(3)?,
        source: row.get(4)?,
        event_type: row.get(5)?,
        occurred_at: row.get::<_, Option<i64>>(6)?.map(timestamp),
        received_at: timestamp(row.get(7)?),
        status,
        review: event_state.review,
        arrivals: 1 + copies.unsigned_abs(),
        conflicts: conflicts.unsigned_abs(),
        processed_at: ended.map(timestamp),
        result: row.get(14)?,
    };
    Ok((row.get(0)?, summary))
}

/// The conditions of a filter that compare one value each, every one beginning with AND, and their values.
pub(super) fn filtered(filter: &EventFilter) -> (String, Vec<Value>) {
    let text = |text: &str| Value::Text(text.to_owned());
    let (mut sql, mut values) = (String::new(), Vec::new());
    let compared = [
        ("p.tenant = ?", filter.tenant.as_ref().map(|tenant| text(tenant.as_str()))),
        ("p.source = ?", filter.source.as_ref().map(|source| text(source.as_str()))),
        ("b.event_type = ?", filter.event_type.as_deref().map(text)),
        ("e.received_at >= ?", filter.since.map(|at| Value::Integer(at.as_microsecond()))),
        ("e.received_at < ?", filter.until.map(|at| Value::Integer(at.as_microsecond()))),
    ];
    for (condition, value) in compared {
        if let Some(value) = value {
            sql.push_str(" AND ");
            sql.push_str(condition);
            values.push(value);
        }
    }
    if let Some(needle) = &filter.text {
        let (exactly, of_exactly) = search_index::finds_exactly(needle);
        let may_read = match &needle.sources {
            None => "1".to_owned(),
            Some(sources) => {
                let marks = vec!["?"; sources.len()].join(", ");
                format!("p.source IN ({marks})")
            }
        };
        sql.push_str(&format!(
            " AND ({exactly} OR instr(e.event_id, ?)
                   OR {may_read} AND instr(b.body, CAST(? AS BLOB)))"
        ));
        values.extend(of_exactly);
        values.push(text(&needle.text));
        let sources = needle.sources.iter().flatten();
        values.extend(sources.map(|source| text(source.as_str())));
        values.push(text(&needle.text));
    }
    (sql, values)
}

/// The events that arrived in a request with this id, or whose handlers published a message with
/// this id.
pub(super) fn traced_by(conn: &Connection, id: &str) -> rusqlite::Result<Vec<EventId>> {
    let mut found = Vec::new();
    let mut add = |sql: &str, values: &[&dyn rusqlite::ToSql]| -> rusqlite::Result<()> {
        let mut statement = conn.prepare_cached(sql)?;
        for id in statement.query_map(values, |row| row.get(0))? {
            found.push(event_id(id?));
        }
        Ok(())
    };
    let most = TRACED_EVENTS_MAX as i64;
    add(
        "SELECT e.id FROM hapax_message m JOIN hapax_event e ON e.seq = m.event_seq
         JOIN hapax_body b ON b.seq = e.seq WHERE m.id = ?1 LIMIT ?2",
        &[&id, &most],
    )?;
    let Ok(request) = id.parse::<Uuid>() else { return Ok(found) };
    let bytes = request.as_bytes().as_slice();
    add(
        "SELECT e.id FROM hapax_arrival a JOIN hapax_event e ON e.seq = a.event_seq
         JOIN hapax_body b ON b.seq = e.seq WHERE a.request_id = ?1 LIMIT ?2",
        &[&bytes, &most],
    )?;
    let Some(began) = began_at(request) else { return Ok(found) };
    let began_micros = micros(began);
    // The id holds the time at which the request began. Its events were received soon after.
    let first = Numbered::Events.since(conn, began)?.saturating_sub(TRACE_ROWS_BEFORE);
    let last = first + TRACE_ROWS_BEFORE + TRACE_ROWS_AFTER;
    let until = began_micros.saturating_add(REQUEST_TIME_MAX.as_micros() as i64);
    add(
        "SELECT e.id FROM hapax_event e CROSS JOIN hapax_body b ON b.seq = e.seq
         WHERE e.seq >= ?1 AND e.seq < ?2 AND e.received_at >= ?3 AND e.received_at < ?4
           AND b.request_id = ?5
         ORDER BY e.seq LIMIT ?6",
        &[&first, &last, &began_micros, &until, &bytes, &most],
    )?;
    found.sort_unstable();
    found.dedup();
    found.truncate(TRACED_EVENTS_MAX);
    Ok(found)
}

/// The event among `seqs` that has this name.
pub(super) fn event(
    conn: &Connection,
    name: &EventName,
    seqs: &[i64],
) -> rusqlite::Result<Lookup<EventDetail>> {
    let mut found = Vec::new();
    for seq in seqs {
        let row = conn
            .prepare_cached(&format!("{SUMMARY} WHERE e.seq = ?1"))?
            .query_row([seq], summary)
            .optional()?;
        let fits = |summary: &EventSummary| match name {
            EventName::Ours(id) => summary.id == *id,
            EventName::Theirs(event_id) => summary.event_id == **event_id,
        };
        found.extend(row.filter(|(_, summary)| fits(summary)));
    }
    if found.len() > 1 {
        return Ok(Lookup::Ambiguous(found.into_iter().map(|(_, summary)| summary.id).collect()));
    }
    match found.pop() {
        None => Ok(Lookup::None),
        Some((seq, summary)) => detail(conn, seq, summary).map(Lookup::One),
    }
}

fn detail(conn: &Connection, seq: i64, summary: EventSummary) -> rusqlite::Result<EventDetail> {
    let first_decision =
        if summary.review.is_some() { Decision::Review } else { Decision::Accepted };
    let (first, headers, body) = conn
        .prepare_cached(
            "SELECT e.received_at, b.request_id, 0, b.remote, b.secret, b.signed_at, NULL, v.scheme, \
             v.secret, b.headers, b.body FROM hapax_event e JOIN hapax_body b ON b.seq = e.seq \
             LEFT JOIN hapax_verifier v ON v.number = b.secret WHERE e.seq = ?1",
        )?
        .query_row([seq], |row| {
            let headers: String = row.get(9)?;
            let body: Vec<u8> = row.get(10)?;
            Ok((arrival(row, first_decision)?, headers, Bytes::from(body)))
        })?;
    let mut arrivals = vec![first];
    let mut others = conn.prepare_cached(
        "SELECT a.received_at, a.request_id, a.conflict, a.remote, a.secret, a.signed_at, a.body, \
         v.scheme, v.secret FROM hapax_arrival a LEFT JOIN hapax_verifier v ON v.number = a.secret \
         WHERE a.event_seq = ?1 ORDER BY a.received_at, a.request_id",
    )?;
    for other in others.query_map([seq], |row| arrival(row, Decision::Duplicate))? {
        arrivals.push(other?);
    }
    let jobs = read_jobs(conn, "j.event_seq = ?1", &[Value::Integer(seq)], "j.lane LIMIT 1000")?;
    let jobs = jobs.into_iter().map(|(_, job)| job).collect();
    let actions = conn
        .prepare_cached(
            "SELECT what, who, reason, at FROM hapax_action WHERE event_seq = ?1 ORDER BY action",
        )?
        .query_map([seq], |row| {
            Ok(ActionNote {
                action: row.get(0)?,
                who: row.get(1)?,
                reason: row.get(2)?,
                at: timestamp(row.get(3)?),
            })
        })?
        .collect::<rusqlite::Result<_>>()?;
    let messages = conn
        .prepare_cached(
            "SELECT m.seq FROM hapax_message m JOIN hapax_message_body b ON b.seq = m.seq
             WHERE m.event_seq = ?1 ORDER BY m.seq",
        )?
        .query_map([seq], |row| row.get(0))?
        .map(|number| outbox::message_note(conn, number?))
        .collect::<rusqlite::Result<_>>()?;
    Ok(EventDetail { summary, arrivals, headers, body, jobs, actions, messages })
}

/// One job.
pub(super) fn job(conn: &Connection, id: JobId) -> rusqlite::Result<Option<JobDetail>> {
    let (seq, lane) = row_and_lane(id);
    let place = [Value::Integer(seq), Value::Integer(lane)];
    let found = read_jobs(conn, "j.event_seq = ?1 AND j.lane = ?2", &place, "1 LIMIT 1")?;
    Ok(found.into_iter().map(|(_, job)| job).find(|job| job.id == id))
}

pub(super) fn read_jobs(
    conn: &Connection,
    condition: &str,
    values: &[Value],
    order: &str,
) -> rusqlite::Result<Vec<(i64, JobDetail)>> {
    let mut jobs: Vec<(i64, i64, i64, JobDetail)> = conn
        .prepare_cached(&format!(
            "SELECT j.event_seq, j.lane, j.state, j.due_at, j.fence, j.run, j.attempt, j.steps,
                    j.lost, j.resource, j.started_at, j.worker, j.result, j.error, e.id,
                    e.event_id, p.tenant, p.source, h.name, j.answer_status, j.answer
             FROM hapax_job j JOIN hapax_event e ON e.seq = j.event_seq
             JOIN hapax_pair p ON p.pair = e.pair JOIN hapax_lane l ON l.lane = j.lane
             JOIN hapax_handler h ON h.handler = l.handler
             WHERE {condition} ORDER BY {order}"
        ))?
        .query_map(params_from_iter(values), job_row)?
        .collect::<rusqlite::Result<_>>()?;
    let mut attempts = conn.prepare_cached(
        "SELECT run, attempt, started_at, ended_at, outcome, error, worker, answer_status, answer
         FROM hapax_attempt
         WHERE event_seq = ?1 AND lane = ?2 ORDER BY run, attempt",
    )?;
    for (seq, lane, _, job) in &mut jobs {
        let notes = attempts.query_map((*seq, *lane), |row| {
            Ok(AttemptNote {
                run: row.get(0)?,
                attempt: row.get(1)?,
                started_at: timestamp(row.get(2)?),
                ended_at: row.get::<_, Option<i64>>(3)?.map(timestamp),
                outcome: row.get(4)?,
                error: row.get(5)?,
                worker: row.get(6)?,
                answer: answer_of(row, 7)?,
            })
        })?;
        // The attempt that succeeded is in the job's own row, and `job_row` has read it.
        let done = std::mem::take(&mut job.attempts);
        job.attempts = notes.collect::<rusqlite::Result<_>>()?;
        job.attempts.extend(done);
    }
    Ok(jobs.into_iter().map(|(seq, lane, _, job)| (seq << LANE_BITS | lane, job)).collect())
}

fn job_row(row: &Row<'_>) -> rusqlite::Result<(i64, i64, i64, JobDetail)> {
    let (seq, lane, state): (i64, i64, i64) = (row.get(0)?, row.get(1)?, row.get(2)?);
    let phase = phase_of(state);
    let at = timestamp(row.get(3)?);
    let (run, attempt): (u32, u32) = (row.get(5)?, row.get(6)?);
    let id: [u8; 16] = row.get(14)?;
    let handler = HandlerName::new(row.get_ref(18)?.as_str()?);
    let worker: Option<String> = row.get(11)?;
    let started: Option<i64> = row.get(10)?;
    let answer = answer_of(row, 19)?;
    let done = started.filter(|_| phase == Phase::Done).map(|started| AttemptNote {
        run,
        attempt,
        started_at: timestamp(started),
        ended_at: Some(at),
        outcome: "done".to_owned(),
        error: None,
        worker: worker.unwrap_or_default(),
        answer,
    });
    let job = JobDetail {
        id: job_id(&id, seq, lane),
        event: event_id(id),
        event_id: row.get(15)?,
        tenant: row.get(16)?,
        source: row.get(17)?,
        phase,
        run,
        progress: Progress { attempt, steps: row.get(7)?, lost: row.get(8)? },
        fence: Fence(row.get(4)?),
        due_at: phase.is_open().then_some(at),
        result: row.get(12)?,
        error: row.get(13)?,
        finished_at: (phase.is_over() || phase == Phase::Dead).then_some(at),
        idempotency_key: idempotency_key(event_id(id), &handler, run),
        handler,
        resource: row.get(9)?,
        attempts: done.into_iter().collect(),
    };
    Ok((seq, lane, state, job))
}

fn arrival(row: &Row<'_>, plain: Decision) -> rusqlite::Result<ArrivalNote> {
    let conflict: bool = row.get(2)?;
    let remote: Option<String> = row.get(3)?;
    let secret: i64 = row.get(4)?;
    Ok(ArrivalNote {
        decision: if conflict { Decision::Conflict } else { plain },
        received_at: timestamp(row.get(0)?),
        request_id: Uuid::from_bytes(row.get(1)?),
        remote: remote.and_then(|address| address.parse().ok()),
        secret: usize::try_from(secret).unwrap_or(0),
        verifier: verifiers::read(row, 7)?,
        signed_at: row.get::<_, Option<i64>>(5)?.map(timestamp),
        body: row.get::<_, Option<Vec<u8>>>(6)?.map(Bytes::from),
    })
}
