//! Kinds of signatures: the API shows the key that a receiver needs, and every delivery verifies with it. When an
//! endpoint changes its kind, deliveries verify with both kinds until the overlap ends.

use std::io::Write as _;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::common::hapax;
use crate::support::sink::{Got, Sink};
use crate::support::{House, Lines, Server, skip};

/// Endpoints on loopback are allowed; nothing else is configured.
const LOOPBACK: &str = "[outbound]\nallow = [\"127.0.0.0/8\"]\n";

/// Adds an endpoint that signs in this way, and returns the answer.
#[track_caller]
fn add(server: &Server, sink: &Sink, signing: &str) -> Value {
    let asked = json!({"url": sink.url(), "signing": signing});
    let answer = server.admin_post("/api/v1/endpoints", &asked);
    assert_eq!(answer.status, 201, "{answer:?}");
    assert_eq!(answer.json()["signing"], signing);
    answer.json()
}

/// Publishes a message and returns it as the endpoint got it.
#[track_caller]
fn send(server: &Server, sink: &Sink, id: &str) -> Got {
    let message = json!({"type": "a", "id": id, "data": {"text": "Ünïcode"}});
    let answer = server.admin_post("/api/v1/messages", &message);
    assert_eq!(answer.status, 202, "{answer:?}");
    let all = sink.wait_until(id, |got| got.iter().any(|got| got.id() == id));
    all.into_iter().find(|got| got.id() == id).unwrap()
}

fn text(endpoint: &Value, field: &str) -> String {
    endpoint[field].as_str().unwrap_or_else(|| panic!("no {field}: {endpoint}")).to_owned()
}

/// The Node code of the docs: it verifies one delivery with the public key, without any code of
/// Hapax.
const FOREIGN: &str = "
const crypto = require('crypto');
const { publicKey, id, timestamp, signatures, body } = JSON.parse(require('fs').readFileSync(0, 'utf8'));
const x = Buffer.from(publicKey.slice('whpk_'.length), 'base64').toString('base64url');
const key = crypto.createPublicKey({ format: 'jwk', key: { kty: 'OKP', crv: 'Ed25519', x } });
const content = Buffer.concat([Buffer.from(`${id}.${timestamp}.`), Buffer.from(body, 'utf8')]);
const ok = signatures.split(' ').filter((one) => one.startsWith('v1a,'))
  .some((one) => crypto.verify(null, content, key, Buffer.from(one.slice(4), 'base64')));
process.exit(ok ? 0 : 1);
";

/// Whether Node's own Ed25519 accepts a delivery.
fn node_accepts(got: &Got, public_key: &str) -> bool {
    let given = json!({
        "publicKey": public_key,
        "id": got.id(),
        "timestamp": got.headers["webhook-timestamp"],
        "signatures": got.headers["webhook-signature"],
        "body": got.text(),
    });
    let mut node =
        Command::new("node").args(["-e", FOREIGN]).stdin(Stdio::piped()).spawn().unwrap();
    node.stdin.take().unwrap().write_all(given.to_string().as_bytes()).unwrap();
    match node.wait().unwrap().code() {
        Some(0) => true,
        Some(1) => false,
        other => panic!("node ended with {other:?}"),
    }
}

// Node's verifier shares no code with Hapax: our own verifier could repeat a mistake in content,
// encoding or key.
#[test]
fn node_accepts_a_delivery_with_the_public_key_and_no_altered_one() {
    if Command::new("node").arg("--version").output().is_err() {
        skip("node_accepts_a_delivery_with_the_public_key", "node cannot be run");
        return;
    }
    let house = House::new(LOOPBACK);
    let server = house.start();
    let sink = Sink::accepting();
    let key = text(&add(&server, &sink, "ed25519"), "public_key");
    let got = send(&server, &sink, "m1");
    assert!(node_accepts(&got, &key) && got.verifies(&key), "{got:?}");
    let mut altered = got.clone();
    altered.body.push(b' ');
    assert!(!node_accepts(&altered, &key) && !altered.verifies(&key));
    let mut renamed = got;
    renamed.headers.insert("webhook-id".to_owned(), "m2".to_owned());
    assert!(!node_accepts(&renamed, &key) && !renamed.verifies(&key));
}

// The private key must never be in an answer, and later answers must still show the public key.
#[test]
fn an_endpoint_with_a_key_pair_shows_its_public_key_and_never_a_secret() {
    let house = House::new(LOOPBACK);
    let server = house.start();
    let sink = Sink::accepting();
    let added = add(&server, &sink, "ed25519");
    let (id, key) = (text(&added, "id"), text(&added, "public_key"));
    assert!(key.starts_with("whpk_") && added.get("secret").is_none(), "{added}");
    let path = format!("/api/v1/endpoints/{id}");
    let shown = server.admin_get(&path).json();
    assert_eq!(
        (text(&shown, "signing"), text(&shown, "public_key")),
        ("ed25519".into(), key.clone())
    );
    let page = server.admin_get(&format!("/endpoints/{id}")).text();
    assert!(page.contains(&key), "{page}");
    let changed = server.admin_request("PATCH", &path, Some(&json!({"signing": "standard"})));
    assert!(changed.status == 400 && changed.text().contains("rotate"), "{changed:?}");
    let same = json!({"signing": "ed25519", "description": "x"});
    let changed = server.admin_request("PATCH", &path, Some(&same));
    assert_eq!((changed.status, text(&changed.json(), "public_key")), (200, key.clone()));
    // A rotation that names no kind of signature keeps the current one.
    let rotated = server.admin_post(&format!("{path}/rotate"), &json!({"overlap": "1h"})).json();
    let second = text(&rotated, "public_key");
    assert!(second != key && rotated.get("secret").is_none(), "{rotated}");
    let got = send(&server, &sink, "m1");
    assert!(got.verifies(&key) && got.verifies(&second), "{got:?}");
    // The user's own key, made with a tool of Standard Webhooks.
    let own = "whsk_6Xb/dCcHpPea21PS1N9VY/NZW723CEc77N4rJCubMbfVKIDij2HKpMKkioLlX0dRqSKJp4AJ6p9lMicMFs6Kvg==";
    let asked = json!({"overlap": "0s", "secret": own});
    let rotated = server.admin_post(&format!("{path}/rotate"), &asked).json();
    assert_eq!(text(&rotated, "public_key"), "whpk_1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4=");
    let seen = server.admin_get("/api/v1/endpoints").text() + &server.stop();
    assert!(!seen.contains("whsk_") && !seen.contains("6Xb/dCcH"), "{seen}");
}

// During the overlap there are receivers of both kinds. A receiver that never changes must fail only when the
// overlap ends.
#[test]
fn a_change_of_the_kind_keeps_both_receivers_verifying_for_the_overlap() {
    let house = House::new(LOOPBACK);
    let server = house.start();
    let sink = Sink::accepting();
    let added = add(&server, &sink, "standard");
    let (id, mut keys) = (text(&added, "id"), vec![("standard", text(&added, "secret"))]);
    let rotate = |signing: &str, overlap: &str| {
        let asked = json!({"signing": signing, "overlap": overlap});
        let answer = server.admin_post(&format!("/api/v1/endpoints/{id}/rotate"), &asked);
        assert_eq!(answer.status, 200, "{answer:?}");
        let shown = answer.json();
        assert_eq!(shown["signing"], signing);
        let field = if signing == "ed25519" { "public_key" } else { "secret" };
        assert_eq!(shown.get("public_key").is_some(), signing == "ed25519", "{shown}");
        text(&shown, field)
    };
    let kind = |signing: &str| if signing == "timestamped" { "timestamped" } else { "standard" };
    for (place, signing) in ["ed25519", "timestamped"].into_iter().enumerate() {
        keys.push((signing, rotate(signing, "1h")));
        let got = send(&server, &sink, &format!("overlap-{place}"));
        for (signing, key) in &keys {
            assert!(got.verifies_as(kind(signing), key), "{signing}: {got:?}");
        }
    }
    let newest = rotate("timestamped", "0s");
    let got = send(&server, &sink, "after");
    let header = &got.headers["webhook-signature"];
    assert!(header.starts_with("t=") && !header.contains(' '), "{header}");
    assert!(got.verifies_as("timestamped", &newest));
    assert!(keys.iter().all(|(signing, key)| !got.verifies_as(kind(signing), key)), "{header}");
}

// Runs the real commands, as the docs say.
#[test]
fn hapax_listen_verifies_each_kind() {
    let house = House::without_config();
    let server = house.start();
    let admin = format!("http://{}", server.admin);
    let run = |args: &[&str]| {
        let ran = hapax(args).env("HAPAX_ADMIN", &admin).run();
        assert_eq!(ran.code, 0, "{ran:?}");
        ran.stdout
    };
    let port = hapax_sim::free_port();
    let (at, url) = (format!("127.0.0.1:{port}"), format!("http://127.0.0.1:{port}/in"));
    for (signing, field, more) in
        [("ed25519", "public key  ", &[][..]), ("timestamped", "secret  ", &["--timestamped"])]
    {
        let added = run(&["endpoints", "add", &url, "--signing", signing, "--types", signing]);
        let key = added.lines().find_map(|line| line.strip_prefix(field)).unwrap().trim();
        let mut listen = Command::new(env!("CARGO_BIN_EXE_hapax"))
            .args(["listen", "--listen", &at, "--count", "1", "--secret", key])
            .args(more)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let said = Lines::of(listen.stdout.take().unwrap());
        said.wait_for("listening on ");
        run(&["publish", signing, "--id", signing]);
        let line = said.wait_for("signature");
        assert!(line.contains("signature ok"), "{line}");
        assert!(listen.wait().unwrap().success());
    }
}
