//! The search index through crashes: every event that was acked is found by its `search` value, whenever the process
//! died. The values are escaped in the bodies, so that only the index finds them.

use std::path::Path;

use crate::support::ledger::Ledger;
use crate::support::load::{Dice, Load};
use crate::support::nodes::{Database, SECRET, config};
use crate::support::process::hits;
use crate::support::{House, Sender, Server, until};

/// The setting of the source that indexes the customer of each event.
const SEARCH: &str = "search = [\"/customer\"]";

/// The number of customers. Consecutive events belong to different customers.
const CUSTOMERS: usize = 5;

fn events(ids: std::ops::Range<usize>) -> Load {
    let sender = Sender::stripe(SECRET);
    let body = |n: usize| {
        let customer = n % CUSTOMERS;
        format!(r#"{{"id":"evt_{n}","type":"payout.paid","customer":"cus\u005f{customer}"}}"#)
    };
    Load::new(4, ids.map(|n| sender.request(body(n)).bytes()).collect())
}

/// Waits until each customer's events are found, and checks that no other event is.
#[track_caller]
fn finds_all(server: &Server, sent: usize) {
    for customer in 0..CUSTOMERS {
        let mut expected: Vec<String> =
            (0..sent).filter(|n| n % CUSTOMERS == customer).map(|n| format!("evt_{n}")).collect();
        expected.sort_unstable();
        until("all events of a customer are found", || {
            let found = server.events(&format!("q=cus_{customer}"));
            let id = |event: &serde_json::Value| event["event_id"].as_str().unwrap().to_owned();
            let mut found: Vec<String> = found.iter().map(id).collect();
            found.sort_unstable();
            assert!(found.iter().all(|id| expected.contains(id)), "cus_{customer}: {found:?}");
            (found == expected).then_some(())
        });
    }
}

/// Starts a server that indexes customers.
type Start<'a> = &'a dyn Fn() -> Server;

/// Aborts the process at each of `points` while it indexes: after values were read and before any is written, between
/// two commits of one pass, and after the commit that moves the mark. Returns the number of events.
fn dies_while_indexing(
    without_search: impl Fn() -> Server,
    start: Start<'_>,
    start_mortal: impl Fn(&[(&str, &str)]) -> Server,
    hit_file: &Path,
    points: &[&str],
) -> usize {
    // More rows than one commit takes. The rows are stored before anything is indexed, so that one pass takes
    // them all.
    const EVENTS: usize = 600;
    let mut sent = 0;
    let hits_to = ("HAPAX_FAILPOINT_HITS", hit_file.to_str().unwrap());
    for point in points {
        let server = without_search();
        events(sent..sent + EVENTS).send_all(server.ingress);
        server.kill();
        sent += EVENTS;
        let before = hits(hit_file, point);
        let plan = format!("{point}=abort@1");
        let mut server = start_mortal(&[("HAPAX_FAILPOINTS", &plan), hits_to]);
        server.wait();
        assert_eq!(hits(hit_file, point), before + 1, "{point}");
        let server = start();
        finds_all(&server, sent);
        server.kill();
    }
    sent
}

/// The process is killed at random moments while events arrive and are indexed.
fn is_killed_at_random(start: Start<'_>, mut sent: usize, indexed: impl Fn() -> i64) {
    const ROUNDS: usize = 3;
    const PER_ROUND: usize = 200;
    let mut dice = Dice::new();
    for _ in 0..ROUNDS {
        let mut load = events(sent..sent + PER_ROUND);
        sent += PER_ROUND;
        let (before, more) = (indexed(), dice.below(PER_ROUND as u64 / 2) as i64);
        let server = start();
        load.send(server.ingress, |_| {
            until("some events are indexed", || (indexed() > before + more).then_some(()));
            server.kill();
        });
        // The senders retry what was not acked.
        let server = start();
        load.send_all(server.ingress);
        server.kill();
    }
    let server = start();
    finds_all(&server, sent);
    server.stop();
}

#[test]
fn every_acked_event_is_found_by_its_value_after_crashes() {
    let house = House::new(&config("", ""));
    let ledger = Ledger::create(&house, "");
    let without_search = || {
        house.configure(&config("", ""));
        house.start()
    };
    let start = || {
        house.configure(&config("", SEARCH));
        house.start()
    };
    let start_mortal = |env: &[(&str, &str)]| {
        house.configure(&config("", SEARCH));
        house.start_mortal(env)
    };
    let points = ["search.values_read", "search.chunk_written", "search.mark_moved"];
    let hit_file = house.path().join("hits");
    let sent = dies_while_indexing(without_search, &start, start_mortal, &hit_file, &points);
    let sql = "SELECT count(*) FROM hapax_search_value";
    is_killed_at_random(&start, sent, || ledger.number(sql));
}

#[test]
fn every_acked_event_is_found_by_its_value_after_crashes_on_postgres() {
    let database = Database::empty("search_crashes");
    let (plain, searching) = (database.house("", ""), database.house("", SEARCH));
    let start = || searching.start();
    let start_mortal = |env: &[(&str, &str)]| searching.start_mortal(env);
    let points = ["search.values_read", "search.mark_moved"];
    let hit_file = searching.path().join("hits");
    let sent = dies_while_indexing(|| plain.start(), &start, start_mortal, &hit_file, &points);
    let sql = "SELECT count(*) FROM hapax.search_value";
    is_killed_at_random(&start, sent, || database.number(sql));
}
