//! `cargo bench --bench work`: the cost of the work after an ack, and its effect on acks.
//!
//! Hapax is the real binary over SQLite with full durability; retention is measured on PostgreSQL
//! too. Each figure compares two servers of the same run, in turn, that differ only in their
//! handlers. docs/benchmarks.md explains the figures.

mod acks_while_working;
mod backlog;
mod effects;
mod embedded;
mod ledger;
mod report;
mod retention;
#[path = "../shared/mod.rs"]
mod shared;

use std::path::{Path, PathBuf};

use clap::{Parser, ValueEnum};

use crate::embedded::Handling;
use crate::report::Findings;
use crate::shared::{Place, floor, on_one_thread};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Parser)]
#[command(about = "What handlers cost: their own rate, and what they do to the acks beside them")]
struct Options {
    /// What to measure
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "effects,beside,sleepers,backlog,retention"
    )]
    loads: Vec<Wanted>,
    /// Seconds of one measured slice
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    /// Slices of each server, in turn
    #[arg(long, default_value_t = 2)]
    rounds: usize,
    /// Jobs that wait in the large backlog
    #[arg(long, default_value_t = 1_000_000)]
    backlog: u64,
    /// Claims of 100 jobs from each backlog
    #[arg(long, default_value_t = 200)]
    claims: usize,
    /// Seconds that the load with retention lasts; events are kept for one minute of it
    #[arg(long, default_value_t = 240)]
    retention_seconds: u64,
    /// Events per second of the load with retention over SQLite; 0 omits the load
    #[arg(long, default_value_t = 10_000.0)]
    retention_rate: f64,
    /// Events per second of the load with retention over PostgreSQL
    #[arg(long, default_value_t = 7_000.0)]
    retention_rate_postgres: f64,
    /// Act as an app that embeds Hapax, in this directory: serve until killed
    #[arg(long, hide = true)]
    embedded: Option<PathBuf>,
    /// Act as an app that embeds Hapax and has a handler that sleeps, in this directory: serve until killed
    #[arg(long, hide = true)]
    embedded_napping: Option<PathBuf>,
    #[command(flatten)]
    place: Place,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Wanted {
    /// SQL handlers, from accepted to committed
    Effects,
    /// Acks while SQL handlers run
    Beside,
    /// Acks while handlers sleep
    Sleepers,
    /// Claims from a small and a large backlog
    Backlog,
    /// Acks during retention, and the disk space it frees, on both databases
    Retention,
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    if options.place.floor {
        return floor::run();
    }
    if let Some(directory) = &options.embedded {
        return embedded::run(directory, Handling::Nothing);
    }
    if let Some(directory) = &options.embedded_napping {
        return embedded::run(directory, Handling::Naps);
    }
    let directory = options.place.directory()?;
    let report = on_one_thread(measure(&options, directory.path()))?;
    options.place.output.print(&report.report())
}

async fn measure(options: &Options, directory: &Path) -> anyhow::Result<Findings> {
    let mut report = Findings::default();
    let wanted = |load| options.loads.contains(&load);
    if wanted(Wanted::Effects) || wanted(Wanted::Beside) || wanted(Wanted::Sleepers) {
        let pair = effects::Pair::start(options, directory)?;
        options.place.output.say("SQL handlers, from accepted to committed");
        // The other loads use the rate of this one.
        let measured = pair.measure(options).await?;
        let a_third = measured.alone.per_second() / 3.0;
        if wanted(Wanted::Beside) {
            options.place.output.say("acks beside SQL handlers, in an open loop");
            report.beside.push(acks_while_working::sql(options, &pair, a_third).await?);
        }
        if wanted(Wanted::Sleepers) {
            options.place.output.say("acks beside handlers that sleep, in an open loop");
            report
                .beside
                .push(acks_while_working::http(options, &pair.alone, directory, a_third).await?);
            report
                .beside
                .push(acks_while_working::pull(options, &pair.alone, directory, a_third).await?);
            report.beside.push(acks_while_working::rust(options, directory, a_third).await?);
        }
        pair.finish()?;
        report.effects = Some(measured);
    }
    if wanted(Wanted::Backlog) {
        options.place.output.say(&format!("claims with {} jobs waiting", options.backlog));
        report.backlog = Some(backlog::measure(options, directory).await?);
    }
    if wanted(Wanted::Retention) {
        options
            .place
            .output
            .say(&format!("{} s of load with retention", options.retention_seconds));
        report.retention = retention::measure(options, directory).await?;
    }
    Ok(report)
}
