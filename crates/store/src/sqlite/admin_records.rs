//! Sessions of the dashboard and the audit trail, on the writer.

use hapax_core::Timestamp;
use hapax_core::store::{
    AUDIT_KEPT, AdminRecords, AuditEntry, AuditFilter, Cursor, Page, Session, StoreError,
};
use rusqlite::{OptionalExtension, Row};

use super::SqliteStore;
use super::row::{micros, timestamp};

/// Rows that one act deletes in addition to its own work.
const DELETED_MAX: u32 = 100;

impl AdminRecords for SqliteStore {
    async fn open_session(&self, session: Session) -> Result<(), StoreError> {
        self.writer
            .act(move |writer| {
                writer.conn.execute(
                    "DELETE FROM hapax_session WHERE rowid IN
                     (SELECT rowid FROM hapax_session WHERE expires_at <= ?1 LIMIT ?2)",
                    (micros(writer.now()), DELETED_MAX),
                )?;
                writer.conn.execute(
                    "INSERT INTO hapax_session (hash, token, who, expires_at) VALUES (?1, ?2, ?3, ?4)",
                    (session.hash, session.token, &session.who, micros(session.expires_at)),
                )?;
                Ok(())
            })
            .await
    }

    async fn session(&self, hash: [u8; 32]) -> Result<Option<Session>, StoreError> {
        self.readers
            .run(move |conn| {
                conn.prepare_cached(
                    "SELECT token, who, expires_at FROM hapax_session WHERE hash = ?1",
                )?
                .query_row([hash], |row| {
                    let expires_at = timestamp(row.get(2)?);
                    Ok(Session { hash, token: row.get(0)?, who: row.get(1)?, expires_at })
                })
                .optional()
            })
            .await
    }

    async fn end_session(&self, hash: [u8; 32]) -> Result<(), StoreError> {
        self.writer
            .act(move |writer| {
                writer.conn.execute("DELETE FROM hapax_session WHERE hash = ?1", [hash])?;
                Ok(())
            })
            .await
    }

    async fn audit(&self, entries: Vec<AuditEntry>) -> Result<(), StoreError> {
        self.writer
            .act(move |writer| {
                let oldest = writer.now().checked_sub(AUDIT_KEPT).unwrap_or(Timestamp::MIN);
                writer.conn.execute(
                    "DELETE FROM hapax_audit WHERE entry IN
                     (SELECT entry FROM hapax_audit ORDER BY entry LIMIT ?2) AND at < ?1",
                    (micros(oldest), DELETED_MAX),
                )?;
                let mut insert = writer.conn.prepare_cached(
                    "INSERT INTO hapax_audit (at, who, action, subject, status) VALUES (?1, ?2, ?3, ?4, ?5)",
                )?;
                for entry in &entries {
                    let AuditEntry { at, who, action, subject, status } = entry;
                    insert.execute((micros(*at), who, action, subject, status))?;
                }
                Ok(())
            })
            .await
    }

    async fn audited(&self, filter: AuditFilter) -> Result<Page<AuditEntry>, StoreError> {
        self.readers
            .run(move |conn| {
                let before = filter.before.map_or(i64::MAX, |Cursor(before)| {
                    i64::try_from(before).unwrap_or(i64::MAX)
                });
                let limit = i64::try_from(filter.limit).unwrap_or(i64::MAX - 1);
                let mut rows: Vec<(i64, AuditEntry)> = conn
                    .prepare_cached(
                        "SELECT entry, at, who, action, subject, status FROM hapax_audit
                         WHERE entry < ?1 AND (?2 IS NULL OR who = ?2) ORDER BY entry DESC LIMIT ?3",
                    )?
                    .query_map((before, &filter.who, limit + 1), entry)?
                    .collect::<rusqlite::Result<_>>()?;
                let more = rows.len() > filter.limit;
                rows.truncate(filter.limit);
                let last = rows.last().map(|(number, _)| Cursor(number.unsigned_abs().into()));
                let items = rows.into_iter().map(|(_, entry)| entry).collect();
                Ok(Page::new(items, last.filter(|_| more)))
            })
            .await
    }
}

fn entry(row: &Row<'_>) -> rusqlite::Result<(i64, AuditEntry)> {
    let entry = AuditEntry {
        at: timestamp(row.get(1)?),
        who: row.get(2)?,
        action: row.get(3)?,
        subject: row.get(4)?,
        status: row.get(5)?,
    };
    Ok((row.get(0)?, entry))
}
