//! The key of the vault is replaced while the server runs: deliveries and tenants continue, stored values
//! move to the new key, and doctor says when the old one can go.

use serde_json::{Value, json};

use crate::common::hapax;
use crate::support::sink::Sink;
use crate::support::{House, Sender, Server, until};

const ONE: &str = "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=";
const TWO: &str = "YWJjZGVmZ2hpamtsbW5vcHFyc3R1dnd4eXphYmNkZWY=";
const TAKEN: &str = "reloaded configuration and secrets";
const REFUSED: &str = "the new configuration is invalid, the server keeps the old one";

fn config(vault: &str) -> String {
    format!(
        "[outbound]\nallow = [\"127.0.0.0/8\"]\n\
         [sources.stripe]\nprovider = \"stripe\"\nsecrets = [\"whsec_in_the_config\"]\n[vault]\n{vault}"
    )
}

#[track_caller]
fn reload(house: &House, server: &Server, vault: &str, expected: &str) {
    let before = server.stderr.text().matches(expected).count();
    house.configure(&config(vault));
    server.signal("HUP");
    until(expected, || (server.stderr.text().matches(expected).count() > before).then_some(()));
}

/// The exit code of `hapax doctor`, and its lines about the vault.
fn doctor(house: &House) -> (i32, String) {
    let file = house.config_file();
    let run = hapax(&["doctor", "--json", "--config", file.to_str().unwrap(), "--data-dir"])
        .args(&[house.database().parent().unwrap().to_str().unwrap()])
        .run();
    let lines = run.stdout.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let notes = lines.filter(|line| line["check"] == "vault").map(|line| line["note"].to_string());
    (run.code, notes.collect::<Vec<_>>().join("\n"))
}

#[test]
fn the_key_of_the_vault_is_replaced_while_deliveries_go_on() {
    let house = House::new(&config(&format!("key = \"{ONE}\"\n")));
    let server = house.start();
    let sink = Sink::accepting();
    let endpoint = json!({"url": sink.url(), "headers": {"x-team": "billing"}});
    let added = server.admin_post("/api/v1/endpoints", &endpoint);
    assert_eq!(added.status, 201, "{added:?}");
    let secret = added.json()["secret"].as_str().unwrap().to_owned();
    let path = "/api/v1/tenants/acme/sources/stripe/secrets";
    let body = json!({"secrets": [{"value": "whsec_acme"}]});
    assert_eq!(server.admin_request("PUT", path, Some(&body)).status, 200);
    let acme = Sender::new("stripe", "whsec_acme", "/webhooks/acme/stripe");
    let mut sent = 0;
    let mut all_goes_on = |server: &Server| {
        sent += 1;
        let id = format!("m{sent}");
        let message = json!({"type": "a", "id": id, "data": {}});
        assert_eq!(server.admin_post("/api/v1/messages", &message).status, 202);
        let got = sink.wait_for(sent);
        let got = got.iter().find(|got| got.id() == id).unwrap();
        assert!(got.verifies(&secret) && got.headers["x-team"] == "billing");
        server.ask(acme.event(&format!("evt_{sent}"))).is("accepted");
    };
    all_goes_on(&server);

    // A key that stored values need cannot be dropped, and `key` and `old` must differ.
    reload(&house, &server, &format!("key = \"{TWO}\"\n"), REFUSED);
    reload(&house, &server, &format!("key = \"{ONE}\"\nold = [\"{ONE}\"]\n"), REFUSED);
    reload(&house, &server, "key = \"short\"\n", REFUSED);
    all_goes_on(&server);
    let said = server.stderr.text();
    assert!(said.contains("which stored values need"), "{said}");
    assert!(!said.contains(ONE) && !said.contains(TWO), "{said}");

    // The new key is added first. Then `key` and `old` are swapped.
    reload(&house, &server, &format!("key = \"{ONE}\"\nold = [\"{TWO}\"]\n"), TAKEN);
    all_goes_on(&server);
    let (_, notes) = doctor(&house);
    assert!(notes.contains("can be removed"), "{notes}");
    reload(&house, &server, &format!("key = \"{TWO}\"\nold = [\"{ONE}\"]\n"), TAKEN);
    until("values are sealed again", || {
        server.stderr.text().contains("stored values with the key").then_some(())
    });
    let (_, notes) = doctor(&house);
    assert!(notes.contains("can be removed") && !notes.contains("still needed"), "{notes}");
    all_goes_on(&server);
    reload(&house, &server, &format!("key = \"{TWO}\"\n"), TAKEN);
    all_goes_on(&server);
    server.stop();

    // Doctor names the stored values whose key is missing.
    house.configure(&config(&format!("key = \"{ONE}\"\n")));
    let (code, notes) = doctor(&house);
    assert_eq!(code, 1, "{notes}");
    assert!(
        notes.contains("the endpoint ")
            && notes.contains("the secrets of tenant acme for source stripe"),
        "{notes}"
    );
    house.configure(&config(&format!("key = \"{TWO}\"\n")));
    all_goes_on(&house.start());
}

#[test]
fn where_endpoints_may_be_follows_a_reload() {
    let rules = |allow: &str| format!("[outbound]\nallow = [{allow}]\n");
    let house = House::new(&rules(""));
    let server = house.start();
    let sink = Sink::accepting();
    let add = || server.admin_post("/api/v1/endpoints", &json!({"url": sink.url()})).status;
    assert_eq!(add(), 400);
    let reload = |config: &str| {
        let before = server.stderr.text().matches(TAKEN).count();
        house.configure(config);
        server.signal("HUP");
        until(TAKEN, || (server.stderr.text().matches(TAKEN).count() > before).then_some(()));
    };
    reload(&rules("\"127.0.0.0/8\""));
    assert_eq!(add(), 201);
    let publish = |id: &str| {
        let message = json!({"type": "a", "id": id, "data": {}});
        assert_eq!(server.admin_post("/api/v1/messages", &message).status, 202);
    };
    publish("m1");
    sink.wait_for(1);
    // Without the rule the endpoint still exists, and its next attempt is blocked.
    reload(&rules(""));
    publish("m2");
    until("the attempt is blocked", || {
        let delivery = &server.admin_get("/api/v1/messages/m2").json()["deliveries"][0];
        let error = delivery["attempts"][0]["error"].as_str().unwrap_or_default().to_owned();
        error.contains("not public").then_some(())
    });
    assert_eq!(sink.got().len(), 1);
    assert!(!server.stderr.text().contains("restart the server to apply it"));
}
