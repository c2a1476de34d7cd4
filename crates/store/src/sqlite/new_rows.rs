//! The rows of new events and jobs, gathered over a batch and inserted many at a time.
//!
//! Starting a statement costs SQLite as much as inserting a row, because it opens a cursor for the table
//! and for each of its indexes. So the writer gathers the rows of a batch and inserts them before the
//! commit, or before it reads one of them.

use std::net::IpAddr;
use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use hapax_core::KeyHash;
use hapax_core::order::ResourcePosition;
use hapax_core::store::EventId;
use rusqlite::{Connection, Statement, ToSql};
use uuid::Uuid;

use super::row::READY;

/// Rows that one statement inserts. The last few rows of a batch take smaller statements.
const ROWS_AT_ONCE: [usize; 3] = [16, 4, 1];

/// Rows that the open transaction does not hold yet.
#[derive(Debug, Default)]
pub(super) struct NewRows {
    events: Vec<EventRow>,
    jobs: Vec<NewJobRow>,
    /// Events with jobs that wait, already inserted.
    claimable: Vec<EventRow>,
}

/// An event: its narrow row and its wide one. Times are microseconds since 1970.
#[derive(Debug)]
pub(super) struct EventRow {
    pub(super) seq: i64,
    pub(super) id: EventId,
    pub(super) pair: i64,
    pub(super) event_id: Box<str>,
    pub(super) received_at: i64,
    pub(super) body_hash: KeyHash,
    pub(super) guard_hash: Option<KeyHash>,
    pub(super) guard_until: Option<i64>,
    pub(super) state: i64,
    pub(super) review: i64,
    pub(super) event_type: Option<Box<str>>,
    pub(super) occurred_at: Option<i64>,
    pub(super) request_id: Uuid,
    pub(super) remote: Option<IpAddr>,
    pub(super) secret: i64,
    pub(super) signed_at: Option<i64>,
    pub(super) headers: Arc<str>,
    pub(super) body: Bytes,
}

/// A job, as it is written with its event.
#[derive(Debug)]
pub(super) struct NewJobRow {
    pub(super) seq: i64,
    pub(super) lane: i64,
    pub(super) state: i64,
    pub(super) due_at: i64,
    pub(super) place: Option<ResourcePosition>,
    pub(super) error: Option<String>,
    pub(super) wait: i64,
}

impl NewRows {
    /// Adds an event. Events are added in the order of their numbers.
    pub(super) fn event(&mut self, event: EventRow) {
        debug_assert!(self.events.last().is_none_or(|last| last.seq < event.seq));
        self.events.push(event);
    }

    /// The jobs, to add more.
    pub(super) fn jobs(&mut self) -> &mut Vec<NewJobRow> {
        &mut self.jobs
    }

    /// Whether the event with this number is not inserted yet.
    pub(super) fn hold(&self, seq: i64) -> bool {
        self.events.first().is_some_and(|first| first.seq <= seq)
    }

    /// Inserts all rows in the transaction that is open on `conn`.
    pub(super) fn insert(&mut self, conn: &Connection) -> rusqlite::Result<()> {
        EVENTS.run(conn, &self.events, |event, columns| {
            columns.bind(event.seq)?;
            columns.bind(event.id.0.as_bytes())?;
            columns.bind(event.pair)?;
            columns.bind(&event.event_id)?;
            columns.bind(event.received_at)?;
            columns.bind(event.body_hash.0)?;
            columns.bind(event.guard_hash.map(|guard| guard.0))?;
            columns.bind(event.guard_until)?;
            columns.bind(event.state)?;
            columns.bind(event.review)
        })?;
        BODIES.run(conn, &self.events, |event, columns| {
            columns.bind(event.seq)?;
            columns.bind(&event.event_type)?;
            columns.bind(event.occurred_at)?;
            columns.bind(event.request_id.as_bytes())?;
            columns.bind(event.remote.map(|address| address.to_string()))?;
            columns.bind(event.secret)?;
            columns.bind(event.signed_at)?;
            columns.bind(&event.headers)?;
            columns.bind(&event.body[..])
        })?;
        insert_jobs(conn, &self.jobs)?;
        // Events and jobs are both in the order of the events' numbers.
        let mut waiting = self.jobs.iter().filter(|job| job.state == READY).peekable();
        self.claimable.extend(self.events.drain(..).filter(|event| {
            while waiting.next_if(|job| job.seq < event.seq).is_some() {}
            waiting.peek().is_some_and(|job| job.seq == event.seq)
        }));
        self.jobs.clear();
        Ok(())
    }

    /// The events with jobs that wait, once the transaction is committed.
    pub(super) fn into_claimable(self) -> Vec<EventRow> {
        self.claimable
    }
}

/// Inserts jobs in the transaction that is open on `conn`.
pub(super) fn insert_jobs(conn: &Connection, jobs: &[NewJobRow]) -> rusqlite::Result<()> {
    JOBS.run(conn, jobs, |job, columns| {
        columns.bind(job.seq)?;
        columns.bind(job.lane)?;
        columns.bind(job.state)?;
        columns.bind(job.due_at)?;
        columns.bind(job.place.as_ref().map(|place| &*place.resource))?;
        columns.bind(job.place.as_ref().map(|place| place.position.0))?;
        columns.bind(&job.error)?;
        columns.bind(job.wait)
    })
}

static EVENTS: LazyLock<Insert> =
    LazyLock::new(|| Insert::of(include_str!("sql/insert_event.sql")));
static BODIES: LazyLock<Insert> = LazyLock::new(|| Insert::of(include_str!("sql/insert_body.sql")));
static JOBS: LazyLock<Insert> = LazyLock::new(|| Insert::of(include_str!("sql/insert_job.sql")));

/// An `INSERT` in the sizes of [`ROWS_AT_ONCE`].
struct Insert([String; ROWS_AT_ONCE.len()]);

impl Insert {
    /// `one` inserts one row: its values are the only text in brackets after `VALUES`.
    fn of(one: &str) -> Self {
        let (head, values) = one.split_once("VALUES (").expect("an INSERT has values");
        let (values, tail) = values.split_once(')').expect("the values end");
        let of = |rows| {
            let all = vec![format!("({values})"); rows].join(", ");
            format!("{head}VALUES {all}{tail}")
        };
        Self(ROWS_AT_ONCE.map(of))
    }

    fn run<T>(
        &self,
        conn: &Connection,
        mut rows: &[T],
        bind: impl Fn(&T, &mut Columns<'_, '_>) -> rusqlite::Result<()>,
    ) -> rusqlite::Result<()> {
        for (sql, at_once) in self.0.iter().zip(ROWS_AT_ONCE) {
            if rows.len() < at_once {
                continue;
            }
            let mut statement = conn.prepare_cached(sql)?;
            while let Some((some, rest)) =
                rows.split_at_checked(at_once).filter(|_| !rows.is_empty())
            {
                let mut columns = Columns { statement: &mut statement, next: 1 };
                some.iter().try_for_each(|row| bind(row, &mut columns))?;
                statement.raw_execute()?;
                rows = rest;
            }
        }
        Ok(())
    }
}

/// The parameters of a statement, bound in their order.
struct Columns<'a, 'c> {
    statement: &'a mut Statement<'c>,
    next: usize,
}

impl Columns<'_, '_> {
    fn bind(&mut self, value: impl ToSql) -> rusqlite::Result<()> {
        self.statement.raw_bind_parameter(self.next, value)?;
        self.next += 1;
        Ok(())
    }
}
