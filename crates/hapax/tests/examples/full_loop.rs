//! The full loop of examples/full-loop: a shop publishes from its SQL handler, and a ledger service receives with
//! its own. Both are killed with SIGKILL at random moments under load, and each payout must be booked exactly
//! once on the far side. No table has a unique constraint: a second effect is a second row.
//!
//! `HAPAX_TEST_KILLS` and `HAPAX_TEST_PAYOUTS` set the size of the run.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::Ordering;

use hapax_sim::free_port;
use serde_json::{Value, json};

use crate::common::hapax;
use crate::support::ledger::Ledger;
use crate::support::load::{Dice, Load};
use crate::support::nodes::Database;
use crate::support::{House, Sender, Server, own_address, until};

const STRIPE_SECRET: &str = "whsec_example";
const CLIENTS: usize = 4;

/// How many SIGKILLs each side gets in a run, and how many payouts are sent.
#[derive(Clone, Copy)]
struct Size {
    kills: usize,
    payouts: usize,
}

impl Size {
    fn of_this_run() -> Self {
        let number = |name: &str, default: usize| {
            std::env::var(name).map_or(default, |text| text.parse().expect(name))
        };
        Self { kills: number("HAPAX_TEST_KILLS", 6), payouts: number("HAPAX_TEST_PAYOUTS", 360) }
    }
}

fn text(file: &str) -> String {
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/full-loop");
    std::fs::read_to_string(example.join(file)).unwrap()
}

/// One side's own table.
enum Table {
    Sqlite(Ledger),
    Postgres(Database),
}

impl Table {
    fn rows(&self, table: &str) -> usize {
        let sql = format!("SELECT count(*) FROM {table}");
        let rows = match self {
            Self::Sqlite(ledger) => ledger.number(&sql),
            Self::Postgres(database) => database.number(&sql),
        };
        usize::try_from(rows).unwrap()
    }

    /// How many rows each `payout_id amount` has.
    fn by_payout(&self, table: &str) -> BTreeMap<String, i64> {
        let sql = format!("SELECT payout_id || ' ' || amount, count(*) FROM {table} GROUP BY 1");
        match self {
            Self::Sqlite(ledger) => ledger.counts(&sql),
            Self::Postgres(database) => {
                let sql = sql.replace(", count(*)", " || ' ' || count(*)");
                let sql = sql.replace("GROUP BY 1", "GROUP BY payout_id, amount");
                let row = |row: String| {
                    let (payout, count) = row.rsplit_once(' ').unwrap();
                    (payout.to_owned(), count.parse().unwrap())
                };
                database.execute(&sql).into_iter().flatten().map(row).collect()
            }
        }
    }

    /// Checks that every payout has exactly one row with its amount, and that there are no other rows.
    #[track_caller]
    fn is_once_each(&self, table: &str, payouts: usize) {
        let once: BTreeMap<String, i64> =
            (0..payouts).map(|n| (format!("po_{n} {}", amount(n)), 1)).collect();
        let found = self.by_payout(table);
        let wrong: Vec<_> =
            found.iter().filter(|(payout, rows)| once.get(*payout) != Some(rows)).collect();
        assert!(wrong.is_empty(), "{table}, not once: {wrong:?}");
        assert_eq!(found.len(), payouts, "{table}, lost");
    }
}

fn amount(n: usize) -> usize {
    10_000 + n
}

/// Both sides, each with its own table.
struct FullLoop {
    shop: House,
    payouts: Table,
    ledger: House,
    entries: Table,
    /// The address of the ledger's ingress, the same after every start.
    to: SocketAddr,
}

impl FullLoop {
    fn on_sqlite() -> Self {
        let to = SocketAddr::from((own_address(), free_port()));
        let shop = House::new(&shop_config(&text("shop/hapax.toml")));
        let ledger = House::new(&ledger_config(&text("ledger/hapax.toml"), to));
        let payouts = Table::Sqlite(Ledger::create(&shop, &text("shop/schema.sql")));
        let entries = Table::Sqlite(Ledger::create(&ledger, &text("ledger/schema.sql")));
        Self { shop, payouts, ledger, entries, to }
    }

    fn on_postgres() -> Self {
        let to = SocketAddr::from((own_address(), free_port()));
        let (payouts, entries) = (Database::empty("shop"), Database::empty("ledger"));
        let example = |name: &str, database: &Database| {
            let old = format!("postgres://postgres@127.0.0.1/{name}");
            text(&format!("{name}-postgres/hapax.toml")).replace(&old, &database.url)
        };
        // The claims of a killed process are free only after their leases, so the leases are short.
        let lease = |config: String| config.replace("timeout =", "lease = \"10s\"\ntimeout =");
        let shop = House::new(&shop_config(&lease(example("shop", &payouts))))
            .env("HAPAX_TEST_SETTINGS", "circuit.open_ms=1000,endpoint.lease_ms=12000");
        let ledger = House::new(&ledger_config(&lease(example("ledger", &entries)), to));
        payouts.execute(&text("shop-postgres/schema.sql"));
        entries.execute(&text("ledger-postgres/schema.sql"));
        let (payouts, entries) = (Table::Postgres(payouts), Table::Postgres(entries));
        Self { shop, payouts, ledger, entries, to }
    }

    /// Adds the endpoint as the README says, with a schedule for a ledger that is often down.
    fn connect(&self, shop: &Server) {
        let readme = text("README.md");
        let line = readme.lines().find(|line| line.contains("hapax endpoints add")).unwrap();
        let command = line.split_once("hapax ").unwrap().1.trim_end_matches(')');
        let command = command.replace("127.0.0.1:8090", &self.to.to_string()).replace('\'', "");
        let args: Vec<&str> = command.split(' ').collect();
        let admin = format!("http://{}", shop.admin);
        let added = hapax(&args).args(&["--json"]).env("HAPAX_ADMIN", &admin).run();
        assert_eq!(added.code, 0, "{added:?}");
        let endpoint: Value = serde_json::from_str(&added.stdout).unwrap();
        let path = format!("/api/v1/endpoints/{}", endpoint["id"].as_str().unwrap());
        let retry: Vec<&str> = [["50ms"; 10], ["1s"; 10], ["2s"; 10]].concat();
        let patched =
            shop.admin_request("PATCH", &path, Some(&json!({"retry": retry, "timeout": "5s"})));
        assert_eq!(patched.status, 200, "{patched:?}");
    }

    /// Sends every payout to the shop. Kills the shop several times: after a random number of acks, or when a
    /// random number of payouts is booked.
    fn send_and_kill_the_shop(&self, size: Size, dice: &mut Dice) {
        let share = size.payouts / size.kills;
        for round in 0..size.kills {
            let shop = self.shop.start();
            if round == 0 {
                self.connect(&shop);
            }
            let last = round + 1 == size.kills;
            let payouts = round * share..if last { size.payouts } else { (round + 1) * share };
            let acks = dice.below(share as u64) as usize;
            let booked = payouts.start + dice.below(acks as u64 + 1) as usize;
            let mut load = load(payouts);
            load.send(shop.ingress, |acked| {
                until("the kill is due", || (acked.load(Ordering::Relaxed) >= acks).then_some(()));
                if round % 2 == 1 {
                    self.wait_for_entries(booked);
                }
                shop.kill();
            });
            // The sender repeats every payout that was not acked.
            let shop = self.shop.start();
            load.send_all(shop.ingress);
            shop.kill();
        }
    }

    /// Kills the ledger whenever the next random number of payouts is booked. The last ledger process keeps running.
    fn kill_the_ledger(&self, size: Size, dice: &mut Dice) -> Server {
        let mut at: Vec<usize> =
            (0..size.kills).map(|_| dice.below(size.payouts as u64) as usize).collect();
        at.sort_unstable();
        let mut ledger = self.ledger.start();
        for entries in at {
            self.wait_for_entries(entries);
            ledger.kill();
            ledger = self.ledger.start();
        }
        ledger
    }

    /// Waits until there are `count` entries; fails if no entry is added for long.
    fn wait_for_entries(&self, count: usize) {
        let mut booked = self.entries.rows("entries");
        while booked < count {
            booked = until(&format!("an entry after {booked} of {count}"), || {
                Some(self.entries.rows("entries")).filter(|now| *now > booked)
            });
        }
    }

    /// The whole run, up to the check of both sides.
    fn run(&self) {
        let size = Size::of_this_run();
        assert!(size.kills > 0 && size.payouts >= size.kills, "too small: a kill needs a payout");
        let mut dice = Dice::new();
        let mut ledgers = Dice::new();
        ledgers.below(2);
        let ledger = std::thread::scope(|scope| {
            let ledger = scope.spawn(|| self.kill_the_ledger(size, &mut ledgers));
            self.send_and_kill_the_shop(size, &mut dice);
            // The last deliveries need a shop that keeps running.
            let shop = self.shop.start();
            let ledger = ledger.join().unwrap();
            self.wait_for_entries(size.payouts);
            for open in ["waiting", "sending", "failed", "dead"] {
                let path = format!("/api/v1/deliveries?status={open}");
                until(&format!("no delivery is {open}"), || {
                    let answer = shop.admin_get(&path);
                    assert_eq!(answer.status, 200, "{answer:?}");
                    (answer.json()["items"] == json!([])).then_some(())
                });
            }
            shop.stop();
            ledger
        });
        let dead = ledger.admin_get("/api/v1/jobs?status=dead").json();
        assert_eq!(dead["items"], json!([]), "{dead}");
        ledger.stop();
        self.payouts.is_once_each("payouts", size.payouts);
        self.entries.is_once_each("entries", size.payouts);
    }
}

/// The example's config without its addresses, because the test has its own.
fn shop_config(config: &str) -> String {
    let own = |line: &&str| !line.starts_with("listen") && !line.starts_with("admin_listen");
    config.lines().filter(own).collect::<Vec<_>>().join("\n")
}

fn ledger_config(config: &str, listen: SocketAddr) -> String {
    format!("listen = \"{listen}\"\n{}", shop_config(config))
}

fn load(payouts: std::ops::Range<usize>) -> Load {
    let sender = Sender::stripe(STRIPE_SECRET);
    let request = |n: usize| {
        let body = json!({
            "id": format!("evt_{n}"), "object": "event", "type": "payout.paid",
            "data": { "object": { "id": format!("po_{n}"), "amount": amount(n) } },
        });
        sender.request(body.to_string()).bytes()
    };
    Load::new(CLIENTS, payouts.map(request).collect())
}

#[test]
fn every_payout_is_booked_once_on_the_far_side_although_both_sides_are_killed() {
    FullLoop::on_sqlite().run();
}

#[test]
fn every_payout_is_booked_once_on_the_far_side_with_postgresql_too() {
    FullLoop::on_postgres().run();
}
