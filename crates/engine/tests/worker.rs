//! The workers through their own door: a store on a workbench on one side, an app on a real socket
//! on the other.

#[path = "support/bench.rs"]
mod bench;
mod support;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bench::{Bench, event};
use bytes::Bytes;
use hapax_core::handler::{Dialect, Handler, HandlerKind, HttpTarget, SignAs, SqlProgram, Types};
use hapax_core::job::{HandlerName, JobId, Phase, Policy};
use hapax_core::secret::{ActiveSecret, Secret};
use hapax_core::source::SourceSpec;
use hapax_core::{Arrival, Source, SourceName, Timestamp, Verified, verify};
use hapax_engine::{
    Bell, HttpLimits, Ingress, Janitor, LaneSpec, Mode, Outbound, Retention, RouteSpec, Routes,
    RoutesSpec, Workers, serve_ingress,
};
use http::{HeaderMap, Method, Request, Response, Uri};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use serde_json::json;
use support::{Wire, within};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

/// A request as the app got it.
#[derive(Debug, Clone)]
struct Call {
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
    /// Answers the n-th call, from 0, with what `answer` says.
    async fn start<F>(answer: impl Fn(usize, Call) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Response<Full<Bytes>>> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let calls = Arc::new(Mutex::new(Vec::new()));
        let answer = {
            let (calls, answer) = (calls.clone(), Arc::new(answer));
            move |request: Request<Incoming>, _| {
                let (calls, answer) = (calls.clone(), answer.clone());
                async move {
                    let (head, body) = request.into_parts();
                    assert_eq!(head.method, Method::POST);
                    let body = body.collect().await.unwrap().to_bytes();
                    let call = Call { headers: head.headers, body };
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
        types: Types::default(),
        policy: Policy { retry: vec![Duration::ZERO; 3], lease: Duration::from_secs(30) },
        timeout: Duration::from_secs(10),
        concurrency: 16,
        order: None,
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
struct Crew {
    workers: Arc<Workers<Bench>>,
    stop: CancellationToken,
    running: JoinHandle<()>,
    _guard: DropGuard,
}

impl Crew {
    fn start(store: &Arc<Bench>, handler: Handler) -> Self {
        Self::with(store, handler, Bell::default(), Arc::new(Timestamp::now))
    }

    fn with(store: &Arc<Bench>, handler: Handler, bell: Bell, now: hapax_engine::Now) -> Self {
        let outbound = Outbound::new().unwrap();
        let lanes = vec![lane(handler)];
        let workers = Arc::new(Workers::new(store.clone(), outbound, bell, now, lanes));
        let stop = CancellationToken::new();
        let running = tokio::spawn(workers.clone().run(Duration::from_secs(20), stop.clone()));
        Self { workers, running, _guard: stop.clone().drop_guard(), stop }
    }

    async fn stopped(self) {
        self.stop.cancel();
        within(self.running).await.unwrap();
    }
}

fn put(store: &Bench, event_id: &str) -> JobId {
    store.put(HANDLER, event(SOURCE, event_id, "content-type: application/json\n", "{}"))
}

#[tokio::test]
async fn a_failed_attempt_is_made_again_with_the_same_key_and_another_fence() {
    let app = TheApp::start(|count, _| async move {
        match count {
            0 => says(500, "no"),
            _ => {
                says(200, r#"{"result":"ch_1","publish":[{"type":"fee.charged","data":{"a":1}}]}"#)
            }
        }
    })
    .await;
    let store = Bench::new();
    let headers = "content-type: application/json; charset=utf-8\nx-own: 1\nx-own: 2\nhost: us\n\
                   content-length: 99\naccept-encoding: gzip\nhapax-job: forged\nwebhook-id: theirs\n";
    let body = "{\"id\": \"evt_1\",  \"ä\": 1}";
    let job = store.put(HANDLER, event(SOURCE, "evt_1", headers, body));
    let _crew = Crew::start(&store, handler(HandlerKind::Http(target(app.url()))));
    let done = store.until(job, |piece| piece.phase == Phase::Done).await;
    assert_eq!(done.result.as_deref(), Some("ch_1"));
    assert_eq!(done.published[0].r#type, "fee.charged");
    assert_eq!(done.error.as_deref(), Some("HTTP 500"));
    let calls = app.calls();
    assert_eq!(calls.len(), 2);
    for call in &calls {
        assert_eq!(call.body, body);
        assert_eq!(call.header("content-type"), "application/json; charset=utf-8");
        assert_eq!(call.headers.get_all("x-own").iter().count(), 2);
        assert_eq!(call.header("host"), app.address.to_string());
        assert_eq!(call.header("accept-encoding"), "");
        assert_eq!(call.headers.get_all("hapax-job").iter().count(), 1);
        assert_eq!(call.header("hapax-job"), job.to_string());
        assert_eq!(call.header("webhook-id"), done.event.id.to_string());
        assert_eq!(call.header("idempotency-key"), format!("{}:{HANDLER}", done.event.id));
    }
    let tried: Vec<_> = calls
        .iter()
        .map(|call| (call.header("hapax-attempt"), call.header("hapax-fence")))
        .collect();
    assert_eq!(tried, [("1", "1"), ("2", "2")]);
}

/// Runs one attempt against an app that answers so, and says what became of the job.
async fn after_one(answer: Response<Full<Bytes>>) -> (bench::Piece, usize) {
    let app = TheApp::start(move |_, _| {
        let answer = answer.clone();
        async move { answer }
    })
    .await;
    let store = Bench::new();
    let job = put(&store, "evt_1");
    let mut handler = handler(HandlerKind::Http(target(app.url())));
    handler.policy.retry = vec![Duration::ZERO, Duration::from_secs(60)];
    let crew = Crew::start(&store, handler);
    let piece = store.until(job, |piece| piece.phase == Phase::Done || piece.error.is_some()).await;
    crew.stopped().await;
    (piece, app.calls().len())
}

fn waits(piece: &bench::Piece) -> i64 {
    piece.due.duration_since(Timestamp::now()).as_secs()
}

#[tokio::test]
async fn retry_after_is_honoured_where_it_is_longer_than_the_schedule() {
    let with = |status: u16, value: &str| {
        let mut answer = says(status, "");
        answer.headers_mut().insert("retry-after", value.parse().unwrap());
        answer
    };
    let (piece, _) = after_one(with(503, "600")).await;
    assert!((595..=600).contains(&waits(&piece)), "{}", waits(&piece));
    let (piece, _) = after_one(with(429, "999999999")).await;
    assert!((86_390..=86_400).contains(&waits(&piece)), "{}", waits(&piece));
    let date = Timestamp::now() + jiff::SignedDuration::from_hours(1);
    let date =
        jiff::fmt::rfc2822::DateTimePrinter::new().timestamp_to_rfc9110_string(&date).unwrap();
    let (piece, _) = after_one(with(503, &date)).await;
    assert!((3_590..=3_600).contains(&waits(&piece)), "{}", waits(&piece));
    for answer in [with(503, "1"), with(503, "soon"), with(500, "600")] {
        let (piece, _) = after_one(answer).await;
        assert!((45..=75).contains(&waits(&piece)), "{}", waits(&piece));
    }
}

#[tokio::test]
async fn a_redirect_is_a_failure_and_is_not_followed() {
    let mut answer = says(302, "");
    answer.headers_mut().insert("location", "/hooks".parse().unwrap());
    let (piece, calls) = after_one(answer).await;
    assert_eq!(piece.error.as_deref(), Some("HTTP 302: redirects are not followed"));
    assert_eq!(calls, 1);
}

#[tokio::test]
async fn any_answer_of_200_is_done_and_only_a_fitting_one_says_more() {
    for body in ["", "ok", r#"{"received":true}"#, "[1]", r#"{"result":7}"#, "{"] {
        let (piece, _) = after_one(says(204 - 4 * u16::from(!body.is_empty()), body)).await;
        assert_eq!((piece.phase, piece.result), (Phase::Done, None), "{body}");
    }
    let (piece, _) = after_one(says(200, r#"{"result":"r","publish":[{"data":1}]}"#)).await;
    let error = piece.error.unwrap();
    assert!(error.contains("\"publish\" is malformed"), "{error}");
    assert_eq!(piece.phase, Phase::Ready);
}

#[tokio::test]
async fn an_endless_answer_is_cut_and_never_passes_for_one_that_publishes_nothing() {
    let (piece, _) = after_one(says(200, vec![b'x'; 1 << 20])).await;
    assert_eq!((piece.phase, piece.result), (Phase::Done, None));
    let long = json!({ "publish": [{ "type": "a", "data": "x".repeat(1 << 20) }] }).to_string();
    let (piece, _) = after_one(says(200, long)).await;
    assert_eq!(piece.error.as_deref(), Some("the answer is longer than 65536 bytes"));
}

#[tokio::test]
async fn an_app_that_does_not_answer_in_time_or_is_not_there_is_a_short_error() {
    let app = TheApp::start(|_, _| std::future::pending()).await;
    let store = Bench::new();
    let job = put(&store, "evt_1");
    let mut slow = handler(HandlerKind::Http(target(app.url())));
    slow.timeout = Duration::from_millis(50);
    let _crew = Crew::start(&store, slow);
    let piece = store.until(job, |piece| piece.phase == Phase::Dead).await;
    assert_eq!(piece.error.as_deref(), Some("timed out after 50ms"));
    assert_eq!(app.calls().len(), 3);

    let nobody = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", nobody.local_addr().unwrap()).parse().unwrap();
    drop(nobody);
    let store = Bench::new();
    let job = put(&store, "evt_1");
    let _crew = Crew::start(&store, handler(HandlerKind::Http(target(url))));
    let piece = store.until(job, |piece| piece.phase == Phase::Dead).await;
    assert_eq!(piece.error.as_deref(), Some("connection refused"));
}

/// What an app behind `target` gets for an event with these headers, as it would verify it.
async fn request_for(target: impl FnOnce(Uri) -> HttpTarget, headers: &str) -> Arrival {
    let app = TheApp::start(|_, _| async { says(200, "") }).await;
    let store = Bench::new();
    let job = store.put(HANDLER, event(SOURCE, "evt_1", headers, EVENT));
    let crew = Crew::start(&store, handler(HandlerKind::Http(target(app.url()))));
    store.until(job, |piece| piece.phase == Phase::Done).await;
    crew.stopped().await;
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
async fn a_senders_own_id_that_it_signs_stays_as_it_was() {
    // Svix names its headers either way; the names that came are the names that go.
    let secret = ActiveSecret::forever(Secret::new("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"));
    let clerk = Arc::new(Source::build(SourceSpec::new(SOURCE, "svix", vec![secret])).unwrap());
    let app = TheApp::start(|_, _| async { says(200, "") }).await;
    let store = Bench::new();
    let headers = "svix-id: msg_1\nsvix-timestamp: 1700000000\nsvix-signature: v1,AAAA\n";
    let job = store.put(HANDLER, event(SOURCE, "msg_1", headers, EVENT));
    let as_provider = HttpTarget { sign_as: SignAs::Provider, ..target(app.url()) };
    let lane = LaneSpec {
        handler: Arc::new(handler(HandlerKind::Http(as_provider))),
        source: SourceName::new(SOURCE),
        verifiers: vec![clerk.clone()],
    };
    let crew = Crew::start(&store, handler(HandlerKind::Pull));
    crew.workers.reload(vec![lane]);
    store.until(job, |piece| piece.phase == Phase::Done).await;
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
    let store = Bench::new();
    let job = put(&store, "evt_1");
    let app = {
        let store = store.clone();
        TheApp::start(move |_, _| {
            store.complete(job);
            async { says(500, "") }
        })
        .await
    };
    let crew = Crew::start(&store, handler(HandlerKind::Http(target(app.url()))));
    store.until(job, |piece| piece.phase == Phase::Done).await;
    crew.stopped().await;
    let piece = store.piece(job);
    assert_eq!((piece.phase, piece.error), (Phase::Done, None));
    assert_eq!(store.settled.load(Ordering::SeqCst), 0);
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
    let store = Bench::new();
    let jobs: Vec<JobId> = (0..12).map(|n| put(&store, &format!("evt_{n}"))).collect();
    let two = || {
        let mut handler = handler(HandlerKind::Http(target(app.url())));
        handler.concurrency = 2;
        handler
    };
    let crew = Crew::start(&store, two());
    within(arrived.acquire_many(2)).await.unwrap().forget();
    crew.workers.reload(vec![lane(two())]);
    gate.add_permits(2);
    within(arrived.acquire_many(2)).await.unwrap().forget();
    gate.add_permits(100);
    for job in jobs {
        store.until(job, |piece| piece.phase == Phase::Done).await;
    }
    assert_eq!(most.load(Ordering::SeqCst), 2);
    assert_eq!(app.calls().len(), 12);
}

#[tokio::test]
async fn a_stop_gives_back_what_was_claimed_but_not_begun() {
    let app = TheApp::start(|_, _| async { says(200, "") }).await;
    let store = Bench::new();
    store.claims.forget_permits(Semaphore::MAX_PERMITS);
    let jobs = [put(&store, "evt_1"), put(&store, "evt_2")];
    let crew = Crew::start(&store, handler(HandlerKind::Http(target(app.url()))));
    within(store.asked.acquire()).await.unwrap().forget();
    crew.stop.cancel();
    store.claims.add_permits(1);
    crew.stopped().await;
    assert_eq!(store.given_back.load(Ordering::SeqCst), 2);
    for job in jobs {
        let piece = store.piece(job);
        assert_eq!((piece.phase, piece.progress.attempt), (Phase::Ready, 0));
    }
    assert_eq!(app.calls().len(), 0);
}

#[tokio::test]
async fn a_stop_waits_for_what_was_begun() {
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
    let store = Bench::new();
    let job = put(&store, "evt_1");
    let crew = Crew::start(&store, handler(HandlerKind::Http(target(app.url()))));
    within(arrived.acquire()).await.unwrap().forget();
    crew.stop.cancel();
    let late = put(&store, "evt_2");
    gate.add_permits(2);
    crew.stopped().await;
    assert_eq!(store.piece(job).phase, Phase::Done);
    assert_eq!(store.piece(late).phase, Phase::Ready);
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
    let store = Bench::new();
    let job = put(&store, "evt_1");
    let mut short = handler(HandlerKind::Http(target(app.url())));
    short.policy.lease = Duration::from_millis(30);
    let _crew = Crew::start(&store, short);
    within(store.renewals.acquire_many(3)).await.unwrap().forget();
    gate.add_permits(1);
    store.until(job, |piece| piece.phase == Phase::Done).await;
}

#[tokio::test]
async fn a_panic_in_an_attempt_is_a_failed_attempt_and_others_go_on() {
    let app = TheApp::start(|_, _| async { says(200, "") }).await;
    let store = Bench::new();
    let job = put(&store, "evt_1");
    let panics = AtomicBool::new(true);
    let now = Arc::new(move || match panics.swap(false, Ordering::SeqCst) {
        true => panic!("the first attempt to ask for the time"),
        false => Timestamp::now(),
    });
    let http = handler(HandlerKind::Http(target(app.url())));
    let _crew = Crew::with(&store, http, Bell::default(), now);
    let piece = store.until(job, |piece| piece.phase == Phase::Done).await;
    assert_eq!(piece.error.as_deref(), Some("the handler panicked"));
    assert_eq!(piece.progress.steps, 1);
}

#[tokio::test]
async fn a_store_that_fails_for_a_while_delays_work_and_loses_none() {
    let app = TheApp::start(|_, _| async { says(200, "") }).await;
    let store = Bench::new();
    store.failures.store(2, Ordering::SeqCst);
    let first = put(&store, "evt_1");
    let _crew = Crew::start(&store, handler(HandlerKind::Http(target(app.url()))));
    store.until(first, |piece| piece.phase == Phase::Done).await;
    assert_eq!(store.failures.load(Ordering::SeqCst), 0);
    assert_eq!(app.calls().len(), 1);
}

#[tokio::test]
async fn sql_runs_in_the_store_slice_after_slice_and_what_comes_later_is_heard_of() {
    let store = Bench::new();
    let jobs: Vec<JobId> = (0..200).map(|n| put(&store, &format!("evt_{n}"))).collect();
    let program = Arc::new(SqlProgram::parse("SELECT 1", Dialect::Sqlite).unwrap());
    let crew = Crew::start(&store, handler(HandlerKind::Sql(program)));
    for job in jobs {
        store.until(job, |piece| piece.phase == Phase::Done).await;
    }
    let later = put(&store, "evt_later");
    let piece = store.until(later, |piece| piece.phase == Phase::Done).await;
    let [worker] = &piece.workers[..] else { panic!("one attempt") };
    assert!(worker.starts_with("worker-"));
    crew.stopped().await;
}

/// A sync source in front of an app, with workers between them.
struct Counter {
    store: Arc<Bench>,
    wire: Wire,
    source: Arc<Source>,
    _crew: Crew,
    _stop: DropGuard,
}

impl Counter {
    async fn open(app: &TheApp, timeout: Duration) -> Self {
        let store = Bench::new();
        let mut http = handler(HandlerKind::Http(target(app.url())));
        http.policy.retry =
            vec![Duration::ZERO, Duration::from_secs(3600), Duration::from_secs(3600)];
        let source = stripe("whsec_of_the_source");
        let mut route = RouteSpec::new(source.clone());
        route.mode = Mode::Sync { timeout };
        route.handlers =
            vec![Arc::new(Handler { kind: HandlerKind::Pull, ..handler(HandlerKind::Pull) })];
        let routes = Routes::build(RoutesSpec::new(vec![route])).unwrap();
        let now: hapax_engine::Now = Arc::new(Timestamp::now);
        let ingress = Arc::new(Ingress::new(store.clone(), routes, now.clone()).with_sync());
        let crew = Crew::with(&store, http, ingress.bell(), now);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let wire = Wire::connect(listener.local_addr().unwrap()).await;
        let stop = CancellationToken::new();
        let limits = HttpLimits::default();
        tokio::spawn(serve_ingress(listener, None, ingress, limits, stop.clone()));
        Self { store, wire, source, _crew: crew, _stop: stop.drop_guard() }
    }

    async fn send(&mut self) -> support::Heard {
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
async fn a_sync_source_answers_with_the_result_of_the_work_and_says_it_again_to_copies() {
    let app = TheApp::start(|_, _| async { says(200, r#"{"result":"ch_1"}"#) }).await;
    let mut counter = Counter::open(&app, Duration::from_secs(20)).await;
    let first = counter.send().await;
    let id = first.json()["id"].clone();
    assert_eq!(first.status, 200);
    assert_eq!(
        first.json(),
        json!({ "decision": "accepted", "id": id, "status": "processed", "result": "ch_1" })
    );
    let copy = counter.send().await;
    assert_eq!(
        copy.json(),
        json!({ "decision": "duplicate", "id": id, "status": "processed", "result": "ch_1" })
    );
    assert_eq!(app.calls().len(), 1);
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
    let mut counter = Counter::open(&app, Duration::from_secs(20)).await;
    for calls in [1, 2] {
        let heard = counter.send().await;
        assert_eq!(
            (heard.status, heard.header("content-type"), heard.json()["type"].as_str()),
            (500, Some("application/problem+json"), Some("urn:hapax:problem:work_failed"))
        );
        assert_eq!(app.calls().len(), calls);
    }
    let heard = counter.send().await;
    assert_eq!((heard.status, heard.json()["result"].as_str()), (200, Some("at last")));
    assert_eq!(counter.store.hurried.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn at_a_sync_source_work_that_outlasts_the_wait_is_202_and_goes_on() {
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
    let mut counter = Counter::open(&app, Duration::from_millis(100)).await;
    let heard = counter.send().await;
    assert_eq!((heard.status, heard.header("hapax-decision")), (202, Some("accepted")));
    assert_eq!(heard.json()["result"], json!(null));
    gate.add_permits(1);
    let again = loop {
        let heard = counter.send().await;
        if heard.status != 202 {
            break heard;
        }
    };
    assert_eq!((again.status, again.json()["result"].as_str()), (200, Some("ch_1")));
}

#[tokio::test]
async fn the_janitor_prunes_in_small_steps_until_nothing_is_left_and_comes_again() {
    let store = Bench::new();
    *store.prunes.lock().unwrap() = vec![false, true, true];
    let retention = Retention {
        events: Some(Duration::from_secs(60)),
        keys: vec![(SourceName::new(SOURCE), Duration::from_secs(3600))],
    };
    let at = Timestamp::from_second(1_700_000_000).unwrap();
    let janitor = Janitor::new(store.clone(), Arc::new(move || at), retention);
    let janitor = Arc::new(janitor.every(Duration::from_millis(10)));
    let stop = CancellationToken::new();
    let running = {
        let (janitor, stop) = (janitor.clone(), stop.clone());
        tokio::spawn(async move { janitor.run(stop).await })
    };
    within(store.pruned.acquire_many(3)).await.unwrap().forget();
    janitor.reload(Retention::default());
    store.failures.store(1, Ordering::SeqCst);
    // One round may have begun with the settings from before.
    within(store.pruned.acquire_many(2)).await.unwrap().forget();
    stop.cancel();
    within(running).await.unwrap();
    let horizons = store.horizons.lock().unwrap();
    for (horizon, limit) in &horizons[..3] {
        assert_eq!(horizon.events_before.as_second(), 1_700_000_000 - 60);
        assert_eq!(horizon.keys_before[0].1.as_second(), 1_700_000_000 - 3600);
        assert_eq!(*limit, 500);
    }
    assert_eq!(horizons[4].0.events_before, Timestamp::MIN);
    assert!(horizons[4].0.keys_before.is_empty());
}
