//! [`SourceSecretStore`] for the store: one table, and the version of all its rows in `hapax_meta`.

use std::path::Path;
use std::time::Duration;

use hapax_core::limits::TENANT_SOURCES_MAX;
use hapax_core::store::{
    Action, SourcePair, SourceSecretRecord, SourceSecretSet, SourceSecretStore, SourceSecretsAct,
    SourceSecretsChange, SourceSecretsChanged, StoreError,
};
use hapax_core::vault::Sealed;
use hapax_core::{SourceName, Tenant};
use rusqlite::{Connection, OpenFlags, Row};
use uuid::Uuid;

use super::row::{micros, timestamp};
use super::{SqliteStore, meta};
use crate::sealed_values::{SealedOwner, SealedValue};

/// The version of the set.
const VERSION: &str = "source_secrets";

impl SourceSecretStore for SqliteStore {
    async fn source_secrets(&self) -> Result<SourceSecretSet, StoreError> {
        self.readers.run(read).await
    }

    async fn source_secrets_version(&self) -> Result<u64, StoreError> {
        self.readers.run(|conn| Ok(meta(conn, VERSION)?.unsigned_abs())).await
    }

    async fn change_source_secrets(
        &self,
        change: SourceSecretsChange,
        by: Action,
    ) -> Result<SourceSecretsChanged, StoreError> {
        self.writer.act(move |writer| apply(&writer.conn, &change, &by)).await
    }
}

/// Reads the set in one snapshot.
fn read(conn: &Connection) -> rusqlite::Result<SourceSecretSet> {
    let snapshot = conn.unchecked_transaction()?;
    let version = meta(&snapshot, VERSION)?.unsigned_abs();
    let pairs = snapshot
        .prepare("SELECT tenant, source, secrets, set_at FROM hapax_source_secret")?
        .query_map([], record)?
        .collect::<rusqlite::Result<_>>()?;
    Ok(SourceSecretSet { version, pairs })
}

fn record(row: &Row<'_>) -> rusqlite::Result<SourceSecretRecord> {
    Ok(SourceSecretRecord {
        pair: SourcePair {
            tenant: Tenant::new(row.get_ref(0)?.as_str()?),
            source: SourceName::new(row.get_ref(1)?.as_str()?),
        },
        sealed: Sealed::from_bytes(row.get(2)?),
        set_at: timestamp(row.get(3)?),
    })
}

/// Applies a change inside the writer's transaction.
fn apply(
    conn: &Connection,
    SourceSecretsChange { version, pair, act }: &SourceSecretsChange,
    by: &Action,
) -> rusqlite::Result<SourceSecretsChanged> {
    let now_at = meta(conn, VERSION)?;
    if now_at.unsigned_abs() != *version {
        return Ok(SourceSecretsChanged::VersionChanged);
    }
    let name = (pair.tenant.as_str(), pair.source.as_str());
    let is_known = conn
        .prepare_cached("SELECT 1 FROM hapax_source_secret WHERE tenant = ?1 AND source = ?2")?
        .exists(name)?;
    let count: i64 = conn
        .prepare_cached("SELECT count(*) FROM hapax_source_secret")?
        .query_row([], |row| row.get(0))?;
    let most = i64::try_from(TENANT_SOURCES_MAX).unwrap_or(i64::MAX);
    match (act, is_known) {
        (SourceSecretsAct::Set(_), false) if count >= most => {
            return Ok(SourceSecretsChanged::TooMany);
        }
        (SourceSecretsAct::Reseal(_) | SourceSecretsAct::Delete, false) => {
            return Ok(SourceSecretsChanged::Unknown);
        }
        (SourceSecretsAct::Set(sealed), _) => {
            conn.prepare_cached(
                "INSERT INTO hapax_source_secret (tenant, source, secrets, set_at)
                 VALUES (?1, ?2, ?3, ?4)
                 ON CONFLICT (tenant, source)
                 DO UPDATE SET secrets = excluded.secrets, set_at = excluded.set_at",
            )?
            .execute((name.0, name.1, sealed.as_bytes(), micros(by.at)))?;
            note_action(conn, pair, "set", by)?;
        }
        (SourceSecretsAct::Reseal(sealed), true) => {
            conn.prepare_cached(
                "UPDATE hapax_source_secret SET secrets = ?3 WHERE tenant = ?1 AND source = ?2",
            )?
            .execute((name.0, name.1, sealed.as_bytes()))?;
        }
        (SourceSecretsAct::Delete, true) => {
            conn.prepare_cached(
                "DELETE FROM hapax_source_secret WHERE tenant = ?1 AND source = ?2",
            )?
            .execute(name)?;
            note_action(conn, pair, "delete", by)?;
        }
    }
    conn.prepare_cached("UPDATE hapax_meta SET value = ?2 WHERE name = ?1")?
        .execute((VERSION, now_at + 1))?;
    Ok(SourceSecretsChanged::Changed { version: version + 1 })
}

/// Deletes the secrets of a tenant for all sources, inside the writer's transaction.
pub(super) fn delete_of_tenant(
    conn: &Connection,
    tenant: &Tenant,
    by: &Action,
) -> rusqlite::Result<()> {
    let sources: Vec<String> = conn
        .prepare_cached("SELECT source FROM hapax_source_secret WHERE tenant = ?1")?
        .query_map([tenant.as_str()], |row| row.get(0))?
        .collect::<rusqlite::Result<_>>()?;
    for source in &sources {
        let pair = SourcePair { tenant: tenant.clone(), source: SourceName::new(source) };
        let version = meta(conn, VERSION)?.unsigned_abs();
        let change = SourceSecretsChange { version, pair, act: SourceSecretsAct::Delete };
        apply(conn, &change, by)?;
    }
    Ok(())
}

fn note_action(
    conn: &Connection,
    pair: &SourcePair,
    what: &str,
    by: &Action,
) -> rusqlite::Result<()> {
    conn.prepare_cached(
        "INSERT INTO hapax_source_secret_action (tenant, source, what, who, reason, at)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
    )?
    .execute((
        pair.tenant.as_str(),
        pair.source.as_str(),
        what,
        &by.who,
        &by.reason,
        micros(by.at),
    ))?;
    Ok(())
}

/// Every sealed value of the database file, which another process may have open. Empty if the file or the
/// tables do not exist yet.
pub(super) fn sealed_values(path: &Path) -> rusqlite::Result<Vec<SealedValue>> {
    if !path.exists() {
        return Ok(Vec::new());
    }
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = Connection::open_with_flags(path, flags)?;
    conn.busy_timeout(Duration::from_secs(5))?;
    let has_tables = conn
        .prepare("SELECT 1 FROM sqlite_schema WHERE name = 'hapax_source_secret'")?
        .exists([])?;
    if !has_tables {
        return Ok(Vec::new());
    }
    let mut values = Vec::new();
    let mut endpoints =
        conn.prepare("SELECT id, secrets, headers FROM hapax_endpoint WHERE deleted_at IS NULL")?;
    let mut rows = endpoints.query([])?;
    while let Some(row) = rows.next()? {
        let owner = SealedOwner::Endpoint(Uuid::from_bytes(row.get(0)?).to_string());
        values.push(SealedValue::new(owner.clone(), row.get(1)?));
        let headers: Option<Vec<u8>> = row.get(2)?;
        values.extend(headers.map(|headers| SealedValue::new(owner, headers)));
    }
    let mut pairs = conn.prepare("SELECT tenant, source, secrets FROM hapax_source_secret")?;
    let mut rows = pairs.query([])?;
    while let Some(row) = rows.next()? {
        let owner = SealedOwner::Tenant { tenant: row.get(0)?, source: row.get(1)? };
        values.push(SealedValue::new(owner, row.get(2)?));
    }
    Ok(values)
}
