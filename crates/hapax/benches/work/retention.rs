//! How large the files get under a steady load with retention on: events are finished at once and
//! kept for ten seconds, and the janitor comes once a minute.

use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::Context as _;

use crate::Options;
use crate::effects::Sent;
use crate::ledger::Ledger;
use crate::shared::open::{self, Paced, Plan};
use crate::shared::server::{Server, Setup};

/// A user's table that does not grow, so that what grows is ours.
const SCHEMA: &str = "CREATE TABLE total (fees INTEGER); INSERT INTO total VALUES (0);";

/// Keys outlive the replay window, so that one is short too.
const TABLES: &str = "tolerance = \"5s\"\n\
     \n[sources.stripe.handlers.sum]\nsql = \"UPDATE total SET fees = fees + 5\"\n\
     \n[retention]\nkeys = \"10s\"\nevents = \"10s\"\n";

/// How often the janitor comes.
const JANITOR_SECONDS: f64 = 60.0;

/// Lines of the table.
const SAMPLES: u64 = 24;

/// The load and the files over its time.
pub(crate) struct Retention {
    pub(crate) paced: Paced,
    pub(crate) samples: Vec<Sample>,
}

pub(crate) struct Sample {
    pub(crate) seconds: f64,
    pub(crate) events: u64,
    pub(crate) file_bytes: u64,
    /// Of the file, pages that hold something.
    pub(crate) used_bytes: u64,
    pub(crate) log_bytes: u64,
}

impl Retention {
    /// The largest file of the last third of the time, to the largest of the third before; nothing
    /// where the time is too short for a janitor's round in each.
    pub(crate) fn growth(&self) -> Option<f64> {
        let third = self.samples.len() / 3;
        let (before, last) = self.samples.get(third..)?.split_at_checked(third)?;
        let peak = |samples: &[Sample]| samples.iter().map(|one| one.file_bytes).max();
        let is_told = self.samples.last()?.seconds >= 3.0 * JANITOR_SECONDS;
        is_told.then_some(peak(last)? as f64 / peak(before)?.max(1) as f64)
    }

    pub(crate) fn log_bytes_peak(&self) -> u64 {
        self.samples.iter().map(|sample| sample.log_bytes).max().unwrap_or(0)
    }
}

pub(crate) async fn measure(options: &Options, directory: &Path) -> anyhow::Result<Retention> {
    let directory = directory.join("retention");
    let ledger = Ledger::create(&directory, SCHEMA)?;
    let setup = Setup { tables: TABLES.to_owned(), ..Setup::default() };
    let sent = Sent::to(Server::hapax(&options.place.hapax, &directory, &setup)?);
    let time = Duration::from_secs(options.retention_seconds.max(SAMPLES / 4));
    let plan = Plan { per_second: options.retention_rate, time, warm_up: Duration::ZERO };
    let samples = async {
        let (began, mut samples) = (Instant::now(), Vec::new());
        for _ in 0..SAMPLES {
            tokio::time::sleep(time / SAMPLES as u32).await;
            samples.push(sample(&directory, &ledger, began, &sent)?);
        }
        anyhow::Ok(samples)
    };
    let events = Rc::clone(&sent.events);
    let (paced, samples) = tokio::try_join!(open::run(&sent.server, &events, plan), samples)?;
    Ok(Retention { paced, samples })
}

fn sample(
    directory: &Path,
    ledger: &Ledger,
    began: Instant,
    sent: &Sent,
) -> anyhow::Result<Sample> {
    let size = |name: &str| {
        let file = directory.join("data").join(name);
        let found =
            std::fs::metadata(&file).with_context(|| format!("looking at {}", file.display()));
        anyhow::Ok(found?.len())
    };
    let database = ledger.open()?;
    let pragma = |sql: &str| {
        let value = database.query_row(sql, [], |row| row.get::<_, i64>(0))?;
        anyhow::Ok(u64::try_from(value)?)
    };
    let used = pragma("PRAGMA page_count")? - pragma("PRAGMA freelist_count")?;
    Ok(Sample {
        seconds: began.elapsed().as_secs_f64(),
        events: sent.made(),
        file_bytes: size("hapax.db")?,
        used_bytes: used * pragma("PRAGMA page_size")?,
        log_bytes: size("hapax.db-wal")?,
    })
}
