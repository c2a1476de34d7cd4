//! Gaps, case by case: a held job waits for its predecessor, but not for ever; and machines, where
//! states take the place of numbers. The first comment of each case says how it tries to break the
//! store.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::job::{Phase, Retry};
use hapax_core::order::{Gaps, HELD_TOO_LONG, HELD_TOO_MANY, Machine, OnGap, OrderPolicy};
use hapax_core::store::{
    EventFilter, EventId, Held, Horizon, JobFilter, Lookup, NewJob, ReplayEffect, Reviewed,
    Settlement, Status,
};

use crate::harness::{
    LEASE, Replay, Working, World, after, done, failed, ids, job, ordered, placed, spec, with_gaps,
};
use crate::jobs::run_sql;

const FROM_ONE: OrderPolicy = OrderPolicy::Sequence { start: Some(1) };
const HOLD: i64 = 600;

fn gaps(on_gap: OnGap) -> Gaps {
    Gaps { hold: Duration::from_secs(HOLD.unsigned_abs()), hold_max: 1_000, on_gap }
}

fn nth(n: i64) -> NewJob {
    placed("fee", "acct", n)
}

/// The states of a payout: the order policy, and a function that makes a job for a state.
fn payout() -> (OrderPolicy, impl Fn(&str) -> NewJob) {
    let allow = ["pending -> charged", "charged -> paid", "charged -> failed", "failed -> charged"];
    let machine = Arc::new(Machine::parse(Some("pending"), &allow).expect("a machine"));
    let policy = OrderPolicy::Machine(Arc::clone(&machine));
    (policy, move |state| placed("fee", "po_1", machine.position(state).expect("a state").0))
}

impl<S: Working> World<S> {
    /// Accepts events with these numbers, and runs all jobs that may run.
    async fn numbers(&self, numbers: impl IntoIterator<Item = i64>) -> Vec<String> {
        for n in numbers {
            self.accept(&format!("n{n}"), &[nth(n)]).await;
        }
        self.do_all("fee").await
    }

    async fn phase(&self, id: &str) -> Phase {
        self.job(id, "fee").await.phase
    }

    async fn phases<const N: usize>(&self, events: [&str; N]) -> [Phase; N] {
        let mut phases = [Phase::Ready; N];
        for (phase, id) in phases.iter_mut().zip(events) {
            *phase = self.phase(id).await;
        }
        phases
    }

    async fn approve(&self, id: EventId) -> Reviewed {
        self.store.approve(id, vec![job("fee")], self.by("go on")).await.expect("approves")
    }

    async fn reject(&self, id: EventId) -> Reviewed {
        self.store.reject(id, self.by("not this one")).await.expect("rejects")
    }

    async fn in_status(&self, status: Status) -> Vec<String> {
        let filter = EventFilter { status: Some(status), limit: 100, ..EventFilter::default() };
        let page = self.store.events(filter).await.expect("reads");
        page.items.into_iter().map(|event| event.event_id).collect()
    }
}

pub(crate) async fn a_gap_held_too_long_goes_to_review_and_can_be_approved<S: Working>(
    world: World<S>,
) {
    // The second number never arrives; no job may run early, and none may wait for ever.
    world.announce([with_gaps("fee", FROM_ONE, gaps(OnGap::Review))]).await;
    assert_eq!(world.numbers([1]).await, ["n1"]);
    let third = world.accept("n3", &[nth(3)]).await;
    assert!(world.claim("fee", 10).await.is_empty());
    let held = world.job("n3", "fee").await;
    assert_eq!((held.phase, held.due_at), (Phase::Held, Some(after(HOLD))));
    let next = world.next_due("fee").await;
    assert_eq!(next, Some(after(HOLD)), "workers wake for the deadline");
    world.pass(HOLD - 1);
    assert!(world.claim("fee", 10).await.is_empty());
    assert_eq!(world.job("n3", "fee").await, held, "the deadline is fixed, and not over");
    world.pass(1);
    assert!(world.claim("fee", 10).await.is_empty());
    let waits = world.job("n3", "fee").await;
    assert_eq!(waits.phase, Phase::Review);
    assert_eq!((waits.due_at, waits.finished_at), (None, None));
    assert_eq!(waits.error.as_deref(), Some(HELD_TOO_LONG));
    assert_eq!(world.event("n3").await.summary.status, Status::Review);
    assert_eq!(world.event("n3").await.summary.processed_at, None);
    assert_eq!(world.in_status(Status::Review).await, ["n3"]);
    assert_eq!(world.next_due("fee").await, None);
    assert_eq!(world.replay(third, &[nth(3)], Replay::Force).await, [ReplayEffect::AlreadyOpen]);

    assert_eq!(world.approve(third).await, Reviewed::Decided);
    assert_eq!(world.approve(third).await, Reviewed::NotWaiting(Status::Received));
    assert_eq!(world.event("n3").await.actions[0].action, "approve");
    assert_eq!(world.do_all("fee").await, ["n3"]);
    assert_eq!(world.job("n3", "fee").await.run, 1, "it never ran before");
    assert_eq!(world.numbers([2]).await, [""; 0], "the missing number is stale now");
    assert_eq!(world.phase("n2").await, Phase::Stale);
    assert_eq!(world.numbers([4]).await, ["n4"], "the mark followed");
}

pub(crate) async fn a_busy_resource_does_not_extend_the_holds_of_others<S: Working>(
    world: World<S>,
) {
    // More jobs than one claim judges are held past their deadline behind a running job. Each of them is older than
    // the held job of another resource.
    world.announce([with_gaps("fee", FROM_ONE, gaps(OnGap::Review))]).await;
    world.accept("n1", &[nth(1)]).await;
    let running = world.claim_one("fee").await;
    for n in 3..=80 {
        world.accept(&format!("n{n}"), &[nth(n)]).await;
    }
    while world.phase("n80").await != Phase::Held {
        assert!(world.claim("fee", 100).await.is_empty());
    }
    world.pass(1);
    world.accept("other", &[placed("fee", "other", 2)]).await;
    assert!(world.claim("fee", 100).await.is_empty());
    let long = Duration::from_secs(3 * HOLD.unsigned_abs());
    let renewed = world.store.renew(running.job, running.fence, long).await.expect("renews");
    assert_eq!(renewed, Held::Kept);
    let next = world.next_due("fee").await;
    assert!(
        next.is_some_and(|due| due <= after(HOLD + 1)),
        "workers wake for the deadline: {next:?}"
    );
    world.pass(HOLD);
    assert!(world.claim("fee", 100).await.is_empty());
    assert_eq!(
        world.phases(["n3", "n80", "other"]).await,
        [Phase::Held, Phase::Held, Phase::Review]
    );
    assert_eq!(world.settle(&running, done("done")).await, Settlement::Recorded);
    while world.phase("n80").await == Phase::Held {
        assert!(world.claim("fee", 100).await.is_empty());
    }
    assert_eq!(
        world.phases(["n3", "n80"]).await,
        [Phase::Review; 2],
        "now their own deadline is over"
    );
}

pub(crate) async fn a_rejected_job_never_runs_unless_forced<S: Working>(world: World<S>) {
    // Replays and approvals come after the rejection, and an old worker reports late.
    world.announce([with_gaps("fee", FROM_ONE, gaps(OnGap::Review)), spec("mail")]).await;
    let second = world.accept("n2", &[nth(2), job("mail")]).await;
    assert_eq!(world.do_all("fee").await, [""; 0]);
    world.pass(HOLD);
    assert!(world.claim("fee", 10).await.is_empty());
    assert_eq!(world.reject(second).await, Reviewed::Decided);
    let rejected = world.event("n2").await;
    assert_eq!(
        (world.phase("n2").await, rejected.summary.status),
        (Phase::Discarded, Status::Discarded)
    );
    assert_eq!(world.job("n2", "fee").await.finished_at, Some(world.clock.now()));
    assert_eq!(world.in_status(Status::Discarded).await, ["n2"]);
    assert_eq!(world.in_status(Status::Review).await, [""; 0]);
    assert_eq!(world.reject(second).await, Reviewed::NotWaiting(Status::Discarded));
    assert_eq!(world.approve(second).await, Reviewed::NotWaiting(Status::Discarded));
    assert_eq!(world.do_all("mail").await, ["n2"], "the other handler was not asked about");
    assert_eq!(world.replay(second, &[nth(2)], Replay::Plain).await, [ReplayEffect::Discarded]);
    assert_eq!(world.numbers([1]).await, ["n1"]);
    assert_eq!(world.phase("n2").await, Phase::Discarded);
    assert_eq!(world.replay(second, &[nth(2)], Replay::Force).await, [ReplayEffect::WouldRun]);
    assert_eq!(world.do_all("fee").await, ["n2"]);
}

pub(crate) async fn a_late_number_leaves_jobs_in_review_to_the_operator<S: Working>(
    world: World<S>,
) {
    // The missing number arrives while the next one is in review. The missing number must not run before
    // the decision or be lost, and later numbers wait.
    world.announce([with_gaps("fee", FROM_ONE, gaps(OnGap::Review))]).await;
    let second = world.accept("n2", &[nth(2)]).await;
    assert!(world.claim("fee", 10).await.is_empty());
    world.pass(HOLD);
    assert!(world.claim("fee", 10).await.is_empty());
    assert_eq!(world.numbers([1, 3]).await, ["n1"]);
    assert_eq!(world.phases(["n2", "n3"]).await, [Phase::Review, Phase::Held]);
    assert_eq!(world.approve(second).await, Reviewed::Decided);
    assert_eq!(world.do_all("fee").await, ["n2", "n3"]);
}

pub(crate) async fn a_gap_held_too_long_is_left_behind_where_going_on_is_allowed<S: Working>(
    world: World<S>,
) {
    // Three gaps at once: the numbers behind them must run in order, one gap after the other. The
    // missing numbers must not run afterwards: not late, not as a retry, not as a replay.
    world.announce([with_gaps("fee", FROM_ONE, gaps(OnGap::Go))]).await;
    let second = world.accept("n2", &[nth(2)]).await;
    let first = world.accept("n1", &[nth(1)]).await;
    let claim = world.claim_one("fee").await;
    world.settle(&claim, failed(Retry::Never)).await;
    assert_eq!(world.numbers([8, 6, 5]).await, [""; 0]);
    world.pass(HOLD - 1);
    assert_eq!(world.do_all("fee").await, [""; 0]);
    world.pass(1);
    assert_eq!(world.do_all("fee").await, ["n2", "n5", "n6", "n8"]);
    assert_eq!(world.numbers([3, 7]).await, [""; 0]);
    assert_eq!(world.phases(["n3", "n7"]).await, [Phase::Stale; 2]);
    assert_eq!(world.replay(first, &[nth(1)], Replay::Plain).await, [ReplayEffect::Stale]);
    assert_eq!(world.phase("n1").await, Phase::Stale);
    assert_eq!(world.replay(first, &[nth(1)], Replay::Force).await, [ReplayEffect::WouldRun]);
    assert_eq!(world.do_all("fee").await, ["n1"]);
    assert_eq!(world.numbers([9]).await, ["n9"], "the mark did not go back");
    assert_eq!(
        world.replay(second, &[nth(2)], Replay::Plain).await,
        [ReplayEffect::AlreadyApplied]
    );
}

pub(crate) async fn a_retry_that_comes_after_the_gap_was_left_is_stale<S: Working>(
    world: World<S>,
) {
    // A failing number is a gap too: its next attempt must not run after later numbers.
    world.announce([with_gaps("fee", FROM_ONE, gaps(OnGap::Go))]).await;
    world.accept("n1", &[nth(1)]).await;
    let claim = world.claim_one("fee").await;
    let in_an_hour = Retry::In(Duration::from_secs(3_600));
    assert_eq!(world.settle(&claim, failed(in_an_hour)).await, Settlement::Recorded);
    assert_eq!(world.numbers([2]).await, [""; 0]);
    world.pass(HOLD);
    assert_eq!(world.do_all("fee").await, ["n2"]);
    assert_eq!(
        world.settle(&claim, done("late")).await,
        Settlement::Lost,
        "the mark has passed it"
    );
    world.pass(3_600);
    assert_eq!(world.do_all("fee").await, [""; 0]);
    assert_eq!(world.phase("n1").await, Phase::Stale);
}

pub(crate) async fn a_job_at_work_or_due_is_no_gap<S: Working>(world: World<S>) {
    // The missing number is leased when the deadline passes, or it is due and no worker has run for
    // a day: skipping it would lose a stored event.
    for on_gap in [OnGap::Go, OnGap::Review] {
        let (r, fee) = (format!("{on_gap:?}"), with_gaps("fee", FROM_ONE, gaps(on_gap)));
        let accept = async |n: i64| {
            world.accept(&format!("{r}{n}"), &[placed("fee", &r, n)]).await;
        };
        world.announce([fee]).await;
        accept(2).await;
        assert!(world.claim("fee", 10).await.is_empty());
        world.pass(HOLD - 1);
        accept(1).await;
        let first = world.claim_one("fee").await;
        world.pass(10);
        assert!(world.claim("fee", 10).await.is_empty());
        assert_eq!(world.phase(&format!("{r}2")).await, Phase::Held);
        let next = world.next_due("fee").await;
        assert_eq!(
            next,
            Some(first.leased_until),
            "a deadline that waits for the work is no alarm"
        );
        assert_eq!(world.settle(&first, done("1")).await, Settlement::Recorded);
        assert_eq!(world.do_all("fee").await, [format!("{r}2")]);
        accept(4).await;
        assert!(world.claim("fee", 10).await.is_empty());
        world.pass(86_400);
        accept(3).await;
        assert_eq!(world.do_all("fee").await, [format!("{r}3"), format!("{r}4")]);
        // The work fails: then its number is a gap, and the deadline is long over.
        accept(6).await;
        assert!(world.claim("fee", 10).await.is_empty());
        world.pass(HOLD - 1);
        accept(5).await;
        let fifth = world.claim_one("fee").await;
        world.pass(10);
        let notified = async {
            tokio::join!(world.arrival("fee"), world.settle(&fifth, failed(Retry::Never)))
        };
        tokio::time::timeout(crate::harness::FOREVER, notified)
            .await
            .expect("notified of the deadline");
        match on_gap {
            OnGap::Go => assert_eq!(world.do_all("fee").await, [format!("{r}6")]),
            OnGap::Review => {
                assert!(world.claim("fee", 10).await.is_empty());
                assert_eq!(world.phase(&format!("{r}6")).await, Phase::Review);
            }
        }
    }
}

pub(crate) async fn beyond_hold_max_the_newest_go_to_review<S: Working>(world: World<S>) {
    // A sender skips a number and sends many later ones. The newest number is not always the last
    // to arrive.
    let few = Gaps { hold_max: 2, ..gaps(OnGap::Go) };
    world.announce([with_gaps("fee", FROM_ONE, few)]).await;
    assert_eq!(world.numbers([3, 9]).await, [""; 0]);
    assert_eq!(world.phases(["n3", "n9"]).await, [Phase::Held; 2]);
    assert_eq!(world.numbers([4]).await, [""; 0]);
    assert_eq!(world.phases(["n3", "n4", "n9"]).await, [Phase::Held, Phase::Held, Phase::Review]);
    assert_eq!(world.job("n9", "fee").await.error.as_deref(), Some(HELD_TOO_MANY));
    assert_eq!(world.numbers([5]).await, [""; 0]);
    assert_eq!(world.phase("n5").await, Phase::Review);
    world.accept("other", &[placed("fee", "other", 7)]).await;
    assert!(world.claim("fee", 10).await.is_empty());
    assert_eq!(world.phase("other").await, Phase::Held, "each resource has its own count");
    assert_eq!(world.numbers([1]).await, ["n1"]);
    assert_eq!(world.numbers([2]).await, ["n2", "n3", "n4"]);
    let filter = JobFilter { phase: Some(Phase::Review), limit: 10, ..JobFilter::default() };
    let listed = world.store.jobs(filter).await.expect("reads").items;
    let listed: Vec<_> = listed.iter().map(|job| &*job.event_id).collect();
    assert_eq!(listed, ["n5", "n9"]);
}

pub(crate) async fn a_handler_that_had_no_job_yet_is_forced_too<S: Working>(world: World<S>) {
    // A handler is added later, and an operator forces an old version through it. The replay
    // reported that the job would run, so the guard must not refuse the job when it is claimed.
    world.announce([ordered("fee", OrderPolicy::Latest)]).await;
    let version = |n| placed("fee", "po_1", n);
    let old = world.accept("v1", &[]).await;
    let plain = world.accept("v2", &[]).await;
    world.accept("v5", &[version(5)]).await;
    assert_eq!(world.do_all("fee").await, ["v5"]);
    assert_eq!(world.replay(plain, &[version(2)], Replay::Plain).await, [ReplayEffect::Stale]);
    assert_eq!(world.replay(old, &[version(1)], Replay::Force).await, [ReplayEffect::WouldRun]);
    assert_eq!(world.do_all("fee").await, ["v1"]);
    assert_eq!(world.job("v2", "fee").await.phase, Phase::Stale);
}

pub(crate) async fn a_forced_job_keeps_its_resource_and_moves_no_mark_back<S: Working>(
    world: World<S>,
) {
    // An operator forces an older version while a newer one of the same payout runs.
    world.announce([ordered("fee", OrderPolicy::Latest)]).await;
    let version = |n| placed("fee", "po_1", n);
    world.accept("v5", &[version(5)]).await;
    assert_eq!(world.do_all("fee").await, ["v5"]);
    let old = world.accept("v1", &[version(1)]).await;
    assert_eq!(world.do_all("fee").await, [""; 0]);
    world.accept("v6", &[version(6)]).await;
    let newest = world.claim_one("fee").await;
    assert_eq!(world.replay(old, &[version(1)], Replay::Force).await, [ReplayEffect::WouldRun]);
    assert!(world.claim("fee", 10).await.is_empty(), "one at a time, forced or not");
    assert_eq!(world.job("v1", "fee").await.resource.as_deref(), Some("po_1"));
    assert_eq!(world.settle(&newest, done("6")).await, Settlement::Recorded);
    let forced = world.claim_one("fee").await;
    assert_eq!(ids(std::slice::from_ref(&forced)), ["v1"]);
    assert_eq!(forced.event.resource.as_deref(), Some("po_1"));
    world.accept("v7", &[version(7)]).await;
    assert!(world.claim("fee", 10).await.is_empty(), "it holds its resource");
    // A failure does not make the forced job stale again.
    assert_eq!(world.settle(&forced, failed(Retry::Schedule)).await, Settlement::Recorded);
    assert_eq!(world.do_all("fee").await, ["v7"]);
    world.pass(100);
    assert_eq!(world.do_all("fee").await, ["v1"]);
    world.accept("v4", &[version(4)]).await;
    assert_eq!(world.do_all("fee").await, [""; 0], "the mark did not go back");
}

pub(crate) async fn a_worker_that_lost_its_lease_cannot_settle_what_was_passed<S: Working>(
    world: World<S>,
) {
    // The worker stopped for longer than its lease, and a newer version was applied. Its fence is
    // still the last one, but its "done" would record a version that was never the newest.
    world.announce([ordered("fee", OrderPolicy::Latest)]).await;
    let at_work = async |id: &str, resource: &str| {
        world.accept(id, &[placed("fee", resource, 1)]).await;
        world.claim_one("fee").await
    };
    let overtaken = at_work("a1", "a").await;
    world.pass(LEASE);
    world.accept("a2", &[placed("fee", "a", 2)]).await;
    assert_eq!(world.do_all("fee").await, ["a2"]);
    assert_eq!(world.settle(&overtaken, done("late")).await, Settlement::Lost);
    assert_ne!(world.phase("a1").await, Phase::Done);
    world.pass(100);
    assert_eq!(world.do_all("fee").await, [""; 0]);
    assert_eq!(world.phase("a1").await, Phase::Stale);
    // The mark did not pass these jobs: their workers were only slow.
    let slow = at_work("b1", "b").await;
    world.pass(LEASE);
    world.accept("b0", &[placed("fee", "b", 0)]).await;
    world.accept("b1_too", &[placed("fee", "b", 1)]).await;
    assert_eq!(world.do_all("fee").await, ["b0", "b1_too"]);
    assert_eq!(world.settle(&slow, done("late")).await, Settlement::Recorded, "a tie is not stale");
}

pub(crate) async fn a_machine_runs_allowed_steps_and_nothing_else<S: Working>(world: World<S>) {
    // The states arrive backwards, one of them twice, and one belongs before the current state. The
    // transitions contain a cycle.
    let (policy, to) = payout();
    world.announce([ordered("fee", policy)]).await;
    let arrive = async |id: &str, state: &str| {
        world.accept(id, &[to(state)]).await;
        world.do_all("fee").await
    };
    assert_eq!(arrive("charged", "charged").await, [""; 0]);
    assert_eq!(world.event("charged").await.summary.status, Status::Held);
    assert_eq!(arrive("failed", "failed").await, [""; 0]);
    assert_eq!(arrive("pending", "pending").await, ["pending", "charged", "failed"]);
    assert_eq!(arrive("paid", "paid").await, [""; 0]);
    assert_eq!(world.phase("paid").await, Phase::Held, "failed is not paid yet");
    assert_eq!(arrive("pending_again", "pending").await, [""; 0]);
    assert_eq!(world.phase("pending_again").await, Phase::Stale);
    assert_eq!(arrive("failed_again", "failed").await, [""; 0]);
    assert_eq!(world.phase("failed_again").await, Phase::Stale, "it is there already");
    assert_eq!(arrive("charged_again", "charged").await, ["charged_again", "paid"]);
    assert_eq!(arrive("charged_late", "charged").await, [""; 0]);
    assert_eq!(world.phase("charged_late").await, Phase::Stale, "nothing leads back from paid");
}

pub(crate) async fn a_machine_goes_past_a_gap_in_its_own_order<S: Working>(world: World<S>) {
    // The first state never arrives, and the others arrive backwards. If the held states were forced in the
    // order of arrival, the earlier state would be behind the mark at its turn.
    let (policy, to) = payout();
    world.announce([with_gaps("fee", policy, gaps(OnGap::Go))]).await;
    world.accept("paid", &[to("paid")]).await;
    assert!(world.claim("fee", 10).await.is_empty());
    world.pass(1);
    world.accept("charged", &[to("charged")]).await;
    assert!(world.claim("fee", 10).await.is_empty());
    world.pass(HOLD - 1);
    assert_eq!(world.do_all("fee").await, ["charged", "paid"]);
    world.accept("pending", &[to("pending")]).await;
    assert_eq!(world.do_all("fee").await, [""; 0]);
    assert_eq!(world.phase("pending").await, Phase::Stale);
}

pub(crate) async fn a_step_of_a_machine_may_be_let_run_by_an_operator<S: Working>(world: World<S>) {
    // The step runs once although no transition leads there. Jobs beyond the limit go to review on
    // arrival.
    let (policy, to) = payout();
    let few = Gaps { hold_max: 1, ..gaps(OnGap::Review) };
    world.announce([with_gaps("fee", policy, few)]).await;
    let charged = world.accept("charged", &[to("charged")]).await;
    world.accept("paid", &[to("paid")]).await;
    assert!(world.claim("fee", 10).await.is_empty());
    assert_eq!(world.phases(["charged", "paid"]).await, [Phase::Held, Phase::Review]);
    world.pass(HOLD);
    assert!(world.claim("fee", 10).await.is_empty());
    assert_eq!(world.phase("charged").await, Phase::Review);
    assert_eq!(world.approve(charged).await, Reviewed::Decided);
    assert_eq!(world.do_all("fee").await, ["charged"]);
    world.accept("failed", &[to("failed")]).await;
    assert_eq!(world.do_all("fee").await, ["failed"], "the state is the one that was forced");
}

pub(crate) async fn a_machine_that_moved_on_does_not_take_a_late_worker_s_word<S: Working>(
    world: World<S>,
) {
    // After the job lost its lease, another transition was applied from the same state.
    let (policy, to) = payout();
    world.announce([ordered("fee", policy)]).await;
    for state in ["pending", "charged"] {
        world.accept(state, &[to(state)]).await;
    }
    assert_eq!(world.do_all("fee").await, ["pending", "charged"]);
    world.accept("paid", &[to("paid")]).await;
    let slow = world.claim_one("fee").await;
    world.pass(LEASE);
    world.accept("failed", &[to("failed")]).await;
    assert_eq!(world.do_all("fee").await, ["failed"]);
    assert_eq!(world.settle(&slow, done("late")).await, Settlement::Lost);
    assert_ne!(world.phase("paid").await, Phase::Done);
}

pub(crate) async fn sql_work_keeps_to_deadlines_and_decisions_too<S: Working>(world: World<S>) {
    // For SQL work the guard is checked in the job's own transaction, not in the claim.
    let two = [with_gaps("fee", FROM_ONE, gaps(OnGap::Go))];
    world.announce(two).await;
    for n in [1, 3, 4, 6] {
        world.accept(&format!("n{n}"), &[nth(n)]).await;
    }
    run_sql(&world, "fee").await;
    assert_eq!(world.phases(["n1", "n3", "n6"]).await, [Phase::Done, Phase::Held, Phase::Held]);
    assert_eq!(world.job("n3", "fee").await.due_at, Some(after(HOLD)));
    world.pass(HOLD);
    run_sql(&world, "fee").await;
    assert_eq!(world.phases(["n3", "n4", "n6"]).await, [Phase::Done; 3]);
    let few = Gaps { hold_max: 1, ..gaps(OnGap::Review) };
    world.announce([with_gaps("fee", FROM_ONE, few)]).await;
    let ninth = world.accept("n9", &[nth(9)]).await;
    let eighth = world.accept("n8", &[nth(8)]).await;
    run_sql(&world, "fee").await;
    assert_eq!(world.phases(["n8", "n9"]).await, [Phase::Held, Phase::Review]);
    world.pass(HOLD);
    run_sql(&world, "fee").await;
    assert_eq!(world.phases(["n8", "n9"]).await, [Phase::Review; 2]);
    assert_eq!(world.approve(ninth).await, Reviewed::Decided);
    run_sql(&world, "fee").await;
    assert_eq!(world.phase("n9").await, Phase::Done);
    // The approved job runs below the mark.
    assert_eq!(world.approve(eighth).await, Reviewed::Decided);
    run_sql(&world, "fee").await;
    assert_eq!(world.phase("n8").await, Phase::Done);
    world.accept("n10", &[nth(10)]).await;
    run_sql(&world, "fee").await;
    assert_eq!(world.phase("n10").await, Phase::Done, "the mark stood at nine");
}

pub(crate) async fn an_event_discarded_for_one_handler_is_kept_while_another_needs_it<
    S: Working,
>(
    world: World<S>,
) {
    // If only the status decided, the event would be pruned while its other job still has to run.
    world.announce([with_gaps("fee", FROM_ONE, gaps(OnGap::Review)), spec("mail")]).await;
    let id = world.accept("n2", &[nth(2), job("mail")]).await;
    assert!(world.claim("fee", 10).await.is_empty());
    world.pass(HOLD);
    assert!(world.claim("fee", 10).await.is_empty());
    assert_eq!(world.reject(id).await, Reviewed::Decided);
    let horizon = Horizon { events_before: after(86_400), ..Horizon::forever() };
    let prune = async || {
        // A second round within the day may be needed for the remaining rows.
        for _ in 0..3 {
            world.store.prune(horizon.clone(), 100).await.expect("prunes");
        }
        match world.lookup("n2").await {
            Lookup::One(left) => !left.jobs.is_empty(),
            Lookup::None => false,
            Lookup::Ambiguous(ids) => panic!("{ids:?}"),
        }
    };
    assert!(prune().await, "there is work left");
    assert_eq!(world.do_all("mail").await, ["n2"]);
    assert!(!prune().await, "it is not needed any more");
}

pub(crate) async fn a_hopeless_job_is_not_run_by_a_replay<S: Working>(world: World<S>) {
    // The job's place in the order is unknown: without a place it would run before its
    // predecessors.
    let (policy, _) = payout();
    world.announce([ordered("fee", policy)]).await;
    let hopeless = NewJob { hopeless: Some("no such state".to_owned()), ..job("fee") };
    let id = world.accept("unknown", std::slice::from_ref(&hopeless)).await;
    assert_eq!(world.phase("unknown").await, Phase::Dead);
    for how in [Replay::Dry, Replay::Plain, Replay::Force] {
        assert_eq!(world.replay(id, std::slice::from_ref(&hopeless), how).await, []);
    }
    assert!(world.claim_next("fee").await.is_empty());
    assert_eq!(world.phase("unknown").await, Phase::Dead);
}
