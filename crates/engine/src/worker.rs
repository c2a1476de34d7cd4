//! Working on what was accepted: each handler has a lane, and each lane claims what is due, runs it
//! and records how it ended. What runs where is decided here; what an app is sent is in
//! [`crate::app`], and SQL never leaves the store.
//!
//! A claim that was begun is settled, or lost with this process: nothing here repeats an attempt.

use std::fmt;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use hapax_core::failpoint;
use hapax_core::handler::{Code, CodeRan, EventView, Handler, HandlerKind, SqlProgram};
use hapax_core::job::Retry;
use hapax_core::store::{
    Claim, ClaimAsk, HandlerRef, HandlerSpec, Held, Inspect, NewJob, Outcome, SqlAsk, StoreError,
    Work,
};
use hapax_core::{Source, SourceName, Timestamp};
use metrics::{Counter, Histogram, counter, histogram};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};
use uuid::Uuid;

use crate::app::App;
use crate::bell::Bell;
use crate::budget::LogBudget;
use crate::gauges;
use crate::ingress::Now;
use crate::limits::{
    CLAIM_MAX, GATHER, LOG_LINES_PER_SECOND, POLL_EVERY, SQL_SLICE, STORE_PAUSE, STORE_PAUSE_MAX,
};
use crate::outbound::Outbound;

/// One handler of one source.
#[derive(Debug, Clone)]
pub struct LaneSpec {
    /// The handler.
    pub handler: Arc<Handler>,
    /// Its source.
    pub source: SourceName,
    /// The source as each tenant has it: whose secrets sign what goes to the app.
    pub verifiers: Vec<Arc<Source>>,
}

/// Everything that works on jobs in this process.
pub struct Workers<S> {
    store: Arc<S>,
    outbound: Outbound,
    bell: Bell,
    now: Now,
    /// Who we are in the notes of attempts: another one after each start.
    id: Arc<str>,
    lanes: watch::Sender<Vec<Arc<Lane>>>,
}

impl<S: Work + Inspect> Workers<S> {
    /// Nothing is claimed before [`Workers::run`]. `bell` rings for whoever waits for an event.
    pub fn new(
        store: Arc<S>,
        outbound: Outbound,
        bell: Bell,
        now: Now,
        lanes: Vec<LaneSpec>,
    ) -> Self {
        let id = format!("worker-{}", Uuid::now_v7().simple()).into();
        let workers = Self { store, outbound, bell, now, id, lanes: watch::Sender::default() };
        workers.reload(lanes);
        workers
    }

    /// Takes over other lanes. What was begun goes on as it began, and still counts against the
    /// concurrency of its handler.
    pub fn reload(&self, lanes: Vec<LaneSpec>) {
        let before = self.lanes.borrow().clone();
        let build = |spec| Arc::new(Lane::new(spec, &self.outbound, &before));
        self.lanes.send_replace(lanes.into_iter().map(build).collect());
    }

    /// What the store is told of the handlers.
    pub fn handlers(&self) -> Vec<HandlerSpec> {
        self.lanes.borrow().iter().map(|lane| lane.config.spec(&lane.handler.source)).collect()
    }

    /// The work that an event of `source` would promise now.
    pub fn jobs_for(&self, source: &SourceName, event: EventView<'_>) -> Vec<NewJob> {
        let lanes = self.lanes.borrow();
        let of_source = lanes.iter().filter(|lane| lane.handler.source == *source);
        of_source.filter_map(|lane| lane.config.job_for(event)).collect()
    }

    /// Works until `stop`. Then nothing more is claimed, what runs has `drain` to end, and what was
    /// claimed but not begun is given back.
    pub async fn run(self: Arc<Self>, drain: Duration, stop: CancellationToken) {
        let mut lanes = self.lanes.subscribe();
        let mut running = JoinSet::new();
        while !stop.is_cancelled() {
            let current = lanes.borrow_and_update().clone();
            if stop.run_until_cancelled(self.announce(&current)).await.is_none() {
                break;
            }
            let round = stop.child_token();
            for lane in &current {
                running.spawn(lane.clone().work(self.clone(), round.clone()));
            }
            let (store, now) = (self.store.clone(), self.now.clone());
            running.spawn(gauges::watch(store, now, current, round.clone()));
            tokio::select! {
                () = stop.cancelled() => {}
                _ = lanes.changed() => round.cancel(),
            }
            while let Some(ended) = running.try_join_next() {
                say_panic(ended);
            }
        }
        let ended = timeout(drain, async {
            while let Some(ended) = running.join_next().await {
                say_panic(ended);
            }
        });
        if ended.await.is_err() {
            warn!("work was still running after {drain:?} and was cut; it runs again later");
        }
        running.shutdown().await;
    }

    /// Tells the store what we can do. Until it listens there is nothing to claim.
    async fn announce(&self, lanes: &[Arc<Lane>]) {
        let mut pause = Pause::default();
        let specs: Vec<HandlerSpec> =
            lanes.iter().map(|lane| lane.config.spec(&lane.handler.source)).collect();
        while let Err(error) = self.store.announce(specs.clone()).await {
            pause.say(&error, "telling the store of the handlers");
            sleep(pause.next()).await;
        }
    }
}

impl<S> fmt::Debug for Workers<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Workers").field("id", &self.id).finish_non_exhaustive()
    }
}

/// A handler at work.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) handler: HandlerRef,
    pub(crate) name: String,
    config: Arc<Handler>,
    kind: Kind,
    /// How many attempts may run; shared with the lane that a reload replaced.
    permits: Arc<Semaphore>,
    counts: Counts,
    lines: LogBudget,
}

#[derive(Debug)]
enum Kind {
    Sql(Arc<SqlProgram>),
    Http(Box<App>),
    Code(Arc<dyn Code>),
    Pull,
}

#[derive(Debug)]
struct Counts {
    done: Counter,
    guarded: Counter,
    failed: Counter,
    lost: Counter,
    seconds: Histogram,
}

/// What a look for work found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Nothing,
    /// Less than was asked for.
    Some,
    /// As much as was asked for: there is likely more.
    Full,
}

/// What an attempt came to.
#[derive(Debug)]
enum Ran {
    /// To be recorded.
    Outcome(Outcome),
    /// There is nothing to record: it is done and committed, or lost.
    Ended(Outcome, Ended),
}

/// How an attempt ended for the books.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ended {
    Done,
    Failed,
    /// The fence was lost, or nothing could be recorded: whoever claims it next decides.
    Lost,
}

impl Lane {
    fn new(spec: LaneSpec, outbound: &Outbound, before: &[Arc<Self>]) -> Self {
        let LaneSpec { handler: config, source, verifiers } = spec;
        let kind = match &config.kind {
            HandlerKind::Sql(program) => Kind::Sql(program.clone()),
            HandlerKind::Pull => Kind::Pull,
            HandlerKind::Code(code) => Kind::Code(code.clone()),
            HandlerKind::Http(target) => {
                Kind::Http(Box::new(App::new(&config, target, verifiers, outbound.clone())))
            }
        };
        let handler = HandlerRef { source, handler: config.name.clone() };
        let as_before = before
            .iter()
            .find(|lane| lane.handler == handler)
            .filter(|lane| lane.config.concurrency == config.concurrency);
        Self {
            name: format!("{}/{}", handler.source, handler.handler),
            permits: match as_before {
                Some(lane) => lane.permits.clone(),
                None => Arc::new(Semaphore::new(config.concurrency.max(1))),
            },
            counts: Counts::new(config.name.as_str()),
            lines: LogBudget::new(LOG_LINES_PER_SECOND),
            handler,
            config,
            kind,
        }
    }

    /// Works until `stop`, and then until what was begun has ended.
    async fn work<S: Work + Inspect>(
        self: Arc<Self>,
        shop: Arc<Workers<S>>,
        stop: CancellationToken,
    ) {
        while !stop.is_cancelled() {
            let working = async {
                match &self.kind {
                    Kind::Sql(program) => self.work_sql(&shop, program, &stop).await,
                    Kind::Http(_) | Kind::Code(_) => self.work_http(&shop, &stop).await,
                    Kind::Pull => stop.cancelled().await,
                }
            };
            if let Err(panic) = caught(working).await {
                error!(
                    lane = self.name,
                    "the lane {} panicked and starts again: {panic}", self.name
                );
                stop.run_until_cancelled(sleep(STORE_PAUSE_MAX)).await;
            }
        }
    }

    async fn work_sql<S: Work>(
        &self,
        shop: &Workers<S>,
        program: &Arc<SqlProgram>,
        stop: &CancellationToken,
    ) {
        let mut rhythm = Rhythm::new(self, shop, stop);
        while !stop.is_cancelled() {
            rhythm.listen().await;
            let began = Instant::now();
            let ran = shop.store.run_sql(SqlAsk {
                claim: self.ask(shop, SQL_SLICE),
                program: program.clone(),
                timeout: self.config.timeout,
            });
            let found = ran.await.map(|ran| {
                let all = ran.done + ran.guarded + ran.failed;
                if all == 0 {
                    return Found::Nothing;
                }
                self.counts.done.increment(ran.done as u64);
                self.counts.guarded.increment(ran.guarded as u64);
                self.counts.failed.increment(ran.failed as u64);
                // They shared a transaction: each took its share of it.
                self.counts.seconds.record_many(began.elapsed() / all as u32, all);
                shop.bell.ring_all();
                if all < SQL_SLICE { Found::Some } else { Found::Full }
            });
            rhythm.rest(found).await;
        }
    }

    async fn work_http<S: Work + Inspect>(
        self: &Arc<Self>,
        shop: &Arc<Workers<S>>,
        stop: &CancellationToken,
    ) {
        let mut rhythm = Rhythm::new(self, shop, stop);
        let mut running = JoinSet::new();
        while let Some(permits) = stop.run_until_cancelled(self.free()).await {
            while let Some(ended) = running.try_join_next() {
                say_panic(ended);
            }
            rhythm.listen().await;
            let limit = permits.len();
            // Not to be broken off: what is claimed must be begun or given back.
            let claimed = shop.store.claim(self.ask(shop, limit)).await;
            let found = match claimed {
                Err(error) => Err(error),
                Ok(claims) if claims.is_empty() => {
                    drop(permits);
                    Ok(Found::Nothing)
                }
                Ok(claims) if stop.is_cancelled() => {
                    self.give_back(shop, claims).await;
                    break;
                }
                Ok(claims) => {
                    let found = if claims.len() < limit { Found::Some } else { Found::Full };
                    for (claim, permit) in claims.into_iter().zip(permits) {
                        running.spawn(self.clone().attempt(shop.clone(), claim, permit));
                    }
                    Ok(found)
                }
            };
            rhythm.rest(found).await;
        }
        while let Some(ended) = running.join_next().await {
            say_panic(ended);
        }
    }

    /// Waits until another attempt may run, and takes as many permits as there are.
    async fn free(&self) -> Vec<OwnedSemaphorePermit> {
        let first = self.permits.clone().acquire_owned().await.expect("never closed");
        let more = std::iter::from_fn(|| self.permits.clone().try_acquire_owned().ok());
        std::iter::once(first).chain(more).take(CLAIM_MAX).collect()
    }

    fn ask<S>(&self, shop: &Workers<S>, limit: usize) -> ClaimAsk {
        ClaimAsk { handler: self.handler.clone(), limit, worker: shop.id.clone() }
    }

    async fn give_back<S: Work>(&self, shop: &Workers<S>, claims: Vec<Claim>) {
        let count = claims.len();
        let claims = claims.iter().map(|claim| (claim.job, claim.fence)).collect();
        match shop.store.give_back(claims).await {
            Ok(()) => info!(lane = self.name, count, "gave {count} unbegun jobs back"),
            Err(error) => warn!(lane = self.name, %error, "could not give jobs back: {error}"),
        }
    }

    /// One claim from its beginning to its end in the books.
    async fn attempt<S: Work + Inspect>(
        self: Arc<Self>,
        shop: Arc<Workers<S>>,
        claim: Claim,
        _permit: OwnedSemaphorePermit,
    ) {
        let began = Instant::now();
        let ran = tokio::select! {
            ran = caught(self.run(&shop, &claim)) => ran.unwrap_or_else(|panic| {
                error!(lane = self.name, job = %claim.job, "the attempt panicked: {panic}");
                let error = "the handler panicked".to_owned();
                Ran::Outcome(Outcome::Failed { error, retry: Retry::Schedule })
            }),
            never = self.keep(&shop, &claim) => match never {},
        };
        let took = began.elapsed();
        let (outcome, ended) = match ran {
            Ran::Outcome(outcome) => {
                let ended = self.record(&shop, &claim, &outcome).await;
                (outcome, ended)
            }
            Ran::Ended(outcome, ended) => (outcome, ended),
        };
        failpoint!("http.after_settle");
        self.counts.seconds.record(took);
        self.counts.of(ended).increment(1);
        self.say(&claim, &outcome, ended, (shop.now)());
        shop.bell.ring(claim.event.id);
    }

    async fn run<S>(&self, shop: &Workers<S>, claim: &Claim) -> Ran {
        match &self.kind {
            Kind::Http(app) => Ran::Outcome(app.call(claim, (shop.now)()).await),
            Kind::Code(code) => self.run_code(&**code, claim).await,
            Kind::Sql(_) | Kind::Pull => {
                unreachable!("only jobs for an app or for Rust code are claimed one by one")
            }
        }
    }

    /// Runs the user's Rust code for as long as it may. A commit that it had begun by then goes on:
    /// recording the attempt asks first whether the job is done.
    async fn run_code(&self, code: &dyn Code, claim: &Claim) -> Ran {
        failpoint!("code.before_handler");
        let time = self.config.timeout;
        let failed = |error, retry| Outcome::Failed { error, retry };
        let ran = timeout(time, code.work(claim.clone())).await;
        failpoint!("code.after_handler");
        match ran {
            Ok(CodeRan::Committed) => {
                Ran::Ended(Outcome::Done { result: None, publish: Vec::new() }, Ended::Done)
            }
            Ok(CodeRan::Failed { error, retry }) => Ran::Outcome(failed(error, retry)),
            // Not recorded: an attempt without a verdict uses no step of the schedule.
            Ok(CodeRan::Lost { error }) => Ran::Ended(failed(error, Retry::Schedule), Ended::Lost),
            Err(_) => Ran::Outcome(failed(format!("timed out after {time:?}"), Retry::Schedule)),
        }
    }

    /// Renews the lease as long as this is awaited.
    async fn keep<S: Work>(&self, shop: &Workers<S>, claim: &Claim) -> std::convert::Infallible {
        let lease = self.config.policy.lease;
        let every = (lease / 3).max(LEASE_BEAT_MIN);
        let mut beats = interval_at(Instant::now() + every, every);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            beats.tick().await;
            match shop.store.renew(claim.job, claim.fence, lease).await {
                Ok(Held::Kept) => {}
                // The app may have completed it and be about to answer: let it. Settling is fenced.
                Ok(Held::Lost) => std::future::pending().await,
                Err(error) => debug!(lane = self.name, %error, "could not renew a lease: {error}"),
            }
        }
    }

    /// Writes down how it ended. As long as the store fails, and the lease may hold, it is asked
    /// again: otherwise an attempt that succeeded would be made once more.
    async fn record<S: Work>(&self, shop: &Workers<S>, claim: &Claim, outcome: &Outcome) -> Ended {
        let give_up = Instant::now() + self.config.policy.lease;
        let mut pause = Pause::default();
        loop {
            let error = match self.try_record(shop, claim, outcome).await {
                Ok(ended) => return ended,
                Err(error) => error,
            };
            pause.say(&error, "recording an attempt");
            if Instant::now() >= give_up {
                return Ended::Lost;
            }
            sleep(pause.next()).await;
        }
    }

    async fn try_record<S: Work>(
        &self,
        shop: &Workers<S>,
        claim: &Claim,
        outcome: &Outcome,
    ) -> Result<Ended, StoreError> {
        // The app may have completed the job in a transaction of its own; then its answer, or the
        // lack of one, changes nothing.
        if shop.store.is_done(claim.job).await? {
            return Ok(Ended::Done);
        }
        let held = shop.store.settle(claim.job, claim.fence, outcome.clone()).await?;
        Ok(match (held, outcome) {
            (Held::Lost, _) => Ended::Lost,
            (Held::Kept, Outcome::Done { .. }) => Ended::Done,
            (Held::Kept, Outcome::Failed { .. }) => Ended::Failed,
        })
    }

    fn say(&self, claim: &Claim, outcome: &Outcome, ended: Ended, now: Timestamp) {
        let (lane, event_id, attempt) = (&*self.name, &*claim.event.key.event_id, claim.attempt);
        let why = match (outcome, ended) {
            (_, Ended::Done) => {
                debug!(lane, event_id, job = %claim.job, attempt, "{lane} did {event_id}");
                return;
            }
            (_, Ended::Lost) => "its claim was lost meanwhile",
            (Outcome::Failed { error, .. }, Ended::Failed) => error,
            (Outcome::Done { .. }, Ended::Failed) => {
                unreachable!("done is never recorded as failed")
            }
        };
        if self.lines.admit(now) {
            warn!(
                lane,
                event_id = %crate::kept::Plain(event_id),
                job = %claim.job,
                attempt,
                "attempt {attempt} of {lane} failed: {}", crate::kept::Plain(why)
            );
        }
    }
}

impl Counts {
    fn new(handler: &str) -> Self {
        let count = |outcome: &'static str| counter!("hapax_jobs_total", "handler" => handler.to_owned(), "outcome" => outcome);
        Self {
            done: count("done"),
            guarded: count("guarded"),
            failed: count("failed"),
            lost: count("lost"),
            seconds: histogram!("hapax_handler_seconds", "handler" => handler.to_owned()),
        }
    }

    fn of(&self, ended: Ended) -> &Counter {
        match ended {
            Ended::Done => &self.done,
            Ended::Failed => &self.failed,
            Ended::Lost => &self.lost,
        }
    }
}

/// Renewing more often than this would cost more than the lease is worth.
const LEASE_BEAT_MIN: Duration = Duration::from_millis(10);

/// The first pause of a lane that found nothing; it doubles, up to [`POLL_EVERY`]. It bounds what a
/// hint costs that promises work where there is none.
const QUIET_PAUSE: Duration = Duration::from_millis(5);

/// When a lane looks for work again.
struct Rhythm<'a, S> {
    lane: &'a Lane,
    shop: &'a Workers<S>,
    stop: &'a CancellationToken,
    arrived: Pin<Box<dyn Future<Output = ()> + Send + 'a>>,
    has_arrived: bool,
    quiet: u32,
    pause: Pause,
}

impl<'a, S: Work> Rhythm<'a, S> {
    fn new(lane: &'a Lane, shop: &'a Workers<S>, stop: &'a CancellationToken) -> Self {
        Self {
            lane,
            shop,
            stop,
            arrived: Box::pin(shop.store.work_arrived()),
            has_arrived: false,
            quiet: 0,
            pause: Pause::default(),
        }
    }

    /// From here on work that arrives is heard of, so that none slips in between a look that finds
    /// nothing and the wait that follows.
    async fn listen(&mut self) {
        if self.has_arrived {
            self.has_arrived = false;
            self.arrived = Box::pin(self.shop.store.work_arrived());
        }
        poll_fn(|cx| {
            self.has_arrived = self.arrived.as_mut().poll(cx).is_ready();
            Poll::Ready(())
        })
        .await;
    }

    /// Waits until it is worth looking again.
    async fn rest(&mut self, found: Result<Found, StoreError>) {
        match found {
            Ok(found) => {
                self.pause = Pause::default();
                match found {
                    Found::Full => self.quiet = 0,
                    Found::Some => {
                        self.quiet = 0;
                        self.stop.run_until_cancelled(sleep(GATHER)).await;
                    }
                    Found::Nothing => self.wait_for_work().await,
                }
            }
            Err(error) => {
                self.pause.say(&error, &self.lane.name);
                self.stop.run_until_cancelled(sleep(self.pause.next())).await;
            }
        }
    }

    async fn wait_for_work(&mut self) {
        if self.has_arrived {
            // Heard while we looked; other lanes' work sounds the same, so not at once.
            self.stop.run_until_cancelled(sleep(GATHER)).await;
            return;
        }
        let due = self.shop.store.next_due(&self.lane.handler).await.ok().flatten();
        let until_due = due.map_or(POLL_EVERY, |due| {
            Duration::try_from(due.duration_since((self.shop.now)())).unwrap_or_default()
        });
        let least = QUIET_PAUSE.saturating_mul(1 << self.quiet.min(16));
        self.quiet += 1;
        let wait = until_due.max(least).min(POLL_EVERY);
        tokio::select! {
            () = &mut self.arrived => {
                self.has_arrived = true;
                self.quiet = 0;
            }
            () = sleep(wait) => {}
            () = self.stop.cancelled() => {}
        }
    }
}

/// Pauses that double while the store fails, and a line for the first failure only.
#[derive(Debug, Default)]
pub(crate) struct Pause {
    failures: u32,
}

impl Pause {
    pub(crate) fn say(&self, error: &StoreError, doing: &str) {
        if self.failures == 0 {
            warn!(%error, "{doing}: {error}; trying again");
        }
    }

    pub(crate) fn next(&mut self) -> Duration {
        let pause = STORE_PAUSE.saturating_mul(1 << self.failures.min(16)).min(STORE_PAUSE_MAX);
        self.failures += 1;
        pause
    }
}

/// Awaits `work`; a panic in it is an answer.
async fn caught<T>(work: impl Future<Output = T>) -> Result<T, String> {
    let mut work = pin!(work);
    poll_fn(|cx| {
        // What panicked is never polled again, so nothing sees it half done.
        match catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(cx))) {
            Ok(polled) => polled.map(Ok),
            Err(panic) => Poll::Ready(Err(panic_text(&*panic))),
        }
    })
    .await
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => (*text).to_owned(),
        (None, Some(text)) => text.clone(),
        (None, None) => "no reason given".to_owned(),
    }
}

fn say_panic(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        error!("a task of the workers panicked: {error}");
    }
}
