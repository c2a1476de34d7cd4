//! [`SourceSecretStore`] for the store: one table, and one row with the version of all its rows. The lock of
//! that row serialises the changes of several nodes.

use hapax_core::limits::TENANT_SOURCES_MAX;
use hapax_core::store::{
    Action, SourcePair, SourceSecretRecord, SourceSecretSet, SourceSecretStore, SourceSecretsAct,
    SourceSecretsChange, SourceSecretsChanged, StoreError,
};
use hapax_core::vault::Sealed;
use hapax_core::{SourceName, Tenant};
use tokio_postgres::Row;

use super::connect::{ClientPool, PgError, retried};
use super::jobs::only;
use super::reader::read;
use super::row::{stamp, text};
use super::{PgStore, Shared};
use crate::sealed_values::{SealedOwner, SealedValue};

impl SourceSecretStore for PgStore {
    async fn source_secrets(&self) -> Result<SourceSecretSet, StoreError> {
        all(&self.shared).await.map_err(read)
    }

    async fn source_secrets_version(&self) -> Result<u64, StoreError> {
        version(&self.shared).await.map_err(read)
    }

    async fn change_source_secrets(
        &self,
        change: SourceSecretsChange,
        by: Action,
    ) -> Result<SourceSecretsChanged, StoreError> {
        self.act(move |shared| async move { retried(|| apply(&shared, &change, &by)).await }).await
    }
}

async fn version(shared: &Shared) -> Result<u64, PgError> {
    let mut client = shared.pools.admin.checkout().await?;
    let rows = client.query("SELECT version FROM hapax.source_secret_version", &[]).await?;
    Ok(only(&rows)?.get::<_, i64>(0).unsigned_abs())
}

/// Reads the version and the pairs in one statement, and so as of one moment.
async fn all(shared: &Shared) -> Result<SourceSecretSet, PgError> {
    let mut client = shared.pools.admin.checkout().await?;
    let rows = client
        .query(
            "SELECT v.version, s.tenant, s.source, s.secrets, s.set_at \
             FROM hapax.source_secret_version v LEFT JOIN hapax.source_secret s ON true",
            &[],
        )
        .await?;
    let version = only(&rows)?.get::<_, i64>(0).unsigned_abs();
    Ok(SourceSecretSet { version, pairs: rows.iter().filter_map(record).collect() })
}

/// The pair of a row; `None` for the only row of an empty set.
fn record(row: &Row) -> Option<SourceSecretRecord> {
    let tenant: Option<&str> = row.get(1);
    Some(SourceSecretRecord {
        pair: SourcePair {
            tenant: Tenant::new(tenant?),
            source: SourceName::new(row.get::<_, &str>(2)),
        },
        sealed: Sealed::from_bytes(row.get(3)),
        set_at: row.get(4),
    })
}

async fn apply(
    shared: &Shared,
    SourceSecretsChange { version, pair, act }: &SourceSecretsChange,
    by: &Action,
) -> Result<SourceSecretsChanged, PgError> {
    let (number, secrets) = match act {
        SourceSecretsAct::Set(sealed) => (0, Some(sealed.as_bytes())),
        SourceSecretsAct::Reseal(sealed) => (1, Some(sealed.as_bytes())),
        SourceSecretsAct::Delete => (2, None),
    };
    let most = i64::try_from(TENANT_SOURCES_MAX).unwrap_or(i64::MAX);
    let mut client = shared.pools.admin.checkout().await?;
    let rows = client
        .query(
            "SELECT hapax.change_source_secrets($1, $2, $3, $4, $5, $6, $7, $8, $9)",
            &[
                &i64::try_from(*version).unwrap_or(i64::MAX),
                &text(pair.tenant.as_str()),
                &text(pair.source.as_str()),
                &number,
                &secrets,
                &text(&by.who),
                &by.reason.as_deref().map(text),
                &stamp(by.at),
                &most,
            ],
        )
        .await?;
    Ok(match only(&rows)?.get(0) {
        0 => SourceSecretsChanged::Changed { version: version + 1 },
        1 => SourceSecretsChanged::VersionChanged,
        3 => SourceSecretsChanged::TooMany,
        _unknown => SourceSecretsChanged::Unknown,
    })
}

/// Every sealed value of the database. Empty if the tables do not exist yet.
pub(super) async fn sealed_values(pool: &ClientPool) -> Result<Vec<SealedValue>, PgError> {
    let mut client = pool.checkout().await?;
    let exists = "SELECT to_regclass('hapax.source_secret') IS NOT NULL";
    if !only(&client.query(exists, &[]).await?)?.get::<_, bool>(0) {
        return Ok(Vec::new());
    }
    let rows = client
        .query(
            "SELECT e.id::text, NULL, e.secrets FROM hapax.endpoint e WHERE e.deleted_at IS NULL \
             UNION ALL SELECT e.id::text, NULL, e.headers FROM hapax.endpoint e \
             WHERE e.deleted_at IS NULL AND e.headers IS NOT NULL \
             UNION ALL SELECT s.tenant, s.source, s.secrets FROM hapax.source_secret s",
            &[],
        )
        .await?;
    let value = |row: &Row| {
        let owner = match row.get::<_, Option<String>>(1) {
            None => SealedOwner::Endpoint(row.get(0)),
            Some(source) => SealedOwner::Tenant { tenant: row.get(0), source },
        };
        SealedValue::new(owner, row.get(2))
    };
    Ok(rows.iter().map(value).collect())
}
