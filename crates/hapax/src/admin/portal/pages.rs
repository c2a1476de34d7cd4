//! The pages of endpoints, deliveries and plans, and the page that says how to verify a delivery.

use std::collections::HashMap;
use std::sync::Arc;

use askama::Template;
use axum::extract::State;
use hapax_core::endpoint::EndpointId;
use hapax_core::message::{Payload, thin_envelope};
use hapax_core::store::{Cursor, DeliveryFilter, EndpointFilter};

use super::super::AdminStore;
use super::super::delivery_figures::DeliveryFigures;
use super::super::endpoint_figures::rates;
use super::super::events::instant;
use super::super::extract::{QueryParams, cursor, limit};
use super::super::pages::{Filters, Frame, Page, PageReader, STATUSES, text};
use super::super::problem::Problem;
use super::Portal;
use super::guard::Visitor;
use super::own::{OwnDelivery, OwnEndpoint, OwnPlan, owned_endpoint};
use super::view::{DeliveryView, EndpointView, PlanView, figures};
use crate::api::{Body, DeliveriesQuery, EndpointRates};

/// Endpoints of one page.
const ENDPOINTS_SHOWN: usize = 50;

/// The newest deliveries that the page of an endpoint shows and counts.
const DELIVERIES_SHOWN: usize = 50;

/// The fields by which deliveries are filtered.
const FIELDS: [&str; 7] = ["endpoint", "status", "message", "since", "until", "cursor", "limit"];

#[derive(Template)]
#[template(path = "portal/endpoints.html")]
pub(super) struct Endpoints {
    frame: Frame,
    items: Vec<EndpointView>,
    /// The outcomes of each endpoint's attempts in the last 24 hours.
    rates: HashMap<EndpointId, EndpointRates>,
    older: Option<String>,
    done: Option<String>,
}

/// `GET /p/{link}/`.
pub(super) async fn endpoints<S: AdminStore>(
    State(portal): State<Arc<Portal<S>>>,
    visitor: Visitor,
    reader: PageReader,
    filters: Filters,
) -> Result<Page<Endpoints>, Problem> {
    let frame = visitor.frame(&portal.site, "/");
    let filter = EndpointFilter {
        tenant: Some(visitor.link().tenant.clone()),
        before: cursor(filters.get("cursor"))?,
        limit: ENDPOINTS_SHOWN,
        ..EndpointFilter::default()
    };
    let page = portal.admin.store.endpoints(filter).await?;
    let ids = page.items.iter().map(|endpoint| endpoint.id).collect();
    let rates = rates(&*portal.admin.store, ids, (portal.admin.now)()).await?;
    let next = page.next.map(|Cursor(next)| next.to_string());
    let page = Endpoints {
        rates,
        older: filters.only(&["cursor"]).older(&frame.base, "/", next.as_deref()),
        frame,
        items: page.items.into_iter().map(EndpointView::from).collect(),
        done: filters.done(),
    };
    Ok(reader.page(page))
}

#[derive(Template)]
#[template(path = "portal/endpoint.html")]
pub(super) struct EndpointPage {
    frame: Frame,
    endpoint: EndpointView,
    deliveries: Vec<DeliveryView>,
    rates: EndpointRates,
    figures: DeliveryFigures,
    done: Option<String>,
}

/// `GET /p/{link}/endpoints/{id}`.
pub(super) async fn endpoint<S: AdminStore>(
    State(portal): State<Arc<Portal<S>>>,
    visitor: Visitor,
    reader: PageReader,
    OwnEndpoint(endpoint): OwnEndpoint,
    filters: Filters,
) -> Result<Page<EndpointPage>, Problem> {
    let newest = DeliveryFilter {
        endpoint: Some(endpoint.id),
        tenant: Some(visitor.link().tenant.clone()),
        limit: DELIVERIES_SHOWN,
        ..DeliveryFilter::default()
    };
    let newest = portal.admin.store.deliveries(newest).await?;
    let mut rates = rates(&*portal.admin.store, vec![endpoint.id], (portal.admin.now)()).await?;
    let deliveries: Vec<_> = newest.items.into_iter().map(DeliveryView::from).collect();
    let page = EndpointPage {
        frame: visitor.frame(&portal.site, "/"),
        rates: rates.remove(&endpoint.id).unwrap_or_default(),
        endpoint: endpoint.into(),
        figures: figures(&deliveries),
        deliveries,
        done: filters.done(),
    };
    Ok(reader.page(page))
}

#[derive(Template)]
#[template(path = "portal/deliveries.html")]
pub(super) struct Deliveries {
    frame: Frame,
    endpoint: Option<String>,
    message: Option<String>,
    status: Option<String>,
    since: Option<String>,
    statuses: [&'static str; 8],
    deliveries: Vec<DeliveryView>,
    older: Option<String>,
    is_first: bool,
}

/// `GET /p/{link}/deliveries`.
pub(super) async fn deliveries<S: AdminStore>(
    State(portal): State<Arc<Portal<S>>>,
    visitor: Visitor,
    reader: PageReader,
    filters: Filters,
) -> Result<Page<Deliveries>, Problem> {
    let frame = visitor.frame(&portal.site, "/deliveries");
    let filters = filters.only(&FIELDS);
    let QueryParams(query) = filters.query::<DeliveriesQuery>()?;
    let now = (portal.admin.now)();
    let filter = DeliveryFilter {
        endpoint: query.endpoint,
        message: query.message,
        tenant: Some(visitor.link().tenant.clone()),
        status: query.status,
        since: query.since.map(|at| instant(now, at)),
        until: query.until.map(|at| instant(now, at)),
        before: cursor(query.cursor)?,
        limit: limit(query.limit)?,
        ..DeliveryFilter::default()
    };
    let is_own = match filter.endpoint {
        Some(id) => owned_endpoint(&portal, &visitor, id).await?.is_some(),
        None => filter.message.is_none(),
    };
    let page = portal.admin.store.deliveries(filter).await?;
    // A search that stops at its bound would reveal that an object of another tenant has many
    // deliveries.
    let next = page.next.filter(|_| is_own || !page.items.is_empty());
    let next = next.map(|Cursor(next)| next.to_string());
    let page = Deliveries {
        older: filters.older(&frame.base, "/deliveries", next.as_deref()),
        frame,
        endpoint: filters.get("endpoint"),
        message: filters.get("message"),
        status: filters.get("status"),
        since: filters.get("since"),
        statuses: STATUSES,
        deliveries: page.items.into_iter().map(DeliveryView::from).collect(),
        is_first: filters.get("cursor").is_none(),
    };
    Ok(reader.page(page))
}

#[derive(Template)]
#[template(path = "portal/delivery.html")]
pub(super) struct DeliveryPage {
    frame: Frame,
    delivery: DeliveryView,
    /// The bytes that are sent, indented and as they are; empty once the message is pruned.
    pretty: String,
    body: String,
    done: Option<String>,
}

/// `GET /p/{link}/deliveries/{id}`.
pub(super) async fn delivery<S: AdminStore>(
    State(portal): State<Arc<Portal<S>>>,
    visitor: Visitor,
    reader: PageReader,
    OwnDelivery(delivery): OwnDelivery,
    filters: Filters,
) -> Result<Page<DeliveryPage>, Problem> {
    let (store, tenant) = (&portal.admin.store, visitor.link().tenant.clone());
    let message = store.message(&delivery.message, Some(tenant)).await?;
    let stored = message.into_iter().next().map(|message| message.body).unwrap_or_default();
    let endpoint = store.endpoint(delivery.endpoint).await?;
    let shown = match endpoint.map(|endpoint| endpoint.settings.payload) {
        Some(Payload::Fat) => stored,
        Some(Payload::Thin) => thin_envelope(&stored).map_or(stored, Into::into),
        // The settings of a removed endpoint are gone, and the endpoint may never have got the
        // whole body.
        None => thin_envelope(&stored).unwrap_or_default().into(),
    };
    let body = Body::of(&shown).body.unwrap_or_default();
    let page = DeliveryPage {
        frame: visitor.frame(&portal.site, "/deliveries"),
        delivery: delivery.into(),
        pretty: text::indented(&body),
        body,
        done: filters.done(),
    };
    Ok(reader.page(page))
}

#[derive(Template)]
#[template(path = "portal/plan.html")]
pub(super) struct PlanPage {
    frame: Frame,
    plan: PlanView,
    done: Option<String>,
}

/// `GET /p/{link}/replays/{id}`.
pub(super) async fn plan<S: AdminStore>(
    State(portal): State<Arc<Portal<S>>>,
    visitor: Visitor,
    reader: PageReader,
    OwnPlan(plan): OwnPlan,
    filters: Filters,
) -> Page<PlanPage> {
    let frame = visitor.frame(&portal.site, "/deliveries");
    reader.page(PlanPage { frame, plan: plan.into(), done: filters.done() })
}

#[derive(Template)]
#[template(path = "portal/verify.html")]
pub(super) struct Verify {
    frame: Frame,
    samples: [CodeSample; 4],
}

/// Code that verifies a delivery.
pub(super) struct CodeSample {
    language: &'static str,
    code: &'static str,
}

const SAMPLES: [CodeSample; 4] = [
    CodeSample { language: "Node.js", code: include_str!("../../../assets/verify/verify.mjs") },
    CodeSample { language: "Python", code: include_str!("../../../assets/verify/verify.py") },
    CodeSample { language: "Go", code: include_str!("../../../assets/verify/verify.go") },
    CodeSample { language: "PHP", code: include_str!("../../../assets/verify/verify.php") },
];

/// `GET /p/{link}/verify`.
pub(super) async fn verify<S: AdminStore>(
    State(portal): State<Arc<Portal<S>>>,
    visitor: Visitor,
    reader: PageReader,
) -> Page<Verify> {
    reader.page(Verify { frame: visitor.frame(&portal.site, "/verify"), samples: SAMPLES })
}
