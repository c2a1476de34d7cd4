//! What people see: read-only connections apart from the writer, each query bounded in time.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use bytes::Bytes;
use hapax_core::store::{
    ArrivalNote, Cursor, Decision, EventDetail, EventFilter, EventName, EventSummary, Lookup, Page,
    Status, StoreError,
};
use hapax_core::{SourceName, Tenant};
use rusqlite::types::Value;
use rusqlite::{Connection, OptionalExtension, Row, params_from_iter};
use tokio::sync::Semaphore;
use uuid::Uuid;

use super::open::{OpenError, Place};
use super::row::{Standing, event_id, timestamp};
use crate::limits::{PAGE_MAX, READ_MAX};

/// Connections that are open at the same time; more queries wait.
const READERS: usize = 2;

/// How many steps of SQLite's machine pass between two looks at the clock.
const STEPS_PER_LOOK: i32 = 10_000;

#[derive(Debug)]
pub(super) struct Readers {
    idle: Arc<Mutex<Vec<Connection>>>,
    free: Arc<Semaphore>,
}

impl Readers {
    pub(super) fn open(place: Arc<Place>) -> Result<Self, OpenError> {
        let idle = (0..READERS)
            .map(|_| place.reader().map_err(|source| place.error(source)))
            .collect::<Result<_, _>>()?;
        Ok(Self { idle: Arc::new(Mutex::new(idle)), free: Arc::new(Semaphore::new(READERS)) })
    }

    /// Runs a query off the runtime's threads.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        query: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let turn = Arc::clone(&self.free).acquire_owned().await.map_err(|_| StoreError::Closed)?;
        let idle = Arc::clone(&self.idle);
        let ran = tokio::task::spawn_blocking(move || {
            let conn = idle.lock().expect("no panic happens under this lock").pop();
            let mut conn = conn.expect("a permit stands for an idle connection");
            let deadline = Instant::now() + READ_MAX;
            let bounded = conn
                .progress_handler(STEPS_PER_LOOK, Some(move || Instant::now() > deadline))
                .and_then(|()| query(&conn));
            idle.lock().expect("no panic happens under this lock").push(conn);
            drop(turn);
            bounded
        });
        match ran.await {
            Ok(answer) => answer.map_err(|error| StoreError::Read(error.to_string().into())),
            Err(_) => Err(StoreError::Read("the query panicked".into())),
        }
    }
}

/// Every (tenant, source) that ever had an event.
pub(super) fn pairs(conn: &Connection) -> rusqlite::Result<Vec<(Tenant, SourceName)>> {
    conn.prepare_cached("SELECT tenant, source FROM hapax_pair")?
        .query_map([], |row| {
            let tenant = Tenant::new(row.get_ref(0)?.as_str()?);
            Ok((tenant, SourceName::new(row.get_ref(1)?.as_str()?)))
        })?
        .collect()
}

const SUMMARY: &str = "SELECT e.seq, e.id, e.event_id, p.tenant, p.source, e.event_type, \
    e.occurred_at, e.received_at, e.state, e.review, coalesce(c.copies, 0), \
    coalesce(c.conflicts, 0) \
    FROM hapax_event e JOIN hapax_pair p ON p.pair = e.pair \
    LEFT JOIN hapax_copy c ON c.event_seq = e.seq";

fn summary(row: &Row<'_>) -> rusqlite::Result<(i64, EventSummary)> {
    let standing = Standing::from_columns(row.get(8)?, row.get(9)?);
    let copies: i64 = row.get(10)?;
    let conflicts: i64 = row.get(11)?;
    let summary = EventSummary {
        id: event_id(row.get(1)?),
        event_id: row.get(2)?,
        tenant: row.get(3)?,
        source: row.get(4)?,
        event_type: row.get(5)?,
        occurred_at: row.get::<_, Option<i64>>(6)?.map(timestamp),
        received_at: timestamp(row.get(7)?),
        status: standing.status(),
        review: standing.review,
        arrivals: 1 + copies.unsigned_abs(),
        conflicts: conflicts.unsigned_abs(),
    };
    Ok((row.get(0)?, summary))
}

/// One page, newest first. Filters are looked at row by row from the newest on: the page's size and
/// the query's deadline bound the work.
pub(super) fn events(
    conn: &Connection,
    filter: &EventFilter,
) -> rusqlite::Result<Page<EventSummary>> {
    let mut conditions = BTreeMap::<&str, Value>::new();
    let text = |text: &str| Value::Text(text.to_owned());
    if let Some(tenant) = &filter.tenant {
        conditions.insert("p.tenant = ?", text(tenant.as_str()));
    }
    if let Some(source) = &filter.source {
        conditions.insert("p.source = ?", text(source.as_str()));
    }
    if let Some(event_type) = &filter.event_type {
        conditions.insert("e.event_type = ?", text(event_type));
    }
    if let Some(status) = filter.status {
        conditions.insert("e.state = ?", Value::Integer(state_of(status)));
    }
    if let Some(since) = filter.since {
        conditions.insert("e.received_at >= ?", Value::Integer(since.as_microsecond()));
    }
    if let Some(until) = filter.until {
        conditions.insert("e.received_at < ?", Value::Integer(until.as_microsecond()));
    }
    if let Some(Cursor(before)) = filter.before {
        conditions.insert("e.seq < ?", Value::Integer(i64::try_from(before).unwrap_or(i64::MAX)));
    }
    let mut sql = String::from(SUMMARY);
    sql.push_str(" WHERE 1");
    for condition in conditions.keys() {
        sql.push_str(" AND ");
        sql.push_str(condition);
    }
    let mut values: Vec<Value> = conditions.into_values().collect();
    if let Some(needle) = &filter.text {
        sql.push_str(
            " AND (e.event_id = ? OR instr(e.event_id, ?) OR instr(e.body, CAST(? AS BLOB)))",
        );
        values.extend(std::iter::repeat_n(text(needle), 3));
    }
    let limit = filter.limit.clamp(1, PAGE_MAX);
    sql.push_str(" ORDER BY e.seq DESC LIMIT ?");
    values.push(Value::Integer(limit as i64 + 1));
    let mut rows: Vec<(i64, EventSummary)> = conn
        .prepare_cached(&sql)?
        .query_map(params_from_iter(values), summary)?
        .collect::<rusqlite::Result<_>>()?;
    let more = rows.len() > limit;
    rows.truncate(limit);
    let next = rows.last().filter(|_| more).map(|(seq, _)| Cursor(seq.unsigned_abs()));
    Ok(Page { items: rows.into_iter().map(|(_, summary)| summary).collect(), next })
}

fn state_of(status: Status) -> i64 {
    match status {
        Status::Ignored => 0,
        Status::Review => 1,
        Status::Discarded => 2,
    }
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
            "SELECT received_at, request_id, 0, remote, secret, signed_at, NULL, headers, body \
             FROM hapax_event WHERE seq = ?1",
        )?
        .query_row([seq], |row| {
            let headers: String = row.get(7)?;
            let body: Vec<u8> = row.get(8)?;
            Ok((arrival(row, first_decision)?, headers, Bytes::from(body)))
        })?;
    let mut arrivals = vec![first];
    let mut others = conn.prepare_cached(
        "SELECT received_at, request_id, conflict, remote, secret, signed_at, body \
         FROM hapax_arrival WHERE event_seq = ?1 ORDER BY received_at, request_id",
    )?;
    for other in others.query_map([seq], |row| arrival(row, Decision::Duplicate))? {
        arrivals.push(other?);
    }
    Ok(EventDetail { summary, arrivals, headers, body })
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
        signed_at: row.get::<_, Option<i64>>(5)?.map(timestamp),
        body: row.get::<_, Option<Vec<u8>>>(6)?.map(Bytes::from),
    })
}
