//! The store of the tests of workers: the model in memory with injected faults, and a clock that stands
//! still unless the test moves it.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use hapax_core::job::{HandlerName, JobId, Policy, WorkLocation};
use hapax_core::order::{Position, ResourcePosition};
use hapax_core::store::{
    ClaimAsk, EventDetail, EventId, EventName, HandlerRef, HandlerSpec, Inspect as _, JobDetail,
    JobFilter, Lookup, NewJob, Outcome, Settlement, Store as _, Work as _,
};
use hapax_core::{SourceName, Timestamp};
use hapax_sim::{FaultyStore, SignedEvent};
use hapax_store::MemoryStore;

use crate::support::within;

/// The model in memory, behind faults.
pub(crate) type TestStore = FaultyStore<MemoryStore>;

/// A store, with helpers to fill and read it.
#[derive(Clone)]
pub(crate) struct JobStore {
    pub(crate) faults: Arc<TestStore>,
    clock: Arc<AtomicI64>,
}

/// An event, and the resource that its job is about.
#[derive(Debug, Clone)]
pub(crate) struct NewEvent {
    pub(crate) event: SignedEvent,
    pub(crate) resource: Option<String>,
}

pub(crate) fn event(source: &str, event_id: &str, headers: &str, body: &str) -> NewEvent {
    let mut event = SignedEvent::new(source, event_id, Timestamp::now());
    event.headers = headers.to_owned();
    event.body = body.to_owned();
    NewEvent { event, resource: None }
}

const LOST_LEASE: Duration = Duration::from_secs(30);

impl JobStore {
    pub(crate) fn new() -> Self {
        Self::with(|store| store)
    }

    /// A store with changed hints.
    pub(crate) fn with(change: impl FnOnce(TestStore) -> TestStore) -> Self {
        let clock = Arc::new(AtomicI64::new(Timestamp::now().as_second()));
        let seconds = Arc::clone(&clock);
        let now = move || Timestamp::from_second(seconds.load(Ordering::SeqCst)).unwrap();
        // The statements of every handler return the refetched object.
        let memory = MemoryStore::with_clock(Arc::new(now))
            .with_sql(Arc::new(|_, current| Ok(current.map(str::to_owned))));
        Self { faults: Arc::new(change(FaultyStore::new(memory))), clock }
    }

    pub(crate) fn pass(&self, span: Duration) {
        self.clock.fetch_add(span.as_secs().try_into().unwrap(), Ordering::SeqCst);
    }

    /// Stores an event with one job for `handler`.
    pub(crate) async fn put(&self, handler: &str, new: NewEvent) -> JobId {
        let position = Position(1);
        let place =
            new.resource.map(|resource| ResourcePosition { resource: resource.into(), position });
        let job = NewJob { handler: HandlerName::new(handler), place, hopeless: None };
        let verdicts = self.faults.inner().ingest(new.event.ingest(vec![job])).await.unwrap();
        self.event(verdicts[0].id()).await.jobs[0].id
    }

    /// Stores events whose first attempts were lost with their process. Their jobs become due with
    /// [`JobStore::hurry`]. No worker may run yet: the clock moves past a lease.
    pub(crate) async fn put_lost(&self, handler: &str, events: Vec<NewEvent>) -> Vec<JobId> {
        let of = HandlerRef {
            source: SourceName::new(&events[0].event.source),
            handler: HandlerName::new(handler),
        };
        let spec = HandlerSpec {
            handler: of.clone(),
            policy: Policy { retry: vec![Duration::ZERO], lease: LOST_LEASE },
            order: None,
            workplace: WorkLocation::Inside,
        };
        let store = self.faults.inner();
        store.announce(vec![spec]).await.unwrap();
        let mut jobs = Vec::new();
        for new in events {
            jobs.push(self.put(handler, new).await);
        }
        let claim = |limit| ClaimAsk { handler: of.clone(), limit, worker: "dead".into() };
        assert_eq!(store.claim(claim(jobs.len())).await.unwrap().len(), jobs.len());
        self.pass(LOST_LEASE);
        // A claim ends the expired leases.
        assert!(store.claim(claim(0)).await.unwrap().is_empty());
        for job in &jobs {
            let progress = self.job(*job).await.progress;
            assert_eq!((progress.attempt, progress.steps, progress.lost), (1, 0, 1));
        }
        jobs
    }

    /// Makes the job due now.
    pub(crate) async fn hurry(&self, job: JobId) {
        let event = self.job(job).await.event;
        self.faults.inner().hurry(event).await.unwrap();
    }

    /// Completes a claimed job, as an app does in its own transaction.
    pub(crate) async fn complete(&self, id: JobId) {
        let fence = self.job(id).await.fence;
        let done = Outcome::Done { result: None, publish: Vec::new(), answer: None };
        let settled = self.faults.inner().settle(id, fence, done).await.unwrap();
        assert_eq!(settled, Settlement::Recorded);
    }

    pub(crate) async fn job(&self, id: JobId) -> JobDetail {
        self.faults.inner().job(id).await.unwrap().expect("the job is stored")
    }

    /// Every job of the store.
    pub(crate) async fn all(&self) -> Vec<JobDetail> {
        let every = JobFilter { limit: usize::MAX, ..JobFilter::default() };
        let page = self.faults.inner().jobs(every).await.unwrap();
        assert!(page.next.is_none(), "more jobs than one page holds");
        page.items
    }

    pub(crate) async fn event(&self, id: EventId) -> EventDetail {
        match self.faults.inner().event(&EventName::Ours(id)).await.unwrap() {
            Lookup::One(detail) => detail,
            other => panic!("the event is stored once: {other:?}"),
        }
    }

    /// Waits until the job is in the wanted state.
    pub(crate) async fn until(&self, id: JobId, wanted: impl Fn(&JobDetail) -> bool) -> JobDetail {
        within(async {
            loop {
                let changed = self.faults.changed();
                let job = self.job(id).await;
                if wanted(&job) {
                    return job;
                }
                changed.await;
            }
        })
        .await
    }
}
