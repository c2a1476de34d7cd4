//! Runs the jobs of accepted events. Each handler has a lane, and each lane claims due jobs, runs
//! them and records the outcome. This file decides which jobs run in which way.
//! [`crate::worker::http_handler`] builds the requests to apps, and SQL runs inside the store.
//!
//! A claim whose work began is settled, or lost with this process: nothing here repeats an attempt.

mod backlog_metrics;
mod claims;
pub(crate) mod http_handler;
mod isolation;
mod metrics;
mod panics;
mod per_job;
mod polling;
mod refetch;
mod sql_batches;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use hapax_core::handler::{EventView, Handler, HandlerKind, RustHandler, SqlProgram};
use hapax_core::store::{
    Claim, HandlerRef, HandlerSpec, Inspect, NewJob, Outcome, SqlRun, StoreHints, TrafficFigures,
    TriedJob, Work,
};
use hapax_core::{Source, SourceName, Tenant, Timestamp};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{error, warn};
use uuid::Uuid;

use metrics::WorkerMetrics;
use panics::{catch_panic, log_panic};
pub(crate) use polling::StoreBackoff;

use crate::event_waiters::EventWaiters;
use crate::ingress::Now;
use crate::ingress::routes::RouteSpec;
use crate::limits::{LOG_LINES_PER_SECOND, STORE_PAUSE_MAX};
use crate::log_budget::LogBudget;
use crate::outbound::Outbound;
use crate::source_tallies::{SourceTallies, SourceTally};
use crate::worker::http_handler::App;
use crate::worker::isolation::Isolation;
use crate::worker::refetch::Refetcher;

/// One handler of one source.
#[derive(Debug, Clone)]
pub struct LaneSpec {
    /// The handler.
    pub handler: Arc<Handler>,
    /// Its source.
    pub source: SourceName,
    /// The source as configured for each tenant: its secrets sign requests to the app.
    pub verifiers: Vec<Arc<Source>>,
}

impl LaneSpec {
    /// Every handler of these routes once, with its source as configured for each tenant.
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

/// The sources of tenants that were added at run time: their secrets sign requests to the app.
pub type TenantVerifiers = HashMap<(SourceName, Tenant), Arc<Source>>;

/// [`TenantVerifiers`], shared with every lane.
pub(crate) type SharedTenantVerifiers = Arc<ArcSwap<TenantVerifiers>>;

/// A claim for an external worker.
#[derive(Debug)]
pub struct Pulled {
    /// The claim.
    pub claim: Claim,
    /// The current object, if the handler refetches it.
    pub current: Option<Arc<str>>,
}

/// All workers of this process.
pub struct Workers<S> {
    store: Arc<S>,
    outbound: Outbound,
    event_waiters: EventWaiters,
    now: Now,
    isolation: Isolation,
    /// The name of this process in the records of attempts: a new one after each start.
    id: Arc<str>,
    tenants: SharedTenantVerifiers,
    /// The counters that statistics read.
    tallies: SourceTallies,
    lanes: watch::Sender<Vec<Arc<HandlerWorkers>>>,
}

impl<S: Work + Inspect + StoreHints> Workers<S> {
    /// Nothing is claimed before [`Workers::run`]. Requests that wait for an event are notified through
    /// `event_waiters`.
    pub fn new(
        store: Arc<S>,
        outbound: Outbound,
        event_waiters: EventWaiters,
        now: Now,
        lanes: Vec<LaneSpec>,
    ) -> Self {
        let id = format!("worker-{}", Uuid::now_v7().simple()).into();
        let (isolation, unset) = (Isolation::default(), watch::Sender::default());
        let workers = Self {
            store,
            outbound,
            event_waiters,
            now,
            isolation,
            id,
            tenants: SharedTenantVerifiers::default(),
            tallies: SourceTallies::default(),
            lanes: unset,
        };
        workers.reload(lanes);
        workers
    }

    /// Replaces the sources of tenants that were added at run time. The next attempts are signed with the new
    /// secrets.
    pub fn set_tenants(&self, tenants: TenantVerifiers) {
        self.tenants.store(Arc::new(tenants));
    }

    /// Replaces the lanes. Running attempts continue with the old settings, and still count against
    /// the concurrency of their handler.
    pub fn reload(&self, lanes: Vec<LaneSpec>) {
        let before = self.lanes.borrow().clone();
        let build = |spec: LaneSpec| {
            let tally = self.tallies.of(&spec.source);
            Arc::new(HandlerWorkers::new(spec, &self.outbound, &self.tenants, tally, &before))
        };
        self.lanes.send_replace(lanes.into_iter().map(build).collect());
    }

    /// The figures of the jobs of every source since the process started, including those of sources that a
    /// reload removed.
    pub fn figures(&self) -> BTreeMap<SourceName, TrafficFigures> {
        self.tallies.figures()
    }

    /// Counts an attempt of an external worker in the figures of its source.
    pub fn count_tried(
        &self,
        source: &SourceName,
        job: &TriedJob,
        began: Timestamp,
        ended: Timestamp,
    ) {
        self.tallies.of(source).count_attempt(job, began, ended);
    }

    /// The handlers, as the store needs them.
    pub fn handlers(&self) -> Vec<HandlerSpec> {
        self.lanes.borrow().iter().map(|lane| lane.config.spec(&lane.handler.source)).collect()
    }

    /// The jobs that an event of `source` would create now.
    pub fn jobs_for(&self, source: &SourceName, event: EventView<'_>) -> Vec<NewJob> {
        let lanes = self.lanes.borrow();
        let of_source = lanes.iter().filter(|lane| lane.handler.source == *source);
        of_source.filter_map(|lane| lane.config.job_for(event)).collect()
    }

    /// The claims of an external worker with their current objects, which are fetched at the same
    /// time. If a fetch fails, its claim is settled as failed and left out.
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
                    let ended = lane.record(self, &claim, &StoreStep::Settle(outcome)).await;
                    lane.end(self, &claim, &ended, None);
                }
                // Its lease expires.
                Err(panic) => log_panic(Err(panic)),
            }
        }
        pulled.sort_unstable_by_key(|(place, _)| *place);
        pulled.into_iter().map(|(_, pulled)| pulled).collect()
    }

    /// Runs until `stop`. Then nothing more is claimed, running attempts have `drain` to end, and
    /// claims whose work has not begun are given back.
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
            running.spawn(backlog_metrics::watch(store, now, current, round.clone()));
            tokio::select! {
                () = stop.cancelled() => {}
                _ = lanes.changed() => round.cancel(),
            }
            while let Some(ended) = running.try_join_next() {
                log_panic(ended);
            }
        }
        let ended = timeout(drain, async {
            while let Some(ended) = running.join_next().await {
                log_panic(ended);
            }
        });
        if ended.await.is_err() {
            warn!("work was still running after {drain:?} and was cut; it runs again later");
        }
        running.shutdown().await;
    }

    /// Announces the handlers to the store. Until the announcement succeeds, nothing is claimed.
    async fn announce(&self, lanes: &[Arc<HandlerWorkers>]) {
        let mut pause = StoreBackoff::default();
        let specs: Vec<HandlerSpec> =
            lanes.iter().map(|lane| lane.config.spec(&lane.handler.source)).collect();
        while let Err(error) = self.store.announce(specs.clone()).await {
            pause.log_failure(&error, "registering the handlers in the store");
            sleep(pause.next()).await;
        }
    }
}

impl<S> fmt::Debug for Workers<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Workers").field("id", &self.id).finish_non_exhaustive()
    }
}

/// A handler with its workers.
#[derive(Debug)]
pub(crate) struct HandlerWorkers {
    pub(crate) handler: HandlerRef,
    pub(crate) name: String,
    config: Arc<Handler>,
    kind: WorkerKind,
    /// Fetches the current object before each attempt.
    current: Option<Refetcher>,
    /// The number of concurrent attempts; shared with the lane that a reload replaced.
    permits: Arc<Semaphore>,
    counts: WorkerMetrics,
    /// The counters of the source.
    tally: Arc<SourceTally>,
    lines: LogBudget,
}

#[derive(Debug)]
enum WorkerKind {
    Sql(Arc<SqlProgram>),
    Http(Box<App>),
    Rust(Arc<dyn RustHandler>),
    Pull,
}

/// The result of a search for work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ClaimYield {
    Nothing,
    /// Some jobs, but fewer than the limit.
    Some,
    /// As many jobs as the limit: there are likely more.
    Full,
}

/// The act in the store that follows the part of an attempt outside the store.
enum StoreStep {
    /// The attempt has ended with this outcome.
    Settle(Outcome),
    /// The statements have to run.
    Run(SqlRun),
    /// Nothing: Rust code has committed its effects and "done".
    Committed,
    /// Nothing: the attempt ended without a result, and the next claim decides.
    Lost,
}

/// How an attempt ended, for logs and metrics.
#[derive(Debug)]
enum AttemptEnd {
    Done,
    /// The order rule set it aside.
    Guarded,
    Failed {
        error: String,
        /// The job is a dead letter.
        is_last: bool,
    },
    /// The fence was lost, or the outcome could not be recorded: the next claim decides.
    Lost,
}

impl HandlerWorkers {
    fn new(
        spec: LaneSpec,
        outbound: &Outbound,
        tenants: &SharedTenantVerifiers,
        tally: Arc<SourceTally>,
        before: &[Arc<Self>],
    ) -> Self {
        let LaneSpec { handler: config, source, verifiers } = spec;
        let kind = match &config.kind {
            HandlerKind::Sql(program) => WorkerKind::Sql(program.clone()),
            HandlerKind::Pull => WorkerKind::Pull,
            HandlerKind::Rust(code) => WorkerKind::Rust(code.clone()),
            HandlerKind::Http(target) => {
                let tenants = Arc::clone(tenants);
                let app = App::new(&config, target, verifiers, tenants, outbound.clone());
                WorkerKind::Http(Box::new(app))
            }
        };
        let current =
            config.refetch.clone().map(|refetch| Refetcher::new(refetch, outbound.clone()));
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
            counts: WorkerMetrics::new(&handler),
            tally,
            lines: LogBudget::new(LOG_LINES_PER_SECOND),
            handler,
            config,
            kind,
            current,
        }
    }

    /// Runs until `stop`, and then until running attempts have ended.
    async fn work<S: Work + StoreHints>(
        self: Arc<Self>,
        workers: Arc<Workers<S>>,
        stop: CancellationToken,
    ) {
        while !stop.is_cancelled() {
            let working = async {
                match (&self.kind, &self.current) {
                    (WorkerKind::Sql(program), None) => {
                        self.work_sql(&workers, program, &stop).await
                    }
                    (WorkerKind::Sql(_), Some(_))
                    | (WorkerKind::Http(_) | WorkerKind::Rust(_), _) => {
                        self.work_singly(&workers, &stop).await;
                    }
                    (WorkerKind::Pull, _) => stop.cancelled().await,
                }
            };
            if let Err(panic) = catch_panic(working).await {
                error!(
                    lane = self.name,
                    "the lane {} panicked and was restarted: {panic}", self.name
                );
                stop.run_until_cancelled(sleep(STORE_PAUSE_MAX)).await;
            }
        }
    }
}
