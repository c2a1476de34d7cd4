//! `hapax alerts`: the active alerts of a running server, their silence, and a test alert.

use serde_json::Value;

use super::admin_client::{self, Remote, encoded};
use super::events::read;
use super::output::{self, CommandFailure, Exit};
use crate::api::{Alert, AlertList, SilenceRequest, Span, TestedAlerts};
use crate::config::units;
use crate::format;

/// `hapax alerts`.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct Alerts {
    #[command(subcommand)]
    act: Option<AlertCommand>,
    #[command(flatten)]
    list: ListAlerts,
}

#[derive(Debug, clap::Subcommand)]
enum AlertCommand {
    /// Silence an alert for a time: it stays in the list and publishes no messages
    Silence(SilenceAlert),
    /// Publish a test alert to every endpoint that subscribes to alerts; exit 1 if no endpoint gets it
    Test(TestAlert),
}

impl Alerts {
    pub(super) fn run(self) -> Result<Exit, CommandFailure> {
        match self.act {
            None => admin_client::run(self.list.run()),
            Some(AlertCommand::Silence(silence)) => admin_client::run(silence.run()),
            Some(AlertCommand::Test(test)) => admin_client::run(test.run()),
        }
    }
}

#[derive(Debug, clap::Args)]
struct ListAlerts {
    #[command(flatten)]
    remote: Remote,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

impl ListAlerts {
    async fn run(self) -> Result<Exit, CommandFailure> {
        let answer = self.remote.open()?.get("/api/v1/alerts").await?;
        let items = answer["items"].as_array().cloned().unwrap_or_default();
        let AlertList { items: alerts, reach, .. } = read(answer)?;
        for (alert, item) in alerts.iter().zip(items) {
            match self.json {
                true => output::json(&item)?,
                false => output::data(&output::shown(&line_of(alert)))?,
            }
        }
        if alerts.is_empty() {
            output::words("no active alerts");
        }
        if let Some(problem) = reach.problem {
            output::words(&format!("no endpoint receives alerts: {}", output::shown(&problem)));
        }
        match alerts.iter().any(|alert| alert.silenced.is_none()) {
            true => Ok(Exit::Negative),
            false => Ok(Exit::Done),
        }
    }
}

fn line_of(alert: &Alert) -> String {
    let Alert { id, name, severity, since, message, silenced, .. } = alert;
    let silenced = silenced.as_ref().map_or_else(String::new, |silence| {
        format!(
            "  silenced until {} by {}: {}",
            format::at(silence.until),
            silence.who,
            silence.reason
        )
    });
    let (severity, since) = (severity.as_str(), format::at(*since));
    format!("{severity:<8}  {name}  since {since}  {message}  {id}{silenced}")
}

/// `hapax alerts silence`.
#[derive(Debug, clap::Args)]
struct SilenceAlert {
    /// The id of the alert, as `hapax alerts` prints it at the end of the line
    id: String,
    /// How long: 30m, 4h, at most 31d; 0s ends the silence
    #[arg(long = "for", value_name = "DURATION")]
    span: String,
    /// Why; other operators see it. The end of a silence needs none
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
    #[command(flatten)]
    remote: Remote,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl SilenceAlert {
    async fn run(self) -> Result<Exit, CommandFailure> {
        let span = units::duration(&self.span).map_err(|invalid| {
            CommandFailure::usage(
                format!("--for: \"{}\" {}", self.span, invalid.problem),
                invalid.hint,
            )
        })?;
        let body = SilenceRequest { r#for: Span(span), reason: self.reason };
        let path = format!("/api/v1/alerts/{}/silence", encoded(&self.id));
        let answer: Value = self.remote.open()?.post(&path, &body).await?;
        if self.json {
            output::json(&answer)?;
            return Ok(Exit::Done);
        }
        let alert: Alert = read(answer)?;
        output::data(&output::shown(&line_of(&alert)))?;
        if alert.silenced.is_none() {
            output::words("it is not silenced");
        }
        Ok(Exit::Done)
    }
}

/// `hapax alerts test`.
#[derive(Debug, clap::Args)]
struct TestAlert {
    #[command(flatten)]
    remote: Remote,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl TestAlert {
    async fn run(self) -> Result<Exit, CommandFailure> {
        let nothing = serde_json::json!({});
        let answer: Value = self.remote.open()?.post("/api/v1/alerts/test", &nothing).await?;
        let TestedAlerts { deliveries, messages, reach } = read(answer.clone())?;
        if self.json {
            output::json(&answer)?;
        } else {
            messages.iter().try_for_each(|id| output::data(&output::shown(id)))?;
        }
        match reach.problem {
            Some(problem) => {
                output::words(&format!("no endpoint receives alerts: {}", output::shown(&problem)));
                Ok(Exit::Negative)
            }
            None => {
                let sent = format::count(deliveries as u64, "message");
                output::words(&format!(
                    "the test alert is on its way to {} in {sent}; `hapax deliveries list` shows the answers",
                    format::count(reach.endpoints as u64, "endpoint")
                ));
                Ok(Exit::Done)
            }
        }
    }
}
