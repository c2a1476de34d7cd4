//! The databases that Hapax can run on: how each is opened and closed, and how long handlers may take
//! on it where nobody says otherwise.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use hapax_core::store::{Inspect, Store, Work};
use hapax_store::{PgOptions, PgStore, SqliteOptions, SqliteStore, Transact};

use super::build::BuildError;
use crate::limits::{SQLITE_TIMEOUT_DEFAULT, TIMEOUT_DEFAULT};

/// A store to run on: [`SqliteStore`], in a file beside the app, or [`PgStore`], which several nodes
/// share.
pub trait Database: Store + Work + Inspect + Transact + fmt::Debug + Sized {
    /// What says where it is.
    type Options: fmt::Debug + Send;

    /// How long the statements of one SQL handler's job may take by default.
    const SQL_TIMEOUT: Duration;

    /// How long a Rust handler's transaction may take by default; `None` is as long as its attempt.
    const TRANSACTION_TIMEOUT: Option<Duration>;

    /// Opens it. `keys_kept` is the shortest time after which a key is forgotten, where any is.
    fn open(
        options: Self::Options,
        keys_kept: Option<Duration>,
    ) -> impl Future<Output = Result<Self, BuildError>> + Send;

    /// Finishes what was begun.
    fn close(&self) -> impl Future<Output = ()> + Send;
}

impl Database for SqliteStore {
    /// The directory of `hapax.db`.
    type Options = PathBuf;

    // It shares the writer with the acks.
    const SQL_TIMEOUT: Duration = SQLITE_TIMEOUT_DEFAULT;
    const TRANSACTION_TIMEOUT: Option<Duration> = Some(SQLITE_TIMEOUT_DEFAULT);

    async fn open(directory: PathBuf, _keys_kept: Option<Duration>) -> Result<Self, BuildError> {
        let open = move || Self::open(SqliteOptions::new(directory));
        let opened = tokio::task::spawn_blocking(open).await;
        // A task that is not aborted ends, or panics.
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
