//! Properties of the life of a delivery: after any acts it ends as delivered, dead or cancelled,
//! and is never lost.

use std::collections::BTreeSet;
use std::time::Duration;

use hapax_core::Timestamp;
use hapax_core::delivery::{
    AttemptRecord, DeliveryAct, DeliveryChange, DeliveryPhase, DeliveryState, DeliveryStatus,
    DeliveryUnchanged, EndpointStanding, KeyPositionChange, KeyTurn, MessageStatus, step,
};
use hapax_core::job::{Policy, Progress, Retry, UNSENT_MAX};
use jiff::SignedDuration;
use proptest::prelude::*;

use crate::lifecycle_page::{listed_transitions, word};

const PHASES: [DeliveryPhase; 6] = [
    DeliveryPhase::Ready,
    DeliveryPhase::Leased,
    DeliveryPhase::Parked,
    DeliveryPhase::Delivered,
    DeliveryPhase::Dead,
    DeliveryPhase::Cancelled,
];

const REPLAY: DeliveryAct<'static> = DeliveryAct::Replay { parks_key: false };

fn noon() -> Timestamp {
    "2026-06-01T12:00:00Z".parse().expect("a timestamp")
}

fn three_attempts() -> Policy {
    let retry = [0, 60, 300].map(Duration::from_secs).to_vec();
    Policy { retry, lease: Duration::from_secs(30) }
}

fn state(phase: DeliveryPhase, seconds: i64, progress: (u32, u32, u32)) -> DeliveryState {
    let (attempt, steps, lost) = progress;
    let due = noon() + SignedDuration::from_secs(seconds);
    let progress = Progress { attempt, steps, lost };
    DeliveryState { phase, progress, earlier_attempts: 0, due }
}

/// Every delivery in this phase that a rule could distinguish from another.
fn deliveries(phase: DeliveryPhase) -> Vec<DeliveryState> {
    let mut all = Vec::new();
    for seconds in [-30, 30] {
        for progress in [(1, 0, 0), (3, 2, 1), (9, 0, 9), (30, 2, 1), (u32::MAX, 2, u32::MAX)] {
            all.push(state(phase, seconds, progress));
        }
    }
    all
}

/// The acts as docs/lifecycle.md names them, each in every variant.
fn acts(policy: &Policy) -> Vec<(&'static str, DeliveryAct<'_>)> {
    let mut acts = Vec::new();
    for wait in [1, 1_000].map(Duration::from_secs) {
        for retry in [Retry::Schedule, Retry::NotBefore(wait), Retry::In(wait), Retry::Never] {
            acts.push(("failed", DeliveryAct::Failed { retry, policy }));
        }
    }
    acts.extend([
        ("unsent", DeliveryAct::Failed { retry: Retry::Unsent, policy }),
        ("claim", DeliveryAct::Claim { lease: policy.lease, turn: KeyTurn::Now }),
        ("claim", DeliveryAct::Claim { lease: policy.lease, turn: KeyTurn::Later }),
        ("lease ended", DeliveryAct::LeaseEnded),
        ("delivered", DeliveryAct::Delivered),
        ("given back", DeliveryAct::GivenBack),
        ("woken", DeliveryAct::Woken),
        ("cancel", DeliveryAct::Cancel),
        ("skip", DeliveryAct::Skip),
        ("expire", DeliveryAct::Expire),
        ("replay", DeliveryAct::Replay { parks_key: false }),
        ("replay", DeliveryAct::Replay { parks_key: true }),
    ]);
    acts
}

/// Whether a claim can be counted: the number of attempts must not overflow.
fn countable(delivery: &DeliveryState, act: &DeliveryAct<'_>) -> bool {
    delivery.progress.attempt < u32::MAX || !matches!(act, DeliveryAct::Claim { .. })
}

#[test]
fn the_page_on_the_life_of_a_delivery_lists_exactly_the_transitions_there_are() {
    let policy = three_attempts();
    let mut there_are = BTreeSet::new();
    for (name, act) in acts(&policy) {
        for delivery in PHASES.into_iter().flat_map(deliveries) {
            if !countable(&delivery, &act) {
                continue;
            }
            if let Ok(change) = step(&delivery, &act, noon(), 0.5) {
                there_are.insert((name.to_owned(), word(delivery.phase), word(change.phase)));
            }
        }
    }
    assert_eq!(listed_transitions("## The life of a delivery"), there_are);
}

#[test]
fn a_right_is_void_after_every_act_that_gives_the_delivery_to_another() {
    // A sender that was only slow may still report a 2xx, until another sender may attempt the
    // delivery.
    let policy = three_attempts();
    for (name, act) in acts(&policy) {
        for delivery in PHASES.into_iter().flat_map(deliveries) {
            if !countable(&delivery, &act) {
                continue;
            }
            let Ok(change) = step(&delivery, &act, noon(), 0.5) else { continue };
            let withdraws = match act {
                DeliveryAct::Claim { turn, .. } => turn == KeyTurn::Now,
                DeliveryAct::GivenBack => true,
                DeliveryAct::Replay { .. } => delivery.phase != DeliveryPhase::Ready,
                DeliveryAct::LeaseEnded
                | DeliveryAct::Delivered
                | DeliveryAct::Failed { .. }
                | DeliveryAct::Woken
                | DeliveryAct::Cancel
                | DeliveryAct::Skip
                | DeliveryAct::Expire => false,
            };
            assert_eq!(change.voids_fence, withdraws, "{name} on {delivery:?}: {change:?}");
        }
    }
}

#[test]
fn a_late_delivered_counts_and_a_late_failed_does_not() {
    // The endpoint accepted the request, but meanwhile the lease ended or an operator cancelled the
    // delivery.
    let policy = three_attempts();
    let leased = state(DeliveryPhase::Leased, -1, (4, 1, 2));
    for end in [DeliveryAct::LeaseEnded, DeliveryAct::Cancel] {
        let ended = after(&leased, &step(&leased, &end, noon(), 0.5).expect("it ends"));
        let failed = DeliveryAct::Failed { retry: Retry::Schedule, policy: &policy };
        for late in [failed, DeliveryAct::GivenBack] {
            assert_eq!(step(&ended, &late, noon(), 0.5), Err(DeliveryUnchanged::RightLost));
        }
        let change = step(&ended, &DeliveryAct::Delivered, noon(), 0.5).expect("it counts");
        assert_eq!((change.phase, change.due), (DeliveryPhase::Delivered, noon()));
        assert_eq!(change.progress, ended.progress);
        assert_eq!(change.attempt, AttemptRecord::Remove, "it was recorded as lost");
        let again = step(&after(&ended, &change), &DeliveryAct::Delivered, noon(), 0.5);
        assert_eq!(again, Err(DeliveryUnchanged::AlreadyDelivered));
    }
}

#[test]
fn an_attempt_that_was_never_sent_uses_no_step_and_backs_off() {
    // The node has no free socket for an hour, at the last step of the schedule.
    let policy = three_attempts();
    let mut delivery = state(DeliveryPhase::Ready, 0, (2, 2, 0));
    let mut waits = Vec::new();
    for _ in 0..12 {
        let (now, lease) = (delivery.due, policy.lease);
        let claim = DeliveryAct::Claim { lease, turn: KeyTurn::Now };
        delivery = after(&delivery, &step(&delivery, &claim, now, 0.5).expect("it is due"));
        let unsent = DeliveryAct::Failed { retry: Retry::Unsent, policy: &policy };
        let change = step(&delivery, &unsent, now, 0.5).expect("it was leased");
        assert_eq!((change.phase, change.progress.steps), (DeliveryPhase::Ready, 2));
        assert_eq!(change.attempt, AttemptRecord::Failed);
        waits.push(change.due.duration_since(now).as_secs());
        delivery = after(&delivery, &change);
    }
    assert_eq!(waits, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]);
    assert_eq!(delivery.progress.attempt, 14);
}

#[test]
fn a_request_that_can_never_leave_becomes_a_dead_letter() {
    // With a damaged secret, no request is ever sent. Lost attempts in between do not change the
    // count of unsent ones.
    let policy = three_attempts();
    let mut delivery = state(DeliveryPhase::Ready, 0, (0, 0, 0));
    let mut steps = Vec::new();
    while delivery.phase == DeliveryPhase::Ready {
        let (now, lease) = (delivery.due, policy.lease);
        let claim = DeliveryAct::Claim { lease, turn: KeyTurn::Now };
        delivery = after(&delivery, &step(&delivery, &claim, now, 0.5).expect("it is due"));
        let act = match delivery.progress.attempt {
            2 | 5 => DeliveryAct::LeaseEnded,
            _other => DeliveryAct::Failed { retry: Retry::Unsent, policy: &policy },
        };
        delivery = after(&delivery, &step(&delivery, &act, now, 0.5).expect("it was leased"));
        steps.push(delivery.progress.steps);
        assert!(steps.len() < 100, "it is tried for ever");
    }
    assert_eq!(delivery.phase, DeliveryPhase::Dead);
    assert_eq!(steps[..22], [0; 22], "twenty that were not sent, and two that were lost");
    assert_eq!(steps[22..], [1, 2, 3], "then as many as the schedule has");
}

#[test]
fn losses_never_bury_a_delivery() {
    // The process dies during every attempt, a thousand times in a row.
    let mut delivery = state(DeliveryPhase::Ready, 0, (0, 0, 0));
    for n in 1..=1_000 {
        let claim = DeliveryAct::Claim { lease: Duration::from_secs(30), turn: KeyTurn::Now };
        delivery = after(&delivery, &step(&delivery, &claim, delivery.due, 0.5).expect("due"));
        let (lease_end, much_later) = (delivery.due, delivery.due + SignedDuration::from_hours(1));
        let change = step(&delivery, &DeliveryAct::LeaseEnded, much_later, 1.0).expect("lost");
        assert_eq!((change.phase, change.attempt), (DeliveryPhase::Ready, AttemptRecord::Lost));
        assert_eq!(change.progress, Progress { attempt: n, steps: 0, lost: n });
        // The wait begins with the end of the lease, not with the moment at which it is noticed.
        let wait = change.due.duration_since(lease_end);
        assert!(wait > SignedDuration::ZERO && wait <= SignedDuration::from_secs(360), "{wait}");
        delivery = after(&delivery, &change);
    }
}

#[test]
fn a_replay_begins_the_schedule_again_and_goes_on_counting_attempts() {
    let ended = [DeliveryPhase::Delivered, DeliveryPhase::Dead, DeliveryPhase::Cancelled];
    for phase in ended {
        let delivery = state(phase, -30, (7, 3, 2));
        let change = step(&delivery, &REPLAY, noon(), 0.5).expect("it has ended");
        assert_eq!((change.phase, change.due), (DeliveryPhase::Ready, noon()));
        assert_eq!(change.progress, Progress { attempt: 7, steps: 0, lost: 0 });
        assert_eq!(change.earlier_attempts, 7);
        let moves = phase == DeliveryPhase::Delivered;
        let record = if moves { AttemptRecord::Delivered } else { AttemptRecord::Keep };
        assert_eq!(change.attempt, record, "the attempt that delivered stays in the history");
    }
    // A replayed delivery keeps its place only if it was dead and parked the later deliveries of
    // its key.
    for (phase, parks_key) in PHASES.into_iter().flat_map(|phase| [(phase, false), (phase, true)]) {
        let delivery = state(phase, -30, (7, 3, 2));
        let replayed = step(&delivery, &DeliveryAct::Replay { parks_key }, noon(), 0.5);
        let Ok(change) = replayed else { continue };
        let keeps = phase == DeliveryPhase::Dead && parks_key;
        assert_eq!(change.place == KeyPositionChange::Keep, keeps, "{phase:?} {parks_key}");
    }
    // A waiting delivery is sent now, and keeps the steps that it has used.
    let waits = state(DeliveryPhase::Ready, 30, (2, 2, 0));
    let change = step(&waits, &REPLAY, noon(), 0.5).expect("it waits");
    assert_eq!((change.due, change.progress), (noon(), waits.progress));
    for open in
        [state(DeliveryPhase::Ready, 0, (0, 0, 0)), state(DeliveryPhase::Leased, 9, (1, 0, 0))]
    {
        let again = step(&open, &REPLAY, noon(), 0.5);
        assert_eq!(again, Err(DeliveryUnchanged::AlreadyOpen));
    }
}

fn after(delivery: &DeliveryState, change: &DeliveryChange) -> DeliveryState {
    let DeliveryChange { phase, due, progress, earlier_attempts, .. } = *change;
    assert!(progress.attempt >= delivery.progress.attempt.saturating_sub(1));
    DeliveryState { phase, due, progress, earlier_attempts }
}

/// An act by its index in [`acts`], the time that passed before the act, and its random number.
type Plan = Vec<(usize, u32, f64)>;

fn plan() -> impl Strategy<Value = Plan> {
    prop::collection::vec((0..64usize, 0..1_000u32, 0.0..=1.0), 1..100)
}

proptest! {
    #[test]
    fn every_open_delivery_has_a_due_time_and_a_bound(
        plan in plan(),
        waits in prop::collection::vec(0..100_000u64, 0..8),
        lease in 1..600u64,
    ) {
        let retry: Vec<_> = waits.into_iter().map(Duration::from_secs).collect();
        let policy = Policy { retry, lease: Duration::from_secs(lease) };
        let longest = policy.retry.iter().max().copied().unwrap_or_default().as_secs() * 12 / 10;
        // The longest wait that any act may ask for: the schedule, Retry-After, or a back-off.
        let longest = i64::try_from(longest.max(1_000)).expect("few");
        let acts = acts(&policy);
        let mut delivery = state(DeliveryPhase::Ready, 0, (0, 0, 0));
        let mut now = noon();
        for (at, seconds, dice) in plan {
            now += SignedDuration::from_secs(i64::from(seconds));
            let (name, act) = acts[at % acts.len()];
            let Ok(change) = step(&delivery, &act, now, dice) else { continue };
            let what = format!("{name} on {delivery:?} at {now}: {change:?}");
            let wait = change.due.duration_since(now).as_secs();
            match change.phase {
                DeliveryPhase::Ready => {
                    prop_assert!(wait <= longest, "{what}: it would wait for ever");
                    let failed = matches!(act, DeliveryAct::Failed { .. });
                    prop_assert!(!failed || change.due >= now, "{what}: due in its own past");
                }
                DeliveryPhase::Parked => prop_assert_eq!(change.progress, delivery.progress),
                DeliveryPhase::Leased => {
                    prop_assert_eq!(change.due, now + SignedDuration::from_secs(lease as i64));
                    prop_assert_eq!(change.progress.attempt, delivery.progress.attempt + 1);
                }
                DeliveryPhase::Delivered | DeliveryPhase::Dead | DeliveryPhase::Cancelled => {
                    prop_assert_eq!(change.due, now, "{}: the moment at which it ended", what);
                }
            }
            // Only a failed attempt uses a step, and only one.
            let used = change.progress.steps.saturating_sub(delivery.progress.steps);
            let Progress { attempt, steps, lost } = delivery.progress;
            let is_sent = name == "failed";
            let unsent = (attempt - delivery.earlier_attempts).saturating_sub(steps + lost);
            let may_use = is_sent || name == "unsent" && unsent > UNSENT_MAX;
            prop_assert_eq!(used, u32::from(may_use), "{}", what);
            let steps_max = u32::try_from(policy.retry.len()).expect("few").max(1);
            prop_assert!(change.progress.steps <= steps_max, "{what}: more than the schedule has");
            prop_assert!(change.phase != DeliveryPhase::Dead || may_use, "{what}: buried");
            delivery = after(&delivery, &change);
        }
        // From any phase, a delivery that is sent and answered with a 2xx is delivered.
        if !delivery.phase.is_open() {
            let replay = step(&delivery, &REPLAY, now, 0.5).expect("it has ended");
            delivery = after(&delivery, &replay);
        }
        if delivery.phase == DeliveryPhase::Parked {
            let woken = step(&delivery, &DeliveryAct::Woken, now, 0.5).expect("it was parked");
            delivery = after(&delivery, &woken);
        }
        if delivery.phase == DeliveryPhase::Leased {
            let ended = delivery.due;
            let lost = step(&delivery, &DeliveryAct::LeaseEnded, ended, 0.5).expect("lost");
            delivery = after(&delivery, &lost);
        }
        let claim = DeliveryAct::Claim { lease: policy.lease, turn: KeyTurn::Now };
        let claimed = step(&delivery, &claim, delivery.due, 0.5).expect("it is due");
        let delivered = step(&after(&delivery, &claimed), &DeliveryAct::Delivered, now, 0.5);
        prop_assert_eq!(delivered.expect("it was leased").phase, DeliveryPhase::Delivered);
    }

    #[test]
    fn the_status_of_a_message_is_the_first_that_applies_to_a_delivery(
        deliveries in prop::collection::vec(
            (prop::sample::select(PHASES.to_vec()), 0..3u32, 0..3usize),
            0..6,
        ),
    ) {
        let standings =
            [EndpointStanding::Active, EndpointStanding::Disabled, EndpointStanding::Deleted];
        let each: Vec<_> = deliveries
            .iter()
            .map(|(phase, steps, at)| DeliveryStatus::of(*phase, *steps, standings[*at]))
            .collect();
        let status = MessageStatus::of(each.iter().copied());
        let order = ["dead", "failed", "held", "parked", "sending", "waiting", "delivered", "cancelled"];
        let first = order.iter().find(|name| each.iter().any(|one| one.as_str() == **name));
        prop_assert_eq!(status.as_str(), first.copied().unwrap_or("none"));
        for ((phase, _, at), status) in deliveries.iter().zip(each) {
            let still_open = matches!(
                status,
                DeliveryStatus::Waiting
                    | DeliveryStatus::Failed
                    | DeliveryStatus::Held
                    | DeliveryStatus::Parked
                    | DeliveryStatus::Sending
            );
            let waits = matches!(phase, DeliveryPhase::Ready | DeliveryPhase::Parked);
            let orphaned = waits && *at == 2;
            prop_assert_eq!(still_open, phase.is_open() && !orphaned);
        }
    }
}
