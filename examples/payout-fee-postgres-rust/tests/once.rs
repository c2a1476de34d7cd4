//! The example, run as its README says: two apps on one database, concurrent copies, a SIGKILL in the
//! middle, and a death at each step of the work. Its table has no unique constraint, so a fee that is
//! charged twice is seen.

#[path = "../../../crates/hapax/tests/support/mod.rs"]
mod support;

use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::Duration;

use support::load::Load;
use support::nodes::Database;
use support::payouts::payouts;
use support::process::{POINTS_OF_RUST, Process, dies_at};
use support::until;

const SECRET: &str = "whsec_example";

/// One of the apps on this database.
fn app(database: &Database, env: &[(&str, &str)]) -> Process {
    Process::start(
        Command::new(env!("CARGO_BIN_EXE_payout-fee-postgres-rust"))
            .env("DATABASE_URL", &database.url)
            .env("LISTEN", "127.0.0.1:0")
            .envs(env.iter().copied()),
    )
}

/// Waits until `events` are done, and checks that each has one fee of 50 and one message.
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

/// A load of these payouts, each `copies` times on as many connections.
fn load(numbers: std::ops::Range<usize>, copies: usize) -> Load {
    payouts(SECRET, numbers, copies)
}

#[test]
fn fifty_copies_to_two_apps_and_a_sigkill_of_one_charge_one_fee_of_50() {
    // Half of the copies go to each app. One app is killed after it has acked some of its copies.
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
    // One app aborts at each named moment; the next app finds the state that it left.
    const PAYOUTS: usize = 10;
    let dir = tempfile::tempdir().unwrap();
    let hit_file = dir.path().join("hits");
    let database = Database::empty("example_dies");
    let mut payouts = 0;
    for (turn, point) in POINTS_OF_RUST.into_iter().enumerate() {
        let at = 1 + turn % 3;
        let mut load = load(payouts..payouts + PAYOUTS, 2);
        payouts += PAYOUTS;
        dies_at(point, at, &hit_file, &mut load, |env| app(&database, env));
        let next = app(&database, &[]);
        load.send_all(next.address);
        is_once_each(&database, payouts);
        drop(next);
    }
}
