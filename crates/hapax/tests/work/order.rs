//! Order through the real server: the final state is the newest, gaps are held and then skipped,
//! and an operator decides if the config says so.

use std::time::{Duration, Instant};

use crate::support::app::App;
use crate::support::ledger::Ledger;
use crate::support::load::{Dice, Load};
use crate::support::{House, Sender, Server, until};
use serde_json::{Value, json};

const SECRET: &str = "whsec_order";

/// The timeout is not the default of 100 ms for SQL: on a busy machine one statement may take longer.
const PATIENT: &str = "timeout = \"10s\"\n";

fn house(handlers: &str, schema: &str) -> (House, Ledger) {
    let house = House::new(&format!(
        "[sources.stripe]\nprovider = \"stripe\"\nsecrets = [\"{SECRET}\"]\n{handlers}"
    ));
    let ledger = Ledger::create(&house, schema);
    (house, ledger)
}

/// A signed event about one account, with its id and `fields`.
fn request(id: &str, account: &str, fields: Value) -> Vec<u8> {
    let mut body = json!({
        "id": id, "object": "event", "type": "account.updated",
        "data": { "object": { "id": account } },
    });
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    Sender::stripe(SECRET).request(body.to_string()).bytes()
}

#[track_caller]
fn accept(server: &Server, id: &str, account: &str, fields: Value) {
    server.ask(request(id, account, fields)).is("accepted");
}

#[track_caller]
fn until_status(server: &Server, event_id: &str, status: &str) -> Value {
    let path = format!("/api/v1/events/{event_id}");
    until(&format!("{event_id} is {status}"), || {
        let event = server.admin_get(&path).json();
        (event["status"] == status).then_some(event)
    })
}

/// The senders' ids of the calls to an app, in order.
fn called(app: &App) -> Vec<String> {
    let id = |body: &str| -> String {
        let body: Value = serde_json::from_str(body).unwrap();
        body["id"].as_str().unwrap().to_owned()
    };
    app.calls().iter().map(|call| id(&call.body)).collect()
}

#[test]
fn a_thousand_resources_with_shuffled_versions_and_copies_end_in_the_newest_state() {
    // Every version is sent twice, and all six thousand requests are shuffled over sixteen
    // connections. Each of two handlers overwrites its row, and the second one has the opposite
    // order.
    const RESOURCES: usize = 1_000;
    const VERSIONS: usize = 3;
    let handler = |name: &str, by: &str| {
        format!(
            "[sources.stripe.handlers.{name}]\n{PATIENT}sql = \"\"\"\
             DELETE FROM {name} WHERE resource = :resource;\
             INSERT INTO {name} VALUES (:resource, json_extract(:body, '$.version'));\
             INSERT INTO applied VALUES ('{name}', :event_id)\"\"\"\n\
             [sources.stripe.handlers.{name}.order]\nresource = \"/data/object/id\"\nby = \"{by}\"\n"
        )
    };
    let (house, ledger) = house(
        &format!("{}{}", handler("rising", "/version"), handler("falling", "/rank")),
        "CREATE TABLE rising (resource TEXT, version INTEGER);
         CREATE TABLE falling (resource TEXT, version INTEGER);
         CREATE INDEX by_rising ON rising (resource);
         CREATE INDEX by_falling ON falling (resource);
         CREATE TABLE applied (handler TEXT, event_id TEXT);",
    );
    let mut requests = Vec::new();
    for resource in 0..RESOURCES {
        for version in 1..=VERSIONS {
            let fields = json!({ "version": version, "rank": VERSIONS - version });
            let id = format!("evt_{resource}_{version}");
            let one = request(&id, &format!("acct_{resource}"), fields);
            requests.extend([one.clone(), one]);
        }
    }
    Dice::new().shuffle(&mut requests);
    let server = house.start();
    Load::new(16, requests).send_all(server.ingress);
    let over = "SELECT count(*) FROM hapax_processed_events WHERE status IN ('processed', 'stale')";
    let all = (RESOURCES * VERSIONS) as i64;
    until("all is applied or stale", || (ledger.number(over) == all).then_some(()));
    server.stop();
    for (name, newest) in [("rising", VERSIONS as i64), ("falling", 1)] {
        let rows = ledger.number(&format!("SELECT count(*) FROM {name}"));
        let last = ledger.counts(&format!("SELECT resource, version FROM {name}"));
        assert_eq!((rows, last.len()), (RESOURCES as i64, RESOURCES), "{name}");
        let wrong: Vec<_> = last.iter().filter(|(_, version)| **version != newest).collect();
        assert!(wrong.is_empty(), "{name}: {wrong:?}");
    }
    let twice = "SELECT count(*) FROM (SELECT 1 FROM applied GROUP BY handler, event_id
                 HAVING count(*) > 1)";
    assert_eq!(ledger.number(twice), 0, "an effect happened twice");
}

#[test]
fn a_gap_that_is_filled_late_runs_in_order_and_delays_no_other_resource() {
    // Number 2 arrives last, and other accounts continue meanwhile. One handler calls an app, the
    // other runs SQL.
    let app = App::new(|_| 200);
    let order = |name: &str| {
        format!(
            "[sources.stripe.handlers.{name}.order]\nresource = \"/data/object/id\"\n\
             by = \"/n\"\npolicy = \"sequence\"\n"
        )
    };
    let (house, ledger) = house(
        &format!(
            "[sources.stripe.handlers.call]\nhttp = \"{}\"\n{}\
             [sources.stripe.handlers.book]\n{PATIENT}\
             sql = \"INSERT INTO booked VALUES (:event_id)\"\n{}",
            app.url(),
            order("call"),
            order("book"),
        ),
        "CREATE TABLE booked (event_id TEXT)",
    );
    let server = house.start();
    for n in [1, 4, 3] {
        accept(&server, &format!("evt_{n}"), "acct", json!({ "n": n }));
    }
    until_status(&server, "evt_1", "processed");
    for n in [3, 4] {
        until_status(&server, &format!("evt_{n}"), "held");
    }
    accept(&server, "evt_other", "other", json!({ "n": 1 }));
    until_status(&server, "evt_other", "processed");
    accept(&server, "evt_2", "acct", json!({ "n": 2 }));
    until_status(&server, "evt_4", "processed");
    server.stop();
    let expected = ["evt_1", "evt_other", "evt_2", "evt_3", "evt_4"];
    assert_eq!(called(&app), expected);
    let booked = ledger.counts("SELECT event_id, rowid FROM booked");
    let mut booked: Vec<_> = booked.into_iter().map(|(id, row)| (row, id)).collect();
    booked.sort();
    assert_eq!(booked.into_iter().map(|(_, id)| id).collect::<Vec<_>>(), expected);
}

/// A sequence whose number 2 becomes a dead letter at its first attempt.
fn with_a_dead_number(keys: &str) -> (House, Ledger) {
    house(
        &format!(
            "[sources.stripe.handlers.book]\n{PATIENT}retry = [\"0s\"]\n\
             sql = \"INSERT INTO booked SELECT :event_id, nullif(json_extract(:body, '$.n'), 2)\"\n\
             [sources.stripe.handlers.book.order]\nresource = \"/data/object/id\"\nby = \"/n\"\n\
             policy = \"sequence\"\n{keys}\n"
        ),
        "CREATE TABLE booked (event_id TEXT, n INTEGER NOT NULL)",
    )
}

#[test]
fn a_dead_number_holds_the_rest_until_the_hold_is_over_and_is_stale_from_then_on() {
    const HOLD: Duration = Duration::from_secs(3);
    let (house, ledger) = with_a_dead_number("hold = \"3s\"\non_gap = \"go\"");
    let server = house.start();
    let began = Instant::now();
    for n in 1..=5 {
        accept(&server, &format!("evt_{n}"), "acct", json!({ "n": n }));
    }
    until_status(&server, "evt_2", "dead");
    let booked = ledger.number("SELECT count(*) FROM booked");
    // No job arrived before `began`, so none may run until that long after it.
    assert!(booked == 1 || began.elapsed() >= HOLD, "the rest waits, and {booked} ran");
    for n in [3, 4, 5] {
        until_status(&server, &format!("evt_{n}"), "processed");
    }
    let replayed = server.admin_post("/api/v1/events/evt_2/replay", &json!({})).json();
    assert_eq!(replayed["items"][0]["effect"], "stale", "{replayed}");
    until_status(&server, "evt_2", "stale");
    server.stop();
    let sorted = "SELECT count(*) FROM booked a JOIN booked b ON a.rowid < b.rowid AND a.n > b.n";
    assert_eq!(ledger.number(sorted), 0, "in order");
    assert_eq!(ledger.number("SELECT count(*) FROM booked"), 4);
}

#[test]
fn an_operator_decides_about_jobs_behind_a_dead_number() {
    // The operator approves for one account and rejects for the other, with a restart in between.
    let (house, ledger) = with_a_dead_number("hold = \"300ms\"\non_gap = \"review\"");
    let server = house.start();
    for account in ["a", "b"] {
        for n in 1..=3 {
            accept(&server, &format!("{account}{n}"), account, json!({ "n": n }));
        }
        let waits = until_status(&server, &format!("{account}3"), "review");
        assert!(waits["jobs"][0]["error"].as_str().unwrap().contains("in time"), "{waits}");
        assert_eq!(waits["jobs"][0]["status"], "review", "{waits}");
    }
    let listed = server.events("status=review");
    let listed: Vec<_> = listed.iter().map(|event| &event["event_id"]).collect();
    assert_eq!(listed, ["b3", "a3"]);
    server.stop();
    let view =
        "SELECT count(*) FROM hapax_processed_events WHERE status = 'review' AND NOT processed";
    assert_eq!(ledger.number(view), 2);
    let server = house.start();
    let reason = json!({ "reason": "checked by hand" });
    let approved = server.admin_post("/api/v1/events/a3/approve", &reason);
    assert_eq!((approved.status, approved.json()["changed"].clone()), (200, json!(true)));
    until_status(&server, "a3", "processed");
    assert_eq!(server.admin_post("/api/v1/events/a3/reject", &reason).status, 409);
    let rejected = server.admin_post("/api/v1/events/b3/reject", &reason).json();
    assert_eq!(rejected["status"], "discarded", "{rejected}");
    assert_eq!(server.admin_post("/api/v1/events/b3/approve", &reason).status, 409);
    let replayed = server.admin_post("/api/v1/events/b3/replay", &json!({})).json();
    assert_eq!(replayed["items"][0]["effect"], "discarded", "{replayed}");
    // The mark followed the approved job; nothing follows the rejected one.
    accept(&server, "a4", "a", json!({ "n": 4 }));
    until_status(&server, "a4", "processed");
    accept(&server, "b4", "b", json!({ "n": 4 }));
    until_status(&server, "b4", "review");
    server.stop();
    assert_eq!(ledger.number("SELECT count(*) FROM booked WHERE n >= 3"), 2);
    assert_eq!(ledger.number("SELECT count(*) FROM booked WHERE event_id LIKE 'b%'"), 1);
}

#[test]
fn a_machine_calls_the_app_in_the_order_of_its_states() {
    // The states arrive shuffled, with copies. An event whose state was already passed is not run.
    // An event whose state appears in no transition is a dead letter at once.
    let app = App::new(|_| 200);
    let (house, _) = house(
        &format!(
            "[sources.stripe.handlers.call]\nhttp = \"{}\"\n\
             [sources.stripe.handlers.call.order]\npolicy = \"machine\"\n\
             resource = \"/data/object/id\"\nstate = \"/state\"\nstart = \"pending\"\n\
             allow = [\"pending -> fee_charged\", \"fee_charged -> completed\",\n\
             \"pending -> failed\"]\n",
            app.url()
        ),
        "CREATE TABLE unused (x)",
    );
    let server = house.start();
    for state in ["completed", "fee_charged"] {
        accept(&server, state, "po_1", json!({ "state": state }));
        until_status(&server, state, "held");
        server.ask(request(state, "po_1", json!({ "state": state }))).is("duplicate");
    }
    accept(&server, "pending", "po_1", json!({ "state": "pending" }));
    until_status(&server, "completed", "processed");
    accept(&server, "failed", "po_1", json!({ "state": "failed" }));
    until_status(&server, "failed", "stale");
    accept(&server, "odd", "po_1", json!({ "state": "paid out" }));
    let dead = until_status(&server, "odd", "dead");
    let why = dead["jobs"][0]["error"].as_str().unwrap();
    assert!(why.contains("state (/state) is a state that appears in no transition"), "{why}");
    server.stop();
    assert_eq!(called(&app), ["pending", "fee_charged", "completed"]);
}
