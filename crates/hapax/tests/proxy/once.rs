//! Idempotency-Keys in front of an app, through the real binary: a retry gets the first answer, and
//! the app does its work once. Its ledger has no constraint, so a second effect is a second entry.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier, Mutex};

use crate::support::charges::{Charge, api, is_replay, kept, problem, proxy, start};
use crate::support::upstream::{Reply, Upstream};
use crate::support::{Answer, House, until};
use aws_lc_rs::hmac;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

/// Sends `count` copies of one request at the same moment; `heard` is called with each answer as it
/// arrives.
fn storm(
    to: SocketAddr,
    copies: usize,
    charge: &Charge<'_>,
    heard: impl Fn(&Answer) + Sync,
) -> Vec<Answer> {
    let start = Barrier::new(copies);
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..copies)
            .map(|_| {
                scope.spawn(|| {
                    start.wait();
                    let answer = charge.send(to);
                    heard(&answer);
                    answer
                })
            })
            .collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    })
}

#[test]
fn fifty_copies_at_once_are_one_charge_and_later_ones_its_replay() {
    // The app takes so long that all other copies are answered while it works.
    const COPIES: usize = 50;
    let (go, gate) = channel::<()>();
    let gate = Mutex::new(gate);
    let app = Upstream::new(move |_| {
        gate.lock().unwrap().recv().unwrap();
        Reply::created(b"charge \xff 1".to_vec())
    });
    let (_house, server, at) = start(&app.url(), "");
    let charge = Charge::with_key("key-1");
    let others = AtomicUsize::new(0);
    let answers = storm(at, COPIES, &charge, |answer| {
        if answer.status == 409 && others.fetch_add(1, Ordering::SeqCst) == COPIES - 2 {
            go.send(()).unwrap();
        }
    });
    let (done, refused): (Vec<_>, Vec<_>) = answers.iter().partition(|it| it.status == 201);
    assert_eq!((done.len(), refused.len()), (1, COPIES - 1));
    for answer in refused {
        assert_eq!(answer.status, 409, "{answer:?}");
        let retry_after: u64 = answer.header("retry-after").unwrap().parse().unwrap();
        assert!((1..=60).contains(&retry_after), "{answer:?}");
        assert!(answer.header("hapax-request-id").is_some(), "{answer:?}");
        problem(answer);
    }
    assert!(!is_replay(done[0]), "{done:?}");
    for _ in 0..3 {
        let replay = charge.send(at);
        assert!(is_replay(&replay), "{replay:?}");
        assert_eq!(kept(&replay), kept(done[0]));
        assert_ne!(replay.header("hapax-request-id"), done[0].header("hapax-request-id"));
    }
    assert_eq!(app.effects().len(), 1);
    let fresh = server.metric("hapax_idempotency_total", &["realm=\"api\"", "outcome=\"fresh\""]);
    assert_eq!(fresh, 1.0);
    server.stop();
}

#[test]
fn copies_that_race_the_answer_are_refused_or_replayed_and_never_run() {
    // The app answers at once, so that some copies arrive before its answer is stored and some
    // after.
    let app = Upstream::counting();
    let (_house, server, at) = start(&app.url(), "");
    for round in 0..10 {
        let key = format!("key-{round}");
        let answers = storm(at, 20, &Charge::with_key(&key), |_| {});
        let first: Vec<_> =
            answers.iter().filter(|it| it.status == 201 && !is_replay(it)).collect();
        assert_eq!(first.len(), 1, "{answers:?}");
        for other in answers.iter().filter(|it| it.status != 409) {
            assert_eq!(kept(other), kept(first[0]));
        }
        assert_eq!(app.effects().len(), round + 1);
    }
    server.stop();
}

#[test]
fn with_wait_a_copy_gets_the_answer_of_the_running_request() {
    let (go, gate) = channel::<()>();
    let gate = Mutex::new(gate);
    let app = Upstream::new(move |_| {
        gate.lock().unwrap().recv().unwrap();
        Reply::created("charge 1")
    });
    let (_house, server, at) = start(&app.url(), "wait = \"50s\"");
    std::thread::scope(|scope| {
        let copies: Vec<_> =
            (0..5).map(|_| scope.spawn(|| Charge::with_key("key-1").send(at))).collect();
        app.wait_for(1);
        go.send(()).unwrap();
        let answers: Vec<_> = copies.into_iter().map(|it| it.join().unwrap()).collect();
        assert!(answers.iter().all(|it| it.status == 201 && it.body == b"charge 1"), "{answers:?}");
        assert_eq!(answers.iter().filter(|it| is_replay(it)).count(), 4);
    });
    assert_eq!(app.effects().len(), 1);
    server.stop();
}

#[test]
fn a_key_means_one_request_of_one_account() {
    let app = Upstream::counting();
    let (house, server, at) = start(&app.url(), "fingerprint_ignore = [\"/client_ts\"]");
    let first = Charge { body: r#"{"amount":100,"client_ts":1}"#, ..Charge::with_key("key-1") };
    assert_eq!(first.send(at).body, b"charge 1");
    // The value differs in every attempt, and the config ignores it.
    let again = Charge { body: r#"{"amount":100,"client_ts":2}"#, ..first.clone() };
    assert!(is_replay(&again.send(at)));
    // The bare and the quoted spelling are the same key.
    assert!(is_replay(&Charge { key: Some("\"key-1\""), ..first.clone() }.send(at)));
    let other = Charge { body: r#"{"amount":200,"client_ts":1}"#, ..first.clone() };
    let refused = other.send(at);
    assert_eq!(refused.status, 409, "{refused:?}");
    assert!(!refused.text().contains("charge 1"), "the first answer is disclosed: {refused:?}");
    assert_eq!(Charge { target: "/charges?dry=1", ..first.clone() }.send(at).status, 409);
    assert_eq!(app.effects().len(), 1);
    // The same key of another account, on another path or with another method is another entry.
    let elsewhere = [
        Charge { account: Some("acct_2"), ..other.clone() },
        Charge { target: "/refunds", ..other.clone() },
        Charge { method: "PUT", ..other.clone() },
    ];
    for (at_most, charge) in elsewhere.iter().enumerate() {
        let answer = charge.send(at);
        assert_eq!(answer.body, format!("charge {}", at_most + 2).into_bytes(), "{answer:?}");
        assert!(is_replay(&charge.send(at)));
    }
    assert_eq!(app.effects().len(), 4);
    // A reload sets 422, the status that the IETF draft names.
    house.configure(&proxy(
        &app.url(),
        "mismatch_status = 422\nfingerprint_ignore = [\"/client_ts\"]",
    ));
    server.signal("HUP");
    server.stderr.wait_for("reloaded configuration and secrets");
    assert_eq!(other.send(at).status, 422);
    assert!(is_replay(&first.send(at)));
    server.stop();
}

#[test]
fn a_route_that_needs_a_key_refuses_requests_without_a_valid_one() {
    let app = Upstream::counting();
    let (_house, server, at) = start(&app.url(), "");
    let charge = Charge::with_key("key-1");
    let long = "k".repeat(256);
    for key in [None, Some(""), Some("\"open"), Some(long.as_str()), Some("tab\there")] {
        let answer = Charge { key, ..charge.clone() }.send(at);
        assert_eq!(answer.status, 400, "{key:?}: {answer:?}");
        problem(&answer);
    }
    let twice = Charge { headers: "idempotency-key: other\r\n", ..charge.clone() };
    assert_eq!(twice.send(at).status, 400);
    // A key without a caller would belong to all callers.
    assert_eq!(Charge { account: None, ..charge.clone() }.send(at).status, 400);
    assert!(app.effects().is_empty());
    // A route that needs no key does not ask for one, and stores nothing.
    let notes = Charge { key: None, target: "/notes", account: None, ..charge.clone() };
    assert_eq!([notes.send(at).status, notes.send(at).status], [201, 201]);
    // Safe methods never need a key.
    let look = Charge { method: "GET", key: None, body: "", ..charge };
    assert_eq!(look.send(at).status, 201);
    assert_eq!(app.effects().len(), 3);
    server.stop();
}

#[test]
fn a_route_needs_its_key_however_its_path_is_spelled() {
    // If the app resolved a spelling that the proxy does not, or the reverse, there would be a
    // charge without a key.
    const SPELLINGS: [&str; 19] = [
        "//charges",
        "/CHARGES",
        "/charges;a",
        "/charges;jsessionid=1",
        "/..;/charges",
        "/x/..;/charges",
        "/%63harges",
        "/%43HARGES",
        "/charges%2f",
        "/charges/",
        "/./charges",
        "/x/../charges",
        "/x/%2e%2e/charges",
        "/\\charges",
        "/%5ccharges",
        "/%2563harges",
        "/charges%252f",
        "http://api.example/charges",
        "http://api.example//Charges;a?b=1",
    ];
    let app = Upstream::counting();
    let (_house, server, at) = start(&app.url(), "");
    let keyless = Charge { key: None, ..Charge::with_key("") };
    for target in SPELLINGS {
        let answer = Charge { target, ..keyless.clone() }.send(at);
        let refused = (answer.status, problem(&answer));
        assert_eq!(refused, (400, "idempotency_key_missing".into()), "{target}");
    }
    for name in ["x-http-method-override", "x-http-method", "x-method-override"] {
        let line = format!("{name}: post\r\n");
        for method in ["GET", "PUT"] {
            let answer = Charge { method, headers: &line, ..keyless.clone() }.send(at);
            assert_eq!(answer.status, 400, "{method} {line}: {answer:?}");
        }
    }
    assert_eq!(Charge { method: "post", ..keyless.clone() }.send(at).status, 400);
    for target in ["/charges%00", "/%00", "/charges%ff", "/charges%2500", "/a%0a"] {
        let answer = Charge { target, ..keyless.clone() }.send(at);
        assert_eq!((answer.status, problem(&answer)), (400, "path_malformed".into()), "{target}");
    }
    assert!(app.effects().is_empty());
    // With a key, all spellings are one path, so there is one charge. The app gets the client's
    // spelling. Another spelling may be another resource to the app, so a request that uses it gets
    // a 409 and not the first answer.
    let spelled = |target| Charge { target, ..Charge::with_key("key-1") }.send(at);
    assert_eq!(spelled("/x/..;/CHARGES").status, 201);
    assert!(is_replay(&spelled("/x/..;/CHARGES")));
    assert_eq!(app.effects()[0].line, "POST /x/..;/CHARGES HTTP/1.1");
    for target in SPELLINGS.into_iter().filter(|target| !target.contains('?')) {
        assert_eq!(spelled(target).status, 409, "{target}");
    }
    assert_eq!(app.effects().len(), 1);
    server.stop();
}

#[test]
fn tokens_that_identify_the_caller_are_never_stored_or_logged() {
    // The database, the log and the forwarded headers must not contain a credential of a caller.
    let app = Upstream::counting();
    let (house, server, at) = start(&app.url(), "scope = \"header:authorization\"");
    let token = "s3cr3t-token-hunter2";
    let line = format!("authorization: Bearer {token}\r\n");
    let charge = Charge { headers: &line, body: "hunter2-body", ..Charge::with_key("key-1") };
    assert_eq!(charge.send(at).status, 201);
    assert!(is_replay(&charge.send(at)));
    let other = Charge { headers: "authorization: Bearer other\r\n", ..charge.clone() };
    assert!(!is_replay(&other.send(at)));
    let asked = app.effects();
    // The app gets its client's token, and Hapax's name of the caller without the token.
    assert_eq!(asked[0].header("authorization"), Some(format!("Bearer {token}").as_str()));
    let scope = asked[0].header("hapax-scope").unwrap().to_owned();
    assert!(!scope.contains("hunter2") && scope != asked[1].header("hapax-scope").unwrap());
    let log = server.stop();
    assert!(!log.contains("hunter2") && log.contains("proxy") && log.contains("replay"), "{log}");
    let bytes = [house.database(), house.database().with_extension("db-wal")]
        .iter()
        .flat_map(|file| std::fs::read(file).unwrap_or_default())
        .collect::<Vec<u8>>();
    assert!(!bytes.is_empty());
    assert!(!bytes.windows(7).any(|seven| seven == b"hunter2"), "kept in the database");
}

#[test]
fn a_claim_of_the_token_names_the_caller_though_the_token_changes() {
    let encode = |text: &str| URL_SAFE_NO_PAD.encode(text);
    let app = Upstream::counting();
    let (_house, server, at) = start(&app.url(), "scope = \"jwt-unverified:sub\"");
    let bearer = |claims: &str, signature: &str| {
        format!("authorization: Bearer {}.{}.{signature}\r\n", encode("{}"), encode(claims))
    };
    let charge =
        |line: &str| Charge { headers: line, account: None, ..Charge::with_key("key-1") }.send(at);
    assert_eq!(charge(&bearer(r#"{"sub":"u1","exp":1}"#, "one")).status, 201);
    assert!(is_replay(&charge(&bearer(r#"{"sub":"u1","exp":2}"#, "two"))));
    assert!(!is_replay(&charge(&bearer(r#"{"sub":"u2","exp":1}"#, "one"))));
    for nameless in [bearer("{}", "x"), "authorization: Bearer x\r\n".into(), String::new()] {
        assert_eq!(charge(&nameless).status, 400, "{nameless}");
    }
    assert_eq!(app.effects().len(), 2);
    server.stop();
}

/// The Authorization line of a request with these claims, signed with HS256 and this secret.
fn signed(header: &str, claims: &str, secret: &str) -> String {
    let encode = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
    let content = format!("{}.{}", encode(header.as_bytes()), encode(claims.as_bytes()));
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes());
    let signature = encode(hmac::sign(&key, content.as_bytes()).as_ref());
    format!("authorization: Bearer {content}.{signature}\r\n")
}

#[test]
fn a_claim_names_the_caller_only_where_its_signature_holds() {
    // Any client can write a token with the claim "u1", but must not get the answers of u1.
    const HS256: &str = r#"{"alg":"HS256","kid":"a"}"#;
    let (secret, next) =
        ("a-shared-secret-of-32-bytes-or-more", "the-next-secret-of-32-bytes-or-more");
    let set = |secrets: &[(&str, &str)]| {
        let keys = secrets.iter().map(|(kid, secret)| {
            let k = URL_SAFE_NO_PAD.encode(secret);
            format!(r#"{{"kty":"oct","alg":"HS256","kid":"{kid}","k":"{k}"}}"#)
        });
        format!(r#"{{"keys":[{}]}}"#, keys.collect::<Vec<_>>().join(","))
    };
    let app = Upstream::counting();
    let config = proxy(&app.url(), "scope = \"jwt:sub\"\njwks = \"file:DIR/jwks.json\"");
    let house = House::new(&config);
    std::fs::write(house.path().join("jwks.json"), set(&[("a", secret)])).unwrap();
    let server = house.start();
    let at = api(&server);
    let charge =
        |line: &str| Charge { headers: line, account: None, ..Charge::with_key("key-1") }.send(at);
    let good = signed(HS256, r#"{"sub":"u1","exp":4102444800}"#, secret);
    assert_eq!(charge(&good).status, 201);
    // This is another token of the same caller.
    assert!(is_replay(&charge(&signed(HS256, r#"{"sub":"u1","exp":4102444801}"#, secret))));
    let none = r#"{"alg":"none"}"#;
    let unsigned = signed(none, r#"{"sub":"u1"}"#, secret);
    let bare = format!("{}.\r\n", unsigned.trim_end().rsplit_once('.').unwrap().0);
    for forged in [
        signed(HS256, r#"{"sub":"u1"}"#, "another-secret-of-32-bytes-or-more!"),
        signed(HS256, r#"{"sub":"u1","exp":1700000000}"#, secret),
        signed(HS256, r#"{"sub":"u1","nbf":4102444800}"#, secret),
        signed(r#"{"alg":"HS256","kid":"b"}"#, r#"{"sub":"u1"}"#, secret),
        signed(r#"{"alg":"HS384","kid":"a"}"#, r#"{"sub":"u1"}"#, secret),
        signed(HS256, "{}", secret),
        good.replace("Bearer", "Basic"),
        good.trim_end().to_owned() + "=\r\n",
        unsigned,
        bare,
        "authorization: Bearer x\r\n".into(),
        String::new(),
    ] {
        let answer = charge(&forged);
        assert_eq!((answer.status, problem(&answer)), (401, "token_invalid".into()), "{forged}");
        assert!(answer.header("www-authenticate").is_some());
    }
    assert_eq!(app.effects().len(), 1);
    // The keys change: the old token is refused, and its caller is the same.
    std::fs::write(house.path().join("jwks.json"), set(&[("b", next)])).unwrap();
    server.signal("HUP");
    server.stderr.wait_for("reloaded configuration and secrets");
    assert_eq!(charge(&good).status, 401);
    let again = signed(r#"{"alg":"HS256","kid":"b"}"#, r#"{"sub":"u1"}"#, next);
    assert!(is_replay(&charge(&again)));
    assert_eq!(app.effects().len(), 1);
    let log = server.stop();
    assert!(!log.contains(secret) && !log.contains(&URL_SAFE_NO_PAD.encode(secret)), "{log}");
}

#[test]
fn a_caller_that_floods_with_new_keys_gets_429_and_the_others_are_served() {
    let app = Upstream::counting();
    let (house, server, at) = start(&app.url(), "scope = \"header:x-account-id\"\nmax_keys = 5");
    let of = |account: &str, key: &str| {
        Charge { account: Some(account), ..Charge::with_key(key) }.send(at)
    };
    let keys: Vec<String> = (0..30).map(|n| format!("key-{n}")).collect();
    // All requests are sent at once, so that a check without a lock would admit too many.
    let answers: Vec<_> = std::thread::scope(|scope| {
        let clients: Vec<_> =
            keys.iter().map(|key| (key, scope.spawn(|| of("acct_1", key)))).collect();
        clients.into_iter().map(|(key, client)| (key, client.join().unwrap())).collect()
    });
    let (done, refused): (Vec<_>, Vec<_>) = answers.iter().partition(|(_, it)| it.status == 201);
    assert_eq!((done.len(), refused.len()), (5, 25), "{answers:?}");
    for (_, answer) in refused {
        assert_eq!(
            (answer.status, problem(answer)),
            (429, "idempotency_quota".into()),
            "{answer:?}"
        );
        assert_eq!(answer.header("retry-after"), Some("60"), "{answer:?}");
    }
    assert_eq!(app.effects().len(), 5);
    // A retry of a known key is never refused, and other callers are not refused either.
    for (key, first) in &done {
        let again = of("acct_1", key);
        assert!(is_replay(&again) && kept(&again) == kept(first), "{again:?}");
    }
    assert_eq!(of("acct_2", "key-1").status, 201);
    assert_eq!(server.metric("hapax_idempotency_total", &["outcome=\"over_quota\""]), 25.0);
    // The count survives a crash.
    server.kill();
    let server = house.start();
    let at = api(&server);
    let of = |account: &str, key: &str| {
        Charge { account: Some(account), ..Charge::with_key(key) }.send(at)
    };
    assert_eq!(of("acct_1", "one more").status, 429);
    assert_eq!(of("acct_2", "key-2").status, 201);
    server.stop();
}

#[test]
fn large_answers_are_kept_up_to_the_quota_and_nothing_runs_again() {
    let app = Upstream::new(|_| Reply::created(vec![b'x'; 3_000]));
    let keys = "scope = \"header:x-account-id\"\nmax_bytes = \"4KiB\"";
    let (_house, server, at) = start(&app.url(), keys);
    for key in ["key-1", "key-2"] {
        let first = Charge::with_key(key).send(at);
        assert_eq!((first.status, first.body.len()), (201, 3_000));
        let again = Charge::with_key(key).send(at);
        assert!(is_replay(&again) && kept(&again) == kept(&first), "{again:?}");
    }
    assert_eq!(Charge::with_key("key-3").send(at).status, 429);
    assert_eq!(app.effects().len(), 2);
    server.stop();
}

#[test]
fn answers_outlive_a_restart() {
    let app = Upstream::counting();
    let (house, server, at) = start(&app.url(), "");
    let first = Charge::with_key("key-1").send(at);
    server.stop();
    let server = house.start();
    let replay = Charge::with_key("key-1").send(api(&server));
    assert!(is_replay(&replay) && kept(&replay) == kept(&first), "{replay:?}");
    // The same holds after a SIGKILL.
    server.kill();
    let server = house.start();
    let replay = Charge::with_key("key-1").send(api(&server));
    assert!(is_replay(&replay) && kept(&replay) == kept(&first), "{replay:?}");
    assert_eq!(app.effects().len(), 1);
    server.stop();
}

#[test]
fn neither_a_client_that_hangs_up_nor_a_shutdown_interrupts_a_request() {
    // The client hangs up while the app works, then the server shuts down, and only then does the
    // app answer. The answer must still be stored.
    let (go, gate) = channel::<()>();
    let gate = Mutex::new(gate);
    let app = Arc::new(Upstream::new(move |_| {
        gate.lock().unwrap().recv().unwrap();
        Reply::created("charge 1")
    }));
    let (house, mut server, at) = start(&app.url(), "");
    let mut gone = crate::support::Wire::connect(at);
    gone.write(Charge::with_key("key-1").bytes());
    app.wait_for(1);
    drop(gone);
    server.signal("TERM");
    server.stderr.wait_for("shutting down");
    until("no connection is accepted", || {
        crate::support::Wire::try_connect(at).is_err().then_some(())
    });
    go.send(()).unwrap();
    assert_eq!(server.wait().code(), Some(0), "{}", server.stderr.text());
    let server = house.start();
    let replay = Charge::with_key("key-1").send(api(&server));
    assert!(is_replay(&replay) && replay.body == b"charge 1", "{replay:?}");
    assert_eq!(app.effects().len(), 1);
    server.stop();
}

#[test]
fn a_shutdown_that_ends_before_a_long_request_leaves_its_key_in_progress() {
    // The app takes longer than the drain time. Whether the app did its work is unknown, so the key
    // must stay in progress over the restart: if the request ran again at once, the client would be
    // charged twice.
    let (go, gate) = channel::<()>();
    let gate = Mutex::new(gate);
    let app = Upstream::new(move |_| {
        let _ = gate.lock().unwrap().recv();
        Reply::created("charge 1")
    });
    let config = format!("drain = \"100ms\"\n{}", proxy(&app.url(), "lease = \"10m\""));
    let house = House::new(&config);
    let mut server = house.start();
    let mut client = crate::support::Wire::connect(api(&server));
    client.write(Charge::with_key("key-1").bytes());
    app.wait_for(1);
    server.signal("TERM");
    // The exit code or the log reports that the request was cut.
    let status = server.wait();
    let log = server.stderr.text();
    assert!(status.code().is_some(), "it ended by itself: {status:?} {log}");
    assert!(client.try_answer().is_none_or(|answer| answer.status >= 500), "nothing is known");
    let server = house.start();
    for _ in 0..3 {
        let answer = Charge::with_key("key-1").send(api(&server));
        let refused = (answer.status, problem(&answer));
        assert_eq!(refused, (409, "idempotency_in_progress".into()), "{answer:?}");
    }
    drop(go);
    assert_eq!(app.effects().len(), 1);
    server.stop();
}

#[test]
fn a_reload_applies_a_new_upstream_and_names_what_needs_a_restart() {
    let (old, new) = (Upstream::counting(), Upstream::counting());
    let (house, server, at) = start(&old.url(), "");
    assert_eq!(Charge::with_key("key-1").send(at).status, 201);
    let moved = proxy(&new.url(), "").replace("127.0.0.1:0", "127.0.0.1:1");
    house.configure(&format!(
        "{moved}{}",
        moved.replace("proxies.api", "proxies.more").replace(":1\"", ":2\"")
    ));
    server.signal("HUP");
    server.stderr.wait_for("reloaded configuration and secrets");
    let said = server.stderr.text();
    assert!(said.contains("proxies.api.listen changed; restart the server to apply it"), "{said}");
    assert!(said.contains("proxies.more changed"), "{said}");
    // The listener and the stored answers stay, and new requests go to the new app.
    assert!(is_replay(&Charge::with_key("key-1").send(at)));
    assert_eq!(Charge::with_key("key-2").send(at).status, 201);
    assert_eq!((old.effects().len(), new.effects().len()), (1, 1));
    server.stop();
}

#[test]
fn a_proxy_is_printed_before_the_ready_line() {
    let app = Upstream::counting();
    let house = House::new(&proxy(&app.url(), ""));
    let server = house.start();
    let said = server.stdout.text();
    let expected = format!("hapax proxy api http://{} -> {}\n", api(&server), app.url());
    assert!(said.starts_with(&expected) && said.contains("\nhapax ready: ingress"), "{said}");
    server.stop();
}
