//! [`TenantDeletions`] for the store. `functions/delete_tenant.sql` and `functions/erase.sql` do the work;
//! the row of a deletion holds its progress, so that any node can continue it.

use hapax_core::Tenant;
use hapax_core::store::{Action, StoreError, TenantDeletion, TenantDeletions};
use tokio_postgres::Row;

use super::connect::{PgError, retried};
use super::prune::most;
use super::row::{hash_of, text};
use super::{PgStore, Shared};

const COLUMNS: &str = "tenant, began_at, ended_at, endpoints, events, messages";

impl TenantDeletions for PgStore {
    async fn delete_tenant(
        &self,
        tenant: Tenant,
        by: Action,
    ) -> Result<TenantDeletion, StoreError> {
        let begun = self
            .act(move |shared| async move { retried(|| begin(&shared, &tenant, &by)).await })
            .await;
        self.shared.sending.changed();
        begun
    }

    async fn erase(&self, limit: usize) -> Result<bool, StoreError> {
        self.act(move |shared| async move { retried(|| erase(&shared, limit)).await }).await
    }

    async fn tenant_deletion(&self, tenant: Tenant) -> Result<Option<TenantDeletion>, StoreError> {
        self.act(move |shared| async move { retried(|| find(&shared, &tenant)).await }).await
    }
}

async fn begin(shared: &Shared, tenant: &Tenant, by: &Action) -> Result<TenantDeletion, PgError> {
    let sql = format!("SELECT {COLUMNS} FROM hapax.delete_tenant($1, $2, $3, $4, $5)");
    let reason = by.reason.as_deref().map(text);
    let mut client = shared.pools.admin.checkout().await?;
    let (tenant, who) = (text(tenant.as_str()), text(&by.who));
    let rows = client.query(&sql, &[&tenant, &who, &reason, &by.at, &shared.now()]).await?;
    Ok(deletion(&rows[0]))
}

async fn erase(shared: &Shared, limit: usize) -> Result<bool, PgError> {
    let mut client = shared.pools.admin.checkout().await?;
    let sql = "SELECT is_more, hashes FROM hapax.erase($1, $2)";
    let rows = client.query(sql, &[&most(limit), &shared.now()]).await?;
    let hashes: Vec<uuid::Uuid> = rows[0].get(1);
    // The entries in other nodes' memory expire within a minute.
    shared.remove_from_caches(&hashes.into_iter().map(hash_of).collect::<Vec<_>>());
    Ok(rows[0].get(0))
}

async fn find(shared: &Shared, tenant: &Tenant) -> Result<Option<TenantDeletion>, PgError> {
    let sql = format!("SELECT {COLUMNS} FROM hapax.tenant_deletion WHERE tenant = $1");
    let mut client = shared.pools.admin.checkout().await?;
    let rows = client.query(&sql, &[&text(tenant.as_str())]).await?;
    Ok(rows.first().map(deletion))
}

fn deletion(row: &Row) -> TenantDeletion {
    let count = |at: usize| row.get::<_, i64>(at).unsigned_abs();
    TenantDeletion {
        tenant: Tenant::new(row.get::<_, &str>(0)),
        began_at: row.get(1),
        ended_at: row.get(2),
        endpoints: count(3),
        events: count(4),
        messages: count(5),
    }
}
