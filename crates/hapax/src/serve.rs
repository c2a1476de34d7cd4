//! Assembles the server and runs it: store, public side, proxies, workers, admin side, signals. Only this
//! module connects engine and store.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use arc_swap::ArcSwap;
use axum::body::Body;
use hapax::Database;
use hapax_core::handler::{Handler, HandlerKind};
use hapax_core::presets::{self, RetrySchedule};
use hapax_core::search::SearchFields;
use hapax_core::secret::Secret;
use hapax_core::store::SearchIndex;
use hapax_core::{SourceName, Timestamp};
use hapax_engine::limits::{BodyLimits, HttpLimits};
use hapax_engine::tls::Certificate;
use hapax_engine::{
    Drained, GuardRules, Ingress, Janitor, JobsFor, LaneSpec, Now, Outbound, Proxy, ProxySpec,
    Readiness, Retention, RouteSpec, Routes, RoutesSpec, SearchIndexer, Sender, SenderKeys,
    Workers, http, run_plans, serve_ingress, serve_proxy,
};
use hapax_layer::{IdempotencyRules, Principal};
use hapax_store::{PgOptions, PgStore, SqliteOptions, SqliteStore};
use tokio::net::{TcpListener, TcpSocket};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt as _;
use uuid::Uuid;

use crate::admin::{
    self, Admin, AdminStore, Authorizer, Redactions, SharedPages, Site, WithoutToken,
};
use crate::alerts::{self, AlertMonitor, Inputs};
use crate::config::{
    self, CallerIdentity, Config, InvalidSetting, Keep, Permission, Redaction, Role, ServiceUrl,
    SourceTemplate,
};
use crate::rejection_recorder::RejectionRecorder;
use crate::resealing::Resealer;
use crate::sending::{self, SharedSending};
use crate::telemetry;
use crate::tenant_sources::{TenantRules, TenantSources};
use crate::traffic_recorder::TrafficRecorder;
use crate::verifier_names;

/// How often files with secrets are checked for changes.
const FILES_CHECKED_EVERY: Duration = Duration::from_secs(1);

/// File descriptors that are not connections: the database, the log, the listeners.
const DESCRIPTORS_RESERVED: u64 = 64;

/// Runs the server until a signal stops it. Accepted requests are then committed and answered.
pub(crate) fn run(config: Config) -> anyhow::Result<()> {
    let metrics = telemetry::start()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_name("hapax")
        .build()
        .context("starting the runtime")?;
    runtime.block_on(serve(config, metrics))
}

async fn serve(
    config: Config,
    metrics: metrics_exporter_prometheus::PrometheusHandle,
) -> anyhow::Result<()> {
    // Signals are registered first: a signal during the start must not kill the process while the
    // store opens.
    let signals = Signals::new()?;
    match &config.settings.database_url {
        None => {
            let mut options = SqliteOptions::new(&config.settings.data_dir);
            options.max_body = config.settings.max_body_bytes;
            let open = move || SqliteStore::open(options);
            let store = tokio::task::spawn_blocking(open).await.context("opening the store")??;
            serve_on(Arc::new(store), config, metrics, signals).await
        }
        Some(url) => {
            let opening = PgStore::open(postgres_options(&config, url));
            let store = opening.await.with_context(|| format!("opening {url}"))?;
            serve_on(Arc::new(store), config, metrics, signals).await
        }
    }
}

/// The options of the shared database.
fn postgres_options(config: &Config, url: &ServiceUrl) -> PgOptions {
    let mut options = PgOptions::new(url.expose());
    let handlers = config.settings.handlers_database_url.as_ref();
    options.handlers_url = handlers.map(|url| url.expose().to_owned());
    options.redis_url = config.settings.redis_url.as_ref().map(|url| url.expose().to_owned());
    options.keys_kept = retention(config).keys.into_iter().map(|(_, kept)| kept).min();
    options
}

/// The stores that a server runs on.
trait ServerStore: Database + AdminStore + SearchIndex {}

impl<S: Database + AdminStore + SearchIndex> ServerStore for S {}

/// Runs the server on its store, from the first listener to the last commit. Parts for other roles are built
/// but not started: the admin side of one node answers for handlers that another node runs.
async fn serve_on<S: ServerStore>(
    store: Arc<S>,
    mut config: Config,
    metrics: metrics_exporter_prometheus::PrometheusHandle,
    mut signals: Signals,
) -> anyhow::Result<()> {
    config.take_own_token().map_err(|InvalidSetting { problem, hint }| {
        anyhow::anyhow!("{problem}; {hint}, or add [tokens.ops] to the config")
    })?;
    let has_role = |role| config.settings.roles.has(role);
    let public_listener =
        has_role(Role::Ingress).then(|| bind(config.settings.listen, "listen")).transpose()?;
    let admin_listener = has_role(Role::Admin)
        .then(|| bind(config.settings.admin_listen, "admin_listen"))
        .transpose()?;
    let at = |listener: &Option<TcpListener>, otherwise| match listener {
        Some(listener) => listener.local_addr(),
        None => Ok(otherwise),
    };
    let portal_listener = match &config.portal {
        Some(portal) if has_role(Role::Admin) => Some(bind(portal.listen, "portal.listen")?),
        Some(_) | None => None,
    };
    let proxy_listeners = match has_role(Role::Ingress) {
        true => config.proxies.iter().map(bind_proxy).collect::<Result<Vec<_>, _>>()?,
        false => Vec::new(),
    };
    let public_address = at(&public_listener, config.settings.listen)?;
    let admin_address = at(&admin_listener, config.settings.admin_listen)?;
    let runs_workers = has_role(Role::Worker);

    let routes = routes(&config, public_address)?;
    let now: Now = Arc::new(Timestamp::now);
    let ingress = Ingress::new(Arc::clone(&store), routes, Arc::clone(&now))
        .with_sync()
        .with_sender_keys(sender_keys(&config)?);
    let ingress = Arc::new(ingress);
    let workers = Arc::new(Workers::new(
        Arc::clone(&store),
        Outbound::trusted()?,
        ingress.event_waiters(),
        Arc::clone(&now),
        lanes(&config),
    ));
    let outbound = Outbound::passing_on()?;
    let bound_proxies: Vec<BoundProxy<S>> = config
        .proxies
        .iter()
        .zip(proxy_listeners)
        .map(|(proxy, (listener, at))| {
            let (outbound, now) = (outbound.clone(), Arc::clone(&now));
            let spec = proxy_spec(&config, proxy);
            let proxy = Proxy::new(&proxy.name, Arc::clone(&store), outbound, now, spec);
            BoundProxy { proxy: Arc::new(proxy), listener, at }
        })
        .collect();
    let search_fields = Arc::new(ArcSwap::from_pointee(search_fields(&config)));
    let retry_schedules = Arc::new(ArcSwap::from_pointee(retry_schedules(&config)));
    let indexer = SearchIndexer::new(Arc::clone(&store), Arc::clone(&search_fields));
    let janitor = Arc::new(Janitor::new(Arc::clone(&store), Arc::clone(&now), retention(&config)));
    let stop = CancellationToken::new();
    let stop_background = CancellationToken::new();
    let readiness = Arc::new(Readiness::new(stop.clone()));
    let authorizer =
        Arc::new(Authorizer::new(admin_address.ip(), without_token(&config), tokens(&config)));
    let unfinished = TaskTracker::new();
    let sending = sending::at_start(&*store, &config).await.context("reading the endpoints")?;
    let sending = Arc::new(sending);
    if let Err(why) = sending.get() {
        tracing::warn!("endpoints cannot be used and nothing is delivered: {why}");
    }
    let tenants = Arc::new(TenantSources::new(
        Arc::clone(&store),
        TenantRules::of(&config, sending.vault()),
        {
            let (ingress, workers) = (Arc::clone(&ingress), Arc::clone(&workers));
            Box::new(move |changes, verifiers| {
                ingress.change_routes(changes);
                workers.set_tenants(verifiers);
            })
        },
    ));
    // Tenants are read before the first request: an unknown tenant would get a 404.
    tenants.refresh().await.context("reading the secrets of tenants")?;
    let sender = Arc::new(Sender::new(Arc::clone(&store), Arc::clone(&now), sending.setup()));
    let resealer = Arc::new(Resealer::new(
        Arc::clone(&store),
        Arc::clone(&sending),
        Arc::clone(&tenants),
        Arc::clone(&now),
    ));
    // A process that starts again is another node: it counts from zero.
    let node = Uuid::now_v7();
    let traffic = Arc::new(TrafficRecorder::new(
        node,
        {
            let (ingress, workers) = (Arc::clone(&ingress), Arc::clone(&workers));
            Box::new(move || {
                let mut figures = ingress.figures();
                for (source, worked) in workers.figures() {
                    if let Some(figures) = figures.get_mut(&source) {
                        figures.add(&worked);
                    }
                }
                figures
            })
        },
        Arc::clone(&now),
    ));
    let rejections = Arc::new(RejectionRecorder::new({
        let ingress = Arc::clone(&ingress);
        Box::new(move || ingress.take_rejections())
    }));
    let watch = Arc::new(AlertMonitor::new(
        Inputs {
            node,
            traffic: Arc::clone(&traffic),
            clock_offset_seconds: {
                let ingress = Arc::clone(&ingress);
                Box::new(move || ingress.clock_offset_seconds())
            },
            known: {
                let workers = Arc::clone(&workers);
                Box::new(move || workers.handlers().into_iter().map(|spec| spec.handler).collect())
            },
            tenant_secrets: {
                let tenants = Arc::clone(&tenants);
                Box::new(move || tenants.secret_ends())
            },
            sending: Arc::clone(&sending),
            log: Some(config.settings.data_dir.join("hapax.db-wal")),
            now: Arc::clone(&now),
        },
        alerts::AlertRules::of(&config),
    ));
    let known_sources = Arc::new(ArcSwap::from_pointee(source_names(&config)));
    let jobs_for: JobsFor = {
        let (workers, known) = (Arc::clone(&workers), Arc::clone(&known_sources));
        Arc::new(move |source, _, event| {
            known.load().contains(source).then(|| workers.jobs_for(source, event))
        })
    };
    let admin_certificate = config.admin_tls.clone();
    let admin_tls = admin_certificate.as_ref().map(Certificate::server_config).transpose()?;
    let admin_scheme = if admin_tls.is_some() { "https" } else { "http" };
    let site = Arc::new(Site::new(config.settings.admin_url.as_deref(), admin_tls.is_some()));
    let redactions = Arc::new(Redactions::new(redacted(&config)));
    let portal_certificate = config.portal.as_ref().and_then(|portal| portal.tls.clone());
    let portal_tls = portal_certificate.as_ref().map(Certificate::server_config).transpose()?;
    let portal_address = match (&portal_listener, &config.portal) {
        (Some(listener), _) => Some(listener.local_addr()?),
        (None, Some(portal)) => Some(portal.listen),
        (None, None) => None,
    };
    let portal_scheme = if portal_tls.is_some() { "https" } else { "http" };
    let portal_at = portal_address.map(|at| format!("{portal_scheme}://{at}"));
    let portal_url = config.portal.as_ref().and_then(|portal| portal.public_url.clone());
    let portal_site = Arc::new(Site::new(portal_url.as_deref(), portal_tls.is_some()));
    let admin_side = Arc::new(Admin {
        store: Arc::clone(&store),
        authorizer: Arc::clone(&authorizer),
        site: Arc::clone(&site),
        redactions: Arc::clone(&redactions),
        public_url: public_url(&config, public_address),
        search_fields: Arc::clone(&search_fields),
        retry_schedules: Arc::clone(&retry_schedules),
        portal_url: portal_url.or_else(|| portal_at.clone()),
        portal_counts: Arc::new(Semaphore::new(1)),
        shared_pages: Arc::new(SharedPages::new(Arc::clone(&now))),
        rejections: Arc::clone(&rejections),
        readiness: Arc::clone(&readiness),
        metrics: metrics.clone(),
        handlers: Arc::clone(&jobs_for),
        configured: {
            let workers = Arc::clone(&workers);
            Arc::new(move || workers.handlers())
        },
        watch: Arc::clone(&watch),
        refetch: {
            let workers = Arc::clone(&workers);
            Arc::new(move |of, claims| {
                let workers = Arc::clone(&workers);
                Box::pin(async move { workers.with_current(&of, claims).await })
            })
        },
        tried: {
            let workers = Arc::clone(&workers);
            Arc::new(move |source, job, began, ended| {
                workers.count_tried(source, job, began, ended);
            })
        },
        sending: Arc::clone(&sending),
        tenants: Arc::clone(&tenants),
        now: Arc::clone(&now),
        unfinished: unfinished.clone(),
        first_command: first_command(&config, public_address),
    });
    let portal_router = admin::portal_router(Arc::clone(&admin_side), Arc::clone(&portal_site));
    let router = admin::router(admin_side);
    let certificate = config.tls.clone();
    let tls = certificate.as_ref().map(Certificate::server_config).transpose()?;
    let scheme = if tls.is_some() { "https" } else { "http" };
    let limits = limits(&config);
    let drain = config.settings.drain;
    // Handlers are announced before the first event, because the store creates jobs for the
    // handlers it knows. If this fails, the workers retry it.
    if let Err(error) = store.announce(workers.handlers()).await {
        tracing::warn!(%error, "cannot register the handlers in the store yet: {error}");
    }
    let workers_task = runs_workers
        .then(|| tokio::spawn(Arc::clone(&workers).run(drain, stop_background.clone())));
    let janitor_task = runs_workers.then(|| {
        let (janitor, stop) = (Arc::clone(&janitor), stop_background.clone());
        tokio::spawn(async move { janitor.run(stop).await })
    });
    let indexer_task = runs_workers.then(|| {
        let stop = stop_background.clone();
        tokio::spawn(async move { indexer.run(stop).await })
    });
    let sender_task = has_role(Role::Sender)
        .then(|| tokio::spawn(Arc::clone(&sender).run(drain, stop_background.clone())));
    let resealer_task = {
        let (resealer, stop) = (Arc::clone(&resealer), stop_background.clone());
        tokio::spawn(async move { resealer.run(stop).await })
    };
    let plans_task = (runs_workers || has_role(Role::Sender)).then(|| {
        let (store, now) = (Arc::clone(&store), Arc::clone(&now));
        // Only workers have the handlers that events need.
        let jobs_for = runs_workers.then_some(jobs_for);
        tokio::spawn(run_plans(store, jobs_for, now, stop_background.clone()))
    });
    let ready = ReadyLine {
        ingress: public_listener.is_some().then_some((scheme, public_address)),
        admin: admin_listener.is_some().then_some((admin_scheme, admin_address)),
        background: [Role::Worker, Role::Sender]
            .into_iter()
            .filter(|role| has_role(*role))
            .collect(),
    };
    let portal_line =
        portal_listener.as_ref().and(portal_at).map(|at| format!("hapax portal {at}"));
    let further_lines: Vec<String> =
        config.proxies.iter().zip(&bound_proxies).map(proxy_line).chain(portal_line).collect();
    let alerts_task = {
        let (watch, store, stop) =
            (Arc::clone(&watch), Arc::clone(&store), stop_background.clone());
        tokio::spawn(async move { watch.run(store, stop).await })
    };
    let verifiers_task = {
        let (store, stop) = (Arc::clone(&store), stop_background.clone());
        let ingress = Arc::clone(&ingress);
        tokio::spawn(verifier_names::run(store, move || ingress.verifiers(), stop))
    };
    let rejections_task = {
        let (store, stop) = (Arc::clone(&store), stop_background.clone());
        let rejections = Arc::clone(&rejections);
        tokio::spawn(async move { rejections.run(store, stop).await })
    };
    let traffic_task = {
        let (store, stop) = (Arc::clone(&store), stop_background.clone());
        tokio::spawn(async move { traffic.run(store, stop).await })
    };
    let tenants_task = {
        let (tenants, stop) = (Arc::clone(&tenants), stop_background.clone());
        tokio::spawn(async move { tenants.run(stop).await })
    };
    let ingress_task = public_listener.map(|listener| {
        let ingress = Arc::clone(&ingress);
        tokio::spawn(serve_ingress(listener, tls, ingress, limits.clone(), stop.clone()))
    });
    let proxies: Vec<_> = bound_proxies.iter().map(|bound| Arc::clone(&bound.proxy)).collect();
    let proxy_tasks: Vec<_> = bound_proxies
        .into_iter()
        .map(|BoundProxy { proxy, listener, .. }| {
            tokio::spawn(serve_proxy(listener, proxy, limits.clone(), stop.clone()))
        })
        .collect();
    let admin_task = admin_listener.map(|listener| {
        let limits = HttpLimits { connections_max: ADMIN_CONNECTIONS_MAX, ..limits.clone() };
        let (answer, stop) = (answering(router, site), stop_background.clone());
        tokio::spawn(http::serve(listener, admin_tls, answer, limits, stop))
    });
    let portal_task = portal_listener.map(|listener| {
        let limits = HttpLimits { connections_max: PORTAL_CONNECTIONS_MAX, ..limits };
        let (answer, stop) = (answering(portal_router, portal_site), stop_background.clone());
        tokio::spawn(http::serve(listener, portal_tls, answer, limits, stop))
    });
    readiness.opened();
    print_ready(&config, &further_lines, &ready);

    let mut reloadable = Reloadable {
        config,
        ingress,
        proxies,
        workers,
        store: Arc::clone(&store),
        tenants,
        sending,
        sender,
        resealer,
        janitor,
        watch,
        authorizer,
        redactions,
        search_fields,
        retry_schedules,
        certificates: [certificate, admin_certificate, portal_certificate]
            .into_iter()
            .flatten()
            .collect(),
        public_address,
        known_sources,
    };
    reloadable.watch(&mut signals, &metrics).await;

    tracing::info!("shutting down: accepted requests are committed and answered first");
    stop.cancel();
    if let Some(task) = ingress_task
        && let Drained::Cut { connections } = task.await.context("the public side panicked")?
    {
        tracing::warn!(
            connections,
            "closed {connections} connections that were still busy at the end of `drain`"
        );
    }
    for task in proxy_tasks {
        if let Drained::Cut { connections } = task.await.context("a proxy panicked")? {
            tracing::warn!(
                connections,
                "closed {connections} connections to a proxy that were still busy at the end of `drain`"
            );
        }
    }
    // Workers and admin side stop last: sync senders wait for workers, and pull workers complete their jobs
    // through the admin side.
    stop_background.cancel();
    join_task(workers_task).await.context("the workers panicked")?;
    join_task(sender_task).await.context("the sender panicked")?;
    join_task(plans_task).await.context("the runner of plans panicked")?;
    join_task(janitor_task).await.context("the janitor panicked")?;
    join_task(indexer_task).await.context("the search indexer panicked")?;
    alerts_task.await.context("the alert monitor panicked")?;
    traffic_task.await.context("the recorder of traffic panicked")?;
    rejections_task.await.context("the recorder of rejections panicked")?;
    verifiers_task.await.context("the recorder of secrets' names panicked")?;
    tenants_task.await.context("reading the secrets of tenants panicked")?;
    resealer_task.await.context("sealing stored values again panicked")?;
    join_task(admin_task).await.context("the admin side panicked")?;
    join_task(portal_task).await.context("the portal panicked")?;
    unfinished.close();
    unfinished.wait().await;
    store.close().await;
    tracing::info!("stopped");
    Ok(())
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

/// An answer that is on its way.
type Answering = Pin<Box<dyn Future<Output = ::http::Response<Body>> + Send>>;

/// Waits for a task, if there is one.
async fn join_task<T>(task: Option<JoinHandle<T>>) -> Result<(), tokio::task::JoinError> {
    match task {
        Some(task) => task.await.map(drop),
        None => Ok(()),
    }
}

/// The most connections to the admin side: operators and scrapers.
const ADMIN_CONNECTIONS_MAX: usize = 256;

/// The most connections to the portal: people at receiving parties.
const PORTAL_CONNECTIONS_MAX: usize = 512;

/// The listen backlog; the system may allow less. When it is full the kernel drops connections, and a
/// sender retries only after a second or more. The backlog is therefore as large as `max_connections`, and
/// not the usual 128.
const WAITING_CONNECTIONS_MAX: u32 = 4096;

fn bind(address: SocketAddr, key: &str) -> anyhow::Result<TcpListener> {
    let listen = || {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        // A restart must not wait for old connections to time out.
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        socket.listen(WAITING_CONNECTIONS_MAX)
    };
    listen().with_context(|| format!("listening on {address} ({key})"))
}

/// A proxy with its listener.
struct BoundProxy<S> {
    proxy: Arc<Proxy<S>>,
    listener: TcpListener,
    at: SocketAddr,
}

fn bind_proxy(proxy: &config::Proxy) -> anyhow::Result<(TcpListener, SocketAddr)> {
    let listener = bind(proxy.listen, &format!("proxies.{}.listen", proxy.name))?;
    let at = listener.local_addr()?;
    Ok((listener, at))
}

/// The start-up line of a proxy.
fn proxy_line<S>((configured, bound): (&config::Proxy, &BoundProxy<S>)) -> String {
    format!("hapax proxy {} http://{} -> {}", configured.name, bound.at, configured.upstream)
}

fn proxy_spec(config: &Config, proxy: &config::Proxy) -> ProxySpec {
    let rules = IdempotencyRules::default()
        .required(proxy.require_key.iter().cloned())
        .ttl(proxy.ttl)
        .wait(proxy.wait)
        .mismatch_status(proxy.mismatch_status)
        .quota(Some(proxy.quota))
        .fingerprint_ignore(proxy.fingerprint_ignore.clone())
        .body_max(config.settings.max_body_bytes);
    let rules = match &proxy.scope {
        CallerIdentity::Default => rules,
        CallerIdentity::Header(name) => rules.principal(Principal::Header(name.clone())),
        CallerIdentity::Jwt(claim, keys) => rules.principal(Principal::Jwt {
            claim: claim.clone(),
            keys: Arc::clone(keys),
            now: Arc::new(Timestamp::now),
        }),
        CallerIdentity::UnverifiedJwt(claim) => {
            rules.principal(Principal::UnverifiedJwt(claim.clone()))
        }
        CallerIdentity::Shared => rules.principal(Principal::Shared),
    };
    ProxySpec {
        upstream: proxy.upstream.clone(),
        rules,
        lease: proxy.lease,
        body_timeout: config.settings.body_timeout,
        trusted_proxies: config.settings.trusted_proxies.clone(),
    }
}

fn limits(config: &Config) -> HttpLimits {
    // Each connection uses a file descriptor: raise the limit, and accept no more connections than it
    // allows.
    let outbound = lanes(config).into_iter().map(|lane| {
        let calls = matches!(lane.handler.kind, HandlerKind::Http(_));
        let refetches = lane.handler.refetch.is_some();
        (u64::from(calls) + u64::from(refetches)) * lane.handler.concurrency as u64
    });
    let deliveries = config.settings.outbound.max_in_flight as u64;
    let outbound = outbound.sum::<u64>() + deliveries;
    let portal = if config.portal.is_some() { PORTAL_CONNECTIONS_MAX as u64 } else { 0 };
    let apart = DESCRIPTORS_RESERVED * 2 + ADMIN_CONNECTIONS_MAX as u64 + portal + outbound;
    // A connection to a proxy needs another one to its upstream.
    let per_connection = 1 + 2 * config.proxies.len() as u64;
    let wanted = config.settings.max_connections as u64 * per_connection + apart;
    let granted = rlimit::increase_nofile_limit(wanted.max(4096)).unwrap_or(1024);
    let affordable = (granted.saturating_sub(apart) / per_connection).max(16) as usize;
    if affordable < config.settings.max_connections {
        tracing::warn!(
            "the limit of {granted} file descriptors allows {affordable} connections to each listener, not \
             {}: raise it with `ulimit -n`",
            config.settings.max_connections
        );
    }
    HttpLimits {
        connections_max: config.settings.max_connections.min(affordable),
        header_deadline: config.settings.header_timeout,
        drain: config.settings.drain,
        ..HttpLimits::default()
    }
}

/// Fetches keys of senders at public addresses, through the proxy of deliveries if there is one. No other
/// permission for endpoints applies to these fetches.
fn sender_keys(config: &Config) -> anyhow::Result<SenderKeys> {
    let rules = GuardRules::new(Vec::new(), vec![443], config.settings.outbound.proxy.clone());
    Ok(SenderKeys::new(Outbound::guarded(rules)?))
}

fn routes(config: &Config, public_address: SocketAddr) -> anyhow::Result<Routes> {
    Ok(Routes::build(RoutesSpec {
        public_url: public_url(config, public_address),
        trusted_proxies: config.settings.trusted_proxies.clone(),
        body: BodyLimits {
            bytes_max: config.settings.max_body_bytes,
            deadline: config.settings.body_timeout,
            ..BodyLimits::default()
        },
        sources: route_specs(config),
    })?)
}

/// The beginning of the addresses that senders post to. With port 0 only the listener knows the
/// port.
fn public_url(config: &Config, public_address: SocketAddr) -> String {
    match (&config.dev, &config.settings.public_url) {
        (None, Some(url)) => url.clone(),
        (Some(_), _) | (None, None) => format!("http://{public_address}"),
    }
}

fn route_specs(config: &Config) -> Vec<RouteSpec> {
    config
        .sources
        .iter()
        .map(|configured| RouteSpec {
            source: Arc::clone(&configured.source),
            rate_limit: configured.rate_limit,
            unverified_limit: configured.unverified_limit,
            handlers: configured.handlers.clone(),
            mode: configured.mode,
        })
        .collect()
}

/// Every handler once. A source may have no tenant in the config.
fn lanes(config: &Config) -> Vec<LaneSpec> {
    let lane = |template: &SourceTemplate, handler: &Arc<Handler>| {
        let sources = config.sources.iter().map(|configured| &configured.source);
        LaneSpec {
            handler: Arc::clone(handler),
            source: template.spec.name.clone(),
            verifiers: sources.filter(|it| *it.name() == template.spec.name).cloned().collect(),
        }
    };
    let mut lanes = Vec::new();
    for template in &config.templates {
        lanes.extend(template.handlers.iter().map(|handler| lane(template, handler)));
    }
    lanes
}

/// The sources of the configuration, those without a tenant or handler included.
fn source_names(config: &Config) -> HashSet<SourceName> {
    config.templates.iter().map(|template| template.spec.name.clone()).collect()
}

fn tokens(config: &Config) -> impl Iterator<Item = (&str, &Secret, &[Permission])> {
    config.tokens.iter().map(|token| (&*token.name, &token.value, &*token.allow))
}

fn without_token(config: &Config) -> WithoutToken {
    match config.settings.admin_open || config.dev.is_some() {
        true => WithoutToken::FromLoopback,
        false => WithoutToken::Refused,
    }
}

/// The values that each source masks.
/// The retry schedules that the senders of the sources document.
fn retry_schedules(config: &Config) -> HashMap<String, RetrySchedule> {
    let schedule = |one: &SourceTemplate| {
        let schedule = presets::find(&one.spec.provider)?.schedule?;
        Some((one.spec.name.to_string(), schedule))
    };
    config.templates.iter().filter_map(schedule).collect()
}

fn search_fields(config: &Config) -> SearchFields {
    SearchFields::new(
        config.templates.iter().map(|one| (one.spec.name.clone(), one.search.clone())),
    )
}

fn redacted(config: &Config) -> impl Iterator<Item = (String, Redaction)> {
    config.templates.iter().map(|one| (one.spec.name.to_string(), one.redact.clone()))
}

fn retention(config: &Config) -> Retention {
    let span = |keep| match keep {
        Keep::Forever => None,
        Keep::For(span) => Some(span),
    };
    let retention = &config.settings.retention;
    let sources = config.templates.iter();
    let keys = sources.map(|one| (one.spec.name.clone(), span(one.keep_keys)));
    let message_ids = retention.keys.map_or(Some(hapax::limits::KEEP_DEFAULT), span);
    let deliveries = span(retention.deliveries);
    Retention { message_ids, deliveries, ..Retention::new(span(retention.events), keys) }
}

/// The line that announces that the process is ready, with its addresses.
struct ReadyLine {
    ingress: Option<(&'static str, SocketAddr)>,
    admin: Option<(&'static str, SocketAddr)>,
    /// Roles without a listener, printed if the process has no other role.
    background: Vec<Role>,
}

impl fmt::Display for ReadyLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("hapax ready:")?;
        if let Some((scheme, at)) = self.ingress {
            write!(f, " ingress {scheme}://{at}")?;
        }
        if let Some((scheme, at)) = self.admin {
            write!(f, " admin {scheme}://{at}")?;
        }
        if self.ingress.is_none() && self.admin.is_none() {
            for role in &self.background {
                write!(f, " {}", role.as_str())?;
            }
        }
        Ok(())
    }
}

/// The command that sends a first event, in dev mode.
fn first_command(config: &Config, public_address: SocketAddr) -> Option<String> {
    let secret_file = config.dev.as_ref()?.secret_file.display();
    Some(format!(
        "{} send stripe payout.paid --id evt_1 --to http://{public_address}/webhooks/stripe --secret-file \
         {secret_file}",
        program()
    ))
}

/// The name under which the process was started.
fn program() -> String {
    std::env::args().next().unwrap_or_else(|| "hapax".into())
}

/// Prints the addresses on stdout, and in dev mode a command to try. A closed stdout is ignored.
fn print_ready(config: &Config, further_lines: &[String], ready: &ReadyLine) {
    let mut out = std::io::stdout().lock();
    for line in further_lines {
        let _ = writeln!(out, "{line}");
    }
    let _ = writeln!(out, "{ready}");
    if let (Some(dev), Some((_, public_address)), Some((_, admin_address))) =
        (&config.dev, ready.ingress, ready.admin)
    {
        let program = program();
        let secret_file = dev.secret_file.display();
        let command = first_command(config, public_address).unwrap_or_default();
        let _ = writeln!(
            out,
            "\nNo config file, so this is dev mode: {} senders on loopback, each with a secret derived from \
             {secret_file}.\nSend an event, then send it again:\n\n  {command}\n\n\
             Then open http://{admin_address}/ in a browser, or list the events:\n\n  \
             curl http://{admin_address}/api/v1/events\n\n\
             `{program} init` writes a config file to start from; `{program} providers` lists the senders.",
            config.sources.len(),
        );
    }
    let _ = out.flush();
}

struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    hangup: tokio::signal::unix::Signal,
}

impl Signals {
    fn new() -> anyhow::Result<Self> {
        let listen = |kind| signal(kind).context("listening for signals");
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hangup: listen(SignalKind::hangup())?,
        })
    }
}

/// The parts that a reload changes.
struct Reloadable<S> {
    config: Config,
    ingress: Arc<Ingress<S>>,
    proxies: Vec<Arc<Proxy<S>>>,
    workers: Arc<Workers<S>>,
    store: Arc<S>,
    tenants: Arc<TenantSources<S>>,
    sending: Arc<SharedSending>,
    sender: Arc<Sender<S>>,
    resealer: Arc<Resealer<S>>,
    janitor: Arc<Janitor<S>>,
    watch: Arc<AlertMonitor>,
    authorizer: Arc<Authorizer>,
    redactions: Arc<Redactions>,
    search_fields: Arc<ArcSwap<SearchFields>>,
    retry_schedules: Arc<ArcSwap<HashMap<String, RetrySchedule>>>,
    /// The certificates of the public side, of the admin side and of the portal.
    certificates: Vec<Arc<Certificate>>,
    public_address: SocketAddr,
    known_sources: Arc<ArcSwap<HashSet<SourceName>>>,
}

impl<S: ServerStore> Reloadable<S> {
    /// Reloads on SIGHUP and when a secret's file changes; returns on SIGTERM or SIGINT.
    async fn watch(
        &mut self,
        signals: &mut Signals,
        metrics: &metrics_exporter_prometheus::PrometheusHandle,
    ) {
        let mut seen = self.files();
        let mut watch = tokio::time::interval(FILES_CHECKED_EVERY);
        let mut upkeep = tokio::time::interval(telemetry::UPKEEP);
        loop {
            tokio::select! {
                _ = signals.terminate.recv() => return,
                _ = signals.interrupt.recv() => return,
                _ = signals.hangup.recv() => {
                    self.reload("SIGHUP").await;
                    seen = self.files();
                }
                _ = watch.tick() => {
                    let now = self.files();
                    if now != seen {
                        self.reload("a file changed").await;
                        seen = self.files();
                    }
                }
                _ = upkeep.tick() => metrics.run_upkeep(),
            }
        }
    }

    /// The modification time and size of each file with a secret or certificate. The config file is reloaded
    /// on SIGHUP only, because it may be half edited.
    fn files(&self) -> HashMap<PathBuf, Option<(SystemTime, u64)>> {
        let look = |path: &PathBuf| {
            let found = std::fs::metadata(path).ok();
            found.and_then(|file| Some((file.modified().ok()?, file.len())))
        };
        let own = self.config.file.as_ref();
        let watched = self.config.watched_files().iter().filter(|path| Some(*path) != own);
        watched.map(|path| (path.clone(), look(path))).collect()
    }

    /// Applies a new configuration as a whole, or keeps the old one and logs the errors.
    async fn reload(&mut self, why: &str) {
        let not_taken = |wrong: &str| {
            let wrong = wrong.replace("\n  hint:", "; hint:");
            tracing::error!(
                "{why}: the new configuration is invalid, the server keeps the old one: {wrong}"
            );
        };
        let mut newer = match self.config.reload() {
            Ok(newer) => newer,
            Err(errors) => {
                // One log line per error: a log line contains no line break.
                errors.lines().iter().for_each(|error| not_taken(error));
                return;
            }
        };
        if let Err(InvalidSetting { problem, hint }) = newer.take_own_token() {
            not_taken(&format!("{problem}; hint: {hint}"));
            return;
        }
        let mut routes = match routes(&newer, self.public_address) {
            Ok(routes) => routes,
            Err(error) => {
                not_taken(&error.to_string());
                return;
            }
        };
        let sending = match sending::at_reload(&*self.store, &newer, &self.sending).await {
            Ok(sending) => sending,
            Err(error) => {
                not_taken(&error);
                return;
            }
        };
        if let Err(no_vault) = &sending {
            tracing::warn!("{why}: endpoints cannot be used and nothing is delivered: {no_vault}");
        }
        let keys_before = self.sending.vault_keys();
        self.sending.replace(sending);
        self.sender.reload(self.sending.setup());
        if newer.settings.outbound.max_in_flight > self.config.settings.outbound.max_in_flight {
            // More file descriptors, as far as the system allows.
            limits(&newer);
        }
        let ingress = &self.ingress;
        let swap = |changes| {
            routes.change(changes);
            ingress.reload(routes);
        };
        self.tenants.reload(TenantRules::of(&newer, self.sending.vault()), swap).await;
        if self.sending.vault_keys() != keys_before {
            self.resealer.reload();
        }
        for proxy in &self.proxies {
            if let Some(found) = newer.proxies.iter().find(|it| it.name == proxy.name()) {
                proxy.reload(proxy_spec(&newer, found));
            }
        }
        self.workers.reload(lanes(&newer));
        self.known_sources.store(Arc::new(source_names(&newer)));
        self.janitor.reload(retention(&newer));
        self.watch.reload(alerts::AlertRules::of(&newer));
        self.authorizer.reload(without_token(&newer), tokens(&newer));
        self.redactions.reload(redacted(&newer));
        self.search_fields.store(Arc::new(search_fields(&newer)));
        self.retry_schedules.store(Arc::new(retry_schedules(&newer)));
        for error in self.certificates.iter().filter_map(|it| it.reload().err()) {
            tracing::error!(
                "{why}: cannot reload the certificate, the server keeps the old one: {error}"
            );
        }
        for key in self.config.needs_restart(&newer) {
            tracing::warn!("{why}: {key} changed; restart the server to apply it");
        }
        self.config = newer;
        tracing::info!("{why}: reloaded configuration and secrets");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ready_line_names_the_roles_of_this_process() {
        let at = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let check =
            |ingress: Option<u16>, admin: Option<u16>, background: &[Role], expected: &str| {
                let ingress = ingress.map(|port| ("http", at(port)));
                let admin = admin.map(|port| ("http", at(port)));
                let ready = ReadyLine { ingress, admin, background: background.to_vec() };
                assert_eq!(ready.to_string(), expected);
            };
        let all = [Role::Worker, Role::Sender];
        let both = "hapax ready: ingress http://127.0.0.1:80 admin http://127.0.0.1:81";
        check(Some(80), Some(81), &all, both);
        check(Some(80), None, &[], "hapax ready: ingress http://127.0.0.1:80");
        check(None, None, &[Role::Worker], "hapax ready: worker");
        // A script that waits for a worker must not take this for one.
        check(None, None, &[Role::Sender], "hapax ready: sender");
    }
}
