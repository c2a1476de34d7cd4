//! Decisions of operators, case by case: review, replay, and what is pruned once no decision is
//! due. The first comment of each case describes how it tries to break the store.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::SourceName;
use hapax_core::job::{HandlerName, Phase, Retry};
use hapax_core::order::{Gaps, OnGap, OrderPolicy};
use hapax_core::store::{
    EventId, HandlerRef, HandlerSpec, Horizon, Lookup, PauseAnswer, PausedHandler, ReplayEffect,
    ReviewReason, Reviewed, Settlement, Status, Verdict, Wake,
};
use uuid::Uuid;

use crate::harness::{
    FOREVER, LEASE, Replay, Sender, Working, World, after, body, done, failed, handler, ids, job,
    noon, placed, spec, with_gaps,
};

pub(crate) async fn approving_beside_on_time_copies_writes_the_jobs_once<S: Working>(
    world: World<S>,
) {
    // Several operators approve while on-time copies arrive, all at the same instant.
    world.announce([spec("fee")]).await;
    for round in 0..5 {
        let name = format!("evt_{round}");
        let id = world.arrive_late(&name, &[job("fee")]).await;
        assert!(world.claim("fee", 10).await.is_empty(), "nothing runs before it is let through");
        let (sender, now) = (Sender::plain(), world.clock.now());
        let mut tasks = Vec::new();
        for n in 0..64 {
            let store = Arc::clone(&world.store);
            let ingest = sender.ingest_for(&body(&name), now, now, &[job("fee")]);
            let by = world.by("looks right");
            tasks.push(tokio::spawn(async move {
                if n % 4 == 0 {
                    let reviewed = store.approve(id, vec![job("fee")], by).await.expect("approves");
                    return usize::from(reviewed == Reviewed::Decided);
                }
                match store.ingest(ingest).await.expect("ingests").remove(0) {
                    Verdict::Accepted(promoted) => {
                        assert_eq!(promoted, id);
                        1
                    }
                    Verdict::Duplicate(known) => {
                        assert_eq!(known.id, id);
                        0
                    }
                    other => panic!("{other:?}"),
                }
            }));
        }
        let mut decided = 0;
        for task in tasks {
            decided += task.await.expect("no panic");
        }
        assert_eq!(decided, 1);
        assert_eq!(world.event(&name).await.jobs.len(), 1);
        assert_eq!(world.do_all("fee").await, [name]);
    }
}

pub(crate) async fn rejecting_beside_on_time_copies_has_one_winner<S: Working>(world: World<S>) {
    // An operator rejects a late event while on-time copies arrive: a rejected event must not run.
    world.announce([spec("fee")]).await;
    for round in 0..20 {
        let name = format!("evt_{round}");
        let id = world.arrive_late(&name, &[job("fee")]).await;
        let (sender, now) = (Sender::plain(), world.clock.now());
        let tasks: Vec<_> = (0..16)
            .map(|n| {
                let store = Arc::clone(&world.store);
                let ingest = sender.ingest_for(&body(&name), now, now, &[job("fee")]);
                let by = world.by("not ours");
                tokio::spawn(async move {
                    if n % 4 == 0 {
                        let reviewed = store.reject(id, by).await.expect("rejects");
                        return (usize::from(reviewed == Reviewed::Decided), 0);
                    }
                    match store.ingest(ingest).await.expect("ingests").remove(0) {
                        Verdict::Accepted(promoted) if promoted == id => (0, 1),
                        Verdict::Duplicate(known) if known.id == id => (0, 0),
                        other => panic!("{other:?}"),
                    }
                })
            })
            .collect();
        let (mut rejected, mut promoted) = (0, 0);
        for task in tasks {
            let (one, other) = task.await.expect("no panic");
            rejected += one;
            promoted += other;
        }
        assert_eq!(rejected + promoted, 1, "{rejected} rejected it, {promoted} promoted it");
        let status = world.event(&name).await.summary.status;
        assert_eq!(status == Status::Discarded, rejected == 1, "{status:?}");
        assert_eq!(world.do_all("fee").await.len(), promoted);
    }
}

pub(crate) async fn an_approved_event_records_its_operator<S: Working>(world: World<S>) {
    // The reason for the review must be kept too.
    world.announce([spec("fee")]).await;
    let id = world.arrive_late("evt_1", &[job("fee")]).await;
    assert_eq!(world.event("evt_1").await.summary.status, Status::Review);
    let by = world.by("the sender was down");
    let reviewed = world.store.approve(id, vec![job("fee")], by.clone()).await;
    assert_eq!(reviewed.expect("approves"), Reviewed::Decided);
    let detail = world.event("evt_1").await;
    assert_eq!(detail.summary.status, Status::Received);
    assert_eq!(detail.summary.review, Some(ReviewReason::Late));
    let notes: Vec<_> = detail.actions.iter().map(|note| (&*note.action, &*note.who)).collect();
    assert_eq!(notes, [("approve", "ops")]);
    assert_eq!((&detail.actions[0].reason, detail.actions[0].at), (&by.reason, by.at));
    let again = world.store.approve(id, vec![job("fee")], world.by("again")).await;
    assert_eq!(again.expect("approves"), Reviewed::NotWaiting(Status::Received));
    let unknown = EventId(Uuid::now_v7());
    let nothing = world.store.approve(unknown, vec![job("fee")], world.by("what")).await;
    assert_eq!(nothing.expect("approves"), Reviewed::Unknown);
}

pub(crate) async fn a_rejected_event_never_runs<S: Working>(world: World<S>) {
    // On-time copies, approvals and replays come after the rejection.
    world.announce([spec("fee")]).await;
    let id = world.arrive_late("evt_1", &[job("fee")]).await;
    let reject = async || world.store.reject(id, world.by("not ours")).await.expect("rejects");
    assert_eq!(reject().await, Reviewed::Decided);
    assert_eq!(reject().await, Reviewed::NotWaiting(Status::Discarded));
    let copy = world.arrive(&Sender::plain(), "evt_1", &[job("fee")]).await;
    assert!(matches!(copy, Verdict::Duplicate(known) if known.status == Status::Discarded));
    let approved = world.store.approve(id, vec![job("fee")], world.by("after all")).await;
    assert_eq!(approved.expect("approves"), Reviewed::NotWaiting(Status::Discarded));
    world.replay(id, &[job("fee")], Replay::Plain).await;
    assert!(world.claim_next("fee").await.is_empty());
    let detail = world.event("evt_1").await;
    assert_eq!(detail.summary.status, Status::Discarded);
    assert_eq!(detail.actions[0].action, "reject");
    assert_eq!(detail.actions[0].reason.as_deref(), Some("not ours"));
}

pub(crate) async fn replaying_a_done_job_does_nothing_without_force<S: Working>(world: World<S>) {
    // "Replay everything since Monday" must not charge Monday's fees again.
    world.announce([spec("fee")]).await;
    let id = world.accept("evt_1", &[job("fee")]).await;
    let first = world.claim_one("fee").await;
    world.settle(&first, done("once")).await;
    let before = world.job("evt_1", "fee").await;
    let replayed = world.replay(id, &[job("fee")], Replay::Plain).await;
    assert_eq!(replayed, [ReplayEffect::AlreadyApplied]);
    assert!(world.claim("fee", 10).await.is_empty());
    assert_eq!(world.job("evt_1", "fee").await, before);
    // An operator forces the replay.
    let replayed = world.replay(id, &[job("fee")], Replay::Force).await;
    assert_eq!(replayed, [ReplayEffect::WouldRun]);
    assert_eq!(world.settle(&first, done("the old right")).await, Settlement::Lost);
    let second = world.claim_one("fee").await;
    assert_eq!((second.job, second.run, second.attempt), (first.job, 2, 1));
    assert!(second.fence > first.fence);
    let running = world.job("evt_1", "fee").await;
    assert_eq!(running.idempotency_key, format!("{}:2", before.idempotency_key));
    world.settle(&second, done("twice")).await;
    let detail = world.event("evt_1").await;
    assert_eq!(detail.summary.result.as_deref(), Some("twice"));
    let runs: Vec<_> =
        detail.jobs[0].attempts.iter().map(|note| (note.run, note.attempt)).collect();
    assert_eq!(runs, [(1, 1), (2, 1)]);
    assert!(detail.actions.iter().all(|note| note.action == "replay" && note.who == "ops"));
    assert!(world.claim_next("fee").await.is_empty());
}

pub(crate) async fn replaying_a_dead_job_runs_it_again_with_a_fresh_schedule<S: Working>(
    world: World<S>,
) {
    // With the old count of steps the replayed job would die again at its first failure. With the
    // old attempt numbers two attempts would have one number.
    world.announce([spec("fee")]).await;
    let id = world.accept("evt_1", &[job("fee")]).await;
    let first = world.claim_one("fee").await;
    world.settle(&first, failed(Retry::Never)).await;
    let dead = world.job("evt_1", "fee").await;
    world.pass(86_400);
    let replayed = world.replay(id, &[job("fee")], Replay::Plain).await;
    assert_eq!(replayed, [ReplayEffect::WouldRun]);
    assert_eq!(world.settle(&first, done("the old right")).await, Settlement::Lost);
    assert_eq!(world.event("evt_1").await.summary.status, Status::Received);
    let second = world.claim_one("fee").await;
    assert_eq!((second.run, second.attempt), (1, 2));
    assert_eq!(world.settle(&second, failed(Retry::Schedule)).await, Settlement::Recorded);
    assert_eq!(world.event("evt_1").await.summary.status, Status::Failed);
    world.pass(100);
    let third = world.claim_one("fee").await;
    assert_eq!(world.settle(&third, done("at last")).await, Settlement::Recorded);
    let settled = world.job("evt_1", "fee").await;
    assert_eq!((settled.phase, settled.error), (Phase::Done, None));
    assert_eq!(settled.idempotency_key, dead.idempotency_key, "equal across replays");
    let attempts: Vec<_> = settled.attempts.iter().map(|note| note.attempt).collect();
    assert_eq!(attempts, [1, 2, 3]);
}

pub(crate) async fn a_job_that_was_lost_still_comes_alone_when_it_is_replayed<S: Working>(
    world: World<S>,
) {
    // A replayed job that killed the process five times must not put other jobs at risk, and yet it
    // gets a fresh schedule.
    world.announce([spec("fee")]).await;
    let id = world.accept("poison", &[job("fee")]).await;
    while !world.claim_next("fee").await.is_empty() {
        world.pass(LEASE);
    }
    assert_eq!(world.job("poison", "fee").await.phase, Phase::Dead);
    assert_eq!(world.replay(id, &[job("fee")], Replay::Plain).await, [ReplayEffect::WouldRun]);
    world.accept("neighbour", &[job("fee")]).await;
    let first = world.claim("fee", 10).await;
    let second = world.claim("fee", 10).await;
    assert_eq!((first.len(), second.len()), (1, 1), "each by itself");
    world.pass(LEASE + 10);
    let again = [world.claim("fee", 10).await, world.claim("fee", 10).await].concat();
    assert!(ids(&again).contains(&"poison"), "one more loss does not bury it: {:?}", ids(&again));
}

pub(crate) async fn replaying_an_open_job_leaves_it_as_it_is<S: Working>(world: World<S>) {
    // A replay during a running attempt must not void the worker's fence.
    world.announce([spec("fee")]).await;
    let id = world.accept("evt_1", &[job("fee")]).await;
    let open = [ReplayEffect::AlreadyOpen];
    assert_eq!(world.replay(id, &[job("fee")], Replay::Plain).await, open);
    let claim = world.claim_one("fee").await;
    assert_eq!(world.replay(id, &[job("fee")], Replay::Plain).await, open);
    assert_eq!(world.replay(id, &[job("fee")], Replay::Force).await, open);
    assert_eq!(world.settle(&claim, done("once")).await, Settlement::Recorded);
}

pub(crate) async fn replaying_a_job_that_waits_for_its_next_attempt_runs_it_now<S: Working>(
    world: World<S>,
) {
    // The default schedule waits for up to a day, and the operator who fixed the cause does not
    // want to wait. A new job of the same event must stay as it is.
    world.announce([spec("fee"), spec("mail")]).await;
    let id = world.accept("evt_1", &[job("fee"), job("mail")]).await;
    let first = world.claim_one("fee").await;
    let tomorrow = Retry::In(Duration::from_secs(86_400));
    assert_eq!(world.settle(&first, failed(tomorrow)).await, Settlement::Recorded);
    assert!(world.claim("fee", 10).await.is_empty());
    let before = world.job("evt_1", "fee").await;
    let both = [job("fee"), job("mail")];
    let effects = [ReplayEffect::WouldRun, ReplayEffect::AlreadyOpen];
    assert_eq!(world.replay(id, &both, Replay::Dry).await, effects);
    assert_eq!(world.job("evt_1", "fee").await, before, "looking is free");
    assert_eq!(world.replay(id, &both, Replay::Plain).await, effects);
    // Once the job is due, a second replay has no effect, and is not recorded.
    assert_eq!(world.replay(id, &both, Replay::Plain).await, [ReplayEffect::AlreadyOpen; 2]);
    assert_eq!(world.event("evt_1").await.actions.len(), 1);
    let second = world.claim_one("fee").await;
    assert_eq!((second.job, second.run, second.attempt), (first.job, 1, 2));
    let running = world.job("evt_1", "fee").await;
    assert_eq!(running.progress.steps, before.progress.steps, "the schedule goes on");
    assert_eq!(running.idempotency_key, before.idempotency_key);
    assert_eq!(world.settle(&second, done("at last")).await, Settlement::Recorded);
}

pub(crate) async fn a_handler_added_later_gets_a_job_by_replay<S: Working>(world: World<S>) {
    // The replay creates a job only for the new handler, and only one, however often it is
    // requested.
    world.announce([spec("fee"), spec("mail")]).await;
    let id = world.accept("evt_1", &[job("fee")]).await;
    let ignored = world.accept("evt_2", &[]).await;
    assert_eq!(world.event("evt_2").await.summary.status, Status::Ignored);
    assert_eq!(world.do_all("fee").await, ["evt_1"]);
    let both = [job("fee"), job("mail")];
    let effects = world.replay(id, &both, Replay::Plain).await;
    assert_eq!(effects, [ReplayEffect::AlreadyApplied, ReplayEffect::WouldRun]);
    let effects = world.replay(id, &both, Replay::Plain).await;
    assert_eq!(effects, [ReplayEffect::AlreadyApplied, ReplayEffect::AlreadyOpen]);
    assert_eq!(world.replay(ignored, &both, Replay::Plain).await, [ReplayEffect::WouldRun; 2]);
    assert_eq!(world.do_all("mail").await, ["evt_1", "evt_2"]);
    assert_eq!(world.do_all("fee").await, ["evt_2"]);
    assert_eq!(world.event("evt_1").await.jobs.len(), 2);
}

pub(crate) async fn a_dry_run_says_what_would_happen_and_changes_nothing<S: Working>(
    world: World<S>,
) {
    // A dry run must change nothing, even with force.
    world.announce([spec("fee"), spec("mail"), spec("log")]).await;
    let id = world.accept("evt_1", &[job("fee"), job("mail")]).await;
    world.settle(&world.claim_one("fee").await, done("once")).await;
    world.settle(&world.claim_one("mail").await, failed(Retry::Never)).await;
    let before = world.event("evt_1").await;
    let all = [job("fee"), job("mail"), job("log")];
    let effects = world.replay(id, &all, Replay::Dry).await;
    let run = ReplayEffect::WouldRun;
    assert_eq!(effects, [ReplayEffect::AlreadyApplied, run, run]);
    assert_eq!(world.replay(id, &all, Replay::DryForce).await, [run; 3]);
    assert_eq!(world.event("evt_1").await, before);
    for name in ["fee", "mail", "log"] {
        assert!(world.claim(name, 10).await.is_empty());
    }
    let unknown = EventId(Uuid::now_v7());
    assert_eq!(world.replay(unknown, &all, Replay::Plain).await, []);
}

/// Prunes until there is no more, in the smallest steps.
async fn prune<S: Working>(world: &World<S>, horizon: Horizon) {
    for _ in 0..100 {
        if !world.store.prune(horizon.clone(), 1).await.expect("prunes") {
            return;
        }
    }
    panic!("pruning never ends");
}

/// Whether its body, its history and its jobs are deleted; whether its name is still listed depends
/// on the store.
async fn is_pruned<S: Working>(world: &World<S>, id: &str) -> bool {
    match world.lookup(id).await {
        Lookup::None => true,
        Lookup::One(left) => left.body.is_empty() && left.jobs.is_empty(),
        Lookup::Ambiguous(ids) => panic!("{ids:?}"),
    }
}

pub(crate) async fn a_dead_letter_is_discarded_by_an_operator_and_can_then_be_pruned<S: Working>(
    world: World<S>,
) {
    // The dead letter of one handler is discarded, then the others. Open and done jobs must not
    // change, and the fence of the last attempt is void.
    world.announce([spec("fee"), spec("mail"), spec("log")]).await;
    let all = [job("fee"), job("mail"), job("log")];
    let id = world.accept("evt_1", &all).await;
    let discard = async |handler: Option<&str>| {
        let handler = handler.map(hapax_core::job::HandlerName::new);
        world.store.discard(id, handler, world.by("no longer wanted")).await.expect("discards")
    };
    assert_eq!(discard(None).await, Reviewed::NotWaiting(Status::Received), "nothing is dead");
    world.settle(&world.claim_one("log").await, done("kept")).await;
    for name in ["fee", "mail"] {
        let claim = world.claim_one(name).await;
        assert_eq!(world.settle(&claim, failed(Retry::Never)).await, Settlement::Recorded);
        if name == "fee" {
            assert_eq!(discard(Some("mail")).await, Reviewed::NotWaiting(Status::Dead));
            assert_eq!(discard(Some("fee")).await, Reviewed::Decided);
            assert_eq!(discard(Some("fee")).await, Reviewed::NotWaiting(Status::Discarded));
            assert_eq!(world.settle(&claim, done("after all")).await, Settlement::Lost);
        }
    }
    assert_eq!(discard(None).await, Reviewed::Decided);
    let detail = world.event("evt_1").await;
    assert_eq!(detail.summary.status, Status::Discarded);
    let phases: Vec<_> = detail.jobs.iter().map(|job| (job.handler.as_str(), job.phase)).collect();
    assert!(phases.contains(&("log", Phase::Done)), "{phases:?}");
    assert!(phases.contains(&("fee", Phase::Discarded)), "{phases:?}");
    assert!(phases.contains(&("mail", Phase::Discarded)), "{phases:?}");
    let notes: Vec<_> = detail.actions.iter().map(|note| (&*note.action, &*note.who)).collect();
    assert_eq!(notes, [("discard", "ops"), ("discard", "ops")]);
    assert_eq!(detail.actions[0].reason.as_deref(), Some("no longer wanted"));
    let dead = world.store.lanes().await.expect("reads");
    assert!(dead.iter().all(|lane| lane.dead == 0), "{dead:?}");
    assert_eq!(world.replay(id, &[job("fee")], Replay::Plain).await, [ReplayEffect::Discarded]);
    let unknown = EventId(Uuid::now_v7());
    let nothing = world.store.discard(unknown, None, world.by("what")).await.expect("discards");
    assert_eq!(nothing, Reviewed::Unknown);
    world.pass(86_401);
    prune(&world, Horizon { events_before: after(500), ..Horizon::forever() }).await;
    assert!(is_pruned(&world, "evt_1").await);
}

pub(crate) async fn pruning_takes_what_is_finished_and_past_its_horizon<S: Working>(
    world: World<S>,
) {
    // Everything unfinished is older than the horizon, and copies keep arriving.
    world.announce([spec("fee")]).await;
    let fee = [job("fee")];
    let first = world.accept("done", &fee).await;
    world.settle(&world.claim_one("fee").await, done("once")).await;
    let dead = world.accept("dead", &fee).await;
    world.settle(&world.claim_one("fee").await, failed(Retry::Never)).await;
    world.accept("failed", &fee).await;
    let in_thirty_days = Retry::In(Duration::from_secs(30 * 86_400));
    world.settle(&world.claim_one("fee").await, failed(in_thirty_days)).await;
    world.accept("leased", &fee).await;
    world.claim_one("fee").await;
    world.accept("ready", &fee).await;
    world.accept("ignored", &[]).await;
    world.arrive_late("review", &fee).await;
    let refused = world.arrive_late("refused", &fee).await;
    world.store.reject(refused, world.by("not ours")).await.expect("rejects");
    world.pass(1_000);
    world.accept("fresh", &[]).await;

    let keys_stay = Horizon { events_before: after(500), ..Horizon::forever() };
    prune(&world, keys_stay.clone()).await;
    let mut kept = Vec::new();
    for id in ["done", "dead", "failed", "leased", "ready", "ignored", "review", "refused", "fresh"]
    {
        if !is_pruned(&world, id).await {
            kept.push(id);
        }
    }
    assert_eq!(kept, ["dead", "failed", "leased", "ready", "review", "fresh"]);

    // The key outlives the body: a copy is still a duplicate, and nothing runs.
    let key = Sender::plain().ingest(&body("done")).receipts[0].key().clone();
    assert!(world.store.knows(&key).await.expect("reads"));
    let copy = world.arrive(&Sender::plain(), "done", &fee).await;
    assert!(matches!(&copy, Verdict::Duplicate(known) if known.id == first), "{copy:?}");
    assert!(is_pruned(&world, "done").await);

    // A dead letter is deleted within a day after an operator has decided about it.
    world.replay(dead, &fee, Replay::Plain).await;
    assert!(world.do_all("fee").await.contains(&"dead".to_owned()));
    world.pass(86_401);
    prune(&world, keys_stay).await;
    assert!(is_pruned(&world, "dead").await);

    // Another source's horizon does not apply to these keys; their own does.
    let other = (SourceName::new("other"), after(500));
    world.pass(86_401);
    let bodies_go = || Horizon { events_before: after(500), ..Horizon::forever() };
    prune(&world, Horizon { keys_before: vec![other], ..bodies_go() }).await;
    assert!(world.store.knows(&key).await.expect("reads"));
    let not_yet = (SourceName::new("shop"), noon());
    world.pass(86_401);
    prune(&world, Horizon { keys_before: vec![not_yet], ..bodies_go() }).await;
    assert!(world.store.knows(&key).await.expect("reads"));
    let now = (SourceName::new("shop"), after(500));
    world.pass(86_401);
    prune(&world, Horizon { keys_before: vec![now], ..bodies_go() }).await;
    assert!(!world.store.knows(&key).await.expect("reads"));
    let again = world.arrive(&Sender::plain(), "done", &[]).await;
    assert!(matches!(again, Verdict::Accepted(id) if id != first), "{again:?}");
}

pub(crate) async fn an_event_of_the_future_does_not_keep_the_events_after_it<S: Working>(
    world: World<S>,
) {
    // The clock was ten years ahead while one event arrived. All later events have the correct time.
    const YEARS: i64 = 10 * 365 * 86_400;
    world.announce([spec("fee")]).await;
    world.accept("before", &[]).await;
    world.pass(YEARS);
    world.accept("future", &[]).await;
    world.pass(-YEARS);
    world.accept("after", &[]).await;
    world.pass(1_000);
    world.accept("fresh", &[]).await;
    let bodies_go = || Horizon { events_before: after(500), ..Horizon::forever() };
    prune(&world, bodies_go()).await;
    for (id, expected) in [("before", true), ("future", false), ("after", true), ("fresh", false)] {
        assert_eq!(is_pruned(&world, id).await, expected, "{id}");
    }
    let keys = vec![(SourceName::new("shop"), after(500))];
    world.pass(86_401);
    prune(&world, Horizon { keys_before: keys, ..bodies_go() }).await;
    for (id, expected) in [("before", false), ("future", true), ("after", false), ("fresh", true)] {
        let key = Sender::plain().ingest(&body(id)).receipts[0].key().clone();
        assert_eq!(world.store.knows(&key).await.expect("reads"), expected, "{id}");
    }
}

pub(crate) async fn pruning_takes_ranges_and_leaves_what_lies_between<S: Working>(world: World<S>) {
    // Every third event is unfinished, and every fourth belongs to another source. A deletion by
    // ranges must not take a neighbour, and a late copy must still get each final status.
    let other = HandlerRef { source: SourceName::new("other"), handler: HandlerName::new("fee") };
    world.announce([spec("fee"), HandlerSpec { handler: other, ..spec("fee") }]).await;
    let (shop, other) = (Sender::plain(), Sender::of("default", "other"));
    let sender = |n: usize| if n.is_multiple_of(4) { &other } else { &shop };
    let fee = [job("fee")];
    let mut open = Vec::new();
    for n in 0..24 {
        let jobs = if n % 3 == 0 { &fee[..] } else { &[] };
        world.arrive(sender(n), &format!("evt_{n}"), jobs).await;
        open.extend((n % 3 == 0).then_some(n));
    }
    world.pass(1_000);
    let horizon = |keys_before: &[_]| Horizon {
        events_before: after(500),
        keys_before: keys_before.to_vec(),
        ..Horizon::forever()
    };
    for limit in [5, 24] {
        while world.store.prune(horizon(&[]), limit).await.expect("prunes") {}
    }
    for n in 0..24 {
        let id = format!("evt_{n}");
        assert_eq!(is_pruned(&world, &id).await, n % 3 != 0, "{id}");
        let copy = world.arrive(sender(n), &id, &fee).await;
        let status = if n % 3 == 0 { Status::Received } else { Status::Ignored };
        assert!(matches!(&copy, Verdict::Duplicate(known) if known.status == status), "{copy:?}");
    }

    // The keys of one source are past their time, those of the other are not.
    let keys_of_shop =
        vec![(SourceName::new("shop"), after(500)), (SourceName::new("other"), noon())];
    while world.store.prune(horizon(&keys_of_shop), 7).await.expect("prunes") {}
    let knows = async |n: usize| {
        let receipts = sender(n).ingest(&body(&format!("evt_{n}"))).receipts;
        world.store.knows(receipts[0].key()).await.expect("reads")
    };
    for n in 0..24 {
        assert_eq!(knows(n).await, n % 3 == 0 || n % 4 == 0, "evt_{n}");
    }

    // Events that were unfinished then are finished now: their keys are as old as the others.
    for claim in world.claim("fee", 24).await {
        assert_eq!(world.settle(&claim, done("now")).await, Settlement::Recorded);
    }
    while world.store.prune(horizon(&keys_of_shop), 5).await.expect("prunes") {}
    for n in open {
        let id = format!("evt_{n}");
        assert_eq!(is_pruned(&world, &id).await, n % 4 != 0, "{id}");
        assert_eq!(knows(n).await, n % 4 == 0, "{id}");
    }
}

pub(crate) async fn a_paused_handler_claims_nothing_and_loses_nothing<S: Working>(world: World<S>) {
    // Jobs arrive, wait for a retry and are under way while the handler is paused.
    world.announce([spec("fee"), spec("mail")]).await;
    world.accept("failed", &[job("fee")]).await;
    let failing = world.claim_one("fee").await;
    world.settle(&failing, failed(Retry::Schedule)).await;
    world.accept("running", &[job("fee")]).await;
    let running = world.claim_one("fee").await;
    world.accept("lost", &[job("fee")]).await;
    let lost = world.claim_one("fee").await;
    let pause = async || {
        let by = world.by("the bank is down");
        world.store.pause_handler(handler("fee"), by).await.expect("pauses")
    };
    assert!(world.store.paused_handlers().await.expect("reads").is_empty());
    let paused_at = world.clock.now();
    assert_eq!(pause().await, PauseAnswer::Changed);
    world.pass(5);
    assert_eq!(pause().await, PauseAnswer::AlreadySo);
    world.accept("waiting", &[job("fee"), job("mail")]).await;
    assert_eq!(world.do_all("mail").await, ["waiting"], "other handlers go on");
    world.pass(86_400);
    assert!(world.claim("fee", 10).await.is_empty());
    assert_eq!(world.next_due("fee").await, None);
    let paused = world.store.paused_handlers().await.expect("reads");
    assert_eq!(
        paused,
        [PausedHandler {
            handler: handler("fee"),
            since: paused_at,
            who: "ops".to_owned(),
            reason: Some("the bank is down".to_owned()),
        }]
    );
    // The attempt that was under way still counts.
    assert_eq!(world.settle(&running, done("in time")).await, Settlement::Recorded);
    for (id, attempts) in [("failed", 1), ("lost", 1), ("waiting", 0)] {
        let job = world.job(id, "fee").await;
        assert_eq!((job.progress.attempt, job.progress.lost), (attempts, 0), "{id}");
    }
    // The node restarts.
    world.announce([spec("fee"), spec("mail")]).await;
    assert!(world.claim("fee", 10).await.is_empty());
    let resume = async || {
        let by = world.by("it is back");
        world.store.resume_handler(handler("fee"), by).await.expect("resumes")
    };
    let fee = handler("fee");
    let woken = world.store.wait(&fee, FOREVER..=FOREVER);
    assert_eq!(resume().await, PauseAnswer::Changed);
    assert_eq!(woken.await, Wake::Arrived);
    assert_eq!(resume().await, PauseAnswer::AlreadySo);
    assert!(world.store.paused_handlers().await.expect("reads").is_empty());
    let mut ran = Vec::new();
    while !ran.contains(&"lost".to_owned()) {
        ran.extend(world.do_all("fee").await);
        world.pass(10);
    }
    ran.sort();
    assert_eq!(ran, ["failed", "lost", "waiting"]);
    assert_eq!(world.settle(&lost, done("too late")).await, Settlement::Lost);
}

pub(crate) async fn a_hold_does_not_end_while_its_handler_is_paused<S: Working>(world: World<S>) {
    // The predecessor arrives during the pause, and the hold's deadline passes before the end of it.
    let gaps = Gaps { hold: Duration::from_secs(60), hold_max: 10, on_gap: OnGap::Review };
    let policy = OrderPolicy::Sequence { start: Some(1) };
    world.announce([with_gaps("fee", policy, gaps)]).await;
    world.accept("second", &[placed("fee", "a", 2)]).await;
    assert!(world.claim("fee", 10).await.is_empty());
    assert_eq!(world.job("second", "fee").await.phase, Phase::Held);
    let by = world.by("a deploy");
    world.store.pause_handler(handler("fee"), by.clone()).await.expect("pauses");
    world.accept("first", &[placed("fee", "a", 1)]).await;
    world.pass(3_600);
    assert!(world.claim("fee", 10).await.is_empty());
    assert_eq!(world.job("second", "fee").await.phase, Phase::Held);
    world.store.resume_handler(handler("fee"), by).await.expect("resumes");
    assert_eq!(world.do_all("fee").await, ["first", "second"]);
}
