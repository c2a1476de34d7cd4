//! Retention of messages, in slices that each are one commit. A message past its time whose deliveries are
//! over loses its bytes, its deliveries and their attempts. Its row stays, so that its id is known until the
//! horizon of ids. A message with a delivery that is open or dead stays whole.
//!
//! A round goes over the whole messages from old to new, and no slice of it reads a message again. The next
//! round begins with the next horizon.

use hapax_core::Timestamp;
use hapax_core::store::Horizon;

use crate::postgres::Shared;
use crate::postgres::connect::{PgError, retried};
use crate::postgres::jobs::only;
use crate::postgres::prune::most;
use crate::postgres::row::stamp;

/// The progress of this node's round.
#[derive(Debug, Default)]
pub(in crate::postgres) struct MessageRound {
    /// The number of the last message that was checked.
    passed: i64,
    /// The horizon whose round is over. Without this field, the round would begin again while
    /// another part of retention continues, and retention would never end.
    done: Option<Timestamp>,
}

/// Checks up to `limit` messages for each horizon. Returns true if there may be more.
pub(in crate::postgres) async fn slice(
    shared: &Shared,
    round: &mut MessageRound,
    horizon: &Horizon,
    limit: usize,
) -> Result<bool, PgError> {
    let before = stamp(horizon.events_before);
    let more_whole = round.done != Some(before) && {
        let reached = strip(shared, round.passed, before, limit).await?;
        round.passed = reached.unwrap_or_default();
        round.done = reached.is_none().then_some(before);
        reached.is_some()
    };
    let more_ids = forget(shared, stamp(horizon.message_ids_before), limit).await?;
    Ok(more_whole || more_ids)
}

async fn strip(
    shared: &Shared,
    passed: i64,
    before: Timestamp,
    limit: usize,
) -> Result<Option<i64>, PgError> {
    let most = most(limit);
    retried(|| async {
        let mut client = shared.pools.admin.checkout().await?;
        let sql = "SELECT hapax.strip_messages($1, $2, $3)";
        Ok(only(&client.query(sql, &[&passed, &before, &most]).await?)?.get(0))
    })
    .await
}

async fn forget(shared: &Shared, before: Timestamp, limit: usize) -> Result<bool, PgError> {
    let most = most(limit);
    let gone: i32 = retried(|| async {
        let mut client = shared.pools.admin.checkout().await?;
        let sql = "SELECT hapax.forget_messages($1, $2)";
        Ok(only(&client.query(sql, &[&before, &most]).await?)?.get(0))
    })
    .await?;
    Ok(gone >= most)
}
