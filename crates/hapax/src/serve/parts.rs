//! The parts of the server, connected with each other. Each exists once in a process, whatever its roles.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context as _;
use arc_swap::ArcSwap;
use hapax_core::presets::RetrySchedule;
use hapax_core::search::SearchFields;
use hapax_core::{SourceName, Timestamp};
use hapax_engine::{Ingress, Janitor, JobsFor, Now, Outbound, Proxy, Sender, Workers};
use uuid::Uuid;

use super::listeners::{Addresses, ListenerCertificates};
use super::{ServerStore, from_config};
use crate::admin::{Authorizer, Redactions};
use crate::alerts::{AlertMonitor, AlertRules, Inputs};
use crate::config::{Config, Role};
use crate::rejection_recorder::RejectionRecorder;
use crate::resealing::Resealer;
use crate::sending::{self, SharedSending};
use crate::tenant_sources::{TenantRules, TenantSources};
use crate::traffic_recorder::TrafficRecorder;

/// The parts that requests, tasks and reloads share.
pub(super) struct Parts<S> {
    pub(super) store: Arc<S>,
    pub(super) now: Now,
    /// Names this process, and only this one.
    pub(super) node: Uuid,
    pub(super) ingress: Arc<Ingress<S>>,
    pub(super) workers: Arc<Workers<S>>,
    /// In the order of the configuration.
    pub(super) proxies: Vec<Arc<Proxy<S>>>,
    pub(super) search_fields: Arc<ArcSwap<SearchFields>>,
    pub(super) retry_schedules: Arc<ArcSwap<HashMap<String, RetrySchedule>>>,
    pub(super) janitor: Arc<Janitor<S>>,
    pub(super) authorizer: Arc<Authorizer>,
    pub(super) sending: Arc<SharedSending>,
    pub(super) tenants: Arc<TenantSources<S>>,
    pub(super) sender: Arc<Sender<S>>,
    pub(super) resealer: Arc<Resealer<S>>,
    pub(super) traffic: Arc<TrafficRecorder>,
    pub(super) rejections: Arc<RejectionRecorder>,
    pub(super) watch: Arc<AlertMonitor>,
    pub(super) redactions: Arc<Redactions>,
    pub(super) certificates: ListenerCertificates,
    pub(super) public_address: SocketAddr,
    /// The beginning of the addresses that senders post to.
    pub(super) public_url: Arc<ArcSwap<String>>,
    /// The sources of the configuration.
    pub(super) known_sources: Arc<ArcSwap<HashSet<SourceName>>>,
}

impl<S: ServerStore> Parts<S> {
    /// Builds the parts. Reads endpoints and the secrets of tenants from the store.
    pub(super) async fn new(
        store: Arc<S>,
        config: &Config,
        at: &Addresses,
    ) -> anyhow::Result<Self> {
        let now: Now = Arc::new(Timestamp::now);
        let routes = from_config::routes(config, at.public)?;
        let ingress = Ingress::new(Arc::clone(&store), routes, Arc::clone(&now))
            .with_sync()
            .with_sender_keys(from_config::sender_keys(config)?);
        let ingress = Arc::new(ingress);
        let workers = Arc::new(Workers::new(
            Arc::clone(&store),
            Outbound::trusted()?,
            ingress.event_waiters(),
            Arc::clone(&now),
            from_config::lanes(config),
        ));
        let sending = sending::at_start(&*store, config).await.context("reading the endpoints")?;
        let sending = Arc::new(sending);
        if let Err(why) = sending.get() {
            tracing::warn!("endpoints cannot be used and nothing is delivered: {why}");
        }
        let tenants = Arc::new(tenants(&store, config, &sending, &ingress, &workers));
        // Tenants are read before the first request: an unknown tenant would get a 404.
        tenants.refresh().await.context("reading the secrets of tenants")?;
        // A restarted process is another node, because it counts from zero.
        let node = Uuid::now_v7();
        let traffic = Arc::new(traffic(node, &ingress, &workers, &now));
        let inputs = Inputs {
            node,
            node_name: node_name(at.public),
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
        };
        let rejections = RejectionRecorder::new({
            let ingress = Arc::clone(&ingress);
            Box::new(move || ingress.take_rejections())
        });
        let resealer = Resealer::new(
            Arc::clone(&store),
            Arc::clone(&sending),
            Arc::clone(&tenants),
            Arc::clone(&now),
        );
        let janitor =
            Janitor::new(Arc::clone(&store), Arc::clone(&now), from_config::retention(config));
        let without_token = from_config::without_token(config);
        let authorizer = Authorizer::new(at.admin.ip(), without_token, from_config::tokens(config));
        Ok(Self {
            proxies: proxies(&store, config, &now)?,
            search_fields: Arc::new(ArcSwap::from_pointee(from_config::search_fields(config))),
            retry_schedules: Arc::new(ArcSwap::from_pointee(from_config::retry_schedules(config))),
            janitor: Arc::new(janitor),
            authorizer: Arc::new(authorizer),
            sender: Arc::new(Sender::new(Arc::clone(&store), Arc::clone(&now), sending.setup())),
            resealer: Arc::new(resealer),
            rejections: Arc::new(rejections),
            watch: Arc::new(AlertMonitor::new(inputs, AlertRules::of(config))),
            redactions: Arc::new(Redactions::new(from_config::redacted(config))),
            certificates: ListenerCertificates::of(config),
            public_address: at.public,
            public_url: Arc::new(ArcSwap::from_pointee(from_config::public_url(config, at.public))),
            known_sources: Arc::new(ArcSwap::from_pointee(from_config::source_names(config))),
            store,
            now,
            node,
            ingress,
            workers,
            sending,
            tenants,
            traffic,
        })
    }

    /// Announces the handlers, because the store creates jobs for the handlers it knows. If this fails, the
    /// workers retry it.
    pub(super) async fn announce_handlers(&self) {
        if let Err(error) = self.store.announce(self.workers.handlers()).await {
            tracing::warn!(%error, "cannot register the handlers in the store yet: {error}");
        }
    }

    /// The jobs of an event by the current configuration.
    pub(super) fn jobs_for(&self) -> JobsFor {
        let (workers, known) = (Arc::clone(&self.workers), Arc::clone(&self.known_sources));
        Arc::new(move |source, _, event| {
            known.load().contains(source).then(|| workers.jobs_for(source, event))
        })
    }
}

/// The host and the port for senders, so that a restarted process has the same name. Nodes without the role that
/// listens there have the port in their configuration too.
fn node_name(address: SocketAddr) -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    format!("{host}:{}", address.port())
}

/// The tenants' sources, which change the routes and the workers.
fn tenants<S: ServerStore>(
    store: &Arc<S>,
    config: &Config,
    sending: &SharedSending,
    ingress: &Arc<Ingress<S>>,
    workers: &Arc<Workers<S>>,
) -> TenantSources<S> {
    let (ingress, workers) = (Arc::clone(ingress), Arc::clone(workers));
    TenantSources::new(
        Arc::clone(store),
        TenantRules::of(config, sending.vault()),
        Box::new(move |changes, verifiers| {
            ingress.change_routes(changes);
            workers.set_tenants(verifiers);
        }),
    )
}

/// The recorder of the figures that ingress and workers count.
fn traffic<S: ServerStore>(
    node: Uuid,
    ingress: &Arc<Ingress<S>>,
    workers: &Arc<Workers<S>>,
    now: &Now,
) -> TrafficRecorder {
    let sources = {
        let ingress = Arc::clone(ingress);
        move || ingress.sources().into_iter().collect()
    };
    let (ingress, workers) = (Arc::clone(ingress), Arc::clone(workers));
    let figures = move || {
        let mut figures = ingress.figures();
        for (source, worked) in workers.figures() {
            figures.entry(source).or_default().add(&worked);
        }
        figures
    };
    TrafficRecorder::new(node, Box::new(figures), Box::new(sources), Arc::clone(now))
}

/// The proxies of a process that accepts requests.
fn proxies<S: ServerStore>(
    store: &Arc<S>,
    config: &Config,
    now: &Now,
) -> anyhow::Result<Vec<Arc<Proxy<S>>>> {
    let outbound = Outbound::passing_on()?;
    let accepts = config.settings.roles.has(Role::Ingress);
    let build = |proxy: &crate::config::Proxy| {
        let (outbound, now) = (outbound.clone(), Arc::clone(now));
        let spec = from_config::proxy_spec(config, proxy);
        Arc::new(Proxy::new(&proxy.name, Arc::clone(store), outbound, now, spec))
    };
    Ok(config.proxies.iter().filter(|_| accepts).map(build).collect())
}
