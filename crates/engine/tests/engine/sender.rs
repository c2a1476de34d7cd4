//! The loop of the sender: the model in memory behind faults on one side, endpoints on real sockets on the other.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::delivery::DeliveryStatus;
use hapax_core::endpoint::{
    AddressChoice, EndpointAct, EndpointChanged, EndpointId, EndpointRecord, EndpointSealed,
    EndpointSettings, NewEndpoint,
};
use hapax_core::endpoint_secret::{EndpointSecrets, Signing, SigningSecret};
use hapax_core::handler::TypeFilter;
use hapax_core::store::{
    Action, AttemptVerdict, DeliveryAsk, DeliveryDetail, DeliveryFilter, DeliveryTarget,
    InspectOutbox as _, MessageAct, MessageRef, NewMessage, Outbox as _,
};
use hapax_core::vault::{SealContext, Vault, VaultKey};
use hapax_core::{Tenant, Timestamp};
use hapax_engine::{
    ENDPOINT_PORTS, EndpointCaller, EndpointClient, GuardRules, HttpLimits, Sender, SenderLimits,
    SenderSetup,
};
use hapax_sim::{Act, FaultyStore};
use hapax_store::MemoryStore;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};
use uuid::Uuid;

use crate::jobs::TestStore;
use crate::support::within;

/// A store, with helpers to fill and read it.
#[derive(Clone)]
struct Outbox {
    faults: Arc<TestStore>,
}

impl Outbox {
    fn new() -> Self {
        Self { faults: Arc::new(FaultyStore::new(MemoryStore::new())) }
    }

    /// Adds an endpoint at this address, and `count` messages for it with contents of that many bytes.
    async fn publish(&self, at: SocketAddr, name: &str, count: usize, bytes: usize) {
        let settings = EndpointSettings {
            types: TypeFilter::new([name]).unwrap(),
            timeout: Duration::from_secs(60),
            ..EndpointSettings::at(format!("http://{at}/{name}"))
        };
        self.publish_to(settings, name, count, bytes).await;
    }

    async fn publish_to(&self, settings: EndpointSettings, name: &str, count: usize, bytes: usize) {
        let (id, tenant) = (EndpointId(Uuid::now_v7()), Tenant::default());
        let secrets =
            EndpointSecrets::new(SigningSecret::generate(Signing::Standard, &[7; 32])).to_bytes();
        let owner = id.to_string();
        let secrets =
            vault().seal(&SealContext::endpoint_secrets(&tenant, &owner), &secrets, [0; 12]);
        let sealed = EndpointSealed { secrets, headers: None };
        let store = self.faults.inner();
        let by = Action { who: "ops".to_owned(), reason: None, at: Timestamp::now() };
        let created = store.create_endpoint(NewEndpoint { id, tenant, settings, sealed }, by).await;
        assert!(matches!(created, Ok(EndpointChanged::Changed(_))), "{created:?}");
        for _ in 0..count {
            let message = NewMessage::new(name, serde_json::json!("x".repeat(bytes)));
            store.publish(message).await.unwrap();
        }
    }

    /// Claims deliveries as another sender would, and never settles them. Returns their endpoints.
    async fn take(&self, limit: usize) -> Vec<Arc<DeliveryTarget>> {
        let ask = DeliveryAsk {
            limit,
            bytes_max: MANY_BYTES,
            node: "another".into(),
            vault_keys: Arc::from([vault().current_key_id()]),
            claims_ahead: false,
        };
        let exchanged = self.faults.inner().exchange(Vec::new(), ask).await.unwrap();
        exchanged.claims.into_iter().map(|claim| claim.endpoint).collect()
    }

    async fn deliveries(&self) -> Vec<DeliveryDetail> {
        let all = DeliveryFilter { limit: usize::MAX, ..DeliveryFilter::default() };
        self.faults.inner().deliveries(all).await.unwrap().items
    }

    /// How many deliveries have this status.
    async fn count(&self, status: DeliveryStatus) -> usize {
        self.deliveries().await.iter().filter(|delivery| delivery.status == status).count()
    }

    /// Waits until at least `enough` deliveries have this status.
    async fn until(&self, status: DeliveryStatus, enough: usize) {
        within(async {
            loop {
                let changed = self.faults.changed();
                if self.count(status).await >= enough {
                    return;
                }
                changed.await;
            }
        })
        .await;
    }

    /// How many claims each exchange asked for.
    fn limits_asked(&self) -> Vec<usize> {
        let limit = |asked: &String| {
            let (_, limit) = asked.split_once("DeliveryAsk { limit: ").unwrap();
            limit.split_once(',').unwrap().0.parse().unwrap()
        };
        self.faults.arguments(Act::Exchange).iter().map(limit).collect()
    }

    /// How many claims were given back.
    fn given_back(&self) -> usize {
        let exchanges = self.faults.arguments(Act::Exchange);
        exchanges.iter().map(|outcomes| outcomes.matches("verdict: GivenBack").count()).sum()
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

fn setup(slots: usize, bytes: usize) -> SenderSetup {
    SenderSetup {
        endpoint_caller: Arc::new(endpoint_caller()),
        limits: SenderLimits { in_flight_max: slots, in_flight_bytes_max: bytes },
    }
}

/// An endpoint caller that may call endpoints on this machine.
fn endpoint_caller() -> EndpointCaller {
    let rules =
        GuardRules::new(vec!["127.0.0.0/8".parse().unwrap()], ENDPOINT_PORTS.to_vec(), None);
    EndpointCaller::new(EndpointClient::new(rules).unwrap(), vault())
}

fn start(store: &Outbox, slots: usize, bytes: usize, drain: Duration) -> Running {
    let setup = setup(slots, bytes);
    let sender = Sender::new(Arc::clone(&store.faults), Arc::new(Timestamp::now), Some(setup));
    let stop = CancellationToken::new();
    let task = tokio::spawn(Arc::new(sender).run(drain, stop.clone()));
    Running { stop, task }
}

const MANY_BYTES: usize = 64 << 20;
const DRAIN: Duration = Duration::from_secs(30);

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn endpoints_that_hang_do_not_delay_the_others() {
    // 20 endpoints never answer. The store allows 16 attempts for each: together, more than all
    // slots of the node.
    let (store, sink) = (Outbox::new(), Sink::start().await);
    for n in 0..20 {
        store.publish(sink.at, &format!("hang{n}"), 20, 10).await;
    }
    for n in 0..10 {
        store.publish(sink.at, &format!("fine{n}"), 30, 10).await;
    }
    let running = start(&store, 100, MANY_BYTES, Duration::ZERO);
    store.until(DeliveryStatus::Delivered, 10 * 30).await;
    // No delivery had to wait for an attempt of another endpoint to end.
    assert!(
        store.deliveries().await.iter().all(|one| one.attempts.len() <= 1 && one.reason.is_none())
    );
    for n in 0..20 {
        let [_, _, most] = sink.requests(&format!("hang{n}"));
        assert!(most <= 2, "hang{n} had {most} attempts at once");
    }
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_endpoint_that_answers_gets_up_to_its_own_bound() {
    let (store, sink) = (Outbox::new(), Sink::start().await);
    store.publish(sink.at, "fine", 400, 10).await;
    let running = start(&store, 256, MANY_BYTES, DRAIN);
    store.until(DeliveryStatus::Delivered, 400).await;
    assert_eq!(sink.requests("fine")[0], 400);
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_node_has_at_most_so_many_attempts_and_bytes_under_way() {
    let (store, sink) = (Outbox::new(), Sink::start().await);
    for n in 0..20 {
        store.publish(sink.at, &format!("hang{n}"), 5, 1_000).await;
    }
    let running = start(&store, 7, MANY_BYTES, Duration::ZERO);
    sink.until_open(7).await;
    assert_eq!(sink.open(), 7);
    let asked = store.limits_asked();
    assert!(asked.iter().all(|limit| *limit <= 7), "{asked:?}");
    running.stop().await;

    let (store, sink) = (Outbox::new(), Sink::start().await);
    for n in 0..20 {
        store.publish(sink.at, &format!("hang{n}"), 5, 1_000).await;
    }
    let running = start(&store, 100, 3_500, Duration::ZERO);
    sink.until_open(3).await;
    store.until(DeliveryStatus::Sending, 3).await;
    let leased = store.count(DeliveryStatus::Sending).await;
    // One delivery may exceed the bound.
    assert!(leased <= 4, "{leased} claims of more than 1,000 bytes");
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn claims_that_were_not_begun_are_given_back_at_a_stop() {
    // The stop comes while an exchange is under way, and while claims wait for their endpoint.
    let (store, sink) = (Outbox::new(), Sink::start().await);
    store.publish(sink.at, "hang", 10, 10).await;
    let running = start(&store, 64, MANY_BYTES, DRAIN);
    sink.until_open(2).await;
    running.stop.cancel();
    sink.seen.released.notify_waiters();
    running.stop().await;
    assert_eq!(store.count(DeliveryStatus::Delivered).await, 2);
    assert_eq!(store.given_back(), 8);
    let waiting = store.deliveries().await.into_iter().filter(|one| one.finished_at.is_none());
    let waiting: Vec<_> = waiting.map(|one| (one.status, one.attempt)).collect();
    assert_eq!(waiting, [(DeliveryStatus::Waiting, 0); 8], "a claim was kept or counted");

    let store = Outbox::new();
    store.publish(sink.at, "fine", 5, 10).await;
    let permits = store.faults.block(Act::Exchange);
    let running = start(&store, 64, MANY_BYTES, DRAIN);
    running.stop.cancel();
    permits.add_permits(1_000);
    running.stop().await;
    assert_eq!(store.count(DeliveryStatus::Waiting).await, 5);
    assert_eq!(sink.requests("fine")[0], 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn after_an_act_of_an_operator_no_claim_that_waits_is_attempted() {
    // Two attempts are under way, and eight claims with the earlier data wait for them.
    let moved = |record: &EndpointRecord, at: SocketAddr| EndpointSettings {
        url: format!("http://{at}/moved"),
        ..record.settings.clone()
    };
    for act in ["disable", "delete", "move", "cancel"] {
        let (store, sink) = (Outbox::new(), Sink::start().await);
        store.publish(sink.at, "hang", 10, 10).await;
        let running = start(&store, 64, MANY_BYTES, DRAIN);
        sink.until_open(2).await;
        store.until(DeliveryStatus::Sending, 10).await;
        let deliveries = store.deliveries().await;
        let (inner, endpoint) = (store.faults.inner(), deliveries[0].endpoint);
        let by = || Action { who: "ops".to_owned(), reason: None, at: Timestamp::now() };
        let record = inner.endpoint(endpoint).await.unwrap().unwrap();
        let change = match act {
            "disable" => Some(EndpointAct::Disable { reason: "it is being moved".to_owned() }),
            "delete" => Some(EndpointAct::Delete),
            "move" => Some(EndpointAct::Change {
                version: record.version,
                settings: Box::new(moved(&record, sink.at)),
                sealed: record.sealed.clone(),
            }),
            _cancel => None,
        };
        match change {
            Some(change) => {
                inner.change_endpoint(endpoint, change, by()).await.unwrap();
            }
            None => {
                for delivery in &deliveries {
                    let id = delivery.message.clone();
                    let message = MessageRef { tenant: Tenant::default(), id };
                    let cancelled = inner.change_message(message, MessageAct::Cancel, by()).await;
                    assert_eq!(cancelled.unwrap().map(|changed| changed.len()), Some(1));
                }
            }
        }
        sink.seen.released.notify_waiters();
        let moves = act == "move";
        store.until(DeliveryStatus::Delivered, if moves { 10 } else { 2 }).await;
        within(store.faults.until(|_| store.given_back() >= 8)).await;
        running.stop().await;
        assert_eq!(sink.requests("hang")[0], 2, "after {act}");
        assert_eq!(sink.requests("moved")[0], if moves { 8 } else { 0 }, "after {act}");
        assert_eq!(store.given_back(), 8, "after {act}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn outcomes_are_kept_until_the_store_takes_them_and_nothing_is_sent_twice() {
    let (store, sink) = (Outbox::new(), Sink::start().await);
    store.publish(sink.at, "hang", 2, 10).await;
    let running = start(&store, 64, MANY_BYTES, DRAIN);
    sink.until_open(2).await;
    // The store fails when the attempts end.
    let before = store.faults.begun(Act::Exchange);
    store.faults.fail_next(Act::Exchange, 3);
    sink.seen.released.notify_waiters();
    store.until(DeliveryStatus::Delivered, 2).await;
    assert!(store.faults.begun(Act::Exchange) > before + 3, "no exchange failed");
    assert_eq!(sink.requests("hang")[0], 2);
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_store_whose_due_deliveries_cannot_be_claimed_is_asked_ever_less_often() {
    // A delivery is due, but its endpoint has as many attempts under way as it may have, at another sender. A
    // loop without a pause would never let the paused clock advance.
    let store = Outbox::new();
    let settings =
        EndpointSettings { max_in_flight: 1, ..EndpointSettings::at("http://127.0.0.1:9/full") };
    store.publish_to(settings, "full", 2, 10).await;
    assert_eq!(store.take(2).await.len(), 1);
    let running = start(&store, 64, MANY_BYTES, DRAIN);
    tokio::time::sleep(Duration::from_secs(10)).await;
    let asked = store.faults.begun(Act::Exchange);
    assert!((10..60).contains(&asked), "{asked} exchanges in 10 seconds");
    assert_eq!(store.count(DeliveryStatus::Waiting).await, 1);
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_reload_brings_the_setup_that_was_missing() {
    let (store, sink) = (Outbox::new(), Sink::start().await);
    store.publish(sink.at, "fine", 3, 10).await;
    let sender = Sender::new(Arc::clone(&store.faults), Arc::new(Timestamp::now), None);
    let sender = Arc::new(sender);
    let stop = CancellationToken::new();
    let task = tokio::spawn(Arc::clone(&sender).run(DRAIN, stop.clone()));
    sender.reload(Some(setup(8, MANY_BYTES)));
    store.until(DeliveryStatus::Delivered, 3).await;
    Running { stop, task }.stop().await;
}

#[tokio::test]
async fn an_address_that_the_receiving_party_chose_must_be_public_whatever_the_operator_allows() {
    // The address may have been public when it was stored, so every attempt is checked.
    let (store, sink) = (Outbox::new(), Sink::start().await);
    store.publish(sink.at, "fine", 1, 10).await;
    let operators = store.take(1).await.remove(0);
    let receivers = DeliveryTarget { address_by: AddressChoice::Receiver, ..(*operators).clone() };
    let endpoint_caller = endpoint_caller();
    let now: hapax_engine::Now = Arc::new(Timestamp::now);
    let ping = endpoint_caller.ping(&receivers, "ping_1", &now).await;
    assert!(
        matches!(&ping.verdict, AttemptVerdict::Failed { error, .. } if error.contains("not public")),
        "{ping:?}"
    );
    let url = operators.url.as_str();
    assert!(endpoint_caller.check(url, AddressChoice::Operator).await.is_ok());
    assert!(endpoint_caller.check(url, AddressChoice::Receiver).await.is_err());
    let ping = endpoint_caller.ping(&operators, "ping_2", &now).await;
    assert!(matches!(ping.verdict, AttemptVerdict::Delivered(_)), "{ping:?}");
}
