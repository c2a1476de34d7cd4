//! The secrets of tenants that are added at run time, whose values can be set but never read; and the
//! deletion of a tenant's data.

use hapax_core::Timestamp;
use hapax_core::store;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::tenant_sources::PairSummary;

/// The body of `PUT /api/v1/tenants/{tenant}/sources/{source}/secrets`. The request replaces every secret of
/// the pair.
// No Debug: it holds secrets.
#[derive(Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SourceSecretsRequest {
    /// A request is accepted if any of these signed it; 1 to 8 of them.
    pub(crate) secrets: Vec<SourceSecretRequest>,
}

/// One secret.
#[derive(Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SourceSecretRequest {
    /// The secret itself, in the form in which the provider issues it.
    pub(crate) value: String,
    /// From this time on, the secret verifies no request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) until: Option<Timestamp>,
}

/// The secrets of a pair, without their values.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct SourceSecrets {
    pub(crate) tenant: String,
    pub(crate) source: String,
    /// Where the sender posts to, below the public URL.
    pub(crate) path: String,
    /// Whether requests are verified with these secrets.
    pub(crate) active: bool,
    /// Why they are not used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
    /// When each secret ends; empty if they are not used.
    pub(crate) secrets: Vec<SourceSecret>,
    /// When they were set.
    pub(crate) set_at: Timestamp,
}

/// One secret without its value.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct SourceSecret {
    /// From this time on, the secret verifies no request; null if it does not expire.
    #[schema(required)]
    pub(crate) until: Option<Timestamp>,
}

impl From<PairSummary> for SourceSecrets {
    fn from(PairSummary { pair, set_at, secrets }: PairSummary) -> Self {
        let (tenant, source) = (pair.tenant.to_string(), pair.source.to_string());
        let path = match &*tenant {
            "default" => format!("/webhooks/{source}"),
            tenant => format!("/webhooks/{tenant}/{source}"),
        };
        let (active, reason, ends) = match secrets {
            Ok(ends) => (true, None, ends),
            Err(reason) => (false, Some(reason), Vec::new()),
        };
        let secrets = ends.into_iter().map(|until| SourceSecret { until }).collect();
        Self { tenant, source, path, active, reason, secrets, set_at }
    }
}

/// A deletion of a tenant's data.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct TenantDeletion {
    pub(crate) tenant: String,
    pub(crate) state: DeletionState,
    /// Data that was stored before this time is deleted.
    pub(crate) began_at: Timestamp,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ended_at: Option<Timestamp>,
    /// How many endpoints were deleted.
    pub(crate) endpoints: u64,
    /// How many events were erased so far.
    pub(crate) events: u64,
    /// How many messages were erased so far.
    pub(crate) messages: u64,
}

/// The progress of a deletion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum DeletionState {
    /// The deletion continues in the background, even after a restart.
    Running,
    /// Everything is erased.
    Done,
}

impl From<store::TenantDeletion> for TenantDeletion {
    fn from(deletion: store::TenantDeletion) -> Self {
        let store::TenantDeletion { tenant, began_at, ended_at, endpoints, events, messages } =
            deletion;
        let state = match ended_at {
            Some(_) => DeletionState::Done,
            None => DeletionState::Running,
        };
        let tenant = tenant.to_string();
        Self { tenant, state, began_at, ended_at, endpoints, events, messages }
    }
}
