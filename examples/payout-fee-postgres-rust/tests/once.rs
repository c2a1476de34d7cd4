//! The example, run as its README says: two apps on one database, concurrent copies, a SIGKILL in the
//! middle, and a death at each step of the work. Its table has no unique constraint, so a fee that is
//! charged twice is seen.

#[path = "../../../crates/hapax/tests/support/mod.rs"]
mod support;

use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::json;
use support::load::Load;
use support::nodes::Database;
use support::process::{Process, hits};
use support::{Sender, until};

const SECRET: &str = "whsec_example";
const SIGABRT: i32 = 6;

/// One of the apps on this database.
fn app(database: &Database, env: &[(&str, &str)]) -> Process {
    Process::start(
        Command::new(env!("CARGO_BIN_EXE_payout-fee-postgres-rust"))
            .env("DATABASE_URL", &database.url)
            .env("LISTEN", "127.0.0.1:0")
            .envs(env.iter().copied()),
    )
}

/// Waits until `events` are done, and then each has its fee of 50 and its message, once.
#[track_caller]
fn is_once_each(database: &Database, events: usize) {
    let done = "SELECT count(*) FROM hapax.processed_events WHERE status = 'processed'";
    until("all events are processed", || {
        std::thread::park_timeout(Duration::from_millis(20));
        (database.number(done) >= events as i64).then_some(())
    });
    let fees =
        "SELECT concat_ws(' ', count(*), sum(fee), count(DISTINCT payout_id)) FROM payout_fees";
    let expected = format!("{events} {} {events}", 50 * events);
    assert_eq!(database.execute(fees), [Some(expected)]);
    assert_eq!(database.number("SELECT count(*) FROM hapax.message"), events as i64);
    assert_eq!(database.number("SELECT count(*) FROM hapax.dead_letters"), 0);
}

fn payout(n: usize) -> Vec<u8> {
    let body = json!({
        "id": format!("evt_{n}"), "object": "event", "type": "payout.paid",
        "data": { "object": { "id": format!("po_{n}"), "amount": 10_000 } },
    });
    Sender::stripe(SECRET).request(body.to_string()).bytes()
}

/// These payouts, each `copies` times on as many connections.
fn load(payouts: std::ops::Range<usize>, copies: usize) -> Load {
    let requests = payouts.flat_map(|n| std::iter::repeat_n(payout(n), copies)).collect();
    Load::new(copies, requests)
}

#[test]
fn fifty_copies_to_two_apps_and_a_sigkill_of_one_charge_one_fee_of_50() {
    // Half of them go to each; one app is killed with some of its copies acked.
    const COPIES: usize = 25;
    let database = Database::empty("example_copies");
    let (dies, mut stays) = (app(&database, &[]), app(&database, &[]));
    let (mut one, mut other) = (load(0..1, COPIES), load(0..1, COPIES));
    std::thread::scope(|scope| {
        scope.spawn(|| other.send_all(stays.address));
        one.send(dies.address, |acked| {
            until("some are acked", || (acked.load(Ordering::Relaxed) >= COPIES / 3).then_some(()));
            drop(dies);
        });
    });
    one.send_all(stays.address);
    is_once_each(&database, 1);
    stays.signal("TERM");
    assert_eq!(stays.wait().code(), Some(0), "a clean stop");
    is_once_each(&database, 1);
}

#[test]
fn a_death_at_each_step_of_the_handler_neither_loses_nor_doubles_a_fee() {
    // The app aborts at the named moment; the other one finds what it left.
    const POINTS: [&str; 6] = [
        "ingress.after_commit_before_ack",
        "code.before_handler",
        "code.mid_commit",
        "code.before_commit",
        "code.after_commit",
        "code.after_handler",
    ];
    const PAYOUTS: usize = 10;
    let dir = tempfile::tempdir().unwrap();
    let hit_file = dir.path().join("hits");
    let hits_to = ("HAPAX_FAILPOINT_HITS", hit_file.to_str().unwrap());
    let database = Database::empty("example_dies");
    let mut payouts = 0;
    for (turn, point) in POINTS.into_iter().enumerate() {
        let at = 1 + turn % 3;
        let mut load = load(payouts..payouts + PAYOUTS, 2);
        payouts += PAYOUTS;
        let before = hits(&hit_file, point);
        let plan = format!("{point}=abort@{at}");
        let mut dies = app(&database, &[("HAPAX_FAILPOINTS", &plan), hits_to]);
        load.send(dies.address, |_| {
            assert_eq!(dies.wait().signal(), Some(SIGABRT), "{point}@{at}");
        });
        assert_eq!(hits(&hit_file, point) - before, at, "{point}");
        let next = app(&database, &[]);
        load.send_all(next.address);
        is_once_each(&database, payouts);
        drop(next);
    }
}
