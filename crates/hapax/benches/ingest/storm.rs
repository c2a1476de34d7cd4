//! A retry storm: every known event arrives once more. Each engine accepts events first, then gets all
//! of them again, then again after a restart, when nothing is in memory. Finally, new events arrive
//! during a storm.
//!
//! Copies are recorded after their answers. So the CPU time and the bytes of a load count until the
//! servers are idle again.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use anyhow::Context as _;
use hapax_sim::Postgres;

use crate::shared::events::Events;
use crate::shared::figures::Figure;
use crate::shared::load::{self, Length, Load, Measured};
use crate::shared::report::{Column, Table, column};
use crate::shared::server::{Server, Setup, cpu_seconds_of_family};
use crate::shared::{CONNECTIONS, WARM_UP};
use crate::{Options, StoreKind};

/// The longest time that a server records copies after their answers.
const RECORDED_WITHIN: Duration = Duration::from_secs(3);

/// The columns of this bench alone: CPU time of server and database for each request, and bytes
/// written for each (to the disk on SQLite, to the write-ahead log on PostgreSQL). Both count until the
/// last copy is recorded.
const COLUMNS: [Column; 2] = [column("all cpu us", 1), column("bytes", 0)];

/// The loads of one engine.
pub(crate) struct Storm {
    engine: &'static str,
    events: u64,
    floor: Measured,
    new: Cost,
    again: Cost,
    restarted: Cost,
    beside: Cost,
    storm_beside: Measured,
}

/// A load and its whole cost.
struct Cost {
    measured: Measured,
    requests: u64,
    cpu_seconds: f64,
    written_bytes: u64,
}

/// Where a server keeps its events.
enum Engine {
    Sqlite,
    Postgres { server: Box<Postgres>, database: String },
}

/// Measures the stores that were asked for.
pub(crate) async fn measure(
    options: &Options,
    floor: &Server,
    directory: &Path,
) -> anyhow::Result<Vec<Storm>> {
    let mut storms = Vec::new();
    if options.stores.contains(&StoreKind::Sqlite) {
        storms.push(storm(options, floor, &directory.join("storm"), &Engine::Sqlite).await?);
    }
    if !options.stores.contains(&StoreKind::Postgres) {
        return Ok(storms);
    }
    let server = Postgres::with_settings(&[("shared_buffers", "128MB")]).await;
    let database = server.create_database("storm").await;
    let engine = Engine::Postgres { server: Box::new(server), database };
    storms.push(storm(options, floor, &directory.join("storm-postgres"), &engine).await?);
    Ok(storms)
}

async fn storm(
    options: &Options,
    floor: &Server,
    directory: &Path,
    engine: &Engine,
) -> anyhow::Result<Storm> {
    let output = &options.place.output;
    let setup = Setup { root: engine.root(), ..Setup::default() };
    let start = || Server::hapax(&options.place.hapax, directory, &setup);
    let known = Rc::new(RefCell::new(Events::new(0)));
    let all = Length::Events(options.storm);
    let slice = Length::Time(Duration::from_secs_f64(options.seconds));

    output.say(&format!("{}: {} new events", engine.name(), options.storm));
    let mut hapax = start()?;
    let servers = [&hapax];
    let new = load::run(&servers, &known, Load::New, CONNECTIONS, all, None);
    let new = cost(engine, &hapax, new).await?;
    engine.analyze().await;

    output.say(&format!("{}: a retry storm", engine.name()));
    let mut floor_measured = again(floor, &known, slice).await?;
    known.borrow_mut().begin_again();
    let from_memory = cost(engine, &hapax, again(&hapax, &known, all)).await?;

    output.say(&format!("{}: the same after a restart", engine.name()));
    drop(hapax);
    hapax = start()?;
    floor_measured.join(again(floor, &known, slice).await?);
    known.borrow_mut().begin_again();
    let restarted = cost(engine, &hapax, again(&hapax, &known, all)).await?;

    output.say(&format!("{}: new events beside a storm", engine.name()));
    drop(hapax);
    hapax = start()?;
    let fresh = Rc::new(RefCell::new(known.borrow().further()));
    known.borrow_mut().begin_again();
    let (mut storm_beside, servers) = (None, [&hapax]);
    let beside = cost(engine, &hapax, async {
        let (new, storm) = tokio::try_join!(
            load::run(&servers, &fresh, Load::New, CONNECTIONS, slice, Some(WARM_UP)),
            load::run(&servers, &known, Load::Again, CONNECTIONS, slice, Some(WARM_UP)),
        )?;
        storm_beside = Some(storm);
        Ok(new)
    });
    let beside = beside.await?;
    Ok(Storm {
        engine: engine.name(),
        events: options.storm,
        floor: floor_measured,
        new,
        again: from_memory,
        restarted,
        beside,
        storm_beside: storm_beside.context("the storm ran")?,
    })
}

/// Every known event once more.
async fn again(
    server: &Server,
    known: &Rc<RefCell<Events>>,
    length: Length,
) -> anyhow::Result<Measured> {
    load::run(&[server], known, Load::Again, CONNECTIONS, length, None).await
}

/// Runs a load, waits until its copies are recorded, and measures its cost.
async fn cost(
    engine: &Engine,
    hapax: &Server,
    load: impl Future<Output = anyhow::Result<Measured>>,
) -> anyhow::Result<Cost> {
    let before = engine.used(hapax).await?;
    let measured = load.await?;
    tokio::time::sleep(RECORDED_WITHIN).await;
    let after = engine.used(hapax).await?;
    Ok(Cost {
        requests: measured.requests,
        measured,
        cpu_seconds: after.0 - before.0,
        written_bytes: after.1.saturating_sub(before.1),
    })
}

impl Engine {
    fn name(&self) -> &'static str {
        match self {
            Self::Sqlite => "SQLite",
            Self::Postgres { .. } => "PostgreSQL",
        }
    }

    fn root(&self) -> String {
        match self {
            Self::Sqlite => String::new(),
            Self::Postgres { database, .. } => format!("database_url = {database:?}\n"),
        }
    }

    /// Updates the statistics of the new rows, as autovacuum does within a minute.
    async fn analyze(&self) {
        if let Self::Postgres { database, .. } = self {
            Postgres::execute_at(database, "ANALYZE").await;
        }
    }

    /// CPU seconds of server and database so far, and bytes written.
    async fn used(&self, hapax: &Server) -> anyhow::Result<(f64, u64)> {
        let ours = hapax.usage()?;
        match self {
            Self::Sqlite => Ok((ours.cpu_seconds, ours.written_bytes)),
            Self::Postgres { server, database } => {
                let pid = server.pid().await.context("PostgreSQL has ended")?;
                let sql = "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint::text";
                let written = Postgres::execute_at(database, sql).await;
                let written = written.into_iter().flatten().next().context("no position")?;
                Ok((ours.cpu_seconds + cpu_seconds_of_family(pid)?, written.parse()?))
            }
        }
    }
}

impl Storm {
    pub(crate) fn table(&self) -> Table {
        let Self { engine, events, .. } = self;
        let title = format!("{engine}: {events} known events once more, {CONNECTIONS} connections");
        let mut table = Table::of_loads(title, COLUMNS);
        let floor = Some(&self.floor);
        table.load("floor", &self.floor, None, []);
        table.load("new events", &self.new.measured, floor, self.new.columns());
        table.load("retry storm", &self.again.measured, floor, self.again.columns());
        let restarted = &self.restarted;
        table.load("retry storm, restarted", &restarted.measured, floor, restarted.columns());
        table.load("new events beside a storm", &self.beside.measured, floor, []);
        table.load("the storm beside them", &self.storm_beside, floor, []);
        table.note(format!(
            "beside a storm: {:.2} of the new events alone, and with the copies {:.2} of them",
            self.beside.measured.per_second() / self.new.measured.per_second(),
            (self.beside.measured.per_second() + self.storm_beside.per_second())
                / self.new.measured.per_second(),
        ));
        table
    }

    pub(crate) fn figures(&self) -> impl Iterator<Item = Figure> {
        let (engine, new) = (self.engine, &self.new.measured);
        let (at_least, aim) = if engine == "SQLite" { (0.60, 0.90) } else { (0.35, 0.60) };
        let ratio = |what: &str, of: &Measured, to: &Measured, at_least, aim| {
            let ratio = of.per_second() / to.per_second();
            Figure::higher(format!("{engine}: {what}"), ratio, at_least, aim)
        };
        let (again, restarted) = (&self.again.measured, &self.restarted.measured);
        let beside = &self.beside.measured;
        [
            ratio("retry storm, to the floor", again, &self.floor, at_least, aim),
            ratio("retry storm, restarted, to the floor", restarted, &self.floor, at_least, aim),
            ratio("retry storm, to new events", again, new, 1.0, 2.0),
            ratio("new events beside a storm, to alone", beside, new, 0.7, 0.9),
        ]
        .into_iter()
    }
}

impl Cost {
    fn columns(&self) -> [Option<f64>; 2] {
        let requests = self.requests as f64;
        let cpu_us = self.cpu_seconds * 1e6 / requests;
        [Some(cpu_us), Some(self.written_bytes as f64 / requests)]
    }
}
