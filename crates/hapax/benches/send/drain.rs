//! A backlog drained to one endpoint, every attempt durable, against a bare client that posts as many messages to
//! the same endpoint.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use tokio::process::Command;

use crate::publish::Messages;
use crate::shared::load::Length;
use crate::shared::report::{Table, column};
use crate::sink::Sink;
use crate::{IN_FLIGHT, Options, server};

/// Connections that fill a backlog.
pub(crate) const FILLING: usize = 64;

/// Messages that were delivered, and in what time.
#[derive(Default)]
pub(crate) struct Delivered {
    pub(crate) messages: u64,
    pub(crate) seconds: f64,
    pub(crate) cpu_seconds: Option<f64>,
}

impl Delivered {
    pub(crate) fn per_second(&self) -> f64 {
        self.messages as f64 / self.seconds
    }
}

/// The results of both sides.
#[derive(Default)]
pub(crate) struct Drained {
    client: Delivered,
    hapax: Delivered,
}

impl Drained {
    pub(crate) fn ratio(&self) -> f64 {
        self.hapax.per_second() / self.client.per_second()
    }

    pub(crate) fn table(&self, title: &str) -> Table {
        let columns = [column("messages", 0), column("messages/s", 0), column("cpu us", 1)];
        let mut table = Table::new(title, columns);
        for (name, side) in [("bare client", &self.client), ("hapax", &self.hapax)] {
            let cpu = side.cpu_seconds.map(|seconds| seconds * 1e6 / side.messages as f64);
            table.row(name, [Some(side.messages as f64), Some(side.per_second()), cpu]);
        }
        table
    }
}

pub(crate) async fn measure(
    options: &Options,
    directory: &Path,
    database: Option<&str>,
) -> anyhow::Result<Drained> {
    let sink = Sink::start()?;
    let hapax = server(options, directory, database, "")?;
    sink.add_to(&hapax, IN_FLIGHT).await?;
    let messages = Rc::new(RefCell::new(Messages::default()));
    let mut all = Drained::default();
    for _ in 0..options.rounds.max(1) {
        all.client.messages += options.messages;
        all.client.seconds += client_seconds(&sink, options.messages).await?;

        let before = sink.delivered().await?;
        sink.close().await?;
        let backlog = Length::Events(options.messages);
        Messages::publish(&messages, &hapax, FILLING, backlog).await?;
        let usage = hapax.usage()?;
        let began = Instant::now();
        sink.open().await?;
        let last = sink.drained(&hapax, before + options.messages).await?;
        all.hapax.messages += options.messages;
        all.hapax.seconds += last.duration_since(began).as_secs_f64();
        let cpu_seconds = hapax.usage()?.cpu_seconds - usage.cpu_seconds;
        *all.hapax.cpu_seconds.get_or_insert_default() += cpu_seconds;
        let delivered = sink.delivered().await? - before;
        ensure!(
            delivered == options.messages,
            "{} messages were delivered {delivered} times",
            options.messages
        );
    }
    Ok(all)
}

async fn client_seconds(sink: &Sink, messages: u64) -> anyhow::Result<f64> {
    let ran = Command::new(std::env::current_exe().context("finding ourselves")?)
        .arg("--client")
        .arg(sink.address().to_string())
        .arg("--messages")
        .arg(messages.to_string())
        .output()
        .await
        .context("starting the bare client")?;
    ensure!(ran.status.success(), "the bare client: {}", String::from_utf8_lossy(&ran.stderr));
    Ok(String::from_utf8(ran.stdout)?.trim().parse()?)
}
