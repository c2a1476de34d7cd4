//! The partitions of bodies, one for each day. Partitions are created ahead, so that no event waits for one.
//! A missing partition is created at once. A partition is dropped when none of its bodies is still needed.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::Timestamp;
use hapax_core::store::EventId;
use uuid::Uuid;

use super::Shared;
use super::connect::{ClientPool, PgError, PooledClient, retried};
use super::row::first_id;

/// The number of days created ahead.
const DAYS_AHEAD: i64 = 7;

/// How often partitions are created ahead.
const LOOK_EVERY: Duration = Duration::from_secs(3_600);

const DAY_SECONDS: i64 = 86_400;

/// The lock for changing the set of days; `hapax.make_partition` takes it too.
const CHANGING_DAYS: i64 = 0x6861_7061_7800_0002;

/// Creates the partitions of the coming days until the store is closed.
pub(super) async fn create_partitions_ahead(shared: Arc<Shared>) {
    loop {
        let today = Timestamp::now().as_second() / DAY_SECONDS;
        for day in today..=today + DAYS_AHEAD {
            if let Err(error) = make(&shared.pools.admin, day).await {
                tracing::warn!("creating the partitions of the coming days: {error}");
                break;
            }
        }
        tokio::select! {
            () = shared.closing.cancelled() => return,
            () = tokio::time::sleep(LOOK_EVERY) => {}
        }
    }
}

/// Creates partitions for the days of these events, on a connection of the writers.
pub(super) async fn make_for(
    shared: &Shared,
    events: impl IntoIterator<Item = EventId>,
) -> Result<(), PgError> {
    let day = |id: EventId| (id.0.as_u128() >> 80) as i64 / 1_000 / DAY_SECONDS;
    let mut days: Vec<i64> = events.into_iter().map(day).collect();
    days.sort_unstable();
    days.dedup();
    for day in days {
        make(&shared.pools.ingest, day).await?;
    }
    Ok(())
}

async fn make(client_pool: &ClientPool, day: i64) -> Result<(), PgError> {
    let day = day as i32;
    retried(|| async {
        let mut client = client_pool.checkout().await?;
        let sql = "SELECT hapax.make_partition(date '1970-01-01' + $1::integer)";
        client.query(sql, &[&day]).await.map(drop)
    })
    .await
}

/// A partition as the catalog lists it.
struct Day {
    name: String,
    from: Uuid,
    to: Uuid,
    attached: bool,
    /// Whether its detaching was begun and interrupted.
    leaving: bool,
}

/// Drops the days before `before` that no longer hold a body. Returns true if there is more to prune:
/// a day whose removal was interrupted was attached again, so that its bodies can be pruned.
pub(super) async fn drop_old(shared: &Shared, before: Timestamp) -> Result<bool, PgError> {
    let mut client = shared.pools.admin.checkout().await?;
    // Creating a day reads the table and then changes it. Removing a day changes the table and then
    // waits for its readers. Without this lock the two could deadlock.
    client.query("SELECT pg_advisory_lock($1)", &[&CHANGING_DAYS]).await?;
    let dropped = drop_days(&mut client, before).await;
    let unlocked = client.query("SELECT pg_advisory_unlock($1)", &[&CHANGING_DAYS]).await;
    if unlocked.is_err() {
        // The lock is released with the session.
        client.close_connection();
    }
    dropped
}

async fn drop_days(client: &mut PooledClient, before: Timestamp) -> Result<bool, PgError> {
    let mut more = false;
    for mut day in old_days(client, before).await? {
        if day.leaving {
            day.alter(client, "DETACH", "FINALIZE").await?;
            day.attached = false;
        }
        if day.attached && day.is_needed(client).await? {
            continue;
        }
        // This statement waits for the table's users and blocks none of them. If it is interrupted,
        // the next call finishes it.
        if day.attached {
            day.alter(client, "DETACH", "CONCURRENTLY").await?;
        }
        // From now on, no row can be inserted. A node that was paused, or whose clock is wrong, may
        // have inserted a row before. Then the day is still needed.
        if day.is_needed(client).await? {
            let range = format!("FOR VALUES FROM ('{}') TO ('{}')", day.from, day.to);
            day.alter(client, "ATTACH", &range).await?;
            more |= day.leaving;
            continue;
        }
        let name = &day.name;
        client.batch(&format!("DROP TABLE IF EXISTS hapax.{name}")).await?;
        tracing::info!("dropped the bodies of {name}");
    }
    Ok(more)
}

impl Day {
    /// Whether the partition still has a body. Then its event is unfinished, or retention has yet
    /// to check it.
    async fn is_needed(&self, client: &mut PooledClient) -> Result<bool, PgError> {
        let name = &self.name;
        // The query uses the index, because the table may be full of deleted rows.
        let sql = format!("SELECT id FROM hapax.{name} ORDER BY id LIMIT 1");
        Ok(!client.query(&sql, &[]).await?.is_empty())
    }

    async fn alter(&self, client: &mut PooledClient, what: &str, how: &str) -> Result<(), PgError> {
        let name = &self.name;
        client.batch(&format!("ALTER TABLE hapax.body {what} PARTITION hapax.{name} {how}")).await
    }
}

async fn old_days(client: &mut PooledClient, before: Timestamp) -> Result<Vec<Day>, PgError> {
    let rows = client
        .query(
            "SELECT c.relname::text, i.inhrelid IS NOT NULL, coalesce(i.inhdetachpending, false) \
             FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
             LEFT JOIN pg_inherits i ON i.inhrelid = c.oid \
             WHERE n.nspname = 'hapax' AND c.relkind = 'r' AND c.relname ~ '^body_[0-9]{8}$' \
             ORDER BY c.relname",
            &[],
        )
        .await?;
    let day = |row: &tokio_postgres::Row| {
        let name: String = row.get(0);
        let date: jiff::civil::Date = jiff::civil::Date::strptime("body_%Y%m%d", &name).ok()?;
        let from = date.to_zoned(jiff::tz::TimeZone::UTC).ok()?.timestamp();
        let to = Timestamp::from_second(from.as_second() + DAY_SECONDS).ok()?;
        let (attached, leaving): (bool, bool) = (row.get(1), row.get(2));
        // A partition that was detached and not dropped may have to be attached again, whatever its
        // age.
        let is_due = to <= before || leaving || !attached;
        is_due.then(|| Day { name, from: first_id(from), to: first_id(to), attached, leaving })
    };
    let mut days: Vec<Day> = rows.iter().filter_map(day).collect();
    // Days are removed one at a time: while a removal is unfinished, the server begins no other.
    days.sort_by_key(|day| !day.leaving);
    Ok(days)
}
