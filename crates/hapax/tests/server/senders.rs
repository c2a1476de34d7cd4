//! The needs of particular senders: handshakes, late events, suspected replays, bodies with several
//! events, and keys made of fields.

use crate::support::sender::{event, now};
use crate::support::{Answer, House, Sender, Server};
use hapax_core::envelope::{EnvelopeSpec, IdSpec};
use hapax_core::scheme::CustomScheme;
use hapax_core::secret::{ActiveSecret, Secret};
use hapax_core::source::SourceSpec;
use serde_json::{Value, json};

fn source(name: &str, more: &str) -> String {
    format!(
        "[sources.{name}]\nprovider = \"{name}\"\nsecrets = [\"secret of {name}\"]\n\
         unverified_limit = \"off\"\n{more}"
    )
}

fn sender(name: &str) -> Sender {
    Sender::new(name, &format!("secret of {name}"), &format!("/webhooks/{name}"))
}

/// A custom source that signs the body alone, and its sender.
fn custom(name: &str, more: &str) -> String {
    format!(
        "[sources.{name}]\nprovider = \"custom\"\nsecrets = [\"secret of {name}\"]\n\
         unverified_limit = \"off\"\nreplay_guard = \"off\"\n{more}\n\
         [sources.{name}.scheme]\nheader = \"x-signature\"\n"
    )
}

fn custom_sender(name: &str) -> Sender {
    let secrets = vec![ActiveSecret::forever(Secret::new(format!("secret of {name}")))];
    let mut spec = SourceSpec::new(name, "custom", secrets);
    spec.custom =
        Some(CustomScheme { header: Some("x-signature".into()), ..CustomScheme::default() });
    spec.envelope =
        EnvelopeSpec { event_id: Some(IdSpec::Selector("/id".into())), ..EnvelopeSpec::default() };
    Sender::of(spec, &format!("/webhooks/{name}"))
}

fn get(server: &Server, target: &str) -> Answer {
    server.ask(format!("GET {target} HTTP/1.1\r\nhost: a\r\n\r\n"))
}

#[test]
fn each_handshake_is_answered_as_its_provider_requires_and_stores_nothing() {
    let house = House::new(
        &[
            source("slack", ""),
            source("meta", "params = { verify_token = \"the token\" }\n"),
            source("zoom", ""),
            source("twitch", ""),
            source("dropbox", ""),
            source("x", ""),
            source("xero", ""),
            source("stripe", ""),
            custom("legacy", "event_id = \"/id\""),
        ]
        .concat(),
    );
    let server = house.start();

    let body = r#"{"token":"t","challenge":"3eZbrw1aBm2r","type":"url_verification"}"#;
    let slack = sender("slack").request(body);
    let answer = server.ask(slack.bytes());
    assert_eq!((answer.status, answer.text().as_str()), (200, "3eZbrw1aBm2r"), "{answer:?}");
    assert_eq!(answer.header("content-type"), Some("text/plain"));
    assert!(answer.header("hapax-request-id").is_some());
    let forged = slack.clone().instead("x-slack-signature", &format!("v0={}", "0".repeat(64)));
    assert_eq!(server.ask(forged.bytes()).status, 401);
    let stale = sender("slack").request_at(body, now() + 86_400);
    assert_eq!(server.ask(stale.bytes()).status, 401);

    let meta = "/webhooks/meta?hub.mode=subscribe&hub.challenge=1158201444&hub.verify_token=";
    let answer = get(&server, &format!("{meta}the%20token"));
    assert_eq!((answer.status, answer.text().as_str()), (200, "1158201444"), "{answer:?}");
    for wrong in ["", "another", "the%20token%20"] {
        let answer = get(&server, &format!("{meta}{wrong}"));
        assert_eq!(answer.status, 403, "{wrong}: {answer:?}");
        assert!(!answer.text().contains("1158201444"));
    }

    let body = r#"{"event":"endpoint.url_validation","event_ts":1,"payload":{"plainToken":"foo"}}"#;
    let answer = server.ask(sender("zoom").request(body).bytes());
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(answer.json()["plainToken"], "foo");
    let key = aws_lc_rs::hmac::Key::new(aws_lc_rs::hmac::HMAC_SHA256, b"secret of zoom");
    let expected = hex::encode(aws_lc_rs::hmac::sign(&key, b"foo"));
    assert_eq!(answer.json()["encryptedToken"], expected);

    let kind = ("twitch-eventsub-message-type", "webhook_callback_verification");
    let body = r#"{"challenge":"pogchamp-kappa","subscription":{"type":"channel.follow"}}"#;
    let twitch = sender("twitch").request_with(body, now(), &[kind]);
    let answer = server.ask(twitch.bytes());
    assert_eq!((answer.status, answer.text().as_str()), (200, "pogchamp-kappa"), "{answer:?}");
    assert_eq!(server.ask(twitch.body(body.replace("pog", "dog")).bytes()).status, 401);

    let answer = get(&server, "/webhooks/dropbox?challenge=abc123");
    assert_eq!((answer.status, answer.text().as_str()), (200, "abc123"), "{answer:?}");
    assert_eq!(answer.header("x-content-type-options"), Some("nosniff"));
    assert_eq!(answer.header("content-type"), Some("text/plain"));
    assert_eq!(get(&server, "/webhooks/dropbox").status, 400);

    let answer = get(&server, "/webhooks/x?crc_token=foo");
    assert_eq!(answer.status, 200, "{answer:?}");
    let token = answer.json()["response_token"].as_str().unwrap().to_owned();
    assert!(token.starts_with("sha256=") && token.len() == 51, "{token}");

    let intent = r#"{"events":[],"firstEventSequence":0,"lastEventSequence":0,"entropy":"S0m3"}"#;
    let xero = sender("xero").request(intent);
    let answer = server.ask(xero.bytes());
    assert_eq!((answer.status, answer.body.len()), (200, 0), "{answer:?}");
    assert_eq!(server.ask(xero.instead("x-xero-signature", "AAAA").bytes()).status, 401);

    let options = |name: &str, headers: &str| {
        server.ask(format!("OPTIONS /webhooks/{name} HTTP/1.1\r\nhost: a\r\n{headers}\r\n"))
    };
    let asked = "webhook-request-origin: eventemitter.example.com\r\nwebhook-request-rate: 120\r\n";
    let answer = options("legacy", asked);
    assert_eq!(answer.status, 200, "{answer:?}");
    let allowed = answer.header("webhook-allowed-origin");
    assert_eq!(allowed, Some("eventemitter.example.com"), "{answer:?}");
    assert_eq!(answer.header("webhook-allowed-rate"), Some("120"));
    assert_eq!(options("legacy", "").status, 405);
    assert_eq!(options("stripe", asked).status, 405);

    // A handshake of one sender has no meaning at the path of another.
    for target in ["/webhooks/stripe?challenge=1", "/webhooks/slack?crc_token=1", "/webhooks/zoom"]
    {
        assert_eq!(get(&server, target).status, 405, "{target}");
    }
    assert_eq!(server.events("").len(), 0);
}

#[test]
fn senders_that_need_an_empty_or_a_plain_200_get_it() {
    let house = House::new(&[source("xero", ""), source("mailgun", "")].concat());
    let server = house.start();
    let body = json!({ "events": [
        { "resourceId": "r1", "tenantId": "t", "eventCategory": "INVOICE", "eventType": "UPDATE",
          "eventDateUtc": "2026-01-01T00:00:00.000" },
        { "resourceId": "r2", "tenantId": "t", "eventCategory": "INVOICE", "eventType": "UPDATE",
          "eventDateUtc": "2026-01-01T00:00:00.000" },
    ], "firstEventSequence": 1, "lastEventSequence": 2, "entropy": "S0m3" });
    let request = sender("xero").request(body.to_string()).bytes();
    for decision in ["accepted", "duplicate"] {
        let answer = server.ask(&request);
        assert_eq!((answer.status, answer.body.len()), (200, 0), "{answer:?}");
        assert_eq!(answer.header("hapax-decision"), Some(decision));
    }
    assert_eq!(server.events("source=xero").len(), 2);

    let body = r#"{"signature":{},"event-data":{"id":"ev-1","event":"delivered","timestamp":1}}"#;
    let late = server.ask(sender("mailgun").request_at(body, now() - 86_400 * 30).bytes());
    assert_eq!(late.status, 200, "{late:?}");
    assert_eq!(late.header("hapax-decision"), Some("review"), "{late:?}");
}

#[test]
fn a_late_event_waits_for_review_and_an_on_time_copy_takes_it_out() {
    let house = House::new(&source("slack", ""));
    let server = house.start();
    let body = r#"{"event_id":"Ev1","type":"event_callback","event":{"type":"message"}}"#;
    let slack = sender("slack");
    let late = || slack.request_at(body, now() - 3_600).bytes();
    let first = server.ask(late());
    first.is("review");
    let again = server.ask(late());
    again.is("duplicate");
    assert_eq!((again.id(), &again.json()["status"]), (first.id(), &"review".into()));
    let waiting = server.events("status=review");
    assert_eq!(waiting.len(), 1);
    assert_eq!((&waiting[0]["id"], &waiting[0]["review"]), (&first.id().into(), &"late".into()));

    // Many on-time copies arrive at once: one of them releases the event from review.
    let decisions: Vec<String> = std::thread::scope(|scope| {
        let copies: Vec<_> =
            (0..8).map(|_| scope.spawn(|| server.ask(slack.request(body).bytes()))).collect();
        let answers = copies.into_iter().map(|copy| copy.join().unwrap());
        answers
            .map(|answer| {
                assert_eq!((answer.status, answer.id()), (200, first.id()), "{answer:?}");
                answer.decision()
            })
            .collect()
    });
    assert_eq!(
        decisions.iter().filter(|decision| *decision == "accepted").count(),
        1,
        "{decisions:?}"
    );
    assert!(server.events("status=review").is_empty());
    server.ask(late()).is("duplicate");
    server.kill();
    let server = house.start();
    assert!(server.events("status=review").is_empty());
    server.ask(slack.request(body).bytes()).is("duplicate");
}

#[test]
fn a_late_event_of_a_sender_that_signs_afresh_is_refused_and_counted() {
    let house = House::new(&source("stripe", ""));
    let server = house.start();
    let stripe = sender("stripe");
    let late = || server.ask(stripe.request_at(event("evt_1"), now() - 3_600).bytes()).status;
    let counted =
        |reason: &str| server.metric("hapax_rejections_total", &[&format!("reason=\"{reason}\"")]);
    assert_eq!(late(), 401);
    assert_eq!((counted("stale_unseen"), counted("stale")), (1.0, 0.0));
    assert_eq!(server.events("").len(), 0);
    server.stderr.wait_for("it may be a lost event");
    server.ask(stripe.event("evt_1")).is("accepted");
    assert_eq!(late(), 401);
    assert_eq!((counted("stale_unseen"), counted("stale")), (1.0, 1.0));
}

#[test]
fn the_same_bytes_under_another_unsigned_id_wait_for_review() {
    // GitHub signs only the body: an attacker with one captured request can send it under any id.
    let house = House::new(&source("github", ""));
    let server = house.start();
    let push = |id: &str, body: &str| {
        let headers = [("x-github-delivery", id), ("x-github-event", "push")];
        server.ask(sender("github").request_with(body, now(), &headers).bytes())
    };
    let first = push("delivery-1", r#"{"after":"abc"}"#);
    first.is("accepted");
    push("delivery-1", r#"{"after":"abc"}"#).is("duplicate");
    let replay = push("delivery-2", r#"{"after":"abc"}"#);
    replay.is("review");
    assert_ne!(replay.id(), first.id());
    push("delivery-2", r#"{"after":"abc"}"#).is("duplicate");
    push("delivery-3", r#"{"after":"def"}"#).is("accepted");
    let waiting = server.events("status=review");
    assert_eq!(waiting.len(), 1, "{waiting:?}");
    assert_eq!(waiting[0]["review"], "replay");
    server.kill();
    let server = house.start();
    let headers = [("x-github-delivery", "delivery-4"), ("x-github-event", "push")];
    let request = sender("github").request_with(r#"{"after":"abc"}"#, now(), &headers);
    server.ask(request.bytes()).is("review");
}

#[test]
fn a_body_with_several_events_is_one_commit_and_each_is_recognised_alone() {
    let house = House::new(&custom(
        "batch",
        "event_id = \"/id\"\nevent_type = \"/event\"\nitems = \"/events\"",
    ));
    let server = house.start();
    let batch = custom_sender("batch");
    let item = |id: &str| json!({ "id": id, "event": "open", "n": 1 });
    let send = |items: Vec<Value>| {
        server.ask(batch.request(json!({ "events": items }).to_string()).bytes())
    };
    let decisions = |answer: &Answer| -> Vec<String> {
        let items = answer.json()["items"].as_array().unwrap().clone();
        items.iter().map(|item| item["decision"].as_str().unwrap().to_owned()).collect()
    };
    let first = send(vec![item("a"), item("b")]);
    first.is("accepted");
    assert_eq!(decisions(&first), ["accepted", "accepted"]);
    let mixed = send(vec![item("b"), item("c"), item("c")]);
    mixed.is("accepted");
    assert_eq!(decisions(&mixed), ["duplicate", "accepted", "duplicate"]);
    assert_eq!(mixed.json()["items"][0]["id"], first.json()["items"][1]["id"]);
    assert_eq!(mixed.json()["items"][1]["id"], mixed.json()["items"][2]["id"]);
    let known = send(vec![item("c"), item("a")]);
    known.is("duplicate");
    assert_eq!(server.events("").len(), 3);

    // One malformed event refuses the whole body.
    for bad in [json!({ "event": "open" }), json!({ "id": 1.5 }), json!("x"), Value::Null] {
        let answer = send(vec![item("d"), bad.clone(), item("e")]);
        assert_eq!(answer.status, 400, "{bad}: {answer:?}");
    }
    assert_eq!(send((0..1_001).map(|n| item(&format!("many_{n}"))).collect()).status, 400);
    assert_eq!(server.events("").len(), 3);
    let many = send((0..1_000).map(|n| item(&format!("many_{n}"))).collect());
    many.is("accepted");
    assert_eq!(server.events("").len(), 1_003);
    server.kill();
    let server = house.start();
    assert_eq!(server.events("").len(), 1_003);
}

#[test]
fn the_tenant_is_a_field_of_the_signed_body_where_the_source_says_so() {
    let house = House::new(&custom("shared", "event_id = \"/id\"\ntenant_from = \"/account\""));
    let server = house.start();
    let shared = custom_sender("shared");
    let send = |body: &str| server.ask(shared.request(body).bytes());
    let a = send(r#"{"id":"1","account":"acct_a"}"#);
    let b = send(r#"{"id":"1","account":"acct_b"}"#);
    a.is("accepted");
    b.is("accepted");
    assert_ne!(a.id(), b.id());
    send(r#"{"id":"1","account":"acct_a"}"#).is("duplicate");
    for bad in [
        r#"{"id":"1"}"#,
        r#"{"id":"1","account":""}"#,
        r#"{"id":"1","account":null}"#,
        r#"{"id":"1","account":{"x":1}}"#,
        r#"{"id":"1","account":"acct_a","account":"acct_b"}"#,
        r#"{"id":"1","account":"a\u0000b"}"#,
    ] {
        assert_eq!(send(bad).status, 400, "{bad}");
    }
    assert_eq!(server.events("tenant=acct_a").len(), 1);
    assert_eq!(server.events("").len(), 2);
}

#[test]
fn an_event_without_an_id_is_known_by_its_stable_fields() {
    let house = House::new(&custom(
        "fields",
        "event_id = { hash = [\"/type\", \"/data/id\"], within = \"10m\" }",
    ));
    let server = house.start();
    let fields = custom_sender("fields");
    let send = |body: &str| server.ask(fields.request(body).bytes());
    let first = send(r#"{"type":"t","data":{"id":1},"n":1}"#);
    first.is("accepted");
    send(r#"{"type":"t","data":{"id":1},"n":1}"#).is("duplicate");
    send(r#"{"type":"t","data":{"id":2},"n":1}"#).is("accepted");
    send(r#"{"type":"u","data":{"id":1},"n":1}"#).is("accepted");
    // Adjacent parts must not be confused.
    send(r#"{"type":"t1","data":{"id":""},"n":1}"#);
    let other = send(r#"{"type":"t","data":{"id":1},"n":2}"#);
    other.is("review");
    assert_ne!(other.id(), first.id());
    send(r#"{"type":"t","data":{"id":1},"n":2}"#).is("duplicate");
    let waiting = server.events("status=review");
    assert_eq!(waiting.len(), 1, "{waiting:?}");
    assert_eq!(waiting[0]["review"], "conflict");
}

// The server cannot connect to the Internet. A request whose key cannot be fetched must not be
// decided, and a forged address is refused without a fetch.
#[test]
fn without_the_key_of_its_sender_a_request_gets_a_503_and_with_a_forged_address_a_401() {
    let closed = hapax_sim::free_port();
    let config = format!(
        "[outbound]\nproxy = \"http://127.0.0.1:{closed}\"\n\
         [sources.paypal]\nprovider = \"paypal\"\nparams = {{ webhook_id = \"WH-1\" }}\n"
    );
    let house = House::new(&config);
    let server = house.start();
    let ask = |certificate: &str| {
        server.ask(format!(
            "POST /webhooks/paypal HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n\
             paypal-transmission-id: t\r\npaypal-transmission-time: 2026-01-01T00:00:11Z\r\n\
             paypal-transmission-sig: AAAA\r\npaypal-auth-algo: SHA256withRSA\r\n\
             paypal-cert-url: {certificate}\r\ncontent-length: 2\r\n\r\n{{}}"
        ))
    };
    let later = ask("https://api.paypal.com/v1/notifications/certs/CERT-1");
    assert_eq!(later.status, 503, "{later:?}");
    assert!(later.header("retry-after").is_some(), "{later:?}");
    let forged = ask(&format!("https://127.0.0.1:{closed}/v1/notifications/certs/CERT-1"));
    assert_eq!(forged.status, 401, "{forged:?}");
    let log = server.stop();
    assert!(log.contains("could not fetch the certificate CERT-1 of paypal"), "{log}");
}
