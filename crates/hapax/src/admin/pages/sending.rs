//! The pages of endpoints, messages and deliveries.

use std::collections::HashMap;
use std::sync::Arc;

use askama::Template;
use axum::Json;
use axum::extract::State;
use hapax_core::Timestamp;
use hapax_core::delivery::DeliveryStatus;
use hapax_core::endpoint::{EndpointId, EndpointOrder, OnDead};

use super::super::delivery_figures::DeliveryFigures;
use super::super::extract::{PathId, QueryParams};
use super::super::problem::Problem;
use super::super::{
    Admin, AdminStore, endpoint_figures, endpoints as api_endpoints, messages as api_messages,
};
use super::filters::Filters;
use super::{Frame, Page, PageReader};
use crate::api::{
    DeliveriesQuery, Delivery, Endpoint, EndpointRates, EndpointsQuery, Message, MessageQuery,
    MessageSummary, MessagesQuery,
};

/// The states that a delivery can have, as the filter offers them.
pub(in crate::admin) const STATUSES: [&str; 8] =
    ["waiting", "sending", "failed", "parked", "held", "delivered", "dead", "cancelled"];

/// The states that a message can have: those of its deliveries, or `none` without one.
const MESSAGE_STATUSES: [&str; 9] =
    ["waiting", "sending", "failed", "parked", "held", "delivered", "dead", "cancelled", "none"];

#[derive(Template)]
#[template(path = "endpoints.html")]
pub(in crate::admin) struct Endpoints {
    frame: Frame,
    tenant: Option<String>,
    items: Vec<Endpoint>,
    /// The outcomes of each endpoint's attempts in the last 24 hours.
    rates: HashMap<EndpointId, EndpointRates>,
    older: Option<String>,
}

/// `GET /endpoints`.
pub(in crate::admin) async fn endpoints<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    reader: PageReader,
    filters: Filters,
) -> Result<Page<Endpoints>, Problem> {
    let frame = reader.frame(&admin, "/endpoints").await;
    let query = filters.query::<EndpointsQuery>()?;
    let Json(page) = api_endpoints::list(State(Arc::clone(&admin)), query).await?;
    let ids = page.items.iter().map(|endpoint| endpoint.id).collect();
    let rates = endpoint_figures::rates(&*admin.store, ids, (admin.now)()).await?;
    let page = Endpoints {
        rates,
        older: filters.older(&frame.base, "/endpoints", page.next.as_deref()),
        frame,
        tenant: filters.get("tenant"),
        items: page.items,
    };
    Ok(reader.page(page))
}

#[derive(Template)]
#[template(path = "endpoint.html")]
pub(in crate::admin) struct EndpointPage {
    frame: Frame,
    endpoint: Endpoint,
    deliveries: Vec<Delivery>,
    rates: EndpointRates,
    figures: DeliveryFigures,
    done: Option<String>,
}

/// `GET /endpoints/{id}`.
pub(in crate::admin) async fn endpoint<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    reader: PageReader,
    PathId(id): PathId,
    filters: Filters,
) -> Result<Page<EndpointPage>, Problem> {
    let frame = reader.frame(&admin, "/endpoints").await;
    let Json(endpoint) = api_endpoints::show(State(Arc::clone(&admin)), PathId(id)).await?;
    let id = PathId(endpoint.id.to_string());
    let Json(rates) = endpoint_figures::show(State(Arc::clone(&admin)), id).await?;
    let newest = DeliveriesQuery {
        endpoint: Some(endpoint.id),
        limit: Some(20),
        ..DeliveriesQuery::default()
    };
    let Json(deliveries) = api_messages::deliveries(State(admin), QueryParams(newest)).await?;
    let deliveries = deliveries.items;
    let attempts = deliveries.iter().flat_map(|delivery| &delivery.attempts);
    let answered = attempts.filter(|attempt| attempt.error.is_none());
    let states = deliveries.iter().map(|delivery| delivery.status);
    let figures = DeliveryFigures::of(states, answered.filter_map(|attempt| attempt.took_ms));
    let done = filters.done();
    Ok(reader.page(EndpointPage { frame, endpoint, deliveries, rates, figures, done }))
}

#[derive(Template)]
#[template(path = "messages.html")]
pub(in crate::admin) struct Messages {
    frame: Frame,
    tenant: Option<String>,
    kind: Option<String>,
    key: Option<String>,
    status: Option<String>,
    statuses: [&'static str; 9],
    items: Vec<MessageSummary>,
    older: Option<String>,
    searched_to: Option<Timestamp>,
    is_first: bool,
}

/// `GET /messages`.
pub(in crate::admin) async fn messages<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    reader: PageReader,
    filters: Filters,
) -> Result<Page<Messages>, Problem> {
    let frame = reader.frame(&admin, "/messages").await;
    let query = filters.query::<MessagesQuery>()?;
    let Json(page) = api_messages::list(State(admin), query).await?;
    let page = Messages {
        older: filters.older(&frame.base, "/messages", page.next.as_deref()),
        frame,
        tenant: filters.get("tenant"),
        kind: filters.get("type"),
        key: filters.get("key"),
        status: filters.get("status"),
        statuses: MESSAGE_STATUSES,
        searched_to: page.searched_to,
        items: page.items,
        is_first: filters.get("cursor").is_none(),
    };
    Ok(reader.page(page))
}

#[derive(Template)]
#[template(path = "message.html")]
pub(in crate::admin) struct MessagePage {
    frame: Frame,
    message: Message,
    pretty: String,
    done: Option<String>,
}

/// `GET /messages/{id}`.
pub(in crate::admin) async fn message<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    reader: PageReader,
    PathId(id): PathId,
    filters: Filters,
) -> Result<Page<MessagePage>, Problem> {
    let frame = reader.frame(&admin, "/messages").await;
    let query = MessageQuery { tenant: filters.get("tenant") };
    let Json(message) = api_messages::show(State(admin), PathId(id), QueryParams(query)).await?;
    let page = MessagePage {
        frame,
        pretty: message.body.body.as_deref().map(super::text::indented).unwrap_or_default(),
        message,
        done: filters.done(),
    };
    Ok(reader.page(page))
}

#[derive(Template)]
#[template(path = "deliveries.html")]
pub(in crate::admin) struct Deliveries {
    frame: Frame,
    tenant: Option<String>,
    endpoint: Option<String>,
    key: Option<String>,
    status: Option<String>,
    statuses: [&'static str; 8],
    items: Vec<Delivery>,
    older: Option<String>,
    searched_to: Option<Timestamp>,
    is_first: bool,
}

/// `GET /deliveries`.
pub(in crate::admin) async fn deliveries<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    reader: PageReader,
    filters: Filters,
) -> Result<Page<Deliveries>, Problem> {
    let frame = reader.frame(&admin, "/deliveries").await;
    let query = filters.query::<DeliveriesQuery>()?;
    let Json(page) = api_messages::deliveries(State(admin), query).await?;
    let page = Deliveries {
        older: filters.older(&frame.base, "/deliveries", page.next.as_deref()),
        frame,
        tenant: filters.get("tenant"),
        endpoint: filters.get("endpoint"),
        key: filters.get("key"),
        status: filters.get("status"),
        statuses: STATUSES,
        searched_to: page.searched_to,
        items: page.items,
        is_first: filters.get("cursor").is_none(),
    };
    Ok(reader.page(page))
}

#[derive(Template)]
#[template(path = "delivery.html")]
pub(in crate::admin) struct DeliveryPage {
    frame: Frame,
    delivery: Delivery,
    may_be_skipped: bool,
    done: Option<String>,
}

/// How a delivery affects the later deliveries under its key.
#[derive(Clone, Copy)]
pub(super) struct KeyOrder {
    /// Whether the endpoint gets the deliveries under one key in order.
    pub(super) is_ordered: bool,
    /// Whether a dead delivery keeps the later ones waiting.
    parks_dead: bool,
}

impl KeyOrder {
    pub(super) async fn of<S: AdminStore>(
        admin: &Arc<Admin<S>>,
        delivery: &Delivery,
    ) -> Result<Self, Problem> {
        if delivery.key.is_none() {
            return Ok(Self { is_ordered: false, parks_dead: false });
        }
        let endpoint = admin.store.endpoint(delivery.endpoint).await?;
        let settings = endpoint.map(|endpoint| endpoint.settings);
        let ordered = settings.filter(|settings| settings.order == EndpointOrder::Key);
        Ok(Self {
            is_ordered: ordered.is_some(),
            parks_dead: ordered.is_some_and(|settings| settings.on_dead == OnDead::Park),
        })
    }

    /// Whether an operator can give the delivery up: it waits, or it is dead and keeps later ones waiting.
    pub(super) fn may_skip(self, delivery: &Delivery) -> bool {
        match delivery.status {
            DeliveryStatus::Waiting
            | DeliveryStatus::Failed
            | DeliveryStatus::Parked
            | DeliveryStatus::Held => true,
            DeliveryStatus::Dead => self.parks_dead,
            DeliveryStatus::Sending | DeliveryStatus::Delivered | DeliveryStatus::Cancelled => {
                false
            }
        }
    }
}

/// `GET /deliveries/{id}`.
pub(in crate::admin) async fn delivery<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    reader: PageReader,
    PathId(id): PathId,
    filters: Filters,
) -> Result<Page<DeliveryPage>, Problem> {
    let frame = reader.frame(&admin, "/deliveries").await;
    let Json(delivery) = api_messages::delivery(State(Arc::clone(&admin)), PathId(id)).await?;
    let may_be_skipped = KeyOrder::of(&admin, &delivery).await?.may_skip(&delivery);
    Ok(reader.page(DeliveryPage { frame, delivery, may_be_skipped, done: filters.done() }))
}
