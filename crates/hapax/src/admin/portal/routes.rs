//! The route table of the portal. The router, the authorization and the tests read nothing else.

use std::sync::Arc;

use axum::handler::Handler;
use axum::http::Method;
use axum::routing::{MethodFilter, MethodRouter};
use hapax_core::store::PortalRight;

use super::super::AdminStore;
use super::super::pages::{CancelPlan, ReplayDelivery, RotateEndpoint, file};
use super::actions::{
    AddEndpoint, Disable, EditEndpoint, Enable, Ping, RemoveEndpoint, ReplayMany, act, ask,
};
use super::own::{OwnDelivery, OwnEndpoint, OwnPlan, OwnTenant};
use super::{Portal, enter, pages};

/// All routes of the portal.
#[rustfmt::skip] // A line per route.
pub(in crate::admin) fn routes<S: AdminStore>() -> Vec<PortalRoute<S>> {
    use PortalRight::{Endpoints, Read, Replay};
    vec![
        route(None, Method::GET, "/healthz", super::healthy),
        route(None, Method::GET, "/assets/{name}", file),
        route(None, Method::GET, "/enter/{code}", enter::ask::<S>),
        route(None, Method::POST, "/enter/{code}", enter::enter::<S>),
        get(Read, "/p/{link}", pages::endpoints::<S>),
        get(Read, "/p/{link}/", pages::endpoints::<S>),
        get(Read, "/p/{link}/endpoints/{id}", pages::endpoint::<S>),
        get(Read, "/p/{link}/deliveries", pages::deliveries::<S>),
        get(Read, "/p/{link}/deliveries/{id}", pages::delivery::<S>),
        get(Read, "/p/{link}/replays/{id}", pages::plan::<S>),
        get(Read, "/p/{link}/verify", pages::verify::<S>),
        post(Read, "/p/{link}/logout", enter::leave::<S>),
        get(Replay, "/p/{link}/deliveries/{id}/replay", ask::<S, OwnDelivery, ReplayDelivery>),
        post(Replay, "/p/{link}/deliveries/{id}/replay", act::<S, OwnDelivery, ReplayDelivery>),
        get(Replay, "/p/{link}/endpoints/{id}/replay", ask::<S, OwnEndpoint, ReplayMany>),
        post(Replay, "/p/{link}/endpoints/{id}/replay", act::<S, OwnEndpoint, ReplayMany>),
        get(Replay, "/p/{link}/replays/{id}/cancel", ask::<S, OwnPlan, CancelPlan>),
        post(Replay, "/p/{link}/replays/{id}/cancel", act::<S, OwnPlan, CancelPlan>),
        get(Endpoints, "/p/{link}/endpoints/new", ask::<S, OwnTenant, AddEndpoint>),
        post(Endpoints, "/p/{link}/endpoints/new", act::<S, OwnTenant, AddEndpoint>),
        get(Endpoints, "/p/{link}/endpoints/{id}/edit", ask::<S, OwnEndpoint, EditEndpoint>),
        post(Endpoints, "/p/{link}/endpoints/{id}/edit", act::<S, OwnEndpoint, EditEndpoint>),
        get(Endpoints, "/p/{link}/endpoints/{id}/disable", ask::<S, OwnEndpoint, Disable>),
        post(Endpoints, "/p/{link}/endpoints/{id}/disable", act::<S, OwnEndpoint, Disable>),
        get(Endpoints, "/p/{link}/endpoints/{id}/enable", ask::<S, OwnEndpoint, Enable>),
        post(Endpoints, "/p/{link}/endpoints/{id}/enable", act::<S, OwnEndpoint, Enable>),
        get(Endpoints, "/p/{link}/endpoints/{id}/ping", ask::<S, OwnEndpoint, Ping>),
        post(Endpoints, "/p/{link}/endpoints/{id}/ping", act::<S, OwnEndpoint, Ping>),
        get(Endpoints, "/p/{link}/endpoints/{id}/rotate", ask::<S, OwnEndpoint, RotateEndpoint>),
        post(Endpoints, "/p/{link}/endpoints/{id}/rotate", act::<S, OwnEndpoint, RotateEndpoint>),
        get(Endpoints, "/p/{link}/endpoints/{id}/remove", ask::<S, OwnEndpoint, RemoveEndpoint>),
        post(Endpoints, "/p/{link}/endpoints/{id}/remove", act::<S, OwnEndpoint, RemoveEndpoint>),
    ]
}

/// One route.
pub(in crate::admin) struct PortalRoute<S> {
    /// The right that the link needs; `None`: no link.
    pub(in crate::admin) right: Option<PortalRight>,
    pub(in crate::admin) method: Method,
    pub(in crate::admin) path: &'static str,
    pub(super) to: MethodRouter<Arc<Portal<S>>>,
}

fn get<S, H, T>(right: PortalRight, path: &'static str, to: H) -> PortalRoute<S>
where
    S: AdminStore,
    H: Handler<T, Arc<Portal<S>>>,
    T: 'static,
{
    route(Some(right), Method::GET, path, to)
}

fn post<S, H, T>(right: PortalRight, path: &'static str, to: H) -> PortalRoute<S>
where
    S: AdminStore,
    H: Handler<T, Arc<Portal<S>>>,
    T: 'static,
{
    route(Some(right), Method::POST, path, to)
}

fn route<S, H, T>(
    right: Option<PortalRight>,
    method: Method,
    path: &'static str,
    to: H,
) -> PortalRoute<S>
where
    S: AdminStore,
    H: Handler<T, Arc<Portal<S>>>,
    T: 'static,
{
    let filter = MethodFilter::try_from(method.clone()).expect("a method that routes can have");
    PortalRoute { right, method, path, to: MethodRouter::new().on(filter, to) }
}
