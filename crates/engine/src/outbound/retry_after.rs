//! The answer header Retry-After: how long a server asks not to be called.

use std::time::Duration;

use hapax_core::Timestamp;
use http::HeaderValue;

use crate::limits::RETRY_AFTER_MAX;

/// The wait that `value` asks for, at most a day: whole seconds, or an HTTP date. A date in the past asks
/// for no wait. Anything else is ignored.
pub(crate) fn retry_after(value: &HeaderValue, now: Timestamp) -> Option<Duration> {
    let text = value.to_str().ok()?.trim();
    let wait = match text.bytes().all(|byte| byte.is_ascii_digit()) {
        // A number that is too large for the type means a long wait, and is not ignored.
        true if !text.is_empty() => Duration::from_secs(text.parse().unwrap_or(u64::MAX)),
        true | false => Duration::try_from(date(text)?.duration_since(now)).unwrap_or_default(),
    };
    Some(wait.min(RETRY_AFTER_MAX))
}

/// A date in one of the three forms of RFC 9110, or in the form of email (RFC 2822), which some
/// servers send.
fn date(text: &str) -> Option<Timestamp> {
    let mail = || jiff::fmt::rfc2822::DateTimeParser::new().parse_timestamp(text).ok();
    let http = httpdate::parse_http_date(text).ok();
    // The last HTTP date is a day later than the last timestamp.
    http.map(|date| Timestamp::try_from(date).unwrap_or(Timestamp::MAX)).or_else(mail)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2026-11-17 20:00:00 UTC.
    const NOW: i64 = 1_794_945_600;

    #[track_caller]
    fn check(value: &[u8], seconds: Option<u64>) {
        let now = Timestamp::from_second(NOW).unwrap();
        let value = HeaderValue::from_bytes(value).unwrap();
        assert_eq!(retry_after(&value, now), seconds.map(Duration::from_secs), "{value:?}");
    }

    /// Tries to panic the parser, or to delay a delivery for ever, with values that real servers have sent.
    #[test]
    fn any_retry_after_is_at_most_a_day_or_ignored() {
        check(b"0", Some(0));
        check(b"120", Some(120));
        check(b" 7 ", Some(7));
        check(b"86401", Some(86_400));
        check(b"18446744073709551616", Some(86_400));
        check("9".repeat(4_000).as_bytes(), Some(86_400));
        check(b"Tue, 17 Nov 2026 20:01:00 GMT", Some(60));
        check(b"Tuesday, 17-Nov-26 20:01:00 GMT", Some(60));
        check(b"Tue Nov 17 20:01:00 2026", Some(60));
        check(b"Tue, 17 Nov 2026 20:01:00 +0000", Some(60));
        check(b"Tue, 17 Nov 2026 19:00:00 GMT", Some(0));
        check(b"Fri, 31 Dec 9999 23:59:59 GMT", Some(86_400));
        for nonsense in [
            "",
            " ",
            "1e300",
            "inf",
            "NaN",
            "-1",
            "+5",
            "1.5",
            "0x10",
            "5 s",
            "soon",
            "5,6",
            "Tue, 99 Nov 2026 20:01:00 GMT",
        ] {
            check(nonsense.as_bytes(), None);
        }
        check(b"\xc3\xa9", None);
    }
}
