//! Handles a clock that was set back. Due times and the ends of leases are instants, so after a
//! correction of an hour every wait would take an hour more. Each wait is therefore stored with its
//! length, and an instant further ahead than that is moved closer: at startup, and when a step is
//! noticed.
//!
//! Nothing ends early: a lease that is shortened still has its whole length. The retention of
//! stored answers is not changed: the clock may be right again a moment later. An answer deleted
//! too early would let its request run twice; one kept too long only costs space.

use rusqlite::{Connection, OptionalExtension};

use super::row::{micros, timestamp};
use super::writer::Writer;
use crate::limits::{
    CLOCK_STEP_MIN, CLOCK_STEPS_KEPT, ENDPOINTS_CHECKED_AT_ONCE, PULLED_IN_AT_ONCE, SLICE_WAIT_MAX,
};

/// The writer's knowledge of its clock.
#[derive(Debug)]
pub(super) struct ClockWatch {
    /// The latest time since the last step of the clock.
    latest: i64,
    /// The reservation that was checked last, while there may be waits to shorten.
    pulling: Option<i64>,
    /// Whether a job may wait for too long. A check reads all waiting jobs.
    jobs_wait: bool,
    /// The endpoint that was checked last, while a delivery may wait for too long.
    endpoint: Option<i64>,
}

impl Default for ClockWatch {
    /// The state at a start: the clock may have been set back while the process was down.
    fn default() -> Self {
        Self { latest: i64::MIN, pulling: Some(0), jobs_wait: true, endpoint: Some(0) }
    }
}

impl ClockWatch {
    /// Whether some waits may have to be shortened.
    pub(super) fn is_pulling(&self) -> bool {
        self.pulling.is_some() || self.endpoint.is_some()
    }

    /// The time by which the clock was set back since the last call, if it was.
    fn notice(&mut self, now: i64) -> Option<i64> {
        let back = self.latest.saturating_sub(now);
        if back < CLOCK_STEP_MIN.as_micros() as i64 {
            self.latest = self.latest.max(now);
            return None;
        }
        let seconds = back / 1_000_000;
        tracing::warn!(seconds, "the clock was set back by {seconds} s: waits are shortened");
        *self = Self { latest: now, ..Self::default() };
        Some(back)
    }
}

/// Notices a step of the clock, and shortens a bounded number of waits, in a separate transaction.
pub(super) fn handle_step(writer: &mut Writer) -> rusqlite::Result<()> {
    let now = micros(writer.now());
    if writer.clock_watch.latest == i64::MIN {
        // The clock may have been set back while the process was down.
        writer.clock_watch.latest = newest_time(&writer.conn)?.unwrap_or(now);
    }
    if let Some(back) = writer.clock_watch.notice(now) {
        writer.in_transaction(|writer| remember_step(&writer.conn, now, back))?;
    }
    shorten_delivery_waits(writer, now)?;
    let Some(after) = writer.clock_watch.pulling else { return Ok(()) };
    let lanes = if writer.clock_watch.jobs_wait { writer.lanes.numbers() } else { Vec::new() };
    let (jobs, reached) = writer.in_transaction(|writer| {
        let jobs = pull_in_jobs(&writer.conn, &lanes, now, PULLED_IN_AT_ONCE)?;
        let reached = pull_in_reservations(&writer.conn, after, now, PULLED_IN_AT_ONCE)?;
        pull_in_plans(&writer.conn, now)?;
        Ok((jobs, reached))
    })?;
    writer.clock_watch.jobs_wait = jobs >= PULLED_IN_AT_ONCE;
    writer.clock_watch.pulling = match (writer.clock_watch.jobs_wait, reached) {
        (false, None) => None,
        (_, reached) => Some(reached.unwrap_or(i64::MAX)),
    };
    if jobs > 0 {
        writer.lanes.query_all_lanes();
        writer.shared.arrived.notify_waiters();
    }
    Ok(())
}

/// The time of the newest event.
fn newest_time(conn: &Connection) -> rusqlite::Result<Option<i64>> {
    conn.prepare_cached("SELECT received_at FROM hapax_event ORDER BY seq DESC LIMIT 1")?
        .query_row([], |row| row.get(0))
        .optional()
}

/// Records by how much times may differ from the order of their rows: lists for a span of time read that
/// much more.
fn remember_step(conn: &Connection, now: i64, back: i64) -> rusqlite::Result<()> {
    conn.prepare_cached("INSERT INTO hapax_clock_step (at, back) VALUES (?1, ?2)")?
        .execute((now, back))?;
    conn.prepare_cached(
        "DELETE FROM hapax_clock_step WHERE step <= (SELECT max(step) FROM hapax_clock_step) - ?1",
    )?
    .execute([CLOCK_STEPS_KEPT as i64])?;
    Ok(())
}

/// Shortens the waits of deliveries to some endpoints.
fn shorten_delivery_waits(writer: &mut Writer, now: i64) -> rusqlite::Result<()> {
    let Some(after) = writer.clock_watch.endpoint else { return Ok(()) };
    let numbers = writer.outbox.numbers_after(after, ENDPOINTS_CHECKED_AT_ONCE);
    let Some(mut reached) = numbers.last().copied() else {
        writer.clock_watch.endpoint = None;
        return Ok(());
    };
    let changed = writer.in_transaction(|writer| {
        let (mut changed, mut left) = (Vec::new(), PULLED_IN_AT_ONCE);
        for number in numbers {
            writer.outbox.shorten_pauses(&writer.conn, number, timestamp(now))?;
            let pulled = pull_in_deliveries(&writer.conn, number, now, left)?;
            if pulled > 0 {
                changed.push(number);
            }
            left -= pulled;
            if left == 0 {
                // The same endpoint may have more.
                reached = number - 1;
                break;
            }
        }
        Ok(changed)
    })?;
    for number in changed {
        writer.outbox.refresh(&writer.conn, number)?;
    }
    writer.clock_watch.endpoint = Some(reached);
    Ok(())
}

/// Shortens the waits of deliveries to one endpoint, at most `limit`; returns how many.
fn pull_in_deliveries(
    conn: &Connection,
    endpoint: i64,
    now: i64,
    limit: usize,
) -> rusqlite::Result<usize> {
    let mut pulled = 0;
    for state in [0, 1] {
        // The state is spelled out, so that the index of that state is used.
        pulled += conn
            .prepare_cached(&format!(
                "UPDATE hapax_delivery SET due_at = ?2 + wait WHERE (message_seq, endpoint) IN (
                     SELECT message_seq, endpoint FROM hapax_delivery
                     WHERE endpoint = ?1 AND state = {state} AND due_at > ?2
                       AND due_at > ?2 + wait LIMIT ?3)"
            ))?
            .execute((endpoint, now, (limit - pulled) as i64))?;
        if pulled >= limit {
            break;
        }
    }
    Ok(pulled)
}

/// Shortens the waits of ready, leased and held jobs, at most `limit`; returns how many.
fn pull_in_jobs(
    conn: &Connection,
    lanes: &[i64],
    now: i64,
    limit: usize,
) -> rusqlite::Result<usize> {
    let mut pulled = 0;
    for lane in lanes {
        for state in [0, 1, 5] {
            // The state is spelled out, so that the index of that state is used.
            pulled += conn
                .prepare_cached(&format!(
                    "UPDATE hapax_job SET due_at = ?2 + wait WHERE (event_seq, lane) IN (
                         SELECT event_seq, lane FROM hapax_job
                         WHERE lane = ?1 AND state = {state} AND due_at > ?2
                           AND due_at > ?2 + wait LIMIT ?3)"
                ))?
                .execute((lane, now, (limit - pulled) as i64))?;
            if pulled >= limit {
                return Ok(pulled);
            }
        }
    }
    Ok(pulled)
}

/// Makes the slices of plans due that are further ahead than any slice waits.
fn pull_in_plans(conn: &Connection, now: i64) -> rusqlite::Result<()> {
    conn.prepare_cached(
        "UPDATE hapax_plan SET next_at = ?1 WHERE state = 'running' AND next_at > ?1 + ?2",
    )?
    .execute((now, SLICE_WAIT_MAX.as_micros() as i64))?;
    Ok(())
}

/// The reservation that was checked last; `None` after the last one.
fn pull_in_reservations(
    conn: &Connection,
    after: i64,
    now: i64,
    limit: usize,
) -> rusqlite::Result<Option<i64>> {
    let last: Option<i64> = conn
        .prepare_cached(
            "SELECT max(rowid) FROM (SELECT rowid FROM hapax_reservation
             WHERE rowid > ?1 ORDER BY rowid LIMIT ?2)",
        )?
        .query_row((after, limit as i64), |row| row.get(0))?;
    let Some(last) = last else { return Ok(None) };
    conn.prepare_cached(
        "UPDATE hapax_reservation SET leased_until = ?3 + lease
         WHERE rowid > ?1 AND rowid <= ?2 AND leased_until > ?3 + lease",
    )?
    .execute((after, last, now))?;
    Ok(Some(last))
}
