//! The workers through their public interface: a store with injected faults on one side, an app on a real
//! socket on the other.

use std::net::SocketAddr;
use std::pin::Pin;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::jobs::{JobStore, NewEvent, TestStore, event};
use crate::support::{Wire, within};
use bytes::Bytes;
use hapax_core::handler::{
    Dialect, Handler, HandlerKind, HttpTarget, Refetch, RefetchUrl, RustHandler, RustOutcome,
    SignAs, SqlProgram, TypeFilter,
};
use hapax_core::job::{HandlerName, JobId, Phase, Policy};
use hapax_core::secret::{ActiveSecret, Secret};
use hapax_core::source::SourceSpec;
use hapax_core::store::{
    Action, Claim, ClaimAsk, EventFilter, ExpiryAsk, HandlerRef, Horizon, Inspect as _, JobDetail,
    Store as _, TenantDeletions as _, Verdict, Work as _,
};
use hapax_core::{Arrival, Source, SourceName, Tenant, Timestamp, Verified, verify};
use hapax_engine::limits::{PRUNE_BATCH, PRUNE_PAUSE, SQL_SLICE};
use hapax_engine::{
    AnswerMode, EventWaiters, HttpLimits, Ingress, Janitor, LaneSpec, Outbound, Retention,
    RouteSpec, Routes, RoutesSpec, Workers, serve_ingress,
};
use hapax_sim::{Act, FaultyStore, SignedEvent};
use hapax_store::MemoryStore;
use http::{HeaderMap, HeaderName, Method, Request, Response, Uri};
use http_body_util::{BodyExt, Full};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

/// A request as the app received it.
#[derive(Debug, Clone)]
struct Call {
    method: Method,
    path: String,
    headers: HeaderMap,
    body: Bytes,
}

impl Call {
    fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }
}

/// The user's app.
struct TheApp {
    address: SocketAddr,
    calls: Arc<Mutex<Vec<Call>>>,
    _stop: DropGuard,
}

impl TheApp {
    /// Answers the n-th call, counted from 0, with the result of `answer`.
    async fn start<F>(answer: impl Fn(usize, Call) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Response<Full<Bytes>>> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let calls = Arc::new(Mutex::new(Vec::new()));
        let answer = {
            let (calls, answer) = (calls.clone(), Arc::new(answer));
            move |request: Request<hapax_engine::http::Received>, _| {
                let (calls, answer) = (calls.clone(), answer.clone());
                async move {
                    let (head, body) = request.into_parts();
                    let body = body.collect().await.unwrap().to_bytes();
                    let path = head.uri.to_string();
                    let call = Call { method: head.method, path, headers: head.headers, body };
                    let count = {
                        let mut calls = calls.lock().unwrap();
                        calls.push(call.clone());
                        calls.len() - 1
                    };
                    answer(count, call).await
                }
            }
        };
        let stop = CancellationToken::new();
        tokio::spawn(hapax_engine::http::serve(
            listener,
            None,
            answer,
            HttpLimits::default(),
            stop.clone(),
        ));
        Self { address, calls, _stop: stop.drop_guard() }
    }

    fn url(&self) -> Uri {
        format!("http://{}/hooks?a=1", self.address).parse().unwrap()
    }

    fn calls(&self) -> Vec<Call> {
        self.calls.lock().unwrap().clone()
    }
}

fn says(status: u16, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    Response::builder().status(status).body(Full::new(body.into())).unwrap()
}

const SOURCE: &str = "billing";
const HANDLER: &str = "charge";

fn target(url: Uri) -> HttpTarget {
    HttpTarget { url, sign_as: SignAs::Standard, secret: None, signer: None }
}

fn handler(kind: HandlerKind) -> Handler {
    Handler {
        name: HandlerName::new(HANDLER),
        kind,
        types: TypeFilter::default(),
        policy: Policy { retry: vec![Duration::ZERO; 3], lease: Duration::from_secs(30) },
        timeout: Duration::from_secs(10),
        concurrency: 16,
        order: None,
        refetch: None,
    }
}

fn stripe(secret: &str) -> Arc<Source> {
    let secret = ActiveSecret::forever(Secret::new(secret));
    Arc::new(Source::build(SourceSpec::new(SOURCE, "stripe", vec![secret])).unwrap())
}

fn lane(handler: Handler) -> LaneSpec {
    LaneSpec {
        handler: Arc::new(handler),
        source: SourceName::new(SOURCE),
        verifiers: vec![stripe("whsec_of_the_source")],
    }
}

/// Workers that run until this is dropped.
struct RunningWorkers {
    workers: Arc<Workers<TestStore>>,
    stop: CancellationToken,
    running: JoinHandle<()>,
    _guard: DropGuard,
}

impl RunningWorkers {
    fn start(store: &JobStore, handler: Handler) -> Self {
        Self::with(store, handler, EventWaiters::default(), Arc::new(Timestamp::now))
    }

    fn with(
        store: &JobStore,
        handler: Handler,
        event_waiters: EventWaiters,
        now: hapax_engine::Now,
    ) -> Self {
        let outbound = Outbound::trusted().unwrap();
        let lanes = vec![lane(handler)];
        let workers =
            Arc::new(Workers::new(store.faults.clone(), outbound, event_waiters, now, lanes));
        let stop = CancellationToken::new();
        let running = tokio::spawn(workers.clone().run(Duration::from_secs(20), stop.clone()));
        Self { workers, running, _guard: stop.clone().drop_guard(), stop }
    }

    async fn stopped(self) {
        self.stop.cancel();
        within(self.running).await.unwrap();
    }
}

async fn put(store: &JobStore, event_id: &str) -> JobId {
    store.put(HANDLER, event(SOURCE, event_id, "content-type: application/json\n", "{}")).await
}

/// An app that reports each call, and answers those that the gate lets through.
async fn gated() -> (TheApp, Arc<Semaphore>, Arc<Semaphore>) {
    let (arrived, gate) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let app = {
        let (arrived, gate) = (arrived.clone(), gate.clone());
        TheApp::start(move |_, _| {
            let (arrived, gate) = (arrived.clone(), gate.clone());
            async move {
                arrived.add_permits(1);
                gate.acquire().await.unwrap().forget();
                says(200, "")
            }
        })
        .await
    };
    (app, arrived, gate)
}

#[tokio::test]
async fn a_failed_attempt_is_retried_with_the_same_key_and_another_fence() {
    let app = TheApp::start(|count, _| async move {
        match count {
            0 => says(500, "no"),
            _ => {
                says(200, r#"{"result":"ch_1","publish":[{"type":"fee.charged","data":{"a":1}}]}"#)
            }
        }
    })
    .await;
    let store = JobStore::new();
    let headers = "content-type: application/json; charset=utf-8\nx-own: 1\nx-own: 2\nhost: us\n\
                   content-length: 99\naccept-encoding: gzip\nhapax-job: forged\nhapax-current: {}\nwebhook-id: theirs\n";
    let body = "{\"id\": \"evt_1\",  \"ä\": 1}";
    let job = store.put(HANDLER, event(SOURCE, "evt_1", headers, body)).await;
    let _running = RunningWorkers::start(&store, handler(HandlerKind::Http(target(app.url()))));
    let done = store.until(job, |job| job.phase == Phase::Done).await;
    assert_eq!(done.result.as_deref(), Some("ch_1"));
    assert_eq!(store.event(done.event).await.messages[0].r#type, "fee.charged");
    assert_eq!(errors(&done), ["HTTP 500: no"]);
    let calls = app.calls();
    assert_eq!(calls.len(), 2);
    for call in &calls {
        assert_eq!((&call.method, &*call.path), (&Method::POST, "/hooks?a=1"));
        assert_eq!(call.body, body);
        assert_eq!(call.header("content-type"), "application/json; charset=utf-8");
        assert_eq!(call.headers.get_all("x-own").iter().count(), 2);
        assert_eq!(call.header("host"), app.address.to_string());
        assert_eq!(call.header("accept-encoding"), "");
        assert_eq!(call.headers.get_all("hapax-job").iter().count(), 1);
        assert_eq!(call.header("hapax-job"), job.to_string());
        assert_eq!(call.header("hapax-current"), "", "no sender speaks for us");
        assert_eq!(call.header("webhook-id"), done.event.to_string());
        assert_eq!(call.header("idempotency-key"), format!("{}:{HANDLER}", done.event));
    }
    let tried: Vec<_> = calls
        .iter()
        .map(|call| (call.header("hapax-attempt"), call.header("hapax-fence")))
        .collect();
    assert_eq!(tried, [("1", "1"), ("2", "2")]);
}

/// Runs one attempt against an app with this answer, and returns the job.
async fn after_one(answer: Response<Full<Bytes>>) -> (JobDetail, usize) {
    let app = TheApp::start(move |_, _| {
        let answer = answer.clone();
        async move { answer }
    })
    .await;
    let store = JobStore::new();
    let job = put(&store, "evt_1").await;
    let mut handler = handler(HandlerKind::Http(target(app.url())));
    handler.policy.retry = vec![Duration::ZERO, Duration::from_secs(60)];
    let running = RunningWorkers::start(&store, handler);
    let found = store.until(job, |job| job.phase == Phase::Done || job.error.is_some()).await;
    running.stopped().await;
    (found, app.calls().len())
}

/// The seconds until the next attempt, from when the last one ended.
fn waits(job: &JobDetail) -> i64 {
    let ended = job.attempts.last().and_then(|attempt| attempt.ended_at).unwrap();
    job.due_at.unwrap().duration_since(ended).as_secs()
}

/// The errors of the attempts, in order.
fn errors(job: &JobDetail) -> Vec<&str> {
    job.attempts.iter().filter_map(|attempt| attempt.error.as_deref()).collect()
}

#[tokio::test]
async fn retry_after_is_honoured_if_it_is_longer_than_the_schedule() {
    let with = |status: u16, value: &str| {
        let mut answer = says(status, "");
        answer.headers_mut().insert("retry-after", value.parse().unwrap());
        answer
    };
    let (found, _) = after_one(with(503, "600")).await;
    assert!((500..=600).contains(&waits(&found)), "{}", waits(&found));
    let (found, _) = after_one(with(429, "999999999")).await;
    assert!((86_300..=86_400).contains(&waits(&found)), "{}", waits(&found));
    let date = Timestamp::now() + jiff::SignedDuration::from_hours(1);
    let date =
        jiff::fmt::rfc2822::DateTimePrinter::new().timestamp_to_rfc9110_string(&date).unwrap();
    let (found, _) = after_one(with(503, &date)).await;
    assert!((3_500..=3_600).contains(&waits(&found)), "{}", waits(&found));
    for answer in [with(503, "1"), with(503, "soon"), with(500, "600")] {
        let (found, _) = after_one(answer).await;
        // Part of the schedule's minute may have passed by now.
        assert!((2..=75).contains(&waits(&found)), "{}", waits(&found));
    }
}

#[tokio::test]
async fn a_redirect_is_a_failure_and_is_not_followed() {
    let mut answer = says(302, "");
    answer.headers_mut().insert("location", "/hooks".parse().unwrap());
    let (found, calls) = after_one(answer).await;
    assert_eq!(found.error.as_deref(), Some("HTTP 302: redirects are not followed"));
    assert_eq!(calls, 1);
}

#[tokio::test]
async fn any_answer_of_200_is_done_and_only_a_fitting_one_says_more() {
    // An array must not be accepted as an object with its fields in order.
    let arrays = ["[1]", "[1,2]", r#"["x"]"#, r#"["x",[{"type":"a","data":1}]]"#];
    for body in ["", "ok", r#"{"received":true}"#, r#"{"result":7}"#, "{"].into_iter().chain(arrays)
    {
        let (found, _) = after_one(says(204 - 4 * u16::from(!body.is_empty()), body)).await;
        assert_eq!((found.phase, found.result), (Phase::Done, None), "{body}");
    }
    let (found, _) = after_one(says(200, r#"{"result":"r","publish":[{"data":1}]}"#)).await;
    let error = found.error.unwrap();
    assert!(error.contains("\"publish\" is malformed"), "{error}");
    assert_eq!(found.phase, Phase::Ready);
    // An id that is too long for an index would fail in the database at every attempt.
    let id = "x".repeat(5_000);
    let long = json!({ "publish": [{ "type": "a", "data": 1, "id": id }] }).to_string();
    let (found, _) = after_one(says(200, long)).await;
    let error = found.error.unwrap();
    assert!(error.contains("id of a message is longer than 128 characters"), "{error}");
}

#[tokio::test]
async fn an_endless_answer_is_cut_and_does_not_count_as_one_without_messages() {
    let (found, _) = after_one(says(200, vec![b'x'; 1 << 20])).await;
    assert_eq!((found.phase, found.result), (Phase::Done, None));
    let long = json!({ "publish": [{ "type": "a", "data": "x".repeat(1 << 20) }] }).to_string();
    let (found, _) = after_one(says(200, long)).await;
    assert_eq!(found.error.as_deref(), Some("the answer is longer than 65536 bytes"));
}

#[tokio::test]
async fn an_app_that_times_out_or_is_not_running_is_a_short_error() {
    let app = TheApp::start(|_, _| std::future::pending()).await;
    let store = JobStore::new();
    let job = put(&store, "evt_1").await;
    let mut slow = handler(HandlerKind::Http(target(app.url())));
    slow.timeout = Duration::from_millis(50);
    let _running = RunningWorkers::start(&store, slow);
    let found = store.until(job, |job| job.phase == Phase::Dead).await;
    assert_eq!(found.error.as_deref(), Some("timed out after 50ms"));
    assert_eq!(found.progress.attempt, 3);
    // The app may see fewer calls: on a busy machine the timeout may pass before the app gets the
    // call.
    assert!(app.calls().len() <= 3, "{:?}", app.calls());

    // A port that is never assigned by chance.
    let url = Uri::from_static("http://127.0.0.1:1/");
    let store = JobStore::new();
    let job = put(&store, "evt_1").await;
    let _running = RunningWorkers::start(&store, handler(HandlerKind::Http(target(url))));
    let found = store.until(job, |job| job.phase == Phase::Dead).await;
    assert_eq!(found.error.as_deref(), Some("connection refused"));
}

/// The request that an app behind `target` gets for an event with these headers, as it would verify
/// it.
async fn request_for(target: impl FnOnce(Uri) -> HttpTarget, headers: &str) -> Arrival {
    let app = TheApp::start(|_, _| async { says(200, "") }).await;
    let store = JobStore::new();
    let job = store.put(HANDLER, event(SOURCE, "evt_1", headers, EVENT)).await;
    let running = RunningWorkers::start(&store, handler(HandlerKind::Http(target(app.url()))));
    store.until(job, |job| job.phase == Phase::Done).await;
    running.stopped().await;
    let call = app.calls().remove(0);
    Arrival {
        method: Method::POST,
        url: app.url().to_string(),
        headers: call.headers,
        body: call.body,
    }
}

const EVENT: &str = r#"{"id":"evt_1","object":"event","type":"payout.paid","created":1700000000}"#;

#[tokio::test]
async fn a_request_signed_as_the_sender_verifies_long_after_the_senders_own_window() {
    let source = stripe("whsec_of_the_source");
    let long_ago = Timestamp::from_second(1_700_000_000).unwrap();
    let original = Arrival {
        method: Method::POST,
        url: "https://hooks.example.com/webhooks/billing".into(),
        headers: HeaderMap::new(),
        body: EVENT.into(),
    };
    let signed = source.scheme().sign(&original, None, long_ago).unwrap();
    let lines: String = signed
        .headers
        .iter()
        .map(|(name, value)| format!("{}: {value}\n", name.to_lowercase()))
        .collect();
    assert!(lines.contains("stripe-signature"), "{lines}");
    let as_provider = |url| HttpTarget { sign_as: SignAs::Provider, ..target(url) };
    let request = request_for(as_provider, &lines).await;
    assert_eq!(request.headers.get_all("stripe-signature").iter().count(), 1);
    assert_eq!(request.body, EVENT);
    let verified = verify(&source, &request, Timestamp::now());
    assert!(matches!(verified, Ok(Verified::Events { .. })), "{verified:?}");
}

#[tokio::test]
async fn a_signed_id_of_the_sender_stays_unchanged() {
    // Svix has two sets of header names; the names of the request are kept.
    let secret = ActiveSecret::forever(Secret::new("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"));
    let clerk = Arc::new(Source::build(SourceSpec::new(SOURCE, "svix", vec![secret])).unwrap());
    let app = TheApp::start(|_, _| async { says(200, "") }).await;
    let store = JobStore::new();
    let headers = "svix-id: msg_1\nsvix-timestamp: 1700000000\nsvix-signature: v1,AAAA\n";
    let job = store.put(HANDLER, event(SOURCE, "msg_1", headers, EVENT)).await;
    let as_provider = HttpTarget { sign_as: SignAs::Provider, ..target(app.url()) };
    let lane = LaneSpec {
        handler: Arc::new(handler(HandlerKind::Http(as_provider))),
        source: SourceName::new(SOURCE),
        verifiers: vec![clerk.clone()],
    };
    let running = RunningWorkers::start(&store, handler(HandlerKind::Pull));
    running.workers.reload(vec![lane]);
    store.until(job, |job| job.phase == Phase::Done).await;
    let call = app.calls().remove(0);
    assert_eq!(call.header("svix-id"), "msg_1");
    assert_ne!(call.header("svix-timestamp"), "1700000000");
    let request = Arrival {
        method: Method::POST,
        url: app.url().to_string(),
        headers: call.headers,
        body: call.body,
    };
    let verified = verify(&clerk, &request, Timestamp::now());
    assert!(matches!(verified, Ok(Verified::Events { .. })), "{verified:?}");
}

#[tokio::test]
async fn a_request_signed_by_the_standard_verifies_with_the_handlers_secret() {
    let secret = Secret::new("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw");
    let active = vec![ActiveSecret::forever(secret.clone())];
    let signer =
        Arc::new(Source::build(SourceSpec::new("app", "standardwebhooks", active)).unwrap());
    let as_standard = {
        let signer = signer.clone();
        |url| HttpTarget { secret: Some(secret), signer: Some(signer), ..target(url) }
    };
    let headers = "stripe-signature: t=1,v1=aa\nwebhook-timestamp: 1\nwebhook-signature: v1,AAAA\n";
    let request = request_for(as_standard, headers).await;
    assert_eq!(request.headers.get_all("webhook-signature").iter().count(), 1);
    assert_eq!(request.headers["stripe-signature"], "t=1,v1=aa");
    let verified = verify(&signer, &request, Timestamp::now());
    assert!(matches!(verified, Ok(Verified::Events { .. })), "{verified:?}");
}

#[tokio::test]
async fn a_job_that_the_app_completed_itself_is_done_whatever_its_answer_was() {
    let store = JobStore::new();
    let job = put(&store, "evt_1").await;
    let app = {
        let store = store.clone();
        TheApp::start(move |_, _| {
            let store = store.clone();
            async move {
                store.complete(job).await;
                says(500, "")
            }
        })
        .await
    };
    let running = RunningWorkers::start(&store, handler(HandlerKind::Http(target(app.url()))));
    store.until(job, |job| job.phase == Phase::Done).await;
    running.stopped().await;
    let found = store.job(job).await;
    assert_eq!((found.phase, found.error), (Phase::Done, None));
    // The job is settled once: the answer is stored with the done job.
    assert_eq!(store.faults.begun(Act::Settle), 1);
}

#[tokio::test]
async fn never_more_attempts_run_at_once_than_the_handler_allows_across_a_reload_too() {
    let inside = Arc::new(AtomicUsize::new(0));
    let most = Arc::new(AtomicUsize::new(0));
    let arrived = Arc::new(Semaphore::new(0));
    let gate = Arc::new(Semaphore::new(0));
    let app = {
        let (inside, most, arrived, gate) =
            (inside.clone(), most.clone(), arrived.clone(), gate.clone());
        TheApp::start(move |_, _| {
            let (inside, most, arrived, gate) =
                (inside.clone(), most.clone(), arrived.clone(), gate.clone());
            async move {
                most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                arrived.add_permits(1);
                gate.acquire().await.unwrap().forget();
                inside.fetch_sub(1, Ordering::SeqCst);
                says(200, "")
            }
        })
        .await
    };
    let store = JobStore::new();
    let mut jobs = Vec::new();
    for n in 0..12 {
        jobs.push(put(&store, &format!("evt_{n}")).await);
    }
    let two = || {
        let mut handler = handler(HandlerKind::Http(target(app.url())));
        handler.concurrency = 2;
        handler
    };
    let running = RunningWorkers::start(&store, two());
    within(arrived.acquire_many(2)).await.unwrap().forget();
    running.workers.reload(vec![lane(two())]);
    gate.add_permits(2);
    within(arrived.acquire_many(2)).await.unwrap().forget();
    gate.add_permits(100);
    for job in jobs {
        store.until(job, |job| job.phase == Phase::Done).await;
    }
    assert_eq!(most.load(Ordering::SeqCst), 2);
    assert_eq!(app.calls().len(), 12);
}

#[tokio::test]
async fn a_shutdown_gives_back_claimed_jobs_that_were_not_begun() {
    let app = TheApp::start(|_, _| async { says(200, "") }).await;
    let store = JobStore::new();
    let answers = store.faults.block_answers(Act::Claim);
    let jobs = [put(&store, "evt_1").await, put(&store, "evt_2").await];
    let running = RunningWorkers::start(&store, handler(HandlerKind::Http(target(app.url()))));
    within(store.faults.until(|faults| faults.ended(Act::Claim) > 0)).await;
    running.stop.cancel();
    answers.add_permits(1);
    running.stopped().await;
    assert_eq!(given_back(&store), 2);
    for job in jobs {
        let found = store.job(job).await;
        assert_eq!((found.phase, found.progress.attempt), (Phase::Ready, 0));
    }
    assert_eq!(app.calls().len(), 0);
}

#[tokio::test]
async fn a_shutdown_waits_for_running_attempts() {
    let (app, arrived, gate) = gated().await;
    let store = JobStore::new();
    let job = put(&store, "evt_1").await;
    let running = RunningWorkers::start(&store, handler(HandlerKind::Http(target(app.url()))));
    within(arrived.acquire()).await.unwrap().forget();
    running.stop.cancel();
    let late = put(&store, "evt_2").await;
    gate.add_permits(2);
    running.stopped().await;
    assert_eq!(store.job(job).await.phase, Phase::Done);
    assert_eq!(store.job(late).await.phase, Phase::Ready);
}

#[tokio::test]
async fn the_lease_is_renewed_while_the_app_works() {
    let gate = Arc::new(Semaphore::new(0));
    let app = {
        let gate = gate.clone();
        TheApp::start(move |_, _| {
            let gate = gate.clone();
            async move {
                gate.acquire().await.unwrap().forget();
                says(200, "")
            }
        })
        .await
    };
    let store = JobStore::new();
    let job = put(&store, "evt_1").await;
    let mut short = handler(HandlerKind::Http(target(app.url())));
    short.policy.lease = Duration::from_millis(30);
    let _running = RunningWorkers::start(&store, short);
    within(store.faults.until(|faults| faults.begun(Act::Renew) >= 3)).await;
    gate.add_permits(1);
    store.until(job, |job| job.phase == Phase::Done).await;
}

#[tokio::test]
async fn a_panic_in_an_attempt_is_a_failed_attempt_and_others_continue() {
    let app = TheApp::start(|_, _| async { says(200, "") }).await;
    let store = JobStore::new();
    let job = put(&store, "evt_1").await;
    let panics = AtomicBool::new(true);
    let now = Arc::new(move || match panics.swap(false, Ordering::SeqCst) {
        true => panic!("the first attempt to ask for the time"),
        false => Timestamp::now(),
    });
    let http = handler(HandlerKind::Http(target(app.url())));
    let _running = RunningWorkers::with(&store, http, EventWaiters::default(), now);
    let found = store.until(job, |job| job.phase == Phase::Done).await;
    assert_eq!(errors(&found), ["the handler panicked"]);
    assert_eq!(found.progress.steps, 1);
}

#[tokio::test]
async fn a_store_that_fails_for_a_while_delays_work_and_loses_none() {
    let app = TheApp::start(|_, _| async { says(200, "") }).await;
    let store = JobStore::new();
    for act in [Act::Announce, Act::Claim] {
        store.faults.fail_next(act, 1);
    }
    let announcing = store.faults.block(Act::Announce);
    let first = put(&store, "evt_1").await;
    let _running = RunningWorkers::start(&store, handler(HandlerKind::Http(target(app.url()))));
    within(store.faults.until(|faults| faults.begun(Act::Announce) > 0)).await;
    assert_eq!(store.faults.begun(Act::Claim), 0, "announced first");
    announcing.add_permits(100);
    store.until(first, |job| job.phase == Phase::Done).await;
    for act in [Act::Announce, Act::Claim] {
        assert!(store.faults.ended(act) > 1, "{act:?}");
    }
    assert_eq!(app.calls().len(), 1);
}

#[tokio::test]
async fn an_outcome_that_cannot_be_recorded_at_once_is_recorded_later_without_another_attempt() {
    // The app has done its work; the store is busy for a moment.
    let app = TheApp::start(|_, _| async { says(200, r#"{"result":"ch_1"}"#) }).await;
    let store = JobStore::new();
    store.faults.fail_next(Act::Settle, 2);
    let job = put(&store, "evt_1").await;
    let _running = RunningWorkers::start(&store, handler(HandlerKind::Http(target(app.url()))));
    let found = store.until(job, |job| job.phase == Phase::Done).await;
    assert_eq!((found.result.as_deref(), found.progress.attempt), (Some("ch_1"), 1));
    assert_eq!(store.faults.begun(Act::Settle), 3);
    assert_eq!(app.calls().len(), 1);
}

#[tokio::test]
async fn sql_runs_in_the_store_slice_after_slice_and_later_jobs_are_noticed() {
    let store = JobStore::new();
    let mut jobs = Vec::new();
    for n in 0..200 {
        jobs.push(put(&store, &format!("evt_{n}")).await);
    }
    let program = Arc::new(SqlProgram::parse("SELECT 1", Dialect::Sqlite).unwrap());
    let running = RunningWorkers::start(&store, handler(HandlerKind::Sql(program)));
    for job in jobs {
        store.until(job, |job| job.phase == Phase::Done).await;
    }
    let later = put(&store, "evt_later").await;
    let found = store.until(later, |job| job.phase == Phase::Done).await;
    let [attempt] = &found.attempts[..] else { panic!("one attempt") };
    assert!(attempt.worker.starts_with("worker-"));
    running.stopped().await;
}

/// A sync source in front of an app, with workers between them.
struct SyncSource {
    store: JobStore,
    wire: Wire,
    source: Arc<Source>,
    _running: RunningWorkers,
    _stop: DropGuard,
}

impl SyncSource {
    async fn open(app: &TheApp, timeout: Duration) -> Self {
        Self::open_for(app, timeout, 16).await
    }

    /// Opens a source with this many concurrent calls.
    async fn open_for(app: &TheApp, timeout: Duration, concurrency: usize) -> Self {
        let store = JobStore::new();
        let mut http = handler(HandlerKind::Http(target(app.url())));
        http.concurrency = concurrency;
        http.policy.retry =
            vec![Duration::ZERO, Duration::from_secs(3600), Duration::from_secs(3600)];
        let source = stripe("whsec_of_the_source");
        let mut route = RouteSpec::new(source.clone());
        route.mode = AnswerMode::Sync { timeout };
        route.handlers =
            vec![Arc::new(Handler { kind: HandlerKind::Pull, ..handler(HandlerKind::Pull) })];
        let routes = Routes::build(RoutesSpec::new(vec![route])).unwrap();
        let now: hapax_engine::Now = Arc::new(Timestamp::now);
        let ingress = Arc::new(Ingress::new(store.faults.clone(), routes, now.clone()).with_sync());
        let running = RunningWorkers::with(&store, http, ingress.event_waiters(), now);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let wire = Wire::connect(listener.local_addr().unwrap()).await;
        let stop = CancellationToken::new();
        let limits = HttpLimits::default();
        tokio::spawn(serve_ingress(listener, None, ingress, limits, stop.clone()));
        Self { store, wire, source, _running: running, _stop: stop.drop_guard() }
    }

    async fn send(&mut self) -> crate::support::BufferedAnswer {
        let url = "http://localhost/webhooks/billing".to_owned();
        let body = Bytes::from(EVENT);
        let plain =
            Arrival { method: Method::POST, url, headers: HeaderMap::new(), body: body.clone() };
        let signed = self.source.scheme().sign(&plain, None, Timestamp::now()).unwrap();
        let (name, value) = &signed.headers[0];
        self.wire
            .write(format!(
                "POST /webhooks/billing HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n\
                 {name}: {value}\r\ncontent-length: {}\r\n\r\n{EVENT}",
                body.len()
            ))
            .await;
        self.wire.answer().await
    }
}

#[tokio::test]
async fn a_sync_source_answers_with_the_result_of_the_work_and_repeats_it_to_copies() {
    let app = TheApp::start(|_, _| async { says(200, r#"{"result":"ch_1"}"#) }).await;
    let mut sync_source = SyncSource::open(&app, Duration::from_secs(20)).await;
    let first = sync_source.send().await;
    let id = first.json()["id"].clone();
    assert_eq!(first.status, 200);
    assert_eq!(
        first.json(),
        json!({ "decision": "accepted", "id": id, "status": "processed", "result": "ch_1" })
    );
    let copy = sync_source.send().await;
    assert_eq!(
        copy.json(),
        json!({ "decision": "duplicate", "id": id, "status": "processed", "result": "ch_1" })
    );
    assert_eq!(app.calls().len(), 1);
}

#[tokio::test]
async fn at_a_sync_source_a_copy_of_a_pruned_event_is_answered_at_once() {
    // The event has no body and no open job, so the answer to the copy must not wait. The timeout
    // is far longer than the test.
    let app = TheApp::start(|_, _| async { says(200, r#"{"result":"ch_1"}"#) }).await;
    let mut sync_source = SyncSource::open(&app, Duration::from_secs(3_600)).await;
    let id = sync_source.send().await.json()["id"].clone();
    let all = Horizon { events_before: Timestamp::MAX, ..Horizon::forever() };
    sync_source.store.faults.inner().prune(all, 10).await.unwrap();
    let copy = within(sync_source.send()).await;
    assert_eq!(copy.status, 200);
    assert_eq!(
        copy.json(),
        json!({ "decision": "duplicate", "id": id, "status": "processed", "result": "ch_1" })
    );
}

#[tokio::test]
async fn at_a_sync_source_a_failed_attempt_is_500_and_the_next_copy_is_the_next_attempt() {
    let app = TheApp::start(|count, _| async move {
        match count {
            0 | 1 => says(500, ""),
            _ => says(200, r#"{"result":"at last"}"#),
        }
    })
    .await;
    let mut sync_source = SyncSource::open(&app, Duration::from_secs(20)).await;
    for calls in [1, 2] {
        let heard = sync_source.send().await;
        assert_eq!(
            (heard.status, heard.header("content-type"), heard.json()["type"].as_str()),
            (500, Some("application/problem+json"), Some("urn:hapax:problem:work_failed"))
        );
        assert_eq!(app.calls().len(), calls);
    }
    let heard = sync_source.send().await;
    assert_eq!((heard.status, heard.json()["result"].as_str()), (200, Some("at last")));
    assert_eq!(sync_source.store.faults.begun(Act::Hurry), 2);
}

#[tokio::test]
async fn at_a_sync_source_an_earlier_failure_is_no_answer_to_a_copy_that_waits_for_its_attempt() {
    // The next attempt has to wait until another call has ended. Until then, the status of the
    // event is `failed`.
    let (called, gate) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let app = {
        let (called, gate) = (called.clone(), gate.clone());
        TheApp::start(move |count, _| {
            let (called, gate) = (called.clone(), gate.clone());
            async move {
                match count {
                    0 => says(500, ""),
                    1 => {
                        called.add_permits(1);
                        gate.acquire().await.unwrap().forget();
                        says(200, "")
                    }
                    _ => says(200, r#"{"result":"at last"}"#),
                }
            }
        })
        .await
    };
    let mut sync_source = SyncSource::open_for(&app, Duration::from_secs(3_600), 1).await;
    assert_eq!(sync_source.send().await.status, 500);
    let store = sync_source.store.clone();
    put(&store, "evt_other").await;
    within(called.acquire()).await.unwrap().forget();
    let looks = store.faults.begun(Act::FindEvent);
    let looked = |faults: &TestStore| faults.begun(Act::FindEvent) >= looks + 5;
    let mut copy = pin!(sync_source.send());
    tokio::select! {
        heard = &mut copy => panic!("answered {} before its attempt began", heard.status),
        () = within(store.faults.until(looked)) => {}
    }
    gate.add_permits(1);
    let heard = copy.await;
    assert_eq!((heard.status, heard.json()["result"].as_str()), (200, Some("at last")));
}

#[tokio::test]
async fn at_a_sync_source_work_that_outlasts_the_wait_is_202_and_continues() {
    let gate = Arc::new(Semaphore::new(0));
    let app = {
        let gate = gate.clone();
        TheApp::start(move |_, _| {
            let gate = gate.clone();
            async move {
                gate.acquire().await.unwrap().forget();
                says(200, r#"{"result":"ch_1"}"#)
            }
        })
        .await
    };
    let mut sync_source = SyncSource::open(&app, Duration::from_millis(100)).await;
    let heard = sync_source.send().await;
    assert_eq!((heard.status, heard.header("hapax-decision")), (202, Some("accepted")));
    assert_eq!(heard.json()["result"], json!(null));
    gate.add_permits(1);
    let again = loop {
        let heard = sync_source.send().await;
        if heard.status != 202 {
            break heard;
        }
    };
    assert_eq!((again.status, again.json()["result"].as_str()), (200, Some("ch_1")));
}

/// Stores finished events: as many as the janitor deletes in this many full steps, and one more.
async fn old_events(store: &JobStore, steps: usize, received_at: Timestamp) {
    for n in 0..=steps * PRUNE_BATCH {
        let event = SignedEvent::new(SOURCE, &format!("evt_{n}"), received_at);
        store.faults.inner().ingest(event.ingest(Vec::new())).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn the_janitor_prunes_in_small_steps_until_nothing_is_left_and_runs_again() {
    let store = JobStore::new();
    let at = Timestamp::from_second(1_700_000_000).unwrap();
    old_events(&store, 2, at - Duration::from_secs(61)).await;
    let retention = Retention {
        events: Some(Duration::from_secs(60)),
        keys: vec![(SourceName::new(SOURCE), Duration::from_secs(3600))],
        message_ids: Some(Duration::from_secs(7200)),
        deliveries: Some(Duration::from_secs(86_400)),
    };
    let janitor = Janitor::new(store.faults.clone(), Arc::new(move || at), retention);
    let janitor = Arc::new(janitor.every(Duration::from_millis(10)));
    let stop = CancellationToken::new();
    let running = {
        let (janitor, stop) = (janitor.clone(), stop.clone());
        tokio::spawn(async move { janitor.run(stop).await })
    };
    within(store.faults.until(|faults| faults.ended(Act::Prune) >= 3)).await;
    let left = EventFilter { limit: 1, ..EventFilter::default() };
    assert!(store.faults.inner().events(left).await.unwrap().items.is_empty());
    janitor.reload(Retention::default());
    store.faults.fail_next(Act::Prune, 1);
    // Of the next rounds, one may have started with the old settings, and one fails.
    within(store.faults.until(|faults| faults.ended(Act::Prune) >= 6)).await;
    stop.cancel();
    within(running).await.unwrap();
    let horizons = store.faults.arguments(Act::Prune);
    let before = |seconds: u64| at - Duration::from_secs(seconds);
    let first = Horizon {
        at,
        events_before: before(60),
        keys_before: vec![(SourceName::new(SOURCE), before(3600))],
        message_ids_before: before(7200),
    };
    assert_eq!(horizons[..3], vec![format!("{:?}", (first, PRUNE_BATCH)); 3]);
    let forever = Horizon { at, ..Horizon::forever() };
    assert_eq!(horizons[5], format!("{:?}", (forever, PRUNE_BATCH)));
    // Each round with the first settings expires deliveries, and no round with the second settings
    // does.
    let (kept, notice) = (Duration::from_secs(86_400), Duration::from_secs(8_640));
    let ask = ExpiryAsk { kept, notice, limit: PRUNE_BATCH };
    let expiries = store.faults.arguments(Act::ExpireDeliveries);
    assert!(!expiries.is_empty() && expiries.iter().all(|one| *one == format!("{:?}", (ask,))));
}

#[tokio::test(start_paused = true)]
async fn the_deletion_of_a_large_tenant_delays_no_other_work_of_the_janitor() {
    // The deletion takes longer than the time between two rounds.
    let store = JobStore::new();
    let at = Timestamp::now();
    old_events(&store, 4, at - Duration::from_secs(61)).await;
    let by = Action { who: "ops".to_owned(), reason: None, at };
    store.faults.delete_tenant(Tenant::default(), by).await.unwrap();
    // The retention of messages is short, so that the clock is doubted for one round only.
    let message_ids = Some(Duration::from_millis(1));
    let retention = Retention { message_ids, ..Retention::default() };
    let janitor = Janitor::new(store.faults.clone(), Arc::new(move || at), retention);
    let janitor = janitor.every(Duration::from_millis(1));
    let stop = CancellationToken::new();
    let is_over = async || {
        let deletion = store.faults.tenant_deletion(Tenant::default()).await.unwrap().unwrap();
        deletion.ended_at.is_some()
    };
    tokio::join!(janitor.run(stop.clone()), async {
        within(store.faults.until(|faults| faults.ended(Act::Prune) >= 2)).await;
        assert!(store.faults.ended(Act::Erase) >= 1);
        assert!(!is_over().await, "the other work waited for the deletion");
        while !is_over().await {
            let erased = store.faults.ended(Act::Erase);
            within(store.faults.until(move |faults| faults.ended(Act::Erase) > erased)).await;
        }
        stop.cancel();
    });
}

#[tokio::test(start_paused = true)]
async fn the_janitor_skips_its_pause_only_while_the_store_has_no_other_request() {
    // If the janitor always paused after a commit, it would delete slowly even without other
    // requests. If it never paused, each other request would wait for a commit of the janitor.
    let paused_for = async |requests: fn(&TestStore) -> Option<u64>| {
        let store = JobStore::with(|faults| faults.with_foreground_requests(requests));
        let at = Timestamp::now();
        old_events(&store, 4, at - Duration::from_secs(61)).await;
        let retention = Retention { events: Some(Duration::from_secs(60)), ..Retention::default() };
        let janitor = Janitor::new(store.faults.clone(), Arc::new(move || at), retention);
        let stop = CancellationToken::new();
        let ((), took) = tokio::join!(janitor.run(stop.clone()), async {
            // The first round deletes nothing, because it doubts the clock.
            store.faults.until(|faults| faults.begun(Act::Prune) >= 1).await;
            let began = tokio::time::Instant::now();
            store.faults.until(|faults| faults.ended(Act::Prune) >= 5).await;
            stop.cancel();
            began.elapsed()
        });
        took
    };
    assert_eq!(paused_for(|_| Some(0)).await, Duration::ZERO, "no other request");
    let with_each = paused_for(|faults| Some(faults.begun(Act::Prune) as u64)).await;
    assert!(with_each >= 4 * PRUNE_PAUSE, "{with_each:?}");
    let unknown = paused_for(|_| None).await;
    assert!(unknown >= 4 * PRUNE_PAUSE, "{unknown:?}");
}

#[tokio::test(start_paused = true)]
async fn a_clock_that_is_ahead_for_a_moment_deletes_nothing() {
    // The clock jumps a year ahead, a round of the janitor runs, and the clock is right again. A copy of an
    // event whose key was deleted would run a second time.
    let right = Timestamp::from_second(1_700_000_000).unwrap();
    let ahead = Arc::new(AtomicBool::new(false));
    let clock = {
        let (began, ahead) = (tokio::time::Instant::now(), ahead.clone());
        move || {
            let days = if ahead.load(Ordering::SeqCst) { 365 } else { 0 };
            right + began.elapsed() + Duration::from_secs(days * 86_400)
        }
    };
    let store = Arc::new(FaultyStore::new(MemoryStore::with_clock(Arc::new(clock.clone()))));
    let event = SignedEvent::new(SOURCE, "evt_1", right);
    let arrive = async || store.inner().ingest(event.ingest(Vec::new())).await.unwrap();
    assert!(matches!(arrive().await[..], [Verdict::Accepted(_)]));
    let day = Duration::from_secs(86_400);
    let retention = Retention {
        events: Some(30 * day),
        keys: vec![(SourceName::new(SOURCE), 90 * day)],
        message_ids: Some(90 * day),
        deliveries: Some(30 * day),
    };
    let janitor = Janitor::new(store.clone(), Arc::new(clock), retention);
    let janitor = janitor.every(Duration::from_secs(10));
    let stop = CancellationToken::new();
    let rounds = async |more: usize| {
        let erased = store.ended(Act::Erase) + more;
        within(store.until(move |faults| faults.ended(Act::Erase) >= erased)).await;
    };
    tokio::join!(janitor.run(stop.clone()), async {
        rounds(5).await;
        let (pruned, expired) = (store.ended(Act::Prune), store.ended(Act::ExpireDeliveries));
        assert!(pruned > 0 && expired > 0, "the janitor trusts its clock");
        ahead.store(true, Ordering::SeqCst);
        rounds(5).await;
        assert_eq!(store.ended(Act::Prune), pruned);
        assert_eq!(store.ended(Act::ExpireDeliveries), expired);
        ahead.store(false, Ordering::SeqCst);
        rounds(5).await;
        assert!(store.ended(Act::Prune) > pruned, "the janitor trusts its clock again");
        stop.cancel();
    });
    let copy = arrive().await;
    assert!(matches!(copy[..], [Verdict::Duplicate(_)]), "{copy:?}");
}

/// Fetches from `api`, at this path and with a secret in a header.
fn refetch(api: &TheApp, path: &str) -> Option<Refetch> {
    Some(Refetch {
        url: RefetchUrl::parse(&format!("http://{}{path}", api.address)).unwrap(),
        headers: vec![(
            HeaderName::from_static("authorization"),
            Secret::new("Bearer never-print-me"),
        )],
        timeout: Duration::from_secs(10),
        body_bytes_max: 1 << 20,
    })
}

fn sql() -> HandlerKind {
    HandlerKind::Sql(Arc::new(SqlProgram::parse("SELECT :current", Dialect::Sqlite).unwrap()))
}

/// The body of an event whose object has changed since.
const OLD: &str = r#"{"old": 1, "type": "payout.paid"}"#;

/// An event about this resource.
fn about(event_id: &str, resource: &str) -> NewEvent {
    let mut new = event(SOURCE, event_id, "content-type: application/json\n", OLD);
    new.resource = Some(resource.to_owned());
    new.event.type_at = Some("/type");
    new
}

#[tokio::test]
async fn sql_with_refetch_gets_the_object_as_it_is_now_once_the_api_answers() {
    // The API is down for two attempts; a resource from outside tries to reach another path.
    let api = TheApp::start(|count, _| async move {
        match count {
            0 | 1 => says(500, "no"),
            _ => says(200, " {\"status\": \"paid\"}\n"),
        }
    })
    .await;
    let store = JobStore::new();
    let job = store.put(HANDLER, about("evt_1", "po 1/ä?x#y")).await;
    let mut handler = handler(sql());
    handler.refetch = refetch(&api, "/payouts/{resource}?type={event_type}&of={tenant}");
    assert!(!format!("{handler:?}").contains("never-print-me"));
    let _running = RunningWorkers::start(&store, handler);
    let done = store.until(job, |job| job.phase == Phase::Done).await;
    assert_eq!(done.result.as_deref(), Some(" {\"status\": \"paid\"}\n"), "the text as it came");
    assert_eq!(errors(&done), ["refetch: HTTP 500"; 2]);
    assert_eq!((done.progress.attempt, done.progress.steps), (3, 2));
    let calls = api.calls();
    assert_eq!(calls.len(), 3);
    for call in &calls {
        assert_eq!(call.method, Method::GET);
        assert_eq!(call.path, "/payouts/po%201%2F%C3%A4%3Fx%23y?type=payout.paid&of=default");
        assert_eq!(call.header("authorization"), "Bearer never-print-me");
        assert!(call.body.is_empty());
    }
}

/// Runs a job whose refetch gets this answer, and returns the job afterwards.
async fn after_one_fetch(
    answer: Response<Full<Bytes>>,
    change: impl FnOnce(&mut Refetch),
) -> JobDetail {
    let api = TheApp::start(move |_, _| {
        let answer = answer.clone();
        async move { answer }
    })
    .await;
    let store = JobStore::new();
    let job = store.put(HANDLER, about("evt_1", "po_1")).await;
    let mut handler = handler(sql());
    handler.policy.retry = vec![Duration::ZERO, Duration::from_secs(60)];
    handler.refetch = refetch(&api, "/{resource}");
    change(handler.refetch.as_mut().unwrap());
    let running = RunningWorkers::start(&store, handler);
    let found = store.until(job, |job| job.phase == Phase::Done || job.error.is_some()).await;
    running.stopped().await;
    found
}

#[tokio::test]
async fn a_fetch_that_fails_is_a_failed_attempt_that_says_why() {
    // Each way in which an API can fail.
    let check = async |answer, change: fn(&mut Refetch), error: &str| {
        let found = after_one_fetch(answer, change).await;
        assert_eq!(found.error.as_deref(), Some(error));
        assert_eq!((found.phase, found.progress.steps), (Phase::Ready, 1), "{error}");
        found
    };
    let same: fn(&mut Refetch) = |_| {};
    check(says(404, ""), same, "refetch: HTTP 404").await;
    check(says(410, "{}"), same, "refetch: HTTP 410").await;
    let mut moved = says(302, "{}");
    moved.headers_mut().insert("location", "/elsewhere".parse().unwrap());
    check(moved, same, "refetch: HTTP 302: redirects are not followed").await;
    check(says(204, ""), same, "refetch: the object is not JSON: line 1, column 0").await;
    check(says(200, "{\"a\":"), same, "refetch: the object is not JSON: line 1, column 5").await;
    check(says(200, vec![b'"', 0xff, b'"']), same, "refetch: the object is not UTF-8").await;
    let small: fn(&mut Refetch) = |refetch| refetch.body_bytes_max = 8;
    check(says(200, "[1,2,3,4]"), small, "refetch: the object is larger than 8 bytes").await;
    assert_eq!(after_one_fetch(says(200, "[1,2,34]"), small).await.phase, Phase::Done);
    let mut busy = says(503, "");
    busy.headers_mut().insert("retry-after", "600".parse().unwrap());
    let found = check(busy, same, "refetch: HTTP 503").await;
    assert!((500..=600).contains(&waits(&found)), "{}", waits(&found));
    let no_server: fn(&mut Refetch) = |refetch| {
        refetch.url = RefetchUrl::parse("http://127.0.0.1:1/").unwrap();
    };
    check(says(200, "{}"), no_server, "refetch: connection refused").await;
}

#[tokio::test]
async fn a_refetch_that_hangs_times_out_while_its_lease_is_renewed() {
    let api = TheApp::start(|_, _| std::future::pending()).await;
    let store = JobStore::new();
    let job = store.put(HANDLER, about("evt_1", "po_1")).await;
    let mut handler = handler(sql());
    handler.policy = Policy { retry: vec![Duration::ZERO], lease: Duration::from_millis(30) };
    handler.refetch = refetch(&api, "/{event_id}");
    handler.refetch.as_mut().unwrap().timeout = Duration::from_millis(100);
    let _running = RunningWorkers::start(&store, handler);
    let found = store.until(job, |job| job.phase == Phase::Dead).await;
    assert_eq!(found.error.as_deref(), Some("refetch: timed out after 100ms"));
    within(store.faults.until(|faults| faults.begun(Act::Renew) >= 3)).await;
}

#[tokio::test]
async fn an_app_gets_the_current_object_in_a_header_and_the_original_body() {
    let current = "{ \"name\" : \"Zoë\",\n \"amount\": 10000000000000000001 }";
    let api = TheApp::start(move |_, _| async move { says(200, current) }).await;
    let app = TheApp::start(|_, _| async { says(200, "") }).await;
    let store = JobStore::new();
    let mut forged = about("evt_1", "po_1");
    forged.event.headers.push_str("hapax-current: {}\n");
    let job = store.put(HANDLER, forged).await;
    let mut handler = handler(HandlerKind::Http(target(app.url())));
    handler.refetch = refetch(&api, "/{event_id}");
    let _running = RunningWorkers::start(&store, handler);
    store.until(job, |job| job.phase == Phase::Done).await;
    let call = app.calls().remove(0);
    assert_eq!(call.body, OLD);
    assert_eq!(call.headers.get_all("hapax-current").iter().count(), 1);
    assert_eq!(
        call.header("hapax-current"),
        r#"{"name":"Zo\u00eb","amount":10000000000000000001}"#
    );
    assert_eq!(call.header("authorization"), "", "that is for the API only");
}

#[tokio::test]
async fn an_object_too_large_for_a_header_fails_the_attempt_and_the_app_is_not_called() {
    let api = TheApp::start(|_, _| async { says(200, format!("\"{}\"", "x".repeat(8_191))) }).await;
    let app = TheApp::start(|_, _| async { says(200, "") }).await;
    let store = JobStore::new();
    let job = store.put(HANDLER, about("evt_1", "po_1")).await;
    let mut handler = handler(HandlerKind::Http(target(app.url())));
    handler.refetch = refetch(&api, "/");
    let _running = RunningWorkers::start(&store, handler);
    let found = store.until(job, |job| job.phase == Phase::Dead).await;
    assert!(found.error.as_deref().unwrap().contains("larger than 8192 bytes"), "{found:?}");
    assert_eq!(app.calls().len(), 0);
}

#[tokio::test]
async fn pulled_claims_come_with_their_object_and_those_without_are_settled_and_left_out() {
    // One of three objects cannot be fetched: its job must neither delay the others nor reach a
    // worker.
    let api = TheApp::start(|_, call| async move {
        match &*call.path {
            "/po_2" => says(404, ""),
            path => says(200, format!("{{\"path\":\"{path}\"}}")),
        }
    })
    .await;
    let store = JobStore::new();
    let mut jobs = Vec::new();
    for n in 1..=3 {
        let event = about(&format!("evt_{n}"), &format!("po_{n}"));
        jobs.push(store.put(HANDLER, event).await);
    }
    let mut handler = handler(HandlerKind::Pull);
    handler.refetch = refetch(&api, "/{resource}");
    let running = RunningWorkers::start(&store, handler);
    let of = HandlerRef { source: SourceName::new(SOURCE), handler: HandlerName::new(HANDLER) };
    let ask = ClaimAsk { handler: of.clone(), limit: 10, worker: "mine".into() };
    // The handlers are announced by the workers.
    within(store.faults.until(|faults| faults.ended(Act::Announce) > 0)).await;
    let claims = store.faults.claim(ask).await.unwrap();
    let pulled = within(running.workers.with_current(&of, claims)).await;
    let found: Vec<_> = pulled
        .iter()
        .map(|pulled| (pulled.claim.job, pulled.current.as_deref().unwrap()))
        .collect();
    assert_eq!(found, [(jobs[0], r#"{"path":"/po_1"}"#), (jobs[2], r#"{"path":"/po_3"}"#)]);
    let failed = store.job(jobs[1]).await;
    assert_eq!((failed.phase, failed.progress.steps), (Phase::Ready, 1));
    assert_eq!(failed.error.as_deref(), Some("refetch: HTTP 404"));
}

/// A Rust handler that reports its start, and how many other attempts ran alongside a job with a
/// lost attempt.
struct Watching {
    store: JobStore,
    arrived: Semaphore,
    gate: Semaphore,
    inside: AtomicUsize,
    beside: AtomicUsize,
    begun: Mutex<Vec<Bytes>>,
}

impl std::fmt::Debug for Watching {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Watching")
    }
}

impl RustHandler for Watching {
    fn work(
        &self,
        claim: Claim,
        _: Option<Arc<str>>,
    ) -> Pin<Box<dyn Future<Output = RustOutcome> + Send + '_>> {
        Box::pin(async move {
            self.begun.lock().unwrap().push(claim.event.body.clone());
            let others = self.inside.fetch_add(1, Ordering::SeqCst);
            if claim.event.body == "lost" {
                self.beside.fetch_add(others, Ordering::SeqCst);
                // Gives every other attempt the time to start.
                for _ in 0..1_000 {
                    tokio::task::yield_now().await;
                    let others = self.inside.load(Ordering::SeqCst) - 1;
                    self.beside.fetch_add(others, Ordering::SeqCst);
                }
            } else {
                self.arrived.add_permits(1);
                self.gate.acquire().await.unwrap().forget();
            }
            self.inside.fetch_sub(1, Ordering::SeqCst);
            self.store.complete(claim.job).await;
            RustOutcome::Committed
        })
    }
}

#[tokio::test]
async fn a_job_with_a_lost_attempt_runs_alone_in_the_process() {
    // If the job ends the process again, every other attempt in flight is lost as well.
    let store = JobStore::new();
    let code = Arc::new(Watching {
        store: store.clone(),
        arrived: Semaphore::new(0),
        gate: Semaphore::new(0),
        inside: AtomicUsize::new(0),
        beside: AtomicUsize::new(0),
        begun: Mutex::default(),
    });
    let other = |name: &str| {
        let mut handler = handler(HandlerKind::Rust(code.clone()));
        handler.name = HandlerName::new(name);
        handler.policy.lease = Duration::from_millis(60);
        handler
    };
    let lost = store.put_lost(HANDLER, vec![event(SOURCE, "evt_lost", "", "lost")]).await[0];
    let running = RunningWorkers::start(&store, other(HANDLER));
    running.workers.reload(vec![lane(other(HANDLER)), lane(other("second"))]);
    let put = async |handler: &str, id: &str| store.put(handler, event(SOURCE, id, "", "{}")).await;
    let before = [put(HANDLER, "evt_1").await, put("second", "evt_2").await];
    within(code.arrived.acquire_many(2)).await.unwrap().forget();
    store.hurry(lost).await;
    store.until(lost, |job| job.phase == Phase::Leased).await;
    let after = [put(HANDLER, "evt_3").await, put("second", "evt_4").await];
    // The claim of the lost job is renewed while it waits for the attempts in flight.
    within(store.faults.until(|faults| faults.begun(Act::Renew) >= 4)).await;
    assert!(code.begun.lock().unwrap().iter().all(|body| *body != "lost"), "it did not wait");
    code.gate.add_permits(100);
    for job in before.into_iter().chain([lost]).chain(after) {
        store.until(job, |job| job.phase == Phase::Done).await;
    }
    assert_eq!(code.beside.load(Ordering::SeqCst), 0, "another attempt was in flight beside it");
    assert_eq!(code.begun.lock().unwrap().len(), 5);
}

#[tokio::test]
async fn lost_calls_neither_wait_for_others_nor_block_them() {
    // After a restart there may be many lost calls. An app cannot end this process, so all of them
    // are in flight at once.
    let (app, arrived, gate) = gated().await;
    let store = JobStore::new();
    let new = |n: usize| event(SOURCE, &format!("evt_{n}"), "", "{}");
    let mut jobs = store.put_lost(HANDLER, (0..6).map(new).collect()).await;
    let _running = RunningWorkers::start(&store, handler(HandlerKind::Http(target(app.url()))));
    for job in &jobs {
        store.hurry(*job).await;
    }
    jobs.push(store.put(HANDLER, new(6)).await);
    within(arrived.acquire_many(7)).await.unwrap().forget();
    gate.add_permits(7);
    for job in jobs {
        store.until(job, |job| job.phase == Phase::Done).await;
    }
}

#[tokio::test]
async fn an_sql_job_with_a_lost_attempt_runs_alone_in_the_process() {
    // The job runs inside the store, but if it ends the process, calls in flight are lost too.
    let (app, arrived, gate) = gated().await;
    let store = JobStore::new();
    let mut statements = handler(sql());
    statements.name = HandlerName::new("second");
    statements.policy.lease = Duration::from_millis(60);
    let new = |id| event(SOURCE, id, "", "{}");
    let lost = store.put_lost("second", vec![new("evt_2"), new("evt_3")]).await;
    let running = RunningWorkers::start(&store, handler(HandlerKind::Http(target(app.url()))));
    running
        .workers
        .reload(vec![lane(handler(HandlerKind::Http(target(app.url())))), lane(statements)]);
    let call = store.put(HANDLER, event(SOURCE, "evt_1", "", "{}")).await;
    within(arrived.acquire()).await.unwrap().forget();
    for job in &lost {
        store.hurry(*job).await;
    }
    let after = store.put("second", event(SOURCE, "evt_4", "", "{}")).await;
    // The claim of the lost job is renewed while it waits for the call in flight.
    within(store.faults.until(|faults| faults.begun(Act::Renew) >= 2)).await;
    for (job, phase) in [(lost[0], Phase::Leased), (lost[1], Phase::Ready), (call, Phase::Leased)] {
        assert_eq!(store.job(job).await.phase, phase, "it did not wait");
    }
    gate.add_permits(1);
    for job in [call, lost[0], lost[1], after] {
        store.until(job, |job| job.phase == Phase::Done).await;
    }
}

#[tokio::test]
async fn lost_jobs_that_came_up_together_are_not_held_while_one_of_them_runs() {
    // Several slices run at once, and each finds a lost job. The first of these jobs may end the
    // process. The other jobs must not be claimed meanwhile: each would lose an attempt as well,
    // and at last become a dead letter.
    let store = JobStore::with(|faults| faults.with_sql_batches_max(3));
    let new = |n: usize| event(SOURCE, &format!("evt_{n}"), "", "{}");
    let lost = store.put_lost(HANDLER, (1000..1003).map(new).collect()).await;
    let mut many = Vec::new();
    for n in 0..SQL_SLICE {
        many.push(store.put(HANDLER, new(n)).await);
    }
    // The jobs of a full slice are due before the lost jobs.
    store.pass(Duration::from_secs(1));
    for job in &lost {
        store.hurry(*job).await;
    }
    let runs = store.faults.block(Act::RunClaimed);
    let mut statements = handler(sql());
    statements.concurrency = 3;
    let _running = RunningWorkers::start(&store, statements);
    for n in 1..=lost.len() {
        within(store.faults.until(|faults| faults.begun(Act::RunClaimed) == n)).await;
        let is_held = |job: &&JobDetail| job.phase == Phase::Leased && job.progress.lost > 0;
        assert_eq!(store.all().await.iter().filter(is_held).count(), 1, "others are held");
        runs.add_permits(1);
    }
    for job in many.into_iter().chain(lost.iter().copied()) {
        store.until(job, |job| job.phase == Phase::Done).await;
    }
    assert_eq!(given_back(&store), 2, "they did not come up together");
    for job in lost {
        let attempt = store.job(job).await.progress.attempt;
        assert_eq!(attempt, 2, "uncounted, and then counted once");
    }
}

/// The number of claims that were given back.
fn given_back(store: &JobStore) -> usize {
    let calls = store.faults.arguments(Act::GiveBack);
    calls.iter().map(|claims| claims.matches("Fence(").count()).sum()
}
