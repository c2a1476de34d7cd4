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

/// Where a sender puts id, type and time.
#[derive(Debug)]
pub struct PresetEnvelope {}

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
