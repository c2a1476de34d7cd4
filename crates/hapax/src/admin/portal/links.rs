//! The routes of the admin API that make, list and revoke links to the portal.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::{Extension, Json};
use hapax_core::Tenant;
use hapax_core::endpoint_check::tenant_fault;
use hapax_core::message::OWN_TENANT;
use hapax_core::store::{PortalLink, PortalLinkId, PortalRights};
use uuid::Uuid;

use super::super::auth::{Caller, RandomValue};
use super::super::extract::{JsonBody, PathId, QueryParams};
use super::super::problem::Problem;
use super::super::{Admin, AdminStore, Created};
use crate::api::{
    List, PortalAccess, PortalLink as ListedLink, PortalRequest, PortalRevokeQuery, RevokedLinks,
    Span,
};

/// The lifetime of a link if the request names none.
const TTL_DEFAULT: Duration = Duration::from_secs(3_600);

/// The longest lifetime of a link: a link is for one task, and a new link costs one request.
const TTL_MAX: Duration = Duration::from_secs(30 * 86_400);

/// `POST /api/v1/tenants/{tenant}/portal`.
pub(in crate::admin) async fn create<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    PathId(tenant): PathId,
    JsonBody(asked): JsonBody<PortalRequest>,
) -> Result<Created<PortalAccess>, Problem> {
    let tenant = checked_tenant(&tenant)?;
    let Some(portal_url) = &admin.portal_url else {
        let detail = "this server has no portal: add [portal] to its config";
        return Err(Problem::conflict(detail));
    };
    let ttl = asked.ttl.map_or(TTL_DEFAULT, |Span(ttl)| ttl);
    if ttl.is_zero() || ttl > TTL_MAX {
        return Err(Problem::bad_request("ttl must be longer than 0s and at most 30d"));
    }
    let rights: PortalRights = match asked.allow {
        None => PortalRights::default(),
        Some(rights) if rights.is_empty() => {
            return Err(Problem::bad_request(
                "allow must name at least one of \"read\", \"replay\", \"endpoints\"",
            ));
        }
        Some(rights) => rights.into_iter().collect(),
    };
    let now = (admin.now)();
    let code = RandomValue::new()?;
    let link = PortalLink {
        id: PortalLinkId(Uuid::new_v4()),
        tenant,
        rights,
        created_at: now,
        expires_at: now + ttl,
        entered_at: None,
    };
    admin.store.create_portal_link(link.clone(), code.hash).await?;
    tracing::info!(
        tenant = %link.tenant,
        token = caller.who(),
        "{} made the portal link {} for the tenant {}", caller.who(), link.id, link.tenant
    );
    Ok(Created(PortalAccess {
        url: format!("{portal_url}/enter/{}", code.text),
        link: link.id.0,
        allow: link.rights.to_vec(),
        expires_at: link.expires_at,
    }))
}

/// The most links that a list shows. A link is for a task, so few are open at a time.
pub(in crate::admin) const LISTED_MAX: usize = 500;

/// The most links among which one is searched to be revoked.
const SEARCHED_MAX: usize = 100_000;

/// `GET /api/v1/tenants/{tenant}/portal`.
pub(in crate::admin) async fn list<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    PathId(tenant): PathId,
) -> Result<Json<List<ListedLink>>, Problem> {
    let links = open_links(&admin, Some(checked_tenant(&tenant)?)).await?;
    Ok(Json(List::whole(links.into_iter().map(ListedLink::from).collect())))
}

/// The newest links of a tenant, or of all tenants, that have not ended.
pub(in crate::admin) async fn open_links<S: AdminStore>(
    admin: &Admin<S>,
    tenant: Option<Tenant>,
) -> Result<Vec<PortalLink>, Problem> {
    Ok(admin.store.portal_links(tenant, (admin.now)(), LISTED_MAX).await?)
}

/// The link with this id, of a tenant or of any, if it has not ended. It may be older than those that a list shows.
pub(in crate::admin) async fn open_link<S: AdminStore>(
    admin: &Admin<S>,
    tenant: Option<Tenant>,
    id: PortalLinkId,
) -> Result<Option<PortalLink>, Problem> {
    let links = admin.store.portal_links(tenant, (admin.now)(), SEARCHED_MAX).await?;
    Ok(links.into_iter().find(|link| link.id == id))
}

/// `DELETE /api/v1/tenants/{tenant}/portal`.
pub(in crate::admin) async fn revoke<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    PathId(tenant): PathId,
    QueryParams(asked): QueryParams<PortalRevokeQuery>,
) -> Result<Json<RevokedLinks>, Problem> {
    let tenant = checked_tenant(&tenant)?;
    let revoked = match asked.link {
        None => admin.store.revoke_portal_links(tenant.clone()).await?,
        Some(link) => {
            let known = open_link(&admin, Some(tenant.clone()), PortalLinkId(link)).await?;
            let known = known.ok_or_else(|| Problem::not_found("the tenant has no such link"))?;
            admin.store.end_portal_link(known.id).await?;
            1
        }
    };
    tracing::info!(
        %tenant,
        token = caller.who(),
        "{} revoked {revoked} portal links of the tenant {tenant}", caller.who()
    );
    Ok(Json(RevokedLinks { revoked }))
}

fn checked_tenant(name: &str) -> Result<Tenant, Problem> {
    if let Some(fault) = tenant_fault(name) {
        return Err(Problem::bad_request(fault));
    }
    match name == OWN_TENANT {
        true => Err(Problem::bad_request(
            "the tenant hapax has no portal: its messages are for the operators of this server",
        )),
        false => Ok(Tenant::new(name)),
    }
}
