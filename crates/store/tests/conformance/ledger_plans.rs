//! Random plans with Idempotency-Keys: reservations, answers, abandoned keys, old fences, time and
//! retention in any order give the same results in every store.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use hapax_core::ledger::{Fingerprint, Quota, Reservation, ReserveAsk, Reserved};
use hapax_store::{MemoryStore, PgOptions, PgStore, SqliteOptions, SqliteStore};
use proptest::prelude::*;

use crate::harness::{Clock, DatabaseDirectory, Working, World, pg_database};
use crate::ledger::{answer, ask};

#[derive(Debug, Clone, Copy)]
enum Act {
    Reserve {
        key: u8,
        request: u8,
        lease: u64,
        ttl: u64,
        /// The quota of keys and of bytes, if any.
        quota: Option<(u64, u64)>,
    },
    /// The request that reserved the key finishes it, however long ago it reserved.
    Finish {
        right: usize,
        body: u8,
    },
    Abandon {
        right: usize,
    },
    Pass {
        seconds: i64,
    },
    Prune {
        limit: usize,
    },
    Restart,
}

fn act() -> impl Strategy<Value = Act> {
    let request = prop_oneof![5 => Just(0_u8), 1 => Just(1)];
    let quota = prop::option::weighted(0.8, (1..4_u64, 1..4_u64));
    prop_oneof![
        8 => (0..5_u8, request, 0..30_u64, 0..60_u64, quota).prop_map(
            |(key, request, lease, ttl, quota)| Act::Reserve { key, request, lease, ttl, quota }
        ),
        4 => (0..4_usize, 0..3_u8).prop_map(|(right, body)| Act::Finish { right, body }),
        2 => (0..4_usize).prop_map(|right| Act::Abandon { right }),
        3 => (0..40_i64).prop_map(|seconds| Act::Pass { seconds }),
        1 => (1..3_usize).prop_map(|limit| Act::Prune { limit }),
        1 => Just(Act::Restart),
    ]
}

fn plan() -> impl Strategy<Value = Vec<Act>> {
    prop::collection::vec(act(), 1..60)
}

/// Runs the plan. Fences are recorded by their order, because their numbers differ between stores.
async fn live<S: Working>(
    mut world: World<S>,
    plan: &[Act],
    restart: impl AsyncFn(Arc<S>, &Clock) -> Arc<S>,
) -> Vec<String> {
    let mut story = Vec::new();
    let mut rights: Vec<Reserved> = Vec::new();
    // The last fence of each key that still exists.
    let mut newest = std::collections::HashMap::new();
    for act in plan {
        let right = |ago: usize| rights.iter().rev().nth(ago).cloned();
        story.push(match *act {
            Act::Reserve { key, request, lease, ttl, quota } => {
                let ask = ReserveAsk {
                    fingerprint: Fingerprint::of(None, &[request], &[]),
                    lease: Duration::from_secs(lease),
                    ttl: Duration::from_secs(ttl),
                    quota: quota.map(|(keys, bytes)| Quota { keys, bytes }),
                    ..ask(&format!("k{key}"), "")
                };
                match world.store.reserve(ask).await.expect("reserves") {
                    Reservation::Fresh(reserved) => {
                        let before = newest.insert(key, reserved.fence);
                        assert!(before < Some(reserved.fence), "fences only grow: {reserved:?}");
                        let is_known = |right: &Reserved| right.fence == reserved.fence;
                        assert!(!rights.iter().any(is_known), "none comes twice: {reserved:?}");
                        let fresh = format!("k{key}: fresh, attempt {}", reserved.attempt);
                        rights.push(reserved);
                        fresh
                    }
                    other => format!("k{key}: {other:?}"),
                }
            }
            Act::Finish { right: ago, body } => {
                let Some(right) = right(ago) else { continue };
                let answer = answer(&format!("{body}"));
                let held = world.store.finish(&right, &answer).await.expect("finishes");
                format!("{ago} ago finishes: {held:?}")
            }
            Act::Abandon { right: ago } => {
                let Some(right) = right(ago) else { continue };
                world.store.abandon(&right).await.expect("abandons");
                continue;
            }
            Act::Pass { seconds } => {
                world.pass(seconds);
                continue;
            }
            Act::Prune { limit } => {
                world.prune_keys(limit).await;
                // A deleted key may start again at any number.
                newest.clear();
                continue;
            }
            Act::Restart => {
                world.store = restart(world.store, &world.clock).await;
                continue;
            }
        });
    }
    restart(world.store, &world.clock).await;
    story
}

async fn in_memory(plan: &[Act]) -> Vec<String> {
    live(World::in_memory(), plan, async |store: Arc<MemoryStore>, _: &Clock| store).await
}

async fn on_disk(plan: &[Act]) -> Vec<String> {
    let world = World::on_disk();
    let directory =
        world.place.as_ref().map(DatabaseDirectory::directory).expect("it lives on a disk");
    let restart = async |store: Arc<SqliteStore>, clock: &Clock| {
        store.close().await;
        drop(store);
        let clock = clock.for_a_store();
        let options = SqliteOptions { clock, ..SqliteOptions::new(&directory) };
        Arc::new(SqliteStore::open(options).expect("opens"))
    };
    live(world, plan, restart).await
}

async fn on_postgres(plan: &[Act]) -> Vec<String> {
    let url = pg_database().await;
    let open = async |clock: &Clock| {
        let mut options = PgOptions::new(url.as_str());
        options.clock = Some(clock.for_a_store());
        Arc::new(PgStore::open(options).await.expect("opens"))
    };
    let clock = Clock::default();
    let world = World { store: open(&clock).await, clock, place: None };
    let restart = async |store: Arc<PgStore>, clock: &Clock| {
        store.close().await;
        open(clock).await
    };
    live(world, plan, restart).await
}

/// The server and its connections belong to the runtime that created them.
fn runtime() -> &'static tokio::runtime::Runtime {
    static ONE: OnceLock<tokio::runtime::Runtime> = OnceLock::new();
    ONE.get_or_init(|| {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(2).enable_all().build().expect("a runtime")
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn random_reservations_have_the_same_story_on_disk(plan in plan()) {
        let (expected, got) = runtime().block_on(async {
            (in_memory(&plan).await, on_disk(&plan).await)
        });
        prop_assert_eq!(got, expected);
    }
}

proptest! {
    // Each act is a commit on a real server: fewer plans, and new ones in every run.
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn random_reservations_have_the_same_story_on_postgres(plan in plan()) {
        let (expected, got) = runtime().block_on(async {
            (in_memory(&plan).await, on_postgres(&plan).await)
        });
        prop_assert_eq!(got, expected);
    }
}
