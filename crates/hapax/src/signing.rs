//! What the command line and dev mode need of the core's signing side, in one place: which presets
//! can be signed for, the form their secrets take, a sample event, and the signature itself.

use std::collections::BTreeMap;

use bytes::Bytes;
use hapax_core::presets::Preset;
use hapax_core::{Arrival, Source, Timestamp};

/// Whether a request of this sender can be made with what its receiver has: not so where only the
/// sender holds the private key.
pub(crate) fn can_sign(_preset: &Preset) -> bool {
    false
}

/// The dev secret (64 hex digits) in the form that this preset's secrets have.
pub(crate) fn dev_secret(_preset: &Preset, hex: &str) -> String {
    hex.to_owned()
}

/// The parameters that this preset needs beside its secret, with values for dev mode.
pub(crate) fn dev_params(_preset: &Preset, _hex: &str) -> BTreeMap<String, String> {
    BTreeMap::new()
}

/// What signing adds to a request.
#[derive(Debug, Default)]
pub(crate) struct Signed {
    /// Headers to set.
    pub(crate) headers: Vec<(String, String)>,
    /// The body to send instead, where the signature is inside it.
    pub(crate) body: Option<Bytes>,
    /// The URL to send to instead, where it carries a part of the proof.
    pub(crate) url: Option<String>,
}

/// Signs `request` as the sender would, with the source's first secret. Where the event's id stands
/// in a header, it is `id`.
pub(crate) fn sign(
    source: &Source,
    _request: &Arrival,
    _id: Option<&str>,
    _now: Timestamp,
) -> Result<Signed, String> {
    Err(format!("signing for \"{}\" is not built yet", source.name()))
}

/// An event as a sender would write it, not signed yet.
pub(crate) struct Sample {
    /// The sender's id in it: the one asked for, or the nearest that this sender could have.
    pub(crate) event_id: String,
    /// What it adds beside the signature: content type, event type, delivery id.
    pub(crate) headers: Vec<(String, String)>,
    /// The body.
    pub(crate) body: Bytes,
}

/// A realistic event of this sender. Equal arguments make equal events.
pub(crate) fn sample(
    preset: &Preset,
    _event_type: Option<&str>,
    _event_id: &str,
    _now: Timestamp,
) -> Result<Sample, String> {
    Err(format!("there is no sample event for \"{}\" yet", preset.name))
}

/// What there is to say about a preset, in the words of the config.
pub(crate) struct Facts {
    /// Such as `HMAC-SHA256`.
    pub(crate) scheme: String,
    /// What the signature covers.
    pub(crate) signed: String,
    /// What it does not cover although it is read.
    pub(crate) not_signed: String,
    /// The selector of the id, or the fields it is derived from.
    pub(crate) event_id: String,
    /// The selector of the type.
    pub(crate) event_type: String,
    /// For how long a failed delivery is tried again.
    pub(crate) retries: String,
    /// Whether it has a secret, or only parameters.
    pub(crate) takes_secret: bool,
    /// The parameters it needs.
    pub(crate) params: Vec<String>,
}

/// Tells about a preset.
pub(crate) fn facts(_preset: &'static Preset) -> Facts {
    Facts {
        scheme: String::new(),
        signed: String::new(),
        not_signed: String::new(),
        event_id: String::new(),
        event_type: String::new(),
        retries: String::new(),
        takes_secret: true,
        params: Vec::new(),
    }
}
