//! `hapax send`: realistic signed sample events, for a first try and for load. Every copy of an
//! event is the same bytes with the same signature, as a sender's retry would be.

use std::collections::BTreeMap;
use std::io::IsTerminal as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hapax_core::presets::{self, Preset};
use hapax_core::sample::{self, SampleId};
use hapax_core::secret::{ActiveSecret, Secret};
use hapax_core::source::SourceSpec;
use hapax_core::{Arrival, Source, Timestamp, Verified};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use indicatif::ProgressBar;
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;

use super::captured::{self, Identity};
use super::out::{self, Exit, Failure};
use crate::{config, signing};

/// How long one request may take: a server that answers later has not acked in any useful sense.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// The most of an answer that is read.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// The most events of one run: ids and bodies are made up as they are sent, but answers are counted.
const COUNT_MAX: u64 = 100_000_000;

/// Fewer requests than this are over before a bar is drawn.
const BAR_FROM: u64 = 50;

/// `hapax send`.
#[derive(Debug, clap::Args)]
pub(super) struct Send {
    /// Whose events: `hapax providers` lists them
    provider: String,
    /// The event type, such as payout.paid [default: one that this sender has]
    #[arg(value_name = "TYPE")]
    event_type: Option<String>,
    /// Where to: http://127.0.0.1:8080/webhooks/stripe
    #[arg(long, value_name = "URL")]
    to: String,
    #[command(flatten)]
    identity: Identity,
    /// How many distinct events
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=COUNT_MAX))]
    count: u64,
    /// How often each of them is sent
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    copies: u64,
    /// How many requests at once
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    concurrency: u64,
    /// The event id; with --count it gets a number at its end [default: a new one]
    #[arg(long, value_name = "ID")]
    id: Option<String>,
    /// Set a value in the JSON body before it is signed: /data/object/amount=10000
    #[arg(long = "set", value_name = "/POINTER=VALUE")]
    sets: Vec<String>,
    /// Sign as if it were then, in seconds since 1970 [default: the clock]
    #[arg(long, value_name = "UNIX", allow_negative_numbers = true)]
    now: Option<i64>,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

impl Send {
    pub(super) fn run(self) -> Result<Exit, Failure> {
        let plan = Plan::new(self)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| Failure::unreachable(format!("cannot start: {error}")))?;
        runtime.block_on(plan.run())
    }
}

/// Everything checked, nothing sent yet.
struct Plan {
    flags: Send,
    preset: &'static Preset,
    source: Source,
    sets: Vec<(String, serde_json::Value)>,
    uri: http::Uri,
    /// Makes ids of this run differ from those of any other.
    run: String,
}

/// One signed request, to be sent once or more.
struct Signed {
    event_id: String,
    request: Arrival,
}

/// What came back.
#[derive(Debug, Serialize)]
struct Answer {
    event_id: String,
    status: u16,
    decision: Option<String>,
    id: Option<String>,
}

/// What an answer's body says, as far as it is ours.
#[derive(Debug, Default, Deserialize)]
struct AnswerBody {
    decision: Option<String>,
    id: Option<String>,
}

/// Why there was no answer.
enum NoAnswer {
    CannotConnect(String),
    Lost(String),
}

pub(super) type HttpClient = Client<HttpsConnector<HttpConnector>, Full<Bytes>>;

impl Plan {
    fn new(flags: Send) -> Result<Self, Failure> {
        let preset = presets::find(&flags.provider).ok_or_else(|| {
            let hint = match presets::nearest(&flags.provider) {
                Some(near) => format!("did you mean \"{near}\"?"),
                None => "`hapax providers` lists them all".to_owned(),
            };
            Failure::usage(format!("unknown provider \"{}\"", out::shown(&flags.provider)), hint)
        })?;
        if !preset.can_sign() {
            return Err(Failure::usage(
                format!("events of {} cannot be signed here", preset.title),
                "only the sender has the private key",
            ));
        }
        let uri = target(&flags.to)?;
        let mut spec = flags.identity.spec(preset.name, true)?;
        take_dev_form(&mut spec, preset, &uri);
        let source = Source::build(spec).map_err(captured::cannot_build)?;
        let sets = flags.sets.iter().map(|text| set(text)).collect::<Result<_, _>>()?;
        let run = uuid::Uuid::now_v7().simple().to_string();
        Ok(Self { flags, preset, source, sets, uri, run })
    }

    async fn run(self) -> Result<Exit, Failure> {
        let client = client();
        let total = self.flags.count.saturating_mul(self.flags.copies);
        let mut tally = Tally::new(total, self.flags.json);
        let mut running = JoinSet::new();
        for number in 1..=self.flags.count {
            let signed = Arc::new(self.sign(number)?);
            for _copy in 0..self.flags.copies {
                if running.len() as u64 >= self.flags.concurrency
                    && let Some(answer) = running.join_next().await
                {
                    tally.take(answer)?;
                }
                running.spawn(post(client.clone(), self.uri.clone(), Arc::clone(&signed)));
            }
            if tally.cannot_connect.is_some() {
                break;
            }
        }
        while let Some(answer) = running.join_next().await {
            tally.take(answer)?;
        }
        tally.end()
    }

    fn sign(&self, number: u64) -> Result<Signed, Failure> {
        let refused = |problem: String| Failure::usage(problem, "see `hapax providers NAME`");
        let now: Timestamp = captured::now(self.flags.now)?;
        // The same id later today is the same event to the byte: a copy, not a conflict.
        let today =
            Timestamp::from_second(now.as_second().div_euclid(86_400) * 86_400).unwrap_or(now);
        let id = match (&self.flags.id, self.flags.count) {
            (Some(id), 1) => SampleId::exact(id, today),
            (Some(id), _) => SampleId::exact(format!("{id}-{number}"), today),
            (None, _) => SampleId::made_up(format!("{}{number:08}", self.run), now),
        };
        let event_type = self.flags.event_type.as_deref();
        let mut request =
            signing::sample(self.preset, event_type, &id, &self.flags.to).map_err(refused)?;
        request.body = self.changed(request.body)?;
        let signed = self.source.scheme().sign(&request, None, now);
        let signed = signed.map_err(|error| refused(error.to_string()))?;
        let request = signed.apply(&request).map_err(|error| refused(error.to_string()))?;
        Ok(Signed { event_id: self.event_id(&request, now), request })
    }

    /// The id that a receiver will read out of it.
    fn event_id(&self, request: &Arrival, now: Timestamp) -> String {
        match hapax_core::verify(&self.source, request, now) {
            Ok(Verified::Events { receipts, .. }) => {
                receipts.first().map(|receipt| receipt.key().event_id.to_string())
            }
            Ok(Verified::Reply(_)) | Err(_) => None,
        }
        .unwrap_or_default()
    }

    fn changed(&self, body: Bytes) -> Result<Bytes, Failure> {
        if self.sets.is_empty() {
            return Ok(body);
        }
        let no_json = |_| Failure::usage("--set needs a JSON body, which this sender has not", "");
        let mut json: serde_json::Value = serde_json::from_slice(&body).map_err(no_json)?;
        for (pointer, value) in &self.sets {
            sample::set(&mut json, pointer, value.clone()).map_err(|error| {
                Failure::usage(
                    format!("--set {pointer}: {error}"),
                    "a pointer such as /data/object/amount",
                )
            })?;
        }
        serde_json::to_vec(&json).map(Bytes::from).map_err(no_json)
    }
}

/// What has come back so far.
struct Tally {
    json: bool,
    bar: ProgressBar,
    started: Instant,
    by_outcome: BTreeMap<String, u64>,
    refused: u64,
    lost: Option<String>,
    cannot_connect: Option<String>,
}

impl Tally {
    fn new(total: u64, json: bool) -> Self {
        let seen = std::io::stderr().is_terminal() && total >= BAR_FROM;
        let bar = if seen { ProgressBar::new(total) } else { ProgressBar::hidden() };
        Self {
            json,
            bar,
            started: Instant::now(),
            by_outcome: BTreeMap::new(),
            refused: 0,
            lost: None,
            cannot_connect: None,
        }
    }

    fn take(
        &mut self,
        joined: Result<Result<Answer, NoAnswer>, tokio::task::JoinError>,
    ) -> Result<(), Failure> {
        self.bar.inc(1);
        let answered = joined
            .unwrap_or_else(|error| Err(NoAnswer::Lost(format!("a request broke down: {error}"))));
        match answered {
            Ok(answer) => {
                let ok = (200..300).contains(&answer.status);
                self.refused += u64::from(!ok);
                let outcome = match (&answer.decision, ok) {
                    (Some(decision), true) => decision.clone(),
                    (Some(_) | None, _) => format!("status {}", answer.status),
                };
                *self.by_outcome.entry(outcome).or_default() += 1;
                self.print(&answer)?;
            }
            Err(NoAnswer::CannotConnect(why)) => self.cannot_connect = Some(why),
            Err(NoAnswer::Lost(why)) => {
                *self.by_outcome.entry("no answer".to_owned()).or_default() += 1;
                self.lost = Some(why);
            }
        }
        Ok(())
    }

    fn print(&self, answer: &Answer) -> Result<(), Failure> {
        let Answer { event_id, status, decision, id } = answer;
        let decision = decision.as_deref().unwrap_or("-");
        let id = id.as_deref().unwrap_or("-");
        self.bar.suspend(|| {
            if self.json {
                out::json(answer)
            } else {
                out::data(&out::shown(&format!("{status} {decision} {id} {event_id}")))
            }
        })?;
        Ok(())
    }

    fn end(self) -> Result<Exit, Failure> {
        self.bar.finish_and_clear();
        let outcomes: Vec<String> =
            self.by_outcome.iter().map(|(outcome, count)| format!("{count} {outcome}")).collect();
        if !outcomes.is_empty() {
            let seconds = self.started.elapsed().as_secs_f64();
            out::words(&out::shown(&format!("{} in {seconds:.2} s", outcomes.join(", "))));
        }
        if let Some(why) = self.cannot_connect {
            return Err(Failure::unreachable(format!("cannot connect: {why}")));
        }
        if let Some(why) = &self.lost {
            out::error(&format!("no answer: {why}"));
        }
        Ok(if self.refused == 0 && self.lost.is_none() { Exit::Done } else { Exit::Negative })
    }
}

/// The connector resolves names itself and follows neither redirects nor proxies from the environment.
pub(super) fn client() -> HttpClient {
    let provider = rustls::crypto::aws_lc_rs::default_provider();
    let connector = hyper_rustls::HttpsConnectorBuilder::new()
        .with_provider_and_webpki_roots(provider)
        .expect("the provider's own protocol versions are consistent")
        .https_or_http()
        .enable_http1()
        .build();
    Client::builder(TokioExecutor::new()).build(connector)
}

async fn post(client: HttpClient, uri: http::Uri, signed: Arc<Signed>) -> Result<Answer, NoAnswer> {
    let lost = |why: String| NoAnswer::Lost(why);
    let mut request = http::Request::new(Full::new(signed.request.body.clone()));
    *request.method_mut() = signed.request.method.clone();
    *request.uri_mut() =
        if signed.request.url.is_empty() { uri } else { signed.request.url.parse().unwrap_or(uri) };
    *request.headers_mut() = signed.request.headers.clone();
    let exchange = async {
        let response = client.request(request).await.map_err(|error| {
            let why = chain(&error);
            if error.is_connect() { NoAnswer::CannotConnect(why) } else { NoAnswer::Lost(why) }
        })?;
        let (parts, body) = response.into_parts();
        let body = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
        let body = body.map_err(|error| lost(error.to_string()))?.to_bytes();
        let said: AnswerBody = serde_json::from_slice(&body).unwrap_or_default();
        let header = |name: &str| {
            parts.headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
        };
        Ok(Answer {
            event_id: signed.event_id.clone(),
            status: parts.status.as_u16(),
            decision: said.decision.or_else(|| header("hapax-decision")),
            id: said.id,
        })
    };
    match tokio::time::timeout(ANSWER_WITHIN, exchange).await {
        Ok(answer) => answer,
        Err(_) => Err(lost(format!("nothing within {} s", ANSWER_WITHIN.as_secs()))),
    }
}

pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

fn target(text: &str) -> Result<http::Uri, Failure> {
    let bad = || {
        Failure::usage(
            "--to is not an http or https URL",
            "such as http://127.0.0.1:8080/webhooks/stripe",
        )
    };
    let uri: http::Uri = text.parse().map_err(|_| bad())?;
    let known_scheme = matches!(uri.scheme_str(), Some("http" | "https"));
    if known_scheme && uri.host().is_some() { Ok(uri) } else { Err(bad()) }
}

/// Towards a dev server on this machine the dev secret need not be given, and where it is given as
/// it stands in its file (64 hex digits) it gets the form that this sender's secrets have.
fn take_dev_form(spec: &mut SourceSpec, preset: &Preset, uri: &http::Uri) {
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    let is_loopback = host == "localhost"
        || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback());
    if !is_loopback {
        return;
    }
    let data_dir = std::env::var("HAPAX_DATA_DIR").unwrap_or_else(|_| "hapax-data".to_owned());
    let given = spec.secrets.first().map(|active| active.secret.clone());
    let dev = given.or_else(|| config::dev_secret(Path::new(&data_dir)));
    let Some(dev) = dev.filter(config::looks_like_a_dev_secret) else { return };
    let own = Secret::new(signing::dev_secret(preset, dev.expose()));
    spec.secrets = vec![ActiveSecret::forever(own)];
    for (key, value) in signing::dev_params(preset, dev.expose()) {
        spec.params.entry(key).or_insert(value);
    }
}

/// `/pointer=value`; the value is JSON where it reads as JSON, and text otherwise.
fn set(text: &str) -> Result<(String, serde_json::Value), Failure> {
    match text.split_once('=') {
        Some((pointer, value)) if pointer.starts_with('/') => {
            let json = serde_json::from_str(value);
            let value = json.unwrap_or_else(|_| serde_json::Value::String(value.to_owned()));
            Ok((pointer.to_owned(), value))
        }
        Some(_) | None => Err(Failure::usage(
            "--set is not /POINTER=VALUE",
            "such as --set /data/object/amount=10000",
        )),
    }
}
