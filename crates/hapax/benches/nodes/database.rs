//! The user's table in the database. The table has no constraint, so a doubled or missing effect shows.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use tokio_postgres::{Client, NoTls};

/// A job that takes this long is stuck. Any backlog of a run takes less time.
const STUCK: Duration = Duration::from_secs(600);

const POLL: Duration = Duration::from_millis(50);

/// The table that the handler writes to.
pub(crate) struct Ledger(Client);

/// A connection whose task runs in the background.
pub(crate) async fn connect(database: &str) -> anyhow::Result<Client> {
    let (client, connection) =
        tokio_postgres::connect(database, NoTls).await.context("connecting to PostgreSQL")?;
    // The task ends with its client; the client reports its errors.
    tokio::spawn(connection);
    Ok(client)
}

impl Ledger {
    /// The handler: one row for each event.
    pub(crate) const CHARGE: &str = "\n[sources.stripe.handlers.charge-fee]\n\
         sql = \"INSERT INTO ledger (event_id, fee) VALUES (:event_id, 5)\"\n";

    pub(crate) async fn create(database: &str) -> anyhow::Result<Self> {
        let client = connect(database).await?;
        let table = "CREATE TABLE ledger (event_id text, fee bigint)";
        client.batch_execute(table).await.context("making the ledger")?;
        Ok(Self(client))
    }

    /// Waits until that many effects are committed, and returns the time at which the last one was
    /// seen.
    pub(crate) async fn wait_for(&self, effects: u64) -> anyhow::Result<Instant> {
        let count = self.0.prepare("SELECT count(*) FROM ledger").await?;
        let (began, effects) = (Instant::now(), i64::try_from(effects)?);
        loop {
            let asked = Instant::now();
            let seen: i64 = self.0.query_one(&count, &[]).await?.get(0);
            if seen >= effects {
                return Ok(asked);
            }
            ensure!(began.elapsed() < STUCK, "stuck at {seen} of {effects} effects");
            tokio::time::sleep(POLL).await;
        }
    }

    /// Checks that every event has exactly one effect.
    pub(crate) async fn is_once_each(&self, events: u64) -> anyhow::Result<()> {
        let sql = "SELECT count(*), count(DISTINCT event_id) FROM ledger";
        let row = self.0.query_one(sql, &[]).await?;
        let (effects, distinct): (i64, i64) = (row.get(0), row.get(1));
        let events = i64::try_from(events)?;
        ensure!(
            effects == events && distinct == events,
            "{events} events had {effects} effects, of {distinct} of them"
        );
        Ok(())
    }
}
