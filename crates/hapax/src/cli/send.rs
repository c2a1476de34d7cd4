//! `hapax send`: sends realistic signed sample events, for a first try or for load. Every copy of an
//! event has the same bytes and the same signature, like a sender's retry.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use hapax_core::Timestamp;
use hapax_core::sample::{self, SampleId};
use hapax_storm::{NoAnswer, RequestAnswer, Sender, SignedRequest, http_client};
use indicatif::ProgressBar;
use tokio::task::JoinSet;

use super::captured::{self, SenderSecrets};
use super::output::{self, CommandFailure, Exit};
use super::sender::{self, sender_like};

/// The most events of one run. Events are generated as they are sent, so this bounds time, not memory.
const COUNT_MAX: u64 = 100_000_000;

/// `hapax send`.
#[derive(Debug, clap::Args)]
pub(super) struct Send {
    /// The sender to imitate; `hapax providers` lists them
    provider: String,
    /// The event type, such as payout.paid [default: a common type of this sender]
    #[arg(value_name = "TYPE")]
    event_type: Option<String>,
    /// The endpoint: http://127.0.0.1:8080/webhooks/stripe
    #[arg(long, value_name = "URL")]
    to: String,
    #[command(flatten)]
    identity: SenderSecrets,
    /// The number of distinct events
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=COUNT_MAX))]
    count: u64,
    /// How many times each event is sent
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    copies: u64,
    /// The number of concurrent requests
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    concurrency: u64,
    /// The event id; with --count above 1 a number is appended [default: a new id]
    #[arg(long, value_name = "ID")]
    id: Option<String>,
    /// Set a value in the JSON body before it is signed: /data/object/amount=10000
    #[arg(long = "set", value_name = "/POINTER=VALUE")]
    sets: Vec<String>,
    /// The time to sign with, in seconds since 1970 [default: now]
    #[arg(long, value_name = "UNIX", allow_negative_numbers = true)]
    now: Option<i64>,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

impl Send {
    pub(super) fn run(self) -> Result<Exit, CommandFailure> {
        let plan = SendPlan::new(self)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| CommandFailure::unreachable(format!("cannot start: {error}")))?;
        runtime.block_on(plan.run())
    }
}

/// The checked arguments; nothing is sent yet.
struct SendPlan {
    flags: Send,
    sender: Sender,
    sets: Vec<(String, serde_json::Value)>,
    /// A prefix that makes the ids of this run unique.
    run: String,
}

impl SendPlan {
    fn new(flags: Send) -> Result<Self, CommandFailure> {
        let sender = sender_like(&flags.provider, &flags.identity, &flags.to)?;
        let sets = flags.sets.iter().map(|text| set(text)).collect::<Result<_, _>>()?;
        let run = uuid::Uuid::now_v7().simple().to_string();
        Ok(Self { flags, sender, sets, run })
    }

    async fn run(self) -> Result<Exit, CommandFailure> {
        let client = http_client();
        let total = self.flags.count.saturating_mul(self.flags.copies);
        let mut progress = SendProgress::new(total, self.flags.json);
        let mut running = JoinSet::new();
        for number in 1..=self.flags.count {
            let signed = Arc::new(self.sign(number)?);
            for _copy in 0..self.flags.copies {
                if running.len() as u64 >= self.flags.concurrency
                    && let Some(answer) = running.join_next().await
                {
                    progress.take(answer)?;
                }
                running.spawn(self.sender.post(&client, &signed));
            }
            if progress.cannot_connect.is_some() {
                break;
            }
        }
        while let Some(answer) = running.join_next().await {
            progress.take(answer)?;
        }
        progress.end()
    }

    fn sign(&self, number: u64) -> Result<SignedRequest, CommandFailure> {
        let now: Timestamp = captured::now(self.flags.now)?;
        // The same id on the same day gives the same bytes: a copy, not a conflict.
        let today =
            Timestamp::from_second(now.as_second().div_euclid(86_400) * 86_400).unwrap_or(now);
        let id = match (&self.flags.id, self.flags.count) {
            (Some(id), 1) => SampleId::exact(id, today),
            (Some(id), _) => SampleId::exact(format!("{id}-{number}"), today),
            (None, _) => SampleId::made_up(format!("{}{number:08}", self.run), now),
        };
        let event_type = self.flags.event_type.as_deref();
        let mut request = self.sender.sample(event_type, &id)?;
        request.body = self.changed(request.body)?;
        Ok(self.sender.sign(&request, now)?)
    }

    fn changed(&self, body: Bytes) -> Result<Bytes, CommandFailure> {
        if self.sets.is_empty() {
            return Ok(body);
        }
        let no_json = |_| {
            CommandFailure::usage(
                "--set needs a JSON body, and events of this sender are not JSON",
                "",
            )
        };
        let mut json: serde_json::Value = serde_json::from_slice(&body).map_err(no_json)?;
        for (pointer, value) in &self.sets {
            sample::set(&mut json, pointer, value.clone()).map_err(|error| {
                CommandFailure::usage(
                    format!("--set {pointer}: {error}"),
                    "write a JSON pointer, such as /data/object/amount",
                )
            })?;
        }
        serde_json::to_vec(&json).map(Bytes::from).map_err(no_json)
    }
}

/// The answers so far.
struct SendProgress {
    json: bool,
    bar: ProgressBar,
    started: Instant,
    by_outcome: BTreeMap<String, u64>,
    refused: u64,
    lost: Option<String>,
    cannot_connect: Option<String>,
}

impl SendProgress {
    fn new(total: u64, json: bool) -> Self {
        Self {
            json,
            bar: sender::bar(total),
            started: Instant::now(),
            by_outcome: BTreeMap::new(),
            refused: 0,
            lost: None,
            cannot_connect: None,
        }
    }

    fn take(
        &mut self,
        joined: Result<Result<RequestAnswer, NoAnswer>, tokio::task::JoinError>,
    ) -> Result<(), CommandFailure> {
        self.bar.inc(1);
        let answered = joined.unwrap_or_else(|error| {
            Err(NoAnswer::Lost(format!("a request task panicked: {error}")))
        });
        match answered {
            Ok(answer) => {
                let ok = (200..300).contains(&answer.status);
                self.refused += u64::from(!ok);
                let outcome = match (&answer.decision, ok) {
                    (Some(decision), true) => decision.clone(),
                    (Some(_) | None, _) => format!("status {}", answer.status),
                };
                *self.by_outcome.entry(outcome).or_default() += 1;
                self.print(&answer)?;
            }
            Err(NoAnswer::CannotConnect(why)) => self.cannot_connect = Some(why),
            Err(NoAnswer::Lost(why)) => {
                *self.by_outcome.entry("no answer".to_owned()).or_default() += 1;
                self.lost = Some(why);
            }
        }
        Ok(())
    }

    fn print(&self, answer: &RequestAnswer) -> Result<(), CommandFailure> {
        let RequestAnswer { event_id, status, decision, id, reason, retry_after: _ } = answer;
        let decision = decision.as_deref().unwrap_or("-");
        let id = id.as_deref().unwrap_or("-");
        let line = match reason {
            Some(reason) => format!("{status} refused {event_id}: {reason}"),
            None => format!("{status} {decision} {id} {event_id}"),
        };
        self.bar.suspend(|| {
            if self.json { output::json(answer) } else { output::data(&output::shown(&line)) }
        })?;
        Ok(())
    }

    fn end(self) -> Result<Exit, CommandFailure> {
        self.bar.finish_and_clear();
        let outcomes: Vec<String> =
            self.by_outcome.iter().map(|(outcome, count)| format!("{count} {outcome}")).collect();
        if !outcomes.is_empty() {
            let seconds = self.started.elapsed().as_secs_f64();
            output::words(&output::shown(&format!("{} in {seconds:.2} s", outcomes.join(", "))));
        }
        if let Some(why) = self.cannot_connect {
            return Err(CommandFailure::unreachable(format!("cannot connect: {why}")));
        }
        if let Some(why) = &self.lost {
            output::error(&format!("no answer: {why}"));
        }
        Ok(if self.refused == 0 && self.lost.is_none() { Exit::Done } else { Exit::Negative })
    }
}

/// Parses `/pointer=value`; a value that is not JSON is taken as text.
fn set(text: &str) -> Result<(String, serde_json::Value), CommandFailure> {
    match text.split_once('=') {
        Some((pointer, value)) if pointer.starts_with('/') => {
            let json = serde_json::from_str(value);
            let value = json.unwrap_or_else(|_| serde_json::Value::String(value.to_owned()));
            Ok((pointer.to_owned(), value))
        }
        Some(_) | None => Err(CommandFailure::usage(
            "--set is not /POINTER=VALUE",
            "write it as --set /data/object/amount=10000",
        )),
    }
}
