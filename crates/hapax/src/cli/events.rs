//! `hapax events`: list, show, replay, approve, reject, discard and tail, through the admin API.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use serde_json::Value;

use super::admin_client::{self, Remote, Server, encoded, query};
use super::lists::{Filters, ListArgs, Words, print_item};
use super::output::{self, CommandFailure, Exit};
use super::plans::{EventPlanArgs, EventPlanOptions};
use crate::api::{
    DecideRequest, Decided, Event, EventSummary, List as Page, ReplayEffect, ReplayEventRequest,
    ReplayItem,
};
use crate::format;

/// `hapax events`.
#[derive(Debug, clap::Subcommand)]
pub(super) enum Events {
    /// List events, newest first
    List(List),
    /// Show one event with its arrivals, jobs, headers and body
    Show(Show),
    /// Run the handlers of an event again, or of many that match a filter; finished ones only with --force
    Replay(Replay),
    /// Approve an event in review, or many that match a filter: their handlers run
    #[command(mut_arg("handler", |handler| handler.hide(true)))]
    Approve(Decide),
    /// Reject an event in review, or many that match a filter: their handlers never run
    #[command(mut_arg("reason", |reason| reason.required(true)))]
    #[command(mut_arg("handler", |handler| handler.hide(true)))]
    Reject(Decide),
    /// Discard the dead letters of an event, or of many that match a filter: they are not retried, and their
    /// payloads can be pruned
    Discard(Decide),
    /// Print events as they arrive, until interrupted
    Tail(Tail),
}

impl Events {
    pub(super) fn run(self) -> Result<Exit, CommandFailure> {
        match self {
            Self::List(list) => admin_client::run(list.run()),
            Self::Show(show) => admin_client::run(show.run()),
            Self::Replay(replay) => admin_client::run(replay.run()),
            Self::Approve(approve) => admin_client::run(approve.run("approve")),
            Self::Reject(reject) => admin_client::run(reject.run("reject")),
            Self::Discard(discard) => admin_client::run(discard.run("discard")),
            Self::Tail(tail) => admin_client::run(tail.run()),
        }
    }
}

/// Filters for events.
#[derive(Debug, clap::Args)]
pub(super) struct EventFilterArgs {
    /// Only events of this tenant
    #[arg(long)]
    pub(super) tenant: Option<String>,
    /// Only events of this source
    #[arg(long)]
    pub(super) source: Option<String>,
    /// Only events of exactly this type
    #[arg(long = "type", value_name = "TYPE")]
    pub(super) event_type: Option<String>,
    /// Only events with this status: review, discarded, dead, failed, held, processing, received, processed,
    /// stale or ignored
    #[arg(long)]
    pub(super) status: Option<String>,
    /// Only events whose id or body contains this text
    #[arg(long = "search", value_name = "TEXT")]
    pub(super) text: Option<String>,
}

impl EventFilterArgs {
    /// Whether any filter is given.
    pub(super) fn is_filtered(&self) -> bool {
        self.pairs().iter().any(|(_, value)| value.is_some())
    }

    fn pairs(&self) -> Filters {
        vec![
            ("tenant", self.tenant.clone()),
            ("source", self.source.clone()),
            ("type", self.event_type.clone()),
            ("status", self.status.clone()),
            ("q", self.text.clone()),
        ]
    }
}

/// `hapax events list`.
#[derive(Debug, clap::Args)]
pub(super) struct List {
    #[command(flatten)]
    filter: EventFilterArgs,
    /// Only events received at or after this time: 2026-03-01T12:00:00Z, or 1h for one hour ago
    #[arg(long, value_name = "TIME")]
    since: Option<String>,
    /// Only events received before this time, in the same format
    #[arg(long, value_name = "TIME")]
    until: Option<String>,
    /// Only unfinished events that were received at least this long ago: 30m
    #[arg(long, value_name = "DURATION")]
    unfinished_for: Option<String>,
    #[command(flatten)]
    list: ListArgs,
}

impl List {
    async fn run(self) -> Result<Exit, CommandFailure> {
        let mut filters = self.filter.pairs();
        filters.extend([
            ("since", self.since),
            ("until", self.until),
            ("unfinished_for", self.unfinished_for),
        ]);
        let words = Words { items: "events", empty: "no event matches the filter" };
        self.list.print("events", filters, words, line_of).await
    }
}

/// `hapax events show`.
#[derive(Debug, clap::Args)]
pub(super) struct Show {
    /// The event's id, Hapax's or the sender's
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
        let event = server.get(&format!("/api/v1/events/{}", encoded(&self.id))).await?;
        if self.json {
            output::json(&event)?;
            return Ok(Exit::Done);
        }
        for line in page_of(&read(event)?) {
            output::data(&output::shown(&line))?;
        }
        Ok(Exit::Done)
    }
}

/// Everything that is stored about an event, line by line.
fn page_of(event: &Event) -> Vec<String> {
    let summary = &event.summary;
    let EventSummary { id, event_id, tenant, source, status, .. } = summary;
    let mut lines = vec![
        format!("id           {id}"),
        format!("event_id     {event_id}"),
        format!("source       {source} (tenant {tenant})"),
        format!("event_type   {}", summary.event_type.as_deref().unwrap_or("-")),
        format!("status       {}", status.as_str()),
        format!("received_at  {}", format::at(summary.received_at)),
        format!(
            "arrivals     {}, {} with other bytes",
            summary.arrival_count, summary.conflict_count
        ),
    ];
    let facts = [
        ("occurred_at", summary.occurred_at.map(format::at)),
        ("review", summary.review.map(|reason| reason.as_str().to_owned())),
        ("came_under", summary.came_under.clone()),
        ("result", summary.result.clone()),
    ];
    for (name, fact) in facts {
        lines.extend(fact.map(|fact| format!("{name:<12} {fact}")));
    }
    for arrival in &event.arrivals {
        let from = arrival.remote.map_or_else(|| "-".to_owned(), |remote| remote.to_string());
        let time = format::at(arrival.received_at);
        lines.push(format!("arrival      {time} {} from {from}", arrival.decision.as_str()));
    }
    for job in &event.jobs {
        let note = job.error.as_ref().or(job.result.as_ref()).map(String::as_str).unwrap_or("");
        let (handler, status) = (&job.handler, job.status.as_str());
        lines.push(format!("job          {} {handler} {status} {note}", job.id));
        for attempt in &job.attempts {
            let time = format::at(attempt.started_at);
            let error = attempt.error.as_deref().unwrap_or("");
            let (number, outcome) = (attempt.attempt, &attempt.outcome);
            lines.push(format!("  attempt {number}  {time} {outcome} {error}"));
            if let Some(status) = attempt.status {
                let answer = attempt.answer.as_deref().unwrap_or("");
                lines.push(format!("    answered   HTTP {status} {answer}"));
            }
        }
    }
    for message in &event.messages {
        let time = format::at(message.created_at);
        lines.push(format!("message      {time} {} {}", message.id, message.r#type));
    }
    for action in &event.actions {
        let reason = action.reason.as_deref().unwrap_or("");
        let time = format::at(action.at);
        lines.push(format!("action       {time} {} by {} {reason}", action.action, action.who));
    }
    for (name, value) in &event.headers {
        lines.push(format!("header       {name}: {value}"));
    }
    match (&event.body.body, &event.body.body_base64) {
        (Some(text), _) => {
            lines.push(String::new());
            lines.extend(text.lines().map(str::to_owned));
        }
        (None, Some(base64)) => lines.extend([String::new(), format!("base64 {base64}")]),
        (None, None) => {}
    }
    lines.into_iter().map(|line| line.trim_end().to_owned()).collect()
}

/// `hapax events replay`.
#[derive(Debug, clap::Args)]
pub(super) struct Replay {
    /// The event's id, Hapax's or the sender's. Without it, a plan runs every event that matches the filters
    id: Option<String>,
    #[command(flatten)]
    plan: EventPlanArgs,
    /// Only print what would happen
    #[arg(long)]
    dry_run: bool,
    /// Run only this handler
    #[arg(long, value_name = "NAME")]
    handler: Option<String>,
    /// Also run handlers that are done, under a new run number
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    action: ActionArgs,
}

impl Replay {
    async fn run(self) -> Result<Exit, CommandFailure> {
        let Self { id, plan, dry_run, handler, force, .. } = self;
        let Some(id) = id else {
            let options = EventPlanOptions { handler, force, dry_run };
            return plan.run("replay", options, &self.action).await;
        };
        plan.refuse()?;
        let reason = self.action.reason.clone();
        let body = ReplayEventRequest { dry_run, handler, force, reason };
        let server = self.action.remote.open()?;
        let path = format!("/api/v1/events/{}/replay", encoded(&id));
        let page: Page<Value> = read(server.post(&path, &body).await?)?;
        if page.items.is_empty() {
            output::words("no configured handler takes this event");
        }
        replayed(page.items, self.action.json)
    }
}

/// Prints one line for each job of a replay.
pub(super) fn replayed(items: Vec<Value>, json: bool) -> Result<Exit, CommandFailure> {
    for item in items {
        if json {
            output::json(&item)?;
            continue;
        }
        let ReplayItem { event_id, handler, effect, detail, .. } = read(item)?;
        let effect = match effect {
            ReplayEffect::WouldRun => "would run",
            ReplayEffect::Runs => "queued to run",
            ReplayEffect::AlreadyApplied => "done already: not run again",
            ReplayEffect::Stale => "stale: a newer version was applied, so it is not run",
            ReplayEffect::AlreadyOpen => "due, running or held already: nothing changed",
            ReplayEffect::Discarded => "rejected or discarded: not run without --force",
            ReplayEffect::NoHandler => {
                detail.as_deref().unwrap_or("no configured handler takes it")
            }
            ReplayEffect::NoOrder => detail.as_deref().unwrap_or("its order cannot be read"),
        };
        output::data(&output::shown(&format!("{event_id}  {handler}  {effect}")))?;
    }
    Ok(Exit::Done)
}

/// `hapax events approve`, `reject` and `discard`.
#[derive(Debug, clap::Args)]
pub(super) struct Decide {
    /// The event's id, Hapax's or the sender's. Without it, a plan decides about every event that matches the
    /// filters
    id: Option<String>,
    #[command(flatten)]
    plan: EventPlanArgs,
    /// Only the dead letters of this handler
    #[arg(long, value_name = "NAME", conflicts_with = "id")]
    handler: Option<String>,
    /// Only count the events that match the filters
    #[arg(long, conflicts_with = "id")]
    dry_run: bool,
    #[command(flatten)]
    action: ActionArgs,
}

impl Decide {
    /// Posts the decision; `action` is the last segment of the route.
    async fn run(self, action: &str) -> Result<Exit, CommandFailure> {
        let Some(id) = self.id else {
            let (handler, dry_run) = (self.handler, self.dry_run);
            let options = EventPlanOptions { handler, dry_run, ..EventPlanOptions::default() };
            return self.plan.run(action, options, &self.action).await;
        };
        self.plan.refuse()?;
        let (server, body) = self.action.open()?;
        let path = format!("/api/v1/events/{}/{action}", encoded(&id));
        decided(server.post(&path, &body).await?, self.action.json)
    }
}

/// Arguments of every command that changes something on a server.
#[derive(Debug, clap::Args)]
pub(super) struct ActionArgs {
    /// Why; the reason is recorded with the action
    #[arg(long, value_name = "TEXT")]
    pub(super) reason: Option<String>,
    #[command(flatten)]
    pub(super) remote: Remote,
    /// Print one JSON object per line
    #[arg(long)]
    pub(super) json: bool,
}

impl ActionArgs {
    /// The server, and the body of a decision.
    pub(super) fn open(&self) -> Result<(Server, DecideRequest), CommandFailure> {
        Ok((self.remote.open()?, DecideRequest { reason: self.reason.clone() }))
    }
}

/// Prints the result of a decision.
pub(super) fn decided(decided: Value, json: bool) -> Result<Exit, CommandFailure> {
    if json {
        output::json(&decided)?;
        return Ok(Exit::Done);
    }
    let Decided { id, event_id, status, changed } = read(decided)?;
    output::data(&output::shown(&format!("{id} {event_id} {}", status.as_str())))?;
    if !changed {
        output::words("this was decided before; nothing changed");
    }
    Ok(Exit::Done)
}

/// How often `tail` asks the server for new events.
const TAIL_EVERY: Duration = Duration::from_secs(1);

/// Events per page of one poll.
const TAIL_PAGE: usize = 500;

/// Pages per poll. When more arrive, the rest is skipped: `tail` would never catch up.
const TAIL_PAGES_MAX: usize = 10;

/// How many printed ids are remembered.
const TAIL_SEEN_MAX: usize = 20_000;

/// `hapax events tail`.
#[derive(Debug, clap::Args)]
pub(super) struct Tail {
    #[command(flatten)]
    filter: EventFilterArgs,
    /// Start with this many of the stored events
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u16).range(0..=500))]
    last: u16,
    /// Stop after this many events
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    #[command(flatten)]
    remote: Remote,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

impl Tail {
    async fn run(self) -> Result<Exit, CommandFailure> {
        let server = self.remote.open()?;
        tokio::select! {
            ended = self.follow(&server) => ended,
            _ = tokio::signal::ctrl_c() => Ok(Exit::Done),
        }
    }

    async fn follow(&self, server: &Server) -> Result<Exit, CommandFailure> {
        let mut seen = SeenIds::default();
        let mut left = self.count.unwrap_or(u64::MAX);
        let mut first = self.look(server, &seen).await?;
        seen.note(&first);
        first.truncate(usize::from(self.last));
        let mut new = first;
        let mut gone = false;
        loop {
            for event in new.into_iter().rev() {
                if left == 0 {
                    break;
                }
                print_item(event, self.json, line_of)?;
                left -= 1;
            }
            if left == 0 {
                return Ok(Exit::Done);
            }
            tokio::time::sleep(TAIL_EVERY).await;
            // A server that cannot be reached may be restarting, so polling continues.
            new = match self.look(server, &seen).await {
                Ok(new) => {
                    gone = false;
                    new
                }
                Err(failure) if failure.exit == Exit::Unreachable => {
                    if !std::mem::replace(&mut gone, true) {
                        failure.report();
                    }
                    Vec::new()
                }
                Err(failure) => return Err(failure),
            };
            seen.note(&new);
        }
    }

    /// Events that were not printed yet, newest first.
    async fn look(&self, server: &Server, seen: &SeenIds) -> Result<Vec<Value>, CommandFailure> {
        let mut new = Vec::new();
        let mut cursor = None;
        for _ in 0..TAIL_PAGES_MAX {
            let mut pairs = self.filter.pairs();
            pairs.extend([("limit", Some(TAIL_PAGE.to_string())), ("cursor", cursor)]);
            let page: Page<Value> =
                read(server.get(&format!("/api/v1/events{}", query(pairs))).await?)?;
            let before = page.items.len();
            let fresh = page.items.into_iter().filter(|event| !seen.has(event));
            let fresh: Vec<Value> = fresh.collect();
            let met_known = fresh.len() < before;
            new.extend(fresh);
            cursor = page.next;
            // A search that stopped at its bound has already passed all events since the previous
            // poll.
            let is_past = page.searched_to.is_some();
            if met_known || is_past || cursor.is_none() || seen.is_empty() {
                return Ok(new);
            }
        }
        output::warning("events arrive faster than they can be printed: some are not shown");
        Ok(new)
    }
}

/// Ids that were printed or skipped; the oldest are dropped first.
#[derive(Debug, Default)]
struct SeenIds {
    ids: HashSet<String>,
    order: VecDeque<String>,
}

impl SeenIds {
    fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    fn has(&self, event: &Value) -> bool {
        event["id"].as_str().is_some_and(|id| self.ids.contains(id))
    }

    fn note(&mut self, events: &[Value]) {
        for id in events.iter().rev().filter_map(|event| event["id"].as_str()) {
            if self.ids.insert(id.to_owned()) {
                self.order.push_back(id.to_owned());
            }
        }
        while self.order.len() > TAIL_SEEN_MAX {
            if let Some(oldest) = self.order.pop_front() {
                self.ids.remove(&oldest);
            }
        }
    }
}

/// Formats an event as the one line that a list prints.
fn line_of(event: Value) -> Result<String, CommandFailure> {
    let event: EventSummary = read(event)?;
    let copies = match event.arrival_count {
        0 | 1 => String::new(),
        count => format!("  ×{count}"),
    };
    let conflicts = if event.conflict_count > 0 { "  conflict" } else { "" };
    Ok(format!(
        "{}  {:<10}  {}  {}  {}  {}{copies}{conflicts}",
        format::at(event.received_at),
        event.status.as_str(),
        event.source,
        event.event_type.as_deref().unwrap_or("-"),
        event.event_id,
        event.id,
    ))
}

/// Decodes an answer of the API.
pub(super) fn read<T: serde::de::DeserializeOwned>(answer: Value) -> Result<T, CommandFailure> {
    T::deserialize(answer).map_err(|error| {
        CommandFailure::unreachable(format!("cannot decode the answer of the server: {error}"))
    })
}
