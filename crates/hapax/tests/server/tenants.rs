//! Tenants that are added at run time: their secrets verify at once and survive restarts and SIGKILLs. Refused
//! secrets change nothing.

use serde_json::{Value, json};

use crate::common::hapax;
use crate::support::{Answer, House, Sender, Server, until};
use hapax_core::Timestamp;

const CONFIGURED: &str = "whsec_of_the_config";
const ACME: &str = "whsec_acme_0123456789";
const GLOBEX: &str = "whsec_globex_0123456789";

/// Three sources: one with a tenant in the config, one whose tenants are all added through the API, and one
/// that reads the tenant from a field of the body.
const CONFIG: &str = "[sources.stripe]\nprovider = \"stripe\"\nunverified_limit = \"off\"\n\
     secrets = [\"whsec_of_the_config\"]\n\
     [sources.github]\nprovider = \"github\"\n[sources.github.tenants]\n\
     [sources.github.handlers.note]\npull = true\n\
     [sources.shared]\nprovider = \"stripe\"\nsecrets = [\"whsec_shared\"]\ntenant_from = \"/account\"\n";

fn path(tenant: &str, source: &str) -> String {
    format!("/api/v1/tenants/{tenant}/sources/{source}/secrets")
}

fn put(server: &Server, tenant: &str, source: &str, secrets: Value) -> Answer {
    server.admin_request("PUT", &path(tenant, source), Some(&json!({ "secrets": secrets })))
}

#[track_caller]
fn set(server: &Server, tenant: &str, source: &str, secrets: Value) -> Value {
    let answer = put(server, tenant, source, secrets);
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()
}

fn stripe_of(tenant: &str, secret: &str) -> Sender {
    Sender::new("stripe", secret, &format!("/webhooks/{tenant}/stripe"))
}

/// One Stripe request for this tenant.
fn ask(server: &Server, tenant: &str, secret: &str, event: &str) -> Answer {
    server.ask(stripe_of(tenant, secret).event(event))
}

#[test]
fn a_tenant_is_served_from_its_put_until_its_delete_and_after_restarts() {
    let house = House::new(CONFIG);
    let server = house.start();
    assert_eq!(ask(&server, "acme", ACME, "evt_1").status, 404);
    let shown = set(&server, "acme", "stripe", json!([{"value": ACME}]));
    assert_eq!(shown["path"], "/webhooks/acme/stripe");
    assert_eq!((&shown["active"], &shown["secrets"]), (&json!(true), &json!([{"until": null}])));
    ask(&server, "acme", ACME, "evt_1").is("accepted");
    ask(&server, "acme", ACME, "evt_1").is("duplicate");
    // The event belongs to the new tenant, and the configured tenant is served as before.
    assert_eq!(server.events("tenant=acme").len(), 1);
    assert_eq!(ask(&server, "acme", CONFIGURED, "evt_2").status, 401);
    server.ask(Sender::stripe(CONFIGURED).event("evt_1")).is("accepted");

    // A rotation: the old secret verifies until its `until`. After that, only the new one does.
    let until_second = Timestamp::now().as_second() + 2;
    let end = Timestamp::from_second(until_second).unwrap();
    let rotated = json!([{"value": "whsec_next"}, {"value": ACME, "until": end.to_string()}]);
    set(&server, "acme", "stripe", rotated);
    ask(&server, "acme", "whsec_next", "evt_3").is("accepted");
    let mut n = 0;
    until("the old secret has ended", || {
        n += 1;
        let answer = ask(&server, "acme", ACME, &format!("evt_old_{n}"));
        assert!([200, 401].contains(&answer.status), "{answer:?}");
        (answer.status == 401).then_some(())
    });

    // A crash right after the answer loses nothing, and a second start reads the sealed secrets.
    set(&server, "globex", "github", json!([{"value": GLOBEX}]));
    server.kill();
    let server = house.start();
    ask(&server, "acme", "whsec_next", "evt_3").is("duplicate");
    let github = Sender::new("github", GLOBEX, "/webhooks/globex/github");
    server.ask(github.request("{}").bytes()).is("accepted");
    // A handler of a source without tenants in the config runs for the new tenant.
    let claim = json!({"source": "github", "handler": "note", "limit": 1});
    let claimed = server.admin_post("/api/v1/claims", &claim).json();
    assert_eq!(claimed["items"][0]["event"]["tenant"], "globex", "{claimed}");

    let removed = server.admin_request("DELETE", &path("acme", "stripe"), None);
    assert_eq!((removed.status, removed.json()), (200, json!({"deleted": true})));
    assert_eq!(ask(&server, "acme", "whsec_next", "evt_4").status, 404);
    assert_eq!(server.admin_request("DELETE", &path("acme", "stripe"), None).status, 404);
    assert_eq!(server.admin_get(&path("acme", "stripe")).status, 404);
    let said = server.stop();

    // Every change is recorded, and no secret is in a log or in the database.
    let database = rusqlite::Connection::open(house.database()).unwrap();
    let actions: Vec<String> = database
        .prepare("SELECT what || ' ' || tenant || '/' || source || ' ' || who FROM hapax_source_secret_action")
        .unwrap()
        .query_map([], |row| row.get(0))
        .unwrap()
        .collect::<Result<_, _>>()
        .unwrap();
    let expected =
        ["set acme/stripe", "set acme/stripe", "set globex/github", "delete acme/stripe"];
    assert_eq!(actions, expected.map(|action| format!("{action} loopback")));
    drop(database);
    for secret in [ACME, GLOBEX, "whsec_next"] {
        assert!(!said.contains(secret), "{said}");
        for file in ["hapax.db", "hapax.db-wal"] {
            let bytes = std::fs::read(house.database().with_file_name(file)).unwrap_or_default();
            let found = bytes.windows(secret.len()).any(|part| part == secret.as_bytes());
            assert!(!found, "{secret} is in {file}");
        }
    }
}

#[test]
fn bad_secrets_get_a_clear_problem_and_change_nothing() {
    let house = House::new(CONFIG);
    let server = house.start();
    set(&server, "acme", "stripe", json!([{"value": ACME}]));
    let check = |tenant: &str, source: &str, secrets: Value, status: u16, said: &str| {
        let answer = put(&server, tenant, source, secrets.clone());
        let problem = answer.json();
        assert_eq!(answer.status, status, "{tenant}/{source} {secrets}: {problem}");
        let kind = match status {
            400 => "bad_request",
            404 => "not_found",
            _conflict => "conflict",
        };
        assert_eq!(problem["type"], format!("urn:hapax:problem:{kind}"));
        let detail = problem["detail"].as_str().unwrap();
        assert!(detail.contains(said), "{tenant}/{source} {secrets}: {detail}");
        assert!(!detail.contains(ACME) && !detail.contains(CONFIGURED), "{detail}");
    };
    let one = |secret: &str| json!([{ "value": secret }]);
    check("acme", "stripe", json!([]), 400, "1 to 8 secrets");
    check("acme", "stripe", one("  "), 400, "empty");
    check("acme", "stripe", one(&"x".repeat(20_000)), 400, "16384 bytes");
    check("acme", "stripe", json!([{"value": "a1"}, {"value": "a1"}]), 400, "twice");
    check(
        "acme",
        "stripe",
        json!([{"value": "a1", "until": "2020-01-01T00:00:00Z"}]),
        400,
        "passed",
    );
    check("acme", "stripe", json!([{"value": "a1", "until": "tomorrow"}]), 400, "");
    check("acme", "stripe", json!([{"value": "a1", "colour": 1}]), 400, "colour");
    check("acme", "stripe", json!("a1"), 400, "");
    check("acme", "stripe", one("env:ACME_SECRET"), 400, "env:");
    check("no/slash".replace('/', "%2F").as_str(), "stripe", one("a1"), 400, "letters, digits");
    check("hapax", "stripe", one("a1"), 400, "reserved");
    check("acme", "strip", one("a1"), 404, "no source strip");
    check("default", "stripe", one("a1"), 409, "config declares");
    check("acme", "shared", one("a1"), 409, "tenant_from");
    // With a shared secret, a signature would match two tenants.
    check("globex", "stripe", one(ACME), 409, "acme/stripe");
    check("globex", "github", one(ACME), 409, "acme/stripe");
    check("globex", "stripe", one(CONFIGURED), 409, "stripe");
    let unknown =
        server.admin_request("PUT", &path("acme", "stripe"), Some(&json!({"secret": "a1"})));
    assert_eq!(unknown.status, 400, "{unknown:?}");

    ask(&server, "acme", ACME, "evt_1").is("accepted");
    assert_eq!(ask(&server, "acme", "a1", "evt_2").status, 401);
    assert_eq!(ask(&server, "globex", ACME, "evt_2").status, 404);
    // A tenant may repeat a secret that it already uses for this source.
    set(&server, "acme", "stripe", json!([{"value": "a1"}, {"value": ACME}]));
    ask(&server, "acme", "a1", "evt_3").is("accepted");
}

#[test]
fn of_many_tenants_that_ask_for_one_secret_at_once_one_gets_it() {
    let house = House::new(CONFIG);
    let server = house.start();
    let statuses: Vec<u16> = std::thread::scope(|scope| {
        let asking: Vec<_> = (0..12)
            .map(|n| {
                let server = &server;
                scope.spawn(move || {
                    put(server, &format!("t{n}"), "stripe", json!([{"value": "whsec_one"}])).status
                })
            })
            .collect();
        asking.into_iter().map(|one| one.join().unwrap()).collect()
    });
    assert_eq!(statuses.iter().filter(|status| **status == 200).count(), 1, "{statuses:?}");
    assert!(statuses.iter().all(|status| [200, 409].contains(status)), "{statuses:?}");
    let served = (0..12)
        .filter(|n| ask(&server, &format!("t{n}"), "whsec_one", "evt_1").status == 200)
        .count();
    assert_eq!(served, 1);
}

#[test]
fn a_tenant_whose_secrets_cannot_be_opened_gets_a_503_and_never_a_401() {
    // The key of the vault is lost: a 401 would make the sender give up on its events.
    let vault = |key: &str| format!("{CONFIG}[vault]\nkey = \"{key}\"\n");
    let (one, two) = (
        "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=",
        "YWJjZGVmZ2hpamtsbW5vcHFyc3R1dnd4eXphYmNkZWY=",
    );
    let house = House::new(&vault(one));
    let server = house.start();
    set(&server, "acme", "stripe", json!([{"value": ACME}]));
    server.stop();

    house.configure(&vault(two));
    let server = house.start();
    for request in [stripe_of("acme", ACME), stripe_of("acme", "whsec_forged")] {
        let answer = server.ask(request.event("evt_1"));
        assert_eq!(answer.status, 503, "{answer:?}");
        assert!(answer.header("retry-after").is_some(), "{answer:?}");
    }
    server.ask(Sender::stripe(CONFIGURED).event("evt_1")).is("accepted");
    let shown = server.admin_get(&path("acme", "stripe")).json();
    assert_eq!((&shown["active"], &shown["secrets"]), (&json!(false), &json!([])), "{shown}");
    assert!(shown["reason"].as_str().unwrap().contains("vault key"), "{shown}");
    // Without the key, the server cannot see whether two tenants share a secret. So it sets no
    // secret until the key is back or the sealed secrets are deleted.
    let refused = put(&server, "globex", "stripe", json!([{"value": GLOBEX}]));
    assert_eq!(refused.status, 503, "{refused:?}");
    assert!(refused.json()["detail"].as_str().unwrap().contains("acme/stripe"), "{refused:?}");
    let said = server.stop();
    assert!(said.contains("acme/stripe cannot be used, and its requests get a 503"), "{said}");

    house.configure(&format!("{}old = [\"{one}\"]\n", vault(two)));
    let server = house.start();
    ask(&server, "acme", ACME, "evt_1").is("accepted");
    set(&server, "globex", "stripe", json!([{"value": GLOBEX}]));
    ask(&server, "globex", GLOBEX, "evt_1").is("accepted");
}

#[test]
fn a_reload_keeps_tenants_and_the_config_wins_where_it_declares_the_same_pair() {
    let house = House::new(CONFIG);
    let server = house.start();
    set(&server, "acme", "stripe", json!([{"value": ACME}]));
    set(&server, "globex", "stripe", json!([{"value": GLOBEX}]));
    let reload = |config: &str| {
        let before = server.stderr.text().matches("reloaded configuration").count();
        house.configure(config);
        server.signal("HUP");
        until("it reloads", || {
            (server.stderr.text().matches("reloaded configuration").count() > before).then_some(())
        });
    };
    reload(&format!("{CONFIG}[sources.stripe.tenants.acme]\nsecrets = [\"whsec_in_the_file\"]\n"));
    ask(&server, "acme", "whsec_in_the_file", "evt_1").is("accepted");
    assert_eq!(ask(&server, "acme", ACME, "evt_2").status, 401);
    ask(&server, "globex", GLOBEX, "evt_1").is("accepted");
    // The config uses the secret of a tenant for another pair: that tenant must no longer be
    // served.
    reload(&format!("{CONFIG}[sources.stripe.tenants.initech]\nsecrets = [\"{GLOBEX}\"]\n"));
    ask(&server, "initech", GLOBEX, "evt_1").is("accepted");
    assert_eq!(ask(&server, "globex", GLOBEX, "evt_2").status, 503);
    ask(&server, "acme", ACME, "evt_3").is("accepted");
    // When a source is removed, its tenants are not served; when it is back, they are served again.
    reload("[sources.github]\nprovider = \"github\"\nsecrets = [\"another\"]\n");
    assert_eq!(ask(&server, "acme", ACME, "evt_4").status, 404);
    reload(CONFIG);
    ask(&server, "acme", ACME, "evt_4").is("accepted");
    ask(&server, "globex", GLOBEX, "evt_4").is("accepted");
}

#[test]
fn the_command_line_sets_shows_and_removes_secrets_of_a_tenant() {
    let house = House::new(CONFIG);
    let server = house.start();
    let admin = format!("http://{}", server.admin);
    let tenants = |args: &[&str]| {
        hapax(&[&["tenants"], args].concat())
            .env("HAPAX_ADMIN", &admin)
            .env("ACME_SECRET", ACME)
            .run()
    };
    let set = tenants(&[
        "set-secrets",
        "acme",
        "stripe",
        "--secret",
        "env:ACME_SECRET",
        "--old",
        "whsec_before",
        "--old-until",
        "2100-01-01T00:00:00Z",
    ]);
    assert_eq!(set.code, 0, "{set:?}");
    assert!(set.stdout.contains("/webhooks/acme/stripe"), "{set:?}");
    assert!(set.stdout.contains("until 2100-01-01T00:00:00Z"), "{set:?}");
    ask(&server, "acme", ACME, "evt_1").is("accepted");
    ask(&server, "acme", "whsec_before", "evt_2").is("accepted");
    let shown = tenants(&["show-secrets", "acme", "stripe", "--json"]);
    assert!(shown.code == 0 && !shown.stdout.contains(ACME), "{shown:?}");
    let refused = tenants(&["set-secrets", "globex", "stripe", "--secret", "env:ACME_SECRET"]);
    assert!(refused.code != 0 && refused.stderr.contains("acme/stripe"), "{refused:?}");
    assert!(!refused.stderr.contains(ACME), "{refused:?}");
    assert_eq!(tenants(&["remove-secrets", "acme", "stripe"]).code, 0);
    assert_eq!(ask(&server, "acme", ACME, "evt_3").status, 404);
    assert_ne!(tenants(&["show-secrets", "acme", "stripe"]).code, 0);
}

// A customer leaves: its data is deleted, another tenant's data stays, and a late copy is still
// recognised.
#[test]
fn the_data_of_a_tenant_is_deleted_and_its_copies_are_still_known() {
    let house = House::new(CONFIG);
    let server = house.start();
    set(&server, "acme", "stripe", json!([{"value": ACME}]));
    set(&server, "globex", "stripe", json!([{"value": GLOBEX}]));
    for event in ["evt_1", "evt_2"] {
        ask(&server, "acme", ACME, event).is("accepted");
        ask(&server, "globex", GLOBEX, event).is("accepted");
    }
    let message = json!({"type": "a", "id": "m1", "tenant": "acme", "data": {"name": "Ann"}});
    assert_eq!(server.admin_post("/api/v1/messages", &message).status, 202);
    let admin = format!("http://{}", server.admin);
    let run = |args: &[&str]| hapax(args).env("HAPAX_ADMIN", &admin).run();
    assert_eq!(run(&["tenants", "delete", "acme"]).code, 2, "it asks for --yes");
    assert_eq!(server.events("tenant=acme").len(), 2);
    assert_eq!(run(&["tenants", "deletion", "acme"]).code, 1);
    let deleted = run(&["tenants", "delete", "acme", "--yes"]);
    assert_eq!(deleted.code, 0, "{deleted:?}");
    until("the deletion to end", || {
        let answer = server.admin_get("/api/v1/tenants/acme/deletion").json();
        (answer["state"] == "done" && answer["events"] == 2 && answer["messages"] == 1)
            .then_some(())
    });
    assert_eq!(server.events("tenant=acme").len(), 0);
    assert_eq!(server.events("tenant=globex").len(), 2);
    assert_eq!(server.admin_get("/api/v1/messages?tenant=acme").json()["items"], json!([]));
    until("the secrets to be gone", || {
        (ask(&server, "acme", ACME, "evt_3").status == 404).then_some(())
    });
    drop(server);
    let server = house.start();
    set(&server, "acme", "stripe", json!([{"value": ACME}]));
    ask(&server, "acme", ACME, "evt_1").is("duplicate");
    assert_eq!(server.admin_post("/api/v1/messages", &message).json()["duplicate"], true);
    ask(&server, "acme", ACME, "evt_4").is("accepted");
    let refused = server.admin_request("DELETE", "/api/v1/tenants/hapax", None);
    assert!(refused.status == 400 && refused.text().contains("reserved"), "{refused:?}");
}
