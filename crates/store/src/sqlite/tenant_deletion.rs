//! [`TenantDeletions`] for the store. A row records which tenant is being deleted and the progress. Each
//! slice updates the progress in the commit that erases the data. So a deletion continues after a
//! restart.

use hapax_core::store::{Action, StoreError, TenantDeletion, TenantDeletions};
use hapax_core::{Tenant, Timestamp};
use rusqlite::{Connection, OptionalExtension, Row};

use super::row::{micros, timestamp};
use super::writer::Writer;
use super::{SqliteStore, portal_links, prune, source_secrets, verifiers};

/// The most rows of all tenants that a slice reads for one that it erases: a few milliseconds of the writer.
const READ_MAX: i64 = 5_000;

/// The most events or messages of one slice, for the same time.
const SLICE: usize = 100;

const COLUMNS: &str = "tenant, began_at, ended_at, endpoints, events, messages";

impl TenantDeletions for SqliteStore {
    async fn delete_tenant(
        &self,
        tenant: Tenant,
        by: Action,
    ) -> Result<TenantDeletion, StoreError> {
        let begun = self.writer.act(move |writer| begin(writer, &tenant, &by)).await;
        self.shared.operator_acts.count();
        begun
    }

    async fn erase(&self, limit: usize) -> Result<bool, StoreError> {
        self.writer
            .behind(move |writer| {
                let Some(running) = RunningDeletion::next(&writer.conn)? else { return Ok(false) };
                writer.in_transaction(|writer| running.slice(writer, limit.clamp(1, SLICE)))?;
                Ok(true)
            })
            .await
    }

    async fn tenant_deletion(&self, tenant: Tenant) -> Result<Option<TenantDeletion>, StoreError> {
        self.readers.run(move |conn| find(conn, &tenant)).await
    }
}

fn find(conn: &Connection, tenant: &Tenant) -> rusqlite::Result<Option<TenantDeletion>> {
    conn.prepare_cached(&format!("SELECT {COLUMNS} FROM hapax_tenant_deletion WHERE tenant = ?1"))?
        .query_row([tenant.as_str()], read)
        .optional()
}

fn read(row: &Row<'_>) -> rusqlite::Result<TenantDeletion> {
    let count = |at: usize| -> rusqlite::Result<u64> { Ok(row.get::<_, i64>(at)?.unsigned_abs()) };
    Ok(TenantDeletion {
        tenant: Tenant::new(row.get_ref(0)?.as_str()?),
        began_at: timestamp(row.get(1)?),
        ended_at: row.get::<_, Option<i64>>(2)?.map(timestamp),
        endpoints: count(3)?,
        events: count(4)?,
        messages: count(5)?,
    })
}

fn begin(writer: &mut Writer, tenant: &Tenant, by: &Action) -> rusqlite::Result<TenantDeletion> {
    let running = find(&writer.conn, tenant)?.filter(|known| known.ended_at.is_none());
    if let Some(running) = running {
        return Ok(running);
    }
    let now = timestamp(micros(writer.now()));
    let endpoints = writer.outbox.delete_of_tenant(&writer.conn, tenant, by)?;
    source_secrets::delete_of_tenant(&writer.conn, tenant, by)?;
    portal_links::delete_of_tenant(&writer.conn, tenant)?;
    verifiers::delete_of_tenant(&writer.conn, tenant)?;
    writer
        .conn
        .prepare_cached(
            "INSERT OR REPLACE INTO hapax_tenant_deletion
                 (tenant, began_at, last_event, last_message, endpoints, who, reason)
             VALUES (?1, ?2, (SELECT coalesce(max(seq), 0) FROM hapax_event),
                     (SELECT coalesce(max(seq), 0) FROM hapax_message), ?3, ?4, ?5)",
        )?
        .execute((tenant.as_str(), micros(now), endpoints as i64, &by.who, &by.reason))?;
    Ok(TenantDeletion {
        tenant: tenant.clone(),
        began_at: now,
        ended_at: None,
        endpoints: endpoints as u64,
        events: 0,
        messages: 0,
    })
}

/// A deletion that is not over.
struct RunningDeletion {
    tenant: Tenant,
    passed_event: i64,
    last_event: i64,
    passed_message: i64,
    last_message: i64,
}

/// The result of a slice: the last row that it has read, and how many rows it erased.
pub(super) struct Erased {
    pub(super) reached: i64,
    pub(super) count: usize,
}

impl RunningDeletion {
    fn next(conn: &Connection) -> rusqlite::Result<Option<Self>> {
        conn.prepare_cached(
            "SELECT tenant, passed_event, last_event, passed_message, last_message
             FROM hapax_tenant_deletion INDEXED BY hapax_tenant_deletion_running
             WHERE ended_at IS NULL ORDER BY tenant LIMIT 1",
        )?
        .query_row([], |row| {
            Ok(Self {
                tenant: Tenant::new(row.get_ref(0)?.as_str()?),
                passed_event: row.get(1)?,
                last_event: row.get(2)?,
                passed_message: row.get(3)?,
                last_message: row.get(4)?,
            })
        })
        .optional()
    }

    /// Events first, then messages.
    fn slice(&self, writer: &mut Writer, limit: usize) -> rusqlite::Result<()> {
        let now = writer.now();
        if self.passed_event < self.last_event {
            let last = self.last_event.min(self.passed_event + READ_MAX);
            let erased = prune::erase(writer, &self.tenant, self.passed_event, last, limit)?;
            self.moved(&writer.conn, "passed_event = ?2, events = events + ?3", &erased)
        } else if self.passed_message < self.last_message {
            let last = self.last_message.min(self.passed_message + READ_MAX);
            let outbox = &mut writer.outbox;
            let erased =
                outbox.erase(&writer.conn, &self.tenant, self.passed_message, last, limit)?;
            self.moved(&writer.conn, "passed_message = ?2, messages = messages + ?3", &erased)
        } else {
            self.end(&writer.conn, now)
        }
    }

    fn moved(&self, conn: &Connection, change: &str, erased: &Erased) -> rusqlite::Result<()> {
        conn.prepare_cached(&format!(
            "UPDATE hapax_tenant_deletion SET {change} WHERE tenant = ?1"
        ))?
        .execute((self.tenant.as_str(), erased.reached, erased.count as i64))
        .map(|_| ())
    }

    fn end(&self, conn: &Connection, now: Timestamp) -> rusqlite::Result<()> {
        conn.prepare_cached("UPDATE hapax_tenant_deletion SET ended_at = ?2 WHERE tenant = ?1")?
            .execute((self.tenant.as_str(), micros(now)))
            .map(|_| ())
    }
}
