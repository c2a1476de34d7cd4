//! The example of an API behind a proxy: an app in Python that stores each answer in the
//! transaction of its charge. Its table has no constraint: a second charge is a second row.
//!
//! The server, PostgreSQL and the app are real. The app is killed at every step.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::support::charges::{Charge, api, is_replay, kept, problem};
use crate::support::nodes::Database;
use crate::support::process::Process;
use crate::support::{House, Server, python, skip, until};
use hapax_sim::free_port;

/// The steps of app.py, in order.
const STEPS: [&str; 4] = ["before begin", "after insert", "before commit", "after commit"];

/// The pause between two attempts of a client that was asked to retry.
const BACK_OFF: Duration = Duration::from_millis(50);

fn example() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/idempotent-charges-python")
}

fn text(file: &str) -> String {
    std::fs::read_to_string(example().join(file)).unwrap()
}

/// The example as its README sets it up, with a short lease.
struct Stage {
    python: String,
    database: Database,
    app_database: String,
    app: SocketAddr,
    server: Server,
    _house: House,
}

impl Stage {
    /// `None` if this Python is not installed here; the skip was printed.
    fn set(test: &str) -> Option<Self> {
        let python = match python::with_psycopg() {
            Ok(python) => python,
            Err(why) => {
                skip(test, &why);
                return None;
            }
        };
        let database = Database::empty("charges");
        // Roles belong to the whole PostgreSQL server, so each database gets a role of its own.
        let role = format!("{}_app", database.name());
        let app_database = database.url.replace("//postgres@", &format!("//{role}@"));
        let app = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let config = text("hapax.toml")
            .replace("postgres://postgres@127.0.0.1/charges", &database.url)
            .replace("127.0.0.1:8090", "127.0.0.1:0")
            .replace("127.0.0.1:3000", &app.to_string())
            .replace("lease = \"10s\"", "lease = \"2s\"");
        let house = House::new(&config);
        let migrated = crate::common::hapax(&["migrate", "up"]).in_dir(house.path()).run();
        assert_eq!(migrated.code, 0, "{migrated:?}");
        database.execute(&text("schema.sql").replace("charges_app", &role));
        let server = house.start();
        Some(Self { python, database, app_database, app, server, _house: house })
    }

    /// Starts the app and waits until it listens. With `die_at` it exits at that step.
    fn start_app(&self, die_at: Option<&str>) -> Process {
        Process::start(
            Command::new(&self.python)
                .arg("app.py")
                .current_dir(example())
                .env("DATABASE_URL", &self.app_database)
                .env("PORT", self.app.port().to_string())
                .env("PYTHONDONTWRITEBYTECODE", "1")
                .env_remove("DIE_AT")
                .envs(die_at.map(|step| ("DIE_AT", step))),
        )
    }

    /// How many charges each key has.
    fn charges(&self) -> BTreeMap<String, usize> {
        let mut charges = BTreeMap::new();
        for key in self.database.execute("SELECT key FROM charges").into_iter().flatten() {
            *charges.entry(key).or_default() += 1;
        }
        charges
    }
}

#[test]
fn an_app_that_dies_at_any_step_charges_each_key_once() {
    let Some(stage) = Stage::set("an_app_that_dies_at_any_step") else { return };
    let at = api(&stage.server);
    for (n, step) in STEPS.into_iter().enumerate() {
        let key = format!("order-{n}");
        let charge = Charge::with_key(&key);
        let mut app = stage.start_app(Some(step));
        let first = charge.send(at);
        assert_eq!(app.wait().signal(), Some(9), "{step}");
        let is_committed = step == "after commit";
        assert_eq!(stage.charges().contains_key(&key), is_committed, "{step}");
        // After the app's commit the answer is stored. Before the commit the outcome is unknown,
        // and the error says so.
        match is_committed {
            true => assert_eq!(first.status, 201, "{first:?}"),
            false => assert_eq!(problem(&first), "unknown_outcome"),
        }
        let _app = stage.start_app(None);
        let last = until("the charge goes through", || {
            let answer = charge.send(at);
            if answer.status == 409 {
                std::thread::park_timeout(BACK_OFF);
                return None;
            }
            Some(answer)
        });
        assert_eq!(last.status, 201, "{step}: {last:?}");
        assert_eq!(is_replay(&last), is_committed, "{step}");
        let replay = charge.send(at);
        assert!(is_replay(&replay) && kept(&replay) == kept(&last), "{replay:?}");
        assert_eq!(stage.charges().get(&key), Some(&1), "{step}");
    }
    let once = (0..STEPS.len()).map(|n| (format!("order-{n}"), 1)).collect();
    assert_eq!(stage.charges(), once);
    stage.server.stop();
}

#[test]
fn fifty_copies_are_one_charge_and_another_account_is_another() {
    let Some(stage) = Stage::set("fifty_copies_are_one_charge") else { return };
    let at = api(&stage.server);
    let _app = stage.start_app(None);
    let charge = Charge::with_key("order-1");
    let answers: Vec<_> = std::thread::scope(|scope| {
        let copies: Vec<_> = (0..50).map(|_| scope.spawn(|| charge.send(at))).collect();
        copies.into_iter().map(|it| it.join().unwrap()).collect()
    });
    let first: Vec<_> = answers.iter().filter(|it| it.status == 201 && !is_replay(it)).collect();
    assert_eq!(first.len(), 1, "{answers:?}");
    for other in answers.iter().filter(|it| it.status != 409) {
        assert_eq!(kept(other), kept(first[0]));
    }
    assert_eq!(stage.charges(), BTreeMap::from([("order-1".to_owned(), 1)]));
    assert_eq!(Charge { body: "{\"amount\":200}", ..charge.clone() }.send(at).status, 409);
    assert_eq!(Charge { account: Some("acct_2"), ..charge.clone() }.send(at).status, 201);
    assert_eq!(stage.charges(), BTreeMap::from([("order-1".to_owned(), 2)]));
    // A refusal of the app is an answer too.
    let wrong = Charge { body: "{\"amount\":0}", ..Charge::with_key("order-2") };
    assert_eq!(wrong.send(at).status, 422);
    assert!(is_replay(&wrong.send(at)));
    stage.server.stop();
}
