//! The figures of the last hour, or of `window`: arrivals, the share of copies, the outcomes of
//! jobs, and how each sender spaces its retries.
//!
//! The figures count the events that were *first* received in the window, with all of their copies,
//! so that the numbers of one event belong together. If there are more events than are read, the
//! figures come from a sample, and the answer says so.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use hapax_core::SourceName;
use hapax_core::store::{EventSample, SampleAsk, SampledEvent, Status};

use super::events::ago;
use super::extract::QueryParams;
use super::handlers::PausedHandlers;
use super::problem::Problem;
use super::{Admin, AdminStore};
use crate::api::{Figures, ProcessingSeconds, Span, Stats, StatsQuery};

/// The window if the request names none.
const WINDOW_DEFAULT: Duration = Duration::from_secs(3_600);

/// The most events that are read. If there are more, this many are read as a sample. Reading them
/// takes one reader a little more than a tenth of a second.
const EVENTS_MAX: usize = 10_000;

pub(super) async fn stats<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    QueryParams(query): QueryParams<StatsQuery>,
) -> Result<Json<Stats>, Problem> {
    let Span(window) = query.window.unwrap_or(Span(WINDOW_DEFAULT));
    if window.is_zero() {
        return Err(Problem::bad_request("window is longer than zero, such as 1h"));
    }
    let since = ago((admin.now)(), Span(window));
    admin.store.flush_copies().await;
    let sample = admin.store.sample(SampleAsk { since, limit: EVENTS_MAX }).await?;
    let (failed, failed_since) = admin.watch.failed_within(&*admin.store, window).await?;
    let by_source = by_source(&sample, &failed);
    let sampled = sample.is_partial();
    let mut paused_handlers = PausedHandlers::of(&*admin.store).await?.into_list();
    if let Some(source) = &query.source {
        paused_handlers.retain(|one| one.source == *source);
    }
    let answer = |figures, sources| Stats {
        window_seconds: window.as_secs_f64(),
        since,
        sampled,
        failed_verifications_since: failed_since,
        paused_handlers: paused_handlers.clone(),
        figures,
        sources,
    };
    let Some(source) = query.source else {
        let all: Vec<&SampledEvent> = sample.events.iter().collect();
        let all = Figures::of(&all, scale(&sample), failed.values().sum());
        return Ok(Json(answer(all, Some(by_source))));
    };
    match by_source.get(&source) {
        Some(figures) => Ok(Json(answer(figures.clone(), None))),
        None if failed.contains_key(&SourceName::new(&source)) => {
            Ok(Json(answer(Figures::of(&[], 1.0, 0), None)))
        }
        None => Err(Problem::not_found("no source has that name")),
    }
}

/// How many events each event of the sample stands for.
fn scale(sample: &EventSample) -> f64 {
    match sample.is_partial() {
        true => sample.total as f64 / sample.events.len().max(1) as f64,
        false => 1.0,
    }
}

/// The figures of every source that had events or failed verifications.
fn by_source(
    sample: &EventSample,
    failed: &BTreeMap<SourceName, u64>,
) -> BTreeMap<String, Figures> {
    let mut events: BTreeMap<&str, Vec<&SampledEvent>> = BTreeMap::new();
    for event in &sample.events {
        events.entry(&event.summary.source).or_default().push(event);
    }
    for (source, _) in failed.iter().filter(|(_, count)| **count > 0) {
        events.entry(source.as_str()).or_default();
    }
    let scale = scale(sample);
    let figures = |(source, events): (&str, Vec<&SampledEvent>)| {
        let failed = failed.get(&SourceName::new(source)).copied().unwrap_or(0);
        (source.to_owned(), Figures::of(&events, scale, failed))
    };
    events.into_iter().map(figures).collect()
}

impl Figures {
    fn of(events: &[&SampledEvent], scale: f64, failed_verifications: u64) -> Self {
        let arrivals: u64 = events.iter().map(|event| event.summary.arrivals).sum();
        let estimate = |count: u64| (count as f64 * scale).round() as u64;
        let unique = events.len() as u64;
        Self {
            received: estimate(arrivals),
            unique: estimate(unique),
            duplicates: estimate(arrivals) - estimate(unique),
            duplicate_rate: share(arrivals - unique, arrivals),
            success_rate: success_rate(events),
            failed_verifications,
            processing_seconds: ProcessingSeconds::of(events),
            copies_per_event: share(arrivals, unique),
            gaps_seconds: gaps_seconds(events),
        }
    }
}

fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

/// The share of events whose jobs are done, of all events whose jobs were attempted.
fn success_rate(events: &[&SampledEvent]) -> Option<f64> {
    let (mut done, mut tried) = (0, 0);
    for event in events {
        match event.summary.status {
            Status::Processed | Status::Stale => (done, tried) = (done + 1, tried + 1),
            Status::Dead | Status::Failed => tried += 1,
            Status::Review
            | Status::Discarded
            | Status::Held
            | Status::Processing
            | Status::Received
            | Status::Ignored => {}
        }
    }
    share(done, tried)
}

impl ProcessingSeconds {
    fn of(events: &[&SampledEvent]) -> Self {
        let took = |event: &&SampledEvent| {
            let summary = &event.summary;
            let is_done = matches!(summary.status, Status::Processed | Status::Stale);
            let ended = summary.processed_at.filter(|_| is_done)?;
            Some(ended.duration_since(summary.received_at).as_secs_f64().max(0.0))
        };
        let mut seconds: Vec<f64> = events.iter().filter_map(took).collect();
        seconds.sort_by(f64::total_cmp);
        let sum: f64 = seconds.iter().sum();
        let avg = (!seconds.is_empty()).then(|| sum / seconds.len() as f64);
        Self { avg, p50: quantile(&seconds, 0.5), p99: quantile(&seconds, 0.99) }
    }
}

/// The quantile: the smallest value that is at least as large as the fraction `part` of all values.
fn quantile(sorted: &[f64], part: f64) -> Option<f64> {
    let rank = (part * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

/// How a sender spaces its retries: the median wait before the second arrival of an event, before
/// the third, and so on, over the events of which every arrival is kept.
fn gaps_seconds(events: &[&SampledEvent]) -> Vec<f64> {
    let mut by_place: Vec<Vec<f64>> = Vec::new();
    for event in events {
        if event.arrived_at.len() as u64 != event.summary.arrivals {
            continue;
        }
        for (place, pair) in event.arrived_at.windows(2).enumerate() {
            if by_place.len() <= place {
                by_place.push(Vec::new());
            }
            by_place[place].push(pair[1].duration_since(pair[0]).as_secs_f64());
        }
    }
    let median = |mut gaps: Vec<f64>| {
        gaps.sort_by(f64::total_cmp);
        quantile(&gaps, 0.5)
    };
    by_place.into_iter().filter_map(median).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_one_of_the_values_and_none_of_nothing() {
        let hundred: Vec<f64> = (1..=100).map(f64::from).collect();
        let check = |values: &[f64], part, expected| assert_eq!(quantile(values, part), expected);
        check(&[], 0.5, None);
        check(&[7.0], 0.5, Some(7.0));
        check(&[7.0], 0.99, Some(7.0));
        check(&[1.0, 2.0], 0.5, Some(1.0));
        check(&hundred, 0.5, Some(50.0));
        check(&hundred, 0.99, Some(99.0));
    }
}
