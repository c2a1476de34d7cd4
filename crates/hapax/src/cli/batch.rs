//! `hapax verify --batch`: reads a JSON array of captured requests and prints one JSON line for each, in
//! order.
//!
//! A request whose secret is empty or malformed is rejected with the reason `config`: a server would not
//! start with that secret. A request that cannot be verified at all has an `error`; the exit code is then 1.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use aws_lc_rs::digest;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use hapax_core::secret::{ActiveSecret, Secret};
use hapax_core::source::SourceSpec;
use hapax_core::{Arrival, Source, Timestamp};
use http::HeaderMap;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::captured;
use super::output::{self, CommandFailure, Exit};
use super::verify::Judgement;

/// The largest body that a `body_rule` may generate; servers accept far less.
const RULE_BYTES_MAX: usize = 64 << 20;

/// Verifies every request of the file.
pub(super) fn run(file: &Path, tolerance: Option<Duration>) -> Result<Exit, CommandFailure> {
    let bytes = captured::read(file)?;
    let vectors: Vec<&RawValue> = serde_json::from_slice(&bytes).map_err(|error| {
        CommandFailure::usage(
            format!("{} is not a JSON array: {error}", file.display()),
            "write an array of objects with provider, name, secrets, url, headers, body_base64, now_unix",
        )
    })?;
    let mut all_judged = true;
    for vector in vectors {
        let name = serde_json::from_str::<NameOnly>(vector.get()).ok().and_then(|only| only.name);
        match judge(vector.get(), tolerance) {
            Ok(judgement) => output::json(&BatchLine { name, judgement })?,
            Err(error) => {
                all_judged = false;
                output::json(&Unjudged { name, error })?;
            }
        }
    }
    Ok(if all_judged { Exit::Done } else { Exit::Negative })
}

#[derive(Serialize)]
struct BatchLine {
    name: Option<String>,
    #[serde(flatten)]
    judgement: Judgement,
}

#[derive(Serialize)]
struct Unjudged {
    name: Option<String>,
    error: String,
}

#[derive(Deserialize)]
struct NameOnly {
    name: Option<String>,
}

/// One captured request. Other fields, such as the expected verdict, are ignored.
#[derive(Deserialize)]
struct Vector {
    provider: String,
    #[serde(default)]
    secrets: Vec<String>,
    #[serde(default)]
    params: BTreeMap<String, serde_json::Value>,
    method: Option<String>,
    url: Option<String>,
    #[serde(default)]
    headers: Vec<(String, String)>,
    body_base64: Option<String>,
    body_rule: Option<BodyRule>,
    now_unix: i64,
}

/// A large body: prefix, the first `fill_len` bytes of `fill` repeated, suffix.
#[derive(Deserialize)]
struct BodyRule {
    prefix: String,
    fill: String,
    fill_len: usize,
    suffix: String,
    sha256: Option<String>,
    total_len: Option<usize>,
}

fn judge(text: &str, tolerance: Option<Duration>) -> Result<Judgement, String> {
    let vector: Vector =
        serde_json::from_str(text).map_err(|error| format!("not a captured request: {error}"))?;
    let now = Timestamp::from_second(vector.now_unix).map_err(|_| "now_unix is out of range")?;
    let body = vector.body()?;
    let method = captured::method(vector.method.as_deref().unwrap_or("POST"))
        .map_err(|_| "method is not an HTTP method")?;
    let mut headers = HeaderMap::new();
    for (name, value) in &vector.headers {
        // Values keep their whitespace: the scheme decides whether it matters.
        let Some((name, value)) = captured::header(name, value) else {
            return Ok(Judgement::reject("malformed"));
        };
        headers.append(name, value);
    }
    let secrets = vector.secrets.into_iter().map(|text| ActiveSecret::forever(Secret::new(text)));
    let mut spec = SourceSpec::new(&vector.provider, &vector.provider, secrets.collect());
    spec.tolerance = tolerance;
    spec.url_known = vector.url.as_deref().is_some_and(|url| !url.is_empty());
    spec.params = vector
        .params
        .into_iter()
        .map(|(key, value)| match value {
            serde_json::Value::String(text) => (key, text),
            other => (key, other.to_string()),
        })
        .collect();
    let source = match Source::build(spec) {
        Ok(source) => source,
        Err(error) if matches!(error.field, "provider" | "scheme") => return Err(error.problem),
        Err(_) => return Ok(Judgement::reject("config")),
    };
    let arrival = Arrival { method, url: vector.url.unwrap_or_default(), headers, body };
    Ok(Judgement::of(&source, &arrival, now))
}

impl Vector {
    fn body(&self) -> Result<Bytes, String> {
        match (&self.body_base64, &self.body_rule) {
            (Some(encoded), None) => STANDARD
                .decode(encoded)
                .map(Bytes::from)
                .map_err(|_| "body_base64 is not base64".to_owned()),
            (None, Some(rule)) => rule.body().map(Bytes::from),
            (None, None) => Ok(Bytes::new()),
            (Some(_), Some(_)) => Err("has both body_base64 and body_rule".to_owned()),
        }
    }
}

impl BodyRule {
    fn body(&self) -> Result<Vec<u8>, String> {
        if self.fill_len > RULE_BYTES_MAX {
            return Err(format!("body_rule generates more than {RULE_BYTES_MAX} bytes"));
        }
        if self.fill.is_empty() && self.fill_len > 0 {
            return Err("body_rule has an empty fill".to_owned());
        }
        let fill = self.fill.bytes().cycle().take(self.fill_len);
        let body: Vec<u8> = self.prefix.bytes().chain(fill).chain(self.suffix.bytes()).collect();
        if self.total_len.is_some_and(|expected| expected != body.len()) {
            return Err("body_rule does not generate total_len bytes".to_owned());
        }
        let sha256 = hex::encode(digest::digest(&digest::SHA256, &body));
        if self.sha256.as_ref().is_some_and(|expected| *expected != sha256) {
            return Err("body_rule generates a body with another sha256".to_owned());
        }
        Ok(body)
    }
}
