//! The rows of messages and deliveries: how one is read, found and named.

use hapax_core::delivery::{DeliveryId, DeliveryPhase, DeliveryState};
use hapax_core::job::{Fence, Progress};
use rusqlite::{Connection, OptionalExtension, Row};
use uuid::Uuid;

use crate::sqlite::row::{LANE_BITS, SEQ_BITS, timestamp};

/// The column `state` of a delivery.
pub(super) const READY: i64 = 0;
pub(super) const LEASED: i64 = 1;
pub(super) const DELIVERED: i64 = 2;
pub(super) const DEAD: i64 = 3;
pub(super) const CANCELLED: i64 = 4;
pub(super) const PARKED: i64 = 5;

/// A delivery's phase from its column. An unknown number counts as dead, so that it is shown to an
/// operator.
pub(super) fn phase_of(state: i64) -> DeliveryPhase {
    match state {
        READY => DeliveryPhase::Ready,
        LEASED => DeliveryPhase::Leased,
        DELIVERED => DeliveryPhase::Delivered,
        CANCELLED => DeliveryPhase::Cancelled,
        PARKED => DeliveryPhase::Parked,
        _dead => DeliveryPhase::Dead,
    }
}

/// The column of a delivery's phase.
pub(super) fn state_of(phase: DeliveryPhase) -> i64 {
    match phase {
        DeliveryPhase::Ready => READY,
        DeliveryPhase::Leased => LEASED,
        DeliveryPhase::Delivered => DELIVERED,
        DeliveryPhase::Dead => DEAD,
        DeliveryPhase::Cancelled => CANCELLED,
        DeliveryPhase::Parked => PARKED,
    }
}

pub(super) const COLUMNS: &str = "d.message_seq, d.endpoint, d.state, d.due_at, d.fence, d.attempt, d.steps, \
                       d.lost, d.started_at, d.node, d.key, d.place, \
                       d.circuit, d.earlier_attempts";

/// The number of [`COLUMNS`].
pub(super) const COLUMN_COUNT: usize = 14;

/// A row of `hapax_delivery`, as far as its rules read it.
#[derive(Debug, Clone)]
pub(super) struct DeliveryRow {
    pub(super) seq: i64,
    pub(super) endpoint: i64,
    pub(super) phase: DeliveryPhase,
    pub(super) due_at: i64,
    pub(super) fence: i64,
    pub(super) progress: Progress,
    pub(super) started_at: Option<i64>,
    pub(super) node: Option<String>,
    /// The order key of its message.
    pub(super) key: Option<String>,
    /// Its place among the deliveries under that key.
    pub(super) place: Option<i64>,
    /// The number of the endpoint's circuit at the last claim.
    pub(super) circuit: i64,
    pub(super) earlier_attempts: u32,
}

impl DeliveryRow {
    /// Reads [`COLUMNS`].
    pub(super) fn read(row: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            seq: row.get(0)?,
            endpoint: row.get(1)?,
            phase: phase_of(row.get(2)?),
            due_at: row.get(3)?,
            fence: row.get(4)?,
            progress: Progress { attempt: row.get(5)?, steps: row.get(6)?, lost: row.get(7)? },
            started_at: row.get(8)?,
            node: row.get(9)?,
            key: row.get(10)?,
            place: row.get(11)?,
            circuit: row.get(12)?,
            earlier_attempts: row.get(13)?,
        })
    }

    pub(super) fn find(
        conn: &Connection,
        seq: i64,
        endpoint: i64,
    ) -> rusqlite::Result<Option<Self>> {
        conn.prepare_cached(&format!(
            "SELECT {COLUMNS} FROM hapax_delivery d WHERE d.message_seq = ?1 AND d.endpoint = ?2"
        ))?
        .query_row((seq, endpoint), Self::read)
        .optional()
    }

    /// The deliveries of a message.
    pub(super) fn of_message(conn: &Connection, seq: i64) -> rusqlite::Result<Vec<Self>> {
        conn.prepare_cached(&format!(
            "SELECT {COLUMNS} FROM hapax_delivery d WHERE d.message_seq = ?1 ORDER BY d.endpoint"
        ))?
        .query_map([seq], Self::read)?
        .collect()
    }

    pub(super) fn as_state(&self) -> DeliveryState {
        DeliveryState {
            phase: self.phase,
            progress: self.progress,
            earlier_attempts: self.earlier_attempts,
            due: timestamp(self.due_at),
        }
    }

    /// Whether this fence was given to a claim and still holds. A delivery that was never claimed, was
    /// given back or was replayed has a fence too, but no claim holds it.
    pub(super) fn is_under(&self, fence: Fence) -> bool {
        self.fence == fence.0 && self.started_at.is_some()
    }
}

/// The part of a message's row that names its deliveries.
#[derive(Debug, Clone, Copy)]
pub(super) struct MessageIdentity {
    pub(super) seq: i64,
    pub(super) created_at: i64,
    pub(super) fingerprint: [u8; 16],
}

impl MessageIdentity {
    /// The id of a delivery: a UUID of version 7 with the message's time, the endpoint and the row. The view
    /// `hapax_deliveries` makes the same id.
    pub(super) fn delivery(&self, endpoint: i64) -> DeliveryId {
        let mut bytes = [0; 16];
        let millis = (self.created_at / 1000) as u64;
        bytes[..6].copy_from_slice(&millis.to_be_bytes()[2..]);
        bytes[6] = 0x70 | (self.fingerprint[0] >> 4);
        bytes[7] = (self.fingerprint[0] << 4) | (self.fingerprint[1] >> 4);
        let low = (1 << 63) | ((endpoint as u64) << SEQ_BITS) | self.seq as u64;
        bytes[8..].copy_from_slice(&low.to_be_bytes());
        DeliveryId(Uuid::from_bytes(bytes))
    }

    /// The message of a delivery's id, if this database made that id.
    pub(super) fn find(conn: &Connection, id: DeliveryId) -> rusqlite::Result<Option<Self>> {
        let (seq, endpoint) = message_and_endpoint(id);
        let named = conn
            .prepare_cached("SELECT created_at, fingerprint FROM hapax_message WHERE seq = ?1")?
            .query_row([seq], |row| {
                Ok(Self { seq, created_at: row.get(0)?, fingerprint: row.get(1)? })
            })
            .optional()?;
        Ok(named.filter(|named| named.delivery(endpoint) == id))
    }
}

/// The message and the endpoint of a delivery's id; such a delivery need not exist.
pub(super) fn message_and_endpoint(id: DeliveryId) -> (i64, i64) {
    let low = id.0.as_u128() as u64;
    let seq = low & ((1 << SEQ_BITS) - 1);
    let endpoint = (low >> SEQ_BITS) & ((1 << LANE_BITS) - 1);
    (seq as i64, endpoint as i64)
}
