//! Parses the timestamps of senders, strictly: a timestamp has one spelling, and nothing is rounded,
//! wrapped or guessed.

use jiff::Timestamp;

use super::recipe::TimeForm;

/// Parses a timestamp. `None` for a sign, a space, a leading zero, or a value out of range.
pub(super) fn parse(form: TimeForm, text: &str) -> Option<Timestamp> {
    match form {
        TimeForm::Seconds => Timestamp::from_second(digits(text)?).ok(),
        TimeForm::Millis => Timestamp::from_millisecond(digits(text)?).ok(),
        TimeForm::Rfc3339 => rfc3339(text),
        TimeForm::Any => match digits(text) {
            Some(number) if number < MILLIS_FROM => Timestamp::from_second(number).ok(),
            Some(number) => Timestamp::from_millisecond(number).ok(),
            None => rfc3339(text),
        },
    }
}

/// Formats a timestamp as the sender would.
pub(super) fn format(form: TimeForm, at: Timestamp) -> String {
    match form {
        TimeForm::Seconds | TimeForm::Any => at.as_second().to_string(),
        TimeForm::Millis => at.as_millisecond().to_string(),
        TimeForm::Rfc3339 => at.to_string(),
    }
}

/// As seconds this is the year 5138, as milliseconds 1973. So no timestamp of a real event is ambiguous.
const MILLIS_FROM: i64 = 100_000_000_000;

fn digits(text: &str) -> Option<i64> {
    let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let canonical = text == "0" || !text.starts_with('0');
    if plain && canonical { text.parse().ok() } else { None }
}

/// The profile of RFC 3339 that senders use. The timestamp parser accepts more.
fn rfc3339(text: &str) -> Option<Timestamp> {
    let bytes = text.as_bytes();
    let plain = bytes.iter().all(|byte| byte.is_ascii_digit() || b"-:.+TZ".contains(byte));
    if !plain || bytes.len() < 20 || bytes[10] != b'T' {
        return None;
    }
    text.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_timestamps_are_read() {
        fn check(form: TimeForm, text: &str, expected: Option<i64>) {
            assert_eq!(parse(form, text).map(|at| at.as_millisecond()), expected, "{text:?}");
        }
        check(TimeForm::Seconds, "1767225607", Some(1_767_225_607_000));
        check(TimeForm::Seconds, "0", Some(0));
        for bad in [
            "",
            " ",
            "-1",
            "+1",
            "1 ",
            " 1",
            "01",
            "1.0",
            "1e3",
            "0x1",
            "１",
            "1_000",
            "99999999999999999999",
            "9223372036854775807",
            "1767225607000",
            "NaN",
        ] {
            check(TimeForm::Seconds, bad, None);
        }
        check(TimeForm::Millis, "1767225607000", Some(1_767_225_607_000));
        check(TimeForm::Millis, "9223372036854775807", None);
        check(TimeForm::Rfc3339, "2026-01-01T00:00:07Z", Some(1_767_225_607_000));
        check(TimeForm::Rfc3339, "2026-01-01T00:00:07-00:00", Some(1_767_225_607_000));
        check(TimeForm::Rfc3339, "2026-01-01T01:00:07.123456789+01:00", Some(1_767_225_607_123));
        for bad in [
            "2026-01-01",
            "2026-01-01 00:00:07Z",
            "2026-01-01T00:00:07",
            "1767225607",
            "2026-13-01T00:00:07Z",
            "2026-01-01T00:00:07Z[UTC]",
            "2026-01-01t00:00:07z",
        ] {
            check(TimeForm::Rfc3339, bad, None);
        }
        check(TimeForm::Any, "1767225607", Some(1_767_225_607_000));
        check(TimeForm::Any, "1767225607000", Some(1_767_225_607_000));
        check(TimeForm::Any, "2026-01-01T00:00:07Z", Some(1_767_225_607_000));
    }
}
