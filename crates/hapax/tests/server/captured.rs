//! A captured request of every sender, with all changes that leave its signature valid, has one
//! effect. No ordinary event of any sender is lost, and only the events that
//! `data/held_for_review.txt` names wait for review.

use std::collections::{BTreeMap, BTreeSet};

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_ASN1_SIGNING, ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair,
    KeyPair as _,
};
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use bytes::Bytes;
use hapax_core::presets::{self, Preset, PresetGuard, PresetId};
use hapax_core::sample::{self, SampleId};
use hapax_core::secret::{ActiveSecret, Secret};
use hapax_core::source::SourceSpec;
use hapax_core::{Arrival, Source, Timestamp};
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use serde_json::json;

use crate::support::ledger::Ledger;
use crate::support::sender::{Request, now};
use crate::support::{House, Server, until};

const HELD: &str = include_str!("../data/held_for_review.txt");

/// PayPal signs with a certificate that chains to a root. Its captured requests are tested in the
/// core crate, where the clock is an argument.
const ELSEWHERE: &str = "paypal";

/// A sender that signs its requests, with the config of its source.
struct Signer {
    preset: &'static Preset,
    config: String,
    key: Key,
}

enum Key {
    Shared(Box<Source>),
    Ed25519(Ed25519KeyPair),
    Ecdsa(EcdsaKeyPair),
}

impl Signer {
    fn all() -> Vec<Self> {
        let all = presets::all().iter().filter(|preset| preset.name != ELSEWHERE);
        all.enumerate().map(|(place, preset)| Self::new(preset, place)).collect()
    }

    fn new(preset: &'static Preset, place: usize) -> Self {
        let name = preset.name;
        let mut random = [0x5a; 32];
        random[0] = u8::try_from(place).expect("few presets");
        let (key, secret, params) = match name {
            "discord" | "telnyx" => {
                let pair = Ed25519KeyPair::from_seed_unchecked(&random).expect("a key");
                let public = pair.public_key().as_ref().to_vec();
                let written =
                    if name == "discord" { hex::encode(public) } else { STANDARD.encode(public) };
                (Key::Ed25519(pair), written, String::new())
            }
            "sendgrid" => {
                let pair = EcdsaKeyPair::generate(&ECDSA_P256_SHA256_ASN1_SIGNING).expect("a key");
                let written = STANDARD.encode(pair.public_key().as_ref());
                (Key::Ecdsa(pair), written, String::new())
            }
            "plaid" => {
                let pair = EcdsaKeyPair::generate(&ECDSA_P256_SHA256_FIXED_SIGNING).expect("a key");
                let point = pair.public_key().as_ref().to_vec();
                let jwk = json!([{
                    "kid": "k", "kty": "EC", "crv": "P-256", "alg": "ES256",
                    "x": URL_SAFE_NO_PAD.encode(&point[1..33]), "y": URL_SAFE_NO_PAD.encode(&point[33..65]),
                }]);
                (Key::Ecdsa(pair), String::new(), format!("params = {{ jwks = '{jwk}' }}\n"))
            }
            _ => {
                let secret = preset.secret_from(&random).expect("a sender with a shared key");
                let mut spec =
                    SourceSpec::new(name, name, vec![ActiveSecret::forever(secret.clone())]);
                let required = preset.params().iter().filter(|param| param.required);
                spec.params =
                    required.map(|param| (param.name.to_owned(), "own".to_owned())).collect();
                let params: Vec<String> =
                    spec.params.iter().map(|(key, value)| format!("{key} = \"{value}\"")).collect();
                let params = match params.is_empty() {
                    true => String::new(),
                    false => format!("params = {{ {} }}\n", params.join(", ")),
                };
                let source = Source::build(spec).expect("a good spec");
                (Key::Shared(Box::new(source)), secret.expose().to_owned(), params)
            }
        };
        let secrets = match secret.is_empty() {
            true => String::new(),
            false => format!("secrets = [\"{secret}\"]\n"),
        };
        let config = format!(
            "[sources.{name}]\nprovider = \"{name}\"\n{secrets}{params}unverified_limit = \"off\"\n\
             [sources.{name}.handlers.once]\nsql = \"INSERT INTO ledger VALUES (:source, :id)\"\n"
        );
        Self { preset, config, key }
    }

    /// An unsigned sample of this sender.
    fn sample(&self, token: &str, event_type: Option<&str>) -> Arrival {
        let at = Timestamp::from_second(1_767_225_600).expect("in range");
        let sample = sample::event(self.preset.name, event_type, &SampleId::made_up(token, at))
            .expect("a sample");
        let mut headers = HeaderMap::new();
        headers.insert("content-type", HeaderValue::from_static(sample.content_type));
        for (name, value) in &sample.headers {
            let name = HeaderName::from_bytes(name.as_bytes()).expect("a name");
            headers.insert(name, HeaderValue::from_str(value).expect("a value"));
        }
        // `sign` adds a new nonce for each signature.
        headers.remove("x-plivo-signature-v3-nonce");
        let url = format!("https://hooks.example.com/webhooks/{}", self.preset.name);
        Arrival { method: Method::POST, url, headers, body: Bytes::from(sample.body) }
    }

    /// An unsigned sample, with `value` at `pointer` of its event.
    fn changed(&self, token: &str, pointer: &str, value: serde_json::Value) -> Arrival {
        let mut request = self.sample(token, None);
        let mut body = serde_json::from_slice(&request.body).expect("JSON");
        let place = match self.preset.envelope.items {
            Some(items) => format!("{items}/0{pointer}"),
            None => pointer.to_owned(),
        };
        sample::set(&mut body, &place, value).expect("a place");
        request.body = Bytes::from(body.to_string());
        request
    }

    /// The request as this sender would sign it at that second. `id` is used if this signature
    /// needs an id or a nonce of its own.
    fn sign(&self, mut request: Arrival, second: i64, id: &str) -> Request {
        let mut add = |name: &'static str, value: String| {
            request.headers.insert(name, HeaderValue::from_str(&value).expect("a value"));
        };
        let stamp = second.to_string();
        let random = SystemRandom::new();
        let content =
            |separator: &str, body: &[u8]| [stamp.as_bytes(), separator.as_bytes(), body].concat();
        match (&self.key, self.preset.name) {
            (Key::Shared(source), _) => {
                let at = Timestamp::from_second(second).expect("in range");
                let signed = source.scheme().sign(&request, Some(id), at).expect("signs");
                request = signed.apply(&request).expect("fits");
            }
            (Key::Ed25519(pair), "discord") => {
                let signature = pair.sign(&content("", &request.body));
                add("x-signature-timestamp", stamp.clone());
                add("x-signature-ed25519", hex::encode(signature));
            }
            (Key::Ed25519(pair), _) => {
                let signature = pair.sign(&content("|", &request.body));
                add("telnyx-timestamp", stamp.clone());
                add("telnyx-signature-ed25519", STANDARD.encode(signature));
            }
            (Key::Ecdsa(pair), "sendgrid") => {
                let signature = pair.sign(&random, &content("", &request.body)).expect("signs");
                add("x-twilio-email-event-webhook-timestamp", stamp.clone());
                add("x-twilio-email-event-webhook-signature", STANDARD.encode(signature));
            }
            (Key::Ecdsa(pair), _) => {
                let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, &request.body);
                let claims = json!({ "iat": second, "request_body_sha256": hex::encode(digest) });
                let head =
                    URL_SAFE_NO_PAD.encode(json!({ "alg": "ES256", "kid": "k" }).to_string());
                let content = format!("{head}.{}", URL_SAFE_NO_PAD.encode(claims.to_string()));
                let signature = pair.sign(&random, content.as_bytes()).expect("signs");
                add(
                    "plaid-verification",
                    format!("{content}.{}", URL_SAFE_NO_PAD.encode(signature)),
                );
            }
        }
        let headers = request
            .headers
            .iter()
            .map(|(name, value)| (name.to_string(), value.to_str().expect("text").to_owned()))
            .collect();
        let (_, path) = request.url.split_once("example.com").expect("our URL");
        Request {
            method: "POST".into(),
            path: path.to_owned(),
            headers,
            body: request.body.to_vec(),
        }
    }

    fn signs_something(&self) -> bool {
        match &self.key {
            Key::Shared(source) => source.scheme().signs_something(),
            Key::Ed25519(_) | Key::Ecdsa(_) => true,
        }
    }
}

fn house(signers: &[Signer]) -> (House, Ledger) {
    let sources: String = signers.iter().map(|signer| signer.config.as_str()).collect();
    let house = House::new(&format!("public_url = \"https://hooks.example.com\"\n{sources}"));
    let ledger = Ledger::create(&house, "CREATE TABLE ledger (source TEXT, id TEXT);");
    (house, ledger)
}

/// Every change of a captured request that might leave its signature valid. The server decides
/// which ones do: a refused request has no effect either.
fn changes(preset: &Preset, captured: &Request) -> Vec<(String, Request)> {
    let mut all = vec![("as it is".to_owned(), captured.clone())];
    let mut change = |how: String, request: Request| all.push((how, request));
    let topic = match preset.guard {
        // One object may arrive under several topics, and has one effect for each of them.
        PresetGuard::SignedAndType => preset.envelope.event_type,
        PresetGuard::Signed | PresetGuard::Off => &[],
    };
    let is_topic = |name: &str| topic.contains(&format!("header:{name}").as_str());
    for (name, value) in captured.headers.iter().filter(|(name, _)| !is_topic(name)) {
        change(format!("without {name}"), captured.clone().without(name));
        change(format!("{name} twice"), captured.clone().with(name, value));
        change(format!("{name} and another"), captured.clone().with(name, "another"));
        for other in ["another", "00000000-0000-4000-8000-000000000001", &format!("{value}x")] {
            change(format!("{name}: {other}"), captured.clone().instead(name, other));
        }
        change(
            format!("{name} in upper case"),
            captured.clone().instead(&name.to_uppercase(), value),
        );
    }
    for name in known_headers().iter().filter(|name| !is_topic(name)) {
        if !captured.headers.iter().any(|(known, _)| known == name) {
            change(format!("with {name}"), captured.clone().with(name, "stray-1"));
        }
    }
    for content_type in [
        "text/plain",
        "application/json",
        "application/x-www-form-urlencoded",
        "application/xml",
        "text/plain; charset=utf-8",
    ] {
        let changed = captured.clone().instead("content-type", content_type);
        change(format!("as {content_type}"), changed);
    }
    let path = &captured.path;
    for other in [
        format!("{path}?x=1"),
        format!("{path}?"),
        format!("{path}/"),
        path.to_uppercase(),
        format!("{path}#x"),
        path.replace("webhooks", "Webhooks"),
    ] {
        change(format!("at {other}"), captured.clone().to(&other));
    }
    let text = String::from_utf8(captured.body.clone()).expect("text");
    for body in
        [format!("{text}\n"), format!(" {text}"), format!("{text} "), text.replacen(':', ": ", 1)]
    {
        change("with blanks".to_owned(), captured.clone().body(body));
    }
    if !text.starts_with(['{', '[']) {
        for (how, body) in spellings(&text) {
            change(how, captured.clone().body(body));
        }
    }
    for (path, value) in [
        ("/event-data/id", "another"),
        ("/notificationItems/0/NotificationRequestItem/eventDate", "2026-02-02T00:00:00+01:00"),
    ] {
        let mut json: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        if let Some(place) = json.pointer_mut(path) {
            *place = value.into();
            change(format!("{path} changed"), captured.clone().body(json.to_string()));
        }
    }
    all
}

/// The same form in other spellings.
fn spellings(form: &str) -> Vec<(String, String)> {
    let fields: Vec<(&str, &str)> =
        form.split('&').filter_map(|pair| pair.split_once('=')).collect();
    let write = |fields: &[(String, String)]| {
        fields.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join("&")
    };
    let owned: Vec<(String, String)> =
        fields.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let mut all = vec![
        ("with & at its end".to_owned(), format!("{form}&")),
        ("with & before it".to_owned(), format!("&&{form}")),
        ("with an empty field".to_owned(), format!("{form}&=")),
        ("with an empty name".to_owned(), format!("=&{form}")),
        ("turned round".to_owned(), write(&owned.iter().rev().cloned().collect::<Vec<_>>())),
    ];
    for place in 0..owned.len() {
        let (name, value) = &owned[place];
        let mut twice = owned.clone();
        twice.push(owned[place].clone());
        all.push((format!("{name} twice"), write(&twice)));
        let mut put = |how: &str, name: String, value: String| {
            let mut other = owned.clone();
            other[place] = (name, value);
            all.push((how.to_owned(), write(&other)));
        };
        let escaped =
            |text: &str| text.bytes().map(|byte| format!("%{byte:02x}")).collect::<String>();
        if name.is_ascii() && !name.contains('%') {
            put("its name escaped", escaped(name), value.clone());
        }
        if !value.contains(['%', '+']) {
            put("its value escaped", name.clone(), escaped(value));
            for cut in 1..value.len() {
                put(
                    "a value moved into its name",
                    format!("{name}{}", &value[..cut]),
                    value[cut..].to_owned(),
                );
            }
        }
        put(
            "a name moved into its value",
            name[..name.len() - 1].to_owned(),
            format!("{}{value}", &name[name.len() - 1..]),
        );
        if place + 1 < owned.len() {
            let (next, after) = owned[place + 1].clone();
            let mut joined = owned.clone();
            joined[place].1 = format!("{value}{next}{after}");
            joined.remove(place + 1);
            all.push((format!("{next} moved into the value before"), write(&joined)));
        }
    }
    all
}

/// Every header in which some sender sends an id, a type or a time.
fn known_headers() -> BTreeSet<&'static str> {
    let mut names = BTreeSet::from(["idempotency-key", "x-request-id", "webhook-id", "svix-id"]);
    for preset in presets::all() {
        let ids: &[&str] = match &preset.envelope.id {
            PresetId::Selector(selector) => &[selector],
            PresetId::FirstOf(selectors) | PresetId::Joined(selectors) => selectors,
            PresetId::Hash { fields, .. } => fields,
        };
        let all = ids.iter().chain(preset.envelope.event_type).copied();
        names.extend(all.filter_map(|selector| selector.strip_prefix("header:")));
    }
    names
}

fn decision(server: &Server, request: &Request) -> String {
    let answer = server.ask(request.bytes());
    match answer.header("hapax-decision") {
        Some(decision) => decision.to_owned(),
        None => answer.status.to_string(),
    }
}

#[test]
fn one_captured_request_has_one_effect_whatever_of_it_is_changed() {
    let signers = Signer::all();
    let (house, ledger) = house(&signers);
    let server = house.start();
    let mut tried = 0;
    let mut wrong = Vec::new();
    // A sender that signs nothing proves only its identity, and all notices of Dropbox are
    // identical.
    let signing =
        |signer: &&Signer| signer.signs_something() && signer.preset.guard != PresetGuard::Off;
    for signer in signers.iter().filter(signing) {
        let name = signer.preset.name;
        let captured = signer.sign(signer.sample("a1", None), now(), "sig-1");
        assert_eq!(decision(&server, &captured), "accepted", "{name}");
        for (how, request) in changes(signer.preset, &captured) {
            let decided = decision(&server, &request);
            if decided == "accepted" {
                wrong.push(format!("{name}: {how}"));
            }
            tried += 1;
        }
    }
    assert!(wrong.is_empty(), "{} second effects of {tried}:\n{}", wrong.len(), wrong.join("\n"));
    assert!(tried > 3_000, "only {tried} changes");
    let effects = || ledger.counts("SELECT source, count(*) FROM ledger GROUP BY source");
    let expected: BTreeMap<String, i64> =
        signers.iter().filter(signing).map(|signer| (signer.preset.name.to_owned(), 1)).collect();
    until("every event has run", || (effects().len() == expected.len()).then_some(()));
    assert_eq!(effects(), expected);
}

/// The header in which this sender sends its id.
fn id_header(preset: &Preset) -> Option<&'static str> {
    let selector = match preset.envelope.id {
        PresetId::Selector(selector) => Some(selector),
        PresetId::FirstOf(selectors) | PresetId::Joined(selectors) => selectors.first().copied(),
        PresetId::Hash { .. } => None,
    };
    selector.and_then(|selector| selector.strip_prefix("header:"))
}

#[test]
fn a_captured_request_under_the_id_of_another_event_does_not_block_that_event() {
    // A's request arrives under the id of B: before B, after B, or at the same moment. If ids in
    // headers are signed, the request is a forgery and is refused.
    let signers: Vec<Signer> = Signer::all()
        .into_iter()
        .filter(|signer| signer.signs_something() && signer.preset.guard != PresetGuard::Off)
        .filter(|signer| id_header(signer.preset).is_some())
        .collect();
    let (house, ledger) = house(&signers);
    let server = house.start();
    let mut expected = BTreeMap::new();
    let mut forgeable = 0;
    for signer in &signers {
        let name = signer.preset.name;
        let header = id_header(signer.preset).expect("filtered");
        let event = |token: &str| signer.sign(signer.sample(token, None), now(), token);
        let forge = |captured: &Request, other: &Request| {
            captured.clone().instead(header, other.header(header))
        };
        let (captured, before) = (event("a1"), event("b2"));
        assert_eq!(decision(&server, &captured), "accepted", "{name}");
        let forged = forge(&captured, &before);
        let decided = decision(&server, &forged);
        if decided == "401" {
            continue;
        }
        forgeable += 1;
        assert_eq!(decided, "review", "{name}");
        assert_eq!(decision(&server, &before), "accepted", "{name}: before");
        assert_eq!(decision(&server, &forged), "duplicate", "{name}");
        let after = event("c3");
        assert_eq!(decision(&server, &after), "accepted", "{name}");
        assert_eq!(decision(&server, &forge(&captured, &after)), "review", "{name}: after");
        assert_eq!(decision(&server, &after), "duplicate", "{name}");
        let beside = event("d4");
        let forged = forge(&captured, &beside);
        let decided: Vec<String> = std::thread::scope(|scope| {
            let asked: Vec<_> = [&forged, &forged, &beside, &forged, &beside]
                .map(|request| scope.spawn(|| decision(&server, request)))
                .into_iter()
                .collect();
            asked.into_iter().map(|one| one.join().expect("no panic")).collect()
        });
        let mut genuine = [decided[2].as_str(), &decided[4]];
        genuine.sort_unstable();
        assert_eq!(genuine, ["accepted", "duplicate"], "{name}: beside");
        expected.insert(name.to_owned(), 4);
    }
    assert!(forgeable >= 8, "only {forgeable} senders put an unsigned id into a header");
    let effects = || {
        let names: Vec<String> = expected.keys().map(|name| format!("'{name}'")).collect();
        ledger.counts(&format!(
            "SELECT source, count(*) FROM ledger WHERE source IN ({}) GROUP BY source",
            names.join(",")
        ))
    };
    until("every event has run", || {
        (effects().values().sum::<i64>() >= expected.values().sum()).then_some(())
    });
    assert_eq!(effects(), expected);
    // The event in review shows the id it arrived under, and the reason.
    let waiting = server.events("status=review");
    assert_eq!(waiting.len(), forgeable * 3);
    for event in &waiting {
        assert_eq!(event["review"], "replay");
        let came_under = event["came_under"].as_str().expect("the id");
        let own = event["event_id"].as_str().expect("an id");
        assert!(own.starts_with(&format!("{came_under}~replay~")), "{event}");
    }
    // Once approved, it runs under its own id.
    let id = waiting[0]["id"].as_str().expect("an id");
    server.admin_post(&format!("/api/v1/events/{id}/approve"), &json!({}));
    let own = waiting[0]["event_id"].as_str().expect("an id");
    until("the approved one has run", || {
        let ran = ledger.counts(&format!(
            "SELECT source, count(*) FROM ledger WHERE id = '{id}' OR id = '{own}' GROUP BY source"
        ));
        (ran.values().sum::<i64>() == 1).then_some(())
    });
}

#[test]
fn a_value_moved_over_a_boundary_that_arrives_first_is_refused_if_a_field_is_missing() {
    let signers: Vec<Signer> = Signer::all()
        .into_iter()
        .filter(|signer| matches!(signer.preset.name, "twilio" | "plivo"))
        .collect();
    let (house, _) = house(&signers);
    let server = house.start();
    for (signer, field) in signers.iter().zip(["MessageUUID", "MessageSid"]) {
        let name = signer.preset.name;
        let captured = signer.sign(signer.sample("a1", None), now(), "sig-1");
        let text = String::from_utf8(captured.body.clone()).expect("text");
        let (before, after) = text.split_once(&format!("{field}=")).expect("the field");
        let shifted = format!("{before}{field}{}={}", &after[..1], &after[1..]);
        assert_eq!(decision(&server, &captured.clone().body(shifted)), "400", "{name}");
        assert_eq!(decision(&server, &captured), "accepted", "{name}");
    }
}

#[test]
fn ordinary_traffic_of_every_sender_is_neither_lost_nor_held() {
    let signers = Signer::all();
    let (house, _) = house(&signers);
    let server = house.start();
    let mut held = BTreeSet::new();
    for signer in &signers {
        let name = signer.preset.name;
        let mut expect = |what: &str, request: &Request, allowed: &[&str]| {
            let decided = decision(&server, request);
            if decided == "review" {
                held.insert(format!("{name} {what}"));
                return;
            }
            assert!(allowed.contains(&decided.as_str()), "{name}: {what} was {decided}");
        };
        let copy = ["duplicate", "conflict"];
        let first = signer.sign(signer.sample("a1", None), now(), "sig-1");
        expect("first event", &first, &["accepted"]);
        expect("retry", &first, &copy);
        let other = signer.sign(signer.sample("b2", None), now(), "sig-2");
        expect("second event", &other, &["accepted"]);
        // The sample is signed again a little later: it is the same event if the sender's id is the
        // same.
        let again = signer.sign(signer.sample("a1", None), now() - 7, "sig-3");
        let is_plivo = name == "plivo";
        expect("retry signed again", &again, if is_plivo { &["accepted"] } else { &copy });
        // The same content arrives again under another id, if the id is not part of the content.
        let id_header = match signer.preset.envelope.id {
            PresetId::Selector(selector) => Some(selector),
            PresetId::FirstOf(selectors) | PresetId::Joined(selectors) => {
                selectors.first().copied()
            }
            PresetId::Hash { fields, .. } => fields.first().copied(),
        };
        if let Some(header) = id_header.and_then(|selector| selector.strip_prefix("header:")) {
            let mut request = signer.sample("a1", None);
            request.headers.remove(header);
            let header = HeaderName::from_bytes(header.as_bytes()).expect("a name");
            request.headers.insert(header, HeaderValue::from_static("another-id-of-the-sender"));
            let equal = signer.sign(request, now() - 11, "sig-4");
            expect("equal content under a new id", &equal, &["accepted"]);
        }
        // Only a counter differs: it is the same event. Anything else may not differ.
        for (place, pointer) in signer.preset.counters.iter().enumerate() {
            let token = format!("counted-{place}");
            let with = |pointer: &str, value: u32| {
                signer.sign(signer.changed(&token, pointer, json!(value)), now(), "sig-6")
            };
            let unlike = |decision: &str| {
                let labels = [format!("source=\"{name}\""), format!("decision=\"{decision}\"")];
                server.metric("hapax_arrivals_total", &labels.each_ref().map(String::as_str))
            };
            let before = unlike("conflict") + unlike("review");
            expect("first attempt", &with(pointer, 0), &["accepted"]);
            expect("second attempt", &with(pointer, 1), &["duplicate"]);
            assert_eq!(unlike("conflict") + unlike("review"), before, "{name}: {pointer}");
            decision(&server, &with("/another", 0));
            assert_eq!(unlike("conflict") + unlike("review"), before + 1.0, "{name}: {pointer}");
        }
        if name == "woocommerce" {
            let mut request = signer.changed("a1", "/id", json!(728));
            let id = signer.sample("a1", None).headers["x-wc-webhook-delivery-id"].clone();
            request.headers.insert("x-wc-webhook-delivery-id", id);
            let beside = signer.sign(request, now(), "sig-8");
            expect("another event of the same second", &beside, &["accepted"]);
        }
        if signer.preset.guard == PresetGuard::SignedAndType {
            for (place, sibling) in ["orders/paid", "orders/updated"].iter().enumerate() {
                let mut request = signer.sample("a1", None);
                let topic = signer.preset.envelope.event_type[0].trim_start_matches("header:");
                let topic = HeaderName::from_bytes(topic.as_bytes()).expect("a name");
                request.headers.insert(topic, HeaderValue::from_str(sibling).expect("a value"));
                let id = id_header.expect("an id").trim_start_matches("header:");
                let id = HeaderName::from_bytes(id.as_bytes()).expect("a name");
                let own = format!("sibling-{place}");
                request.headers.insert(id, HeaderValue::from_str(&own).expect("a value"));
                expect("sibling topic", &signer.sign(request, now(), "sig-5"), &["accepted"]);
            }
        }
    }
    let listed: BTreeSet<String> = HELD
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| line.split_once(": ").expect("`provider what: reason`").0.to_owned())
        .collect();
    assert_eq!(held, listed, "what is held for review is listed with its reason");
}

#[test]
fn the_handshake_of_x_signs_nothing_that_could_be_an_event() {
    let signers: Vec<Signer> =
        Signer::all().into_iter().filter(|signer| signer.preset.name == "x").collect();
    let (house, _) = house(&signers);
    let server = house.start();
    let ask = |token: &str| {
        let escaped: String = token.bytes().map(|byte| format!("%{byte:02x}")).collect();
        server.ask(format!("GET /webhooks/x?crc_token={escaped} HTTP/1.1\r\nhost: a\r\n\r\n"))
    };
    for event in [r#"{"for_user_id":"1"}"#, "{}", "[1]", "\"a\"", "{\"a\":1}\n"] {
        assert_eq!(ask(event).status, 400, "{event}");
    }
    // None of these tokens could be an event.
    for token in ["12345", "true", "null", "9b4507b3-9040-4669-9ca3-6b94edb50553"] {
        let answer = ask(token);
        assert_eq!(answer.status, 200, "{answer:?}");
        let signature = answer.json()["response_token"].as_str().expect("a signature").to_owned();
        let forged = Request {
            method: "POST".into(),
            path: "/webhooks/x".into(),
            headers: vec![
                ("content-type".into(), "application/json".into()),
                ("x-twitter-webhooks-signature".into(), signature),
            ],
            body: token.as_bytes().to_vec(),
        };
        assert_eq!(decision(&server, &forged), "400", "{token}");
    }
    assert_eq!(server.metric("hapax_handshakes_total", &["source=\"x\""]), 9.0);
    // One address gets a limited number of answers per second.
    let limited = (0..60).filter(|_| ask("foo").status == 429).count();
    assert!(limited > 0, "no handshake was over the limit");
    assert_eq!(server.events("").len(), 0);
}

#[test]
fn an_unsigned_header_makes_no_handshake_of_an_event_nor_the_reverse() {
    let signers: Vec<Signer> =
        Signer::all().into_iter().filter(|signer| signer.preset.name == "twitch").collect();
    let (house, _) = house(&signers);
    let server = house.start();
    let twitch = &signers[0];
    const KIND: &str = "twitch-eventsub-message-type";
    let event = twitch.sign(twitch.sample("a1", None), now(), "sig-1");
    assert_eq!(decision(&server, &event), "accepted");
    for kind in ["webhook_callback_verification", "revocation", "x"] {
        assert_eq!(decision(&server, &event.clone().instead(KIND, kind)), "duplicate", "{kind}");
    }
    let mut asked = twitch.sample("b2", None);
    asked.body = Bytes::from_static(br#"{"challenge":"abc","subscription":{"type":"t"}}"#);
    let asked = twitch.sign(asked, now(), "sig-2");
    for kind in ["webhook_callback_verification", "notification"] {
        let answer = server.ask(asked.clone().instead(KIND, kind).bytes());
        assert_eq!((answer.status, answer.text().as_str()), (200, "abc"), "{kind}: {answer:?}");
    }
    assert_eq!(server.events("").len(), 1);
}

#[test]
fn one_dev_secret_signs_for_no_sender_and_no_sender_for_another() {
    let house = House::without_config();
    let server = house.start();
    let dev = std::fs::read_to_string(house.database().with_file_name("dev-secret")).expect("kept");
    let key = aws_lc_rs::hmac::Key::new(aws_lc_rs::hmac::HMAC_SHA256, dev.trim().as_bytes());
    let own = |name: &str| hex::encode(aws_lc_rs::hmac::sign(&key, name.as_bytes()));
    let sent = |secret: &str| {
        let secrets = vec![ActiveSecret::forever(Secret::new(secret))];
        let source = Source::build(SourceSpec::new("stripe", "stripe", secrets)).expect("builds");
        let signer = Signer {
            preset: presets::find("stripe").expect("a preset"),
            config: String::new(),
            key: Key::Shared(Box::new(source)),
        };
        decision(&server, &signer.sign(signer.sample("a1", None), now(), "sig-1"))
    };
    assert_eq!(sent(dev.trim()), "401");
    assert_eq!(sent(&own("github")), "401");
    assert_eq!(sent(&own("stripe")), "accepted");
}
