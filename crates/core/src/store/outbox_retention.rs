//! Retention of deliveries that were not delivered: cancels those that were dead, parked, or held
//! by a disabled endpoint for too long.

use std::future::Future;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

use super::StoreError;
use crate::endpoint::EndpointId;
use crate::key::Tenant;

/// The end of deliveries by their age.
pub trait OutboxRetention: Send + Sync + 'static {
    /// Cancels deliveries that have been dead, held or parked for longer than `ask.kept`, with the reason
    /// [`EXPIRED`](crate::delivery::EXPIRED). Each call is one commit and checks a bounded number of
    /// endpoints; the next call continues where this one stopped. Times follow the store's clock.
    ///
    /// An endpoint is announced first: once, when its oldest such delivery has `ask.notice` left.
    /// None of its deliveries is cancelled earlier than `ask.notice` after that, whatever its age.
    /// The announcement is withdrawn when no delivery of the endpoint is still about to expire.
    /// Deliveries of deleted endpoints are cancelled without an announcement.
    fn expire_deliveries(
        &self,
        ask: ExpiryAsk,
    ) -> impl Future<Output = Result<Expiry, StoreError>> + Send;
}

/// The limits of one commit of expiry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpiryAsk {
    /// How long a delivery stays dead, held or parked.
    pub kept: Duration,
    /// How long an endpoint is announced before the first of its deliveries is cancelled.
    pub notice: Duration,
    /// At most this many endpoints are checked, and at most this many deliveries cancelled.
    pub limit: usize,
}

/// The result of one commit of expiry.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Expiry {
    /// The endpoints that this commit announced.
    pub announced: Vec<ExpiryNotice>,
    /// The endpoints whose deliveries this commit cancelled, and how many.
    pub cancelled: Vec<(EndpointId, u64)>,
    /// Whether this round has more to check.
    pub more: bool,
}

/// An endpoint with deliveries that are about to expire.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpiryNotice {
    /// The endpoint.
    pub endpoint: EndpointId,
    /// Its owner.
    pub tenant: Tenant,
    /// The time since which its oldest such delivery has been dead, held or parked.
    pub oldest: Timestamp,
}

/// The times of one round of expiry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpiryTimes {
    /// Deliveries that have been dead, held or parked since before this time are cancelled.
    pub cancel_before: Timestamp,
    /// Endpoints with a delivery that has been dead, held or parked since before this time are
    /// announced.
    pub announce_before: Timestamp,
    /// An announcement that was made at or before this time is old enough.
    pub announced_by: Timestamp,
}

impl ExpiryAsk {
    /// The times of a round at `now`.
    pub fn times(&self, now: Timestamp) -> ExpiryTimes {
        let ago = |span: Duration| {
            let span = SignedDuration::try_from(span).unwrap_or(SignedDuration::MAX);
            now.checked_sub(span).unwrap_or(Timestamp::MIN)
        };
        ExpiryTimes {
            cancel_before: ago(self.kept),
            announce_before: ago(self.kept.saturating_sub(self.notice)),
            announced_by: ago(self.notice),
        }
    }

    /// The time from which deliveries of an endpoint are cancelled if it is announced at `now`. `oldest` is
    /// the time since which its oldest delivery has been dead, held or parked.
    pub fn cancelled_from(&self, oldest: Timestamp, now: Timestamp) -> Timestamp {
        let later = |at: Timestamp, span| at.saturating_add(span).unwrap_or(Timestamp::MAX);
        later(oldest, self.kept).max(later(now, self.notice))
    }
}

/// The step that a round of expiry takes for one endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpiryStep {
    /// Nothing.
    Leave,
    /// It is announced.
    Announce,
    /// Its announcement is withdrawn.
    Withdraw,
    /// Its expired deliveries are cancelled.
    Cancel,
}

/// An endpoint, as far as expiry reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpirySubject {
    /// The time since which its oldest delivery has been dead, held or parked.
    pub oldest: Option<Timestamp>,
    /// When it was announced.
    pub announced_at: Option<Timestamp>,
    /// Whether it was deleted.
    pub is_deleted: bool,
}

impl ExpiryTimes {
    /// Decides about one endpoint.
    pub fn step(&self, endpoint: &ExpirySubject) -> ExpiryStep {
        let ExpirySubject { oldest, announced_at, is_deleted } = *endpoint;
        let is_near = oldest.is_some_and(|since| since < self.announce_before);
        let is_past = oldest.is_some_and(|since| since < self.cancel_before);
        match (is_deleted, announced_at) {
            (true, _) if is_past => ExpiryStep::Cancel,
            (true, _) => ExpiryStep::Leave,
            (false, Some(_)) if !is_near => ExpiryStep::Withdraw,
            (false, Some(at)) if is_past && at <= self.announced_by => ExpiryStep::Cancel,
            (false, None) if is_near => ExpiryStep::Announce,
            (false, Some(_) | None) => ExpiryStep::Leave,
        }
    }
}
