//! The figures over time, of all nodes together.

use std::collections::BTreeMap;

use hapax_core::store::{
    Completion, Gauges, MERGED_MAX, MERGES, MINUTE_SECONDS, NODES_MERGED_AFTER, StoreError,
    TRAFFIC_KEPT, Tallies, TrafficAsk, TrafficCount, TrafficCounts, TrafficFigures, TrafficHistory,
    TriedJob, TriedVerdict,
};
use hapax_core::{SourceName, Timestamp};
use tokio_postgres::Row;
use uuid::Uuid;

use super::connect::{PgError, PooledClient};
use super::reader::read;
use super::{PgStore, Shared};

const COUNTS: usize = TrafficCounts::COLUMNS.len();

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

    async fn take_completions(&self, limit: usize) -> Result<Vec<Completion>, StoreError> {
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        self.act(move |shared| async move {
            let mut client = shared.pools.admin.checkout().await?;
            let sql = "DELETE FROM hapax.completion WHERE id IN ( \
                           SELECT c.id FROM hapax.completion c ORDER BY c.id LIMIT $1 FOR UPDATE SKIP LOCKED) \
                       RETURNING source, received_at, attempt, steps, started_at, ended_at, run";
            let rows = client.query(sql, &[&limit]).await?;
            Ok(rows.iter().map(completion).collect())
        })
        .await
    }

    async fn traffic_by_source(&self, ask: TrafficAsk) -> Result<Vec<TrafficCount>, StoreError> {
        let mut client = self.shared.pools.admin.checkout().await.map_err(read)?;
        let steps = figures_of(&mut client, &ask).await.map_err(read)?;
        let count = |((at, source), figures)| TrafficCount {
            source: SourceName::new(source),
            at: Timestamp::from_second(at).unwrap_or(Timestamp::UNIX_EPOCH),
            figures,
        };
        Ok(steps.into_iter().map(count).collect())
    }
}

fn completion(row: &Row) -> Completion {
    Completion {
        source: SourceName::new(row.get::<_, &str>(0)),
        job: TriedJob {
            received_at: row.get(1),
            attempt: row.get::<_, i32>(2).unsigned_abs(),
            steps: row.get::<_, i32>(3).unsigned_abs(),
            run: row.get::<_, i32>(6).unsigned_abs(),
            verdict: TriedVerdict::Succeeded,
        },
        began: row.get(4),
        ended: row.get(5),
    }
}

/// The figures of each step and source.
async fn figures_of(
    client: &mut PooledClient,
    ask: &TrafficAsk,
) -> Result<BTreeMap<(i64, String), TrafficFigures>, PgError> {
    let step = i64::try_from(ask.step.as_secs()).unwrap_or(i64::MAX).max(1);
    let source = ask.source.as_ref().map(|source| source.as_str());
    let (from, to) = (ask.from.as_second(), ask.to.as_second());
    let condition = "FROM hapax.traffic \
         WHERE width IN (60, 3600, 86400) AND start >= $1 AND start < $2 \
           AND ($3::text IS NULL OR source = $3)";
    let sums = TrafficCounts::COLUMNS.map(|column| format!("sum({column})::bigint")).join(", ");
    let most = Gauges::COLUMNS.map(|column| format!("max({column})")).join(", ");
    let sql =
        format!("SELECT start - start % $4, source, {sums}, {most} {condition} GROUP BY 1, 2");
    let rows = client.query(&sql, &[&from, &to, &source, &step]).await?;
    let mut steps: BTreeMap<(i64, String), TrafficFigures> =
        rows.iter().map(|row| ((row.get(0), row.get(1)), figures(row))).collect();
    if ask.tallies {
        let sql =
            format!("SELECT start - start % $4, source, tallies {condition} AND tallies <> '{{}}'");
        for row in client.query(&sql, &[&from, &to, &source, &step]).await? {
            if let Some(figures) = steps.get_mut(&(row.get(0), row.get(1))) {
                figures.tallies.add_packed(row.get::<_, Vec<i64>>(2));
            }
        }
    }
    Ok(steps)
}

/// The figures in the columns of a row after step and source.
fn figures(row: &Row) -> TrafficFigures {
    TrafficFigures {
        counts: TrafficCounts::of_numbers(std::array::from_fn(|at| row.get(2 + at))),
        gauges: Gauges::of_numbers(std::array::from_fn(|at| row.get(2 + COUNTS + at))),
        tallies: Tallies::default(),
    }
}

/// A node writes only rows of its own.
async fn write(shared: &Shared, node: Uuid, counts: &[TrafficCount]) -> Result<(), PgError> {
    let columns = [&TrafficCounts::COLUMNS[..], &Gauges::COLUMNS[..], &["tallies"]].concat();
    let places: Vec<_> = (1..=columns.len()).map(|at| format!("${}", at + 4)).collect();
    let replaced: Vec<_> =
        columns.iter().map(|column| format!("{column} = excluded.{column}")).collect();
    let sql = format!(
        "INSERT INTO hapax.traffic (width, start, source, node, {}) VALUES ($1, $2, $3, $4, {}) \
         ON CONFLICT (width, start, source, node) DO UPDATE SET {}",
        columns.join(", "),
        places.join(", "),
        replaced.join(", ")
    );
    let mut client = shared.pools.admin.checkout().await?;
    for count in counts {
        let second = count.at.as_second();
        let start = second - second.rem_euclid(MINUTE_SECONDS);
        let (source, figures) = (count.source.as_str(), &count.figures);
        let (counts, gauges) = (figures.counts.numbers(), figures.gauges.numbers());
        let tallies = figures.tallies.packed();
        let mut values: Vec<&(dyn tokio_postgres::types::ToSql + Sync)> =
            vec![&MINUTE_SECONDS, &start, &source, &node];
        for number in counts.iter().chain(&gauges) {
            values.push(number);
        }
        values.push(&tallies);
        client.query(&sql, &values).await?;
    }
    Ok(())
}

/// Merges old figures: those of all nodes for a minute, and then minutes into longer ones. Rows that another node
/// merges are skipped.
async fn merge(shared: &Shared) -> Result<(), PgError> {
    let now = shared.now().unwrap_or_else(Timestamp::now).as_second();
    let most = i64::try_from(MERGED_MAX).unwrap_or(i64::MAX);
    let columns = [&TrafficCounts::COLUMNS[..], &Gauges::COLUMNS[..]].concat().join(", ");
    let sums = TrafficCounts::COLUMNS.map(|column| format!("sum({column}) AS {column}")).join(", ");
    let largest = Gauges::COLUMNS.map(|column| format!("max({column}) AS {column}")).join(", ");
    let added = TrafficCounts::COLUMNS
        .map(|column| format!("{column} = kept.{column} + excluded.{column}"));
    let grown = Gauges::COLUMNS
        .map(|column| format!("{column} = greatest(kept.{column}, excluded.{column})"));
    let mut client = shared.pools.admin.checkout().await?;
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
                 RETURNING t.*), \
             counted AS ( \
                 SELECT start - start % $4 AS start, source, {sums}, {largest} FROM gone GROUP BY 1, 2), \
             tallied AS ( \
                 SELECT start, source, array_agg((count << 12) | code) AS tallies \
                 FROM (SELECT start - start % $4 AS start, source, number & 4095 AS code, \
                              sum(number >> 12)::bigint AS count \
                       FROM gone, unnest(gone.tallies) AS number GROUP BY 1, 2, 3) AS summed \
                 GROUP BY 1, 2) \
             INSERT INTO hapax.traffic AS kept (width, start, source, node, {columns}, tallies) \
             SELECT $4, start, source, '00000000-0000-0000-0000-000000000000', {columns}, \
                    coalesce(tallies, '{{}}') \
             FROM counted LEFT JOIN tallied USING (start, source) ORDER BY start, source \
             ON CONFLICT (width, start, source, node) DO UPDATE \
             SET {}, {}, tallies = hapax.add_tallies(kept.tallies, excluded.tallies)",
            added.join(", "),
            grown.join(", ")
        );
        client.query(&sql, &[&from, &(now - age), &most, &to]).await?;
    }
    client
        .query(
            "DELETE FROM hapax.traffic WHERE (width, start, source, node) IN ( \
             SELECT width, start, source, node FROM hapax.traffic \
             WHERE width = 86400 AND start < $1 ORDER BY start, source LIMIT $2 \
             FOR UPDATE SKIP LOCKED)",
            &[&(now - TRAFFIC_KEPT), &most],
        )
        .await?;
    Ok(())
}
