//! Endpoints, deliveries and plans that belong to the tenant of a link. These extractors are the only way
//! to turn an id in a path into an object. No handler can therefore reach an object of another tenant: the
//! id of such an object is answered as if it did not exist.

use std::sync::Arc;

use axum::extract::{FromRequestParts, Path};
use axum::http::request::Parts;
use hapax_core::Tenant;
use hapax_core::delivery::DeliveryId;
use hapax_core::endpoint::{EndpointId, EndpointRecord};
use hapax_core::store::{DeliveryDetail, Plan, PlanId, PlanWork};
use uuid::Uuid;

use super::super::AdminStore;
use super::super::problem::Problem;
use super::Portal;
use super::guard::Visitor;

/// The object of an action.
pub(super) trait Own: Send {
    /// The object's id, or the name of the tenant if the action creates the object.
    fn id(&self) -> String;
}

/// The tenant of the link.
pub(super) struct OwnTenant(Tenant);

/// An endpoint of the tenant.
pub(super) struct OwnEndpoint(pub(super) EndpointRecord);

/// A delivery of the tenant.
pub(super) struct OwnDelivery(pub(super) DeliveryDetail);

/// A plan about deliveries of an endpoint of the tenant.
pub(super) struct OwnPlan(pub(super) Plan);

impl Own for OwnTenant {
    fn id(&self) -> String {
        self.0.to_string()
    }
}

impl Own for OwnEndpoint {
    fn id(&self) -> String {
        self.0.id.to_string()
    }
}

impl Own for OwnDelivery {
    fn id(&self) -> String {
        self.0.id.to_string()
    }
}

impl Own for OwnPlan {
    fn id(&self) -> String {
        self.0.id.0.to_string()
    }
}

impl<S: AdminStore> FromRequestParts<Arc<Portal<S>>> for OwnTenant {
    type Rejection = Problem;

    async fn from_request_parts(
        parts: &mut Parts,
        state: &Arc<Portal<S>>,
    ) -> Result<Self, Problem> {
        let visitor = Visitor::from_request_parts(parts, state).await?;
        Ok(Self(visitor.link().tenant.clone()))
    }
}

impl<S: AdminStore> FromRequestParts<Arc<Portal<S>>> for OwnEndpoint {
    type Rejection = Problem;

    async fn from_request_parts(
        parts: &mut Parts,
        state: &Arc<Portal<S>>,
    ) -> Result<Self, Problem> {
        let unknown = || Problem::not_found("no endpoint has that id");
        let (visitor, id) = named(parts, state).await?;
        let id = EndpointId(id.ok_or_else(unknown)?);
        owned_endpoint(state, &visitor, id).await?.map(Self).ok_or_else(unknown)
    }
}

impl<S: AdminStore> FromRequestParts<Arc<Portal<S>>> for OwnDelivery {
    type Rejection = Problem;

    async fn from_request_parts(
        parts: &mut Parts,
        state: &Arc<Portal<S>>,
    ) -> Result<Self, Problem> {
        let unknown = || Problem::not_found("no delivery has that id");
        let (visitor, id) = named(parts, state).await?;
        let id = DeliveryId(id.ok_or_else(unknown)?);
        let found = state.admin.store.delivery(id).await?;
        let own = found.filter(|found| found.tenant == visitor.link().tenant.as_str());
        own.map(Self).ok_or_else(unknown)
    }
}

impl<S: AdminStore> FromRequestParts<Arc<Portal<S>>> for OwnPlan {
    type Rejection = Problem;

    async fn from_request_parts(
        parts: &mut Parts,
        state: &Arc<Portal<S>>,
    ) -> Result<Self, Problem> {
        let unknown = || Problem::not_found("no plan has that id");
        let (visitor, id) = named(parts, state).await?;
        let plan = state.admin.store.plan(PlanId(id.ok_or_else(unknown)?)).await?;
        let plan = plan.ok_or_else(unknown)?;
        let endpoint = match &plan.work {
            PlanWork::Deliveries(work) => work.endpoint,
            PlanWork::Events(_) => return Err(unknown()),
        };
        match owned_endpoint(state, &visitor, endpoint).await? {
            Some(_) => Ok(Self(plan)),
            None => Err(unknown()),
        }
    }
}

/// The endpoint with this id, if it belongs to the tenant.
pub(super) async fn owned_endpoint<S: AdminStore>(
    portal: &Portal<S>,
    visitor: &Visitor,
    id: EndpointId,
) -> Result<Option<EndpointRecord>, Problem> {
    let found = portal.admin.store.endpoint(id).await?;
    Ok(found.filter(|found| found.tenant == visitor.link().tenant))
}

/// The visitor, and the second id in the path.
async fn named<S: AdminStore>(
    parts: &mut Parts,
    state: &Arc<Portal<S>>,
) -> Result<(Visitor, Option<Uuid>), Problem> {
    let visitor = Visitor::from_request_parts(parts, state).await?;
    let names = Path::<(String, String)>::from_request_parts(parts, state).await;
    Ok((visitor, names.ok().and_then(|Path((_, id))| id.parse().ok())))
}
