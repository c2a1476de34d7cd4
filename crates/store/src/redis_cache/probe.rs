//! A look at a Redis from outside, for whoever wants to know whether it would do.

use std::time::Duration;

use redis::{AsyncConnectionConfig, Client};
use tokio::time::{Instant, timeout};

use crate::limits::{FRONT_ANSWER_MAX, FRONT_CONNECT_MAX};

/// Times that it is asked: the first answer pays for what is still cold.
const LOOKS: usize = 3;

/// What a Redis tells of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RedisReport {
    /// Its version, where it tells it.
    pub version: Option<String>,
    /// The quickest of a few answers.
    pub latency: Duration,
}

impl RedisReport {
    /// Whether answers come too late to be waited for.
    pub fn is_slow(&self) -> bool {
        self.latency >= FRONT_ANSWER_MAX
    }

    /// Connects to a Redis, asks it a little, and leaves. An error says what went wrong in few words,
    /// without anything of the URL: that may hold a password.
    pub async fn look(url: &str) -> Result<Self, String> {
        let told = |error: redis::RedisError| error.category().to_owned();
        let client = Client::open(url).map_err(told)?;
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(FRONT_CONNECT_MAX))
            .set_response_timeout(Some(FRONT_CONNECT_MAX));
        let connecting = client.get_multiplexed_async_connection_with_config(&config);
        let mut redis = match timeout(FRONT_CONNECT_MAX, connecting).await {
            Ok(connected) => connected.map_err(told)?,
            Err(_) => return Err("no connection in time".to_owned()),
        };
        let mut latency = Duration::MAX;
        for _ in 0..LOOKS {
            let asked_at = Instant::now();
            // Of a key that is never written, since this is the question that is asked later on.
            let answer: Vec<Option<Vec<u8>>> =
                redis::cmd("MGET").arg("hapax:look").query_async(&mut redis).await.map_err(told)?;
            drop(answer);
            latency = latency.min(asked_at.elapsed());
        }
        // A user with few rights may not ask for it.
        let info: Option<String> =
            redis::cmd("INFO").arg("server").query_async(&mut redis).await.ok();
        let version = info.as_deref().and_then(|info| {
            info.lines()
                .find_map(|line| Some(line.strip_prefix("redis_version:")?.trim().to_owned()))
        });
        Ok(Self { version, latency })
    }
}
