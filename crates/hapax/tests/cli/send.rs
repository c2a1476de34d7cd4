//! `send`, against a small server that records the requests.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use crate::common::hapax;

const SECRET: &str = "whsec_test_of_send";

/// A request as it arrived.
#[derive(Clone, Debug)]
struct Got {
    path: String,
    signature: String,
    body: Vec<u8>,
}

/// Answers every POST with `status` on keep-alive connections, for as long as the test runs.
fn server(status: u16) -> (String, Arc<Mutex<Vec<Got>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/webhooks/stripe", listener.local_addr().unwrap());
    let got = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&got);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let kept = Arc::clone(&kept);
            std::thread::spawn(move || serve(stream.unwrap(), status, &kept));
        }
    });
    (url, got)
}

fn serve(stream: TcpStream, status: u16, got: &Mutex<Vec<Got>>) {
    let mut writer = stream.try_clone().unwrap();
    let mut reader = BufReader::new(stream);
    loop {
        let mut head = Vec::new();
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).unwrap_or(0) == 0 {
                return;
            }
            if line == "\r\n" {
                break;
            }
            head.push(line.trim_end().to_owned());
        }
        let header = |name: &str| {
            head.iter()
                .filter_map(|line| line.split_once(": "))
                .find(|(known, _)| known.eq_ignore_ascii_case(name))
                .map(|(_, value)| value.to_owned())
        };
        let mut body = vec![0; header("content-length").unwrap().parse().unwrap()];
        reader.read_exact(&mut body).unwrap();
        got.lock().unwrap().push(Got {
            path: head[0].split(' ').nth(1).unwrap().to_owned(),
            signature: header("stripe-signature").unwrap(),
            body,
        });
        let answer = r#"{"decision":"accepted","id":"018f"}"#;
        let length = answer.len();
        let _ = write!(
            writer,
            "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n\
             content-length: {length}\r\n\r\n{answer}"
        );
    }
}

#[test]
fn a_sent_event_verifies_as_it_arrived() {
    let (url, got) = server(200);
    let run = hapax(&["send", "stripe", "payout.paid", "--to", &url, "--id", "evt_of_mine"])
        .env("HAPAX_SECRET", SECRET)
        .run();
    assert_eq!(run.code, 0, "{run:?}");
    assert_eq!(run.stdout, "200 accepted 018f evt_of_mine\n");
    let got = got.lock().unwrap().remove(0);
    assert_eq!(got.path, "/webhooks/stripe");
    let header = format!("Stripe-Signature: {}", got.signature);
    let verified = hapax(&[
        "verify",
        "--provider",
        "stripe",
        "--secret",
        SECRET,
        "--header",
        &header,
        "--body",
        "-",
    ])
    .stdin(&got.body)
    .run();
    assert_eq!(verified.code, 0, "{verified:?}");
    let answer: serde_json::Value = serde_json::from_str(&verified.stdout).unwrap();
    assert_eq!(answer["event_id"], "evt_of_mine");
    assert_eq!(answer["event_type"], "payout.paid");
}

#[test]
fn count_makes_distinct_events_and_copies_makes_equal_requests() {
    let (url, got) = server(200);
    let run = hapax(&["send", "stripe", "--to", &url, "--secret", SECRET, "--json"])
        .args(&["--count", "7", "--copies", "3", "--concurrency", "4"])
        .run();
    assert_eq!(run.code, 0, "{run:?}");
    let lines: Vec<serde_json::Value> =
        run.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 21);
    let ids: BTreeSet<_> = lines.iter().map(|line| line["event_id"].to_string()).collect();
    assert_eq!(ids.len(), 7);
    let got = got.lock().unwrap();
    let distinct: BTreeSet<_> = got.iter().map(|got| (&got.signature, &got.body)).collect();
    assert_eq!((got.len(), distinct.len()), (21, 7));
}

#[test]
fn set_changes_the_body_before_it_is_signed() {
    let (url, got) = server(200);
    let run = hapax(&["send", "stripe", "--to", &url, "--secret", SECRET])
        .args(&["--set", "/data/object/amount=4711", "--set", "/data/object/note=hello there"])
        .run();
    assert_eq!(run.code, 0, "{run:?}");
    let body: serde_json::Value = serde_json::from_slice(&got.lock().unwrap()[0].body).unwrap();
    assert_eq!(body["data"]["object"]["amount"], 4711);
    assert_eq!(body["data"]["object"]["note"], "hello there");
    let run = hapax(&["send", "stripe", "--to", &url, "--secret", SECRET])
        .args(&["--set", "/id/inside/a/text=1"])
        .run();
    assert_eq!(run.code, 2, "{run:?}");
}

#[test]
fn a_refusal_exits_with_1_and_an_unreachable_server_with_3() {
    let (url, _) = server(401);
    let run = hapax(&["send", "stripe", "--to", &url, "--secret", SECRET]).run();
    assert_eq!(run.code, 1, "{run:?}");
    assert!(run.stdout.starts_with("401 "), "{run:?}");
    // A port that is never assigned by chance.
    let url = "http://127.0.0.1:1/webhooks/stripe";
    let run = hapax(&["send", "stripe", "--to", url, "--secret", SECRET]).run();
    assert_eq!((run.code, run.stdout.as_str()), (3, ""), "{run:?}");
    assert!(run.stderr.contains("cannot connect"), "{run:?}");
    assert!(!run.stderr.contains(SECRET), "{run:?}");
}

#[test]
fn towards_a_dev_server_on_this_machine_the_dev_secret_need_not_be_given() {
    let dir = tempfile::tempdir().unwrap();
    let secret = format!("dev_{}", "0123456789abcdef".repeat(4));
    std::fs::create_dir(dir.path().join("hapax-data")).unwrap();
    std::fs::write(dir.path().join("hapax-data/dev-secret"), &secret).unwrap();
    let (url, got) = server(200);
    let run = hapax(&["send", "stripe", "--to", &url]).in_dir(dir.path()).run();
    assert_eq!(run.code, 0, "{run:?}");
    let got = got.lock().unwrap().remove(0);
    let header = format!("Stripe-Signature: {}", got.signature);
    let verified = hapax(&[
        "verify",
        "--provider",
        "stripe",
        "--secret",
        &secret,
        "--header",
        &header,
        "--body",
        "-",
    ])
    .stdin(&got.body)
    .run();
    assert_eq!(verified.code, 0, "{verified:?}");

    // The sender's own secret is HMAC-SHA256 of its name under the dev secret, and no other
    // sender's events can be signed with it.
    let key = aws_lc_rs::hmac::Key::new(aws_lc_rs::hmac::HMAC_SHA256, secret.as_bytes());
    for (name, code) in [("stripe", 0), ("github", 1)] {
        let own = hex::encode(aws_lc_rs::hmac::sign(&key, name.as_bytes()));
        let judged = hapax(&["verify", "--provider", "stripe", "--secret", &own])
            .args(&["--header", &header, "--body", "-"])
            .stdin(&got.body)
            .run();
        assert_eq!(judged.code, code, "{name}: {judged:?}");
    }
}
