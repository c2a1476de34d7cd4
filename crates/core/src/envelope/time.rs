//! Parses the event times of senders, distinguished by shape and magnitude.

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;

/// Parses unix time (seconds, also with a fraction, milliseconds, microseconds or nanoseconds), RFC 3339
/// or the date of a mail. A date without a zone is UTC, as senders mean it. Any other text is `None`: the
/// time is a hint, and its absence fails nothing.
pub(super) fn read(text: &str) -> Option<Timestamp> {
    if text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') {
        return unix(text);
    }
    let plain = text.strip_suffix(" UTC").unwrap_or(text);
    text.parse()
        .ok()
        .or_else(|| Some(plain.parse::<DateTime>().ok()?.to_zoned(TimeZone::UTC).ok()?.timestamp()))
        .or_else(|| Some(jiff::fmt::rfc2822::parse(text).ok()?.timestamp()))
}

/// The number of digits decides the unit. Seconds have at most 11 digits until the year 5138.
fn unix(text: &str) -> Option<Timestamp> {
    let Some((seconds, fraction)) = text.split_once('.') else {
        let number: i64 = text.parse().ok()?;
        return match text.len() {
            ..=11 => Timestamp::from_second(number),
            12..=14 => Timestamp::from_millisecond(number),
            15..=17 => Timestamp::from_microsecond(number),
            18.. => Timestamp::from_nanosecond(number.into()),
        }
        .ok();
    };
    if fraction.contains('.') {
        return None;
    }
    let nanoseconds = format!("{fraction:0<9.9}").parse().ok()?;
    Timestamp::new(seconds.parse().ok()?, nanoseconds).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_distinguished_by_shape_and_magnitude() {
        let check = |text: &str, expected: Option<&str>| {
            assert_eq!(read(text).map(|time| time.to_string()).as_deref(), expected, "{text}");
        };
        check("1714564800", Some("2024-05-01T12:00:00Z"));
        check("1714564800123", Some("2024-05-01T12:00:00.123Z"));
        check("1714564800123456", Some("2024-05-01T12:00:00.123456Z"));
        check("1714564800123456789", Some("2024-05-01T12:00:00.123456789Z"));
        check("1714564800.5", Some("2024-05-01T12:00:00.5Z"));
        check("1714564800.1234567890123", Some("2024-05-01T12:00:00.123456789Z"));
        check("2024-05-01T12:00:00Z", Some("2024-05-01T12:00:00Z"));
        check("2024-05-01T14:00:00.1234567+02:00", Some("2024-05-01T12:00:00.1234567Z"));
        check("2024-05-01T12:00:00.25", Some("2024-05-01T12:00:00.25Z"));
        check("2024-05-01 12:00:00 UTC", Some("2024-05-01T12:00:00Z"));
        check("Wed, 01 May 2024 12:00:00 +0000", Some("2024-05-01T12:00:00Z"));
        check("0", Some("1970-01-01T00:00:00Z"));
        for unreadable in ["", ".", "1.2.3", "yesterday", "99999999999999999999", "-5", "1e9"] {
            check(unreadable, None);
        }
    }
}
