//! A Hapax at work inside an app: its router, its workers, its end. The app owns the server in
//! front and the runtime around it.

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
    BodyLimits, Ingress, Janitor, LaneSpec, Now, Outbound, Retention, RouteSpec, Routes,
    RoutesSpec, Workers,
};
use hapax_store::SqliteStore;
use ipnet::IpNet;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::build::{BuildError, Builder};
use super::database::Database;

/// Hapax inside an app. Clones share everything.
#[derive(Debug)]
pub struct Hapax<S: Database = SqliteStore> {
    store: Arc<S>,
    /// Whether we opened the store, and so close it.
    owns_store: bool,
    ingress: Arc<Ingress<S>>,
    workers: Arc<Workers<S>>,
    janitor: Arc<Janitor<S>>,
    drain: Duration,
}

// By hand: a derived one would ask it of the store.
impl<S: Database> Clone for Hapax<S> {
    fn clone(&self) -> Self {
        Self {
            store: Arc::clone(&self.store),
            owns_store: self.owns_store,
            ingress: Arc::clone(&self.ingress),
            workers: Arc::clone(&self.workers),
            janitor: Arc::clone(&self.janitor),
            drain: self.drain,
        }
    }
}

/// What was built, checked.
pub(super) struct CheckedSetup {
    pub(super) public_url: String,
    pub(super) trusted_proxies: Vec<IpNet>,
    pub(super) body: BodyLimits,
    pub(super) drain: Duration,
    pub(super) keep_events: Option<Duration>,
    pub(super) keep_keys: Vec<(SourceName, Option<Duration>)>,
    pub(super) routes: Vec<RouteSpec>,
}

impl<S: Database> Hapax<S> {
    /// Begins with a database and sources, ends with [`Builder::open`].
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
        let ingress = Ingress::new(Arc::clone(&store), routes, Arc::clone(&now)).with_sync();
        let workers = Workers::new(
            Arc::clone(&store),
            Outbound::new()?,
            ingress.event_waiters(),
            Arc::clone(&now),
            lanes,
        );
        let retention = Retention::new(setup.keep_events, setup.keep_keys);
        // Before the first event: its jobs follow the schedule of handlers that the store knows.
        store.announce(workers.handlers()).await?;
        Ok(Self {
            ingress: Arc::new(ingress),
            workers: Arc::new(workers),
            janitor: Arc::new(Janitor::new(Arc::clone(&store), now, retention)),
            store,
            owns_store,
            drain: setup.drain,
        })
    }

    /// The public side, to merge into an app's router or nest at any path of it:
    /// `/webhooks/{source}` and `/webhooks/{tenant}/{source}`. It reads the raw body itself, within
    /// its own limits, and answers once an event is durable.
    ///
    /// Serve the app with `into_make_service_with_connect_info::<SocketAddr>()`, so that failed
    /// verifications are limited for each client; otherwise all clients count as one. Deadlines for
    /// request heads and limits on connections are the app's server's.
    pub fn router<T: Clone + Send + Sync + 'static>(&self) -> Router<T> {
        let ingress = Arc::clone(&self.ingress);
        let answer = any(move |OriginalUri(whole): OriginalUri, mut request: Request| {
            let ingress = Arc::clone(&ingress);
            async move {
                // Inside a nest the path begins where we do. Senders that sign it know the whole.
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

    /// Works on what was accepted until `stop` is ready, then ends cleanly: nothing more is claimed,
    /// what runs has the time of [`Builder::drain`], and the database is closed if we opened it.
    /// Stop the app's server first: an event that arrives afterwards is answered 503.
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
            self.ingress.tend(stopping.clone()),
        );
        if timeout(self.drain, self.ingress.finish()).await.is_err() {
            tracing::warn!("commits of clients that are gone took longer than {:?}", self.drain);
        }
        if self.owns_store {
            self.store.close().await;
        }
    }

    /// [`Hapax::run`] on a task of its own. It stops when told to, or when the handle is dropped.
    pub fn spawn(&self) -> Running {
        let stop = CancellationToken::new();
        let (hapax, stopping) = (self.clone(), stop.clone());
        let task = tokio::spawn(async move { hapax.run(stopping.cancelled()).await });
        Running { stop: stop.drop_guard(), task }
    }

    /// The database: to look at events ([`hapax_core::store::Inspect`]), or to replay and review
    /// them ([`hapax_core::store::Work`]).
    pub fn store(&self) -> &Arc<S> {
        &self.store
    }
}

/// Where a request came from when the app's server does not tell.
const UNKNOWN_PEER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

/// Work that goes on beside the app.
#[derive(Debug)]
#[must_use = "the work stops when this is dropped"]
pub struct Running {
    stop: DropGuard,
    task: JoinHandle<()>,
}

impl Running {
    /// Stops it, and waits until everything has ended.
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
