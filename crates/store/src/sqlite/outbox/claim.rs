//! Claiming: endpoints in turn, each with a bounded number of attempts in flight, within a bounded
//! share of the writer's time.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use hapax_core::Timestamp;
use hapax_core::circuit::{Admits, CircuitEvent};
use hapax_core::delivery::{DeliveryAct, KeyTurn};
use hapax_core::job::{Fence, Policy, Retry};
use hapax_core::message::Payload;
use hapax_core::store::{AttemptOutcome, DeliveryAsk, DeliveryClaim, Exchanged};
use rusqlite::{Connection, Row};

use super::change::Reported;
use super::row::{COLUMN_COUNT, COLUMNS, DeliveryRow, MessageIdentity};
use super::{Outbox, leases, next_due};
use crate::limits::{EXCHANGE_SLICE_MAX, EXPIRED_AT_ONCE, PARKED_AT_ONCE};
use crate::sqlite::row::{micros, timestamp};

/// The error of a delivery whose message has lost its bytes.
const NO_BYTES: &str = "the payload of this message is no longer in the database";

/// How long claims skip an endpoint if none of its due deliveries can be claimed, in microseconds.
const REST: i64 = 1_000_000;

/// A delivery that is due.
struct DueDelivery {
    row: DeliveryRow,
    named: MessageIdentity,
    message: String,
    /// The bytes to send; `None` if they are missing.
    body: Option<Bytes>,
}

/// The claims of one exchange.
#[derive(Default)]
struct ExchangeClaims {
    claims: Vec<DeliveryClaim>,
    bytes: usize,
    /// The next claim would exceed the bytes that were asked for.
    is_full: bool,
}

impl Outbox {
    /// Settles all outcomes, then claims. Returns also how many bytes the claims hold.
    pub(super) fn exchange(
        &mut self,
        conn: &Connection,
        outcomes: &[AttemptOutcome],
        ask: &DeliveryAsk,
        now: Timestamp,
    ) -> rusqlite::Result<(Exchanged, usize)> {
        let until = Instant::now() + EXCHANGE_SLICE_MAX;
        let settled = outcomes
            .iter()
            .map(|outcome| self.settle(conn, outcome, now))
            .collect::<rusqlite::Result<_>>()?;
        let ExchangeClaims { claims, bytes, .. } = self.claim(conn, ask, now, until)?;
        let next_due = self.turns.next_at().map(timestamp);
        Ok((Exchanged { settled, claims, next_due }, bytes))
    }

    fn claim(
        &mut self,
        conn: &Connection,
        ask: &DeliveryAsk,
        now: Timestamp,
        until: Instant,
    ) -> rusqlite::Result<ExchangeClaims> {
        if self.vault_keys != ask.vault_keys || self.claims_ahead != ask.claims_ahead {
            self.claims_ahead = ask.claims_ahead;
            self.vault_keys = Arc::clone(&ask.vault_keys);
            for number in self.endpoints.keys().copied().collect::<Vec<_>>() {
                self.reschedule(number);
            }
        }
        self.turns.begin(micros(now));
        let mut claims = ExchangeClaims::default();
        let mut is_first = true;
        // Every visit takes a delivery, ends a lease, or finds out that nothing is due.
        while claims.claims.len() < ask.limit
            && !claims.is_full
            && (std::mem::take(&mut is_first) || Instant::now() < until)
            && let Some(number) = self.turns.pop()
        {
            let left = ask.limit - claims.claims.len();
            let share = left.div_ceil(self.turns.waiting() + 1);
            self.visit(conn, number, share, ask, now, &mut claims)?;
        }
        Ok(claims)
    }

    /// Ends the leases of one endpoint that are over, and claims up to `share` of its deliveries.
    fn visit(
        &mut self,
        conn: &Connection,
        number: i64,
        share: usize,
        ask: &DeliveryAsk,
        now: Timestamp,
        claims: &mut ExchangeClaims,
    ) -> rusqlite::Result<()> {
        let Some(endpoint) = self.endpoints.get(&number) else {
            // The endpoint was deleted: only its leases are left.
            let lease_end = self.expire(conn, number, now)?;
            self.turns.set(number, lease_end);
            return Ok(());
        };
        if endpoint.lease_end <= micros(now) {
            self.expire(conn, number, now)?;
        }
        self.unpark(conn, number, now)?;
        let Some(endpoint) = self.endpoints.get(&number) else { return Ok(()) };
        let admits = endpoint.health.admits(now);
        let room = match admits {
            Admits::All => endpoint.claims_allowed(&self.vault_keys, self.claims_ahead) as usize,
            Admits::Probe => endpoint.claims_allowed(&self.vault_keys, false).min(1) as usize,
            Admits::None => 0,
        };
        let rate_limit = endpoint.limit_at(now);
        let within_rate =
            rate_limit.map_or(u32::MAX, |limit| limit.allowed(endpoint.health.paid_until, now));
        let room = room.min(within_rate as usize);
        let (mut taken, mut parked) = (0, 0);
        if room > 0 && endpoint.next_due <= micros(now) {
            let target = Arc::clone(&endpoint.target);
            let lease = endpoint.policy.lease;
            let payload = endpoint.record.settings.payload;
            let most = room.min(share);
            let is_probe = admits == Admits::Probe;
            let bytes_max = ask.bytes_max.saturating_sub(claims.bytes);
            let look = |taken: usize| match is_probe {
                true => least_tried(conn, number, micros(now), payload),
                false => due_for(conn, number, micros(now), most - taken, bytes_max, payload),
            };
            let mut due_now = VecDeque::from(look(0)?);
            let mut parked_before = 0;
            while taken < most {
                let Some(due) = due_now.pop_front() else {
                    // If some deliveries were parked, later ones may have their turn.
                    if parked == parked_before || parked >= PARKED_AT_ONCE {
                        break;
                    }
                    parked_before = parked;
                    due_now = look(taken)?.into();
                    continue;
                };
                let turn = self.turn(conn, &due.row)?;
                let claim = DeliveryAct::Claim { lease, turn };
                let reported = Reported { node: &ask.node, ..Reported::default() };
                if turn == KeyTurn::Later {
                    let waits = self.act(conn, &due.row, &claim, Reported::default(), now)?;
                    parked += usize::from(waits.is_ok());
                    continue;
                }
                let Some(body) = due.body else {
                    self.bury(conn, &due.row, &claim, reported, now)?;
                    taken += 1;
                    continue;
                };
                if !claims.claims.is_empty() && claims.bytes + body.len() > ask.bytes_max {
                    claims.is_full = true;
                    break;
                }
                if is_probe {
                    let lease_end = now.saturating_add(lease).unwrap_or(now);
                    let probed = CircuitEvent::Probed { lease_end };
                    self.judge(conn, number, probed, None, now)?;
                }
                let claimed = self.act(conn, &due.row, &claim, reported, now)?;
                let Ok(row) = claimed else { continue };
                claims.bytes += body.len();
                claims.claims.push(DeliveryClaim {
                    delivery: due.named.delivery(number),
                    fence: Fence(row.fence),
                    attempt: row.progress.attempt,
                    message: due.message,
                    body,
                    leased_until: timestamp(row.due_at),
                    endpoint: Arc::clone(&target),
                });
                taken += 1;
            }
            if taken > 0 {
                self.spend(conn, number, taken, now)?;
            }
            let mut next = next_due(conn, number)?;
            if taken == 0 && parked == 0 && !claims.is_full && next <= micros(now) {
                // Rows that cannot be claimed, such as those of a deleted message, must
                // not keep the others waiting.
                next = micros(now).saturating_add(REST);
            }
            if let Some(endpoint) = self.endpoints.get_mut(&number) {
                endpoint.next_due = next;
            }
        }
        self.reschedule(number);
        if claims.is_full && taken == 0 {
            // The endpoint had no turn: the next exchange begins with it.
            self.turns.set_first(number);
        }
        Ok(())
    }

    /// Leases of this endpoint that are over become lost attempts, some at a time. Returns when the next
    /// lease ends.
    fn expire(&mut self, conn: &Connection, number: i64, now: Timestamp) -> rusqlite::Result<i64> {
        let expired: Vec<DeliveryRow> = conn
            .prepare_cached(&format!(
                "SELECT {COLUMNS} FROM hapax_delivery d INDEXED BY hapax_delivery_leased
                 WHERE d.endpoint = ?1 AND d.state = 1 /* leased */ AND d.due_at <= ?2 ORDER BY d.due_at LIMIT ?3"
            ))?
            .query_map((number, micros(now), EXPIRED_AT_ONCE as i64), DeliveryRow::read)?
            .collect::<rusqlite::Result<_>>()?;
        for row in expired {
            let lost = self.act(conn, &row, &DeliveryAct::LeaseEnded, Reported::default(), now)?;
            assert!(lost.is_ok(), "only leased deliveries are read here");
        }
        let (in_flight, lease_end) = leases(conn, number)?;
        if let Some(endpoint) = self.endpoints.get_mut(&number) {
            debug_assert_eq!(endpoint.in_flight, in_flight, "the count is exact");
            endpoint.lease_end = lease_end;
        }
        Ok(lease_end)
    }

    /// A delivery without bytes can never be sent: it becomes a dead letter, which an operator sees.
    fn bury(
        &mut self,
        conn: &Connection,
        row: &DeliveryRow,
        claim: &DeliveryAct<'_>,
        reported: Reported<'_>,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        let Ok(row) = self.act(conn, row, claim, reported, now)? else { return Ok(()) };
        let policy = Policy { retry: Vec::new(), lease: std::time::Duration::ZERO };
        let failed = DeliveryAct::Failed { retry: Retry::Never, policy: &policy };
        let reported = Reported { error: Some(NO_BYTES), ..Reported::default() };
        let buried = self.act(conn, &row, &failed, reported, now)?;
        assert!(buried.is_ok(), "the writer has just claimed it");
        tracing::error!(message.seq = row.seq, "a delivery cannot be sent: {NO_BYTES}");
        Ok(())
    }
}

/// Deliveries to this endpoint that may be claimed, the one due longest first. The last one may exceed the bytes.
fn due_for(
    conn: &Connection,
    number: i64,
    now: i64,
    limit: usize,
    bytes_max: usize,
    payload: Payload,
) -> rusqlite::Result<Vec<DueDelivery>> {
    let mut statement = conn.prepare_cached(&due_sql(payload))?;
    let mut rows = statement.query((number, now, limit as i64))?;
    let (mut found, mut bytes) = (Vec::new(), 0);
    while bytes <= bytes_max
        && let Some(row) = rows.next()?
    {
        let due = DueDelivery::read(row)?;
        bytes += due.body.as_ref().map_or(0, Bytes::len);
        found.push(due);
    }
    Ok(found)
}

/// Of the deliveries that are due longest, the one with the fewest attempts, so that a delivery
/// that always fails does not keep the circuit open.
fn least_tried(
    conn: &Connection,
    number: i64,
    now: i64,
    payload: Payload,
) -> rusqlite::Result<Vec<DueDelivery>> {
    conn.prepare_cached(&least_tried_sql(payload))?
        .query_map((number, now, PARKED_AT_ONCE as i64), DueDelivery::read)?
        .collect()
}

pub(super) fn least_tried_sql(payload: Payload) -> String {
    let found = "SELECT x.message_seq FROM (
             SELECT message_seq, attempt, due_at FROM hapax_delivery INDEXED BY hapax_delivery_ready
             WHERE endpoint = ?1 AND state = 0 /* ready */ AND due_at <= ?2
             ORDER BY due_at, message_seq LIMIT ?3) x
         ORDER BY x.attempt, x.due_at LIMIT 1";
    let due = due_columns(payload);
    format!(
        "SELECT {due} FROM hapax_delivery d
         CROSS JOIN hapax_message m ON m.seq = d.message_seq
         LEFT JOIN hapax_message_body b ON b.seq = d.message_seq
         WHERE d.message_seq = ({found}) AND d.endpoint = ?1"
    )
}

/// The columns that [`DueDelivery::read`] reads.
fn due_columns(payload: Payload) -> String {
    let body = match payload {
        Payload::Fat => "b.body",
        // A message that was published before its endpoint wanted thin payloads has only the whole one.
        Payload::Thin => "coalesce(b.thin, b.body)",
    };
    format!("{COLUMNS}, m.id, m.created_at, m.fingerprint, {body}")
}

pub(super) fn due_sql(payload: Payload) -> String {
    let due = due_columns(payload);
    format!(
        "SELECT {due}
         FROM hapax_delivery d INDEXED BY hapax_delivery_ready
         CROSS JOIN hapax_message m ON m.seq = d.message_seq
         LEFT JOIN hapax_message_body b ON b.seq = d.message_seq
         WHERE d.endpoint = ?1 AND d.state = 0 /* ready */ AND d.due_at <= ?2
         ORDER BY d.due_at, d.message_seq LIMIT ?3"
    )
}

impl DueDelivery {
    fn read(row: &Row<'_>) -> rusqlite::Result<Self> {
        const FROM: usize = COLUMN_COUNT;
        let delivery = DeliveryRow::read(row)?;
        let named = MessageIdentity {
            seq: delivery.seq,
            created_at: row.get(FROM + 1)?,
            fingerprint: row.get(FROM + 2)?,
        };
        let body = row.get::<_, Option<Vec<u8>>>(FROM + 3)?.map(Bytes::from);
        Ok(Self { row: delivery, named, message: row.get(FROM)?, body })
    }
}
