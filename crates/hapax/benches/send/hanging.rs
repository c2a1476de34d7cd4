//! Some endpoints never answer. Measures how long a delivery to another endpoint takes from its
//! publication to its arrival, compared with a run without endpoints that hang. Both runs of a pair
//! have a fresh server.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use serde_json::json;
use tokio::task::JoinSet;

use crate::backlog::at_most;
use crate::publish::{Messages, numbered_type};
use crate::shared::WARM_UP;
use crate::shared::load::Measured;
use crate::shared::open::{self, Plan};
use crate::shared::report::Table;
use crate::sink::{Manner, Sink};
use crate::{LONG, Options, server};

/// One of this many endpoints hangs.
const HANGING_OF: u64 = 20;

/// Endpoints that are added at once.
const ADDING: usize = 32;

/// The deliveries of both sides, and the ratio of each pair of runs.
pub(crate) struct Hanging {
    without: Measured,
    beside: Measured,
    ratios: Vec<f64>,
    endpoints: u64,
}

impl Hanging {
    /// The median ratio over all pairs.
    pub(crate) fn ratio(&self) -> f64 {
        let mut sorted = self.ratios.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
    }

    pub(crate) fn table(&self) -> Table {
        let hanging = self.endpoints / HANGING_OF;
        let mut table = Table::of_loads("from published to arrived, in an open loop", []);
        table.load("without endpoints that hang", &self.without, None, []);
        let name = format!("beside {hanging} of {} that hang", self.endpoints);
        table.load(name, &self.beside, None, []);
        let ratios: Vec<String> = self.ratios.iter().map(|ratio| format!("{ratio:.2}")).collect();
        table.note(format!("p99 of each pair, relative to without: {}", ratios.join(", ")));
        table.note("the endpoints that hang are not counted");
        table
    }
}

pub(crate) async fn measure(options: &Options, directory: &Path) -> anyhow::Result<Hanging> {
    let mut all = Hanging {
        without: Measured::default(),
        beside: Measured::default(),
        ratios: Vec::new(),
        endpoints: options.hanging_among,
    };
    for round in 0..options.rounds.max(1) {
        let run = |name: &str, with_hanging| {
            let directory = directory.join(format!("{name}-{round}"));
            async move { deliveries(options, &directory, with_hanging).await }
        };
        let without = run("without", false).await?;
        let beside = run("beside", true).await?;
        all.ratios.push(beside.latency_us(0.99) / without.latency_us(0.99));
        all.without.join(without);
        all.beside.join(beside);
    }
    Ok(all)
}

/// The deliveries to endpoints that answer, each with the time from its publication.
async fn deliveries(
    options: &Options,
    directory: &Path,
    with_hanging: bool,
) -> anyhow::Result<Measured> {
    let sink = Arc::new(Sink::start()?);
    let hapax = Arc::new(server(options, directory, None, "")?);
    let (endpoints, hanging) = (options.hanging_among, options.hanging_among / HANGING_OF);
    ensure!(hanging > 0, "at least {HANGING_OF} endpoints");
    let numbers = if with_hanging { 0..endpoints } else { hanging..endpoints };
    let mut adding = JoinSet::new();
    for number in numbers.clone() {
        let manner = if number < hanging { Manner::Hangs } else { Manner::Recorded };
        let (sink, hapax) = (Arc::clone(&sink), Arc::clone(&hapax));
        adding.spawn(async move {
            let settings = json!({ "types": [numbered_type(number)] });
            sink.add(&hapax, manner, settings).await.map(drop)
        });
        at_most(&mut adding, ADDING).await?;
    }
    at_most(&mut adding, 0).await?;

    // Each endpoint gets the same number of messages in both runs.
    let share = (numbers.end - numbers.start) as f64 / endpoints as f64;
    let time = Duration::from_secs_f64(options.seconds * LONG);
    let plan = Plan { per_second: options.per_second * share, time, warm_up: WARM_UP };
    let messages = Rc::new(RefCell::new(Messages::of_types(numbers)));
    let published = open::run_at(&hapax, hapax.admin()?, None, &messages, plan).await?.measured;
    let recorded = messages.borrow().made_of_types(hanging..endpoints);
    sink.has_delivered(recorded).await?;
    let arrivals = sink.take_arrivals().await?;
    ensure!(arrivals.len() as u64 == recorded, "{recorded} messages, {} times", arrivals.len());
    let measured_from = arrivals.iter().map(|arrival| arrival.published_us).min().unwrap_or(0)
        + u64::try_from(WARM_UP.as_micros())?;
    let measured = arrivals.iter().filter(|arrival| arrival.published_us >= measured_from);
    let took = measured.map(|arrival| arrival.arrived_us.saturating_sub(arrival.published_us));
    let latencies_us = took.map(|us| u32::try_from(us).unwrap_or(u32::MAX)).collect();
    let usage = hapax.usage()?;
    let mut measured = Measured::new(plan.time.as_secs_f64(), usage, usage, latencies_us);
    measured.cpu_seconds = published.cpu_seconds;
    Ok(measured)
}
