//! The patterns, each as a team would write it: one function that is called with every delivery of an
//! event, and that should charge the fee of that event once.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use redis::aio::ConnectionManager;

use crate::app::{App, Failed};

/// In minor units.
const FEE: i64 = 5;

/// How long a lock lasts: a crashed holder blocks its event for this long, a slow one loses it.
const LOCK_MS: u64 = 1_000;

/// How long an outcome is remembered in Redis.
const OUTCOME_MS: u64 = 3_600_000;

/// How long the second request waits for the first's outcome.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// The first and the longest interval between two polls.
const LOOK: Duration = Duration::from_millis(2);
const LOOK_MAX: Duration = Duration::from_millis(20);

/// Releases a lock only with the token of its holder.
const RELEASE: &str = "if redis.call('get', KEYS[1]) == ARGV[1] then \
     return redis.call('del', KEYS[1]) else return 0 end";

const CHARGE: &str = "INSERT INTO ledger (event, fee) VALUES ($1, $2)";

/// A way to charge once, or to try.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Pattern {
    /// Check whether it was charged, then charge
    CheckThenAct,
    /// INSERT … ON CONFLICT in the transaction of the effect
    UniqueConstraint,
    /// SET NX in Redis, then charge
    RedisKey,
    /// A lock in Redis around the work, the outcome stored there
    RedisLock,
    /// The same lock, and the unique constraint behind it
    LockAndConstraint,
    /// SELECT … FOR UPDATE on the payout, check its state, advance it
    StateMachine,
    /// UPDATE … WHERE version = what was read
    OptimisticVersion,
}

/// The answer to a delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Charged,
    SeenBefore,
}

impl Pattern {
    pub(crate) const ALL: [Self; 7] = [
        Self::CheckThenAct,
        Self::UniqueConstraint,
        Self::RedisKey,
        Self::RedisLock,
        Self::LockAndConstraint,
        Self::StateMachine,
        Self::OptimisticVersion,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::CheckThenAct => "check, then act",
            Self::UniqueConstraint => "unique constraint",
            Self::RedisKey => "Redis key (SET NX)",
            Self::RedisLock => "Redis lock",
            Self::LockAndConstraint => "Redis lock + constraint",
            Self::StateMachine => "state machine, FOR UPDATE",
            Self::OptimisticVersion => "optimistic version",
        }
    }

    pub(crate) fn uses_redis(self) -> bool {
        match self {
            Self::RedisKey | Self::RedisLock | Self::LockAndConstraint => true,
            Self::CheckThenAct
            | Self::UniqueConstraint
            | Self::StateMachine
            | Self::OptimisticVersion => false,
        }
    }

    /// Whether the pattern promises exactly one effect under any fault. If such a pattern has another
    /// result, the run ends with an error.
    pub(crate) fn is_sound(self) -> bool {
        match self {
            Self::UniqueConstraint
            | Self::LockAndConstraint
            | Self::StateMachine
            | Self::OptimisticVersion => true,
            Self::CheckThenAct | Self::RedisKey | Self::RedisLock => false,
        }
    }

    /// One delivery of `event`. The future may be dropped at any moment, as if the process died.
    pub(crate) async fn deliver(self, app: &App, event: i64) -> Result<Answer, Failed> {
        match self {
            Self::CheckThenAct => check_then_act(app, event).await,
            Self::UniqueConstraint => unique_constraint(app, event).await,
            Self::RedisKey => redis_key(app, event).await,
            Self::RedisLock => redis_lock(app, event).await,
            Self::LockAndConstraint => lock_and_constraint(app, event).await,
            Self::StateMachine => state_machine(app, event).await,
            Self::OptimisticVersion => optimistic_version(app, event).await,
        }
    }
}

async fn check_then_act(app: &App, event: i64) -> Result<Answer, Failed> {
    let client = app.database().await?;
    let look = client.prepare_cached("SELECT 1 FROM ledger WHERE event = $1").await?;
    if !client.query(&look, &[&event]).await?.is_empty() {
        return Ok(Answer::SeenBefore);
    }
    let charge = client.prepare_cached(CHARGE).await?;
    client.execute(&charge, &[&event, &FEE]).await?;
    Ok(Answer::Charged)
}

/// The key and the effect in one transaction: the second transaction that inserts the key waits for
/// the first to commit, and then inserts nothing.
async fn unique_constraint(app: &App, event: i64) -> Result<Answer, Failed> {
    let mut client = app.database().await?;
    let sql = "INSERT INTO seen (event) VALUES ($1) ON CONFLICT DO NOTHING";
    let key = client.prepare_cached(sql).await?;
    let charge = client.prepare_cached(CHARGE).await?;
    let transaction = client.transaction().await?;
    if transaction.execute(&key, &[&event]).await? == 0 {
        transaction.rollback().await?;
        return Ok(Answer::SeenBefore);
    }
    transaction.execute(&charge, &[&event, &FEE]).await?;
    transaction.commit().await?;
    Ok(Answer::Charged)
}

/// The mark is set before the work, in another system: a process that dies between the two loses
/// the fee.
async fn redis_key(app: &App, event: i64) -> Result<Answer, Failed> {
    let (mut redis, key) = (app.redis.clone(), format!("seen:{event}"));
    if !set_if_absent(&mut redis, &key, "1", OUTCOME_MS).await? {
        return Ok(Answer::SeenBefore);
    }
    match charge(app, event).await {
        Ok(()) => Ok(Answer::Charged),
        Err(error) => {
            // The key is deleted, so that the sender's retry is not answered with "done".
            let _: () = redis::cmd("DEL").arg(&key).query_async(&mut redis).await?;
            Err(error)
        }
    }
}

/// Handles one delivery of an event at a time; the second one waits for the outcome of the first.
/// The lock and the outcome are in Redis and the effect is in PostgreSQL, and nothing keeps the two
/// consistent.
async fn redis_lock(app: &App, event: i64) -> Result<Answer, Failed> {
    let mut redis = app.redis.clone();
    let (began, mut pause) = (Instant::now(), LOOK);
    loop {
        match Lock::take(&mut redis, event).await? {
            Taken::Outcome => return Ok(Answer::SeenBefore),
            Taken::Lock(lock) => {
                charge(app, event).await?;
                lock.finish(&mut redis).await?;
                return Ok(Answer::Charged);
            }
            Taken::Busy if began.elapsed() > WAIT_MAX => return Err(Failed::WaitedTooLong),
            Taken::Busy => tokio::time::sleep(pause).await,
        }
        pause = (pause * 2).min(LOOK_MAX);
    }
}

/// While Redis works, the lock keeps the second copy away from the database. The constraint
/// decides.
async fn lock_and_constraint(app: &App, event: i64) -> Result<Answer, Failed> {
    let mut redis = app.redis.clone();
    let (began, mut pause) = (Instant::now(), LOOK);
    loop {
        match Lock::take(&mut redis, event).await {
            Ok(Taken::Outcome) => return Ok(Answer::SeenBefore),
            Ok(Taken::Lock(lock)) => {
                let answer = unique_constraint(app, event).await?;
                // If Redis fails here, the next copy costs a query to the database.
                let _ = lock.finish(&mut redis).await;
                return Ok(answer);
            }
            Ok(Taken::Busy) if began.elapsed() <= WAIT_MAX => tokio::time::sleep(pause).await,
            Ok(Taken::Busy) | Err(_) => return unique_constraint(app, event).await,
        }
        pause = (pause * 2).min(LOOK_MAX);
    }
}

/// The payout itself records what was done with it, and the lock of its row admits one transaction
/// at a time.
async fn state_machine(app: &App, event: i64) -> Result<Answer, Failed> {
    let mut client = app.database().await?;
    let look = client.prepare_cached("SELECT state FROM payouts WHERE id = $1 FOR UPDATE").await?;
    let step = client.prepare_cached("UPDATE payouts SET state = 'fee_charged' WHERE id = $1");
    let (step, charge) = (step.await?, client.prepare_cached(CHARGE).await?);
    let transaction = client.transaction().await?;
    let row = transaction.query_one(&look, &[&event]).await?;
    if row.get::<_, &str>(0) != "pending" {
        transaction.rollback().await?;
        return Ok(Answer::SeenBefore);
    }
    transaction.execute(&charge, &[&event, &FEE]).await?;
    transaction.execute(&step, &[&event]).await?;
    transaction.commit().await?;
    Ok(Answer::Charged)
}

/// The payout is read without a lock. The update succeeds only for the version that was read;
/// otherwise the payout is read again.
async fn optimistic_version(app: &App, event: i64) -> Result<Answer, Failed> {
    let mut client = app.database().await?;
    let look = client.prepare_cached("SELECT state, version FROM payouts WHERE id = $1").await?;
    let sql = "UPDATE payouts SET state = 'fee_charged', version = version + 1 \
               WHERE id = $1 AND version = $2";
    let step = client.prepare_cached(sql).await?;
    let charge = client.prepare_cached(CHARGE).await?;
    loop {
        let row = client.query_one(&look, &[&event]).await?;
        let (state, version): (&str, i64) = (row.get(0), row.get(1));
        if state != "pending" {
            return Ok(Answer::SeenBefore);
        }
        let transaction = client.transaction().await?;
        if transaction.execute(&step, &[&event, &version]).await? == 0 {
            transaction.rollback().await?;
            continue;
        }
        transaction.execute(&charge, &[&event, &FEE]).await?;
        transaction.commit().await?;
        return Ok(Answer::Charged);
    }
}

/// The effect alone.
async fn charge(app: &App, event: i64) -> Result<(), Failed> {
    let client = app.database().await?;
    let charge = client.prepare_cached(CHARGE).await?;
    client.execute(&charge, &[&event, &FEE]).await?;
    Ok(())
}

/// A lock that was taken, with the token that only its holder knows.
struct Lock {
    name: String,
    outcome: String,
    token: u64,
}

enum Taken {
    Lock(Lock),
    /// Another delivery has finished.
    Outcome,
    /// Another delivery is running.
    Busy,
}

impl Lock {
    async fn take(redis: &mut ConnectionManager, event: i64) -> Result<Taken, Failed> {
        static TOKENS: AtomicU64 = AtomicU64::new(0);
        let token = TOKENS.fetch_add(1, Ordering::Relaxed);
        let lock =
            Self { name: format!("lock:{event}"), outcome: format!("outcome:{event}"), token };
        if exists(redis, &lock.outcome).await? {
            return Ok(Taken::Outcome);
        }
        if !set_if_absent(redis, &lock.name, &token.to_string(), LOCK_MS).await? {
            return Ok(Taken::Busy);
        }
        // The previous holder may have finished between the check and the lock.
        if exists(redis, &lock.outcome).await? {
            lock.release(redis).await?;
            return Ok(Taken::Outcome);
        }
        Ok(Taken::Lock(lock))
    }

    /// Stores the outcome, then releases the lock.
    async fn finish(self, redis: &mut ConnectionManager) -> Result<(), Failed> {
        let mut set = redis::cmd("SET");
        set.arg(&self.outcome).arg("charged").arg("PX").arg(OUTCOME_MS);
        let () = set.query_async(redis).await?;
        self.release(redis).await
    }

    async fn release(&self, redis: &mut ConnectionManager) -> Result<(), Failed> {
        let mut release = redis::cmd("EVAL");
        release.arg(RELEASE).arg(1).arg(&self.name).arg(self.token);
        Ok(release.query_async(redis).await?)
    }
}

async fn exists(redis: &mut ConnectionManager, key: &str) -> Result<bool, Failed> {
    Ok(redis::cmd("EXISTS").arg(key).query_async(redis).await?)
}

async fn set_if_absent(
    redis: &mut ConnectionManager,
    key: &str,
    value: &str,
    lasting_ms: u64,
) -> Result<bool, Failed> {
    let mut set = redis::cmd("SET");
    set.arg(key).arg(value).arg("NX").arg("PX").arg(lasting_ms);
    let set: Option<String> = set.query_async(redis).await?;
    Ok(set.is_some())
}
