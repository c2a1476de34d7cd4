//! Idempotency-Keys, as operators read and delete them.

use hapax_core::store::{
    KeyDeleted, KeyFilter, KeyPage, KeyPosition, KeyRecord, KeyRecords, StoreError,
};
use rusqlite::{Connection, OptionalExtension, Row};

use super::SqliteStore;
use super::row::{micros, timestamp};

impl KeyRecords for SqliteStore {
    async fn keys(&self, filter: KeyFilter) -> Result<KeyPage, StoreError> {
        self.readers.run(move |conn| keys(conn, &filter)).await
    }

    async fn delete_key(&self, name: KeyPosition) -> Result<KeyDeleted, StoreError> {
        self.writer
            .act(move |writer| {
                let deleted = writer.conn.execute(
                    "DELETE FROM hapax_reservation
                     WHERE scope = ?1 AND key = ?2 AND (status IS NOT NULL OR leased_until <= ?3)",
                    (&name.scope, &name.key, micros(writer.now())),
                )?;
                if deleted > 0 {
                    return Ok(KeyDeleted::Deleted);
                }
                let is_known = writer
                    .conn
                    .prepare_cached(
                        "SELECT 1 FROM hapax_reservation WHERE scope = ?1 AND key = ?2",
                    )?
                    .exists((&name.scope, &name.key))?;
                Ok(if is_known { KeyDeleted::Busy } else { KeyDeleted::Unknown })
            })
            .await
    }
}

fn keys(conn: &Connection, filter: &KeyFilter) -> rusqlite::Result<KeyPage> {
    let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX - 1);
    let scanned = number(filter.read_max());
    let (scope, key) = filter.begins_after();
    let mut items: Vec<KeyRecord> = conn
        .prepare_cached(
            "SELECT scope, key, attempt, leased_until, expires_at, status, bytes FROM
                 (SELECT * FROM hapax_reservation WHERE (scope, key) > (?1, ?2)
                  ORDER BY scope, key LIMIT ?3)
             WHERE (?4 IS NULL OR substr(scope, 1, length(?4)) = ?4) AND (?5 IS NULL OR key = ?5)
             ORDER BY scope, key LIMIT ?6",
        )?
        .query_map(
            (scope, key, scanned, &filter.scope, &filter.key, number(filter.limit) + 1),
            record,
        )?
        .collect::<rusqlite::Result<_>>()?;
    let position = |it: &KeyRecord| KeyPosition { scope: it.scope.clone(), key: it.key.clone() };
    let next = if items.len() > filter.limit {
        items.truncate(filter.limit);
        items.last().map(position)
    } else if filter.is_selective() {
        conn.prepare_cached(
            "SELECT scope, key FROM hapax_reservation WHERE (scope, key) > (?1, ?2)
             ORDER BY scope, key LIMIT 1 OFFSET ?3",
        )?
        .query_row((scope, key, scanned - 1), |row| {
            Ok(KeyPosition { scope: row.get(0)?, key: row.get(1)? })
        })
        .optional()?
    } else {
        None
    };
    Ok(KeyPage { items, next })
}

fn record(row: &Row<'_>) -> rusqlite::Result<KeyRecord> {
    Ok(KeyRecord {
        scope: row.get(0)?,
        key: row.get(1)?,
        attempt: row.get(2)?,
        leased_until: timestamp(row.get(3)?),
        expires_at: timestamp(row.get(4)?),
        status: row.get(5)?,
        bytes: row.get::<_, i64>(6)?.unsigned_abs(),
    })
}
