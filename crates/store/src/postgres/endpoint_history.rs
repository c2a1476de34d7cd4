//! The figures of endpoints by the hour, of all nodes together.

use std::collections::BTreeMap;

use hapax_core::Timestamp;
use hapax_core::endpoint::EndpointId;
use hapax_core::store::{
    ENDPOINT_HOURS_KEPT, EndpointFigures, EndpointHistory, EndpointHour, MERGED_MAX, StoreError,
    hour_of,
};
use uuid::Uuid;

use super::connect::PgError;
use super::reader::read;
use super::{PgStore, Shared};

impl EndpointHistory for PgStore {
    async fn record_endpoints(
        &self,
        node: Uuid,
        counts: Vec<EndpointHour>,
    ) -> Result<(), StoreError> {
        self.act(move |shared| async move { write(&shared, node, &counts).await }).await
    }

    async fn endpoint_hours(
        &self,
        endpoints: Vec<EndpointId>,
        from: Timestamp,
    ) -> Result<Vec<EndpointHour>, StoreError> {
        let ids: Vec<Uuid> = endpoints.iter().map(|endpoint| endpoint.0).collect();
        let sql = "SELECT endpoint, start, delivered, failed, micros, tallies FROM hapax.endpoint_hour \
                   WHERE endpoint = ANY ($1) AND start >= $2";
        let mut client = self.shared.pools.admin.checkout().await.map_err(read)?;
        let rows = client.query(sql, &[&ids, &hour_of(from)]).await.map_err(read)?;
        let mut sums: BTreeMap<(EndpointId, i64), EndpointFigures> = BTreeMap::new();
        for row in rows {
            let number = |at: usize| row.get::<_, i64>(at).unsigned_abs();
            let mut figures = EndpointFigures {
                delivered: number(2),
                failed: number(3),
                micros: number(4),
                ..EndpointFigures::default()
            };
            figures.tallies.add_packed(row.get::<_, Vec<i64>>(5));
            sums.entry((EndpointId(row.get(0)), row.get(1))).or_default().add(&figures);
        }
        let hour = |((endpoint, start), figures)| EndpointHour {
            endpoint,
            at: Timestamp::from_second(start).unwrap_or(Timestamp::UNIX_EPOCH),
            figures,
        };
        Ok(sums.into_iter().map(hour).collect())
    }
}

/// A node writes only rows of its own. Old rows that another node deletes are skipped.
async fn write(shared: &Shared, node: Uuid, counts: &[EndpointHour]) -> Result<(), PgError> {
    let number = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
    let mut client = shared.pools.admin.checkout().await?;
    for EndpointHour { endpoint, at, figures } in counts {
        client.query(
            "INSERT INTO hapax.endpoint_hour (endpoint, start, node, delivered, failed, micros, tallies) \
             VALUES ($1, $2, $3, $4, $5, $6, $7) \
             ON CONFLICT (endpoint, start, node) DO UPDATE SET delivered = excluded.delivered, \
                 failed = excluded.failed, micros = excluded.micros, tallies = excluded.tallies",
            &[
                &endpoint.0,
                &hour_of(*at),
                &node,
                &number(figures.delivered),
                &number(figures.failed),
                &number(figures.micros),
                &figures.tallies.packed(),
            ],
        )
        .await?;
    }
    let now = shared.now().unwrap_or_else(Timestamp::now).as_second();
    let most = i64::try_from(MERGED_MAX).unwrap_or(i64::MAX);
    client
        .query(
            "DELETE FROM hapax.endpoint_hour WHERE (endpoint, start, node) IN ( \
             SELECT endpoint, start, node FROM hapax.endpoint_hour \
             WHERE start < $1 ORDER BY start LIMIT $2 FOR UPDATE SKIP LOCKED)",
            &[&(now - ENDPOINT_HOURS_KEPT), &most],
        )
        .await?;
    Ok(())
}
