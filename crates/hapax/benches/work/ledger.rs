//! The user's table in `hapax.db`. The table has no constraint, so a doubled or missing effect shows. The
//! table is read while the server runs, as a user would read it.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rusqlite::{Connection, OpenFlags};

/// A handler that writes one row for each event.
pub(crate) const CHARGE: &str = "\n[sources.stripe.handlers.charge-fee]\n\
     sql = \"INSERT INTO ledger (event_id, fee) VALUES (:event_id, 5)\"\n";

/// A job that takes this long is stuck. Any backlog of a run takes less time.
const STUCK: Duration = Duration::from_secs(600);

const POLL: Duration = Duration::from_millis(5);

/// The ledger in one server's database.
pub(crate) struct Ledger {
    file: PathBuf,
}

impl Ledger {
    /// Creates the table, in a directory that no server has used yet.
    pub(crate) fn create(directory: &Path, schema: &str) -> anyhow::Result<Self> {
        let data = directory.join("data");
        std::fs::create_dir_all(&data).context("making the data directory")?;
        let file = data.join("hapax.db");
        let database = Connection::open(&file).context("making the database")?;
        database.execute_batch(schema).context("making the ledger")?;
        Ok(Self { file })
    }

    /// The ledger of [`CHARGE`].
    pub(crate) fn of_fees(directory: &Path) -> anyhow::Result<Self> {
        Self::create(directory, "CREATE TABLE ledger (event_id TEXT, fee INTEGER)")
    }

    pub(crate) fn open(&self) -> anyhow::Result<Connection> {
        let read_only = OpenFlags::SQLITE_OPEN_READ_ONLY;
        let database = Connection::open_with_flags(&self.file, read_only).context("the ledger")?;
        database.busy_timeout(STUCK)?;
        Ok(database)
    }

    /// Waits until that many effects are committed, and returns the time at which the last one was
    /// seen.
    pub(crate) async fn wait_for(&self, effects: u64) -> anyhow::Result<Instant> {
        let database = self.open()?;
        let effects = i64::try_from(effects)?;
        // No row is ever deleted here, so the last row's number is their count.
        let mut last = database.prepare("SELECT coalesce(max(rowid), 0) FROM ledger")?;
        let began = Instant::now();
        loop {
            let seen = last.query_row([], |row| row.get::<_, i64>(0))?;
            if seen >= effects {
                return Ok(Instant::now());
            }
            ensure!(began.elapsed() < STUCK, "stuck at {seen} of {effects} effects");
            tokio::time::sleep(POLL).await;
        }
    }

    /// Checks that every event has exactly one effect.
    pub(crate) fn is_once_each(&self, events: u64) -> anyhow::Result<()> {
        let events = i64::try_from(events)?;
        let sql = "SELECT count(*), count(DISTINCT event_id) FROM ledger";
        let counted = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?));
        let (effects, distinct): (i64, i64) = self.open()?.query_row(sql, [], counted)?;
        ensure!(
            effects == events && distinct == events,
            "{events} events had {effects} effects, of {distinct} of them"
        );
        Ok(())
    }
}
