//! A running Hapax inside an app: its router, its workers, its shutdown. The app owns the HTTP server and the
//! runtime.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{ConnectInfo, OriginalUri, Request};
use axum::response::Response;
use axum::routing::any;
use hapax_core::{SourceName, Timestamp};
use hapax_engine::{
    BodyLimits, ENDPOINT_PORTS, GuardRules, Ingress, Janitor, LaneSpec, Now, Outbound, Retention,
    RouteSpec, Routes, RoutesSpec, SenderKeys, Workers,
};
use hapax_store::SqliteStore;
use ipnet::IpNet;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::build::{BuildError, Builder};
use super::database::Database;
use super::sending::{ActiveSending, Sending};

/// Hapax inside an app. Clones share everything.
#[derive(Debug)]
pub struct Hapax<S: Database = SqliteStore> {
    store: Arc<S>,
    /// Whether this instance opened the store, and therefore closes it.
    owns_store: bool,
    ingress: Arc<Ingress<S>>,
    workers: Arc<Workers<S>>,
    janitor: Arc<Janitor<S>>,
    pub(super) sending: Option<Arc<ActiveSending<S>>>,
    drain: Duration,
}

// Not derived: a derived impl would require `S: Clone`.
impl<S: Database> Clone for Hapax<S> {
    fn clone(&self) -> Self {
        Self {
            store: Arc::clone(&self.store),
            owns_store: self.owns_store,
            ingress: Arc::clone(&self.ingress),
            workers: Arc::clone(&self.workers),
            janitor: Arc::clone(&self.janitor),
            sending: self.sending.clone(),
            drain: self.drain,
        }
    }
}

/// The checked settings of a builder.
pub(super) struct CheckedSetup {
    pub(super) public_url: String,
    pub(super) trusted_proxies: Vec<IpNet>,
    pub(super) body: BodyLimits,
    pub(super) drain: Duration,
    pub(super) keep_events: Option<Duration>,
    pub(super) keep_keys: Vec<(SourceName, Option<Duration>)>,
    pub(super) routes: Vec<RouteSpec>,
    pub(super) sending: Option<Sending>,
}

impl<S: Database> Hapax<S> {
    /// Starts a builder; [`Builder::open`] finishes it.
    pub fn builder() -> Builder<S> {
        Builder::default()
    }

    pub(super) async fn assemble(
        store: Arc<S>,
        owns_store: bool,
        setup: CheckedSetup,
    ) -> Result<Self, BuildError> {
        let now: Now = Arc::new(Timestamp::now);
        let lanes = LaneSpec::of(&setup.routes);
        let routes = Routes::build(RoutesSpec {
            public_url: setup.public_url,
            trusted_proxies: setup.trusted_proxies,
            body: setup.body,
            sources: setup.routes,
        })?;
        let proxy = setup.sending.as_ref().and_then(Sending::proxy_of_all);
        let rules = GuardRules::new(Vec::new(), ENDPOINT_PORTS.to_vec(), proxy);
        let ingress = Ingress::new(Arc::clone(&store), routes, Arc::clone(&now))
            .with_sync()
            .with_sender_keys(SenderKeys::new(Outbound::guarded(rules)?));
        let workers = Workers::new(
            Arc::clone(&store),
            Outbound::trusted()?,
            ingress.event_waiters(),
            Arc::clone(&now),
            lanes,
        );
        let retention = Retention {
            message_ids: Some(crate::limits::KEEP_DEFAULT),
            ..Retention::new(setup.keep_events, setup.keep_keys)
        };
        // Before the first event, because the store creates jobs for the handlers it knows.
        store.announce(workers.handlers()).await?;
        let sending = setup.sending.map(|sending| sending.open(&store, &now)).transpose()?;
        Ok(Self {
            sending: sending.map(Arc::new),
            ingress: Arc::new(ingress),
            workers: Arc::new(workers),
            janitor: Arc::new(Janitor::new(Arc::clone(&store), now, retention)),
            store,
            owns_store,
            drain: setup.drain,
        })
    }

    /// The public side, to merge into the app's router or nest at any path: `/webhooks/{source}` and
    /// `/webhooks/{tenant}/{source}`. The router reads the raw body within its own limits, and answers once
    /// the event is durable.
    ///
    /// Serve the app with `into_make_service_with_connect_info::<SocketAddr>()`, so that failed verifications
    /// are limited per client; otherwise all clients count as one. The app's server is responsible for header
    /// timeouts and connection limits.
    pub fn router<T: Clone + Send + Sync + 'static>(&self) -> Router<T> {
        let ingress = Arc::clone(&self.ingress);
        let answer = any(move |OriginalUri(whole): OriginalUri, mut request: Request| {
            let ingress = Arc::clone(&ingress);
            async move {
                // Inside a nested router the path lacks its prefix, but senders sign the whole path.
                let nested = request.uri().path();
                let prefix = whole.path().strip_suffix(nested).unwrap_or_default().to_owned();
                let peer = request.extensions().get::<ConnectInfo<SocketAddr>>();
                let peer = peer.map_or(UNKNOWN_PEER, |ConnectInfo(peer)| *peer);
                *request.uri_mut() = whole;
                let answer = ingress.answer_below(&prefix, request, peer).await;
                Response::map(answer, Body::new)
            }
        });
        Router::new()
            .route("/webhooks/{source}", answer.clone())
            .route("/webhooks/{tenant}/{source}", answer)
    }

    /// Runs the handlers until `stop` is ready, then shuts down. During the shutdown no further job is
    /// claimed, and running work may take as long as [`Builder::drain`]. Then the database is closed if the
    /// builder opened it. Stop the app's server first: an event that arrives afterwards is answered 503.
    pub async fn run(&self, stop: impl Future<Output = ()>) {
        let stopping = CancellationToken::new();
        let stopped = async {
            stop.await;
            stopping.cancel();
        };
        tokio::join!(
            stopped,
            Arc::clone(&self.workers).run(self.drain, stopping.clone()),
            self.janitor.run(stopping.clone()),
            self.ingress.maintain(stopping.clone()),
            async {
                if let Some(sending) = &self.sending {
                    Arc::clone(&sending.sender).run(self.drain, stopping.clone()).await;
                }
            },
        );
        if timeout(self.drain, self.ingress.finish()).await.is_err() {
            tracing::warn!("commits for disconnected clients took longer than {:?}", self.drain);
        }
        if self.owns_store {
            self.store.close().await;
        }
    }

    /// Spawns [`Hapax::run`]. The task stops at [`Running::stop`], or when the handle is dropped.
    pub fn spawn(&self) -> Running {
        let stop = CancellationToken::new();
        let (hapax, stopping) = (self.clone(), stop.clone());
        let task = tokio::spawn(async move { hapax.run(stopping.cancelled()).await });
        Running { stop: stop.drop_guard(), task }
    }

    /// The database: to read events ([`hapax_core::store::Inspect`]), or to replay and review them
    /// ([`hapax_core::store::Work`]).
    pub fn store(&self) -> &Arc<S> {
        &self.store
    }
}

/// The peer of a request if the app's server does not supply it.
const UNKNOWN_PEER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

/// A handle to spawned work.
#[derive(Debug)]
#[must_use = "the work stops when this is dropped"]
pub struct Running {
    stop: DropGuard,
    task: JoinHandle<()>,
}

impl Running {
    /// Stops the work and waits until it has ended.
    ///
    /// # Panics
    /// If the work itself panicked.
    pub async fn stop(self) {
        drop(self.stop);
        if let Err(error) = self.task.await
            && let Ok(panic) = error.try_into_panic()
        {
            std::panic::resume_unwind(panic);
        }
    }
}
