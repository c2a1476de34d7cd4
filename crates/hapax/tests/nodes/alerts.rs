//! Alerts of several nodes: one judge, one message, whichever node dies.

use std::slice::from_ref;

use serde_json::{Value, json};

use crate::support::nodes::{Database, SECRET};
use crate::support::sink::Sink;
use crate::support::{Sender, Server, until};

const CONFIG: &str = "[vault]\nkey = \"MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=\"\n\
     [outbound]\nallow = [\"127.0.0.0/8\"]\n\
     [alerts]\nfailed_verifications = \"10/h\"\n";

const SOON: (&str, &str) = (
    "HAPAX_TEST_SETTINGS",
    "alerts.every_ms=50,alerts.raise_after_ms=200,alerts.quiet_ms=5000,alerts.lease_ms=1000,\
     traffic.every_ms=100",
);

fn alerts(node: &Server) -> Vec<Value> {
    let answer = node.admin_get("/api/v1/alerts").json();
    answer["items"].as_array().unwrap().clone()
}

fn raised(got: &[crate::support::sink::Got]) -> Vec<(String, String)> {
    let body =
        |one: &crate::support::sink::Got| -> Value { serde_json::from_str(&one.text()).unwrap() };
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    got.iter().map(body).map(|body| (text(&body["type"]), text(&body["data"]["name"]))).collect()
}

#[test]
fn one_node_judges_what_all_count_and_a_kill_neither_repeats_nor_ends_an_alert() {
    // Neither node alone sees enough forged requests. The judge is killed, then every node is.
    let sink = Sink::accepting();
    let database = Database::shared("alerts");
    let houses = [0, 1].map(|_| database.house("", CONFIG));
    let mut nodes = houses.iter().map(|house| house.start_with(&[SOON])).collect::<Vec<_>>();
    let endpoint = json!({"url": sink.url(), "tenant": "hapax", "types": ["hapax.alert.*"]});
    assert_eq!(nodes[0].admin_request("POST", "/api/v1/endpoints", Some(&endpoint)).status, 201);
    let forger = Sender::stripe("whsec_of_somebody_else");
    for node in &nodes {
        for n in 0..6 {
            assert_eq!(node.ask(forger.event(&format!("evt_{n}"))).status, 401);
        }
    }
    let expected = ("hapax.alert.raised".to_owned(), "failed_verifications".to_owned());
    assert_eq!(raised(&sink.wait_for(1)), from_ref(&expected));
    let listed: Vec<Vec<Value>> = nodes
        .iter()
        .map(|node| until("it is listed", || Some(alerts(node)).filter(|it| !it.is_empty())))
        .collect();
    assert!(listed[0][0]["message"].as_str().unwrap().starts_with("12 requests"), "{listed:?}");
    for of_node in &listed {
        assert_eq!(of_node.len(), 1, "{listed:?}");
        assert_eq!(of_node[0]["since"], listed[0][0]["since"], "{listed:?}");
    }
    let judge = "SELECT judge::text FROM hapax.alert_board";
    let before = database.execute(judge);
    // The test cannot know which node holds the lease, so each node is killed and started again in turn.
    for house in &houses {
        nodes.remove(0).kill();
        let renewed = "SELECT judge_until::text FROM hapax.alert_board";
        let last = database.execute(renewed);
        until("a living node judges", || (database.execute(renewed) != last).then_some(()));
        let alert = alerts(&nodes[0]).remove(0);
        assert_eq!(alert["since"], listed[0][0]["since"], "{alert}");
        nodes.push(house.start_with(&[SOON]));
    }
    assert_ne!(database.execute(judge), before);
    for node in nodes {
        node.kill();
    }
    let last = houses[0].start_with(&[SOON]);
    let again = until("it is listed", || alerts(&last).into_iter().next());
    assert_eq!(again["since"], listed[0][0]["since"], "{again}");
    assert_eq!(raised(&sink.got()), from_ref(&expected), "nobody is notified twice");
    // A higher threshold ends the alert.
    houses[0].configure(
        &std::fs::read_to_string(houses[0].config_file()).unwrap().replace("10/h", "99/h"),
    );
    last.signal("HUP");
    let over = ("hapax.alert.cleared".to_owned(), "failed_verifications".to_owned());
    assert_eq!(raised(&sink.wait_for(2)), [expected, over]);
    let sender = Sender::stripe(SECRET);
    last.ask(sender.event("evt_after")).is("accepted");
}
