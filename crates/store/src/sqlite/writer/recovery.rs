//! Recovery from a failed write: the writer accepts nothing until a write has succeeded, and reads the file again.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use hapax_core::store::StoreError;
use rusqlite::Connection;

use super::commands::{Command, Commands, refuse};
use super::{Next, Writer, cause_of, last_seq, load_pairs, watch_log};
use crate::limits::RECOVERY_WAIT;
use crate::sqlite::checkpoint::Checkpointer;
use crate::sqlite::jobs::Lanes;
use crate::sqlite::key_index::KeyIndex;
use crate::sqlite::ledger::FenceBlock;
use crate::sqlite::log_rewrite::RewriteError;
use crate::sqlite::open;
use crate::sqlite::outbox::Outbox;
use crate::sqlite::prune::PruneProgress;
use crate::sqlite::sandbox::Sandbox;
use crate::sqlite::transaction::Transaction;

impl Writer {
    /// Recovers from a failed write: nothing is answered from memory, and nothing is accepted until
    /// a write has succeeded.
    ///
    /// The failed transaction may be in the log, complete but unsynced. If the file were reopened
    /// now, that transaction could reappear in the page cache alone. Its retry would then be answered as a
    /// duplicate of an event that is not on disk. So a small commit on the same connection first overwrites
    /// the same place in the log. Once that commit is synced, the file is opened again and the index
    /// reloaded.
    ///
    /// A failed sync may also have lost unsynced commits before it, and the system reports that
    /// only once: on disk the log would end there, whatever is synced after it. So the writer
    /// rewrites the log in place, syncs it, copies it into the database file, and starts a new log.
    /// Without the rewrite, a power loss could leave newer pages in the file under an older log.
    pub(super) fn recover(
        &mut self,
        waiting: &Commands,
        error: &rusqlite::Error,
    ) -> ControlFlow<()> {
        let began = Instant::now();
        let cause = cause_of(error);
        tracing::error!(%error, "a commit failed, nothing is accepted until writing works: {error}");
        self.shared.health.set(Some(cause.clone()));
        self.shared.recent.clear();
        let refusal = StoreError::Unavailable(cause);
        self.refuse_deferred(&refusal);
        let mut sync_failed = is_io(error);
        // Recovery writes so little that it may succeed where an event does not fit. Without a
        // pause, recovery and failed commits would alternate, and every round would make the log
        // longer.
        let mut next_try = self.recovered_at.map_or(began, |at| began.max(at + RECOVERY_WAIT));
        loop {
            if sync_failed {
                self.checkpointer.stop();
            }
            // The loop ends by the clock, not when the queue is empty: senders that retry at once would keep
            // the queue full forever.
            while let left = next_try.saturating_duration_since(Instant::now())
                && !left.is_zero()
            {
                match waiting.receive_within(left) {
                    Next::Command(Command::Close(closed)) => {
                        let _ = closed.send(());
                        return ControlFlow::Break(());
                    }
                    #[cfg(test)]
                    Next::Command(Command::Tamper(tamper)) => tamper(&mut self.conn),
                    Next::Command(command) => refuse(command, &refusal),
                    Next::Deferred | Next::Housekeeping => {}
                    Next::NobodyLeft => return ControlFlow::Break(()),
                }
            }
            match self.reopen(sync_failed).and_then(|()| Ok(self.release_begun()?)) {
                Ok(()) => break,
                Err(lost @ ReopenError::Rewrite(RewriteError::Lost { .. })) => {
                    tracing::error!(error = %lost, "the store stops: {lost}");
                    self.shared.health.set(Some(lost.to_string().into()));
                    return ControlFlow::Break(());
                }
                Err(error) => {
                    sync_failed |= error.is_io();
                    tracing::debug!(%error, "still not writable: {error}");
                }
            }
            next_try = Instant::now() + RECOVERY_WAIT;
        }
        self.recovered_at = Some(Instant::now());
        self.shared.recent.clear();
        self.shared.health.set(None);
        tracing::info!("writing works again");
        ControlFlow::Continue(())
    }

    /// Gives back the jobs that an SQL handler's slice had claimed when the database failed. The
    /// failure says nothing about those jobs, so none of them waits for the end of its lease. A job
    /// whose commit succeeded after all is done, and stays done.
    fn release_begun(&mut self) -> rusqlite::Result<()> {
        if self.begun.is_empty() {
            return Ok(());
        }
        let begun = self.begun.clone();
        self.in_transaction(|writer| {
            let now = writer.now();
            for (job, fence) in begun {
                writer.lanes.give_back(&writer.conn, job, fence, now)?;
            }
            Ok(())
        })?;
        self.begun.clear();
        self.shared.arrived.notify_waiters();
        Ok(())
    }

    fn reopen(&mut self, sync_failed: bool) -> Result<(), ReopenError> {
        if !self.conn.is_autocommit() {
            self.conn.execute_batch("ROLLBACK")?;
        }
        raise_epoch(&self.conn)?;
        if sync_failed {
            let no_other_writer = Transaction::begin(&self.conn)?;
            self.place.rewrite_log(self.wal_pages.load(Ordering::Relaxed))?;
            drop(no_other_writer);
            // If a reader keeps the log from starting over, the whole log is on disk nevertheless.
            open::settle_log(&self.conn)?;
        }
        let mut conn = self.place.writer()?;
        watch_log(&mut conn, &self.wal_pages)?;
        self.sandbox = Sandbox::on(&mut conn, self.place.value_bytes_max())?;
        let (specs, freed) = self.lanes.announced();
        self.lanes = Lanes::load(&conn, specs, freed)?;
        self.outbox = Outbox::load(&conn, self.outbox.vault_keys())?;
        self.index = KeyIndex::load(&conn, Arc::clone(&self.shared.keys))?;
        self.fences = FenceBlock::default();
        self.key_usage.clear();
        self.prune_progress = PruneProgress::default();
        self.pairs = load_pairs(&conn)?;
        self.last_seq = last_seq(&conn)?;
        self.conn = conn;
        if sync_failed {
            // The new connection of the checkpointer does not report the failed sync again.
            self.checkpointer = Checkpointer::start(self.place.checkpointer()?)?;
        }
        Ok(())
    }
}

/// Why the file could not be opened again after a failed write.
#[derive(Debug, thiserror::Error)]
enum ReopenError {
    #[error(transparent)]
    Sqlite(#[from] rusqlite::Error),
    #[error(transparent)]
    Rewrite(#[from] RewriteError),
    #[error("starting the checkpointer: {0}")]
    Thread(#[from] std::io::Error),
}

impl ReopenError {
    fn is_io(&self) -> bool {
        match self {
            Self::Sqlite(error) => is_io(error),
            Self::Rewrite(_) => true,
            Self::Thread(_) => false,
        }
    }
}

/// A small, synced commit.
pub(super) fn raise_epoch(conn: &Connection) -> rusqlite::Result<()> {
    let tx = Transaction::begin(conn)?;
    conn.execute("UPDATE hapax_meta SET value = value + 1 WHERE name = 'epoch'", [])?;
    tx.commit()
}

fn is_io(error: &rusqlite::Error) -> bool {
    error.sqlite_error_code() == Some(rusqlite::ErrorCode::SystemIoFailure)
}
