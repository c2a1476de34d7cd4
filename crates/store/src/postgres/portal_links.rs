//! Links to the portal. Every act is one statement, and no node remembers a link.

use hapax_core::limits::{PORTAL_PINGS_MAX, PORTAL_PINGS_WITHIN};
use hapax_core::store::{PortalLink, PortalLinkId, PortalLinks, PortalRights, StoreError};
use hapax_core::{Tenant, Timestamp};
use tokio_postgres::Row;

use super::connect::PgError;
use super::reader::read;
use super::row::text;
use super::{PgStore, Shared};

/// The most expired rows that one act deletes in addition to its own work.
const DELETED_MAX: i64 = 100;

const COLUMNS: &str = "id, tenant, may_replay, may_endpoints, created_at, expires_at, entered_at";

impl PortalLinks for PgStore {
    async fn create_portal_link(&self, link: PortalLink, code: [u8; 32]) -> Result<(), StoreError> {
        self.act(move |shared| async move { create(&shared, &link, code).await }).await
    }

    async fn portal_link(&self, code: [u8; 32]) -> Result<Option<PortalLink>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM hapax.portal_link WHERE code = $1");
        let mut client = self.shared.pools.admin.checkout().await.map_err(read)?;
        let rows = client.query(&sql, &[&&code[..]]).await.map_err(read)?;
        Ok(rows.first().map(link_of))
    }

    async fn enter_portal(
        &self,
        code: [u8; 32],
        session: [u8; 32],
        at: Timestamp,
    ) -> Result<Option<PortalLink>, StoreError> {
        let sql = format!(
            "UPDATE hapax.portal_link SET session = $2, entered_at = $3 \
             WHERE code = $1 AND entered_at IS NULL AND expires_at > $3 RETURNING {COLUMNS}"
        );
        self.act(move |shared| async move {
            let mut client = shared.pools.admin.checkout().await?;
            let rows = client.query(&sql, &[&&code[..], &&session[..], &at]).await?;
            Ok(rows.first().map(link_of))
        })
        .await
    }

    async fn portal_session(
        &self,
        link: PortalLinkId,
        session: [u8; 32],
    ) -> Result<Option<PortalLink>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM hapax.portal_link WHERE id = $1 AND session = $2");
        let mut client = self.shared.pools.admin.checkout().await.map_err(read)?;
        let rows = client.query(&sql, &[&link.0, &&session[..]]).await.map_err(read)?;
        Ok(rows.first().map(link_of))
    }

    async fn portal_links(
        &self,
        tenant: Option<Tenant>,
        at: Timestamp,
        limit: usize,
    ) -> Result<Vec<PortalLink>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM hapax.portal_link \
             WHERE expires_at > $2 AND ($1::text IS NULL OR tenant = $1) \
             ORDER BY created_at DESC, id DESC LIMIT $3"
        );
        let tenant = tenant.as_ref().map(|tenant| text(tenant.as_str()));
        let mut client = self.shared.pools.admin.checkout().await.map_err(read)?;
        let rows = client.query(&sql, &[&tenant, &at, &(limit as i64)]).await.map_err(read)?;
        Ok(rows.iter().map(link_of).collect())
    }

    async fn end_portal_link(&self, link: PortalLinkId) -> Result<(), StoreError> {
        self.act(move |shared| async move {
            let mut client = shared.pools.admin.checkout().await?;
            client.query("DELETE FROM hapax.portal_link WHERE id = $1", &[&link.0]).await?;
            Ok(())
        })
        .await
    }

    async fn revoke_portal_links(&self, tenant: Tenant) -> Result<u64, StoreError> {
        self.act(move |shared| async move {
            let mut client = shared.pools.admin.checkout().await?;
            let sql = "DELETE FROM hapax.portal_link WHERE tenant = $1 RETURNING 1";
            Ok(client.query(sql, &[&text(tenant.as_str())]).await?.len() as u64)
        })
        .await
    }

    async fn take_portal_ping(&self, tenant: Tenant, at: Timestamp) -> Result<bool, StoreError> {
        self.act(move |shared| async move { take_ping(&shared, &tenant, at).await }).await
    }
}

async fn create(shared: &Shared, link: &PortalLink, code: [u8; 32]) -> Result<(), PgError> {
    let mut client = shared.pools.admin.checkout().await?;
    client
        .query(
            "WITH ended AS (DELETE FROM hapax.portal_link WHERE id IN \
                        (SELECT id FROM hapax.portal_link \
                         WHERE expires_at <= coalesce($8, clock_timestamp()) LIMIT $9)) \
         INSERT INTO hapax.portal_link \
             (id, tenant, may_replay, may_endpoints, code, created_at, expires_at) \
         VALUES ($1, $2, $3, $4, $5, $6, $7)",
            &[
                &link.id.0,
                &text(link.tenant.as_str()),
                &link.rights.replay,
                &link.rights.endpoints,
                &&code[..],
                &link.created_at,
                &link.expires_at,
                &shared.now(),
                &DELETED_MAX,
            ],
        )
        .await?;
    Ok(())
}

/// Keeps: a tenant sends only so many pings within a span of time. The row of the tenant decides
/// the race.
async fn take_ping(shared: &Shared, tenant: &Tenant, at: Timestamp) -> Result<bool, PgError> {
    let most = i32::try_from(PORTAL_PINGS_MAX).unwrap_or(i32::MAX);
    let since = at.checked_sub(PORTAL_PINGS_WITHIN).unwrap_or(Timestamp::MIN);
    let mut client = shared.pools.admin.checkout().await?;
    let rows = client
        .query(
            "INSERT INTO hapax.portal_ping AS p (tenant, sent) VALUES ($1, ARRAY[$2::timestamptz]) \
             ON CONFLICT (tenant) DO UPDATE \
             SET sent = ARRAY(SELECT s FROM unnest(p.sent) s WHERE s > $3 ORDER BY s) || excluded.sent \
             WHERE (SELECT count(*) FROM unnest(p.sent) s WHERE s > $3) < $4 RETURNING 1",
            &[&text(tenant.as_str()), &at, &since, &i64::from(most)],
        )
        .await?;
    Ok(!rows.is_empty())
}

/// Reads [`COLUMNS`].
fn link_of(row: &Row) -> PortalLink {
    PortalLink {
        id: PortalLinkId(row.get(0)),
        tenant: Tenant::new(row.get::<_, &str>(1)),
        rights: PortalRights { replay: row.get(2), endpoints: row.get(3) },
        created_at: row.get(4),
        expires_at: row.get(5),
        entered_at: row.get(6),
    }
}
