//! The examples for PostgreSQL: apps in Python and Node that do their work and complete their job
//! in one transaction of their own. The ledger has no constraint: a fee that is charged twice has
//! two rows.
//!
//! The server, PostgreSQL and the apps are real. The apps are killed at every step, called twice at
//! once, cut off from their answers, and delayed.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, LazyLock, Mutex};

use crate::support::load::Load;
use crate::support::sender::Request;
use crate::support::{FOREVER, House, Lines, Sender, Server, Wire, npm, python, until};
use hapax_sim::{Postgres, READY_FOR_QUERY, TcpProxy, Trap, free_port, skip};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio_postgres::NoTls;

const SECRET: &str = "whsec_example";
/// The steps of app.py and app.js, in order.
const STEPS: [&str; 5] =
    ["before begin", "after insert", "after complete", "before commit", "after commit"];
const AMOUNT_AND_FEE: (i64, i64) = (10_000, 50);

/// The runtime of engines and proxies; the tests themselves wait in plain threads.
static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| Runtime::new().unwrap());

#[derive(Clone, Copy)]
enum Language {
    Python,
    Node,
}

/// How to run an app's files.
#[derive(Clone)]
struct Program {
    interpreter: String,
    folder: PathBuf,
    extension: &'static str,
}

impl Language {
    fn example(self) -> PathBuf {
        let name = match self {
            Self::Python => "payout-fee-postgres-python",
            Self::Node => "payout-fee-postgres-node",
        };
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").join(name)
    }

    fn text(self, file: &str) -> String {
        std::fs::read_to_string(self.example().join(file)).unwrap()
    }

    /// The program that runs the app, or why the app cannot run here.
    fn program(self) -> Result<Program, String> {
        match self {
            Self::Python => Ok(Program {
                interpreter: python::with_psycopg()?,
                folder: self.example(),
                extension: "py",
            }),
            Self::Node => Ok(Program {
                interpreter: "node".to_owned(),
                folder: node_packages()?,
                extension: "js",
            }),
        }
    }
}

/// The packages are installed once for all tests.
fn node_packages() -> Result<PathBuf, String> {
    static INSTALLED: LazyLock<Result<PathBuf, String>> = LazyLock::new(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("payout-fee-postgres-node");
        npm::install(&Language::Node.example(), &folder).map(|()| folder)
    });
    INSTALLED.clone()
}

/// A database with the example's schema, a server's config, and a directory for the app.
struct Stage {
    language: Language,
    program: Program,
    house: House,
    /// The URL of the database for the superuser.
    database: String,
    role: String,
    /// The URL of the database for the app's own role.
    app_database: String,
    app: SocketAddr,
}

impl Stage {
    /// Prepares a database with the schema that the example's README creates. `None` if the
    /// language is not installed here; the skip was printed.
    fn set(test: &str, language: Language) -> Option<Self> {
        let stage = Self::bare(test, language)?;
        stage.migrate();
        Some(stage)
    }

    /// Prepares an empty database.
    fn bare(test: &str, language: Language) -> Option<Self> {
        match language.program() {
            Ok(program) => Some(Self::with(language, program)),
            Err(why) => {
                skip(test, &why);
                None
            }
        }
    }

    fn with(language: Language, program: Program) -> Self {
        let postgres = RUNTIME.block_on(Postgres::shared());
        let database = RUNTIME.block_on(postgres.create_database("payouts"));
        // Roles belong to the whole PostgreSQL server, so each database gets a role of its own.
        let role = database.rsplit('/').next().unwrap().replace("payouts", "payout_app");
        let app_database = database.replace("//postgres@", &format!("//{role}@"));
        let house = House::new("");
        let app = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let stage = Self { language, program, house, database, role, app_database, app };
        stage.configure(app.port(), &[]);
        stage
    }

    /// The commands of the README, in their order.
    fn migrate(&self) {
        let migrated = crate::common::hapax(&["migrate", "up"]).in_dir(self.house.path()).run();
        assert_eq!(migrated.code, 0, "{migrated:?}");
        self.rows(&self.schema());
    }

    fn schema(&self) -> String {
        self.language.text("schema.sql").replace("payout_app", &self.role)
    }

    /// The example's config with the addresses of this test, a short schedule, and `lines` in place
    /// of the lines that begin with the same text.
    fn configure(&self, port: u16, lines: &[(&str, &str)]) {
        let quickly = format!("retry = [\"0s\"{}]", ", \"250ms\"".repeat(48));
        let lines = lines.iter().copied().chain([("retry = ", quickly.as_str())]);
        let mut config = self
            .language
            .text("hapax.toml")
            .replace("postgres://postgres@127.0.0.1/payouts", &self.database)
            .replace("127.0.0.1:3000", &format!("127.0.0.1:{port}"));
        for (begins, instead) in lines {
            let old = config.lines().find(|line| line.starts_with(begins)).unwrap().to_owned();
            config = config.replace(&old, instead);
        }
        self.house.configure(&config);
    }

    /// Starts the app and waits until it listens. With `die_at` it exits at that step.
    fn start_app(&self, die_at: Option<&str>) -> App {
        self.start_app_on(&self.app_database, die_at)
    }

    fn start_app_on(&self, database: &str, die_at: Option<&str>) -> App {
        let mut command = self.command("app", database, die_at);
        let mut process = command.env("PORT", self.app.port().to_string()).spawn().unwrap();
        let said = Lines::of(process.stdout.take().unwrap());
        let complained = Lines::of(process.stderr.take().unwrap());
        let app = App { process, said };
        let ready = app.said.try_wait_for("app ready: http://");
        assert!(ready.is_some(), "the app did not start: {}", complained.text());
        app
    }

    fn command(&self, file: &str, database: &str, die_at: Option<&str>) -> Command {
        let mut command = Command::new(&self.program.interpreter);
        command
            .arg(format!("{file}.{}", self.program.extension))
            .current_dir(&self.program.folder)
            .env("DATABASE_URL", database)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env_remove("HOOK_SECRET")
            .env_remove("DIE_AT")
            .envs(die_at.map(|step| ("DIE_AT", step)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// The first column of all results, queried as the superuser.
    fn rows(&self, sql: &str) -> Vec<String> {
        let rows = RUNTIME.block_on(Postgres::execute_at(&self.database, sql));
        rows.into_iter().flatten().collect()
    }

    /// How many fees each payout was charged.
    fn fees(&self) -> BTreeMap<String, usize> {
        let (amount, fee) = AMOUNT_AND_FEE;
        let mut fees = BTreeMap::new();
        for row in self.rows("SELECT concat_ws(' ', payout_id, amount, fee) FROM payout_fees") {
            let payout = row.strip_suffix(&format!(" {amount} {fee}"));
            *fees.entry(payout.unwrap_or(&row).to_owned()).or_default() += 1;
        }
        fees
    }

    /// Checks that there are one fee and one message for each of these payouts, and nothing else.
    #[track_caller]
    fn charged_once_each(&self, payouts: impl IntoIterator<Item = String>) {
        let once: BTreeMap<String, usize> = payouts.into_iter().map(|id| (id, 1)).collect();
        assert_eq!(self.fees(), once);
        let mut messages = self.rows(
            "SELECT data ->> 'payout'
             FROM (SELECT type, key, convert_from(body, 'UTF8')::jsonb -> 'data' AS data
                   FROM hapax.message) m
             WHERE type = 'fee.charged' AND key = data ->> 'payout' AND data -> 'fee' = '50'",
        );
        messages.sort();
        assert_eq!(messages, once.into_keys().collect::<Vec<_>>());
    }

    /// Waits until this many events are processed, each with the app's result, and checks that
    /// there are no others.
    #[track_caller]
    fn all_processed(&self, server: &Server, events: usize) {
        let processed = until("all events are processed", || {
            let processed = server.events("status=processed");
            (processed.len() == events).then_some(processed)
        });
        assert_eq!(server.events("").len(), events);
        for event in processed {
            assert_eq!(event["result"], "fee 50", "{event}");
        }
    }
}

/// A running app; it gets a SIGKILL when dropped.
struct App {
    process: Child,
    said: Lines,
}

impl App {
    /// Waits until the app has killed itself.
    #[track_caller]
    fn dies(mut self) {
        assert!(self.said.wait_for_end(), "it lives");
        assert_eq!(self.process.wait().unwrap().signal(), Some(9));
    }
}

impl Drop for App {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn payout_id(n: usize) -> String {
    format!("po_{n}")
}

fn payout(n: usize) -> Request {
    let object = json!({ "id": payout_id(n), "amount": AMOUNT_AND_FEE.0 });
    let body = json!({
        "id": format!("evt_{n}"), "object": "event", "type": "payout.paid",
        "data": { "object": object },
    });
    Sender::stripe(SECRET).request(body.to_string())
}

/// The job of an event, with its attempts.
fn job(server: &Server, event_id: &str) -> Value {
    let detail = server.admin_get(&format!("/api/v1/events/{event_id}")).json();
    detail["jobs"][0].clone()
}

/// How many attempts the job of an event took.
fn attempts(server: &Server, event_id: &str) -> u64 {
    let job = job(server, event_id);
    job["attempt"].as_u64().unwrap_or_else(|| panic!("no attempt: {job}"))
}

#[test]
fn a_python_app_that_dies_at_any_step_charges_each_fee_once() {
    dies_at_any_step("a_python_app_that_dies_at_any_step", Language::Python);
}

#[test]
fn a_node_app_that_dies_at_any_step_charges_each_fee_once() {
    dies_at_any_step("a_node_app_that_dies_at_any_step", Language::Node);
}

fn dies_at_any_step(test: &str, language: Language) {
    // SIGKILL between any two statements, after the commit, and at random moments under load.
    const PAYOUTS: usize = 24;
    const COPIES: usize = 3;
    let Some(stage) = Stage::set(test, language) else { return };
    let server = stage.house.start();
    for (n, step) in STEPS.into_iter().enumerate() {
        let app = stage.start_app(Some(step));
        server.ask(payout(n).bytes()).is("accepted");
        app.dies();
        let charged = stage.fees().get(&payout_id(n)).copied().unwrap_or_default();
        assert_eq!(charged, usize::from(step == "after commit"), "{step}");
        let _app = stage.start_app(None);
        stage.all_processed(&server, n + 1);
        let expected = if step == "after commit" { 1..=1 } else { 2..=u64::MAX };
        let attempts = attempts(&server, &format!("evt_{n}"));
        assert!(expected.contains(&attempts), "{step}: {attempts} attempts");
    }
    stage.charged_once_each((0..STEPS.len()).map(payout_id));

    let payouts = STEPS.len()..STEPS.len() + PAYOUTS;
    let copies = |n| std::iter::repeat_n(payout(n).bytes(), COPIES);
    let mut load = Load::new(COPIES, payouts.clone().flat_map(copies).collect());
    let charged = |at_least: usize| {
        until("fees are charged", || (stage.fees().len() >= at_least).then_some(()));
    };
    let mut app = Some(stage.start_app(None));
    load.send(server.ingress, |_| {
        for quarter in 1..4 {
            charged(STEPS.len() + PAYOUTS * quarter / 4);
            drop(app.take());
            app = Some(stage.start_app(None));
        }
    });
    stage.all_processed(&server, payouts.end);
    stage.charged_once_each((0..payouts.end).map(payout_id));
    server.stop();
}

#[test]
fn a_python_app_whose_requests_come_twice_at_once_charges_each_fee_once() {
    asked_twice_at_once("a_python_app_whose_requests_come_twice_at_once", Language::Python);
}

#[test]
fn a_node_app_whose_requests_come_twice_at_once_charges_each_fee_once() {
    asked_twice_at_once("a_node_app_whose_requests_come_twice_at_once", Language::Node);
}

fn asked_twice_at_once(test: &str, language: Language) {
    // A proxy between Hapax and the app sends every request twice under one fence, and returns the
    // worse answer. At the same time, 50 copies of each event arrive at Hapax.
    const COPIES: usize = 50;
    let Some(stage) = Stage::set(test, language) else { return };
    let doubler = Doubler::to(stage.app);
    stage.configure(doubler.port, &[]);
    let server = stage.house.start();
    let _app = stage.start_app(None);
    let readme = language.text("README.md");
    let line = readme.lines().find(|line| line.starts_with("hapax send")).unwrap();
    let line = line.replace("127.0.0.1:8080", &server.ingress.to_string());
    let sent = crate::common::hapax(&line.split(' ').skip(1).collect::<Vec<_>>()).run();
    assert_eq!(sent.code, 0, "{sent:?}");
    let copies = |n| std::iter::repeat_n(payout(n).bytes(), COPIES);
    Load::new(COPIES, (0..2).flat_map(copies).collect()).send_all(server.ingress);
    stage.all_processed(&server, 3);
    server.stop();
    let ours = [payout_id(0), payout_id(1)];
    let readmes = stage.fees().into_keys().find(|id| !ours.contains(id)).unwrap();
    stage.charged_once_each(ours.into_iter().chain([readmes]));
    // Each request was repeated, one of the two won, and there was no further attempt.
    assert_eq!(*doubler.answers.lock().unwrap(), [[200, 409]; 3]);
}

/// Forwards every request twice, at the same moment, and returns the worse of both answers.
struct Doubler {
    port: u16,
    answers: Arc<Mutex<Vec<[u16; 2]>>>,
}

impl Doubler {
    fn to(app: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let answers = Arc::<Mutex<Vec<_>>>::default();
        let seen = Arc::clone(&answers);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let seen = Arc::clone(&seen);
                std::thread::spawn(move || double(stream.unwrap(), app, &seen));
            }
        });
        Self { port, answers }
    }
}

fn double(mut stream: TcpStream, app: SocketAddr, seen: &Mutex<Vec<[u16; 2]>>) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    while let Some(request) = read_request(&mut reader) {
        let ask = || Wire::connect(app).try_ask(&request).map(|answer| answer.status);
        let both = std::thread::scope(|scope| {
            let one = scope.spawn(ask);
            [ask(), one.join().unwrap()]
        });
        let mut both = both.map(|status| status.expect("the app answers"));
        both.sort_unstable();
        seen.lock().unwrap().push(both);
        let answer = format!("HTTP/1.1 {} Worse\r\ncontent-length: 0\r\n\r\n", both[1]);
        if stream.write_all(answer.as_bytes()).is_err() {
            return;
        }
    }
}

/// One request as it arrived; `None` at the end of the connection.
fn read_request(reader: &mut impl BufRead) -> Option<Vec<u8>> {
    let mut request = Vec::new();
    let mut length = 0;
    loop {
        let from = request.len();
        if reader.read_until(b'\n', &mut request).unwrap_or(0) == 0 {
            return None;
        }
        let line = String::from_utf8_lossy(&request[from..]).to_ascii_lowercase();
        if let Some(value) = line.strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
        if line == "\r\n" {
            break;
        }
    }
    let from = request.len();
    request.resize(from + length, 0);
    reader.read_exact(&mut request[from..]).ok()?;
    Some(request)
}

#[test]
fn a_python_app_whose_answers_are_lost_charges_each_fee_once() {
    unheard("a_python_app_whose_answers_are_lost", Language::Python);
}

#[test]
fn a_node_app_whose_answers_are_lost_charges_each_fee_once() {
    unheard("a_node_app_whose_answers_are_lost", Language::Node);
}

fn unheard(test: &str, language: Language) {
    // The connection between Hapax and the app is cut after the commit, before Hapax gets the
    // answer. Then the connection between the app and the database is cut: once before the COMMIT
    // arrives, and once after it is done.
    let Some(stage) = Stage::set(test, language) else { return };
    let postgres = RUNTIME.block_on(Postgres::shared());
    let to_app = RUNTIME.block_on(TcpProxy::to_port(stage.app.port()));
    let to_database = RUNTIME.block_on(TcpProxy::to_port(postgres.port()));
    stage.configure(to_app.port(), &[]);
    let server = stage.house.start();
    let _app = stage.start_app_on(&to_database.through(&stage.app_database), None);
    let bytes = |text: &str| text.as_bytes().to_vec();
    let cuts = [
        (&to_app, Trap::Answer { request: bytes("POST /hooks"), answer: bytes("fee 50") }, 1),
        (&to_database, Trap::Request(bytes("COMMIT")), 2),
        (
            &to_database,
            Trap::Answer { request: bytes("COMMIT"), answer: READY_FOR_QUERY.to_vec() },
            1,
        ),
    ];
    for (n, (proxy, trap, expected)) in cuts.into_iter().enumerate() {
        let sprung = proxy.sprung();
        proxy.arm(trap);
        server.ask(payout(n).bytes()).is("accepted");
        let cut = async { tokio::time::timeout(FOREVER, proxy.wait_sprung(sprung + 1)).await };
        assert!(RUNTIME.block_on(cut).is_ok(), "cut {n} never happened");
        stage.all_processed(&server, n + 1);
        // A committed job is not called again, whether or not its answer arrived.
        assert_eq!(attempts(&server, &format!("evt_{n}")), expected, "cut {n}");
    }
    server.stop();
    stage.charged_once_each((0..3).map(payout_id));
}

#[test]
fn a_python_app_that_is_late_charges_each_fee_once() {
    late("a_python_app_that_is_late", Language::Python);
}

#[test]
fn a_node_app_that_is_late_charges_each_fee_once() {
    late("a_node_app_that_is_late", Language::Node);
}

fn late(test: &str, language: Language) {
    // The app hangs in its INSERT until Hapax has timed out and called again. Both calls then
    // continue, and only the newer claim may commit.
    let Some(stage) = Stage::set(test, language) else { return };
    stage.configure(stage.app.port(), &[("timeout = ", "timeout = \"500ms\"")]);
    let server = stage.house.start();
    let _app = stage.start_app(None);
    let gate = Gate::close(&stage.database);
    server.ask(payout(0).bytes()).is("accepted");
    until("two attempts wait in their transactions", || {
        let waiting = "SELECT count(*) FROM pg_stat_activity
                       WHERE datname = current_database() AND wait_event_type = 'Lock'";
        (stage.rows(waiting)[0].parse::<u32>().unwrap() >= 2).then_some(())
    });
    drop(gate);
    stage.all_processed(&server, 1);
    let job = job(&server, "evt_0");
    server.stop();
    stage.charged_once_each([payout_id(0)]);
    // The older call may end after the newer one.
    let lost = format!("job {} is not held under fence", job["id"].as_str().unwrap());
    until("the other call gets the error", || {
        RUNTIME.block_on(Postgres::shared()).log().contains(&lost).then_some(())
    });
}

/// Keeps all other sessions from writing to the ledger while it exists.
struct Gate(tokio_postgres::Client);

impl Gate {
    fn close(database: &str) -> Self {
        RUNTIME.block_on(async {
            let (client, connection) = tokio_postgres::connect(database, NoTls).await.unwrap();
            RUNTIME.spawn(connection);
            client.batch_execute("BEGIN; LOCK TABLE payout_fees").await.unwrap();
            Self(client)
        })
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        RUNTIME.block_on(self.0.batch_execute("ROLLBACK")).unwrap();
    }
}

#[test]
fn a_python_script_without_a_server_charges_each_fee_once() {
    without_a_server("a_python_script_without_a_server", Language::Python);
}

#[test]
fn a_node_script_without_a_server_charges_each_fee_once() {
    without_a_server("a_node_script_without_a_server", Language::Node);
}

fn without_a_server(test: &str, language: Language) {
    // `hapax.once` alone, in a database without the other tables of Hapax: the same payout runs
    // many times at once, is killed at each step, and runs again.
    const AT_ONCE: usize = 6;
    let Some(stage) = Stage::bare(test, language) else { return };
    let printed = crate::common::hapax(&["sql", "once"]).run();
    assert_eq!(printed.code, 0, "{printed:?}");
    let is_there =
        |line: &&str| !["hapax.complete", "hapax.publish"].iter().any(|f| line.contains(f));
    let schema = stage.schema().lines().filter(is_there).collect::<Vec<_>>().join("\n");
    stage.rows(&format!("{}{schema}", printed.stdout));
    let start = |payout: &str, die_at: Option<&str>| {
        let mut command = stage.command("once", &stage.app_database, die_at);
        command.args([payout, "10000"]).spawn().unwrap()
    };
    let said = |script: Child| {
        let ran = script.wait_with_output().unwrap();
        (ran.status.signal(), String::from_utf8(ran.stdout).unwrap().trim().to_owned())
    };
    let scripts: Vec<Child> = (0..AT_ONCE).map(|_| start("po_0", None)).collect();
    let mut answers: Vec<_> = scripts.into_iter().map(said).collect();
    answers.sort();
    let (winner, losers) = answers.split_last().unwrap();
    assert_eq!(*winner, (None, "fee 50".to_owned()));
    assert!(losers.iter().all(|(_, said)| said == "charged before"), "{losers:?}");

    let steps = ["after once", "before commit", "after commit"];
    for (n, step) in steps.into_iter().enumerate() {
        let payout = payout_id(n + 1);
        assert_eq!(said(start(&payout, Some(step))), (Some(9), String::new()), "{step}");
        let again = if step == "after commit" { "charged before" } else { "fee 50" };
        assert_eq!(said(start(&payout, None)), (None, again.to_owned()), "{step}");
    }
    let once = (0..=steps.len()).map(|n| (payout_id(n), 1)).collect();
    assert_eq!(stage.fees(), once);
}

#[test]
fn the_role_of_the_app_may_do_nothing_but_its_work() {
    // A compromised app tries to reach all tables of Hapax, and to change old rows of the ledger.
    let nothing = Program { interpreter: String::new(), folder: PathBuf::new(), extension: "" };
    let stage = Stage::with(Language::Python, nothing);
    stage.migrate();
    assert_eq!(Language::Python.text("schema.sql"), Language::Node.text("schema.sql"));
    let refused = |sql: &str| {
        let ran = RUNTIME.block_on(async {
            let (client, connection) =
                tokio_postgres::connect(&stage.app_database, NoTls).await.unwrap();
            RUNTIME.spawn(connection);
            client.batch_execute(sql).await
        });
        ran.err().and_then(|error| error.code().map(|code| code.code().to_owned()))
    };
    for sql in [
        "SELECT * FROM hapax.job",
        "SELECT * FROM hapax.processed_events",
        "UPDATE hapax.job SET state = 2",
        "INSERT INTO hapax.once_key (tenant, scope, key) VALUES ('default', 'a', 'b')",
        "SELECT hapax.done(gen_random_uuid(), 1, NULL, now())",
        "SELECT hapax.fail(gen_random_uuid(), 1, 'no')",
        "CREATE TABLE hapax.mine ()",
        "SELECT * FROM payout_fees",
        "DELETE FROM payout_fees",
    ] {
        assert_eq!(refused(sql).as_deref(), Some("42501"), "{sql}");
    }
    assert_eq!(refused("SELECT hapax.once('a', 'b')"), None);
    assert_eq!(refused("SELECT hapax.publish('fee.charged', '{}')"), None);
    let unknown = "SELECT hapax.complete(gen_random_uuid(), 1, 'fee 50')";
    assert_eq!(refused(unknown).as_deref(), Some("XH001"));
}
