//! `hapax verify`: verifies one captured request as the server would, and explains a rejection.

use std::path::PathBuf;

use bytes::Bytes;
use hapax_core::{Arrival, Receipt, Refusal, Source, Timeliness, Timestamp, Verified};
use hapax_engine::is_encoded;
use serde::Serialize;

use super::batch;
use super::captured::{self, SenderSecrets};
use super::output::{self, CommandFailure, Exit};
use crate::config::units;

/// `hapax verify`.
#[derive(Debug, clap::Args)]
pub(super) struct Verify {
    /// The sender of the request; `hapax providers` lists them
    #[arg(long, value_name = "NAME", required_unless_present = "batch")]
    provider: Option<String>,
    #[command(flatten)]
    identity: SenderSecrets,
    /// The time to verify at, in seconds since 1970 [default: now]
    #[arg(long, value_name = "UNIX", allow_negative_numbers = true)]
    now: Option<i64>,
    /// How far a signed timestamp may be from now, before or after [default: 5m, or the sender's own
    /// window if that is wider]
    #[arg(long, value_name = "SPAN")]
    tolerance: Option<String>,
    /// The request's method
    #[arg(long, value_name = "METHOD", default_value = "POST")]
    method: String,
    /// The full public URL, for senders that sign the URL
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// A header of the request, 'Name: value'; repeat it for each
    #[arg(long = "header", value_name = "LINE")]
    headers: Vec<String>,
    /// The file with the exact body; - is standard input
    #[arg(long, value_name = "FILE", required_unless_present = "batch")]
    body: Option<PathBuf>,
    /// Verify a file with a JSON array of captured requests; - is standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = [
        "provider", "secrets", "secret_file", "params", "now", "method", "url", "headers", "body",
    ])]
    batch: Option<PathBuf>,
}

impl Verify {
    pub(super) fn run(self) -> Result<Exit, CommandFailure> {
        let tolerance = match &self.tolerance {
            Some(text) => Some(units::span(text).map_err(|invalid| {
                CommandFailure::usage(format!("--tolerance: {}", invalid.problem), invalid.hint)
            })?),
            None => None,
        };
        match (&self.batch, &self.provider, &self.body) {
            (Some(file), _, _) => batch::run(file, tolerance),
            (None, Some(provider), Some(body)) => {
                let mut spec = self.identity.spec(provider, self.url.is_some())?;
                spec.tolerance = tolerance;
                let source = Source::build(spec).map_err(captured::cannot_build)?;
                let arrival = captured::arrival(
                    captured::method(&self.method)?,
                    self.url.as_deref(),
                    captured::headers(&self.headers)?,
                    captured::read(body)?,
                );
                one(&source, &arrival, captured::now(self.now)?)
            }
            (None, _, _) => Err(CommandFailure::usage(
                "there is nothing to verify",
                "see `hapax verify --help`",
            )),
        }
    }
}

fn one(source: &Source, arrival: &Arrival, now: Timestamp) -> Result<Exit, CommandFailure> {
    let judgement = Judgement::of(source, arrival, now);
    output::json(&judgement)?;
    if judgement.verdict == VerdictWord::Accept {
        return Ok(Exit::Done);
    }
    let lines = match judgement.reason {
        Some(ENCODED) => vec![
            "the body is encoded: a server answers 415 before it reads the body".to_owned(),
            "hint: turn off compression at the sender or at the proxy in front of Hapax".to_owned(),
        ],
        Some(CONTENT_TYPE) => vec![
            "the signature matches, but this sender sends bodies of another content type: a server answers 415"
                .to_owned(),
            "hint: pass the Content-Type of the request, and check that no proxy changes it".to_owned(),
        ],
        Some(_) | None => explain(source, arrival, now),
    };
    for line in lines {
        output::words(&output::shown(&line));
    }
    Ok(Exit::Negative)
}

/// The verdict as it is printed.
#[derive(Debug, Serialize)]
pub(super) struct Judgement {
    pub(super) verdict: VerdictWord,
    pub(super) reason: Option<&'static str>,
    event_id: Option<String>,
    /// The whole key, if it is more than the event id.
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    event_type: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    items: Vec<JudgedEvent>,
    /// The status of the answer, if the request is a handshake and not an event.
    #[serde(skip_serializing_if = "Option::is_none")]
    reply_status: Option<u16>,
}

/// Accept or reject.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum VerdictWord {
    Accept,
    Reject,
}

/// One of several events.
#[derive(Debug, Clone, Serialize)]
struct JudgedEvent {
    event_id: String,
    /// The whole key, if it is more than the event id.
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    event_type: Option<String>,
}

/// Reasons of refusals that do not come from [`hapax_core::verify()`], as in the metrics of the server.
const ENCODED: &str = "encoded";
const CONTENT_TYPE: &str = "content_type";

impl Judgement {
    /// The verdict of a server that has seen no event before, so that a late event is stale.
    pub(super) fn of(source: &Source, arrival: &Arrival, now: Timestamp) -> Self {
        if is_encoded(&arrival.headers) {
            return Self::reject(ENCODED);
        }
        let content_type = arrival.headers.get(http::header::CONTENT_TYPE);
        let content_type = content_type.and_then(|value| value.to_str().ok());
        match hapax_core::verify(source, arrival, now) {
            Err(refusal) => Self::reject(refusal.reason()),
            Ok(Verified::Reply(reply)) => {
                Self { reply_status: Some(reply.status), ..Self::accept(Vec::new()) }
            }
            Ok(Verified::Empty) => Self { reply_status: Some(200), ..Self::accept(Vec::new()) },
            Ok(Verified::Events { .. }) if !source.content_type_fits(content_type) => {
                Self::reject(CONTENT_TYPE)
            }
            Ok(Verified::Events { receipts, .. }) => {
                match receipts.first().map(Receipt::timeliness) {
                    Some(Timeliness::Late { .. }) => Self::reject("stale"),
                    Some(Timeliness::OnTime) | None => Self::accept(
                        receipts.iter().map(|receipt| JudgedEvent::of(source, receipt)).collect(),
                    ),
                }
            }
        }
    }

    /// A rejection for that reason.
    pub(super) fn reject(reason: &'static str) -> Self {
        Self { verdict: VerdictWord::Reject, reason: Some(reason), ..Self::accept(Vec::new()) }
    }

    fn accept(mut items: Vec<JudgedEvent>) -> Self {
        let first = items.first().cloned();
        if items.len() == 1 {
            items.clear();
        }
        Self {
            verdict: VerdictWord::Accept,
            reason: None,
            event_id: first.as_ref().map(|named| named.event_id.clone()),
            key: first.as_ref().and_then(|named| named.key.clone()),
            event_type: first.and_then(|named| named.event_type),
            items,
            reply_status: None,
        }
    }
}

impl JudgedEvent {
    fn of(source: &Source, receipt: &Receipt) -> Self {
        let key = &*receipt.key().event_id;
        // A derived key is "digest@span". Two copies share the digest.
        let key = match (receipt.if_conflict(), key.split_once('@')) {
            (Some(_), Some((digest, _span))) => digest,
            (Some(_), None) | (None, _) => key,
        };
        let event_id = source.first_part(key);
        Self {
            event_id: event_id.to_owned(),
            key: (key != event_id).then(|| key.to_owned()),
            event_type: receipt.event_type().map(str::to_owned),
        }
    }
}

/// Explains a rejection: the reason, and a small change that would make the request verify.
fn explain(source: &Source, arrival: &Arrival, now: Timestamp) -> Vec<String> {
    match hapax_core::verify(source, arrival, now) {
        Ok(Verified::Reply(_) | Verified::Empty) => Vec::new(),
        Ok(Verified::Events { receipts, signed_at, .. }) => {
            let age = receipts.first().map(Receipt::timeliness);
            match (age, signed_at) {
                (Some(Timeliness::Late { age_seconds }), Some(signed_at)) => vec![
                    format!("the signature is valid but stale: signed at {signed_at}, {age_seconds} s before {now:.0}"),
                    "hint: for a captured request, pass its time of arrival with --now; for a live one, compare the clocks".to_owned(),
                ],
                (_, _) => Vec::new(),
            }
        }
        Err(Refusal::Missing(what)) => vec![
            format!("missing: {what}"),
            "hint: pass every header of the request with --header, and check that no proxy removes headers".to_owned(),
        ],
        Err(Refusal::Signature(why)) => {
            let mut lines = vec![format!("the signature check failed: {why}")];
            lines.extend(near_misses(source, arrival, now));
            lines
        }
        Err(refusal @ (Refusal::Future { .. } | Refusal::Stale { .. })) => vec![
            refusal.to_string(),
            format!("hint: it was verified at {now:.0}; for a captured request, pass its time of arrival with --now; for a live one, compare the clocks"),
        ],
        Err(Refusal::Malformed(what)) => {
            vec![format!("the signature matches, but the body is not what this sender sends: {what}")]
        }
        Err(Refusal::NoId(what)) => {
            vec![format!("the signature matches, but there is no event id: {what}")]
        }
    }
}

/// Tries changes that commonly happen to bodies and URLs in transit, and names the one that verifies.
fn near_misses(source: &Source, arrival: &Arrival, now: Timestamp) -> Vec<String> {
    let verifies = |changed: &Arrival| source.scheme().authenticate(changed, now).is_ok();
    let body_changes = body_changes(&arrival.body)
        .into_iter()
        .map(|(how, body)| (how, Arrival { body: Bytes::from(body), ..arrival.clone() }));
    let url_changes = url_changes(&arrival.url)
        .into_iter()
        .map(|(how, url)| (how, Arrival { url, ..arrival.clone() }));
    let found = body_changes.chain(url_changes).find(|(_, changed)| verifies(changed));
    match found {
        Some((how, _)) => vec![format!("hint: it verifies {how}")],
        None => vec![
            "hint: the secret is wrong, or the body was changed after it was signed".to_owned(),
            "hint: pass the exact bytes: re-serialized JSON, another encoding or a trailing newline break a signature".to_owned(),
        ],
    }
}

fn body_changes(body: &[u8]) -> Vec<(&'static str, Vec<u8>)> {
    let mut changes = Vec::new();
    if let Some(cut) = body.strip_suffix(b"\r\n") {
        changes
            .push(("without the trailing CRLF: the body was changed after signing", cut.to_vec()));
    }
    if let Some(cut) = body.strip_suffix(b"\n") {
        changes.push((
            "without the trailing newline: an editor or echo added it (use printf, or --data-binary)",
            cut.to_vec(),
        ));
    } else {
        changes.push((
            "with a newline at the end: it was cut off after signing",
            [body, b"\n"].concat(),
        ));
    }
    changes.push(("without the whitespace around it", body.trim_ascii().to_vec()));
    changes.push(("with LF instead of CRLF line ends", replace(body, b"\r\n", b"\n")));
    let lf = replace(body, b"\r\n", b"\n");
    changes.push(("with CRLF instead of LF line ends", replace(&lf, b"\n", b"\r\n")));
    if let Some(cut) = body.strip_prefix(b"\xef\xbb\xbf") {
        changes.push(("without the byte order mark at its start", cut.to_vec()));
    }
    if let Ok(text) = std::str::from_utf8(body) {
        let latin1: Option<Vec<u8>> = text.chars().map(|c| u8::try_from(c).ok()).collect();
        changes.extend(
            latin1.map(|bytes| ("as Latin-1: it was re-encoded to UTF-8 on the way", bytes)),
        );
    }
    changes.push(("with an empty body: it is not the body that was signed", Vec::new()));
    changes.retain(|(_, changed)| changed != body);
    changes
}

fn url_changes(url: &str) -> Vec<(&'static str, String)> {
    if url.is_empty() {
        return Vec::new();
    }
    let (base, query) = match url.split_once('?') {
        Some((base, query)) => (base, format!("?{query}")),
        None => (url, String::new()),
    };
    let mut changes = Vec::new();
    if let Some(rest) = url.strip_prefix("http://") {
        changes.push(("with https:// in --url", format!("https://{rest}")));
    }
    if let Some(rest) = url.strip_prefix("https://") {
        changes.push(("with http:// in --url", format!("http://{rest}")));
    }
    match base.strip_suffix('/') {
        Some(cut) => {
            changes.push(("without the slash at the end of --url", format!("{cut}{query}")))
        }
        None => changes.push(("with a slash at the end of --url", format!("{base}/{query}"))),
    }
    if !query.is_empty() {
        changes.push(("without the query of --url", base.to_owned()));
    }
    changes
}

fn replace(body: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let mut replaced = Vec::with_capacity(body.len());
    let mut rest = body;
    while let Some(at) = rest.windows(from.len()).position(|window| window == from) {
        replaced.extend_from_slice(&rest[..at]);
        replaced.extend_from_slice(to);
        rest = &rest[at + from.len()..];
    }
    replaced.extend_from_slice(rest);
    replaced
}
