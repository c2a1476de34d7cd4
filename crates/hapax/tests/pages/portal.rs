//! A receiving party's way through the portal in chromium: from the link through endpoints, deliveries and a
//! replay to a new endpoint with its secret. Parts of the way use no script, a narrow screen or dark colours.

use serde_json::json;

use super::browser::Browser;
use crate::portal_visits::{PORTAL, link, portal};
use crate::support::nodes::Database;
use crate::support::sink::Sink;
use crate::support::{House, Server, until};

const HOSTILE: &str = "<script>window.hit = 1</script>\u{202e}";

/// The config of a server whose endpoints may be on this machine.
fn config() -> String {
    format!(
        "[vault]\nkey = \"MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=\"\n\
         [outbound]\nallow = [\"127.0.0.0/8\"]\n{PORTAL}"
    )
}

/// Adds an endpoint of the tenant acme that refuses one of two messages, and one of another tenant.
fn send(server: &Server, sink: &Sink) {
    for tenant in ["acme", "shop"] {
        let endpoint = json!({
            "url": sink.url(), "tenant": tenant, "retry": ["0s"], "description": HOSTILE,
            "headers": { "x-api-key": "value-of-the-header" },
        });
        assert_eq!(server.admin_post("/api/v1/endpoints", &endpoint).status, 201);
        for kind in ["invoice.paid", "invoice.refused"] {
            let data = json!({ "text": HOSTILE, "of": tenant });
            let message = json!({ "type": kind, "data": data, "tenant": tenant });
            assert_eq!(server.admin_post("/api/v1/messages", &message).status, 202);
        }
    }
    until("every delivery has ended", || {
        let ended = |status: &str| {
            let list = format!("/api/v1/deliveries?status={status}");
            server.admin_get(&list).json()["items"].as_array().unwrap().len()
        };
        (ended("delivered") == 2 && ended("dead") == 2).then_some(())
    });
}

#[test]
fn the_portal_in_a_browser_on_sqlite() {
    walk("the_portal_in_a_browser_on_sqlite", House::new(&config()).start());
}

#[test]
fn the_portal_in_a_browser_on_postgres() {
    let database = Database::empty("portal_pages");
    let house = House::new(&format!("database_url = \"{}\"\n{}", database.url, config()));
    walk("the_portal_in_a_browser_on_postgres", house.start());
}

/// Goes through everything that a receiving party does in the portal.
fn walk(test: &str, server: Server) {
    let sink = Sink::new(|got, before| match got.text().contains("refused") && before < 4 {
        true => "500 Down".to_owned(),
        false => "200 OK".to_owned(),
    });
    send(&server, &sink);
    let base = format!("http://{}", portal(&server));
    let Some(browser) = Browser::start(test, &base) else { return };

    browser.looks(360, "dark");
    browser.open(&link(&server, "acme", &["read", "replay", "endpoints"]));
    browser.shows(&["Webhooks of acme", "The link works once"]);
    browser.is_sound();
    browser.follow("Enter");
    let pages = browser.path().trim_end_matches('/').to_owned();
    assert!(pages.starts_with("/p/"), "{pages}");
    assert_eq!(browser.script("return document.cookie"), "", "a script can read the session");
    browser.shows(&["Endpoints", &sink.url(), "<script>window.hit = 1</script>\\u{202e}"]);
    browser.is_sound();

    // One endpoint, its deliveries, one of them with its attempt and its bytes.
    browser.follow(&sink.url());
    browser.shows(&["1 of 2 that have ended were delivered", "x-api-key", "active"]);
    browser.hides(&["value-of-the-header"]);
    browser.is_sound();
    browser.follow("Deliveries");
    browser.fill("main [name=status]", "dead");
    browser.follow("Filter");
    browser.shows(&["invoice.refused"]);
    browser.hides(&["invoice.paid"]);
    browser.is_sound();
    let dead = browser.script("return document.querySelector('tbody a').getAttribute('href')");
    let dead = dead.as_str().unwrap().to_owned();
    browser.open(&dead);
    browser.shows(&["Attempt 1: HTTP 500", "dead"]);
    browser.script("for (const e of document.querySelectorAll('details')) e.open = true");
    browser.shows(&["\"of\":\"acme\""]);
    browser.hides(&["127.0.0.1:0"]);
    browser.is_sound();
    browser.is_quiet();

    // The delivery is sent again without script, and the page shows the outcome.
    browser.allow_scripts(false);
    browser.open(&dead);
    browser.follow("Send again…");
    browser.shows(&["Send this delivery again?"]);
    browser.follow("Send again");
    browser.shows(&["The delivery is due now."]);
    browser.allow_scripts(true);
    browser.open(&dead);
    browser.comes_to_show("Attempt 2: HTTP 200");
    browser.looks(1200, "light");
    browser.is_sound();

    // A new endpoint, with its secret once; a rotation, a ping of an address that does not answer.
    browser.open(&format!("{pages}/"));
    browser.follow("Add an endpoint…");
    browser.is_sound();
    browser.fill("[name=url]", "http://127.0.0.1/in");
    browser.expect("400");
    browser.follow("Add");
    browser.shows(&["endpoints cannot be at this address"]);
    browser.open(&format!("{pages}/endpoints/new"));
    browser.fill("[name=url]", "https://receiver.invalid/in");
    browser.fill("[name=types]", "invoice.*");
    browser.fill("[name=headers]", "X-Token: value-of-another-header");
    browser.follow("Add");
    browser.shows(&["New secret", "whsec_"]);
    browser.is_sound();
    browser.follow("Back to the endpoint");
    browser.hides(&["whsec_", "value-of-another-header"]);
    browser.shows(&["https://receiver.invalid/in", "invoice.*", "x-token"]);
    browser.follow("Ping…");
    browser.follow("Ping");
    browser.shows(&["The ping failed: no answer"]);
    browser.follow("Rotate the secret…");
    browser.follow("Rotate");
    browser.shows(&["New secret", "whsec_"]);
    browser.follow("Back to the endpoint");
    browser.follow("Disable…");
    browser.follow("Disable");
    browser.shows(&["The endpoint is disabled.", "disabled since"]);
    browser.follow("Remove…");
    browser.follow("Remove");
    browser.shows(&["The endpoint is removed."]);
    browser.hides(&["receiver.invalid"]);
    browser.follow("How to verify");
    for (width, scheme) in [(360, "light"), (1200, "dark")] {
        browser.looks(width, scheme);
        browser.is_sound();
        browser.shows(&["webhook-signature", "Python", "Go", "Node.js", "PHP"]);
    }
    if std::env::var_os("HAPAX_TEST_SCREENSHOTS").is_some() {
        for page in ["/", "/deliveries", "/verify"] {
            browser.open(&format!("{pages}{page}"));
            browser.screenshot(&format!("portal-{}", page.len()));
        }
    }
    browser.is_quiet();

    // The pages show nothing of another tenant, and nothing at all after leaving.
    let all = server.admin_get("/api/v1/deliveries?tenant=shop").json();
    let foreign = all["items"][0]["id"].as_str().unwrap().to_owned();
    browser.expect("404");
    browser.open(&format!("{pages}/deliveries/{foreign}"));
    browser.shows(&["no delivery has that id"]);
    browser.follow("Back to the endpoints");
    browser.follow("Log out");
    browser.shows(&["You have left"]);
    browser.expect("401");
    browser.open(&format!("{pages}/"));
    browser.shows(&["ask for a new link"]);
    browser.hides(&[&sink.url()]);
    assert_eq!(browser.script("return window.hit === undefined"), true);
    browser.is_quiet();
}

#[test]
fn the_portal_in_a_browser_over_tls() {
    // HTTP/2 has no Host header, and the cookie is only for TLS.
    let data = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/tls-for-tests");
    let tls = format!("tls = {{ cert = \"{data}.pem\", key = \"{data}.key\" }}\n");
    let server = House::new(&format!("{PORTAL}{tls}")).start();
    let line = server.stdout.wait_for("hapax portal https://");
    let base = line.trim().strip_prefix("hapax portal ").unwrap().to_owned();
    let Some(browser) = Browser::start("the_portal_in_a_browser_over_tls", &base) else { return };
    browser.open(&link(&server, "acme", &["read"]));
    browser.follow("Enter");
    browser.shows(&["There is no endpoint yet."]);
    browser.hides(&["Add an endpoint"]);
    browser.follow("Log out");
    browser.shows(&["You have left"]);
    browser.is_quiet();
}
