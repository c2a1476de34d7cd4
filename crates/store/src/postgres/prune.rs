//! Retention: what is finished and past its time goes, a slice at a time.
//!
//! An event past the first horizon loses its history and keeps a narrow row, so that a late copy is
//! still known; past the second the row and its key go too. Bodies lie in partitions by day: a day of
//! which nothing is needed any more is dropped whole. Bodies are deleted one by one only in days that
//! some unfinished event keeps alive, and where events are kept for less than a day. Messages, and
//! keys of the SQL functions that have run out, go in slices of their own.
//!
//! The broom for the first goes over the events from old to new; at the end it begins anew, since what
//! was not finished when it passed may be by then. Where it is, is this node's own knowledge: another
//! node's may be elsewhere, and both do the same.

use std::collections::HashMap;

use hapax_core::store::Horizon;
use hapax_core::{SourceName, Timestamp};
use jiff::SignedDuration;
use uuid::Uuid;

use super::Shared;
use super::connect::{PgError, retried};
use super::partitions;
use super::row::{hash_of, past, stamp};

/// Where the broom is.
#[derive(Debug, Default)]
pub(super) struct PruneProgress {
    passed: Uuid,
    /// When the oldest event of each source was received that this round has left unfinished.
    unfinished: HashMap<SourceName, Timestamp>,
    /// The last lane whose marks were looked at: its handler and tenant.
    lane: (i32, String),
}

/// How far a round over the events has come.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Round {
    /// All that this slice looked at was stripped, and there may be more.
    InFull,
    GoesOn,
    Ended,
    /// Another node is at it.
    OfAnother,
}

/// Marks are dated in whole hours.
const MARK_HOUR: SignedDuration = SignedDuration::from_hours(1);

/// Looks at `limit` events for each horizon; true when there may be more.
pub(super) async fn slice(
    shared: &Shared,
    horizon: &Horizon,
    limit: usize,
) -> Result<bool, PgError> {
    let mut broom = shared.broom.lock().await;
    // "For ever" is the beginning of time, and ours lies before the database's.
    let events_before = stamp(horizon.events_before);
    let stripped = strip(shared, &mut broom, events_before, limit).await?;
    if stripped == Round::InFull {
        // The rest is looked at when this round ends: each look is a commit of its own.
        return Ok(true);
    }
    let more_to_forget = forget(shared, horizon, limit).await?;
    let more_to_expire = expire(shared, events_before, limit).await?;
    // Only after a whole round is it known which events are left.
    let more_marks =
        stripped == Round::Ended && forget_marks(shared, &mut broom, horizon, limit).await?;
    if stripped == Round::GoesOn || more_to_forget || more_to_expire || more_marks {
        return Ok(true);
    }
    partitions::drop_old(shared, events_before, limit).await
}

async fn strip(
    shared: &Shared,
    broom: &mut PruneProgress,
    before: Timestamp,
    limit: usize,
) -> Result<Round, PgError> {
    let (after, bound, most, now) = (broom.passed, past(before), most(limit), shared.now());
    let kept = now.unwrap_or_else(Timestamp::now).duration_since(before);
    let with_bodies = kept < SignedDuration::from_hours(24);
    let row = retried(|| async {
        let mut lent = shared.pools.admin.lend().await?;
        let sql = "SELECT reached, alone, left_of, left_since, taken \
                   FROM hapax.strip($1, $2, $3, $4, $5, $6)";
        one(lent.query(sql, &[&after, &bound, &before, &most, &with_bodies, &now]).await?)
    })
    .await?;
    let (reached, alone): (Option<Uuid>, bool) = (row.get(0), row.get(1));
    if after.is_nil() {
        broom.unfinished.clear();
    }
    let sources = row.get::<_, Option<Vec<&str>>>(2).unwrap_or_default();
    let since = row.get::<_, Option<Vec<Timestamp>>>(3).unwrap_or_default();
    for (source, since) in sources.into_iter().zip(since) {
        let oldest = broom.unfinished.entry(SourceName::new(source)).or_insert(since);
        *oldest = since.min(*oldest);
    }
    broom.passed = reached.unwrap_or(Uuid::nil());
    Ok(match (alone, reached) {
        (false, _) => Round::OfAnother,
        (true, Some(_)) if row.get::<_, i32>(4) >= most => Round::InFull,
        (true, Some(_)) => Round::GoesOn,
        (true, None) => Round::Ended,
    })
}

/// Deletes order marks that no event can need any more.
async fn forget_marks(
    shared: &Shared,
    broom: &mut PruneProgress,
    horizon: &Horizon,
    limit: usize,
) -> Result<bool, PgError> {
    let now = shared.now().unwrap_or_else(Timestamp::now);
    let before = |source: &SourceName| {
        let before = horizon.marks_before(source, now, broom.unfinished.get(source).copied())?;
        before.checked_sub(MARK_HOUR).ok().map(stamp)
    };
    let (sources, befores): (Vec<&str>, Vec<Timestamp>) = horizon
        .keys_before
        .iter()
        .filter_map(|(source, _)| Some((source.as_str(), before(source)?)))
        .unzip();
    if sources.is_empty() {
        return Ok(false);
    }
    let (most, (handler, tenant)) = (most(limit), &broom.lane);
    let row = retried(|| async {
        let mut lent = shared.pools.admin.lend().await?;
        let sql = "SELECT last_handler, last_tenant FROM hapax.forget_marks($1, $2, $3, $4, $5)";
        one(lent.query(sql, &[&sources, &befores, handler, tenant, &most]).await?)
    })
    .await?;
    let last: Option<(i32, String)> = row.get::<_, Option<i32>>(0).zip(row.get(1));
    let more = last.is_some();
    broom.lane = last.unwrap_or_default();
    Ok(more)
}

async fn forget(shared: &Shared, horizon: &Horizon, limit: usize) -> Result<bool, PgError> {
    if horizon.keys_before.is_empty() {
        return Ok(false);
    }
    let names: Vec<&str> = horizon.keys_before.iter().map(|(source, _)| source.as_str()).collect();
    let befores: Vec<Timestamp> =
        horizon.keys_before.iter().map(|(_, before)| stamp(*before)).collect();
    let bounds: Vec<Uuid> = befores.iter().copied().map(past).collect();
    let (most, now) = (most(limit), shared.now());
    let gone = retried(|| async {
        let mut lent = shared.pools.admin.lend().await?;
        let sql = "SELECT hapax.forget($1, $2, $3, $4, $5)";
        lent.query(sql, &[&names, &bounds, &befores, &most, &now]).await
    })
    .await?;
    shared.unlearn(&gone.iter().map(|row| hash_of(row.get(0))).collect::<Vec<_>>());
    Ok(gone.len() >= limit)
}

/// Messages go with the history of their time; keys of the SQL functions when they run out.
async fn expire(shared: &Shared, before: Timestamp, limit: usize) -> Result<bool, PgError> {
    let (most, now) = (most(limit), shared.now());
    let row = retried(|| async {
        let mut lent = shared.pools.admin.lend().await?;
        one(lent.query("SELECT hapax.expire($1, $2, $3)", &[&before, &most, &now]).await?)
    })
    .await?;
    let has_more = row.get::<_, i32>(0) >= most;
    if !has_more {
        let tend = || async {
            let mut lent = shared.pools.admin.lend().await?;
            lent.query("SELECT hapax.tend_usage()", &[]).await
        };
        retried(tend).await?;
    }
    Ok(has_more)
}

fn most(limit: usize) -> i32 {
    i32::try_from(limit.max(1)).unwrap_or(i32::MAX)
}

fn one(rows: Vec<tokio_postgres::Row>) -> Result<tokio_postgres::Row, PgError> {
    rows.into_iter().next().ok_or(PgError::Gone)
}
