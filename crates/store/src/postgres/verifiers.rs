//! The names of verifiers.

use hapax_core::store::{StoreError, Verifier, VerifierNames};
use tokio_postgres::Row;

use super::PgStore;

impl VerifierNames for PgStore {
    async fn name_verifiers(&self, mut verifiers: Vec<Verifier>) -> Result<(), StoreError> {
        // Rows are written in the order of their numbers, so that two nodes never deadlock.
        verifiers.sort_by_key(Verifier::number);
        let number = |one: &Verifier| i32::try_from(one.number()).unwrap_or(i32::MAX);
        let numbers: Vec<i32> = verifiers.iter().map(number).collect();
        let schemes: Vec<String> = verifiers.iter().map(|one| one.scheme.clone()).collect();
        let secrets: Vec<String> = verifiers.iter().map(|one| one.secret.clone()).collect();
        self.act(|shared| async move {
            let mut lent = shared.pools.lists.lend().await?;
            lent.query(
                "INSERT INTO hapax.verifier (number, scheme, secret) \
                 SELECT * FROM unnest($1::integer[], $2::text[], $3::text[]) ON CONFLICT DO NOTHING",
                &[&numbers, &schemes, &secrets],
            )
            .await?;
            Ok(())
        })
        .await
    }
}

/// A verifier from two columns, both null if its name is not recorded.
pub(super) fn read(row: &Row, at: usize) -> Option<Verifier> {
    let (scheme, secret): (Option<String>, Option<String>) = (row.get(at), row.get(at + 1));
    scheme.zip(secret).map(|(scheme, secret)| Verifier { scheme, secret })
}
