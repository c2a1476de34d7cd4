//! Webhook endpoints as developers write them, correct and flawed, for the torture test to
//! distinguish. Each has a list of its effects and returns it at `GET /effects`.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};

use hapax_core::secret::{ActiveSecret, Secret};
use hapax_core::source::SourceSpec;
use hapax_core::{Arrival, Source, Timeliness, Timestamp, Verified};
use serde_json::{Value, json};

use super::FOREVER;

/// The flaw of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flaw {
    /// None: recognising the event and the effect are one step.
    None,
    /// Checks whether the event is known, and acts afterwards.
    ChecksThenActs,
    /// Acks some events and forgets them.
    Loses,
    /// Does not check signatures.
    TakesForged,
    /// Does not check the time.
    TakesStale,
    /// Does not check the time, and forgets events that are older than the window.
    ForgetsWithTheWindow,
    /// Returns an error now and then.
    Breaks,
    /// Asks every client to retry once, which is not a flaw.
    IsBusyAtFirst,
    /// Uses the signature as the id of the event.
    KnowsSignaturesOnly,
    /// Has an effect a second time, long after everything was answered.
    ActsAgainLater,
    /// Returns another id for every copy.
    SaysAnotherId,
    /// Answers every second arrival with 404.
    ForgetsWhatItKnows,
}

/// A running endpoint.
pub(crate) struct Endpoint {
    pub(crate) address: SocketAddr,
    state: Arc<State>,
}

struct State {
    flaw: Flaw,
    source: Source,
    base: String,
    kept: Mutex<Kept>,
    looked: Condvar,
}

#[derive(Default)]
struct Kept {
    /// The event id of each request, in order of arrival. A request that does not verify has an
    /// empty id.
    came: Vec<String>,
    seen: BTreeSet<String>,
    /// How many requests have looked for each event and not found it.
    unseen: BTreeMap<String, usize>,
    effects: Vec<String>,
    reads: usize,
}

/// One request as it was received.
struct Request {
    arrival: Arrival,
    signature: String,
}

/// An event that the endpoint accepts.
struct Taken {
    event_id: String,
    late: bool,
}

impl Endpoint {
    /// An endpoint for Stripe events.
    pub(crate) fn new(flaw: Flaw, secret: &str) -> Self {
        let secrets = vec![ActiveSecret::forever(Secret::new(secret))];
        Self::of(flaw, SourceSpec::new("test", "stripe", secrets))
    }

    pub(crate) fn of(flaw: Flaw, spec: SourceSpec) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(State {
            flaw,
            source: Source::build(spec).unwrap(),
            base: format!("http://{address}"),
            kept: Mutex::default(),
            looked: Condvar::new(),
        });
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let state = Arc::clone(&shared);
                std::thread::spawn(move || state.serve(stream.unwrap()));
            }
        });
        Self { address, state }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/hooks", self.address)
    }

    pub(crate) fn effects_url(&self) -> String {
        format!("http://{}/effects", self.address)
    }

    /// The events in the order of their arrival.
    pub(crate) fn came(&self) -> Vec<String> {
        self.state.kept.lock().unwrap().came.clone()
    }

    pub(crate) fn effects(&self) -> Vec<String> {
        self.state.kept.lock().unwrap().effects.clone()
    }
}

/// Serves the current value of `what` as JSON; returns its URL.
pub(crate) fn serve_json(what: impl Fn() -> Value + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/effects", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut reader = BufReader::new(stream.unwrap());
            let mut line = String::new();
            while reader.read_line(&mut line).is_ok_and(|read| read > 2) {
                line.clear();
            }
            let body = what().to_string();
            let length = body.len();
            let head = format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {length}");
            let _ = write!(reader.get_mut(), "{head}\r\n\r\n{body}");
        }
    });
    url
}

impl State {
    fn serve(&self, stream: TcpStream) {
        let mut writer = stream.try_clone().unwrap();
        let mut reader = BufReader::new(stream);
        while let Some(request) = self.read(&mut reader) {
            let (status, body) = match request.arrival.method == http::Method::GET {
                true => (200, self.effects_json()),
                false => self.answer(&request),
            };
            let body = body.to_string();
            let retry = if status == 503 { "retry-after: 0\r\n" } else { "" };
            let _ = write!(
                writer,
                "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{retry}\
                 content-length: {}\r\n\r\n{body}",
                body.len()
            );
        }
    }

    fn read(&self, reader: &mut BufReader<TcpStream>) -> Option<Request> {
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|read| *read > 0)?;
        let mut words = line.split(' ').map(str::to_owned);
        let (method, path) = (words.next()?, words.next()?);
        let mut arrival = Arrival {
            method: method.parse().ok()?,
            url: format!("{}{path}", self.base),
            headers: http::HeaderMap::new(),
            body: bytes::Bytes::new(),
        };
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).ok().filter(|read| *read > 0)?;
            let Some((name, value)) = line.trim_end().split_once(':') else { break };
            let name: http::HeaderName = name.parse().ok()?;
            arrival.headers.append(name, value.trim().parse().ok()?);
        }
        let header = |name: &str| {
            let value = arrival.headers.get(name)?.to_str().ok()?;
            Some(value.to_owned())
        };
        let signature = header("stripe-signature").unwrap_or_default();
        let length = header("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
        let mut body = vec![0; length];
        reader.read_exact(&mut body).ok()?;
        arrival.body = body.into();
        Some(Request { arrival, signature })
    }

    fn effects_json(&self) -> Value {
        let mut kept = self.kept.lock().unwrap();
        kept.reads += 1;
        if self.flaw == Flaw::ActsAgainLater && kept.reads == 5 {
            let again = kept.effects[0].clone();
            kept.effects.push(again);
        }
        json!(kept.effects)
    }

    fn answer(&self, request: &Request) -> (u16, Value) {
        let Some(Taken { event_id, late }) = self.taken(request) else {
            self.kept.lock().unwrap().came.push(String::new());
            return (401, json!({ "error": "no" }));
        };
        let mut kept = self.kept.lock().unwrap();
        kept.came.push(event_id.clone());
        let number = kept.came.len();
        let key = match self.flaw {
            Flaw::KnowsSignaturesOnly => request.signature.clone(),
            Flaw::ForgetsWithTheWindow if late => format!("{event_id} late"),
            _other => event_id.clone(),
        };
        match self.flaw {
            Flaw::Breaks if number.is_multiple_of(7) => return (500, json!({})),
            Flaw::IsBusyAtFirst if kept.unseen.insert(event_id.clone(), 1).is_none() => {
                return (503, json!({}));
            }
            Flaw::ForgetsWhatItKnows if kept.seen.contains(&key) => return (404, json!({})),
            Flaw::ChecksThenActs if !kept.seen.contains(&key) => {
                // Widens the gap between check and act: this request waits until another copy has
                // checked too.
                *kept.unseen.entry(key.clone()).or_default() += 1;
                self.looked.notify_all();
                let alone = |kept: &mut Kept| kept.unseen[&key] < 2;
                kept = self.looked.wait_timeout_while(kept, FOREVER, alone).unwrap().0;
                kept.seen.insert(key);
                kept.effects.push(event_id);
            }
            Flaw::Loses if event_id.ends_with(['0', '1', '2', '3', '4', '5', '6', '7']) => {}
            _other => {
                if kept.seen.insert(key) {
                    kept.effects.push(event_id);
                }
            }
        }
        match self.flaw {
            Flaw::SaysAnotherId => {
                (200, json!({ "decision": "duplicate", "id": format!("row {number}") }))
            }
            _other => (200, json!({ "received": true })),
        }
    }

    /// The event of a request that counts as genuine.
    fn taken(&self, request: &Request) -> Option<Taken> {
        if self.flaw == Flaw::TakesForged {
            let body: Value = serde_json::from_slice(&request.arrival.body).ok()?;
            let event_id = body["id"].as_str()?.to_owned();
            return Some(Taken { event_id, late: false });
        }
        let verified = hapax_core::verify(&self.source, &request.arrival, Timestamp::now());
        let Ok(Verified::Events { receipts, .. }) = verified else { return None };
        let receipt = receipts.first()?;
        let late = matches!(receipt.timeliness(), Timeliness::Late { .. });
        let takes_stale = matches!(self.flaw, Flaw::TakesStale | Flaw::ForgetsWithTheWindow);
        (!late || takes_stale).then(|| Taken { event_id: receipt.key().event_id.to_string(), late })
    }
}
