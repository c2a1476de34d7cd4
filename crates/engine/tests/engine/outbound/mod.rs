//! The guarded client, attacked from both sides: by the URLs and names of endpoints, and by the
//! answers of servers. Traffic goes to loopback only; test resolvers map names to it.

mod addresses;
mod answers;
mod egress_proxy;
mod tls;
mod urls;

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use hapax_engine::{
    ENDPOINT_PORTS, EndpointAnswer, EndpointClient, EndpointUrl, GuardRules, LookupError,
    LookupFuture, Resolve, SendError,
};
use http::HeaderMap;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::support::within;

/// Far longer than any exchange here takes. Tests of deadlines use shorter ones.
const DEADLINE: Duration = Duration::from_secs(60);

/// An answer without a body.
const NO_CONTENT: &str = "HTTP/1.1 204 No Content\r\n\r\n";

/// Rules under which the sinks of these tests can be called.
fn loopback_allowed() -> GuardRules {
    GuardRules::new(vec!["127.0.0.0/8".parse().unwrap()], ENDPOINT_PORTS.to_vec(), None)
}

fn client(rules: GuardRules, names: &Arc<Names>) -> EndpointClient {
    let resolver: Arc<dyn Resolve> = Arc::clone(names) as _;
    EndpointClient::with(rules, resolver, &[]).expect("TLS is set up")
}

async fn post(client: &EndpointClient, url: &str) -> Result<EndpointAnswer, SendError> {
    let url = EndpointUrl::from_stored(url).expect("a URL in good form");
    let body = Bytes::from_static(b"{\"id\":\"msg_1\"}");
    within(client.post(&url, HeaderMap::new(), body, DEADLINE)).await
}

/// A resolver that a test controls. Each lookup of a name takes the next of its answers; the last one
/// stays.
#[derive(Debug, Default)]
struct Names {
    answers: Mutex<HashMap<String, Vec<Vec<IpAddr>>>>,
    lookups: AtomicUsize,
}

impl Names {
    fn new() -> Arc<Self> {
        Arc::default()
    }

    fn set(&self, name: &str, answers: &[&[&str]]) {
        let parsed = |answer: &&[&str]| answer.iter().map(|text| text.parse().unwrap()).collect();
        let answers = answers.iter().map(parsed).collect();
        self.answers.lock().unwrap().insert(name.to_owned(), answers);
    }

    fn one(name: &str, answer: &[&str]) -> Arc<Self> {
        let names = Self::new();
        names.set(name, &[answer]);
        names
    }

    fn lookups(&self) -> usize {
        self.lookups.load(Ordering::SeqCst)
    }
}

impl Resolve for Names {
    fn lookup<'a>(&'a self, name: &'a str) -> LookupFuture<'a> {
        self.lookups.fetch_add(1, Ordering::SeqCst);
        let mut answers = self.answers.lock().unwrap();
        let answer = match answers.get_mut(name) {
            None => Err(LookupError::NoSuchName),
            Some(left) if left.len() > 1 => Ok(left.remove(0)),
            Some(left) => Ok(left.first().cloned().unwrap_or_default()),
        };
        Box::pin(async move { answer })
    }
}

/// A listener that must see no connection.
struct Canary(TcpListener);

impl Canary {
    async fn new() -> Self {
        Self(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap())
    }

    fn port(&self) -> u16 {
        self.0.local_addr().unwrap().port()
    }

    /// Opens a connection and checks that it is the first one. Connections are accepted in their
    /// order, so there was no other before.
    async fn saw_nothing(&self) {
        let ours = within(TcpStream::connect(self.0.local_addr().unwrap())).await.unwrap();
        let (_, first) = within(self.0.accept()).await.unwrap();
        assert_eq!(first, ours.local_addr().unwrap(), "the canary saw a connection");
    }
}

/// A server on loopback that answers each request with the same text and keeps every request.
struct Sink {
    address: SocketAddr,
    requests: mpsc::UnboundedReceiver<String>,
    connections: Arc<AtomicUsize>,
    _serving: JoinSet<()>,
}

impl Sink {
    /// The connection stays open after an answer.
    async fn answering(answer: impl Into<Vec<u8>>) -> Self {
        Self::start(answer.into(), false).await
    }

    /// The connection is closed after an answer, which may be empty.
    async fn closing(answer: impl Into<Vec<u8>>) -> Self {
        Self::start(answer.into(), true).await
    }

    async fn start(answer: Vec<u8>, closes: bool) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (heard, requests) = mpsc::unbounded_channel();
        let connections = Arc::new(AtomicUsize::new(0));
        let seen = Arc::clone(&connections);
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            let mut open = JoinSet::new();
            while let Ok((mut stream, _)) = listener.accept().await {
                seen.fetch_add(1, Ordering::SeqCst);
                let (heard, answer) = (heard.clone(), answer.clone());
                open.spawn(async move {
                    while let Some(request) = read_request(&mut stream).await {
                        let _ = heard.send(request);
                        if stream.write_all(&answer).await.is_err() || closes {
                            break;
                        }
                    }
                });
            }
        });
        Self { address, requests, connections, _serving: serving }
    }

    fn port(&self) -> u16 {
        self.address.port()
    }

    fn url(&self) -> String {
        format!("http://{}/in", self.address)
    }

    /// Every request that has arrived so far.
    fn requests(&mut self) -> Vec<String> {
        std::iter::from_fn(|| self.requests.try_recv().ok()).collect()
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }
}

/// One request with its body, or `None` at the end of the connection.
async fn read_request(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> Option<String> {
    let mut read = Vec::new();
    loop {
        let head = read.windows(4).position(|four| four == b"\r\n\r\n");
        if let Some(head) = head {
            let text = String::from_utf8_lossy(&read[..head]).to_ascii_lowercase();
            let length = text.lines().find_map(|line| line.strip_prefix("content-length: "));
            let length: usize = length.map_or(0, |length| length.parse().unwrap());
            if read.len() >= head + 4 + length {
                return Some(String::from_utf8(read).unwrap());
            }
        }
        let mut bytes = [0_u8; 4_096];
        match stream.read(&mut bytes).await {
            Ok(0) | Err(_) => return None,
            Ok(count) => read.extend_from_slice(&bytes[..count]),
        }
    }
}
