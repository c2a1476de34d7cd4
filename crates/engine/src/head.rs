//! A second look at HTTP/1 request heads for what the parser lets through and a proxy in front may
//! read differently: a length given in two ways, and lines that end in a bare LF (S-18). It keeps
//! no bytes but the start of the current line, so a head may come in any number of pieces. A head
//! that was sent before the answer to the one before it is judged by the parser alone, which takes
//! chunks over a length and then closes the connection.

use memchr::memchr;

/// Watches one head; make a new one for the next.
#[derive(Debug, Default)]
pub(crate) struct HeadWatch {
    /// The first bytes of the current line: as many as the longer of the two names needs.
    line: [u8; NAME_BYTES],
    line_bytes: usize,
    last: u8,
    begun: bool,
    request_line: bool,
    content_length: bool,
    transfer_encoding: bool,
    bare_lf: bool,
    done: bool,
}

const NAME_BYTES: usize = b"transfer-encoding:".len();

impl HeadWatch {
    /// Takes the next bytes off the wire; those after the head's end are ignored.
    pub(crate) fn feed(&mut self, mut bytes: &[u8]) {
        self.begun |= !bytes.is_empty();
        while !self.done {
            let Some(at) = memchr(b'\n', bytes) else {
                return self.extend(bytes);
            };
            self.extend(&bytes[..at]);
            self.end_line();
            bytes = &bytes[at + 1..];
        }
    }

    /// Whether any byte of the head has come.
    pub(crate) fn has_begun(&self) -> bool {
        self.begun
    }

    /// Whether two readers of this head could disagree about it.
    pub(crate) fn is_ambiguous(&self) -> bool {
        self.bare_lf || (self.content_length && self.transfer_encoding)
    }

    fn extend(&mut self, part: &[u8]) {
        let Some(last) = part.last() else { return };
        self.last = *last;
        if let Some(room) = self.line.get_mut(self.line_bytes..) {
            let kept = room.len().min(part.len());
            room[..kept].copy_from_slice(&part[..kept]);
        }
        self.line_bytes = self.line_bytes.saturating_add(part.len());
    }

    fn end_line(&mut self) {
        let has_cr = self.line_bytes > 0 && self.last == b'\r';
        self.bare_lf |= !has_cr;
        if self.line_bytes <= usize::from(has_cr) {
            // Blank lines before the request line are allowed; after it they end the head.
            self.done = self.request_line;
        } else {
            self.request_line = true;
        }
        self.content_length |= self.line_starts_with(b"content-length:");
        self.transfer_encoding |= self.line_starts_with(b"transfer-encoding:");
        self.line_bytes = 0;
    }

    fn line_starts_with(&self, name: &[u8]) -> bool {
        self.line_bytes >= name.len() && self.line[..name.len()].eq_ignore_ascii_case(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// However the head is cut into pieces, the answer is the same.
    #[track_caller]
    fn check(head: &[u8], ambiguous: bool) {
        for cut in 0..=head.len() {
            let mut watch = HeadWatch::default();
            watch.feed(&head[..cut]);
            watch.feed(&head[cut..]);
            assert_eq!(watch.is_ambiguous(), ambiguous, "cut at {cut}");
        }
    }

    #[test]
    fn an_ordinary_head_is_not_ambiguous() {
        check(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n", false);
        check(b"\r\nPOST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", false);
    }

    #[test]
    fn what_follows_the_head_is_not_judged() {
        check(
            b"POST / HTTP/1.1\r\nContent-Length: 30\r\n\r\n\ntransfer-encoding: chunked\n\n",
            false,
        );
    }

    #[test]
    fn two_lengths_are_ambiguous_in_either_order_and_any_case() {
        check(b"POST / HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n", true);
        check(b"POST / HTTP/1.1\r\nTRANSFER-ENCODING:chunked\r\nContent-Length:5\r\n\r\n", true);
    }

    #[test]
    fn a_bare_line_feed_is_ambiguous_wherever_it_stands() {
        check(b"POST / HTTP/1.1\nHost: a\n\n", true);
        check(b"POST / HTTP/1.1\r\nHost: a\nX: b\r\n\r\n", true);
        check(b"POST / HTTP/1.1\r\nHost: a\r\n\n", true);
    }
}
