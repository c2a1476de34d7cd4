//! The cost of retention, and the disk space it frees. Events are kept for a minute and their keys
//! for a month, an SQL handler runs too, and the rate is near the capacity of one node. The same
//! load without pruning is measured in the same run, so that only the ratio of the two is judged.

use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use hapax_sim::Postgres;
use tokio_postgres::{Client, NoTls};

use crate::Options;
use crate::effects::Sent;
use crate::ledger::Ledger;
use crate::shared::open::{self, Paced, Plan};
use crate::shared::server::{Server, Setup};

/// How long events are kept.
const KEPT: Duration = Duration::from_secs(60);

/// How far behind retention may be: the janitor runs twelve times in the time that events are kept.
const BEHIND: Duration = Duration::from_secs(15);

/// Time before the measured part of the load without pruning.
const WARM_UP: Duration = Duration::from_secs(10);

/// Rows of the table.
const SAMPLES: u64 = 24;

/// One database under the load.
pub(crate) struct Retention {
    pub(crate) what: &'static str,
    /// Without pruning.
    pub(crate) without: Paced,
    /// With pruning of events after one minute. The measurement starts when that minute is over.
    pub(crate) with: Paced,
    pub(crate) samples: Vec<Sample>,
}

pub(crate) struct Sample {
    pub(crate) seconds: f64,
    pub(crate) events: u64,
    /// The file, or all of Hapax's tables.
    pub(crate) file_bytes: u64,
    /// The pages of the file that are in use.
    pub(crate) used_bytes: u64,
    pub(crate) log_bytes: u64,
    /// Events that should have been pruned already.
    pub(crate) overdue: u64,
}

impl Retention {
    pub(crate) fn p99_ratio(&self) -> f64 {
        self.with.measured.latency_us(0.99) / self.without.measured.latency_us(0.99)
    }

    /// The bytes by which an event makes the file grow in the last third of the time: its key and
    /// its narrow row stay. `None` if the time is too short.
    pub(crate) fn bytes_per_event(&self) -> Option<f64> {
        let (third, last) = (self.samples.get(self.samples.len() * 2 / 3)?, self.samples.last()?);
        let is_long_enough = third.seconds >= 2.0 * KEPT.as_secs_f64();
        let events = last.events.checked_sub(third.events).filter(|events| *events > 0)?;
        let grown = last.file_bytes as f64 - third.file_bytes as f64;
        is_long_enough.then_some(grown / events as f64)
    }

    pub(crate) fn overdue_at_the_end(&self) -> u64 {
        self.samples.last().map_or(0, |sample| sample.overdue)
    }

    pub(crate) fn log_bytes_peak(&self) -> u64 {
        self.samples.iter().map(|sample| sample.log_bytes).max().unwrap_or(0)
    }
}

/// The database with the events.
enum Database {
    Sqlite(Ledger),
    Postgres(Client),
}

/// A server with retention or without.
struct Subject {
    sent: Sent,
    database: Database,
    directory: std::path::PathBuf,
}

fn tables(handler: &str, kept: &str) -> String {
    format!(
        "\n[sources.stripe.handlers.sum]\nsql = \"{handler}\"\n\
         \n[retention]\nkeys = \"30d\"\nevents = \"{kept}\"\n"
    )
}

impl Subject {
    /// On SQLite, with a user's table that does not grow, so that only Hapax's tables grow.
    fn sqlite(options: &Options, directory: &Path, kept: &str) -> anyhow::Result<Self> {
        let schema = "CREATE TABLE total (fees INTEGER); INSERT INTO total VALUES (0);";
        let ledger = Ledger::create(directory, schema)?;
        let tables = tables("UPDATE total SET fees = fees + 5", kept);
        let setup = Setup { tables, ..Setup::default() };
        let sent = Sent::to(Server::hapax(&options.place.hapax, directory, &setup)?);
        Ok(Self { sent, database: Database::Sqlite(ledger), directory: directory.to_owned() })
    }

    async fn postgres(
        options: &Options,
        server: &Postgres,
        directory: &Path,
        kept: &str,
    ) -> anyhow::Result<Self> {
        let url = server.create_database("retention").await;
        let (client, connection) =
            tokio_postgres::connect(&url, NoTls).await.context("connecting to PostgreSQL")?;
        tokio::spawn(connection);
        client.batch_execute("CREATE TABLE ledger (event_id text, fee bigint)").await?;
        let tables = tables("INSERT INTO ledger (event_id, fee) VALUES (:event_id, 5)", kept);
        let setup = Setup { root: format!("database_url = {url:?}\n"), tables };
        let sent = Sent::to(Server::hapax(&options.place.hapax, directory, &setup)?);
        Ok(Self { sent, database: Database::Postgres(client), directory: directory.to_owned() })
    }

    async fn load(&self, plan: Plan) -> anyhow::Result<(Paced, Vec<Sample>)> {
        let time = plan.warm_up + plan.time;
        let samples = async {
            let (began, mut samples) = (Instant::now(), Vec::new());
            for n in 1..=SAMPLES {
                let at = time * n as u32 / SAMPLES as u32;
                tokio::time::sleep(at.saturating_sub(began.elapsed())).await;
                samples.push(self.sample(began).await?);
            }
            anyhow::Ok(samples)
        };
        let events = Rc::clone(&self.sent.events);
        let (paced, samples) =
            tokio::try_join!(open::run(&self.sent.server, &events, plan), samples)?;
        Ok((paced, samples))
    }

    async fn sample(&self, began: Instant) -> anyhow::Result<Sample> {
        let (seconds, events) = (began.elapsed().as_secs_f64(), self.sent.made());
        let late = (KEPT + BEHIND).as_secs();
        match &self.database {
            Database::Sqlite(ledger) => {
                let database = ledger.open()?;
                let number = |sql: &str| {
                    let value = database.query_row(sql, [], |row| row.get::<_, i64>(0))?;
                    anyhow::Ok(u64::try_from(value)?)
                };
                let page_bytes = number("PRAGMA page_size")?;
                let pages = number("PRAGMA page_count")?;
                let log = self.directory.join("data").join("hapax.db-wal");
                Ok(Sample {
                    seconds,
                    events,
                    file_bytes: pages * page_bytes,
                    used_bytes: (pages - number("PRAGMA freelist_count")?) * page_bytes,
                    log_bytes: std::fs::metadata(&log).context("looking at the log")?.len(),
                    overdue: overdue(&database, late)?,
                })
            }
            Database::Postgres(client) => {
                // An id begins with the milliseconds of its arrival. See `overdue` for the reason.
                let row = client
                    .query_one(
                        "SELECT (SELECT sum(pg_total_relation_size(c.oid))::bigint FROM pg_class c
                                 WHERE c.relnamespace = 'hapax'::regnamespace AND c.relkind = 'r'),
                                (SELECT count(*) FROM hapax.body
                                 WHERE id < rpad(lpad(to_hex(floor(1000 * (extract(epoch FROM now())
                                                                           - $1::bigint))::bigint), 12, '0'),
                                                 32, '0')::uuid)",
                        &[&i64::try_from(late)?],
                    )
                    .await?;
                let (bytes, overdue): (i64, i64) = (row.get(0), row.get(1));
                let bytes = u64::try_from(bytes)?;
                let overdue = u64::try_from(overdue)?;
                Ok(Sample {
                    seconds,
                    events,
                    file_bytes: bytes,
                    used_bytes: bytes,
                    log_bytes: 0,
                    overdue,
                })
            }
        }
    }
}

/// The events that should have been pruned already. The bodies are in the order of their arrival, so the
/// count ends at the first that is not overdue: a count over all bodies would take a core from the measured
/// server.
fn overdue(database: &rusqlite::Connection, late: u64) -> anyhow::Result<u64> {
    let now = database.query_row("SELECT unixepoch()", [], |row| row.get::<_, i64>(0))?;
    let before = (now - i64::try_from(late)?) * 1_000_000;
    let mut oldest = database.prepare(
        "SELECT e.received_at FROM hapax_body b CROSS JOIN hapax_event e ON e.seq = b.seq
         ORDER BY b.seq",
    )?;
    let mut arrived = oldest.query_map([], |row| row.get::<_, i64>(0))?;
    let mut count = 0;
    while let Some(at) = arrived.next().transpose()?
        && at < before
    {
        count += 1;
    }
    Ok(count)
}

pub(crate) async fn measure(options: &Options, directory: &Path) -> anyhow::Result<Vec<Retention>> {
    let mut all = Vec::new();
    if options.retention_rate > 0.0 {
        let place = |name: &str| directory.join(format!("retention-{name}"));
        let without = Subject::sqlite(options, &place("without"), "30d")?;
        let with = async || Subject::sqlite(options, &place("with"), "60s");
        all.push(compare(options, "SQLite", options.retention_rate, without, with).await?);
    }
    if options.retention_rate_postgres > 0.0 {
        let place = |name: &str| directory.join(format!("retention-postgres-{name}"));
        let server = Postgres::with_settings(&[("shared_buffers", "128MB")]).await;
        let without = Subject::postgres(options, &server, &place("without"), "30d").await?;
        let with = async || Subject::postgres(options, &server, &place("with"), "60s").await;
        let rate = options.retention_rate_postgres;
        all.push(compare(options, "PostgreSQL", rate, without, with).await?);
    }
    Ok(all)
}

/// The loads run one after the other, so that they do not share the machine.
async fn compare(
    options: &Options,
    what: &'static str,
    per_second: f64,
    without: Subject,
    with: impl AsyncFnOnce() -> anyhow::Result<Subject>,
) -> anyhow::Result<Retention> {
    let all = Duration::from_secs(options.retention_seconds);
    let time = all.saturating_sub(KEPT + BEHIND).max(Duration::from_secs(5));
    let plan = Plan { per_second, time: (all / 4).max(WARM_UP), warm_up: WARM_UP };
    let (unpruned, _) = without.load(plan).await?;
    drop(without);
    let plan = Plan { per_second, time, warm_up: all.saturating_sub(time) };
    let (pruned, samples) = with().await?.load(plan).await?;
    Ok(Retention { what, without: unpruned, with: pruned, samples })
}
