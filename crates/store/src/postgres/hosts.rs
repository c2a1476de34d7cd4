//! Several servers behind one URL: connects to the first that answers and matches
//! `target_session_attrs`, each with its own timeout.
//!
//! A server whose machine has just died may accept the connection and never answer. The driver would wait for
//! this server until the whole connection timeout is over, and never reach the next one.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use deadpool_postgres::{ConfigConnectImpl, Connect};
use tokio::task::JoinHandle;
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};
use tokio_postgres::{Client, Config, Error, NoTls, Socket};
use tokio_postgres_rustls::MakeRustlsConnect;

/// The servers of one URL, in its order.
#[derive(Clone)]
pub(super) struct Hosts {
    tls: Option<MakeRustlsConnect>,
    /// The server that last worked, shared by all pools of a node: the next connection starts
    /// there.
    last_good: Arc<AtomicUsize>,
    /// How long one server may take.
    each: Duration,
}

impl Hosts {
    pub(super) fn new(tls: Option<MakeRustlsConnect>, each: Duration) -> Self {
        Self { tls, last_good: Arc::default(), each }
    }

    /// How long all servers together may take.
    pub(super) fn timeout(&self, config: &Config) -> Duration {
        self.each * u32::try_from(count(config)).unwrap_or(u32::MAX)
    }

    async fn first_that_answers(&self, config: &Config) -> Result<(Client, JoinHandle<()>), Error> {
        let hosts = count(config);
        let begin = self.last_good.load(Ordering::Relaxed);
        for turn in 1..hosts {
            let host = (begin + turn - 1) % hosts;
            // Errors of the other hosts are not reported: the last host's error is returned.
            if let Ok(Ok(connected)) =
                tokio::time::timeout(self.each, self.connect_to(config, host)).await
            {
                self.last_good.store(host, Ordering::Relaxed);
                return Ok(connected);
            }
        }
        // The last host has no timeout of its own, because the pool has one for the whole attempt.
        let host = (begin + hosts - 1) % hosts;
        let connected = self.connect_to(config, host).await?;
        self.last_good.store(host, Ordering::Relaxed);
        Ok(connected)
    }

    async fn connect_to(
        &self,
        config: &Config,
        host: usize,
    ) -> Result<(Client, JoinHandle<()>), Error> {
        let alone = alone(config, host);
        match &self.tls {
            None => connect(&alone, NoTls).await,
            Some(tls) => connect(&alone, tls.clone()).await,
        }
    }
}

impl Connect for Hosts {
    fn connect(
        &self,
        config: &Config,
    ) -> Pin<Box<dyn Future<Output = Result<(Client, JoinHandle<()>), Error>> + Send + '_>> {
        let config = config.clone();
        Box::pin(async move { self.first_that_answers(&config).await })
    }
}

async fn connect<T>(config: &Config, tls: T) -> Result<(Client, JoinHandle<()>), Error>
where
    T: MakeTlsConnect<Socket> + Clone + Sync + Send + 'static,
    T::Stream: Sync + Send,
    T::TlsConnect: Sync + Send,
    <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
{
    ConfigConnectImpl { tls }.connect(config).await
}

/// How many servers are named; at least one, so that connecting reports the error.
fn count(config: &Config) -> usize {
    config.get_hosts().len().max(config.get_hostaddrs().len()).max(1)
}

/// The configuration for one of the servers. The configuration is unchanged for a single server, and for a
/// URL whose lists do not match: the driver reports that error.
fn alone(config: &Config, host: usize) -> Config {
    let (hosts, addresses, ports) =
        (config.get_hosts(), config.get_hostaddrs(), config.get_ports());
    let fits = |length: usize| length <= 1 || length == count(config);
    if count(config) == 1 || !fits(hosts.len()) || !fits(addresses.len()) || !fits(ports.len()) {
        return config.clone();
    }
    let mut one = Config::new();
    match hosts.get(host) {
        Some(tokio_postgres::config::Host::Tcp(name)) => _ = one.host(name),
        Some(tokio_postgres::config::Host::Unix(path)) => _ = one.host_path(path),
        None => {}
    }
    if let Some(address) = addresses.get(host) {
        one.hostaddr(*address);
    }
    if let Some(port) = ports.get(host).or_else(|| ports.first()) {
        one.port(*port);
    }
    if let Some(user) = config.get_user() {
        one.user(user);
    }
    if let Some(password) = config.get_password() {
        one.password(password);
    }
    if let Some(name) = config.get_dbname() {
        one.dbname(name);
    }
    if let Some(options) = config.get_options() {
        one.options(options);
    }
    if let Some(name) = config.get_application_name() {
        one.application_name(name);
    }
    if let Some(span) = config.get_connect_timeout() {
        one.connect_timeout(*span);
    }
    if let Some(span) = config.get_tcp_user_timeout() {
        one.tcp_user_timeout(*span);
    }
    one.keepalives(config.get_keepalives());
    one.keepalives_idle(config.get_keepalives_idle());
    if let Some(span) = config.get_keepalives_interval() {
        one.keepalives_interval(span);
    }
    if let Some(retries) = config.get_keepalives_retries() {
        one.keepalives_retries(retries);
    }
    one.ssl_mode(config.get_ssl_mode());
    one.ssl_negotiation(config.get_ssl_negotiation());
    one.target_session_attrs(config.get_target_session_attrs());
    one.channel_binding(config.get_channel_binding());
    one.load_balance_hosts(config.get_load_balance_hosts());
    one
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_server_keeps_all_other_settings_of_the_url() {
        // A lost setting would be noticed only after a failover.
        let rest = "user=u password=p dbname=d options='-c x=1' application_name=a sslmode=require \
                    sslnegotiation=direct connect_timeout=7 tcp_user_timeout=8 keepalives=1 \
                    keepalives_idle=9 keepalives_interval=2 keepalives_retries=4 \
                    target_session_attrs=read-write channel_binding=require \
                    load_balance_hosts=random";
        let all: Config = format!("host=one,two port=1,2 {rest}").parse().expect("reads");
        for (n, (host, port)) in [("one", 1), ("two", 2)].into_iter().enumerate() {
            let wanted: Config = format!("host={host} port={port} {rest}").parse().expect("reads");
            assert_eq!(alone(&all, n), wanted);
        }
        let shared: Config = format!("host=one,two port=5 {rest}").parse().expect("reads");
        assert_eq!(alone(&shared, 1).get_ports(), [5]);
        let single: Config = format!("host=one port=1 {rest}").parse().expect("reads");
        assert_eq!(alone(&single, 0), single);
    }
}
