//! The traits that every database implements: few methods, each one atomic business act.
//!
//! The caller decides, and the store records. Races are decided by the store's unique keys alone. The
//! guarantees of each act are written here once, and one conformance suite checks them for every store.
//!
//! [`Store`] makes events durable, [`Work`] runs the life cycle of their jobs, [`Operate`] records the
//! decisions of operators, and [`Inspect`] reads for them. [`Outbox`] publishes messages and delivers them,
//! [`InspectOutbox`] reads both for operators, and [`OutboxRetention`] ends deliveries by their age.
//! [`OwnMessages`] publishes messages of Hapax about itself. [`Plans`] apply an act of an operator
//! to many deliveries or events. [`SourceSecretStore`] keeps the sealed secrets of tenants that are
//! added at run time, and [`AdminRecords`] the sessions of the dashboard and the audit trail.
//! [`PortalLinks`] keeps the links of receiving parties to the portal.
//! [`TenantDeletions`] deletes the data of a tenant. [`TrafficHistory`] keeps counts over time,
//! [`EndpointHistory`] those of endpoints, and [`AlertRecords`] the alerts. [`SearchIndex`] indexes the values that operators search for. [`StoreHints`] are for pacing and logs. Idempotency-Keys have their own trait,
//! [`crate::ledger::Ledger`]; [`KeyRecords`] reads them for operators.

mod admin_records;
mod alert_records;
mod endpoint_history;
mod hints;
mod ingest;
mod inspect;
mod key_records;
mod operate;
mod outbox;
mod outbox_retention;
mod own_messages;
mod plans;
mod portal_links;
mod rejections;
mod search_index;
mod source_secrets;
mod tenant_deletion;
mod traffic_history;
mod verifiers;
mod work;

use std::error::Error;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

pub use admin_records::*;
pub use alert_records::*;
pub use endpoint_history::*;
pub use hints::*;
pub use ingest::*;
pub use inspect::*;
pub use key_records::*;
pub use operate::*;
pub use outbox::*;
pub use outbox_retention::*;
pub use own_messages::*;
pub use plans::*;
pub use portal_links::*;
pub use rejections::*;
pub use search_index::*;
pub use source_secrets::*;
pub use tenant_deletion::*;
pub use traffic_history::*;
pub use verifiers::*;
pub use work::*;

pub use crate::message::NewMessage;

/// Why a store refused an act. None of these leaves anything half done.
///
/// One failed commit fails many requests, so the error can be cloned. Clones share their cause.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StoreError {
    /// Nothing can be made durable now. The sender should retry.
    #[error("the store cannot write now: {0}")]
    Unavailable(#[source] Cause),
    /// The store's queue is full.
    #[error("the store's queue is full")]
    Busy,
    /// The store is shutting down.
    #[error("the store is closed")]
    Closed,
    /// A read failed.
    #[error("reading the store: {0}")]
    Read(#[source] Cause),
}

/// The error that made a store fail, or a reason as text.
///
/// `Cause` is not an error itself but dereferences to one, so that [`Error::source`] of a
/// [`StoreError`] is the database's own error, with its code.
#[derive(Debug, Clone)]
pub struct Cause(Arc<dyn Error + Send + Sync>);

impl Cause {
    /// Keeps `error` as the cause.
    pub fn new(error: impl Error + Send + Sync + 'static) -> Self {
        Self(Arc::new(error))
    }
}

impl Deref for Cause {
    type Target = dyn Error + Send + Sync;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl From<&str> for Cause {
    fn from(reason: &str) -> Self {
        Self::from(reason.to_owned())
    }
}

impl From<String> for Cause {
    fn from(reason: String) -> Self {
        Self(Arc::from(Box::<dyn Error + Send + Sync>::from(reason)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // With the text alone a caller cannot distinguish a full disk from a broken one.
    #[test]
    fn an_error_keeps_its_source_through_clones() {
        let full = std::io::Error::from_raw_os_error(28);
        let error = StoreError::Unavailable(Cause::new(full)).clone();
        let source = error.source().and_then(|source| source.downcast_ref::<std::io::Error>());
        assert_eq!(source.and_then(std::io::Error::raw_os_error), Some(28));
        assert_eq!(
            error.to_string(),
            format!("the store cannot write now: {}", std::io::Error::from_raw_os_error(28))
        );
        let text = StoreError::Read("the query panicked".into());
        assert_eq!(text.to_string(), "reading the store: the query panicked");
        assert_eq!(text.source().unwrap().to_string(), "the query panicked");
    }
}
