//! `cargo bench --bench send`: what sending costs over a client that signs, posts and stores nothing.
//!
//! Hapax is the real binary with full durability; the endpoint is a process of its own. Each figure compares two
//! loads of the same run. What the figures mean is in docs/benchmarks.md.

mod backlog;
mod beside;
mod client;
mod drain;
mod publish;
#[path = "../shared/mod.rs"]
mod shared;
mod sink;

use std::net::SocketAddr;
use std::path::Path;

use clap::{Parser, ValueEnum};
use hapax_sim::Postgres;

use crate::shared::figures::Figure;
use crate::shared::report::Report;
use crate::shared::server::{Server, Setup};
use crate::shared::{Place, floor, on_one_thread};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Deliveries in flight: of the endpoint in Hapax, and of the client that is the floor.
const IN_FLIGHT: usize = 64;

/// Seals the secrets of the endpoints. The claims of a large backlog are measured in this process, so the key is
/// known to it and to the server.
const VAULT_KEY: &str = "YSBrZXkgb2YgYmVuY2htYXJrcywgbm8gc2VjcmV0ISE=";

#[derive(Parser)]
#[command(about = "What sending costs over a client that signs, posts and stores nothing")]
struct Options {
    /// What to measure
    #[arg(long, value_delimiter = ',', default_value = "drain,postgres,publish,beside,backlog")]
    loads: Vec<Wanted>,
    /// Messages of a backlog that is drained
    #[arg(long, default_value_t = 50_000)]
    messages: u64,
    /// Seconds of one measured slice
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    /// Slices of each kind, by turns
    #[arg(long, default_value_t = 2)]
    rounds: usize,
    /// Deliveries that wait in the large backlog
    #[arg(long, default_value_t = 1_000_000)]
    backlog: u64,
    /// Endpoints of both backlogs, a thousand in each tenant
    #[arg(long, default_value_t = 10_000)]
    endpoints: u64,
    /// Claims from each backlog
    #[arg(long, default_value_t = 200)]
    claims: usize,
    /// Be the endpoint: serve until killed
    #[arg(long, hide = true)]
    sink: bool,
    /// Be the floor: post `--messages` messages to this address and report how long it took
    #[arg(long, hide = true)]
    client: Option<SocketAddr>,
    #[command(flatten)]
    place: Place,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Wanted {
    /// A backlog drained to one endpoint, SQLite
    Drain,
    /// The same on PostgreSQL
    Postgres,
    /// Publishing by API
    Publish,
    /// Acks while a backlog drains
    Beside,
    /// Claims from a small and a large backlog, and memory with the large one
    Backlog,
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    if options.place.floor {
        return floor::run();
    }
    if options.sink {
        return sink::run();
    }
    if let Some(to) = options.client {
        return client::run(to, options.messages);
    }
    let directory = options.place.directory()?;
    let report = on_one_thread(measure(&options, directory.path()))?;
    options.place.output.print(&report)
}

async fn measure(options: &Options, directory: &Path) -> anyhow::Result<Report> {
    let mut report = Report::default();
    let wanted = |load| options.loads.contains(&load);
    let say = |what: &str| options.place.output.say(what);
    if wanted(Wanted::Drain) {
        say("a backlog drained to one endpoint, SQLite");
        let drained = drain::measure(options, &directory.join("drain"), None).await?;
        report.table(drained.table("a backlog drained, SQLite"));
        report.figures([Figure::higher(
            "backlog drained, to a bare client, SQLite",
            drained.ratio(),
            0.40,
            0.55,
        )]);
    }
    if wanted(Wanted::Postgres) {
        say("a backlog drained to one endpoint, PostgreSQL");
        let postgres = Postgres::shared().await;
        let database = postgres.create_database("send").await;
        let drained = drain::measure(options, &directory.join("postgres"), Some(&database)).await?;
        report.table(drained.table("a backlog drained, PostgreSQL"));
        report.figures([Figure::higher(
            "backlog drained, to a bare client, PostgreSQL",
            drained.ratio(),
            0.12,
            0.20,
        )]);
    }
    if wanted(Wanted::Publish) {
        say("publishing by API");
        let published = publish::measure(options, directory).await?;
        report.table(published.table());
        report.figures([Figure::higher(
            "publishing by API, to ingest with one job each",
            published.ratio(),
            0.7,
            0.9,
        )]);
    }
    if wanted(Wanted::Beside) {
        say("acks while a backlog drains, in an open loop");
        let beside = beside::measure(options, directory).await?;
        report.table(beside.table());
        report.figures([Figure::lower(
            "ack p99 while a backlog drains, to without",
            beside.ratio(),
            1.5,
            1.2,
        )]);
    }
    if wanted(Wanted::Backlog) {
        say("claims from a small and a large backlog");
        let backlog = backlog::measure(options, directory).await?;
        report.table(backlog.table());
        report.figures(backlog.figures());
    }
    Ok(report)
}

/// A server that may call endpoints on this machine, with these handlers.
fn server(
    options: &Options,
    directory: &Path,
    database: Option<&str>,
    handlers: &str,
) -> anyhow::Result<Server> {
    let root = database.map_or(String::new(), |url| format!("database_url = {url:?}\n"));
    let tables = format!(
        "{handlers}\n[outbound]\nallow = [\"127.0.0.0/8\"]\n[vault]\nkey = {VAULT_KEY:?}\n"
    );
    Server::hapax(&options.place.hapax, directory, &Setup { root, tables })
}
