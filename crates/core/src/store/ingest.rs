//! Making events durable: the receipts of a request, and the verdict on each.

use std::fmt;
use std::future::Future;
use std::net::IpAddr;
use std::sync::Arc;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::StoreError;
use crate::job::{HandlerName, Phase};
use crate::order::ResourcePosition;
use crate::receipt::Receipt;

/// Making events durable.
pub trait Store: Send + Sync + 'static {
    /// Commits every receipt of one request in one transaction, and returns the verdict on each, in
    /// their order. After `Ok`, every accepted, reviewed or conflicting event is on disk. After `Err`,
    /// the sender must retry; the retry is never answered "duplicate" for an event that is not durable.
    ///
    /// Dropping the future does not undo the commit. Plain duplicates are counted after the answer,
    /// within a second, and a crash may lose those counts.
    fn ingest(
        &self,
        ingest: Ingest,
    ) -> impl Future<Output = Result<Vec<Verdict>, StoreError>> + Send;

    /// Whether the last write worked. `Err` holds the reason why nothing is accepted.
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

/// All events of one request, which become durable together or not at all.
#[derive(Debug, Clone)]
pub struct Ingest {
    /// At least one.
    pub receipts: Vec<Receipt>,
    /// The jobs of each receipt, in the order of `receipts`. If the event is accepted, its jobs are written
    /// in the same commit. Empty if no handler wants the event.
    pub jobs: Vec<Vec<NewJob>>,
    /// How the request arrived.
    pub via: ArrivalInfo,
}

/// A job to be written with its event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewJob {
    /// The handler that runs it.
    pub handler: HandlerName,
    /// Its place in the order of a resource, if the handler is ordered.
    pub place: Option<ResourcePosition>,
    /// Set if the job can never run (its order value is missing): the job is written as dead, with
    /// this reason.
    pub hopeless: Option<String>,
}

/// How an arrival came in, as it is recorded with the event.
#[derive(Debug, Clone)]
pub struct ArrivalInfo {
    /// When it was received, by this node's clock.
    pub received_at: Timestamp,
    /// The request id it was answered with.
    pub request_id: Uuid,
    /// The client's address, as reported by trusted proxies.
    pub remote: Option<IpAddr>,
    /// The number of the [`Verifier`](super::Verifier) that accepted it.
    pub secret: usize,
    /// The signed timestamp.
    pub signed_at: Option<Timestamp>,
    /// The sender's headers as `name: value` lines, without secrets.
    pub headers: Arc<str>,
}

/// The store's decision about a Receipt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// New, or an on-time copy that promoted a late event out of review. Its jobs are written.
    Accepted(EventId),
    /// Seen before, with the same bytes.
    Duplicate(KnownEvent),
    /// Seen before, with other bytes: both are stored, and nothing runs.
    Conflict(KnownEvent),
    /// New, authentic, and stored for an operator's review.
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

/// An event that was seen before, as its copies are answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownEvent {
    /// Our id of the event.
    pub id: EventId,
    /// Its status.
    pub status: Status,
    /// The result of its work.
    pub result: Option<Arc<str>>,
}

/// The status of an event over all of its jobs: the first variant that applies to any of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// An operator must decide.
    Review,
    /// An operator rejected it.
    Discarded,
    /// One of its jobs is dead.
    Dead,
    /// One of its jobs failed and will be retried.
    Failed,
    /// One of its jobs waits for another event.
    Held,
    /// One of its jobs is being worked on.
    Processing,
    /// One of its jobs waits to be claimed.
    Received,
    /// Every job is done, or done and stale.
    Processed,
    /// A newer version was applied before every job of the event.
    Stale,
    /// No handler wants it.
    Ignored,
}

impl Status {
    /// The status as the API and the views write it.
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

    /// Whether only an operator can still change it. An event may be discarded for one handler and
    /// open for another, so retention looks at its jobs instead.
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

/// Why an event is in review.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReviewReason {
    /// The event was signed before the window. An on-time copy promotes the event.
    Late,
    /// The same signed bytes were seen under another id.
    Replay,
    /// The same derived key was seen with other bytes.
    Conflict,
}

impl ReviewReason {
    /// The reason as the API writes it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Late => "late",
            Self::Replay => "replay",
            Self::Conflict => "conflict",
        }
    }
}
