//! Tests any webhook endpoint, in any language, for exactly-once effects. The test needs no server of
//! Hapax.
//!
//! A [`Storm`] sends many concurrent copies of signed sample events, with late and forged ones among them,
//! and checks the laws one by one. `plan` decides what is sent, `requests` sends it, `probe` reads the
//! effects, `judge` checks the laws and `report` writes the result. `hapax storm` is the command line of
//! this crate; a test suite in Rust can run a storm itself.

mod error;
mod judge;
mod plan;
mod probe;
mod report;
mod requests;
mod rng;
mod sender;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hapax_core::Timestamp;

pub use error::{StormError, StormErrorKind};
pub use judge::{Example, Law, LawVerdict};
pub use plan::{Event, Group, RequestKind, StormPlan, StormSize};
pub use probe::{EffectCounts, Probe, RowReader};
pub use report::{Report, StormCounts, junit_of_failure};
pub use requests::{AnsweredAttempt, Progress, RequestOutcome, RequestSender, check_reached};
pub use sender::{
    HttpClient, NoAnswer, RequestAnswer, Sender, SignedRequest, error_chain, http_client,
};

use judge::{Effects, Evidence};
use rng::Rng;

/// The most events that are sent again at the end.
const REPLAYED_MAX: usize = 10;

/// A planned storm.
pub struct Storm {
    sender: Arc<Sender>,
    shape: StormSize,
    plan: StormPlan,
    seed: u64,
    probe: Option<Probe>,
    settle: Duration,
}

impl Storm {
    /// Plans a storm; sends nothing yet. The same seed on the same day gives the same events in the same
    /// order.
    pub fn new(
        sender: Sender,
        shape: StormSize,
        seed: u64,
        now: Timestamp,
    ) -> Result<Self, StormError> {
        let plan = StormPlan::new(&sender, &shape, seed, now)?;
        let settle = Duration::from_secs(10);
        Ok(Self { sender: Arc::new(sender), shape, plan, seed, probe: None, settle })
    }

    /// Reads the effects with `probe`, which may take up to `settle` to appear after the last answer.
    /// Without a probe only the answers are judged.
    pub fn with_probe(self, probe: Option<Probe>, settle: Duration) -> Self {
        Self { probe, settle, ..self }
    }

    /// The number of requests, without retries and without the copies at the end.
    pub fn requests(&self) -> u64 {
        self.plan.requests()
    }

    /// Sends everything, reads the effects and judges. Calls `progress` after each of
    /// [`Storm::requests`].
    pub async fn run(&self, progress: Progress) -> Result<Report, StormError> {
        let plan = &self.plan;
        let ids: BTreeSet<&str> = plan.events.iter().map(|event| event.event_id.as_str()).collect();
        let before = match &self.probe {
            Some(probe) => Some(probe.read(&ids).await?),
            None => None,
        };
        let request_sender = self.request_sender();
        let started = Instant::now();
        let outcomes = request_sender.send(plan, &plan.groups, &progress).await?;
        let outcomes = check_reached(outcomes)?;
        let took = started.elapsed();
        let after = self.settled(&ids, before.as_ref()).await;
        let replayed = self.replay().await?;
        let effects = match (before, after) {
            (None, _) | (_, None) => Effects::NoProbe,
            (Some(_), Some(Err(error))) => Effects::Lost(error.message),
            (Some(before), Some(Ok(after))) => match self.settled(&ids, Some(&before)).await {
                Some(Ok(last)) => Effects::read(before, after, last),
                Some(Err(error)) => Effects::Lost(error.message),
                None => Effects::NoProbe,
            },
        };
        let evidence = Evidence { plan, outcomes: &outcomes, replayed: &replayed, effects };
        Ok(Report {
            laws: judge::judge(&evidence, self.shape.stale, self.shape.forged),
            figures: StormCounts::new(self.seed, &evidence, took),
            probe_failed: matches!(evidence.effects, Effects::Lost(_)),
            took,
        })
    }

    fn request_sender(&self) -> RequestSender {
        RequestSender::new(Arc::clone(&self.sender), self.shape.concurrency)
    }

    async fn settled(
        &self,
        ids: &BTreeSet<&str>,
        before: Option<&EffectCounts>,
    ) -> Option<Result<EffectCounts, StormError>> {
        let (probe, before) = (self.probe.as_ref()?, before?);
        let is_missing = |now: &EffectCounts| judge::is_missing(&self.plan, before, now);
        Some(probe.settled(ids, self.settle, is_missing).await)
    }

    /// Sends a few events again, signed now, as a sender that missed the answer does. If the storm has stale
    /// events, also sends the same events signed outside the window, as a replay. Uses new connections,
    /// because an endpoint may close idle ones.
    async fn replay(&self) -> Result<Vec<RequestOutcome>, StormError> {
        let mut events: Vec<usize> = self.plan.genuine().collect();
        Rng::new(!self.seed).shuffle(&mut events);
        events.truncate(REPLAYED_MAX);
        let mut kinds = vec![RequestKind::Genuine];
        if self.shape.stale && self.plan.stale_unjudged.is_none() {
            kinds.push(RequestKind::Stale);
        }
        let copies =
            |kind| events.iter().map(move |event| Group { event: *event, kind, copies: 1 });
        let groups: Vec<Group> = kinds.into_iter().flat_map(copies).collect();
        let unseen: Progress = Arc::new(|| {});
        self.request_sender().send(&self.plan, &groups, &unseen).await
    }
}
