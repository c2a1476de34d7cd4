//! The messages of Hapax about itself that no other act of a store publishes.

use std::future::Future;

use super::StoreError;

/// Publishes the messages of Hapax about itself that were not published at once.
pub trait OwnMessages: Send + Sync + 'static {
    /// Publishes the number of new dead deliveries of at most `limit` endpoints: those whose last such message is at
    /// least [`DEATHS_EVERY`](crate::own_messages::DEATHS_EVERY) old. The first dead delivery after that time is
    /// published in the commit that ends the delivery. Later ones are counted until this call. True when there may be
    /// more.
    fn publish_deaths(&self, limit: usize)
    -> impl Future<Output = Result<bool, StoreError>> + Send;
}
