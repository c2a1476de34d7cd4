//! The listeners of this process: their addresses, certificates and limits.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context as _;
use hapax_core::handler::HandlerKind;
use hapax_engine::limits::HttpLimits;
use hapax_engine::tls::{Certificate, ServerConfig};
use tokio::net::{TcpListener, TcpSocket};

use super::from_config;
use crate::config::{self, Config, Role};

/// File descriptors that are not connections: the database, the log, the listeners.
const DESCRIPTORS_RESERVED: u64 = 64;

/// The most connections to the admin side: operators and scrapers.
pub(super) const ADMIN_CONNECTIONS_MAX: usize = 256;

/// The most connections to the portal: people at receiving parties.
pub(super) const PORTAL_CONNECTIONS_MAX: usize = 512;

/// The listen backlog; the system may allow less. When it is full the kernel drops connections, and a
/// sender retries only after a second or more. The backlog is therefore as large as the default of
/// `max_connections`, and not the usual 128.
const WAITING_CONNECTIONS_MAX: u32 = 4096;

/// The sockets of this process; none for a role that it does not have.
pub(super) struct Listeners {
    pub(super) public: Option<TcpListener>,
    pub(super) admin: Option<TcpListener>,
    pub(super) portal: Option<TcpListener>,
    /// In the order of the configuration.
    pub(super) proxies: Vec<TcpListener>,
    pub(super) at: Addresses,
}

/// The addresses of the listeners. If this process lacks the role, the address is the configured one.
pub(super) struct Addresses {
    pub(super) public: SocketAddr,
    pub(super) admin: SocketAddr,
    pub(super) portal: Option<SocketAddr>,
    pub(super) proxies: Vec<SocketAddr>,
}

/// The TLS settings of the listeners that have a certificate.
pub(super) struct ListenerTls {
    pub(super) public: Option<Arc<ServerConfig>>,
    pub(super) admin: Option<Arc<ServerConfig>>,
    pub(super) portal: Option<Arc<ServerConfig>>,
}

impl Listeners {
    pub(super) fn bind(config: &Config) -> anyhow::Result<Self> {
        let settings = &config.settings;
        let bind_for =
            |role, address, key| settings.roles.has(role).then(|| bind(address, key)).transpose();
        let public = bind_for(Role::Ingress, settings.listen, "listen")?;
        let admin = bind_for(Role::Admin, settings.admin_listen, "admin_listen")?;
        let portal_listen = config.portal.as_ref().map(|portal| portal.listen);
        let portal = match portal_listen {
            Some(address) => bind_for(Role::Admin, address, "portal.listen")?,
            None => None,
        };
        let proxies = match settings.roles.has(Role::Ingress) {
            true => config.proxies.iter().map(bind_proxy).collect::<Result<Vec<_>, _>>()?,
            false => Vec::new(),
        };
        let at = |listener: &Option<TcpListener>, otherwise| match listener {
            Some(listener) => listener.local_addr(),
            None => Ok(otherwise),
        };
        let at = Addresses {
            public: at(&public, settings.listen)?,
            admin: at(&admin, settings.admin_listen)?,
            portal: portal_listen.map(|address| at(&portal, address)).transpose()?,
            proxies: proxies.iter().map(TcpListener::local_addr).collect::<Result<_, _>>()?,
        };
        Ok(Self { public, admin, portal, proxies, at })
    }
}

impl ListenerTls {
    pub(super) fn new(config: &Config) -> anyhow::Result<Self> {
        let tls = |certificate: Option<&Arc<Certificate>>| {
            certificate.map(Certificate::server_config).transpose()
        };
        Ok(Self {
            public: tls(config.tls.as_ref())?,
            admin: tls(config.admin_tls.as_ref())?,
            portal: tls(config.portal.as_ref().and_then(|portal| portal.tls.as_ref()))?,
        })
    }
}

/// The scheme of a listener's URL.
pub(super) fn scheme(tls: &Option<Arc<ServerConfig>>) -> &'static str {
    if tls.is_some() { "https" } else { "http" }
}

/// The certificates of the listeners that had one at the start.
pub(super) struct ListenerCertificates([Option<Arc<Certificate>>; 3]);

impl ListenerCertificates {
    /// The certificates of the public side, of the admin side and of the portal.
    pub(super) fn of(config: &Config) -> Self {
        let portal = config.portal.as_ref().and_then(|portal| portal.tls.clone());
        Self([config.tls.clone(), config.admin_tls.clone(), portal])
    }

    /// Takes over the certificates that `newer` has read, from whatever files. A listener whose TLS was added or
    /// removed stays as it is.
    pub(super) fn reload(&self, newer: &Config) {
        for (current, newer) in self.0.iter().zip(Self::of(newer).0) {
            if let (Some(current), Some(newer)) = (current, newer) {
                current.replace_with(&newer);
            }
        }
    }
}

/// The limits of the public listeners. Raises the limit of file descriptors, as far as the system allows.
pub(super) fn http_limits(config: &Config) -> HttpLimits {
    // Each connection uses a file descriptor: raise the limit, and accept no more connections than it
    // allows.
    let outbound = from_config::lanes(config).into_iter().map(|lane| {
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

fn bind_proxy(proxy: &config::Proxy) -> anyhow::Result<TcpListener> {
    bind(proxy.listen, &format!("proxies.{}.listen", proxy.name))
}
