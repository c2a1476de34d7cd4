//! The circuit of an endpoint: how failures in a row pause the endpoint, how one delivery tries it
//! again, and when it is disabled.
//!
//! The circuit is *closed* while `open_until` is none. Otherwise the circuit is *open* until that time. From
//! then on one delivery, the *probe*, may be claimed. The end of the probe's lease becomes the new
//! `open_until`, so a probe that never ends delays the next one and nothing else.
//!
//! Opening, probing or closing the circuit raises `number`. A claim carries the number. An outcome under
//! another number settles its delivery but does not affect the circuit: its attempt began before the
//! circuit changed.
//!
//! [`step`] is one `match` over every event. docs/sending.md has the rules in words.

use std::time::Duration;

use jiff::Timestamp;

use crate::job::later;
use crate::tuned;

/// Failures in a row that open the circuit: more than a restart of one instance causes.
pub const FAILURES_MAX: u32 = 5;

/// The time for which a circuit first opens. The time doubles with each probe that fails.
pub const OPEN_MIN: Duration = Duration::from_secs(60);

/// The longest time that a circuit stays open: an endpoint that works again is noticed within the
/// hour.
pub const OPEN_MAX: Duration = Duration::from_secs(3_600);

/// An endpoint that did nothing but fail for this long is disabled.
pub const GIVE_UP_AFTER: Duration = Duration::from_secs(5 * 86_400);

/// Attempts at once after the circuit closes. The number doubles with each success, so that deliveries that
/// were held do not all start together.
pub const SLOTS_FIRST: u32 = 2;

/// [`OPEN_MIN`], or the value that a test sets: a test that restarts its receiver would otherwise
/// wait for minutes.
fn open_min() -> Duration {
    Duration::from_millis(tuned!("circuit.open_ms", OPEN_MIN.as_millis() as u64))
}

/// The circuit of one endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Circuit {
    /// A number that is raised whenever the circuit opens, closes or is probed.
    pub number: i64,
    /// Failures in a row.
    pub failures: u32,
    /// The first of these failures.
    pub failing_since: Option<Timestamp>,
    /// The time until which no delivery is claimed; none while the circuit is closed.
    pub open_until: Option<Timestamp>,
    /// The duration for which the circuit was last opened.
    pub open_for: Duration,
    /// Attempts at once while the endpoint recovers; none if only its own limit counts.
    pub slots: Option<u32>,
}

/// An occurrence that may change a circuit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CircuitEvent {
    /// A delivery is claimed although the circuit is not closed.
    Probed {
        /// When the lease of that claim ends.
        lease_end: Timestamp,
    },
    /// The endpoint took a delivery, or refused one for good.
    Works {
        /// The endpoint's own limit of attempts at once.
        max_in_flight: u32,
    },
    /// An attempt failed.
    Fails,
    /// A claim ended without information about the endpoint: it was returned, or its request was never
    /// sent.
    Nothing,
    /// The endpoint is disabled for its failures, or because its answer asked for that.
    GivenUp,
    /// An operator enables the endpoint.
    Enabled,
}

impl Circuit {
    /// Whether a delivery may be claimed now, and whether it is the probe.
    pub fn admits(&self, now: Timestamp) -> Admits {
        match self.open_until {
            None => Admits::All,
            Some(until) if until <= now => Admits::Probe,
            Some(_) => Admits::None,
        }
    }

    /// Whether the endpoint did nothing but fail for so long that it is disabled.
    pub fn has_only_failed(&self, now: Timestamp) -> bool {
        self.failures >= FAILURES_MAX
            && self.failing_since.is_some_and(|since| later(since, GIVE_UP_AFTER) <= now)
    }
}

/// The due deliveries that a circuit admits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admits {
    /// Every due delivery.
    All,
    /// One delivery, which tries the endpoint.
    Probe,
    /// No delivery.
    None,
}

/// Decides what an event does to a circuit at `now`; `None` if it changes nothing.
pub fn step(circuit: &Circuit, event: CircuitEvent, now: Timestamp) -> Option<Circuit> {
    let number = circuit.number + 1;
    match (event, circuit.open_until) {
        (CircuitEvent::Probed { lease_end }, Some(until)) if until <= now => {
            Some(Circuit { number, open_until: Some(lease_end), ..*circuit })
        }
        (CircuitEvent::Probed { .. }, Some(_) | None) => None,

        (CircuitEvent::Works { max_in_flight }, None) => {
            let doubled = circuit.slots.map(|slots| slots.saturating_mul(2));
            let slots = doubled.filter(|slots| *slots < max_in_flight);
            let after = Circuit { failures: 0, failing_since: None, slots, ..*circuit };
            (after != *circuit).then_some(after)
        }
        (CircuitEvent::Works { .. }, Some(_)) => {
            Some(Circuit { number, slots: Some(SLOTS_FIRST), ..Circuit::default() })
        }

        (CircuitEvent::Fails, is_open) => {
            let failures = circuit.failures.saturating_add(1);
            let failing_since = circuit.failing_since.or(Some(now));
            let failing = Circuit { failures, failing_since, ..*circuit };
            if is_open.is_none() && failures < FAILURES_MAX {
                return Some(failing);
            }
            let open_for = match is_open {
                Some(_) => circuit.open_for.saturating_mul(2).clamp(open_min(), OPEN_MAX),
                None => open_min(),
            };
            Some(Circuit { number, open_for, open_until: Some(later(now, open_for)), ..failing })
        }

        (CircuitEvent::Nothing, Some(_)) => Some(Circuit { open_until: Some(now), ..*circuit }),
        (CircuitEvent::Nothing, None) => None,

        // The circuit becomes half-open: when the endpoint is enabled, one delivery tries it.
        (CircuitEvent::GivenUp, Some(_) | None) => Some(Circuit {
            number,
            failing_since: None,
            open_until: Some(now),
            open_for: open_min(),
            slots: None,
            ..*circuit
        }),

        (CircuitEvent::Enabled, Some(until)) if until > now => {
            Some(Circuit { number, open_until: Some(now), ..*circuit })
        }
        (CircuitEvent::Enabled, Some(_) | None) => None,
    }
}

/// Why the deliveries of an endpoint are held while its circuit is not closed.
pub fn open_reason(failures: u32, error: &str) -> String {
    format!(
        "the endpoint failed {failures} times in a row and is tried again later; the last error: {error}"
    )
}

/// The reason shown for an endpoint that was disabled because every attempt failed.
pub fn only_failed_reason(error: &str) -> String {
    format!("every attempt failed for 5 days; the last error: {error}")
}

/// The reason shown for held deliveries of an endpoint that was disabled for its failures or on
/// its own request, and is enabled again.
pub const TRIED_FIRST: &str =
    "the endpoint was disabled automatically: one delivery is sent first, as a test";
