//! The portal: pages for receiving parties, on a listener of their own.
//!
//! [`routes`] lists every route and the right that it needs. An operator makes a link for a tenant
//! ([`links`]); its code is exchanged for a cookie ([`enter`]), and [`guard`] admits requests with that
//! cookie. A path names an object by its id. The extractors of [`own`] find the object only if it belongs to
//! the tenant of the link, and handlers get ids from nowhere else. [`view`] is all that the pages show: no
//! name of a node, no resolved address, no reason that is meant for operators. [`actions`] calls the
//! functions of the admin API, with the link as the actor.

mod actions;
mod enter;
mod guard;
mod link_limits;
pub(super) mod links;
mod own;
mod pages;
pub(super) mod routes;
mod view;

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::auth::Refusals;
use super::pages::{Frame, finish_headers, problem_as_page, wants_page};
use super::problem::Problem;
use super::{Admin, AdminStore, Site};
use guard::RouteGuard;
use link_limits::LinkLimits;
use routes::{PortalRoute, routes};

/// The state that all routes of the portal share.
pub(crate) struct Portal<S> {
    /// The admin side, whose functions the pages call.
    admin: Arc<Admin<S>>,
    /// How browsers reach the portal.
    site: Arc<Site>,
    /// Limits how many wrong codes the audit trail records.
    refusals: Refusals,
    limits: LinkLimits,
}

/// All routes of the portal.
pub(crate) fn router<S: AdminStore>(admin: Arc<Admin<S>>, site: Arc<Site>) -> Router {
    let portal = Arc::new(Portal {
        admin,
        site,
        refusals: Refusals::default(),
        limits: LinkLimits::default(),
    });
    let mut router = Router::new();
    for PortalRoute { right, method, path, to } in routes::<S>() {
        let to = match right {
            None => to,
            Some(right) => to.route_layer(axum::middleware::from_fn_with_state(
                RouteGuard { portal: Arc::clone(&portal), right, method, path },
                guard::admit::<S>,
            )),
        };
        router = router.route(path, to);
    }
    router
        .fallback(async || Problem::not_found("there is no such page"))
        .method_not_allowed_fallback(async || Problem::method_not_allowed())
        .layer(axum::middleware::from_fn_with_state(Arc::clone(&portal.site), finish))
        .layer(axum::middleware::map_response(super::response_headers))
        .layer(axum::middleware::map_request(super::host_header))
        .with_state(portal)
}

/// The text that a receiving party reads instead of the reason of a failure inside the server.
const UNAVAILABLE: &str = "the service cannot answer now: try again in a minute";

/// Middleware of all routes: errors become pages, reasons that are meant for operators stay inside, and browsers get
/// the rules that protect them.
async fn finish(State(site): State<Arc<Site>>, request: Request, next: Next) -> Response {
    let if_none_match = request.headers().get(header::IF_NONE_MATCH).cloned();
    let wants_page = wants_page(request.headers());
    let mut response = next.run(request).await;
    if response.status().is_server_error() {
        response = Problem::unavailable(UNAVAILABLE).into_response();
    }
    if wants_page {
        let frame = match response.extensions_mut().remove::<guard::Visitor>() {
            Some(visitor) => Frame::of_link(&site, visitor.link(), ""),
            None => Frame::without_session(&site),
        };
        response = problem_as_page(response, frame, if_none_match);
    }
    finish_headers(response.headers_mut(), &site);
    response
}

async fn healthy() -> StatusCode {
    StatusCode::OK
}
