//! `cargo bench --bench nodes`: Hapax on PostgreSQL, with one node and with two, with and without
//! Redis, against the pattern of articles.
//!
//! The run starts its own PostgreSQL (default durability) and its own Redis. Article and Hapax
//! share that server, each with its own database. docs/benchmarks.md explains the figures.

mod article;
mod database;
mod report;
#[path = "../shared/mod.rs"]
mod shared;

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::{Parser, ValueEnum};
use hapax_sim::{Postgres, Redis};

use crate::article::Driver;
use crate::database::Ledger;
use crate::report::{Cost, Effects, Findings};
use crate::shared::events::Events;
use crate::shared::load::{self, Length, Load, Measured};
use crate::shared::server::{Server, Setup, Usage, cpu_seconds_of_family};
use crate::shared::{CONNECTIONS, Place, WARM_UP, floor, on_one_thread};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The longest time that a node records copies after their answers.
const RECORDED_WITHIN: Duration = Duration::from_secs(3);

#[derive(Parser)]
#[command(about = "Hapax over PostgreSQL and Redis, against one INSERT for each request")]
struct Options {
    /// Loads to run
    #[arg(long, value_delimiter = ',', default_value = "new,copies,redis,effects")]
    loads: Vec<Wanted>,
    /// Seconds of one measured slice
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    /// Slices of each server and load, in turn
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Distinct events that the load of duplicates repeats
    #[arg(long, default_value_t = 1_000)]
    copies_of: u64,
    /// Events that one node accepts and another then gets once each, for Redis to answer
    #[arg(long, default_value_t = 200_000)]
    again: u64,
    /// Connections of the load that shows tails
    #[arg(long, default_value_t = 256)]
    many: usize,
    /// A setting of the started PostgreSQL, `name=value`; may be repeated
    #[arg(long = "setting", value_name = "NAME=VALUE", value_parser = setting)]
    settings: Vec<(String, String)>,
    /// Run the server of the article pattern over this database until killed
    #[arg(long, hide = true)]
    article: Option<String>,
    /// The driver of that server
    #[arg(long, hide = true, default_value = "sqlx")]
    driver: Driver,
    #[command(flatten)]
    place: Place,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Wanted {
    /// New events: the articles, one node, two nodes
    New,
    /// Duplicates of a few events, from the memory of the node
    Copies,
    /// A retry storm of events that another node accepted, with Redis and without
    Redis,
    /// SQL handlers, from accepted to committed
    Effects,
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    if options.place.floor {
        return floor::run();
    }
    if let Some(database) = &options.article {
        return article::run(options.driver, database);
    }
    let directory = options.place.directory()?;
    let report = on_one_thread(measure(&options, directory.path()))?;
    options.place.output.print(&report.report())
}

fn setting(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("is not name=value")?;
    Ok((name.to_owned(), value.to_owned()))
}

/// A server with its default settings and the given ones.
async fn postgres(settings: &[(String, String)]) -> Postgres {
    let asked = settings.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    let all: Vec<_> = std::iter::once(("shared_buffers", "128MB")).chain(asked).collect();
    Postgres::with_settings(&all).await
}

async fn measure(options: &Options, directory: &Path) -> anyhow::Result<Findings> {
    let mut report = Findings::default();
    let wanted = |load| options.loads.contains(&load);
    let bench = Bench {
        options,
        directory,
        floor: Server::floor()?,
        length: Length::Time(Duration::from_secs_f64(options.seconds)),
        postgres: postgres(&options.settings).await,
    };
    if wanted(Wanted::New) {
        options.place.output.say("new events: floor, articles, one node, two nodes");
        bench.new_events(&mut report).await?;
    }
    if wanted(Wanted::Copies) {
        options.place.output.say("only duplicates, from memory");
        bench.copies(&mut report).await?;
    }
    if wanted(Wanted::Redis) {
        options.place.output.say("a retry storm that another node took");
        bench.redis(&mut report).await?;
    }
    if wanted(Wanted::Effects) {
        options.place.output.say("SQL handlers, from accepted to committed");
        report.effects = Some(bench.effects().await?);
    }
    Ok(report)
}

/// Shared by all loads.
struct Bench<'a> {
    options: &'a Options,
    directory: &'a Path,
    floor: Server,
    length: Length,
    postgres: Postgres,
}

impl Bench<'_> {
    /// Loads the floor, both variants of the article, one node and two nodes, in turn.
    async fn new_events(&self, report: &mut Findings) -> anyhow::Result<()> {
        let article = self.article("article", "sqlx").await?;
        let lean = self.article("lean_article", "lean").await?;
        let database = self.postgres.create_database("nodes").await;
        let one = self.node("one", &database, None, "")?;
        let two = self.node("two", &database, None, "")?;
        let events = Rc::new(RefCell::new(Events::new(0)));
        for _ in 0..self.options.rounds.max(1) {
            report.floor.join(self.slice(&[&self.floor], &events, Load::New).await?);
            report.article.join(self.slice(&[&article], &events, Load::New).await?);
            report.lean_article.join(self.slice(&[&lean], &events, Load::New).await?);
            report.one.join(self.slice(&[&one], &events, Load::New).await?);
            let both = [&one, &two];
            report.two.join(self.slice(&both, &events, Load::New).await?);
            let all = CONNECTIONS * both.len();
            report.two_in_full.join(self.slice_of(&both, &events, Load::New, all).await?);
            let many = self.options.many;
            report.many.join(self.slice_of(&[&one], &events, Load::New, many).await?);
        }
        Ok(())
    }

    /// Sends copies of a few events to the node that accepted them.
    async fn copies(&self, report: &mut Findings) -> anyhow::Result<()> {
        let database = self.postgres.create_database("copies").await;
        let node = self.node("copies", &database, None, "")?;
        let events = Rc::new(RefCell::new(Events::new(self.options.copies_of)));
        // Events that are repeated must be stored first.
        let first = Length::Events(self.options.copies_of);
        load::run(&[&node], &events, Load::New, 16, first, None).await?;
        for _ in 0..self.options.rounds.max(1) {
            report.floor_copies.join(self.slice(&[&self.floor], &events, Load::Copies).await?);
            report.copies.join(self.slice(&[&node], &events, Load::Copies).await?);
        }
        Ok(())
    }

    /// One node accepts events, and another node gets a copy of each. The second node has no event in
    /// its own memory, so it asks Redis or, for comparison, the database alone. The database is fresh
    /// and has no statistics.
    async fn redis(&self, report: &mut Findings) -> anyhow::Result<()> {
        let redis = Redis::start().await;
        for (with, name) in [(Some(&redis), "redis"), (None, "database")] {
            let database = self.postgres.create_database(name).await;
            let url = with.map(Redis::url);
            let first = self.node(&format!("{name}-first"), &database, url.as_deref(), "")?;
            let second = self.node(&format!("{name}-second"), &database, url.as_deref(), "")?;
            let events = Rc::new(RefCell::new(Events::new(0)));
            let again = Length::Events(self.options.again);
            let (first, floor, second) = ([&first], [&self.floor], [&second]);
            let new = load::run(&first, &events, Load::New, CONNECTIONS, again, None);
            let new = self.cost(&first, new).await?;
            let floor = load::run(&floor, &events, Load::Again, CONNECTIONS, again, None);
            report.floor_again.join(floor.await?);
            events.borrow_mut().begin_again();
            let seen = load::run(&second, &events, Load::Again, CONNECTIONS, again, None);
            let seen = self.cost(&second, seen).await?;
            match with {
                Some(_) => report.redis = seen,
                None => (report.fresh, report.database) = (new, seen),
            }
        }
        Ok(())
    }

    /// Runs a load, waits until its copies are recorded, and measures what it cost the nodes and the
    /// database.
    async fn cost(
        &self,
        nodes: &[&Server],
        load: impl Future<Output = anyhow::Result<Measured>>,
    ) -> anyhow::Result<Cost> {
        let before = self.spent(nodes).await?;
        let measured = load.await?;
        tokio::time::sleep(RECORDED_WITHIN).await;
        let after = self.spent(nodes).await?;
        let requests = measured.requests as f64;
        Ok(Cost {
            measured,
            cpu_us: (after.0 - before.0) * 1e6 / requests,
            log_bytes: after.1.saturating_sub(before.1) as f64 / requests,
        })
    }

    /// CPU seconds of the nodes and of PostgreSQL so far, and bytes of its write-ahead log.
    async fn spent(&self, nodes: &[&Server]) -> anyhow::Result<(f64, u64)> {
        let pid = self.postgres.pid().await.context("PostgreSQL has ended")?;
        let sql = "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint::text";
        let position = self.postgres.execute(sql).await.into_iter().flatten().next();
        let position = position.context("no position in the log")?.parse()?;
        let ours = Usage::of(nodes)?.cpu_seconds;
        Ok((ours + cpu_seconds_of_family(pid)?, position))
    }

    /// SQL handlers of one node, while events arrive at full rate.
    async fn effects(&self) -> anyhow::Result<Effects> {
        let database = self.postgres.create_database("effects").await;
        let ledger = Ledger::create(&database).await?;
        let node = self.node("effects", &database, None, Ledger::CHARGE)?;
        let events = Rc::new(RefCell::new(Events::new(0)));
        let mut all = Effects::default();
        for _ in 0..self.options.rounds.max(1) {
            let (made, began) = (events.borrow().made(), Instant::now());
            let ingest =
                load::run(&[&node], &events, Load::New, CONNECTIONS, self.length, None).await?;
            let acked = Instant::now();
            let sent = events.borrow().made();
            let last = ledger.wait_for(sent).await?;
            all.ingest.join(ingest);
            all.effects += sent - made;
            all.seconds += last.duration_since(began).as_secs_f64();
            all.seconds_after += last.saturating_duration_since(acked).as_secs_f64();
        }
        let sent = events.borrow().made();
        ledger.is_once_each(sent).await?;
        Ok(all)
    }

    async fn slice(
        &self,
        servers: &[&Server],
        events: &Rc<RefCell<Events>>,
        load: Load,
    ) -> anyhow::Result<Measured> {
        self.slice_of(servers, events, load, CONNECTIONS).await
    }

    async fn slice_of(
        &self,
        servers: &[&Server],
        events: &Rc<RefCell<Events>>,
        load: Load,
        connections: usize,
    ) -> anyhow::Result<Measured> {
        load::run(servers, events, load, connections, self.length, Some(WARM_UP)).await
    }

    async fn article(&self, name: &str, driver: &str) -> anyhow::Result<Server> {
        let database = self.postgres.create_database(name).await;
        article::migrate(&database).await?;
        Server::ourselves(&["--article", &database, "--driver", driver])
    }

    /// A node of Hapax, as a user would configure it.
    fn node(
        &self,
        name: &str,
        database_url: &str,
        redis_url: Option<&str>,
        tables: &str,
    ) -> anyhow::Result<Server> {
        let redis = redis_url.map(|url| format!("redis_url = {url:?}\n")).unwrap_or_default();
        let root = format!("database_url = {database_url:?}\n{redis}");
        let setup = Setup { root, tables: tables.to_owned() };
        Server::hapax(&self.options.place.hapax, &self.directory.join(name), &setup)
    }
}
