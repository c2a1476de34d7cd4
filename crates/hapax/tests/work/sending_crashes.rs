//! Sending through a process that dies at each named point: every acknowledged message arrives, with the same
//! id and the same bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::process::ExitStatusExt as _;

use serde_json::json;

use crate::support::process::hits;
use crate::support::sink::Sink;
use crate::support::{House, Server, Wire, until};

const SIGABRT: i32 = 6;

/// The points at which the server aborts: before and after each commit, between a claim and its
/// request, between the request and its answer, and before the outcome is recorded.
const POINTS: [&str; 7] = [
    "publish.before_commit",
    "publish.after_commit",
    "exchange.before_commit",
    "exchange.after_commit",
    "sender.claimed",
    "sender.posted",
    "sender.answered",
];

/// Publishes a message, and returns whether it was acknowledged. The server may die meanwhile.
fn is_published(server: &Server, id: &str) -> bool {
    let body = json!({"type": "a", "id": id, "data": {"id": id}}).to_string();
    let (to, length) = (server.admin, body.len());
    let request = format!(
        "POST /api/v1/messages HTTP/1.1\r\nhost: {to}\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n{body}"
    );
    let Ok(mut wire) = Wire::try_connect(server.admin) else { return false };
    wire.try_ask(request.as_bytes()).is_some_and(|answer| answer.status == 202)
}

#[test]
fn a_crash_at_each_step_of_sending_loses_no_acknowledged_message() {
    const MESSAGES: usize = 12;
    let sink = Sink::new(|_, before| if before % 5 == 2 { "500 No" } else { "200 OK" }.to_owned());
    let house = House::new("[outbound]\nallow = [\"127.0.0.0/8\"]\n");
    let server = house.start();
    let endpoint = json!({"url": sink.url(), "retry": vec!["0s"; 30]});
    assert_eq!(server.admin_post("/api/v1/endpoints", &endpoint).status, 201);
    server.kill();

    let hit_file = house.path().join("hits");
    let hits_to = ("HAPAX_FAILPOINT_HITS", hit_file.to_str().unwrap());
    let mut acked = BTreeSet::new();
    for point in POINTS {
        for at in [1, 3] {
            let before = hits(&hit_file, point);
            let plan = format!("{point}=abort@{at}");
            // Deliveries of earlier rounds are claimed at once, so the server may die before it is ready.
            let mut server = house.start_mortal(&[("HAPAX_FAILPOINTS", &plan), hits_to]);
            for n in 0..MESSAGES {
                let id = format!("{}-{at}-{n}", point.replace('.', "-"));
                if is_published(&server, &id) {
                    acked.insert(id);
                }
            }
            assert_eq!(server.wait().signal(), Some(SIGABRT), "{point}@{at}");
            assert_eq!(hits(&hit_file, point) - before, at, "{point}");
        }
    }
    let server = house.start();
    sink.wait_until("every acknowledged message", |got| {
        let came: BTreeSet<String> = got.iter().map(|got| got.id()).collect();
        acked.is_subset(&came)
    });
    until("every delivery has ended", || {
        let open = ["waiting", "sending", "failed"].map(|status| {
            let path = format!("/api/v1/deliveries?status={status}");
            server.admin_get(&path).json()["items"].as_array().unwrap().len()
        });
        (open == [0, 0, 0]).then_some(())
    });
    let dead = server.admin_get("/api/v1/deliveries?status=dead").json();
    assert_eq!(dead["items"], json!([]), "{dead}");
    // Every request of one message has the same bytes.
    let mut bodies: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    for got in sink.got() {
        let first = bodies.entry(got.id()).or_insert_with(|| got.body.clone());
        assert_eq!(*first, got.body, "{}", got.id());
    }
}
