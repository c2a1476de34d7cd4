//! The circuits of endpoints: loaded at the start, changed by outcomes, and written in the same transaction.
//! [`hapax_core::circuit`] decides.

use std::time::Duration;

use hapax_core::Timestamp;
use hapax_core::circuit::{
    Admits, Circuit, CircuitEvent, TRIED_FIRST, only_failed_reason, open_reason, step,
};
use hapax_core::endpoint::{Disabled, DisabledBy};
use hapax_core::rate_limit::{RELEASE_FOR, RateLimit, SLACK, limit_at, next_at};
use hapax_core::store::{AttemptVerdict, EndpointSignal};
use rusqlite::{Connection, Row};

use super::{EndpointState, Outbox};
use crate::sqlite::row::{micros, timestamp};

/// The longest pause that an endpoint may ask for.
const PAUSE_MAX: Duration = Duration::from_secs(86_400);

/// The circuit of an endpoint, the pause that it asked for, and how much of its rate limit is used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct EndpointHealth {
    pub(super) circuit: Circuit,
    pub(super) blocked_until: Option<Timestamp>,
    /// The time until which its attempts are paid for under its rate limit; see
    /// [`hapax_core::rate_limit`].
    pub(super) paid_until: Option<Timestamp>,
    /// The end of the time over which the deliveries of an endpoint that was enabled are spread
    /// out.
    pub(super) spread_until: Option<Timestamp>,
}

impl EndpointHealth {
    /// The deliveries that may be claimed now.
    pub(super) fn admits(&self, now: Timestamp) -> Admits {
        match self.blocked_until {
            Some(until) if until > now => Admits::None,
            Some(_) | None => self.circuit.admits(now),
        }
    }

    /// The time from which a delivery may be claimed, in microseconds. `own`: the endpoint's rate
    /// limit.
    pub(super) fn admits_from(&self, own: Option<RateLimit>) -> i64 {
        let Self { circuit, blocked_until, paid_until, spread_until } = self;
        let paid = match own {
            Some(_) => paid_until.map(next_at),
            None => paid_until.map(next_at).zip(*spread_until).map(|(paid, end)| paid.min(end)),
        };
        circuit.open_until.max(*blocked_until).max(paid).map_or(i64::MIN, micros)
    }
}

/// The endpoints whose circuit is not in its initial state.
pub(super) fn load(conn: &Connection) -> rusqlite::Result<Vec<(i64, EndpointHealth)>> {
    conn.prepare(
        "SELECT endpoint, circuit, failures, failing_since, open_until, open_for, slots, blocked_until,
                rate_at, spread_until
         FROM hapax_endpoint_state
         WHERE circuit > 0 OR failures > 0 OR blocked_until IS NOT NULL OR rate_at IS NOT NULL
            OR spread_until IS NOT NULL",
    )?
    .query_map([], read)?
    .collect()
}

fn read(row: &Row<'_>) -> rusqlite::Result<(i64, EndpointHealth)> {
    let time = |at: usize| -> rusqlite::Result<Option<Timestamp>> {
        Ok(row.get::<_, Option<i64>>(at)?.map(timestamp))
    };
    let open_for: i64 = row.get(5)?;
    let circuit = Circuit {
        number: row.get(1)?,
        failures: row.get(2)?,
        failing_since: time(3)?,
        open_until: time(4)?,
        open_for: Duration::from_micros(open_for.unsigned_abs()),
        slots: row.get(6)?,
    };
    let (blocked_until, paid_until, spread_until) = (time(7)?, time(8)?, time(9)?);
    Ok((row.get(0)?, EndpointHealth { circuit, blocked_until, paid_until, spread_until }))
}

impl Outbox {
    /// Applies the end of a claim to the circuit of its endpoint. An outcome under another number
    /// of the circuit is ignored.
    pub(super) fn answered(
        &mut self,
        conn: &Connection,
        number: i64,
        circuit: i64,
        verdict: &AttemptVerdict,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        let now = timestamp(micros(now));
        let Some(endpoint) = self.endpoints.get(&number) else { return Ok(()) };
        if endpoint.health.circuit.number != circuit {
            return Ok(());
        }
        let max_in_flight = endpoint.record.settings.max_in_flight;
        let before = endpoint.record.standing();
        match verdict {
            AttemptVerdict::Delivered(_)
            | AttemptVerdict::Failed { says: EndpointSignal::Works, .. } => {
                self.judge(conn, number, CircuitEvent::Works { max_in_flight }, None, now)?;
            }
            AttemptVerdict::GivenBack
            | AttemptVerdict::Failed { says: EndpointSignal::Nothing, .. } => {
                self.judge(conn, number, CircuitEvent::Nothing, None, now)?;
            }
            AttemptVerdict::Failed { says: EndpointSignal::Fails, error, .. } => {
                self.fails(conn, number, error, now)?;
            }
            AttemptVerdict::Failed { says: EndpointSignal::Pauses(wait), error, .. } => {
                if let Some(endpoint) = self.endpoints.get_mut(&number) {
                    let until = timestamp(micros(now.saturating_add(*wait).unwrap_or(now)));
                    let blocked = &mut endpoint.health.blocked_until;
                    *blocked = (*blocked).max(Some(until));
                }
                self.fails(conn, number, error, now)?;
            }
            AttemptVerdict::Failed { says: EndpointSignal::Disable, error: reason, .. }
            | AttemptVerdict::DeliveredLast { reason, .. } => {
                self.give_up(conn, number, reason.clone(), now)?;
            }
        }
        self.publish_standing(conn, number, before, now)
    }

    fn fails(
        &mut self,
        conn: &Connection,
        number: i64,
        error: &str,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        self.judge(conn, number, CircuitEvent::Fails, Some(error), now)?;
        let is_hopeless = self.endpoints.get(&number).is_some_and(|endpoint| {
            endpoint.record.settings.auto_disable && endpoint.health.circuit.has_only_failed(now)
        });
        if is_hopeless {
            self.give_up(conn, number, only_failed_reason(error), now)?;
        }
        Ok(())
    }

    /// Disables an endpoint. Its circuit becomes half-open.
    fn give_up(
        &mut self,
        conn: &Connection,
        number: i64,
        reason: String,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        self.judge(conn, number, CircuitEvent::GivenUp, None, now)?;
        let Some(endpoint) = self.endpoints.get_mut(&number) else { return Ok(()) };
        if endpoint.record.disabled.is_some() {
            return Ok(());
        }
        conn.prepare_cached(
            "UPDATE hapax_endpoint SET disabled_at = ?2, disabled_reason = ?3, disabled_by = ?4,
                 version = version + 1
             WHERE endpoint = ?1",
        )?
        .execute((number, micros(now), &reason, DisabledBy::Automatic.as_str()))?;
        let id = endpoint.record.id;
        tracing::warn!(endpoint = %id, "the endpoint {id} is disabled: {reason}");
        endpoint.record.disabled = Some(Disabled { at: now, reason, by: DisabledBy::Automatic });
        endpoint.record.version += 1;
        self.reschedule(number);
        Ok(())
    }

    /// Spreads out the held deliveries of an endpoint that is enabled now.
    pub(super) fn spread(
        &mut self,
        conn: &Connection,
        number: i64,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        let Some(endpoint) = self.endpoints.get_mut(&number) else { return Ok(()) };
        endpoint.health.spread_until = now.saturating_add(RELEASE_FOR).ok();
        write(conn, number, endpoint)
    }

    /// Moves the times of an endpoint closer that are further ahead than it ever waits: the clock was set back.
    pub(in crate::sqlite) fn shorten_pauses(
        &mut self,
        conn: &Connection,
        number: i64,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        let Some(endpoint) = self.endpoints.get_mut(&number) else { return Ok(()) };
        let (before, lease) = (endpoint.health, endpoint.policy.lease);
        let within = |time: Option<Timestamp>, wait: Duration| {
            time.map(|time| now.saturating_add(wait).map_or(time, |latest| time.min(latest)))
        };
        // While the circuit is probed, it is open until the probe's lease ends.
        let open_for = before.circuit.open_for.max(lease);
        let circuit =
            Circuit { open_until: within(before.circuit.open_until, open_for), ..before.circuit };
        let spread_until = within(before.spread_until, RELEASE_FOR);
        let limit = limit_at(endpoint.record.settings.rate_limit, spread_until, now);
        let interval = limit.map_or(0, RateLimit::interval_us).unsigned_abs();
        let paid_until = within(before.paid_until, Duration::from_micros(interval) + SLACK);
        let blocked_until = within(before.blocked_until, PAUSE_MAX);
        let health = EndpointHealth { circuit, blocked_until, paid_until, spread_until };
        if health != before {
            endpoint.health = health;
            write(conn, number, endpoint)?;
            self.reschedule(number);
        }
        Ok(())
    }

    /// Records that this many attempts begin at an endpoint with a rate limit.
    pub(super) fn spend(
        &mut self,
        conn: &Connection,
        number: i64,
        attempts: usize,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        let Some(endpoint) = self.endpoints.get_mut(&number) else { return Ok(()) };
        let Some(limit) = endpoint.limit_at(now) else { return Ok(()) };
        let attempts = u32::try_from(attempts).unwrap_or(u32::MAX);
        let paid = limit.paid_until(endpoint.health.paid_until, now, attempts);
        endpoint.health.paid_until = Some(paid);
        self.wrote = true;
        write(conn, number, endpoint)
    }

    /// Applies an event to the circuit of an endpoint, in memory and on disk.
    pub(super) fn judge(
        &mut self,
        conn: &Connection,
        number: i64,
        event: CircuitEvent,
        error: Option<&str>,
        now: Timestamp,
    ) -> rusqlite::Result<()> {
        let Some(endpoint) = self.endpoints.get_mut(&number) else { return Ok(()) };
        let Some(circuit) = step(&endpoint.health.circuit, event, now) else { return Ok(()) };
        endpoint.health.circuit = circuit;
        let failing = match (circuit.open_until, error, event) {
            (None, _, _) => None,
            (Some(_), Some(error), _) => Some(open_reason(circuit.failures, error)),
            (Some(_), None, CircuitEvent::GivenUp) => Some(TRIED_FIRST.to_owned()),
            (Some(_), None, _) => endpoint.record.failing.clone(),
        };
        if failing != endpoint.record.failing {
            conn.prepare_cached("UPDATE hapax_endpoint SET failing = ?2 WHERE endpoint = ?1")?
                .execute((number, &failing))?;
            endpoint.record.failing = failing;
        }
        write(conn, number, endpoint)?;
        self.wrote = true;
        self.reschedule(number);
        Ok(())
    }
}

impl EndpointState {
    /// The limit of attempts that holds now.
    pub(super) fn limit_at(&self, now: Timestamp) -> Option<RateLimit> {
        limit_at(self.record.settings.rate_limit, self.health.spread_until, now)
    }
}

fn write(conn: &Connection, number: i64, endpoint: &EndpointState) -> rusqlite::Result<()> {
    let EndpointHealth { circuit, blocked_until, paid_until, spread_until } = endpoint.health;
    conn.prepare_cached(
        "INSERT INTO hapax_endpoint_state
             (endpoint, circuit, failures, failing_since, open_until, open_for, slots, blocked_until,
              rate_at, spread_until)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)
         ON CONFLICT (endpoint) DO UPDATE
         SET circuit = ?2, failures = ?3, failing_since = ?4, open_until = ?5, open_for = ?6, slots = ?7,
             blocked_until = ?8, rate_at = ?9, spread_until = ?10",
    )?
    .execute((
        number,
        circuit.number,
        circuit.failures,
        circuit.failing_since.map(micros),
        circuit.open_until.map(micros),
        i64::try_from(circuit.open_for.as_micros()).unwrap_or(i64::MAX),
        circuit.slots,
        blocked_until.map(micros),
        paid_until.map(micros),
        spread_until.map(micros),
    ))?;
    Ok(())
}
