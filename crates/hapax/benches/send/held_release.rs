//! A disabled endpoint with many held deliveries is enabled. Measures how many deliveries it gets
//! at once, and the latency of acks in an open loop meanwhile, compared with a server that does not
//! send.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use hapax_core::rate_limit::RELEASE_FOR;
use serde_json::json;

use crate::acks_while_sending::Sent;
use crate::drain::FILLING;
use crate::publish::Messages;
use crate::shared::load::{self, Length, Load};
use crate::shared::open::{self, Paced, Plan};
use crate::shared::report::Table;
use crate::shared::{CONNECTIONS, WARM_UP};
use crate::sink::{Arrival, Manner, Sink, ask};
use crate::{Options, server};

/// The endpoint's `max_in_flight`.
const LIMIT: u32 = 16;

/// The latency of acks, and the load on the endpoint.
pub(crate) struct Herd {
    without: Paced,
    spread: Paced,
    draining: Paced,
    held: u64,
    most_at_once: u32,
    most_in_a_second: u64,
}

impl Herd {
    /// The ratio of ack latency while the deliveries are spread out, and while the remaining
    /// backlog drains.
    pub(crate) fn ratios(&self) -> [f64; 2] {
        let p99 = |side: &Paced| side.measured.latency_us(0.99);
        [&self.spread, &self.draining].map(|side| p99(side) / p99(&self.without))
    }

    pub(crate) fn at_once_to_limit(&self) -> f64 {
        f64::from(self.most_at_once) / f64::from(LIMIT)
    }

    pub(crate) fn table(&self) -> Table {
        let mut table = Table::of_loads("acks in an open loop", []);
        table.load("beside nothing", &self.without.measured, None, []);
        table.load("in the minute after enable", &self.spread.measured, None, []);
        table.load("while the rest drains", &self.draining.measured, None, []);
        table.note(format!(
            "{} held deliveries; at most {} under way at once, with max_in_flight = {LIMIT}",
            self.held, self.most_at_once
        ));
        table.note(format!("in that minute at most {} arrived in a second", self.most_in_a_second));
        table
    }
}

pub(crate) async fn measure(options: &Options, directory: &Path) -> anyhow::Result<Herd> {
    let sink = Sink::start()?;
    let alone = Sent::to(server(options, &directory.join("alone"), None, "")?);
    let sending = Sent::to(server(options, &directory.join("sending"), None, "")?);
    let settings = json!({ "max_in_flight": LIMIT, "timeout": "60s" });
    let endpoint = sink.add(&sending.server, Manner::Slow, settings).await?;
    let time = Duration::from_secs_f64(options.seconds);
    let (at, length) = (&[&alone.server], Length::Time(time));
    let most = load::run(at, &alone.events, Load::New, CONNECTIONS, length, Some(WARM_UP)).await?;
    let plan = Plan { per_second: most.per_second() / 3.0, time, warm_up: WARM_UP };
    let messages = Rc::new(RefCell::new(Messages::default()));
    let mut all: Option<Herd> = None;
    for _ in 0..options.rounds.max(1) {
        let change = async |how: &str| {
            let path = format!("/api/v1/endpoints/{endpoint}/{how}");
            ask(sending.server.admin()?, "POST", &path, "{}").await
        };
        change("disable").await?;
        let delivered = sink.delivered().await? + options.held;
        let held = Length::Events(options.held);
        Messages::publish(&messages, &sending.server, FILLING, held).await?;
        let without = open::run(&alone.server, &alone.events, plan).await?;

        let released = Instant::now();
        change("enable").await?;
        let spread = open::run(&sending.server, &sending.events, plan).await?;
        tokio::time::sleep(RELEASE_FOR.saturating_sub(released.elapsed())).await;
        let mut draining = open::run(&sending.server, &sending.events, plan).await?;
        while sink.delivered().await? < delivered {
            draining.join(open::run(&sending.server, &sending.events, plan).await?);
        }
        let arrivals = sink.take_arrivals().await?;
        let most_at_once = arrivals.iter().map(|arrival| arrival.under_way).max().unwrap_or(0);
        let most_in_a_second = most_in_a_second(&arrivals);
        match &mut all {
            None => {
                let held = options.held;
                all =
                    Some(Herd { without, spread, draining, held, most_at_once, most_in_a_second });
            }
            Some(all) => {
                all.without.join(without);
                all.spread.join(spread);
                all.draining.join(draining);
                all.held += options.held;
                all.most_at_once = all.most_at_once.max(most_at_once);
                all.most_in_a_second = all.most_in_a_second.max(most_in_a_second);
            }
        }
    }
    all.ok_or_else(|| anyhow::anyhow!("no rounds"))
}

/// The most arrivals in one of the whole seconds in which the deliveries were spread out.
fn most_in_a_second(arrivals: &[Arrival]) -> u64 {
    let first = arrivals.iter().map(|arrival| arrival.arrived_us).min().unwrap_or(0);
    let seconds = usize::try_from(RELEASE_FOR.as_secs()).unwrap_or(0).saturating_sub(1);
    let mut counts = vec![0; seconds];
    for arrival in arrivals {
        let second = usize::try_from((arrival.arrived_us - first) / 1_000_000);
        if let Some(count) = second.ok().and_then(|second| counts.get_mut(second)) {
            *count += 1;
        }
    }
    counts.into_iter().max().unwrap_or(0)
}
