//! Claims of many nodes, beside users' transactions that stay open.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hapax_core::order::{Gaps, OrderPolicy, OrderRule, Position, ResourcePosition};
use hapax_core::store::{
    Action, DAMAGED_BODY, Held, NewJob, Operate, Outcome, PauseAnswer, Ran, ReplayAsk,
    ReplayEffect, Reviewed, Settlement, SqlRun, Store, Verdict, Wake, Work,
};

use crate::harness::{Sender, after, body, noon};
use crate::{Base, FOREVER, asked, claim, connect, handler, ordered, spec, until};

fn latest() -> OrderRule {
    OrderRule { policy: OrderPolicy::Latest, gaps: Gaps::default() }
}

fn done() -> Outcome {
    Outcome::Done { result: Some("ok".into()), publish: Vec::new(), answer: None }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn two_nodes_get_each_of_ten_thousand_jobs_once() {
    // Eight claimers on two nodes at once, with odd limits, and no order to keep them apart.
    let base = Base::new("two_nodes", spec(3)).await;
    base.accept_many(10_000).await;
    let other = Base::node(&base.url, spec(3)).await;
    let mut tasks = Vec::new();
    for n in 0..8 {
        let store = Arc::clone(if n % 2 == 0 { &base.store } else { &other });
        tasks.push(tokio::spawn(async move {
            let mut got = Vec::new();
            loop {
                let claims = claim(&store, 17 + n * 7).await;
                if claims.is_empty() {
                    return got;
                }
                for claim in &claims {
                    assert_eq!(claim.attempt, 1);
                    assert!((1..1 << 53).contains(&claim.fence.0), "{:?}", claim.fence);
                }
                got.extend(claims.into_iter().map(|claim| claim.job));
            }
        }));
    }
    let mut all = Vec::new();
    for task in tasks {
        all.extend(task.await.expect("no panic"));
    }
    assert_eq!(all.len(), 10_000);
    assert_eq!(all.iter().collect::<HashSet<_>>().len(), 10_000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_restore_a_node_never_runs_the_jobs_of_another_handler() {
    // The database goes back to a backup in which the number of this node's handler belongs to another handler. Its jobs
    // would run with the wrong statements, and be done.
    let base = Base::new("renumbered", spec(3)).await;
    base.accept("of_mail", None).await;
    base.sql
        .batch_execute(
            "UPDATE hapax.handler SET name = 'mail' WHERE name = 'fee';
             UPDATE hapax.epoch SET counter = counter + 1",
        )
        .await
        .expect("the backup");
    let mut claimed = Vec::new();
    let mut tries = 0;
    while claimed.is_empty() {
        assert!(tries < 1_000, "the node's own jobs are never claimed");
        tries += 1;
        base.accept(&format!("evt_{tries}"), None).await;
        claimed = base.claim(10).await;
        tokio::task::yield_now().await;
    }
    let ids: Vec<&str> = claimed.iter().map(|claim| &*claim.event.key.event_id).collect();
    assert!(!ids.contains(&"of_mail"), "{ids:?}");
    let of_mail = "SELECT j.attempt::text FROM hapax.job j JOIN hapax.event e ON e.id = j.event
                   WHERE e.event_id = 'of_mail'";
    assert_eq!(base.one(of_mail).await, "0");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn one_resource_is_worked_on_by_one_node_at_a_time() {
    // Two nodes and six claimers work on five resources. The number of running jobs of a resource must
    // never exceed one.
    let base = Base::new("one_at_a_time", ordered(latest())).await;
    let other = Base::node(&base.url, ordered(latest())).await;
    for n in 0..100 {
        let resource = format!("r{}", n % 5);
        base.accept(&format!("evt_{n}"), Some((&resource, 1))).await;
    }
    base.sql
        .batch_execute(
            "CREATE TABLE busy (resource text PRIMARY KEY, n int CHECK (n < 2));
                        INSERT INTO busy SELECT 'r' || g, 0 FROM generate_series(0, 4) g",
        )
        .await
        .expect("a table");
    let mut tasks = Vec::new();
    for n in 0..6 {
        let store = Arc::clone(if n % 2 == 0 { &base.store } else { &other });
        let sql = connect(&base.url).await;
        tasks.push(tokio::spawn(async move {
            let began = Instant::now();
            let mut ended = 0;
            while began.elapsed() < FOREVER {
                let claims = claim(&store, 8).await;
                for claim in &claims {
                    let step = |by: i32| {
                        let resource = claim.event.resource.clone();
                        let sql = &sql;
                        async move {
                            sql.execute(
                                "UPDATE busy SET n = n + $1 WHERE resource = $2",
                                &[&by, &resource],
                            )
                            .await
                            .expect("no other worker holds it");
                        }
                    };
                    step(1).await;
                    step(-1).await;
                    let held = store.settle(claim.job, claim.fence, done()).await;
                    assert_eq!(held.expect("settles"), Settlement::Recorded);
                    ended += 1;
                }
                let left = "SELECT count(*) FROM hapax.job WHERE state <> 2";
                if sql.query_one(left, &[]).await.expect("counts").get::<_, i64>(0) == 0 {
                    break;
                }
            }
            ended
        }));
    }
    let mut ended = 0;
    for task in tasks {
        ended += task.await.expect("no panic");
    }
    assert_eq!(ended, 100);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_open_transaction_delays_only_the_rows_it_holds() {
    // A user's transaction has completed one job and stays open, past its lease, on a resource that
    // others wait for. Meanwhile everything else is claimed, renewed and settled.
    let base = Base::new("open_transaction", ordered(latest())).await;
    for n in 0..40 {
        base.accept(&format!("evt_{n}"), Some((&format!("r{}", n % 4), 1))).await;
    }
    let mut first = base.claim(1).await;
    let held = first.remove(0);
    let mut user = connect(&base.url).await;
    let open = user.transaction().await.expect("begins");
    open.execute("SELECT hapax.complete($1, $2, 'mine')", &[&held.job.0, &held.fence.0])
        .await
        .expect("completes");
    // Another session looks for sessions that wait for the open transaction. That session looks without a
    // pause, so that no wait is missed.
    let pid: i32 = open.query_one("SELECT pg_backend_pid()", &[]).await.expect("asks").get(0);
    let (over, watch) = (Arc::new(AtomicBool::new(false)), connect(&base.url).await);
    let watching = tokio::spawn({
        let over = Arc::clone(&over);
        async move {
            let waits = "SELECT query FROM pg_stat_activity WHERE $1 = ANY(pg_blocking_pids(pid))";
            let mut waiting = Vec::new();
            while !over.load(Ordering::Relaxed) {
                let rows = watch.query(waits, &[&pid]).await.expect("looks");
                waiting.extend(rows.into_iter().map(|row| row.get::<_, String>(0)));
            }
            waiting
        }
    });
    let began = Instant::now();
    // All other sessions see the lease as over.
    let other = connect(&base.url).await;
    let renewed = base.store.renew(held.job, held.fence, Duration::from_secs(30)).await;
    assert_eq!(renewed.expect("renews"), Held::Kept);
    let mut settled = 0;
    while settled < 30 && began.elapsed() < FOREVER {
        for claim in base.claim(8).await {
            assert_ne!(claim.event.resource, held.event.resource, "it is busy");
            let outcome = base.store.settle(claim.job, claim.fence, done()).await;
            assert_eq!(outcome.expect("settles"), Settlement::Recorded);
            settled += 1;
        }
    }
    assert_eq!(settled, 30, "all of the other resources");
    assert!(base.claim(8).await.is_empty());
    over.store(true, Ordering::Relaxed);
    let waited = watching.await.expect("no panic");
    assert!(waited.is_empty(), "they waited for it: {waited:?}");
    let wake = base.store.wait(&handler(), Duration::ZERO..=Duration::ZERO).await;
    assert!(matches!(wake, Wake::Elapsed { due: Some(_) }), "{wake:?}");
    open.commit().await.expect("commits");
    until("the resource goes on", || async {
        for claim in claim(&base.store, 8).await {
            base.store.settle(claim.job, claim.fence, done()).await.expect("settles");
        }
        let left = other.query_one("SELECT count(*) FROM hapax.job WHERE state <> 2", &[]).await;
        left.expect("counts").get::<_, i64>(0) == 0
    })
    .await;
    assert_eq!(base.one("SELECT count(*)::text FROM hapax.job WHERE result = 'mine'").await, "1");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_finds_its_jobs_by_index_whatever_the_backlog() {
    // The plans are made while the tables are empty, and must still use the indexes later: from a
    // backlog of fifty thousand, no claim reads more rows than it takes.
    let base = Base::new("claim_cost", spec(3)).await;
    base.accept("evt_0", None).await;
    assert_eq!(base.claim(8).await.len(), 1);
    let fill = "INSERT INTO hapax.event (id, hash, tenant, source, event_id, received_at, body_hash,
                    request_id, secret)
                SELECT hapax.job_id(gen_random_uuid(), 0), gen_random_uuid(), 'default', 'shop', '', now(),
                    gen_random_uuid(), gen_random_uuid(), 0
                FROM generate_series(1, 50000) g;
                INSERT INTO hapax.job (job, event, handler, lane, state, due_at)
                SELECT hapax.job_id(e.id, l.lane), e.id, l.handler, l.lane, 0, now() - interval '1 s'
                FROM hapax.event e, hapax.lane l WHERE e.event_id = ''";
    base.sql.batch_execute(fill).await.expect("fills");
    let read = "SELECT (coalesce(sum(seq_tup_read), 0) + coalesce(sum(idx_tup_fetch), 0))::bigint
                FROM pg_stat_xact_user_tables WHERE schemaname = 'hapax'";
    let mut sql = connect(&base.url).await;
    let inside = sql.transaction().await.expect("begins");
    // The bodies are missing, so no claim is returned, but the jobs are leased.
    let of = base.one("SELECT handler::text FROM hapax.handler").await;
    let claim = format!(
        "SELECT count(*) FROM hapax.claim({of}, 64, 'test', true, NULL, NULL, NULL,
             NULL, NULL, NULL)"
    );
    let claim = claim.as_str();
    for _ in 0..8 {
        inside.query_one(claim, &[]).await.expect("claims");
    }
    let leased = inside.query_one("SELECT count(*) FROM hapax.job WHERE state = 1", &[]).await;
    assert_eq!(leased.expect("counts").get::<_, i64>(0), 1 + 8 * 64);
    drop(inside);
    let inside = sql.transaction().await.expect("begins");
    for _ in 0..8 {
        inside.query_one(claim, &[]).await.expect("claims");
    }
    let rows: i64 = inside.query_one(read, &[]).await.expect("reads").get(0);
    assert!(rows < 8 * 64 * 20, "eight claims of 64 read {rows} rows");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_pause_is_answered_after_the_claims_under_way_and_none_follows() {
    // A claim has read the handler and has not committed yet, on a node that is slow.
    let base = Base::new("pausing", spec(1)).await;
    base.accept_many(20).await;
    let of = base.one("SELECT handler::text FROM hapax.handler").await;
    let mut node = connect(&base.url).await;
    let slow = node.transaction().await.expect("begins");
    let claim = format!(
        "SELECT count(*) FROM hapax.claim({of}, 2, 'slow', true, NULL, NULL, NULL, NULL, NULL, NULL)"
    );
    slow.query_one(&claim, &[]).await.expect("claims");
    let by = Action { who: "ops".into(), reason: None, at: noon() };
    let store = std::sync::Arc::clone(&base.store);
    let pausing = tokio::spawn(async move { store.pause_handler(handler(), by).await });
    let waits =
        "SELECT (EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted))::text";
    until("the pause waits", || async { base.one(waits).await == "true" }).await;
    // A claim that begins now takes nothing and does not wait.
    assert!(base.claim(2).await.is_empty());
    assert!(!pausing.is_finished());
    slow.commit().await.expect("commits");
    let paused = pausing.await.expect("no panic").expect("pauses");
    assert_eq!(paused, PauseAnswer::Changed);
    assert_eq!(base.one("SELECT count(*)::text FROM hapax.job WHERE state = 1").await, "2");
    assert!(base.claim(2).await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_old_snapshot_does_not_make_claims_read_all_done_jobs() {
    // A report runs at the same time, so no dead row can be cleaned up: a claim that knows where
    // the last one ended must not read them all again.
    let base = Base::new("old_snapshot", spec(3)).await;
    base.accept_many(3_000).await;
    let mut report = connect(&base.url).await;
    let report = report.build_transaction();
    let report = report.isolation_level(tokio_postgres::IsolationLevel::RepeatableRead);
    let report = report.start().await.expect("begins");
    report.query("SELECT count(*) FROM hapax.job", &[]).await.expect("reports");
    for _ in 0..40 {
        assert_eq!(base.claim(64).await.len(), 64);
    }
    // Numbers may have gaps: of two sessions that request a new one at once, one drops its own.
    let of = base.one("SELECT handler::text FROM hapax.handler").await;
    let lane = base.one("SELECT lane::text FROM hapax.lane").await;
    let pages = async |known: &str| {
        let ask = format!(
            "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON)
             SELECT * FROM hapax.claim({of}, 8, 'test', true, NULL, NULL, NULL, {known})"
        );
        // The first query makes the plans.
        base.sql.query(&ask, &[]).await.expect("claims");
        let plan: serde_json::Value = base.sql.query(&ask, &[]).await.expect("claims")[0].get(0);
        plan[0]["Plan"]["Shared Hit Blocks"].as_i64().expect("a number")
    };
    let first = base.one("SELECT min(due_at)::text FROM hapax.job WHERE state = 0").await;
    let known = pages(&format!("'{{{lane}}}', '{{{first}}}', '{first}'")).await;
    let unknown = pages("NULL, NULL, NULL").await;
    assert!(known * 3 < unknown, "{known} pages, and {unknown} without knowing");
    report.commit().await.expect("commits");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_resource_with_a_nul_is_one_resource_on_every_way() {
    // A NUL arrives with the event, with an approval and with a replay; text in PostgreSQL cannot
    // contain it.
    let base = Base::new("nul", ordered(latest())).await;
    base.accept("first", Some(("a\0b", 1))).await;
    let place = ResourcePosition { resource: "a\0b".into(), position: Position(2) };
    let job = NewJob { handler: handler().handler, place: Some(place), hopeless: None };
    let jobs = std::slice::from_ref(&job);
    let late = Sender::plain().ingest_for(&body("late"), noon(), after(86_400), jobs);
    let verdicts = base.store.ingest(late).await.expect("ingests");
    let [Verdict::Review(event)] = verdicts[..] else { panic!("{verdicts:?}") };
    let by = Action { who: "ops".into(), reason: Some("late\0".into()), at: noon() };
    let approved =
        base.store.approve(event, vec![job.clone()], by.clone()).await.expect("approves");
    assert_eq!(approved, Reviewed::Decided);
    let claims = base.claim(1).await;
    assert_eq!(base.claim(1).await.len(), 0, "one at a time");
    base.store.settle(claims[0].job, claims[0].fence, done()).await.expect("settles");
    let ask = ReplayAsk {
        event: claims[0].event.id,
        handlers: vec![job],
        force: true,
        dry_run: false,
        by,
    };
    let replayed = base.store.replay(ask).await.expect("replays");
    assert_eq!(replayed[0].effect, ReplayEffect::WouldRun);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_body_that_does_not_match_its_hash_reaches_no_handler() {
    // One bit of a stored body flips: for an external worker, for SQL, and between claim and run.
    let base = Base::new("damaged", spec(3)).await;
    let sql = &base.sql;
    let damage = |id: &str| {
        let bit = format!(
            "UPDATE hapax.body b SET body = set_byte(b.body, 20, get_byte(b.body, 20) # 1)
             FROM hapax.event e WHERE e.id = b.id AND e.event_id = '{id}'::bytea"
        );
        async move { assert_eq!(sql.execute(&bit, &[]).await.expect("changes"), 1) }
    };
    for id in ["evt_1", "evt_2"] {
        base.accept(id, None).await;
    }
    damage("evt_1").await;
    let claims = base.claim(10).await;
    assert_eq!(claims.len(), 1);
    assert_eq!(&*claims[0].event.key.event_id, "evt_2");
    base.store.settle(claims[0].job, claims[0].fence, done()).await.expect("settles");
    for id in ["evt_3", "evt_4"] {
        base.accept(id, None).await;
    }
    damage("evt_3").await;
    let statement = "INSERT INTO ledger (event_id) VALUES (:event_id)";
    assert_eq!(base.drain(statement).await.0, 1);
    assert_eq!(base.one("SELECT string_agg(event_id, ',') FROM ledger").await, "evt_4");
    base.accept("evt_5", None).await;
    let claim = base.claim(1).await.remove(0);
    damage("evt_5").await;
    let program = asked(statement, FOREVER).program;
    let (job, fence) = (claim.job, claim.fence);
    let run = SqlRun { job, fence, program, timeout: FOREVER, current: None };
    let ran = base.store.run_claimed(run).await.expect("answers");
    assert!(matches!(&ran, Ran::Failed(why) if why == DAMAGED_BODY), "{ran:?}");
    let dead = "SELECT string_agg(convert_from(e.event_id, 'UTF8') || ' ' || j.error, ',' ORDER BY e.event_id)
                FROM hapax.job j JOIN hapax.event e ON e.id = j.event WHERE j.state = 4";
    let expected = ["evt_1", "evt_3", "evt_5"].map(|id| format!("{id} {DAMAGED_BODY}")).join(",");
    assert_eq!(base.one(dead).await, expected);
    assert_eq!(base.one("SELECT string_agg(event_id, ',') FROM ledger").await, "evt_4");
}
