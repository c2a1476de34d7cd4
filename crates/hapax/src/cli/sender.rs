//! The simulated sender of `send` and `storm`: signs sample events and posts them to an endpoint. The
//! other commands share its HTTP client.

use std::io::IsTerminal as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::presets::{self, Preset};
use hapax_core::sample::SampleId;
use hapax_core::secret::ActiveSecret;
use hapax_core::source::SourceSpec;
use hapax_core::{Arrival, Source, Timestamp, Verified};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use indicatif::ProgressBar;
use serde::{Deserialize, Serialize};

use super::captured::{self, Identity};
use super::output::{self, Failure};
use crate::{config, signing};

/// The timeout of one request; most senders give up earlier.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// The largest answer that is read.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// Fewer requests than this get no progress bar.
const BAR_FROM: u64 = 50;

pub(super) type HttpClient = Client<HttpsConnector<HttpConnector>, Full<Bytes>>;

/// A sender and the endpoint it posts to.
pub(super) struct Sender {
    pub(super) preset: &'static Preset,
    pub(super) source: Source,
    spec: SourceSpec,
    to: String,
    uri: http::Uri,
}

/// A signed request; copies share it.
#[derive(Debug)]
pub(super) struct Signed {
    pub(super) event_id: String,
    pub(super) request: Arrival,
}

/// The answer to one request.
#[derive(Debug, Serialize)]
pub(super) struct Answer {
    pub(super) event_id: String,
    pub(super) status: u16,
    pub(super) decision: Option<String>,
    pub(super) id: Option<String>,
    /// The reason for a refusal, if the answer has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reason: Option<String>,
    /// The Retry-After header, if it is in seconds.
    #[serde(skip)]
    pub(super) retry_after: Option<Duration>,
}

/// The fields of an answer's body that are used here.
#[derive(Debug, Default, Deserialize)]
struct AnswerBody {
    decision: Option<String>,
    id: Option<String>,
    /// From a problem (RFC 9457).
    title: Option<String>,
    detail: Option<String>,
}

/// Why there was no answer.
#[derive(Debug)]
pub(super) enum NoAnswer {
    CannotConnect(String),
    Lost(String),
}

impl Sender {
    pub(super) fn new(provider: &str, identity: &Identity, to: &str) -> Result<Self, Failure> {
        let preset = presets::find(provider).ok_or_else(|| {
            let hint = match presets::nearest(provider) {
                Some(near) => format!("did you mean \"{near}\"?"),
                None => "`hapax providers` lists all senders".to_owned(),
            };
            Failure::usage(format!("unknown provider \"{}\"", output::shown(provider)), hint)
        })?;
        if !preset.can_sign() {
            return Err(Failure::usage(
                format!("cannot sign events of {}", preset.title),
                "only the sender has the private key",
            ));
        }
        let uri = target("--to", to)?;
        let mut spec = identity.spec(preset.name, true)?;
        find_dev_secret(&mut spec, preset, &uri);
        let source = Source::build(spec.clone()).map_err(captured::cannot_build)?;
        Ok(Self { preset, source, spec, to: to.to_owned(), uri })
    }

    /// The same sender with a random secret instead of the real one; `None` if this preset's secrets
    /// cannot be random.
    pub(super) fn impostor(&self, random: &[u8; 32]) -> Option<Source> {
        let mut spec = self.spec.clone();
        spec.secrets = vec![ActiveSecret::forever(self.preset.secret_from(random)?)];
        Source::build(spec).ok()
    }

    /// An unsigned sample event of this sender.
    pub(super) fn sample(
        &self,
        event_type: Option<&str>,
        id: &SampleId,
    ) -> Result<Arrival, Failure> {
        signing::sample(self.preset, event_type, id, &self.to).map_err(refused)
    }

    /// Signs `request` as of `now`.
    pub(super) fn sign(&self, request: &Arrival, now: Timestamp) -> Result<Signed, Failure> {
        let request = sign_as(&self.source, request, now)?;
        Ok(Signed { event_id: self.event_id(&request, now), request })
    }

    /// The event id that a receiver extracts from the request.
    fn event_id(&self, request: &Arrival, now: Timestamp) -> String {
        match hapax_core::verify(&self.source, request, now) {
            Ok(Verified::Events { receipts, .. }) => {
                receipts.first().map(|receipt| receipt.key().event_id.to_string())
            }
            Ok(Verified::Reply(_) | Verified::Empty) | Err(_) => None,
        }
        .unwrap_or_default()
    }

    /// Posts a request; the future can be spawned.
    pub(super) fn post(
        &self,
        client: &HttpClient,
        signed: &Arc<Signed>,
    ) -> impl Future<Output = Result<Answer, NoAnswer>> + Send + use<> {
        post(client.clone(), self.uri.clone(), Arc::clone(signed))
    }
}

/// Signs `request` with the first secret of `source`.
pub(super) fn sign_as(
    source: &Source,
    request: &Arrival,
    now: Timestamp,
) -> Result<Arrival, Failure> {
    let signed = source.scheme().sign(request, None, now);
    let signed = signed.map_err(|error| refused(error.to_string()))?;
    signed.apply(request).map_err(|error| refused(error.to_string()))
}

fn refused(problem: String) -> Failure {
    Failure::usage(problem, "see `hapax providers NAME`")
}

/// A progress bar, if stderr is a terminal and there are enough requests.
pub(super) fn bar(requests: u64) -> ProgressBar {
    let seen = std::io::stderr().is_terminal() && requests >= BAR_FROM;
    if seen { ProgressBar::new(requests) } else { ProgressBar::hidden() }
}

/// An HTTP client that follows no redirects and uses no proxy from the environment.
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
        let body: AnswerBody = serde_json::from_slice(&body).unwrap_or_default();
        let header = |name: &str| {
            parts.headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
        };
        Ok(Answer {
            event_id: signed.event_id.clone(),
            status: parts.status.as_u16(),
            decision: body.decision.or_else(|| header("hapax-decision")),
            id: body.id,
            reason: match parts.status.is_success() {
                true => None,
                false => body.detail.or(body.title),
            },
            retry_after: header("retry-after")
                .and_then(|text| text.trim().parse().ok())
                .map(Duration::from_secs),
        })
    };
    match tokio::time::timeout(ANSWER_TIMEOUT, exchange).await {
        Ok(answer) => answer,
        Err(_) => Err(lost(format!("no answer within {} s", ANSWER_TIMEOUT.as_secs()))),
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

pub(super) fn target(flag: &str, text: &str) -> Result<http::Uri, Failure> {
    let bad = || {
        Failure::usage(
            format!("{flag} is not an http or https URL"),
            "write it as http://127.0.0.1:8080/webhooks/stripe",
        )
    };
    let uri: http::Uri = text.parse().map_err(|_| bad())?;
    let known_scheme = matches!(uri.scheme_str(), Some("http" | "https"));
    if known_scheme && uri.host().is_some() { Ok(uri) } else { Err(bad()) }
}

/// Uses the dev secret of the data dir if the endpoint is on loopback and no secret was given.
fn find_dev_secret(spec: &mut SourceSpec, preset: &Preset, uri: &http::Uri) {
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    let is_loopback = host == "localhost"
        || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback());
    if !is_loopback || !spec.secrets.is_empty() {
        return;
    }
    let data_dir = std::env::var("HAPAX_DATA_DIR").unwrap_or_else(|_| "hapax-data".to_owned());
    if let Some(dev) = config::dev_secret(Path::new(&data_dir)) {
        captured::derive_from_dev(spec, preset, &dev);
    }
}
