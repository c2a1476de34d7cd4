//! Captured requests, each with the verdict of the sender's own library, against [`verify`].
//!
//! Hapax agrees on every vector of the class `core`. Every other disagreement is intended and listed with its
//! reason in `deviations.txt`; the test fails if that list is not exact.

use std::collections::{BTreeMap, BTreeSet};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use hapax_core::secret::{ActiveSecret, Secret};
use hapax_core::source::{SourceSpec, TOLERANCE_DEFAULT};
use hapax_core::{
    Arrival, GuardKeep, GuardSeen, Receipt, Source, Timeliness, Timestamp, Verified, verify,
};
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use serde::Deserialize;

const VECTORS: &str = include_str!("../data/vectors.json");
const DEVIATIONS: &str = include_str!("../deviations.txt");

#[derive(Deserialize)]
struct Vector {
    provider: String,
    name: String,
    class: Class,
    secrets: Vec<String>,
    #[serde(default)]
    params: BTreeMap<String, serde_json::Value>,
    method: String,
    url: String,
    headers: Vec<(String, String)>,
    body_base64: Option<String>,
    body_rule: Option<BodyRule>,
    now_unix: i64,
    expect: Expect,
    expect_event_id: Option<String>,
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq, Debug)]
#[serde(rename_all = "lowercase")]
enum Class {
    Core,
    Policy,
    Quirk,
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq, Debug)]
#[serde(rename_all = "lowercase")]
enum Expect {
    Accept,
    Reject,
}

#[derive(Deserialize)]
struct BodyRule {
    prefix: String,
    fill: String,
    fill_len: usize,
    suffix: String,
    sha256: String,
    total_len: usize,
}

impl BodyRule {
    fn body(&self) -> Bytes {
        let fill: String = self.fill.chars().cycle().take(self.fill_len).collect();
        let body = format!("{}{fill}{}", self.prefix, self.suffix);
        let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, body.as_bytes());
        assert_eq!(body.len(), self.total_len);
        assert_eq!(hex::encode(digest), self.sha256);
        Bytes::from(body)
    }
}

/// The result of a vector. `receipts` is empty for a handshake.
enum Judged {
    Accepted { receipts: Vec<Receipt> },
    Rejected { why: String },
}

impl Judged {
    fn verdict(&self) -> Expect {
        match self {
            Self::Accepted { .. } => Expect::Accept,
            Self::Rejected { .. } => Expect::Reject,
        }
    }

    fn why(&self) -> &str {
        match self {
            Self::Accepted { .. } => "verified",
            Self::Rejected { why } => why,
        }
    }
}

impl Vector {
    fn arrival(&self) -> Arrival {
        let mut headers = HeaderMap::new();
        for (name, value) in &self.headers {
            let name = HeaderName::from_bytes(name.as_bytes()).expect("a header name");
            headers.append(name, HeaderValue::from_str(value).expect("a header value"));
        }
        let body = match (&self.body_base64, &self.body_rule) {
            (Some(encoded), None) => Bytes::from(STANDARD.decode(encoded).expect("base64")),
            (None, Some(rule)) => rule.body(),
            _ => panic!("{} has no body, or two", self.name),
        };
        let method = Method::from_bytes(self.method.as_bytes()).expect("a method");
        Arrival { method, url: self.url.clone(), headers, body }
    }

    fn spec(&self) -> SourceSpec {
        let secrets =
            self.secrets.iter().map(|text| ActiveSecret::forever(Secret::new(text.as_str())));
        let mut spec = SourceSpec::new(&self.provider, &self.provider, secrets.collect());
        spec.params = self
            .params
            .iter()
            .map(|(name, value)| {
                let text = match value {
                    serde_json::Value::String(text) => text.clone(),
                    other => other.to_string(),
                };
                (name.clone(), text)
            })
            .collect();
        spec
    }

    fn judge(&self) -> Judged {
        let source = match Source::build(self.spec()) {
            Ok(source) => source,
            Err(error) => return Judged::Rejected { why: format!("config: {error}") },
        };
        let now = Timestamp::from_second(self.now_unix).expect("a time");
        match verify(&source, &self.arrival(), now) {
            Err(refusal) => Judged::Rejected { why: refusal.to_string() },
            Ok(Verified::Reply(_) | Verified::Empty) => Judged::Accepted { receipts: Vec::new() },
            Ok(Verified::Events { receipts, .. }) => match receipts[0].timeliness() {
                Timeliness::OnTime => Judged::Accepted { receipts },
                Timeliness::Late { age_seconds } => {
                    Judged::Rejected { why: format!("stale: signed {age_seconds} s ago") }
                }
            },
        }
    }

    fn line(&self, judged: &Judged) -> String {
        format!(
            "{} {} ours={:?} theirs={:?}",
            self.provider,
            self.name,
            judged.verdict(),
            self.expect
        )
        .to_lowercase()
    }
}

fn vectors() -> Vec<Vector> {
    serde_json::from_str(VECTORS).expect("the vectors")
}

#[test]
fn every_core_vector_agrees() {
    // The verdicts of 37 senders' own libraries, on vectors that every correct verifier judges alike.
    let mut wrong = Vec::new();
    let mut judged = 0;
    for vector in vectors().iter().filter(|vector| vector.class == Class::Core) {
        let ours = vector.judge();
        judged += 1;
        if ours.verdict() != vector.expect {
            wrong.push(format!("{}: {}", vector.line(&ours), ours.why()));
        }
    }
    assert!(judged > 500, "only {judged} core vectors");
    assert!(wrong.is_empty(), "{} disagree:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn every_other_disagreement_is_listed_with_its_reason() {
    let mut actual = BTreeMap::new();
    for vector in vectors().iter().filter(|vector| vector.class != Class::Core) {
        let ours = vector.judge();
        if ours.verdict() != vector.expect {
            actual.insert(vector.line(&ours), ours.why().to_owned());
        }
    }
    let mut listed = BTreeSet::new();
    for line in DEVIATIONS.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (deviation, reason) =
            line.split_once(": ").expect("`provider name ours= theirs=: reason`");
        assert!(!reason.trim().is_empty(), "no reason: {line}");
        assert!(listed.insert(deviation.to_owned()), "listed twice: {line}");
    }
    let missing: Vec<_> = actual
        .iter()
        .filter(|(line, _)| !listed.contains(*line))
        .map(|(l, w)| format!("{l}: {w}"))
        .collect();
    let superfluous: Vec<_> = listed.iter().filter(|line| !actual.contains_key(*line)).collect();
    assert!(
        missing.is_empty() && superfluous.is_empty(),
        "not listed:\n{}\nlisted but agreeing:\n{superfluous:#?}",
        missing.join("\n")
    );
}

#[test]
fn every_accepted_vector_names_its_event() {
    let mut wrong = Vec::new();
    for vector in &vectors() {
        let Some(expected) = &vector.expect_event_id else { continue };
        let Judged::Accepted { receipts } = vector.judge() else { continue };
        let Some(receipt) = receipts.first() else {
            wrong.push(format!("{} {}: no event", vector.provider, vector.name));
            continue;
        };
        let ours = &*receipt.key().event_id;
        let fits = match vector.provider.as_str() {
            // The vectors name only a resource, and the key of these senders contains more.
            "twilio" | "cloudinary" => true,
            "adyen" | "hubspot" => ours.starts_with(expected.as_str()),
            _ => ours == expected,
        };
        if !fits {
            wrong.push(format!("{} {}: {ours}, not {expected}", vector.provider, vector.name));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The expected guard of each sender's events: how long it is stored (in units of the window) and what a repeat
/// under another id means. `None` if the id is signed and no counter changes, or if nothing is signed.
fn expected_guard(provider: &str) -> Option<(GuardKeep, GuardSeen)> {
    let twice = GuardKeep::For(2 * TOLERANCE_DEFAULT);
    match provider {
        "github" | "razorpay" | "shopify" | "twilio" => {
            Some((GuardKeep::WithKeys, GuardSeen::Review))
        }
        "plivo" => Some((GuardKeep::WithKeys, GuardSeen::Duplicate)),
        // The sender counts its attempts in the body.
        "coinbase_commerce" | "hubspot" | "line" | "mux" | "telnyx" => {
            Some((GuardKeep::WithKeys, GuardSeen::Duplicate))
        }
        "linear" | "mailgun" | "paypal" => Some((twice, GuardSeen::Review)),
        "plaid" | "sanity" => Some((twice, GuardSeen::Duplicate)),
        _ => None,
    }
}

#[test]
fn a_captured_event_has_a_guard_where_its_id_is_not_signed_or_its_copies_differ() {
    let vectors: Vec<Vector> = serde_json::from_str(VECTORS).expect("vectors");
    let mut guarded = BTreeSet::new();
    for vector in &vectors {
        let Judged::Accepted { receipts } = vector.judge() else { continue };
        for receipt in receipts {
            let guard = receipt.guard().map(|guard| (guard.keep, guard.seen));
            let mut expected = expected_guard(&vector.provider);
            // Without Twilio's idempotency token, a callback is identified by its signed content.
            if vector.provider == "twilio" && receipt.if_conflict().is_some() {
                expected = Some((GuardKeep::WithKeys, GuardSeen::Duplicate));
            }
            assert_eq!(guard, expected, "{} {}", vector.provider, vector.name);
            guarded.extend(guard.map(|_| vector.provider.clone()));
        }
    }
    assert_eq!(guarded.len(), 15, "{guarded:?}");
}
