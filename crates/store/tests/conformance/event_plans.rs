//! Plans of operators over events: many replayed, approved, rejected or discarded in slices, each once.

use std::time::Duration;

use hapax_core::SourceName;
use hapax_core::job::{HandlerName, Phase, Retry};
use hapax_core::order::{Gaps, OnGap, OrderPolicy};
use hapax_core::store::{
    EventAct, EventFilter, EventPlan, EventSlice, Held, Horizon, NewPlan, Plan, PlanCount,
    PlanCreated, PlanId, PlanRun, PlanState, Status, TextSearch, Verdict,
};
use hapax_core::{KeyHash, Tenant, Timestamp};
use uuid::Uuid;

use crate::harness::{Sender, World, after, failed, job, placed, spec, with_gaps};
use crate::lists::a_thousand;
use crate::sending::Sending;

/// The hash of every request here, unless it matters.
const REQUEST: KeyHash = KeyHash([7; 16]);

const REPLAY: EventAct = EventAct::Replay { force: false };

fn dead() -> EventFilter {
    EventFilter { status: Some(Status::Dead), ..EventFilter::default() }
}

fn plan_of(act: EventAct, filter: EventFilter) -> EventPlan {
    EventPlan::new(act, None, filter)
}

async fn begin<S: Sending>(world: &World<S>, work: EventPlan, rate: Option<u32>) -> Plan {
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

async fn count<S: Sending>(world: &World<S>, work: EventPlan) -> u64 {
    match world.store.count_plan(work.into()).await.expect("counts") {
        PlanCount::Counted(count) => count,
        PlanCount::UnknownEndpoint => panic!("a plan over events has no endpoint"),
    }
}

async fn plan<S: Sending>(world: &World<S>, id: PlanId) -> Plan {
    world.store.plan(id).await.expect("reads").expect("is there")
}

/// The next slice, with these handlers for each event. `Err`: none is due.
async fn next<S: Sending>(
    world: &World<S>,
    limit: usize,
    handlers: &[&str],
) -> Result<EventSlice, PlanRun> {
    let mut slice = match world.store.run_plan(limit, Vec::new()).await.expect("runs") {
        PlanRun::Events(slice) => *slice,
        other => return Err(other),
    };
    let only = slice.work.handler.clone();
    for event in &mut slice.events {
        assert_eq!(event.body.is_empty(), !slice.work.act.writes_jobs());
        let jobs = handlers.iter().map(|name| job(name));
        event.jobs = jobs.filter(|job| only.as_ref().is_none_or(|it| job.handler == *it)).collect();
    }
    Ok(slice)
}

/// Takes slices of at most `limit` until nothing is due.
async fn run<S: Sending>(world: &World<S>, limit: usize, handlers: &[&str]) -> PlanRun {
    for _ in 0..200 {
        match next(world, limit, handlers).await {
            Ok(slice) => {
                assert!(slice.events.len() <= limit);
                assert_eq!(world.store.take_slice(slice).await.expect("takes"), Held::Kept);
            }
            Err(other) => return other,
        }
    }
    panic!("the plan never ends");
}

/// Claims every due job of a handler and fails it for the last time. Returns the events, sorted.
async fn bury_all<S: Sending>(world: &World<S>, name: &str) -> Vec<String> {
    let mut buried = Vec::new();
    loop {
        let claims = world.claim(name, 10).await;
        if claims.is_empty() {
            buried.sort();
            return buried;
        }
        for claim in claims {
            world.settle(&claim, failed(Retry::Never)).await;
            buried.push(claim.event.key.event_id.to_string());
        }
    }
}

async fn accept_many<S: Sending>(world: &World<S>, prefix: &str, count: usize, handlers: &[&str]) {
    let jobs: Vec<_> = handlers.iter().map(|name| job(name)).collect();
    for n in 0..count {
        world.accept(&format!("{prefix}{n}"), &jobs).await;
    }
}

pub(crate) async fn dead_letters_of_a_time_are_replayed_once<S: Sending>(world: World<S>) {
    // A job that dies again while the plan runs is not taken twice. Jobs of earlier events, jobs
    // that die after the plan was made, and done jobs stay as they are.
    world.announce([spec("fee")]).await;
    accept_many(&world, "early", 1, &["fee"]).await;
    bury_all(&world, "fee").await;
    world.pass(100);
    accept_many(&world, "e", 5, &["fee"]).await;
    bury_all(&world, "fee").await;
    accept_many(&world, "done", 1, &["fee"]).await;
    assert_eq!(world.do_all("fee").await, ["done0"]);
    accept_many(&world, "dies_later", 1, &["fee"]).await;
    world.pass(100);
    let work = plan_of(REPLAY, EventFilter { since: Some(after(50)), ..dead() });
    assert_eq!(count(&world, work.clone()).await, 5);
    let begun = begin(&world, work.clone(), None).await;
    assert_eq!((begun.total, begun.done, begun.state), (5, 0, PlanState::Running));
    assert_eq!((begun.work.clone(), begun.created_at), (work.into(), world.clock.now()));
    world.pass(1);
    assert_eq!(bury_all(&world, "fee").await, ["dies_later0"]);
    let slice = next(&world, 2, &["fee"]).await.expect("is due");
    assert_eq!(slice.events.len(), 2);
    assert_eq!(world.store.take_slice(slice).await.expect("takes"), Held::Kept);
    assert_eq!(bury_all(&world, "fee").await, ["e0", "e1"]);
    world.pass(1);
    assert_eq!(run(&world, 2, &["fee"]).await, PlanRun::Idle);
    let ended = plan(&world, begun.id).await;
    assert_eq!((ended.total, ended.done, ended.skipped), (5, 5, 0));
    assert_eq!((ended.state, ended.ended_at), (PlanState::Done, Some(world.clock.now())));
    assert_eq!(world.do_all("fee").await, ["e2", "e3", "e4"]);
    for (id, replays) in [("early0", 0), ("e0", 1), ("e4", 1), ("dies_later0", 0), ("done0", 0)] {
        let actions = world.event(id).await.actions;
        assert_eq!(actions.len(), replays, "{id}: {actions:?}");
        assert!(actions.iter().all(|note| note.action == "replay" && note.who == "ops"));
        assert!(actions.iter().all(|note| note.reason.as_deref() == Some("an outage")));
    }
}

pub(crate) async fn a_slice_is_taken_once_and_not_after_the_plan_ended<S: Sending>(
    world: World<S>,
) {
    // Two nodes read the same slice. A third node reads a slice, and the plan is cancelled before
    // that node takes the slice.
    world.announce([spec("fee")]).await;
    accept_many(&world, "e", 6, &["fee"]).await;
    bury_all(&world, "fee").await;
    world.pass(1);
    let begun = begin(&world, plan_of(REPLAY, dead()), None).await;
    let first = next(&world, 2, &["fee"]).await.expect("is due");
    let same = next(&world, 2, &["fee"]).await.expect("is due");
    assert_eq!(first, same);
    assert_eq!(world.store.take_slice(first).await.expect("takes"), Held::Kept);
    assert_eq!(world.store.take_slice(same.clone()).await.expect("answers"), Held::Lost);
    assert_eq!(plan(&world, begun.id).await.done, 2);
    let late = next(&world, 2, &["fee"]).await.expect("is due");
    let cancelled = world.store.cancel_plan(begun.id, world.by("enough")).await;
    let cancelled = cancelled.expect("cancels").expect("is there");
    assert_eq!((cancelled.state, cancelled.done), (PlanState::Cancelled, 2));
    assert_eq!(world.store.take_slice(late).await.expect("answers"), Held::Lost);
    assert_eq!(world.store.take_slice(same).await.expect("answers"), Held::Lost);
    assert_eq!(run(&world, 2, &["fee"]).await, PlanRun::Idle);
    assert_eq!(plan(&world, begun.id).await, cancelled);
    assert_eq!(world.do_all("fee").await, ["e0", "e1"]);
}

pub(crate) async fn many_nodes_run_one_plan_and_take_each_event_once<S: Sending>(world: World<S>) {
    // Every node reads and takes slices at the same time.
    const EVENTS: usize = 40;
    world.announce([spec("fee")]).await;
    accept_many(&world, "e", EVENTS, &["fee"]).await;
    assert_eq!(bury_all(&world, "fee").await.len(), EVENTS);
    world.pass(1);
    let begun = begin(&world, plan_of(REPLAY, dead()), None).await;
    let nodes: Vec<_> = (0..4)
        .map(|_| {
            let store = std::sync::Arc::clone(&world.store);
            tokio::spawn(async move {
                for _ in 0..EVENTS {
                    let PlanRun::Events(mut slice) =
                        store.run_plan(3, Vec::new()).await.expect("runs")
                    else {
                        continue;
                    };
                    for event in &mut slice.events {
                        event.jobs = vec![job("fee")];
                    }
                    store.take_slice(*slice).await.expect("answers");
                }
            })
        })
        .collect();
    for node in nodes {
        node.await.expect("no panic");
    }
    assert_eq!(run(&world, 3, &["fee"]).await, PlanRun::Idle);
    let ended = plan(&world, begun.id).await;
    assert_eq!((ended.done, ended.skipped), (EVENTS as u64, 0));
    for n in 0..EVENTS {
        assert_eq!(world.event(&format!("e{n}")).await.actions.len(), 1, "e{n}");
    }
}

pub(crate) async fn a_plan_over_a_time_is_whole_after_the_clock_was_set_back<S: Sending>(
    world: World<S>,
) {
    // Later events have earlier times: a search for the first and the last event by time alone would miss
    // those on one side. There are enough events that the store does not read all of them.
    for hour in 0..6 {
        a_thousand(&world, &format!("first-{hour}")).await;
        world.pass(3_600);
    }
    world.pass(-4 * 3_600);
    for hour in 2..8 {
        a_thousand(&world, &format!("again-{hour}")).await;
        world.pass(3_600);
    }
    let span = EventFilter {
        since: Some(after(3 * 3_600)),
        until: Some(after(3 * 3_600 + 1)),
        ..EventFilter::default()
    };
    let begun = begin(&world, plan_of(REPLAY, span), None).await;
    assert_eq!(begun.total, 2_000);
    assert_eq!(run(&world, 500, &[]).await, PlanRun::Idle);
    let ended = plan(&world, begun.id).await;
    assert_eq!((ended.done + ended.skipped, ended.state), (2_000, PlanState::Done));
}

pub(crate) async fn everything_of_a_time_is_replayed_and_done_jobs_only_by_force<S: Sending>(
    world: World<S>,
) {
    // A handler was added, or its effects were lost: finished events are part of the plan too. Only a plan that
    // names the handler gives a job to events that have none.
    world.announce([spec("fee"), spec("mail")]).await;
    accept_many(&world, "done", 2, &["fee"]).await;
    assert_eq!(world.do_all("fee").await.len(), 2);
    accept_many(&world, "ignored", 1, &[]).await;
    world.arrive_late("review", &[job("fee")]).await;
    world.pass(10);
    let all = EventFilter { since: Some(after(0)), ..EventFilter::default() };
    // Without force and without a handler: done jobs stay done, and nothing is added.
    let begun = begin(&world, plan_of(REPLAY, all.clone()), None).await;
    assert_eq!(begun.total, 4);
    assert_eq!(run(&world, 3, &["fee", "mail"]).await, PlanRun::Idle);
    let ended = plan(&world, begun.id).await;
    assert_eq!((ended.done, ended.skipped), (0, 4));
    assert!(world.do_all("fee").await.is_empty());
    assert!(world.do_all("mail").await.is_empty());
    for (name, jobs) in [("fee", &["ignored0"][..]), ("mail", &["done0", "done1", "ignored0"])] {
        let work = EventPlan::new(REPLAY, Some(HandlerName::new(name)), all.clone());
        let begun = begin(&world, work, None).await;
        assert_eq!(run(&world, 3, &["fee", "mail"]).await, PlanRun::Idle);
        let ended = plan(&world, begun.id).await;
        let done = jobs.len() as u64;
        assert_eq!((ended.done, ended.skipped), (done, 4 - done), "{name}");
        assert_eq!(world.do_all(name).await, jobs);
    }
    assert_eq!(world.event("review").await.summary.status, Status::Review);
    // The next plan has force, and is for one handler only.
    world.pass(10);
    let work = EventPlan::new(EventAct::Replay { force: true }, Some(HandlerName::new("fee")), all);
    let begun = begin(&world, work, None).await;
    assert_eq!(run(&world, 3, &["fee", "mail"]).await, PlanRun::Idle);
    assert_eq!((begun.total, plan(&world, begun.id).await.done), (4, 3));
    assert_eq!(world.do_all("fee").await, ["done0", "done1", "ignored0"]);
    assert!(world.do_all("mail").await.is_empty());
    assert_eq!(world.job("done0", "fee").await.run, 2);
}

pub(crate) async fn events_in_review_are_approved_or_rejected_by_a_plan<S: Sending>(
    world: World<S>,
) {
    // An event that goes to review after the plan was made waits for an operator, as before.
    world.announce([spec("fee")]).await;
    for n in 0..3 {
        world.arrive_late(&format!("late{n}"), &[job("fee")]).await;
    }
    accept_many(&world, "plain", 1, &["fee"]).await;
    world.pass(10);
    let begun = begin(&world, plan_of(EventAct::Approve, EventFilter::default()), None).await;
    assert_eq!(begun.total, 3);
    world.pass(1);
    world.arrive_late("later", &[job("fee")]).await;
    // After the slice was read, an operator decides one event, and an on-time copy promotes
    // another.
    let slice = next(&world, 10, &["fee"]).await.expect("is due");
    let copy = world.arrive(&Sender::plain(), "late1", &[job("fee")]).await;
    assert!(matches!(copy, Verdict::Accepted(_)), "{copy:?}");
    assert_eq!(world.store.take_slice(slice).await.expect("takes"), Held::Kept);
    assert_eq!(run(&world, 10, &["fee"]).await, PlanRun::Idle);
    let ended = plan(&world, begun.id).await;
    assert_eq!((ended.total, ended.done, ended.skipped), (3, 2, 1));
    let mut ran = world.do_all("fee").await;
    ran.sort();
    assert_eq!(ran, ["late0", "late1", "late2", "plain0"]);
    assert_eq!(world.event("late0").await.actions[0].action, "approve");
    assert!(world.event("late1").await.actions.is_empty());
    // The remaining events are rejected.
    world.pass(1);
    let begun = begin(&world, plan_of(EventAct::Reject, EventFilter::default()), None).await;
    assert_eq!(begun.total, 1);
    assert_eq!(run(&world, 10, &[]).await, PlanRun::Idle);
    assert_eq!(world.event("later").await.summary.status, Status::Discarded);
    assert_eq!(world.event("later").await.actions[0].action, "reject");
    assert!(world.do_all("fee").await.is_empty());
}

pub(crate) async fn a_job_that_goes_to_review_after_the_plan_is_not_decided_by_it<S: Sending>(
    world: World<S>,
) {
    // Two jobs are held for a predecessor. One goes to review before the plan is made, one after it.
    let gaps = Gaps { hold: Duration::from_secs(60), hold_max: 10, on_gap: OnGap::Review };
    let policy = OrderPolicy::Sequence { start: Some(1) };
    world.announce([with_gaps("fee", policy, gaps)]).await;
    world.accept("first", &[placed("fee", "a", 2)]).await;
    assert!(world.claim("fee", 10).await.is_empty());
    world.pass(30);
    world.accept("second", &[placed("fee", "b", 2)]).await;
    assert!(world.claim("fee", 10).await.is_empty());
    world.pass(40);
    assert!(world.claim("fee", 10).await.is_empty());
    assert_eq!(world.job("first", "fee").await.phase, Phase::Review);
    world.pass(1);
    let begun = begin(&world, plan_of(EventAct::Reject, EventFilter::default()), None).await;
    assert_eq!(begun.total, 1);
    world.pass(60);
    assert!(world.claim("fee", 10).await.is_empty());
    assert_eq!(world.job("second", "fee").await.phase, Phase::Review);
    assert_eq!(run(&world, 10, &[]).await, PlanRun::Idle);
    assert_eq!(world.job("first", "fee").await.phase, Phase::Discarded);
    assert_eq!(world.job("second", "fee").await.phase, Phase::Review);
}

pub(crate) async fn dead_letters_are_discarded_by_a_plan_of_one_handler_or_all<S: Sending>(
    world: World<S>,
) {
    // An event has dead letters of two handlers, and one of them was discarded before.
    world.announce([spec("fee"), spec("mail")]).await;
    accept_many(&world, "e", 3, &["fee", "mail"]).await;
    bury_all(&world, "fee").await;
    bury_all(&world, "mail").await;
    world.pass(1);
    let work = EventPlan::new(EventAct::Discard, Some(HandlerName::new("fee")), dead());
    let begun = begin(&world, work.clone(), None).await;
    assert_eq!(run(&world, 2, &[]).await, PlanRun::Idle);
    assert_eq!((begun.total, plan(&world, begun.id).await.done), (3, 3));
    for n in 0..3 {
        assert_eq!(world.job(&format!("e{n}"), "fee").await.phase, Phase::Discarded);
        assert_eq!(world.job(&format!("e{n}"), "mail").await.phase, Phase::Dead);
    }
    assert_eq!(count(&world, work).await, 0);
    // The status of these events is "discarded" now, although each still has a dead letter.
    assert_eq!(world.event("e0").await.summary.status, Status::Discarded);
    assert_eq!(count(&world, plan_of(EventAct::Discard, EventFilter::default())).await, 3);
    assert_eq!(count(&world, plan_of(REPLAY, dead())).await, 3);
    begin(&world, plan_of(EventAct::Discard, EventFilter::default()), None).await;
    assert_eq!(run(&world, 2, &[]).await, PlanRun::Idle);
    assert_eq!(world.job("e2", "mail").await.phase, Phase::Discarded);
    assert_eq!(world.event("e0").await.actions.len(), 2);
}

pub(crate) async fn a_plan_leaves_jobs_alone_that_ended_after_it_was_made<S: Sending>(
    world: World<S>,
) {
    // Each event has a dead letter when the plan is made, so the event is part of the plan. Its
    // other job dies, or is done, before the slice is taken. One more job dies after the slice was
    // read and before it is committed.
    world.announce([spec("fee"), spec("mail"), spec("post")]).await;
    let acts = [EventAct::Discard, REPLAY, EventAct::Replay { force: true }];
    for (n, act) in acts.into_iter().enumerate() {
        let name = format!("e{n}");
        world.accept(&name, &["fee", "mail", "post"].map(job)).await;
        assert_eq!(bury_all(&world, "fee").await, [name.as_str()]);
        world.pass(1);
        let filter = EventFilter { since: Some(after(0)), ..dead() };
        let begun = begin(&world, plan_of(act, filter), None).await;
        assert_eq!(begun.total, 1, "{act:?}");
        assert_eq!(bury_all(&world, "mail").await, [name.as_str()]);
        let slice = next(&world, 10, &["fee", "mail", "post"]).await.expect("is due");
        world.do_all("post").await;
        assert_eq!(world.store.take_slice(slice).await.expect("takes"), Held::Kept);
        assert_eq!(run(&world, 10, &["fee", "mail", "post"]).await, PlanRun::Idle);
        assert_eq!(plan(&world, begun.id).await.done, 1, "{act:?}");
        let fee = match act {
            EventAct::Discard => Phase::Discarded,
            EventAct::Replay { .. } | EventAct::Approve | EventAct::Reject => Phase::Ready,
        };
        assert_eq!(world.job(&name, "fee").await.phase, fee, "{act:?}");
        assert_eq!(world.job(&name, "mail").await.phase, Phase::Dead, "{act:?}");
        assert_eq!(world.job(&name, "post").await.phase, Phase::Done, "{act:?}");
        // Time passes before the next act.
        world.pass(1);
        world.do_all("fee").await;
        begin(&world, plan_of(EventAct::Discard, EventFilter::default()), None).await;
        assert_eq!(run(&world, 10, &[]).await, PlanRun::Idle);
    }
}

pub(crate) async fn a_plan_takes_what_its_filter_names<S: Sending>(world: World<S>) {
    // Each filter is tested alone, with other events that it leaves out.
    world.announce([spec("fee")]).await;
    accept_many(&world, "dead", 2, &["fee"]).await;
    bury_all(&world, "fee").await;
    accept_many(&world, "done", 1, &["fee"]).await;
    world.do_all("fee").await;
    world.pass(10);
    accept_many(&world, "failed", 1, &["fee"]).await;
    let claim = world.claim_one("fee").await;
    world.settle(&claim, failed(Retry::Schedule)).await;
    accept_many(&world, "leased", 1, &["fee"]).await;
    assert_eq!(world.claim("fee", 10).await.len(), 1);
    accept_many(&world, "ready", 1, &["fee"]).await;
    world.arrive_late("late", &[job("fee")]).await;
    accept_many(&world, "ignored", 1, &[]).await;
    world.arrive(&Sender::of("acme", "shop"), "of_acme", &[]).await;
    world.arrive(&Sender::of("default", "other"), "of_other", &[]).await;
    world.pass(10);
    let check = async |named: &str, filter: EventFilter, expected: u64| {
        let work = plan_of(REPLAY, filter);
        assert_eq!(count(&world, work.clone()).await, expected, "{named}");
        let begun = begin(&world, work, None).await;
        assert_eq!(begun.total, expected, "{named}");
        let mut seen = 0;
        while let Ok(slice) = next(&world, 2, &[]).await {
            seen += slice.events.len() as u64;
            assert_eq!(world.store.take_slice(slice).await.expect("takes"), Held::Kept);
        }
        assert_eq!(seen, expected, "{named}");
    };
    let none = EventFilter::default;
    check("nothing", none(), 10).await;
    check("a tenant", EventFilter { tenant: Some(Tenant::new("acme")), ..none() }, 1).await;
    check("a source", EventFilter { source: Some(SourceName::new("other")), ..none() }, 1).await;
    let of_type = |name: &str| EventFilter { event_type: Some(name.to_owned()), ..none() };
    check("a type", of_type("payout.paid"), 10).await;
    check("another type", of_type("payout"), 0).await;
    let text = |text: &str| EventFilter { text: Some(TextSearch::new(text)), ..none() };
    check("a text in the id", text("dead"), 2).await;
    check("a text in the body", text("\"amount\":10000"), 10).await;
    check("since", EventFilter { since: Some(after(10)), ..none() }, 7).await;
    check("until", EventFilter { until: Some(after(10)), ..none() }, 3).await;
    check("a later until", EventFilter { until: Some(after(1_000)), ..none() }, 10).await;
    check("unfinished", EventFilter { unfinished_since: Some(after(1)), ..none() }, 2).await;
    for (status, expected) in [
        (Status::Review, 1),
        (Status::Discarded, 0),
        (Status::Dead, 2),
        (Status::Failed, 1),
        (Status::Held, 0),
        (Status::Processing, 1),
        (Status::Received, 1),
        (Status::Processed, 1),
        (Status::Stale, 0),
        (Status::Ignored, 3),
    ] {
        let filter = EventFilter { status: Some(status), ..none() };
        check(status.as_str(), filter, expected).await;
    }
}

pub(crate) async fn a_plan_that_a_node_leaves_alone_delays_no_other<S: Sending>(world: World<S>) {
    // The first plan has waited longest, and this node cannot run it.
    world.announce([spec("fee")]).await;
    accept_many(&world, "e", 3, &["fee"]).await;
    bury_all(&world, "fee").await;
    world.pass(1);
    let first = begin(&world, plan_of(REPLAY, dead()), None).await;
    world.pass(1);
    let second = begin(&world, plan_of(EventAct::Discard, EventFilter::default()), None).await;
    let next = async |except: &[PlanId]| match world
        .store
        .run_plan(10, except.to_vec())
        .await
        .expect("runs")
    {
        PlanRun::Events(slice) => Some(slice.plan),
        PlanRun::Idle => None,
        other => panic!("{other:?}"),
    };
    assert_eq!(next(&[]).await, Some(first.id));
    assert_eq!(next(&[first.id]).await, Some(second.id));
    assert_eq!(next(&[second.id, first.id]).await, None);
    assert_eq!(next(&[second.id]).await, Some(first.id));
}

pub(crate) async fn a_plan_over_events_keeps_its_rate<S: Sending>(world: World<S>) {
    // The service behind the handler has just recovered.
    world.announce([spec("fee")]).await;
    accept_many(&world, "e", 30, &["fee"]).await;
    bury_all(&world, "fee").await;
    world.pass(1);
    let begun = begin(&world, plan_of(REPLAY, dead()), Some(10)).await;
    let done = async || plan(&world, begun.id).await.done;
    let PlanRun::NotBefore(at) = run(&world, 100, &["fee"]).await else { panic!("it must wait") };
    assert!(at > world.clock.now(), "{at}");
    let first = done().await;
    assert!((1..=12).contains(&first), "{first}");
    for second in 1..=2 {
        world.pass(1);
        run(&world, 100, &["fee"]).await;
        let now = done().await;
        assert!((10 * second..=10 * (second + 1) + 2).contains(&now), "{now} after {second} s");
    }
    world.pass(3);
    assert_eq!(run(&world, 100, &["fee"]).await, PlanRun::Idle);
    assert_eq!(done().await, 30);
}

pub(crate) async fn a_repeated_request_makes_one_plan_over_events<S: Sending>(world: World<S>) {
    world.announce([spec("fee")]).await;
    accept_many(&world, "e", 2, &["fee"]).await;
    bury_all(&world, "fee").await;
    world.pass(1);
    let work = plan_of(REPLAY, dead());
    let first = begin(&world, work.clone(), None).await;
    world.pass(1);
    let new =
        NewPlan { id: first.id, work: work.into(), rate: Some(5), request: REQUEST, alone: false };
    let again = world.store.create_plan(new.clone(), world.by("a repeated request")).await;
    assert_eq!(again.expect("answers"), PlanCreated::Created(Box::new(first)));
    // Another request under the same id changes nothing.
    let other = NewPlan { request: KeyHash([8; 16]), ..new };
    let refused = world.store.create_plan(other, world.by("another request")).await;
    assert_eq!(refused.expect("answers"), PlanCreated::OtherRequest);
    assert_eq!(world.store.plans(10).await.expect("lists").len(), 1);
}

pub(crate) async fn ended_plans_are_deleted_with_the_events_of_their_time<S: Sending>(
    world: World<S>,
) {
    // A plan that runs stays, however old it is.
    world.announce([spec("fee")]).await;
    accept_many(&world, "e", 2, &["fee"]).await;
    bury_all(&world, "fee").await;
    world.pass(1);
    let ended = begin(&world, plan_of(EventAct::Discard, EventFilter::default()), None).await;
    assert_eq!(run(&world, 10, &[]).await, PlanRun::Idle);
    accept_many(&world, "f", 1, &["fee"]).await;
    bury_all(&world, "fee").await;
    world.pass(1);
    let running = begin(&world, plan_of(EventAct::Discard, EventFilter::default()), None).await;
    let prune = async |before: Timestamp| {
        let horizon = Horizon { events_before: before, ..Horizon::forever() };
        while world.store.prune(horizon.clone(), 100).await.expect("prunes") {}
    };
    prune(after(1)).await;
    assert!(world.store.plan(ended.id).await.expect("reads").is_some());
    world.pass(1_000);
    prune(after(500)).await;
    assert!(world.store.plan(ended.id).await.expect("reads").is_none());
    assert_eq!(plan(&world, running.id).await.state, PlanState::Running);
    assert_eq!(run(&world, 10, &[]).await, PlanRun::Idle);
    assert_eq!(plan(&world, running.id).await.done, 1);
}
