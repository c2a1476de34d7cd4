//! Each effect happens once although the process dies: at random moments, at each named failpoint,
//! or stopped past its lease. The ledgers have no unique constraint, so a second effect is a second
//! row.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use crate::support::app::App;
use crate::support::ledger::{self, Ledger};
use crate::support::load::{Dice, Load};
use crate::support::process::hits;
use crate::support::{House, Sender, Server, until};
use hapax_engine::limits::SQL_SLICE;
use serde_json::json;

const SECRET: &str = "whsec_work";
const SIGABRT: i32 = 6;

/// A source with handlers given as TOML.
fn house(handlers: &str) -> House {
    House::new(&config(handlers))
}

fn config(handlers: &str) -> String {
    format!("[sources.stripe]\nprovider = \"stripe\"\nsecrets = [\"{SECRET}\"]\n{handlers}")
}

fn sql_handler() -> String {
    let effect = ledger::effect("fee");
    // The timeout is not the default of 100 ms for SQL: on a busy machine one statement may take longer.
    format!("[sources.stripe.handlers.fee]\ntimeout = \"10s\"\nsql = \"\"\"{effect}\"\"\"\n")
}

fn sql_house() -> (House, Ledger) {
    let house = house(&sql_handler());
    let ledger = Ledger::create(&house, ledger::SCHEMA);
    (house, ledger)
}

/// Waits until every job has ended, and checks that none is a dead letter.
#[track_caller]
fn all_processed(server: &Server, ledger: &Ledger, events: usize) {
    let done = "SELECT count(*) FROM hapax_processed_events WHERE status = 'processed'";
    until("all events are processed", || (ledger.number(done) >= events as i64).then_some(()));
    let dead = server.admin_get("/api/v1/jobs?status=dead").json();
    assert_eq!(dead["items"], json!([]), "{dead}");
}

/// Sends `load` to a server that aborts at the `at`-th hit of `point`. Starts a second server,
/// which keeps running, and sends it the events that were not acked.
fn dies_at(house: &House, point: &str, at: usize, mut load: Load) -> Server {
    use std::os::unix::process::ExitStatusExt as _;
    let hit_file = house.path().join("hits");
    let hits_to = ("HAPAX_FAILPOINT_HITS", hit_file.to_str().unwrap());
    let before = hits(&hit_file, point);
    let plan = format!("{point}=abort@{at}");
    let mut server = house.start_with(&[("HAPAX_FAILPOINTS", &plan), hits_to]);
    load.send(server.ingress, |_| {
        assert_eq!(server.wait().signal(), Some(SIGABRT), "{point}@{at}");
    });
    assert_eq!(hits(&hit_file, point) - before, at, "{point}");
    let server = house.start_with(&[hits_to]);
    load.send_all(server.ingress);
    server
}

#[test]
fn a_sigkill_at_any_moment_neither_loses_nor_doubles_an_effect() {
    // The SIGKILL comes after a random number of acks, or a random number of effects later.
    const ROUNDS: usize = 6;
    const PER_ROUND: usize = 300;
    let (house, ledger) = sql_house();
    let sender = Sender::stripe(SECRET);
    let mut dice = Dice::new();
    for round in 0..ROUNDS {
        let server = house.start();
        let events = round * PER_ROUND..(round + 1) * PER_ROUND;
        let mut load = Load::events(8, &sender, events);
        let (acks, effects) = (dice.below(PER_ROUND as u64) as usize, dice.below(200) as i64);
        let address = server.ingress;
        load.send(address, |acked| {
            until("the blow is due", || (acked.load(Ordering::Relaxed) >= acks).then_some(()));
            if round % 2 == 1 {
                let sum = || ledger.number("SELECT balance FROM account");
                let at = (sum() + effects).min((round * PER_ROUND + acks) as i64 / 2);
                until("the workers went on", || (sum() >= at).then_some(()));
            }
            server.kill();
        });
        // The senders retry until every event is acked.
        let server = house.start();
        load.send_all(server.ingress);
        server.kill();
    }
    let server = house.start();
    all_processed(&server, &ledger, ROUNDS * PER_ROUND);
    server.stop();
    ledger.is_once_each(ROUNDS * PER_ROUND);
}

#[test]
fn a_crash_at_each_step_of_an_sql_handler_neither_loses_nor_doubles_an_effect() {
    const POINTS: [&str; 6] = [
        "ingress.before_commit",
        "ingress.after_commit_before_ack",
        "worker.after_claim",
        "worker.mid_handler",
        "worker.before_commit",
        "worker.after_commit",
    ];
    // More events than one slice takes: some points are passed only once per slice, and must be hit
    // twice.
    const EVENTS: usize = SQL_SLICE + 8;
    let (house, ledger) = sql_house();
    let sender = Sender::stripe(SECRET);
    let mut events = 0;
    for point in POINTS {
        // The process dies at the first hit, or at the second, after it has finished other jobs.
        for at in [1, 2] {
            let load = Load::events(2, &sender, events..events + EVENTS);
            events += EVENTS;
            let server = dies_at(&house, point, at, load);
            all_processed(&server, &ledger, events);
            ledger.is_once_each(events);
            server.kill();
        }
    }
}

#[test]
fn an_event_that_kills_the_process_does_not_harm_other_events() {
    // 63 good events are first claimed in one slice with the poisonous one, and all these attempts
    // are lost. From then on each job is claimed alone. So the good jobs are done although the
    // poisonous one kills the process each time.
    const POISON: &str = "evt_31";
    const EVENTS: usize = 64;
    // After one more death, the poisonous job would be a dead letter.
    const DEATHS_MAX: usize = 5;
    let (house, ledger) = sql_house();
    let hit_file = house.path().join("hits");
    let plan = format!("worker.mid_handler=abort:{POISON}");
    let kills =
        [("HAPAX_FAILPOINTS", plan.as_str()), ("HAPAX_FAILPOINT_HITS", hit_file.to_str().unwrap())];
    // The first process only accepts events, so that all jobs wait for the first claim of the next
    // one.
    house.configure(&config("[sources.stripe.handlers.fee]\npull = true\n"));
    let server = house.start();
    Load::events(4, &Sender::stripe(SECRET), 0..EVENTS).send_all(server.ingress);
    server.stop();
    house.configure(&config(&sql_handler()));
    let mut done = Vec::new();
    while done.last() != Some(&(EVENTS - 1)) && done.len() < DEATHS_MAX {
        let mut server = house.start_with(&kills);
        use std::os::unix::process::ExitStatusExt as _;
        assert_eq!(server.wait().signal(), Some(SIGABRT), "{}", server.stderr.text());
        done.push(ledger.effects().len());
        if done.len() == 1 {
            // On a slow machine, a slice gives back the jobs that it has no time for, and some jobs
            // may be done. All others were lost with the process.
            let died = ledger.number("SELECT count(*) FROM hapax_job WHERE state = 1") as usize;
            assert_eq!(died, EVENTS - done[0], "claimed and not done");
            assert!(died > 1, "it was not among others: {done:?}");
        }
    }
    // The poisonous job runs last now, after the longest backoff.
    assert!(!ledger.effects().contains_key(POISON));
    assert_eq!(done.last(), Some(&(EVENTS - 1)), "{done:?}");
    assert!(hits(&hit_file, "worker.mid_handler") >= EVENTS - 1 + done.len());
    // After the cause is removed, the poisonous job is done too.
    let server = house.start();
    all_processed(&server, &ledger, EVENTS);
    server.stop();
    ledger.is_once_each(EVENTS);
}

#[test]
fn a_crash_at_each_step_of_a_call_repeats_it_under_the_same_key_and_done_is_recorded() {
    const POINTS: [&str; 3] = ["http.before_send", "http.after_answer", "http.after_settle"];
    const EVENTS: usize = 20;
    let app = App::new(|_| 200);
    let house = house(&format!(
        "[sources.stripe.handlers.call]\nhttp = \"{}\"\nconcurrency = 4\n",
        app.url()
    ));
    let ledger = Ledger::create(&house, ledger::SCHEMA);
    let sender = Sender::stripe(SECRET);
    let mut events = 0;
    for point in POINTS {
        for at in [1, 7] {
            let load = Load::events(4, &sender, events..events + EVENTS);
            events += EVENTS;
            let server = dies_at(&house, point, at, load);
            all_processed(&server, &ledger, events);
            server.kill();
        }
    }
    // Each event was called at least once, and always under the same key. So the app's ledger has
    // one entry for each event.
    let entries = app.ledger();
    assert_eq!(entries.len(), events);
    let bodies: BTreeSet<&str> = entries.values().map(|calls| calls[0].body.as_str()).collect();
    assert_eq!(bodies.len(), events, "two events under one key, or one under two");
    for calls in entries.values() {
        assert!(calls.iter().all(|call| call.body == calls[0].body && call.job == calls[0].job));
        // Every repetition is a new claim.
        assert!(calls.windows(2).all(|two| two[0].fence < two[1].fence), "{calls:?}");
    }
    // A job that was settled before the crash is not called again.
    let server = house.start();
    let calls = app.calls().len();
    for n in 0..events {
        server.ask(sender.event(&format!("evt_{n}"))).is("duplicate");
    }
    server.stop();
    assert_eq!(app.calls().len(), calls);
}

#[test]
fn a_sigkill_while_apps_are_called_repeats_calls_but_never_changes_their_keys() {
    const EVENTS: usize = 200;
    let app = App::new(|_| 200);
    let house = house(&format!("[sources.stripe.handlers.call]\nhttp = \"{}\"\n", app.url()));
    let ledger = Ledger::create(&house, ledger::SCHEMA);
    let mut load = Load::events(4, &Sender::stripe(SECRET), 0..EVENTS);
    let mut dice = Dice::new();
    for _ in 0..3 {
        let server = house.start();
        let calls = (app.calls().len() + 1 + dice.below(30) as usize).min(EVENTS * 3 / 4);
        load.send(server.ingress, |_| {
            app.wait_for(calls);
            server.kill();
        });
    }
    let server = house.start();
    load.send_all(server.ingress);
    all_processed(&server, &ledger, EVENTS);
    let entries = app.ledger();
    assert_eq!(entries.len(), EVENTS);
    assert!(entries.values().all(|calls| calls.iter().all(|call| call.body == calls[0].body)));
}

#[test]
fn a_server_stopped_past_its_lease_settles_each_job_once_when_it_continues() {
    // The app answers while the server is stopped. When the server continues, the lease has ended,
    // and the answer to the old claim is still in its socket.
    let (go, gate) = channel::<()>();
    let gate = Mutex::new(gate);
    let app = App::new(move |call| {
        if call.attempt == 1 {
            gate.lock().unwrap().recv().unwrap();
        }
        200
    });
    let sql = ledger::effect("fee");
    let house = house(&format!(
        "[sources.stripe.handlers.call]\nhttp = \"{}\"\ntimeout = \"300ms\"\nlease = \"600ms\"\n\
         retry = [{}]\n\
         [sources.stripe.handlers.fee]\nlease = \"600ms\"\nsql = \"\"\"{sql}\"\"\"\n",
        app.url(),
        // More attempts than needed, because some time out on a busy machine.
        ["\"0s\""; 50].join(", ")
    ));
    let ledger = Ledger::create(&house, ledger::SCHEMA);
    let server = house.start();
    server.ask(Sender::stripe(SECRET).event("evt_1")).is("accepted");
    app.wait_for(1);
    server.signal("STOP");
    let stopped = Instant::now();
    go.send(()).unwrap();
    until("the lease is over", || (stopped.elapsed() > Duration::from_millis(700)).then_some(()));
    server.signal("CONT");
    all_processed(&server, &ledger, 1);
    ledger.is_once_each(1);
    let entries = app.ledger();
    assert_eq!(entries.len(), 1, "{entries:?}");
    let event = server.admin_get("/api/v1/events/evt_1").json();
    let jobs = event["jobs"].as_array().unwrap();
    assert!(jobs.iter().all(|job| job["status"] == "done"), "{event}");
    server.stop();
}
