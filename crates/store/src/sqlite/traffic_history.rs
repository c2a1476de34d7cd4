//! The figures over time, on the writer.

use std::collections::BTreeMap;

use hapax_core::store::{
    Completion, Gauges, MERGED_MAX, MERGES, MINUTE_SECONDS, NODES_MERGED_AFTER, StoreError,
    TRAFFIC_KEPT, Tallies, TrafficAsk, TrafficCount, TrafficCounts, TrafficFigures, TrafficHistory,
};
use hapax_core::{SourceName, Timestamp};
use rusqlite::types::{ToSql, Value};
use rusqlite::{Connection, Row, params_from_iter};
use uuid::Uuid;

use super::SqliteStore;

const COUNTS: usize = TrafficCounts::COLUMNS.len();
const GAUGES: usize = Gauges::COLUMNS.len();

impl TrafficHistory for SqliteStore {
    async fn record_traffic(
        &self,
        node: Uuid,
        counts: Vec<TrafficCount>,
    ) -> Result<(), StoreError> {
        self.writer
            .act(move |writer| {
                for count in &counts {
                    let start = floor(count.at.as_second(), MINUTE_SECONDS);
                    let key =
                        Key { width: MINUTE_SECONDS, start, source: count.source.to_string() };
                    write(&writer.conn, &key, node, &count.figures)?;
                }
                merge(&writer.conn, writer.now().as_second())
            })
            .await
    }

    async fn take_completions(&self, _: usize) -> Result<Vec<Completion>, StoreError> {
        // Only PostgreSQL has functions that complete jobs without a node.
        Ok(Vec::new())
    }

    async fn traffic_by_source(&self, ask: TrafficAsk) -> Result<Vec<TrafficCount>, StoreError> {
        self.readers.run(move |conn| read(conn, &ask)).await
    }
}

/// The key of a row of figures, without the node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    width: i64,
    start: i64,
    source: String,
}

fn floor(second: i64, width: i64) -> i64 {
    second - second.rem_euclid(width)
}

/// The figures of each step and source.
fn read(conn: &Connection, ask: &TrafficAsk) -> rusqlite::Result<Vec<TrafficCount>> {
    let step = i64::try_from(ask.step.as_secs()).unwrap_or(i64::MAX).max(1);
    let source = ask.source.as_ref().map(|source| source.as_str());
    let asked = (ask.from.as_second(), ask.to.as_second(), source, step);
    // The rows are added up here: SQLite would sort them for a GROUP BY, and could not add tallies.
    let tallies = if ask.tallies { "tallies" } else { "x''" };
    let mut each = conn.prepare_cached(&format!(
        "SELECT start - start % ?4, source, {}, {tallies} FROM hapax_traffic
         WHERE width IN (60, 3600, 86400) AND start >= ?1 AND start < ?2
           AND (?3 IS NULL OR source = ?3)",
        columns()
    ))?;
    let mut steps: BTreeMap<i64, BTreeMap<String, TrafficFigures>> = BTreeMap::new();
    let mut rows = each.query(asked)?;
    while let Some(row) = rows.next()? {
        let step = steps.entry(row.get(0)?).or_default();
        let source = row.get_ref(1)?.as_str()?;
        let more = figures(row, 2, Tallies::default())?;
        let sum = match step.get_mut(source) {
            Some(sum) => sum,
            None => step.entry(source.to_owned()).or_default(),
        };
        sum.add(&more);
        sum.tallies.add_bytes(row.get_ref(2 + COUNTS + GAUGES)?.as_blob()?);
    }
    let count = |at: i64, (source, figures): (String, TrafficFigures)| TrafficCount {
        source: SourceName::new(source),
        at: Timestamp::from_second(at).unwrap_or(Timestamp::UNIX_EPOCH),
        figures,
    };
    let counts = steps
        .into_iter()
        .flat_map(|(at, of_step)| of_step.into_iter().map(move |one| count(at, one)));
    Ok(counts.collect())
}

/// The figures in the columns of a row from `first` on.
fn figures(row: &Row<'_>, first: usize, tallies: Tallies) -> rusqlite::Result<TrafficFigures> {
    let mut counts = [0; COUNTS];
    for (at, number) in counts.iter_mut().enumerate() {
        *number = row.get(first + at)?;
    }
    let mut gauges = [0; GAUGES];
    for (at, number) in gauges.iter_mut().enumerate() {
        *number = row.get(first + COUNTS + at)?;
    }
    Ok(TrafficFigures {
        counts: TrafficCounts::of_numbers(counts),
        gauges: Gauges::of_numbers(gauges),
        tallies,
    })
}

fn columns() -> String {
    [&TrafficCounts::COLUMNS[..], &Gauges::COLUMNS[..]].concat().join(", ")
}

/// Writes figures in the place of those that were there.
fn write(
    conn: &Connection,
    key: &Key,
    node: Uuid,
    figures: &TrafficFigures,
) -> rusqlite::Result<()> {
    let numbers = figures.counts.numbers().into_iter().chain(figures.gauges.numbers());
    let mut values: Vec<Value> = vec![
        key.width.into(),
        key.start.into(),
        key.source.clone().into(),
        node.as_bytes().to_vec().into(),
    ];
    values.extend(numbers.map(Value::from));
    values.push(figures.tallies.bytes().into());
    let places = vec!["?"; values.len()].join(", ");
    conn.prepare_cached(&format!(
        "INSERT OR REPLACE INTO hapax_traffic (width, start, source, node, {}, tallies)
         VALUES ({places})",
        columns()
    ))?
    .execute(params_from_iter(values))?;
    Ok(())
}

/// Merges old figures: those of all processes for a minute, and then minutes into longer ones.
fn merge(conn: &Connection, now: i64) -> rusqlite::Result<()> {
    let most = i64::try_from(MERGED_MAX).unwrap_or(i64::MAX);
    let nodes = (MINUTE_SECONDS, MINUTE_SECONDS, NODES_MERGED_AFTER);
    for (from, to, age) in std::iter::once(nodes).chain(MERGES) {
        let of_nodes = match from == to {
            true => "AND node <> x'00000000000000000000000000000000' AND width = 60",
            false => "",
        };
        let condition = format!(
            "WHERE width = ?1 AND start < ?2 {of_nodes} ORDER BY start, source, node LIMIT ?3"
        );
        let mut merged: BTreeMap<Key, TrafficFigures> = BTreeMap::new();
        let mut take = conn.prepare_cached(&format!(
            "DELETE FROM hapax_traffic WHERE (width, start, source, node) IN
                 (SELECT width, start, source, node FROM hapax_traffic {condition})
             RETURNING start, source, {}, tallies",
            columns()
        ))?;
        add(&mut merged, to, &mut take, &[&from, &(now - age), &most])?;
        for (key, mut figures) in merged {
            let mut before = BTreeMap::new();
            let mut take = conn.prepare_cached(&format!(
                "DELETE FROM hapax_traffic
                 WHERE width = ?1 AND start = ?2 AND source = ?3
                   AND node = x'00000000000000000000000000000000'
                 RETURNING start, source, {}, tallies",
                columns()
            ))?;
            add(&mut before, to, &mut take, &[&key.width, &key.start, &key.source])?;
            before.values().for_each(|earlier| figures.add(earlier));
            write(conn, &key, Uuid::nil(), &figures)?;
        }
    }
    conn.prepare_cached(
        "DELETE FROM hapax_traffic WHERE (width, start, source, node) IN
             (SELECT width, start, source, node FROM hapax_traffic
              WHERE width = 86400 AND start < ?1 ORDER BY start, source LIMIT ?2)",
    )?
    .execute((now - TRAFFIC_KEPT, most))?;
    Ok(())
}

/// Adds the figures of all rows that `take` returns, in steps of `width` seconds.
fn add(
    merged: &mut BTreeMap<Key, TrafficFigures>,
    width: i64,
    take: &mut rusqlite::Statement<'_>,
    asked: &[&dyn ToSql],
) -> rusqlite::Result<()> {
    let mut rows = take.query(asked)?;
    while let Some(row) = rows.next()? {
        let mut tallies = Tallies::default();
        tallies.add_bytes(row.get_ref(2 + COUNTS + GAUGES)?.as_blob()?);
        let key = Key { width, start: floor(row.get(0)?, width), source: row.get(1)? };
        merged.entry(key).or_default().add(&figures(row, 2, tallies)?);
    }
    Ok(())
}
