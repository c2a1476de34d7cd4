//! The secrets of an endpoint: how they are made and parsed, how they sign a delivery, and how one replaces
//! another without a delivery that the receiver cannot verify.
//!
//! Deliveries are signed as Standard Webhooks 1.0 describes: `v1,` and the base64 of HMAC-SHA256 over
//! `id.timestamp.body`, once for each active secret. [`crate::vault`] seals the secrets before they are
//! stored.

use std::fmt;
use std::time::Duration;

use aws_lc_rs::{constant_time, hmac};
use base64::Engine as _;
use base64::alphabet;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig, STANDARD};
use http::HeaderValue;
use jiff::Timestamp;
use zeroize::Zeroizing;

use crate::limits::{
    ENDPOINT_SECRETS_MAX, SECRET_OVERLAP_MAX, SIGNING_SECRET_BYTES_MAX, SIGNING_SECRET_BYTES_MIN,
};

/// One secret of an endpoint. It cannot be printed, and its memory is wiped when it is dropped.
#[derive(Clone)]
pub struct SigningSecret(Zeroizing<Vec<u8>>);

/// The active secrets of an endpoint: the newest, and earlier ones until their ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointSecrets {
    newest: SigningSecret,
    /// The latest first.
    earlier: Vec<EarlierSecret>,
}

/// A secret that was replaced and still signs.
#[derive(Debug, Clone, PartialEq, Eq)]
struct EarlierSecret {
    secret: SigningSecret,
    /// From this instant on it does not sign.
    until: Timestamp,
}

/// Why a text is not a signing secret. The message never quotes the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SigningSecretError {
    /// The prefix is missing.
    #[error("a secret begins with {PREFIX}")]
    NoPrefix,
    /// The text after the prefix is not base64.
    #[error("the text after {PREFIX} is not base64")]
    NotBase64,
    /// The secret is too short or too long.
    #[error(
        "the secret holds {0} bytes; Standard Webhooks demands {SIGNING_SECRET_BYTES_MIN} to \
         {SIGNING_SECRET_BYTES_MAX}"
    )]
    Length(usize),
}

/// Why a secret cannot be replaced now. Nothing was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RotateError {
    /// The endpoint would have too many active secrets.
    #[error(
        "the endpoint has {ENDPOINT_SECRETS_MAX} active secrets; the next one ends at {next_end}. An \
         overlap of 0s ends all of them now"
    )]
    TooMany {
        /// When the first of the active secrets ends.
        next_end: Timestamp,
    },
    /// The new secret is active already.
    #[error("the new secret is already active for this endpoint")]
    Repeated,
    /// The overlap is too long.
    #[error("the overlap is longer than {} days", SECRET_OVERLAP_MAX.as_secs() / 86_400)]
    OverlapTooLong,
}

/// The stored secrets of an endpoint cannot be read: another version of Hapax wrote them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the stored secrets of the endpoint have a form that this version of Hapax does not know")]
pub struct UnknownSecretsForm;

/// The prefix of every secret.
const PREFIX: &str = "whsec_";

impl SigningSecret {
    /// The secret with these random bytes.
    pub fn generate(random: &[u8; 32]) -> Self {
        Self(Zeroizing::new(random.to_vec()))
    }

    /// Parses `whsec_` and 24 to 64 bytes in base64, with or without padding.
    pub fn parse(text: &str) -> Result<Self, SigningSecretError> {
        let encoded = text.strip_prefix(PREFIX).ok_or(SigningSecretError::NoPrefix)?;
        let bytes = SECRET_BASE64.decode(encoded).map_err(|_| SigningSecretError::NotBase64)?;
        Self::from_bytes(Zeroizing::new(bytes))
    }

    fn from_bytes(bytes: Zeroizing<Vec<u8>>) -> Result<Self, SigningSecretError> {
        match bytes.len() {
            SIGNING_SECRET_BYTES_MIN..=SIGNING_SECRET_BYTES_MAX => Ok(Self(bytes)),
            length => Err(SigningSecretError::Length(length)),
        }
    }

    /// The text to show once: `whsec_` and padded base64, which every verifier of Standard Webhooks accepts.
    pub fn expose(&self) -> Zeroizing<String> {
        // The exact capacity: a string that grows would leave a copy of the secret in freed memory.
        let mut text = String::with_capacity(PREFIX.len() + self.0.len().div_ceil(3) * 4);
        text.push_str(PREFIX);
        STANDARD.encode_string(&self.0[..], &mut text);
        Zeroizing::new(text)
    }

    /// The last four characters before the padding, to tell secrets apart after they were shown.
    pub fn last_four(&self) -> String {
        let text = self.expose();
        let text = text.trim_end_matches('=');
        text[text.len() - 4..].to_owned()
    }

    fn signature(&self, id: &str, timestamp: &str, body: &[u8]) -> hmac::Tag {
        let key = hmac::Key::new(hmac::HMAC_SHA256, &self.0);
        let mut signing = hmac::Context::with_key(&key);
        for piece in [id.as_bytes(), b".", timestamp.as_bytes(), b".", body] {
            signing.update(piece);
        }
        signing.sign()
    }
}

impl PartialEq for SigningSecret {
    fn eq(&self, other: &Self) -> bool {
        constant_time::verify_slices_are_equal(&self.0, &other.0).is_ok()
    }
}

impl Eq for SigningSecret {}

impl fmt::Debug for SigningSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SigningSecret(hidden)")
    }
}

impl EndpointSecrets {
    /// The first secret of a new endpoint.
    pub fn new(first: SigningSecret) -> Self {
        Self { newest: first, earlier: Vec::new() }
    }

    /// Replaces the newest secret by `new`. The replaced one signs for `overlap` longer; earlier ones keep
    /// the ends that they have. An overlap of zero ends all of them now.
    pub fn rotate(
        &self,
        new: SigningSecret,
        overlap: Duration,
        now: Timestamp,
    ) -> Result<Self, RotateError> {
        if overlap > SECRET_OVERLAP_MAX {
            return Err(RotateError::OverlapTooLong);
        }
        let active: Vec<_> = self.earlier.iter().filter(|earlier| now < earlier.until).collect();
        if self.newest == new || active.iter().any(|earlier| earlier.secret == new) {
            return Err(RotateError::Repeated);
        }
        if overlap.is_zero() {
            return Ok(Self::new(new));
        }
        let next_end = active.iter().map(|earlier| earlier.until).min();
        if let Some(next_end) = next_end
            && active.len() + 2 > ENDPOINT_SECRETS_MAX
        {
            return Err(RotateError::TooMany { next_end });
        }
        let until = now.checked_add(overlap).map_err(|_| RotateError::OverlapTooLong)?;
        let replaced = EarlierSecret { secret: self.newest.clone(), until };
        let earlier = std::iter::once(replaced).chain(active.into_iter().cloned()).collect();
        Ok(Self { newest: new, earlier })
    }

    /// The value of `webhook-signature` for an attempt at `now`: one signature for each secret that is active
    /// then, the newest first. The value of `webhook-timestamp` is `now` in whole seconds.
    ///
    /// `id` is the value of `webhook-id`. It must not contain a dot, which separates what is signed.
    pub fn sign(&self, id: &str, now: Timestamp, body: &[u8]) -> HeaderValue {
        debug_assert!(!id.contains('.'), "the id of a message contains a dot");
        let timestamp = now.as_second().to_string();
        let mut value = String::with_capacity(ENDPOINT_SECRETS_MAX * 48);
        for secret in self.active(now) {
            if !value.is_empty() {
                value.push(' ');
            }
            value.push_str("v1,");
            STANDARD.encode_string(secret.signature(id, &timestamp, body), &mut value);
        }
        HeaderValue::from_maybe_shared(bytes::Bytes::from(value)).expect("base64 is visible ASCII")
    }

    /// The secrets that sign at `now`, the newest first.
    pub fn active(&self, now: Timestamp) -> impl Iterator<Item = &SigningSecret> {
        let earlier = self.earlier.iter().filter(move |earlier| now < earlier.until);
        std::iter::once(&self.newest).chain(earlier.map(|earlier| &earlier.secret))
    }

    /// When the next earlier secret ends, if one is active at `now`.
    pub fn next_end(&self, now: Timestamp) -> Option<Timestamp> {
        self.earlier.iter().map(|earlier| earlier.until).filter(|until| now < *until).min()
    }

    /// The bytes to seal. The ends are among them: a secret cannot be prolonged without the vault's key.
    pub fn to_bytes(&self) -> Zeroizing<Vec<u8>> {
        let earlier = self.earlier.iter().map(|it| (it.until.as_nanosecond(), &it.secret));
        let all = std::iter::once((0, &self.newest)).chain(earlier);
        let length: usize = all.clone().map(|(_, secret)| 17 + secret.0.len()).sum();
        // The exact capacity: a vector that grows would leave copies of secrets in freed memory.
        let mut bytes = Zeroizing::new(Vec::with_capacity(1 + length));
        bytes.push(FORM);
        for (until_ns, secret) in all {
            bytes.extend_from_slice(&until_ns.to_be_bytes());
            bytes.push(u8::try_from(secret.0.len()).expect("a secret has at most 64 bytes"));
            bytes.extend_from_slice(&secret.0);
        }
        bytes
    }

    /// Reads what [`EndpointSecrets::to_bytes`] wrote.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, UnknownSecretsForm> {
        let Some((&FORM, mut rest)) = bytes.split_first() else { return Err(UnknownSecretsForm) };
        let mut all = Vec::new();
        while !rest.is_empty() {
            let (until_ns, after) = rest.split_first_chunk::<16>().ok_or(UnknownSecretsForm)?;
            let (length, after) = after.split_first().ok_or(UnknownSecretsForm)?;
            let (secret, after) =
                after.split_at_checked(usize::from(*length)).ok_or(UnknownSecretsForm)?;
            let secret = SigningSecret::from_bytes(Zeroizing::new(secret.to_vec()));
            let until = Timestamp::from_nanosecond(i128::from_be_bytes(*until_ns));
            let (Ok(secret), Ok(until)) = (secret, until) else { return Err(UnknownSecretsForm) };
            all.push(EarlierSecret { secret, until });
            rest = after;
        }
        let mut all = all.into_iter();
        let EarlierSecret { secret: newest, .. } = all.next().ok_or(UnknownSecretsForm)?;
        Ok(Self { newest, earlier: all.collect() })
    }
}

/// The form of the bytes that are sealed: this byte, and for each secret its end in nanoseconds (16 bytes,
/// zero for the newest, which has no end), its length (1 byte) and itself.
const FORM: u8 = 1;

const SECRET_BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);
