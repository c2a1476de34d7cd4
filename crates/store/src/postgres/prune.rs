//! Retention: what is finished and past its time goes, a slice at a time.
//!
//! An event past the first horizon loses its history and keeps a narrow row, so that a late copy is
//! still known; past the second the row and its key go too. Bodies lie in partitions by day: a day of
//! which nothing is needed any more is dropped whole, and only in days that some unfinished event
//! keeps alive are bodies deleted one by one.
//!
//! The broom for the first goes over the events from old to new; at the end it begins anew, since what
//! was not finished when it passed may be by then. Where it is, is this node's own knowledge: another
//! node's may be elsewhere, and both do the same.

use hapax_core::store::Horizon;
use hapax_core::{KeyHash, Timestamp};
use uuid::Uuid;

use super::Shared;
use super::connect::{PgError, retried};
use super::partitions;
use super::row::past;

/// Where the broom is.
#[derive(Debug, Default)]
pub(super) struct Broom {
    passed: Uuid,
}

/// Looks at `limit` events for each horizon; true when there may be more.
pub(super) async fn slice(
    shared: &Shared,
    horizon: &Horizon,
    limit: usize,
) -> Result<bool, PgError> {
    let mut broom = shared.broom.lock().await;
    let more_to_strip = strip(shared, &mut broom, horizon.events_before, limit).await?;
    let more_to_forget = forget(shared, horizon, limit).await?;
    if more_to_strip || more_to_forget {
        return Ok(true);
    }
    partitions::drop_old(shared, horizon.events_before, limit).await
}

async fn strip(
    shared: &Shared,
    broom: &mut Broom,
    before: Timestamp,
    limit: usize,
) -> Result<bool, PgError> {
    let (after, bound, most) = (broom.passed, past(before), most(limit));
    let row = retried(|| async {
        let mut lent = shared.pools.admin.lend().await?;
        let sql = "SELECT reached, taken FROM hapax.strip($1, $2, $3, $4)";
        one(lent.query(sql, &[&after, &bound, &before, &most]).await?)
    })
    .await?;
    let reached: Option<Uuid> = row.get(0);
    broom.passed = reached.unwrap_or(Uuid::nil());
    Ok(reached.is_some())
}

async fn forget(shared: &Shared, horizon: &Horizon, limit: usize) -> Result<bool, PgError> {
    if horizon.keys_before.is_empty() {
        return Ok(false);
    }
    let names: Vec<&str> = horizon.keys_before.iter().map(|(source, _)| source.as_str()).collect();
    let befores: Vec<Timestamp> = horizon.keys_before.iter().map(|(_, before)| *before).collect();
    let bounds: Vec<Uuid> = befores.iter().copied().map(past).collect();
    let most = most(limit);
    let gone = retried(|| async {
        let mut lent = shared.pools.admin.lend().await?;
        let sql = "SELECT hapax.forget($1, $2, $3, $4)";
        lent.query(sql, &[&names, &bounds, &befores, &most]).await
    })
    .await?;
    for row in &gone {
        if let Ok(hash) = row.get::<_, &[u8]>(0).try_into() {
            shared.recent.remove(&KeyHash(hash));
        }
    }
    Ok(gone.len() >= limit)
}

fn most(limit: usize) -> i32 {
    i32::try_from(limit.max(1)).unwrap_or(i32::MAX)
}

fn one(rows: Vec<tokio_postgres::Row>) -> Result<tokio_postgres::Row, PgError> {
    rows.into_iter().next().ok_or(PgError::Gone)
}
