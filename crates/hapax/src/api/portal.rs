//! Links to the portal.

use hapax_core::Timestamp;
use hapax_core::store::{PortalLink as StoredPortalLink, PortalRight};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::Span;
use super::values::PortalRightWord;

/// The body of `POST /api/v1/tenants/{tenant}/portal`.
#[derive(Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct PortalRequest {
    /// How long the link lasts, with the session of the browser that enters with it. Default: 1h; at most 30d.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ttl: Option<Span>,
    /// The rights of its holder. `replay` and `endpoints` include `read`. Default: `read`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<PortalRightWord>>)]
    pub(crate) allow: Option<Vec<PortalRight>>,
}

/// A link to the portal that was just made.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct PortalAccess {
    /// The URL at which the receiving party enters, once. The URL is never shown again.
    pub(crate) url: String,
    /// The id of the link, by which the audit trail names its holder.
    pub(crate) link: Uuid,
    #[schema(value_type = Vec<PortalRightWord>)]
    pub(crate) allow: Vec<PortalRight>,
    pub(crate) expires_at: Timestamp,
}

/// A link to the portal that has not ended. Its URL is shown only when it is made.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct PortalLink {
    /// The id of the link, by which the audit trail names its holder.
    pub(crate) link: Uuid,
    pub(crate) tenant: String,
    #[schema(value_type = Vec<PortalRightWord>)]
    pub(crate) allow: Vec<PortalRight>,
    pub(crate) created_at: Timestamp,
    pub(crate) expires_at: Timestamp,
    /// When a browser entered with the link; null if none has.
    #[schema(required)]
    pub(crate) entered_at: Option<Timestamp>,
}

impl From<StoredPortalLink> for PortalLink {
    fn from(link: StoredPortalLink) -> Self {
        Self {
            link: link.id.0,
            tenant: link.tenant.to_string(),
            allow: link.rights.to_vec(),
            created_at: link.created_at,
            expires_at: link.expires_at,
            entered_at: link.entered_at,
        }
    }
}

/// The query of `DELETE /api/v1/tenants/{tenant}/portal`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct PortalRevokeQuery {
    /// Only this link. Default: every link of the tenant.
    pub(crate) link: Option<Uuid>,
}

/// The answer to `DELETE /api/v1/tenants/{tenant}/portal`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct RevokedLinks {
    /// How many links ended.
    pub(crate) revoked: u64,
}
