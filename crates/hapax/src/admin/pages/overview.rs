//! The overview: is anything lost, stuck, doubled or forged?

use std::collections::BTreeMap;
use std::sync::Arc;

use askama::Template;
use axum::Json;
use axum::extract::State;
use hapax_core::store::TrafficFigures;
use hapax_core::{SourceName, Timestamp};

use super::super::extract::QueryParams;
use super::super::problem::Problem;
use super::super::{Admin, AdminStore, alerts, history, jobs, nodes, stats};
use super::filters::Filters;
use super::plot::Plot;
use super::text::CappedCount;
use super::{Frame, Page, PageReader};
use crate::api::{Alert, AlertList, Figures, HistoryQuery, Lane, Moment, Node, Stats, StatsQuery};

/// The most alerts that the overview shows, so that the figures stay in view. The page of alerts has all.
const ALERTS_SHOWN: usize = 5;

/// The most sources whose refused requests are counted separately.
const FORGED_SHOWN: usize = 3;

#[derive(Template)]
#[template(path = "overview.html")]
pub(in crate::admin) struct Overview {
    frame: Frame,
    window: String,
    stats: Stats,
    alerts: AlertList,
    nodes: Vec<Node>,
    sources: Vec<SourceRow>,
    stuck: Stuck,
    plot: Plot,
    is_empty: bool,
    first_command: Option<String>,
}

/// The work that waits for an operator.
struct Stuck {
    dead: CappedCount,
    review: CappedCount,
    dead_deliveries: u64,
}

/// One source in the table.
struct SourceRow {
    name: String,
    figures: Option<Figures>,
    /// The share of copies in the last week.
    usual: Option<f64>,
    waiting: CappedCount,
    dead: CappedCount,
    oldest_due: Option<Timestamp>,
    /// The last arrival in the window or in the last week.
    last_arrival: Option<Timestamp>,
}

/// The row of a source, which is added if it is missing.
fn row_of<'a>(rows: &'a mut BTreeMap<String, SourceRow>, name: &str) -> &'a mut SourceRow {
    rows.entry(name.to_owned()).or_insert_with(|| SourceRow::new(name))
}

impl SourceRow {
    /// The row of a source without figures.
    fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            figures: None,
            usual: None,
            waiting: CappedCount::default(),
            dead: CappedCount::default(),
            oldest_due: None,
            last_arrival: None,
        }
    }
}

/// `GET /`.
pub(in crate::admin) async fn overview<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    reader: PageReader,
    filters: Filters,
) -> Result<Page<Overview>, Problem> {
    let frame = reader.frame(&admin, "/").await;
    let QueryParams(query) = filters.query::<StatsQuery>()?;
    let stats = stats::counted(&admin, &query).await?;
    let span = stats::window(&query);
    let alerts = alerts::recent(&admin).await;
    let Json(lanes) = jobs::lanes(State(Arc::clone(&admin))).await?;
    let Json(nodes) = nodes::list(State(Arc::clone(&admin))).await?;
    let mut stuck = Stuck {
        dead: CappedCount::default(),
        review: CappedCount::default(),
        dead_deliveries: admin.store.delivery_backlog().await?.dead,
    };
    lanes.items.iter().for_each(|lane| stuck.dead.add(lane.dead));
    let in_review = admin.store.in_review().await?;
    in_review.iter().for_each(|(_, count)| stuck.review.add(*count));
    let to = (admin.now)();
    let week = admin.watch.traffic().last_week(&*admin.store).await?;
    let mut sources = source_rows(&stats, &lanes.items, &week);
    let is_empty = sources.is_empty();
    // In dev mode every preset is a source.
    if admin.first_command.is_none() {
        for source in admin.watch.traffic().sources() {
            row_of(&mut sources, source.as_str());
        }
    }
    let query = HistoryQuery { from: Some(Moment::Ago(span)), ..HistoryQuery::default() };
    let Json(history) = history::history(State(Arc::clone(&admin)), QueryParams(query)).await?;
    let page = Overview {
        plot: Plot::of(history, to, stats.window_seconds as u64),
        is_empty,
        first_command: admin.first_command.clone(),
        window: filters.get("window").unwrap_or_else(|| "1h".to_owned()),
        stuck,
        frame,
        stats,
        alerts,
        nodes: nodes.items,
        sources: sources.into_values().collect(),
    };
    Ok(reader.page(page))
}

/// Every source with a count in the window or in the last week, or with an unfinished job. A source that went silent
/// keeps its row.
fn source_rows(
    stats: &Stats,
    lanes: &[Lane],
    week: &BTreeMap<SourceName, TrafficFigures>,
) -> BTreeMap<String, SourceRow> {
    let mut rows: BTreeMap<String, SourceRow> = BTreeMap::new();
    for (name, figures) in week {
        let figures = Figures::of(figures);
        if figures.received == 0 && figures.failed_verifications == 0 {
            continue;
        }
        let row = row_of(&mut rows, name.as_str());
        (row.usual, row.last_arrival) = (figures.duplicate_rate, figures.last_arrival);
    }
    for (name, figures) in stats.sources.iter().flatten() {
        let row = row_of(&mut rows, name);
        row.last_arrival = row.last_arrival.max(figures.last_arrival);
        row.figures = Some(figures.clone());
    }
    for lane in lanes {
        let row = row_of(&mut rows, &lane.source);
        let waiting = [lane.ready, lane.leased, lane.held, lane.parked];
        waiting.into_iter().for_each(|count| row.waiting.add(count));
        row.dead.add(lane.dead);
        row.oldest_due = row.oldest_due.into_iter().chain(lane.oldest_due).min();
    }
    rows
}

impl Overview {
    /// The first alerts. Critical ones come first.
    fn first_alerts(&self) -> &[Alert] {
        let alerts = &self.alerts.items;
        &alerts[..alerts.len().min(ALERTS_SHOWN)]
    }

    /// How many alerts only the page of alerts shows.
    fn more_alerts(&self) -> usize {
        self.alerts.items.len().saturating_sub(ALERTS_SHOWN)
    }

    /// The sources with the most refused requests.
    fn most_forged(&self) -> Vec<(&str, u64)> {
        let count = |row: &SourceRow| row.figures.as_ref().map_or(0, |it| it.failed_verifications);
        let mut sources: Vec<_> =
            self.sources.iter().map(|row| (row.name.as_str(), count(row))).collect();
        sources.retain(|(_, count)| *count > 0);
        sources.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        sources.truncate(FORGED_SHOWN);
        sources
    }

    /// How many nodes run.
    fn running(&self) -> usize {
        self.nodes.iter().filter(|node| node.alive).count()
    }

    /// The last check-in of any node. The figures of all nodes are about this old.
    fn checked_in(&self) -> Option<Timestamp> {
        self.nodes.iter().map(|node| node.seen_at).max()
    }

    /// The nodes that stopped without a shutdown.
    fn missing(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().filter(|node| !node.alive)
    }
}
