//! The messages of Hapax about itself that no other act of a store publishes.

use std::future::Future;

use super::StoreError;

/// Publishes the messages of Hapax about itself that have waited.
pub trait OwnMessages: Send + Sync + 'static {
    /// Publishes the number of dead deliveries of each endpoint whose last such message is
    /// [`DEATHS_EVERY`](crate::own_messages::DEATHS_EVERY) old, of at most `limit` endpoints. The first dead delivery
    /// after such a pause is published in the commit that ends it; those that follow wait for this call. True
    /// when there may be more.
    fn publish_deaths(&self, limit: usize)
    -> impl Future<Output = Result<bool, StoreError>> + Send;
}
