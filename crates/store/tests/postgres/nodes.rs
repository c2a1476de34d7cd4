//! Two nodes decide about the same event at the same instant, each with its own clock.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::Timestamp;
use hapax_core::store::{EventName, Ingest, Inspect as _, Lookup, Store, Verdict};

use crate::harness::{Sender, after, body, noon};
use crate::{Base, spec, until};

const NOTICE: &str = r#"{"type":"t","resource":"RESOURCE"}"#;

async fn verdict(store: &impl Store, ingest: Ingest) -> Verdict {
    store.ingest(ingest).await.expect("ingests").remove(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn equal_notices_on_both_sides_of_an_edge_are_one_event_on_two_nodes() {
    // The clocks of two nodes differ, so that one notification has a key in each span at the same
    // instant. Neither node can see an uncommitted row of the other.
    let base = Base::new("edge_race", spec(3)).await;
    let other = Base::node(&base.url, spec(3)).await;
    let sender = Sender::derived(Some(Duration::from_secs(600)));
    let (mut tasks, mut accepted) = (Vec::new(), 0);
    for n in 0..200 {
        for (node, now) in [(&base.store, after(599)), (&other, after(601))] {
            let body = NOTICE.replace("RESOURCE", &format!("r{n}"));
            let (store, ingest) = (Arc::clone(node), sender.ingest_at(&body, now, now));
            tasks.push(tokio::spawn(async move { verdict(&*store, ingest).await }));
        }
    }
    for task in tasks {
        match task.await.expect("no panic") {
            Verdict::Accepted(_) => accepted += 1,
            Verdict::Duplicate(_) => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(accepted, 200);
    other.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_notice_at_an_edge_waits_for_both_neighbours() {
    // Another transaction is deciding about the span before, or the span after, and is slow.
    let base = Base::new("edge_lock", spec(3)).await;
    let sender = Sender::derived(Some(Duration::from_secs(600)));
    let waiting = "SELECT count(*)::text FROM pg_locks WHERE locktype = 'advisory' AND NOT granted \
                   AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
    let at =
        |now: Timestamp, name: &str| sender.ingest_at(&NOTICE.replace("RESOURCE", name), now, now);
    for (name, beside) in [("before", after(300)), ("after", after(1_500))] {
        let hash = at(beside, name).receipts[0].key_hash();
        let lock = i64::from_be_bytes(hash.0[..8].try_into().expect("eight bytes"));
        let mut sql = crate::connect(&base.url).await;
        let tx = sql.transaction().await.expect("begins");
        tx.execute("SELECT pg_advisory_xact_lock($1)", &[&lock]).await.expect("locks");
        let (store, ingest) = (Arc::clone(&base.store), at(after(900), name));
        let decided = tokio::spawn(async move { verdict(&*store, ingest).await });
        until("it waits", async || {
            assert!(!decided.is_finished(), "{name}: it was decided beside the other transaction");
            base.one(waiting).await == "1"
        })
        .await;
        tx.commit().await.expect("commits");
        let decided = decided.await.expect("no panic");
        assert!(matches!(decided, Verdict::Accepted(_)), "{decided:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn one_signature_under_many_ids_is_accepted_once_on_two_nodes() {
    // A captured request is sent to both nodes at once, under different ids.
    let base = Base::new("guard_race", spec(3)).await;
    let other = Base::node(&base.url, spec(3)).await;
    let (given, derived) = (Sender::signing_again(), Sender::one_time_token());
    for round in 0..20 {
        let mut tasks = Vec::new();
        for n in 0..16 {
            let node = if n % 2 == 0 { &base.store } else { &other };
            let (query, id) = (format!("?{round}"), format!("{round}-{n}"));
            for ingest in [
                given.ingest_signed(&id, &query, noon(), noon(), &[]),
                derived.ingest_token(&format!("t{round}"), &id, "", &[]),
            ] {
                let store = Arc::clone(node);
                tasks.push(tokio::spawn(async move { verdict(&*store, ingest).await }));
            }
        }
        let (mut accepted, mut reviews, mut copies) = (0, 0, 0);
        for task in tasks {
            match task.await.expect("no panic") {
                Verdict::Accepted(_) => accepted += 1,
                Verdict::Review(_) => reviews += 1,
                Verdict::Duplicate(_) => copies += 1,
                other @ Verdict::Conflict(_) => panic!("{other:?}"),
            }
        }
        assert_eq!((accepted, reviews, copies), (2, 15, 15), "round {round}");
    }
    other.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_retry_storm_on_another_node_counts_every_copy_and_keeps_conflicts() {
    // A node gets copies of events that it never saw, with conflicts and new events among them. A
    // lookup before the insert must not confuse them, and no count may be lost.
    let base = Base::new("retry_storm", spec(3)).await;
    let other = Base::node(&base.url, spec(3)).await;
    let sender = Sender::plain();
    let known: Vec<String> = (0..400).map(|n| body(&format!("evt_{n}"))).collect();
    for one in &known {
        let accepted = verdict(&*base.store, sender.ingest(one)).await;
        assert!(matches!(accepted, Verdict::Accepted(_)), "{accepted:?}");
    }
    let mut tasks = Vec::new();
    for round in 0..3 {
        for (n, one) in known.iter().enumerate() {
            let store = Arc::clone(&other);
            let (what, bytes) = match n % 8 {
                0 if round == 1 => ("conflict", one.replace("10000", "1")),
                1 => ("accepted", body(&format!("new_{round}_{n}"))),
                _ => ("duplicate", one.clone()),
            };
            let ingest = sender.ingest(&bytes);
            let task = tokio::spawn(async move { (what, verdict(&*store, ingest).await) });
            tasks.push(task);
        }
    }
    for task in tasks {
        let (expected, verdict) = task.await.expect("no panic");
        let said = match verdict {
            Verdict::Accepted(_) => "accepted",
            Verdict::Duplicate(_) => "duplicate",
            Verdict::Conflict(_) => "conflict",
            Verdict::Review(_) => "review",
        };
        assert_eq!(said, expected);
    }
    other.flush_copies().await;
    for n in [0, 1, 2, 399] {
        let name = EventName::Theirs(format!("evt_{n}").into());
        let Lookup::One(found) = base.store.event(&name).await.expect("reads") else {
            panic!("event {n} is gone");
        };
        let (arrivals, conflicts) = match n {
            0 => (4, 1),
            1 => (1, 0),
            _ => (4, 0),
        };
        assert_eq!((found.summary.arrivals, found.summary.conflicts), (arrivals, conflicts), "{n}");
        assert_eq!(found.arrivals.len() as u64, arrivals, "{n}");
    }
    other.close().await;
}
