//! Idempotency-Keys where several have a hand in them: two nodes, users' own transactions, retention.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::job::Fence;
use hapax_core::ledger::{
    Answer, Fingerprint, IdempotencyKey, Ledger, Reservation, ReserveAsk, Reserved, Scope,
};
use hapax_core::store::Held;
use hapax_store::PgStore;
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
    }
}

pub(crate) fn answer(body: &str) -> Answer {
    Answer { status: StatusCode::CREATED, headers: Vec::new(), body: body.to_owned().into() }
}

pub(crate) async fn fresh(store: &PgStore, key: &str) -> Reserved {
    match store.reserve(ask(key)).await.expect("reserves") {
        Reservation::Fresh(reserved) => reserved,
        other => panic!("{key}: {other:?}"),
    }
}

/// The lease of this key is over.
async fn let_the_lease_end(base: &Base, key: &str) {
    let past = "UPDATE hapax.reservation SET leased_until = now() - interval '1 s' WHERE key = $1";
    assert_eq!(base.sql.execute(past, &[&key]).await.expect("updates"), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn two_nodes_have_one_winner_for_a_new_key_and_for_one_whose_lease_is_over() {
    // Each node could only know of its own; all ask at the same instant.
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
async fn a_key_that_vanishes_while_it_is_asked_for_is_given_out() {
    // I-46: somebody else's row stands in the way of the insert and is gone before it can be looked
    // at. Told that it is in progress, a client would wait for nobody.
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
    // The late one finishes in a transaction of its own, which is still open when somebody finds its
    // lease over: whoever waits for it must look again, not take what is answered by then.
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
async fn nobody_waits_for_a_users_transaction_while_its_lease_runs() {
    // The app answers inside its own transaction and takes its time: retries are told so at once.
    let mut base = Base::new("ledger_open", spec(1)).await;
    let reserved = fresh(&base.store, "k").await;
    let open = base.sql.transaction().await.expect("begins");
    let finish = "SELECT hapax.finish($1, 'k', $2, 201, '{}', 'theirs')";
    open.execute(finish, &[&reserved.scope.as_str(), &reserved.fence.0]).await.expect("finishes");
    let told = base.store.reserve(ask("k")).await.expect("reserves");
    assert!(matches!(told, Reservation::InProgress { .. }), "{told:?}");
    open.commit().await.expect("commits");
    // What they stored wins over what is said after it.
    let held = base.store.finish(&reserved, &answer("ours")).await.expect("finishes");
    assert_eq!(held, Held::Lost);
    let told = base.store.reserve(ask("k")).await.expect("reserves");
    assert_eq!(told, Reservation::Replay(answer("theirs")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_a_user_stored_as_headers_is_replayed_without_an_error() {
    // The function takes any JSON there is; an error would come back for the whole ttl.
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
        let told = base.store.reserve(ask(&key)).await.expect("reserves");
        let Reservation::Replay(told) = told else { panic!("{headers}: {told:?}") };
        let found: Vec<_> =
            told.headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        assert_eq!(found, *expected, "{headers}");
        assert!(told.body.is_empty());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_act_that_lost_a_race_is_tried_again() {
    // The database may end any statement so, and the caller has nobody to ask.
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
async fn keys_that_all_wait_keep_no_worker_from_its_claims() {
    // I-49: an API under load, on a database that holds its keys up.
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
