//! Links to the portal, on the writer.

use hapax_core::limits::{PORTAL_PINGS_MAX, PORTAL_PINGS_WITHIN};
use hapax_core::store::{PortalLink, PortalLinkId, PortalLinks, PortalRights, StoreError};
use hapax_core::{Tenant, Timestamp};
use rusqlite::{Connection, OptionalExtension, Row};
use uuid::Uuid;

use super::SqliteStore;
use super::row::{micros, timestamp};

/// Rows that one act deletes in addition to its own work.
const DELETED_MAX: u32 = 100;

const COLUMNS: &str = "id, tenant, may_replay, may_endpoints, created_at, expires_at, entered_at";

impl PortalLinks for SqliteStore {
    async fn create_portal_link(&self, link: PortalLink, code: [u8; 32]) -> Result<(), StoreError> {
        self.writer
            .act(move |writer| {
                writer.conn.execute(
                    "DELETE FROM hapax_portal_link WHERE rowid IN
                     (SELECT rowid FROM hapax_portal_link WHERE expires_at <= ?1 LIMIT ?2)",
                    (micros(writer.now()), DELETED_MAX),
                )?;
                writer.conn.execute(
                    "INSERT INTO hapax_portal_link
                         (id, tenant, may_replay, may_endpoints, code, created_at, expires_at)
                     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
                    (
                        link.id.0.as_bytes(),
                        link.tenant.as_str(),
                        link.rights.replay,
                        link.rights.endpoints,
                        code,
                        micros(link.created_at),
                        micros(link.expires_at),
                    ),
                )?;
                Ok(())
            })
            .await
    }

    async fn portal_link(&self, code: [u8; 32]) -> Result<Option<PortalLink>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM hapax_portal_link WHERE code = ?1");
        self.readers
            .run(move |conn| conn.prepare_cached(&sql)?.query_row([code], read).optional())
            .await
    }

    async fn enter_portal(
        &self,
        code: [u8; 32],
        session: [u8; 32],
        at: Timestamp,
    ) -> Result<Option<PortalLink>, StoreError> {
        self.writer
            .act(move |writer| {
                writer
                    .conn
                    .prepare_cached(&format!(
                        "UPDATE hapax_portal_link SET session = ?2, entered_at = ?3
                         WHERE code = ?1 AND entered_at IS NULL AND expires_at > ?3
                         RETURNING {COLUMNS}"
                    ))?
                    .query_row((code, session, micros(at)), read)
                    .optional()
            })
            .await
    }

    async fn portal_session(
        &self,
        link: PortalLinkId,
        session: [u8; 32],
    ) -> Result<Option<PortalLink>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM hapax_portal_link WHERE id = ?1 AND session = ?2");
        self.readers
            .run(move |conn| {
                let key = (link.0.as_bytes(), session);
                conn.prepare_cached(&sql)?.query_row(key, read).optional()
            })
            .await
    }

    async fn portal_links(
        &self,
        tenant: Option<Tenant>,
        at: Timestamp,
        limit: usize,
    ) -> Result<Vec<PortalLink>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM hapax_portal_link
             WHERE expires_at > ?2 AND (?1 IS NULL OR tenant = ?1)
             ORDER BY created_at DESC, id DESC LIMIT ?3"
        );
        self.readers
            .run(move |conn| {
                let tenant = tenant.as_ref().map(Tenant::as_str);
                let asked = (tenant, micros(at), limit as i64);
                conn.prepare_cached(&sql)?.query_map(asked, read)?.collect()
            })
            .await
    }

    async fn end_portal_link(&self, link: PortalLinkId) -> Result<(), StoreError> {
        self.writer
            .act(move |writer| {
                let sql = "DELETE FROM hapax_portal_link WHERE id = ?1";
                writer.conn.execute(sql, [link.0.as_bytes()])?;
                Ok(())
            })
            .await
    }

    async fn revoke_portal_links(&self, tenant: Tenant) -> Result<u64, StoreError> {
        self.writer.act(move |writer| delete_links(&writer.conn, &tenant)).await
    }

    async fn take_portal_ping(&self, tenant: Tenant, at: Timestamp) -> Result<bool, StoreError> {
        self.writer.act(move |writer| take_ping(&writer.conn, &tenant, micros(at))).await
    }
}

/// Deletes the links and sessions of a tenant.
pub(super) fn delete_of_tenant(conn: &Connection, tenant: &Tenant) -> rusqlite::Result<()> {
    delete_links(conn, tenant)?;
    conn.execute("DELETE FROM hapax_portal_ping WHERE tenant = ?1", [tenant.as_str()])?;
    Ok(())
}

fn delete_links(conn: &Connection, tenant: &Tenant) -> rusqlite::Result<u64> {
    let sql = "DELETE FROM hapax_portal_link WHERE tenant = ?1";
    Ok(conn.execute(sql, [tenant.as_str()])? as u64)
}

fn take_ping(conn: &Connection, tenant: &Tenant, at: i64) -> rusqlite::Result<bool> {
    let stored: Option<String> = conn
        .prepare_cached("SELECT sent FROM hapax_portal_ping WHERE tenant = ?1")?
        .query_row([tenant.as_str()], |row| row.get(0))
        .optional()?;
    let within = i64::try_from(PORTAL_PINGS_WITHIN.as_micros()).unwrap_or(i64::MAX);
    // A list that cannot be read counts as empty: the next ping replaces it.
    let sent: Option<Vec<i64>> = stored.and_then(|text| serde_json::from_str(&text).ok());
    let mut sent = sent.unwrap_or_default();
    sent.retain(|earlier| earlier.saturating_add(within) > at);
    if sent.len() >= PORTAL_PINGS_MAX {
        return Ok(false);
    }
    sent.push(at);
    let sent = serde_json::to_string(&sent)
        .map_err(|error| rusqlite::Error::ToSqlConversionFailure(Box::new(error)))?;
    conn.prepare_cached("INSERT OR REPLACE INTO hapax_portal_ping (tenant, sent) VALUES (?1, ?2)")?
        .execute((tenant.as_str(), sent))?;
    Ok(true)
}

/// Reads [`COLUMNS`].
fn read(row: &Row<'_>) -> rusqlite::Result<PortalLink> {
    Ok(PortalLink {
        id: PortalLinkId(Uuid::from_bytes(row.get(0)?)),
        tenant: Tenant::new(row.get_ref(1)?.as_str()?),
        rights: PortalRights { replay: row.get(2)?, endpoints: row.get(3)? },
        created_at: timestamp(row.get(4)?),
        expires_at: timestamp(row.get(5)?),
        entered_at: row.get::<_, Option<i64>>(6)?.map(timestamp),
    })
}
