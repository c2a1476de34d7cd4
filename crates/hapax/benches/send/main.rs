//! `cargo bench --bench send`: the cost of sending, compared with a client that signs, posts and
//! stores nothing.
//!
//! Hapax is the real binary with full durability; the endpoint is a process of its own. Each figure compares two
//! loads of the same run. docs/benchmarks.md explains the figures.

mod acks_while_sending;
mod backlog;
mod client;
mod drain;
mod hanging;
mod held_release;
mod order;
mod publish;
mod rate;
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

/// The length, in slices, of loads that wait for timeouts or count whole seconds: with the default,
/// longer than the timeout of an endpoint.
const LONG: f64 = 4.0;

/// Seals the secrets of the endpoints. The claims of a large backlog are measured in this process, so the key is
/// known to it and to the server.
const VAULT_KEY: &str = "YSBrZXkgb2YgYmVuY2htYXJrcywgbm8gc2VjcmV0ISE=";

#[derive(Parser)]
#[command(about = "What sending costs over a client that signs, posts and stores nothing")]
struct Options {
    /// What to measure
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "drain,postgres,publish,beside,backlog,hanging,rate,order,herd"
    )]
    loads: Vec<Wanted>,
    /// Messages of a backlog that is drained
    #[arg(long, default_value_t = 50_000)]
    messages: u64,
    /// Seconds of one measured slice
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    /// Slices of each kind, alternating
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
    /// Endpoints; one in 20 never answers
    #[arg(long, default_value_t = 1_000)]
    hanging_among: u64,
    /// Messages in a second for all these endpoints
    #[arg(long, default_value_t = 3_000.0)]
    per_second: f64,
    /// Keys of the backlog under strict order, two messages each
    #[arg(long, default_value_t = 100_000)]
    keys: u64,
    /// Deliveries that are held until their endpoint is enabled
    #[arg(long, default_value_t = 100_000)]
    held: u64,
    /// Run as the endpoint: serve until killed
    #[arg(long, hide = true)]
    sink: bool,
    /// Run as the floor client: post `--messages` messages to this address and report how long it took
    #[arg(long, hide = true)]
    client: Option<SocketAddr>,
    #[command(flatten)]
    place: Place,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Wanted {
    /// A backlog drained to one endpoint, SQLite
    Drain,
    /// A backlog drained to one endpoint, PostgreSQL
    Postgres,
    /// Publishing by API
    Publish,
    /// Acks while a backlog drains
    Beside,
    /// Claims from a small and a large backlog, and memory with the large one
    Backlog,
    /// Deliveries beside endpoints that never answer
    Hanging,
    /// The rate limit of an endpoint that two nodes share, PostgreSQL
    Rate,
    /// A backlog under strict order per key, a tenth of the keys failing
    Order,
    /// An endpoint with many held deliveries is enabled
    Herd,
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
        let beside = acks_while_sending::measure(options, directory).await?;
        report.table(beside.table());
        report.figures([Figure::lower(
            "ack p99 while a backlog drains, relative to without",
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
    if wanted(Wanted::Hanging) {
        say("deliveries beside endpoints that never answer");
        let hanging = hanging::measure(options, &directory.join("hanging")).await?;
        report.table(hanging.table());
        report.figures([Figure::lower(
            "delivery p99 beside endpoints that hang, relative to without",
            hanging.ratio(),
            1.25,
            1.05,
        )]);
    }
    if wanted(Wanted::Rate) {
        say("a rate limit that two nodes share, PostgreSQL");
        let database = Postgres::shared().await.create_database("rate").await;
        let rate = rate::measure(options, &directory.join("rate"), &database).await?;
        report.table(rate.table());
        report.figures([
            Figure::higher(
                "rate_limit = 100/s on two nodes: least in a second",
                rate.least(),
                95.0,
                99.0,
            ),
            Figure::lower(
                "rate_limit = 100/s on two nodes: most in a second",
                rate.most(),
                101.0,
                100.0,
            ),
        ]);
    }
    if wanted(Wanted::Order) {
        say("a backlog under strict order per key");
        let ordered = order::measure(options, &directory.join("order")).await?;
        report.table(ordered.table());
        report.figures([Figure::higher(
            "strict order per key, relative to without order",
            ordered.ratio(),
            0.5,
            0.8,
        )]);
    }
    if wanted(Wanted::Herd) {
        say("held deliveries released, and acks in an open loop");
        let herd = held_release::measure(options, &directory.join("herd")).await?;
        report.table(herd.table());
        let [spread, draining] = herd.ratios();
        report.figures([
            Figure::lower(
                "held deliveries released: at once, to the limit",
                herd.at_once_to_limit(),
                1.0,
                1.0,
            ),
            Figure::lower(
                "ack p99 in the minute after enable, relative to without",
                spread,
                1.5,
                1.2,
            ),
            Figure::lower(
                "ack p99 while held deliveries drain, relative to without",
                draining,
                1.5,
                1.2,
            ),
        ]);
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
