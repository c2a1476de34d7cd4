//! The errors that a proxy itself answers with: RFC 9457 problems without internal details. Each
//! error also decides how the request's key is settled.

use bytes::Bytes;
use hapax_core::ledger::Settle;
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Response, StatusCode};

use super::ProxyContext;
use super::body::UpstreamBody;
use crate::limits::RETRY_AFTER_BUSY_SECONDS;

/// Why the proxy answers instead of the upstream.
#[derive(Debug, Clone, Copy)]
pub(super) enum Problem {
    /// The upstream cannot have seen the request.
    NotReached,
    /// The upstream may have seen the request.
    UnknownOutcome,
    /// The client asked for another protocol.
    Upgrade,
    /// The target cannot be appended to the upstream's path.
    Target,
    /// The Connection header would remove a header that the app must see.
    Connection,
    /// The client did not send its body in time.
    SlowBody,
    /// Too many unfinished bodies are in memory, or too many requests are running.
    Crowded,
}

impl Problem {
    pub(super) fn answer(self, call: &ProxyContext) -> Response<UpstreamBody> {
        let (status, kind, title, settle) = self.words();
        let (code, id) = (status.as_u16(), call.request_id.uuid);
        let body = format!(
            "{{\"type\":\"urn:hapax:problem:{kind}\",\"title\":\"{title}\",\"status\":{code},\
             \"instance\":\"urn:uuid:{id}\",\"request_id\":\"{id}\"}}"
        );
        let mut answer = Response::new(UpstreamBody::whole(Bytes::from(body)));
        *answer.status_mut() = status;
        let json = HeaderValue::from_static("application/problem+json");
        answer.headers_mut().insert(CONTENT_TYPE, json);
        if status == StatusCode::SERVICE_UNAVAILABLE {
            let seconds = HeaderValue::from(RETRY_AFTER_BUSY_SECONDS);
            answer.headers_mut().insert(RETRY_AFTER, seconds);
        }
        answer.extensions_mut().insert(settle);
        answer
    }

    fn words(self) -> (StatusCode, &'static str, &'static str, Settle) {
        match self {
            Self::NotReached => (
                StatusCode::BAD_GATEWAY,
                "not_reached",
                "the service cannot be reached; nothing was done",
                Settle::Free,
            ),
            Self::UnknownOutcome => (
                StatusCode::BAD_GATEWAY,
                "unknown_outcome",
                "the service gave no answer; the request may have been carried out",
                Settle::Wait,
            ),
            Self::Upgrade => (
                StatusCode::NOT_IMPLEMENTED,
                "upgrade",
                "this service does not switch to other protocols",
                Settle::Free,
            ),
            Self::Target => {
                (StatusCode::BAD_REQUEST, "target", "this service has no such path", Settle::Free)
            }
            Self::Connection => (
                StatusCode::BAD_REQUEST,
                "connection_header",
                "the Connection header names a header that the service must see",
                Settle::Free,
            ),
            Self::SlowBody => (
                StatusCode::REQUEST_TIMEOUT,
                "slow",
                "the body took too long to arrive",
                Settle::Free,
            ),
            Self::Crowded => (
                StatusCode::SERVICE_UNAVAILABLE,
                "unavailable",
                "too many requests are running now; retry later",
                Settle::Free,
            ),
        }
    }
}
