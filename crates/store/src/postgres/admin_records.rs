//! Sessions of the dashboard and the audit trail.

use hapax_core::Timestamp;
use hapax_core::store::{
    AUDIT_KEPT, AdminRecords, AuditEntry, AuditFilter, Cursor, Page, Session, StoreError,
};

use super::connect::PgError;
use super::reader::read;
use super::row::text;
use super::{PgStore, Shared};

/// The most old rows that one act deletes in addition to its own work.
const DELETED_MAX: i64 = 100;

impl AdminRecords for PgStore {
    async fn open_session(&self, session: Session) -> Result<(), StoreError> {
        self.act(|shared| async move { open(&shared, &session).await }).await
    }

    async fn session(&self, hash: [u8; 32]) -> Result<Option<Session>, StoreError> {
        let mut client = self.shared.pools.admin.checkout().await.map_err(read)?;
        let sql = "SELECT token, who, expires_at FROM hapax.session WHERE hash = $1";
        let rows = client.query(sql, &[&&hash[..]]).await.map_err(read)?;
        let session = rows.first().and_then(|row| {
            let token = row.get::<_, &[u8]>(0).try_into().ok()?;
            Some(Session { hash, token, who: row.get(1), expires_at: row.get(2) })
        });
        Ok(session)
    }

    async fn end_session(&self, hash: [u8; 32]) -> Result<(), StoreError> {
        self.act(move |shared| async move {
            let mut client = shared.pools.admin.checkout().await?;
            client.query("DELETE FROM hapax.session WHERE hash = $1", &[&&hash[..]]).await?;
            Ok(())
        })
        .await
    }

    async fn audit(&self, entries: Vec<AuditEntry>) -> Result<(), StoreError> {
        self.act(|shared| async move { append(&shared, &entries).await }).await
    }

    async fn audited(&self, filter: AuditFilter) -> Result<Page<AuditEntry>, StoreError> {
        let before = filter
            .before
            .map_or(i64::MAX, |Cursor(before)| i64::try_from(before).unwrap_or(i64::MAX));
        let limit = i64::try_from(filter.limit).unwrap_or(i64::MAX - 1) + 1;
        let sql = "SELECT entry, at, who, action, subject, status FROM hapax.audit \
                   WHERE entry < $1 AND ($2::text IS NULL OR who = $2) ORDER BY entry DESC LIMIT $3";
        let mut client = self.shared.pools.admin.checkout().await.map_err(read)?;
        let rows = client.query(sql, &[&before, &filter.who, &limit]).await.map_err(read)?;
        let more = rows.len() > filter.limit;
        let shown = &rows[..rows.len().min(filter.limit)];
        let last = shown.last().map(|row| Cursor(row.get::<_, i64>(0).unsigned_abs().into()));
        let entry = |row: &tokio_postgres::Row| AuditEntry {
            at: row.get(1),
            who: row.get(2),
            action: row.get(3),
            subject: row.get(4),
            status: u16::try_from(row.get::<_, i32>(5)).unwrap_or_default(),
        };
        Ok(Page::new(shown.iter().map(entry).collect(), last.filter(|_| more)))
    }
}

async fn open(shared: &Shared, session: &Session) -> Result<(), PgError> {
    let mut client = shared.pools.admin.checkout().await?;
    client.query(
        "WITH ended AS (DELETE FROM hapax.session WHERE hash IN \
                        (SELECT hash FROM hapax.session WHERE expires_at <= coalesce($5, clock_timestamp()) LIMIT $6)) \
         INSERT INTO hapax.session (hash, token, who, expires_at) VALUES ($1, $2, $3, $4) \
         ON CONFLICT (hash) DO NOTHING",
        &[
            &&session.hash[..],
            &&session.token[..],
            &text(&session.who),
            &session.expires_at,
            &shared.now(),
            &DELETED_MAX,
        ],
    )
    .await?;
    Ok(())
}

async fn append(shared: &Shared, entries: &[AuditEntry]) -> Result<(), PgError> {
    let oldest = Timestamp::now().checked_sub(AUDIT_KEPT).unwrap_or(Timestamp::MIN);
    let at: Vec<Timestamp> = entries.iter().map(|entry| entry.at).collect();
    let who: Vec<_> = entries.iter().map(|entry| text(&entry.who)).collect();
    let action: Vec<_> = entries.iter().map(|entry| text(&entry.action)).collect();
    let subject: Vec<_> = entries.iter().map(|entry| text(&entry.subject)).collect();
    let status: Vec<i32> = entries.iter().map(|entry| entry.status.into()).collect();
    let mut client = shared.pools.admin.checkout().await?;
    client.query(
        "WITH old AS (DELETE FROM hapax.audit WHERE at < $6 AND entry IN \
                      (SELECT entry FROM hapax.audit ORDER BY entry LIMIT $7)) \
         INSERT INTO hapax.audit (at, who, action, subject, status) \
         SELECT * FROM unnest($1::timestamptz[], $2::text[], $3::text[], $4::text[], $5::integer[])",
        &[&at, &who, &action, &subject, &status, &oldest, &DELETED_MAX],
    )
    .await?;
    Ok(())
}
