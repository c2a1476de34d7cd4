//! Sending: claims due deliveries, attempts each once, and records how it ended.
//!
//! One loop serves all endpoints. Each round passes the outcomes of finished attempts to the store
//! and claims the next deliveries, in one commit ([`Outbox::exchange`]). Requests run alongside the loop, as
//! many as there are slots and as the endpoint's window allows ([`bulkheads`]). [`endpoint_caller`] makes the
//! requests, and [`verdict`] reads the answers.
//!
//! An outcome is offered to the store until the store takes it. If the process dies before that, the
//! attempt is repeated with the same id and the same bytes; nothing here repeats an attempt by itself.

mod bulkheads;
mod endpoint_caller;
mod endpoint_tallies;
mod verdict;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use hapax_core::delivery::DeliveryStatus;
use hapax_core::endpoint::EndpointId;
use hapax_core::failpoint;
use hapax_core::store::{
    AttemptOutcome, AttemptVerdict, DeliveryAsk, DeliveryClaim, DeliveryTarget, EndpointSignal,
    Exchanged, Held, InspectOutbox, Outbox, StoreError,
};
use hapax_core::vault::KeyId;
use metrics::{Counter, Histogram, counter, gauge, histogram};
use tokio::sync::Notify;
use tokio::task::{self, JoinError, JoinSet};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, warn};
use uuid::Uuid;

use bulkheads::{AttemptClass, BegunClaim, Bulkheads, ClaimedAt, is_crowded};
use endpoint_caller::Attempt;
pub use endpoint_caller::{EndpointCaller, Ping};
pub use endpoint_tallies::EndpointTallies;

use crate::ingress::Now;
use crate::limits::{
    EXCHANGE_BESIDE_MIN, EXCHANGE_CLAIMS_MAX, GAUGES_EVERY, ORPHANS_PER_COMMIT, POLL_EVERY,
    SENDER_PAUSE_DOUBLINGS, SENDER_PAUSE_MIN, SLOW_ATTEMPT_AGE,
};
use crate::worker::StoreBackoff;

/// The limits of attempts in flight on a node, over all endpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SenderLimits {
    /// Attempts.
    pub in_flight_max: usize,
    /// Bytes of their bodies. One delivery may exceed this limit.
    pub in_flight_bytes_max: usize,
}

/// The client and the limits of a sender. A reload replaces both.
#[derive(Debug, Clone)]
pub struct SenderSetup {
    /// Signs and posts.
    pub endpoint_caller: Arc<EndpointCaller>,
    /// The limits of attempts in flight.
    pub limits: SenderLimits,
}

/// The sender of this process.
pub struct Sender<S> {
    store: Arc<S>,
    now: Now,
    /// The name of this node in the records of attempts. Each start gets a new name.
    node: Arc<str>,
    /// `None` while nothing can be sent because there is no vault key.
    setup: ArcSwapOption<ActiveSetup>,
    reloaded: Notify,
    endpoint_tallies: EndpointTallies,
}

/// A setup with the keys of its vault.
#[derive(Debug)]
struct ActiveSetup {
    endpoint_caller: Arc<EndpointCaller>,
    limits: SenderLimits,
    vault_keys: Arc<[KeyId]>,
}

impl From<SenderSetup> for ActiveSetup {
    fn from(SenderSetup { endpoint_caller, limits }: SenderSetup) -> Self {
        let vault_keys = endpoint_caller.vault_keys().collect();
        Self { endpoint_caller, limits, vault_keys }
    }
}

impl<S: Outbox + InspectOutbox> Sender<S> {
    /// Nothing is claimed before [`Sender::run`]. Without a setup nothing is claimed until a reload brings
    /// one.
    pub fn new(store: Arc<S>, now: Now, setup: Option<SenderSetup>) -> Self {
        let node = format!("sender-{}", Uuid::now_v7().simple()).into();
        let setup = ArcSwapOption::new(setup.map(|setup| Arc::new(setup.into())));
        let endpoint_tallies = EndpointTallies::default();
        Self { store, now, node, setup, reloaded: Notify::new(), endpoint_tallies }
    }

    /// The counts of attempts of each endpoint.
    pub fn endpoint_tallies(&self) -> &EndpointTallies {
        &self.endpoint_tallies
    }

    /// Replaces the setup. Attempts that are under way finish with the old setup.
    pub fn reload(&self, setup: Option<SenderSetup>) {
        self.setup.store(setup.map(|setup| Arc::new(setup.into())));
        self.reloaded.notify_one();
    }

    /// Sends until `stop`. Then claims nothing more, and waits up to `drain` for attempts that are under
    /// way and for the store to take their outcomes. A delivery whose attempt is cut is attempted
    /// again after its lease.
    pub async fn run(self: Arc<Self>, drain: Duration, stop: CancellationToken) {
        let mut round = SenderLoop::new(Arc::clone(&self), stop.clone());
        let upkeep = task::spawn(Arc::clone(&self).upkeep(stop.clone()));
        while !stop.is_cancelled() {
            round.begin_waiting();
            round.exchange();
            round.wait().await;
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

    /// Every few seconds, updates the gauges of the backlog through the store's readers, and cancels
    /// the deliveries of deleted endpoints.
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
                debug!(%error, "updating the delivery backlog or cancelling deliveries of deleted endpoints: {error}");
            }
        }
    }

    /// Whether a claim that has waited may be attempted: its delivery is still under way by this claim, and its
    /// endpoint takes deliveries and is as it was at the claim. False also if the store cannot read this.
    async fn still_holds(&self, claim: &DeliveryClaim) -> bool {
        let read = async {
            let delivery = self.store.delivery(claim.delivery).await?;
            let endpoint = self.store.endpoint(claim.endpoint.id).await?;
            Ok::<_, StoreError>((delivery, endpoint))
        };
        match read.await {
            Ok((Some(delivery), Some(endpoint))) => {
                // Each further claim of a delivery raises the number of its attempt.
                delivery.status == DeliveryStatus::Sending
                    && delivery.attempt == claim.attempt
                    && endpoint.disabled.is_none()
                    && DeliveryTarget::of(&endpoint) == *claim.endpoint
            }
            Ok((_, _)) => false,
            Err(error) => {
                debug!(%error, "reading a claimed delivery again: {error}");
                false
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
struct SenderLoop<S> {
    sender: Arc<Sender<S>>,
    stop: CancellationToken,
    in_flight: JoinSet<(AttemptOutcome, AttemptClass)>,
    /// Each attempt under way.
    under_way: HashMap<task::Id, RunningAttempt>,
    /// The bytes of all attempts under way.
    under_way_bytes: usize,
    /// The claims that wait for their endpoint.
    bulkheads: Bulkheads,
    /// When claims were last given back to make room for those of other endpoints.
    made_room_at: Option<Instant>,
    /// Outcomes that no exchange has taken yet.
    outcomes: Vec<AttemptOutcome>,
    /// The time until which outcomes may wait for further ones.
    gather_until: Option<Instant>,
    /// Exchanges that the store has not answered yet.
    exchanges: JoinSet<FinishedExchange>,
    /// The slots and bytes that these exchanges may claim.
    asked: ClaimBudget,
    /// When to ask for claims even if there is no outcome to settle.
    ask_at: Instant,
    /// The store failed: no exchange begins before this time.
    pause_until: Option<Instant>,
    /// How many exchanges in a row claimed nothing although deliveries were due: their endpoints may be
    /// full, or this node may lack their vault keys.
    fruitless: u32,
    pause: StoreBackoff,
    counts: SenderMetrics,
}

/// An attempt under way.
#[derive(Debug, Clone, Copy)]
struct RunningAttempt {
    endpoint: EndpointId,
    bytes: usize,
    began: Instant,
}

/// The slots and bytes that an exchange may claim.
#[derive(Debug, Clone, Copy, Default)]
struct ClaimBudget {
    slots: usize,
    bytes: usize,
}

/// An exchange that has ended. The store may have failed, so it carries its outcomes.
struct FinishedExchange {
    /// When the exchange began. A lease begins during the exchange, so this is the time from which
    /// the age of its claims counts.
    began: ClaimedAt,
    outcomes: Vec<AttemptOutcome>,
    asking: ClaimBudget,
    answer: Result<Exchanged, StoreError>,
}

impl<S: Outbox + InspectOutbox> SenderLoop<S> {
    fn new(sender: Arc<Sender<S>>, stop: CancellationToken) -> Self {
        Self {
            sender,
            stop,
            in_flight: JoinSet::new(),
            under_way: HashMap::new(),
            under_way_bytes: 0,
            bulkheads: Bulkheads::default(),
            made_room_at: None,
            outcomes: Vec::new(),
            gather_until: None,
            exchanges: JoinSet::new(),
            asked: ClaimBudget::default(),
            ask_at: Instant::now(),
            pause_until: None,
            fruitless: 0,
            pause: StoreBackoff::default(),
            counts: SenderMetrics::new(),
        }
    }

    /// The slots and bytes that are free: no attempt uses them, and no exchange asks for them. A
    /// claim needs a slot, and a place to wait until its endpoint may have another attempt.
    fn free_budget(&self) -> ClaimBudget {
        let Some(limits) = self.sender.setup.load().as_ref().map(|setup| setup.limits) else {
            return ClaimBudget::default();
        };
        let slots = self.in_flight.len().max(self.bulkheads.waiting()) + self.asked.slots;
        let bytes = self.under_way_bytes + self.bulkheads.waiting_bytes() + self.asked.bytes;
        ClaimBudget {
            slots: limits.in_flight_max.saturating_sub(slots),
            bytes: limits.in_flight_bytes_max.saturating_sub(bytes),
        }
    }

    /// Begins the claims that may begin now. Gives claims back that have waited for too long or
    /// take the room of others. Returns how many were begun.
    fn begin_waiting(&mut self) -> usize {
        if self.bulkheads.waiting() == 0 {
            return 0;
        }
        let now = Instant::now();
        let Some(setup) = self.sender.setup.load_full() else {
            let unusable = self.bulkheads.take_all();
            unusable.iter().for_each(|claim| self.give_back(claim));
            return 0;
        };
        let slots = setup.limits.in_flight_max;
        let free = slots.saturating_sub(self.in_flight.len());
        // Overdue claims are taken first: if this process was paused, their leases may have ended.
        let mut given_back = self.bulkheads.overdue(now);
        let asked = ClaimedAt { at: now, operator_acts: self.sender.store.operator_acts() };
        let begun = self.bulkheads.begin(free, is_crowded(free, slots), asked);
        let count = begun.len();
        for claim in begun {
            self.begin(&setup.endpoint_caller, claim, now);
        }
        let takes_much = self.bulkheads.waiting() * 2 > slots
            || self.bulkheads.waiting_bytes() * 2 > setup.limits.in_flight_bytes_max;
        // Claims that are given back may be claimed again at once, so this is not done in every
        // round.
        let is_due = self.made_room_at.is_none_or(|at| now.duration_since(at) > SLOW_ATTEMPT_AGE);
        if takes_much && is_due {
            self.made_room_at = Some(now);
            given_back.extend(self.bulkheads.waiting_for_slow(now));
        }
        given_back.iter().for_each(|claim| self.give_back(claim));
        count
    }

    /// The slots and bytes that another exchange may claim: none without a free slot or free bytes,
    /// or after the stop. The bytes are shared with exchanges that may begin at the same time.
    fn asking(&self) -> ClaimBudget {
        let ClaimBudget { slots, bytes } = self.free_budget();
        if slots == 0 || bytes == 0 || self.stop.is_cancelled() {
            return ClaimBudget::default();
        }
        let exchanges = self.sender.store.exchanges_at_once().saturating_sub(self.exchanges.len());
        ClaimBudget {
            slots: slots.min(EXCHANGE_CLAIMS_MAX),
            bytes: bytes.div_ceil(exchanges.max(1)),
        }
    }

    /// Begins an exchange if it has anything to settle or to claim: it settles the attempts that
    /// have ended, and claims deliveries for the free slots. A second exchange begins while the
    /// store commits the first, once there are enough outcomes to settle.
    fn exchange(&mut self) {
        let now = Instant::now();
        if self.pause_until.is_some_and(|until| now < until) {
            return;
        }
        let asking = self.asking();
        let is_worth_it = match self.exchanges.len() {
            0 => self.should_settle(now) || (asking.slots > 0 && self.ask_at <= now),
            under_way if under_way < self.sender.store.exchanges_at_once() => {
                self.outcomes.len() >= EXCHANGE_BESIDE_MIN
            }
            _ => false,
        };
        if !is_worth_it {
            return;
        }
        self.gather_until = None;
        // The number of outcomes in one commit is bounded, so that acks do not wait long.
        let count = self.outcomes.len().min(EXCHANGE_CLAIMS_MAX);
        let outcomes: Vec<_> = self.outcomes.drain(..count).collect();
        let setup = self.sender.setup.load();
        let ask = DeliveryAsk {
            limit: asking.slots,
            bytes_max: asking.bytes,
            node: Arc::clone(&self.sender.node),
            // Every exchange passes the same keys: a store that sees other keys checks all
            // endpoints again.
            vault_keys: setup.as_ref().map(|it| Arc::clone(&it.vault_keys)).unwrap_or_default(),
            claims_ahead: true,
        };
        drop(setup);
        self.asked.slots += asking.slots;
        self.asked.bytes += asking.bytes;
        let sender = Arc::clone(&self.sender);
        let began = ClaimedAt { at: now, operator_acts: sender.store.operator_acts() };
        self.exchanges.spawn(async move {
            let answer = sender.store.exchange(outcomes.clone(), ask).await;
            FinishedExchange { began, outcomes, asking, answer }
        });
    }

    /// Whether there are outcomes to settle and no reason to wait for more.
    fn should_settle(&self, now: Instant) -> bool {
        let is_over = self.gather_until.is_none_or(|until| until <= now);
        !self.outcomes.is_empty() && (is_over || self.outcomes.len() >= self.in_flight.len())
    }

    /// Begins the attempts that an exchange claimed. If the store failed, the outcomes are kept for the next
    /// exchange.
    fn answered(&mut self, asked: Result<FinishedExchange, JoinError>) {
        let FinishedExchange { began, outcomes, asking, answer } = match asked {
            Ok(asked) => asked,
            Err(error) => {
                // The outcomes are lost with the exchange: their deliveries are attempted again
                // after their leases. The next round counts the slots and bytes of the other
                // exchanges from zero.
                self.exchanges.abort_all();
                self.exchanges = JoinSet::new();
                self.asked = ClaimBudget::default();
                self.pause_until = Some(Instant::now() + self.pause.next());
                return log_panic(&error);
            }
        };
        self.asked.slots = self.asked.slots.saturating_sub(asking.slots);
        self.asked.bytes = self.asked.bytes.saturating_sub(asking.bytes);
        let now = Instant::now();
        let Exchanged { settled, claims, next_due } = match answer {
            Ok(exchanged) => exchanged,
            Err(error) => {
                self.pause.log_failure(&error, "deliveries");
                self.outcomes.splice(..0, outcomes);
                self.pause_until = Some(now + self.pause.next());
                return;
            }
        };
        self.pause = StoreBackoff::default();
        self.pause_until = None;
        for (outcome, held) in outcomes.iter().zip(settled) {
            self.counts.count(outcome, held);
        }
        let claimed_bytes: usize = claims.iter().map(|claim| claim.body.len()).sum();
        let is_full = claims.len() >= asking.slots || claimed_bytes >= asking.bytes;
        for claim in claims {
            match self.stop.is_cancelled() {
                false => self.bulkheads.add(claim, began),
                true => self.give_back(&claim),
            }
        }
        // If no claim could begin, an immediate further exchange would return the same claims.
        let has_begun = self.begin_waiting() > 0;
        let is_full = is_full && has_begun;
        let wait = match is_full {
            true => Duration::ZERO,
            false => next_due.map_or(POLL_EVERY, |due| {
                let wait = due.duration_since((self.sender.now)());
                Duration::try_from(wait).unwrap_or_default().min(POLL_EVERY)
            }),
        };
        let is_fruitless = !has_begun && wait.is_zero();
        self.fruitless = if is_fruitless { self.fruitless.saturating_add(1) } else { 0 };
        self.ask_at = match is_full {
            true => now,
            false => now + wait.max(self.pause_min()),
        };
    }

    /// The shortest pause between two exchanges that found nothing to claim.
    fn pause_min(&self) -> Duration {
        SENDER_PAUSE_MIN * (1 << self.fruitless.min(SENDER_PAUSE_DOUBLINGS))
    }

    /// Returns a claim whose attempt was not begun: it does not count.
    fn give_back(&mut self, claim: &DeliveryClaim) {
        self.outcomes.push(AttemptOutcome {
            delivery: claim.delivery,
            fence: claim.fence,
            took: Duration::ZERO,
            verdict: AttemptVerdict::GivenBack,
        });
    }

    fn begin(&mut self, endpoint_caller: &Arc<EndpointCaller>, begun: BegunClaim, began: Instant) {
        let BegunClaim { claim, must_check } = begun;
        let (endpoint, bytes) = (claim.endpoint.id, claim.body.len());
        let (endpoint_caller, sender) = (Arc::clone(endpoint_caller), Arc::clone(&self.sender));
        let begun = self.in_flight.spawn(async move {
            failpoint!("sender.claimed");
            let Attempt { verdict, took, is_timeout } = match must_check {
                true if !sender.still_holds(&claim).await => Attempt::given_back(),
                true | false => endpoint_caller.attempt(&claim, &sender.now).await,
            };
            failpoint!("sender.answered");
            sender.endpoint_tallies.count(endpoint, &verdict, took, (sender.now)());
            let ending = match (&verdict, is_timeout) {
                (AttemptVerdict::Delivered(_), _) => AttemptClass::Success,
                (AttemptVerdict::DeliveredLast { .. }, _) => AttemptClass::Stop,
                (AttemptVerdict::Failed { says, .. }, false) => match says {
                    EndpointSignal::Fails => AttemptClass::Failure,
                    EndpointSignal::Pauses(_) | EndpointSignal::Disable => AttemptClass::Stop,
                    EndpointSignal::Works | EndpointSignal::Nothing => AttemptClass::Other,
                },
                (AttemptVerdict::Failed { .. } | AttemptVerdict::GivenBack, true) => {
                    AttemptClass::Timeout
                }
                (AttemptVerdict::GivenBack, false) => AttemptClass::Other,
            };
            let (delivery, fence) = (claim.delivery, claim.fence);
            (AttemptOutcome { delivery, fence, took, verdict }, ending)
        });
        self.under_way.insert(begun.id(), RunningAttempt { endpoint, bytes, began });
        self.under_way_bytes += bytes;
    }

    /// Waits until something has changed: an exchange was answered, an attempt has ended, or there may be
    /// due deliveries and a slot for them.
    async fn wait(&mut self) {
        let began = Instant::now();
        let asks = self.exchanges.is_empty() && self.asking().slots > 0;
        if asks && self.pause_until.is_none() && self.ask_at <= began {
            return self.collect();
        }
        let (sender, pause_min) = (Arc::clone(&self.sender), self.pause_min());
        let ask_at = self.ask_at.max(began);
        let hint = async {
            sender.store.wait_for_deliveries(ask_at.duration_since(began)).await;
            // A hint may be for deliveries that cannot be claimed now.
            sleep_until(ask_at.min(began + pause_min)).await;
        };
        let resume_at = self.pause_until.unwrap_or(began);
        let gather_until = self.gather_until.unwrap_or(began);
        let gathers =
            self.gather_until.is_some() && self.exchanges.is_empty() && self.pause_until.is_none();
        tokio::select! {
            Some(asked) = self.exchanges.join_next(), if !self.exchanges.is_empty() => {
                self.answered(asked);
            }
            Some(ended) = self.in_flight.join_next_with_id(), if !self.in_flight.is_empty() => {
                self.ended(ended);
            }
            () = sleep_until(resume_at), if self.pause_until.is_some() => self.pause_until = None,
            () = sleep_until(gather_until), if gathers => {}
            () = hint, if asks && self.pause_until.is_none() => self.ask_at = Instant::now(),
            () = sleep(POLL_EVERY), if self.bulkheads.waiting() > 0 => {}
            () = sender.reloaded.notified() => self.ask_at = Instant::now(),
            () = self.stop.cancelled() => {}
        }
        self.collect();
    }

    /// Takes the outcomes of all attempts that have ended by now.
    fn collect(&mut self) {
        while let Some(ended) = self.in_flight.try_join_next_with_id() {
            self.ended(ended);
        }
    }

    fn ended(&mut self, ended: Result<(task::Id, (AttemptOutcome, AttemptClass)), JoinError>) {
        let (id, ending) = match ended {
            Ok((id, (outcome, ending))) => {
                if self.outcomes.is_empty() {
                    let gathered_for = self.sender.store.outcomes_gathered_for();
                    self.gather_until = Some(Instant::now() + gathered_for);
                }
                self.outcomes.push(outcome);
                (id, ending)
            }
            // The delivery waits for the end of its lease: the attempt is lost.
            Err(error) => {
                log_panic(&error);
                (error.id(), AttemptClass::Other)
            }
        };
        if let Some(RunningAttempt { endpoint, bytes, began }) = self.under_way.remove(&id) {
            self.under_way_bytes = self.under_way_bytes.saturating_sub(bytes);
            let stopped = self.bulkheads.ended(endpoint, began, ending);
            stopped.iter().for_each(|claim| self.give_back(claim));
        }
    }

    /// Waits for every attempt, and for the store to take every outcome. Nothing more is claimed.
    async fn finish(&mut self) {
        let not_begun = self.bulkheads.take_all();
        not_begun.iter().for_each(|claim| self.give_back(claim));
        loop {
            self.collect();
            // Outcomes must not wait for an attempt that hangs.
            self.gather_until = None;
            if let Some(until) = self.pause_until.take() {
                sleep_until(until).await;
            }
            self.exchange();
            if let Some(asked) = self.exchanges.join_next().await {
                self.answered(asked);
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

struct SenderMetrics {
    delivered: Counter,
    failed: Counter,
    given_back: Counter,
    lost: Counter,
    seconds: Histogram,
}

impl SenderMetrics {
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
        if outcome.verdict == AttemptVerdict::GivenBack {
            // No attempt was made. If the message was cancelled meanwhile, nothing was lost either.
            return self.given_back.increment(1);
        }
        self.seconds.record(outcome.took);
        match (held, &outcome.verdict) {
            (Held::Lost, _) => self.lost.increment(1),
            (Held::Kept, AttemptVerdict::Delivered(_) | AttemptVerdict::DeliveredLast { .. }) => {
                self.delivered.increment(1);
            }
            (Held::Kept, AttemptVerdict::Failed { .. } | AttemptVerdict::GivenBack) => {
                self.failed.increment(1);
            }
        }
    }
}
