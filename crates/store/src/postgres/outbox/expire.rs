//! Cancels deliveries that were dead, held or parked for too long. `functions/expire_deliveries.sql` has
//! the rule.

use std::sync::atomic::Ordering;

use hapax_core::Tenant;
use hapax_core::endpoint::EndpointId;
use hapax_core::store::{Expiry, ExpiryAsk, ExpiryNotice, OutboxRetention, StoreError};
use uuid::Uuid;

use crate::postgres::connect::{PgError, retried};
use crate::postgres::prune::most;
use crate::postgres::{PgStore, Shared};

impl OutboxRetention for PgStore {
    async fn expire_deliveries(&self, ask: ExpiryAsk) -> Result<Expiry, StoreError> {
        self.act(move |shared| async move { retried(|| expire(&shared, ask)).await }).await
    }
}

async fn expire(shared: &Shared, ask: ExpiryAsk) -> Result<Expiry, PgError> {
    let micros = |span: std::time::Duration| i64::try_from(span.as_micros()).unwrap_or(i64::MAX);
    let after = shared.sending.expired_up_to.load(Ordering::Relaxed);
    let mut client = shared.pools.admin.checkout().await?;
    let rows = client
        .query(
            "SELECT endpoint, id, tenant, oldest, cancelled \
             FROM hapax.expire_deliveries($1, $2, $3, $4, $5)",
            &[&after, &micros(ask.kept), &micros(ask.notice), &most(ask.limit), &shared.now()],
        )
        .await?;
    let (mut expiry, mut reached) = (Expiry::default(), 0);
    for row in &rows {
        let Some(id) = row.get::<_, Option<Uuid>>(1) else {
            (expiry.more, reached) = (true, row.get(0));
            continue;
        };
        let endpoint = EndpointId(id);
        match row.get::<_, Option<i32>>(4) {
            Some(count) => expiry.cancelled.push((endpoint, u64::from(count.unsigned_abs()))),
            None => expiry.announced.push(ExpiryNotice {
                endpoint,
                tenant: Tenant::new(row.get::<_, &str>(2)),
                oldest: row.get(3),
            }),
        }
    }
    // Each node has its own position. A node that checks endpoints after another node finds nothing
    // to do.
    shared.sending.expired_up_to.store(reached, Ordering::Relaxed);
    Ok(expiry)
}
