//! Turns the answer of an endpoint into the verdict on its delivery. Only 2xx is success.

use hapax_core::Timestamp;
use hapax_core::job::Retry;
use hapax_core::store::{AttemptVerdict, EndpointSignal, HandlerAnswer};
use http::StatusCode;

use crate::outbound::{EndpointAnswer, SendError, SendErrorClass, WebhookDelivery};

/// The verdict on an answer.
pub(super) fn of_answer(answered: &EndpointAnswer, now: Timestamp) -> AttemptVerdict {
    let status = answered.status;
    let answer = HandlerAnswer { status: status.as_u16(), body: text(&answered.body_start) };
    if status.is_success() {
        return match answered.webhook_delivery {
            Some(WebhookDelivery::Disable) => {
                AttemptVerdict::DeliveredLast { answer, reason: reason(answered) }
            }
            // The endpoint has the message: no further attempt is to be prevented.
            Some(WebhookDelivery::AbortMessage) | None => AttemptVerdict::Delivered(answer),
        };
    }
    let wait = answered.retry_after(now);
    let (retry, says) = match answered.webhook_delivery {
        Some(WebhookDelivery::AbortMessage) => (Retry::Never, EndpointSignal::Works),
        Some(WebhookDelivery::Disable) => (Retry::Schedule, EndpointSignal::Disable),
        None => match (status, wait) {
            (StatusCode::GONE, _) => (Retry::Schedule, EndpointSignal::Disable),
            (StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE, Some(wait)) => {
                (Retry::NotBefore(wait), EndpointSignal::Pauses(wait))
            }
            (_, Some(wait)) => (Retry::NotBefore(wait), EndpointSignal::Fails),
            (_, None) => (Retry::Schedule, EndpointSignal::Fails),
        },
    };
    AttemptVerdict::Failed { error: reason(answered), answer: Some(answer), retry, says }
}

/// The verdict if there was no answer.
pub(super) fn of_error(error: &SendError) -> AttemptVerdict {
    let (retry, says) = match error.class {
        SendErrorClass::Unsent => (Retry::Unsent, EndpointSignal::Nothing),
        SendErrorClass::Dns
        | SendErrorClass::Blocked
        | SendErrorClass::Refused
        | SendErrorClass::Connect
        | SendErrorClass::Tls
        | SendErrorClass::Timeout
        | SendErrorClass::Broken => (Retry::Schedule, EndpointSignal::Fails),
    };
    AttemptVerdict::Failed { error: error.text.clone(), answer: None, retry, says }
}

/// The verdict if this process could not make the request: it says nothing about the endpoint.
pub(super) fn of_unsendable(reason: String) -> AttemptVerdict {
    let (retry, says) = (Retry::Unsent, EndpointSignal::Nothing);
    AttemptVerdict::Failed { error: reason, answer: None, retry, says }
}

fn reason(answered: &EndpointAnswer) -> String {
    let status = answered.status;
    match (answered.webhook_delivery, status) {
        (Some(WebhookDelivery::AbortMessage), _) => {
            format!("the endpoint answered {status} and asked not to get this message again")
        }
        (Some(WebhookDelivery::Disable), _) => {
            format!("the endpoint answered {status} and asked not to be called again")
        }
        (_, status) if status.is_redirection() => {
            format!("the endpoint answered {status}: redirects are not followed")
        }
        (_, StatusCode::GONE) => format!("the endpoint answered {status}: it is gone"),
        (_, status) => format!("the endpoint answered {status}"),
    }
}

/// The beginning of an answer as text. Bytes that are not text, and NUL, which not every database can
/// store, are replaced.
fn text(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) if !bytes.contains(&0) => text.to_owned(),
        _some_replaced => String::from_utf8_lossy(bytes).replace('\0', "\u{fffd}"),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::Bytes;
    use http::HeaderValue;

    use super::*;

    fn answered(status: u16) -> EndpointAnswer {
        EndpointAnswer {
            status: StatusCode::from_u16(status).unwrap(),
            retry_after_header: None,
            webhook_delivery: None,
            body_start: Bytes::from_static(b"\0sorry\xff"),
            truncated: false,
            took: Duration::ZERO,
        }
    }

    fn retry(answered: &EndpointAnswer) -> Option<Retry> {
        match of_answer(answered, Timestamp::UNIX_EPOCH) {
            AttemptVerdict::Failed { retry, .. } => Some(retry),
            AttemptVerdict::Delivered(_)
            | AttemptVerdict::DeliveredLast { .. }
            | AttemptVerdict::GivenBack => None,
        }
    }

    #[test]
    fn only_2xx_is_success() {
        for status in [200, 201, 202, 204, 299] {
            assert_eq!(retry(&answered(status)), None, "{status}");
        }
        for status in [300, 301, 302, 304, 307, 308, 400, 401, 404, 410, 418, 429, 500, 503, 599] {
            assert_eq!(retry(&answered(status)), Some(Retry::Schedule), "{status}");
        }
    }

    // Odd values of Retry-After must neither panic nor delay a delivery for ever.
    #[test]
    fn retry_after_delays_within_a_day_and_nonsense_is_ignored() {
        let day = Duration::from_secs(86_400);
        let check = |value: &'static str, expected: Retry| {
            let asked = EndpointAnswer {
                retry_after_header: Some(HeaderValue::from_static(value)),
                ..answered(429)
            };
            assert_eq!(retry(&asked), Some(expected), "{value}");
        };
        check("7", Retry::NotBefore(Duration::from_secs(7)));
        check("99999999999999999999", Retry::NotBefore(day));
        check("100000000", Retry::NotBefore(day));
        check("Thu, 01 Jan 1970 00:02:00 GMT", Retry::NotBefore(Duration::from_secs(120)));
        check("1e300", Retry::Schedule);
        check("inf", Retry::Schedule);
        check("-5", Retry::Schedule);
        check("", Retry::Schedule);
    }

    #[test]
    fn an_answer_says_what_it_means_for_the_endpoint() {
        let check = |answered: EndpointAnswer, retry: Retry, says: EndpointSignal| match of_answer(
            &answered,
            Timestamp::UNIX_EPOCH,
        ) {
            AttemptVerdict::Failed { retry: got, says: said, .. } => {
                assert_eq!((got, said), (retry, says), "{answered:?}");
            }
            other => panic!("{answered:?}: {other:?}"),
        };
        let asking =
            |status, asks| EndpointAnswer { webhook_delivery: Some(asks), ..answered(status) };
        let waiting = |status| {
            let retry_after_header = Some(HeaderValue::from_static("7"));
            EndpointAnswer { retry_after_header, ..answered(status) }
        };
        let wait = Duration::from_secs(7);
        check(asking(422, WebhookDelivery::AbortMessage), Retry::Never, EndpointSignal::Works);
        check(asking(500, WebhookDelivery::Disable), Retry::Schedule, EndpointSignal::Disable);
        check(answered(410), Retry::Schedule, EndpointSignal::Disable);
        check(waiting(429), Retry::NotBefore(wait), EndpointSignal::Pauses(wait));
        check(waiting(503), Retry::NotBefore(wait), EndpointSignal::Pauses(wait));
        check(waiting(500), Retry::NotBefore(wait), EndpointSignal::Fails);
        check(answered(429), Retry::Schedule, EndpointSignal::Fails);
    }

    #[test]
    fn an_endpoint_that_takes_a_delivery_can_ask_not_to_get_another() {
        for status in [200, 202, 204] {
            let of = |asks| {
                let answered = EndpointAnswer { webhook_delivery: asks, ..answered(status) };
                of_answer(&answered, Timestamp::UNIX_EPOCH)
            };
            let delivered = of(None);
            let AttemptVerdict::Delivered(answer) = &delivered else { panic!("{delivered:?}") };
            assert_eq!(of(Some(WebhookDelivery::AbortMessage)), delivered);
            let status = StatusCode::from_u16(status).unwrap();
            let reason = format!("the endpoint answered {status} and asked not to be called again");
            let last = AttemptVerdict::DeliveredLast { answer: answer.clone(), reason };
            assert_eq!(of(Some(WebhookDelivery::Disable)), last);
        }
    }

    #[test]
    fn an_answer_that_is_no_text_is_kept_as_far_as_it_is() {
        let AttemptVerdict::Failed { answer, error, .. } =
            of_answer(&answered(500), Timestamp::UNIX_EPOCH)
        else {
            panic!("a 500 is no success")
        };
        assert_eq!(answer.unwrap().body, "\u{fffd}sorry\u{fffd}");
        assert_eq!(error, "the endpoint answered 500 Internal Server Error");
    }
}
