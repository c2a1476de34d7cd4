//! The admin side: health, metrics, and the API for operators and pull workers.
//!
//! [`routes`] lists every route. Every route except health needs a token that permits it ([`auth`]). If the
//! operator opened the admin side on loopback, the Host header must name a loopback address, against DNS
//! rebinding, and requests that a reverse proxy forwarded still need a token. Every action is recorded with
//! the name of its token.

mod auth;
mod claims;
mod events;
mod extract;
mod jobs;
mod problem;
mod replay;
mod review;
mod stats;
#[cfg(test)]
mod tests;

use std::pin::Pin;
use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use hapax_core::handler::EventView;
use hapax_core::store::{Claim, HandlerRef, HandlerSpec, Inspect, NewJob, Store, Work};
use hapax_core::{SourceName, Tenant};
use hapax_engine::{Now, Pulled, Readiness};
use metrics_exporter_prometheus::PrometheusHandle;
use tokio_util::task::TaskTracker;

pub(crate) use auth::{Authorizer, WithoutToken};
use auth::{RouteGuard, Scope};
use problem::Problem;

use crate::alerts::Watch;

/// The jobs of an event by the current configuration, for replays and approvals.
pub(crate) type JobsFor =
    Arc<dyn Fn(&SourceName, &Tenant, EventView<'_>) -> Vec<NewJob> + Send + Sync>;

/// The currently configured handlers.
pub(crate) type Configured = Arc<dyn Fn() -> Vec<HandlerSpec> + Send + Sync>;

/// Fetches the current object for claims of a handler with `refetch`. A claim whose object cannot be
/// fetched is settled as failed and left out.
pub(crate) type RefetchClaims = Arc<
    dyn Fn(HandlerRef, Vec<Claim>) -> Pin<Box<dyn Future<Output = Vec<Pulled>> + Send>>
        + Send
        + Sync,
>;

/// The acts and reads of a store that the admin side uses.
pub(crate) trait AdminStore: Store + Work + Inspect {}

impl<S: Store + Work + Inspect> AdminStore for S {}

/// The state that all routes share.
pub(crate) struct Admin<S> {
    /// The store.
    pub(crate) store: Arc<S>,
    /// Decides which requests are allowed.
    pub(crate) authorizer: Arc<Authorizer>,
    /// Whether the process is ready; not any more once it shuts down.
    pub(crate) readiness: Arc<Readiness>,
    /// Renders the metrics.
    pub(crate) metrics: PrometheusHandle,
    /// The jobs of an event by the current configuration.
    pub(crate) handlers: JobsFor,
    /// The handlers of the current configuration.
    pub(crate) configured: Configured,
    /// The alerts, and the counters behind them.
    pub(crate) watch: Arc<Watch>,
    /// Fetches the current objects of claimed jobs.
    pub(crate) refetch: RefetchClaims,
    /// The clock.
    pub(crate) now: Now,
    /// Claims that are still running although their client disconnected. The shutdown waits for them before
    /// it closes the store.
    pub(crate) unfinished: TaskTracker,
}

/// All routes of the admin side.
pub(crate) fn router<S: AdminStore>(admin: Admin<S>) -> Router {
    let admin = Arc::new(admin);
    let mut router = Router::new();
    for Route { scope, path, to, .. } in routes::<S>() {
        let to = match scope {
            None => to,
            Some(scope) => to.route_layer(axum::middleware::from_fn_with_state(
                RouteGuard { admin: Arc::clone(&admin), scope },
                auth::authorize::<S>,
            )),
        };
        router = router.route(path, to);
    }
    router
        .fallback(async || Problem::not_found("there is no such route"))
        .method_not_allowed_fallback(async || Problem::method_not_allowed())
        .layer(axum::middleware::map_response(response_headers))
        .with_state(admin)
}

/// Adds headers to every answer: it must not be cached, nor its content type guessed.
async fn response_headers(mut response: Response) -> Response {
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// One route with the scope it needs.
struct Route<S> {
    /// `None`: no token needed.
    scope: Option<Scope>,
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "a test compares it with the OpenAPI document")
    )]
    method: Method,
    path: &'static str,
    to: MethodRouter<Arc<Admin<S>>>,
}

fn routes<S: AdminStore>() -> Vec<Route<S>> {
    let read = |path, to| Route { scope: Some(Scope::Read), method: Method::GET, path, to };
    let operate = |path, to| Route { scope: Some(Scope::Operate), method: Method::POST, path, to };
    let claim = |path, to| Route { scope: Some(Scope::Claim), method: Method::POST, path, to };
    let open = |path, to| Route { scope: None, method: Method::GET, path, to };
    vec![
        open("/healthz", get(async || StatusCode::OK)),
        open("/readyz", get(ready::<S>)),
        read("/", get(index)),
        read("/metrics", get(metrics::<S>)),
        read("/api/v1/openapi.json", get(openapi)),
        read("/api/v1/events", get(events::list::<S>)),
        read("/api/v1/events/{id}", get(events::show::<S>)),
        operate("/api/v1/events/{id}/replay", post(replay::event::<S>)),
        operate("/api/v1/events/{id}/approve", post(review::approve::<S>)),
        operate("/api/v1/events/{id}/reject", post(review::reject::<S>)),
        operate("/api/v1/events/{id}/discard", post(review::discard_of_event::<S>)),
        read("/api/v1/handlers", get(jobs::handlers::<S>)),
        read("/api/v1/lanes", get(jobs::lanes::<S>)),
        read("/api/v1/stats", get(stats::stats::<S>)),
        read("/api/v1/alerts", get(stats::alerts::<S>)),
        read("/api/v1/jobs", get(jobs::list::<S>)),
        read("/api/v1/jobs/{id}", get(jobs::show::<S>)),
        operate("/api/v1/jobs/{id}/replay", post(replay::job::<S>)),
        operate("/api/v1/jobs/{id}/discard", post(review::discard_of_job::<S>)),
        operate("/api/v1/jobs/replay", post(replay::many::<S>)),
        claim("/api/v1/claims", post(claims::claim::<S>)),
        claim("/api/v1/claims/{job}/renew", post(claims::renew::<S>)),
        claim("/api/v1/claims/{job}/complete", post(claims::complete::<S>)),
        claim("/api/v1/claims/{job}/fail", post(claims::fail::<S>)),
    ]
}

async fn ready<S: AdminStore>(State(admin): State<Arc<Admin<S>>>) -> Response {
    match admin.readiness.judge(&*admin.store) {
        Ok(()) => "ready\n".into_response(),
        Err(error) => Problem::unavailable(&error.to_string()).into_response(),
    }
}

async fn metrics<S: AdminStore>(State(admin): State<Arc<Admin<S>>>) -> Response {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    (kind, admin.metrics.render()).into_response()
}

async fn openapi() -> Response {
    let kind = [(header::CONTENT_TYPE, "application/json")];
    (kind, include_str!("openapi.json")).into_response()
}

async fn index() -> &'static str {
    "hapax\n\n\
     GET  /api/v1/events                events, newest first\n\
     GET  /api/v1/events/{id}           one event, by Hapax's id or the sender's\n\
     POST /api/v1/events/{id}/replay    run its handlers again; also /approve, /reject, /discard\n\
     GET  /api/v1/jobs?status=dead      dead letters\n\
     POST /api/v1/jobs/replay           run dead letters again\n\
     GET  /api/v1/stats  /alerts        statistics, and what needs attention\n\
     GET  /api/v1/openapi.json          every route\n\
     GET  /metrics  /healthz  /readyz\n"
}
