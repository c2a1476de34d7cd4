//! Handlers through the real server: many copies cause one run, a failure is retried, and a success
//! is not repeated. Events run in their own order, not in the order of arrival.

use std::collections::BTreeMap;
use std::sync::Barrier;

use crate::support::app::App;
use crate::support::ledger::{self, Ledger};
use crate::support::load::{Dice, Load};
use crate::support::sender::{event, now};
use crate::support::upstream::Upstream;
use crate::support::{Answer, House, Sender, Server, post, until};
use serde_json::{Value, json};

const SECRET: &str = "whsec_work";

/// The timeout is not the default of 100 ms for SQL: on a busy machine one statement may take longer.
const PATIENT: &str = "timeout = \"10s\"\n";

/// A source with handlers as TOML, and `schema` in its database.
fn house(handlers: &str, schema: &str) -> (House, Ledger) {
    house_of("", handlers, schema)
}

fn house_of(source_keys: &str, handlers: &str, schema: &str) -> (House, Ledger) {
    let house = House::new(&format!(
        "[sources.stripe]\nprovider = \"stripe\"\nsecrets = [\"{SECRET}\"]\n{source_keys}\n\
         {handlers}"
    ));
    let ledger = Ledger::create(&house, schema);
    (house, ledger)
}

fn sql_handler(name: &str, keys: &str) -> String {
    let effect = ledger::effect(name);
    format!("[sources.stripe.handlers.{name}]\n{PATIENT}{keys}\nsql = \"\"\"{effect}\"\"\"\n")
}

/// Waits until the event has this status.
#[track_caller]
fn until_status(server: &Server, event_id: &str, status: &str) -> Value {
    let path = format!("/api/v1/events/{event_id}");
    until(&format!("{event_id} is {status}"), || {
        let event = server.admin_get(&path).json();
        (event["status"] == status).then_some(event)
    })
}

fn job<'a>(event: &'a Value, handler: &str) -> &'a Value {
    let jobs = event["jobs"].as_array().unwrap();
    jobs.iter().find(|job| job["handler"] == handler).unwrap_or_else(|| panic!("{event}"))
}

fn outcomes(job: &Value) -> Vec<&str> {
    let attempts = job["attempts"].as_array().unwrap();
    attempts.iter().map(|attempt| attempt["outcome"].as_str().unwrap()).collect()
}

#[test]
fn a_payout_sent_five_ten_and_fifty_times_at_once_costs_its_fee_once() {
    // 0.5 % of 10,000 is exactly 50, for each payout, however often and concurrently it arrives.
    let (house, ledger) = house(
        &format!(
            "[sources.stripe.handlers.charge-fee]\n{PATIENT}types = [\"payout.*\"]\nsql = \"\"\"\
             INSERT INTO payout_fees SELECT json_extract(:body, '$.data.object.id'),\
             json_extract(:body, '$.data.object.amount'), \
             (json_extract(:body, '$.data.object.amount') * 5 + 500) / 1000 RETURNING fee\"\"\"\n"
        ),
        "CREATE TABLE payout_fees (payout TEXT, amount INTEGER, fee INTEGER)",
    );
    let server = house.start();
    let sender = Sender::stripe(SECRET);
    for copies in [5, 10, 50] {
        let body = json!({
            "id": format!("evt_{copies}"), "object": "event", "type": "payout.paid",
            "data": { "object": { "id": format!("po_{copies}"), "amount": 10_000 } },
        });
        let request = sender.request(body.to_string()).bytes();
        let together = Barrier::new(copies);
        let answers: Vec<Answer> = std::thread::scope(|scope| {
            let copy = || {
                let mut wire = server.wire();
                together.wait();
                wire.try_ask(&request).expect("an answer")
            };
            let copies: Vec<_> = (0..copies).map(|_| scope.spawn(copy)).collect();
            copies.into_iter().map(|copy| copy.join().unwrap()).collect()
        });
        assert!(answers.iter().all(|answer| answer.status == 200), "{answers:?}");
        let accepted = answers.iter().filter(|answer| answer.decision() == "accepted").count();
        assert_eq!(accepted, 1);
        let event = until_status(&server, &format!("evt_{copies}"), "processed");
        assert_eq!(event["result"], "50", "{event}");
        // A copy that arrives after the end gets the result.
        let late = server.ask(&request);
        late.is("duplicate");
        assert_eq!(late.json()["result"], "50", "{late:?}");
    }
    server.stop();
    let fees = ledger.counts("SELECT payout, count(*) FROM payout_fees GROUP BY payout");
    assert!(fees.len() == 3 && fees.values().all(|count| *count == 1), "{fees:?}");
    assert_eq!(ledger.number("SELECT sum(fee) FROM payout_fees"), 150);
}

#[test]
fn a_handler_that_fails_three_times_and_then_works_has_one_effect() {
    // The SQL fails by its own logic, and the rows of its first statement must be rolled back; the
    // app answers 500.
    let app = App::new(|call| if call.attempt <= 3 { 500 } else { 200 });
    let retry = "retry = [\"0s\", \"10ms\", \"10ms\", \"10ms\"]";
    let effect = ledger::effect("fee");
    let (house, ledger) = house(
        &format!(
            "[sources.stripe.handlers.call]\nhttp = \"{}\"\n{retry}\n\
             [sources.stripe.handlers.fee]\n{PATIENT}{retry}\nsql = \"\"\"{effect};\n\
             INSERT INTO works SELECT CASE WHEN :attempt > 3 THEN 1 END\"\"\"\n",
            app.url()
        ),
        &format!("{} CREATE TABLE works (yes INTEGER NOT NULL);", ledger::SCHEMA),
    );
    let server = house.start();
    let sender = Sender::stripe(SECRET);
    // The events are sent together, so that the first attempts share a batch.
    Load::events(4, &sender, 0..20).send_all(server.ingress);
    for n in 0..20 {
        let event = until_status(&server, &format!("evt_{n}"), "processed");
        for handler in ["fee", "call"] {
            let job = job(&event, handler);
            assert_eq!(job["attempt"], 4, "{event}");
            assert_eq!(outcomes(job)[..3], ["failed", "failed", "failed"], "{event}");
        }
    }
    ledger.is_once_each(20);
    let entries = app.ledger();
    assert_eq!(entries.len(), 20);
    assert!(entries.values().all(|calls| calls.len() == 4), "{entries:?}");
}

#[test]
fn a_handler_that_always_fails_ends_as_a_dead_letter_and_a_replay_runs_it_once() {
    let (house, ledger) = house(
        &sql_handler("fee", "retry = [\"0s\", \"10ms\"]"),
        "CREATE TABLE ledger (event_id TEXT, handler TEXT, attempt INTEGER);",
    );
    let server = house.start();
    let sender = Sender::stripe(SECRET);
    // There is no table `account`.
    server.ask(sender.event("evt_1")).is("accepted");
    let event = until_status(&server, "evt_1", "dead");
    let dead = job(&event, "fee");
    assert!(dead["error"].as_str().unwrap().contains("account"), "{event}");
    assert_eq!(outcomes(dead), ["failed", "failed"]);
    assert_eq!(ledger.effects(), BTreeMap::new());
    // A copy of the event does not run the dead job again.
    server.ask(sender.event("evt_1")).is("duplicate");
    let listed = server.admin_get("/api/v1/jobs?status=dead").json();
    assert_eq!(listed["items"][0]["id"], dead["id"], "{listed}");

    server.stop();
    ledger.execute("CREATE TABLE account (balance INTEGER); INSERT INTO account VALUES (0)");
    let server = house.start();
    let path = format!("/api/v1/jobs/{}/replay", dead["id"].as_str().unwrap());
    let replayed = server.admin_post(&path, &json!({ "reason": "the table is there" }));
    assert_eq!(replayed.status, 200, "{replayed:?}");
    assert_eq!(replayed.json()["items"][0]["effect"], "runs", "{replayed:?}");
    until_status(&server, "evt_1", "processed");
    // A second replay does nothing.
    let replayed = server.admin_post(&path, &json!({})).json();
    assert_eq!(replayed["items"][0]["effect"], "already_applied", "{replayed}");
    server.stop();
    ledger.is_once_each(1);
}

#[test]
fn a_replay_of_an_applied_event_does_nothing_unless_an_operator_forces_it() {
    let (house, ledger) = house(&sql_handler("fee", ""), ledger::SCHEMA);
    let server = house.start();
    server.ask(Sender::stripe(SECRET).event("evt_1")).is("accepted");
    until_status(&server, "evt_1", "processed");
    let replay = |asked: Value| {
        let answer = server.admin_post("/api/v1/events/evt_1/replay", &asked);
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()["items"][0]["effect"].as_str().unwrap().to_owned()
    };
    assert_eq!(replay(json!({ "dry_run": true })), "already_applied");
    assert_eq!(replay(json!({})), "already_applied");
    // A later event is processed first, so an unwanted run of `evt_1` would have happened by now.
    server.ask(Sender::stripe(SECRET).event("evt_2")).is("accepted");
    until_status(&server, "evt_2", "processed");
    ledger.is_once_each(2);
    assert_eq!(replay(json!({ "force": true, "reason": "asked for" })), "runs");
    until("it ran again", || (ledger.effects()["evt_1"] == 2).then_some(()));
    assert_eq!(ledger.effects()["evt_2"], 1);
}

#[test]
fn of_two_handlers_one_that_fails_never_runs_the_other_again() {
    let broken = "[sources.stripe.handlers.broken]\nretry = [\"0s\", \"10ms\", \"10ms\"]\nsql = \"INSERT INTO nowhere VALUES (1)\"\n";
    let narrow = sql_handler("narrow", "types = [\"charge.*\"]");
    let (house, ledger) =
        house(&format!("{}{broken}{narrow}", sql_handler("fee", "")), ledger::SCHEMA);
    let server = house.start();
    Load::events(4, &Sender::stripe(SECRET), 0..50).send_all(server.ingress);
    for n in 0..50 {
        let event = until_status(&server, &format!("evt_{n}"), "dead");
        let statuses = ["fee", "broken"].map(|handler| job(&event, handler)["status"].clone());
        assert_eq!(statuses, ["done", "dead"], "{event}");
        assert_eq!(event["jobs"].as_array().unwrap().len(), 2, "a type that does not match");
    }
    server.stop();
    ledger.is_once_each(50);
}

#[test]
fn a_late_event_approved_beside_its_on_time_copy_has_one_effect() {
    let (house, ledger) = house_of("late = \"review\"", &sql_handler("fee", ""), ledger::SCHEMA);
    let server = house.start();
    let sender = Sender::stripe(SECRET);
    const EVENTS: usize = 20;
    for n in 0..EVENTS {
        let event_id = format!("evt_{n}");
        let late = sender.request_at(event(&event_id), now() - 3_600).bytes();
        server.ask(&late).is("review");
        let together = Barrier::new(3);
        std::thread::scope(|scope| {
            let approve = || {
                together.wait();
                let path = format!("/api/v1/events/{event_id}/approve");
                let answer = server.admin_post(&path, &json!({ "reason": "known" }));
                assert_eq!(answer.status, 200, "{answer:?}");
            };
            scope.spawn(approve);
            scope.spawn(approve);
            together.wait();
            let on_time = server.ask(sender.event(&event_id));
            assert_eq!(on_time.status, 200, "{on_time:?}");
        });
        // A late copy of a running event is a duplicate and does not go to review.
        server.ask(&late).is("duplicate");
    }
    for n in 0..EVENTS {
        until_status(&server, &format!("evt_{n}"), "processed");
    }
    server.stop();
    ledger.is_once_each(EVENTS);
}

#[test]
fn a_pull_worker_that_lost_its_fence_gets_409_and_changes_nothing() {
    let (house, ledger) =
        house("[sources.stripe.handlers.fee]\npull = true\nlease = \"200ms\"\n", ledger::SCHEMA);
    let server = house.start();
    server.ask(Sender::stripe(SECRET).event("evt_1")).is("accepted");
    let claim = || {
        let ask = json!({ "source": "stripe", "handler": "fee", "limit": 1, "wait": "20s" });
        let answer = server.admin_post("/api/v1/claims", &ask);
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()["items"][0].clone()
    };
    let settle = |claim: &Value, how: &str, more: (&str, &str)| {
        let path = format!("/api/v1/claims/{}/{how}", claim["job"].as_str().unwrap());
        let mut asked = json!({ "fence": claim["fence"] });
        if !more.0.is_empty() {
            asked[more.0] = json!(more.1);
        }
        server.admin_post(&path, &asked).status
    };
    let first = claim();
    // The second claim waits for the end of the first lease.
    let second = claim();
    assert_eq!(first["job"], second["job"]);
    assert_eq!(first["idempotency_key"], second["idempotency_key"]);
    assert!(first["fence"].as_u64() < second["fence"].as_u64(), "{first} {second}");
    assert_eq!(settle(&first, "complete", ("result", "mine")), 409);
    assert_eq!(settle(&first, "fail", ("error", "mine")), 409);
    assert_eq!(settle(&first, "renew", ("", "")), 409);
    assert_eq!(settle(&second, "complete", ("result", "50")), 200);
    assert_eq!(settle(&second, "complete", ("result", "50")), 200, "again under the same fence");
    assert_eq!(settle(&first, "complete", ("result", "mine")), 409);
    let event = until_status(&server, "evt_1", "processed");
    assert_eq!(event["result"], "50", "{event}");
    server.stop();
    assert_eq!(ledger.effects(), BTreeMap::new());
}

#[test]
fn failing_sql_is_logged_without_the_sender_s_values() {
    // With the default schedule, the job becomes a dead letter only after more than a day, so the
    // failure must be logged earlier.
    let (house, _ledger) = house(
        "[sources.stripe.handlers.fee]\nsql = \"SELECT json_extract(:body || 'x', '$')\"\n",
        ledger::SCHEMA,
    );
    let server = house.start();
    server.ask(Sender::stripe(SECRET).event("evt_1")).is("accepted");
    until_status(&server, "evt_1", "failed");
    let log = server.stop();
    assert!(log.contains("attempts of stripe/fee failed (1)"), "{log}");
    assert!(!log.contains("po_") && !log.contains("malformed"), "{log}");
}

/// A signed event with the longest allowed body.
fn long_event(id: &str) -> String {
    let filler = "a".repeat((1 << 20) - 200);
    format!(r#"{{"id":"{id}","object":"event","type":"x.y","filler":"{filler}"}}"#)
}

#[test]
fn a_slow_function_ends_at_the_timeout_and_acks_continue() {
    // SQLite cannot interrupt a function. Comparing this body with this pattern takes its built-in
    // LIKE most of a minute. Without the timeout, the writer would ack nothing in that time, and
    // the job would succeed.
    let slow = format!(
        "[sources.stripe.handlers.slow]\nretry = [\"0s\"]\nsql = \"\"\"{};
         SELECT :body LIKE '%' || substr(:body, 500, 40000) || 'b'\"\"\"\n",
        ledger::effect("slow")
    );
    let (house, ledger) = house(&slow, ledger::SCHEMA);
    let server = house.start();
    let sender = Sender::stripe(SECRET);
    server.ask(sender.request(long_event("evt_long")).bytes()).is("accepted");
    server.ask(sender.event("evt_short")).is("accepted");
    let event = until_status(&server, "evt_long", "dead");
    let job = job(&event, "slow");
    assert_eq!(outcomes(job), ["failed"], "{event}");
    let error = job["attempts"][0]["error"].as_str().unwrap_or_default();
    assert!(error.contains("statement 3") && error.contains("timed out after 100ms"), "{error}");
    until_status(&server, "evt_short", "processed");
    server.stop();
    assert_eq!(ledger.effects(), BTreeMap::from([("evt_short".to_owned(), 1)]));
}

#[test]
fn a_long_body_is_searched_in_time() {
    // With SQLite's built-in functions, each of these calls takes seconds to hours for a body of 1
    // MB.
    let quick = format!(
        "[sources.stripe.handlers.quick]\ntimeout = \"2s\"\nretry = [\"0s\"]\nsql = \"\"\"{};
         SELECT instr(:body, substr(:body, 500, 500000) || 'b')
                || length(replace(:body, substr(:body, 500, 500000) || 'b', ''))
                || length(trim(:body, replace(hex(zeroblob(100000)), '0', 'b') || 'a'))\"\"\"\n",
        ledger::effect("quick")
    );
    let (house, ledger) = house(&quick, ledger::SCHEMA);
    let server = house.start();
    let body = long_event("evt_long");
    server.ask(Sender::stripe(SECRET).request(&body).bytes()).is("accepted");
    let event = until_status(&server, "evt_long", "processed");
    assert_eq!(event["result"], format!("0{0}{0}", body.len()), "{}", event["jobs"]);
    server.stop();
    assert_eq!(ledger.effects(), BTreeMap::from([("evt_long".to_owned(), 1)]));
}

#[test]
fn a_missing_table_is_an_alert_before_the_first_event_until_it_is_there() {
    let (house, _ledger) = house(
        "[sources.stripe.handlers.fee]\nsql = \"INSERT INTO fees VALUES (:event_id)\"\n",
        ledger::SCHEMA,
    );
    let server = house.start();
    let alerts = || server.admin_get("/api/v1/alerts").json()["items"].clone();
    let alert = until("an alert", || alerts().as_array()?.first().cloned());
    assert_eq!(alert["name"], "statements", "{alert}");
    assert_eq!(alert["lane"], "stripe/fee", "{alert}");
    let message = alert["message"].as_str().unwrap_or_default();
    assert!(message.contains("no such table: fees"), "{alert}");
    let database = rusqlite::Connection::open(house.database()).unwrap();
    database.busy_timeout(std::time::Duration::from_secs(20)).unwrap();
    database.execute_batch("CREATE TABLE fees (id)").unwrap();
    until("it is over", || alerts().as_array()?.is_empty().then_some(()));
}

#[test]
fn attempts_of_pull_workers_are_counted_once() {
    // A request with a lost fence and a repeated request do not count as attempts.
    let (house, _ledger) =
        house("[sources.stripe.handlers.fee]\npull = true\nretry = [\"0s\", \"0s\"]\n", "");
    let server = house.start();
    server.ask(Sender::stripe(SECRET).event("evt_1")).is("accepted");
    let ask = json!({ "source": "stripe", "handler": "fee", "wait": "20s" });
    for (how, again) in [("fail", 409), ("complete", 200)] {
        let claim = server.admin_post("/api/v1/claims", &ask).json()["items"][0].clone();
        let path = format!("/api/v1/claims/{}/{how}", claim["job"].as_str().unwrap());
        for expected in [200, again] {
            let answer = server.admin_post(&path, &json!({ "fence": claim["fence"] }));
            assert_eq!(answer.status, expected, "{how}: {answer:?}");
        }
    }
    let jobs = |outcome: &str| {
        let outcome = format!("outcome=\"{outcome}\"");
        server.metric("hapax_jobs_total", &["handler=\"fee\"", &outcome])
    };
    assert_eq!((jobs("failed"), jobs("done")), (1.0, 1.0));
    assert_eq!(server.metric("hapax_handler_seconds_count", &["handler=\"fee\""]), 2.0);
}

#[test]
fn a_pull_workers_lease_outlives_the_server_and_its_completion_counts_after_a_restart() {
    let (house, _ledger) = house("[sources.stripe.handlers.fee]\npull = true\n", ledger::SCHEMA);
    let server = house.start();
    server.ask(Sender::stripe(SECRET).event("evt_1")).is("accepted");
    let ask = json!({ "source": "stripe", "handler": "fee", "limit": 5, "wait": "5s" });
    let claim = server.admin_post("/api/v1/claims", &ask).json()["items"][0].clone();
    server.kill();
    let server = house.start();
    let ask = json!({ "source": "stripe", "handler": "fee", "limit": 5 });
    let others = server.admin_post("/api/v1/claims", &ask).json();
    assert_eq!(others["items"], json!([]), "{others}");
    let path = format!("/api/v1/claims/{}/complete", claim["job"].as_str().unwrap());
    let done = server.admin_post(&path, &json!({ "fence": claim["fence"], "result": "50" }));
    assert_eq!(done.status, 200, "{done:?}");
    assert_eq!(until_status(&server, "evt_1", "processed")["result"], "50");
}

#[test]
fn a_hundred_resources_with_shuffled_versions_end_in_their_newest_state() {
    // Four versions of each resource are sent, in a random order, over eight connections. A handler
    // that overwrites its row is safe only if an older version never runs after a newer one.
    const RESOURCES: usize = 100;
    const VERSIONS: usize = 4;
    let handler = |name: &str| {
        format!(
            "[sources.stripe.handlers.{name}]\n{PATIENT}sql = \"\"\"\
             INSERT INTO {name} VALUES (:resource, json_extract(:body, '$.created'));\
             INSERT INTO applied VALUES ('{name}', :event_id)\"\"\"\n\
             [sources.stripe.handlers.{name}.order]\nresource = \"/data/object/id\"\n\
             by = \"/created\"\npolicy = \"latest\"\n"
        )
    };
    // Each handler has its own mark.
    let (house, ledger) = house(
        &format!("{}{}", handler("one"), handler("two")),
        "CREATE TABLE one (resource TEXT, version INTEGER);
         CREATE TABLE two (resource TEXT, version INTEGER);
         CREATE TABLE applied (handler TEXT, event_id TEXT);",
    );
    let sender = Sender::stripe(SECRET);
    let mut requests = Vec::new();
    for resource in 0..RESOURCES {
        for version in 1..=VERSIONS {
            let body = json!({
                "id": format!("evt_{resource}_{version}"), "object": "event",
                "type": "payout.updated", "created": version,
                "data": { "object": { "id": format!("po_{resource}") } },
            });
            requests.push(sender.request(body.to_string()).bytes());
        }
    }
    let mut dice = Dice::new();
    dice.shuffle(&mut requests);
    let mut load = Load::new(8, requests);
    let server = house.start();
    let blow_at = 1 + dice.below((RESOURCES * VERSIONS) as u64 - 1) as usize;
    load.send(server.ingress, |acked| {
        use std::sync::atomic::Ordering;
        until("the blow is due", || (acked.load(Ordering::Relaxed) >= blow_at).then_some(()));
        server.kill();
    });
    let server = house.start();
    load.send_all(server.ingress);
    let over = "SELECT count(*) FROM hapax_processed_events WHERE status IN ('processed', 'stale')";
    let all = (RESOURCES * VERSIONS) as i64;
    until("all is applied or stale", || (ledger.number(over) == all).then_some(()));
    server.stop();
    for name in ["one", "two"] {
        // The last row of each resource is its newest version, and versions only rise.
        let last = format!(
            "SELECT resource, version FROM {name} a
             WHERE rowid = (SELECT max(rowid) FROM {name} b WHERE b.resource = a.resource)"
        );
        let last = ledger.counts(&last);
        assert_eq!(last.len(), RESOURCES);
        assert!(last.values().all(|version| *version == VERSIONS as i64), "{name}: {last:?}");
        let back = format!(
            "SELECT count(*) FROM {name} a JOIN {name} b
             ON a.resource = b.resource AND a.rowid < b.rowid AND a.version >= b.version"
        );
        assert_eq!(ledger.number(&back), 0, "{name} went back");
    }
    let doubled = "SELECT count(*) - count(DISTINCT handler || event_id) FROM applied";
    assert_eq!(ledger.number(doubled), 0);
}

#[test]
fn a_job_that_two_workers_claim_at_once_goes_to_one_of_them() {
    const EVENTS: usize = 40;
    let (house, _ledger) = house("[sources.stripe.handlers.fee]\npull = true\n", ledger::SCHEMA);
    let server = house.start();
    Load::events(4, &Sender::stripe(SECRET), 0..EVENTS).send_all(server.ingress);
    let ask = json!({ "source": "stripe", "handler": "fee", "limit": 3 });
    let got: Vec<String> = std::thread::scope(|scope| {
        let worker = || {
            let mut got = Vec::new();
            let mut wire = crate::support::Wire::connect(server.admin);
            loop {
                let claims = wire.try_ask(&post(server.admin, "/api/v1/claims", &ask)).unwrap();
                let claims = claims.json()["items"].as_array().unwrap().clone();
                if claims.is_empty() {
                    return got;
                }
                for claim in claims {
                    let path =
                        format!("/api/v1/claims/{}/complete", claim["job"].as_str().unwrap());
                    let fence = json!({ "fence": claim["fence"] });
                    let done = wire.try_ask(&post(server.admin, &path, &fence)).unwrap();
                    assert_eq!(done.status, 200, "{done:?}");
                    got.push(claim["event"]["event_id"].as_str().unwrap().to_owned());
                }
            }
        };
        let workers: Vec<_> = (0..4).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    let distinct: std::collections::BTreeSet<&String> = got.iter().collect();
    assert_eq!((got.len(), distinct.len()), (EVENTS, EVENTS));
}

#[test]
fn no_sender_can_forge_hapax_headers_to_an_app_by_another_spelling() {
    // A signed event may have any header besides its signature. An app that reads `_` as `-` would
    // take its fence, its key or its signature from there.
    let app = Upstream::counting();
    let handler = format!("[sources.stripe.handlers.call]\nhttp = \"{}\"\n", app.url());
    let (house, _ledger) = house(&handler, "");
    let server = house.start();
    let mut request = Sender::stripe(SECRET).request(event("evt_1"));
    for (name, value) in [
        ("hapax_fence", "1"),
        ("hapax-fence", "1"),
        ("hapax_job", "x"),
        ("idempotency_key", "other"),
        ("idempotency-key", "other"),
        ("webhook_id", "other"),
        ("webhook_signature", "v1,other"),
        ("x_forwarded_for", "10.0.0.1"),
        ("content_length", "1"),
        ("stripe_signature", "t=1,v1=00"),
        ("api_key", "kept"),
    ] {
        request = request.with(name, value);
    }
    server.ask(request.bytes()).is("accepted");
    until_status(&server, "evt_1", "processed");
    let asked = &app.effects()[0];
    let spelled = asked.headers.iter().map(|(name, _)| name.as_str());
    let spelled: Vec<_> = spelled.filter(|name| name.contains('_')).collect();
    assert_eq!(spelled, ["api_key"], "{asked:?}");
    // Each header of Hapax appears once, with Hapax's value.
    assert_ne!(asked.header("idempotency-key"), Some("other"));
    assert!(asked.header("webhook-id").is_some() && asked.header("hapax-job").is_some());
    server.stop();
}

#[test]
fn the_answer_of_a_failing_app_is_stored_and_it_can_fail_for_good() {
    // Plain text, then JSON, then more than is stored, then a final failure.
    let app = App::saying(|call| match call.attempt {
        1 => (500, "boom: card declined\n".to_owned()),
        2 => (503, r#"{"error":"try later","retry":"soon"}"#.to_owned()),
        3 => (422, "x".repeat(3_000)),
        _ => (400, r#"{"error":"no such customer","retry":"never"}"#.to_owned()),
    });
    let retry = "retry = [\"0s\", \"0s\", \"0s\", \"0s\", \"0s\", \"0s\"]";
    let http = format!("[sources.stripe.handlers.notify]\nhttp = \"{}\"\n{retry}\n", app.url());
    let (house, _ledger) = house(&http, "");
    let server = house.start();
    server.ask(Sender::stripe(SECRET).event("evt_1")).is("accepted");
    let event = until_status(&server, "evt_1", "dead");
    assert_eq!(app.calls().len(), 4, "it is not asked again");
    let attempts = event["attempts"].as_array().unwrap();
    let said: Vec<_> = attempts
        .iter()
        .map(|attempt| (attempt["status"].as_u64().unwrap(), attempt["answer"].as_str().unwrap()))
        .collect();
    let kept = "x".repeat(1_024);
    let expected = [
        (500, "boom: card declined"),
        (503, r#"{"error":"try later","retry":"soon"}"#),
        (422, kept.as_str()),
        (400, r#"{"error":"no such customer","retry":"never"}"#),
    ];
    assert_eq!(said, expected, "{event}");
    assert!(attempts.iter().all(|attempt| attempt["took_ms"].is_u64()), "{event}");
    assert_eq!(job(&event, "notify")["error"], "HTTP 400: no such customer");
}

#[test]
fn the_answer_of_a_successful_app_is_stored_too() {
    // No body, more than is stored with a character on the cut, and bytes that control a terminal.
    let app = App::saying(|call| match call.attempt {
        _ if call.body.contains("evt_1") => (204, String::new()),
        _ if call.body.contains("evt_2") => {
            (200, format!("{}\u{e9}{}", "x".repeat(1_023), "y".repeat(2_000)))
        }
        1 => (500, "boom".to_owned()),
        _ => (201, "\u{1b}[31mred\0 \"quoted\"\nline".to_owned()),
    });
    let http = format!(
        "[sources.stripe.handlers.notify]\nhttp = \"{}\"\nretry = [\"0s\", \"0s\"]\n",
        app.url()
    );
    let (house, _ledger) = house(&http, "");
    let server = house.start();
    let attempts = |id: &str| {
        server.ask(Sender::stripe(SECRET).event(id)).is("accepted");
        let event = until_status(&server, id, "processed");
        let attempts = event["attempts"].as_array().unwrap().clone();
        assert!(attempts.iter().all(|attempt| attempt["took_ms"].is_u64()), "{event}");
        attempts
    };
    let [empty] = &attempts("evt_1")[..] else { panic!("one attempt") };
    assert_eq!((&empty["status"], &empty["answer"]), (&json!(204), &json!(null)), "{empty}");
    let [long] = &attempts("evt_2")[..] else { panic!("one attempt") };
    assert_eq!((&long["status"], &long["answer"]), (&json!(200), &json!("x".repeat(1_023))));
    let [failed, done] = &attempts("evt_3")[..] else { panic!("two attempts") };
    assert_eq!((&failed["status"], &failed["answer"]), (&json!(500), &json!("boom")));
    let said = "\u{1b}[31mred\u{fffd} \"quoted\"\nline";
    assert_eq!((&done["status"], &done["answer"]), (&json!(201), &json!(said)));
}
