//! The databases that Hapax runs on: how each is opened and closed, and its default timeouts.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use hapax_core::store::{
    Inspect, InspectOutbox, Operate, Outbox, OutboxRetention, OwnMessages, Plans,
    SourceSecretStore, Store, StoreHints, TenantDeletions, Work,
};
use hapax_store::{PgOptions, PgStore, SqliteOptions, SqliteStore, Transact};

use super::build::BuildError;
use crate::limits::{SQLITE_TIMEOUT_DEFAULT, TIMEOUT_DEFAULT};

/// A store to run on: [`SqliteStore`], in a file beside the app, or [`PgStore`], which several nodes
/// share.
pub trait Database:
    Store
    + Work
    + Operate
    + Inspect
    + StoreHints
    + Outbox
    + InspectOutbox
    + OutboxRetention
    + OwnMessages
    + Plans
    + SourceSecretStore
    + TenantDeletions
    + Transact
    + fmt::Debug
    + Sized
{
    /// The location and options of the database.
    type Options: fmt::Debug + Send;

    /// The default timeout of an SQL handler's statements.
    const SQL_TIMEOUT: Duration;

    /// The default timeout of a Rust handler's transaction; `None` is the timeout of the attempt.
    const TRANSACTION_TIMEOUT: Option<Duration>;

    /// Opens the database. `keys_kept` is the shortest time to live of any source's keys.
    fn open(
        options: Self::Options,
        keys_kept: Option<Duration>,
    ) -> impl Future<Output = Result<Self, BuildError>> + Send;

    /// Finishes running transactions and closes the database.
    fn close(&self) -> impl Future<Output = ()> + Send;
}

impl Database for SqliteStore {
    /// The directory of `hapax.db`.
    type Options = PathBuf;

    // SQLite has one writer, which also stores new events.
    const SQL_TIMEOUT: Duration = SQLITE_TIMEOUT_DEFAULT;
    const TRANSACTION_TIMEOUT: Option<Duration> = Some(SQLITE_TIMEOUT_DEFAULT);

    async fn open(directory: PathBuf, _keys_kept: Option<Duration>) -> Result<Self, BuildError> {
        let open = move || Self::open(SqliteOptions::new(directory));
        let opened = tokio::task::spawn_blocking(open).await;
        // The task is never aborted, so an error is a panic.
        let opened = opened.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
        Ok(opened?)
    }

    async fn close(&self) {
        Self::close(self).await;
    }
}

impl Database for PgStore {
    type Options = PgOptions;

    const SQL_TIMEOUT: Duration = TIMEOUT_DEFAULT;
    const TRANSACTION_TIMEOUT: Option<Duration> = None;

    async fn open(mut options: PgOptions, kept: Option<Duration>) -> Result<Self, BuildError> {
        options.keys_kept = options.keys_kept.or(kept);
        Ok(Self::open(options).await?)
    }

    async fn close(&self) {
        Self::close(self).await;
    }
}
