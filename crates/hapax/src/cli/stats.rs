//! `hapax stats`: the statistics of a running server.

use jiff::SignedDuration;

use super::admin_client::{self, Remote, query};
use super::events::read;
use super::output::{self, CommandFailure, Exit};
use crate::api::{self, Figures};
use crate::format;

/// `hapax stats`.
#[derive(Debug, clap::Args)]
pub(super) struct Stats {
    /// Only this source
    #[arg(long)]
    source: Option<String>,
    /// The window of the counts, such as 15m or 24h
    #[arg(long, value_name = "DURATION", default_value = "1h")]
    window: String,
    #[command(flatten)]
    remote: Remote,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Stats {
    pub(super) fn run(self) -> Result<Exit, CommandFailure> {
        admin_client::run(self.ask())
    }

    async fn ask(self) -> Result<Exit, CommandFailure> {
        let server = self.remote.open()?;
        let wanted = [("source", self.source.clone()), ("window", Some(self.window))];
        let answer = server.get(&format!("/api/v1/stats{}", query(wanted))).await?;
        if self.json {
            output::json(&answer)?;
            return Ok(Exit::Done);
        }
        let stats: api::Stats = read(answer)?;
        let heads = ["received", "unique", "duplicates", "success", "failed", "p50", "p99"];
        output::data(&columns("source", heads.map(str::to_owned), "retries after"))?;
        for (source, figures) in stats.sources.iter().flatten() {
            output::data(&line(source, figures))?;
        }
        output::data(&line(self.source.as_deref().unwrap_or("all"), &stats.figures))?;
        if stats.sampled {
            output::words("there are many events: the gaps between copies come from a sample");
        }
        for one in &stats.paused_handlers {
            let since =
                one.paused.as_ref().map_or_else(|| "-".to_owned(), |at| format::at(at.since));
            let name = output::shown(&format!("{}/{}", one.source, one.handler));
            output::words(&format!(
                "the handler {name} has been paused since {since}: its jobs wait"
            ));
        }
        output::words(&format!("counted since {}", format::at(stats.since)));
        Ok(Exit::Done)
    }
}

fn line(source: &str, figures: &Figures) -> String {
    let percent = |share: Option<f64>| match share {
        Some(share) => format!("{:.1}%", share * 100.0),
        None => "-".to_owned(),
    };
    let duplicates = format!("{} ({})", figures.duplicates, percent(figures.duplicate_rate));
    let gaps: Vec<String> = figures.gaps_seconds.iter().map(|gap| seconds(Some(*gap))).collect();
    let figures = [
        figures.received.to_string(),
        figures.unique.to_string(),
        duplicates,
        percent(figures.success_rate),
        figures.failed_verifications.to_string(),
        seconds(figures.processing_seconds.p50),
        seconds(figures.processing_seconds.p99),
    ];
    columns(&output::shown(source), figures, &gaps.join(", "))
}

fn columns(source: &str, figures: [String; 7], gaps: &str) -> String {
    let [received, unique, duplicates, success, failed, p50, p99] = figures;
    let line = format!(
        "{source:<16}  {received:>8}  {unique:>8}  {duplicates:>16}  {success:>7}  {failed:>6}  \
         {p50:>10}  {p99:>10}  {gaps}"
    );
    line.trim_end().to_owned()
}

fn seconds(seconds: Option<f64>) -> String {
    let span = seconds.and_then(|seconds| SignedDuration::try_from_secs_f64(seconds).ok());
    span.map_or_else(|| "-".to_owned(), format::span)
}
