//! `hapax publish`, `hapax messages` and `hapax deliveries`: the sending side, through the admin API.

use std::io::Read as _;

use hapax_core::message::MessageData;
use serde_json::Value;

use super::admin_client::{self, Remote, encoded, query};
use super::events::{ActionArgs, read};
use super::lists::{Filters, ListArgs, Words};
use super::output::{self, CommandFailure, Exit};
use crate::api::{
    ChangedDeliveries, Delivery, DeliveryEffect, Message, MessageSummary, PublishRequest,
    Published, ReasonRequest, ReplayedDelivery, SkipEffect, SkippedDelivery,
};
use crate::format;

/// `hapax publish`.
#[derive(Debug, clap::Args)]
pub(super) struct Publish {
    /// The type of the message, such as invoice.paid
    r#type: String,
    /// The content: JSON, @FILE, or - for standard input
    #[arg(long, value_name = "JSON", default_value = "{}")]
    data: String,
    /// The message's id; the same id twice is one message
    #[arg(long)]
    id: Option<String>,
    /// The order key
    #[arg(long)]
    key: Option<String>,
    /// The owner
    #[arg(long)]
    tenant: Option<String>,
    /// The version of your API that the data follows
    #[arg(long, value_name = "VERSION")]
    api_version: Option<String>,
    #[command(flatten)]
    remote: Remote,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Publish {
    pub(super) fn run(self) -> Result<Exit, CommandFailure> {
        admin_client::run(self.publish())
    }

    async fn publish(self) -> Result<Exit, CommandFailure> {
        let data = MessageData::parse(text(&self.data)?).map_err(|error| {
            CommandFailure::usage(
                format!("--data is not JSON: {error}"),
                "write --data '{\"id\":\"inv_1\"}', --data @file.json, or --data -",
            )
        })?;
        let request = PublishRequest {
            r#type: self.r#type,
            data,
            id: self.id,
            key: self.key,
            tenant: self.tenant,
            api_version: self.api_version,
        };
        let server = self.remote.open()?;
        let answer = server.post("/api/v1/messages", &request).await?;
        if self.json {
            output::json(&answer)?;
            return Ok(Exit::Done);
        }
        let published: Published = read(answer)?;
        let count = match published.deliveries {
            1 => "1 delivery".to_owned(),
            count => format!("{count} deliveries"),
        };
        output::data(&output::shown(&format!("{}  {count}", published.id)))?;
        if published.duplicate {
            output::words("this message was published before; nothing changed");
        } else if published.deliveries == 0 {
            output::words("no endpoint matches this type and tenant, so it is delivered nowhere");
        }
        Ok(Exit::Done)
    }
}

/// The content of `--data`.
fn text(given: &str) -> Result<String, CommandFailure> {
    let failed = |what: &str, error: std::io::Error| {
        CommandFailure::unreachable(format!("cannot read {what}: {error}"))
    };
    match given.strip_prefix('@') {
        Some(file) => std::fs::read_to_string(file).map_err(|error| failed(file, error)),
        None if given == "-" => {
            let mut read = String::new();
            let input = std::io::stdin().read_to_string(&mut read);
            input.map(|_| read).map_err(|error| failed("standard input", error))
        }
        None => Ok(given.to_owned()),
    }
}

/// `hapax messages`.
#[derive(Debug, clap::Subcommand)]
pub(super) enum Messages {
    /// List messages, newest first
    List(ListMessages),
    /// Show one message with its deliveries and every attempt
    Show(ShowMessage),
    /// Send again the deliveries of a message that are not delivered
    Replay(ActOnMessage),
    /// Cancel the open deliveries of a message
    Cancel(ActOnMessage),
}

impl Messages {
    pub(super) fn run(self) -> Result<Exit, CommandFailure> {
        match self {
            Self::List(list) => admin_client::run(list.run()),
            Self::Show(show) => admin_client::run(show.run()),
            Self::Replay(act) => admin_client::run(act.run("replay")),
            Self::Cancel(act) => admin_client::run(act.run("cancel")),
        }
    }
}

/// Arguments of both lists.
#[derive(Debug, clap::Args)]
struct SendingListArgs {
    /// Only those published at or after this time: 2026-03-01T12:00:00Z, or 1h for one hour ago
    #[arg(long, value_name = "TIME")]
    since: Option<String>,
    /// Only those published before this time, in the same format
    #[arg(long, value_name = "TIME")]
    until: Option<String>,
    /// Only those of this tenant
    #[arg(long)]
    tenant: Option<String>,
    /// Only those with this order key
    #[arg(long)]
    key: Option<String>,
    /// Only those with this status: dead, failed, held, sending, waiting, delivered or cancelled
    #[arg(long)]
    status: Option<String>,
    #[command(flatten)]
    list: ListArgs,
}

impl SendingListArgs {
    /// Reads one page of `route` and prints each item.
    async fn print(
        self,
        route: &str,
        mut filters: Filters,
        words: Words,
        line: impl Fn(Value) -> Result<String, CommandFailure>,
    ) -> Result<Exit, CommandFailure> {
        filters.extend([
            ("since", self.since),
            ("until", self.until),
            ("tenant", self.tenant),
            ("key", self.key),
            ("status", self.status),
        ]);
        self.list.print(route, filters, words, line).await
    }
}

/// `hapax messages list`.
#[derive(Debug, clap::Args)]
pub(super) struct ListMessages {
    /// Only messages of exactly this type
    #[arg(long = "type", value_name = "TYPE")]
    message_type: Option<String>,
    #[command(flatten)]
    list: SendingListArgs,
}

impl ListMessages {
    async fn run(self) -> Result<Exit, CommandFailure> {
        let words = Words { items: "messages", empty: "no messages match" };
        let filters = vec![("type", self.message_type)];
        self.list
            .print("messages", filters, words, |item| {
                let message: MessageSummary = read(item)?;
                Ok(format!(
                    "{}  {}  {}  {}  {}",
                    format::at(message.created_at),
                    message.id,
                    message.tenant,
                    message.r#type,
                    message.status
                ))
            })
            .await
    }
}

/// `hapax messages show`.
#[derive(Debug, clap::Args)]
pub(super) struct ShowMessage {
    /// The message's id
    id: String,
    /// The owner, where messages of several tenants have this id
    #[arg(long)]
    tenant: Option<String>,
    #[command(flatten)]
    remote: Remote,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl ShowMessage {
    async fn run(self) -> Result<Exit, CommandFailure> {
        let server = self.remote.open()?;
        let query = query([("tenant", self.tenant)]);
        let shown = server.get(&format!("/api/v1/messages/{}{query}", encoded(&self.id))).await?;
        if self.json {
            output::json(&shown)?;
            return Ok(Exit::Done);
        }
        let Message { summary, body, deliveries } = read(shown)?;
        let line = format!(
            "{}  {}  {}  {}  published {}",
            summary.id,
            summary.tenant,
            summary.r#type,
            summary.status,
            format::at(summary.created_at)
        );
        output::data(&output::shown(&line))?;
        if let Some(body) = &body.body {
            output::data(&output::shown(body))?;
        }
        if deliveries.is_empty() {
            output::words("no endpoint matched when it was published");
        }
        for delivery in &deliveries {
            print_delivery(delivery)?;
        }
        Ok(Exit::Done)
    }
}

/// `hapax messages replay` and `hapax messages cancel`.
#[derive(Debug, clap::Args)]
pub(super) struct ActOnMessage {
    /// The message's id
    id: String,
    /// The owner, where messages of several tenants have this id
    #[arg(long)]
    tenant: Option<String>,
    #[command(flatten)]
    action: ActionArgs,
}

impl ActOnMessage {
    async fn run(self, act: &str) -> Result<Exit, CommandFailure> {
        let server = self.action.remote.open()?;
        let query = query([("tenant", self.tenant)]);
        let path = format!("/api/v1/messages/{}/{act}{query}", encoded(&self.id));
        let body = ReasonRequest { reason: self.action.reason.clone() };
        let changed = server.post(&path, &body).await?;
        if self.action.json {
            output::json(&changed)?;
            return Ok(Exit::Done);
        }
        let ChangedDeliveries { deliveries } = read(changed)?;
        for id in &deliveries {
            output::data(&id.to_string())?;
        }
        if deliveries.is_empty() {
            output::words(&format!("no delivery of this message could be changed by {act}"));
        }
        Ok(Exit::Done)
    }
}

/// `hapax deliveries`.
#[derive(Debug, clap::Subcommand)]
pub(super) enum Deliveries {
    /// List deliveries, newest first
    List(ListDeliveries),
    /// Show one delivery with every attempt
    Show(ShowDelivery),
    /// Send one delivery again, or now if it waits for its next attempt
    Replay(ReplayDelivery),
    /// Give up one delivery that waits or is dead, so that the next one under its key is sent
    Skip(SkipDelivery),
}

impl Deliveries {
    pub(super) fn run(self) -> Result<Exit, CommandFailure> {
        match self {
            Self::List(list) => admin_client::run(list.run()),
            Self::Show(show) => admin_client::run(show.run()),
            Self::Replay(replay) => admin_client::run(replay.run()),
            Self::Skip(skip) => admin_client::run(skip.run()),
        }
    }
}

/// `hapax deliveries list`.
#[derive(Debug, clap::Args)]
pub(super) struct ListDeliveries {
    /// Only deliveries to this endpoint
    #[arg(long, value_name = "ID")]
    endpoint: Option<String>,
    /// Only deliveries of this message
    #[arg(long, value_name = "ID")]
    message: Option<String>,
    #[command(flatten)]
    list: SendingListArgs,
}

impl ListDeliveries {
    async fn run(self) -> Result<Exit, CommandFailure> {
        let words = Words { items: "deliveries", empty: "no deliveries match" };
        let filters = vec![("endpoint", self.endpoint), ("message", self.message)];
        let line = |item| Ok(delivery_line(&read(item)?));
        self.list.print("deliveries", filters, words, line).await
    }
}

fn delivery_line(delivery: &Delivery) -> String {
    format!(
        "{}  {}  {}  {}  {}  {}  {}",
        format::at(delivery.created_at),
        delivery.id,
        delivery.message,
        delivery.status.as_str(),
        format::count(u64::from(delivery.attempt), "attempt"),
        delivery.url,
        delivery.reason.as_deref().unwrap_or("-")
    )
}

/// Prints a delivery with its attempts.
fn print_delivery(delivery: &Delivery) -> Result<(), CommandFailure> {
    output::data(&output::shown(&delivery_line(delivery)))?;
    for attempt in &delivery.attempts {
        let took = attempt.took_ms.map_or_else(|| "-".to_owned(), |ms| format!("{ms} ms"));
        let outcome = match (&attempt.error, attempt.status) {
            (Some(error), _) => error.clone(),
            (None, Some(status)) => status.to_string(),
            (None, None) => "-".to_owned(),
        };
        let line =
            format!("  {}  attempt {}  {took}  {outcome}", format::at(attempt.at), attempt.n);
        output::data(&output::shown(&line))?;
        if let Some(answer) = attempt.answer.as_deref().filter(|answer| !answer.is_empty()) {
            output::data(&output::shown(&format!("    {answer}")))?;
        }
    }
    for action in &delivery.actions {
        let reason = action.reason.as_ref().map(|reason| format!("  \"{reason}\""));
        let line = format!(
            "  {}  {} by {}{}",
            format::at(action.at),
            action.action,
            action.who,
            reason.unwrap_or_default()
        );
        output::data(&output::shown(&line))?;
    }
    Ok(())
}

/// `hapax deliveries show`.
#[derive(Debug, clap::Args)]
pub(super) struct ShowDelivery {
    /// The delivery's id
    id: String,
    #[command(flatten)]
    remote: Remote,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl ShowDelivery {
    async fn run(self) -> Result<Exit, CommandFailure> {
        let server = self.remote.open()?;
        let shown = server.get(&format!("/api/v1/deliveries/{}", encoded(&self.id))).await?;
        match self.json {
            true => output::json(&shown)?,
            false => print_delivery(&read(shown)?)?,
        }
        Ok(Exit::Done)
    }
}

/// `hapax deliveries replay`.
#[derive(Debug, clap::Args)]
pub(super) struct ReplayDelivery {
    /// The delivery's id
    id: String,
    #[command(flatten)]
    action: ActionArgs,
}

impl ReplayDelivery {
    async fn run(self) -> Result<Exit, CommandFailure> {
        let server = self.action.remote.open()?;
        let path = format!("/api/v1/deliveries/{}/replay", encoded(&self.id));
        let body = ReasonRequest { reason: self.action.reason.clone() };
        let replayed = server.post(&path, &body).await?;
        if self.action.json {
            output::json(&replayed)?;
            return Ok(Exit::Done);
        }
        let ReplayedDelivery { id, effect } = read(replayed)?;
        let effect = match effect {
            DeliveryEffect::Due => "is sent now",
            DeliveryEffect::AlreadyOpen => "was due or under way already",
        };
        output::data(&format!("{id} {effect}"))?;
        Ok(Exit::Done)
    }
}

/// `hapax deliveries skip`.
#[derive(Debug, clap::Args)]
pub(super) struct SkipDelivery {
    /// The delivery's id
    id: String,
    #[command(flatten)]
    action: ActionArgs,
}

impl SkipDelivery {
    async fn run(self) -> Result<Exit, CommandFailure> {
        let server = self.action.remote.open()?;
        let path = format!("/api/v1/deliveries/{}/skip", encoded(&self.id));
        let body = ReasonRequest { reason: self.action.reason.clone() };
        let skipped = server.post(&path, &body).await?;
        if self.action.json {
            output::json(&skipped)?;
            return Ok(Exit::Done);
        }
        let SkippedDelivery { id, effect } = read(skipped)?;
        let effect = match effect {
            SkipEffect::Skipped => "is skipped; the next delivery under its key is sent",
            SkipEffect::AlreadyOver => "was delivered or cancelled already",
        };
        output::data(&format!("{id} {effect}"))?;
        Ok(Exit::Done)
    }
}
