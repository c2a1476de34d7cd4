//! The portal of the real server: links over restarts, what a receiving party may add, how often it may ping, and
//! the code that verifies deliveries.

use std::io::Write as _;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::common::hapax;
use crate::portal_visits::{PORTAL, Visit, ask, link, portal};
use crate::support::sink::{Got, Sink};
use crate::support::{House, Server, skip};

const ALL: [&str; 3] = ["read", "replay", "endpoints"];

/// A server whose operator allows endpoints on loopback.
fn house() -> House {
    House::new(&format!("[outbound]\nallow = [\"127.0.0.0/8\"]\n{PORTAL}"))
}

/// Adds an endpoint as the operator.
fn endpoint(server: &Server, tenant: &str, url: &str) -> Value {
    let made = server.admin_post("/api/v1/endpoints", &json!({ "url": url, "tenant": tenant }));
    assert_eq!(made.status, 201, "{made:?}");
    made.json()
}

#[test]
fn links_and_sessions_survive_a_kill_and_a_used_code_stays_used() {
    let house = house();
    let server = house.start();
    let (used, unused) = (link(&server, "acme", &ALL), link(&server, "acme", &["read"]));
    let visit = Visit::enter(portal(&server), &used);
    assert_eq!(visit.get("/").status, 200);
    server.kill();

    let server = house.start();
    let at = portal(&server);
    let visit = visit.moved(at);
    assert_eq!(visit.get("/").status, 200, "the session is gone");
    assert_eq!(ask(at, "POST", &used, "", "").status, 404, "the code works again");
    let second = Visit::enter(at, &unused);
    assert_eq!(second.get("/deliveries").status, 200);
    assert_eq!(server.admin_request("DELETE", "/api/v1/tenants/acme/portal", None).status, 200);
    for visit in [&visit, &second] {
        assert_eq!(visit.get("/").status, 401, "a revoked link opens pages");
    }
    server.kill();
    let server = house.start();
    assert_eq!(visit.moved(portal(&server)).get("/").status, 401, "the revocation is gone");
}

#[test]
fn the_portal_works_below_a_path_of_a_reverse_proxy() {
    // The proxy may leave the path in the request, or remove it.
    let url = "https://webhooks.example.com/hooks";
    let house = House::new(&format!("{PORTAL}public_url = \"{url}\"\n"));
    let server = house.start();
    let at = portal(&server);
    for below in ["/hooks", ""] {
        let made = server.admin_post("/api/v1/tenants/acme/portal", &json!({})).json();
        let code = made["url"].as_str().unwrap().strip_prefix(&format!("{url}/enter/")).unwrap();
        let page = ask(at, "GET", &format!("{below}/enter/{code}"), "", "").text();
        assert!(page.contains(&format!("action=\"/hooks/enter/{code}\"")), "{page}");
        let entered = ask(at, "POST", &format!("{below}/enter/{code}"), "", "");
        let to = entered.header("location").unwrap();
        let pages = to.strip_prefix("/hooks/p/").expect("a page of the portal");
        let cookie = entered.header("set-cookie").unwrap();
        let path = format!("Path=/hooks/p/{};", pages.trim_end_matches('/'));
        assert!(cookie.contains(&path) && cookie.contains("Secure"), "{cookie}");
        let cookie = cookie.split(';').next().unwrap();
        let page = ask(at, "GET", &format!("{below}/p/{pages}"), cookie, "").text();
        assert!(page.contains(&format!("href=\"{to}deliveries\"")), "{page}");
        assert!(page.contains("href=\"/hooks/assets/"), "{page}");
    }
}

#[test]
fn a_receiving_party_adds_few_endpoints_at_public_addresses_only() {
    // The operator's `allow` applies to addresses that the operator sets, not to addresses from the form of a receiving
    // party.
    let house = house();
    let server = house.start();
    let sink = Sink::accepting();
    let theirs = endpoint(&server, "acme", &sink.url());
    let visit = Visit::enter(portal(&server), &link(&server, "acme", &ALL));
    let private = [
        &*sink.url(),
        "http://127.0.0.1/in",
        "http://localhost/",
        "http://[::1]/",
        "http://169.254.169.254/latest/meta-data",
        "http://10.0.0.1/",
        "https://example.com:8443/",
    ];
    for url in private {
        let refused = visit.post("/endpoints/new", &[("url", url)]);
        assert_eq!(refused.status, 400, "{url}: {}", refused.text());
        let text = refused.text();
        assert!(!text.contains("outbound") && !text.contains("allow"), "{url}: {text}");
    }
    let edit = format!("/endpoints/{}/edit", theirs["id"].as_str().unwrap());
    assert_eq!(visit.post(&edit, &[("url", "http://127.0.0.1:1/x")]).status, 400);
    // The operator's settings stay, whatever the receiving party changes.
    let changed = visit.post(&edit, &[("url", &sink.url()), ("description", "ours")]);
    assert_eq!(changed.status, 303, "{}", changed.text());
    let ping = format!("/endpoints/{}/ping", theirs["id"].as_str().unwrap());
    let pinged = visit.post(&ping, &[]);
    assert!(pinged.header("location").unwrap().contains("answered+HTTP+200"), "{pinged:?}");
    assert_eq!(sink.wait_for(1).len(), 1);

    let fields = [
        ("url", "https://example.com/in"),
        ("types", "invoice.*, order.paid"),
        ("headers", "X-Api-Key: value-of-the-header\nX-Other: 2"),
    ];
    for n in 0..20 {
        let added = visit.post("/endpoints/new", &fields);
        assert_eq!(added.status, 200, "endpoint {n}: {}", added.text());
        assert!(added.text().contains("whsec_"), "{}", added.text());
    }
    let refused = visit.post("/endpoints/new", &fields);
    assert_eq!(refused.status, 409, "{}", refused.text());
    let shown = server.admin_get("/api/v1/endpoints?tenant=acme&limit=100").json();
    let items = shown["items"].as_array().unwrap();
    assert_eq!(items.len(), 21);
    assert_eq!(items[0]["types"], json!(["invoice.*", "order.paid"]));
    let page = visit.get(&format!("/endpoints/{}", items[0]["id"].as_str().unwrap())).text();
    assert!(page.contains("x-api-key") && !page.contains("value-of-the-header"), "{page}");
    let edit = format!("/endpoints/{}/edit", items[0]["id"].as_str().unwrap());
    assert!(!visit.get(&edit).text().contains("value-of-the-header"));
}

#[test]
fn a_receiving_party_cannot_move_the_headers_of_an_operator_to_a_server_of_its_own() {
    let house = house();
    let server = house.start();
    let sink = Sink::accepting();
    let asked = json!({
        "url": "https://example.com/in",
        "tenant": "acme",
        "headers": { "X-Api-Key": "value-of-the-operator" },
    });
    let made = server.admin_post("/api/v1/endpoints", &asked).json();
    let path = format!("/endpoints/{}", made["id"].as_str().unwrap());
    let visit = Visit::enter(portal(&server), &link(&server, "acme", &ALL));
    let headers = || server.admin_get(&format!("/api/v1{path}")).json()["headers"].clone();
    let edit = format!("{path}/edit");
    assert!(visit.get(&edit).text().contains("another scheme, host or port removes them"));
    let moved_to = |url: &str, more: &[(&str, &str)]| {
        let fields: Vec<_> = [("url", url)].into_iter().chain(more.iter().copied()).collect();
        let changed = visit.post(&edit, &fields);
        assert_eq!(changed.status, 303, "{url}: {}", changed.text());
    };
    // Another spelling of the same server, and another path on it.
    moved_to("HTTPS://EXAMPLE.com:443/in", &[]);
    moved_to("https://example.com/other", &[]);
    assert_eq!(headers(), json!(["x-api-key"]));
    for elsewhere in ["http://example.com/other", "https://other.example/in"] {
        moved_to(elsewhere, &[]);
        assert_eq!(headers(), json!([]), "{elsewhere}");
        let asked = json!({ "headers": { "X-Api-Key": "value-of-the-operator" } });
        let given = server.admin_request("PATCH", &format!("/api/v1{path}"), Some(&asked));
        assert_eq!(given.status, 200, "{given:?}");
    }
    // The sink stands for the server of the receiving party, which must be at a public address.
    moved_to("https://third.example/in", &[]);
    let asked = json!({ "url": sink.url() });
    let given = server.admin_request("PATCH", &format!("/api/v1{path}"), Some(&asked));
    assert_eq!(given.status, 200, "{given:?}");
    assert_eq!(visit.post(&format!("{path}/ping"), &[]).status, 303);
    let got = sink.wait_for(1).remove(0);
    assert!(!got.headers.contains_key("x-api-key"), "{got:?}");
    // Headers that are sent together with a new address belong to the receiving party.
    moved_to("https://fourth.example/in", &[("headers", "X-Theirs: 1")]);
    assert_eq!(headers(), json!(["x-theirs"]));
}

#[test]
fn an_address_in_other_words_is_still_the_choice_of_the_operator() {
    // An endpoint whose address an operator chose does not count towards the limit of a receiving party.
    let house = house();
    let server = house.start();
    let visit = Visit::enter(portal(&server), &link(&server, "acme", &ALL));
    for n in 0..20 {
        let made = endpoint(&server, "acme", "https://example.com/in");
        let edit = format!("/endpoints/{}/edit", made["id"].as_str().unwrap());
        let changed = visit.post(&edit, &[("url", "HTTPS://Example.com:443/in")]);
        assert_eq!(changed.status, 303, "endpoint {n}: {}", changed.text());
    }
    let added = visit.post("/endpoints/new", &[("url", "https://example.com/in")]);
    assert_eq!(added.status, 200, "{}", added.text());
}

#[test]
fn a_form_that_does_not_arrive_is_answered_after_ten_seconds() {
    // A client that sends its body slowly must not be able to act after its link was revoked.
    let house = house();
    let server = house.start();
    let made = endpoint(&server, "acme", "https://example.com/in");
    let visit = Visit::enter(portal(&server), &link(&server, "acme", &ALL));
    let path = format!("/endpoints/{}/disable", made["id"].as_str().unwrap());
    let slow = visit.post_slowly(&path);
    assert_eq!(slow.status, 408, "{}", slow.text());
}

#[test]
fn a_receiving_party_pings_ten_times_a_minute_and_learns_no_reason() {
    let house = house();
    let server = house.start();
    let (sink, closed) = (Sink::accepting(), "http://127.0.0.1:1/in");
    let (open, dead) = (endpoint(&server, "acme", &sink.url()), endpoint(&server, "acme", closed));
    let visit = Visit::enter(portal(&server), &link(&server, "acme", &ALL));
    let ping = |endpoint: &Value| {
        visit.post(&format!("/endpoints/{}/ping", endpoint["id"].as_str().unwrap()), &[])
    };
    let failed = ping(&dead);
    let said = failed.header("location").unwrap();
    assert!(said.contains("no+answer") && !said.contains("refused"), "{said}");
    let shown = server.admin_post(
        &format!("/api/v1/endpoints/{}/ping", dead["id"].as_str().unwrap()),
        &json!({}),
    );
    assert!(shown.json()["error"].as_str().unwrap().contains("refused"), "the operator sees why");
    for n in 0..9 {
        assert_eq!(ping(&open).status, 303, "ping {n}");
    }
    let limited = ping(&open);
    assert_eq!((limited.status, limited.header("retry-after")), (429, Some("60")), "{limited:?}");
    assert_eq!(sink.got().len(), 9);
}

#[test]
fn the_command_line_makes_and_revokes_links() {
    let house = house();
    let server = house.start();
    let admin = format!("http://{}", server.admin);
    let run = |args: &[&str]| hapax(args).args(&["--admin", &admin]).run();
    let made = run(&["tenants", "portal", "acme", "--ttl", "10m", "--allow", "read,replay"]);
    assert_eq!(made.code, 0, "{made:?}");
    let url = made.stdout.trim().to_owned();
    let at = portal(&server);
    let door = url.strip_prefix(&format!("http://{at}")).expect("the portal's URL").to_owned();
    let visit = Visit::enter(at, &door);
    assert_eq!(visit.get("/").status, 200);
    assert_eq!(visit.get("/endpoints/new").status, 403);
    let wrong = run(&["tenants", "portal", "acme", "--allow", "everything"]);
    assert_ne!(wrong.code, 0, "{wrong:?}");
    assert_eq!(run(&["tenants", "revoke-portal", "acme"]).code, 0);
    assert_eq!(visit.get("/").status, 401);
}

#[test]
fn the_code_that_the_portal_shows_verifies_deliveries_and_nothing_else() {
    let house = house();
    let server = house.start();
    let sink = Sink::accepting();
    let made = endpoint(&server, "acme", &sink.url());
    let message = json!({ "type": "invoice.paid", "data": { "n": 1 }, "tenant": "acme" });
    assert_eq!(server.admin_post("/api/v1/messages", &message).status, 202);
    let genuine = sink.wait_for(1).remove(0);
    let secret = made["secret"].as_str().unwrap();
    let mut changed = genuine.clone();
    changed.body[0] = b' ';
    let mut old = genuine.clone();
    old.headers.insert("webhook-timestamp".to_owned(), "1700000000".to_owned());
    let cases = [(&genuine, secret, true), (&changed, secret, false), (&old, secret, false)];
    let other = (&genuine, "whsec_YW5vdGhlciBzZWNyZXQgb2Ygc29tZWJvZHkgZWxzZQ==", false);
    let assets = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/verify");
    let node = format!(
        "import {{ verify }} from '{assets}/verify.mjs';\
         const [secret, headers, body] = JSON.parse(await new Response(process.stdin).text());\
         console.log(verify(secret, headers, Buffer.from(body)));"
    );
    let python = format!(
        "import json, sys; sys.path.insert(0, '{assets}'); sys.dont_write_bytecode = True\n\
         from verify import verify\n\
         secret, headers, body = json.load(sys.stdin)\n\
         print(str(verify(secret, headers, body.encode())).lower())"
    );
    let programs = [
        ("node", vec!["--input-type=module", "-e", &node]),
        ("python3", vec!["-B", "-c", &python]),
    ];
    for (program, args) in programs {
        if Command::new(program).arg("--version").output().is_err() {
            skip("the_code_that_the_portal_shows_verifies", &format!("{program} is not installed"));
            continue;
        }
        for (got, secret, expected) in cases.into_iter().chain([other]) {
            let said = run(program, &args, got, secret);
            assert_eq!(said.trim(), expected.to_string(), "{program} with {got:?}");
        }
    }
}

/// Passes the secret and a delivery to a program as JSON, and returns its output.
fn run(program: &str, args: &[&str], got: &Got, secret: &str) -> String {
    let mut child = Command::new(program)
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let given = json!([secret, got.headers, got.text()]).to_string();
    child.stdin.take().unwrap().write_all(given.as_bytes()).unwrap();
    String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap()
}
