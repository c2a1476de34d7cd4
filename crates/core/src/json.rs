//! Extracts a few values from raw JSON, strictly: one pass validates the whole document and returns slices
//! of it. The reader builds no tree, rounds no number and normalises no text. A body therefore has one
//! reading, and no other parser sees another id in it.
//!
//! A document must follow the grammar of RFC 8259. Three more things are refused: nesting deeper than
//! [`JSON_DEPTH_MAX`], a repeated key on a path that is looked up, and half a surrogate pair in a string that
//! is looked up. Keys are equal if they are equal after unescaping. Elsewhere in the document the last two
//! are accepted.

use std::borrow::Cow;

use crate::limits::JSON_DEPTH_MAX;
use crate::verify::Refusal;

/// Looks up `pointers` in `body`, in one pass that also validates the whole body. Returns the values in
/// the order of the pointers, `None` for each without a value.
///
/// # Panics
/// With more than [`POINTERS_MAX`] pointers. The compiler of selectors enforces that bound.
pub fn extract<'a>(
    body: &'a [u8],
    pointers: &[Pointer],
) -> Result<Vec<Option<Value<'a>>>, Malformed> {
    let text = match std::str::from_utf8(body) {
        Ok(text) => text,
        Err(error) => return Err(Malformed::new("not UTF-8", error.valid_up_to())),
    };
    if text.starts_with('\u{feff}') {
        return Err(Malformed::new("a byte order mark before the JSON", 0));
    }
    extract_text(text, pointers)
}

/// The byte ranges of the values of `pointers` in the body, in order, without nested ones.
///
/// # Panics
/// As [`extract`].
pub fn spans(body: &[u8], pointers: &[Pointer]) -> Result<Vec<(usize, usize)>, Malformed> {
    let found = extract(body, pointers)?;
    let mut spans: Vec<_> = found
        .into_iter()
        .flatten()
        .map(|value| {
            let start = value.raw().as_ptr().addr() - body.as_ptr().addr();
            (start, start + value.raw().len())
        })
        .collect();
    spans.sort_unstable();
    spans.dedup_by(|next, kept| next.1 <= kept.1);
    Ok(spans)
}

/// The most pointers that one pass looks up: one bit each in a word.
pub const POINTERS_MAX: usize = 64;

/// A JSON pointer (RFC 6901), parsed once, so that a lookup compares plain text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pointer {
    text: Box<str>,
    segments: Box<[Segment]>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Segment {
    key: Box<str>,
    /// Set if the segment can also be an index of an array.
    index: Option<usize>,
}

/// Why a text is not a JSON pointer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PointerError {
    /// The text is not empty and does not start with a slash.
    #[error("a JSON pointer starts with \"/\"")]
    NoSlash,
    /// A `~` that is followed by neither `0` nor `1`.
    #[error("in a JSON pointer \"~\" is written \"~0\" and \"/\" inside a key \"~1\"")]
    BadEscape,
}

impl Pointer {
    /// Parses a pointer. `""` is the whole document.
    pub fn parse(text: &str) -> Result<Self, PointerError> {
        let segments = match text.strip_prefix('/') {
            None if text.is_empty() => Vec::new(),
            None => return Err(PointerError::NoSlash),
            Some(path) => path.split('/').map(Segment::parse).collect::<Result<_, _>>()?,
        };
        Ok(Self { text: text.into(), segments: segments.into() })
    }

    /// The pointer as written.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Its keys, unescaped.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.segments.iter().map(|segment| &*segment.key)
    }
}

impl Segment {
    fn parse(escaped: &str) -> Result<Self, PointerError> {
        let mut key = String::with_capacity(escaped.len());
        let mut rest = escaped.chars();
        while let Some(next) = rest.next() {
            key.push(match next {
                '~' => match rest.next() {
                    Some('0') => '~',
                    Some('1') => '/',
                    Some(_) | None => return Err(PointerError::BadEscape),
                },
                plain => plain,
            });
        }
        let canonical = key == "0" || !key.starts_with(['0', '+']);
        let index = if canonical { key.parse().ok() } else { None };
        Ok(Self { key: key.into(), index })
    }
}

/// Why bytes are not JSON, or are ambiguous JSON, and where.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{problem} (at byte {at})")]
pub struct Malformed {
    /// The problem in words.
    pub problem: &'static str,
    /// How many bytes came before it.
    pub at: usize,
}

impl Malformed {
    fn new(problem: &'static str, at: usize) -> Self {
        Self { problem, at }
    }
}

impl From<Malformed> for Refusal {
    fn from(malformed: Malformed) -> Self {
        Self::Malformed(malformed.to_string())
    }
}

/// A value inside a validated document: its bytes, not decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Value<'a> {
    raw: &'a str,
}

impl<'a> Value<'a> {
    /// The bytes of the document, including quotes.
    pub fn raw(self) -> &'a str {
        self.raw
    }

    /// Whether it is `null`.
    pub fn is_null(self) -> bool {
        self.raw == "null"
    }

    /// The text of a string; `None` for anything else.
    pub fn as_text(self) -> Option<Cow<'a, str>> {
        unescape(self.raw.strip_prefix('"')?.strip_suffix('"')?)
    }

    /// The text of a string, or an integer exactly as it is written: `9007199254740993` is not
    /// rounded. `None` for anything else, and therefore also for `1.0` and `1e3`.
    pub fn as_id_text(self) -> Option<Cow<'a, str>> {
        if self.raw.starts_with('"') {
            return self.as_text();
        }
        let digits = self.raw.strip_prefix('-').unwrap_or(self.raw);
        digits.bytes().all(|byte| byte.is_ascii_digit()).then_some(Cow::Borrowed(self.raw))
    }

    /// The elements of an array, in order. `None` for any other value.
    pub fn elements(self) -> Option<Elements<'a>> {
        self.raw.starts_with('[').then(|| {
            let mut scanner = Scanner::new(self.raw, &[]);
            scanner.at = 1;
            Elements { scanner }
        })
    }

    /// [`extract`] inside this value, pointers relative to it.
    pub fn extract(self, pointers: &[Pointer]) -> Result<Vec<Option<Value<'a>>>, Malformed> {
        extract_text(self.raw, pointers)
    }
}

/// Walks the elements of an array, one at a time.
#[derive(Debug)]
pub struct Elements<'a> {
    scanner: Scanner<'a, 'static>,
}

impl<'a> Iterator for Elements<'a> {
    type Item = Value<'a>;

    fn next(&mut self) -> Option<Value<'a>> {
        // The array was validated when it was found, so an error can only be its end.
        let scanner = &mut self.scanner;
        scanner.blanks();
        if scanner.peek() == Some(b',') {
            scanner.at += 1;
            scanner.blanks();
        }
        let start = scanner.at;
        scanner.value(0, 1).ok()?;
        Some(Value { raw: &scanner.text[start..scanner.at] })
    }
}

fn extract_text<'a>(
    text: &'a str,
    pointers: &[Pointer],
) -> Result<Vec<Option<Value<'a>>>, Malformed> {
    assert!(pointers.len() <= POINTERS_MAX, "more pointers than bits in a word");
    let mut scanner = Scanner::new(text, pointers);
    let all = u64::MAX.checked_shr((POINTERS_MAX - pointers.len()) as u32).unwrap_or(0);
    scanner.blanks();
    scanner.value(all, 0)?;
    scanner.blanks();
    if scanner.at < text.len() {
        return Err(scanner.fault("text after the end of the JSON"));
    }
    let half_pair = |value: &Value<'_>| value.raw.starts_with('"') && value.as_text().is_none();
    if scanner.found.iter().flatten().any(half_pair) {
        return Err(Malformed::new("half a surrogate pair in a string that is looked up", 0));
    }
    Ok(scanner.found)
}

/// A cursor over the document. Each pointer is a bit of a word: a value has the bits of the pointers
/// whose path leads to it or through it. Most values have none and are only validated.
#[derive(Debug)]
struct Scanner<'a, 'p> {
    text: &'a str,
    at: usize,
    pointers: &'p [Pointer],
    found: Vec<Option<Value<'a>>>,
}

impl<'a, 'p> Scanner<'a, 'p> {
    fn new(text: &'a str, pointers: &'p [Pointer]) -> Self {
        Self { text, at: 0, pointers, found: vec![None; pointers.len()] }
    }

    /// Validates one value. `active` are the pointers whose first `depth` segments match.
    fn value(&mut self, active: u64, depth: usize) -> Result<(), Malformed> {
        let start = self.at;
        match self.peek() {
            Some(b'{') => self.object(active, depth),
            Some(b'[') => self.array(active, depth),
            Some(b'"') => self.string().map(|_| ()),
            Some(b'-' | b'0'..=b'9') => self.number(),
            Some(b't') => self.word("true"),
            Some(b'f') => self.word("false"),
            Some(b'n') => self.word("null"),
            Some(_) => Err(self.fault("not JSON: no value starts like this")),
            None => Err(self.fault("the JSON ends too early")),
        }?;
        for bit in bits(active) {
            if self.pointers[bit].segments.len() == depth {
                self.found[bit] = Some(Value { raw: &self.text[start..self.at] });
            }
        }
        Ok(())
    }

    fn object(&mut self, active: u64, depth: usize) -> Result<(), Malformed> {
        self.enter(depth)?;
        let mut seen = 0;
        if self.took_after_blanks(b'}') {
            return Ok(());
        }
        loop {
            self.blanks();
            if self.peek() != Some(b'"') {
                return Err(self.fault("not JSON: an object's key is a string"));
            }
            let start = self.at;
            let key = self.string()?;
            let below = if active == 0 { 0 } else { self.through_key(active, depth, key) };
            if below & seen != 0 {
                return Err(Malformed::new("a key that is looked up occurs twice", start));
            }
            seen |= below;
            if !self.took_after_blanks(b':') {
                return Err(self.fault("not JSON: a colon is missing"));
            }
            self.blanks();
            self.value(below, depth + 1)?;
            self.blanks();
            match self.take() {
                Some(b',') => {}
                Some(b'}') => return Ok(()),
                Some(_) | None => return Err(self.fault("not JSON: an object is not closed")),
            }
        }
    }

    fn array(&mut self, active: u64, depth: usize) -> Result<(), Malformed> {
        self.enter(depth)?;
        if self.took_after_blanks(b']') {
            return Ok(());
        }
        for place in 0.. {
            self.blanks();
            let below = if active == 0 { 0 } else { self.through_place(active, depth, place) };
            self.value(below, depth + 1)?;
            self.blanks();
            match self.take() {
                Some(b',') => {}
                Some(b']') => break,
                Some(_) | None => return Err(self.fault("not JSON: an array is not closed")),
            }
        }
        Ok(())
    }

    fn enter(&mut self, depth: usize) -> Result<(), Malformed> {
        if depth >= JSON_DEPTH_MAX {
            return Err(self.fault("nested too deeply"));
        }
        self.at += 1;
        Ok(())
    }

    fn through_key(&self, active: u64, depth: usize, key: &str) -> u64 {
        let key = if key.contains('\\') { unescape(key) } else { Some(Cow::Borrowed(key)) };
        let Some(key) = key else { return 0 };
        self.through(active, depth, |segment| *segment.key == *key)
    }

    fn through_place(&self, active: u64, depth: usize, place: usize) -> u64 {
        self.through(active, depth, |segment| segment.index == Some(place))
    }

    fn through(&self, active: u64, depth: usize, leads: impl Fn(&Segment) -> bool) -> u64 {
        bits(active)
            .filter(|&bit| self.pointers[bit].segments.get(depth).is_some_and(&leads))
            .fold(0, |below, bit| below | 1 << bit)
    }

    /// Validates a string and returns the text between its quotes, still escaped.
    fn string(&mut self) -> Result<&'a str, Malformed> {
        self.at += 1;
        let start = self.at;
        let bytes = self.text.as_bytes();
        loop {
            self.at += plain_bytes(&bytes[self.at..]);
            match self.take() {
                Some(b'"') => return Ok(&self.text[start..self.at - 1]),
                Some(b'\\') => self.escape()?,
                Some(_) => {
                    self.at -= 1;
                    return Err(self.fault("a control character in a string"));
                }
                None => return Err(self.fault("a string is not closed")),
            }
        }
    }

    fn escape(&mut self) -> Result<(), Malformed> {
        match self.take() {
            Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => Ok(()),
            Some(b'u') => {
                let digits = self.text.as_bytes().get(self.at..self.at + 4);
                if !digits.is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit)) {
                    return Err(self.fault("\\u needs four hex digits"));
                }
                self.at += 4;
                Ok(())
            }
            Some(_) | None => Err(self.fault("an unknown escape in a string")),
        }
    }

    fn number(&mut self) -> Result<(), Malformed> {
        self.took(b'-');
        if !self.took(b'0') {
            self.digits()?;
        }
        if self.took(b'.') {
            self.digits()?;
        }
        if self.took(b'e') || self.took(b'E') {
            let _sign = self.took(b'+') || self.took(b'-');
            self.digits()?;
        }
        Ok(())
    }

    fn digits(&mut self) -> Result<(), Malformed> {
        let start = self.at;
        while self.peek().is_some_and(|byte| byte.is_ascii_digit()) {
            self.at += 1;
        }
        if self.at == start { Err(self.fault("not JSON: a digit is missing")) } else { Ok(()) }
    }

    fn word(&mut self, word: &str) -> Result<(), Malformed> {
        if !self.text.as_bytes()[self.at..].starts_with(word.as_bytes()) {
            return Err(self.fault("not JSON: no value starts like this"));
        }
        self.at += word.len();
        Ok(())
    }

    fn blanks(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\n' | b'\r' | b'\t')) {
            self.at += 1;
        }
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn take(&mut self) -> Option<u8> {
        let byte = self.peek()?;
        self.at += 1;
        Some(byte)
    }

    fn took(&mut self, byte: u8) -> bool {
        let there = self.peek() == Some(byte);
        self.at += usize::from(there);
        there
    }

    fn took_after_blanks(&mut self, byte: u8) -> bool {
        self.blanks();
        self.took(byte)
    }

    fn fault(&self, problem: &'static str) -> Malformed {
        Malformed::new(problem, self.at)
    }
}

/// How many bytes at the start are plain. Looks at eight bytes at a time, because strings are most of a document.
fn plain_bytes(bytes: &[u8]) -> usize {
    let mut plain = 0;
    for word in bytes.chunks_exact(size_of::<u64>()) {
        let word = u64::from_le_bytes(word.try_into().expect("a chunk of eight bytes"));
        let special = special_bytes(word);
        if special != 0 {
            return plain + special.trailing_zeros() as usize / 8;
        }
        plain += size_of::<u64>();
    }
    plain + bytes[plain..].iter().take_while(|byte| PLAIN[usize::from(**byte)]).count()
}

/// The high bit of the lowest byte that is not plain. Higher bits of the result mean nothing: a subtraction may borrow
/// from a byte above one that it finds.
fn special_bytes(word: u64) -> u64 {
    const ONES: u64 = u64::from_le_bytes([1; 8]);
    const HIGH_BITS: u64 = u64::from_le_bytes([0x80; 8]);
    let below = |word: u64, bound: u8| word.wrapping_sub(ONES * u64::from(bound)) & !word;
    let equal = |byte: u8| below(word ^ (ONES * u64::from(byte)), 1);
    (below(word, 0x20) | equal(b'"') | equal(b'\\')) & HIGH_BITS
}

/// The plain bytes of a string: neither quote, backslash nor control character.
static PLAIN: [bool; 256] = {
    let mut plain = [true; 256];
    let mut control = 0;
    while control < 0x20 {
        plain[control] = false;
        control += 1;
    }
    plain[b'"' as usize] = false;
    plain[b'\\' as usize] = false;
    plain
};

fn bits(word: u64) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(word), |rest| Some(rest & rest.wrapping_sub(1)))
        .take_while(|&rest| rest != 0)
        .map(|rest| rest.trailing_zeros() as usize)
}

/// Decodes the text between the quotes of a validated string. `None` for half a surrogate pair.
fn unescape(escaped: &str) -> Option<Cow<'_, str>> {
    let Some(first) = escaped.find('\\') else { return Some(Cow::Borrowed(escaped)) };
    let mut text = String::with_capacity(escaped.len());
    text.push_str(&escaped[..first]);
    let mut rest = &escaped[first..];
    while let Some((plain, after)) = rest.split_once('\\') {
        text.push_str(plain);
        let (escape, tail) = after.split_at_checked(1)?;
        rest = tail;
        text.push(match escape {
            "b" => '\u{8}',
            "f" => '\u{c}',
            "n" => '\n',
            "r" => '\r',
            "t" => '\t',
            "u" => code_point(&mut rest)?,
            itself => itself.chars().next()?,
        });
    }
    text.push_str(rest);
    Some(Cow::Owned(text))
}

/// The character of `\uXXXX`, or of a surrogate pair. `rest` begins after the `u`.
fn code_point(rest: &mut &str) -> Option<char> {
    let unit = code_unit(rest)?;
    match unit {
        0xd800..=0xdbff => {
            *rest = rest.strip_prefix("\\u")?;
            let low = code_unit(rest).filter(|low| (0xdc00..=0xdfff).contains(low))?;
            char::from_u32(0x1_0000 + ((unit - 0xd800) << 10) + (low - 0xdc00))
        }
        single => char::from_u32(single),
    }
}

fn code_unit(rest: &mut &str) -> Option<u32> {
    let (digits, tail) = rest.split_at_checked(4)?;
    *rest = tail;
    u32::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::value::RawValue;

    use super::*;

    #[test]
    fn the_first_byte_of_a_string_that_is_not_plain_is_found_at_every_position() {
        // Eight bytes are checked at once: neither the position in a word nor the bytes beside it may matter.
        let one_by_one = |bytes: &[u8]| {
            bytes.iter().take_while(|byte| !matches!(byte, 0..=0x1f | b'"' | b'\\')).count()
        };
        for byte in 0..=u8::MAX {
            for beside in [b' ', b'!', b'#', b'[', b']', 0x7f, 0x80, 0xff] {
                for at in 0..20 {
                    let mut bytes = [beside; 20];
                    bytes[at] = byte;
                    assert_eq!(plain_bytes(&bytes), one_by_one(&bytes), "{byte:#x} at {at}");
                    // A second one follows.
                    bytes[19] = b'"';
                    assert_eq!(plain_bytes(&bytes), one_by_one(&bytes), "{byte:#x} at {at}");
                }
            }
        }
    }

    fn pointers(texts: &[&str]) -> Vec<Pointer> {
        texts.iter().map(|text| Pointer::parse(text).expect("a pointer")).collect()
    }

    fn look_up<'a>(body: &'a [u8], text: &str) -> Result<Option<&'a str>, &'static str> {
        extract(body, &pointers(&[text]))
            .map(|found| found[0].map(Value::raw))
            .map_err(|malformed| malformed.problem)
    }

    #[test]
    fn values_come_back_as_they_are_written() {
        let body =
            br#" {"a":{"b":[10,{"c~/d":"x\u0041"}]},"n":-0.10e+5,"":1,"big":9007199254740993}"#;
        let check = |pointer, expected| assert_eq!(look_up(body, pointer), Ok(expected));
        check("/a/b/0", Some("10"));
        check("/a/b/1/c~0~1d", Some(r#""x\u0041""#));
        check("/a/b/01", None);
        check("/a/b/2", None);
        check("/a/b/-", None);
        check("/n", Some("-0.10e+5"));
        check("/", Some("1"));
        check("/big", Some("9007199254740993"));
        check("/n/x", None);
        assert_eq!(look_up(b" [1] ", ""), Ok(Some("[1]")));
        let found = extract(body, &pointers(&["/a/b", "/a", "/none", "/a/b/0"])).expect("valid");
        let raws: Vec<_> = found.iter().map(|value| value.map(Value::raw)).collect();
        assert_eq!(raws[0], Some(r#"[10,{"c~/d":"x\u0041"}]"#));
        assert_eq!(raws[1], Some(r#"{"b":[10,{"c~/d":"x\u0041"}]}"#));
        assert_eq!(raws[2..], [None, Some("10")]);
    }

    #[test]
    fn one_body_never_has_two_readings() {
        // Some parser accepts each of these, and parsers may find different values under /id.
        let check = |body: &[u8]| assert!(look_up(body, "/id").is_err(), "{body:?}");
        check(br#"{"id":1,"id":2}"#);
        check(br#"{"id":1,"id":1}"#);
        check(br#"{"id":1,"\u0069d":2}"#);
        check(br#"{"\u0069\u0064":1,"i\u0064":2}"#);
        check(b"\xef\xbb\xbf{\"id\":1}");
        check(b"{\"id\":1}{\"id\":2}");
        check(b"{\"id\":1}\0");
        check(b"{\"id\":1,}");
        check(b"{\"id\":1 /* 2 */}");
        check(b"{'id':1}");
        check(b"{id:1}");
        check(b"{\"id\":01}");
        check(b"{\"id\":+1}");
        check(b"{\"id\":1.}");
        check(b"{\"id\":NaN}");
        check(b"{\"id\":\"a\nb\"}");
        check(b"{\"id\":\"\\x41\"}");
        check(b"{\"id\":\"\\ud800\"}");
        check(b"{\"id\":\"\\udc00\\ud800\"}");
        check(b"{\"id\":\"\\ud800\\u0041\"}");
        check(b"{\"id\":\"\xff\"}");
        check(b"{\"id\":1,\"x\":\"\xc0\xaf\"}");
        check(b"");
        check(b"  ");
        check(b"{\"id\":1");
        check(b"{\"id\":\"1");
    }

    #[test]
    fn members_that_are_not_read_may_repeat_or_be_half_a_pair() {
        let body = br#"{"x":1,"x":2,"note":"cut \ud83d","id":"a","data":{"id":1,"id":2}}"#;
        assert_eq!(look_up(body, "/id"), Ok(Some("\"a\"")));
        assert!(look_up(body, "/data/id").is_err());
        assert!(look_up(br#"{"a":1,"a":{"id":2}}"#, "/a/id").is_err());
    }

    #[test]
    fn depth_is_bounded_to_the_level() {
        let nested = |depth: usize| [b"[".repeat(depth), b"]".repeat(depth)].concat();
        assert!(look_up(&nested(JSON_DEPTH_MAX), "").is_ok());
        assert_eq!(look_up(&nested(JSON_DEPTH_MAX + 1), ""), Err("nested too deeply"));
        assert_eq!(look_up(&b"[".repeat(1 << 20), ""), Err("nested too deeply"));
        assert_eq!(look_up(&b"{\"a\":".repeat(1 << 18), "/a"), Err("nested too deeply"));
    }

    #[test]
    fn only_text_and_integers_are_ids() {
        let id = |raw: &str| {
            let body = format!("[{raw}]");
            let found = extract(body.as_bytes(), &pointers(&["/0"])).expect("valid")[0];
            found.and_then(Value::as_id_text).map(Cow::into_owned)
        };
        assert_eq!(id("18446744073709551617").as_deref(), Some("18446744073709551617"));
        assert_eq!(id("-7").as_deref(), Some("-7"));
        assert_eq!(id(r#""a\/\ud83d\ude00""#).as_deref(), Some("a/😀"));
        for other in ["1.0", "1e3", "true", "null", "{}", "[]", "[1]"] {
            assert_eq!(id(other), None, "{other}");
        }
    }

    #[test]
    fn an_array_is_walked_element_by_element() {
        let check = |body: &str, expected: &[&str]| {
            let array = extract(body.as_bytes(), &pointers(&[""])).expect("valid")[0];
            let raws: Vec<_> =
                array.and_then(Value::elements).expect("array").map(Value::raw).collect();
            assert_eq!(raws, expected);
        };
        check(" [ ] ", &[]);
        check("[1]", &["1"]);
        check("[ [1,2] , {\"a\":[3,4]} ,\n\"],\" ]", &["[1,2]", "{\"a\":[3,4]}", "\"],\""]);
        assert!(
            extract(b"{}", &pointers(&[""])).expect("valid")[0]
                .expect("there")
                .elements()
                .is_none()
        );
    }

    #[test]
    fn each_bad_pointer_has_its_error() {
        assert_eq!(Pointer::parse("id"), Err(PointerError::NoSlash));
        assert_eq!(Pointer::parse("/a~2"), Err(PointerError::BadEscape));
        assert_eq!(Pointer::parse("/a~"), Err(PointerError::BadEscape));
    }

    /// JSON whose objects have keys that need escaping, and strings of every kind.
    fn any_json() -> impl Strategy<Value = serde_json::Value> {
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(Into::into),
            any::<i64>().prop_map(Into::into),
            any::<f64>().prop_map(Into::into),
            any::<String>().prop_map(Into::into),
        ];
        leaf.prop_recursive(6, 64, 8, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..8).prop_map(Into::into),
                prop::collection::hash_map("[a-c~/\"\\\\é]{0,2}", inner, 0..8)
                    .prop_map(|map| serde_json::Value::Object(map.into_iter().collect())),
            ]
        })
    }

    /// Every pointer into a document.
    fn every_pointer(value: &serde_json::Value, at: &str, all: &mut Vec<String>) {
        all.push(at.to_owned());
        match value {
            serde_json::Value::Array(elements) => {
                for (place, element) in elements.iter().enumerate() {
                    every_pointer(element, &format!("{at}/{place}"), all);
                }
            }
            serde_json::Value::Object(members) => {
                for (key, member) in members {
                    let key = key.replace('~', "~0").replace('/', "~1");
                    every_pointer(member, &format!("{at}/{key}"), all);
                }
            }
            _scalar => {}
        }
    }

    proptest! {
        #[test]
        fn every_value_of_a_document_is_found_as_serde_json_finds_it(json in any_json(), pretty: bool) {
            let text = if pretty { serde_json::to_string_pretty(&json) } else { serde_json::to_string(&json) };
            let text = text.expect("writes");
            // The text is parsed again, since serde_json may round a float that it wrote; this
            // parser never does.
            let json: serde_json::Value = serde_json::from_str(&text).expect("reads");
            let mut all = Vec::new();
            every_pointer(&json, "", &mut all);
            for some in all.chunks(POINTERS_MAX) {
                let some: Vec<&str> = some.iter().map(String::as_str).collect();
                let found = extract(text.as_bytes(), &pointers(&some)).expect("valid");
                for (pointer, found) in some.iter().zip(found) {
                    let expected = json.pointer(pointer).expect("there");
                    let raw = found.expect("found").raw();
                    let read: serde_json::Value = serde_json::from_str(raw).expect("reads");
                    prop_assert_eq!(&read, expected);
                    let text = found.expect("found").as_text();
                    prop_assert_eq!(text.as_deref(), expected.as_str());
                    if let Some(elements) = found.expect("found").elements() {
                        let raws: Vec<&str> = elements.map(Value::raw).collect();
                        let expected: Vec<&RawValue> = serde_json::from_str(raw).expect("reads");
                        let expected: Vec<&str> = expected.into_iter().map(RawValue::get).collect();
                        prop_assert_eq!(raws, expected);
                    }
                }
            }
        }

        #[test]
        fn bytes_are_json_exactly_where_serde_json_says_so(
            json in any_json(),
            edits in prop::collection::vec((any::<prop::sample::Index>(), "[\\[\\]{}\",:\\\\u0-9eE.+\\- \ttnrf\u{0}é]"), 0..4),
        ) {
            // A valid document with a few characters overwritten: most have one mistake.
            let mut text: Vec<char> = json.to_string().chars().collect();
            for (place, with) in edits {
                let place = place.index(text.len());
                text[place] = with.chars().next().expect("one");
            }
            let text: String = text.into_iter().collect();
            let expected = serde_json::from_str::<&RawValue>(&text).is_ok();
            prop_assert_eq!(extract(text.as_bytes(), &[]).is_ok(), expected, "{}", text);
        }

        #[test]
        fn no_bytes_make_the_parser_panic(body in prop::collection::vec(any::<u8>(), 0..64), texts in "[\\[{\"\\\\u:,0-9a-f]{0,40}") {
            let _either = extract(&body, &pointers(&["", "/a", "/0"]));
            let _either = extract(texts.as_bytes(), &pointers(&["", "/a", "/0"]));
        }
    }
}
