//! Selects the headers of a sender that are stored with its event, and escapes values from requests
//! for log lines.

use std::borrow::Cow;
use std::fmt::{self, Write};
use std::sync::Arc;

use hapax_core::hop_headers::{ConnectionHeaders, is_hop_by_hop};
use http::{HeaderMap, HeaderName};

use crate::limits::{KEPT_HEADERS_BYTES_MAX, LOG_VALUE_CHARS_MAX};

/// `name: value` lines, without hop-by-hop headers and without secrets.
pub(crate) fn kept_headers(headers: &HeaderMap, secret: &[HeaderName]) -> Arc<str> {
    let mut kept = String::with_capacity(512);
    let of_connection = ConnectionHeaders::named_in(headers);
    for (name, value) in headers {
        if is_left_out(name.as_str()) || secret.contains(name) || of_connection.contains(name) {
            continue;
        }
        let value = match value.to_str() {
            Ok(ascii) => Cow::Borrowed(ascii),
            Err(_) => String::from_utf8_lossy(value.as_bytes()),
        };
        if kept.len() + name.as_str().len() + value.len() + 3 > KEPT_HEADERS_BYTES_MAX {
            continue;
        }
        kept.push_str(name.as_str());
        kept.push_str(": ");
        kept.push_str(&value);
        kept.push('\n');
    }
    kept.into()
}

fn is_left_out(name: &str) -> bool {
    is_hop_by_hop(name) || matches!(name, "authorization" | "cookie")
}

/// A value from a request for a log line: escaped, and cut if it is long.
pub(crate) struct Plain<'a>(pub(crate) &'a str);

impl fmt::Display for Plain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, c) in self.0.chars().enumerate() {
            if at == LOG_VALUE_CHARS_MAX {
                return f.write_char('…');
            }
            if is_printable(c) {
                f.write_char(c)?;
            } else {
                write!(f, "{}", c.escape_unicode())?;
            }
        }
        Ok(())
    }
}

/// Control characters move a terminal's cursor, and bidirectional marks reorder the text of a line.
fn is_printable(c: char) -> bool {
    !c.is_control()
        && !matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_and_hop_by_hop_headers_are_not_stored() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("authorization", "Bearer x"),
            ("cookie", "a=b"),
            ("x-gitlab-token", "hush"),
            ("connection", "keep-alive, X-Hop"),
            ("x-hop", "for this connection only, since the one above names it"),
            ("content-type", "application/json"),
            ("x-twice", "1"),
        ] {
            headers.insert(name, value.parse().unwrap());
        }
        headers.append("x-twice", "2".parse().unwrap());
        let secret = [HeaderName::from_static("x-gitlab-token")];
        let kept = kept_headers(&headers, &secret);
        let mut lines: Vec<&str> = kept.lines().collect();
        lines.sort_unstable();
        assert_eq!(lines, ["content-type: application/json", "x-twice: 1", "x-twice: 2"]);
    }

    #[test]
    fn stored_headers_are_bounded_and_never_cut_in_the_middle() {
        let mut headers = HeaderMap::new();
        headers.insert("x-long", "a".repeat(KEPT_HEADERS_BYTES_MAX).parse().unwrap());
        headers.insert("x-short", "b".parse().unwrap());
        assert_eq!(&*kept_headers(&headers, &[]), "x-short: b\n");
    }

    #[test]
    fn a_value_cannot_break_out_of_its_log_line() {
        let plain = Plain("a\nb\u{1b}[31m\u{202e}c").to_string();
        assert_eq!(plain, "a\\u{a}b\\u{1b}[31m\\u{202e}c");
        assert_eq!(Plain(&"x".repeat(1000)).to_string().chars().count(), LOG_VALUE_CHARS_MAX + 1);
    }
}
