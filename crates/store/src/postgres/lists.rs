//! Lists of events, jobs and messages, newest first. A list is read in slices: one statement finds the next
//! rows that may match, by an index, and a second one checks them. Between two slices the list checks its
//! bound, so that no filter holds a connection for long, however few rows it matches.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use hapax_core::Timestamp;
use hapax_core::job::Phase;
use hapax_core::store::{
    Cursor, DeadGroups, EventFilter, EventSummary, JobDetail, JobFilter, Page, ReadBound, Status,
    StoreError,
};
use tokio_postgres::Row;
use uuid::Uuid;

use super::Shared;
use super::connect::{PgError, PooledClient};
use super::reader::{Conditions, SUMMARY, filtered, read, read_jobs, status_condition, summary};
use super::row::{first_id, past, state_of};
use super::search_index::{finds_exactly, hashes};
use crate::dead_groups::DeadGroupSums;
use crate::limits::{LIST_SORTED_MAX, PAGE_MAX};
use crate::page_search::{Parts, ReadBudget, in_rest};

/// The rows of the first slice. A body may be 1 MiB long, so a search in bodies begins with few
/// rows.
const SLICE_FIRST: usize = 64;

/// The most rows of one slice.
const SLICE_MAX: usize = 4_096;

/// The next slice is larger only if the last one took less than this.
const SLICE_TIME: Duration = Duration::from_millis(8);

/// The size of the slices of one page.
pub(super) struct Slices {
    budget: ReadBudget,
    rows: usize,
    began: Instant,
}

impl Slices {
    pub(super) fn begin(bound: ReadBound) -> Self {
        Self { budget: ReadBudget::begin(bound), rows: SLICE_FIRST, began: Instant::now() }
    }

    /// The rows that the next slice may read.
    pub(super) fn next(&mut self) -> i64 {
        self.began = Instant::now();
        self.budget.slice(self.rows) as i64
    }

    /// Records a slice that was read. Returns whether the bound allows another slice.
    pub(super) fn read(&mut self, rows: usize) -> bool {
        self.budget.spend(rows.max(1));
        self.rows = match self.began.elapsed() < SLICE_TIME {
            true => (self.rows * 2).min(SLICE_MAX),
            false => (self.rows / 2).max(SLICE_FIRST),
        };
        !self.budget.is_spent()
    }
}

/// A page under construction: the items with their places.
pub(super) struct SlicedPage<T> {
    limit: usize,
    found: Vec<(Cursor, T)>,
}

impl<T> SlicedPage<T> {
    pub(super) fn begin(limit: usize) -> Self {
        Self { limit: limit.clamp(1, PAGE_MAX), found: Vec::new() }
    }

    /// How many items to read: one more than the page has room for, to know whether the list
    /// continues.
    pub(super) fn wanted(&self) -> usize {
        self.limit + 1 - self.found.len()
    }

    /// Adds the items of a slice. Returns whether the page is full, and more items exist.
    pub(super) fn add(&mut self, items: impl IntoIterator<Item = (Cursor, T)>) -> bool {
        self.found.extend(items);
        self.found.len() > self.limit
    }

    /// The page. `stopped` says where the search ended, if rows are left.
    pub(super) fn page(mut self, stopped: Option<(Cursor, Timestamp)>) -> Page<T> {
        let more = self.found.len() > self.limit;
        self.found.truncate(self.limit);
        let is_full = self.found.len() == self.limit;
        let next = match more {
            true => self.found.last().map(|(at, _)| *at),
            false => stopped.map(|(at, _)| at),
        };
        Page {
            items: self.found.into_iter().map(|(_, item)| item).collect(),
            next,
            searched_to: stopped.filter(|_| !is_full).map(|(_, time)| time),
        }
    }
}

/// One page of events.
pub(super) async fn events(
    shared: &Shared,
    filter: EventFilter,
) -> Result<Page<EventSummary>, StoreError> {
    let mut client = shared.pools.lists.checkout().await.map_err(read)?;
    let mut page = SlicedPage::begin(filter.limit);
    let mut slices = Slices::begin(filter.bound);
    let has_exact = filter.text.as_ref().is_some_and(|text| text.is_exact());
    let before = match Parts::of(&filter) {
        Parts::Both(before) => {
            let candidates = Candidates::Exact;
            let range = event_range(&mut client, &filter, before).await.map_err(read)?;
            let part = ListPart { filter: &filter, candidates, range, rest: false };
            match part.read(&mut client, &mut page, &mut slices).await.map_err(read)? {
                PartEnd::Full => return Ok(page.page(None)),
                PartEnd::Bound(at) => return Ok(page.page(Some(at))),
                PartEnd::Rows => None,
            }
        }
        Parts::One(before) => before,
        Parts::Rest(before) => Some(before),
    };
    let candidates = candidates(&mut client, &filter).await.map_err(read)?;
    let range = event_range(&mut client, &filter, before).await.map_err(read)?;
    let part = ListPart { filter: &filter, candidates, range, rest: has_exact };
    match part.read(&mut client, &mut page, &mut slices).await.map_err(read)? {
        PartEnd::Full | PartEnd::Rows => Ok(page.page(None)),
        PartEnd::Bound(at) => Ok(page.page(Some(at))),
    }
}

/// A part of a list: the exact matches of a search, or the other events.
struct ListPart<'a> {
    filter: &'a EventFilter,
    candidates: Candidates,
    range: (Uuid, Uuid),
    /// Whether this is the second part.
    rest: bool,
}

/// Why a part was left.
enum PartEnd {
    /// The page is full, and more items exist.
    Full,
    /// No row is left.
    Rows,
    /// The bound is reached, at this row and time.
    Bound((Cursor, Timestamp)),
}

impl ListPart<'_> {
    async fn read(
        &self,
        client: &mut PooledClient,
        page: &mut SlicedPage<EventSummary>,
        slices: &mut Slices,
    ) -> Result<PartEnd, PgError> {
        let is_exact = matches!(self.candidates, Candidates::Exact);
        let without_text;
        let filter = match is_exact {
            true => {
                without_text = EventFilter { text: None, ..self.filter.clone() };
                &without_text
            }
            false => self.filter,
        };
        let cursor = |id: Uuid| match self.rest {
            true => in_rest(Cursor(id.as_u128())),
            false => Cursor(id.as_u128()),
        };
        let (low, mut before) = self.range;
        loop {
            let rows = slices.next();
            let ids = self.candidates.read(client, self.filter, (low, before), rows).await?;
            let is_last = (ids.len() as i64) < rows;
            let Some(last) = ids.last().copied() else { return Ok(PartEnd::Rows) };
            let count = ids.len();
            let mut asked = Conditions::default();
            asked.add("w.id = ANY (?)", ids);
            filtered(&mut asked, filter);
            if let Some(text) = filter.text.as_ref().filter(|_| self.rest) {
                let exactly = finds_exactly(&mut asked, text);
                asked.require(format!("NOT {exactly}"));
            }
            if let Some(status) = filter.status {
                asked.require(status_condition(status));
            }
            let tail = format!("ORDER BY e.id DESC LIMIT {}", page.wanted());
            let found = asked.query(client, SUMMARY, &tail).await?;
            let items = found.iter().map(|row| (cursor(row.get(0)), summary(row)));
            if page.add(items) {
                return Ok(PartEnd::Full);
            }
            if is_last {
                return Ok(PartEnd::Rows);
            }
            before = last;
            if !slices.read(count) {
                return Ok(PartEnd::Bound((cursor(last), time_of(last))));
            }
        }
    }
}

/// The range of ids that a list may show. The range includes its start and excludes its end.
async fn event_range(
    client: &mut PooledClient,
    filter: &EventFilter,
    before: Option<Cursor>,
) -> Result<(Uuid, Uuid), PgError> {
    // Older rows belong to pruned events: they only keep the key.
    let sql = "SELECT w.id FROM hapax.body w ORDER BY w.id LIMIT 1";
    let oldest = client.query(sql, &[]).await?.first().map(|row| row.get(0));
    let since = filter.since.map(first_id);
    let ends = [filter.until.map(past), filter.unfinished_since.map(past)];
    let cursor = before.map(|Cursor(before)| Uuid::from_u128(before));
    Ok((
        since.into_iter().chain(oldest).max().unwrap_or(Uuid::nil()),
        ends.into_iter().flatten().chain(cursor).min().unwrap_or(Uuid::max()),
    ))
}

/// The time in an id.
pub(super) fn time_of(id: Uuid) -> Timestamp {
    let millis = i64::try_from(id.as_u128() >> 80).unwrap_or(i64::MAX);
    Timestamp::from_millisecond(millis).unwrap_or(Timestamp::MIN)
}

/// How the rows that may match are found.
enum Candidates {
    /// By this statement: $1 is the id before which to begin, $2 the lowest, $3 the most rows.
    Rows(String),
    /// By a query for one source, with the source as $4.
    OfSource,
    /// These ids, from new to old.
    Few(Vec<Uuid>),
    /// The exact matches of a search.
    Exact,
}

impl Candidates {
    async fn read(
        &self,
        client: &mut PooledClient,
        filter: &EventFilter,
        (low, before): (Uuid, Uuid),
        rows: i64,
    ) -> Result<Vec<Uuid>, PgError> {
        let found = match self {
            Self::Rows(sql) => client.query(sql, &[&before, &low, &rows]).await?,
            Self::OfSource => {
                let sql = "SELECT e.id FROM hapax.event e WHERE e.source = $4 AND e.id < $1 \
                           AND e.id >= $2 ORDER BY e.id DESC LIMIT $3";
                let source = filter.source.as_ref().map(ToString::to_string);
                client.query(sql, &[&before, &low, &rows, &source]).await?
            }
            Self::Exact => {
                let text = filter.text.clone().unwrap_or_default();
                let named: Vec<Uuid> = text.named.iter().map(|id| id.0).collect();
                client.query(EXACT, &[&before, &low, &rows, &named, &hashes(&text)]).await?
            }
            Self::Few(ids) => {
                let in_range = ids.iter().filter(|id| **id < before && **id >= low);
                return Ok(in_range.take(rows as usize).copied().collect());
            }
        };
        let mut ids: Vec<Uuid> = found.iter().map(|row| row.get(0)).collect();
        // Several rows may be jobs of one event. The length still shows whether the slice was full.
        if let Some(last) = ids.last().copied() {
            let full = ids.len();
            ids.dedup();
            ids.resize(full, last);
        }
        Ok(ids)
    }
}

/// The jobs in some states.
fn jobs_in(states: &[&str]) -> String {
    let named: Vec<_> = states.iter().map(|name| format!("hapax.job_state('{name}')")).collect();
    named.join(", ")
}

async fn candidates(
    client: &mut PooledClient,
    filter: &EventFilter,
) -> Result<Candidates, PgError> {
    let jobs = |condition: &str| {
        format!(
            "SELECT j.event AS id FROM hapax.job j WHERE {condition} AND j.job < $1 AND j.job >= $2 \
             ORDER BY j.job DESC LIMIT $3"
        )
    };
    let in_state = |name: &str| jobs(&format!("j.state = hapax.job_state('{name}')"));
    let or_event = |name: &str| {
        format!(
            "SELECT c.id FROM (({}) UNION ALL ( \
                 SELECT e.id FROM hapax.event e \
                 WHERE e.state <> 0 /* open */ AND e.state = hapax.event_state('{name}') \
                   AND e.id < $1 AND e.id >= $2 ORDER BY e.id DESC LIMIT $3)) c \
             ORDER BY c.id DESC LIMIT $3",
            in_state(name)
        )
    };
    let found = match filter.status {
        Some(Status::Dead) => Candidates::Rows(in_state("dead")),
        Some(Status::Held) => Candidates::Rows(in_state("held")),
        Some(Status::Stale) => Candidates::Rows(in_state("stale")),
        Some(Status::Review) => Candidates::Rows(or_event("review")),
        Some(Status::Discarded) => Candidates::Rows(or_event("discarded")),
        Some(Status::Failed) => Candidates::Rows(jobs(FAILED)),
        Some(Status::Processing) => few(client, &["leased"], &[]).await?,
        Some(Status::Received) => few(client, &["ready", "parked"], &[]).await?,
        None if filter.has_copies => Candidates::Rows(COPIED.to_owned()),
        None if filter.unfinished_since.is_some() => {
            let rare = ["dead", "held", "review"];
            few(client, &["ready", "leased", "parked"], &rare).await?
        }
        Some(Status::Processed | Status::Ignored) | None => Candidates::all(),
    };
    Ok(match found {
        Candidates::Rows(sql) if sql == ALL && filter.source.is_some() => Candidates::OfSource,
        other => other,
    })
}

/// Jobs that failed and wait for their next attempt, in the terms of their index.
const FAILED: &str = "j.state IN (0 /* ready */, 6 /* parked */) AND j.steps > 0";

/// Events that arrived more than once.
const COPIED: &str = "SELECT c.id FROM ( \
         (SELECT a.event AS id FROM hapax.arrival a WHERE a.event < $1 AND a.event >= $2 \
          ORDER BY a.event DESC LIMIT $3) \
         UNION ALL \
         (SELECT n.event FROM hapax.copy n WHERE n.event < $1 AND n.event >= $2 \
          ORDER BY n.event DESC LIMIT $3)) c \
     ORDER BY c.id DESC LIMIT $3";

/// The events that are named, and those with an indexed value: $4 and $5.
const EXACT: &str = "SELECT c.id FROM ( \
         (SELECT n.id FROM unnest($4::uuid[]) n (id) WHERE n.id < $1 AND n.id >= $2) \
         UNION ALL \
         (SELECT v.event FROM unnest($5::uuid[]) h (hash) CROSS JOIN LATERAL ( \
              SELECT s.event FROM hapax.search_value s \
              WHERE s.hash = h.hash AND s.event < $1 AND s.event >= $2 \
              ORDER BY s.event DESC LIMIT $3) v)) c \
     ORDER BY c.id DESC LIMIT $3";

const ALL: &str = "SELECT w.id FROM hapax.body w WHERE w.id < $1 AND w.id >= $2 \
     ORDER BY w.id DESC LIMIT $3";

impl Candidates {
    fn all() -> Self {
        Self::Rows(ALL.to_owned())
    }
}

/// The events with a job in these states, if they are few enough to be sorted for a page; else all. Events
/// with a job in one of the `rare` states, and events in review, are added if `rare` is not empty.
async fn few(
    client: &mut PooledClient,
    open: &[&str],
    rare: &[&str],
) -> Result<Candidates, PgError> {
    let mut ids: Vec<Uuid> = Vec::new();
    for state in [open, rare].concat() {
        // The order is that of an index over this state, so that PostgreSQL reads this index.
        let order = match state {
            "ready" => "j.handler, j.lane, j.due_at, j.job",
            "leased" => "j.handler, j.due_at",
            "parked" => "j.handler, j.lane, j.resource, j.position, j.job",
            _rare => "j.state, j.job",
        };
        let most = LIST_SORTED_MAX.saturating_sub(ids.len()) + 1;
        let sql = format!(
            "SELECT j.event FROM hapax.job j WHERE j.state = {} ORDER BY {order} LIMIT {most}",
            jobs_in(&[state])
        );
        ids.extend(client.query(&sql, &[]).await?.iter().map(|row| row.get::<_, Uuid>(0)));
        if ids.len() > LIST_SORTED_MAX {
            return Ok(Candidates::all());
        }
    }
    if !rare.is_empty() {
        let most = LIST_SORTED_MAX.saturating_sub(ids.len()) + 1;
        let sql = format!(
            "SELECT e.id FROM hapax.event e \
             WHERE e.state <> 0 /* open */ AND e.state = hapax.event_state('review') \
             ORDER BY e.id LIMIT {most}"
        );
        ids.extend(client.query(&sql, &[]).await?.iter().map(|row| row.get::<_, Uuid>(0)));
        if ids.len() > LIST_SORTED_MAX {
            return Ok(Candidates::all());
        }
    }
    ids.sort_unstable_by(|a, b| b.cmp(a));
    ids.dedup();
    Ok(Candidates::Few(ids))
}

/// One page of jobs, newest event first.
pub(super) async fn jobs(
    shared: &Shared,
    filter: JobFilter,
) -> Result<Page<JobDetail>, StoreError> {
    let mut client = shared.pools.lists.checkout().await.map_err(read)?;
    let mut page = SlicedPage::begin(filter.limit);
    let mut slices = Slices::begin(filter.bound);
    let mut before = filter.before.map_or(Uuid::max(), |Cursor(before)| Uuid::from_u128(before));
    // The state is written into the statement, so that its partial index can be used. For a state without
    // an index in this order, all jobs are read and checked.
    let state = filter.phase.map(state_of);
    let listed = filter.phase.filter(|phase| match phase {
        Phase::Stale | Phase::Dead | Phase::Held | Phase::Review | Phase::Discarded => true,
        Phase::Ready | Phase::Leased | Phase::Parked | Phase::Done => false,
    });
    let condition = match listed.and(state) {
        Some(state) => format!("j.state = {state}"),
        None => "true".to_owned(),
    };
    let sql = format!(
        "SELECT j.job FROM hapax.job j WHERE {condition} AND j.job < $1 ORDER BY j.job DESC LIMIT $2"
    );
    loop {
        let rows = slices.next();
        let found = client.query(&sql, &[&before, &rows]).await.map_err(read)?;
        let ids: Vec<Uuid> = found.iter().map(|row: &Row| row.get(0)).collect();
        let is_last = (ids.len() as i64) < rows;
        let Some(last) = ids.last().copied() else { return Ok(page.page(None)) };
        let count = ids.len();
        let mut asked = Conditions::default();
        // The rows are known already. Expressions keep the indexes of states and sources out of the plan.
        asked.add("j.job = ANY (?)", ids);
        if let Some(tenant) = &filter.tenant {
            asked.add("e.tenant = ?", tenant.to_string());
        }
        if let Some(source) = &filter.source {
            asked.add("e.source || '' = ?", source.to_string());
        }
        if let Some(handler) = &filter.handler {
            asked.add("h.name = ?", handler.to_string());
        }
        if let Some(state) = state {
            asked.require(format!("j.state + 0 = {state}"));
        }
        if let Some(error) = &filter.error {
            asked.add("coalesce(j.error, '') = ?", error.clone());
        }
        if filter.forced {
            asked.require("j.run > 1");
        }
        let tail = format!("ORDER BY j.job DESC LIMIT {}", page.wanted());
        let items = read_jobs(&mut client, &asked, &tail).await.map_err(read)?;
        let items = items.into_iter().map(|job| (Cursor(job.id.0.as_u128()), job));
        if page.add(items) || is_last {
            return Ok(page.page(None));
        }
        before = last;
        if !slices.read(count) {
            return Ok(page.page(Some((Cursor(last.as_u128()), time_of(last)))));
        }
    }
}

/// Dead letters by their error, newest event first.
pub(super) async fn dead_groups(
    shared: &Shared,
    filter: JobFilter,
) -> Result<DeadGroups, StoreError> {
    let mut client = shared.pools.lists.checkout().await.map_err(read)?;
    let mut slices = Slices::begin(filter.bound);
    let (mut sums, mut before) = (DeadGroupSums::default(), Uuid::max());
    let mut asked = Conditions::default();
    if let Some(tenant) = &filter.tenant {
        asked.add("l.tenant = ?", tenant.to_string());
    }
    if let Some(source) = &filter.source {
        asked.add("h.source = ?", source.to_string());
    }
    if let Some(handler) = &filter.handler {
        asked.add("h.name = ?", handler.to_string());
    }
    let head = "SELECT l.lane FROM hapax.lane l JOIN hapax.handler h ON h.handler = l.handler";
    let lanes = asked.query(&mut client, head, "").await.map_err(read)?;
    let lanes: HashSet<i32> = lanes.iter().map(|row| row.get(0)).collect();
    let sql = format!(
        "SELECT j.job, j.lane, j.error, j.due_at FROM hapax.job j \
         WHERE j.state = {} AND j.job < $1 ORDER BY j.job DESC LIMIT $2",
        state_of(Phase::Dead)
    );
    loop {
        let rows = slices.next();
        let found = client.query(&sql, &[&before, &rows]).await.map_err(read)?;
        for row in found.iter().filter(|row| lanes.contains(&row.get(1))) {
            sums.add(row.get::<_, Option<&str>>(2).unwrap_or_default(), row.get(3));
        }
        let is_last = (found.len() as i64) < rows;
        let Some(last) = found.last().filter(|_| !is_last) else {
            return Ok(sums.groups(filter.limit, None));
        };
        before = last.get(0);
        if !slices.read(found.len()) {
            let more = client.query(&sql, &[&before, &1_i64]).await.map_err(read)?;
            let searched_to = (!more.is_empty()).then(|| time_of(before));
            return Ok(sums.groups(filter.limit, searched_to));
        }
    }
}
