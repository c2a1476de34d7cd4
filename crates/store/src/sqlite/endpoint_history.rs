//! The figures of endpoints by the hour.

use std::collections::BTreeMap;

use hapax_core::Timestamp;
use hapax_core::endpoint::EndpointId;
use hapax_core::store::{
    ENDPOINT_HOURS_KEPT, EndpointFigures, EndpointHistory, EndpointHour, MERGED_MAX, StoreError,
    hour_of,
};
use rusqlite::Connection;
use uuid::Uuid;

use super::SqliteStore;
use super::transaction::Transaction;

impl EndpointHistory for SqliteStore {
    async fn record_endpoints(
        &self,
        node: Uuid,
        counts: Vec<EndpointHour>,
    ) -> Result<(), StoreError> {
        self.writer
            .behind(move |writer| {
                let now = writer.now().as_second();
                let tx = Transaction::begin_unsynced(&writer.conn)?;
                write(&writer.conn, node, &counts, now - ENDPOINT_HOURS_KEPT)?;
                tx.commit()
            })
            .await
    }

    async fn endpoint_hours(
        &self,
        endpoints: Vec<EndpointId>,
        from: Timestamp,
    ) -> Result<Vec<EndpointHour>, StoreError> {
        self.readers.run(move |conn| read(conn, &endpoints, hour_of(from))).await
    }
}

fn write(
    conn: &Connection,
    node: Uuid,
    counts: &[EndpointHour],
    kept_from: i64,
) -> rusqlite::Result<()> {
    let mut insert = conn.prepare_cached(
        "INSERT OR REPLACE INTO hapax_endpoint_hour
             (endpoint, start, node, delivered, failed, micros, tallies)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
    )?;
    let number = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
    for EndpointHour { endpoint, at, figures } in counts {
        insert.execute((
            endpoint.0.as_bytes(),
            hour_of(*at),
            node.as_bytes(),
            number(figures.delivered),
            number(figures.failed),
            number(figures.micros),
            figures.tallies.bytes(),
        ))?;
    }
    let most = i64::try_from(MERGED_MAX).unwrap_or(i64::MAX);
    conn.prepare_cached(
        "DELETE FROM hapax_endpoint_hour WHERE (endpoint, start, node) IN
             (SELECT endpoint, start, node FROM hapax_endpoint_hour
              INDEXED BY hapax_endpoint_hour_start WHERE start < ?1 ORDER BY start LIMIT ?2)",
    )?
    .execute((kept_from, most))?;
    Ok(())
}

fn read(
    conn: &Connection,
    endpoints: &[EndpointId],
    from: i64,
) -> rusqlite::Result<Vec<EndpointHour>> {
    let mut sums: BTreeMap<(EndpointId, i64), EndpointFigures> = BTreeMap::new();
    let mut of_endpoint = conn.prepare_cached(
        "SELECT start, delivered, failed, micros, tallies FROM hapax_endpoint_hour
         WHERE endpoint = ?1 AND start >= ?2",
    )?;
    for endpoint in endpoints {
        let mut rows = of_endpoint.query((endpoint.0.as_bytes(), from))?;
        while let Some(row) = rows.next()? {
            let number = |at| Ok::<u64, rusqlite::Error>(row.get::<_, i64>(at)?.unsigned_abs());
            let mut figures = EndpointFigures {
                delivered: number(1)?,
                failed: number(2)?,
                micros: number(3)?,
                ..EndpointFigures::default()
            };
            figures.tallies.add_bytes(row.get_ref(4)?.as_blob()?);
            sums.entry((*endpoint, row.get(0)?)).or_default().add(&figures);
        }
    }
    let hour = |((endpoint, start), figures)| EndpointHour {
        endpoint,
        at: Timestamp::from_second(start).unwrap_or(Timestamp::UNIX_EPOCH),
        figures,
    };
    Ok(sums.into_iter().map(hour).collect())
}
