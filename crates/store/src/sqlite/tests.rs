//! The crash behaviour of the key index and the writer, sentence by sentence. Other tests kill real
//! processes; here the file itself is made to fail.

use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::Duration;

use hapax_core::delivery::DeliveryStatus;
use hapax_core::handler::{Dialect, SqlProgram};
use hapax_core::job::Phase;
use hapax_core::json::Pointer;
use hapax_core::order::OrderPolicy;
use hapax_core::search::SearchFields;
use hapax_core::store::{
    Action, ClaimAsk, ClaimedEvent, DAMAGED_BODY, DeliveryFilter, EventAct, EventFilter, EventName,
    EventPlan, Horizon, Inspect, Lookup, NewMessage, NewPlan, Outcome, PlanId, PlanRun, Plans, Ran,
    SearchIndex as _, Settlement, SqlAsk, SqlRun, Status, Store, StoreError, StoreHints,
    TenantDeletions as _, Verdict, Work,
};
use hapax_core::{KeyHash, SourceName, Tenant};
use rusqlite::Connection;

use super::checkpoint::Checkpointer;
use super::key_index::KeyIndex;
use super::lists::Candidates;
use super::{Db, SqliteOptions, SqliteStore};
use crate::harness::{
    DatabaseDirectory, LEASE, Replay, Sender, World, after, body, done, handler, job, noon,
    ordered, placed, spec,
};
use crate::limits::{COPIES_WAITING_MAX, FRESH_KEYS_MAX, PAGE_BYTES, WAITING_MAX};
use crate::transact::{Failure, Transact as _, TxError};

async fn verdict(store: &SqliteStore, sender: &Sender, id: &str) -> Result<Verdict, StoreError> {
    Ok(store.ingest(sender.ingest(&body(id))).await?.remove(0))
}

/// Lets the file grow no further: the next large commit fails.
fn forbid_growth(conn: &mut Connection) {
    let pages: i64 = conn.query_row("PRAGMA page_count", [], |row| row.get(0)).expect("counts");
    let set = format!("PRAGMA max_page_count = {pages}");
    conn.query_row(&set, [], |_| Ok(())).expect("sets");
}

async fn fail_commits(store: &SqliteStore) {
    store.writer.tamper(forbid_growth);
}

fn large(id: &str) -> String {
    let filling = "x".repeat(200_000);
    format!(r#"{{"id":"{id}","type":"t","filling":"{filling}"}}"#)
}

async fn writable_again(store: &SqliteStore) {
    tokio::time::timeout(crate::harness::FOREVER, async {
        while store.writable().is_err() {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("the store recovers by itself");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_failed_leaves_nothing_behind_and_its_retry_is_new() {
    // The naive store keeps the key in memory, and calls the retry a duplicate of an event that
    // does not exist.
    let place = DatabaseDirectory::new();
    let store = place.open();
    let sender = Sender::plain();
    let before = verdict(&store, &sender, "before").await.expect("accepts").id();
    fail_commits(&store).await;
    let failed = store.ingest(sender.ingest(&large("evt_1"))).await;
    assert!(matches!(failed, Err(StoreError::Unavailable(_))), "{failed:?}");
    writable_again(&store).await;
    let retried = store.ingest(sender.ingest(&large("evt_1"))).await.expect("accepts").remove(0);
    assert!(matches!(retried, Verdict::Accepted(_)), "{retried:?}");
    let known = verdict(&store, &sender, "before").await.expect("answers");
    assert!(matches!(&known, Verdict::Duplicate(known) if known.id == before), "{known:?}");
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_whose_first_commit_failed_is_known_with_its_retry() {
    // The number that the failed commit gave the source is not on disk; an event with that number
    // would have no source.
    let place = DatabaseDirectory::new();
    let store = place.open();
    let sender = Sender::plain();
    fail_commits(&store).await;
    let failed = store.ingest(sender.ingest(&large("evt_1"))).await;
    assert!(matches!(failed, Err(StoreError::Unavailable(_))), "{failed:?}");
    writable_again(&store).await;
    let retried = store.ingest(sender.ingest(&large("evt_1"))).await.expect("accepts").remove(0);
    assert!(matches!(retried, Verdict::Accepted(_)), "{retried:?}");
    let found = store.event(&EventName::Theirs("evt_1".into())).await.expect("reads");
    assert!(matches!(&found, Lookup::One(event) if event.summary.source == "shop"), "{found:?}");
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_that_failed_frees_no_lease_of_this_process() {
    // After the failure the handlers are announced again, as with a reload. Only a new process ends
    // the leases of a dead one: here the worker is alive, and its job must not run twice at the
    // same time.
    let world = World::on_disk();
    world.announce([spec("fee")]).await;
    world.accept("evt_1", &[job("fee")]).await;
    let claim = world.claim_one("fee").await;
    let failed: Result<(), _> = world
        .store
        .writer
        .slice(|_| {
            let full = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_FULL);
            Err(rusqlite::Error::SqliteFailure(full, None))
        })
        .await;
    assert!(failed.is_err());
    writable_again(&world.store).await;
    world.announce([spec("fee")]).await;
    world.pass(LEASE - 1);
    assert!(world.claim("fee", 10).await.is_empty());
    assert_eq!(world.settle(&claim, done("done")).await, Settlement::Recorded);
    assert!(world.claim_next("fee").await.is_empty());
    world.store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_waits_for_the_commit_of_its_event() {
    // Memory would answer the copy while the first arrival is not on disk yet.
    let place = DatabaseDirectory::new();
    let store = Arc::new(place.open());
    let (began, begins) = std::sync::mpsc::channel::<()>();
    let (hold, held) = std::sync::mpsc::channel::<()>();
    store.writer.tamper(move |conn| {
        let hook = move || {
            let _ = began.send(());
            let _ = held.recv();
            false
        };
        conn.commit_hook(Some(hook)).expect("a hook");
    });
    let first = {
        let store = Arc::clone(&store);
        tokio::spawn(async move { verdict(&store, &Sender::plain(), "evt_1").await })
    };
    tokio::task::spawn_blocking(move || begins.recv()).await.expect("ends").expect("a commit");
    let sender = Sender::plain();
    let mut copy = Box::pin(verdict(&store, &sender, "evt_1"));
    std::future::poll_fn(|context| {
        assert!(copy.as_mut().poll(context).is_pending(), "it was answered before the commit");
        Poll::Ready(())
    })
    .await;
    drop(hold);
    let id = first.await.expect("no panic").expect("accepts").id();
    let copy = copy.await.expect("answers");
    assert!(matches!(&copy, Verdict::Duplicate(known) if known.id == id), "{copy:?}");
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_failed_sync_the_log_is_empty_and_the_epoch_one_higher() {
    // An unsynced commit may be a hole in the log now: everything synced after it would be lost
    // with it. The failed transaction must not reappear in the page cache either.
    let place = DatabaseDirectory::new();
    let store = place.open();
    for n in 0..20 {
        verdict(&store, &Sender::plain(), &format!("evt_{n}")).await.expect("accepts");
    }
    let log = place.directory().join("hapax.db-wal");
    let length = || std::fs::metadata(&log).expect("a log").len();
    let epoch = async || {
        store.writer.slice(|writer| super::meta(&writer.conn, "epoch")).await.expect("reads")
    };
    let before = epoch().await;
    assert!(length() > 0);
    let failed: Result<(), _> = store
        .writer
        .slice(|_| {
            let sync = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_IOERR_FSYNC);
            Err(rusqlite::Error::SqliteFailure(sync, None))
        })
        .await;
    assert!(failed.is_err());
    writable_again(&store).await;
    assert_eq!((epoch().await, length()), (before + 1, 0));
    for n in 0..20 {
        let again = verdict(&store, &Sender::plain(), &format!("evt_{n}")).await.expect("answers");
        assert!(matches!(again, Verdict::Duplicate(_)), "{again:?}");
    }
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_for_which_no_lane_is_left_fails_alone() {
    // The writer must neither end nor recover repeatedly because of this event.
    let place = DatabaseDirectory::new();
    place.open().close().await;
    let (hold, held) = std::sync::mpsc::channel::<()>();
    let conn = Connection::open(place.file()).expect("opens");
    let last = (1_i64 << super::row::LANE_BITS) - 2;
    conn.execute_batch(&format!(
        "INSERT INTO hapax_pair (pair, tenant, source) VALUES (1, 'default', 'shop');
         INSERT INTO hapax_handler (handler, source, name) VALUES (1, 'shop', 'last');
         INSERT INTO hapax_lane (lane, pair, handler) VALUES ({last}, 1, 1);"
    ))
    .expect("writes");
    drop(conn);
    let store = place.open();
    store.writer.tamper(move |_| {
        let _ = held.recv();
    });
    let sender = Sender::plain();
    let arrive = |id: &str, jobs: &[hapax_core::store::NewJob]| {
        Box::pin(store.ingest(sender.ingest_for(&body(id), noon(), noon(), jobs)))
    };
    // In one batch, the first event gets the last lane number, the second finds none left, and the
    // third needs no new lane.
    let mut answers = [
        arrive("evt_1", &[job("fee")]),
        arrive("evt_2", &[job("other")]),
        arrive("evt_3", &[job("fee"), job("last")]),
    ];
    std::future::poll_fn(|context| {
        for answer in &mut answers {
            assert!(answer.as_mut().poll(context).is_pending());
        }
        Poll::Ready(())
    })
    .await;
    drop(hold);
    let [first, none_left, known] = answers;
    assert!(matches!(first.await.expect("accepts")[0], Verdict::Accepted(_)));
    let refused = none_left.await;
    assert!(matches!(refused, Err(StoreError::Unavailable(_))), "{refused:?}");
    assert!(matches!(known.await.expect("accepts")[0], Verdict::Accepted(_)));
    assert!(store.writable().is_ok());
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plan_whose_row_cannot_be_read_stops_neither_the_writer_nor_other_plans() {
    // A newer version wrote the first plan. An error would make the writer start again, each second.
    let place = DatabaseDirectory::new();
    let store = place.open();
    let sender = Sender::plain();
    verdict(&store, &sender, "evt_1").await.expect("accepts");
    let mut ids = Vec::new();
    for _ in 0..2 {
        let id = PlanId(uuid::Uuid::now_v7());
        let work = EventPlan::new(EventAct::Discard, None, EventFilter::default()).into();
        let request = hapax_core::KeyHash([7; 16]);
        let by = Action { who: "ops".to_owned(), reason: None, at: noon() };
        let new = NewPlan { id, work, rate: None, request, alone: false };
        store.create_plan(new, by).await.expect("creates");
        ids.push(id);
    }
    let id = ids[0];
    store.writer.tamper(move |conn| {
        let sql =
            "UPDATE hapax_plan SET events = '{\"act\":\"unheard\"}', next_at = 0 WHERE id = ?1";
        conn.execute(sql, [id.0.as_bytes()]).expect("changes");
    });
    let ran = store.run_plan(10, Vec::new()).await.expect("answers");
    assert!(matches!(&ran, PlanRun::Failed(failed, _) if *failed == id), "{ran:?}");
    let ran = store.run_plan(10, vec![id]).await.expect("answers");
    assert!(matches!(&ran, PlanRun::Events(slice) if slice.plan == ids[1]), "{ran:?}");
    assert_eq!(store.plans(10).await.expect("lists").len(), 1);
    assert!(store.plan(id).await.expect("reads").is_none());
    assert!(store.writable().is_ok());
    verdict(&store, &sender, "evt_2").await.expect("accepts");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_failed_is_an_error_for_all_of_its_batch() {
    // Small events that share the batch with one that cannot be written must not be acked.
    let place = DatabaseDirectory::new();
    let store = place.open();
    let sender = Sender::plain();
    verdict(&store, &sender, "before").await.expect("accepts");
    let (hold, held) = std::sync::mpsc::channel::<()>();
    store.writer.tamper(move |conn| {
        forbid_growth(conn);
        // While the writer blocks here, everything below queues up for one batch.
        let _ = held.recv();
    });
    let mut answers: Vec<_> = (0..10)
        .map(|n| if n == 5 { large("evt_5") } else { body(&format!("evt_{n}")) })
        .map(|bytes| Box::pin(store.ingest(sender.ingest(&bytes))))
        .collect();
    // The first poll of each puts it into the writer's queue.
    std::future::poll_fn(|context| {
        for answer in &mut answers {
            assert!(answer.as_mut().poll(context).is_pending());
        }
        Poll::Ready(())
    })
    .await;
    drop(hold);
    for (n, answer) in answers.into_iter().enumerate() {
        let answer = answer.await;
        // Requests that queued behind the failure belong to the next batch.
        assert!(n > 5 || matches!(answer, Err(StoreError::Unavailable(_))), "{n}: {answer:?}");
    }
    writable_again(&store).await;
    for n in [0, 1, 2, 3, 4] {
        let again = verdict(&store, &sender, &format!("evt_{n}")).await.expect("accepts");
        assert!(matches!(again, Verdict::Accepted(_)), "{n}: {again:?}");
    }
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_work_while_writes_fail() {
    let place = DatabaseDirectory::new();
    let store = place.open();
    let sender = Sender::plain();
    let id = verdict(&store, &sender, "before").await.expect("accepts").id();
    fail_commits(&store).await;
    for n in 0..20 {
        let _ = store.ingest(sender.ingest(&large(&format!("evt_{n}")))).await;
        let found = store.event(&EventName::Ours(id)).await.expect("reads");
        assert!(matches!(found, Lookup::One(_)), "{found:?}");
    }
    store.close().await;
}

#[tokio::test]
async fn a_query_that_panics_leaves_its_connection_usable() {
    // There are two readers: after two panics no read would be possible.
    let place = DatabaseDirectory::new();
    let store = place.open();
    for _ in 0..3 {
        let panicked: Result<(), _> = store.readers.run(|_| panic!("as it must not")).await;
        assert!(matches!(panicked, Err(StoreError::Read(_))), "{panicked:?}");
    }
    store.readers.run(super::reader::pairs).await.expect("reads");
    store.close().await;
}

/// Adds keys to the tree up to `through`, as a merge that died halfway would have.
fn interrupted_merge(place: &DatabaseDirectory, merged: std::ops::RangeInclusive<i64>) {
    let conn = Connection::open(place.file()).expect("opens");
    let mut events =
        conn.prepare("SELECT seq, event_id FROM hapax_event ORDER BY seq").expect("prepares");
    let rows: Vec<(i64, String)> = events
        .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))
        .expect("queries")
        .collect::<Result<_, _>>()
        .expect("reads");
    for (seq, event_id) in rows.into_iter().filter(|(seq, _)| merged.contains(seq)) {
        let key = Sender::plain().ingest(&body(&event_id)).receipts[0].key().hash();
        conn.execute("INSERT INTO hapax_key (hash, seq) VALUES (?1, ?2)", (&key.0[..], seq))
            .expect("inserts");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_merge_that_died_halfway_is_finished_and_forgets_no_key() {
    // Keys in the tree beyond the mark: the reload starts at the old mark, and the merge must skip
    // keys that are there already.
    let place = DatabaseDirectory::new();
    let sender = Sender::plain();
    let store = place.open();
    for n in 0..100 {
        verdict(&store, &sender, &format!("evt_{n}")).await.expect("accepts");
    }
    store.close().await;
    drop(store);
    interrupted_merge(&place, 1..=40);
    let store = place.open();
    store.writer.merge_now();
    for n in 0..100 {
        let again = verdict(&store, &sender, &format!("evt_{n}")).await.expect("answers");
        assert!(matches!(again, Verdict::Duplicate(_)), "{n}: {again:?}");
    }
    // Closing does not wait for the end of a merge, so this does: each slice is followed by one chunk.
    let is_over = "SELECT (SELECT value FROM hapax_meta WHERE name = 'merged_through') = 100
                      AND NOT EXISTS (SELECT 1 FROM hapax_key_young)";
    let is_over = async || {
        let read =
            store.writer.slice(|writer| writer.conn.query_row(is_over, [], |row| row.get(0)));
        read.await.expect("answers")
    };
    tokio::time::timeout(crate::harness::FOREVER, async { while !is_over().await {} })
        .await
        .expect("the merge ends");
    store.close().await;
    drop(store);
    let conn = Connection::open(place.file()).expect("opens");
    let count = |sql: &str| conn.query_row(sql, [], |row| row.get::<_, i64>(0)).expect("counts");
    assert_eq!(count("SELECT count(*) FROM hapax_key"), 100);
    assert_eq!(count("SELECT value FROM hapax_meta WHERE name = 'merged_through'"), 100);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_hash_for_another_event_stops_the_store_loudly() {
    // Otherwise one of two events would be a duplicate of the other for ever.
    let place = DatabaseDirectory::new();
    let sender = Sender::plain();
    let store = place.open();
    verdict(&store, &sender, "evt_1").await.expect("accepts");
    store.close().await;
    drop(store);
    let key = sender.ingest(&body("evt_1")).receipts[0].key().hash();
    Connection::open(place.file())
        .expect("opens")
        .execute("INSERT INTO hapax_key (hash, seq) VALUES (?1, 77)", [&key.0[..]])
        .expect("inserts");
    let store = place.open();
    store.writer.merge_now();
    tokio::time::timeout(crate::harness::FOREVER, async {
        while !matches!(verdict(&store, &sender, "evt_2").await, Err(StoreError::Closed)) {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("the store stops");
    assert!(store.writable().is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn keys_are_known_before_during_and_after_a_merge_and_after_a_restart() {
    // More keys than memory holds, so that merges run between the batches. Every key is looked up
    // again afterwards: in the tree, in memory, and after a reload.
    let place = DatabaseDirectory::new();
    let store = Arc::new(place.open());
    let sender = Arc::new(Sender::of_several());
    let per_body = 500;
    let bodies = FRESH_KEYS_MAX / per_body + 8;
    let send = async |expected: fn(&Verdict) -> bool, store: &Arc<SqliteStore>| {
        let tasks: Vec<_> = (0..8)
            .map(|worker| {
                let (store, sender) = (Arc::clone(store), Arc::clone(&sender));
                tokio::spawn(async move {
                    for part in (worker..bodies).step_by(8) {
                        let events: Vec<_> =
                            (0..per_body).map(|n| format!(r#"{{"id":"e{part}_{n}"}}"#)).collect();
                        let bytes = format!(r#"{{"events":[{}]}}"#, events.join(","));
                        let verdicts = store.ingest(sender.ingest(&bytes)).await.expect("ingests");
                        assert!(verdicts.iter().all(expected), "part {part}: {verdicts:?}");
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.expect("no panic");
        }
    };
    send(|verdict| matches!(verdict, Verdict::Accepted(_)), &store).await;
    send(|verdict| matches!(verdict, Verdict::Duplicate(_)), &store).await;
    store.close().await;
    drop(store);
    let store = Arc::new(place.open());
    send(|verdict| matches!(verdict, Verdict::Duplicate(_)), &store).await;
    store.close().await;
    let conn = Connection::open(place.file()).expect("opens");
    let merged: i64 = conn
        .query_row("SELECT count(*) FROM hapax_key_young", [], |row| row.get(0))
        .expect("counts");
    assert!(merged as usize >= FRESH_KEYS_MAX, "only {merged} keys were merged");
}

#[tokio::test]
async fn no_key_is_hidden_while_the_filter_is_made_again_between_merges_moves_and_deletions() {
    // The rebuild has read a part of the trees, then a key is merged, moved or deleted on either side of its
    // position. A filter that misses one key takes its copy for a new event.
    let place = DatabaseDirectory::new();
    place.open().close().await;
    let conn = Connection::open(place.file()).expect("opens");
    let mut index = KeyIndex::load(&conn, Arc::default()).expect("loads");
    let mut dice = 0_u64;
    let mut roll = |sides: u64| {
        dice += 1;
        let hash = KeyHash::of(b"dice", [&dice.to_be_bytes()[..]]);
        u64::from_be_bytes(hash.0[..8].try_into().expect("eight bytes")) % sides
    };
    let key = |seq: i64| KeyHash::of(b"test", [&seq.to_be_bytes()[..]]);
    let (mut kept, mut gone) = (Vec::new(), Vec::new());
    let (mut last, mut rebuilds, mut beside) = (0, 0, 0);
    for _ in 0..2_000 {
        match roll(8) {
            0 | 1 => {
                last += 1;
                index.claim(key(last), last);
                index.committed();
                kept.push(last);
            }
            2 | 3 if !kept.is_empty() && !index.is_merging() => {
                let seq = kept.swap_remove(roll(kept.len() as u64) as usize);
                index.forget(&conn, &key(seq)).expect("forgets");
                gone.push(seq);
            }
            4 => index.merge_soon(),
            5 => index.rebuild_filter_soon(1 + roll(3) as usize),
            6 if index.wants_filter() => {
                index.rebuild_filter_chunk(&conn).expect("reads");
                beside += u64::from(index.is_merging());
                rebuilds += u64::from(!index.wants_filter());
            }
            _ if index.wants_merge() => {
                index.merge_chunk(&conn).expect("merges");
                index.merged_chunk();
            }
            _ => {}
        }
        for seq in &kept {
            assert_eq!(index.find(&conn, &key(*seq)).expect("reads"), Some(*seq));
        }
        if let Some(seq) = gone.last() {
            assert_eq!(index.find(&conn, &key(*seq)).expect("reads"), None);
        }
    }
    assert!(rebuilds >= 5 && beside >= 5, "{rebuilds} rebuilds, {beside} chunks beside a merge");
}

#[tokio::test]
async fn a_chunk_of_the_new_filter_is_read_from_both_trees_without_sorting() {
    // A chunk that sorts all keys would keep acks waiting for seconds.
    let place = DatabaseDirectory::new();
    place.open().close().await;
    let conn = Connection::open(place.file()).expect("opens");
    let sql = format!("EXPLAIN QUERY PLAN {}", include_str!("sql/next_keys.sql"));
    let mut plan = conn.prepare(&sql).expect("prepares");
    let steps = plan.query_map((&[0_u8][..], 10), |row| row.get(3)).expect("explains");
    let steps: Vec<String> = steps.collect::<Result<_, _>>().expect("reads");
    assert_eq!(
        steps.iter().filter(|step| step.contains("USING PRIMARY KEY")).count(),
        2,
        "{steps:?}"
    );
    assert!(!steps.iter().any(|step| step.contains("TEMP B-TREE")), "{steps:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_filter_of_keys_does_not_grow_with_keys_that_were_deleted() {
    // Years of rounds: events arrive, their keys are merged and later pruned. Another source keeps its keys.
    let place = DatabaseDirectory::new();
    let store = place.open();
    let (sender, keeps) = (Sender::plain(), Sender::of("default", "keeps"));
    let tune = |writer: &mut super::writer::Writer| {
        writer.index.merge_soon();
        writer.index.rebuild_filter_soon(3);
        Ok(())
    };
    store.writer.slice(tune).await.expect("answers");
    let keys = vec![(SourceName::new("shop"), after(60))];
    let horizon = Horizon { events_before: after(60), keys_before: keys, ..Horizon::forever() };
    let mut kept = Vec::new();
    for round in 0..20 {
        for n in 0..20 {
            verdict(&store, &sender, &format!("old_{round}_{n}")).await.expect("accepts");
        }
        let prune = async { while store.prune(horizon.clone(), 7).await.expect("prunes") {} };
        let arrive = async {
            for n in 0..3 {
                let id = format!("kept_{round}_{n}");
                verdict(&store, &keeps, &id).await.expect("accepts");
                kept.push(id);
                for id in &kept {
                    // Memory must not answer, because only the index is tested here.
                    store.shared.recent.clear();
                    let copy = verdict(&store, &keeps, id).await.expect("answers");
                    assert!(matches!(copy, Verdict::Duplicate(_)), "{id}: {copy:?}");
                }
            }
        };
        tokio::join!(prune, arrive);
        while store.prune(horizon.clone(), 7).await.expect("prunes") {}
    }
    let is_idle = async || {
        let idle = |writer: &mut super::writer::Writer| {
            Ok(!writer.index.wants_merge() && !writer.index.wants_filter())
        };
        store.writer.slice(idle).await.expect("answers")
    };
    tokio::time::timeout(crate::harness::FOREVER, async { while !is_idle().await {} })
        .await
        .expect("the writer has nothing left to do");
    let counted = store.writer.slice(|writer| Ok(writer.index.filter_keys())).await;
    let (keys, deleted) = counted.expect("answers");
    assert_eq!(keys - deleted, kept.len(), "{keys} keys, of which {deleted} are deleted");
    assert!(deleted <= kept.len(), "{keys} keys, of which {deleted} are deleted");
    store.close().await;
}

#[tokio::test]
async fn a_second_process_is_refused() {
    let place = DatabaseDirectory::new();
    let store = place.open();
    let second = SqliteStore::open(SqliteOptions::new(place.directory()));
    assert!(matches!(second, Err(super::OpenError::InUse(_))), "{second:?}");
    store.close().await;
}

#[tokio::test]
async fn a_changed_or_newer_migration_is_refused() {
    for (change, newer) in [
        ("UPDATE hapax_migration SET checksum = 'another'", false),
        ("INSERT INTO hapax_migration (version, name, checksum) VALUES (999, 'x', 'y')", true),
    ] {
        let place = DatabaseDirectory::new();
        let store = place.open();
        store.close().await;
        drop(store);
        Connection::open(place.file()).expect("opens").execute(change, []).expect("changes");
        let refused = SqliteStore::open(SqliteOptions::new(place.directory()));
        match refused {
            Err(super::OpenError::Newer(999)) => assert!(newer),
            Err(super::OpenError::Migration { version: 1 }) => assert!(!newer),
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn tables_and_numbers_of_the_user_in_the_same_file_stay_untouched() {
    let place = DatabaseDirectory::new();
    let conn = Connection::open(place.file()).expect("opens");
    conn.execute_batch(
        "CREATE TABLE payout_fees (id TEXT); INSERT INTO payout_fees VALUES ('mine');
         PRAGMA user_version = 41; PRAGMA application_id = 42;",
    )
    .expect("a file of the user's");
    drop(conn);
    let store = place.open();
    verdict(&store, &Sender::plain(), "evt_1").await.expect("accepts");
    store.close().await;
    drop(store);
    let conn = Connection::open(place.file()).expect("opens");
    let number = |sql: &str| conn.query_row(sql, [], |row| row.get::<_, i64>(0)).expect("reads");
    assert_eq!(number("PRAGMA user_version"), 41);
    assert_eq!(number("PRAGMA application_id"), 42);
    assert_eq!(number("SELECT count(*) FROM payout_fees WHERE id = 'mine'"), 1);
    let foreign = "SELECT count(*) FROM sqlite_schema
                   WHERE name NOT LIKE 'hapax\\_%' ESCAPE '\\' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'";
    assert_eq!(number(foreign), 1, "every name of ours starts with hapax_");
    let row = conn
        .query_row(
            "SELECT event_id, tenant, source, event_type, status, payload, received_at
             FROM hapax_processed_events",
            [],
            |row| (0..7).map(|column| row.get::<_, String>(column)).collect::<Result<Vec<_>, _>>(),
        )
        .expect("the view");
    let at = "2026-06-01T12:00:00.000Z";
    let wanted = ["evt_1", "default", "shop", "payout.paid", "ignored", &body("evt_1"), at];
    assert_eq!(row, wanted);
}

#[tokio::test]
async fn every_documented_view_can_be_read_by_other_programs() {
    // A dashboard uses them on both databases: a view that is missing on SQLite breaks it.
    let place = DatabaseDirectory::new();
    let store = place.open();
    store.close().await;
    drop(store);
    let conn = Connection::open(place.file()).expect("opens");
    for view in ["processed_events", "arrivals", "attempts", "dead_letters", "deliveries"] {
        let rows =
            conn.query_row(&format!("SELECT count(*) FROM hapax_{view}"), [], |row| row.get(0));
        assert_eq!(rows, Ok(0_i64), "{view}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commits_are_synced_again_after_a_deferred_write() {
    // Counting copies lowers the setting for its own commit. If the setting stayed, events would be
    // acked that a power cut can undo.
    let place = DatabaseDirectory::new();
    let store = place.open();
    let sender = Sender::plain();
    for _ in 0..3 {
        verdict(&store, &sender, "evt_1").await.expect("answers");
    }
    store.writer.flush_soon();
    let (send, answer) = tokio::sync::oneshot::channel();
    store.writer.tamper(|conn| {
        let level: i64 = conn.query_row("PRAGMA synchronous", [], |row| row.get(0)).expect("reads");
        let _ = send.send(level);
    });
    assert_eq!(answer.await.expect("an answer"), 2, "FULL");
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deferred_write_that_could_not_begin_leaves_commits_synced() {
    // Another connection holds the file for writing when copies are to be counted: the setting for
    // that commit must not stay for the following ones.
    let place = DatabaseDirectory::new();
    let store = place.open();
    verdict(&store, &Sender::plain(), "evt_1").await.expect("accepts");
    let file = place.file();
    let (send, answer) = tokio::sync::oneshot::channel();
    store.writer.tamper(move |conn| {
        conn.busy_timeout(Duration::ZERO).expect("sets");
        let other = Connection::open(file).expect("opens");
        other.execute_batch("BEGIN IMMEDIATE").expect("begins");
        let refused = super::transaction::Transaction::begin_unsynced(conn).is_err();
        let level: i64 = conn.query_row("PRAGMA synchronous", [], |row| row.get(0)).expect("reads");
        let _ = send.send((refused, level));
    });
    assert_eq!(answer.await.expect("an answer"), (true, 2), "refused, and FULL");
    store.close().await;
}

/// Makes every commit fail.
fn refuse_commits(conn: &mut Connection) {
    conn.commit_hook(Some(|| true)).expect("hooks");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closing_does_not_wait_for_a_full_disk() {
    // A shutdown while the disk is full: once with copies still to be counted, once right after an
    // event whose commit fails.
    let in_time = |store: Arc<SqliteStore>| async move {
        let closed = tokio::time::timeout(crate::harness::FOREVER, store.close()).await;
        closed.expect("closes");
        assert!(store.writable().is_err(), "the store reports that it is not writable");
        let late = verdict(&store, &Sender::plain(), "evt_1").await;
        assert!(matches!(late, Err(StoreError::Closed)), "{late:?}");
    };
    let place = DatabaseDirectory::new();
    let store = Arc::new(place.open());
    for _ in 0..3 {
        verdict(&store, &Sender::plain(), "evt_1").await.expect("answers");
    }
    store.writer.tamper(refuse_commits);
    in_time(store).await;

    let place = DatabaseDirectory::new();
    let store = Arc::new(place.open());
    let (hold, held) = std::sync::mpsc::channel::<()>();
    store.writer.tamper(move |conn| {
        refuse_commits(conn);
        let _ = held.recv();
    });
    let sender = Sender::plain();
    let mut answer = Box::pin(store.ingest(sender.ingest(&body("evt_2"))));
    std::future::poll_fn(|context| {
        assert!(answer.as_mut().poll(context).is_pending());
        Poll::Ready(())
    })
    .await;
    let closing = tokio::spawn(in_time(Arc::clone(&store)));
    drop(hold);
    let answer = answer.await;
    assert!(matches!(answer, Err(StoreError::Unavailable(_))), "{answer:?}");
    closing.await.expect("closes");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closing_while_writes_fail_copies_nothing_of_the_log_into_the_file() {
    // After a failed sync the log may have holes on disk. The writer does not settle such a log, but SQLite
    // does when the last connection that can write closes: a power loss would then leave newer pages under
    // an older log.
    let place = DatabaseDirectory::new();
    let store = place.open();
    verdict(&store, &Sender::plain(), "evt_1").await.expect("accepts");
    store.writer.tamper(refuse_commits);
    let failed = verdict(&store, &Sender::plain(), "evt_2").await;
    assert!(matches!(failed, Err(StoreError::Unavailable(_))), "{failed:?}");
    let log = place.directory().join("hapax.db-wal");
    let both = || [place.file(), log.clone()].map(|file| std::fs::read(file).expect("reads"));
    let before = both();
    assert!(!before[1].is_empty(), "the event is in the log");
    store.close().await;
    assert!(log.exists(), "the log was copied into the file and deleted");
    assert!(both() == before, "the file or the log was changed");
    drop(store);
    let store = place.open();
    let again = verdict(&store, &Sender::plain(), "evt_1").await.expect("answers");
    assert!(matches!(again, Verdict::Duplicate(_)), "{again:?}");
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closing_right_after_a_failed_commit_copies_nothing_of_the_log_into_the_file() {
    // The failed commit and the request to close are in one batch, so the writer ends without a recovery.
    let place = DatabaseDirectory::new();
    let store = Arc::new(place.open());
    verdict(&store, &Sender::plain(), "evt_1").await.expect("accepts");
    let (hold, held) = std::sync::mpsc::channel::<()>();
    store.writer.tamper(move |conn| {
        refuse_commits(conn);
        let _ = held.recv();
    });
    let sender = Sender::plain();
    let mut answer = Box::pin(store.ingest(sender.ingest(&body("evt_2"))));
    let mut closing = Box::pin(store.close());
    std::future::poll_fn(|context| {
        assert!(answer.as_mut().poll(context).is_pending());
        assert!(closing.as_mut().poll(context).is_pending());
        Poll::Ready(())
    })
    .await;
    let before = file_and_log(&place);
    assert!(!before[1].is_empty(), "the event is in the log");
    drop(hold);
    let answer = answer.await;
    assert!(matches!(answer, Err(StoreError::Unavailable(_))), "{answer:?}");
    closing.await;
    assert!(file_and_log(&place) == before, "the file or the log was changed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_is_dropped_while_writes_fail_copies_nothing_of_the_log_into_the_file() {
    // The last connection that closes is the writer's. SQLite would settle the log then.
    let place = DatabaseDirectory::new();
    let store = place.open();
    verdict(&store, &Sender::plain(), "evt_1").await.expect("accepts");
    store.writer.tamper(refuse_commits);
    let failed = verdict(&store, &Sender::plain(), "evt_2").await;
    assert!(matches!(failed, Err(StoreError::Unavailable(_))), "{failed:?}");
    let before = file_and_log(&place);
    let writer = store.writer.take_thread().expect("runs");
    store.copy_answers.close();
    store.readers.close();
    drop(store);
    tokio::task::spawn_blocking(|| writer.join()).await.expect("ends").expect("no panic");
    assert!(file_and_log(&place) == before, "the file or the log was changed");
}

/// The bytes of the database file and of its log.
fn file_and_log(place: &DatabaseDirectory) -> [Vec<u8>; 2] {
    let log = place.directory().join("hapax.db-wal");
    [place.file(), log].map(|file| std::fs::read(file).expect("reads"))
}

/// The error of a sync that failed.
fn failed_sync() -> rusqlite::Error {
    let sync = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_IOERR_FSYNC);
    rusqlite::Error::SqliteFailure(sync, None)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_failed_sync_of_the_checkpointer_the_log_is_empty_and_the_epoch_one_higher() {
    // The failed sync may have been the only report that a page of the log is not on disk. The next round
    // would copy that page into the file.
    let place = DatabaseDirectory::new();
    let store = place.open();
    verdict(&store, &Sender::plain(), "evt_1").await.expect("accepts");
    let epoch = async || {
        let read = store.writer.slice(|writer| super::meta(&writer.conn, "epoch"));
        read.await
    };
    let before = epoch().await.expect("reads");
    let failing = store.writer.slice(|writer| {
        writer.checkpointer = Checkpointer::running(|| Err(failed_sync())).expect("starts");
        writer.checkpointer.ask();
        Ok(())
    });
    failing.await.expect("runs");
    // Each request is followed by housekeeping. While the writer recovers, it refuses requests.
    tokio::time::timeout(crate::harness::FOREVER, async {
        while epoch().await.ok() != Some(before + 1) {}
    })
    .await
    .expect("the writer recovers");
    assert!(file_and_log(&place)[1].is_empty(), "the log has not started over");
    let checked = store.writer.slice(|writer| writer.checkpointer.check()).await;
    checked.expect("another checkpointer runs");
    let again = verdict(&store, &Sender::plain(), "evt_1").await.expect("answers");
    assert!(matches!(again, Verdict::Duplicate(_)), "{again:?}");
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_that_reads_the_file_does_not_keep_the_writer_from_recovering() {
    // The program holds a transaction open for as long as it likes, so the log cannot start over.
    let place = DatabaseDirectory::new();
    let store = place.open();
    verdict(&store, &Sender::plain(), "evt_1").await.expect("accepts");
    let program = Connection::open(place.file()).expect("opens");
    let read = || -> i64 {
        let count = program.query_row("SELECT count(*) FROM hapax_event", [], |row| row.get(0));
        count.expect("reads")
    };
    program.execute_batch("BEGIN").expect("begins");
    assert_eq!(read(), 1);
    verdict(&store, &Sender::plain(), "evt_2").await.expect("accepts");
    let failed: Result<(), _> = store
        .writer
        .slice(|writer| {
            writer.conn.busy_timeout(Duration::ZERO)?;
            Err(failed_sync())
        })
        .await;
    assert!(failed.is_err());
    writable_again(&store).await;
    verdict(&store, &Sender::plain(), "evt_3").await.expect("accepts");
    assert_eq!(read(), 1, "its transaction is still open");
    for id in ["evt_1", "evt_2", "evt_3"] {
        let again = verdict(&store, &Sender::plain(), id).await.expect("answers");
        assert!(matches!(again, Verdict::Duplicate(_)), "{id}: {again:?}");
    }
    drop(program);
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_event_is_answered_whose_commit_met_a_failed_sync_of_the_checkpointer() {
    // The checkpointer's sync fails while the commit runs, and the commit's own sync succeeds.
    let place = DatabaseDirectory::new();
    let store = place.open();
    let (fail, failing) = std::sync::mpsc::channel::<()>();
    let (running, ended) = std::sync::mpsc::channel::<()>();
    let prepared = store.writer.slice(move |writer| {
        let round = move || {
            let _until_the_end_of_the_thread = &running;
            let _ = failing.recv();
            Err(failed_sync())
        };
        writer.checkpointer = Checkpointer::running(round).expect("starts");
        writer.checkpointer.ask();
        writer.conn.commit_hook(Some(move || {
            let _ = fail.send(());
            let _ = ended.recv();
            false
        }))
    });
    prepared.await.expect("prepares");
    let refused = verdict(&store, &Sender::plain(), "evt_1").await;
    assert!(matches!(refused, Err(StoreError::Unavailable(_))), "{refused:?}");
    writable_again(&store).await;
    // The recovery made the commit durable: its retry is the same event.
    let first = verdict(&store, &Sender::plain(), "evt_1").await.expect("answers").id();
    let second = verdict(&store, &Sender::plain(), "evt_1").await.expect("answers");
    assert!(matches!(&second, Verdict::Duplicate(known) if known.id == first), "{second:?}");
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_log_that_the_disk_lost_in_part_is_never_copied_into_the_file() {
    // The sync fails, and the file system drops the pages that it could not write. Here they belong to a
    // commit without a sync of its own. SQLite does not check them when it copies the log.
    let place = DatabaseDirectory::new();
    let store = place.open();
    for n in 0..20 {
        verdict(&store, &Sender::plain(), &format!("evt_{n}")).await.expect("accepts");
    }
    let log = place.directory().join("hapax.db-wal");
    let before = std::fs::read(place.file()).expect("reads");
    let failed: Result<(), _> = store
        .writer
        .slice(move |writer| {
            let end = |pages: u32| 32 + u64::from(pages) * (24 + u64::from(PAGE_BYTES));
            let synced = end(writer.wal_pages.load(Ordering::Relaxed));
            let tx = super::transaction::Transaction::begin_unsynced(&writer.conn)?;
            writer
                .conn
                .execute_batch("UPDATE hapax_meta SET value = value + 1 WHERE name = 'epoch'")?;
            tx.commit()?;
            let lost = end(writer.wal_pages.load(Ordering::Relaxed)) - synced;
            assert!(lost > 0, "the commit is in the log");
            let log = std::fs::File::options().write(true).open(log).expect("opens");
            log.write_all_at(&vec![0; lost as usize], synced).expect("loses them");
            Err(failed_sync())
        })
        .await;
    assert!(failed.is_err());
    let writer = store.writer.take_thread().expect("runs");
    let ended = tokio::task::spawn_blocking(|| writer.join());
    let ended = tokio::time::timeout(crate::harness::FOREVER, ended).await.expect("stops");
    ended.expect("ends").expect("no panic");
    let why = store.writable().expect_err("the store has stopped").to_string();
    assert!(why.contains("lost a part of hapax.db-wal"), "{why}");
    store.close().await;
    drop(store);
    assert!(std::fs::read(place.file()).expect("reads") == before, "the file was changed");
    let store = place.open();
    for n in 0..20 {
        let again = verdict(&store, &Sender::plain(), &format!("evt_{n}")).await.expect("answers");
        assert!(matches!(again, Verdict::Duplicate(_)), "{n}: {again:?}");
    }
    store.close().await;
    let conn = Connection::open(place.file()).expect("opens");
    let sound: String =
        conn.query_row("PRAGMA integrity_check", [], |row| row.get(0)).expect("checks");
    assert_eq!(sound, "ok");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_fails_under_a_rust_handler_is_no_verdict_on_its_job() {
    // A statement fails, and the closure hides the failure and reports success.
    let place = DatabaseDirectory::new();
    let made = Connection::open(place.file()).expect("opens");
    made.execute_batch("CREATE TABLE mine (n)").expect("the user's table");
    drop(made);
    let store = Arc::new(place.open());
    store.announce(vec![spec("fee")]).await.expect("announces");
    let event = Sender::plain().ingest_for(&body("evt_1"), noon(), noon(), &[job("fee")]);
    store.ingest(event).await.expect("accepts");
    let ask = ClaimAsk { handler: handler("fee"), limit: 1, worker: "w".into() };
    let claim = store.claim(ask).await.expect("claims").remove(0);
    let right = || store.right(&claim, crate::harness::FOREVER);
    fail_commits(&store).await;
    let hidden = right().commit(|db| {
        db.execute("INSERT INTO mine VALUES (1)", [])?;
        let _ = db.execute("INSERT INTO mine VALUES (zeroblob(200000))", []);
        Ok(None)
    });
    let error = hidden.await.expect_err("nothing was committed");
    assert!(matches!(error, TxError::Store(StoreError::Unavailable(_))), "{error:?}");
    assert_eq!(Failure::from(error).retry(), None, "no step of the schedule is used");
    writable_again(&store).await;
    // The claim still holds, and its right is valid for one commit.
    let effect = |db: &Db<'_>| {
        db.execute("INSERT INTO mine VALUES (1)", [])?;
        Ok(None)
    };
    right().commit(effect).await.expect("commits");
    assert_eq!(store.job(claim.job).await.expect("reads").expect("is there").phase, Phase::Done);
    let again = right().commit(effect).await;
    assert!(matches!(again, Err(TxError::FenceLost)), "{again:?}");
    store.close().await;
    let conn = Connection::open(place.file()).expect("opens");
    let rows: i64 =
        conn.query_row("SELECT count(*) FROM mine", [], |row| row.get(0)).expect("counts");
    assert_eq!(rows, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_of_a_row_reader_is_not_a_failure_of_the_disk() {
    // The closure queries another database, which fails. If the error counted as the store's own,
    // the writer would drop all memory and reopen a sound file, at every attempt.
    let world = World::on_disk();
    world.announce([spec("fee")]).await;
    world.accept("evt_1", &[job("fee")]).await;
    let claim = world.claim_one("fee").await;
    let elsewhere = || {
        let code = rusqlite::ffi::SQLITE_IOERR;
        rusqlite::Error::SqliteFailure(rusqlite::ffi::Error::new(code), None)
    };
    type Read = fn(&Db<'_>, rusqlite::Error) -> Result<(), super::DbError>;
    let readers: [Read; 2] = [
        |db, error| {
            let mut error = Some(error);
            db.query("SELECT 1", [], |_| error.take().map_or(Ok(()), Err)).map(drop)
        },
        |db, error| db.query_row("SELECT 1", [], |_| Err::<(), _>(error)).map(drop),
    ];
    for read in readers {
        let right = world.store.right(&claim, crate::harness::FOREVER);
        let failed = right.commit(move |db| {
            read(db, elsewhere())?;
            Ok(None)
        });
        let failed = failed.await;
        assert!(matches!(failed, Err(TxError::Failed(_))), "{failed:?}");
        assert!(world.store.writable().is_ok(), "the writer recovers from nothing");
    }
    // The error is not hidden from a handler that continues after it.
    let right = world.store.right(&claim, crate::harness::FOREVER);
    let gone_on = right.commit(move |db| {
        let read = db.query_row("SELECT 1", [], |_| Err::<(), _>(elsewhere()));
        Ok(Some(read.is_err().to_string()))
    });
    gone_on.await.expect("commits");
    assert_eq!(world.job("evt_1", "fee").await.result.as_deref(), Some("true"));
    world.store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rust_handler_that_was_overtaken_commits_nothing() {
    // The lease of a job ended and a newer version was applied. The fence of the job is still the
    // last one issued.
    let world = World::on_disk();
    world.announce([ordered("fee", OrderPolicy::Latest)]).await;
    world.accept("v1", &[placed("fee", "po_1", 1)]).await;
    let overtaken = world.claim_one("fee").await;
    world.pass(LEASE);
    world.accept("v2", &[placed("fee", "po_1", 2)]).await;
    assert_eq!(world.do_all("fee").await, ["v2"]);
    let late = world.store.right(&overtaken, crate::harness::FOREVER).nothing_to_do("late").await;
    assert!(matches!(late, Err(TxError::FenceLost)), "{late:?}");
    assert!(!world.is_done(&overtaken).await);
    world.store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_settle_that_publishes_leaves_no_savepoint_open() {
    // One transaction settles many jobs. A savepoint that stayed open would hold the pages of all jobs after
    // it. One job was overtaken, one publishes, and one reuses an id for another message.
    let world = World::on_disk();
    world.announce([ordered("fee", OrderPolicy::Latest)]).await;
    world.accept("late", &[placed("fee", "po_1", 1)]).await;
    let late = world.claim_one("fee").await;
    world.pass(LEASE);
    world.accept("newer", &[placed("fee", "po_1", 2)]).await;
    assert_eq!(world.do_all("fee").await, ["newer"]);
    world.accept("publishes", &[placed("fee", "po_2", 1)]).await;
    let publishes = world.claim_one("fee").await;
    world.accept("refused", &[placed("fee", "po_3", 1)]).await;
    let refused = world.claim_one("fee").await;
    let saying = |data: &str| {
        let message = NewMessage::new("t", serde_json::json!(data));
        let publish = vec![NewMessage { id: Some("m1".into()), ..message }];
        Outcome::Done { result: None, publish, answer: None }
    };
    let cases = [
        (late, saying("a"), Settlement::Lost),
        (publishes, saying("a"), Settlement::Recorded),
        (refused, saying("b"), Settlement::Recorded),
    ];
    for (claim, outcome, expected) in cases {
        let event = claim.event.key.event_id.clone();
        let settled = world.store.writer.act(move |writer| {
            let now = writer.now();
            let super::writer::Writer { conn, lanes, outbox, .. } = writer;
            let settled = lanes.settle(conn, outbox, claim.job, claim.fence, &outcome, now)?;
            Ok((settled, conn.execute_batch("RELEASE hapax_done").is_err()))
        });
        let (settled, is_released) = settled.await.expect("settles");
        assert_eq!(settled, expected, "{event}");
        assert!(is_released, "{event}: the savepoint is still open");
    }
    for (id, status) in
        [("late", Status::Received), ("publishes", Status::Processed), ("refused", Status::Failed)]
    {
        let found = world.store.event(&EventName::Theirs(id.into())).await.expect("reads");
        let is_so = matches!(&found, Lookup::One(event) if event.summary.status == status);
        assert!(is_so, "{id}: {found:?}");
    }
    world.store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pruning_does_not_count_as_a_foreground_request_while_events_and_jobs_do() {
    // A janitor that counts its own work as a request would pause for ever; one that ignores all
    // requests would delay acks.
    let world = World::on_disk();
    world.announce([spec("fee")]).await;
    let requests = || world.store.foreground_requests().expect("it counts");
    let before = requests();
    let horizon = Horizon { events_before: after(60), ..Horizon::forever() };
    world.store.prune(horizon, 10).await.expect("prunes");
    assert_eq!(requests(), before);
    world.accept("evt_1", &[job("fee")]).await;
    let accepted = requests();
    assert!(accepted > before);
    world.claim_one("fee").await;
    assert!(requests() > accepted);
    world.store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn old_messages_are_deleted_with_the_history_and_new_ones_stay() {
    // The id of a message makes a second publish have no effect: it must not be deleted before its
    // time.
    let world = World::on_disk();
    let store = &world.store;
    let publish =
        "INSERT INTO hapax_message (seq, tenant, id, type, fingerprint, created_at, deliveries)
                   VALUES (?1, 'default', 'old' || ?1, 't', zeroblob(16), ?2, 0)";
    for (id, at) in [(1, 10), (2, 20), (3, 30), (4, 600)] {
        let at = super::row::micros(after(at));
        let written = store.writer.act(move |writer| writer.conn.execute(publish, (id, at)));
        written.await.expect("writes");
    }
    let kept = async |before: i64| {
        let (events_before, message_ids_before) = (after(before), after(before));
        let horizon = Horizon { events_before, message_ids_before, ..Horizon::forever() };
        while store.prune(horizon.clone(), 2).await.expect("prunes") {}
        let ids = store.writer.slice(|writer| {
            let all = "SELECT group_concat(id, ' ') FROM hapax_message";
            writer.conn.query_row(all, [], |row| row.get::<_, String>(0))
        });
        ids.await.expect("reads")
    };
    assert_eq!(kept(10).await, "old1 old2 old3 old4");
    assert_eq!(kept(500).await, "old4");
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_takes_memory_for_the_keys_that_are_kept_and_not_for_all_that_ever_were() {
    // Years of events came and were deleted. Their filter would need more memory than any machine has.
    let place = DatabaseDirectory::new();
    place.open().close().await;
    let conn = Connection::open(place.file()).expect("opens");
    conn.execute_batch(
        "UPDATE hapax_meta SET value = 1000000000000 WHERE name IN ('merged_through', 'last_seq')",
    )
    .expect("writes");
    drop(conn);
    let sender = Sender::plain();
    let store = place.open();
    let id = verdict(&store, &sender, "evt_1").await.expect("accepts").id();
    store.close().await;
    drop(store);
    let store = place.open();
    let again = verdict(&store, &sender, "evt_1").await.expect("answers");
    assert!(matches!(&again, Verdict::Duplicate(known) if known.id == id), "{again:?}");
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_left_of_an_event_whose_key_was_pruned() {
    // The body of an event is deleted, then a copy arrives and is counted, then the key is deleted. The row
    // of the count must be deleted too.
    let place = DatabaseDirectory::new();
    let store = place.open();
    let sender = Sender::plain();
    verdict(&store, &sender, "evt_1").await.expect("accepts");
    let horizon =
        |keys_before| Horizon { events_before: after(60), keys_before, ..Horizon::forever() };
    store.prune(horizon(Vec::new()), 10).await.expect("prunes");
    let copy = verdict(&store, &sender, "evt_1").await.expect("answers");
    assert!(matches!(copy, Verdict::Duplicate(_)), "{copy:?}");
    let mut conflict = body("evt_1");
    conflict.push(' ');
    store.ingest(sender.ingest(&conflict)).await.expect("answers");
    let keys = vec![(hapax_core::SourceName::new("shop"), after(60))];
    store.prune(horizon(keys), 10).await.expect("prunes");
    store.close().await;
    drop(store);
    let conn = Connection::open(place.file()).expect("opens");
    for table in ["hapax_event", "hapax_arrival", "hapax_copy"] {
        let count = format!("SELECT count(*) FROM {table}");
        let left: i64 = conn.query_row(&count, [], |row| row.get(0)).expect("counts");
        assert_eq!(left, 0, "{table}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_of_pruned_events_store_neither_bodies_nor_addresses_and_go_with_their_tenant() {
    // The body of an event is deleted, then a copy and a conflict arrive. Their rows would stay for as long as
    // the key, and the deletion of the tenant would not find them.
    let place = DatabaseDirectory::new();
    let store = place.open();
    let sender = Sender::of("acme", "shop");
    for id in ["pruned", "whole"] {
        verdict(&store, &sender, id).await.expect("accepts");
        if id == "pruned" {
            let horizon = Horizon { events_before: after(60), ..Horizon::forever() };
            store.prune(horizon, 10).await.expect("prunes");
        }
    }
    let conflicts = async || {
        for id in ["pruned", "whole"] {
            let copy = verdict(&store, &sender, id).await.expect("answers");
            assert!(matches!(copy, Verdict::Duplicate(_)), "{copy:?}");
            store.ingest(sender.ingest(&format!("{} ", body(id)))).await.expect("answers");
        }
        store.flush_copies().await;
    };
    let conn = Connection::open(place.file()).expect("opens");
    let count = |what: &str| -> i64 {
        conn.query_row(&format!("SELECT {what}"), [], |row| row.get(0)).expect("counts")
    };
    conflicts().await;
    assert_eq!(count("count(*) FROM hapax_arrival"), 2, "those of the whole event");
    assert_eq!(count("sum(only_counted) FROM hapax_copy"), 2, "those of the pruned event");
    assert_eq!(count("sum(conflicts) FROM hapax_copy"), 2);
    let by = Action { who: "ops".into(), reason: None, at: noon() };
    store.delete_tenant(Tenant::new("acme"), by).await.expect("deletes");
    while store.erase(1).await.expect("erases") {}
    let deletion =
        store.tenant_deletion(Tenant::new("acme")).await.expect("reads").expect("is there");
    assert_eq!(deletion.events, 1, "the whole event");
    for table in ["hapax_arrival", "hapax_copy", "hapax_body"] {
        assert_eq!(count(&format!("count(*) FROM {table}")), 0, "{table}");
    }
    // Both events are still recognised.
    conflicts().await;
    assert_eq!(count("count(*) FROM hapax_arrival"), 0);
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_of_pruned_events_are_filled_again_though_their_keys_stay() {
    // Several rounds of events, each pruned before the next one arrives. Only the narrow rows may
    // add to the file, and they are a small part of it.
    let place = DatabaseDirectory::new();
    let store = place.open();
    let sender = Sender::plain();
    let mut pages = Vec::new();
    for round in 0..8 {
        let filler = "x".repeat(2_000);
        for n in 0..200 {
            let text = body(&format!("evt_{round}_{n}"));
            let text = text.replace("10000", &format!("\"{filler}\""));
            let verdicts = store.ingest(sender.ingest(&text)).await.expect("ingests");
            assert!(matches!(verdicts[..], [Verdict::Accepted(_)]), "{verdicts:?}");
        }
        let horizon = Horizon { events_before: after(60), ..Horizon::forever() };
        while store.prune(horizon.clone(), 50).await.expect("prunes") {}
        let (send, answer) = tokio::sync::oneshot::channel();
        store.writer.tamper(|conn| {
            let count = conn.query_row("PRAGMA page_count", [], |row| row.get::<_, i64>(0));
            let _ = send.send(count.expect("counts"));
        });
        pages.push(answer.await.expect("an answer"));
    }
    // A round has about 50 pages of bodies, and 4 of narrow rows.
    let growth = pages[7] - pages[1];
    assert!(growth < 6 * 10, "six rounds added {growth} pages: {pages:?}");
    store.close().await;
}

/// A statement whose parameters are all 1.
fn with_values(sql: &str) -> String {
    (1..10).fold(sql.to_owned(), |sql, n| sql.replace(&format!("?{n}"), "1"))
}

#[tokio::test]
async fn a_claim_is_found_by_an_index_whatever_the_backlog() {
    // A scan or a sort would make every claim slower with each job that waits.
    let place = DatabaseDirectory::new();
    let store = place.open();
    let (send, answer) = tokio::sync::oneshot::channel();
    store.writer.tamper(|conn| {
        let plan = |sql: &str| -> Vec<String> {
            let mut plan = conn.prepare(&format!("EXPLAIN QUERY PLAN {sql}")).expect("plans");
            let rows = plan.query_map([], |row| row.get(3)).expect("plans");
            rows.collect::<Result<_, _>>().expect("plans")
        };
        let _ = send.send([
            plan("SELECT * FROM hapax_job WHERE lane = 1 AND state = 0 AND due_at <= 5 ORDER BY due_at, event_seq LIMIT 64"),
            plan("SELECT * FROM hapax_job WHERE lane = 1 AND state = 1 AND due_at <= 5"),
            plan("SELECT min(due_at) FROM hapax_job WHERE lane = 1 AND state = 0 AND due_at > 5"),
            plan(&super::jobs::overdue_sql().replace("?1", "1").replace("?2", "5").replace("?3", "64")),
            plan("SELECT event_seq FROM hapax_job WHERE lane = 1 AND resource = 'a' AND state = 5 ORDER BY position DESC, event_seq DESC LIMIT 1"),
            plan("SELECT event_seq FROM hapax_job WHERE lane = 1 AND resource = 'a' AND state = 6 ORDER BY position, event_seq LIMIT 1"),
            plan("SELECT 1 FROM hapax_job WHERE lane = 1 AND resource = 'a' AND state = 1 AND exclusive = 1"),
            plan(&with_values(include_str!("sql/lease_jobs.sql"))),
            plan(&with_values(include_str!("sql/jobs_done.sql"))),
        ]);
    });
    let [ready, leased, next, overdue, newest, parked, busy, lease, done] =
        answer.await.expect("an answer");
    for one in [&lease, &done] {
        assert!(one[0].contains("PRIMARY KEY (event_seq=? AND lane=?)"), "{one:?}");
    }
    assert!(busy[0].contains("INDEX hapax_job_busy (lane=? AND resource=?)"), "{busy:?}");
    assert!(
        overdue[0].contains("USING INDEX hapax_job_due (state=? AND lane=? AND due_at<?)"),
        "{overdue:?}"
    );
    assert!(overdue.iter().all(|step| !step.contains("TEMP B-TREE")), "no sort: {overdue:?}");
    assert!(
        overdue.iter().any(|step| step.contains("busy USING INDEX hapax_job_due")),
        "{overdue:?}"
    );
    assert!(
        newest[0].contains("INDEX hapax_job_waiting (state=? AND lane=? AND resource=?)"),
        "{newest:?}"
    );
    assert!(
        parked[0].contains("INDEX hapax_job_waiting (state=? AND lane=? AND resource=?)"),
        "{parked:?}"
    );
    assert_eq!((newest.len(), parked.len()), (1, 1), "no sort: {newest:?} {parked:?}");
    assert!(
        ready[0].contains("USING INDEX hapax_job_due (state=? AND lane=? AND due_at<?)"),
        "{ready:?}"
    );
    assert_eq!(ready.len(), 1, "no sort: {ready:?}");
    assert!(
        leased[0].contains("USING INDEX hapax_job_due (state=? AND lane=? AND due_at<?)"),
        "{leased:?}"
    );
    assert!(next[0].contains("INDEX hapax_job_due (state=? AND lane=? AND due_at>?)"), "{next:?}");
    store.close().await;
}

#[tokio::test]
async fn lanes_and_lists_of_rare_states_are_read_from_indexes_alone() {
    // A query about a million jobs must not read a million rows, least of all those of done jobs.
    let place = DatabaseDirectory::new();
    let store = place.open();
    let (send, answer) = tokio::sync::oneshot::channel();
    store.writer.tamper(|conn| {
        let plan = |sql: &str| -> Vec<String> {
            let mut plan = conn.prepare(&format!("EXPLAIN QUERY PLAN {sql}")).expect("plans");
            let rows = plan.query_map([], |row| row.get(3)).expect("plans");
            rows.collect::<Result<_, _>>().expect("plans")
        };
        let lane = |condition: &str| {
            plan(&format!("SELECT 1 FROM hapax_job WHERE lane = 1 AND {condition} LIMIT 9"))
        };
        let candidates = |filter: EventFilter| {
            let found = super::lists::candidates(conn, &filter).expect("reads");
            let Candidates::Numbers { sql, .. } = found else { panic!("reads all: {filter:?}") };
            plan(&sql.replace("?1", "9").replace("?2", "1"))
        };
        let rare = [
            Status::Dead,
            Status::Held,
            Status::Stale,
            Status::Failed,
            Status::Review,
            Status::Discarded,
        ];
        let rare = rare.map(|status| {
            candidates(EventFilter { status: Some(status), ..EventFilter::default() })
        });
        let unfinished_since = Some(noon());
        let unfinished = candidates(EventFilter { unfinished_since, ..EventFilter::default() });
        let deliveries = [DeliveryStatus::Dead, DeliveryStatus::Failed].map(|status| {
            let filter = DeliveryFilter { status: Some(status), ..DeliveryFilter::default() };
            let (sql, _) = super::outbox::delivery_statement(conn, &filter).expect("reads");
            plan(&sql.replace("?1", "1").replace("?2", "9"))
        });
        let lanes = super::stats::CONDITIONS.map(|(_, condition)| lane(condition));
        let _ = send.send((lanes, rare, unfinished, deliveries));
    });
    let (lanes, rare, unfinished, deliveries) = answer.await.expect("an answer");
    // The index must have the order of the list: a sort would read all rows for every page.
    for plan in rare.iter().chain(&deliveries) {
        let plan = plan.join("\n");
        assert!(!plan.contains("TEMP B-TREE"), "{plan}");
        let indexes =
            ["hapax_job_listed", "hapax_job_failed", "_delivery_dead", "_delivery_failed"];
        assert!(indexes.iter().any(|index| plan.contains(index)), "{plan}");
    }
    for plan in &lanes {
        assert!(plan[0].contains("COVERING INDEX hapax_job_"), "{plan:?}");
        assert!(plan[0].contains("(state=? AND lane=?)"), "{plan:?}");
    }
    let plan = unfinished.join("\n");
    for index in ["job_due", "job_listed", "event_review"] {
        assert!(plan.contains(&format!("INDEX hapax_{index}")), "{index}\n{plan}");
    }
    for line in unfinished.iter().filter(|line| line.starts_with("SCAN hapax")) {
        assert!(line.contains("INDEX"), "{line}");
    }
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_does_not_match_its_hash_reaches_no_handler() {
    // One bit of a stored body flips: before an external worker claims, before SQL runs, and
    // between claim and run.
    let place = DatabaseDirectory::new();
    let made = Connection::open(place.file()).expect("opens");
    made.execute_batch("CREATE TABLE mine (body)").expect("the user's table");
    drop(made);
    let store = place.open();
    store.announce(vec![spec("call"), spec("sql"), spec("later")]).await.expect("announces");
    for (id, name) in [("evt_1", "call"), ("evt_2", "sql"), ("evt_3", "later"), ("evt_4", "sql")] {
        let event = Sender::plain().ingest_for(&body(id), noon(), noon(), &[job(name)]);
        store.ingest(event).await.expect("accepts");
    }
    // A process that has just committed an event still has its body.
    store.close().await;
    let store = place.open();
    store.announce(vec![spec("call"), spec("sql"), spec("later")]).await.expect("announces");
    let damage = |seqs: &'static str| {
        store.writer.tamper(move |conn| {
            let bit = format!(
                "UPDATE hapax_body SET body = CAST(replace(CAST(body AS TEXT), '10000', '10001') AS BLOB)
                 WHERE seq IN ({seqs})"
            );
            assert!(conn.execute(&bit, []).expect("changes") > 0);
        });
    };
    damage("1, 2");
    let ask = |name: &str| ClaimAsk { handler: handler(name), limit: 10, worker: "w".into() };
    assert!(store.claim(ask("call")).await.expect("claims").is_empty());
    let statement = "INSERT INTO mine VALUES (:body)";
    let program = Arc::new(SqlProgram::parse(statement, Dialect::Sqlite).expect("parses"));
    let timeout = crate::harness::FOREVER;
    let sql = SqlAsk { claim: ask("sql"), program: Arc::clone(&program), timeout };
    let ran = store.run_sql(sql).await.expect("runs");
    assert_eq!((ran.done, ran.failed), (1, 0), "the sound one: {ran:?}");
    let claim = store.claim(ask("later")).await.expect("claims").remove(0);
    damage("3");
    let run = SqlRun { job: claim.job, fence: claim.fence, program, timeout, current: None };
    let ran = store.run_claimed(run).await.expect("answers");
    assert!(matches!(&ran, Ran::Failed(why) if why == DAMAGED_BODY), "{ran:?}");
    for (id, dead) in [("evt_1", true), ("evt_2", true), ("evt_3", true), ("evt_4", false)] {
        let Lookup::One(event) = store.event(&EventName::Theirs(id.into())).await.expect("reads")
        else {
            panic!("{id} is gone")
        };
        assert_eq!(event.jobs[0].phase == Phase::Dead, dead, "{id}");
        assert_eq!(event.jobs[0].error.as_deref(), dead.then_some(DAMAGED_BODY), "{id}");
    }
    let seen = Connection::open(place.file()).expect("opens");
    let effects: i64 = seen.query_row("SELECT count(*) FROM mine", [], |row| row.get(0)).unwrap();
    assert_eq!(effects, 1);
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_has_the_same_event_from_memory_and_from_the_file() {
    // The first claim after a commit reads nothing. A field that it left out or mixed up would reach a handler.
    let world = World::on_disk();
    let store = &world.store;
    store.announce(vec![spec("one"), spec("two")]).await.expect("announces");
    for id in ["evt_1", "evt_2", "evt_3"] {
        let jobs = [job("one"), job("two")];
        let event = Sender::plain().ingest_for(&body(id), noon(), noon(), &jobs);
        store.ingest(event).await.expect("accepts");
    }
    store.writer.tamper(|conn| {
        let changed = conn.execute("UPDATE hapax_body SET headers = 'read'", []);
        assert_eq!(changed.expect("changes"), 3);
    });
    let events = async |name: &str| -> Vec<ClaimedEvent> {
        let ask = ClaimAsk { handler: handler(name), limit: 10, worker: "w".into() };
        let claims = store.claim(ask).await.expect("claims");
        claims.into_iter().map(|claim| claim.event).collect()
    };
    let (known, read) = (events("one").await, events("two").await);
    assert_eq!((known.len(), read.len()), (3, 3));
    for (known, read) in known.into_iter().zip(read) {
        assert_eq!((&*known.headers, &*read.headers), ("content-type: application/json", "read"));
        assert_eq!(ClaimedEvent { headers: known.headers.clone(), ..read }, known);
    }
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_a_trigger_of_the_user_publishes_is_published_with_done() {
    // The statement itself does not name hapax_publish. The second slice does not compile the statement
    // again.
    let world = World::on_disk();
    let place = world.place.as_ref().expect("on a disk");
    let made = Connection::open(place.file()).expect("opens");
    made.execute_batch(
        "CREATE TABLE mine (event_id TEXT);
         CREATE TRIGGER mine_added AFTER INSERT ON mine BEGIN
             INSERT INTO hapax_publish (type, data, id) VALUES ('added', '{}', NEW.event_id);
         END",
    )
    .expect("the user's table");
    let store = &world.store;
    store.announce(vec![spec("fee")]).await.expect("announces");
    let statement = "INSERT INTO mine VALUES (:event_id)";
    let program = Arc::new(SqlProgram::parse(statement, Dialect::Sqlite).expect("parses"));
    for (ids, messages) in [(["evt_1", "evt_2"], 2), (["evt_3", "evt_4"], 4)] {
        for id in ids {
            let event = Sender::plain().ingest_for(&body(id), noon(), noon(), &[job("fee")]);
            store.ingest(event).await.expect("accepts");
        }
        let claim = ClaimAsk { handler: handler("fee"), limit: 10, worker: "w".into() };
        let (program, timeout) = (Arc::clone(&program), crate::harness::FOREVER);
        let ran = store.run_sql(SqlAsk { claim, program, timeout }).await.expect("runs");
        assert_eq!((ran.done, ran.failed), (2, 0), "{ran:?}");
        let sql = "SELECT count(*) FROM hapax_message WHERE event_seq IS NOT NULL";
        let found: i64 = made.query_row(sql, [], |row| row.get(0)).expect("reads");
        assert_eq!(found, messages);
    }
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_failed_keeps_no_sql_job_from_its_next_attempt() {
    // The claim is committed and the commit of the effects fails. Waiting for the end of the lease
    // would make a synchronous sender wait as well.
    let world = World::on_disk();
    let place = world.place.as_ref().expect("on a disk");
    let made = Connection::open(place.file()).expect("opens");
    made.execute_batch("CREATE TABLE mine (filling)").expect("the user's table");
    drop(made);
    let store = &world.store;
    store.announce(vec![spec("fee")]).await.expect("announces");
    for id in ["evt_1", "evt_2"] {
        let event = Sender::plain().ingest_for(&body(id), noon(), noon(), &[job("fee")]);
        store.ingest(event).await.expect("accepts");
    }
    let statement = "INSERT INTO mine VALUES (zeroblob(200000) || :event_id)";
    let program = Arc::new(SqlProgram::parse(statement, Dialect::Sqlite).expect("parses"));
    let ask = || {
        let claim = ClaimAsk { handler: handler("fee"), limit: 10, worker: "w".into() };
        let (program, timeout) = (Arc::clone(&program), crate::harness::FOREVER);
        store.run_sql(SqlAsk { claim, program, timeout })
    };
    fail_commits(store).await;
    let failed = ask().await;
    assert!(matches!(failed, Err(StoreError::Unavailable(_))), "{failed:?}");
    writable_again(store).await;
    // No time has passed.
    let ran = ask().await.expect("runs");
    assert_eq!((ran.done, ran.failed), (2, 0), "{ran:?}");
    let job = world.job("evt_1", "fee").await;
    let (attempt, lost) = (job.progress.attempt, job.progress.lost);
    assert_eq!((attempt, lost, job.attempts.len()), (1, 0, 1), "the failure was not the job's");
    let seen = Connection::open(place.file()).expect("opens");
    let effects: i64 = seen.query_row("SELECT count(*) FROM mine", [], |row| row.get(0)).unwrap();
    assert_eq!(effects, 2);
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_are_answered_while_the_writer_is_busy_and_all_else_waits_for_it() {
    // A retry storm must not queue behind a long batch. A lookup that runs concurrently with the
    // writer must neither take a conflict for a duplicate nor lose one.
    let place = DatabaseDirectory::new();
    let store = place.open();
    let sender = Sender::plain();
    let mut ids = Vec::new();
    for n in 0..100 {
        ids.push(verdict(&store, &sender, &format!("evt_{n}")).await.expect("accepts").id());
    }
    store.close().await;
    // After a restart memory knows no event, so the file answers.
    let store = place.open();
    let (hold, held) = std::sync::mpsc::channel::<()>();
    store.writer.tamper(move |_| {
        let _ = held.recv();
    });
    let other = body("evt_7").replace("10000", "1");
    let mut conflict = Box::pin(store.ingest(sender.ingest(&other)));
    let mut new = Box::pin(store.ingest(sender.ingest(&body("new"))));
    for (n, id) in ids.iter().enumerate() {
        for _ in 0..2 {
            let copy = verdict(&store, &sender, &format!("evt_{n}")).await.expect("answers");
            assert!(matches!(&copy, Verdict::Duplicate(known) if known.id == *id), "{copy:?}");
        }
    }
    std::future::poll_fn(|context| {
        assert!(conflict.as_mut().poll(context).is_pending());
        assert!(new.as_mut().poll(context).is_pending());
        Poll::Ready(())
    })
    .await;
    drop(hold);
    let conflict = conflict.await.expect("answers").remove(0);
    assert!(matches!(&conflict, Verdict::Conflict(known) if known.id == ids[7]), "{conflict:?}");
    assert!(matches!(new.await.expect("accepts")[0], Verdict::Accepted(_)));
    store.flush_copies().await;
    for (n, id) in ids.iter().enumerate() {
        let Lookup::One(found) = store.event(&EventName::Ours(*id)).await.expect("reads") else {
            panic!("event {n} is gone");
        };
        let conflicts = u64::from(n == 7);
        assert_eq!((found.summary.arrivals, found.summary.conflicts), (3 + conflicts, conflicts));
        assert_eq!(found.arrivals.len() as u64, 3 + conflicts);
    }
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_copy_is_answered_while_writing_fails() {
    // The file still shows the event, but the disk under it may have lost what came after.
    let place = DatabaseDirectory::new();
    let store = place.open();
    let sender = Sender::plain();
    let id = verdict(&store, &sender, "evt_1").await.expect("accepts").id();
    store.writer.tamper(refuse_commits);
    let failed = verdict(&store, &sender, "evt_2").await;
    assert!(matches!(failed, Err(StoreError::Unavailable(_))), "{failed:?}");
    while store.writable().is_ok() {
        tokio::task::yield_now().await;
    }
    let copy = verdict(&store, &sender, "evt_1").await;
    assert!(matches!(copy, Err(StoreError::Unavailable(_))), "{copy:?}");
    store.writer.tamper(|conn| conn.commit_hook(None::<fn() -> bool>).expect("hooks"));
    writable_again(&store).await;
    let copy = verdict(&store, &sender, "evt_1").await.expect("answers");
    assert!(matches!(&copy, Verdict::Duplicate(known) if known.id == id), "{copy:?}");
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replayed_event_is_not_answered_as_it_was_before() {
    // A reader reads "processed", an operator replays the event, and the reader adds its old answer
    // to memory: copies race with replays.
    let world = World::on_disk();
    world.announce([spec("fee")]).await;
    let id = world.accept("evt_1", &[job("fee")]).await;
    let over = || Outcome::Done { result: None, publish: Vec::new(), answer: None };
    world.settle(&world.claim_one("fee").await, over()).await;
    let store = Arc::clone(&world.store);
    for _ in 0..50 {
        let asking: Vec<_> = (0..4)
            .map(|_| {
                let store = Arc::clone(&store);
                tokio::spawn(async move { verdict(&store, &Sender::plain(), "evt_1").await })
            })
            .collect();
        world.replay(id, &[job("fee")], Replay::Force).await;
        for one in asking {
            one.await.expect("no panic").expect("answers");
        }
        let copy = verdict(&store, &Sender::plain(), "evt_1").await.expect("answers");
        let Verdict::Duplicate(known) = &copy else { panic!("{copy:?}") };
        assert!(!known.status.is_final(), "{copy:?}");
        world.settle(&world.claim_one("fee").await, over()).await;
    }
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_does_not_wait_for_a_disk_that_hangs() {
    // Copies give way to a commit of new events. Here that commit does not end while the copy waits
    // for its answer.
    let place = DatabaseDirectory::new();
    let store = Arc::new(place.open());
    let sender = Sender::plain();
    let id = verdict(&store, &sender, "evt_1").await.expect("accepts").id();
    let (began, begins) = std::sync::mpsc::channel::<()>();
    let (hold, held) = std::sync::mpsc::channel::<()>();
    store.writer.tamper(move |conn| {
        let hook = move || {
            let _ = began.send(());
            let _ = held.recv();
            false
        };
        conn.commit_hook(Some(hook)).expect("a hook");
    });
    let new = {
        let store = Arc::clone(&store);
        tokio::spawn(async move { verdict(&store, &Sender::plain(), "evt_2").await })
    };
    tokio::task::spawn_blocking(move || begins.recv()).await.expect("ends").expect("a commit");
    let copy = verdict(&store, &sender, "evt_1").await.expect("answers");
    assert!(matches!(&copy, Verdict::Duplicate(known) if known.id == id), "{copy:?}");
    assert!(!new.is_finished(), "the commit was not held");
    drop(hold);
    assert!(matches!(new.await.expect("no panic").expect("accepts"), Verdict::Accepted(_)));
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_that_wait_for_a_disk_that_hangs_leave_the_queue_to_new_events() {
    // Each copy beyond the bound asks for a flush: while the disk hangs, these requests must not fill the
    // queue of new events.
    let place = DatabaseDirectory::new();
    let store = place.open();
    let sender = Sender::plain();
    verdict(&store, &sender, "evt_1").await.expect("accepts");
    let (began, begins) = std::sync::mpsc::channel::<()>();
    let (hold, held) = std::sync::mpsc::channel::<()>();
    store.writer.tamper(move |_| {
        let _ = began.send(());
        let _ = held.recv();
    });
    begins.recv().expect("the writer hangs");
    let copy = sender.ingest(&body("evt_1"));
    // Copies of other events, which memory answers just like this one.
    for other in 0..COPIES_WAITING_MAX as i64 {
        store.shared.copies.note(1_000 + other, &copy.via);
    }
    for _ in 0..=WAITING_MAX {
        let verdict = store.ingest(copy.clone()).await.expect("answers").remove(0);
        assert!(matches!(verdict, Verdict::Duplicate(_)), "{verdict:?}");
    }
    let mut new = Box::pin(store.ingest(sender.ingest(&body("new"))));
    std::future::poll_fn(|context| {
        assert!(new.as_mut().poll(context).is_pending(), "the queue is full");
        Poll::Ready(())
    })
    .await;
    drop(hold);
    assert!(matches!(new.await.expect("accepts")[0], Verdict::Accepted(_)));
    store.flush_copies().await;
    let found = store.event(&EventName::Theirs("evt_1".into())).await.expect("reads");
    let Lookup::One(found) = found else { panic!("{found:?}") };
    assert_eq!(found.summary.arrivals, 2 + WAITING_MAX as u64);
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_stores_every_event_and_knows_those_that_it_has_not_inserted_yet() {
    // The rows of a batch are inserted many at a time. A copy or a conflict in the same batch must
    // still find the row of its event, and no row may get the content of its neighbour.
    let place = DatabaseDirectory::new();
    let store = place.open();
    let sender = Sender::plain();
    let (hold, held) = std::sync::mpsc::channel::<()>();
    store.writer.tamper(move |_| {
        let _ = held.recv();
    });
    let send = |body: String| Box::pin(store.ingest(sender.ingest(&body)));
    let mut sent: Vec<_> = (0..23).map(|n| send(body(&format!("evt_{n}")))).collect();
    sent.push(send(body("evt_5")));
    sent.push(send(body("evt_6").replace("10000", "1")));
    sent.extend((23..47).map(|n| send(body(&format!("evt_{n}")))));
    std::future::poll_fn(|context| {
        for one in &mut sent {
            assert!(one.as_mut().poll(context).is_pending());
        }
        Poll::Ready(())
    })
    .await;
    drop(hold);
    let mut ids = Vec::new();
    for (n, one) in sent.into_iter().enumerate() {
        match (n, one.await.expect("answers").remove(0)) {
            (23, Verdict::Duplicate(known)) => assert_eq!(known.id, ids[5]),
            (24, Verdict::Conflict(known)) => assert_eq!(known.id, ids[6]),
            (_, Verdict::Accepted(id)) => ids.push(id),
            (_, other) => panic!("{n}: {other:?}"),
        }
    }
    assert_eq!(ids.len(), 47);
    for (n, id) in ids.iter().enumerate() {
        let Lookup::One(found) = store.event(&EventName::Ours(*id)).await.expect("reads") else {
            panic!("event {n} is gone");
        };
        assert_eq!(found.summary.event_id, format!("evt_{n}"));
        assert_eq!(found.body, body(&format!("evt_{n}")));
    }
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_index_of_values_that_failed_halfway_is_completed_and_goes_with_its_events() {
    // A mark that covered events whose rows are missing would hide them for ever. Rows that outlived their events
    // would keep what retention deletes.
    const EVENTS: i64 = 1_000;
    let world = World::on_disk();
    for n in 0..EVENTS {
        world.accept(&format!("evt_{n}"), &[]).await;
    }
    let pointer = Pointer::parse("/amount").expect("a pointer");
    let fields = Arc::new(SearchFields::new([(SourceName::new("shop"), vec![pointer])]));
    let store = &world.store;
    let count = async |table: &'static str| -> i64 {
        let sql = format!("SELECT count(*) FROM {table}");
        store.readers.run(move |conn| conn.query_row(&sql, [], |row| row.get(0))).await.unwrap()
    };
    fail_commits(store).await;
    let failed = store.index_values(Arc::clone(&fields), 10_000).await;
    assert!(matches!(failed, Err(StoreError::Unavailable(_))), "{failed:?}");
    assert_eq!(count("hapax_search_mark").await, 0);
    writable_again(store).await;
    while store.index_values(Arc::clone(&fields), 10_000).await.expect("indexes") {}
    assert_eq!(count("hapax_search_value").await, EVENTS);
    // Nothing is left to do.
    assert!(!store.index_values(Arc::clone(&fields), 10_000).await.expect("indexes"));
    world.pass(1_000);
    let horizon = Horizon { events_before: after(500), ..Horizon::forever() };
    while store.prune(horizon.clone(), 100).await.expect("prunes") {}
    assert_eq!((count("hapax_body").await, count("hapax_search_value").await), (0, 0));
}
