//! Migrates the schema `hapax`: tables in small numbered steps, functions and views by version.
//!
//! Each step is one transaction together with the record that it was applied, so that an
//! interrupted step is simply applied again. One node migrates at a time; the others wait for it
//! for a bounded time. A step names the oldest version of the tables whose binaries survive it. So
//! nodes of the version before keep running, and can start, while nodes are replaced one by one.
//!
//! After the steps come the functions and views ([`super::functions`]), all in one transaction with
//! their version. A node whose version is not higher leaves them as they are.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use hapax_core::KeyHash;

use super::connect::{ClientPool, PgError, PgOpenError, PooledClient};
use super::functions::{AFTER, BEFORE, FunctionSet, NEW_RIGHTS};

/// One step.
#[derive(Debug, Clone)]
struct MigrationStep {
    number: i32,
    name: &'static str,
    sql: &'static str,
    /// A binary that knows at least this many steps still works after this step.
    survives: i32,
}

/// All steps, in order. A step that has been released is never edited.
const STEPS: &[MigrationStep] = &[MigrationStep {
    number: 1,
    name: BASELINE,
    sql: concat!(include_str!("sql/once_key.sql"), include_str!("migrations/0001_baseline.sql")),
    survives: 1,
}];

/// The first step. A database that was made before the first release has a first step of another name.
const BASELINE: &str = "baseline";

/// The schema, and the tables that record the applied steps and the version of the functions. Run in one
/// transaction.
fn record() -> String {
    format!("{BEFORE}\n{RECORD};\n{NEW_RIGHTS}")
}

const RECORD: &str = "CREATE SCHEMA IF NOT EXISTS hapax;
CREATE TABLE IF NOT EXISTS hapax.migration (
    number   integer PRIMARY KEY,
    name     text NOT NULL,
    checksum text NOT NULL,
    survives integer NOT NULL,
    at       timestamptz NOT NULL DEFAULT statement_timestamp()
);
CREATE TABLE IF NOT EXISTS hapax.function_version (
    one      boolean PRIMARY KEY DEFAULT true CHECK (one),
    version  integer NOT NULL,
    checksum text NOT NULL,
    at       timestamptz NOT NULL DEFAULT statement_timestamp()
)";

/// The schema of a build: steps, and functions.
struct Schema {
    steps: Vec<MigrationStep>,
    functions: FunctionSet,
}

/// The SQL of a step, with the SQL around every step and the record that it was applied.
fn applied(MigrationStep { number, name, sql, survives }: &MigrationStep) -> String {
    let checksum = checksum(sql);
    format!(
        "{BEFORE}\n{sql}\n;{AFTER}\nINSERT INTO hapax.migration (number, name, checksum, survives) \
         VALUES ({number}, '{name}', '{checksum}', {survives})"
    )
}

/// The advisory lock that a migrating node holds: "hapax" in ASCII, and a number.
const LOCK: i64 = 0x6861_7061_7800_0001;

/// How long to wait for another node that migrates.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(60);

/// How long to wait between two tries to take the lock.
const LOCK_POLL: Duration = Duration::from_millis(100);

/// The state of a step in this database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MigrationStatus {
    /// The number of the step. For the entry `functions`: the version.
    pub number: i32,
    /// The name of the step.
    pub name: String,
    /// Whether the step was applied.
    pub applied: bool,
    /// Why a node of this version refuses to start on this database, if this step is the reason.
    pub refused: Option<String>,
}

/// An applied step, as the database has recorded it.
struct RecordedStep {
    name: String,
    checksum: String,
    survives: i32,
}

/// The steps and functions that a database has recorded.
#[derive(Default)]
struct RecordedSchema {
    steps: BTreeMap<i32, RecordedStep>,
    /// Version and checksum of the functions.
    functions: Option<(i32, String)>,
}

/// The steps and functions that are to be applied.
struct Missing<'a> {
    steps: Vec<&'a MigrationStep>,
    functions: Option<&'a FunctionSet>,
}

/// The SQL that `hapax.once` needs, and nothing else.
pub(super) fn once() -> &'static str {
    concat!(include_str!("sql/once_key.sql"), include_str!("functions/once.sql"))
}

/// All steps and functions as one script that also records them as applied, so that a server has
/// nothing left to do.
pub(super) fn by_hand() -> String {
    let Schema { steps, functions } = Schema::ours();
    let mut script = format!("BEGIN;\nSELECT pg_advisory_xact_lock({LOCK});\n{}\n", record());
    for step in &steps {
        let MigrationStep { number, name, .. } = step;
        script.push_str(&format!("\n-- Step {number}: {name}\n{};\n", applied(step)));
    }
    let (version, sql) = (functions.version, functions.script());
    script.push_str(&format!("\n-- Functions and views, version {version}\n{sql}\nCOMMIT;\n"));
    script
}

/// Applies every missing step, and replaces functions of a lower version.
pub(super) async fn up(client_pool: &ClientPool) -> Result<(), PgOpenError> {
    Schema::ours().up(client_pool).await
}

/// Every step that this binary or the database knows, then the functions, with their version as the
/// number.
pub(super) async fn status(client_pool: &ClientPool) -> Result<Vec<MigrationStatus>, PgOpenError> {
    let mut client = client_pool.checkout().await.map_err(open_error)?;
    Ok(Schema::ours().status(found(&mut client).await?))
}

impl Schema {
    fn ours() -> Self {
        Self { steps: STEPS.to_vec(), functions: FunctionSet::ours() }
    }

    async fn up(&self, client_pool: &ClientPool) -> Result<(), PgOpenError> {
        let mut client = client_pool.checkout().await.map_err(open_error)?;
        if self.missing(&found(&mut client).await?)?.is_none() {
            return Ok(());
        }
        lock(&mut client).await?;
        let outcome = self.up_locked(&mut client).await;
        // If the unlock fails, the lock is released with the session.
        let unlocked = client.query("SELECT pg_advisory_unlock($1)", &[&LOCK]).await;
        outcome.and(unlocked.map(drop).map_err(open_error))
    }

    async fn up_locked(&self, client: &mut PooledClient) -> Result<(), PgOpenError> {
        client.batch(&record()).await.map_err(open_error)?;
        let Some(missing) = self.missing(&found(client).await?)? else { return Ok(()) };
        for step in missing.steps {
            let (number, name) = (step.number, step.name);
            apply(client, &format!("step {number} ({name})"), &applied(step)).await?;
            tracing::info!(step = number, "applied migration {number} ({name}) to the database");
        }
        if let Some(functions) = missing.functions {
            let version = functions.version;
            apply(client, &format!("functions, version {version}"), &functions.script()).await?;
            tracing::info!(version, "replaced the functions of the database by version {version}");
        }
        Ok(())
    }

    fn status(&self, found: RecordedSchema) -> Vec<MigrationStatus> {
        let mut all: BTreeMap<i32, MigrationStatus> = self
            .steps
            .iter()
            .map(|step| {
                let (number, name) = (step.number, step.name.to_owned());
                (number, MigrationStatus { number, name, applied: false, refused: None })
            })
            .collect();
        let functions = MigrationStatus {
            number: found
                .functions
                .as_ref()
                .map_or(0, |(there, _)| *there)
                .max(self.functions.version),
            name: "functions".to_owned(),
            applied: found
                .functions
                .as_ref()
                .is_some_and(|(there, _)| *there >= self.functions.version),
            refused: self.functions_refusal(found.functions.as_ref()),
        };
        for (number, taken) in found.steps {
            let refused = self.refusal(number, &taken);
            let name = taken.name;
            all.insert(number, MigrationStatus { number, name, applied: true, refused });
        }
        all.into_values().chain([functions]).collect()
    }

    /// The steps and functions that are to be applied, if any. Returns an error if this version
    /// must not work on the database.
    fn missing(&self, found: &RecordedSchema) -> Result<Option<Missing<'_>>, PgOpenError> {
        for (number, taken) in &found.steps {
            if let Some(why) = self.refusal(*number, taken) {
                return Err(PgOpenError::Migrate(why));
            }
            if !self.steps.iter().any(|step| step.number == *number) {
                tracing::info!(
                    step = number,
                    "the database is ahead by step {number}, which only adds"
                );
            }
        }
        if let Some(why) = self.functions_refusal(found.functions.as_ref()) {
            return Err(PgOpenError::Migrate(why));
        }
        let steps: Vec<&MigrationStep> =
            self.steps.iter().filter(|step| !found.steps.contains_key(&step.number)).collect();
        let is_behind =
            found.functions.as_ref().is_none_or(|(there, _)| *there < self.functions.version);
        let functions = is_behind.then_some(&self.functions);
        let nothing = steps.is_empty() && functions.is_none();
        Ok((!nothing).then_some(Missing { steps, functions }))
    }

    /// Why this version must not work on a database to which this step was applied.
    fn refusal(&self, number: i32, taken: &RecordedStep) -> Option<String> {
        let newest = self.steps.last().map_or(0, |step| step.number);
        let name = &taken.name;
        match self.steps.iter().find(|step| step.number == number) {
            Some(step) if checksum(step.sql) == taken.checksum => None,
            Some(_) if number == 1 && name != BASELINE => Some(
                "a version from before the first release made this database, and its tables cannot be \
                 migrated; use an empty database, or delete what Hapax stored in this one with \
                 DROP SCHEMA hapax CASCADE, which leaves your own tables as they are"
                    .to_owned(),
            ),
            Some(_) => Some(format!(
                "step {number} ({name}) of this database is not the one this version knows; it was \
                 made by another build: run that build, or use an empty database"
            )),
            None if taken.survives <= newest => None,
            None => Some(format!(
                "a newer version applied migration {number} ({name}), which this version cannot work with; \
                 run the newer version"
            )),
        }
    }

    /// Why this version must not work with these functions. Functions of a newer version still
    /// serve this version, unless a step of the newer version refuses it.
    fn functions_refusal(&self, found: Option<&(i32, String)>) -> Option<String> {
        let (version, there) = found?;
        if *version != self.functions.version || *there == self.functions.checksum() {
            return None;
        }
        Some(format!(
            "the functions of this database have version {version}, as those of this build, and differ \
             from them; another build made them: run that build, or use an empty database"
        ))
    }
}

/// Runs the SQL in one message, and so in one transaction. The statement timeout is off, because a step may
/// take long.
async fn apply(client: &mut PooledClient, what: &str, sql: &str) -> Result<(), PgOpenError> {
    let sql = format!("SET LOCAL statement_timeout = 0;\n{sql}");
    let applied = client.batch(&sql).await;
    applied.map_err(|error| PgOpenError::Migrate(format!("{what}: {}", full_text(&error))))
}

async fn found(client: &mut PooledClient) -> Result<RecordedSchema, PgOpenError> {
    let there = async |client: &mut PooledClient, table: &str| {
        let rows = client
            .query("SELECT to_regclass($1) IS NOT NULL", &[&table])
            .await
            .map_err(open_error)?;
        Ok(rows.first().is_some_and(|row| row.get(0)))
    };
    if !there(client, "hapax.migration").await? {
        return Ok(RecordedSchema::default());
    }
    let rows = client
        .query("SELECT number, name, checksum, survives FROM hapax.migration", &[])
        .await
        .map_err(open_error)?;
    let read = |row: &tokio_postgres::Row| {
        (row.get(0), RecordedStep { name: row.get(1), checksum: row.get(2), survives: row.get(3) })
    };
    let steps = rows.iter().map(read).collect();
    if !there(client, "hapax.function_version").await? {
        return Ok(RecordedSchema { steps, functions: None });
    }
    let rows = client
        .query("SELECT version, checksum FROM hapax.function_version", &[])
        .await
        .map_err(open_error)?;
    Ok(RecordedSchema { steps, functions: rows.first().map(|row| (row.get(0), row.get(1))) })
}

async fn lock(client: &mut PooledClient) -> Result<(), PgOpenError> {
    let began = Instant::now();
    loop {
        let got =
            client.query("SELECT pg_try_advisory_lock($1)", &[&LOCK]).await.map_err(open_error)?;
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

pub(super) fn checksum(sql: &str) -> String {
    format!("{:?}", KeyHash::of(b"migration", [sql.as_bytes()]))
}

fn open_error(error: PgError) -> PgOpenError {
    PgOpenError::Migrate(full_text(&error))
}

/// The error is shown in full: a migration contains no secret value.
fn full_text(error: &PgError) -> String {
    match error {
        PgError::Sql(sql) => match sql.as_db_error() {
            Some(db) => format!("{} ({})", db.message(), db.code().code()),
            None => error.to_string(),
        },
        PgError::Pool(_) | PgError::Silent | PgError::Gone | PgError::Closed => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use hapax_sim::Postgres;

    use super::*;
    use crate::postgres::connect::{PoolSizes, Pools};
    use crate::postgres::server::ServerAddress;

    fn pool(url: &str) -> ClientPool {
        let target = ServerAddress::parse(url).expect("a url");
        Pools::new(&target, &target, PoolSizes::default()).expect("pools").admin
    }

    async fn one(url: &str, sql: &str) -> String {
        Postgres::execute_at(url, sql).await.remove(0).unwrap_or_default()
    }

    /// A build with functions of this version; the function `hapax.spoken` returns the version.
    fn build(version: i32) -> Schema {
        let spoken = format!(
            "CREATE OR REPLACE FUNCTION hapax.spoken() RETURNS integer LANGUAGE sql \
             SET search_path = pg_catalog, pg_temp AS $$ SELECT {version} $$;"
        );
        Schema { steps: STEPS.to_vec(), functions: FunctionSet::with(version, &spoken) }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn an_older_node_never_replaces_the_functions_of_a_newer_one() {
        // Nodes are replaced one by one, so an old node may start after a new one, repeatedly.
        let url = Postgres::shared().await.create_database("versions").await;
        let client_pool = pool(&url);
        for (starts, speaks) in [(2, 2), (1, 2), (3, 3), (2, 3), (3, 3), (1, 3)] {
            build(starts).up(&client_pool).await.expect("starts");
            assert_eq!(one(&url, "SELECT hapax.spoken()::text").await, speaks.to_string());
            let recorded = "SELECT version::text FROM hapax.function_version";
            assert_eq!(one(&url, recorded).await, speaks.to_string());
        }
        let mut client = client_pool.checkout().await.expect("lends");
        let status = build(1).status(found(&mut client).await.expect("reads"));
        let functions = status.last().expect("functions");
        assert_eq!((functions.number, functions.applied), (3, true), "{functions:?}");
        assert_eq!(functions.refused, None);
        // The functions are also kept if the old node read the version before the newer node
        // replaced the functions.
        let replaced = apply(&mut client, "functions", &build(2).functions.script()).await;
        let error = replaced.expect_err("refused").to_string();
        assert!(error.contains("version 2 or a higher one"), "{error}");
        assert_eq!(one(&url, "SELECT hapax.spoken()::text").await, "3");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn functions_of_another_build_with_the_same_version_are_refused() {
        // Each of the two builds would treat the other's functions as its own.
        let url = Postgres::shared().await.create_database("same_version").await;
        let client_pool = pool(&url);
        build(1).up(&client_pool).await.expect("starts");
        let other = Schema { functions: FunctionSet::with(1, "-- other"), ..build(1) };
        let refused = other.up(&client_pool).await.expect_err("refused").to_string();
        assert!(
            refused.contains("another build") && refused.contains("empty database"),
            "{refused}"
        );
        let mut client = client_pool.checkout().await.expect("lends");
        let status = other.status(found(&mut client).await.expect("reads"));
        assert!(status.iter().any(|one| one.refused.is_some()), "{status:?}");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn replaced_functions_keep_the_rights_and_settings_that_they_had() {
        // CREATE OR REPLACE drops the settings of a function. Without these settings, functions
        // would scan tables. If rights were granted again, every role could complete jobs.
        let url = Postgres::shared().await.create_database("rights").await;
        let client_pool = pool(&url);
        build(1).up(&client_pool).await.expect("starts");
        let rights = "SELECT string_agg(p.oid::regprocedure || ' ' || coalesce(p.proacl::text, 'all') || \
                      ' ' || coalesce(p.proconfig::text, ''), E'\\n' ORDER BY p.oid::regprocedure::text) \
                      FROM pg_proc p WHERE p.pronamespace = 'hapax'::regnamespace";
        Postgres::execute_at(
            &url,
            "GRANT EXECUTE ON FUNCTION hapax.once(text, text, text) TO pg_monitor",
        )
        .await;
        Postgres::execute_at(&url, "GRANT EXECUTE ON FUNCTION hapax.spoken() TO PUBLIC").await;
        let before = one(&url, rights).await;
        assert!(before.contains("enable_seqscan=off") && !before.contains(" all "), "{before}");
        let triggers = "SELECT count(*)::text FROM pg_trigger WHERE NOT tgisinternal";
        let triggers_before = one(&url, triggers).await;
        build(2).up(&client_pool).await.expect("starts");
        assert_eq!(one(&url, rights).await, before);
        assert_eq!(one(&url, triggers).await, triggers_before);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn the_next_step_is_taken_once_and_guards_the_tables_that_it_adds() {
        // A database with rows is opened by the next version, twice, then by the version before,
        // which survives the step.
        let url = Postgres::shared().await.create_database("next_step").await;
        let client_pool = pool(&url);
        let [baseline] = STEPS else { panic!("there is a second step: test that one") };
        let next = |sql| MigrationStep { number: 2, name: "next", sql, survives: 1 };
        let with = |step| Schema { steps: vec![baseline.clone(), step], ..build(2) };
        build(1).up(&client_pool).await.expect("as it was");
        Postgres::execute_at(&url, "INSERT INTO hapax.pair VALUES ('default', 'shop')").await;
        let failing = with(next("DROP TABLE hapax.pair; SELECT 1 / 0;"));
        failing.up(&client_pool).await.expect_err("fails");
        assert_eq!(one(&url, "SELECT source FROM hapax.pair").await, "shop");
        assert_eq!(one(&url, "SELECT hapax.spoken()::text").await, "1", "in order");
        let next = with(next(
            "CREATE TABLE hapax.added (n integer);
             ALTER TABLE hapax.pair ADD COLUMN seen integer NOT NULL DEFAULT 0;
             UPDATE hapax.pair SET seen = seen + 1;",
        ));
        for _ in 0..2 {
            next.up(&client_pool).await.expect("goes forward");
            assert_eq!(one(&url, "SELECT source || seen FROM hapax.pair").await, "shop1");
        }
        let guarded = "SELECT count(*)::text FROM pg_trigger WHERE tgname = 'refuse_handler' \
                       AND tgrelid = 'hapax.added'::regclass";
        assert_eq!(one(&url, guarded).await, "1", "a handler may write to it");
        build(1).up(&client_pool).await.expect("survives it");
        assert_eq!(one(&url, "SELECT hapax.spoken()::text").await, "2");
    }
}
