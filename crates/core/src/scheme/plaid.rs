//! Plaid: a JWT (ES256) in a header that contains the body's SHA-256. The key is found by its id in the
//! configured key set, or fetched by its id from Plaid. The token never selects the algorithm.

use aws_lc_rs::signature::ParsedPublicKey;
use aws_lc_rs::{constant_time, digest};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::HeaderMap;
use jiff::Timestamp;
use serde::Deserialize;
use serde::de::IgnoredAny;
use zeroize::Zeroizing;

use super::keys::{self, ExpiringKey};
use super::recipe::Encoding;
use super::sender_key::{self, FetchedKey, KeyRequest, SenderKey, SenderKeyError};
use super::{
    Authentic, SchemeError, SchemeVerifier, SignError, Signed, SignedContent, first_missing,
    needed, not_fetched, only_the_sender, param,
};
use crate::arrival::Arrival;
use crate::jwt::p256;
use crate::key::KeyHash;
use crate::source::SourceSpec;
use crate::verify::Refusal;

const HEADER: &str = "plaid-verification";

/// Where the keys come from.
pub(super) enum PlaidVerifier {
    /// The configured keys, in their order.
    Configured(Vec<PlaidKey>),
    /// The account with which keys are fetched from Plaid.
    Fetched(Account),
}

pub(super) struct Account {
    url: &'static str,
    client_id: String,
    secrets: Vec<ExpiringKey<Zeroizing<String>>>,
}

/// The addresses that Plaid documents, by the name of the environment; the first is the default.
const ENVIRONMENTS: [(&str, &str); 2] = [
    ("production", "https://production.plaid.com/webhook_verification_key/get"),
    ("sandbox", "https://sandbox.plaid.com/webhook_verification_key/get"),
];

pub(super) struct PlaidKey {
    kid: String,
    expired_at: Option<i64>,
    key: ParsedPublicKey,
}

/// The answer of `/webhook_verification_key/get`.
#[derive(Deserialize)]
struct KeyAnswer {
    key: PlaidJwk,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum ConfiguredKeys {
    Keys(Vec<PlaidJwk>),
    Set { keys: Vec<PlaidJwk> },
    One(PlaidJwk),
}

#[derive(Deserialize)]
struct PlaidJwk {
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
struct TokenHeader<'a> {
    alg: &'a str,
    kid: &'a str,
    /// Extensions that the reader must support. None is supported.
    crit: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct TokenClaims<'a> {
    iat: i64,
    request_body_sha256: &'a str,
}

impl PlaidVerifier {
    pub(super) fn compile(spec: &SourceSpec) -> Result<Self, SchemeError> {
        match spec.params.contains_key("jwks") {
            true => Self::configured(spec),
            false => Account::compile(spec).map(Self::Fetched),
        }
    }

    fn configured(spec: &SourceSpec) -> Result<Self, SchemeError> {
        let bad = |problem: &str| {
            SchemeError::new(
                "params",
                format!("jwks {problem}"),
                "jwks is a JSON array of the keys that /webhook_verification_key/get returns",
            )
        };
        let text = param(spec, "jwks", "the verification keys, a JSON array of JWKs")?;
        let set: ConfiguredKeys =
            serde_json::from_str(text).map_err(|_| bad("is not a set of JWKs"))?;
        let jwks = match set {
            ConfiguredKeys::Keys(keys) | ConfiguredKeys::Set { keys } => keys,
            ConfiguredKeys::One(key) => vec![key],
        };
        if jwks.is_empty() {
            return Err(bad("holds no key"));
        }
        let keys = jwks.into_iter().map(|jwk| {
            PlaidKey::read(jwk).ok_or_else(|| bad("holds a key that is not for ES256 on P-256"))
        });
        keys.collect::<Result<_, _>>().map(Self::Configured)
    }
}

impl Account {
    fn compile(spec: &SourceSpec) -> Result<Self, SchemeError> {
        let client_id = param(spec, "client_id", "the client id that belongs to the secret")?;
        let secrets = keys::prepare(&spec.secrets, |text| Ok(Zeroizing::new(text.to_owned())))?;
        let (_, url) = match spec.params.get("environment") {
            None => ENVIRONMENTS.first(),
            Some(named) => ENVIRONMENTS.iter().find(|(name, _)| name == named),
        }
        .ok_or_else(|| {
            SchemeError::new("params", "unknown environment", "one of production, sandbox")
        })?;
        Ok(Self { url, client_id: client_id.to_owned(), secrets })
    }

    fn key_request(&self, kid: &str, now: Timestamp) -> KeyRequest {
        let active = keys::active(&self.secrets, now).next().map(|(_, secret)| secret);
        // If no secret is active, the last one is sent. Plaid refuses that secret, and the webhook is sent
        // again later.
        let secret = active.or(self.secrets.last().map(|last| &last.key));
        let secret = secret.map(|secret| secret.as_str()).unwrap_or_default();
        let body =
            serde_json::json!({"client_id": self.client_id, "secret": secret, "key_id": kid});
        let body = Zeroizing::new(body.to_string().into_bytes());
        KeyRequest {
            id: KeyHash::of(b"plaid", [self.url.as_bytes(), &body]),
            url: self.url.to_owned(),
            body: Some(body),
            name: format!("key {kid}"),
        }
    }
}

impl PlaidKey {
    fn read(jwk: PlaidJwk) -> Option<Self> {
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

/// A token in its parts, before its signature is verified.
struct UnverifiedToken<'a> {
    /// The signed text.
    content: &'a str,
    kid: String,
    claims: Vec<u8>,
    signature: Vec<u8>,
}

fn wrong(problem: &str) -> Refusal {
    Refusal::Signature(problem.to_owned())
}

impl<'a> UnverifiedToken<'a> {
    fn read(token: &'a str) -> Result<Self, Refusal> {
        let malformed = || wrong("the token is not well-formed");
        let (content, signature) = token.rsplit_once('.').ok_or_else(malformed)?;
        let (header, claims) = content.split_once('.').ok_or_else(malformed)?;
        let read = |part: &str| URL_SAFE_NO_PAD.decode(part).map_err(|_| malformed());
        let (header, claims, signature) = (read(header)?, read(claims)?, read(signature)?);
        let header: TokenHeader<'_> = serde_json::from_slice(&header).map_err(|_| malformed())?;
        if header.alg != "ES256" || header.crit.is_some() {
            return Err(wrong("the token is not signed with ES256"));
        }
        Ok(Self { content, kid: header.kid.to_owned(), claims, signature })
    }

    /// Checks the token with the key that it names, and the body with the token.
    fn check(
        &self,
        key: &PlaidKey,
        arrival: &Arrival,
        now: Timestamp,
    ) -> Result<Option<Timestamp>, Refusal> {
        if key.expired_at.is_some_and(|end| now.as_second() >= end) {
            return Err(wrong("the token is signed by a key that has expired"));
        }
        key.key
            .verify_sig(self.content.as_bytes(), &self.signature)
            .map_err(|_| wrong("the token was not signed by the key it names"))?;
        let claims: TokenClaims<'_> = serde_json::from_slice(&self.claims)
            .map_err(|_| wrong("the token has no usable claim iat or request_body_sha256"))?;
        let mut named = [0; 32];
        let length = keys::decode(Encoding::Hex, claims.request_body_sha256.as_bytes(), &mut named)
            .unwrap_or_default();
        let actual = digest::digest(&digest::SHA256, &arrival.body);
        constant_time::verify_slices_are_equal(actual.as_ref(), &named[..length])
            .map_err(|_| wrong("the body does not match the hash in the token"))?;
        Timestamp::from_second(claims.iat)
            .map(Some)
            .map_err(|_| wrong("the token's time is out of range"))
    }
}

impl SchemeVerifier for PlaidVerifier {
    fn missing<'a>(&'a self, headers: &HeaderMap) -> Option<&'a str> {
        first_missing(headers, std::iter::once(HEADER))
    }

    fn authenticate(&self, arrival: &Arrival, now: Timestamp) -> Result<Authentic, Refusal> {
        let Self::Configured(keys) = self else { return Err(not_fetched("jwks")) };
        let token = needed(arrival, HEADER)?;
        let token = UnverifiedToken::read(&token)?;
        let (secret, key) = keys
            .iter()
            .enumerate()
            .find(|(_, key)| key.kid == token.kid)
            .ok_or_else(|| wrong("the token is signed by a key that is not in jwks"))?;
        let signed_at = token.check(key, arrival, now)?;
        Ok(Authentic { signed_at, secret })
    }

    fn key_request(
        &self,
        headers: &HeaderMap,
        now: Timestamp,
    ) -> Result<Option<KeyRequest>, Refusal> {
        let Self::Fetched(account) = self else { return Ok(None) };
        let token = UnverifiedToken::read(sender_key::only(headers, HEADER)?)?;
        match sender_key::is_key_name(&token.kid) {
            true => Ok(Some(account.key_request(&token.kid, now))),
            false => Err(wrong("the token names a key that Plaid cannot have")),
        }
    }

    fn read_key(
        &self,
        request: &KeyRequest,
        answer: &[u8],
        _now: Timestamp,
    ) -> Result<SenderKey, SenderKeyError> {
        let unfit = |problem: &str| SenderKeyError(format!("the answer {problem}"));
        let answer: KeyAnswer =
            serde_json::from_slice(answer).map_err(|_| unfit("holds no key"))?;
        if request.name != format!("key {}", answer.key.kid) {
            return Err(unfit("holds another key"));
        }
        let key =
            PlaidKey::read(answer.key).ok_or_else(|| unfit("is not a key for ES256 on P-256"))?;
        Ok(SenderKey(FetchedKey::Jwk(key)))
    }

    fn authenticate_with_key(
        &self,
        arrival: &Arrival,
        key: &SenderKey,
        now: Timestamp,
    ) -> Result<Authentic, Refusal> {
        let token = needed(arrival, HEADER)?;
        let token = UnverifiedToken::read(&token)?;
        match &key.0 {
            FetchedKey::Jwk(key) if key.kid == token.kid => {
                let signed_at = token.check(key, arrival, now)?;
                Ok(Authentic { signed_at, secret: 0 })
            }
            FetchedKey::Jwk(_) | FetchedKey::Certificate(_) => Err(not_fetched("jwks")),
        }
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
