//! Opens connections to endpoints. The guard is here, below the pool and next to the socket. Every
//! address is checked against the rules, only a checked address is connected to, and the peer's address
//! is compared afterwards.
//!
//! A name is resolved once per connection. If any of its addresses is blocked, none is used.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, ready};

use http::Uri;
use http::uri::Scheme;
use hyper_util::client::legacy::connect::proxy::Tunnel;
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::ServerName;
use tower::{Service, ServiceExt};

use super::endpoint_url::{UrlHost, host_of, port_of};
use super::guard_rules::{Blocked, EgressProxy, GuardRules};
use super::resolver::{LookupError, Resolve};
use super::send_error::{SendError, Stage};
use crate::limits::{
    ENDPOINT_ADDRESSES_MAX, ENDPOINT_ANSWER_BYTES_MAX, ENDPOINT_CHECK_DEADLINE,
    ENDPOINT_CONNECT_DEADLINE, NEXT_ADDRESS_AFTER,
};

/// Opens connections that the rules accept.
#[derive(Clone)]
pub(super) struct GuardedConnector(Arc<ConnectorParts>);

struct ConnectorParts {
    rules: GuardRules,
    resolver: Arc<dyn Resolve>,
    tls: TlsConnector,
}

tokio::task_local! {
    /// The stage that the request of this task has reached. The connector is called inside the
    /// request's future.
    pub(super) static PROGRESS: Arc<RequestProgress>;
}

/// The stage that a request has reached. The stage only increases: a connection that is opened in
/// the background, while the request takes another one from the pool, must not make a request look
/// unsent.
#[derive(Debug, Default)]
pub(super) struct RequestProgress(AtomicU8);

impl RequestProgress {
    pub(super) fn reach(&self, stage: Stage) {
        self.0.fetch_max(stage as u8, Ordering::Relaxed);
    }

    pub(super) fn stage(&self) -> Stage {
        let reached = self.0.load(Ordering::Relaxed);
        let stages = [Stage::Body, Stage::Answer, Stage::Handshake, Stage::Connect];
        stages.into_iter().find(|stage| *stage as u8 <= reached).unwrap_or(Stage::Lookup)
    }
}

impl GuardedConnector {
    pub(super) fn new(rules: GuardRules, resolver: Arc<dyn Resolve>, tls: TlsConnector) -> Self {
        Self(Arc::new(ConnectorParts { rules, resolver, tls }))
    }

    /// The same resolver and roots under other rules.
    pub(super) fn under(&self, rules: GuardRules) -> Self {
        Self::new(rules, Arc::clone(&self.0.resolver), self.0.tls.clone())
    }

    pub(super) fn rules(&self) -> &GuardRules {
        &self.0.rules
    }

    /// Whether the addresses that a name has now are blocked on its port. A name without addresses is not
    /// blocked.
    pub(super) async fn blocked_now(&self, name: &str, port: u16) -> Result<(), Blocked> {
        let found = timeout(ENDPOINT_CHECK_DEADLINE, self.0.resolver.lookup(name)).await;
        let addresses = found.ok().and_then(Result::ok).unwrap_or_default();
        addresses.into_iter().try_for_each(|address| self.0.rules.judge(address, port).map(drop))
    }
}

impl Service<Uri> for GuardedConnector {
    type Response = TokioIo<EndpointStream>;
    type Error = SendError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, SendError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), SendError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, to: Uri) -> Self::Future {
        let guard = Arc::clone(&self.0);
        let progress = PROGRESS.try_with(Arc::clone).unwrap_or_default();
        Box::pin(async move {
            // The request has a deadline of its own. This deadline ends connections that the pool
            // keeps opening after their request took another one.
            let opening = guard.open(&to, &progress);
            match timeout(ENDPOINT_CONNECT_DEADLINE, opening).await {
                Ok(opened) => opened.map(TokioIo::new),
                Err(_) => Err(SendError::timeout(progress.stage(), ENDPOINT_CONNECT_DEADLINE)),
            }
        })
    }
}

impl ConnectorParts {
    async fn open(
        &self,
        to: &Uri,
        progress: &RequestProgress,
    ) -> Result<EndpointStream, SendError> {
        let (host, port) = (to.host().unwrap_or_default(), port_of(to));
        let judged = self.judged(to, host, port).await?;
        progress.reach(Stage::Connect);
        let tcp = match self.rules.proxy() {
            Some(proxy) => tunnelled(proxy, &judged).await?,
            None => connected(judged).await.map_err(|error| match error {
                NotConnected::Io(error) => SendError::connect(host, port, &error),
                NotConnected::OtherPeer => SendError::blocked(host, Blocked::Address),
            })?,
        };
        tcp.set_nodelay(true).map_err(|error| SendError::connect(host, port, &error))?;
        if to.scheme() != Some(&Scheme::HTTPS) {
            return Ok(EndpointStream::new(Transport::Plain(tcp)));
        }
        progress.reach(Stage::Handshake);
        let bare = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(bare)
            .map_err(|error| SendError::tls(host, &io::Error::other(error)))?;
        let tls = self.tls.connect(name, tcp).await;
        let tls = tls.map_err(|error| SendError::tls(host, &error))?;
        Ok(EndpointStream::new(Transport::Tls(Box::new(tls))))
    }

    /// The addresses of the host, all of them accepted by the rules. There is at least one.
    async fn judged(&self, to: &Uri, host: &str, port: u16) -> Result<Vec<SocketAddr>, SendError> {
        let blocked = |why| SendError::blocked(host, why);
        let addresses = match host_of(to).ok_or_else(|| blocked(Blocked::Address))? {
            UrlHost::Address(address) => vec![address],
            UrlHost::Loopback => self.rules.loopback(),
            UrlHost::Name(name) => self.found(name).await?,
        };
        let mut judged = Vec::new();
        for address in addresses {
            let address = self.rules.judge(address, port).map_err(blocked)?;
            if !self.rules.allows(address.ip()) && is_this_machine(address.ip()) {
                return Err(SendError::this_machine(host));
            }
            if !judged.contains(&address) && judged.len() < ENDPOINT_ADDRESSES_MAX {
                judged.push(address);
            }
        }
        // Only `localhost` can have no address here, if loopback is not allowed.
        if judged.is_empty() { Err(blocked(Blocked::Address)) } else { Ok(alternating(judged)) }
    }

    async fn found(&self, name: &str) -> Result<Vec<IpAddr>, SendError> {
        match self.resolver.lookup(name).await {
            Ok(addresses) if addresses.is_empty() => {
                Err(SendError::dns(name, &LookupError::NoAddress))
            }
            Ok(addresses) => Ok(addresses),
            Err(error) => Err(SendError::dns(name, &error)),
        }
    }
}

/// Whether this machine has the address: a socket can be bound to it. Binding sends nothing. A system that
/// lets sockets bind to foreign addresses (`ip_nonlocal_bind`) gives no answer to this question, so nothing
/// is blocked there.
fn is_this_machine(address: IpAddr) -> bool {
    let foreign: IpAddr = match address {
        IpAddr::V4(_) => Ipv4Addr::new(192, 0, 2, 1).into(),
        IpAddr::V6(_) => Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into(),
    };
    let binds = |address: IpAddr| UdpSocket::bind((address, 0)).is_ok();
    binds(address) && !binds(foreign)
}

/// Orders IPv4 and IPv6 in turn, beginning with the family of the first address: if one family does
/// not work here, the second attempt uses the other.
fn alternating(addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let first_is_v4 = addresses.first().is_some_and(SocketAddr::is_ipv4);
    let (first, second): (Vec<_>, Vec<_>) =
        addresses.into_iter().partition(|address| address.is_ipv4() == first_is_v4);
    let (mut first, mut second) = (first.into_iter(), second.into_iter());
    let pairs = std::iter::from_fn(|| match (first.next(), second.next()) {
        (None, None) => None,
        (one, other) => Some([one, other]),
    });
    pairs.flatten().flatten().collect()
}

enum NotConnected {
    Io(io::Error),
    /// The socket is connected to another address than the one that was judged.
    OtherPeer,
}

/// The first connection that opens. The next address is tried when an attempt has failed, or after
/// [`NEXT_ADDRESS_AFTER`].
async fn connected(addresses: Vec<SocketAddr>) -> Result<TcpStream, NotConnected> {
    let mut untried = addresses.into_iter();
    let mut attempts = JoinSet::new();
    let mut failed = io::Error::from(io::ErrorKind::AddrNotAvailable);
    loop {
        if let Some(address) = untried.next() {
            attempts.spawn(async move { (address, TcpStream::connect(address).await) });
        }
        tokio::select! {
            ended = attempts.join_next() => match ended {
                None => return Err(NotConnected::Io(failed)),
                Some(Ok((address, Ok(stream)))) => return same_peer(address, stream),
                Some(Ok((_, Err(error)))) => failed = error,
                Some(Err(error)) => failed = io::Error::other(error),
            },
            () = sleep(NEXT_ADDRESS_AFTER), if untried.len() > 0 => {}
        }
    }
}

fn same_peer(address: SocketAddr, stream: TcpStream) -> Result<TcpStream, NotConnected> {
    match stream.peer_addr() {
        Ok(peer) if peer.ip() == address.ip() && peer.port() == address.port() => Ok(stream),
        Ok(_) => Err(NotConnected::OtherPeer),
        Err(error) => Err(NotConnected::Io(error)),
    }
}

/// A connection through the proxy to the first of these addresses that the proxy reaches.
async fn tunnelled(proxy: &EgressProxy, addresses: &[SocketAddr]) -> Result<TcpStream, SendError> {
    let mut failed = None;
    for address in addresses {
        let to = Uri::builder().scheme("http").authority(address.to_string()).path_and_query("/");
        let to = to.build().map_err(|error| SendError::proxy(&error))?;
        let mut tcp = HttpConnector::new();
        tcp.set_nodelay(true);
        match Tunnel::new(proxy.uri().clone(), tcp).oneshot(to).await {
            Ok(stream) => return Ok(stream.into_inner()),
            Err(error) => failed = Some(SendError::proxy(&error)),
        }
    }
    let none = || SendError::proxy(&io::Error::from(io::ErrorKind::AddrNotAvailable));
    Err(failed.unwrap_or_else(none))
}

/// A connection to an endpoint. Reading fails once an answer has more bytes than any that is accepted,
/// informational answers included.
pub(super) struct EndpointStream {
    transport: Transport,
    /// Bytes that were read since the last byte was written.
    answered: usize,
}

enum Transport {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl EndpointStream {
    fn new(transport: Transport) -> Self {
        Self { transport, answered: 0 }
    }
}

impl Connection for EndpointStream {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl AsyncRead for EndpointStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(match &mut self.transport {
            Transport::Plain(stream) => Pin::new(stream).poll_read(cx, buffer),
            Transport::Tls(stream) => Pin::new(stream).poll_read(cx, buffer),
        })?;
        self.answered += buffer.filled().len() - before;
        if self.answered > ENDPOINT_ANSWER_BYTES_MAX {
            let text = format!("the answer has more than {ENDPOINT_ANSWER_BYTES_MAX} bytes");
            return Poll::Ready(Err(io::Error::other(text)));
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for EndpointStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.answered = 0;
        match &mut self.transport {
            Transport::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            Transport::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.answered = 0;
        match &mut self.transport {
            Transport::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, slices),
            Transport::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, slices),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match &self.transport {
            Transport::Plain(stream) => stream.is_write_vectored(),
            Transport::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.transport {
            Transport::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Transport::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.transport {
            Transport::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Transport::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A public address of this machine leads to our own listeners. Loopback stands for such an address
    /// here, because the test machine may have no other.
    #[test]
    fn an_address_of_this_machine_is_recognised_without_a_connection() {
        let address = |text: &str| text.parse().unwrap();
        assert!(is_this_machine(address("127.0.0.1")));
        assert!(is_this_machine(address("127.9.8.7")));
        assert!(!is_this_machine(address("198.51.100.1")));
        assert!(!is_this_machine(address("2001:db8::2")));
    }

    /// A connection that is opened in the background reports its stages late.
    #[test]
    fn progress_never_goes_back() {
        let progress = RequestProgress::default();
        assert_eq!(progress.stage(), Stage::Lookup);
        for (reached, expected) in [
            (Stage::Connect, Stage::Connect),
            (Stage::Answer, Stage::Answer),
            (Stage::Handshake, Stage::Answer),
            (Stage::Body, Stage::Body),
            (Stage::Lookup, Stage::Body),
        ] {
            progress.reach(reached);
            assert_eq!(progress.stage(), expected);
        }
    }

    /// If IPv4 or IPv6 does not work here, only one attempt may fail before the other family is
    /// tried.
    #[test]
    fn families_alternate() {
        let parsed = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
        let mixed: Vec<SocketAddr> = parsed(&["[::1]:1", "[::2]:1", "[::3]:1", "1.1.1.1:1"]);
        let expected: Vec<SocketAddr> = parsed(&["[::1]:1", "1.1.1.1:1", "[::2]:1", "[::3]:1"]);
        assert_eq!(alternating(mixed), expected);
    }
}
