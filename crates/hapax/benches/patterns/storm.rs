//! The deliveries: every event at least once, about 30 % of all deliveries are copies, and half of
//! those follow the first one immediately, so that both are in flight together. This file also
//! injects the faults during a run.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use tokio::task::JoinSet;

use crate::app::{App, Charged};
use crate::patterns::{Answer, Pattern};

/// Of 100 events, this many have a copy right after the first, and this many a later one.
const NEAR_PERCENT: u64 = 21;
const LATER_PERCENT: u64 = 22;

/// How many events after its first delivery a later copy arrives.
const LATER_BY: std::ops::Range<u64> = 50..2_000;

/// Of 100 deliveries, this many are cut off at a random moment, as if the process died.
const CUT_PERCENT: u64 = 3;

/// A cut comes at a random time within this span, about as long as a delivery takes.
const CUT_WITHIN_US: u64 = 20_000;

/// How often Redis is flushed.
const FLUSH_EVERY: Duration = Duration::from_millis(100);

/// The sender's pause before a retry, and the number of retries.
const AGAIN: Duration = Duration::from_millis(20);
const TRIES_MAX: u32 = 1_000;

/// The fault of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// Deliveries are cut off at random moments and retried.
    Cuts,
    /// Redis is flushed repeatedly.
    Flushed,
    /// Redis is killed once and restarts empty.
    Killed,
}

impl Fault {
    /// The faults that can affect a pattern.
    pub(crate) fn all_of(pattern: Pattern) -> impl Iterator<Item = Self> {
        let redis = [Self::Flushed, Self::Killed].into_iter().filter(move |_| pattern.uses_redis());
        std::iter::once(Self::Cuts).chain(redis)
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::None => "nothing fails",
            Self::Cuts => "3 % are cut off",
            Self::Flushed => "Redis is flushed",
            Self::Killed => "Redis is killed",
        }
    }
}

/// The deliveries, which are the same in every run.
pub(crate) struct Storm {
    pub(crate) events: u32,
    deliveries: Arc<[i64]>,
    seed: u64,
}

/// The result of a run.
pub(crate) struct Tally {
    pub(crate) fault: Fault,
    pub(crate) deliveries: usize,
    pub(crate) seconds: f64,
    /// The number of retries.
    pub(crate) again: usize,
    /// Effects beyond the first of an event.
    pub(crate) doubles: u64,
    /// Events that were answered and have no effect.
    pub(crate) lost: u64,
    latencies_us: Vec<u32>,
}

impl Tally {
    pub(crate) fn per_second(&self) -> f64 {
        self.deliveries as f64 / self.seconds
    }

    /// The quantile `share` of the latencies, from the first attempt of a delivery to its answer.
    pub(crate) fn latency_us(&self, share: f64) -> f64 {
        let at = (self.latencies_us.len() as f64 * share) as usize;
        let at = at.min(self.latencies_us.len().saturating_sub(1));
        self.latencies_us.get(at).copied().unwrap_or(0).into()
    }
}

impl Storm {
    pub(crate) fn new(events: u32, seed: u64) -> Self {
        let mut dice = Dice(seed);
        let (mut deliveries, mut later) = (Vec::new(), VecDeque::<(u64, i64)>::new());
        for event in 0..u64::from(events) {
            let n = event.cast_signed();
            deliveries.push(n);
            if dice.below(100) < NEAR_PERCENT {
                deliveries.push(n);
            }
            if dice.below(100) < LATER_PERCENT {
                let by = LATER_BY.start + dice.below(LATER_BY.end - LATER_BY.start);
                later.push_back((event + by, n));
            }
            // All later copies that are due. Their order is random, because each copy is a random
            // number of events behind.
            let due = later.iter().filter(|(at, _)| *at <= event).map(|(_, n)| *n);
            deliveries.extend(due);
            later.retain(|(at, _)| *at > event);
        }
        deliveries.extend(later.into_iter().map(|(_, n)| n));
        Self { events, deliveries: deliveries.into(), seed }
    }

    pub(crate) fn deliveries(&self) -> usize {
        self.deliveries.len()
    }

    /// Sends all deliveries through `pattern`, this many at once, and counts the effects.
    pub(crate) async fn run(
        &self,
        app: &Arc<App>,
        pattern: Pattern,
        connections: usize,
        fault: Fault,
    ) -> anyhow::Result<Tally> {
        app.begin(self.events).await?;
        let next = Arc::new(AtomicUsize::new(0));
        let began = Instant::now();
        let mut senders = JoinSet::new();
        for number in 0..connections {
            let sender = Sender {
                app: Arc::clone(app),
                pattern,
                fault,
                deliveries: Arc::clone(&self.deliveries),
                next: Arc::clone(&next),
                dice: Dice(self.seed ^ ((number as u64 + 1) << 32)),
                sent: Sent::default(),
            };
            senders.spawn(sender.run());
        }
        let mut trouble = JoinSet::new();
        trouble.spawn(cause(fault, Arc::clone(app), next, self.deliveries.len()));
        let mut all = Sent::default();
        while let Some(sent) = senders.join_next().await {
            all.join(sent.context("a sender panicked")??);
        }
        let seconds = began.elapsed().as_secs_f64();
        match fault {
            // The next run needs Redis again.
            Fault::Killed => drop(trouble.join_all().await),
            Fault::None | Fault::Cuts | Fault::Flushed => trouble.shutdown().await,
        }
        all.latencies_us.sort_unstable();
        let Charged { effects, distinct } = app.charged().await?;
        Ok(Tally {
            fault,
            deliveries: self.deliveries.len(),
            seconds,
            again: all.again,
            doubles: effects - distinct,
            lost: u64::from(self.events) - distinct,
            latencies_us: all.latencies_us,
        })
    }
}

/// Causes the fault while the senders run.
async fn cause(fault: Fault, app: Arc<App>, next: Arc<AtomicUsize>, deliveries: usize) {
    match fault {
        Fault::None | Fault::Cuts => {}
        Fault::Flushed => loop {
            tokio::time::sleep(FLUSH_EVERY).await;
            app.redis_server.flush_all().await;
        },
        Fault::Killed => {
            while next.load(Ordering::Relaxed) < deliveries / 2 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            app.redis_server.kill().await;
            app.redis_server.start_again().await;
        }
    }
}

/// Takes the next delivery, sends it until it is answered, and repeats.
struct Sender {
    app: Arc<App>,
    pattern: Pattern,
    fault: Fault,
    deliveries: Arc<[i64]>,
    next: Arc<AtomicUsize>,
    dice: Dice,
    sent: Sent,
}

#[derive(Default)]
struct Sent {
    latencies_us: Vec<u32>,
    again: usize,
}

impl Sent {
    fn join(&mut self, other: Self) {
        self.latencies_us.extend(other.latencies_us);
        self.again += other.again;
    }
}

impl Sender {
    async fn run(mut self) -> anyhow::Result<Sent> {
        while let Some(event) = self.deliveries.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            let (began, event) = (Instant::now(), *event);
            self.until_answered(event).await?;
            let us = u32::try_from(began.elapsed().as_micros()).unwrap_or(u32::MAX);
            self.sent.latencies_us.push(us);
        }
        Ok(self.sent)
    }

    async fn until_answered(&mut self, event: i64) -> anyhow::Result<()> {
        let mut last = None;
        for _ in 0..TRIES_MAX {
            let is_cut = self.fault == Fault::Cuts && self.dice.below(100) < CUT_PERCENT;
            let timeout = match is_cut {
                true => Duration::from_micros(self.dice.below(CUT_WITHIN_US)),
                false => Duration::MAX,
            };
            let delivered = self.pattern.deliver(&self.app, event);
            match tokio::time::timeout(timeout, delivered).await {
                Ok(Ok(Answer::Charged | Answer::SeenBefore)) => return Ok(()),
                Ok(Err(error)) => last = Some(error),
                Err(_cut) => {}
            }
            self.sent.again += 1;
            tokio::time::sleep(AGAIN).await;
        }
        bail!("event {event} was never answered: {last:?}")
    }
}

/// The same numbers for the same seed (SplitMix64).
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }
}
