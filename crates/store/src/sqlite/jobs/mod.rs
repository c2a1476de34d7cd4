//! Jobs in SQLite: written with their event, claimed by state, settled through the fence.
//!
//! Every function here runs on the writer's connection inside a transaction that its caller opens
//! and commits. The pure life cycle in [`hapax_core::job`] decides; this module finds the rows and
//! records the result. Order is in [`super::order`], SQL handlers in [`super::sql_handlers`].

mod change;
mod claim;
mod operator_actions;
mod row;
mod settle;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use hapax_core::job::{HandlerName, WorkLocation, jittered};
use hapax_core::order::OrderPolicy;
use hapax_core::store::{Action, HandlerRef, HandlerSpec, NewJob};
use hapax_core::{SourceName, Tenant, Timestamp};
use rusqlite::{Connection, Row};

pub(super) use change::Reported;
pub(super) use claim::ClaimParameters;
use row::AT_REST;
#[cfg(test)]
pub(super) use row::overdue_sql;
pub(super) use row::{JobRow, answer_of, job_id, row_and_lane};

use super::fresh_events::FreshEvents;
use super::new_rows::{self, NewJobRow};
use super::order;
use super::row::{DEAD, Dice, LANE_BITS, READY, micros, timestamp};

/// The most lanes whose exact next due time is looked up. If more are needed, the handler counts as
/// due now.
const LANES_ASKED_MAX: usize = 16;

/// The error for an event that needs a lane beyond the bound.
pub(super) const NO_LANE_LEFT: &str = "there are four million pairs of tenant and handler, and no \
                                       more can be numbered";

/// The lanes of this database, and the handlers that this node has announced.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    handlers: HashMap<HandlerRef, i64>,
    lanes: HashMap<(i64, i64), i64>,
    by_lane: HashMap<i64, TenantLane>,
    specs: HashMap<HandlerRef, Arc<HandlerSpec>>,
    /// Handlers that an operator has paused.
    paused: HashSet<HandlerRef>,
    /// The highest number of a lane.
    last_lane: i64,
    /// Where the next claim of a handler starts its round over the tenants.
    turns: HashMap<HandlerRef, usize>,
    freed: bool,
    /// Events that their first claim need not read.
    pub(super) fresh: FreshEvents,
    /// Whether a job was readied and waiting workers have not been notified yet.
    woken: bool,
    /// For the jitter of waits.
    dice: Dice,
}

#[derive(Debug)]
struct TenantLane {
    handler: HandlerRef,
    tenant: Tenant,
    /// No job of the lane is due before this, as far as is known: most lanes need no query.
    quiet_until: i64,
}

impl Lanes {
    /// Loads the lanes as the last commit left them, and keeps what this node announced.
    pub(super) fn load(
        conn: &Connection,
        specs: HashMap<HandlerRef, Arc<HandlerSpec>>,
        freed: bool,
    ) -> rusqlite::Result<Self> {
        let mut loaded = Self { specs, freed, ..Self::default() };
        let mut handlers =
            conn.prepare("SELECT handler, source, name, paused_at IS NOT NULL FROM hapax_handler")?;
        let mut handlers = handlers.query([])?;
        while let Some(row) = handlers.next()? {
            let name = handler_of(row, 1)?;
            if row.get(3)? {
                loaded.paused.insert(name.clone());
            }
            loaded.handlers.insert(name, row.get(0)?);
        }
        let mut rows = conn.prepare(
            "SELECT l.lane, l.pair, l.handler, h.source, h.name, p.tenant
             FROM hapax_lane l JOIN hapax_handler h ON h.handler = l.handler
             JOIN hapax_pair p ON p.pair = l.pair",
        )?;
        let mut rows = rows.query([])?;
        while let Some(row) = rows.next()? {
            let (lane, pair, handler): (i64, i64, i64) = (row.get(0)?, row.get(1)?, row.get(2)?);
            let name = handler_of(row, 3)?;
            let tenant = Tenant::new(row.get_ref(5)?.as_str()?);
            loaded.lanes.insert((pair, handler), lane);
            loaded
                .by_lane
                .insert(lane, TenantLane { handler: name, tenant, quiet_until: i64::MIN });
            loaded.last_lane = loaded.last_lane.max(lane);
        }
        Ok(loaded)
    }

    /// The lanes by their numbers.
    pub(super) fn numbers(&self) -> Vec<i64> {
        self.by_lane.keys().copied().collect()
    }

    /// Forgets when each lane is next due, so that the next claim queries all lanes.
    pub(super) fn query_all_lanes(&mut self) {
        for lane in self.by_lane.values_mut() {
            lane.quiet_until = i64::MIN;
        }
    }

    /// The state that must survive a reload.
    pub(super) fn announced(&self) -> (HashMap<HandlerRef, Arc<HandlerSpec>>, bool) {
        (self.specs.clone(), self.freed)
    }

    /// Announces the node's handlers. The first time, leases of a process that died are ended at
    /// once; external workers keep their leases.
    pub(super) fn announce(
        &mut self,
        conn: &Connection,
        handlers: Vec<HandlerSpec>,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        self.specs =
            handlers.into_iter().map(|spec| (spec.handler.clone(), Arc::new(spec))).collect();
        self.query_all_lanes();
        let first_time = !std::mem::replace(&mut self.freed, true);
        for lane in self.by_lane.keys().copied().collect::<Vec<_>>() {
            let Some(spec) = self.spec_of(lane).cloned() else { continue };
            if first_time && spec.workplace != WorkLocation::Pulled {
                self.expire(conn, lane, i64::MAX, now)?;
            }
            order::ready_unheld(conn, self, lane, spec.order.as_ref(), now)?;
        }
        Ok(())
    }

    pub(super) fn spec_of(&self, lane: i64) -> Option<&Arc<HandlerSpec>> {
        self.specs.get(&self.by_lane.get(&lane)?.handler)
    }

    /// The tenant of a lane's events.
    pub(super) fn tenant_of(&self, lane: i64) -> Tenant {
        self.by_lane.get(&lane).expect("a job's lane is known").tenant.clone()
    }

    fn workplace_of(&self, lane: i64) -> WorkLocation {
        self.spec_of(lane).map_or(WorkLocation::Inside, |spec| spec.workplace)
    }

    fn lane(
        &mut self,
        conn: &Connection,
        pair: i64,
        tenant: &Tenant,
        source: &SourceName,
        name: &HandlerName,
    ) -> rusqlite::Result<i64> {
        let handler_ref = HandlerRef { source: source.clone(), handler: name.clone() };
        let handler = self.handler_number(conn, &handler_ref)?;
        if let Some(lane) = self.lanes.get(&(pair, handler)) {
            return Ok(*lane);
        }
        if !self.has_room_for(1) {
            let full = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_FULL);
            return Err(rusqlite::Error::SqliteFailure(full, Some(NO_LANE_LEFT.to_owned())));
        }
        conn.execute("INSERT INTO hapax_lane (pair, handler) VALUES (?1, ?2)", (pair, handler))?;
        let lane = conn.last_insert_rowid();
        self.last_lane = self.last_lane.max(lane);
        self.lanes.insert((pair, handler), lane);
        let tenant = tenant.clone();
        self.by_lane
            .insert(lane, TenantLane { handler: handler_ref, tenant, quiet_until: i64::MAX });
        Ok(lane)
    }

    fn handler_number(&mut self, conn: &Connection, name: &HandlerRef) -> rusqlite::Result<i64> {
        if let Some(handler) = self.handlers.get(name) {
            return Ok(*handler);
        }
        conn.execute(
            "INSERT INTO hapax_handler (source, name) VALUES (?1, ?2)",
            (name.source.as_str(), name.handler.as_str()),
        )?;
        let handler = conn.last_insert_rowid();
        self.handlers.insert(name.clone(), handler);
        Ok(handler)
    }

    /// Pauses a handler, which may have no job yet. False if it was paused already.
    pub(super) fn pause(
        &mut self,
        conn: &Connection,
        handler: HandlerRef,
        by: &Action,
    ) -> rusqlite::Result<bool> {
        let number = self.handler_number(conn, &handler)?;
        conn.execute(
            "UPDATE hapax_handler SET paused_at = ?2, paused_by = ?3, pause_reason = ?4
             WHERE handler = ?1 AND paused_at IS NULL",
            (number, micros(by.at), &by.who, &by.reason),
        )?;
        Ok(self.paused.insert(handler))
    }

    /// Ends the pause of a handler. False if it was not paused.
    pub(super) fn resume(
        &mut self,
        conn: &Connection,
        handler: &HandlerRef,
    ) -> rusqlite::Result<bool> {
        conn.execute(
            "UPDATE hapax_handler SET paused_at = NULL, paused_by = NULL, pause_reason = NULL
             WHERE source = ?1 AND name = ?2",
            (handler.source.as_str(), handler.handler.as_str()),
        )?;
        self.query_all_lanes();
        self.woken = true;
        Ok(self.paused.remove(handler))
    }

    /// Whether there is a lane for this handler.
    pub(super) fn has(&self, pair: i64, source: &SourceName, handler: &HandlerName) -> bool {
        let name = HandlerRef { source: source.clone(), handler: handler.clone() };
        self.handlers.get(&name).is_some_and(|handler| self.lanes.contains_key(&(pair, *handler)))
    }

    /// Whether this many new lanes can be numbered: a job's id has a fixed number of bits for the
    /// lane.
    pub(super) fn has_room_for(&self, lanes: usize) -> bool {
        let last = self.last_lane.saturating_add(i64::try_from(lanes).unwrap_or(i64::MAX));
        last < 1 << LANE_BITS
    }

    /// Writes the jobs of an event in the open transaction.
    pub(super) fn write(
        &mut self,
        conn: &Connection,
        event: EventAt<'_>,
        jobs: &[NewJob],
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        let mut rows = Vec::with_capacity(jobs.len());
        self.add_rows(conn, event, jobs, now, &mut rows)?;
        new_rows::insert_jobs(conn, &rows)
    }

    /// Adds the jobs of an event to `rows`, which the caller writes in the event's own transaction.
    /// Returns true if any of them waits for work.
    pub(super) fn add_rows(
        &mut self,
        conn: &Connection,
        event: EventAt<'_>,
        jobs: &[NewJob],
        now: Timestamp,
        rows: &mut Vec<NewJobRow>,
    ) -> rusqlite::Result<bool> {
        let mut waits = false;
        for job in jobs {
            let lane = self.lane(conn, event.pair, event.tenant, event.source, &job.handler)?;
            let first_wait = self
                .spec_of(lane)
                .and_then(|spec| spec.policy.retry.first().copied())
                .unwrap_or(Duration::ZERO);
            let wait = jittered(first_wait, self.dice.roll());
            let wait = wait.as_micros() as i64;
            let (state, due) = match job.hopeless {
                Some(_) => (DEAD, micros(now)),
                None => (READY, micros(now).saturating_add(wait)),
            };
            rows.push(NewJobRow {
                seq: event.seq,
                lane,
                state,
                due_at: due,
                place: job.place.clone(),
                error: job.hopeless.clone(),
                wait,
            });
            if state == READY {
                waits = true;
                self.note_due(lane, due);
            }
        }
        Ok(waits)
    }

    /// Notes that a job of this lane is due from `due` on.
    pub(super) fn note_due(&mut self, lane: i64, due: i64) {
        if let Some(lane) = self.by_lane.get_mut(&lane) {
            lane.quiet_until = lane.quiet_until.min(due);
        }
    }

    /// Notes that a job that waited for others is ready: waiting workers must be notified.
    pub(super) fn wake(&mut self, lane: i64, due: i64) {
        self.note_due(lane, due);
        self.woken = true;
    }

    /// Whether waiting workers must be notified; resets the flag.
    pub(super) fn take_woken(&mut self) -> bool {
        std::mem::take(&mut self.woken)
    }

    /// When the next job of a handler is due, or its lease ends. The cached times of lanes may be
    /// too early, so the earliest lanes are queried until one is confirmed.
    pub(super) fn next_due(
        &mut self,
        conn: &Connection,
        handler: &HandlerRef,
        now: Timestamp,
    ) -> rusqlite::Result<Option<Timestamp>> {
        if self.paused.contains(handler) {
            return Ok(None);
        }
        for _ in 0..LANES_ASKED_MAX {
            let lanes = self.by_lane.iter().filter(|(_, lane)| lane.handler == *handler);
            let earliest = lanes.min_by_key(|(_, lane)| lane.quiet_until);
            let Some((&number, known)) = earliest.map(|(number, lane)| (number, lane.quiet_until))
            else {
                return Ok(None);
            };
            let exact = next_in(conn, number, i64::MIN, micros(now))?.unwrap_or(i64::MAX);
            if let Some(lane) = self.by_lane.get_mut(&number) {
                lane.quiet_until = exact;
            }
            if exact == known {
                return Ok((exact != i64::MAX).then(|| timestamp(exact)));
            }
        }
        Ok(Some(Timestamp::UNIX_EPOCH))
    }

    /// The highest number of a lane; `None` if no handler's marks may ever be deleted.
    pub(super) fn last_with_old_marks(&self) -> Option<i64> {
        self.specs.values().any(|spec| forgets_marks(spec)).then_some(self.last_lane)
    }

    /// The source of a lane whose marks may be deleted once they are old.
    pub(super) fn forgets_marks(&self, lane: i64) -> Option<&SourceName> {
        self.spec_of(lane).filter(|spec| forgets_marks(spec)).map(|spec| &spec.handler.source)
    }

    /// How order is kept in a lane. If its handler no longer keeps an order, the answer is
    /// `latest`, under which marks only grow.
    pub(super) fn policy_of(&self, lane: i64) -> OrderPolicy {
        let order = self.spec_of(lane).and_then(|spec| spec.order.as_ref());
        order.map_or(OrderPolicy::Latest, |rule| rule.policy.clone())
    }
}

/// The handler whose source is in the column `at` and whose name is in the next column.
pub(super) fn handler_of(row: &Row<'_>, at: usize) -> rusqlite::Result<HandlerRef> {
    Ok(HandlerRef {
        source: SourceName::new(row.get_ref(at)?.as_str()?),
        handler: HandlerName::new(row.get_ref(at + 1)?.as_str()?),
    })
}

/// In a sequence or a machine the next event needs the mark, however late it arrives: those marks
/// stay.
fn forgets_marks(spec: &HandlerSpec) -> bool {
    spec.order.as_ref().is_some_and(|rule| matches!(rule.policy, OrderPolicy::Latest))
}

/// The time after `after` at which the first job of a lane is due, its first lease ends or its
/// first deadline passes. A deadline that has passed counts only while no job of its resource is
/// leased: until then the held job stays held.
fn next_in(conn: &Connection, lane: i64, after: i64, now: i64) -> rusqlite::Result<Option<i64>> {
    conn.prepare_cached(&format!(
        "SELECT min(due_at) FROM (
             SELECT min(due_at) AS due_at FROM hapax_job WHERE lane = ?1 AND state = 0 /* ready */ AND due_at > ?2
             UNION ALL
             SELECT min(due_at) FROM hapax_job WHERE lane = ?1 AND state = 1 /* leased */
             UNION ALL
             SELECT min(due_at) FROM hapax_job WHERE lane = ?1 AND state = 5 /* held */ AND due_at > ?3
             UNION ALL
             SELECT * FROM (SELECT due_at FROM hapax_job AS held
                            WHERE lane = ?1 AND state = 5 /* held */ AND due_at <= ?3 AND {AT_REST}
                            ORDER BY due_at LIMIT 1))"
    ))?
    .query_row((lane, after, now), |row| row.get(0))
}

/// An event that jobs are written for.
#[derive(Debug, Clone, Copy)]
pub(super) struct EventAt<'a> {
    pub(super) seq: i64,
    pub(super) pair: i64,
    pub(super) tenant: &'a Tenant,
    pub(super) source: &'a SourceName,
}
