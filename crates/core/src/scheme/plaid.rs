//! Plaid: a JWT (ES256) in a header that contains the body's SHA-256. The key is found by its id in the
//! configured key set. The token never selects the algorithm.

use aws_lc_rs::signature::ParsedPublicKey;
use aws_lc_rs::{constant_time, digest};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::HeaderMap;
use jiff::Timestamp;
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::keys;
use super::recipe::Encoding;
use super::{
    Authentic, SchemeError, SchemeVerifier, SignError, Signed, SignedContent, first_missing,
    needed, only_the_sender, param,
};
use crate::arrival::Arrival;
use crate::jwt::p256;
use crate::source::SourceSpec;
use crate::verify::Refusal;

const HEADER: &str = "plaid-verification";

/// The configured keys, in their order.
pub(super) struct PlaidVerifier {
    keys: Vec<Key>,
}

struct Key {
    kid: String,
    expired_at: Option<i64>,
    key: ParsedPublicKey,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum KeySet {
    Keys(Vec<Jwk>),
    Set { keys: Vec<Jwk> },
    One(Jwk),
}

#[derive(Deserialize)]
struct Jwk {
    kid: String,
    kty: String,
    crv: String,
    x: String,
    y: String,
    alg: Option<String>,
    #[serde(rename = "use")]
    usage: Option<String>,
    expired_at: Option<i64>,
}

#[derive(Deserialize)]
struct Header<'a> {
    alg: &'a str,
    kid: &'a str,
    /// Extensions that the reader must support. None is supported.
    crit: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct Claims<'a> {
    iat: i64,
    request_body_sha256: &'a str,
}

impl PlaidVerifier {
    pub(super) fn compile(spec: &SourceSpec) -> Result<Self, SchemeError> {
        let bad = |problem: &str| {
            SchemeError::new(
                "params",
                format!("jwks {problem}"),
                "jwks is a JSON array of the keys that /webhook_verification_key/get returns",
            )
        };
        let text = param(spec, "jwks", "the verification keys, a JSON array of JWKs")?;
        let set: KeySet = serde_json::from_str(text).map_err(|_| bad("is not a set of JWKs"))?;
        let jwks = match set {
            KeySet::Keys(keys) | KeySet::Set { keys } => keys,
            KeySet::One(key) => vec![key],
        };
        if jwks.is_empty() {
            return Err(bad("holds no key"));
        }
        let keys = jwks.into_iter().map(|jwk| {
            Key::read(jwk).ok_or_else(|| bad("holds a key that is not for ES256 on P-256"))
        });
        Ok(Self { keys: keys.collect::<Result<_, _>>()? })
    }
}

impl Key {
    fn read(jwk: Jwk) -> Option<Self> {
        let fits = jwk.kty == "EC"
            && jwk.crv == "P-256"
            && jwk.alg.is_none_or(|alg| alg == "ES256")
            && jwk.usage.is_none_or(|usage| usage == "sig");
        if !fits {
            return None;
        }
        let (x, y) = (URL_SAFE_NO_PAD.decode(jwk.x).ok()?, URL_SAFE_NO_PAD.decode(jwk.y).ok()?);
        let key = p256(&x, &y)?;
        Some(Self { kid: jwk.kid, expired_at: jwk.expired_at, key })
    }
}

impl SchemeVerifier for PlaidVerifier {
    fn missing<'a>(&'a self, headers: &HeaderMap) -> Option<&'a str> {
        first_missing(headers, std::iter::once(HEADER))
    }

    fn authenticate(&self, arrival: &Arrival, now: Timestamp) -> Result<Authentic, Refusal> {
        let wrong = |problem: &str| Refusal::Signature(problem.to_owned());
        let malformed = || wrong("the token is not well-formed");
        let token = needed(arrival, HEADER)?;
        let (content, signature) = token.rsplit_once('.').ok_or_else(malformed)?;
        let (header, claims) = content.split_once('.').ok_or_else(malformed)?;
        let read = |part: &str| URL_SAFE_NO_PAD.decode(part).map_err(|_| malformed());
        let (header, claims, signature) = (read(header)?, read(claims)?, read(signature)?);
        let header: Header<'_> = serde_json::from_slice(&header).map_err(|_| malformed())?;
        if header.alg != "ES256" || header.crit.is_some() {
            return Err(wrong("the token is not signed with ES256"));
        }
        let (secret, key) = self
            .keys
            .iter()
            .enumerate()
            .find(|(_, key)| key.kid == header.kid)
            .ok_or_else(|| wrong("the token is signed by a key that is not in jwks"))?;
        if key.expired_at.is_some_and(|end| now.as_second() >= end) {
            return Err(wrong("the token is signed by a key that has expired"));
        }
        key.key
            .verify_sig(content.as_bytes(), &signature)
            .map_err(|_| wrong("the token was not signed by the key it names"))?;
        let claims: Claims<'_> =
            serde_json::from_slice(&claims).map_err(|_| wrong("the token lacks a claim"))?;
        let mut named = [0; 32];
        let length = keys::decode(Encoding::Hex, claims.request_body_sha256.as_bytes(), &mut named)
            .unwrap_or_default();
        let actual = digest::digest(&digest::SHA256, &arrival.body);
        constant_time::verify_slices_are_equal(actual.as_ref(), &named[..length])
            .map_err(|_| wrong("the body does not match the hash in the token"))?;
        let signed_at = Timestamp::from_second(claims.iat)
            .map_err(|_| wrong("the token's time is out of range"))?;
        Ok(Authentic { signed_at: Some(signed_at), secret })
    }

    fn sign(&self, _request: &Arrival, _id: &str, _now: Timestamp) -> Result<Signed, SignError> {
        Err(only_the_sender("Plaid"))
    }

    /// The token's text, which contains the time and the body's digest.
    fn signed_content(&self, arrival: &Arrival) -> Result<SignedContent, Refusal> {
        let token = needed(arrival, HEADER)?;
        let content = token.rsplit_once('.').map(|(content, _)| content).unwrap_or_default();
        Ok(SignedContent::whole([content.as_bytes()]))
    }
}
