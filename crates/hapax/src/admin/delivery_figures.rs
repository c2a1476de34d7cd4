//! How the newest deliveries of an endpoint went, for the dashboard and for the portal.

use hapax_core::delivery::DeliveryStatus;

/// How the newest deliveries of an endpoint went.
pub(super) struct DeliveryFigures {
    pub(super) delivered: usize,
    /// Delivered or dead.
    pub(super) ended: usize,
    /// The median time that the endpoint took to answer.
    pub(super) median_ms: Option<u64>,
}

impl DeliveryFigures {
    /// The figures of deliveries with these states, and of successful attempts with these durations.
    pub(super) fn of(
        states: impl Iterator<Item = DeliveryStatus>,
        took_ms: impl Iterator<Item = u64>,
    ) -> Self {
        let (mut delivered, mut dead) = (0, 0);
        for status in states {
            delivered += usize::from(status == DeliveryStatus::Delivered);
            dead += usize::from(status == DeliveryStatus::Dead);
        }
        let mut took_ms: Vec<u64> = took_ms.collect();
        took_ms.sort_unstable();
        let median_ms = took_ms.get(took_ms.len() / 2).copied();
        Self { delivered, ended: delivered + dead, median_ms }
    }
}
