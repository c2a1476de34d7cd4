//! `hapax doctor`: checks everything that a server needs. The command changes nothing, except that a probe
//! file is written to the data directory and removed. With a shared PostgreSQL the command checks that
//! database and Redis.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use hapax_core::Timestamp;
use hapax_core::limits::LANE_COUNT_MAX;
use hapax_core::vault::{KeyId, VaultKey};
use hapax_store::{
    HandlerRoleReport, PgOpenError, PgReport, PgStore, RedisReport, SealedOwner, SealedValue,
    SqliteStore,
};
use http::{Method, StatusCode};
use rusqlite::{Connection, OpenFlags};
use serde::Serialize;

use super::admin_client::{self, AdminOptions, Server};
use super::events::read;
use super::output::{self, CommandFailure, Exit};
use crate::api::{Lane, List};
use crate::config::{
    self, Config, Flags, OutboundSettings, ServiceUrl, VaultFileState, VaultKeySource,
    VaultSettings,
};
use crate::format;
use crate::statements::{Statements, Unprepared};

/// Below this much free disk doctor warns: an hour of events may fill it.
const DISK_BYTES_WARN: u64 = 1 << 30;

/// Below this much free disk doctor fails: the database's log may not fit.
const DISK_BYTES_FAIL: u64 = 64 << 20;

/// From this difference on doctor warns: synchronized clocks differ by less.
const CLOCK_WARN: Duration = Duration::from_secs(5);

/// From this difference on doctor fails. If the clocks differ by more than the tolerance of a source (5 minutes by
/// default), its events count as late or as signed in the future.
const CLOCK_FAIL: Duration = Duration::from_secs(60);

/// How long a proxy on the way to endpoints may take to accept a connection.
const PROXY_TIMEOUT: Duration = Duration::from_secs(5);

/// Older versions can lose committed writes.
const SQLITE_MIN: i32 = 3_051_003;

/// `hapax doctor`.
#[derive(Debug, clap::Args)]
pub(super) struct Doctor {
    #[command(flatten)]
    flags: Flags,
    #[command(flatten)]
    access: AdminOptions,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

/// The result of one check.
#[derive(Debug, Serialize)]
struct CheckResult {
    check: &'static str,
    level: Level,
    note: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Level {
    Ok,
    Warn,
    Fail,
}

#[derive(Debug, Default)]
struct Findings(Vec<CheckResult>);

impl Findings {
    fn add(&mut self, check: &'static str, level: Level, note: impl Into<String>) {
        self.0.push(CheckResult { check, level, note: note.into() });
    }
}

impl Doctor {
    pub(super) fn run(self) -> Result<Exit, CommandFailure> {
        let mut found = Findings::default();
        let config = self.config(&mut found);
        let statements = config.as_ref().map(Statements::of);
        let keeps_token = config.as_ref().is_some_and(|config| config.keeps_own_token());
        if let Some(config) = &config {
            vault(&config.vault, &mut found);
            sealed_values(config, &mut found)?;
            outbound(&config.settings.outbound, &mut found)?;
        }
        let settings = config.map(|config| config.settings);
        match settings.as_ref().map(|set| (&set.database_url, &set.data_dir)) {
            Some((Some(url), directory)) => {
                if keeps_token {
                    data_dir(directory, &mut found);
                }
                let looked = admin_client::run(async { Ok(PgStore::report(url.expose()).await) })?;
                shared_database(url, looked, &mut found);
                let handlers = settings.as_ref().and_then(|set| set.handlers_database_url.as_ref());
                if let Some(handlers) = handlers {
                    let (ours, theirs) = (url.expose(), handlers.expose());
                    let looked = admin_client::run(async {
                        Ok(PgStore::report_handler_role(ours, theirs).await)
                    })?;
                    handlers_role(handlers, looked, &mut found);
                }
            }
            Some((None, directory)) => {
                data_dir(directory, &mut found);
                database(&directory.join("hapax.db"), &mut found);
                sqlite_version(&mut found);
            }
            None => sqlite_version(&mut found),
        }
        if let Some(statements) = statements {
            let checked = admin_client::run(async { Ok(statements.unprepared().await) })?;
            handlers(checked, &mut found);
        }
        if let Some(url) = settings.as_ref().and_then(|set| set.redis_url.as_ref()) {
            let looked = admin_client::run(async { Ok(RedisReport::probe(url.expose()).await) })?;
            redis(url, looked, &mut found);
        }
        match self.access.open(&self.flags) {
            Ok(server) => {
                let named = self.access.admin.is_some();
                admin_client::run(async {
                    check_server(&server, named, &mut found).await;
                    Ok(())
                })?;
            }
            Err(failure) if self.access.admin.is_some() => return Err(failure),
            // A config that cannot be read is reported above.
            Err(failure) if settings.is_some() => {
                found.add("server", Level::Warn, failure.message());
            }
            Err(_) => {}
        }
        self.print(&found)
    }

    fn print(&self, found: &Findings) -> Result<Exit, CommandFailure> {
        for finding in &found.0 {
            if self.json {
                output::json(finding)?;
                continue;
            }
            let level = match finding.level {
                Level::Ok => "\u{1b}[32mok\u{1b}[0m  ",
                Level::Warn => "\u{1b}[33mwarn\u{1b}[0m",
                Level::Fail => "\u{1b}[1;31mfail\u{1b}[0m",
            };
            let note = output::shown(&finding.note);
            output::data(&format!("{level}  {:<9} {note}", finding.check))?;
        }
        let failed = found.0.iter().any(|finding| finding.level == Level::Fail);
        Ok(if failed { Exit::Negative } else { Exit::Done })
    }

    /// Reads the config as `serve` does, but creates no files.
    fn config(&self, found: &mut Findings) -> Option<Config> {
        let config = match config::load_read_only(&self.flags) {
            Ok(config) => config,
            Err(errors) => {
                for line in errors.lines() {
                    found.add("config", Level::Fail, line.replace("\n  hint:", "; hint:"));
                }
                return None;
            }
        };
        match &config.file {
            Some(file) => {
                let sources = format::count(config.sources.len() as u64, "source");
                let note = format!("{}: {sources}", file.display());
                found.add("config", Level::Ok, note);
            }
            None => {
                found.add(
                    "config",
                    Level::Warn,
                    "there is no hapax.toml in this directory: `hapax serve` would run in dev mode",
                );
            }
        }
        for warning in &config.warnings {
            let is_about_vault = warning == config::NO_VAULT_KEY;
            found.add(if is_about_vault { "vault" } else { "config" }, Level::Warn, warning);
        }
        Some(config)
    }
}

fn data_dir(directory: &Path, found: &mut Findings) {
    let shown = directory.display();
    if !directory.exists() {
        match could_be_made(directory) {
            Ok(()) => {
                let note = format!("{shown} does not exist yet: the first start creates it");
                found.add("data dir", Level::Warn, note);
            }
            Err(error) => {
                let note = format!("{shown} does not exist and cannot be created: {error}");
                found.add("data dir", Level::Fail, note);
            }
        }
        return;
    }
    match written_at(directory) {
        Ok(written_at) => {
            found.add("data dir", Level::Ok, format!("{shown} is writable"));
            let ours = SystemTime::now();
            let apart = ours.duration_since(written_at).unwrap_or_else(|early| early.duration());
            clock("the clock of the file system", apart, found);
        }
        Err(error) => {
            found.add("data dir", Level::Fail, format!("{shown} is not writable: {error}"));
        }
    }
    match rustix::fs::statvfs(directory) {
        Ok(disk) => {
            let free = disk.f_bavail.saturating_mul(disk.f_frsize);
            let level = match free {
                0..DISK_BYTES_FAIL => Level::Fail,
                DISK_BYTES_FAIL..DISK_BYTES_WARN => Level::Warn,
                _ => Level::Ok,
            };
            found.add("disk", level, format!("{} MiB free", free >> 20));
        }
        Err(error) => found.add("disk", Level::Warn, format!("the free space is unknown: {error}")),
    }
}

/// Whether the directory can be created: writes a probe to its nearest existing ancestor.
fn could_be_made(directory: &Path) -> std::io::Result<()> {
    let nearest = directory.ancestors().skip(1).find(|above| {
        above.as_os_str().is_empty() || above.try_exists().is_ok_and(|exists| exists)
    });
    let nearest = nearest.filter(|above| !above.as_os_str().is_empty());
    written_at(nearest.unwrap_or(Path::new("."))).map(drop)
}

/// Writes a probe file and returns its modification time: the clock of the file system.
fn written_at(directory: &Path) -> std::io::Result<SystemTime> {
    let probe = directory.join(format!(".hapax-doctor-{}", std::process::id()));
    let written = std::fs::write(&probe, b"a probe of hapax doctor, safe to delete\n")
        .and_then(|()| std::fs::metadata(&probe)?.modified());
    let removed = std::fs::remove_file(&probe);
    written.and_then(|written| removed.map(|()| written))
}

fn clock(whose: &str, apart: Duration, found: &mut Findings) {
    let level = match apart {
        apart if apart >= CLOCK_FAIL => Level::Fail,
        apart if apart >= CLOCK_WARN => Level::Warn,
        _ => Level::Ok,
    };
    let note = match level {
        Level::Ok => format!("agrees with {whose}"),
        Level::Warn | Level::Fail => {
            format!("differs from {whose} by {} s: synchronize the clocks", apart.as_secs())
        }
    };
    found.add("clock", level, note);
}

/// Opens the file read-only, without taking the lock of a running server.
fn database(path: &Path, found: &mut Findings) {
    let shown = path.display();
    if !path.exists() {
        found.add(
            "database",
            Level::Warn,
            format!("{shown} does not exist yet: the first start creates it"),
        );
        return;
    }
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let looked = Connection::open_with_flags(path, flags).and_then(|file| {
        file.busy_timeout(Duration::from_secs(5))?;
        let number = |sql: &str| file.query_row(sql, [], |row| row.get::<_, i64>(0));
        let tables = number(
            "SELECT count(*) FROM sqlite_schema WHERE type = 'table' AND name GLOB 'hapax_*'",
        )?;
        let page_bytes = number("PRAGMA page_size")?;
        let all = number("PRAGMA page_count")? * page_bytes;
        Ok((tables, all, number("PRAGMA freelist_count")? * page_bytes))
    });
    match looked {
        Ok((0, ..)) => {
            found.add(
                "database",
                Level::Warn,
                format!("{shown} has no hapax tables yet: the first start creates them"),
            );
        }
        // SQLite reuses free pages before the file grows.
        Ok((_, all, free)) => {
            let mebibytes = |bytes: i64| bytes as f64 / f64::from(1 << 20);
            let note = format!(
                "{shown} opens: {:.1} MiB; {:.1} MiB of it are free for new events",
                mebibytes(all),
                mebibytes(free)
            );
            found.add("database", Level::Ok, note);
        }
        Err(error) => found.add("database", Level::Fail, format!("{shown}: {error}")),
    }
}

/// Checks the shared PostgreSQL.
fn shared_database(url: &ServiceUrl, looked: Result<PgReport, PgOpenError>, found: &mut Findings) {
    let sight = match looked {
        Ok(sight) => sight,
        Err(error) => {
            found.add("database", Level::Fail, format!("{url}: {error}"));
            return;
        }
    };
    let PgReport { version, is_standby, clock_apart, unfit, steps } = sight;
    match unfit {
        None => found.add("database", Level::Ok, format!("{url} opens: PostgreSQL {version}")),
        Some(error) => {
            found.add("database", Level::Fail, format!("{url}: PostgreSQL {version}: {error}"));
        }
    }
    match is_standby {
        false => found.add("recovery", Level::Ok, "the database is a primary"),
        true => {
            found.add("recovery", Level::Fail, "the database is a standby, which accepts no writes")
        }
    }
    clock("the clock of the database", clock_apart, found);
    let missing = steps.iter().filter(|step| !step.applied).count();
    let refused = steps.iter().find_map(|step| step.refused.as_deref());
    match (refused, missing) {
        (Some(why), _) => found.add("schema", Level::Fail, why),
        (None, 0) => found.add("schema", Level::Ok, format!("all {} migrations are applied", steps.len())),
        (None, _) => found.add(
            "schema",
            Level::Warn,
            format!(
                "{missing} of {} migrations are missing: the next start applies them, or `hapax migrate up`",
                steps.len()
            ),
        ),
    }
}

/// Checks the keys of the vault. The check reads the key file and never changes it.
fn vault(vault: &VaultSettings, found: &mut Findings) {
    let old = match vault.old.len() {
        0 => String::new(),
        count => format!("; {}", format::count(count as u64, "old key")),
    };
    let file = match &vault.key {
        VaultKeySource::Configured(key) => {
            let note = format!("the key {} is configured{old}", key.id());
            return found.add("vault", Level::Ok, note);
        }
        VaultKeySource::File(file) => file,
        // The config check warns about this case.
        VaultKeySource::Missing => return,
    };
    let shown = file.path().display();
    match file.state() {
        VaultFileState::Absent => {
            let note = format!("{shown} does not exist yet: a start creates the key{old}");
            found.add("vault", Level::Ok, note);
        }
        VaultFileState::Key { key, readable_by_others: false } => {
            let note = format!("{shown} holds the key {}{old}; keep a copy of it", key.id());
            found.add("vault", Level::Ok, note);
        }
        VaultFileState::Key { readable_by_others: true, .. } => {
            let note = format!("other users can read {shown}: run `chmod 600 {shown}`");
            found.add("vault", Level::Warn, note);
        }
        VaultFileState::Unusable(why) => {
            let note = format!("{shown}: {why}; restore the file from a backup");
            found.add("vault", Level::Fail, note);
        }
    }
}

/// Reports which keys of the vault the stored values need: values without a key, and old keys that nothing
/// needs any longer.
fn sealed_values(config: &Config, found: &mut Findings) -> Result<(), CommandFailure> {
    let values = match &config.settings.database_url {
        Some(url) => {
            let looked = async { Ok(PgStore::sealed_values(url.expose()).await) };
            admin_client::run(looked)?.map_err(|error| error.to_string())
        }
        None => {
            SqliteStore::sealed_values(&config.settings.data_dir).map_err(|error| error.to_string())
        }
    };
    // A database that cannot be read is reported by its own check.
    let Ok(values) = values else { return Ok(()) };
    let known = config.vault.known_keys();
    let mut needed: BTreeMap<KeyId, BTreeSet<&SealedOwner>> = BTreeMap::new();
    for SealedValue { owner, key } in &values {
        match key {
            Ok(key) => {
                needed.entry(*key).or_default().insert(owner);
            }
            Err(error) => found.add("vault", Level::Fail, format!("{owner}: {error}")),
        }
    }
    for (key, owners) in needed.iter().filter(|(key, _)| !known.contains(key)) {
        let note = format!(
            "no configured key is {key}, which {} need: {}; add it to `old` in [vault]",
            format::count(owners.len() as u64, "owner"),
            some_of(owners),
        );
        found.add("vault", Level::Fail, note);
    }
    for key in config.vault.old.iter().map(VaultKey::id) {
        match needed.get(&key) {
            None => {
                let note = format!(
                    "nothing is sealed with the old key {key}: it can be removed from `old`"
                );
                found.add("vault", Level::Ok, note);
            }
            Some(owners) => {
                let note = format!(
                    "the old key {key} is still needed by {}: {}; a server with this config seals them again",
                    format::count(owners.len() as u64, "owner"),
                    some_of(owners),
                );
                found.add("vault", Level::Warn, note);
            }
        }
    }
    Ok(())
}

/// The first few owners of sealed values.
fn some_of(owners: &BTreeSet<&SealedOwner>) -> String {
    const SHOWN: usize = 5;
    let mut text: Vec<String> = owners.iter().take(SHOWN).map(ToString::to_string).collect();
    if owners.len() > SHOWN {
        text.push(format!("and {} more", owners.len() - SHOWN));
    }
    text.join(", ")
}

/// Reports the addresses that endpoints may have, and whether the proxy accepts connections.
fn outbound(outbound: &OutboundSettings, found: &mut Findings) -> Result<(), CommandFailure> {
    let list = |items: Vec<String>| items.join(", ");
    let ports = outbound.ports.iter().map(u16::to_string).collect();
    let mut note = format!("endpoints may have public addresses with port {}", list(ports));
    if outbound.ports.is_empty() {
        note = "endpoints may not have public addresses".to_owned();
    }
    if !outbound.allow.is_empty() {
        let nets = outbound.allow.iter().map(ToString::to_string).collect();
        note.push_str(&format!("; also any address in {}", list(nets)));
    }
    let in_flight = (outbound.max_in_flight, outbound.max_in_flight_bytes >> 20);
    note.push_str(&format!("; at most {} deliveries and {} MiB at once", in_flight.0, in_flight.1));
    found.add("outbound", Level::Ok, note);
    let Some(proxy) = &outbound.proxy else { return Ok(()) };
    let connect = tokio::net::TcpStream::connect(proxy.authority().to_owned());
    let connected =
        admin_client::run(async { Ok(tokio::time::timeout(PROXY_TIMEOUT, connect).await) })?;
    match connected {
        Ok(Ok(_)) => {
            found.add("outbound", Level::Ok, format!("the proxy {proxy} accepts connections"));
        }
        Ok(Err(error)) => {
            let note = format!("the proxy {proxy} cannot be reached: {error}");
            found.add("outbound", Level::Fail, note);
        }
        Err(_) => {
            let note = format!(
                "the proxy {proxy} did not accept a connection within {} s",
                PROXY_TIMEOUT.as_secs()
            );
            found.add("outbound", Level::Fail, note);
        }
    }
    Ok(())
}

/// Whether the database can prepare the statements of SQL handlers.
fn handlers(checked: Result<Vec<Unprepared>, String>, found: &mut Findings) {
    match checked {
        Ok(unprepared) if unprepared.is_empty() => {
            found.add(
                "handlers",
                Level::Ok,
                "the database can prepare the statements of all SQL handlers",
            );
        }
        Ok(unprepared) => {
            for one in unprepared {
                found.add("handlers", Level::Fail, one.to_string());
            }
        }
        Err(error) => {
            let note = format!("the statements of SQL handlers were not checked: {error}");
            found.add("handlers", Level::Warn, note);
        }
    }
}

/// Checks the database role of handlers.
fn handlers_role(
    url: &ServiceUrl,
    looked: Result<HandlerRoleReport, PgOpenError>,
    found: &mut Findings,
) {
    match looked {
        Err(error) => found.add("handlers", Level::Fail, format!("{url}: {error}")),
        Ok(HandlerRoleReport { role, owns_ours: true }) => {
            let note = format!(
                "{url}: the role {role} can write to the tables of Hapax; use a role that can only call \
                 the functions of Hapax"
            );
            found.add("handlers", Level::Warn, note);
        }
        Ok(HandlerRoleReport { role, owns_ours: false }) => {
            found.add(
                "handlers",
                Level::Ok,
                format!("{url} opens: handlers run as the role {role}"),
            );
        }
    }
}

/// Checks Redis. No result is a failure: without Redis the database answers.
fn redis(url: &ServiceUrl, looked: Result<RedisReport, String>, found: &mut Findings) {
    let sight = match looked {
        Ok(sight) => sight,
        Err(error) => {
            let note = format!(
                "{url}: {error}; Redis is optional: without it the database answers duplicates"
            );
            found.add("redis", Level::Warn, note);
            return;
        }
    };
    let version = sight.version.as_deref().unwrap_or("(unknown version)");
    let ms = sight.latency.as_secs_f64() * 1_000.0;
    let answers = format!("{url} answers in {ms:.1} ms: Redis {version}");
    match sight.is_slow() {
        false => found.add("redis", Level::Ok, format!("{answers}; Redis is optional")),
        true => found.add(
            "redis",
            Level::Warn,
            format!("{answers}; that is too slow, so the database answers duplicates as well"),
        ),
    }
}

fn sqlite_version(found: &mut Findings) {
    let version = rusqlite::version();
    match rusqlite::version_number() >= SQLITE_MIN {
        true => found.add("sqlite", Level::Ok, version),
        false => found.add("sqlite", Level::Fail, format!("{version} is older than 3.51.3")),
    }
}

/// Checks the running server. If none runs, that is a warning, and a failure only with --admin.
async fn check_server(server: &Server, named: bool, found: &mut Findings) {
    let url = server.url().to_owned();
    let reply = match server.request(Method::GET, "/readyz", Bytes::new()).await {
        Ok(reply) => reply,
        Err(_) => {
            let level = if named { Level::Fail } else { Level::Warn };
            found.add("server", level, format!("no server answers at {url}"));
            return;
        }
    };
    let date = reply.date.as_deref().and_then(|date| jiff::fmt::rfc2822::parse(date).ok());
    let status = reply.status;
    match reply.status {
        StatusCode::OK => found.add("server", Level::Ok, format!("{url} is ready")),
        _ => {
            let why = match reply.into_json() {
                Ok(_) => status.to_string(),
                Err(failure) => failure.message().to_owned(),
            };
            found.add("server", Level::Fail, format!("{url} is not ready: {why}"));
        }
    }
    if let Some(date) = date {
        let apart = Timestamp::now().duration_since(date.timestamp()).unsigned_abs();
        clock("the clock of the server", apart, found);
    }
    if let Err(failure) = jobs(server, found).await {
        found.add(
            "jobs",
            Level::Warn,
            format!("cannot read the state of the jobs: {}", failure.message()),
        );
    }
}

/// Reports jobs without a configured handler, and dead letters.
async fn jobs(server: &Server, found: &mut Findings) -> Result<(), CommandFailure> {
    let lanes: List<Lane> = read(server.get("/api/v1/lanes").await?)?;
    let mut is_well = true;
    for lane in &lanes.items {
        let Lane { source, handler, .. } = lane;
        let open = lane.ready + lane.leased + lane.held + lane.parked + lane.review;
        if !lane.configured && open > 0 {
            let note = format!(
                "waiting jobs of {source}/{handler}, which is not configured: {}",
                at_least(open)
            );
            found.add("jobs", Level::Warn, note);
            is_well = false;
        }
        if lane.dead > 0 {
            let dead = at_least(lane.dead);
            let note = format!("dead letters of {source}/{handler}: {dead}; see `hapax dead list`");
            found.add("jobs", Level::Warn, note);
            is_well = false;
        }
    }
    if is_well {
        found.add(
            "jobs",
            Level::Ok,
            "every waiting job has a handler, and there are no dead letters",
        );
    }
    Ok(())
}

fn at_least(count: u64) -> String {
    if count >= LANE_COUNT_MAX { format!("at least {count}") } else { count.to_string() }
}
