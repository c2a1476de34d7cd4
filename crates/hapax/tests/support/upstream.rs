//! A user's API behind a proxy: it writes each effect into a ledger without any constraint, and
//! answers or fails as the test decides.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

use super::FOREVER;

/// One request as the app saw it.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) at: Instant,
    pub(crate) line: String,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Asked {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut found = self.headers.iter().filter(|(known, _)| known == name);
        let value = found.next().map(|(_, value)| value.as_str());
        assert!(found.next().is_none(), "{name} twice: {self:?}");
        value
    }

    pub(crate) fn number(&self, name: &str) -> i64 {
        self.header(name).unwrap_or_else(|| panic!("no {name}: {self:?}")).parse().unwrap()
    }
}

/// The app's reaction after its work.
pub(crate) enum Reply {
    /// Status, more headers as lines, body.
    Answer(u16, String, Vec<u8>),
    /// The app dies, and its answer is lost.
    Cut,
    /// The app dies in the middle of its answer.
    Half,
}

impl Reply {
    /// A 201 with this body.
    pub(crate) fn created(body: impl Into<Vec<u8>>) -> Self {
        Self::Answer(201, "content-type: text/plain\r\nx-from: app\r\n".into(), body.into())
    }
}

/// The app; it outlives the servers in front of it.
pub(crate) struct Upstream {
    pub(crate) address: SocketAddr,
    seen: Arc<Seen>,
}

#[derive(Default)]
struct Seen {
    connections: AtomicUsize,
    effects: Mutex<Vec<Asked>>,
    came: Condvar,
}

impl Upstream {
    /// An app that records each request as an effect and then calls `reply`, which may block.
    pub(crate) fn new(reply: impl Fn(&Asked) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::<Seen>::default();
        let (kept, reply) = (Arc::clone(&seen), Arc::new(reply));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                kept.connections.fetch_add(1, Ordering::Relaxed);
                let (kept, reply) = (Arc::clone(&kept), Arc::clone(&reply));
                std::thread::spawn(move || serve(stream.unwrap(), &kept, &*reply));
            }
        });
        Self { address, seen }
    }

    /// An app that answers each request with the number of requests so far.
    pub(crate) fn counting() -> Self {
        let count = Mutex::new(0);
        Self::new(move |_| {
            let mut count = count.lock().unwrap();
            *count += 1;
            Reply::created(format!("charge {count}"))
        })
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn connections(&self) -> usize {
        self.seen.connections.load(Ordering::Relaxed)
    }

    /// The effects so far.
    pub(crate) fn effects(&self) -> Vec<Asked> {
        self.seen.effects.lock().unwrap().clone()
    }

    /// Waits for that many effects in all.
    #[track_caller]
    pub(crate) fn wait_for(&self, count: usize) -> Vec<Asked> {
        let guard = self.seen.effects.lock().unwrap();
        let (guard, _) =
            self.seen.came.wait_timeout_while(guard, FOREVER, |seen| seen.len() < count).unwrap();
        assert!(guard.len() >= count, "only {} of {count} effects", guard.len());
        guard.clone()
    }
}

fn serve(stream: TcpStream, seen: &Seen, reply: &dyn Fn(&Asked) -> Reply) {
    let mut writer = stream.try_clone().unwrap();
    let mut reader = BufReader::new(stream);
    while let Some(asked) = read(&mut reader) {
        seen.effects.lock().unwrap().push(asked.clone());
        seen.came.notify_all();
        let (head, body, cut) = match reply(&asked) {
            Reply::Answer(status, headers, body) => {
                let length = body.len();
                (
                    format!("HTTP/1.1 {status} X\r\n{headers}content-length: {length}\r\n\r\n"),
                    body,
                    false,
                )
            }
            Reply::Cut => return,
            Reply::Half => {
                ("HTTP/1.1 201 X\r\ncontent-length: 100\r\n\r\n".to_owned(), b"half".to_vec(), true)
            }
        };
        let written = writer.write_all(head.as_bytes()).and_then(|()| writer.write_all(&body));
        if written.is_err() || cut {
            return;
        }
    }
}

/// One request with a body of known length, or none.
pub(crate) fn read(reader: &mut BufReader<TcpStream>) -> Option<Asked> {
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|read| *read > 0)?;
    let mut headers = Vec::new();
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).ok().filter(|read| *read > 0)?;
        match header.trim_end().split_once(": ") {
            Some((name, value)) => headers.push((name.to_ascii_lowercase(), value.to_owned())),
            None => break,
        }
    }
    let mut asked =
        Asked { at: Instant::now(), line: line.trim_end().to_owned(), headers, body: Vec::new() };
    let length = asked.header("content-length").map_or(0, |length| length.parse().unwrap());
    asked.body = vec![0; length];
    reader.read_exact(&mut asked.body).ok()?;
    Some(asked)
}
