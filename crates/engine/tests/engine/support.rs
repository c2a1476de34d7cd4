//! Shared by the tests of the engine: a client that writes exactly the given bytes, and a wait that
//! fails instead of hanging.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

/// The timeout of every wait: far longer than anything should take.
pub(crate) const FOREVER: Duration = Duration::from_secs(120);

/// Waits for `what`, or fails.
#[track_caller]
pub(crate) fn within<F: Future>(what: F) -> impl Future<Output = F::Output> {
    let place = std::panic::Location::caller();
    async move {
        match timeout(FOREVER, what).await {
            Ok(done) => done,
            Err(_) => panic!("nothing happened at {place}"),
        }
    }
}

/// A connection, byte by byte.
pub(crate) struct Wire {
    pub(crate) stream: TcpStream,
    read: Vec<u8>,
}

/// An answer as it arrived.
#[derive(Debug)]
pub(crate) struct BufferedAnswer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl BufferedAnswer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().skip(1).find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then_some(value.trim())
        })
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).expect("a JSON body")
    }
}

impl Wire {
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        let stream = within(TcpStream::connect(address)).await.expect("the server listens");
        Self { stream, read: Vec::new() }
    }

    /// Connects from another loopback address.
    pub(crate) async fn connect_from(ours: [u8; 4], address: SocketAddr) -> Self {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.bind(SocketAddr::from((ours, 0))).expect("an address of the loopback network");
        let stream = within(socket.connect(address)).await.expect("the server listens");
        Self { stream, read: Vec::new() }
    }

    /// Writes, and ignores errors: the peer may have answered and closed already.
    pub(crate) async fn write(&mut self, bytes: impl AsRef<[u8]>) {
        let _ = within(self.stream.write_all(bytes.as_ref())).await;
    }

    /// The next answer.
    pub(crate) async fn answer(&mut self) -> BufferedAnswer {
        self.try_answer().await.expect("an answer")
    }

    /// The next answer, or `None` if the connection ends without one.
    pub(crate) async fn try_answer(&mut self) -> Option<BufferedAnswer> {
        let end = loop {
            if let Some(at) = self.read.windows(4).position(|four| four == b"\r\n\r\n") {
                break at + 4;
            }
            if !self.more().await {
                return None;
            }
        };
        let head = String::from_utf8(self.read.drain(..end).collect()).expect("a head is text");
        let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status");
        let mut heard = BufferedAnswer { status, head, body: Vec::new() };
        let length: usize =
            heard.header("content-length").map_or(0, |length| length.parse().expect("a length"));
        while self.read.len() < length {
            assert!(self.more().await, "the body broke off");
        }
        heard.body = self.read.drain(..length).collect();
        Some(heard)
    }

    /// Reads until the connection ends, and returns the bytes.
    pub(crate) async fn rest(&mut self) -> Vec<u8> {
        while self.more().await {}
        std::mem::take(&mut self.read)
    }

    async fn more(&mut self) -> bool {
        let read = within(self.stream.read_buf(&mut self.read)).await;
        matches!(read, Ok(bytes) if bytes > 0)
    }
}
