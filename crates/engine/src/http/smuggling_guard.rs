//! Reads the bytes of an HTTP/1 peer a second time, in addition to the parser. The guard finds heads that
//! a proxy in front may read differently, including heads that were sent before the previous request was
//! answered.
//!
//! The guard follows heads, bodies and chunks over the whole connection and counts the requests. The guard
//! buffers only the start of the current line, so bytes may arrive in any number of pieces. If the guard
//! cannot follow, every later request on the connection is ambiguous.

use http::header::{HOST, TRANSFER_ENCODING};
use http::uri::Authority;
use http::{Method, Request, Version};
use memchr::memchr;

/// Whether a parsed head names one host and one framing, in forms that all parsers read alike.
pub(crate) fn is_clear<B>(request: &Request<B>) -> bool {
    names_one_host(request) && is_framed_plainly(request) && has_a_path(request)
}

/// Whether there is one `Host`, which an absolute target (or HTTP/2's `:authority`) does not
/// contradict. HTTP/1.0 may omit it.
fn names_one_host<B>(request: &Request<B>) -> bool {
    let mut hosts = request.headers().get_all(HOST).iter();
    let target = request.uri().authority();
    match (hosts.next(), hosts.next()) {
        (Some(host), None) => match (host.as_bytes(), target) {
            // An empty Host: clients send it for a target without a host.
            (b"", target) => target.is_none(),
            (host, target) => {
                let host = Authority::try_from(host).ok();
                let is_plain = |host: &Authority| !host.as_str().contains('@');
                host.filter(is_plain)
                    .is_some_and(|host| target.is_none_or(|target| *target == host))
            }
        },
        (None, _) => match request.version() {
            Version::HTTP_11 => false,
            Version::HTTP_2 => target.is_some(),
            _older => true,
        },
        (Some(_), Some(_)) => false,
    }
}

/// Whether the request has no transfer coding, or `chunked` alone.
fn is_framed_plainly<B>(request: &Request<B>) -> bool {
    let mut codings = request.headers().get_all(TRANSFER_ENCODING).iter();
    match (codings.next(), codings.next()) {
        (None, _) => true,
        (Some(coding), None) => coding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked"),
        (Some(_), Some(_)) => false,
    }
}

/// Whether the target is a path. The target of a tunnel is not, and `*` is allowed only for its own
/// method.
fn has_a_path<B>(request: &Request<B>) -> bool {
    match request.uri().path() {
        "*" => request.method() == Method::OPTIONS,
        path => path.starts_with('/') && request.method() != Method::CONNECT,
    }
}

/// Follows the requests of one HTTP/1 connection.
#[derive(Debug)]
pub(crate) struct FramingWatch {
    at: At,
    /// The first bytes of the current line: as many as are ever read.
    line: [u8; LINE_BYTES],
    line_bytes: usize,
    last: u8,
    /// The number of request heads that have begun to arrive.
    heads: usize,
    head: Head,
    ambiguous_from: Option<usize>,
}

/// The longest line that is read: a name, padding, and a length of 20 digits.
const LINE_BYTES: usize = 64;

/// The part of a request that the next byte belongs to.
#[derive(Debug, Default, Clone, Copy)]
enum At {
    #[default]
    Head,
    Body {
        left: u64,
    },
    ChunkSize,
    Chunk {
        left: u64,
    },
    ChunkEnd,
    Trailers,
    /// Unknown: the boundaries of requests are no longer certain.
    Lost,
}

/// The facts known about the head that is being read.
#[derive(Debug, Default, Clone, Copy)]
struct Head {
    begun: bool,
    request_line: bool,
    content_length: Option<u64>,
    transfer_encoding: bool,
}

impl Default for FramingWatch {
    fn default() -> Self {
        Self {
            at: At::default(),
            line: [0; LINE_BYTES],
            line_bytes: 0,
            last: 0,
            heads: 0,
            head: Head::default(),
            ambiguous_from: None,
        }
    }
}

impl FramingWatch {
    /// Reads the next bytes of the connection.
    pub(crate) fn feed(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            bytes = match &mut self.at {
                At::Lost => return,
                At::Body { left } | At::Chunk { left } => {
                    let passed = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
                    *left -= passed as u64;
                    if *left == 0 {
                        self.at = match self.at {
                            At::Chunk { .. } => At::ChunkEnd,
                            _whole_body => At::Head,
                        };
                    }
                    &bytes[passed..]
                }
                At::Head | At::ChunkSize | At::ChunkEnd | At::Trailers => self.feed_line(bytes),
            };
        }
    }

    /// Whether a head is being read, or must be assumed to be.
    pub(crate) fn is_in_head(&self) -> bool {
        match self.at {
            At::Head => self.head.begun,
            At::Lost => true,
            At::Body { .. } | At::ChunkSize | At::Chunk { .. } | At::ChunkEnd | At::Trailers => {
                false
            }
        }
    }

    /// The number of heads that have begun.
    pub(crate) fn heads(&self) -> usize {
        self.heads
    }

    /// The first request, counted from 0, that two parsers could read differently.
    pub(crate) fn ambiguous_from(&self) -> Option<usize> {
        self.ambiguous_from
    }

    /// Reads the bytes of the current line and returns the rest.
    fn feed_line<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        if matches!(self.at, At::Head) && !self.head.begun {
            self.head.begun = true;
            self.heads += 1;
        }
        let Some(at) = memchr(b'\n', bytes) else {
            self.extend(bytes);
            return &[];
        };
        self.extend(&bytes[..at]);
        let ends_in_crlf = self.line_bytes > 0 && self.last == b'\r';
        let text_bytes = self.line_bytes - usize::from(ends_in_crlf);
        self.line_bytes = 0;
        match self.at {
            At::Head => self.end_head_line(text_bytes, ends_in_crlf),
            At::ChunkSize if ends_in_crlf => match chunk_size(self.kept(text_bytes)) {
                Some(0) => self.at = At::Trailers,
                Some(left) => self.at = At::Chunk { left },
                None => self.lose_track(self.heads),
            },
            At::ChunkEnd if ends_in_crlf && text_bytes == 0 => self.at = At::ChunkSize,
            At::Trailers if ends_in_crlf => {
                if text_bytes == 0 {
                    self.at = At::Head;
                }
            }
            At::ChunkSize | At::ChunkEnd | At::Trailers => self.lose_track(self.heads),
            At::Body { .. } | At::Chunk { .. } | At::Lost => {}
        }
        &bytes[at + 1..]
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

    /// The current line without its end, as far as it is buffered.
    fn kept(&self, text_bytes: usize) -> &[u8] {
        &self.line[..text_bytes.min(LINE_BYTES)]
    }

    fn end_head_line(&mut self, text_bytes: usize, ends_in_crlf: bool) {
        // The line is judged at once, not at the end of the head: a parser may find the end of the
        // head at another place than this guard.
        if !ends_in_crlf {
            return self.lose_track(self.heads - 1);
        }
        if text_bytes == 0 {
            // Blank lines before the request line are allowed; after it they end the head.
            if self.head.request_line {
                self.end_head();
            }
            return;
        }
        self.head.request_line = true;
        let line = self.kept(text_bytes);
        let length = value_of(line, b"content-length:");
        let is_encoding = value_of(line, b"transfer-encoding:").is_some();
        if let Some(length) = length {
            let length = if text_bytes > LINE_BYTES { None } else { decimal(length) };
            // Two equal lengths are ambiguous too: some parsers read them as a list.
            if length.is_none() || self.head.content_length.is_some() {
                return self.lose_track(self.heads - 1);
            }
            self.head.content_length = length;
        }
        self.head.transfer_encoding |= is_encoding;
        if self.head.transfer_encoding && self.head.content_length.is_some() {
            self.lose_track(self.heads - 1);
        }
    }

    fn end_head(&mut self) {
        let head = std::mem::take(&mut self.head);
        self.at = match head.content_length {
            Some(left) if left > 0 => At::Body { left },
            Some(_) | None if head.transfer_encoding => At::ChunkSize,
            Some(_) | None => At::Head,
        };
    }

    fn lose_track(&mut self, from: usize) {
        self.at = At::Lost;
        self.ambiguous_from = Some(from);
    }
}

/// The value after `name` in a header line, without the blanks around it.
fn value_of<'a>(line: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let (start, value) = line.split_at_checked(name.len())?;
    start.eq_ignore_ascii_case(name).then(|| value.trim_ascii())
}

fn decimal(digits: &[u8]) -> Option<u64> {
    let is_plain = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    std::str::from_utf8(digits).ok().filter(|_| is_plain)?.parse().ok()
}

/// The size at the start of a chunk's first line; extensions may follow it.
fn chunk_size(line: &[u8]) -> Option<u64> {
    let digits = line.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
    let (size, rest) = line.split_at(digits);
    let ends = matches!(rest.first(), None | Some(b';' | b' ' | b'\t'));
    let size = std::str::from_utf8(size).ok().filter(|_| ends)?;
    u64::from_str_radix(size, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// However the bytes are cut into pieces, the result is the same.
    #[track_caller]
    fn check(bytes: &[u8], ambiguous_from: Option<usize>) {
        for cut in 0..=bytes.len() {
            let mut watch = FramingWatch::default();
            watch.feed(&bytes[..cut]);
            watch.feed(&bytes[cut..]);
            assert_eq!(watch.ambiguous_from(), ambiguous_from, "cut at {cut}");
        }
    }

    #[test]
    fn an_ordinary_head_is_not_ambiguous() {
        check(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n", None);
        check(b"\r\nPOST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", None);
    }

    #[test]
    fn the_bytes_of_a_body_are_not_read_as_a_head() {
        let body = "\ntransfer-encoding: chunked\n\ncontent-length: 5\n\n";
        let length = body.len();
        check(
            format!("POST / HTTP/1.1\r\nContent-Length: {length}\r\n\r\n{body}").as_bytes(),
            None,
        );
        let chunk = format!("{length:x};x=y\r\n{body}\r\n0\r\nx: y\r\n\r\n");
        let chunked = "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n";
        check(format!("{chunked}{chunk}").as_bytes(), None);
    }

    #[test]
    fn two_lengths_are_ambiguous_in_either_order_and_any_case() {
        let check =
            |heads: &str| check(format!("POST / HTTP/1.1\r\n{heads}\r\n\r\n").as_bytes(), Some(0));
        check("content-length: 5\r\ntransfer-encoding: chunked");
        check("TRANSFER-ENCODING:chunked\r\nContent-Length:5");
        check("content-length: 5\r\ncontent-length: 5");
        check("content-length: 5, 5");
        check("content-length: +5");
        check("content-length: 0x5");
        check("content-length:");
    }

    #[test]
    fn a_bare_line_feed_is_ambiguous_wherever_it_stands() {
        check(b"POST / HTTP/1.1\nHost: a\n\n", Some(0));
        check(b"POST / HTTP/1.1\r\nHost: a\nX: b\r\n\r\n", Some(0));
        check(b"POST / HTTP/1.1\r\nHost: a\r\n\n", Some(0));
    }

    #[test]
    fn a_later_head_is_checked_like_the_first() {
        let plain = "GET / HTTP/1.1\r\nhost: a\r\n\r\n";
        let sized = "POST / HTTP/1.1\r\ncontent-length: 3\r\n\r\n\n\n\n";
        let chunked = "POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\n\n\n\r\n0\r\n\r\n";
        let bare = "GET / HTTP/1.1\nhost: a\n\n";
        let both = "POST / HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n";
        check(format!("{plain}{sized}{chunked}{plain}").as_bytes(), None);
        for hidden in [bare, both] {
            check(format!("{plain}{hidden}").as_bytes(), Some(1));
            check(format!("{sized}{hidden}").as_bytes(), Some(1));
            check(format!("{chunked}{hidden}").as_bytes(), Some(1));
            check(format!("{plain}{sized}{chunked}{hidden}{plain}").as_bytes(), Some(3));
        }
    }

    #[test]
    fn behind_chunks_that_end_in_two_ways_the_next_request_is_ambiguous() {
        let head = "POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n";
        for chunks in ["2\nab\r\n", "2\r\nab\n", "2\r\nabc\r\n", "0x2\r\n", "\r\n", "0\r\nx: y\n"] {
            check(format!("{head}{chunks}").as_bytes(), Some(1));
        }
    }
}
