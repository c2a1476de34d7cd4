//! Bad input to the real server. For every request four things must hold: the documented status, a
//! problem without internal details, nothing stored, and a server that accepts the next good event.

use std::cell::Cell;
use std::io::Read;

use crate::support::sender::{Request, event, now};
use crate::support::{House, Sender, Server, Wire};

const STRIPE: &str = "whsec_stripe_of_the_default_tenant";
const ACME: &str = "whsec_stripe_of_acme";
const GITHUB: &str = "github secret";
const LEGACY: &str = "legacy secret";

const TOLERANCE_SECONDS: i64 = 300;
const BODY_BYTES_MAX: usize = 64 * 1024;

/// One server for all cases of a test, and the number of events it has stored so far.
struct TestedServer {
    server: Server,
    _house: House,
    stripe: Sender,
    stored: Cell<usize>,
}

fn start() -> TestedServer {
    start_with("")
}

/// Starts a server with these lines at the top of its config.
fn start_with(keys: &str) -> TestedServer {
    let house = House::new(&format!(
        "max_body = \"64KiB\"\n{keys}\
         [sources.stripe]\nprovider = \"stripe\"\nsecrets = [\"{STRIPE}\"]\n\
         unverified_limit = \"off\"\n\
         [sources.stripe.tenants.acme]\nsecrets = [\"{ACME}\"]\n\
         [sources.github]\nprovider = \"github\"\nsecrets = [\"{GITHUB}\"]\n\
         unverified_limit = \"off\"\n\
         [sources.legacy]\nprovider = \"custom\"\nsecrets = [\"{LEGACY}\"]\n\
         event_id = \"/id\"\nrequire = [\"/type\"]\nunverified_limit = \"off\"\n\
         scheme = {{ header = \"x-signature\" }}\n"
    ));
    let server = house.start();
    TestedServer { server, _house: house, stripe: Sender::stripe(STRIPE), stored: Cell::new(0) }
}

impl TestedServer {
    /// Sends a request that must be refused with `status` and store nothing.
    #[track_caller]
    fn refuses(&self, what: &str, status: u16, request: impl AsRef<[u8]>) {
        let mut wire = self.server.wire();
        wire.write(request);
        self.refused(what, status, wire);
    }

    /// Checks a request that was already sent: it must be refused with `status` and store nothing.
    #[track_caller]
    fn refused(&self, what: &str, status: u16, mut wire: Wire) {
        let answer = wire.try_answer().unwrap_or_else(|| panic!("{what}: no answer"));
        assert_eq!(answer.status, status, "{what}: {answer:?}");
        let kind = answer.header("content-type");
        assert_eq!(kind, Some("application/problem+json"), "{what}: {answer:?}");
        assert!(answer.header("hapax-request-id").is_some(), "{what}: {answer:?}");
        assert!(answer.header("hapax-decision").is_none(), "{what}: {answer:?}");
        let problem = answer.json();
        assert_eq!(problem["status"], status, "{what}: {problem}");
        assert!(problem["title"].is_string() && problem["type"].is_string(), "{what}: {problem}");
        for secret in [STRIPE, ACME, GITHUB, LEGACY] {
            assert!(!answer.text().contains(secret), "{what}: {problem}");
        }
        self.stands(what);
    }

    /// Checks that nothing was stored, and that the next good event is accepted.
    #[track_caller]
    fn stands(&self, what: &str) {
        assert_eq!(self.server.events("").len(), self.stored.get(), "{what}: something was stored");
        self.takes(what);
    }

    #[track_caller]
    fn takes(&self, what: &str) {
        let good = format!("evt_good_{}", self.stored.get());
        let answer = self.server.ask(self.stripe.event(&good));
        assert_eq!(answer.status, 200, "after {what}: {answer:?}");
        answer.is("accepted");
        self.stored.set(self.stored.get() + 1);
    }

    fn good(&self) -> Request {
        self.stripe.request(event("evt_never_stored"))
    }
}

#[test]
fn a_signature_that_is_not_exactly_right_is_401() {
    let tested = start();
    let good = tested.good();
    let signature = good.header("stripe-signature").to_owned();
    let (time, seal) = signature.split_once(",v1=").unwrap();
    let with = |value: &str| good.clone().instead("stripe-signature", value).bytes();

    tested.refuses("no signature", 401, good.clone().without("stripe-signature").bytes());
    tested.refuses("an empty one", 401, with(""));
    tested.refuses("a blank one", 401, with(" "));
    tested.refuses("cut short by one digit", 401, with(&signature[..signature.len() - 1]));
    tested.refuses("cut to nothing", 401, with(&format!("{time},v1=")));
    tested.refuses("one digit more", 401, with(&format!("{signature}0")));
    tested.refuses("upper case", 401, with(&format!("{time},v1={}", seal.to_uppercase())));
    tested.refuses("upper-case label", 401, with(&format!("{time},V1={seal}")));
    tested.refuses("without a time", 401, with(&format!("v1={seal}")));
    tested.refuses("without a label", 401, with(seal));
    tested.refuses("two times", 401, with(&format!("t={},{signature}", now() - 1)));
    tested.refuses("another scheme's label", 401, with(&format!("{time},v0={seal}")));
    tested.refuses("base64 of it", 401, with(&format!("{time},v1={}", "q".repeat(43))));
    tested.refuses("a null byte's escape", 401, with(&format!("{time},v1=%00{seal}")));
    tested.refuses("not ASCII", 401, with(&format!("{time},v1=é{seal}")));
    tested.refuses("another body", 401, good.clone().body(event("evt_swapped")).bytes());
    let spaced = event("evt_never_stored").replace(":{", ": {");
    tested.refuses("the same JSON in other bytes", 401, good.clone().body(spaced).bytes());

    // Two forged header lines must not be combined into a valid one.
    let forged = good.clone().instead("stripe-signature", &format!("{time},v1={}", "0".repeat(64)));
    let twice = forged.clone().with("stripe-signature", &format!("{time},v1={}", "1".repeat(64)));
    tested.refuses("a forged one, twice", 401, twice.bytes());

    let github = Sender::new("github", GITHUB, "/webhooks/github").request(event("evt_foreign"));
    tested.refuses("a foreign scheme", 401, github.clone().to("/webhooks/stripe").bytes());
    tested.refuses("and the other way round", 401, good.clone().to("/webhooks/github").bytes());
    let sha1 = github.clone().without("x-hub-signature-256");
    tested.refuses(
        "GitHub's old header alone",
        401,
        sha1.with("x-hub-signature", "sha1=00").bytes(),
    );
    let bare = github.header("x-hub-signature-256").trim_start_matches("sha256=").to_owned();
    tested.refuses("no prefix", 401, github.instead("x-hub-signature-256", &bare).bytes());
}

#[test]
fn a_signature_repeated_or_beside_a_forged_one_is_still_one_event() {
    // Stripe itself sends several signatures while a secret is rolled over.
    let tested = start();
    let request = tested.stripe.request(event("evt_rolled"));
    let signature = request.header("stripe-signature").to_owned();
    let (time, seal) = signature.split_once(",v1=").unwrap();
    let several = format!("{time},v1={},v1={seal},v0=junk", "0".repeat(64));
    let answer = tested.server.ask(request.clone().instead("stripe-signature", &several).bytes());
    answer.is("accepted");
    // Whether a doubled header line verifies or not, it never makes a second event.
    let twice = request.with("stripe-signature", &signature);
    let answer = tested.server.ask(twice.bytes());
    assert!(matches!(answer.status, 200 | 401), "{answer:?}");
    assert_eq!(tested.server.events("").len(), 1);
    tested.takes("a repeated signature");
}

#[test]
fn the_window_is_kept_to_the_second_on_both_sides() {
    // The clock advances during the requests, so a case counts only if it still holds after the
    // answer.
    let tested = start();
    let check = |what: &str, offset: i64, inside: bool| {
        for attempt in 0..20 {
            let id = format!("evt_{offset}_{attempt}");
            let signed_at = now() + offset;
            let request = tested.stripe.request_at(event(&id), signed_at);
            let answer = tested.server.ask(request.bytes());
            let distance = (crate::support::sender::now_exact() - signed_at as f64).abs();
            if (distance < TOLERANCE_SECONDS as f64) != inside {
                tested.stored.set(tested.server.events("").len());
                continue;
            }
            let expected = if inside { 200 } else { 401 };
            assert_eq!(answer.status, expected, "{what}: {answer:?}");
            if inside {
                tested.stored.set(tested.stored.get() + 1);
            }
            tested.stands(what);
            return;
        }
        panic!("{what}: this machine is too slow for this test");
    };
    check("1 s inside the past edge", 1 - TOLERANCE_SECONDS, true);
    check("1 s outside the past edge", -1 - TOLERANCE_SECONDS, false);
    check("1 s inside the future edge", TOLERANCE_SECONDS - 1, true);
    check("1 s outside the future edge", TOLERANCE_SECONDS + 2, false);
    check("a day late", -86_400, false);
    check("a day early", 86_400, false);
    check("1970", -now(), false);
}

#[test]
fn a_timestamp_that_is_not_a_plain_number_is_401() {
    let tested = start();
    let key = aws_lc_rs::hmac::Key::new(aws_lc_rs::hmac::HMAC_SHA256, STRIPE.as_bytes());
    let body = event("evt_never_stored");
    let t = now();
    for time in [
        "-1".to_owned(),
        format!("-{t}"),
        format!("+{t}"),
        format!("0{t}"),
        format!("{t}.0"),
        format!("{t}e0"),
        format!("{t}000"),
        format!("0x{t:x}"),
        " ".to_owned(),
        String::new(),
        "NaN".to_owned(),
        "9223372036854775807".to_owned(),
        "9223372036854775808".to_owned(),
        "18446744073709551616".to_owned(),
        (i128::from(t) + (1_i128 << 64)).to_string(),
        (i128::from(t) + (1_i128 << 32)).to_string(),
        "9".repeat(400),
    ] {
        // The signature over exactly this text is right: only parsing can refuse it.
        let tag = aws_lc_rs::hmac::sign(&key, format!("{time}.{body}").as_bytes());
        let signature = format!("t={time},v1={}", hex::encode(tag));
        let request = tested.good().instead("stripe-signature", &signature);
        tested.refuses(&format!("t={time:.30}"), 401, request.bytes());
    }
}

#[test]
fn the_signature_of_another_pair_is_401_and_an_unknown_path_404() {
    let tested = start();
    let acme = Sender::new("stripe", ACME, "/webhooks/acme/stripe");
    let good = tested.good();
    tested.refuses(
        "a tenant's at the source",
        401,
        acme.request("{}").to("/webhooks/stripe").bytes(),
    );
    tested.refuses(
        "the source's at a tenant",
        401,
        good.clone().to("/webhooks/acme/stripe").bytes(),
    );
    for (what, path) in [
        ("an unknown source", "/webhooks/nobody"),
        ("an unknown tenant", "/webhooks/globex/stripe"),
        ("a pair that is not declared", "/webhooks/acme/github"),
        ("the default tenant by name", "/webhooks/default/stripe"),
        ("one segment more", "/webhooks/stripe/stripe/stripe"),
        ("a slash at the end", "/webhooks/stripe/"),
        ("two slashes", "/webhooks//stripe"),
        ("an escaped letter", "/webhooks/strip%65"),
        ("dots", "/webhooks/x/../stripe"),
        ("upper case", "/webhooks/Stripe"),
        ("nothing", "/webhooks/"),
        ("the root", "/"),
        ("the admin side's paths", "/api/v1/events"),
        ("its metrics", "/metrics"),
    ] {
        tested.refuses(what, 404, good.clone().to(path).bytes());
    }
    tested.server.ask(acme.event("evt_of_acme")).is("accepted");
    let events = tested.server.events("tenant=acme");
    assert_eq!(events.len(), 1, "{events:?}");
}

#[test]
fn a_method_other_than_post_is_405_with_allow() {
    let tested = start();
    for method in ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW", "post"] {
        let mut request = tested.good();
        request.method = method.to_owned();
        tested.refuses(method, 405, request.bytes());
        assert_eq!(tested.server.ask(request.bytes()).header("allow"), Some("POST"), "{method}");
    }
    let health = tested.server.ask("GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n");
    assert_eq!((health.status, health.body.len()), (200, 0), "{health:?}");
}

#[test]
fn a_body_of_the_wrong_size_or_kind_is_refused() {
    let tested = start();
    let padded = |bytes: usize| {
        let frame = event("evt_padded").len() + r#","pad":"""#.len();
        let pad = format!(r#","pad":"{}"}}"#, "x".repeat(bytes - frame));
        let mut body = event("evt_padded");
        body.pop();
        body + &pad
    };
    let over = tested.stripe.request(padded(BODY_BYTES_MAX + 1));
    assert_eq!(over.body.len(), BODY_BYTES_MAX + 1);
    tested.refuses("1 byte over the cap", 413, over.bytes());
    tested.refuses("a length beyond all bounds", 413, {
        format!("{}content-length: 1000000000000000000\r\n\r\n", over.head())
    });
    let chunked = format!(
        "{}transfer-encoding: chunked\r\n\r\n{:x}\r\n{}\r\n0\r\n\r\n",
        over.head(),
        over.body.len(),
        String::from_utf8(over.body.clone()).unwrap()
    );
    tested.refuses("1 byte over the cap, chunked", 413, chunked);

    tested.refuses("no body", 401, tested.good().body("").bytes());
    tested.refuses("no body, signed", 400, tested.stripe.request("").bytes());
    let unframed = format!("{}\r\n", tested.stripe.request("").head());
    tested.refuses("no body and no length, signed", 400, unframed);

    for encoding in ["gzip", "br", "deflate", "gzip, identity", "x-unknown"] {
        let request = tested.good().with("content-encoding", encoding);
        tested.refuses(encoding, 415, request.bytes());
    }
    let gzip = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\x03\x00\x00\x00\x00\x00\x00\x00\x00\x00";
    tested.refuses("gzip without a word of it", 400, tested.stripe.request(gzip).bytes());

    for kind in ["text/plain", "application/x-www-form-urlencoded", "application/xml", "nonsense"] {
        tested.refuses(kind, 415, tested.good().instead("content-type", kind).bytes());
    }

    let exactly = tested.stripe.request(padded(BODY_BYTES_MAX));
    assert_eq!(exactly.body.len(), BODY_BYTES_MAX);
    tested.server.ask(exactly.bytes()).is("accepted");
    tested.stored.set(tested.stored.get() + 1);
    for kind in
        ["application/json; charset=utf-8", "APPLICATION/JSON", "application/cloudevents+json"]
    {
        let request = tested.stripe.request(padded(BODY_BYTES_MAX)).instead("content-type", kind);
        tested.server.ask(request.bytes()).is("duplicate");
    }
    tested.stands("bodies that fit");
}

#[test]
fn chunks_without_end_are_cut_off() {
    let tested = start();
    let mut wire = tested.server.wire();
    wire.write(format!("{}transfer-encoding: chunked\r\n\r\n", tested.good().head()));
    let chunk = format!("1000\r\n{}\r\n", "x".repeat(0x1000));
    for _ in 0..=BODY_BYTES_MAX / 0x1000 {
        wire.write(&chunk);
    }
    tested.refused("chunks without end", 413, wire);
}

#[test]
fn a_head_or_body_that_drips_is_cut_off() {
    let tested = start_with("header_timeout = \"1s\"\nbody_timeout = \"1s\"\n");
    let drip = |mut wire: Wire| -> Vec<u8> {
        // Each round waits briefly for an answer of the server, which paces the bytes.
        wire.stream.set_read_timeout(Some(std::time::Duration::from_millis(100))).unwrap();
        let mut heard = Vec::new();
        crate::support::until("the server cuts it off", || {
            wire.write("x");
            let mut part = [0; 4096];
            match wire.stream.read(&mut part) {
                Ok(0) => Some(()),
                Ok(read) => {
                    heard.extend_from_slice(&part[..read]);
                    None
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => None,
                Err(_) => Some(()),
            }
        });
        heard
    };
    let mut wire = tested.server.wire();
    wire.write("POST /webhooks/stripe HTTP/1.1\r\nhost: a\r\nx-slow: ");
    drip(wire);
    tested.stands("a dripping head");

    let mut wire = tested.server.wire();
    wire.write(format!("{}content-length: 60000\r\n\r\n{{", tested.good().head()));
    let heard = String::from_utf8(drip(wire)).unwrap();
    assert!(heard.starts_with("HTTP/1.1 408 "), "{heard}");
    assert!(heard.contains("application/problem+json"), "{heard}");
    tested.stands("a dripping body");

    // The head or the body is cut off: no request was received.
    let good = tested.good().bytes();
    for length in [1, 20, good.len() / 2, good.len() - 1] {
        let mut wire = tested.server.wire();
        wire.write(&good[..length]);
        wire.stream.shutdown(std::net::Shutdown::Write).unwrap();
        wire.ends();
        tested.stands(&format!("{length} bytes of a good request"));
    }
}

#[test]
fn a_signed_body_that_is_no_event_is_400() {
    let tested = start();
    let deep = |open: &str, close: &str, levels| {
        let bomb = format!("{}{}", open.repeat(levels), close.repeat(levels));
        format!(r#"{{"id":"evt_deep","type":"t","data":{bomb}}}"#).into_bytes()
    };
    let body = |text: &str| text.as_bytes().to_vec();
    for (what, body) in [
        ("no JSON", body("id=evt_1&type=t")),
        ("cut JSON", body(r#"{"id":"evt_1""#)),
        ("JSON with more behind it", body(r#"{"id":"evt_1","type":"t"} {"id":"evt_2"}"#)),
        ("single quotes", body("{'id':'evt_1'}")),
        ("a comma too many", body(r#"{"id":"evt_1",}"#)),
        ("a comment", body(r#"{"id":"evt_1"/**/}"#)),
        ("NaN", body(r#"{"id":"evt_1","n":NaN}"#)),
        ("a string", body(r#""evt_1""#)),
        ("an array", body(r#"[{"id":"evt_1"}]"#)),
        ("null", body("null")),
        ("blanks", body("   \n")),
        ("no id", body(r#"{"type":"t"}"#)),
        ("the id a level deeper", body(r#"{"data":{"id":"evt_1"},"type":"t"}"#)),
        ("an id in upper case", body(r#"{"ID":"evt_1","type":"t"}"#)),
        ("a null id", body(r#"{"id":null,"type":"t"}"#)),
        ("an empty id", body(r#"{"id":"","type":"t"}"#)),
        ("a float id", body(r#"{"id":1.5,"type":"t"}"#)),
        ("an id with an exponent", body(r#"{"id":1e3,"type":"t"}"#)),
        ("a boolean id", body(r#"{"id":true,"type":"t"}"#)),
        ("an object id", body(r#"{"id":{"a":1},"type":"t"}"#)),
        ("an array id", body(r#"{"id":["evt_1"],"type":"t"}"#)),
        ("256 bytes of id", format!(r#"{{"id":"{}","type":"t"}}"#, "x".repeat(256)).into_bytes()),
        ("128 é of id", format!(r#"{{"id":"{}","type":"t"}}"#, "é".repeat(128)).into_bytes()),
        ("a newline in the id", body(r#"{"id":"evt\n1","type":"t"}"#)),
        ("a null in the id", body(r#"{"id":"evt\u0000","type":"t"}"#)),
        ("a raw newline in the id", body("{\"id\":\"evt\n1\",\"type\":\"t\"}")),
        ("a C1 control in the id", body(r#"{"id":"evt\u0085","type":"t"}"#)),
        ("DEL in the id", body(r#"{"id":"evt\u007f","type":"t"}"#)),
        ("half a surrogate", body(r#"{"id":"evt\ud800","type":"t"}"#)),
        ("two ids", body(r#"{"id":"evt_1","type":"t","id":"evt_2"}"#)),
        ("the same id twice", body(r#"{"id":"evt_1","type":"t","id":"evt_1"}"#)),
        ("a second id in escapes", body(r#"{"id":"evt_1","type":"t","\u0069d":"evt_2"}"#)),
        ("a bomb of arrays", deep("[", "]", 10_000)),
        ("a bomb of objects", deep(r#"{"a":"#, "}", 3_000)),
        ("a bomb without end", "[".repeat(60_000).into_bytes()),
        ("bad UTF-8", b"{\"id\":\"evt_1\",\"type\":\"t\",\"x\":\"\xff\xfe\"}".to_vec()),
        ("bad UTF-8 in the id", b"{\"id\":\"evt_\xc3\x28\",\"type\":\"t\"}".to_vec()),
        ("overlong UTF-8", b"{\"id\":\"evt_\xc0\xae\",\"type\":\"t\"}".to_vec()),
        ("a BOM", b"\xef\xbb\xbf{\"id\":\"evt_1\",\"type\":\"t\"}".to_vec()),
        ("UTF-16", b"\xff\xfe{\x00}\x00".to_vec()),
    ] {
        tested.refuses(what, 400, tested.stripe.request(&body).bytes());
    }
    // A required field is missing.
    let key = aws_lc_rs::hmac::Key::new(aws_lc_rs::hmac::HMAC_SHA256, LEGACY.as_bytes());
    let body = r#"{"id":"1"}"#;
    let legacy = Request {
        method: "POST".into(),
        path: "/webhooks/legacy".into(),
        headers: vec![(
            "x-signature".into(),
            hex::encode(aws_lc_rs::hmac::sign(&key, body.as_bytes())),
        )],
        body: body.into(),
    };
    tested.refuses("a required field is missing", 400, legacy.bytes());

    // Ids in headers follow the same rules.
    let github = Sender::new("github", GITHUB, "/webhooks/github").request(r#"{"action":"x"}"#);
    let github = github.without("x-github-delivery").with("x-github-event", "push");
    tested.refuses("no delivery id", 400, github.bytes());
    let with = |id: &str| github.clone().with("x-github-delivery", id);
    tested.refuses("an empty delivery id", 400, with("").bytes());
    tested.refuses("a delivery id too long", 400, with(&"x".repeat(256)).bytes());
    tested.refuses("two delivery ids", 400, with("a").with("x-github-delivery", "b").bytes());
}

#[test]
fn ids_at_the_limits_are_stored_unchanged() {
    let tested = start();
    let big = "123456789012345678901234567890";
    for (body, id) in [
        (r#"{"id":0,"type":"t"}"#.to_owned(), "0".to_owned()),
        (format!(r#"{{"id":{big},"type":"t"}}"#), big.to_owned()),
        (format!(r#"{{"id":"{}","type":"t"}}"#, "x".repeat(255)), "x".repeat(255)),
        (r#"{"id":"\u0065vt \"q\" 😀","type":"t"}"#.to_owned(), "evt \"q\" 😀".to_owned()),
    ] {
        let request = tested.stripe.request(&body).bytes();
        tested.server.ask(&request).is("accepted");
        tested.server.ask(&request).is("duplicate");
        let newest = &tested.server.events("")[0];
        assert_eq!(newest["event_id"], id.as_str(), "{body}");
    }
}

#[test]
fn requests_that_smuggle_another_are_refused_and_nothing_is_stored() {
    // A second event is hidden where a proxy and Hapax might disagree about the end of the first.
    let tested = start();
    let hidden = tested.stripe.event("evt_smuggled");
    let hidden = String::from_utf8(hidden).unwrap();
    let head = tested.good().head();
    for (what, request) in [
        (
            "length and chunks",
            format!(
                "{head}content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n{hidden}"
            ),
        ),
        (
            "two lengths",
            format!("{head}content-length: 5\r\ncontent-length: 6\r\n\r\n12345{hidden}"),
        ),
        ("a signed length", format!("{head}content-length: +5\r\n\r\n12345{hidden}")),
        ("bare line feeds", format!("{}content-length: 0\n\n{hidden}", head.replace("\r\n", "\n"))),
        ("a folded header", format!("{head}x-a: 1\r\n content-length: 5\r\n\r\n{hidden}")),
        ("a blank before the colon", format!("{head}content-length : 0\r\n\r\n{hidden}")),
    ] {
        let mut wire = tested.server.wire();
        wire.write(&request);
        while let Some(answer) = wire.try_answer() {
            assert!((400..500).contains(&answer.status), "{what}: {answer:?}");
        }
        let smuggled = tested.server.events("q=evt_smuggled");
        assert!(smuggled.is_empty(), "{what}: {smuggled:?}");
        tested.stands(what);
    }
}
