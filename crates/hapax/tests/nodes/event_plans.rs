//! Plans of operators over events, and paused handlers, with several nodes on one PostgreSQL.

use crate::support::load::Load;
use crate::support::nodes::{Database, SECRET};
use crate::support::{Sender, Server, until};
use serde_json::{Value, json};

/// A handler with one attempt, which fails while the ledger does not exist.
const FEE: &str = "[sources.stripe.handlers.fee]\nretry = [\"0s\"]\n\
     sql = \"INSERT INTO ledger VALUES (:event_id, 'fee', :attempt)\"\n";

const LEDGER: &str = "CREATE TABLE ledger (event_id text, handler text, attempt int)";

fn plan(server: &Server, id: &str) -> Value {
    server.admin_get(&format!("/api/v1/replays/{id}")).json()
}

#[test]
fn a_plan_over_events_goes_on_when_a_node_is_killed_and_takes_each_event_once() {
    // Two nodes run the plan. Each is killed in the middle of the plan, one after the other, and a
    // restarted node ends it.
    const DEAD: usize = 80;
    let database = Database::empty("event_plans");
    let houses = [database.house("", FEE), database.house("", FEE)];
    let [first, second] = houses.each_ref().map(|house| house.start());
    Load::events(4, &Sender::stripe(SECRET), 0..DEAD).send_all(first.ingress);
    until("all are dead letters", || {
        let dead = second.admin_get("/api/v1/lanes").json()["items"][0]["dead"].as_u64();
        (dead == Some(DEAD as u64)).then_some(())
    });
    database.execute(LEDGER);
    let asked = json!({"status": "dead", "rate": 40, "reason": "the ledger is there"});
    let planned = first.admin_post("/api/v1/events/replay", &asked).json();
    assert_eq!(planned["count"], DEAD, "{planned}");
    let id = planned["id"].as_str().unwrap();
    let done = |server: &Server| plan(server, id)["done"].as_u64().unwrap() as usize;
    until("a part of the plan", || (done(&second) >= DEAD / 8).then_some(()));
    first.kill();
    until("the other node goes on", || (done(&second) >= DEAD / 2).then_some(()));
    second.kill();
    let server = houses[0].start();
    let ended =
        until("the plan to end", || Some(plan(&server, id)).filter(|plan| plan["state"] == "done"));
    assert_eq!((&ended["done"], &ended["skipped"]), (&json!(DEAD), &json!(0)), "{ended}");
    database.all_processed(&server, DEAD);
    database.is_once_each(DEAD);
    let replays = "SELECT count(*) || ' of ' || count(DISTINCT event) FROM hapax.action";
    assert_eq!(database.execute(replays), [Some(format!("{DEAD} of {DEAD}"))]);
}

#[test]
fn a_handler_that_is_paused_at_one_node_runs_at_none() {
    let database = Database::empty("paused");
    database.execute(LEDGER);
    let houses = [database.house("", FEE), database.house("", FEE)];
    let [first, second] = houses.each_ref().map(|house| house.start());
    let paused = first.admin_post("/api/v1/handlers/stripe/fee/pause", &json!({}));
    assert_eq!((paused.status, &paused.json()["changed"]), (200, &json!(true)), "{paused:?}");
    for server in [&first, &second] {
        let sender = Sender::stripe(SECRET);
        server.ask(sender.event(&format!("evt_{}", server.ingress.port()))).is("accepted");
    }
    first.kill();
    let first = houses[0].start();
    first.ask(Sender::stripe(SECRET).event("evt_restarted")).is("accepted");
    let lane = second.admin_get("/api/v1/lanes").json()["items"][0].clone();
    assert_eq!((&lane["ready"], &lane["leased"]), (&json!(3), &json!(0)), "{lane}");
    assert_eq!(lane["paused"]["who"], "loopback", "{lane}");
    assert_eq!(database.number("SELECT count(*) FROM ledger"), 0);
    let resumed = second.admin_post("/api/v1/handlers/stripe/fee/resume", &json!({}));
    assert_eq!(resumed.status, 200, "{resumed:?}");
    database.all_processed(&second, 3);
    database.is_once_each(3);
}
