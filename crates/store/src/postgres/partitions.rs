//! The partitions of bodies, one for each day: made ahead, so that no event has to wait for one, and
//! made at once should one be missing all the same.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::Timestamp;
use hapax_core::store::EventId;

use super::Shared;
use super::connect::{PgError, retried};

/// Days for which there is room before they come.
const DAYS_AHEAD: i64 = 7;

/// How often it is looked after.
const LOOK_EVERY: Duration = Duration::from_secs(3_600);

const DAY_SECONDS: i64 = 86_400;

/// Keeps room for the coming days until the store is closed.
pub(super) async fn keep_ahead(shared: Arc<Shared>) {
    loop {
        let today = Timestamp::now().as_second() / DAY_SECONDS;
        for day in today..=today + DAYS_AHEAD {
            if let Err(error) = make(&shared, day).await {
                tracing::warn!("making room for the bodies of the coming days: {error}");
                break;
            }
        }
        tokio::select! {
            () = shared.closing.cancelled() => return,
            () = tokio::time::sleep(LOOK_EVERY) => {}
        }
    }
}

/// Makes room for the days of these events.
pub(super) async fn make_for(
    shared: &Shared,
    events: impl IntoIterator<Item = EventId>,
) -> Result<(), PgError> {
    let day = |id: EventId| (id.0.as_u128() >> 80) as i64 / 1_000 / DAY_SECONDS;
    let mut days: Vec<i64> = events.into_iter().map(day).collect();
    days.sort_unstable();
    days.dedup();
    for day in days {
        make(shared, day).await?;
    }
    Ok(())
}

async fn make(shared: &Shared, day: i64) -> Result<(), PgError> {
    let day = day as i32;
    retried(|| async {
        let mut lent = shared.pools.admin.lend().await?;
        let sql = "SELECT hapax.make_partition(date '1970-01-01' + $1::integer)";
        lent.query(sql, &[&day]).await.map(drop)
    })
    .await
}
