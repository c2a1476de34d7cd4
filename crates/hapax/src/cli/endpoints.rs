//! `hapax endpoints`: where messages are delivered, through the admin API.

use std::collections::BTreeMap;

use hapax_core::endpoint::{EndpointOrder, OnDead};
use hapax_core::endpoint_secret::Signing;

use super::admin_client::{self, Remote, encoded};
use super::events::{ActionArgs, read};
use super::lists::{ListArgs, Words};
use super::output::{self, CommandFailure, Exit};
use super::plans::ReplayEndpoint;
use crate::api::{
    Endpoint, EndpointRequest, Patch, PingAnswer, ReasonRequest, RotateRequest, Span,
};
use crate::config::units;
use crate::format;

/// `hapax endpoints`.
#[derive(Debug, clap::Subcommand)]
pub(super) enum Endpoints {
    /// Add an endpoint; prints its id and its secret, which is never shown again
    Add(Box<Add>),
    /// List endpoints, newest first
    List(List),
    /// Show one endpoint
    Show(Show),
    /// Give an endpoint a new secret; the old one still signs for a while
    Rotate(Rotate),
    /// Deliver to a disabled endpoint again, including its held deliveries
    Enable(EndpointArg),
    /// Stop delivering to an endpoint; its deliveries are held until it is enabled
    Disable(EndpointArg),
    /// Send one signed test message now, and print the answer. Exit 1 if it is not a 2xx
    Ping(EndpointArg),
    /// Send many deliveries of an endpoint again, or messages that it never got
    Replay(Box<ReplayEndpoint>),
    /// Remove an endpoint; its open deliveries are cancelled
    Remove(EndpointArg),
}

impl Endpoints {
    pub(super) fn run(self) -> Result<Exit, CommandFailure> {
        match self {
            Self::Add(add) => admin_client::run(add.run()),
            Self::List(list) => admin_client::run(list.run()),
            Self::Show(show) => admin_client::run(show.run()),
            Self::Rotate(rotate) => admin_client::run(rotate.run()),
            Self::Enable(act) => admin_client::run(act.change("enable")),
            Self::Disable(act) => admin_client::run(act.change("disable")),
            Self::Ping(act) => admin_client::run(act.ping()),
            Self::Replay(replay) => admin_client::run(replay.run()),
            Self::Remove(act) => admin_client::run(act.remove()),
        }
    }
}

/// `hapax endpoints add`.
#[derive(Debug, clap::Args)]
pub(super) struct Add {
    /// Where deliveries are posted
    url: String,
    /// Only messages of these types; `*` matches any characters: 'invoice.*'
    #[arg(long, value_name = "GLOB", value_delimiter = ',')]
    types: Vec<String>,
    /// The owner
    #[arg(long)]
    tenant: Option<String>,
    /// A secret of your own: whsec_ and base64 of 24 to 64 bytes; with --signing ed25519, whsk_ and a private key
    #[arg(long)]
    secret: Option<String>,
    /// How deliveries are signed: v1 or v1a of Standard Webhooks, or t=…,v1=…
    #[arg(long, value_name = SIGNINGS, value_parser = signing)]
    signing: Option<Signing>,
    /// The wait before each attempt: 0s,1m,5m
    #[arg(long, value_name = "DURATION", value_delimiter = ',')]
    retry: Vec<String>,
    /// The deadline of one attempt
    #[arg(long, value_name = "DURATION")]
    timeout: Option<String>,
    /// Send only data.id and data.object
    #[arg(long)]
    thin: bool,
    /// The only version of your API that the endpoint gets
    #[arg(long, value_name = "VERSION")]
    api_version: Option<String>,
    /// How many attempts may be under way at once
    #[arg(long, value_name = "N")]
    max_in_flight: Option<u32>,
    /// Send deliveries under one key one at a time, in the order of publishing
    #[arg(long, value_name = "none|key", value_parser = order)]
    order: Option<EndpointOrder>,
    /// With --order key: whether a dead delivery keeps the later ones under its key waiting
    #[arg(long, value_name = "park|skip", value_parser = on_dead)]
    on_dead: Option<OnDead>,
    /// How many attempts may begin in a time, over all nodes: 100/s
    #[arg(long, value_name = "RATE")]
    rate_limit: Option<hapax_core::rate_limit::RateLimit>,
    /// Never disable the endpoint automatically, however long it fails
    #[arg(long)]
    no_auto_disable: bool,
    /// A header for every delivery: 'Authorization: Bearer …'
    #[arg(long = "header", value_name = "NAME: VALUE")]
    headers: Vec<String>,
    /// A name of your own, unique within the tenant
    #[arg(long)]
    uid: Option<String>,
    /// A description for people
    #[arg(long)]
    description: Option<String>,
    #[command(flatten)]
    remote: Remote,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Add {
    async fn run(self) -> Result<Exit, CommandFailure> {
        let headers =
            self.headers.iter().map(|line| header(line)).collect::<Result<BTreeMap<_, _>, _>>()?;
        let retry = self.retry.iter().map(|wait| span(wait)).collect::<Result<Vec<_>, _>>()?;
        let request = EndpointRequest {
            url: Some(self.url),
            tenant: self.tenant,
            secret: self.secret,
            types: some(self.types),
            retry: some(retry),
            timeout: self.timeout.as_deref().map(span).transpose()?.into(),
            payload: self.thin.then_some(hapax_core::message::Payload::Thin).into(),
            max_in_flight: self.max_in_flight.into(),
            rate_limit: self.rate_limit.into(),
            auto_disable: self.no_auto_disable.then_some(false).into(),
            order: self.order.into(),
            on_dead: self.on_dead.into(),
            signing: self.signing,
            api_version: self.api_version.into(),
            uid: self.uid.into(),
            description: self.description.into(),
            headers: if headers.is_empty() { Patch::Keep } else { Patch::Set(headers) },
            ..EndpointRequest::default()
        };
        let server = self.remote.open()?;
        let added = server.post("/api/v1/endpoints", &request).await?;
        if self.json {
            output::json(&added)?;
            return Ok(Exit::Done);
        }
        let endpoint: Endpoint = read(added)?;
        print_with_secret(&endpoint)
    }
}

fn some<T>(values: Vec<T>) -> Patch<Vec<T>> {
    if values.is_empty() { Patch::Keep } else { Patch::Set(values) }
}

fn span(text: &str) -> Result<Span, CommandFailure> {
    units::duration(text).map(Span).map_err(CommandFailure::from)
}

fn order(word: &str) -> Result<EndpointOrder, String> {
    match word {
        "none" => Ok(EndpointOrder::None),
        "key" => Ok(EndpointOrder::Key),
        _other => Err("write none or key".to_owned()),
    }
}

/// The words of `--signing`.
const SIGNINGS: &str = "standard|ed25519|timestamped";

fn signing(word: &str) -> Result<Signing, String> {
    [Signing::Standard, Signing::Ed25519, Signing::Timestamped]
        .into_iter()
        .find(|signing| signing.as_str() == word)
        .ok_or_else(|| "write standard, ed25519 or timestamped".to_owned())
}

fn on_dead(word: &str) -> Result<OnDead, String> {
    match word {
        "park" => Ok(OnDead::Park),
        "skip" => Ok(OnDead::Skip),
        _other => Err("write park or skip".to_owned()),
    }
}

fn header(line: &str) -> Result<(String, String), CommandFailure> {
    let (name, value) = line.split_once(':').ok_or_else(|| {
        CommandFailure::usage("--header has no colon", "write it as --header 'Name: value'")
    })?;
    Ok((name.trim().to_owned(), value.trim().to_owned()))
}

/// Prints an endpoint whose secret was just made.
fn print_with_secret(endpoint: &Endpoint) -> Result<Exit, CommandFailure> {
    output::data(&format!("id      {}", endpoint.id))?;
    output::data(&format!("url     {}", output::shown(&endpoint.url)))?;
    if let Some(secret) = &endpoint.secret {
        output::data(&format!("secret  {secret}"))?;
        output::words("keep the secret: it is not shown again");
    }
    if let Some(public_key) = &endpoint.public_key {
        output::data(&format!("public key  {public_key}"))?;
    }
    Ok(Exit::Done)
}

/// `hapax endpoints list`.
#[derive(Debug, clap::Args)]
pub(super) struct List {
    /// Only endpoints of this tenant
    #[arg(long)]
    tenant: Option<String>,
    #[command(flatten)]
    list: ListArgs,
}

impl List {
    async fn run(self) -> Result<Exit, CommandFailure> {
        let words = Words {
            items: "endpoints",
            empty: "there are no endpoints: add one with `hapax endpoints add URL`",
        };
        let filters = vec![("tenant", self.tenant)];
        self.list
            .print("endpoints", filters, words, |item| {
                let endpoint: Endpoint = read(item)?;
                let types = match endpoint.types.is_empty() {
                    true => "*".to_owned(),
                    false => endpoint.types.join(","),
                };
                Ok(format!(
                    "{}  {}  {}  {types}  {}",
                    endpoint.id,
                    endpoint.status.as_str(),
                    endpoint.tenant,
                    endpoint.url
                ))
            })
            .await
    }
}

/// `hapax endpoints show`.
#[derive(Debug, clap::Args)]
pub(super) struct Show {
    /// The endpoint's id
    id: String,
    #[command(flatten)]
    remote: Remote,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Show {
    async fn run(self) -> Result<Exit, CommandFailure> {
        let server = self.remote.open()?;
        let shown = server.get(&format!("/api/v1/endpoints/{}", encoded(&self.id))).await?;
        if self.json {
            output::json(&shown)?;
            return Ok(Exit::Done);
        }
        print(&read(shown)?)
    }
}

fn print(endpoint: &Endpoint) -> Result<Exit, CommandFailure> {
    let seconds = |Span(span): &Span| format!("{}s", span.as_secs_f64());
    let optional = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
    let rows = [
        ("id", endpoint.id.to_string()),
        ("tenant", endpoint.tenant.clone()),
        ("url", endpoint.url.clone()),
        ("status", endpoint.status.as_str().to_owned()),
        (
            "reason",
            optional(&endpoint.disabled_reason.clone().or_else(|| endpoint.failing_reason.clone())),
        ),
        ("types", endpoint.types.join(", ")),
        ("retry", endpoint.retry.iter().map(seconds).collect::<Vec<_>>().join(", ")),
        ("timeout", seconds(&endpoint.timeout)),
        ("at once", endpoint.max_in_flight.to_string()),
        ("rate", endpoint.rate_limit.map_or_else(|| "-".to_owned(), |rate| rate.to_string())),
        ("order", order_text(endpoint).to_owned()),
        ("signing", endpoint.signing.as_str().to_owned()),
        ("public key", optional(&endpoint.public_key)),
        (
            "secret at",
            endpoint.secrets.first().map_or_else(|| "-".to_owned(), |age| format::at(age.since)),
        ),
        ("version", optional(&endpoint.api_version)),
        ("uid", optional(&endpoint.uid)),
        ("headers", endpoint.headers.join(", ")),
        ("about", optional(&endpoint.description)),
    ];
    for (name, value) in rows {
        let value = if value.is_empty() { "-".to_owned() } else { value };
        output::data(&output::shown(&format!("{name:<10} {value}")))?;
    }
    Ok(Exit::Done)
}

fn order_text(endpoint: &Endpoint) -> &'static str {
    match (endpoint.order, endpoint.on_dead) {
        (EndpointOrder::None, _) => "none",
        (EndpointOrder::Key, OnDead::Park) => "by key; a dead delivery parks its key",
        (EndpointOrder::Key, OnDead::Skip) => "by key; a dead delivery is passed over",
    }
}

/// `hapax endpoints rotate`.
#[derive(Debug, clap::Args)]
pub(super) struct Rotate {
    /// The endpoint's id
    id: String,
    /// How long the old secret still signs; 0s revokes every old secret now
    #[arg(long, value_name = "DURATION", default_value = "24h")]
    overlap: String,
    /// A secret of your own
    #[arg(long)]
    secret: Option<String>,
    /// Sign in another way from now on. Until the overlap ends, deliveries carry both signatures
    #[arg(long, value_name = SIGNINGS, value_parser = signing)]
    signing: Option<Signing>,
    #[command(flatten)]
    remote: Remote,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Rotate {
    async fn run(self) -> Result<Exit, CommandFailure> {
        let overlap = Some(span(&self.overlap)?);
        let request = RotateRequest { overlap, secret: self.secret, signing: self.signing };
        let server = self.remote.open()?;
        let path = format!("/api/v1/endpoints/{}/rotate", encoded(&self.id));
        let rotated = server.post(&path, &request).await?;
        if self.json {
            output::json(&rotated)?;
            return Ok(Exit::Done);
        }
        print_with_secret(&read(rotated)?)
    }
}

/// Commands that name one endpoint.
#[derive(Debug, clap::Args)]
pub(super) struct EndpointArg {
    /// The endpoint's id
    id: String,
    #[command(flatten)]
    action: ActionArgs,
}

impl EndpointArg {
    fn path(&self, act: &str) -> String {
        format!("/api/v1/endpoints/{}{act}", encoded(&self.id))
    }

    async fn change(self, act: &str) -> Result<Exit, CommandFailure> {
        let server = self.action.remote.open()?;
        let body = ReasonRequest { reason: self.action.reason.clone() };
        let changed = server.post(&self.path(&format!("/{act}")), &body).await?;
        if self.action.json {
            output::json(&changed)?;
            return Ok(Exit::Done);
        }
        let endpoint: Endpoint = read(changed)?;
        output::data(&format!("{} {}", endpoint.id, endpoint.status.as_str()))?;
        Ok(Exit::Done)
    }

    async fn ping(self) -> Result<Exit, CommandFailure> {
        let server = self.action.remote.open()?;
        let answered = server.post(&self.path("/ping"), &ReasonRequest::default()).await?;
        let ping: PingAnswer = read(answered.clone())?;
        if self.action.json {
            output::json(&answered)?;
        } else {
            let outcome = match (ping.status, &ping.error) {
                (Some(status), None) => format!("{status}"),
                (_, Some(error)) => error.clone(),
                (None, None) => "no answer".to_owned(),
            };
            output::data(&output::shown(&format!("{} ms  {outcome}", ping.took_ms)))?;
        }
        Ok(if ping.ok { Exit::Done } else { Exit::Negative })
    }

    async fn remove(self) -> Result<Exit, CommandFailure> {
        let server = self.action.remote.open()?;
        let removed = server.delete(&self.path("")).await?;
        if self.action.json {
            output::json(&removed)?;
            return Ok(Exit::Done);
        }
        output::words("removed; its open deliveries are cancelled");
        Ok(Exit::Done)
    }
}
