//! A network that fails on demand: a TCP proxy in front of an engine that delays, holds and resets
//! connections, also between a statement and its answer. The proxy knows no protocol: bytes on the
//! connection identify the moment.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;

/// The end of every answer of PostgreSQL to a statement, or to a pipeline up to its Sync. Until these bytes
/// arrive, the client does not know whether the statement was committed.
pub const READY_FOR_QUERY: &[u8] = b"Z\x00\x00\x00\x05";

/// A proxy on its own port. Dropping the proxy closes its connections.
pub struct TcpProxy {
    address: SocketAddr,
    upstream: SocketAddr,
    network: Arc<Network>,
    accepting: JoinHandle<()>,
}

/// The treatment of all connections, until the next change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrafficMode {
    /// Everything passes.
    Forward,
    /// Everything passes, this much later in each direction.
    Delay(Duration),
    /// Nothing passes, and neither side notices it, as when packets are lost. Held bytes pass when traffic
    /// flows again.
    Hold,
    /// Open connections pass. New connections are reset.
    Refuse,
}

/// A moment at which one connection is reset or closed, once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trap {
    /// When the client sends these bytes, they do not reach the server, and the connection is
    /// reset.
    Request(Vec<u8>),
    /// When the client sends `request`, it reaches the server. The answer is dropped. Once the answer has
    /// contained `answer`, the connection is reset; with an empty `answer`, at once. For PostgreSQL `answer` is
    /// [`READY_FOR_QUERY`]. The `request` must be part of the execution, such as `COMMIT` or a parameter's
    /// value, since the text of a prepared statement is sent before.
    Answer {
        /// The bytes that the client sends.
        request: Vec<u8>,
        /// The bytes that the server must have sent before the reset.
        answer: Vec<u8>,
    },
    /// When the server has sent this many bytes on a connection since the trap was set, the client gets exactly
    /// these bytes, and the connection is closed.
    AfterBytes(usize),
}

impl TcpProxy {
    /// A proxy in front of an engine on this port of 127.0.0.1.
    ///
    /// # Panics
    /// When no port is free.
    pub async fn to_port(port: u16) -> TcpProxy {
        match TcpProxy::open(SocketAddr::from(([127, 0, 0, 1], port))).await {
            Ok(proxy) => proxy,
            Err(error) => panic!("starting a proxy: {error}"),
        }
    }

    /// The port of 127.0.0.1 to connect to.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// The engine's URL through this proxy.
    pub fn through(&self, url: &str) -> String {
        url.replace(&format!("127.0.0.1:{}", self.upstream.port()), &self.address.to_string())
    }

    /// Changes the traffic of all connections, open and new.
    pub fn set(&self, traffic: TrafficMode) {
        self.network.traffic.send_replace(traffic);
    }

    /// Resets every open connection. Returns how many there were.
    pub fn cut(&self) -> usize {
        let open = self.network.open.load(Ordering::SeqCst);
        self.network.cut.send_modify(|round| *round += 1);
        open
    }

    /// How many connections are open.
    pub fn open_connections(&self) -> usize {
        self.network.open.load(Ordering::SeqCst)
    }

    /// Sets a trap for the first connection that reaches its moment. The new trap replaces one that has not
    /// sprung.
    pub fn arm(&self, trap: Trap) {
        let mut armed = self.network.armed();
        armed.number += 1;
        armed.trap = Some(trap);
    }

    /// How often a trap has sprung: a fault that never happened proves nothing.
    pub fn sprung(&self) -> usize {
        *self.network.sprung.borrow()
    }

    /// Waits until traps have sprung this often in all.
    pub async fn wait_sprung(&self, times: usize) {
        let mut sprung = self.network.sprung.subscribe();
        // This value owns the sender, so the wait cannot fail.
        let _ = sprung.wait_for(|count| *count >= times).await;
    }

    async fn open(upstream: SocketAddr) -> io::Result<TcpProxy> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let network = Arc::new(Network {
            traffic: watch::Sender::new(TrafficMode::Forward),
            cut: watch::Sender::new(0),
            sprung: watch::Sender::new(0),
            open: AtomicUsize::new(0),
            armed: Mutex::default(),
        });
        let accepting = tokio::spawn(accept(listener, upstream, Arc::clone(&network)));
        Ok(TcpProxy { address, upstream, network, accepting })
    }
}

impl Drop for TcpProxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// How much is read at once, and how many such pieces a delayed direction may buffer: more than any test
/// sends.
const PIECE_BYTES: usize = 16 * 1024;
const PIECES_MAX: usize = 256;

struct Network {
    traffic: watch::Sender<TrafficMode>,
    cut: watch::Sender<u64>,
    sprung: watch::Sender<usize>,
    open: AtomicUsize,
    armed: Mutex<ArmedTrap>,
}

/// The trap that is set. A connection that counts bytes for an earlier trap notices the new one by
/// its number.
#[derive(Default)]
struct ArmedTrap {
    number: u64,
    trap: Option<Trap>,
}

/// How the proxy ends a connection early.
enum Cut {
    /// The connection is closed after the forwarded bytes have arrived.
    Close,
    /// The connection is reset at once. Bytes in flight may be lost.
    Reset,
}

/// The action on a piece that was read.
enum PieceAction {
    Pass,
    Swallow,
    /// This many bytes of the piece pass, and nothing after them.
    Last(usize),
    Reset,
}

impl Network {
    fn armed(&self) -> MutexGuard<'_, ArmedTrap> {
        lock(&self.armed)
    }

    fn count_sprung(&self) {
        self.sprung.send_modify(|count| *count += 1);
    }
}

/// Counts a connection while it is open.
struct CountedConnection<'a>(&'a AtomicUsize);

impl<'a> CountedConnection<'a> {
    fn count(open: &'a AtomicUsize) -> CountedConnection<'a> {
        open.fetch_add(1, Ordering::SeqCst);
        CountedConnection(open)
    }
}

impl Drop for CountedConnection<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

async fn accept(listener: TcpListener, upstream: SocketAddr, network: Arc<Network>) {
    let mut carried = JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        while carried.try_join_next().is_some() {}
        if *network.traffic.borrow() == TrafficMode::Refuse {
            let _ = client.set_zero_linger();
            continue;
        }
        let network = Arc::clone(&network);
        carried.spawn(async move { carry(client, upstream, &network).await });
    }
}

async fn carry(mut client: TcpStream, upstream: SocketAddr, network: &Network) {
    let _open = CountedConnection::count(&network.open);
    let mut cut = network.cut.subscribe();
    let mut server = None;
    let carried = async {
        flowing(network).await;
        let server = server.insert(TcpStream::connect(upstream).await.map_err(|_| Cut::Reset)?);
        exchange(&mut client, server, network).await
    };
    let carried = tokio::select! {
        carried = carried => carried,
        _ = cut.changed() => Err(Cut::Reset),
    };
    match carried {
        Ok(()) | Err(Cut::Close) => {}
        Err(Cut::Reset) => {
            for side in [Some(client), server].into_iter().flatten() {
                let _ = side.set_zero_linger();
            }
        }
    }
}

async fn exchange(
    client: &mut TcpStream,
    server: &mut TcpStream,
    network: &Network,
) -> Result<(), Cut> {
    // An error is ignored: without TCP_NODELAY the connection is only slower.
    let _ = client.set_nodelay(true);
    let _ = server.set_nodelay(true);
    let (from_client, to_client) = client.split();
    let (from_server, to_server) = server.split();
    let swallowing = Mutex::new(None);
    let mut requests = Requests { network, swallowing: &swallowing, before: Vec::new() };
    let mut answers = Answers {
        network,
        swallowing: &swallowing,
        before: Vec::new(),
        counted_for: 0,
        counted: 0,
    };
    tokio::try_join!(
        pass(network, from_client, to_server, |piece| requests.judge(piece)),
        pass(network, from_server, to_client, |piece| answers.judge(piece)),
    )?;
    Ok(())
}

/// Forwards one direction of one connection, to its end. Reading continues while writing waits, so that a
/// delay does not limit the throughput.
async fn pass(
    network: &Network,
    from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    judge: impl FnMut(&[u8]) -> PieceAction,
) -> Result<(), Cut> {
    let (queue, waiting) = mpsc::channel(PIECES_MAX);
    let (last, ()) = tokio::try_join!(read(from, queue, judge), write(network, waiting, &mut to))?;
    match last {
        Some(cut) => Err(cut),
        None => {
            flowing(network).await;
            to.shutdown().await.map_err(|_| Cut::Reset)
        }
    }
}

type Piece = (Instant, Vec<u8>);

/// Reads to the end, or to the last piece that may pass.
async fn read(
    mut from: ReadHalf<'_>,
    queue: mpsc::Sender<Piece>,
    mut judge: impl FnMut(&[u8]) -> PieceAction,
) -> Result<Option<Cut>, Cut> {
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        let length = from.read(&mut piece).await.map_err(|_| Cut::Reset)?;
        if length == 0 {
            return Ok(None);
        }
        let (passes, last) = match judge(&piece[..length]) {
            PieceAction::Pass => (length, false),
            PieceAction::Swallow => continue,
            PieceAction::Last(passes) => (passes, true),
            PieceAction::Reset => return Err(Cut::Reset),
        };
        let queued = queue.send((Instant::now(), piece[..passes].to_vec())).await;
        queued.map_err(|_| Cut::Reset)?;
        if last {
            return Ok(Some(Cut::Close));
        }
    }
}

async fn write(
    network: &Network,
    mut waiting: mpsc::Receiver<Piece>,
    to: &mut WriteHalf<'_>,
) -> Result<(), Cut> {
    while let Some((read_at, piece)) = waiting.recv().await {
        if let TrafficMode::Delay(delay) = flowing(network).await {
            tokio::time::sleep_until(read_at + delay).await;
        }
        to.write_all(&piece).await.map_err(|_| Cut::Reset)?;
    }
    Ok(())
}

/// Waits while traffic is held, and returns the traffic.
async fn flowing(network: &Network) -> TrafficMode {
    let mut traffic = network.traffic.subscribe();
    let flows = traffic.wait_for(|traffic| *traffic != TrafficMode::Hold).await;
    // The borrowed network owns the sender, so the wait cannot fail.
    flows.map_or(TrafficMode::Forward, |traffic| *traffic)
}

/// The bytes that the server must send before the connection is reset, once the request has passed.
type Swallowing = Mutex<Option<Vec<u8>>>;

/// Watches the bytes of one client for the moment of a trap.
struct Requests<'a> {
    network: &'a Network,
    swallowing: &'a Swallowing,
    before: Vec<u8>,
}

impl Requests<'_> {
    fn judge(&mut self, piece: &[u8]) -> PieceAction {
        let mut armed = self.network.armed();
        let sought = match &armed.trap {
            Some(Trap::Request(request) | Trap::Answer { request, .. }) => request.as_slice(),
            Some(Trap::AfterBytes(_)) | None => &[],
        };
        let found = !sought.is_empty() && contains(&self.before, piece, sought);
        remember(&mut self.before, piece);
        if !found {
            return PieceAction::Pass;
        }
        match armed.trap.take() {
            Some(Trap::Answer { answer, .. }) => {
                *lock(self.swallowing) = Some(answer);
                PieceAction::Pass
            }
            Some(Trap::Request(_) | Trap::AfterBytes(_)) | None => {
                self.network.count_sprung();
                PieceAction::Reset
            }
        }
    }
}

/// Watches the bytes that the server sends to one client.
struct Answers<'a> {
    network: &'a Network,
    swallowing: &'a Swallowing,
    before: Vec<u8>,
    counted_for: u64,
    counted: usize,
}

impl Answers<'_> {
    fn judge(&mut self, piece: &[u8]) -> PieceAction {
        if let Some(answer) = lock(self.swallowing).as_ref() {
            let complete = contains(&self.before, piece, answer);
            remember(&mut self.before, piece);
            if !complete {
                return PieceAction::Swallow;
            }
            self.network.count_sprung();
            return PieceAction::Reset;
        }
        let mut armed = self.network.armed();
        let Some(Trap::AfterBytes(bytes)) = armed.trap else { return PieceAction::Pass };
        if self.counted_for != armed.number {
            self.counted_for = armed.number;
            self.counted = 0;
        }
        let passes = bytes.saturating_sub(self.counted);
        self.counted += piece.len();
        if passes >= piece.len() {
            return PieceAction::Pass;
        }
        armed.trap = None;
        self.network.count_sprung();
        PieceAction::Last(passes)
    }
}

/// The longest sequence of bytes that may identify a moment, less one.
const BEFORE_BYTES_MAX: usize = 1023;

/// Whether `sought` is in the bytes that end with `piece`. `sought` may begin in `before`.
fn contains(before: &[u8], piece: &[u8], sought: &[u8]) -> bool {
    let Some(overlap) = sought.len().checked_sub(1) else { return true };
    let before = &before[before.len().saturating_sub(overlap)..];
    let seen = [before, piece].concat();
    seen.windows(sought.len()).any(|window| window == sought)
}

fn remember(before: &mut Vec<u8>, piece: &[u8]) {
    before.extend_from_slice(piece);
    before.drain(..before.len().saturating_sub(BEFORE_BYTES_MAX));
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
