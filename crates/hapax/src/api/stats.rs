//! Statistics and counts over time.

use std::collections::BTreeMap;

use hapax_core::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::{HandlerPause, Moment, Span};

/// The query of `GET /api/v1/stats`.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct StatsQuery {
    /// Only events of this source.
    pub(crate) source: Option<String>,
    /// Only events that first arrived within this time; without it `1h`.
    pub(crate) window: Option<Span>,
}

/// Statistics of the events that first arrived within a window.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Stats {
    pub(crate) window_seconds: f64,
    pub(crate) since: Timestamp,
    /// Whether the counts are estimates from some of many events.
    pub(crate) sampled: bool,
    /// The time from which failed verifications are counted: the beginning of a minute.
    pub(crate) failed_verifications_since: Timestamp,
    #[serde(flatten)]
    pub(crate) figures: Figures,
    /// Handlers that an operator has paused: their jobs wait.
    #[serde(default)]
    pub(crate) paused_handlers: Vec<HandlerPause>,
    /// The same for each source that had an event or a failed verification; absent if one source was asked
    /// for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) sources: Option<BTreeMap<String, Figures>>,
}

/// The statistics of one source, or of all.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Figures {
    /// Arrivals, including copies.
    pub(crate) received: u64,
    /// Events.
    pub(crate) unique: u64,
    /// Arrivals after the first, including conflicts.
    pub(crate) duplicates: u64,
    /// `duplicates` / `received`.
    #[schema(required)]
    pub(crate) duplicate_rate: Option<f64>,
    /// Of the events whose jobs were attempted, the share whose jobs are done.
    #[schema(required)]
    pub(crate) success_rate: Option<f64>,
    /// Requests whose signature was missing or wrong, or whose signed time was outside the window, over all
    /// nodes.
    pub(crate) failed_verifications: u64,
    pub(crate) processing_seconds: ProcessingSeconds,
    /// `received` / `unique`: how often an event arrives, including the first time.
    #[schema(required)]
    pub(crate) copies_per_event: Option<f64>,
    /// The median wait before the second arrival of an event, before the third, and so on.
    pub(crate) gaps_seconds: Vec<f64>,
}

/// The time from the first arrival to the end of the last job.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct ProcessingSeconds {
    #[schema(required)]
    pub(crate) avg: Option<f64>,
    #[schema(required)]
    pub(crate) p50: Option<f64>,
    #[schema(required)]
    pub(crate) p99: Option<f64>,
}

/// The query of `GET /api/v1/history`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct HistoryQuery {
    /// Only this source; without it all together.
    pub(crate) source: Option<String>,
    /// From this time on: RFC 3339, or a duration before now. Default: `24h`.
    #[param(value_type = Option<String>)]
    pub(crate) from: Option<Moment>,
    /// Before this time. Default: now.
    #[param(value_type = Option<String>)]
    pub(crate) to: Option<Moment>,
    /// The length of a step: whole minutes. Default: a sixtieth of the time asked for.
    pub(crate) step: Option<Span>,
}

/// Counts over time. Steps without a count are left out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct History {
    /// The length of a step.
    pub(crate) step_seconds: u64,
    pub(crate) items: Vec<HistoryPoint>,
    /// Always null: an answer is whole.
    #[schema(required)]
    pub(crate) next: Option<String>,
}

/// The counts of one step, over all nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct HistoryPoint {
    /// The start of the step. Counts older than two days start at an hour, those older than 90 days at a day.
    pub(crate) at: Timestamp,
    /// Arrivals of new events.
    pub(crate) new: u64,
    /// Arrivals of known events.
    pub(crate) copies: u64,
    /// Arrivals of known events with another body; they are copies too.
    #[serde(default)]
    pub(crate) conflicts: u64,
    /// Requests that failed verification.
    pub(crate) rejected: u64,
    /// Requests that were answered with 503: they could not be made durable, and the sender must retry.
    #[serde(default)]
    pub(crate) unavailable: u64,
}

impl From<hapax_core::store::TrafficPoint> for HistoryPoint {
    fn from(point: hapax_core::store::TrafficPoint) -> Self {
        let hapax_core::store::TrafficPoint { at, new, copies, conflicts, rejected, unavailable } =
            point;
        Self { at, new, copies, conflicts, rejected, unavailable }
    }
}
