//! The history of traffic, on the writer.

use hapax_core::Timestamp;
use hapax_core::store::{
    MERGED_MAX, MERGES, MINUTE_SECONDS, StoreError, TRAFFIC_KEPT, TrafficAsk, TrafficCount,
    TrafficHistory, TrafficPoint,
};
use rusqlite::Connection;

use super::SqliteStore;

impl TrafficHistory for SqliteStore {
    async fn record_traffic(&self, counts: Vec<TrafficCount>) -> Result<(), StoreError> {
        self.writer
            .act(move |writer| {
                add(&writer.conn, &counts)?;
                merge(&writer.conn, writer.now().as_second())
            })
            .await
    }

    async fn traffic(&self, ask: TrafficAsk) -> Result<Vec<TrafficPoint>, StoreError> {
        self.readers
            .run(move |conn| {
                let step = i64::try_from(ask.step.as_secs()).unwrap_or(i64::MAX).max(1);
                let source = ask.source.as_ref().map(|source| source.as_str());
                conn.prepare_cached(
                    "SELECT start - start % ?4 AS at, sum(new), sum(copies), sum(rejected)
                     FROM hapax_traffic
                     WHERE width IN (60, 3600, 86400) AND start >= ?1 AND start < ?2
                       AND (?3 IS NULL OR source = ?3)
                     GROUP BY at ORDER BY at",
                )?
                .query_map((ask.from.as_second(), ask.to.as_second(), source, step), |row| {
                    let count = |at| row.get::<_, i64>(at).map(i64::unsigned_abs);
                    let at = Timestamp::from_second(row.get(0)?);
                    Ok(TrafficPoint {
                        at: at.unwrap_or(Timestamp::UNIX_EPOCH),
                        new: count(1)?,
                        copies: count(2)?,
                        rejected: count(3)?,
                    })
                })?
                .collect()
            })
            .await
    }
}

fn add(conn: &Connection, counts: &[TrafficCount]) -> rusqlite::Result<()> {
    let mut insert = conn.prepare_cached(
        "INSERT INTO hapax_traffic (width, start, source, new, copies, rejected)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6)
         ON CONFLICT DO UPDATE SET new = new + excluded.new, copies = copies + excluded.copies,
                                   rejected = rejected + excluded.rejected",
    )?;
    let number = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
    for TrafficCount { source, at, new, copies, rejected } in counts {
        let second = at.as_second();
        let start = second - second.rem_euclid(MINUTE_SECONDS);
        let counts = (number(*new), number(*copies), number(*rejected));
        insert.execute((MINUTE_SECONDS, start, source.as_str(), counts.0, counts.1, counts.2))?;
    }
    Ok(())
}

/// Merges old counts into longer ones. Both statements choose the same rows: the first ones by their key.
fn merge(conn: &Connection, now: i64) -> rusqlite::Result<()> {
    let most = i64::try_from(MERGED_MAX).unwrap_or(i64::MAX);
    for (from, to, age) in MERGES {
        let old = (from, now - age, most, to);
        conn.prepare_cached(
            "INSERT INTO hapax_traffic (width, start, source, new, copies, rejected)
             SELECT ?4, start - start % ?4, source, new, copies, rejected FROM
                 (SELECT * FROM hapax_traffic WHERE width = ?1 AND start < ?2
                  ORDER BY start, source LIMIT ?3)
             WHERE true
             ON CONFLICT DO UPDATE SET new = new + excluded.new, copies = copies + excluded.copies,
                                       rejected = rejected + excluded.rejected",
        )?
        .execute(old)?;
        conn.prepare_cached(
            "DELETE FROM hapax_traffic WHERE (width, start, source) IN
                 (SELECT width, start, source FROM hapax_traffic WHERE width = ?1 AND start < ?2
                  ORDER BY start, source LIMIT ?3)",
        )?
        .execute((from, now - age, most))?;
    }
    conn.prepare_cached(
        "DELETE FROM hapax_traffic WHERE (width, start, source) IN
             (SELECT width, start, source FROM hapax_traffic
              WHERE width = 86400 AND start < ?1 ORDER BY start, source LIMIT ?2)",
    )?
    .execute((now - TRAFFIC_KEPT, most))?;
    Ok(())
}
