//! The history of traffic, in the counts of all nodes together.

use hapax_core::store::{
    MERGED_MAX, MERGES, MINUTE_SECONDS, NODES_MERGED_AFTER, StoreError, TRAFFIC_KEPT, TrafficAsk,
    TrafficCount, TrafficHistory, TrafficPoint,
};
use hapax_core::{SourceName, Timestamp};
use tokio_postgres::Row;
use uuid::Uuid;

use super::connect::PgError;
use super::reader::read;
use super::{PgStore, Shared};

impl TrafficHistory for PgStore {
    async fn record_traffic(
        &self,
        node: Uuid,
        counts: Vec<TrafficCount>,
    ) -> Result<(), StoreError> {
        self.act(move |shared| async move {
            write(&shared, node, &counts).await?;
            merge(&shared).await
        })
        .await
    }

    async fn traffic(&self, ask: TrafficAsk) -> Result<Vec<TrafficPoint>, StoreError> {
        let rows = self.counts(&ask, "''").await?;
        let point = |row: &Row| {
            let TrafficCount { source: _, at, new, copies, conflicts, rejected, unavailable } =
                count(row);
            TrafficPoint { at, new, copies, conflicts, rejected, unavailable }
        };
        Ok(rows.iter().map(point).collect())
    }

    async fn traffic_by_source(&self, ask: TrafficAsk) -> Result<Vec<TrafficCount>, StoreError> {
        Ok(self.counts(&ask, "source").await?.iter().map(count).collect())
    }
}

impl PgStore {
    /// The counts of each step, and of each value of the expression `of`.
    async fn counts(&self, ask: &TrafficAsk, of: &str) -> Result<Vec<Row>, StoreError> {
        let step = i64::try_from(ask.step.as_secs()).unwrap_or(i64::MAX).max(1);
        let source = ask.source.as_ref().map(|source| source.as_str());
        let sql = format!(
            "SELECT start - start % $4 AS at, {of} AS of, sum(new)::bigint, sum(copies)::bigint, \
                    sum(conflicts)::bigint, sum(rejected)::bigint, sum(unavailable)::bigint \
             FROM hapax.traffic \
             WHERE width IN (60, 3600, 86400) AND start >= $1 AND start < $2 \
               AND ($3::text IS NULL OR source = $3) \
             GROUP BY 1, 2 ORDER BY 1, 2"
        );
        let mut lent = self.shared.pools.admin.lend().await.map_err(read)?;
        let (from, to) = (ask.from.as_second(), ask.to.as_second());
        lent.query(&sql, &[&from, &to, &source, &step]).await.map_err(read)
    }
}

fn count(row: &Row) -> TrafficCount {
    let count = |at| row.get::<_, i64>(at).unsigned_abs();
    TrafficCount {
        source: SourceName::new(row.get::<_, &str>(1)),
        at: Timestamp::from_second(row.get(0)).unwrap_or(Timestamp::UNIX_EPOCH),
        new: count(2),
        copies: count(3),
        conflicts: count(4),
        rejected: count(5),
        unavailable: count(6),
    }
}

/// A node writes only rows of its own.
async fn write(shared: &Shared, node: Uuid, counts: &[TrafficCount]) -> Result<(), PgError> {
    let number = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
    let start = |count: &TrafficCount| {
        let second = count.at.as_second();
        second - second.rem_euclid(MINUTE_SECONDS)
    };
    let starts: Vec<i64> = counts.iter().map(start).collect();
    let sources: Vec<&str> = counts.iter().map(|count| count.source.as_str()).collect();
    let new: Vec<i64> = counts.iter().map(|count| number(count.new)).collect();
    let copies: Vec<i64> = counts.iter().map(|count| number(count.copies)).collect();
    let conflicts: Vec<i64> = counts.iter().map(|count| number(count.conflicts)).collect();
    let rejected: Vec<i64> = counts.iter().map(|count| number(count.rejected)).collect();
    let unavailable: Vec<i64> = counts.iter().map(|count| number(count.unavailable)).collect();
    let mut lent = shared.pools.admin.lend().await?;
    lent.query(
        "INSERT INTO hapax.traffic (width, start, source, node, new, copies, conflicts, rejected, unavailable) \
         SELECT 60, start, source, $1, new, copies, conflicts, rejected, unavailable \
         FROM unnest($2::bigint[], $3::text[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[], \
                     $8::bigint[]) \
              AS counted (start, source, new, copies, conflicts, rejected, unavailable) \
         ON CONFLICT (width, start, source, node) DO UPDATE \
         SET new = excluded.new, copies = excluded.copies, conflicts = excluded.conflicts, \
             rejected = excluded.rejected, unavailable = excluded.unavailable",
        &[&node, &starts, &sources, &new, &copies, &conflicts, &rejected, &unavailable],
    )
    .await?;
    Ok(())
}

/// Merges old counts: those of all nodes for a minute, and then minutes into longer ones. Rows that another node
/// merges are skipped.
async fn merge(shared: &Shared) -> Result<(), PgError> {
    let now = shared.now().unwrap_or_else(Timestamp::now).as_second();
    let most = i64::try_from(MERGED_MAX).unwrap_or(i64::MAX);
    let mut lent = shared.pools.admin.lend().await?;
    let nodes = (MINUTE_SECONDS, MINUTE_SECONDS, NODES_MERGED_AFTER);
    for (from, to, age) in std::iter::once(nodes).chain(MERGES) {
        let of_nodes = match from == to {
            true => "AND node <> '00000000-0000-0000-0000-000000000000' AND width = 60",
            false => "",
        };
        let sql = format!(
            "WITH old AS MATERIALIZED ( \
                 SELECT width, start, source, node FROM hapax.traffic \
                 WHERE width = $1 AND start < $2 {of_nodes} \
                 ORDER BY start LIMIT $3 FOR UPDATE SKIP LOCKED), \
             gone AS ( \
                 DELETE FROM hapax.traffic AS t USING old \
                 WHERE t.width = old.width AND t.start = old.start AND t.source = old.source \
                   AND t.node = old.node \
                 RETURNING t.start, t.source, t.new, t.copies, t.conflicts, t.rejected, t.unavailable) \
             INSERT INTO hapax.traffic AS kept \
                 (width, start, source, node, new, copies, conflicts, rejected, unavailable) \
             SELECT $4, start - start % $4, source, '00000000-0000-0000-0000-000000000000', sum(new), \
                    sum(copies), sum(conflicts), sum(rejected), sum(unavailable) \
             FROM gone GROUP BY 2, 3 ORDER BY 2, 3 \
             ON CONFLICT (width, start, source, node) DO UPDATE \
             SET new = kept.new + excluded.new, copies = kept.copies + excluded.copies, \
                 conflicts = kept.conflicts + excluded.conflicts, \
                 rejected = kept.rejected + excluded.rejected, \
                 unavailable = kept.unavailable + excluded.unavailable"
        );
        lent.query(&sql, &[&from, &(now - age), &most, &to]).await?;
    }
    lent.query(
        "DELETE FROM hapax.traffic WHERE (width, start, source, node) IN ( \
             SELECT width, start, source, node FROM hapax.traffic \
             WHERE width = 86400 AND start < $1 ORDER BY start, source LIMIT $2 \
             FOR UPDATE SKIP LOCKED)",
        &[&(now - TRAFFIC_KEPT), &most],
    )
    .await?;
    Ok(())
}
