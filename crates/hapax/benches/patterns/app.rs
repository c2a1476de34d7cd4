//! An app that charges a fee for each payout: its tables, its pool, its Redis. The ledger has no
//! constraint, so that a second fee can be counted.

use std::time::Duration;

use anyhow::Context as _;
use deadpool_postgres::{Manager, ManagerConfig, Object, Pool, RecyclingMethod};
use hapax_sim::{Postgres, Redis};
use redis::aio::{ConnectionManager, ConnectionManagerConfig};
use tokio_postgres::NoTls;

const SCHEMA: &str = "
    CREATE TABLE ledger (event bigint NOT NULL, fee bigint NOT NULL);
    CREATE TABLE seen (event bigint PRIMARY KEY);
    CREATE TABLE payouts (
        id bigint PRIMARY KEY,
        state text NOT NULL DEFAULT 'pending',
        version bigint NOT NULL DEFAULT 0
    );
    -- Only so that the check of check-then-act is not a scan; it constrains nothing.
    CREATE INDEX ON ledger (event);";

/// Longer than an answer takes; a Redis that was killed is noticed by its closed connection.
const REDIS_ANSWER_MAX: Duration = Duration::from_millis(500);

/// The app and its engines.
pub(crate) struct App {
    pool: Pool,
    pub(crate) redis: ConnectionManager,
    pub(crate) redis_server: Redis,
    /// Kept because dropping a server stops it.
    _postgres: Postgres,
}

/// Why a delivery could not be answered: the sender retries.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failed {
    #[error("the pool: {0}")]
    Pool(#[from] deadpool_postgres::PoolError),
    #[error("PostgreSQL: {0}")]
    Postgres(#[from] tokio_postgres::Error),
    #[error("Redis: {0}")]
    Redis(#[from] redis::RedisError),
    #[error("the first copy took too long")]
    WaitedTooLong,
}

/// The contents of the ledger at the end.
#[derive(Clone, Copy)]
pub(crate) struct Charged {
    pub(crate) effects: u64,
    pub(crate) distinct: u64,
}

impl App {
    pub(crate) async fn start(connections: usize) -> anyhow::Result<Self> {
        let postgres = Postgres::start().await;
        let database = postgres.create_database("patterns").await;
        Postgres::execute_at(&database, SCHEMA).await;
        let fast = ManagerConfig { recycling_method: RecyclingMethod::Fast };
        let manager = Manager::from_config(database.parse()?, NoTls, fast);
        let pool = Pool::builder(manager).max_size(connections).build()?;
        let redis_server = Redis::start().await;
        let config = ConnectionManagerConfig::new()
            .set_number_of_retries(1)
            .set_response_timeout(Some(REDIS_ANSWER_MAX))
            .set_connection_timeout(Some(REDIS_ANSWER_MAX));
        let client = redis::Client::open(redis_server.url()).context("the URL of Redis")?;
        let redis = ConnectionManager::new_with_config(client, config).await;
        let redis = redis.context("connecting to Redis")?;
        Ok(Self { pool, redis, redis_server, _postgres: postgres })
    }

    /// Resets everything: no fee, no known event, `payouts` pending.
    pub(crate) async fn begin(&self, payouts: u32) -> anyhow::Result<()> {
        let client = self.pool.get().await?;
        let fresh = format!(
            "TRUNCATE ledger, seen, payouts;
             INSERT INTO payouts (id) SELECT generate_series(0, {payouts} - 1);
             ANALYZE payouts;
             CHECKPOINT"
        );
        // One statement at a time, because a checkpoint cannot be part of a transaction.
        for statement in fresh.split(';') {
            client.batch_execute(statement).await.context("emptying the tables")?;
        }
        self.redis_server.flush_all().await;
        Ok(())
    }

    pub(crate) async fn charged(&self) -> anyhow::Result<Charged> {
        let client = self.pool.get().await?;
        let sql = "SELECT count(*), count(DISTINCT event) FROM ledger";
        let row = client.query_one(sql, &[]).await.context("counting the effects")?;
        let number = |at| anyhow::Ok(u64::try_from(row.get::<_, i64>(at))?);
        Ok(Charged { effects: number(0)?, distinct: number(1)? })
    }

    pub(crate) async fn database(&self) -> Result<Object, Failed> {
        Ok(self.pool.get().await?)
    }
}
