//! Sessions of the dashboard, and the audit trail of the admin side.

use jiff::Timestamp;

use super::{Cursor, Page, StoreError};

/// The session of a browser. A token is exchanged for a random value; the store knows only its hash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Session {
    /// The SHA-256 of the value in the browser's cookie.
    pub hash: [u8; 32],
    /// The SHA-256 of the token that it was exchanged for. The session is valid as long as the token is.
    pub token: [u8; 32],
    /// The name that is recorded for actions, such as `ops (anna)`.
    pub who: String,
    /// When the session ends.
    pub expires_at: Timestamp,
}

/// One entry of the audit trail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditEntry {
    /// When the request was answered.
    pub at: Timestamp,
    /// The name of the token, or `loopback`; empty if no token was recognised.
    pub who: String,
    /// The method and the route, such as `POST /api/v1/events/{id}/replay`.
    pub action: String,
    /// The path of the request.
    pub subject: String,
    /// The HTTP status of the answer: 401 and 403 for a refusal.
    pub status: u16,
}

/// Which entries of the audit trail to read, newest first.
#[derive(Debug, Clone, Default)]
pub struct AuditFilter {
    /// Only entries of this caller.
    pub who: Option<String>,
    /// Only entries before this position.
    pub before: Option<Cursor>,
    /// The most entries.
    pub limit: usize,
}

/// The acts of the admin side on its sessions and its audit trail. Every method is one atomic act.
pub trait AdminRecords: Send + Sync + 'static {
    /// Stores a session, and deletes some that have ended. Durable when it returns `Ok`.
    fn open_session(&self, session: Session)
    -> impl Future<Output = Result<(), StoreError>> + Send;

    /// The session with this hash. The session may have ended: the caller compares `expires_at`.
    fn session(
        &self,
        hash: [u8; 32],
    ) -> impl Future<Output = Result<Option<Session>, StoreError>> + Send;

    /// Ends a session. A session that is unknown has ended already.
    fn end_session(&self, hash: [u8; 32]) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Appends entries to the audit trail, and deletes some that are older than a year.
    fn audit(
        &self,
        entries: Vec<AuditEntry>,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Reads the audit trail, newest first.
    fn audited(
        &self,
        filter: AuditFilter,
    ) -> impl Future<Output = Result<Page<AuditEntry>, StoreError>> + Send;
}

/// How long an entry of the audit trail is kept.
pub const AUDIT_KEPT: std::time::Duration = std::time::Duration::from_secs(366 * 86_400);
