//! The circuit of an endpoint in the model: the rules of [`hapax_core::circuit`] a second time, as four small
//! steps, so that random plans can compare the other stores with them.

use std::time::Duration;

use hapax_core::Timestamp;
use hapax_core::circuit::{TRIED_FIRST, only_failed_reason, open_reason};
use hapax_core::endpoint::{Disabled, DisabledBy};
use hapax_core::rate_limit::{RELEASE_FOR, RateLimit, limit_at, next_at};
use hapax_core::store::{AttemptVerdict, EndpointSignal};

use super::outbox::StoredEndpoint;
use super::work::later;

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3_600);
const FIVE_DAYS: Duration = Duration::from_secs(5 * 86_400);

/// The recent answers of an endpoint.
#[derive(Debug, Default)]
pub(super) struct EndpointHealth {
    /// The number that claims carry. The number changes whenever the circuit opens, closes or is probed.
    pub(super) number: u64,
    failures: u32,
    failing_since: Option<Timestamp>,
    /// The end of the wait of an open circuit: nothing is sent before it, and one delivery after
    /// it. `None` while the circuit is closed.
    pub(super) open_until: Option<Timestamp>,
    open_for: Duration,
    /// The most attempts at once while the endpoint recovers.
    slots: Option<u32>,
    /// The end of the pause that the endpoint asked for.
    blocked_until: Option<Timestamp>,
    /// The time until which its attempts are paid for under its rate limit; see
    /// [`hapax_core::rate_limit`].
    paid_until: Option<Timestamp>,
    /// The end of the time over which the deliveries of an endpoint that was enabled are spread
    /// out.
    spread_until: Option<Timestamp>,
}

impl StoredEndpoint {
    /// How many attempts may be under way now, as far as the circuit decides.
    pub(super) fn slots(&self, now: Timestamp) -> u32 {
        let EndpointHealth { open_until, slots, blocked_until, .. } = self.health;
        let is_shut = |until: Option<Timestamp>| until.is_some_and(|until| until > now);
        if is_shut(open_until) || is_shut(blocked_until) {
            return 0;
        }
        let most = self.record.settings.max_in_flight;
        slots.map_or(most, |slots| slots.min(most))
    }

    /// Whether the rate limit of the endpoint lets another attempt begin.
    pub(super) fn within_rate(&self, now: Timestamp) -> bool {
        self.limit_at(now).is_none_or(|limit| limit.allowed(self.health.paid_until, now) > 0)
    }

    fn limit_at(&self, now: Timestamp) -> Option<RateLimit> {
        limit_at(self.record.settings.rate_limit, self.health.spread_until, now)
    }

    /// The time from which another attempt may begin.
    pub(super) fn opens_at(&self) -> Option<Timestamp> {
        let EndpointHealth { paid_until, spread_until, .. } = self.health;
        let paid = match self.record.settings.rate_limit {
            Some(_) => paid_until.map(next_at),
            None => paid_until.map(next_at).zip(spread_until).map(|(paid, end)| paid.min(end)),
        };
        self.health.open_until.max(self.health.blocked_until).max(paid)
    }

    /// Records the claim of a delivery. If the circuit is not closed, no other delivery is claimed
    /// until the lease of this one ends.
    pub(super) fn claimed(&mut self, lease_end: Timestamp, now: Timestamp) -> u64 {
        if let Some(limit) = self.limit_at(now) {
            self.health.paid_until = Some(limit.paid_until(self.health.paid_until, now, 1));
        }
        if self.health.open_until.is_some() {
            self.health.number += 1;
            self.health.open_until = Some(lease_end);
        }
        self.health.number
    }

    /// Records the end of an attempt whose claim carries this number.
    pub(super) fn answered(&mut self, number: u64, verdict: &AttemptVerdict, now: Timestamp) {
        if self.health.number != number {
            return;
        }
        match verdict {
            AttemptVerdict::Delivered(_)
            | AttemptVerdict::Failed { says: EndpointSignal::Works, .. } => self.works(),
            AttemptVerdict::GivenBack
            | AttemptVerdict::Failed { says: EndpointSignal::Nothing, .. } => {
                if self.health.open_until.is_some() {
                    self.health.open_until = Some(now);
                }
            }
            AttemptVerdict::Failed { says: EndpointSignal::Fails, error, .. } => {
                self.fails(error, now);
            }
            AttemptVerdict::Failed { says: EndpointSignal::Pauses(wait), error, .. } => {
                self.health.blocked_until = self.health.blocked_until.max(Some(later(now, *wait)));
                self.fails(error, now);
            }
            AttemptVerdict::Failed { says: EndpointSignal::Disable, error: reason, .. }
            | AttemptVerdict::DeliveredLast { reason, .. } => {
                self.give_up(reason.clone(), now);
            }
        }
    }

    /// Records that an operator enabled the endpoint. If its circuit is open, the next delivery
    /// tries the endpoint. Deliveries that were held are spread out.
    pub(super) fn enabled(&mut self, was_disabled: bool, now: Timestamp) {
        if was_disabled {
            self.health.spread_until = Some(later(now, RELEASE_FOR));
        }
        if self.health.open_until.is_some_and(|until| until > now) {
            self.health.number += 1;
            self.health.open_until = Some(now);
        }
    }

    fn works(&mut self) {
        let health = &mut self.health;
        health.failures = 0;
        health.failing_since = None;
        if health.open_until.take().is_some() {
            health.number += 1;
            health.open_for = Duration::ZERO;
            health.slots = Some(2);
            self.record.failing = None;
        } else {
            let most = self.record.settings.max_in_flight;
            health.slots = health.slots.map(|slots| slots * 2).filter(|slots| *slots < most);
        }
    }

    fn fails(&mut self, error: &str, now: Timestamp) {
        let health = &mut self.health;
        health.failures += 1;
        let since = *health.failing_since.get_or_insert(now);
        let was_open = health.open_until.is_some();
        if !was_open && health.failures < 5 {
            return;
        }
        health.number += 1;
        health.open_for = if was_open { (health.open_for * 2).clamp(MINUTE, HOUR) } else { MINUTE };
        health.open_until = Some(later(now, health.open_for));
        self.record.failing = Some(open_reason(health.failures, error));
        if self.record.settings.auto_disable && later(since, FIVE_DAYS) <= now {
            self.give_up(only_failed_reason(error), now);
        }
    }

    fn give_up(&mut self, reason: String, now: Timestamp) {
        self.health.number += 1;
        self.health.failing_since = None;
        self.health.open_until = Some(now);
        self.health.open_for = MINUTE;
        self.health.slots = None;
        self.record.failing = Some(TRIED_FIRST.to_owned());
        if self.record.disabled.is_none() {
            self.record.disabled = Some(Disabled { at: now, reason, by: DisabledBy::Automatic });
            self.record.version += 1;
        }
    }
}
