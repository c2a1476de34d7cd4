//! Sending from the real server: every acknowledged message reaches its endpoints with the same id and the
//! same bytes, signed, through failures and crashes, and nothing secret is printed.

use std::collections::{BTreeMap, BTreeSet};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};

use crate::common::hapax;
use crate::support::ledger::Ledger;
use crate::support::sink::{Got, Sink};
use crate::support::{Answer, House, Lines, Server, until};

/// Endpoints on loopback are allowed; nothing else is configured.
const LOOPBACK: &str = "[outbound]\nallow = [\"127.0.0.0/8\"]\n";

fn house() -> House {
    House::new(LOOPBACK)
}

/// Adds an endpoint with this body, and returns its id and secret.
#[track_caller]
fn add(server: &Server, body: &Value) -> (String, String) {
    let answer = server.admin_post("/api/v1/endpoints", body);
    assert_eq!(answer.status, 201, "{answer:?}");
    let endpoint = answer.json();
    let text = |field: &str| endpoint[field].as_str().unwrap().to_owned();
    (text("id"), text("secret"))
}

fn publish(server: &Server, body: &Value) -> Answer {
    server.admin_post("/api/v1/messages", body)
}

/// Publishes and expects a 202.
#[track_caller]
fn published(server: &Server, body: &Value) -> Value {
    let answer = publish(server, body);
    assert_eq!(answer.status, 202, "{answer:?}");
    answer.json()
}

/// Waits until the only delivery of a message has this status, and returns the delivery.
#[track_caller]
fn delivery_is(server: &Server, message: &str, status: &str) -> Value {
    until(&format!("{message} to be {status}"), || {
        let answer = server.admin_get(&format!("/api/v1/messages/{message}"));
        let found = answer.json()["deliveries"][0].clone();
        (found["status"] == status).then_some(found)
    })
}

// The three lines of the README, with the real commands.
#[test]
fn a_published_message_arrives_at_hapax_listen_and_its_signature_holds() {
    let house = House::without_config();
    let server = house.start();
    let mut listen = Command::new(env!("CARGO_BIN_EXE_hapax"))
        .args(["listen", "--listen", "127.0.0.1:0", "--count", "1"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let said = Lines::of(listen.stdout.take().unwrap());
    let at =
        said.wait_for("listening on ").split("listening on ").nth(1).unwrap().trim().to_owned();
    let secret = said.wait_for("secret ").split("secret ").nth(1).unwrap().trim().to_owned();
    let admin = format!("http://{}", server.admin);
    let url = format!("{at}/in");
    let added = hapax(&["endpoints", "add", &url, "--types", "invoice.*", "--secret", &secret])
        .env("HAPAX_ADMIN", &admin)
        .run();
    assert_eq!(added.code, 0, "{added:?}");
    let none = hapax(&["publish", "order.made"]).env("HAPAX_ADMIN", &admin).run();
    assert!(none.code == 0 && none.stdout.contains("0 deliveries"), "{none:?}");
    let one = hapax(&["publish", "invoice.paid", "--data", "{\"id\":\"inv_1\"}", "--id", "m1"])
        .env("HAPAX_ADMIN", &admin)
        .run();
    assert!(one.code == 0 && one.stdout.contains("m1  1 delivery"), "{one:?}");
    let line = said.wait_for("m1");
    assert!(line.contains("signature ok") && line.contains("answered 200"), "{line}");
    assert!(listen.wait().unwrap().success());
    delivery_is(&server, "m1", "delivered");
    let shown = hapax(&["messages", "show", "m1"]).env("HAPAX_ADMIN", &admin).run();
    assert!(shown.stdout.contains("delivered") && shown.stdout.contains("attempt 1"), "{shown:?}");
    let listed = hapax(&["deliveries", "list"]).env("HAPAX_ADMIN", &admin).run();
    assert!(listed.stdout.contains("m1"), "{listed:?}");
}

// Retries must carry the same id and bytes under a fresh signature, and the history must show each
// attempt.
#[test]
fn a_failing_endpoint_gets_the_same_bytes_again_until_it_accepts() {
    let house = house();
    let server = house.start();
    let sink = Sink::new(|_, before| match before {
        0 => "500 Broken".to_owned(),
        1 => "307 Elsewhere\r\nlocation: http://127.0.0.1:1/".to_owned(),
        _ => "204 Fine".to_owned(),
    });
    let retry = json!(["0s", "0s", "0s", "0s"]);
    let (_, secret) =
        add(&server, &json!({"url": sink.url(), "retry": retry, "headers": {"x-team": "billing"}}));
    // Parsing this body and printing it again would change its numbers and its spaces.
    let body = "{\"type\":\"invoice.paid\",\"id\":\"m1\",\"key\":\"c1\",\"data\":{ \"n\":1e400, \"big\":9007199254740993 }}";
    let answer = server.admin_post_text("/api/v1/messages", body);
    assert_eq!((answer.status, answer.json()["deliveries"].as_u64()), (202, Some(1)), "{answer:?}");
    let delivery = delivery_is(&server, "m1", "delivered");
    let got = sink.wait_for(3);
    assert_eq!(got.len(), 3);
    for each in &got {
        assert_eq!((each.id(), &each.body), ("m1".to_owned(), &got[0].body));
        assert!(each.verifies(&secret), "{each:?}");
        assert_eq!(each.headers["x-team"], "billing");
        assert_eq!(each.headers["idempotency-key"], got[0].headers["idempotency-key"]);
    }
    let text = got[0].text();
    assert!(
        text.contains("\"data\":{ \"n\":1e400, \"big\":9007199254740993 },\"sequence\":"),
        "{text}"
    );
    let attempts = delivery["attempts"].as_array().unwrap();
    let statuses: Vec<_> = attempts.iter().map(|attempt| attempt["status"].as_u64()).collect();
    assert_eq!(statuses, [Some(500), Some(307), Some(204)], "{delivery}");
    assert!(attempts[1]["error"].as_str().unwrap().contains("redirects are not followed"));
    assert_eq!(attempts[0]["answer"], "ok");
}

// The endpoint that gets the reports fails at first too. This endpoint must get each report in the end, and
// no report about itself.
#[test]
fn trouble_of_an_endpoint_is_reported_to_endpoints_of_the_tenant_hapax() {
    let house = house();
    let server = house.start();
    let reports = Sink::new(|_, before| if before == 0 { "500 No" } else { "200 OK" }.to_owned());
    let own = json!({"url": reports.url(), "tenant": "hapax", "types": ["hapax.*"],
                     "retry": ["0s", "0s", "0s"]});
    let (_, secret) = add(&server, &own);
    let gone = Sink::new(|_, before| if before == 0 { "410 Gone" } else { "200 OK" }.to_owned());
    let (endpoint, _) = add(&server, &json!({"url": gone.url(), "types": ["a"], "retry": ["0s"]}));
    published(&server, &json!({"type": "a", "id": "m1", "data": {}}));
    delivery_is(&server, "m1", "dead");
    let reported = |expected: &[&str]| {
        until(&format!("{expected:?}"), || {
            let mut got: BTreeMap<String, (String, Value)> = BTreeMap::new();
            for each in reports.got() {
                assert!(each.verifies(&secret), "{each:?}");
                let body: Value = serde_json::from_str(&each.text()).unwrap();
                assert_eq!(body["data"]["endpoint"], json!(endpoint), "{body}");
                let kind = body["type"].as_str().unwrap().to_owned();
                got.insert(each.id(), (kind, body["data"].clone()));
            }
            let mut kinds: Vec<&str> = got.values().map(|(kind, _)| kind.as_str()).collect();
            kinds.sort_unstable();
            (kinds == expected).then_some(got)
        })
    };
    let got = reported(&["hapax.delivery.dead", "hapax.endpoint.disabled"]);
    for (kind, data) in got.values() {
        match kind.as_str() {
            "hapax.delivery.dead" => assert_eq!(data["count"], 1, "{data}"),
            _disabled => assert!(data["reason"].as_str().unwrap().contains("410"), "{data}"),
        }
    }
    let enabled = server.admin_post(&format!("/api/v1/endpoints/{endpoint}/enable"), &json!({}));
    assert_eq!(enabled.status, 200, "{enabled:?}");
    published(&server, &json!({"type": "a", "id": "m2", "data": {}}));
    delivery_is(&server, "m2", "delivered");
    reported(&["hapax.delivery.dead", "hapax.endpoint.disabled", "hapax.endpoint.recovered"]);
    // A user cannot publish as the tenant `hapax`, or with a type that begins with `hapax.`.
    for body in [
        json!({"type": "a", "tenant": "hapax", "data": {}}),
        json!({"type": "hapax.endpoint.failing", "data": {}}),
    ] {
        let refused = publish(&server, &body);
        assert!(refused.status == 400 && refused.text().contains("reserved"), "{refused:?}");
    }
}

// A dead letter must say why, and a person must be able to send it again.
#[test]
fn a_delivery_that_always_fails_is_a_dead_letter_and_can_be_replayed() {
    let house = house();
    let server = house.start();
    let sink = Sink::new(|_, before| if before < 2 { "503 No" } else { "200 OK" }.to_owned());
    add(&server, &json!({"url": sink.url(), "retry": ["0s", "0s"]}));
    published(&server, &json!({"type": "a", "id": "m1", "data": {}}));
    let dead = delivery_is(&server, "m1", "dead");
    assert!(dead["reason"].as_str().unwrap().contains("503"), "{dead}");
    assert_eq!(server.admin_get("/api/v1/messages?status=dead").json()["items"][0]["id"], "m1");
    let id = dead["id"].as_str().unwrap();
    let replayed = server.admin_post(&format!("/api/v1/deliveries/{id}/replay"), &json!({}));
    assert_eq!(replayed.json()["effect"], "due", "{replayed:?}");
    let done = delivery_is(&server, "m1", "delivered");
    assert_eq!(done["attempts"].as_array().unwrap().len(), 3, "{done}");
    assert_eq!(sink.got().len(), 3);
}

// Nothing of a refused request may remain.
#[test]
fn bad_input_gets_a_clear_answer_and_changes_nothing() {
    let house = house();
    let server = house.start();
    let sink = Sink::accepting();
    let refused = |answer: Answer, status: u16, part: &str| {
        assert_eq!(answer.status, status, "{answer:?}");
        let detail = answer.json()["detail"].as_str().unwrap().to_owned();
        assert!(detail.contains(part), "{detail}");
        assert!(answer.json()["type"].as_str().unwrap().starts_with("urn:hapax:problem:"));
    };
    let endpoint = |body: Value| server.admin_post("/api/v1/endpoints", &body);
    refused(endpoint(json!({})), 400, "url is missing");
    for url in [
        "ftp://a/",
        "http://user@example.com/",
        "http://10.0.0.1/",
        "http://[::ffff:a9fe:a9fe]/",
        "nonsense",
        "http://169.254.169.254/latest",
    ] {
        refused(endpoint(json!({"url": url})), 400, "url");
    }
    let url = sink.url();
    refused(endpoint(json!({"url": url, "headers": {"host": "a"}})), 400, "headers");
    refused(endpoint(json!({"url": url, "headers": {"x": "a\r\nb"}})), 400, "headers");
    refused(endpoint(json!({"url": url, "retry": []})), 400, "retry");
    refused(endpoint(json!({"url": url, "timeout": "2h"})), 400, "timeout");
    refused(endpoint(json!({"url": url, "secret": "whsec_c2hvcnQ="})), 400, "secret");
    refused(endpoint(json!({"url": url, "signing": "rsa"})), 400, "rsa");
    let shared = format!("whsec_{}", "A".repeat(44));
    refused(endpoint(json!({"url": url, "signing": "ed25519", "secret": shared})), 400, "whsk_");
    refused(endpoint(json!({"url": url, "color": "red"})), 400, "color");
    assert_eq!(server.admin_get("/api/v1/endpoints").json()["items"], json!([]));
    let (id, _) = add(&server, &json!({"url": url, "uid": "one"}));
    refused(endpoint(json!({"url": url, "uid": "one"})), 409, "uid");
    let rotate = |body: Value| server.admin_post(&format!("/api/v1/endpoints/{id}/rotate"), &body);
    refused(rotate(json!({"overlap": "-1h"})), 400, "");
    for _ in 0..2 {
        assert_eq!(rotate(json!({"overlap": "1h"})).status, 200);
    }
    refused(rotate(json!({"overlap": "1h"})), 409, "active secrets");
    refused(publish(&server, &json!({"type": "a"})), 400, "data");
    refused(
        publish(&server, &json!({"type": "a", "data": {}, "id": "a.b"})),
        400,
        "id of a message",
    );
    refused(publish(&server, &json!({"type": "hapax.x", "data": {}})), 400, "reserved");
    refused(
        publish(&server, &json!({"type": "a", "data": "x".repeat(1 << 20)})),
        400,
        "the most is",
    );
    assert_eq!(server.admin_get("/api/v1/messages").json()["items"], json!([]));
    published(&server, &json!({"type": "a", "id": "m1", "data": {"n": 1}}));
    let again = published(&server, &json!({"type": "a", "id": "m1", "data": {"n": 1}}));
    assert_eq!(again, json!({"id": "m1", "deliveries": 1, "duplicate": true}));
    refused(
        publish(&server, &json!({"type": "a", "id": "m1", "data": {"n": 2}})),
        409,
        "other content",
    );
    assert!(sink.wait_for(1).iter().all(|got| got.text().contains("\"n\":1")));
}

// During an overlap a receiver may hold either secret, and two rotations in a row leave no gap.
#[test]
fn every_delivery_verifies_with_each_active_secret_through_two_rotations() {
    let house = house();
    let server = house.start();
    let sink = Sink::accepting();
    let (id, first) = add(&server, &json!({"url": sink.url()}));
    let send = |name: &str| {
        published(&server, &json!({"type": "a", "id": name, "data": {}}));
        let all = sink.wait_until(name, |got| got.iter().any(|got| got.id() == name));
        all.into_iter().find(|got| got.id() == name).unwrap()
    };
    let rotate = |overlap: &str| {
        let path = format!("/api/v1/endpoints/{id}/rotate");
        let answer = server.admin_post(&path, &json!({"overlap": overlap}));
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()["secret"].as_str().unwrap().to_owned()
    };
    assert!(send("m1").verifies(&first));
    let second = rotate("1h");
    let got = send("m2");
    assert!(got.verifies(&first) && got.verifies(&second));
    let third = rotate("1h");
    let got = send("m3");
    assert!(got.verifies(&first) && got.verifies(&second) && got.verifies(&third));
    let fourth = rotate("0s");
    let got = send("m4");
    assert!(got.verifies(&fourth) && ![first, second, third].iter().any(|old| got.verifies(old)));
}

#[test]
fn a_disabled_endpoint_holds_its_deliveries_and_a_removed_one_cancels_them() {
    let house = house();
    let server = house.start();
    let sink = Sink::accepting();
    let (id, _) = add(&server, &json!({"url": sink.url()}));
    let act = |act: &str| {
        server
            .admin_post(&format!("/api/v1/endpoints/{id}/{act}"), &json!({"reason": "maintenance"}))
    };
    assert_eq!(act("disable").json()["status"], "disabled");
    published(&server, &json!({"type": "a", "id": "m1", "data": {}}));
    let held = delivery_is(&server, "m1", "held");
    assert!(held["reason"].as_str().unwrap().contains("maintenance"), "{held}");
    let ping = act("ping").json();
    assert!(ping["ok"] == true && ping["status"] == 200, "{ping}");
    assert_eq!(act("enable").json()["status"], "active");
    delivery_is(&server, "m1", "delivered");
    assert_eq!(sink.got().iter().filter(|got| got.id() == "m1").count(), 1);
    act("disable");
    published(&server, &json!({"type": "a", "id": "m2", "data": {}}));
    let removed = server.admin_request("DELETE", &format!("/api/v1/endpoints/{id}"), None);
    assert_eq!(removed.status, 200, "{removed:?}");
    delivery_is(&server, "m2", "cancelled");
    assert_eq!(server.admin_get(&format!("/api/v1/endpoints/{id}")).status, 404);
    assert!(sink.got().iter().all(|got| got.id() != "m2"));
}

// A secret must not be in the log, in any later answer, or in the files of the data directory.
#[test]
fn secrets_are_shown_once_and_stored_sealed() {
    let house = house();
    let server = house.start();
    let sink = Sink::accepting();
    let body = json!({"url": sink.url(), "headers": {"authorization": "Bearer canary-header"}});
    let (id, secret) = add(&server, &body);
    published(&server, &json!({"type": "a", "id": "m1", "data": {}}));
    assert_eq!(sink.wait_for(1)[0].headers["authorization"], "Bearer canary-header");
    let key = secret.strip_prefix("whsec_").unwrap();
    let raw = base64_decoded(key);
    let mut seen = String::new();
    for path in
        ["/api/v1/endpoints", &format!("/api/v1/endpoints/{id}"), "/api/v1/deliveries", "/metrics"]
    {
        seen += &server.admin_get(path).text();
    }
    seen += &server.stop();
    assert!(!seen.contains(key) && !seen.contains("canary-header"));
    for entry in std::fs::read_dir(house.database().parent().unwrap()).unwrap() {
        let path = entry.unwrap().path();
        let bytes = std::fs::read(&path).unwrap_or_default();
        let holds = |part: &[u8]| bytes.windows(part.len()).any(|window| window == part);
        assert!(!holds(key.as_bytes()) && !holds(&raw) && !holds(b"canary-header"), "{path:?}");
    }
}

fn base64_decoded(text: &str) -> Vec<u8> {
    use base64::Engine as _;
    base64::prelude::BASE64_STANDARD.decode(text).unwrap()
}

// A crash between publish, claim, request and outcome must lose nothing and change no byte.
#[test]
fn every_acknowledged_message_arrives_through_sigkills() {
    let house = house();
    let sink =
        Sink::new(|_, before| if before % 7 == 3 { "500 Broken" } else { "200 OK" }.to_owned());
    let mut acked = BTreeMap::new();
    let mut server = house.start();
    let retry: Vec<&str> = ["0s"; 50].to_vec();
    let (_, secret) = add(&server, &json!({"url": sink.url(), "retry": retry}));
    for round in 0..8 {
        for n in 0..25 {
            let id = format!("m{round}_{n}");
            let data = format!("{{ \"n\": {n}, \"round\":{round}}}");
            let body = format!("{{\"type\":\"a\",\"id\":\"{id}\",\"data\":{data}}}");
            let answer = server.admin_post_text("/api/v1/messages", &body);
            assert_eq!(answer.status, 202, "{answer:?}");
            acked.insert(id, data);
        }
        // The kill comes while deliveries are under way.
        sink.wait_for(round * 25 + 3);
        server.kill();
        server = house.start();
    }
    let arrived = sink.wait_until("every message", |got| {
        let ids: BTreeSet<String> = got.iter().map(Got::id).collect();
        ids.len() == acked.len()
    });
    let mut bodies: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    for got in &arrived {
        assert!(got.verifies(&secret), "{got:?}");
        assert!(got.text().contains(&format!("\"data\":{}", acked[&got.id()])), "{got:?}");
        let first = bodies.entry(got.id()).or_insert_with(|| got.body.clone());
        assert_eq!(first, &got.body, "{}", got.id());
    }
    for id in acked.keys() {
        delivery_is(&server, id, "delivered");
    }
}

// A plan is stored as a row, and the process is killed while the plan runs. The plan must neither take a
// delivery twice nor leave one out.
#[test]
fn a_plan_goes_on_after_a_sigkill_and_takes_each_delivery_once() {
    const DEAD: usize = 60;
    let house = house();
    let mut server = house.start();
    let is_down = Arc::new(AtomicBool::new(true));
    let sink = {
        let is_down = Arc::clone(&is_down);
        Sink::new(move |_, _| {
            // The endpoint refuses each delivery for good, because repeated failures would open its
            // circuit.
            let refused = "400 No\r\nwebhook-delivery: abort-message";
            if is_down.load(Ordering::SeqCst) { refused } else { "200 OK" }.to_owned()
        })
    };
    let (id, _) = add(&server, &json!({"url": sink.url(), "retry": ["0s"]}));
    for n in 0..DEAD {
        published(&server, &json!({"type": "a", "id": format!("m{n}"), "data": {}}));
    }
    let path = format!("/api/v1/endpoints/{id}/replay");
    let dead = json!({"status": "dead", "since": "1h", "dry_run": true});
    until("every delivery to be dead", || {
        let counted = server.admin_post(&path, &dead).json();
        (counted == json!({"id": null, "count": DEAD})).then_some(())
    });
    is_down.store(false, Ordering::SeqCst);
    let plan = json!({"status": "dead", "since": "1h", "rate": 40, "reason": "the outage"});
    let planned = server.admin_post(&path, &plan);
    assert_eq!((planned.status, planned.json()["count"].as_u64()), (200, Some(DEAD as u64)));
    let plan = planned.json()["id"].as_str().unwrap().to_owned();
    let progress = |server: &Server| server.admin_get(&format!("/api/v1/replays/{plan}")).json();
    for part in [DEAD / 6, DEAD / 2] {
        until("a part of the plan", || {
            let done = progress(&server)["done"].as_u64().unwrap() as usize;
            (done >= part).then_some(())
        });
        server.kill();
        server = house.start();
    }
    let ended = until("the plan to end", || {
        let plan = progress(&server);
        (plan["state"] == "done").then_some(plan)
    });
    assert_eq!((ended["total"].as_u64(), ended["done"].as_u64()), (Some(60), Some(60)), "{ended}");
    for n in 0..DEAD {
        let delivery = delivery_is(&server, &format!("m{n}"), "delivered");
        let actions = delivery["actions"].as_array().unwrap();
        assert_eq!(actions.len(), 1, "{delivery}");
        assert_eq!(
            (&actions[0]["action"], &actions[0]["reason"]),
            (&json!("replay"), &json!("the outage"))
        );
    }
    // Cancelling a finished plan leaves it done, and a plan that does not exist is not found.
    let cancelled = server.admin_post(&format!("/api/v1/replays/{plan}/cancel"), &json!({}));
    assert_eq!(cancelled.json()["state"], "done");
    let unknown = "/api/v1/replays/01958d0e-0000-7000-8000-000000000001";
    assert_eq!(server.admin_get(unknown).status, 404);
    let wrong = json!({"status": "dead", "since": "1h", "rate": 0});
    assert_eq!(server.admin_post(&path, &wrong).status, 400);
    let admin = format!("http://{}", server.admin);
    let listed = hapax(&["replays", "list"]).env("HAPAX_ADMIN", &admin).run();
    assert!(listed.stdout.contains("done  60 of 60 sent, 0 skipped at 40 a second"), "{listed:?}");
    let missing =
        hapax(&["endpoints", "replay", &id, "--status", "missing", "--since", "1h", "--dry-run"])
            .env("HAPAX_ADMIN", &admin)
            .run();
    assert_eq!(missing.stdout.trim(), "0 deliveries", "{missing:?}");
}

// A handler publishes with its own commit: a failed attempt must publish nothing, and a successful one
// must publish once.
#[test]
fn a_message_of_an_sql_handler_is_delivered_once_its_effects_are_committed() {
    let house = House::new(&format!(
        "{LOOPBACK}\n[sources.shop]\nprovider = \"standardwebhooks\"\nsecrets = [\"{SHOP_SECRET}\"]\n\
         [sources.shop.handlers.fee]\nretry = [\"0s\", \"0s\"]\nsql = \"\"\"\n\
         INSERT INTO ledger VALUES (:event_id, 'fee', :attempt);\n\
         INSERT INTO hapax_publish (type, data, id) VALUES ('fee.charged', json_object('event', :event_id), 'fee-' || :event_id);\n\
         SELECT CASE WHEN :attempt = 1 THEN json('not json') ELSE 'ok' END;\n\"\"\"\n"
    ));
    let ledger = Ledger::create(&house, crate::support::ledger::SCHEMA);
    let server = house.start();
    let sink = Sink::accepting();
    let (_, secret) = add(&server, &json!({"url": sink.url(), "types": ["fee.*"]}));
    let to = format!("http://{}/webhooks/shop", server.ingress);
    let sent =
        hapax(&["send", "standardwebhooks", "--to", &to, "--secret", SHOP_SECRET, "--id", "evt1"])
            .run();
    assert_eq!(sent.code, 0, "{sent:?}");
    let got = sink.wait_for(1);
    assert_eq!((got[0].id().as_str(), got[0].verifies(&secret)), ("fee-evt1", true));
    assert!(got[0].text().contains("\"data\":{\"event\":\"evt1\"}"), "{}", got[0].text());
    delivery_is(&server, "fee-evt1", "delivered");
    assert_eq!(ledger.effects().get("evt1"), Some(&1));
    assert_eq!(sink.got().len(), 1);
    let event = server.admin_get("/api/v1/events/evt1").json();
    assert_eq!(event["messages"][0]["id"], "fee-evt1", "{event}");
}

const SHOP_SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
