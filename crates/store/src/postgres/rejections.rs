//! The last rejections of each source.

use hapax_core::store::{REJECTIONS_KEPT, Rejection, RejectionRecords, StoreError};
use hapax_core::{SourceName, Timestamp};
use tokio_postgres::Row;
use uuid::Uuid;

use super::connect::PgError;
use super::reader::{lossy, read};
use super::{PgStore, Shared};

impl RejectionRecords for PgStore {
    async fn record_rejections(&self, rejections: Vec<Rejection>) -> Result<(), StoreError> {
        self.act(|shared| async move { add(&shared, &rejections).await }).await
    }

    async fn rejections(&self, source: &SourceName) -> Result<Vec<Rejection>, StoreError> {
        let sql = "SELECT at, request_id, remote, reason, detail, claimed_id FROM hapax.rejection \
                   WHERE source = $1 ORDER BY at DESC, request_id DESC LIMIT $2";
        let kept = i64::try_from(REJECTIONS_KEPT).unwrap_or(i64::MAX);
        let mut client = self.shared.pools.lists.checkout().await.map_err(read)?;
        let rows = client.query(sql, &[&source.as_str(), &kept]).await.map_err(read)?;
        let text = |row: &Row, at: usize| row.get::<_, Option<&[u8]>>(at).map(lossy);
        let rejection = |row: &Row| Rejection {
            source: source.clone(),
            at: row.get(0),
            request_id: row.get(1),
            remote: row.get(2),
            reason: row.get(3),
            detail: text(row, 4),
            claimed_id: text(row, 5),
        };
        Ok(rows.iter().map(rejection).collect())
    }
}

/// Adds rejections, and deletes the oldest. If two nodes add to one source at the same time, a row too many may
/// stay until the next call.
async fn add(shared: &Shared, rejections: &[Rejection]) -> Result<(), PgError> {
    let bytes = |text: &Option<String>| text.as_ref().map(|text| text.clone().into_bytes());
    let sources: Vec<&str> = rejections.iter().map(|one| one.source.as_str()).collect();
    let times: Vec<Timestamp> = rejections.iter().map(|one| one.at).collect();
    let requests: Vec<Uuid> = rejections.iter().map(|one| one.request_id).collect();
    let remotes: Vec<_> = rejections.iter().map(|one| one.remote).collect();
    let reasons: Vec<&str> = rejections.iter().map(|one| one.reason.as_str()).collect();
    let details: Vec<_> = rejections.iter().map(|one| bytes(&one.detail)).collect();
    let claimed: Vec<_> = rejections.iter().map(|one| bytes(&one.claimed_id)).collect();
    let mut client = shared.pools.lists.checkout().await?;
    client.query(
        "INSERT INTO hapax.rejection (source, at, request_id, remote, reason, detail, claimed_id) \
         SELECT * FROM unnest($1::text[], $2::timestamptz[], $3::uuid[], $4::inet[], $5::text[], \
                              $6::bytea[], $7::bytea[]) \
         ON CONFLICT DO NOTHING",
        &[&sources, &times, &requests, &remotes, &reasons, &details, &claimed],
    )
    .await?;
    let kept = i64::try_from(REJECTIONS_KEPT).unwrap_or(i64::MAX);
    client
        .query(
            "DELETE FROM hapax.rejection r USING ( \
             SELECT s.source, o.at, o.request_id \
             FROM (SELECT DISTINCT unnest($1::text[]) AS source) s \
             CROSS JOIN LATERAL ( \
                 SELECT x.at, x.request_id FROM hapax.rejection x WHERE x.source = s.source \
                 ORDER BY x.at DESC, x.request_id DESC LIMIT 1 OFFSET $2) o) old \
         WHERE r.source = old.source AND (r.at, r.request_id) <= (old.at, old.request_id)",
            &[&sources, &kept],
        )
        .await?;
    Ok(())
}
