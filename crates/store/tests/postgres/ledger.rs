//! Idempotency-Keys with several writers: two nodes, users' own transactions, retention.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::job::Fence;
use hapax_core::ledger::{
    Fingerprint, IdempotencyKey, Ledger, Quota, Reservation, ReserveAsk, Reserved, Scope,
    StoredAnswer,
};
use hapax_core::store::Held;
use hapax_sim::{Postgres, READY_FOR_QUERY, TcpProxy, Trap};
use hapax_store::{Answering, KeyRight, PgDb, PgStore, TxError};
use http::{Method, StatusCode};
use tokio::sync::Barrier;

use crate::{Base, connect, spec, until};

pub(crate) fn ask(key: &str) -> ReserveAsk {
    ReserveAsk {
        scope: Scope::new("api", "acct_1", &Method::POST, "/charges"),
        key: IdempotencyKey::parse(key.as_bytes()).expect("a key"),
        fingerprint: Fingerprint::of(None, b"request", &[]),
        lease: Duration::from_secs(60),
        ttl: Duration::from_secs(3_600),
        quota: None,
    }
}

pub(crate) fn answer(body: &str) -> StoredAnswer {
    StoredAnswer { status: StatusCode::CREATED, headers: Vec::new(), body: body.to_owned().into() }
}

pub(crate) async fn fresh(store: &PgStore, key: &str) -> Reserved {
    match store.reserve(ask(key)).await.expect("reserves") {
        Reservation::Fresh(reserved) => reserved,
        other => panic!("{key}: {other:?}"),
    }
}

/// Ends the lease of this key.
async fn let_the_lease_end(base: &Base, key: &str) {
    let past = "UPDATE hapax.reservation SET leased_until = now() - interval '1 s' WHERE key = $1";
    assert_eq!(base.sql.execute(past, &[&key]).await.expect("updates"), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn two_nodes_have_one_winner_for_a_new_key_and_for_one_whose_lease_is_over() {
    // Each node knows only its own requests; all are sent at the same instant.
    let base = Base::new("ledger_nodes", spec(1)).await;
    let other = Base::node(&base.url, spec(1)).await;
    for key in ["k1", "k2", "k3", "k4"] {
        for attempt in [1, 2, 3] {
            let together = Arc::new(Barrier::new(32));
            let tasks: Vec<_> = (0..32)
                .map(|n| {
                    let store = Arc::clone(if n % 2 == 0 { &base.store } else { &other });
                    let (together, ask) = (Arc::clone(&together), ask(key));
                    tokio::spawn(async move {
                        together.wait().await;
                        store.reserve(ask).await.expect("reserves")
                    })
                })
                .collect();
            let mut attempts = Vec::new();
            for task in tasks {
                match task.await.expect("no panic") {
                    Reservation::Fresh(reserved) => attempts.push(reserved.attempt),
                    Reservation::InProgress { remaining } => {
                        assert!(remaining <= Duration::from_secs(60), "{remaining:?}");
                    }
                    wrong => panic!("{wrong:?}"),
                }
            }
            assert_eq!(attempts, [attempt], "{key}");
            let_the_lease_end(&base, key).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_vanishes_during_a_reservation_is_reserved() {
    // Another transaction's row blocks the insert and is gone before it can be read. With the
    // answer "in progress" a client would wait for an attempt that does not exist.
    let base = Base::new("ledger_vanish", spec(1)).await;
    base.sql
        .batch_execute(
            "CREATE SEQUENCE tries;
             CREATE FUNCTION appear() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN
                 IF NEW.fence <> 0 AND nextval('public.tries') = 1 THEN
                     INSERT INTO hapax.reservation SELECT (jsonb_populate_record(NEW, '{\"fence\": 0}')).*;
                 END IF;
                 RETURN NEW;
             END $$;
             CREATE FUNCTION vanish() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN
                 IF pg_trigger_depth() = 1 THEN
                     DELETE FROM hapax.reservation WHERE fence = 0;
                 END IF;
                 RETURN NULL;
             END $$;
             CREATE TRIGGER appear BEFORE INSERT ON hapax.reservation
             FOR EACH ROW EXECUTE FUNCTION appear();
             CREATE TRIGGER vanish AFTER INSERT ON hapax.reservation
             FOR EACH STATEMENT EXECUTE FUNCTION vanish()",
        )
        .await
        .expect("triggers");
    let reserved = fresh(&base.store, "k").await;
    assert_eq!(base.one("SELECT last_value::text FROM tries").await, "2", "it was in the way");
    assert_eq!(base.store.finish(&reserved, &answer("ok")).await.expect("finishes"), Held::Kept);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_comes_while_the_key_is_taken_over_is_replayed() {
    // The late attempt finishes in its own transaction, which is still open when its lease is found
    // to be over. A request that waits for that transaction must read the row again, and must not
    // take over a key that has an answer.
    let mut base = Base::new("ledger_late", spec(1)).await;
    let late = fresh(&base.store, "k").await;
    let_the_lease_end(&base, "k").await;
    let open = base.sql.transaction().await.expect("begins");
    let finish = "SELECT hapax.finish($1, 'k', $2, 201, '{}', 'late')";
    open.execute(finish, &[&late.scope.as_str(), &late.fence.0]).await.expect("finishes");
    let store = Arc::clone(&base.store);
    let taking = tokio::spawn(async move { store.reserve(ask("k")).await.expect("reserves") });
    let other = connect(&base.url).await;
    until("it waits for the late one", async || {
        let waits = "SELECT FROM pg_stat_activity WHERE datname = current_database() \
                     AND application_name = 'hapax-ledger' AND wait_event_type = 'Lock'";
        !other.query(waits, &[]).await.expect("asks").is_empty()
    })
    .await;
    open.commit().await.expect("commits");
    assert_eq!(taking.await.expect("no panic"), Reservation::Replay(answer("late")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_request_waits_for_a_user_s_transaction_while_its_lease_runs() {
    // The app answers inside its own transaction and is slow: retries get "in progress" at once.
    let mut base = Base::new("ledger_open", spec(1)).await;
    let reserved = fresh(&base.store, "k").await;
    let open = base.sql.transaction().await.expect("begins");
    let finish = "SELECT hapax.finish($1, 'k', $2, 201, '{}', 'theirs')";
    open.execute(finish, &[&reserved.scope.as_str(), &reserved.fence.0]).await.expect("finishes");
    let reservation = base.store.reserve(ask("k")).await.expect("reserves");
    assert!(matches!(reservation, Reservation::InProgress { .. }), "{reservation:?}");
    open.commit().await.expect("commits");
    // The answer that the app stored wins over a later one.
    let held = base.store.finish(&reserved, &answer("ours")).await.expect("finishes");
    assert_eq!(held, Held::Lost);
    let reservation = base.store.reserve(ask("k")).await.expect("reserves");
    assert_eq!(reservation, Reservation::Replay(answer("theirs")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_headers_that_a_user_stored_are_replayed_without_an_error() {
    // The function accepts any JSON. If replaying some JSON failed, it would fail for the whole
    // TTL.
    let base = Base::new("ledger_headers", spec(1)).await;
    let deep = format!("'{}{}'", "[".repeat(200), "]".repeat(200));
    let checks: &[(&str, &[(&str, &str)])] = &[
        ("NULL", &[]),
        ("'null'", &[]),
        ("'7'", &[]),
        (r#"'{"age": 5, "x-gone": null, "x-b": true}'"#, &[("age", "5"), ("x-b", "true")]),
        (r#"'{"link": ["a", "b"]}'"#, &[("link", "a"), ("link", "b")]),
        (r#"'[["b", "1"], ["a", "2"], ["b", "3"]]'"#, &[("b", "1"), ("a", "2"), ("b", "3")]),
        (r#"'{"a": 1e400}'"#, &[]),
        (&deep, &[]),
    ];
    for (n, (headers, expected)) in checks.iter().enumerate() {
        let key = format!("k{n}");
        let reserved = fresh(&base.store, &key).await;
        let finish = format!("SELECT hapax.finish($1, $2, $3, 200, {headers}, NULL)");
        let (scope, fence) = (reserved.scope.as_str(), reserved.fence.0);
        base.sql.execute(&finish, &[&scope, &key, &fence]).await.expect("finishes");
        let reservation = base.store.reserve(ask(&key)).await.expect("reserves");
        let Reservation::Replay(stored) = reservation else { panic!("{headers}: {reservation:?}") };
        let found: Vec<_> =
            stored.headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        assert_eq!(found, *expected, "{headers}");
        assert!(stored.body.is_empty());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_act_that_lost_a_race_is_tried_again() {
    // The database may end any statement with such an error, and the caller learns nothing more
    // from it.
    let base = Base::new("ledger_race", spec(1)).await;
    base.sql
        .batch_execute(
            "CREATE SEQUENCE tries;
             CREATE FUNCTION race() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN
                 IF nextval('public.tries') % 3 = 1 THEN
                     RAISE EXCEPTION 'raced' USING ERRCODE = 'serialization_failure';
                 ELSIF currval('public.tries') % 3 = 2 THEN
                     RAISE EXCEPTION 'raced' USING ERRCODE = 'deadlock_detected';
                 END IF;
                 RETURN NULL;
             END $$;
             CREATE TRIGGER race AFTER INSERT OR UPDATE OR DELETE ON hapax.reservation
             FOR EACH ROW EXECUTE FUNCTION race()",
        )
        .await
        .expect("a trigger");
    let reserved = fresh(&base.store, "k").await;
    assert_eq!(base.store.finish(&reserved, &answer("ok")).await.expect("finishes"), Held::Kept);
    let given_up = fresh(&base.store, "l").await;
    base.store.abandon(&given_up).await.expect("abandons");
    assert_eq!(fresh(&base.store, "l").await.attempt, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_reservations_do_not_block_the_claims_of_workers() {
    // An API under load, on a database that blocks its keys.
    let base = Base::new("ledger_pool", spec(1)).await;
    base.accept("evt_1", None).await;
    let locker = connect(&base.url).await;
    let lock = "BEGIN; LOCK TABLE hapax.reservation IN ACCESS EXCLUSIVE MODE";
    locker.batch_execute(lock).await.expect("locks");
    let asking: Vec<_> = (0..16)
        .map(|n| {
            let (store, ask) = (Arc::clone(&base.store), ask(&format!("k{n}")));
            tokio::spawn(async move { store.reserve(ask).await })
        })
        .collect();
    until("its connections are all in use", async || {
        let waits = "SELECT count(*)::text FROM pg_stat_activity WHERE wait_event_type = 'Lock' \
                     AND datname = current_database() AND application_name = 'hapax-ledger'";
        base.one(waits).await == "4"
    })
    .await;
    assert_eq!(base.claim(1).await.len(), 1);
    locker.batch_execute("COMMIT").await.expect("lets go");
    let mut fences: Vec<Fence> = Vec::new();
    for one in asking {
        match one.await.expect("no panic").expect("reserves") {
            Reservation::Fresh(reserved) => fences.push(reserved.fence),
            other => panic!("{other:?}"),
        }
    }
    fences.sort_unstable();
    fences.dedup();
    assert_eq!(fences.len(), 16);
}

const TIME: Duration = Duration::from_secs(30);
const ROWS: &str = "SELECT count(*)::text FROM ledger";

/// An open transaction for this key, with a row in the ledger.
async fn begun(store: &Arc<PgStore>, reserved: &Reserved) -> PgDb<KeyRight> {
    let mut db = store.answering(reserved, TIME).begin().await.expect("begins");
    db.execute("INSERT INTO ledger VALUES ('k', 'rust')", &[]).await.expect("inserts");
    db
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_that_loses_its_key_commits_nothing() {
    // Each transaction has written its effects when its lease ends. One key is then taken over by
    // another attempt, one is finished by another client, one is abandoned, and two transactions
    // under one fence both try to commit.
    let base = Base::new("answer_middle", spec(1)).await;
    let lost = |ended: Result<StoredAnswer, TxError>| {
        assert!(matches!(ended, Err(TxError::FenceLost)), "{ended:?}");
    };
    let first = fresh(&base.store, "taken over").await;
    let db = begun(&base.store, &first).await;
    let_the_lease_end(&base, "taken over").await;
    let second = fresh(&base.store, "taken over").await;
    lost(db.commit(answer("first")).await);
    assert_eq!(base.store.finish(&second, &answer("second")).await.expect("ends"), Held::Kept);

    let finished = fresh(&base.store, "finished").await;
    let db = begun(&base.store, &finished).await;
    assert_eq!(base.store.finish(&finished, &answer("beside")).await.expect("ends"), Held::Kept);
    lost(db.commit(answer("late")).await);

    let abandoned = fresh(&base.store, "abandoned").await;
    let db = begun(&base.store, &abandoned).await;
    base.store.abandon(&abandoned).await.expect("abandons");
    lost(db.commit(answer("late")).await);
    assert_eq!(base.one(ROWS).await, "0");

    let twins = fresh(&base.store, "twins").await;
    let (one, other) = (begun(&base.store, &twins).await, begun(&base.store, &twins).await);
    let (one, other) = tokio::join!(one.commit(answer("one")), other.commit(answer("other")));
    assert!(one.is_ok() != other.is_ok(), "{one:?} {other:?}");
    assert_eq!(base.one(ROWS).await, "1");
    let reservation = base.store.reserve(ask("twins")).await.expect("reserves");
    assert_eq!(reservation, Reservation::Replay(one.or(other).expect("one of them")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_open_transaction_that_is_dropped_is_rolled_back_and_its_connection_serves_others() {
    // More transactions are dropped than there are connections.
    let base = Base::new("answer_dropped", spec(1)).await;
    let reserved = fresh(&base.store, "k").await;
    for _ in 0..9 {
        drop(begun(&base.store, &reserved).await);
    }
    let db = begun(&base.store, &reserved).await;
    assert_eq!(db.commit(answer("ok")).await.expect("commits"), answer("ok"));
    assert_eq!(base.one(ROWS).await, "1");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deferred_constraint_is_a_failure_and_keeps_no_answer() {
    // The error comes at the commit, when the answer would already be written.
    let base = Base::new("answer_deferred", spec(1)).await;
    base.deferred_tables().await;
    let reserved = fresh(&base.store, "k").await;
    let mut db = begun(&base.store, &reserved).await;
    db.execute("INSERT INTO child VALUES (7)", &[]).await.expect("not checked yet");
    match db.commit(answer("ok")).await {
        Err(TxError::Failed(why)) => assert!(why.error().ends_with("(23503)"), "{why}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(base.one(ROWS).await, "0");
    let reservation = base.store.reserve(ask("k")).await.expect("reserves");
    assert!(matches!(reservation, Reservation::InProgress { .. }), "{reservation:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_outcome_of_a_commit_that_was_cut_off_is_reported_correctly() {
    // The connection is cut as COMMIT is sent. In one case COMMIT arrives and only its answer is
    // lost; in the other case it does not arrive. Neither case may be reported as the other.
    let mut base = Base::new("answer_cut", spec(1)).await;
    let proxy = TcpProxy::to_port(Postgres::shared().await.port()).await;
    base.store = Base::node(&proxy.through(&base.url), spec(1)).await;
    let commit = b"COMMIT\0".to_vec();
    let reserved = fresh(&base.store, "arrives").await;
    let db = begun(&base.store, &reserved).await;
    proxy.arm(Trap::Answer { request: commit.clone(), answer: READY_FOR_QUERY.to_vec() });
    let kept = db.commit(answer("ok")).await.expect("it was committed, and the key shows it");
    assert_eq!(kept, answer("ok"));
    proxy.wait_sprung(1).await;
    assert_eq!(base.one(ROWS).await, "1");

    let reserved = fresh(&base.store, "does not").await;
    let db = begun(&base.store, &reserved).await;
    proxy.arm(Trap::Request(commit));
    let ended = db.commit(answer("ok")).await.expect_err("it never arrived");
    assert!(matches!(ended, TxError::Store(_)), "{ended:?}");
    proxy.wait_sprung(2).await;
    assert_eq!(base.one(ROWS).await, "1");
    begun(&base.store, &reserved).await.commit(answer("ok")).await.expect("commits");
    assert_eq!(base.one(ROWS).await, "2");
}

fn limited(caller: &str, key: &str, keys: u64) -> ReserveAsk {
    let scope = Scope::new("api", caller, &Method::POST, "/charges");
    ReserveAsk { scope, quota: Some(Quota { keys, bytes: 1 << 40 }), ..ask(key) }
}

/// The counts of each caller and of the API, and the true numbers, by name.
async fn counted_and_true(base: &Base) -> (String, String) {
    let counted = "SELECT coalesce(string_agg(concat_ws(' ', owner, keys, bytes, callers), ',' ORDER BY owner), '') \
                   FROM (SELECT owner, sum(keys) AS keys, sum(bytes) AS bytes, sum(callers) AS callers \
                         FROM hapax.key_usage GROUP BY owner \
                         HAVING sum(keys) <> 0 OR sum(bytes) <> 0 OR sum(callers) <> 0) u";
    let is_there = "SELECT coalesce(string_agg(concat_ws(' ', owner, keys, bytes, callers), ',' ORDER BY owner), '') \
                    FROM (SELECT owner, count(*) AS keys, sum(bytes) AS bytes, 0 AS callers \
                          FROM hapax.reservation WHERE owner IS NOT NULL GROUP BY owner \
                          UNION ALL \
                          SELECT split_part(owner, '/', 1), count(*), sum(bytes), count(DISTINCT owner) \
                          FROM hapax.reservation WHERE owner IS NOT NULL GROUP BY 1) u";
    (base.one(counted).await, base.one(is_there).await)
}

/// Serializable transactions may have to be retried; such an error counts as a rollback.
fn done_or_to_be_tried_again<T>(outcome: Result<T, tokio_postgres::Error>) {
    if let Err(error) = outcome {
        let code = error.code().map(|code| code.code().to_owned());
        assert_eq!(code.as_deref(), Some("40001"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_counts_of_a_quota_are_right_with_any_mix_of_writers() {
    // Two nodes, users' transactions of each isolation level, kept open and rolled back, retention,
    // and an operator who deletes rows, all at once. A lost or doubled count shows in the sums.
    let base = Base::new("quota_counts", spec(1)).await;
    let other = Base::node(&base.url, spec(1)).await;
    let together = Arc::new(Barrier::new(24));
    let tasks: Vec<_> = (0..24_u32)
        .map(|n| {
            let store = Arc::clone(if n % 2 == 0 { &base.store } else { &other });
            let (together, url) = (Arc::clone(&together), base.url.clone());
            tokio::spawn(async move {
                let theirs = connect(&url).await;
                let level = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"][n as usize % 3];
                let caller = format!("acct_{}", n % 4);
                together.wait().await;
                for round in 0..6 {
                    let key = format!("{n}-{round}");
                    let reservation = store.reserve(limited(&caller, &key, 1_000_000)).await;
                    let Ok(Reservation::Fresh(right)) = reservation else {
                        panic!("{reservation:?}")
                    };
                    match round {
                        0 => store.abandon(&right).await.expect("abandons"),
                        1 => {
                            let kept = store.finish(&right, &answer("ours")).await;
                            assert_eq!(kept.expect("finishes"), Held::Kept);
                        }
                        2 | 3 => {
                            let begin = format!("BEGIN ISOLATION LEVEL {level}");
                            theirs.batch_execute(&begin).await.expect("begins");
                            let finish = "SELECT hapax.finish($1, $2, $3, 201, '{}', 'theirs')";
                            let (scope, fence) = (right.scope.as_str(), right.fence.0);
                            done_or_to_be_tried_again(
                                theirs.execute(finish, &[&scope, &key, &fence]).await,
                            );
                            // Other requests continue while the transaction is open.
                            let beside = limited(&caller, &format!("{key}-beside"), 1_000_000);
                            let reservation = store.reserve(beside).await.expect("reserves");
                            assert!(
                                matches!(reservation, Reservation::Fresh(_)),
                                "{reservation:?}"
                            );
                            let end = if round == 2 { "COMMIT" } else { "ROLLBACK" };
                            done_or_to_be_tried_again(theirs.batch_execute(end).await);
                        }
                        4 => {
                            let delete = "DELETE FROM hapax.reservation WHERE key = $1";
                            assert_eq!(theirs.execute(delete, &[&key]).await.expect("deletes"), 1);
                        }
                        _left => {}
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("no panic");
    }
    base.sql.execute("SELECT hapax.merge_usage()", &[]).await.expect("tends");
    let (counted, is_there) = counted_and_true(&base).await;
    assert_eq!(counted, is_there);
    assert!(counted.starts_with("api ") && counted.contains("api/acct_3 "), "{counted}");
    // One row is left for each caller, and none after all keys are deleted.
    assert_eq!(base.one("SELECT count(*)::text FROM hapax.key_usage").await, "5");
    let past = "UPDATE hapax.reservation SET expires_at = '-infinity', leased_until = '-infinity'";
    base.sql.execute(past, &[]).await.expect("updates");
    let (counted, is_there) = counted_and_true(&base).await;
    assert_eq!(counted, is_there);
    let expire = "SELECT hapax.expire(1000)";
    base.sql.execute(expire, &[]).await.expect("expires");
    assert_eq!(base.one("SELECT count(*)::text FROM hapax.key_usage").await, "0");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn two_nodes_give_out_no_more_new_keys_than_there_is_room_for() {
    // Each node sees room; a user's open transaction blocks no request.
    let mut base = Base::new("quota_nodes", spec(1)).await;
    let other = Base::node(&base.url, spec(1)).await;
    let reservation = base.store.reserve(limited("acct_1", "theirs", 10)).await.expect("reserves");
    let Reservation::Fresh(theirs) = reservation else { panic!("{reservation:?}") };
    let open = base.sql.transaction().await.expect("begins");
    let finish = "SELECT hapax.finish($1, 'theirs', $2, 201, '{}', 'theirs')";
    open.execute(finish, &[&theirs.scope.as_str(), &theirs.fence.0]).await.expect("finishes");
    let together = Arc::new(Barrier::new(40));
    let tasks: Vec<_> = (0..40)
        .map(|n| {
            let store = Arc::clone(if n % 2 == 0 { &base.store } else { &other });
            let (together, ask) = (Arc::clone(&together), limited("acct_1", &format!("k{n}"), 10));
            tokio::spawn(async move {
                together.wait().await;
                store.reserve(ask).await.expect("reserves")
            })
        })
        .collect();
    let mut fresh = 0;
    for task in tasks {
        match task.await.expect("no panic") {
            Reservation::Fresh(_) => fresh += 1,
            Reservation::OverQuota => {}
            wrong => panic!("{wrong:?}"),
        }
    }
    assert_eq!(fresh, 9);
    open.commit().await.expect("commits");
    let (counted, is_there) = counted_and_true(&base).await;
    assert_eq!(counted, is_there);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_keys_share_a_commit_and_each_gets_its_own_answer() {
    // A commit for each key is a round trip and a sync for each. The same key comes twice, with answers
    // and reservations mixed: no caller may get the outcome of another.
    let base = Base::new("ledger_batches", spec(1)).await;
    let tasks: Vec<_> = (0..300)
        .map(|n| {
            let store = Arc::clone(&base.store);
            tokio::spawn(async move {
                let key = format!("k{}", n % 150);
                match store.reserve(ask(&key)).await.expect("reserves") {
                    Reservation::Fresh(reserved) => {
                        let held = store.finish(&reserved, &answer(&key)).await.expect("finishes");
                        assert_eq!(held, Held::Kept, "{key}");
                        // The fence was used.
                        let held = store.finish(&reserved, &answer("late")).await.expect("answers");
                        assert_eq!(held, Held::Lost, "{key}");
                        1
                    }
                    Reservation::InProgress { .. } => 0,
                    Reservation::Replay(stored) => {
                        assert_eq!(stored, answer(&key));
                        0
                    }
                    other => panic!("{key}: {other:?}"),
                }
            })
        })
        .collect();
    let mut fresh = 0;
    for task in tasks {
        fresh += task.await.expect("no panic");
    }
    assert_eq!(fresh, 150);
    for n in 0..150 {
        let key = format!("k{n}");
        let again = base.store.reserve(ask(&key)).await.expect("answers");
        assert_eq!(again, Reservation::Replay(answer(&key)));
    }
    let commits = "SELECT count(DISTINCT xmin::text) FROM hapax.reservation";
    let commits: i64 = base.sql.query_one(commits, &[]).await.expect("counts").get(0);
    assert!(commits < 150, "each of {commits} keys had its own commit");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_key_that_a_transaction_has_locked_delays_no_other_key_of_its_batch() {
    // The lease of the locked key is over, so its reservation must wait for the open transaction.
    let base = Base::new("ledger_locked", spec(1)).await;
    let reserved = fresh(&base.store, "locked").await;
    let_the_lease_end(&base, "locked").await;
    let mut user = connect(&base.url).await;
    let tx = user.transaction().await.expect("begins");
    let lock = "SELECT FROM hapax.reservation WHERE key = 'locked' FOR UPDATE";
    tx.execute(lock, &[]).await.expect("locks");
    let reserving = |key: String| {
        let store = Arc::clone(&base.store);
        tokio::spawn(async move { store.reserve(ask(&key)).await })
    };
    let waiting = reserving("locked".to_owned());
    let others: Vec<_> = (0..40).map(|n| reserving(format!("other{n}"))).collect();
    for other in others {
        let other = other.await.expect("no panic").expect("reserves");
        assert!(matches!(other, Reservation::Fresh(_)), "{other:?}");
    }
    assert!(!waiting.is_finished());
    tx.rollback().await.expect("ends");
    match waiting.await.expect("no panic").expect("reserves") {
        Reservation::Fresh(again) => assert!(again.fence > reserved.fence && again.attempt == 2),
        other => panic!("{other:?}"),
    }
}
