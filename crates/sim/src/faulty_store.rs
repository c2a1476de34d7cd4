//! A store with injected faults: any store of Hapax, whose calls a test counts, fails and blocks.
//!
//! Faults are planned per [`Act`]. A call that fails does not reach the store behind. A blocked call waits
//! for a permit before it reaches the store, or after the store has done it and before it returns.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::ops::{Range, RangeInclusive};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use hapax_core::EventKey;
use hapax_core::alert_board::{AlertReport, AlertsNoted, StoredAlert};
use hapax_core::delivery::DeliveryId;
use hapax_core::endpoint::{EndpointAct, EndpointChanged, EndpointId, EndpointRecord, NewEndpoint};
use hapax_core::job::{Fence, HandlerName, JobId};
use hapax_core::ledger::{Ledger, Reservation, ReserveAsk, Reserved, StoredAnswer};
use hapax_core::search::SearchFields;
use hapax_core::store::*;
use hapax_core::{KeyHash, SourceName, Tenant, Timestamp};
use tokio::sync::{Notify, Semaphore};
use uuid::Uuid;

/// The error of planned failures for which the test gives no error.
pub const PLANNED: &str = "planned by the test";

/// A store whose calls are counted, and fail or wait as the test plans.
pub struct FaultyStore<S> {
    inner: S,
    calls: Mutex<HashMap<Act, Calls>>,
    changed: Notify,
    sql_batches_max: Option<usize>,
    foreground_requests: Option<ForegroundRequests<S>>,
}

/// Answers [`StoreHints::foreground_requests`] instead of the store behind.
type ForegroundRequests<S> = Box<dyn Fn(&FaultyStore<S>) -> Option<u64> + Send + Sync>;

/// The calls of one act so far, and the plan for further ones.
#[derive(Default)]
struct Calls {
    begun: usize,
    ended: usize,
    arguments: Vec<String>,
    /// The calls that fail, by their numbers, counted from 0, and their error.
    failures: Vec<(Range<usize>, StoreError)>,
    before: Option<Arc<Semaphore>>,
    after: Option<Arc<Semaphore>>,
}

/// The plan for one call.
struct InjectedFault {
    error: Option<StoreError>,
    before: Option<Arc<Semaphore>>,
    after: Option<Arc<Semaphore>>,
}

impl<S> FaultyStore<S> {
    /// Plans no fault yet.
    pub fn new(inner: S) -> Self {
        Self {
            inner,
            calls: Mutex::default(),
            changed: Notify::new(),
            sql_batches_max: None,
            foreground_requests: None,
        }
    }

    /// Answers the hint [`StoreHints::sql_batches_max`] with `most`.
    pub fn with_sql_batches_max(self, most: usize) -> Self {
        Self { sql_batches_max: Some(most), ..self }
    }

    /// Answers the hint [`StoreHints::foreground_requests`] with `hint`.
    pub fn with_foreground_requests(
        self,
        hint: impl Fn(&Self) -> Option<u64> + Send + Sync + 'static,
    ) -> Self {
        Self { foreground_requests: Some(Box::new(hint)), ..self }
    }

    /// The store behind. Its calls are neither counted nor disturbed.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    /// The next `count` calls of `act` fail.
    pub fn fail_next(&self, act: Act, count: usize) {
        self.plan(act, |calls| {
            let error = StoreError::Unavailable(PLANNED.into());
            calls.failures.push((calls.begun..calls.begun.saturating_add(count), error));
        });
    }

    /// Makes every call of `act` fail with `error`, until [`FaultyStore::heal`].
    pub fn fail(&self, act: Act, error: StoreError) {
        self.plan(act, |calls| calls.failures.push((calls.begun..usize::MAX, error)));
    }

    /// Calls of `act` wait for a permit before they reach the store.
    pub fn block(&self, act: Act) -> Arc<Semaphore> {
        let permits = Arc::new(Semaphore::new(0));
        self.plan(act, |calls| calls.before = Some(Arc::clone(&permits)));
        permits
    }

    /// Calls of `act` reach the store at once, and wait for a permit before they return.
    pub fn block_answers(&self, act: Act) -> Arc<Semaphore> {
        let permits = Arc::new(Semaphore::new(0));
        self.plan(act, |calls| calls.after = Some(Arc::clone(&permits)));
        permits
    }

    /// Further calls of `act` neither fail nor wait.
    pub fn heal(&self, act: Act) {
        self.plan(act, |calls| {
            calls.failures.clear();
            (calls.before, calls.after) = (None, None);
        });
    }

    /// How many calls of `act` have begun.
    pub fn begun(&self, act: Act) -> usize {
        self.calls().get(&act).map_or(0, |calls| calls.begun)
    }

    /// How many calls of `act` the store has done or the plan has failed.
    pub fn ended(&self, act: Act) -> usize {
        self.calls().get(&act).map_or(0, |calls| calls.ended)
    }

    /// The arguments of each call of `act`, in order, as [`fmt::Debug`] prints their tuple.
    pub fn arguments(&self, act: Act) -> Vec<String> {
        self.calls().get(&act).map_or_else(Vec::new, |calls| calls.arguments.clone())
    }

    /// A future that ends when the next call of any act begins or ends. The future counts calls from its
    /// creation on, not from its first poll.
    pub fn changed(&self) -> impl Future<Output = ()> {
        self.changed.notified()
    }

    /// Waits until `condition` holds. The condition is checked whenever a call begins or ends.
    pub async fn until(&self, condition: impl Fn(&Self) -> bool) {
        loop {
            let changed = self.changed();
            if condition(self) {
                return;
            }
            changed.await;
        }
    }

    fn calls(&self) -> MutexGuard<'_, HashMap<Act, Calls>> {
        self.calls.lock().expect("no panic happens under this lock")
    }

    fn plan(&self, act: Act, change: impl FnOnce(&mut Calls)) {
        change(self.calls().entry(act).or_default());
    }

    fn begin(&self, act: Act, arguments: String) -> InjectedFault {
        let mut calls = self.calls();
        let calls = calls.entry(act).or_default();
        let planned = calls.failures.iter().find(|(numbers, _)| numbers.contains(&calls.begun));
        let error = planned.map(|(_, error)| error.clone());
        calls.begun += 1;
        calls.arguments.push(arguments);
        self.changed.notify_waiters();
        InjectedFault { error, before: calls.before.clone(), after: calls.after.clone() }
    }

    fn end(&self, act: Act) {
        self.plan(act, |calls| calls.ended += 1);
        self.changed.notify_waiters();
    }

    /// One call: counted, and failed or blocked as planned.
    async fn pass<T, F: Future<Output = Result<T, StoreError>>>(
        &self,
        act: Act,
        arguments: String,
        call: impl FnOnce() -> F,
    ) -> Result<T, StoreError> {
        let plan = self.begin(act, arguments);
        wait_for(plan.before).await;
        let answer = match plan.error {
            Some(error) => Err(error),
            None => call().await,
        };
        self.end(act);
        wait_for(plan.after).await;
        answer
    }
}

async fn wait_for(permits: Option<Arc<Semaphore>>) {
    if let Some(permits) = permits {
        permits.acquire().await.expect("the semaphore is never closed").forget();
    }
}

impl<S> fmt::Debug for FaultyStore<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultyStore").finish_non_exhaustive()
    }
}

/// Declares [`Act`], and passes each act on to the store behind. The methods that cannot fail
/// follow a `+` in each trait: they are passed on and not counted.
macro_rules! acts {
    ($($Trait:ident {
        $($Act:ident: $method:ident($($argument:ident: $Argument:ty),*) -> $Answer:ty;)*
        $(+ { $($also:tt)* })?
    })*) => {
        /// A method of a store that can fail.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Act {
            $($(
                #[doc = concat!("`", stringify!($Trait), "::", stringify!($method), "`")]
                $Act,
            )*)*
        }

        $(impl<S: $Trait> $Trait for FaultyStore<S> {
            $(async fn $method(&self, $($argument: $Argument),*) -> Result<$Answer, StoreError> {
                let arguments = format!("{:?}", ($(&$argument,)*));
                self.pass(Act::$Act, arguments, || self.inner.$method($($argument),*)).await
            })*
            $($($also)*)?
        })*
    };
}

acts! {
    Store {
        Ingest: ingest(ingest: hapax_core::store::Ingest) -> Vec<Verdict>;
        + {
            fn writable(&self) -> Result<(), StoreError> {
                self.inner.writable()
            }
        }
    }
    StoreHints {
        Knows: knows(key: &EventKey) -> bool;
        + {
            fn sql_batches_max(&self) -> usize {
                self.sql_batches_max.unwrap_or_else(|| self.inner.sql_batches_max())
            }

            fn foreground_requests(&self) -> Option<u64> {
                match &self.foreground_requests {
                    Some(hint) => hint(self),
                    None => self.inner.foreground_requests(),
                }
            }
        }
    }
    Work {
        Announce: announce(handlers: Vec<HandlerSpec>) -> ();
        Claim: claim(ask: ClaimAsk) -> Vec<hapax_core::store::Claim>;
        Renew: renew(job: JobId, fence: Fence, lease: Duration) -> Held;
        Settle: settle(job: JobId, fence: Fence, outcome: Outcome) -> Settlement;
        GiveBack: give_back(claims: Vec<(JobId, Fence)>) -> ();
        RunSql: run_sql(ask: SqlAsk) -> SqlRan;
        RunClaimed: run_claimed(run: SqlRun) -> Ran;
        Hurry: hurry(event: EventId) -> ();
        Prune: prune(horizon: Horizon, limit: usize) -> bool;
        + {
            fn wait(
                &self,
                handler: &HandlerRef,
                span: RangeInclusive<Duration>,
            ) -> impl Future<Output = Wake> + Send {
                self.inner.wait(handler, span)
            }
        }
    }
    Operate {
        Replay: replay(ask: ReplayAsk) -> Vec<Replayed>;
        Approve: approve(event: EventId, jobs: Vec<NewJob>, by: Action) -> Reviewed;
        Reject: reject(event: EventId, by: Action) -> Reviewed;
        Discard: discard(event: EventId, handler: Option<HandlerName>, by: Action) -> Reviewed;
        PauseHandler: pause_handler(handler: HandlerRef, by: Action) -> PauseAnswer;
        ResumeHandler: resume_handler(handler: HandlerRef, by: Action) -> PauseAnswer;
    }
    Inspect {
        ListEvents: events(filter: EventFilter) -> Page<EventSummary>;
        FindEvent: event(name: &EventName) -> Lookup<EventDetail>;
        TracedEvents: events_traced_by(id: &str) -> Vec<EventId>;
        ListJobs: jobs(filter: JobFilter) -> Page<JobDetail>;
        DeadGroups: dead_groups(filter: JobFilter) -> hapax_core::store::DeadGroups;
        FindJob: job(id: JobId) -> Option<JobDetail>;
        Lanes: lanes() -> Vec<LaneState>;
        PausedHandlers: paused_handlers() -> Vec<PausedHandler>;
        InReview: in_review() -> Vec<(SourceName, u64)>;
        Sample: sample(ask: SampleAsk) -> hapax_core::store::EventSample;
        Storage: storage() -> StorageUse;
        + {
            fn flush_copies(&self) -> impl Future<Output = ()> + Send {
                self.inner.flush_copies()
            }
        }
    }
    SearchIndex {
        IndexValues: index_values(fields: Arc<SearchFields>, limit: usize) -> bool;
        CountEventsWith: count_events_with(value: KeyHash, most: usize) -> usize;
    }
    Outbox {
        Publish: publish(message: NewMessage) -> Published;
        Exchange: exchange(outcomes: Vec<AttemptOutcome>, ask: DeliveryAsk) -> Exchanged;
        CreateEndpoint: create_endpoint(endpoint: NewEndpoint, by: Action) -> EndpointChanged;
        ChangeEndpoint: change_endpoint(id: EndpointId, act: EndpointAct, by: Action) -> EndpointChanged;
        ReplayDelivery: replay_delivery(delivery: DeliveryId, by: Action) -> DeliveryReplayed;
        SkipDelivery: skip_delivery(delivery: DeliveryId, by: Action) -> DeliverySkipped;
        ChangeMessage: change_message(message: MessageRef, act: MessageAct, by: Action)
            -> Option<Vec<DeliveryId>>;
        CancelOrphans: cancel_orphans(limit: usize) -> bool;
        + {
            fn exchanges_at_once(&self) -> usize {
                self.inner.exchanges_at_once()
            }

            fn operator_acts(&self) -> u64 {
                self.inner.operator_acts()
            }

            fn wait_for_deliveries(&self, at_most: Duration) -> impl Future<Output = ()> + Send {
                self.inner.wait_for_deliveries(at_most)
            }
        }
    }
    InspectOutbox {
        ListEndpoints: endpoints(filter: EndpointFilter) -> Page<EndpointRecord>;
        FindEndpoint: endpoint(id: EndpointId) -> Option<EndpointRecord>;
        ListMessages: messages(filter: MessageFilter) -> Page<MessageSummary>;
        FindMessage: message(id: &str, tenant: Option<Tenant>) -> Vec<MessageDetail>;
        ListDeliveries: deliveries(filter: DeliveryFilter) -> Page<DeliveryDetail>;
        FindDelivery: delivery(id: DeliveryId) -> Option<DeliveryDetail>;
        DeliveryBacklog: delivery_backlog() -> hapax_core::store::DeliveryBacklog;
    }
    OutboxRetention {
        ExpireDeliveries: expire_deliveries(ask: ExpiryAsk) -> Expiry;
    }
    OwnMessages {
        PublishDeaths: publish_deaths(limit: usize) -> bool;
    }
    AlertRecords {
        CheckIn: check_in(node: hapax_core::store::CheckIn) -> CheckedIn;
        CheckOut: check_out(node: Uuid) -> ();
        ListNodes: nodes() -> Vec<NodeRecord>;
        NoteAlerts: note_alerts(report: AlertReport) -> AlertsNoted;
        ListAlerts: alerts() -> Vec<StoredAlert>;
        SilenceAlert: silence_alert(ask: SilenceAsk) -> Option<StoredAlert>;
    }
    Plans {
        CountPlan: count_plan(work: PlanWork) -> PlanCount;
        CreatePlan: create_plan(plan: NewPlan, by: Action) -> PlanCreated;
        RunPlan: run_plan(limit: usize, except: Vec<PlanId>) -> PlanRun;
        TakeSlice: take_slice(slice: EventSlice) -> Held;
        CancelPlan: cancel_plan(id: PlanId, by: Action) -> Option<hapax_core::store::Plan>;
        FindPlan: plan(id: PlanId) -> Option<hapax_core::store::Plan>;
        ListPlans: plans(limit: usize) -> Vec<hapax_core::store::Plan>;
    }
    TenantDeletions {
        DeleteTenant: delete_tenant(tenant: Tenant, by: Action) -> TenantDeletion;
        Erase: erase(limit: usize) -> bool;
        FindTenantDeletion: tenant_deletion(tenant: Tenant) -> Option<hapax_core::store::TenantDeletion>;
    }
    SourceSecretStore {
        SourceSecrets: source_secrets() -> SourceSecretSet;
        SourceSecretsVersion: source_secrets_version() -> u64;
        ChangeSourceSecrets: change_source_secrets(change: SourceSecretsChange, by: Action)
            -> SourceSecretsChanged;
    }
    Ledger {
        Reserve: reserve(ask: ReserveAsk) -> Reservation;
        Finish: finish(reserved: &Reserved, answer: &StoredAnswer) -> Held;
        Abandon: abandon(reserved: &Reserved) -> ();
    }
    RejectionRecords {
        RecordRejections: record_rejections(rejections: Vec<Rejection>) -> ();
        ListRejections: rejections(source: &SourceName) -> Vec<Rejection>;
    }
    VerifierNames {
        NameVerifiers: name_verifiers(verifiers: Vec<Verifier>) -> ();
        NoteSecrets: note_secrets(uses: Vec<SecretUse>) -> ();
        SecretsOf: secrets_of(source: &SourceName, limit: usize) -> Vec<SecretRecord>;
    }
    TrafficHistory {
        RecordTraffic: record_traffic(node: Uuid, counts: Vec<TrafficCount>) -> ();
        TakeCompletions: take_completions(limit: usize) -> Vec<Completion>;
        TrafficBySource: traffic_by_source(ask: TrafficAsk) -> Vec<TrafficCount>;
    }
    EndpointHistory {
        RecordEndpoints: record_endpoints(node: Uuid, counts: Vec<EndpointHour>) -> ();
        EndpointHours: endpoint_hours(endpoints: Vec<EndpointId>, from: Timestamp) -> Vec<EndpointHour>;
    }
    KeyRecords {
        ListKeys: keys(filter: KeyFilter) -> KeyPage;
        DeleteKey: delete_key(name: KeyPosition) -> KeyDeleted;
    }
    AdminRecords {
        OpenSession: open_session(session: Session) -> ();
        FindSession: session(hash: [u8; 32]) -> Option<Session>;
        EndSession: end_session(hash: [u8; 32]) -> ();
        Audit: audit(entries: Vec<AuditEntry>) -> ();
        Audited: audited(filter: AuditFilter) -> Page<AuditEntry>;
    }
    PortalLinks {
        CreatePortalLink: create_portal_link(link: PortalLink, code: [u8; 32]) -> ();
        FindPortalLink: portal_link(code: [u8; 32]) -> Option<PortalLink>;
        EnterPortal: enter_portal(code: [u8; 32], session: [u8; 32], at: Timestamp) -> Option<PortalLink>;
        FindPortalSession: portal_session(link: PortalLinkId, session: [u8; 32]) -> Option<PortalLink>;
        ListPortalLinks: portal_links(tenant: Option<Tenant>, at: Timestamp, limit: usize) -> Vec<PortalLink>;
        EndPortalLink: end_portal_link(link: PortalLinkId) -> ();
        RevokePortalLinks: revoke_portal_links(tenant: Tenant) -> u64;
        TakePortalPing: take_portal_ping(tenant: Tenant, at: Timestamp) -> bool;
    }
}
