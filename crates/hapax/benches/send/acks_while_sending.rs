//! Acks while a backlog drains: their latency in an open loop at a third of the machine's capacity, on a
//! server that delivers a backlog, compared with a server without one.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use anyhow::ensure;

use crate::publish::Messages;
use crate::shared::events::Events;
use crate::shared::load::{self, Length, Load};
use crate::shared::open::{self, Paced, Plan};
use crate::shared::report::Table;
use crate::shared::server::Server;
use crate::shared::{CONNECTIONS, WARM_UP};
use crate::sink::Sink;
use crate::{IN_FLIGHT, Options, server};

/// The results of both sides.
pub(crate) struct Beside {
    without: Paced,
    draining: Paced,
    /// Deliveries during the slices with a backlog, and whether the backlog outlasted every slice.
    delivered: u64,
    lasted: bool,
}

impl Beside {
    pub(crate) fn ratio(&self) -> f64 {
        self.draining.measured.latency_us(0.99) / self.without.measured.latency_us(0.99)
    }

    pub(crate) fn table(&self) -> Table {
        let mut table = Table::of_loads("acks in an open loop", []);
        table.load("beside nothing", &self.without.measured, None, []);
        table.load("while a backlog drains", &self.draining.measured, None, []);
        let lasted = if self.lasted { "outlasted" } else { "ended before the end of" };
        table.note(format!(
            "{} deliveries beside the acks; the backlog {lasted} the slices",
            self.delivered
        ));
        table
    }
}

/// A server, and the events that were sent to it alone.
pub(crate) struct Sent {
    pub(crate) server: Server,
    pub(crate) events: Rc<RefCell<Events>>,
}

impl Sent {
    pub(crate) fn to(server: Server) -> Self {
        Self { server, events: Rc::new(RefCell::new(Events::new(0))) }
    }
}

pub(crate) async fn measure(options: &Options, directory: &Path) -> anyhow::Result<Beside> {
    let sink = Sink::start()?;
    let alone = Sent::to(server(options, &directory.join("alone"), None, "")?);
    let draining = Sent::to(server(options, &directory.join("draining"), None, "")?);
    sink.add_to(&draining.server, IN_FLIGHT).await?;
    let time = Duration::from_secs_f64(options.seconds);
    let (at, length) = (&[&alone.server], Length::Time(time));
    let most = load::run(at, &alone.events, Load::New, CONNECTIONS, length, Some(WARM_UP)).await?;
    let plan = Plan { per_second: most.per_second() / 3.0, time, warm_up: WARM_UP };

    let messages = Rc::new(RefCell::new(Messages::default()));
    let mut all: Option<Beside> = None;
    for _ in 0..options.rounds.max(1) {
        let without = open::run(&alone.server, &alone.events, plan).await?;
        let before = sink.delivered().await?;
        sink.close().await?;
        let backlog = Length::Events(options.messages);
        Messages::publish(&messages, &draining.server, CONNECTIONS, backlog).await?;
        sink.open().await?;
        let with = open::run(&draining.server, &draining.events, plan).await?;
        let delivered = sink.delivered().await? - before;
        ensure!(delivered > 0, "nothing was delivered beside the acks");
        let lasted = delivered < options.messages;
        sink.drained(&draining.server, before + options.messages).await?;
        match &mut all {
            None => all = Some(Beside { without, draining: with, delivered, lasted }),
            Some(all) => {
                all.without.join(without);
                all.draining.join(with);
                all.delivered += delivered;
                all.lasted &= lasted;
            }
        }
    }
    all.ok_or_else(|| anyhow::anyhow!("no rounds"))
}
