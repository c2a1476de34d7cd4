//! How pages show times, counts and text that a sender controls.

use hapax_core::Timestamp;
use hapax_core::limits::LANE_COUNT_MAX;

/// An instant in UTC, to the second. Where milliseconds matter, pages show the time that passed since another instant.
pub(crate) fn clock(at: &Timestamp) -> String {
    at.strftime("%Y-%m-%d %H:%M:%SZ").to_string()
}

/// The parts of a sentence, and whether each was a command between backticks.
pub(crate) fn with_code(sentence: &str) -> Vec<(&str, bool)> {
    let parts = sentence.split('`').enumerate();
    parts.map(|(at, part)| (part, at % 2 == 1)).filter(|(part, _)| !part.is_empty()).collect()
}

/// The text with control characters, bidirectional marks and other invisible characters written as escapes.
/// The template escapes HTML.
pub(crate) fn visible(text: &str) -> String {
    crate::logs::escaped(text)
}

/// Text of several lines, such as a body: line breaks and tabs stay.
pub(crate) fn visible_lines(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        for (at, part) in line.trim_end_matches('\n').split('\t').enumerate() {
            if at > 0 {
                shown.push('\t');
            }
            shown.push_str(&visible(part));
        }
        if line.ends_with('\n') {
            shown.push('\n');
        }
    }
    shown
}

/// Whether `chosen` is this word.
pub(crate) fn is(chosen: &Option<String>, word: &str) -> bool {
    chosen.as_deref() == Some(word)
}

/// The text, or an empty one.
pub(crate) fn or_empty(text: &Option<String>) -> &str {
    text.as_deref().unwrap_or_default()
}

/// A whole number with a comma between thousands.
pub(crate) fn number(number: &u64) -> String {
    let digits = number.to_string();
    let mut grouped = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// A count as text. A count that stopped at its limit ends in a plus sign.
pub(crate) fn capped(count: &CappedCount) -> String {
    let more = if count.is_capped { "+" } else { "" };
    format!("{}{more}", number(&count.count))
}

/// Whether there is none.
pub(crate) fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// A count of the jobs of one handler as text.
pub(crate) fn lane_count(count: &u64) -> String {
    let mut of_lane = CappedCount::default();
    of_lane.add(*count);
    capped(&of_lane)
}

/// A count that stops at a limit.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct CappedCount {
    pub(crate) count: u64,
    /// The limit was reached: there may be more.
    pub(crate) is_capped: bool,
}

impl CappedCount {
    /// Adds a count of one handler or source, which stops at [`LANE_COUNT_MAX`].
    pub(crate) fn add(&mut self, count: u64) {
        self.count += count;
        self.is_capped |= count >= LANE_COUNT_MAX;
    }
}

/// A size in the largest suitable unit.
pub(crate) fn bytes(bytes: &u64) -> String {
    let units = ["kB", "MB", "GB", "TB"];
    let mut size = *bytes as f64 / 1_000.0;
    let mut units = units.into_iter();
    let mut unit = units.next().unwrap_or_default();
    while size >= 1_000.0
        && let Some(larger) = units.next()
    {
        (size, unit) = (size / 1_000.0, larger);
    }
    match bytes {
        0..1_000 => format!("{bytes} bytes"),
        _ => format!("{size:.1} {unit}"),
    }
}

/// A share as a percentage, or a dash without one.
pub(crate) fn percent(share: &Option<f64>) -> String {
    share.map_or_else(|| "–".to_owned(), |share| format!("{:.1} %", share * 100.0))
}

/// Formats a duration given in seconds; a dash if there is none.
pub(crate) fn seconds(seconds: &Option<f64>) -> String {
    match *seconds {
        None => "–".to_owned(),
        Some(seconds) if seconds < 0.01 => format!("{:.1} ms", seconds * 1_000.0),
        Some(seconds) if seconds < 1.0 => format!("{:.0} ms", seconds * 1_000.0),
        Some(seconds) if seconds < 120.0 => format!("{seconds:.1} s"),
        Some(seconds) => format!("{:.0} min", seconds / 60.0),
    }
}

/// A duration in seconds.
pub(crate) fn some_seconds(duration: &f64) -> String {
    seconds(&Some(*duration))
}

/// A duration of whole seconds in the largest unit that shows it well: `90 s`, `5 min`, `6 h`, `3 d`.
pub(crate) fn long_span(seconds: &u64) -> String {
    match *seconds {
        seconds @ 0..120 => format!("{seconds} s"),
        seconds @ 120..7_200 => format!("{} min", (seconds + 30) / 60),
        seconds @ 7_200..172_800 => format!("{} h", (seconds + 1_800) / 3_600),
        seconds => format!("{} d", (seconds + 43_200) / 86_400),
    }
}

/// The running totals of the durations.
pub(crate) fn sums(durations: &[u64]) -> Vec<u64> {
    let mut sum = 0_u64;
    let add = |duration: &u64| {
        sum = sum.saturating_add(*duration);
        sum
    };
    durations.iter().map(add).collect()
}

/// The time from `from` to `at`, as `+1.2 s`.
pub(crate) fn elapsed(from: &Timestamp, at: &Timestamp) -> String {
    let span = at.duration_since(*from);
    let sign = if span.is_negative() { '-' } else { '+' };
    format!("{sign}{}", crate::format::span(span))
}

/// JSON indented by its brackets, commas and colons. The bytes of each value stay as they are: no number is
/// rounded, no name reordered, no duplicate dropped. Text that is not JSON stays as it is, and so does text that would
/// become too long: a small body of nested lists is mostly indentation.
pub(crate) fn indented(text: &str) -> String {
    if serde_json::from_str::<serde::de::IgnoredAny>(text).is_err() {
        return text.to_owned();
    }
    let mut indented = String::with_capacity(text.len() * 2);
    let mut depth = 0_usize;
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if indented.len() > text.len() + INDENTATION_BYTES_MAX {
            return text.to_owned();
        }
        match c {
            '"' => {
                indented.push(c);
                copy_string(&mut chars, &mut indented);
            }
            '{' | '[' => {
                indented.push(c);
                while chars.next_if(|next| next.is_ascii_whitespace()).is_some() {}
                let close = if c == '{' { '}' } else { ']' };
                if let Some(close) = chars.next_if_eq(&close) {
                    indented.push(close);
                } else {
                    depth += 1;
                    new_line(&mut indented, depth);
                }
            }
            '}' | ']' => {
                depth = depth.saturating_sub(1);
                new_line(&mut indented, depth);
                indented.push(c);
            }
            ',' => {
                indented.push(c);
                new_line(&mut indented, depth);
            }
            ':' => indented.push_str(": "),
            c if c.is_ascii_whitespace() => {}
            c => indented.push(c),
        }
    }
    indented
}

/// The most bytes that indentation may add to a text. Bodies that people read need less.
const INDENTATION_BYTES_MAX: usize = 1 << 20;

/// The deepest indentation that is shown; deeper levels are indented by as much.
const DEPTH_SHOWN_MAX: usize = 40;

fn new_line(text: &mut String, depth: usize) {
    text.push('\n');
    for _ in 0..depth.min(DEPTH_SHOWN_MAX) {
        text.push_str("  ");
    }
}

/// Copies a JSON string from after its opening quote to its closing quote.
fn copy_string(chars: &mut impl Iterator<Item = char>, to: &mut String) {
    let mut is_escaped = false;
    for c in chars {
        to.push(c);
        match (is_escaped, c) {
            (false, '"') => return,
            (false, '\\') => is_escaped = true,
            (_, _) => is_escaped = false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indenting_keeps_the_bytes_of_every_value() {
        let body = r#"{"n":9007199254740993,"x":1e400,"a":1,"a":[],"s":"a\"{,:b\\","o":{ }}"#;
        let expected = "{\n  \"n\": 9007199254740993,\n  \"x\": 1e400,\n  \"a\": 1,\n  \"a\": [],\n  \
                        \"s\": \"a\\\"{,:b\\\\\",\n  \"o\": {}\n}";
        assert_eq!(indented(body), expected);
    }

    #[test]
    fn text_that_is_not_json_is_not_indented() {
        for text in ["a=1&b={x}", "{\"a\":", "", "{\"a\":1}x"] {
            assert_eq!(indented(text), text);
        }
    }

    #[test]
    fn a_body_that_is_mostly_indentation_stays_as_it_is() {
        // Indentation would turn this body of 400 kB into 17 MB, for every reader of the page.
        let body = format!("{}1{}{}", "[".repeat(60), ",1".repeat(200_000), "]".repeat(60));
        assert_eq!(indented(&body), body);
        let small = format!("{}1{}", "[".repeat(60), "]".repeat(60));
        assert!(indented(&small).lines().count() > 100);
    }

    #[test]
    fn a_count_that_stopped_at_its_limit_says_so() {
        assert_eq!(lane_count(&(LANE_COUNT_MAX - 1)), "9,999");
        assert_eq!(lane_count(&LANE_COUNT_MAX), "10,000+");
    }

    #[test]
    fn a_body_keeps_its_lines_and_shows_what_is_invisible() {
        assert_eq!(visible_lines("a\tb\r\nc\u{202e}d\n"), "a\tb\\r\nc\\u{202e}d\n");
    }

    #[test]
    fn a_size_is_shown_in_its_largest_suitable_unit() {
        let check = |size: u64, shown: &str| assert_eq!(bytes(&size), shown);
        check(0, "0 bytes");
        check(999, "999 bytes");
        check(4_096, "4.1 kB");
        check(12_345_678, "12.3 MB");
        check(5_000_000_000_000, "5.0 TB");
        check(u64::MAX, "18446744.1 TB");
    }

    #[test]
    fn thousands_are_grouped() {
        for (value, shown) in [(0, "0"), (999, "999"), (1_000, "1,000"), (12_345_678, "12,345,678")]
        {
            assert_eq!(number(&value), shown);
        }
    }
}
