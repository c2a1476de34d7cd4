//! The senders Hapax knows: how each signs, where its id, type and time are, and how it behaves.

use crate::challenge::Challenge;

/// One sender, described by data.
#[derive(Debug)]
pub struct Preset {
    /// The name used in the config: `stripe`.
    pub name: &'static str,
    /// The name people use: `Stripe`.
    pub title: &'static str,
    /// Where id, type and time are.
    pub envelope: PresetEnvelope,
    /// Whether a retry is signed again with a fresh timestamp.
    pub signs_retries_afresh: bool,
    /// How it must be answered.
    pub ack: Ack,
    /// The handshake it has.
    pub challenge: Option<Challenge>,
}

/// Where a sender puts id, type and time. The selectors are those of the config: a JSON pointer,
/// `header:x`, `form:Name`, `query:name`; see [`crate::envelope`].
#[derive(Debug)]
pub struct PresetEnvelope {
    /// JSON pointer of the array of events in a body that carries several (`""` = the body itself
    /// is the array). A `*` segment means every element.
    pub items: Option<&'static str>,
    /// Which event it is.
    pub id: PresetId,
    /// Selectors, joined with `.` where several are set and present; empty where there is no type.
    pub event_type: &'static [&'static str],
    /// When it happened.
    pub occurred_at: Option<&'static str>,
    /// What the body is written in.
    pub body: BodyFormat,
}

/// What tells one event of a sender from another.
#[derive(Debug)]
pub enum PresetId {
    /// The sender's own id.
    Selector(&'static str),
    /// The first of these that is present.
    FirstOf(&'static [&'static str]),
    /// All of these together.
    Joined(&'static [&'static str]),
    /// No id of the sender's: a hash of stable fields, where a missing one counts as absent and
    /// `body` means the whole body (of the item).
    Hash {
        /// Selectors of the fields.
        fields: &'static [&'static str],
        /// Equal ones are one event only within so many seconds.
        within: Option<u64>,
    },
}

/// What a body is written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BodyFormat {
    /// JSON.
    Json,
    /// `application/x-www-form-urlencoded`.
    Form,
    /// Either, or something else.
    Any,
}

/// How a sender must be answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ack {
    /// 200 or 202 with a JSON body.
    #[default]
    Plain,
    /// 200 with an empty body.
    Empty,
    /// Always 200, never 202: anything else is a failure to this sender.
    Only200,
}

/// The preset of that name.
pub fn find(_name: &str) -> Option<&'static Preset> {
    None
}

/// All presets, by name.
pub fn all() -> &'static [Preset] {
    &[]
}

/// The preset whose name is closest to a mistyped one.
pub fn nearest(_name: &str) -> Option<&'static str> {
    None
}
