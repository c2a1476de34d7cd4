//! The functions that users call inside their own transactions.

use std::sync::Arc;

use hapax_core::job::{JobId, Phase, WorkLocation};
use hapax_core::store::{
    Claim, Inspect, Outcome, Settlement, TrafficHistory, TriedJob, TriedVerdict, Work,
};
use hapax_store::PgStore;
use tokio::sync::Barrier;
use tokio_postgres::Client;

use crate::{Base, connect, spec};

/// The server's code of a failure.
fn code(error: &tokio_postgres::Error) -> String {
    error.code().map(|code| code.code().to_owned()).unwrap_or_else(|| error.to_string())
}

async fn claimed(base: &Base) -> Claim {
    base.accept("evt_1", None).await;
    base.claim(1).await.remove(0)
}

async fn is_done(store: &PgStore, job: JobId) -> bool {
    store.job(job).await.expect("reads").expect("is there").phase == Phase::Done
}

async fn complete(sql: &Client, claim: &Claim) -> Result<(), String> {
    let done =
        sql.execute("SELECT hapax.complete($1, $2, 'done')", &[&claim.job.0, &claim.fence.0]).await;
    done.map(drop).map_err(|error| code(&error))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn effects_beside_a_lost_fence_roll_back() {
    // A paused worker's job was claimed again, and the worker continues inside its transaction.
    let mut base = Base::new("zombie", spec(3)).await;
    let zombie = claimed(&base).await;
    let failed = Outcome::Failed {
        error: "slow".into(),
        retry: hapax_core::job::Retry::Schedule,
        answer: None,
    };
    base.store.settle(zombie.job, zombie.fence, failed).await.expect("settles");
    let second = base.claim(1).await.remove(0);
    assert!(second.fence > zombie.fence);
    for (claim, expected) in
        [(&zombie, Err("XH001".into())), (&second, Ok(())), (&second, Err("XH001".into()))]
    {
        let open = base.sql.transaction().await.expect("begins");
        open.execute("INSERT INTO ledger VALUES ('evt_1', 'charged')", &[]).await.expect("charges");
        let done = open
            .execute("SELECT hapax.complete($1, $2)", &[&claim.job.0, &claim.fence.0])
            .await
            .map(drop)
            .map_err(|error| code(&error));
        assert_eq!(done, expected);
        drop(open.commit().await);
    }
    assert_eq!(base.one("SELECT count(*)::text FROM ledger").await, "1");
    assert!(is_done(&base.store, second.job).await);
    let again = Outcome::Done { result: None, publish: Vec::new(), answer: None };
    let held = base.store.settle(second.job, second.fence, again).await;
    assert_eq!(
        held.expect("settles"),
        Settlement::AlreadyDone,
        "the answer to the first may have been lost"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolled_back_completion_leaves_the_claim_as_it_was() {
    // The user's own insert fails after the completion.
    let mut base = Base::new("rolled_back", spec(3)).await;
    let claim = claimed(&base).await;
    let open = base.sql.transaction().await.expect("begins");
    open.execute("SELECT hapax.complete($1, $2)", &[&claim.job.0, &claim.fence.0])
        .await
        .expect("completes");
    open.rollback().await.expect("rolls back");
    assert!(!is_done(&base.store, claim.job).await);
    assert_eq!(complete(&base.sql, &claim).await, Ok(()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failure_follows_the_schedule_or_says_when_and_knows_its_fence() {
    // Two calls under one fence must not use two steps.
    let base = Base::new("fail", spec(3)).await;
    let claim = claimed(&base).await;
    let fail = "SELECT hapax.fail($1, $2, 'no till', '1 hour')";
    base.sql.execute(fail, &[&claim.job.0, &claim.fence.0]).await.expect("fails");
    let again = base.sql.execute(fail, &[&claim.job.0, &claim.fence.0]).await;
    assert_eq!(code(&again.expect_err("a second time")), "XH001");
    let query = "SELECT steps || ' ' || error || ' ' || (due_at > now() + interval '59 min')
                FROM hapax.job";
    assert_eq!(base.one(query).await, "1 no till true");
    for wrong in
        ["NULL, 1, 'x'", "gen_random_uuid(), NULL, 'x'", "gen_random_uuid(), 1, 'x', '-1 s'"]
    {
        let asked = base.sql.execute(&format!("SELECT hapax.fail({wrong})"), &[]).await;
        assert!(["22004", "22023"].contains(&code(&asked.expect_err(wrong)).as_str()), "{wrong}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn once_has_one_winner_among_sixteen_and_a_loser_inherits_from_a_rollback() {
    // All calls are made at the same instant; then the winner rolls back while fifteen wait for it.
    let base = Base::new("once", spec(3)).await;
    let barrier = Arc::new(Barrier::new(16));
    let mut tasks = Vec::new();
    for _ in 0..16 {
        let (sql, barrier) = (connect(&base.url).await, Arc::clone(&barrier));
        tasks.push(tokio::spawn(async move {
            barrier.wait().await;
            let mut wins = Vec::new();
            for key in 0..20 {
                let ask = "SELECT hapax.once('charge', $1)";
                let won = sql.query_one(ask, &[&format!("k{key}")]).await.expect("asks");
                if won.get::<_, bool>(0) {
                    wins.push(key);
                }
            }
            wins
        }));
    }
    let mut wins = Vec::new();
    for task in tasks {
        wins.extend(task.await.expect("no panic"));
    }
    wins.sort_unstable();
    assert_eq!(wins, (0..20).collect::<Vec<_>>());

    let mut first = connect(&base.url).await;
    let open = first.transaction().await.expect("begins");
    let ask = "SELECT hapax.once('charge', 'again')";
    assert!(open.query_one(ask, &[]).await.expect("asks").get::<_, bool>(0));
    let second = connect(&base.url).await;
    let waits = tokio::spawn(async move { second.query_one(ask, &[]).await });
    crate::until("the second waits", || async {
        let waiting = "SELECT count(*)::text FROM pg_stat_activity
                       WHERE datname = current_database() AND wait_event_type = 'Lock'";
        base.one(waiting).await == "1"
    })
    .await;
    open.rollback().await.expect("rolls back");
    let won = waits.await.expect("no panic").expect("asks");
    assert!(won.get::<_, bool>(0), "what was rolled back was not done");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_are_distinguished_and_invalid_arguments_are_refused() {
    // Adjacent parts must not be confused, and a null must never count as "yours to do".
    let base = Base::new("once_keys", spec(3)).await;
    let asks = ["'a', 'bc'", "'ab', 'c'", "'a', 'bc', 't2'", "'', 'x'"];
    for ask in asks {
        assert_eq!(base.one(&format!("SELECT hapax.once({ask})::text")).await, "true", "{ask}");
        assert_eq!(base.one(&format!("SELECT hapax.once({ask})::text")).await, "false", "{ask}");
    }
    for (ask, expected) in [
        ("NULL, 'x'", "22004"),
        ("'x', NULL", "22004"),
        ("'x', 'y', NULL", "22004"),
        ("'x', ''", "22023"),
        ("'x', repeat('k', 1001)", "22001"),
    ] {
        let asked = base.sql.query(&format!("SELECT hapax.once({ask})"), &[]).await;
        assert_eq!(code(&asked.expect_err(ask)), expected, "{ask}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn once_works_alone_and_hapax_can_be_added_later() {
    // The migration runs twice in an empty database, and then a node applies its own.
    let url = hapax_sim::Postgres::shared().await.create_database("once_alone").await;
    let sql = connect(&url).await;
    for _ in 0..2 {
        sql.batch_execute(hapax_store::PgStore::once_sql()).await.expect("migrates");
    }
    let ask = "SELECT hapax.once('charge', 'k')";
    assert!(sql.query_one(ask, &[]).await.expect("asks").get::<_, bool>(0));
    Base::node(&url, spec(3)).await.close().await;
    assert!(!sql.query_one(ask, &[]).await.expect("asks").get::<_, bool>(0), "it is kept");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_is_published_with_the_commit_and_the_same_id_is_one() {
    // The user's transaction is retried, and another one rolls back.
    let mut base = Base::new("publish", spec(3)).await;
    let publish = "SELECT hapax.publish('fee.charged', '{\"amount\": 5}', 'acct_1', id => 'm1')";
    for _ in 0..3 {
        assert_eq!(base.one(publish).await, "m1");
    }
    let open = base.sql.transaction().await.expect("begins");
    open.execute("SELECT hapax.publish('x', '{}', id => 'm2')", &[]).await.expect("publishes");
    open.rollback().await.expect("rolls back");
    assert_eq!(
        base.one("SELECT string_agg(id || type || key, ',') FROM hapax.message").await,
        "m1fee.chargedacct_1"
    );
    let made = base.one("SELECT hapax.publish('x', '{}')").await;
    assert!(made.starts_with("msg_"), "{made}");
    for (wrong, expected) in [
        ("NULL, '{}'", "22004"),
        ("'x', NULL", "22004"),
        ("'', '{}'", "22023"),
        ("'x', '{}', id => ''", "22023"),
        ("'x', '{}', repeat('k', 256)", "22001"),
        ("'x', to_jsonb(repeat('k', 1100000))", "54000"),
    ] {
        let asked = base.sql.query(&format!("SELECT hapax.publish({wrong})"), &[]).await;
        assert_eq!(code(&asked.expect_err(wrong)), expected, "{wrong}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_of_an_app_belongs_to_the_event_it_completes_and_to_no_other() {
    // Messages are published before and after the completion, inside savepoints. Then the same
    // session tries to add a message to another event with the values that it has seen.
    let base = Base::new("publish_story", spec(3)).await;
    for id in ["evt_1", "evt_2", "evt_3"] {
        base.accept(id, None).await;
    }
    let claims = base.claim(3).await;
    let done = |nth: usize| {
        format!("SELECT hapax.complete('{}', {})", claims[nth].job.0, claims[nth].fence.0)
    };
    let publish = |id: &str| format!("SELECT hapax.publish('fee', '{{}}', id => '{id}')");
    let messages_of = async |nth: usize| {
        let event = claims[nth].event.id;
        let ask = "SELECT string_agg(id, ' ' ORDER BY message) FROM hapax.message";
        base.one(&format!("{ask} WHERE event = '{event}'")).await
    };
    base.sql.batch_execute(&publish("elsewhere")).await.expect("publishes");
    let steps = [
        "BEGIN".into(),
        publish("before"),
        "SAVEPOINT deep".into(),
        publish("undone"),
        "ROLLBACK TO deep".into(),
        publish("also_before"),
        done(0),
        "RELEASE deep".into(),
        publish("after"),
    ];
    base.sql.batch_execute(&steps.join(";")).await.expect("works");
    let word = base.one("SELECT current_setting('hapax.job')").await;
    base.sql.batch_execute("COMMIT").await.expect("commits");
    assert_eq!(messages_of(0).await, "before also_before after");

    base.sql.batch_execute(&publish("later")).await.expect("publishes");
    // First a value that was valid in its own transaction, then a forged value for another event.
    for (id, word) in [
        ("old_word", &word),
        ("made_up", &word.replace(&claims[0].job.0.to_string(), &claims[1].job.0.to_string())),
    ] {
        let set = format!("SET hapax.job = '{word}'; SET hapax.unlinked = '1'; {}", publish(id));
        base.sql.batch_execute(&set).await.expect("publishes");
    }
    assert_eq!(messages_of(0).await, "before also_before after");
    // A completion that was rolled back has no effect on later messages. A committed completion
    // does not take over messages of an earlier transaction.
    let steps =
        ["BEGIN".into(), "SAVEPOINT s".into(), done(1), "ROLLBACK TO s".into(), publish("orphan")];
    base.sql.batch_execute(&format!("{}; COMMIT", steps.join(";"))).await.expect("works");
    base.sql.batch_execute(&done(1)).await.expect("completes");
    assert_eq!(messages_of(1).await, "");
    base.sql
        .batch_execute(&format!(
            "SET hapax.unlinked = '999999999'; BEGIN; {}; {}; COMMIT",
            publish("own"),
            done(2)
        ))
        .await
        .expect("works");
    assert_eq!(messages_of(2).await, "own");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_is_reserved_finished_and_replayed_and_a_crash_frees_it() {
    // Another request comes under the same key. An attempt crashes, and its answer comes late.
    let base = Base::new("reserve", spec(3)).await;
    let reserve = async |key: &str, print: &str, lease: &str| {
        base.one(&format!(
            "SELECT concat_ws(' ', outcome, status, convert_from(body, 'UTF8'))
             FROM hapax.reserve('acme POST /charges', '{key}', '{print}', '{lease}')"
        ))
        .await
    };
    let fence = async |key: &str| {
        base.one(&format!("SELECT fence::text FROM hapax.reservation WHERE key = '{key}'")).await
    };
    let finish = async |key: &str, fence: &str| {
        let ask = format!(
            "SELECT hapax.finish('acme POST /charges', '{key}', {fence}, 201, '{{}}', 'ok')"
        );
        base.sql.execute(&ask, &[]).await.map(drop).map_err(|error| code(&error))
    };
    assert_eq!(reserve("k", "one", "60s").await, "fresh");
    assert_eq!(reserve("k", "one", "60s").await, "in_progress");
    assert_eq!(reserve("k", "two", "60s").await, "mismatch", "it wins over in progress");
    let first = fence("k").await;
    assert_eq!(finish("k", &first).await, Ok(()));
    assert_eq!(finish("k", &first).await, Err("XH001".into()));
    assert_eq!(reserve("k", "one", "60s").await, "replay 201 ok");
    assert_eq!(reserve("k", "two", "60s").await, "mismatch");

    assert_eq!(reserve("crashed", "one", "1 microsecond").await, "fresh");
    let old = fence("crashed").await;
    assert_eq!(reserve("crashed", "one", "60s").await, "fresh", "its lease is over");
    assert_eq!(finish("crashed", &old).await, Err("XH001".into()));
    let abandon = |key: &str, fence: &str| {
        format!("SELECT hapax.abandon('acme POST /charges', '{key}', {fence})::text")
    };
    base.one(&abandon("crashed", &old)).await;
    assert_eq!(reserve("crashed", "one", "60s").await, "in_progress", "it was not the old one's");
    let second = fence("crashed").await;
    base.one(&abandon("crashed", &second)).await;
    assert_eq!(reserve("crashed", "two", "60s").await, "mismatch", "the first may have run");
    assert_eq!(reserve("crashed", "one", "60s").await, "fresh", "the key is free");
    assert_eq!(finish("crashed", &second).await, Err("XH001".into()), "no fence comes twice");

    // An answer that is too large to store must be refused, because every replay would have to
    // return it.
    assert_eq!(reserve("large", "one", "60s").await, "fresh");
    let (large, scope) = (fence("large").await, "acme POST /charges");
    for (headers, body, expected) in [
        ("'{}'", "repeat('x', 1048577)", Some("54000")),
        ("jsonb_build_object('a', repeat('x', 70000))", "''", Some("54000")),
        ("'{}'", "repeat('x', 1048576)", None),
    ] {
        let ask = format!(
            "SELECT hapax.finish('{scope}', 'large', {large}, 200, {headers}, {body}::bytea)"
        );
        let finished = base.sql.execute(&ask, &[]).await.map_err(|error| code(&error));
        assert_eq!(finished.err().as_deref(), expected, "{body}");
    }
    // An answer that cannot be sent is refused too: a 1xx only announces an answer.
    for status in [0, 100, 101, 199, 600] {
        let ask = format!("SELECT hapax.finish('{scope}', 'large', {large}, {status}, '{{}}', '')");
        let refused = base.sql.execute(&ask, &[]).await.map_err(|error| code(&error));
        assert_eq!(refused.err().as_deref(), Some("22023"), "{status}");
    }

    let expired =
        "SELECT outcome FROM hapax.reserve('s', 'short', 'x', '1 microsecond', '1 microsecond')";
    assert_eq!(base.one(expired).await, "fresh");
    assert_eq!(base.one("SELECT outcome FROM hapax.reserve('s', 'short', 'y')").await, "fresh");
    for wrong in ["NULL, 'k', ''", "'s', NULL, ''", "'s', '', ''", "'s', 'k', '', '-1 s'"] {
        let asked = base.sql.query(&format!("SELECT * FROM hapax.reserve({wrong})"), &[]).await;
        assert!(["22004", "22023"].contains(&code(&asked.expect_err(wrong)).as_str()), "{wrong}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_that_may_only_execute_cannot_guess_the_fence_of_another() {
    // An attacker knows old fences and the ids of events, from which the ids of jobs follow.
    let base = Base::new("guess", spec(3)).await;
    base.accept_many(64).await;
    let claims = base.claim(64).await;
    assert_eq!(claims.len(), 64);
    let fences: Vec<i64> = claims.iter().map(|claim| claim.fence.0).collect();
    for (nth, claim) in claims.iter().enumerate() {
        let near = fences[..nth].iter().any(|other| (claim.fence.0 - other).abs() <= 100);
        assert!(claim.fence.0 > 100 && !near, "{fences:?}");
        for guess in [0, 1, 2, 3] {
            let guess = hapax_core::job::Fence(guess);
            assert_eq!(
                complete(&base.sql, &Claim { fence: guess, ..claim.clone() }).await,
                Err("XH001".into())
            );
        }
    }
    // The next claim of the same job has a larger fence, at no fixed distance, that JSON can
    // represent.
    let mut gaps = std::collections::BTreeSet::new();
    let mut last = claims[0].fence.0;
    for _ in 0..20 {
        let again = format!("SELECT hapax.next_fence({last})::text");
        let next: i64 = base.one(&again).await.parse().unwrap();
        assert!(next > last && next < 1 << 53, "{last} {next}");
        gaps.insert(next - last);
        last = next;
    }
    assert!(gaps.len() == 20 && gaps.iter().max() > Some(&(1 << 30)), "{gaps:?}");
    // Near the largest number the steps get smaller: ten thousand claims still stay below it.
    let many = "WITH RECURSIVE f (n, fence) AS (
            SELECT 1, hapax.next_fence(0)
            UNION ALL SELECT n + 1, hapax.next_fence(fence) FROM f WHERE n < 10000)
        SELECT concat(max(fence) < 9007199254740992, ' ', count(DISTINCT fence)) FROM f";
    assert_eq!(base.one(many).await, "t 10000");

    let reserve = async |key: &str| -> i64 {
        let ask = format!("SELECT fence::text FROM hapax.reserve('s', '{key}', 'x')");
        base.one(&ask).await.parse().unwrap()
    };
    let (one, two) = (reserve("one").await, reserve("two").await);
    assert!((one - two).abs() > 100 && one > 100 && one.max(two) < 1 << 53, "{one} {two}");
    base.one(&format!("SELECT hapax.abandon('s', 'one', {one})::text")).await;
    let again = reserve("one").await;
    assert!(again > one && again - one != 1, "{one} {again}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_that_may_only_execute_can_do_its_work_and_nothing_else() {
    // The role creates functions in schemas that the functions of Hapax might search.
    let base = Base::new("role", spec(3)).await;
    let claim = claimed(&base).await;
    let role = format!("app_{}", claim.job.0.simple());
    base.sql
        .batch_execute(&format!(
            "CREATE ROLE {role} LOGIN;
             CREATE SCHEMA {role} AUTHORIZATION {role};
             GRANT EXECUTE ON FUNCTION hapax.complete(uuid, bigint, text),
                 hapax.once(text, text, text),
                 hapax.publish(text, jsonb, text, text, text, text),
                 hapax.reserve(text, text, bytea, interval, interval) TO {role};"
        ))
        .await
        .expect("a role");
    let app = connect(&base.url).await;
    app.batch_execute(&format!(
        "SET SESSION AUTHORIZATION {role}; SET search_path = {role}, pg_catalog;
         CREATE FUNCTION {role}.statement_timestamp() RETURNS timestamptz LANGUAGE sql
         AS 'SELECT NULL::timestamptz'"
    ))
    .await
    .expect("a session");
    let direct = app.execute("UPDATE hapax.job SET state = 2", &[]).await;
    assert_eq!(code(&direct.expect_err("not its table")), "42501");
    let inner = "SELECT hapax.done($1, $2, NULL, now())";
    let inner = app.execute(inner, &[&claim.job.0, &claim.fence.0]).await;
    assert_eq!(code(&inner.expect_err("not its function")), "42501");
    for inner in [
        "SELECT * FROM hapax.reserve_key('s', 'k', 'x', '1 s', '1 s')",
        "SELECT hapax.finish_key('s', 'k', 1, 200, '{}', '')",
    ] {
        let asked = app.execute(inner, &[]).await;
        assert_eq!(code(&asked.expect_err("not its function")), "42501", "{inner}");
    }
    let fail = app.execute("SELECT hapax.fail(gen_random_uuid(), 1, '')", &[]).await;
    assert_eq!(code(&fail.expect_err("was not granted")), "42501");
    assert_eq!(complete(&app, &claim).await, Ok(()));
    for ask in [
        "SELECT hapax.once('s', 'k')",
        "SELECT hapax.publish('x', '{}')",
        "SELECT * FROM hapax.reserve('s', 'k', 'x')",
    ] {
        app.execute(ask, &[]).await.expect(ask);
    }
    assert!(is_done(&base.store, claim.job).await);
    base.sql
        .batch_execute(&format!("DROP OWNED BY {role} CASCADE; DROP ROLE {role}"))
        .await
        .expect("goes");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pulled_job_that_an_app_completes_is_taken_once_to_be_counted() {
    // A completion that is rolled back, or of a job that a node calls, must not count. Two nodes take the
    // completions at once.
    let mut pulled = spec(3);
    pulled.workplace = WorkLocation::Pulled;
    let mut base = Base::new("completions", pulled).await;
    for n in 0..3 {
        base.accept(&format!("evt_{n}"), None).await;
    }
    let claims = base.claim(3).await;
    let open = base.sql.transaction().await.expect("begins");
    complete_in(&open, &claims[0]).await;
    open.rollback().await.expect("rolls back");
    assert_eq!(base.store.take_completions(9).await.expect("takes"), []);
    for claim in &claims {
        complete(&base.sql, claim).await.expect("completes");
    }
    assert!(complete(&base.sql, &claims[0]).await.is_err(), "completed before");
    let (one, other) = tokio::join!(base.store.take_completions(2), base.store.take_completions(2));
    let mut taken = [one.expect("takes"), other.expect("takes")].concat();
    taken.extend(base.store.take_completions(9).await.expect("takes"));
    assert_eq!(taken.len(), 3, "{taken:?}");
    let event = base.store.job(claims[0].job).await.expect("reads").expect("is there");
    for completion in &taken {
        assert_eq!(completion.source.as_str(), event.source);
        let TriedJob { attempt, steps, verdict, .. } = completion.job;
        assert_eq!((attempt, steps, verdict), (1, 0, TriedVerdict::Succeeded));
        assert!(completion.began <= completion.ended);
    }
    assert_eq!(base.store.take_completions(9).await.expect("takes"), []);

    let base = Base::new("completions_of_calls", spec(3)).await;
    let claim = claimed(&base).await;
    complete(&base.sql, &claim).await.expect("completes");
    assert_eq!(base.store.take_completions(9).await.expect("takes"), []);
}

async fn complete_in(open: &tokio_postgres::Transaction<'_>, claim: &Claim) {
    open.execute("SELECT hapax.complete($1, $2)", &[&claim.job.0, &claim.fence.0])
        .await
        .expect("completes");
}
