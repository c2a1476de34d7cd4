//! The first minutes with Hapax: no config at all, what `serve` prints, and `send` against it.

use crate::common::{Run, hapax};
use crate::support::{House, Server};
use hapax_core::presets;

/// Sends to a dev server as its user does: the secret is read from the data directory.
fn send(house: &House, server: &Server, provider: &str, more: &[&str]) -> Run {
    let to = format!("http://{}/webhooks/{provider}", server.ingress);
    let data_dir = house.database().parent().unwrap().display().to_string();
    let run =
        hapax(&["send", provider, "--to", &to]).env("HAPAX_DATA_DIR", &data_dir).args(more).run();
    assert_eq!(run.code, 0, "{provider}: {run:?}");
    run
}

#[test]
fn an_event_is_accepted_then_a_duplicate_and_a_restart_forgets_nothing() {
    let house = House::without_config();
    let server = house.start();
    // The printed command works: it is copied as printed.
    let printed = server.stdout.wait_for("send stripe payout.paid");
    assert!(printed.contains(&server.ingress.to_string()), "{printed}");
    server.stdout.wait_for(&format!("curl http://{}/api/v1/events", server.admin));
    let secret = house.database().with_file_name("dev-secret").display().to_string();
    assert!(printed.contains(&secret), "{printed}");
    let more = ["--id", "evt_1", "--secret-file", &secret];
    assert!(send(&house, &server, "stripe", &more).stdout.contains("accepted"));
    assert!(send(&house, &server, "stripe", &more).stdout.contains("duplicate"));
    assert_eq!(server.events("q=evt_1").len(), 1);
    server.stop();
    let server = house.start();
    assert!(send(&house, &server, "stripe", &more).stdout.contains("duplicate"));
    server.kill();
    let server = house.start();
    assert!(send(&house, &server, "stripe", &more).stdout.contains("duplicate"));
    assert_eq!(server.events("").len(), 1);
}

#[test]
fn every_sender_that_can_be_signed_for_is_accepted_once_and_then_a_duplicate() {
    let house = House::without_config();
    let server = house.start();
    let mut tried = 0;
    for preset in presets::all().iter().filter(|preset| preset.can_sign()) {
        let before = server.metric("hapax_arrivals_total", &["\"accepted\""]);
        let run = send(&house, &server, preset.name, &["--copies", "2", "--concurrency", "1"]);
        let arrivals = |decision: &str| {
            let source = format!("source=\"{}\"", preset.name);
            server.metric("hapax_arrivals_total", &[&source, &format!("\"{decision}\"")])
        };
        let (accepted, duplicate) = (arrivals("accepted"), arrivals("duplicate"));
        assert!(accepted >= 1.0 && duplicate == accepted, "{}: {run:?}", preset.name);
        assert_eq!(arrivals("review") + arrivals("conflict"), 0.0, "{}: {run:?}", preset.name);
        let after = server.metric("hapax_arrivals_total", &["\"accepted\""]);
        assert_eq!(after - before, accepted, "{}", preset.name);
        tried += 1;
    }
    assert!(tried > 40, "only {tried} senders can be signed for");
}

#[test]
fn commands_reach_a_dev_server_also_beside_an_admin_token_of_before() {
    // The data directory was used with a config before, and its token is still there.
    let house = House::without_config();
    let server = house.start();
    let data_dir = house.database().parent().unwrap().to_owned();
    std::fs::write(data_dir.join("admin.token"), "ab".repeat(32)).unwrap();
    let run = hapax(&["events", "list", "--admin", &format!("http://{}", server.admin)])
        .args(&["--data-dir", &data_dir.display().to_string()])
        .run();
    assert_eq!((run.code, run.stderr.as_str()), (0, "no event matches the filter\n"), "{run:?}");
}
