//! The examples of this repository, run as their READMEs say, and then with concurrent copies and
//! a SIGKILL in the middle.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;

use crate::support::ledger::Ledger;
use crate::support::load::Load;
use crate::support::sender::{Request, now};
use crate::support::{Answer, House, Lines, Sender, Server, Wire, npm, skip, until};
use rusqlite::{Connection, OpenFlags};
use serde_json::{Value, json};

const SECRET: &str = "whsec_example";
const PAYOUTS: usize = 60;
const COPIES: usize = 4;

fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").join(name)
}

fn text(name: &str) -> String {
    std::fs::read_to_string(example(name)).unwrap()
}

/// The amount of a payout and its fee, computed by hand for the first few.
fn amount_and_fee(n: usize) -> (i64, i64) {
    match n {
        0 => (10_000, 50),
        1 => (99, 0),
        // Half a unit, rounded up.
        2 => (100, 1),
        3 => (299, 1),
        4 => (300, 2),
        n => (n as i64 * 200, n as i64),
    }
}

/// All payouts, each several times, so that the copies travel on different connections at once.
fn load() -> Load {
    load_signed_at(now())
}

fn load_signed_at(second: i64) -> Load {
    let copies = |n| std::iter::repeat_n(payout(n, second).bytes(), COPIES);
    Load::new(COPIES, (0..PAYOUTS).flat_map(copies).collect())
}

fn payout(n: usize, signed_at: i64) -> Request {
    let body = json!({
        "id": format!("evt_{n}"), "object": "event", "type": "payout.paid",
        "data": { "object": { "id": format!("po_{n}"), "amount": amount_and_fee(n).0 } },
    });
    Sender::stripe(SECRET).request_at(body.to_string(), signed_at)
}

/// Runs the last command of a README.
fn send_as_the_readme_says(server: &Server, readme: &str) {
    let line = readme.lines().find(|line| line.starts_with("hapax send")).unwrap();
    let line = line.replace("127.0.0.1:8080", &server.ingress.to_string());
    let args: Vec<&str> = line.split(' ').skip(1).collect();
    let run = crate::common::hapax(&args).run();
    assert_eq!(run.code, 0, "{run:?}");
}

#[track_caller]
fn all_processed(server: &Server, events: usize) -> Vec<Value> {
    until("all events are processed", || {
        let events_now = server.events("status=processed");
        (events_now.len() == events).then_some(events_now)
    })
}

/// `(payout_id, amount, fee)` of every fee.
fn fees(database: &Path) -> Option<Vec<(String, i64, i64)>> {
    let database = Connection::open_with_flags(database, OpenFlags::SQLITE_OPEN_READ_ONLY).ok()?;
    database.busy_timeout(crate::support::FOREVER).unwrap();
    let mut rows = database.prepare("SELECT payout_id, amount, fee FROM payout_fees").ok()?;
    let rows = rows.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?))).unwrap();
    Some(rows.map(Result::unwrap).collect())
}

/// Checks that each payout has exactly one fee, of the right amount, besides the payout of the
/// README.
#[track_caller]
fn check_fees(mut found: Vec<(String, i64, i64)>) {
    let mut expected: Vec<_> = (0..PAYOUTS)
        .map(|n| {
            let (amount, fee) = amount_and_fee(n);
            (format!("po_{n}"), amount, fee)
        })
        .collect();
    let readmes = found.iter().position(|(payout, ..)| !is_ours(payout)).unwrap();
    let (_, amount, fee) = found.swap_remove(readmes);
    assert_eq!((amount, fee), (10_000, 50));
    found.sort();
    expected.sort();
    assert_eq!(found, expected);
}

fn is_ours(payout: &str) -> bool {
    payout.strip_prefix("po_").is_some_and(|rest| rest.parse::<usize>().is_ok_and(|n| n < PAYOUTS))
}

#[test]
fn the_payout_fee_as_config_only_charges_each_fee_once() {
    let house = House::new(&text("payout-fee-config/hapax.toml"));
    Ledger::create(&house, &text("payout-fee-config/schema.sql"));
    let mut load = load();
    let server = house.start();
    send_as_the_readme_says(&server, &text("payout-fee-config/README.md"));
    load.send(server.ingress, |acked| {
        let half = PAYOUTS * COPIES / 2;
        until("half of it is acked", || (acked.load(Ordering::Relaxed) >= half).then_some(()));
        server.kill();
    });
    let server = house.start();
    load.send_all(server.ingress);
    let events = all_processed(&server, PAYOUTS + 1);
    let first = events.iter().find(|event| event["event_id"] == "evt_0").unwrap();
    assert_eq!(first["result"], "50", "{first}");
    server.stop();
    check_fees(fees(&house.database()).unwrap());
}

/// `worker.py`, killed when dropped.
struct Worker {
    process: Child,
    printed: Lines,
}

impl Worker {
    fn start(server: &Server, fees: &Path) -> Self {
        let mut process = Command::new("python3")
            .arg(example("payout-fee-python/worker.py"))
            .env("HAPAX_ADMIN", format!("http://{}", server.admin))
            .env("FEES_DB", fees)
            .env("HAPAX_TOKEN", "example-token-of-the-worker")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let printed = Lines::of(process.stdout.take().unwrap());
        Self { process, printed }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn the_payout_fee_as_a_python_pull_worker_charges_each_fee_once() {
    // One worker dies with claims that it has not completed, and the server dies while another
    // worker runs.
    let test = "the_payout_fee_as_a_python_pull_worker_charges_each_fee_once";
    let python = Command::new("python3").args(["-c", "import sqlite3"]).output();
    if !python.is_ok_and(|ran| ran.status.success()) {
        return skip(test, "python3 with sqlite3 is not installed");
    }
    let house = House::new(&text("payout-fee-python/hapax.toml"));
    let database = house.path().join("fees.db");
    let charged = |at_least: usize| {
        until("fees are charged", || fees(&database).filter(|fees| fees.len() >= at_least));
    };
    let mut load = load();
    let server = house.start();
    let worker = Worker::start(&server, &database);
    send_as_the_readme_says(&server, &text("payout-fee-python/README.md"));
    worker.printed.wait_for(": fee 50");
    load.send(server.ingress, |_| {
        charged(PAYOUTS / 4);
        drop(worker);
        let another = Worker::start(&server, &database);
        charged(PAYOUTS / 2);
        server.kill();
        drop(another);
    });
    let server = house.start();
    let _worker = Worker::start(&server, &database);
    load.send_all(server.ingress);
    let events = all_processed(&server, PAYOUTS + 1);
    let first = events.iter().find(|event| event["event_id"] == "evt_0").unwrap();
    assert_eq!(first["result"], "fee 50", "{first}");
    server.stop();
    check_fees(fees(&database).unwrap());
}

/// `app.js` in a private folder with its packages, killed when dropped.
struct Express {
    process: Child,
    address: SocketAddr,
}

impl Express {
    fn start(folder: &Path, port: u16) -> Self {
        Self::start_with(folder, port, &[])
    }

    fn start_with(folder: &Path, port: u16, env: &[(&str, &str)]) -> Self {
        let mut process = Command::new("node")
            .arg("app.js")
            .current_dir(folder)
            .env("PORT", port.to_string())
            .env("STRIPE_WEBHOOK_SECRET", SECRET)
            .env_remove("FEES_FILE")
            .envs(env.iter().copied())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let ready = Lines::of(process.stdout.take().unwrap()).wait_for("app ready: http://");
        let address = ready.split('/').nth(2).unwrap().parse().unwrap();
        Self { process, address }
    }

    /// The app's answer to a request that did not go through Hapax.
    fn ask(&self, request: Request) -> Answer {
        let mut wire = Wire::connect(self.address);
        wire.write(request.to("/hooks").bytes());
        wire.answer()
    }
}

impl Drop for Express {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The complete lines of the ledger of `app.js`.
fn express_fees(folder: &Path) -> Vec<(String, i64, i64)> {
    let text = std::fs::read_to_string(folder.join("fees.jsonl")).unwrap_or_default();
    let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    let read = |line: &str| {
        let fee: Value = serde_json::from_str(line).unwrap();
        let number = |field: &str| fee[field].as_i64().unwrap();
        (fee["payout"].as_str().unwrap().to_owned(), number("amount"), number("fee"))
    };
    whole.map(read).collect()
}

#[test]
fn the_payout_fee_as_an_express_app_charges_each_fee_once_however_late() {
    // Every event was signed six minutes before its first attempt. The stripe package refuses
    // signatures that old, so the app can accept only new signatures of Hapax. The app dies in the
    // middle of the calls.
    const LATE_SECONDS: i64 = 360;
    let test = "the_payout_fee_as_an_express_app_charges_each_fee_once_however_late";
    let free = SocketAddr::from(([127, 0, 0, 1], hapax_sim::free_port()));
    let config = text("payout-fee-express/hapax.toml")
        .replace("127.0.0.1:3000", &free.to_string())
        .replace("provider = \"stripe\"", "provider = \"stripe\"\ntolerance = \"15m\"");
    let house = House::new(&config);
    let folder = house.path().join("app");
    if let Err(why) = npm::install(&example("payout-fee-express"), &folder) {
        return skip(test, &why);
    }
    let charged = |at_least: usize| {
        until("fees are charged", || (express_fees(&folder).len() >= at_least).then_some(()));
    };
    let app = Express::start(&folder, free.port());
    let refused = app.ask(payout(0, now() - LATE_SECONDS));
    assert_eq!(refused.status, 400, "{refused:?}");
    assert!(refused.text().contains("Timestamp outside the tolerance zone"), "{refused:?}");
    assert_eq!(app.ask(payout(0, now()).instead("stripe-signature", "t=1,v1=00")).status, 400);

    let server = house.start();
    send_as_the_readme_says(&server, &text("payout-fee-express/README.md"));
    charged(1);
    let mut load = load_signed_at(now() - LATE_SECONDS);
    load.send(server.ingress, |_| {
        charged(PAYOUTS / 4);
        drop(app);
    });
    load.send_all(server.ingress);
    let _app = Express::start(&folder, free.port());
    let events = all_processed(&server, PAYOUTS + 1);
    let first = events.iter().find(|event| event["event_id"] == "evt_0").unwrap();
    assert_eq!(first["result"], "fee 50", "{first}");
    server.stop();
    check_fees(express_fees(&folder));
}

#[test]
fn the_express_app_charges_each_fee_once_when_its_disk_fails() {
    // The sync of a line fails, so the call is repeated; and a write takes only a part of its line.
    let test = "the_express_app_charges_each_fee_once_when_its_disk_fails";
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    if let Err(why) = npm::install(&example("payout-fee-express"), folder) {
        return skip(test, &why);
    }
    let app = Express::start_with(folder, 0, &npm::disk_fault("fsync"));
    let statuses = [0; 3].map(|n| app.ask(payout(n, now())).status);
    assert_eq!(statuses, [500, 200, 200]);
    drop(app);
    let app = Express::start_with(folder, 0, &npm::disk_fault("short"));
    assert_eq!([0, 1, 2].map(|n| app.ask(payout(n, now())).status), [200; 3]);
    let payouts: Vec<String> =
        express_fees(folder).into_iter().map(|(payout, ..)| payout).collect();
    assert_eq!(payouts.len(), 3, "{payouts:?}");
}
