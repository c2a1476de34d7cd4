//! `hapax endpoints replay` and `hapax replays`: many deliveries sent again, through the admin API.

use hapax_core::store::PlannedDeliveries;
use serde_json::Value;

use super::admin_client::{self, Remote, encoded};
use super::events::{ActionArgs, read};
use super::output::{self, Exit, Failure};
use crate::api::{List, Moment, Plan, PlanRequest, Planned, ReasonRequest};
use crate::format;

/// `hapax endpoints replay`.
#[derive(Debug, clap::Args)]
pub(super) struct ReplayEndpoint {
    /// The endpoint's id
    id: String,
    /// dead: what died in that time; all: everything published in that time, what was delivered included;
    /// missing: what was published in that time and the endpoint never got
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
    pub(super) async fn run(self) -> Result<Exit, Failure> {
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
        let planned = server.post(&path, &request).await?;
        if self.action.json {
            output::json(&planned)?;
            return Ok(Exit::Done);
        }
        let Planned { id, count } = read(planned)?;
        let deliveries = match count {
            1 => "1 delivery".to_owned(),
            count => format!("{count} deliveries"),
        };
        match id {
            Some(id) => {
                output::data(&format!("{id}  {deliveries}"))?;
                output::words(&format!("`hapax replays show {id}` shows how far it is"));
            }
            None => output::data(&deliveries)?,
        }
        Ok(Exit::Done)
    }
}

/// `hapax replays`.
#[derive(Debug, clap::Subcommand)]
pub(super) enum Replays {
    /// List the newest plans
    List(ListPlans),
    /// Show how far a plan is
    Show(ShowPlan),
    /// Stop a plan; what it has sent stays sent
    Cancel(CancelPlan),
}

impl Replays {
    pub(super) fn run(self) -> Result<Exit, Failure> {
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
    async fn run(self) -> Result<Exit, Failure> {
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
    async fn run(self) -> Result<Exit, Failure> {
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
    async fn run(self) -> Result<Exit, Failure> {
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

fn print(plan: &Plan) -> Result<(), Failure> {
    let rate = plan.rate.map(|rate| format!(" at {rate} a second")).unwrap_or_default();
    let line = format!(
        "{}  {}  {}  {} of {} sent, {} skipped{rate}  {}",
        format::at(plan.created_at),
        plan.id,
        plan.state.as_str(),
        plan.done,
        plan.total,
        plan.skipped,
        plan.endpoint,
    );
    output::data(&output::shown(&line))?;
    Ok(())
}
