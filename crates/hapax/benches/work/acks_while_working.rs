//! Acks while handlers run: the latency of acks in an open loop at a third of the machine's
//! capacity, on a server whose handlers work or sleep, compared with a server without handlers.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::Options;
use crate::backlog::Puller;
use crate::effects::{Pair, Sent};
use crate::embedded::{self, Handling};
use crate::shared::WARM_UP;
use crate::shared::open::{self, Paced, Plan};
use crate::shared::server::{Server, Setup};

/// How long sleeping handlers sleep.
pub(crate) const NAP: Duration = Duration::from_secs(10);

/// How often the pull worker claims jobs, none of which it completes.
const PULL_EVERY: Duration = Duration::from_millis(200);

/// One kind of work, and the acks with and without it.
pub(crate) struct Beside {
    pub(crate) what: &'static str,
    pub(crate) per_second: f64,
    pub(crate) without: Paced,
    pub(crate) with: Paced,
    /// The amount of sleeping work: calls to an app, jobs that a worker holds, or naps of a
    /// handler.
    pub(crate) held: Option<usize>,
}

impl Beside {
    pub(crate) fn ratio(&self) -> f64 {
        self.with.measured.latency_us(0.99) / self.without.measured.latency_us(0.99)
    }
}

/// With SQL handlers, which share the writer with the acks.
pub(crate) async fn sql(options: &Options, pair: &Pair, per_second: f64) -> anyhow::Result<Beside> {
    let plan = plan(options, per_second);
    let (without, with) = by_turns(options, &pair.alone, &pair.working, plan).await?;
    pair.ledger.wait_for(pair.working.made()).await?;
    Ok(Beside { what: "an SQL handler", per_second, without, with, held: None })
}

/// With calls to an app that takes ten seconds for each.
pub(crate) async fn http(
    options: &Options,
    alone: &Sent,
    directory: &Path,
    per_second: f64,
) -> anyhow::Result<Beside> {
    let app = SleepyApp::start().await?;
    let handler = format!(
        "\n[sources.stripe.handlers.sleepy]\nhttp = \"http://{}/hooks\"\n\
         timeout = \"15s\"\nlease = \"40s\"\n",
        app.address
    );
    let setup = Setup { tables: handler, ..Setup::default() };
    let sleepy = Server::hapax(&options.place.hapax, &directory.join("http"), &setup)?;
    let plan = plan(options, per_second);
    let (without, with) = by_turns(options, alone, &Sent::to(sleepy), plan).await?;
    let held = app.calls.load(Ordering::Relaxed);
    ensure!(held > 0, "the app that should have slept was never called");
    let what = "an app that sleeps 10 s";
    Ok(Beside { what, per_second, without, with, held: Some(held) })
}

/// With a worker that claims jobs and never completes them.
pub(crate) async fn pull(
    options: &Options,
    alone: &Sent,
    directory: &Path,
    per_second: f64,
) -> anyhow::Result<Beside> {
    let setup = Setup { tables: Puller::HANDLER.to_owned(), ..Setup::default() };
    let sleepy = Server::hapax(&options.place.hapax, &directory.join("pull"), &setup)?;
    let admin = sleepy.admin()?;
    let held = Arc::new(AtomicUsize::new(0));
    let mut worker = JoinSet::new();
    let holds = Arc::clone(&held);
    worker.spawn(async move {
        let mut puller = Puller::connect(admin).await?;
        loop {
            holds.fetch_add(puller.claim().await?.jobs, Ordering::Relaxed);
            tokio::time::sleep(PULL_EVERY).await;
        }
        #[allow(unreachable_code, reason = "it says what may fail above")]
        anyhow::Ok(())
    });
    let plan = plan(options, per_second);
    let sleepy = Sent::to(sleepy);
    let (without, with) = tokio::select! {
        measured = by_turns(options, alone, &sleepy, plan) => measured?,
        Some(ended) = worker.join_next() => {
            ended.context("the worker panicked")??;
            anyhow::bail!("the worker ended");
        }
    };
    let held = held.load(Ordering::Relaxed);
    ensure!(held > 0, "the worker that should have slept never had a job");
    let what = "a worker that holds its claims";
    Ok(Beside { what, per_second, without, with, held: Some(held) })
}

/// With Rust handlers in an app that embeds Hapax; compared with the same app without them.
pub(crate) async fn rust(
    options: &Options,
    directory: &Path,
    per_second: f64,
) -> anyhow::Result<Beside> {
    let sleepy = directory.join("napping");
    let without = Sent::to(embedded::start(&directory.join("embedded"), Handling::Nothing)?);
    let with = Sent::to(embedded::start(&sleepy, Handling::Naps)?);
    let (without, with) = by_turns(options, &without, &with, plan(options, per_second)).await?;
    let held = Some(embedded::naps(&sleepy)?);
    Ok(Beside { what: "a Rust handler that sleeps 10 s", per_second, without, with, held })
}

fn plan(options: &Options, per_second: f64) -> Plan {
    Plan { per_second, time: Duration::from_secs_f64(options.seconds), warm_up: WARM_UP }
}

async fn by_turns(
    options: &Options,
    without: &Sent,
    with: &Sent,
    plan: Plan,
) -> anyhow::Result<(Paced, Paced)> {
    let mut first = open::run(&without.server, &without.events, plan).await?;
    let mut second = open::run(&with.server, &with.events, plan).await?;
    for _ in 1..options.rounds {
        first.join(open::run(&without.server, &without.events, plan).await?);
        second.join(open::run(&with.server, &with.events, plan).await?);
    }
    Ok((first, second))
}

/// An app behind an `http` handler that answers each call ten seconds later.
struct SleepyApp {
    address: SocketAddr,
    calls: Arc<AtomicUsize>,
    /// The tasks end when the set is dropped.
    _tasks: JoinSet<()>,
}

impl SleepyApp {
    async fn start() -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.context("listening")?;
        let address = listener.local_addr()?;
        let calls = Arc::new(AtomicUsize::new(0));
        let mut tasks = JoinSet::new();
        let counted = Arc::clone(&calls);
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let counted = Arc::clone(&counted);
                connections.spawn(async move {
                    // A caller that hangs up is ignored.
                    let _ = nap_for_each_call(stream, &counted).await;
                });
            }
        });
        Ok(Self { address, calls, _tasks: tasks })
    }
}

async fn nap_for_each_call(stream: TcpStream, calls: &AtomicUsize) -> std::io::Result<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let mut length = 0;
        loop {
            let mut line = String::new();
            if stream.read_line(&mut line).await? == 0 {
                return Ok(());
            }
            match line.trim_end().split_once(": ") {
                Some(("content-length", value)) => length = value.parse().unwrap_or(0),
                Some(_) => {}
                None if line.trim_end().is_empty() => break,
                None => {}
            }
        }
        stream.read_exact(&mut vec![0; length]).await?;
        calls.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(NAP).await;
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await?;
    }
}
