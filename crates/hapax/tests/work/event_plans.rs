//! Plans of operators over many events, and paused handlers, on the real server: through kills, crashes and
//! restarts.

use std::os::unix::process::ExitStatusExt as _;

use crate::common::{Run, hapax};
use crate::support::ledger::{self, Ledger};
use crate::support::load::Load;
use crate::support::process::hits;
use crate::support::sender::{event, now};
use crate::support::{House, Sender, Server, until};
use serde_json::{Value, json};

const SECRET: &str = "whsec_plans";
const SIGABRT: i32 = 6;

/// A source with one handler that writes a row for each event. Each job has one attempt.
fn house() -> House {
    House::new(&format!(
        "[sources.stripe]\nprovider = \"stripe\"\nsecrets = [\"{SECRET}\"]\nlate = \"review\"\n\
         [sources.stripe.handlers.fee]\nretry = [\"0s\"]\ntimeout = \"10s\"\n\
         sql = \"\"\"{}\"\"\"\n",
        ledger::effect("fee")
    ))
}

/// Makes `count` dead letters and then removes their cause.
fn with_dead_letters(house: &House, server: &Server, count: usize) -> Ledger {
    Load::events(4, &Sender::stripe(SECRET), 0..count).send_all(server.ingress);
    until("all are dead letters", || {
        let dead = server.admin_get("/api/v1/lanes").json()["items"][0]["dead"].as_u64();
        (dead == Some(count as u64)).then_some(())
    });
    Ledger::create(house, ledger::SCHEMA)
}

fn plan(server: &Server, id: &str) -> Value {
    server.admin_get(&format!("/api/v1/replays/{id}")).json()
}

fn ended(server: &Server, id: &str) -> Value {
    until("the plan to end", || Some(plan(server, id)).filter(|plan| plan["state"] == "done"))
}

fn command(server: &Server, args: &[&str]) -> Run {
    hapax(args).args(&["--admin", &format!("http://{}", server.admin)]).run()
}

fn reaches(server: &Server, id: &str, status: &str) -> Value {
    until(&format!("{id} is {status}"), || {
        let event = server.admin_get(&format!("/api/v1/events/{id}")).json();
        Some(event).filter(|event| event["status"] == status)
    })
}

/// Each event was replayed once, and has one effect.
#[track_caller]
fn each_was_replayed_once(server: &Server, ledger: &Ledger, count: usize) {
    until("all effects", || (ledger.effects().len() == count).then_some(()));
    ledger.is_once_each(count);
    for event in server.events("") {
        let id = event["event_id"].as_str().unwrap();
        let event = reaches(server, id, "processed");
        let actions = event["actions"].as_array().unwrap();
        assert_eq!(actions.len(), 1, "{event}");
        assert_eq!(actions[0]["reason"], "the table is there now");
    }
}

#[test]
fn a_killed_server_goes_on_with_a_plan_over_events_and_takes_each_once() {
    // SIGKILL twice in the middle of the plan.
    const DEAD: usize = 60;
    let house = house();
    let mut server = house.start();
    let ledger = with_dead_letters(&house, &server, DEAD);
    let filter = json!({"status": "dead", "source": "stripe", "since": "1h"});
    let mut dry = filter.clone();
    dry["dry_run"] = json!(true);
    let counted = server.admin_post("/api/v1/events/replay", &dry).json();
    assert_eq!(counted, json!({"id": null, "count": DEAD}));
    let mut asked = filter;
    asked["rate"] = json!(40);
    asked["reason"] = json!("the table is there now");
    let planned = server.admin_post("/api/v1/events/replay", &asked).json();
    assert_eq!(planned["count"], DEAD, "{planned}");
    let id = planned["id"].as_str().unwrap().to_owned();
    for part in [DEAD / 6, DEAD / 2] {
        until("a part of the plan", || {
            (plan(&server, &id)["done"].as_u64().unwrap() as usize >= part).then_some(())
        });
        server.kill();
        server = house.start();
    }
    let ended = ended(&server, &id);
    assert_eq!((&ended["total"], &ended["done"]), (&json!(DEAD), &json!(DEAD)), "{ended}");
    assert_eq!((&ended["of"], &ended["action"]), (&json!("events"), &json!("replay")), "{ended}");
    each_was_replayed_once(&server, &ledger, DEAD);
    let listed = command(&server, &["replays", "list"]);
    let line = format!("done  {DEAD} of {DEAD} changed, 0 skipped at 40 a second");
    assert!(listed.stdout.contains(&line), "{listed:?}");
    let audited = server.admin_get("/api/v1/audit").json();
    let is_it = |entry: &Value| entry.to_string().contains("/api/v1/events/replay");
    assert!(audited["items"].as_array().unwrap().iter().any(is_it), "{audited}");
}

#[test]
fn a_crash_at_each_step_of_a_plan_over_events_takes_each_event_once() {
    // The server aborts before a slice is taken, or after it was committed.
    const DEAD: usize = 12;
    for point in ["plans.before_slice", "plans.after_slice"] {
        let house = house();
        let server = house.start();
        let ledger = with_dead_letters(&house, &server, DEAD);
        server.stop();
        let hit_file = house.path().join("hits");
        let hits_to = ("HAPAX_FAILPOINT_HITS", hit_file.to_str().unwrap());
        let abort = format!("{point}=abort@2");
        let mut server = house.start_with(&[("HAPAX_FAILPOINTS", &abort), hits_to]);
        let asked = json!({"status": "dead", "rate": 12, "reason": "the table is there now"});
        let planned = server.admin_post("/api/v1/events/replay", &asked).json();
        assert_eq!(server.wait().signal(), Some(SIGABRT), "{point}");
        assert_eq!(hits(&hit_file, point), 2);
        let server = house.start();
        let ended = ended(&server, planned["id"].as_str().unwrap());
        assert_eq!((&ended["done"], &ended["skipped"]), (&json!(DEAD), &json!(0)), "{ended}");
        each_was_replayed_once(&server, &ledger, DEAD);
    }
}

#[test]
fn many_events_are_approved_rejected_and_discarded_by_one_command() {
    let house = house();
    let ledger = Ledger::create(&house, ledger::SCHEMA);
    let server = house.start();
    let sender = Sender::stripe(SECRET);
    let late = |id: &str| {
        let request = sender.request_at(event(id), now() - 3_600);
        assert_eq!(server.ask(request.bytes()).status, 202);
    };
    (0..3).for_each(|n| late(&format!("good_{n}")));
    (0..2).for_each(|n| late(&format!("bad_{n}")));
    // A plan without a filter, without a required reason, or with a status that does not fit its
    // act is refused.
    let refused = command(&server, &["events", "approve"]);
    assert_eq!((refused.code, refused.stdout.as_str()), (2, ""), "{refused:?}");
    let both = command(&server, &["events", "approve", "good_0", "--source", "stripe"]);
    assert_eq!(both.code, 2, "{both:?}");
    for (act, asked) in [
        ("reject", json!({"source": "stripe"})),
        ("approve", json!({"status": "dead"})),
        ("approve", json!({"handler": "fee"})),
        ("discard", json!({"status": "review"})),
        ("replay", json!({"force": true})),
        ("replay", json!({"rate": 0})),
        ("replay", json!({"since": "1h", "until": "2h"})),
        ("replay", json!({"stauts": "dead"})),
        ("discard", json!({"force": true})),
    ] {
        let answer = server.admin_post(&format!("/api/v1/events/{act}"), &asked);
        assert_eq!(answer.status, 400, "{act} {asked}: {answer:?}");
    }
    assert_eq!(server.admin_get("/api/v1/replays").json()["items"], json!([]));
    let counted = command(&server, &["events", "approve", "--search", "good_", "--dry-run"]);
    assert_eq!(counted.stdout, "3 events\n", "{counted:?}");
    let approved = command(&server, &["events", "approve", "--search", "good_", "--json"]);
    let planned: Value = serde_json::from_str(&approved.stdout).unwrap();
    assert_eq!(planned["count"], 3, "{approved:?}");
    ended(&server, planned["id"].as_str().unwrap());
    (0..3).for_each(|n| _ = reaches(&server, &format!("good_{n}"), "processed"));
    let rejected = command(
        &server,
        &["events", "reject", "--source", "stripe", "--reason", "not ours", "--rate", "100"],
    );
    assert!(rejected.stdout.ends_with("  2 events\n"), "{rejected:?}");
    for n in 0..2 {
        let event = reaches(&server, &format!("bad_{n}"), "discarded");
        assert_eq!(event["actions"][0]["action"], "reject");
    }
    assert_eq!(ledger.effects().len(), 3);
    // Dead letters.
    ledger.execute("DROP TABLE account");
    (0..3).for_each(|n| _ = server.ask(sender.event(&format!("dead_{n}"))));
    (0..3).for_each(|n| _ = reaches(&server, &format!("dead_{n}"), "dead"));
    let discarded = command(&server, &["events", "discard", "--handler", "fee"]);
    assert!(discarded.stdout.ends_with("  3 events\n"), "{discarded:?}");
    (0..3).for_each(|n| _ = reaches(&server, &format!("dead_{n}"), "discarded"));
    // The same request under the same key is one plan.
    let key = [("idempotency-key", "k1")];
    let again = |body: &Value| {
        let headers: String =
            key.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let body = body.to_string();
        let mut wire = crate::support::Wire::connect(server.admin);
        wire.write(format!(
            "POST /api/v1/events/replay HTTP/1.1\r\nhost: 127.0.0.1\r\n{headers}\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        ));
        wire.answer()
    };
    let asked = json!({"source": "stripe", "since": "1h"});
    assert_eq!(again(&asked).json()["id"], again(&asked).json()["id"]);
    // Another request under the key makes no plan, and its answer names none.
    let plans = || server.admin_get("/api/v1/replays").json()["items"].as_array().map(Vec::len);
    let before = plans();
    let other = again(&json!({"source": "stripe", "since": "2h"}));
    assert_eq!(other.status, 422, "{other:?}");
    assert_eq!(other.json()["type"], "urn:hapax:problem:key_reused");
    assert_eq!(plans(), before);
}

#[test]
fn a_paused_handler_runs_nothing_until_it_is_resumed_and_a_restart_keeps_it_paused() {
    let house = house();
    let ledger = Ledger::create(&house, ledger::SCHEMA);
    let server = house.start();
    let sender = Sender::stripe(SECRET);
    server.ask(sender.event("before")).is("accepted");
    reaches(&server, "before", "processed");
    for wrong in ["fee", "stripe/other", "other/fee"] {
        let answer = command(&server, &["handlers", "pause", wrong]);
        assert_ne!(answer.code, 0, "{answer:?}");
    }
    let paused = command(&server, &["handlers", "pause", "stripe/fee", "--reason", "a deploy"]);
    assert!(paused.stdout.starts_with("stripe/fee  paused since "), "{paused:?}");
    let again = command(&server, &["handlers", "pause", "stripe/fee"]);
    assert_eq!(again.code, 0, "{again:?}");
    assert!(again.stderr.contains("nothing changed"), "{again:?}");
    (0..3).for_each(|n| server.ask(sender.event(&format!("evt_{n}"))).is("accepted"));
    server.kill();
    let server = house.start();
    server.ask(sender.event("evt_3")).is("accepted");
    let listed = command(&server, &["handlers", "list"]);
    assert!(listed.stdout.contains("4 ready"), "{listed:?}");
    assert!(listed.stdout.contains("by loopback: a deploy"), "{listed:?}");
    let explained = command(&server, &["explain", "evt_0"]);
    assert!(explained.stdout.contains("The handler has been paused since "), "{explained:?}");
    let stats = server.admin_get("/api/v1/stats").json();
    assert_eq!(stats["paused_handlers"][0]["handler"], "fee", "{stats}");
    let page = server.admin_get("/handlers");
    assert!(String::from_utf8_lossy(&page.body).contains("/handlers/stripe%2Ffee/resume"));
    assert_eq!(ledger.effects().len(), 1);
    let job = &server.admin_get("/api/v1/events/evt_0").json()["jobs"][0];
    assert_eq!((&job["attempt"], &job["lost"]), (&json!(0), &json!(0)), "{job}");
    let resumed = command(&server, &["handlers", "resume", "stripe/fee"]);
    assert_eq!(resumed.stdout, "stripe/fee  not paused\n", "{resumed:?}");
    (0..4).for_each(|n| _ = reaches(&server, &format!("evt_{n}"), "processed"));
    ledger.is_once_each(5);
}
