//! Making events durable: what a request brings, and what became of it.

use std::fmt;
use std::future::Future;
use std::net::IpAddr;
use std::sync::Arc;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::StoreError;
use crate::job::{HandlerName, Phase};
use crate::key::EventKey;
use crate::order::Place;
use crate::receipt::Receipt;

/// Making events durable.
pub trait Store: Send + Sync + 'static {
    /// Commits every receipt of one request in one transaction and says what became of each, in
    /// their order. When this returns `Ok`, every accepted, reviewed or conflicting event is on
    /// disk. When it returns `Err`, the sender must try again and will then not be told
    /// "duplicate" of something that is not durable.
    ///
    /// Dropping the future does not undo the commit. Plain duplicates are counted behind the
    /// answer, within a second, and such counts may be lost in a crash.
    fn ingest(
        &self,
        ingest: Ingest,
    ) -> impl Future<Output = Result<Vec<Verdict>, StoreError>> + Send;

    /// Whether an event with this key is durable. A hint for logs and metrics, never for a race.
    fn knows(&self, key: &EventKey) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Whether the last write worked; `Err` says why not and since when nothing is accepted.
    fn writable(&self) -> Result<(), StoreError>;
}

/// Our own id of an Event; the sender's is `event_id`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EventId(pub Uuid);

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// All events of one request, to be made durable together or not at all.
#[derive(Debug, Clone)]
pub struct Ingest {
    /// At least one.
    pub receipts: Vec<Receipt>,
    /// The work that each receipt promises, in the order of `receipts`: written in the same commit
    /// as its event, if that is accepted. Empty where no handler is for it.
    pub jobs: Vec<Vec<NewJob>>,
    /// How they came.
    pub via: ArrivalInfo,
}

/// A Job to be written with its event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewJob {
    /// For this handler.
    pub handler: HandlerName,
    /// Its place in the order of a resource, where the handler keeps order.
    pub place: Option<Place>,
    /// Set where the job cannot be worked on at all (its order value is missing): it is buried at
    /// once, and this is why.
    pub hopeless: Option<String>,
}

/// How an arrival came: what is told of it later.
#[derive(Debug, Clone)]
pub struct ArrivalInfo {
    /// When it was received, by this node's clock.
    pub received_at: Timestamp,
    /// The request id it was answered with.
    pub request_id: Uuid,
    /// Who sent it, as far as trusted proxies tell.
    pub remote: Option<IpAddr>,
    /// Which of the source's secrets verified.
    pub secret: usize,
    /// The signed timestamp.
    pub signed_at: Option<Timestamp>,
    /// The sender's headers as `name: value` lines, secrets left out.
    pub headers: Arc<str>,
}

/// What became of a Receipt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// New, or an on-time copy that promoted a late one out of review: it is ours to work on.
    Accepted(EventId),
    /// Seen before, with the same bytes.
    Duplicate(KnownEvent),
    /// Seen before, with other bytes: both are kept, nothing runs.
    Conflict(KnownEvent),
    /// New, authentic, and kept for a person to decide.
    Review(EventId),
}

impl Verdict {
    /// Our id of the event.
    pub fn id(&self) -> EventId {
        match self {
            Self::Accepted(id) | Self::Review(id) => *id,
            Self::Duplicate(known) | Self::Conflict(known) => known.id,
        }
    }
}

/// What is told of an event that was seen before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownEvent {
    /// Our id of it.
    pub id: EventId,
    /// Where it stands.
    pub status: Status,
    /// What its work came to.
    pub result: Option<Arc<str>>,
}

/// Where an event stands, over all of its jobs.
///
/// In the order in which the first that applies is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Waiting for a person.
    Review,
    /// A person refused it.
    Discarded,
    /// A job of it is buried.
    Dead,
    /// A job of it failed and will be tried again.
    Failed,
    /// A job of it waits for another event.
    Held,
    /// A job of it is being worked on.
    Processing,
    /// A job of it waits for its turn.
    Received,
    /// Every job is done, or done and stale.
    Processed,
    /// Newer news was applied before every job of it.
    Stale,
    /// No handler is for it.
    Ignored,
}

impl Status {
    /// The word of CONTRACT.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Review => "review",
            Self::Discarded => "discarded",
            Self::Dead => "dead",
            Self::Failed => "failed",
            Self::Held => "held",
            Self::Processing => "processing",
            Self::Received => "received",
            Self::Processed => "processed",
            Self::Stale => "stale",
            Self::Ignored => "ignored",
        }
    }

    /// Whether nothing but a person changes it any more. An event may be discarded for one of its
    /// handlers and open for another: what may be pruned, its jobs say.
    pub fn is_final(self) -> bool {
        match self {
            Self::Processed | Self::Stale | Self::Ignored | Self::Discarded => true,
            Self::Review
            | Self::Dead
            | Self::Failed
            | Self::Held
            | Self::Processing
            | Self::Received => false,
        }
    }

    /// The status of an event from its jobs: the first that applies.
    pub fn of_jobs(jobs: impl IntoIterator<Item = (Phase, u32)>) -> Self {
        let mut worst: Option<Self> = None;
        for (phase, steps) in jobs {
            let of_job = match phase {
                Phase::Dead => Self::Dead,
                Phase::Ready | Phase::Parked if steps > 0 => Self::Failed,
                Phase::Held => Self::Held,
                Phase::Leased => Self::Processing,
                Phase::Ready | Phase::Parked => Self::Received,
                Phase::Done => Self::Processed,
                Phase::Stale => Self::Stale,
                Phase::Review => Self::Review,
                Phase::Discarded => Self::Discarded,
            };
            worst = Some(worst.map_or(of_job, |worst| worst.min(of_job)));
        }
        worst.unwrap_or(Self::Ignored)
    }
}

/// Why an event waits for a person.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReviewReason {
    /// Signed before the window; an on-time copy promotes it.
    Late,
    /// The same signed bytes were seen under another id.
    Replay,
    /// The same derived key was seen with other bytes.
    Conflict,
}

impl ReviewReason {
    /// The word used in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Late => "late",
            Self::Replay => "replay",
            Self::Conflict => "conflict",
        }
    }
}
