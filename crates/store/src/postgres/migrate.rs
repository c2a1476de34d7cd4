//! The tables of the schema `hapax`, brought forward in small numbered steps.
//!
//! Each step is one transaction together with the record that it was applied, so that an
//! interrupted step is simply applied again. One node at a time; the others wait for it, for a
//! while. A step names the oldest version of the tables whose binaries survive it: nodes of the
//! version before keep running, and also start, while the first ones are replaced.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use hapax_core::KeyHash;

use super::connect::{ClientPool, PgError, PgOpenError, PooledClient};

/// One step.
struct Step {
    number: i32,
    name: &'static str,
    sql: &'static str,
    /// A binary that knows this many steps still works once this one is taken.
    survives: i32,
}

/// All of them, in order. What has been released is never edited.
const STEPS: &[Step] = &[
    Step {
        number: 1,
        name: "tables",
        sql: include_str!("migrations/0001_tables.sql"),
        survives: 1,
    },
    Step {
        number: 2,
        name: "ingest",
        sql: include_str!("migrations/0002_ingest.sql"),
        survives: 1,
    },
    Step { number: 3, name: "work", sql: include_str!("migrations/0003_work.sql"), survives: 1 },
    Step {
        number: 4,
        name: "functions",
        sql: concat!(include_str!("sql/once.sql"), include_str!("migrations/0004_functions.sql")),
        survives: 1,
    },
    Step { number: 5, name: "views", sql: include_str!("migrations/0005_views.sql"), survives: 1 },
    Step {
        number: 6,
        name: "ledger",
        sql: include_str!("migrations/0006_ledger.sql"),
        survives: 1,
    },
    Step {
        number: 7,
        name: "handlers",
        sql: include_str!("migrations/0007_handlers.sql"),
        survives: 1,
    },
];

/// Where steps are noted.
const RECORD: &str = "CREATE SCHEMA IF NOT EXISTS hapax;
CREATE TABLE IF NOT EXISTS hapax.migration (
    number   integer PRIMARY KEY,
    name     text NOT NULL,
    checksum text NOT NULL,
    survives integer NOT NULL,
    at       timestamptz NOT NULL DEFAULT statement_timestamp()
)";

/// What follows every step: the functions that are there by then find their rows by index.
const BY_INDEX: &str = include_str!("sql/by_index.sql");

/// The note that a step was taken, and what follows every step.
fn note(Step { number, name, sql, survives }: &Step) -> String {
    let checksum = checksum(sql);
    format!(
        "{BY_INDEX};\nINSERT INTO hapax.migration (number, name, checksum, survives) \
         VALUES ({number}, '{name}', '{checksum}', {survives})"
    )
}

/// Who migrates holds this lock: "hapax" in ASCII, and a number.
const LOCK: i64 = 0x6861_7061_7800_0001;

/// How long to wait for another node that is at it.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(60);

/// How long to wait between two looks.
const LOCK_POLL: Duration = Duration::from_millis(100);

/// How a step stands in this database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MigrationStatus {
    /// Its number.
    pub number: i32,
    /// Its name.
    pub name: String,
    /// Whether it has been taken.
    pub applied: bool,
    /// Why no node of this version would start on it.
    pub refused: Option<String>,
}

/// A step that was taken, by the database's own record.
struct Taken {
    name: String,
    checksum: String,
    survives: i32,
}

/// What `hapax.once` needs, and nothing else.
pub(super) fn once() -> &'static str {
    include_str!("sql/once.sql")
}

/// All steps as one script that also notes them as taken, so that a server finds them done.
pub(super) fn by_hand() -> String {
    let mut script = format!("BEGIN;\nSELECT pg_advisory_xact_lock({LOCK});\n{RECORD};\n");
    for step in STEPS {
        let Step { number, name, sql, .. } = step;
        script.push_str(&format!("\n-- Step {number}: {name}\n{sql}\n{};\n", note(step)));
    }
    script.push_str("COMMIT;\n");
    script
}

/// Takes every step that is missing.
pub(super) async fn up(lender: &ClientPool) -> Result<(), PgOpenError> {
    let mut lent = lender.lend().await.map_err(trouble)?;
    if missing(&taken(&mut lent).await?)?.is_empty() {
        return Ok(());
    }
    lock(&mut lent).await?;
    let outcome = up_locked(&mut lent).await;
    // The lock goes with the session, should this not get through.
    let unlocked = lent.query("SELECT pg_advisory_unlock($1)", &[&LOCK]).await;
    outcome.and(unlocked.map(drop).map_err(trouble))
}

async fn up_locked(lent: &mut PooledClient) -> Result<(), PgOpenError> {
    lent.batch(RECORD).await.map_err(trouble)?;
    for step in missing(&taken(lent).await?)? {
        let (number, name) = (step.number, step.name);
        // In one message, so in one transaction. A step may take longer than a statement does.
        let sql = format!("SET LOCAL statement_timeout = 0;\n{}\n;{}", step.sql, note(step));
        lent.batch(&sql).await.map_err(|error| {
            PgOpenError::Migrate(format!("step {number} ({name}): {}", said(&error)))
        })?;
        tracing::info!(step = number, "took step {number} ({name}) of the database");
    }
    Ok(())
}

/// Every step this binary knows of, and those it does not.
pub(super) async fn status(lender: &ClientPool) -> Result<Vec<MigrationStatus>, PgOpenError> {
    let mut lent = lender.lend().await.map_err(trouble)?;
    let taken = taken(&mut lent).await?;
    let mut all: BTreeMap<i32, MigrationStatus> = STEPS
        .iter()
        .map(|step| {
            let (number, name) = (step.number, step.name.to_owned());
            (number, MigrationStatus { number, name, applied: false, refused: None })
        })
        .collect();
    for (number, taken) in taken {
        let refused = refusal(number, &taken);
        all.insert(number, MigrationStatus { number, name: taken.name, applied: true, refused });
    }
    Ok(all.into_values().collect())
}

/// The steps that are to be taken; an error where the database is not one of ours.
fn missing(taken: &BTreeMap<i32, Taken>) -> Result<Vec<&'static Step>, PgOpenError> {
    for (number, taken) in taken {
        if let Some(why) = refusal(*number, taken) {
            return Err(PgOpenError::Migrate(why));
        }
        if !STEPS.iter().any(|step| step.number == *number) {
            tracing::info!(
                step = number,
                "the database is ahead by step {number}, which only adds"
            );
        }
    }
    Ok(STEPS.iter().filter(|step| !taken.contains_key(&step.number)).collect())
}

/// Why this version must not work on a database that took this step.
fn refusal(number: i32, taken: &Taken) -> Option<String> {
    let newest = STEPS.last().map_or(0, |step| step.number);
    let name = &taken.name;
    match STEPS.iter().find(|step| step.number == number) {
        Some(step) if checksum(step.sql) == taken.checksum => None,
        Some(_) => Some(format!(
            "step {number} ({name}) of this database is not the one this version knows; it was made \
             by another build"
        )),
        None if taken.survives <= newest => None,
        None => Some(format!(
            "a newer version took step {number} ({name}), which this version does not survive; run \
             the newer version"
        )),
    }
}

async fn taken(lent: &mut PooledClient) -> Result<BTreeMap<i32, Taken>, PgOpenError> {
    let there = lent
        .query("SELECT to_regclass('hapax.migration') IS NOT NULL", &[])
        .await
        .map_err(trouble)?;
    if !there.first().is_some_and(|row| row.get(0)) {
        return Ok(BTreeMap::new());
    }
    let rows = lent
        .query("SELECT number, name, checksum, survives FROM hapax.migration", &[])
        .await
        .map_err(trouble)?;
    let read = |row: &tokio_postgres::Row| {
        (row.get(0), Taken { name: row.get(1), checksum: row.get(2), survives: row.get(3) })
    };
    Ok(rows.iter().map(read).collect())
}

async fn lock(lent: &mut PooledClient) -> Result<(), PgOpenError> {
    let began = Instant::now();
    loop {
        let got = lent.query("SELECT pg_try_advisory_lock($1)", &[&LOCK]).await.map_err(trouble)?;
        if got.first().is_some_and(|row| row.get(0)) {
            return Ok(());
        }
        if began.elapsed() > LOCK_WAIT_MAX {
            return Err(PgOpenError::Migrate(
                "another node has been migrating for a minute; try again".to_owned(),
            ));
        }
        tokio::time::sleep(LOCK_POLL).await;
    }
}

fn checksum(sql: &str) -> String {
    format!("{:?}", KeyHash::of(b"migration", [sql.as_bytes()]))
}

fn trouble(error: PgError) -> PgOpenError {
    PgOpenError::Migrate(said(&error))
}

/// In full: a migration contains no value from outside that must stay secret.
fn said(error: &PgError) -> String {
    match error {
        PgError::Sql(sql) => match sql.as_db_error() {
            Some(db) => format!("{} ({})", db.message(), db.code().code()),
            None => error.to_string(),
        },
        PgError::Pool(_) | PgError::Silent | PgError::Gone | PgError::Closed => error.to_string(),
    }
}
