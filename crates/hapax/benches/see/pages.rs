//! A client that reads pages, one after the other or like open tabs.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use crate::shared::report::{Table, column};

/// How often an open tab asks for its page.
const TAB_EVERY: Duration = Duration::from_secs(2);

/// The pause between two pages of the reader: a person clicks no faster.
const PAUSE: Duration = Duration::from_millis(20);

/// A page, and how long each read of it took.
pub(crate) struct Page {
    name: &'static str,
    path: String,
    took: Vec<Duration>,
    bytes: usize,
}

impl Page {
    pub(crate) fn new(name: &'static str, path: String) -> Self {
        Self { name, path, took: Vec::new(), bytes: 0 }
    }

    fn ms(&self, share: f64) -> f64 {
        let mut sorted = self.took.clone();
        sorted.sort_unstable();
        let at = ((sorted.len() as f64 * share) as usize).min(sorted.len().saturating_sub(1));
        sorted.get(at).map_or(0.0, |took| took.as_secs_f64() * 1e3)
    }
}

/// The pages of one server.
pub(crate) struct Pages {
    admin: SocketAddr,
    pages: Vec<Page>,
}

/// A task that can be stopped.
pub(crate) struct Running<T> {
    stop: CancellationToken,
    task: JoinHandle<anyhow::Result<T>>,
}

impl<T> Running<T> {
    /// Stops the task and returns its result.
    pub(crate) async fn stop(self) -> anyhow::Result<T> {
        self.stop.cancel();
        self.task.await.context("it panicked")?
    }
}

impl Pages {
    pub(crate) fn new(admin: SocketAddr, pages: Vec<Page>) -> Self {
        Self { admin, pages }
    }

    /// Reads the pages in turn until it is stopped.
    pub(crate) fn read_in_background(mut self) -> Running<Self> {
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let task = tokio::spawn(async move {
            let mut client = Client::connect(self.admin).await?;
            while !stopped.is_cancelled() {
                for page in &mut self.pages {
                    let began = Instant::now();
                    let answer = client.get(&page.path, None).await?;
                    ensure!(answer.status == 200, "{}: {}", page.path, answer.status);
                    page.took.push(began.elapsed());
                    page.bytes = answer.body.len();
                    tokio::time::sleep(PAUSE).await;
                    if stopped.is_cancelled() {
                        break;
                    }
                }
            }
            Ok(self)
        });
        Running { stop, task }
    }

    pub(crate) fn table(&self) -> Table {
        let columns =
            [column("reads", 0), column("p50 ms", 1), column("p99 ms", 1), column("kB", 1)];
        let mut table = Table::new("pages and lists", columns);
        for page in &self.pages {
            let numbers =
                [page.took.len() as f64, page.ms(0.5), page.ms(0.99), page.bytes as f64 / 1e3];
            table.row(page.name, numbers.map(Some));
        }
        table
    }

    pub(crate) fn slowest_p99_ms(&self) -> f64 {
        self.pages.iter().map(|page| page.ms(0.99)).fold(0.0, f64::max)
    }
}

/// Tabs that show the overview and refresh it as the script does: with the tag of the last answer.
pub(crate) fn open_tabs(admin: SocketAddr, count: usize) -> Running<()> {
    let stop = CancellationToken::new();
    let stopped = stop.clone();
    let task = tokio::spawn(async move {
        let mut tabs = JoinSet::new();
        for tab in 0..count {
            let stopped = stopped.clone();
            tabs.spawn(async move {
                // Tabs were not opened at the same instant.
                tokio::time::sleep(TAB_EVERY.mul_f64(tab as f64 / count as f64)).await;
                let mut client = Client::connect(admin).await?;
                let mut tag: Option<String> = None;
                while !stopped.is_cancelled() {
                    let answer = client.get("/", tag.as_deref()).await?;
                    ensure!(matches!(answer.status, 200 | 304), "{}", answer.status);
                    tag = answer.tag.or(tag);
                    tokio::time::sleep(TAB_EVERY).await;
                }
                anyhow::Ok(())
            });
        }
        while let Some(ended) = tabs.join_next().await {
            ended.context("a tab panicked")??;
        }
        Ok(())
    });
    Running { stop, task }
}

/// The bytes that a browser loads for the overview: the page, its style and its script.
pub(crate) async fn first_page_bytes(admin: SocketAddr) -> anyhow::Result<usize> {
    let mut client = Client::connect(admin).await?;
    let page = client.get("/", None).await?.body;
    let text = String::from_utf8_lossy(&page);
    let mut bytes = page.len();
    for part in text.split('"').filter(|part| part.starts_with("/assets/")) {
        bytes += client.get(part, None).await?.body.len();
    }
    Ok(bytes)
}

struct Client {
    stream: TcpStream,
    host: SocketAddr,
}

struct Answer {
    status: u16,
    tag: Option<String>,
    body: Vec<u8>,
}

impl Client {
    async fn connect(host: SocketAddr) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(host).await.context("connecting")?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, host })
    }

    async fn get(&mut self, path: &str, tag: Option<&str>) -> anyhow::Result<Answer> {
        let tag = tag.map(|tag| format!("if-none-match: {tag}\r\n")).unwrap_or_default();
        let request = format!("GET {path} HTTP/1.1\r\nhost: {}\r\n{tag}\r\n", self.host);
        self.stream.write_all(request.as_bytes()).await.context("sending")?;
        let mut buffer = Vec::with_capacity(64 << 10);
        let head = loop {
            ensure!(self.stream.read_buf(&mut buffer).await? > 0, "the server hung up");
            if let Some(head) = buffer.windows(4).position(|window| window == b"\r\n\r\n") {
                break head;
            }
        };
        let text = String::from_utf8_lossy(&buffer[..head]).into_owned();
        let header = |name: &str| {
            text.lines().find_map(|line| {
                let (field, value) = line.split_once(": ")?;
                field.eq_ignore_ascii_case(name).then(|| value.to_owned())
            })
        };
        let status = text.split(' ').nth(1).and_then(|status| status.parse().ok());
        let length: usize = match status {
            Some(304) => 0,
            _other => header("content-length").context("no length")?.parse()?,
        };
        let mut body = buffer.split_off(head + 4);
        while body.len() < length {
            ensure!(self.stream.read_buf(&mut body).await? > 0, "the server hung up");
        }
        Ok(Answer { status: status.context("no status")?, tag: header("etag"), body })
    }
}
