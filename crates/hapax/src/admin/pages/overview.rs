//! The overview: is anything lost, stuck, doubled or forged?

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use askama::Template;
use axum::Json;
use axum::extract::State;
use hapax_core::Timestamp;

use super::super::extract::QueryParams;
use super::super::problem::Problem;
use super::super::{Admin, AdminStore, alerts, history, jobs, stats};
use super::filters::Filters;
use super::plot::Plot;
use super::{Frame, Page, Reader};
use crate::api::{AlertList, Figures, HistoryQuery, Lane, Moment, Span, Stats, StatsQuery};

#[derive(Template)]
#[template(path = "overview.html")]
pub(in crate::admin) struct Overview {
    frame: Frame,
    window: String,
    stats: Stats,
    alerts: AlertList,
    sources: Vec<SourceRow>,
    stuck: Stuck,
    /// Requests that were answered with 503 in the window.
    unavailable: u64,
    plot: Plot,
    is_empty: bool,
    first_command: Option<String>,
}

/// The work that waits for an operator.
struct Stuck {
    dead: u64,
    review: u64,
    dead_deliveries: u64,
}

/// One source in the table.
struct SourceRow {
    name: String,
    figures: Option<Figures>,
    ready: u64,
    dead: u64,
    oldest_due: Option<Timestamp>,
}

/// `GET /`.
pub(in crate::admin) async fn overview<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    reader: Reader,
    filters: Filters,
) -> Result<Page<Overview>, Problem> {
    let frame = reader.frame(&admin, "/").await;
    let query = filters.query::<StatsQuery>()?;
    let Json(stats) = stats::stats(State(Arc::clone(&admin)), query).await?;
    let Json(alerts) = alerts::list(State(Arc::clone(&admin))).await;
    let Json(lanes) = jobs::lanes(State(Arc::clone(&admin))).await?;
    let in_review: u64 = admin.store.in_review().await?.iter().map(|(_, count)| count).sum();
    let dead_deliveries = admin.store.delivery_backlog().await?.dead;
    let sources = source_rows(&stats, &lanes.items);
    let to = (admin.now)();
    let from = Moment::Ago(Span(Duration::from_secs_f64(stats.window_seconds)));
    let query = HistoryQuery { from: Some(from), ..HistoryQuery::default() };
    let Json(history) = history::history(State(Arc::clone(&admin)), QueryParams(query)).await?;
    let page = Overview {
        unavailable: history.items.iter().map(|point| point.unavailable).sum(),
        plot: Plot::of(history, to, stats.window_seconds as u64),
        is_empty: sources.is_empty(),
        first_command: admin.first_command.clone(),
        window: filters.get("window").unwrap_or_else(|| "1h".to_owned()),
        stuck: Stuck {
            dead: lanes.items.iter().map(|lane| lane.dead).sum(),
            review: in_review,
            dead_deliveries,
        },
        frame,
        stats,
        alerts,
        sources,
    };
    Ok(reader.page(page))
}

/// Every source with an event in the window or a job that is not done.
fn source_rows(stats: &Stats, lanes: &[Lane]) -> Vec<SourceRow> {
    let mut rows: BTreeMap<&str, SourceRow> = BTreeMap::new();
    let row = |name: &str| SourceRow {
        name: name.to_owned(),
        figures: None,
        ready: 0,
        dead: 0,
        oldest_due: None,
    };
    for (name, figures) in stats.sources.iter().flatten() {
        rows.entry(name).or_insert_with(|| row(name)).figures = Some(figures.clone());
    }
    for lane in lanes {
        let row = rows.entry(&lane.source).or_insert_with(|| row(&lane.source));
        row.ready += lane.ready + lane.leased + lane.held + lane.parked;
        row.dead += lane.dead;
        row.oldest_due = row.oldest_due.into_iter().chain(lane.oldest_due).min();
    }
    rows.into_values().collect()
}
