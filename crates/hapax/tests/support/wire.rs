//! A client that writes exactly the given bytes.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};

use serde_json::Value;

use super::FOREVER;

/// One connection.
pub(crate) struct Wire {
    pub(crate) stream: TcpStream,
    read: Vec<u8>,
}

/// An answer as it arrived.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().skip(1).find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then_some(value.trim())
        })
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The value of `{"decision": …}`.
    pub(crate) fn decision(&self) -> String {
        self.json()["decision"].as_str().unwrap_or_default().to_owned()
    }

    pub(crate) fn id(&self) -> String {
        self.json()["id"].as_str().unwrap_or_else(|| panic!("no id: {self:?}")).to_owned()
    }

    /// Expects a 200 with this decision.
    #[track_caller]
    pub(crate) fn is(&self, decision: &str) {
        assert_eq!(self.status, if decision == "review" { 202 } else { 200 }, "{self:?}");
        assert_eq!(self.decision(), decision, "{self:?}");
        assert_eq!(self.header("hapax-decision"), Some(decision), "{self:?}");
        assert!(self.header("hapax-request-id").is_some(), "{self:?}");
    }
}

impl Wire {
    pub(crate) fn connect(address: SocketAddr) -> Self {
        Self::try_connect(address).expect("the server listens")
    }

    pub(crate) fn try_connect(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(FOREVER))?;
        stream.set_write_timeout(Some(FOREVER))?;
        Ok(Self { stream, read: Vec::new() })
    }

    /// Writes the bytes. Returns false if the peer has closed the connection.
    pub(crate) fn write(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.stream.write_all(bytes.as_ref()).is_ok()
    }

    pub(crate) fn answer(&mut self) -> Answer {
        self.try_answer().expect("an answer")
    }

    /// The next answer, or `None` if the connection ends without one.
    pub(crate) fn try_answer(&mut self) -> Option<Answer> {
        let end = loop {
            if let Some(at) = self.read.windows(4).position(|four| four == b"\r\n\r\n") {
                break at + 4;
            }
            if !self.more() {
                return None;
            }
        };
        let head = String::from_utf8(self.read.drain(..end).collect()).unwrap();
        let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status");
        let mut answer = Answer { status, head, body: Vec::new() };
        let length = answer.header("content-length").map_or(0, |length| length.parse().unwrap());
        while self.read.len() < length {
            if !self.more() {
                return None;
            }
        }
        answer.body = self.read.drain(..length).collect();
        Some(answer)
    }

    /// Sends one request on this connection and reads its answer; `None` if the connection is
    /// closed.
    pub(crate) fn try_ask(&mut self, request: &[u8]) -> Option<Answer> {
        self.write(request);
        self.try_answer()
    }

    /// Waits until the peer closes the connection. Returns false after the timeout.
    pub(crate) fn ends(&mut self) -> bool {
        while self.more() {}
        true
    }

    fn more(&mut self) -> bool {
        let mut part = [0; 16 * 1024];
        match self.stream.read(&mut part) {
            Ok(0) => false,
            Ok(read) => {
                self.read.extend_from_slice(&part[..read]);
                true
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                panic!("the server neither answered nor closed");
            }
            Err(_) => false,
        }
    }
}
