//! The commands that operate a server, run against a small server with scripted answers.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::sync::{Arc, Mutex};

use crate::common::{Run, hapax, write};
use serde_json::{Value, json};

/// The scripted answers: status and body by `METHOD /path`. A request is looked up with its query,
/// then without.
type Script = BTreeMap<String, (u16, Value)>;

/// A request as it arrived.
#[derive(Clone, Debug)]
struct Got {
    line: String,
    authorization: Option<String>,
    body: Value,
}

struct Admin {
    url: String,
    got: Arc<Mutex<Vec<Got>>>,
}

impl Admin {
    fn with(script: &[(&str, u16, Value)]) -> Self {
        let script: Script = script
            .iter()
            .map(|(line, status, body)| ((*line).to_owned(), (*status, body.clone())))
            .collect();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let got = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&got);
        std::thread::spawn(move || {
            let script = Arc::new(script);
            for stream in listener.incoming() {
                let (script, kept) = (Arc::clone(&script), Arc::clone(&kept));
                std::thread::spawn(move || serve(stream.unwrap(), &script, &kept));
            }
        });
        Self { url, got }
    }

    fn run(&self, args: &[&str]) -> Run {
        hapax(args).args(&["--admin", &self.url]).run()
    }

    fn got(&self) -> Vec<Got> {
        self.got.lock().unwrap().clone()
    }
}

fn serve(stream: TcpStream, script: &Script, got: &Mutex<Vec<Got>>) {
    let mut writer = stream.try_clone().unwrap();
    let mut reader = BufReader::new(stream);
    loop {
        let mut head = Vec::new();
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).unwrap_or(0) == 0 {
                return;
            }
            if line == "\r\n" {
                break;
            }
            head.push(line.trim_end().to_owned());
        }
        let header = |name: &str| {
            let lines = head.iter().filter_map(|line| line.split_once(": "));
            lines
                .filter(|(known, _)| known.eq_ignore_ascii_case(name))
                .map(|(_, value)| value.to_owned())
                .next()
        };
        let length = header("content-length").map_or(0, |length| length.parse().unwrap());
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        let line = head[0].trim_end_matches(" HTTP/1.1").to_owned();
        let path = line.split('?').next().unwrap_or_default();
        let unknown = (404, json!({ "detail": "no event has that id" }));
        let (status, answer) =
            script.get(&line).or_else(|| script.get(path)).cloned().unwrap_or(unknown);
        got.lock().unwrap().push(Got {
            line,
            authorization: header("authorization"),
            body: serde_json::from_slice(&body).unwrap_or(Value::Null),
        });
        let answer = answer.to_string();
        let written = write!(
            writer,
            "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n\
             {answer}",
            answer.len()
        );
        if written.is_err() {
            return;
        }
    }
}

/// Hapax's id of the n-th event.
fn id(n: u32) -> String {
    format!("01958d0e-0000-7000-8000-{n:012}")
}

/// The id of a job.
const JOB: &str = "01958d0e-0000-7000-8000-00000000b001";

fn summary(n: u32) -> Value {
    json!({
        "id": id(n), "event_id": format!("evt_{n}"), "tenant": "default",
        "source": "stripe", "event_type": "payout.paid", "occurred_at": null,
        "received_at": "2026-03-01T12:00:00.250Z", "status": "processed", "review": null,
        "arrival_count": 4, "conflict_count": 0, "processed_at": null, "result": "50",
    })
}

/// An event with nothing but its summary.
fn event(n: u32) -> Value {
    let mut event = summary(n);
    for list in ["arrivals", "jobs", "attempts", "messages", "actions", "headers"] {
        event[list] = json!([]);
    }
    event["body"] = json!("{}");
    event
}

fn page(items: Value, next: Value) -> Value {
    json!({ "items": items, "next": next })
}

#[test]
fn events_are_listed_as_lines_or_as_json_objects() {
    let admin = Admin::with(&[(
        "GET /api/v1/events",
        200,
        page(json!([summary(2), summary(1)]), json!("17")),
    )]);
    let run = admin.run(&["events", "list", "--source", "stripe", "--status", "processed"]);
    assert_eq!(run.code, 0, "{run:?}");
    assert_eq!(
        run.stdout.lines().next(),
        Some(&*format!(
            "2026-03-01T12:00:00Z  processed   stripe  payout.paid  evt_2  {}  ×4",
            id(2)
        ))
    );
    assert!(run.stderr.contains("--cursor 17"), "{run:?}");
    assert_eq!(admin.got()[0].line, "GET /api/v1/events?source=stripe&status=processed&limit=50");

    let run = admin.run(&["events", "list", "--json", "--unfinished-for", "30m"]);
    let ids: Vec<Value> = run
        .stdout
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["id"].clone())
        .collect();
    assert_eq!(ids, [id(2), id(1)]);
    assert!(admin.got()[1].line.contains("unfinished_for=30m"));
}

#[test]
fn an_event_is_shown_with_all_its_data_and_cannot_control_the_terminal() {
    let mut event = event(1);
    event["arrivals"] = json!([{
        "decision": "accepted", "received_at": "2026-03-01T12:00:00Z", "remote": "192.0.2.1",
        "scheme": "stripe", "secret": "env:STRIPE_SECRET", "signed_at": null, "request_id": id(9)
    }]);
    event["headers"] = json!([["x-evil", "\u{1b}[2J"]]);
    event["body"] = json!("{\"a\":1}");
    let admin = Admin::with(&[("GET /api/v1/events/a%2Fb", 200, event)]);
    let run = admin.run(&["events", "show", "a/b"]);
    assert_eq!(run.code, 0, "{run:?}");
    for line in [
        "event_id     evt_1",
        "arrival      2026-03-01T12:00:00Z accepted from 192.0.2.1",
        "header       x-evil: \\u{1b}[2J",
        "{\"a\":1}",
    ] {
        assert!(run.stdout.lines().any(|found| found == line), "{line}\n{}", run.stdout);
    }
    let run = admin.run(&["events", "show", "a/b", "--json"]);
    assert_eq!(serde_json::from_str::<Value>(&run.stdout).unwrap()["event_id"], "evt_1");
}

#[test]
fn each_exit_code_has_its_meaning() {
    let problem = |detail: &str| json!({ "detail": detail });
    let ambiguous = json!({ "detail": "several", "candidates": [id(1), id(2)] });
    let admin = Admin::with(&[
        ("GET /api/v1/events", 400, problem("unknown status")),
        ("GET /api/v1/events/two", 409, ambiguous),
        ("GET /api/v1/events/shut", 401, problem("a valid bearer token is required")),
        ("GET /api/v1/events/ill", 503, problem("the store cannot write now")),
    ]);
    let check = |args: &[&str], code: i32, said: &str| {
        let run = admin.run(args);
        assert_eq!((run.code, run.stdout.as_str()), (code, ""), "{args:?} {run:?}");
        assert!(run.stderr.contains(said), "{args:?} {run:?}");
    };
    check(&["events", "show", "none"], 1, "no event has that id");
    check(&["explain", "none"], 1, "no event has that id");
    check(&["explain", "two"], 1, &id(2));
    check(&["events", "list", "--status", "odd"], 2, "unknown status");
    check(&["events", "show", "shut"], 3, "HAPAX_TOKEN");
    check(&["events", "show", "ill"], 3, "cannot write");
    check(&["dead", "replay"], 2, "--all");
    for args in [&["events", "list"][..], &["explain", "x"], &["dead", "list"]] {
        let run = hapax(args).args(&["--admin", "http://127.0.0.1:1"]).run();
        assert_eq!(run.code, 3, "{args:?} {run:?}");
        assert!(run.stderr.contains("cannot reach http://127.0.0.1:1"), "{run:?}");
        let run = hapax(args).args(&["--admin", "somewhere"]).run();
        assert_eq!(run.code, 2, "{args:?} {run:?}");
    }
}

#[test]
fn the_token_comes_from_the_environment_or_a_file_and_the_server_from_the_environment() {
    let admin = Admin::with(&[("GET /api/v1/events", 200, page(json!([]), Value::Null))]);
    let dir = tempfile::tempdir().unwrap();
    let file = write(&dir, "token", "from-file\n");
    let list = |file: Option<&str>| {
        let args = file.map_or(vec![], |file| vec!["--token-file", file]);
        let run = hapax(&["events", "list"])
            .args(&args)
            .env("HAPAX_ADMIN", &admin.url)
            .env("HAPAX_TOKEN", "from-env")
            .run();
        assert_eq!(run.code, 0, "{run:?}");
    };
    list(None);
    list(Some(&file));
    let shown: Vec<_> = admin.got().into_iter().map(|got| got.authorization.unwrap()).collect();
    assert_eq!(shown, ["Bearer from-env", "Bearer from-file"]);
    let missing = hapax(&["events", "list", "--token-file", "/no/such/token"]).run();
    assert_eq!(missing.code, 3, "{missing:?}");
}

#[test]
fn replay_approve_and_reject_print_the_effect_on_each_job() {
    let item = |handler: &str, effect: &str| json!({ "event": id(1), "event_id": "evt_1", "handler": handler, "effect": effect });
    let replayed =
        page(json!([item("fee", "already_applied"), item("mail", "would_run")]), Value::Null);
    let decided = |status: &str, changed: bool| json!({ "id": id(1), "event_id": "evt_1", "status": status, "changed": changed });
    let admin = Admin::with(&[
        ("POST /api/v1/events/evt_1/replay", 200, replayed),
        ("POST /api/v1/events/evt_1/approve", 200, decided("received", false)),
        ("POST /api/v1/events/evt_1/reject", 200, decided("discarded", true)),
    ]);
    let run = admin.run(&["events", "replay", "evt_1", "--dry-run", "--reason", "why"]);
    assert_eq!(run.code, 0, "{run:?}");
    assert_eq!(run.stdout, "evt_1  fee  done already: not run again\nevt_1  mail  would run\n");
    let run = admin.run(&["events", "approve", "evt_1"]);
    assert_eq!((run.code, run.stdout), (0, format!("{} evt_1 received\n", id(1))));
    assert!(run.stderr.contains("nothing changed"), "{}", run.stderr);
    let run = admin.run(&["events", "reject", "evt_1", "--reason", "forged", "--json"]);
    assert_eq!(serde_json::from_str::<Value>(&run.stdout).unwrap()["status"], "discarded");
    assert_eq!(admin.run(&["events", "reject", "evt_1"]).code, 2, "a reason is needed");

    let asked: Vec<Value> = admin.got().into_iter().map(|got| got.body).collect();
    assert_eq!(asked[0], json!({ "dry_run": true, "force": false, "reason": "why" }));
    assert_eq!(asked[1], json!({}));
    assert_eq!(asked[2], json!({ "reason": "forged" }));
    assert_eq!(asked.len(), 3);
}

#[test]
fn dead_letters_are_listed_and_replayed_one_or_by_filter() {
    let job = json!({
        "id": JOB, "event": id(1), "event_id": "evt_1", "tenant": "default",
        "source": "stripe", "handler": "fee", "status": "dead", "run": 1, "attempt": 7,
        "steps": 7, "lost": 0, "fence": 7, "due_at": null, "result": null,
        "error": "no such table: fees", "finished_at": "2026-03-01T13:00:00Z",
        "idempotency_key": "k", "resource": null, "attempts": [],
    });
    let replay_one = format!("POST /api/v1/jobs/{JOB}/replay");
    let effect = json!({ "event": id(1), "event_id": "evt_1", "handler": "fee", "effect": "runs" });
    let admin = Admin::with(&[
        ("GET /api/v1/jobs", 200, page(json!([job]), Value::Null)),
        (&replay_one, 200, page(json!([effect]), Value::Null)),
        ("POST /api/v1/jobs/replay", 200, page(json!([effect]), json!("9"))),
    ]);
    let run = admin.run(&["dead", "list", "--handler", "fee"]);
    assert_eq!(
        run.stdout,
        format!(
            "2026-03-01T13:00:00Z  {JOB}  stripe/fee  evt_1  7 attempts  no such table: fees\n"
        )
    );
    let run = admin.run(&["dead", "replay", JOB]);
    assert_eq!((run.code, run.stdout.as_str()), (0, "evt_1  fee  queued to run\n"), "{run:?}");
    let run = admin.run(&["dead", "replay", "--handler", "fee", "--limit", "20", "--dry-run"]);
    assert_eq!(run.code, 0, "{run:?}");
    assert!(run.stderr.contains("--cursor 9"), "{run:?}");
    let got = admin.got();
    assert_eq!(got[0].line, "GET /api/v1/jobs?status=dead&handler=fee&limit=50");
    assert_eq!(got[2].body, json!({ "dry_run": true, "handler": "fee", "limit": 20 }));
    assert_eq!(admin.run(&["dead", "replay", JOB, "--all"]).code, 2);
}

#[test]
fn explain_prints_the_story_as_text_or_json() {
    let admin = Admin::with(&[("GET /api/v1/events/evt_1", 200, event(1))]);
    let run = admin.run(&["explain", "evt_1"]);
    assert_eq!(run.code, 0, "{run:?}");
    assert!(run.stdout.starts_with("evt_1 (payout.paid) from stripe arrived 4 times"), "{run:?}");
    let run = admin.run(&["explain", "evt_1", "--json"]);
    let explained: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!(explained["story"].as_array().unwrap().len(), 2, "{explained}");
}

#[test]
fn tail_prints_each_event_once_oldest_first() {
    let admin = Admin::with(&[(
        "GET /api/v1/events",
        200,
        page(json!([summary(3), summary(2), summary(1)]), Value::Null),
    )]);
    let run = admin.run(&["events", "tail", "--last", "2", "--count", "2", "--json"]);
    assert_eq!(run.code, 0, "{run:?}");
    let ids: Vec<Value> = run
        .stdout
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["id"].clone())
        .collect();
    assert_eq!(ids, [id(2), id(3)]);
}

fn levels(run: &Run) -> BTreeMap<String, Vec<String>> {
    let mut levels = BTreeMap::<String, Vec<String>>::new();
    for line in run.stdout.lines() {
        let finding: Value = serde_json::from_str(line).unwrap();
        let text = |name: &str| finding[name].as_str().unwrap().to_owned();
        levels.entry(text("check")).or_default().push(text("level"));
    }
    levels
}

#[test]
fn doctor_finds_nothing_wrong_with_a_healthy_server_and_names_jobs_without_a_handler() {
    let lane = |handler: &str, configured: bool, dead: u64| {
        json!({ "source": "stripe", "handler": handler, "configured": configured, "ready": 1,
                "leased": 0, "held": 0, "parked": 0, "review": 0, "dead": dead, "oldest_due": null })
    };
    let lanes = json!([lane("fee", true, 0), lane("gone", false, 0), lane("mail", true, 10_000)]);
    let admin = Admin::with(&[
        ("GET /readyz", 200, json!("ready")),
        ("GET /api/v1/lanes", 200, page(lanes, Value::Null)),
    ]);
    let dir = tempfile::tempdir().unwrap();
    write(&dir, "hapax.toml", "data_dir = \"data\"\n");
    std::fs::create_dir(dir.path().join("data")).unwrap();
    let run = hapax(&["doctor", "--json", "--admin", &admin.url]).in_dir(dir.path()).run();
    assert_eq!(run.code, 0, "{run:?}");
    let found = levels(&run);
    assert_eq!(found["config"][0], "ok");
    assert_eq!(found["data dir"], ["ok"]);
    assert_eq!(found["server"], ["ok"]);
    assert_eq!(found["sqlite"], ["ok"]);
    assert_eq!(found["jobs"], ["warn", "warn"], "{run:?}");
    assert!(
        run.stdout.contains("waiting jobs of stripe/gone, which is not configured: 1"),
        "{run:?}"
    );
    assert!(run.stdout.contains("dead letters of stripe/mail: at least 10000"), "{run:?}");
    assert_eq!(std::fs::read_dir(dir.path().join("data")).unwrap().count(), 0, "nothing is left");
}

#[test]
fn doctor_fails_if_something_is_broken_and_creates_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let run =
        hapax(&["doctor", "--json", "--admin", "http://127.0.0.1:1"]).in_dir(dir.path()).run();
    assert_eq!(run.code, 1, "{run:?}");
    let found = levels(&run);
    assert_eq!((&*found["config"][0], &*found["server"][0]), ("warn", "fail"));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);

    write(&dir, "hapax.toml", "no_such_key = 1\n");
    let run = hapax(&["doctor"]).in_dir(dir.path()).run();
    assert_eq!(run.code, 1, "{run:?}");
    assert!(run.stdout.contains("fail  config    hapax.toml:1:1"), "{run:?}");

    std::fs::create_dir(dir.path().join("hapax-data")).unwrap();
    write(&dir, "hapax-data/hapax.db", "this is no database, but it is long enough to be one");
    write(&dir, "hapax.toml", "");
    let run = hapax(&["doctor", "--json"]).in_dir(dir.path()).run();
    assert_eq!((run.code, &*levels(&run)["database"][0]), (1, "fail"), "{run:?}");
}

#[test]
fn doctor_names_the_vault_key_and_where_endpoints_may_be_and_shows_no_key() {
    // The key file is missing, valid, readable by others and damaged, one after the other. Then the key is in the
    // config.
    let dir = tempfile::tempdir().unwrap();
    let key = format!("{}A=", "Q".repeat(42));
    let doctor = || {
        let run = hapax(&["doctor", "--json"]).in_dir(dir.path()).run();
        assert!(!run.stdout.contains("QQQQ") && !run.stderr.contains("QQQQ"), "{run:?}");
        run
    };
    let file = dir.path().join("hapax-data/vault.key");
    let set_mode = |mode| {
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    write(&dir, "hapax.toml", "");
    let run = doctor();
    assert_eq!(levels(&run)["vault"], ["ok"], "{run:?}");
    assert!(run.stdout.contains("vault.key does not exist yet"), "{run:?}");
    assert!(!file.exists() && !file.parent().unwrap().exists());
    assert!(run.stdout.contains("public addresses with port 443, 80"), "{run:?}");

    std::fs::create_dir(dir.path().join("hapax-data")).unwrap();
    std::fs::write(&file, format!("{key}\n")).unwrap();
    set_mode(0o600);
    let run = doctor();
    assert_eq!(levels(&run)["vault"], ["ok"], "{run:?}");
    set_mode(0o640);
    let run = doctor();
    assert_eq!(levels(&run)["vault"], ["warn"], "{run:?}");
    assert!(run.stdout.contains("chmod 600"), "{run:?}");
    let mode = std::fs::metadata(&file).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, 0o640, "doctor changes nothing");
    std::fs::write(&file, &key[..20]).unwrap();
    let run = doctor();
    assert_eq!((run.code, &*levels(&run)["vault"][0]), (1, "fail"), "{run:?}");
    assert!(run.stdout.contains("backup"), "{run:?}");

    let config = "[outbound]\nallow = [\"10.0.0.0/8\"]\nproxy = \"http://127.0.0.1:9\"\n";
    write(&dir, "hapax.toml", &format!("{config}[vault]\nkey = \"{key}\"\n"));
    let run = doctor();
    assert_eq!(levels(&run)["vault"], ["ok"], "{run:?}");
    assert_eq!(levels(&run)["outbound"], ["ok", "fail"], "{run:?}");
    assert!(run.stdout.contains("also any address in 10.0.0.0/8"), "{run:?}");
    assert!(run.stdout.contains("the proxy http://127.0.0.1:9 cannot be reached"), "{run:?}");
    assert_eq!(run.code, 1, "{run:?}");
}

#[test]
fn doctor_warns_of_nodes_that_share_a_database_without_a_vault_key() {
    let dir = tempfile::tempdir().unwrap();
    let config = write(&dir, "hapax.toml", "database_url = \"postgres://127.0.0.1:9/nowhere\"\n");
    let run = hapax(&["doctor", "--json", "--config", &config]).run();
    assert_eq!(levels(&run)["vault"], ["warn"], "{run:?}");
    assert!(run.stdout.contains("openssl rand -base64 32"), "{run:?}");
}
