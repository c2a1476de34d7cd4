//! Write transactions on the writer's connection: synced when they commit, or deferred.

use rusqlite::Connection;

use super::{log_writes, open};

/// An open write transaction that is rolled back unless committed.
pub(super) struct Transaction<'a>(&'a Connection);

impl<'a> Transaction<'a> {
    pub(super) fn begin(conn: &'a Connection) -> rusqlite::Result<Self> {
        conn.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        Ok(Self(conn))
    }

    /// A transaction whose commit need not survive a power cut: the next ordinary commit syncs it
    /// too, and no request is answered from it before.
    pub(super) fn begin_unsynced(
        conn: &'a Connection,
    ) -> rusqlite::Result<UnsyncedTransaction<'a>> {
        // This pragma cannot be prepared ahead, because it takes effect when it is compiled.
        if open::durable() == "full" {
            conn.execute_batch("PRAGMA synchronous = NORMAL")?;
        }
        // This guard is created first: if the transaction cannot begin, the setting is still reset.
        let mut unsynced = UnsyncedTransaction(None, conn);
        unsynced.0 = Some(Self::begin(conn)?);
        Ok(unsynced)
    }

    pub(super) fn commit(self) -> rusqlite::Result<()> {
        commit(self.0)
    }
}

/// Commits the transaction that is open on `conn`. After an error, the caller must roll it back.
pub(super) fn commit(conn: &Connection) -> rusqlite::Result<()> {
    let mut commit = conn.prepare_cached("COMMIT")?;
    log_writes::gather(|| commit.execute([]))?;
    Ok(())
}

/// See [`Transaction::begin_unsynced`]. However this transaction ends, later commits are durable
/// again.
pub(super) struct UnsyncedTransaction<'a>(Option<Transaction<'a>>, &'a Connection);

impl UnsyncedTransaction<'_> {
    pub(super) fn commit(mut self) -> rusqlite::Result<()> {
        self.0.take().map_or(Ok(()), Transaction::commit)
    }
}

impl Drop for UnsyncedTransaction<'_> {
    fn drop(&mut self) {
        drop(self.0.take());
        // If the setting stayed, events would be acked that a power cut can undo.
        self.1
            .pragma_update(None, "synchronous", open::durable())
            .expect("a connection outside a transaction takes its own setting back");
    }
}

impl Drop for Transaction<'_> {
    fn drop(&mut self) {
        if !self.0.is_autocommit()
            && let Err(error) = self.0.execute_batch("ROLLBACK")
        {
            tracing::error!(%error, "rolling back: {error}");
        }
    }
}
