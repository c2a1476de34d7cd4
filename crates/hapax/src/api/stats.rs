//! Statistics and counts over time.

use std::collections::BTreeMap;

use hapax_core::Timestamp;
use hapax_core::log_buckets::middle_of;
use hapax_core::store::{REJECTED_REASONS, Tallies, TallyKind, TrafficFigures};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::{HandlerPause, Moment, Span};

/// The query of `GET /api/v1/stats`.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct StatsQuery {
    /// Only this source.
    pub(crate) source: Option<String>,
    /// The window of the counts. Default: `1h`.
    pub(crate) window: Option<Span>,
}

/// The counts of all nodes within a window.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Stats {
    pub(crate) window_seconds: f64,
    /// The time from which everything is counted: the beginning of a minute. In windows of more than two days it is
    /// the beginning of an hour, and in windows of more than 90 days that of a day.
    pub(crate) since: Timestamp,
    /// Whether `gaps_seconds` comes from a sample of the events. All other figures are exact
    /// counts.
    pub(crate) sampled: bool,
    /// The start of the window, equal to `since`.
    pub(crate) failed_verifications_since: Timestamp,
    #[serde(flatten)]
    pub(crate) figures: Figures,
    /// Handlers that an operator has paused: their jobs wait.
    #[serde(default)]
    pub(crate) paused_handlers: Vec<HandlerPause>,
    /// The figures of each source that has a count; absent if the request names one source.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) sources: Option<BTreeMap<String, Figures>>,
}

/// The statistics of one source, or of all.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Figures {
    /// Arrivals, including copies.
    pub(crate) received: u64,
    /// Arrivals of new events.
    pub(crate) unique: u64,
    /// Arrivals of known events, including conflicts.
    pub(crate) duplicates: u64,
    /// Arrivals of known events with another body.
    #[serde(default)]
    pub(crate) conflicts: u64,
    /// `duplicates` / `received`.
    #[schema(required)]
    pub(crate) duplicate_rate: Option<f64>,
    /// The share of jobs that succeeded, of those that succeeded, became dead letters, or began to be retried in the
    /// window.
    #[schema(required)]
    pub(crate) success_rate: Option<f64>,
    /// Jobs that succeeded.
    #[serde(default)]
    pub(crate) succeeded: u64,
    /// Jobs that succeeded in a run that an operator forced: their effects happened again.
    #[serde(default)]
    pub(crate) forced: u64,
    /// Attempts that failed.
    #[serde(default)]
    pub(crate) failed_attempts: u64,
    /// Jobs that a failed attempt made dead letters.
    #[serde(default)]
    pub(crate) died: u64,
    /// Requests whose signature was missing or wrong, or whose signed time was outside the window.
    pub(crate) failed_verifications: u64,
    /// The failed verifications by reason: `missing`, `signature`, `stale`, `future`, `stale_unseen`. Reasons
    /// without a request are left out.
    #[serde(default)]
    pub(crate) failed_verifications_by_reason: BTreeMap<String, u64>,
    /// Requests that were answered with 503: they could not be made durable, and the sender must retry.
    #[serde(default)]
    pub(crate) unavailable: u64,
    /// From the head of a request to its 2xx.
    #[serde(default)]
    pub(crate) ack_seconds: Seconds,
    /// From the first arrival of an event to the start of the first attempt of a job.
    #[serde(default)]
    pub(crate) wait_seconds: Seconds,
    /// From the first arrival of an event to the end of a job that succeeded.
    pub(crate) processing_seconds: Seconds,
    /// `received` / `unique`: how often an event arrives, including the first time.
    #[schema(required)]
    pub(crate) copies_per_event: Option<f64>,
    /// The number of copies by the time since the first arrival of their event. Spans without a copy are left out. All
    /// copies are counted.
    #[serde(default)]
    pub(crate) copy_waits: Vec<CopyWaits>,
    /// The median wait before the second arrival of an event, before the third, and so on.
    pub(crate) gaps_seconds: Vec<f64>,
    /// The last verified arrival in the window, to the second.
    #[schema(required)]
    #[serde(default)]
    pub(crate) last_arrival: Option<Timestamp>,
}

impl Figures {
    /// The figures of a time, without the gaps between copies.
    pub(crate) fn of(figures: &TrafficFigures) -> Self {
        let TrafficFigures { counts, tallies, gauges } = figures;
        let received = counts.new + counts.copies;
        let share = |part: u64, whole: u64| (whole > 0).then(|| part as f64 / whole as f64);
        let retrying = u64::try_from(counts.retrying).unwrap_or_default();
        let by_reason = tallies.of(TallyKind::Rejected).filter_map(|(index, count)| {
            let reason = REJECTED_REASONS.get(usize::from(index))?;
            Some(((*reason).to_owned(), count))
        });
        let last_arrival = i64::try_from(gauges.last_arrival).ok().filter(|second| *second > 0);
        Self {
            received,
            unique: counts.new,
            duplicates: counts.copies,
            conflicts: counts.conflicts,
            duplicate_rate: share(counts.copies, received),
            success_rate: share(counts.succeeded, counts.succeeded + counts.died + retrying),
            succeeded: counts.succeeded,
            forced: counts.forced,
            failed_attempts: counts.failed_attempts,
            died: counts.died,
            failed_verifications: counts.rejected,
            failed_verifications_by_reason: by_reason.collect(),
            unavailable: counts.unavailable,
            ack_seconds: Seconds::of(tallies, TallyKind::Ack, counts.ack_micros),
            wait_seconds: Seconds::of(tallies, TallyKind::Wait, counts.wait_micros),
            processing_seconds: Seconds::of(
                tallies,
                TallyKind::Processing,
                counts.processing_micros,
            ),
            copies_per_event: share(received, counts.new),
            copy_waits: CopyWaits::of(tallies),
            gaps_seconds: Vec::new(),
            last_arrival: last_arrival.and_then(|second| Timestamp::from_second(second).ok()),
        }
    }
}

/// Copies that came within one span after the first arrival of their event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct CopyWaits {
    /// The end of the span; the span begins at the end of the previous one. Null for waits that are longer
    /// than all spans.
    #[schema(required)]
    pub(crate) within_seconds: Option<u64>,
    pub(crate) copies: u64,
}

/// The ends of the spans: a second to a week.
const COPY_SPANS: [u64; 10] =
    [1, 10, 60, 300, 900, 3_600, 6 * 3_600, 86_400, 3 * 86_400, 7 * 86_400];

impl CopyWaits {
    /// The spans that have copies. A wait that is close to the end of a span may be counted in the next span, because a
    /// bucket is accurate to an eighth.
    fn of(tallies: &Tallies) -> Vec<Self> {
        let mut spans: BTreeMap<usize, u64> = BTreeMap::new();
        for (bucket, count) in tallies.of(TallyKind::Copy) {
            let seconds = middle_of(bucket).as_secs_f64();
            let span = COPY_SPANS.iter().position(|end| seconds < *end as f64);
            *spans.entry(span.unwrap_or(COPY_SPANS.len())).or_default() += count;
        }
        let waits = spans
            .into_iter()
            .map(|(span, copies)| Self { within_seconds: COPY_SPANS.get(span).copied(), copies });
        waits.collect()
    }
}

/// How long something took. A percentile is accurate to an eighth. A value is null if there was nothing
/// to measure.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize, ToSchema)]
pub(crate) struct Seconds {
    #[schema(required)]
    pub(crate) avg: Option<f64>,
    #[schema(required)]
    pub(crate) p50: Option<f64>,
    #[schema(required)]
    pub(crate) p99: Option<f64>,
}

impl Seconds {
    /// The durations of a kind, and their sum.
    pub(super) fn of(tallies: &Tallies, kind: TallyKind, micros: u64) -> Self {
        let count = tallies.total(kind);
        let quantile = |part| tallies.quantile(kind, part).map(|took| took.as_secs_f64());
        Self {
            avg: (count > 0).then(|| micros as f64 / 1e6 / count as f64),
            p50: quantile(0.5),
            p99: quantile(0.99),
        }
    }
}

/// The query of `GET /api/v1/history`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct HistoryQuery {
    /// Only this source; all sources together if it is missing.
    pub(crate) source: Option<String>,
    /// From this time on: RFC 3339, or a duration before now. Default: `24h`.
    #[param(value_type = Option<String>)]
    pub(crate) from: Option<Moment>,
    /// Before this time. Default: now.
    #[param(value_type = Option<String>)]
    pub(crate) to: Option<Moment>,
    /// The length of a step: whole minutes. Default: a sixtieth of the requested time.
    pub(crate) step: Option<Span>,
}

/// Figures over time. Steps without figures are left out.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct History {
    /// The length of a step.
    pub(crate) step_seconds: u64,
    pub(crate) items: Vec<HistoryPoint>,
    /// Always null: an answer is whole.
    #[schema(required)]
    pub(crate) next: Option<String>,
}

/// The figures of one step, over all nodes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
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
    /// Jobs that succeeded.
    #[serde(default)]
    pub(crate) succeeded: u64,
    /// Attempts that failed.
    #[serde(default)]
    pub(crate) failed_attempts: u64,
    /// Jobs that a failed attempt made dead letters.
    #[serde(default)]
    pub(crate) died: u64,
    /// From the head of a request to its 2xx.
    #[serde(default)]
    pub(crate) ack_seconds: Seconds,
    /// From the first arrival of an event to the start of the first attempt of a job.
    #[serde(default)]
    pub(crate) wait_seconds: Seconds,
    /// From the first arrival of an event to the end of a job that succeeded.
    #[serde(default)]
    pub(crate) processing_seconds: Seconds,
    /// The most jobs that waited at one time. At most 10,000 are counted for each handler.
    #[serde(default)]
    pub(crate) waiting: u64,
    /// The most dead letters at one time, counted in the same way.
    #[serde(default)]
    pub(crate) dead: u64,
    /// The most events and jobs that waited for review at one time, counted in the same way.
    #[serde(default)]
    pub(crate) review: u64,
}

impl HistoryPoint {
    /// The figures of the step that starts at `at`.
    pub(crate) fn of(at: Timestamp, figures: &TrafficFigures) -> Self {
        let gauges = figures.gauges;
        let figures = Figures::of(figures);
        Self {
            at,
            new: figures.unique,
            copies: figures.duplicates,
            conflicts: figures.conflicts,
            rejected: figures.failed_verifications,
            unavailable: figures.unavailable,
            succeeded: figures.succeeded,
            failed_attempts: figures.failed_attempts,
            died: figures.died,
            ack_seconds: figures.ack_seconds,
            wait_seconds: figures.wait_seconds,
            processing_seconds: figures.processing_seconds,
            waiting: gauges.waiting,
            dead: gauges.dead,
            review: gauges.review,
        }
    }
}
