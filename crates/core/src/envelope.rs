//! What the body says once it is proven: how many events, and each one's id, type and time.

use std::time::Duration;

use bytes::Bytes;
use jiff::Timestamp;

use crate::arrival::Arrival;
use crate::key::Tenant;
use crate::presets::PresetEnvelope;
use crate::verify::Refusal;

/// Selectors as the config gives them; each one that is set replaces the preset's.
#[derive(Debug, Clone, Default)]
pub struct EnvelopeSpec {
    /// `event_id`.
    pub event_id: Option<IdSpec>,
    /// `event_type`.
    pub event_type: Option<String>,
    /// `occurred_at`.
    pub occurred_at: Option<String>,
    /// `items`: a JSON pointer to the array of events; `""` when the body is that array.
    pub items: Option<String>,
    /// `require`.
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
        /// Selectors of the fields.
        fields: Vec<String>,
        /// Equal ones are one event only within this span.
        within: Option<Duration>,
    },
}

/// A selector that cannot be used. `field` is the config key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SelectorError {
    /// The config key.
    pub field: &'static str,
    /// What is wrong.
    pub problem: String,
    /// What to do about it.
    pub hint: String,
}

/// Where in a request something is found; decides whether the signature covers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin<'a> {
    /// In the body.
    Body,
    /// In a header of this name (lower case).
    Header(&'a str),
    /// In the URL's query.
    Query,
}

/// Compiled selectors.
#[derive(Debug)]
pub struct Envelope {}

/// One event of a body.
#[derive(Debug, Clone)]
pub struct Item {
    /// Which event it is.
    pub identity: Identity,
    /// Its type.
    pub event_type: Option<Box<str>>,
    /// When it happened.
    pub occurred_at: Option<Timestamp>,
    /// The tenant, where `tenant_from` says so.
    pub tenant: Option<Tenant>,
    /// Its bytes: a slice of the body, never a copy.
    pub body: Bytes,
}

/// The sender's id, or what stands for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Identity {
    /// The sender's own.
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
    /// Compiles the preset's selectors, replaced by the config's where those are set.
    pub fn build(
        _preset: Option<&'static PresetEnvelope>,
        _spec: &EnvelopeSpec,
    ) -> Result<Self, SelectorError> {
        Ok(Self {})
    }

    /// Where the id comes from: the replay guard stands in where that is not signed.
    pub fn id_origin(&self) -> Origin<'_> {
        Origin::Body
    }

    /// Reads a proven body. Empty where it carries no event.
    pub fn read(&self, _arrival: &Arrival) -> Result<Vec<Item>, Refusal> {
        Ok(Vec::new())
    }
}
