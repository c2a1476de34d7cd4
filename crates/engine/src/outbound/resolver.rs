//! Name lookups for endpoints: without search domains, and cancelled when their future is dropped.
//!
//! Nothing here judges an address: the connector judges every address that a lookup returns.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use hickory_resolver::config::{ConnectionConfig, NameServerConfig, ResolverConfig};
use hickory_resolver::net::NetError;
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::{Resolver, TokioResolver};

use crate::limits::{LOOKUP_CACHE_ENTRIES, LOOKUP_MISS_TTL_MAX, LOOKUP_TTL_MAX};

/// Looks up the addresses of names. Tests answer as an attacker's name server could.
pub trait Resolve: fmt::Debug + Send + Sync {
    /// Every address of `name`, which is fully qualified although it ends without a dot.
    fn lookup<'a>(&'a self, name: &'a str) -> LookupFuture<'a>;
}

/// A running lookup.
pub type LookupFuture<'a> =
    Pin<Box<dyn Future<Output = Result<Vec<IpAddr>, LookupError>> + Send + 'a>>;

/// Why a name has no addresses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LookupError {
    /// The name does not exist.
    #[error("the name does not exist")]
    NoSuchName,
    /// The name exists and has neither IPv4 nor IPv6 addresses.
    #[error("the name has no address")]
    NoAddress,
    /// No name server answered in time.
    #[error("no name server answered in time")]
    TimedOut,
    /// The lookup failed for another reason.
    #[error("the lookup failed: {0}")]
    Failed(String),
}

/// Asks the name servers of this machine by DNS, after its hosts file. Changes of the configuration are
/// noticed at the next lookup.
pub struct DnsResolver {
    servers: Servers,
    current: Mutex<Option<Loaded>>,
}

enum Servers {
    System,
    At(SocketAddr),
}

/// A resolver, and when the files that it was made from had changed.
struct Loaded {
    resolver: TokioResolver,
    changed: [Option<SystemTime>; 2],
}

/// The files that configure name lookups on Unix.
const FILES: [&str; 2] = ["/etc/resolv.conf", "/etc/hosts"];

impl DnsResolver {
    /// A resolver with the configuration of this machine. The configuration is read at the first lookup.
    pub fn system() -> Self {
        Self { servers: Servers::System, current: Mutex::new(None) }
    }

    /// A resolver that asks one name server and reads no hosts file.
    #[doc(hidden)]
    pub fn asking(server: SocketAddr) -> Self {
        Self { servers: Servers::At(server), current: Mutex::new(None) }
    }

    fn current(&self) -> Result<TokioResolver, NetError> {
        let changed = match self.servers {
            Servers::System => FILES.map(changed),
            Servers::At(_) => [None; 2],
        };
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(loaded) = current.as_ref().filter(|loaded| loaded.changed == changed) {
            return Ok(loaded.resolver.clone());
        }
        let resolver = self.servers.load()?;
        *current = Some(Loaded { resolver: resolver.clone(), changed });
        Ok(resolver)
    }
}

impl Resolve for DnsResolver {
    fn lookup<'a>(&'a self, name: &'a str) -> LookupFuture<'a> {
        Box::pin(async move {
            let resolver = self.current().map_err(failed)?;
            // With its dot the name is not tried below search domains.
            let found = resolver.lookup_ip(format!("{name}.")).await.map_err(failed)?;
            Ok(found.iter().collect())
        })
    }
}

impl fmt::Debug for DnsResolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DnsResolver")
    }
}

impl Servers {
    fn load(&self) -> Result<TokioResolver, NetError> {
        let mut builder = match self {
            Self::System => TokioResolver::builder_tokio()?,
            Self::At(server) => {
                let connections = [ConnectionConfig::udp(), ConnectionConfig::tcp()];
                let connections = connections.map(|mut connection| {
                    connection.port = server.port();
                    connection
                });
                let server = NameServerConfig::new(server.ip(), true, connections.to_vec());
                let config = ResolverConfig::from_parts(None, Vec::new(), vec![server]);
                Resolver::builder_with_config(config, TokioRuntimeProvider::default())
            }
        };
        let options = builder.options_mut();
        options.cache_size = LOOKUP_CACHE_ENTRIES;
        options.positive_max_ttl = Some(LOOKUP_TTL_MAX);
        options.negative_max_ttl = Some(LOOKUP_MISS_TTL_MAX);
        builder.build()
    }
}

fn changed(file: &str) -> Option<SystemTime> {
    Path::new(file).metadata().and_then(|metadata| metadata.modified()).ok()
}

fn failed(error: NetError) -> LookupError {
    match error {
        error if error.is_nx_domain() => LookupError::NoSuchName,
        error if error.is_no_records_found() => LookupError::NoAddress,
        NetError::Timeout => LookupError::TimedOut,
        error => LookupError::Failed(error.to_string()),
    }
}
