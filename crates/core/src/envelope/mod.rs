//! Reads an authenticated body: how many events it holds, and the id, type and time of each.
//!
//! Selectors are compiled once, when the config is read. A body is then read in one strict pass
//! ([`crate::json`]), plus one for each element of a batch. The sender was authenticated before, by
//! [`verify`](mod@crate::verify).
//!
//! A selector is one of
//! - `/data/id`: a JSON pointer, relative to the event if a body holds several;
//! - `outer:/account`: a JSON pointer into the whole body, from inside a batch;
//! - `parent:/time`: a JSON pointer into the element around the array, where `items` has a `*`;
//! - `header:x-id`, `form:Name`, `query:name`.

pub(crate) mod form;
mod selector;
mod time;

use std::borrow::Cow;
use std::time::Duration;

use bytes::Bytes;
use jiff::Timestamp;

use crate::arrival::Arrival;
use crate::json::{Pointer, Value};
use crate::key::{KeyHash, Tenant};
use crate::limits::{EVENT_ID_BYTES_MAX, EVENT_TYPE_BYTES_MAX, ITEMS_MAX};
use crate::message::{OWN_TENANT, own_tenant_fault};
use crate::presets::{BodyFormat, PresetEnvelope, PresetId};
use crate::scheme::SignedContent;
use crate::scheme::coverage::{BodyCovered, Coverage, Covered};
use crate::verify::Refusal;
use selector::{AuthenticRequest, BodyLevel, Compiler, FoundValue, Selector, View};

/// The selectors of the config. Each one that is set replaces the preset's.
#[derive(Debug, Clone, Default)]
pub struct EnvelopeSpec {
    /// `event_id`.
    pub event_id: Option<IdSpec>,
    /// `event_type`.
    pub event_type: Option<String>,
    /// `occurred_at`.
    pub occurred_at: Option<String>,
    /// `items`: a JSON pointer to the array of events; `""` when the body is that array. A `*`
    /// segment matches every element, and `a|b` as the last segment selects both arrays. Without such an
    /// array, the value that should contain it is one event.
    pub items: Option<String>,
    /// `require`: an event in which one of these is missing or `null` is malformed.
    pub require: Vec<String>,
    /// `tenant_from`.
    pub tenant_from: Option<String>,
}

/// `event_id = "/id"`, or `event_id = { hash = [..], within = "10m" }`.
#[derive(Debug, Clone)]
pub enum IdSpec {
    /// One selector.
    Selector(String),
    /// Derived from stable fields.
    Hash {
        /// Selectors of the fields; `body` is the whole body, or the event's part of a batch.
        fields: Vec<String>,
        /// Equal hashes are one event only within this span.
        within: Option<Duration>,
    },
}

/// Why a selector is refused. `field` is the config key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SelectorError {
    /// The config key.
    pub field: &'static str,
    /// The problem.
    pub problem: String,
    /// How to fix the problem.
    pub hint: String,
}

/// The part of a request that a value comes from. The origin decides whether the signature covers the
/// value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin<'a> {
    /// The bytes of the body.
    Body,
    /// The value in the body that this selector (`/id`, `outer:/id`) selects.
    Pointer(&'a str),
    /// A field of a form.
    Field,
    /// A header of this name (lower case).
    Header(&'a str),
    /// The URL's query.
    Query,
    /// Everything that was signed.
    Signed,
}

/// Compiled selectors.
#[derive(Debug)]
pub struct Envelope {
    format: BodyFormat,
    /// The kinds of JSON value that a body may be.
    top: Top,
    form_json: Option<&'static str>,
    /// The levels from the whole body down to one event; a single one if a body is one event.
    levels: Vec<BodyLevel>,
    id: Id,
    event_type: Vec<Selector>,
    type_rule: TypeRule,
    occurred_at: Option<Selector>,
    require: Vec<Selector>,
    tenant_from: Option<Selector>,
}

/// The kinds of JSON value that a body may be. A number or a string is never an event: its bytes
/// could be something else that was signed, such as a timestamp or the token of a handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Top {
    Object,
    ObjectOrArray,
}

/// How the type is made from its selectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TypeRule {
    /// All that are present, joined with `.`.
    Joined,
    /// The first that is present. One is required.
    FirstRequired,
}

#[derive(Debug)]
enum Id {
    /// The first of these that is present. If it is the body, the id is a digest of the body.
    FirstOf(Vec<Selector>),
    /// All of these.
    Joined(Vec<Selector>),
    /// A digest of these.
    Hash { fields: Vec<Selector>, within: Option<Duration> },
}

/// One event of a body.
#[derive(Debug, Clone)]
pub struct Item {
    /// The id that identifies the event.
    pub identity: Identity,
    /// Its type.
    pub event_type: Option<Box<str>>,
    /// When it happened.
    pub occurred_at: Option<Timestamp>,
    /// The tenant, if `tenant_from` is set.
    pub tenant: Option<Tenant>,
    /// Its bytes: a slice of the body, never a copy.
    pub body: Bytes,
}

/// The id of an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Identity {
    /// The sender's own id.
    Given(Box<str>),
    /// A digest (lower-case hex) of stable fields.
    Derived {
        /// 32 hex digits.
        digest: String,
        /// Equal digests are one event only within this span.
        within: Option<Duration>,
    },
}

impl Envelope {
    /// Compiles the selectors of the config, and those of the preset if the config sets none. Without a
    /// preset and a selector, the id is at `/id` and the type at `/type`.
    pub fn build(
        preset: Option<&'static PresetEnvelope>,
        spec: &EnvelopeSpec,
    ) -> Result<Self, SelectorError> {
        let items = spec.items.as_deref().or(preset.and_then(|preset| preset.items));
        let mut compiler = Compiler::new(items)?;
        let id = match (&spec.event_id, preset) {
            (Some(IdSpec::Selector(text)), _) => {
                Id::FirstOf(vec![compiler.selector("event_id", text)?])
            }
            (Some(IdSpec::Hash { fields, within }), _) => hash_id(&mut compiler, fields, *within)?,
            (None, Some(preset)) => preset_id(&mut compiler, &preset.id)?,
            (None, None) => Id::FirstOf(vec![compiler.selector("event_id", "/id")?]),
        };
        let require = compiler.selectors("require", &spec.require)?;
        let tenant_from = match &spec.tenant_from {
            Some(text) => Some(compiler.selector("tenant_from", text)?),
            None => None,
        };
        let occurred_at =
            spec.occurred_at.as_deref().or(preset.and_then(|preset| preset.occurred_at));
        let occurred_at = match occurred_at {
            Some(text) => Some(compiler.selector("occurred_at", text)?),
            None => None,
        };
        // The selectors of a custom source decide the format of its body. The default selector of the
        // type must not, so it is added after.
        let event_type = match (&spec.event_type, preset) {
            (Some(text), _) => vec![compiler.selector("event_type", text)?],
            (None, Some(preset)) => compiler.selectors("event_type", preset.event_type)?,
            (None, None) => Vec::new(),
        };
        let format = compiler.format(preset.map(|preset| preset.body))?;
        let event_type = match (&spec.event_type, preset) {
            (None, None) => vec![compiler.selector("event_type", "/type")?],
            (Some(_), _) | (_, Some(_)) => event_type,
        };
        let top = match (preset, items) {
            (Some(_), Some("")) | (None, _) => Top::ObjectOrArray,
            (Some(_), Some(_) | None) => Top::Object,
        };
        let form_json = preset.and_then(|preset| preset.form_json);
        let levels = compiler.finish()?;
        Ok(Self {
            format,
            top,
            form_json,
            levels,
            id,
            event_type,
            type_rule: TypeRule::Joined,
            occurred_at,
            require,
            tenant_from,
        })
    }

    /// The envelope for a source whose guard includes the type: the first selector with a value is
    /// the type, and an event without a type is malformed.
    pub fn with_type_required(self) -> Self {
        Self { type_rule: TypeRule::FirstRequired, ..self }
    }

    /// Whether one signature of this coverage is valid for only one id, so that the id alone recognises a
    /// replay. An id that is unique only within a span does not suffice, because the same bytes are another
    /// event later.
    fn id_is_signed(&self, coverage: &Coverage) -> bool {
        let fixed = |selector: &Selector| coverage.fixes(selector.origin());
        match &self.id {
            Id::FirstOf(selectors) => {
                for selector in selectors {
                    match fixed(selector) {
                        Covered::Always => return true,
                        Covered::Yes | Covered::Missing => {}
                        Covered::No => return false,
                    }
                }
                true
            }
            Id::Hash { within: Some(_), .. } => false,
            Id::Joined(selectors) | Id::Hash { fields: selectors, within: None } => selectors
                .iter()
                .all(|selector| matches!(fixed(selector), Covered::Yes | Covered::Always)),
        }
    }

    /// Whether one signature of this coverage is valid for more than one id, so that an event needs a
    /// guard. Where the sender signs decoded values and the id is a digest, the guard also recognises
    /// another spelling of the same content as a copy.
    pub fn needs_guard(&self, coverage: &Coverage) -> bool {
        let spelled_freely = self.may_derive() && coverage.body() != BodyCovered::Bytes;
        coverage.signs_something() && (spelled_freely || !self.id_is_signed(coverage))
    }

    /// Whether the id is a digest of signed values within a span.
    pub fn is_signed_span(&self, coverage: &Coverage) -> bool {
        match &self.id {
            Id::Hash { fields, within: Some(_) } => fields.iter().all(|selector| {
                matches!(coverage.fixes(selector.origin()), Covered::Yes | Covered::Always)
            }),
            Id::Hash { within: None, .. } | Id::FirstOf(_) | Id::Joined(_) => false,
        }
    }

    /// Whether an id of this source can be a digest.
    fn may_derive(&self) -> bool {
        match &self.id {
            Id::FirstOf(selectors) => selectors.iter().any(Selector::is_digest),
            Id::Joined(_) => false,
            Id::Hash { .. } => true,
        }
    }

    /// The origin of the tenant, if `tenant_from` is set.
    pub fn tenant_origin(&self) -> Option<Origin<'_>> {
        self.tenant_from.as_ref().map(Selector::origin)
    }

    /// The origins of the type.
    pub fn type_origins(&self) -> impl Iterator<Item = Origin<'_>> {
        self.event_type.iter().map(Selector::origin)
    }

    /// Whether an id uses the hash of the signed content.
    pub fn asks_for_signed(&self) -> bool {
        let selectors = match &self.id {
            Id::FirstOf(selectors) | Id::Joined(selectors) => selectors,
            Id::Hash { fields, .. } => fields,
        };
        selectors.iter().any(|selector| selector.origin() == Origin::Signed)
    }

    /// Whether this source can send a body of this content type. A missing content type fits. `text/plain`
    /// and `application/octet-stream` do not, since no sender of JSON or forms uses them.
    pub fn content_type_fits(&self, content_type: Option<&str>) -> bool {
        let Some(essence) = content_type.map(essence).filter(|essence| !essence.is_empty()) else {
            return true;
        };
        match self.format {
            BodyFormat::Any | BodyFormat::JsonOrForm => true,
            BodyFormat::Json => is_json(essence),
            BodyFormat::Form => essence.eq_ignore_ascii_case(FORM),
        }
    }

    /// Reads an authenticated body. Returns no items for a body without an event. One malformed event
    /// makes the whole body malformed, since the answer is for the whole request.
    ///
    /// The bytes decide the format, and never the content type: no sender signs the content type, and
    /// another reading of the same bytes would be another event. `signed` is the hash of the signed
    /// content, which [`Envelope::asks_for_signed`] requires.
    pub fn read(
        &self,
        arrival: &Arrival,
        signed: Option<&SignedContent>,
    ) -> Result<Vec<Item>, Refusal> {
        let request = AuthenticRequest { arrival, signed };
        match self.format {
            BodyFormat::Json => self.read_json(&request),
            BodyFormat::Form => self.read_form(&request),
            BodyFormat::JsonOrForm if begins_as_json(&arrival.body) => self.read_json(&request),
            BodyFormat::JsonOrForm => self.read_form(&request),
            BodyFormat::Any => {
                let pointers: &[Pointer] = &[];
                let is_json = begins_as_json(&arrival.body)
                    && crate::json::extract(&arrival.body, pointers).is_ok();
                if is_json { self.read_json(&request) } else { self.read_form(&request) }
            }
        }
    }

    /// Reads a form. JSON pointers find nothing in it, unless the form has a field with JSON.
    fn read_form(&self, request: &AuthenticRequest<'_>) -> Result<Vec<Item>, Refusal> {
        let arrival = request.arrival;
        let json = match self.form_json {
            Some(name) => match form::find(&arrival.body, name) {
                Ok(None) if arrival.body.is_empty() => return malformed("the body is empty"),
                Ok(json) => json,
                Err(problem) => return malformed(format!("form:{name} {problem}")),
            },
            None => None,
        };
        let found = match &json {
            Some(json) => vec![crate::json::extract(json.as_bytes(), &self.levels[0].pointers)?],
            None => Vec::new(),
        };
        let view = View { request: *request, is_form: true, found: &found };
        Ok(vec![self.item(&view, arrival.body.clone())?])
    }

    fn read_json(&self, request: &AuthenticRequest<'_>) -> Result<Vec<Item>, Refusal> {
        let body = &request.arrival.body;
        let mut items = Vec::with_capacity(1);
        let mut path = vec![crate::json::extract(body, &self.levels[0].pointers)?];
        match (body.trim_ascii_start().first(), self.top) {
            (Some(b'{'), _) | (Some(b'['), Top::ObjectOrArray) => {}
            (_, Top::Object) => return malformed("the body is not a JSON object"),
            (_, Top::ObjectOrArray) => {
                return malformed("the body is neither a JSON object nor an array");
            }
        }
        self.descend(request, None, &mut path, &mut items)?;
        Ok(items)
    }

    /// Reads the event at this level, or all events below it. `path` holds the values that were found on
    /// each level from the body down to here. `here` is `None` for the body itself.
    fn descend<'a>(
        &self,
        request: &AuthenticRequest<'a>,
        here: Option<Value<'a>>,
        path: &mut Vec<Vec<Option<Value<'a>>>>,
        items: &mut Vec<Item>,
    ) -> Result<(), Refusal> {
        let level = &self.levels[path.len() - 1];
        if level.arrays == 0 {
            if items.len() == ITEMS_MAX {
                return malformed(format!("more than {ITEMS_MAX} events in one body"));
            }
            let body = match here {
                Some(value) => request.arrival.body.slice_ref(value.raw().as_bytes()),
                None => request.arrival.body.clone(),
            };
            items.push(self.item(&View { request: *request, is_form: false, found: path }, body)?);
            return Ok(());
        }
        let asked = level.pointers.len() - level.arrays;
        let arrays: Vec<Value<'a>> = path[path.len() - 1][asked..]
            .iter()
            .flatten()
            .copied()
            .filter(|value| !value.is_null())
            .collect();
        if arrays.is_empty() {
            return self.read_whole(request, here, path, items);
        }
        for array in arrays {
            let Some(elements) = array.elements() else {
                return malformed(format!("no array of events at {}", level.array_names()));
            };
            for element in elements {
                let found = element.extract(&self.levels[path.len()].pointers)?;
                path.push(found);
                self.descend(request, Some(element), path, items)?;
                path.pop();
            }
        }
        Ok(())
    }

    /// Reads a value without the array of events as one event. Such a value must not be ignored and
    /// answered 200. A value without an id is refused.
    fn read_whole<'a>(
        &self,
        request: &AuthenticRequest<'a>,
        here: Option<Value<'a>>,
        path: &mut Vec<Vec<Option<Value<'a>>>>,
        items: &mut Vec<Item>,
    ) -> Result<(), Refusal> {
        let depth = path.len();
        let pointers = &self.levels[self.levels.len() - 1].pointers;
        let found = match here {
            Some(value) => value.extract(pointers)?,
            None => crate::json::extract(&request.arrival.body, pointers)?,
        };
        path.resize(self.levels.len() - 1, Vec::new());
        path.push(found);
        self.descend(request, here, path, items)?;
        path.truncate(depth);
        Ok(())
    }

    fn item(&self, view: &View<'_, '_>, body: Bytes) -> Result<Item, Refusal> {
        for required in &self.require {
            if view.find(required)?.is_none_or(|found| found.is_null()) {
                return malformed(format!("{} is required and missing", required.text()));
            }
        }
        let tenant = match &self.tenant_from {
            Some(selector) => match view.find(selector)? {
                Some(found) => match id_text(selector, &found)? {
                    // Messages of this tenant would be sent to the operator's endpoints.
                    name if name == OWN_TENANT => {
                        return malformed(format!("{}: {}", selector.text(), own_tenant_fault()));
                    }
                    name => Some(Tenant::new(name)),
                },
                None => return malformed(format!("no tenant at {}", selector.text())),
            },
            None => None,
        };
        Ok(Item {
            identity: self.identity(view, &body)?,
            event_type: self.type_of(view)?,
            occurred_at: match &self.occurred_at {
                Some(selector) => {
                    view.find(selector)?.and_then(|found| time::read(&found.loose()?))
                }
                None => None,
            },
            tenant,
            body,
        })
    }

    fn identity(&self, view: &View<'_, '_>, body: &Bytes) -> Result<Identity, Refusal> {
        match &self.id {
            Id::FirstOf(selectors) => first_of(view, selectors, body),
            Id::Joined(selectors) => joined(view, selectors, body),
            Id::Hash { fields, within } => {
                Ok(Identity::Derived { digest: digest(view, fields, body)?, within: *within })
            }
        }
    }

    fn type_of(&self, view: &View<'_, '_>) -> Result<Option<Box<str>>, Refusal> {
        let mut whole = String::new();
        for selector in &self.event_type {
            let found = view.find(selector)?;
            let Some(part) = found.as_ref().and_then(FoundValue::loose) else { continue };
            if part.is_empty() {
                continue;
            }
            if self.type_rule == TypeRule::FirstRequired && !whole.is_empty() {
                break;
            }
            if !whole.is_empty() {
                whole.push('.');
            }
            whole.push_str(&part);
        }
        if self.type_rule == TypeRule::FirstRequired && whole.is_empty() {
            let places: Vec<&str> = self.event_type.iter().map(Selector::text).collect();
            return malformed(format!("no event type at {}", places.join(", ")));
        }
        if whole.len() > EVENT_TYPE_BYTES_MAX || whole.contains(char::is_control) {
            return malformed("the event type is too long or has control characters");
        }
        Ok(Some(whole).filter(|whole| !whole.is_empty()).map(Into::into))
    }
}

const FORM: &str = "application/x-www-form-urlencoded";

/// A content type without its parameters.
fn essence(content_type: &str) -> &str {
    content_type.split(';').next().unwrap_or_default().trim()
}

fn is_json(essence: &str) -> bool {
    let suffix = essence.len().checked_sub("+json".len()).and_then(|at| essence.get(at..));
    ["application/json", "text/json"].iter().any(|json| essence.eq_ignore_ascii_case(json))
        || suffix.is_some_and(|suffix| suffix.eq_ignore_ascii_case("+json"))
}

/// Whether a body can only be JSON. No form begins with a brace, a bracket or a byte order mark; the
/// latter is then refused as JSON.
fn begins_as_json(body: &[u8]) -> bool {
    body.starts_with("\u{feff}".as_bytes())
        || matches!(body.trim_ascii_start().first(), Some(b'{' | b'['))
}

fn hash_id(
    compiler: &mut Compiler,
    fields: &[impl AsRef<str>],
    within: Option<Duration>,
) -> Result<Id, SelectorError> {
    let error = |problem: &str, hint: &str| SelectorError {
        field: "event_id",
        problem: problem.to_owned(),
        hint: hint.to_owned(),
    };
    if fields.is_empty() {
        return Err(error(
            "an id cannot be derived from no fields",
            "name what differs between two events: hash = [\"/type\", \"/data/id\", \"/created\"]",
        ));
    }
    if within.is_some_and(|within| within < Duration::from_secs(1)) {
        return Err(error(
            "\"within\" is shorter than a second",
            "make it longer than the sender retries, such as \"10m\"",
        ));
    }
    Ok(Id::Hash { fields: compiler.hash_fields(fields)?, within })
}

fn preset_id(compiler: &mut Compiler, id: &PresetId) -> Result<Id, SelectorError> {
    Ok(match id {
        PresetId::Selector(text) => Id::FirstOf(vec![compiler.selector("event_id", text)?]),
        PresetId::FirstOf(texts) => Id::FirstOf(compiler.preset_fields(texts)?),
        PresetId::Joined(texts) => Id::Joined(compiler.preset_fields(texts)?),
        PresetId::Hash { fields, within } => Id::Hash {
            fields: compiler.preset_fields(fields)?,
            within: within.map(Duration::from_secs),
        },
    })
}

fn first_of(
    view: &View<'_, '_>,
    selectors: &[Selector],
    body: &Bytes,
) -> Result<Identity, Refusal> {
    let alone = selectors.len() == 1;
    for selector in selectors {
        if selector.is_digest() {
            let digest = digest(view, std::slice::from_ref(selector), body)?;
            return Ok(Identity::Derived { digest, within: None });
        }
        match view.find(selector)? {
            // With several selectors, an empty value counts as missing.
            Some(found) if !alone && found.is_blank() => {}
            Some(found) => return Ok(Identity::Given(id_text(selector, &found)?.into())),
            None => {}
        }
    }
    no_id(selectors)
}

/// All parts, joined with `:`. A backslash before every `:` and `\` inside a part keeps parts apart.
fn joined(view: &View<'_, '_>, selectors: &[Selector], body: &Bytes) -> Result<Identity, Refusal> {
    let mut whole = String::new();
    for (place, selector) in selectors.iter().enumerate() {
        if place > 0 {
            whole.push(':');
        }
        if selector.is_digest() {
            whole.push_str(&digest(view, std::slice::from_ref(selector), body)?);
            continue;
        }
        let Some(found) = view.find(selector)? else { return no_id(selectors) };
        let part = match found.as_flag() {
            Some(flag) if place > 0 => flag.to_owned(),
            Some(_) | None => id_text(selector, &found)?,
        };
        for char in part.chars() {
            if matches!(char, ':' | '\\') {
                whole.push('\\');
            }
            whole.push(char);
        }
    }
    if whole.len() > EVENT_ID_BYTES_MAX {
        return malformed(format!("an event id longer than {EVENT_ID_BYTES_MAX} bytes"));
    }
    Ok(Identity::Given(whole.into()))
}

/// Hashes name, presence and value of each field, length-prefixed. So an absent and an empty field, `1`
/// and `"1"`, and values moved from one field to the next all make different hashes.
fn digest(view: &View<'_, '_>, fields: &[Selector], body: &Bytes) -> Result<String, Refusal> {
    let mut values: Vec<(&[u8], Cow<'_, [u8]>)> = Vec::with_capacity(fields.len());
    for field in fields {
        values.push(match view.find(field)? {
            _ if field.origin() == Origin::Body => (b"bytes", Cow::Borrowed(&body[..])),
            _ if field.origin() == Origin::Signed => (b"signed", view.signed()?.into()),
            Some(FoundValue::Text(text)) => (b"text", bytes_of(text)),
            Some(FoundValue::Json(value)) => match value.as_text() {
                Some(text) => (b"text", bytes_of(text)),
                None => (b"json", Cow::Borrowed(value.raw().as_bytes())),
            },
            None => (ABSENT, Cow::Borrowed(b"")),
        });
    }
    if values.iter().all(|(presence, _)| *presence == ABSENT) {
        return no_id(fields);
    }
    let parts = fields
        .iter()
        .zip(&values)
        .flat_map(|(field, (presence, value))| [field.text().as_bytes(), presence, &value[..]]);
    Ok(format!("{:?}", KeyHash::of(b"derived", parts)))
}

const ABSENT: &[u8] = b"absent";

fn bytes_of(text: Cow<'_, str>) -> Cow<'_, [u8]> {
    match text {
        Cow::Borrowed(text) => Cow::Borrowed(text.as_bytes()),
        Cow::Owned(text) => Cow::Owned(text.into_bytes()),
    }
}

/// The rules for ids of events and tenants: text, or an integer as written; not empty, not too long, no
/// control characters. Ids are compared byte for byte.
fn id_text(selector: &Selector, found: &FoundValue<'_>) -> Result<String, Refusal> {
    let problem = match found.as_id_text() {
        None => "is neither text nor an integer",
        Some(id) if id.is_empty() => "is empty",
        Some(id) if id.len() > EVENT_ID_BYTES_MAX => "is longer than 255 bytes",
        Some(id) if id.contains(char::is_control) => "has control characters",
        Some(id) => return Ok(id.into_owned()),
    };
    malformed(format!("the id at {} {problem}", selector.text()))
}

fn malformed<T>(problem: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal::Malformed(problem.into()))
}

fn no_id<T>(selectors: &[Selector]) -> Result<T, Refusal> {
    let places: Vec<&str> = selectors.iter().map(Selector::text).collect();
    Err(Refusal::NoId(format!("no event id at {}", places.join(", "))))
}
