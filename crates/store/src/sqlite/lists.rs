//! Lists of events and jobs, newest first. A list reads row by row and stops at its bound, so that no filter
//! holds a reader for long, however few rows it matches. Where a partial index holds the rows in question,
//! the list reads that index; everything else is read from the newest row on.

use std::collections::HashSet;
use std::ops::{ControlFlow, Range};

use hapax_core::job::Phase;
use hapax_core::store::{
    Cursor, DeadGroups, EventFilter, EventSummary, JobDetail, JobFilter, Page, Status,
};
use hapax_core::{SourceName, Timestamp};
use rusqlite::types::Value;
use rusqlite::{Connection, OptionalExtension, Row, params_from_iter};

use super::reader::{RANK, SUMMARY, read_jobs, summary};
use super::row::{
    DEAD, DISCARDED, HELD, LANE_BITS, LEASED, PARKED, READY, REVIEW, STALE, micros, state_of,
    timestamp,
};
use super::search_index::{self, ExactMatches};
use crate::dead_groups::DeadGroupSums;
use crate::limits::{LIST_SORTED_MAX, LIST_TIME_SLACK, LIST_WHOLE_MAX};
use crate::page_search::{PageSearch, Parts, ReadBudget};

/// The condition of the index over rare states, exactly as the index states it: SQLite uses a partial index
/// only for a query that repeats its condition.
pub(super) const LISTED: &str = "state > 2 /* stale, dead, held, parked, review or discarded */";

/// Rows that are numbered in the order of their commits.
#[derive(Clone, Copy)]
pub(super) enum Numbered {
    Events,
    Messages,
}

impl Numbered {
    fn table(self) -> &'static str {
        match self {
            Self::Events => "hapax_event",
            Self::Messages => "hapax_message",
        }
    }

    fn time(self) -> &'static str {
        match self {
            Self::Events => "received_at",
            Self::Messages => "created_at",
        }
    }

    /// The table whose first row is the oldest one that a list shows.
    fn whole(self) -> &'static str {
        match self {
            Self::Events => "hapax_body",
            Self::Messages => "hapax_message_body",
        }
    }

    /// The numbers of all rows whose time may be in this range. Rows outside the range may be included. Found
    /// by binary search: there is no index by time, which every insert would have to update.
    pub(super) fn range(
        self,
        conn: &Connection,
        since: Option<Timestamp>,
        until: Option<Timestamp>,
    ) -> rusqlite::Result<Range<i64>> {
        let end = |sql: String| -> rusqlite::Result<Option<i64>> {
            conn.prepare_cached(&sql)?.query_row([], |row| row.get(0))
        };
        let oldest = end(format!("SELECT min(seq) FROM {}", self.whole()))?;
        let newest = end(format!("SELECT max(seq) FROM {}", self.table()))?;
        let Some((oldest, newest)) = oldest.zip(newest) else { return Ok(0..0) };
        let all = oldest..newest + 1;
        if all.end - all.start < LIST_WHOLE_MAX {
            return Ok(all);
        }
        let slack = slack(conn)?;
        let first = |at: i64| self.first(conn, &all, at);
        let start = since.map(|since| first(micros(since).saturating_sub(slack))).transpose()?;
        let end = until.map(|until| first(micros(until).saturating_add(slack))).transpose()?;
        Ok(start.unwrap_or(all.start)..end.unwrap_or(all.end))
    }

    /// The first number whose rows were received at this time or later, accurate to the slack.
    pub(super) fn since(self, conn: &Connection, at: Timestamp) -> rusqlite::Result<i64> {
        let all = self.range(conn, None, None)?;
        self.first(conn, &all, micros(at))
    }

    /// A number that splits the rows by time, accurate to the slack: rows before it are earlier than `at`,
    /// the others are later.
    fn first(self, conn: &Connection, among: &Range<i64>, at: i64) -> rusqlite::Result<i64> {
        let mut at_or_after = conn.prepare_cached(&format!(
            "SELECT {} FROM {} WHERE seq >= ?1 ORDER BY seq LIMIT 1",
            self.time(),
            self.table()
        ))?;
        let Range { start: mut low, end: mut high } = among.clone();
        while low < high {
            let middle = low + (high - low) / 2;
            let time: Option<i64> = at_or_after.query_row([middle], |row| row.get(0)).optional()?;
            match time {
                Some(time) if time < at => low = middle + 1,
                Some(_) | None => high = middle,
            }
        }
        Ok(low)
    }
}

/// The most by which the times of two rows may differ from the order of their numbers, in
/// microseconds.
fn slack(conn: &Connection) -> rusqlite::Result<i64> {
    let set_back: i64 = conn
        .prepare_cached("SELECT coalesce(max(back), 0) FROM hapax_clock_step")?
        .query_row([], |row| row.get(0))?;
    Ok(set_back.saturating_add(LIST_TIME_SLACK.as_micros() as i64))
}

/// The numbers below the cursor of the page before.
pub(super) fn below(range: Range<i64>, before: Option<Cursor>) -> Range<i64> {
    let before =
        before.map_or(i64::MAX, |Cursor(before)| i64::try_from(before).unwrap_or(i64::MAX));
    range.start..range.end.min(before)
}

/// The cursor of a numbered row.
pub(super) fn cursor(seq: i64) -> Cursor {
    Cursor(seq.unsigned_abs().into())
}

/// The rows of a list that may match.
pub(super) enum Candidates {
    /// All of them, or too many to be worth an index.
    All,
    /// The rows that this statement returns by number, from the newest on. ?1 is the end of the range, ?2
    /// its start, and ?3 the value, if there is one.
    Numbers { sql: String, value: Option<Value> },
    /// The exact matches of a search.
    Exact(ExactMatches),
}

impl Candidates {
    /// Calls `take` with the numbers of the range, from the newest on, until it breaks.
    fn numbers(
        self,
        conn: &Connection,
        range: Range<i64>,
        mut take: impl FnMut(i64) -> rusqlite::Result<ControlFlow<()>>,
    ) -> rusqlite::Result<()> {
        match self {
            Self::All => Ok(()),
            Self::Numbers { sql, value } => {
                let mut statement = conn.prepare_cached(&sql)?;
                let bounds = [range.end, range.start].map(Value::Integer);
                let mut numbers =
                    statement.query(params_from_iter(bounds.into_iter().chain(value)))?;
                while let Some(number) = numbers.next()? {
                    if take(number.get(0)?)?.is_break() {
                        break;
                    }
                }
                Ok(())
            }
            Self::Exact(matches) => matches.numbers(conn, range, take),
        }
    }

    /// The rows that any of these statements returns.
    pub(super) fn any(parts: &[String]) -> Self {
        let sql = format!("{} ORDER BY 1 DESC", parts.join(" UNION ALL "));
        Self::Numbers { sql, value: None }
    }
}

/// Conditions of a list, with their values.
#[derive(Default)]
pub(super) struct Checks {
    said: Vec<String>,
    values: Vec<Value>,
}

impl Checks {
    pub(super) fn require(&mut self, condition: impl Into<String>) {
        self.said.push(condition.into());
    }

    /// The name of a value in a condition.
    pub(super) fn bind(&mut self, value: Value) -> String {
        self.values.push(value);
        format!("?{}", self.values.len())
    }

    /// Searches a page of `table`, whose alias is `alias`. `time` is the column with the time of a row.
    ///
    /// The conditions are columns of the statement, not part of its WHERE: every row is returned, so that
    /// the search can stop at any of them. CASE evaluates the conditions only up to the first that fails.
    pub(super) fn search(
        mut self,
        conn: &Connection,
        (table, alias, time): (&str, &str, &str),
        candidates: Candidates,
        range: Range<i64>,
        search: &mut PageSearch<i64>,
    ) -> rusqlite::Result<()> {
        let said = match self.said.is_empty() {
            true => "1".to_owned(),
            false => self.said.join(" AND "),
        };
        let columns = format!(
            "SELECT {alias}.seq, {alias}.{time}, CASE WHEN {said} THEN 1 ELSE 0 END \
             FROM {table} {alias}"
        );
        let row = |row: &Row<'_>| -> rusqlite::Result<(i64, Timestamp, bool)> {
            Ok((row.get(0)?, timestamp(row.get(1)?), row.get(2)?))
        };
        match candidates {
            Candidates::All => {
                let end = self.bind(Value::Integer(range.end));
                let start = self.bind(Value::Integer(range.start));
                let sql = format!(
                    "{columns} WHERE {alias}.seq < {end} AND {alias}.seq >= {start} \
                     ORDER BY {alias}.seq DESC"
                );
                let mut statement = conn.prepare_cached(&sql)?;
                let mut rows = statement.query(params_from_iter(self.values))?;
                while let Some(read) = rows.next()? {
                    let (seq, time, fits) = row(read)?;
                    if search.take(cursor(seq), time, fits.then_some(seq)).is_break() {
                        break;
                    }
                }
            }
            Candidates::Numbers { .. } | Candidates::Exact(_) => {
                let named = self.bind(Value::Null);
                let mut check =
                    conn.prepare_cached(&format!("{columns} WHERE {alias}.seq = {named}"))?;
                let mut last = None;
                candidates.numbers(conn, range, |seq| {
                    // Several jobs or deliveries of one row.
                    if last.replace(seq) == Some(seq) {
                        return Ok(ControlFlow::Continue(()));
                    }
                    if let Some(value) = self.values.last_mut() {
                        *value = Value::Integer(seq);
                    }
                    let checked =
                        check.query_row(params_from_iter(&self.values), row).optional()?;
                    Ok(match checked {
                        Some((_, time, fits)) => {
                            search.take(cursor(seq), time, fits.then_some(seq))
                        }
                        None => ControlFlow::Continue(()),
                    })
                })?;
            }
        }
        Ok(())
    }
}

/// One page of events.
pub(super) fn events(
    conn: &Connection,
    filter: &EventFilter,
) -> rusqlite::Result<Page<EventSummary>> {
    let mut search = PageSearch::begin(filter.limit, filter.bound);
    // One snapshot: an item is shown as it was when it matched.
    let snapshot = conn.unchecked_transaction()?;
    let earliest = |times: [Option<Timestamp>; 2]| times.into_iter().flatten().min();
    let range = Numbered::Events.range(
        &snapshot,
        filter.since,
        earliest([filter.until, filter.unfinished_since]),
    )?;
    let table = ("hapax_event", "e", "received_at");
    let (exact, rest) = match Parts::of(filter) {
        Parts::Both(before) => (Some(before), None),
        Parts::One(before) => (None, before),
        Parts::Rest(before) => (None, Some(before)),
    };
    let has_exact = filter.text.as_ref().filter(|text| text.is_exact());
    if let (Some(before), Some(text)) = (exact, has_exact) {
        let without_text = EventFilter { text: None, ..filter.clone() };
        let matches = Candidates::Exact(ExactMatches::of(text));
        let range = below(range.clone(), before);
        checks(&snapshot, &without_text)?.search(&snapshot, table, matches, range, &mut search)?;
    }
    if has_exact.is_none() || search.begin_rest() {
        let candidates = candidates(&snapshot, filter)?;
        let range = below(range, rest);
        checks(&snapshot, filter)?.search(&snapshot, table, candidates, range, &mut search)?;
    }
    let page = search.page();
    let mut one = snapshot.prepare_cached(&format!("{SUMMARY} WHERE e.seq = ?1"))?;
    let mut items = Vec::with_capacity(page.items.len());
    for seq in page.items {
        items.extend(one.query_row([seq], summary).optional()?.map(|(_, summary)| summary));
    }
    Ok(Page { items, next: page.next, searched_to: page.searched_to })
}

/// The conditions of a filter, the cheap ones first.
fn checks(conn: &Connection, filter: &EventFilter) -> rusqlite::Result<Checks> {
    let mut checks = Checks::default();
    if filter.tenant.is_some() || filter.source.is_some() {
        let pairs: Vec<String> = conn
            .prepare_cached(
                "SELECT pair FROM hapax_pair
                 WHERE (?1 IS NULL OR tenant = ?1) AND (?2 IS NULL OR source = ?2)",
            )?
            .query_map(
                (
                    filter.tenant.as_ref().map(|tenant| tenant.as_str()),
                    filter.source.as_ref().map(|source| source.as_str()),
                ),
                |row| row.get::<_, i64>(0),
            )?
            .map(|pair| pair.map(|pair| pair.to_string()))
            .collect::<rusqlite::Result<_>>()?;
        checks.require(format!("e.pair IN ({})", pairs.join(", ")));
    }
    let times = [
        ("e.received_at >=", filter.since),
        ("e.received_at <", filter.until),
        ("e.received_at <", filter.unfinished_since),
    ];
    for (comparison, time) in times {
        if let Some(time) = time {
            let time = checks.bind(Value::Integer(micros(time)));
            checks.require(format!("{comparison} {time}"));
        }
    }
    if filter.has_copies {
        checks.require(
            "(EXISTS (SELECT 1 FROM hapax_arrival a WHERE a.event_seq = e.seq)
              OR EXISTS (SELECT 1 FROM hapax_copy c WHERE c.event_seq = e.seq))",
        );
    }
    if let Some(status) = filter.status {
        checks.require(status_condition(status));
    }
    if filter.unfinished_since.is_some() {
        checks.require(format!(
            "(e.state = 1 /* review */ OR e.state = 0 /* open */ AND {RANK} IN (0, 2, 3, 4, 5, 6) \
             /* not final */)"
        ));
    }
    // An event without its body was pruned.
    let mut body = "EXISTS (SELECT 1 FROM hapax_body b WHERE b.seq = e.seq".to_owned();
    if let Some(event_type) = &filter.event_type {
        let event_type = checks.bind(Value::Text(event_type.clone()));
        body.push_str(&format!(" AND b.event_type = {event_type}"));
    }
    if let Some(text) = &filter.text {
        let may_read = match &text.sources {
            None => "1".to_owned(),
            Some(sources) => format!("e.pair IN ({})", pairs_of(conn, sources)?),
        };
        let needle = checks.bind(Value::Text(text.text.clone()));
        body.push_str(&format!(
            " AND (instr(e.event_id, {needle})
                   OR {may_read} AND instr(b.body, CAST({needle} AS BLOB)))"
        ));
    }
    checks.require(body + ")");
    if let Some(text) = filter.text.as_ref().filter(|text| text.is_exact()) {
        // The first part of the list has the exact matches.
        let (exactly, values) = search_index::finds_exactly(text);
        let mut parts = exactly.split('?');
        let mut said = parts.next().unwrap_or_default().to_owned();
        for (part, value) in parts.zip(values) {
            said.push_str(&checks.bind(value));
            said.push_str(part);
        }
        checks.require(format!("NOT {said}"));
    }
    Ok(checks)
}

/// The numbers of the (tenant, source) pairs with these sources.
fn pairs_of(conn: &Connection, sources: &[SourceName]) -> rusqlite::Result<String> {
    let mut pairs = Vec::new();
    let mut of_source = conn.prepare_cached("SELECT pair FROM hapax_pair WHERE source = ?1")?;
    for source in sources {
        for pair in of_source.query_map([source.as_str()], |row| row.get::<_, i64>(0))? {
            pairs.push(pair?.to_string());
        }
    }
    Ok(pairs.join(", "))
}

/// The condition for a status.
fn status_condition(status: Status) -> String {
    let ranked = |rank: &str| format!("e.state = 0 /* open */ AND {RANK} {rank}");
    match status {
        Status::Review => format!("(e.state = 1 /* review */ OR {})", ranked("= 0")),
        Status::Discarded => format!("(e.state = 2 /* discarded */ OR {})", ranked("= 1")),
        Status::Dead => ranked("= 2"),
        Status::Failed => ranked("= 3"),
        Status::Held => ranked("= 4"),
        Status::Processing => ranked("= 5"),
        Status::Received => ranked("= 6"),
        Status::Processed => ranked("= 7"),
        Status::Stale => ranked("= 8"),
        Status::Ignored => ranked("IS NULL"),
    }
}

/// The events that may match, by the states of their jobs.
pub(super) fn candidates(conn: &Connection, filter: &EventFilter) -> rusqlite::Result<Candidates> {
    let in_review = |state: i64| {
        format!(
            "SELECT seq FROM hapax_event INDEXED BY hapax_event_review
             WHERE state <> 0 /* open */ AND state = {state} AND seq < ?1 AND seq >= ?2"
        )
    };
    let jobs = |state: i64| job_events(&indexed(state));
    let few = |states: &[i64]| -> rusqlite::Result<bool> {
        Ok(count_few(conn, states)? && !states.is_empty())
    };
    Ok(match filter.status {
        Some(Status::Dead) => Candidates::any(&[jobs(DEAD)]),
        Some(Status::Held) => Candidates::any(&[jobs(HELD)]),
        Some(Status::Stale) => Candidates::any(&[jobs(STALE)]),
        Some(Status::Review) => Candidates::any(&[in_review(1), jobs(REVIEW)]),
        Some(Status::Discarded) => Candidates::any(&[in_review(2), jobs(DISCARDED)]),
        Some(Status::Failed) => Candidates::any(&[job_events(FAILED)]),
        Some(Status::Processing) if few(&[LEASED])? => Candidates::any(&[jobs(LEASED)]),
        Some(Status::Received) if few(&[READY, PARKED])? => {
            Candidates::any(&[jobs(READY), jobs(PARKED)])
        }
        None if filter.has_copies => {
            Candidates::any(&["hapax_arrival", "hapax_copy"].map(|table| {
                format!("SELECT event_seq FROM {table} WHERE event_seq < ?1 AND event_seq >= ?2")
            }))
        }
        None if filter.unfinished_since.is_some() && few(&[READY, LEASED, PARKED])? => {
            let states = [READY, LEASED, DEAD, HELD, PARKED, REVIEW].map(jobs);
            Candidates::any(&[&[in_review(1)], &states[..]].concat())
        }
        Some(Status::Processing | Status::Received | Status::Processed | Status::Ignored)
        | None => Candidates::All,
    })
}

/// The jobs that failed and wait for their next attempt, with their index.
const FAILED: &str = "hapax_job INDEXED BY hapax_job_failed
     WHERE steps > 0 AND (state = 0 /* ready */ OR state = 6 /* parked */)";

/// The events of such jobs.
fn job_events(jobs: &str) -> String {
    format!("SELECT event_seq FROM {jobs} AND event_seq < ?1 AND event_seq >= ?2")
}

/// The jobs in a state, with the index to read them by.
fn indexed(state: i64) -> String {
    match state {
        READY => "hapax_job INDEXED BY hapax_job_due WHERE state = 0 /* ready */".to_owned(),
        LEASED => "hapax_job INDEXED BY hapax_job_due WHERE state = 1 /* leased */".to_owned(),
        listed => {
            format!("hapax_job INDEXED BY hapax_job_listed WHERE {LISTED} AND state = {listed}")
        }
    }
}

/// Whether so few jobs are in these states that all of them can be sorted for a page.
fn count_few(conn: &Connection, states: &[i64]) -> rusqlite::Result<bool> {
    let mut left = LIST_SORTED_MAX;
    for state in states {
        let sql = format!("SELECT count(*) FROM (SELECT 1 FROM {} LIMIT ?1)", indexed(*state));
        let count: i64 =
            conn.prepare_cached(&sql)?.query_row([left as i64 + 1], |row| row.get(0))?;
        let Some(rest) = left.checked_sub(count as usize) else { return Ok(false) };
        left = rest;
    }
    Ok(true)
}

/// One page of jobs, newest event first.
pub(super) fn jobs(conn: &Connection, filter: &JobFilter) -> rusqlite::Result<Page<JobDetail>> {
    let mut search = PageSearch::begin(filter.limit, filter.bound);
    let snapshot = conn.unchecked_transaction()?;
    let lanes = lanes(&snapshot, filter)?;
    let state = filter.phase.map(state_of);
    let all = "hapax_job WHERE 1".to_owned();
    let from = match filter.phase {
        Some(
            Phase::Dead
            | Phase::Held
            | Phase::Stale
            | Phase::Parked
            | Phase::Review
            | Phase::Discarded,
        ) => state.map_or(all, indexed),
        Some(Phase::Ready | Phase::Leased) => match state {
            Some(state) if count_few(&snapshot, &[state])? => indexed(state),
            _many => all,
        },
        Some(Phase::Done) | None => all,
    };
    // A job is named by event and lane; the cursor holds both.
    let before = filter.before.map_or(u128::MAX, |Cursor(before)| before);
    let before_seq = i64::try_from(before >> LANE_BITS).unwrap_or(i64::MAX);
    let before_lane = (before & ((1 << LANE_BITS) - 1)) as i64;
    // An index has neither the error nor the run, so they are read only if they are asked for.
    let error = if filter.error.is_some() { "coalesce(error, '') = ?3" } else { "?3 IS NULL" };
    let forced = if filter.forced { "run > 1" } else { "1" };
    let sql = format!(
        "SELECT event_seq, lane, state, {error} AND {forced} FROM {from} AND (event_seq, lane) < (?1, ?2)
         ORDER BY event_seq DESC, lane DESC"
    );
    let mut statement = snapshot.prepare_cached(&sql)?;
    let mut rows = statement.query((before_seq, before_lane, &filter.error))?;
    while let Some(row) = rows.next()? {
        let (seq, lane): (i64, i64) = (row.get(0)?, row.get(1)?);
        let fits = row.get::<_, bool>(3)?
            && state.is_none_or(|state| row.get(2) == Ok(state))
            && lanes.as_ref().is_none_or(|lanes| lanes.contains(&lane));
        // The time is read for the last row only.
        let at = cursor(seq << LANE_BITS | lane);
        if search.take(at, Timestamp::UNIX_EPOCH, fits.then_some((seq, lane))).is_break() {
            break;
        }
    }
    drop(rows);
    let mut page = search.page();
    if let (Some(Cursor(next)), Some(searched)) = (page.next, &mut page.searched_to) {
        let sql = "SELECT received_at FROM hapax_event WHERE seq = ?1";
        let seq = i64::try_from(next >> LANE_BITS).unwrap_or(i64::MAX);
        *searched = timestamp(snapshot.prepare_cached(sql)?.query_row([seq], |row| row.get(0))?);
    }
    let mut items = Vec::with_capacity(page.items.len());
    for (seq, lane) in page.items {
        let place = [Value::Integer(seq), Value::Integer(lane)];
        let read = read_jobs(&snapshot, "j.event_seq = ?1 AND j.lane = ?2", &place, "1 LIMIT 1")?;
        items.extend(read.into_iter().map(|(_, job)| job));
    }
    Ok(Page { items, next: page.next, searched_to: page.searched_to })
}

/// Dead letters by their error, newest event first.
pub(super) fn dead_groups(conn: &Connection, filter: &JobFilter) -> rusqlite::Result<DeadGroups> {
    let mut budget = ReadBudget::begin(filter.bound);
    let snapshot = conn.unchecked_transaction()?;
    let lanes = lanes(&snapshot, filter)?;
    let sql = format!(
        "SELECT event_seq, lane, error, due_at FROM {} ORDER BY event_seq DESC, lane DESC",
        indexed(DEAD)
    );
    let mut statement = snapshot.prepare_cached(&sql)?;
    let mut rows = statement.query([])?;
    let (mut sums, mut last, mut is_cut) = (DeadGroupSums::default(), 0, false);
    while let Some(row) = rows.next()? {
        is_cut = budget.is_spent();
        if is_cut {
            break;
        }
        budget.spend(1);
        last = row.get(0)?;
        let lane: i64 = row.get(1)?;
        if lanes.as_ref().is_none_or(|lanes| lanes.contains(&lane)) {
            let error = row.get_ref(2)?.as_str_or_null()?.unwrap_or_default();
            sums.add(error, timestamp(row.get(3)?));
        }
    }
    drop(rows);
    let sql = "SELECT received_at FROM hapax_event WHERE seq = ?1";
    let searched_to = match is_cut {
        true => Some(snapshot.prepare_cached(sql)?.query_row([last], |row| row.get(0))?),
        false => None,
    };
    Ok(sums.groups(filter.limit, searched_to.map(timestamp)))
}

/// The lanes that a filter names; `None` if it names none.
fn lanes(conn: &Connection, filter: &JobFilter) -> rusqlite::Result<Option<HashSet<i64>>> {
    if filter.tenant.is_none() && filter.source.is_none() && filter.handler.is_none() {
        return Ok(None);
    }
    let lanes = conn
        .prepare_cached(
            "SELECT l.lane FROM hapax_lane l JOIN hapax_pair p ON p.pair = l.pair
             JOIN hapax_handler h ON h.handler = l.handler
             WHERE (?1 IS NULL OR p.tenant = ?1) AND (?2 IS NULL OR p.source = ?2)
               AND (?3 IS NULL OR h.name = ?3)",
        )?
        .query_map(
            (
                filter.tenant.as_ref().map(|tenant| tenant.as_str()),
                filter.source.as_ref().map(|source| source.as_str()),
                filter.handler.as_ref().map(|handler| handler.as_str()),
            ),
            |row| row.get(0),
        )?
        .collect::<rusqlite::Result<_>>()?;
    Ok(Some(lanes))
}
