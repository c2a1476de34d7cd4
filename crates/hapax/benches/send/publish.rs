//! Publishing by API with one matching endpoint, against ingest with one job each: both write one row of content
//! and one of work, sync, and answer. The work itself is not done: the endpoint's gate is closed,
//! and no worker claims the job.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::ops::Range;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::task::{JoinSet, LocalSet};

use crate::shared::events::{Events, after, write_digits};
use crate::shared::load::{self, Length, Load, Measured, us_since};
use crate::shared::open::Requests;
use crate::shared::report::Table;
use crate::shared::server::Server;
use crate::shared::{CONNECTIONS, WARM_UP};
use crate::sink::Sink;
use crate::{Options, server};

/// Messages have about this much data.
const DATA_BYTES: usize = 1024;

const ID_DIGITS: usize = 20;
const TYPE_DIGITS: usize = 4;
const TIME_DIGITS: usize = 16;

/// The text that precedes the time in the data of a message.
pub(crate) const AT: &str = "\"at\":\"";

/// The distance between the two messages of a key. When the first message fails, the second one is due
/// before the retry.
pub(crate) const KEYS_APART: u64 = 1_000;

/// A handler whose jobs no worker claims.
const ONE_JOB: &str = "\n[sources.stripe.handlers.ship]\npull = true\n";

/// The data of the messages that are published and that the floor sends.
pub(crate) fn data() -> String {
    let filling = "x".repeat(DATA_BYTES - 40);
    format!("{{\"id\":\"inv_1\",\"object\":\"invoice\",\"note\":\"{filling}\"}}")
}

/// The results of both sides.
pub(crate) struct Publishing {
    ingest: Measured,
    publish: Measured,
}

impl Publishing {
    pub(crate) fn ratio(&self) -> f64 {
        self.publish.per_second() / self.ingest.per_second()
    }

    pub(crate) fn table(&self) -> Table {
        let mut table = Table::of_loads("publishing, 64 connections", []);
        table.load("ingest with one job each", &self.ingest, None, []);
        table.load("publish with one delivery each", &self.publish, Some(&self.ingest), []);
        table
    }
}

pub(crate) async fn measure(options: &Options, directory: &Path) -> anyhow::Result<Publishing> {
    let sink = Sink::start()?;
    sink.close().await?;
    let publishing = server(options, &directory.join("publish"), None, "")?;
    sink.add_to(&publishing, 1).await?;
    let ingesting = server(options, &directory.join("one-job"), None, ONE_JOB)?;
    let events = Rc::new(RefCell::new(Events::new(0)));
    let messages = Rc::new(RefCell::new(Messages::default()));
    let length = Length::Time(Duration::from_secs_f64(options.seconds));
    let mut measured = Publishing { ingest: Measured::default(), publish: Measured::default() };
    for _ in 0..options.rounds.max(1) {
        let (ingest, warm_up) = (&[&ingesting], Some(WARM_UP));
        measured
            .ingest
            .join(load::run(ingest, &events, Load::New, CONNECTIONS, length, warm_up).await?);
        let published = Messages::publish(&messages, &publishing, CONNECTIONS, length).await?;
        measured.publish.join(published);
    }
    Ok(measured)
}

/// Messages with ids that were never published.
pub(crate) struct Messages {
    next: u64,
    body: String,
    /// The position of the message's id in the body.
    id: usize,
    /// The position of the type's number in the body, and the numbers of the types, which are used
    /// in turn.
    type_number: Option<(usize, Range<u64>)>,
    /// The position of the key in the body.
    key: Option<usize>,
    /// The position of the request's time, in microseconds since 1970.
    at: Option<usize>,
}

impl Default for Messages {
    fn default() -> Self {
        Self::laid_out("\"type\":\"bench.sent\"", &data())
    }
}

impl Messages {
    /// Messages of the types that [`numbered_type`] names, in turn. Their data says when they were published.
    pub(crate) fn of_types(numbers: Range<u64>) -> Self {
        let data = data().replacen('{', &format!("{{{AT}{}\",", "0".repeat(TIME_DIGITS)), 1);
        let type_ = numbered_type(0);
        let mut messages = Self::laid_out(&format!("\"type\":\"{type_}\""), &data);
        let place = after(&messages.body, "\"type\":\"") + type_.len() - TYPE_DIGITS;
        messages.type_number = Some((place, numbers));
        messages.at = Some(after(&messages.body, AT));
        messages
    }

    /// Messages of that tenant, two under each key.
    pub(crate) fn keyed(tenant: &str) -> Self {
        let digits = "0".repeat(ID_DIGITS);
        let head = format!("\"tenant\":\"{tenant}\",\"type\":\"bench.sent\",\"key\":\"{digits}\"");
        let mut messages = Self::laid_out(&head, &data());
        messages.key = Some(after(&messages.body, "\"key\":\""));
        messages
    }

    /// How many messages of these types were made.
    pub(crate) fn made_of_types(&self, of: Range<u64>) -> u64 {
        let Some((_, numbers)) = &self.type_number else { return 0 };
        let types = numbers.end - numbers.start;
        let made =
            |number| self.next / types + u64::from(number - numbers.start < self.next % types);
        of.filter(|number| numbers.contains(number)).map(made).sum()
    }

    fn laid_out(head: &str, data: &str) -> Self {
        let digits = "0".repeat(ID_DIGITS);
        let body = format!("{{\"id\":\"msg_{digits}\",{head},\"data\":{data}}}");
        let id = after(&body, "{\"id\":\"msg_");
        Self { next: 0, body, id, type_number: None, key: None, at: None }
    }

    /// Publishes in a closed loop, one request in flight on each connection. Every answer must be a 2xx.
    pub(crate) async fn publish(
        messages: &Rc<RefCell<Self>>,
        to: &Server,
        connections: usize,
        length: Length,
    ) -> anyhow::Result<Measured> {
        let (left, until) = match length {
            Length::Time(time) => (u64::MAX, Some(Instant::now() + time)),
            Length::Events(messages) => (messages, None),
        };
        let slice = Rc::new(Slice {
            messages: Rc::clone(messages),
            left: Cell::new(left),
            until,
            latencies_us: RefCell::default(),
        });
        let (before, began) = (to.usage()?, Instant::now());
        let here = LocalSet::new();
        let mut clients = JoinSet::new();
        for _ in 0..connections {
            let stream = TcpStream::connect(to.admin()?).await.context("connecting")?;
            stream.set_nodelay(true)?;
            clients.spawn_local_on(client(stream, Rc::clone(&slice)), &here);
        }
        here.run_until(async {
            while let Some(ended) = clients.join_next().await {
                ended.context("a client panicked")??;
            }
            anyhow::Ok(())
        })
        .await?;
        let (usage, seconds) = (to.usage()?, began.elapsed().as_secs_f64());
        Ok(Measured::new(seconds, before, usage, slice.latencies_us.take()))
    }
}

impl Requests for Messages {
    fn blank(&self, to: SocketAddr) -> Vec<u8> {
        let head = format!(
            "POST /api/v1/messages HTTP/1.1\r\nhost: {to}\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n",
            self.body.len()
        );
        (head + &self.body).into_bytes()
    }

    fn renew(&mut self, request: &mut [u8]) {
        let n = self.next;
        self.next += 1;
        let body = request.len() - self.body.len();
        let mut write = |place: usize, digits: usize, number| {
            write_digits(&mut request[body + place..][..digits], number);
        };
        write(self.id, ID_DIGITS, n);
        if let Some((place, numbers)) = &self.type_number {
            write(*place, TYPE_DIGITS, numbers.start + n % (numbers.end - numbers.start));
        }
        if let Some(place) = self.key {
            write(place, ID_DIGITS, key_of(n));
        }
        if let Some(place) = self.at {
            write(place, TIME_DIGITS, unix_us());
        }
    }
}

/// A type that one endpoint wants.
pub(crate) fn numbered_type(number: u64) -> String {
    format!("bench.{number:0TYPE_DIGITS$}")
}

/// The key of a message with that number: the second message of a key comes [`KEYS_APART`] messages after the first.
pub(crate) fn key_of(n: u64) -> u64 {
    n / (2 * KEYS_APART) * KEYS_APART + n % KEYS_APART
}

/// Whether the message with that number is the first one of its key.
pub(crate) fn is_first_of_key(n: u64) -> bool {
    (n / KEYS_APART).is_multiple_of(2)
}

/// The wall clock: publisher and endpoint are processes of the same machine.
pub(crate) fn unix_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

/// The state that the connections of one slice share.
struct Slice {
    messages: Rc<RefCell<Messages>>,
    left: Cell<u64>,
    until: Option<Instant>,
    latencies_us: RefCell<Vec<u32>>,
}

async fn client(mut stream: TcpStream, slice: Rc<Slice>) -> anyhow::Result<()> {
    let mut request = slice.messages.borrow().blank(stream.peer_addr()?);
    let mut buffer = Vec::with_capacity(4096);
    while slice.left.get() > 0 && slice.until.is_none_or(|until| Instant::now() < until) {
        slice.left.set(slice.left.get() - 1);
        slice.messages.borrow_mut().renew(&mut request);
        let began = Instant::now();
        stream.write_all(&request).await.context("publishing")?;
        load::answer(&mut stream, &mut buffer).await?;
        slice.latencies_us.borrow_mut().push(us_since(began));
    }
    Ok(())
}
