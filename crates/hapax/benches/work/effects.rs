//! From accepted to committed: the effects of SQL handlers per second, while events arrive at full
//! rate, compared with the rate at which the same server accepts events without a handler.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::Options;
use crate::ledger::{CHARGE, Ledger};
use crate::shared::events::Events;
use crate::shared::load::{self, Length, Load, Measured};
use crate::shared::server::{Server, Setup};
use crate::shared::{CONNECTIONS, WARM_UP};

/// Two servers that differ in one handler.
pub(crate) struct Pair {
    pub(crate) alone: Sent,
    pub(crate) working: Sent,
    pub(crate) ledger: Ledger,
}

/// A server, and the events that were sent to it alone.
pub(crate) struct Sent {
    pub(crate) server: Server,
    pub(crate) events: Rc<RefCell<Events>>,
}

/// The results.
#[derive(Default)]
pub(crate) struct Effects {
    /// Ingest without a handler.
    pub(crate) alone: Measured,
    /// Ingest while the handler works.
    pub(crate) working: Measured,
    pub(crate) effects: u64,
    /// From the first event sent to the last effect seen.
    pub(crate) seconds: f64,
    /// The part of that time after the last ack.
    pub(crate) seconds_after: f64,
}

impl Sent {
    pub(crate) fn to(server: Server) -> Self {
        Self { server, events: Rc::new(RefCell::new(Events::new(0))) }
    }

    pub(crate) fn made(&self) -> u64 {
        self.events.borrow().made()
    }
}

impl Pair {
    pub(crate) fn start(options: &Options, directory: &Path) -> anyhow::Result<Self> {
        let hapax = &options.place.hapax;
        let alone = Server::hapax(hapax, &directory.join("alone"), &Setup::default())?;
        let working = directory.join("working");
        let ledger = Ledger::of_fees(&working)?;
        let setup = Setup { tables: CHARGE.to_owned(), ..Setup::default() };
        let working = Server::hapax(hapax, &working, &setup)?;
        Ok(Self { alone: Sent::to(alone), working: Sent::to(working), ledger })
    }

    pub(crate) async fn measure(&self, options: &Options) -> anyhow::Result<Effects> {
        let length = Length::Time(Duration::from_secs_f64(options.seconds));
        let mut all = Effects::default();
        for _ in 0..options.rounds.max(1) {
            let (server, events) = (&[&self.alone.server], &self.alone.events);
            let warm_up = Some(WARM_UP);
            let alone = load::run(server, events, Load::New, CONNECTIONS, length, warm_up).await?;
            all.alone.join(alone);

            let (server, events) = (&[&self.working.server], &self.working.events);
            let (made, began) = (self.working.made(), Instant::now());
            let working = load::run(server, events, Load::New, CONNECTIONS, length, None).await?;
            let acked = Instant::now();
            let last = self.ledger.wait_for(self.working.made()).await?;
            all.working.join(working);
            all.effects += self.working.made() - made;
            all.seconds += last.duration_since(began).as_secs_f64();
            all.seconds_after += last.duration_since(acked).as_secs_f64();
        }
        Ok(all)
    }

    /// Checks that each event that was ever sent has one effect.
    pub(crate) fn finish(self) -> anyhow::Result<()> {
        self.ledger.is_once_each(self.working.made())
    }
}

impl Effects {
    pub(crate) fn per_second(&self) -> f64 {
        self.effects as f64 / self.seconds
    }

    pub(crate) fn ratio(&self) -> f64 {
        self.per_second() / self.alone.per_second()
    }
}
