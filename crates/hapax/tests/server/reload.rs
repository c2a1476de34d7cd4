//! Secrets that change while the server runs, and configs that must be refused at the start or at a
//! reload.

use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::support::sender::now_exact;
use crate::support::{House, Sender, Server, skip, until};
use hapax_core::Timestamp;

const OLD: &str = "whsec_the_old_one";
const NEW: &str = "whsec_the_new_one";

fn stripe(secrets: &str) -> String {
    format!(
        "[sources.stripe]\nprovider = \"stripe\"\nunverified_limit = \"off\"\nsecrets = [{secrets}]\n"
    )
}

/// Requests a reload and waits until the server logs the result.
fn reload(server: &Server, expected: &str) {
    let before = server.stderr.text().matches(expected).count();
    server.signal("HUP");
    until(expected, || (server.stderr.text().matches(expected).count() > before).then_some(()));
}

const TAKEN: &str = "reloaded configuration and secrets";
const KEPT: &str = "the new configuration is invalid, the server keeps the old one";

#[test]
fn a_secret_is_rotated_without_a_gap() {
    let house = House::new(&stripe(&format!("\"{OLD}\"")));
    let server = house.start();
    let (old, new) = (Sender::stripe(OLD), Sender::stripe(NEW));
    assert_eq!(server.ask(new.event("evt_too_early")).status, 401);

    // Requests signed with the old secret must be accepted without a gap while it is valid.
    let done = AtomicBool::new(false);
    let sent = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let traffic = scope.spawn(|| {
            let mut wire = server.wire();
            while !done.load(Ordering::Relaxed) {
                let n = sent.load(Ordering::Relaxed);
                let answer = wire.try_ask(&old.event(&format!("evt_old_{n}"))).unwrap();
                assert_eq!(answer.status, 200, "{answer:?}");
                sent.store(n + 1, Ordering::Relaxed);
            }
        });
        for turn in 0..5 {
            // The list changes repeatedly, with the old secret last and first.
            let both = [format!("\"{OLD}\", \"{NEW}\""), format!("\"{NEW}\", \"{OLD}\"")];
            house.configure(&stripe(&both[turn % 2]));
            let before = sent.load(Ordering::Relaxed);
            until("traffic flows", || (sent.load(Ordering::Relaxed) > before).then_some(()));
            reload(&server, TAKEN);
            server.ask(new.event(&format!("evt_new_{turn}"))).is("accepted");
        }
        done.store(true, Ordering::Relaxed);
        traffic.join().unwrap();
    });

    let mut n = 0;
    let mut seen = 0;
    // If the machine is busy for the whole overlap, the test repeats with a longer one.
    for overlap_seconds in [3, 10, 30] {
        let until_second = Timestamp::now().as_second() + overlap_seconds;
        let ends = Timestamp::from_second(until_second).unwrap();
        let ending = format!("{{ value = \"{OLD}\", until = \"{ends}\" }}, \"{NEW}\"");
        house.configure(&stripe(&ending));
        reload(&server, TAKEN);
        let until_second = until_second as f64;
        until("the old secret ends", || {
            let before = now_exact();
            let answer = server.ask(old.event(&format!("evt_overlap_{n}")));
            let after = now_exact();
            n += 1;
            match answer.status {
                200 => assert!(before < until_second, "accepted after its end: {answer:?}"),
                401 => assert!(after >= until_second, "refused before its end: {answer:?}"),
                _other => panic!("{answer:?}"),
            }
            seen += usize::from(answer.status == 200);
            server.ask(new.event(&format!("evt_overlap_new_{n}"))).is("accepted");
            (answer.status == 401).then_some(())
        });
        if seen > 0 {
            break;
        }
    }
    assert!(seen > 0, "the overlap was never seen");
    // An event that arrived under the old secret is still known under the new one.
    server.ask(new.event("evt_old_0")).is("duplicate");
}

#[test]
fn a_bad_config_is_refused_and_the_log_line_contains_no_secret() {
    let house = House::new(&stripe(&format!("\"{OLD}\"")));
    let server = house.start();
    let old = Sender::stripe(OLD);
    let bad = [
        "this is not toml = = =".to_owned(),
        format!("{}colour = 1\n", stripe(&format!("\"{NEW}\""))),
        stripe("\"env:NOT_SET_ANYWHERE\""),
        stripe("\"\""),
        stripe(&format!("\"{NEW}\", \"{NEW}\"")),
        stripe(&format!("\"{NEW}\"")).replace("\"stripe\"", "\"strip\""),
        format!(
            "{}[sources.stripe.tenants.acme]\nsecrets = [\"{NEW}\"]\n",
            stripe(&format!("\"{NEW}\""))
        ),
    ];
    for (n, bad) in bad.iter().enumerate() {
        house.configure(bad);
        reload(&server, KEPT);
        let answer = server.ask(old.event(&format!("evt_{n}")));
        assert_eq!(answer.status, 200, "{bad}: {answer:?}");
        assert_eq!(server.ask(Sender::stripe(NEW).event("evt_new")).status, 401, "{bad}");
    }
    std::fs::remove_file(house.config_file()).unwrap();
    reload(&server, KEPT);
    server.ask(old.event("evt_without_a_file")).is("accepted");

    house.configure(&stripe(&format!("\"{NEW}\"")));
    reload(&server, TAKEN);
    server.ask(Sender::stripe(NEW).event("evt_new")).is("accepted");
    assert_eq!(server.ask(old.event("evt_old")).status, 401);
    let said = server.stop();
    assert!(said.contains("hapax.toml:"), "{said}");
    assert!(!said.contains(OLD) && !said.contains(NEW), "{said}");
}

#[test]
fn a_reload_adds_and_removes_sources_under_open_connections() {
    let house = House::new(&stripe(&format!("\"{OLD}\"")));
    let server = house.start();
    let mut wire = server.wire();
    wire.try_ask(&Sender::stripe(OLD).event("evt_1")).unwrap().is("accepted");
    house.configure(
        "[sources.github]\nprovider = \"github\"\nsecrets = [\"another secret altogether\"]\n",
    );
    reload(&server, TAKEN);
    assert_eq!(wire.try_ask(&Sender::stripe(OLD).event("evt_2")).unwrap().status, 404);
    let github = Sender::new("github", "another secret altogether", "/webhooks/github");
    server.ask(github.request("{}").bytes()).is("accepted");
}

#[test]
fn what_a_removed_source_did_until_its_removal_is_counted() {
    // Counts are recorded every ten seconds: the source is removed right after its events, before they are.
    let house = House::new(&format!(
        "{}[sources.stripe.handlers.fee]\nsql = \"SELECT 1\"\n",
        stripe(&format!("\"{OLD}\""))
    ));
    let server = house.start();
    for n in 0..3 {
        server.ask(Sender::stripe(OLD).event(&format!("evt_{n}"))).is("accepted");
    }
    until("the events are processed", || {
        let events = server.admin_get("/api/v1/events?status=processed").json();
        (events["items"].as_array()?.len() == 3).then_some(())
    });
    house.configure("");
    reload(&server, TAKEN);
    let history = server.admin_get("/api/v1/history?source=stripe&step=1h").json();
    let sum = |figure: &str| -> u64 {
        let items = history["items"].as_array().expect("a list");
        items.iter().filter_map(|item| item[figure].as_u64()).sum()
    };
    assert_eq!((sum("new"), sum("succeeded")), (3, 3), "{history}");
    let stats = server.admin_get("/api/v1/stats").json();
    assert_eq!(stats["received"], 3, "{stats}");
}

#[test]
fn a_pending_restart_is_reported_at_each_reload_until_nothing_is_pending() {
    let plain = stripe(&format!("\"{OLD}\""));
    let house = House::new(&plain);
    let server = house.start();
    let data = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/tls-for-tests");
    house.configure(&format!(
        "header_timeout = \"3s\"\ndrain = \"7s\"\n{plain}\
         [tls]\ncert = \"{data}.pem\"\nkey = \"{data}.key\"\n"
    ));
    let warned = |key: &str| {
        let line = format!("{key} changed; restart the server to apply it");
        server.stderr.text().matches(&line).count()
    };
    for reloads in 1..=2 {
        reload(&server, TAKEN);
        let counts = ["header_timeout", "drain", ": tls"].map(warned);
        assert_eq!(counts, [reloads; 3], "{}", server.stderr.text());
    }
    // The running server still has the first configuration: going back to it changes nothing.
    house.configure(&plain);
    reload(&server, TAKEN);
    assert_eq!(["header_timeout", "drain", ": tls"].map(warned), [2; 3]);
}

#[test]
fn a_reload_logs_the_warnings_of_the_new_configuration() {
    let plain = stripe(&format!("\"{OLD}\""));
    let house = House::new(&plain);
    let server = house.start();
    let warned = || server.stderr.text().matches("every address").count();
    assert_eq!(warned(), 0);
    house.configure(&format!("{plain}[outbound]\nallow = [\"0.0.0.0/0\", \"::/0\"]\n"));
    for reloads in 1..=2 {
        reload(&server, TAKEN);
        assert_eq!(warned(), reloads, "{}", server.stderr.text());
    }
}

#[test]
fn the_commands_of_the_dashboard_name_the_public_url_of_the_reloaded_configuration() {
    let plain = stripe(&format!("\"{OLD}\""));
    let house = House::new(&format!("public_url = \"https://old.example.com\"\n{plain}"));
    let server = house.start();
    server.ask(Sender::stripe(OLD).event("evt_1")).is("accepted");
    let shown = |host: &str| {
        server.admin_get("/events/evt_1?tab=curl").text().contains(&format!("https://{host}/"))
    };
    assert!(shown("old.example.com"));
    house.configure(&format!("public_url = \"https://new.example.com\"\n{plain}"));
    reload(&server, TAKEN);
    // A page that was rendered within the last second is shown again.
    until("the page is rendered again", || shown("new.example.com").then_some(()));
}

#[test]
fn a_certificate_at_another_path_is_served_after_a_reload() {
    let house = House::new("");
    for name in ["old", "new"] {
        let at = |end: &str| house.path().join(format!("{name}.{end}")).display().to_string();
        let made = Command::new("openssl")
            .args([
                "req",
                "-x509",
                "-nodes",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:P-256",
            ])
            .args([
                "-days",
                "2",
                "-subj",
                "/CN=localhost",
                "-addext",
                "subjectAltName=DNS:localhost",
            ])
            .args(["-keyout", &at("key"), "-out", &at("pem")])
            .output();
        match made {
            Ok(made) if made.status.success() => {}
            Ok(made) => panic!("{}", String::from_utf8_lossy(&made.stderr)),
            Err(error) => {
                let test = "a_certificate_at_another_path_is_served_after_a_reload";
                return skip(test, &format!("openssl cannot be run: {error}"));
            }
        }
    }
    let tls = |name: &str| format!("{{ cert = \"DIR/{name}.pem\", key = \"DIR/{name}.key\" }}");
    let config = |name: &str| format!("admin_tls = {0}\ntls = {0}\n", tls(name));
    house.configure(&config("old"));
    let server = house.start();
    let is_served = |name: &str, at: SocketAddr| {
        let file = house.path().join(format!("{name}.pem"));
        let ran = Command::new("openssl")
            .args(["s_client", "-verify_return_error", "-verify_hostname", "localhost"])
            .args(["-connect", &at.to_string(), "-CAfile", &file.display().to_string()])
            .stdin(Stdio::null())
            .output();
        ran.expect("openssl").status.success()
    };
    for at in [server.ingress, server.admin] {
        assert!(is_served("old", at) && !is_served("new", at));
    }
    house.configure(&config("new"));
    reload(&server, TAKEN);
    for at in [server.ingress, server.admin] {
        assert!(is_served("new", at) && !is_served("old", at));
    }
    assert!(!server.stderr.text().contains("restart the server"), "{}", server.stderr.text());
}

#[test]
fn a_changed_secret_file_is_read_without_a_signal() {
    let house = House::new(&stripe("\"file:DIR/secret\""));
    let file = house.path().join("secret");
    std::fs::write(&file, format!("{OLD}\n")).unwrap();
    let server = house.start();
    server.ask(Sender::stripe(OLD).event("evt_1")).is("accepted");
    // An orchestrator replaces a file in this way: a new file is renamed over the old one.
    let next = house.path().join("secret.next");
    std::fs::write(&next, NEW).unwrap();
    std::fs::rename(&next, &file).unwrap();
    until("the new secret verifies", || {
        (server.ask(Sender::stripe(NEW).event("evt_2")).status == 200).then_some(())
    });
    assert_eq!(server.ask(Sender::stripe(OLD).event("evt_3")).status, 401);

    // An empty or missing file must not remove a secret that was valid until now.
    std::fs::write(&file, "").unwrap();
    server.stderr.wait_for(KEPT);
    server.ask(Sender::stripe(NEW).event("evt_4")).is("accepted");
    std::fs::remove_file(&file).unwrap();
    server.ask(Sender::stripe(NEW).event("evt_5")).is("accepted");
    std::fs::write(&file, OLD).unwrap();
    until("the file is back", || {
        (server.ask(Sender::stripe(OLD).event("evt_6")).status == 200).then_some(())
    });
}

#[test]
fn a_server_with_a_bad_config_does_not_start() {
    // config_errors.rs has each case of a bad config; this test checks that `serve` refuses them
    // too.
    let secret = "whsec_never_print_me";
    let source = |rest: &str| format!("[sources.a]\nprovider = \"stripe\"\n{rest}\n");
    for (config, line, part) in [
        (source(&format!("secrets = [\"{secret}\"]\nsecret = \"{secret}\"")), 7, "unknown key"),
        (source(&format!("secrets = \"{secret}\"")), 6, "wrong type"),
        (source("secrets = [\"env:NOT_SET_ANYWHERE\"]"), 6, "NOT_SET_ANYWHERE"),
        (source(&format!("secrets = [\"{secret}\", \"{secret}\"]")), 6, "twice"),
        (
            source(&format!(
                "secrets = [\"{secret}\"]\n[sources.a.tenants.b]\nsecrets = [\"{secret}\"]"
            )),
            8,
            "shares a secret",
        ),
    ] {
        let house = House::new(&config);
        let (code, said) = house.fail();
        assert_eq!(code, Some(2), "{config}\n{said}");
        assert!(said.contains(&format!("hapax.toml:{line}:")), "{config}\n{said}");
        assert!(said.contains(part) && said.contains("hint:"), "{config}\n{said}");
        assert!(!said.contains(secret), "{config}\n{said}");
        assert!(!said.contains("hapax ready"), "{said}");
        assert!(!house.database().exists(), "{config}: it touched its data before it was sure");
    }
}
