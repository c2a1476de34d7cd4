//! The rate limit of an endpoint that two nodes on PostgreSQL share: the arrivals of each second
//! while a backlog waits.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;

use anyhow::ensure;
use serde_json::json;

use crate::drain::FILLING;
use crate::publish::Messages;
use crate::shared::load::Length;
use crate::shared::report::{Table, column};
use crate::sink::{Manner, Sink};
use crate::{IN_FLIGHT, LONG, Options, server};

/// The limit of the endpoint, in a second.
const LIMIT: u64 = 100;

/// Seconds at the start that are not counted: both nodes find the backlog in this time.
const SETTLED: usize = 2;

/// The arrivals of each second.
pub(crate) struct Rate {
    seconds: Vec<u64>,
}

impl Rate {
    pub(crate) fn least(&self) -> f64 {
        self.seconds.iter().min().map_or(f64::NAN, |count| *count as f64)
    }

    pub(crate) fn most(&self) -> f64 {
        self.seconds.iter().max().map_or(f64::NAN, |count| *count as f64)
    }

    pub(crate) fn table(&self) -> Table {
        let columns =
            [column("seconds", 0), column("least/s", 0), column("mean/s", 1), column("most/s", 0)];
        let mut table = Table::new(format!("rate_limit = \"{LIMIT}/s\", PostgreSQL"), columns);
        let all: u64 = self.seconds.iter().sum();
        let mean = all as f64 / self.seconds.len() as f64;
        let numbers = [self.seconds.len() as f64, self.least(), mean, self.most()];
        table.row("two nodes", numbers.map(Some));
        table
    }
}

pub(crate) async fn measure(
    options: &Options,
    directory: &Path,
    database: &str,
) -> anyhow::Result<Rate> {
    let sink = Sink::start()?;
    let one = server(options, &directory.join("one"), Some(database), "")?;
    let two = server(options, &directory.join("two"), Some(database), "")?;
    let limit = format!("{LIMIT}/s");
    let settings = json!({ "max_in_flight": IN_FLIGHT, "rate_limit": limit, "timeout": "60s" });
    sink.add(&one, Manner::Recorded, settings).await?;
    let measured = (options.seconds * LONG).ceil() as usize * options.rounds.max(1);
    // The messages last one second longer than the measurement, because the last second is not
    // whole.
    let messages = LIMIT * (measured + SETTLED + 1) as u64;
    let published = Rc::new(RefCell::new(Messages::default()));
    for node in [&one, &two] {
        let half = Length::Events(messages / 2);
        Messages::publish(&published, node, FILLING, half).await?;
    }
    sink.has_delivered(messages / 2 * 2).await?;
    let arrivals = sink.take_arrivals().await?;
    let first = arrivals.iter().map(|arrival| arrival.arrived_us).min().unwrap_or(0);
    let mut seconds = vec![0; SETTLED + measured];
    for arrival in &arrivals {
        let second = usize::try_from((arrival.arrived_us - first) / 1_000_000)?;
        if let Some(count) = seconds.get_mut(second) {
            *count += 1;
        }
    }
    seconds.drain(..SETTLED);
    ensure!(!seconds.is_empty(), "no whole second");
    Ok(Rate { seconds })
}
