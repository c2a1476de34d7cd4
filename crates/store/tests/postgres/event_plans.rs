//! Plans of operators where only PostgreSQL can fail: users' transactions that stay open.

use std::time::Duration;

use hapax_core::job::Retry;
use hapax_core::store::{
    Action, DeliveryPlan, EventAct, EventFilter, EventPlan, Held, NewJob, NewPlan, Outbox, Outcome,
    Plan, PlanCreated, PlanId, PlanRun, PlanState, PlanWork, PlannedDeliveries, Plans, Status,
    Work,
};
use hapax_core::{KeyHash, Timestamp};
use uuid::Uuid;

use crate::harness::noon;
use crate::outbox::{add, deliver_all};
use crate::sending::{message, settings};
use crate::{Base, connect, handler, spec, until};

/// The hash of every request here.
const REQUEST: KeyHash = KeyHash([7; 16]);

fn by() -> Action {
    Action { who: "ops".into(), reason: None, at: noon() }
}

async fn begin(base: &Base, work: PlanWork) -> Plan {
    let new =
        NewPlan { id: PlanId(Uuid::now_v7()), work, rate: None, request: REQUEST, alone: false };
    let created = base.store.create_plan(new, by()).await.expect("creates");
    let PlanCreated::Created(plan) = created else { panic!("{created:?}") };
    *plan
}

async fn plan(base: &Base, id: PlanId) -> Plan {
    base.store.plan(id).await.expect("reads").expect("is there")
}

/// Takes a slice if one is due.
async fn take(base: &Base) -> PlanRun {
    let ran = base.store.run_plan(10, Vec::new()).await.expect("runs");
    if let PlanRun::Events(mut slice) = ran.clone() {
        for event in &mut slice.events {
            event.jobs = vec![NewJob { handler: handler().handler, place: None, hopeless: None }];
        }
        assert_eq!(base.store.take_slice(*slice).await.expect("takes"), Held::Kept);
    }
    ran
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_slice_ends_before_an_event_that_a_users_transaction_holds() {
    // The user's transaction holds the row of the third of four dead letters.
    let base = Base::new("held_by_a_user", spec(1)).await;
    for n in 0..4 {
        base.accept(&format!("evt_{n}"), None).await;
    }
    for claim in base.claim(10).await {
        let failed =
            Outcome::Failed { error: "down".to_owned(), retry: Retry::Never, answer: None };
        base.store.settle(claim.job, claim.fence, failed).await.expect("settles");
    }
    let user = connect(&base.url).await;
    user.batch_execute(
        "BEGIN; SELECT FROM hapax.job j JOIN hapax.event e ON e.id = j.event
                WHERE e.event_id = 'evt_2' FOR UPDATE OF j",
    )
    .await
    .expect("locks");
    let filter = EventFilter { status: Some(Status::Dead), ..EventFilter::default() };
    let work = EventPlan::new(EventAct::Replay { force: false }, None, filter);
    let begun = begin(&base, work.into()).await;
    assert_eq!(begun.total, 4);
    assert!(matches!(take(&base).await, PlanRun::Events(_)));
    let blocked = plan(&base, begun.id).await;
    assert_eq!((blocked.done, blocked.state), (2, PlanState::Running));
    assert!(matches!(take(&base).await, PlanRun::NotBefore(_)), "it waits before it tries again");
    user.batch_execute("COMMIT").await.expect("commits");
    until("the plan ends", || async {
        take(&base).await;
        plan(&base, begun.id).await.state == PlanState::Done
    })
    .await;
    assert_eq!(plan(&base, begun.id).await.done, 4);
    assert_eq!(base.claim(10).await.len(), 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_message_with_an_early_time_and_a_late_number_hides_no_others_from_a_plan() {
    // The transaction of one message was open for long before it published. The number of the
    // message is the highest, and its time is the earliest.
    let base = Base::new("late_numbers", spec(1)).await;
    let endpoint = add(&base.store, settings()).await;
    for id in ["m0", "m1", "m2", "long"] {
        base.store.publish(message(id)).await.expect("publishes");
    }
    assert_eq!(deliver_all(&base.store).await.len(), 4);
    base.sql
        .batch_execute(
            "UPDATE hapax.message SET created_at = created_at - interval '10 minutes' WHERE id = 'long'",
        )
        .await
        .expect("changes");
    let since = Timestamp::now() - Duration::from_secs(300);
    let which = PlannedDeliveries::All;
    let begun = begin(&base, DeliveryPlan { endpoint, which, since, until: None }.into()).await;
    assert_eq!(begun.total, 3);
    until("the plan ends", || async {
        take(&base).await;
        plan(&base, begun.id).await.state == PlanState::Done
    })
    .await;
    assert_eq!(plan(&base, begun.id).await.done, 3);
    let mut sent = deliver_all(&base.store).await;
    sent.sort();
    assert_eq!(sent, ["m0", "m1", "m2"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_backfill_covers_messages_of_transactions_that_are_still_open() {
    // A message is published before the endpoint is added. Its commit comes after the backfill has passed its number.
    let base = Base::new("late_backfill", spec(1)).await;
    let mut late = connect(&base.url).await;
    let late = late.transaction().await.expect("begins");
    late.execute("SELECT hapax.publish('t', '{}', id => 'late')", &[]).await.expect("publishes");
    base.store.publish(message("early")).await.expect("publishes");
    let endpoint = add(&base.store, settings()).await;
    let (since, which) = (Timestamp::now() - Duration::from_secs(300), PlannedDeliveries::Missing);
    let work = DeliveryPlan { endpoint, which, since, until: None };
    let begun = begin(&base, work.into()).await;
    assert_eq!(begun.total, 1);
    until("the plan waits", || async { matches!(take(&base).await, PlanRun::NotBefore(_)) }).await;
    let waiting = plan(&base, begun.id).await;
    assert_eq!((waiting.done, waiting.state), (1, PlanState::Running));
    late.commit().await.expect("commits");
    until("the plan ends", || async {
        take(&base).await;
        plan(&base, begun.id).await.state == PlanState::Done
    })
    .await;
    assert_eq!(plan(&base, begun.id).await.done, 2);
    let mut sent = deliver_all(&base.store).await;
    sent.sort();
    assert_eq!(sent, ["early", "late"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_plan_whose_row_cannot_be_read_delays_no_other() {
    // A newer version wrote the first plan.
    let base = Base::new("unreadable", spec(1)).await;
    let work = || EventPlan::new(EventAct::Discard, None, EventFilter::default());
    let (first, second) = (begin(&base, work().into()).await, begin(&base, work().into()).await);
    let sql = "UPDATE hapax.plan SET events = '{\"act\":\"unheard\"}' WHERE id = $1";
    base.sql.execute(sql, &[&first.id.0]).await.expect("changes");
    let ran = base.store.run_plan(10, Vec::new()).await.expect("answers");
    assert!(matches!(&ran, PlanRun::Failed(id, _) if *id == first.id), "{ran:?}");
    let ran = base.store.run_plan(10, vec![first.id]).await.expect("answers");
    assert!(matches!(&ran, PlanRun::Events(slice) if slice.plan == second.id), "{ran:?}");
}
