//! What a proxy itself answers: RFC 9457 problems that give nothing away, each with what it means for
//! the request's key.

use bytes::Bytes;
use hapax_core::ledger::Settle;
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Response, StatusCode};

use super::Call;
use super::body::Answered;
use crate::limits::RETRY_AFTER_BUSY_SECONDS;

/// Why there is no answer of the upstream.
#[derive(Debug, Clone, Copy)]
pub(super) enum Problem {
    /// It cannot have seen the request.
    NotReached,
    /// It may have.
    UnknownOutcome,
    /// Another protocol was asked for.
    Upgrade,
    /// The target cannot be put behind the upstream's path.
    Target,
    /// Its Connection header takes away what the app has to see.
    Connection,
    /// The client did not send its body in time.
    SlowBody,
    /// Too many unfinished bodies are held already, or too many requests run.
    Crowded,
}

impl Problem {
    pub(super) fn answer(self, call: &Call) -> Response<Answered> {
        let (status, kind, title, settle) = self.words();
        let (code, id) = (status.as_u16(), call.request_id.uuid);
        let body = format!(
            "{{\"type\":\"urn:hapax:problem:{kind}\",\"title\":\"{title}\",\"status\":{code},\
             \"instance\":\"urn:uuid:{id}\",\"request_id\":\"{id}\"}}"
        );
        let mut answer = Response::new(Answered::whole(Bytes::from(body)));
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
                "no other protocol is spoken here",
                Settle::Free,
            ),
            Self::Target => (
                StatusCode::BAD_REQUEST,
                "target",
                "the path is not one of this service",
                Settle::Free,
            ),
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
                "too many requests are being served now, come back later",
                Settle::Free,
            ),
        }
    }
}
