//! Shared by all benches: signed events, load in a closed and in an open loop, the servers under
//! load, and the required figures. A bench itself only defines what is measured and prints it.

#![allow(dead_code, reason = "each bench uses its part")]

pub(crate) mod events;
pub(crate) mod figures;
pub(crate) mod floor;
pub(crate) mod load;
pub(crate) mod open;
pub(crate) mod report;
pub(crate) mod server;

use std::io::{IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use tempfile::TempDir;

use self::report::Report;

/// Unmeasured time at the start of each slice, in which connections and caches warm up.
pub(crate) const WARM_UP: Duration = Duration::from_millis(300);

/// The number of connections for figures that have one concurrency.
pub(crate) const CONNECTIONS: usize = 64;

/// The options of every bench of servers.
#[derive(clap::Args)]
pub(crate) struct Place {
    /// The directory of the data directories: its disk is measured
    #[arg(long, default_value = env!("CARGO_TARGET_TMPDIR"))]
    dir: PathBuf,
    /// Another build of hapax to measure
    #[arg(long, default_value = env!("CARGO_BIN_EXE_hapax"))]
    pub(crate) hapax: PathBuf,
    /// Act as the floor: serve until killed
    #[arg(long, hide = true)]
    pub(crate) floor: bool,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// The output of a bench.
#[derive(clap::Args)]
pub(crate) struct Output {
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
    /// A flag that cargo passes
    #[arg(long, hide = true)]
    bench: bool,
}

impl Place {
    /// A directory that is removed at the end of the run.
    pub(crate) fn directory(&self) -> anyhow::Result<TempDir> {
        tempfile::Builder::new()
            .prefix("hapax-bench-")
            .tempdir_in(&self.dir)
            .with_context(|| format!("making a directory in {}", self.dir.display()))
    }
}

impl Output {
    /// Prints progress to a terminal.
    pub(crate) fn say(&self, what: &str) {
        let mut err = std::io::stderr();
        if !self.json && err.is_terminal() {
            let _ = writeln!(err, "measuring: {what}");
        }
    }

    pub(crate) fn print(&self, report: &Report) -> anyhow::Result<()> {
        let mut out = std::io::stdout().lock();
        if self.json {
            serde_json::to_writer_pretty(&mut out, &report.json())?;
            writeln!(out)?;
        } else {
            write!(out, "{report}")?;
        }
        Ok(())
    }
}

/// Runs a bench on one thread: servers and generator share the machine, and the generator must stay
/// cheap.
pub(crate) fn on_one_thread<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(work)
}
