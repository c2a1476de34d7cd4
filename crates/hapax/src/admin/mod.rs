//! The admin side: health, metrics, and the API that shows what arrived.
//!
//! It is closed from the start ([`auth`]): off loopback every route but health needs a token, on
//! loopback the Host header must name a loopback address, so that no web page can reach it by
//! rebinding a name.

mod auth;
mod events;
mod problem;

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hapax_core::store::{Inspect, Store};
use hapax_engine::Readiness;
use metrics_exporter_prometheus::PrometheusHandle;

pub(crate) use auth::Gate;
use problem::Problem;

/// What every route needs.
pub(crate) struct Admin<S> {
    /// The store that is looked at.
    pub(crate) store: Arc<S>,
    /// Who may look.
    pub(crate) gate: Gate,
    /// Turns when the process begins to stop.
    pub(crate) readiness: Arc<Readiness>,
    /// Where metrics are gathered.
    pub(crate) metrics: PrometheusHandle,
}

/// All routes of the admin side.
pub(crate) fn router<S: Store + Inspect>(admin: Admin<S>) -> Router {
    let admin = Arc::new(admin);
    let guarded = Router::new()
        .route("/", get(index))
        .route("/metrics", get(metrics::<S>))
        .route("/api/v1/events", get(events::list::<S>))
        .route("/api/v1/events/{id}", get(events::show::<S>))
        .layer(axum::middleware::from_fn_with_state(
            Arc::clone(&admin),
            auth::only_the_allowed::<S>,
        ));
    Router::new()
        .route("/healthz", get(async || StatusCode::OK))
        .route("/readyz", get(ready::<S>))
        .merge(guarded)
        .fallback(async || Problem::not_found("there is nothing here"))
        .method_not_allowed_fallback(async || Problem::method_not_allowed())
        .with_state(admin)
}

async fn ready<S: Store + Inspect>(State(admin): State<Arc<Admin<S>>>) -> Response {
    match admin.readiness.judge(&*admin.store) {
        Ok(()) => "ready\n".into_response(),
        Err(error) => Problem::unavailable(&error.to_string()).into_response(),
    }
}

async fn metrics<S: Store + Inspect>(State(admin): State<Arc<Admin<S>>>) -> Response {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    (kind, admin.metrics.render()).into_response()
}

async fn index() -> &'static str {
    "hapax\n\n\
     GET /api/v1/events          what arrived, newest first\n\
     GET /api/v1/events/{id}     one event, by our id or the sender's\n\
     GET /metrics  /healthz  /readyz\n"
}
