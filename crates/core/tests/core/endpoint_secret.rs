//! The secrets of endpoints: what is signed verifies, also while secrets are rotated, and nothing is printed.

use std::time::Duration;

use bytes::Bytes;
use hapax_core::endpoint_secret::{
    EndpointSecrets, RotateError, SigningSecret, SigningSecretError, UnknownSecretsForm,
};
use hapax_core::limits::SECRET_OVERLAP_MAX;
use hapax_core::secret::{ActiveSecret, Secret};
use hapax_core::source::SourceSpec;
use hapax_core::{Arrival, Source, Timestamp, Verified, verify};
use http::{HeaderMap, HeaderValue, Method};
use proptest::prelude::*;

const HOUR: Duration = Duration::from_secs(3_600);
const ID: &str = "msg_p5jXN8AQM9LWM0D4loKWxJek";
const BODY: &[u8] = br#"{"test": 2432232314}"#;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).expect("in range")
}

fn secret(byte: u8) -> SigningSecret {
    SigningSecret::generate(&[byte; 32])
}

/// Whether a receiver with this one secret accepts what was signed.
fn accepts(provider: &str, receiver: &SigningSecret, value: HeaderValue, now: Timestamp) -> bool {
    let secret = ActiveSecret::forever(Secret::new(receiver.expose().as_str()));
    let source = Source::build(SourceSpec::new("in", provider, vec![secret])).expect("a source");
    let mut headers = HeaderMap::new();
    headers.insert("content-type", HeaderValue::from_static("application/json"));
    headers.insert("webhook-id", HeaderValue::from_static(ID));
    headers.insert("webhook-timestamp", HeaderValue::from(now.as_second()));
    headers.insert("webhook-signature", value);
    let url = "https://hooks.example.com/webhooks/in".to_owned();
    let arrival = Arrival { method: Method::POST, url, headers, body: Bytes::from_static(BODY) };
    matches!(verify(&source, &arrival, now), Ok(Verified::Events { .. }))
}

#[test]
fn a_signature_is_that_of_the_standard() {
    // The vector that the libraries of Standard Webhooks test themselves with.
    let secret = SigningSecret::parse("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").expect("a secret");
    let value = EndpointSecrets::new(secret).sign(ID, at(1_614_265_330), BODY);
    assert_eq!(value, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
}

#[test]
fn a_receiver_verifies_every_delivery_during_two_rotations_in_a_row() {
    // The receiver updates late. The second rotation must neither shorten nor prolong the end of the first
    // secret, and from its end on no delivery is signed with it.
    let start = at(1_767_225_600);
    let after = |hours: u32| start + HOUR * hours;
    let (first, second, third) = (secret(1), secret(2), secret(3));
    let secrets = EndpointSecrets::new(first.clone());
    let secrets = secrets.rotate(second.clone(), HOUR * 24, after(0)).expect("rotated");
    let secrets = secrets.rotate(third.clone(), HOUR * 24, after(12)).expect("rotated again");
    let almost = |hours: u32| after(hours) - Duration::from_nanos(1);
    for (now, active) in [
        (after(12), vec![&third, &second, &first]),
        (almost(24), vec![&third, &second, &first]),
        (after(24), vec![&third, &second]),
        (almost(36), vec![&third, &second]),
        (after(36), vec![&third]),
        (after(90_000), vec![&third]),
    ] {
        assert!(secrets.active(now).eq(active.iter().copied()), "{now}");
        let value = secrets.sign(ID, now, BODY);
        let signatures = value.to_str().expect("text").split(' ').count();
        assert_eq!(signatures, active.len());
        for receiver in [&first, &second, &third] {
            for provider in ["standardwebhooks", "svix"] {
                let accepted = accepts(provider, receiver, value.clone(), now);
                assert_eq!(accepted, active.contains(&receiver), "{provider} at {now}");
            }
        }
    }
    assert_eq!(secrets.next_end(after(12)), Some(after(24)));
    assert_eq!(secrets.next_end(after(24)), Some(after(36)));
    assert_eq!(secrets.next_end(after(36)), None);
}

#[test]
fn a_fourth_active_secret_is_refused_until_one_has_ended() {
    // Every rotation would add a signature: without a bound the header grows past what receivers accept.
    let start = at(1_767_225_600);
    let three = EndpointSecrets::new(secret(1))
        .rotate(secret(2), HOUR, start)
        .and_then(|secrets| secrets.rotate(secret(3), HOUR * 2, start))
        .expect("three secrets");
    let next_end = start + HOUR;
    let refused = three.rotate(secret(4), HOUR, start);
    assert_eq!(refused, Err(RotateError::TooMany { next_end }));
    assert!(refused.unwrap_err().to_string().contains("2026-01-01T01:00:00Z"));
    let later = three.rotate(secret(4), HOUR, next_end).expect("the first secret has ended");
    assert!(later.active(next_end).eq(&[secret(4), secret(3), secret(2)]));
}

#[test]
fn an_overlap_of_zero_ends_every_earlier_secret_now() {
    // A leaked secret must not sign once more, also not one that a rotation before had left active.
    let now = at(1_767_225_600);
    let two = EndpointSecrets::new(secret(1)).rotate(secret(2), HOUR, now).expect("rotated");
    let revoked = two.rotate(secret(3), Duration::ZERO, now).expect("revoked");
    assert!(revoked.active(now).eq(&[secret(3)]));
    assert_eq!(revoked, EndpointSecrets::new(secret(3)));
}

#[test]
fn a_rotation_that_makes_no_sense_changes_nothing() {
    // The same secret twice, and overlaps that no clock can represent.
    let now = at(1_767_225_600);
    let two = EndpointSecrets::new(secret(1)).rotate(secret(2), HOUR, now).expect("rotated");
    for active in [secret(1), secret(2)] {
        assert_eq!(two.rotate(active.clone(), HOUR, now), Err(RotateError::Repeated));
        assert_eq!(two.rotate(active, Duration::ZERO, now), Err(RotateError::Repeated));
    }
    for endless in [SECRET_OVERLAP_MAX + Duration::from_nanos(1), Duration::MAX] {
        assert_eq!(two.rotate(secret(3), endless, now), Err(RotateError::OverlapTooLong));
    }
    let last = two.rotate(secret(3), HOUR, Timestamp::MAX);
    assert_eq!(last, Err(RotateError::OverlapTooLong));
    // A secret that has ended is as good as a new one.
    assert!(two.rotate(secret(1), HOUR, now + HOUR).is_ok());
}

#[test]
fn a_secret_of_ones_own_has_the_form_of_the_standard_and_errors_do_not_quote_it() {
    // Each text is almost a secret; an error that quoted it would put it into a log.
    fn check(text: &str, expected: Result<&str, SigningSecretError>) {
        let read = SigningSecret::parse(text).map(|secret| secret.expose().to_string());
        assert_eq!(read, expected.map(str::to_owned), "{text:?}");
        if let Err(error) = read {
            assert!(!error.to_string().contains("hunter2"), "{error}");
        }
    }
    let of = |bytes: usize| {
        use base64::Engine as _;
        format!("whsec_{}", base64::engine::general_purpose::STANDARD.encode(vec![0xfb; bytes]))
    };
    check(&of(24), Ok(&of(24)));
    check(&of(64), Ok(&of(64)));
    // Shown with its padding: some verifiers decode nothing else.
    check(of(32).trim_end_matches('='), Ok(&of(32)));
    check(&of(23), Err(SigningSecretError::Length(23)));
    check(&of(65), Err(SigningSecretError::Length(65)));
    check("whsec_", Err(SigningSecretError::Length(0)));
    check(&of(32)["whsec_".len()..], Err(SigningSecretError::NoPrefix));
    check(&format!(" {}", of(32)), Err(SigningSecretError::NoPrefix));
    check(&format!("{} ", of(32)), Err(SigningSecretError::NotBase64));
    check(&of(32).replace('+', "-"), Err(SigningSecretError::NotBase64));
    check("whsec_hunter2!", Err(SigningSecretError::NotBase64));
    check("hunter2", Err(SigningSecretError::NoPrefix));
}

#[test]
fn a_secret_cannot_be_printed() {
    // A debug print must not hold the secret in bytes, hex or base64.
    let secret = SigningSecret::generate(&[0xab; 32]);
    let now = at(0);
    let secrets = EndpointSecrets::new(secret.clone()).rotate(self::secret(1), HOUR, now);
    let shown = format!("{secret:?} {secrets:?} {:?}", SigningSecret::parse("whsec_q6ur"));
    for leaked in ["q6ur", "abab", "171", "AQEB"] {
        assert!(!shown.contains(leaked), "{shown}");
    }
    assert_eq!(secret.last_four(), "rq6s");
    assert_eq!(secret.expose().len(), "whsec_".len() + 44);
}

#[test]
fn stored_secrets_of_another_form_are_refused() {
    // The bytes are cut at every position, and come from a newer version.
    let now = at(1_767_225_600);
    let two = EndpointSecrets::new(secret(1)).rotate(secret(2), HOUR, now).expect("rotated");
    let bytes = two.to_bytes();
    assert_eq!(EndpointSecrets::from_bytes(&bytes).as_ref(), Ok(&two));
    // The cut after the newest secret is a shorter list; what is stored is authenticated as a whole.
    let newest_only = 1 + 16 + 1 + 32;
    for cut in (0..bytes.len()).filter(|cut| *cut != newest_only) {
        assert_eq!(EndpointSecrets::from_bytes(&bytes[..cut]), Err(UnknownSecretsForm), "{cut}");
    }
    let mut newer = bytes.to_vec();
    newer[0] = 2;
    assert_eq!(EndpointSecrets::from_bytes(&newer), Err(UnknownSecretsForm));
}

proptest! {
    #[test]
    fn any_stored_bytes_are_read_or_refused_and_never_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..300),
        start in prop::bool::ANY,
    ) {
        let mut bytes = bytes;
        if start && let Some(first) = bytes.first_mut() {
            *first = 1;
        }
        if let Ok(secrets) = EndpointSecrets::from_bytes(&bytes) {
            prop_assert_eq!(EndpointSecrets::from_bytes(&secrets.to_bytes()), Ok(secrets));
        }
    }

    #[test]
    fn at_any_moment_of_any_rotations_at_most_three_secrets_sign_and_the_newest_first(
        steps in prop::collection::vec((0_u64..100, 0_u64..100), 1..30),
    ) {
        // An independent model: every secret and its end.
        let mut now = at(1_767_225_600);
        let mut secrets = EndpointSecrets::new(secret(0));
        let mut model: Vec<(u8, Timestamp)> = vec![(0, Timestamp::MAX)];
        for (place, (wait, overlap)) in steps.into_iter().enumerate() {
            now += Duration::from_secs(wait);
            let overlap = Duration::from_secs(overlap);
            let byte = place as u8 + 1;
            model.retain(|(_, until)| now < *until);
            match secrets.rotate(secret(byte), overlap, now) {
                Ok(rotated) => {
                    secrets = rotated;
                    match overlap.is_zero() {
                        true => model.clear(),
                        false => model[0].1 = now + overlap,
                    }
                    model.insert(0, (byte, Timestamp::MAX));
                }
                Err(error) => {
                    let ends = model.iter().map(|(_, until)| *until);
                    let next_end = ends.min().expect("the newest");
                    prop_assert_eq!(model.len(), 3);
                    prop_assert_eq!(error, RotateError::TooMany { next_end });
                }
            }
            prop_assert!(model.len() <= 3);
            for later in [0, 1, 50] {
                let then = now + Duration::from_secs(later);
                let expected = model.iter().filter(|(_, until)| then < *until);
                prop_assert!(secrets.active(then).eq(&expected.map(|it| secret(it.0)).collect::<Vec<_>>()));
            }
            let stored = EndpointSecrets::from_bytes(&secrets.to_bytes());
            prop_assert_eq!(stored.as_ref(), Ok(&secrets));
        }
    }
}
