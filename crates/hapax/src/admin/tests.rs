//! The routes of the admin API, over HTTP requests to the router, on the model of a store in memory.

mod browser;
mod pages;
mod portal;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use arc_swap::ArcSwap;
use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::http::{Request, StatusCode};
use hapax_core::job::{HandlerName, Phase, Policy, Retry, WorkLocation};
use hapax_core::log_buckets::bucket_of;
use hapax_core::search::SearchFields;
use hapax_core::secret::Secret;
use hapax_core::store::{
    ClaimAsk, EventDetail, EventName, HandlerRef, HandlerSpec, Inspect as _, JobDetail, Lookup,
    NewJob, Outcome, Settlement, Store as _, TallyKind, TrafficCount, TrafficCounts,
    TrafficFigures, TrafficHistory as _, Work as _,
};
use hapax_core::{SourceName, Timestamp};
use hapax_engine::{Now, Pulled, Readiness};
use hapax_sim::{Act, FaultyStore, SignedEvent};
use hapax_store::MemoryStore;
use http_body_util::BodyExt as _;
use hyper::body::Frame;
use serde_json::{Value, json};
use tokio::sync::{Semaphore, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt as _;
use uuid::Uuid;

use super::{Admin, Authorizer, Redactions, SharedPages, WithoutToken, portal_router, router};
use crate::alerts::{AlertMonitor, AlertRules, Inputs};
use crate::config::{Permission, Redaction};
use crate::rejection_recorder::RejectionRecorder;
use crate::sending::SharedSending;
use crate::tenant_sources::{TenantRules, TenantSources};
use crate::traffic_recorder::TrafficRecorder;

/// An event to store, with its jobs and the phase in which each of them is.
struct NewEvent {
    event: SignedEvent,
    jobs: Vec<(&'static str, JobState)>,
    /// When its copies arrive.
    copies: Vec<Timestamp>,
}

/// The progress of a job.
#[derive(Debug, Clone, Copy)]
enum JobState {
    Ready,
    /// The first attempt failed, and the next is an hour away.
    Failed,
    Dead,
    /// The job ended at this time.
    Done(Timestamp),
}

fn noon() -> Timestamp {
    "2026-03-01T12:00:00Z".parse().unwrap()
}

/// The body of every event.
const BODY: &str = r#"{"id":1,"type":"payout.paid"}"#;

/// An event of an hour ago. A late event waits in review.
fn event(event_id: &str, jobs: &[(&'static str, JobState)]) -> NewEvent {
    let mut event = SignedEvent::new("stripe", event_id, noon() - Duration::from_secs(3600));
    event.type_at = Some("/type");
    event.headers = "content-type: application/json\nx-a: b: c".into();
    event.body = BODY.into();
    NewEvent { event, jobs: jobs.to_vec(), copies: Vec::new() }
}

fn late_event(event_id: &str) -> NewEvent {
    let mut late = event(event_id, &[]);
    late.event.is_late = true;
    late
}

/// The store of a server: the model in memory, with injected faults and a clock that the test sets.
struct TestStore {
    faults: Arc<FaultyStore<MemoryStore>>,
    clock: Arc<Mutex<Timestamp>>,
}

impl TestStore {
    async fn with(events: Vec<NewEvent>) -> Self {
        let clock = Arc::new(Mutex::new(noon()));
        let seconds = Arc::clone(&clock);
        let memory = MemoryStore::with_clock(Arc::new(move || *seconds.lock().unwrap()));
        let store = Self { faults: Arc::new(FaultyStore::new(memory)), clock };
        let specs = ["stripe", "github"].into_iter().flat_map(|source| {
            ["fee", "mail", "gone"].map(|handler| spec(source, handler, WorkLocation::Pulled))
        });
        store.faults.inner().announce(specs.collect()).await.unwrap();
        for event in events {
            store.put(event).await;
        }
        store
    }

    /// The clock that [`TestStore::set_clock`] sets.
    fn now(&self) -> Now {
        let clock = Arc::clone(&self.clock);
        Arc::new(move || *clock.lock().unwrap())
    }

    fn set_clock(&self, now: Timestamp) {
        *self.clock.lock().unwrap() = now;
    }

    /// Stores the event and brings its jobs into their states. The time is noon again afterwards.
    async fn put(&self, new: NewEvent) {
        let job =
            |handler| NewJob { handler: HandlerName::new(handler), place: None, hopeless: None };
        let jobs: Vec<NewJob> = new.jobs.iter().map(|(handler, _)| job(handler)).collect();
        let store = self.faults.inner();
        self.set_clock(new.event.received_at);
        store.ingest(new.event.ingest(jobs)).await.unwrap();
        for received_at in new.copies {
            let copy = SignedEvent { received_at, ..new.event.clone() };
            store.ingest(copy.ingest(Vec::new())).await.unwrap();
        }
        for (handler, state) in new.jobs {
            match state {
                JobState::Ready => {}
                JobState::Failed => {
                    let retry = Retry::In(Duration::from_secs(3600));
                    self.attempt(&new.event, handler, noon(), failed(retry)).await;
                }
                JobState::Dead => {
                    self.attempt(&new.event, handler, noon(), failed(Retry::Never)).await;
                }
                JobState::Done(at) => self.attempt(&new.event, handler, at, done()).await,
            }
        }
        self.set_clock(noon());
    }

    /// Makes one attempt at the handler's only due job. The attempt begins and ends at this time.
    async fn attempt(&self, event: &SignedEvent, handler: &str, at: Timestamp, outcome: Outcome) {
        self.set_clock(at);
        let handler = HandlerRef {
            source: SourceName::new(&event.source),
            handler: HandlerName::new(handler),
        };
        let ask = ClaimAsk { handler, limit: 2, worker: "w".into() };
        let claims = self.faults.inner().claim(ask).await.unwrap();
        let [claim] = &claims[..] else { panic!("one job is due: {claims:?}") };
        assert_eq!(&*claim.event.key.event_id, event.event_id);
        let settled = self.faults.inner().settle(claim.job, claim.fence, outcome).await.unwrap();
        assert_eq!(settled, Settlement::Recorded);
    }

    async fn event(&self, event_id: &str) -> EventDetail {
        match self.faults.inner().event(&EventName::Theirs(event_id.into())).await.unwrap() {
            Lookup::One(event) => event,
            other => panic!("{event_id} is stored once: {other:?}"),
        }
    }

    /// The first job of the event, by handler.
    async fn job(&self, event_id: &str) -> JobDetail {
        self.event(event_id).await.jobs.remove(0)
    }
}

fn failed(retry: Retry) -> Outcome {
    Outcome::Failed { error: "no".into(), retry, answer: None }
}

fn done() -> Outcome {
    Outcome::Done { result: None, publish: Vec::new(), answer: None }
}

fn spec(source: &str, handler: &str, workplace: WorkLocation) -> HandlerSpec {
    HandlerSpec {
        handler: HandlerRef { source: SourceName::new(source), handler: HandlerName::new(handler) },
        policy: Policy { retry: vec![Duration::ZERO; 3], lease: Duration::from_secs(30) },
        order: None,
        workplace,
    }
}

/// A server on loopback. The handler `fee` is pulled, and `mail` runs inside the server. Both take every event.
struct Server {
    store: TestStore,
    router: Router,
    portal: Router,
    portal_counts: Arc<Semaphore>,
    search_fields: Arc<ArcSwap<SearchFields>>,
    stop: CancellationToken,
    unfinished: TaskTracker,
}

/// A server that needs no token on loopback.
async fn server(events: Vec<NewEvent>) -> Server {
    server_with(events, WithoutToken::FromLoopback).await
}

/// A server with one token for each permission: `ops-token` permits operating, and so on.
async fn server_with(events: Vec<NewEvent>, without_token: WithoutToken) -> Server {
    let store = TestStore::with(events).await;
    let claim = Permission::Claim { source: "stripe".into(), handler: "fee".into() };
    let tokens = [
        ("ops", Secret::new("ops-token"), [Permission::Operate]),
        ("worker", Secret::new("worker-token"), [claim]),
        ("reader", Secret::new("reader-token"), [Permission::Read]),
        ("app", Secret::new("app-token"), [Permission::Publish]),
        ("root", Secret::new("root-token"), [Permission::Admin]),
    ];
    let tokens = tokens.iter().map(|(name, value, allow)| (*name, value, &allow[..]));
    let authorizer = Authorizer::new([127, 0, 0, 1].into(), without_token, tokens);
    let stop = CancellationToken::new();
    let readiness = Arc::new(Readiness::new(stop.clone()));
    readiness.opened();
    let unfinished = TaskTracker::new();
    let portal_counts = Arc::new(Semaphore::new(1));
    let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
    let tenants = TenantSources::new(
        Arc::clone(&store.faults),
        TenantRules::none("no vault in this test"),
        Box::new(|_, _| {}),
    );
    let pointer = |text| hapax_core::json::Pointer::parse(text).expect("a pointer");
    let pointers = ["/customer", "/email"].map(pointer).into();
    let fields = SearchFields::new([(SourceName::new("stripe"), pointers)]);
    let search_fields = Arc::new(ArcSwap::from_pointee(fields));
    let admin = Arc::new(Admin {
        store: Arc::clone(&store.faults),
        authorizer: Arc::new(authorizer),
        site: Arc::default(),
        redactions: Arc::new(Redactions::new([(
            "stripe".to_owned(),
            Redaction {
                pointers: vec![hapax_core::json::Pointer::parse("/email").expect("a pointer")],
                headers: vec!["x-user".to_owned()],
            },
        )])),
        search_fields: Arc::clone(&search_fields),
        retry_schedules: Arc::default(),
        portal_url: Some("https://webhooks.example.com".to_owned()),
        portal_counts: Arc::clone(&portal_counts),
        shared_pages: Arc::new(SharedPages::new(store.now())),
        readiness,
        sending: Arc::new(SharedSending::new(Err("no vault in this test".to_owned()))),
        tenants: Arc::new(tenants),
        rejections: Arc::new(RejectionRecorder::new(Box::new(Vec::new))),
        metrics: recorder.handle(),
        handlers: Arc::new(|_, _, _| {
            let new = |handler| NewJob {
                handler: HandlerName::new(handler),
                place: None,
                hopeless: None,
            };
            Some(vec![new("fee"), new("mail")])
        }),
        configured: Arc::new(move || {
            vec![
                spec("stripe", "fee", WorkLocation::Pulled),
                spec("stripe", "mail", WorkLocation::Called),
            ]
        }),
        watch: Arc::new(AlertMonitor::new(
            Inputs {
                node: Uuid::from_u128(1),
                node_name: "host-1:8080".to_owned(),
                traffic: Arc::new(TrafficRecorder::new(
                    Uuid::from_u128(1),
                    Box::new(|| {
                        let figures = |rejected| TrafficFigures {
                            counts: TrafficCounts { rejected, ..TrafficCounts::default() },
                            ..TrafficFigures::default()
                        };
                        let named =
                            |source: &str, rejected| (SourceName::new(source), figures(rejected));
                        BTreeMap::from([named("quiet", 0), named("stripe", 7)])
                    }),
                    Box::new(|| ["quiet", "stripe"].map(SourceName::new).into()),
                    Arc::new(noon),
                )),
                clock_offset_seconds: Box::new(|| Some(-90)),
                known: Box::new(Vec::new),
                tenant_secrets: Box::new(Vec::new),
                sending: Arc::new(SharedSending::new(Err("no vault in this test".to_owned()))),
                log: None,
                now: Arc::new(noon),
            },
            AlertRules::default(),
        )),
        refetch: Arc::new(|_, claims| {
            let plain = |claim| Pulled { claim, current: None };
            Box::pin(std::future::ready(claims.into_iter().map(plain).collect()))
        }),
        tried: Arc::new(|_, _, _, _| {}),
        now: Arc::new(noon),
        unfinished: unfinished.clone(),
        // A server in dev mode is open and has such a command.
        first_command: (without_token == WithoutToken::FromLoopback)
            .then(|| "hapax send stripe".to_owned()),
        public_url: Arc::new(ArcSwap::from_pointee("http://127.0.0.1:8080".to_owned())),
    });
    let portal = portal_router(Arc::clone(&admin), Arc::default());
    let router = router(admin);
    Server { store, router, portal, portal_counts, search_fields, stop, unfinished }
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

/// A body that its client does not send until the test says so.
struct HeldBody {
    /// Notified when the server begins to read.
    reading: Option<oneshot::Sender<()>>,
    bytes: oneshot::Receiver<Bytes>,
    has_ended: bool,
}

impl HeldBody {
    /// The body, a signal that the server has begun to read it, and a sender of its bytes.
    fn with_sender() -> (Body, oneshot::Receiver<()>, oneshot::Sender<Bytes>) {
        let ((reading, is_read), (sender, bytes)) = (oneshot::channel(), oneshot::channel());
        let body = Self { reading: Some(reading), bytes, has_ended: false };
        (Body::new(body), is_read, sender)
    }
}

impl HttpBody for HeldBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Some(reading) = self.reading.take() {
            reading.send(()).expect("the test waits");
        }
        if self.has_ended {
            return Poll::Ready(None);
        }
        let bytes = ready!(Pin::new(&mut self.bytes).poll(context)).expect("the test sends it");
        self.has_ended = true;
        Poll::Ready(Some(Ok(Frame::data(bytes))))
    }
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
async fn replaying_a_done_job_does_nothing_unless_it_is_forced() {
    let jobs = [("fee", JobState::Done(noon())), ("mail", JobState::Dead)];
    let server = server(vec![event("evt_1", &jobs)]).await;
    let path = "/api/v1/events/evt_1/replay";

    let (status, dry) = server.post(path, json!({ "dry_run": true })).await;
    assert_eq!(status, StatusCode::OK, "{dry}");
    assert_eq!(effects(&dry), [("fee", "already_applied"), ("mail", "would_run")]);
    assert_eq!(server.store.event("evt_1").await.jobs[1].phase, Phase::Dead);

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
    let jobs = [("fee", JobState::Dead), ("mail", JobState::Dead)];
    let server = server(vec![event("evt_1", &jobs)]).await;
    let path = "/api/v1/events/evt_1/replay";
    let one = json!({ "reason": "fixed", "handler": "fee" });
    server.post_as(Some("ops-token"), path, one).await;
    server.post(path, json!({})).await;
    let (_, shown) = server.get("/api/v1/events/evt_1").await;
    assert_eq!(shown["actions"][0]["who"], "ops");
    assert_eq!(shown["actions"][0]["reason"], "fixed");
    assert_eq!(shown["actions"][1]["who"], "loopback");
    assert_eq!(shown["jobs"][0]["handler"], "fee");
    assert_eq!(shown["headers"][1], json!(["x-a", "b: c"]));
}

#[tokio::test]
async fn an_event_shows_the_attempts_of_all_its_jobs_in_their_order() {
    // One answer must show when each handler ran, without a query for each job.
    let both = event("evt_1", &[("fee", JobState::Ready), ("mail", JobState::Ready)]);
    let signed = both.event.clone();
    let server = server(vec![both]).await;
    let attempts = [
        (1, "fee", failed(Retry::Schedule)),
        (2, "mail", done()),
        (3, "fee", failed(Retry::Never)),
    ];
    for (seconds, handler, outcome) in attempts {
        let at = noon() + Duration::from_secs(seconds);
        server.store.attempt(&signed, handler, at, outcome).await;
    }
    let (_, shown) = server.get("/api/v1/events/evt_1").await;
    let attempts = shown["attempts"].as_array().unwrap().iter();
    let found: Vec<_> = attempts.map(|it| (it["handler"].clone(), it["attempt"].clone())).collect();
    let of = |handler: &str, attempt: u32| (json!(handler), json!(attempt));
    assert_eq!(found, [of("fee", 1), of("mail", 1), of("fee", 2)]);
    assert_eq!(shown["attempts"][2]["job"], shown["jobs"][0]["id"]);
}

#[tokio::test]
async fn a_misspelt_field_is_refused_by_its_name() {
    // A misspelt `dry_run` must not become a run.
    let server = server(vec![event("evt_1", &[("fee", JobState::Dead)])]).await;
    for path in ["events/evt_1/replay", "events/evt_1/approve", "jobs/replay", "claims"] {
        let (status, problem) =
            server.post(&format!("/api/v1/{path}"), json!({ "dryrun": true })).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{path}");
        assert!(problem["detail"].as_str().unwrap().contains("`dryrun`"), "{problem}");
    }
    let (status, problem) = server.get("/api/v1/jobs?stat=dead").await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert!(problem["detail"].as_str().unwrap().contains("`stat`"), "{problem}");
    assert_eq!(server.store.job("evt_1").await.phase, Phase::Dead);
}

#[tokio::test]
async fn an_array_is_no_request() {
    // If an array were read as the fields in their order, `[]` would be a run and `[true]` a dry
    // run.
    let server = server(vec![event("evt_1", &[("fee", JobState::Dead)])]).await;
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
    assert_eq!(server.store.job("evt_1").await.phase, Phase::Dead);
}

#[tokio::test]
async fn a_path_or_query_that_is_not_understood_is_a_problem_too() {
    // If the router itself refused these requests, the answer would be its own plain text.
    let server = server(vec![event("evt_1", &[("fee", JobState::Dead)])]).await;
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
async fn a_request_that_a_foreign_page_can_send_is_refused() {
    let server = server(vec![event("evt_1", &[("fee", JobState::Dead)])]).await;
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
    assert_eq!(server.store.job("evt_1").await.phase, Phase::Dead);
}

#[tokio::test]
async fn a_token_that_may_only_claim_neither_reads_nor_operates() {
    let server = server(vec![event("evt_1", &[("fee", JobState::Dead)])]).await;
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
    let mut other = event("1", &[("fee", JobState::Dead)]);
    other.event.source = "github".into();
    let server = server(vec![late_event("1"), other]).await;
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
    let server = server(vec![late_event("evt_1")]).await;
    let (status, _) = server.post("/api/v1/events/evt_1/replay", json!({ "force": true })).await;
    assert_eq!(status, StatusCode::CONFLICT, "a replay is no way around review");
    let approve = "/api/v1/events/evt_1/approve";
    let (status, first) = server.post(approve, json!({ "reason": "known" })).await;
    assert_eq!((status, &first["changed"]), (StatusCode::OK, &json!(true)), "{first}");
    assert_eq!(server.store.event("evt_1").await.jobs.len(), 2);
    let (status, second) = server.post(approve, json!({})).await;
    assert_eq!((status, &second["changed"]), (StatusCode::OK, &json!(false)), "{second}");
    assert_eq!(server.store.event("evt_1").await.jobs.len(), 2);
    let (status, _) = server.post("/api/v1/events/evt_1/reject", json!({ "reason": "no" })).await;
    assert_eq!(status, StatusCode::CONFLICT);
}

#[tokio::test]
async fn a_rejection_needs_a_reason_and_is_final() {
    let server = server(vec![late_event("evt_1")]).await;
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
        event("evt_1", &[("fee", JobState::Dead), ("mail", JobState::Done(noon()))]),
        event("evt_2", &[("fee", JobState::Dead)]),
        event("evt_3", &[("gone", JobState::Dead)]),
    ];
    let server = server(events).await;
    let (_, dead) = server.get("/api/v1/jobs?status=dead").await;
    assert_eq!(dead["items"].as_array().unwrap().len(), 3);
    let (_, dry) = server.post("/api/v1/jobs/replay", json!({ "dry_run": true })).await;
    // The newest first.
    let expected = [("gone", "no_handler"), ("fee", "would_run"), ("fee", "would_run")];
    assert_eq!(effects(&dry), expected);
    let (_, one) =
        server.post("/api/v1/jobs/replay", json!({ "handler": "fee", "limit": 1 })).await;
    assert_eq!(effects(&one), [("fee", "runs")]);
    let (_, rest) =
        server.post("/api/v1/jobs/replay", json!({ "status": "dead", "source": "stripe" })).await;
    assert_eq!(effects(&rest), [("gone", "no_handler"), ("fee", "runs")]);

    let gone = dead["items"][0]["id"].as_str().unwrap();
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
    let server = server(vec![event("evt_1", &[("fee", JobState::Ready)])]).await;
    let token = Some("worker-token");
    let ask = json!({ "source": "stripe", "handler": "fee", "limit": 5, "worker": "w1" });
    let (status, claimed) = server.post_as(token, "/api/v1/claims", ask.clone()).await;
    assert_eq!(status, StatusCode::OK, "{claimed}");
    let item = &claimed["items"][0];
    assert_eq!((&item["fence"], &item["attempt"]), (&json!(1), &json!(1)));
    assert_eq!(item["event"]["event_id"], "evt_1");
    assert_eq!(item["event"]["body"], BODY);
    let id = item["event"]["id"].as_str().unwrap();
    assert_eq!(item["idempotency_key"], format!("{id}:fee"));
    let [asked] = &server.store.faults.arguments(Act::Claim)[..] else { panic!("one claim") };
    assert!(asked.contains(r#"worker: "worker/w1""#), "{asked}");

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
    let event = server.store.event("evt_1").await;
    let [job] = &event.jobs[..] else { panic!("one job") };
    assert_eq!((job.result.as_deref(), job.attempts.len()), (Some("ok"), 1));
    assert_eq!(event.messages.len(), 1, "published once");
}

#[tokio::test]
async fn a_failed_attempt_says_when_to_try_again() {
    let check = async |retry_in: Value, expected: Option<Retry>| {
        let server = server(vec![event("evt_1", &[("fee", JobState::Ready)])]).await;
        let ask = json!({ "source": "stripe", "handler": "fee" });
        let (_, claimed) = server.post("/api/v1/claims", ask).await;
        let path = format!("/api/v1/claims/{}/fail", claimed["items"][0]["job"].as_str().unwrap());
        let body = json!({ "fence": 1, "error": "no", "retry_in": retry_in });
        let (status, problem) = server.post(&path, body).await;
        let settled = server.store.faults.arguments(Act::Settle);
        assert_eq!(settled.len(), usize::from(expected.is_some()), "{status} {problem}");
        for (settled, retry) in settled.iter().zip(expected) {
            assert!(settled.contains("Failed {"), "{settled}");
            assert!(settled.contains(&format!("retry: {retry:?}")), "{settled}");
        }
    };
    check(Value::Null, Some(Retry::Schedule)).await;
    check(json!("5m"), Some(Retry::In(Duration::from_secs(300)))).await;
    check(json!(2), Some(Retry::In(Duration::from_secs(2)))).await;
    check(json!("never"), Some(Retry::Never)).await;
    check(json!("soon"), None).await;
}

#[tokio::test]
async fn an_attempt_may_fail_without_an_error_text() {
    // A worker that reports no error text must not be refused: its job would wait for the end of
    // the lease.
    let server = server(vec![event("evt_1", &[("fee", JobState::Ready)])]).await;
    let ask = json!({ "source": "stripe", "handler": "fee" });
    let (_, claimed) = server.post("/api/v1/claims", ask).await;
    let path = format!("/api/v1/claims/{}/fail", claimed["items"][0]["job"].as_str().unwrap());
    let (status, problem) = server.post(&path, json!({ "fence": 1 })).await;
    assert_eq!(status, StatusCode::OK, "{problem}");
    let error = server.store.job("evt_1").await.error;
    assert_eq!(error.as_deref(), Some("the worker gave no error"));
}

#[tokio::test]
async fn only_the_own_pull_handler_can_be_claimed() {
    let server = server(vec![event("evt_1", &[("mail", JobState::Ready)])]).await;
    let ask = |handler: &str| json!({ "source": "stripe", "handler": handler });
    let token = Some("worker-token");
    let (status, _) = server.post_as(token, "/api/v1/claims", ask("mail")).await;
    assert_eq!(status, StatusCode::FORBIDDEN);
    assert_eq!(server.post("/api/v1/claims", ask("mail")).await.0, StatusCode::CONFLICT);
    assert_eq!(server.post("/api/v1/claims", ask("none")).await.0, StatusCode::NOT_FOUND);
    let job = server.store.job("evt_1").await.id;
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
    let done = event("evt_1", &[("fee", JobState::Done(noon()))]);
    let server = Arc::new(server(vec![done]).await);
    let waiting = tokio::spawn({
        let server = Arc::clone(&server);
        let ask = json!({ "source": "stripe", "handler": "fee", "wait": "60s" });
        async move { server.post("/api/v1/claims", ask).await.1 }
    });
    server.store.faults.until(|faults| faults.ended(Act::Claim) > 0).await;
    server.store.put(event("evt_2", &[("fee", JobState::Ready)])).await;
    let claimed = tokio::time::timeout(Duration::from_secs(120), waiting).await.unwrap().unwrap();
    assert_eq!(claimed["items"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn a_worker_that_hangs_up_during_its_claim_costs_the_job_nothing() {
    let server = server(vec![event("evt_1", &[("fee", JobState::Ready)])]).await;
    let permits = server.store.faults.block(Act::Claim);
    let ask = json!({ "source": "stripe", "handler": "fee" });
    let asking = server.router.clone().oneshot(post_request(None, "/api/v1/claims", ask));
    let mut asking = Box::pin(asking);
    while server.unfinished.is_empty() {
        let polled = ready_at_once(asking.as_mut()).await;
        assert!(!polled, "the claim waits for its permit");
    }
    drop(asking);
    permits.add_permits(1);
    server.unfinished.close();
    server.unfinished.wait().await;
    let job = server.store.job("evt_1").await;
    assert_eq!((job.phase, job.progress.attempt), (Phase::Ready, 0));
}

/// Whether the future is ready after one poll.
async fn ready_at_once<F: Future>(mut future: std::pin::Pin<&mut F>) -> bool {
    std::future::poll_fn(|context| std::task::Poll::Ready(future.as_mut().poll(context).is_ready()))
        .await
}

#[tokio::test]
async fn a_server_that_stops_gives_out_no_claims() {
    let server = server(vec![event("evt_1", &[("fee", JobState::Ready)])]).await;
    server.stop.cancel();
    let ask = json!({ "source": "stripe", "handler": "fee", "wait": "60s" });
    let (status, claimed) = server.post("/api/v1/claims", ask).await;
    assert_eq!((status, claimed), (StatusCode::OK, json!({ "items": [] })));
}

#[tokio::test]
async fn an_event_unfinished_for_long_is_found_behind_many_finished_ones() {
    let failed = [("fee", JobState::Failed)];
    let of = |n: usize| event(&format!("evt_{n}"), if n % 600 == 5 { &failed } else { &[] });
    let mut events: Vec<NewEvent> = (0..2000).map(of).collect();
    let mut fresh = event("fresh", &failed);
    fresh.event.received_at = noon() - Duration::from_secs(60);
    events.push(fresh);
    let server = server(events).await;
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
    let (_, listed) = server(Vec::new()).await.get("/api/v1/handlers").await;
    let fee = &listed["items"][0];
    assert_eq!((&fee["handler"], &fee["pull"]), (&json!("fee"), &json!(true)));
    assert_eq!(fee["lease_seconds"], 30.0);
}

#[tokio::test]
async fn statistics_are_what_all_nodes_counted_in_the_window() {
    // Two nodes have counted, one of them also before the window. The gaps come from the events.
    let ago = |seconds: u64| noon() - Duration::from_secs(seconds);
    let seen = |id: &str, source: &str, first: Timestamp, jobs: &[_], gaps: &[u64]| {
        let mut event = event(id, jobs);
        event.event.source = source.into();
        event.event.received_at = first;
        let after = |at: &mut Timestamp, gap: &u64| {
            *at += Duration::from_secs(*gap);
            Some(*at)
        };
        event.copies = gaps.iter().scan(first, after).collect();
        event
    };
    let server = server(vec![
        seen("old", "stripe", ago(3_601), &[], &[1; 8]),
        seen("one", "stripe", ago(3_600), &[], &[10, 60]),
        seen("two", "stripe", ago(100), &[], &[30]),
        seen("bad", "stripe", ago(90), &[], &[20]),
        seen("hub", "github", ago(80), &[], &[]),
    ])
    .await;
    // The counts of two nodes. The first minute is before the window of an hour.
    let minute = |source: &str, at, counts, processing: &[u64]| {
        let mut figures = TrafficFigures { counts, ..TrafficFigures::default() };
        for seconds in processing {
            let took = Duration::from_secs(*seconds);
            figures.counts.processing_micros += 1_000_000 * seconds;
            figures.tallies.count(TallyKind::Processing, bucket_of(took), 1);
            figures.tallies.count(TallyKind::Ack, bucket_of(Duration::from_millis(2)), 1);
            figures.counts.ack_micros += 2_000;
        }
        figures.tallies.count(TallyKind::Rejected, 1, figures.counts.rejected);
        figures.gauges.last_arrival = 1_772_366_000 + figures.counts.new;
        TrafficCount { source: SourceName::new(source), at, figures }
    };
    let counts = |new, copies, succeeded, retrying| TrafficCounts {
        new,
        copies,
        succeeded,
        retrying,
        ..TrafficCounts::default()
    };
    for (node, minutes) in [
        (
            8,
            vec![
                minute("stripe", ago(3_660), counts(100, 100, 100, 0), &[1; 100]),
                minute("stripe", ago(3_600), counts(1, 2, 1, 0), &[2]),
            ],
        ),
        (
            9,
            vec![
                minute(
                    "stripe",
                    ago(100),
                    TrafficCounts { rejected: 2, ..counts(2, 2, 1, 1) },
                    &[4],
                ),
                minute("github", ago(80), counts(1, 0, 0, 0), &[]),
            ],
        ),
    ] {
        let store = server.store.faults.inner();
        store.record_traffic(Uuid::from_u128(node), minutes).await.unwrap();
    }
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
    assert_eq!(stripe["success_rate"], json!(2.0 / 3.0), "one is being retried");
    assert_eq!(stripe["failed_verifications"], 9, "this node has counted 7 of them");
    assert_eq!(stripe["failed_verifications_by_reason"], json!({ "signature": 2 }));
    assert_eq!(stripe["since"], "2026-03-01T11:00:00Z");
    assert_eq!(stripe["failed_verifications_since"], "2026-03-01T11:00:00Z");
    let processing = &stripe["processing_seconds"];
    assert_eq!(processing["avg"], json!(3.0));
    let is_about =
        |value: &Value, seconds: f64| (value.as_f64().unwrap() / seconds - 1.0).abs() <= 0.125;
    assert!(is_about(&processing["p50"], 2.0) && is_about(&processing["p99"], 4.0), "{stripe}");
    assert!(is_about(&stripe["ack_seconds"]["p99"], 0.002), "{stripe}");
    assert_eq!(stripe["copies_per_event"], json!(7.0 / 3.0));
    assert_eq!(stripe["gaps_seconds"], json!([20.0, 60.0]));
    assert!(stripe["sources"].is_null(), "{stripe}");

    let (_, minute) = server.get("/api/v1/stats?source=stripe&window=95s").await;
    assert_eq!((&minute["unique"], &minute["success_rate"]), (&json!(2), &json!(0.5)));
    let (status, quiet) = server.get("/api/v1/stats?source=quiet").await;
    assert_eq!((status, &quiet["received"]), (StatusCode::OK, &json!(0)));
    assert_eq!(server.get("/api/v1/stats?source=strpe").await.0, StatusCode::NOT_FOUND);
    for bad in ["window=0s", "window=soon", "windw=1h"] {
        let (status, _) = server.get(&format!("/api/v1/stats?{bad}")).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{bad}");
    }
}

#[tokio::test]
async fn alerts_name_the_problem_and_its_place_with_the_worst_first() {
    let server = server(vec![event("evt_1", &[("fee", JobState::Dead)])]).await;
    let (status, alerts) = server.get("/api/v1/alerts").await;
    assert_eq!(status, StatusCode::OK, "{alerts}");
    let items = alerts["items"].as_array().unwrap();
    let names: Vec<_> = items.iter().map(|alert| alert["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["clock_skew", "dead_letters"], "{alerts}");
    assert_eq!((&items[0]["severity"], &items[0]["source"]), (&json!("critical"), &Value::Null));
    assert_eq!((&items[1]["source"], &items[1]["lane"]), (&json!("stripe"), &json!("stripe/fee")));
    assert_eq!(items[1]["since"], noon().to_string());
    // If the store cannot be read, the known problems must still be listed.
    for act in [Act::ListEndpoints, Act::ListAlerts, Act::NoteAlerts, Act::CheckIn] {
        let gone = hapax_core::store::StoreError::Unavailable("gone".into());
        server.store.faults.fail(act, gone);
    }
    let (status, alerts) = server.get("/api/v1/alerts").await;
    assert_eq!((status, alerts["items"].as_array().unwrap().len()), (StatusCode::OK, 2));
    assert!(alerts["reach"]["problem"].as_str().unwrap().contains("cannot be read"), "{alerts}");
}

#[tokio::test]
async fn a_lane_says_whether_its_handler_is_configured() {
    let jobs = [("fee", JobState::Ready), ("gone", JobState::Dead)];
    let server = server(vec![event("evt_1", &jobs)]).await;
    let (_, lanes) = server.get("/api/v1/lanes").await;
    let lane = |at: usize| {
        let lane = &lanes["items"][at];
        (lane["handler"].as_str().unwrap(), lane["configured"].as_bool().unwrap())
    };
    assert_eq!((lane(0), lane(1)), (("fee", true), ("gone", false)), "{lanes}");
    assert_eq!((&lanes["items"][0]["ready"], &lanes["items"][1]["dead"]), (&json!(1), &json!(1)));
}
