//! A user's app on loopback, behind an `http` handler. The app keeps its own ledger by idempotency
//! key, as every app should whose effects are outside Hapax's database.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};

use super::FOREVER;

/// One call as the app saw it.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) key: String,
    pub(crate) job: String,
    pub(crate) fence: u64,
    pub(crate) attempt: u32,
    pub(crate) body: String,
    /// The current object, if the handler refetches it.
    pub(crate) current: Option<String>,
}

/// The app; it outlives the servers that call it.
pub(crate) struct App {
    pub(crate) address: SocketAddr,
    seen: Arc<Seen>,
}

#[derive(Default)]
struct Seen {
    calls: Mutex<Vec<Call>>,
    came: Condvar,
}

impl App {
    /// An app whose `answer` returns the status of each call. `answer` may block.
    pub(crate) fn new(answer: impl Fn(&Call) -> u16 + Send + Sync + 'static) -> Self {
        Self::saying(move |call| (answer(call), String::new()))
    }

    /// An app whose `answer` also returns a body.
    pub(crate) fn saying(answer: impl Fn(&Call) -> (u16, String) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::<Seen>::default();
        let (kept, answer) = (Arc::clone(&seen), Arc::new(answer));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (kept, answer) = (Arc::clone(&kept), Arc::clone(&answer));
                std::thread::spawn(move || serve(stream.unwrap(), &kept, &*answer));
            }
        });
        Self { address, seen }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/hooks", self.address)
    }

    pub(crate) fn calls(&self) -> Vec<Call> {
        self.seen.calls.lock().unwrap().clone()
    }

    /// Waits for that many calls in all.
    #[track_caller]
    pub(crate) fn wait_for(&self, calls: usize) -> Vec<Call> {
        let guard = self.seen.calls.lock().unwrap();
        let (guard, _) =
            self.seen.came.wait_timeout_while(guard, FOREVER, |seen| seen.len() < calls).unwrap();
        assert!(guard.len() >= calls, "only {} of {calls} calls came", guard.len());
        guard.clone()
    }

    /// The app's own ledger: the attempts under each key.
    pub(crate) fn ledger(&self) -> BTreeMap<String, Vec<Call>> {
        let mut ledger = BTreeMap::<String, Vec<Call>>::new();
        for call in self.calls() {
            ledger.entry(call.key.clone()).or_default().push(call);
        }
        ledger
    }
}

fn serve(stream: TcpStream, seen: &Seen, answer: &dyn Fn(&Call) -> (u16, String)) {
    let mut writer = stream.try_clone().unwrap();
    let mut reader = BufReader::new(stream);
    while let Some((head, body)) = next_request(&mut reader) {
        let call = Call {
            key: head["idempotency-key"].clone(),
            job: head["hapax-job"].clone(),
            fence: head["hapax-fence"].parse().unwrap(),
            attempt: head["hapax-attempt"].parse().unwrap(),
            body: String::from_utf8(body).unwrap(),
            current: head.get("hapax-current").cloned(),
        };
        seen.calls.lock().unwrap().push(call.clone());
        seen.came.notify_all();
        let (status, said) = answer(&call);
        let length = said.len();
        if write!(writer, "HTTP/1.1 {status} X\r\ncontent-length: {length}\r\n\r\n{said}").is_err()
        {
            return;
        }
    }
}

/// The headers and the body of the next request on a connection; `None` at its end.
pub(crate) fn next_request(
    reader: &mut BufReader<TcpStream>,
) -> Option<(BTreeMap<String, String>, Vec<u8>)> {
    let mut head = BTreeMap::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) == 0 {
            return None;
        }
        if line == "\r\n" {
            break;
        }
        if let Some((name, value)) = line.trim_end().split_once(": ") {
            head.insert(name.to_ascii_lowercase(), value.to_owned());
        }
    }
    let mut body = vec![0; head["content-length"].parse().unwrap()];
    reader.read_exact(&mut body).ok()?;
    Some((head, body))
}
