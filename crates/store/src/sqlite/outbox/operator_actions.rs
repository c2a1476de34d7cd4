//! The acts of operators on messages and deliveries, and the end of deliveries to deleted
//! endpoints.

use hapax_core::Timestamp;
use hapax_core::delivery::{
    DeliveryAct, DeliveryId, DeliveryPhase, DeliveryUnchanged, ENDPOINT_DELETED,
};
use hapax_core::store::{Action, DeliveryReplayed, DeliverySkipped, MessageAct, MessageRef};
use rusqlite::{Connection, OptionalExtension};

use super::Outbox;
use super::change::Reported;
use super::endpoints::note_action;
use super::row::{COLUMNS, DeliveryRow, MessageIdentity, message_and_endpoint};

impl Outbox {
    pub(super) fn replay_delivery(
        &mut self,
        conn: &Connection,
        delivery: DeliveryId,
        by: &Action,
        now: Timestamp,
    ) -> rusqlite::Result<DeliveryReplayed> {
        let (seq, number) = message_and_endpoint(delivery);
        if MessageIdentity::find(conn, delivery)?.is_none() {
            return Ok(DeliveryReplayed::Unknown);
        }
        if !is_whole(conn, seq)? {
            return Ok(DeliveryReplayed::Gone);
        }
        let Some(row) = DeliveryRow::find(conn, seq, number)? else {
            return Ok(DeliveryReplayed::Unknown);
        };
        if !self.endpoints.contains_key(&number) {
            return Ok(DeliveryReplayed::Gone);
        }
        let replay = self.replay_of(&row);
        match self.act(conn, &row, &replay, Reported::default(), now)? {
            Ok(_) => {
                self.woken = true;
                note_action(conn, Some(number), Some(seq), "replay", by)?;
                Ok(DeliveryReplayed::Due)
            }
            Err(DeliveryUnchanged::AlreadyOpen) => Ok(DeliveryReplayed::AlreadyOpen),
            Err(unchanged) => unreachable!("a replay is refused only if it is open: {unchanged:?}"),
        }
    }

    /// The replay of a delivery. A dead delivery keeps its place if the later ones under its key
    /// wait for it.
    pub(super) fn replay_of(&self, row: &DeliveryRow) -> DeliveryAct<'static> {
        let endpoint = self.endpoints.get(&row.endpoint);
        let parks_key = endpoint.is_some_and(|one| one.record.settings.parks_dead());
        DeliveryAct::Replay { parks_key }
    }

    pub(super) fn skip_delivery(
        &mut self,
        conn: &Connection,
        delivery: DeliveryId,
        by: &Action,
        now: Timestamp,
    ) -> rusqlite::Result<DeliverySkipped> {
        let (seq, number) = message_and_endpoint(delivery);
        if MessageIdentity::find(conn, delivery)?.is_none() {
            return Ok(DeliverySkipped::Unknown);
        }
        let Some(row) = DeliveryRow::find(conn, seq, number)? else {
            return Ok(DeliverySkipped::Unknown);
        };
        let why = by.reason.clone().unwrap_or_else(|| format!("skipped by {}", by.who));
        let reported = Reported { error: Some(&why), ..Reported::default() };
        Ok(match self.act(conn, &row, &DeliveryAct::Skip, reported, now)? {
            Ok(_) => {
                note_action(conn, Some(number), Some(seq), "skip", by)?;
                DeliverySkipped::Skipped
            }
            Err(DeliveryUnchanged::AlreadyOpen) => DeliverySkipped::Sending,
            Err(_over) => DeliverySkipped::AlreadyOver,
        })
    }

    pub(super) fn change_message(
        &mut self,
        conn: &Connection,
        message: &MessageRef,
        act: MessageAct,
        by: &Action,
        now: Timestamp,
    ) -> rusqlite::Result<Option<Vec<DeliveryId>>> {
        let named = conn
            .prepare_cached(
                "SELECT seq, created_at, fingerprint FROM hapax_message WHERE id = ?1 AND tenant = ?2",
            )?
            .query_row((&message.id, message.tenant.as_str()), |row| {
                Ok(MessageIdentity { seq: row.get(0)?, created_at: row.get(1)?, fingerprint: row.get(2)? })
            })
            .optional()?;
        let Some(named) = named else { return Ok(None) };
        let cancelled_by = || format!("cancelled by {}", by.who);
        let cancelled = by.reason.clone().unwrap_or_else(cancelled_by);
        let mut changed = Vec::new();
        for row in DeliveryRow::of_message(conn, named.seq)? {
            let (act, why) = match act {
                MessageAct::Cancel => (DeliveryAct::Cancel, Some(cancelled.as_str())),
                // The delivery was delivered or cancelled.
                MessageAct::Replay
                    if row.phase == DeliveryPhase::Delivered
                        || !self.endpoints.contains_key(&row.endpoint) =>
                {
                    continue;
                }
                MessageAct::Replay => (self.replay_of(&row), None),
            };
            let reported = Reported { error: why, ..Reported::default() };
            if self.act(conn, &row, &act, reported, now)?.is_ok() {
                changed.push(named.delivery(row.endpoint));
            }
        }
        if !changed.is_empty() {
            self.woken = true;
            let what = match act {
                MessageAct::Cancel => "cancel",
                MessageAct::Replay => "replay",
            };
            note_action(conn, None, Some(named.seq), what, by)?;
        }
        Ok(Some(changed))
    }

    /// Cancels up to `limit` open deliveries of deleted endpoints. Returns true if there may be more.
    pub(super) fn cancel_orphans(
        &mut self,
        conn: &Connection,
        limit: usize,
        now: Timestamp,
    ) -> rusqlite::Result<bool> {
        let why = Reported { error: Some(ENDPOINT_DELETED), ..Reported::default() };
        let mut left = limit;
        while left > 0 {
            let Some(number) = next_orphaned(conn)? else { return Ok(false) };
            let orphans: Vec<DeliveryRow> = conn
                .prepare_cached(&orphans_sql())?
                .query_map((number, left as i64), DeliveryRow::read)?
                .collect::<rusqlite::Result<_>>()?;
            for row in &orphans {
                let cancelled = self.act(conn, row, &DeliveryAct::Cancel, why, now)?;
                assert!(cancelled.is_ok(), "only open deliveries are read here");
            }
            if orphans.len() < left {
                // A deleted endpoint gets no further deliveries.
                conn.prepare_cached("UPDATE hapax_endpoint SET orphans = 0 WHERE endpoint = ?1")?
                    .execute([number])?;
            }
            left -= orphans.len();
        }
        Ok(true)
    }
}

/// A deleted endpoint that may have open deliveries.
fn next_orphaned(conn: &Connection) -> rusqlite::Result<Option<i64>> {
    conn.prepare_cached("SELECT endpoint FROM hapax_endpoint WHERE orphans = 1 LIMIT 1")?
        .query_row([], |row| row.get(0))
        .optional()
}

/// The open deliveries of an endpoint, each state by its own index.
pub(super) fn orphans_sql() -> String {
    let open = |state: i64, index: &str| {
        format!(
            "SELECT {COLUMNS} FROM hapax_delivery d INDEXED BY {index}
             WHERE d.endpoint = ?1 AND d.state = {state}"
        )
    };
    format!(
        "{} UNION ALL {} UNION ALL {} LIMIT ?2",
        open(0, "hapax_delivery_ready"),
        open(1, "hapax_delivery_leased"),
        open(5, "hapax_delivery_parked")
    )
}

/// Whether a message still has its bytes.
fn is_whole(conn: &Connection, seq: i64) -> rusqlite::Result<bool> {
    conn.prepare_cached("SELECT 1 FROM hapax_message_body WHERE seq = ?1")?.exists([seq])
}
