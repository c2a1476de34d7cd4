//! `hapax dead`: dead letters, the jobs whose retries are exhausted.

use serde_json::Value;

use super::admin_client::{self, Remote, encoded};
use super::events::{ActionArgs, decided, read, replayed};
use super::lists::{PageArgs, Words, print_page};
use super::output::{self, CommandFailure, Exit};
use crate::api::{Job, List as Page, ReplayJobRequest, ReplayJobsRequest};
use crate::format;

/// `hapax dead`.
#[derive(Debug, clap::Subcommand)]
pub(super) enum Dead {
    /// List dead letters, newest first
    List(List),
    /// Run one dead letter again, or all that match a filter
    Replay(Replay),
    /// Discard one dead letter, or all that match a filter: they are not retried, and their payloads can
    /// be pruned
    Discard(Discard),
}

impl Dead {
    pub(super) fn run(self) -> Result<Exit, CommandFailure> {
        match self {
            Self::List(list) => admin_client::run(list.run()),
            Self::Replay(replay) => admin_client::run(replay.run()),
            Self::Discard(discard) => admin_client::run(discard.run()),
        }
    }
}

/// Filters for dead letters.
#[derive(Debug, clap::Args)]
struct JobFilterArgs {
    /// Only dead letters of this source
    #[arg(long)]
    source: Option<String>,
    /// Only dead letters of this handler
    #[arg(long)]
    handler: Option<String>,
    /// Only dead letters of this tenant
    #[arg(long)]
    tenant: Option<String>,
    #[command(flatten)]
    page: PageArgs,
}

impl JobFilterArgs {
    fn is_filtered(&self) -> bool {
        self.source.is_some() || self.handler.is_some() || self.tenant.is_some()
    }

    /// The route that lists them.
    fn path(&self) -> String {
        let filters = vec![
            ("status", Some("dead".to_owned())),
            ("source", self.source.clone()),
            ("handler", self.handler.clone()),
            ("tenant", self.tenant.clone()),
        ];
        self.page.path("jobs", filters)
    }
}

/// `hapax dead list`.
#[derive(Debug, clap::Args)]
pub(super) struct List {
    #[command(flatten)]
    filter: JobFilterArgs,
    #[command(flatten)]
    remote: Remote,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

impl List {
    async fn run(self) -> Result<Exit, CommandFailure> {
        let server = self.remote.open()?;
        let page = read(server.get(&self.filter.path()).await?)?;
        let words = Words { items: "dead letters", empty: "there are no dead letters" };
        print_page(page, self.json, words, line_of)
    }
}

/// A dead letter as the list prints it.
fn line_of(job: Value) -> Result<String, CommandFailure> {
    let job: Job = read(job)?;
    let attempts = format::count(u64::from(job.attempt), "attempt");
    Ok(format!(
        "{}  {}  {}/{}  {}  {attempts}  {}",
        job.finished_at.map_or_else(|| "-".to_owned(), format::at),
        job.id,
        job.source,
        job.handler,
        job.event_id,
        job.error.as_deref().unwrap_or("-"),
    ))
}

/// `hapax dead replay`.
#[derive(Debug, clap::Args)]
pub(super) struct Replay {
    /// The job's id, as `dead list` prints it
    #[arg(conflicts_with_all = ["all", "source", "handler", "tenant", "cursor", "limit"])]
    job: Option<String>,
    /// Every dead letter, up to --limit
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    filter: JobFilterArgs,
    /// Only print what would happen
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    action: ActionArgs,
}

impl Replay {
    async fn run(self) -> Result<Exit, CommandFailure> {
        let (dry_run, reason) = (self.dry_run, self.action.reason.clone());
        let server = self.action.remote.open()?;
        let is_filtered = self.filter.is_filtered();
        let JobFilterArgs { source, handler, tenant, page: PageArgs { cursor, limit } } =
            self.filter;
        let answer = match self.job {
            Some(job) => {
                let body = ReplayJobRequest { dry_run, force: false, reason };
                server.post(&format!("/api/v1/jobs/{}/replay", encoded(&job)), &body).await?
            }
            None if is_filtered || self.all => {
                let limit = usize::try_from(limit).ok();
                let status = None;
                let body = ReplayJobsRequest {
                    source,
                    handler,
                    tenant,
                    status,
                    cursor,
                    limit,
                    dry_run,
                    reason,
                };
                server.post("/api/v1/jobs/replay", &body).await?
            }
            None => return Err(which()),
        };
        let page: Page<Value> = read(answer)?;
        let count = page.items.len();
        let exit = replayed(page.items, self.action.json)?;
        if count == 0 {
            output::words("no dead letter matches the filter");
        }
        if let Some(next) = page.next {
            output::words(&format!("more dead letters: --cursor {next}"));
        }
        Ok(exit)
    }
}

/// `hapax dead discard`.
#[derive(Debug, clap::Args)]
pub(super) struct Discard {
    /// The job's id, as `dead list` prints it
    #[arg(conflicts_with_all = ["all", "source", "handler", "tenant", "cursor", "limit"])]
    job: Option<String>,
    /// Every dead letter, up to --limit
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    filter: JobFilterArgs,
    #[command(flatten)]
    action: ActionArgs,
}

impl Discard {
    async fn run(self) -> Result<Exit, CommandFailure> {
        let (server, body) = self.action.open()?;
        let jobs = match self.job {
            Some(job) => vec![job],
            None if self.all || self.filter.is_filtered() => {
                let page: Page<Job> = read(server.get(&self.filter.path()).await?)?;
                if page.items.is_empty() {
                    output::words("no dead letter matches the filter");
                }
                if page.next.is_some() {
                    output::words("more dead letters match: run this command again for the rest");
                }
                page.items.into_iter().map(|job| job.id.to_string()).collect()
            }
            None => return Err(which()),
        };
        // Each dead letter is discarded in its own commit: if one fails, the earlier ones stay discarded.
        for job in jobs {
            let path = format!("/api/v1/jobs/{}/discard", encoded(&job));
            decided(server.post(&path, &body).await?, self.action.json)?;
        }
        Ok(Exit::Done)
    }
}

fn which() -> CommandFailure {
    CommandFailure::usage(
        "no dead letter is named",
        "pass a job id, --source, --handler, --tenant or --all",
    )
}
