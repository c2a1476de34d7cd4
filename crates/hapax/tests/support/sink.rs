//! A customer's endpoint, which deliveries are posted to. The endpoint records every request as it was
//! received, and answers as the test says. The endpoint outlives the servers that call it.

use std::collections::BTreeMap;
use std::io::{BufReader, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Condvar, Mutex};

use hapax_core::secret::{ActiveSecret, Secret};
use hapax_core::source::SourceSpec;
use hapax_core::{Arrival, Source, Timestamp, verify};

use super::FOREVER;
use super::app::next_request;

/// One delivery as the endpoint got it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Got {
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: Vec<u8>,
}

impl Got {
    pub(crate) fn id(&self) -> String {
        self.headers["webhook-id"].clone()
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    /// Whether our own `verify` accepts it with this secret or public key.
    pub(crate) fn verifies(&self, secret: &str) -> bool {
        self.verifies_as("standard", secret)
    }

    /// Checks the signature as a receiver that expects this kind of signature.
    pub(crate) fn verifies_as(&self, signing: &str, secret: &str) -> bool {
        let secrets = vec![ActiveSecret::forever(Secret::new(secret))];
        let mut spec = SourceSpec::new("sink", "standardwebhooks", secrets);
        spec.params.insert("signing".to_owned(), signing.to_owned());
        let source = Source::build(spec).unwrap();
        let mut headers = http::HeaderMap::new();
        for (name, value) in &self.headers {
            let name: http::HeaderName = name.parse().unwrap();
            headers.insert(name, value.parse().unwrap());
        }
        let body = self.body.clone().into();
        let arrival = Arrival { method: http::Method::POST, url: String::new(), headers, body };
        verify(&source, &arrival, Timestamp::now()).is_ok()
    }
}

/// The endpoint.
pub(crate) struct Sink {
    pub(crate) address: SocketAddr,
    seen: Arc<Seen>,
}

#[derive(Default)]
struct Seen {
    got: Mutex<Vec<Got>>,
    came: Condvar,
}

impl Sink {
    /// A sink whose `answer` gets each delivery and the number of deliveries before it. `answer`
    /// returns the status line and further headers, such as `503 X\r\nretry-after: 1`.
    pub(crate) fn new(answer: impl Fn(&Got, usize) -> String + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::<Seen>::default();
        let (kept, answer) = (Arc::clone(&seen), Arc::new(answer));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (kept, answer) = (Arc::clone(&kept), Arc::clone(&answer));
                std::thread::spawn(move || {
                    let stream = stream.unwrap();
                    let mut writer = stream.try_clone().unwrap();
                    let mut reader = BufReader::new(stream);
                    while let Some((headers, body)) = next_request(&mut reader) {
                        let got = Got { headers, body };
                        let before = {
                            let mut all = kept.got.lock().unwrap();
                            all.push(got.clone());
                            all.len() - 1
                        };
                        let said = answer(&got, before);
                        kept.came.notify_all();
                        let length = "content-length: 2\r\n\r\nok";
                        if write!(writer, "HTTP/1.1 {said}\r\n{length}").is_err() {
                            return;
                        }
                    }
                });
            }
        });
        Self { address, seen }
    }

    /// A sink that accepts everything.
    pub(crate) fn accepting() -> Self {
        Self::new(|_, _| "200 OK".to_owned())
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/in", self.address)
    }

    pub(crate) fn got(&self) -> Vec<Got> {
        self.seen.got.lock().unwrap().clone()
    }

    /// Waits until the deliveries satisfy `enough`.
    #[track_caller]
    pub(crate) fn wait_until(&self, what: &str, enough: impl Fn(&[Got]) -> bool) -> Vec<Got> {
        let guard = self.seen.got.lock().unwrap();
        let (guard, _) =
            self.seen.came.wait_timeout_while(guard, FOREVER, |got| !enough(got)).unwrap();
        assert!(enough(&guard), "{what}: {} deliveries came", guard.len());
        guard.clone()
    }

    /// Waits for that many deliveries in all.
    #[track_caller]
    pub(crate) fn wait_for(&self, count: usize) -> Vec<Got> {
        self.wait_until(&format!("{count} deliveries"), |got| got.len() >= count)
    }
}
