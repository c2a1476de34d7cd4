//! The readable model of a store: the behaviour of the others, without a disk. The model forgets everything
//! when dropped, so it is for tests and for reading.
//!
//! One lock stands for the transaction: everything that happens while it is held is one commit.
//! Start with [`ingest`] (how events are stored), then [`work`] (the life of their jobs), then
//! [`order`] (which job may run now), [`operator_actions`] (decisions of operators) and [`reader`]
//! (queries). [`outbox`] sends messages to endpoints, [`outbox_reader`] has its queries,
//! [`outbox_expire`] ends old deliveries, and [`plans`] run acts on many deliveries or events.
//! [`ledger`] and [`source_secrets`] are independent: the Idempotency-Keys of a user's API, and the
//! secrets of tenants.

mod admin_records;
mod alert_records;
mod circuit;
mod endpoint_history;
mod ingest;
mod ledger;
mod operator_actions;
mod order;
mod outbox;
mod outbox_expire;
mod outbox_reader;
mod own_messages;
mod plans;
mod portal_links;
mod reader;
mod rejections;
mod search_index;
mod source_secrets;
mod tenant_deletion;
mod traffic_history;
mod verifiers;
mod work;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use hapax_core::job::{Fence, HandlerName, JobId, Phase, Policy, Progress, Retry};
use hapax_core::order::{Position, ResourcePosition};
use hapax_core::store::{
    Action, AttemptNote, AuditEntry, Claim, ClaimAsk, DeadGroups, EventDetail, EventFilter,
    EventId, EventName, EventSample, EventSummary, HandlerRef, HandlerSpec, Held, Horizon, Ingest,
    Inspect, JobDetail, JobFilter, JobScope, LaneState, Lookup, NewJob, Operate, Outcome, Page,
    PauseAnswer, PausedHandler, Ran, Rejection, ReplayAsk, Replayed, Reviewed, SampleAsk,
    SecretRecord, Session, Settlement, SqlAsk, SqlRan, SqlRun, StorageUse, Store, StoreError,
    StoreHints, TriedJob, TriedVerdict, Verdict, Verifier, Wake, Work,
};
use hapax_core::{EventKey, KeyHash, SourceName, Tenant, Timestamp};
use tokio::sync::Notify;

use crate::Clock;
use crate::operator_acts::OperatorActs;
use crate::wait::{NextDue, wait};
use order::Resource;
use outbox::{
    Delivery, DeliveryNumber, EndpointNumber, MessageNumber, StoredEndpoint, StoredMessage,
};

/// Stands in for the statements of an `sql` handler, given the claim and the current object.
type Effect = Arc<dyn Fn(&Claim, Option<&str>) -> Result<Option<String>, String> + Send + Sync>;

/// Events and their jobs, in memory.
pub struct MemoryStore {
    model: Mutex<Model>,
    clock: Clock,
    effect: Effect,
    arrived: Notify,
    deliveries_due: Notify,
    operator_acts: OperatorActs,
}

impl MemoryStore {
    /// An empty store that uses this machine's clock.
    pub fn new() -> Self {
        Self::with_clock(Arc::new(Timestamp::now))
    }

    /// An empty store that uses `clock` for leases and due times.
    pub fn with_clock(clock: Clock) -> Self {
        Self {
            model: Mutex::default(),
            clock,
            effect: Arc::new(|_, _| Ok(None)),
            arrived: Notify::new(),
            deliveries_due: Notify::new(),
            operator_acts: OperatorActs::default(),
        }
    }

    /// Lets `effect` stand in for the statements of every `sql` handler, since there is no SQL
    /// here. `effect` returns the job's result, or why the attempt failed.
    pub fn with_sql(self, effect: Effect) -> Self {
        Self { effect, ..self }
    }

    async fn run_one(&self, claim: &Claim, current: Option<&str>) -> Result<Ran, StoreError> {
        let (outcome, ran) = match (self.effect)(claim, current) {
            Ok(result) => (Outcome::Done { result, publish: Vec::new(), answer: None }, Ran::Done),
            Err(error) => {
                let retry = Retry::Schedule;
                let failed = Outcome::Failed { error: error.clone(), retry, answer: None };
                (failed, Ran::Failed(error))
            }
        };
        Ok(match self.settle(claim.job, claim.fence, outcome).await? {
            Settlement::Recorded => ran,
            Settlement::AlreadyDone => Ran::Done,
            Settlement::Lost => Ran::Lost,
        })
    }

    fn model(&self) -> MutexGuard<'_, Model> {
        self.model.lock().expect("no panic happens under this lock")
    }

    fn now(&self) -> Timestamp {
        (self.clock)()
    }

    /// Notifies waiting workers.
    fn hint(&self) {
        self.arrived.notify_waiters();
    }

    /// Notifies waiting senders, and the next one to wait.
    fn hint_deliveries(&self) {
        self.deliveries_due.notify_waiters();
        self.deliveries_due.notify_one();
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore").field("model", &self.model).finish_non_exhaustive()
    }
}

/// All data, numbered in the order of arrival.
#[derive(Debug, Default)]
struct Model {
    events: BTreeMap<EventNumber, Stored>,
    keys: HashMap<EventKey, EventNumber>,
    guards: HashMap<KeyHash, GuardRecord>,
    events_ever: u64,
    jobs: BTreeMap<JobNumber, Job>,
    jobs_ever: u64,
    handlers: HashMap<HandlerRef, HandlerSpec>,
    /// The handlers that are paused.
    paused: HashMap<HandlerRef, PausedHandler>,
    /// The tenant that each handler's last claim began with.
    turns: HashMap<HandlerRef, Tenant>,
    /// The mark of each resource: the last position that was applied, and when the mark last moved.
    marks: HashMap<Resource, (Position, Timestamp)>,
    /// The first position of each sequence without a configured start.
    starts: HashMap<Resource, Position>,
    /// The outbox.
    messages: BTreeMap<MessageNumber, StoredMessage>,
    messages_ever: u64,
    /// The last number of each order key. No number is given twice.
    sequences: HashMap<(Tenant, String), u64>,
    deliveries: BTreeMap<DeliveryNumber, Delivery>,
    deliveries_ever: u64,
    /// The last place that was given to a delivery under any key.
    places_ever: u64,
    endpoints: BTreeMap<EndpointNumber, StoredEndpoint>,
    endpoints_ever: u64,
    /// When each endpoint was last served, as a number of claims.
    endpoint_turns: HashMap<EndpointNumber, u64>,
    turns_ever: u64,
    /// When the expiry of an endpoint's deliveries was announced.
    expiry_announced: HashMap<EndpointNumber, Timestamp>,
    /// Dead deliveries of each endpoint that are not published yet.
    deaths: BTreeMap<EndpointNumber, own_messages::Deaths>,
    /// The alerts that nodes reported.
    alerts: alert_records::Alerts,
    /// The plans of operators, oldest first.
    plans: Vec<plans::StoredPlan>,
    /// The secrets of tenants that are added at run time.
    source_secrets: source_secrets::StoredSourceSecrets,
    /// Deletions of tenants, under way or over.
    deletions: BTreeMap<Tenant, tenant_deletion::Deletion>,
    /// Idempotency-Keys.
    reservations: HashMap<ledger::KeyName, ledger::ReservedKey>,
    /// The number of fences given to keys so far.
    fences_ever: i64,
    /// Sessions of the dashboard, by hash.
    sessions: HashMap<[u8; 32], Session>,
    /// Links to the portal.
    portal: portal_links::StoredLinks,
    /// The names of verifiers, by number.
    verifiers: HashMap<usize, Verifier>,
    /// The secrets of each source.
    secrets: BTreeMap<(SourceName, Tenant, Verifier), SecretRecord>,
    /// The search index.
    search_index: search_index::IndexedValues,
    /// The last rejections of each source, oldest first.
    rejections: HashMap<SourceName, Vec<Rejection>>,
    /// The audit trail, oldest first.
    audit: Vec<AuditEntry>,
    /// The figures of endpoints by the hour.
    endpoint_hours: endpoint_history::EndpointHours,
    /// The history of traffic.
    traffic: traffic_history::Counts,
}

/// Signed content that was seen, and the event that it belongs to.
#[derive(Debug, Clone, Copy)]
struct GuardRecord {
    event: EventNumber,
    /// Until when the content must be known; `None`: as long as the event's key.
    until: Option<Timestamp>,
}

type EventNumber = u64;
type JobNumber = u64;

#[derive(Debug)]
struct Stored {
    key: EventKey,
    detail: EventDetail,
    body_hash: KeyHash,
    review_state: ReviewState,
    /// Whether the body and the history are pruned. Then only the key is still known.
    gone: bool,
}

/// The state of an event's review.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReviewState {
    Review,
    Discarded,
    /// No review was needed, or it was approved: its jobs determine the status.
    Ours,
}

#[derive(Debug)]
struct Job {
    id: JobId,
    event: EventNumber,
    tenant: Tenant,
    handler: HandlerRef,
    place: Option<ResourcePosition>,
    phase: Phase,
    run: u32,
    progress: Progress,
    /// The attempts of this run before the last replay, without the loss that the replay kept.
    earlier_attempts: u32,
    fence: Fence,
    due: Timestamp,
    /// The last claim. The store keeps the claim after its lease, because the worker may still
    /// report.
    taken: Option<JobLease>,
    /// Whether an operator lets this run go ahead, whatever the order rule decides.
    forced: bool,
    result: Option<String>,
    error: Option<String>,
    finished_at: Option<Timestamp>,
    attempts: Vec<AttemptNote>,
}

#[derive(Debug, Clone)]
struct JobLease {
    worker: Arc<str>,
    at: Timestamp,
    until: Timestamp,
    policy: Policy,
}

impl Store for MemoryStore {
    async fn ingest(&self, ingest: Ingest) -> Result<Vec<Verdict>, StoreError> {
        let verdicts = self.model().ingest(&ingest, self.now());
        self.hint();
        Ok(verdicts)
    }

    fn writable(&self) -> Result<(), StoreError> {
        Ok(())
    }
}

impl StoreHints for MemoryStore {
    async fn knows(&self, key: &EventKey) -> Result<bool, StoreError> {
        Ok(self.model().keys.contains_key(key))
    }
}

impl Work for MemoryStore {
    async fn announce(&self, handlers: Vec<HandlerSpec>) -> Result<(), StoreError> {
        let by_name = |spec: HandlerSpec| (spec.handler.clone(), spec);
        self.model().handlers = handlers.into_iter().map(by_name).collect();
        self.hint();
        Ok(())
    }

    async fn claim(&self, ask: ClaimAsk) -> Result<Vec<Claim>, StoreError> {
        Ok(self.model().claim(&ask, self.now()).claims)
    }

    async fn renew(&self, job: JobId, fence: Fence, lease: Duration) -> Result<Held, StoreError> {
        Ok(self.model().renew(job, fence, lease, self.now()))
    }

    async fn settle(
        &self,
        job: JobId,
        fence: Fence,
        outcome: Outcome,
    ) -> Result<Settlement, StoreError> {
        let settlement = self.model().settle(job, fence, outcome, self.now());
        self.hint();
        self.hint_deliveries();
        Ok(settlement)
    }

    async fn give_back(&self, claims: Vec<(JobId, Fence)>) -> Result<(), StoreError> {
        let mut model = self.model();
        for (job, fence) in claims {
            model.give_back(job, fence, self.now());
        }
        self.hint();
        Ok(())
    }

    async fn run_sql(&self, ask: SqlAsk) -> Result<SqlRan, StoreError> {
        let begun = self.model().claim(&ask.claim, self.now());
        let guarded = begun.guarded.len();
        let mut ran = SqlRan { guarded, events: begun.guarded, ..SqlRan::default() };
        if let [claim] = &begun.claims[..]
            && claim.alone
        {
            ran.alone = Some(Box::new(claim.clone()));
            return Ok(ran);
        }
        for claim in begun.claims {
            match self.run_one(&claim, None).await? {
                Ran::Done => {
                    ran.done += 1;
                    ran.tried.push(TriedJob::of(&claim, TriedVerdict::Succeeded));
                }
                Ran::Failed(_) => {
                    ran.failed += 1;
                    let verdict = self.model().verdict_of_failure(claim.job);
                    ran.tried.push(TriedJob::of(&claim, verdict));
                }
                Ran::Guarded | Ran::Lost => continue,
            }
            ran.events.push(claim.event.id);
        }
        Ok(ran)
    }

    async fn run_claimed(&self, run: SqlRun) -> Result<Ran, StoreError> {
        let begun = self.model().begin_claimed(run.job, run.fence, self.now());
        self.hint();
        match begun {
            Ok(claim) => self.run_one(&claim, run.current.as_deref()).await,
            Err(ran) => Ok(ran),
        }
    }

    async fn hurry(&self, event: EventId) -> Result<(), StoreError> {
        let mut model = self.model();
        if let Some(at) = model.event_numbered(event) {
            model.hurry(at, self.now());
        }
        self.hint();
        Ok(())
    }

    fn wait(
        &self,
        handler: &HandlerRef,
        span: RangeInclusive<Duration>,
    ) -> impl Future<Output = Wake> + Send {
        let arrived = self.arrived.notified();
        let next = async move {
            let due = self.model().next_due(handler);
            Ok::<_, StoreError>(NextDue { due, now: self.now() })
        };
        wait(arrived, next, span)
    }

    async fn prune(&self, horizon: Horizon, limit: usize) -> Result<bool, StoreError> {
        let now = self.now();
        let mut model = self.model();
        model.reservations.retain(|_, kept| !kept.is_past(now));
        Ok(model.prune(&horizon, limit, now))
    }
}

impl Operate for MemoryStore {
    async fn replay(&self, ask: ReplayAsk) -> Result<Vec<Replayed>, StoreError> {
        let replayed = self.model().replay(ask, JobScope::ALL, self.now());
        self.hint();
        Ok(replayed)
    }

    async fn approve(
        &self,
        event: EventId,
        jobs: Vec<NewJob>,
        by: Action,
    ) -> Result<Reviewed, StoreError> {
        let reviewed = self.model().approve(event, &jobs, JobScope::ALL, by, self.now());
        self.hint();
        Ok(reviewed)
    }

    async fn reject(&self, event: EventId, by: Action) -> Result<Reviewed, StoreError> {
        let reviewed = self.model().reject(event, JobScope::ALL, by, self.now());
        self.hint();
        Ok(reviewed)
    }

    async fn discard(
        &self,
        event: EventId,
        handler: Option<HandlerName>,
        by: Action,
    ) -> Result<Reviewed, StoreError> {
        Ok(self.model().discard(event, handler.as_ref(), JobScope::ALL, by, self.now()))
    }

    async fn pause_handler(
        &self,
        handler: HandlerRef,
        by: Action,
    ) -> Result<PauseAnswer, StoreError> {
        Ok(self.model().pause(handler, by))
    }

    async fn resume_handler(
        &self,
        handler: HandlerRef,
        _by: Action,
    ) -> Result<PauseAnswer, StoreError> {
        let answer = self.model().resume(&handler);
        self.hint();
        Ok(answer)
    }
}

impl Inspect for MemoryStore {
    async fn events(&self, filter: EventFilter) -> Result<Page<EventSummary>, StoreError> {
        Ok(self.model().list_events(&filter))
    }

    async fn event(&self, name: &EventName) -> Result<Lookup<EventDetail>, StoreError> {
        Ok(self.model().find_event(name))
    }

    async fn events_traced_by(&self, id: &str) -> Result<Vec<EventId>, StoreError> {
        Ok(self.model().traced_by(id))
    }

    async fn jobs(&self, filter: JobFilter) -> Result<Page<JobDetail>, StoreError> {
        Ok(self.model().list_jobs(&filter))
    }

    async fn dead_groups(&self, filter: JobFilter) -> Result<DeadGroups, StoreError> {
        Ok(self.model().dead_groups(&filter))
    }

    async fn job(&self, id: JobId) -> Result<Option<JobDetail>, StoreError> {
        let model = self.model();
        Ok(model.numbered(id).map(|at| model.job_detail(&model.jobs[&at])))
    }

    async fn lanes(&self) -> Result<Vec<LaneState>, StoreError> {
        Ok(self.model().lanes())
    }

    async fn paused_handlers(&self) -> Result<Vec<PausedHandler>, StoreError> {
        let mut paused: Vec<_> = self.model().paused.values().cloned().collect();
        let name = |one: &PausedHandler| (one.handler.source.clone(), one.handler.handler.clone());
        paused.sort_by_key(name);
        Ok(paused)
    }

    async fn in_review(&self) -> Result<Vec<(SourceName, u64)>, StoreError> {
        Ok(self.model().events_in_review())
    }

    async fn sample(&self, ask: SampleAsk) -> Result<EventSample, StoreError> {
        Ok(self.model().sample(&ask))
    }

    /// The model has no disk.
    async fn storage(&self) -> Result<StorageUse, StoreError> {
        Ok(StorageUse::default())
    }
}

impl Model {
    fn numbered(&self, job: JobId) -> Option<JobNumber> {
        self.jobs.iter().find(|(_, one)| one.id == job).map(|(at, _)| *at)
    }

    fn event_numbered(&self, event: EventId) -> Option<EventNumber> {
        let is_it = |stored: &Stored| stored.detail.summary.id == event && !stored.gone;
        self.events.iter().find(|(_, stored)| is_it(stored)).map(|(at, _)| *at)
    }

    fn jobs_of(&self, event: EventNumber) -> impl Iterator<Item = &Job> {
        self.jobs.values().filter(move |job| job.event == event)
    }

    fn job_for(&self, event: EventNumber, handler: &HandlerName) -> Option<JobNumber> {
        let is_it = |job: &Job| job.event == event && job.handler.handler == *handler;
        self.jobs.iter().find(|(_, job)| is_it(job)).map(|(at, _)| *at)
    }
}
