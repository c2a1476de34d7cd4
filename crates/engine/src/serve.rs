//! Starts, drains and stops the ingress as one unit that the binary runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hapax_core::store::{Store, StoreError, StoreHints};
use tokio::net::TcpListener;
use tokio::time::timeout;
use tokio_rustls::rustls::ServerConfig;
use tokio_util::sync::CancellationToken;

use crate::http::{self, Drained, Peer};
use crate::ingress::Ingress;
use crate::limits::HttpLimits;

/// Serves the ingress until `stop`. When this returns, every received request is committed and
/// answered, as far as `limits.drain` allowed. The store may then be closed.
pub async fn serve_ingress<S: Store + StoreHints>(
    listener: TcpListener,
    tls: Option<Arc<ServerConfig>>,
    ingress: Arc<Ingress<S>>,
    limits: HttpLimits,
    stop: CancellationToken,
) -> Drained {
    let answer = {
        let ingress = ingress.clone();
        move |request, peer: Peer| ingress.clone().answer(request, peer)
    };
    let serving = |stop| http::serve(listener, tls, answer, limits.clone(), stop);
    // Commits whose clients were cut or hung up; the store bounds how long each can take.
    let background =
        Background { finish: ingress.finish(), maintain: |served| ingress.maintain(served) };
    run_until_drained(serving, background, limits.drain, stop).await
}

/// The work behind the answers of a listener.
pub(crate) struct Background<F, T> {
    /// Ends when the requests of clients that hung up or were cut have all ended.
    pub(crate) finish: F,
    /// Runs alongside the listener, until the shutdown signal.
    pub(crate) maintain: T,
}

/// Serves until `stop`, then waits for the work behind the answers, each for at most `drain`.
pub(crate) async fn run_until_drained<S, F, T, N>(
    serve: impl FnOnce(CancellationToken) -> S,
    background: Background<F, T>,
    drain: Duration,
    stop: CancellationToken,
) -> Drained
where
    S: Future<Output = Drained>,
    F: Future<Output = ()>,
    T: FnOnce(CancellationToken) -> N,
    N: Future<Output = ()>,
{
    let served = CancellationToken::new();
    let serving = async {
        let drained = serve(stop).await;
        let finished = timeout(drain, background.finish).await;
        served.cancel();
        match finished {
            Ok(()) => drained,
            Err(_) => Drained::Cut { connections: 0 },
        }
    };
    let (drained, ()) = tokio::join!(serving, (background.maintain)(served.clone()));
    drained
}

/// Whether this node should get traffic: the answer of `/readyz`.
#[derive(Debug)]
pub struct Readiness {
    open: AtomicBool,
    stop: CancellationToken,
}

/// Why a node is not ready.
#[derive(Debug, Clone, thiserror::Error)]
pub enum NotReady {
    /// The listeners are not open yet.
    #[error("starting")]
    Starting,
    /// Requests in flight are being finished, and no new ones are accepted.
    #[error("draining")]
    Draining,
    /// The store cannot make events durable.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Readiness {
    /// Not ready yet, and never ready again after `stop` is cancelled.
    pub fn new(stop: CancellationToken) -> Self {
        Self { open: AtomicBool::new(false), stop }
    }

    /// Records that the listeners accept connections.
    pub fn opened(&self) {
        self.open.store(true, Ordering::Release);
    }

    /// Whether the node is ready now.
    pub fn judge(&self, store: &impl Store) -> Result<(), NotReady> {
        if self.stop.is_cancelled() {
            return Err(NotReady::Draining);
        }
        if !self.open.load(Ordering::Acquire) {
            return Err(NotReady::Starting);
        }
        Ok(store.writable()?)
    }
}
