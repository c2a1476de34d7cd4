//! The audit trail.

use hapax_core::Timestamp;
use hapax_core::store;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// The query of `GET /api/v1/audit`.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct AuditQuery {
    /// Only entries of this caller.
    pub(crate) who: Option<String>,
    /// `next` of the previous page.
    pub(crate) cursor: Option<String>,
    /// The most entries of one page.
    #[param(minimum = 1, maximum = 500, default = 50)]
    pub(crate) limit: Option<usize>,
}

/// A request to the admin side that changes something, or that was refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct AuditEntry {
    pub(crate) at: Timestamp,
    /// The name of the token, with the operator's name in parentheses after a login; empty if no token was
    /// recognised.
    pub(crate) who: String,
    /// The method and the route.
    pub(crate) action: String,
    /// The path of the request.
    pub(crate) subject: String,
    /// The HTTP status of the answer: 401 and 403 for a refusal.
    pub(crate) status: u16,
}

impl From<store::AuditEntry> for AuditEntry {
    fn from(entry: store::AuditEntry) -> Self {
        let store::AuditEntry { at, who, action, subject, status } = entry;
        Self { at, who, action, subject, status }
    }
}
