//! Several servers on one PostgreSQL: the database with a user's ledger, the nodes that share it,
//! and senders that try node after node until each event is acked.
//!
//! The ledger has no unique constraint, so a second effect is a second row.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use hapax_sim::Postgres;
use serde_json::json;
use tokio::runtime::Runtime;

use super::{Answer, House, Sender, Server, Wire, until};

pub(crate) const SECRET: &str = "whsec_nodes";

/// The tables that a handler writes. A second run of the handler is visible in these tables.
const SCHEMA: &str = "
    CREATE TABLE ledger (event_id text, handler text, attempt int);
    CREATE TABLE account (balance bigint);
    INSERT INTO account VALUES (0)";

/// A handler that writes one row for each event.
pub(crate) const ROW: &str = "[sources.stripe.handlers.fee]\nretry = [\"0s\", \"0s\", \"1s\", \"1s\"]\n\
     sql = \"INSERT INTO ledger VALUES (:event_id, 'fee', :attempt)\"\n";

/// A handler that writes one row for each event, and increments a balance that all jobs share.
pub(crate) const ROW_AND_SUM: &str = "[sources.stripe.handlers.fee]\n\
     retry = [\"0s\", \"0s\", \"1s\", \"1s\"]\nsql = \"\"\"\n\
     INSERT INTO ledger VALUES (:event_id, 'fee', :attempt);\n\
     UPDATE account SET balance = balance + 1\"\"\"\n";

/// Runs futures of `hapax_sim` on one runtime for all tests, because its engines outlive the test
/// that started them.
pub(crate) fn wait<T>(future: impl Future<Output = T>) -> T {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| Runtime::new().unwrap()).block_on(future)
}

/// One database that nodes share.
pub(crate) struct Database {
    pub(crate) url: String,
}

impl Database {
    /// A database on the shared server of this test binary, which no test may damage.
    pub(crate) fn shared(label: &str) -> Self {
        let database = Self::empty(label);
        database.execute(SCHEMA);
        database
    }

    /// A database without the user's tables.
    pub(crate) fn empty(label: &str) -> Self {
        Self { url: wait(async { Postgres::shared().await.create_database(label).await }) }
    }

    /// A database on a server that belongs to the test.
    pub(crate) fn on(server: &Postgres, label: &str) -> Self {
        let database = Self { url: wait(server.create_database(label)) };
        database.execute(SCHEMA);
        database
    }

    pub(crate) fn name(&self) -> &str {
        self.url.rsplit('/').next().unwrap()
    }

    /// A node with `keys` at the top of its config and these handlers of its one source.
    pub(crate) fn house(&self, keys: &str, handlers: &str) -> House {
        House::new(&format!("database_url = \"{}\"\n{}", self.url, config(keys, handlers)))
    }

    /// The first column of each row.
    pub(crate) fn execute(&self, sql: &str) -> Vec<Option<String>> {
        wait(Postgres::execute_at(&self.url, sql))
    }

    pub(crate) fn number(&self, sql: &str) -> i64 {
        let rows = self.execute(sql);
        rows[0].as_deref().unwrap_or("0").parse().unwrap()
    }

    /// The number of rows of each `event_id` in the ledger.
    pub(crate) fn effects(&self) -> BTreeMap<String, i64> {
        self.execute("SELECT event_id || ' ' || count(*) FROM ledger GROUP BY event_id")
            .into_iter()
            .flatten()
            .map(|row| {
                let (event, count) = row.rsplit_once(' ').unwrap();
                (event.to_owned(), count.parse().unwrap())
            })
            .collect()
    }

    /// Checks that every event has exactly one effect, and that there are no other effects.
    #[track_caller]
    pub(crate) fn is_once_each(&self, events: usize) {
        let effects = self.effects();
        let wrong: Vec<_> = effects.iter().filter(|(_, count)| **count != 1).collect();
        assert!(wrong.is_empty(), "not once: {wrong:?}");
        assert_eq!(effects.len(), events, "lost or made up");
    }

    /// Waits until this many events are processed, and checks that no job is a dead letter.
    #[track_caller]
    pub(crate) fn all_processed(&self, server: &Server, events: usize) {
        let done = "SELECT count(*) FROM hapax.processed_events WHERE status = 'processed'";
        until("all events are processed", || (self.number(done) >= events as i64).then_some(()));
        // After a failover, queries of operators may wait for connections to the old server.
        let dead = until("the jobs can be read", || {
            let answer = server.admin_get("/api/v1/jobs?status=dead");
            (answer.status != 503).then(|| answer.json())
        });
        assert_eq!(dead["items"], json!([]), "{dead}");
    }
}

/// The config of a node without its database.
pub(crate) fn config(keys: &str, handlers: &str) -> String {
    format!("{keys}\n[sources.stripe]\nprovider = \"stripe\"\nsecrets = [\"{SECRET}\"]\n{handlers}")
}

/// How long a sender waits after a refusal. A real sender waits far longer.
const BACK_OFF: Duration = Duration::from_millis(20);

/// Senders of the same source, and the nodes they may use.
pub(crate) struct Senders {
    nodes: Mutex<Vec<SocketAddr>>,
    acked: AtomicUsize,
    refused: AtomicUsize,
    ids: Mutex<BTreeMap<String, BTreeSet<String>>>,
}

impl Senders {
    pub(crate) fn to<'s>(nodes: impl IntoIterator<Item = &'s Server>) -> Self {
        Self {
            nodes: Mutex::new(nodes.into_iter().map(|node| node.ingress).collect()),
            acked: AtomicUsize::new(0),
            refused: AtomicUsize::new(0),
            ids: Mutex::default(),
        }
    }

    /// Records that a node restarted at another address.
    pub(crate) fn moved(&self, node: usize, to: &Server) {
        self.nodes.lock().unwrap()[node] = to.ingress;
    }

    /// The number of 200 answers so far.
    pub(crate) fn acked(&self) -> usize {
        self.acked.load(Ordering::Relaxed)
    }

    /// The number of 503 answers so far.
    pub(crate) fn refused(&self) -> usize {
        self.refused.load(Ordering::Relaxed)
    }

    #[track_caller]
    pub(crate) fn until_acked(&self, count: usize) {
        until("so many are acked", || (self.acked() >= count).then_some(()));
    }

    /// Sends every event of `ids` from `clients` clients until it is acked, and every fifth event
    /// once more to another node. Returns when `meanwhile` has ended and all events are acked.
    pub(crate) fn send<T>(
        &self,
        clients: usize,
        ids: std::ops::Range<usize>,
        meanwhile: impl FnOnce() -> T,
    ) -> T {
        std::thread::scope(|scope| {
            for client in 0..clients {
                let share = ids.clone().skip(client).step_by(clients);
                scope.spawn(move || {
                    let sender = Sender::stripe(SECRET);
                    let mut line = Line { senders: self, turn: client, wire: None };
                    for event in share {
                        let id = format!("evt_{event}");
                        line.until_acked(&id, &sender.event(&id));
                        if event % 5 == 0 {
                            line.elsewhere();
                            line.until_acked(&id, &sender.event(&id));
                        }
                    }
                });
            }
            meanwhile()
        })
    }

    /// Checks that every acked event always got the same id, and that no two events share one.
    #[track_caller]
    pub(crate) fn one_id_each(&self, events: usize) {
        let ids = self.ids.lock().unwrap();
        let wrong: Vec<_> = ids.iter().filter(|(_, ids)| ids.len() != 1).collect();
        assert!(wrong.is_empty(), "several ids: {wrong:?}");
        assert_eq!(ids.len(), events);
        assert_eq!(ids.values().flatten().collect::<BTreeSet<_>>().len(), events);
    }

    /// All ids that an event was acked with.
    pub(crate) fn ids_of(&self, event: &str) -> BTreeSet<String> {
        self.ids.lock().unwrap().get(event).cloned().unwrap_or_default()
    }

    pub(crate) fn heard(&self, event: &str, answer: &Answer) {
        self.acked.fetch_add(1, Ordering::Relaxed);
        let mut ids = self.ids.lock().unwrap();
        ids.entry(event.to_owned()).or_default().insert(answer.id());
    }
}

/// One client. It has one connection at a time, to any node.
struct Line<'s> {
    senders: &'s Senders,
    turn: usize,
    wire: Option<Wire>,
}

impl Line<'_> {
    fn until_acked(&mut self, event: &str, request: &[u8]) {
        until(&format!("{event} is acked"), || match self.try_ask(request) {
            Some(answer) if answer.status == 200 => {
                self.senders.heard(event, &answer);
                Some(())
            }
            Some(answer) => {
                assert_eq!(answer.status, 503, "{answer:?}");
                assert!(answer.header("retry-after").is_some(), "{answer:?}");
                self.senders.refused.fetch_add(1, Ordering::Relaxed);
                std::thread::park_timeout(BACK_OFF);
                self.elsewhere();
                None
            }
            None => {
                std::thread::park_timeout(BACK_OFF);
                self.elsewhere();
                None
            }
        });
    }

    fn try_ask(&mut self, request: &[u8]) -> Option<Answer> {
        if self.wire.is_none() {
            let nodes = self.senders.nodes.lock().unwrap();
            let node = nodes[self.turn % nodes.len()];
            drop(nodes);
            self.wire = Some(Wire::try_connect(node).ok()?);
        }
        self.wire.as_mut()?.try_ask(request)
    }

    fn elsewhere(&mut self) {
        self.turn += 1;
        self.wire = None;
    }
}
