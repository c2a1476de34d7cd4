//! How the command line and the pages show times, durations, counts and parts of URLs.

use std::time::Duration;

use hapax_core::limits::LANE_COUNT_MAX;
use jiff::{SignedDuration, Timestamp};

/// The text as one segment of a path, or as one value of a query.
pub(crate) fn url_part(text: &str) -> String {
    url::form_urlencoded::byte_serialize(text.as_bytes()).collect()
}

/// Formats an instant: UTC, to the second.
pub(crate) fn at(time: Timestamp) -> String {
    let seconds = Timestamp::from_second(time.as_second()).unwrap_or(time);
    seconds.to_string()
}

/// Formats a count: `1 source`, `2 sources`.
pub(crate) fn count(count: u64, noun: &str) -> String {
    match count {
        1 => format!("1 {noun}"),
        count => format!("{count} {noun}s"),
    }
}

/// Formats the number of jobs of one handler, which is counted up to [`LANE_COUNT_MAX`].
pub(crate) fn lane_count(count: u64) -> String {
    let more = if count >= LANE_COUNT_MAX { "+" } else { "" };
    format!("{count}{more}")
}

/// Formats the time between two instants, in either order.
pub(crate) fn between(one: Timestamp, other: Timestamp) -> String {
    span(one.duration_since(other))
}

/// Formats a duration in the largest suitable unit.
pub(crate) fn span(span: SignedDuration) -> String {
    let span = Duration::from_millis(u64::try_from(span.abs().as_millis()).unwrap_or(u64::MAX));
    let seconds = span.as_secs();
    match seconds {
        0 => format!("{} ms", span.as_millis()),
        1..10 => format!("{:.1} s", span.as_secs_f64()),
        10..120 => format!("{seconds} s"),
        120..7_200 => count(seconds / 60, "minute"),
        7_200..172_800 => count(seconds / 3_600, "hour"),
        _ => count(seconds / 86_400, "day"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_formatted_in_its_largest_suitable_unit() {
        let check = |ms: i64, said: &str| assert_eq!(span(SignedDuration::from_millis(ms)), said);
        check(0, "0 ms");
        check(-350, "350 ms");
        check(1_250, "1.2 s");
        check(119_000, "119 s");
        check(300_000, "5 minutes");
        check(7_200_000, "2 hours");
        check(259_200_000, "3 days");
    }
}
