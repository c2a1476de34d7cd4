//! How a request proves its sender. A [`Recipe`] and the source's keys are compiled once into a [`Scheme`],
//! which checks raw bytes in constant time, and signs if the key allows it.
//!
//! [`recipe`] describes ways of signing, and [`crate::presets`] assigns one to each sender.
//! [`mod@crate::verify`] checks the window of a signed timestamp, by one rule for all schemes.

mod body_signature;
mod composed;
pub mod coverage;
mod custom;
mod keys;
mod paypal;
mod plaid;
pub mod recipe;
pub mod sender_key;
mod shared_secret;
mod time;
mod url_signature;

use std::fmt;

use aws_lc_rs::digest;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use jiff::Timestamp;

use self::coverage::{Coverage, Covered};
use self::recipe::{KeyForm, Recipe};
use self::sender_key::{KeyRequest, SenderKey, SenderKeyError};
use crate::arrival::Arrival;
use crate::envelope::Origin;
use crate::key::KeyHash;
use crate::presets::{Preset, PresetGuard, PresetId};
use crate::sample;
use crate::secret::{ActiveSecret, Secret};
use crate::source::SourceSpec;
use crate::verify::Refusal;

/// `[sources.NAME.scheme]` as the config gives it.
#[derive(Debug, Clone, Default)]
pub struct CustomScheme {
    /// `hmac-sha256`, `hmac-sha1` or `hmac-sha512`.
    pub algorithm: Option<String>,
    /// The header that carries the signature.
    pub header: Option<String>,
    /// The text before the signature.
    pub prefix: Option<String>,
    /// `hex` or `base64`.
    pub encoding: Option<String>,
    /// The signed content, such as `{timestamp}.{body}`.
    pub content: Option<String>,
    /// The timestamp: `header:x-timestamp`, or a JSON pointer into the signed body.
    pub timestamp: Option<String>,
    /// How the secret is written: `utf8`, `base64` or `hex`.
    pub secret_encoding: Option<String>,
}

/// Why a scheme cannot be built.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchemeError {
    /// The config key below `[sources.NAME]`.
    pub field: &'static str,
    /// The problem in words.
    pub problem: String,
    /// How to fix the problem.
    pub hint: String,
}

impl SchemeError {
    /// An error with its three parts.
    pub fn new(field: &'static str, problem: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { field, problem: problem.into(), hint: hint.into() }
    }
}

/// A compiled scheme with its keys.
pub struct Scheme {
    verifier: Box<dyn SchemeVerifier>,
    /// The signed parts, for each set of header names.
    coverage: Vec<Coverage>,
    /// A hash of the bytes of each secret, in their order.
    key_hashes: Vec<KeyHash>,
    /// The header that carries the sender's event id, if there is one.
    id_header: Option<&'static str>,
    /// The header that carries the type, if the guard needs it, and a common type of this sender.
    type_header: Option<(&'static str, &'static str)>,
}

/// Proof that a request was signed by one of the source's secrets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Authentic {
    /// The timestamp inside the signed content.
    pub signed_at: Option<Timestamp>,
    /// The index of the secret in the config.
    pub secret: usize,
}

/// A hash of everything that was signed, in the one form that the signature fixes. Where the sender
/// signs decoded fields, they are decoded and sorted. The parts are hashed without boundaries, since a
/// signature does not fix the boundaries either.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SignedContent {
    /// The sender presents a secret and signs nothing.
    Nothing,
    /// One signature for the whole request.
    Whole([u8; 32]),
    /// One signature for each item of the body.
    Items(Vec<[u8; 32]>),
}

impl SignedContent {
    fn whole<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Self {
        Self::Whole(Self::hash(pieces))
    }

    /// One hash of all pieces, without their boundaries.
    fn hash<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> [u8; 32] {
        let mut hasher = digest::Context::new(&digest::SHA256);
        pieces.into_iter().for_each(|piece| hasher.update(piece));
        finished(hasher)
    }
}

fn finished(hasher: digest::Context) -> [u8; 32] {
    let mut all = [0; 32];
    all.copy_from_slice(hasher.finish().as_ref());
    all
}

/// The parts of a request that a signer adds or replaces.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Signed {
    /// Headers to set, in a readable order.
    pub headers: Vec<(String, String)>,
    /// The body to send instead, if it contains the signature or the timestamp.
    pub body: Option<Bytes>,
    /// The URL to send to instead, if it carries the body's digest.
    pub url: Option<String>,
}

/// Why a request cannot be signed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SignError(pub String);

/// One way of signing. There is one implementation for each kind of [`Recipe`].
trait SchemeVerifier: Send + Sync {
    fn missing<'a>(&'a self, headers: &HeaderMap) -> Option<&'a str>;
    fn authenticate(&self, arrival: &Arrival, now: Timestamp) -> Result<Authentic, Refusal>;
    fn sign(&self, request: &Arrival, id: &str, now: Timestamp) -> Result<Signed, SignError>;

    /// The hash of the signed content of an arrival that was authenticated.
    fn signed_content(&self, arrival: &Arrival) -> Result<SignedContent, Refusal>;

    /// The header that carries the secret itself, where nothing is signed.
    fn secret_header(&self) -> Option<&str> {
        None
    }

    /// The key that must be fetched before a request with these headers can be checked.
    fn key_request(
        &self,
        _headers: &HeaderMap,
        _now: Timestamp,
    ) -> Result<Option<KeyRequest>, Refusal> {
        Ok(None)
    }

    /// Reads the answer to a [`KeyRequest`].
    fn read_key(
        &self,
        _request: &KeyRequest,
        _answer: &[u8],
        _now: Timestamp,
    ) -> Result<SenderKey, SenderKeyError> {
        Err(SenderKeyError("this sender's keys are configured".into()))
    }

    /// The same as [`SchemeVerifier::authenticate`], with a key that was fetched.
    fn authenticate_with_key(
        &self,
        arrival: &Arrival,
        _key: &SenderKey,
        now: Timestamp,
    ) -> Result<Authentic, Refusal> {
        self.authenticate(arrival, now)
    }
}

impl Scheme {
    /// Compiles a preset's scheme with the keys of `spec`.
    pub fn of_preset(preset: &'static Preset, spec: &SourceSpec) -> Result<Self, SchemeError> {
        if preset.recipe.signs_url() && !spec.url_known {
            return Err(SchemeError::new(
                "provider",
                format!("{} signs the full URL, and public_url is not set", preset.title),
                "set public_url at the top of the config to the address that the sender posts to",
            ));
        }
        let id_header = match preset.envelope.id {
            PresetId::Selector(selector) => selector.strip_prefix("header:"),
            PresetId::FirstOf(selectors) | PresetId::Joined(selectors) => {
                selectors.first().and_then(|selector| selector.strip_prefix("header:"))
            }
            PresetId::Hash { .. } => None,
        };
        let type_header = match preset.guard {
            PresetGuard::SignedAndType => preset
                .envelope
                .event_type
                .first()
                .and_then(|selector| selector.strip_prefix("header:"))
                .zip(sample::best_known_type(preset.name)),
            PresetGuard::Signed | PresetGuard::Off => None,
        };
        let (recipe, verifier) = compile(&preset.recipe, spec)?;
        Ok(Self {
            verifier,
            coverage: Coverage::of(recipe),
            key_hashes: match recipe {
                Recipe::PayPal => paypal::webhook_id_hashes(spec),
                _ => key_hashes(recipe.key_form(), spec),
            },
            id_header,
            type_header,
        })
    }

    /// Compiles `[sources.NAME.scheme]`.
    pub fn of_custom(custom: &CustomScheme, spec: &SourceSpec) -> Result<Self, SchemeError> {
        let (verifier, coverage, form) = custom::compile(custom, spec)?;
        Ok(Self {
            verifier: Box::new(verifier),
            coverage: vec![coverage],
            key_hashes: key_hashes(Some(form), spec),
            id_header: None,
            type_header: None,
        })
    }

    /// Checks the signature over the raw bytes, in constant time. The time window is not checked here.
    pub fn authenticate(&self, arrival: &Arrival, now: Timestamp) -> Result<Authentic, Refusal> {
        self.verifier.authenticate(arrival, now)
    }

    /// [`Scheme::authenticate`] with a key that was fetched for this request, where
    /// [`Scheme::key_request`] asked for one.
    pub fn authenticate_with_key(
        &self,
        arrival: &Arrival,
        key: Option<&SenderKey>,
        now: Timestamp,
    ) -> Result<Authentic, Refusal> {
        match key {
            Some(key) => self.verifier.authenticate_with_key(arrival, key, now),
            None => self.verifier.authenticate(arrival, now),
        }
    }

    /// The key of the sender that must be fetched before a request with these headers can be verified. `None`
    /// if every key is configured. A request that names a key elsewhere than at the sender is refused.
    pub fn key_request(
        &self,
        headers: &HeaderMap,
        now: Timestamp,
    ) -> Result<Option<KeyRequest>, Refusal> {
        self.verifier.key_request(headers, now)
    }

    /// Reads the answer to a [`KeyRequest`]: the sender must be its owner, and a certificate must chain to the
    /// roots at `now`.
    pub fn read_key(
        &self,
        request: &KeyRequest,
        answer: &[u8],
        now: Timestamp,
    ) -> Result<SenderKey, SenderKeyError> {
        self.verifier.read_key(request, answer, now)
    }

    /// The first required header that is missing. A request that cannot verify is refused by this before
    /// its body is read.
    pub fn missing(&self, headers: &HeaderMap) -> Option<&str> {
        self.verifier.missing(headers)
    }

    /// A hash of the bytes of each secret, in their order. `whsec_X` and `X` have the same hash if the
    /// prefix is only notation. For PayPal: a hash of each webhook id, because only this id distinguishes the
    /// signed content of one pair from that of another.
    pub fn key_hashes(&self) -> &[KeyHash] {
        &self.key_hashes
    }

    /// The signed parts, for each set of header names that the sender uses.
    pub fn coverage(&self) -> &[Coverage] {
        &self.coverage
    }

    /// Whether a timestamp is signed.
    pub fn signs_time(&self) -> bool {
        self.coverage.iter().all(Coverage::signs_time)
    }

    /// Whether anything is signed. If not, the sender only presents a secret.
    pub fn signs_something(&self) -> bool {
        self.coverage.iter().all(Coverage::signs_something)
    }

    /// Whether a value from this origin is signed.
    pub fn signs(&self, origin: Origin<'_>) -> bool {
        self.coverage.iter().all(|coverage| match coverage.covers(origin) {
            Covered::Yes | Covered::Always => true,
            Covered::Missing | Covered::No => false,
        })
    }

    /// The hash of the signed content of an arrival that [`Scheme::authenticate`] has accepted.
    pub fn signed_content(&self, arrival: &Arrival) -> Result<SignedContent, Refusal> {
        self.verifier.signed_content(arrival)
    }

    /// Headers whose value is the secret itself (tokens, Basic credentials). Such headers are never stored
    /// or printed.
    pub fn secret_headers(&self) -> Vec<String> {
        self.verifier.secret_header().map(str::to_owned).into_iter().collect()
    }

    /// Signs `request` as the sender would, with the first secret that is active at `now`.
    ///
    /// Headers that `request` already has are signed as they are and not returned. Where a header must
    /// carry an id, it is `id`, or one derived from body and time if `id` is `None`.
    pub fn sign(
        &self,
        request: &Arrival,
        id: Option<&str>,
        now: Timestamp,
    ) -> Result<Signed, SignError> {
        let derived;
        let id = match id {
            Some(id) => id,
            None => {
                let at = now.as_nanosecond().to_be_bytes();
                derived = format!("msg_{:?}", KeyHash::of(b"sign", [&request.body[..], &at]));
                &derived
            }
        };
        let mut signed = self.verifier.sign(request, id, now)?;
        if let Some(name) = self.id_header
            && !request.headers.contains_key(name)
            && !signed.headers.iter().any(|(known, _)| known == name)
        {
            signed.headers.insert(0, (name.to_owned(), id.to_owned()));
        }
        if let Some((name, event_type)) = self.type_header
            && !request.headers.contains_key(name)
        {
            signed.headers.insert(0, (name.to_owned(), event_type.to_owned()));
        }
        Ok(signed)
    }
}

impl fmt::Debug for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scheme").finish_non_exhaustive()
    }
}

impl Signed {
    /// The request as it would be sent.
    pub fn apply(self, request: &Arrival) -> Result<Arrival, SignError> {
        let mut request = request.clone();
        for (name, value) in self.headers {
            let unfit = |_| SignError(format!("the value of {name} is not valid in a header"));
            let value = HeaderValue::from_str(&value).map_err(unfit)?;
            let name = HeaderName::from_bytes(name.as_bytes())
                .map_err(|_| SignError(format!("{name} is not a header name")))?;
            request.headers.insert(name, value);
        }
        if let Some(body) = self.body {
            request.body = body;
        }
        if let Some(url) = self.url {
            request.url = url;
        }
        Ok(request)
    }
}

/// Writes `random` as a secret that `recipe` accepts, for development. `None` if only the sender has
/// the private key.
pub(crate) fn secret_from(recipe: &Recipe, random: &[u8; 32]) -> Option<Secret> {
    let text = match recipe {
        Recipe::Composed(composed) if composed.algorithm.is_symmetric() => {
            keys::key_text(composed.key, random)
        }
        Recipe::AlternativeNames([composed, ..]) if composed.algorithm.is_symmetric() => {
            keys::key_text(composed.key, random)
        }
        Recipe::Composed(_) | Recipe::AlternativeNames(_) => return None,
        Recipe::BySecret { without, .. } => return secret_from(without, random),
        Recipe::ByParam { choices, .. } => {
            return choices.first().and_then(|(_, recipe)| secret_from(recipe, random));
        }
        Recipe::Twilio | Recipe::Adyen | Recipe::Mailgun | Recipe::Token { .. } => {
            keys::key_text(KeyForm::Hex, random)
        }
        Recipe::Basic => format!("hapax:{}", hex::encode(random)),
        Recipe::PayPal | Recipe::Plaid => return None,
    };
    Some(Secret::new(text))
}

fn key_hashes(form: Option<KeyForm>, spec: &SourceSpec) -> Vec<KeyHash> {
    let Some(form) = form else { return Vec::new() };
    let hash = |secret: &ActiveSecret| {
        let bytes = keys::key_bytes(form, secret.secret.expose()).unwrap_or_default();
        // HMAC pads a key with zeros, so trailing zeros do not make a different key.
        let end = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        KeyHash::of(b"secret", [&bytes[..end]])
    };
    spec.secrets.iter().map(hash).collect()
}

/// The recipe that these keys and parameters choose, and the verifier compiled from it.
fn compile<'r>(
    recipe: &'r Recipe,
    spec: &SourceSpec,
) -> Result<(&'r Recipe, Box<dyn SchemeVerifier>), SchemeError> {
    let verifier: Box<dyn SchemeVerifier> = match recipe {
        Recipe::Composed(composed) => {
            Box::new(composed::ComposedVerifier::compile(composed, spec)?)
        }
        Recipe::AlternativeNames(names) => {
            Box::new(composed::AlternativeVerifier::compile(names, spec)?)
        }
        Recipe::BySecret { prefix, with, without } => {
            let matching = spec
                .secrets
                .iter()
                .filter(|secret| secret.secret.expose().starts_with(prefix))
                .count();
            if matching == 0 {
                return compile(without, spec);
            }
            if matching == spec.secrets.len() {
                return compile(with, spec);
            }
            return Err(SchemeError::new(
                "secrets",
                format!("some secrets begin with {prefix} and some do not"),
                "the form of a secret selects the scheme; keep secrets of one form",
            ));
        }
        Recipe::ByParam { param, choices } => {
            let choice = match spec.params.get(*param) {
                None => choices.first(),
                Some(value) => choices.iter().find(|(name, _)| name == value),
            };
            let names = || choices.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
            let (_, recipe) = choice.ok_or_else(|| {
                SchemeError::new(
                    "params",
                    format!("unknown {param}"),
                    format!("one of {}", names()),
                )
            })?;
            return compile(recipe, spec);
        }
        Recipe::Twilio => Box::new(url_signature::TwilioVerifier::compile(spec)?),
        Recipe::Adyen => Box::new(body_signature::AdyenVerifier::compile(spec)?),
        Recipe::Mailgun => Box::new(body_signature::MailgunVerifier::compile(spec)?),
        Recipe::PayPal => Box::new(paypal::PayPalVerifier::compile(spec)?),
        Recipe::Plaid => Box::new(plaid::PlaidVerifier::compile(spec)?),
        Recipe::Token { header, prefix } => {
            Box::new(shared_secret::TokenVerifier::compile(header, prefix, spec)?)
        }
        Recipe::Basic => Box::new(shared_secret::BasicVerifier::compile(spec)?),
    };
    Ok((recipe, verifier))
}

/// A required parameter of a scheme.
fn param<'a>(spec: &'a SourceSpec, name: &str, meaning: &str) -> Result<&'a str, SchemeError> {
    let value = spec.params.get(name).map(String::as_str).unwrap_or_default();
    if value.trim().is_empty() {
        return Err(SchemeError::new(
            "params",
            format!("{} needs the parameter {name}", spec.provider),
            format!("set {name} to {meaning}"),
        ));
    }
    Ok(value)
}

/// The text of a required header.
fn needed<'a>(arrival: &'a Arrival, name: &str) -> Result<std::borrow::Cow<'a, str>, Refusal> {
    if !arrival.headers.contains_key(name) {
        return Err(Refusal::Missing(format!("no {name} header")));
    }
    match arrival.header_text(name) {
        Some(text) if text.is_empty() => {
            Err(Refusal::Missing(format!("the {name} header is empty")))
        }
        Some(text) => Ok(text),
        None => Err(Refusal::Signature(format!("the {name} header is not text"))),
    }
}

/// The first of these headers that is missing.
fn first_missing<'a>(
    headers: &HeaderMap,
    mut names: impl Iterator<Item = &'a str>,
) -> Option<&'a str> {
    names.find(|name| !headers.contains_key(*name))
}

/// The refusal of a request whose key was not fetched: only a server fetches keys.
fn not_fetched(params: &str) -> Refusal {
    Refusal::Signature(format!(
        "the sender's key is fetched by `hapax serve`; give it as {params} to verify without it"
    ))
}

fn expired() -> Refusal {
    Refusal::Signature("every secret of this source has expired".into())
}

fn only_the_sender(title: &str) -> SignError {
    SignError(format!("{title} signs with a private key that only the sender has"))
}
