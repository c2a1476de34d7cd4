//! Routes for the secrets of tenants that are added at run time ([`crate::tenant_sources`]), and for the deletion of a
//! tenant's data.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::{Extension, Json};
use hapax_core::Tenant;
use hapax_core::endpoint_check::tenant_fault;
use hapax_core::message::{OWN_TENANT, own_tenant_fault};
use hapax_core::secret::{ActiveSecret, Secret};
use hapax_core::source_secrets::SourceSecrets as CheckedSecrets;

use super::auth::Caller;
use super::extract::{JsonBody, PathId, PathPair};
use super::problem::Problem;
use super::{Accepted, Admin, AdminStore};
use crate::api::{
    Deleted, SourceSecretRequest, SourceSecrets, SourceSecretsRequest, TenantDeletion,
};
use crate::tenant_sources::SecretsRefused;

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
        ActiveSecret { until, ..ActiveSecret::forever(Secret::new(value)) }
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

/// How long a request erases before it leaves the rest to the janitor. The data of a small tenant
/// is erased before the answer.
const ERASE_WITHIN: Duration = Duration::from_secs(1);

/// Events or messages that are erased in one commit.
const ERASED_AT_ONCE: usize = 200;

/// `DELETE /api/v1/tenants/{tenant}`.
pub(super) async fn erase<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    PathId(name): PathId,
) -> Result<Accepted<TenantDeletion>, Problem> {
    if let Some(fault) = tenant_fault(&name) {
        return Err(Problem::bad_request(fault));
    }
    if name == OWN_TENANT {
        return Err(Problem::bad_request(&own_tenant_fault()));
    }
    let (tenant, until) = (Tenant::new(name), Instant::now() + ERASE_WITHIN);
    let by = caller.action(None, (admin.now)());
    let begun = admin.store.delete_tenant(tenant.clone(), by).await?;
    tracing::info!(
        %tenant,
        token = caller.who(),
        "{} deletes the data of the tenant {tenant}", caller.who()
    );
    while Instant::now() < until && admin.store.erase(ERASED_AT_ONCE).await? {}
    let now = admin.store.tenant_deletion(tenant).await?;
    Ok(Accepted(now.unwrap_or(begun).into()))
}

/// `GET /api/v1/tenants/{tenant}/deletion`.
pub(super) async fn deletion<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    PathId(name): PathId,
) -> Result<Json<TenantDeletion>, Problem> {
    let found = admin.store.tenant_deletion(Tenant::new(&name)).await?;
    let unknown = || Problem::not_found("the data of this tenant was never deleted");
    Ok(Json(found.ok_or_else(unknown)?.into()))
}

impl From<SecretsRefused> for Problem {
    fn from(refused: SecretsRefused) -> Self {
        match refused {
            SecretsRefused::Invalid(detail) => Self::bad_request(&detail),
            SecretsRefused::Unknown(detail) => Self::not_found(&detail),
            SecretsRefused::Conflict(detail) => Self::conflict(&detail),
            SecretsRefused::Unavailable(detail) => Self::unavailable(&detail),
        }
    }
}
