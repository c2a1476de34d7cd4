//! `hapax handlers`: list, pause and resume the handlers of a running server.

use serde_json::Value;

use super::admin_client::{self, Remote, encoded};
use super::events::{ActionArgs, read};
use super::output::{self, CommandFailure, Exit};
use crate::api::{Handler, HandlerPause, Lane, List, ReasonRequest};
use crate::format;

/// `hapax handlers`.
#[derive(Debug, clap::Subcommand)]
pub(super) enum Handlers {
    /// List the configured handlers with their backlog
    List(ListHandlers),
    /// Pause a handler: no node claims its jobs until it is resumed, and nothing is lost
    Pause(ChangeHandler),
    /// Resume a paused handler: every job that became due meanwhile runs now
    Resume(ChangeHandler),
}

impl Handlers {
    pub(super) fn run(self) -> Result<Exit, CommandFailure> {
        match self {
            Self::List(list) => admin_client::run(list.run()),
            Self::Pause(pause) => admin_client::run(pause.run("pause")),
            Self::Resume(resume) => admin_client::run(resume.run("resume")),
        }
    }
}

/// `hapax handlers list`.
#[derive(Debug, clap::Args)]
pub(super) struct ListHandlers {
    #[command(flatten)]
    remote: Remote,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

impl ListHandlers {
    async fn run(self) -> Result<Exit, CommandFailure> {
        let server = self.remote.open()?;
        let page: List<Value> = read(server.get("/api/v1/handlers").await?)?;
        if page.items.is_empty() {
            output::words("no handler is configured");
        }
        if self.json {
            for item in page.items {
                output::json(&item)?;
            }
            return Ok(Exit::Done);
        }
        let lanes: List<Lane> = read(server.get("/api/v1/lanes").await?)?;
        for item in page.items {
            let handler: Handler = read(item)?;
            let lane = lanes
                .items
                .iter()
                .find(|lane| lane.source == handler.source && lane.handler == handler.handler);
            output::data(&output::shown(&line_of(&handler, lane)))?;
        }
        Ok(Exit::Done)
    }
}

fn line_of(handler: &Handler, lane: Option<&Lane>) -> String {
    let backlog = match lane {
        None => "nothing waits".to_owned(),
        Some(lane) => {
            let counts = [lane.ready, lane.leased, lane.held, lane.parked, lane.review, lane.dead];
            let [ready, running, held, parked, review, dead] = counts.map(format::lane_count);
            format!(
                "{ready} ready, {running} running, {held} held, {parked} parked, {review} in review, {dead} dead"
            )
        }
    };
    let paused = match &handler.paused {
        None => String::new(),
        Some(pause) => {
            let reason = pause.reason.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
            format!("  paused since {} by {}{reason}", format::at(pause.since), pause.who)
        }
    };
    format!("{}/{}  {backlog}{paused}", handler.source, handler.handler)
}

/// `hapax handlers pause` and `resume`.
#[derive(Debug, clap::Args)]
pub(super) struct ChangeHandler {
    /// The handler, as SOURCE/HANDLER
    #[arg(value_name = "SOURCE/HANDLER")]
    handler: String,
    #[command(flatten)]
    action: ActionArgs,
}

impl ChangeHandler {
    /// Posts the change; `act` is the last segment of the route.
    async fn run(self, act: &str) -> Result<Exit, CommandFailure> {
        let Some((source, handler)) = self.handler.split_once('/') else {
            return Err(CommandFailure::usage(
                format!("\"{}\" names no handler", self.handler),
                "pass SOURCE/HANDLER, as `hapax handlers list` prints it",
            ));
        };
        let path = format!("/api/v1/handlers/{}/{}/{act}", encoded(source), encoded(handler));
        let body = ReasonRequest { reason: self.action.reason.clone() };
        let answer = self.action.remote.open()?.post(&path, &body).await?;
        if self.action.json {
            output::json(&answer)?;
            return Ok(Exit::Done);
        }
        let HandlerPause { source, handler, paused, changed } = read(answer)?;
        let state = match paused {
            Some(pause) => format!("paused since {}", format::at(pause.since)),
            None => "not paused".to_owned(),
        };
        output::data(&output::shown(&format!("{source}/{handler}  {state}")))?;
        if !changed {
            output::words("the handler was in that state before; nothing changed");
        }
        Ok(Exit::Done)
    }
}
