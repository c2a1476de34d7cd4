//! The HTTP loop: accepts, limits, serves and drains connections. Hapax has its own loop, because
//! `axum::serve` gives heads no deadline and does not limit connections. The loop knows nothing about
//! webhooks: it serves the admin API too.

pub(crate) mod body;
pub(crate) mod body_memory;
pub(crate) mod client_address;
mod connections;
mod http2_frames;
mod smuggling_guard;
mod socket;
pub mod tls;

use std::convert::Infallible;
use std::error::Error;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, Version, header};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::server::conn::{http1, http2};
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep, timeout, timeout_at};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, error, warn};

use crate::http::connections::Connections;
use crate::http::socket::{
    ConnectionActivity, DrainingSocket, FirstBytes, InFlight, Protocol, Reading, WatchedStream,
};
use crate::limits::{HttpLimits, SURVEY_AGAIN};

/// The result of a shutdown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drained {
    /// Every received request was answered.
    Clean,
    /// Some connections were still busy when the drain time was over, and were cut.
    Cut {
        /// Their number.
        connections: usize,
    },
}

/// The peer of a connection.
#[derive(Debug, Clone)]
pub struct Peer {
    address: SocketAddr,
    /// The state of the connection, if it is served by [`serve`].
    activity: Option<Arc<ConnectionActivity>>,
}

impl Peer {
    /// The address of the peer's socket.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Records that a request on this connection was verified. When slots are short, such
    /// connections are closed last.
    pub fn has_verified(&self) {
        if let Some(activity) = &self.activity {
            activity.has_verified();
        }
    }

    /// Records the client that a trusted proxy named for this request. When slots are short,
    /// connections are counted by client.
    pub fn is_for(&self, client: IpAddr) {
        if let Some(activity) = &self.activity {
            activity.is_for(client);
        }
    }
}

/// The peer of a connection that another loop serves.
impl From<SocketAddr> for Peer {
    fn from(address: SocketAddr) -> Self {
        Self { address, activity: None }
    }
}

/// The body of a request as it arrives. While it is unfinished, its connection may be closed for
/// another.
#[derive(Debug)]
pub struct Received {
    body: Incoming,
    reading: Option<Reading>,
}

impl Received {
    fn new(body: Incoming, activity: &Arc<ConnectionActivity>) -> Self {
        let reading = (!body.is_end_stream()).then(|| activity.reads());
        Self { body, reading }
    }
}

impl Body for Received {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        let has_ended = match &polled {
            Poll::Pending => false,
            Poll::Ready(Some(Ok(_))) => self.body.is_end_stream(),
            Poll::Ready(Some(Err(_)) | None) => true,
        };
        if has_ended {
            self.reading = None;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Serves `listener` until `stop` is cancelled, then lets requests in flight finish, for at most
/// `limits.drain`. When this returns, the listener is closed and none of its tasks is left.
///
/// Every request is passed to `answer` with the peer of its connection. The answer's future is
/// dropped when the peer hangs up: work that must not be cut short has to move to a task itself.
///
/// When all slots are in use, slow or idle connections are closed for new ones. Connections with a
/// verified request ([`Peer::has_verified`]) are closed last, and a connection that runs a complete
/// request is never closed.
pub async fn serve<A, F, B>(
    listener: TcpListener,
    tls: Option<Arc<ServerConfig>>,
    answer: A,
    limits: HttpLimits,
    stop: CancellationToken,
) -> Drained
where
    A: Fn(Request<Received>, Peer) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response<B>> + Send + 'static,
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    let connections_max = limits.connections_max;
    let slots = Arc::new(Semaphore::new(connections_max));
    let drain = limits.drain;
    let streams = Streams { tasks: TaskTracker::new(), cut: CancellationToken::new() };
    let server = Arc::new(Server {
        answer,
        tls: tls.map(TlsAcceptor::from),
        limits,
        stop: stop.clone(),
        streams: streams.clone(),
    });
    let mut tasks = JoinSet::new();
    let mut connections = Connections::new(connections_max);
    let mut complaints = AcceptComplaints::default();
    loop {
        while let Some(ended) = tasks.try_join_next() {
            report(ended);
        }
        let next = async {
            let (stream, peer) = accept(&listener, &mut connections, &mut complaints).await;
            // One connection beyond the limit is accepted, and a slot is made free for it; the
            // others queue in the kernel.
            (stream, peer, take_slot(&slots, &mut connections).await)
        };
        let Some((stream, peer, slot)) = stop.run_until_cancelled(next).await else {
            break;
        };
        let activity = Arc::new(ConnectionActivity::new(peer));
        let peer = Peer { address: peer, activity: Some(activity.clone()) };
        connections.add(activity, tasks.spawn(connection(server.clone(), stream, peer, slot)));
    }
    drop(listener);
    let drained = timeout(drain, async {
        while let Some(ended) = tasks.join_next().await {
            report(ended);
        }
    })
    .await;
    let drained = match drained {
        Ok(()) => Drained::Clean,
        Err(_) => Drained::Cut { connections: tasks.len() },
    };
    tasks.shutdown().await;
    streams.cut.cancel();
    streams.tasks.close();
    streams.tasks.wait().await;
    drained
}

struct Server<A> {
    answer: A,
    tls: Option<TlsAcceptor>,
    limits: HttpLimits,
    stop: CancellationToken,
    streams: Streams,
}

/// Retries until a connection is accepted: the loop must survive a lack of file descriptors.
async fn accept(
    listener: &TcpListener,
    connections: &mut Connections,
    complaints: &mut AcceptComplaints,
) -> (TcpStream, SocketAddr) {
    loop {
        match listener.accept().await {
            Ok(accepted) => return accepted,
            Err(error) if is_about_one_peer(&error) => {}
            Err(error) => {
                complaints.note(&error, Instant::now());
                if is_out_of_descriptors(&error) {
                    connections.make_room(std::time::Instant::now());
                }
                sleep(ACCEPT_BACKOFF).await;
            }
        }
    }
}

/// A slot for one more connection: a free one, or the slot of a connection that is closed for it.
async fn take_slot(slots: &Arc<Semaphore>, connections: &mut Connections) -> OwnedSemaphorePermit {
    loop {
        if let Ok(slot) = slots.clone().try_acquire_owned() {
            return slot;
        }
        connections.make_room(std::time::Instant::now());
        let freed = async { slots.clone().acquire_owned().await.expect("never closed") };
        if let Ok(slot) = timeout(SURVEY_AGAIN, freed).await {
            return slot;
        }
    }
}

/// Records that a connection ends, before its slot is free.
struct ConnectionClosing(Arc<ConnectionActivity>);

impl Drop for ConnectionClosing {
    fn drop(&mut self) {
        self.0.record_end();
    }
}

/// The pause after a failed accept: long enough not to spin, short enough not to delay a client.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(50);

fn is_about_one_peer(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::Interrupted
    )
}

/// Out of file descriptors: this process (EMFILE) or the whole machine (ENFILE).
fn is_out_of_descriptors(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(24 | 23))
}

/// Logs at most once a second that accepting fails.
#[derive(Debug, Default)]
struct AcceptComplaints {
    last: Option<Instant>,
}

impl AcceptComplaints {
    fn note(&mut self, error: &io::Error, now: Instant) {
        if self.last.is_none_or(|last| now - last >= Duration::from_secs(1)) {
            self.last = Some(now);
            error!(%error, "cannot accept connections: {error}; trying again");
        }
    }
}

fn report(ended: Result<(), JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        error!(%error, "the task of a connection panicked; other connections continue");
    }
}

/// One connection from its first byte to its last. Until bytes arrive it is only this small task;
/// the memory for HTTP and TLS is allocated when they do.
async fn connection<A, F, B>(
    server: Arc<Server<A>>,
    stream: TcpStream,
    peer: Peer,
    slot: OwnedSemaphorePermit,
) where
    A: Fn(Request<Received>, Peer) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response<B>> + Send + 'static,
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    let _slot = slot;
    let Peer { address, activity: Some(activity) } = &peer else { return };
    let _goes = ConnectionClosing(activity.clone());
    let head_by = Instant::now() + server.limits.header_deadline;
    if let Err(error) = stream.set_nodelay(true) {
        debug!(%error, "the connection ended before it was set up");
        return;
    }
    let awaited = async {
        match &server.tls {
            None => first_bytes(&stream).await,
            Some(_) => stream.readable().await.map(|()| FirstBytes::default()),
        }
    };
    let awaited = server.stop.run_until_cancelled(timeout_at(head_by, awaited)).await;
    let Some(Ok(Ok(first))) = awaited else {
        return;
    };
    let HttpLimits { linger, linger_bytes_max, .. } = server.limits;
    let stream = DrainingSocket::new(stream, activity.clone(), linger, linger_bytes_max);
    match &server.tls {
        None => {
            let protocol = first.protocol();
            Box::pin(serve_protocol(&server, stream, protocol, activity, first, head_by, &peer))
                .await;
        }
        Some(acceptor) => {
            let handshake = Box::pin(acceptor.accept(stream));
            let stream = match timeout(server.limits.handshake_deadline, handshake).await {
                Ok(Ok(stream)) => stream,
                Ok(Err(error)) => {
                    return debug!(%error, peer = %address, "the TLS handshake failed");
                }
                Err(_) => return debug!(peer = %address, "the TLS handshake took too long"),
            };
            let protocol = match stream.get_ref().1.alpn_protocol() {
                Some(b"h2") => Protocol::Http2,
                Some(_) | None => Protocol::Http1,
            };
            Box::pin(serve_protocol(&server, stream, protocol, activity, first, head_by, &peer))
                .await;
        }
    }
}

const HTTP2_PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Reads until it is known whether the peer speaks HTTP/2 with prior knowledge. `POST` and the
/// preface share their first letter, so one byte is not enough, and peeking again for a second byte
/// would spin.
async fn first_bytes(stream: &TcpStream) -> io::Result<FirstBytes> {
    let mut first = FirstBytes::default();
    loop {
        stream.readable().await?;
        match stream.try_read(&mut first.bytes[first.len..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => first.len += read,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(error) => return Err(error),
        }
        let is_decided = first.len == HTTP2_PREFACE.len() || !first.may_be_http2();
        if is_decided {
            return Ok(first);
        }
    }
}

impl FirstBytes {
    fn may_be_http2(&self) -> bool {
        self.len > 0 && self.bytes[..self.len] == HTTP2_PREFACE[..self.len]
    }

    fn protocol(&self) -> Protocol {
        if self.may_be_http2() { Protocol::Http2 } else { Protocol::Http1 }
    }
}

async fn serve_protocol<A, F, B, T>(
    server: &Server<A>,
    stream: T,
    protocol: Protocol,
    activity: &Arc<ConnectionActivity>,
    first: FirstBytes,
    head_by: Instant,
    peer: &Peer,
) where
    A: Fn(Request<Received>, Peer) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response<B>> + Send + 'static,
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let limits = &server.limits;
    let stream = WatchedStream::new(
        stream,
        protocol,
        activity.clone(),
        first,
        head_by,
        limits.header_deadline,
        limits.write_stall,
    );
    let io = TokioIo::new(stream);
    let service = service(server.answer.clone(), activity.clone(), peer.clone());
    match protocol {
        Protocol::Http1 => {
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                // The guard's own deadline starts with the head's first byte, so that idle and slow
                // connections differ.
                .header_read_timeout(None)
                // The limit of headers stays at hyper's default of 100: a limit that is set costs
                // an allocation for each request.
                .max_header_size(limits.header_bytes_max)
                .max_buf_size(READ_BUFFER_BYTES_MAX.max(limits.header_bytes_max))
                .serve_connection(io, service);
            run_connection(connection, server, activity, peer.address).await;
        }
        Protocol::Http2 => {
            let header_bytes_max = u32::try_from(limits.header_bytes_max).unwrap_or(u32::MAX);
            let connection = http2::Builder::new(server.streams.clone())
                .timer(TokioTimer::new())
                .max_concurrent_streams(limits.streams_max)
                .max_header_list_size(header_bytes_max)
                .max_pending_accept_reset_streams(limits.reset_streams_max)
                .max_local_error_reset_streams(limits.reset_streams_max)
                .initial_connection_window_size(limits.connection_window_bytes)
                .initial_stream_window_size(limits.stream_window_bytes)
                .keep_alive_interval(limits.ping)
                .keep_alive_timeout(limits.ping)
                .serve_connection(io, service);
            run_connection(connection, server, activity, peer.address).await;
        }
    }
}

/// The longest piece of an HTTP/1 body. This length determines the memory of a connection.
const READ_BUFFER_BYTES_MAX: usize = 64 * 1024;

fn service<A, F, B>(
    answer: A,
    activity: Arc<ConnectionActivity>,
    peer: Peer,
) -> impl Service<
    Request<Incoming>,
    Response = Response<InFlightBody<B>>,
    Error = Infallible,
    Future = impl Future<Output = Result<Response<InFlightBody<B>>, Infallible>> + Send + use<A, F, B>,
> + Send
+ use<A, F, B>
where
    A: Fn(Request<Received>, Peer) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response<B>> + Send + 'static,
    B: Body<Data = Bytes> + Send + Unpin + 'static,
{
    service_fn(move |request: Request<Incoming>| {
        let (in_flight, is_ambiguous) = activity.begin();
        let activity = activity.clone();
        let version = request.version();
        let is_clear = !is_ambiguous && smuggling_guard::is_clear(&request);
        let answered = is_clear.then(|| {
            let request = request.map(|body| Received::new(body, &activity));
            answer(request, peer.clone())
        });
        async move {
            let response = match answered {
                Some(answered) => answered.await.map(Some),
                None => bad_request(version),
            };
            if response.headers().contains_key(header::CONNECTION) {
                activity.leaves_bytes_unread();
            }
            Ok(response.map(|body| InFlightBody { body, in_flight: in_flight.with_answer() }))
        }
    })
}

fn bad_request<B>(version: Version) -> Response<Option<B>> {
    let mut response = Response::new(None);
    *response.status_mut() = StatusCode::BAD_REQUEST;
    // On HTTP/2 only the stream ends.
    if version < Version::HTTP_2 {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// Runs a connection until the peer ends it, the server stops, or it was idle for too long.
async fn run_connection<A, C>(
    connection: C,
    server: &Server<A>,
    activity: &ConnectionActivity,
    peer: SocketAddr,
) where
    C: Graceful,
{
    let mut connection = pin!(connection);
    let idle = server.limits.idle;
    let mut looks = interval_at(Instant::now() + idle, idle);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut requests_before = 0;
    loop {
        tokio::select! {
            biased;
            ended = connection.as_mut() => return log_end(ended, peer),
            () = server.stop.cancelled() => break,
            _ = looks.tick() => {
                let (requests, running) = activity.activity();
                if !running && requests == requests_before {
                    break;
                }
                requests_before = requests;
            }
        }
    }
    connection.as_mut().close_gracefully();
    // During a shutdown, the drain of the server ends no later than this timeout. For a connection
    // that was idle for too long, this timeout is the only bound.
    match timeout(server.limits.drain, connection).await {
        Ok(ended) => log_end(ended, peer),
        Err(_) => debug!(%peer, "the connection did not end in time and was cut"),
    }
}

fn log_end(ended: hyper::Result<()>, peer: SocketAddr) {
    if let Err(error) = ended {
        debug!(%peer, %error, "the connection broke: {error}");
    }
}

/// The methods that hyper's HTTP/1 and HTTP/2 connections share without a common trait.
trait Graceful: Future<Output = hyper::Result<()>> {
    fn close_gracefully(self: Pin<&mut Self>);
}

impl<I, B, S> Graceful for http1::Connection<I, S>
where
    S: Service<Request<Incoming>, Response = Response<B>>,
    S::Error: Into<Box<dyn Error + Send + Sync>>,
    I: hyper::rt::Read + hyper::rt::Write + Unpin,
    B: Body + 'static,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    fn close_gracefully(self: Pin<&mut Self>) {
        self.graceful_shutdown();
    }
}

impl<I, B, S> Graceful for http2::Connection<I, S, Streams>
where
    S: Service<Request<Incoming>, Response = Response<B>>,
    S::Error: Into<Box<dyn Error + Send + Sync>>,
    S::Future: Send + 'static,
    I: hyper::rt::Read + hyper::rt::Write + Unpin,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    fn close_gracefully(self: Pin<&mut Self>) {
        self.graceful_shutdown();
    }
}

/// Runs the streams of HTTP/2 connections in a set that is awaited, and cut with the connections.
#[derive(Debug, Clone)]
struct Streams {
    tasks: TaskTracker,
    cut: CancellationToken,
}

impl<F> hyper::rt::Executor<F> for Streams
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    fn execute(&self, stream: F) {
        let cut = self.cut.clone();
        self.tasks.spawn(async move {
            if cut.run_until_cancelled(stream).await.is_none() {
                warn!("a stream was cut at the end of the drain");
            }
        });
    }
}

/// A response body that keeps its request in flight until it is sent: a long stream of events is not idle.
/// `None` is an empty body.
struct InFlightBody<B> {
    body: Option<B>,
    in_flight: InFlight,
}

impl<B: Body + Unpin> Body for InFlightBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let polled = match &mut self.body {
            Some(body) => Pin::new(body).poll_frame(cx),
            None => Poll::Ready(None),
        };
        if polled.is_ready() {
            self.in_flight.moves();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), Body::size_hint)
    }
}
