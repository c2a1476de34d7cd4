//! `cargo bench --bench keys`: the cost of a proxy with Idempotency-Keys in front of an app.
//!
//! The app is the floor of the other benches: it verifies a request of a kilobyte and answers. The app is
//! called directly, through a proxy without keys, with new keys, and with used keys. The keys are in SQLite
//! and in a real PostgreSQL. All slices alternate in the same run. A request through the proxy costs at least
//! two: one to the proxy, one to the app. docs/benchmarks.md explains the figures.

#[path = "../shared/mod.rs"]
mod shared;

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use clap::Parser;
use hapax_sim::Postgres;

use crate::shared::events::Events;
use crate::shared::figures::Figure;
use crate::shared::load::{self, Length, Load, Measured};
use crate::shared::report::{Report, Table};
use crate::shared::server::Server;
use crate::shared::{CONNECTIONS, Place, WARM_UP, floor, on_one_thread};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The number of keys that are used repeatedly.
const REPEATED: u64 = 64;

#[derive(Parser)]
#[command(about = "What Idempotency-Keys cost in front of an app")]
struct Options {
    /// Seconds of one measured slice
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Slices of each kind, in turn
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    #[command(flatten)]
    place: Place,
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    if options.place.floor {
        return floor::run();
    }
    let directory = options.place.directory()?;
    let report = on_one_thread(measure(&options, directory.path()))?;
    options.place.output.print(&report)
}

/// One path to the app.
struct Way<'a> {
    name: &'static str,
    server: &'a Server,
    events: Rc<RefCell<Events>>,
    load: Load,
    measured: Measured,
}

async fn measure(options: &Options, directory: &Path) -> anyhow::Result<Report> {
    let app = Server::floor()?;
    let postgres = Postgres::start().await;
    let database = format!("database_url = {:?}\n", postgres.create_database("keys").await);
    let binary = &options.place.hapax;
    let sqlite = Server::proxy(binary, &directory.join("sqlite"), &app, String::new())?;
    let shared = Server::proxy(binary, &directory.join("postgres"), &app, database)?;
    let plain = Rc::new(RefCell::new(Events::new(REPEATED)));
    let (ours, theirs) = (keyed(), keyed());
    let way = |name, server, events: &Rc<RefCell<Events>>, load| Way {
        name,
        server,
        events: Rc::clone(events),
        load,
        measured: Measured::default(),
    };
    let mut ways = [
        way("the app itself", &app, &plain, Load::New),
        way("through a proxy, without a key", &sqlite, &plain, Load::New),
        way("new keys, SQLite", &sqlite, &ours, Load::New),
        way("keys used before, SQLite", &sqlite, &ours, Load::Copies),
        way("new keys, PostgreSQL", &shared, &theirs, Load::New),
        way("keys used before, PostgreSQL", &shared, &theirs, Load::Copies),
    ];
    let length = Length::Time(Duration::from_secs_f64(options.seconds));
    for _ in 0..options.rounds {
        for way in &mut ways {
            options.place.output.say(way.name);
            let (servers, warm_up) = ([way.server], Some(WARM_UP));
            let slice = load::run(&servers, &way.events, way.load, CONNECTIONS, length, warm_up);
            way.measured.join(slice.await?);
        }
    }
    let mut table = Table::of_loads(format!("{CONNECTIONS} connections; the floor is the app"), []);
    let [app, others @ ..] = &ways;
    table.load(app.name, &app.measured, None, []);
    for way in others {
        table.load(way.name, &way.measured, Some(&app.measured), []);
    }
    let mut report = Report::default();
    report.table(table);
    let rate =
        |name: &str| ways.iter().find(|way| way.name == name).map(|way| way.measured.per_second());
    for (name, at_least, aim) in
        [("new keys, SQLite", 0.25, 0.35), ("new keys, PostgreSQL", 0.12, 0.25)]
    {
        let ratio = rate(name).unwrap_or(0.0) / ways[0].measured.per_second();
        report.figures([Figure::higher(format!("{name}, to the app"), ratio, at_least, aim)]);
    }
    Ok(report)
}

fn keyed() -> Rc<RefCell<Events>> {
    Rc::new(RefCell::new(Events::with_keys(REPEATED)))
}
