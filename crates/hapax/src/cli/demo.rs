//! `hapax demo`: shows a double charge. The command sends many concurrent copies of the same payouts to a
//! check-then-act handler and to a Hapax server, and prints both ledgers. Everything runs on loopback and in
//! a temporary directory.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::{Arrival, Timestamp, Verified, verify};
use hapax_storm::{
    EffectCounts, Probe, RequestOutcome, RequestSender, Sender, StormPlan, StormSize, check_reached,
};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use rusqlite::Connection;
use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::net::TcpListener;
use tokio::process::{Child, Command};
use tokio::task::JoinSet;

use super::admin_client;
use super::captured::SenderSecrets;
use super::output::{self, CommandFailure, Exit};
use super::sender::sender_like;
use super::storm::sqlite_rows;

/// The fee of each payout: 0.5 % of 10,000.
const FEE: u32 = 50;

/// The time between check and act: a bank takes this long to answer.
const BANK_DELAY: Duration = Duration::from_millis(20);

/// How long the server may take to start, and the effects to appear.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// The largest request body; samples are far smaller.
const BODY_BYTES_MAX: usize = 1 << 20;

/// The table of effects, for the naive handler and for the handler of Hapax. The table has no unique key, so
/// that a second fee is visible.
const TABLE: &str = "CREATE TABLE payout_fees (event_id TEXT, fee INTEGER)";

/// Lists the effects.
const EFFECTS: &str = "SELECT event_id FROM payout_fees";

/// `hapax demo`.
#[derive(Debug, clap::Args)]
pub(super) struct Demo {
    /// How many times the sender sends each payout
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=100))]
    copies: u64,
    /// Print one JSON object per ledger
    #[arg(long)]
    json: bool,
}

impl Demo {
    pub(super) fn run(self) -> Result<Exit, CommandFailure> {
        admin_client::run(self.run_story())
    }

    async fn run_story(self) -> Result<Exit, CommandFailure> {
        let folder = Folder::new()?;
        let secret = format!("whsec_{}", uuid::Uuid::now_v7().simple());
        let shape = StormSize {
            event_type: Some("payout.paid".to_owned()),
            events: 5,
            copies: self.copies,
            concurrency: 50,
            stale: false,
            forged: false,
            shuffle: false,
        };
        output::words(&format!(
            "Five payouts of 10,000 each; each costs a fee of {FEE}. The sender gets no answer in time and \
             sends each payout {} times at once.",
            self.copies
        ));
        let naive = Naive::start(&folder.0.join("naive.db"), &secret).await?;
        let hapax = Server::start(&folder.0, &secret).await?;
        let seed = Timestamp::now().as_nanosecond() as u64;
        let mut wrong = false;
        for (name, to, database) in [
            ("a handler that checks and then acts", &naive.url, folder.0.join("naive.db")),
            ("Hapax", &hapax.url, folder.0.join("data/hapax.db")),
        ] {
            let ledger = ChargedFees::of(name, to, &secret, &shape, seed, database).await?;
            self.print(&ledger)?;
            wrong |= name == "Hapax" && ledger.effects.values().any(|effects| *effects != 1);
        }
        Ok(if wrong { Exit::Negative } else { Exit::Done })
    }

    fn print(&self, ledger: &ChargedFees) -> Result<(), CommandFailure> {
        let charged = ledger.effects.values().sum::<u64>() * u64::from(FEE);
        let owed = ledger.effects.len() as u64 * u64::from(FEE);
        if self.json {
            output::json(&json!({
                "to": ledger.name,
                "requests": ledger.requests,
                "acked": ledger.acked,
                "fees": ledger.effects,
                "charged": charged,
                "owed": owed,
            }))?;
            return Ok(());
        }
        let ChargedFees { name, requests, acked, effects } = ledger;
        output::data(&format!("\nto {name}: {requests} requests, {acked} answered 200"))?;
        for (event_id, fees) in effects {
            output::data(&format!("  {event_id}  fee {FEE} × {fees}"))?;
        }
        let verdict = match charged.cmp(&owed) {
            std::cmp::Ordering::Equal => "which is right".to_owned(),
            std::cmp::Ordering::Greater | std::cmp::Ordering::Less => format!("instead of {owed}"),
        };
        output::data(&format!("  charged {charged}, {verdict}"))?;
        Ok(())
    }
}

/// The fees that one endpoint charged.
struct ChargedFees {
    name: &'static str,
    requests: usize,
    acked: usize,
    /// The number of fees of each payout.
    effects: BTreeMap<String, u64>,
}

impl ChargedFees {
    async fn of(
        name: &'static str,
        to: &str,
        secret: &str,
        shape: &StormSize,
        seed: u64,
        database: PathBuf,
    ) -> Result<Self, CommandFailure> {
        let sender = sender(to, secret)?;
        let plan = StormPlan::new(&sender, shape, seed, Timestamp::now())?;
        let request_sender = RequestSender::new(Arc::new(sender), shape.concurrency);
        let outcomes = request_sender.send(&plan, &plan.groups, &(Arc::new(|| {}) as _)).await?;
        let outcomes = check_reached(outcomes)?;
        let good = |status: u16| (200..300).contains(&status);
        let acked =
            |outcome: &&RequestOutcome| outcome.answer.as_ref().is_ok_and(|it| good(it.status));
        let ids: BTreeSet<&str> = plan.events.iter().map(|event| event.event_id.as_str()).collect();
        let probe = Probe::Rows(sqlite_rows(database, EFFECTS.to_owned()));
        let is_missing = |now: &EffectCounts| match now {
            EffectCounts::Each(effects) => ids.iter().any(|id| !effects.contains_key(*id)),
            EffectCounts::Count(_) => true,
        };
        let mut effects: BTreeMap<String, u64> =
            ids.iter().map(|id| ((*id).to_owned(), 0)).collect();
        if let EffectCounts::Each(read) = probe.settled(&ids, START_TIMEOUT, is_missing).await? {
            effects.extend(read);
        }
        Ok(Self {
            name,
            requests: outcomes.len(),
            acked: outcomes.iter().filter(acked).count(),
            effects,
        })
    }
}

fn sender(to: &str, secret: &str) -> Result<Sender, CommandFailure> {
    let identity =
        SenderSecrets { secrets: vec![secret.to_owned()], secret_file: None, params: Vec::new() };
    sender_like("stripe", &identity, to)
}

/// A temporary directory, removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Result<Self, CommandFailure> {
        let folder = std::env::temp_dir().join(format!("hapax-demo-{}", uuid::Uuid::now_v7()));
        std::fs::create_dir_all(folder.join("data")).map_err(|error| cannot("write", error))?;
        Ok(Self(folder))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn cannot(what: &str, error: impl std::fmt::Display) -> CommandFailure {
    CommandFailure::unreachable(format!("cannot {what} for the demo: {error}"))
}

fn table(path: &Path) -> Result<Connection, CommandFailure> {
    let open = || {
        let database = Connection::open(path)?;
        database.execute_batch(TABLE)?;
        Ok(database)
    };
    open().map_err(|error: rusqlite::Error| cannot("make a ledger", error))
}

/// A handler as many tutorials show it: it verifies, checks whether the event is known, then acts. Between
/// the check and the act another copy can pass the same check.
struct Naive {
    url: String,
    _served: JoinSet<()>,
}

impl Naive {
    async fn start(path: &Path, secret: &str) -> Result<Self, CommandFailure> {
        let database = Arc::new(Mutex::new(table(path)?));
        let listener =
            TcpListener::bind("127.0.0.1:0").await.map_err(|error| cannot("listen", error))?;
        let address = listener.local_addr().map_err(|error| cannot("listen", error))?;
        let url = format!("http://{address}/webhooks/stripe");
        let sender = Arc::new(sender(&url, secret)?);
        let mut served = JoinSet::new();
        served.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (database, sender) = (Arc::clone(&database), Arc::clone(&sender));
                let answer = service_fn(move |request| {
                    let (database, sender) = (Arc::clone(&database), Arc::clone(&sender));
                    async move { Ok::<_, Infallible>(check_then_act(&database, &sender, request).await) }
                });
                connections.spawn(async move {
                    let http = hyper::server::conn::http1::Builder::new();
                    let _ = http.serve_connection(TokioIo::new(stream), answer).await;
                });
            }
        });
        Ok(Self { url, _served: served })
    }
}

async fn check_then_act(
    database: &Mutex<Connection>,
    sender: &Sender,
    request: Request<Incoming>,
) -> Response<Full<Bytes>> {
    let answer = |status: StatusCode| {
        let mut response = Response::new(Full::new(Bytes::new()));
        *response.status_mut() = status;
        response
    };
    let (parts, body) = request.into_parts();
    let Ok(body) = Limited::new(body, BODY_BYTES_MAX).collect().await else {
        return answer(StatusCode::BAD_REQUEST);
    };
    let url = String::new();
    let (method, headers, body) = (parts.method, parts.headers, body.to_bytes());
    let arrival = Arrival { method, url, headers, body };
    let verified = verify(&sender.source, &arrival, Timestamp::now());
    let Ok(Verified::Events { receipts, .. }) = verified else {
        return answer(StatusCode::UNAUTHORIZED);
    };
    let Some(event_id) = receipts.first().map(|receipt| receipt.key().event_id.to_string()) else {
        return answer(StatusCode::BAD_REQUEST);
    };
    let known = database.lock().unwrap_or_else(PoisonError::into_inner).query_row(
        "SELECT count(*) FROM payout_fees WHERE event_id = ?1",
        [&event_id],
        |row| row.get::<_, i64>(0),
    );
    if known.is_ok_and(|known| known > 0) {
        return answer(StatusCode::OK);
    }
    tokio::time::sleep(BANK_DELAY).await;
    let charged = database
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .execute("INSERT INTO payout_fees VALUES (?1, ?2)", rusqlite::params![event_id, FEE]);
    answer(if charged.is_ok() { StatusCode::OK } else { StatusCode::INTERNAL_SERVER_ERROR })
}

/// A Hapax server: this binary, on free ports.
struct Server {
    url: String,
    _child: Child,
}

impl Server {
    async fn start(folder: &Path, secret: &str) -> Result<Self, CommandFailure> {
        drop(table(&folder.join("data/hapax.db"))?);
        let config = folder.join("hapax.toml");
        let text = format!(
            "listen = \"127.0.0.1:0\"\nadmin_listen = \"127.0.0.1:0\"\n\
             [sources.stripe]\nprovider = \"stripe\"\nsecrets = [\"{secret}\"]\n\
             [sources.stripe.handlers.charge-fee]\ntypes = [\"payout.*\"]\ntimeout = \"10s\"\n\
             sql = \"INSERT INTO payout_fees VALUES (:event_id, {FEE})\"\n"
        );
        std::fs::write(&config, text).map_err(|error| cannot("write", error))?;
        let binary = std::env::current_exe().map_err(|error| cannot("find Hapax", error))?;
        let mut command = Command::new(binary);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("HAPAX_") {
                command.env_remove(name);
            }
        }
        let mut child = command
            .args(["serve", "--config"])
            .arg(&config)
            .arg("--data-dir")
            .arg(folder.join("data"))
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| cannot("start Hapax", error))?;
        let stdout = child.stdout.take().ok_or_else(|| cannot("start Hapax", "no output"))?;
        let ready = tokio::time::timeout(START_TIMEOUT, ready(BufReader::new(stdout))).await;
        let Ok(Some(ingress)) = ready else {
            return Err(cannot("start Hapax", "it printed no ready line in time"));
        };
        Ok(Self { url: format!("{ingress}/webhooks/stripe"), _child: child })
    }
}

/// The ingress URL of the ready line.
async fn ready(stdout: BufReader<tokio::process::ChildStdout>) -> Option<String> {
    let mut lines = stdout.lines();
    while let Ok(Some(line)) = lines.next_line().await {
        if let Some(rest) = line.strip_prefix("hapax ready: ingress ") {
            return rest.split(' ').next().map(str::to_owned);
        }
    }
    None
}
