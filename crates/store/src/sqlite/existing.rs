//! The row of an event whose key arrives again, as the writer and the readers of copies read it.

use hapax_core::KeyHash;
use hapax_core::store::{KnownEvent, Status};
use rusqlite::{Connection, OptionalExtension};

use super::row::{self, EventState};
use crate::recent::Recent;

/// A stored event.
pub(super) struct Existing {
    pub(super) seq: i64,
    pub(super) recent: Recent,
    pub(super) received_at: i64,
}

impl Existing {
    /// The event with this number, as the transaction that is open on `conn` sees it.
    pub(super) fn at(conn: &Connection, seq: i64) -> rusqlite::Result<Option<Self>> {
        let existing = conn
            .prepare_cached(
                "SELECT id, body_hash, state, review, received_at, pruned
                 FROM hapax_event WHERE seq = ?1",
            )?
            .query_row([seq], |row| {
                let event_state = EventState::from_columns(row.get(2)?, row.get(3)?);
                let id = row::event_id(row.get(0)?);
                let status = row::status_of_pruned(row.get(5)?).unwrap_or(event_state.status());
                let known = KnownEvent { id, status, result: None };
                let body_hash = KeyHash(row.get(1)?);
                let recent =
                    Recent { body_hash, guard: None, known, review: event_state.waiting() };
                Ok(Self { seq, recent, received_at: row.get(4)? })
            })
            .optional()?;
        let Some(mut existing) = existing else { return Ok(None) };
        if existing.recent.known.status == Status::Ignored {
            let (status, result) = row::standing_of_jobs(conn, seq)?;
            existing.recent.known.status = status;
            existing.recent.known.result = result;
        }
        Ok(Some(existing))
    }
}
