//! Sending on SQLite: messages, the endpoints that get them, and their deliveries.
//!
//! The writer keeps every endpoint in memory: the types that it wants, how many of its deliveries
//! are under way, and when the next one is due ([`turns`]). A claim therefore reads only rows that
//! it takes, however many others wait. This state is loaded from the indexes at a start and after a
//! failed write, so that it contains no change that was rolled back. The pure life cycle in
//! [`hapax_core::delivery`] decides; [`change`] is the only place that records it.

mod alert_records;
mod change;
mod circuit;
mod claim;
mod endpoints;
mod expire;
mod operator_actions;
mod order;
mod own_messages;
mod plans;
mod prune;
mod publish;
mod reader;
mod row;
mod settle;
mod store;
#[cfg(test)]
mod tests;
mod turns;

use std::collections::HashMap;
use std::sync::Arc;

use hapax_core::delivery::DeliveryAct;
use hapax_core::endpoint::{EndpointId, EndpointRecord};
use hapax_core::job::Policy;
use hapax_core::store::DeliveryTarget;
use hapax_core::vault::KeyId;
use hapax_core::{Tenant, Timestamp};
use rusqlite::Connection;
use uuid::Uuid;

pub(super) use plans::{MissingScan, count_deliveries, endpoint_number};
pub(super) use prune::{MessageScan, slice as prune_slice};
pub(super) use publish::For;
#[cfg(test)]
pub(super) use reader::delivery_statement;
pub(super) use reader::message_note;

use super::meta;
use super::row::Dice;
use change::Reported;
use circuit::EndpointHealth;
use order::BusyKeys;
use row::{COLUMNS, DeliveryRow};
use turns::{NEVER, Turns};

/// The tenant of messages that name none and belong to no event.
pub(super) const DEFAULT_TENANT: &str = "default";

/// The state of sending that the writer keeps in memory.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    /// Endpoints that are not deleted.
    endpoints: HashMap<i64, EndpointState>,
    numbers: HashMap<EndpointId, i64>,
    /// The endpoints of each tenant, oldest first.
    of_tenant: HashMap<Tenant, Vec<i64>>,
    /// The rows of deliveries in flight, as this process claimed them, so that their outcomes need no
    /// lookup.
    leased: HashMap<(i64, i64), DeliveryRow>,
    turns: Turns,
    /// The keys of the vault, as the last claim named them.
    vault_keys: Arc<[KeyId]>,
    /// Whether the last claim came from a sender that holds claims beyond `max_in_flight`.
    claims_ahead: bool,
    /// The highest number of an endpoint, deleted ones included.
    last_endpoint: i64,
    /// The highest number of a message.
    last_message: i64,
    /// The last endpoint that this round of expiry has checked.
    expired_up_to: i64,
    /// The node that judges alerts, and until when in microseconds.
    alert_judge: Option<(Uuid, i64)>,
    /// For the jitter of waits.
    dice: Dice,
    /// Whether a delivery is due and the waiting sender has not been notified yet.
    woken: bool,
    /// Whether the open act has changed a row.
    wrote: bool,
}

/// How many times `max_in_flight` a sender may hold claims of a fast endpoint. The attempts then continue
/// while outcomes are committed.
const AHEAD: u32 = 8;

/// An endpoint in memory.
#[derive(Debug)]
struct EndpointState {
    record: EndpointRecord,
    target: Arc<DeliveryTarget>,
    policy: Policy,
    /// Deliveries that are leased.
    in_flight: u32,
    /// No lease ends before this.
    lease_end: i64,
    /// No delivery that waits is due before this.
    next_due: i64,
    /// The first message whose parked deliveries must be judged again, because the order was changed.
    unpark_from: Option<i64>,
    /// The order keys of its deliveries that are leased.
    busy_keys: BusyKeys,
    /// The recent answers of the endpoint.
    health: EndpointHealth,
    /// Whether its last attempt took so little time that further deliveries may be claimed before
    /// the attempts under way end.
    is_fast: bool,
}

impl EndpointState {
    fn new(record: EndpointRecord) -> Self {
        let target = Arc::new(DeliveryTarget::of(&record));
        let policy = record.settings.policy();
        Self {
            record,
            target,
            policy,
            in_flight: 0,
            lease_end: NEVER,
            next_due: NEVER,
            unpark_from: None,
            busy_keys: BusyKeys::default(),
            health: EndpointHealth::default(),
            is_fast: false,
        }
    }

    /// Replaces this endpoint by the changed one. Its deliveries stay.
    fn replace(&mut self, record: EndpointRecord) {
        let Self { record: new, target, policy, .. } = Self::new(record);
        (self.record, self.target, self.policy) = (new, target, policy);
    }

    /// How many claims the endpoint may get once its circuit admits any.
    fn claims_allowed(&self, vault_keys: &[KeyId], claims_ahead: bool) -> u32 {
        let opens = self.record.sealed.key_ids().all(|key| vault_keys.contains(&key));
        if self.record.disabled.is_some() || !opens {
            return 0;
        }
        let most = self.record.settings.max_in_flight;
        let slots = match self.health.circuit.slots {
            Some(slots) => slots.min(most),
            None if claims_ahead && self.may_claim_ahead() => most.saturating_mul(AHEAD),
            None => most,
        };
        slots.saturating_sub(self.in_flight)
    }

    fn may_claim_ahead(&self) -> bool {
        let is_closed = self.health.circuit.open_until.is_none();
        self.is_fast && is_closed && self.record.settings.rate_limit.is_none()
    }

    /// The time at which there is something to claim, or a lease ends.
    fn runnable_at(&self, vault_keys: &[KeyId], claims_ahead: bool) -> i64 {
        let due = match self.claims_allowed(vault_keys, claims_ahead) {
            0 => NEVER,
            _room => self.next_due.max(self.health.admits_from(self.record.settings.rate_limit)),
        };
        let unpark = if self.unpark_from.is_some() { 0 } else { NEVER };
        due.min(unpark).min(self.lease_end)
    }
}

impl Outbox {
    /// Loads the state as of the last commit, and keeps the keys of the vault.
    pub(super) fn load(conn: &Connection, vault_keys: Arc<[KeyId]>) -> rusqlite::Result<Self> {
        let mut loaded = Self { vault_keys, woken: true, ..Self::default() };
        for (number, record) in endpoints::load(conn)? {
            loaded.insert(number, record);
        }
        for (number, health) in circuit::load(conn)? {
            if let Some(endpoint) = loaded.endpoints.get_mut(&number) {
                endpoint.health = health;
            }
        }
        for (number, from) in endpoints::to_unpark(conn)? {
            if let Some(endpoint) = loaded.endpoints.get_mut(&number) {
                endpoint.unpark_from = Some(from);
            }
        }
        for number in loaded.endpoints.keys().copied().collect::<Vec<_>>() {
            loaded.refresh(conn, number)?;
        }
        // The leases of deleted endpoints still end.
        for number in endpoints::orphaned(conn)? {
            let (_, lease_end) = leases(conn, number)?;
            loaded.turns.set(number, lease_end);
        }
        let highest = |sql: &str| -> rusqlite::Result<i64> {
            Ok(conn.query_row(sql, [], |row| row.get::<_, Option<i64>>(0))?.unwrap_or(0))
        };
        loaded.last_endpoint = highest("SELECT max(endpoint) FROM hapax_endpoint")?;
        let newest = highest("SELECT max(seq) FROM hapax_message")?;
        loaded.last_message = newest.max(meta(conn, "last_message")?);
        Ok(loaded)
    }

    /// The keys of the vault, which must survive a reload.
    pub(super) fn vault_keys(&self) -> Arc<[KeyId]> {
        Arc::clone(&self.vault_keys)
    }

    /// Ends the leases of a process that died: the outcome of its attempts is unknown.
    pub(super) fn free_leases(
        &mut self,
        conn: &Connection,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        let leased: Vec<DeliveryRow> = conn
            .prepare_cached(&format!(
                "SELECT {COLUMNS} FROM hapax_delivery d INDEXED BY hapax_delivery_leased
                 WHERE d.state = 1 /* leased */"
            ))?
            .query_map([], DeliveryRow::read)?
            .collect::<rusqlite::Result<_>>()?;
        for row in leased {
            let lost = self.act(conn, &row, &DeliveryAct::LeaseEnded, Reported::default(), now)?;
            assert!(lost.is_ok(), "only leased deliveries are read here");
        }
        Ok(())
    }

    /// Whether a waiting sender must be notified; resets the flag.
    pub(super) fn take_woken(&mut self) -> bool {
        std::mem::take(&mut self.woken)
    }

    /// Whether the act has changed a row; resets the flag.
    fn take_wrote(&mut self) -> bool {
        std::mem::take(&mut self.wrote)
    }

    /// The endpoints after this one by their numbers, at most `limit`.
    pub(super) fn numbers_after(&self, after: i64, limit: usize) -> Vec<i64> {
        let mut numbers: Vec<i64> =
            self.endpoints.keys().copied().filter(|number| *number > after).collect();
        numbers.sort_unstable();
        numbers.truncate(limit);
        numbers
    }

    fn insert(&mut self, number: i64, record: EndpointRecord) {
        self.numbers.insert(record.id, number);
        self.of_tenant.entry(record.tenant.clone()).or_default().push(number);
        self.last_endpoint = self.last_endpoint.max(number);
        self.endpoints.insert(number, EndpointState::new(record));
    }

    fn remove(&mut self, number: i64) {
        self.turns.remove(number);
        let Some(gone) = self.endpoints.remove(&number) else { return };
        self.numbers.remove(&gone.record.id);
        if let Some(of_tenant) = self.of_tenant.get_mut(&gone.record.tenant) {
            of_tenant.retain(|one| *one != number);
            if of_tenant.is_empty() {
                self.of_tenant.remove(&gone.record.tenant);
            }
        }
    }

    /// Reads the next due time, the leases and the busy keys of an endpoint again.
    pub(super) fn refresh(&mut self, conn: &Connection, number: i64) -> rusqlite::Result<()> {
        self.leased.retain(|(_, endpoint), _| *endpoint != number);
        let next_due = next_due(conn, number)?;
        let (in_flight, lease_end) = leases(conn, number)?;
        if let Some(endpoint) = self.endpoints.get_mut(&number) {
            endpoint.next_due = next_due;
            endpoint.in_flight = in_flight;
            endpoint.lease_end = lease_end;
            endpoint.busy_keys = BusyKeys::load(conn, number)?;
        }
        self.reschedule(number);
        Ok(())
    }

    /// Records when an endpoint has work.
    fn reschedule(&mut self, number: i64) {
        if let Some(endpoint) = self.endpoints.get(&number) {
            self.turns.set(number, endpoint.runnable_at(&self.vault_keys, self.claims_ahead));
        }
    }

    /// Notes that a delivery of this endpoint is due from `due` on.
    fn note_due(&mut self, number: i64, due: i64) {
        if let Some(endpoint) = self.endpoints.get_mut(&number) {
            endpoint.next_due = endpoint.next_due.min(due);
            self.reschedule(number);
        }
    }
}

const NEXT_DUE: &str = "SELECT min(due_at) FROM hapax_delivery INDEXED BY hapax_delivery_ready
                        WHERE endpoint = ?1 AND state = 0 /* ready */";

const LEASES: &str =
    "SELECT count(*), min(due_at) FROM hapax_delivery INDEXED BY hapax_delivery_leased
                      WHERE endpoint = ?1 AND state = 1 /* leased */";

/// When the first delivery that waits for this endpoint is due.
fn next_due(conn: &Connection, number: i64) -> rusqlite::Result<i64> {
    conn.prepare_cached(NEXT_DUE)?
        .query_row([number], |row| Ok(row.get::<_, Option<i64>>(0)?.unwrap_or(NEVER)))
}

/// How many deliveries to this endpoint are leased, and when the first lease ends.
fn leases(conn: &Connection, number: i64) -> rusqlite::Result<(u32, i64)> {
    conn.prepare_cached(LEASES)?.query_row([number], |row| {
        Ok((row.get(0)?, row.get::<_, Option<i64>>(1)?.unwrap_or(NEVER)))
    })
}
