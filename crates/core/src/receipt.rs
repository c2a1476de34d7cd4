//! A [`Receipt`]: one verified event with everything that a store needs to decide a race. Only
//! [`mod@crate::verify`] makes a Receipt.

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

/// The keys of the neighbouring spans, where equal derived keys are one event only within a span, and
/// how far from this arrival the other copy may have arrived.
///
/// Both neighbours count. A copy in the next span may be decided first, on a node whose clock is ahead
/// or on this node before its clock was set back.
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
    /// Whether an event of a neighbouring span that was received at this time is the same event.
    pub fn hold(&self, received_at: Timestamp) -> bool {
        self.not_before <= received_at && received_at <= self.not_after
    }
}

/// The second key of an event: a hash of everything that was signed. The first key recognises
/// retries; this one recognises a captured request that is sent again under another id. If the sender counts
/// its attempts inside the event, the hash leaves the counters out and recognises copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContentGuard {
    /// The hash of the signed content, scoped by tenant and source.
    pub hash: KeyHash,
    /// How long the guard must be stored.
    pub keep: GuardKeep,
    /// The treatment of an event whose guard is known and whose key is new.
    pub seen: GuardSeen,
}

/// How long a guard must be stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuardKeep {
    /// A time is signed: the guard is stored for twice the window. After that the same signed
    /// content is outside the window on every node.
    For(Duration),
    /// No time is signed: the guard is stored as long as the keys of its source.
    WithKeys,
}

/// The treatment of an event whose guard is known and whose key is new.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuardSeen {
    /// The id is the sender's own: the same signed content under another id is a suspected replay. A
    /// suspected replay goes to review under [another key](Receipt::if_replay).
    Review,
    /// The id is derived, or part of the guarded content: the arrival is a copy of the event that holds the guard.
    Duplicate,
}

/// Whether the signed timestamp lies in the window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Timeliness {
    /// Inside the window, or the scheme signs no time.
    OnTime,
    /// Authentic, but signed before the window.
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

    /// The hash of [`Receipt::key`], computed once: every step of a store needs it.
    pub fn key_hash(&self) -> KeyHash {
        self.key_hash
    }

    /// Set if the key was derived within a span.
    pub fn neighbours(&self) -> Option<&Neighbours> {
        self.neighbours.as_ref()
    }

    /// Set if the key was derived: the key to store this event under, in review, if an event with
    /// the same key and another body exists.
    pub fn if_conflict(&self) -> Option<&EventKey> {
        self.if_conflict.as_ref()
    }

    /// Set if the id is the sender's own and not signed: the key to store this event under, in review, if its
    /// signed content belongs to another event. An unsigned id proves nothing, so a suspected replay must not
    /// take it from the event that it belongs to.
    pub fn if_replay(&self) -> Option<&EventKey> {
        self.if_replay.as_ref()
    }

    /// Set if the source is guarded: something is signed, and the signed content does not fix the id. Also set
    /// where the sender counts its attempts inside the event.
    pub fn guard(&self) -> Option<ContentGuard> {
        self.guard
    }

    /// The event's type, as the sender names it.
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

    /// A hash of [`Receipt::body`], which distinguishes a copy from a conflict.
    pub fn body_hash(&self) -> KeyHash {
        self.body_hash
    }

    /// Whether it arrived inside the window.
    pub fn timeliness(&self) -> Timeliness {
        self.timeliness
    }
}
