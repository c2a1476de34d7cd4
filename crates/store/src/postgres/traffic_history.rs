//! The history of traffic, in the counts of all nodes together.

use hapax_core::Timestamp;
use hapax_core::store::{
    MERGED_MAX, MERGES, MINUTE_SECONDS, StoreError, TRAFFIC_KEPT, TrafficAsk, TrafficCount,
    TrafficHistory, TrafficPoint,
};

use super::connect::PgError;
use super::reader::read;
use super::{PgStore, Shared};

impl TrafficHistory for PgStore {
    async fn record_traffic(&self, counts: Vec<TrafficCount>) -> Result<(), StoreError> {
        self.act(|shared| async move {
            add(&shared, &counts).await?;
            merge(&shared).await
        })
        .await
    }

    async fn traffic(&self, ask: TrafficAsk) -> Result<Vec<TrafficPoint>, StoreError> {
        let step = i64::try_from(ask.step.as_secs()).unwrap_or(i64::MAX).max(1);
        let source = ask.source.as_ref().map(|source| source.as_str());
        let sql = "SELECT start - start % $4 AS at, sum(new)::bigint, sum(copies)::bigint, \
                          sum(rejected)::bigint \
                   FROM hapax.traffic \
                   WHERE width IN (60, 3600, 86400) AND start >= $1 AND start < $2 \
                     AND ($3::text IS NULL OR source = $3) \
                   GROUP BY 1 ORDER BY 1";
        let mut lent = self.shared.pools.admin.lend().await.map_err(read)?;
        let (from, to) = (ask.from.as_second(), ask.to.as_second());
        let rows = lent.query(sql, &[&from, &to, &source, &step]).await.map_err(read)?;
        let point = |row: &tokio_postgres::Row| {
            let count = |at| row.get::<_, i64>(at).unsigned_abs();
            let at = Timestamp::from_second(row.get(0)).unwrap_or(Timestamp::UNIX_EPOCH);
            TrafficPoint { at, new: count(1), copies: count(2), rejected: count(3) }
        };
        Ok(rows.iter().map(point).collect())
    }
}

/// Rows are written in the order of their keys, so that two nodes never wait for each other in a circle.
async fn add(shared: &Shared, counts: &[TrafficCount]) -> Result<(), PgError> {
    let number = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
    let start = |count: &TrafficCount| {
        let second = count.at.as_second();
        second - second.rem_euclid(MINUTE_SECONDS)
    };
    let starts: Vec<i64> = counts.iter().map(start).collect();
    let sources: Vec<&str> = counts.iter().map(|count| count.source.as_str()).collect();
    let new: Vec<i64> = counts.iter().map(|count| number(count.new)).collect();
    let copies: Vec<i64> = counts.iter().map(|count| number(count.copies)).collect();
    let rejected: Vec<i64> = counts.iter().map(|count| number(count.rejected)).collect();
    let mut lent = shared.pools.admin.lend().await?;
    lent.query(
        "INSERT INTO hapax.traffic AS kept (width, start, source, new, copies, rejected) \
         SELECT 60, start, source, sum(new), sum(copies), sum(rejected) \
         FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[]) \
              AS counted (start, source, new, copies, rejected) \
         GROUP BY start, source ORDER BY start, source \
         ON CONFLICT (width, start, source) DO UPDATE \
         SET new = kept.new + excluded.new, copies = kept.copies + excluded.copies, \
             rejected = kept.rejected + excluded.rejected",
        &[&starts, &sources, &new, &copies, &rejected],
    )
    .await?;
    Ok(())
}

/// Merges old counts into longer ones. Rows that another node merges are skipped.
async fn merge(shared: &Shared) -> Result<(), PgError> {
    let now = shared.now().unwrap_or_else(Timestamp::now).as_second();
    let most = i64::try_from(MERGED_MAX).unwrap_or(i64::MAX);
    let mut lent = shared.pools.admin.lend().await?;
    for (from, to, age) in MERGES {
        lent.query(
            "WITH old AS MATERIALIZED ( \
                 SELECT width, start, source FROM hapax.traffic WHERE width = $1 AND start < $2 \
                 ORDER BY start, source LIMIT $3 FOR UPDATE SKIP LOCKED), \
             gone AS ( \
                 DELETE FROM hapax.traffic AS t USING old \
                 WHERE t.width = old.width AND t.start = old.start AND t.source = old.source \
                 RETURNING t.start, t.source, t.new, t.copies, t.rejected) \
             INSERT INTO hapax.traffic AS kept (width, start, source, new, copies, rejected) \
             SELECT $4, start - start % $4, source, sum(new), sum(copies), sum(rejected) \
             FROM gone GROUP BY 2, 3 ORDER BY 2, 3 \
             ON CONFLICT (width, start, source) DO UPDATE \
             SET new = kept.new + excluded.new, copies = kept.copies + excluded.copies, \
                 rejected = kept.rejected + excluded.rejected",
            &[&from, &(now - age), &most, &to],
        )
        .await?;
    }
    lent.query(
        "DELETE FROM hapax.traffic WHERE (width, start, source) IN ( \
             SELECT width, start, source FROM hapax.traffic \
             WHERE width = 86400 AND start < $1 ORDER BY start, source LIMIT $2 \
             FOR UPDATE SKIP LOCKED)",
        &[&(now - TRAFFIC_KEPT), &most],
    )
    .await?;
    Ok(())
}
