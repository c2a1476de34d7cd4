//! Plans of operators: many deliveries are sent again in slices, each once.

use hapax_core::delivery::DeliveryStatus;
use hapax_core::endpoint::EndpointId;
use hapax_core::job::Retry;
use hapax_core::store::{
    DeliveryPlan, DeliveryReplayed, EndpointSignal, Held, MessageAct, NewMessage, NewPlan, Plan,
    PlanCount, PlanCreated, PlanId, PlanRun, PlanState, PlannedDeliveries,
};
use hapax_core::{KeyHash, Tenant, Timestamp};
use uuid::Uuid;

use crate::harness::{World, after};
use crate::sending::{
    ALL, Sending, claimed, delivered, failed, failed_saying, message, settings, wanting,
};

/// The hash of every request here.
const REQUEST: KeyHash = KeyHash([7; 16]);

fn all_of(endpoint: EndpointId, which: PlannedDeliveries) -> DeliveryPlan {
    DeliveryPlan { endpoint, which, since: Timestamp::UNIX_EPOCH, until: None }
}

async fn begin<S: Sending>(world: &World<S>, work: DeliveryPlan, rate: Option<u32>) -> Plan {
    let plan = NewPlan {
        id: PlanId(Uuid::now_v7()),
        work: work.into(),
        rate,
        request: REQUEST,
        alone: false,
    };
    let created = world.store.create_plan(plan, world.by("an outage")).await.expect("creates");
    let PlanCreated::Created(plan) = created else { panic!("{created:?}") };
    *plan
}

async fn count<S: Sending>(world: &World<S>, work: DeliveryPlan) -> PlanCount {
    world.store.count_plan(work.into()).await.expect("counts")
}

async fn plan<S: Sending>(world: &World<S>, id: PlanId) -> Plan {
    world.store.plan(id).await.expect("reads").expect("is there")
}

/// Runs slices of at most `limit` until nothing is due.
async fn run<S: Sending>(world: &World<S>, limit: usize) -> PlanRun {
    for _ in 0..200 {
        let ran = world.store.run_plan(limit, Vec::new()).await.expect("runs");
        if !matches!(ran, PlanRun::Ran(_)) {
            return ran;
        }
    }
    panic!("the plan never ends");
}

/// Fails every due delivery for the last time, and returns the ids of their messages, sorted.
async fn bury_all<S: Sending>(world: &World<S>) -> Vec<String> {
    let mut buried = Vec::new();
    loop {
        // An endpoint has a limited number of attempts in flight.
        let claims = world.take(ALL).await;
        if claims.is_empty() {
            buried.sort();
            return buried;
        }
        for claim in claims {
            // This many failures in a row would pause the endpoint.
            let refused = failed_saying(Retry::Never, EndpointSignal::Works);
            assert_eq!(world.report(&claim, refused).await, Held::Kept);
            buried.push(claim.message);
        }
    }
}

fn of_type(kind: &str, id: &str) -> NewMessage {
    NewMessage { r#type: kind.to_owned(), ..message(id) }
}

pub(crate) async fn what_died_in_a_time_is_sent_again_once<S: Sending>(world: World<S>) {
    // A delivery that dies again while the plan runs is not taken twice. Deliveries that died
    // before or after that time, or at another endpoint, stay.
    let endpoint = world.add(wanting(&["invoice.*"])).await;
    world.add(wanting(&["other"])).await;
    world.send(message("early")).await;
    assert_eq!(bury_all(&world).await, ["early"]);
    world.pass(100);
    for n in 0..5 {
        world.send(message(&format!("m{n}"))).await;
    }
    world.send(of_type("other", "elsewhere")).await;
    bury_all(&world).await;
    world.pass(100);
    world.send(message("done")).await;
    assert_eq!(world.deliver_all().await, ["done"]);
    world.pass(100);
    let work = DeliveryPlan { since: after(50), ..all_of(endpoint, PlannedDeliveries::Dead) };
    assert_eq!(count(&world, work).await, PlanCount::Counted(5));
    let begun = begin(&world, work, None).await;
    assert_eq!((begun.total, begun.done, begun.state), (5, 0, PlanState::Running));
    assert_eq!(begun.created_at, world.clock.now());
    // The replayed deliveries die again between two slices, together with a new one.
    world.pass(1);
    assert!(matches!(world.store.run_plan(2, Vec::new()).await.expect("runs"), PlanRun::Ran(_)));
    world.send(message("late")).await;
    world.pass(1);
    assert_eq!(bury_all(&world).await, ["late", "m0", "m1"]);
    world.pass(1);
    assert_eq!(run(&world, 2).await, PlanRun::Idle);
    let ended = plan(&world, begun.id).await;
    assert_eq!((ended.total, ended.done, ended.skipped), (5, 5, 0));
    assert_eq!((ended.state, ended.ended_at), (PlanState::Done, Some(world.clock.now())));
    assert_eq!(world.deliver_all().await, ["m2", "m3", "m4"]);
    for (id, replays) in [("early", 0), ("m0", 1), ("m2", 1), ("late", 0), ("done", 0)] {
        let actions = world.delivery_of(id).await.actions;
        assert_eq!(actions.len(), replays, "{id}: {actions:?}");
        assert!(actions.iter().all(|note| note.action == "replay"), "{actions:?}");
        assert!(actions.iter().all(|note| note.reason.as_deref() == Some("an outage")));
    }
    assert_eq!(world.status_of("elsewhere").await, DeliveryStatus::Dead);
}

pub(crate) async fn everything_of_a_time_is_sent_again_the_delivered_included<S: Sending>(
    world: World<S>,
) {
    // The receiver lost its database, so delivered deliveries are sent again too. A delivery that
    // is under way stays as it is.
    let endpoint = world.add(settings()).await;
    world.send(message("before")).await;
    assert_eq!(world.deliver_all().await, ["before"]);
    world.pass(100);
    for id in ["delivered", "dead", "cancelled", "sending"] {
        world.send(message(id)).await;
    }
    world.act_on("cancelled", MessageAct::Cancel).await;
    for claim in world.take(ALL).await {
        let verdict = match claim.message.as_str() {
            "delivered" => delivered(),
            "dead" => failed(Retry::Never),
            _sending => continue,
        };
        assert_eq!(world.report(&claim, verdict).await, Held::Kept);
    }
    world.pass(10);
    world.send(message("after")).await;
    assert_eq!(claimed(&world.take(1).await), ["after"]);
    let work = DeliveryPlan {
        since: after(100),
        until: Some(after(105)),
        ..all_of(endpoint, PlannedDeliveries::All)
    };
    assert_eq!(count(&world, work).await, PlanCount::Counted(4));
    let begun = begin(&world, work, None).await;
    assert_eq!(run(&world, 3).await, PlanRun::Idle);
    let ended = plan(&world, begun.id).await;
    assert_eq!((ended.total, ended.done, ended.skipped), (4, 3, 1));
    assert_eq!(ended.work, work.into());
    assert_eq!(world.deliver_all().await, ["cancelled", "dead", "delivered"]);
    assert_eq!(world.delivery_of("delivered").await.attempts.len(), 2);
}

pub(crate) async fn what_was_sent_in_a_time_is_sent_again_after_the_clock_was_set_back<
    S: Sending,
>(
    world: World<S>,
) {
    // Later messages have earlier times: a search for the first and the last one by time alone would miss
    // those on one side.
    let endpoint = world.add(settings()).await;
    for hour in 0..6 {
        world.send(message(&format!("first_{hour}"))).await;
        world.pass(3_600);
    }
    world.pass(-4 * 3_600);
    for hour in 2..8 {
        world.send(message(&format!("again_{hour}"))).await;
        world.pass(3_600);
    }
    world.deliver_all().await;
    for (hour, ids) in [(1, &["first_1"][..]), (3, &["again_3", "first_3"]), (7, &["again_7"])] {
        let work = DeliveryPlan {
            since: after(hour * 3_600),
            until: Some(after(hour * 3_600 + 1)),
            ..all_of(endpoint, PlannedDeliveries::All)
        };
        assert_eq!(count(&world, work).await, PlanCount::Counted(ids.len() as u64));
        begin(&world, work, None).await;
        assert_eq!(run(&world, 3).await, PlanRun::Idle);
        assert_eq!(world.deliver_all().await, ids);
    }
}

pub(crate) async fn what_an_endpoint_never_got_is_written_for_it<S: Sending>(world: World<S>) {
    // An endpoint that was added late gets the messages that it missed, and none twice.
    let first = world.add(settings()).await;
    for n in 0..4 {
        world.send(message(&format!("m{n}"))).await;
    }
    world.send(of_type("order.paid", "unwanted")).await;
    world.send(message("versioned").with_api_version("v2")).await;
    world.add_for(Tenant::new("acme"), settings()).await;
    world.send(message("foreign").with_tenant("acme")).await;
    assert_eq!(world.deliver_all().await.len(), 7);
    world.pass(10);
    let mut late = wanting(&["invoice.*"]);
    late.api_version = Some("v1".to_owned());
    let late = world.add(late).await;
    world.send(message("fanned_out")).await;
    world.pass(10);
    let work = all_of(late, PlannedDeliveries::Missing);
    assert_eq!(count(&world, work).await, PlanCount::Counted(4));
    assert_eq!(
        count(&world, all_of(first, PlannedDeliveries::Missing)).await,
        PlanCount::Counted(0)
    );
    let begun = begin(&world, work, None).await;
    world.pass(1);
    world.send(message("younger")).await;
    assert_eq!(run(&world, 3).await, PlanRun::Idle);
    let ended = plan(&world, begun.id).await;
    assert_eq!((ended.total, ended.done, ended.state), (4, 4, PlanState::Done));
    let to_late: Vec<_> =
        world.take(ALL).await.into_iter().filter(|one| one.endpoint.id == late).collect();
    assert_eq!(claimed(&to_late), ["fanned_out", "m0", "m1", "m2", "m3", "younger"]);
    let again = begin(&world, work, None).await;
    assert_eq!(again.total, 0);
    assert_eq!(run(&world, 3).await, PlanRun::Idle);
    assert_eq!(plan(&world, again.id).await.state, PlanState::Done);
    let m0 = world.message("m0").await;
    let backfilled = m0.deliveries.iter().find(|one| one.endpoint == late).expect("is there");
    assert_eq!(backfilled.actions.len(), 1);
    assert_eq!(backfilled.actions[0].action, "backfill");
}

pub(crate) async fn a_plan_with_a_rate_runs_in_time<S: Sending>(world: World<S>) {
    // The endpoint has just recovered: all deliveries at once would overload it again.
    let endpoint = world.add(settings()).await;
    for n in 0..30 {
        world.send(message(&format!("m{n}"))).await;
    }
    bury_all(&world).await;
    world.pass(1);
    let begun = begin(&world, all_of(endpoint, PlannedDeliveries::Dead), Some(10)).await;
    let done = async || plan(&world, begun.id).await.done;
    let PlanRun::NotBefore(at) = run(&world, 100).await else { panic!("it must wait") };
    assert!(at > world.clock.now(), "{at}");
    let first = done().await;
    assert!((1..=12).contains(&first), "{first}");
    for second in 1..=2 {
        world.pass(1);
        run(&world, 100).await;
        let now = done().await;
        // The first slice may have taken the deliveries of one second in advance.
        assert!((10 * second..=10 * (second + 1) + 2).contains(&now), "{now} after {second} s");
    }
    world.pass(3);
    assert_eq!(run(&world, 100).await, PlanRun::Idle);
    assert_eq!(done().await, 30);
}

pub(crate) async fn a_cancelled_plan_stops_and_a_deleted_endpoint_ends_one<S: Sending>(
    world: World<S>,
) {
    let endpoint = world.add(settings()).await;
    for n in 0..6 {
        world.send(message(&format!("m{n}"))).await;
    }
    bury_all(&world).await;
    world.pass(1);
    let work = all_of(endpoint, PlannedDeliveries::Dead);
    let first = begin(&world, work, None).await;
    world.store.run_plan(2, Vec::new()).await.expect("runs");
    let cancelled = world.store.cancel_plan(first.id, world.by("enough")).await;
    let cancelled = cancelled.expect("cancels").expect("is there");
    assert_eq!((cancelled.state, cancelled.done), (PlanState::Cancelled, 2));
    assert_eq!(run(&world, 2).await, PlanRun::Idle);
    assert_eq!(plan(&world, first.id).await, cancelled);
    assert_eq!(world.deliver_all().await.len(), 2);
    // The remaining deliveries are still dead, and another plan takes them until the endpoint is
    // deleted.
    let second = begin(&world, work, None).await;
    assert_eq!(second.total, 4);
    let new =
        NewPlan { id: second.id, work: work.into(), rate: None, request: REQUEST, alone: false };
    let again = world.store.create_plan(new.clone(), world.by("a repeated request")).await;
    assert_eq!(again.expect("answers"), PlanCreated::Created(Box::new(second.clone())));
    let other = NewPlan { request: KeyHash([8; 16]), ..new };
    let refused = world.store.create_plan(other, world.by("another request")).await;
    assert_eq!(refused.expect("answers"), PlanCreated::OtherRequest);
    world.delete(endpoint).await;
    assert_eq!(run(&world, 2).await, PlanRun::Idle);
    assert_eq!(plan(&world, second.id).await.state, PlanState::Cancelled);
    let unknown = NewPlan {
        id: PlanId(Uuid::now_v7()),
        work: work.into(),
        rate: None,
        request: REQUEST,
        alone: false,
    };
    let unknown = world.store.create_plan(unknown, world.by("too late")).await.expect("answers");
    assert_eq!(unknown, PlanCreated::UnknownEndpoint);
    assert_eq!(count(&world, work).await, PlanCount::UnknownEndpoint);
    assert!(world.store.plan(PlanId(Uuid::now_v7())).await.expect("reads").is_none());
    let listed = world.store.plans(10).await.expect("reads");
    let mut ids: Vec<_> = listed.iter().map(|plan| plan.id).collect();
    ids.sort_unstable();
    assert_eq!(ids, [first.id, second.id]);
}

pub(crate) async fn many_nodes_run_one_plan_and_take_each_delivery_once<S: Sending>(
    world: World<S>,
) {
    // Every node asks for slices at the same time.
    const MESSAGES: usize = 60;
    let endpoint = world.add(settings()).await;
    world.send_many("m", "invoice.paid", MESSAGES).await;
    assert_eq!(bury_all(&world).await.len(), MESSAGES);
    world.pass(1);
    let begun = begin(&world, all_of(endpoint, PlannedDeliveries::Dead), None).await;
    let nodes: Vec<_> = (0..6)
        .map(|_| {
            let store = std::sync::Arc::clone(&world.store);
            tokio::spawn(async move {
                for _ in 0..MESSAGES {
                    store.run_plan(3, Vec::new()).await.expect("runs");
                }
            })
        })
        .collect();
    for node in nodes {
        node.await.expect("no panic");
    }
    assert_eq!(run(&world, 3).await, PlanRun::Idle);
    let ended = plan(&world, begun.id).await;
    assert_eq!((ended.done, ended.skipped), (MESSAGES as u64, 0));
    for delivery in world.all_deliveries().await {
        assert_eq!(delivery.actions.len(), 1, "{}", delivery.message);
        assert_eq!(world.replay_delivery(delivery.id).await, DeliveryReplayed::AlreadyOpen);
    }
}

pub(crate) async fn of_plans_that_run_alone_one_of_an_endpoint_is_recorded_at_a_time<S: Sending>(
    world: World<S>,
) {
    // Each form reaches another node, and no node sees the plans of the others yet.
    const FORMS: usize = 12;
    let (endpoint, other) = (world.add(settings()).await, world.add(settings()).await);
    let new = |endpoint: EndpointId| NewPlan {
        id: PlanId(Uuid::now_v7()),
        work: all_of(endpoint, PlannedDeliveries::All).into(),
        rate: Some(1),
        request: REQUEST,
        alone: true,
    };
    let tasks: Vec<_> = (0..FORMS)
        .map(|_| {
            let (store, plan, by) = (world.store.clone(), new(endpoint), world.by("a form"));
            tokio::spawn(async move { store.create_plan(plan, by).await.expect("answers") })
        })
        .collect();
    let mut recorded = Vec::new();
    for task in tasks {
        match task.await.expect("no panic") {
            PlanCreated::Created(plan) => recorded.push(plan.id),
            refused => assert_eq!(refused, PlanCreated::EndpointBusy),
        }
    }
    assert_eq!(recorded.len(), 1, "{recorded:?}");
    // The same form again is the same plan, and another endpoint is not affected.
    let again = NewPlan { id: recorded[0], ..new(endpoint) };
    let again = world.store.create_plan(again, world.by("again")).await.expect("answers");
    assert!(matches!(again, PlanCreated::Created(_)), "{again:?}");
    let elsewhere = world.store.create_plan(new(other), world.by("a form")).await.expect("answers");
    assert!(matches!(elsewhere, PlanCreated::Created(_)), "{elsewhere:?}");
    // An operator may make a plan at the same time. A plan of an operator counts for the next form.
    world.store.cancel_plan(recorded[0], world.by("enough")).await.expect("cancels");
    let operators = begin(&world, all_of(endpoint, PlannedDeliveries::All), Some(1)).await;
    let refused = world.store.create_plan(new(endpoint), world.by("a form")).await;
    assert_eq!(refused.expect("answers"), PlanCreated::EndpointBusy);
    world.store.cancel_plan(operators.id, world.by("enough")).await.expect("cancels");
    let free = world.store.create_plan(new(endpoint), world.by("a form")).await.expect("answers");
    assert!(matches!(free, PlanCreated::Created(_)), "{free:?}");
}
