//! Faults of PostgreSQL: cut connections, killed servers, standbys, poolers, poisonous requests.
//! The first comment of each test says how it tries to break the store.

use std::cell::Cell;
#[allow(dead_code)]
use std::collections::HashSet;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use hapax_core::Timestamp;
use hapax_core::ledger::{
    Fingerprint, IdempotencyKey, Ledger, Reservation, ReserveAsk, Scope, StoredAnswer,
};
use hapax_core::store::{
    Action, ClaimAsk, EventFilter, EventName, Held, Horizon, Ingest, Inspect, Lookup, Operate,
    Outcome, ReplayAsk, Settlement, Store, StoreError, StoreHints, Verdict, Work,
};
use hapax_sim::{PgBouncer, Postgres, READY_FOR_QUERY, StopMode, TcpProxy, TrafficMode, Trap};
use hapax_store::{PgOpenError, PgOptions, PgStore, PoolSizes};
use http::{Method, StatusCode};

use crate::harness::{
    Sender, after, body, done, handler, job, noon, on_postgres, pg_database, placed, spec,
};
use crate::until;

async fn open(url: &str) -> PgStore {
    PgStore::open(PgOptions::new(url)).await.expect("opens")
}

/// Opens a store with one connection for each kind of work, so that a leaked connection is noticed.
async fn open_narrow(url: &str) -> PgStore {
    let pools =
        PoolSizes { ingest: 1, work: 1, handlers: 1, ledger: 1, publish: 1, send: 1, admin: 1 };
    PgStore::open(PgOptions { pools, ..PgOptions::new(url) }).await.expect("opens")
}

pub(crate) async fn number(url: &str, sql: &str) -> i64 {
    let rows = Postgres::execute_at(url, sql).await;
    rows[0].as_deref().expect("a value").parse().expect("a number")
}

fn refused(opened: Result<PgStore, PgOpenError>, word: &str) {
    match opened {
        Err(error @ (PgOpenError::Unfit(_) | PgOpenError::Connect(_))) => {
            assert!(error.to_string().contains(word), "{error}");
        }
        other => panic!("not refused: {other:?}"),
    }
}

type Asked<'a> = Pin<Box<dyn Future<Output = Result<Vec<Verdict>, StoreError>> + Send + 'a>>;

/// Queues the request, without waiting for the answer.
fn asked<'a>(store: &'a PgStore, ingest: Ingest) -> Asked<'a> {
    let mut asked: Asked<'a> = Box::pin(store.ingest(ingest));
    let polled = asked.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(polled.is_pending(), "answered without a commit: {polled:?}");
    asked
}

/// A connection of another client.
pub(crate) async fn session(url: &str) -> tokio_postgres::Client {
    let (client, connection) =
        tokio_postgres::connect(url, tokio_postgres::NoTls).await.expect("connects");
    tokio::spawn(connection);
    client
}

/// Blocks every ingest until it is dropped.
struct Blocked(tokio_postgres::Client);

impl Blocked {
    async fn on(url: &str) -> Self {
        let client = session(url).await;
        let lock = "BEGIN; LOCK TABLE hapax.event IN EXCLUSIVE MODE";
        client.batch_execute(lock).await.expect("locks");
        Self(client)
    }

    async fn lift(self) {
        self.0.batch_execute("COMMIT").await.expect("commits");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_nul_in_a_request_does_not_harm_the_others_of_its_batch() {
    // Text in PostgreSQL cannot contain a NUL. In a header or a resource a NUL could fail the whole
    // batch, and in any column it could break a view. (Ids and types with control characters are
    // refused before.)
    let url = pg_database().await;
    let store = open_narrow(&url).await;
    let blocked = Blocked::on(&url).await;
    let first = asked(&store, Sender::plain().ingest(&body("first")));
    let odd = r#"{"id":"odd","type":"payout","created":1780315200}"#;
    let resource = [placed("fee", "r\0", 1)];
    let mut odd = Sender::plain().ingest_for(odd, noon(), noon(), &resource);
    odd.via.headers = "x-odd: a\0b".into();
    let mut waiting: Vec<_> = (0..63)
        .map(|n| asked(&store, Sender::plain().ingest(&body(&format!("evt_{n}")))))
        .collect();
    waiting.insert(31, asked(&store, odd));
    blocked.lift().await;
    assert!(matches!(first.await.expect("ingests")[..], [Verdict::Accepted(_)]));
    for one in waiting {
        let verdicts = one.await.expect("ingests");
        assert!(matches!(verdicts[..], [Verdict::Accepted(_)]), "{verdicts:?}");
    }
    let found = store.event(&EventName::Theirs("odd".into())).await.expect("reads");
    let Lookup::One(found) = found else { panic!("{found:?}") };
    assert_eq!(found.headers, "x-odd: a\0b");
    assert_eq!(found.jobs[0].resource.as_deref(), Some("r\u{2400}"));
    Postgres::execute_at(&url, r"UPDATE hapax.event SET event_type = '\x6100ff'").await;
    let types = Postgres::execute_at(&url, "SELECT event_type FROM hapax.processed_events").await;
    assert_eq!(types, vec![Some(r"a\000\377".to_owned()); 65]);
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_the_database_refuses_fails_alone() {
    // In the middle of a batch, one tenant's name is not accepted by any text column.
    let url = pg_database().await;
    let store = open_narrow(&url).await;
    let blocked = Blocked::on(&url).await;
    let first = asked(&store, Sender::plain().ingest(&body("first")));
    let mut waiting: Vec<_> = (0..63)
        .map(|n| asked(&store, Sender::plain().ingest(&body(&format!("evt_{n}")))))
        .collect();
    let poison = asked(&store, Sender::of("a\0b", "shop").ingest(&body("evt_1")));
    waiting.push(asked(&store, Sender::plain().ingest(&body("last"))));
    blocked.lift().await;
    assert!(first.await.is_ok());
    for one in waiting {
        let verdicts = one.await.expect("ingests");
        assert!(matches!(verdicts[..], [Verdict::Accepted(_)]), "{verdicts:?}");
    }
    let error = poison.await.expect_err("cannot be stored");
    assert!(matches!(error, StoreError::Unavailable(_)), "{error:?}");
    assert_eq!(number(&url, "SELECT count(*) FROM hapax.event").await, 65);
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropping_a_future_at_any_poll_leaves_nothing_open() {
    // A client hangs up at every possible moment; a connection that is returned with an open
    // transaction would swallow the next event.
    let url = pg_database().await;
    let store = open_narrow(&url).await;
    for polls in 0..12 {
        let ingest = Sender::plain().ingest(&body(&format!("evt_{polls}")));
        poll_and_drop(Box::pin(store.ingest(ingest)), polls).await;
        let name = EventName::Theirs(format!("evt_{polls}").into());
        poll_and_drop(Box::pin(store.event(&name)), polls).await;
        poll_and_drop(
            Box::pin(store.events(EventFilter { limit: 9, ..Default::default() })),
            polls,
        )
        .await;
    }
    let verdicts = store.ingest(Sender::plain().ingest(&body("last"))).await.expect("ingests");
    assert!(matches!(verdicts[..], [Verdict::Accepted(_)]), "{verdicts:?}");
    // The event is committed, not inside a transaction that was left open: other sessions see it.
    let last = "SELECT count(*) FROM hapax.event WHERE event_id = 'last'";
    assert_eq!(number(&url, last).await, 1);
    let open = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
                AND state LIKE 'idle in transaction%'";
    assert_eq!(number(&url, open).await, 0);
    let whole = "SELECT count(*) FROM hapax.event e LEFT JOIN hapax.body b USING (id) \
                 WHERE b.id IS NULL";
    assert_eq!(number(&url, whole).await, 0);
    store.close().await;
}

/// Polls the future this many times, each time after a wake-up, and then drops it.
async fn poll_and_drop<T>(mut future: Pin<Box<dyn Future<Output = T> + Send + '_>>, polls: usize) {
    let mut left = polls;
    std::future::poll_fn(move |cx| {
        if left == 0 || future.as_mut().poll(cx).is_ready() {
            return Poll::Ready(());
        }
        left -= 1;
        if left == 0 { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_cut_after_the_statement_was_sent_is_an_error_and_the_retry_converges() {
    // The commit happened and its answer was lost: the result must be neither "accepted" nor a
    // second event.
    let url = pg_database().await;
    let server = Postgres::shared().await;
    let proxy = TcpProxy::to_port(server.port()).await;
    let store = open_narrow(&proxy.through(&url)).await;
    for round in 0..5 {
        let name = format!("cut_here_{round}");
        proxy.arm(Trap::Answer {
            request: name.clone().into_bytes(),
            answer: READY_FOR_QUERY.to_vec(),
        });
        let cut = store.ingest(Sender::plain().ingest(&body(&name))).await;
        assert!(matches!(cut, Err(StoreError::Unavailable(_))), "{cut:?}");
        proxy.wait_sprung(round + 1).await;
        let again = Cell::new(None);
        until("the retry is answered", async || {
            let answered = store.ingest(Sender::plain().ingest(&body(&name))).await.ok();
            let is_answered = answered.is_some();
            again.set(answered);
            is_answered
        })
        .await;
        let again = again.take().expect("was just seen");
        assert!(matches!(again[..], [Verdict::Duplicate(_)]), "{again:?}");
    }
    assert_eq!(number(&url, "SELECT count(*) FROM hapax.event").await, 5);
    assert_eq!(number(&url, "SELECT count(*) FROM hapax.body").await, 5);
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_server_blocks_neither_senders_nor_the_writer() {
    // The connections of a dead server stay open and nothing is answered. A slow claim may take
    // long. Requests that were sent, and requests that wait for the one writer, must get their
    // error sooner.
    let url = pg_database().await;
    let server = Postgres::shared().await;
    let proxy = TcpProxy::to_port(server.port()).await;
    let store = Arc::new(open_narrow(&proxy.through(&url)).await);
    store.ingest(Sender::plain().ingest(&body("before"))).await.expect("ingests");
    proxy.set(TrafficMode::Hold);
    let sending: Vec<_> = (0..8)
        .map(|n| {
            let store = Arc::clone(&store);
            tokio::spawn(async move {
                let asked = Instant::now();
                let name = format!("evt_{n}");
                let answer = store.ingest(Sender::plain().ingest(&body(&name))).await;
                (answer, asked.elapsed())
            })
        })
        .collect();
    for one in sending {
        let (answer, took) = one.await.expect("no panic");
        assert!(matches!(answer, Err(StoreError::Unavailable(_))), "{answer:?}");
        // The timeout is five seconds; the other fifteen are for a busy machine.
        assert!(took < Duration::from_secs(20), "{took:?}");
    }
    proxy.set(TrafficMode::Forward);
    until("works again", async || {
        store.ingest(Sender::plain().ingest(&body("evt_0"))).await.is_ok()
    })
    .await;
    assert_eq!(number(&url, "SELECT count(*) FROM hapax.event WHERE event_id = 'evt_0'").await, 1);
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_waits_for_a_key_delays_no_other_event() {
    // Another client's open transaction holds one key. A few requests, too few for a second commit, queue
    // behind the commit that waits for the key. These requests must not wait as long as that commit.
    const WAITING: &str = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
                           AND application_name = 'hapax-ingest' AND wait_event_type = 'Lock'";
    let url = pg_database().await;
    let store = open(&url).await;
    store.ingest(Sender::plain().ingest(&body("before"))).await.expect("ingests");
    let client = session(&url).await;
    // On a busy machine the wait for the key may end too early: then the attempt is repeated.
    for attempt in 0.. {
        assert!(attempt < 10, "held back by a commit that waits for a key");
        let held = Sender::plain().ingest(&body(&format!("held_{attempt}")));
        let hash = held.receipts[0].key_hash();
        let hold = format!(
            "BEGIN; INSERT INTO hapax.event (id, hash, tenant, source, event_id, received_at, \
             body_hash, request_id, secret) SELECT gen_random_uuid(), '{hash:?}', tenant, source, \
             event_id, received_at, body_hash, request_id, secret FROM hapax.event LIMIT 1"
        );
        client.batch_execute(&hold).await.expect("holds the key");
        let waiting = asked(&store, held);
        until("waits for the key", async || number(&url, WAITING).await == 1).await;
        for n in 0..3 {
            let other = Sender::plain().ingest(&body(&format!("other_{attempt}_{n}")));
            let verdicts = store.ingest(other).await.expect("ingests");
            assert!(matches!(verdicts[..], [Verdict::Accepted(_)]), "{verdicts:?}");
        }
        let still_waits = number(&url, WAITING).await == 1;
        client.batch_execute("ROLLBACK").await.expect("lets the key go");
        if let (true, Ok(verdicts)) = (still_waits, waiting.await) {
            assert!(matches!(verdicts[..], [Verdict::Accepted(_)]), "{verdicts:?}");
            break;
        }
    }
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_a_retry_storm_a_lookup_that_hangs_delays_no_new_event() {
    // In a retry storm each request is looked up first, and one lookup runs at a time. Here a lookup waits for a
    // table that only lookups read. New events must not wait behind it.
    const LOOKING: &str = "SELECT coalesce(max(extract(epoch FROM query_start) * 1000000), 0)::bigint \
                           FROM pg_stat_activity WHERE datname = current_database() \
                           AND application_name = 'hapax-ingest' AND wait_event_type = 'Lock'";
    let url = pg_database().await;
    let store = open(&url).await;
    // An event with an open job: memory does not answer its copies.
    let copies = |count| {
        let jobs = [job("fee")];
        let mut ingest = Sender::plain().ingest_for(&body("copied"), noon(), noon(), &jobs);
        ingest.receipts = vec![ingest.receipts.remove(0); count];
        ingest.jobs = vec![jobs.to_vec(); count];
        ingest
    };
    store.ingest(copies(1)).await.expect("ingests");
    let client = session(&url).await;
    // On a busy machine the wait for the lock may end too early: then the attempt is repeated.
    for attempt in 0.. {
        assert!(attempt < 10, "delayed by a lookup that hangs");
        store.ingest(copies(256)).await.expect("ingests");
        client
            .batch_execute("BEGIN; LOCK TABLE hapax.ended IN ACCESS EXCLUSIVE MODE")
            .await
            .expect("locks");
        let copy = asked(&store, copies(1));
        until("a lookup hangs", async || number(&url, LOOKING).await > 0).await;
        let hangs = number(&url, LOOKING).await;
        for n in 0..3 {
            let new = Sender::plain().ingest(&body(&format!("new_{attempt}_{n}")));
            let verdicts = store.ingest(new).await.expect("ingests");
            assert!(matches!(verdicts[..], [Verdict::Accepted(_)]), "{verdicts:?}");
        }
        let still_hangs = number(&url, LOOKING).await == hangs;
        client.batch_execute("ROLLBACK").await.expect("unlocks");
        let verdicts = copy.await.expect("answers");
        assert!(matches!(verdicts[..], [Verdict::Duplicate(_)]), "{verdicts:?}");
        if still_hangs {
            break;
        }
    }
    // Once the lookup has ended, copies are looked up again.
    let verdicts = store.ingest(copies(1)).await.expect("answers");
    assert!(matches!(verdicts[..], [Verdict::Duplicate(_)]), "{verdicts:?}");
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_replay_whose_answer_was_lost_no_copy_is_answered_as_before() {
    // The replay is committed, and its answer is lost. Memory must not report the old result.
    let url = pg_database().await;
    let proxy = TcpProxy::to_port(Postgres::shared().await.port()).await;
    let store = open(&proxy.through(&url)).await;
    store.announce(vec![spec("fee")]).await.expect("announces");
    let copy = || Sender::plain().ingest_for(&body("evt_1"), noon(), noon(), &[job("fee")]);
    store.ingest(copy()).await.expect("accepts");
    let ask = ClaimAsk { handler: handler("fee"), limit: 1, worker: "w".into() };
    let claims = store.claim(ask).await.expect("claims");
    // Memory has no room for a result.
    let over = Outcome::Done { result: None, publish: Vec::new(), answer: None };
    store.settle(claims[0].job, claims[0].fence, over).await.expect("settles");
    let status = async || match &store.ingest(copy()).await.expect("answers")[..] {
        [Verdict::Duplicate(known)] => known.status,
        other => panic!("{other:?}"),
    };
    assert!(status().await.is_final());
    proxy.arm(Trap::Answer { request: b"cut_here".to_vec(), answer: READY_FOR_QUERY.to_vec() });
    let by = Action { who: "cut_here".into(), reason: None, at: noon() };
    let event = claims[0].event.id;
    let ask = ReplayAsk { event, handlers: vec![job("fee")], force: true, dry_run: false, by };
    let lost = store.replay(ask).await;
    assert!(lost.is_err(), "{lost:?}");
    assert!(!status().await.is_final());
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_the_postmaster_was_killed_and_is_back_the_store_works_again() {
    // Requests in flight fail; nothing acknowledged is lost; the store is not reopened.
    let server = Postgres::start().await;
    let url = server.create_database("killed").await;
    let store = Arc::new(open(&url).await);
    let mut acknowledged = HashSet::new();
    for round in 0..2 {
        let sending: Vec<_> = (0..100)
            .map(|n| {
                let (store, name) = (Arc::clone(&store), format!("evt_{round}_{n}"));
                tokio::spawn(async move {
                    let sent = store.ingest(Sender::plain().ingest(&body(&name))).await;
                    sent.is_ok().then_some(name)
                })
            })
            .collect();
        server.kill_postmaster().await;
        for one in sending {
            acknowledged.extend(one.await.expect("no panic"));
        }
        until("the outage is reported", async || store.writable().is_err()).await;
        server.start_again().await;
        let name = format!("back_{round}");
        until("works again", async || {
            store.ingest(Sender::plain().ingest(&body(&name))).await.is_ok()
        })
        .await;
        acknowledged.insert(name);
        until("says so", async || store.writable().is_ok()).await;
    }
    for name in acknowledged {
        let key = Sender::plain().ingest(&body(&name)).receipts[0].key().clone();
        assert!(store.knows(&key).await.expect("reads"), "{name} was acknowledged");
    }
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_standby_and_a_read_only_database_are_refused() {
    // Connected to the wrong one of two servers, a node would answer 503 for ever.
    let server = Postgres::start().await;
    let url = server.create_database("primary").await;
    open(&url).await.close().await;
    server.execute("CREATE DATABASE frozen").await;
    server.execute("ALTER DATABASE frozen SET default_transaction_read_only = on").await;
    refused(PgStore::open(PgOptions::new(server.url_for("frozen"))).await, "accepts no writes");
    if !server.can_have_standby() {
        return hapax_sim::skip("a standby is refused", "this PostgreSQL cannot be followed");
    }
    let standby = server.standby().await;
    refused(PgStore::open(PgOptions::new(standby.url())).await, "standby");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_copy_is_acknowledged_only_once_the_synchronous_standby_has_its_event() {
    // The standby is down, so the commit of an event waits for it and its sender gets no answer. Then the primary
    // crashes. After its recovery the event is visible, and the sender sends a copy. If the primary is lost
    // before the standby is back, so is the event.
    let primary = Postgres::start().await;
    if !primary.can_have_standby() {
        return hapax_sim::skip("a copy and a standby", "this PostgreSQL cannot be followed");
    }
    let url = primary.create_database("unconfirmed").await;
    let standby = primary.standby().await;
    let store = open(&url).await;
    let send = |id: &str| store.ingest(Sender::plain().ingest(&body(id)));
    let accepted = send("first").await.expect("ingests");
    assert!(matches!(accepted[..], [Verdict::Accepted(_)]), "{accepted:?}");
    standby.stop(StopMode::Immediate).await;
    send("second").await.expect_err("its commit waits for the standby");
    primary.kill_postmaster().await;
    primary.start_again().await;
    let seen = "SELECT count(*) FROM hapax.event WHERE event_id = 'second'";
    until("the primary shows it", async || number(&url, seen).await == 1).await;
    until("the node is connected again", async || store.writable().is_ok()).await;
    send("second").await.expect_err("the standby does not have it");
    standby.start_again().await;
    until("the standby has it", async || send("second").await.is_ok()).await;
    let copied = send("second").await.expect("ingests");
    assert!(matches!(copied[..], [Verdict::Duplicate(_)]), "{copied:?}");
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_only_database_is_reported_and_used_again_once_it_accepts_writes() {
    // A demoted primary keeps its connections open: a pool that keeps them too would never recover.
    let server = Postgres::start().await;
    let url = server.create_database("demoted").await;
    let name = url.rsplit('/').next().expect("a name").to_owned();
    let store = open(&url).await;
    let turn = async |to: &str| {
        let sql = format!("ALTER DATABASE \"{name}\" SET default_transaction_read_only = {to}");
        server.execute(&sql).await;
    };
    turn("on").await;
    server.kill_backends(Some(&name)).await;
    until("the outage is reported", async || store.writable().is_err()).await;
    let refused = store.ingest(Sender::plain().ingest(&body("evt_1"))).await;
    assert!(matches!(refused, Err(StoreError::Unavailable(_))), "{refused:?}");
    turn("off").await;
    until("works again", async || {
        store.ingest(Sender::plain().ingest(&body("evt_1"))).await.is_ok()
    })
    .await;
    until("says so", async || store.writable().is_ok()).await;
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_does_not_sync_is_refused() {
    // Such a server would report "committed" for data that a power cut loses.
    let server = Postgres::with_settings(&[("fsync", "off")]).await;
    refused(PgStore::open(PgOptions::new(server.url())).await, "fsync");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pooler_in_transaction_mode_is_refused_whatever_its_size() {
    // The statements of one session would run in several sessions of the server: its settings, prepared
    // statements and locks would be lost.
    let server = Postgres::shared().await;
    let url = server.create_database("pooled").await;
    let name = url.rsplit('/').next().expect("a name").to_owned();
    if !PgBouncer::is_installed() {
        return hapax_sim::skip("a pooler is refused", "PgBouncer is not installed");
    }
    for sessions in [1, 4] {
        let pooler = PgBouncer::in_front_of(server, sessions).await;
        refused(PgStore::open(PgOptions::new(pooler.url_for(&name))).await, "pooler");
    }
    open(&url).await.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_is_spoken_and_the_server_is_checked_as_far_as_asked() {
    // A server with another authority's certificate must not be trusted.
    let (server, tls) = Postgres::with_tls().await;
    let (_other, foreign) = Postgres::with_tls().await;
    let name = server.create_database("over_tls").await;
    let name = name.rsplit('/').next().expect("a name");
    server.execute(&format!("GRANT ALL ON DATABASE \"{name}\" TO {}", tls.role)).await;
    let at = |host: &str, settings: &str| {
        format!("postgres://{}@{host}:{}/{name}?{settings}", tls.role, server.port())
    };
    let trusting = |mode: &str, roots: &std::path::Path| {
        format!("sslmode={mode}&sslrootcert={}", roots.display())
    };
    for settings in [
        "sslmode=require".to_owned(),
        trusting("verify-ca", &tls.authority_file),
        trusting("verify-full", &tls.authority_file),
    ] {
        open(&at("127.0.0.1", &settings)).await.close().await;
        open(&at("localhost", &settings)).await.close().await;
    }
    let foreign = trusting("verify-full", &foreign.authority_file);
    for settings in ["sslmode=disable", foreign.as_str()] {
        let opened = PgStore::open(PgOptions::new(at("127.0.0.1", settings))).await;
        assert!(matches!(opened, Err(PgOpenError::Connect(_))), "{settings}: {opened:?}");
    }
    let untrusted = PgStore::open(PgOptions::new(at("127.0.0.1", "sslmode=verify-full"))).await;
    assert!(matches!(untrusted, Err(PgOpenError::Url(_))), "{untrusted:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn two_nodes_that_get_the_same_copies_at_once_accept_each_event_once() {
    // The nodes do not know each other: only the unique key prevents two acceptances.
    let url = pg_database().await;
    let nodes = [Arc::new(open(&url).await), Arc::new(open(&url).await)];
    let sending: Vec<_> = (0..128)
        .map(|n| {
            let node = Arc::clone(&nodes[n % 2]);
            tokio::spawn(async move {
                let mut accepted = Vec::new();
                for event in 0..50 {
                    // Each task starts at another event, so that the tasks meet at every event.
                    let name = format!("evt_{}", (event + n) % 50);
                    let ingest = Sender::plain().ingest(&body(&name));
                    let verdicts = node.ingest(ingest).await.expect("ingests");
                    if let [Verdict::Accepted(id)] = verdicts[..] {
                        accepted.push((name, id));
                    }
                }
                accepted
            })
        })
        .collect();
    let mut accepted = HashSet::new();
    let mut count = 0;
    for one in sending {
        for (name, id) in one.await.expect("no panic") {
            count += 1;
            accepted.insert(name.clone());
            let found = nodes[0].event(&EventName::Theirs(name.into())).await.expect("reads");
            assert!(matches!(found, Lookup::One(found) if found.summary.id == id));
        }
    }
    assert_eq!((count, accepted.len()), (50, 50));
    assert_eq!(number(&url, "SELECT count(*) FROM hapax.event").await, 50);
    for node in &nodes {
        node.close().await;
    }
    let stored = number(&url, "SELECT count(*) FROM hapax.arrival").await;
    let others = number(&url, "SELECT sum(only_counted)::bigint FROM hapax.copy").await;
    assert_eq!(stored + others, 128 * 50 - 50);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_day_without_a_partition_gets_one_with_its_first_event() {
    // A node that was asleep for weeks, or whose clock is ahead, must not refuse every event.
    let url = pg_database().await;
    let store = open(&url).await;
    let far: Timestamp = "2031-02-03T04:05:06Z".parse().expect("a time");
    let verdicts = store.ingest(Sender::plain().ingest_at(&body("far"), far, far)).await;
    assert!(matches!(verdicts.expect("ingests")[..], [Verdict::Accepted(_)]));
    let late = store.ingest(Sender::plain().ingest_at(&body("late"), noon(), far)).await;
    assert!(matches!(late.expect("ingests")[..], [Verdict::Review(_)]));
    let there = "SELECT count(*) FROM hapax.body_20310203";
    assert_eq!(number(&url, there).await, 2);
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_is_dropped_when_the_database_is_in_another_epoch() {
    // A failover lost an event, but memory still answers its copies as duplicates: the sender's retries would
    // have no effect.
    let url = pg_database().await;
    let store = open(&url).await;
    let ingest = || Sender::plain().ingest(&body("lost"));
    assert!(matches!(store.ingest(ingest()).await.expect("ingests")[..], [Verdict::Accepted(_)]));
    // Memory is used only while the epoch is confirmed, each time for a second. On a busy machine a
    // request may come too late, and the database then accepts the event as new.
    until("memory is asked", async || {
        Postgres::execute_at(&url, "DELETE FROM hapax.event; DELETE FROM hapax.body").await;
        let remembered = store.ingest(ingest()).await.expect("answers");
        matches!(remembered[..], [Verdict::Duplicate(_)])
    })
    .await;
    Postgres::execute_at(&url, "UPDATE hapax.epoch SET counter = counter + 1").await;
    until("accepted again", async || {
        matches!(store.ingest(ingest()).await.expect("answers")[..], [Verdict::Accepted(_)])
    })
    .await;
    assert_eq!(number(&url, "SELECT count(*) FROM hapax.event").await, 1);
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_schema_recreated_under_a_node_costs_one_request_at_most() {
    // The statements of the connection were prepared with types that no longer exist: with these
    // statements it would refuse every batch.
    let url = pg_database().await;
    let store = open_narrow(&url).await;
    store.ingest(Sender::plain().ingest(&body("before"))).await.expect("ingests");
    Postgres::execute_at(&url, "DROP SCHEMA hapax CASCADE").await;
    PgStore::migrate(&url).await.expect("migrates");
    drop(store.ingest(Sender::plain().ingest(&body("first"))).await);
    for n in 0..3 {
        let event = Sender::plain().ingest(&body(&format!("evt_{n}")));
        let verdicts = store.ingest(event).await.expect("ingests");
        assert!(matches!(verdicts[..], [Verdict::Accepted(_)]), "{verdicts:?}");
    }
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_another_epoch_no_connection_of_the_one_before_is_used() {
    // After a failover there may be two servers behind one address, and the old one may still
    // accept writes: they would be lost.
    let url = pg_database().await;
    let store = open(&url).await;
    store.ingest(Sender::plain().ingest(&body("evt_1"))).await.expect("ingests");
    let pids = "SELECT coalesce(string_agg(pid::text, ',' ORDER BY pid), '0') FROM pg_stat_activity \
                WHERE datname = current_database() AND application_name = 'hapax-ingest'";
    let before = Postgres::execute_at(&url, pids).await[0].clone().expect("pids");
    Postgres::execute_at(&url, "UPDATE hapax.epoch SET counter = counter + 1").await;
    let old = format!("SELECT count(*) FROM pg_stat_activity WHERE pid IN ({before})");
    assert_ne!(before, "0");
    until("the old connections are closed", async || number(&url, &old).await == 0).await;
    store.ingest(Sender::plain().ingest(&body("evt_2"))).await.expect("ingests");
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_nodes_that_open_an_empty_database_at_once_migrate_it_once() {
    // Two nodes that apply the same step would both fail, or leave it half done.
    let url = Postgres::shared().await.create_database("empty").await;
    let opening: Vec<_> = (0..4)
        .map(|_| {
            let url = url.clone();
            tokio::spawn(async move { open_narrow(&url).await.close().await })
        })
        .collect();
    for one in opening {
        one.await.expect("opens");
    }
    let steps = PgStore::migration_status(&url).await.expect("reads");
    assert!(steps.iter().all(|step| step.applied), "{steps:?}");
    // The last entry is that of the functions.
    let taken = number(&url, "SELECT count(*) FROM hapax.migration").await;
    assert_eq!(taken as usize, steps.len() - 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_with_settings_of_its_own_is_migrated_and_used_like_any_other() {
    // A setting that an old application needs changes how the SQL of Hapax is parsed.
    let url = Postgres::shared().await.create_database("settings").await;
    let name = url.rsplit('/').next().expect("a name");
    for setting in [
        "standard_conforming_strings = off",
        "backslash_quote = off",
        "search_path = ''",
        "datestyle = 'SQL, DMY'",
        "intervalstyle = 'iso_8601'",
        "timezone = 'Asia/Kolkata'",
        "bytea_output = 'escape'",
        "default_transaction_isolation = 'serializable'",
        "default_transaction_deferrable = on",
        "synchronous_commit = off",
        "plan_cache_mode = 'force_generic_plan'",
    ] {
        Postgres::execute_at(&url, &format!("ALTER DATABASE \"{name}\" SET {setting}")).await;
    }
    let store = open_narrow(&url).await;
    store.announce(vec![spec("fee")]).await.expect("announces");
    let ingest = Sender::plain().ingest_for(&body("evt_1"), noon(), noon(), &[job("fee")]);
    store.ingest(ingest).await.expect("ingests");
    let ask = ClaimAsk { handler: handler("fee"), limit: 1, worker: "w".into() };
    let claim = store.claim(ask).await.expect("claims").remove(0);
    assert_eq!(&*claim.event.body, body("evt_1").as_bytes());
    let held = store.settle(claim.job, claim.fence, done("r")).await;
    assert_eq!(held.expect("settles"), Settlement::Recorded);
    let key = ReserveAsk {
        scope: Scope::new("api", "acct_1", &Method::POST, "/charges"),
        key: IdempotencyKey::parse(b"k").expect("a key"),
        fingerprint: Fingerprint::of(None, b"", &[]),
        lease: Duration::from_secs(60),
        ttl: Duration::from_secs(3_600),
        quota: None,
    };
    let Reservation::Fresh(right) = store.reserve(key.clone()).await.expect("reserves") else {
        panic!("a new key is fresh");
    };
    let reservation = store.reserve(key.clone()).await.expect("reserves");
    assert!(
        matches!(reservation, Reservation::InProgress { remaining } if remaining.as_secs() > 30),
        "{reservation:?}"
    );
    let headers = vec![("x-a".to_owned(), "\\'\"".to_owned())];
    let answer = StoredAnswer { status: StatusCode::OK, headers, body: vec![0, 92, 255].into() };
    assert_eq!(store.finish(&right, &answer).await.expect("finishes"), Held::Kept);
    assert_eq!(store.reserve(key).await.expect("reserves"), Reservation::Replay(answer));
    store.close().await;
    let processed = "SELECT count(*) FROM hapax.processed_events
                WHERE processed AND event_id = 'evt_1'";
    assert_eq!(number(&url, processed).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_a_newer_version_migrated_is_used_if_it_only_adds() {
    // While nodes are replaced one by one, old ones meet the new tables: they must continue, or
    // report why not.
    let url = pg_database().await;
    let newer = |survives: i32| {
        format!(
            "DELETE FROM hapax.migration WHERE number > 900; INSERT INTO hapax.migration \
             (number, name, checksum, survives) VALUES (901, 'newer', 'x', {survives})"
        )
    };
    Postgres::execute_at(&url, &newer(1)).await;
    open(&url).await.close().await;
    let refusals = async || {
        let steps = PgStore::migration_status(&url).await.expect("reads");
        steps.into_iter().filter_map(|step| step.refused).collect::<Vec<_>>()
    };
    assert_eq!(refusals().await, Vec::<String>::new());
    Postgres::execute_at(&url, &newer(901)).await;
    let opened = PgStore::open(PgOptions::new(url.as_str())).await;
    let Err(PgOpenError::Migrate(why)) = opened else { panic!("{opened:?}") };
    assert!(why.contains("newer version"), "{why}");
    assert_eq!(refusals().await, [why], "its status would say that all is well");
    Postgres::execute_at(&url, "DELETE FROM hapax.migration WHERE number > 900").await;
    Postgres::execute_at(&url, "UPDATE hapax.migration SET checksum = 'x' WHERE number = 1").await;
    let opened = PgStore::open(PgOptions::new(url.as_str())).await;
    let Err(PgOpenError::Migrate(why)) = opened else { panic!("{opened:?}") };
    assert_eq!(refusals().await, [why]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_from_before_the_first_release_is_refused_and_stays_as_it_is() {
    // The tables of such a database have the same names and other columns, and it records seven
    // steps where this version has one.
    let url = Postgres::shared().await.create_database("before_release").await;
    Postgres::execute_at(
        &url,
        "CREATE SCHEMA hapax;
         CREATE TABLE hapax.migration (number integer PRIMARY KEY, name text NOT NULL,
             checksum text NOT NULL, survives integer NOT NULL, at timestamptz DEFAULT now());
         INSERT INTO hapax.migration SELECT n, name, 'x', 1
         FROM unnest('{tables,ingest,work,functions,views,ledger,handlers}'::text[])
              WITH ORDINALITY o (name, n);
         CREATE TABLE hapax.event (id uuid)",
    )
    .await;
    let opened = PgStore::open(PgOptions::new(url.as_str())).await;
    let Err(PgOpenError::Migrate(why)) = opened else { panic!("{opened:?}") };
    assert!(why.contains("empty database") && why.contains("DROP SCHEMA hapax CASCADE"), "{why}");
    let steps = PgStore::migration_status(&url).await.expect("reads");
    assert_eq!(steps[0].refused.as_ref(), Some(&why), "its status would say that all is well");
    let tables = "SELECT count(*) FROM pg_class c WHERE c.relkind = 'r' \
                  AND c.relnamespace = 'hapax'::regnamespace";
    assert_eq!(number(&url, tables).await, 2, "it changed something");
    // This is the remedy that the error names.
    Postgres::execute_at(&url, "DROP SCHEMA hapax CASCADE").await;
    open(&url).await.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_continues_when_a_newer_version_changes_tables_and_functions() {
    // The store's connections hold statements that were prepared for the old tables.
    let url = pg_database().await;
    let store = open_narrow(&url).await;
    store.announce(vec![spec("fee")]).await.expect("announces");
    let ask = || ClaimAsk { handler: handler("fee"), limit: 1, worker: "w".into() };
    let ingest = |id: &str| Sender::plain().ingest_for(&body(id), noon(), noon(), &[job("fee")]);
    store.ingest(ingest("evt_1")).await.expect("ingests");
    assert_eq!(store.claim(ask()).await.expect("claims").len(), 1);
    let definition =
        Postgres::execute_at(&url, "SELECT pg_get_functiondef('hapax.claim'::regproc)").await;
    let wider = definition[0].as_deref().expect("a definition").replace(
        "leases_until timestamp with time zone)",
        "leases_until timestamp with time zone, more integer)",
    );
    let wider = wider.replace(
        "NULL::integer[], NULL::timestamptz[], NULL::timestamptz\n",
        "NULL::integer[], NULL::timestamptz[], NULL::timestamptz, NULL::integer\n",
    );
    Postgres::execute_at(
        &url,
        &format!(
            "BEGIN; DROP FUNCTION hapax.claim; {wider}; \
             ALTER TABLE hapax.event ADD COLUMN more text; \
             ALTER TABLE hapax.job ADD COLUMN more text; COMMIT"
        ),
    )
    .await;
    store.ingest(ingest("evt_2")).await.expect("ingests");
    let late = Sender::plain().ingest_at(&body("late"), noon(), after(86_400));
    store.ingest(late).await.expect("ingests by the function");
    let claims = store.claim(ask()).await.expect("claims");
    let held = store.settle(claims[0].job, claims[0].fence, done("ok")).await.expect("settles");
    assert_eq!(held, Settlement::Recorded);
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_closed_store_says_so() {
    // Later callers must not wait for ever.
    let store = on_postgres().await;
    store.ingest(Sender::plain().ingest(&body("evt_1"))).await.expect("ingests");
    store.close().await;
    for event in ["evt_1", "evt_2"] {
        let closed = store.ingest(Sender::plain().ingest(&body(event))).await;
        assert!(matches!(closed, Err(StoreError::Closed)), "{closed:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_day_of_bodies_is_dropped_as_a_whole_and_stays_while_an_event_of_it_is_unfinished() {
    // Dropping a day too early would delete the body of an event whose jobs still have to run.
    let url = pg_database().await;
    let store = open(&url).await;
    let days = [0, 86_400, 2 * 86_400].map(after);
    for (n, at) in days.into_iter().enumerate() {
        for event in 0..3 {
            let ingest = Sender::plain().ingest_at(&body(&format!("evt_{n}_{event}")), at, at);
            store.ingest(ingest).await.expect("ingests");
        }
    }
    // On the second day one event is in review.
    let late = Sender::plain().ingest_at(&body("late"), noon(), days[1]);
    store.ingest(late).await.expect("ingests");
    let before = "2026-06-03T00:00:00Z".parse().expect("a time");
    let horizon = Horizon { events_before: before, ..Horizon::forever() };
    while store.prune(horizon.clone(), 2).await.expect("prunes") {}
    let there = "SELECT count(*) FROM pg_class WHERE relname = ";
    assert_eq!(number(&url, &format!("{there} 'body_20260601'")).await, 0);
    assert_eq!(number(&url, "SELECT count(*) FROM hapax.body_20260602").await, 1);
    assert_eq!(number(&url, "SELECT count(*) FROM hapax.body_20260603").await, 3);
    let late = store.event(&EventName::Theirs("late".into())).await.expect("reads");
    assert!(matches!(late, Lookup::One(found) if found.body == body("late").as_bytes()));
    let copy = store.ingest(Sender::plain().ingest(&body("evt_0_0"))).await.expect("ingests");
    assert!(matches!(copy[..], [Verdict::Duplicate(_)]), "the key outlives the body: {copy:?}");
    store.close().await;
}
