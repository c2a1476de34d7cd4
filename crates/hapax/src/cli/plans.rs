//! `hapax endpoints replay`, the filters of `hapax events replay`, `approve`, `reject` and `discard`, and
//! `hapax replays`: plans over many deliveries or events, through the admin API.

use hapax_core::store::PlannedDeliveries;
use serde_json::Value;

use super::admin_client::{self, Remote, encoded};
use super::events::{ActionArgs, EventFilterArgs, read};
use super::output::{self, CommandFailure, Exit};
use crate::api::{
    EventPlanRequest, List, Moment, Plan, PlanRequest, Planned, PlannedWork, ReasonRequest, Span,
};
use crate::format;

/// `hapax endpoints replay`.
#[derive(Debug, clap::Args)]
pub(super) struct ReplayEndpoint {
    /// The endpoint's id
    id: String,
    /// dead: deliveries that became dead in that time; all: deliveries of all messages published in that time;
    /// missing: messages published in that time that the endpoint never got
    #[arg(long, value_name = "STATUS", value_parser = which)]
    status: PlannedDeliveries,
    /// From this time on: RFC 3339, or a duration before now such as 1h
    #[arg(long, value_name = "TIME", value_parser = moment)]
    since: Moment,
    /// Before this time
    #[arg(long, value_name = "TIME", value_parser = moment)]
    until: Option<Moment>,
    /// At most this many deliveries a second
    #[arg(long, value_name = "N")]
    rate: Option<u32>,
    /// Only count
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    action: ActionArgs,
}

fn which(text: &str) -> Result<PlannedDeliveries, String> {
    PlannedDeliveries::parse(text).ok_or_else(|| "dead, all or missing".to_owned())
}

fn moment(text: &str) -> Result<Moment, String> {
    serde_json::from_value(Value::String(text.to_owned())).map_err(|error| error.to_string())
}

impl ReplayEndpoint {
    pub(super) async fn run(self) -> Result<Exit, CommandFailure> {
        let request = PlanRequest {
            status: self.status,
            since: self.since,
            until: self.until,
            rate: self.rate,
            dry_run: self.dry_run,
            reason: self.action.reason.clone(),
        };
        let server = self.action.remote.open()?;
        let path = format!("/api/v1/endpoints/{}/replay", encoded(&self.id));
        let planned = server.post_plan(&path, &request).await?;
        if self.action.json {
            output::json(&planned)?;
            return Ok(Exit::Done);
        }
        print_planned(read(planned)?, ["delivery", "deliveries"])
    }
}

/// Prints the answer to a request that made a plan.
fn print_planned(Planned { id, count }: Planned, noun: [&str; 2]) -> Result<Exit, CommandFailure> {
    let [one, many] = noun;
    let items = match count {
        1 => format!("1 {one}"),
        count => format!("{count} {many}"),
    };
    match id {
        Some(id) => {
            output::data(&format!("{id}  {items}"))?;
            output::words(&format!("`hapax replays show {id}` shows its progress"));
        }
        None => output::data(&items)?,
    }
    Ok(Exit::Done)
}

/// The events of a plan, and its rate.
#[derive(Debug, clap::Args)]
pub(super) struct EventPlanArgs {
    #[command(flatten)]
    filter: EventFilterArgs,
    /// Only events received at or after this time: 2026-03-01T12:00:00Z, or 1h for one hour ago
    #[arg(long, value_name = "TIME", value_parser = moment)]
    since: Option<Moment>,
    /// Only events received before this time
    #[arg(long, value_name = "TIME", value_parser = moment)]
    until: Option<Moment>,
    /// Only unfinished events that were received at least this long ago: 30m
    #[arg(long, value_name = "DURATION", value_parser = span)]
    unfinished_for: Option<Span>,
    /// Every event
    #[arg(long)]
    all: bool,
    /// At most this many events a second
    #[arg(long, value_name = "N")]
    rate: Option<u32>,
}

/// Options of a plan over events.
#[derive(Debug, Default)]
pub(super) struct EventPlanOptions {
    pub(super) handler: Option<String>,
    pub(super) force: bool,
    pub(super) dry_run: bool,
}

fn span(text: &str) -> Result<Span, String> {
    serde_json::from_value(Value::String(text.to_owned())).map_err(|error| error.to_string())
}

impl EventPlanArgs {
    /// Refuses filters in addition to the id of one event.
    pub(super) fn refuse(&self) -> Result<(), CommandFailure> {
        match self.is_filtered() || self.all || self.rate.is_some() {
            true => Err(CommandFailure::usage(
                "an id names one event, and filters and --rate are for many",
                "pass the id alone, or the filters alone",
            )),
            false => Ok(()),
        }
    }

    fn is_filtered(&self) -> bool {
        self.filter.is_filtered()
            || self.since.is_some()
            || self.until.is_some()
            || self.unfinished_for.is_some()
    }

    /// Makes the plan; `act` is the last segment of the route.
    pub(super) async fn run(
        self,
        act: &str,
        options: EventPlanOptions,
        action: &ActionArgs,
    ) -> Result<Exit, CommandFailure> {
        if !self.is_filtered() && options.handler.is_none() && !self.all {
            return Err(CommandFailure::usage(
                "no event is named",
                "pass the id of an event, a filter such as --source or --since, or --all",
            ));
        }
        let EventFilterArgs { tenant, source, event_type, status, text } = self.filter;
        let status = status.map(|status| serde_json::from_value(Value::String(status)));
        let status = status.transpose().map_err(|error| {
            CommandFailure::usage(
                format!("--status: {error}"),
                "`hapax events list --help` lists them",
            )
        })?;
        let request = EventPlanRequest {
            tenant,
            source,
            r#type: event_type,
            status,
            q: text,
            since: self.since,
            until: self.until,
            unfinished_for: self.unfinished_for,
            handler: options.handler,
            all: self.all,
            force: options.force,
            rate: self.rate,
            dry_run: options.dry_run,
            reason: action.reason.clone(),
        };
        let server = action.remote.open()?;
        let planned = server.post_plan(&format!("/api/v1/events/{act}"), &request).await?;
        if action.json {
            output::json(&planned)?;
            return Ok(Exit::Done);
        }
        print_planned(read(planned)?, ["event", "events"])
    }
}

/// `hapax replays`.
#[derive(Debug, clap::Subcommand)]
pub(super) enum Replays {
    /// List the newest plans
    List(ListPlans),
    /// Show the progress of a plan
    Show(ShowPlan),
    /// Stop a plan; the changes that it has made stay
    Cancel(CancelPlan),
}

impl Replays {
    pub(super) fn run(self) -> Result<Exit, CommandFailure> {
        match self {
            Self::List(list) => admin_client::run(list.run()),
            Self::Show(show) => admin_client::run(show.run()),
            Self::Cancel(cancel) => admin_client::run(cancel.run()),
        }
    }
}

/// `hapax replays list`.
#[derive(Debug, clap::Args)]
pub(super) struct ListPlans {
    #[command(flatten)]
    remote: Remote,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

impl ListPlans {
    async fn run(self) -> Result<Exit, CommandFailure> {
        let page: List<Value> = read(self.remote.open()?.get("/api/v1/replays").await?)?;
        if page.items.is_empty() {
            output::words("there is no plan");
        }
        for item in page.items {
            match self.json {
                true => output::json(&item)?,
                false => print(&read(item)?)?,
            }
        }
        Ok(Exit::Done)
    }
}

/// `hapax replays show`.
#[derive(Debug, clap::Args)]
pub(super) struct ShowPlan {
    /// The plan's id
    id: String,
    #[command(flatten)]
    remote: Remote,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl ShowPlan {
    async fn run(self) -> Result<Exit, CommandFailure> {
        let path = format!("/api/v1/replays/{}", encoded(&self.id));
        let shown = self.remote.open()?.get(&path).await?;
        match self.json {
            true => output::json(&shown)?,
            false => print(&read(shown)?)?,
        }
        Ok(Exit::Done)
    }
}

/// `hapax replays cancel`.
#[derive(Debug, clap::Args)]
pub(super) struct CancelPlan {
    /// The plan's id
    id: String,
    #[command(flatten)]
    action: ActionArgs,
}

impl CancelPlan {
    async fn run(self) -> Result<Exit, CommandFailure> {
        let path = format!("/api/v1/replays/{}/cancel", encoded(&self.id));
        let body = ReasonRequest { reason: self.action.reason.clone() };
        let cancelled = self.action.remote.open()?.post(&path, &body).await?;
        match self.action.json {
            true => output::json(&cancelled)?,
            false => print(&read(cancelled)?)?,
        }
        Ok(Exit::Done)
    }
}

fn print(plan: &Plan) -> Result<(), CommandFailure> {
    let rate = plan.rate.map(|rate| format!(" at {rate} a second")).unwrap_or_default();
    let (done, what) = match &plan.work {
        PlannedWork::Deliveries { endpoint, .. } => ("sent", endpoint.to_string()),
        PlannedWork::Events { action, source, .. } => match source {
            Some(source) => ("changed", format!("{action} events of {source}")),
            None => ("changed", format!("{action} events")),
        },
    };
    let line = format!(
        "{}  {}  {}  {} of {} {done}, {} skipped{rate}  {what}",
        format::at(plan.created_at),
        plan.id,
        plan.state.as_str(),
        plan.done,
        plan.total,
        plan.skipped,
    );
    output::data(&output::shown(&line))?;
    Ok(())
}
