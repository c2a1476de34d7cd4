//! The deletion of all data that is stored for one tenant, as privacy laws demand.

use std::future::Future;

use jiff::Timestamp;

use super::{Action, StoreError};
use crate::key::Tenant;

/// Deleting a tenant's data, in slices that survive a restart.
///
/// A deletion covers data that was stored before it began. Data that arrives later stays, so stop
/// the tenant's senders and publishers first. The deletion removes endpoints with their secrets and
/// addresses, and the secrets of sources that were set at run time. Of events it removes bodies, headers,
/// jobs, attempts and copies; of messages it removes bytes, order keys, deliveries and attempts. Work in
/// progress loses its fence: its effects in this database roll back.
///
/// Data that is needed to recognise copies stays until its own retention: the keys and guards of
/// events, order marks, and the ids of messages. The audit trail stays.
pub trait TenantDeletions: Send + Sync + 'static {
    /// Begins to delete a tenant's data, in one commit: its endpoints and secrets are gone from then on, and
    /// [`erase`](Self::erase) does the rest. If a deletion of the tenant is already running, the call
    /// returns that deletion and changes nothing.
    fn delete_tenant(
        &self,
        tenant: Tenant,
        by: Action,
    ) -> impl Future<Output = Result<TenantDeletion, StoreError>> + Send;

    /// Runs one slice of a deletion that is under way: erases at most `limit` events or messages, in one
    /// commit. True when there is more to do now. A deletion that waits for open transactions continues with
    /// a later call.
    fn erase(&self, limit: usize) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// The last deletion of a tenant; `None` if there was none.
    fn tenant_deletion(
        &self,
        tenant: Tenant,
    ) -> impl Future<Output = Result<Option<TenantDeletion>, StoreError>> + Send;
}

/// A deletion of a tenant's data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TenantDeletion {
    /// The tenant.
    pub tenant: Tenant,
    /// When it began: data that was stored until then is deleted.
    pub began_at: Timestamp,
    /// When it was over; `None` while it runs.
    pub ended_at: Option<Timestamp>,
    /// How many endpoints were deleted.
    pub endpoints: u64,
    /// How many events were erased so far.
    pub events: u64,
    /// How many messages were erased so far.
    pub messages: u64,
}
