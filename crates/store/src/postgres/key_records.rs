//! Idempotency-Keys, as operators read and delete them.

use hapax_core::store::{
    KeyDeleted, KeyFilter, KeyPage, KeyPosition, KeyRecord, KeyRecords, StoreError,
};
use tokio_postgres::Row;

use super::PgStore;
use super::connect::PgError;
use super::reader::read;

impl KeyRecords for PgStore {
    async fn keys(&self, filter: KeyFilter) -> Result<KeyPage, StoreError> {
        self.read_keys(filter).await.map_err(read)
    }

    async fn delete_key(&self, name: KeyPosition) -> Result<KeyDeleted, StoreError> {
        self.act(|shared| async move {
            let mut client = shared.pools.admin.checkout().await?;
            // A row that a user's open transaction holds is skipped instead of waited for.
            let sql = "WITH free AS MATERIALIZED ( \
                           SELECT scope, key FROM hapax.reservation \
                           WHERE scope = $1 AND key = $2 \
                             AND (status IS NOT NULL OR leased_until <= coalesce($3, clock_timestamp())) \
                           FOR UPDATE SKIP LOCKED), \
                       gone AS ( \
                           DELETE FROM hapax.reservation AS r USING free \
                           WHERE r.scope = free.scope AND r.key = free.key RETURNING 1) \
                       SELECT (SELECT count(*) FROM gone), \
                              (SELECT count(*) FROM hapax.reservation WHERE scope = $1 AND key = $2)";
            let rows = client.query(sql, &[&name.scope, &name.key, &shared.now()]).await?;
            let (deleted, known): (i64, i64) =
                rows.first().map_or((0, 0), |row| (row.get(0), row.get(1)));
            Ok(match (deleted, known) {
                (1.., _) => KeyDeleted::Deleted,
                (_, 1..) => KeyDeleted::Busy,
                (_, _) => KeyDeleted::Unknown,
            })
        })
        .await
    }
}

impl PgStore {
    async fn read_keys(&self, filter: KeyFilter) -> Result<KeyPage, PgError> {
        let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX - 1);
        let scanned = number(filter.read_max());
        let (scope, key) = filter.begins_after();
        let mut client = self.shared.pools.admin.checkout().await?;
        let sql = "WITH scanned AS MATERIALIZED ( \
                       SELECT scope, key, attempt, leased_until, expires_at, status, bytes \
                       FROM hapax.reservation WHERE (scope, key) > ($1, $2) \
                       ORDER BY scope, key LIMIT $3) \
                   SELECT * FROM scanned \
                   WHERE ($4::text IS NULL OR starts_with(scope, $4)) AND ($5::text IS NULL OR key = $5) \
                   ORDER BY scope, key LIMIT $6";
        let most = number(filter.limit) + 1;
        let rows =
            client.query(sql, &[&scope, &key, &scanned, &filter.scope, &filter.key, &most]).await?;
        let items: Vec<_> = rows.iter().take(filter.limit).map(record).collect();
        let next = if rows.len() > filter.limit {
            items.last().map(|it| KeyPosition { scope: it.scope.clone(), key: it.key.clone() })
        } else if filter.is_selective() {
            let sql = "SELECT scope, key FROM hapax.reservation WHERE (scope, key) > ($1, $2) \
                       ORDER BY scope, key LIMIT 1 OFFSET $3";
            let last = client.query(sql, &[&scope, &key, &(scanned - 1)]).await?;
            last.first().map(|row| KeyPosition { scope: row.get(0), key: row.get(1) })
        } else {
            None
        };
        Ok(KeyPage { items, next })
    }
}

fn record(row: &Row) -> KeyRecord {
    KeyRecord {
        scope: row.get(0),
        key: row.get(1),
        attempt: row.get::<_, i32>(2).unsigned_abs(),
        leased_until: row.get(3),
        expires_at: row.get(4),
        status: row.get::<_, Option<i32>>(5).and_then(|status| u16::try_from(status).ok()),
        bytes: row.get::<_, i64>(6).unsigned_abs(),
    }
}
