//! The ingress through its public interface: signed and unsigned requests over real sockets, with a
//! store that can block or fail.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use crate::support::{Wire, within};
use aws_lc_rs::hmac;
use bytes::Bytes;
use hapax_core::envelope::{EnvelopeSpec, IdSpec};
use hapax_core::scheme::CustomScheme;
use hapax_core::secret::{ActiveSecret, Secret};
use hapax_core::source::{LatePolicy, SourceSpec};
use hapax_core::store::{EventDetail, EventFilter, EventName, Inspect as _, Lookup, StoreError};
use hapax_core::{Source, Tenant, Timestamp};
use hapax_engine::{
    BodyLimits, Drained, HttpLimits, Ingress, Rate, RouteSpec, Routes, RoutesSpec, serve_ingress,
};
use hapax_sim::{Act, FaultyStore};
use hapax_store::MemoryStore;
use http::Request;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, yield_now};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// The model in memory, with injected faults.
type TestStore = FaultyStore<MemoryStore>;

const SECRET: &str = "a secret that only this test knows";

/// The settings of a test's server.
struct Setup {
    name: &'static str,
    tenant: &'static str,
    late: LatePolicy,
    rate_limit: Option<Rate>,
    unverified_limit: Option<Rate>,
    body: BodyLimits,
    trusted_proxies: Vec<ipnet::IpNet>,
    connections_max: usize,
}

/// `name` separates the counters of tests: they share one recorder.
fn setup(name: &'static str) -> Setup {
    Setup {
        name,
        tenant: "default",
        late: LatePolicy::Review,
        rate_limit: None,
        unverified_limit: None,
        body: BodyLimits::default(),
        trusted_proxies: Vec::new(),
        connections_max: 100,
    }
}

fn per_hour(count: u32) -> Option<Rate> {
    Some(Rate { count: count.try_into().unwrap(), per: Duration::from_secs(3600) })
}

impl Setup {
    fn routes(&self) -> Routes {
        let secret = ActiveSecret::forever(Secret::new(SECRET));
        let mut spec = SourceSpec::new(self.name, "custom", vec![secret]);
        spec.tenant = Tenant::new(self.tenant);
        spec.late = Some(self.late);
        spec.custom = Some(CustomScheme {
            algorithm: Some("hmac-sha256".into()),
            header: Some("x-signature".into()),
            content: Some("{timestamp}.{body}".into()),
            timestamp: Some("header:x-timestamp".into()),
            ..CustomScheme::default()
        });
        spec.envelope = EnvelopeSpec {
            event_id: Some(IdSpec::Selector("/id".into())),
            event_type: Some("/type".into()),
            ..EnvelopeSpec::default()
        };
        let source = Arc::new(Source::build(spec).expect("a good spec"));
        let mut route = RouteSpec::new(source);
        route.rate_limit = self.rate_limit;
        route.unverified_limit = self.unverified_limit;
        let mut routes = RoutesSpec::new(vec![route]);
        routes.body = self.body.clone();
        routes.trusted_proxies = self.trusted_proxies.clone();
        Routes::build(routes).expect("one route")
    }

    async fn start(self) -> TestServer {
        let metrics = recorder();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let clock = Arc::new(AtomicI64::new(1_700_000_000));
        let now = {
            let clock = clock.clone();
            Arc::new(move || Timestamp::from_second(clock.load(Ordering::SeqCst)).unwrap())
        };
        let store = Arc::new(FaultyStore::new(MemoryStore::with_clock(now.clone())));
        let ingress = Arc::new(Ingress::new(store.clone(), self.routes(), now));
        let stop = CancellationToken::new();
        let limits = HttpLimits { connections_max: self.connections_max, ..HttpLimits::default() };
        let served =
            tokio::spawn(serve_ingress(listener, None, ingress.clone(), limits, stop.clone()));
        let path = match self.tenant {
            "default" => format!("/webhooks/{}", self.name),
            tenant => format!("/webhooks/{tenant}/{}", self.name),
        };
        TestServer { name: self.name, path, address, store, clock, ingress, stop, served, metrics }
    }
}

/// A running server.
struct TestServer {
    name: &'static str,
    path: String,
    address: SocketAddr,
    store: Arc<TestStore>,
    clock: Arc<AtomicI64>,
    ingress: Arc<Ingress<TestStore>>,
    stop: CancellationToken,
    served: JoinHandle<Drained>,
    metrics: &'static PrometheusHandle,
}

impl TestServer {
    async fn wire(&self) -> Wire {
        Wire::connect(self.address).await
    }

    fn now(&self) -> i64 {
        self.clock.load(Ordering::SeqCst)
    }

    /// The head and body of a correctly signed request.
    fn signed(&self, body: &str) -> String {
        self.request(body, self.now(), &sign(self.now(), body), "")
    }

    fn forged(&self, more: &str) -> String {
        self.request("{}", self.now(), &sign(self.now(), "another body"), more)
    }

    fn request(&self, body: &str, signed_at: i64, signature: &str, more: &str) -> String {
        format!(
            "POST {} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n\
             x-timestamp: {signed_at}\r\nx-signature: {signature}\r\n{more}\
             content-length: {}\r\n\r\n{body}",
            self.path,
            body.len()
        )
    }

    /// How many events are stored.
    async fn stored(&self) -> usize {
        stored(&self.store).await
    }

    /// The value of a counter of this source, by its name and its other label.
    fn counted(&self, name: &str, label: &str) -> u64 {
        let text = self.metrics.render();
        let source = format!("source=\"{}\"", self.name);
        text.lines()
            .filter(|line| line.starts_with(&format!("{name}{{")))
            .find(|line| line.contains(&source) && line.contains(label))
            .and_then(|line| line.rsplit(' ').next()?.parse().ok())
            .unwrap_or(0)
    }

    fn arrivals(&self, decision: &str) -> u64 {
        self.counted("hapax_arrivals_total", &format!("decision=\"{decision}\""))
    }

    fn rejections(&self, reason: &str) -> u64 {
        self.counted("hapax_rejections_total", &format!("reason=\"{reason}\""))
    }

    async fn stopped(self) -> Drained {
        self.stop.cancel();
        within(self.served).await.expect("serving does not panic")
    }
}

async fn stored(store: &TestStore) -> usize {
    let every = EventFilter { limit: usize::MAX, ..EventFilter::default() };
    store.inner().events(every).await.unwrap().items.len()
}

/// The event with this id of its sender.
async fn stored_event(store: &TestStore, event_id: &str) -> EventDetail {
    match store.inner().event(&EventName::Theirs(event_id.into())).await.unwrap() {
        Lookup::One(event) => event,
        other => panic!("{event_id} is stored once: {other:?}"),
    }
}

fn sign(signed_at: i64, body: &str) -> String {
    let key = hmac::Key::new(hmac::HMAC_SHA256, SECRET.as_bytes());
    hex::encode(hmac::sign(&key, format!("{signed_at}.{body}").as_bytes()))
}

fn event(id: &str) -> String {
    json!({ "id": id, "type": "payout.paid" }).to_string()
}

fn recorder() -> &'static PrometheusHandle {
    static HANDLE: OnceLock<PrometheusHandle> = OnceLock::new();
    HANDLE.get_or_init(|| PrometheusBuilder::new().install_recorder().expect("the first one"))
}

#[tokio::test]
async fn a_signed_event_is_accepted_once_and_its_copies_are_duplicates() {
    let server = setup("once").start().await;
    let mut wire = server.wire().await;
    wire.write(server.signed(&event("evt_1"))).await;
    let first = wire.answer().await;
    assert_eq!((first.status, first.header("hapax-decision")), (200, Some("accepted")));
    let id = first.json()["id"].as_str().unwrap().to_owned();
    assert_eq!(first.json(), json!({ "decision": "accepted", "id": id }));
    let request_id: Uuid = first.header("hapax-request-id").unwrap().parse().unwrap();
    assert_eq!(request_id.get_version_num(), 7);
    for _ in 0..3 {
        wire.write(server.signed(&event("evt_1"))).await;
        let copy = wire.answer().await;
        assert_eq!((copy.status, copy.header("hapax-decision")), (200, Some("duplicate")));
        assert_eq!(
            copy.json(),
            json!({ "decision": "duplicate", "id": id, "status": "ignored", "result": null })
        );
        assert_ne!(copy.header("hapax-request-id"), first.header("hapax-request-id"));
    }
    assert_eq!((server.arrivals("accepted"), server.arrivals("duplicate")), (1, 3));
    assert_eq!(server.stopped().await, Drained::Clean);
}

#[tokio::test]
async fn a_conflict_is_a_duplicate_to_the_sender_and_a_conflict_to_the_operator() {
    let server = setup("conflict").start().await;
    let mut wire = server.wire().await;
    wire.write(server.signed(&event("evt_1"))).await;
    wire.answer().await;
    wire.write(server.signed(r#"{"id":"evt_1","type":"payout.failed"}"#)).await;
    let heard = wire.answer().await;
    assert_eq!((heard.status, heard.header("hapax-decision")), (200, Some("duplicate")));
    assert_eq!(heard.json()["decision"], "duplicate");
    assert_eq!((server.arrivals("conflict"), server.arrivals("duplicate")), (1, 0));
}

#[tokio::test]
async fn an_unknown_source_is_404_and_another_method_than_post_405() {
    let server = setup("paths").start().await;
    let mut wire = server.wire().await;
    for path in [
        "/",
        "/webhooks",
        "/webhooks/",
        "/webhooks/other",
        "/webhooks/default/paths",
        "/webhooks/paths/",
        "/webhooks/path%73",
        "//webhooks/paths",
        "/readyz",
        "/metrics",
    ] {
        wire.write(format!("POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n")).await;
        let heard = wire.answer().await;
        assert_eq!(
            (heard.status, heard.json()["type"].as_str()),
            (404, Some("urn:hapax:problem:unknown")),
            "{path}"
        );
    }
    for method in ["GET", "PUT", "DELETE", "OPTIONS", "PATCH"] {
        wire.write(format!("{method} {} HTTP/1.1\r\nhost: a\r\n\r\n", server.path)).await;
        let heard = wire.answer().await;
        assert_eq!((heard.status, heard.header("allow")), (405, Some("POST")), "{method}");
    }
    wire.write("GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let heard = wire.answer().await;
    assert_eq!((heard.status, heard.body), (200, Vec::new()));
}

#[tokio::test]
async fn refusals_are_problems_without_internal_details() {
    let server = setup("problems").start().await;
    let mut wire = server.wire().await;
    let body = event("evt_1");
    let good = sign(server.now(), &body);
    let foreign = hex::encode([7; 32]);
    let long_ago = server.now() + 301;
    let mut refusals = Vec::new();
    for request in [
        server.forged(""),
        server.request(&body, server.now(), &foreign, ""),
        server.request(&body, server.now(), &good[..40], ""),
        server.request(&body, server.now() - 1, &good, ""),
        server.request(&body, long_ago, &sign(long_ago, &body), ""),
    ] {
        wire.write(request).await;
        let heard = wire.answer().await;
        assert_eq!(heard.header("content-type"), Some("application/problem+json"));
        let mut problem = heard.json();
        let request_id = heard.header("hapax-request-id").unwrap();
        assert_eq!(problem["request_id"], request_id);
        problem["request_id"].take();
        problem["instance"].take();
        refusals.push((heard.status, problem));
    }
    assert_eq!(refusals[0].0, 401);
    assert_eq!(refusals[0].1["type"], "urn:hapax:problem:signature");
    assert!(refusals.iter().all(|one| *one == refusals[0]), "{refusals:?}");
    assert_eq!((server.rejections("signature"), server.rejections("future")), (4, 1));
    assert_eq!(server.stored().await, 0);
}

#[tokio::test]
async fn an_authentic_body_that_is_no_event_is_400() {
    let server = setup("malformed").start().await;
    let mut wire = server.wire().await;
    for body in ["not json", "{}", "", r#"{"id":"a","id":"b"}"#] {
        wire.write(server.signed(body)).await;
        assert_eq!(wire.answer().await.status, 400, "{body}");
    }
    assert_eq!(server.rejections("malformed") + server.rejections("no_id"), 4);
    assert_eq!(server.stored().await, 0);
}

#[tokio::test]
async fn a_request_without_a_signature_is_refused_before_its_body_arrives() {
    let server = setup("unsigned").start().await;
    let mut wire = server.wire().await;
    wire.write(format!(
        "POST {} HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 1000\r\n\r\n",
        server.path
    ))
    .await;
    let heard = wire.answer().await;
    assert_eq!((heard.status, heard.header("connection")), (401, Some("close")));
    assert_eq!(wire.rest().await, b"");
    assert_eq!(server.rejections("missing"), 1);
}

#[tokio::test]
async fn a_sender_that_expects_100_continue_gets_it() {
    let server = setup("continue").start().await;
    let mut wire = server.wire().await;
    let body = event("evt_1");
    let request =
        server.request(&body, server.now(), &sign(server.now(), &body), "expect: 100-continue\r\n");
    let (head, _) = request.split_at(request.len() - body.len());
    wire.write(head).await;
    assert_eq!(wire.answer().await.status, 100);
    wire.write(&body).await;
    assert_eq!(wire.answer().await.status, 200);
}

#[tokio::test]
async fn a_body_at_the_limit_is_accepted_and_one_byte_more_is_413() {
    let bytes_max = 100_000;
    let mut with = setup("cap");
    with.body.bytes_max = bytes_max;
    let server = with.start().await;
    let sized = |bytes: usize| {
        let body = json!({ "id": "evt_1", "pad": "" }).to_string();
        body.replace(r#""pad":"""#, &format!(r#""pad":"{}""#, "x".repeat(bytes - body.len())))
    };
    let mut wire = server.wire().await;
    wire.write(server.signed(&sized(bytes_max))).await;
    assert_eq!(wire.answer().await.status, 200);
    wire.write(server.signed(&sized(bytes_max + 1))).await;
    let heard = wire.answer().await;
    assert_eq!((heard.status, heard.header("connection")), (413, Some("close")));
    assert_eq!(wire.rest().await, b"");
    // Bodies without a declared length: only reading such a body shows that it is too long.
    for (bytes, status) in [(bytes_max, 200), (bytes_max + 1, 413)] {
        let mut wire = server.wire().await;
        wire.write(chunked(&server, &sized(bytes))).await;
        assert_eq!(wire.answer().await.status, status, "{bytes}");
    }
    assert_eq!((server.stored().await, server.rejections("too_large")), (1, 2));
}

fn chunked(server: &TestServer, body: &str) -> String {
    let whole = server.signed(body);
    let head = whole.split("content-length").next().unwrap();
    let mut request = format!("{head}transfer-encoding: chunked\r\n\r\n");
    for chunk in body.as_bytes().chunks(30_000) {
        request += &format!("{:x}\r\n{}\r\n", chunk.len(), std::str::from_utf8(chunk).unwrap());
    }
    request + "0\r\n\r\n"
}

#[tokio::test]
async fn chunks_without_end_are_413_as_soon_as_they_are_too_many() {
    let server = setup("endless").start().await;
    let mut wire = server.wire().await;
    let request = server.signed("");
    let head = request.split("content-length").next().unwrap();
    wire.write(format!("{head}transfer-encoding: chunked\r\n\r\n")).await;
    let chunk = format!("{:x}\r\n{}\r\n", 64 * 1024, "x".repeat(64 * 1024));
    for _ in 0..20 {
        wire.write(&chunk).await;
    }
    let heard = wire.answer().await;
    assert_eq!((heard.status, heard.header("connection")), (413, Some("close")));
    drop(wire);
    assert_eq!(server.stopped().await, Drained::Clean);
}

#[tokio::test]
async fn a_slow_body_is_408_however_steadily_it_arrives() {
    let mut with = setup("drip");
    with.body.grace = Duration::from_millis(200);
    let server = with.start().await;
    let mut wire = server.wire().await;
    let request = server.signed(&" ".repeat(10_000));
    wire.write(&request[..request.len() - 9_999]).await;
    let mut drops = tokio::time::interval(Duration::from_millis(10));
    within(async {
        loop {
            tokio::select! {
                readable = wire.stream.readable() => break readable.unwrap(),
                _ = drops.tick() => { let _ = wire.stream.try_write(b" "); }
            }
        }
    })
    .await;
    let heard = wire.answer().await;
    assert_eq!((heard.status, heard.header("connection")), (408, Some("close")));
    assert_eq!(server.rejections("slow"), 1);
}

#[tokio::test]
async fn unfinished_bodies_share_a_bounded_memory() {
    let mut with = setup("crowded");
    with.body.unfinished_bytes_max = 200_000;
    // All bodies are new, and cannot be dropped yet.
    with.body.left_alone = Duration::from_secs(3600);
    let server = with.start().await;
    let request = server.signed(&" ".repeat(150_000));
    // More than one frame of the first body has arrived, so it holds memory.
    let mut first = server.wire().await;
    first.write(&request[..request.len() - 1]).await;
    let mut second = server.wire().await;
    let heard = within(async {
        loop {
            second.write(&request).await;
            let heard = second.answer().await;
            if heard.status == 503 {
                break heard;
            }
            assert_eq!(heard.status, 400, "no event in it");
        }
    })
    .await;
    assert_eq!(
        (heard.header("retry-after"), heard.header("connection")),
        (Some("1"), Some("close"))
    );
    first.write(" ").await;
    assert_eq!(first.answer().await.status, 400, "the first one is not harmed");
}

#[tokio::test]
async fn when_memory_is_short_the_slowest_body_is_dropped_and_not_the_newest() {
    let mut with = setup("slowest");
    with.body.unfinished_bytes_max = 200_000;
    with.body.left_alone = Duration::ZERO;
    let server = with.start().await;
    let body = json!({ "id": "evt_1", "type": "a", "pad": " ".repeat(150_000) }).to_string();
    let request = server.signed(&body);
    // All of the body except its last byte has arrived, and the last byte never will.
    let mut slow = server.wire().await;
    slow.write(&request[..request.len() - 1]).await;
    within(async {
        loop {
            let mut next = server.wire().await;
            next.write(&request).await;
            assert_eq!(next.answer().await.status, 200, "the newcomer is never turned away");
            if server.rejections("crowded") > 0 {
                break;
            }
        }
    })
    .await;
    let heard = slow.answer().await;
    assert_eq!(
        (heard.status, heard.header("retry-after"), heard.header("connection")),
        (503, Some("1"), Some("close"))
    );
}

#[tokio::test]
async fn a_length_that_is_only_declared_takes_no_memory() {
    // Twenty connections declare all the memory there is, and send almost nothing.
    let mut with = setup("declared");
    with.body.unfinished_bytes_max = 200_000;
    with.body.left_alone = Duration::from_secs(3600);
    let server = with.start().await;
    let body = json!({ "id": "evt_1", "type": "a", "pad": " ".repeat(150_000) }).to_string();
    let request = server.signed(&body);
    let mut held = Vec::new();
    for _ in 0..20 {
        let mut slow = server.wire().await;
        slow.write(&request[..request.len() - body.len() + 1]).await;
        tokio::task::yield_now().await;
        slow.write(" ").await;
        held.push(slow);
    }
    for _ in 0..20 {
        for slow in &mut held {
            slow.write(" ").await;
        }
        let mut next = server.wire().await;
        next.write(&request).await;
        assert_eq!(next.answer().await.status, 200);
    }
}

#[tokio::test]
async fn connections_are_counted_for_the_client_that_a_trusted_proxy_names() {
    // One client behind the proxy holds all slots but one. The connection of the other client is
    // older, but stays.
    let mut with = setup("shares");
    with.connections_max = 4;
    with.trusted_proxies = vec!["127.0.0.0/8".parse().unwrap()];
    let server = with.start().await;
    let ask =
        |client: &str| format!("GET / HTTP/1.1\r\nhost: a\r\nx-forwarded-for: {client}\r\n\r\n");
    let mut lone = server.wire().await;
    lone.write(ask("198.51.100.1")).await;
    assert_eq!(lone.answer().await.status, 404);
    let mut held = Vec::new();
    for _ in 0..12 {
        let mut wire = server.wire().await;
        wire.write(ask("198.51.100.2")).await;
        assert_eq!(wire.answer().await.status, 404);
        held.push(wire);
    }
    lone.write(ask("198.51.100.1")).await;
    assert_eq!(lone.answer().await.status, 404);
}

#[tokio::test]
async fn an_encoded_body_is_415() {
    let server = setup("encoded").start().await;
    let body = event("evt_1");
    for (encoding, status) in [("gzip", 415), ("identity, br", 415), ("Identity", 200), ("", 200)] {
        let mut wire = server.wire().await;
        let more = format!("content-encoding: {encoding}\r\n");
        wire.write(server.request(&body, server.now(), &sign(server.now(), &body), &more)).await;
        assert_eq!(wire.answer().await.status, status, "{encoding}");
    }
    assert_eq!(server.rejections("encoded"), 2);
}

#[tokio::test]
async fn an_authentic_event_under_a_content_type_its_sender_never_uses_is_415() {
    let server = setup("types").start().await;
    let secret = ActiveSecret::forever(Secret::new(SECRET));
    let stripe = Source::build(SourceSpec::new("types", "stripe", vec![secret])).unwrap();
    let routes = RoutesSpec::new(vec![RouteSpec::new(Arc::new(stripe))]);
    server.ingress.reload(Routes::build(routes).unwrap());
    let body = json!({ "id": "evt_1", "object": "event", "type": "payout.paid" }).to_string();
    let (now, signature) = (server.now(), sign(server.now(), &body));
    for (content_type, status) in [("text/plain", 415), ("application/json; charset=utf-8", 200)] {
        let mut wire = server.wire().await;
        wire.write(format!(
            "POST {} HTTP/1.1\r\nhost: a\r\ncontent-type: {content_type}\r\n\
             stripe-signature: t={now},v1={signature}\r\ncontent-length: {}\r\n\r\n{body}",
            server.path,
            body.len()
        ))
        .await;
        assert_eq!(wire.answer().await.status, status, "{content_type}");
    }
    assert_eq!((server.rejections("content_type"), server.stored().await), (1, 1));
}

#[tokio::test]
async fn a_late_event_is_refused_and_an_unknown_one_is_counted_separately() {
    let mut with = setup("late");
    with.late = LatePolicy::Reject;
    let server = with.start().await;
    let mut wire = server.wire().await;
    let (known, unknown) = (server.signed(&event("evt_1")), server.signed(&event("evt_2")));
    wire.write(&known).await;
    assert_eq!(wire.answer().await.status, 200);
    server.clock.fetch_add(300, Ordering::SeqCst);
    wire.write(&known).await;
    assert_eq!(wire.answer().await.header("hapax-decision"), Some("duplicate"), "at the edge");
    server.clock.fetch_add(1, Ordering::SeqCst);
    wire.write(&known).await;
    assert_eq!(wire.answer().await.status, 401);
    assert_eq!((server.rejections("stale"), server.rejections("stale_unseen")), (1, 0));
    wire.write(&unknown).await;
    assert_eq!(wire.answer().await.status, 401);
    assert_eq!((server.rejections("stale"), server.rejections("stale_unseen")), (1, 1));
    assert_eq!(server.stored().await, 1);
}

#[tokio::test]
async fn a_late_copy_of_a_notice_on_the_other_side_of_an_edge_is_not_counted_as_lost() {
    // The copy arrives in the next span and has another derived key, but the event is stored under
    // the key of the previous span.
    let server = setup("late_notice").start().await;
    let secret = ActiveSecret::forever(Secret::new(SECRET));
    let mut spec = SourceSpec::new("late_notice", "stripe", vec![secret]);
    let within = Some(Duration::from_secs(600));
    spec.envelope.event_id = Some(IdSpec::Hash { fields: vec!["/ref".into()], within });
    spec.late = Some(LatePolicy::Reject);
    let source = Arc::new(Source::build(spec).unwrap());
    let routes = RoutesSpec::new(vec![RouteSpec::new(source)]);
    server.ingress.reload(Routes::build(routes).unwrap());
    // The event arrives one second before the edge of the span. The copy arrives one second after
    // the end of the window.
    server.clock.fetch_add(599 - server.now().rem_euclid(600), Ordering::SeqCst);
    let body = json!({ "ref": "r1", "object": "event", "type": "payout.paid" }).to_string();
    let (now, signature) = (server.now(), sign(server.now(), &body));
    for (later, status) in [(0, 200), (301, 401)] {
        server.clock.fetch_add(later, Ordering::SeqCst);
        let mut wire = server.wire().await;
        wire.write(format!(
            "POST {} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n\
             stripe-signature: t={now},v1={signature}\r\ncontent-length: {}\r\n\r\n{body}",
            server.path,
            body.len()
        ))
        .await;
        assert_eq!(wire.answer().await.status, status);
    }
    assert_eq!((server.rejections("stale"), server.rejections("stale_unseen")), (1, 0));
}

#[tokio::test]
async fn a_late_event_waits_for_review_if_the_source_is_configured_so() {
    let server = setup("review").start().await;
    let request = server.signed(&event("evt_1"));
    server.clock.fetch_add(3600, Ordering::SeqCst);
    let mut wire = server.wire().await;
    wire.write(request).await;
    let heard = wire.answer().await;
    assert_eq!((heard.status, heard.header("hapax-decision")), (202, Some("review")));
    assert_eq!((server.arrivals("review"), server.stored().await), (1, 1));
}

#[tokio::test]
async fn the_window_is_checked_when_the_last_byte_has_arrived() {
    // The head arrives within the window, and the body after the window: a slow body must not
    // extend the window.
    let server = setup("last-byte").start().await;
    let mut wire = server.wire().await;
    let body = event("evt_1");
    let request =
        server.request(&body, server.now(), &sign(server.now(), &body), "expect: 100-continue\r\n");
    let (head, _) = request.split_at(request.len() - body.len());
    wire.write(head).await;
    assert_eq!(wire.answer().await.status, 100);
    server.clock.fetch_add(301, Ordering::SeqCst);
    wire.write(&body).await;
    let heard = wire.answer().await;
    assert_eq!((heard.status, heard.header("hapax-decision")), (202, Some("review")));
}

#[tokio::test]
async fn when_the_store_cannot_write_no_event_is_accepted() {
    let server = setup("full").start().await;
    let mut wire = server.wire().await;
    server.store.fail(Act::Ingest, StoreError::Unavailable("the disk is full".into()));
    wire.write(server.signed(&event("evt_1"))).await;
    let heard = wire.answer().await;
    assert_eq!((heard.status, heard.header("retry-after")), (503, Some("5")));
    assert_eq!(heard.header("hapax-decision"), None);
    server.store.heal(Act::Ingest);
    wire.write(server.signed(&event("evt_1"))).await;
    assert_eq!(wire.answer().await.header("hapax-decision"), Some("accepted"));
    assert_eq!(server.rejections("unavailable"), 1);
}

/// Sends an event whose commit waits, and hangs up. hyper drops the answer's future as soon as it
/// sees the connection end. There is one slot only, so the next connection shows that the future
/// was dropped. Returns the permits for which commits wait.
async fn hang_up_during_the_commit(name: &'static str) -> (TestServer, Arc<Semaphore>) {
    let mut with = setup(name);
    with.connections_max = 1;
    let server = with.start().await;
    let commits = server.store.block(Act::Ingest);
    let mut wire = server.wire().await;
    wire.write(server.signed(&event("evt_1"))).await;
    within(server.store.until(|store| store.begun(Act::Ingest) > 0)).await;
    drop(wire);
    let mut next = server.wire().await;
    next.write("GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n").await;
    assert_eq!(next.answer().await.status, 200);
    (server, commits)
}

#[tokio::test]
async fn a_commit_runs_to_its_end_and_is_counted_although_the_client_hangs_up() {
    let (server, commits) = hang_up_during_the_commit("hangup").await;
    commits.add_permits(1);
    within(async {
        while server.arrivals("accepted") == 0 {
            yield_now().await;
        }
    })
    .await;
    assert_eq!(server.stored().await, 1);
    assert_eq!(server.stopped().await, Drained::Clean);
}

#[tokio::test]
async fn a_shutdown_waits_for_the_commit_of_a_client_that_hung_up() {
    let (server, commits) = hang_up_during_the_commit("orphan").await;
    let store = server.store.clone();
    server.stop.cancel();
    within(async { while TcpStream::connect(server.address).await.is_ok() {} }).await;
    assert!(!server.served.is_finished());
    commits.add_permits(1);
    assert_eq!(server.stopped().await, Drained::Clean);
    assert_eq!(stored(&store).await, 1);
}

#[tokio::test]
async fn a_shutdown_answers_received_requests() {
    let server = setup("drain").start().await;
    let commits = server.store.block(Act::Ingest);
    let mut wire = server.wire().await;
    wire.write(server.signed(&event("evt_1"))).await;
    within(server.store.until(|store| store.begun(Act::Ingest) > 0)).await;
    server.stop.cancel();
    commits.add_permits(1);
    let heard = wire.answer().await;
    assert_eq!((heard.status, heard.header("hapax-decision")), (200, Some("accepted")));
    assert_eq!(server.stopped().await, Drained::Clean);
}

#[tokio::test]
async fn verified_events_over_the_rate_are_429_with_retry_after() {
    let mut with = setup("rate");
    with.rate_limit = per_hour(2);
    let server = with.start().await;
    let mut wire = server.wire().await;
    for (id, status) in [("evt_1", 200), ("evt_2", 200), ("evt_3", 429)] {
        wire.write(server.signed(&event(id))).await;
        let heard = wire.answer().await;
        assert_eq!(heard.status, status);
        let wait: Option<u64> = heard.header("retry-after").map(|wait| wait.parse().unwrap());
        assert_eq!(wait.is_some_and(|wait| wait > 1000), status == 429);
    }
    assert_eq!((server.rejections("limited"), server.stored().await), (1, 2));
}

#[tokio::test]
async fn beyond_the_limit_of_failures_only_failures_are_limited() {
    let mut with = setup("failures");
    with.unverified_limit = per_hour(2);
    let server = with.start().await;
    let mut wire = server.wire().await;
    for status in [401, 401, 429, 429] {
        wire.write(server.forged("")).await;
        let heard = wire.answer().await;
        assert_eq!((heard.status, heard.header("retry-after").is_some()), (status, status == 429));
    }
    wire.write(server.signed(&event("evt_1"))).await;
    assert_eq!(wire.answer().await.status, 200, "what verifies is never refused by it");
    assert_eq!((server.rejections("signature"), server.rejections("limited")), (2, 2));
}

#[tokio::test]
async fn behind_a_trusted_proxy_failures_count_for_the_client_and_not_for_the_proxy() {
    let mut with = setup("forwarded");
    with.unverified_limit = per_hour(1);
    with.trusted_proxies = vec!["127.0.0.0/8".parse().unwrap()];
    let server = with.start().await;
    let mut wire = server.wire().await;
    for (client, status) in [("192.0.2.1", 401), ("192.0.2.1", 429), ("192.0.2.2", 401)] {
        wire.write(server.forged(&format!("x-forwarded-for: 6.6.6.6, {client}\r\n"))).await;
        assert_eq!(wire.answer().await.status, status, "{client}");
    }
    let body = event("evt_1");
    let more = "x-forwarded-for: 192.0.2.9\r\nauthorization: Bearer hush\r\ncookie: c=1\r\n";
    wire.write(server.request(&body, server.now(), &sign(server.now(), &body), more)).await;
    assert_eq!(wire.answer().await.status, 200);
    let EventDetail { arrivals, headers, .. } = stored_event(&server.store, "evt_1").await;
    assert_eq!(arrivals[0].remote, Some("192.0.2.9".parse().unwrap()));
    assert!(headers.contains("content-type: application/json\n"), "{headers}");
    assert!(!headers.contains("hush") && !headers.contains("cookie"), "{headers}");
}

#[tokio::test]
async fn only_declared_pairs_of_tenant_and_source_answer() {
    let mut with = setup("pairs");
    with.tenant = "acme";
    let server = with.start().await;
    let mut wire = server.wire().await;
    let request = server.signed(&event("evt_1"));
    wire.write(&request).await;
    assert_eq!(wire.answer().await.status, 200);
    for other in ["/webhooks/pairs", "/webhooks/other/pairs", "/webhooks/acme/other"] {
        let mut wire = server.wire().await;
        wire.write(request.replace(&server.path, other)).await;
        assert_eq!(wire.answer().await.status, 404, "{other}");
    }
}

#[tokio::test]
async fn a_reload_swaps_the_table_under_open_connections() {
    let server = setup("before").start().await;
    let mut wire = server.wire().await;
    wire.write(server.signed(&event("evt_1"))).await;
    assert_eq!(wire.answer().await.status, 200);
    server.ingress.reload(setup("after").routes());
    wire.write(server.signed(&event("evt_2")).replace("/before", "/after")).await;
    assert_eq!(wire.answer().await.status, 200);
    wire.write(server.signed(&event("evt_3"))).await;
    assert_eq!(wire.answer().await.status, 404);
}

#[tokio::test]
async fn http_2_carries_events_and_refusals_alike() {
    let mut with = setup("http2");
    with.body.bytes_max = 1000;
    let server = with.start().await;
    let stream = TokioIo::new(TcpStream::connect(server.address).await.unwrap());
    let (mut sender, connection) = within(
        hyper::client::conn::http2::handshake::<_, _, Full<Bytes>>(TokioExecutor::new(), stream),
    )
    .await
    .unwrap();
    let connection = tokio::spawn(connection);
    for (body, status) in [
        (event("evt_1"), 200),
        ("x".repeat(200_000), 413),
        (event("evt_1"), 200),
        ("no json".to_owned(), 400),
    ] {
        let request = Request::post(format!("http://localhost{}", server.path))
            .header("x-timestamp", server.now())
            .header("x-signature", sign(server.now(), &body))
            .body(Full::from(body))
            .unwrap();
        let answer = within(sender.send_request(request)).await.unwrap();
        assert_eq!(answer.status().as_u16(), status);
        assert!(answer.headers().contains_key("hapax-request-id"));
        within(answer.into_body().collect()).await.unwrap();
    }
    drop(sender);
    within(connection).await.unwrap().unwrap();
    assert_eq!((server.arrivals("accepted"), server.arrivals("duplicate")), (1, 1));
    assert_eq!(server.stopped().await, Drained::Clean);
}

#[tokio::test]
async fn every_decision_is_logged_and_nothing_of_a_body_or_a_signature_is() {
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);
    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt().json().with_writer(move || writer.clone()).finish();
    // With a single dispatcher, tracing asks only the thread that reaches a callsite first. Another
    // test whose thread has no dispatcher would disable the log line for all tests.
    let _second = tracing::Dispatch::new(tracing_subscriber::registry());
    let _guard = tracing::subscriber::set_default(subscriber);
    let server = setup("logs").start().await;
    let mut wire = server.wire().await;
    let canary = json!({ "id": "evt_1", "type": "payout.paid", "card": "4242-canary" }).to_string();
    for request in [
        server.signed(&canary),
        server.signed(&canary),
        server.signed(&canary.replace("4242", "4243")),
        server.request(&canary, server.now(), &sign(0, &canary), ""),
    ] {
        wire.write(request).await;
        wire.answer().await;
    }
    let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
    let fields = |decision: &str| -> serde_json::Value {
        let line = text.lines().find(|line| line.contains(&format!("\"decision\":\"{decision}\"")));
        let line = line.unwrap_or_else(|| panic!("no line of {decision} in {text}"));
        let whole: serde_json::Value = serde_json::from_str(line).unwrap();
        json!({ "level": whole["level"], "source": whole["fields"]["source"], "event_id": whole["fields"]["event_id"], "reason": whole["fields"]["reason"] })
    };
    let line = |level: &str, event_id: Option<&str>, reason: Option<&str>| json!({ "level": level, "source": "logs", "event_id": event_id, "reason": reason });
    assert_eq!(fields("accepted"), line("INFO", Some("evt_1"), None));
    assert_eq!(fields("duplicate"), line("INFO", Some("evt_1"), None));
    assert_eq!(fields("conflict"), line("WARN", Some("evt_1"), None));
    assert_eq!(fields("rejected"), line("WARN", None, Some("signature")));
    for secret in ["canary", SECRET, &sign(server.now(), &canary), &sign(0, &canary)] {
        assert!(!text.contains(secret), "{text}");
    }
}
