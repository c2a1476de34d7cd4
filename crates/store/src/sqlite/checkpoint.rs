//! Copies the log back into the database file, off the writer's thread as far as possible.
//!
//! A checkpoint on the writer delays every waiting ack. A checkpoint on another thread cannot make
//! the log start over while writes continue. So this thread copies most of the log, and when the
//! log reaches its bound the writer copies the rest.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};

use rusqlite::{Connection, ErrorCode, ffi};

/// A thread that checkpoints when asked.
#[derive(Debug)]
pub(super) struct Checkpointer {
    ask: Option<SyncSender<()>>,
    /// True from a request until the end of its round.
    busy: Arc<AtomicBool>,
    /// The I/O error that ended the thread.
    failed: Arc<OnceLock<IoFailure>>,
    thread: Option<JoinHandle<()>>,
}

/// An I/O error as SQLite reported it.
type IoFailure = (ffi::Error, Option<String>);

impl Checkpointer {
    pub(super) fn start(conn: Connection) -> std::io::Result<Self> {
        Self::running(move || passive(&conn).map(drop))
    }

    /// Runs `round` for each request. A round that fails with an I/O error may have lost the only report
    /// of a failed sync of the log. The next round could then copy pages into the database file that the disk
    /// does not have in the log. So no further round runs: the writer finds the error
    /// ([`Checkpointer::check`]), recovers, and starts another checkpointer.
    pub(super) fn running(
        mut round: impl FnMut() -> rusqlite::Result<()> + Send + 'static,
    ) -> std::io::Result<Self> {
        // At most one request waits; a second request has no further effect.
        let (ask, asked) = sync_channel::<()>(1);
        let (busy, failed) = (Arc::new(AtomicBool::new(false)), Arc::new(OnceLock::new()));
        let (working, failure) = (Arc::clone(&busy), Arc::clone(&failed));
        let thread = thread::Builder::new().name("hapax-checkpoint".into()).spawn(move || {
            while asked.recv().is_ok() {
                match round() {
                    Ok(()) => {}
                    Err(rusqlite::Error::SqliteFailure(code, message))
                        if code.code == ErrorCode::SystemIoFailure =>
                    {
                        let _ = failure.set((code, message));
                        return;
                    }
                    // The log stays as it is, and the next round copies the same pages again.
                    Err(error) => tracing::warn!(%error, "checkpointing the log: {error}"),
                }
                working.store(false, Ordering::Release);
            }
        })?;
        Ok(Self { ask: Some(ask), busy, failed, thread: Some(thread) })
    }

    /// Returns the I/O error with which a round failed, if one did.
    pub(super) fn check(&self) -> rusqlite::Result<()> {
        match self.failed.get() {
            None => Ok(()),
            Some((code, message)) => Err(rusqlite::Error::SqliteFailure(*code, message.clone())),
        }
    }

    /// Ends the thread, and waits for the end of a running round. Nothing is copied after that.
    pub(super) fn stop(&mut self) {
        self.ask = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the checkpointer panicked");
        }
    }

    /// Requests a round, unless one is running.
    pub(super) fn ask(&self) {
        if self.is_busy() {
            return;
        }
        self.busy.store(true, Ordering::Release);
        if let Some(ask) = &self.ask
            && let Err(TrySendError::Disconnected(())) = ask.try_send(())
        {
            self.busy.store(false, Ordering::Release);
            tracing::error!("the checkpointer has ended; only the writer bounds the log now");
        }
    }

    /// Whether a round is running or about to begin. After a panic of the thread none is: otherwise the
    /// writer would wait for its end forever, and the log would grow without bound.
    pub(super) fn is_busy(&self) -> bool {
        self.busy.load(Ordering::Acquire)
            && self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }
}

impl Drop for Checkpointer {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Copies the pages that no reader still needs. Returns the pages in the log, and how many of them
/// are copied.
pub(super) fn passive(conn: &Connection) -> rusqlite::Result<(i64, i64)> {
    conn.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |row| Ok((row.get(1)?, row.get(2)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpointer_that_panicked_leaves_the_log_to_the_writer() {
        // The thread ends in the middle of a round, and nothing reports the end of that round.
        let checkpointer = Checkpointer::running(|| panic!("a round fails")).expect("starts");
        assert!(!checkpointer.is_busy());
        checkpointer.ask();
        let thread = checkpointer.thread.as_ref().expect("not joined yet");
        while !thread.is_finished() {
            thread::yield_now();
        }
        assert!(!checkpointer.is_busy(), "the writer would wait for the round");
        checkpointer.ask();
        assert!(!checkpointer.is_busy(), "no thread takes the request");
    }
}
