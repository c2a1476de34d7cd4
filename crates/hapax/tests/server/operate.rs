//! Operating the real server: dead letters, replay, review, pull workers and doctor, through the
//! API and the command line.

use crate::common::{Run, hapax};
use crate::support::sender::{event, now};
use crate::support::sink::Sink;
use crate::support::{Answer, House, Sender, Server, Wire, until};
use serde_json::{Value, json};

const SECRET: &str = "whsec_of_operate";

fn stripe(handlers: &str) -> String {
    format!(
        "[sources.stripe]\nprovider = \"stripe\"\nsecrets = [\"{SECRET}\"]\nlate = \"review\"\n\
         {handlers}"
    )
}

fn post(server: &Server, path: &str, body: &Value) -> Answer {
    post_as(server, "", path, body)
}

fn post_as(server: &Server, token: &str, path: &str, body: &Value) -> Answer {
    let authorization = match token {
        "" => String::new(),
        token => format!("authorization: Bearer {token}\r\n"),
    };
    let body = body.to_string();
    let mut wire = Wire::connect(server.admin);
    wire.write(format!(
        "POST /api/v1{path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{authorization}\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    ));
    wire.answer()
}

fn command(server: &Server, args: &[&str]) -> Run {
    hapax(args).args(&["--admin", &format!("http://{}", server.admin)]).run()
}

fn shown(server: &Server, id: &str) -> Value {
    server.admin_get(&format!("/api/v1/events/{id}")).json()
}

fn reaches(server: &Server, id: &str, status: &str) -> Value {
    until(&format!("{id} is {status}"), || {
        Some(shown(server, id)).filter(|event| event["status"] == status)
    })
}

#[test]
fn a_dead_letter_is_listed_explained_and_replayed_once_its_cause_is_gone() {
    let house = House::new(&stripe(
        "[sources.stripe.handlers.charge-fee]\nretry = [\"0s\"]\ntimeout = \"10s\"\n\
         sql = \"INSERT INTO fees(payout) VALUES (:event_id) RETURNING 'fee of ' || payout\"\n",
    ));
    let server = house.start();
    let sender = Sender::stripe(SECRET);
    for _copy in 0..3 {
        server.ask(sender.event("evt_1"));
    }
    reaches(&server, "evt_1", "dead");
    assert_eq!(shown(&server, "evt_1")["arrival_count"], 3, "copies count at once");
    let listed = command(&server, &["dead", "list", "--json"]);
    let job: Value = serde_json::from_str(&listed.stdout).unwrap();
    assert_eq!((&job["handler"], &job["status"]), (&json!("charge-fee"), &json!("dead")));
    let explained = command(&server, &["explain", "evt_1"]);
    assert!(explained.stdout.contains("Handler charge-fee gave up"), "{explained:?}");
    assert!(explained.stdout.contains("no such table: fees"), "{explained:?}");

    let database = rusqlite::Connection::open(house.database()).unwrap();
    database.execute_batch("CREATE TABLE fees(payout TEXT)").unwrap();
    let dry = command(&server, &["dead", "replay", "--handler", "charge-fee", "--dry-run"]);
    assert_eq!(dry.stdout, "evt_1  charge-fee  would run\n", "{dry:?}");
    let id = job["id"].as_str().unwrap();
    let replayed = command(&server, &["dead", "replay", id, "--reason", "the table is there now"]);
    assert_eq!(replayed.stdout, "evt_1  charge-fee  queued to run\n", "{replayed:?}");
    let event = reaches(&server, "evt_1", "processed");
    assert_eq!(event["result"], "fee of evt_1");
    assert_eq!(event["actions"][0]["who"], "loopback");

    // A done job stays done, however often a replay is requested.
    for _again in 0..3 {
        let run = command(&server, &["events", "replay", "evt_1"]);
        assert_eq!(run.stdout, "evt_1  charge-fee  done already: not run again\n", "{run:?}");
    }
    let fees = || -> i64 {
        database.query_row("SELECT count(*) FROM fees", [], |row| row.get(0)).unwrap()
    };
    assert_eq!(fees(), 1);
    command(&server, &["events", "replay", "evt_1", "--force", "--reason", "refunded"]);
    until("the forced run", || (fees() == 2).then_some(()));
    let explained = command(&server, &["explain", "evt_1"]).stdout;
    assert!(explained.contains("arrived 3 times"), "{explained}");
    assert!(explained.contains("loopback replayed it at "), "{explained}");
    assert!(explained.contains("(reason: \"refunded\")"), "{explained}");
}

#[test]
fn a_pull_worker_works_under_its_fence_and_a_lost_one_changes_nothing() {
    let house = House::new(&stripe(
        "[sources.stripe.handlers.fee]\npull = true\n\
         [sources.stripe.handlers.mail]\nsql = \"SELECT 'sent'\"\n\
         [tokens.worker]\nvalue = \"token-of-the-worker\"\nallow = [\"claim:stripe/fee\"]\n",
    ));
    let server = house.start();
    let ask = json!({ "source": "stripe", "handler": "fee", "limit": 5, "wait": "30s" });
    let claimed = std::thread::scope(|scope| {
        // The request begins to wait before there is a job to claim.
        let waiting = scope.spawn(|| post_as(&server, "token-of-the-worker", "/claims", &ask));
        server.ask(Sender::stripe(SECRET).event("evt_1")).is("accepted");
        waiting.join().unwrap()
    });
    assert_eq!(claimed.status, 200, "{claimed:?}");
    let claim = &claimed.json()["items"][0];
    assert_eq!(claim["event"]["body"], event("evt_1"));
    assert_eq!(claim["event"]["event_id"], "evt_1");
    let id = shown(&server, "evt_1")["id"].as_str().unwrap().to_owned();
    assert_eq!(claim["idempotency_key"], format!("{id}:fee"));
    let (job, fence) = (claim["job"].as_str().unwrap(), claim["fence"].as_i64().unwrap());

    let act = |act: &str, body: Value| {
        post_as(&server, "token-of-the-worker", &format!("/claims/{job}/{act}"), &body)
    };
    assert_eq!(act("renew", json!({ "fence": fence })).status, 200);
    assert_eq!(act("complete", json!({ "fence": fence - 1 })).status, 409);
    assert_eq!(
        act("fail", json!({ "fence": fence, "error": "not yet", "retry_in": 0 })).status,
        200
    );

    let lost = fence;
    let again = post_as(&server, "token-of-the-worker", "/claims", &ask).json();
    let fence = again["items"][0]["fence"].as_i64().unwrap();
    assert_eq!(again["items"][0]["attempt"], 2);
    for late in ["renew", "complete"] {
        let answer = act(late, json!({ "fence": lost }));
        assert_eq!(answer.status, 409, "{late}: {answer:?}");
    }
    assert_eq!(act("fail", json!({ "fence": lost, "error": "late" })).status, 409);
    let publish = json!([{ "type": "fee.charged", "data": { "amount": 50 }, "id": "msg_1" }]);
    let done = json!({ "fence": fence, "result": "fee 50", "publish": publish });
    assert_eq!(act("complete", done.clone()).status, 200);
    assert_eq!(act("complete", done).status, 200, "the first answer may have been lost");
    assert_eq!(act("fail", json!({ "fence": fence, "error": "late" })).status, 409);

    let event = reaches(&server, "evt_1", "processed");
    assert_eq!(event["messages"].as_array().unwrap().len(), 1, "{event}");
    let jobs = event["jobs"].as_array().unwrap();
    let fee = jobs.iter().find(|job| job["handler"] == "fee").unwrap();
    assert_eq!(fee["result"], "fee 50");
    assert_eq!(fee["attempts"][0]["error"], "not yet");
    assert_eq!(fee["attempts"][1]["worker"], "worker");

    let mail = json!({ "source": "stripe", "handler": "mail", "limit": 1 });
    assert_eq!(post_as(&server, "token-of-the-worker", "/claims", &mail).status, 403);
    assert_eq!(post(&server, "/claims", &mail).status, 409, "it runs inside the server");
    assert_eq!(post_as(&server, "token-of-the-worker", "/jobs/replay", &json!({})).status, 403);
}

#[test]
fn a_server_that_stops_does_not_wait_for_a_claim_that_waits() {
    let house = House::new(&stripe("[sources.stripe.handlers.fee]\npull = true\n"));
    let server = house.start();
    let body = json!({ "source": "stripe", "handler": "fee", "wait": "60s" }).to_string();
    let mut wire = Wire::connect(server.admin);
    wire.write(format!(
        "POST /api/v1/claims HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    ));
    let began = std::time::Instant::now();
    server.stop();
    assert!(began.elapsed().as_secs() < 60, "the claim held up the stop");
}

#[test]
fn an_event_in_review_runs_once_approved_and_never_once_rejected() {
    let house = House::new(&stripe(
        "[sources.stripe.handlers.fee]\nsql = \"INSERT INTO fees VALUES (:event_id)\"\n",
    ));
    std::fs::create_dir_all(house.database().parent().unwrap()).unwrap();
    let database = rusqlite::Connection::open(house.database()).unwrap();
    database.execute_batch("CREATE TABLE fees(payout TEXT)").unwrap();
    let server = house.start();
    let sender = Sender::stripe(SECRET);
    for id in ["evt_good", "evt_bad"] {
        let late = sender.request_at(event(id), now() - 7200);
        assert_eq!(server.ask(late.bytes()).status, 202);
        assert_eq!(shown(&server, id)["status"], "review");
    }
    let run = command(&server, &["events", "list", "--status", "review"]);
    assert_eq!(run.stdout.lines().count(), 2, "{run:?}");
    assert_eq!(post(&server, "/events/evt_good/replay", &json!({ "force": true })).status, 409);

    // An operator approves the event while an on-time copy arrives.
    std::thread::scope(|scope| {
        for _person in 0..2 {
            scope.spawn(|| {
                let run = command(&server, &["events", "approve", "evt_good", "--reason", "known"]);
                assert_eq!(run.code, 0, "{run:?}");
            });
        }
        scope.spawn(|| server.ask(sender.event("evt_good")));
    });
    reaches(&server, "evt_good", "processed");
    let run = command(&server, &["events", "reject", "evt_bad", "--reason", "a replay"]);
    assert_eq!(run.code, 0, "{run:?}");
    assert_eq!(shown(&server, "evt_bad")["status"], "discarded");
    assert_eq!(command(&server, &["events", "approve", "evt_bad"]).code, 1);
    assert_eq!(command(&server, &["events", "reject", "evt_good", "--reason", "no"]).code, 1);
    server.ask(sender.event("evt_bad"));
    server.stop();
    let fees: Vec<String> = {
        let mut query = database.prepare("SELECT payout FROM fees").unwrap();
        query.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect()
    };
    assert_eq!(fees, ["evt_good"]);
}

#[test]
fn a_handler_that_is_added_later_can_be_run_over_old_events() {
    let house = House::new(&stripe(""));
    let server = house.start();
    server.ask(Sender::stripe(SECRET).event("evt_1")).is("accepted");
    assert_eq!(shown(&server, "evt_1")["status"], "ignored");
    house.configure(&stripe("[sources.stripe.handlers.fee]\nsql = \"SELECT 'late but done'\"\n"));
    server.signal("HUP");
    server.stderr.wait_for("reloaded configuration");
    let run = command(&server, &["events", "replay", "evt_1"]);
    assert_eq!(run.stdout, "evt_1  fee  queued to run\n", "{run:?}");
    assert_eq!(reaches(&server, "evt_1", "processed")["result"], "late but done");
}

#[test]
fn tokens_act_under_their_own_name_and_within_their_own_scope() {
    let house = House::new(&format!(
        "admin_listen = \"0.0.0.0:0\"\n\
         [tokens.ana]\nvalue = \"token-of-the-operator\"\nallow = [\"operate\"]\n\
         [tokens.viewer]\nvalue = \"token-of-the-viewer\"\nallow = [\"read\"]\n{}",
        stripe("[sources.stripe.handlers.fee]\nsql = \"SELECT 1\"\n")
    ));
    let server = house.start();
    server.ask(Sender::stripe(SECRET).event("evt_1")).is("accepted");
    let path = "/events/evt_1/replay";
    assert_eq!(post(&server, path, &json!({})).status, 401);
    assert_eq!(post_as(&server, "token-of-the-viewer", path, &json!({})).status, 403);
    let admin = format!("http://{}", server.admin);
    let show = |token: &str| {
        hapax(&["events", "show", "evt_1", "--json", "--admin", &admin])
            .env("HAPAX_TOKEN", token)
            .run()
    };
    assert_eq!(show("wrong").code, 3);
    let event = || -> Value {
        serde_json::from_str(&show("token-of-the-viewer").stdout).expect("an event")
    };
    until("it is processed", || (event()["status"] == "processed").then_some(()));
    let force = json!({ "force": true, "reason": "why" });
    assert_eq!(post_as(&server, "token-of-the-operator", path, &force).status, 200);
    let event = event();
    assert_eq!(event["actions"][0]["who"], "ana", "{event}");
}

#[test]
fn commands_find_the_server_and_its_token_by_its_config() {
    let fee = "[sources.stripe.handlers.fee]\nsql = \"SELECT 1\"\n";
    let config =
        |admin: &str| format!("admin_open = false\nadmin_listen = \"{admin}\"\n{}", stripe(fee));
    let house = House::new(&config("127.0.0.1:0"));
    let server = house.start();
    server.ask(Sender::stripe(SECRET).event("evt_1")).is("accepted");
    let file = house.config_file().display().to_string();
    let data_dir = house.database().parent().unwrap().display().to_string();
    let list = ["events", "list", "--config", &file, "--data-dir", &data_dir];
    let run = hapax(&list).run();
    assert_eq!(run.code, 2, "port 0 says nothing of where it is: {run:?}");
    assert!(run.stderr.contains("--admin"), "{run:?}");
    // A config as an operator writes it: with the server's port. Its secrets are not needed.
    let named = config(&server.admin.to_string()).replace(SECRET, "env:NOT_SET_HERE");
    house.configure(&named);
    let run = hapax(&list).run();
    assert_eq!(run.code, 0, "{run:?}");
    assert!(run.stdout.contains("evt_1"), "{run:?}");
    let run = hapax(&["events", "list"])
        .env("HAPAX_CONFIG", &file)
        .env("HAPAX_DATA_DIR", &data_dir)
        .run();
    assert!(run.code == 0 && run.stdout.contains("evt_1"), "{run:?}");
    let shown = || -> Value {
        let run = hapax(&["events", "show", "evt_1", "--json"]).args(&list[2..]).run();
        serde_json::from_str(&run.stdout).unwrap_or_else(|_| panic!("{run:?}"))
    };
    until("it is processed", || (shown()["status"] == "processed").then_some(()));
    let run = hapax(&["events", "replay", "evt_1", "--force"]).args(&list[2..]).run();
    assert_eq!(run.code, 0, "{run:?}");
    assert_eq!(shown()["actions"][0]["who"], "admin.token");
    // Without the data directory there is no token, and the hint names its path.
    let run = hapax(&["events", "list", "--config", &file]).run();
    assert_eq!(run.code, 3, "{run:?}");
    assert!(run.stderr.contains("admin.token") && run.stderr.contains("--data-dir"), "{run:?}");
    server.stop();
    let run = hapax(&list).run();
    assert_eq!(run.code, 3, "{run:?}");
    assert!(run.stderr.contains("hint: check that the server runs"), "{run:?}");
}

#[test]
fn doctor_passes_on_a_running_server_and_names_jobs_without_a_handler() {
    let house = House::new(&stripe("[sources.stripe.handlers.fee]\npull = true\n"));
    let server = house.start();
    server.ask(Sender::stripe(SECRET).event("evt_1")).is("accepted");
    let admin = format!("http://{}", server.admin);
    let config = house.config_file().display().to_string();
    let data_dir = house.database().parent().unwrap().display().to_string();
    let doctor = || {
        hapax(&["doctor", "--config", &config, "--data-dir", &data_dir, "--admin", &admin]).run()
    };
    let run = doctor();
    assert_eq!(run.code, 0, "{run:?}");
    for line in ["ok    database", "ok    server", "ok    clock", "ok    jobs"] {
        assert!(run.stdout.contains(line), "{line}\n{}", run.stdout);
    }
    house.configure(&stripe(""));
    server.signal("HUP");
    server.stderr.wait_for("reloaded configuration");
    let run = doctor();
    assert_eq!(run.code, 0, "{run:?}");
    assert!(
        run.stdout.contains("waiting jobs of stripe/fee, which is not configured: 1"),
        "{run:?}"
    );
}

#[test]
fn a_token_that_is_taken_out_of_the_config_is_refused_after_the_reload() {
    let config = |token: &str| {
        format!(
            "admin_listen = \"0.0.0.0:0\"\n[tokens.ops]\nvalue = \"{token}\"\n\
             allow = [\"operate\"]\n{}",
            stripe("")
        )
    };
    let house = House::new(&config("token-of-the-day-before"));
    let server = house.start();
    let asks = |token: &str| post_as(&server, token, "/jobs/replay", &json!({})).status;
    assert_eq!((asks("token-of-the-day-before"), asks("token-of-the-day-after")), (200, 401));
    house.configure(&config("token-of-the-day-after"));
    server.signal("HUP");
    server.stderr.wait_for("reloaded configuration");
    assert_eq!((asks("token-of-the-day-before"), asks("token-of-the-day-after")), (401, 200));
}

#[test]
fn statistics_and_alerts_report_copies_forgeries_and_dead_letters() {
    // The command line and the API show events that arrived five times, forged requests, and a dead
    // letter.
    let house = House::new(&stripe(
        "[sources.stripe.handlers.fee]\nsql = \"SELECT 'done'\"\n\
         [sources.stripe.handlers.broken]\nretry = [\"0s\"]\ntypes = [\"never.*\"]\n\
         sql = \"SELECT json('{')\"\n\
         [alerts]\nfailed_verifications = \"3/h\"\n",
    ));
    let soon = "alerts.every_ms=50,alerts.raise_after_ms=100,alerts.quiet_ms=200";
    let server = house.start_with(&[("HAPAX_TEST_SETTINGS", soon)]);
    assert_eq!(command(&server, &["alerts"]).code, 0);
    let (sender, forger) = (Sender::stripe(SECRET), Sender::stripe("whsec_of_somebody_else"));
    for copy in 0..5 {
        for id in ["evt_1", "evt_2"] {
            let answer = server.ask(sender.event(id));
            answer.is(if copy == 0 { "accepted" } else { "duplicate" });
        }
    }
    for _forgery in 0..3 {
        assert_eq!(server.ask(forger.event("evt_3")).status, 401);
    }
    let stats = |query: &str| server.admin_get(&format!("/api/v1/stats{query}")).json();
    let figures = until("copies are counted and the work is done", || {
        let figures = stats("?source=stripe&window=10m");
        (figures["received"] == 10 && figures["succeeded"] == 2).then_some(figures)
    });
    assert_eq!((&figures["unique"], &figures["duplicates"]), (&json!(2), &json!(8)), "{figures}");
    assert_eq!(
        (&figures["duplicate_rate"], &figures["copies_per_event"]),
        (&json!(0.8), &json!(5.0))
    );
    assert_eq!((&figures["failed_verifications"], &figures["sampled"]), (&json!(3), &json!(false)));
    assert_eq!(figures["gaps_seconds"].as_array().unwrap().len(), 4, "{figures}");
    for timed in ["ack_seconds", "wait_seconds", "processing_seconds"] {
        assert!(figures[timed]["p99"].as_f64().unwrap() > 0.0, "{figures}");
    }
    assert_eq!((&figures["success_rate"], &figures["died"]), (&json!(1.0), &json!(0)), "{figures}");
    assert_eq!(figures["failed_verifications_by_reason"], json!({ "signature": 3 }));
    assert_eq!(stats("")["sources"]["stripe"]["received"], 10);
    let run = command(&server, &["stats"]);
    assert!(run.stdout.contains("stripe") && run.stdout.contains("8 (80.0%)"), "{run:?}");
    let run = command(&server, &["stats", "--source", "stripe", "--window", "10m", "--json"]);
    assert_eq!(serde_json::from_str::<Value>(&run.stdout).unwrap()["unique"], 2, "{run:?}");

    let alert = |name: &str| {
        let alerts = server.admin_get("/api/v1/alerts").json();
        let items = alerts["items"].as_array().unwrap().clone();
        items.into_iter().find(|alert| alert["name"] == name)
    };
    let failed = until("the alert about forged requests", || alert("failed_verifications"));
    assert_eq!(failed["source"], "stripe");
    assert!(alert("dead_letters").is_none());
    let body = event("evt_dead").replace("\"type\":\"", "\"type\":\"never.");
    server.ask(sender.request(&body).bytes()).is("accepted");
    let dead = until("a dead letter", || alert("dead_letters"));
    assert_eq!(dead["lane"], "stripe/broken");
    until("the metric", || (server.metric("hapax_alerts", &["dead_letters"]) == 1.0).then_some(()));
    let run = command(&server, &["alerts"]);
    assert_eq!(run.code, 1, "{run:?}");
    assert!(run.stdout.contains("stripe/broken has 1 dead letter"), "{run:?}");
    server.stderr.wait_for("stripe/broken has 1 dead letter");

    // A reload applies the new thresholds and keeps the counts.
    house.configure(&stripe("[alerts]\ndead_letters = \"off\"\n"));
    server.signal("HUP");
    server.stderr.wait_for("reloaded configuration");
    until("the alert is gone", || alert("dead_letters").is_none().then_some(()));
    server.stderr.wait_for("cleared: stripe/broken has 1 dead letter");
    assert_eq!(stats("")["failed_verifications"], 3);
    let log = server.stop();
    let lines = |part: &str| log.lines().filter(|line| line.contains(part)).count();
    assert_eq!(lines("stripe/broken has 1 dead letter"), 2, "begun once, over once: {log}");
}

#[test]
fn figures_that_were_recorded_survive_a_kill_and_are_counted_once() {
    // The second process counts the same source from zero; a pull worker completes one job and gives up another.
    let house = House::new(&stripe("[sources.stripe.handlers.fee]\npull = true\n"));
    let sender = Sender::stripe(SECRET);
    let claim = json!({ "source": "stripe", "handler": "fee", "limit": 1, "wait": "10s" });
    let figures = |server: &Server| server.admin_get("/api/v1/stats?source=stripe").json();
    let pull = |server: &Server, act: &str, outcome: Value| {
        let claimed = server.admin_post("/api/v1/claims", &claim).json();
        let item = &claimed["items"][0];
        let mut body = json!({ "fence": item["fence"] });
        body.as_object_mut().unwrap().extend(outcome.as_object().unwrap().clone());
        let path = format!("/api/v1/claims/{}/{act}", item["job"].as_str().unwrap());
        assert_eq!(server.admin_post(&path, &body).status, 200, "{claimed}");
    };
    let server = house.start();
    for id in ["evt_1", "evt_1", "evt_2"] {
        server.ask(sender.event(id));
    }
    pull(&server, "complete", json!({ "result": "paid" }));
    let before = figures(&server);
    assert_eq!((&before["received"], &before["succeeded"]), (&json!(3), &json!(1)), "{before}");
    server.kill();

    let server = house.start();
    let again = figures(&server);
    for figure in ["received", "unique", "duplicates", "succeeded", "ack_seconds"] {
        assert_eq!(again[figure], before[figure], "{figure}: {again}");
    }
    server.ask(sender.event("evt_3")).is("accepted");
    pull(&server, "fail", json!({ "error": "no such account", "retry_in": "never" }));
    let after = figures(&server);
    assert_eq!((&after["received"], &after["unique"]), (&json!(4), &json!(3)), "{after}");
    let ended = ["succeeded", "failed_attempts", "died"].map(|figure| after[figure].as_u64());
    assert_eq!(ended, [Some(1); 3], "{after}");
    assert_eq!(after["success_rate"], json!(0.5), "{after}");
}

#[test]
fn events_that_came_and_never_completed_are_found() {
    let house =
        House::new(&stripe("[sources.stripe.handlers.fee]\ntypes = [\"never.*\"]\npull = true\n"));
    let server = house.start();
    let sender = Sender::stripe(SECRET);
    let body = event("evt_open").replace("\"type\":\"", "\"type\":\"never.");
    server.ask(sender.request(&body).bytes()).is("accepted");
    server.ask(sender.event("evt_done")).is("accepted");
    let run = command(&server, &["events", "list", "--unfinished-for", "0s", "--json"]);
    let found: Value = serde_json::from_str(&run.stdout).expect("one line");
    assert_eq!(found["event_id"], "evt_open", "{run:?}");
    let run = command(&server, &["events", "list", "--unfinished-for", "10m", "--json"]);
    assert_eq!(run.stdout, "", "it came just now");
}

#[test]
fn a_job_that_waits_for_tomorrow_is_run_now_by_a_replay() {
    let house = House::new(&stripe(
        "[sources.stripe.handlers.fee]\nretry = [\"0s\", \"24h\"]\n\
         sql = \"INSERT INTO fees VALUES (:event_id); SELECT 'charged'\"\n",
    ));
    let server = house.start();
    server.ask(Sender::stripe(SECRET).event("evt_1")).is("accepted");
    reaches(&server, "evt_1", "failed");
    let database = rusqlite::Connection::open(house.database()).unwrap();
    database.execute_batch("CREATE TABLE fees(event TEXT)").unwrap();
    let dry = command(&server, &["events", "replay", "evt_1", "--dry-run"]);
    assert_eq!(dry.stdout, "evt_1  fee  would run\n", "{dry:?}");
    let run = command(&server, &["events", "replay", "evt_1"]);
    assert_eq!(run.stdout, "evt_1  fee  queued to run\n", "{run:?}");
    let event = reaches(&server, "evt_1", "processed");
    assert_eq!(event["result"], "charged");
    // Later requests change nothing, and are not recorded.
    command(&server, &["events", "replay", "evt_1"]);
    assert_eq!(shown(&server, "evt_1")["actions"].as_array().unwrap().len(), 1);
}

#[test]
fn a_dead_letter_whose_handler_is_gone_is_discarded_and_its_alert_ends() {
    let house = House::new(&stripe(
        "[sources.stripe.handlers.fee]\nretry = [\"0s\"]\nsql = \"INSERT INTO gone VALUES (1)\"\n\
         [sources.stripe.handlers.mail]\nretry = [\"0s\"]\nsql = \"INSERT INTO gone VALUES (2)\"\n",
    ));
    let server = house.start();
    server.ask(Sender::stripe(SECRET).event("evt_1")).is("accepted");
    until("both are dead", || {
        let dead = server.admin_get("/api/v1/jobs?status=dead").json();
        (dead["items"].as_array().unwrap().len() == 2).then_some(())
    });
    house.configure(&stripe(""));
    server.signal("HUP");
    server.stderr.wait_for("reloaded configuration");
    until("the alert", || (command(&server, &["alerts"]).code == 1).then_some(()));
    let listed = command(&server, &["dead", "list", "--handler", "fee", "--json"]);
    let job: Value = serde_json::from_str(&listed.stdout).unwrap();
    let id = job["id"].as_str().unwrap();
    let replayed = command(&server, &["dead", "replay", id]);
    assert_eq!(replayed.code, 1, "{replayed:?}");
    assert!(
        replayed.stderr.contains("add the handler") && replayed.stderr.contains("discard"),
        "{replayed:?}"
    );
    let run = command(&server, &["dead", "discard", id, "--reason", "refunded"]);
    assert_eq!(run.code, 0, "{run:?}");
    let again = command(&server, &["dead", "discard", id]);
    assert!(again.code == 0 && again.stderr.contains("nothing changed"), "{again:?}");
    assert_eq!(command(&server, &["dead", "discard"]).code, 2, "which ones?");
    let none = command(&server, &["dead", "discard", "--handler", "fee"]);
    assert!(none.code == 0 && none.stderr.contains("no dead letter matches"), "{none:?}");
    let refused = command(&server, &["events", "discard", "evt_none"]);
    assert_eq!(refused.code, 1, "{refused:?}");
    let run = command(&server, &["dead", "discard", "--handler", "mail", "--json"]);
    let answer: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!((&answer["status"], &answer["changed"]), (&json!("discarded"), &json!(true)));
    let run = command(&server, &["events", "discard", "evt_1", "--json"]);
    let answer: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!((&answer["status"], &answer["changed"]), (&json!("discarded"), &json!(false)));
    until("no alert", || (command(&server, &["alerts"]).code == 0).then_some(()));
    let empty = command(&server, &["dead", "list"]);
    assert!(empty.stdout.is_empty() && empty.stderr.contains("no dead letters"), "{empty:?}");
    let event = shown(&server, "evt_1");
    let done: Vec<_> =
        event["actions"].as_array().unwrap().iter().map(|it| it["action"].clone()).collect();
    assert_eq!(done, ["discard", "discard"], "{event}");
    server.ask(Sender::stripe(SECRET).event("evt_2")).is("accepted");
    let refused = command(&server, &["events", "discard", "evt_2"]);
    assert!(refused.code == 1 && refused.stderr.contains("the status is ignored"), "{refused:?}");
}

#[test]
fn events_in_review_raise_an_alert_and_only_they_are_approved() {
    let house = House::new(&stripe(""));
    let server = house.start();
    let sender = Sender::stripe(SECRET);
    let old = sender.request_at(event("evt_late"), crate::support::sender::now() - 86_400);
    assert_eq!(server.ask(old.bytes()).status, 202);
    // The command prints what the API returns.
    let alert = until("the alert is there", || {
        let alerts = server.admin_get("/api/v1/alerts").json();
        alerts["items"].as_array().unwrap().first().cloned()
    });
    assert_eq!((&alert["name"], &alert["source"]), (&json!("review"), &json!("stripe")), "{alert}");
    assert_eq!(alert["severity"], "warning", "{alert}");
    let run = command(&server, &["alerts"]);
    assert_eq!(run.code, 1, "{run:?}");
    assert!(run.stdout.contains("1 event waits for review"), "{run:?}");
    assert_eq!(server.metric("hapax_alerts", &["name=\"review\""]), 1.0);
    server.ask(sender.event("evt_1")).is("accepted");
    let run = command(&server, &["events", "approve", "evt_1"]);
    assert_eq!(run.code, 1, "{run:?}");
    assert!(run.stderr.contains("never waited for review"), "{run:?}");
    assert_eq!(command(&server, &["events", "approve", "evt_late"]).code, 0);
    let again = command(&server, &["events", "approve", "evt_late"]);
    assert!(again.code == 0 && again.stderr.contains("nothing changed"), "{again:?}");
    let run = until("the alert is over", || {
        let run = command(&server, &["alerts"]);
        (run.code == 0).then_some(run)
    });
    assert!(
        run.stderr.starts_with("no active alerts\nno endpoint receives alerts: no endpoint"),
        "{run:?}"
    );
    let count = |since: &str| {
        let run = command(&server, &["events", "list", "--since", since]);
        assert_eq!(run.code, 0, "{run:?}");
        run.stdout.lines().count()
    };
    assert_eq!((count("1h"), count("0s"), count("2100-01-01T00:00:00Z")), (2, 0, 0));
    assert_eq!(command(&server, &["events", "list", "--since", "soon"]).code, 2);
}

#[test]
fn a_silenced_alert_notifies_nobody_until_it_ends_and_a_test_reaches_the_receivers() {
    let settings = "alerts.every_ms=50,alerts.raise_after_ms=100,alerts.quiet_ms=300";
    let house = House::new(&stripe("[outbound]\nallow = [\"127.0.0.0/8\"]\n"));
    let server = house.start_with(&[("HAPAX_TEST_SETTINGS", settings)]);
    let test = command(&server, &["alerts", "test"]);
    assert_eq!(test.code, 1, "{test:?}");
    assert!(
        test.stderr.contains("no endpoint receives alerts") && test.stdout.is_empty(),
        "{test:?}"
    );
    let sink = Sink::accepting();
    let endpoint = json!({"url": sink.url(), "tenant": "hapax", "types": ["hapax.alert.*"]});
    assert_eq!(server.admin_post("/api/v1/endpoints", &endpoint).status, 201);
    let test = command(&server, &["alerts", "test"]);
    assert!(test.code == 0 && test.stdout.lines().count() == 2, "{test:?}");
    let body = |text: String| serde_json::from_str::<Value>(&text).unwrap();
    let came = |count: usize| -> Vec<(String, String)> {
        let got = sink.wait_for(count).into_iter().map(|one| body(one.text()));
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        got.map(|body| (text(&body["type"]), text(&body["data"]["name"]))).collect()
    };
    let message = |kind: &str, name: &str| (format!("hapax.alert.{kind}"), name.to_owned());
    let mut both = came(2);
    both.sort();
    assert_eq!(both, [message("cleared", "test"), message("raised", "test")]);

    let old = Sender::stripe(SECRET).request_at(event("evt_late"), now() - 86_400);
    assert_eq!(server.ask(old.bytes()).status, 202);
    assert_eq!(came(3)[2], message("raised", "review"));
    let listed = || server.admin_get("/api/v1/alerts").json()["items"][0].clone();
    let id = listed()["id"].as_str().unwrap().to_owned();
    let silence = |more: &[&str]| command(&server, &[&["alerts", "silence", &id], more].concat());
    for (bad, why) in [
        (&["--for", "4h"][..], "reason is needed"),
        (&["--for", "32d", "--reason", "x"], "at most 31d"),
        (&["--for", "soon", "--reason", "x"], "--for"),
    ] {
        let run = silence(bad);
        assert!(run.code != 0 && run.stderr.contains(why), "{run:?}");
    }
    let unknown = ["alerts", "silence", "alert_0", "--for", "1h", "--reason", "x"];
    let unknown = command(&server, &unknown);
    assert!(unknown.code == 1 && unknown.stderr.contains("no alert has that id"), "{unknown:?}");
    assert_eq!(listed()["silenced"], Value::Null);
    let run = silence(&["--for", "4h", "--reason", "anna looks at it"]);
    assert!(run.code == 0 && run.stdout.contains("anna looks at it"), "{run:?}");
    let run = command(&server, &["alerts"]);
    assert!(run.code == 0 && run.stdout.contains("silenced until"), "{run:?}");
    assert_eq!(listed()["silenced"]["who"], "loopback");
    until("the metric", || {
        (server.metric("hapax_alerts", &["name=\"review\""]) == 0.0).then_some(())
    });
    let audit = server.admin_get("/api/v1/audit").json().to_string();
    assert!(audit.contains("anna looks at it") && audit.contains("review stripe"), "{audit}");
    // The problem is solved, comes back while it is silenced, and the silence ends.
    assert_eq!(command(&server, &["events", "approve", "evt_late"]).code, 0);
    assert_eq!(came(4)[3], message("cleared", "review"));
    let old = Sender::stripe(SECRET).request_at(event("evt_later"), now() - 86_400);
    assert_eq!(server.ask(old.bytes()).status, 202);
    // Raised, cleared and raised again.
    until("it is raised again", || {
        let log = server.stderr.text();
        (log.matches("1 event waits for review").count() == 3).then_some(())
    });
    assert!(listed()["silenced"]["reason"] == "anna looks at it", "{}", listed());
    assert_eq!(sink.got().len(), 4, "it is silenced");
    assert_eq!(silence(&["--for", "0s"]).code, 0);
    assert_eq!(came(5)[4], message("raised", "review"));
}

#[test]
fn conflicts_jobs_without_a_handler_open_circuits_and_a_missing_key_are_alerts_while_they_last() {
    let handler = "[sources.stripe.handlers.fee]\npull = true\n";
    let config = |vault: &str, more: &str| {
        let key = format!("[vault]\nkey = \"{vault}\"\n");
        stripe(&format!("{more}{key}[outbound]\nallow = [\"127.0.0.0/8\"]\n"))
    };
    const FIRST: &str = "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=";
    const OTHER: &str = "OTg3NjU0MzIxMDk4NzY1NDMyMTA5ODc2NTQzMjEwOTg=";
    let house = House::new(&config(FIRST, handler));
    let settings = [("HAPAX_TEST_SETTINGS", "alerts.every_ms=50,circuit.open_ms=300")];
    let server = house.start_with(&settings);
    let names = |server: &Server| -> Vec<String> {
        let alerts = server.admin_get("/api/v1/alerts").json()["items"].clone();
        let name = |alert: &Value| alert["name"].as_str().unwrap().to_owned();
        let mut names: Vec<String> = alerts.as_array().unwrap().iter().map(name).collect();
        names.sort();
        names
    };
    let become_ = |server: &Server, expected: &[&str]| {
        until(&format!("{expected:?}"), || (names(server) == expected).then_some(()));
    };
    let sender = Sender::stripe(SECRET);
    server.ask(sender.event("evt_1")).is("accepted");
    assert_eq!(names(&server), [""; 0]);
    let body = event("evt_1");
    let other = format!("{},\"more\":1}}", body.trim_end().strip_suffix('}').unwrap());
    assert_eq!(server.ask(sender.request(&other).bytes()).status, 200);
    become_(&server, &["conflicts"]);

    // The handler is taken out of the config and put back.
    house.configure(&config(FIRST, "[alerts]\nconflicts = \"off\"\n"));
    server.signal("HUP");
    become_(&server, &["handler_gone"]);
    house.configure(&config(FIRST, &format!("{handler}[alerts]\nconflicts = \"off\"\n")));
    server.signal("HUP");
    become_(&server, &[]);

    // An endpoint fails until its circuit opens, and recovers.
    let answers = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let sink = {
        let answers = std::sync::Arc::clone(&answers);
        Sink::new(move |_, _| {
            let is_well = answers.load(std::sync::atomic::Ordering::SeqCst);
            if is_well { "200 OK" } else { "500 No" }.to_owned()
        })
    };
    let retry: Vec<&str> = vec!["0s"; 20];
    let endpoint = json!({"url": sink.url(), "types": ["a"], "retry": retry});
    assert_eq!(server.admin_post("/api/v1/endpoints", &endpoint).status, 201);
    assert_eq!(
        server.admin_post("/api/v1/messages", &json!({"type": "a", "data": {}})).status,
        202
    );
    become_(&server, &["circuits"]);
    answers.store(true, std::sync::atomic::Ordering::SeqCst);
    become_(&server, &[]);

    // The key that sealed the secret of the endpoint is lost, and found again.
    server.stop();
    house.configure(&config(OTHER, &format!("{handler}[alerts]\nconflicts = \"off\"\n")));
    let server = house.start_with(&settings);
    become_(&server, &["vault_key"]);
    server.stop();
    house.configure(&config(FIRST, &format!("{handler}[alerts]\nconflicts = \"off\"\n")));
    become_(&house.start_with(&settings), &[]);
}

#[test]
fn one_old_request_sent_forty_times_is_no_evidence_about_the_clock() {
    // The same request is refused as late and unknown each time. One event may be lost, and the
    // clock is right.
    let house = House::new(&stripe("").replace("late = \"review\"", "late = \"reject\""));
    let server = house.start();
    let to = format!("http://{}/webhooks/stripe", server.ingress);
    let long_ago = (crate::support::sender::now() - 90_000).to_string();
    let send = ["send", "stripe", "--to", &to, "--secret", SECRET, "--id", "evt_old"];
    let run = hapax(&send).args(&["--now", &long_ago, "--copies", "40"]).run();
    assert_eq!(run.code, 1, "{run:?}");
    let said = "401 refused evt_old: signature missing, wrong or outside the window";
    assert_eq!(run.stdout.lines().filter(|line| *line == said).count(), 40, "{run:?}");
    for n in 0..5 {
        server.ask(Sender::stripe(SECRET).event(&format!("evt_{n}"))).is("accepted");
    }
    until("the watch has looked", || {
        (server.metric("hapax_alerts", &["clock_skew"]) == 0.0
            && server.admin_get("/metrics").text().contains("hapax_alerts"))
        .then_some(())
    });
    let alerts = server.admin_get("/api/v1/alerts").json();
    let named =
        |name: &str| alerts["items"].as_array().unwrap().iter().any(|alert| alert["name"] == name);
    assert!(!named("clock_skew"), "{alerts}");
    let log = server.stop();
    let errors: Vec<_> = log.lines().filter(|line| line.contains("ERROR")).collect();
    assert_eq!(errors.len(), 1, "{errors:#?}");
}

#[test]
fn a_reload_that_is_refused_names_each_problem_on_a_line_of_its_own() {
    let house = House::new(&stripe(""));
    let server = house.start();
    house.configure(&stripe("colour = \"red\"\n[sources.b]\nprovider = \"none\"\n"));
    server.signal("HUP");
    server.stderr.wait_for("the server keeps the old one");
    until("both are said", || {
        (server.stderr.text().matches("the server keeps the old one").count() >= 2).then_some(())
    });
    let log = server.stop();
    assert!(!log.contains("\\n"), "{log}");
    assert!(log.lines().any(|line| line.contains("colour") && line.contains("; hint:")), "{log}");
}
