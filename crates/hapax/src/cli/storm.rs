//! `hapax storm`: the command line of [`hapax_storm`], which tests any endpoint for exactly-once effects.
//! This file has its flags, the databases that a probe can read, and the printed table.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hapax_core::Timestamp;
use hapax_store::PgStore;
use hapax_storm::{Law, LawVerdict, Probe, Report, RowReader, Storm, StormSize, junit_of_failure};
use rusqlite::types::ValueRef;
use rusqlite::{Connection, OpenFlags};

use super::admin_client;
use super::captured::SenderSecrets;
use super::output::{self, CommandFailure, Exit};
use super::sender;
use crate::config::{ServiceUrl, units};

/// The most requests of one storm: every answer stays in memory until the end.
const REQUESTS_MAX: u64 = 5_000_000;

/// File descriptors that are not connections: the probe, the report, the runtime.
const DESCRIPTORS_RESERVED: u64 = 32;

/// A random seed has 32 bits, so that it can be typed again.
const RANDOM_SEED_MASK: u64 = 0xffff_ffff;

/// How long a query of the probe waits for a locked SQLite database.
const BUSY_TIMEOUT: Duration = Duration::from_secs(30);

/// `hapax storm`.
#[derive(Debug, clap::Args)]
pub(super) struct StormArgs {
    #[command(flatten)]
    flags: Flags,
    #[command(flatten)]
    identity: SenderSecrets,
}

/// All arguments except the secrets.
#[derive(Debug, clap::Args)]
struct Flags {
    /// The endpoint under test: http://127.0.0.1:3000/webhooks/stripe
    #[arg(long, value_name = "URL")]
    to: String,
    /// The sender to imitate; `hapax providers` lists them
    #[arg(long, value_name = "NAME")]
    provider: String,
    #[command(flatten)]
    shape: ShapeArgs,
    /// The seed of ids and order; the same seed sends the same storm [default: random]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// How long effects may take to appear after the last answer
    #[arg(long, value_name = "DURATION", default_value = "10s")]
    settle: String,
    /// A shell command that prints the effects: their number, or one line per effect that starts with the
    /// event id
    #[arg(long, value_name = "CMD", conflicts_with_all = ["effects_url", "effects_sql", "effects_db"])]
    effects_cmd: Option<String>,
    /// A URL that returns the effects: a number, a JSON array of ids or of objects with event_id, or lines
    #[arg(long, value_name = "URL", conflicts_with_all = ["effects_sql", "effects_db"])]
    effects_url: Option<String>,
    /// A query that returns the effects: one number, or a row per effect with the event id first
    #[arg(long, value_name = "QUERY", requires = "effects_db")]
    effects_sql: Option<String>,
    /// The database of that query: sqlite:PATH or postgres://…
    #[arg(long, value_name = "URL", requires = "effects_sql")]
    effects_db: Option<String>,
    /// Also write the result to this file as JUnit XML
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Print one JSON object per law, then a summary
    #[arg(long)]
    json: bool,
}

/// The requests of a storm.
#[derive(Debug, clap::Args)]
struct ShapeArgs {
    /// The event type, such as payout.paid [default: a common type of this sender]
    #[arg(long = "type", value_name = "TYPE")]
    event_type: Option<String>,
    /// The number of distinct events
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    events: u64,
    /// How many times each event is sent, all copies at once
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    copies: u64,
    /// The number of concurrent requests
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    concurrency: u64,
    /// Also send events that were signed outside the replay window; they must be rejected
    #[arg(long)]
    stale: bool,
    /// Also send forged events (wrong secret, changed body, no signature); they must be rejected
    #[arg(long)]
    forged: bool,
    /// Send everything in one random order instead of event by event
    #[arg(long)]
    shuffle: bool,
}

impl StormArgs {
    pub(super) fn run(self) -> Result<Exit, CommandFailure> {
        let sender = sender::sender_like(&self.flags.provider, &self.identity, &self.flags.to)?;
        if self.flags.shape.events.saturating_mul(self.flags.shape.copies) > REQUESTS_MAX {
            let problem = format!("that is more than {REQUESTS_MAX} requests");
            return Err(CommandFailure::usage(problem, "lower --events or --copies"));
        }
        raise_descriptor_limit(self.flags.shape.concurrency)?;
        let settle = units::duration(&self.flags.settle)?;
        let probe = self.flags.probe()?;
        let seed = self
            .flags
            .seed
            .unwrap_or_else(|| uuid::Uuid::now_v7().as_u64_pair().1 & RANDOM_SEED_MASK);
        let storm = Storm::new(sender, self.flags.shape.shape(), seed, Timestamp::now())?;
        let storm = storm.with_probe(probe, settle);
        // The file is opened first, so that a path that cannot be written fails before the storm.
        let junit = self.flags.junit.as_ref().map(open).transpose()?;
        output::words(&format!(
            "seed {seed}: repeat the command with --seed {seed} to send the same events in the same order"
        ));
        let (exit, xml) = match admin_client::run(send(&storm)) {
            Ok(report) => (print(&report, self.flags.json), report.junit()),
            Err(failure) => {
                let xml = junit_of_failure(failure.message());
                (Err(failure), xml)
            }
        };
        if let Some(mut file) = junit {
            file.write_all(xml.as_bytes())?;
        }
        exit
    }
}

async fn send(storm: &Storm) -> Result<Report, CommandFailure> {
    let bar = sender::bar(storm.requests());
    let ticked = bar.clone();
    let report = storm.run(Arc::new(move || ticked.inc(1))).await;
    bar.finish_and_clear();
    Ok(report?)
}

fn print(report: &Report, json: bool) -> Result<Exit, CommandFailure> {
    match json {
        true => report.json().iter().try_for_each(output::json)?,
        false => print_table(report)?,
    }
    Ok(match (report.verdict(), report.probe_failed) {
        (LawVerdict::Broken, _) => Exit::Negative,
        (LawVerdict::Held | LawVerdict::NotJudged, true) => Exit::Unreachable,
        (LawVerdict::Held | LawVerdict::NotJudged, false) => Exit::Done,
    })
}

/// Prints the laws, the examples of each broken one, and the figures.
fn print_table(report: &Report) -> Result<(), CommandFailure> {
    let width = report.laws.iter().map(|law| law.title.len()).max().unwrap_or(0);
    for law in &report.laws {
        let Law { title, verdict, breaches, .. } = law;
        let colour = match verdict {
            LawVerdict::Held => "\u{1b}[32m",
            LawVerdict::Broken => "\u{1b}[1;31m",
            LawVerdict::NotJudged => "\u{1b}[33m",
        };
        let verdict = verdict.as_str().replace('_', " ");
        let times = match breaches {
            0 => String::new(),
            breaches => format!(" ×{breaches}"),
        };
        output::data(&format!("{title:<width$}  {colour}{verdict}\u{1b}[0m{times}"))?;
        for line in law.details() {
            output::data(&format!("    {}", output::shown(&line)))?;
        }
    }
    output::data("")?;
    for line in report.figures.lines() {
        output::data(&line)?;
    }
    Ok(())
}

impl ShapeArgs {
    fn shape(&self) -> StormSize {
        StormSize {
            event_type: self.event_type.clone(),
            events: self.events,
            copies: self.copies,
            concurrency: self.concurrency,
            stale: self.stale,
            forged: self.forged,
            shuffle: self.shuffle,
        }
    }
}

impl Flags {
    /// The probe, if any; clap allows at most one.
    fn probe(&self) -> Result<Option<Probe>, CommandFailure> {
        if let Some(command) = &self.effects_cmd {
            return Ok(Some(Probe::Command(command.clone())));
        }
        if let Some(url) = &self.effects_url {
            return Ok(Some(Probe::Url(sender::target("--effects-url", url)?)));
        }
        let (Some(sql), Some(database)) = (&self.effects_sql, &self.effects_db) else {
            return Ok(None);
        };
        let sql = sql.clone();
        if let Some(path) = database.strip_prefix("sqlite:") {
            let path = PathBuf::from(path.strip_prefix("//").unwrap_or(path));
            return Ok(Some(Probe::Rows(sqlite_rows(path, sql))));
        }
        let url = ServiceUrl::postgres(database).map_err(|invalid| {
            CommandFailure::usage(
                format!("--effects-db {}", invalid.problem),
                "write sqlite:PATH or postgres://USER:PASSWORD@HOST:5432/DATABASE",
            )
        })?;
        Ok(Some(Probe::Rows(postgres_rows(url, sql))))
    }
}

/// The first column of each row of a SQLite file, which is opened read-only.
pub(super) fn sqlite_rows(path: PathBuf, sql: String) -> RowReader {
    Box::new(move || {
        let rows = sqlite(&path, &sql).map_err(|error| error.to_string());
        Box::pin(std::future::ready(rows))
    })
}

/// The first column of each row that is not null.
fn postgres_rows(url: ServiceUrl, sql: String) -> RowReader {
    let (url, sql) = (Arc::new(url), Arc::<str>::from(sql));
    Box::new(move || {
        let (url, sql) = (Arc::clone(&url), Arc::clone(&sql));
        Box::pin(async move {
            let rows = PgStore::first_column(url.expose(), &sql).await;
            rows.map(|rows| rows.into_iter().flatten().collect()).map_err(|error| error.to_string())
        })
    })
}

fn sqlite(path: &Path, sql: &str) -> rusqlite::Result<Vec<String>> {
    let database = Connection::open_with_flags(
        path,
        OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX,
    )?;
    database.busy_timeout(BUSY_TIMEOUT)?;
    let mut statement = database.prepare(sql)?;
    let mut rows = statement.query([])?;
    let mut column = Vec::new();
    while let Some(row) = rows.next()? {
        match row.get_ref(0)? {
            ValueRef::Null => {}
            ValueRef::Integer(number) => column.push(number.to_string()),
            ValueRef::Real(number) => column.push(number.to_string()),
            ValueRef::Text(text) | ValueRef::Blob(text) => {
                column.push(String::from_utf8_lossy(text).into_owned());
            }
        }
    }
    Ok(column)
}

/// Raises the limit of open files: a connection that this process cannot open is not the endpoint's fault.
fn raise_descriptor_limit(connections: u64) -> Result<(), CommandFailure> {
    let needed = connections + DESCRIPTORS_RESERVED;
    let open = rlimit::increase_nofile_limit(needed).unwrap_or(needed);
    if open < needed {
        let problem =
            format!("--concurrency {connections} is too high: this process may open {open} files");
        return Err(CommandFailure::usage(problem, "lower it, or raise the limit with ulimit -n"));
    }
    Ok(())
}

fn open(path: &PathBuf) -> Result<File, CommandFailure> {
    File::create(path).map_err(|error| {
        CommandFailure::unreachable(format!("cannot write {}: {error}", path.display()))
    })
}
