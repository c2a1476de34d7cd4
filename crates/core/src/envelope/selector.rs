//! Selectors: text that selects a value of a request. Selectors are compiled so that all JSON pointers of a
//! level are found in one pass.

use std::borrow::Cow;

use http::HeaderName;

use super::form;
use super::{Origin, SelectorError};
use crate::arrival::Arrival;
use crate::json::{POINTERS_MAX, Pointer, PointerError, Value};
use crate::presets::BodyFormat;
use crate::scheme::SignedContent;
use crate::verify::Refusal;

/// One compiled selector.
#[derive(Debug)]
pub(super) struct Selector {
    text: Box<str>,
    location: ValueLocation,
}

#[derive(Debug)]
enum ValueLocation {
    /// The pointer with this index on this level.
    Json { level: usize, index: usize },
    /// A header.
    Header(HeaderName),
    /// A field of a form.
    Form(Box<str>),
    /// A parameter of the URL.
    Query(Box<str>),
    /// The whole body, or the event's part of it.
    Body,
    /// The hash of the signed content.
    Signed,
}

impl Selector {
    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// Whether its value becomes a digest, and is not an id of the sender.
    pub(super) fn is_digest(&self) -> bool {
        matches!(self.location, ValueLocation::Body | ValueLocation::Signed)
    }

    pub(super) fn origin(&self) -> Origin<'_> {
        match &self.location {
            ValueLocation::Json { .. } => Origin::Pointer(&self.text),
            ValueLocation::Form(_) => Origin::Field,
            ValueLocation::Body => Origin::Body,
            ValueLocation::Signed => Origin::Signed,
            ValueLocation::Header(name) => Origin::Header(name.as_str()),
            ValueLocation::Query(_) => Origin::Query,
        }
    }
}

/// The pointers of one level of a body: those of the selectors, then the arrays of the next level.
#[derive(Debug, Default)]
pub(super) struct BodyLevel {
    pub(super) pointers: Vec<Pointer>,
    /// How many of the last pointers are arrays of the next level: none on the level of the events.
    pub(super) arrays: usize,
}

impl BodyLevel {
    pub(super) fn array_names(&self) -> String {
        let arrays = &self.pointers[self.pointers.len() - self.arrays..];
        let names: Vec<&str> = arrays
            .iter()
            .map(|pointer| if pointer.as_str().is_empty() { "the top" } else { pointer.as_str() })
            .collect();
        names.join(" or ")
    }
}

/// Turns the selectors of a source into [`BodyLevel`]s of pointers.
#[derive(Debug)]
pub(super) struct Compiler {
    /// The pointers of the selectors, for each level.
    asked: Vec<Vec<Pointer>>,
    /// The arrays of the next level, for each level but the last.
    arrays: Vec<Vec<Pointer>>,
    has_form: Option<&'static str>,
    has_pointer: Option<&'static str>,
}

/// How many `*` an `items` may have. Meta needs one, and each multiplies the work.
const STARS_MAX: usize = 3;

impl Compiler {
    pub(super) fn new(items: Option<&str>) -> Result<Self, SelectorError> {
        let arrays = items.map(arrays_of).transpose()?.unwrap_or_default();
        let has_pointer = items.map(|_| "items");
        let asked = vec![Vec::new(); arrays.len() + 1];
        Ok(Self { asked, arrays, has_form: None, has_pointer })
    }

    pub(super) fn selectors(
        &mut self,
        field: &'static str,
        texts: &[impl AsRef<str>],
    ) -> Result<Vec<Selector>, SelectorError> {
        texts.iter().map(|text| self.selector(field, text.as_ref())).collect()
    }

    /// Selectors, one of which may be `body`.
    pub(super) fn hash_fields(
        &mut self,
        texts: &[impl AsRef<str>],
    ) -> Result<Vec<Selector>, SelectorError> {
        let field = |text: &str| match text {
            "body" => Ok(Selector { text: text.into(), location: ValueLocation::Body }),
            text => self.selector("event_id", text),
        };
        texts.iter().map(AsRef::as_ref).map(field).collect()
    }

    /// Selectors of a preset, one of which may be `signed`: the hash of the signed content.
    pub(super) fn preset_fields(&mut self, texts: &[&str]) -> Result<Vec<Selector>, SelectorError> {
        let mut field = |text: &&str| match *text {
            "signed" => Ok(Selector { text: (*text).into(), location: ValueLocation::Signed }),
            "body" => Ok(Selector { text: (*text).into(), location: ValueLocation::Body }),
            text => self.selector("event_id", text),
        };
        texts.iter().map(&mut field).collect()
    }

    pub(super) fn selector(
        &mut self,
        field: &'static str,
        text: &str,
    ) -> Result<Selector, SelectorError> {
        let location = match text.split_once(':') {
            Some(("header", name)) => ValueLocation::Header(header(field, name)?),
            Some(("form", name)) => {
                self.has_form.get_or_insert(field);
                ValueLocation::Form(named(field, "form", name)?)
            }
            Some(("query", name)) => ValueLocation::Query(named(field, "query", name)?),
            Some(("outer", path)) => self.pointer(field, 0, path)?,
            Some(("parent", path)) => {
                self.pointer(field, self.asked.len().saturating_sub(2), path)?
            }
            Some(_) | None => self.pointer(field, self.asked.len() - 1, text)?,
        };
        Ok(Selector { text: text.into(), location })
    }

    fn pointer(
        &mut self,
        field: &'static str,
        level: usize,
        path: &str,
    ) -> Result<ValueLocation, SelectorError> {
        if path.is_empty() {
            return Err(error(
                field,
                "a selector is empty".to_owned(),
                "write a JSON pointer such as \"/id\", or \"header:x-id\"",
            ));
        }
        let pointer = parse(field, path)?;
        self.has_pointer.get_or_insert(field);
        let asked = &mut self.asked[level];
        let index = asked.iter().position(|known| *known == pointer).unwrap_or_else(|| {
            asked.push(pointer);
            asked.len() - 1
        });
        Ok(ValueLocation::Json { level, index })
    }

    /// The format of the body that these selectors need.
    pub(super) fn format(&self, preset: Option<BodyFormat>) -> Result<BodyFormat, SelectorError> {
        let batched = !self.arrays.is_empty();
        match (preset, self.has_pointer, self.has_form) {
            (Some(BodyFormat::Json), _, Some(field)) => Err(error(
                field,
                "this provider sends JSON, not forms".to_owned(),
                "use a JSON pointer such as \"/id\"",
            )),
            (Some(BodyFormat::Form), Some(field), _) => Err(error(
                field,
                "this provider sends forms, not JSON".to_owned(),
                "use \"form:Name\"",
            )),
            (_, _, Some(field)) if batched => Err(error(
                field,
                "a form does not carry several events".to_owned(),
                "leave out \"items\", or use JSON pointers",
            )),
            (Some(BodyFormat::Any | BodyFormat::JsonOrForm), _, _) if batched => {
                Ok(BodyFormat::Json)
            }
            (Some(format), _, _) => Ok(format),
            (None, Some(_), None) => Ok(BodyFormat::Json),
            (None, None, Some(_)) => Ok(BodyFormat::Form),
            (None, Some(_), Some(_)) => Ok(BodyFormat::JsonOrForm),
            (None, None, None) => Ok(BodyFormat::Any),
        }
    }

    pub(super) fn finish(self) -> Result<Vec<BodyLevel>, SelectorError> {
        let arrays = self.arrays.into_iter().chain([Vec::new()]);
        let level = |(mut pointers, arrays): (Vec<Pointer>, Vec<Pointer>)| {
            let count = arrays.len();
            pointers.extend(arrays);
            if pointers.len() > POINTERS_MAX {
                return Err(error(
                    "require",
                    format!("more than {POINTERS_MAX} selectors on one source"),
                    "require only what the handlers cannot do without",
                ));
            }
            Ok(BodyLevel { pointers, arrays: count })
        };
        self.asked.into_iter().zip(arrays).map(level).collect()
    }
}

/// The arrays of each level of an `items` path. `/entry/*/changes|messaging` has the array `/entry` on
/// the first level, and `/changes` and `/messaging` on the level of its elements.
fn arrays_of(items: &str) -> Result<Vec<Vec<Pointer>>, SelectorError> {
    let mut steps = vec![String::new()];
    if !items.is_empty() {
        parse("items", items)?;
        for segment in items.split('/').skip(1) {
            match (segment, steps.last_mut()) {
                ("*", _) | (_, None) => steps.push(String::new()),
                (segment, Some(step)) => {
                    step.push('/');
                    step.push_str(segment);
                }
            }
        }
    }
    if steps.len() > STARS_MAX + 1 {
        return Err(error(
            "items",
            format!("more than {STARS_MAX} \"*\" in one path"),
            "use a shorter path",
        ));
    }
    let several = |step: &String| {
        let (above, last) = step.rsplit_once('/').unwrap_or(("", ""));
        if step.is_empty() {
            return Ok(vec![parse("items", "")?]);
        }
        last.split('|').map(|key| parse("items", &format!("{above}/{key}"))).collect()
    };
    steps.iter().map(several).collect()
}

fn parse(field: &'static str, path: &str) -> Result<Pointer, SelectorError> {
    Pointer::parse(path).map_err(|problem| {
        let hint = match problem {
            PointerError::NoSlash => {
                let dotted = path.trim_start_matches('$').trim_start_matches('.');
                let slashed = dotted.replace('.', "/");
                format!("did you mean \"/{slashed}\"? Or one of header:, form:, query:, outer:")
            }
            PointerError::BadEscape => "write \"~0\" where a key has a \"~\"".to_owned(),
        };
        SelectorError { field, problem: format!("\"{path}\": {problem}"), hint }
    })
}

fn header(field: &'static str, name: &str) -> Result<HeaderName, SelectorError> {
    HeaderName::try_from(name.trim()).map_err(|_| {
        error(
            field,
            format!("\"{name}\" is not a header name"),
            "write it as the sender does: \"header:x-event-id\"",
        )
    })
}

fn named(field: &'static str, kind: &str, name: &str) -> Result<Box<str>, SelectorError> {
    if name.is_empty() {
        return Err(error(
            field,
            format!("\"{kind}:\" has no name"),
            "write the name after the colon",
        ));
    }
    Ok(name.into())
}

fn error(field: &'static str, problem: String, hint: &str) -> SelectorError {
    SelectorError { field, problem, hint: hint.to_owned() }
}

/// A value that a selector found.
#[derive(Debug, Clone)]
pub(super) enum FoundValue<'a> {
    /// From a header, a form or the query.
    Text(Cow<'a, str>),
    /// From JSON.
    Json(Value<'a>),
}

impl<'a> FoundValue<'a> {
    /// Text, or an integer as written.
    pub(super) fn as_id_text(&self) -> Option<Cow<'a, str>> {
        match self {
            Self::Text(text) => Some(text.clone()),
            Self::Json(value) => value.as_id_text(),
        }
    }

    /// Any scalar as text: a type may be a number.
    pub(super) fn loose(&self) -> Option<Cow<'a, str>> {
        match self {
            Self::Text(text) => Some(text.clone()),
            Self::Json(value) => match value.raw().as_bytes().first() {
                Some(b'"') => value.as_text(),
                Some(b'{' | b'[' | b'n') | None => None,
                Some(_) => Some(Cow::Borrowed(value.raw())),
            },
        }
    }

    /// `true` or `false`, as JSON writes them without quotes.
    pub(super) fn as_flag(&self) -> Option<&'a str> {
        match self {
            Self::Json(value) => Some(value.raw()).filter(|raw| matches!(*raw, "true" | "false")),
            Self::Text(_) => None,
        }
    }

    pub(super) fn is_null(&self) -> bool {
        matches!(self, Self::Json(value) if value.is_null())
    }

    /// `null` or an empty text.
    pub(super) fn is_blank(&self) -> bool {
        self.is_null() || self.as_id_text().is_some_and(|text| text.is_empty())
    }
}

/// An authenticated request, and the hash of the signed content if an id needs it.
#[derive(Debug, Clone, Copy)]
pub(super) struct AuthenticRequest<'a> {
    pub(super) arrival: &'a Arrival,
    pub(super) signed: Option<&'a SignedContent>,
}

/// One event with the values that were found on each level of the body.
#[derive(Debug)]
pub(super) struct View<'a, 'f> {
    pub(super) request: AuthenticRequest<'a>,
    /// Whether the body is a form.
    pub(super) is_form: bool,
    /// The values of the pointers of each level. Empty if the body is not JSON.
    pub(super) found: &'f [Vec<Option<Value<'a>>>],
}

impl<'a> View<'a, '_> {
    /// The hash of the signed content.
    pub(super) fn signed(&self) -> Result<&'a [u8], Refusal> {
        match self.request.signed {
            Some(SignedContent::Whole(hash)) => Ok(hash),
            Some(SignedContent::Nothing | SignedContent::Items(_)) | None => {
                Err(Refusal::NoId("no content is signed that could be hashed into an id".into()))
            }
        }
    }

    /// The value of a selector, or `None`. A repeated value is malformed: a parser that takes the first
    /// and one that takes the last would see different events.
    pub(super) fn find(&self, selector: &Selector) -> Result<Option<FoundValue<'a>>, Refusal> {
        let arrival = self.request.arrival;
        let found = match &selector.location {
            ValueLocation::Json { level, index } => {
                let level = self.found.get(*level);
                let value = level.and_then(|found| found.get(*index).copied().flatten());
                return Ok(value.map(FoundValue::Json));
            }
            ValueLocation::Header(name) => single_header(arrival, name),
            ValueLocation::Form(name) if self.is_form => form::find(&arrival.body, name),
            ValueLocation::Form(_) | ValueLocation::Body | ValueLocation::Signed => Ok(None),
            ValueLocation::Query(name) => form::find(arrival.query().as_bytes(), name),
        };
        match found {
            Ok(found) => Ok(found.map(FoundValue::Text)),
            Err(problem) => Err(Refusal::Malformed(format!("{} {problem}", selector.text))),
        }
    }
}

fn single_header<'a>(
    arrival: &'a Arrival,
    name: &HeaderName,
) -> Result<Option<Cow<'a, str>>, &'static str> {
    let mut lines = arrival.headers.get_all(name).iter();
    let Some(line) = lines.next() else { return Ok(None) };
    if lines.next().is_some() {
        return Err("occurs twice");
    }
    match std::str::from_utf8(line.as_bytes()) {
        Ok(text) => Ok(Some(Cow::Borrowed(text))),
        Err(_) => Err("is not UTF-8"),
    }
}
