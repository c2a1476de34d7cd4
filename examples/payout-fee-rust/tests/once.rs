//! The example, run as its README says: concurrent copies, a SIGKILL in the middle, and a death at
//! each step of the work. Its table has no unique constraint, so a fee that is charged twice is seen.

#[path = "../../../crates/hapax/tests/support/mod.rs"]
mod support;

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::Ordering;

use rusqlite::{Connection, OpenFlags, Row};
use support::load::Load;
use support::payouts::payouts;
use support::process::{POINTS_OF_RUST, Process, dies_at};
use support::{FOREVER, until};
use tempfile::TempDir;

const SECRET: &str = "whsec_example";

/// The app's working directory, in which it can be started repeatedly.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn start(&self, env: &[(&str, &str)]) -> Process {
        Process::start(
            Command::new(env!("CARGO_BIN_EXE_payout-fee-rust"))
                .current_dir(self.0.path())
                .env("LISTEN", "127.0.0.1:0")
                .envs(env.iter().copied()),
        )
    }

    fn hits(&self) -> PathBuf {
        self.0.path().join("hits")
    }

    /// `(fees, their sum, payouts that have one)`.
    fn fees(&self) -> (i64, i64, i64) {
        let sql =
            "SELECT count(*), coalesce(sum(fee), 0), count(DISTINCT payout_id) FROM payout_fees";
        self.read(sql, |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))
    }

    fn number(&self, sql: &str) -> i64 {
        self.read(sql, |row| row.get(0))
    }

    fn read<T>(&self, sql: &str, read: impl FnOnce(&Row<'_>) -> rusqlite::Result<T>) -> T {
        let path = self.0.path().join("hapax-data/hapax.db");
        let database = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY).unwrap();
        database.busy_timeout(FOREVER).unwrap();
        database.query_row(sql, [], read).unwrap()
    }

    /// Waits until `events` are done, and checks that each has one fee of 50 and one message.
    #[track_caller]
    fn is_once_each(&self, events: usize) {
        let events = events as i64;
        let done = "SELECT count(*) FROM hapax_processed_events WHERE status = 'processed'";
        until("all events are processed", || (self.number(done) >= events).then_some(()));
        assert_eq!(self.fees(), (events, 50 * events, events));
        assert_eq!(self.number("SELECT count(*) FROM hapax_message"), events);
        assert_eq!(self.number("SELECT count(*) FROM hapax_dead_letters"), 0);
    }
}

/// A load of these payouts, each `copies` times on as many connections.
fn load(numbers: std::ops::Range<usize>, copies: usize) -> Load {
    payouts(SECRET, numbers, copies)
}

#[test]
fn fifty_copies_at_once_and_a_sigkill_in_the_middle_charge_one_fee_of_50() {
    const COPIES: usize = 50;
    let place = Place::new();
    let mut copies = load(0..1, COPIES);
    let app = place.start(&[]);
    copies.send(app.address, |acked| {
        until("some are acked", || (acked.load(Ordering::Relaxed) >= COPIES / 3).then_some(()));
        drop(app);
    });
    let mut app = place.start(&[]);
    copies.send_all(app.address);
    place.is_once_each(1);
    app.signal("TERM");
    assert_eq!(app.wait().code(), Some(0), "a clean stop");
    assert_eq!(place.fees(), (1, 50, 1));
}

#[test]
fn a_death_at_each_step_of_the_handler_neither_loses_nor_doubles_a_fee() {
    // The app aborts at each named moment: at the first job, and after other jobs are done.
    const PAYOUTS: usize = 20;
    let place = Place::new();
    let hit_file = place.hits();
    let hits_to = ("HAPAX_FAILPOINT_HITS", hit_file.to_str().unwrap());
    let mut payouts = 0;
    for point in POINTS_OF_RUST {
        for at in [1, 5] {
            let mut load = load(payouts..payouts + PAYOUTS, 2);
            payouts += PAYOUTS;
            dies_at(point, at, &hit_file, &mut load, |env| place.start(env));
            let app = place.start(&[hits_to]);
            load.send_all(app.address);
            place.is_once_each(payouts);
            drop(app);
        }
    }
}
