//! A running server, reached through its admin API.

use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, DATE, HeaderValue};
use http::{Method, StatusCode};
use http_body_util::{BodyExt as _, Full, Limited};
use serde::Deserialize;
use serde_json::Value;

use super::out::Failure;
use super::sender::{self, HttpClient};

/// Where the admin side is unless it is said.
pub(super) const DEFAULT_URL: &str = "http://127.0.0.1:8081";

/// How long one answer may take.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// The most of an answer that is read: an event with every conflicting body that is kept.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// Which server, and as whom.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct Remote {
    /// The admin side of the server [default: http://127.0.0.1:8081]
    #[arg(long, value_name = "URL", env = "HAPAX_ADMIN")]
    pub(super) admin: Option<String>,
    /// A file that holds the token [default: the environment variable HAPAX_TOKEN, or none]
    #[arg(long, value_name = "FILE")]
    pub(super) token_file: Option<PathBuf>,
}

impl Remote {
    /// The server, not yet spoken to. `otherwise` is where it is unless it was said.
    pub(super) fn open(&self, otherwise: &str) -> Result<Server, Failure> {
        let url = self.admin.as_deref().unwrap_or(otherwise);
        let bad = || Failure::usage("--admin is not an http or https URL", DEFAULT_URL);
        let uri: http::Uri = url.parse().map_err(|_| bad())?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) || uri.query().is_some() {
            return Err(bad());
        }
        let authorization = self.token()?.map(|token| {
            let bad = |_| Failure::usage("the token is not one line of printable characters", "");
            let mut value =
                HeaderValue::from_str(&format!("Bearer {}", token.trim())).map_err(bad)?;
            value.set_sensitive(true);
            Ok::<_, Failure>(value)
        });
        Ok(Server {
            base: url.trim_end_matches('/').to_owned(),
            authorization: authorization.transpose()?,
            http: sender::client(),
        })
    }

    fn token(&self) -> Result<Option<String>, Failure> {
        let Some(path) = &self.token_file else {
            return Ok(std::env::var("HAPAX_TOKEN").ok().filter(|token| !token.is_empty()));
        };
        let read = std::fs::read_to_string(path);
        let failed = |error| format!("cannot read the token in {}: {error}", path.display());
        read.map(Some).map_err(|error| Failure::unreachable(failed(error)))
    }
}

/// A server to ask.
pub(super) struct Server {
    base: String,
    authorization: Option<HeaderValue>,
    http: HttpClient,
}

/// What it said.
pub(super) struct Reply {
    pub(super) status: StatusCode,
    /// The time it believes to be.
    pub(super) date: Option<String>,
    pub(super) body: Bytes,
}

/// An error as the API tells it.
#[derive(Debug, Default, Deserialize)]
struct Problem {
    #[serde(default)]
    detail: String,
    #[serde(default)]
    candidates: Vec<String>,
}

impl Server {
    /// Where it is.
    pub(super) fn url(&self) -> &str {
        &self.base
    }

    /// A good answer to a GET.
    pub(super) async fn get(&self, path: &str) -> Result<Value, Failure> {
        self.ask(Method::GET, path, Bytes::new()).await?.good()
    }

    /// A good answer to a POST.
    pub(super) async fn post(&self, path: &str, body: &Value) -> Result<Value, Failure> {
        self.ask(Method::POST, path, Bytes::from(body.to_string())).await?.good()
    }

    /// Whatever it answers.
    pub(super) async fn ask(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Reply, Failure> {
        let cannot =
            |why: String| Failure::unreachable(format!("cannot reach {}: {why}", self.base));
        let mut request = http::Request::builder().method(method).uri(self.url_of(path));
        if !body.is_empty() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        if let Some(authorization) = &self.authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        let request = request.body(Full::new(body)).map_err(|error| cannot(error.to_string()))?;
        let exchange = async {
            let response = self.http.request(request).await;
            let (parts, body) =
                response.map_err(|error| cannot(sender::chain(&error)))?.into_parts();
            let body = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
            let body = body.map_err(|error| cannot(error.to_string()))?.to_bytes();
            let date = parts.headers.get(DATE).and_then(|date| date.to_str().ok());
            Ok(Reply { status: parts.status, date: date.map(str::to_owned), body })
        };
        match tokio::time::timeout(ANSWER_WITHIN, exchange).await {
            Ok(answered) => answered,
            Err(_) => Err(cannot(format!("no answer within {} s", ANSWER_WITHIN.as_secs()))),
        }
    }

    fn url_of(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }
}

impl Reply {
    /// The JSON of a good answer; anything else is a failure in the server's own words.
    pub(super) fn good(self) -> Result<Value, Failure> {
        if self.status.is_success() {
            let foreign =
                |_| Failure::unreachable("the answer is not JSON: is that a hapax server?");
            return serde_json::from_slice(&self.body).map_err(foreign);
        }
        let problem: Problem = serde_json::from_slice(&self.body).unwrap_or_default();
        let said = match problem.detail.is_empty() {
            true => format!("the server answered {}", self.status),
            false => super::out::shown(&problem.detail),
        };
        Err(match self.status {
            StatusCode::NOT_FOUND => Failure::negative(said, ""),
            StatusCode::CONFLICT => Failure::negative(said, problem.candidates.join(" ")),
            StatusCode::BAD_REQUEST => Failure::usage(said, ""),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                let hint = "; set HAPAX_TOKEN or --token-file to a token that allows it";
                Failure::unreachable(format!("{said}{hint}"))
            }
            _ => Failure::unreachable(said),
        })
    }
}

/// Runs a command that talks to a server.
pub(super) fn run<T>(talk: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::unreachable(format!("cannot start: {error}")))?;
    runtime.block_on(talk)
}

/// A path or query value as it stands in a URL.
pub(super) fn encoded(text: &str) -> String {
    let mut url = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                url.push(char::from(byte));
            }
            _ => url.push_str(&format!("%{byte:02X}")),
        }
    }
    url
}

/// `?name=value&…` of those that were given.
pub(super) fn query<'a>(
    given: impl IntoIterator<Item = (&'a str, Option<impl AsRef<str>>)>,
) -> String {
    let mut query = String::new();
    for (name, value) in given {
        let Some(value) = value else { continue };
        query.push(if query.is_empty() { '?' } else { '&' });
        query.push_str(&format!("{name}={}", encoded(value.as_ref())));
    }
    query
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_with_any_character_stays_one_segment_of_the_path() {
        assert_eq!(encoded("evt_1-a.b~"), "evt_1-a.b~");
        assert_eq!(encoded("a/b?c=ü #"), "a%2Fb%3Fc%3D%C3%BC%20%23");
        assert_eq!(query([("a", Some("x&y")), ("b", None), ("c", Some("1"))]), "?a=x%26y&c=1");
    }
}
