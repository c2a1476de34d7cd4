//! The simulated sender: signs sample events and posts them to an endpoint.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::presets::Preset;
use hapax_core::sample::{self, SampleId};
use hapax_core::secret::ActiveSecret;
use hapax_core::source::{SourceError, SourceSpec};
use hapax_core::{Arrival, Source, Timestamp, Verified};
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::{Deserialize, Serialize};

use crate::StormError;

/// The timeout of one request; most senders give up earlier.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// The largest answer that is read.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// The HTTP client of a storm.
pub type HttpClient = Client<HttpsConnector<HttpConnector>, Full<Bytes>>;

/// A sender and the endpoint it posts to.
pub struct Sender {
    /// The preset that it imitates.
    pub preset: &'static Preset,
    /// The source as an endpoint would configure it.
    pub source: Source,
    spec: SourceSpec,
    to: String,
    uri: http::Uri,
}

/// A signed request; copies share it.
#[derive(Debug)]
pub struct SignedRequest {
    /// The sender's id of its event.
    pub event_id: String,
    /// The request.
    pub request: Arrival,
}

/// The answer to one request.
#[derive(Debug, Serialize)]
pub struct RequestAnswer {
    /// The sender's id of the event.
    pub event_id: String,
    /// The HTTP status.
    pub status: u16,
    /// The `decision` of the answer, as Hapax and some other receivers send it.
    pub decision: Option<String>,
    /// The receiver's id of the event.
    pub id: Option<String>,
    /// The reason for a refusal, if the answer has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The Retry-After header, if it is in seconds.
    #[serde(skip)]
    pub retry_after: Option<Duration>,
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
pub enum NoAnswer {
    /// No connection: the endpoint has not seen the request.
    CannotConnect(String),
    /// The endpoint may have seen the request.
    Lost(String),
}

impl Sender {
    /// The sender that `spec` describes, which posts to `to`.
    pub fn new(
        preset: &'static Preset,
        spec: SourceSpec,
        to: &str,
        uri: http::Uri,
    ) -> Result<Self, SourceError> {
        let source = Source::build(spec.clone())?;
        Ok(Self { preset, source, spec, to: to.to_owned(), uri })
    }

    /// The same sender with a random secret instead of the real one; `None` if this preset's secrets
    /// cannot be random.
    pub(crate) fn impostor(&self, random: &[u8; 32]) -> Option<Source> {
        let mut spec = self.spec.clone();
        spec.secrets = vec![ActiveSecret::forever(self.preset.secret_from(random)?)];
        Source::build(spec).ok()
    }

    /// An unsigned sample event of this sender.
    pub fn sample(&self, event_type: Option<&str>, id: &SampleId) -> Result<Arrival, StormError> {
        sample_request(self.preset, event_type, id, &self.to).map_err(refused)
    }

    /// Signs `request` as of `now`.
    pub fn sign(&self, request: &Arrival, now: Timestamp) -> Result<SignedRequest, StormError> {
        let request = sign_as(&self.source, request, now)?;
        Ok(SignedRequest { event_id: self.event_id(&request, now), request })
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
    pub fn post(
        &self,
        client: &HttpClient,
        signed: &Arc<SignedRequest>,
    ) -> impl Future<Output = Result<RequestAnswer, NoAnswer>> + Send + use<> {
        post(client.clone(), self.uri.clone(), Arc::clone(signed))
    }
}

/// An unsigned sample event of this sender as a request to `url`. Equal arguments give equal requests.
fn sample_request(
    preset: &Preset,
    event_type: Option<&str>,
    id: &SampleId,
    url: &str,
) -> Result<Arrival, String> {
    let sample = sample::event(preset.name, event_type, id)
        .ok_or_else(|| format!("there is no sample event for \"{}\"", preset.name))?;
    let mut headers = HeaderMap::new();
    headers.insert(http::header::CONTENT_TYPE, HeaderValue::from_static(sample.content_type));
    for (name, value) in sample.headers {
        let unfit = || format!("the value of {name} is not a valid header value");
        let header = HeaderName::from_bytes(name.as_bytes()).map_err(|_| unfit())?;
        headers.insert(header, HeaderValue::from_str(&value).map_err(|_| unfit())?);
    }
    Ok(Arrival { method: Method::POST, url: url.to_owned(), headers, body: sample.body.into() })
}

/// Signs `request` with the first secret of `source`.
pub(crate) fn sign_as(
    source: &Source,
    request: &Arrival,
    now: Timestamp,
) -> Result<Arrival, StormError> {
    let signed = source.scheme().sign(request, None, now);
    let signed = signed.map_err(|error| refused(error.to_string()))?;
    signed.apply(request).map_err(|error| refused(error.to_string()))
}

fn refused(problem: String) -> StormError {
    StormError::arguments(problem, "see `hapax providers NAME`")
}

/// An HTTP client that follows no redirects and uses no proxy from the environment.
pub fn http_client() -> HttpClient {
    let provider = rustls::crypto::aws_lc_rs::default_provider();
    let connector = hyper_rustls::HttpsConnectorBuilder::new()
        .with_provider_and_webpki_roots(provider)
        .expect("the provider's own protocol versions are consistent")
        .https_or_http()
        .enable_http1()
        .build();
    Client::builder(TokioExecutor::new()).build(connector)
}

async fn post(
    client: HttpClient,
    uri: http::Uri,
    signed: Arc<SignedRequest>,
) -> Result<RequestAnswer, NoAnswer> {
    let lost = |why: String| NoAnswer::Lost(why);
    let mut request = http::Request::new(Full::new(signed.request.body.clone()));
    *request.method_mut() = signed.request.method.clone();
    *request.uri_mut() =
        if signed.request.url.is_empty() { uri } else { signed.request.url.parse().unwrap_or(uri) };
    *request.headers_mut() = signed.request.headers.clone();
    let exchange = async {
        let response = client.request(request).await.map_err(|error| {
            let why = error_chain(&error);
            if error.is_connect() { NoAnswer::CannotConnect(why) } else { NoAnswer::Lost(why) }
        })?;
        let (parts, body) = response.into_parts();
        let body = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
        let body = body.map_err(|error| lost(error.to_string()))?.to_bytes();
        let body: AnswerBody = serde_json::from_slice(&body).unwrap_or_default();
        let header = |name: &str| {
            parts.headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
        };
        Ok(RequestAnswer {
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

/// The error with all of its causes.
pub fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
