//! Arrivals, claims, handlers, users' transactions, operators and retention at once, on the same
//! few resources. No request may be refused because of the others, and all jobs end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use hapax_core::order::{Gaps, OrderPolicy, OrderRule, Position, ResourcePosition};
use hapax_core::store::{
    Action, EventId, Horizon, NewJob, Operate, Outcome, ReplayAsk, Settlement, Store, StoreError,
    Verdict, Work,
};
use hapax_store::PgStore;
use tokio_postgres::Client;

use crate::harness::{Sender, after, body, noon};
use crate::{Base, asked, claim, connect, handler, ordered, until};

const EVENTS: usize = 400;
const RESOURCES: usize = 5;

fn work_of(n: usize) -> NewJob {
    let place = ResourcePosition {
        resource: format!("r{}", n % RESOURCES).into(),
        position: Position((n / RESOURCES) as i64),
    };
    NewJob { handler: handler().handler, place: Some(place), hopeless: None }
}

/// Sends every event to a node, some of them late. `step` decides the order.
async fn arrivals(store: &PgStore, step: usize) -> Result<(), StoreError> {
    let sender = Sender::plain();
    for n in (0..EVENTS).map(|n| n * step % EVENTS) {
        let job = work_of(n);
        let jobs = std::slice::from_ref(&job);
        let now = if n % 7 == 0 { after(86_400) } else { noon() };
        let ingest = sender.ingest_for(&body(&format!("evt_{n}")), noon(), now, jobs);
        let verdicts = store.ingest(ingest).await?;
        if let [Verdict::Review(event)] = verdicts[..] {
            let by = Action { who: "ops".into(), reason: None, at: noon() };
            store.approve(event, vec![job.clone()], by).await?;
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn statements_in_a_crowd_are_not_refused_and_all_work_ends() {
    // Each transaction locks the marks of many resources, and then its jobs.
    check(Hands::Statements).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn workers_in_a_crowd_are_not_refused_and_all_work_ends() {
    // A claim leases a resource with its job, and users' transactions lock the job, then the mark.
    check(Hands::Workers).await;
}

/// The kind of worker that runs the jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hands {
    Statements,
    Workers,
}

const STATEMENT: &str = "INSERT INTO ledger VALUES (:event_id, 'sql')";

/// Runs the due jobs, and returns how many there were.
async fn work(hands: Hands, store: &PgStore, sql: &Client) -> Result<usize, StoreError> {
    if hands == Hands::Statements {
        let ran = store.run_sql(asked(STATEMENT, Duration::from_secs(30))).await?;
        return Ok(ran.done + ran.guarded + ran.failed);
    }
    let claims = claim(store, 4).await;
    for (n, claim) in claims.iter().enumerate() {
        if n % 2 == 0 {
            let done = Outcome::Done { result: None, publish: Vec::new(), answer: None };
            assert_eq!(store.settle(claim.job, claim.fence, done).await?, Settlement::Recorded);
            continue;
        }
        let complete = "SELECT hapax.complete($1, $2)";
        sql.execute(complete, &[&claim.job.0, &claim.fence.0]).await.expect("completes");
    }
    Ok(claims.len())
}

async fn check(hands: Hands) {
    // There are few resources, so that all transactions meet. Meanwhile an operator replays
    // finished jobs, and retention deletes old ones.
    let order = OrderRule { policy: OrderPolicy::Latest, gaps: Gaps::default() };
    let base = Base::new(
        if hands == Hands::Workers { "crowd_w" } else { "crowd_s" },
        ordered(order.clone()),
    )
    .await;
    let other = Base::node(&base.url, ordered(order)).await;
    let (over, replays) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let mut arriving = Vec::new();
    for (node, step) in [(&base.store, 3), (&other, 7), (&base.store, 11), (&other, 1)] {
        let store = Arc::clone(node);
        arriving.push(tokio::spawn(async move { arrivals(&store, step).await }));
    }
    let mut busy = Vec::new();
    for node in [&base.store, &other] {
        for _ in 0..2 {
            let (store, stop) = (Arc::clone(node), Arc::clone(&over));
            let sql = connect(&base.url).await;
            busy.push(tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    work(hands, &store, &sql).await?;
                }
                Ok::<_, StoreError>(())
            }));
        }
        let (store, stop) = (Arc::clone(node), Arc::clone(&over));
        busy.push(tokio::spawn(async move {
            let horizon = Horizon { events_before: after(1), ..Horizon::forever() };
            while !stop.load(Ordering::Relaxed) {
                store.prune(horizon.clone(), 10).await?;
            }
            Ok(())
        }));
    }
    let (store, stop, sql) = (Arc::clone(&base.store), Arc::clone(&over), connect(&base.url).await);
    let replayed = Arc::clone(&replays);
    busy.push(tokio::spawn(async move {
        while !stop.load(Ordering::Relaxed) {
            let done = "SELECT e.id, convert_from(e.event_id, 'UTF8') FROM hapax.event e \
                        JOIN hapax.job j ON j.event = e.id WHERE j.state = 2 LIMIT 5";
            for row in sql.query(done, &[]).await.expect("reads") {
                let n: usize = row.get::<_, &str>(1)[4..].parse().expect("a number");
                let by = Action { who: "ops".into(), reason: None, at: noon() };
                let (event, handlers) = (EventId(row.get(0)), vec![work_of(n)]);
                let ask = ReplayAsk { event, handlers, force: true, dry_run: false, by };
                replayed.fetch_add(store.replay(ask).await?.len(), Ordering::Relaxed);
            }
        }
        Ok(())
    }));
    for task in arriving {
        task.await.expect("no panic").expect("arrives");
    }
    until("people did their part", async || replays.load(Ordering::Relaxed) > 20).await;
    over.store(true, Ordering::Relaxed);
    for task in busy {
        task.await.expect("no panic").expect("works");
    }
    let count = |sql: &'static str| base.one(sql);
    let open = "SELECT count(*)::text FROM hapax.job WHERE state NOT IN (2, 3)";
    // A job that a slow commit wrote before the position of the next claim is found at the next
    // full check.
    until("all work ends", async || {
        work(hands, &base.store, &base.sql).await.expect("works");
        count(open).await == "0"
    })
    .await;
    assert_eq!(count("SELECT count(*)::text FROM hapax.event").await, EVENTS.to_string());
    let marks = "SELECT string_agg(DISTINCT position::text, ',') FROM hapax.mark";
    assert_eq!(count(marks).await, (EVENTS / RESOURCES - 1).to_string());
}
