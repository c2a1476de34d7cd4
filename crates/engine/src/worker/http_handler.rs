//! The user's app behind an `http` handler: the request it gets for a job, and the meaning of its
//! answer.
//!
//! The app gets the event as the sender sent it, byte for byte, with a new signature. The sender's own
//! signature may be past its window when the job runs, or be for another URL.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::envelope::Origin;
use hapax_core::failpoint;
use hapax_core::handler::{Handler, HttpTarget, SignAs};
use hapax_core::hop_headers::{dashed, drop_lookalikes, is_hop_by_hop, is_ours};
use hapax_core::job::Retry;
use hapax_core::limits::ERROR_CHARS_MAX;
use hapax_core::scheme::Scheme;
use hapax_core::store::{Claim, ClaimedEvent, HandlerAnswer, NewMessage, Outcome};
use hapax_core::{Arrival, Source, SourceName, Tenant, Timestamp};
use http::header::RETRY_AFTER;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode};
use http_body_util::Full;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::limits::{ANSWER_BYTES_MAX, ANSWER_KEPT_BYTES};
use crate::outbound::{BufferedAnswer, Outbound, OutboundError, retry_after};
use crate::worker::{SharedTenantVerifiers, refetch};

/// The app of one handler.
#[derive(Debug)]
pub(crate) struct App {
    target: HttpTarget,
    timeout: Duration,
    /// The handler's source, as configured for each tenant.
    sources: Vec<Arc<Source>>,
    /// The sources of tenants that were added at run time.
    tenants: SharedTenantVerifiers,
    outbound: Outbound,
}

impl App {
    /// `sources` is the handler's source, as configured for each tenant.
    pub(crate) fn new(
        handler: &Handler,
        target: &HttpTarget,
        sources: Vec<Arc<Source>>,
        tenants: SharedTenantVerifiers,
        outbound: Outbound,
    ) -> Self {
        Self { target: target.clone(), timeout: handler.timeout, sources, tenants, outbound }
    }

    /// Runs one attempt. `current` is the current object, if it was fetched.
    pub(crate) async fn call(
        &self,
        claim: &Claim,
        current: Option<&str>,
        now: Timestamp,
    ) -> Outcome {
        let request = match self.request(claim, current, now) {
            Ok(request) => request,
            Err(error) => return failed(error, Retry::Schedule),
        };
        failpoint!("http.before_send");
        let answer = self.outbound.send(request, self.timeout).await;
        failpoint!("http.after_answer");
        match answer {
            Ok(heard) => with_answer(understood(&heard, now), &heard),
            Err(error) => failed(error.to_string(), when_unanswered(&error)),
        }
    }

    fn request(
        &self,
        claim: &Claim,
        current: Option<&str>,
        now: Timestamp,
    ) -> Result<Request<Full<Bytes>>, String> {
        let event = &claim.event;
        let draft = Arrival {
            method: Method::POST,
            url: self.target.url.to_string(),
            headers: sender_headers(&event.headers),
            body: event.body.clone(),
        };
        let mut signed = self.sign(draft, event, now)?;
        let headers = &mut signed.headers;
        let mut set = |name: &'static str, value: String| {
            let value = HeaderValue::try_from(value)
                .map_err(|_| format!("the value of {name} does not fit in a header"))?;
            headers.insert(HeaderName::from_static(name), value);
            Ok::<(), String>(())
        };
        set("hapax-job", claim.job.to_string())?;
        set("hapax-fence", claim.fence.0.to_string())?;
        set("hapax-attempt", claim.attempt.to_string())?;
        set("idempotency-key", claim.idempotency_key.clone())?;
        if let Some(current) = current {
            set("hapax-current", refetch::in_a_header(current)?)?;
        }
        let mut request = Request::new(Full::new(signed.body));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = signed.url.parse().map_err(|_| "the signed URL is invalid")?;
        *request.headers_mut() = signed.headers;
        Ok(request)
    }

    fn sign(
        &self,
        mut draft: Arrival,
        event: &ClaimedEvent,
        now: Timestamp,
    ) -> Result<Arrival, String> {
        let cannot = |error| format!("signing the request: {error}");
        let ours = HeaderValue::try_from(event.id.to_string())
            .map_err(|_| "the event's id does not fit in a header")?;
        match self.target.sign_as {
            SignAs::Standard => {
                let Some(signer) = &self.target.signer else {
                    draft.headers.insert(WEBHOOK_ID, ours);
                    return Ok(draft);
                };
                let scheme = signer.scheme();
                for old in WEBHOOK_PROOF {
                    draft.headers.remove(old);
                }
                draft.headers.insert(WEBHOOK_ID, ours);
                let signed = scheme.sign(&draft, None, now).map_err(cannot)?;
                signed.apply(&draft).map_err(cannot)
            }
            SignAs::Provider => {
                let source = self.source_of(&event.key.source, &event.key.tenant);
                let source = source.ok_or("the source of this event is no longer configured")?;
                let scheme = self.target.signer.as_deref().unwrap_or(&source).scheme();
                draft.headers = without_proof(scheme, &draft, now);
                let id = source.first_part(&event.key.event_id);
                let signed = scheme.sign(&draft, Some(id), now).map_err(cannot)?;
                let mut request = signed.apply(&draft).map_err(cannot)?;
                // If the sender's scheme signs `webhook-id`, the sender's own id stays there.
                if !scheme.signs(Origin::Header(WEBHOOK_ID.as_str())) {
                    request.headers.insert(WEBHOOK_ID, ours);
                }
                Ok(request)
            }
        }
    }
}

impl App {
    /// The source of the event's tenant. If the tenant is a field of the body, one source serves all tenants.
    fn source_of(&self, source: &SourceName, tenant: &Tenant) -> Option<Arc<Source>> {
        let configured = |tenant: &Tenant| self.sources.iter().find(|it| it.tenant() == tenant);
        if let Some(found) = configured(tenant) {
            return Some(Arc::clone(found));
        }
        let added = self.tenants.load().get(&(source.clone(), tenant.clone())).cloned();
        added.or_else(|| configured(&Tenant::default()).cloned())
    }
}

const WEBHOOK_ID: HeaderName = HeaderName::from_static("webhook-id");
const WEBHOOK_PROOF: [&str; 2] = ["webhook-timestamp", "webhook-signature"];

/// The headers without the signature and the signed time, which are created again. Other signed
/// headers, such as the sender's id, stay unchanged.
fn without_proof(scheme: &Scheme, draft: &Arrival, now: Timestamp) -> HeaderMap {
    const PROBE: &str = "probe";
    let mut rest = draft.headers.clone();
    for name in draft.headers.keys() {
        let mut without = draft.headers.clone();
        without.remove(name);
        let is_needed = |found: &str| name.as_str().eq_ignore_ascii_case(found);
        if !scheme.missing(&without).is_some_and(is_needed) {
            continue;
        }
        let probe = Arrival { headers: without, body: Bytes::new(), ..draft.clone() };
        let takes_id = scheme.sign(&probe, Some(PROBE), now).is_ok_and(|signed| {
            signed.headers.iter().any(|(found, value)| is_needed(found) && value == PROBE)
        });
        if !takes_id {
            rest.remove(name);
        }
    }
    rest
}

/// The stored headers of the sender, without those that belonged to its connection.
fn sender_headers(lines: &str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in lines.lines().filter_map(|line| line.split_once(": ")) {
        let (Ok(name), Ok(value)) =
            (HeaderName::try_from(name), HeaderValue::from_bytes(value.as_bytes()))
        else {
            continue;
        };
        if !is_the_senders_own(&name) {
            headers.append(name, value);
        }
    }
    // An app that reads `_` as `-` would read `idempotency_key` in addition to, or instead of, the
    // real header.
    drop_lookalikes(&mut headers, |_| false);
    headers
}

/// Whether a header was about the sender's request to Hapax, not about the event. For example, the
/// encodings that the sender accepts are not those that Hapax accepts.
fn is_the_senders_own(name: &HeaderName) -> bool {
    let of_its_request = ["accept-encoding", "content-length", "expect", "host", "http2-settings"];
    // No sender may send headers of Hapax: an app would use its `hapax-current` as the fetched
    // object.
    is_hop_by_hop(&dashed(name)) || of_its_request.contains(&&*dashed(name)) || is_ours(name)
}

/// The fields of an answer; any other answer has no meaning.
#[derive(Debug, Deserialize)]
struct AppAnswer {
    #[serde(default)]
    result: serde_json::Value,
    #[serde(default)]
    publish: Option<Box<RawValue>>,
}

/// Adds the app's answer to the outcome.
fn with_answer(mut outcome: Outcome, heard: &BufferedAnswer) -> Outcome {
    let (Outcome::Done { answer, .. } | Outcome::Failed { answer, .. }) = &mut outcome;
    *answer = Some(HandlerAnswer { status: heard.status.as_u16(), body: beginning(&heard.body) });
    outcome
}

/// The first KiB of a body as text. A character that the cut splits is left out, and a NUL is
/// replaced, because no store can hold it.
fn beginning(body: &[u8]) -> String {
    let kept = &body[..body.len().min(ANSWER_KEPT_BYTES)];
    let whole = match std::str::from_utf8(kept) {
        Err(error) if error.error_len().is_none() => &kept[..error.valid_up_to()],
        Ok(_) | Err(_) => kept,
    };
    String::from_utf8_lossy(whole).trim().replace('\0', "\u{fffd}")
}

fn understood(heard: &BufferedAnswer, now: Timestamp) -> Outcome {
    let status = heard.status;
    if status.is_success() {
        return done(heard);
    }
    let No { error, retry } = No::of(heard);
    let error = match error {
        Some(said) => format!("{}: {said}", status_error_text(status)),
        None => status_error_text(status),
    };
    match retry.as_deref() {
        Some("never") => failed(error, Retry::Never),
        Some(_) | None => failed(error, when_again(heard, now)),
    }
}

/// The fields of an error answer: `{"error":"…","retry":"never"}`, or the beginning of any other
/// text.
#[derive(Debug, Default)]
struct No {
    error: Option<String>,
    retry: Option<String>,
}

impl No {
    fn of(heard: &BufferedAnswer) -> Self {
        let is_object = heard.body.trim_ascii_start().starts_with(b"{");
        let said: Self = match is_object && !heard.cut {
            // Fields of other types belong to the app.
            true => serde_json::from_slice::<serde_json::Value>(&heard.body)
                .map(|said| Self {
                    error: said["error"].as_str().map(str::to_owned),
                    retry: said["retry"].as_str().map(str::to_owned),
                })
                .unwrap_or_default(),
            false => Self::default(),
        };
        let plain = || beginning(&heard.body);
        let error = said.error.filter(|error| !error.trim().is_empty()).unwrap_or_else(plain);
        // No store can hold a NUL.
        let error = error.replace('\0', "\u{fffd}");
        let error: String = error.chars().take(ANSWER_KEPT_BYTES).collect();
        Self { error: Some(error).filter(|error| !error.is_empty()), ..said }
    }
}

/// The error text for a status that is not a success.
pub(crate) fn status_error_text(status: StatusCode) -> String {
    match status.is_redirection() {
        true => format!("HTTP {}: redirects are not followed", status.as_u16()),
        false => format!("HTTP {}", status.as_u16()),
    }
}

/// When a failed attempt is repeated: by the schedule, or later if the app asks for a longer wait.
pub(crate) fn when_again(heard: &BufferedAnswer, now: Timestamp) -> Retry {
    let asks_for_time =
        matches!(heard.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
    let wait = heard.headers.get(RETRY_AFTER).filter(|_| asks_for_time);
    match wait.and_then(|value| retry_after(value, now)) {
        Some(wait) => Retry::NotBefore(wait),
        None => Retry::Schedule,
    }
}

/// The next attempt after a request without an answer.
pub(crate) fn when_unanswered(error: &OutboundError) -> Retry {
    match error {
        // An unsent request says nothing about the app.
        OutboundError::Unsent => Retry::Unsent,
        OutboundError::TimedOut(_) | OutboundError::Connect(_) | OutboundError::Broken(_) => {
            Retry::Schedule
        }
    }
}

fn done(heard: &BufferedAnswer) -> Outcome {
    if heard.cut {
        // A truncated answer may contain messages to publish, so it must not count as an answer
        // without any.
        let may_publish = has(&heard.body, b"\"publish\"") || has(&heard.body, b"\"result\"");
        return match may_publish {
            true => failed(
                format!("the answer is longer than {ANSWER_BYTES_MAX} bytes"),
                Retry::Schedule,
            ),
            false => Outcome::Done { result: None, publish: Vec::new(), answer: None },
        };
    }
    // serde would read an array as the two fields in order, but an array has no meaning for Hapax.
    let is_object = heard.body.trim_ascii_start().starts_with(b"{");
    let said = is_object.then(|| serde_json::from_slice(&heard.body));
    let Some(Ok(AppAnswer { result, publish })) = said else {
        return Outcome::Done { result: None, publish: Vec::new(), answer: None };
    };
    let result = result.as_str().map(str::to_owned);
    let Some(publish) = publish else {
        return Outcome::Done { result, publish: Vec::new(), answer: None };
    };
    match serde_json::from_str::<Vec<NewMessage>>(publish.get()) {
        Ok(publish) => match publish.iter().find_map(NewMessage::fault) {
            None => Outcome::Done { result, publish, answer: None },
            Some(fault) => failed(format!("the answer's \"publish\": {fault}"), Retry::Schedule),
        },
        Err(error) => {
            failed(format!("the answer's \"publish\" is malformed: {error}"), Retry::Schedule)
        }
    }
}

fn has(body: &[u8], word: &[u8]) -> bool {
    memchr::memmem::find(body, word).is_some()
}

/// A failed attempt, with a short error.
pub(crate) fn failed(error: impl Into<String>, retry: Retry) -> Outcome {
    let error: String = error.into();
    Outcome::Failed { error: error.chars().take(ERROR_CHARS_MAX).collect(), retry, answer: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_request_that_was_never_sent_uses_no_step() {
        let retry = |error: OutboundError| when_unanswered(&error);
        assert_eq!(retry(OutboundError::Unsent), Retry::Unsent);
        // The app may have seen the request, or is not running: both are verdicts.
        assert_eq!(retry(OutboundError::Connect("connection refused".into())), Retry::Schedule);
        assert_eq!(retry(OutboundError::TimedOut(Duration::from_secs(1))), Retry::Schedule);
        assert_eq!(retry(OutboundError::Broken("reset".into())), Retry::Schedule);
    }
}
