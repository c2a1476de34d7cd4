//! A proxy whose app fails. A key is free if the app cannot have seen the request, and in progress
//! until the end of its lease if it may have. A request without a key is streamed.

use std::io::{BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use crate::support::charges::{Charge, api, is_replay, problem, proxy, start};
use crate::support::upstream::{self, Reply, Upstream};
use crate::support::{Answer, House, Wire, until};

/// The lease: short enough to wait for its end.
const LEASE: Duration = Duration::from_secs(2);

/// The pause between two attempts of a client that was asked to retry.
const BACK_OFF: Duration = Duration::from_millis(20);

/// Sends until the key is no longer in progress; every answer until then is a 409.
fn until_let_in(charge: &Charge<'_>, to: SocketAddr) -> Answer {
    until("the key is let go", || {
        let answer = charge.send(to);
        if answer.status == 409 {
            std::thread::park_timeout(BACK_OFF);
            return None;
        }
        Some(answer)
    })
}

#[test]
fn an_app_that_is_down_frees_its_keys_at_once() {
    let at_app = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (_house, server, at) = start(&format!("http://{at_app}"), "");
    let charge = Charge::with_key("key-1");
    for _ in 0..3 {
        let answer = charge.send(at);
        assert_eq!((answer.status, problem(&answer).as_str()), (502, "not_reached"), "{answer:?}");
    }
    // The app starts, and the very next attempt succeeds, without traces of the earlier ones.
    let listener = TcpListener::bind(at_app).unwrap();
    std::thread::scope(|scope| {
        let app = scope.spawn(|| {
            let mut stream = listener.accept().unwrap().0;
            let asked = upstream::read(&mut BufReader::new(stream.try_clone().unwrap())).unwrap();
            stream.write_all(b"HTTP/1.1 201 X\r\ncontent-length: 2\r\n\r\nok").unwrap();
            asked
        });
        assert_eq!(charge.send(at).status, 201);
        assert_eq!(app.join().unwrap().number("hapax-attempt"), 1);
    });
    assert!(is_replay(&charge.send(at)));
    assert!(server.stderr.text().contains("cannot reach the upstream of api"));
    server.stop();
}

#[test]
fn an_unknown_host_and_a_failed_handshake_free_the_key() {
    let app = Upstream::counting();
    // The proxy uses TLS to a server that does not support it.
    let tls = format!("https://{}", app.address);
    for nowhere in ["http://no-such-host.invalid", &tls] {
        let (_house, server, at) = start(nowhere, "");
        for _ in 0..2 {
            let answer = Charge::with_key("key-1").send(at);
            assert_eq!((answer.status, problem(&answer).as_str()), (502, "not_reached"));
        }
        server.stop();
    }
}

#[test]
fn a_handshake_that_hangs_times_out_and_frees_the_key() {
    // The connection is open, so it looks as if a request had been sent; none was.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let (_house, server, at) = start(&format!("https://{}", silent.local_addr().unwrap()), "");
    let answer = Charge::with_key("key-1").send(at);
    assert_eq!((answer.status, problem(&answer).as_str()), (502, "not_reached"), "{answer:?}");
    server.stop();
}

#[test]
fn an_app_that_is_cut_after_its_work_keeps_the_key_busy_until_the_lease_ends() {
    // The answer is lost in each possible way: the outcome is unknown to the proxy, and the work
    // was done.
    let ways: [fn() -> Reply; 5] = [
        || Reply::Cut,
        || Reply::Half,
        || Reply::Answer(502, String::new(), b"gateway".to_vec()),
        || Reply::Answer(503, String::new(), b"busy".to_vec()),
        || Reply::Answer(504, String::new(), b"late".to_vec()),
    ];
    std::thread::scope(|scope| {
        for way in ways {
            scope.spawn(move || lost(way));
        }
    });
}

fn lost(way: fn() -> Reply) {
    let app = Upstream::new(move |asked| match asked.number("hapax-attempt") {
        1 => way(),
        _second => Reply::created("charge 2"),
    });
    let (_house, server, at) = start(&app.url(), "lease = \"2s\"");
    let charge = Charge::with_key("key-1");
    let began = Instant::now();
    let answer = charge.send(at);
    assert_eq!((answer.status, problem(&answer).as_str()), (502, "unknown_outcome"), "{answer:?}");
    let first = charge.send(at);
    if began.elapsed() < LEASE {
        assert_eq!(first.status, 409, "{first:?}");
        assert!(first.header("retry-after").is_some(), "{first:?}");
    }
    let answer = until_let_in(&charge, at);
    assert!(began.elapsed() >= LEASE, "let in after {:?}", began.elapsed());
    assert_eq!((answer.status, answer.body.as_slice()), (201, &b"charge 2"[..]));
    let effects = app.effects();
    assert_eq!(effects.len(), 2, "{effects:?}");
    let (one, two) = (&effects[0], &effects[1]);
    assert_eq!((one.number("hapax-attempt"), two.number("hapax-attempt")), (1, 2));
    assert!(one.number("hapax-fence") < two.number("hapax-fence"));
    for same in ["idempotency-key", "hapax-scope"] {
        assert_eq!(one.header(same), two.header(same));
    }
    assert!(is_replay(&charge.send(at)));
    server.stop();
}

#[test]
fn a_request_to_a_slow_app_times_out_before_its_lease_is_over() {
    // The app answers after the timeout: that answer must not count.
    let (go, gate) = channel::<()>();
    let gate = std::sync::Mutex::new(gate);
    let app = Upstream::new(move |asked| {
        if asked.number("hapax-attempt") == 1 {
            gate.lock().unwrap().recv().unwrap();
            return Reply::created("too late");
        }
        Reply::created("charge 2")
    });
    let (_house, server, at) = start(&app.url(), "lease = \"2s\"");
    let charge = Charge::with_key("key-1");
    let answer = charge.send(at);
    assert_eq!((answer.status, problem(&answer).as_str()), (502, "unknown_outcome"));
    go.send(()).unwrap();
    assert_eq!(until_let_in(&charge, at).body, b"charge 2");
    assert!(server.stderr.text().contains("unknown outcome of a request"));
    server.stop();
}

#[test]
fn a_client_that_was_refused_before_any_work_may_retry_at_once() {
    let app = Upstream::new(|asked| match asked.header("authorization") {
        Some(_) => Reply::created("charge 1"),
        None => Reply::Answer(401, String::new(), b"who are you?".to_vec()),
    });
    let (_house, server, at) = start(&app.url(), "");
    let charge = Charge::with_key("key-1");
    assert_eq!(charge.send(at).status, 401);
    let answer = Charge { headers: "authorization: Bearer x\r\n", ..charge.clone() }.send(at);
    assert_eq!(answer.status, 201);
    // Every answer of the app is stored, including a failure.
    let app = Upstream::new(|_| Reply::Answer(500, String::new(), b"no".to_vec()));
    let (_house, failing, at) = start(&app.url(), "");
    assert_eq!(charge.send(at).status, 500);
    assert!(is_replay(&charge.send(at)));
    assert_eq!(app.effects().len(), 1);
    failing.stop();
    server.stop();
}

#[test]
fn a_pooled_connection_that_the_app_has_closed_is_replaced_silently() {
    // The app closes each connection right after its answer without announcing it. The proxy
    // notices only with the next request.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at_app = listener.local_addr().unwrap();
    let (closed, ends) = channel::<()>();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            upstream::read(&mut BufReader::new(stream.try_clone().unwrap())).unwrap();
            stream.write_all(b"HTTP/1.1 201 X\r\ncontent-length: 2\r\n\r\nok").unwrap();
            drop(stream);
            closed.send(()).unwrap();
        }
    });
    let (_house, server, at) = start(&format!("http://{at_app}"), "");
    for n in 0..20 {
        let key = format!("key-{n}");
        assert_eq!(Charge::with_key(&key).send(at).status, 201, "{n}");
        ends.recv().unwrap();
        // A request after the end of that connection shows that the end was processed.
        assert_eq!(server.admin_get("/healthz").status, 200);
    }
    server.stop();
}

#[test]
fn the_app_gets_the_client_s_request_and_the_headers_of_hapax() {
    let app = Upstream::new(|_| {
        let headers = "connection: x-private\r\nx-private: 1\r\nkeep-alive: timeout=5\r\n\
                       x-kept: a\r\nx-kept: b\r\nlocation: http://elsewhere.example/\r\n\
                       idempotency-replayed: true\r\n";
        Reply::Answer(302, headers.to_owned(), b"moved".to_vec())
    });
    let (_house, server, at) = start(&format!("{}/v1/", app.url()), "");
    let headers = "hapax-fence: 99\r\nhapax-anything: forged\r\nhapax-scope: forged\r\n\
                   connection: keep-alive, x-mine\r\nx-mine: 1\r\nte: trailers\r\n\
                   x-forwarded-for: 198.51.100.7\r\nx-forwarded-host: evil.example\r\n\
                   x-custom: yes\r\n";
    let charge = Charge { headers, target: "/charges?a=%20b", ..Charge::with_key("\"key-1\"") };
    let answer = charge.send(at);
    let asked = &app.effects()[0];
    assert_eq!(asked.line, "POST /v1/charges?a=%20b HTTP/1.1");
    for (name, expected) in [
        ("host", Some("api.example")),
        ("idempotency-key", Some("key-1")),
        ("hapax-scope", Some("api/acct_1/POST /charges")),
        ("hapax-attempt", Some("1")),
        ("hapax-anything", None),
        ("x-mine", None),
        ("te", None),
        ("x-custom", Some("yes")),
        ("x-forwarded-for", Some("198.51.100.7, 127.0.0.1")),
        ("x-forwarded-proto", Some("http")),
        ("x-forwarded-host", Some("api.example")),
        ("content-length", Some("14")),
    ] {
        assert_eq!(asked.header(name), expected, "{name}");
    }
    assert_ne!(asked.number("hapax-fence"), 99);
    assert_eq!(asked.body, charge.body.as_bytes());
    // Redirects are not followed, and headers of the app's connection are removed.
    assert_eq!((answer.status, answer.body.as_slice()), (302, &b"moved"[..]));
    assert_eq!(answer.header("location"), Some("http://elsewhere.example/"));
    assert_eq!(answer.header("x-private").or(answer.header("keep-alive")), None, "{answer:?}");
    assert_eq!(answer.head.matches("x-kept: ").count(), 2, "{answer:?}");
    // The app does not decide whether an answer is a replay.
    assert!(!is_replay(&answer) && is_replay(&charge.send(at)), "{answer:?}");
    // Without a key there are no such headers, and none can be forged.
    let plain = Charge { key: None, target: "/notes", ..charge.clone() }.send(at);
    assert!(plain.header("hapax-request-id").is_some());
    let asked = &app.effects()[1];
    for name in ["hapax-fence", "hapax-scope", "hapax-attempt", "idempotency-key"] {
        assert_eq!(asked.header(name), None);
    }
    server.stop();
}

#[test]
fn other_protocols_and_paths_that_climb_are_refused_and_never_sent() {
    let app = Upstream::counting();
    let (_house, server, at) = start(&format!("{}/v1", app.url()), "");
    let plain = Charge { key: None, target: "/notes", ..Charge::with_key("") };
    let websocket = "connection: upgrade\r\nupgrade: websocket\r\n";
    for (charge, status, kind) in [
        (Charge { headers: websocket, ..plain.clone() }, 501, "upgrade"),
        (Charge { headers: websocket, ..Charge::with_key("key-1") }, 501, "upgrade"),
        (Charge { target: "/../admin", ..plain.clone() }, 400, "target"),
        (Charge { target: "/%2e%2e/admin", ..Charge::with_key("key-1") }, 400, "target"),
    ] {
        let answer = charge.send(at);
        assert_eq!((answer.status, problem(&answer).as_str()), (status, kind), "{charge:?}");
    }
    assert!(app.effects().is_empty());
    // An offer to upgrade to HTTP/2 is ignored, and the request is forwarded.
    let offer =
        "connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n";
    assert_eq!(Charge { headers: offer, ..plain }.send(at).status, 201);
    // The keys of refused requests are free.
    assert_eq!(Charge::with_key("key-1").send(at).status, 201);
    server.stop();
}

#[test]
fn no_client_can_forge_hapax_headers_by_another_spelling() {
    // A CGI server reads `hapax_fence` as `hapax-fence`: a client could choose fence, key and
    // account of the app's own transaction.
    let app = Upstream::counting();
    let (_house, server, at) = start(&app.url(), "");
    let forged = "hapax_fence: 99\r\nHapax_Scope: forged\r\nhapax-scope_: forged\r\n\
                  idempotency_key: other\r\nwebhook_id: evt_1\r\nx_account_id: acct_2\r\n\
                  x-account_id: acct_2\r\nx_forwarded_for: 10.0.0.1\r\nx_forwarded_host: evil\r\n\
                  x_forwarded-proto: https\r\nforwarded_: for=1\r\ntransfer_encoding: chunked\r\n\
                  content_length: 0\r\nx_twice: 1\r\nx-twice: 2\r\napi_key: kept\r\n";
    for charge in [
        Charge { headers: forged, ..Charge::with_key("key-1") },
        Charge { headers: forged, key: None, target: "/notes", ..Charge::with_key("") },
    ] {
        assert_eq!(charge.send(at).status, 201, "{charge:?}");
    }
    for asked in app.effects() {
        let spelled: Vec<_> = asked.headers.iter().filter(|(name, _)| name.contains('_')).collect();
        let mut left: Vec<_> = spelled.iter().map(|(name, _)| name.as_str()).collect();
        left.sort_unstable();
        assert_eq!(left, ["api_key", "forwarded_"], "{asked:?}");
        assert_eq!(asked.header("x-twice"), Some("2"));
        assert_eq!(asked.header("x-account-id"), Some("acct_1"));
    }
    assert_eq!(app.effects()[0].header("idempotency-key"), Some("key-1"));
    // The header that scopes the key has two values, and the app may use the value that Hapax does
    // not.
    let twice = "x-account-id: acct_2\r\n";
    assert_eq!(Charge { headers: twice, ..Charge::with_key("key-2") }.send(at).status, 400);
    assert_eq!(app.effects().len(), 2);
    server.stop();
}

#[test]
fn a_connection_header_cannot_hide_from_the_app_what_the_key_is_scoped_by() {
    let app = Upstream::counting();
    let (_house, server, at) = start(&app.url(), "");
    for named in [
        "x-account-id",
        "X-Account-Id",
        "x_account_id",
        "close, authorization",
        "authorization",
        "cookie",
        "content-type",
        "content-length",
        "host",
        "idempotency-key",
        "hapax-fence",
        "keep-alive, hapax-anything",
        "x-forwarded-for",
    ] {
        let line = format!("connection: {named}\r\n");
        for charge in [
            Charge { headers: &line, ..Charge::with_key("key-1") },
            Charge { headers: &line, key: None, target: "/notes", ..Charge::with_key("") },
        ] {
            let answer = charge.send(at);
            let refused = (answer.status, problem(&answer));
            assert_eq!(refused, (400, "connection_header".into()), "{charge:?}");
        }
    }
    // The forbidden name is in a second line, after a harmless one.
    let second = "connection: close\r\nconnection: x-account-id\r\n";
    assert_eq!(Charge { headers: second, ..Charge::with_key("key-1") }.send(at).status, 400);
    assert!(app.effects().is_empty());
    // No key was reserved, and `connection` may still name headers that are only about the
    // connection.
    let own = "connection: close, x-mine\r\nx-mine: 1\r\n";
    assert_eq!(Charge { headers: own, ..Charge::with_key("key-1") }.send(at).status, 201);
    assert_eq!(app.effects()[0].header("x-mine"), None);
    server.stop();
}

/// Reads exactly that many bytes.
fn exactly(stream: &mut TcpStream, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

/// Reads up to the end of a head, byte by byte.
fn head(stream: &mut TcpStream) -> String {
    let mut read = Vec::new();
    while !read.ends_with(b"\r\n\r\n") {
        read.extend(exactly(stream, 1));
    }
    String::from_utf8(read).unwrap()
}

#[test]
fn without_a_key_bodies_of_any_size_pass_through_as_they_come() {
    // The body is far larger than any body with a key may be. Each side sends its second half only
    // after the other has seen the first: a proxy that buffers the whole body would wait for ever.
    const HALF: usize = 8 << 20;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at_app = listener.local_addr().unwrap();
    let (_house, server, at) = start(&format!("http://{at_app}"), "");
    let (seen, half_seen) = channel::<()>();
    let (heard, half_heard) = channel::<()>();
    std::thread::scope(|scope| {
        let app = scope.spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            let asked = head(&mut stream);
            let first = exactly(&mut stream, HALF);
            seen.send(()).unwrap();
            let second = exactly(&mut stream, HALF);
            let length = 2 * HALF;
            write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n").unwrap();
            stream.write_all(&first).unwrap();
            half_heard.recv().unwrap();
            stream.write_all(&second).unwrap();
            asked
        });
        let body: Vec<u8> = (0..2 * HALF).map(|at| (at / 251) as u8).collect();
        let mut wire = Wire::connect(at);
        let length = body.len();
        wire.write(format!(
            "PUT /files/1 HTTP/1.1\r\nhost: api.example\r\ncontent-length: {length}\r\n\r\n"
        ));
        wire.write(&body[..HALF]);
        half_seen.recv().unwrap();
        wire.write(&body[HALF..]);
        let answer_head = head(&mut wire.stream);
        assert!(answer_head.starts_with("HTTP/1.1 200"), "{answer_head}");
        let mut back = exactly(&mut wire.stream, HALF);
        heard.send(()).unwrap();
        back.extend(exactly(&mut wire.stream, HALF));
        assert!(back == body, "the bytes differ");
        let asked = app.join().unwrap();
        assert!(asked.contains(&format!("content-length: {length}\r\n")), "{asked}");
    });
    // With a key the body is buffered first, so it has a limit.
    let large = "x".repeat((1 << 20) + 1);
    let answer = Charge { body: &large, ..Charge::with_key("key-1") }.send(at);
    assert_eq!(answer.status, 413, "{answer:?}");
    server.stop();
}

#[test]
fn chunks_pass_through_one_by_one() {
    // A stream of events: each chunk must arrive before the next is sent, and the stream never
    // ends.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at_app = listener.local_addr().unwrap();
    let (_house, server, at) = start(&format!("http://{at_app}"), "");
    let (heard, next) = channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            head(&mut stream);
            write!(stream, "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").unwrap();
            for _ in 0..3 {
                write!(stream, "5\r\nevent\r\n").unwrap();
                next.recv().unwrap();
            }
            // The app's connection ends with its client's.
            let mut rest = Vec::new();
            let _ = stream.read_to_end(&mut rest);
            assert!(rest.is_empty());
        });
        let mut wire = Wire::connect(at);
        wire.write("GET /events HTTP/1.1\r\nhost: api.example\r\n\r\n");
        assert!(head(&mut wire.stream).contains("transfer-encoding: chunked"));
        for _ in 0..3 {
            assert_eq!(exactly(&mut wire.stream, 10), b"5\r\nevent\r\n");
            heard.send(()).unwrap();
        }
    });
    server.stop();
}

#[test]
fn a_client_that_never_ends_its_body_gets_an_error_and_holds_no_key() {
    // Of the request with a key the app has seen nothing. Of the request without a key the app has seen the
    // beginning.
    let app = Upstream::counting();
    let config = format!("body_timeout = \"300ms\"\n{}", proxy(&app.url(), ""));
    let house = House::new(&config);
    let server = house.start();
    let at = api(&server);
    let charge = Charge::with_key("key-1");
    for charge in [charge.clone(), Charge { key: None, target: "/notes", ..charge.clone() }] {
        let bytes = charge.bytes();
        let mut wire = Wire::connect(at);
        wire.write(&bytes[..bytes.len() - 1]);
        let answer = wire.answer();
        assert_eq!((answer.status, problem(&answer).as_str()), (408, "slow"), "{answer:?}");
        assert!(answer.header("hapax-request-id").is_some());
        // Bytes that arrive later must not be read as another request.
        assert_eq!(answer.header("connection"), Some("close"));
        assert!(wire.ends());
    }
    assert!(app.effects().is_empty());
    assert_eq!(charge.send(at).status, 201);
    server.stop();
}

#[test]
fn an_answer_too_large_to_store_reaches_its_client_and_the_work_is_never_repeated() {
    let large = vec![b'x'; (1 << 20) + 1];
    let body = large.clone();
    let app = Upstream::new(move |_| Reply::created(body.clone()));
    let (_house, server, at) = start(&app.url(), "");
    let answer = Charge::with_key("key-1").send(at);
    assert_eq!((answer.status, answer.body.len()), (201, large.len()));
    let again = Charge::with_key("key-1").send(at);
    assert!(again.status == 500 && is_replay(&again), "{again:?}");
    assert_eq!(app.effects().len(), 1);
    server.stop();
}

#[test]
fn many_requests_share_one_connection_on_both_sides() {
    let app = Upstream::counting();
    let (_house, server, at) = start(&app.url(), "");
    let mut wire = Wire::connect(at);
    for n in 1..=50 {
        let key = format!("key-{n}");
        let answer = wire.try_ask(&Charge::with_key(&key).bytes()).expect("kept alive");
        assert_eq!(answer.body, format!("charge {}", 2 * n - 1).into_bytes());
        let plain = Charge { key: None, target: "/notes", ..Charge::with_key("") };
        assert_eq!(wire.try_ask(&plain.bytes()).map(|it| it.status), Some(201));
    }
    // Sometimes the next request is faster than the return of the connection to the pool.
    assert!(app.connections() < 50, "{} connections for 100 requests", app.connections());
    server.stop();
}
