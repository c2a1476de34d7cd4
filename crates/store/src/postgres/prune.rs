//! Retention: deletes finished, expired data, a slice at a time.
//!
//! An event past the first horizon loses its history and keeps a narrow row, so that a late copy is
//! still recognised. Past the second horizon the row and its key are deleted too. Body, jobs and history
//! of adjacent finished events are deleted as one range, and the narrow rows of the events are not
//! written. Bodies are in partitions by day. An empty partition whose day has passed is dropped. Messages
//! ([`super::outbox::prune_messages`]), expired keys of the SQL functions and plans of operators that have
//! ended are deleted in slices of their own.
//!
//! The horizon comes from the clock of this node. If that clock is ahead of the database's clock, all bounds are
//! moved back by the difference.
//!
//! A round of the first horizon reads the events from old to new. At the end the round starts again, because
//! events that were unfinished may be finished by then. Each node knows only its own position, so nodes may
//! read the same events.

use std::collections::HashMap;

use hapax_core::store::Horizon;
use hapax_core::{SourceName, Timestamp};
use jiff::SignedDuration;
use uuid::Uuid;

use super::Shared;
use super::connect::{PgError, retried};
use super::outbox::{MessageRound, prune_messages};
use super::partitions;
use super::row::{hash_of, past, stamp};

/// The position of this node's round.
#[derive(Debug, Default)]
pub(super) struct PruneProgress {
    passed: Uuid,
    /// For each source, the arrival time of the oldest event that this round has left unfinished.
    unfinished: HashMap<SourceName, Timestamp>,
    /// The last lane whose marks were checked: its handler and tenant.
    lane: (i32, String),
    /// Events stripped since the tables were last vacuumed.
    stripped: u64,
    /// The round over the messages.
    messages: MessageRound,
    lead: ClockLead,
}

/// By how much the clock of this node was ahead of the database's clock when the horizon of this round was
/// computed. Read once for a horizon, so that all slices of a round have the same bounds.
#[derive(Debug, Default)]
struct ClockLead {
    /// [`Horizon::at`].
    at: Option<Timestamp>,
    by: SignedDuration,
    is_reported: bool,
}

/// The progress of a round over the events.
#[derive(Clone, Copy, PartialEq, Eq)]
enum StripRound {
    /// Every event of this slice was stripped, and there may be more.
    InFull,
    GoesOn,
    Ended,
    /// Another node is pruning.
    OfAnother,
}

/// Events stripped before the tables are vacuumed.
const VACUUM_AFTER: u64 = 100_000;

/// The part of the largest table that must be stripped before the tables are vacuumed.
const VACUUM_PART: u64 = 5;

/// A lead of this node's clock that is logged.
const LEAD_REPORTED: SignedDuration = SignedDuration::from_mins(1);

/// Marks are dated in whole hours.
const MARK_HOUR: SignedDuration = SignedDuration::from_hours(1);

/// Checks `limit` events for each horizon. Returns true if there may be more.
pub(super) async fn slice(
    shared: &Shared,
    horizon: &Horizon,
    limit: usize,
) -> Result<bool, PgError> {
    let mut prune_progress = shared.prune_progress.lock().await;
    let lead = clock_lead(shared, &mut prune_progress.lead, horizon).await?;
    let horizon = &horizon.moved_back(lead);
    // Without a retention limit, the horizon is the earliest `Timestamp`, which the database cannot
    // represent.
    let events_before = stamp(horizon.events_before);
    let stripped = strip(shared, &mut prune_progress, events_before, limit).await?;
    if prune_progress.stripped >= VACUUM_AFTER && vacuum(shared, prune_progress.stripped).await? {
        prune_progress.stripped = 0;
    }
    if stripped == StripRound::InFull {
        // The other kinds of data are pruned once a slice is not full, because each of their checks
        // is a separate commit.
        return Ok(true);
    }
    let more_to_forget = forget(shared, horizon, limit).await?;
    let more_messages =
        prune_messages(shared, &mut prune_progress.messages, horizon, limit).await?;
    let more_to_expire = expire(shared, limit).await?;
    let more_plans = forget_plans(shared, events_before, limit).await?;
    // The oldest unfinished events are known only after a whole round.
    let more_marks = stripped == StripRound::Ended
        && forget_marks(shared, &mut prune_progress, horizon, limit).await?;
    let more_deleted =
        more_to_forget || more_messages || more_to_expire || more_plans || more_marks;
    if stripped == StripRound::GoesOn || more_deleted {
        return Ok(true);
    }
    partitions::drop_old(shared, events_before).await
}

/// By how much the clock that the horizon comes from is ahead of the database's clock. One node whose clock is
/// ahead would otherwise delete the data of all nodes early.
async fn clock_lead(
    shared: &Shared,
    lead: &mut ClockLead,
    horizon: &Horizon,
) -> Result<SignedDuration, PgError> {
    if lead.at == Some(horizon.at) {
        return Ok(lead.by);
    }
    let now = match shared.now() {
        Some(now) => now,
        None => {
            let read = async || {
                let mut client = shared.pools.admin.checkout().await?;
                one(client.query("SELECT clock_timestamp()", &[]).await?)
            };
            retried(read).await?.get(0)
        }
    };
    let by = horizon.ahead_of(now);
    let is_reported = by > LEAD_REPORTED;
    if is_reported && !lead.is_reported {
        let seconds = by.as_secs();
        tracing::warn!(
            seconds,
            "the clock of this node is {seconds} s ahead of the database's clock: retention follows the database's \
             clock; check the time synchronisation of both"
        );
    }
    *lead = ClockLead { at: Some(horizon.at), by, is_reported };
    Ok(by)
}

async fn strip(
    shared: &Shared,
    prune_progress: &mut PruneProgress,
    before: Timestamp,
    limit: usize,
) -> Result<StripRound, PgError> {
    let (after, bound, most) = (prune_progress.passed, past(before), most(limit));
    let row = retried(|| async {
        let mut client = shared.pools.admin.checkout().await?;
        let sql = "SELECT reached, alone, left_of, left_since, taken \
                   FROM hapax.strip($1, $2, $3, $4)";
        one(client.query(sql, &[&after, &bound, &before, &most]).await?)
    })
    .await?;
    let (reached, alone): (Option<Uuid>, bool) = (row.get(0), row.get(1));
    if after.is_nil() {
        prune_progress.unfinished.clear();
    }
    let sources = row.get::<_, Option<Vec<&str>>>(2).unwrap_or_default();
    let since = row.get::<_, Option<Vec<Timestamp>>>(3).unwrap_or_default();
    for (source, since) in sources.into_iter().zip(since) {
        let oldest = prune_progress.unfinished.entry(SourceName::new(source)).or_insert(since);
        *oldest = since.min(*oldest);
    }
    prune_progress.passed = reached.unwrap_or(Uuid::nil());
    prune_progress.stripped += u64::from(row.get::<_, i32>(4).unsigned_abs());
    Ok(match (alone, reached) {
        (false, _) => StripRound::OfAnother,
        (true, Some(_)) if row.get::<_, i32>(4) >= most => StripRound::InFull,
        (true, Some(_)) => StripRound::GoesOn,
        (true, None) => StripRound::Ended,
    })
}

/// Makes the space of stripped events usable again. Does nothing and returns false before they are a fifth
/// of the largest table. Autovacuum does the same, but it starts once a minute at most and rests between
/// pages. At thousands of events a second, the tables would grow faster than autovacuum works.
async fn vacuum(shared: &Shared, stripped: u64) -> Result<bool, PgError> {
    let mut client = shared.pools.admin.checkout().await?;
    let sql = "SELECT coalesce(max(c.reltuples), 0)::bigint FROM pg_catalog.pg_class c \
               WHERE c.oid = 'hapax.job'::regclass OR c.oid IN \
               (SELECT i.inhrelid FROM pg_catalog.pg_inherits i WHERE i.inhparent = 'hapax.body'::regclass)";
    let largest: i64 = one(client.query(sql, &[]).await?)?.get(0);
    if stripped < largest.unsigned_abs() / VACUUM_PART {
        return Ok(false);
    }
    // A table that another node or autovacuum works on is left out. Pages at the end of a table are not
    // returned to the file system: that would lock the table, and the next events need the pages.
    let done = async {
        client.batch("SET statement_timeout = 0").await?;
        client.batch(
            "VACUUM (SKIP_LOCKED, TRUNCATE false) hapax.body, hapax.job, hapax.attempt, hapax.arrival, hapax.copy, \
             hapax.search_value",
        )
        .await
    }
    .await;
    // The connection is closed, because its statement timeout is off.
    client.close_connection();
    done.map(|()| true)
}

/// Deletes order marks that no event can still need.
async fn forget_marks(
    shared: &Shared,
    prune_progress: &mut PruneProgress,
    horizon: &Horizon,
    limit: usize,
) -> Result<bool, PgError> {
    let now = shared.now().unwrap_or_else(Timestamp::now);
    let before = |source: &SourceName| {
        let before =
            horizon.marks_before(source, now, prune_progress.unfinished.get(source).copied())?;
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
    let (most, (handler, tenant)) = (most(limit), &prune_progress.lane);
    let row = retried(|| async {
        let mut client = shared.pools.admin.checkout().await?;
        let sql = "SELECT last_handler, last_tenant FROM hapax.forget_marks($1, $2, $3, $4, $5)";
        one(client.query(sql, &[&sources, &befores, handler, tenant, &most]).await?)
    })
    .await?;
    let last: Option<(i32, String)> = row.get::<_, Option<i32>>(0).zip(row.get(1));
    let more = last.is_some();
    prune_progress.lane = last.unwrap_or_default();
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
        let mut client = shared.pools.admin.checkout().await?;
        let sql = "SELECT hapax.forget($1, $2, $3, $4, $5)";
        client.query(sql, &[&names, &bounds, &befores, &most, &now]).await
    })
    .await?;
    shared.remove_from_caches(&gone.iter().map(|row| hash_of(row.get(0))).collect::<Vec<_>>());
    Ok(gone.len() >= limit)
}

/// Deletes plans of operators that ended before this.
async fn forget_plans(shared: &Shared, before: Timestamp, limit: usize) -> Result<bool, PgError> {
    let most = i64::from(most(limit));
    let gone = retried(|| async {
        let mut client = shared.pools.admin.checkout().await?;
        let sql = "DELETE FROM hapax.plan WHERE id IN (SELECT p.id FROM hapax.plan p \
                   WHERE p.ended_at < $1 LIMIT $2 FOR UPDATE SKIP LOCKED) RETURNING id";
        client.query(sql, &[&before, &most]).await
    })
    .await?;
    Ok(gone.len() >= limit)
}

/// Deletes expired keys of the SQL functions.
async fn expire(shared: &Shared, limit: usize) -> Result<bool, PgError> {
    let (most, now) = (most(limit), shared.now());
    let row = retried(|| async {
        let mut client = shared.pools.admin.checkout().await?;
        one(client.query("SELECT hapax.expire($1, $2)", &[&most, &now]).await?)
    })
    .await?;
    let has_more = row.get::<_, i32>(0) >= most;
    if !has_more {
        let tend = || async {
            let mut client = shared.pools.admin.checkout().await?;
            client.query("SELECT hapax.merge_usage()", &[]).await
        };
        retried(tend).await?;
    }
    Ok(has_more)
}

pub(super) fn most(limit: usize) -> i32 {
    i32::try_from(limit.max(1)).unwrap_or(i32::MAX)
}

fn one(rows: Vec<tokio_postgres::Row>) -> Result<tokio_postgres::Row, PgError> {
    rows.into_iter().next().ok_or(PgError::Gone)
}
