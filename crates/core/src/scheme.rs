//! How a request proves where it came from.

use http::HeaderMap;
use jiff::Timestamp;

use crate::arrival::Arrival;
use crate::envelope::Origin;
use crate::presets::Preset;
use crate::source::SourceSpec;
use crate::verify::Refusal;

/// `[sources.NAME.scheme]` as the config gives it.
#[derive(Debug, Clone, Default)]
pub struct CustomScheme {
    /// `hmac-sha256`, `hmac-sha1` or `hmac-sha512`.
    pub algorithm: Option<String>,
    /// The header that carries the signature.
    pub header: Option<String>,
    /// What stands before it.
    pub prefix: Option<String>,
    /// `hex` or `base64`.
    pub encoding: Option<String>,
    /// What is signed, such as `{timestamp}.{body}`.
    pub content: Option<String>,
    /// Where the timestamp is, such as `header:x-timestamp`.
    pub timestamp: Option<String>,
    /// How the secret is written: `utf8`, `base64` or `hex`.
    pub secret_encoding: Option<String>,
}

/// Why a scheme cannot be built.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchemeError {
    /// The config key below `[sources.NAME]`.
    pub field: &'static str,
    /// What is wrong.
    pub problem: String,
    /// What to do about it.
    pub hint: String,
}

impl SchemeError {
    /// All three at once.
    pub fn new(field: &'static str, problem: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { field, problem: problem.into(), hint: hint.into() }
    }
}

/// A compiled scheme with its keys.
#[derive(Debug)]
pub struct Scheme {}

/// Proof that a request was signed by one of the source's secrets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Authentic {
    /// The timestamp inside the signed content.
    pub signed_at: Option<Timestamp>,
    /// Which secret, by its place in the config.
    pub secret: usize,
}

impl Scheme {
    /// Compiles a preset's scheme with the keys of `spec`.
    pub fn of_preset(_preset: &'static Preset, _spec: &SourceSpec) -> Result<Self, SchemeError> {
        Ok(Self {})
    }

    /// Compiles `[sources.NAME.scheme]`.
    pub fn of_custom(_custom: &CustomScheme, _spec: &SourceSpec) -> Result<Self, SchemeError> {
        Ok(Self {})
    }

    /// Checks the signature over the raw bytes, in constant time. The window is not judged here.
    pub fn authenticate(&self, _arrival: &Arrival, _now: Timestamp) -> Result<Authentic, Refusal> {
        Err(Refusal::Missing("no scheme".into()))
    }

    /// The cheap path: what is missing from these headers, so that a request which cannot verify is
    /// refused before its body is read.
    pub fn missing(&self, _headers: &HeaderMap) -> Option<&str> {
        None
    }

    /// Whether a timestamp is part of what is signed.
    pub fn signs_time(&self) -> bool {
        false
    }

    /// Whether a value from there is part of what is signed.
    pub fn signs(&self, _origin: Origin<'_>) -> bool {
        false
    }

    /// Headers whose value is itself the secret (tokens, basic auth): never kept, never shown.
    pub fn secret_headers(&self) -> Vec<String> {
        Vec::new()
    }
}
