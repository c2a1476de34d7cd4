//! The URL of the current object that an event is about. The event is a hint, and the source of truth
//! decides. The engine fetches the object.
//!
//! A value of an event is percent-encoded as one path segment and never part of the host, so no sender
//! chooses which server is called.

use std::fmt::Write as _;
use std::time::Duration;

use http::{HeaderName, Uri};

use crate::presets::edits;
use crate::secret::Secret;
use crate::store::ClaimedEvent;

/// How the current object is fetched. Its headers may be secrets; `Debug` hides them.
#[derive(Debug, Clone)]
pub struct Refetch {
    /// The URL, with placeholders.
    pub url: RefetchUrl,
    /// The headers of the request. Each value is valid in a header.
    pub headers: Vec<(HeaderName, Secret)>,
    /// The time for the whole fetch, from the name lookup to the last byte.
    pub timeout: Duration,
    /// The largest object that is accepted.
    pub body_bytes_max: usize,
}

/// A URL with placeholders in its path or query.
#[derive(Clone, PartialEq, Eq)]
pub struct RefetchUrl {
    pieces: Vec<UrlPart>,
}

/// Why a URL is refused, and where in its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefetchError {
    /// The offset in bytes.
    pub at: usize,
    /// The problem in words.
    pub problem: String,
    /// How to fix the problem.
    pub hint: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum UrlPart {
    Text(String),
    Value(Placeholder),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Placeholder {
    Resource,
    EventId,
    EventType,
    Tenant,
}

impl RefetchUrl {
    /// Parses the placeholders and checks the rest: a URL with `http` or `https` and a host, without user
    /// or fragment.
    pub fn parse(text: &str) -> Result<Self, RefetchError> {
        let pieces = pieces(text)?;
        let whole = |problem: &str| RefetchError {
            at: 0,
            problem: problem.to_owned(),
            hint: "write the URL of the object: \"https://api.example.com/payouts/{resource}\""
                .to_owned(),
        };
        // Any value will do: once encoded, every value is plain text.
        let sample = joined(&pieces, |_| Ok("x".to_owned())).map_err(|problem| whole(&problem))?;
        let url: Uri = sample.parse().map_err(|_| whole("is not a URL"))?;
        match url.scheme_str() {
            Some("http" | "https") => {}
            Some(_) | None => return Err(whole("must begin with http:// or https://")),
        }
        if url.host().is_none_or(str::is_empty) {
            return Err(whole("names no host"));
        }
        if url.authority().is_some_and(|authority| authority.as_str().contains('@')) {
            return Err(whole("must not contain a user name: use `headers`"));
        }
        if text.contains('#') {
            return Err(whole("must not have a fragment: it is never sent"));
        }
        let path_at = text.find("://").and_then(|at| {
            let host = at + 3;
            text[host..].find(['/', '?']).map(|length| host + length)
        });
        let early = placeholders(text).find(|at| path_at.is_none_or(|path| *at < path));
        if let Some(at) = early {
            return Err(RefetchError {
                at,
                problem: "a placeholder cannot be part of the host".to_owned(),
                hint: "an event must not choose the server: use the placeholder in the path or the query"
                    .to_owned(),
            });
        }
        Ok(Self { pieces })
    }

    /// Whether it uses `{resource}`, which only an ordered handler has.
    pub fn names_resource(&self) -> bool {
        self.pieces.contains(&UrlPart::Value(Placeholder::Resource))
    }

    /// The URL for an event, or why there is none. The reason never quotes a value of the event.
    pub fn of(&self, event: &ClaimedEvent) -> Result<Uri, String> {
        let value = |placeholder| {
            let value = match placeholder {
                Placeholder::Resource => event.resource.as_deref(),
                Placeholder::EventId => Some(&*event.key.event_id),
                Placeholder::EventType => event.event_type.as_deref(),
                Placeholder::Tenant => Some(event.key.tenant.as_str()),
            };
            match value {
                Some(value) if value.split(['/', '\\']).any(is_dots) => Err(format!(
                    "a path segment from the event's {} consists only of dots",
                    placeholder.name()
                )),
                Some(value) if !value.is_empty() => Ok(encoded(value)),
                Some(_) | None => Err(format!("the event has no {}", placeholder.name())),
            }
        };
        let text = joined(&self.pieces, value)?;
        text.parse().map_err(|_| "with this event's values it is not a URL".to_owned())
    }
}

impl std::fmt::Debug for RefetchUrl {
    // A query may hold an API key.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RefetchUrl(hidden)")
    }
}

impl Placeholder {
    const ALL: [Self; 4] = [Self::Resource, Self::EventId, Self::EventType, Self::Tenant];

    fn name(self) -> &'static str {
        match self {
            Self::Resource => "resource",
            Self::EventId => "event_id",
            Self::EventType => "event_type",
            Self::Tenant => "tenant",
        }
    }

    fn named(name: &str) -> Result<Self, String> {
        if let Some(placeholder) = Self::ALL.into_iter().find(|known| known.name() == name) {
            return Ok(placeholder);
        }
        let near = Self::ALL
            .into_iter()
            .map(|known| (edits(&name.to_lowercase(), known.name()), known.name()))
            .filter(|(steps, _)| *steps <= (name.len() / 3).max(1))
            .min();
        let known = Self::ALL.map(|known| format!("{{{}}}", known.name())).join(" ");
        Err(match near {
            Some((_, near)) => format!("did you mean {{{near}}}? Known: {known}"),
            None => format!("known: {known}"),
        })
    }
}

/// The offset of each placeholder.
fn placeholders(text: &str) -> impl Iterator<Item = usize> {
    text.match_indices('{').map(|(at, _)| at)
}

fn pieces(text: &str) -> Result<Vec<UrlPart>, RefetchError> {
    let mut pieces = Vec::new();
    let mut at = 0;
    while let Some(open) = text[at..].find(['{', '}']).map(|length| at + length) {
        let stray = |problem: &str| RefetchError {
            at: open,
            problem: problem.to_owned(),
            hint: "a placeholder is a name in braces, such as {resource}".to_owned(),
        };
        if text[open..].starts_with('}') {
            return Err(stray("a } without its {"));
        }
        let close = text[open..].find('}').map(|length| open + length);
        let close = close.ok_or_else(|| stray("a { without its }"))?;
        let name = &text[open + 1..close];
        let placeholder = Placeholder::named(name).map_err(|hint| RefetchError {
            at: open,
            problem: format!("unknown placeholder {{{}}}", name.escape_debug()),
            hint,
        })?;
        pieces.push(UrlPart::Text(text[at..open].to_owned()));
        pieces.push(UrlPart::Value(placeholder));
        at = close + 1;
    }
    pieces.push(UrlPart::Text(text[at..].to_owned()));
    Ok(pieces)
}

/// Servers resolve `.` and `..` in a path, some even next to an encoded slash. Such a value would
/// fetch another object, or a list of all objects.
fn is_dots(part: &str) -> bool {
    matches!(part, "." | "..")
}

/// The URL with its values.
fn joined(
    pieces: &[UrlPart],
    value: impl Fn(Placeholder) -> Result<String, String>,
) -> Result<String, String> {
    let mut text = String::new();
    for piece in pieces {
        match piece {
            UrlPart::Text(plain) => text.push_str(plain),
            UrlPart::Value(placeholder) => text.push_str(&value(*placeholder)?),
        }
    }
    let path = text.split('?').next().unwrap_or_default();
    if path.split('/').any(is_dots) {
        return Err("a path segment consists only of dots".to_owned());
    }
    Ok(text)
}

/// Percent-encoded, as one segment of a path.
fn encoded(value: &str) -> String {
    let mut text = String::with_capacity(value.len());
    for byte in value.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                text.push(char::from(byte));
            }
            other => {
                write!(text, "%{other:02X}").expect("writing to a String never fails");
            }
        }
    }
    text
}
