//! Idempotency-Keys: acts are batched into commits ([`super::key_batches`]), or run alone. Each act runs to its end
//! even if its caller stops waiting. The functions decide (`functions/reserve_key.sql` and the files beside it). Users'
//! own transactions call the same functions.
//!
//! These calls have their own connections, because clients of an API wait for them. Claims and
//! renewals of workers must not wait for these calls, however many there are, and these calls must
//! not wait for a busy handler.

use std::time::Duration;

use deadpool_postgres::Object;
use hapax_core::failpoint;
use hapax_core::job::Fence;
use hapax_core::ledger::{Ledger, Quota, Reservation, ReserveAsk, Reserved, StoredAnswer};
use hapax_core::store::{Held, StoreError};
use serde_json::Value;
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use super::connect::{PgError, retried};
use super::handler_registry::micros;
use super::jobs::{only, without_nul};
use super::sql_handlers::{self, NotRun};
use super::{PgStore, Shared};
use crate::stored_answer;

impl Ledger for PgStore {
    async fn reserve(&self, ask: ReserveAsk) -> Result<Reservation, StoreError> {
        self.shared.key_batches.reserve(ask).await
    }

    async fn finish(&self, reserved: &Reserved, answer: &StoredAnswer) -> Result<Held, StoreError> {
        self.shared.key_batches.finish(reserved.clone(), answer.clone()).await
    }

    async fn abandon(&self, reserved: &Reserved) -> Result<(), StoreError> {
        let reserved = reserved.clone();
        self.act(|shared| async move { retried(|| abandon(&shared, &reserved)).await }).await
    }
}

/// Reserves one key in its own commit.
pub(super) async fn reserve(shared: &Shared, ask: &ReserveAsk) -> Result<Reservation, PgError> {
    let owner = ask.quota.map(|_| ask.scope.owner().as_str());
    let (max_keys, max_bytes) = bounds(ask.quota);
    let mut connection = shared.pools.ledger.checkout().await?;
    let rows = connection
        .query(
            "SELECT outcome, fence, attempt, status, headers::text, body, \
                    (extract(epoch FROM remaining) * 1000000)::bigint AS remaining_us \
             FROM hapax.reserve_key($1, $2, $3, $4::bigint * interval '1 microsecond', \
                                    $5::bigint * interval '1 microsecond', $6, $7, $8, $9)",
            &[
                &ask.scope.as_str(),
                &ask.key.as_str(),
                &&ask.fingerprint.0[..],
                &micros(ask.lease),
                &micros(ask.ttl),
                &shared.now(),
                &owner,
                &max_keys,
                &max_bytes,
            ],
        )
        .await?;
    failpoint!("idem.after_commit");
    read_reservation(only(&rows)?, ask)
}

/// The most keys and bytes, as the database's integers.
pub(super) fn bounds(quota: Option<Quota>) -> (Option<i64>, Option<i64>) {
    let number = |most: u64| i64::try_from(most).unwrap_or(i64::MAX);
    (quota.map(|quota| number(quota.keys)), quota.map(|quota| number(quota.bytes)))
}

pub(super) fn read_reservation(row: &Row, ask: &ReserveAsk) -> Result<Reservation, PgError> {
    Ok(match row.get("outcome") {
        "fresh" => {
            let attempt: i32 = row.get("attempt");
            Reservation::Fresh(Reserved {
                scope: ask.scope.clone(),
                key: ask.key.clone(),
                fence: Fence(row.get("fence")),
                attempt: u32::try_from(attempt).unwrap_or(u32::MAX),
                quota: ask.quota,
            })
        }
        "replay" => {
            let status: i32 = row.get("status");
            // The headers are read as text: the database's JSON may hold numbers that this
            // program's JSON cannot.
            let headers: Option<&str> = row.get("headers");
            let headers = headers.and_then(|text| serde_json::from_str(text).ok());
            let body: Option<Vec<u8>> = row.get("body");
            Reservation::Replay(stored_answer::answer_of(
                status.into(),
                headers.unwrap_or_default(),
                body.unwrap_or_default(),
            ))
        }
        "in_progress" => {
            let micros: i64 = row.get("remaining_us");
            Reservation::InProgress { remaining: Duration::from_micros(micros.unsigned_abs()) }
        }
        "mismatch" => Reservation::Mismatch,
        "over_quota" => Reservation::OverQuota,
        // Only another version of the function can return this outcome, so the outcome is not used.
        _ => return Err(PgError::Gone),
    })
}

/// Stores the answer under the fence.
const FINISH: &str = "SELECT hapax.finish_key($1, $2, $3, $4, $5, $6, $7, $8)";

/// Stores the answer within a quota: if the caller has no room for the answer, a substitute is
/// stored.
const FINISH_WITHIN_QUOTA: &str = "\
    SELECT CASE WHEN hapax.has_room($9, $10, $11, false) \
        THEN hapax.finish_key($1, $2, $3, $4, $5, $6, $7, $8) \
        ELSE hapax.finish_key($1, $2, $3, $12, $13, $14, $7, $15) END";

/// Stores one answer in its own commit.
pub(super) async fn finish(
    shared: &Shared,
    reserved: &Reserved,
    answer: &StoredAnswer,
) -> Result<Held, PgError> {
    let (status, headers) = columns(answer);
    let Reserved { scope, key, fence, .. } = reserved;
    let (scope, key, body, now) = (scope.as_str(), key.as_str(), &answer.body[..], shared.now());
    let size = size_of(answer);
    let mut connection = shared.pools.ledger.checkout().await?;
    failpoint!("idem.before_commit");
    let rows = match reserved.quota {
        None => {
            let given: &[&(dyn ToSql + Sync)] =
                &[&scope, &key, &fence.0, &status, &headers, &body, &now, &size];
            connection.query(FINISH, given).await?
        }
        Some(_) => {
            let owner = reserved.scope.owner().as_str();
            let (max_keys, max_bytes) = bounds(reserved.quota);
            let instead = StoredAnswer::not_kept();
            let (other_status, other_headers) = columns(&instead);
            let (other_body, other_size) = (&instead.body[..], size_of(&instead));
            let given: &[&(dyn ToSql + Sync)] = &[
                &scope,
                &key,
                &fence.0,
                &status,
                &headers,
                &body,
                &now,
                &size,
                &owner,
                &max_keys,
                &max_bytes,
                &other_status,
                &other_headers,
                &other_body,
                &other_size,
            ];
            connection.query(FINISH_WITHIN_QUOTA, given).await?
        }
    };
    failpoint!("idem.after_commit");
    Ok(if only(&rows)?.get(0) { Held::Kept } else { Held::Lost })
}

/// Stores the answer within a transaction of the user's.
pub(super) async fn finish_within(
    shared: &Shared,
    client: &Object,
    reserved: &Reserved,
    answer: &StoredAnswer,
) -> Result<(), NotRun> {
    let (status, headers) = columns(answer);
    let Reserved { scope, key, fence, .. } = reserved;
    let (scope, key, body, now) = (scope.as_str(), key.as_str(), &answer.body[..], shared.now());
    let statement = client
        .prepare_cached(FINISH)
        .await
        .map_err(|error| sql_handlers::of_hapax(error.into()))?;
    // An app's own transaction is never refused for a quota, because its effects would be rolled
    // back.
    let size = size_of(answer);
    let rows = client
        .query(&statement, &[&scope, &key, &fence.0, &status, &headers, &body, &now, &size])
        .await
        .map_err(|error| sql_handlers::of_hapax(error.into()))?;
    match only(&rows).map_err(sql_handlers::of_hapax)?.get(0) {
        true => Ok(()),
        false => Err(NotRun::Fence),
    }
}

/// Whether the key still waits for the answer of this reservation, as this transaction sees it.
pub(super) async fn is_open(client: &Object, reserved: &Reserved) -> Result<bool, NotRun> {
    let Reserved { scope, key, fence, .. } = reserved;
    let ask = "SELECT hapax.is_reserved($1, $2, $3)";
    let ask =
        client.prepare_cached(ask).await.map_err(|error| sql_handlers::of_hapax(error.into()))?;
    let row = client.query_one(&ask, &[&scope.as_str(), &key.as_str(), &fence.0]).await;
    Ok(row.map_err(|error| sql_handlers::of_hapax(error.into()))?.get(0))
}

/// Whether exactly this answer is stored under this fence.
pub(super) async fn is_kept(
    shared: &Shared,
    reserved: &Reserved,
    answer: &StoredAnswer,
) -> Result<bool, PgError> {
    let (status, headers) = columns(answer);
    let Reserved { scope, key, fence, .. } = reserved;
    let ask = "SELECT FROM hapax.reservation WHERE scope = $1 AND key = $2 AND fence = $3 \
               AND status = $4 AND headers = $5 AND body = $6";
    let mut connection = shared.pools.ledger.checkout().await?;
    let (scope, key, body) = (scope.as_str(), key.as_str(), &answer.body[..]);
    let rows = connection.query(ask, &[&scope, &key, &fence.0, &status, &headers, &body]).await?;
    Ok(!rows.is_empty())
}

/// The size that an answer counts for.
pub(super) fn size_of(answer: &StoredAnswer) -> i64 {
    i64::try_from(answer.size()).unwrap_or(i64::MAX)
}

/// Status and headers as table columns.
pub(super) fn columns(answer: &StoredAnswer) -> (i32, Value) {
    let headers = without_nul(&stored_answer::as_object(&answer.headers));
    (i32::from(answer.status.as_u16()), headers)
}

async fn abandon(shared: &Shared, reserved: &Reserved) -> Result<(), PgError> {
    let Reserved { scope, key, fence, .. } = reserved;
    let mut connection = shared.pools.ledger.checkout().await?;
    let ask = "SELECT hapax.abandon($1, $2, $3)";
    connection.query(ask, &[&scope.as_str(), &key.as_str(), &fence.0]).await?;
    Ok(())
}
