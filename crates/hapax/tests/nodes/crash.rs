//! Nodes of one PostgreSQL that are killed, or stopped past their leases and continued, while the
//! others work: nothing is lost, nothing happens twice, nothing is stuck.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::support::app::App;
use crate::support::load::Dice;
use crate::support::nodes::{Database, SECRET, Senders, wait};
use crate::support::{House, Sender, Server, Wire, until};
use serde_json::{Value, json};

/// A short lease, so that a brief stop of a node is longer than its leases.
const LEASE: Duration = Duration::from_secs(1);

fn short(handler: &str) -> String {
    // More attempts than any job needs: on a busy machine many of them time out.
    format!(
        "timeout = \"500ms\"\nlease = \"{}ms\"\nretry = [\"0s\", \"0s\", \"0s\", {}]\n{handler}\n",
        LEASE.as_millis(),
        ["\"1s\""; 47].join(", ")
    )
}

fn sql_handler() -> String {
    let keys = short("sql = \"INSERT INTO ledger VALUES (:event_id, 'fee', :attempt)\"");
    format!("[sources.stripe.handlers.fee]\n{keys}")
}

/// A few nodes that can be killed and restarted.
struct Nodes {
    houses: Vec<House>,
    running: Vec<Option<Server>>,
}

impl Nodes {
    fn start(database: &Database, count: usize, handlers: &str) -> Self {
        let houses: Vec<House> = (0..count).map(|_| database.house("", handlers)).collect();
        let running = houses.iter().map(|house| Some(house.start())).collect();
        Self { houses, running }
    }

    fn all(&self) -> impl Iterator<Item = &Server> {
        self.running.iter().flatten()
    }

    fn kill(&mut self, node: usize) {
        self.running[node].take().expect("it runs").kill();
    }

    fn restart(&mut self, node: usize, senders: &Senders) {
        let server = self.houses[node].start();
        senders.moved(node, &server);
        self.running[node] = Some(server);
    }

    /// Stops a node for longer than its leases, and continues it.
    fn pause(&self, node: usize) {
        let server = self.running[node].as_ref().expect("it runs");
        server.signal("STOP");
        let stopped = Instant::now();
        until("its leases are over", || (stopped.elapsed() > 2 * LEASE).then_some(()));
        server.signal("CONT");
    }

    fn stop(self) {
        for server in self.running.into_iter().flatten() {
            server.stop();
        }
    }
}

#[test]
fn nodes_killed_at_random_under_load_neither_lose_nor_double_an_effect() {
    // Three nodes: after a random number of acks one of them dies, and restarts while others die.
    const EVENTS: usize = 900;
    const BLOWS: usize = 5;
    let database = Database::shared("killed");
    let sum = short(
        "sql = \"\"\"INSERT INTO ledger VALUES (:event_id, 'fee', :attempt);\
         UPDATE account SET balance = balance + 1\"\"\"",
    );
    let mut nodes = Nodes::start(&database, 3, &format!("[sources.stripe.handlers.fee]\n{sum}"));
    let senders = Senders::to(nodes.all());
    let mut dice = Dice::new();
    senders.send(8, 0..EVENTS, || {
        for blow in 1..=BLOWS {
            let due = blow * EVENTS / (BLOWS + 2) + dice.below(60) as usize;
            senders.until_acked(due);
            let node = dice.below(3) as usize;
            nodes.kill(node);
            nodes.restart(node, &senders);
        }
    });
    senders.one_id_each(EVENTS);
    database.all_processed(nodes.running[0].as_ref().unwrap(), EVENTS);
    database.is_once_each(EVENTS);
    assert_eq!(database.number("SELECT balance FROM account"), EVENTS as i64);
    nodes.stop();
    database.is_once_each(EVENTS);
}

#[test]
fn nodes_stopped_past_their_leases_double_nothing_when_they_continue() {
    // A stopped node holds claims whose leases end, and may have a handler's transaction open
    // between two statements. When it continues, others have done its work.
    const EVENTS: usize = 600;
    let database = Database::shared("paused");
    let slow = short(
        "sql = \"\"\"INSERT INTO ledger VALUES (:event_id, 'fee', :attempt);\
         SELECT pg_sleep(0.002)\"\"\"",
    );
    let nodes = Nodes::start(&database, 3, &format!("[sources.stripe.handlers.fee]\n{slow}"));
    let senders = Senders::to(nodes.all());
    senders.send(8, 0..EVENTS, || {
        for (blow, node) in [0, 1, 2].into_iter().enumerate() {
            senders.until_acked((blow + 1) * EVENTS / 5);
            nodes.pause(node);
        }
    });
    senders.one_id_each(EVENTS);
    database.all_processed(nodes.running[0].as_ref().unwrap(), EVENTS);
    database.is_once_each(EVENTS);
    nodes.stop();
    database.is_once_each(EVENTS);
}

/// Every point between an arrival and the end of its jobs at which a node can be cut off.
const POINTS: [&str; 6] = [
    "ingress.before_commit",
    "ingress.after_commit_before_ack",
    "worker.after_claim",
    "worker.mid_handler",
    "worker.before_commit",
    "worker.after_commit",
];

/// A node that follows a plan of failpoints, and one without failpoints.
fn beside(database: &Database, plan: &str) -> ([House; 2], Server, Server) {
    let houses = [0, 1].map(|_| database.house("", &sql_handler()));
    let cut = houses[0].start_with(&[("HAPAX_FAILPOINTS", plan)]);
    let other = houses[1].start();
    (houses, cut, other)
}

/// Sends more events to this node, without waiting for its answers, until the node has reached its
/// failpoint: so far the other node may have done all jobs. Returns the number of events.
fn more_until(node: &Server, from: usize, what: &str, mut came: impl FnMut() -> bool) -> usize {
    let sender = Sender::stripe(SECRET);
    let mut wires = Vec::new();
    until(what, || {
        if came() {
            return Some(());
        }
        if let Ok(mut wire) = Wire::try_connect(node.ingress) {
            wire.write(sender.event(&format!("evt_{}", from + wires.len())));
            wires.push(wire);
        }
        std::thread::park_timeout(Duration::from_millis(50));
        None
    });
    wires.len()
}

#[test]
fn a_node_that_dies_at_any_step_leaves_its_work_to_another() {
    // The other node has to find the dead node's claims without a notification.
    const EVENTS: usize = 60;
    let database = Database::shared("dies");
    let mut events = 0;
    for point in POINTS {
        let (_houses, mut cut, other) = beside(&database, &format!("{point}=abort@2"));
        let senders = Senders::to([&cut, &other]);
        let more = senders.send(4, events..events + EVENTS, || {
            use std::os::unix::process::ExitStatusExt as _;
            let what = format!("it dies at {point}");
            let more = more_until(&cut, events + EVENTS, &what, || cut.stdout.has_ended());
            assert_eq!(cut.wait().signal(), Some(6), "{point}: {}", cut.stderr.text());
            more
        });
        senders.send(4, events + EVENTS..events + EVENTS + more, || ());
        senders.one_id_each(EVENTS + more);
        events += EVENTS + more;
        database.all_processed(&other, events);
        database.is_once_each(events);
        other.stop();
    }
}

#[test]
fn a_node_stopped_between_two_statements_and_continued_later_doubles_nothing() {
    // The node stays stopped until its leases are over and the other node has done all it could.
    const EVENTS: usize = 60;
    let database = Database::shared("stopped");
    let mut events = 0;
    for point in POINTS {
        let (_houses, cut, other) = beside(&database, &format!("{point}=stop@2"));
        let senders = Senders::to([&cut, &other]);
        let more = senders.send(4, events..events + EVENTS, || {
            let what = format!("it stands still at {point}");
            let more = more_until(&cut, events + EVENTS, &what, || cut.stands_still());
            let since = Instant::now();
            until("its leases are over", || (since.elapsed() > LEASE + LEASE / 2).then_some(()));
            cut.signal("CONT");
            more
        });
        senders.send(4, events + EVENTS..events + EVENTS + more, || ());
        senders.one_id_each(EVENTS + more);
        events += EVENTS + more;
        database.all_processed(&other, events);
        database.is_once_each(events);
        cut.stop();
        other.stop();
        database.is_once_each(events);
    }
}

#[test]
fn calls_of_killed_and_stopped_nodes_are_repeated_under_the_same_key_and_each_job_is_done() {
    // The app's answer may be in the socket of a stopped or dead node.
    const EVENTS: usize = 300;
    let app = App::new(|_| 200);
    let database = Database::shared("called");
    let http = short(&format!("http = \"{}\"", app.url()));
    let mut nodes = Nodes::start(&database, 2, &format!("[sources.stripe.handlers.call]\n{http}"));
    let senders = Senders::to(nodes.all());
    senders.send(6, 0..EVENTS, || {
        app.wait_for(20);
        nodes.kill(0);
        nodes.restart(0, &senders);
        app.wait_for(100);
        nodes.pause(1);
        app.wait_for(200);
        nodes.kill(1);
        nodes.restart(1, &senders);
    });
    senders.one_id_each(EVENTS);
    database.all_processed(nodes.running[0].as_ref().unwrap(), EVENTS);
    let entries = app.ledger();
    assert_eq!(entries.len(), EVENTS, "lost or made up");
    let bodies: BTreeSet<&str> = entries.values().map(|calls| calls[0].body.as_str()).collect();
    assert_eq!(bodies.len(), EVENTS, "two events under one key, or one under two");
    for calls in entries.values() {
        assert!(calls.iter().all(|call| call.body == calls[0].body && call.job == calls[0].job));
        let fences: BTreeSet<u64> = calls.iter().map(|call| call.fence).collect();
        assert_eq!(fences.len(), calls.len(), "a fence was used twice: {calls:?}");
    }
    // A settled job is not called again.
    let before = app.calls().len();
    senders.send(2, 0..EVENTS, || ());
    nodes.stop();
    assert_eq!(app.calls().len(), before);
}

/// One pull worker: claims at any running node, and completes in its own transaction or over the
/// API. Returns, by event, how often "done" was confirmed.
fn pull(
    nodes: &Mutex<Vec<std::net::SocketAddr>>,
    done: &Mutex<BTreeMap<String, u64>>,
    stop: &AtomicBool,
) {
    let mut turn = 0;
    let mut ask = |path: &str, body: &Value| -> Option<(u16, Value)> {
        turn += 1;
        let all = nodes.lock().unwrap();
        let node = all[turn % all.len()];
        drop(all);
        let mut wire = Wire::try_connect(node).ok()?;
        let answer = wire.try_ask(&crate::support::post(node, path, body))?;
        Some((answer.status, answer.json()))
    };
    let claim = json!({ "source": "stripe", "handler": "work", "limit": 5, "wait": "200ms" });
    while !stop.load(Ordering::Relaxed) {
        let Some((200, claimed)) = ask("/api/v1/claims", &claim) else {
            std::thread::park_timeout(Duration::from_millis(20));
            continue;
        };
        for item in claimed["items"].as_array().unwrap() {
            let path = format!("/api/v1/claims/{}/complete", item["job"].as_str().unwrap());
            let body = json!({ "fence": item["fence"] });
            // After a lost answer the request is repeated: the same fence gets 200 again.
            let said = until("completing is answered", || {
                let said = ask(&path, &body);
                if said.is_none() {
                    std::thread::park_timeout(Duration::from_millis(20));
                }
                said
            });
            match said.0 {
                200 => {
                    let event = item["event"]["event_id"].as_str().unwrap().to_owned();
                    *done.lock().unwrap().entry(event).or_default() += 1;
                }
                // The lease ended, and another worker has the job.
                409 => {}
                other => panic!("{other}: {}", said.1),
            }
        }
    }
}

#[test]
fn pull_workers_whose_nodes_die_and_stop_complete_each_job_once() {
    // Claims, completions and their answers are lost at any step.
    const EVENTS: usize = 200;
    let database = Database::shared("pulled");
    let mut nodes = Nodes::start(
        &database,
        2,
        &format!(
            "[sources.stripe.handlers.work]\npull = true\nlease = \"{}ms\"\ntimeout = \"500ms\"\n",
            LEASE.as_millis()
        ),
    );
    let senders = Senders::to(nodes.all());
    let admins = Mutex::new(nodes.all().map(|node| node.admin).collect::<Vec<_>>());
    let (done, stop) = (Mutex::default(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| pull(&admins, &done, &stop));
        }
        senders.send(4, 0..EVENTS, || {
            senders.until_acked(EVENTS / 4);
            nodes.kill(0);
            nodes.restart(0, &senders);
            admins.lock().unwrap()[0] = nodes.running[0].as_ref().unwrap().admin;
            senders.until_acked(EVENTS / 2);
            nodes.pause(1);
        });
        database.all_processed(nodes.running[0].as_ref().unwrap(), EVENTS);
        stop.store(true, Ordering::Relaxed);
    });
    senders.one_id_each(EVENTS);
    let done = done.into_inner().unwrap();
    let twice: Vec<_> = done.iter().filter(|(_, count)| **count != 1).collect();
    assert!(twice.is_empty(), "confirmed to two claims: {twice:?}");
    assert_eq!(done.len(), EVENTS);
    let attempts = "SELECT count(*) FROM (SELECT event_id FROM hapax.attempts \
                    WHERE outcome = 'done' GROUP BY event_id HAVING count(*) > 1) more_than_once";
    assert_eq!(database.number(attempts), 0);
    nodes.stop();
}

#[test]
fn a_transaction_of_a_user_that_stays_open_delays_only_the_job_it_has_claimed() {
    // The transaction has completed one job and written rows that the handlers of other jobs write
    // too. The transaction does not commit while those handlers run.
    const EVENTS: usize = 200;
    let database = Database::shared("open");
    let handlers = format!("[sources.stripe.handlers.mine]\npull = true\n{}", sql_handler());
    let house = database.house("", &handlers);
    let node = house.start();
    let sender = Sender::stripe(SECRET);
    node.ask(sender.event("evt_mine")).is("accepted");
    let claim = json!({ "source": "stripe", "handler": "mine", "limit": 1, "wait": "10s" });
    let claimed = node.admin_post("/api/v1/claims", &claim).json();
    let (job, fence) = (&claimed["items"][0]["job"], &claimed["items"][0]["fence"]);
    let user = wait(async {
        let (client, connection) =
            tokio_postgres::connect(&database.url, tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        client.batch_execute("BEGIN; SET LOCAL statement_timeout = 0").await.unwrap();
        let complete = format!(
            "INSERT INTO ledger VALUES ('evt_mine', 'mine', 1);
             SELECT hapax.complete('{}', {fence})",
            job.as_str().unwrap()
        );
        client.batch_execute(&complete).await.unwrap();
        client
    });
    // Another pull job of the same handler, and all jobs of the SQL handler, continue.
    Senders::to([&node]).send(4, 0..EVENTS, || ());
    let others = "SELECT count(*) FROM ledger WHERE handler = 'fee'";
    until("all the others are done", || {
        (database.number(others) == EVENTS as i64 + 1).then_some(())
    });
    let mut pulled = 0;
    until("all other pull jobs are done", || {
        let claim = json!({ "source": "stripe", "handler": "mine", "limit": 50 });
        for item in node.admin_post("/api/v1/claims", &claim).json()["items"].as_array().unwrap() {
            assert_ne!(item["job"], *job, "another worker has claimed it");
            let path = format!("/api/v1/claims/{}/complete", item["job"].as_str().unwrap());
            let done = node.admin_post(&path, &json!({ "fence": item["fence"] }));
            assert_eq!(done.status, 200, "{done:?}");
            pulled += 1;
        }
        (pulled == EVENTS).then_some(())
    });
    assert_eq!(node.admin_get("/api/v1/events/evt_mine").json()["status"], "processing");
    wait(user.batch_execute("COMMIT")).unwrap();
    until("it is done too", || {
        let event = node.admin_get("/api/v1/events/evt_mine").json();
        (event["status"] == "processed").then_some(())
    });
    assert_eq!(database.number("SELECT count(*) FROM ledger WHERE handler = 'mine'"), 1);
    node.stop();
}
