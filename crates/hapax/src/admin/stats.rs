//! The figures of the last hour, or of `window`, as all nodes have counted them: arrivals, the share of copies, the
//! outcomes of jobs, and how long everything took.
//!
//! The gaps between a sender's retries are not counted, but read from the copies of events that were
//! *first* received in the window. If there are more such events than are read, the gaps come from a sample,
//! and the answer says so.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use hapax_core::SourceName;
use hapax_core::store::{SampleAsk, SampledEvent, TrafficFigures};

use super::events::ago;
use super::extract::QueryParams;
use super::handlers::PausedHandlers;
use super::problem::Problem;
use super::{Admin, AdminStore};
use crate::api::{Figures, Span, Stats, StatsQuery};
use crate::traffic_recorder::beginning;

/// The window if the request names none.
const WINDOW_DEFAULT: Duration = Duration::from_secs(3_600);

/// The most events whose copies are read. If there are more, this many are read as a sample. Reading these
/// copies takes one reader a few hundredths of a second.
const EVENTS_MAX: usize = 1_000;

/// `GET /api/v1/stats`. The counts are stored before they are returned, so that a kill loses no reported count.
pub(super) async fn stats<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    QueryParams(query): QueryParams<StatsQuery>,
) -> Result<Json<Stats>, Problem> {
    admin.watch.traffic().record(&*admin.store).await;
    with_gaps(&admin, &query).await.map(Json)
}

/// The statistics with the gaps between copies.
pub(super) async fn with_gaps<S: AdminStore>(
    admin: &Admin<S>,
    query: &StatsQuery,
) -> Result<Stats, Problem> {
    let mut stats = counted(admin, query).await?;
    admin.store.flush_copies().await;
    let since = ago((admin.now)(), window(query));
    let sample = admin.store.sample(SampleAsk { since, limit: EVENTS_MAX }).await?;
    stats.sampled = sample.is_partial();
    let of = |source: &str| -> Vec<&SampledEvent> {
        sample.events.iter().filter(|event| event.summary.source == source).collect()
    };
    match &query.source {
        Some(source) => stats.figures.gaps_seconds = gaps_seconds(&of(source)),
        None => {
            let all: Vec<&SampledEvent> = sample.events.iter().collect();
            stats.figures.gaps_seconds = gaps_seconds(&all);
            for (source, figures) in stats.sources.iter_mut().flatten() {
                figures.gaps_seconds = gaps_seconds(&of(source));
            }
        }
    }
    Ok(stats)
}

/// The window of a query.
pub(super) fn window(query: &StatsQuery) -> Span {
    query.window.unwrap_or(Span(WINDOW_DEFAULT))
}

/// The statistics without the gaps between copies, which take longer to read than everything else.
pub(super) async fn counted<S: AdminStore>(
    admin: &Admin<S>,
    query: &StatsQuery,
) -> Result<Stats, Problem> {
    let Span(window) = window(query);
    if window.is_zero() {
        return Err(Problem::bad_request("window is longer than zero, such as 1h"));
    }
    let since = beginning((admin.now)(), window);
    let all = admin.watch.traffic().since(&*admin.store, since, true).await?;
    let mut paused_handlers = PausedHandlers::of(&*admin.store).await?.into_list();
    if let Some(source) = &query.source {
        paused_handlers.retain(|one| one.source == *source);
    }
    let (figures, sources) = match &query.source {
        Some(source) => match all.get(&SourceName::new(source)) {
            Some(figures) => (Figures::of(figures), None),
            None => return Err(Problem::not_found("no source has that name")),
        },
        None => {
            let mut sum = TrafficFigures::default();
            all.values().for_each(|figures| sum.add_source(figures));
            (Figures::of(&sum), Some(by_source(&all)))
        }
    };
    Ok(Stats {
        window_seconds: window.as_secs_f64(),
        since,
        sampled: false,
        failed_verifications_since: since,
        paused_handlers,
        figures,
        sources,
    })
}

/// The figures of every source that has a count.
fn by_source(all: &BTreeMap<SourceName, TrafficFigures>) -> BTreeMap<String, Figures> {
    let is_something =
        |figures: &TrafficFigures| figures.counts != TrafficFigures::default().counts;
    let counted = all.iter().filter(|(_, figures)| is_something(figures));
    counted.map(|(source, figures)| (source.to_string(), Figures::of(figures))).collect()
}

/// The quantile: the smallest value that is at least as large as the fraction `part` of all values.
fn quantile(sorted: &[f64], part: f64) -> Option<f64> {
    let rank = (part * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

/// The gaps between a sender's retries: the median wait before the second arrival of an event, before
/// the third, and so on. Events with arrivals that were not kept are left out.
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
