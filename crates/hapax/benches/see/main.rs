//! `cargo bench --bench see`: what the dashboard costs, and how quickly it answers.
//!
//! Hapax is the real binary over SQLite. Its database is filled before the start: events of a week, of which most
//! are processed, some wait, and a few are dead, failed, stale, held or in review. While new events come in, a
//! client reads the pages one after the other. docs/benchmarks.md explains the figures.

mod pages;
mod seed;
#[path = "../shared/mod.rs"]
mod shared;

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Parser;

use crate::pages::{Page, Pages};
use crate::shared::events::Events;
use crate::shared::figures::Figure;
use crate::shared::open::{self, Paced, Plan};
use crate::shared::report::{Report, Table, column};
use crate::shared::server::{Server, Setup};
use crate::shared::{Place, WARM_UP, floor, on_one_thread};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Parser)]
#[command(about = "How quickly pages and lists answer, and what they cost the acks")]
struct Options {
    /// Events in the database
    #[arg(long, default_value_t = 1_000_000)]
    events: u64,
    /// Events in the database whose jobs wait
    #[arg(long, default_value_t = 100_000)]
    waiting: u64,
    /// How many of these events are dead letters
    #[arg(long, default_value_t = 10_000)]
    dead: u64,
    /// Sources
    #[arg(long, default_value_t = 20)]
    sources: u64,
    /// New events per second
    #[arg(long, default_value_t = 2_000.0)]
    rate: f64,
    /// Seconds of one measured slice
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Pairs of slices, with and without readers
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Open tabs
    #[arg(long, default_value_t = 50)]
    tabs: usize,
    /// Keep the filled database in this directory, and measure a copy of it
    #[arg(long)]
    keep: Option<PathBuf>,
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

async fn measure(options: &Options, directory: &Path) -> anyhow::Result<Report> {
    options.place.output.say(&format!("filling a database with {} events", options.events));
    let setup = Setup { tables: seed::tables(options.sources), ..Setup::default() };
    let seeded = seed::prepare(options, directory, &setup)?;
    let server = Server::hapax(&options.place.hapax, directory, &setup)?;
    let admin = server.admin()?;
    let events = Rc::new(RefCell::new(Events::new(0)));
    let plan = Plan {
        per_second: options.rate,
        time: Duration::from_secs_f64(options.seconds),
        warm_up: WARM_UP,
    };

    let mut pages = Pages::new(admin, seeded.pages());
    let (mut ratios, mut shares) = (Vec::new(), Vec::new());
    let mut acks = Table::new(
        format!("acks at {} events/s", options.rate),
        [
            column("p50 us", 0),
            column("p99 us", 0),
            column("sent late p99 us", 0),
            column("% of a core", 1),
        ],
    );
    for round in 1..=options.rounds {
        options.place.output.say(&format!("round {round}: without a reader"));
        let alone = slice(&server, &events, plan).await?;
        options.place.output.say(&format!("round {round}: with a reader"));
        let reading = pages.read_in_background();
        let beside = slice(&server, &events, plan).await?;
        pages = reading.stop().await.context("reading the pages")?;
        options.place.output.say(&format!("round {round}: with {} open tabs", options.tabs));
        let tabs = pages::open_tabs(admin, options.tabs);
        let with_tabs = slice(&server, &events, plan).await?;
        tabs.stop().await.context("refreshing the tabs")?;
        ratios.push(beside.p99_us() / alone.p99_us());
        shares.push(with_tabs.core_share - alone.core_share);
        let slices =
            [("without a reader", alone), ("with a reader", beside), ("with open tabs", with_tabs)];
        for (name, Slice { paced, core_share }) in slices {
            let numbers = [
                paced.measured.latency_us(0.5),
                paced.measured.latency_us(0.99),
                f64::from(paced.sent_late_us_p99()),
                100.0 * core_share,
            ];
            acks.row(format!("{name}, round {round}"), numbers.map(Some));
        }
    }
    let first_page = pages::first_page_bytes(admin).await?;

    let mut report = Report::default();
    report.table(acks);
    report.table(pages.table());
    let slowest = pages.slowest_p99_ms();
    report.figures([
        Figure::lower("slowest page or list, p99 in ms", slowest, 100.0, 50.0),
        Figure::lower("acks' p99 with a reader / without", median(ratios), 1.3, 1.1),
        Figure::lower(
            format!("{} open tabs, share of a core in %", options.tabs),
            100.0 * median(shares).max(0.0),
            3.0,
            1.0,
        ),
        Figure::lower("first page with CSS and script, kB", first_page as f64 / 1e3, 60.0, 30.0),
    ]);
    Ok(report)
}

/// The acks of one slice, and the share of a core that the server used.
struct Slice {
    paced: Paced,
    core_share: f64,
}

impl Slice {
    fn p99_us(&self) -> f64 {
        self.paced.measured.latency_us(0.99)
    }
}

/// Sends new events for one slice.
async fn slice(server: &Server, events: &Rc<RefCell<Events>>, plan: Plan) -> anyhow::Result<Slice> {
    let (began, before) = (Instant::now(), server.usage()?.cpu_seconds);
    let paced = open::run(server, events, plan).await?;
    let core_share = (server.usage()?.cpu_seconds - before) / began.elapsed().as_secs_f64();
    Ok(Slice { paced, core_share })
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The events that the database is filled with.
struct Seeded {
    /// An event in the middle.
    event: String,
    /// The middle of the time that the events span, in microseconds since 1970.
    middle: i64,
}

impl Seeded {
    /// The pages to read, with every filter that people use.
    fn pages(&self) -> Vec<Page> {
        let at = |micros: i64| {
            let time = hapax_core::Timestamp::from_microsecond(micros).unwrap_or_default();
            time.to_string()
        };
        let (since, until) = (at(self.middle), at(self.middle + 60_000_000));
        let event = &self.event;
        [
            ("overview", "/".to_owned()),
            ("events", "/events".to_owned()),
            ("one event", format!("/events/{event}")),
            ("processed", "/events?status=processed".to_owned()),
            ("received", "/events?status=received".to_owned()),
            ("failed", "/events?status=failed".to_owned()),
            ("dead", "/events?status=dead".to_owned()),
            ("held", "/events?status=held".to_owned()),
            ("stale", "/events?status=stale".to_owned()),
            ("review", "/review".to_owned()),
            ("dead letters", "/dead".to_owned()),
            ("rare type", "/events?type=payout.rare".to_owned()),
            ("rare source", "/events?source=rare".to_owned()),
            ("absent text", "/events?q=nowhere_to_be_found".to_owned()),
            ("indexed value", format!("/events?q={}", seed::RARE_VALUE)),
            ("frequent indexed value", "/events?q=po_77".to_owned()),
            ("an id", format!("/events?q={event}")),
            ("a minute of the past", format!("/events?since={since}&until={until}")),
            ("unfinished", "/api/v1/events?unfinished_for=1h".to_owned()),
            ("duplicates", "/duplicates".to_owned()),
            ("a source", "/sources/source-1".to_owned()),
            ("handlers", "/handlers".to_owned()),
            ("messages", "/messages?status=held".to_owned()),
            ("keys", "/keys".to_owned()),
        ]
        .map(|(name, path)| Page::new(name, path))
        .into()
    }
}
