//! JSON Web Tokens (RFC 7515, 7519), verified with keys from a config. The key decides the algorithm, and
//! the `alg` of the token must agree. So there is no `none`, and no public key is used as a shared
//! secret.

use std::fmt;
use std::time::Duration;

use aws_lc_rs::encoding::AsDer;
use aws_lc_rs::rsa::PublicKeyComponents;
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_FIXED, ParsedPublicKey, RSA_PKCS1_2048_8192_SHA256, RSA_PSS_2048_8192_SHA256,
};
use aws_lc_rs::{digest, hmac};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use jiff::Timestamp;
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::ed25519;
use crate::json::{self, Pointer};
use crate::limits::{JWT_BYTES_MAX, JWT_KEYS_MAX};

/// The largest accepted difference between the issuer's clock and ours.
const LEEWAY: Duration = Duration::from_secs(30);

/// The keys that tokens are verified with.
pub struct JwtKeys {
    keys: Vec<Key>,
    /// The hash of the text that they were read from, so that two sets can be compared.
    digest: [u8; 32],
}

/// Why a text is refused as keys. The message never quotes the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum JwtKeysError {
    /// The text is not JSON, or not a JWK set.
    #[error("is not a JWK set")]
    NotASet,
    /// No key in it can verify a token.
    #[error("holds no key for HS256, HS384, HS512, RS256, PS256, ES256 or EdDSA")]
    NoKey,
    /// More keys than the bound.
    #[error("holds more than {JWT_KEYS_MAX} keys")]
    TooMany,
    /// Two keys have the same name.
    #[error("holds two keys with the same kid")]
    SameKid,
    /// A shared secret that is too short.
    #[error("holds a shared secret of fewer than 32 bytes")]
    ShortSecret,
    /// A key that is damaged or too weak.
    #[error("holds a key that is damaged or too weak")]
    BadKey,
    /// A private key, which is not needed to verify.
    #[error("is a private key; only the public one is needed")]
    Private,
    /// PEM that is not a public key.
    #[error("is PEM, but not a public key (BEGIN PUBLIC KEY)")]
    NotPublic,
}

/// Why a token is refused. For the log only: the client does not get the reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum JwtError {
    /// The token does not have three parts of strict base64url, or they are not JSON.
    #[error("the token is not well-formed")]
    Malformed,
    /// No configured key has that name and algorithm.
    #[error("the token names no key that is configured")]
    UnknownKey,
    /// The signature does not match.
    #[error("the signature of the token is wrong")]
    Signature,
    /// Past its `exp`.
    #[error("the token has expired")]
    Expired,
    /// Before its `nbf`.
    #[error("the token is not valid yet")]
    TooEarly,
    /// The requested claim is missing, or neither a string nor an integer.
    #[error("the token has no usable claim of that name")]
    NoClaim,
}

struct Key {
    kid: Option<String>,
    /// The `alg` of the key. Such a key supports no other algorithm.
    only: Option<Algorithm>,
    material: KeyMaterial,
}

enum KeyMaterial {
    Shared { secret: Vec<u8> },
    Rsa { pkcs1: ParsedPublicKey, pss: ParsedPublicKey },
    P256(ParsedPublicKey),
    Ed25519(ParsedPublicKey),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Algorithm {
    Hs256,
    Hs384,
    Hs512,
    Rs256,
    Ps256,
    Es256,
    EdDsa,
}

impl Algorithm {
    fn named(name: &str) -> Option<Self> {
        Some(match name {
            "HS256" => Self::Hs256,
            "HS384" => Self::Hs384,
            "HS512" => Self::Hs512,
            "RS256" => Self::Rs256,
            "PS256" => Self::Ps256,
            "ES256" => Self::Es256,
            "EdDSA" | "Ed25519" => Self::EdDsa,
            _ => return None,
        })
    }
}

#[derive(Deserialize)]
struct KeySet {
    keys: Vec<serde_json::Value>,
}

#[derive(Deserialize)]
struct Jwk {
    kty: String,
    kid: Option<String>,
    alg: Option<String>,
    #[serde(rename = "use")]
    usage: Option<String>,
    key_ops: Option<Vec<String>>,
    crv: Option<String>,
    x: Option<String>,
    y: Option<String>,
    n: Option<String>,
    e: Option<String>,
    k: Option<String>,
    /// The private part of a pair.
    d: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct Header {
    alg: String,
    kid: Option<String>,
    /// Extensions that the reader must support. None is supported.
    crit: Option<IgnoredAny>,
}

impl JwtKeys {
    /// Parses a JWK set (RFC 7517). Keys for encryption and keys of unknown types are ignored, as the RFC
    /// requires. A damaged key for signatures is an error.
    pub fn from_jwks(text: &str) -> Result<Self, JwtKeysError> {
        let KeySet { keys: found } =
            serde_json::from_str(text).map_err(|_| JwtKeysError::NotASet)?;
        if found.len() > JWT_KEYS_MAX {
            return Err(JwtKeysError::TooMany);
        }
        let mut keys = Vec::<Key>::new();
        for jwk in found {
            let jwk = serde_json::from_value(jwk).map_err(|_| JwtKeysError::NotASet)?;
            let Some(key) = Key::of_jwk(jwk)? else { continue };
            if key.kid.is_some() && keys.iter().any(|other| other.kid == key.kid) {
                return Err(JwtKeysError::SameKid);
            }
            keys.push(key);
        }
        if keys.is_empty() { Err(JwtKeysError::NoKey) } else { Ok(Self::of(keys, text)) }
    }

    /// Parses one key: a public key in PEM, or a shared secret for HS256 to HS512.
    pub fn from_key(text: &str) -> Result<Self, JwtKeysError> {
        let trimmed = text.trim();
        let material = match trimmed.starts_with("-----BEGIN") {
            true => of_pem(trimmed)?,
            false => shared(text.as_bytes().to_vec())?,
        };
        Ok(Self::of(vec![Key { kid: None, only: None, material }], text))
    }

    fn of(keys: Vec<Key>, text: &str) -> Self {
        let mut digest = [0; 32];
        digest.copy_from_slice(digest::digest(&digest::SHA256, text.as_bytes()).as_ref());
        Self { keys, digest }
    }

    /// The claim of a token that one of the keys signed and that is valid now: a string, or an integer as
    /// it is written.
    pub fn claim(&self, token: &str, claim: &str, now: Timestamp) -> Result<String, JwtError> {
        let claims = self.verified(token)?;
        let pointers = [pointer("exp"), pointer("nbf"), pointer(claim)];
        let found = json::extract(&claims, &pointers).map_err(|_| JwtError::Malformed)?;
        // An array has no claims, although a pointer could select one of its elements.
        if !claims.trim_ascii_start().starts_with(b"{") {
            return Err(JwtError::Malformed);
        }
        let second = |at: usize| match found[at] {
            Some(value) => value.raw().parse::<f64>().map(Some).map_err(|_| JwtError::Malformed),
            None => Ok(None),
        };
        let (exp, nbf) = (second(0)?, second(1)?);
        let (now, leeway) = (now.as_second() as f64, LEEWAY.as_secs_f64());
        if exp.is_some_and(|exp| now >= exp + leeway) {
            return Err(JwtError::Expired);
        }
        if nbf.is_some_and(|nbf| now + leeway < nbf) {
            return Err(JwtError::TooEarly);
        }
        let name = found[2].and_then(json::Value::as_id_text).filter(|name| !name.is_empty());
        name.map(Into::into).ok_or(JwtError::NoClaim)
    }

    /// The claims of a token that one of the keys signed.
    fn verified(&self, token: &str) -> Result<Vec<u8>, JwtError> {
        if token.len() > JWT_BYTES_MAX {
            return Err(JwtError::Malformed);
        }
        let (content, signature) = token.rsplit_once('.').ok_or(JwtError::Malformed)?;
        let (header, claims) = content.split_once('.').ok_or(JwtError::Malformed)?;
        let read = |part: &str| URL_SAFE_NO_PAD.decode(part).map_err(|_| JwtError::Malformed);
        let (header, claims, signature) = (read(header)?, read(claims)?, read(signature)?);
        let header: Header = serde_json::from_slice(&header).map_err(|_| JwtError::Malformed)?;
        if header.crit.is_some() {
            return Err(JwtError::Malformed);
        }
        let algorithm = Algorithm::named(&header.alg).ok_or(JwtError::UnknownKey)?;
        let mut candidates =
            self.keys.iter().filter(|key| key.may_verify(&header, algorithm)).peekable();
        candidates.peek().ok_or(JwtError::UnknownKey)?;
        match candidates.any(|key| key.verifies(algorithm, content.as_bytes(), &signature)) {
            true => Ok(claims),
            false => Err(JwtError::Signature),
        }
    }
}

impl PartialEq for JwtKeys {
    fn eq(&self, other: &Self) -> bool {
        self.digest == other.digest
    }
}

impl Eq for JwtKeys {}

/// No key is printed.
impl fmt::Debug for JwtKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JwtKeys({})", self.keys.len())
    }
}

impl Key {
    fn of_jwk(jwk: Jwk) -> Result<Option<Self>, JwtKeysError> {
        let verifies = jwk.key_ops.as_ref().is_none_or(|ops| ops.iter().any(|op| op == "verify"));
        if jwk.usage.as_deref().is_some_and(|usage| usage != "sig") || !verifies {
            return Ok(None);
        }
        let only = match jwk.alg.as_deref().map(Algorithm::named) {
            Some(None) => return Ok(None),
            Some(only) => only,
            None => None,
        };
        if jwk.d.is_some() {
            return Err(JwtKeysError::Private);
        }
        let material = match (jwk.kty.as_str(), jwk.crv.as_deref()) {
            ("oct", _) => shared(part(jwk.k)?)?,
            ("RSA", _) => rsa(&part(jwk.n)?, &part(jwk.e)?)?,
            ("EC", Some("P-256")) => {
                KeyMaterial::P256(p256(&part(jwk.x)?, &part(jwk.y)?).ok_or(JwtKeysError::BadKey)?)
            }
            ("OKP", Some("Ed25519")) => ed25519(&part(jwk.x)?)?,
            _other => return Ok(None),
        };
        let key = Self { kid: jwk.kid, only, material };
        // The key names an `alg` that it does not support.
        if only.is_some_and(|only| !key.supports(only)) {
            return Err(JwtKeysError::BadKey);
        }
        Ok(Some(key))
    }

    /// Whether this key may verify a token with this header.
    fn may_verify(&self, header: &Header, algorithm: Algorithm) -> bool {
        let named = match (&header.kid, &self.kid) {
            (Some(named), Some(kid)) => named == kid,
            (Some(_), None) | (None, _) => true,
        };
        named && self.only.is_none_or(|only| only == algorithm) && self.supports(algorithm)
    }

    /// Whether this key can check signatures of this algorithm. This check keeps a public key from being
    /// used as a shared secret.
    fn supports(&self, algorithm: Algorithm) -> bool {
        match (&self.material, algorithm) {
            // A secret must be as long as the hash (RFC 7518, 3.2).
            (KeyMaterial::Shared { secret }, Algorithm::Hs256) => secret.len() >= 32,
            (KeyMaterial::Shared { secret }, Algorithm::Hs384) => secret.len() >= 48,
            (KeyMaterial::Shared { secret }, Algorithm::Hs512) => secret.len() >= 64,
            (KeyMaterial::Rsa { .. }, Algorithm::Rs256 | Algorithm::Ps256)
            | (KeyMaterial::P256(_), Algorithm::Es256)
            | (KeyMaterial::Ed25519(_), Algorithm::EdDsa) => true,
            (
                KeyMaterial::Shared { .. },
                Algorithm::Rs256 | Algorithm::Ps256 | Algorithm::Es256 | Algorithm::EdDsa,
            )
            | (KeyMaterial::Rsa { .. } | KeyMaterial::P256(_) | KeyMaterial::Ed25519(_), _) => {
                false
            }
        }
    }

    fn verifies(&self, algorithm: Algorithm, content: &[u8], signature: &[u8]) -> bool {
        let by_secret = |secret: &[u8], algorithm| {
            hmac::verify(&hmac::Key::new(algorithm, secret), content, signature).is_ok()
        };
        match (&self.material, algorithm) {
            (KeyMaterial::Shared { secret }, Algorithm::Hs256) => {
                by_secret(secret, hmac::HMAC_SHA256)
            }
            (KeyMaterial::Shared { secret }, Algorithm::Hs384) => {
                by_secret(secret, hmac::HMAC_SHA384)
            }
            (KeyMaterial::Shared { secret }, Algorithm::Hs512) => {
                by_secret(secret, hmac::HMAC_SHA512)
            }
            (KeyMaterial::Rsa { pkcs1: key, .. }, Algorithm::Rs256)
            | (KeyMaterial::Rsa { pss: key, .. }, Algorithm::Ps256)
            | (KeyMaterial::P256(key), Algorithm::Es256)
            | (KeyMaterial::Ed25519(key), Algorithm::EdDsa) => {
                key.verify_sig(content, signature).is_ok()
            }
            (
                KeyMaterial::Shared { .. }
                | KeyMaterial::Rsa { .. }
                | KeyMaterial::P256(_)
                | KeyMaterial::Ed25519(_),
                _not_served,
            ) => false,
        }
    }
}

/// A key for ES256 from its coordinates.
pub(crate) fn p256(x: &[u8], y: &[u8]) -> Option<ParsedPublicKey> {
    let point = [&[4][..], x, y].concat();
    let is_whole = x.len() == 32 && y.len() == 32;
    is_whole.then(|| ParsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, &point).ok())?
}

fn shared(secret: Vec<u8>) -> Result<KeyMaterial, JwtKeysError> {
    if secret.len() < 32 {
        Err(JwtKeysError::ShortSecret)
    } else {
        Ok(KeyMaterial::Shared { secret })
    }
}

fn rsa(n: &[u8], e: &[u8]) -> Result<KeyMaterial, JwtKeysError> {
    let der = PublicKeyComponents { n, e }.as_der().map_err(|_| JwtKeysError::BadKey)?;
    rsa_of_der(der.as_ref()).ok_or(JwtKeysError::BadKey)
}

fn rsa_of_der(der: &[u8]) -> Option<KeyMaterial> {
    let pkcs1 = ParsedPublicKey::new(&RSA_PKCS1_2048_8192_SHA256, der).ok()?;
    let pss = ParsedPublicKey::new(&RSA_PSS_2048_8192_SHA256, der).ok()?;
    Some(KeyMaterial::Rsa { pkcs1, pss })
}

fn ed25519(point: &[u8]) -> Result<KeyMaterial, JwtKeysError> {
    ed25519::public_key(point).map(KeyMaterial::Ed25519).map_err(|_| JwtKeysError::BadKey)
}

/// Parses one public key in PEM.
fn of_pem(text: &str) -> Result<KeyMaterial, JwtKeysError> {
    if text.contains("PRIVATE KEY-----") {
        return Err(JwtKeysError::Private);
    }
    let inside = text
        .strip_prefix("-----BEGIN PUBLIC KEY-----")
        .and_then(|rest| rest.strip_suffix("-----END PUBLIC KEY-----"))
        .ok_or(JwtKeysError::NotPublic)?;
    let inside: String = inside.chars().filter(|c| !c.is_ascii_whitespace()).collect();
    let der = STANDARD.decode(inside).map_err(|_| JwtKeysError::BadKey)?;
    if let Some(key) = rsa_of_der(&der) {
        return Ok(key);
    }
    // The bytes before the 32 bytes of an Ed25519 key (RFC 8410).
    const ED25519_PREFIX: [u8; 12] = [0x30, 0x2a, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 3, 0x21, 0];
    if let Some(point) = der.strip_prefix(&ED25519_PREFIX[..]) {
        return ed25519(point);
    }
    let p256 = ParsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, &der);
    p256.map(KeyMaterial::P256).map_err(|_| JwtKeysError::BadKey)
}

fn part(text: Option<String>) -> Result<Vec<u8>, JwtKeysError> {
    let text = text.ok_or(JwtKeysError::BadKey)?;
    URL_SAFE_NO_PAD.decode(text).map_err(|_| JwtKeysError::BadKey)
}

fn pointer(claim: &str) -> Pointer {
    let text = format!("/{}", claim.replace('~', "~0").replace('/', "~1"));
    Pointer::parse(&text).expect("it is escaped")
}

#[cfg(test)]
mod tests {
    use aws_lc_rs::rand::SystemRandom;
    use aws_lc_rs::rsa::{KeyPair as RsaKeyPair, KeySize};
    use aws_lc_rs::signature::{
        ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair as _,
        RSA_PKCS1_SHA256, RSA_PSS_SHA256,
    };

    use super::*;

    const NOW: i64 = 1_700_000_000;
    const SECRET: &str = "an-hmac-secret-of-at-least-sixty-four-bytes-so-that-all-three-fit";

    fn encode(bytes: impl AsRef<[u8]>) -> String {
        URL_SAFE_NO_PAD.encode(bytes)
    }

    fn token(header: &str, claims: &str, sign: impl Fn(&[u8]) -> Vec<u8>) -> String {
        let content = format!("{}.{}", encode(header), encode(claims));
        let signature = sign(content.as_bytes());
        format!("{content}.{}", encode(signature))
    }

    fn mac(algorithm: hmac::Algorithm, secret: &[u8]) -> impl Fn(&[u8]) -> Vec<u8> {
        let key = hmac::Key::new(algorithm, secret);
        move |content| hmac::sign(&key, content).as_ref().to_vec()
    }

    fn sub(keys: &JwtKeys, token: &str) -> Result<String, JwtError> {
        keys.claim(token, "sub", Timestamp::from_second(NOW).unwrap())
    }

    const CLAIMS: &str = r#"{"sub":"user_1","exp":1700000060}"#;

    #[test]
    fn a_shared_secret_verifies_hmac_and_nothing_else() {
        let keys = JwtKeys::from_key(SECRET).unwrap();
        for (alg, algorithm) in [
            ("HS256", hmac::HMAC_SHA256),
            ("HS384", hmac::HMAC_SHA384),
            ("HS512", hmac::HMAC_SHA512),
        ] {
            let header = format!("{{\"alg\":\"{alg}\"}}");
            let good = token(&header, CLAIMS, mac(algorithm, SECRET.as_bytes()));
            assert_eq!(sub(&keys, &good), Ok("user_1".into()), "{alg}");
            let other = token(&header, CLAIMS, mac(algorithm, b"another"));
            assert_eq!(sub(&keys, &other), Err(JwtError::Signature), "{alg}");
        }
        let none = format!("{}.{}.", encode(r#"{"alg":"none"}"#), encode(CLAIMS));
        assert_eq!(sub(&keys, &none), Err(JwtError::UnknownKey));
        let crit = token(
            r#"{"alg":"HS256","crit":["x"]}"#,
            CLAIMS,
            mac(hmac::HMAC_SHA256, SECRET.as_bytes()),
        );
        assert_eq!(sub(&keys, &crit), Err(JwtError::Malformed));
        // Too short for the hash.
        let short = JwtKeys::from_key(&SECRET[..32]).unwrap();
        let long =
            token(r#"{"alg":"HS512"}"#, CLAIMS, mac(hmac::HMAC_SHA512, &SECRET.as_bytes()[..32]));
        assert_eq!(sub(&short, &long), Err(JwtError::UnknownKey));
    }

    #[test]
    fn a_token_has_one_spelling_and_its_time() {
        let keys = JwtKeys::from_key(SECRET).unwrap();
        let signed = |claims: &str| {
            token(r#"{"alg":"HS256"}"#, claims, mac(hmac::HMAC_SHA256, SECRET.as_bytes()))
        };
        let check = |claims: &str, expected: Result<&str, JwtError>| {
            assert_eq!(sub(&keys, &signed(claims)), expected.map(str::to_owned), "{claims}");
        };
        check(r#"{"sub":"u"}"#, Ok("u"));
        check(r#"{"sub":7,"exp":1700000000.5}"#, Ok("7"));
        check(r#"{"sub":"u","exp":1699999971}"#, Ok("u"));
        check(r#"{"sub":"u","exp":1699999970}"#, Err(JwtError::Expired));
        check(r#"{"sub":"u","nbf":1700000030}"#, Ok("u"));
        check(r#"{"sub":"u","nbf":1700000031}"#, Err(JwtError::TooEarly));
        check(r#"{"sub":"u","exp":"later"}"#, Err(JwtError::Malformed));
        check(r#"{"sub":"u","exp":null}"#, Err(JwtError::Malformed));
        check(r#"{"sub":"u","sub":"v"}"#, Err(JwtError::Malformed));
        check(r#"{"sub":"u","exp":1,"exp":9999999999}"#, Err(JwtError::Malformed));
        check(r#"{"sub":""}"#, Err(JwtError::NoClaim));
        check(r#"{"sub":["u"]}"#, Err(JwtError::NoClaim));
        check("{}", Err(JwtError::NoClaim));
        check(r#"["u"]"#, Err(JwtError::Malformed));
        check("not json", Err(JwtError::Malformed));
        let good = signed(CLAIMS);
        for bad in [
            format!("{good}="),
            format!("{good} "),
            format!("{good}."),
            good.replacen('.', "..", 1),
            good.rsplit_once('.').unwrap().0.to_owned(),
            format!("{}.x", good.rsplit_once('.').unwrap().0),
            good.replacen('e', "+", 1),
            String::new(),
            format!("{good}{}", "A".repeat(JWT_BYTES_MAX)),
        ] {
            assert!(sub(&keys, &bad).is_err(), "{bad}");
        }
    }

    // A set with one key of each type, and the private keys that sign.
    #[test]
    fn the_key_decides_the_algorithm() {
        let random = SystemRandom::new();
        let ec = EcdsaKeyPair::generate(&ECDSA_P256_SHA256_FIXED_SIGNING).unwrap();
        let ed = Ed25519KeyPair::generate().unwrap();
        let rsa_pair = RsaKeyPair::generate(KeySize::Rsa2048).unwrap();
        let point = ec.public_key().as_ref();
        // Two lengths of four bytes and a zero precede the modulus; three bytes of exponent end the DER.
        let pkcs1_der = rsa_pair.public_key().as_ref();
        let modulus = &pkcs1_der[9..9 + 256];
        let (n, e) = (encode(modulus), encode(&pkcs1_der[pkcs1_der.len() - 3..]));
        let set = format!(
            r#"{{"keys":[
                {{"kty":"EC","crv":"P-256","kid":"ec","x":"{}","y":"{}"}},
                {{"kty":"OKP","crv":"Ed25519","kid":"ed","alg":"EdDSA","x":"{}"}},
                {{"kty":"RSA","kid":"rsa","n":"{n}","e":"{e}"}},
                {{"kty":"RSA","kid":"rs256","alg":"RS256","use":"sig","n":"{n}","e":"{e}"}},
                {{"kty":"RSA","kid":"enc","use":"enc","n":"AQ","e":"AQAB"}},
                {{"kty":"EC","crv":"P-521","kid":"unknown","x":"AQ","y":"AQ"}}
            ]}}"#,
            encode(&point[1..33]),
            encode(&point[33..]),
            encode(ed.public_key().as_ref()),
        );
        let keys = JwtKeys::from_jwks(&set).unwrap();
        assert_eq!(format!("{keys:?}"), "JwtKeys(4)");
        let rsa_by = |padding: &'static dyn aws_lc_rs::signature::RsaEncoding| {
            let (pair, random) = (&rsa_pair, &random);
            move |content: &[u8]| {
                let mut signature = vec![0; pair.public_modulus_len()];
                pair.sign(padding, random, content, &mut signature).unwrap();
                signature
            }
        };
        let check = |alg: &str, kid: &str, sign: &dyn Fn(&[u8]) -> Vec<u8>, expected: bool| {
            let header = match kid {
                "" => format!("{{\"alg\":\"{alg}\"}}"),
                kid => format!("{{\"alg\":\"{alg}\",\"kid\":\"{kid}\"}}"),
            };
            let result = sub(&keys, &token(&header, CLAIMS, sign));
            assert_eq!(result.is_ok(), expected, "{alg} {kid}: {result:?}");
        };
        let by_ec = |content: &[u8]| ec.sign(&random, content).unwrap().as_ref().to_vec();
        let by_ed = |content: &[u8]| ed.sign(content).as_ref().to_vec();
        let (pkcs1, pss) = (rsa_by(&RSA_PKCS1_SHA256), rsa_by(&RSA_PSS_SHA256));
        check("ES256", "ec", &by_ec, true);
        check("ES256", "", &by_ec, true);
        check("ES256", "ed", &by_ec, false);
        check("EdDSA", "ed", &by_ed, true);
        check("RS256", "rsa", &pkcs1, true);
        check("PS256", "rsa", &pss, true);
        check("PS256", "rs256", &pss, false);
        check("RS256", "rs256", &pkcs1, true);
        check("RS256", "rsa", &pss, false);
        check("RS256", "nobody", &pkcs1, false);
        check("ES256", "ec", &by_ed, false);
        // The public key, which an attacker has, used as a shared secret.
        for (kid, secret) in [
            ("rsa", modulus.to_vec()),
            ("ec", point.to_vec()),
            ("ed", ed.public_key().as_ref().to_vec()),
        ] {
            check("HS256", kid, &mac(hmac::HMAC_SHA256, &secret), false);
            check("HS256", kid, &mac(hmac::HMAC_SHA256, set.as_bytes()), false);
        }
    }

    #[test]
    fn a_public_key_in_pem_is_never_a_secret() {
        let random = SystemRandom::new();
        let ec = EcdsaKeyPair::generate(&ECDSA_P256_SHA256_FIXED_SIGNING).unwrap();
        let ed = Ed25519KeyPair::generate().unwrap();
        let rsa_pair = RsaKeyPair::generate(KeySize::Rsa2048).unwrap();
        let pem = |der: &[u8]| {
            let text = STANDARD.encode(der);
            format!("-----BEGIN PUBLIC KEY-----\n{text}\n-----END PUBLIC KEY-----\n")
        };
        let ec_pem = pem(ec.public_key().as_der().unwrap().as_ref());
        let ed_pem = pem(ed.public_key().as_der().unwrap().as_ref());
        let rsa_pem = pem(rsa_pair.public_key().as_der().unwrap().as_ref());
        for text in [&ec_pem, &ed_pem, &rsa_pem] {
            let keys = JwtKeys::from_key(text).unwrap();
            let forged =
                token(r#"{"alg":"HS256"}"#, CLAIMS, mac(hmac::HMAC_SHA256, text.as_bytes()));
            assert_eq!(sub(&keys, &forged), Err(JwtError::UnknownKey));
        }
        let by_ec = |content: &[u8]| ec.sign(&random, content).unwrap().as_ref().to_vec();
        let good = token(r#"{"alg":"ES256","kid":"any"}"#, CLAIMS, by_ec);
        assert_eq!(sub(&JwtKeys::from_key(&ec_pem).unwrap(), &good), Ok("user_1".into()));
        let by_ed = |content: &[u8]| ed.sign(content).as_ref().to_vec();
        let good = token(r#"{"alg":"EdDSA"}"#, CLAIMS, by_ed);
        assert_eq!(sub(&JwtKeys::from_key(&ed_pem).unwrap(), &good), Ok("user_1".into()));
    }

    #[test]
    fn a_text_without_a_usable_key_is_refused_with_its_reason() {
        let error = |text: &str| JwtKeys::from_jwks(text).unwrap_err();
        assert_eq!(error("x"), JwtKeysError::NotASet);
        assert_eq!(error("[]"), JwtKeysError::NotASet);
        assert_eq!(error(r#"{"keys":[]}"#), JwtKeysError::NoKey);
        assert_eq!(error(r#"{"keys":[{"kty":"other"}]}"#), JwtKeysError::NoKey);
        assert_eq!(error(r#"{"keys":[{"kty":"oct","k":"c2hvcnQ"}]}"#), JwtKeysError::ShortSecret);
        assert_eq!(
            error(r#"{"keys":[{"kty":"EC","crv":"P-256","x":"AQ","y":"AQ"}]}"#),
            JwtKeysError::BadKey
        );
        let private = r#"{"keys":[{"kty":"OKP","crv":"Ed25519","x":"AQ","d":"AQ"}]}"#;
        assert_eq!(error(private), JwtKeysError::Private);
        for key in ed25519::refused_keys() {
            let set =
                format!(r#"{{"keys":[{{"kty":"OKP","crv":"Ed25519","x":"{}"}}]}}"#, encode(key));
            assert_eq!(error(&set), JwtKeysError::BadKey, "{key:02x?}");
        }
        let secret = encode(SECRET);
        let twice = format!(
            r#"{{"keys":[{{"kty":"oct","kid":"a","k":"{secret}"}},{{"kty":"oct","kid":"a","k":"{secret}"}}]}}"#
        );
        assert_eq!(error(&twice), JwtKeysError::SameKid);
        let wrong = format!(r#"{{"keys":[{{"kty":"oct","alg":"RS256","k":"{secret}"}}]}}"#);
        assert_eq!(error(&wrong), JwtKeysError::BadKey);
        let key = |text: &str| JwtKeys::from_key(text).unwrap_err();
        assert_eq!(key("short"), JwtKeysError::ShortSecret);
        assert_eq!(
            key("-----BEGIN PRIVATE KEY-----\nAA==\n-----END PRIVATE KEY-----"),
            JwtKeysError::Private
        );
        assert_eq!(
            key("-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----"),
            JwtKeysError::NotPublic
        );
        assert_eq!(
            key("-----BEGIN PUBLIC KEY-----\nAA==\n-----END PUBLIC KEY-----"),
            JwtKeysError::BadKey
        );
    }
}
