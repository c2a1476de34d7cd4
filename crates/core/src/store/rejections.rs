//! The last refused requests of each source.

use std::future::Future;
use std::net::IpAddr;

use jiff::Timestamp;
use uuid::Uuid;

use super::StoreError;
use crate::key::SourceName;

/// A request that was refused. The request was not verified, so everything that it claims, such as its event id,
/// may be forged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejection {
    /// The source that it was sent to.
    pub source: SourceName,
    /// When it was received.
    pub at: Timestamp,
    /// The id that it was answered with.
    pub request_id: Uuid,
    /// The client's address.
    pub remote: Option<IpAddr>,
    /// The reason, by its word in the metrics: `signature`, `stale`.
    pub reason: String,
    /// Why, in more words.
    pub detail: Option<String>,
    /// The event id in the request, if one could be read.
    pub claimed_id: Option<String>,
}

/// The most rejections that are kept for each source.
pub const REJECTIONS_KEPT: usize = 100;

/// The rejections of all nodes.
pub trait RejectionRecords: Send + Sync + 'static {
    /// Adds rejections. The newest [`REJECTIONS_KEPT`] of each source stay.
    fn record_rejections(
        &self,
        rejections: Vec<Rejection>,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// The rejections of a source, newest first.
    fn rejections(
        &self,
        source: &SourceName,
    ) -> impl Future<Output = Result<Vec<Rejection>, StoreError>> + Send;
}
