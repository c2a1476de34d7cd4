//! `cargo bench --bench ingest`: the cost of Hapax compared with a server that stores nothing.
//!
//! One run starts the floor (the same HTTP loop and the same verification, no store) and Hapax (the
//! real binary, full durability). The bench loads both in alternating slices and prints the ratios.
//! docs/benchmarks.md explains the figures.

mod disk;
mod report;
#[path = "../shared/mod.rs"]
mod shared;
mod storm;

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use clap::{Parser, ValueEnum};

use crate::disk::Syncs;
use crate::report::{Findings, Growth, Pairing, Steady};
use crate::shared::events::Events;
use crate::shared::load::{self, Length, Load, Measured};
use crate::shared::open::{self, Plan};
use crate::shared::server::{Server, Setup};
use crate::shared::{CONNECTIONS, Place, WARM_UP, floor, on_one_thread};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Events that count as the beginning of a growing store.
const GROWTH_FIRST: u64 = 100_000;

/// Events measured at the end of the growing store: enough for two merges of the key index, so that
/// their cost is part of the figure.
const GROWTH_LAST: u64 = 400_000;

#[derive(Parser)]
#[command(about = "Hapax against a floor that verifies and stores nothing, under the same load")]
struct Options {
    /// Connections at once, each with one request in flight
    #[arg(long, value_delimiter = ',', default_value = "1,16,64,256")]
    connections: Vec<usize>,
    /// Loads to run
    #[arg(long, value_delimiter = ',', default_value = "new,copies,steady,storm,growth")]
    loads: Vec<Wanted>,
    /// Seconds of one measured slice
    #[arg(long, default_value_t = 1.5)]
    seconds: f64,
    /// Slices of each server and load, floor and Hapax in turn
    #[arg(long, default_value_t = 2)]
    rounds: usize,
    /// Seconds of the open loop at half the top rate
    #[arg(long, default_value_t = 10.0)]
    steady_seconds: f64,
    /// Keys that the growing store ends with
    #[arg(long, default_value_t = 1_000_000)]
    grow: u64,
    /// Distinct events that the load of duplicates repeats
    #[arg(long, default_value_t = 1_000)]
    copies_of: u64,
    /// Known events that each arrive once more in a retry storm
    #[arg(long, default_value_t = 200_000)]
    storm: u64,
    /// The stores of the retry storms
    #[arg(long, value_delimiter = ',', default_value = "sqlite,postgres")]
    stores: Vec<StoreKind>,
    #[command(flatten)]
    place: Place,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Wanted {
    New,
    Copies,
    Steady,
    Storm,
    Growth,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum StoreKind {
    Sqlite,
    Postgres,
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    if options.place.floor {
        return floor::run();
    }
    let directory = options.place.directory()?;
    let report = on_one_thread(measure(&options, directory.path()))?;
    options.place.output.print(&report.report())
}

async fn measure(options: &Options, directory: &Path) -> anyhow::Result<Findings> {
    let mut report = Findings::default();
    let floor = Server::floor()?;
    let events = Rc::new(RefCell::new(Events::new(options.copies_of)));
    let wanted = |load| options.loads.contains(&load);
    if [Wanted::New, Wanted::Copies, Wanted::Steady].into_iter().any(wanted) {
        let hapax =
            Server::hapax(&options.place.hapax, &directory.join("steady"), &Setup::default())?;
        // Events that are repeated later must be stored first.
        load::run(&[&hapax], &events, Load::New, 16, Length::Events(options.copies_of), None)
            .await?;
        for (name, load) in [(Wanted::New, Load::New), (Wanted::Copies, Load::Copies)] {
            for connections in options.connections.iter().copied().filter(|_| wanted(name)) {
                options.place.output.say(&format!("{} at {connections} connections", load.name()));
                let paired = pair(options, &floor, &hapax, &events, load, connections, directory);
                report.pairings.push(paired.await?);
            }
        }
        if wanted(Wanted::Steady) {
            options.place.output.say("new events in an open loop");
            report.steady = Some(steady(options, &hapax, &events).await?);
        }
    }
    if wanted(Wanted::Storm) {
        report.storms = storm::measure(options, &floor, directory).await?;
    }
    if wanted(Wanted::Growth) && options.grow > GROWTH_FIRST + GROWTH_LAST {
        options.place.output.say(&format!("a store that grows to {} keys", options.grow));
        report.growth = Some(grow(options, &floor, directory).await?);
    }
    Ok(report)
}

/// Loads the floor and Hapax in alternating slices, so that other activity on the machine affects
/// both.
async fn pair(
    options: &Options,
    floor: &Server,
    hapax: &Server,
    events: &Rc<RefCell<Events>>,
    load: Load,
    connections: usize,
    directory: &Path,
) -> anyhow::Result<Pairing> {
    let length = Length::Time(Duration::from_secs_f64(options.seconds));
    let mut pairing = Pairing {
        load,
        connections,
        floor: Measured::default(),
        hapax: Measured::default(),
        syncs: (connections == 1 && load == Load::New).then(Syncs::default),
    };
    for _ in 0..options.rounds.max(1) {
        let measured =
            load::run(&[floor], events, load, connections, length, Some(WARM_UP)).await?;
        pairing.floor.join(measured);
        if let Some(syncs) = &mut pairing.syncs {
            syncs.measure(directory)?;
        }
        let measured =
            load::run(&[hapax], events, load, connections, length, Some(WARM_UP)).await?;
        pairing.hapax.join(measured);
    }
    Ok(pairing)
}

/// New events at half the top rate, at planned times: what senders see while the server has room.
async fn steady(
    options: &Options,
    hapax: &Server,
    events: &Rc<RefCell<Events>>,
) -> anyhow::Result<Steady> {
    let length = Length::Time(Duration::from_secs_f64(options.seconds));
    let top = load::run(&[hapax], events, Load::New, CONNECTIONS, length, Some(WARM_UP)).await?;
    let plan = Plan {
        per_second: top.per_second() / 2.0,
        time: Duration::from_secs_f64(options.steady_seconds),
        warm_up: WARM_UP,
    };
    let paced = open::run(hapax, events, plan).await?;
    Ok(Steady { per_second: plan.per_second, paced })
}

async fn grow(options: &Options, floor: &Server, directory: &Path) -> anyhow::Result<Growth> {
    let hapax = Server::hapax(&options.place.hapax, &directory.join("growing"), &Setup::default())?;
    let events = Rc::new(RefCell::new(Events::new(0)));
    let floor_length = Length::Time(Duration::from_secs_f64(options.seconds));
    let at = CONNECTIONS;
    let new = Load::New;
    let floor_first = load::run(&[floor], &events, new, at, floor_length, Some(WARM_UP)).await?;
    // The floor stores nothing, so Hapax has not seen these ids before.
    let first = Length::Events(GROWTH_FIRST);
    let first = load::run(&[&hapax], &events, new, at, first, None).await?;
    let between = Length::Events(options.grow - GROWTH_FIRST - GROWTH_LAST);
    load::run(&[&hapax], &events, new, 256, between, None).await?;
    let floor_last = load::run(&[floor], &events, new, at, floor_length, Some(WARM_UP)).await?;
    let last = Length::Events(GROWTH_LAST);
    let last = load::run(&[&hapax], &events, new, at, last, None).await?;
    Ok(Growth { keys: options.grow, floor_first, first, floor_last, last })
}
