//! Senders that sign nothing and present a shared secret: a token in a header, or HTTP Basic credentials.

use aws_lc_rs::{constant_time, digest};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::HeaderMap;
use jiff::Timestamp;
use zeroize::Zeroizing;

use super::keys::{self, ExpiringKey};
use super::{
    Authentic, SchemeError, SchemeVerifier, SignError, Signed, SignedContent, expired,
    first_missing, needed,
};
use crate::arrival::Arrival;
use crate::limits::TOKEN_CHARS_MIN;
use crate::source::SourceSpec;
use crate::verify::Refusal;

/// A shared secret and its digest: comparing digests hides the length too.
struct SharedSecret {
    text: Zeroizing<String>,
    digest: [u8; 32],
}

impl SharedSecret {
    fn new(text: &str) -> Self {
        Self { text: Zeroizing::new(text.to_owned()), digest: digest_of(text.as_bytes()) }
    }
}

fn digest_of(bytes: &[u8]) -> [u8; 32] {
    let mut all = [0; 32];
    all.copy_from_slice(digest::digest(&digest::SHA256, bytes).as_ref());
    all
}

fn authenticate_by(
    keys: &[ExpiringKey<SharedSecret>],
    given: &[u8],
    now: Timestamp,
) -> Result<Authentic, Refusal> {
    let given = digest_of(given);
    let mut tried = 0;
    for (secret, shared) in keys::active(keys, now) {
        tried += 1;
        if constant_time::verify_slices_are_equal(&shared.digest, &given).is_ok() {
            return Ok(Authentic { signed_at: None, secret });
        }
    }
    match tried {
        0 => Err(expired()),
        _ => Err(Refusal::Signature("the secret is not the one of this source".into())),
    }
}

fn first_active(keys: &[ExpiringKey<SharedSecret>], now: Timestamp) -> Result<&str, SignError> {
    keys::active(keys, now)
        .next()
        .map(|(_, shared)| shared.text.as_str())
        .ok_or_else(|| SignError("every secret of this source has expired".into()))
}

/// The token is the only authentication, so it must not be guessable.
fn long_enough(token: &str, shared: SharedSecret) -> Result<SharedSecret, String> {
    match token.chars().count() {
        ..TOKEN_CHARS_MIN => Err(format!("it is shorter than {TOKEN_CHARS_MIN} characters")),
        TOKEN_CHARS_MIN.. => Ok(shared),
    }
}

/// A shared token in a header.
pub(super) struct TokenVerifier {
    header: &'static str,
    prefix: &'static str,
    keys: Vec<ExpiringKey<SharedSecret>>,
}

impl TokenVerifier {
    pub(super) fn compile(
        header: &'static str,
        prefix: &'static str,
        spec: &SourceSpec,
    ) -> Result<Self, SchemeError> {
        let keys = keys::prepare(&spec.secrets, |text| long_enough(text, SharedSecret::new(text)))?;
        Ok(Self { header, prefix, keys })
    }
}

impl SchemeVerifier for TokenVerifier {
    fn missing<'a>(&'a self, headers: &HeaderMap) -> Option<&'a str> {
        first_missing(headers, std::iter::once(self.header))
    }

    fn authenticate(&self, arrival: &Arrival, now: Timestamp) -> Result<Authentic, Refusal> {
        let header = needed(arrival, self.header)?;
        let token = header.strip_prefix(self.prefix).ok_or_else(|| {
            Refusal::Signature(format!("{} does not begin with {}", self.header, self.prefix))
        })?;
        authenticate_by(&self.keys, token.as_bytes(), now)
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
pub(super) struct BasicVerifier {
    keys: Vec<ExpiringKey<SharedSecret>>,
}

impl BasicVerifier {
    pub(super) fn compile(spec: &SourceSpec) -> Result<Self, SchemeError> {
        let keys = keys::prepare(&spec.secrets, |text| match text.split_once(':') {
            Some((user, password)) if !user.is_empty() && !password.is_empty() => {
                long_enough(password, SharedSecret::new(text))
            }
            _ => Err("it is not user:password".to_owned()),
        })?;
        Ok(Self { keys })
    }
}

impl SchemeVerifier for BasicVerifier {
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
        authenticate_by(&self.keys, &credentials, now)
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
