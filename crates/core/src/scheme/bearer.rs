//! Senders that sign nothing and show a shared secret instead: a token in a header, or HTTP Basic.

use aws_lc_rs::{constant_time, digest};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::HeaderMap;
use jiff::Timestamp;
use zeroize::Zeroizing;

use super::keys::{self, Held};
use super::{
    Authentic, Proof, SchemeError, SignError, Signed, SignedContent, expired, first_missing, needed,
};
use crate::arrival::Arrival;
use crate::limits::TOKEN_CHARS_MIN;
use crate::source::SourceSpec;
use crate::verify::Refusal;

/// What is shown, and its digest: comparing digests hides the length too.
struct Shown {
    text: Zeroizing<String>,
    digest: [u8; 32],
}

impl Shown {
    fn new(text: &str) -> Self {
        Self { text: Zeroizing::new(text.to_owned()), digest: digest_of(text.as_bytes()) }
    }
}

fn digest_of(bytes: &[u8]) -> [u8; 32] {
    let mut all = [0; 32];
    all.copy_from_slice(digest::digest(&digest::SHA256, bytes).as_ref());
    all
}

fn shown_by(keys: &[Held<Shown>], given: &[u8], now: Timestamp) -> Result<Authentic, Refusal> {
    let given = digest_of(given);
    let mut tried = 0;
    for (secret, shown) in keys::active(keys, now) {
        tried += 1;
        if constant_time::verify_slices_are_equal(&shown.digest, &given).is_ok() {
            return Ok(Authentic { signed_at: None, secret });
        }
    }
    match tried {
        0 => Err(expired()),
        _ => Err(Refusal::Signature("it is not the secret of this source".into())),
    }
}

fn first_active(keys: &[Held<Shown>], now: Timestamp) -> Result<&str, SignError> {
    keys::active(keys, now)
        .next()
        .map(|(_, shown)| shown.text.as_str())
        .ok_or_else(|| SignError("no secret is active any more".into()))
}

/// A token is all the proof there is, so it must not be one that can be guessed.
fn long_enough(token: &str, shown: Shown) -> Result<Shown, String> {
    match token.chars().count() {
        ..TOKEN_CHARS_MIN => Err(format!("it is shorter than {TOKEN_CHARS_MIN} characters")),
        TOKEN_CHARS_MIN.. => Ok(shown),
    }
}

/// A shared token in a header.
pub(super) struct TokenProof {
    header: &'static str,
    prefix: &'static str,
    keys: Vec<Held<Shown>>,
}

impl TokenProof {
    pub(super) fn compile(
        header: &'static str,
        prefix: &'static str,
        spec: &SourceSpec,
    ) -> Result<Self, SchemeError> {
        let keys = keys::prepare(&spec.secrets, |text| long_enough(text, Shown::new(text)))?;
        Ok(Self { header, prefix, keys })
    }
}

impl Proof for TokenProof {
    fn missing<'a>(&'a self, headers: &HeaderMap) -> Option<&'a str> {
        first_missing(headers, std::iter::once(self.header))
    }

    fn authenticate(&self, arrival: &Arrival, now: Timestamp) -> Result<Authentic, Refusal> {
        let header = needed(arrival, self.header)?;
        let token = header.strip_prefix(self.prefix).ok_or_else(|| {
            Refusal::Signature(format!("{} does not begin with {}", self.header, self.prefix))
        })?;
        shown_by(&self.keys, token.as_bytes(), now)
    }

    fn sign(&self, _request: &Arrival, _id: &str, now: Timestamp) -> Result<Signed, SignError> {
        let token = first_active(&self.keys, now)?;
        let header = (self.header.to_owned(), format!("{}{token}", self.prefix));
        Ok(Signed { headers: vec![header], ..Signed::default() })
    }

    fn signed_content(&self, _arrival: &Arrival) -> Result<SignedContent, Refusal> {
        Ok(SignedContent::Nothing)
    }

    fn secret_header(&self) -> Option<&str> {
        Some(self.header)
    }
}

/// HTTP Basic credentials.
pub(super) struct BasicProof {
    keys: Vec<Held<Shown>>,
}

impl BasicProof {
    pub(super) fn compile(spec: &SourceSpec) -> Result<Self, SchemeError> {
        let keys = keys::prepare(&spec.secrets, |text| match text.split_once(':') {
            Some((user, password)) if !user.is_empty() && !password.is_empty() => {
                long_enough(password, Shown::new(text))
            }
            _ => Err("it is not user:password".to_owned()),
        })?;
        Ok(Self { keys })
    }
}

impl Proof for BasicProof {
    fn missing<'a>(&'a self, headers: &HeaderMap) -> Option<&'a str> {
        first_missing(headers, std::iter::once("authorization"))
    }

    fn authenticate(&self, arrival: &Arrival, now: Timestamp) -> Result<Authentic, Refusal> {
        let header = needed(arrival, "authorization")?;
        let credentials = header
            .split_once(' ')
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("basic"))
            .and_then(|(_, credentials)| STANDARD.decode(credentials).ok())
            .ok_or_else(|| Refusal::Signature("not well-formed Basic credentials".into()))?;
        shown_by(&self.keys, &credentials, now)
    }

    fn sign(&self, _request: &Arrival, _id: &str, now: Timestamp) -> Result<Signed, SignError> {
        let credentials = STANDARD.encode(first_active(&self.keys, now)?);
        let header = ("authorization".to_owned(), format!("Basic {credentials}"));
        Ok(Signed { headers: vec![header], ..Signed::default() })
    }

    fn signed_content(&self, _arrival: &Arrival) -> Result<SignedContent, Refusal> {
        Ok(SignedContent::Nothing)
    }

    fn secret_header(&self) -> Option<&str> {
        Some("authorization")
    }
}
