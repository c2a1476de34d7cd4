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
    Claim, ClaimAsk, HandlerRef, HandlerSpec, Held, Inspect, NewJob, Outcome, Ran, SqlAsk, SqlRun,
    StoreError, Work,
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
use crate::current::Current;
use crate::gate::Gate;
use crate::gauges;
use crate::ingress::Now;
use crate::limits::{
    CLAIM_MAX, GATHER, LOG_LINES_PER_SECOND, POLL_EVERY, SQL_SLICE, STORE_PAUSE, STORE_PAUSE_MAX,
};
use crate::outbound::Outbound;
use crate::routes::RouteSpec;

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

impl LaneSpec {
    /// Every handler of these routes once, with its source as each tenant has it.
    pub fn of(routes: &[RouteSpec]) -> Vec<Self> {
        let mut lanes: Vec<Self> = Vec::new();
        for route in routes {
            let source = route.source.name();
            for handler in &route.handlers {
                let known = lanes
                    .iter_mut()
                    .find(|lane| lane.source == *source && lane.handler.name == handler.name);
                match known {
                    Some(lane) => lane.verifiers.push(Arc::clone(&route.source)),
                    None => lanes.push(Self {
                        handler: Arc::clone(handler),
                        source: source.clone(),
                        verifiers: vec![Arc::clone(&route.source)],
                    }),
                }
            }
        }
        lanes
    }
}

/// A claim for a worker outside.
#[derive(Debug)]
pub struct Pulled {
    /// The claim.
    pub claim: Claim,
    /// The object as it is now, where the handler refetches it.
    pub current: Option<Arc<str>>,
}

/// Everything that works on jobs in this process.
pub struct Workers<S> {
    store: Arc<S>,
    outbound: Outbound,
    bell: Bell,
    now: Now,
    gate: Gate,
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
        let (gate, unset) = (Gate::default(), watch::Sender::default());
        let workers = Self { store, outbound, bell, now, gate, id, lanes: unset };
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

    /// What a worker outside gets for its claims of a `pull` handler: the current object is fetched
    /// for all of them at once. Where that fails, the claim is settled as failed and left out.
    pub async fn with_current(&self, of: &HandlerRef, claims: Vec<Claim>) -> Vec<Pulled> {
        let lane = self.lanes.borrow().iter().find(|lane| lane.handler == *of).cloned();
        let Some(lane) = lane.filter(|lane| lane.current.is_some()) else {
            return claims.into_iter().map(|claim| Pulled { claim, current: None }).collect();
        };
        let mut fetching = JoinSet::new();
        for (place, claim) in claims.into_iter().enumerate() {
            let (lane, now) = (Arc::clone(&lane), Arc::clone(&self.now));
            fetching.spawn(async move {
                let fetched = lane.fetch(&claim, now()).await;
                (place, claim, fetched)
            });
        }
        let mut pulled = Vec::new();
        while let Some(ended) = fetching.join_next().await {
            match ended {
                Ok((place, claim, Ok(current))) => pulled.push((place, Pulled { claim, current })),
                Ok((_, claim, Err(outcome))) => {
                    let ended = lane.record(self, &claim, &Next::Settle(outcome)).await;
                    lane.counts.of(&ended).increment(1);
                    lane.say(&claim, &ended, (self.now)());
                    self.bell.ring(claim.event.id);
                }
                // Its lease runs out.
                Err(panic) => say_panic(Err(panic)),
            }
        }
        pulled.sort_unstable_by_key(|(place, _)| *place);
        pulled.into_iter().map(|(_, pulled)| pulled).collect()
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
    /// Where the current object is fetched before each attempt.
    current: Option<Current>,
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

/// What is left to do with the store after the part of an attempt that is outside it.
enum Next {
    /// It is over, and ended so.
    Settle(Outcome),
    /// The statements are to be run.
    Run(SqlRun),
    /// Nothing: Rust code has committed its effects and "done".
    Committed,
    /// Nothing: it ended without a verdict, and whoever claims the job next decides.
    Lost,
}

/// How an attempt ended for the books.
#[derive(Debug)]
enum Ended {
    Done,
    /// The order guard set it aside.
    Guarded,
    Failed(String),
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
        let current = config.refetch.clone().map(|refetch| Current::new(refetch, outbound.clone()));
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
            current,
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
                match (&self.kind, &self.current) {
                    (Kind::Sql(program), None) => self.work_sql(&shop, program, &stop).await,
                    (Kind::Sql(_), Some(_)) | (Kind::Http(_) | Kind::Code(_), _) => {
                        self.work_singly(&shop, &stop).await;
                    }
                    (Kind::Pull, _) => stop.cancelled().await,
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

    /// Slice after slice, in the store alone.
    async fn work_sql<S: Work + Inspect>(
        self: &Arc<Self>,
        shop: &Arc<Workers<S>>,
        program: &Arc<SqlProgram>,
        stop: &CancellationToken,
    ) {
        let most = shop.store.sql_slices().min(self.config.concurrency);
        let mut rhythm = Rhythm::new(self, shop, stop);
        while !stop.is_cancelled() {
            rhythm.listen().await;
            let found = match shop.gate.beside(self.slice(shop, program)).await {
                // Who keeps up needs one at a time; only a backlog is worth several.
                Ok((Found::Full, None)) if most > 1 => self.slices(shop, program, most, stop).await,
                Ok((found, None)) => Ok(found),
                Ok((_, Some(lost))) => self.alone(shop, program, &lost).await,
                Err(error) => Err(error),
            };
            rhythm.rest(found).await;
        }
    }

    /// Several slices at once, each followed by another as long as there is more.
    async fn slices<S: Work + Inspect>(
        self: &Arc<Self>,
        shop: &Arc<Workers<S>>,
        program: &Arc<SqlProgram>,
        most: usize,
        stop: &CancellationToken,
    ) -> Result<Found, StoreError> {
        let mut running = JoinSet::new();
        let begin = |running: &mut JoinSet<_>| {
            let (lane, shop, program) = (self.clone(), shop.clone(), program.clone());
            running.spawn(async move { shop.gate.beside(lane.slice(&shop, &program)).await });
        };
        (0..most).for_each(|_| begin(&mut running));
        let (mut found, mut lost) = (Ok(Found::Some), Vec::new());
        while let Some(ended) = running.join_next().await {
            let go_on = !stop.is_cancelled() && found.is_ok() && lost.is_empty();
            match ended {
                Ok(Ok((_, Some(claim)))) => lost.push(claim),
                Ok(Ok((Found::Full, None))) if go_on => begin(&mut running),
                Ok(Ok((Found::Full | Found::Some | Found::Nothing, None))) => {}
                Ok(Err(error)) => found = Err(error),
                Err(panic) => say_panic(Err(panic)),
            }
        }
        let mut lost = lost.into_iter();
        if let Some(first) = lost.next() {
            // Were the process to end with this one, claims that wait behind it would be lost with it.
            let others: Vec<Claim> = lost.map(|claim| *claim).collect();
            if !others.is_empty() {
                self.give_back(shop, others).await;
            }
            found = self.alone(shop, program, &first).await.and(found);
        }
        found
    }

    /// One slice, and the job that was lost before, if one has come up.
    async fn slice<S: Work>(
        &self,
        shop: &Workers<S>,
        program: &Arc<SqlProgram>,
    ) -> Result<(Found, Option<Box<Claim>>), StoreError> {
        let began = Instant::now();
        let ran = shop.store.run_sql(SqlAsk {
            claim: self.ask(shop, SQL_SLICE),
            program: program.clone(),
            timeout: self.config.timeout,
        });
        let ran = ran.await?;
        let all = ran.done + ran.guarded + ran.failed;
        if all > 0 {
            self.counts.done.increment(ran.done as u64);
            self.counts.guarded.increment(ran.guarded as u64);
            self.counts.failed.increment(ran.failed as u64);
            // They shared a transaction: each took its share of it.
            self.counts.seconds.record_many(began.elapsed() / all as u32, all);
            shop.bell.ring_each(&ran.events);
        }
        if ran.failed > 0 && self.lines.admit((shop.now)()) {
            let (lane, failed) = (&*self.name, ran.failed);
            // Without why: a database quotes values in its errors, and those are the sender's.
            warn!(
                lane,
                "attempts of {lane} failed ({failed}): `hapax events list --status failed` and \
                 `hapax dead list` name them, `hapax explain` says why"
            );
        }
        let found = match all {
            0 => Found::Nothing,
            some if some < SQL_SLICE => Found::Some,
            _full => Found::Full,
        };
        Ok((found, ran.alone))
    }

    /// A job that was lost before, with nothing else in flight.
    async fn alone<S: Work>(
        &self,
        shop: &Workers<S>,
        program: &Arc<SqlProgram>,
        lost: &Claim,
    ) -> Result<Found, StoreError> {
        tokio::select! {
            found = shop.gate.alone(self.lost_ones(shop, program, lost)) => found,
            never = self.keep(shop, lost) => match never {},
        }
    }

    /// Jobs that were lost before, one after the other, for as long as they come: many are lost
    /// together, and who waits for the gate should have to do so once for all of them.
    async fn lost_ones<S: Work>(
        &self,
        shop: &Workers<S>,
        program: &Arc<SqlProgram>,
        first: &Claim,
    ) -> Result<Found, StoreError> {
        self.run_lost(shop, program, first).await;
        loop {
            match self.slice(shop, program).await? {
                (_, Some(next)) => self.run_lost(shop, program, &next).await,
                // Something was done before it, so there may be more.
                (Found::Nothing, None) => return Ok(Found::Some),
                (found, None) => return Ok(found),
            }
        }
    }

    async fn run_lost<S: Work>(&self, shop: &Workers<S>, program: &Arc<SqlProgram>, claim: &Claim) {
        let began = Instant::now();
        let run = SqlRun {
            job: claim.job,
            fence: claim.fence,
            program: program.clone(),
            timeout: self.config.timeout,
            current: None,
        };
        let ended = self.record(shop, claim, &Next::Run(run)).await;
        self.end(shop, claim, &ended, began.elapsed());
    }

    /// Job by job, several at once, since each of them waits for somebody outside.
    async fn work_singly<S: Work + Inspect>(
        self: &Arc<Self>,
        shop: &Arc<Workers<S>>,
        stop: &CancellationToken,
    ) {
        let mut rhythm = Rhythm::new(self, shop, stop);
        let mut running = JoinSet::new();
        while let Some(mut permits) = stop.run_until_cancelled(self.free()).await {
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
                    if let [claim] = &claims[..]
                        && claim.alone
                    {
                        let emptied = self.emptied(shop, claim, limit);
                        let Some(rest) = stop.run_until_cancelled(emptied).await else {
                            self.give_back(shop, claims).await;
                            break;
                        };
                        permits.push(rest);
                        running.spawn(self.clone().attempt(shop.clone(), claim.clone(), permits));
                        rhythm.rest(Ok(Found::Full)).await;
                        continue;
                    }
                    for (claim, permit) in claims.into_iter().zip(permits) {
                        running.spawn(self.clone().attempt(shop.clone(), claim, vec![permit]));
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

    /// Waits until nothing else of this lane is in flight, with `claim` kept meanwhile: all permits
    /// but those that are `held` already.
    async fn emptied<S: Work>(
        &self,
        shop: &Workers<S>,
        claim: &Claim,
        held: usize,
    ) -> OwnedSemaphorePermit {
        let others = self.config.concurrency.max(1) - held;
        let others = u32::try_from(others).expect("concurrency is a small number");
        tokio::select! {
            all = self.permits.clone().acquire_many_owned(others) => all.expect("never closed"),
            never = self.keep(shop, claim) => match never {},
        }
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
        _permits: Vec<OwnedSemaphorePermit>,
    ) {
        let work = async {
            let began = Instant::now();
            let next = caught(self.run(&shop, &claim)).await.unwrap_or_else(|panic| {
                error!(lane = self.name, job = %claim.job, "the attempt panicked: {panic}");
                let error = "the handler panicked".to_owned();
                Next::Settle(Outcome::Failed { error, retry: Retry::Schedule })
            });
            let ended = self.record(&shop, &claim, &next).await;
            failpoint!("http.after_settle");
            (ended, began.elapsed())
        };
        let inside = async {
            match claim.alone {
                true => shop.gate.alone(work).await,
                false => shop.gate.beside(work).await,
            }
        };
        let (ended, took) = tokio::select! {
            ended = inside => ended,
            never = self.keep(&shop, &claim) => match never {},
        };
        self.end(&shop, &claim, &ended, took);
    }

    /// Tells of an attempt that has ended.
    fn end<S>(&self, shop: &Workers<S>, claim: &Claim, ended: &Ended, took: Duration) {
        self.counts.seconds.record(took);
        self.counts.of(ended).increment(1);
        self.say(claim, ended, (shop.now)());
        shop.bell.ring(claim.event.id);
    }

    /// What an attempt does outside the store.
    async fn run<S>(&self, shop: &Workers<S>, claim: &Claim) -> Next {
        let current = match self.fetch(claim, (shop.now)()).await {
            Ok(current) => current,
            Err(outcome) => return Next::Settle(outcome),
        };
        match &self.kind {
            Kind::Http(app) => {
                Next::Settle(app.call(claim, current.as_deref(), (shop.now)()).await)
            }
            Kind::Code(code) => self.run_code(&**code, claim, current).await,
            Kind::Sql(program) => Next::Run(SqlRun {
                job: claim.job,
                fence: claim.fence,
                program: program.clone(),
                timeout: self.config.timeout,
                current,
            }),
            Kind::Pull => unreachable!("pulled jobs are run elsewhere"),
        }
    }

    /// Runs the user's Rust code for as long as it may. A commit that it had begun by then goes on:
    /// settling asks first whether the job is done.
    async fn run_code(&self, code: &dyn Code, claim: &Claim, current: Option<Arc<str>>) -> Next {
        failpoint!("code.before_handler");
        let time = self.config.timeout;
        let ran = timeout(time, code.work(claim.clone(), current)).await;
        failpoint!("code.after_handler");
        match ran {
            Ok(CodeRan::Committed) => Next::Committed,
            Ok(CodeRan::Failed { error, retry }) => Next::Settle(Outcome::Failed { error, retry }),
            Ok(CodeRan::Lost { error }) => {
                debug!(lane = self.name, job = %claim.job, "the attempt was lost: {error}");
                Next::Lost
            }
            Err(_) => {
                let error = format!("timed out after {time:?}");
                Next::Settle(Outcome::Failed { error, retry: Retry::Schedule })
            }
        }
    }

    /// The object as it is now, where the handler wants it; the error is the attempt's outcome.
    async fn fetch(&self, claim: &Claim, now: Timestamp) -> Result<Option<Arc<str>>, Outcome> {
        match &self.current {
            Some(current) => current.fetch(claim, now).await.map(Some),
            None => Ok(None),
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

    /// Does what is left to do with the store. As long as that fails, and the lease may hold, it is
    /// asked again: otherwise an attempt that succeeded would be made once more.
    async fn record<S: Work>(&self, shop: &Workers<S>, claim: &Claim, next: &Next) -> Ended {
        let give_up = Instant::now() + self.config.policy.lease;
        let mut pause = Pause::default();
        loop {
            let recorded = match next {
                Next::Settle(outcome) => self.try_settle(shop, claim, outcome).await,
                Next::Run(run) => self.try_run(shop, run).await,
                Next::Committed => return Ended::Done,
                Next::Lost => return Ended::Lost,
            };
            let error = match recorded {
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

    async fn try_settle<S: Work>(
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
            (Held::Kept, Outcome::Failed { error, .. }) => Ended::Failed(error.clone()),
        })
    }

    async fn try_run<S: Work>(&self, shop: &Workers<S>, run: &SqlRun) -> Result<Ended, StoreError> {
        Ok(match shop.store.run_claimed(run.clone()).await? {
            Ran::Done => Ended::Done,
            Ran::Guarded => Ended::Guarded,
            // For the log, so without why: a database quotes values in its errors.
            Ran::Failed(_) => Ended::Failed("`hapax explain` says why".into()),
            Ran::Lost => Ended::Lost,
        })
    }

    fn say(&self, claim: &Claim, ended: &Ended, now: Timestamp) {
        let (lane, event_id, attempt) = (&*self.name, &*claim.event.key.event_id, claim.attempt);
        let why = match ended {
            Ended::Done | Ended::Guarded => {
                debug!(lane, event_id, job = %claim.job, attempt, "{lane} did {event_id}");
                return;
            }
            Ended::Lost => "its claim was lost meanwhile",
            Ended::Failed(error) => error,
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

    fn of(&self, ended: &Ended) -> &Counter {
        match ended {
            Ended::Done => &self.done,
            Ended::Guarded => &self.guarded,
            Ended::Failed(_) => &self.failed,
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
