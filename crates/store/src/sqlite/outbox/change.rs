//! Applies the decision of [`hapax_core::delivery::step`] to a delivery's row. Every change of a
//! delivery goes through here.

use hapax_core::Timestamp;
use hapax_core::delivery::{
    AttemptRecord, DeliveryAct, DeliveryChange, DeliveryPhase, DeliveryUnchanged,
    KeyPositionChange, OUTCOME_LOST, step,
};
use hapax_core::store::HandlerAnswer;
use rusqlite::Connection;

use super::Outbox;
use super::row::{DeliveryRow, state_of};
use super::turns::NEVER;
use crate::sqlite::row::micros;

/// The values an act writes to columns that no rule reads.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Reported<'a> {
    /// The error of a failed attempt, or why the delivery is cancelled.
    pub(super) error: Option<&'a str>,
    /// The answer to the attempt that ended.
    pub(super) answer: Option<&'a HandlerAnswer>,
    /// How long that attempt took, in milliseconds.
    pub(super) took_ms: Option<i64>,
    /// The node that claims.
    pub(super) node: &'a str,
}

impl<'a> Reported<'a> {
    /// The answer's body, unless it was empty.
    fn answer_body(&self) -> Option<&'a str> {
        self.answer.map(|answer| answer.body.as_str()).filter(|body| !body.is_empty())
    }
}

impl Outbox {
    /// Decides the change that an act makes to a delivery, and records it. Returns the row as it is
    /// afterwards.
    pub(super) fn act(
        &mut self,
        conn: &Connection,
        row: &DeliveryRow,
        act: &DeliveryAct<'_>,
        reported: Reported<'_>,
        now: Timestamp,
    ) -> rusqlite::Result<Result<DeliveryRow, DeliveryUnchanged>> {
        let change = match step(&row.as_state(), act, now, self.dice.roll()) {
            Ok(change) => change,
            Err(unchanged) => return Ok(Err(unchanged)),
        };
        record_attempt(conn, row, &change, reported)?;
        let mut after = DeliveryRow {
            phase: change.phase,
            due_at: micros(change.due),
            fence: row.fence + i64::from(change.voids_fence),
            progress: change.progress,
            earlier_attempts: change.earlier_attempts,
            ..row.clone()
        };
        if change.phase == DeliveryPhase::Leased {
            after.started_at = Some(micros(now));
            after.node = Some(reported.node.to_owned());
            let endpoint = self.endpoints.get(&row.endpoint);
            after.circuit = endpoint.map_or(0, |one| one.health.circuit.number);
        } else if change.voids_fence {
            // No claim holds the new fence.
            after.started_at = None;
            after.node = None;
        }
        if change.place == KeyPositionChange::Last && row.key.is_some() {
            after.place = Some(self.last_place(conn)?);
        }
        write(conn, row, &after, &change, reported, now)?;
        self.wrote = true;
        let place = (after.seq, after.endpoint);
        match after.phase {
            DeliveryPhase::Leased => drop(self.leased.insert(place, after.clone())),
            _over => drop(self.leased.remove(&place)),
        }
        self.note(row, &after);
        // Any attempt that ends may have kept an earlier delivery waiting, if the endpoint kept no
        // order when it began.
        let ends = row.phase == DeliveryPhase::Leased
            || !change.phase.is_open()
            || change.place == KeyPositionChange::Last;
        if let Some(key) = row.key.as_deref().filter(|_| ends) {
            self.ready_next(conn, row.endpoint, key, now)?;
        }
        Ok(Ok(after))
    }

    /// Applies the change to the state in memory.
    fn note(&mut self, before: &DeliveryRow, after: &DeliveryRow) {
        let Some(endpoint) = self.endpoints.get_mut(&after.endpoint) else { return };
        if let Some(key) = &before.key {
            match (before.phase == DeliveryPhase::Leased, after.phase == DeliveryPhase::Leased) {
                (false, true) => endpoint.busy_keys.begin(key),
                (true, false) => endpoint.busy_keys.end(key),
                _same => {}
            }
        }
        if before.phase == DeliveryPhase::Leased {
            endpoint.in_flight = endpoint.in_flight.saturating_sub(1);
            if endpoint.in_flight == 0 {
                endpoint.lease_end = NEVER;
            }
        }
        match after.phase {
            DeliveryPhase::Leased => {
                endpoint.in_flight += 1;
                endpoint.lease_end = endpoint.lease_end.min(after.due_at);
            }
            DeliveryPhase::Ready => endpoint.next_due = endpoint.next_due.min(after.due_at),
            DeliveryPhase::Parked
            | DeliveryPhase::Delivered
            | DeliveryPhase::Dead
            | DeliveryPhase::Cancelled => {}
        }
        self.reschedule(after.endpoint);
    }
}

fn write(
    conn: &Connection,
    before: &DeliveryRow,
    after: &DeliveryRow,
    change: &DeliveryChange,
    reported: Reported<'_>,
    now: Timestamp,
) -> rusqlite::Result<()> {
    let wait = (after.due_at - micros(now)).max(0);
    let written = match change.phase {
        // The two phases that every delivery passes through write the fewest columns.
        DeliveryPhase::Leased => conn
            .prepare_cached(
                "UPDATE hapax_delivery SET state = 1 /* leased */, due_at = ?3, wait = ?4, fence = ?5, attempt = ?6,
                     started_at = ?7, node = ?8, circuit = ?10
                 WHERE message_seq = ?1 AND endpoint = ?2 AND fence = ?9",
            )?
            .execute((
                after.seq,
                after.endpoint,
                after.due_at,
                wait,
                after.fence,
                after.progress.attempt,
                after.started_at,
                reported.node,
                before.fence,
                after.circuit,
            ))?,
        DeliveryPhase::Delivered => conn
            .prepare_cached(
                "UPDATE hapax_delivery SET state = 2 /* delivered */, due_at = ?4, wait = 0, error = NULL, took_ms = ?5,
                     answer_status = ?6, answer = ?7
                 WHERE message_seq = ?1 AND endpoint = ?2 AND fence = ?3",
            )?
            .execute((
                after.seq,
                after.endpoint,
                before.fence,
                after.due_at,
                reported.took_ms,
                reported.answer.map(|answer| answer.status),
                reported.answer_body(),
            ))?,
        DeliveryPhase::Ready
        | DeliveryPhase::Parked
        | DeliveryPhase::Dead
        | DeliveryPhase::Cancelled => {
            let error = match change.attempt {
                AttemptRecord::Lost => Some(OUTCOME_LOST),
                _reported => reported.error,
            };
            // The last error of a delivery that is replayed is in its list of attempts.
            let keeps_error = error.is_none() && before.phase.is_open();
            conn.prepare_cached(
                "UPDATE hapax_delivery SET state = ?4, due_at = ?5, wait = ?6, fence = ?7, attempt = ?8,
                     steps = ?9, lost = ?10, started_at = ?11, node = ?12,
                     error = iif(?13, error, ?14), took_ms = NULL, answer_status = NULL, answer = NULL,
                     place = ?15, earlier_attempts = ?16
                 WHERE message_seq = ?1 AND endpoint = ?2 AND fence = ?3",
            )?
            .execute(rusqlite::params![
                after.seq,
                after.endpoint,
                before.fence,
                state_of(after.phase),
                after.due_at,
                wait,
                after.fence,
                after.progress.attempt,
                after.progress.steps,
                after.progress.lost,
                after.started_at,
                after.node,
                keeps_error,
                error,
                after.place,
                after.earlier_attempts,
            ])?
        }
    };
    assert_eq!(written, 1, "the writer has just read this row, and nothing else writes it");
    Ok(())
}

fn record_attempt(
    conn: &Connection,
    row: &DeliveryRow,
    change: &DeliveryChange,
    reported: Reported<'_>,
) -> rusqlite::Result<()> {
    match change.attempt {
        AttemptRecord::Keep => Ok(()),
        AttemptRecord::Lost => {
            let lost = Reported { error: Some(OUTCOME_LOST), ..Reported::default() };
            note_attempt(conn, row, lost)
        }
        AttemptRecord::Failed => note_attempt(conn, row, reported),
        AttemptRecord::Delivered => conn
            .prepare_cached(
                "INSERT OR REPLACE INTO hapax_delivery_attempt
                     (message_seq, endpoint, attempt, started_at, took_ms, answer_status, answer, node)
                 SELECT message_seq, endpoint, attempt, coalesce(started_at, due_at), took_ms,
                        answer_status, answer, coalesce(node, '')
                 FROM hapax_delivery WHERE message_seq = ?1 AND endpoint = ?2",
            )?
            .execute((row.seq, row.endpoint))
            .map(|_| ()),
        AttemptRecord::Remove => conn
            .prepare_cached(
                "DELETE FROM hapax_delivery_attempt
                 WHERE message_seq = ?1 AND endpoint = ?2 AND attempt = ?3",
            )?
            .execute((row.seq, row.endpoint, row.progress.attempt))
            .map(|_| ()),
    }
}

fn note_attempt(
    conn: &Connection,
    row: &DeliveryRow,
    reported: Reported<'_>,
) -> rusqlite::Result<()> {
    conn.prepare_cached(
        "INSERT OR REPLACE INTO hapax_delivery_attempt
             (message_seq, endpoint, attempt, started_at, took_ms, answer_status, answer, error, node)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
    )?
    .execute((
        row.seq,
        row.endpoint,
        row.progress.attempt,
        row.started_at.unwrap_or(0),
        reported.took_ms,
        reported.answer.map(|answer| answer.status),
        reported.answer_body(),
        reported.error,
        row.node.as_deref().unwrap_or(""),
    ))?;
    Ok(())
}
