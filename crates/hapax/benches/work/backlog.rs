//! The cost of a claim with a thousand jobs waiting and with a million: the same pull claims of 100
//! jobs over the admin API, in turn on two servers with different backlogs.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use crate::Options;
use crate::effects::Sent;
use crate::shared::load::{self, Length, Load};
use crate::shared::server::{Server, Setup};

/// Jobs in the small backlog.
pub(crate) const SMALL: u64 = 1_000;

/// The limit of one claim: the largest allowed.
const LIMIT: usize = 100;

/// Claims from one server before the other has its turn. These claims empty the small backlog.
const TURN: usize = SMALL as usize / LIMIT;

/// Connections that fill a backlog.
const FILLING: usize = 256;

/// The same number of claims from both backlogs.
pub(crate) struct Backlog {
    pub(crate) jobs: u64,
    pub(crate) small: Claims,
    pub(crate) large: Claims,
}

#[derive(Default)]
pub(crate) struct Claims {
    pub(crate) jobs: usize,
    pub(crate) time: Duration,
    pub(crate) cpu_seconds: f64,
    each_us: Vec<u128>,
}

impl Claims {
    pub(crate) fn us_per_job(&self) -> f64 {
        self.time.as_secs_f64() * 1e6 / self.jobs as f64
    }

    /// The server's own time, without the client and the machine's other work.
    pub(crate) fn cpu_us_per_job(&self) -> f64 {
        self.cpu_seconds * 1e6 / self.jobs as f64
    }

    /// The median of the claims.
    pub(crate) fn us_p50(&self) -> f64 {
        let mut sorted = self.each_us.clone();
        sorted.sort_unstable();
        sorted.get(sorted.len() / 2).map_or(0.0, |us| *us as f64)
    }
}

impl Backlog {
    pub(crate) fn ratio(&self) -> f64 {
        self.large.us_per_job() / self.small.us_per_job()
    }
}

pub(crate) async fn measure(options: &Options, directory: &Path) -> anyhow::Result<Backlog> {
    let setup = Setup { tables: Puller::HANDLER.to_owned(), ..Setup::default() };
    let hapax = &options.place.hapax;
    let small = Sent::to(Server::hapax(hapax, &directory.join("small"), &setup)?);
    let large = Sent::to(Server::hapax(hapax, &directory.join("large"), &setup)?);
    fill(&large, options.backlog).await?;
    let mut from_small = Puller::connect(small.server.admin()?).await?;
    let mut from_large = Puller::connect(large.server.admin()?).await?;
    let (mut small_claims, mut large_claims) = (Claims::default(), Claims::default());
    for _ in 0..options.claims.div_ceil(TURN) {
        fill(&small, SMALL).await?;
        take(&mut from_small, &small.server, &mut small_claims).await?;
        take(&mut from_large, &large.server, &mut large_claims).await?;
    }
    Ok(Backlog { jobs: options.backlog, small: small_claims, large: large_claims })
}

async fn fill(sent: &Sent, jobs: u64) -> anyhow::Result<()> {
    let length = Length::Events(jobs);
    load::run(&[&sent.server], &sent.events, Load::New, FILLING, length, None).await?;
    Ok(())
}

async fn take(puller: &mut Puller, server: &Server, claims: &mut Claims) -> anyhow::Result<()> {
    let before = server.usage()?;
    for _ in 0..TURN {
        let claimed = puller.claim().await?;
        ensure!(claimed.jobs == LIMIT, "a claim of {LIMIT} had {} jobs", claimed.jobs);
        claims.jobs += claimed.jobs;
        claims.time += claimed.time;
        claims.each_us.push(claimed.time.as_micros());
    }
    claims.cpu_seconds += server.usage()?.cpu_seconds - before.cpu_seconds;
    Ok(())
}

/// A worker that claims as much as it may and finishes nothing.
pub(crate) struct Puller {
    stream: TcpStream,
    request: Vec<u8>,
    buffer: Vec<u8>,
}

/// The result of one claim.
pub(crate) struct Claimed {
    pub(crate) jobs: usize,
    pub(crate) time: Duration,
}

impl Puller {
    /// The handler whose jobs it claims; they stay leased for longer than a run.
    pub(crate) const HANDLER: &str =
        "\n[sources.stripe.handlers.ship]\npull = true\nlease = \"1h\"\n";

    pub(crate) async fn connect(admin: SocketAddr) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(admin).await.context("connecting to the admin side")?;
        stream.set_nodelay(true)?;
        let body = format!(r#"{{"source":"stripe","handler":"ship","limit":{LIMIT}}}"#);
        let request = format!(
            "POST /api/v1/claims HTTP/1.1\r\nhost: {admin}\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        );
        Ok(Self { stream, request: request.into_bytes(), buffer: Vec::with_capacity(1 << 18) })
    }

    pub(crate) async fn claim(&mut self) -> anyhow::Result<Claimed> {
        let began = Instant::now();
        self.stream.write_all(&self.request).await.context("claiming")?;
        let body = load::answer(&mut self.stream, &mut self.buffer).await?;
        let time = began.elapsed();
        let mark = br#""fence":"#;
        let jobs = self.buffer[body].windows(mark.len()).filter(|at| at == mark).count();
        Ok(Claimed { jobs, time })
    }
}
