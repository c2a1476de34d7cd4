//! The loop of the sender: a test store on one side, endpoints on real sockets on the other.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::delivery::DeliveryId;
use hapax_core::endpoint::{
    AddressChoice, EndpointAct, EndpointChanged, EndpointId, EndpointRecord, EndpointSealed,
    NewEndpoint,
};
use hapax_core::endpoint_secret::{EndpointSecrets, Signing, SigningSecret};
use hapax_core::job::Fence;
use hapax_core::message::Payload;
use hapax_core::store::*;
use hapax_core::vault::{SealContext, Vault, VaultKey};
use hapax_core::{Tenant, Timestamp};
use hapax_engine::{
    Courier, ENDPOINT_PORTS, EndpointClient, GuardRules, HttpLimits, Sender, SenderLimits,
    SenderSetup,
};
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use tokio::net::TcpListener;
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};
use uuid::Uuid;

use crate::support::within;

/// A store of deliveries by endpoint. Its claims take the endpoints in turn, and each endpoint has
/// at most `per_endpoint` attempts at once.
struct TestOutbox {
    state: Mutex<State>,
    changed: Notify,
    /// An exchange takes a permit before it begins.
    permits: Semaphore,
}

/// An endpoint, and the messages that wait for it.
type Backlog = (Arc<DeliveryTarget>, VecDeque<(String, Bytes)>);

#[derive(Default)]
struct State {
    waiting: BTreeMap<EndpointId, Backlog>,
    leased: HashMap<DeliveryId, (EndpointId, String, Bytes)>,
    delivered: BTreeSet<String>,
    failed: Vec<String>,
    given_back: Vec<String>,
    per_endpoint: usize,
    /// How many of the next exchanges fail. They fail after their outcome was decided.
    failures: usize,
    exchanges: usize,
    limits_asked: Vec<usize>,
    /// Whether something is always due, although nothing can be claimed.
    is_always_due: bool,
}

impl TestOutbox {
    fn new() -> Arc<Self> {
        let state = State { per_endpoint: 16, ..State::default() };
        let permits = Semaphore::new(Semaphore::MAX_PERMITS);
        Arc::new(Self { state: Mutex::new(state), changed: Notify::new(), permits })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Adds `count` messages for an endpoint at this address, with bodies of that many bytes.
    fn publish(&self, vault: &Vault, at: SocketAddr, name: &str, count: usize, bytes: usize) {
        let id = EndpointId(Uuid::now_v7());
        let tenant = Tenant::default();
        let secrets =
            EndpointSecrets::new(SigningSecret::generate(Signing::Standard, &[7; 32])).to_bytes();
        let owner = id.to_string();
        let secrets =
            vault.seal(&SealContext::endpoint_secrets(&tenant, &owner), &secrets, [0; 12]);
        let target = Arc::new(DeliveryTarget {
            id,
            tenant,
            url: format!("http://{at}/{name}"),
            address_by: AddressChoice::Operator,
            timeout: Duration::from_secs(60),
            max_in_flight: 1_000,
            payload: Payload::Fat,
            sealed: EndpointSealed { secrets, headers: None },
        });
        let messages = (0..count).map(|n| (format!("{name}_{n}"), Bytes::from(vec![b'x'; bytes])));
        self.state().waiting.insert(id, (target, messages.collect()));
    }

    async fn until(&self, enough: impl Fn(&State) -> bool) {
        within(async {
            loop {
                let changed = self.changed.notified();
                if enough(&self.state()) {
                    return;
                }
                changed.await;
            }
        })
        .await;
    }
}

impl State {
    fn settle(&mut self, outcome: &AttemptOutcome) -> Held {
        let Some((endpoint, message, body)) = self.leased.remove(&outcome.delivery) else {
            return Held::Lost;
        };
        match &outcome.verdict {
            AttemptVerdict::Delivered(_) => assert!(self.delivered.insert(message), "twice"),
            AttemptVerdict::Failed { .. } => self.failed.push(message),
            AttemptVerdict::GivenBack => {
                self.given_back.push(message.clone());
                self.waiting.get_mut(&endpoint).unwrap().1.push_back((message, body));
            }
        }
        Held::Kept
    }

    fn claim(&mut self, ask: &DeliveryAsk) -> Vec<DeliveryClaim> {
        let mut claims: Vec<DeliveryClaim> = Vec::new();
        let mut bytes = 0;
        loop {
            let before = claims.len();
            for (id, (target, waiting)) in &mut self.waiting {
                let leased = self.leased.values().filter(|(endpoint, ..)| endpoint == id).count();
                let size = waiting.front().map_or(0, |(_, body)| body.len());
                let fits = bytes + size <= ask.bytes_max || claims.is_empty();
                if claims.len() >= ask.limit || leased >= self.per_endpoint || !fits {
                    continue;
                }
                let Some((message, body)) = waiting.pop_front() else { continue };
                let delivery = DeliveryId(Uuid::now_v7());
                bytes += size;
                self.leased.insert(delivery, (*id, message.clone(), body.clone()));
                claims.push(DeliveryClaim {
                    delivery,
                    fence: Fence(1),
                    attempt: 1,
                    message,
                    body,
                    leased_until: Timestamp::now(),
                    endpoint: Arc::clone(target),
                });
            }
            if claims.len() == before {
                return claims;
            }
        }
    }
}

impl Outbox for TestOutbox {
    async fn exchange(
        &self,
        outcomes: Vec<AttemptOutcome>,
        ask: DeliveryAsk,
    ) -> Result<Exchanged, StoreError> {
        self.permits.acquire().await.unwrap().forget();
        let mut state = self.state();
        state.exchanges += 1;
        state.limits_asked.push(ask.limit);
        if state.failures > 0 {
            state.failures -= 1;
            self.changed.notify_waiters();
            return Err(StoreError::Busy);
        }
        let settled = outcomes.iter().map(|outcome| state.settle(outcome)).collect();
        let claims = state.claim(&ask);
        let next_due = state.is_always_due.then(Timestamp::now);
        self.changed.notify_waiters();
        Ok(Exchanged { settled, claims, next_due })
    }

    async fn wait_for_deliveries(&self, at_most: Duration) {
        tokio::time::sleep(at_most).await;
    }

    async fn cancel_orphans(&self, _: usize) -> Result<bool, StoreError> {
        Ok(false)
    }

    async fn publish(&self, _: NewMessage) -> Result<Published, StoreError> {
        Err(StoreError::Closed)
    }

    async fn create_endpoint(
        &self,
        _: NewEndpoint,
        _: Action,
    ) -> Result<EndpointChanged, StoreError> {
        Err(StoreError::Closed)
    }

    async fn change_endpoint(
        &self,
        _: EndpointId,
        _: EndpointAct,
        _: Action,
    ) -> Result<EndpointChanged, StoreError> {
        Err(StoreError::Closed)
    }

    async fn replay_delivery(
        &self,
        _: DeliveryId,
        _: Action,
    ) -> Result<DeliveryReplayed, StoreError> {
        Err(StoreError::Closed)
    }

    async fn skip_delivery(&self, _: DeliveryId, _: Action) -> Result<DeliverySkipped, StoreError> {
        Err(StoreError::Closed)
    }

    async fn change_message(
        &self,
        _: MessageRef,
        _: MessageAct,
        _: Action,
    ) -> Result<Option<Vec<DeliveryId>>, StoreError> {
        Err(StoreError::Closed)
    }
}

impl InspectOutbox for TestOutbox {
    async fn endpoints(&self, _: EndpointFilter) -> Result<Page<EndpointRecord>, StoreError> {
        Err(StoreError::Closed)
    }

    async fn endpoint(&self, _: EndpointId) -> Result<Option<EndpointRecord>, StoreError> {
        Err(StoreError::Closed)
    }

    async fn messages(&self, _: MessageFilter) -> Result<Page<MessageSummary>, StoreError> {
        Err(StoreError::Closed)
    }

    async fn message(&self, _: &str, _: Option<Tenant>) -> Result<Vec<MessageDetail>, StoreError> {
        Err(StoreError::Closed)
    }

    async fn deliveries(&self, _: DeliveryFilter) -> Result<Page<DeliveryDetail>, StoreError> {
        Err(StoreError::Closed)
    }

    async fn delivery(&self, _: DeliveryId) -> Result<Option<DeliveryDetail>, StoreError> {
        Err(StoreError::Closed)
    }

    async fn delivery_backlog(&self) -> Result<DeliveryBacklog, StoreError> {
        Ok(DeliveryBacklog::default())
    }
}

/// An endpoint for every path. Requests to a path that begins with `hang` are answered when the test says so.
struct Sink {
    at: SocketAddr,
    seen: Arc<Seen>,
    _stop: DropGuard,
}

#[derive(Default)]
struct Seen {
    /// Requests by path: how many came, how many are open, and the most that were open at once.
    paths: Mutex<BTreeMap<String, [usize; 3]>>,
    released: Notify,
    came: Notify,
}

impl Sink {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let seen = Arc::<Seen>::default();
        let kept = Arc::clone(&seen);
        let answer = move |request: Request<hapax_engine::http::Received>, _| {
            let seen = Arc::clone(&kept);
            async move {
                let path = request.uri().path().trim_start_matches('/').to_owned();
                request.into_body().collect().await.unwrap();
                let released = seen.released.notified();
                {
                    let mut paths = seen.paths.lock().unwrap();
                    let [came, open, most] = paths.entry(path.clone()).or_default();
                    (*came, *open) = (*came + 1, *open + 1);
                    *most = (*most).max(*open);
                }
                seen.came.notify_waiters();
                if path.starts_with("hang") {
                    released.await;
                }
                seen.paths.lock().unwrap().get_mut(&path).unwrap()[1] -= 1;
                Response::new(Full::new(Bytes::new()))
            }
        };
        let stop = CancellationToken::new();
        let limits = HttpLimits::default();
        tokio::spawn(hapax_engine::http::serve(listener, None, answer, limits, stop.clone()));
        Self { at, seen, _stop: stop.drop_guard() }
    }

    /// Requests to this path: how many came, how many are open, and the most that were open at once.
    fn requests(&self, path: &str) -> [usize; 3] {
        self.seen.paths.lock().unwrap().get(path).copied().unwrap_or_default()
    }

    fn open(&self) -> usize {
        self.seen.paths.lock().unwrap().values().map(|[_, open, _]| open).sum()
    }

    async fn until_open(&self, count: usize) {
        within(async {
            loop {
                let came = self.seen.came.notified();
                if self.open() >= count {
                    return;
                }
                came.await;
            }
        })
        .await;
    }
}

struct Running {
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Running {
    async fn stop(self) {
        self.stop.cancel();
        within(self.task).await.unwrap();
    }
}

fn vault() -> Arc<Vault> {
    Arc::new(Vault::new(VaultKey::from_bytes(&[1; 32]), Vec::new()).unwrap())
}

fn start(store: &Arc<TestOutbox>, slots: usize, bytes: usize, drain: Duration) -> Running {
    let rules =
        GuardRules::new(vec!["127.0.0.0/8".parse().unwrap()], ENDPOINT_PORTS.to_vec(), None);
    let client = EndpointClient::new(rules).unwrap();
    let setup = SenderSetup {
        courier: Arc::new(Courier::new(client, vault())),
        limits: SenderLimits { in_flight_max: slots, in_flight_bytes_max: bytes },
    };
    let sender = Sender::new(Arc::clone(store), Arc::new(Timestamp::now), Some(setup));
    let stop = CancellationToken::new();
    let task = tokio::spawn(Arc::new(sender).run(drain, stop.clone()));
    Running { stop, task }
}

const MANY_BYTES: usize = 64 << 20;
const DRAIN: Duration = Duration::from_secs(30);

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn endpoints_that_hang_do_not_delay_the_others() {
    // 50 endpoints never answer. The store allows 16 attempts for each: together, more than all
    // slots of the node.
    let (store, sink) = (TestOutbox::new(), Sink::start().await);
    for n in 0..50 {
        store.publish(&vault(), sink.at, &format!("hang{n}"), 20, 10);
    }
    for n in 0..20 {
        store.publish(&vault(), sink.at, &format!("fine{n}"), 50, 10);
    }
    let running = start(&store, 256, MANY_BYTES, Duration::ZERO);
    store.until(|state| state.delivered.len() == 20 * 50).await;
    // No delivery had to wait for an attempt of another endpoint to end.
    assert!(store.state().failed.is_empty());
    for n in 0..50 {
        let [_, _, most] = sink.requests(&format!("hang{n}"));
        assert!(most <= 2, "hang{n} had {most} attempts at once");
    }
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_endpoint_that_answers_gets_up_to_its_own_bound() {
    let (store, sink) = (TestOutbox::new(), Sink::start().await);
    store.publish(&vault(), sink.at, "fine", 400, 10);
    let running = start(&store, 256, MANY_BYTES, DRAIN);
    store.until(|state| state.delivered.len() == 400).await;
    assert_eq!(sink.requests("fine")[0], 400);
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_node_has_at_most_so_many_attempts_and_bytes_under_way() {
    let (store, sink) = (TestOutbox::new(), Sink::start().await);
    for n in 0..20 {
        store.publish(&vault(), sink.at, &format!("hang{n}"), 5, 1_000);
    }
    let running = start(&store, 7, MANY_BYTES, Duration::ZERO);
    sink.until_open(7).await;
    assert_eq!(sink.open(), 7);
    assert!(store.state().limits_asked.iter().all(|limit| *limit <= 7));
    running.stop().await;

    let (store, sink) = (TestOutbox::new(), Sink::start().await);
    for n in 0..20 {
        store.publish(&vault(), sink.at, &format!("hang{n}"), 5, 1_000);
    }
    let running = start(&store, 100, 3_500, Duration::ZERO);
    sink.until_open(3).await;
    store.until(|state| state.leased.len() >= 3).await;
    let leased = store.state().leased.len();
    // One delivery may exceed the bound.
    assert!(leased <= 4, "{leased} claims of 1,000 bytes");
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn claims_that_were_not_begun_are_given_back_at_a_stop() {
    // The stop comes while an exchange is under way, and while claims wait for their endpoint.
    let (store, sink) = (TestOutbox::new(), Sink::start().await);
    store.publish(&vault(), sink.at, "hang", 10, 10);
    let running = start(&store, 64, MANY_BYTES, DRAIN);
    sink.until_open(2).await;
    running.stop.cancel();
    sink.seen.released.notify_waiters();
    running.stop().await;
    {
        let state = store.state();
        assert_eq!((state.delivered.len(), state.leased.len()), (2, 0), "{:?}", state.given_back);
        assert_eq!(state.given_back.iter().collect::<BTreeSet<_>>().len(), 8);
    }

    let store = TestOutbox::new();
    store.publish(&vault(), sink.at, "fine", 5, 10);
    store.permits.forget_permits(Semaphore::MAX_PERMITS);
    let running = start(&store, 64, MANY_BYTES, DRAIN);
    running.stop.cancel();
    store.permits.add_permits(1_000);
    running.stop().await;
    let state = store.state();
    assert!(state.leased.is_empty() && state.delivered.is_empty());
    assert_eq!(sink.requests("fine")[0], 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn outcomes_are_kept_until_the_store_takes_them_and_nothing_is_sent_twice() {
    let (store, sink) = (TestOutbox::new(), Sink::start().await);
    store.publish(&vault(), sink.at, "hang", 2, 10);
    let running = start(&store, 64, MANY_BYTES, DRAIN);
    sink.until_open(2).await;
    // The store fails when the attempts end.
    store.state().failures = 3;
    sink.seen.released.notify_waiters();
    store.until(|state| state.delivered.len() == 2).await;
    assert_eq!(store.state().failures, 0);
    assert_eq!(sink.requests("hang")[0], 2);
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_store_whose_due_deliveries_cannot_be_claimed_is_asked_ever_less_often() {
    // Deliveries are due, but none can be claimed. A loop without a pause would never let the paused
    // clock advance.
    let store = TestOutbox::new();
    store.state().is_always_due = true;
    let running = start(&store, 64, MANY_BYTES, DRAIN);
    tokio::time::sleep(Duration::from_secs(10)).await;
    let asked = store.state().exchanges;
    assert!((10..60).contains(&asked), "{asked} exchanges in 10 seconds");
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_reload_brings_the_setup_that_was_missing() {
    let (store, sink) = (TestOutbox::new(), Sink::start().await);
    store.publish(&vault(), sink.at, "fine", 3, 10);
    let sender = Arc::new(Sender::new(Arc::clone(&store), Arc::new(Timestamp::now), None));
    let stop = CancellationToken::new();
    let task = tokio::spawn(Arc::clone(&sender).run(DRAIN, stop.clone()));
    let rules =
        GuardRules::new(vec!["127.0.0.0/8".parse().unwrap()], ENDPOINT_PORTS.to_vec(), None);
    sender.reload(Some(SenderSetup {
        courier: Arc::new(Courier::new(EndpointClient::new(rules).unwrap(), vault())),
        limits: SenderLimits { in_flight_max: 8, in_flight_bytes_max: MANY_BYTES },
    }));
    store.until(|state| state.delivered.len() == 3).await;
    Running { stop, task }.stop().await;
}

#[tokio::test]
async fn an_address_that_the_receiving_party_chose_must_be_public_whatever_the_operator_allows() {
    // The address may have been public when it was stored, so every attempt is checked.
    let (store, sink) = (TestOutbox::new(), Sink::start().await);
    store.publish(&vault(), sink.at, "fine", 1, 10);
    let operators = store.state().waiting.values().next().unwrap().0.clone();
    let receivers = DeliveryTarget { address_by: AddressChoice::Receiver, ..(*operators).clone() };
    let rules =
        GuardRules::new(vec!["127.0.0.0/8".parse().unwrap()], ENDPOINT_PORTS.to_vec(), None);
    let courier = Courier::new(EndpointClient::new(rules).unwrap(), vault());
    let now: hapax_engine::Now = Arc::new(Timestamp::now);
    let ping = courier.ping(&receivers, "ping_1", &now).await;
    assert!(
        matches!(&ping.verdict, AttemptVerdict::Failed { error, .. } if error.contains("not public")),
        "{ping:?}"
    );
    let url = operators.url.as_str();
    assert!(courier.check(url, AddressChoice::Operator).await.is_ok());
    assert!(courier.check(url, AddressChoice::Receiver).await.is_err());
    let ping = courier.ping(&operators, "ping_2", &now).await;
    assert!(matches!(ping.verdict, AttemptVerdict::Delivered(_)), "{ping:?}");
}
