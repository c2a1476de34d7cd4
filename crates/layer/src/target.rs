//! The method and path of a request in a normal form, which routes and scopes use. The service behind gets
//! the bytes that the client sent.
//!
//! Servers disagree on which spellings of a path are the same. If the app read `//charges` as `/charges` and
//! this layer did not, a client could avoid a required key. So every spelling that some server resolves is
//! resolved here.

use std::borrow::Cow;

use http::{HeaderMap, HeaderName, Method};

use crate::limits::DECODE_ROUNDS_MAX;

/// The headers that override the method of a request in some frameworks.
pub const METHOD_OVERRIDES: [HeaderName; 3] = [
    HeaderName::from_static("x-http-method-override"),
    HeaderName::from_static("x-http-method"),
    HeaderName::from_static("x-method-override"),
];

/// A path that cannot be compared: it contains control characters, is not UTF-8, or is percent-encoded too
/// often.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BadPath;

/// The path of a request in two readings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Path {
    /// Decoded and in lower case, without empty segments, `.`, `..` and path parameters (`;…`). The path
    /// begins with a slash, and ends with one only if it is the root.
    normal: String,
    /// Decoded and in lower case only, for servers that resolve nothing.
    plain: String,
}

impl Path {
    pub(crate) fn of(path: &str) -> Result<Self, BadPath> {
        let plain = decoded(path)?.replace('\\', "/").to_lowercase();
        if plain.chars().any(char::is_control) {
            return Err(BadPath);
        }
        let mut segments = Vec::new();
        for segment in plain.split('/') {
            // Java servers treat the text after a `;` as a parameter and drop it first.
            match segment.split(';').next().unwrap_or_default() {
                "" | "." => {}
                ".." => drop(segments.pop()),
                named => segments.push(named),
            }
        }
        let normal = format!("/{}", segments.join("/"));
        Ok(Self { normal, plain })
    }

    /// The normal form, which the scope uses.
    pub(crate) fn normal(&self) -> &str {
        &self.normal
    }

    /// The forms that a route is compared with.
    pub(crate) fn readings(&self) -> [&str; 2] {
        [&self.normal, &self.plain]
    }
}

/// Whether a segment of the path is `.` or `..` for some server, in any spelling.
pub fn has_dot_segments(path: &str) -> bool {
    let mut bytes = path.as_bytes().to_vec();
    for _ in 0..DECODE_ROUNDS_MAX {
        bytes = decoded_once(&bytes);
    }
    bytes.split(|byte| matches!(byte, b'/' | b'\\')).any(|segment| {
        let named = segment.split(|byte| *byte == b';').next().unwrap_or_default();
        named == b"." || named == b".."
    })
}

/// Percent-decodes until nothing changes: a server that decodes once more would otherwise see another path.
/// An invalid escape stays as it is.
fn decoded(path: &str) -> Result<String, BadPath> {
    let mut text = path.to_owned();
    for _ in 0..DECODE_ROUNDS_MAX {
        let once = String::from_utf8(decoded_once(text.as_bytes())).map_err(|_| BadPath)?;
        if once == text {
            return Ok(text);
        }
        text = once;
    }
    Err(BadPath)
}

fn decoded_once(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let escape = bytes.get(at + 1..at + 3).filter(|_| bytes[at] == b'%');
        match escape.and_then(|digits| hex::decode(digits).ok()) {
            Some(byte) => {
                out.extend(byte);
                at += 3;
            }
            None => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    out
}

/// The methods that a service may use for a request: its own first, then those in [`METHOD_OVERRIDES`]. All
/// methods are upper case, since some frameworks convert them.
pub(crate) fn methods<'a>(
    method: &'a Method,
    headers: &HeaderMap,
) -> impl Iterator<Item = Cow<'a, Method>> {
    // If one line has several methods, some frameworks use the first and some the last.
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    let lines = METHOD_OVERRIDES.into_iter().flat_map(|name| headers.get_all(name));
    let named = lines.flat_map(|line| line.as_bytes().split(move |byte| !is_letter(*byte)));
    let named = named.filter(|word| !word.is_empty());
    let named = named.filter_map(|word| Method::from_bytes(&word.to_ascii_uppercase()).ok());
    let named: Vec<_> = named.map(Cow::Owned).collect();
    std::iter::once(in_capitals(method)).chain(named)
}

/// All of [`methods`] joined, such as `POST+DELETE`, for the scope.
pub(crate) fn all_methods(method: &Method, headers: &HeaderMap) -> Method {
    let named: Vec<String> = methods(method, headers).map(|method| method.to_string()).collect();
    Method::from_bytes(named.join("+").as_bytes()).unwrap_or_else(|_| method.clone())
}

fn in_capitals(method: &Method) -> Cow<'_, Method> {
    if !method.as_str().bytes().any(|byte| byte.is_ascii_lowercase()) {
        return Cow::Borrowed(method);
    }
    match Method::from_bytes(&method.as_str().as_bytes().to_ascii_uppercase()) {
        Ok(upper) => Cow::Owned(upper),
        Err(_) => Cow::Borrowed(method),
    }
}

/// Whether a request bypasses the layer, with or without a key: it is safe, or a CONNECT, which opens a
/// tunnel and has no answer to store. A safe method with an override to an unsafe one does not bypass it.
pub fn is_passed_on(method: &Method, headers: &HeaderMap) -> bool {
    methods(method, headers).all(|method| changes_nothing(&method))
}

/// Whether a method bypasses the layer; see [`is_passed_on`].
pub(crate) fn changes_nothing(method: &Method) -> bool {
    method.is_safe() || method == Method::CONNECT
}

#[cfg(test)]
mod tests {
    use super::*;

    fn normal(path: &str) -> Result<String, BadPath> {
        Path::of(path).map(|path| path.normal)
    }

    #[test]
    fn every_spelling_of_a_path_is_one_path() {
        for spelling in [
            "/charges",
            "/charges/",
            "//charges",
            "/charges//",
            "/CHARGES",
            "/%63harges",
            "/%43harges",
            "/%2563harges",
            "/%252563harges",
            "/charges;a",
            "/charges;a=1;b=2",
            "/;x/charges",
            "/..;/charges",
            "/..;a=b/charges",
            "/x/..;/charges",
            "/./charges",
            "/%2e/charges",
            "/x/../charges",
            "/x/%2e%2e/charges",
            "/x/.%2E/charges",
            "/x/%252e%252e/charges",
            "/../charges",
            "/../../charges",
            "/charges%2f",
            "/x%2f..%2fcharges",
            "/charges%252f",
            "\\charges",
            "/\\charges",
            "/%5ccharges",
            "/x/..\\charges",
            "/charges%3ba",
            "/charges/.",
            "/charges/x/..",
        ] {
            assert_eq!(normal(spelling), Ok("/charges".to_owned()), "{spelling}");
        }
    }

    #[test]
    fn other_paths_are_other_paths() {
        for (path, expected) in [
            ("/", "/"),
            ("", "/"),
            ("/..", "/"),
            ("/charges/7", "/charges/7"),
            ("/charges.json", "/charges.json"),
            ("/charges%20", "/charges "),
            ("/100%", "/100%"),
            ("/100%25", "/100%"),
            ("/50%25%20off", "/50% off"),
            ("/%C3%A4", "/ä"),
            ("/...", "/..."),
            ("/a/b/../c", "/a/c"),
        ] {
            assert_eq!(normal(path), Ok(expected.to_owned()), "{path}");
        }
    }

    #[test]
    fn a_path_that_cannot_be_compared_is_refused() {
        for path in
            ["/charges%00", "/%00charges", "/charges%2500", "/a%0ab", "/a%7f", "/%ff", "/%c3"]
        {
            assert_eq!(normal(path), Err(BadPath), "{path}");
        }
        let often = format!("/%{}41", "25".repeat(DECODE_ROUNDS_MAX));
        assert_eq!(normal(&often), Err(BadPath));
    }

    fn named(method: &str, overrides: &[(HeaderName, &str)]) -> (Vec<String>, bool) {
        let mut headers = HeaderMap::new();
        for (name, value) in overrides {
            headers.append(name, value.parse().unwrap());
        }
        let method = Method::from_bytes(method.as_bytes()).unwrap();
        let all = methods(&method, &headers).map(|method| method.to_string()).collect();
        (all, is_passed_on(&method, &headers))
    }

    #[test]
    fn a_method_is_in_upper_case_and_joined_with_its_overrides() {
        let [one, two, three] = METHOD_OVERRIDES;
        let check = |method, overrides: &[(HeaderName, &str)], expected: &[&str], passed_on| {
            let (all, is_passed_on) = named(method, overrides);
            assert_eq!(all, expected, "{method}");
            assert_eq!(is_passed_on, passed_on, "{method}: {expected:?}");
        };
        check("POST", &[], &["POST"], false);
        check("post", &[], &["POST"], false);
        check("get", &[], &["GET"], true);
        check("GET", &[(one.clone(), "post")], &["GET", "POST"], false);
        check("GET", &[(two, " POST ")], &["GET", "POST"], false);
        check("GET", &[(one.clone(), "HEAD")], &["GET", "HEAD"], true);
        check("POST", &[(three, "DELETE"), (one.clone(), "?")], &["POST", "DELETE"], false);
        // If one line has several methods, some frameworks use the first and some the last.
        check("GET", &[(one, "HEAD, delete;")], &["GET", "HEAD", "DELETE"], false);
    }
}
