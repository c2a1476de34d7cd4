//! verify, verify --batch and sign through the real binary.

use crate::common::{Run, hapax, write};
use serde_json::{Value, json};

const SECRET: &str = "whsec_test_of_the_command_line";
const BODY: &str = r#"{"id":"evt_1","object":"event","type":"payout.paid","created":1767225600,"data":{"object":{"id":"po_1","amount":10000}}}"#;
const NOW: i64 = 1_767_225_607;

fn lines(run: &Run) -> Vec<Value> {
    run.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The Stripe signature of `body`, made by `hapax sign`.
fn signature(body: &str, now: i64) -> String {
    let dir = tempfile::tempdir().unwrap();
    let file = write(&dir, "body", body);
    let now = now.to_string();
    let args = ["sign", "--provider", "stripe", "--secret", SECRET, "--now", &now, "--body", &file];
    let run = hapax(&args).run();
    assert_eq!(run.code, 0, "{run:?}");
    let header =
        run.stdout.lines().find(|line| line.to_lowercase().starts_with("stripe-signature"));
    header.unwrap().to_owned()
}

fn verify(secret: &str, header: &str, body: &str, now: i64) -> Run {
    let now = now.to_string();
    hapax(&["verify", "--provider", "stripe", "--now", &now, "--header", header, "--body", "-"])
        .env("HAPAX_SECRET", secret)
        .stdin(body.as_bytes())
        .run()
}

#[test]
fn a_request_captured_from_the_senders_own_sdk_is_accepted() {
    // The signature was made and checked by the sender's own library.
    let body = r#"{"id":"evt_bbc8fb48abb00d22111b69ba","object":"event","api_version":"2026-01-28","created":1767225607,"type":"invoice.paid","livemode":false,"data":{"object":{"id":"in_fake_1","object":"invoice","total":1999}}}"#;
    let header = "Stripe-Signature: t=1767225607,v1=930bf68baf38f85024a269b24d35894fa6588e4095caabe3959263eff40c73ae";
    let run = verify("whsec_FAKE_not_a_real_secret_stripe_pub-0001", header, body, NOW);
    assert_eq!(run.code, 0, "{run:?}");
    assert_eq!(
        lines(&run),
        [json!({ "verdict": "accept", "reason": null,
                 "event_id": "evt_bbc8fb48abb00d22111b69ba", "event_type": "invoice.paid" })]
    );
}

#[test]
fn verify_accepts_the_requests_of_sign() {
    let run = verify(SECRET, &signature(BODY, NOW), BODY, NOW + 299);
    assert_eq!(run.code, 0, "{run:?}");
    assert_eq!(lines(&run)[0]["event_id"], "evt_1");
    assert_eq!(run.stderr, "");
}

#[test]
fn a_failure_is_explained_and_no_secret_is_shown() {
    let header = signature(BODY, NOW);
    let with_newline = format!("{BODY}\n");
    let crlf = "{\"id\":\"evt_1\",\r\n\"type\":\"t\"}";
    let lf = crlf.replace('\r', "");
    let lf_header = signature(&lf, NOW);
    for (secret, header, body, now, reason, words) in [
        ("whsec_another", &header, BODY, NOW, "signature", "the secret is wrong"),
        (SECRET, &header, &with_newline, NOW, "signature", "without the trailing newline"),
        (SECRET, &lf_header, crlf, NOW, "signature", "LF instead of CRLF"),
        (SECRET, &header, "", NOW, "signature", "the body was changed"),
        (SECRET, &header, BODY, NOW + 301, "stale", "2026-01-01T00:00:07Z"),
        (SECRET, &header, BODY, NOW - 301, "future", "301 s ahead"),
        (SECRET, &"X-Other: 1".to_owned(), BODY, NOW, "missing", "--header"),
    ] {
        let run = verify(secret, header, body, now);
        assert_eq!(run.code, 1, "{reason}: {run:?}");
        let answer = &lines(&run)[0];
        assert_eq!((&answer["verdict"], &answer["reason"]), (&json!("reject"), &json!(reason)));
        assert!(run.stderr.contains(words), "wanted {words:?} in {run:?}");
        assert!(!run.stderr.contains(secret) && !run.stdout.contains(secret), "{run:?}");
    }
}

#[test]
fn a_request_that_a_server_answers_with_415_is_rejected() {
    let signed = signature(BODY, NOW);
    for (header, reason, words) in [
        ("Content-Encoding: gzip", "encoded", "compression"),
        ("Content-Type: text/plain", "content_type", "Content-Type"),
    ] {
        let now = NOW.to_string();
        let args = ["verify", "--provider", "stripe", "--now", &now, "--body", "-"];
        let check = |headers: &[&str]| {
            let headers = headers.iter().flat_map(|line| ["--header", line]);
            let args: Vec<&str> = args.into_iter().chain(headers).collect();
            hapax(&args).env("HAPAX_SECRET", SECRET).stdin(BODY.as_bytes()).run()
        };
        let run = check(&[&signed, header]);
        assert_eq!((run.code, &lines(&run)[0]["reason"]), (1, &json!(reason)), "{run:?}");
        assert!(run.stderr.contains(words), "{run:?}");
        assert_eq!(check(&[&signed, "Content-Type: application/json"]).code, 0);
    }
}

#[test]
fn verify_needs_a_secret_a_known_provider_and_a_readable_body() {
    let run = verify("", "Stripe-Signature: t=1,v1=00", BODY, NOW);
    assert_eq!(run.code, 2, "{run:?}");
    assert!(run.stderr.contains("--secret"), "{run:?}");
    let args = ["verify", "--provider", "strpie", "--secret", "x", "--body", "-"];
    let run = hapax(&args).run();
    assert_eq!(run.code, 2, "{run:?}");
    assert!(run.stderr.contains("unknown provider \"strpie\""), "{run:?}");
    let args = ["verify", "--provider", "stripe", "--secret", "x", "--body", "/no/such/body"];
    assert_eq!(hapax(&args).run().code, 3);
    let args = ["verify", "--provider", "stripe", "--secret", "env:NOT_SET_HERE", "--body", "-"];
    let run = hapax(&args).run();
    assert_eq!(run.code, 2, "{run:?}");
    assert!(run.stderr.contains("NOT_SET_HERE is not set"), "{run:?}");
}

#[test]
fn a_batch_is_judged_in_order_and_by_name() {
    let header = signature(BODY, NOW);
    let value = header.split_once(": ").unwrap().1;
    let body_base64 = {
        use base64::Engine as _;
        base64::engine::general_purpose::STANDARD.encode(BODY)
    };
    let vector = |name: &str, secret: &str, now: i64| {
        json!({ "provider": "stripe", "name": name, "secrets": [secret], "now_unix": now,
                "headers": [["Stripe-Signature", value]], "body_base64": body_base64,
                "expect": "accept" })
    };
    let rule = json!({ "provider": "stripe", "name": "rule", "secrets": [SECRET], "now_unix": NOW,
                       "headers": [], "body_rule": { "prefix": "{\"a\":\"", "fill": "xy",
                       "fill_len": 5, "suffix": "\"}", "total_len": 13 } });
    let batch = json!([
        vector("good", SECRET, NOW),
        vector("late", SECRET, NOW + 301),
        vector("forged", "whsec_other", NOW),
        vector("empty secret", "", NOW),
        rule,
    ]);
    let run = hapax(&["verify", "--batch", "-"]).stdin(batch.to_string().as_bytes()).run();
    assert_eq!(run.code, 0, "{run:?}");
    let verdicts: Vec<_> = lines(&run)
        .iter()
        .map(|line| format!("{} {} {}", line["name"], line["verdict"], line["reason"]))
        .collect();
    assert_eq!(
        verdicts,
        [
            r#""good" "accept" null"#,
            r#""late" "reject" "stale""#,
            r#""forged" "reject" "signature""#,
            r#""empty secret" "reject" "config""#,
            r#""rule" "reject" "missing""#,
        ]
    );
}

#[test]
fn an_unreadable_case_is_an_error_and_the_rest_continues() {
    let batch = json!([
        { "provider": "no-such", "name": "first", "secrets": ["x"], "now_unix": NOW },
        { "name": "second" },
        7,
        { "provider": "no-such", "name": "third", "secrets": ["x"], "now_unix": NOW,
          "body_rule": { "prefix": "", "fill": "", "fill_len": 5, "suffix": "" } },
    ]);
    let run = hapax(&["verify", "--batch", "-"]).stdin(batch.to_string().as_bytes()).run();
    assert_eq!(run.code, 1, "{run:?}");
    let lines = lines(&run);
    let names: Vec<_> = lines.iter().map(|line| line["name"].clone()).collect();
    assert_eq!(names, [json!("first"), json!("second"), Value::Null, json!("third")]);
    assert!(lines.iter().all(|line| line["error"].is_string()), "{lines:?}");
    assert_eq!(lines[0]["error"], "unknown provider \"no-such\"");
}

#[test]
fn a_batch_that_is_no_array_is_bad_usage_and_one_that_is_not_there_cannot_be_opened() {
    let run = hapax(&["verify", "--batch", "-"]).stdin(b"{}").run();
    assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{run:?}");
    let run = hapax(&["verify", "--batch", "/no/such/file"]).run();
    assert_eq!(run.code, 3, "{run:?}");
}

#[test]
fn sign_refuses_senders_with_a_private_key() {
    let dir = tempfile::tempdir().unwrap();
    let body = write(&dir, "body", "{}");
    let key = "b7e4b1c8a6d5f4e3c2b1a09f8e7d6c5b4a39281706f5e4d3c2b1a0f9e8d7c6b5";
    let run = hapax(&["sign", "--provider", "discord", "--secret", key, "--body", &body]).run();
    assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{run:?}");
}
