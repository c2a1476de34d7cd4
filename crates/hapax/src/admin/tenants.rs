//! Routes for the secrets of tenants that are added at run time. See [`crate::tenant_sources`].

use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};
use hapax_core::secret::{ActiveSecret, Secret};
use hapax_core::source_secrets::SourceSecrets as CheckedSecrets;

use super::auth::Caller;
use super::extract::{JsonBody, PathPair};
use super::problem::Problem;
use super::{Admin, AdminStore};
use crate::api::{Deleted, SourceSecretRequest, SourceSecrets, SourceSecretsRequest};
use crate::tenant_sources::Refused;

/// `GET /api/v1/tenants/{tenant}/sources/{source}/secrets`.
pub(super) async fn show<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    PathPair(pair): PathPair,
) -> Result<Json<SourceSecrets>, Problem> {
    Ok(Json(admin.tenants.show(&pair).await?.into()))
}

/// `PUT /api/v1/tenants/{tenant}/sources/{source}/secrets`.
pub(super) async fn set<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    PathPair(pair): PathPair,
    JsonBody(asked): JsonBody<SourceSecretsRequest>,
) -> Result<Json<SourceSecrets>, Problem> {
    let now = (admin.now)();
    let secrets = asked.secrets.into_iter().map(|SourceSecretRequest { value, until }| {
        ActiveSecret { secret: Secret::new(value), until }
    });
    let secrets = CheckedSecrets::new(secrets.collect(), now)
        .map_err(|error| Problem::bad_request(&format!("secrets: {error}")))?;
    let set = admin.tenants.set(&pair, &secrets, caller.action(None, now)).await?;
    tracing::info!(
        tenant = %pair.tenant,
        source = %pair.source,
        token = caller.who(),
        "{} set the secrets of the tenant {} for {}", caller.who(), pair.tenant, pair.source
    );
    Ok(Json(set.into()))
}

/// `DELETE /api/v1/tenants/{tenant}/sources/{source}/secrets`.
pub(super) async fn delete<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    PathPair(pair): PathPair,
) -> Result<Json<Deleted>, Problem> {
    admin.tenants.remove(&pair, caller.action(None, (admin.now)())).await?;
    tracing::info!(
        tenant = %pair.tenant,
        source = %pair.source,
        token = caller.who(),
        "{} removed the secrets of the tenant {} for {}", caller.who(), pair.tenant, pair.source
    );
    Ok(Json(Deleted { deleted: true }))
}

impl From<Refused> for Problem {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Invalid(detail) => Self::bad_request(&detail),
            Refused::Unknown(detail) => Self::not_found(&detail),
            Refused::Conflict(detail) => Self::conflict(&detail),
            Refused::Unavailable(detail) => Self::unavailable(&detail),
        }
    }
}
