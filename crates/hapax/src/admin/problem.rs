//! Errors of the admin side, as RFC 9457 problems with stable types.

use axum::Json;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use hapax_core::store::{EventId, StoreError};

use crate::api;

/// An error with a stable type.
#[derive(Debug)]
pub(super) struct Problem {
    status: StatusCode,
    kind: &'static str,
    detail: String,
    candidates: Vec<EventId>,
    retry_after_seconds: Option<u32>,
}

impl Problem {
    fn new(status: StatusCode, kind: &'static str, detail: &str) -> Self {
        let detail = detail.to_owned();
        Self { status, kind, detail, candidates: Vec::new(), retry_after_seconds: None }
    }

    pub(super) fn bad_request(detail: &str) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "bad_request", detail)
    }

    pub(super) fn unauthorized() -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "unauthorized", "a valid bearer token is required")
    }

    /// A page of the portal without a session that is still open.
    pub(super) fn not_entered() -> Self {
        let detail = "this link to the portal has ended, or was not opened in this browser: ask for a new link";
        Self::new(StatusCode::UNAUTHORIZED, "unauthorized", detail)
    }

    /// Whether a token is missing or wrong.
    pub(super) fn is_unauthorized(&self) -> bool {
        self.status == StatusCode::UNAUTHORIZED
    }

    pub(super) fn forbidden(detail: &str) -> Self {
        Self::new(StatusCode::FORBIDDEN, "forbidden", detail)
    }

    pub(super) fn not_found(detail: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found", detail)
    }

    pub(super) fn method_not_allowed() -> Self {
        let detail = "this route does not support that method";
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", detail)
    }

    pub(super) fn conflict(detail: &str) -> Self {
        Self::new(StatusCode::CONFLICT, "conflict", detail)
    }

    pub(super) fn key_reused() -> Self {
        let detail = "this Idempotency-Key was used before, for a plan with another request";
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, "key_reused", detail)
    }

    pub(super) fn message_conflict(id: &str) -> Self {
        let detail = format!("the message id {id} was used before, for other content");
        Self::new(StatusCode::CONFLICT, "message_conflict", &detail)
    }

    pub(super) fn fence_lost() -> Self {
        let detail = "the fence is lost: the job was claimed again, replayed or ended meanwhile";
        Self::new(StatusCode::CONFLICT, "fence_lost", detail)
    }

    pub(super) fn too_large() -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", "the body is too large")
    }

    pub(super) fn too_slow() -> Self {
        let detail = "the body did not arrive in time: send it again";
        Self::new(StatusCode::REQUEST_TIMEOUT, "too_slow", detail)
    }

    pub(super) fn not_json() -> Self {
        let detail = "send the body as application/json";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "not_json", detail)
    }

    pub(super) fn ambiguous(candidates: Vec<EventId>) -> Self {
        let detail = "several events have that id: use the id that Hapax gave the event";
        Self { candidates, ..Self::new(StatusCode::CONFLICT, "ambiguous", detail) }
    }

    pub(super) fn too_many() -> Self {
        Self::limited("too many requests with a wrong token: try again later", 1)
    }

    pub(super) fn limited(detail: &str, retry_after_seconds: u32) -> Self {
        let retry_after_seconds = Some(retry_after_seconds);
        Self { retry_after_seconds, ..Self::new(StatusCode::TOO_MANY_REQUESTS, "limited", detail) }
    }

    pub(super) fn unavailable(detail: &str) -> Self {
        let retry_after_seconds = Some(1);
        let status = StatusCode::SERVICE_UNAVAILABLE;
        Self { retry_after_seconds, ..Self::new(status, "unavailable", detail) }
    }
}

impl From<StoreError> for Problem {
    fn from(error: StoreError) -> Self {
        Self::unavailable(&error.to_string())
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let body = api::Problem {
            r#type: format!("urn:hapax:problem:{}", self.kind),
            title: self.status.canonical_reason().unwrap_or_default().to_owned(),
            status: self.status.as_u16(),
            detail: self.detail,
            candidates: self.candidates.into_iter().map(|EventId(id)| id).collect(),
        };
        let mut response = (self.status, Json(&body)).into_response();
        // Pages show the problem as a page.
        response.extensions_mut().insert(body);
        let headers = response.headers_mut();
        let problem = header::HeaderValue::from_static("application/problem+json");
        headers.insert(header::CONTENT_TYPE, problem);
        if self.status == StatusCode::UNAUTHORIZED {
            let scheme = header::HeaderValue::from_static("Bearer realm=\"hapax\"");
            headers.insert(header::WWW_AUTHENTICATE, scheme);
        }
        if let Some(seconds) = self.retry_after_seconds {
            headers.insert(header::RETRY_AFTER, header::HeaderValue::from(seconds));
        }
        response
    }
}
