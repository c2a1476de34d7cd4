//! Records how attempts ended, under their fences.

use hapax_core::Timestamp;
use hapax_core::delivery::{DeliveryAct, DeliveryPhase, DeliveryUnchanged};
use hapax_core::limits::ERROR_CHARS_MAX;
use hapax_core::store::{AttemptOutcome, AttemptVerdict, Held};
use rusqlite::Connection;

use super::Outbox;
use super::change::Reported;
use super::endpoints;
use super::row::{DeliveryRow, message_and_endpoint};
use crate::limits::FAST_ATTEMPT_MAX;

impl Outbox {
    /// Records how an attempt ended, if its fence still holds.
    pub(super) fn settle(
        &mut self,
        conn: &Connection,
        outcome: &AttemptOutcome,
        now: Timestamp,
    ) -> rusqlite::Result<Held> {
        let (seq, number) = message_and_endpoint(outcome.delivery);
        let row = match self.leased.get(&(seq, number)) {
            Some(row) => Some(row.clone()),
            None => DeliveryRow::find(conn, seq, number)?,
        };
        let Some(row) = row.filter(|row| row.is_under(outcome.fence)) else {
            return Ok(Held::Lost);
        };
        let took_ms = i64::try_from(outcome.took.as_millis()).unwrap_or(i64::MAX);
        let reported = Reported { took_ms: Some(took_ms), ..Reported::default() };
        let settled = match &outcome.verdict {
            AttemptVerdict::Delivered(answer)
            | AttemptVerdict::DeliveredLast { answer, reason: _ } => {
                let reported = Reported { answer: Some(answer), ..reported };
                self.act(conn, &row, &DeliveryAct::Delivered, reported, now)?
            }
            AttemptVerdict::Failed { error, answer, retry, says: _ } => {
                let error: String = error.chars().take(ERROR_CHARS_MAX).collect();
                let reported =
                    Reported { error: Some(&error), answer: answer.as_ref(), ..reported };
                let known = self.endpoints.get(&number).map(|endpoint| endpoint.policy.clone());
                let policy = known.map_or_else(|| endpoints::policy(conn, number), Ok)?;
                let failed = DeliveryAct::Failed { retry: *retry, policy: &policy };
                self.act(conn, &row, &failed, reported, now)?
            }
            AttemptVerdict::GivenBack => {
                self.act(conn, &row, &DeliveryAct::GivenBack, Reported::default(), now)?
            }
        };
        if let Ok(after) = &settled {
            if let Some(endpoint) = self.endpoints.get_mut(&number) {
                endpoint.is_fast =
                    after.phase == DeliveryPhase::Delivered && outcome.took < FAST_ATTEMPT_MAX;
            }
            if after.phase == DeliveryPhase::Dead {
                self.note_death(conn, number, now)?;
            }
            self.answered(conn, number, row.circuit, &outcome.verdict, now)?;
        }
        Ok(match settled {
            Ok(_) | Err(DeliveryUnchanged::AlreadyDelivered) => Held::Kept,
            Err(_lost) => Held::Lost,
        })
    }
}
