//! The history of traffic, on the writer.

use hapax_core::store::{
    MERGED_MAX, MERGES, MINUTE_SECONDS, NODES_MERGED_AFTER, StoreError, TRAFFIC_KEPT, TrafficAsk,
    TrafficCount, TrafficHistory, TrafficPoint,
};
use hapax_core::{SourceName, Timestamp};
use rusqlite::Connection;
use uuid::Uuid;

use super::SqliteStore;

impl TrafficHistory for SqliteStore {
    async fn record_traffic(
        &self,
        node: Uuid,
        counts: Vec<TrafficCount>,
    ) -> Result<(), StoreError> {
        self.writer
            .act(move |writer| {
                write(&writer.conn, node, &counts)?;
                merge(&writer.conn, writer.now().as_second())
            })
            .await
    }

    async fn traffic(&self, ask: TrafficAsk) -> Result<Vec<TrafficPoint>, StoreError> {
        let counts = self.readers.run(move |conn| counts(conn, &ask, "''")).await?;
        let point = |count: TrafficCount| {
            let TrafficCount { source: _, at, new, copies, conflicts, rejected, unavailable } =
                count;
            TrafficPoint { at, new, copies, conflicts, rejected, unavailable }
        };
        Ok(counts.into_iter().map(point).collect())
    }

    async fn traffic_by_source(&self, ask: TrafficAsk) -> Result<Vec<TrafficCount>, StoreError> {
        self.readers.run(move |conn| counts(conn, &ask, "source")).await
    }
}

/// The counts of each step, and of each value of the expression `of`.
fn counts(conn: &Connection, ask: &TrafficAsk, of: &str) -> rusqlite::Result<Vec<TrafficCount>> {
    let step = i64::try_from(ask.step.as_secs()).unwrap_or(i64::MAX).max(1);
    let source = ask.source.as_ref().map(|source| source.as_str());
    conn.prepare_cached(&format!(
        "SELECT start - start % ?4 AS at, {of} AS of, sum(new), sum(copies), sum(conflicts), sum(rejected),
                sum(unavailable)
         FROM hapax_traffic
         WHERE width IN (60, 3600, 86400) AND start >= ?1 AND start < ?2
           AND (?3 IS NULL OR source = ?3)
         GROUP BY at, of ORDER BY at, of",
    ))?
    .query_map((ask.from.as_second(), ask.to.as_second(), source, step), |row| {
        let count = |at| row.get::<_, i64>(at).map(i64::unsigned_abs);
        let at = Timestamp::from_second(row.get(0)?);
        Ok(TrafficCount {
            source: SourceName::new(row.get::<_, String>(1)?),
            at: at.unwrap_or(Timestamp::UNIX_EPOCH),
            new: count(2)?,
            copies: count(3)?,
            conflicts: count(4)?,
            rejected: count(5)?,
            unavailable: count(6)?,
        })
    })?
    .collect()
}

fn write(conn: &Connection, node: Uuid, counts: &[TrafficCount]) -> rusqlite::Result<()> {
    let mut insert = conn.prepare_cached(
        "INSERT OR REPLACE INTO hapax_traffic (width, start, source, node, new, copies, conflicts, rejected,
                                               unavailable)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
    )?;
    let number = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
    for TrafficCount { source, at, new, copies, conflicts, rejected, unavailable } in counts {
        let second = at.as_second();
        let start = second - second.rem_euclid(MINUTE_SECONDS);
        let [new, copies, conflicts, rejected, unavailable] =
            [*new, *copies, *conflicts, *rejected, *unavailable].map(number);
        let key = (MINUTE_SECONDS, start, source.as_str(), node.as_bytes());
        insert.execute((
            key.0,
            key.1,
            key.2,
            key.3,
            new,
            copies,
            conflicts,
            rejected,
            unavailable,
        ))?;
    }
    Ok(())
}

/// Merges old counts: those of all processes for a minute, and then minutes into longer ones. Both statements choose
/// the same rows: the first ones by their key.
fn merge(conn: &Connection, now: i64) -> rusqlite::Result<()> {
    let most = i64::try_from(MERGED_MAX).unwrap_or(i64::MAX);
    let nodes = (MINUTE_SECONDS, MINUTE_SECONDS, NODES_MERGED_AFTER);
    for (from, to, age) in std::iter::once(nodes).chain(MERGES) {
        let of_nodes = match from == to {
            true => "AND node <> x'00000000000000000000000000000000' AND width = 60",
            false => "",
        };
        let old = format!(
            "FROM hapax_traffic WHERE width = ?1 AND start < ?2 {of_nodes}
             ORDER BY start, source, node LIMIT ?3"
        );
        conn.prepare_cached(&format!(
            "INSERT INTO hapax_traffic (width, start, source, node, new, copies, conflicts, rejected,
                                        unavailable)
             SELECT ?4, start - start % ?4, source, x'00000000000000000000000000000000',
                    new, copies, conflicts, rejected, unavailable
             FROM (SELECT * {old}) WHERE true
             ON CONFLICT DO UPDATE SET new = new + excluded.new, copies = copies + excluded.copies,
                                       conflicts = conflicts + excluded.conflicts,
                                       rejected = rejected + excluded.rejected,
                                       unavailable = unavailable + excluded.unavailable",
        ))?
        .execute((from, now - age, most, to))?;
        conn.prepare_cached(&format!(
            "DELETE FROM hapax_traffic WHERE (width, start, source, node) IN
                 (SELECT width, start, source, node {old})",
        ))?
        .execute((from, now - age, most))?;
    }
    conn.prepare_cached(
        "DELETE FROM hapax_traffic WHERE (width, start, source, node) IN
             (SELECT width, start, source, node FROM hapax_traffic
              WHERE width = 86400 AND start < ?1 ORDER BY start, source LIMIT ?2)",
    )?
    .execute((now - TRAFFIC_KEPT, most))?;
    Ok(())
}
