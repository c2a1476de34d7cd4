//! The smallest store with the guarantees that the workers rely on. A test can observe it, block it
//! and make it fail.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::job::{
    AfterFailure, Fence, HandlerName, JobId, Phase, Progress, Workplace, idempotency_key,
};
use hapax_core::store::{
    Claim, ClaimAsk, ClaimedEvent, EventDetail, EventFilter, EventId, EventName, EventSummary,
    HandlerRef, HandlerSpec, Held, Horizon, Ingest, Inspect, JobDetail, JobFilter, KnownEvent,
    LaneState, Lookup, NewMessage, Outcome, Page, Ran, Sample, SampleAsk, Settlement, SqlAsk,
    SqlRan, SqlRun, Status, Store, StoreError, StoreHints, Verdict, Wake, Work,
};
use hapax_core::{EventKey, SourceName, Tenant, Timestamp};
use tokio::sync::{Notify, Semaphore};
use uuid::Uuid;

use crate::support::within;

/// A job in this store.
#[derive(Debug, Clone)]
pub(crate) struct Piece {
    pub(crate) id: JobId,
    pub(crate) handler: HandlerName,
    pub(crate) event: ClaimedEvent,
    pub(crate) phase: Phase,
    pub(crate) progress: Progress,
    pub(crate) fence: Fence,
    pub(crate) due: Timestamp,
    pub(crate) result: Option<String>,
    pub(crate) error: Option<String>,
    pub(crate) published: Vec<NewMessage>,
    pub(crate) workers: Vec<Arc<str>>,
}

/// The store.
pub(crate) struct Bench {
    pieces: Mutex<Vec<Piece>>,
    specs: Mutex<HashMap<HandlerRef, HandlerSpec>>,
    changed: Notify,
    arrived: Notify,
    /// One permit lets one claim return.
    pub(crate) claims: Semaphore,
    /// One permit for each claim that was requested.
    pub(crate) asked: Semaphore,
    /// The number of next calls that fail.
    pub(crate) failures: AtomicUsize,
    /// The number of next settle calls that fail.
    pub(crate) settle_failures: AtomicUsize,
    /// Whether every event is pruned: only its key is known.
    pub(crate) pruned_all: AtomicBool,
    pub(crate) renewals: Semaphore,
    pub(crate) settled: AtomicUsize,
    pub(crate) given_back: AtomicUsize,
    pub(crate) hurried: AtomicUsize,
    /// One permit for each read of an event.
    pub(crate) looked: Semaphore,
    /// The number of SQL slices that may run at once.
    pub(crate) slices: AtomicUsize,
    /// The most claims of lost jobs that were held while another lost one ran.
    pub(crate) held_beside: AtomicUsize,
    /// The results of the next prunes, last first, and the arguments of past ones.
    pub(crate) prunes: Mutex<Vec<bool>>,
    pub(crate) horizons: Mutex<Vec<(Horizon, usize)>>,
    pub(crate) pruned: Semaphore,
    /// Whether other requests arrive with each prune; `None` if the store does not know.
    pub(crate) crowded: Mutex<Option<bool>>,
    pub(crate) demand: AtomicUsize,
}

impl Bench {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            pieces: Mutex::default(),
            specs: Mutex::default(),
            changed: Notify::new(),
            arrived: Notify::new(),
            claims: Semaphore::new(Semaphore::MAX_PERMITS),
            asked: Semaphore::new(0),
            failures: AtomicUsize::new(0),
            settle_failures: AtomicUsize::new(0),
            pruned_all: AtomicBool::new(false),
            renewals: Semaphore::new(0),
            settled: AtomicUsize::new(0),
            given_back: AtomicUsize::new(0),
            hurried: AtomicUsize::new(0),
            looked: Semaphore::new(0),
            slices: AtomicUsize::new(1),
            held_beside: AtomicUsize::new(0),
            prunes: Mutex::default(),
            horizons: Mutex::default(),
            pruned: Semaphore::new(0),
            crowded: Mutex::default(),
            demand: AtomicUsize::new(0),
        })
    }

    /// An event with one job for `handler`.
    pub(crate) fn put(&self, handler: &str, event: ClaimedEvent) -> JobId {
        let id = JobId(Uuid::now_v7());
        self.pieces.lock().unwrap().push(Piece {
            id,
            handler: HandlerName::new(handler),
            event,
            phase: Phase::Ready,
            progress: Progress::default(),
            fence: Fence(0),
            due: Timestamp::MIN,
            result: None,
            error: None,
            published: Vec::new(),
            workers: Vec::new(),
        });
        self.arrived.notify_waiters();
        id
    }

    pub(crate) fn is_announced(&self, handler: &HandlerRef) -> bool {
        self.specs.lock().unwrap().contains_key(handler)
    }

    pub(crate) fn piece(&self, id: JobId) -> Piece {
        self.pieces.lock().unwrap().iter().find(|piece| piece.id == id).unwrap().clone()
    }

    /// An event whose first attempt was lost with its process.
    pub(crate) fn put_lost(&self, handler: &str, event: ClaimedEvent) -> JobId {
        let id = self.put(handler, event);
        self.change(id, |piece| piece.progress = Progress { attempt: 1, steps: 0, lost: 1 });
        id
    }

    /// Completes a job, as an app does in its own transaction.
    pub(crate) fn complete(&self, id: JobId) {
        self.change(id, |piece| piece.phase = Phase::Done);
    }

    /// Waits until the job is in the wanted state.
    pub(crate) async fn until(&self, id: JobId, wanted: impl Fn(&Piece) -> bool) -> Piece {
        within(async {
            loop {
                let changed = self.changed.notified();
                let piece = self.piece(id);
                if wanted(&piece) {
                    return piece;
                }
                changed.await;
            }
        })
        .await
    }

    fn change(&self, id: JobId, change: impl FnOnce(&mut Piece)) {
        let mut pieces = self.pieces.lock().unwrap();
        change(pieces.iter_mut().find(|piece| piece.id == id).unwrap());
        self.changed.notify_waiters();
    }

    fn fail_if_planned(&self) -> Result<(), StoreError> {
        count_down(&self.failures)
    }

    fn workplace_of(&self, piece: &Piece) -> Workplace {
        let (source, handler) = (piece.event.key.source.clone(), piece.handler.clone());
        let specs = self.specs.lock().unwrap();
        specs.get(&HandlerRef { source, handler }).map_or(Workplace::Inside, |spec| spec.workplace)
    }

    fn status(pieces: &[Piece], event: EventId) -> Status {
        let of_event = pieces.iter().filter(|piece| piece.event.id == event);
        Status::of_jobs(of_event.map(|piece| (piece.phase, piece.progress.steps)))
    }

    fn take_due(&self, ask: &ClaimAsk) -> Vec<Claim> {
        let now = Timestamp::now();
        let mut pieces = self.pieces.lock().unwrap();
        let due = pieces.iter_mut().filter(|piece| {
            piece.phase == Phase::Ready
                && piece.handler == ask.handler.handler
                && piece.event.key.source == ask.handler.source
                && piece.due <= now
        });
        // A job with a lost attempt is claimed alone.
        let (mut first, mut alone) = (true, false);
        let fits = |piece: &&mut Piece| {
            let lost = piece.progress.alone(self.workplace_of(piece));
            let fits = std::mem::take(&mut first) || !(alone || lost);
            alone |= lost;
            fits
        };
        let claimed = due.take(ask.limit).take_while(fits).map(|piece| {
            piece.phase = Phase::Leased;
            piece.progress = piece.progress.claimed();
            piece.fence = Fence(piece.fence.0 + 1);
            piece.workers.push(ask.worker.clone());
            Claim {
                job: piece.id,
                fence: piece.fence,
                attempt: piece.progress.attempt,
                run: 1,
                idempotency_key: idempotency_key(piece.event.id, &piece.handler, 1),
                leased_until: now,
                alone: piece.progress.alone(self.workplace_of(piece)),
                event: piece.event.clone(),
            }
        });
        let claimed = claimed.collect();
        self.changed.notify_waiters();
        claimed
    }
}

fn count_down(failures: &AtomicUsize) -> Result<(), StoreError> {
    match failures.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)) {
        Ok(_) => Err(StoreError::Unavailable("planned by the test".into())),
        Err(_) => Ok(()),
    }
}

pub(crate) fn event(source: &str, event_id: &str, headers: &str, body: &str) -> ClaimedEvent {
    ClaimedEvent {
        id: EventId(Uuid::now_v7()),
        key: EventKey {
            tenant: Tenant::default(),
            source: SourceName::new(source),
            event_id: event_id.into(),
        },
        event_type: None,
        occurred_at: None,
        received_at: Timestamp::now(),
        resource: None,
        headers: headers.to_owned(),
        body: Bytes::copy_from_slice(body.as_bytes()),
    }
}

impl Store for Bench {
    async fn ingest(&self, ingest: Ingest) -> Result<Vec<Verdict>, StoreError> {
        let mut verdicts = Vec::new();
        for (receipt, jobs) in ingest.receipts.iter().zip(&ingest.jobs) {
            let seen = {
                let pieces = self.pieces.lock().unwrap();
                pieces.iter().find(|piece| piece.event.key == *receipt.key()).map(|piece| {
                    let status = Self::status(&pieces, piece.event.id);
                    KnownEvent {
                        id: piece.event.id,
                        status,
                        result: piece.result.as_deref().map(Into::into),
                    }
                })
            };
            if let Some(known) = seen {
                verdicts.push(Verdict::Duplicate(known));
                continue;
            }
            let text = std::str::from_utf8(receipt.body()).unwrap();
            let mut event = event("", "", &ingest.via.headers, text);
            event.key = receipt.key().clone();
            verdicts.push(Verdict::Accepted(event.id));
            for job in jobs {
                self.put(job.handler.as_str(), event.clone());
            }
        }
        Ok(verdicts)
    }

    fn writable(&self) -> Result<(), StoreError> {
        Ok(())
    }
}

impl StoreHints for Bench {
    async fn knows(&self, _key: &EventKey) -> Result<bool, StoreError> {
        Ok(true)
    }

    fn sql_batches_max(&self) -> usize {
        self.slices.load(Ordering::SeqCst)
    }

    fn foreground_requests(&self) -> Option<u64> {
        let known = self.crowded.lock().unwrap().is_some();
        known.then(|| self.demand.load(Ordering::SeqCst) as u64)
    }
}

impl Work for Bench {
    async fn announce(&self, handlers: Vec<HandlerSpec>) -> Result<(), StoreError> {
        self.fail_if_planned()?;
        let specs = handlers.into_iter().map(|spec| (spec.handler.clone(), spec));
        *self.specs.lock().unwrap() = specs.collect();
        Ok(())
    }

    async fn claim(&self, ask: ClaimAsk) -> Result<Vec<Claim>, StoreError> {
        self.fail_if_planned()?;
        assert!(self.specs.lock().unwrap().contains_key(&ask.handler), "announced first");
        let claimed = self.take_due(&ask);
        self.asked.add_permits(1);
        self.claims.acquire().await.expect("never closed").forget();
        Ok(claimed)
    }

    async fn renew(&self, job: JobId, fence: Fence, _: Duration) -> Result<Held, StoreError> {
        self.renewals.add_permits(1);
        let piece = self.piece(job);
        let held = piece.phase == Phase::Leased && piece.fence == fence;
        Ok(if held { Held::Kept } else { Held::Lost })
    }

    async fn settle(
        &self,
        job: JobId,
        fence: Fence,
        outcome: Outcome,
    ) -> Result<Settlement, StoreError> {
        self.fail_if_planned()?;
        count_down(&self.settle_failures)?;
        self.settled.fetch_add(1, Ordering::SeqCst);
        let piece = self.piece(job);
        if piece.phase == Phase::Done && piece.fence == fence {
            return Ok(Settlement::AlreadyDone);
        }
        if piece.phase != Phase::Leased || piece.fence != fence {
            return Ok(Settlement::Lost);
        }
        let handler =
            HandlerRef { source: piece.event.key.source.clone(), handler: piece.handler.clone() };
        let policy = self.specs.lock().unwrap()[&handler].policy.clone();
        self.change(job, |piece| match outcome {
            Outcome::Done { result, publish, .. } => {
                piece.phase = Phase::Done;
                piece.result = result;
                piece.published = publish;
            }
            Outcome::Failed { error, retry, .. } => {
                piece.error = Some(error);
                match piece.progress.failed(&policy, retry, Timestamp::now(), 0.5) {
                    AfterFailure::Again { progress, due } => {
                        (piece.phase, piece.progress, piece.due) = (Phase::Ready, progress, due);
                    }
                    AfterFailure::Bury { progress } => {
                        (piece.phase, piece.progress) = (Phase::Dead, progress);
                    }
                }
            }
        });
        Ok(Settlement::Recorded)
    }

    async fn give_back(&self, claims: Vec<(JobId, Fence)>) -> Result<(), StoreError> {
        for (job, fence) in claims {
            assert_eq!(self.piece(job).fence, fence);
            self.given_back.fetch_add(1, Ordering::SeqCst);
            self.change(job, |piece| {
                piece.phase = Phase::Ready;
                piece.progress = piece.progress.given_back();
            });
        }
        Ok(())
    }

    async fn run_sql(&self, ask: SqlAsk) -> Result<SqlRan, StoreError> {
        self.fail_if_planned()?;
        let claims = self.take_due(&ask.claim);
        if let [claim] = &claims[..]
            && claim.alone
        {
            let alone = Some(Box::new(claim.clone()));
            self.change(claim.job, |_| ());
            return Ok(SqlRan { alone, ..SqlRan::default() });
        }
        for claim in &claims {
            self.change(claim.job, |piece| piece.phase = Phase::Done);
        }
        let events = claims.iter().map(|claim| claim.event.id).collect();
        Ok(SqlRan { done: claims.len(), events, ..SqlRan::default() })
    }

    async fn run_claimed(&self, run: SqlRun) -> Result<Ran, StoreError> {
        self.fail_if_planned()?;
        let piece = self.piece(run.job);
        if piece.phase != Phase::Leased || piece.fence != run.fence {
            return Ok(Ran::Lost);
        }
        let held = |piece: &&Piece| {
            piece.id != run.job
                && piece.phase == Phase::Leased
                && piece.progress.alone(self.workplace_of(piece))
        };
        let beside = self.pieces.lock().unwrap().iter().filter(held).count();
        self.held_beside.fetch_max(beside, Ordering::SeqCst);
        self.change(run.job, |piece| {
            piece.phase = Phase::Done;
            piece.result = run.current.as_deref().map(str::to_owned);
        });
        Ok(Ran::Done)
    }

    async fn hurry(&self, event: EventId) -> Result<(), StoreError> {
        self.hurried.fetch_add(1, Ordering::SeqCst);
        let mut pieces = self.pieces.lock().unwrap();
        for piece in pieces.iter_mut().filter(|piece| piece.event.id == event) {
            if piece.phase == Phase::Ready {
                piece.due = Timestamp::MIN;
            }
        }
        self.arrived.notify_waiters();
        Ok(())
    }

    fn wait(
        &self,
        handler: &HandlerRef,
        span: RangeInclusive<Duration>,
    ) -> impl Future<Output = Wake> + Send {
        let arrived = self.arrived.notified();
        async move {
            let due = {
                let pieces = self.pieces.lock().unwrap();
                let ready = pieces.iter().filter(|piece| {
                    piece.phase == Phase::Ready && piece.handler == handler.handler
                });
                ready.map(|piece| piece.due).min()
            };
            let until_due = due.map_or(*span.end(), |due| {
                Duration::try_from(due.duration_since(Timestamp::now())).unwrap_or_default()
            });
            tokio::select! {
                () = arrived => Wake::Arrived,
                () = tokio::time::sleep(until_due.max(*span.start()).min(*span.end())) => {
                    Wake::Elapsed { due }
                }
            }
        }
    }

    async fn prune(&self, horizon: Horizon, limit: usize) -> Result<bool, StoreError> {
        self.fail_if_planned()?;
        self.horizons.lock().unwrap().push((horizon, limit));
        self.pruned.add_permits(1);
        if *self.crowded.lock().unwrap() == Some(true) {
            self.demand.fetch_add(1, Ordering::SeqCst);
        }
        Ok(self.prunes.lock().unwrap().pop().unwrap_or(false))
    }
}

impl Inspect for Bench {
    async fn events(&self, _filter: EventFilter) -> Result<Page<EventSummary>, StoreError> {
        Ok(Page { items: Vec::new(), next: None })
    }

    async fn event(&self, name: &EventName) -> Result<Lookup<EventDetail>, StoreError> {
        let EventName::Ours(id) = name else { return Ok(Lookup::None) };
        self.looked.add_permits(1);
        if self.pruned_all.load(Ordering::SeqCst) {
            return Ok(Lookup::None);
        }
        let pieces = self.pieces.lock().unwrap();
        let of_event: Vec<&Piece> = pieces.iter().filter(|piece| piece.event.id == *id).collect();
        let Some(first) = of_event.first() else { return Ok(Lookup::None) };
        let event = &first.event;
        Ok(Lookup::One(EventDetail {
            summary: EventSummary {
                id: *id,
                event_id: event.key.event_id.to_string(),
                tenant: event.key.tenant.to_string(),
                source: event.key.source.to_string(),
                event_type: None,
                occurred_at: None,
                received_at: event.received_at,
                status: Self::status(&pieces, *id),
                review: None,
                arrivals: 1,
                conflicts: 0,
                processed_at: None,
                result: first.result.clone(),
            },
            arrivals: Vec::new(),
            headers: event.headers.clone(),
            body: event.body.clone(),
            jobs: of_event.iter().map(|piece| detail(piece)).collect(),
            actions: Vec::new(),
            messages: Vec::new(),
        }))
    }

    async fn jobs(&self, _filter: JobFilter) -> Result<Page<JobDetail>, StoreError> {
        Ok(Page { items: Vec::new(), next: None })
    }

    async fn job(&self, id: JobId) -> Result<Option<JobDetail>, StoreError> {
        Ok(Some(detail(&self.piece(id))))
    }

    async fn lanes(&self) -> Result<Vec<LaneState>, StoreError> {
        Ok(Vec::new())
    }

    async fn in_review(&self) -> Result<Vec<(SourceName, u64)>, StoreError> {
        Ok(Vec::new())
    }

    async fn sample(&self, _ask: SampleAsk) -> Result<Sample, StoreError> {
        Ok(Sample { total: 0, events: Vec::new() })
    }
}

fn detail(piece: &Piece) -> JobDetail {
    JobDetail {
        id: piece.id,
        event: piece.event.id,
        event_id: piece.event.key.event_id.to_string(),
        tenant: piece.event.key.tenant.to_string(),
        source: piece.event.key.source.to_string(),
        handler: piece.handler.clone(),
        phase: piece.phase,
        run: 1,
        progress: piece.progress,
        fence: piece.fence,
        due_at: Some(piece.due),
        result: piece.result.clone(),
        error: piece.error.clone(),
        finished_at: None,
        idempotency_key: String::new(),
        resource: None,
        attempts: Vec::new(),
    }
}
