//! Every preset that can sign, and custom schemes: a signed request verifies, and one that was changed, truncated,
//! signed for another source or sent too late does not.

use std::collections::BTreeMap;
use std::time::Duration;

use base64::Engine as _;
use bytes::Bytes;
use hapax_core::envelope::IdSpec;
use hapax_core::presets::{self, Preset};
use hapax_core::sample::{self, SampleId};
use hapax_core::scheme::coverage::BodyCovered;
use hapax_core::scheme::{CustomScheme, Scheme};
use hapax_core::secret::{ActiveSecret, Secret};
use hapax_core::source::{LatePolicy, ReplayGuard, SourceError, SourceSpec};
use hapax_core::{Arrival, ContentGuard, GuardKeep, Source, Tenant, Timestamp, Verified, verify};
use http::{HeaderMap, HeaderName, HeaderValue, Method};

const RANDOM: [u8; 32] = [0xa7; 32];
const OTHER: [u8; 32] = [0xb8; 32];

fn now() -> Timestamp {
    Timestamp::from_second(1_767_225_600).expect("in range")
}

fn header(headers: &mut HeaderMap, name: &str, value: &str) {
    let name: HeaderName = name.parse().expect("a name");
    headers.insert(name, HeaderValue::from_str(value).expect("a value"));
}

/// A sample request of the sender, not yet signed.
fn sample(preset: &Preset) -> Arrival {
    let sample =
        sample::event(preset.name, None, &SampleId::made_up("a1", now())).expect("a sample");
    let mut headers = HeaderMap::new();
    header(&mut headers, "content-type", sample.content_type);
    for (name, value) in &sample.headers {
        header(&mut headers, name, value);
    }
    Arrival {
        method: Method::POST,
        url: format!("https://hooks.example.com/webhooks/{}?b=2&a=1", preset.name),
        headers,
        body: Bytes::from(sample.body),
    }
}

fn params(preset: &Preset) -> BTreeMap<String, String> {
    let required = preset.params().iter().filter(|param| param.required);
    required.map(|param| (param.name.to_owned(), "value".to_owned())).collect()
}

/// A source of the preset that holds these secrets.
fn source(preset: &Preset, secrets: Vec<ActiveSecret>) -> Result<Source, SourceError> {
    let mut spec = SourceSpec::new(preset.name, preset.name, secrets);
    spec.params = params(preset);
    Source::build(spec)
}

fn own(preset: &Preset, random: &[u8; 32]) -> ActiveSecret {
    ActiveSecret::forever(preset.secret_from(random).expect("a preset that can sign"))
}

fn with(preset: &Preset, random: &[u8; 32]) -> Source {
    source(preset, vec![own(preset, random)]).expect("builds")
}

fn signed(scheme: &Scheme, request: &Arrival) -> Arrival {
    let signed = scheme.sign(request, None, now()).expect("signs");
    signed.apply(request).expect("fits into headers")
}

fn signable() -> impl Iterator<Item = &'static Preset> {
    presets::all().iter().filter(|preset| preset.can_sign())
}

/// The same request with another signature: the result of `change` for the current signature.
fn with_signature(preset: &Preset, request: &Arrival, change: &dyn Fn(&str) -> String) -> Arrival {
    let mut request = request.clone();
    let inside = match preset.name {
        "adyen" => "/notificationItems/0/NotificationRequestItem/additionalData/hmacSignature",
        "mailgun" => "/signature/signature",
        _ => {
            let unsigned = sample(preset);
            let scheme = with(preset, &RANDOM);
            let added = scheme.scheme().sign(&unsigned, None, now()).expect("signs").headers;
            let (name, value) = added.last().expect("a signature");
            header(&mut request.headers, name, &change(value));
            return request;
        }
    };
    let mut body: serde_json::Value = serde_json::from_slice(&request.body).expect("JSON");
    let signature = body.pointer_mut(inside).expect("a signature");
    *signature = change(signature.as_str().expect("text")).into();
    request.body = Bytes::from(body.to_string());
    request
}

#[test]
fn every_preset_verifies_what_it_signs() {
    let mut count = 0;
    for preset in signable() {
        let source = with(preset, &RANDOM);
        let request = signed(source.scheme(), &sample(preset));
        let name = preset.name;
        let authentic = source.scheme().authenticate(&request, now());
        let authentic = authentic.unwrap_or_else(|refusal| panic!("{name}: {refusal}"));
        assert_eq!(authentic.secret, 0, "{name}");
        assert_eq!(authentic.signed_at.is_some(), source.signs_time(), "{name}");
        if let Some(at) = authentic.signed_at {
            assert_eq!(at.as_second(), now().as_second(), "{name}");
        }
        assert_eq!(source.scheme().missing(&request.headers), None, "{name}");
        match verify(&source, &request, now()) {
            Ok(Verified::Events { receipts, .. }) => assert_eq!(receipts.len(), 1, "{name}"),
            other => panic!("{name}: {other:?}"),
        }
        count += 1;
    }
    assert!(count >= 50, "only {count} presets can sign");
}

#[test]
fn signing_adds_the_id_header_if_the_request_has_none() {
    for (name, place) in [
        ("github", "x-github-delivery"),
        ("standardwebhooks", "webhook-id"),
        ("svix", "svix-id"),
        ("shopify", "x-shopify-webhook-id"),
        ("twitch", "twitch-eventsub-message-id"),
    ] {
        let preset = presets::find(name).expect("a preset");
        let source = with(preset, &RANDOM);
        let mut request = sample(preset);
        request.headers.remove(place);
        let given = source.scheme().sign(&request, Some("mine"), now()).expect("signs");
        assert!(given.headers.contains(&(place.to_owned(), "mine".to_owned())), "{name}");
        let request = given.apply(&request).expect("fits");
        assert!(source.scheme().authenticate(&request, now()).is_ok(), "{name}");
    }
}

#[test]
fn every_preset_refuses_a_wrong_secret_and_a_truncated_or_changed_signature() {
    for preset in signable() {
        let name = preset.name;
        let source = with(preset, &RANDOM);
        let good = signed(source.scheme(), &sample(preset));
        let refused = |request: &Arrival, how: &str| {
            let answer = source.scheme().authenticate(request, now());
            assert!(answer.is_err(), "{name}: {how} was accepted");
        };
        assert!(with(preset, &OTHER).scheme().authenticate(&good, now()).is_err(), "{name}");
        let change = |how: &str, change: &dyn Fn(&str) -> String| {
            let changed = with_signature(preset, &good, change);
            refused(&changed, how);
        };
        change("upper case", &str::to_uppercase);
        change("one more character", &|text| format!("{text}0"));
        change("nothing", &|_| String::new());
        change("one more before it", &|text| format!("x{text}"));
        let length = with_length(preset, &good);
        for cut in 0..length {
            change("a cut", &|text| text[..cut].to_owned());
        }
    }
}

/// The length of the signature as written.
fn with_length(preset: &Preset, request: &Arrival) -> usize {
    let length = std::cell::Cell::new(0);
    with_signature(preset, request, &|text| {
        length.set(text.len());
        text.to_owned()
    });
    length.get()
}

#[test]
fn a_changed_body_is_refused_wherever_the_body_is_signed() {
    for preset in signable() {
        let source = with(preset, &RANDOM);
        let mut request = signed(source.scheme(), &sample(preset));
        let signs_body = source.scheme().coverage()[0].body() != BodyCovered::Nothing;
        let mut body = request.body.to_vec();
        match preset.name {
            // Only some fields of an item are signed, so one of the signed fields is changed.
            "adyen" => {
                let text = String::from_utf8(body).expect("text");
                body = text.replacen("\"eventCode\":\"A", "\"eventCode\":\"B", 1).into_bytes();
            }
            _ => body.extend_from_slice(b"&x=1"),
        }
        assert_ne!(body, request.body, "{}", preset.name);
        request.body = Bytes::from(body);
        let answer = source.scheme().authenticate(&request, now());
        assert_eq!(answer.is_err(), signs_body || preset.name == "mailgun", "{}", preset.name);
    }
}

#[test]
fn no_preset_takes_the_signature_of_another_secret_or_scheme() {
    // Every sender's request is sent to every other sender's source: first with another secret,
    // then with the same secret if the signature is in another header.
    let requests: Vec<_> = signable()
        .map(|preset| (preset, signed(with(preset, &RANDOM).scheme(), &sample(preset))))
        .collect();
    for preset in signable() {
        let (stranger, sibling) = (with(preset, &OTHER), with(preset, &RANDOM));
        for (sender, request) in &requests {
            let answer = stranger.scheme().authenticate(request, now());
            assert!(answer.is_err(), "{} took a request of {}", preset.name, sender.name);
            if sibling.scheme().missing(&request.headers).is_some() {
                let answer = sibling.scheme().authenticate(request, now());
                assert!(answer.is_err(), "{} took a request of {}", preset.name, sender.name);
            }
        }
    }
}

#[test]
fn a_secret_verifies_until_it_expires() {
    for preset in signable().filter(|preset| preset.name != "box") {
        let name = preset.name;
        let request = signed(with(preset, &RANDOM).scheme(), &sample(preset));
        let until = |at: Timestamp| ActiveSecret { until: Some(at), ..own(preset, &RANDOM) };
        let second = jiff::SignedDuration::from_secs(1);
        let both = vec![until(now() + second), own(preset, &OTHER)];
        let answer = source(preset, both).expect("builds").scheme().authenticate(&request, now());
        assert_eq!(answer.map(|authentic| authentic.secret), Ok(0), "{name}");
        let both = vec![until(now()), own(preset, &OTHER)];
        let ended = source(preset, both).expect("builds");
        assert!(ended.scheme().authenticate(&request, now()).is_err(), "{name}");
        let last = source(preset, vec![own(preset, &OTHER), own(preset, &RANDOM)]).expect("builds");
        let answer = last.scheme().authenticate(&request, now());
        assert_eq!(answer.map(|authentic| authentic.secret), Ok(1), "{name}");
        let none = source(preset, vec![until(now())]).expect("builds");
        assert!(none.scheme().authenticate(&request, now()).is_err(), "{name}");
        assert!(none.scheme().sign(&sample(preset), None, now()).is_err(), "{name}");
    }
}

#[test]
fn a_source_without_a_usable_secret_or_parameter_is_never_built() {
    let text = |text: &str| ActiveSecret::forever(Secret::new(text));
    for preset in presets::all() {
        let name = preset.name;
        if preset.needs_secret() {
            for secrets in [vec![], vec![text("")], vec![text(" \t\n")]] {
                let error = source(preset, secrets).expect_err(name);
                assert_eq!(error.field, "secrets", "{name}");
                assert!(!error.hint.is_empty(), "{name}");
            }
        }
        if preset.can_sign() {
            let error = source(preset, vec![own(preset, &RANDOM), text("")]).expect_err(name);
            assert_eq!(error.field, "secrets", "{name}");
        }
        for param in preset.params().iter().filter(|param| param.required) {
            let secrets = if preset.can_sign() { vec![own(preset, &RANDOM)] } else { vec![] };
            for missing in [None, Some("  ")] {
                let mut spec = SourceSpec::new(name, name, secrets.clone());
                spec.params = params(preset);
                spec.params.remove(param.name);
                spec.params.extend(missing.map(|text| (param.name.to_owned(), text.to_owned())));
                let error = Source::build(spec).expect_err(name);
                assert_eq!(error.field, "params", "{name} without {}", param.name);
            }
        }
        if preset.signs_url() {
            let mut spec = SourceSpec::new(name, name, vec![own(preset, &RANDOM)]);
            spec.url_known = false;
            let error = Source::build(spec).expect_err(name);
            assert!(error.hint.contains("public_url"), "{name}: {}", error.hint);
        }
    }
    for (name, malformed) in [
        ("adyen", "no-digits-at-all"),
        ("adyen_platform", "abc"),
        ("standardwebhooks", "whsec_***"),
        ("svix", "whsec_"),
        ("liveblocks", "bm8gcHJlZml4"),
        ("discord", "0c75bfa8"),
        ("discord", "zz75bfa80af26d6c2ad69a06b1fbdbb8c284a48e6ab09fd97ab5b57ae45c8855"),
        ("telnyx", "AAAA"),
        ("sendgrid", "MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE"),
        ("postmark", "no-colon"),
        ("postmark", ":hunter2"),
    ] {
        let preset = presets::find(name).expect("a preset");
        let error = source(preset, vec![text(malformed)]).expect_err(name);
        assert_eq!(error.field, "secrets", "{name}");
        assert!(!error.problem.contains(malformed), "{name} repeats the secret");
    }
    let gitlab = presets::find("gitlab").expect("a preset");
    let mixed = vec![text("whsec_AAAA"), text("plain")];
    assert_eq!(source(gitlab, mixed).expect_err("mixed").field, "secrets");
    let boxed = presets::find("box").expect("a preset");
    let three = vec![text("a"), text("b"), text("c")];
    assert_eq!(source(boxed, three).expect_err("three").field, "secrets");
    for (name, params) in [
        ("plaid", [("jwks", "{}")].as_slice()),
        ("plaid", &[("jwks", "[]")]),
        ("plaid", &[("jwks", r#"[{"kid":"a","kty":"EC","crv":"P-384","x":"AA","y":"AA"}]"#)]),
        ("plaid", &[("jwks", r#"[{"kid":"a","kty":"EC","crv":"P-256","x":"AA","y":"AA"}]"#)]),
        ("paypal", &[("webhook_id", "W"), ("cert_pem", "no"), ("ca_pem", "no")]),
        ("cloudinary", &[("algorithm", "md5")]),
        ("flutterwave", &[("version", "v5")]),
    ] {
        let secrets = match name {
            "plaid" | "paypal" => vec![],
            _ => vec![text("secret")],
        };
        let mut spec = SourceSpec::new(name, name, secrets);
        spec.params =
            params.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        assert_eq!(Source::build(spec).expect_err(name).field, "params", "{name}");
    }
}

#[test]
fn a_second_generation_of_a_sender_is_chosen_by_the_config_and_not_by_the_request() {
    for (name, param, secret) in [
        ("flutterwave", Some(("version", "v4")), "the hash that was chosen"),
        ("cloudinary", Some(("algorithm", "sha256")), "secret"),
        ("gitlab", None, "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLawA"),
    ] {
        let preset = presets::find(name).expect("a preset");
        let secrets = vec![ActiveSecret::forever(Secret::new(secret))];
        let mut spec = SourceSpec::new(name, name, secrets.clone());
        spec.params.extend(param.map(|(key, value)| (key.to_owned(), value.to_owned())));
        let second = Source::build(spec).expect("builds");
        let request = signed(second.scheme(), &sample(preset));
        assert!(second.scheme().authenticate(&request, now()).is_ok(), "{name}");
        if param.is_some() {
            let first = source(preset, secrets).expect("builds");
            let other = signed(first.scheme(), &sample(preset));
            assert!(second.scheme().authenticate(&other, now()).is_err(), "{name}");
            assert!(first.scheme().authenticate(&request, now()).is_err(), "{name}");
        }
    }
}

#[test]
fn only_the_sender_can_sign_where_the_key_is_private() {
    let key = "0c75bfa80af26d6c2ad69a06b1fbdbb8c284a48e6ab09fd97ab5b57ae45c8855";
    let discord = presets::find("discord").expect("a preset");
    let source = source(discord, vec![ActiveSecret::forever(Secret::new(key))]).expect("builds");
    let error = source.scheme().sign(&sample(discord), None, now()).expect_err("no private key");
    assert!(error.to_string().contains("private key"), "{error}");
    for preset in presets::all() {
        assert_eq!(preset.secret_from(&RANDOM).is_some(), preset.can_sign(), "{}", preset.name);
    }
}

fn stripe_with(value: &str) -> (Source, Arrival) {
    let preset = presets::find("stripe").expect("a preset");
    let mut request = sample(preset);
    header(&mut request.headers, "stripe-signature", value);
    (with(preset, &RANDOM), request)
}

#[test]
fn of_several_signatures_any_good_one_passes_and_a_flood_does_not() {
    let stripe = presets::find("stripe").expect("a preset");
    let signed = with(stripe, &RANDOM).scheme().sign(&sample(stripe), None, now()).expect("signs");
    let good = signed.headers[0].1.clone();
    let (time, tag) = good.split_once(",v1=").expect("two parts");
    let bad = "0".repeat(64);
    let accepts = |value: &str| {
        let (source, request) = stripe_with(value);
        source.scheme().authenticate(&request, now()).is_ok()
    };
    assert!(accepts(&good));
    assert!(accepts(&format!("{time},v1={bad},v1={tag}")));
    assert!(accepts(&format!("{time},v1=short,v1=,v1={tag}")));
    assert!(accepts(&format!("v1={tag},v0={bad},{time}")));
    assert!(accepts(&format!("{time}{},v1={tag}", format!(",v1={bad}").repeat(15))));
    for refused in [
        format!("{time}{},v1={tag}", format!(",v1={bad}").repeat(16)),
        format!("{time},{time},v1={tag}"),
        format!("{time}, {time},v1={tag}"),
        format!("{time},v0={tag}"),
        format!("{time},V1={tag}"),
        format!("{time};v1={tag}"),
        format!("{time}, v1={tag}"),
        format!("v1={tag}"),
        format!("t=,v1={tag}"),
        format!("t=-1,v1={tag}"),
        format!("t=+1767225600,v1={tag}"),
        format!("t=01767225600,v1={tag}"),
        format!("t=1767225600.0,v1={tag}"),
        format!("t=99999999999999999999999,v1={tag}"),
        tag.to_owned(),
        "t".to_owned(),
        ",".to_owned(),
        "=".to_owned(),
    ] {
        assert!(!accepts(&refused), "{refused}");
    }
}

#[test]
fn a_header_of_another_naming_cannot_accompany_a_signature() {
    // A request of Svix under its neutral names is replayed with an unsigned svix-id.
    let svix = presets::find("svix").expect("a preset");
    let standard = presets::find("standardwebhooks").expect("a preset");
    let source = with(svix, &RANDOM);
    let mut request = signed(with(standard, &RANDOM).scheme(), &sample(standard));
    assert!(source.scheme().authenticate(&request, now()).is_ok());
    header(&mut request.headers, "svix-id", "another");
    assert!(source.scheme().authenticate(&request, now()).is_err());
}

#[test]
fn late_and_replay_defaults_follow_the_signed_content() {
    for (name, late, guard) in [
        ("stripe", LatePolicy::Reject, ReplayGuard::Off),
        ("standardwebhooks", LatePolicy::Reject, ReplayGuard::Off),
        ("box", LatePolicy::Reject, ReplayGuard::Off),
        ("slack", LatePolicy::Review, ReplayGuard::Off),
        ("zoom", LatePolicy::Review, ReplayGuard::Off),
        ("mailgun", LatePolicy::Review, ReplayGuard::Signed),
        ("github", LatePolicy::Reject, ReplayGuard::Signed),
        ("shopify", LatePolicy::Reject, ReplayGuard::Signed),
        ("twilio", LatePolicy::Reject, ReplayGuard::Signed),
        ("gitlab", LatePolicy::Reject, ReplayGuard::Off),
        ("linear", LatePolicy::Reject, ReplayGuard::Signed),
        ("zendesk", LatePolicy::Review, ReplayGuard::Signed),
        ("sanity", LatePolicy::Review, ReplayGuard::Signed),
        ("dropbox", LatePolicy::Reject, ReplayGuard::Off),
        ("svix", LatePolicy::Reject, ReplayGuard::Off),
        ("square", LatePolicy::Reject, ReplayGuard::Off),
        ("adyen", LatePolicy::Reject, ReplayGuard::Off),
        ("postmark", LatePolicy::Reject, ReplayGuard::Off),
    ] {
        let source = with(presets::find(name).expect("a preset"), &RANDOM);
        assert_eq!(source.late(), late, "{name}");
        assert_eq!(source.replay_guard(), guard, "{name}");
    }
}

#[test]
fn neither_a_source_nor_a_refusal_repeats_a_secret() {
    for preset in signable() {
        let source = with(preset, &RANDOM);
        let secret = preset.secret_from(&RANDOM).expect("a secret");
        let mut shown = format!("{source:?}");
        for request in [sample(preset), signed(with(preset, &OTHER).scheme(), &sample(preset))] {
            if let Err(refusal) = source.scheme().authenticate(&request, now()) {
                shown.push_str(&refusal.to_string());
            }
        }
        assert!(!shown.contains(secret.expose()), "{}", preset.name);
        let shows = preset.scheme().contains("token in") || preset.scheme().contains("Basic");
        assert_eq!(!source.scheme().secret_headers().is_empty(), shows, "{}", preset.name);
    }
}

fn custom(change: impl FnOnce(&mut CustomScheme)) -> CustomScheme {
    let mut scheme = CustomScheme {
        algorithm: Some("hmac-sha256".into()),
        header: Some("X-Webhook-Signature".into()),
        prefix: Some("sha256=".into()),
        encoding: Some("hex".into()),
        content: Some("{timestamp}.{body}".into()),
        timestamp: Some("header:X-Timestamp".into()),
        secret_encoding: Some("utf8".into()),
    };
    change(&mut scheme);
    scheme
}

fn custom_source(scheme: CustomScheme, secret: &str) -> Result<Source, SourceError> {
    let secrets = vec![ActiveSecret::forever(Secret::new(secret))];
    let mut spec = SourceSpec::new("legacy", "custom", secrets);
    spec.custom = Some(scheme);
    spec.envelope.event_id = Some(hapax_core::envelope::IdSpec::Selector("header:X-Id".into()));
    Source::build(spec)
}

fn plain(body: &str) -> Arrival {
    let mut headers = HeaderMap::new();
    header(&mut headers, "x-id", "id-1");
    header(&mut headers, "x-shop", "shop");
    let url = "https://hooks.example.com/webhooks/legacy".to_owned();
    Arrival { method: Method::POST, url, headers, body: Bytes::from(body.to_owned()) }
}

#[test]
fn a_custom_scheme_checks_the_parts_that_its_content_names() {
    let source = custom_source(custom(|_| {}), "secret").expect("builds");
    assert!(source.signs_time());
    let request = signed(source.scheme(), &plain("{}"));
    // Computed with another tool: printf '1767225600.{}' | openssl dgst -sha256 -hmac secret
    let tag = "sha256=fa7eaa06bf97d7815f3f456e97cde70c9e50cb005f01660c8d10b10c21964887";
    assert_eq!(request.header_text("x-webhook-signature").as_deref(), Some(tag));
    assert!(source.scheme().authenticate(&request, now()).is_ok());

    let content = "{method} {url} {header:X-Shop} {id} {timestamp} {body}";
    for (algorithm, encoding, secret_encoding, secret) in [
        ("hmac-sha1", "hex", "hex", "00ff10"),
        ("hmac-sha256", "base64", "base64", "c2VjcmV0"),
        ("hmac-sha512", "hex", "utf8", "secret"),
    ] {
        let scheme = custom(|scheme| {
            scheme.algorithm = Some(algorithm.into());
            scheme.encoding = Some(encoding.into());
            scheme.secret_encoding = Some(secret_encoding.into());
            scheme.content = Some(content.into());
        });
        let source = custom_source(scheme, secret).expect("builds");
        let good = signed(source.scheme(), &plain("{}"));
        let authentic = source.scheme().authenticate(&good, now()).expect("authentic");
        assert_eq!(authentic.signed_at.map(|at| at.as_second()), Some(1_767_225_600));
        for name in ["x-shop", "x-id", "x-timestamp"] {
            let mut bent = good.clone();
            header(&mut bent.headers, name, "1767225601");
            assert!(source.scheme().authenticate(&bent, now()).is_err(), "{name}");
            bent.headers.remove(name);
            assert!(source.scheme().authenticate(&bent, now()).is_err(), "{name}");
            assert_eq!(source.scheme().missing(&bent.headers), Some(name));
        }
        let bent = Arrival { url: "https://elsewhere.example.com".into(), ..good.clone() };
        assert!(source.scheme().authenticate(&bent, now()).is_err());
        let bent = Arrival { method: Method::PUT, ..good.clone() };
        assert!(source.scheme().authenticate(&bent, now()).is_err());
    }

    let timed = custom(|scheme| {
        scheme.content = Some("{body}".into());
        scheme.timestamp = Some("/sent".into());
    });
    let source = custom_source(timed, "secret").expect("builds");
    let good = signed(source.scheme(), &plain(r#"{"a":1}"#));
    let authentic = source.scheme().authenticate(&good, now()).expect("authentic");
    assert_eq!(authentic.signed_at.map(|at| at.as_second()), Some(1_767_225_600));
}

#[test]
fn an_incomplete_custom_scheme_is_an_error_with_a_hint() {
    let check = |hint: &str, change: &dyn Fn(&mut CustomScheme)| {
        let error = custom_source(custom(change), "secret").expect_err(hint);
        assert_eq!(error.field, "scheme", "{hint}");
        let said = format!("{} {}", error.problem, error.hint);
        assert!(said.contains(hint), "{said} does not mention {hint}");
    };
    check("hmac-sha512", &|scheme| scheme.algorithm = Some("md5".into()));
    check("base64", &|scheme| scheme.encoding = Some("base32".into()));
    check("utf8", &|scheme| scheme.secret_encoding = Some("rot13".into()));
    check("header", &|scheme| scheme.header = None);
    check("header", &|scheme| scheme.header = Some("not a header".into()));
    check("{body}", &|scheme| scheme.content = Some("{timestamp}".into()));
    check("{nonce}", &|scheme| scheme.content = Some("{nonce}{body}{timestamp}".into()));
    check("without its }", &|scheme| scheme.content = Some("{timestamp}{body}{id".into()));
    check("unknown", &|scheme| scheme.content = Some("{timestamp}{body}{sorted_url}".into()));
    check("header:x-timestamp", &|scheme| scheme.timestamp = None);
    check("header:x-timestamp", &|scheme| scheme.timestamp = Some("/sent".into()));
    check("{timestamp}", &|scheme| scheme.content = Some("{body}".into()));
    let secrets = vec![ActiveSecret::forever(Secret::new("secret"))];
    let mut spec = SourceSpec::new("legacy", "custom", secrets);
    spec.custom = Some(custom(|scheme| scheme.content = Some("{id}{timestamp}{body}".into())));
    assert!(Source::build(spec.clone()).expect_err("no id").hint.contains("event_id"));
    spec.custom = Some(custom(|scheme| scheme.content = Some("{url}{timestamp}{body}".into())));
    spec.url_known = false;
    assert!(Source::build(spec).expect_err("no url").hint.contains("public_url"));
    assert_eq!(custom_source(custom(|_| {}), " ").expect_err("blank").field, "secrets");
}

fn guard(source: &Source, request: &Arrival) -> Option<ContentGuard> {
    match verify(source, request, now()) {
        Ok(Verified::Events { receipts, .. }) => receipts[0].guard(),
        other => panic!("{}: {other:?}", source.name()),
    }
}

fn key(source: &Source, request: &Arrival) -> String {
    match verify(source, request, now()) {
        Ok(Verified::Events { receipts, .. }) => receipts[0].key().event_id.to_string(),
        other => panic!("{}: {other:?}", source.name()),
    }
}

#[test]
fn a_guard_is_the_hash_of_the_signed_content_and_of_nothing_else() {
    // Unsigned changes of a captured request do not change its guard.
    let mut guarded = Vec::new();
    for preset in signable() {
        let name = preset.name;
        let source = with(preset, &RANDOM);
        let request = signed(source.scheme(), &sample(preset));
        let Some(first) = guard(&source, &request) else { continue };
        // Senders that count their attempts have a guard too, for their copies.
        if preset.counters.is_empty() {
            guarded.push(name);
        }
        let mut changed = request.clone();
        for header_name in ["x-stray", "user-agent", "idempotency-key", "x-request-uuid"] {
            header(&mut changed.headers, header_name, "another");
        }
        assert_eq!(guard(&source, &changed), Some(first), "{name}");
        // Another event has another guard. The same event at another source has another guard too.
        let at = Timestamp::from_second(1_767_225_601).expect("in range");
        let other = sample::event(name, None, &SampleId::made_up("b2", at)).expect("a sample");
        let mut another = sample(preset);
        another.body = Bytes::from(other.body);
        let another = signed(source.scheme(), &another);
        assert_ne!(guard(&source, &another).map(|guard| guard.hash), Some(first.hash), "{name}");
        let mut spec = SourceSpec::new("elsewhere", name, vec![own(preset, &RANDOM)]);
        spec.params = params(preset);
        let elsewhere = Source::build(spec).expect("builds");
        let there = guard(&elsewhere, &request).map(|guard| guard.hash);
        assert_ne!(there, Some(first.hash), "{name}");
        // Two tenants may share a secret, but they never share an event.
        let mut spec = SourceSpec::new(source.name().as_str(), name, vec![own(preset, &RANDOM)]);
        spec.params = params(preset);
        spec.tenant = Tenant::new("another");
        let of_another = Source::build(spec).expect("builds");
        let theirs = guard(&of_another, &request).map(|guard| guard.hash);
        assert_ne!(theirs, Some(first.hash), "{name}");
    }
    assert_eq!(
        guarded,
        [
            "bitbucket",
            "github",
            "linear",
            "mailgun",
            "plivo",
            "razorpay",
            "sanity",
            "shopify",
            "twilio",
            "woocommerce",
            "zendesk"
        ]
    );
}

#[test]
fn mailguns_guard_is_its_token_and_time_and_not_the_event() {
    let mailgun = presets::find("mailgun").expect("a preset");
    let source = with(mailgun, &RANDOM);
    let request = signed(source.scheme(), &sample(mailgun));
    let first = guard(&source, &request).expect("a guard").hash;
    let mut body: serde_json::Value = serde_json::from_slice(&request.body).expect("JSON");
    body["event-data"]["id"] = "another".into();
    body["event-data"]["recipient"] = "another@example.com".into();
    let mut forged = request.clone();
    forged.body = Bytes::from(body.to_string());
    assert_ne!(key(&source, &forged), key(&source, &request));
    assert_eq!(guard(&source, &forged).expect("a guard").hash, first);
    // The same event with another token was signed again.
    let again =
        source.scheme().sign(&sample(mailgun), Some("another token"), now()).expect("signs");
    let again = again.apply(&sample(mailgun)).expect("fits");
    assert_eq!(key(&source, &again), key(&source, &request));
    assert_ne!(guard(&source, &again).expect("a guard").hash, first);
}

#[test]
fn a_signed_time_is_part_of_the_guard() {
    for name in ["linear", "zendesk", "sanity", "mailgun"] {
        let preset = presets::find(name).expect("a preset");
        let source = with(preset, &RANDOM);
        let at = |seconds: i64| {
            let later = Timestamp::from_second(now().as_second() + seconds).expect("in range");
            let signed = source.scheme().sign(&sample(preset), Some("one"), later).expect("signs");
            guard(&source, &signed.apply(&sample(preset)).expect("fits")).expect("a guard")
        };
        assert_eq!(at(0), at(0), "{name}");
        assert_ne!(at(0).hash, at(7).hash, "{name}");
        assert_eq!(at(0).keep, GuardKeep::For(Duration::from_secs(600)), "{name}");
    }
}

#[test]
fn one_order_has_one_guard_for_each_topic_however_that_is_written() {
    for (name, topic) in [("shopify", "x-shopify-topic"), ("woocommerce", "x-wc-webhook-topic")] {
        let preset = presets::find(name).expect("a preset");
        let source = with(preset, &RANDOM);
        let request = signed(source.scheme(), &sample(preset));
        let under = |value: &str| {
            let mut changed = request.clone();
            header(&mut changed.headers, topic, value);
            guard(&source, &changed).expect("a guard").hash
        };
        assert_ne!(under("orders/create"), under("orders/paid"), "{name}");
        assert_eq!(under("orders/create"), under("Orders/CREATE"), "{name}");
        let mut bare = request.clone();
        bare.headers.remove(topic);
        let refused = verify(&source, &bare, now()).expect_err("no topic");
        assert_eq!(refused.reason(), "malformed", "{name}");
        // `hapax sign` adds a topic to a request without one.
        let unsigned = Arrival { headers: HeaderMap::new(), ..sample(preset) };
        assert!(verify(&source, &signed(source.scheme(), &unsigned), now()).is_ok(), "{name}");
    }
}

#[test]
fn a_form_has_one_guard_in_every_spelling() {
    let twilio = "AccountSid=AC1&Body=Hi&CallSid=CA1&From=%2B1&MessageSid=SM1&MessageStatus=sent";
    let plivo = "From=1&MessageUUID=m-1&Status=sent&To=2";
    for (name, form, others) in [
        (
            "twilio",
            twilio,
            vec![
                format!("{twilio}&"),
                format!("&&{twilio}&&&"),
                format!("{twilio}&="),
                twilio.replace("Body=Hi", "%42ody=%48i"),
                twilio.replace("=sent", "=%73ent"),
                "MessageStatus=sent&MessageSid=SM1&From=%2B1&CallSid=CA1&Body=Hi&AccountSid=AC1"
                    .to_owned(),
                format!("{twilio}&CallSid=CA1"),
                twilio.replace("Body=Hi", "BodyH=i"),
            ],
        ),
        (
            "plivo",
            plivo,
            vec![
                format!("{plivo}&"),
                format!("{plivo}&="),
                plivo.replace("Status", "%53tatus"),
                "To=2&Status=sent&MessageUUID=m-1&From=1".to_owned(),
                plivo.replace("To=2", "T=o2"),
            ],
        ),
    ] {
        let preset = presets::find(name).expect("a preset");
        let source = with(preset, &RANDOM);
        let mut request = sample(preset);
        request.headers.remove("i-twilio-idempotency-token");
        request.body = Bytes::from(form.to_owned());
        let request = signed(source.scheme(), &request);
        let (first, id) = (guard(&source, &request), key(&source, &request));
        for other in others {
            let mut changed = request.clone();
            changed.body = Bytes::from(other.clone());
            assert_eq!(guard(&source, &changed), first, "{name} {other}");
            assert_eq!(key(&source, &changed), id, "{name} {other}");
        }
    }
}

#[test]
fn a_request_with_a_shifted_field_boundary_is_refused() {
    let check = |name: &str, form: &str, shifted: &[&str], fine: &[&str]| {
        let preset = presets::find(name).expect("a preset");
        let source = with(preset, &RANDOM);
        let judge = |signed_form: &str, sent: &str| {
            let mut request = sample(preset);
            request.body = Bytes::from(signed_form.to_owned());
            let mut request = signed(source.scheme(), &request);
            request.body = Bytes::from(sent.to_owned());
            verify(&source, &request, now()).map(|_| ()).map_err(|refusal| refusal.reason())
        };
        assert_eq!(judge(form, form), Ok(()), "{name}");
        for moved in shifted {
            assert_eq!(judge(form, moved), Err("malformed"), "{name} {moved}");
        }
        for form in fine {
            assert_eq!(judge(form, form), Ok(()), "{name} {form}");
        }
    };
    check(
        "twilio",
        "AccountSid=AC1&Body=Hi&From=%2B1&MessageSid=SM1&MessageStatus=sent&SmsSid=SM1",
        &[
            "AccountSid=AC1&Body=Hi&From=%2B1&MessageSidS=M1&MessageStatus=sent&SmsSid=SM1",
            "AccountSid=AC1&Body=Hi&From=%2B1MessageSid&SM1MessageStatus=sent&SmsSid=SM1",
            "AccountSi=dAC1&Body=Hi&From=%2B1&MessageSid=SM1&MessageStatus=sent&SmsSid=SM1",
            "AccountSid=AC1&Body=Hi&From=%2B1&MessageSid=SM1&MessageStatusse=nt&SmsSid=SM1",
            "AccountSid=AC1&Body=HiFrom%2B1MessageSidSM1MessageStatussentSmsSidSM1",
        ],
        &[
            // Free text may contain the name of any field.
            "AccountSid=AC1&Body=CallSid+MessageStatus&From=%2B1&MessageSid=SM1",
            "AccountSid=AC1&Payload=%7B%22CallSid%22%3A1%7D&Sid=NO1",
            "AccountSid=AC1&CallSidEndingConference=CA1&ConferenceSid=CF1",
            "DialCallSid=CA2&DialCallStatus=completed&CallSid=CA1&AccountSid=AC1",
            "",
            "a=bc",
        ],
    );
    check(
        "plivo",
        "From=1&MessageUUID=m-1&Status=sent&To=2",
        &["From=1&MessageUUIDm=-1&Status=sent&To=2", "From=1MessageUUIDm-1&Status=sent&To=2"],
        &["CallUUID=c&CallStatus=ringing", "Digits=1"],
    );
}

#[test]
fn the_fields_of_a_form_cannot_be_passed_off_as_the_url_of_another_body() {
    // A chosen value of a field looks like a parameter, and the fields before it like a part of the URL.
    let twilio = presets::find("twilio").expect("a preset");
    let source = with(twilio, &RANDOM);
    let forged = br#"{"MessageSid":"SM2","Body":"pay me"}"#;
    let digest = hex::encode(aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, forged));
    let url = "https://hooks.example.com/webhooks/twilio?x=1";
    for (form, behind) in [
        (format!("AccountSid=AC1&Body=%26bodySHA256%3D{digest}"), String::new()),
        (format!("AccountSid=AC1&Body=%26bodySHA256%3D{digest}%26&To=2"), "&To2".to_owned()),
    ] {
        let mut request = sample(twilio);
        (request.url, request.body) = (url.into(), form.into());
        let mut request = signed(source.scheme(), &request);
        assert!(verify(&source, &request, now()).is_ok());
        request.url = format!("{url}AccountSidAC1Body&bodySHA256={digest}{behind}");
        request.body = forged.to_vec().into();
        for content_type in ["application/json", "application/x-www-form-urlencoded"] {
            request.headers.insert("content-type", content_type.parse().expect("a value"));
            let refused = verify(&source, &request, now());
            assert!(refused.is_err(), "{}: {refused:?}", request.url);
        }
    }
}

#[test]
fn the_end_of_a_value_cannot_move_into_the_nonce() {
    let plivo = presets::find("plivo").expect("a preset");
    let source = with(plivo, &RANDOM);
    let mut request = sample(plivo);
    request.body = "CallUUID=c&TotalCost=0.0085".into();
    request.headers.insert("x-plivo-signature-v3-nonce", "123".parse().expect("a value"));
    let mut request = signed(source.scheme(), &request);
    assert!(verify(&source, &request, now()).is_ok());
    request.body = "CallUUID=c&TotalCost=0".into();
    request.headers.insert("x-plivo-signature-v3-nonce", "0085.123".parse().expect("a value"));
    assert!(verify(&source, &request, now()).is_err());
}

#[test]
fn a_port_in_the_url_makes_no_second_guard() {
    let twilio = presets::find("twilio").expect("a preset");
    let source = with(twilio, &RANDOM);
    let mut request = sample(twilio);
    request.url = "https://hooks.example.com/webhooks/twilio?a=1".into();
    let mut request = signed(source.scheme(), &request);
    let first = guard(&source, &request);
    request.url = "https://hooks.example.com:443/webhooks/twilio?a=1".into();
    assert_eq!(guard(&source, &request), first);
}

#[test]
fn public_keys_of_small_order_and_short_tokens_are_refused() {
    let build = |provider: &str, secret: &str| {
        let secrets = vec![ActiveSecret::forever(Secret::new(secret))];
        Source::build(SourceSpec::new(provider, provider, secrets)).map(|_| ())
    };
    let mut small: Vec<String> = [
        "0000000000000000000000000000000000000000000000000000000000000000",
        "0100000000000000000000000000000000000000000000000000000000000000",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    ]
    .map(str::to_owned)
    .to_vec();
    for key in small.clone() {
        let mut bytes = hex::decode(key).expect("hex");
        bytes[31] |= 0x80;
        small.push(hex::encode(bytes));
    }
    for key in &small {
        let error = build("discord", key).expect_err(key);
        assert!(error.problem.contains("small order"), "{error}");
        let bytes = hex::decode(key).expect("hex");
        let written = base64::engine::general_purpose::STANDARD.encode(bytes);
        assert!(build("telnyx", &written).is_err(), "{key}");
    }
    let good = "0c75bfa80af26d6c2ad69a06b1fbdbb8c284a48e6ab09fd97ab5b57ae45c8855";
    assert_eq!(build("discord", good), Ok(()));
    for (provider, short, long) in [
        ("gitlab", "fifteen-letters", "sixteen--letters"),
        ("cloudevents", "fifteen-letters", "sixteen--letters"),
        ("flutterwave", "fifteen-letters", "sixteen--letters"),
        ("postmark", "postmark:fifteen-letters", "u:sixteen--letters"),
    ] {
        let error = build(provider, short).expect_err(provider);
        assert!(error.problem.contains("16 characters"), "{error}");
        assert_eq!(build(provider, long), Ok(()), "{provider}");
    }
    // The sender chooses the length of a signing secret.
    assert_eq!(build("github", "short"), Ok(()));
}

#[test]
fn a_tenant_is_signed_and_so_is_a_type_that_the_config_names() {
    let build = |provider: &str, change: &dyn Fn(&mut SourceSpec)| {
        let preset = presets::find(provider);
        let secret = match preset {
            Some(preset) => own(preset, &RANDOM),
            None => ActiveSecret::forever(Secret::new("secret")),
        };
        let mut spec = SourceSpec::new("own", provider, vec![secret]);
        spec.params = preset.map(params).unwrap_or_default();
        spec.custom = preset.is_none().then(|| CustomScheme {
            header: Some("x-signature".into()),
            content: Some("{header:x-account}.{timestamp}.{body}".into()),
            timestamp: Some("header:x-timestamp".into()),
            ..CustomScheme::default()
        });
        change(&mut spec);
        Source::build(spec).map(|_| ()).map_err(|error| error.field)
    };
    let tenant = |provider: &str, from: &str| {
        build(provider, &|spec| spec.envelope.tenant_from = Some(from.to_owned()))
    };
    let kind = |provider: &str, from: &str| {
        build(provider, &|spec| spec.envelope.event_type = Some(from.to_owned()))
    };
    for (provider, signed) in [
        ("stripe", "/account"),
        ("custom", "/account"),
        ("custom", "header:x-account"),
        ("hubspot", "query:tenant"),
        ("twilio", "form:AccountSid"),
        ("adyen", "/NotificationRequestItem/merchantAccountCode"),
        ("standardwebhooks", "header:webhook-id"),
    ] {
        assert_eq!(tenant(provider, signed), Ok(()), "{provider} {signed}");
        assert_eq!(kind(provider, signed), Ok(()), "{provider} {signed}");
    }
    for (provider, unsigned) in [
        ("stripe", "header:x-account"),
        ("stripe", "query:account"),
        ("custom", "header:x-other"),
        ("custom", "query:account"),
        ("shopify", "header:x-shopify-shop-domain"),
        ("adyen", "/NotificationRequestItem/additionalData/shop"),
        ("adyen", "outer:/live"),
        ("mailgun", "header:x-account"),
        // The URL is signed, but bytes can move between it and the fields that follow it in the
        // signed text.
        ("twilio", "query:account"),
        ("plivo", "query:account"),
    ] {
        assert_eq!(tenant(provider, unsigned), Err("tenant_from"), "{provider} {unsigned}");
        assert_eq!(kind(provider, unsigned), Err("event_type"), "{provider} {unsigned}");
    }
    for (provider, unsigned) in
        [("mailgun", "/event-data/account"), ("gitlab", "/project"), ("postmark", "/Server")]
    {
        assert_eq!(tenant(provider, unsigned), Err("tenant_from"), "{provider} {unsigned}");
        // No part of such a body is signed, so a configured type is as trustworthy as the preset's.
        assert_eq!(kind(provider, unsigned), Ok(()), "{provider} {unsigned}");
    }
    // Without a signature there is no guard.
    let guard =
        |provider: &str| build(provider, &|spec| spec.replay_guard = Some(ReplayGuard::Signed));
    assert_eq!(guard("gitlab"), Err("replay_guard"));
    assert_eq!(guard("stripe"), Ok(()));
    let items = |provider: &str| build(provider, &|spec| spec.envelope.items = Some("/x".into()));
    assert_eq!(items("mailgun"), Err("items"));
    assert_eq!(items("adyen"), Err("items"));
    assert_eq!(items("stripe"), Ok(()));
}

#[test]
fn an_id_from_an_unsigned_place_of_the_config_is_guarded() {
    let guards = |provider: &str, id: IdSpec| {
        let preset = presets::find(provider).expect("a preset");
        let mut spec = SourceSpec::new("own", provider, vec![own(preset, &RANDOM)]);
        spec.params = params(preset);
        spec.envelope.event_id = Some(id);
        Source::build(spec).expect("builds").replay_guard()
    };
    let hash = |fields: &[&str], within| IdSpec::Hash {
        fields: fields.iter().map(|field| (*field).to_owned()).collect(),
        within,
    };
    let selector = |text: &str| IdSpec::Selector(text.to_owned());
    assert_eq!(guards("stripe", selector("header:x-id")), ReplayGuard::Signed);
    assert_eq!(guards("stripe", selector("query:id")), ReplayGuard::Signed);
    assert_eq!(guards("stripe", hash(&["header:x-id", "/id"], None)), ReplayGuard::Signed);
    assert_eq!(
        guards("stripe", hash(&["/id"], Some(Duration::from_secs(60)))),
        ReplayGuard::Signed
    );
    assert_eq!(guards("stripe", hash(&["/id"], None)), ReplayGuard::Off);
    assert_eq!(guards("stripe", selector("/other")), ReplayGuard::Off);
    assert_eq!(guards("adyen", hash(&["body"], None)), ReplayGuard::Signed);
    // A header that is signed under one set of names is unsigned under the other.
    assert_eq!(guards("svix", selector("header:webhook-id")), ReplayGuard::Signed);
    assert_eq!(guards("gitlab", selector("header:x-id")), ReplayGuard::Off);
}

#[test]
fn events_of_one_body_have_guards_of_their_own() {
    let secrets = vec![ActiveSecret::forever(Secret::new("secret"))];
    let mut spec = SourceSpec::new("own", "custom", secrets);
    spec.custom =
        Some(CustomScheme { header: Some("x-signature".into()), ..CustomScheme::default() });
    spec.envelope.event_id =
        Some(IdSpec::Hash { fields: vec!["header:x-batch".into(), "/n".into()], within: None });
    spec.envelope.items = Some(String::new());
    let source = Source::build(spec).expect("builds");
    let request = Arrival {
        method: Method::POST,
        url: "https://hooks.example.com/webhooks/own".into(),
        headers: HeaderMap::new(),
        body: Bytes::from_static(br#"[{"n":1},{"n":2},{"n":1}]"#),
    };
    let request = signed(source.scheme(), &request);
    let guards = |request: &Arrival| match verify(&source, request, now()) {
        Ok(Verified::Events { receipts, .. }) => {
            receipts.iter().map(|receipt| receipt.guard().expect("a guard").hash).collect()
        }
        other => panic!("{other:?}"),
    };
    let first: Vec<_> = guards(&request);
    assert!(first[0] != first[1] && first[0] != first[2] && first[1] != first[2]);
    let mut changed = request.clone();
    header(&mut changed.headers, "x-batch", "another");
    assert_eq!(guards(&changed), first);
}

#[test]
fn a_late_handshake_is_refused() {
    for (name, body) in [
        ("slack", r#"{"type":"url_verification","challenge":"a"}"#),
        ("zoom", r#"{"event":"endpoint.url_validation","payload":{"plainToken":"a"}}"#),
        ("twitch", r#"{"challenge":"a","subscription":{}}"#),
    ] {
        let preset = presets::find(name).expect("a preset");
        let source = with(preset, &RANDOM);
        let request = Arrival { body: Bytes::from_static(body.as_bytes()), ..sample(preset) };
        let request = signed(source.scheme(), &request);
        let judge = |after: i64| {
            let at = Timestamp::from_second(now().as_second() + after).expect("in range");
            verify(&source, &request, at).map_err(|refusal| refusal.reason())
        };
        assert!(matches!(judge(300), Ok(Verified::Reply(_))), "{name}");
        assert_eq!(judge(301).map(|_| ()), Err("stale"), "{name}");
    }
}
