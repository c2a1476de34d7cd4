//! Features in pairs: whatever shares state runs at once with everything else that does, on both
//! databases, against ledgers without a unique constraint. docs/pairs.md has the table.
//!
//! A feature is a kind of load (its events, and what their handlers need) or a disturbance that goes on
//! while loads run. Each pair gets a few events of its own on a server that stays, and one judgement:
//! every accepted event has exactly one effect, and nothing is left waiting.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use hapax_sim::Redis;
use serde_json::json;

use crate::support::charges::{Charge, api, proxy};
use crate::support::ledger::Ledger;
use crate::support::nodes::{Database, wait};
use crate::support::sender::now;
use crate::support::upstream::{Reply, Upstream};
use crate::support::{Answer, House, Sender, Server, Wire, own_address, post, until};

/// Events of each load of a pair: enough that both are at work at once.
const EVENTS: usize = 8;

/// The janitor has a round all the time, and takes whatever is finished for a second.
const SETTINGS: (&str, &str) = ("HAPAX_TEST_SETTINGS", "janitor.every_ms=50");

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Feature {
    // Loads.
    Plain,
    Sync,
    Order,
    Review,
    Derived,
    Refetch,
    Proxy,
    // Disturbances.
    Replay,
    Memory,
    Reload,
    Drain,
}

use Feature::{Derived, Drain, Memory, Order, Plain, Proxy, Refetch, Reload, Replay, Review, Sync};

const FEATURES: [Feature; 11] =
    [Plain, Sync, Order, Review, Derived, Refetch, Proxy, Replay, Memory, Reload, Drain];

impl Feature {
    /// The source that its events go to, where it is a load of events.
    fn source(self) -> Option<&'static str> {
        match self {
            Plain => Some("plain"),
            Sync => Some("sync"),
            Order => Some("order"),
            Review => Some("review"),
            Derived => Some("derived"),
            Refetch => Some("refetch"),
            Proxy | Replay | Memory | Reload | Drain => None,
        }
    }

    fn is_load(self) -> bool {
        self.source().is_some() || self == Proxy
    }
}

/// A node keeps its addresses when it starts again: a request on its way then reaches nothing else.
fn config(top: &str, objects: &Upstream, app: &Upstream) -> String {
    let address = own_address();
    let source = |name: &str, keys: &str, order: &str| {
        format!(
            "[sources.{name}]\nprovider = \"stripe\"\nsecrets = [\"whsec_{name}\"]\n{keys}\
             [sources.{name}.handlers.fee]\ntimeout = \"10s\"\n\
             retry = [\"0s\", \"10ms\", \"100ms\", \"1s\", \"1s\"]\n\
             sql = \"INSERT INTO ledger VALUES (CAST(:id AS text), 'fee', :attempt)\"\n{order}"
        )
    };
    let order = |name: &str, policy: &str| {
        format!(
            "[sources.{name}.handlers.fee.order]\nresource = \"/data/object/id\"\nby = \"/n\"\n\
             policy = \"{policy}\"\n"
        )
    };
    let refetch = format!(
        "{}[sources.refetch.handlers.fee.refetch]\nurl = \"{}/objects/{{resource}}\"\n",
        order("refetch", "latest"),
        objects.url()
    );
    [
        format!(
            "{top}\nlisten = \"{address}:8080\"\nadmin_listen = \"{address}:8081\"\n\
             admin_open = true\n[retention]\nevents = \"1s\"\nkeys = \"1h\"\n"
        ),
        source("plain", "", ""),
        source("sync", "mode = \"sync\"\nsync_timeout = \"20s\"\n", ""),
        source("order", "", &order("order", "sequence")),
        source("review", "late = \"review\"\n", ""),
        source("derived", "event_id = { hash = [\"/ref\"], within = \"10m\" }\n", ""),
        source("refetch", "", &refetch),
        proxy(&app.url(), "lease = \"60s\"\nwait = \"20s\"")
            .replace("127.0.0.1:0", &format!("{address}:8082")),
    ]
    .concat()
}

/// Where the user's ledger is.
enum Books {
    Sqlite(Ledger),
    Postgres(Database),
}

impl Books {
    fn effects(&self) -> BTreeMap<String, i64> {
        match self {
            Self::Sqlite(ledger) => ledger.effects(),
            Self::Postgres(database) => database.effects(),
        }
    }

    /// Events that are not finished.
    fn open(&self) -> i64 {
        self.count("status NOT IN ('processed', 'stale', 'ignored', 'discarded')")
    }

    /// Events that retention has left whole.
    fn whole(&self) -> i64 {
        self.count("true")
    }

    fn count(&self, which: &str) -> i64 {
        let count = |view: &str| format!("SELECT count(*) FROM {view} WHERE {which}");
        match self {
            Self::Sqlite(ledger) => ledger.number(&count("hapax_processed_events")),
            Self::Postgres(database) => database.number(&count("hapax.processed_events")),
        }
    }
}

/// One database with the nodes on it.
struct Stage {
    houses: Vec<House>,
    nodes: Vec<Mutex<Node>>,
    books: Books,
    app: Upstream,
    _objects: Upstream,
    _redis: Option<Redis>,
    /// Our ids of all that was accepted.
    accepted: Mutex<BTreeSet<String>>,
    keys: Mutex<BTreeSet<String>>,
    /// Loads of the pair that still run.
    running: AtomicUsize,
    turn: AtomicUsize,
}

struct Node {
    server: Option<Server>,
    at: Addresses,
}

#[derive(Clone, Copy)]
struct Addresses {
    ingress: SocketAddr,
    admin: SocketAddr,
    proxy: SocketAddr,
}

impl Node {
    fn start(house: &House) -> Self {
        let server = house.start_with(&[SETTINGS]);
        let at = Addresses { ingress: server.ingress, admin: server.admin, proxy: api(&server) };
        Self { server: Some(server), at }
    }
}

impl Stage {
    fn new(
        top: &str,
        nodes: usize,
        books: impl FnOnce(&House) -> Books,
        redis: Option<Redis>,
    ) -> Self {
        let objects = Upstream::new(|_| Reply::Answer(200, String::new(), b"{\"now\":1}".to_vec()));
        let app = Upstream::counting();
        let houses: Vec<House> =
            (0..nodes).map(|_| House::new(&config(top, &objects, &app))).collect();
        let books = books(&houses[0]);
        let nodes = houses.iter().map(|house| Mutex::new(Node::start(house))).collect();
        Self {
            houses,
            nodes,
            books,
            app,
            _objects: objects,
            _redis: redis,
            accepted: Mutex::default(),
            keys: Mutex::default(),
            running: AtomicUsize::new(0),
            turn: AtomicUsize::new(0),
        }
    }

    /// The next node's addresses: senders go over all of them.
    fn at(&self) -> Addresses {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        self.nodes[turn % self.nodes.len()].lock().unwrap().at
    }

    /// Asks until there is an answer that is no request to come again.
    fn ask(&self, request: &[u8], to: impl Fn(Addresses) -> SocketAddr) -> Answer {
        until("an answer", || {
            let answer = Wire::try_connect(to(self.at())).ok()?.try_ask(request)?;
            (answer.status != 503).then_some(answer)
        })
    }

    fn act(&self, path: &str) -> Answer {
        self.ask(&post(SocketAddr::from(([127, 0, 0, 1], 1)), path, &json!({})), |at| at.admin)
    }

    /// All pairs, one after the other.
    fn all_pairs(&self) {
        for (n, one) in FEATURES.into_iter().enumerate() {
            for other in FEATURES.into_iter().skip(n + 1) {
                self.pair(one, other);
            }
        }
        let accepted = self.accepted.lock().unwrap().len() as i64;
        until("retention was at work", || (self.books.whole() < accepted).then_some(()));
    }

    fn pair(&self, one: Feature, other: Feature) {
        let name = format!("{one:?}_{other:?}");
        let mut loads: Vec<Feature> = [one, other].into_iter().filter(|it| it.is_load()).collect();
        if loads.is_empty() {
            // Two disturbances meet over the work of a load.
            loads = vec![Plain, Order];
        }
        self.running.store(loads.len(), Ordering::SeqCst);
        std::thread::scope(|scope| {
            for (n, load) in loads.iter().enumerate() {
                let name = format!("{name}_{n}");
                scope.spawn(move || {
                    let _ended = Ended(&self.running);
                    self.load(*load, &name);
                });
            }
            for disturbance in [one, other].into_iter().filter(|it| !it.is_load()) {
                scope.spawn(move || self.disturb(disturbance));
            }
        });
        self.judge(&name);
    }

    fn load(&self, load: Feature, name: &str) {
        // Odd ones first, so that order has gaps to wait for.
        let numbers =
            (1..=EVENTS).filter(|n| n % 2 == 1).chain((1..=EVENTS).filter(|n| n % 2 == 0));
        for n in numbers {
            match load.source() {
                Some(source) => self.event(load, source, name, n),
                None => self.charge(&format!("{name}_{n}")),
            }
        }
    }

    fn event(&self, load: Feature, source: &str, name: &str, n: usize) {
        let resource = if load == Order { name.to_owned() } else { format!("{name}_{n}") };
        let body = json!({
            "id": format!("evt_{name}_{n}"), "ref": format!("ref_{name}_{n}"), "type": "payout.paid",
            "object": "event", "n": n, "data": { "object": { "id": resource } },
        });
        let sender =
            Sender::new("stripe", &format!("whsec_{source}"), &format!("/webhooks/{source}"));
        let late = if load == Review { 3_600 } else { 0 };
        let request = sender.request_at(body.to_string(), now() - late).bytes();
        let first = self.ask(&request, |at| at.ingress);
        assert!(matches!(first.status, 200 | 202), "{name}: {first:?}");
        if load == Review {
            // A person's approval and an on-time copy: both promote it, once.
            let on_time = sender.request(body.to_string()).bytes();
            std::thread::scope(|scope| {
                scope.spawn(|| self.act(&format!("/api/v1/events/{}/approve", first.id())));
                scope.spawn(|| self.ask(&on_time, |at| at.ingress));
            });
        }
        self.accepted.lock().unwrap().insert(first.id());
        let copy = self.ask(&request, |at| at.ingress);
        assert!(matches!(copy.status, 200 | 202), "{name}: {copy:?}");
        assert_eq!(copy.id(), first.id(), "{name}: a copy has another id");
    }

    fn charge(&self, key: &str) {
        let request = Charge::with_key(key).bytes();
        self.keys.lock().unwrap().insert(key.to_owned());
        for _ in 0..2 {
            let answer = until("the charge is answered", || {
                let answer = Wire::try_connect(self.at().proxy).ok()?.try_ask(&request)?;
                (answer.status == 201).then_some(answer)
            });
            assert_eq!(answer.status, 201, "{answer:?}");
        }
    }

    /// Goes on until the loads have ended, and at least once.
    fn disturb(&self, disturbance: Feature) {
        loop {
            let known: Vec<String> =
                self.accepted.lock().unwrap().iter().rev().take(20).cloned().collect();
            match disturbance {
                Replay => {
                    for id in &known {
                        self.act(&format!("/api/v1/events/{id}/replay"));
                    }
                }
                // Copies of the newest events, many at once: memory answers those that are finished.
                Memory => self.flood(),
                Reload => {
                    for node in &self.nodes {
                        let node = node.lock().unwrap();
                        // None while it is stopped and started again.
                        if let Some(server) = &node.server {
                            server.signal("HUP");
                        }
                    }
                }
                Drain => self.restart(),
                Plain | Sync | Order | Review | Derived | Refetch | Proxy => {}
            }
            if self.running.load(Ordering::SeqCst) == 0 {
                return;
            }
            std::thread::park_timeout(crate::support::LOOK_EVERY);
        }
    }

    fn flood(&self) {
        let sender = Sender::new("stripe", "whsec_plain", "/webhooks/plain");
        let body = json!({ "id": "evt_flood", "type": "payout.paid", "object": "event" });
        let request = sender.request(body.to_string()).bytes();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let answer = self.ask(&request, |at| at.ingress);
                    self.accepted.lock().unwrap().insert(answer.id());
                });
            }
        });
    }

    /// Stops a node as an operator does, under load, and starts it again.
    fn restart(&self) {
        let turn = self.turn.load(Ordering::Relaxed) % self.nodes.len();
        let server =
            self.nodes[turn].lock().unwrap().server.take().expect("one restarts at a time");
        server.stop();
        *self.nodes[turn].lock().unwrap() = Node::start(&self.houses[turn]);
    }

    /// Every accepted event has exactly one effect, every key was worked on once, nothing waits.
    fn judge(&self, pair: &str) {
        let accepted = self.accepted.lock().unwrap().clone();
        until(&format!("{pair}: everything is done"), || {
            let effects = self.books.effects();
            let done = accepted.iter().all(|id| effects.contains_key(id)) && self.books.open() == 0;
            done.then_some(())
        });
        let effects = self.books.effects();
        let wrong: Vec<_> = effects.iter().filter(|(_, count)| **count != 1).collect();
        assert!(wrong.is_empty(), "{pair}: not once: {wrong:?}");
        let made_up: Vec<_> = effects.keys().filter(|id| !accepted.contains(*id)).collect();
        assert!(made_up.is_empty(), "{pair}: effects of nothing: {made_up:?}");
        let keys = self.keys.lock().unwrap().clone();
        let mut worked: BTreeMap<String, usize> = BTreeMap::new();
        for asked in self.app.effects() {
            *worked.entry(asked.header("idempotency-key").unwrap().to_owned()).or_default() += 1;
        }
        let once: BTreeMap<String, usize> = keys.into_iter().map(|key| (key, 1)).collect();
        assert_eq!(worked, once, "{pair}: keys");
    }
}

/// Counts a load as ended, also when it panics.
struct Ended<'s>(&'s AtomicUsize);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[test]
fn every_pair_of_features_keeps_each_effect_once_on_sqlite() {
    let schema = "CREATE TABLE ledger (event_id TEXT, handler TEXT, attempt INTEGER)";
    let stage = Stage::new("", 1, |house| Books::Sqlite(Ledger::create(house, schema)), None);
    stage.all_pairs();
}

#[test]
fn every_pair_of_features_keeps_each_effect_once_on_two_nodes_of_postgresql_with_redis() {
    let database = Database::shared("pairs");
    let redis = wait(Redis::start());
    let top = format!("database_url = \"{}\"\nredis_url = \"{}\"", database.url, redis.url());
    let stage = Stage::new(&top, 2, |_| Books::Postgres(database), Some(redis));
    stage.all_pairs();
}
