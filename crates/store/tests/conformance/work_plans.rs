//! Random plans of jobs: copies, claims, late workers, lost leases and replays in any order. Every
//! step is checked against the invariants, in every store. If neither the store's choice nor its
//! random numbers matter (no order, one claim at a time), the same plan gives the same results
//! everywhere.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::sync::OnceLock;
use std::time::Duration;

use hapax_core::job::{Fence, JobId, Phase, Retry};
use hapax_core::order::{Gaps, Machine, OnGap, OrderPolicy};
use hapax_core::store::{
    Claim, EventId, HandlerSpec, JobDetail, JobFilter, NewJob, Settlement, Verdict,
};
use proptest::prelude::*;

use crate::harness::{
    LEASE, Replay, Sender, Working, World, done, failed, job, ordered, placed, spec, with_gaps,
};

/// All handlers, and the handler whose claims leave a store no choice.
const EVERY: &[&str] = &["plain", "latest", "sequence", "going", "machine"];
const PLAIN: &[&str] = &["plain"];

#[derive(Debug, Clone, Copy)]
enum Act {
    /// Event `n`, or a copy of it.
    Arrive(i64),
    Claim {
        handler: usize,
        limit: usize,
    },
    /// The worker that claimed settles the job, however long ago it claimed.
    Settle {
        claim: usize,
        outcome: Ending,
    },
    GiveBack {
        claim: usize,
    },
    Renew {
        claim: usize,
    },
    Pass {
        seconds: i64,
    },
    Replay {
        event: i64,
        how: Replay,
    },
    Approve(i64),
    Reject(i64),
}

#[derive(Debug, Clone, Copy)]
enum Ending {
    Done,
    Failed,
    Never,
}

fn act() -> impl Strategy<Value = Act> {
    let ending =
        prop_oneof![4 => Just(Ending::Done), 2 => Just(Ending::Failed), 1 => Just(Ending::Never)];
    let how = prop_oneof![
        4 => Just(Replay::Plain),
        1 => Just(Replay::Force),
        1 => Just(Replay::Dry),
        1 => Just(Replay::DryForce),
    ];
    prop_oneof![
        5 => (1..=7i64).prop_map(Act::Arrive),
        8 => (0..5usize, 1..4usize).prop_map(|(handler, limit)| Act::Claim { handler, limit }),
        6 => (0..6usize, ending).prop_map(|(claim, outcome)| Act::Settle { claim, outcome }),
        1 => (0..6usize).prop_map(|claim| Act::GiveBack { claim }),
        1 => (0..6usize).prop_map(|claim| Act::Renew { claim }),
        3 => (0..=LEASE + 20).prop_map(|seconds| Act::Pass { seconds }),
        1 => (1..=7i64, how).prop_map(|(event, how)| Act::Replay { event, how }),
        1 => (1..=7i64).prop_map(Act::Approve),
        1 => (1..=7i64).prop_map(Act::Reject),
    ]
}

/// There are no waits between attempts: with their jitter every store would give other results.
fn eager(spec: HandlerSpec) -> HandlerSpec {
    let mut eager = spec;
    eager.policy.retry = vec![Duration::ZERO; 4];
    eager
}

fn jobs_of(n: i64, handlers: &[&str]) -> Vec<NewJob> {
    let resource = format!("r{}", n % 2);
    let states = ["new", "paid", "sent", "back"];
    let state = machine().position(states[n.unsigned_abs() as usize % 4]).expect("a state");
    let all = [
        job("plain"),
        placed("latest", &resource, n / 2),
        placed("sequence", "acct", n),
        placed("going", &resource, n / 2),
        placed("machine", &resource, state.0),
    ];
    all.into_iter().take(handlers.len()).collect()
}

fn machine() -> Machine {
    let allow = ["new -> paid", "paid -> sent", "sent -> back", "back -> paid"];
    Machine::parse(Some("new"), &allow).expect("a machine")
}

/// Short holds, about a lease, and few held jobs.
fn gaps(on_gap: OnGap) -> Gaps {
    Gaps { hold: Duration::from_secs(40), hold_max: 2, on_gap }
}

/// The history so far, and its invariants.
#[derive(Default)]
struct Story {
    handlers: &'static [&'static str],
    log: Vec<String>,
    events: HashMap<i64, EventId>,
    claims: Vec<Claim>,
    fences: HashMap<JobId, Fence>,
    done: HashMap<(JobId, u32), Fence>,
}

impl Story {
    fn claimed(&mut self, handler: &str, claims: Vec<Claim>) {
        let describe = |claim: &Claim| {
            format!("{} run {} attempt {}", claim.event.key.event_id, claim.run, claim.attempt)
        };
        let all: Vec<_> = claims.iter().map(describe).collect();
        self.log.push(format!("{handler} gets {all:?}"));
        for claim in claims {
            let before = self.fences.insert(claim.job, claim.fence);
            assert!(before < Some(claim.fence), "fences only grow: {before:?}, {claim:?}");
            self.claims.push(claim);
        }
    }

    /// The claim that was made this many claims ago.
    fn claim(&self, ago: usize) -> Option<Claim> {
        self.claims.iter().rev().nth(ago).cloned()
    }

    fn settled(&mut self, claim: &Claim, ending: Ending, settlement: Settlement) {
        self.log.push(format!("{} {ending:?}: {settlement:?}", claim.event.key.event_id));
        if settlement != Settlement::Lost {
            assert_eq!(self.fences[&claim.job], claim.fence, "an old right was honoured");
            if matches!(ending, Ending::Done) {
                let before = self.done.insert((claim.job, claim.run), claim.fence);
                assert!(before.is_none_or(|fence| fence == claim.fence), "done twice: {claim:?}");
            }
        }
    }
}

async fn all_jobs<S: Working>(world: &World<S>) -> Vec<JobDetail> {
    let all = JobFilter { limit: 500, ..JobFilter::default() };
    world.store.jobs(all).await.expect("reads").items
}

/// Checks the invariants after a step.
async fn check<S: Working>(world: &World<S>, story: &Story) {
    let mut busy = HashSet::new();
    for job in all_jobs(world).await {
        assert_eq!(job.due_at.is_some(), job.phase.is_open(), "{job:?}");
        let ended = job.phase.is_over() || job.phase == Phase::Dead;
        assert_eq!(job.finished_at.is_some(), ended, "{job:?}");
        assert!(job.phase != Phase::Review || job.error.is_some(), "for no reason: {job:?}");
        let is_done = story.done.contains_key(&(job.id, job.run));
        assert_eq!(
            is_done,
            job.phase == Phase::Done,
            "done, and only if that was reported: {job:?}"
        );
        if job.phase == Phase::Leased
            && let Some(resource) = job.resource
        {
            assert!(busy.insert((job.handler, resource)), "two at once on one resource");
        }
    }
}

async fn perform<S: Working>(world: &World<S>, story: &mut Story, act: Act) {
    match act {
        Act::Arrive(n) => {
            let verdict =
                world.arrive(&Sender::plain(), &format!("e{n}"), &jobs_of(n, story.handlers)).await;
            story.events.insert(n, verdict.id());
            story.log.push(match verdict {
                Verdict::Accepted(_) => format!("e{n} is new"),
                Verdict::Duplicate(known) => format!("e{n} is {}", known.status.as_str()),
                other => panic!("{other:?}"),
            });
        }
        Act::Claim { handler, limit } => {
            let limit = if story.handlers.len() == 1 { 1 } else { limit };
            let name = story.handlers[handler % story.handlers.len()];
            let claims = world.claim(name, limit).await;
            assert!(claims.len() <= limit);
            story.claimed(name, claims);
        }
        Act::Settle { claim, outcome } => {
            let Some(claim) = story.claim(claim) else { return };
            let held = match outcome {
                Ending::Done => world.settle(&claim, done("done")).await,
                Ending::Failed => world.settle(&claim, failed(Retry::Schedule)).await,
                Ending::Never => world.settle(&claim, failed(Retry::Never)).await,
            };
            story.settled(&claim, outcome, held);
        }
        Act::GiveBack { claim } => {
            let Some(claim) = story.claim(claim) else { return };
            world.store.give_back(vec![(claim.job, claim.fence)]).await.expect("gives back");
        }
        Act::Renew { claim } => {
            let Some(claim) = story.claim(claim) else { return };
            let lease = Duration::from_secs(LEASE.unsigned_abs());
            let held = world.store.renew(claim.job, claim.fence, lease).await.expect("renews");
            story.log.push(format!("renewed: {held:?}"));
        }
        Act::Pass { seconds } => world.pass(seconds),
        Act::Replay { event, how } => {
            let Some(id) = story.events.get(&event).copied() else { return };
            let effects = world.replay(id, &jobs_of(event, story.handlers), how).await;
            story.log.push(format!("replay of e{event}: {effects:?}"));
        }
        Act::Approve(event) => {
            let Some(id) = story.events.get(&event).copied() else { return };
            let jobs = jobs_of(event, story.handlers);
            let reviewed = world.store.approve(id, jobs, world.by("go on")).await;
            story.log.push(format!("e{event} approved: {reviewed:?}"));
        }
        Act::Reject(event) => {
            let Some(id) = story.events.get(&event).copied() else { return };
            let reviewed = world.store.reject(id, world.by("not this")).await;
            story.log.push(format!("e{event} rejected: {reviewed:?}"));
        }
    }
}

/// Runs the plan, then lets everything succeed until no job is left.
async fn live<S: Working>(
    world: World<S>,
    handlers: &'static [&'static str],
    plan: &[Act],
) -> Vec<String> {
    let specs = [
        spec("plain"),
        ordered("latest", OrderPolicy::Latest),
        with_gaps("sequence", OrderPolicy::Sequence { start: Some(1) }, gaps(OnGap::Review)),
        with_gaps("going", OrderPolicy::Sequence { start: None }, gaps(OnGap::Go)),
        with_gaps("machine", OrderPolicy::Machine(Arc::new(machine())), gaps(OnGap::Go)),
    ];
    world.announce(specs.map(eager)).await;
    let mut story = Story { handlers, ..Story::default() };
    for act in plan {
        perform(&world, &mut story, *act).await;
        check(&world, &story).await;
    }
    let arrived: BTreeSet<i64> = story.events.keys().copied().collect();
    for event in arrived.iter().copied() {
        perform(&world, &mut story, Act::Replay { event, how: Replay::Plain }).await;
    }
    let planned = story.log.len();
    // Each round outlasts any lease and backoff; there are fewer jobs than rounds.
    for _ in 0..30 {
        for handler in 0..handlers.len() {
            for _ in 0..30 {
                let before = story.claims.len();
                perform(&world, &mut story, Act::Claim { handler, limit: 1 }).await;
                if story.claims.len() == before {
                    break;
                }
                let settle = Act::Settle { claim: 0, outcome: Ending::Done };
                perform(&world, &mut story, settle).await;
            }
        }
        world.pass(LEASE + 60);
    }
    check(&world, &story).await;
    // Remaining leases ended together, and their order after that is random.
    story.log[planned..].sort();
    for job in all_jobs(&world).await {
        story.log.push(format!("{} of {} is {:?}", job.handler, job.event_id, job.phase));
        match (job.phase, job.handler.as_str()) {
            (Phase::Done | Phase::Dead, _) => {}
            (Phase::Stale, name) => assert_ne!(name, "plain", "{job:?}"),
            (Phase::Review | Phase::Discarded, name) => {
                assert!(["sequence", "going", "machine"].contains(&name), "no gap there: {job:?}");
            }
            (Phase::Ready | Phase::Leased | Phase::Parked | Phase::Held, _) => {
                panic!("left behind: {job:?}")
            }
        }
    }
    story.log
}

/// The plan in two forms in which the jitter of lost attempts decides nothing. One has several
/// events, but no time in which a lease could end. The other has a single event, whose leases and
/// backoffs are both over at each pass.
fn without_chance(plan: &[Act]) -> [Vec<Act>; 2] {
    let still = |act: &Act| !matches!(act, Act::Pass { .. });
    let of_one = |act: &Act| match *act {
        Act::Arrive(_) => Act::Arrive(1),
        Act::Replay { how, .. } => Act::Replay { event: 1, how },
        Act::Approve(_) => Act::Approve(1),
        Act::Reject(_) => Act::Reject(1),
        Act::Pass { .. } => Act::Pass { seconds: 2 * LEASE },
        Act::Claim { .. } | Act::Settle { .. } | Act::GiveBack { .. } | Act::Renew { .. } => *act,
    };
    [plan.iter().filter(|act| still(act)).copied().collect(), plan.iter().map(of_one).collect()]
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime")
}

fn plan() -> impl Strategy<Value = Vec<Act>> {
    prop::collection::vec(act(), 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn random_work_keeps_every_promise_in_memory(plan in plan()) {
        runtime().block_on(live(World::in_memory(), EVERY, &plan));
    }

    #[test]
    fn random_work_keeps_every_promise_on_disk(plan in plan()) {
        runtime().block_on(live(World::on_disk(), EVERY, &plan));
    }

    #[test]
    fn random_work_has_the_same_story_in_every_store(plan in plan()) {
        let runtime = runtime();
        for plan in without_chance(&plan) {
            let expected = runtime.block_on(live(World::in_memory(), PLAIN, &plan));
            let got = runtime.block_on(live(World::on_disk(), PLAIN, &plan));
            prop_assert_eq!(got, expected);
        }
    }
}

/// The server and its connections belong to the runtime that created them.
fn one_runtime() -> &'static tokio::runtime::Runtime {
    static ONE: OnceLock<tokio::runtime::Runtime> = OnceLock::new();
    ONE.get_or_init(runtime)
}

proptest! {
    // Each act is a commit on a real server: fewer plans, and new ones in every run.
    #![proptest_config(ProptestConfig { cases: 10, ..ProptestConfig::default() })]

    #[test]
    fn random_work_keeps_every_promise_on_postgres(plan in plan()) {
        one_runtime().block_on(async { live(World::on_postgres().await, EVERY, &plan).await });
    }

    #[test]
    fn random_work_has_the_same_story_on_postgres(plan in plan()) {
        let runtime = one_runtime();
        for plan in without_chance(&plan) {
            let expected = runtime.block_on(live(World::in_memory(), PLAIN, &plan));
            let got =
                runtime.block_on(async { live(World::on_postgres().await, PLAIN, &plan).await });
            prop_assert_eq!(got, expected);
        }
    }
}
