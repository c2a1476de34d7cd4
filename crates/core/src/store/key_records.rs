//! Idempotency-Keys, as operators read and delete them.

use jiff::Timestamp;

use super::StoreError;

/// The record of an Idempotency-Key, without the stored answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyRecord {
    /// The API, the caller, the method and the route.
    pub scope: String,
    /// The key as the client chose it.
    pub key: String,
    /// How often a request has reserved the key: more than once if an earlier one left no answer.
    pub attempt: u32,
    /// When the lease of the request that runs, or ran, ends.
    pub leased_until: Timestamp,
    /// When the key is forgotten.
    pub expires_at: Timestamp,
    /// The status of the stored answer; `None` without an answer.
    pub status: Option<u16>,
    /// The size of the stored answer.
    pub bytes: u64,
}

/// Which keys to read.
#[derive(Debug, Clone, Default)]
pub struct KeyFilter {
    /// Only scopes that begin with this text.
    pub scope: Option<String>,
    /// Only this key.
    pub key: Option<String>,
    /// Only keys after this position.
    pub after: Option<KeyPosition>,
    /// The most keys.
    pub limit: usize,
}

impl KeyFilter {
    /// Whether the filter may leave out keys that are read.
    pub fn is_selective(&self) -> bool {
        self.scope.is_some() || self.key.is_some()
    }

    /// How many keys a database reads for one page: one more than the page has, to know whether
    /// others follow.
    pub fn read_max(&self) -> usize {
        if self.is_selective() { KEYS_SCANNED_MAX } else { self.limit.saturating_add(1) }
    }

    /// The scope and the key that the page begins after. No scope is empty.
    pub fn begins_after(&self) -> (&str, &str) {
        self.after.as_ref().map_or(("", ""), |at| (&at.scope, &at.key))
    }
}

/// A place in the order of scopes and keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyPosition {
    /// The scope.
    pub scope: String,
    /// The key.
    pub key: String,
}

/// A page of keys. A page may have fewer keys than the limit, or none, although more follow: one
/// call reads a bounded number of keys.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct KeyPage {
    /// The keys.
    pub items: Vec<KeyRecord>,
    /// Where the next page starts, if keys are left.
    pub next: Option<KeyPosition>,
}

/// The result of a request to delete a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyDeleted {
    /// The key is deleted: the next request with the same key runs.
    Deleted,
    /// There is no such key.
    Unknown,
    /// A request runs under it, or a user's open transaction holds it. Deleting the key would let a second
    /// request run alongside the first.
    Busy,
}

/// The acts of operators on Idempotency-Keys. Every method is one atomic act.
pub trait KeyRecords: Send + Sync + 'static {
    /// Reads keys in an order of scope and key that the database chooses. Keys past their ttl may be included
    /// until they are pruned.
    fn keys(&self, filter: KeyFilter) -> impl Future<Output = Result<KeyPage, StoreError>> + Send;

    /// Deletes a key with its answer, unless a request runs under it. A request whose lease has ended does not
    /// prevent the deletion and loses its fence. Durable when it returns `Ok`. Never waits for a user's
    /// transaction.
    fn delete_key(
        &self,
        name: KeyPosition,
    ) -> impl Future<Output = Result<KeyDeleted, StoreError>> + Send;
}

/// The most keys that one call of [`KeyRecords::keys`] reads if a filter leaves some out.
pub const KEYS_SCANNED_MAX: usize = 20_000;
