//! Secrets that operators set at run time: which values are refused, and the bytes that are sealed.

use hapax_core::Timestamp;
use hapax_core::limits::{SOURCE_SECRET_BYTES_MAX, SOURCE_SECRETS_MAX};
use hapax_core::secret::{ActiveSecret, Secret};
use hapax_core::source_secrets::{SourceSecrets, SourceSecretsError};

fn now() -> Timestamp {
    "2026-03-01T12:00:00Z".parse().unwrap()
}

fn secret(text: &str) -> ActiveSecret {
    ActiveSecret::forever(Secret::new(text))
}

fn until(text: &str, until: &str) -> ActiveSecret {
    ActiveSecret { until: Some(until.parse().unwrap()), ..secret(text) }
}

#[test]
fn secrets_that_could_not_verify_or_that_anyone_could_guess_are_refused() {
    let check = |secrets: Vec<ActiveSecret>, expected: Option<SourceSecretsError>| {
        assert_eq!(SourceSecrets::new(secrets, now()).err(), expected);
    };
    check(Vec::new(), Some(SourceSecretsError::Count(0)));
    let many = |count: usize| (0..count).map(|n| secret(&format!("s{n}"))).collect::<Vec<_>>();
    check(many(SOURCE_SECRETS_MAX), None);
    check(many(SOURCE_SECRETS_MAX + 1), Some(SourceSecretsError::Count(SOURCE_SECRETS_MAX + 1)));
    check(vec![secret(" \n")], Some(SourceSecretsError::Empty));
    check(vec![secret(&"x".repeat(SOURCE_SECRET_BYTES_MAX))], None);
    check(
        vec![secret(&"x".repeat(SOURCE_SECRET_BYTES_MAX + 1))],
        Some(SourceSecretsError::TooLong),
    );
    check(vec![secret("one"), secret("one")], Some(SourceSecretsError::Repeated));
    check(vec![until("one", "2026-03-01T12:00:00Z")], Some(SourceSecretsError::Ended));
    check(vec![until("one", "2026-03-01T12:00:00.000001Z")], None);
}

#[test]
fn secrets_and_their_ends_come_back_as_they_were() {
    // Blanks are part of some senders' secrets, and a PEM key has many lines.
    let secrets = vec![
        secret(" blank at both ends "),
        until("日本\n-----END", "2026-12-01T00:00:00.123456789Z"),
        until("ended by the time it is read", "2026-03-01T12:00:01Z"),
    ];
    let bytes = SourceSecrets::new(secrets.clone(), now()).unwrap().to_bytes();
    let read = SourceSecrets::from_bytes(&bytes).unwrap();
    let plain = |secrets: &[ActiveSecret]| {
        secrets.iter().map(|one| (one.secret.expose().to_owned(), one.until)).collect::<Vec<_>>()
    };
    assert_eq!(plain(read.secrets()), plain(&secrets));
    assert!(!format!("{read:?}").contains("blank"));
}

#[test]
fn truncated_or_foreign_bytes_are_an_error() {
    let bytes = SourceSecrets::new(vec![secret("one"), secret("two")], now()).unwrap().to_bytes();
    let first_ends = 1 + 16 + 4 + 3;
    for length in (0..bytes.len()).filter(|length| *length != first_ends) {
        assert!(SourceSecrets::from_bytes(&bytes[..length]).is_err(), "{length}");
    }
    assert!(SourceSecrets::from_bytes(&[&[2], &bytes[1..]].concat()).is_err());
    assert!(SourceSecrets::from_bytes(&[&bytes[..], b"x"].concat()).is_err());
}
