//! The admin side of the real server: access rights, the data shown, and that no secret is ever
//! shown.

use std::collections::HashSet;

use crate::support::sender::{event, now};
use crate::support::{Answer, House, Sender, Wire, until};
use serde_json::Value;

const SECRET: &str = "whsec_canary_of_stripe";
const TOKEN: &str = "token-canary-of-ops";

fn stripe() -> String {
    format!(
        "[sources.stripe]\nprovider = \"stripe\"\nsecrets = [\"{SECRET}\"]\n\
         unverified_limit = \"off\"\n"
    )
}

#[track_caller]
fn is_problem(answer: &Answer, status: u16) {
    assert_eq!(answer.status, status, "{answer:?}");
    assert_eq!(answer.header("content-type"), Some("application/problem+json"), "{answer:?}");
    assert_eq!(answer.json()["status"], status);
}

#[test]
fn on_loopback_a_page_with_a_rebound_name_gets_nothing() {
    let house = House::new(&stripe());
    let server = house.start();
    server.ask(Sender::stripe(SECRET).event("evt_hidden")).is("accepted");
    let port = server.admin.port();
    for path in ["/", "/metrics", "/api/v1/events", "/api/v1/events/evt_hidden"] {
        for host in [
            "evil.example",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "evil.example#127.0.0.1",
            "evil.example@127.0.0.1",
            "127.0.0.1@evil.example",
            "10.0.0.1",
            "0.0.0.0",
            "127.0.0.1\r\nhost: evil.example",
            "",
        ] {
            let answer = server.admin_get_with(path, &format!("host: {host}\r\n"));
            // A Host that is not a valid name may be refused by the HTTP parser.
            assert!(matches!(answer.status, 400 | 403), "{path} {host:?}: {answer:?}");
            assert!(!answer.text().contains("evt_hidden"), "{path} {host:?}");
        }
        is_problem(&server.admin_get_with(path, "host: evil.example\r\n"), 403);
        for host in [format!("127.0.0.1:{port}"), format!("localhost:{port}"), "[::1]".to_owned()] {
            let answer = server.admin_get_with(path, &format!("host: {host}\r\n"));
            assert_eq!(answer.status, 200, "{path} {host}: {answer:?}");
        }
    }
    // The absolute form names its host in the first line.
    let answer =
        server.admin_get_with("http://evil.example/api/v1/events", "host: evil.example\r\n");
    assert!(matches!(answer.status, 400 | 403), "{answer:?}");
    for path in ["/healthz", "/readyz"] {
        assert_eq!(server.admin_get_with(path, "host: evil.example\r\n").status, 200, "{path}");
    }
}

/// Every header by which a reverse proxy marks a forwarded request.
const FORWARDED: [&str; 8] = [
    "forwarded: for=203.0.113.7",
    "x-forwarded-for: 203.0.113.7",
    "X-Forwarded-Proto: https",
    "x-forwarded-anything: 1",
    "x_forwarded_for: 203.0.113.7",
    "x-real-ip: 203.0.113.7",
    "via: 1.1 proxy",
    "cf-connecting-ip: 203.0.113.7",
];

#[test]
fn behind_a_local_reverse_proxy_the_admin_side_is_closed_without_the_token() {
    // nginx's plain `proxy_pass` sends Host 127.0.0.1:8081 and no forwarding header, so a request
    // from the Internet looks like one from this machine.
    let house = House::new(&format!("admin_open = false\n{}", stripe()));
    let server = house.start();
    server.ask(Sender::stripe(SECRET).event("evt_1")).is("accepted");
    let file = house.database().with_file_name("admin.token");
    let token = std::fs::read_to_string(&file).unwrap();
    let token = token.trim_end();
    assert!(token.len() >= 64 && token.bytes().all(|byte| byte.is_ascii_hexdigit()), "{token}");
    let mode = std::os::unix::fs::PermissionsExt::mode(&file.metadata().unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    let host = format!("host: {}\r\n", server.admin);
    let shown = format!("authorization: Bearer {token}\r\n");
    for path in ["/", "/metrics", "/api/v1/events", "/api/v1/events/evt_1", "/api/v1/openapi.json"]
    {
        let plain = server.admin_get_with(path, &host);
        is_problem(&plain, 401);
        assert!(!plain.text().contains("evt_1"), "{path}: {plain:?}");
        let answer = server.admin_get_with(path, &format!("{host}{shown}"));
        assert_eq!(answer.status, 200, "{path}: {answer:?}");
        // Only the token counts: a proxy may forward its own name and address.
        let proxied = format!("host: ops.example.com\r\nvia: 1.1 proxy\r\n{shown}");
        assert_eq!(server.admin_get_with(path, &proxied).status, 200, "{path}");
    }
    let replay =
        crate::support::post(server.admin, "/api/v1/events/evt_1/replay", &serde_json::json!({}));
    let mut wire = crate::support::Wire::connect(server.admin);
    wire.write(replay);
    is_problem(&wire.answer(), 401);
    for path in ["/healthz", "/readyz"] {
        assert_eq!(server.admin_get_with(path, &host).status, 200, "{path}");
    }
    let said = server.stop();
    assert!(!said.contains(token), "{said}");
    // After a restart the token is the same; after the file was removed it is a new one.
    let server = house.start();
    assert_eq!(std::fs::read_to_string(&file).unwrap().trim_end(), token);
    std::fs::remove_file(&file).unwrap();
    server.signal("HUP");
    server.stderr.wait_for("reloaded configuration");
    let newer = std::fs::read_to_string(&file).unwrap();
    assert_ne!(newer.trim_end(), token);
    let old = server.admin_get_with("/", &format!("host: {}\r\n{shown}", server.admin));
    is_problem(&old, 401);
}

#[test]
fn an_open_admin_side_is_open_to_local_requests_only() {
    // Both ways to need no token: `admin_open`, and dev mode.
    for house in [House::new(&format!("admin_open = true\n{}", stripe())), House::without_config()]
    {
        let server = house.start();
        let host = format!("host: {}\r\n", server.admin);
        for path in ["/", "/metrics", "/api/v1/events"] {
            assert_eq!(server.admin_get_with(path, &host).status, 200, "{path}");
            for line in FORWARDED {
                is_problem(&server.admin_get_with(path, &format!("{host}{line}\r\n")), 401);
            }
            is_problem(&server.admin_get_with(path, "host: ops.example.com\r\n"), 403);
        }
        assert!(!house.database().with_file_name("admin.token").exists());
    }
}

#[test]
fn admin_answers_are_not_cached_and_not_sniffed() {
    let house = House::new(&format!("admin_open = true\n{}", stripe()));
    let server = house.start();
    for path in [
        "/",
        "/healthz",
        "/readyz",
        "/metrics",
        "/api/v1/events",
        "/api/v1/events/none",
        "/none",
        "/api/v1/events?limit=0",
    ] {
        for host in [server.admin.to_string(), "evil.example".to_owned()] {
            let answer = server.admin_get_with(path, &format!("host: {host}\r\n"));
            assert_eq!(answer.header("x-content-type-options"), Some("nosniff"), "{path}");
            assert_eq!(answer.header("cache-control"), Some("no-store"), "{path}");
        }
    }
}

#[test]
fn only_its_owner_can_read_the_data_directory() {
    // Files that existed before, created with the usual mask, are restricted too.
    use std::os::unix::fs::PermissionsExt as _;
    let house = House::new(&format!("admin_open = false\n{}", stripe()));
    let data = house.database().parent().unwrap().to_owned();
    std::fs::create_dir_all(&data).unwrap();
    std::fs::write(house.database(), "").unwrap();
    for (path, mode) in [(&data, 0o755), (&house.database(), 0o644)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let server = house.start();
    server.ask(Sender::stripe(SECRET).event("evt_1")).is("accepted");
    let mode = |path: &std::path::Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&data), 0o700);
    let files: Vec<_> =
        std::fs::read_dir(&data).unwrap().map(|file| file.unwrap().path()).collect();
    assert!(
        files.len() >= 5,
        "the database, its log, its index, the lock and the token: {files:?}"
    );
    for file in &files {
        assert_eq!(mode(file), 0o600, "{file:?}");
    }
}

#[test]
fn a_nul_is_refused_in_every_parameter() {
    let house = House::new(&stripe());
    let server = house.start();
    server.ask(Sender::stripe(SECRET).event("evt_1")).is("accepted");
    crate::support::no_nul_is_taken(&server);
}

#[test]
fn off_loopback_every_route_but_health_needs_the_token() {
    let house = House::new(&format!(
        "admin_listen = \"0.0.0.0:0\"\n\
         [tokens.ops]\nvalue = \"env:OPS_TOKEN\"\nallow = [\"admin\"]\n\
         [tokens.publisher]\nvalue = \"token-canary-of-publisher\"\nallow = [\"publish\"]\n{}",
        stripe()
    ))
    .env("OPS_TOKEN", TOKEN);
    let server = house.start();
    server.ask(Sender::stripe(SECRET).event("evt_1")).is("accepted");
    let ask = |path: &str, authorization: &str| {
        server.admin_get_with(path, &format!("host: 127.0.0.1\r\n{authorization}"))
    };
    for path in ["/", "/metrics", "/api/v1/events", "/api/v1/events/evt_1"] {
        is_problem(&ask(path, ""), 401);
        assert!(ask(path, "").header("www-authenticate").is_some());
        for wrong in [
            "Bearer",
            "Bearer ",
            "Bearer wrong",
            "Bearer env:OPS_TOKEN",
            &format!("Basic {TOKEN}"),
            TOKEN,
            &format!("Bearer {TOKEN}x"),
            &format!("Bearer {}", &TOKEN[1..]),
            &format!("Bearer {}", TOKEN.to_uppercase()),
        ] {
            let answer = ask(path, &format!("authorization: {wrong}\r\n"));
            assert!(matches!(answer.status, 401 | 429), "{path} {wrong}: {answer:?}");
            assert!(!answer.text().contains("evt_1"), "{path} {wrong}");
        }
        let weak = ask(path, "authorization: Bearer token-canary-of-publisher\r\n");
        is_problem(&weak, 403);
        // Any number of wrong tokens must not lock out the right one.
        let right = ask(path, &format!("authorization: Bearer {TOKEN}\r\n"));
        assert_eq!(right.status, 200, "{path}: {right:?}");
    }
    for path in ["/healthz", "/readyz"] {
        assert_eq!(ask(path, "").status, 200, "{path}");
    }
    let said = server.stop();
    assert!(!said.contains(TOKEN) && !said.contains("token-canary"), "{said}");
}

#[test]
fn a_blank_token_is_refused_at_start() {
    for value in ["\"\"", "\"   \"", "\"env:BLANK\"", "\"env:NOT_SET_ANYWHERE\""] {
        let house = House::new(&format!(
            "admin_listen = \"0.0.0.0:0\"\n[tokens.ops]\nvalue = {value}\nallow = [\"admin\"]\n{}",
            stripe()
        ))
        .env("BLANK", "");
        let (code, said) = house.fail();
        assert_eq!(code, Some(2), "{value}: {said}");
        assert!(said.contains("hapax.toml:") && said.contains("tokens.ops"), "{value}: {said}");
    }
}

#[test]
fn the_event_list_filters_pages_and_refuses_bad_parameters() {
    let house = House::new(&format!(
        "{}[sources.stripe.tenants.acme]\nsecrets = [\"whsec_of_acme\"]\n",
        stripe()
    ));
    let server = house.start();
    let sender = Sender::stripe(SECRET);
    let acme = Sender::new("stripe", "whsec_of_acme", "/webhooks/acme/stripe");
    for n in 0..5 {
        server.ask(sender.event(&format!("evt_{n}"))).is("accepted");
    }
    server.ask(acme.event("evt_0")).is("accepted");
    let refund = sender.request(r#"{"id":"evt/ü?","type":"refund.made","created":1700000000}"#);
    let odd = server.ask(refund.bytes()).id();

    let count = |query: &str| server.events(query).len();
    assert_eq!(count(""), 7);
    assert_eq!(count("tenant=acme"), 1);
    assert_eq!(count("tenant=default"), 6);
    assert_eq!(count("source=stripe"), 7);
    assert_eq!(count("source=nobody"), 0);
    assert_eq!(count("type=refund.made"), 1);
    assert_eq!(count("status=review"), 0);
    assert_eq!(count("status=ignored"), 7);
    assert_eq!(count("q=evt_3"), 1);
    assert_eq!(count("q=%25"), 0, "a wildcard is text like any other");
    assert_eq!(count("since=2100-01-01T00:00:00Z"), 0);
    assert_eq!(count("until=2100-01-01T00:00:00Z"), 7);

    // The pages show each event exactly once, newest first.
    let (mut seen, mut cursor) = (Vec::new(), String::new());
    loop {
        let page = server.admin_get(&format!("/api/v1/events?limit=2{cursor}")).json();
        let items = page["items"].as_array().unwrap();
        assert!(items.len() <= 2);
        seen.extend(items.iter().map(|item| item["id"].as_str().unwrap().to_owned()));
        match page["next"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => break,
        }
    }
    assert_eq!(seen.len(), 7);
    assert_eq!(seen.iter().collect::<HashSet<_>>().len(), 7);
    assert_eq!(seen[0], odd);

    let get = |path: &str| server.admin_get(path);
    assert_eq!(get("/api/v1/events/evt_3").json()["event_id"], "evt_3");
    assert_eq!(get(&format!("/api/v1/events/{odd}")).json()["event_id"], "evt/ü?");
    assert_eq!(get("/api/v1/events/evt%2F%C3%BC%3F").json()["id"], odd.as_str());
    let ambiguous = get("/api/v1/events/evt_0");
    is_problem(&ambiguous, 409);
    assert_eq!(ambiguous.json()["candidates"].as_array().unwrap().len(), 2);
    is_problem(&get("/api/v1/events/evt_none"), 404);
    is_problem(&get("/api/v1/events/00000000-0000-0000-0000-000000000000"), 404);
    is_problem(&get("/api/v1/nothing"), 404);
    for bad in
        ["limit=0", "limit=501", "limit=-1", "cursor=x", "status=lost", "since=now", "colour=red"]
    {
        is_problem(&get(&format!("/api/v1/events?{bad}")), 400);
    }
    let host = format!("host: {}\r\n", server.admin);
    let mut wire = crate::support::Wire::connect(server.admin);
    wire.write(format!("POST /api/v1/events HTTP/1.1\r\n{host}content-length: 0\r\n\r\n"));
    is_problem(&wire.answer(), 405);
}

#[test]
fn metrics_have_the_documented_names_and_contain_no_tenant_and_no_id() {
    let house = House::new(&format!(
        "{}[sources.stripe.tenants.acme]\nsecrets = [\"whsec_of_acme\"]\n",
        stripe()
    ));
    let server = house.start();
    let sender = Sender::stripe(SECRET);
    let acme = Sender::new("stripe", "whsec_of_acme", "/webhooks/acme/stripe");
    server.ask(acme.event("evt_labelled")).is("accepted");
    server.ask(sender.event("evt_labelled")).is("accepted");
    server.ask(sender.event("evt_labelled")).is("duplicate");
    let good = sender.request(event("evt_x"));
    server.ask(sender.request(r#"{"id":"evt_labelled","type":"other"}"#).bytes()).is("duplicate");
    for (reason, request) in [
        ("missing", good.clone().without("stripe-signature")),
        ("signature", good.clone().body("{}")),
        ("future", sender.request_at(event("evt_x"), now() + 86_400)),
        ("stale_unseen", sender.request_at(event("evt_x"), now() - 86_400)),
        ("stale", sender.request_at(event("evt_labelled"), now() - 86_400)),
        ("malformed", sender.request("{")),
        ("no_id", sender.request("{}")),
        ("too_large", good.clone().body("x".repeat((1 << 20) + 1))),
        ("encoded", good.clone().with("content-encoding", "gzip")),
    ] {
        let labels = [&*format!("reason=\"{reason}\""), "source=\"stripe\""];
        let before = server.metric("hapax_rejections_total", &labels);
        let answer = server.ask(request.bytes());
        assert!((400..500).contains(&answer.status), "{reason}: {answer:?}");
        let after = server.metric("hapax_rejections_total", &labels);
        assert_eq!(after, before + 1.0, "{reason}: {answer:?}");
    }
    let arrivals = |decision: &str| {
        let label = format!("decision=\"{decision}\"");
        server.metric("hapax_arrivals_total", &[&label, "source=\"stripe\""])
    };
    assert_eq!(arrivals("accepted"), 2.0);
    assert_eq!(arrivals("duplicate"), 1.0);
    assert_eq!(arrivals("conflict"), 1.0);
    assert_eq!(server.metric("hapax_ack_seconds_count", &["source=\"stripe\""]), 4.0);
    assert!(server.metric("hapax_store_commit_seconds_count", &[]) >= 3.0);
    assert!(server.metric("hapax_store_batch_size_count", &[]) >= 3.0);
    let text = server.admin_get("/metrics").text();
    assert!(!text.contains("acme") && !text.contains("evt_") && !text.contains("tenant"), "{text}");
    // These requests exceed the limit of failures.
    let limited = House::new(&stripe().replace("\"off\"", "\"1/m\""));
    let server = limited.start();
    let statuses: Vec<u16> = (0..3)
        .map(|_| server.ask(good.clone().body("{}").bytes()))
        .map(|answer| {
            assert_eq!(answer.status == 429, answer.header("retry-after").is_some(), "{answer:?}");
            answer.status
        })
        .collect();
    assert_eq!(statuses, [401, 429, 429]);
    assert_eq!(server.metric("hapax_rejections_total", &["reason=\"limited\""]), 2.0);
    server.ask(sender.event("evt_verified")).is("accepted");
}

#[test]
fn every_decision_is_a_json_line_with_the_documented_fields() {
    let house = House::new(&format!("{}[log]\nformat = \"json\"\n", stripe()));
    let server = house.start();
    let sender = Sender::stripe(SECRET);
    let accepted = server.ask(sender.event("evt_1"));
    let duplicate = server.ask(sender.event("evt_1"));
    let conflict = server.ask(sender.request(r#"{"id":"evt_1","type":"payout.paid"}"#).bytes());
    let late = server.ask(sender.request_at(event("evt_2"), now() - 86_400).bytes());
    let forged = server.ask(sender.request(event("evt_3")).body("{}").bytes());
    // The id contains a forged log line.
    let forger = "evt\u{2028}{\\\"decision\\\":\\\"accepted\\\"}\u{202e}";
    let body = format!(r#"{{"id":"{forger}","type":"payout.paid"}}"#);
    assert_eq!(server.ask(sender.request(body).bytes()).status, 200);
    let said = server.stop();
    let lines: Vec<Value> = said
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect();
    let line = |answer: &Answer| {
        let request_id = answer.header("hapax-request-id").unwrap();
        let of: Vec<_> = lines.iter().filter(|line| line["request_id"] == request_id).collect();
        assert_eq!(of.len(), 1, "{request_id} in {said}");
        of[0].clone()
    };
    for (answer, decision) in
        [(&accepted, "accepted"), (&duplicate, "duplicate"), (&conflict, "conflict")]
    {
        let line = line(answer);
        assert_eq!(line["decision"], decision, "{line}");
        assert_eq!(line["source"], "stripe", "{line}");
        assert_eq!(line["tenant"], "default", "{line}");
        assert_eq!(line["event_id"], "evt_1", "{line}");
        assert_eq!(line["event_type"], "payout.paid", "{line}");
        assert_eq!(line["id"], accepted.id().as_str(), "{line}");
    }
    let late = line(&late);
    assert_eq!(late["level"], "ERROR", "a lost event is logged as an error: {late}");
    assert_eq!((&late["event_id"], &late["reason"]), (&"evt_2".into(), &"stale_unseen".into()));
    let forged = line(&forged);
    assert_eq!((&forged["decision"], &forged["reason"]), (&"rejected".into(), &"signature".into()));
    let said_accepted = lines.iter().filter(|line| line["decision"] == "accepted").count();
    assert_eq!(said_accepted, 2, "{said}");
}

#[test]
fn no_secret_token_or_body_is_ever_printed() {
    let gitlab = "glpat-canary-of-gitlab";
    let verify_token = "verify-canary-of-meta";
    for format in ["human", "json"] {
        let house = House::new(&format!(
            "admin_listen = \"0.0.0.0:0\"\n[log]\nformat = \"{format}\"\nlevel = \"trace\"\n\
             [tokens.ops]\nvalue = \"{TOKEN}\"\nallow = [\"admin\"]\n{}\
             [sources.gitlab]\nprovider = \"gitlab\"\nsecrets = [\"{gitlab}\"]\n\
             [sources.meta]\nprovider = \"meta\"\nsecrets = [\"secret-canary-of-meta\"]\n\
             params = {{ verify_token = \"{verify_token}\" }}\n",
            stripe()
        ));
        let server = house.start();
        let sender = Sender::stripe(SECRET);
        let body = r#"{"id":"evt_1","type":"t","card":"canary-of-a-body"}"#;
        let request = sender
            .request(body)
            .with("authorization", "Bearer canary-of-a-proxy")
            .with("cookie", "session=canary-of-a-cookie")
            .with("proxy-authorization", "Basic canary-of-a-basic");
        server.ask(request.bytes()).is("accepted");
        server.ask(request.bytes()).is("duplicate");
        server.ask(request.clone().body("{}").bytes());
        server
            .ask(request.clone().instead("stripe-signature", &format!("t=1,v1={SECRET}")).bytes());
        server.ask(sender.request_at(body, now() - 86_400).bytes());
        server
            .ask(sender.request(format!("{{\"card\":\"canary-of-a-body\",\"x\":{SECRET}")).bytes());
        server.ask(request.clone().to(&format!("/webhooks/stripe?key={SECRET}")).bytes());
        server.ask(request.clone().to(&format!("/webhooks/none?key={TOKEN}")).bytes());
        let own = Sender::new("gitlab", gitlab, "/webhooks/gitlab");
        let gitlab_event = own.request(r#"{"object_kind":"push"}"#);
        assert_eq!(server.ask(gitlab_event.bytes()).status, 200);
        let query = format!("hub.mode=subscribe&hub.verify_token={verify_token}&hub.challenge=7");
        let meta = server.ask(format!("GET /webhooks/meta?{query} HTTP/1.1\r\nhost: a\r\n\r\n"));
        assert_eq!((meta.status, meta.text().as_str()), (200, "7"));
        server.ask(format!("GET /webhooks/meta?{query}x HTTP/1.1\r\nhost: a\r\n\r\n"));

        let mut shown = String::new();
        for token in [TOKEN, "token-canary-that-is-wrong"] {
            let headers = format!("host: 127.0.0.1\r\nauthorization: Bearer {token}\r\n");
            for path in ["/", "/metrics", "/api/v1/events", "/readyz", "/healthz"] {
                shown += &server.admin_get_with(path, &headers).text();
            }
            let list = server.admin_get_with("/api/v1/events", &headers);
            for item in list.json()["items"].as_array().into_iter().flatten() {
                let path = format!("/api/v1/events/{}", item["id"].as_str().unwrap());
                let mut detail = server.admin_get_with(&path, &headers).json();
                // The body may be in this answer.
                detail.as_object_mut().unwrap().remove("body");
                shown += &detail.to_string();
            }
        }
        server.signal("HUP");
        until("the reload", || {
            server.stderr.text().contains("reloaded configuration and secrets").then_some(())
        });
        shown += &server.stdout.text();
        shown += &server.stop();
        for secret in [SECRET, TOKEN, gitlab, verify_token, "canary"] {
            let at = shown.find(secret);
            assert!(
                at.is_none(),
                "{secret}: …{}",
                &shown[at.unwrap().saturating_sub(200)..][..300]
            );
        }
    }
}

#[test]
fn behind_a_reverse_proxy_pages_keep_their_path_and_the_cookie_is_secure() {
    // The proxy has another host and a path, which it passes on or removes; Host may be either.
    let house = House::new(&format!(
        "admin_open = false\nadmin_url = \"https://ops.example.com/hapax\"\n\
         [tokens.ops]\nvalue = \"{TOKEN}\"\nallow = [\"operate\"]\n{}",
        stripe()
    ));
    let server = house.start();
    let host = format!("host: {}\r\n", server.admin);
    let html = format!("{host}x-forwarded-for: 3.1.2.4\r\naccept: text/html\r\n");
    for path in ["/hapax/events?status=dead", "/events?status=dead"] {
        let answer = server.admin_get_with(path, &html);
        let login = "/hapax/login?next=%2Fevents%3Fstatus%3Ddead";
        assert_eq!(answer.header("location"), Some(login), "{path}: {answer:?}");
    }
    let form = format!("token={TOKEN}&next=%2Fevents");
    let log_in = |more: &str| {
        let length = form.len();
        let mut wire = Wire::connect(server.admin);
        wire.write(format!(
            "POST /hapax/login HTTP/1.1\r\n{host}{more}content-length: {length}\r\n\r\n{form}"
        ));
        wire.answer()
    };
    for foreign in
        ["https://evil.example", "http://ops.example.com", "https://ops.example.com.evil"]
    {
        let answer = log_in(&format!("origin: {foreign}\r\n"));
        assert_eq!(answer.status, 403, "{foreign}: {answer:?}");
    }
    let answer = log_in("origin: https://ops.example.com\r\n");
    assert_eq!(answer.header("location"), Some("/hapax/events"), "{answer:?}");
    let cookie = answer.header("set-cookie").unwrap();
    assert!(cookie.contains("; Path=/hapax; HttpOnly; SameSite=Lax; Secure"), "{cookie}");
    let session = cookie.split(';').next().unwrap();
    let page = server.admin_get_with("/hapax/", &format!("{html}cookie: {session}\r\n"));
    assert_eq!(page.status, 200, "{page:?}");
    let text = page.text();
    for part in text.split(['"', '\'']).filter(|part| part.starts_with('/')) {
        assert!(part.starts_with("/hapax/"), "{part} leads out of the site");
    }
    let file = text.split('"').find(|part| part.ends_with("style.css")).unwrap();
    assert_eq!(server.admin_get_with(file, &host).status, 200);
}

#[test]
fn the_history_of_traffic_survives_a_restart() {
    let house = House::new(&stripe());
    let server = house.start();
    let sender = Sender::stripe(SECRET);
    for id in ["evt_1", "evt_2", "evt_1"] {
        server.ask(sender.event(id));
    }
    server.ask(Sender::stripe("whsec_of_nobody").event("evt_3"));
    server.stop();
    let server = house.start();
    let found = server.admin_get("/api/v1/history?from=1h&step=1h").json();
    let sum = |field: &str| -> u64 {
        found["items"].as_array().unwrap().iter().map(|point| point[field].as_u64().unwrap()).sum()
    };
    assert_eq!((sum("new"), sum("copies"), sum("rejected")), (2, 1, 1), "{found}");
    let acks = |point: &serde_json::Value| point["ack_seconds"]["p99"].as_f64();
    assert!(
        found["items"].as_array().unwrap().iter().any(|point| acks(point) > Some(0.0)),
        "{found}"
    );
    let other = server.admin_get("/api/v1/history?source=nobody").json();
    assert_eq!(other["items"], serde_json::json!([]), "{other}");
}
