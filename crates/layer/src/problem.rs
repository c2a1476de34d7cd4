//! The layer's own answers: RFC 9457 problems that disclose nothing about other requests.

use std::time::Duration;

use bytes::Bytes;
use hapax_core::ledger::{KeyError, StoredAnswer};
use http::StatusCode;

use crate::limits::{RETRY_AFTER_MAX, RETRY_AFTER_QUOTA, RETRY_AFTER_UNAVAILABLE};

/// Why the layer answers a request itself.
#[derive(Debug, Clone, Copy)]
pub(crate) enum IdempotencyProblem {
    /// The route requires a key.
    KeyMissing,
    KeyMalformed(KeyError),
    /// The request does not identify its caller.
    PrincipalMissing,
    /// The token that identifies the caller is missing or not valid.
    TokenRefused,
    /// The path cannot be compared with a route.
    Path,
    BodyTooLarge,
    /// The client's body was interrupted.
    BodyUnreadable,
    /// Another attempt runs the request, for at most this much longer.
    InProgress(Duration),
    /// The key was used for another request. The status is configured.
    Mismatch(StatusCode),
    /// The caller is over its quota of keys or bytes.
    OverQuota,
    /// The ledger is unavailable, or cannot store the answer.
    Unavailable,
    /// The service panicked.
    Crashed,
    /// The service's answer was interrupted.
    BrokeOff,
    /// The service has done its work, and its answer is too large to store.
    AnswerTooLarge,
}

impl IdempotencyProblem {
    /// The answer, ready to be sent or stored.
    pub(crate) fn answer(self) -> StoredAnswer {
        let ProblemText { status, kind, title } = self.text();
        let body = format!(
            "{{\"type\":\"urn:hapax:problem:{kind}\",\"title\":\"{title}\",\"status\":{}}}",
            status.as_u16()
        );
        let mut headers = vec![("content-type".to_owned(), "application/problem+json".to_owned())];
        if let Some(seconds) = self.retry_after_seconds() {
            headers.push(("retry-after".to_owned(), seconds.to_string()));
        }
        if status == StatusCode::UNAUTHORIZED {
            headers
                .push(("www-authenticate".to_owned(), "Bearer error=\"invalid_token\"".to_owned()));
        }
        StoredAnswer { status, headers, body: Bytes::from(body) }
    }

    fn retry_after_seconds(self) -> Option<u64> {
        match self {
            Self::InProgress(remaining) => {
                let rounded_up = remaining.as_nanos().div_ceil(1_000_000_000);
                let most = RETRY_AFTER_MAX.as_secs();
                Some(u64::try_from(rounded_up).unwrap_or(most).clamp(1, most))
            }
            Self::OverQuota => Some(RETRY_AFTER_QUOTA.as_secs()),
            Self::Unavailable => Some(RETRY_AFTER_UNAVAILABLE.as_secs()),
            Self::KeyMissing
            | Self::KeyMalformed(_)
            | Self::PrincipalMissing
            | Self::TokenRefused
            | Self::Path
            | Self::BodyTooLarge
            | Self::BodyUnreadable
            | Self::Mismatch(_)
            | Self::Crashed
            | Self::BrokeOff
            | Self::AnswerTooLarge => None,
        }
    }

    fn text(self) -> ProblemText {
        let (status, kind, title) = match self {
            Self::KeyMissing => (
                StatusCode::BAD_REQUEST,
                "idempotency_key_missing",
                "this request needs an Idempotency-Key",
            ),
            Self::KeyMalformed(error) => {
                (StatusCode::BAD_REQUEST, "idempotency_key_malformed", why(error))
            }
            Self::PrincipalMissing => (
                StatusCode::BAD_REQUEST,
                "principal_missing",
                "a request with an Idempotency-Key must identify its caller",
            ),
            Self::TokenRefused => (
                StatusCode::UNAUTHORIZED,
                "token_invalid",
                "the bearer token is missing, expired or not signed by a known key",
            ),
            Self::Path => (
                StatusCode::BAD_REQUEST,
                "path_malformed",
                "the path contains control characters, is not UTF-8 or is encoded too often",
            ),
            Self::BodyTooLarge => (
                StatusCode::PAYLOAD_TOO_LARGE,
                "too_large",
                "the body is too large for a request with an Idempotency-Key",
            ),
            Self::BodyUnreadable => {
                (StatusCode::BAD_REQUEST, "unreadable", "the body could not be read to its end")
            }
            Self::InProgress(_) => (
                StatusCode::CONFLICT,
                "idempotency_in_progress",
                "a request with this Idempotency-Key is still running",
            ),
            Self::Mismatch(status) => (
                status,
                "idempotency_key_reused",
                "this Idempotency-Key was used for another request",
            ),
            Self::OverQuota => (
                StatusCode::TOO_MANY_REQUESTS,
                "idempotency_quota",
                "too many Idempotency-Keys or answers of this caller are kept; nothing was done",
            ),
            Self::Unavailable => (
                StatusCode::SERVICE_UNAVAILABLE,
                "unavailable",
                "nothing can be stored now; send the request again with the same key",
            ),
            Self::Crashed => {
                (StatusCode::INTERNAL_SERVER_ERROR, "work_failed", "the work ended unexpectedly")
            }
            Self::BrokeOff => {
                (StatusCode::BAD_GATEWAY, "answer_broke_off", "the answer ended in the middle")
            }
            Self::AnswerTooLarge => (
                StatusCode::INTERNAL_SERVER_ERROR,
                "answer_too_large",
                "the work is done, but its answer was too large to keep",
            ),
        };
        ProblemText { status, kind, title }
    }
}

struct ProblemText {
    status: StatusCode,
    kind: &'static str,
    title: &'static str,
}

fn why(error: KeyError) -> &'static str {
    match error {
        KeyError::Empty => "the Idempotency-Key is empty",
        KeyError::TooLong => "the Idempotency-Key is too long",
        KeyError::NotPrintable => "the Idempotency-Key is not printable ASCII",
        KeyError::Quoting => "the Idempotency-Key is not a well-formed quoted string",
        KeyError::Several => "there is more than one Idempotency-Key",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // A client that reads 0 retries at once; one that reads an hour gives up.
    #[test]
    fn retry_after_is_between_one_and_five_seconds() {
        let seconds = |remaining| IdempotencyProblem::InProgress(remaining).retry_after_seconds();
        assert_eq!(seconds(Duration::ZERO), Some(1));
        assert_eq!(seconds(Duration::from_millis(1)), Some(1));
        assert_eq!(seconds(Duration::from_millis(1_001)), Some(2));
        assert_eq!(seconds(Duration::from_secs(3)), Some(3));
        assert_eq!(seconds(Duration::from_secs(3_600)), Some(5));
        assert_eq!(seconds(Duration::MAX), Some(5));
    }
}
