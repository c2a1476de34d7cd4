//! The size of the database, and the Idempotency-Keys in it.

use hapax_core::Timestamp;
use hapax_core::store;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// The space that the database occupies on disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Storage {
    /// The size of the database, without its write-ahead log.
    pub(crate) database_bytes: u64,
    /// The part that deleted rows left free for new ones; null if that is not known.
    #[schema(required)]
    pub(crate) free_bytes: Option<u64>,
    /// SQLite: the log of writes that are not yet in the database file. Null on PostgreSQL.
    #[schema(required)]
    pub(crate) log_bytes: Option<u64>,
    /// PostgreSQL: the tables with their indexes, the largest first. Empty on SQLite.
    pub(crate) tables: Vec<StoredTable>,
}

/// The space that a table and its indexes occupy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct StoredTable {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// An estimate.
    pub(crate) rows: u64,
}

impl From<store::StorageUse> for Storage {
    fn from(found: store::StorageUse) -> Self {
        let store::StorageUse { database_bytes, free_bytes, log_bytes, tables } = found;
        let table =
            |it: store::TableUse| StoredTable { name: it.name, bytes: it.bytes, rows: it.rows };
        let tables = tables.into_iter().map(table).collect();
        Self { database_bytes, free_bytes, log_bytes, tables }
    }
}

/// The query of `GET /api/v1/keys`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct KeysQuery {
    /// Only scopes that begin with this text, such as `api/acct_1/`.
    pub(crate) scope: Option<String>,
    /// Only this key, as the client sent it.
    pub(crate) key: Option<String>,
    /// `next` of the previous page.
    pub(crate) cursor: Option<String>,
    /// The most keys of one page. A page may have fewer although more follow.
    #[param(minimum = 1, maximum = 500, default = 50)]
    pub(crate) limit: Option<usize>,
}

/// An Idempotency-Key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Key {
    /// The API, the caller, the method and the route.
    pub(crate) scope: String,
    /// The key as the client sent it.
    pub(crate) key: String,
    pub(crate) state: KeyState,
    /// How often a request has reserved the key: more than once if an earlier one left no answer.
    pub(crate) attempt: u32,
    /// When the lease of the request ends or ended.
    pub(crate) leased_until: Timestamp,
    /// When the key is forgotten.
    pub(crate) expires_at: Timestamp,
    /// The status of the stored answer.
    #[schema(required)]
    pub(crate) status: Option<u16>,
    /// The size of the stored answer.
    pub(crate) bytes: u64,
}

/// The state of the request under a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum KeyState {
    /// The request runs: another request with the key gets a 409.
    Running,
    /// The lease ended without an answer: the next request with the key runs.
    Lapsed,
    /// The answer is stored, and every other request with the key gets it.
    Finished,
}

impl KeyState {
    /// As text.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Lapsed => "lapsed",
            Self::Finished => "finished",
        }
    }
}

impl Key {
    /// The key as it is at `now`.
    pub(crate) fn at(now: Timestamp, record: store::KeyRecord) -> Self {
        let store::KeyRecord { scope, key, attempt, leased_until, expires_at, status, bytes } =
            record;
        let state = match status {
            Some(_) => KeyState::Finished,
            None if leased_until > now => KeyState::Running,
            None => KeyState::Lapsed,
        };
        Self { scope, key, state, attempt, leased_until, expires_at, status, bytes }
    }
}

/// The body of `DELETE /api/v1/keys`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct DeleteKeyRequest {
    /// The scope, as `GET /api/v1/keys` shows it.
    pub(crate) scope: String,
    pub(crate) key: String,
    /// Recorded in the audit trail.
    pub(crate) reason: String,
}

/// The answer to `DELETE /api/v1/keys`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct DeletedKey {
    pub(crate) scope: String,
    pub(crate) key: String,
}
