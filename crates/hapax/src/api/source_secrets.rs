//! The secrets of a source, by their references.

use hapax_core::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A secret of a source of a tenant. The value itself is never shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct SourceSecret {
    pub(crate) tenant: String,
    /// The reference in the config, such as `env:STRIPE_SECRET`.
    pub(crate) secret: String,
    /// The provider whose scheme it is used with, or `custom`.
    pub(crate) scheme: String,
    /// When a node first used this reference for the source. Another value under the same reference does not change it.
    #[schema(required)]
    pub(crate) known_since: Option<Timestamp>,
    /// When it last verified a request, to about a minute.
    #[schema(required)]
    pub(crate) last_used_at: Option<Timestamp>,
    /// Whether the last verified request of the tenant was signed with it.
    pub(crate) signed_last: bool,
    /// When it ends (`until`).
    #[schema(required)]
    pub(crate) until: Option<Timestamp>,
    /// Whether the node that answers has it now.
    pub(crate) configured: bool,
}
