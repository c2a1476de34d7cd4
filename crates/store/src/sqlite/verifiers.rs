//! The names of verifiers, and the uses of secrets.

use hapax_core::store::{SecretRecord, SecretUse, StoreError, Verifier, VerifierNames};
use hapax_core::{SourceName, Tenant};
use rusqlite::{Connection, Row};

use super::SqliteStore;
use super::row::{micros, timestamp};
use super::transaction::Transaction;

impl VerifierNames for SqliteStore {
    async fn name_verifiers(&self, verifiers: Vec<Verifier>) -> Result<(), StoreError> {
        self.writer
            .act(move |writer| {
                let mut insert = writer.conn.prepare_cached(
                    "INSERT INTO hapax_verifier (number, scheme, secret) VALUES (?1, ?2, ?3)
                     ON CONFLICT DO NOTHING",
                )?;
                for verifier in &verifiers {
                    let number = i64::try_from(verifier.number()).unwrap_or(i64::MAX);
                    insert.execute((number, &verifier.scheme, &verifier.secret))?;
                }
                Ok(())
            })
            .await
    }

    async fn note_secrets(&self, uses: Vec<SecretUse>) -> Result<(), StoreError> {
        self.writer
            .behind(move |writer| {
                let now = micros(writer.now());
                let tx = Transaction::begin_unsynced(&writer.conn)?;
                let mut note = writer.conn.prepare_cached(
                    "INSERT INTO hapax_secret_use (source, tenant, scheme, secret, known_since, used_at)
                     VALUES (?1, ?2, ?3, ?4, ?5, ?6)
                     ON CONFLICT DO UPDATE SET used_at = excluded.used_at
                     WHERE excluded.used_at > ifnull(used_at, -9223372036854775808)",
                )?;
                for SecretUse { tenant, source, verifier, used_at } in &uses {
                    note.execute((
                        source.as_str(),
                        tenant.as_str(),
                        &verifier.scheme,
                        &verifier.secret,
                        now,
                        used_at.map(micros),
                    ))?;
                }
                drop(note);
                tx.commit()
            })
            .await
    }

    async fn secrets_of(
        &self,
        source: &SourceName,
        limit: usize,
    ) -> Result<Vec<SecretRecord>, StoreError> {
        let source = source.clone();
        self.readers
            .run(move |conn| {
                let record = |row: &Row<'_>| {
                    Ok(SecretRecord {
                        tenant: Tenant::new(row.get_ref(0)?.as_str()?),
                        verifier: Verifier { scheme: row.get(1)?, secret: row.get(2)? },
                        known_since: timestamp(row.get(3)?),
                        used_at: row.get::<_, Option<i64>>(4)?.map(timestamp),
                    })
                };
                conn.prepare_cached(
                    "SELECT tenant, scheme, secret, known_since, used_at FROM hapax_secret_use
                     WHERE source = ?1 ORDER BY tenant, scheme, secret LIMIT ?2",
                )?
                .query_map((source.as_str(), limit as i64), record)?
                .collect()
            })
            .await
    }
}

/// Deletes the records of a tenant.
pub(super) fn delete_of_tenant(conn: &Connection, tenant: &Tenant) -> rusqlite::Result<()> {
    conn.execute("DELETE FROM hapax_secret_use WHERE tenant = ?1", [tenant.as_str()])?;
    Ok(())
}

/// A verifier from two columns, both null if its name is not recorded.
pub(super) fn read(row: &Row<'_>, at: usize) -> rusqlite::Result<Option<Verifier>> {
    let (scheme, secret): (Option<String>, Option<String>) = (row.get(at)?, row.get(at + 1)?);
    Ok(scheme.zip(secret).map(|(scheme, secret)| Verifier { scheme, secret }))
}
