//! Fetches the current object from its source of truth before the work, because an event is only a
//! hint. A failed fetch is a failed attempt; the store decides whether and when it is repeated.

use std::fmt::Write as _;
use std::sync::Arc;

use bytes::Bytes;
use hapax_core::Timestamp;
use hapax_core::handler::Refetch;
use hapax_core::job::Retry;
use hapax_core::store::{Claim, Outcome};
use http::header::ACCEPT;
use http::{HeaderMap, HeaderValue, Method, Request};
use http_body_util::Full;
use serde::de::IgnoredAny;

use crate::limits::CURRENT_HEADER_BYTES_MAX;
use crate::outbound::{BufferedAnswer, Outbound};
use crate::worker::http_handler::{failed, status_error_text, when_again, when_unanswered};

/// How a handler's objects are fetched.
#[derive(Debug)]
pub(crate) struct Refetcher {
    refetch: Refetch,
    outbound: Outbound,
}

impl Refetcher {
    pub(crate) fn new(refetch: Refetch, outbound: Outbound) -> Self {
        Self { refetch, outbound }
    }

    /// Fetches the object that the claimed event is about; the error is the attempt's outcome.
    pub(crate) async fn fetch(&self, claim: &Claim, now: Timestamp) -> Result<Arc<str>, Outcome> {
        let no = |why: String, retry| failed(format!("refetch: {why}"), retry);
        let request = self.request(claim).map_err(|why| no(why, Retry::Schedule))?;
        let Refetch { timeout, body_bytes_max, .. } = self.refetch;
        let heard = self
            .outbound
            .send_reading(request, timeout, body_bytes_max)
            .await
            .map_err(|error| no(error.to_string(), when_unanswered(&error)))?;
        if !heard.status.is_success() {
            return Err(no(status_error_text(heard.status), when_again(&heard, now)));
        }
        understood(&heard, body_bytes_max).map_err(|why| no(why, Retry::Schedule))
    }

    fn request(&self, claim: &Claim) -> Result<Request<Full<Bytes>>, String> {
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
        for (name, secret) in &self.refetch.headers {
            let mut value = HeaderValue::from_str(secret.expose())
                .map_err(|_| format!("the value of {name} does not fit in a header"))?;
            value.set_sensitive(true);
            headers.insert(name, value);
        }
        let mut request = Request::new(Full::default());
        *request.method_mut() = Method::GET;
        *request.uri_mut() = self.refetch.url.of(&claim.event)?;
        *request.headers_mut() = headers;
        Ok(request)
    }
}

fn understood(heard: &BufferedAnswer, bytes_max: usize) -> Result<Arc<str>, String> {
    if heard.cut {
        return Err(format!("the object is larger than {bytes_max} bytes"));
    }
    let text = std::str::from_utf8(&heard.body).map_err(|_| "the object is not UTF-8")?;
    match serde_json::from_str::<IgnoredAny>(text) {
        Ok(_) => Ok(text.into()),
        // The error names the position, never the content.
        Err(error) => {
            let (line, column) = (error.line(), error.column());
            Err(format!("the object is not JSON: line {line}, column {column}"))
        }
    }
}

/// A JSON text in one line of ASCII for a header: without blanks between its tokens, and with
/// `\uXXXX` for all other characters. Numbers and strings keep their meaning to the last digit.
pub(crate) fn in_a_header(json: &str) -> Result<String, String> {
    let mut line = String::with_capacity(json.len().min(CURRENT_HEADER_BYTES_MAX + 16));
    let (mut in_string, mut escaped) = (false, false);
    for letter in json.chars() {
        match letter {
            ' ' | '\t' | '\n' | '\r' if !in_string => {}
            ' '..='~' => line.push(letter),
            other => {
                for unit in other.encode_utf16(&mut [0; 2]) {
                    write!(line, "\\u{unit:04x}").expect("writing to a String cannot fail");
                }
            }
        }
        in_string ^= letter == '"' && !escaped;
        escaped = in_string && letter == '\\' && !escaped;
        if line.len() > CURRENT_HEADER_BYTES_MAX {
            return Err(format!(
                "the current object is larger than {CURRENT_HEADER_BYTES_MAX} bytes, the limit for \
                 a header: use sql or pull, or a URL that answers with less"
            ));
        }
    }
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_goes_into_a_header_without_losing_its_meaning() {
        // Quotes behind backslashes, blanks inside strings, numbers beyond a float, emoji, DEL.
        let check = |json: &str, line: &str| {
            assert_eq!(in_a_header(json).as_deref(), Ok(line));
            assert!(HeaderValue::from_str(line).is_ok(), "{line}");
            let parse = |text| serde_json::from_str::<serde_json::Value>(text).unwrap();
            assert_eq!(parse(json), parse(line));
        };
        check("{\n  \"a\" : [ 1,\t2 ]\r\n}", r#"{"a":[1,2]}"#);
        check(r#"{"a b": "c  d"}"#, r#"{"a b":"c  d"}"#);
        check(r#"{"q": "\" x", "b": "\\" , "c": 1 }"#, r#"{"q":"\" x","b":"\\","c":1}"#);
        check(
            r#"{"n": 12345678901234567890123, "f": 1.10}"#,
            r#"{"n":12345678901234567890123,"f":1.10}"#,
        );
        check("\"ä😀\u{7f}\"", r#""\u00e4\ud83d\ude00\u007f""#);
    }

    #[test]
    fn an_object_that_is_too_large_for_a_header_is_refused_at_the_byte() {
        let of = |length: usize| format!("\"{}\"", "x".repeat(length - 2));
        assert!(in_a_header(&of(CURRENT_HEADER_BYTES_MAX)).is_ok());
        let error = in_a_header(&of(CURRENT_HEADER_BYTES_MAX + 1)).unwrap_err();
        assert!(error.contains("larger than 8192 bytes"), "{error}");
        // The limit counts the bytes that are sent: six for each of these characters.
        assert!(in_a_header(&format!("\"{}\"", "ä".repeat(2_000))).is_err());
    }
}
