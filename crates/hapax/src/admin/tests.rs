//! The routes, through the door, on a small store that remembers what it was asked.

use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode};
use bytes::Bytes;
use hapax_core::delivery::DeliveryId;
use hapax_core::endpoint::{EndpointAct, EndpointChanged, EndpointId, EndpointRecord, NewEndpoint};
use hapax_core::job::{Fence, HandlerName, JobId, Phase, Policy, Progress, Retry, Workplace};
use hapax_core::secret::Secret;
use hapax_core::store::*;
use hapax_core::{EventKey, SourceName, Tenant, Timestamp};
use hapax_engine::{Pulled, Readiness, Traffic};
use hapax_store::MemoryStore;
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use tokio::sync::{Notify, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt as _;
use uuid::Uuid;

use super::{Admin, Authorizer, WithoutToken, router};
use crate::alerts::{AlertMonitor, AlertRules, Inputs};
use crate::config::Permission;

/// Events with their jobs, and what was asked.
struct Fake {
    model: Mutex<Model>,
    arrived: Notify,
    /// Claims take one before they begin.
    claim_permits: Semaphore,
    /// Messages and endpoints.
    outbox: MemoryStore,
}

#[derive(Default)]
struct Model {
    events: Vec<EventDetail>,
    outcomes: Vec<Outcome>,
    workers: Vec<String>,
}

impl Fake {
    fn model(&self) -> MutexGuard<'_, Model> {
        self.model.lock().unwrap()
    }
}

impl Model {
    fn job(&mut self, id: JobId) -> Option<&mut JobDetail> {
        self.events.iter_mut().flat_map(|event| &mut event.jobs).find(|job| job.id == id)
    }
}

impl Store for Fake {
    async fn ingest(&self, _: Ingest) -> Result<Vec<Verdict>, StoreError> {
        Err(StoreError::Closed)
    }

    fn writable(&self) -> Result<(), StoreError> {
        Ok(())
    }
}

impl Work for Fake {
    async fn announce(&self, _: Vec<HandlerSpec>) -> Result<(), StoreError> {
        Ok(())
    }

    async fn claim(&self, ask: ClaimAsk) -> Result<Vec<Claim>, StoreError> {
        self.claim_permits.acquire().await.unwrap().forget();
        let mut model = self.model();
        model.workers.push(ask.worker.to_string());
        let mut claims = Vec::new();
        for event in &mut model.events {
            let due = |job: &&mut JobDetail| {
                job.phase == Phase::Ready
                    && job.handler == ask.handler.handler
                    && job.source == ask.handler.source.as_str()
            };
            for job in event.jobs.iter_mut().filter(due).take(ask.limit - claims.len()) {
                job.phase = Phase::Leased;
                job.fence = Fence(job.fence.0 + 1);
                job.progress = job.progress.claimed();
                claims.push(Claim {
                    job: job.id,
                    fence: job.fence,
                    attempt: job.progress.attempt,
                    run: job.run,
                    idempotency_key: job.idempotency_key.clone(),
                    leased_until: noon(),
                    alone: false,
                    event: ClaimedEvent {
                        id: event.summary.id,
                        key: EventKey {
                            tenant: Tenant::new(&event.summary.tenant),
                            source: SourceName::new(&event.summary.source),
                            event_id: event.summary.event_id.as_str().into(),
                        },
                        event_type: event.summary.event_type.clone(),
                        occurred_at: None,
                        received_at: event.summary.received_at,
                        resource: None,
                        headers: event.headers.clone(),
                        body: event.body.clone(),
                    },
                });
            }
        }
        Ok(claims)
    }

    async fn renew(&self, job: JobId, fence: Fence, _: Duration) -> Result<Held, StoreError> {
        let mut model = self.model();
        let job = model.job(job).unwrap();
        let holds = job.fence == fence && job.phase == Phase::Leased;
        Ok(if holds { Held::Kept } else { Held::Lost })
    }

    async fn settle(
        &self,
        id: JobId,
        fence: Fence,
        out: Outcome,
    ) -> Result<Settlement, StoreError> {
        let mut model = self.model();
        let job = model.job(id).unwrap();
        let done = matches!(out, Outcome::Done { .. });
        match (job.fence == fence, job.phase) {
            (true, Phase::Done) => return Ok(Settlement::AlreadyDone),
            (true, Phase::Leased) => job.phase = if done { Phase::Done } else { Phase::Ready },
            _ => return Ok(Settlement::Lost),
        }
        model.outcomes.push(out);
        Ok(Settlement::Recorded)
    }

    async fn give_back(&self, claims: Vec<(JobId, Fence)>) -> Result<(), StoreError> {
        for (id, _) in claims {
            let mut model = self.model();
            let job = model.job(id).unwrap();
            job.phase = Phase::Ready;
            job.progress = job.progress.given_back();
        }
        Ok(())
    }

    async fn run_sql(&self, _: SqlAsk) -> Result<SqlRan, StoreError> {
        Ok(SqlRan::default())
    }

    async fn run_claimed(&self, _: SqlRun) -> Result<Ran, StoreError> {
        Ok(Ran::Lost)
    }

    fn wait(
        &self,
        _: &HandlerRef,
        span: RangeInclusive<Duration>,
    ) -> impl Future<Output = Wake> + Send {
        let arrived = tokio::time::timeout(*span.end(), self.arrived.notified());
        async move {
            match arrived.await {
                Ok(()) => Wake::Arrived,
                Err(_) => Wake::Elapsed { due: None },
            }
        }
    }

    async fn hurry(&self, _: EventId) -> Result<(), StoreError> {
        Ok(())
    }

    async fn prune(&self, _: Horizon, _: usize) -> Result<bool, StoreError> {
        Ok(false)
    }
}

impl Operate for Fake {
    async fn replay(&self, ask: ReplayAsk) -> Result<Vec<Replayed>, StoreError> {
        let mut model = self.model();
        let event = model.events.iter_mut().find(|event| event.summary.id == ask.event).unwrap();
        let mut replayed = Vec::new();
        for NewJob { handler, .. } in ask.handlers {
            let known = event.jobs.iter_mut().find(|job| job.handler == handler);
            let effect = match known.as_ref().map(|job| job.phase) {
                Some(Phase::Done) if !ask.force => ReplayEffect::AlreadyApplied,
                Some(Phase::Stale) if !ask.force => ReplayEffect::Stale,
                Some(Phase::Discarded) if !ask.force => ReplayEffect::Discarded,
                Some(
                    Phase::Ready | Phase::Leased | Phase::Held | Phase::Parked | Phase::Review,
                ) => ReplayEffect::AlreadyOpen,
                Some(Phase::Done | Phase::Stale | Phase::Dead | Phase::Discarded) | None => {
                    ReplayEffect::WouldRun
                }
            };
            if let (ReplayEffect::WouldRun, false) = (effect, ask.dry_run) {
                match known {
                    Some(job) => job.phase = Phase::Ready,
                    None => event.jobs.push(job(&event.summary, handler.as_str(), Phase::Ready)),
                }
            }
            replayed.push(Replayed { handler, effect });
        }
        if !ask.dry_run {
            event.actions.push(note("replay", ask.by));
        }
        Ok(replayed)
    }

    async fn approve(
        &self,
        id: EventId,
        jobs: Vec<NewJob>,
        by: Action,
    ) -> Result<Reviewed, StoreError> {
        let mut model = self.model();
        let event = model.events.iter_mut().find(|event| event.summary.id == id).unwrap();
        if event.summary.status != Status::Review {
            return Ok(Reviewed::NotWaiting(event.summary.status));
        }
        event.summary.status = Status::Received;
        for new in jobs {
            event.jobs.push(job(&event.summary, new.handler.as_str(), Phase::Ready));
        }
        event.actions.push(note("approve", by));
        Ok(Reviewed::Decided)
    }

    async fn reject(&self, id: EventId, by: Action) -> Result<Reviewed, StoreError> {
        let mut model = self.model();
        let event = model.events.iter_mut().find(|event| event.summary.id == id).unwrap();
        if event.summary.status != Status::Review {
            return Ok(Reviewed::NotWaiting(event.summary.status));
        }
        event.summary.status = Status::Discarded;
        event.actions.push(note("reject", by));
        Ok(Reviewed::Decided)
    }

    async fn discard(
        &self,
        id: EventId,
        handler: Option<HandlerName>,
        by: Action,
    ) -> Result<Reviewed, StoreError> {
        let mut model = self.model();
        let event = model.events.iter_mut().find(|event| event.summary.id == id).unwrap();
        let is_meant = |job: &&mut JobDetail| {
            job.phase == Phase::Dead && handler.as_ref().is_none_or(|it| job.handler == *it)
        };
        let mut dead: Vec<_> = event.jobs.iter_mut().filter(is_meant).collect();
        if dead.is_empty() {
            return Ok(Reviewed::NotWaiting(event.summary.status));
        }
        dead.iter_mut().for_each(|job| job.phase = Phase::Discarded);
        event.summary.status = Status::Discarded;
        event.actions.push(note("discard", by));
        Ok(Reviewed::Decided)
    }
}

impl Outbox for Fake {
    async fn publish(&self, message: NewMessage) -> Result<Published, StoreError> {
        self.outbox.publish(message).await
    }

    async fn exchange(
        &self,
        outcomes: Vec<AttemptOutcome>,
        ask: DeliveryAsk,
    ) -> Result<Exchanged, StoreError> {
        self.outbox.exchange(outcomes, ask).await
    }

    async fn wait_for_deliveries(&self, at_most: Duration) {
        self.outbox.wait_for_deliveries(at_most).await;
    }

    async fn create_endpoint(
        &self,
        endpoint: NewEndpoint,
        by: Action,
    ) -> Result<EndpointChanged, StoreError> {
        self.outbox.create_endpoint(endpoint, by).await
    }

    async fn change_endpoint(
        &self,
        endpoint: EndpointId,
        act: EndpointAct,
        by: Action,
    ) -> Result<EndpointChanged, StoreError> {
        self.outbox.change_endpoint(endpoint, act, by).await
    }

    async fn replay_delivery(
        &self,
        delivery: DeliveryId,
        by: Action,
    ) -> Result<DeliveryReplayed, StoreError> {
        self.outbox.replay_delivery(delivery, by).await
    }

    async fn skip_delivery(
        &self,
        delivery: DeliveryId,
        by: Action,
    ) -> Result<hapax_core::store::DeliverySkipped, StoreError> {
        self.outbox.skip_delivery(delivery, by).await
    }

    async fn change_message(
        &self,
        message: MessageRef,
        act: MessageAct,
        by: Action,
    ) -> Result<Option<Vec<DeliveryId>>, StoreError> {
        self.outbox.change_message(message, act, by).await
    }

    async fn cancel_orphans(&self, limit: usize) -> Result<bool, StoreError> {
        self.outbox.cancel_orphans(limit).await
    }
}

impl InspectOutbox for Fake {
    async fn endpoints(&self, filter: EndpointFilter) -> Result<Page<EndpointRecord>, StoreError> {
        self.outbox.endpoints(filter).await
    }

    async fn endpoint(&self, id: EndpointId) -> Result<Option<EndpointRecord>, StoreError> {
        self.outbox.endpoint(id).await
    }

    async fn messages(&self, filter: MessageFilter) -> Result<Page<MessageSummary>, StoreError> {
        self.outbox.messages(filter).await
    }

    async fn message(
        &self,
        id: &str,
        tenant: Option<Tenant>,
    ) -> Result<Vec<MessageDetail>, StoreError> {
        self.outbox.message(id, tenant).await
    }

    async fn deliveries(&self, filter: DeliveryFilter) -> Result<Page<DeliveryDetail>, StoreError> {
        self.outbox.deliveries(filter).await
    }

    async fn delivery(&self, id: DeliveryId) -> Result<Option<DeliveryDetail>, StoreError> {
        self.outbox.delivery(id).await
    }

    async fn delivery_backlog(&self) -> Result<DeliveryBacklog, StoreError> {
        self.outbox.delivery_backlog().await
    }
}

impl Inspect for Fake {
    async fn events(&self, filter: EventFilter) -> Result<Page<EventSummary>, StoreError> {
        let model = self.model();
        let before = filter.before.map_or(usize::MAX, |Cursor(before)| before as usize);
        let fits = |(at, event): &(usize, &EventDetail)| {
            let summary = &event.summary;
            *at < before
                && filter.until.is_none_or(|until| summary.received_at < until)
                && filter
                    .unfinished_since
                    .is_none_or(|at| summary.received_at < at && !summary.status.is_final())
        };
        let mut fitting = model.events.iter().enumerate().rev().filter(fits);
        let page: Vec<_> = fitting.by_ref().take(filter.limit).collect();
        let next = fitting.next().and(page.last()).map(|(at, _)| Cursor(*at as u128));
        Ok(Page { items: page.into_iter().map(|(_, event)| event.summary.clone()).collect(), next })
    }

    async fn event(&self, name: &EventName) -> Result<Lookup<EventDetail>, StoreError> {
        let model = self.model();
        let fits = |event: &&EventDetail| match name {
            EventName::Ours(id) => event.summary.id == *id,
            EventName::Theirs(theirs) => event.summary.event_id == **theirs,
        };
        let found: Vec<&EventDetail> = model.events.iter().filter(fits).collect();
        Ok(match found.as_slice() {
            [] => Lookup::None,
            [one] => Lookup::One((*one).clone()),
            several => Lookup::Ambiguous(several.iter().map(|event| event.summary.id).collect()),
        })
    }

    async fn jobs(&self, filter: JobFilter) -> Result<Page<JobDetail>, StoreError> {
        let model = self.model();
        let jobs = model.events.iter().flat_map(|event| &event.jobs);
        let fits = |job: &&JobDetail| {
            filter.phase.is_none_or(|phase| job.phase == phase)
                && filter.handler.as_ref().is_none_or(|handler| job.handler == *handler)
                && filter.source.as_ref().is_none_or(|source| job.source == source.as_str())
        };
        let items = jobs.filter(fits).take(filter.limit).cloned().collect();
        Ok(Page { items, next: None })
    }

    async fn job(&self, id: JobId) -> Result<Option<JobDetail>, StoreError> {
        Ok(self.model().job(id).cloned())
    }

    async fn lanes(&self) -> Result<Vec<LaneState>, StoreError> {
        let model = self.model();
        let mut lanes: Vec<LaneState> = Vec::new();
        for job in model.events.iter().flat_map(|event| &event.jobs) {
            let source = SourceName::new(&job.source);
            lanes.push(LaneState {
                handler: HandlerRef { source, handler: job.handler.clone() },
                oldest_due: job.due_at,
                ready: u64::from(job.phase == Phase::Ready),
                leased: 0,
                held: 0,
                parked: 0,
                review: 0,
                dead: u64::from(job.phase == Phase::Dead),
            });
        }
        Ok(lanes)
    }

    async fn in_review(&self) -> Result<Vec<(SourceName, u64)>, StoreError> {
        let model = self.model();
        let waiting = model.events.iter().filter(|one| one.summary.status == Status::Review);
        let mut counts = std::collections::BTreeMap::new();
        for event in waiting {
            *counts.entry(SourceName::new(&event.summary.source)).or_default() += 1;
        }
        Ok(counts.into_iter().collect())
    }

    async fn sample(&self, ask: SampleAsk) -> Result<Sample, StoreError> {
        let model = self.model();
        let fitting = model.events.iter().filter(|event| event.summary.received_at >= ask.since);
        let events: Vec<_> = fitting
            .map(|event| SampledEvent {
                summary: event.summary.clone(),
                arrived_at: event.arrivals.iter().map(|note| note.received_at).collect(),
            })
            .collect();
        Ok(Sample { total: events.len() as u64, events })
    }
}

fn note(action: &str, by: Action) -> ActionNote {
    ActionNote { action: action.into(), who: by.who, reason: by.reason, at: by.at }
}

fn noon() -> Timestamp {
    "2026-03-01T12:00:00Z".parse().unwrap()
}

fn job(event: &EventSummary, handler: &str, phase: Phase) -> JobDetail {
    JobDetail {
        id: JobId(Uuid::now_v7()),
        event: event.id,
        event_id: event.event_id.clone(),
        tenant: event.tenant.clone(),
        source: event.source.clone(),
        handler: HandlerName::new(handler),
        phase,
        run: 1,
        progress: Progress::default(),
        fence: Fence(0),
        due_at: None,
        result: None,
        error: None,
        finished_at: None,
        idempotency_key: format!("{}:{handler}", event.id),
        resource: None,
        attempts: Vec::new(),
    }
}

fn event(event_id: &str, status: Status, jobs: &[(&str, Phase)]) -> EventDetail {
    let summary = EventSummary {
        id: EventId(Uuid::now_v7()),
        event_id: event_id.into(),
        tenant: "default".into(),
        source: "stripe".into(),
        event_type: Some("payout.paid".into()),
        occurred_at: None,
        received_at: noon() - Duration::from_secs(3600),
        status,
        review: None,
        arrivals: 1,
        conflicts: 0,
        processed_at: None,
        result: None,
    };
    EventDetail {
        jobs: jobs.iter().map(|(handler, phase)| job(&summary, handler, *phase)).collect(),
        summary,
        arrivals: Vec::new(),
        headers: "content-type: application/json\nx-a: b: c".into(),
        body: Bytes::from_static(br#"{"id":1}"#),
        actions: Vec::new(),
        messages: Vec::new(),
    }
}

/// A server on loopback. `fee` is pulled, `mail` runs inside; both are for every event.
struct Server {
    store: Arc<Fake>,
    router: Router,
    stop: CancellationToken,
    unfinished: TaskTracker,
}

fn server(events: Vec<EventDetail>) -> Server {
    let store = Arc::new(Fake {
        model: Mutex::new(Model { events, ..Model::default() }),
        arrived: Notify::new(),
        claim_permits: Semaphore::new(100),
        outbox: MemoryStore::new(),
    });
    let spec = |handler: &str, workplace| HandlerSpec {
        handler: HandlerRef {
            source: SourceName::new("stripe"),
            handler: HandlerName::new(handler),
        },
        policy: Policy { retry: vec![Duration::ZERO], lease: Duration::from_secs(30) },
        order: None,
        workplace,
    };
    let (ops, worker) = (Secret::new("ops-token"), Secret::new("worker-token"));
    let claim = Permission::Claim { source: "stripe".into(), handler: "fee".into() };
    let authorizer = Authorizer::new(
        [127, 0, 0, 1].into(),
        WithoutToken::FromLoopback,
        [("ops", &ops, &[Permission::Operate][..]), ("worker", &worker, &[claim][..])],
    );
    let stop = CancellationToken::new();
    let readiness = Arc::new(Readiness::new(stop.clone()));
    readiness.opened();
    let unfinished = TaskTracker::new();
    let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
    let router = router(Admin {
        store: Arc::clone(&store),
        authorizer: Arc::new(authorizer),
        readiness,
        sending: Err("no vault in this test".to_owned()),
        metrics: recorder.handle(),
        handlers: Arc::new(|_, _, _| {
            let new = |handler| NewJob {
                handler: HandlerName::new(handler),
                place: None,
                hopeless: None,
            };
            vec![new("fee"), new("mail")]
        }),
        configured: Arc::new(move || {
            vec![spec("fee", Workplace::Pulled), spec("mail", Workplace::Called)]
        }),
        watch: Arc::new(AlertMonitor::new(
            Inputs {
                traffic: Box::new(|| {
                    let traffic = |source: &str, failed_verifications| Traffic {
                        source: SourceName::new(source),
                        new: 0,
                        copies: 0,
                        failed_verifications,
                    };
                    vec![traffic("quiet", 0), traffic("stripe", 7)]
                }),
                clock_offset_seconds: Box::new(|| Some(-90)),
                known: Box::new(Vec::new),
                log: None,
                now: Arc::new(noon),
            },
            AlertRules::default(),
        )),
        refetch: Arc::new(|_, claims| {
            let plain = |claim| Pulled { claim, current: None };
            Box::pin(std::future::ready(claims.into_iter().map(plain).collect()))
        }),
        now: Arc::new(noon),
        unfinished: unfinished.clone(),
    });
    Server { store, router, stop, unfinished }
}

impl Server {
    async fn send(&self, request: Request<Body>) -> (StatusCode, Value) {
        let response = self.router.clone().oneshot(request).await.unwrap();
        let status = response.status();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
    }

    async fn get(&self, path: &str) -> (StatusCode, Value) {
        let request = Request::get(path).header("host", "localhost");
        self.send(request.body(Body::empty()).unwrap()).await
    }

    async fn post(&self, path: &str, body: Value) -> (StatusCode, Value) {
        self.post_as(None, path, body).await
    }

    async fn post_as(&self, token: Option<&str>, path: &str, body: Value) -> (StatusCode, Value) {
        self.send(post_request(token, path, body)).await
    }
}

fn post_request(token: Option<&str>, path: &str, body: Value) -> Request<Body> {
    let mut request =
        Request::post(path).header("host", "localhost").header("content-type", "application/json");
    if let Some(token) = token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    request.body(Body::from(body.to_string())).unwrap()
}

fn effects(answer: &Value) -> Vec<(&str, &str)> {
    answer["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| (item["handler"].as_str().unwrap(), item["effect"].as_str().unwrap()))
        .collect()
}

#[tokio::test]
async fn replaying_what_is_done_does_nothing_unless_it_is_forced() {
    let jobs = [("fee", Phase::Done), ("mail", Phase::Dead)];
    let server = server(vec![event("evt_1", Status::Dead, &jobs)]);
    let path = "/api/v1/events/evt_1/replay";

    let (status, dry) = server.post(path, json!({ "dry_run": true })).await;
    assert_eq!(status, StatusCode::OK, "{dry}");
    assert_eq!(effects(&dry), [("fee", "already_applied"), ("mail", "would_run")]);
    assert_eq!(server.store.model().events[0].jobs[1].phase, Phase::Dead);

    let (_, real) = server.post(path, json!({})).await;
    assert_eq!(effects(&real), [("fee", "already_applied"), ("mail", "runs")]);
    let (_, again) = server.post(path, json!({})).await;
    assert_eq!(effects(&again), [("fee", "already_applied"), ("mail", "already_open")]);
    let (_, forced) = server.post(path, json!({ "force": true, "handler": "fee" })).await;
    assert_eq!(effects(&forced), [("fee", "runs")]);
    let (status, _) = server.post(path, json!({ "handler": "none" })).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn every_action_is_recorded_with_the_name_of_its_token() {
    let server = server(vec![event("evt_1", Status::Dead, &[("fee", Phase::Dead)])]);
    let path = "/api/v1/events/evt_1/replay";
    server.post_as(Some("ops-token"), path, json!({ "reason": "fixed" })).await;
    server.post(path, json!({})).await;
    let (_, shown) = server.get("/api/v1/events/evt_1").await;
    assert_eq!(shown["actions"][0]["who"], "ops");
    assert_eq!(shown["actions"][0]["reason"], "fixed");
    assert_eq!(shown["actions"][1]["who"], "loopback");
    assert_eq!(shown["jobs"][0]["handler"], "fee");
    assert_eq!(shown["headers"][1], json!(["x-a", "b: c"]));
}

#[tokio::test]
async fn an_event_tells_the_attempts_of_all_its_jobs_in_their_order() {
    // One look must show which handler ran when, without going from job to job.
    let mut dead = event("evt_1", Status::Dead, &[("fee", Phase::Dead), ("mail", Phase::Done)]);
    for (job, seconds) in [(0, 1), (1, 2), (0, 3)] {
        let job = &mut dead.jobs[job];
        job.attempts.push(AttemptNote {
            run: 1,
            attempt: job.attempts.len() as u32 + 1,
            started_at: noon() + Duration::from_secs(seconds),
            ended_at: None,
            outcome: "lost".into(),
            error: None,
            worker: "w".into(),
            answer: None,
        });
    }
    let (_, shown) = server(vec![dead]).get("/api/v1/events/evt_1").await;
    let attempts = shown["attempts"].as_array().unwrap().iter();
    let found: Vec<_> = attempts.map(|it| (it["handler"].clone(), it["attempt"].clone())).collect();
    let of = |handler: &str, attempt: u32| (json!(handler), json!(attempt));
    assert_eq!(found, [of("fee", 1), of("mail", 1), of("fee", 2)]);
    assert_eq!(shown["attempts"][2]["job"], shown["jobs"][0]["id"]);
}

#[tokio::test]
async fn a_misspelt_field_is_refused_by_its_name() {
    // A dry run that is not understood must not become a run.
    let server = server(vec![event("evt_1", Status::Dead, &[("fee", Phase::Dead)])]);
    for path in ["events/evt_1/replay", "events/evt_1/approve", "jobs/replay", "claims"] {
        let (status, problem) =
            server.post(&format!("/api/v1/{path}"), json!({ "dryrun": true })).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{path}");
        assert!(problem["detail"].as_str().unwrap().contains("`dryrun`"), "{problem}");
    }
    let (status, problem) = server.get("/api/v1/jobs?stat=dead").await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert!(problem["detail"].as_str().unwrap().contains("`stat`"), "{problem}");
    assert_eq!(server.store.model().events[0].jobs[0].phase, Phase::Dead);
}

#[tokio::test]
async fn an_array_is_no_request() {
    // Read as the fields in their order, `[]` would be a run and `[true]` a dry one.
    let server = server(vec![event("evt_1", Status::Dead, &[("fee", Phase::Dead)])]);
    for (path, body) in [
        ("events/evt_1/replay", json!([])),
        ("events/evt_1/replay", json!([true])),
        ("events/evt_1/replay", json!(null)),
        ("jobs/replay", json!([])),
        ("claims", json!(["stripe", "fee"])),
    ] {
        let (status, problem) = server.post(&format!("/api/v1/{path}"), body.clone()).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{path} {body}");
        assert_eq!(problem["detail"], "the body is not a JSON object");
    }
    assert_eq!(server.store.model().events[0].jobs[0].phase, Phase::Dead);
}

#[tokio::test]
async fn a_path_or_query_that_is_not_understood_is_a_problem_too() {
    // What the router refuses by itself would be plain text, in its words.
    let server = server(vec![event("evt_1", Status::Dead, &[("fee", Phase::Dead)])]);
    for path in ["events/%FF", "jobs/%FF"] {
        let (status, problem) = server.get(&format!("/api/v1/{path}")).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{path}");
        assert_eq!(problem["type"], "urn:hapax:problem:bad_request", "{path}");
    }
    for path in ["events?limit=-1", "jobs?limit=-1", "stats?window=-1"] {
        let (status, problem) = server.get(&format!("/api/v1/{path}")).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{path}");
        let (parameter, _) = path.split_once('?').unwrap().1.split_once('=').unwrap();
        let detail = problem["detail"].as_str().unwrap();
        assert!(detail.starts_with(&format!("{parameter}: ")), "{detail}");
    }
}

#[tokio::test]
async fn what_a_foreign_page_can_send_is_refused() {
    let server = server(vec![event("evt_1", Status::Dead, &[("fee", Phase::Dead)])]);
    let post = |name: &'static str, value: &'static str| {
        Request::post("/api/v1/events/evt_1/replay")
            .header("host", "localhost")
            .header(name, value)
            .body(Body::from("{}"))
            .unwrap()
    };
    let (status, _) = server.send(post("content-type", "text/plain")).await;
    assert_eq!(status, StatusCode::UNSUPPORTED_MEDIA_TYPE);
    let (status, _) = server.send(post("origin", "https://evil.example")).await;
    assert_eq!(status, StatusCode::FORBIDDEN);
    assert_eq!(server.store.model().events[0].jobs[0].phase, Phase::Dead);
}

#[tokio::test]
async fn a_token_that_may_only_claim_neither_reads_nor_operates() {
    let server = server(vec![event("evt_1", Status::Dead, &[("fee", Phase::Dead)])]);
    let token = Some("worker-token");
    let (status, _) = server.post_as(token, "/api/v1/events/evt_1/replay", json!({})).await;
    assert_eq!(status, StatusCode::FORBIDDEN);
    let (status, _) = server
        .post_as(
            Some("ops-token"),
            "/api/v1/claims",
            json!({ "source": "stripe", "handler": "fee" }),
        )
        .await;
    assert_eq!(status, StatusCode::FORBIDDEN);
}

#[tokio::test]
async fn an_id_that_several_senders_use_is_a_question_not_a_guess() {
    let events =
        vec![event("1", Status::Review, &[]), event("1", Status::Dead, &[("fee", Phase::Dead)])];
    let server = server(events);
    for path in ["replay", "approve"] {
        let (status, problem) = server.post(&format!("/api/v1/events/1/{path}"), json!({})).await;
        assert_eq!(status, StatusCode::CONFLICT, "{path}");
        assert_eq!(problem["candidates"].as_array().unwrap().len(), 2, "{problem}");
    }
    let (status, _) = server.post("/api/v1/events/2/replay", json!({})).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn an_event_in_review_is_approved_once_and_then_stands() {
    let server = server(vec![event("evt_1", Status::Review, &[])]);
    let (status, _) = server.post("/api/v1/events/evt_1/replay", json!({ "force": true })).await;
    assert_eq!(status, StatusCode::CONFLICT, "a replay is no way around review");
    let approve = "/api/v1/events/evt_1/approve";
    let (status, first) = server.post(approve, json!({ "reason": "known" })).await;
    assert_eq!((status, &first["changed"]), (StatusCode::OK, &json!(true)), "{first}");
    assert_eq!(server.store.model().events[0].jobs.len(), 2);
    let (status, second) = server.post(approve, json!({})).await;
    assert_eq!((status, &second["changed"]), (StatusCode::OK, &json!(false)), "{second}");
    assert_eq!(server.store.model().events[0].jobs.len(), 2);
    let (status, _) = server.post("/api/v1/events/evt_1/reject", json!({ "reason": "no" })).await;
    assert_eq!(status, StatusCode::CONFLICT);
}

#[tokio::test]
async fn a_rejection_needs_a_reason_and_is_final() {
    let server = server(vec![event("evt_1", Status::Review, &[])]);
    let reject = "/api/v1/events/evt_1/reject";
    for empty in [json!({}), json!({ "reason": "  " })] {
        assert_eq!(server.post(reject, empty).await.0, StatusCode::BAD_REQUEST);
    }
    let (status, answer) = server.post(reject, json!({ "reason": "forged" })).await;
    assert_eq!((status, &answer["status"]), (StatusCode::OK, &json!("discarded")));
    assert_eq!(server.post(reject, json!({ "reason": "forged" })).await.0, StatusCode::OK);
    for path in ["approve", "replay"] {
        let (status, _) = server.post(&format!("/api/v1/events/evt_1/{path}"), json!({})).await;
        assert_eq!(status, StatusCode::CONFLICT, "{path}");
    }
}

#[tokio::test]
async fn dead_letters_are_listed_and_replayed_by_filter_each_with_its_answer() {
    let events = vec![
        event("evt_1", Status::Dead, &[("fee", Phase::Dead), ("mail", Phase::Done)]),
        event("evt_2", Status::Dead, &[("fee", Phase::Dead)]),
        event("evt_3", Status::Dead, &[("gone", Phase::Dead)]),
    ];
    let server = server(events);
    let (_, dead) = server.get("/api/v1/jobs?status=dead").await;
    assert_eq!(dead["items"].as_array().unwrap().len(), 3);
    let (_, dry) = server.post("/api/v1/jobs/replay", json!({ "dry_run": true })).await;
    let expected = [("fee", "would_run"), ("fee", "would_run"), ("gone", "no_handler")];
    assert_eq!(effects(&dry), expected);
    let (_, one) =
        server.post("/api/v1/jobs/replay", json!({ "handler": "fee", "limit": 1 })).await;
    assert_eq!(effects(&one), [("fee", "runs")]);
    let (_, rest) =
        server.post("/api/v1/jobs/replay", json!({ "status": "dead", "source": "stripe" })).await;
    assert_eq!(effects(&rest), [("fee", "runs"), ("gone", "no_handler")]);

    let gone = dead["items"][2]["id"].as_str().unwrap();
    let (status, _) = server.post(&format!("/api/v1/jobs/{gone}/replay"), json!({})).await;
    assert_eq!(status, StatusCode::CONFLICT);
    let (status, _) = server.post("/api/v1/jobs/replay", json!({ "status": "done" })).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    let (status, shown) = server.get(&format!("/api/v1/jobs/{gone}")).await;
    assert_eq!((status, &shown["status"]), (StatusCode::OK, &json!("dead")));
    assert_eq!(server.get("/api/v1/jobs/none").await.0, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_pull_worker_claims_renews_and_completes_under_its_fence() {
    let server = server(vec![event("evt_1", Status::Received, &[("fee", Phase::Ready)])]);
    let token = Some("worker-token");
    let ask = json!({ "source": "stripe", "handler": "fee", "limit": 5, "worker": "w1" });
    let (status, claimed) = server.post_as(token, "/api/v1/claims", ask.clone()).await;
    assert_eq!(status, StatusCode::OK, "{claimed}");
    let item = &claimed["items"][0];
    assert_eq!((&item["fence"], &item["attempt"]), (&json!(1), &json!(1)));
    assert_eq!(item["event"]["event_id"], "evt_1");
    assert_eq!(item["event"]["body"], r#"{"id":1}"#);
    let id = item["event"]["id"].as_str().unwrap();
    assert_eq!(item["idempotency_key"], format!("{id}:fee"));
    assert_eq!(server.store.model().workers, ["worker/w1"]);

    let job = item["job"].as_str().unwrap();
    let of = |act: &str| format!("/api/v1/claims/{job}/{act}");
    let (status, _) = server.post_as(token, &of("renew"), json!({ "fence": 1 })).await;
    assert_eq!(status, StatusCode::OK);
    for act in ["renew", "complete"] {
        let (status, problem) = server.post_as(token, &of(act), json!({ "fence": 0 })).await;
        assert_eq!(status, StatusCode::CONFLICT, "{act}");
        assert_eq!(problem["type"], "urn:hapax:problem:fence_lost");
    }
    let publish = json!([{ "type": "fee.charged", "data": { "amount": 1 } }]);
    let done = json!({ "fence": 1, "result": "ok", "publish": publish });
    for _answer_lost in 0..2 {
        let (status, settled) = server.post_as(token, &of("complete"), done.clone()).await;
        assert_eq!((status, &settled["status"]), (StatusCode::OK, &json!("done")));
    }
    let model = server.store.model();
    let [Outcome::Done { result, publish, .. }] = &model.outcomes[..] else {
        panic!("one outcome")
    };
    assert_eq!((result.as_deref(), publish.len()), (Some("ok"), 1));
}

#[tokio::test]
async fn a_failed_attempt_says_when_to_try_again() {
    let check = async |retry_in: Value, expected: Option<Retry>| {
        let server = server(vec![event("evt_1", Status::Received, &[("fee", Phase::Ready)])]);
        let ask = json!({ "source": "stripe", "handler": "fee" });
        let (_, claimed) = server.post("/api/v1/claims", ask).await;
        let path = format!("/api/v1/claims/{}/fail", claimed["items"][0]["job"].as_str().unwrap());
        let body = json!({ "fence": 1, "error": "no", "retry_in": retry_in });
        let (status, problem) = server.post(&path, body).await;
        let found = server.store.model().outcomes.pop().map(|outcome| match outcome {
            Outcome::Failed { retry, .. } => retry,
            Outcome::Done { .. } => panic!("it failed"),
        });
        assert_eq!(found, expected, "{status} {problem}");
    };
    check(Value::Null, Some(Retry::Schedule)).await;
    check(json!("5m"), Some(Retry::In(Duration::from_secs(300)))).await;
    check(json!(2), Some(Retry::In(Duration::from_secs(2)))).await;
    check(json!("never"), Some(Retry::Never)).await;
    check(json!("soon"), None).await;
}

#[tokio::test]
async fn an_attempt_may_fail_without_a_word() {
    // A worker that has no error at hand must not be refused: its job would wait out the lease.
    let server = server(vec![event("evt_1", Status::Received, &[("fee", Phase::Ready)])]);
    let ask = json!({ "source": "stripe", "handler": "fee" });
    let (_, claimed) = server.post("/api/v1/claims", ask).await;
    let path = format!("/api/v1/claims/{}/fail", claimed["items"][0]["job"].as_str().unwrap());
    let (status, problem) = server.post(&path, json!({ "fence": 1 })).await;
    assert_eq!(status, StatusCode::OK, "{problem}");
    match server.store.model().outcomes.pop() {
        Some(Outcome::Failed { error, .. }) => assert_eq!(error, "the worker gave no error"),
        other => panic!("{other:?}"),
    };
}

#[tokio::test]
async fn only_the_own_pull_handler_can_be_claimed() {
    let server = server(vec![event("evt_1", Status::Received, &[("mail", Phase::Ready)])]);
    let ask = |handler: &str| json!({ "source": "stripe", "handler": handler });
    let token = Some("worker-token");
    let (status, _) = server.post_as(token, "/api/v1/claims", ask("mail")).await;
    assert_eq!(status, StatusCode::FORBIDDEN);
    assert_eq!(server.post("/api/v1/claims", ask("mail")).await.0, StatusCode::CONFLICT);
    assert_eq!(server.post("/api/v1/claims", ask("none")).await.0, StatusCode::NOT_FOUND);
    let job = server.store.model().events[0].jobs[0].id;
    let complete = format!("/api/v1/claims/{job}/complete");
    let (status, _) = server.post_as(token, &complete, json!({ "fence": 0 })).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    for bad in [json!({ "limit": 0 }), json!({ "wait": "61s" })] {
        let mut asked = ask("fee");
        asked.as_object_mut().unwrap().extend(bad.as_object().unwrap().clone());
        assert_eq!(server.post("/api/v1/claims", asked).await.0, StatusCode::BAD_REQUEST);
    }
}

#[tokio::test]
async fn a_claim_waits_for_work_and_is_woken_by_it() {
    let server = Arc::new(server(vec![event("evt_1", Status::Processed, &[("fee", Phase::Done)])]));
    let waiting = tokio::spawn({
        let server = Arc::clone(&server);
        let ask = json!({ "source": "stripe", "handler": "fee", "wait": "60s" });
        async move { server.post("/api/v1/claims", ask).await.1 }
    });
    while server.store.model().workers.is_empty() {
        tokio::task::yield_now().await;
    }
    server.store.model().events[0].jobs[0].phase = Phase::Ready;
    server.store.arrived.notify_one();
    let claimed = tokio::time::timeout(Duration::from_secs(120), waiting).await.unwrap().unwrap();
    assert_eq!(claimed["items"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn a_worker_that_hangs_up_during_its_claim_costs_the_job_nothing() {
    let server = server(vec![event("evt_1", Status::Received, &[("fee", Phase::Ready)])]);
    server.store.claim_permits.forget_permits(100);
    let ask = json!({ "source": "stripe", "handler": "fee" });
    let asking = server.router.clone().oneshot(post_request(None, "/api/v1/claims", ask));
    let mut asking = Box::pin(asking);
    while server.unfinished.is_empty() {
        let polled = ready_at_once(asking.as_mut()).await;
        assert!(!polled, "the claim waits for its permit");
    }
    drop(asking);
    server.store.claim_permits.add_permits(1);
    server.unfinished.close();
    server.unfinished.wait().await;
    let model = server.store.model();
    let job = &model.events[0].jobs[0];
    assert_eq!((job.phase, job.progress.attempt), (Phase::Ready, 0));
}

/// Whether it is ready after one poll.
async fn ready_at_once<F: Future>(mut future: std::pin::Pin<&mut F>) -> bool {
    std::future::poll_fn(|context| std::task::Poll::Ready(future.as_mut().poll(context).is_ready()))
        .await
}

#[tokio::test]
async fn a_server_that_stops_gives_out_no_claims() {
    let server = server(vec![event("evt_1", Status::Received, &[("fee", Phase::Ready)])]);
    server.stop.cancel();
    let ask = json!({ "source": "stripe", "handler": "fee", "wait": "60s" });
    let (status, claimed) = server.post("/api/v1/claims", ask).await;
    assert_eq!((status, claimed), (StatusCode::OK, json!({ "items": [] })));
}

#[tokio::test]
async fn what_is_unfinished_for_long_is_found_behind_many_finished_ones() {
    let of = |n: usize| {
        let status = if n % 600 == 5 { Status::Failed } else { Status::Processed };
        event(&format!("evt_{n}"), status, &[])
    };
    let mut events: Vec<EventDetail> = (0..2000).map(of).collect();
    let mut fresh = event("fresh", Status::Failed, &[]);
    fresh.summary.received_at = noon() - Duration::from_secs(60);
    events.push(fresh);
    let server = server(events);
    let mut path = "/api/v1/events?unfinished_for=30m&limit=3".to_owned();
    let mut found = Vec::new();
    for _page in 0..2 {
        let (status, page) = server.get(&path).await;
        assert_eq!(status, StatusCode::OK, "{page}");
        let ids = page["items"].as_array().unwrap().iter().map(|item| item["event_id"].clone());
        found.extend(ids.map(|id| id.as_str().unwrap().to_owned()));
        let Some(next) = page["next"].as_str() else { break };
        path = format!("/api/v1/events?unfinished_for=30m&limit=3&cursor={next}");
    }
    assert_eq!(found, ["evt_1805", "evt_1205", "evt_605", "evt_5"]);
    let (status, _) = server.get("/api/v1/events?unfinished_for=long").await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn configured_handlers_are_listed() {
    let (_, listed) = server(Vec::new()).get("/api/v1/handlers").await;
    let fee = &listed["items"][0];
    assert_eq!((&fee["handler"], &fee["pull"]), (&json!("fee"), &json!(true)));
    assert_eq!(fee["lease_seconds"], 30.0);
}

#[tokio::test]
async fn statistics_are_those_of_events_that_first_came_in_the_window() {
    // An event before the window, one without work, one that failed, two that are done, and copies.
    let seen = |id: &str, source: &str, status, ago: u64, took: Option<u64>, gaps: &[u64]| {
        let mut event = event(id, status, &[]);
        let first = noon() - Duration::from_secs(ago);
        let mut times = vec![first];
        for gap in gaps {
            times.push(times[times.len() - 1] + Duration::from_secs(*gap));
        }
        event.summary.source = source.into();
        event.summary.received_at = first;
        event.summary.arrivals = times.len() as u64;
        event.summary.processed_at = took.map(|took| first + Duration::from_secs(took));
        let arrival = |at: Timestamp| ArrivalNote {
            decision: Decision::Duplicate,
            received_at: at,
            request_id: Uuid::nil(),
            remote: None,
            secret: 0,
            signed_at: None,
            body: None,
        };
        event.arrivals = times.into_iter().map(arrival).collect();
        event
    };
    let server = server(vec![
        seen("old", "stripe", Status::Processed, 3_601, Some(1), &[1; 8]),
        seen("one", "stripe", Status::Processed, 3_600, Some(2), &[10, 60]),
        seen("two", "stripe", Status::Processed, 100, Some(4), &[30]),
        seen("bad", "stripe", Status::Failed, 90, None, &[20]),
        seen("hub", "github", Status::Ignored, 80, None, &[]),
    ]);
    let (status, all) = server.get("/api/v1/stats").await;
    assert_eq!(status, StatusCode::OK, "{all}");
    assert_eq!((&all["received"], &all["unique"]), (&json!(8), &json!(4)), "{all}");
    assert_eq!((&all["duplicates"], &all["duplicate_rate"]), (&json!(4), &json!(0.5)), "{all}");
    assert_eq!((&all["sampled"], &all["window_seconds"]), (&json!(false), &json!(3600.0)));
    assert_eq!(all["sources"]["github"]["unique"], 1);
    assert_eq!(all["sources"]["github"]["success_rate"], Value::Null, "nothing was tried");
    assert_eq!(all["sources"]["github"]["processing_seconds"]["p50"], Value::Null);
    assert!(all["sources"]["quiet"].is_null(), "{all}");

    let (_, stripe) = server.get("/api/v1/stats?source=stripe&window=1h").await;
    assert_eq!((&stripe["received"], &stripe["unique"]), (&json!(7), &json!(3)), "{stripe}");
    assert_eq!(stripe["success_rate"], json!(2.0 / 3.0));
    assert_eq!(stripe["failed_verifications"], 7);
    assert_eq!(stripe["failed_verifications_since"], noon().to_string());
    assert_eq!(stripe["processing_seconds"], json!({ "avg": 3.0, "p50": 2.0, "p99": 4.0 }));
    assert_eq!(stripe["copies_per_event"], json!(7.0 / 3.0));
    assert_eq!(stripe["gaps_seconds"], json!([20.0, 60.0]));
    assert!(stripe["sources"].is_null(), "{stripe}");

    let (_, minute) = server.get("/api/v1/stats?source=stripe&window=95s").await;
    assert_eq!((&minute["unique"], &minute["success_rate"]), (&json!(1), &json!(0.0)));
    let (status, quiet) = server.get("/api/v1/stats?source=quiet").await;
    assert_eq!((status, &quiet["received"]), (StatusCode::OK, &json!(0)));
    assert_eq!(server.get("/api/v1/stats?source=strpe").await.0, StatusCode::NOT_FOUND);
    for bad in ["window=0s", "window=soon", "windw=1h"] {
        let (status, _) = server.get(&format!("/api/v1/stats?{bad}")).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{bad}");
    }
}

#[tokio::test]
async fn alerts_say_what_is_wrong_and_where_the_worst_first() {
    let server = server(vec![event("evt_1", Status::Dead, &[("fee", Phase::Dead)])]);
    let (status, alerts) = server.get("/api/v1/alerts").await;
    assert_eq!(status, StatusCode::OK, "{alerts}");
    let items = alerts["items"].as_array().unwrap();
    let names: Vec<_> = items.iter().map(|alert| alert["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["clock_skew", "dead_letters"], "{alerts}");
    assert_eq!((&items[0]["severity"], &items[0]["source"]), (&json!("critical"), &Value::Null));
    assert_eq!((&items[1]["source"], &items[1]["lane"]), (&json!("stripe"), &json!("stripe/fee")));
    assert_eq!(items[1]["since"], noon().to_string());
}

#[tokio::test]
async fn a_lane_says_whether_anybody_will_ever_work_on_it() {
    let jobs = [("fee", Phase::Ready), ("gone", Phase::Dead)];
    let server = server(vec![event("evt_1", Status::Dead, &jobs)]);
    let (_, lanes) = server.get("/api/v1/lanes").await;
    let lane = |at: usize| {
        let lane = &lanes["items"][at];
        (lane["handler"].as_str().unwrap(), lane["configured"].as_bool().unwrap())
    };
    assert_eq!((lane(0), lane(1)), (("fee", true), ("gone", false)), "{lanes}");
    assert_eq!((&lanes["items"][0]["ready"], &lanes["items"][1]["dead"]), (&json!(1), &json!(1)));
}
