//! Order per key: which delivery of an endpoint waits for an earlier one, and which one is next.
//!
//! Keys and places are stored with every keyed delivery, so that an endpoint can keep order from the next
//! claim on. Publishing writes ready rows; the claim parks those that must wait. Every change that ends a
//! delivery readies the next one, in the same transaction.

use std::collections::HashMap;

use hapax_core::Timestamp;
use hapax_core::delivery::{DeliveryAct, DeliveryPhase, KeyTurn};
use rusqlite::{Connection, OptionalExtension};

use super::change::Reported;
use super::row::{COLUMNS, DeliveryRow};
use super::{EndpointState, Outbox};
use crate::limits::UNPARKED_AT_ONCE;

/// The keys of an endpoint's deliveries that are under way, each with their number: there may be several if they
/// were claimed before the endpoint kept order.
#[derive(Debug, Default)]
pub(super) struct BusyKeys(HashMap<String, u32>);

impl BusyKeys {
    pub(super) fn load(conn: &Connection, number: i64) -> rusqlite::Result<Self> {
        let mut busy = Self::default();
        let mut keys = conn.prepare_cached(BUSY_KEYS)?;
        let mut keys = keys.query([number])?;
        while let Some(row) = keys.next()? {
            busy.begin(row.get_ref(0)?.as_str()?);
        }
        Ok(busy)
    }

    pub(super) fn begin(&mut self, key: &str) {
        match self.0.get_mut(key) {
            Some(count) => *count += 1,
            None => drop(self.0.insert(key.to_owned(), 1)),
        }
    }

    pub(super) fn end(&mut self, key: &str) {
        match self.0.get_mut(key) {
            Some(count) if *count > 1 => *count -= 1,
            _last => drop(self.0.remove(key)),
        }
    }
}

pub(super) const BUSY_KEYS: &str = "SELECT key FROM hapax_delivery INDEXED BY hapax_delivery_leased
     WHERE endpoint = ?1 AND state = 1 /* leased */ AND key IS NOT NULL";

pub(super) const EARLIER_OPEN: &str = "SELECT 1 FROM hapax_delivery INDEXED BY hapax_delivery_key
     WHERE endpoint = ?1 AND key = ?2 AND place < ?3 AND state IN (0 /* ready */, 1 /* leased */, 5 /* parked */) LIMIT 1";

pub(super) const EARLIER_DEAD: &str =
    "SELECT 1 FROM hapax_delivery INDEXED BY hapax_delivery_dead_key
     WHERE endpoint = ?1 AND key = ?2 AND place < ?3 AND state = 3 /* dead */ LIMIT 1";

pub(super) fn first_open_sql() -> String {
    format!(
        "SELECT {COLUMNS} FROM hapax_delivery d INDEXED BY hapax_delivery_key
         WHERE d.endpoint = ?1 AND d.key = ?2 AND d.state IN (0 /* ready */, 1 /* leased */, 5 /* parked */) ORDER BY d.place LIMIT 1"
    )
}

pub(super) fn parked_sql() -> String {
    format!(
        "SELECT {COLUMNS} FROM hapax_delivery d INDEXED BY hapax_delivery_parked
         WHERE d.endpoint = ?1 AND d.state = 5 /* parked */ AND d.message_seq >= ?2
         ORDER BY d.message_seq LIMIT ?3"
    )
}

impl Outbox {
    /// Whether a delivery may be sent now. At an endpoint that keeps no order, every delivery may.
    pub(super) fn turn(&self, conn: &Connection, row: &DeliveryRow) -> rusqlite::Result<KeyTurn> {
        let (Some(key), Some(place)) = (&row.key, row.place) else { return Ok(KeyTurn::Now) };
        let endpoint = self.endpoints.get(&row.endpoint);
        let Some(endpoint) = endpoint.filter(|one| one.record.settings.keeps_order()) else {
            return Ok(KeyTurn::Now);
        };
        let waits = endpoint.busy_keys.0.contains_key(key)
            || conn.prepare_cached(EARLIER_OPEN)?.exists((row.endpoint, key, place))?
            || (endpoint.record.settings.parks_dead()
                && conn.prepare_cached(EARLIER_DEAD)?.exists((row.endpoint, key, place))?);
        Ok(if waits { KeyTurn::Later } else { KeyTurn::Now })
    }

    /// Readies the first open delivery under a key, if it is parked and no longer waits for
    /// anything.
    pub(super) fn ready_next(
        &mut self,
        conn: &Connection,
        number: i64,
        key: &str,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        let keeps_order = |endpoint: &EndpointState| endpoint.record.settings.keeps_order();
        if !self.endpoints.get(&number).is_some_and(keeps_order) {
            return Ok(());
        }
        let first = conn
            .prepare_cached(&first_open_sql())?
            .query_row((number, key), DeliveryRow::read)
            .optional()?;
        let Some(first) = first.filter(|row| row.phase == DeliveryPhase::Parked) else {
            return Ok(());
        };
        if self.turn(conn, &first)? == KeyTurn::Now {
            self.wake(conn, &first, now)?;
        }
        Ok(())
    }

    /// Readies parked deliveries of an endpoint whose order was changed, some at a time: the next claim
    /// judges them again.
    pub(super) fn unpark(
        &mut self,
        conn: &Connection,
        number: i64,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        let Some(endpoint) = self.endpoints.get(&number) else { return Ok(()) };
        let Some(from) = endpoint.unpark_from else { return Ok(()) };
        let parked: Vec<DeliveryRow> = conn
            .prepare_cached(&parked_sql())?
            .query_map((number, from, UNPARKED_AT_ONCE as i64), DeliveryRow::read)?
            .collect::<rusqlite::Result<_>>()?;
        for row in &parked {
            self.wake(conn, row, now)?;
        }
        let is_last = parked.len() < UNPARKED_AT_ONCE;
        let next = parked.last().filter(|_| !is_last).map(|row| row.seq + 1);
        self.set_unpark_from(conn, number, next)
    }

    /// Records the first message from which an endpoint's parked deliveries must be judged again.
    pub(super) fn set_unpark_from(
        &mut self,
        conn: &Connection,
        number: i64,
        from: Option<i64>,
    ) -> rusqlite::Result<()> {
        conn.prepare_cached(
            "UPDATE hapax_endpoint_state SET unpark_from = ?2 WHERE endpoint = ?1",
        )?
        .execute((number, from))?;
        self.wrote = true;
        if let Some(endpoint) = self.endpoints.get_mut(&number) {
            endpoint.unpark_from = from;
        }
        Ok(())
    }

    fn wake(
        &mut self,
        conn: &Connection,
        row: &DeliveryRow,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        let woken = self.act(conn, row, &DeliveryAct::Woken, Reported::default(), now)?;
        assert!(woken.is_ok(), "only parked deliveries are woken");
        self.woken = true;
        Ok(())
    }

    /// A place after all others, even after a restart.
    pub(super) fn last_place(&mut self, conn: &Connection) -> rusqlite::Result<i64> {
        self.last_message += 1;
        conn.prepare_cached(
            "UPDATE hapax_meta SET value = max(value, ?1) WHERE name = 'last_message'",
        )?
        .execute([self.last_message])?;
        Ok(self.last_message)
    }
}
