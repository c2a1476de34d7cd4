//! Tests of the torture test itself: it must pass a correct endpoint, and report the right law for
//! every flawed one. A storm that cannot fail would prove nothing.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::sync::{Arc, Mutex};

use crate::common::{Run, hapax};
use crate::support::House;
use crate::support::app::App;
use crate::support::endpoint::{self, Endpoint, Flaw};
use crate::support::ledger::{self, Ledger};
use crate::support::nodes::{self, Database};
use hapax_core::presets;
use hapax_core::secret::ActiveSecret;
use hapax_core::source::SourceSpec;
use serde_json::{Value, json};

const SECRET: &str = "whsec_test_of_storm";

/// Runs a storm as Stripe. The output never contains the secret.
fn storm(to: &str, args: &[&str]) -> Run {
    let run =
        hapax(&["storm", "--to", to, "--provider", "stripe", "--secret", SECRET]).args(args).run();
    assert!(!run.stdout.contains(SECRET) && !run.stderr.contains(SECRET), "{run:?}");
    run
}

/// Runs a storm with `--json`, and returns the laws by name; the summary has its own entry.
fn judged(to: &str, args: &[&str]) -> (Run, Value) {
    let run = storm(to, &[args, &["--json"]].concat());
    let mut laws = json!({});
    for line in run.stdout.lines() {
        let line: Value = serde_json::from_str(line).unwrap_or_else(|_| panic!("{run:?}"));
        let name = line["law"].as_str().unwrap_or("summary").to_owned();
        laws[name] = line;
    }
    (run, laws)
}

/// Runs a storm at an endpoint with this flaw: exactly these laws must be broken.
#[track_caller]
fn check(flaw: Flaw, args: &[&str], broken: &[&str]) -> (Endpoint, Value) {
    let endpoint = Endpoint::new(flaw, SECRET);
    let effects = endpoint.effects_url();
    let storm = ["--events", "12", "--copies", "4", "--settle", "2s", "--effects-url", &effects];
    let (run, laws) = judged(&endpoint.url(), &[&storm, args].concat());
    let found: Vec<&str> = laws
        .as_object()
        .unwrap()
        .iter()
        .filter(|(_, law)| law["verdict"] == "broken")
        .map(|(name, _)| name.as_str())
        .collect();
    assert_eq!(found, broken, "{flaw:?}: {run:?}");
    assert_eq!(run.code, i32::from(!broken.is_empty()), "{flaw:?}: {run:?}");
    let summary = if broken.is_empty() { "held" } else { "broken" };
    assert_eq!(laws["summary"]["summary"], summary, "{run:?}");
    (endpoint, laws)
}

/// The event ids among the examples of a law.
fn named(law: &Value) -> BTreeSet<String> {
    let examples = law["examples"].as_array().unwrap();
    examples.iter().map(|example| example["event_id"].as_str().unwrap().to_owned()).collect()
}

const HOSTILE: [&str; 2] = ["--stale", "--forged"];

#[test]
fn an_endpoint_that_is_right_passes_in_any_order() {
    // If this failed, a breach found below might be caused by the storm.
    for args in [&["--stale", "--forged"][..], &["--stale", "--forged", "--shuffle"]] {
        let (endpoint, laws) = check(Flaw::None, args, &[]);
        assert_eq!(laws["stale_refused"]["verdict"], "held");
        assert_eq!(laws["forged_refused"]["verdict"], "held");
        let summary = &laws["summary"];
        // 12 events are sent 4 times, 12 late, 12 forged in each of three ways, and 10 once more
        // and once late.
        assert_eq!(summary["answers"], json!({ "200": 58, "401": 58 }));
        assert_eq!(summary["effects"], json!({ "before": 0, "after": 12 }));
        assert!(summary["ack_ms"]["p99"].as_f64() >= summary["ack_ms"]["p50"].as_f64());
        assert_eq!(endpoint.came().len(), 116);
    }
}

#[test]
fn a_handler_that_checks_and_then_acts_is_caught_with_the_events_it_doubled() {
    // This is the bug that Hapax prevents; the endpoint answers 200 to everything.
    let (endpoint, laws) = check(Flaw::ChecksThenActs, &[], &["one_effect"]);
    let law = &laws["one_effect"];
    assert_eq!(law["breaches"], 12);
    let effects = endpoint.effects();
    assert!(effects.len() >= 24, "{effects:?}");
    let named = named(law);
    assert_eq!(named.len(), 5);
    assert!(named.iter().all(|id| effects.iter().filter(|effect| *effect == id).count() > 1));
    assert_eq!(law["examples"][0]["expected"], "1 effect");
    assert_eq!(laws["answered"]["verdict"], "held");
}

#[test]
fn lost_events_are_missed_by_name() {
    // Events are acked and dropped: only the effects show it.
    let (endpoint, laws) = check(Flaw::Loses, &["--seed", "5"], &["one_effect"]);
    let (effects, named) = (endpoint.effects(), named(&laws["one_effect"]));
    assert!(!named.is_empty() && named.iter().all(|id| !effects.contains(id)), "{laws}");
    assert_eq!(laws["one_effect"]["breaches"], 12 - effects.len());
}

#[test]
fn an_endpoint_that_accepts_forged_events_is_caught_by_each_kind() {
    let (_, laws) =
        check(Flaw::TakesForged, &HOSTILE, &["forged_refused", "one_effect", "stale_refused"]);
    assert_eq!(laws["forged_refused"]["breaches"], 36);
    // Late events and three kinds of forged events had effects: the changed byte is not in the id.
    assert_eq!(laws["one_effect"]["breaches"], 48);
}

#[test]
fn an_endpoint_that_accepts_stale_events_is_caught() {
    let (_, laws) = check(Flaw::TakesStale, &HOSTILE, &["one_effect", "stale_refused"]);
    assert_eq!(laws["stale_refused"]["breaches"], 12);
    let text = laws["one_effect"]["examples"][0]["expected"].as_str().unwrap();
    assert!(text.contains("signed outside the window"), "{laws}");
    // An endpoint that remembers only as long as the window acts on a late copy of a finished
    // event.
    let broken = ["one_effect", "replay", "stale_refused"];
    let (_, laws) = check(Flaw::ForgetsWithTheWindow, &HOSTILE, &broken);
    assert_eq!(laws["replay"]["breaches"], 10);
    // Unless requested, nothing hostile is sent, and the same endpoint passes.
    check(Flaw::TakesStale, &[], &[]);
}

#[test]
fn an_endpoint_that_breaks_down_at_times_has_not_answered() {
    let (_, laws) = check(Flaw::Breaks, &["--concurrency", "1"], &["answered", "replay"]);
    assert_eq!(laws["answered"]["examples"][0]["seen"], "500");
    assert_eq!(laws["answered"]["breaches"], 6);
}

#[test]
fn a_503_with_retry_after_is_retried() {
    let (_, laws) = check(Flaw::IsBusyAtFirst, &HOSTILE, &[]);
    assert_eq!(laws["summary"]["retries"], 12);
    assert_eq!(laws["summary"]["answers"]["503"], 12);
}

#[test]
fn a_copy_that_is_signed_afresh_is_still_a_copy() {
    // Concurrent copies share one signature, so only the replay shows it.
    let (_, laws) = check(Flaw::KnowsSignaturesOnly, &[], &["replay"]);
    assert_eq!(laws["replay"]["breaches"], 10);
}

#[test]
fn an_effect_that_comes_twice_after_all_was_answered_is_seen() {
    let (endpoint, laws) = check(Flaw::ActsAgainLater, &[], &["one_effect"]);
    assert_eq!(laws["one_effect"]["breaches"], 1);
    assert_eq!(named(&laws["one_effect"]), BTreeSet::from([endpoint.effects()[0].clone()]));
}

#[test]
fn copies_with_different_answers_are_caught() {
    let (_, laws) = check(Flaw::SaysAnotherId, &[], &["one_outcome"]);
    assert_eq!(laws["one_outcome"]["breaches"], 12);
    let (_, laws) = check(Flaw::ForgetsWhatItKnows, &[], &["answered", "replay"]);
    assert_eq!(laws["answered"]["breaches"], 36);
    assert_eq!(laws["one_outcome"]["verdict"], "not_judged");
}

#[test]
fn a_count_of_effects_is_enough_and_a_command_can_return_it() {
    // The ledger is an app's own file that the storms share: effects from before the storm do not
    // count.
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("ledger");
    std::fs::write(&file, "old 1\nold 2\n").unwrap();
    let list = format!("cat '{}'", file.display());
    let count = format!("wc -l < '{}'", file.display());
    let written = Mutex::new(std::fs::File::options().append(true).open(&file).unwrap());
    let app = App::new(move |call| {
        let body: Value = serde_json::from_str(&call.body).unwrap();
        writeln!(written.lock().unwrap(), "{} 50", body["id"].as_str().unwrap()).unwrap();
        200
    });
    let house = House::new(&format!(
        "[sources.stripe]\nprovider = \"stripe\"\nsecrets = [\"{SECRET}\"]\n\
         [sources.stripe.handlers.fee]\nhttp = \"{}\"\n",
        app.url()
    ));
    let server = house.start();
    let to = format!("http://{}/webhooks/stripe", server.ingress);
    for probe in [&list, &count] {
        let (run, laws) = judged(&to, &["--events", "5", "--effects-cmd", probe]);
        assert_eq!((run.code, &laws["one_effect"]["verdict"]), (0, &json!("held")), "{run:?}");
    }
    // The probe counts too few effects, then too many: 12 lines become 17, then 22.
    let wrong = [(format!("expr $({count}) / 2"), "2"), (format!("expr $({count}) '*' 2"), "10")];
    for (probe, seen) in wrong {
        let args = ["--events", "5", "--settle", "2s", "--effects-cmd", &probe];
        let (run, laws) = judged(&to, &args);
        assert_eq!((run.code, &laws["one_effect"]["verdict"]), (1, &json!("broken")), "{run:?}");
        assert_eq!(laws["one_effect"]["examples"][0]["seen"], seen, "{run:?}");
    }
}

#[test]
fn hapax_holds_every_law_by_every_probe() {
    // The handler writes a ledger without any constraint that would hide a second effect.
    let effect = ledger::effect("fee");
    let house = House::new(&format!(
        "[sources.stripe]\nprovider = \"stripe\"\nsecrets = [\"{SECRET}\"]\n\
         [sources.stripe.handlers.fee]\ntimeout = \"10s\"\nsql = \"\"\"{effect}\"\"\"\n"
    ));
    let ledger = Arc::new(Ledger::create(&house, ledger::SCHEMA));
    let server = house.start();
    let to = format!("http://{}/webhooks/stripe", server.ingress);
    let database = format!("sqlite:{}", house.database().display());
    let rows = ["--effects-sql", "SELECT event_id FROM ledger", "--effects-db", &database];
    let sum = ["--effects-sql", "SELECT balance FROM account", "--effects-db", &database];
    let shared = Arc::clone(&ledger);
    let effects_url = endpoint::serve_json(move || {
        let row = |(event_id, count)| vec![json!({ "event_id": event_id }); count as usize];
        shared.effects().into_iter().flat_map(row).collect()
    });
    let url = ["--effects-url", effects_url.as_str()];
    for (probe, seed) in [(&rows[..], "1"), (&sum, "2"), (&url, "3")] {
        let hostile = ["--stale", "--forged", "--shuffle", "--events", "40", "--seed", seed];
        let (run, laws) = judged(&to, &[&hostile, probe].concat());
        assert_eq!(run.code, 0, "{run:?}");
        for (name, law) in laws.as_object().unwrap().iter().filter(|(name, _)| *name != "summary") {
            assert_eq!(law["verdict"], "held", "{name}: {run:?}");
        }
    }
    ledger.is_once_each(120);
    // The same storm again: every event is known, and a probe that lists effects finds one for
    // each.
    let again = ["--shuffle", "--events", "40", "--seed", "1"];
    let (run, _) = judged(&to, &[&again, &rows[..]].concat());
    assert_eq!(run.code, 0, "{run:?}");
    ledger.is_once_each(120);
}

#[test]
fn an_event_in_review_counts_as_refused() {
    // Every late event is answered 2xx and stored, so only the decision and the ledger show it.
    let effect = ledger::effect("fee");
    let house = House::new(&format!(
        "[sources.stripe]\nprovider = \"stripe\"\nsecrets = [\"{SECRET}\"]\nlate = \"review\"\n\
         [sources.stripe.handlers.fee]\ntimeout = \"10s\"\nsql = \"\"\"{effect}\"\"\"\n"
    ));
    let ledger = Ledger::create(&house, ledger::SCHEMA);
    let server = house.start();
    let to = format!("http://{}/webhooks/stripe", server.ingress);
    let database = format!("sqlite:{}", house.database().display());
    let rows = ["--effects-sql", "SELECT event_id FROM ledger", "--effects-db", &database];
    let (run, laws) = judged(&to, &[&["--stale", "--events", "12"], &rows[..]].concat());
    assert_eq!(run.code, 0, "{run:?}");
    assert_eq!(laws["summary"]["answers"]["202"], 12, "{run:?}");
    assert_eq!(laws["stale_refused"]["verdict"], "held", "{run:?}");
    ledger.is_once_each(12);
}

#[test]
fn effects_in_postgresql_can_be_queried() {
    let database = Database::shared("storm");
    let house = database.house("", nodes::ROW);
    let server = house.start();
    let to = format!("http://{}/webhooks/stripe", server.ingress);
    let run = |sql: &str| {
        hapax(&["storm", "--to", &to, "--provider", "stripe", "--secret", nodes::SECRET])
            .args(&["--events", "20", "--settle", "3s"])
            .args(&["--effects-sql", sql, "--effects-db", &database.url])
            .run()
    };
    for sql in ["SELECT event_id FROM ledger", "SELECT count(*) FROM ledger"] {
        let run = run(sql);
        assert_eq!(run.code, 0, "{run:?}");
    }
    let twice = run("SELECT event_id FROM ledger UNION ALL SELECT event_id FROM ledger");
    assert_eq!(twice.code, 1, "{twice:?}");
    // A probe reads and never writes, and its error is printed.
    let writes = run("DELETE FROM ledger RETURNING event_id");
    assert_eq!(writes.code, 3, "{writes:?}");
    assert!(writes.stderr.contains("read-only"), "{writes:?}");
    assert_eq!(database.number("SELECT count(*) FROM ledger"), 60);
}

#[test]
fn a_storm_that_cannot_be_is_no_verdict() {
    // A port that is never assigned by chance.
    let dir = tempfile::tempdir().unwrap();
    let junit = dir.path().join("junit.xml").display().to_string();
    let run = storm("http://127.0.0.1:1/hooks", &["--junit", &junit]);
    assert_eq!((run.code, run.stdout.as_str()), (3, ""), "{run:?}");
    assert!(run.stderr.contains("cannot connect"), "{run:?}");
    let xml = std::fs::read_to_string(&junit).unwrap();
    assert_eq!(elements(&xml)["error"], 1, "{xml}");
    let endpoint = Endpoint::new(Flaw::None, SECRET);
    let dead = "http://127.0.0.1:1/effects";
    let no_file = format!("sqlite:{}/none.db", dir.path().display());
    for probe in [
        &["--effects-cmd", "echo 1; exit 4"][..],
        &["--effects-url", dead],
        &["--effects-sql", "SELECT 1", "--effects-db", &no_file],
    ] {
        let run = storm(&endpoint.url(), probe);
        assert_eq!(run.code, 3, "{run:?}");
        assert!(run.stderr.contains("cannot read effects"), "{run:?}");
    }
    assert!(endpoint.came().is_empty(), "without a probe that works nothing is sent");
    // The probe dies during the storm.
    let once = format!("mkdir '{}/once' && echo 0", dir.path().display());
    let run = storm(&endpoint.url(), &["--events", "2", "--effects-cmd", &once]);
    assert_eq!(run.code, 3, "{run:?}");
    assert!(run.stdout.contains("not judged"), "{run:?}");
}

#[test]
fn contradictory_arguments_are_refused_before_anything_is_sent() {
    let endpoint = Endpoint::new(Flaw::None, SECRET);
    let check = |provider: &str, args: &[&str], error: &str| {
        let run = hapax(&["storm", "--to", &endpoint.url(), "--provider", provider])
            .args(&["--secret", SECRET])
            .args(args)
            .run();
        assert_eq!(run.code, 2, "{run:?}");
        assert!(run.stderr.contains(error) && !run.stderr.contains(SECRET), "{run:?}");
    };
    check("paypal", &[], "cannot sign events of PayPal");
    check("strype", &[], "did you mean \"stripe\"");
    check("stripe", &["--settle", "soon"], "not a duration");
    check("stripe", &["--effects-sql", "SELECT 1"], "--effects-db");
    check(
        "stripe",
        &["--effects-cmd", "true", "--effects-url", "http://x/"],
        "cannot be used with",
    );
    check("stripe", &["--effects-sql", "SELECT 1", "--effects-db", "mysql://x/y"], "--effects-db");
    check("stripe", &["--events", "0"], "--events");
    check("stripe", &["--events", "100000", "--copies", "10000"], "requests");
    assert!(endpoint.came().is_empty());
}

#[test]
fn a_lack_of_local_descriptors_is_not_blamed_on_the_endpoint() {
    // With fewer descriptors than connections the storm would fail locally and blame the endpoint.
    let endpoint = Endpoint::new(Flaw::None, SECRET);
    let binary = env!("CARGO_BIN_EXE_hapax");
    let script = format!(
        "ulimit -n 64; exec '{binary}' storm --to '{}' --provider stripe --secret {SECRET} \
         --concurrency 100",
        endpoint.url()
    );
    let run = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
    let stderr = String::from_utf8_lossy(&run.stderr).into_owned();
    assert_eq!(run.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("this process may open 64 files"), "{stderr}");
    assert!(endpoint.came().is_empty());
}

#[test]
fn the_same_seed_sends_the_same_events_in_the_same_order() {
    let came = |args: &[&str]| {
        let endpoint = Endpoint::new(Flaw::None, SECRET);
        let fixed = ["--events", "9", "--copies", "3", "--concurrency", "1", "--stale", "--forged"];
        let run = storm(&endpoint.url(), &[&fixed, args].concat());
        assert_eq!(run.code, 0, "{run:?}");
        endpoint.came()
    };
    let first = came(&["--seed", "42", "--shuffle"]);
    assert_eq!(first, came(&["--seed", "42", "--shuffle"]));
    assert_ne!(first, came(&["--seed", "43", "--shuffle"]));
    let in_order = came(&["--seed", "42"]);
    assert_ne!(first, in_order);
    let groups = in_order[..27].chunks(3);
    assert!(groups.clone().all(|copies| copies.iter().all(|id| *id == copies[0])), "{in_order:?}");
    assert_eq!(groups.map(|copies| &copies[0]).collect::<BTreeSet<_>>().len(), 9);
}

#[test]
fn the_result_is_a_table_and_a_junit_file() {
    let dir = tempfile::tempdir().unwrap();
    let junit = dir.path().join("junit.xml").display().to_string();
    let endpoint = Endpoint::new(Flaw::TakesForged, SECRET);
    let args = ["--events", "8", "--forged", "--seed", "11", "--junit", &junit];
    let run = storm(&endpoint.url(), &args);
    assert_eq!(run.code, 1, "{run:?}");
    assert!(run.stderr.starts_with("seed 11: repeat the command with --seed 11"), "{run:?}");
    for part in [
        "every genuine copy is answered 2xx               held\n",
        "forged events are rejected                       broken ×24\n    evt_storm",
        "expected 4xx (signed with a wrong secret), seen 200\n",
        "effects were not judged",
        "8 events, 112 requests, 0 retries",
        "seed 11\n",
        "answers: 112 × 200\n",
    ] {
        assert!(run.stdout.contains(part), "no {part:?} in {}", run.stdout);
    }
    assert!(!run.stdout.contains('\u{1b}') && !run.stderr.contains('\u{1b}'), "{run:?}");
    let xml = std::fs::read_to_string(&junit).unwrap();
    assert!(!xml.contains(SECRET));
    let elements = elements(&xml);
    assert_eq!(
        (elements["testcase"], elements["failure"], elements["skipped"]),
        (5, 1, 2),
        "{xml}"
    );
    assert!(xml.contains("tests=\"5\" failures=\"1\" errors=\"0\" skipped=\"2\""), "{xml}");
}

#[test]
fn every_sender_that_can_be_signed_for_can_be_stormed() {
    // Late and forged requests differ from scheme to scheme; the endpoint is Hapax's own `verify`.
    let hex = "5a".repeat(32);
    let (mut stormed, mut late, mut forged) = (0, 0, 0);
    for preset in presets::all().iter().filter(|preset| preset.can_sign()) {
        let secret = preset.secret_from(&[0x5a; 32]).expect("one that can be signed with");
        let mut spec =
            SourceSpec::new("test", preset.name, vec![ActiveSecret::forever(secret.clone())]);
        let mut args =
            vec!["--events".to_owned(), "3".to_owned(), "--copies".to_owned(), "2".into()];
        for param in preset.params().iter().filter(|param| param.required) {
            spec.params.insert(param.name.to_owned(), hex.clone());
            args.extend(["--param".to_owned(), format!("{}={hex}", param.name)]);
        }
        let endpoint = Endpoint::of(Flaw::None, spec);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let run = hapax(&["storm", "--to", &endpoint.url(), "--provider", preset.name])
            .args(&["--stale", "--forged", "--json"])
            .args(&args)
            .env("HAPAX_SECRET", secret.expose())
            .run();
        assert_eq!(run.code, 0, "{}: {run:?}", preset.name);
        assert_eq!(endpoint.effects().len(), 3, "{}: {run:?}", preset.name);
        let held = |law: &str| {
            let law = format!("\"law\":\"{law}\"");
            let mut lines = run.stdout.lines().filter(|line| line.contains(&law));
            lines.any(|line| line.contains("\"verdict\":\"held\""))
        };
        stormed += 1;
        late += usize::from(held("stale_refused"));
        forged += usize::from(held("forged_refused"));
    }
    // All senders can be forged; only those that sign a time can be late.
    assert!(stormed > 40 && forged == stormed, "{forged} of {stormed}");
    assert!(late > 15 && late < stormed, "{late} of {stormed}");
}

/// The number of occurrences of each element; fails if they do not nest or an attribute is not
/// quoted.
fn elements(xml: &str) -> std::collections::BTreeMap<String, usize> {
    let mut counts = std::collections::BTreeMap::new();
    let mut open = Vec::new();
    let body = xml.strip_prefix("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n").expect("a prolog");
    for piece in body.split('<').skip(1) {
        let (tag, text) = piece.split_once('>').expect("a tag ends");
        assert!(!text.contains('>') && !text.contains("& "), "{text}");
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(name), "{xml}");
            continue;
        }
        let name = tag.split([' ', '/']).next().unwrap().to_owned();
        assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
        *counts.entry(name.clone()).or_insert(0) += 1;
        if !tag.ends_with('/') {
            open.push(name);
        }
    }
    assert!(open.is_empty(), "{open:?}");
    counts
}
