//! The side for operators and receiving parties: admin API, dashboard and portal.

use std::pin::Pin;
use std::sync::Arc;

use axum::body::Body;
use hapax_engine::limits::HttpLimits;
use hapax_engine::tls::ServerConfig;
use hapax_engine::{Readiness, http};
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt as _;

use super::ServerStore;
use super::background::Background;
use super::listeners::{
    ADMIN_CONNECTIONS_MAX, Addresses, ListenerTls, PORTAL_CONNECTIONS_MAX, scheme,
};
use super::parts::Parts;
use super::ready::first_command;
use crate::admin::{self, Admin, SharedPages, Site};
use crate::config::Config;

/// The routes of the admin side and of the portal, and how browsers reach each.
pub(super) struct OperatorSide {
    admin: (axum::Router, Arc<Site>),
    portal: (axum::Router, Arc<Site>),
}

/// A listener, if this process has it, and its TLS settings.
type Bound = (Option<TcpListener>, Option<Arc<ServerConfig>>);

impl OperatorSide {
    pub(super) fn new<S: ServerStore>(
        parts: &Parts<S>,
        config: &Config,
        at: &Addresses,
        tls: &ListenerTls,
        metrics: PrometheusHandle,
        readiness: Arc<Readiness>,
        unfinished: TaskTracker,
    ) -> Self {
        let site = Arc::new(Site::new(config.settings.admin_url.as_deref(), tls.admin.is_some()));
        let portal_url = config.portal.as_ref().and_then(|portal| portal.public_url.clone());
        let portal_site = Arc::new(Site::new(portal_url.as_deref(), tls.portal.is_some()));
        let portal_at = || at.portal.map(|at| format!("{}://{at}", scheme(&tls.portal)));
        let Parts { store, now, workers, .. } = parts;
        let admin = Arc::new(Admin {
            store: Arc::clone(store),
            authorizer: Arc::clone(&parts.authorizer),
            site: Arc::clone(&site),
            redactions: Arc::clone(&parts.redactions),
            public_url: Arc::clone(&parts.public_url),
            search_fields: Arc::clone(&parts.search_fields),
            retry_schedules: Arc::clone(&parts.retry_schedules),
            portal_url: portal_url.or_else(portal_at),
            portal_counts: Arc::new(Semaphore::new(1)),
            shared_pages: Arc::new(SharedPages::new(Arc::clone(now))),
            rejections: Arc::clone(&parts.rejections),
            readiness,
            metrics,
            handlers: parts.jobs_for(),
            configured: {
                let workers = Arc::clone(workers);
                Arc::new(move || workers.handlers())
            },
            watch: Arc::clone(&parts.watch),
            refetch: {
                let workers = Arc::clone(workers);
                Arc::new(move |of, claims| {
                    let workers = Arc::clone(&workers);
                    Box::pin(async move { workers.with_current(&of, claims).await })
                })
            },
            tried: {
                let workers = Arc::clone(workers);
                Arc::new(move |source, job, began, ended| {
                    workers.count_tried(source, job, began, ended);
                })
            },
            sending: Arc::clone(&parts.sending),
            tenants: Arc::clone(&parts.tenants),
            now: Arc::clone(now),
            unfinished,
            first_command: first_command(config, at.public),
        });
        let portal = admin::portal_router(Arc::clone(&admin), Arc::clone(&portal_site));
        Self { admin: (admin::router(admin), site), portal: (portal, portal_site) }
    }

    /// Answers requests until `stop`, as tasks in the background.
    pub(super) fn start(
        self,
        admin: Bound,
        portal: Bound,
        limits: &HttpLimits,
        stop: &CancellationToken,
        background: &mut Background,
    ) {
        let mut serve = |bound, (router, site), connections_max, if_it_panics| {
            if let (Some(listener), tls) = bound {
                let limits = HttpLimits { connections_max, ..limits.clone() };
                let answer = answering(router, site);
                let serving = http::serve(listener, tls, answer, limits, stop.clone());
                background.add(if_it_panics, serving);
            }
        };
        serve(admin, self.admin, ADMIN_CONNECTIONS_MAX, "the admin side panicked");
        serve(portal, self.portal, PORTAL_CONNECTIONS_MAX, "the portal panicked");
    }
}

/// Answers the requests to the admin side or to the portal.
fn answering(
    router: axum::Router,
    site: Arc<Site>,
) -> impl Fn(::http::Request<http::Received>, http::Peer) -> Answering + Clone + Send + Sync + 'static
{
    move |mut request, peer| {
        let router = router.clone();
        if let Some(uri) = site.without_base(request.uri()) {
            *request.uri_mut() = uri;
        }
        Box::pin(async move {
            let answered = router.oneshot(request.map(Body::new)).await;
            let answered = answered.unwrap_or_else(|never| match never {});
            if answered.extensions().get::<admin::Authenticated>().is_some() {
                peer.has_verified();
            }
            answered
        })
    }
}

/// The future of an answer.
type Answering = Pin<Box<dyn Future<Output = ::http::Response<Body>> + Send>>;
