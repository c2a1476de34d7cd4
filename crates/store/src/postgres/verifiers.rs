//! The names of verifiers, and the uses of secrets.

use hapax_core::store::{SecretRecord, SecretUse, StoreError, Verifier, VerifierNames};
use hapax_core::{SourceName, Tenant, Timestamp};
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use super::PgStore;
use super::reader;
use super::row::text;

impl VerifierNames for PgStore {
    async fn name_verifiers(&self, mut verifiers: Vec<Verifier>) -> Result<(), StoreError> {
        // Rows are written in the order of their numbers, so that two nodes never deadlock.
        verifiers.sort_by_key(Verifier::number);
        let number = |one: &Verifier| i32::try_from(one.number()).unwrap_or(i32::MAX);
        let numbers: Vec<i32> = verifiers.iter().map(number).collect();
        let schemes: Vec<String> = verifiers.iter().map(|one| one.scheme.clone()).collect();
        let secrets: Vec<String> = verifiers.iter().map(|one| one.secret.clone()).collect();
        self.act(|shared| async move {
            let mut client = shared.pools.lists.checkout().await?;
            client.query(
                "INSERT INTO hapax.verifier (number, scheme, secret) \
                 SELECT * FROM unnest($1::integer[], $2::text[], $3::text[]) ON CONFLICT DO NOTHING",
                &[&numbers, &schemes, &secrets],
            )
            .await?;
            Ok(())
        })
        .await
    }

    async fn note_secrets(&self, mut uses: Vec<SecretUse>) -> Result<(), StoreError> {
        // Rows are written in the order of their key, so that two nodes never deadlock.
        uses.sort_by(|a, b| key(a).cmp(&key(b)));
        uses.dedup_by(|a, b| {
            let is_same = key(a) == key(b);
            if is_same {
                b.used_at = b.used_at.max(a.used_at);
            }
            is_same
        });
        let column = |of: fn(&SecretUse) -> &str| -> Vec<String> {
            uses.iter().map(|one| text(of(one))).collect()
        };
        let sources = column(|one| one.source.as_str());
        let tenants = column(|one| one.tenant.as_str());
        let schemes = column(|one| &one.verifier.scheme);
        let secrets = column(|one| &one.verifier.secret);
        let used: Vec<Option<Timestamp>> = uses.iter().map(|one| one.used_at).collect();
        self.act(|shared| async move {
            let mut client = shared.pools.lists.checkout().await?;
            client.query(
                "INSERT INTO hapax.secret_use AS s (source, tenant, scheme, secret, known_since, used_at) \
                 SELECT n.source, n.tenant, n.scheme, n.secret, coalesce($6, clock_timestamp()), n.used_at \
                 FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::timestamptz[]) \
                     n (source, tenant, scheme, secret, used_at) \
                 ON CONFLICT (source, tenant, scheme, secret) DO UPDATE SET used_at = excluded.used_at \
                 WHERE excluded.used_at > coalesce(s.used_at, '-infinity')",
                &[&sources, &tenants, &schemes, &secrets, &used, &shared.now()],
            )
            .await?;
            Ok(())
        })
        .await
    }

    async fn secrets_of(
        &self,
        source: &SourceName,
        limit: usize,
    ) -> Result<Vec<SecretRecord>, StoreError> {
        let sql = "SELECT tenant, scheme, secret, known_since, used_at FROM hapax.secret_use \
                   WHERE source = $1 \
                   ORDER BY tenant COLLATE \"C\", scheme COLLATE \"C\", secret COLLATE \"C\" LIMIT $2";
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let mut client = self.shared.pools.admin.checkout().await.map_err(reader::read)?;
        let values: [&(dyn ToSql + Sync); 2] = [&text(source.as_str()), &limit];
        let rows = client.query(sql, &values).await.map_err(reader::read)?;
        let record = |row: &Row| SecretRecord {
            tenant: Tenant::new(row.get::<_, &str>(0)),
            verifier: Verifier { scheme: row.get(1), secret: row.get(2) },
            known_since: row.get(3),
            used_at: row.get(4),
        };
        Ok(rows.iter().map(record).collect())
    }
}

fn key(one: &SecretUse) -> (&str, &str, &Verifier) {
    (one.source.as_str(), one.tenant.as_str(), &one.verifier)
}

/// A verifier from two columns, both null if its name is not recorded.
pub(super) fn read(row: &Row, at: usize) -> Option<Verifier> {
    let (scheme, secret): (Option<String>, Option<String>) = (row.get(at), row.get(at + 1));
    scheme.zip(secret).map(|(scheme, secret)| Verifier { scheme, secret })
}
