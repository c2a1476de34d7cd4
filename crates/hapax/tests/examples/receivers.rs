//! The receivers in Python and Node: the official packages of Standard Webhooks must accept every delivery,
//! even while secrets are rotated, and each message must be recorded once. The apps' records have no
//! constraint: a second effect is a second row.
//!
//! Real server in dev mode, real apps, real packages.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::process::Process;
use crate::support::sender::Request;
use crate::support::{Answer, House, Sender, Server, Wire, npm, python, skip, until};
use hapax_sim::free_port;
use rusqlite::{Connection, OpenFlags};
use serde_json::{Value, json};

const SIGKILL: i32 = 9;

/// Messages that are published between two steps of the test.
const BATCH: usize = 20;

#[derive(Clone, Copy)]
enum Language {
    Python,
    Node,
}

impl Language {
    fn example(self) -> PathBuf {
        let name = match self {
            Self::Python => "receive-deliveries-python",
            Self::Node => "receive-deliveries-node",
        };
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").join(name)
    }

    /// The steps of `DIE_AT`: before the effect is committed, and between the commit and the answer.
    fn steps(self) -> [&'static str; 2] {
        match self {
            Self::Python => ["before commit", "after commit"],
            Self::Node => ["before write", "after write"],
        }
    }
}

/// An app with its packages, and a server that delivers to it.
struct Stage {
    language: Language,
    /// The folder of the app's packages and records.
    folder: PathBuf,
    interpreter: String,
    app: SocketAddr,
    server: Server,
    _house: House,
}

impl Stage {
    /// `None` if the packages cannot be fetched here; the skip was printed.
    fn set(test: &str, language: Language) -> Option<Self> {
        // Endpoints on loopback are allowed in dev mode, as the README assumes.
        let house = House::without_config();
        let folder = house.path().join("app");
        let installed = match language {
            Language::Python => python::install(&language.example(), &folder),
            Language::Node => {
                npm::install(&language.example(), &folder).map(|()| "node".to_owned())
            }
        };
        let interpreter = match installed {
            Ok(interpreter) => interpreter,
            Err(why) => {
                skip(test, &why);
                return None;
            }
        };
        let app = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let server = house.start();
        Some(Self { language, folder, interpreter, app, server, _house: house })
    }

    /// Starts the app and waits until it listens. With `die_at` it exits at that step.
    fn start_app(&self, secret: &str, die_at: Option<&str>) -> Process {
        let env: Vec<_> = die_at.map(|step| ("DIE_AT", step)).into_iter().collect();
        self.start_app_with(secret, &env)
    }

    /// Starts the app with these variables of the environment.
    fn start_app_with(&self, secret: &str, env: &[(&str, &str)]) -> Process {
        let file = match self.language {
            Language::Python => self.language.example().join("app.py"),
            Language::Node => self.folder.join("app.js"),
        };
        Process::start(
            Command::new(&self.interpreter)
                .arg(file)
                .current_dir(&self.folder)
                .env("PORT", self.app.port().to_string())
                .env("PYTHONPATH", &self.folder)
                .env("PYTHONDONTWRITEBYTECODE", "1")
                .env("WEBHOOK_SECRET", secret)
                .env_remove("INVOICES_DB")
                .env_remove("INVOICES_FILE")
                .env_remove("DIE_AT")
                .envs(env.iter().copied()),
        )
    }

    /// Runs the README's command that begins with `begins`, with the addresses of this test.
    fn run_as_the_readme_says(&self, begins: &str) {
        let readme = std::fs::read_to_string(self.language.example().join("README.md")).unwrap();
        let line = readme.lines().find(|line| line.starts_with(begins)).unwrap();
        let line = line.replace("127.0.0.1:3000", &self.app.to_string());
        // No argument of these commands contains a space; the shell would remove the quotes.
        let args: Vec<String> = line.split(' ').skip(1).map(|arg| arg.replace('\'', "")).collect();
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let admin = format!("http://{}", self.server.admin);
        let ran = crate::common::hapax(&args).env("HAPAX_ADMIN", &admin).run();
        assert_eq!(ran.code, 0, "{ran:?}");
    }

    /// Publishes the next [`BATCH`] invoices, from `first`.
    fn publish(&self, first: usize) {
        for n in first..first + BATCH {
            let data = json!({"id": format!("inv_{n}"), "amount": n});
            let message = json!({"type": "invoice.paid", "id": format!("m-{n}"), "data": data});
            let answer = self.server.admin_post("/api/v1/messages", &message);
            assert_eq!(answer.status, 202, "{answer:?}");
        }
    }

    /// The only endpoint.
    fn endpoint(&self) -> String {
        let all = self.server.admin_get("/api/v1/endpoints").json();
        all["items"][0]["id"].as_str().unwrap().to_owned()
    }

    /// Lets the endpoint get many attempts, a tenth of a second apart.
    fn retry_often(&self) {
        let retry: Vec<&str> = ["0s"].into_iter().chain(["100ms"; 40]).collect();
        let path = format!("/api/v1/endpoints/{}", self.endpoint());
        let patched = self.server.admin_request("PATCH", &path, Some(&json!({"retry": retry})));
        assert_eq!(patched.status, 200, "{patched:?}");
    }

    /// Gives the endpoint a new secret in addition to the old ones, and returns it.
    fn rotate(&self) -> String {
        let path = format!("/api/v1/endpoints/{}/rotate", self.endpoint());
        let answer = self.server.admin_post(&path, &json!({"overlap": "1h"}));
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()["secret"].as_str().unwrap().to_owned()
    }

    /// How often each `(invoice, amount)` is recorded.
    fn recorded(&self) -> BTreeMap<(String, i64), usize> {
        let rows = match self.language {
            Language::Python => recorded_in_sqlite(&self.folder.join("invoices.db")),
            Language::Node => recorded_in_lines(&self.folder.join("invoices.jsonl")),
        };
        let mut recorded = BTreeMap::new();
        for row in rows {
            *recorded.entry(row).or_default() += 1;
        }
        recorded
    }

    #[track_caller]
    fn wait_for_recorded(&self, count: usize) {
        until("invoices are recorded", || (self.recorded().len() >= count).then_some(()));
    }

    /// The only delivery of a message, once it is delivered.
    #[track_caller]
    fn delivered(&self, message: &str) -> Value {
        until(&format!("{message} is delivered"), || {
            let shown = self.server.admin_get(&format!("/api/v1/messages/{message}")).json();
            let delivery = shown["deliveries"][0].clone();
            (delivery["status"] == "delivered").then_some(delivery)
        })
    }

    /// The app's answer to a request that did not come from Hapax.
    fn ask(&self, request: Request) -> Answer {
        let mut wire = Wire::connect(self.app);
        wire.write(request.to("/in").bytes());
        wire.answer()
    }
}

fn recorded_in_sqlite(file: &Path) -> Vec<(String, i64)> {
    let database = Connection::open_with_flags(file, OpenFlags::SQLITE_OPEN_READ_ONLY).unwrap();
    database.busy_timeout(crate::support::FOREVER).unwrap();
    let mut rows = database.prepare("SELECT invoice, amount FROM paid_invoices").unwrap();
    let rows = rows.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
    rows.map(Result::unwrap).collect()
}

/// The complete lines of the record of `app.js`.
fn recorded_in_lines(file: &Path) -> Vec<(String, i64)> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    let read = |line: &str| {
        let line: Value = serde_json::from_str(line).unwrap();
        (line["invoice"].as_str().unwrap().to_owned(), line["amount"].as_i64().unwrap())
    };
    whole.map(read).collect()
}

/// The secret that the README of an example names.
fn secret_of_the_readme(language: Language) -> String {
    let readme = std::fs::read_to_string(language.example().join("README.md")).unwrap();
    let secret = readme.split(['\n', ' ']).find(|word| word.starts_with("whsec_"));
    secret.expect("a secret").to_owned()
}

/// The official package refuses any delivery whose signature does not hold under the app's one secret. The app
/// keeps its first secret through two rotations, dies before and after its commit, and gets the later secrets
/// while deliveries are under way.
fn every_delivery_is_accepted_and_recorded_once(test: &str, language: Language) {
    let Some(stage) = Stage::set(test, language) else { return };
    let first = &*secret_of_the_readme(language);
    let mut app = stage.start_app(first, None);
    stage.run_as_the_readme_says("hapax endpoints add");
    stage.run_as_the_readme_says("hapax publish");
    assert_eq!(stage.delivered("paid-1")["attempts"].as_array().unwrap().len(), 1);

    // The package refuses deliveries that Hapax did not sign, and the app records nothing.
    let signed = Sender::new("standardwebhooks", first, "/in").request_with(
        "{\"type\":\"invoice.paid\",\"data\":{\"id\":\"forged\",\"amount\":1}}",
        crate::support::sender::now(),
        &[("webhook-id", "forged")],
    );
    let changed = String::from_utf8(signed.body.clone()).unwrap().replace(":1}", ":2}");
    for forged in [signed.clone().body(changed), signed.without("webhook-signature")] {
        let answer = stage.ask(forged);
        assert!(answer.status == 401 && answer.text().contains("not verified"), "{answer:?}");
    }
    assert_eq!(stage.recorded(), BTreeMap::from([(("inv_1".to_owned(), 100), 1)]));

    // The app is often down from here on.
    stage.retry_often();
    let mut published = 1_000;
    let mut next_batch = || {
        stage.publish(published);
        published += BATCH;
    };
    for step in language.steps() {
        drop(app);
        let mut dying = stage.start_app(first, Some(step));
        next_batch();
        assert_eq!(dying.wait().signal(), Some(SIGKILL), "{step}");
        app = stage.start_app(first, None);
    }

    next_batch();
    stage.wait_for_recorded(1 + 2 * BATCH + BATCH / 2);
    let second = stage.rotate();
    next_batch();
    let third = stage.rotate();
    next_batch();
    for newer in [second, third] {
        drop(app);
        app = stage.start_app(&newer, None);
        next_batch();
    }

    let mut repeated = 0;
    for n in 1_000..published {
        let delivery = stage.delivered(&format!("m-{n}"));
        let attempts = delivery["attempts"].as_array().unwrap();
        let answers: Vec<_> = attempts.iter().filter_map(|one| one["status"].as_u64()).collect();
        assert_eq!(answers, [200], "refused, or answered twice: {delivery}");
        repeated += usize::from(attempts.len() > 1);
    }
    assert!(repeated > 0, "no app died with a delivery under way");
    let once = (1_000..published).map(|n| ((format!("inv_{n}"), n as i64), 1));
    let readmes = (("inv_1".to_owned(), 100), 1);
    assert_eq!(stage.recorded(), once.chain([readmes]).collect());
    stage.server.stop();
    drop(app);
}

#[test]
fn the_official_python_package_accepts_every_delivery_through_two_rotations() {
    every_delivery_is_accepted_and_recorded_once(
        "the_official_python_package_accepts_every_delivery_through_two_rotations",
        Language::Python,
    );
}

#[test]
fn the_official_node_package_accepts_every_delivery_through_two_rotations() {
    every_delivery_is_accepted_and_recorded_once(
        "the_official_node_package_accepts_every_delivery_through_two_rotations",
        Language::Node,
    );
}

#[test]
fn the_node_receiver_records_each_message_once_when_its_disk_fails() {
    // The sync of a line fails, so its message comes again; and a write takes only a part of its line.
    let test = "the_node_receiver_records_each_message_once_when_its_disk_fails";
    let Some(stage) = Stage::set(test, Language::Node) else { return };
    let secret = secret_of_the_readme(Language::Node);
    stage.run_as_the_readme_says("hapax endpoints add");
    stage.retry_often();
    for (fault, first) in [("fsync", 0), ("short", BATCH)] {
        let app = stage.start_app_with(&secret, &npm::disk_fault(fault));
        stage.publish(first);
        (first..first + BATCH).for_each(|n| drop(stage.delivered(&format!("m-{n}"))));
        drop(app);
        let once = (0..first + BATCH).map(|n| ((format!("inv_{n}"), n as i64), 1));
        assert_eq!(stage.recorded(), once.collect(), "{fault}");
    }
    stage.server.stop();
}
