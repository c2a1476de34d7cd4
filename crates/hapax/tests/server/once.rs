//! Exactly once, through the real server: many concurrent copies are one event, and neither a
//! shutdown nor a SIGKILL at any moment loses or doubles an acked event.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender as Channel, channel};
use std::sync::{Arc, Mutex};

use crate::support::{House, Sender, Wire, until};

const SECRET: &str = "whsec_once";

fn house() -> House {
    House::new(&format!("[sources.stripe]\nprovider = \"stripe\"\nsecrets = [\"{SECRET}\"]\n"))
}

/// Rows per event in the database itself, opened read-only as a user may.
fn rows(database: &Path) -> HashMap<String, u64> {
    let flags = rusqlite::OpenFlags::SQLITE_OPEN_READ_ONLY;
    let database = rusqlite::Connection::open_with_flags(database, flags).unwrap();
    let mut counted = database
        .prepare("SELECT event_id, count(*) FROM hapax_processed_events GROUP BY event_id")
        .unwrap();
    let rows = counted.query_map([], |row| Ok((row.get(0)?, row.get::<_, i64>(1)? as u64)));
    rows.unwrap().map(Result::unwrap).collect()
}

#[test]
fn a_hundred_events_in_fifty_copies_at_once_are_accepted_once_each() {
    const EVENTS: usize = 100;
    const COPIES: usize = 50;
    let house = house();
    let server = house.start();
    let sender = Sender::stripe(SECRET);
    let requests: Vec<Vec<u8>> = (0..EVENTS).map(|n| sender.event(&format!("evt_{n}"))).collect();

    // Every connection sends all events in the same order, so that copies arrive at the same time.
    let start = std::sync::Barrier::new(COPIES);
    let answers: Vec<Vec<(String, String)>> = std::thread::scope(|scope| {
        let copies: Vec<_> = (0..COPIES)
            .map(|_| {
                scope.spawn(|| {
                    let mut wire = server.wire();
                    start.wait();
                    let mut answers = Vec::with_capacity(EVENTS);
                    for request in &requests {
                        let answer = wire.try_ask(request).expect("an answer");
                        assert_eq!(answer.status, 200, "{answer:?}");
                        answers.push((answer.decision(), answer.id()));
                    }
                    answers
                })
            })
            .collect();
        copies.into_iter().map(|copy| copy.join().unwrap()).collect()
    });
    let mut ids = HashSet::new();
    for n in 0..EVENTS {
        let id = &answers[0][n].1;
        assert!(answers.iter().all(|copy| copy[n].1 == *id), "evt_{n} has two ids");
        assert!(ids.insert(id.clone()), "two events share an id");
        let accepted = answers.iter().filter(|copy| copy[n].0 == "accepted").count();
        let duplicate = answers.iter().filter(|copy| copy[n].0 == "duplicate").count();
        assert_eq!((accepted, duplicate), (1, COPIES - 1), "evt_{n}");
    }
    let arrivals = |decision: &str| server.metric("hapax_arrivals_total", &[decision]);
    assert_eq!(arrivals("\"accepted\""), EVENTS as f64);
    assert_eq!(arrivals("\"duplicate\""), (EVENTS * (COPIES - 1)) as f64);

    // A shutdown writes the number of arrivals of each event.
    server.stop();
    let server = house.start();
    let events = server.events("");
    assert_eq!(events.len(), EVENTS);
    for event in &events {
        assert_eq!(event["arrival_count"], COPIES, "{event}");
        assert_eq!(event["conflict_count"], 0, "{event}");
    }
    server.kill();
    let server = house.start();
    for (n, request) in requests.iter().enumerate() {
        let answer = server.ask(request);
        answer.is("duplicate");
        assert_eq!(answer.id(), answers[0][n].1);
    }
    server.stop();
    let rows = rows(&house.database());
    assert!(rows.len() == EVENTS && rows.values().all(|count| *count == 1), "{rows:?}");
}

#[test]
fn copies_with_another_body_are_one_event_and_both_bodies_are_kept() {
    let house = house();
    let server = house.start();
    let sender = Sender::stripe(SECRET);
    let first = server.ask(sender.request(r#"{"id":"evt_1","type":"a","amount":1}"#).bytes());
    first.is("accepted");
    let other = sender.request(r#"{"id":"evt_1","type":"a","amount":2}"#).bytes();
    server.ask(&other).is("duplicate");
    // A conflict commits before its answer: even a SIGKILL must not lose it.
    server.kill();
    let server = house.start();
    let events = server.events("");
    assert_eq!(events.len(), 1);
    assert_eq!(events[0]["conflict_count"], 1, "{events:?}");
    let detail = server.admin_get("/api/v1/events/evt_1").json();
    assert_eq!(detail["id"], first.id().as_str());
    assert_eq!(detail["body"], r#"{"id":"evt_1","type":"a","amount":1}"#);
    let kept = detail["arrivals"].as_array().unwrap();
    let conflict = kept.iter().find(|arrival| arrival["decision"] == "conflict").unwrap();
    assert_eq!(conflict["body"], r#"{"id":"evt_1","type":"a","amount":2}"#);
}

/// Sends new events one after the other, some of them twice, until the server is gone. Every ack is
/// sent to `acked` at once.
fn load(address: SocketAddr, name: String, stop: &AtomicBool, acked: &Channel<(String, String)>) {
    let sender = Sender::stripe(SECRET);
    let Ok(mut wire) = Wire::try_connect(address) else { return };
    for n in 0.. {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let event_id = format!("{name}_{n}");
        let request = sender.event(&event_id);
        for copy in 0..1 + usize::from(n % 7 == 0) {
            let Some(answer) = wire.try_ask(&request) else { return };
            assert_eq!(answer.status, 200, "{answer:?}");
            answer.is(if copy == 0 { "accepted" } else { "duplicate" });
            acked.send((event_id.clone(), answer.id())).unwrap();
        }
    }
}

#[test]
fn a_sigkill_at_any_moment_loses_nothing_that_was_acked_and_doubles_nothing() {
    const ROUNDS: u64 = 8;
    const CLIENTS: usize = 8;
    let house = house();
    let sender = Sender::stripe(SECRET);
    let mut acked: HashMap<String, String> = HashMap::new();
    // The moment of the SIGKILL is random: not secret, only different each time.
    let mut dice = std::process::id() as u64 | 1;
    for round in 0..ROUNDS {
        let server = house.start();
        // Events that were acked in earlier rounds are there, with the same id.
        for event in server.events("") {
            let event_id = event["event_id"].as_str().unwrap();
            if let Some(id) = acked.get(event_id) {
                assert_eq!(event["id"], id.as_str(), "{event}");
            }
        }
        let address = server.ingress;
        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let blow_after = 1 + (dice >> 33) % 400;
        let stop = Arc::new(AtomicBool::new(false));
        let (send_ack, acks) = channel();
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| {
                let (stop, send_ack) = (Arc::clone(&stop), send_ack.clone());
                std::thread::spawn(move || {
                    load(address, format!("evt_{round}_{client}"), &stop, &send_ack);
                })
            })
            .collect();
        drop(send_ack);
        for _ in 0..blow_after {
            let (event_id, id) = acks.recv().expect("the load continues");
            acked.insert(event_id, id);
        }
        server.kill();
        stop.store(true, Ordering::Relaxed);
        acked.extend(acks);
        clients.into_iter().for_each(|client| client.join().unwrap());
    }

    let server = house.start();
    let mut wire = server.wire();
    for (event_id, id) in &acked {
        let answer = wire.try_ask(&sender.event(event_id)).expect("an answer");
        answer.is("duplicate");
        assert_eq!(answer.id(), *id, "{event_id}");
    }
    server.stop();
    let rows = rows(&house.database());
    let doubled: Vec<_> = rows.iter().filter(|(_, count)| **count != 1).collect();
    assert!(doubled.is_empty(), "{doubled:?}");
    assert!(acked.keys().all(|event_id| rows.contains_key(event_id)));
    // Besides the acked events there are only those that a client had in flight at the SIGKILL.
    let in_flight = rows.len() - acked.len();
    assert!(in_flight <= ROUNDS as usize * CLIENTS, "{in_flight} were never acked");
}

#[test]
fn a_shutdown_under_load_acks_only_durable_events_and_exits_with_0() {
    let house = house();
    let mut server = house.start();
    let address = server.ingress;
    let stop = Arc::new(AtomicBool::new(false));
    let (send_ack, acks) = channel();
    let clients: Vec<_> = (0..8)
        .map(|client| {
            let (stop, send_ack) = (Arc::clone(&stop), send_ack.clone());
            std::thread::spawn(move || load(address, format!("evt_{client}"), &stop, &send_ack))
        })
        .collect();
    drop(send_ack);
    let mut acked: HashMap<String, String> = acks.iter().take(200).collect();
    server.signal("TERM");
    // The server closes the clients' connections, so the clients end without a signal.
    acked.extend(acks);
    clients.into_iter().for_each(|client| client.join().unwrap());
    assert_eq!(server.wait().code(), Some(0), "{}", server.stderr.text());
    assert!(
        !server.stderr.text().contains("still busy at the end of `drain`"),
        "{}",
        server.stderr.text()
    );

    let rows = rows(&house.database());
    assert!(rows.values().all(|count| *count == 1));
    assert!(acked.keys().all(|event_id| rows.contains_key(event_id)));
    let server = house.start();
    let sender = Sender::stripe(SECRET);
    let mut wire = server.wire();
    for (event_id, id) in &acked {
        let answer = wire.try_ask(&sender.event(event_id)).expect("an answer");
        answer.is("duplicate");
        assert_eq!(answer.id(), *id);
    }
}

#[test]
fn a_shutdown_ends_readiness_first_and_answers_received_requests() {
    let house = house();
    let mut server = house.start();
    assert_eq!(server.admin_get("/readyz").status, 200);
    // "100 Continue" proves that the server has the head, so this request counts as received.
    let request = Sender::stripe(SECRET).request(crate::support::sender::event("evt_last"));
    let mut wire = server.wire();
    let length = request.body.len();
    wire.write(format!(
        "{}expect: 100-continue\r\ncontent-length: {length}\r\n\r\n",
        request.head()
    ));
    assert_eq!(wire.answer().status, 100);
    // An idle connection must not delay the shutdown.
    let mut idle = server.wire();
    idle.write(Sender::stripe(SECRET).event("evt_first"));
    idle.answer().is("accepted");

    server.signal("TERM");
    until("readiness turns", || (server.admin_get("/readyz").status == 503).then_some(()));
    until("nothing new is let in", || Wire::try_connect(server.ingress).err());
    assert!(idle.ends());
    wire.write(&request.body);
    let answer = wire.answer();
    answer.is("accepted");
    assert_eq!(server.wait().code(), Some(0), "{}", server.stderr.text());

    let server = house.start();
    let known = server.ask(request.bytes());
    known.is("duplicate");
    assert_eq!(known.id(), answer.id());
}

#[test]
fn a_second_server_on_the_same_data_is_refused_and_the_first_goes_on() {
    let house = house();
    let server = house.start();
    let (code, text) = house.fail();
    assert!(matches!(code, Some(2 | 3)), "{code:?}: {text}");
    assert!(text.contains("data"), "{text}");
    server.ask(Sender::stripe(SECRET).event("evt_1")).is("accepted");
}

#[test]
fn tables_of_the_user_in_the_same_file_stay_untouched() {
    let house = house();
    std::fs::create_dir_all(house.database().parent().unwrap()).unwrap();
    let users = rusqlite::Connection::open(house.database()).unwrap();
    users
        .execute_batch(
            "PRAGMA user_version = 77; PRAGMA application_id = 4711;
             CREATE TABLE orders (id INTEGER PRIMARY KEY, total INTEGER);
             INSERT INTO orders VALUES (1, 100);",
        )
        .unwrap();
    drop(users);
    let server = house.start();
    server.ask(Sender::stripe(SECRET).event("evt_1")).is("accepted");
    // The rows can be read while the server runs, too.
    let rows_now = rows(&house.database());
    assert_eq!(rows_now.get("evt_1"), Some(&1), "{rows_now:?}");
    server.stop();
    let users = rusqlite::Connection::open(house.database()).unwrap();
    let read = |sql: &str| users.query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap();
    assert_eq!(read("PRAGMA user_version"), 77);
    assert_eq!(read("PRAGMA application_id"), 4711);
    assert_eq!(read("SELECT total FROM orders"), 100);
    let foreign = "SELECT count(*) FROM sqlite_master WHERE name NOT LIKE 'hapax\\_%' ESCAPE '\\' \
                   AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' AND name <> 'orders'";
    assert_eq!(read(foreign), 0);
}

#[test]
fn a_reader_that_never_ends_keeps_the_server_neither_from_stopping_nor_from_starting() {
    // Another process reads the file and pins the log, so that the log cannot be moved into the
    // file.
    let house = house();
    let sender = Sender::stripe(SECRET);
    let server = house.start();
    server.ask(sender.event("evt_1")).is("accepted");
    let flags = rusqlite::OpenFlags::SQLITE_OPEN_READ_ONLY;
    let reader = rusqlite::Connection::open_with_flags(house.database(), flags).unwrap();
    reader.execute_batch("BEGIN").unwrap();
    let seen = || {
        let count = "SELECT count(*) FROM hapax_processed_events";
        reader.query_row(count, [], |row| row.get::<_, i64>(0)).unwrap()
    };
    assert_eq!(seen(), 1);
    server.ask(sender.event("evt_2")).is("accepted");
    server.kill();
    let server = house.start();
    server.ask(sender.event("evt_1")).is("duplicate");
    server.ask(sender.event("evt_2")).is("duplicate");
    server.ask(sender.event("evt_3")).is("accepted");
    server.stop();
    assert_eq!(seen(), 1, "a snapshot stays what it was");
    drop(reader);
    let server = house.start();
    server.ask(sender.event("evt_3")).is("duplicate");
    server.stop();
    assert_eq!(rows(&house.database()).len(), 3);
}

#[test]
fn a_server_killed_while_it_starts_for_the_first_time_starts_the_next_time() {
    for file in ["hapax.lock", "hapax.db", "hapax.db-wal", "hapax.db-shm"] {
        let house = house();
        let data = house.database();
        let file = data.parent().unwrap().join(file);
        let half_started = house.spawn();
        until("the file appears", || file.exists().then_some(()));
        half_started.kill();
        let server = house.start();
        server.ask(Sender::stripe(SECRET).event("evt_1")).is("accepted");
    }
}

#[test]
fn sigint_is_a_shutdown_like_sigterm() {
    let house = house();
    let mut server = house.start();
    server.ask(Sender::stripe(SECRET).event("evt_1")).is("accepted");
    server.signal("INT");
    assert_eq!(server.wait().code(), Some(0), "{}", server.stderr.text());
}

#[test]
fn requests_sent_without_waiting_are_answered_in_their_order() {
    let house = house();
    let server = house.start();
    let sender = Sender::stripe(SECRET);
    let ids = ["evt_a", "evt_b", "evt_a", "evt_c"];
    let all: Vec<u8> = ids.iter().flat_map(|id| sender.event(id)).collect();
    let mut wire = server.wire();
    wire.write(&all);
    for decision in ["accepted", "accepted", "duplicate", "accepted"] {
        wire.answer().is(decision);
    }
}

#[test]
fn a_client_that_hangs_up_after_its_request_has_its_event_stored() {
    let house = house();
    let server = house.start();
    let sender = Sender::stripe(SECRET);
    let gone = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for client in 0..8 {
            let (server, sender, gone) = (&server, &sender, &gone);
            scope.spawn(move || {
                for n in 0..10 {
                    let event_id = format!("evt_{client}_{n}");
                    let mut wire = server.wire();
                    wire.write(sender.event(&event_id));
                    // Half of the connections close cleanly, half are reset with the answer unread.
                    if n % 2 == 0 {
                        wire.stream.shutdown(std::net::Shutdown::Write).unwrap();
                        if let Some(answer) = wire.try_answer() {
                            assert_eq!(answer.status, 200, "{answer:?}");
                            gone.lock().unwrap().push(event_id);
                        }
                    }
                }
            });
        }
    });
    server.stop();
    let rows = rows(&house.database());
    assert!(rows.values().all(|count| *count == 1), "{rows:?}");
    assert!(gone.lock().unwrap().iter().all(|event_id| rows.contains_key(event_id)));
}
