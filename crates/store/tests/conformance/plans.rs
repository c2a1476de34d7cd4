//! Random plans: the same steps on every store give the same answers. Random plans find combinations that
//! no case covers.

use std::collections::HashMap;
use std::time::Duration;

use hapax_core::store::{
    EventFilter, EventId, Ingest, Inspect, ReviewReason, Status, Store, Verdict,
};
use hapax_store::{MemoryStore, PgOptions, PgStore};
use proptest::prelude::*;

use crate::harness::{DatabaseDirectory, Sender, after, pg_database};

#[derive(Debug, Clone)]
struct Step {
    sender: usize,
    id: u8,
    body: u8,
    late: bool,
    wait: i64,
    restart: bool,
}

fn step() -> impl Strategy<Value = Step> {
    (0..6usize, 0..4u8, 0..2u8, prop::bool::weighted(0.2), 0..400i64, prop::bool::weighted(0.1))
        .prop_map(|(sender, id, body, late, wait, restart)| Step {
            sender,
            id,
            body,
            late,
            wait,
            restart,
        })
}

fn ingest(senders: &[Sender], step: &Step, now: i64) -> Ingest {
    let body =
        format!(r#"{{"id":"e{0}","type":"t","resource":"r{0}","n":{1}}}"#, step.id, step.body);
    let signed = if step.late { now - 3_600 } else { now };
    let receipts =
        senders[step.sender].receipts(&body, &format!("h{}", step.id), after(signed), after(now));
    Ingest {
        jobs: vec![Vec::new(); receipts.len()],
        receipts,
        via: crate::harness::via(after(now)),
    }
}

/// Ids differ between stores: each becomes the number of its first appearance.
#[derive(Default)]
struct Numbered(HashMap<EventId, usize>);

impl Numbered {
    fn describe(&mut self, verdict: &Verdict) -> String {
        let next = self.0.len();
        let number = *self.0.entry(verdict.id()).or_insert(next);
        match verdict {
            Verdict::Accepted(_) => format!("accepted {number}"),
            Verdict::Review(_) => format!("review {number}"),
            Verdict::Duplicate(known) => format!("duplicate {number} {}", known.status.as_str()),
            Verdict::Conflict(known) => format!("conflict {number} {}", known.status.as_str()),
        }
    }
}

/// All events as the list shows them, newest first. A list ends early on a busy machine, and then has a
/// cursor.
async fn listed<S: Inspect>(store: &S) -> Vec<(String, String, Status, Option<ReviewReason>, u64)> {
    let mut filter = EventFilter { limit: 500, ..EventFilter::default() };
    let mut all = Vec::new();
    loop {
        let page = store.events(filter.clone()).await.expect("reads");
        all.extend(page.items.into_iter().map(|event| {
            (event.event_id, event.tenant, event.status, event.review, event.conflicts)
        }));
        match page.next {
            Some(cursor) => filter.before = Some(cursor),
            None => return all,
        }
    }
}

/// Plays a plan on the model and on a store that `restart` closes and opens again.
async fn same_answers<S: Store + Inspect>(
    steps: Vec<Step>,
    mut store: S,
    restart: impl AsyncFn(S) -> S,
) {
    let senders = [
        Sender::plain(),
        Sender::of("acme", "shop"),
        Sender::guarded(),
        Sender::derived(None),
        Sender::derived(Some(Duration::from_secs(600))),
        Sender::derived_and_guarded(),
    ];
    let model = MemoryStore::new();
    let (mut theirs, mut ours) = (Numbered::default(), Numbered::default());
    let mut now = 0;
    for step in &steps {
        now += step.wait;
        if step.restart {
            // Within one millisecond, events of two runs are listed in no fixed order.
            now += 1;
            store = restart(store).await;
        }
        let expected = model.ingest(ingest(&senders, step, now)).await.expect("the model ingests");
        let got = store.ingest(ingest(&senders, step, now)).await.expect("the store ingests");
        let expected: Vec<_> = expected.iter().map(|verdict| theirs.describe(verdict)).collect();
        let got: Vec<_> = got.iter().map(|verdict| ours.describe(verdict)).collect();
        assert_eq!(got, expected, "at {step:?}");
    }
    assert_eq!(listed(&store).await, listed(&model).await);
    restart(store).await;
}

fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(2).enable_all().build().expect("a runtime")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn random_plans_get_equal_answers_from_sqlite(steps in prop::collection::vec(step(), 1..40)) {
        runtime().block_on(async {
            let place = DatabaseDirectory::new();
            same_answers(steps, place.open(), async |store| {
                store.close().await;
                drop(store);
                place.open()
            })
            .await;
        });
    }
}

proptest! {
    // Fewer plans than for the other stores: each step is a round trip or two, and each restart
    // opens a handful of connections.
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn random_plans_get_equal_answers_from_postgres(steps in prop::collection::vec(step(), 1..40)) {
        runtime().block_on(async {
            let url = pg_database().await;
            let open = async || PgStore::open(PgOptions::new(url.as_str())).await.expect("opens");
            same_answers(steps, open().await, async |store: PgStore| {
                store.close().await;
                open().await
            })
            .await;
        });
    }
}
