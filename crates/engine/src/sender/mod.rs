//! Sending: claims due deliveries, attempts each once, and records how it ended.
//!
//! One loop serves all endpoints. Each round hands the outcomes of finished attempts to the store and
//! claims the next deliveries, in one commit ([`Outbox::exchange`]). Requests run beside it, as many as
//! there are slots. What is sent is in [`courier`], and what an answer means in [`verdict`].
//!
//! An outcome is offered to the store until the store takes it. If the process dies before that, the
//! attempt is repeated with the same id and the same bytes; nothing here repeats an attempt by itself.

mod courier;
mod verdict;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::failpoint;
use hapax_core::store::{
    AttemptOutcome, AttemptVerdict, DeliveryAsk, DeliveryClaim, Exchanged, Held, InspectOutbox,
    Outbox, StoreError,
};
use hapax_core::vault::KeyId;
use metrics::{Counter, Histogram, counter, gauge, histogram};
use tokio::task::{self, JoinError, JoinSet};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, warn};
use uuid::Uuid;

pub use courier::{Courier, Ping};

use crate::ingress::Now;
use crate::limits::{
    EXCHANGE_CLAIMS_MAX, GAUGES_EVERY, ORPHANS_PER_COMMIT, POLL_EVERY, SENDER_PAUSE_DOUBLINGS,
    SENDER_PAUSE_MIN,
};
use crate::worker::Pause;

/// What a node may have under way, over all endpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SenderLimits {
    /// Attempts.
    pub in_flight_max: usize,
    /// Bytes of their bodies. One delivery may exceed it.
    pub in_flight_bytes_max: usize,
}

/// The sender of this process.
pub struct Sender<S> {
    store: Arc<S>,
    courier: Arc<Courier>,
    now: Now,
    limits: SenderLimits,
    /// The name of this node in the records of attempts: another one after each start.
    node: Arc<str>,
    vault_keys: Arc<[KeyId]>,
}

impl<S: Outbox + InspectOutbox> Sender<S> {
    /// Nothing is claimed before [`Sender::run`].
    pub fn new(store: Arc<S>, courier: Arc<Courier>, now: Now, limits: SenderLimits) -> Self {
        let node = format!("sender-{}", Uuid::now_v7().simple()).into();
        let vault_keys = courier.vault_keys().collect();
        Self { store, courier, now, limits, node, vault_keys }
    }

    /// Sends until `stop`. Then claims nothing more, and waits up to `drain` for attempts that are under
    /// way and for the store to take their outcomes. What is cut is attempted again after its lease.
    pub async fn run(self: Arc<Self>, drain: Duration, stop: CancellationToken) {
        let mut round = Round::new(Arc::clone(&self));
        let upkeep = task::spawn(Arc::clone(&self).upkeep(stop.clone()));
        while !stop.is_cancelled() {
            round.exchange(&stop).await;
            round.wait(&stop).await;
        }
        if timeout(drain, round.finish()).await.is_err() {
            warn!(
                attempts = round.in_flight.len(),
                "deliveries were still under way after {drain:?} and were cut; they are attempted again"
            );
        }
        round.in_flight.shutdown().await;
        if let Err(error) = upkeep.await {
            log_panic(&error);
        }
    }

    /// Every few seconds: how far behind sending is, through the reading side, and the deliveries of
    /// endpoints that were deleted.
    async fn upkeep(self: Arc<Self>, stop: CancellationToken) {
        let mut beats = interval(GAUGES_EVERY);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while stop.run_until_cancelled(beats.tick()).await.is_some() {
            let round = async {
                self.set_gauges().await?;
                while self.store.cancel_orphans(ORPHANS_PER_COMMIT).await? {}
                Ok::<_, StoreError>(())
            };
            if let Some(Err(error)) = stop.run_until_cancelled(round).await {
                debug!(%error, "the upkeep of deliveries: {error}");
            }
        }
    }

    async fn set_gauges(&self) -> Result<(), StoreError> {
        let backlog = self.store.delivery_backlog().await?;
        let overdue = |due| (self.now)().duration_since(due).as_secs_f64().max(0.0);
        let seconds = backlog.oldest_due.map_or(0.0, overdue);
        gauge!("hapax_oldest_job_seconds", "lane" => "deliveries").set(seconds);
        gauge!("hapax_dead_letters", "lane" => "deliveries").set(backlog.dead as f64);
        Ok(())
    }
}

impl<S> fmt::Debug for Sender<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sender").field("node", &self.node).finish_non_exhaustive()
    }
}

/// The state of the loop.
struct Round<S> {
    sender: Arc<Sender<S>>,
    in_flight: JoinSet<AttemptOutcome>,
    /// The bytes of each attempt under way.
    bytes: HashMap<task::Id, usize>,
    /// Outcomes that the store has not taken yet.
    outcomes: Vec<AttemptOutcome>,
    /// What the last exchange left for later.
    later: Later,
    /// How many exchanges in a row claimed nothing although something was due: its endpoints may be full,
    /// or out of this node's reach.
    fruitless: u32,
    pause: Pause,
    counts: Counts,
}

/// When to ask the store again, apart from outcomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Later {
    /// There may be more that is due now.
    More,
    /// Nothing is due for this long, as far as the store knows.
    In(Duration),
}

impl<S: Outbox + InspectOutbox> Round<S> {
    fn new(sender: Arc<Sender<S>>) -> Self {
        Self {
            sender,
            in_flight: JoinSet::new(),
            bytes: HashMap::new(),
            outcomes: Vec::new(),
            later: Later::More,
            fruitless: 0,
            pause: Pause::default(),
            counts: Counts::new(),
        }
    }

    fn free_slots(&self) -> usize {
        self.sender.limits.in_flight_max.saturating_sub(self.in_flight.len())
    }

    fn free_bytes(&self) -> usize {
        let in_flight = self.bytes.values().sum();
        self.sender.limits.in_flight_bytes_max.saturating_sub(in_flight)
    }

    /// Whether another attempt fits: a slot, and bytes.
    fn has_room(&self) -> bool {
        self.free_slots() > 0 && self.free_bytes() > 0
    }

    /// Settles what has ended and claims what fits. If the store fails, the outcomes are kept for the next
    /// round.
    async fn exchange(&mut self, stop: &CancellationToken) {
        let ask = DeliveryAsk {
            limit: if self.has_room() { self.free_slots().min(EXCHANGE_CLAIMS_MAX) } else { 0 },
            bytes_max: self.free_bytes(),
            node: Arc::clone(&self.sender.node),
            vault_keys: Arc::clone(&self.sender.vault_keys),
        };
        let (limit, bytes_max) = (ask.limit, ask.bytes_max);
        match self.settle(ask).await {
            Ok(Exchanged { claims, next_due, .. }) => {
                let claimed_bytes: usize = claims.iter().map(|claim| claim.body.len()).sum();
                let is_full = claims.len() >= limit || claimed_bytes >= bytes_max;
                self.later = match is_full {
                    true => Later::More,
                    false => Later::In(next_due.map_or(POLL_EVERY, |due| {
                        let wait = due.duration_since((self.sender.now)());
                        Duration::try_from(wait).unwrap_or_default().min(POLL_EVERY)
                    })),
                };
                let is_fruitless = claims.is_empty() && self.later == Later::In(Duration::ZERO);
                self.fruitless = if is_fruitless { self.fruitless.saturating_add(1) } else { 0 };
                for claim in claims {
                    match stop.is_cancelled() {
                        false => self.begin(claim),
                        true => self.give_back(&claim),
                    }
                }
            }
            Err(_logged) => {
                stop.run_until_cancelled(sleep(self.pause.next())).await;
            }
        }
    }

    /// Hands every outcome to the store, with this ask.
    async fn settle(&mut self, ask: DeliveryAsk) -> Result<Exchanged, StoreError> {
        // The store may fail after it was asked, so the outcomes stay here until it answers. A commit takes
        // a bounded number of them: acks beside it wait little.
        let count = self.outcomes.len().min(EXCHANGE_CLAIMS_MAX);
        match self.sender.store.exchange(self.outcomes[..count].to_vec(), ask).await {
            Ok(exchanged) => {
                for (outcome, held) in self.outcomes.drain(..count).zip(&exchanged.settled) {
                    self.counts.count(&outcome, *held);
                }
                self.pause = Pause::default();
                Ok(exchanged)
            }
            Err(error) => {
                self.pause.say(&error, "deliveries");
                Err(error)
            }
        }
    }

    /// Returns a claim that came after the stop: it was not begun, and does not count.
    fn give_back(&mut self, claim: &DeliveryClaim) {
        self.outcomes.push(AttemptOutcome {
            delivery: claim.delivery,
            fence: claim.fence,
            took: Duration::ZERO,
            verdict: AttemptVerdict::GivenBack,
        });
    }

    fn begin(&mut self, claim: DeliveryClaim) {
        let bytes = claim.body.len();
        let (courier, now) = (Arc::clone(&self.sender.courier), Arc::clone(&self.sender.now));
        let begun = self.in_flight.spawn(async move {
            failpoint!("sender.claimed");
            let (verdict, took) = courier.attempt(&claim, &now).await;
            failpoint!("sender.answered");
            AttemptOutcome { delivery: claim.delivery, fence: claim.fence, took, verdict }
        });
        self.bytes.insert(begun.id(), bytes);
    }

    /// Waits until another exchange is worth it: an attempt has ended, or there may be due deliveries and
    /// a slot for them.
    async fn wait(&mut self, stop: &CancellationToken) {
        if !self.outcomes.is_empty() {
            return self.collect();
        }
        let asks = self.has_room();
        let pause_min = SENDER_PAUSE_MIN * (1 << self.fruitless.min(SENDER_PAUSE_DOUBLINGS));
        let wait = match self.later {
            Later::More if asks => return self.collect(),
            Later::More => POLL_EVERY,
            Later::In(wait) => wait.max(pause_min),
        };
        let began = Instant::now();
        let sender = Arc::clone(&self.sender);
        let hint = async {
            sender.store.wait_for_deliveries(wait).await;
            // A hint may be for deliveries that cannot be claimed now.
            sleep_until(began + pause_min).await;
        };
        tokio::select! {
            ended = self.in_flight.join_next_with_id(), if !self.in_flight.is_empty() => {
                if let Some(ended) = ended {
                    self.ended(ended);
                }
            }
            () = hint, if asks => {}
            () = stop.cancelled() => {}
        }
        self.collect();
    }

    /// Takes the outcomes of all attempts that have ended by now.
    fn collect(&mut self) {
        while let Some(ended) = self.in_flight.try_join_next_with_id() {
            self.ended(ended);
        }
    }

    fn ended(&mut self, ended: Result<(task::Id, AttemptOutcome), JoinError>) {
        match ended {
            Ok((id, outcome)) => {
                self.bytes.remove(&id);
                self.outcomes.push(outcome);
            }
            // The delivery waits for the end of its lease: the attempt is lost.
            Err(error) => {
                self.bytes.remove(&error.id());
                log_panic(&error);
            }
        }
    }

    /// Waits for every attempt, and for the store to take every outcome.
    async fn finish(&mut self) {
        loop {
            self.collect();
            if !self.outcomes.is_empty() {
                let ask = DeliveryAsk {
                    limit: 0,
                    bytes_max: 0,
                    node: Arc::clone(&self.sender.node),
                    vault_keys: Arc::clone(&self.sender.vault_keys),
                };
                if self.settle(ask).await.is_err() {
                    sleep(self.pause.next()).await;
                }
                continue;
            }
            match self.in_flight.join_next_with_id().await {
                Some(ended) => self.ended(ended),
                None => return,
            }
        }
    }
}

fn log_panic(error: &JoinError) {
    if error.is_panic() {
        error!("an attempt of a delivery panicked; it counts as lost: {error}");
    }
}

struct Counts {
    delivered: Counter,
    failed: Counter,
    given_back: Counter,
    lost: Counter,
    seconds: Histogram,
}

impl Counts {
    fn new() -> Self {
        let count = |outcome| counter!("hapax_deliveries_total", "outcome" => outcome);
        Self {
            delivered: count("delivered"),
            failed: count("failed"),
            given_back: count("given_back"),
            lost: count("lost"),
            seconds: histogram!("hapax_delivery_seconds"),
        }
    }

    fn count(&self, outcome: &AttemptOutcome, held: Held) {
        self.seconds.record(outcome.took);
        match (held, &outcome.verdict) {
            (Held::Lost, _) => self.lost.increment(1),
            (Held::Kept, AttemptVerdict::Delivered(_)) => self.delivered.increment(1),
            (Held::Kept, AttemptVerdict::Failed { .. }) => self.failed.increment(1),
            (Held::Kept, AttemptVerdict::GivenBack) => self.given_back.increment(1),
        }
    }
}
