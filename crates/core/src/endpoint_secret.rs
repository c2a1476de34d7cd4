//! The secrets of an endpoint: how they are made and parsed, how they sign a delivery, and how one replaces
//! another without a delivery that the receiver cannot verify.
//!
//! A delivery carries one signature for each active secret. The [`Signing`] of the secret decides its form:
//! `v1` and `v1a` of Standard Webhooks 1.0, or a timestamp with HMACs in hex. [`crate::vault`] seals the
//! secrets before they are stored.

use std::fmt;
use std::time::Duration;

use aws_lc_rs::signature::{Ed25519KeyPair, KeyPair as _};
use aws_lc_rs::{constant_time, hmac};
use base64::Engine as _;
use base64::alphabet;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig, STANDARD};
use http::HeaderValue;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::limits::{
    ENDPOINT_SECRETS_MAX, SECRET_OVERLAP_MAX, SIGNING_SECRET_BYTES_MAX, SIGNING_SECRET_BYTES_MIN,
};

/// How the deliveries of an endpoint are signed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Signing {
    /// Standard Webhooks with a shared secret: `v1,` and the base64 of HMAC-SHA256 over `id.timestamp.body`.
    #[default]
    Standard,
    /// Standard Webhooks with a key pair: `v1a,` and the base64 of an Ed25519 signature over the same content.
    /// Receivers need only the public key.
    Ed25519,
    /// `t=timestamp,v1=…`: HMAC-SHA256 over `timestamp.body` in hex. Its key is the text of the secret.
    Timestamped,
}

impl Signing {
    /// Its word in the API, the command line and the dashboard.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Standard => "standard",
            Self::Ed25519 => "ed25519",
            Self::Timestamped => "timestamped",
        }
    }

    /// The prefix of its secrets.
    fn prefix(self) -> &'static str {
        match self {
            Self::Standard | Self::Timestamped => SHARED_PREFIX,
            Self::Ed25519 => PRIVATE_PREFIX,
        }
    }
}

/// One secret of an endpoint. It cannot be printed, and its memory is wiped when it is dropped.
#[derive(Clone)]
pub struct SigningSecret {
    signing: Signing,
    /// The shared bytes, or the seed of the Ed25519 key.
    bytes: Zeroizing<Vec<u8>>,
}

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
    /// The instant from which the secret does not sign.
    until: Timestamp,
}

/// Why a text is not a signing secret. The message never quotes the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SigningSecretError {
    /// The prefix is missing.
    #[error("a secret of this kind begins with {0}")]
    NoPrefix(&'static str),
    /// The text after the prefix is not base64.
    #[error("the text after {0} is not base64")]
    NotBase64(&'static str),
    /// The secret is too short or too long.
    #[error(
        "the secret holds {0} bytes; Standard Webhooks requires {SIGNING_SECRET_BYTES_MIN} to \
         {SIGNING_SECRET_BYTES_MAX}"
    )]
    Length(usize),
    /// The base64 has no padding, and receivers of timestamped signatures use the text itself as
    /// the key.
    #[error(
        "the base64 lacks its padding, and receivers of timestamped signatures use the text itself"
    )]
    NoPadding,
    /// The bytes are not a private key.
    #[error(
        "the text after {PRIVATE_PREFIX} is not an Ed25519 private key: 32 bytes, or 64 with the public key \
         after it"
    )]
    NotAKey,
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

/// The prefix of shared secrets.
const SHARED_PREFIX: &str = "whsec_";

/// The prefix of Ed25519 private keys.
const PRIVATE_PREFIX: &str = "whsk_";

/// The prefix of Ed25519 public keys.
const PUBLIC_PREFIX: &str = "whpk_";

/// The bytes of the seed of an Ed25519 key.
const SEED_BYTES: usize = 32;

impl SigningSecret {
    /// The secret with these random bytes.
    pub fn generate(signing: Signing, random: &[u8; 32]) -> Self {
        Self { signing, bytes: Zeroizing::new(random.to_vec()) }
    }

    /// The operator's own secret, or one with these random bytes.
    pub fn given_or_generated(
        signing: Signing,
        given: Option<&str>,
        random: &[u8; 32],
    ) -> Result<Self, SigningSecretError> {
        given.map_or_else(|| Ok(Self::generate(signing, random)), |text| Self::parse(signing, text))
    }

    /// Parses a secret: `whsec_` and 24 to 64 bytes in base64, or `whsk_` and an Ed25519 private key.
    pub fn parse(signing: Signing, text: &str) -> Result<Self, SigningSecretError> {
        let prefix = signing.prefix();
        let encoded = text.strip_prefix(prefix).ok_or(SigningSecretError::NoPrefix(prefix))?;
        let bytes =
            SECRET_BASE64.decode(encoded).map_err(|_| SigningSecretError::NotBase64(prefix))?;
        let bytes = Zeroizing::new(bytes);
        let secret = match signing {
            Signing::Standard | Signing::Timestamped => Self::from_bytes(signing, &bytes)?,
            Signing::Ed25519 => Self::from_key(&bytes)?,
        };
        let is_text_used = signing == Signing::Timestamped;
        if is_text_used && secret.expose().is_none_or(|shown| *shown != text) {
            return Err(SigningSecretError::NoPadding);
        }
        Ok(secret)
    }

    /// Reads a private key: its seed, with or without the public key after it.
    fn from_key(bytes: &[u8]) -> Result<Self, SigningSecretError> {
        let (seed, public) =
            bytes.split_at_checked(SEED_BYTES).ok_or(SigningSecretError::NotAKey)?;
        let secret = Self::from_bytes(Signing::Ed25519, seed)?;
        match public.is_empty() || public == secret.key_pair().public_key().as_ref() {
            true => Ok(secret),
            false => Err(SigningSecretError::NotAKey),
        }
    }

    fn from_bytes(signing: Signing, bytes: &[u8]) -> Result<Self, SigningSecretError> {
        let fits = match signing {
            Signing::Standard | Signing::Timestamped => {
                (SIGNING_SECRET_BYTES_MIN..=SIGNING_SECRET_BYTES_MAX).contains(&bytes.len())
            }
            Signing::Ed25519 => bytes.len() == SEED_BYTES,
        };
        match fits {
            true => Ok(Self { signing, bytes: Zeroizing::new(bytes.to_vec()) }),
            false => Err(SigningSecretError::Length(bytes.len())),
        }
    }

    /// How it signs.
    pub fn signing(&self) -> Signing {
        self.signing
    }

    /// The text to show once: `whsec_` and padded base64, which every verifier of Standard Webhooks accepts.
    /// `None` for a private key, which no receiver needs.
    pub fn expose(&self) -> Option<Zeroizing<String>> {
        match self.signing {
            Signing::Standard | Signing::Timestamped => Some(self.shared_text()),
            Signing::Ed25519 => None,
        }
    }

    fn shared_text(&self) -> Zeroizing<String> {
        // The exact capacity: a string that grows would leave a copy of the secret in freed memory.
        let length = SHARED_PREFIX.len() + self.bytes.len().div_ceil(3) * 4;
        let mut text = String::with_capacity(length);
        text.push_str(SHARED_PREFIX);
        STANDARD.encode_string(&self.bytes[..], &mut text);
        Zeroizing::new(text)
    }

    /// The public key, `whpk_` and base64, of a private one.
    pub fn public_key(&self) -> Option<String> {
        match self.signing {
            Signing::Standard | Signing::Timestamped => None,
            Signing::Ed25519 => {
                let mut text = PUBLIC_PREFIX.to_owned();
                STANDARD.encode_string(self.key_pair().public_key(), &mut text);
                Some(text)
            }
        }
    }

    fn key_pair(&self) -> Ed25519KeyPair {
        Ed25519KeyPair::from_seed_unchecked(&self.bytes).expect("every 32 bytes are a seed")
    }

    /// Appends `v1,…` or `v1a,…`; nothing for a timestamped secret.
    fn push_versioned(&self, value: &mut String, [id, timestamp]: [&str; 2], body: &[u8]) {
        let pieces = [id.as_bytes(), b".", timestamp.as_bytes(), b".", body];
        let label = match self.signing {
            Signing::Standard => "v1,",
            Signing::Ed25519 => "v1a,",
            Signing::Timestamped => return,
        };
        if !value.is_empty() {
            value.push(' ');
        }
        value.push_str(label);
        match self.signing {
            Signing::Ed25519 => {
                STANDARD.encode_string(self.key_pair().sign(&pieces.concat()), value);
            }
            Signing::Standard | Signing::Timestamped => {
                STANDARD.encode_string(hmac_of(&self.bytes, &pieces), value);
            }
        }
    }
}

fn hmac_of(key: &[u8], pieces: &[&[u8]]) -> hmac::Tag {
    let mut signing = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, key));
    pieces.iter().for_each(|piece| signing.update(piece));
    signing.sign()
}

impl PartialEq for SigningSecret {
    fn eq(&self, other: &Self) -> bool {
        self.signing == other.signing
            && constant_time::verify_slices_are_equal(&self.bytes, &other.bytes).is_ok()
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

    /// Replaces the newest secret by `new`. The replaced secret signs for `overlap` longer; earlier secrets
    /// keep their ends. An overlap of zero ends all earlier secrets now.
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
    /// then. The value of `webhook-timestamp` is `now` in whole seconds.
    ///
    /// Signatures are separated by spaces: `v1` and `v1a` first, and among them the newest first. Timestamped
    /// ones share one element at the end, `t=…,v1=…,v1=…`. The libraries of Standard Webhooks stop at the
    /// first signature that they can verify. Some fail if an element with two commas comes before that
    /// signature.
    ///
    /// `id` is the value of `webhook-id`. An id must not contain a dot, because dots separate the signed
    /// parts.
    pub fn sign(&self, id: &str, now: Timestamp, body: &[u8]) -> HeaderValue {
        debug_assert!(!id.contains('.'), "the id of a message contains a dot");
        let timestamp = now.as_second().to_string();
        let mut value = String::with_capacity(ENDPOINT_SECRETS_MAX * 96);
        for secret in self.active(now) {
            secret.push_versioned(&mut value, [id, &timestamp], body);
        }
        let timestamped = self.active(now).filter(|it| it.signing == Signing::Timestamped);
        for (place, secret) in timestamped.enumerate() {
            if place == 0 {
                value.push_str(if value.is_empty() { "t=" } else { " t=" });
                value.push_str(&timestamp);
            }
            let pieces = [timestamp.as_bytes(), b".", body];
            value.push_str(",v1=");
            value.push_str(&hex::encode(hmac_of(secret.shared_text().as_bytes(), &pieces)));
        }
        HeaderValue::from_maybe_shared(bytes::Bytes::from(value)).expect("it is visible ASCII")
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

    /// The bytes to seal. The sealed bytes include the ends: the life of a secret cannot be
    /// extended without the vault's key.
    pub fn to_bytes(&self) -> Zeroizing<Vec<u8>> {
        let earlier = self.earlier.iter().map(|it| (it.until.as_nanosecond(), &it.secret));
        let all = std::iter::once((0, &self.newest)).chain(earlier);
        let length: usize = all.clone().map(|(_, secret)| 18 + secret.bytes.len()).sum();
        // The exact capacity: a vector that grows would leave copies of secrets in freed memory.
        let mut bytes = Zeroizing::new(Vec::with_capacity(1 + length));
        bytes.push(FORM);
        for (until_ns, secret) in all {
            bytes.extend_from_slice(&until_ns.to_be_bytes());
            bytes.push(match secret.signing {
                Signing::Standard => 0,
                Signing::Ed25519 => 1,
                Signing::Timestamped => 2,
            });
            bytes.push(u8::try_from(secret.bytes.len()).expect("a secret has at most 64 bytes"));
            bytes.extend_from_slice(&secret.bytes);
        }
        bytes
    }

    /// Reads what [`EndpointSecrets::to_bytes`] wrote.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, UnknownSecretsForm> {
        let Some((&FORM, mut rest)) = bytes.split_first() else { return Err(UnknownSecretsForm) };
        let mut all = Vec::new();
        while !rest.is_empty() {
            let (until_ns, after) = rest.split_first_chunk::<16>().ok_or(UnknownSecretsForm)?;
            let ([signing, length], after) =
                after.split_first_chunk::<2>().ok_or(UnknownSecretsForm)?;
            let (secret, after) =
                after.split_at_checked(usize::from(*length)).ok_or(UnknownSecretsForm)?;
            let signing = match signing {
                0 => Signing::Standard,
                1 => Signing::Ed25519,
                2 => Signing::Timestamped,
                _other => return Err(UnknownSecretsForm),
            };
            let secret = SigningSecret::from_bytes(signing, secret);
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

/// The form of the bytes that are sealed: this byte, and then each secret. A secret has its end in
/// nanoseconds (16 bytes, zero for the newest, which has no end), how it signs (1 byte), its length
/// (1 byte) and its bytes.
const FORM: u8 = 1;

const SECRET_BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);
