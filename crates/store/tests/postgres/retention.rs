//! Retention besides events: keys of the SQL functions, messages, and days of bodies whose removal
//! was interrupted.

use std::sync::atomic::{AtomicBool, Ordering};

use hapax_core::order::{Gaps, OrderPolicy, OrderRule};
use hapax_core::store::{
    Action, Horizon, Inspect as _, Operate, Reviewed, Settlement, Store, StoreHints,
    TenantDeletions, Verdict, Work,
};
use hapax_core::{SourceName, Timestamp};

use crate::harness::{Sender, after, body, done, noon};
use crate::{Base, connect, ordered, spec, until};

/// The removal of a day that waits for a lock.
const REMOVAL_WAITS: &str = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() \
                             AND query LIKE 'ALTER TABLE hapax.body DETACH%' \
                             AND wait_event_type = 'Lock'";

async fn prune(base: &Base, events_before: Timestamp, limit: usize) {
    let message_ids_before = events_before;
    let horizon = Horizon { events_before, message_ids_before, ..Horizon::forever() };
    for _ in 0..100 {
        if !base.store.prune(horizon.clone(), limit).await.expect("prunes") {
            return;
        }
    }
    panic!("pruning never ends");
}

/// Waits until the days ahead, and those of the test, are created: their creation takes the lock
/// that a removal needs first.
async fn days_are_made(base: &Base, least: usize) {
    until("the days are made", async || {
        let days = "SELECT count(*)::text FROM pg_class WHERE relname ~ '^body_[0-9]{8}$'";
        base.one(days).await.parse::<usize>().expect("a number") >= least
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expired_keys_are_deleted_and_valid_ones_stay() {
    // There are more keys than one slice takes, a reservation whose lease outlives its TTL, and
    // keys of `once` without an end.
    let base = Base::new("keys_gone", spec(1)).await;
    base.sql
        .batch_execute(
            "SELECT hapax.reserve('s', 'old' || n, 'x', '1s', '1s') FROM generate_series(1, 7) n;
             SELECT hapax.reserve('s', 'kept', 'x'), hapax.reserve('s', 'leased', 'x');
             UPDATE hapax.reservation SET leased_until = now() - interval '1 minute',
                 expires_at = now() - interval '1 minute' WHERE key LIKE 'old%';
             UPDATE hapax.reservation SET expires_at = now() - interval '1 minute'
             WHERE key = 'leased';
             SELECT hapax.once('s', 'k' || n) FROM generate_series(1, 9) n;
             UPDATE hapax.once_key SET expires_at = now() - interval '1 minute'
             WHERE key IN ('k1', 'k2', 'k3', 'k4', 'k5');
             UPDATE hapax.once_key SET expires_at = now() + interval '1 hour' WHERE key = 'k6'",
        )
        .await
        .expect("keys");
    prune(&base, Timestamp::MIN, 2).await;
    let keys = "SELECT coalesce(string_agg(key, ' ' ORDER BY key), '') FROM";
    assert_eq!(base.one(&format!("{keys} hapax.reservation")).await, "kept leased");
    assert_eq!(base.one(&format!("{keys} hapax.once_key")).await, "k6 k7 k8 k9");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_whose_clock_is_ahead_deletes_by_the_clock_of_the_database() {
    // The clock of one node is a year ahead. By that clock an event and a message of today are past every
    // horizon, and a retry of the event would run a second time.
    let base = Base::new("clock_ahead", spec(1)).await;
    let now = Timestamp::now();
    let days = |n: u64| std::time::Duration::from_secs(n * 86_400);
    let ingest = Sender::plain().ingest_at(&body("evt_1"), now, now);
    base.store.ingest(ingest).await.expect("ingests");
    base.sql
        .execute("SELECT hapax.publish('t', '{}', NULL, 'default', 'm')", &[])
        .await
        .expect("a message");
    let horizon = |at: Timestamp, now: Timestamp| Horizon {
        at,
        events_before: now - days(30),
        keys_before: vec![(SourceName::new("shop"), now - days(90))],
        message_ids_before: now - days(90),
    };
    let prune = async |horizon: Horizon| {
        while base.store.prune(horizon.clone(), 1).await.expect("prunes") {}
        let count = "SELECT concat_ws(' ', (SELECT count(*) FROM hapax.event), (SELECT count(*) FROM hapax.body),
                                      (SELECT count(*) FROM hapax.message))";
        base.one(count).await
    };
    let ahead = now + days(365);
    assert_eq!(prune(horizon(ahead, ahead)).await, "1 1 1");
    // A clock that is behind keeps data for longer.
    assert_eq!(prune(horizon(now - days(365), now - days(365))).await, "1 1 1");
    // The same bounds delete everything if they come from no clock.
    assert_eq!(prune(horizon(Timestamp::MIN, ahead)).await, "0 0 0");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slice_over_messages_reads_only_its_own_part_of_them() {
    // Many old messages wait for an operator, and messages that may be deleted come after them. A
    // slice that began at the oldest message again would read all of the dead ones each time.
    const MOST: i64 = 10;
    let base = Base::new("message_slices", spec(1)).await;
    base.sql
        .batch_execute(
            "INSERT INTO hapax.message (message, tenant, id, type, fingerprint, deliveries, created_at, body)
             SELECT n, 'default', 'm' || n, 't', gen_random_uuid(), 1, '2026-01-01', '{}'
             FROM generate_series(1, 330) n;
             INSERT INTO hapax.delivery (message, endpoint, state, due_at)
             SELECT n, 1, CASE WHEN n <= 300 THEN hapax.delivery_state('dead')
                               ELSE hapax.delivery_state('delivered') END, '2026-01-01'
             FROM generate_series(1, 330) n",
        )
        .await
        .expect("messages");
    let rows_read = async || -> i64 {
        let read = "SELECT sum(coalesce(idx_tup_fetch, 0) + seq_tup_read)::bigint
                    FROM pg_stat_xact_user_tables WHERE relname IN ('message', 'delivery')";
        base.sql.query_one(read, &[]).await.expect("counts").get(0)
    };
    let (mut passed, mut slices) = (0, 0);
    loop {
        // The counters are only reset between transactions.
        base.sql.batch_execute("BEGIN").await.expect("begins");
        let before = rows_read().await;
        let slice = "SELECT hapax.strip_messages($1, '2026-02-01', $2)";
        let row = base.sql.query_one(slice, &[&passed, &(MOST as i32)]).await.expect("prunes");
        let read = rows_read().await - before;
        base.sql.batch_execute("COMMIT").await.expect("commits");
        // Each row is found, locked and changed.
        assert!(read <= 8 * MOST, "{read} rows after {passed}");
        slices += 1;
        let Some(reached) = row.get::<_, Option<i64>>(0) else { break };
        assert!(reached > passed, "{reached} after {passed}");
        passed = reached;
    }
    assert_eq!(slices, 34);
    let whole = "SELECT count(*)::text FROM hapax.message WHERE body IS NOT NULL";
    assert_eq!(base.one(whole).await, "300");
    assert_eq!(base.one("SELECT count(*)::text FROM hapax.delivery").await, "300");
    assert_eq!(base.one("SELECT count(*)::text FROM hapax.message").await, "330");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn old_messages_are_deleted_with_the_history_and_new_ones_stay() {
    // The stored id of a message makes a second publish a duplicate, so it must not be deleted
    // before its time.
    let base = Base::new("messages_gone", spec(1)).await;
    base.sql
        .batch_execute(
            "SELECT hapax.publish('t', '{}', NULL, 'default', 'old' || n)
             FROM generate_series(1, 5) n;
             UPDATE hapax.message SET created_at = '2026-01-01';
             SELECT hapax.publish('t', '{}', NULL, 'default', 'new')",
        )
        .await
        .expect("messages");
    prune(&base, "2025-12-31T00:00:00Z".parse().expect("a time"), 2).await;
    assert_eq!(base.one("SELECT count(*)::text FROM hapax.message").await, "6");
    prune(&base, "2026-01-02T00:00:00Z".parse().expect("a time"), 2).await;
    assert_eq!(base.one("SELECT string_agg(id, ' ') FROM hapax.message").await, "new");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_interrupted_removal_does_not_block_that_of_an_older_day() {
    // A server detaches one partition at a time. The removal of the newer of two days was
    // interrupted while the older one was still needed; without a check, retention would begin with
    // the older one, which the server refuses.
    let base = Base::new("cut_off", spec(1)).await;
    for (n, at) in [0, 86_400].map(after).into_iter().enumerate() {
        let ingest = Sender::plain().ingest_at(&body(&format!("evt_{n}")), at, at);
        base.store.ingest(ingest).await.expect("ingests");
    }
    days_are_made(&base, 10).await;
    let (reader, other) = (connect(&base.url).await, connect(&base.url).await);
    // Another session reads the day: the removal waits for it in its second half, and is
    // interrupted there.
    reader.batch_execute("BEGIN; SELECT FROM hapax.body").await.expect("reads");
    let cut = base
        .sql
        .batch_execute("ALTER TABLE hapax.body DETACH PARTITION hapax.body_20260602 CONCURRENTLY");
    let cut_off = async {
        // The removal must be in its second half, which waits for readers. In its first half it may
        // wait for the node that creates the days ahead.
        let second_half = "SELECT FROM pg_inherits WHERE inhdetachpending";
        until("it waits for the reader", async || {
            !other.query(second_half, &[]).await.expect("asks").is_empty()
                && !other.query(REMOVAL_WAITS, &[]).await.expect("asks").is_empty()
        })
        .await;
        other
            .query(&format!("SELECT pg_cancel_backend(pid) FROM ({REMOVAL_WAITS}) w"), &[])
            .await
            .expect("cuts");
    };
    let (cut, ()) = tokio::join!(cut, cut_off);
    cut.expect_err("was cut off");
    reader.batch_execute("COMMIT").await.expect("reads no more");
    let pending = "SELECT count(*)::text FROM pg_inherits WHERE inhdetachpending";
    assert_eq!(base.one(pending).await, "1");
    prune(&base, "2026-06-03T00:00:00Z".parse().expect("a time"), 10).await;
    let days = "SELECT count(*)::text FROM pg_class WHERE relname IN \
                ('body_20260601', 'body_20260602')";
    assert_eq!(base.one(days).await, "0");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_that_arrives_while_its_day_is_removed_keeps_its_body() {
    // A node that was paused since that day inserts an event there, after retention has found the
    // day unneeded and before it is detached. The event is acknowledged, and would have no body.
    let base = Base::new("meanwhile", spec(1)).await;
    let arrive = |id: &str| {
        let ingest = Sender::plain().ingest_at(&body(id), noon(), noon());
        base.store.ingest(ingest)
    };
    arrive("evt_1").await.expect("ingests");
    let other = connect(&base.url).await;
    let lock = "BEGIN; LOCK TABLE hapax.body IN SHARE UPDATE EXCLUSIVE MODE";
    days_are_made(&base, 9).await;
    base.sql.batch_execute(lock).await.expect("locks");
    let meanwhile = async {
        until("the removal waits", async || {
            !other.query(REMOVAL_WAITS, &[]).await.expect("asks").is_empty()
        })
        .await;
        arrive("evt_2").await.expect("ingests");
        base.sql.batch_execute("COMMIT").await.expect("lets go");
    };
    let before = "2026-06-02T00:00:00Z".parse().expect("a time");
    let ((), ()) = tokio::join!(prune(&base, before, 10), meanwhile);
    let bodies = "SELECT string_agg(convert_from(e.event_id, 'UTF8'), ' ') \
                  FROM hapax.event e JOIN hapax.body b ON b.id = e.id";
    assert_eq!(base.one(bodies).await, "evt_2");
    prune(&base, before, 10).await;
    let day = "SELECT count(*)::text FROM pg_class WHERE relname = 'body_20260601'";
    assert_eq!(base.one(day).await, "0", "and the day goes once it is finished");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mark_that_is_deleted_while_its_resource_moves_is_written_again() {
    // A new version of a resource that was quiet for months is settled while retention deletes its old mark.
    // The settling transaction has read the mark, waits for it, and finds it deleted.
    let order = OrderRule { policy: OrderPolicy::Latest, gaps: Gaps::default() };
    let base = Base::new("mark_gone", ordered(order)).await;
    let (janitor, other) = (connect(&base.url).await, connect(&base.url).await);
    let position = "SELECT position::text FROM hapax.mark";
    base.accept("v5", Some(("r", 5))).await;
    let claim = base.claim(1).await.remove(0);
    let settled = base.store.settle(claim.job, claim.fence, done("5")).await;
    assert_eq!(settled.expect("settles"), Settlement::Recorded);
    assert_eq!(base.one(position).await, "5");
    let delete = "BEGIN; UPDATE hapax.mark SET moved_at = '-infinity'; \
                  SELECT hapax.forget_marks(ARRAY['shop'], ARRAY[now()], 0, '', 10)";
    let let_go = async || {
        let waits = "SELECT FROM pg_stat_activity WHERE datname = current_database() \
                     AND wait_event_type = 'Lock'";
        until("a session waits for the mark", async || {
            !other.query(waits, &[]).await.expect("asks").is_empty()
        })
        .await;
        janitor.batch_execute("COMMIT").await.expect("commits");
    };

    // An app's answer is settled.
    base.accept("v7", Some(("r", 7))).await;
    let claim = base.claim(1).await.remove(0);
    janitor.batch_execute(delete).await.expect("deletes");
    let (settled, ()) =
        tokio::join!(base.store.settle(claim.job, claim.fence, done("7")), let_go());
    assert_eq!(settled.expect("settles"), Settlement::Recorded);
    assert_eq!(base.one(position).await, "7");

    // Statements lock the mark in their own transaction, before they run.
    base.accept("v9", Some(("r", 9))).await;
    janitor.batch_execute(delete).await.expect("deletes");
    let sql = "INSERT INTO ledger VALUES (:event_id, 'sql')";
    let (ran, ()) = tokio::join!(base.run(sql), let_go());
    assert_eq!(ran.done, 1);
    assert_eq!(base.one(position).await, "9");
    base.accept("v8", Some(("r", 8))).await;
    assert!(base.claim(1).await.is_empty(), "an older version");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_retention_commits_without_waiting_for_the_disk() {
    // Operators use the same sessions: the setting must end with the transaction.
    let base = Base::new("behind", spec(1)).await;
    let setting = "SELECT current_setting('synchronous_commit')";
    assert_eq!(base.one(setting).await, "on");
    for act in [
        "hapax.strip('00000000-0000-0000-0000-000000000000', \
             'ffffffff-ffff-ffff-ffff-ffffffffffff', now(), 10)",
        "hapax.forget('{shop}', ARRAY['ffffffff-ffff-ffff-ffff-ffffffffffff'::uuid], \
             ARRAY[now()], 10, NULL)",
        "hapax.forget_marks('{shop}', ARRAY[now()], 0, '', 10)",
        "hapax.strip_messages(0, now(), 10)",
        "hapax.forget_messages(now(), 10)",
        "hapax.expire(10)",
    ] {
        base.sql.batch_execute(&format!("BEGIN; SELECT {act}")).await.expect(act);
        assert_eq!(base.one(setting).await, "off", "{act}");
        base.sql.batch_execute("COMMIT").await.expect("commits");
        assert_eq!(base.one(setting).await, "on", "{act}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pruning_does_not_count_as_demand_and_an_event_does() {
    // A janitor that counts its own work as demand would pause for ever; one that ignores all
    // demand would delay acks.
    let base = Base::new("demand", spec(1)).await;
    base.accept("evt_1", None).await;
    let before = base.store.foreground_requests().expect("it counts");
    prune(&base, after(86_400), 2).await;
    assert_eq!(base.store.foreground_requests(), Some(before));
    base.accept("evt_2", None).await;
    assert!(base.store.foreground_requests() > Some(before));
}

/// Every body that is there, by the sender's ids.
const WHOLE: &str = "SELECT coalesce(string_agg(convert_from(e.event_id, 'UTF8'), ' ' ORDER BY e.id), '') \
                     FROM hapax.event e JOIN hapax.body b ON b.id = e.id";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unfinished_events_among_finished_ones_keep_everything() {
    // Finished events are deleted as ranges. A range that is one event too long would take the body and the
    // jobs of an event that was never processed.
    let base = Base::new("runs", spec(1)).await;
    base.accept_many(100).await;
    assert_eq!(base.drain("INSERT INTO ledger VALUES (:event_id, 'once')").await.0, 100);
    let left = "UPDATE hapax.job SET state = 4 /* dead */ WHERE event IN (
                    SELECT e.id FROM hapax.event e WHERE convert_from(e.event_id, 'UTF8')
                    IN ('evt_0', 'evt_40', 'evt_41', 'evt_60', 'evt_77', 'evt_99'))";
    base.sql.batch_execute(left).await.expect("buries");
    let dead = "SELECT string_agg(convert_from(e.event_id, 'UTF8'), ' ' ORDER BY e.id) \
                FROM hapax.event e JOIN hapax.job j ON j.event = e.id";
    for limit in [7, 1_000] {
        prune(&base, after(86_400), limit).await;
        let whole = base.one(WHOLE).await;
        assert_eq!(whole.split(' ').count(), 6, "{whole}");
        assert_eq!(base.one(dead).await, whole);
    }
    // Each of them still runs, once.
    base.sql
        .batch_execute("UPDATE hapax.job SET state = 0 /* ready */, lost = 0")
        .await
        .expect("readies");
    assert_eq!(base.drain("INSERT INTO ledger VALUES (:event_id, 'again')").await.0, 6);
    prune(&base, after(86_400), 1_000).await;
    let rest = "SELECT (SELECT count(*) FROM hapax.body) || ' ' || (SELECT count(*) FROM hapax.job) \
                || ' ' || (SELECT count(*) FROM hapax.event)";
    assert_eq!(base.one(rest).await, "0 0 100");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_that_comes_late_into_a_range_is_not_taken_with_it() {
    // A node that was paused commits an event whose id lies between two that retention has judged.
    let base = Base::new("late_in_range", spec(1)).await;
    for id in ["evt_1", "evt_2", "evt_3"] {
        base.accept(id, None).await;
    }
    base.sql.batch_execute("UPDATE hapax.job SET state = 2 /* done */").await.expect("finishes");
    let run = |but: &str| {
        format!(
            "SELECT hapax.strip_run(ARRAY(SELECT e.id FROM hapax.event e
             WHERE convert_from(e.event_id, 'UTF8') <> '{but}' ORDER BY e.id))::text"
        )
    };
    let second =
        "SELECT convert_from(event_id, 'UTF8') FROM hapax.event ORDER BY id OFFSET 1 LIMIT 1";
    let second = base.one(second).await;
    assert_eq!(base.one(&run(&second)).await, "false");
    let rest =
        "SELECT (SELECT count(*) FROM hapax.body) || ' ' || (SELECT count(*) FROM hapax.job)";
    assert_eq!(base.one(rest).await, "3 3", "nothing is taken");
    assert_eq!(base.one(&run("none")).await, "true");
    assert_eq!(base.one(rest).await, "0 0");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retention_and_a_replay_of_the_same_event_exclude_each_other() {
    // Retention has seen that all jobs of an event are over; a replay that readies one before
    // retention deletes it would lose its work, or keep a job without a body.
    let base = Base::new("replay_lock", spec(1)).await;
    base.accept("evt_1", None).await;
    assert_eq!(base.drain("INSERT INTO ledger VALUES (:event_id, 'once')").await.0, 1);
    let replay = "BEGIN; SELECT hapax.replay(j.event, ARRAY[j.lane], ARRAY[NULL], ARRAY[NULL::bigint], \
                  ARRAY[NULL], true, false, 'ops', NULL, now()) FROM hapax.job j";
    base.sql.batch_execute(replay).await.expect("replays");
    prune(&base, after(86_400), 10).await;
    assert_eq!(base.one(WHOLE).await, "evt_1", "taken under a replay that has not committed");
    base.sql.batch_execute("COMMIT").await.expect("commits");
    prune(&base, after(86_400), 10).await;
    assert_eq!(base.one(WHOLE).await, "evt_1", "its job is ready");
    assert_eq!(base.drain("INSERT INTO ledger VALUES (:event_id, 'twice')").await.0, 1);

    // The other way round: the replay waits for retention, and finds nothing to run.
    let strip = "BEGIN; SELECT hapax.strip('00000000-0000-0000-0000-000000000000', \
                 'ffffffff-ffff-ffff-ffff-ffffffffffff', now() + interval '1 day', 10)";
    let (event, lane) = {
        let row =
            base.sql.query_one("SELECT event, lane FROM hapax.job", &[]).await.expect("a job");
        (row.get::<_, uuid::Uuid>(0), row.get::<_, i32>(1))
    };
    base.sql.batch_execute(strip).await.expect("strips");
    let other = connect(&base.url).await;
    let replay = "SELECT count(*) FROM hapax.replay($1, ARRAY[$2::integer], ARRAY[NULL], \
                  ARRAY[NULL::bigint], ARRAY[NULL], true, false, 'ops', NULL, now())";
    let watcher = connect(&base.url).await;
    let commits = async {
        until("the replay waits", async || {
            let waits = "SELECT FROM pg_stat_activity WHERE datname = current_database() \
                         AND wait_event = 'advisory'";
            !watcher.query(waits, &[]).await.expect("asks").is_empty()
        })
        .await;
        base.sql.batch_execute("COMMIT").await.expect("commits");
    };
    let values: [&(dyn tokio_postgres::types::ToSql + Sync); 2] = [&event, &lane];
    let (ran, ()) = tokio::join!(other.query_one(replay, &values), commits);
    assert_eq!(ran.expect("replays").get::<_, i64>(0), 0, "a pruned event has nothing to run");
    assert_eq!(base.one("SELECT count(*)::text FROM hapax.job").await, "0");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conflict_beside_the_deletion_of_its_key_leaves_nothing_behind() {
    // Retention has deleted an old key and has not committed yet. Another body arrives under the same id. If it were
    // stored as a conflict of the deleted event, nothing would ever delete it.
    let base = Base::new("conflict_gone", spec(1)).await;
    let arrive = async |body: String| {
        let late = Sender::plain().ingest_at(&body, noon(), after(3_600));
        base.store.ingest(late).await.expect("ingests").remove(0)
    };
    let first = arrive(body("evt_1")).await;
    let rejected =
        base.store.reject(first.id(), Action { who: "ops".into(), reason: None, at: noon() }).await;
    assert_eq!(rejected.expect("rejects"), Reviewed::Decided);
    prune(&base, after(86_400), 10).await;
    let forget = "BEGIN; SELECT hapax.forget('{shop}', ARRAY['ffffffff-ffff-ffff-ffff-ffffffffffff'::uuid], \
                  ARRAY['infinity'::timestamptz], 10, NULL)";
    base.sql.batch_execute(forget).await.expect("deletes");
    let (watcher, is_decided) = (connect(&base.url).await, AtomicBool::new(false));
    let conflict = async {
        let verdict = arrive(r#"{"id":"evt_1","type":"other"}"#.to_owned()).await;
        is_decided.store(true, Ordering::Relaxed);
        verdict
    };
    let commits = async {
        until("the conflict waits or is stored", async || {
            let waits = "SELECT FROM pg_stat_activity WHERE datname = current_database() \
                         AND wait_event_type = 'Lock'";
            is_decided.load(Ordering::Relaxed)
                || !watcher.query(waits, &[]).await.expect("asks").is_empty()
        })
        .await;
        base.sql.batch_execute("COMMIT").await.expect("commits");
    };
    let (verdict, ()) = tokio::join!(conflict, commits);
    let left = "SELECT concat_ws(' ', \
                (SELECT count(*) FROM hapax.arrival a \
                 WHERE NOT EXISTS (SELECT FROM hapax.event e WHERE e.id = a.event)), \
                (SELECT count(*) FROM hapax.copy c \
                 WHERE NOT EXISTS (SELECT FROM hapax.event e WHERE e.id = c.event)))";
    assert_eq!(base.one(left).await, "0 0", "{verdict:?}");
    assert!(matches!(verdict, Verdict::Review(id) if id != first.id()), "{verdict:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_deletion_of_a_tenant_covers_what_was_committed_before_it_whatever_the_nodes_clocks_say()
{
    // The clock of one node is ahead of the database's clock, and the clock of another node is behind it.
    let base = Base::new("erased_by_commit", spec(1)).await;
    base.accept("before", None).await;
    let tenant = hapax_core::Tenant::default;
    let by = Action { who: "ops".into(), reason: None, at: noon() };
    let shift = async |id: &str, minutes: i32| {
        let sql = format!(
            "UPDATE hapax.event SET received_at = now() + interval '{minutes} min'
             WHERE event_id = '{id}'::bytea"
        );
        assert_eq!(base.sql.execute(&sql, &[]).await.expect("changes"), 1);
    };
    shift("before", 10).await;
    base.store.delete_tenant(tenant(), by).await.expect("begins");
    base.accept("after", None).await;
    shift("after", -10).await;
    until("the deletion ends", || async {
        base.store.erase(100).await.expect("erases");
        let deletion = base.store.tenant_deletion(tenant()).await.expect("reads");
        deletion.expect("is there").ended_at.is_some()
    })
    .await;
    let whole = "SELECT string_agg(convert_from(e.event_id, 'UTF8'), ' ')
                 FROM hapax.event e JOIN hapax.body b ON b.id = e.id";
    assert_eq!(base.one(whole).await, "after");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn copies_of_pruned_events_store_neither_bodies_nor_addresses_and_go_with_their_tenant() {
    // The body of an event is deleted, then a copy and a conflict arrive. Their rows would stay for as long as
    // the key, and the deletion of the tenant would not find them.
    let base = Base::new("late_copies", spec(1)).await;
    let sender = Sender::of("acme", "shop");
    let arrive = async |body: &str| {
        base.store.ingest(sender.ingest_at(body, noon(), noon())).await.expect("ingests");
    };
    arrive(&body("pruned")).await;
    prune(&base, after(60), 10).await;
    arrive(&body("whole")).await;
    let conflicts = async || {
        for id in ["pruned", "whole"] {
            arrive(&body(id)).await;
            arrive(&format!("{} ", body(id))).await;
        }
        base.store.flush_copies().await;
    };
    let rows = async || {
        let rows = "SELECT concat_ws(' ', (SELECT count(*) FROM hapax.arrival),
                        (SELECT coalesce(sum(only_counted), 0) FROM hapax.copy),
                        (SELECT coalesce(sum(conflicts), 0) FROM hapax.copy),
                        (SELECT count(*) FROM hapax.body))";
        base.one(rows).await
    };
    conflicts().await;
    assert_eq!(rows().await, "2 2 2 1", "rows of the whole event, and counts of the pruned one");
    // A copy that was written while retention deleted the body.
    let beside = "INSERT INTO hapax.arrival (event, received_at, request_id, conflict, remote, secret)
                  SELECT id, received_at, gen_random_uuid(), false, '203.0.113.9', 0 FROM hapax.event
                  WHERE event_id = 'pruned'";
    assert_eq!(base.sql.execute(beside, &[]).await.expect("inserts"), 1);
    let acme = || hapax_core::Tenant::new("acme");
    let by = Action { who: "ops".into(), reason: None, at: noon() };
    base.store.delete_tenant(acme(), by).await.expect("begins");
    until("the deletion ends", || async {
        base.store.erase(1).await.expect("erases");
        let deletion = base.store.tenant_deletion(acme()).await.expect("reads").expect("is there");
        deletion.ended_at.is_some()
    })
    .await;
    let deletion = base.store.tenant_deletion(acme()).await.expect("reads").expect("is there");
    assert_eq!(deletion.events, 1, "the whole event");
    assert_eq!(rows().await, "0 0 0 0");
    // Both events are still recognised.
    conflicts().await;
    assert_eq!(rows().await, "0 4 2 0");
}
