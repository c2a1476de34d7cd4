//! The figures of an endpoint by the hour.

use hapax_core::Timestamp;
use hapax_core::store::{EndpointFigures, EndpointHour, TallyKind};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Seconds;

/// How the attempts of an endpoint went in the last 24 hours.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
pub(crate) struct EndpointRates {
    #[serde(flatten)]
    pub(crate) total: AttemptFigures,
    /// The outcomes of attempts by the hour, oldest first. Hours without an attempt are left out.
    pub(crate) items: Vec<EndpointHourRates>,
    /// Always null: the list has one page.
    #[schema(required)]
    pub(crate) next: Option<String>,
}

/// How the attempts of one hour went.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct EndpointHourRates {
    /// The start of the hour.
    pub(crate) at: Timestamp,
    #[serde(flatten)]
    pub(crate) figures: AttemptFigures,
}

/// How attempts went. Attempts that never left the server are not counted.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
pub(crate) struct AttemptFigures {
    /// Attempts that the endpoint answered with a 2xx.
    pub(crate) delivered: u64,
    /// Attempts that failed: another answer, or none in time.
    pub(crate) failed: u64,
    /// `delivered` / (`delivered` + `failed`).
    #[schema(required)]
    pub(crate) success_rate: Option<f64>,
    /// How long these attempts took.
    pub(crate) attempt_seconds: Seconds,
}

impl AttemptFigures {
    /// How many there were.
    pub(crate) fn attempts(&self) -> u64 {
        self.delivered + self.failed
    }

    fn of(EndpointFigures { delivered, failed, micros, tallies }: &EndpointFigures) -> Self {
        let attempts = delivered + failed;
        Self {
            delivered: *delivered,
            failed: *failed,
            success_rate: (attempts > 0).then(|| *delivered as f64 / attempts as f64),
            attempt_seconds: Seconds::of(tallies, TallyKind::Attempt, *micros),
        }
    }
}

impl EndpointRates {
    /// The figures of these hours of one endpoint, in the order of time.
    pub(crate) fn of<'a>(hours: impl Iterator<Item = &'a EndpointHour>) -> Self {
        let (mut total, mut items) = (EndpointFigures::default(), Vec::new());
        for EndpointHour { at, figures, .. } in hours {
            total.add(figures);
            items.push(EndpointHourRates { at: *at, figures: AttemptFigures::of(figures) });
        }
        Self { total: AttemptFigures::of(&total), items, next: None }
    }
}
