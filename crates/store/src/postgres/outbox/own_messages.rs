//! The messages that Hapax publishes about itself. Most of these messages are published by the
//! functions that make the change. This file publishes the messages that had to wait.

use hapax_core::store::{OwnMessages, StoreError};

use crate::postgres::connect::{PgError, retried};
use crate::postgres::prune::most;
use crate::postgres::{PgStore, Shared};

impl OwnMessages for PgStore {
    async fn publish_deaths(&self, limit: usize) -> Result<bool, StoreError> {
        self.act(move |shared| async move { retried(|| publish_deaths(&shared, limit)).await })
            .await
    }
}

async fn publish_deaths(shared: &Shared, limit: usize) -> Result<bool, PgError> {
    let mut client = shared.pools.admin.checkout().await?;
    let sql = "SELECT hapax.publish_deaths($1, $2)";
    let rows = client.query(sql, &[&most(limit), &shared.now()]).await?;
    let published: i32 = rows[0].get(0);
    Ok(published >= most(limit))
}
