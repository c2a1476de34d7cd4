//! Identifies the caller of a request. Two callers never share a key, so a request that does not identify
//! its caller is refused. Only a name or a hash of the caller is stored, never a credential.

use std::fmt;
use std::sync::Arc;

use aws_lc_rs::digest;
use base64::Engine as _;
use base64::alphabet::URL_SAFE;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use hapax_core::Timestamp;
use hapax_core::json::{self, Pointer};
use hapax_core::jwt::JwtKeys;
use http::header::{AUTHORIZATION, COOKIE};
use http::request::Parts;
use http::{HeaderMap, HeaderName};

use crate::limits::PRINCIPAL_BYTES_MAX;
use crate::rules::IdempotencyRules;

/// How a request identifies its caller.
///
/// The name of a caller must not change between retries of a request: use an account id, and not a token
/// that rotates.
#[derive(Clone)]
pub enum Principal {
    /// By a header. A value is hashed if the header carries credentials, judged by its name
    /// (`authorization`, `cookie`, `x-api-key`), or if it is too long for a name.
    Header(HeaderName),
    /// By a claim of the JWT in the Authorization header, a string or an integer. A request whose token is
    /// missing, expired or not signed by one of `keys` gets a 401.
    Jwt {
        /// The name of the claim.
        claim: String,
        /// The keys that verify tokens.
        keys: Arc<JwtKeys>,
        /// The clock for `exp` and `nbf`.
        now: Arc<Clock>,
    },
    /// By a claim of a JWT whose signature is not checked. Use this variant only behind a component that
    /// verifies tokens: the app cannot check the token of a replay, because a replay never reaches the app.
    UnverifiedJwt(String),
    /// By a function of the app, which may read values that its authentication put into the
    /// extensions.
    Custom(Arc<PrincipalFn>),
    /// All requests belong to one caller, and share their keys.
    Shared,
}

/// Returns the caller of a request, or `None` if it is unknown.
pub type PrincipalFn = dyn Fn(&Parts) -> Option<String> + Send + Sync;

impl fmt::Debug for Principal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Header(name) => f.debug_tuple("Header").field(name).finish(),
            Self::Jwt { claim, keys, .. } => {
                f.debug_struct("Jwt").field("claim", claim).field("keys", keys).finish()
            }
            Self::UnverifiedJwt(claim) => f.debug_tuple("UnverifiedJwt").field(claim).finish(),
            Self::Custom(_) => f.debug_tuple("Custom").finish_non_exhaustive(),
            Self::Shared => f.write_str("Shared"),
        }
    }
}

/// A wall clock.
pub type Clock = dyn Fn() -> Timestamp + Send + Sync;

/// Why the caller of a request is unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PrincipalError {
    /// The request does not identify its caller, or does so twice.
    Missing,
    /// The token is missing or not valid.
    Refused,
}

/// The name of the caller for the scope. The name is empty only for requests without a caller.
pub(crate) fn name_of(rules: &IdempotencyRules, parts: &Parts) -> Result<String, PrincipalError> {
    let headers = &parts.headers;
    match &rules.principal {
        None if !headers.contains_key(AUTHORIZATION) => Ok(String::new()),
        None => by_header(headers, &AUTHORIZATION),
        Some(Principal::Header(name)) => by_header(headers, name),
        Some(Principal::Jwt { claim, keys, now }) => by_jwt(headers, claim, keys, now()),
        Some(Principal::UnverifiedJwt(claim)) => by_claim(headers, claim),
        Some(Principal::Custom(name)) => {
            let name = name(parts).filter(|name| !name.is_empty());
            name.map(|name| shown(&name)).ok_or(PrincipalError::Missing)
        }
        Some(Principal::Shared) => Ok(String::new()),
    }
}

fn by_header(headers: &HeaderMap, name: &HeaderName) -> Result<String, PrincipalError> {
    if name == COOKIE {
        // HTTP/2 may split one cookie header into several.
        let crumbs: Vec<_> = headers.get_all(COOKIE).iter().map(|value| value.as_bytes()).collect();
        return match crumbs.concat().is_empty() {
            true => Err(PrincipalError::Missing),
            false => Ok(hashed(&crumbs.join(&b"; "[..]))),
        };
    }
    let value = only(headers, name)?;
    if carries_credentials(name) {
        return Ok(hashed(value));
    }
    Ok(std::str::from_utf8(value).map_or_else(|_| hashed(value), shown))
}

/// Whether a header carries credentials, judged by its name. A needless hash only costs readability, but
/// a stored credential would leak.
fn carries_credentials(name: &HeaderName) -> bool {
    let telling = ["authorization", "key", "token", "secret", "session", "password", "credential"];
    telling.iter().any(|word| name.as_str().contains(word))
}

/// The only value of a header. If the request has two values, the app might use the other value.
fn only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<&'a [u8], PrincipalError> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (Some(value), None) if !value.is_empty() => Ok(value.as_bytes()),
        (Some(_), None) | (None, _) | (Some(_), Some(_)) => Err(PrincipalError::Missing),
    }
}

fn by_jwt(
    headers: &HeaderMap,
    claim: &str,
    keys: &JwtKeys,
    now: Timestamp,
) -> Result<String, PrincipalError> {
    let authorization = only(headers, &AUTHORIZATION).map_err(|_| PrincipalError::Refused)?;
    let token = bearer(authorization).ok_or(PrincipalError::Refused)?;
    match keys.claim(token, claim, now) {
        Ok(name) => Ok(shown(&name)),
        Err(error) => {
            tracing::debug!(%error, claim, "refused a token that must name the caller in its claim {claim}: {error}");
            Err(PrincipalError::Refused)
        }
    }
}

fn by_claim(headers: &HeaderMap, claim: &str) -> Result<String, PrincipalError> {
    let authorization = only(headers, &AUTHORIZATION)?;
    let name = claim_of(authorization, claim).filter(|name| !name.is_empty());
    name.map(|name| shown(&name)).ok_or(PrincipalError::Missing)
}

/// The token of an Authorization header.
fn bearer(authorization: &[u8]) -> Option<&str> {
    let (scheme, token) = std::str::from_utf8(authorization).ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

fn claim_of(authorization: &[u8], claim: &str) -> Option<String> {
    let mut pieces = bearer(authorization)?.split('.');
    let (Some(_), Some(payload), Some(_), None) =
        (pieces.next(), pieces.next(), pieces.next(), pieces.next())
    else {
        return None;
    };
    let payload = BASE64URL.decode(payload).ok()?;
    let pointer = format!("/{}", claim.replace('~', "~0").replace('/', "~1"));
    let pointer = Pointer::parse(&pointer).ok()?;
    // An array has no claims, although a pointer could select one of its elements.
    let is_object = payload.trim_ascii_start().starts_with(b"{");
    let found = json::extract(&payload, &[pointer]).ok()?.into_iter().next()??;
    is_object.then(|| found.as_id_text())?.map(Into::into)
}

/// Accepts padding, which some issuers write.
const BASE64URL: GeneralPurpose = GeneralPurpose::new(
    &URL_SAFE,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// The name as it is. A long name is hashed, and so is one that looks like such a hash, so that no caller
/// can use the hash of another as its name.
fn shown(name: &str) -> String {
    if name.len() > PRINCIPAL_BYTES_MAX || name.starts_with(HASHED) {
        return hashed(name.as_bytes());
    }
    name.to_owned()
}

const HASHED: &str = "sha256:";

fn hashed(value: &[u8]) -> String {
    format!("{HASHED}{}", hex::encode(digest::digest(&digest::SHA256, value)))
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn check(
        principal: Option<Principal>,
        headers: &[(&str, &str)],
        expected: Result<&str, PrincipalError>,
    ) {
        let mut request = Request::builder();
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let (parts, ()) = request.body(()).unwrap().into_parts();
        let rules = IdempotencyRules { principal, ..IdempotencyRules::default() };
        assert_eq!(name_of(&rules, &parts), expected.map(str::to_owned), "{headers:?}");
    }

    fn header(name: &'static str) -> Option<Principal> {
        Some(Principal::Header(HeaderName::from_static(name)))
    }

    fn hash(text: &str) -> String {
        hashed(text.as_bytes())
    }

    #[test]
    fn a_header_names_its_caller_once_and_only_once() {
        check(header("x-account-id"), &[("x-account-id", "acct_1")], Ok("acct_1"));
        check(header("x-account-id"), &[], Err(PrincipalError::Missing));
        check(header("x-account-id"), &[("x-account-id", "")], Err(PrincipalError::Missing));
        // If the layer used the first value, the app might use the last.
        let two = [("x-account-id", "acct_1"), ("x-account-id", "acct_2")];
        check(header("x-account-id"), &two, Err(PrincipalError::Missing));
        check(header("authorization"), &[], Err(PrincipalError::Missing));
        check(Some(Principal::Shared), &[("x-account-id", "acct_1")], Ok(""));
    }

    #[test]
    fn by_default_the_authorization_header_names_the_caller_and_may_be_missing() {
        check(None, &[], Ok(""));
        check(None, &[("authorization", "Bearer s3cret")], Ok(&hash("Bearer s3cret")));
        check(None, &[("authorization", "")], Err(PrincipalError::Missing));
        let two = [("authorization", "Bearer a"), ("authorization", "Bearer b")];
        check(None, &two, Err(PrincipalError::Missing));
    }

    // A caller whose name looks like the hash of another would share its keys.
    #[test]
    fn credentials_and_long_names_are_hashed() {
        let long = "a".repeat(PRINCIPAL_BYTES_MAX + 1);
        check(header("x-token"), &[("x-token", &long)], Ok(&hash(&long)));
        let forged = hash(&long);
        check(header("x-token"), &[("x-token", &forged)], Ok(&hash(&forged)));
        for name in ["authorization", "proxy-authorization", "x-api-key", "apikey", "x-auth-token"]
        {
            check(header(name), &[(name, "s3cret")], Ok(&hash("s3cret")));
        }
        check(header("x-user"), &[("x-user", &forged)], Ok(&hash(&forged)));
        check(header("cookie"), &[("cookie", "a=1; b=2")], Ok(&hash("a=1; b=2")));
        check(header("cookie"), &[("cookie", "a=1"), ("cookie", "b=2")], Ok(&hash("a=1; b=2")));
        check(header("cookie"), &[], Err(PrincipalError::Missing));
    }

    #[test]
    fn a_claim_is_read_from_the_token() {
        let token = |payload: &str| {
            let payload = base64::prelude::BASE64_URL_SAFE_NO_PAD.encode(payload);
            format!("Bearer eyJhbGciOiJub25lIn0.{payload}.c2ln")
        };
        let claim = |claim: &str, authorization: &str, expected| {
            let principal = Some(Principal::UnverifiedJwt(claim.to_owned()));
            check(principal, &[("authorization", authorization)], expected);
        };
        claim("sub", &token(r#"{"sub":"user_1"}"#), Ok("user_1"));
        claim("sub", &token(r#"{"sub":42}"#), Ok("42"));
        claim("https://a.example/id~", &token(r#"{"https://a.example/id~":"x"}"#), Ok("x"));
        claim("sub", &token(r#"{"sub":"user_1"}"#).replacen("Bearer", "bearer", 1), Ok("user_1"));
        let padded = base64::prelude::BASE64_URL_SAFE.encode(r#"{"sub":"user_12"}"#);
        claim("sub", &format!("Bearer a.{padded}.c"), Ok("user_12"));
        // A parser that takes the first value and one that takes the last see two callers.
        claim("sub", &token(r#"{"sub":"user_1","sub":"user_2"}"#), Err(PrincipalError::Missing));
        claim("sub", &token(r#"{"sub":""}"#), Err(PrincipalError::Missing));
        claim("sub", &token(r#"{"sub":null}"#), Err(PrincipalError::Missing));
        claim("sub", &token(r#"{"sub":["user_1"]}"#), Err(PrincipalError::Missing));
        claim("aud", &token(r#"{"sub":"user_1"}"#), Err(PrincipalError::Missing));
        claim("0", &token(r#"["user_1"]"#), Err(PrincipalError::Missing));
        claim("sub", &token("not json"), Err(PrincipalError::Missing));
        claim("sub", "Bearer opaque", Err(PrincipalError::Missing));
        claim("sub", "Bearer a.b", Err(PrincipalError::Missing));
        claim(
            "sub",
            &token(r#"{"sub":"user_1"}"#).replacen("Bearer", "Basic", 1),
            Err(PrincipalError::Missing),
        );
        claim("sub", "Bearer", Err(PrincipalError::Missing));
    }
}
