//! `hapax storm`: tests any endpoint, in any language, for exactly-once. It sends many concurrent copies
//! of signed events, with late and forged ones among them, and checks law by law. [`plan`] decides what is
//! sent, [`requests`] sends it, [`probe`] reads the effects, [`judge`] checks the laws and [`report`] prints
//! the result. [`demo`] is `hapax demo`, which uses the same parts.

mod demo;
mod judge;
mod plan;
mod probe;
mod report;
mod requests;
mod rng;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hapax_core::Timestamp;

pub(super) use self::demo::Demo;
use self::judge::{Effects, Evidence, Law, Verdict};
use self::plan::{Group, Plan, RequestKind};
use self::probe::{EffectCounts, Probe};
use self::report::Figures;
use self::requests::{RequestOutcome, RequestSender};
use self::rng::Rng;
use super::admin_client;
use super::captured::Identity;
use super::output::{self, Exit, Failure};
use super::sender::{self, Sender};
use crate::config::units;

/// The most events that are sent again at the end.
const REPLAYED_MAX: usize = 10;

/// The most requests of one storm: every answer stays in memory until the end.
const REQUESTS_MAX: u64 = 5_000_000;

/// File descriptors that are not connections: the probe, the report, the runtime.
const DESCRIPTORS_RESERVED: u64 = 32;

/// A random seed has 32 bits, so that it can be typed again.
const RANDOM_SEED_MASK: u64 = 0xffff_ffff;

/// `hapax storm`.
#[derive(Debug, clap::Args)]
pub(super) struct Storm {
    #[command(flatten)]
    flags: Flags,
    #[command(flatten)]
    identity: Identity,
}

/// All arguments except the secrets.
#[derive(Debug, clap::Args)]
struct Flags {
    /// The endpoint under test: http://127.0.0.1:3000/webhooks/stripe
    #[arg(long, value_name = "URL")]
    to: String,
    /// The sender to imitate; `hapax providers` lists them
    #[arg(long, value_name = "NAME")]
    provider: String,
    #[command(flatten)]
    shape: Shape,
    /// The seed of ids and order; the same seed sends the same storm [default: random]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// How long effects may take to appear after the last answer
    #[arg(long, value_name = "DURATION", default_value = "10s")]
    settle: String,
    /// A shell command that prints the effects: their number, or one line per effect that starts with the
    /// event id
    #[arg(long, value_name = "CMD", conflicts_with_all = ["effects_url", "effects_sql", "effects_db"])]
    effects_cmd: Option<String>,
    /// A URL that returns the effects: a number, a JSON array of ids or of objects with event_id, or lines
    #[arg(long, value_name = "URL", conflicts_with_all = ["effects_sql", "effects_db"])]
    effects_url: Option<String>,
    /// A query that returns the effects: one number, or a row per effect with the event id first
    #[arg(long, value_name = "QUERY", requires = "effects_db")]
    effects_sql: Option<String>,
    /// The database of that query: sqlite:PATH or postgres://…
    #[arg(long, value_name = "URL", requires = "effects_sql")]
    effects_db: Option<String>,
    /// Also write the result to this file as JUnit XML
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Print one JSON object per law, then a summary
    #[arg(long)]
    json: bool,
}

/// The requests of a storm.
#[derive(Debug, clap::Args)]
struct Shape {
    /// The event type, such as payout.paid [default: a common type of this sender]
    #[arg(long = "type", value_name = "TYPE")]
    event_type: Option<String>,
    /// The number of distinct events
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    events: u64,
    /// How many times each event is sent, all copies at once
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    copies: u64,
    /// The number of concurrent requests
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    concurrency: u64,
    /// Also send events that were signed outside the replay window; they must be rejected
    #[arg(long)]
    stale: bool,
    /// Also send forged events (wrong secret, changed body, no signature); they must be rejected
    #[arg(long)]
    forged: bool,
    /// Send everything in one random order instead of event by event
    #[arg(long)]
    shuffle: bool,
}

impl Storm {
    pub(super) fn run(self) -> Result<Exit, Failure> {
        let sender = Sender::new(&self.flags.provider, &self.identity, &self.flags.to)?;
        if self.flags.shape.events.saturating_mul(self.flags.shape.copies) > REQUESTS_MAX {
            let problem = format!("that is more than {REQUESTS_MAX} requests");
            return Err(Failure::usage(problem, "lower --events or --copies"));
        }
        raise_descriptor_limit(self.flags.shape.concurrency)?;
        let settle = units::duration(&self.flags.settle)?;
        let probe = Probe::new(&self.flags)?;
        let seed = self
            .flags
            .seed
            .unwrap_or_else(|| uuid::Uuid::now_v7().as_u64_pair().1 & RANDOM_SEED_MASK);
        let plan = Plan::new(&sender, &self.flags.shape, seed, Timestamp::now())?;
        // Opened first, so that a path that cannot be written fails before the storm.
        let junit = self.flags.junit.as_ref().map(open).transpose()?;
        let run = Run { flags: &self.flags, sender: Arc::new(sender), plan, probe, seed, settle };
        let (verdict, xml) = match admin_client::run(run.execute()) {
            Ok((verdict, laws, took)) => (Ok(verdict), report::junit(&laws, took)),
            Err(failure) => {
                let xml = report::junit_of_failure(failure.message());
                (Err(failure), xml)
            }
        };
        if let Some(mut file) = junit {
            file.write_all(xml.as_bytes())?;
        }
        verdict
    }
}

/// Raises the limit of open files: a connection that this process cannot open is not the endpoint's fault.
fn raise_descriptor_limit(connections: u64) -> Result<(), Failure> {
    let needed = connections + DESCRIPTORS_RESERVED;
    let open = rlimit::increase_nofile_limit(needed).unwrap_or(needed);
    if open < needed {
        let problem =
            format!("--concurrency {connections} is too high: this process may open {open} files");
        return Err(Failure::usage(problem, "lower it, or raise the limit with ulimit -n"));
    }
    Ok(())
}

fn open(path: &PathBuf) -> Result<File, Failure> {
    File::create(path)
        .map_err(|error| Failure::unreachable(format!("cannot write {}: {error}", path.display())))
}

/// A storm with checked arguments.
struct Run<'a> {
    flags: &'a Flags,
    sender: Arc<Sender>,
    plan: Plan,
    probe: Option<Probe>,
    seed: u64,
    settle: Duration,
}

impl Run<'_> {
    async fn execute(self) -> Result<(Exit, Vec<Law>, Duration), Failure> {
        let Self { flags, seed, plan, .. } = &self;
        output::words(&format!(
            "seed {seed}: repeat the command with --seed {seed} to send the same events in the same order"
        ));
        let ids: BTreeSet<&str> = plan.events.iter().map(|event| event.event_id.as_str()).collect();
        let before = match &self.probe {
            Some(probe) => Some(probe.read(&ids).await?),
            None => None,
        };
        let request_sender = RequestSender::new(Arc::clone(&self.sender), flags.shape.concurrency);
        let started = Instant::now();
        let bar = sender::bar(plan.requests());
        let outcomes = request_sender.send(plan, &plan.groups, &bar).await;
        bar.finish_and_clear();
        let outcomes = requests::check_reached(outcomes?)?;
        let took = started.elapsed();
        let after = self.settled(&ids, before.as_ref()).await;
        let replayed = self.replay().await?;
        let effects = match (before, after) {
            (None, _) | (_, None) => Effects::NoProbe,
            (Some(_), Some(Err(failure))) => Effects::Lost(failure.message().to_owned()),
            (Some(before), Some(Ok(after))) => match self.settled(&ids, Some(&before)).await {
                Some(Ok(last)) => Effects::read(before, after, last),
                Some(Err(failure)) => Effects::Lost(failure.message().to_owned()),
                None => Effects::NoProbe,
            },
        };
        let evidence = Evidence { plan, outcomes: &outcomes, replayed: &replayed, effects };
        let laws = judge::judge(&evidence, flags.shape.stale, flags.shape.forged);
        let figures = Figures::new(*seed, &evidence, took);
        match flags.json {
            true => report::print_json(&laws, &figures)?,
            false => report::print_table(&laws, &figures)?,
        }
        let exit = match (report::overall(&laws), &evidence.effects) {
            (Verdict::Broken, _) => Exit::Negative,
            (Verdict::Held | Verdict::NotJudged, Effects::Lost(_)) => Exit::Unreachable,
            (Verdict::Held | Verdict::NotJudged, Effects::NoProbe | Effects::Read { .. }) => {
                Exit::Done
            }
        };
        Ok((exit, laws, took))
    }

    async fn settled(
        &self,
        ids: &BTreeSet<&str>,
        before: Option<&EffectCounts>,
    ) -> Option<Result<EffectCounts, Failure>> {
        let (probe, before) = (self.probe.as_ref()?, before?);
        let is_missing = |now: &EffectCounts| judge::is_missing(&self.plan, before, now);
        Some(probe.settled(ids, self.settle, is_missing).await)
    }

    /// Sends a few events again: signed now, as a sender that missed the answer does, and with --stale also
    /// signed outside the window, as a replay. Uses new connections, because an endpoint may close idle ones.
    async fn replay(&self) -> Result<Vec<RequestOutcome>, Failure> {
        let request_sender =
            RequestSender::new(Arc::clone(&self.sender), self.flags.shape.concurrency);
        let mut events: Vec<usize> = self.plan.genuine().collect();
        Rng::new(!self.seed).shuffle(&mut events);
        events.truncate(REPLAYED_MAX);
        let mut kinds = vec![RequestKind::Genuine];
        if self.flags.shape.stale && self.plan.stale_unjudged.is_none() {
            kinds.push(RequestKind::Stale);
        }
        let copies =
            |kind| events.iter().map(move |event| Group { event: *event, kind, copies: 1 });
        let groups: Vec<Group> = kinds.into_iter().flat_map(copies).collect();
        request_sender.send(&self.plan, &groups, &indicatif::ProgressBar::hidden()).await
    }
}
