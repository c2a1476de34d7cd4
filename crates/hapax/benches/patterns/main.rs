//! `cargo bench --bench patterns`: the ways to charge a fee once although its event arrives more
//! than once, on a real PostgreSQL and a real Redis, with the effects counted.
//!
//! The bench compares the patterns themselves, without HTTP and without Hapax. docs/patterns.md
//! explains when to use which.

mod app;
mod patterns;
mod report;
#[path = "../shared/mod.rs"]
mod shared;
mod storm;

use std::sync::Arc;

use anyhow::bail;
use clap::Parser;

use crate::app::App;
use crate::patterns::Pattern;
use crate::report::{Findings, Row};
use crate::shared::Output;
use crate::storm::{Fault, Storm};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Parser)]
#[command(about = "Unique constraint, Redis lock, state machine: rates, and effects counted")]
struct Options {
    /// Deliveries at once
    #[arg(long, value_delimiter = ',', default_value = "1,16,64,256")]
    connections: Vec<usize>,
    /// Deliveries at once in runs with faults
    #[arg(long, default_value_t = 64)]
    faults_at: usize,
    /// Patterns to run
    #[arg(long, value_delimiter = ',')]
    patterns: Vec<Pattern>,
    /// Distinct events of one run; of all deliveries about 30 % are copies
    #[arg(long, default_value_t = 10_000)]
    events: u32,
    /// Connections to PostgreSQL, shared by all deliveries
    #[arg(long, default_value_t = 32)]
    pool: usize,
    /// The seed of the random numbers
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    output: Output,
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let report = runtime.block_on(measure(&options))?;
    options.output.print(&report.report())?;
    match report.broken() {
        Some(row) => bail!("{} has charged twice or lost a fee", row.pattern.name()),
        None => Ok(()),
    }
}

async fn measure(options: &Options) -> anyhow::Result<Findings> {
    let app = Arc::new(App::start(options.pool).await?);
    let storm = Storm::new(options.events, options.seed);
    let mut report =
        Findings { events: storm.events, deliveries: storm.deliveries(), rows: vec![] };
    let wanted =
        |pattern: &&Pattern| options.patterns.is_empty() || options.patterns.contains(pattern);
    for connections in options.connections.iter().copied() {
        for pattern in Pattern::ALL.iter().filter(wanted).copied() {
            options.output.say(&format!("{} at {connections}", pattern.name()));
            let tally = storm.run(&app, pattern, connections, Fault::None).await?;
            report.rows.push(Row { pattern, connections, tally });
        }
    }
    for pattern in Pattern::ALL.iter().filter(wanted).copied() {
        for fault in Fault::all_of(pattern) {
            options.output.say(&format!("{} where {}", pattern.name(), fault.name()));
            let connections = options.faults_at;
            let tally = storm.run(&app, pattern, connections, fault).await?;
            report.rows.push(Row { pattern, connections, tally });
        }
    }
    Ok(report)
}
