//! Reads the effects of an endpoint from a command, a URL or a database. [`crate::judge`] checks them.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::Pin;
use std::process::Stdio;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use serde_json::Value;
use tokio::io::AsyncReadExt as _;
use tokio::time::Instant;

use crate::StormError;
use crate::sender::{error_chain, http_client};

/// The timeout of one reading.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// The largest reading: a million effects with long ids.
const READ_BYTES_MAX: usize = 64 << 20;

/// The interval between two readings.
const READ_INTERVAL: Duration = Duration::from_millis(100);

/// Effects are settled when nothing changed for this long.
const SETTLED_AFTER: Duration = Duration::from_secs(1);

/// Where effects are read.
pub enum Probe {
    /// A shell command that prints them: their number, or a line per effect that starts with the event id.
    Command(String),
    /// A URL that returns them: a number, a JSON array of ids or of objects with `event_id`, or lines.
    Url(http::Uri),
    /// Rows that the caller reads: one number, or a row per effect with the event id.
    Rows(RowReader),
}

/// Reads one text per row. Called several times; the error is for people.
pub type RowReader = Box<
    dyn Fn() -> Pin<Box<dyn Future<Output = Result<Vec<String>, String>> + Send>> + Send + Sync,
>;

/// The effects that a probe read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EffectCounts {
    /// The number of effects.
    Count(u64),
    /// The number of effects of each event.
    Each(BTreeMap<String, u64>),
}

impl EffectCounts {
    /// All effects.
    pub fn total(&self) -> u64 {
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
    /// Reads the effects once. `ids` are the ids of the events of the storm.
    pub async fn read(&self, ids: &BTreeSet<&str>) -> Result<EffectCounts, StormError> {
        let reading = async {
            match self {
                Self::Command(command) => run(command).await.map(|text| lines(&text, ids)),
                Self::Url(url) => get(url).await.and_then(|text| parse_url_body(&text, ids)),
                Self::Rows(read) => read()
                    .await
                    .map(|rows| EffectCounts::of_lines(rows.iter().map(String::as_str), ids)),
            }
        };
        let read = match tokio::time::timeout(READ_TIMEOUT, reading).await {
            Ok(read) => read,
            Err(_) => Err(format!("no result within {} s", READ_TIMEOUT.as_secs())),
        };
        read.map_err(|why| StormError::unreachable(format!("cannot read effects: {why}")))
    }

    /// Reads until nothing changes and nothing is missing, or until `settle` has passed.
    pub async fn settled(
        &self,
        ids: &BTreeSet<&str>,
        settle: Duration,
        is_missing: impl Fn(&EffectCounts) -> bool,
    ) -> Result<EffectCounts, StormError> {
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
        return Err(format!("the command failed: {status}"));
    }
    Ok(String::from_utf8_lossy(&output).into_owned())
}

async fn get(url: &http::Uri) -> Result<String, String> {
    let mut request = http::Request::new(Full::new(Bytes::new()));
    *request.uri_mut() = url.clone();
    let response = http_client().request(request).await;
    let (parts, body) = response.map_err(|error| error_chain(&error))?.into_parts();
    if !parts.status.is_success() {
        return Err(format!("the URL answered {}", parts.status.as_u16()));
    }
    let body = Limited::new(body, READ_BYTES_MAX).collect().await;
    let body = body.map_err(|error| error.to_string())?.to_bytes();
    Ok(String::from_utf8_lossy(&body).into_owned())
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
