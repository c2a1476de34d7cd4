//! Publishing by API with one matching endpoint, against ingest with one job each: both write one row of content
//! and one of work, sync, and answer. Neither does the work: the endpoint's gate is closed, and no worker claims the
//! job.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::task::{JoinSet, LocalSet};

use crate::shared::events::Events;
use crate::shared::load::{self, Length, Load, Measured, us_since};
use crate::shared::report::Table;
use crate::shared::server::Server;
use crate::shared::{CONNECTIONS, WARM_UP};
use crate::sink::Sink;
use crate::{Options, server};

/// Messages have about this much data.
const DATA_BYTES: usize = 1024;

const ID_DIGITS: usize = 20;

/// A handler whose jobs no worker claims.
const ONE_JOB: &str = "\n[sources.stripe.handlers.ship]\npull = true\n";

/// What is published, and what the floor sends.
pub(crate) fn data() -> String {
    let filling = "x".repeat(DATA_BYTES - 40);
    format!("{{\"id\":\"inv_1\",\"object\":\"invoice\",\"note\":\"{filling}\"}}")
}

/// Both sides.
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
    let mut messages = Messages::default();
    let length = Length::Time(Duration::from_secs_f64(options.seconds));
    let mut measured = Publishing { ingest: Measured::default(), publish: Measured::default() };
    for _ in 0..options.rounds.max(1) {
        let (ingest, warm_up) = (&[&ingesting], Some(WARM_UP));
        measured
            .ingest
            .join(load::run(ingest, &events, Load::New, CONNECTIONS, length, warm_up).await?);
        measured.publish.join(messages.publish(&publishing, CONNECTIONS, length).await?);
    }
    Ok(measured)
}

/// Messages with ids that were never published.
#[derive(Default)]
pub(crate) struct Messages {
    next: Rc<Cell<u64>>,
}

/// What the connections of one slice share.
struct Slice {
    next: Rc<Cell<u64>>,
    left: Cell<u64>,
    until: Option<Instant>,
    latencies_us: RefCell<Vec<u32>>,
}

impl Messages {
    /// Publishes in a closed loop, one request in flight on each connection. Every answer must be a 2xx.
    pub(crate) async fn publish(
        &mut self,
        to: &Server,
        connections: usize,
        length: Length,
    ) -> anyhow::Result<Measured> {
        let (left, until) = match length {
            Length::Time(time) => (u64::MAX, Some(Instant::now() + time)),
            Length::Events(messages) => (messages, None),
        };
        let slice = Rc::new(Slice {
            next: Rc::clone(&self.next),
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
        let cpu_seconds = usage.cpu_seconds - before.cpu_seconds;
        Ok(Measured::new(seconds, cpu_seconds, usage, slice.latencies_us.take()))
    }
}

async fn client(mut stream: TcpStream, slice: Rc<Slice>) -> anyhow::Result<()> {
    let (mut request, id) = request(&stream)?;
    let mut buffer = Vec::with_capacity(4096);
    while slice.left.get() > 0 && slice.until.is_none_or(|until| Instant::now() < until) {
        slice.left.set(slice.left.get() - 1);
        let n = slice.next.get();
        slice.next.set(n + 1);
        request[id..id + ID_DIGITS].copy_from_slice(format!("{n:020}").as_bytes());
        let began = Instant::now();
        stream.write_all(&request).await.context("publishing")?;
        load::answer(&mut stream, &mut buffer).await?;
        slice.latencies_us.borrow_mut().push(us_since(began));
    }
    Ok(())
}

/// A request, and where in it the digits of the message's id are.
fn request(stream: &TcpStream) -> anyhow::Result<(Vec<u8>, usize)> {
    let digits = "0".repeat(ID_DIGITS);
    let body = format!("{{\"id\":\"msg_{digits}\",\"type\":\"bench.sent\",\"data\":{}}}", data());
    let head = format!(
        "POST /api/v1/messages HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n",
        stream.peer_addr()?,
        body.len()
    );
    let id = head.len() + "{\"id\":\"msg_".len();
    Ok(((head + &body).into_bytes(), id))
}
