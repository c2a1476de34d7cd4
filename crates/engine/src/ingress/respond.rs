//! Responses to senders, as bytes. Errors reveal no details: every 401 has the same text, whatever
//! was wrong.

use bytes::Bytes;
use hapax_core::handshake::HandshakeReply;
use hapax_core::presets::Ack;
use hapax_core::store::{Decision, EventId, KnownEvent, Verdict};
use http::header::{ALLOW, CONNECTION, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderName, HeaderValue, Response, StatusCode};
use http_body_util::Full;
use uuid::Uuid;
use uuid::fmt::Hyphenated;

use crate::ingress::sync_wait::SyncOutcome;

/// A response of the ingress.
pub type IngressResponse = Response<Full<Bytes>>;

/// Why a request was refused. Each reason has a word for metrics and logs, and a status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    Unknown,
    Method,
    TooLarge,
    Encoded,
    ContentType,
    Missing,
    Signature,
    Stale,
    StaleUnseen,
    Future,
    Malformed,
    NoId,
    Limited,
    Slow,
    Crowded,
    Unavailable,
    WorkFailed,
}

impl Reason {
    pub(crate) const ALL: [Self; 17] = [
        Self::Unknown,
        Self::Method,
        Self::TooLarge,
        Self::Encoded,
        Self::ContentType,
        Self::Missing,
        Self::Signature,
        Self::Stale,
        Self::StaleUnseen,
        Self::Future,
        Self::Malformed,
        Self::NoId,
        Self::Limited,
        Self::Slow,
        Self::Crowded,
        Self::Unavailable,
        Self::WorkFailed,
    ];

    /// The word in metrics and logs.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Method => "method",
            Self::TooLarge => "too_large",
            Self::Encoded => "encoded",
            Self::ContentType => "content_type",
            Self::Missing => "missing",
            Self::Signature => "signature",
            Self::Stale => "stale",
            Self::StaleUnseen => "stale_unseen",
            Self::Future => "future",
            Self::Malformed => "malformed",
            Self::NoId => "no_id",
            Self::Limited => "limited",
            Self::Slow => "slow",
            Self::Crowded => "crowded",
            Self::Unavailable => "unavailable",
            Self::WorkFailed => "work_failed",
        }
    }

    /// Whether the refusal counts against the client's address. An unknown late event does not: it
    /// may be a lost event, and must always be logged.
    pub(crate) fn is_failed_verification(self) -> bool {
        match self {
            Self::Missing | Self::Signature | Self::Stale | Self::Future => true,
            Self::Unknown
            | Self::Method
            | Self::TooLarge
            | Self::Encoded
            | Self::ContentType
            | Self::StaleUnseen
            | Self::Malformed
            | Self::NoId
            | Self::Limited
            | Self::Slow
            | Self::Crowded
            | Self::Unavailable
            | Self::WorkFailed => false,
        }
    }

    fn problem(self) -> Problem {
        let problem = |status, kind, title| Problem { status, kind, title };
        match self {
            Self::Unknown => problem(StatusCode::NOT_FOUND, "unknown", "no such source"),
            Self::Method => {
                problem(StatusCode::METHOD_NOT_ALLOWED, "method", "webhooks are sent with POST")
            }
            Self::TooLarge => {
                problem(StatusCode::PAYLOAD_TOO_LARGE, "too_large", "the body is too large")
            }
            Self::Encoded => problem(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "encoded",
                "the body must not be compressed or otherwise encoded",
            ),
            Self::ContentType => problem(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "content_type",
                "the content type is not one this source sends",
            ),
            Self::Missing | Self::Signature | Self::Stale | Self::StaleUnseen | Self::Future => {
                problem(
                    StatusCode::UNAUTHORIZED,
                    "signature",
                    "signature missing, wrong or outside the window",
                )
            }
            Self::Malformed => {
                problem(StatusCode::BAD_REQUEST, "malformed", "the request is malformed")
            }
            Self::NoId => problem(StatusCode::BAD_REQUEST, "no_id", "the event has no usable id"),
            Self::Limited => {
                problem(StatusCode::TOO_MANY_REQUESTS, "limited", "over the limit; retry later")
            }
            Self::Slow => {
                problem(StatusCode::REQUEST_TIMEOUT, "slow", "the body took too long to arrive")
            }
            Self::Crowded | Self::Unavailable => problem(
                StatusCode::SERVICE_UNAVAILABLE,
                "unavailable",
                "the event cannot be made durable now; retry later",
            ),
            Self::WorkFailed => problem(
                StatusCode::INTERNAL_SERVER_ERROR,
                "work_failed",
                "the event is stored, but a handler failed; send it again",
            ),
        }
    }
}

struct Problem {
    status: StatusCode,
    kind: &'static str,
    title: &'static str,
}

/// The id of one request, as text.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RequestId {
    pub(crate) uuid: Uuid,
}

impl RequestId {
    pub(crate) fn header(self) -> HeaderValue {
        let mut text = [0; Hyphenated::LENGTH];
        let text = self.uuid.hyphenated().encode_lower(&mut text);
        HeaderValue::from_str(text).expect("hex digits and dashes are a header value")
    }
}

/// Whether the connection can be used again after this answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConnectionReuse {
    /// The request was read to its end.
    KeepAlive,
    /// The request was not read to its end: its rest must not be read as another one.
    Close,
}

/// A refusal, as an RFC 9457 problem.
pub(crate) fn refused(
    reason: Reason,
    request_id: RequestId,
    retry_after_seconds: Option<u64>,
    after: ConnectionReuse,
) -> IngressResponse {
    let Problem { status, kind, title } = reason.problem();
    let body = format!(
        "{{\"type\":\"urn:hapax:problem:{kind}\",\"title\":\"{title}\",\"status\":{},\
         \"instance\":\"urn:uuid:{id}\",\"request_id\":\"{id}\"}}",
        status.as_u16(),
        id = request_id.uuid,
    );
    let mut answer = answer(status, request_id, Bytes::from(body));
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    if reason == Reason::Method {
        headers.insert(ALLOW, HeaderValue::from_static("POST"));
    }
    if let Some(seconds) = retry_after_seconds {
        headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    match after {
        ConnectionReuse::KeepAlive => {}
        ConnectionReuse::Close => {
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
    }
    answer
}

/// The decisions about the events of one request. A conflict is answered like a duplicate: it is
/// shown to the operator, and must not be visible to the sender.
pub(crate) fn decided(verdicts: &[Verdict], ack: Ack, request_id: RequestId) -> IngressResponse {
    let overall = overall(verdicts);
    let status = match (overall, ack) {
        (AckDecision::Review, Ack::Plain) => StatusCode::ACCEPTED,
        (AckDecision::Review, Ack::Empty | Ack::Only200)
        | (
            AckDecision::Accepted | AckDecision::Duplicate,
            Ack::Plain | Ack::Empty | Ack::Only200,
        ) => StatusCode::OK,
    };
    let body = match ack {
        Ack::Plain | Ack::Only200 => Bytes::from(match verdicts {
            [one] => one_body(one),
            several => items_body(overall, several),
        }),
        Ack::Empty => Bytes::new(),
    };
    let has_body = !body.is_empty();
    let mut answer = answer(status, request_id, body);
    let headers = answer.headers_mut();
    if has_body {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    }
    headers.insert(DECISION, HeaderValue::from_static(overall.as_str()));
    answer
}

/// The outcomes of the events of a sync source. If one failed, the whole request fails: the
/// sender's next copy is the next attempt.
pub(crate) fn worked(
    verdicts: &[Verdict],
    worked: &[SyncOutcome],
    ack: Ack,
    request_id: RequestId,
) -> IngressResponse {
    let mut answer = decided(verdicts, ack, request_id);
    if worked.contains(&SyncOutcome::Failed) {
        return refused(Reason::WorkFailed, request_id, None, ConnectionReuse::KeepAlive);
    }
    let runs = worked.iter().any(|worked| matches!(worked, SyncOutcome::Running(_)));
    if runs && ack == Ack::Plain {
        *answer.status_mut() = StatusCode::ACCEPTED;
    }
    if let ([verdict], [SyncOutcome::Ended(known) | SyncOutcome::Running(known)]) =
        (verdicts, worked)
        && ack != Ack::Empty
    {
        let mut body = Vec::with_capacity(112);
        push_decision(&mut body, AckDecision::of(verdict), verdict.id());
        push_known(&mut body, known);
        body.push(b'}');
        *answer.body_mut() = Full::new(Bytes::from(body));
    }
    answer
}

/// The answer to a handshake.
pub(crate) fn handshake(
    reply: HandshakeReply,
    request_id: RequestId,
    after: ConnectionReuse,
) -> IngressResponse {
    let status = StatusCode::from_u16(reply.status).unwrap_or(StatusCode::OK);
    let mut answer = answer(status, request_id, reply.body);
    let headers = answer.headers_mut();
    for (name, value) in reply.headers {
        if let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::try_from(value)) {
            headers.insert(name, value);
        }
    }
    if status.is_success() {
        headers.insert(DECISION, HeaderValue::from_static("handshake"));
    }
    if after == ConnectionReuse::Close {
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
    }
    answer
}

/// The response of the health check: the process is running, and no more.
pub(crate) fn healthy(request_id: RequestId) -> IngressResponse {
    answer(StatusCode::OK, request_id, Bytes::new())
}

pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("hapax-request-id");
const DECISION: HeaderName = HeaderName::from_static("hapax-decision");

fn answer(status: StatusCode, request_id: RequestId, body: Bytes) -> IngressResponse {
    let mut answer = Response::new(Full::new(body));
    *answer.status_mut() = status;
    answer.headers_mut().reserve(4);
    answer.headers_mut().insert(REQUEST_ID, request_id.header());
    answer
}

/// The word for a [`Verdict`] in the response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AckDecision {
    Accepted,
    Duplicate,
    Review,
}

impl AckDecision {
    fn of(verdict: &Verdict) -> Self {
        match verdict {
            Verdict::Accepted(_) => Self::Accepted,
            Verdict::Duplicate(_) | Verdict::Conflict(_) => Self::Duplicate,
            Verdict::Review(_) => Self::Review,
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Accepted => Decision::Accepted.as_str(),
            Self::Duplicate => Decision::Duplicate.as_str(),
            Self::Review => Decision::Review.as_str(),
        }
    }
}

/// `duplicate` only if every event is one; `review` if every new event waits for review.
fn overall(verdicts: &[Verdict]) -> AckDecision {
    let mut overall = AckDecision::Duplicate;
    for verdict in verdicts {
        match AckDecision::of(verdict) {
            AckDecision::Accepted => return AckDecision::Accepted,
            AckDecision::Review => overall = AckDecision::Review,
            AckDecision::Duplicate => {}
        }
    }
    overall
}

fn one_body(verdict: &Verdict) -> Vec<u8> {
    let mut body = Vec::with_capacity(112);
    push_decision(&mut body, AckDecision::of(verdict), verdict.id());
    match verdict {
        Verdict::Accepted(_) | Verdict::Review(_) => {}
        Verdict::Duplicate(known) | Verdict::Conflict(known) => push_known(&mut body, known),
    }
    body.push(b'}');
    body
}

fn items_body(overall: AckDecision, verdicts: &[Verdict]) -> Vec<u8> {
    let mut body = Vec::with_capacity(48 + 80 * verdicts.len());
    body.extend_from_slice(b"{\"decision\":\"");
    body.extend_from_slice(overall.as_str().as_bytes());
    body.extend_from_slice(b"\",\"items\":[");
    for (at, verdict) in verdicts.iter().enumerate() {
        if at > 0 {
            body.push(b',');
        }
        push_decision(&mut body, AckDecision::of(verdict), verdict.id());
        body.push(b'}');
    }
    body.extend_from_slice(b"]}");
    body
}

/// Writes an object and leaves it open for further fields.
fn push_decision(body: &mut Vec<u8>, decision: AckDecision, id: EventId) {
    let mut text = [0; Hyphenated::LENGTH];
    body.extend_from_slice(b"{\"decision\":\"");
    body.extend_from_slice(decision.as_str().as_bytes());
    body.extend_from_slice(b"\",\"id\":\"");
    body.extend_from_slice(id.0.hyphenated().encode_lower(&mut text).as_bytes());
    body.push(b'"');
}

fn push_known(body: &mut Vec<u8>, known: &KnownEvent) {
    body.extend_from_slice(b",\"status\":\"");
    body.extend_from_slice(known.status.as_str().as_bytes());
    body.extend_from_slice(b"\",\"result\":");
    serde_json::to_writer(&mut *body, &known.result.as_deref())
        .expect("a string is JSON, and a Vec takes it");
}

#[cfg(test)]
mod tests {
    use hapax_core::store::Status;
    use http_body_util::BodyExt;
    use serde_json::{Value, json};

    use super::*;

    fn id(last: u8) -> EventId {
        EventId(Uuid::from_bytes([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]))
    }

    fn known(last: u8, result: Option<&str>) -> KnownEvent {
        KnownEvent { id: id(last), status: Status::Ignored, result: result.map(Into::into) }
    }

    #[track_caller]
    fn check(verdicts: &[Verdict], ack: Ack, status: u16, decision: &str, body: Option<Value>) {
        let answer = decided(verdicts, ack, RequestId { uuid: Uuid::nil() });
        assert_eq!(answer.status(), status);
        assert_eq!(answer.headers()["hapax-decision"], decision);
        assert_eq!(answer.headers()["hapax-request-id"], Uuid::nil().to_string());
        let mut collected = std::pin::pin!(answer.into_body().collect());
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        let std::task::Poll::Ready(Ok(got)) = collected.as_mut().poll(&mut cx) else {
            panic!("the body is there at once");
        };
        let got = got.to_bytes();
        assert_eq!(body, (!got.is_empty()).then(|| serde_json::from_slice(&got).unwrap()));
    }

    #[test]
    fn one_event_is_answered_with_its_decision() {
        let accepted = json!({ "decision": "accepted", "id": id(1).to_string() });
        check(&[Verdict::Accepted(id(1))], Ack::Plain, 200, "accepted", Some(accepted));
        let review = json!({ "decision": "review", "id": id(1).to_string() });
        check(&[Verdict::Review(id(1))], Ack::Plain, 202, "review", Some(review.clone()));
        check(&[Verdict::Review(id(1))], Ack::Only200, 200, "review", Some(review));
        check(&[Verdict::Review(id(1))], Ack::Empty, 200, "review", None);
        check(&[Verdict::Accepted(id(1))], Ack::Empty, 200, "accepted", None);
    }

    #[test]
    fn a_conflict_reads_like_a_duplicate() {
        let answer = json!({ "decision": "duplicate", "id": id(1).to_string(), "status": "ignored", "result": "fee \"4\"" });
        let known = known(1, Some("fee \"4\""));
        check(
            &[Verdict::Duplicate(known.clone())],
            Ack::Plain,
            200,
            "duplicate",
            Some(answer.clone()),
        );
        check(&[Verdict::Conflict(known)], Ack::Plain, 200, "duplicate", Some(answer));
    }

    #[test]
    fn several_events_are_a_duplicate_only_if_every_one_is() {
        let item =
            |decision: &str, last| json!({ "decision": decision, "id": id(last).to_string() });
        let answer = |decision: &str, items: Vec<Value>| {
            Some(json!({ "decision": decision, "items": items }))
        };
        let duplicate = |last| Verdict::Duplicate(known(last, None));
        check(
            &[duplicate(1), Verdict::Accepted(id(2)), Verdict::Review(id(3))],
            Ack::Plain,
            200,
            "accepted",
            answer("accepted", vec![item("duplicate", 1), item("accepted", 2), item("review", 3)]),
        );
        check(
            &[duplicate(1), duplicate(2)],
            Ack::Plain,
            200,
            "duplicate",
            answer("duplicate", vec![item("duplicate", 1), item("duplicate", 2)]),
        );
        check(
            &[duplicate(1), Verdict::Review(id(2))],
            Ack::Plain,
            202,
            "review",
            answer("review", vec![item("duplicate", 1), item("review", 2)]),
        );
    }

    #[test]
    fn every_401_reads_the_same() {
        let text = |reason| {
            let answer =
                refused(reason, RequestId { uuid: Uuid::nil() }, None, ConnectionReuse::KeepAlive);
            assert_eq!(answer.status(), 401);
            format!("{answer:?}")
        };
        for reason in [Reason::Missing, Reason::Stale, Reason::StaleUnseen, Reason::Future] {
            assert_eq!(text(reason), text(Reason::Signature));
        }
    }

    #[test]
    fn each_reason_is_at_its_index_in_the_list() {
        for (at, reason) in Reason::ALL.into_iter().enumerate() {
            assert_eq!(reason as usize, at);
        }
    }
}
