//! The names of verifiers.

use hapax_core::store::{StoreError, Verifier, VerifierNames};
use rusqlite::Row;

use super::SqliteStore;

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
}

/// A verifier from two columns, both null if its name is not recorded.
pub(super) fn read(row: &Row<'_>, at: usize) -> rusqlite::Result<Option<Verifier>> {
    let (scheme, secret): (Option<String>, Option<String>) = (row.get(at)?, row.get(at + 1)?);
    Ok(scheme.zip(secret).map(|(scheme, secret)| Verifier { scheme, secret }))
}
