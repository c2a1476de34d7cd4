//! Order, case by case: arrival order is not event order. The first comment of each case says how
//! it tries to break the store.

use std::time::Duration;

use hapax_core::job::{Phase, Retry};
use hapax_core::order::{Gaps, OVERTAKEN, OrderPolicy};
use hapax_core::store::{Claim, Ran, ReplayEffect, Settlement, Status};

use crate::harness::{
    LEASE, Replay, Working, World, done, failed, ids, job, ordered, placed, spec, with_gaps,
};
use crate::jobs::{run_claimed, run_sql};

const LATEST: OrderPolicy = OrderPolicy::Latest;
const FROM_ONE: OrderPolicy = OrderPolicy::Sequence { start: Some(1) };
const FROM_FIRST: OrderPolicy = OrderPolicy::Sequence { start: None };

pub(crate) async fn latest_makes_older_versions_stale_and_lets_ties_and_gaps_run<S: Working>(
    world: World<S>,
) {
    // The update arrives before the create: applying the create afterwards would undo it.
    world.announce([ordered("fee", LATEST)]).await;
    let arrives = async |id: &str, version| {
        world.accept(id, &[placed("fee", "po_1", version)]).await;
        world.do_all("fee").await
    };
    assert_eq!(arrives("update", 5).await, ["update"]);
    assert_eq!(arrives("create", 1).await, [""; 0]);
    assert_eq!(arrives("tie", 5).await, ["tie"]);
    assert_eq!(arrives("leap", 9).await, ["leap"]);
    assert_eq!(arrives("behind", 8).await, [""; 0]);
    let stale = world.event("create").await;
    assert_eq!((stale.jobs[0].phase, stale.summary.status), (Phase::Stale, Status::Stale));
    assert_eq!(stale.jobs[0].finished_at, Some(world.clock.now()));
    assert_eq!(stale.jobs[0].resource.as_deref(), Some("po_1"));
    world.accept("elsewhere", &[placed("fee", "po_2", 1)]).await;
    assert_eq!(world.do_all("fee").await, ["elsewhere"], "another resource has its own mark");
}

pub(crate) async fn the_mark_moves_only_with_done<S: Working>(world: World<S>) {
    // A newer version that failed, was lost or died has applied nothing: the older one must run.
    world.announce([ordered("fee", LATEST)]).await;
    for (how, resource) in ["failed", "lost", "dead"].into_iter().zip(["r1", "r2", "r3"]) {
        world.accept(&format!("new_{how}"), &[placed("fee", resource, 2)]).await;
        let newer = world.claim_one("fee").await;
        match how {
            "failed" => drop(world.settle(&newer, failed(Retry::Schedule)).await),
            "dead" => drop(world.settle(&newer, failed(Retry::Never)).await),
            _ => world.pass(LEASE),
        }
        let older = format!("old_{how}");
        world.accept(&older, &[placed("fee", resource, 1)]).await;
        assert_eq!(world.do_all("fee").await, [older]);
    }
    let rest: Vec<_> = {
        world.pass(86_400);
        world.do_all("fee").await
    };
    assert_eq!(rest.len(), 2, "failed and lost run again: {rest:?}");
}

pub(crate) async fn two_handlers_keep_their_own_marks<S: Working>(world: World<S>) {
    // The marks of two handlers are independent.
    world.announce([ordered("fee", LATEST), ordered("mail", LATEST), spec("log")]).await;
    let jobs = |n| [placed("fee", "po_1", n), placed("mail", "po_1", n), job("log")];
    world.accept("v2", &jobs(2)).await;
    assert_eq!(world.do_all("fee").await, ["v2"]);
    world.accept("v1", &jobs(1)).await;
    assert_eq!(world.do_all("fee").await, [""; 0]);
    assert_eq!(ids(&[world.claim("mail", 1).await.remove(0)]), ["v2"]);
    assert_eq!(world.do_all("log").await, ["v2", "v1"]);
    assert_eq!(world.event("v1").await.summary.status, Status::Received, "mail is still to come");
}

pub(crate) async fn jobs_of_a_busy_resource_hide_no_job_of_a_free_one<S: Working>(world: World<S>) {
    // A worker asks for one job at a time, as often as it likes. The jobs that are due longest all wait for the
    // same resource.
    world.announce([ordered("fee", LATEST)]).await;
    world.accept("first", &[placed("fee", "busy", 0)]).await;
    let first = world.claim_one("fee").await;
    for n in 1..20 {
        world.accept(&format!("waits_{n}"), &[placed("fee", "busy", n)]).await;
    }
    world.accept("free", &[placed("fee", "free", 1)]).await;
    // On a busy machine the time of one claim may end before the jobs do.
    let mut claimed = Vec::new();
    for _ in 0..20 {
        claimed.extend(world.claim("fee", 1).await);
    }
    assert_eq!(ids(&claimed), ["free"]);
    assert_eq!(world.settle(&first, done("first")).await, Settlement::Recorded);
    assert_eq!(world.claim("fee", 1).await.len(), 1, "the resource is free");
}

pub(crate) async fn one_at_a_time_per_resource_while_others_go_on<S: Working>(world: World<S>) {
    // Two workers at once on one payout would decide on the same mark.
    world.announce([ordered("fee", LATEST)]).await;
    for (id, resource, version) in [("a1", "a", 1), ("a2", "a", 2), ("b1", "b", 1), ("a3", "a", 3)]
    {
        world.accept(id, &[placed("fee", resource, version)]).await;
    }
    let claims = world.claim("fee", 10).await;
    assert_eq!(ids(&claims), ["a1", "b1"]);
    assert_eq!(world.job("a2", "fee").await.phase, Phase::Parked);
    assert!(world.job("a2", "fee").await.due_at.is_some(), "nothing open is without a time");
    assert_eq!(world.event("a2").await.summary.status, Status::Received);
    assert!(world.claim("fee", 10).await.is_empty());
    assert_eq!(world.settle(&claims[0], done("a1")).await, Settlement::Recorded);
    // The commit that settled the first job readied this one.
    assert_eq!(world.job("a2", "fee").await.phase, Phase::Ready);
    let second = world.claim_one("fee").await;
    assert_eq!(ids(std::slice::from_ref(&second)), ["a2"]);
    // A failure frees the resource as well, and a claim that is given back does too.
    assert_eq!(world.settle(&second, failed(Retry::Schedule)).await, Settlement::Recorded);
    let third = world.claim_one("fee").await;
    assert_eq!(ids(std::slice::from_ref(&third)), ["a3"]);
    world.store.give_back(vec![(third.job, third.fence)]).await.expect("gives back");
    assert_eq!(world.do_all("fee").await, ["a3"]);
    assert_eq!(world.settle(&claims[1], done("b1")).await, Settlement::Recorded);
    world.pass(100);
    assert_eq!(world.do_all("fee").await, [""; 0]);
    assert_eq!(world.job("a2", "fee").await.phase, Phase::Stale, "its retry came too late");
}

pub(crate) async fn waiting_older_versions_do_not_delay_the_newest<S: Working>(world: World<S>) {
    // Many jobs wait for one resource, and those that are readied first turn out to be stale: the
    // jobs behind them have nothing left to wait for.
    world.announce([ordered("fee", LATEST)]).await;
    world.accept("v5", &[placed("fee", "a", 5)]).await;
    let running = world.claim_one("fee").await;
    for version in [1, 2, 3, 4, 7] {
        world.accept(&format!("v{version}"), &[placed("fee", "a", version)]).await;
    }
    assert!(world.claim("fee", 10).await.is_empty());
    assert_eq!(world.settle(&running, done("v5")).await, Settlement::Recorded);
    let mut applied = Vec::new();
    for _ in 0..3 {
        for claim in world.claim_next("fee").await {
            world.settle(&claim, done("done")).await;
            applied.push(claim.event.key.event_id.to_string());
        }
    }
    assert_eq!(applied, ["v7"]);
    for version in 1..=4 {
        assert_eq!(world.job(&format!("v{version}"), "fee").await.phase, Phase::Stale);
    }
}

pub(crate) async fn an_expired_lease_frees_its_resource<S: Working>(world: World<S>) {
    // The worker died while it held the resource, and no worker settles the job.
    world.announce([ordered("fee", LATEST)]).await;
    world.accept("a1", &[placed("fee", "a", 1)]).await;
    world.accept("a2", &[placed("fee", "a", 2)]).await;
    assert_eq!(ids(&world.claim("fee", 10).await), ["a1"]);
    world.pass(LEASE);
    let mut seen = Vec::new();
    for _ in 0..3 {
        for claim in world.claim_next("fee").await {
            seen.push(claim.event.key.event_id.to_string());
            world.settle(&claim, done("done")).await;
        }
    }
    assert!(seen.contains(&"a2".to_owned()), "{seen:?}");
    let phases = [world.job("a1", "fee").await.phase, world.job("a2", "fee").await.phase];
    assert!(phases.iter().all(|phase| !phase.is_open()), "{phases:?}");
}

pub(crate) async fn a_waiting_worker_is_notified_when_a_resource_is_free<S: Working>(
    world: World<S>,
) {
    // A worker that found only parked jobs waits for a hint; without one, a busy resource would
    // continue only with the next poll.
    world.announce([ordered("fee", LATEST)]).await;
    world.accept("a1", &[placed("fee", "a", 1)]).await;
    world.accept("a2", &[placed("fee", "a", 2)]).await;
    let first = world.claim_one("fee").await;
    let notified = async {
        tokio::join!(world.arrival("fee"), world.settle(&first, done("a1")));
    };
    tokio::time::timeout(crate::harness::FOREVER, notified).await.expect("notified");
    let second = world.claim_one("fee").await;
    let notified = async {
        let back = world.store.give_back(vec![(second.job, second.fence)]);
        tokio::join!(world.arrival("fee"), back)
    };
    let (_, back) =
        tokio::time::timeout(crate::harness::FOREVER, notified).await.expect("notified");
    back.expect("gives back");
}

pub(crate) async fn no_job_stays_parked_behind_one_that_became_stale<S: Working>(world: World<S>) {
    // Three versions of one payout at once, the newest first: when it is done, both others are
    // stale. The first of them becomes stale at its claim, and no job is left to wake the second.
    world.announce([ordered("fee", LATEST)]).await;
    for (id, version) in [("v9", 9), ("v3", 3), ("v4", 4)] {
        world.accept(id, &[placed("fee", "po_1", version)]).await;
    }
    assert_eq!(world.do_all("fee").await, ["v9"]);
    assert!(world.claim_next("fee").await.is_empty());
    for id in ["v3", "v4"] {
        assert_eq!(world.job(id, "fee").await.phase, Phase::Stale, "{id}");
    }
}

pub(crate) async fn a_handler_that_keeps_no_order_any_more_lets_all_go<S: Working>(
    world: World<S>,
) {
    // A reload removes the order while one job is held, one parked and two are ready.
    world.announce([ordered("fee", FROM_ONE), ordered("mail", LATEST)]).await;
    world.accept("n3", &[placed("fee", "acct", 3)]).await;
    assert!(world.claim("fee", 10).await.is_empty());
    assert_eq!(world.job("n3", "fee").await.phase, Phase::Held);
    for id in ["m1", "m2", "m3"] {
        world.accept(id, &[placed("mail", "acct", 1)]).await;
    }
    let first = world.claim("mail", 2).await;
    assert_eq!(ids(&first), ["m1"]);
    assert_eq!(world.job("m2", "mail").await.phase, Phase::Parked);
    world.announce([spec("fee"), spec("mail")]).await;
    assert_eq!(ids(&world.claim("fee", 10).await), ["n3"]);
    world.settle(&first[0], done("m1")).await;
    let mut rest = world.claim("mail", 10).await;
    rest.sort_by(|one, other| one.event.key.event_id.cmp(&other.event.key.event_id));
    assert_eq!(ids(&rest), ["m2", "m3"]);
}

pub(crate) async fn shuffled_versions_end_in_the_newest_state<S: Working>(world: World<S>) {
    // SQL work gets twelve versions of each of twenty resources, shuffled.
    world.announce([ordered("fee", LATEST)]).await;
    for n in 0..12i64 {
        for resource in 0..20i64 {
            // 5 and 7 are coprime with 12: every version once, in another order per resource.
            let step = if resource % 2 == 0 { 5 } else { 7 };
            let version = (n * step + resource) % 12;
            let place = placed("fee", &format!("r{resource}"), version);
            world.accept(&format!("r{resource}_v{version}"), &[place]).await;
        }
        if n % 3 == 0 {
            run_sql(&world, "fee").await;
        }
    }
    run_sql(&world, "fee").await;
    for resource in 0..20 {
        for version in 0..12 {
            let phase = world.job(&format!("r{resource}_v{version}"), "fee").await.phase;
            assert!(matches!(phase, Phase::Done | Phase::Stale), "{phase:?}");
            assert!(version < 11 || phase == Phase::Done, "the newest is applied");
        }
    }
}

pub(crate) async fn a_sequence_holds_what_is_past_a_gap_and_runs_in_order_when_filled<
    S: Working,
>(
    world: World<S>,
) {
    // The numbers arrive backwards.
    world.announce([ordered("fee", FROM_ONE)]).await;
    for n in [4, 3, 2] {
        world.accept(&format!("n{n}"), &[placed("fee", "acct", n)]).await;
        assert!(world.claim("fee", 10).await.is_empty(), "{n} is past a gap");
        assert_eq!(world.job(&format!("n{n}"), "fee").await.phase, Phase::Held);
        assert_eq!(world.event(&format!("n{n}")).await.summary.status, Status::Held);
    }
    world.accept("other", &[placed("fee", "another", 1)]).await;
    assert_eq!(world.do_all("fee").await, ["other"], "other resources go on");
    world.accept("n1", &[placed("fee", "acct", 1)]).await;
    let first = world.claim_one("fee").await;
    assert!(world.claim("fee", 10).await.is_empty());
    assert_eq!(world.settle(&first, done("1")).await, Settlement::Recorded);
    assert_eq!(world.job("n2", "fee").await.phase, Phase::Ready, "in the same step");
    assert_eq!(world.do_all("fee").await, ["n2", "n3", "n4"]);
}

pub(crate) async fn a_failing_or_dead_number_is_a_gap<S: Working>(world: World<S>) {
    // "Seen" is not "applied": the third must not run while the second is dead.
    let patient = Gaps { hold: Duration::from_secs(30 * 86_400), ..Gaps::default() };
    world.announce([with_gaps("fee", FROM_ONE, patient)]).await;
    let place = |n| placed("fee", "acct", n);
    world.accept("n1", &[place(1)]).await;
    assert_eq!(world.do_all("fee").await, ["n1"]);
    let second = world.accept("n2", &[place(2)]).await;
    world.accept("n3", &[place(3)]).await;
    let claim = world.claim_one("fee").await;
    assert_eq!(world.settle(&claim, failed(Retry::Schedule)).await, Settlement::Recorded);
    assert!(world.claim("fee", 10).await.is_empty(), "it fails, and is waited for");
    world.pass(100);
    let claim = world.claim_one("fee").await;
    assert_eq!(world.settle(&claim, failed(Retry::Never)).await, Settlement::Recorded);
    assert!(world.claim_next("fee").await.is_empty(), "it is dead, and still a gap");
    assert_eq!(world.job("n3", "fee").await.phase, Phase::Held);
    let replayed = world.replay(second, &[place(2)], Replay::Plain).await;
    assert_eq!(replayed, [ReplayEffect::WouldRun]);
    assert_eq!(world.do_all("fee").await, ["n2", "n3"]);
}

pub(crate) async fn a_job_at_or_below_the_mark_is_stale_unless_an_operator_forces_it<S: Working>(
    world: World<S>,
) {
    // A second event has a number that was applied, and is replayed.
    world.announce([ordered("fee", FROM_ONE)]).await;
    let place = |n| placed("fee", "acct", n);
    for n in 1..=3 {
        world.accept(&format!("n{n}"), &[place(n)]).await;
    }
    assert_eq!(world.do_all("fee").await, ["n1", "n2", "n3"]);
    let again = world.accept("again", &[place(2)]).await;
    assert!(world.claim("fee", 10).await.is_empty());
    assert_eq!(world.job("again", "fee").await.phase, Phase::Stale);
    let replayed = world.replay(again, &[place(2)], Replay::Plain).await;
    assert_eq!(replayed, [ReplayEffect::Stale]);
    assert!(world.claim("fee", 10).await.is_empty());
    let replayed = world.replay(again, &[place(2)], Replay::Force).await;
    assert_eq!(replayed, [ReplayEffect::WouldRun]);
    assert_eq!(world.do_all("fee").await, ["again"]);
    world.accept("n4", &[place(4)]).await;
    assert_eq!(world.do_all("fee").await, ["n4"], "the mark did not go back");
}

pub(crate) async fn a_dead_job_that_was_overtaken_is_stale_when_replayed<S: Working>(
    world: World<S>,
) {
    // Replaying the dead letters of last week must not undo this week's versions.
    world.announce([ordered("fee", LATEST)]).await;
    let old = world.accept("v1", &[placed("fee", "po_1", 1)]).await;
    world.settle(&world.claim_one("fee").await, failed(Retry::Never)).await;
    world.accept("v2", &[placed("fee", "po_1", 2)]).await;
    assert_eq!(world.do_all("fee").await, ["v2"]);
    for how in [Replay::Dry, Replay::Plain] {
        let replayed = world.replay(old, &[placed("fee", "po_1", 1)], how).await;
        assert_eq!(replayed, [ReplayEffect::Stale]);
    }
    assert!(world.claim("fee", 10).await.is_empty());
    assert_eq!(world.job("v1", "fee").await.phase, Phase::Stale);
}

pub(crate) async fn a_sequence_without_a_start_begins_with_what_is_claimed_first<S: Working>(
    world: World<S>,
) {
    // The first number of a sequence fails. The second must not count as the first, and the first
    // must not become stale.
    world.announce([ordered("fee", FROM_FIRST)]).await;
    world.accept("n5", &[placed("fee", "acct", 5)]).await;
    let first = world.claim_one("fee").await;
    world.accept("n6", &[placed("fee", "acct", 6)]).await;
    assert_eq!(world.settle(&first, failed(Retry::Schedule)).await, Settlement::Recorded);
    assert!(world.claim("fee", 10).await.is_empty());
    world.pass(100);
    assert_eq!(world.do_all("fee").await, ["n5", "n6"]);
    world.accept("n4", &[placed("fee", "acct", 4)]).await;
    assert_eq!(world.do_all("fee").await, [""; 0]);
    assert_eq!(world.job("n4", "fee").await.phase, Phase::Stale);
}

pub(crate) async fn a_claimed_job_has_its_resource_for_itself_and_moves_its_mark<S: Working>(
    world: World<S>,
) {
    // While the worker fetches the current object, newer and older versions of the same payout
    // arrive.
    world.announce([ordered("fee", LATEST)]).await;
    world.accept("v2", &[placed("fee", "po_1", 2)]).await;
    let claim = world.claim_one("fee").await;
    world.accept("v1", &[placed("fee", "po_1", 1)]).await;
    world.accept("v3", &[placed("fee", "po_1", 3)]).await;
    assert!(world.claim("fee", 10).await.is_empty(), "one at a time");
    assert_eq!(run_claimed(&world, &claim).await, Ran::Done);
    assert_eq!(world.do_all("fee").await, ["v3"]);
    assert_eq!(world.event("v1").await.summary.status, Status::Stale);
}

/// A claim of version 4 that the late "done" of version 5 has overtaken, while 6 waits for its turn.
async fn overtaken<S: Working>(world: &World<S>) -> Claim {
    world.announce([ordered("fee", LATEST)]).await;
    world.accept("v5", &[placed("fee", "po_1", 5)]).await;
    let slow = world.claim_one("fee").await;
    world.pass(LEASE);
    world.accept("v4", &[placed("fee", "po_1", 4)]).await;
    let older = world.claim("fee", 1).await.remove(0);
    assert_eq!(ids(std::slice::from_ref(&older)), ["v4"]);
    world.accept("v6", &[placed("fee", "po_1", 6)]).await;
    assert!(world.claim("fee", 1).await.is_empty(), "one at a time");
    assert_eq!(world.settle(&slow, done("late, but first")).await, Settlement::Recorded);
    older
}

pub(crate) async fn a_claimed_job_that_was_overtaken_while_it_waited_does_nothing<S: Working>(
    world: World<S>,
) {
    // A slow worker's lease ended, an older version was claimed, and then the slow worker reports
    // "done". The older job that was claimed in between must not undo the newer version or delay
    // the next job.
    let older = overtaken(&world).await;
    assert_eq!(run_claimed(&world, &older).await, Ran::Guarded);
    assert_eq!(world.event("v4").await.summary.status, Status::Stale);
    assert_eq!(world.job("v4", "fee").await.progress.attempt, 0, "nothing of it was tried");
    assert_eq!(world.do_all("fee").await, ["v6"]);
}

pub(crate) async fn an_overtaken_job_is_stale_at_once_and_blocks_no_other<S: Working>(
    world: World<S>,
) {
    // A slow worker's late "done" moves the mark past a job that another worker holds. That job's
    // "done" does not count, and the next of the resource must not wait for its lease.
    let older = overtaken(&world).await;
    for _ in 0..2 {
        assert_eq!(world.settle(&older, done("too late")).await, Settlement::Lost);
        let job = world.job("v4", "fee").await;
        assert_eq!((job.phase, job.progress.attempt, job.result), (Phase::Stale, 1, None));
        let outcomes: Vec<_> = job.attempts.iter().map(|one| one.outcome.as_str()).collect();
        assert_eq!(outcomes, ["lost"]);
        assert_eq!(job.error.as_deref(), Some(OVERTAKEN));
    }
    assert_eq!(world.do_all("fee").await, ["v6"]);
}

pub(crate) async fn a_look_that_sets_a_job_aside_is_no_attempt<S: Working>(world: World<S>) {
    // A handler that decides in its own transaction has claimed before it finds that it must wait:
    // the history must not show an attempt that never ran.
    world.announce([ordered("fee", FROM_ONE), ordered("mail", LATEST)]).await;
    let story = async |id: &str, name: &str| {
        let job = world.job(id, name).await;
        (job.phase, job.progress.attempt, job.attempts.len())
    };
    world.accept("n2", &[placed("fee", "acct", 2)]).await;
    for _ in 0..2 {
        assert_eq!(run_sql(&world, "fee").await, 0);
        assert_eq!(story("n2", "fee").await, (Phase::Held, 0, 0));
    }
    world.accept("n1", &[placed("fee", "acct", 1)]).await;
    assert_eq!(run_sql(&world, "fee").await, 2);
    for id in ["n1", "n2"] {
        assert_eq!(story(id, "fee").await, (Phase::Done, 1, 1), "{id}");
    }
    world.accept("v2", &[placed("mail", "acct", 2)]).await;
    assert_eq!(run_sql(&world, "mail").await, 1);
    world.accept("v1", &[placed("mail", "acct", 1)]).await;
    assert_eq!(run_sql(&world, "mail").await, 0);
    assert_eq!(story("v1", "mail").await, (Phase::Stale, 0, 0));
}
