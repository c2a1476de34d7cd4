//! Probes a Redis, for commands that check whether it can be used.

use std::time::Duration;

use redis::{AsyncConnectionConfig, Client};
use tokio::time::{Instant, timeout};

use crate::limits::{FRONT_ANSWER_MAX, FRONT_CONNECT_MAX};

/// The number of queries: the first answer includes the cost of a cold connection.
const LOOKS: usize = 3;

/// The findings about a Redis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RedisReport {
    /// Its version, if it reports one.
    pub version: Option<String>,
    /// The quickest of a few answers.
    pub latency: Duration,
}

impl RedisReport {
    /// Whether its answers take longer than a lookup waits.
    pub fn is_slow(&self) -> bool {
        self.latency >= FRONT_ANSWER_MAX
    }

    /// Connects to a Redis, sends a few commands and disconnects. The error is short and contains
    /// nothing of the URL, which may hold a password.
    pub async fn probe(url: &str) -> Result<Self, String> {
        let category = |error: redis::RedisError| error.category().to_owned();
        let client = Client::open(url).map_err(category)?;
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(FRONT_CONNECT_MAX))
            .set_response_timeout(Some(FRONT_CONNECT_MAX));
        let connecting = client.get_multiplexed_async_connection_with_config(&config);
        let mut redis = match timeout(FRONT_CONNECT_MAX, connecting).await {
            Ok(connected) => connected.map_err(category)?,
            Err(_) => return Err("no connection in time".to_owned()),
        };
        let mut latency = Duration::MAX;
        for _ in 0..LOOKS {
            let asked_at = Instant::now();
            // The command of real lookups, on a key that is never written.
            let answer: Vec<Option<Vec<u8>>> = redis::cmd("MGET")
                .arg("hapax:look")
                .query_async(&mut redis)
                .await
                .map_err(category)?;
            drop(answer);
            latency = latency.min(asked_at.elapsed());
        }
        // A user with few rights may not run INFO.
        let info: Option<String> =
            redis::cmd("INFO").arg("server").query_async(&mut redis).await.ok();
        let version = info.as_deref().and_then(|info| {
            info.lines()
                .find_map(|line| Some(line.strip_prefix("redis_version:")?.trim().to_owned()))
        });
        Ok(Self { version, latency })
    }
}
