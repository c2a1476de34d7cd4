//! Slices of plans over events: read in bounded statements, and taken by one call of
//! `functions/take_slice.sql`.

use std::collections::HashMap;

use bytes::Bytes;
use hapax_core::store::{
    EventAct, EventFilter, EventId, EventPlan, EventSlice, Held, NewJob, Plan, PlanWork,
    PlannedEvent, SliceSpan, Status,
};
use hapax_core::{SourceName, Tenant, Timestamp};
use tokio_postgres::Row;
use uuid::Uuid;

use super::Shared;
use super::connect::{PgError, PooledClient};
use super::jobs::only;
use super::operator_actions::JobColumns;
use super::reader::{Conditions, filtered, lossy, status_condition};
use super::row::{first_id, hash_of, past, text};
use crate::limits::{PLAN_BYTES, PLAN_SCAN, PLAN_SEARCH};

/// The events of a plan, with the columns that its conditions need.
const PLANNED: &str = "SELECT e.id, e.tenant, e.source, e.event_type, octet_length(w.body) \
     FROM hapax.body w JOIN hapax.event e ON e.id = w.id \
     LEFT JOIN LATERAL (SELECT min(hapax.rank(j.state, j.steps)) AS rank FROM hapax.job j \
         WHERE j.job >= e.id AND j.job <= hapax.last_job(e.id)) j ON true";

/// The place before the first event that a plan may take.
pub(super) fn before_first(work: &EventPlan) -> Uuid {
    work.filter.since.map_or(Uuid::nil(), first_id)
}

/// How many events a plan that is made at this instant would take.
pub(super) async fn count(
    shared: &Shared,
    work: &EventPlan,
    instant: Timestamp,
) -> Result<u64, PgError> {
    let (mut after, mut total) = (before_first(work), 0);
    let mut client = shared.pools.admin.checkout().await?;
    loop {
        let scan = scan(&mut client, work, instant, after, PLAN_SCAN).await?;
        total += scan.rows.len() as u64;
        if scan.is_last {
            return Ok(total);
        }
        after = scan.through;
    }
}

/// The next slice of a plan, with at most `count` events after the event `after`.
pub(super) async fn slice(
    shared: &Shared,
    plan: &Plan,
    after: Uuid,
    count: usize,
) -> Result<EventSlice, PgError> {
    let PlanWork::Events(work) = &plan.work else { return Err(PgError::Gone) };
    let mut client = shared.pools.admin.checkout().await?;
    let mut scan = scan(&mut client, work, plan.created_at, after, count).await?;
    let mut bodies = HashMap::new();
    if work.act.writes_jobs() {
        let mut bytes = 0;
        let fit = scan.rows.iter().take_while(|row| {
            let fits = bytes < PLAN_BYTES;
            bytes += usize::try_from(row.get::<_, i32>(4)).unwrap_or_default();
            fits
        });
        let fit = fit.count();
        scan.cut(fit);
        let ids: Vec<Uuid> = scan.rows.iter().map(|row| row.get(0)).collect();
        let sql = "SELECT b.id, b.body FROM hapax.body b WHERE b.id = ANY ($1)";
        let rows = client.query(sql, &[&ids]).await?;
        let body = |row: &Row| (row.get::<_, Uuid>(0), Bytes::copy_from_slice(row.get(1)));
        bodies = rows.iter().map(body).collect();
    }
    let events = scan.rows.iter().map(|row| PlannedEvent {
        id: EventId(row.get(0)),
        tenant: Tenant::new(row.get::<_, &str>(1)),
        source: SourceName::new(row.get::<_, &str>(2)),
        event_type: row.get::<_, Option<&[u8]>>(3).map(lossy),
        body: bodies.remove(&row.get::<_, Uuid>(0)).unwrap_or_default(),
        jobs: Vec::new(),
    });
    let events = events.collect();
    let (after, through) = (after.as_u128(), scan.through.as_u128());
    let span = SliceSpan { after, through, is_last: scan.is_last };
    Ok(EventSlice { plan: plan.id, work: (**work).clone(), events, span })
}

/// One bounded read of the events after a place.
struct EventScan {
    /// The events that the plan takes, oldest first.
    rows: Vec<Row>,
    /// The last event that was read.
    through: Uuid,
    /// Whether no event follows.
    is_last: bool,
}

impl EventScan {
    /// Keeps only the first `count` events, and ends the read with the last of them.
    fn cut(&mut self, count: usize) {
        if count < self.rows.len() {
            self.rows.truncate(count);
            self.is_last = false;
            self.through = self.rows.last().map_or(self.through, |row| row.get(0));
        }
    }
}

async fn scan(
    client: &mut PooledClient,
    work: &EventPlan,
    instant: Timestamp,
    after: Uuid,
    count: usize,
) -> Result<EventScan, PgError> {
    // A search reads the body of every event, so it reads fewer events at a time.
    let most = if work.filter.text.is_some() { PLAN_SEARCH } else { PLAN_SCAN };
    let until = work.until(instant);
    let limit = i64::try_from(most).unwrap_or(i64::MAX);
    let found =
        client.query(candidates(work.filter.status), &[&after, &past(until), &limit]).await?;
    let ids: Vec<Uuid> = found.iter().map(|row| row.get(0)).collect();
    let is_last = ids.len() < most;
    let Some(through) = ids.last().copied() else {
        return Ok(EventScan { rows: Vec::new(), through: after, is_last });
    };
    let mut asked = Conditions::default();
    asked.add("w.id = ANY (?)", ids);
    let filter = EventFilter { until: Some(until), ..work.filter.clone() };
    filtered(&mut asked, &filter);
    // Only jobs that were dead or in review before the plan was made are part of it.
    match filter.status {
        None => {}
        Some(status @ (Status::Dead | Status::Review)) => {
            let word = status.as_str();
            let waits = match status {
                Status::Review => "e.state = hapax.event_state('review') OR ",
                _dead => "",
            };
            let instant = asked.bind(instant);
            let mut was_so = format!(
                "SELECT FROM hapax.job n JOIN hapax.handler h ON h.handler = n.handler \
                 WHERE n.job >= e.id AND n.job <= hapax.last_job(e.id) \
                   AND n.state = hapax.job_state('{word}') AND n.due_at < {instant}"
            );
            if let Some(handler) = &work.handler {
                let name = asked.bind(text(handler.as_str()));
                was_so.push_str(&format!(" AND h.name = {name}"));
            }
            asked.require(format!("({waits}EXISTS ({was_so}))"));
        }
        Some(status) => asked.require(status_condition(status)),
    }
    // Reads one event more than may be taken, to know whether more follow.
    let tail = format!("ORDER BY e.id LIMIT {}", count.saturating_add(1));
    let rows = asked.query(client, PLANNED, &tail).await?;
    let mut scan = EventScan { rows, through, is_last };
    scan.cut(count);
    Ok(scan)
}

/// Events after a place that may be in a plan, oldest first. Dead letters and jobs in review are found by
/// their index, handler by handler.
fn candidates(status: Option<Status>) -> &'static str {
    match status {
        Some(Status::Dead) => {
            "SELECT DISTINCT j.event FROM hapax.handler h CROSS JOIN LATERAL ( \
                 SELECT x.event FROM hapax.job x \
                 WHERE x.handler = h.handler AND x.state = 4 /* dead */ \
                   AND x.job > hapax.last_job($1) AND x.job < $2 ORDER BY x.job LIMIT $3) j \
             ORDER BY j.event LIMIT $3"
        }
        Some(Status::Review) => {
            "SELECT DISTINCT c.event FROM ( \
                 SELECT j.event FROM hapax.handler h CROSS JOIN LATERAL ( \
                     SELECT x.event FROM hapax.job x \
                     WHERE x.handler = h.handler AND x.state = 7 /* review */ \
                       AND x.job > hapax.last_job($1) AND x.job < $2 ORDER BY x.job LIMIT $3) j \
                 UNION ALL \
                 (SELECT e.id FROM hapax.event e \
                  WHERE e.state <> 0 /* open */ AND e.state = 1 /* review */ \
                    AND e.id > $1 AND e.id < $2 ORDER BY e.id LIMIT $3)) c \
             ORDER BY c.event LIMIT $3"
        }
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
        | None => {
            "SELECT w.id FROM hapax.body w WHERE w.id > $1 AND w.id < $2 ORDER BY w.id LIMIT $3"
        }
    }
}

/// Takes a slice: see [`hapax_core::store::Plans::take_slice`].
pub(super) async fn take(shared: &Shared, slice: &EventSlice) -> Result<Held, PgError> {
    let EventSlice { plan, work, events, span } = slice;
    let mut client = shared.pools.work.checkout().await?;
    let (mut columns, mut counts) = (JobColumns::default(), Vec::with_capacity(events.len()));
    for PlannedEvent { tenant, source, jobs, .. } in events {
        columns.add(shared, &mut client, tenant, source, jobs).await?;
        counts.push(count_of(jobs));
    }
    let ids: Vec<Uuid> = events.iter().map(|event| event.id.0).collect();
    let force = matches!(work.act, EventAct::Replay { force: true });
    let rows = client
        .query(
            "SELECT held, changed FROM hapax.take_slice(\
                 $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)",
            &[
                &plan.0,
                &Uuid::from_u128(span.after),
                &Uuid::from_u128(span.through),
                &span.is_last,
                &work.act.as_str(),
                &force,
                &work.handler.as_ref().map(|handler| text(handler.as_str())),
                &ids,
                &counts,
                &columns.lanes,
                &columns.resources,
                &columns.places,
                &columns.hopeless,
                &shared.now(),
            ],
        )
        .await?;
    let row = only(&rows)?;
    let changed: Vec<Uuid> = row.get(1);
    shared.remove_from_caches(&changed.into_iter().map(hash_of).collect::<Vec<_>>());
    Ok(if row.get(0) { Held::Kept } else { Held::Lost })
}

fn count_of(jobs: &[NewJob]) -> i32 {
    i32::try_from(jobs.len()).unwrap_or(i32::MAX)
}
