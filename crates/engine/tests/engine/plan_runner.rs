//! The runner of plans, over the model in memory with injected faults.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hapax_core::job::HandlerName;
use hapax_core::store::{
    Action, EventAct, EventFilter, EventPlan, NewJob, NewPlan, PlanCreated, PlanId, PlanState,
    Plans as _,
};
use hapax_core::{KeyHash, SourceName, Timestamp};
use hapax_engine::{JobsFor, run_plans};
use hapax_sim::Act;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::jobs::{JobStore, event};
use crate::support::within;

/// One event of each of two sources, and a plan that replays it. The plan of the source "first" has waited longer.
async fn two_plans(store: &JobStore) -> [PlanId; 2] {
    let mut plans = Vec::new();
    for source in ["first", "second"] {
        store.put("fee", event(source, "evt_1", "", "{}")).await;
        store.pass(Duration::from_secs(1));
        let filter =
            EventFilter { source: Some(SourceName::new(source)), ..EventFilter::default() };
        let new = NewPlan {
            id: PlanId(Uuid::now_v7()),
            work: EventPlan::new(EventAct::Replay { force: false }, None, filter).into(),
            rate: None,
            request: KeyHash([7; 16]),
            alone: false,
        };
        let by = Action { who: "ops".to_owned(), reason: None, at: Timestamp::now() };
        let created = store.faults.create_plan(new, by).await.unwrap();
        let PlanCreated::Created(plan) = created else { panic!("{created:?}") };
        assert_eq!(plan.total, 1);
        plans.push(plan.id);
        store.pass(Duration::from_secs(1));
    }
    [plans[0], plans[1]]
}

async fn state(store: &JobStore, id: PlanId) -> PlanState {
    store.faults.plan(id).await.unwrap().unwrap().state
}

fn job() -> NewJob {
    NewJob { handler: HandlerName::new("fee"), place: None, hopeless: None }
}

#[tokio::test(start_paused = true)]
async fn a_plan_whose_slice_fails_is_tried_again_and_delays_no_other() {
    // The first plan is always the one that has waited longest.
    let store = JobStore::new();
    let [first, second] = two_plans(&store).await;
    store.faults.fail_next(Act::TakeSlice, 1);
    let stop = CancellationToken::new();
    let jobs_for: JobsFor = Arc::new(|_, _, _| Some(vec![job()]));
    let now = Arc::new(Timestamp::now);
    let runner = run_plans(Arc::clone(&store.faults), Some(jobs_for), now, stop.clone());
    let runner = tokio::spawn(runner);
    within(store.faults.until(|faults| faults.ended(Act::TakeSlice) == 3)).await;
    let taken = store.faults.arguments(Act::TakeSlice);
    let of = [first, second, first];
    assert!(taken.iter().zip(of).all(|(slice, id)| slice.contains(&id.to_string())), "{taken:?}");
    assert_eq!(state(&store, first).await, PlanState::Done);
    assert_eq!(state(&store, second).await, PlanState::Done);
    stop.cancel();
    runner.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_node_without_the_source_of_an_event_leaves_its_plan_to_others() {
    // Without the source the node knows no handlers: an approved event would never run.
    let store = JobStore::new();
    let [first, second] = two_plans(&store).await;
    let has_first = Arc::new(AtomicBool::new(false));
    let jobs_for: JobsFor = {
        let has_first = Arc::clone(&has_first);
        Arc::new(move |source, _, _| {
            let knows = source.as_str() != "first" || has_first.load(Ordering::SeqCst);
            knows.then(|| vec![job()])
        })
    };
    let stop = CancellationToken::new();
    let now = Arc::new(Timestamp::now);
    let runner = run_plans(Arc::clone(&store.faults), Some(jobs_for), now, stop.clone());
    let runner = tokio::spawn(runner);
    within(store.faults.until(|faults| faults.ended(Act::TakeSlice) == 1)).await;
    assert_eq!(state(&store, second).await, PlanState::Done);
    let asked = store.faults.ended(Act::RunPlan);
    within(store.faults.until(|faults| faults.ended(Act::RunPlan) > asked + 5)).await;
    assert_eq!(state(&store, first).await, PlanState::Running);
    assert_eq!(store.faults.ended(Act::TakeSlice), 1);
    // The configuration was reloaded.
    has_first.store(true, Ordering::SeqCst);
    within(store.faults.until(|faults| faults.ended(Act::TakeSlice) == 2)).await;
    assert_eq!(state(&store, first).await, PlanState::Done);
    stop.cancel();
    runner.await.unwrap();
}
