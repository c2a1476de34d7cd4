//! Features in pairs: every two features that share state run at the same time, on both databases,
//! against ledgers without a unique constraint. docs/pairs.md has the table.
//!
//! A feature is a kind of load (its events, and the needs of their handlers) or a disturbance that
//! continues while loads run. Each pair gets a few events of its own on a long-running server, and
//! one check: every accepted event has exactly one effect, and no job is left waiting.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use hapax_sim::Redis;
use serde_json::json;

use crate::support::charges::{Charge, api, proxy};
use crate::support::ledger::Ledger;
use crate::support::nodes::{Database, wait};
use crate::support::sender::now;
use crate::support::upstream::{Reply, Upstream};
use crate::support::{Answer, House, Sender, Server, Wire, own_address, post, until};

/// Events of each load of a pair: enough that both run at the same time.
const EVENTS: usize = 8;

/// How long a proxy keeps an answer: shorter than the test, so that keys expire during it, and
/// longer than any of its requests.
const TTL: Duration = Duration::from_secs(15);

/// The number of clients that replay the newest events.
const REPLAYS_AT_ONCE: usize = 3;

/// How many keys of earlier pairs a load of requests sends again.
const OLD_KEYS: usize = 4;

/// The janitor runs every 50 ms. By the config the janitor deletes events that have been finished for one
/// second.
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
    /// The source that its events are sent to, if it is a load of events.
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

/// A restarted node keeps its addresses: a request in flight then reaches no other server.
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
        proxy(
            &app.url(),
            &format!("lease = \"{0}s\"\nttl = \"{0}s\"\nwait = \"5s\"", TTL.as_secs()),
        )
        .replace("127.0.0.1:0", &format!("{address}:8082")),
    ]
    .concat()
}

/// The location of the user's ledger.
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

    /// Events with their bodies.
    fn whole(&self) -> i64 {
        self.count("true")
    }

    /// Stored Idempotency-Keys.
    fn keys(&self) -> i64 {
        match self {
            Self::Sqlite(ledger) => ledger.number("SELECT count(*) FROM hapax_reservation"),
            Self::Postgres(database) => database.number("SELECT count(*) FROM hapax.reservation"),
        }
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
    /// Hapax ids of all events that must run.
    accepted: Mutex<BTreeSet<String>>,
    /// Ids of events that an operator may have rejected in time.
    unknown: Mutex<BTreeSet<String>>,
    /// The answers received under each Idempotency-Key.
    keys: Mutex<BTreeMap<String, BTreeSet<String>>>,
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
            unknown: Mutex::default(),
            keys: Mutex::default(),
            running: AtomicUsize::new(0),
            turn: AtomicUsize::new(0),
        }
    }

    /// The next node's addresses: senders use all nodes in turn.
    fn at(&self) -> Addresses {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        self.nodes[turn % self.nodes.len()].lock().unwrap().at
    }

    /// Repeats the request until the answer does not ask for a retry.
    fn ask(&self, request: &[u8], to: impl Fn(Addresses) -> SocketAddr) -> Answer {
        until("an answer", || {
            let answer = Wire::try_connect(to(self.at())).ok()?.try_ask(request)?;
            (answer.status != 503).then_some(answer)
        })
    }

    fn act(&self, path: &str) -> Answer {
        self.ask(
            &post(SocketAddr::from(([127, 0, 0, 1], 1)), path, &json!({ "reason": "a test" })),
            |at| at.admin,
        )
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
        let keys = self.keys.lock().unwrap().len() as i64;
        until("retention was at work on keys", || (self.books.keys() < keys).then_some(()));
        // After a key has expired, one request with it runs again.
        let one =
            self.keys.lock().unwrap().first_key_value().map(|(key, it)| (key.clone(), it.len()));
        let (key, heard) = one.expect("there were proxies");
        until("a key is forgotten", || {
            self.charge(&key);
            (self.keys.lock().unwrap()[&key].len() > heard).then_some(())
        });
        self.judge("at the end");
    }

    fn pair(&self, one: Feature, other: Feature) {
        let name = format!("{one:?}_{other:?}");
        let mut loads: Vec<Feature> = [one, other].into_iter().filter(|it| it.is_load()).collect();
        if loads.is_empty() {
            // Two disturbances act on the same load.
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
        // Odd numbers come first, so that order has gaps to wait for.
        let numbers =
            (1..=EVENTS).filter(|n| n % 2 == 1).chain((1..=EVENTS).filter(|n| n % 2 == 0));
        let old: Vec<String> = self.keys.lock().unwrap().keys().take(OLD_KEYS).cloned().collect();
        if load == Proxy {
            old.iter().for_each(|key| self.charge(key));
        }
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
        let runs = match load {
            Review => self.reviewed(&first.id(), &sender.request(body.to_string()).bytes(), n),
            _ => Runs::Once,
        };
        match runs {
            Runs::Once => self.accepted.lock().unwrap().insert(first.id()),
            Runs::Never => false,
            Runs::Unknown => self.unknown.lock().unwrap().insert(first.id()),
        };
        let copy = self.ask(&request, |at| at.ingress);
        assert!(matches!(copy.status, 200 | 202), "{name}: {copy:?}");
        assert_eq!(copy.id(), first.id(), "{name}: a copy has another id");
    }

    /// An operator's approval and an on-time copy both release the event, which runs once. Every
    /// other time a second operator rejects the event at the same moment: then it runs only if the
    /// rejection came too late.
    fn reviewed(&self, id: &str, on_time: &[u8], n: usize) -> Runs {
        let refuses = n.is_multiple_of(2);
        std::thread::scope(|scope| {
            let refused = scope
                .spawn(|| refuses.then(|| self.act(&format!("/api/v1/events/{id}/reject")).status));
            scope.spawn(|| self.act(&format!("/api/v1/events/{id}/approve")));
            scope.spawn(|| self.ask(on_time, |at| at.ingress));
            match refused.join().unwrap() {
                None | Some(409) => Runs::Once,
                Some(200) => Runs::Never,
                // The first answer was lost, and retention has deleted the event since.
                Some(404) => Runs::Unknown,
                Some(other) => panic!("a refusal got {other}"),
            }
        })
    }

    fn charge(&self, key: &str) {
        let request = Charge::with_key(key).bytes();
        for _ in 0..2 {
            let answer = until("the charge is answered", || {
                let answer = Wire::try_connect(self.at().proxy).ok()?.try_ask(&request)?;
                (answer.status == 201).then_some(answer)
            });
            let mut keys = self.keys.lock().unwrap();
            keys.entry(key.to_owned()).or_default().insert(answer.text());
        }
    }

    /// Runs until the loads have ended, and at least once.
    fn disturb(&self, disturbance: Feature) {
        loop {
            let known: Vec<String> =
                self.accepted.lock().unwrap().iter().rev().take(40).cloned().collect();
            match disturbance {
                // Several clients replay at once, because an event is read first and replayed
                // afterwards.
                Replay => std::thread::scope(|scope| {
                    for _ in 0..REPLAYS_AT_ONCE {
                        scope.spawn(|| {
                            for id in &known {
                                self.act(&format!("/api/v1/events/{id}/replay"));
                            }
                        });
                    }
                }),
                // Concurrent copies of one event: once it is finished, they are answered from
                // memory.
                Memory => self.flood(),
                Reload => {
                    for node in &self.nodes {
                        let node = node.lock().unwrap();
                        // There is no server while the node is being restarted.
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

    /// Checks that every accepted event has exactly one effect, every key ran once, and nothing
    /// waits.
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
        let unknown = self.unknown.lock().unwrap();
        let may_run = |id: &String| accepted.contains(id) || unknown.contains(id);
        let made_up: Vec<_> = effects.keys().filter(|id| !may_run(id)).collect();
        assert!(made_up.is_empty(), "{pair}: effects of nothing: {made_up:?}");
        // A key ran once for each answer received under it. A key ran a second time only after its first
        // answer had expired.
        let mut worked: BTreeMap<String, Vec<Instant>> = BTreeMap::new();
        for asked in self.app.effects() {
            let key = asked.header("idempotency-key").unwrap().to_owned();
            worked.entry(key).or_default().push(asked.at);
        }
        let keys = self.keys.lock().unwrap();
        let heard: Vec<(&String, usize)> = keys.iter().map(|(key, it)| (key, it.len())).collect();
        let done: Vec<(&String, usize)> = worked.iter().map(|(key, it)| (key, it.len())).collect();
        assert_eq!(done, heard, "{pair}: keys");
        for (key, at) in &worked {
            let early = at.windows(2).find(|two| two[1].duration_since(two[0]) < TTL);
            assert!(early.is_none(), "{pair}: {key} was worked on twice within its time");
        }
    }
}

/// The expected outcome of an event.
enum Runs {
    Once,
    Never,
    /// At most once.
    Unknown,
}

/// Counts a load as ended, even when it panics.
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
    // The handlers have a separate role, which may write to the ledger and nothing else.
    let database = Database::shared("pairs");
    database.execute("CREATE ROLE pairs_handlers LOGIN; GRANT INSERT ON ledger TO pairs_handlers");
    let handlers = database.url.replace("postgres@", "pairs_handlers@");
    let redis = wait(Redis::start());
    let top = format!(
        "database_url = \"{}\"\nhandlers_database_url = \"{handlers}\"\nredis_url = \"{}\"",
        database.url,
        redis.url()
    );
    let stage = Stage::new(&top, 2, |_| Books::Postgres(database), Some(redis));
    stage.all_pairs();
}
