//! Properties of the circuit of an endpoint: failures in a row open it, and it never stays open for
//! ever.

use std::time::Duration;

use hapax_core::Timestamp;
use hapax_core::circuit::{
    Admits, Circuit, CircuitEvent, FAILURES_MAX, GIVE_UP_AFTER, OPEN_MAX, step,
};
use jiff::SignedDuration;
use proptest::prelude::*;

fn noon() -> Timestamp {
    "2026-06-01T12:00:00Z".parse().expect("a timestamp")
}

fn after(circuit: Circuit, event: CircuitEvent, now: Timestamp) -> Circuit {
    step(&circuit, event, now).unwrap_or(circuit)
}

#[test]
fn the_pauses_double_up_to_an_hour_and_one_success_ends_them() {
    let mut circuit = Circuit::default();
    let mut now = noon();
    for n in 1..FAILURES_MAX {
        circuit = after(circuit, CircuitEvent::Fails, now);
        assert_eq!((circuit.failures, circuit.admits(now)), (n, Admits::All));
    }
    let mut minutes = Vec::new();
    for _ in 0..8 {
        circuit = after(circuit, CircuitEvent::Fails, now);
        assert_eq!(circuit.admits(now), Admits::None);
        let until = circuit.open_until.expect("it is open");
        minutes.push(until.duration_since(now).as_secs() / 60);
        now = until;
        let lease_end = now + SignedDuration::from_secs(30);
        circuit = after(circuit, CircuitEvent::Probed { lease_end }, now);
        assert_eq!(circuit.admits(now), Admits::None, "one probe at a time");
    }
    assert_eq!(minutes, [1, 2, 4, 8, 16, 32, 60, 60]);
    circuit = after(circuit, CircuitEvent::Works { max_in_flight: 16 }, now);
    assert_eq!((circuit.failures, circuit.admits(now)), (0, Admits::All));
    let mut slots = Vec::new();
    for _ in 0..5 {
        slots.push(circuit.slots);
        circuit = after(circuit, CircuitEvent::Works { max_in_flight: 16 }, now);
    }
    assert_eq!(slots, [Some(2), Some(4), Some(8), None, None]);
}

#[test]
fn only_days_without_any_success_are_hopeless() {
    let mut circuit = Circuit::default();
    for _ in 0..9 {
        circuit = after(circuit, CircuitEvent::Fails, noon());
    }
    let days = SignedDuration::try_from(GIVE_UP_AFTER).expect("days");
    assert!(!circuit.has_only_failed(noon() + days - SignedDuration::from_secs(1)));
    assert!(circuit.has_only_failed(noon() + days));
    let works = after(circuit, CircuitEvent::Works { max_in_flight: 1 }, noon() + days);
    assert!(!works.has_only_failed(noon() + days));
    // Two failures in a year must not disable the endpoint.
    let rarely = after(Circuit::default(), CircuitEvent::Fails, noon());
    assert!(!after(rarely, CircuitEvent::Fails, noon() + days).has_only_failed(noon() + days));
}

proptest! {
    #[test]
    fn a_circuit_always_admits_something_within_the_hour(
        events in prop::collection::vec((0..6usize, 0..4_000i64), 1..60),
    ) {
        let mut circuit = Circuit::default();
        let mut now = noon();
        let mut number = 0;
        for (event, seconds) in events {
            now += SignedDuration::from_secs(seconds);
            let lease_end = now + SignedDuration::from_secs(60);
            let event = [
                CircuitEvent::Probed { lease_end },
                CircuitEvent::Works { max_in_flight: 8 },
                CircuitEvent::Fails,
                CircuitEvent::Nothing,
                CircuitEvent::GivenUp,
                CircuitEvent::Enabled,
            ][event];
            let was_open = circuit.open_until.is_some();
            circuit = after(circuit, event, now);
            prop_assert!(circuit.number >= number);
            // The outcome of an attempt from before a change must not count for the changed
            // circuit.
            let is_open = circuit.open_until.is_some();
            prop_assert!(was_open == is_open || circuit.number > number, "{event:?}");
            number = circuit.number;
            let soon = now + SignedDuration::try_from(OPEN_MAX.max(Duration::from_secs(60))).expect("an hour");
            prop_assert!(circuit.admits(soon) != Admits::None, "{circuit:?}");
        }
    }
}
