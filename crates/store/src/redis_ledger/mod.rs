//! Idempotency-Keys in the user's own Redis: one hash per key, with a TTL. Each act is one script,
//! which Redis runs atomically.
//!
//! This ledger is as durable as the Redis is configured to be: a Redis that loses a key lets its
//! request run again. If that must not happen, use the ledger of a database.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::KeyHash;
use hapax_core::job::Fence;
use hapax_core::ledger::{
    IdempotencyKey, Ledger, Reservation, ReserveAsk, Reserved, Scope, StoredAnswer,
};
use hapax_core::store::{Cause, Held, StoreError};
use http::StatusCode;
use redis::aio::{ConnectionManager, ConnectionManagerConfig};
use redis::{Client, Cmd, FromRedisValue};

use crate::limits::{ACK_MAX, FRONT_CONNECT_MAX};

/// An unused key is deleted with its TTL; until then Redis must not evict it.
#[derive(Clone)]
pub struct RedisLedger {
    redis: ConnectionManager,
}

/// Redis cannot be reached, or the URL is invalid. The error does not repeat the URL, which may
/// contain a password.
#[derive(Debug, thiserror::Error)]
#[error("cannot connect to Redis: {0}")]
pub struct RedisLedgerError(String);

impl RedisLedger {
    /// Connects, and reconnects after a connection was lost.
    pub async fn connect(url: &str) -> Result<Self, RedisLedgerError> {
        let failed = |error: redis::RedisError| RedisLedgerError(error.category().to_owned());
        let config = ConnectionManagerConfig::new()
            .set_connection_timeout(Some(FRONT_CONNECT_MAX))
            .set_response_timeout(Some(ACK_MAX))
            // The next request tries again.
            .set_number_of_retries(1);
        let client = Client::open(url).map_err(failed)?;
        let redis = ConnectionManager::new_with_config(client, config).await.map_err(failed)?;
        Ok(Self { redis })
    }

    /// Runs a script on the key of a reservation, and on the keys that count for its caller. A
    /// script is never sent twice: if its answer is lost, it may have run.
    async fn run<T: FromRedisValue>(
        &self,
        script: &str,
        scope: &Scope,
        key: &IdempotencyKey,
        more: impl FnOnce(&mut Cmd),
    ) -> Result<T, StoreError> {
        let mut command = redis::cmd("EVAL");
        let counted = names_of_usage(scope);
        command.arg(script).arg(1 + counted.len()).arg(name_of(scope, key)).arg(&counted[..]);
        more(&mut command);
        let answer = command.query_async(&mut self.redis.clone()).await;
        answer
            .map_err(|error| StoreError::Unavailable(format!("Redis: {}", error.category()).into()))
    }
}

/// One name per scope and key, of a fixed length.
fn name_of(scope: &Scope, key: &IdempotencyKey) -> String {
    let parts = [scope.as_str().as_bytes(), key.as_str().as_bytes()];
    format!("hapax:once:{}", hex::encode(KeyHash::of(b"reservation", parts).0))
}

/// The names under which an API counts the usage of its callers.
fn names_of_usage(scope: &Scope) -> [String; 3] {
    let realm = hex::encode(KeyHash::of(b"realm", [scope.owner().realm().as_bytes()]).0);
    ["ends", "sizes", "used"].map(|what| format!("hapax:{what}:{realm}"))
}

const RESERVE: &str = concat!(include_str!("lua/usage.lua"), include_str!("lua/reserve.lua"));
const FINISH: &str = concat!(include_str!("lua/usage.lua"), include_str!("lua/finish.lua"));
const ABANDON: &str = concat!(include_str!("lua/usage.lua"), include_str!("lua/abandon.lua"));

/// A script's reply: a word and its values.
type ScriptReply = (String, Option<i64>, Option<i64>, Option<Vec<u8>>, Option<Vec<u8>>);

impl Ledger for RedisLedger {
    async fn reserve(&self, ask: ReserveAsk) -> Result<Reservation, StoreError> {
        let ReserveAsk { scope, key, fingerprint, lease, ttl, quota } = ask;
        let (said, one, two, headers, body): ScriptReply = self
            .run(RESERVE, &scope, &key, |command| {
                command.arg(&fingerprint.0[..]).arg(millis(lease)).arg(millis(ttl));
                match quota {
                    Some(quota) => {
                        command.arg(scope.owner().as_str()).arg(quota.keys).arg(quota.bytes)
                    }
                    None => command.arg("").arg(0).arg(0),
                };
            })
            .await?;
        match (said.as_str(), one) {
            ("fresh", Some(fence)) => {
                let attempt = two.and_then(|attempt| u32::try_from(attempt).ok()).unwrap_or(1);
                Ok(Reservation::Fresh(Reserved { scope, key, fence: Fence(fence), attempt, quota }))
            }
            ("in_progress", Some(left)) => {
                let remaining = Duration::from_millis(left.unsigned_abs());
                Ok(Reservation::InProgress { remaining })
            }
            ("mismatch", _) => Ok(Reservation::Mismatch),
            ("over_quota", _) => Ok(Reservation::OverQuota),
            ("replay", Some(status)) => {
                read(status, headers, body).map(Reservation::Replay).ok_or_else(damaged)
            }
            _ => Err(damaged()),
        }
    }

    async fn finish(&self, reserved: &Reserved, answer: &StoredAnswer) -> Result<Held, StoreError> {
        let headers_of = |answer: &StoredAnswer| {
            serde_json::to_vec(&answer.headers)
                .map_err(|error| StoreError::Unavailable(Cause::new(error)))
        };
        let instead = StoredAnswer::not_kept();
        let (headers, other_headers) = (headers_of(answer)?, headers_of(&instead)?);
        let kept: bool = self
            .run(FINISH, &reserved.scope, &reserved.key, |command| {
                command.arg(reserved.fence.0).arg(answer.status.as_u16());
                command.arg(headers).arg(&answer.body[..]).arg(answer.size());
                match reserved.quota {
                    Some(quota) => command.arg(quota.bytes),
                    None => command.arg(-1),
                };
                command.arg(instead.status.as_u16()).arg(other_headers);
                command.arg(&instead.body[..]).arg(instead.size());
            })
            .await?;
        Ok(if kept { Held::Kept } else { Held::Lost })
    }

    async fn abandon(&self, reserved: &Reserved) -> Result<(), StoreError> {
        self.run(ABANDON, &reserved.scope, &reserved.key, |command| {
            command.arg(reserved.fence.0);
        })
        .await
    }
}

fn read(status: i64, headers: Option<Vec<u8>>, body: Option<Vec<u8>>) -> Option<StoredAnswer> {
    Some(StoredAnswer {
        status: u16::try_from(status).ok().and_then(|code| StatusCode::from_u16(code).ok())?,
        headers: serde_json::from_slice(&headers?).ok()?,
        body: Bytes::from(body?),
    })
}

/// Another program wrote under the names of this ledger.
fn damaged() -> StoreError {
    StoreError::Read("the stored value of a key in Redis is damaged".into())
}

/// Milliseconds, at least one: Redis accepts no TTL of zero.
fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX).clamp(1, 1 << 48)
}

impl fmt::Debug for RedisLedger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisLedger").finish_non_exhaustive()
    }
}
