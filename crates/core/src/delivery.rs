//! The life of a delivery on one page: [`step`] is one `match` over every act and every phase.
//!
//! A delivery is one message for one endpoint. The arithmetic of attempts is shared with jobs
//! ([`crate::job`]). Two rules differ. A lost attempt never makes a delivery a dead letter, because a
//! request cannot kill the process. A delivery that ended can always be replayed, because receivers
//! deduplicate by the message's id.
//!
//! The store checks the fence first: an act under an older fence never reaches this function.
//! docs/lifecycle.md has the same table in words, and a test compares it with this file.
//!
//! Order per key is decided outside this function, from the other deliveries under the key: a claim
//! comes with [`KeyTurn`], and the store readies the next parked delivery whenever one ends.
//!
//! Whether an endpoint is disabled or deleted is not part of a delivery. Claims skip such endpoints, and
//! [`DeliveryStatus::of`] shows their open deliveries as held or cancelled. So disabling changes one row,
//! however many deliveries wait.

use std::fmt;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::endpoint::EndpointId;
use crate::job::{AfterFailure, AfterLoss, Policy, Progress, Retry, WorkLocation, later};

/// Our id of a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DeliveryId(pub Uuid);

impl fmt::Display for DeliveryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The error of a delivery whose lease ended without an outcome.
pub const OUTCOME_LOST: &str =
    "the outcome of this attempt is unknown: the process ended during it";

/// The reason of a delivery that is cancelled because its endpoint was deleted.
pub const ENDPOINT_DELETED: &str = "its endpoint was deleted";

/// Why a delivery is parked.
pub const KEY_WAITS: &str =
    "an earlier delivery under the same key has not ended; if that one is dead, replay or skip it";

/// The reason of a delivery that is cancelled because it was dead, held or parked for longer than the
/// retention of deliveries.
pub const EXPIRED: &str = "expired";

/// The idempotency key that is sent with a delivery: equal across attempts, restarts and replays.
pub fn idempotency_key(message: &str, endpoint: EndpointId) -> String {
    format!("{message}:{endpoint}")
}

/// The phase of a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DeliveryPhase {
    /// The delivery is attempted once it is due.
    Ready,
    /// An attempt is under way, until its lease ends.
    Leased,
    /// An earlier delivery under its key has not ended.
    Parked,
    /// The endpoint answered with a 2xx.
    Delivered,
    /// A dead letter: the schedule has ended, or no retry can succeed. An operator can replay the delivery.
    Dead,
    /// An operator cancelled or skipped it, its endpoint was deleted, or it expired.
    Cancelled,
}

impl DeliveryPhase {
    /// Whether a delivery in this phase can still change without an operator.
    pub fn is_open(self) -> bool {
        match self {
            Self::Ready | Self::Leased | Self::Parked => true,
            Self::Delivered | Self::Dead | Self::Cancelled => false,
        }
    }
}

/// Whether an endpoint takes deliveries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EndpointStanding {
    /// The endpoint takes deliveries.
    Active,
    /// The endpoint takes no delivery until it is enabled.
    Disabled,
    /// Its circuit is open: at most one delivery is sent, to try it.
    Failing,
    /// The endpoint was deleted and takes no delivery again.
    Deleted,
}

/// The status of a delivery, as the API and the views show it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeliveryStatus {
    /// Its schedule has ended; an operator can replay it.
    Dead,
    /// An attempt failed, and another follows.
    Failed,
    /// Its endpoint is disabled, or its circuit is open.
    Held,
    /// An earlier delivery under its key has not ended.
    Parked,
    /// An attempt is under way.
    Sending,
    /// The delivery waits for its first attempt.
    Waiting,
    /// The endpoint answered with a 2xx.
    Delivered,
    /// An operator cancelled or skipped the delivery, its endpoint was deleted, or it expired.
    Cancelled,
}

impl DeliveryStatus {
    /// The status of a delivery from its own row and its endpoint.
    pub fn of(phase: DeliveryPhase, steps: u32, endpoint: EndpointStanding) -> Self {
        match (phase, endpoint) {
            (DeliveryPhase::Ready | DeliveryPhase::Parked, EndpointStanding::Deleted) => {
                Self::Cancelled
            }
            (
                DeliveryPhase::Ready | DeliveryPhase::Parked,
                EndpointStanding::Disabled | EndpointStanding::Failing,
            ) => Self::Held,
            (DeliveryPhase::Parked, EndpointStanding::Active) => Self::Parked,
            (DeliveryPhase::Ready, EndpointStanding::Active) if steps > 0 => Self::Failed,
            (DeliveryPhase::Ready, EndpointStanding::Active) => Self::Waiting,
            (DeliveryPhase::Leased, _) => Self::Sending,
            (DeliveryPhase::Delivered, _) => Self::Delivered,
            (DeliveryPhase::Dead, _) => Self::Dead,
            (DeliveryPhase::Cancelled, _) => Self::Cancelled,
        }
    }

    /// The status as text.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Dead => "dead",
            Self::Failed => "failed",
            Self::Held => "held",
            Self::Parked => "parked",
            Self::Sending => "sending",
            Self::Waiting => "waiting",
            Self::Delivered => "delivered",
            Self::Cancelled => "cancelled",
        }
    }
}

/// The status of a message over all of its deliveries: that of the most urgent one, or `none`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MessageStatus(pub Option<DeliveryStatus>);

impl MessageStatus {
    /// The first status that applies to any delivery.
    pub fn of(deliveries: impl IntoIterator<Item = DeliveryStatus>) -> Self {
        Self(deliveries.into_iter().min())
    }

    /// The status as text.
    pub fn as_str(self) -> &'static str {
        self.0.map_or("none", DeliveryStatus::as_str)
    }
}

impl Serialize for MessageStatus {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// The part of a delivery that its rules depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeliveryState {
    /// The phase.
    pub phase: DeliveryPhase,
    /// Attempts in all, and failures and losses since the last replay.
    pub progress: Progress,
    /// The attempts before the last replay.
    pub earlier_attempts: u32,
    /// When a ready delivery is due or a lease ends; for other phases, when the delivery ended.
    pub due: Timestamp,
}

/// Whether the order of its endpoint allows a delivery to be sent now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyTurn {
    /// The delivery may be sent: its endpoint keeps no order, it has no key, or every earlier one
    /// under its key has ended.
    Now,
    /// An earlier delivery under its key is open, or dead while dead ones park their key.
    Later,
}

/// The place of a delivery among those under its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyPositionChange {
    /// It stays.
    Keep,
    /// After all others.
    Last,
}

/// An act on a delivery: by a sender, by an operator, or because of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeliveryAct<'a> {
    /// A sender asks for due deliveries.
    Claim {
        /// How long the claim lasts.
        lease: Duration,
        /// Whether the order of its endpoint allows the delivery now.
        turn: KeyTurn,
    },
    /// The end of a lease has passed, or the process that held it has died.
    LeaseEnded,
    /// The sender reports a 2xx. Needs the fence.
    Delivered,
    /// The sender reports a failed attempt. Needs the fence.
    Failed {
        /// When to try again, as far as the sender knows.
        retry: Retry,
        /// The endpoint's schedule.
        policy: &'a Policy,
    },
    /// The sender returns a claim that it never began. Needs the fence.
    GivenBack,
    /// Every earlier delivery under its key has ended.
    Woken,
    /// An operator cancels the message, or the endpoint was deleted.
    Cancel,
    /// An operator gives up this delivery, so that the next one under its key is sent.
    Skip,
    /// The delivery was dead, parked, or held by a disabled endpoint for too long.
    Expire,
    /// An operator sends an ended delivery again, or makes a waiting one due now.
    Replay {
        /// Whether the delivery parks its key while it is dead. Then no later delivery under the
        /// key was sent, and this one keeps its place.
        parks_key: bool,
    },
}

/// Why an act changes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeliveryUnchanged {
    /// The delivery is not ready, or not due yet.
    NotClaimable,
    /// The delivery is recorded as delivered under the same fence: the answer to the first report
    /// was lost.
    AlreadyDelivered,
    /// The sender no longer has the right: the attempt has ended already.
    RightLost,
    /// The delivery is due or under way.
    AlreadyOpen,
    /// It has ended.
    AlreadyOver,
    /// The act is meant for another phase.
    NotWaiting,
}

/// The change that an act makes. The store writes the whole change in one commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeliveryChange {
    /// The phase afterwards.
    pub phase: DeliveryPhase,
    /// See [`DeliveryState::due`].
    pub due: Timestamp,
    /// See [`DeliveryState::progress`].
    pub progress: Progress,
    /// See [`DeliveryState::earlier_attempts`].
    pub earlier_attempts: u32,
    /// Whether the fence grows, so that the last sender no longer has the right.
    pub voids_fence: bool,
    /// The change to the list of attempts.
    pub attempt: AttemptRecord,
    /// Its place under its key.
    pub place: KeyPositionChange,
}

/// The change to the list of attempts. The successful attempt is in the delivery's row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttemptRecord {
    /// Nothing.
    Keep,
    /// The attempt was lost: its outcome is unknown.
    Lost,
    /// The attempt failed, with the error and the answer that the sender reports.
    Failed,
    /// The successful attempt moves from the delivery's row to the list, because another follows.
    Delivered,
    /// The record of this attempt is deleted: the attempt was recorded as lost and was only slow.
    Remove,
}

/// Decides what `act` does to `delivery` at `now`. `dice` in 0..=1 chooses the jitter of a wait.
pub fn step(
    delivery: &DeliveryState,
    act: &DeliveryAct<'_>,
    now: Timestamp,
    dice: f64,
) -> Result<DeliveryChange, DeliveryUnchanged> {
    use DeliveryPhase::{Cancelled, Dead, Delivered, Leased, Parked, Ready};

    let to = |phase, due| DeliveryChange {
        phase,
        due,
        progress: delivery.progress,
        earlier_attempts: delivery.earlier_attempts,
        voids_fence: false,
        attempt: AttemptRecord::Keep,
        place: KeyPositionChange::Keep,
    };
    match (*act, delivery.phase) {
        (DeliveryAct::Claim { lease, turn }, Ready) if delivery.due <= now => Ok(match turn {
            KeyTurn::Now => DeliveryChange {
                progress: delivery.progress.claimed(),
                voids_fence: true,
                ..to(Leased, later(now, lease))
            },
            // Parking does not count as an attempt.
            KeyTurn::Later => to(Parked, now),
        }),
        (DeliveryAct::Claim { .. }, Ready | Leased | Parked | Delivered | Dead | Cancelled) => {
            Err(DeliveryUnchanged::NotClaimable)
        }

        (DeliveryAct::LeaseEnded, Leased) => {
            let ended = delivery.due.min(now);
            let (progress, due) = match delivery.progress.lost(WorkLocation::Called, ended, dice) {
                AfterLoss::Again { progress, due } => (progress, due),
                // This case is never reached: only work inside this process becomes a dead letter because of
                // losses.
                AfterLoss::Bury { progress } => (progress, now),
            };
            Ok(DeliveryChange { progress, attempt: AttemptRecord::Lost, ..to(Ready, due) })
        }
        (DeliveryAct::LeaseEnded, Ready | Parked | Delivered | Dead | Cancelled) => {
            Err(DeliveryUnchanged::AlreadyOver)
        }

        // The receiver has the message, even if the attempt was recorded as lost since.
        (DeliveryAct::Delivered, Leased) => Ok(to(Delivered, now)),
        (DeliveryAct::Delivered, Ready | Parked | Dead | Cancelled) => {
            Ok(DeliveryChange { attempt: AttemptRecord::Remove, ..to(Delivered, now) })
        }
        (DeliveryAct::Delivered, Delivered) => Err(DeliveryUnchanged::AlreadyDelivered),

        (DeliveryAct::Failed { retry, policy }, Leased) => {
            let earlier = delivery.earlier_attempts;
            let after = delivery.progress.failed_since_replay(earlier, policy, retry, now, dice);
            let (phase, progress, due) = match after {
                AfterFailure::Again { progress, due } => (Ready, progress, due),
                AfterFailure::Bury { progress } => (Dead, progress, now),
            };
            Ok(DeliveryChange { progress, attempt: AttemptRecord::Failed, ..to(phase, due) })
        }
        (DeliveryAct::Failed { .. }, Ready | Parked | Delivered | Dead | Cancelled) => {
            Err(DeliveryUnchanged::RightLost)
        }

        (DeliveryAct::GivenBack, Leased) => Ok(DeliveryChange {
            progress: delivery.progress.given_back(),
            voids_fence: true,
            ..to(Ready, now)
        }),
        (DeliveryAct::GivenBack, Ready | Parked | Delivered | Dead | Cancelled) => {
            Err(DeliveryUnchanged::RightLost)
        }

        (DeliveryAct::Woken, Parked) => Ok(to(Ready, now)),
        (DeliveryAct::Woken, Ready | Leased | Delivered | Dead | Cancelled) => {
            Err(DeliveryUnchanged::NotWaiting)
        }

        // The fence stays valid: if the request reached the endpoint, the delivery is recorded as
        // delivered.
        (DeliveryAct::Cancel, Ready | Leased | Parked)
        | (DeliveryAct::Skip | DeliveryAct::Expire, Ready | Parked | Dead) => {
            Ok(to(Cancelled, now))
        }
        (DeliveryAct::Cancel, Delivered | Dead | Cancelled)
        | (DeliveryAct::Skip | DeliveryAct::Expire, Delivered | Cancelled) => {
            Err(DeliveryUnchanged::AlreadyOver)
        }
        (DeliveryAct::Skip | DeliveryAct::Expire, Leased) => Err(DeliveryUnchanged::AlreadyOpen),

        (DeliveryAct::Replay { .. }, Ready) if delivery.due > now => Ok(to(Ready, now)),
        (DeliveryAct::Replay { .. }, Ready | Leased | Parked) => {
            Err(DeliveryUnchanged::AlreadyOpen)
        }
        (DeliveryAct::Replay { parks_key }, Delivered | Dead | Cancelled) => Ok(DeliveryChange {
            progress: Progress { steps: 0, lost: 0, ..delivery.progress },
            earlier_attempts: delivery.progress.attempt,
            voids_fence: true,
            attempt: match delivery.phase {
                Delivered => AttemptRecord::Delivered,
                Ready | Leased | Parked | Dead | Cancelled => AttemptRecord::Keep,
            },
            place: match delivery.phase {
                Dead if parks_key => KeyPositionChange::Keep,
                Ready | Leased | Parked | Delivered | Dead | Cancelled => KeyPositionChange::Last,
            },
            ..to(Ready, now)
        }),
    }
}
