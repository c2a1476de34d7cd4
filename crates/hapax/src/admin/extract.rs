//! Extractors for paths, queries and JSON bodies. Unknown fields are errors: a misspelt `dry_run` must not
//! become a run.

use axum::body::Bytes;
use axum::extract::rejection::QueryRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::header;
use axum::http::request::Parts;
use hapax_core::job::HandlerName;
use hapax_core::limits::IDEMPOTENCY_KEY_BYTES_MAX;
use hapax_core::store::{Cursor, HandlerRef, SourcePair};
use hapax_core::{SourceName, Tenant};
use serde::de::DeserializeOwned;

use super::problem::Problem;

const LIMIT_DEFAULT: usize = 50;
const LIMIT_MAX: usize = 500;

/// The longest reason, in characters.
const REASON_MAX: usize = 1_000;

/// The id in the path, Hapax's or the sender's.
pub(super) struct PathId(pub(super) String);

impl<S: Send + Sync> FromRequestParts<S> for PathId {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        match Path::from_request_parts(parts, state).await {
            Ok(Path(name)) => Ok(Self(name)),
            Err(_) => Err(Problem::bad_request("the id in the path is not UTF-8")),
        }
    }
}

/// The tenant and the source in the path.
pub(super) struct PathPair(pub(super) SourcePair);

impl<S: Send + Sync> FromRequestParts<S> for PathPair {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        match Path::<(String, String)>::from_request_parts(parts, state).await {
            Ok(Path((tenant, source))) => Ok(Self(SourcePair {
                tenant: Tenant::new(tenant),
                source: SourceName::new(source),
            })),
            Err(_) => Err(Problem::bad_request("the names in the path are not UTF-8")),
        }
    }
}

/// The source and the handler in the path.
pub(super) struct PathHandler(pub(super) HandlerRef);

impl<S: Send + Sync> FromRequestParts<S> for PathHandler {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        match Path::<(String, String)>::from_request_parts(parts, state).await {
            Ok(Path((source, handler))) => Ok(Self(HandlerRef {
                source: SourceName::new(source),
                handler: HandlerName::new(handler),
            })),
            Err(_) => Err(Problem::bad_request("the names in the path are not UTF-8")),
        }
    }
}

/// The query string.
pub(super) struct QueryParams<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for QueryParams<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        match Query::from_request_parts(parts, state).await {
            Ok(Query(queried)) => Ok(Self(queried)),
            Err(error) => Err(Self::problem(&error)),
        }
    }
}

impl<T> QueryParams<T> {
    /// The problem with a query string.
    pub(super) fn problem(error: &QueryRejection) -> Problem {
        let text = error.body_text();
        let detail = text.strip_prefix("Failed to deserialize query string: ");
        Problem::bad_request(detail.unwrap_or(&text))
    }
}

/// The header `Idempotency-Key`, bare or quoted.
pub(super) struct IdempotencyKeyHeader(pub(super) Option<String>);

impl<S: Send + Sync> FromRequestParts<S> for IdempotencyKeyHeader {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        let mut values = parts.headers.get_all("idempotency-key").iter();
        let bad = || {
            Problem::bad_request("Idempotency-Key must be one value of 1 to 255 printable bytes")
        };
        let value = match (values.next(), values.next()) {
            (None, _) => return Ok(Self(None)),
            (Some(value), None) => value.to_str().map_err(|_| bad())?,
            (Some(_), Some(_)) => return Err(bad()),
        };
        let unquoted = value.strip_prefix('"').and_then(|value| value.strip_suffix('"'));
        let key = unquoted.unwrap_or(value);
        match (1..=IDEMPOTENCY_KEY_BYTES_MAX).contains(&key.len()) {
            true => Ok(Self(Some(key.to_owned()))),
            false => Err(bad()),
        }
    }
}

/// A JSON object as body; an empty body counts as `{}`.
pub(super) struct JsonBody<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for JsonBody<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let is_json = request
            .headers()
            .get(header::CONTENT_TYPE)
            .and_then(|kind| kind.to_str().ok())
            .and_then(|kind| kind.split(';').next())
            .is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json"));
        let body = Bytes::from_request(request, state).await.map_err(|_| Problem::too_large())?;
        let body: &[u8] = match (body.is_empty(), is_json) {
            (true, _) => b"{}",
            (false, true) => &body,
            (false, false) => return Err(Problem::not_json()),
        };
        // serde would read an array as the fields in their order.
        if !body.trim_ascii_start().starts_with(b"{") {
            return Err(Problem::bad_request("the body is not a JSON object"));
        }
        if escapes_nul(body) {
            return Err(Problem::bad_request(
                "the body must not contain a NUL character (\\u0000)",
            ));
        }
        match serde_json::from_slice(body) {
            Ok(asked) => Ok(Self(asked)),
            Err(error) => Err(Problem::bad_request(&error.to_string())),
        }
    }
}

/// Whether a string in this JSON contains an escaped NUL, which PostgreSQL cannot store as text. An
/// unescaped NUL is not valid JSON.
fn escapes_nul(json: &[u8]) -> bool {
    let mut rest = json;
    while let Some(at) = rest.iter().position(|byte| *byte == b'\\') {
        let escape = &rest[at + 1..];
        if escape.starts_with(b"u0000") {
            return true;
        }
        rest = escape.get(1..).unwrap_or_default();
    }
    false
}

/// The page size of a list.
pub(super) fn limit(asked: Option<usize>) -> Result<usize, Problem> {
    match asked.unwrap_or(LIMIT_DEFAULT) {
        limit @ 1..=LIMIT_MAX => Ok(limit),
        _ => Err(Problem::bad_request("limit must be a number from 1 to 500")),
    }
}

/// The end of the previous page.
pub(super) fn cursor(asked: Option<String>) -> Result<Option<Cursor>, Problem> {
    let read = asked.map(|cursor| cursor.parse().map(Cursor)).transpose();
    read.map_err(|_| Problem::bad_request("cursor is not valid: pass `next` of the previous page"))
}

/// The reason to record; blank text counts as none.
pub(super) fn reason(asked: Option<String>) -> Result<Option<String>, Problem> {
    let reason = asked.filter(|reason| !reason.trim().is_empty());
    match reason {
        Some(reason) if reason.chars().count() > REASON_MAX => {
            Err(Problem::bad_request("reason must have at most 1000 characters"))
        }
        reason => Ok(reason),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nul_is_found_in_any_string_and_nowhere_else() {
        let check = |json: &str, expected: bool| {
            assert_eq!(escapes_nul(json.as_bytes()), expected, "{json}");
        };
        check(r#"{"a":"\u0000"}"#, true);
        check(r#"{"a":"x\\\u0000"}"#, true);
        check(r#"{"a":"x\\u0000"}"#, false);
        check(r#"{"a":"\u0001 \n u0000 %00"}"#, false);
        check(r#"{"a":"\"#, false);
    }
}
