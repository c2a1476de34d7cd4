//! The last rejections of each source.

use hapax_core::SourceName;
use hapax_core::store::{REJECTIONS_KEPT, Rejection, RejectionRecords, StoreError};
use rusqlite::{Connection, Row};
use uuid::Uuid;

use super::SqliteStore;
use super::row::{micros, timestamp};

impl RejectionRecords for SqliteStore {
    async fn record_rejections(&self, rejections: Vec<Rejection>) -> Result<(), StoreError> {
        self.writer.act(move |writer| add(&writer.conn, &rejections)).await
    }

    async fn rejections(&self, source: &SourceName) -> Result<Vec<Rejection>, StoreError> {
        let source = source.clone();
        self.readers
            .run(move |conn| {
                conn.prepare_cached(
                    "SELECT at, request_id, remote, reason, detail, claimed_id FROM hapax_rejection
                     WHERE source = ?1 ORDER BY at DESC, request_id DESC LIMIT ?2",
                )?
                .query_map((source.as_str(), REJECTIONS_KEPT as i64), |row| read(row, &source))?
                .collect()
            })
            .await
    }
}

fn add(conn: &Connection, rejections: &[Rejection]) -> rusqlite::Result<()> {
    let mut insert = conn.prepare_cached(
        "INSERT INTO hapax_rejection (source, at, request_id, remote, reason, detail, claimed_id)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7) ON CONFLICT DO NOTHING",
    )?;
    let mut sources: Vec<&SourceName> = Vec::new();
    for rejection in rejections {
        let Rejection { source, at, request_id, remote, reason, detail, claimed_id } = rejection;
        insert.execute((
            source.as_str(),
            micros(*at),
            request_id.as_bytes(),
            remote.map(|remote| remote.to_string()),
            reason,
            detail,
            claimed_id,
        ))?;
        if !sources.contains(&source) {
            sources.push(source);
        }
    }
    let mut surplus = conn.prepare_cached(
        "DELETE FROM hapax_rejection WHERE source = ?1 AND (at, request_id) <=
             (SELECT at, request_id FROM hapax_rejection WHERE source = ?1
              ORDER BY at DESC, request_id DESC LIMIT 1 OFFSET ?2)",
    )?;
    for source in sources {
        surplus.execute((source.as_str(), REJECTIONS_KEPT as i64))?;
    }
    Ok(())
}

fn read(row: &Row<'_>, source: &SourceName) -> rusqlite::Result<Rejection> {
    let remote: Option<String> = row.get(2)?;
    Ok(Rejection {
        source: source.clone(),
        at: timestamp(row.get(0)?),
        request_id: Uuid::from_bytes(row.get(1)?),
        remote: remote.and_then(|remote| remote.parse().ok()),
        reason: row.get(3)?,
        detail: row.get(4)?,
        claimed_id: row.get(5)?,
    })
}
