//! The admin side: health, metrics, and the API for operators and pull workers.
//!
//! [`routes`] lists every route, and [`openapi`] describes them. Every route except health needs a token that permits
//! the route ([`auth`]). If the operator opened the admin side on loopback, the Host header must name a
//! loopback address, against DNS rebinding. Requests that a reverse proxy forwarded still need a token. Every
//! action of an operator is recorded with the name of its token.

mod alerts;
mod audit;
mod auth;
mod claims;
mod delivery_figures;
mod endpoint_figures;
mod endpoints;
mod events;
mod extract;
mod handlers;
mod history;
mod jobs;
mod messages;
mod nodes;
mod openapi;
mod pages;
mod plans;
mod portal;
mod problem;
mod redaction;
mod rejections;
mod replay;
mod review;
mod routes;
mod site;
mod source_secrets;
mod stats;
mod storage;
mod tenants;
#[cfg(test)]
mod tests;
mod text_search;

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;

use arc_swap::ArcSwap;
use axum::extract::{Request, State};
use axum::handler::Handler as _;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use hapax_core::ledger::Ledger;
use hapax_core::presets::RetrySchedule;
use hapax_core::search::SearchFields;
use hapax_core::store::{
    AdminRecords, AlertRecords, Claim, EndpointHistory, HandlerRef, HandlerSpec, Inspect,
    InspectOutbox, KeyRecords, Operate, Outbox, OwnMessages, Plans, PortalLinks, RejectionRecords,
    SearchIndex, SourceSecretStore, Store, TenantDeletions, TrafficHistory, TriedJob,
    VerifierNames, Work,
};
use hapax_core::{SourceName, Timestamp};
use hapax_engine::{JobsFor, Now, Pulled, Readiness};
use metrics_exporter_prometheus::PrometheusHandle;
use serde::Serialize;
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;
use utoipa::openapi::OpenApi;

use auth::{Access, RouteGuard};
pub(crate) use auth::{Authenticated, Authorizer, WithoutToken};
pub(crate) use pages::SharedPages;
pub(crate) use portal::router as portal_router;
use problem::Problem;
pub(crate) use redaction::Redactions;
use routes::{ApiRoute, routes};
pub(crate) use site::Site;

use crate::alerts::AlertMonitor;
use crate::rejection_recorder::RejectionRecorder;
use crate::sending::SharedSending;
use crate::tenant_sources::TenantSources;

/// The currently configured handlers.
pub(crate) type Configured = Arc<dyn Fn() -> Vec<HandlerSpec> + Send + Sync>;

/// Fetches the current object for claims of a handler with `refetch`. A claim whose object cannot be
/// fetched is settled as failed and left out.
pub(crate) type RefetchClaims = Arc<
    dyn Fn(HandlerRef, Vec<Claim>) -> Pin<Box<dyn Future<Output = Vec<Pulled>> + Send>>
        + Send
        + Sync,
>;

/// Counts an attempt of a pull worker: its source, its verdict, its start and its end.
pub(crate) type CountTried =
    Arc<dyn Fn(&SourceName, &TriedJob, Timestamp, Timestamp) + Send + Sync>;

/// The acts and reads of a store that the admin side uses.
pub(crate) trait AdminStore:
    Store
    + Work
    + Operate
    + Inspect
    + Outbox
    + InspectOutbox
    + OwnMessages
    + Plans
    + Ledger
    + KeyRecords
    + TrafficHistory
    + EndpointHistory
    + RejectionRecords
    + SearchIndex
    + VerifierNames
    + AdminRecords
    + AlertRecords
    + PortalLinks
    + SourceSecretStore
    + TenantDeletions
{
}

impl<S> AdminStore for S where
    S: Store
        + Work
        + Operate
        + Inspect
        + Outbox
        + InspectOutbox
        + OwnMessages
        + Plans
        + Ledger
        + KeyRecords
        + TrafficHistory
        + EndpointHistory
        + RejectionRecords
        + SearchIndex
        + VerifierNames
        + AdminRecords
        + AlertRecords
        + PortalLinks
        + SourceSecretStore
        + TenantDeletions
{
}

/// The state that all routes share.
pub(crate) struct Admin<S> {
    /// The store.
    pub(crate) store: Arc<S>,
    /// Decides which requests are allowed.
    pub(crate) authorizer: Arc<Authorizer>,
    /// The values that are masked for tokens without `payload`.
    pub(crate) redactions: Arc<Redactions>,
    /// The values that sources name in `search`.
    pub(crate) search_fields: Arc<ArcSwap<SearchFields>>,
    /// The documented retry schedules of the senders, by source.
    pub(crate) retry_schedules: Arc<ArcSwap<HashMap<String, RetrySchedule>>>,
    /// How browsers reach the pages.
    pub(crate) site: Arc<Site>,
    /// The beginning of the addresses that senders post to.
    pub(crate) public_url: Arc<ArcSwap<String>>,
    /// The beginning of links to the portal, if there is a portal.
    pub(crate) portal_url: Option<String>,
    /// Held while deliveries are counted for a receiving party: one count at a time on this node.
    pub(crate) portal_counts: Arc<Semaphore>,
    /// The pages that were rendered within the last second.
    pub(crate) shared_pages: Arc<SharedPages>,
    /// Whether the process is ready, which it is not during a shutdown.
    pub(crate) readiness: Arc<Readiness>,
    /// The requests that this process refused.
    pub(crate) rejections: Arc<RejectionRecorder>,
    /// Renders the metrics.
    pub(crate) metrics: PrometheusHandle,
    /// The jobs of an event by the current configuration.
    pub(crate) handlers: JobsFor,
    /// The handlers of the current configuration.
    pub(crate) configured: Configured,
    /// The alerts, and the counters behind them.
    pub(crate) watch: Arc<AlertMonitor>,
    /// Fetches the current objects of claimed jobs.
    pub(crate) refetch: RefetchClaims,
    /// Counts the attempts of pull workers in the figures of their source.
    pub(crate) tried: CountTried,
    /// The sending side, or why endpoints cannot be used.
    pub(crate) sending: Arc<SharedSending>,
    /// The tenants that are added at run time.
    pub(crate) tenants: Arc<TenantSources<S>>,
    /// The clock.
    pub(crate) now: Now,
    /// Claims and actions of operators that are still running although their client disconnected. The shutdown
    /// waits for them, at most for `drain`, before it closes the store.
    pub(crate) unfinished: TaskTracker,
    /// The command that sends a first event, in dev mode.
    pub(crate) first_command: Option<String>,
}

/// All routes of the admin side.
pub(crate) fn router<S: AdminStore>(admin: Arc<Admin<S>>) -> Router {
    let site = Arc::clone(&admin.site);
    let missing = (async || Problem::not_found("there is no such route"))
        .layer(axum::middleware::from_fn_with_state(site, pages::finish));
    let mut router = Router::new();
    for ApiRoute { access, path, to, is_page, .. } in routes::<S>() {
        let to = match (access, is_page) {
            (Some(Access::Read), true) => to.route_layer(axum::middleware::from_fn_with_state(
                Arc::clone(&admin.shared_pages),
                pages::share,
            )),
            (Some(_) | None, true | false) => to,
        };
        let to = match access {
            None => to,
            Some(access) => to.route_layer(axum::middleware::from_fn_with_state(
                RouteGuard { admin: Arc::clone(&admin), access, path },
                auth::authorize::<S>,
            )),
        };
        let to = match is_page {
            true => {
                let site = Arc::clone(&admin.site);
                to.route_layer(axum::middleware::from_fn_with_state(site, pages::finish))
            }
            false => to,
        };
        router = router.route(path, to);
    }
    router
        .fallback(missing)
        .method_not_allowed_fallback(async || Problem::method_not_allowed())
        .layer(axum::middleware::map_response(response_headers))
        .layer(axum::middleware::map_request(host_header))
        .with_state(admin)
}

/// Adds the Host header to a request of HTTP/2, where the host is part of the URI.
async fn host_header(mut request: Request) -> Request {
    if !request.headers().contains_key(header::HOST)
        && let Some(authority) = request.uri().authority()
        && let Ok(host) = HeaderValue::from_str(authority.as_str())
    {
        request.headers_mut().insert(header::HOST, host);
    }
    request
}

/// Adds headers to every answer: it must not be cached, and its content type must not be guessed.
async fn response_headers(mut response: Response) -> Response {
    let headers = response.headers_mut();
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// A new object: 201.
struct Created<T>(T);

impl<T: Serialize> IntoResponse for Created<T> {
    fn into_response(self) -> Response {
        (StatusCode::CREATED, Json(self.0)).into_response()
    }
}

/// An answer to a request whose work is done later: 202.
struct Accepted<T>(T);

impl<T: Serialize> IntoResponse for Accepted<T> {
    fn into_response(self) -> Response {
        (StatusCode::ACCEPTED, Json(self.0)).into_response()
    }
}

/// An answer of plain text.
struct Text(String);

impl IntoResponse for Text {
    fn into_response(self) -> Response {
        self.0.into_response()
    }
}

/// Metrics in the text format of Prometheus.
struct Exposition(String);

impl IntoResponse for Exposition {
    fn into_response(self) -> Response {
        let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
        (kind, self.0).into_response()
    }
}

/// The answer of the route that describes all routes.
struct Document(OpenApi);

impl IntoResponse for Document {
    fn into_response(self) -> Response {
        Json(self.0).into_response()
    }
}

async fn healthy() -> StatusCode {
    StatusCode::OK
}

async fn ready<S: AdminStore>(State(admin): State<Arc<Admin<S>>>) -> Result<Text, Problem> {
    match admin.readiness.judge(&*admin.store) {
        Ok(()) => Ok(Text("ready\n".to_owned())),
        Err(error) => Err(Problem::unavailable(&error.to_string())),
    }
}

async fn metrics<S: AdminStore>(State(admin): State<Arc<Admin<S>>>) -> Exposition {
    Exposition(admin.metrics.render())
}

async fn openapi<S: AdminStore>() -> Document {
    Document(openapi::document(&routes::<S>()))
}
