//! A [`Receipt`]: one verified event, with all that a store needs to decide its race. Only
//! [`mod@crate::verify`] makes one.

use std::time::Duration;

use bytes::Bytes;
use jiff::Timestamp;

use crate::key::{EventKey, KeyHash};

/// One verified event. A body that carries several yields one Receipt for each.
#[derive(Debug, Clone)]
pub struct Receipt {
    pub(crate) key: EventKey,
    pub(crate) key_hash: KeyHash,
    pub(crate) neighbours: Option<Neighbours>,
    pub(crate) if_conflict: Option<EventKey>,
    pub(crate) if_replay: Option<EventKey>,
    pub(crate) guard: Option<ContentGuard>,
    pub(crate) event_type: Option<Box<str>>,
    pub(crate) occurred_at: Option<Timestamp>,
    pub(crate) body: Bytes,
    pub(crate) body_hash: KeyHash,
    pub(crate) timeliness: Timeliness,
}

/// Where equal derived keys are one event only within a span: the keys under which an event of the
/// spans beside this one would stand, and how far from this one it may have arrived.
///
/// Both sides count: a copy in the next span may be decided first, on a node whose clock is ahead,
/// or on this one before its clock was set back.
#[derive(Debug, Clone)]
pub struct Neighbours {
    /// The keys of the span before and of the span after.
    pub keys: [EventKey; 2],
    /// An event received before this instant is another event.
    pub not_before: Timestamp,
    /// An event received after this instant is another event.
    pub not_after: Timestamp,
}

impl Neighbours {
    /// Whether an event of a neighbouring span that was received then is this one.
    pub fn hold(&self, received_at: Timestamp) -> bool {
        self.not_before <= received_at && received_at <= self.not_after
    }
}

/// The second key of an event: a hash of everything that was signed. The first key recognises
/// retries, this one recognises replays of a captured request under another id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContentGuard {
    /// The hash of the signed content, scoped by tenant and source.
    pub hash: KeyHash,
    /// How long the guard must be remembered.
    pub keep: GuardKeep,
    /// What becomes of an event whose guard is known and whose key is not.
    pub seen: GuardSeen,
}

/// How long a guard must be remembered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuardKeep {
    /// A time is signed: this long after the arrival, twice the window, the same signed content is
    /// outside the window for certain.
    For(Duration),
    /// No time is signed: as long as the keys of its source.
    WithKeys,
}

/// What becomes of an event whose guard is known and whose key is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuardSeen {
    /// The id is the sender's own: the same signed content under another id is a suspected replay,
    /// and waits for a person under [a key of its own](Receipt::if_replay).
    Review,
    /// The id is derived: the arrival is a copy of the event that holds the guard.
    Duplicate,
}

/// Whether the signed timestamp lies in the window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Timeliness {
    /// Inside the window, or of a scheme that signs no time.
    OnTime,
    /// Authentic, but older than the window allows, by this many seconds since it was signed.
    Late {
        /// Seconds between signing and arrival.
        age_seconds: i64,
    },
}

impl Receipt {
    /// The identity of the event.
    pub fn key(&self) -> &EventKey {
        &self.key
    }

    /// The hash of [`Receipt::key`], made once: every step of a store asks for it.
    pub fn key_hash(&self) -> KeyHash {
        self.key_hash
    }

    /// Set where the key was derived within a span.
    pub fn neighbours(&self) -> Option<&Neighbours> {
        self.neighbours.as_ref()
    }

    /// Set where the key was derived: the key to file this event under, for review, when an event
    /// with the same key but another body is there already.
    pub fn if_conflict(&self) -> Option<&EventKey> {
        self.if_conflict.as_ref()
    }

    /// Set where the id is the sender's own and not signed: the key to file this event under, for
    /// review, when its signed content was seen with another event. An id that is not signed proves
    /// nothing, so a suspected replay must not take it from the event that it belongs to.
    pub fn if_replay(&self) -> Option<&EventKey> {
        self.if_replay.as_ref()
    }

    /// Set where something is signed and the id is not part of it.
    pub fn guard(&self) -> Option<ContentGuard> {
        self.guard
    }

    /// The sender's word for what happened.
    pub fn event_type(&self) -> Option<&str> {
        self.event_type.as_deref()
    }

    /// When it happened, by the sender's clock.
    pub fn occurred_at(&self) -> Option<Timestamp> {
        self.occurred_at
    }

    /// The event's bytes: the whole body, or its element of a batch.
    pub fn body(&self) -> &Bytes {
        &self.body
    }

    /// A hash of [`Receipt::body`], to tell a copy from a conflict.
    pub fn body_hash(&self) -> KeyHash {
        self.body_hash
    }

    /// Whether it came inside the window.
    pub fn timeliness(&self) -> Timeliness {
        self.timeliness
    }
}
