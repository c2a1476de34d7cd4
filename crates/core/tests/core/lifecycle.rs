//! Properties of the life cycle and of order: after any sequence of events a job ends in time, and no older
//! version is applied over a newer one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use hapax_core::Timestamp;
use hapax_core::job::{
    AfterFailure, AfterLoss, HandlerName, LOST_ALONE_MAX, Phase, Policy, Progress, Retry,
    WorkLocation, idempotency_key, jittered,
};
use hapax_core::lifecycle::{Act, Admission, Change, JobState, Overtaken, ResourceEffect, step};
use hapax_core::order::{Machine, OrderDecision, OrderPolicy, Position};
use hapax_core::store::{EventId, Status};
use jiff::SignedDuration;
use proptest::prelude::*;
use uuid::Uuid;

use crate::lifecycle_page::{listed_transitions, word};

/// How one attempt ends: it fails, is lost, or is given back.
#[derive(Debug, Clone, Copy)]
enum End {
    Failed(Retry, f64),
    Lost(f64),
    GivenBack,
}

fn seconds(most: u64) -> impl Strategy<Value = Duration> {
    (0..=most * 1_000).prop_map(Duration::from_millis)
}

fn retry() -> impl Strategy<Value = Retry> {
    prop_oneof![
        6 => Just(Retry::Schedule),
        2 => seconds(100_000).prop_map(Retry::NotBefore),
        2 => seconds(100_000).prop_map(Retry::In),
        1 => Just(Retry::Never),
    ]
}

fn end() -> impl Strategy<Value = End> {
    prop_oneof![
        3 => (retry(), 0.0..=1.0).prop_map(|(retry, dice)| End::Failed(retry, dice)),
        3 => (0.0..=1.0).prop_map(End::Lost),
        1 => Just(End::GivenBack),
    ]
}

fn policy() -> impl Strategy<Value = Policy> {
    (prop::collection::vec(seconds(100_000), 0..10), seconds(600))
        .prop_map(|(retry, lease)| Policy { retry, lease })
}

fn noon() -> Timestamp {
    "2026-06-01T12:00:00Z".parse().expect("a timestamp")
}

/// A job after its attempts, which stop when the job is dead or no end is left.
struct Life {
    progress: Progress,
    buried: bool,
}

impl Life {
    /// Runs attempts with these ends, and checks each step.
    fn live(policy: &Policy, ends: &[End]) -> Self {
        let mut life = Self { progress: Progress::default(), buried: false };
        let mut now = noon();
        for end in ends {
            let before = life.progress;
            let claimed = before.claimed();
            assert_eq!(claimed.attempt, before.attempt + 1, "attempts strictly grow");
            let (after, due) = match *end {
                End::GivenBack => {
                    assert_eq!(claimed.given_back(), before, "as if it had not been");
                    continue;
                }
                End::Lost(dice) => match claimed.lost(WorkLocation::Inside, now, dice) {
                    AfterLoss::Again { progress, due } => (progress, Some(due)),
                    AfterLoss::Bury { progress } => (progress, None),
                },
                End::Failed(retry, dice) => match claimed.failed(policy, retry, now, dice) {
                    AfterFailure::Again { progress, due } => (progress, Some(due)),
                    AfterFailure::Bury { progress } => (progress, None),
                },
            };
            let used = |progress: Progress| progress.steps + progress.lost;
            assert_eq!(used(after), used(before) + 1, "a verdict or a loss, never both");
            assert_eq!(after.attempt, claimed.attempt);
            assert_eq!(after.alone(WorkLocation::Inside), after.lost > 0);
            life.progress = after;
            let Some(due) = due else {
                life.buried = true;
                return life;
            };
            assert!(due >= now, "a job is never due in its own past");
            now = due;
        }
        life
    }
}

proptest! {
    #[test]
    fn no_sequence_of_losses_and_failures_exceeds_its_bounds(
        policy in policy(),
        ends in prop::collection::vec(end(), 0..200),
    ) {
        let life = Life::live(&policy, &ends);
        let steps_max = u32::try_from(policy.retry.len()).expect("few").max(1);
        prop_assert!(life.progress.steps <= steps_max);
        prop_assert!(life.progress.lost <= LOST_ALONE_MAX + 1);
        prop_assert!(life.progress.attempt <= steps_max + LOST_ALONE_MAX);
        let counted = ends.iter().filter(|end| !matches!(end, End::GivenBack)).count();
        if counted >= (steps_max + LOST_ALONE_MAX) as usize {
            prop_assert!(life.buried, "it ends although nothing ever goes well");
        }
    }

    #[test]
    fn losses_use_no_step_and_failures_are_no_losses(
        policy in policy(),
        lost in 0..=LOST_ALONE_MAX,
    ) {
        let life = Life::live(&policy, &vec![End::Lost(0.5); lost as usize]);
        prop_assert!(!life.buried);
        prop_assert_eq!((life.progress.steps, life.progress.lost), (0, lost));
        let ends = vec![End::Failed(Retry::Schedule, 0.5); policy.retry.len().saturating_sub(1)];
        let life = Life::live(&policy, &ends);
        prop_assert!(!life.buried, "as many attempts as there are waits");
        prop_assert_eq!(life.progress.lost, 0);
    }

    #[test]
    fn jitter_stays_within_a_fifth(wait in seconds(10_000_000), dice in -1.0..2.0f64) {
        let got = jittered(wait, dice).as_secs_f64();
        let wait = wait.as_secs_f64();
        prop_assert!(got >= wait * 0.8 - 1e-6 && got <= wait * 1.2 + 1e-6, "{} of {}", got, wait);
    }

    #[test]
    fn the_retry_time_of_a_failed_attempt_is_honoured(
        policy in policy(),
        asked in seconds(1_000_000),
        dice in 0.0..=1.0f64,
    ) {
        let first = Progress::default().claimed();
        let due = |retry| match first.failed(&policy, retry, noon(), dice) {
            AfterFailure::Again { due, .. } => Some(due.duration_since(noon()).unsigned_abs()),
            AfterFailure::Bury { .. } => None,
        };
        prop_assert_eq!(due(Retry::Never), None);
        let scheduled = due(Retry::Schedule);
        prop_assert_eq!(scheduled.is_some(), policy.retry.len() > 1);
        prop_assert_eq!(due(Retry::In(asked)), scheduled.map(|_| asked));
        prop_assert_eq!(due(Retry::NotBefore(asked)), scheduled.map(|wait| wait.max(asked)));
        // Nothing was sent, so the job is due again after about a second, whatever the schedule has
        // left.
        let unsent = due(Retry::Unsent).map(|wait| wait.as_secs_f64());
        prop_assert!(unsent.is_some_and(|wait| (0.8..=1.2).contains(&wait)), "{:?}", unsent);
    }

    #[test]
    fn jobs_lost_together_are_due_apart_but_near_their_time(
        lost in 0..LOST_ALONE_MAX,
        dice in 0.0..=1.0f64,
    ) {
        // Jobs that were lost with one process would all be due at the same instant without the
        // random part of the wait.
        let progress = Progress { attempt: lost + 1, steps: 0, lost };
        let wait = |dice| match progress.lost(WorkLocation::Inside, noon(), dice) {
            AfterLoss::Again { due, .. } => due.duration_since(noon()).as_secs_f64(),
            AfterLoss::Bury { .. } => panic!("buried after {lost}"),
        };
        let nominal = f64::from(1 << lost);
        prop_assert!((0.8 * nominal..=1.2 * nominal).contains(&wait(dice)), "{}", wait(dice));
        prop_assert!(wait(0.0) < wait(0.5) && wait(0.5) < wait(1.0));
    }

    #[test]
    fn no_wait_overflows_the_clock(lost in 0..100u32, asked in any::<u64>()) {
        let progress = Progress { attempt: lost, steps: 0, lost };
        let _ = progress.lost(WorkLocation::Inside, Timestamp::MAX, 1.0);
        let policy = Policy { retry: vec![Duration::ZERO; 2], lease: Duration::ZERO };
        let retry = Retry::NotBefore(Duration::from_secs(asked));
        let after = progress.failed(&policy, retry, Timestamp::MAX, 1.0);
        let AfterFailure::Again { due, .. } = after else { panic!("{after:?}") };
        prop_assert_eq!(due, Timestamp::MAX);
    }

    #[test]
    fn under_latest_no_older_version_is_applied_over_a_newer_one(
        arrivals in prop::collection::vec(-50..50i64, 1..60),
    ) {
        let mut mark = None;
        let mut applied = Vec::new();
        for position in arrivals.iter().copied().map(Position) {
            match OrderPolicy::Latest.decide(mark, position) {
                OrderDecision::Run => {
                    mark = Some(position);
                    applied.push(position);
                }
                OrderDecision::Stale => prop_assert!(mark > Some(position)),
                OrderDecision::Hold => prop_assert!(false, "latest never waits"),
            }
        }
        prop_assert!(applied.is_sorted());
        let newest = arrivals.iter().max().copied().map(Position);
        prop_assert_eq!(applied.last().copied(), newest, "whatever the order, it ends in the newest");
    }

    #[test]
    fn a_sequence_is_applied_in_order_without_gaps_and_each_number_once(
        numbers in prop::collection::btree_set(1..40i64, 1..30).prop_shuffle_twice(),
    ) {
        let policy = OrderPolicy::Sequence { start: Some(1) };
        let mut mark = None;
        let mut held = BTreeSet::new();
        let mut applied = Vec::new();
        for number in numbers.iter().copied() {
            let mut next = Some(number);
            while let Some(number) = next.take() {
                match policy.decide(mark, Position(number)) {
                    OrderDecision::Run => {
                        mark = Some(Position(number));
                        applied.push(number);
                        next = held.take(&(number + 1));
                    }
                    OrderDecision::Hold => {
                        held.insert(number);
                    }
                    OrderDecision::Stale => prop_assert!(applied.contains(&number)),
                }
            }
        }
        let whole: BTreeSet<_> = numbers.iter().copied().collect();
        let wanted: Vec<_> = (1..).take_while(|number| whole.contains(number)).collect();
        prop_assert_eq!(applied, wanted);
        prop_assert!(held.iter().all(|number| mark < Some(Position(*number))));
    }

    #[test]
    fn a_stale_position_stays_stale(
        start in prop::option::of(-5..5i64),
        sequence in any::<bool>(),
        mark in prop::option::of(-20..20i64),
        further in 0..20i64,
        position in -20..20i64,
    ) {
        let policy = if sequence { OrderPolicy::Sequence { start } } else { OrderPolicy::Latest };
        let position = Position(position);
        if let Some(mark) = mark
            && policy.decide(Some(Position(mark)), position) == OrderDecision::Stale
        {
            let later = policy.decide(Some(Position(mark + further)), position);
            prop_assert_eq!(later, OrderDecision::Stale);
        }
    }

    #[test]
    fn a_mark_never_goes_back_and_a_stale_job_cannot_settle(
        sequence in any::<bool>(),
        mark in prop::option::of(-20..20i64),
        position in -20..20i64,
        next in -20..20i64,
    ) {
        // A forced run may have any position, and a worker that lost its lease may settle at any time.
        let policy =
            if sequence { OrderPolicy::Sequence { start: None } } else { OrderPolicy::Latest };
        let (mark, position, next) = (mark.map(Position), Position(position), Position(next));
        let after = policy.after(mark, position);
        prop_assert!(mark.is_none_or(|mark| mark <= after) && position <= after);
        let stale = policy.decide(Some(after), next) == OrderDecision::Stale;
        prop_assert_eq!(policy.may_settle(Some(after), next), !stale);
    }

    #[test]
    fn a_machine_only_ever_takes_allowed_steps(
        targets in prop::collection::vec(0..5usize, 1..40),
    ) {
        // Any events in any order, with a cycle in the machine and a final state.
        let states = ["a", "b", "c", "d", "e"];
        let allow = ["a -> b", "b -> c", "c -> a", "b -> d"];
        let machine = Arc::new(Machine::parse(Some("a"), &[&allow[..], &["e -> a"]].concat()).unwrap());
        let policy = OrderPolicy::Machine(Arc::clone(&machine));
        let mut current = None;
        for state in targets.into_iter().map(|at| states[at]) {
            let target = machine.position(state).unwrap();
            let guard = policy.decide(current, target);
            prop_assert_eq!(policy.may_settle(current, target), guard == OrderDecision::Run);
            let step = current.map(|from| format!("{} -> {state}", machine.state(from).unwrap()));
            let allowed = step.map_or(state == "a", |step| allow.contains(&step.as_str()));
            prop_assert_eq!(guard == OrderDecision::Run, allowed, "{:?} {}", current, state);
            prop_assert!(state != "e" || guard == OrderDecision::Stale, "nothing leads there");
            if allowed {
                current = Some(policy.after(current, target));
                prop_assert_eq!(current, Some(target));
            }
        }
    }

    #[test]
    fn the_status_of_an_event_is_the_first_that_applies_to_a_job(
        jobs in prop::collection::vec((phase(), 0..3u32), 0..6).prop_shuffle(),
    ) {
        let status = Status::of_jobs(jobs.iter().copied());
        let each: Vec<_> = jobs.iter().map(|job| Status::of_jobs([*job])).collect();
        prop_assert_eq!(status, each.into_iter().min().unwrap_or(Status::Ignored));
        let over = jobs.iter().all(|(phase, _)| phase.is_over());
        prop_assert!(status.is_final() || !over, "no job waits for it");
        prop_assert!(over || !status.is_final() || status == Status::Discarded);
    }
}

fn phase() -> impl Strategy<Value = Phase> {
    prop::sample::select(vec![
        Phase::Ready,
        Phase::Leased,
        Phase::Done,
        Phase::Stale,
        Phase::Dead,
        Phase::Held,
        Phase::Parked,
        Phase::Review,
        Phase::Discarded,
    ])
}

/// Each number twice, in any order.
trait ShuffledTwice {
    fn prop_shuffle_twice(self) -> BoxedStrategy<Vec<i64>>;
}

impl<S: Strategy<Value = BTreeSet<i64>> + 'static> ShuffledTwice for S {
    fn prop_shuffle_twice(self) -> BoxedStrategy<Vec<i64>> {
        self.prop_map(|set| set.iter().chain(&set).copied().collect::<Vec<_>>())
            .prop_shuffle()
            .boxed()
    }
}

#[test]
fn the_largest_number_holds_nothing_up() {
    // No number follows the largest one: the successor must not wrap around.
    let policy = OrderPolicy::Sequence { start: None };
    let last = Some(Position(i64::MAX));
    for position in [i64::MIN, 0, i64::MAX] {
        assert_eq!(policy.decide(last, Position(position)), OrderDecision::Stale);
    }
    assert_eq!(policy.decide(Some(Position(i64::MAX - 1)), Position(i64::MAX)), OrderDecision::Run);
}

#[test]
fn a_lost_job_backs_off_further_each_time() {
    // A job that kills the process and is retried at once would keep the process from ever
    // starting.
    let mut waits = BTreeMap::new();
    let mut progress = Progress::default().claimed();
    while let AfterLoss::Again { progress: after, due } =
        progress.lost(WorkLocation::Inside, noon(), 0.5)
    {
        waits.insert(after.lost, due.duration_since(noon()).as_secs());
        progress = after.claimed();
    }
    assert_eq!(waits.into_values().collect::<Vec<_>>(), [1, 2, 4, 8, 16]);
}

#[test]
fn an_idempotency_key_changes_with_a_forced_run_and_with_nothing_else() {
    // The receiver deduplicates by the idempotency key: it must be equal for the same effect and
    // different for another.
    let event = EventId(Uuid::now_v7());
    let (fee, mail) = (HandlerName::new("charge-fee"), HandlerName::new("mail"));
    assert_eq!(idempotency_key(event, &fee, 1), idempotency_key(event, &fee, 1));
    let keys = [
        idempotency_key(event, &fee, 1),
        idempotency_key(event, &fee, 2),
        idempotency_key(event, &fee, 3),
        idempotency_key(event, &mail, 1),
        idempotency_key(EventId(Uuid::now_v7()), &fee, 1),
    ];
    assert_eq!(keys.iter().collect::<BTreeSet<_>>().len(), keys.len());
    assert_eq!(keys[1], format!("{}:2", keys[0]));
}

/// The acts as docs/lifecycle.md names them, each in every variant.
fn acts(policy: &Policy) -> Vec<(&'static str, Act<'_>)> {
    let hold = Duration::from_secs(600);
    let mut acts = Vec::new();
    for admission in [Admission::Run, Admission::Busy, Admission::Stale, Admission::Hold(hold)] {
        acts.push(("claim", Act::Claim { admission, lease: policy.lease }));
    }
    for workplace in [WorkLocation::Inside, WorkLocation::Called, WorkLocation::Pulled] {
        acts.push(("lease ended", Act::LeaseEnded { workplace }));
    }
    for overtaken in [Overtaken::No, Overtaken::Stale, Overtaken::NotItsTurn] {
        acts.push(("done", Act::Done { overtaken }));
    }
    for retry in [Retry::Schedule, Retry::NotBefore(hold), Retry::In(hold), Retry::Never] {
        acts.push(("failed", Act::Failed { retry, policy }));
    }
    acts.push(("unsent", Act::Failed { retry: Retry::Unsent, policy }));
    acts.push(("given back", Act::GivenBack));
    acts.extend([None, Some(hold)].map(|hold| ("set aside", Act::SetAside { hold })));
    acts.push(("woken", Act::Woken));
    acts.extend([false, true].map(|go| ("hold ended", Act::HoldEnded { go })));
    acts.push(("too many held", Act::TooManyHeld));
    acts.push(("hurry", Act::Hurry));
    for is_behind in [false, true] {
        for is_hopeless in [false, true] {
            for (name, force) in [("replay", false), ("replay with force", true)] {
                acts.push((name, Act::Replay { force, is_behind, is_hopeless }));
            }
        }
    }
    acts.extend([("approve", Act::Approve), ("reject", Act::Reject), ("discard", Act::Discard)]);
    acts
}

const PHASES: [Phase; 9] = [
    Phase::Ready,
    Phase::Leased,
    Phase::Held,
    Phase::Parked,
    Phase::Done,
    Phase::Stale,
    Phase::Dead,
    Phase::Review,
    Phase::Discarded,
];

/// Every job in this phase that a rule could distinguish from another.
fn jobs(phase: Phase) -> Vec<JobState> {
    let mut jobs = Vec::new();
    for seconds in [-30, 30] {
        for (attempt, steps, lost) in [(1, 0, 0), (3, 2, 1), (9, 0, LOST_ALONE_MAX), (30, 2, 1)] {
            for forced in [false, true] {
                let due = noon() + SignedDuration::from_secs(seconds);
                let progress = Progress { attempt, steps, lost };
                jobs.push(JobState { phase, progress, earlier_attempts: 0, due, forced });
            }
        }
    }
    jobs
}

fn three_attempts() -> Policy {
    let retry = vec![Duration::ZERO, Duration::from_secs(10), Duration::from_secs(60)];
    Policy { retry, lease: Duration::from_secs(30) }
}

#[test]
fn the_page_on_the_life_of_a_job_lists_exactly_the_transitions_there_are() {
    let policy = three_attempts();
    let mut there_are = BTreeSet::new();
    for (name, act) in acts(&policy) {
        for job in PHASES.into_iter().flat_map(jobs) {
            if let Ok(change) = step(&job, &act, noon(), 0.5) {
                there_are.insert((name.to_owned(), word(job.phase), word(change.phase)));
            }
        }
    }
    assert_eq!(listed_transitions("## Acts"), there_are);
}

#[test]
fn the_attempts_before_a_replay_do_not_count_as_unsent_ones() {
    // A job with many attempts is replayed, and the requests of its next attempts cannot leave the process. With the old
    // attempts the job would wait for minutes, or die at once.
    let policy = three_attempts();
    let progress = Progress { attempt: 30, steps: 3, lost: 0 };
    let (dead, forced) = (Phase::Dead, false);
    let dead = JobState { phase: dead, progress, earlier_attempts: 0, due: noon(), forced };
    let lost = JobState { progress: Progress { lost: 2, ..progress }, ..dead };
    let done = JobState { phase: Phase::Done, earlier_attempts: 20, ..dead };
    let act = |job: &JobState, act: Act<'_>| {
        let change = step(job, &act, noon(), 0.5).expect("it changes");
        let Change { phase, due, progress, earlier_attempts, forced, .. } = change;
        JobState { phase, progress, earlier_attempts, due, forced }
    };
    // A replay of a job that was lost keeps one loss.
    let jobs =
        [(dead, false, 30, 0), (dead, true, 30, 0), (lost, false, 29, 1), (done, true, 0, 0)];
    for (job, force, earlier, lost) in jobs {
        let replay = Act::Replay { force, is_behind: false, is_hopeless: false };
        let mut job = act(&job, replay);
        assert_eq!((job.phase, job.earlier_attempts), (Phase::Ready, earlier));
        for (unsent, wait) in [(1, 1), (2, 2), (3, 4)] {
            let due = JobState { due: noon(), ..job };
            let claim = Act::Claim { admission: Admission::Run, lease: policy.lease };
            job = act(&act(&due, claim), Act::Failed { retry: Retry::Unsent, policy: &policy });
            let expected = Progress { attempt: earlier + lost + unsent, steps: 0, lost };
            assert_eq!((job.phase, job.progress), (Phase::Ready, expected), "{job:?}");
            assert_eq!(job.due.duration_since(noon()).as_secs(), wait);
        }
    }
}

#[test]
fn a_right_is_void_after_every_act_that_gives_the_job_to_another() {
    let policy = three_attempts();
    for (name, act) in acts(&policy) {
        for job in PHASES.into_iter().flat_map(jobs) {
            let Ok(change) = step(&job, &act, noon(), 0.5) else { continue };
            let what = format!("{name} on {job:?}: {change:?}");
            // A worker that was only slow may still report "done", until the job is given to another
            // worker or an operator decides otherwise.
            let withdraws = match act {
                Act::Claim { admission: Admission::Run, .. }
                | Act::GivenBack
                | Act::SetAside { .. }
                | Act::Reject
                | Act::Discard => true,
                Act::Replay { .. } => change.phase == Phase::Ready && job.phase != Phase::Ready,
                _ => false,
            };
            assert_eq!(change.voids_fence, withdraws, "{what}");
            assert!(
                !change.new_run || job.phase.is_over(),
                "{what}: only an ended job gets a new run"
            );
            // The end of a lease frees the resource of the job, and so does a late "done".
            if job.phase == Phase::Leased || change.phase == Phase::Done {
                assert_ne!(change.turn, ResourceEffect::Keep, "{what}");
            }
            assert!(change.due >= noon() || change.phase == Phase::Ready, "{what}");
        }
    }
}
