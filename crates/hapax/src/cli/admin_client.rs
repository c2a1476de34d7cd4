//! An HTTP client for the admin API of a running server.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use hapax_storm::{HttpClient, error_chain, http_client};
use http::header::{AUTHORIZATION, CONTENT_TYPE, DATE, HeaderValue};
use http::{Method, StatusCode};
use http_body_util::{BodyExt as _, Full, Limited};
use serde::Serialize;
use serde_json::Value;
use uuid::Uuid;

use super::output::{CommandFailure, Exit};
use crate::api::Problem;
use crate::config::{self, ADMIN_TOKEN_FILE, Flags, ServerLocation};

/// The timeout of one request.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// The timeout of a request that makes a plan. The server counts the matching items before it records the
/// plan, and a count by text reads every body.
const PLAN_ANSWER_TIMEOUT: Duration = Duration::from_secs(600);

/// The largest answer that is read: one event with all of its conflicting bodies.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// The server to ask, and where its token is.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct Remote {
    #[command(flatten)]
    access: AdminOptions,
    /// The config file of the server, for its address and data dir [env: HAPAX_CONFIG] [default:
    /// hapax.toml if it exists]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The data dir of the server, for its admin.token [env: HAPAX_DATA_DIR]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<String>,
}

/// Where the server is, and its token, as the command line gives them; the config supplies the rest.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct AdminOptions {
    /// The URL of the admin API [default: admin_listen of the config]
    #[arg(long, value_name = "URL", env = "HAPAX_ADMIN")]
    pub(super) admin: Option<String>,
    /// A file that contains the API token [default: the environment variable HAPAX_TOKEN, else
    /// admin.token in the data dir for a server on loopback or at admin_listen]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

impl Remote {
    /// Finds the server's URL and token; sends nothing yet.
    pub(super) fn open(&self) -> Result<Server, CommandFailure> {
        let flags = Flags {
            config: self.config.clone(),
            data_dir: self.data_dir.clone(),
            ..Flags::default()
        };
        self.access.open(&flags)
    }
}

impl AdminOptions {
    /// The server at `--admin`, or else the one that `flags` and the config describe.
    pub(super) fn open(&self, flags: &Flags) -> Result<Server, CommandFailure> {
        let given = self.given_token()?;
        // With a URL and a token on the command line no config is needed: the server may be anywhere.
        let configured = match (&self.admin, &given) {
            (Some(_), Some(_)) => None,
            (Some(_) | None, _) => Some(config::server_location(flags)?),
        };
        let base = match (&self.admin, &configured) {
            (Some(url), _) => url.trim_end_matches('/').to_owned(),
            (None, Some(at)) => url_of(at)?,
            (None, None) => unreachable!("without --admin the config was read"),
        };
        let bad = || {
            CommandFailure::usage("--admin is not an http or https URL", "http://127.0.0.1:8081")
        };
        let uri: http::Uri = base.parse().map_err(|_| bad())?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) || uri.query().is_some() {
            return Err(bad());
        }
        let token = match (given, configured) {
            (Some(given), _) => Token::Given(given),
            // The token of the local server must not be sent to another host.
            (None, Some(at)) if is_own_server(&uri, &at) => match config::admin_token(&at.data_dir)
            {
                Some(token) => Token::Own(token.expose().to_owned()),
                None => Token::Missing { file: at.data_dir.join(ADMIN_TOKEN_FILE) },
            },
            (None, _) => Token::Foreign,
        };
        Server::at(base, token)
    }

    fn given_token(&self) -> Result<Option<String>, CommandFailure> {
        let Some(path) = &self.token_file else {
            return Ok(std::env::var("HAPAX_TOKEN").ok().filter(|token| !token.is_empty()));
        };
        let read = std::fs::read_to_string(path);
        let failed = |error| format!("cannot read the token from {}: {error}", path.display());
        read.map(Some).map_err(|error| CommandFailure::unreachable(failed(error)))
    }
}

/// The URL of the admin API, from the config.
fn url_of(at: &ServerLocation) -> Result<String, CommandFailure> {
    let ServerLocation { admin_listen, admin_tls, file, .. } = at;
    let port = admin_listen.port();
    if port == 0 {
        let file = file.as_ref().map_or_else(String::new, |file| format!("{}: ", file.display()));
        return Err(CommandFailure::usage(
            format!("{file}admin_listen has port 0, so the config does not give the server's port"),
            "pass the URL with --admin: the server prints it when it starts",
        ));
    }
    let scheme = if *admin_tls { "https" } else { "http" };
    Ok(format!("{scheme}://{}", reachable_address(*admin_listen)))
}

/// The address at which a listener is reached from the same machine.
fn reachable_address(listen: SocketAddr) -> SocketAddr {
    let ip = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    SocketAddr::new(ip, listen.port())
}

/// Whether a URL leads to this machine, or to the `admin_listen` of the config.
fn is_own_server(url: &http::Uri, configured: &ServerLocation) -> bool {
    let Some(host) = url.host() else { return false };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    if host.eq_ignore_ascii_case("localhost") {
        return true;
    }
    let Ok(ip) = host.parse::<IpAddr>() else { return false };
    let port = url.port_u16().unwrap_or(if url.scheme_str() == Some("https") { 443 } else { 80 });
    ip.is_loopback() || SocketAddr::new(ip, port) == configured.admin_listen
}

/// The token of a request, and where it comes from.
enum Token {
    /// From the command line or the environment.
    Given(String),
    /// From `admin.token`, for the server on this machine. The file may be left over from an earlier
    /// run: a server in dev mode, or with `admin_open`, has no token.
    Own(String),
    /// The server is on this machine, but its token file is missing or not readable.
    Missing { file: PathBuf },
    /// The server is on another host, and no token was given for it.
    Foreign,
}

/// A server and the credentials for it.
pub(super) struct Server {
    base: String,
    authorization: Option<HeaderValue>,
    is_own_token: bool,
    /// The hint that is printed when the server answers 401 or 403.
    hint: String,
    http: HttpClient,
}

/// An answer of the server.
pub(super) struct Reply {
    pub(super) status: StatusCode,
    /// The `Date` header: the server's clock.
    pub(super) date: Option<String>,
    pub(super) body: Bytes,
}

impl Server {
    fn at(base: String, token: Token) -> Result<Self, CommandFailure> {
        let is_own_token = matches!(token, Token::Own(_));
        let (token, hint) = match token {
            Token::Given(token) | Token::Own(token) => {
                (Some(token), "the token is wrong, or does not allow this action".to_owned())
            }
            Token::Missing { file } => (
                None,
                format!(
                    "cannot read a token from {}: run this command as the server's user, pass --data-dir, or \
                     set HAPAX_TOKEN or --token-file",
                    file.display()
                ),
            ),
            Token::Foreign => (
                None,
                "set HAPAX_TOKEN or --token-file: the local admin.token is not sent to another host"
                    .to_owned(),
            ),
        };
        let authorization = token.map(|token| {
            let bad =
                |_| CommandFailure::usage("the token is not one line of printable characters", "");
            let mut value =
                HeaderValue::from_str(&format!("Bearer {}", token.trim())).map_err(bad)?;
            value.set_sensitive(true);
            Ok::<_, CommandFailure>(value)
        });
        let authorization = authorization.transpose()?;
        Ok(Self { base, authorization, is_own_token, hint, http: http_client() })
    }

    /// The URL of the admin API.
    pub(super) fn url(&self) -> &str {
        &self.base
    }

    /// Sends a GET and returns the JSON of a 2xx answer.
    pub(super) async fn get(&self, path: &str) -> Result<Value, CommandFailure> {
        self.request_ok(Method::GET, path, Bytes::new()).await
    }

    /// Sends a POST and returns the JSON of a 2xx answer.
    pub(super) async fn post(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<Value, CommandFailure> {
        let body = serde_json::to_vec(body).map_err(std::io::Error::other)?;
        self.request_ok(Method::POST, path, Bytes::from(body)).await
    }

    /// Sends a POST that makes a plan and returns the JSON of a 2xx answer. A random `Idempotency-Key` lets
    /// the request be repeated when no answer came: both requests make one plan.
    pub(super) async fn post_plan(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<Value, CommandFailure> {
        let body = Bytes::from(serde_json::to_vec(body).map_err(std::io::Error::other)?);
        let key =
            HeaderValue::from_str(&Uuid::new_v4().to_string()).map_err(std::io::Error::other)?;
        let post = || self.request_ok_under(Some(&key), Method::POST, path, body.clone());
        match post().await {
            Err(failure) if failure.exit == Exit::Unreachable => post().await,
            answered => answered,
        }
    }

    /// Sends a PUT and returns the JSON of a 2xx answer.
    pub(super) async fn put(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<Value, CommandFailure> {
        let body = serde_json::to_vec(body).map_err(std::io::Error::other)?;
        self.request_ok(Method::PUT, path, Bytes::from(body)).await
    }

    /// Sends a DELETE and returns the JSON of a 2xx answer.
    pub(super) async fn delete(&self, path: &str) -> Result<Value, CommandFailure> {
        self.request_ok(Method::DELETE, path, Bytes::new()).await
    }

    /// Returns the JSON of a 2xx answer. A 401 or 403 becomes a failure with a hint about tokens. A 401 to
    /// the token of `admin.token` is retried without it, because that file may be left over.
    async fn request_ok(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Value, CommandFailure> {
        self.request_ok_under(None, method, path, body).await
    }

    /// [`Self::request_ok`], with an `Idempotency-Key` if there is one.
    async fn request_ok_under(
        &self,
        key: Option<&HeaderValue>,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Value, CommandFailure> {
        let own = self.authorization.as_ref();
        let mut reply = self.request_as(own, key, method.clone(), path, body.clone()).await?;
        if reply.status == StatusCode::UNAUTHORIZED && self.is_own_token {
            reply = self.request_as(None, key, method, path, body).await?;
        }
        match reply.status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                let problem_detail = reply.problem_detail();
                Err(CommandFailure::unreachable(problem_detail).hinted(&self.hint))
            }
            _ => reply.into_json(),
        }
    }

    /// Returns any answer, whatever its status.
    pub(super) async fn request(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Reply, CommandFailure> {
        self.request_as(self.authorization.as_ref(), None, method, path, body).await
    }

    async fn request_as(
        &self,
        authorization: Option<&HeaderValue>,
        key: Option<&HeaderValue>,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Reply, CommandFailure> {
        let cannot = |why: String| {
            let hint = "check that the server runs; pass its URL with --admin, or its config with --config";
            CommandFailure::unreachable(format!("cannot reach {}: {why}", self.base)).hinted(hint)
        };
        let mut request = http::Request::builder().method(method).uri(self.url_of(path));
        if !body.is_empty() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        if let Some(authorization) = authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        let request = request.body(Full::new(body)).map_err(|error| cannot(error.to_string()))?;
        let exchange = async {
            let response = self.http.request(request).await;
            let (parts, body) = response.map_err(|error| cannot(error_chain(&error)))?.into_parts();
            let body = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
            let body = body.map_err(|error| cannot(error.to_string()))?.to_bytes();
            let date = parts.headers.get(DATE).and_then(|date| date.to_str().ok());
            Ok(Reply { status: parts.status, date: date.map(str::to_owned), body })
        };
        // Only requests that make a plan have a key.
        let within = if key.is_some() { PLAN_ANSWER_TIMEOUT } else { ANSWER_TIMEOUT };
        match tokio::time::timeout(within, exchange).await {
            Ok(answered) => answered,
            Err(_) => Err(cannot(format!("no answer within {} s", within.as_secs()))),
        }
    }

    fn url_of(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }
}

impl Reply {
    /// The JSON of a 2xx answer; any other answer is a failure with the server's message.
    pub(super) fn into_json(self) -> Result<Value, CommandFailure> {
        if self.status.is_success() {
            let foreign = |_| {
                CommandFailure::unreachable(
                    "the answer is not JSON: check that --admin is a hapax server",
                )
            };
            return serde_json::from_slice(&self.body).map_err(foreign);
        }
        let problem = self.problem();
        let problem_detail = self.problem_detail();
        Err(match self.status {
            StatusCode::NOT_FOUND => CommandFailure::negative(problem_detail, ""),
            StatusCode::CONFLICT => {
                let ids: Vec<_> = problem.candidates.iter().map(Uuid::to_string).collect();
                CommandFailure::negative(problem_detail, ids.join(" "))
            }
            StatusCode::BAD_REQUEST => CommandFailure::usage(problem_detail, ""),
            _ => CommandFailure::unreachable(problem_detail),
        })
    }

    fn problem(&self) -> Problem {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// The message of an error, or its status if it has none.
    fn problem_detail(&self) -> String {
        match self.problem().detail {
            detail if detail.is_empty() => format!("the server answered {}", self.status),
            detail => super::output::shown(&detail),
        }
    }
}

/// Runs an async command to its end.
pub(super) fn run<T>(
    work: impl Future<Output = Result<T, CommandFailure>>,
) -> Result<T, CommandFailure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| CommandFailure::unreachable(format!("cannot start: {error}")))?;
    runtime.block_on(work)
}

/// Percent-encodes a path segment or query value.
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

/// `?name=value&…` from the values that are set.
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
    fn the_local_token_is_sent_only_to_this_machine_and_the_configured_address() {
        let configured = ServerLocation {
            admin_listen: "10.0.0.5:8081".parse().unwrap(),
            admin_tls: false,
            data_dir: PathBuf::from("data"),
            file: None,
        };
        let check = |url: &str, expected: bool| {
            assert_eq!(is_own_server(&url.parse().unwrap(), &configured), expected, "{url}");
        };
        check("http://127.0.0.1:9000", true);
        check("http://localhost:9000/", true);
        check("http://[::1]:8081", true);
        check("http://10.0.0.5:8081", true);
        check("http://10.0.0.5:8082", false);
        check("http://10.0.0.6:8081", false);
        check("http://ops.example.com:8081", false);
        check("http://localhost.example.com", false);
        check("http://127.0.0.1.example.com", false);
        check("http://127.0.0.1@example.com", false);
    }

    #[test]
    fn an_id_with_any_character_stays_one_segment_of_the_path() {
        assert_eq!(encoded("evt_1-a.b~"), "evt_1-a.b~");
        assert_eq!(encoded("a/b?c=ü #"), "a%2Fb%3Fc%3D%C3%BC%20%23");
        assert_eq!(query([("a", Some("x&y")), ("b", None), ("c", Some("1"))]), "?a=x%26y&c=1");
    }
}
