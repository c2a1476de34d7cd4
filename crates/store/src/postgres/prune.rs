//! Retention: what is finished and past its time goes, a slice at a time.
//!
//! An event past the first horizon loses its history and keeps a narrow row, so that a late copy is
//! still known; past the second the row and its key go too. Bodies lie in partitions by day: a day of
//! which nothing is needed any more is dropped whole, and only in days that some unfinished event
//! keeps alive are bodies deleted one by one.
//!
//! Two brooms go over the events from old to new, one for each horizon. Where they are is this node's
//! own knowledge: another node's may be elsewhere, and both do the same.

use std::time::{Duration, Instant};

use hapax_core::store::Horizon;
use hapax_core::{KeyHash, SourceName, Timestamp};
use uuid::Uuid;

use super::Shared;
use super::connect::{PgError, retried};
use super::partitions;
use super::row::first_id;

/// How often the broom for keys begins anew: sources with a horizon of their own may have been
/// passed too early.
const BEGIN_ANEW: Duration = Duration::from_secs(86_400);

/// Where the brooms are.
#[derive(Debug)]
pub(super) struct Brooms {
    stripped: Uuid,
    forgotten: Uuid,
    /// Sources whose keys are forgotten some day; with another set the second begins anew.
    sources: Vec<SourceName>,
    began: Instant,
}

impl Default for Brooms {
    fn default() -> Self {
        Self {
            stripped: Uuid::nil(),
            forgotten: Uuid::nil(),
            sources: Vec::new(),
            began: Instant::now(),
        }
    }
}

/// Looks at `limit` events with each broom; true when there may be more.
pub(super) async fn slice(
    shared: &Shared,
    horizon: &Horizon,
    limit: usize,
) -> Result<bool, PgError> {
    let mut brooms = shared.brooms.lock().await;
    let more_to_strip = strip(shared, &mut brooms, horizon.events_before, limit).await?;
    let more_to_forget = forget(shared, &mut brooms, horizon, limit).await?;
    if more_to_strip || more_to_forget {
        return Ok(true);
    }
    partitions::drop_old(shared, horizon.events_before, limit).await
}

async fn strip(
    shared: &Shared,
    brooms: &mut Brooms,
    before: Timestamp,
    limit: usize,
) -> Result<bool, PgError> {
    let (after, bound, most) = (brooms.stripped, past(before), most(limit));
    let row = retried(|| async {
        let mut lent = shared.pools.admin.lend().await?;
        let sql = "SELECT reached, taken FROM hapax.strip($1, $2, $3, $4)";
        one(lent.query(sql, &[&after, &bound, &before, &most]).await?)
    })
    .await?;
    let reached: Option<Uuid> = row.get(0);
    // At the end it begins anew: what was not finished when it passed is looked at again.
    brooms.stripped = reached.unwrap_or(Uuid::nil());
    Ok(reached.is_some())
}

async fn forget(
    shared: &Shared,
    brooms: &mut Brooms,
    horizon: &Horizon,
    limit: usize,
) -> Result<bool, PgError> {
    let sources: Vec<_> = horizon.keys_before.iter().map(|(source, _)| source.clone()).collect();
    if brooms.began.elapsed() > BEGIN_ANEW || brooms.sources != sources {
        brooms.forgotten = Uuid::nil();
        brooms.began = Instant::now();
        brooms.sources = sources;
    }
    let Some(newest) = horizon.keys_before.iter().map(|(_, before)| *before).max() else {
        return Ok(false);
    };
    let names: Vec<&str> = horizon.keys_before.iter().map(|(source, _)| source.as_str()).collect();
    let befores: Vec<Timestamp> = horizon.keys_before.iter().map(|(_, before)| *before).collect();
    let (after, bound, most) = (brooms.forgotten, past(newest), most(limit));
    let row = retried(|| async {
        let mut lent = shared.pools.admin.lend().await?;
        let sql = "SELECT reached, gone FROM hapax.forget($1, $2, $3, $4, $5)";
        one(lent.query(sql, &[&after, &bound, &names, &befores, &most]).await?)
    })
    .await?;
    let reached: Option<Uuid> = row.get(0);
    let gone: Vec<&[u8]> = row.get(1);
    for hash in gone {
        if let Ok(hash) = hash.try_into() {
            shared.recent.remove(&KeyHash(hash));
        }
    }
    if let Some(reached) = reached {
        brooms.forgotten = reached;
    }
    Ok(reached.is_some())
}

/// The first id that is surely after this instant's.
fn past(at: Timestamp) -> Uuid {
    first_id(at.checked_add(jiff::SignedDuration::from_millis(1)).unwrap_or(at))
}

fn most(limit: usize) -> i32 {
    i32::try_from(limit.max(1)).unwrap_or(i32::MAX)
}

fn one(rows: Vec<tokio_postgres::Row>) -> Result<tokio_postgres::Row, PgError> {
    rows.into_iter().next().ok_or(PgError::Gone)
}
