//! The secrets of endpoints: signatures verify, even while secrets are rotated, and no secret is
//! printed.

use std::time::Duration;

use bytes::Bytes;
use hapax_core::endpoint_secret::{
    EndpointSecrets, RotateError, Signing, SigningSecret, SigningSecretError, UnknownSecretsForm,
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
    SigningSecret::generate(Signing::Standard, &[byte; 32])
}

fn key_pair(byte: u8) -> SigningSecret {
    SigningSecret::generate(Signing::Ed25519, &[byte; 32])
}

fn timestamped(byte: u8) -> SigningSecret {
    SigningSecret::generate(Signing::Timestamped, &[byte; 32])
}

/// Whether a receiver with this one secret accepts the signature.
fn accepts(provider: &str, receiver: &SigningSecret, value: HeaderValue, now: Timestamp) -> bool {
    let text = receiver.public_key().or_else(|| receiver.expose().map(|text| text.to_string()));
    let secret = ActiveSecret::forever(Secret::new(text.expect("a key to verify with")));
    let mut spec = SourceSpec::new("in", provider, vec![secret]);
    if receiver.signing() == Signing::Timestamped {
        spec.params.insert("signing".to_owned(), "timestamped".to_owned());
    }
    let source = Source::build(spec).expect("a source");
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
    // The test vector of the Standard Webhooks libraries.
    let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    let secret = SigningSecret::parse(Signing::Standard, secret).expect("a secret");
    let value = EndpointSecrets::new(secret).sign(ID, at(1_614_265_330), BODY);
    assert_eq!(value, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
}

#[test]
fn a_signature_with_a_key_pair_is_that_of_the_standard() {
    // The test vector of the Svix server. Its private key is the seed, followed by the public key.
    let key =
        "6Xb/dCcHpPea21PS1N9VY/NZW723CEc77N4rJCubMbfVKIDij2HKpMKkioLlX0dRqSKJp4AJ6p9lMicMFs6Kvg==";
    let seed = "6Xb/dCcHpPea21PS1N9VY/NZW723CEc77N4rJCubMbc=";
    for text in [key, seed] {
        let secret =
            SigningSecret::parse(Signing::Ed25519, &format!("whsk_{text}")).expect("a key");
        let public = secret.public_key();
        assert_eq!(public.as_deref(), Some("whpk_1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4="));
        assert_eq!(secret.expose(), None, "no receiver needs the private key");
        let value = EndpointSecrets::new(secret).sign(ID, at(1_614_265_330), BODY);
        assert_eq!(
            value,
            "v1a,hnO3f9T8Ytu9HwrXslvumlUpqtNVqkhqw/enGzPCXe5BdqzCInXqYXFymVJaA7AZdpXwVLPo3mNl8EM+m7TBAg=="
        );
    }
}

#[test]
fn a_timestamped_signature_is_one_that_the_libraries_of_stripe_accept() {
    // The key is the text of the secret, and the id is not signed: `t=…,v1=…` as Stripe sends it.
    let now = at(1_614_265_330);
    let (first, second) = (timestamped(1), timestamped(2));
    let one = EndpointSecrets::new(first.clone());
    let two = one.rotate(second.clone(), HOUR, now).expect("rotated");
    for (secrets, signatures) in [(one, 1), (two, 2)] {
        let value = secrets.sign(ID, now, BODY);
        let text = value.to_str().expect("text");
        assert!(text.starts_with("t=1614265330,v1="), "{text}");
        assert_eq!(text.matches(",v1=").count(), signatures);
        let stripe = ActiveSecret::forever(Secret::new(first.expose().expect("shared").as_str()));
        let source = Source::build(SourceSpec::new("in", "stripe", vec![stripe])).expect("stripe");
        let mut headers = HeaderMap::new();
        headers.insert("stripe-signature", value);
        let url = "https://hooks.example.com/webhooks/in".to_owned();
        let body = Bytes::from_static(BODY);
        let arrival = Arrival { method: Method::POST, url, headers, body };
        assert!(source.scheme().authenticate(&arrival, now).is_ok());
    }
}

#[test]
fn a_receiver_of_the_old_and_one_of_the_new_kind_verify_every_delivery_of_the_overlap() {
    // The header carries signatures of different forms; no verifier may fail because of the other
    // forms.
    let now = at(1_767_225_600);
    let all = [secret(1), key_pair(2), timestamped(3)];
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let [first, second, third] = order.map(|place| all[place].clone());
        let secrets = EndpointSecrets::new(first.clone())
            .rotate(second.clone(), HOUR, now)
            .and_then(|secrets| secrets.rotate(third.clone(), HOUR * 2, now))
            .expect("rotated");
        for (then, active) in [
            (now, vec![&first, &second, &third]),
            (now + HOUR, vec![&second, &third]),
            (now + HOUR * 2, vec![&third]),
        ] {
            let value = secrets.sign(ID, then, BODY);
            for receiver in &all {
                let accepted = accepts("standardwebhooks", receiver, value.clone(), then);
                assert_eq!(accepted, active.contains(&receiver), "{order:?} at {then}: {value:?}");
            }
            // The official package for Python fails at an element with two commas before one that verifies.
            let text = value.to_str().expect("text");
            let plain = text.split(' ').take_while(|element| !element.starts_with("t="));
            assert!(plain.clone().all(|element| element.matches(',').count() == 1), "{text}");
            assert!(text.split(' ').count() <= plain.count() + 1, "{text}");
        }
        assert_eq!(EndpointSecrets::from_bytes(&secrets.to_bytes()), Ok(secrets));
    }
}

#[test]
fn a_public_key_of_another_endpoint_does_not_verify_and_neither_does_a_shared_secret() {
    let now = at(1_767_225_600);
    let value = EndpointSecrets::new(key_pair(1)).sign(ID, now, BODY);
    for provider in ["standardwebhooks", "svix"] {
        assert!(accepts(provider, &key_pair(1), value.clone(), now));
        assert!(!accepts(provider, &key_pair(2), value.clone(), now));
        // This shared secret has the same bytes as the key pair.
        assert!(!accepts(provider, &secret(1), value.clone(), now));
    }
}

#[test]
fn a_receiver_verifies_every_delivery_during_two_rotations_in_a_row() {
    // The receiver updates late. The second rotation must not move the end of the first secret, and after
    // that end no delivery is signed with it.
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
    // A leaked secret must not sign again, even if it was still active after an earlier rotation.
    let now = at(1_767_225_600);
    let two = EndpointSecrets::new(secret(1)).rotate(secret(2), HOUR, now).expect("rotated");
    let revoked = two.rotate(secret(3), Duration::ZERO, now).expect("revoked");
    assert!(revoked.active(now).eq(&[secret(3)]));
    assert_eq!(revoked, EndpointSecrets::new(secret(3)));
}

#[test]
fn a_rotation_that_makes_no_sense_changes_nothing() {
    // The test adds the same secret twice, and overlaps that no clock can represent.
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
    // A secret that has ended may be used again as a new one.
    assert!(two.rotate(secret(1), HOUR, now + HOUR).is_ok());
}

#[test]
fn a_secret_of_ones_own_has_the_form_of_the_standard_and_errors_do_not_quote_it() {
    // Each text is almost a secret; an error that quoted it would put it into a log.
    fn check(text: &str, expected: Result<&str, SigningSecretError>) {
        let shown = |secret: SigningSecret| secret.expose().expect("shared").to_string();
        let read = SigningSecret::parse(Signing::Standard, text).map(shown);
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
    // The secret is shown with its padding, because some verifiers decode nothing else.
    check(of(32).trim_end_matches('='), Ok(&of(32)));
    check(&of(23), Err(SigningSecretError::Length(23)));
    check(&of(65), Err(SigningSecretError::Length(65)));
    check("whsec_", Err(SigningSecretError::Length(0)));
    check(&of(32)["whsec_".len()..], Err(SigningSecretError::NoPrefix("whsec_")));
    check(&format!(" {}", of(32)), Err(SigningSecretError::NoPrefix("whsec_")));
    check(&format!("{} ", of(32)), Err(SigningSecretError::NotBase64("whsec_")));
    check(&of(32).replace('+', "-"), Err(SigningSecretError::NotBase64("whsec_")));
    check("whsec_hunter2!", Err(SigningSecretError::NotBase64("whsec_")));
    check("hunter2", Err(SigningSecretError::NoPrefix("whsec_")));
    // Receivers of timestamped signatures use the text itself, so it must be the one that is shown.
    let timestamped = |text: &str| SigningSecret::parse(Signing::Timestamped, text).map(drop);
    assert_eq!(timestamped(&of(32)), Ok(()));
    assert_eq!(timestamped(of(32).trim_end_matches('=')), Err(SigningSecretError::NoPadding));
    // A private key: a seed, or a seed with its own public key.
    let key = |text: &str| SigningSecret::parse(Signing::Ed25519, text).map(drop);
    let private = |bytes: usize| of(bytes).replace("whsec_", "whsk_");
    assert_eq!(key(&private(32)), Ok(()));
    assert_eq!(key(&of(32)), Err(SigningSecretError::NoPrefix("whsk_")));
    assert_eq!(key("whsk_hunter2!"), Err(SigningSecretError::NotBase64("whsk_")));
    for bytes in [0, 31, 33, 63, 64, 65] {
        assert_eq!(key(&private(bytes)), Err(SigningSecretError::NotAKey), "{bytes}");
    }
}

#[test]
fn a_secret_cannot_be_printed() {
    // A debug print must not hold the secret in bytes, hex or base64.
    let secret = SigningSecret::generate(Signing::Standard, &[0xab; 32]);
    let now = at(0);
    let secrets = EndpointSecrets::new(secret.clone()).rotate(self::secret(1), HOUR, now);
    let short = SigningSecret::parse(Signing::Standard, "whsec_q6ur");
    let shown = format!("{secret:?} {secrets:?} {short:?}");
    for leaked in ["q6ur", "abab", "171", "AQEB"] {
        assert!(!shown.contains(leaked), "{shown}");
    }
    assert_eq!(secret.expose().map(|text| text.len()), Some("whsec_".len() + 44));
}

#[test]
fn stored_secrets_of_another_form_are_refused() {
    // The bytes are truncated at every position, or have the version byte of a newer Hapax.
    let now = at(1_767_225_600);
    let two = EndpointSecrets::new(secret(1)).rotate(secret(2), HOUR, now).expect("rotated");
    let bytes = two.to_bytes();
    assert_eq!(EndpointSecrets::from_bytes(&bytes).as_ref(), Ok(&two));
    // The cut after the newest secret is a valid, shorter list; the vault authenticates the stored
    // bytes as a whole.
    let newest_only = 1 + 16 + 2 + 32;
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
