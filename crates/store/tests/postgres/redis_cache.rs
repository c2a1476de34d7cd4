//! A hostile Redis in front of PostgreSQL: flushed, paused, killed, with wrong or outdated entries.
//! To see which of the two answered, events are deleted from the database directly: then only a
//! cache still reports a duplicate, and the database accepts the event again.

#[allow(dead_code)]
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::faults::{number, session};
use crate::harness::{Sender, after, body, done, handler, job, noon, pg_database, spec};
use crate::until;
use hapax_core::store::{
    Action, ClaimAsk, Horizon, Inspect, Operate, Outcome, ReplayAsk, Store, Verdict, Work,
};
use hapax_sim::{Postgres, Redis, RedisReply};
use hapax_store::{PgOptions, PgStore};

/// A Redis, a database, and nodes on both.
struct CachedDatabase {
    redis: Redis,
    url: String,
    warmed: AtomicUsize,
}

/// The component that answered.
#[derive(Debug, PartialEq, Eq)]
enum By {
    Cache,
    Database,
}

impl CachedDatabase {
    async fn new() -> Self {
        let (redis, url) = (Redis::start().await, pg_database().await);
        Self { redis, url, warmed: AtomicUsize::new(0) }
    }

    fn options(&self) -> PgOptions {
        PgOptions { redis_url: Some(self.redis.url()), ..PgOptions::new(self.url.as_str()) }
    }

    /// A node with an empty memory that is connected to Redis.
    async fn node(&self) -> PgStore {
        let node = PgStore::open(self.options()).await.expect("opens");
        self.speaks(&node).await;
        node
    }

    /// Waits until this node writes accepted events to Redis.
    async fn speaks(&self, node: &PgStore) {
        let before = self.entries().await.len();
        until("the node speaks with Redis", async || {
            let n = self.warmed.fetch_add(1, Ordering::Relaxed);
            assert_eq!(asked(node, &format!("warm_{n}")).await, By::Database);
            self.entries().await.len() > before
        })
        .await;
    }

    /// Makes an event that has an entry in Redis but is not in the database. Returns the entry's
    /// name.
    async fn only_in_redis(&self, id: &str) -> Vec<u8> {
        let name = name_of(id);
        self.cached(id).await;
        self.forget().await;
        name
    }

    /// Accepts an event and waits until Redis has an entry of it. A node writes the entry once, and
    /// not at all during the pause after a slow answer: then another node writes it.
    async fn cached(&self, id: &str) {
        let name = name_of(id);
        until("the entry is written", async || {
            let node = self.node().await;
            asked(&node, id).await;
            // Later entries are written after this one.
            self.speaks(&node).await;
            node.close().await;
            self.entries().await.contains(&name)
        })
        .await;
    }

    /// Waits until Redis answers for an event that is in no database: a busy Redis may be too slow,
    /// and then the database accepts the event as new.
    async fn believed(&self, id: &str) {
        until("Redis is believed", async || {
            let node = self.node().await;
            let by = asked(&node, id).await;
            if by == By::Database {
                self.forget().await;
            }
            node.close().await;
            by == By::Cache
        })
        .await;
    }

    /// Deletes all events from the database.
    async fn forget(&self) {
        Postgres::execute_at(&self.url, "DELETE FROM hapax.event; DELETE FROM hapax.body").await;
    }

    async fn entries(&self) -> Vec<Vec<u8>> {
        let RedisReply::List(keys) = self.redis.command(&["KEYS", "hapax:*"]).await else {
            panic!("no list of keys")
        };
        let text = |key| if let RedisReply::Text(key) = key { Some(key) } else { None };
        keys.into_iter().filter_map(text).collect()
    }

    async fn get(&self, name: &[u8]) -> Vec<u8> {
        match self.redis.command(&[b"GET".as_slice(), name]).await {
            RedisReply::Text(value) => value,
            other => panic!("{other:?}"),
        }
    }

    async fn plant(&self, name: &[u8], value: &[u8]) {
        let planted = self.redis.command(&[b"SET".as_slice(), name, value]).await;
        assert_eq!(planted, RedisReply::Text(b"OK".to_vec()));
    }
}

/// The name of an event's entry in Redis.
fn name_of(id: &str) -> Vec<u8> {
    let hash = Sender::plain().ingest(&body(id)).receipts[0].key().hash();
    [b"hapax:".as_slice(), &hash.0].concat()
}

async fn asked(node: &PgStore, id: &str) -> By {
    match node.ingest(Sender::plain().ingest(&body(id))).await.expect("answers")[..] {
        [Verdict::Duplicate(_)] => By::Cache,
        [Verdict::Accepted(_)] => By::Database,
        ref other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hit_is_answered_without_the_database_and_a_flushed_one_by_it() {
    // FLUSHALL between two copies: an event that the cache has lost must not be accepted twice.
    let database = CachedDatabase::new().await;
    database.only_in_redis("evt_1").await;
    database.believed("evt_1").await;
    let node = database.node().await;
    assert_eq!(asked(&node, "evt_2").await, By::Database, "of an unknown event");
    database.redis.flush_all().await;
    database.forget().await;
    let other = database.node().await;
    assert_eq!(asked(&other, "evt_1").await, By::Database);
    assert_eq!(asked(&database.node().await, "evt_1").await, By::Cache, "once, and cached again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_body_under_a_known_key_is_not_answered_by_redis() {
    // If Redis answered, the conflict would never be noticed.
    let database = CachedDatabase::new().await;
    database.cached("evt_1").await;
    let other = database.node().await;
    let changed = body("evt_1").replace('}', r#","more":1}"#);
    let verdicts = other.ingest(Sender::plain().ingest(&changed)).await.expect("answers");
    assert!(matches!(verdicts[..], [Verdict::Conflict(_)]), "{verdicts:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forged_entry_is_ignored() {
    // Redis holds a valid entry under another event's name, and entries that are truncated, too
    // long, huge or of another type. Nodes of another database wrote one more entry, with their own
    // key.
    let database = CachedDatabase::new().await;
    let (mine, name) =
        (database.only_in_redis("mine").await, database.only_in_redis("evt_1").await);
    let (of_mine, genuine) = (database.get(&mine).await, database.get(&name).await);
    let elsewhere = CachedDatabase::new().await;
    let of_theirs = elsewhere.only_in_redis("evt_1").await;
    let theirs = elsewhere.get(&of_theirs).await;
    assert_eq!(name, of_theirs, "the same event has the same name everywhere");
    let planted = [
        of_mine,
        theirs,
        genuine[..genuine.len() - 1].to_vec(),
        [&genuine[..], b"\0"].concat(),
        vec![0; 8 << 20],
        Vec::new(),
    ];
    for value in planted {
        database.plant(&name, &value).await;
        database.forget().await;
        let node = database.node().await;
        assert_eq!(asked(&node, "evt_1").await, By::Database, "{} bytes", value.len());
        node.close().await;
    }
    database.redis.command(&[b"DEL".as_slice(), &name]).await;
    database.redis.command(&[b"RPUSH".as_slice(), &name, b"x"]).await;
    database.forget().await;
    assert_eq!(asked(&database.node().await, "evt_1").await, By::Database, "a list");
    // The genuine entry is accepted; otherwise the cases above would prove nothing.
    database.forget().await;
    database.redis.command(&[b"DEL".as_slice(), &name]).await;
    database.plant(&name, &genuine).await;
    database.believed("evt_1").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_entry_of_an_earlier_epoch_is_ignored_also_from_an_old_snapshot() {
    // A failover lost the event. Redis still has its entry, and loads it from its file after a
    // restart.
    let database = CachedDatabase::new().await;
    let name = database.only_in_redis("evt_1").await;
    let genuine = database.get(&name).await;
    let running = database.node().await;
    Postgres::execute_at(&database.url, "UPDATE hapax.epoch SET counter = counter + 1").await;
    database.redis.command(&["SAVE"]).await;
    assert_eq!(asked(&database.node().await, "evt_1").await, By::Database, "a node that starts");
    database.forget().await;
    database.redis.kill().await;
    database.redis.start_again().await;
    database.plant(&name, &genuine).await;
    // The node that kept running notices the failover within a second and drops its memory.
    until("accepted again", async || {
        let by = asked(&running, "evt_1").await;
        if by == By::Cache {
            database.forget().await;
        }
        by == By::Database
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_hangs_costs_a_bounded_moment_and_comes_back() {
    // SIGSTOP: connections stay open and nothing is answered. Every event must still be decided by
    // the database, and not every one may wait for Redis.
    let database = CachedDatabase::new().await;
    let node = database.node().await;
    database.redis.pause().await;
    let began = Instant::now();
    for n in 0..100 {
        assert_eq!(asked(&node, &format!("evt_{n}")).await, By::Database);
    }
    let took = began.elapsed();
    database.redis.resume().await;
    // Each event may wait 15 ms for Redis; a hundred events that wait for a connection would take
    // minutes.
    assert!(took < Duration::from_secs(60), "a hundred events took {took:?}");
    database.speaks(&node).await;
    database.redis.kill().await;
    assert_eq!(asked(&node, "while_dead").await, By::Database);
    assert_eq!(asked(&node, "while_dead").await, By::Cache, "of its own memory");
    database.redis.start_again().await;
    database.speaks(&node).await;
    node.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_without_memory_or_rights_changes_no_answer() {
    // Redis refuses every write, or requires a password that the node does not have.
    let url = pg_database().await;
    for settings in [[("maxmemory", "1")], [("requirepass", "secret")]] {
        let redis = Redis::with_settings(&settings).await;
        let options = PgOptions { redis_url: Some(redis.url()), ..PgOptions::new(url.as_str()) };
        let node = PgStore::open(options).await.expect("opens");
        let id = format!("evt_{}", settings[0].0);
        assert_eq!(asked(&node, &id).await, By::Database);
        for _ in 0..20 {
            assert_eq!(asked(&node, &id).await, By::Cache);
        }
        node.close().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_may_be_pruned_soon_is_not_written_to_redis() {
    // An entry stays in Redis after it is written. If the key of its event were pruned before the entry
    // expires, a new event would be answered as a duplicate.
    let database = CachedDatabase::new().await;
    let age = noon().duration_until(hapax_core::Timestamp::now()).unsigned_abs();
    let minute = Duration::from_secs(60);
    let kept_for = |more| PgOptions { keys_kept: Some(age + more), ..database.options() };
    let soon = PgStore::open(kept_for(minute)).await.expect("opens");
    let later = PgStore::open(kept_for(24 * 60 * minute)).await.expect("opens");
    until("both are connected", async || match database.redis.command(&["CLIENT", "LIST"]).await {
        // The list includes the connection that asks.
        RedisReply::Text(clients) => clients.iter().filter(|byte| **byte == b'\n').count() > 2,
        other => panic!("{other:?}"),
    })
    .await;
    for n in 0..50 {
        assert_eq!(asked(&soon, &format!("soon_{n}")).await, By::Database);
    }
    database.speaks(&later).await;
    soon.close().await;
    let (entries, warmed) =
        (database.entries().await.len(), database.warmed.load(Ordering::Relaxed));
    assert!(entries <= warmed, "{entries} entries, of which {warmed} may be");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_that_an_operator_replays_is_not_reported_as_finished() {
    // One node runs a forced replay. If the entry of that event stayed in Redis, another node would report
    // the old result for hours.
    let database = CachedDatabase::new().await;
    let node = database.node().await;
    node.announce(vec![spec("fee")]).await.expect("announces");
    let ingest = || Sender::plain().ingest_for(&body("evt_1"), noon(), noon(), &[job("fee")]);
    node.ingest(ingest()).await.expect("accepts");
    let ask = ClaimAsk { handler: handler("fee"), limit: 1, worker: "w".into() };
    let claims = node.claim(ask).await.expect("claims");
    node.settle(claims[0].job, claims[0].fence, done("first")).await.expect("settles");
    let name = name_of("evt_1");
    until("the entry is written", async || {
        // A node that has to query the database writes the entry of a copy, once.
        let other = database.node().await;
        other.ingest(ingest()).await.expect("a copy");
        database.speaks(&other).await;
        other.close().await;
        database.entries().await.contains(&name)
    })
    .await;
    // The entry is deleted once, and not at all while Redis is not used.
    database.speaks(&node).await;
    let event = claims[0].event.id;
    assert!(node.job(claims[0].job).await.expect("reads").is_some());
    let by = Action { who: "ops".into(), reason: None, at: noon() };
    let ask = ReplayAsk { event, handlers: vec![job("fee")], force: true, dry_run: false, by };
    node.replay(ask).await.expect("replays");
    until("the entry is gone", async || !database.entries().await.contains(&name)).await;
    let other = database.node().await;
    let verdicts = other.ingest(ingest()).await.expect("answers");
    let [Verdict::Duplicate(known)] = &verdicts[..] else { panic!("{verdicts:?}") };
    assert!(!known.status.is_final(), "{known:?}");
}

/// Reads of an event with jobs wait for a lock, after their snapshot was taken.
const READS_WAIT: &str = "
    DO $$ BEGIN EXECUTE replace(pg_get_functiondef('hapax.rank(smallint, integer)'::regprocedure),
                                'hapax.rank(', 'hapax.rank_before('); END $$;
    CREATE OR REPLACE FUNCTION hapax.rank(state smallint, steps integer) RETURNS integer
    LANGUAGE plpgsql AS $$ BEGIN
        IF current_setting('application_name') = 'hapax-ingest' THEN
            PERFORM pg_advisory_xact_lock_shared(77);
        END IF;
        RETURN hapax.rank_before(state, steps);
    END $$";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_was_read_before_a_replay_is_cached_neither_in_memory_nor_in_redis() {
    // The read of a copy takes long: it sees "processed", then an operator replays the event, and then the node
    // would cache what it read.
    const READING: &str = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
                           AND application_name = 'hapax-ingest' AND wait_event = 'advisory'";
    let database = CachedDatabase::new().await;
    let node = database.node().await;
    node.announce(vec![spec("fee")]).await.expect("announces");
    let copy = || Sender::plain().ingest_for(&body("evt_1"), noon(), noon(), &[job("fee")]);
    node.ingest(copy()).await.expect("accepts");
    Postgres::execute_at(&database.url, READS_WAIT).await;
    let client = session(&database.url).await;
    let execute = async |sql: &str| client.batch_execute(sql).await.expect("executes");
    // On a busy machine the read may be cancelled while it waits: then the attempt is repeated.
    for attempt in 0.. {
        assert!(attempt < 10, "the read never waited long enough");
        let ask = ClaimAsk { handler: handler("fee"), limit: 1, worker: "w".into() };
        let claims = node.claim(ask).await.expect("claims");
        // Memory has no room for a result.
        let over = Outcome::Done { result: None, publish: Vec::new(), answer: None };
        node.settle(claims[0].job, claims[0].fence, over).await.expect("settles");
        execute("SELECT pg_advisory_lock(77)").await;
        let replay = async {
            until("the copy is read", async || number(&database.url, READING).await == 1).await;
            let by = Action { who: "ops".into(), reason: None, at: noon() };
            let (event, handlers) = (claims[0].event.id, vec![job("fee")]);
            let ask = ReplayAsk { event, handlers, force: true, dry_run: false, by };
            node.replay(ask).await.expect("replays");
            execute("SELECT pg_advisory_unlock(77)").await;
        };
        let (read, ()) = tokio::join!(node.ingest(copy()), replay);
        let Ok(verdicts) = read else { continue };
        let [Verdict::Duplicate(known)] = &verdicts[..] else { panic!("{verdicts:?}") };
        assert!(known.status.is_final(), "read before the replay: {known:?}");
        break;
    }
    // An entry of the event would be written before the entry of the next event.
    database.speaks(&node).await;
    assert!(!database.entries().await.contains(&name_of("evt_1")));
    let verdicts = node.ingest(copy()).await.expect("answers");
    let [Verdict::Duplicate(known)] = &verdicts[..] else { panic!("{verdicts:?}") };
    assert!(!known.status.is_final(), "{known:?}");
    node.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_was_forgotten_is_new_again_for_memory_and_for_redis() {
    // Retention deletes the key; a cache that still has it would refuse an event that is not
    // stored.
    let database = CachedDatabase::new().await;
    let node = database.node().await;
    let before = database.entries().await.len();
    for id in ["evt_1", "evt_2"] {
        assert_eq!(asked(&node, id).await, By::Database);
        assert_eq!(asked(&node, id).await, By::Cache);
    }
    until("both are cached", async || database.entries().await.len() >= before + 2).await;
    let late = after(86_400);
    let keys_before = vec![(hapax_core::SourceName::new("shop"), late)];
    let horizon = Horizon { events_before: late, keys_before, ..Horizon::forever() };
    while node.prune(horizon.clone(), 100).await.expect("prunes") {}
    until("the entries are gone", async || database.entries().await.is_empty()).await;
    assert_eq!(asked(&node, "evt_1").await, By::Database, "its own memory");
    assert_eq!(asked(&database.node().await, "evt_2").await, By::Database, "Redis");
    // From then on the cache answers copies again.
    assert_eq!(asked(&node, "evt_1").await, By::Cache);
    assert_eq!(asked(&node, "evt_2").await, By::Cache);
    node.close().await;
}
