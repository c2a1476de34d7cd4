//! Reads the effects of an endpoint from a command, a URL or a query. [`super::judge`] checks them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use bytes::Bytes;
use hapax_store::PgStore;
use http_body_util::{BodyExt as _, Full, Limited};
use rusqlite::types::ValueRef;
use rusqlite::{Connection, OpenFlags};
use serde_json::Value;
use tokio::io::AsyncReadExt as _;
use tokio::time::Instant;

use super::super::output::{self, Failure};
use super::super::sender;
use super::Flags;
use crate::config::ServiceUrl;

/// The timeout of one reading.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// The largest reading: a million effects with long ids.
const READ_BYTES_MAX: usize = 64 << 20;

/// The interval between two readings.
const READ_INTERVAL: Duration = Duration::from_millis(100);

/// Effects are settled when nothing changed for this long.
const SETTLED_AFTER: Duration = Duration::from_secs(1);

/// Where effects are read.
pub(super) enum Probe {
    Command(String),
    Url(http::Uri),
    Sqlite { path: PathBuf, sql: String },
    Postgres { url: ServiceUrl, sql: String },
}

/// The effects that a probe read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum EffectCounts {
    /// The number of effects.
    Count(u64),
    /// The number of effects of each event.
    Each(BTreeMap<String, u64>),
}

impl EffectCounts {
    pub(super) fn total(&self) -> u64 {
        match self {
            Self::Count(count) => *count,
            Self::Each(effects) => effects.values().sum(),
        }
    }

    /// Counts the first word of each line. A single number is a count, unless it is one of the `ids`.
    fn of_lines<'a>(lines: impl Iterator<Item = &'a str>, ids: &BTreeSet<&str>) -> Self {
        let mut effects = BTreeMap::new();
        for line in lines {
            if let Some(id) = line.split_whitespace().next() {
                *effects.entry(id.to_owned()).or_default() += 1;
            }
        }
        let alone = match effects.iter().next() {
            Some((only, 1)) if effects.len() == 1 && !ids.contains(only.as_str()) => {
                only.parse().ok()
            }
            Some(_) | None => None,
        };
        alone.map_or(Self::Each(effects), Self::Count)
    }

    /// Counts the ids of an array, or the `event_id` of the objects in it.
    fn of_json(json: &Value) -> Option<Self> {
        let id = |item: &Value| -> Option<String> {
            let id = item.get("event_id").unwrap_or(item);
            match id {
                Value::String(text) => Some(text.clone()),
                Value::Number(number) => Some(number.to_string()),
                Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => None,
            }
        };
        match json {
            Value::Array(items) => {
                let mut effects = BTreeMap::new();
                for item in items {
                    *effects.entry(id(item)?).or_default() += 1;
                }
                Some(Self::Each(effects))
            }
            Value::Null
            | Value::Bool(_)
            | Value::Number(_)
            | Value::String(_)
            | Value::Object(_) => None,
        }
    }
}

impl Probe {
    /// The probe of the flags, if any; clap allows at most one.
    pub(super) fn new(flags: &Flags) -> Result<Option<Self>, Failure> {
        if let Some(command) = &flags.effects_cmd {
            return Ok(Some(Self::Command(command.clone())));
        }
        if let Some(url) = &flags.effects_url {
            return Ok(Some(Self::Url(sender::target("--effects-url", url)?)));
        }
        let (Some(sql), Some(database)) = (&flags.effects_sql, &flags.effects_db) else {
            return Ok(None);
        };
        let sql = sql.clone();
        if let Some(path) = database.strip_prefix("sqlite:") {
            let path = path.strip_prefix("//").unwrap_or(path).into();
            return Ok(Some(Self::Sqlite { path, sql }));
        }
        let url = ServiceUrl::postgres(database).map_err(|invalid| {
            Failure::usage(
                format!("--effects-db {}", invalid.problem),
                "write sqlite:PATH or postgres://USER:PASSWORD@HOST:5432/DATABASE",
            )
        })?;
        Ok(Some(Self::Postgres { url, sql }))
    }

    /// Reads the effects once. `ids` are the ids of the events of the storm.
    pub(super) async fn read(&self, ids: &BTreeSet<&str>) -> Result<EffectCounts, Failure> {
        let reading = async {
            match self {
                Self::Command(command) => run(command).await.map(|text| lines(&text, ids)),
                Self::Url(url) => get(url).await.and_then(|text| parse_url_body(&text, ids)),
                Self::Sqlite { path, sql } => sqlite(path, sql)
                    .map(|rows| EffectCounts::of_lines(rows.iter().map(String::as_str), ids))
                    .map_err(|error| error.to_string()),
                Self::Postgres { url, sql } => PgStore::first_column(url.expose(), sql)
                    .await
                    .map(|rows| {
                        EffectCounts::of_lines(rows.iter().flatten().map(String::as_str), ids)
                    })
                    .map_err(|error| error.to_string()),
            }
        };
        let read = match tokio::time::timeout(READ_TIMEOUT, reading).await {
            Ok(read) => read,
            Err(_) => Err(format!("no result within {} s", READ_TIMEOUT.as_secs())),
        };
        read.map_err(|why| {
            Failure::unreachable(format!("cannot read effects: {}", output::shown(&why)))
        })
    }

    /// Reads until nothing changes and nothing is missing any more, or until `settle` has passed.
    pub(super) async fn settled(
        &self,
        ids: &BTreeSet<&str>,
        settle: Duration,
        is_missing: impl Fn(&EffectCounts) -> bool,
    ) -> Result<EffectCounts, Failure> {
        let deadline = Instant::now() + settle;
        let mut last = self.read(ids).await?;
        let mut since = Instant::now();
        loop {
            let steady = since.elapsed() >= SETTLED_AFTER && !is_missing(&last);
            if steady || Instant::now() >= deadline {
                return Ok(last);
            }
            tokio::time::sleep(READ_INTERVAL).await;
            let now = self.read(ids).await?;
            if now != last {
                last = now;
                since = Instant::now();
            }
        }
    }
}

fn lines(text: &str, ids: &BTreeSet<&str>) -> EffectCounts {
    EffectCounts::of_lines(text.lines(), ids)
}

/// Parses JSON or plain lines; a number is the same in both.
fn parse_url_body(text: &str, ids: &BTreeSet<&str>) -> Result<EffectCounts, String> {
    match serde_json::from_str::<Value>(text) {
        Err(_) | Ok(Value::Number(_)) => Ok(lines(text, ids)),
        Ok(json) => EffectCounts::of_json(&json).ok_or_else(|| {
            "the URL returns neither a number nor an array of ids or of objects with event_id"
                .into()
        }),
    }
}

async fn run(command: &str) -> Result<String, String> {
    let mut child = tokio::process::Command::new("sh")
        .args(["-c", command])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| format!("sh: {error}"))?;
    let mut output = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        let most = READ_BYTES_MAX as u64 + 1;
        stdout.take(most).read_to_end(&mut output).await.map_err(|error| error.to_string())?;
    }
    if output.len() > READ_BYTES_MAX {
        return Err(format!("the command printed more than {} MiB", READ_BYTES_MAX >> 20));
    }
    let status = child.wait().await.map_err(|error| error.to_string())?;
    if !status.success() {
        return Err(format!("the command ended with {status}"));
    }
    Ok(String::from_utf8_lossy(&output).into_owned())
}

async fn get(url: &http::Uri) -> Result<String, String> {
    let mut request = http::Request::new(Full::new(Bytes::new()));
    *request.uri_mut() = url.clone();
    let response = sender::client().request(request).await;
    let (parts, body) = response.map_err(|error| sender::chain(&error))?.into_parts();
    if !parts.status.is_success() {
        return Err(format!("the URL answered {}", parts.status.as_u16()));
    }
    let body = Limited::new(body, READ_BYTES_MAX).collect().await;
    let body = body.map_err(|error| error.to_string())?.to_bytes();
    Ok(String::from_utf8_lossy(&body).into_owned())
}

/// The first column of each row as text. The file is opened read-only.
fn sqlite(path: &std::path::Path, sql: &str) -> rusqlite::Result<Vec<String>> {
    let database = Connection::open_with_flags(
        path,
        OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX,
    )?;
    database.busy_timeout(READ_TIMEOUT)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    fn each(effects: &[(&str, u64)]) -> EffectCounts {
        EffectCounts::Each(effects.iter().map(|(id, count)| ((*id).to_owned(), *count)).collect())
    }

    #[test]
    fn a_number_alone_is_a_count_and_everything_else_is_a_list() {
        // Ids of some senders are numbers, and a ledger may hold just one.
        let ids = BTreeSet::from(["77"]);
        let read = |text: &str| lines(text, &ids);
        assert_eq!(read("12\n"), EffectCounts::Count(12));
        assert_eq!(read("77\n"), each(&[("77", 1)]));
        assert_eq!(read("12\n12\n"), each(&[("12", 2)]));
        assert_eq!(read("a 5\nb\n\na 9\n"), each(&[("a", 2), ("b", 1)]));
        assert_eq!(read("\n"), each(&[]));
    }

    #[test]
    fn json_is_a_number_or_a_list_of_ids_or_of_objects_that_name_one() {
        let read = |text: &str| parse_url_body(text, &BTreeSet::new()).ok();
        assert_eq!(read("3"), Some(EffectCounts::Count(3)));
        assert_eq!(read("evt_1 50\nevt_2 50"), Some(each(&[("evt_1", 1), ("evt_2", 1)])));
        assert_eq!(read(r#"["a","b","a",7]"#), Some(each(&[("a", 2), ("b", 1), ("7", 1)])));
        assert_eq!(read(r#"[{"event_id":"a","fee":1}]"#), Some(each(&[("a", 1)])));
        assert_eq!(read(r#"[{"id":"a"}]"#), None);
        assert_eq!(read(r#"{"error":"no such page"}"#), None);
    }
}
