//! The life of a delivery, case by case: claimed, settled through its fence, lost, retried, dead, replayed,
//! cancelled.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::Tenant;
use hapax_core::delivery::{DeliveryId, DeliveryStatus, OUTCOME_LOST};
use hapax_core::endpoint::EndpointSettings;
use hapax_core::job::{Fence, Retry};
use hapax_core::limits::ERROR_CHARS_MAX;
use hapax_core::store::{
    AttemptVerdict, DeliveryAsk, DeliveryReplayed, EndpointSignal, HandlerAnswer, Held, MessageAct,
    NewMessage,
};
use jiff::SignedDuration;
use uuid::Uuid;

use crate::harness::{LEASE, World};
use crate::sending::{
    ALL, REFUSED, Sending, ask, claimed, delivered, failed, failed_saying, message, outcome,
    settings, wanting,
};

pub(crate) async fn a_claim_commits_its_attempt_and_fence_before_the_request<S: Sending>(
    world: World<S>,
) {
    // The process may die right after the claim: the attempt must be counted already.
    let endpoint = world.add(settings()).await;
    world.send(message("m1")).await;
    let waiting = world.delivery_of("m1").await;
    assert_eq!((waiting.status, waiting.attempt), (DeliveryStatus::Waiting, 0));
    assert_eq!((waiting.due_at, waiting.reason), (Some(world.clock.now()), None));
    let claim = world.take_one().await;
    assert_eq!((claim.attempt, claim.delivery), (1, waiting.id));
    assert_eq!(claim.leased_until, world.clock.now() + SignedDuration::from_secs(LEASE));
    assert_eq!(claim.endpoint.id, endpoint);
    assert_eq!(claim.endpoint.url, "https://example.com/in");
    assert_eq!(claim.endpoint.timeout, Duration::from_secs(10));
    assert_eq!(claim.endpoint.sealed, world.endpoint(endpoint).await.sealed);
    let sending = world.delivery_of("m1").await;
    assert_eq!((sending.status, sending.attempt), (DeliveryStatus::Sending, 1));
    assert_eq!((sending.due_at, sending.finished_at), (Some(claim.leased_until), None));
    assert!(world.take(ALL).await.is_empty(), "claimed twice");
}

pub(crate) async fn a_delivered_message_keeps_the_attempt_and_is_never_claimed_again<S: Sending>(
    world: World<S>,
) {
    // The answer to the first report may be lost, and the report comes again.
    world.add(settings()).await;
    world.send(message("m1")).await;
    let claim = world.take_one().await;
    world.pass(1);
    assert_eq!(world.report(&claim, delivered()).await, Held::Kept);
    let first = world.delivery_of("m1").await;
    world.pass(1);
    let other = AttemptVerdict::Delivered(HandlerAnswer { status: 200, body: "other".to_owned() });
    assert_eq!(world.report(&claim, other).await, Held::Kept, "the same fence, the same verdict");
    assert_eq!(world.report(&claim, failed(Retry::Schedule)).await, Held::Lost);
    assert_eq!(world.report(&claim, AttemptVerdict::GivenBack).await, Held::Lost);
    world.pass(1_000);
    assert!(world.take(ALL).await.is_empty());
    let after = world.delivery_of("m1").await;
    assert_eq!(after, first);
    assert_eq!((after.status, after.reason), (DeliveryStatus::Delivered, None));
    assert_eq!(after.due_at, None);
    assert_eq!(after.finished_at, Some(crate::harness::after(1)));
    let [attempt] = &after.attempts[..] else { panic!("{:?}", after.attempts) };
    assert_eq!((attempt.n, attempt.at), (1, crate::harness::noon()));
    assert_eq!((attempt.took_ms, attempt.status), (Some(40), Some(202)));
    assert_eq!((attempt.error.as_deref(), attempt.answer.as_deref()), (None, Some("thanks")));
    assert_eq!(attempt.node, "node-1");
}

pub(crate) async fn an_exchange_settles_and_claims_in_one_commit<S: Sending>(world: World<S>) {
    // A batch mixes outcomes. Each has its own answer, and one with a lost fence does not affect
    // the others.
    world.add(settings()).await;
    for id in ["m1", "m2", "m3", "m4"] {
        world.send(message(id)).await;
    }
    let claims = world.take(ALL).await;
    assert_eq!(claimed(&claims), ["m1", "m2", "m3", "m4"]);
    world.send(message("m5")).await;
    let of = |id: &str| claims.iter().find(|claim| claim.message == id).expect("claimed");
    let mut unknown = outcome(of("m1"), delivered());
    unknown.delivery = DeliveryId(Uuid::now_v7());
    let mut late = outcome(of("m2"), delivered());
    late.fence = Fence(late.fence.0 - 1);
    let outcomes = vec![
        unknown,
        outcome(of("m1"), delivered()),
        late,
        outcome(of("m2"), failed(Retry::Never)),
        outcome(of("m3"), AttemptVerdict::GivenBack),
        outcome(of("m1"), delivered()),
        outcome(of("m1"), failed(Retry::Never)),
    ];
    let exchanged = world.exchange(outcomes, ask(ALL)).await;
    use Held::{Kept, Lost};
    assert_eq!(exchanged.settled, [Lost, Kept, Lost, Kept, Kept, Kept, Lost]);
    assert_eq!(claimed(&exchanged.claims), ["m3", "m5"], "what was given back is due at once");
    for (id, status) in [
        ("m1", DeliveryStatus::Delivered),
        ("m2", DeliveryStatus::Dead),
        ("m3", DeliveryStatus::Sending),
        ("m4", DeliveryStatus::Sending),
    ] {
        assert_eq!(world.status_of(id).await, status, "{id}");
    }
}

pub(crate) async fn a_late_sender_cannot_settle_a_reclaimed_delivery<S: Sending>(world: World<S>) {
    // A sender is paused past its lease while another takes over. Each of its reports is then
    // refused.
    world.add(settings()).await;
    world.send(message("m1")).await;
    let late = world.take_one().await;
    world.pass(LEASE + 2);
    let holder = world.take_one().await;
    assert_ne!(late.fence, holder.fence);
    assert_eq!(holder.attempt, 2);
    let before = world.delivery_of("m1").await;
    for verdict in [delivered(), failed(Retry::Never), AttemptVerdict::GivenBack] {
        assert_eq!(world.report(&late, verdict).await, Held::Lost);
    }
    assert_eq!(world.delivery_of("m1").await, before);
    assert_eq!(world.report(&holder, delivered()).await, Held::Kept);
}

pub(crate) async fn an_expired_lease_is_a_lost_attempt_that_uses_no_step<S: Sending>(
    world: World<S>,
) {
    // The process dies in the middle of ten attempts in a row: the delivery must not become a dead letter.
    world.add(settings()).await;
    world.send(message("m1")).await;
    for n in 1..=10 {
        let claim = world.take_one().await;
        assert_eq!(claim.attempt, n);
        world.pass(LEASE - 1);
        assert!(world.take(ALL).await.is_empty(), "the lease still runs");
        // The longest back-off is five minutes and a fifth.
        world.pass(1 + 360);
    }
    assert_eq!(world.take_one().await.attempt, 11);
    world.pass(LEASE);
    assert!(world.take(ALL).await.is_empty(), "a lost attempt backs off first");
    let lost = world.delivery_of("m1").await;
    assert_eq!(lost.status, DeliveryStatus::Waiting, "no step was used");
    assert_eq!(lost.reason.as_deref(), Some(OUTCOME_LOST));
    assert_eq!(lost.attempts.len(), 11);
    for (at, attempt) in (1..).zip(&lost.attempts) {
        assert_eq!((attempt.n, attempt.took_ms, attempt.status), (at, None, None));
        assert_eq!(attempt.error.as_deref(), Some(OUTCOME_LOST));
        assert_eq!((attempt.node.as_str(), attempt.answer.as_deref()), ("node-1", None));
    }
    // All steps of the schedule are left.
    world.pass(360);
    for wait in [72, 360] {
        assert_eq!(
            world.report(&world.take_one().await, failed(Retry::Schedule)).await,
            Held::Kept
        );
        assert_eq!(world.status_of("m1").await, DeliveryStatus::Failed);
        world.pass(wait);
    }
    assert_eq!(world.report(&world.take_one().await, failed(Retry::Schedule)).await, Held::Kept);
    assert_eq!(world.status_of("m1").await, DeliveryStatus::Dead);
}

pub(crate) async fn deliveries_that_were_lost_together_do_not_come_due_together<S: Sending>(
    world: World<S>,
) {
    // A node dies with fifty attempts under way: they must not hit the endpoint in one instant.
    world.add(EndpointSettings { max_in_flight: 100, ..settings() }).await;
    world.send_many("m", "invoice.paid", 50).await;
    assert_eq!(world.take(ALL).await.len(), 50);
    world.pass(LEASE);
    assert!(world.take(ALL).await.is_empty());
    let due: HashSet<_> = world.all_deliveries().await.into_iter().map(|one| one.due_at).collect();
    assert!(due.len() > 10, "{} instants", due.len());
    let ended = world.clock.now();
    for due in due {
        let wait = due.expect("open").duration_since(ended).as_secs_f64();
        assert!((0.79..=1.21).contains(&wait), "{wait}");
    }
}

pub(crate) async fn a_late_delivered_counts_and_a_late_failed_does_not<S: Sending>(
    world: World<S>,
) {
    // The receiver has the message: sending it again would be a mistake.
    world.add(settings()).await;
    for id in ["lost", "cancelled"] {
        world.send(message(id)).await;
    }
    let claims = world.take(ALL).await;
    world.act_on("cancelled", MessageAct::Cancel).await;
    assert_eq!(world.status_of("cancelled").await, DeliveryStatus::Cancelled);
    world.pass(LEASE);
    assert!(world.take(ALL).await.is_empty());
    assert_eq!(world.delivery_of("lost").await.attempts.len(), 1, "recorded as lost");
    for claim in &claims {
        let before = world.delivery(claim.delivery).await;
        for verdict in [failed(Retry::Schedule), AttemptVerdict::GivenBack] {
            assert_eq!(world.report(claim, verdict).await, Held::Lost, "{}", claim.message);
        }
        assert_eq!(world.delivery(claim.delivery).await, before);
        assert_eq!(world.report(claim, delivered()).await, Held::Kept, "{}", claim.message);
        let after = world.delivery(claim.delivery).await;
        assert_eq!((after.status, after.reason), (DeliveryStatus::Delivered, None));
        let [attempt] = &after.attempts[..] else { panic!("{:?}", after.attempts) };
        assert_eq!((attempt.n, attempt.status, &attempt.error), (1, Some(202), &None));
    }
    world.pass(1_000);
    assert!(world.take(ALL).await.is_empty());
}

pub(crate) async fn failed_attempts_follow_the_schedule_and_then_the_delivery_is_dead<
    S: Sending,
>(
    world: World<S>,
) {
    // No attempt is early or late by more than the jitter, and there are no more attempts than the
    // schedule has.
    world.add(settings()).await;
    world.send(message("m1")).await;
    for (n, wait) in [(1, 60), (2, 300)] {
        let claim = world.take_one().await;
        assert_eq!(claim.attempt, n);
        world.pass(2);
        let failed_at = world.clock.now();
        assert_eq!(world.report(&claim, failed(Retry::Schedule)).await, Held::Kept);
        let waiting = world.delivery_of("m1").await;
        assert_eq!(waiting.status, DeliveryStatus::Failed);
        assert_eq!(waiting.reason.as_deref(), Some(REFUSED));
        let due = waiting.due_at.expect("a due time").duration_since(failed_at).as_secs_f64();
        let (least, most) = (f64::from(wait) * 0.8, f64::from(wait) * 1.2);
        assert!((least..=most).contains(&due), "{due} s of {wait} s");
        world.pass(i64::from(wait) * 8 / 10 - 1);
        assert!(world.take(ALL).await.is_empty(), "too early");
        world.pass(i64::from(wait) * 4 / 10 + 1);
    }
    let claim = world.take_one().await;
    assert_eq!(world.report(&claim, failed(Retry::Schedule)).await, Held::Kept);
    let dead = world.delivery_of("m1").await;
    assert_eq!((dead.status, dead.attempt), (DeliveryStatus::Dead, 3));
    assert_eq!(dead.reason.as_deref(), Some(REFUSED));
    assert_eq!((dead.due_at, dead.finished_at), (None, Some(world.clock.now())));
    assert_eq!(dead.attempts.iter().map(|attempt| attempt.n).collect::<Vec<_>>(), [1, 2, 3]);
    for attempt in &dead.attempts {
        assert_eq!((attempt.took_ms, attempt.status), (Some(40), Some(500)));
        assert_eq!(attempt.error.as_deref(), Some(REFUSED));
        assert_eq!(attempt.answer.as_deref(), Some("not now"));
    }
    world.pass(100_000);
    assert!(world.take(ALL).await.is_empty());
}

pub(crate) async fn the_first_attempt_waits_where_the_schedule_says_so<S: Sending>(
    world: World<S>,
) {
    // A schedule that begins with a wait must not be treated like one that begins at once.
    let retry = vec![Duration::from_secs(100), Duration::ZERO];
    world.add(EndpointSettings { retry, ..settings() }).await;
    world.send(message("m1")).await;
    world.pass(79);
    assert!(world.take(ALL).await.is_empty());
    world.pass(42);
    let claim = world.take_one().await;
    assert_eq!(world.report(&claim, failed(Retry::Schedule)).await, Held::Kept);
    assert_eq!(world.take_one().await.attempt, 2, "the second wait is none");
}

pub(crate) async fn the_sender_may_ask_for_a_later_retry_or_none<S: Sending>(world: World<S>) {
    // Retry-After may only delay; a delivery that no retry can save is dead at once, with steps left.
    world.add(settings()).await;
    for id in ["later", "soon", "never"] {
        world.send(message(id)).await;
    }
    for claim in world.take(ALL).await {
        let retry = match claim.message.as_str() {
            "later" => Retry::NotBefore(Duration::from_secs(1_000)),
            "soon" => Retry::NotBefore(Duration::from_secs(1)),
            _never => Retry::Never,
        };
        assert_eq!(world.report(&claim, failed(retry)).await, Held::Kept);
    }
    let dead = world.delivery_of("never").await;
    assert_eq!((dead.status, dead.reason.as_deref()), (DeliveryStatus::Dead, Some(REFUSED)));
    world.pass(47);
    assert!(world.take(ALL).await.is_empty(), "Retry-After never hurries");
    world.pass(25);
    assert_eq!(claimed(&world.take(ALL).await), ["soon"]);
    world.pass(1_000 - 72 - 1);
    let early = world.take(ALL).await;
    assert!(early.iter().all(|claim| claim.message != "later"));
    world.pass(1);
    assert_eq!(claimed(&world.take(ALL).await), ["later"]);
}

pub(crate) async fn an_attempt_that_was_never_sent_uses_no_step<S: Sending>(world: World<S>) {
    // A node without a free socket for an hour must not use up a schedule of three attempts.
    world.add(settings()).await;
    world.send(message("m1")).await;
    for n in 1..=12 {
        let claim = world.take_one().await;
        assert_eq!(claim.attempt, n);
        assert_eq!(world.report(&claim, failed(Retry::Unsent)).await, Held::Kept);
        let waiting = world.delivery_of("m1").await;
        assert_eq!(waiting.status, DeliveryStatus::Waiting);
        assert_eq!(waiting.reason.as_deref(), Some(REFUSED));
        let due = waiting.due_at.expect("a due time");
        assert!(due > world.clock.now(), "it backs off");
        world.pass(360);
    }
    assert_eq!(world.delivery_of("m1").await.attempts.len(), 12);
    assert_eq!(world.deliver_all().await, ["m1"]);
}

pub(crate) async fn a_delivery_that_can_never_be_sent_is_seen_and_ends<S: Sending>(
    world: World<S>,
) {
    // With a damaged secret no request ever leaves. The delivery must not be retried for ever and
    // be shown as waiting.
    world.add(settings()).await;
    world.send(message("m1")).await;
    for n in 1..=23 {
        let claim = world.take_one().await;
        assert_eq!(claim.attempt, n);
        assert_eq!(world.report(&claim, failed(Retry::Unsent)).await, Held::Kept);
        let now = world.delivery_of("m1").await;
        let expected = match n {
            1..=20 => DeliveryStatus::Waiting,
            21 | 22 => DeliveryStatus::Failed,
            _last => DeliveryStatus::Dead,
        };
        assert_eq!((now.status, now.reason.as_deref()), (expected, Some(REFUSED)), "after {n}");
        world.pass(360);
    }
    assert!(world.take(ALL).await.is_empty());
    // After a replay the 20 attempts and their short waits begin again.
    let id = world.delivery_of("m1").await.id;
    assert_eq!(world.replay_delivery(id).await, DeliveryReplayed::Due);
    for (n, wait_max) in [(24, 1.2), (25, 2.4)] {
        let claim = world.take_one().await;
        assert_eq!(claim.attempt, n);
        assert_eq!(world.report(&claim, failed(Retry::Unsent)).await, Held::Kept);
        let waiting = world.delivery_of("m1").await;
        assert_eq!(waiting.status, DeliveryStatus::Waiting, "it used a step");
        let wait = waiting.due_at.expect("open").duration_since(world.clock.now()).as_secs_f64();
        assert!(wait <= wait_max + 0.001, "{wait} s after attempt {n}");
        world.pass(360);
    }
    assert_eq!(world.deliver_all().await, ["m1"]);
}

pub(crate) async fn a_delivery_given_back_is_uncounted_and_due_at_once<S: Sending>(
    world: World<S>,
) {
    // Several restarts must not use up attempts or leave a valid fence behind.
    world.add(settings()).await;
    world.send(message("m1")).await;
    let mut fences = HashSet::new();
    for _ in 0..10 {
        let claim = world.take_one().await;
        assert_eq!(claim.attempt, 1);
        assert!(fences.insert(claim.fence), "a fence twice");
        assert_eq!(world.report(&claim, AttemptVerdict::GivenBack).await, Held::Kept);
        for verdict in [AttemptVerdict::GivenBack, delivered(), failed(Retry::Never)] {
            assert_eq!(world.report(&claim, verdict).await, Held::Lost, "the right is void");
        }
    }
    let waiting = world.delivery_of("m1").await;
    assert_eq!((waiting.status, waiting.attempt), (DeliveryStatus::Waiting, 0));
    assert_eq!((waiting.attempts.len(), waiting.reason), (0, None));
}

pub(crate) async fn an_error_has_the_same_bound_on_every_store<S: Sending>(world: World<S>) {
    // A long error in a script of several bytes per character must not be cut inside one.
    world.add(settings()).await;
    world.send(message("m1")).await;
    let claim = world.take_one().await;
    let error = "é".repeat(ERROR_CHARS_MAX + 500);
    let says = EndpointSignal::Fails;
    let verdict = AttemptVerdict::Failed { error, answer: None, retry: Retry::Never, says };
    assert_eq!(world.report(&claim, verdict).await, Held::Kept);
    let dead = world.delivery_of("m1").await;
    let expected = "é".repeat(ERROR_CHARS_MAX);
    assert_eq!(dead.reason.as_deref(), Some(expected.as_str()));
    let [attempt] = &dead.attempts[..] else { panic!("{:?}", dead.attempts) };
    assert_eq!(attempt.error.as_deref(), Some(expected.as_str()));
    assert_eq!((attempt.status, attempt.answer.as_deref()), (None, None));
}

pub(crate) async fn a_backlog_of_one_endpoint_does_not_delay_another<S: Sending>(world: World<S>) {
    // A thousand deliveries wait for one endpoint before the single delivery of the other is
    // published.
    let busy = EndpointSettings { max_in_flight: 2_000, ..wanting(&["busy"]) };
    world.add(busy).await;
    let quiet = world.add(wanting(&["quiet"])).await;
    world.send_many("busy", "busy", 1_000).await;
    for round in 0..5 {
        let id = format!("quiet_{round}");
        world.send(NewMessage { r#type: "quiet".to_owned(), ..message(&id) }).await;
        let claims = world.take(4).await;
        assert_eq!(claims.len(), 4);
        let of_quiet: Vec<_> = claims.iter().filter(|claim| claim.endpoint.id == quiet).collect();
        assert_eq!(of_quiet.len(), 1, "round {round}: {:?}", claimed(&claims));
        assert_eq!(world.report(of_quiet[0], delivered()).await, Held::Kept);
    }
    // The same holds if an exchange claims a single delivery: the quiet endpoint has its turn next,
    // or the one after.
    world.send(NewMessage { r#type: "quiet".to_owned(), ..message("last") }).await;
    let mut turns = Vec::new();
    for _ in 0..2 {
        turns.extend(world.take(1).await);
    }
    assert!(turns.iter().any(|claim| claim.message == "last"), "{:?}", claimed(&turns));
}

pub(crate) async fn an_endpoint_has_at_most_so_many_attempts_under_way<S: Sending>(
    world: World<S>,
) {
    // Twenty senders each ask for ten deliveries at the same time.
    let endpoint = world.add(EndpointSettings { max_in_flight: 3, ..settings() }).await;
    world.send_many("m", "invoice.paid", 40).await;
    let tasks: Vec<_> = (0..20)
        .map(|_| {
            let store = Arc::clone(&world.store);
            tokio::spawn(async move { store.exchange(Vec::new(), ask(10)).await.expect("claims") })
        })
        .collect();
    let mut claims = Vec::new();
    for task in tasks {
        claims.extend(task.await.expect("no panic").claims);
    }
    assert!(claims.len() <= 3, "{} at once", claims.len());
    claims.extend(world.take(10).await);
    assert_eq!(claims.len(), 3);
    let unique: HashSet<_> = claims.iter().map(|claim| claim.delivery).collect();
    assert_eq!(unique.len(), 3, "one delivery was claimed twice");
    // One attempt ends and another begins in one exchange.
    let ended = claims.remove(0);
    let exchanged = world.exchange(vec![outcome(&ended, delivered())], ask(10)).await;
    assert_eq!(exchanged.claims.len(), 1);
    // The endpoint's bound at the time of the claim counts, and an expired lease frees its slot.
    world.set(endpoint, EndpointSettings { max_in_flight: 5, ..settings() }).await;
    assert_eq!(world.take(10).await.len(), 2);
    world.pass(LEASE + 2);
    assert_eq!(world.take(10).await.len(), 5);
}

pub(crate) async fn a_rate_limit_bounds_how_many_attempts_begin<S: Sending>(world: World<S>) {
    // The limit is ten a minute, and all deliveries are due at once: one is sent every six seconds.
    // Another endpoint is not limited, and time without deliveries is not saved up.
    let limited = EndpointSettings {
        rate_limit: Some("10/m".parse().expect("a rate")),
        max_in_flight: 100,
        ..settings()
    };
    let endpoint = world.add(limited.clone()).await;
    for n in 0..20 {
        world.send(message(&format!("m{n}"))).await;
    }
    let mut begun = Vec::new();
    for second in 0..30 {
        let claims = world.exchange(Vec::new(), ask(ALL)).await;
        for claim in &claims.claims {
            assert_eq!(world.report(claim, delivered()).await, Held::Kept);
            begun.push(second);
        }
        let next = world.exchange(Vec::new(), ask(ALL)).await;
        assert!(next.claims.is_empty(), "no more in the same second");
        let next = next.next_due.expect("more is due");
        assert!(next > world.clock.now(), "the store says when the next one may begin");
        world.pass(1);
    }
    assert_eq!(begun, [0, 6, 12, 18, 24]);
    world.pass(1_000);
    assert_eq!(world.take(ALL).await.len(), 1, "nothing was saved up");
    // Without the limit, all deliveries are sent.
    world.set(endpoint, EndpointSettings { rate_limit: None, ..limited }).await;
    assert_eq!(world.take(ALL).await.len(), 14);
}

pub(crate) async fn an_exchange_takes_about_as_many_bytes_as_it_asks_for<S: Sending>(
    world: World<S>,
) {
    // A body larger than the bound must still be sent, alone.
    world.add(settings()).await;
    for id in ["m1", "m2", "m3"] {
        world.send(message(id)).await;
    }
    let small = || DeliveryAsk { bytes_max: 1, ..ask(10) };
    for _ in 0..3 {
        assert_eq!(world.exchange(Vec::new(), small()).await.claims.len(), 1);
    }
    assert!(world.exchange(Vec::new(), small()).await.claims.is_empty());
}

pub(crate) async fn a_delivery_is_claimed_by_one_of_many_senders<S: Sending>(world: World<S>) {
    // Fifty senders claim two hundred deliveries: none is claimed twice, and none is left out.
    world.add(EndpointSettings { max_in_flight: 1_000, ..settings() }).await;
    world.send_many("m", "invoice.paid", 200).await;
    let tasks: Vec<_> = (0..50)
        .map(|_| {
            let store = Arc::clone(&world.store);
            tokio::spawn(async move { store.exchange(Vec::new(), ask(7)).await.expect("claims") })
        })
        .collect();
    let mut claims = Vec::new();
    for task in tasks {
        claims.extend(task.await.expect("no panic").claims);
    }
    while claims.len() < 200 {
        let more = world.take(ALL).await;
        assert!(!more.is_empty(), "{} of 200", claims.len());
        claims.extend(more);
    }
    let unique: HashSet<_> = claims.iter().map(|claim| claim.delivery).collect();
    assert_eq!((claims.len(), unique.len()), (200, 200));
    assert!(claims.iter().all(|claim| claim.attempt == 1));
}

pub(crate) async fn an_ended_delivery_is_replayed_with_its_schedule_from_the_start<S: Sending>(
    world: World<S>,
) {
    // A dead, a delivered and a cancelled delivery are replayed. Each is sent again, keeps its
    // history, and voids the fence of its last claim.
    world.add(settings()).await;
    for id in ["dead", "delivered", "cancelled"] {
        world.send(message(id)).await;
    }
    let claims = world.take(ALL).await;
    world.act_on("cancelled", MessageAct::Cancel).await;
    for claim in &claims {
        let held = match claim.message.as_str() {
            "dead" => world.report(claim, failed(Retry::Never)).await,
            "delivered" => world.report(claim, delivered()).await,
            _cancelled => Held::Kept,
        };
        assert_eq!(held, Held::Kept);
    }
    for claim in &claims {
        let before = world.delivery(claim.delivery).await;
        assert!(before.finished_at.is_some(), "{before:?}");
        assert_eq!(world.replay_delivery(claim.delivery).await, DeliveryReplayed::Due);
        let open = world.delivery(claim.delivery).await;
        assert_eq!((open.status, open.reason), (DeliveryStatus::Waiting, None), "{}", open.message);
        assert_eq!((open.due_at, open.finished_at), (Some(world.clock.now()), None));
        assert_eq!(open.attempts, before.attempts, "the history stays");
        for verdict in [delivered(), failed(Retry::Never), AttemptVerdict::GivenBack] {
            assert_eq!(world.report(claim, verdict).await, Held::Lost, "{}", claim.message);
        }
    }
    // All three steps of the schedule are left, and attempts are counted from where they were.
    for (n, wait) in [(2, 72), (3, 360), (4, 0)] {
        let claims = world.take(ALL).await;
        assert_eq!(claimed(&claims), ["cancelled", "dead", "delivered"]);
        for claim in claims {
            assert_eq!(claim.attempt, n);
            // This many failures would open the circuit of the endpoint.
            let refused = failed_saying(Retry::Schedule, EndpointSignal::Works);
            assert_eq!(world.report(&claim, refused).await, Held::Kept);
        }
        world.pass(wait);
    }
    for claim in &claims {
        let dead = world.delivery(claim.delivery).await;
        assert_eq!((dead.status, dead.attempt), (DeliveryStatus::Dead, 4));
        let first = usize::from(claim.message != "cancelled");
        assert_eq!(dead.attempts.len(), 3 + first, "{:?}", dead.attempts);
        assert!(dead.attempts.is_sorted_by_key(|attempt| attempt.n));
    }
}

pub(crate) async fn replaying_an_open_delivery_sends_it_now_or_changes_nothing<S: Sending>(
    world: World<S>,
) {
    // A replay of an open delivery must not begin a second attempt during the first, and must not
    // restore a step of the schedule.
    world.add(settings()).await;
    world.send(message("m1")).await;
    let id = world.delivery_of("m1").await.id;
    assert_eq!(world.replay_delivery(id).await, DeliveryReplayed::AlreadyOpen, "due");
    let claim = world.take_one().await;
    assert_eq!(world.replay_delivery(id).await, DeliveryReplayed::AlreadyOpen, "under way");
    assert!(world.take(ALL).await.is_empty());
    assert_eq!(world.report(&claim, failed(Retry::Schedule)).await, Held::Kept);
    assert_eq!(world.replay_delivery(id).await, DeliveryReplayed::Due, "it waited a minute");
    let open = world.delivery(id).await;
    assert_eq!((open.status, open.due_at), (DeliveryStatus::Failed, Some(world.clock.now())));
    assert_eq!(world.replay_delivery(id).await, DeliveryReplayed::AlreadyOpen);
    assert_eq!(world.report(&world.take_one().await, failed(Retry::Schedule)).await, Held::Kept);
    world.replay_delivery(id).await;
    assert_eq!(world.report(&world.take_one().await, failed(Retry::Schedule)).await, Held::Kept);
    assert_eq!(world.status_of("m1").await, DeliveryStatus::Dead, "no step was given back");
    let unknown = DeliveryId(Uuid::now_v7());
    assert_eq!(world.replay_delivery(unknown).await, DeliveryReplayed::Unknown);
}

pub(crate) async fn cancelling_a_message_ends_its_open_deliveries<S: Sending>(world: World<S>) {
    // The message has one delivery of each kind. Cancelling must not change ended deliveries, and
    // must name those that it changed.
    for _ in 0..4 {
        world.add(EndpointSettings { max_in_flight: 1, ..settings() }).await;
    }
    assert_eq!(world.send(message("m1")).await, 4);
    world.send(message("m2")).await;
    let claims: Vec<_> = world.take(4).await;
    assert_eq!(claims.len(), 4);
    let of = claims.iter().filter(|claim| claim.message == "m1").collect::<Vec<_>>();
    assert_eq!(of.len(), 4, "the older message goes first at each endpoint");
    assert_eq!(world.report(of[0], delivered()).await, Held::Kept);
    assert_eq!(world.report(of[1], failed(Retry::Never)).await, Held::Kept);
    assert_eq!(world.report(of[2], failed(Retry::Schedule)).await, Held::Kept);
    let mut cancelled = world.act_on("m1", MessageAct::Cancel).await.expect("there is one");
    cancelled.sort();
    let mut open = vec![of[2].delivery, of[3].delivery];
    open.sort();
    assert_eq!(cancelled, open);
    for id in &cancelled {
        let over = world.delivery(*id).await;
        assert_eq!(over.status, DeliveryStatus::Cancelled);
        assert!(over.reason.is_some(), "{over:?}");
        assert_eq!((over.due_at, over.finished_at), (None, Some(world.clock.now())));
    }
    assert_eq!(world.delivery(of[0].delivery).await.status, DeliveryStatus::Delivered);
    assert_eq!(world.delivery(of[1].delivery).await.status, DeliveryStatus::Dead);
    assert_eq!(world.act_on("m1", MessageAct::Cancel).await, Some(Vec::new()));
    assert_eq!(world.act_on("unknown", MessageAct::Cancel).await, None);
    world.pass(1_000);
    let later = world.take(ALL).await;
    assert!(later.iter().all(|claim| claim.message == "m2"), "{:?}", claimed(&later));
    // A replay of the message sends its deliveries that were not delivered.
    let mut replayed = world.act_on("m1", MessageAct::Replay).await.expect("there is one");
    replayed.sort();
    let mut expected = vec![of[1].delivery, of[2].delivery, of[3].delivery];
    expected.sort();
    assert_eq!(replayed, expected);
    assert_eq!(world.act_on("m1", MessageAct::Replay).await, Some(Vec::new()), "all are due");
    assert_eq!(world.act_on("unknown", MessageAct::Replay).await, None);
}

pub(crate) async fn each_act_that_may_end_claims_is_counted_before_its_answer<S: Sending>(
    world: World<S>,
) {
    // A sender holds claims in memory. A higher count shows the sender that its earlier claims may have
    // ended.
    let endpoint = world.add(settings()).await;
    world.send(message("m1")).await;
    world.take_one().await;
    let mut before = world.store.operator_acts();
    let mut counted = |act: &str, now: u64| {
        assert!(now > before, "{act} was not counted");
        before = now;
    };
    world.set(endpoint, EndpointSettings::at("https://example.com/moved")).await;
    counted("a change", world.store.operator_acts());
    world.disable(endpoint).await;
    counted("disabling", world.store.operator_acts());
    world.act_on("m1", MessageAct::Cancel).await;
    counted("a cancellation", world.store.operator_acts());
    world.delete(endpoint).await;
    counted("a deletion", world.store.operator_acts());
    world.store.delete_tenant(Tenant::default(), world.by("erase")).await.expect("begins");
    counted("the deletion of a tenant", world.store.operator_acts());
    world.send(message("m2")).await;
    world.take(ALL).await;
    assert_eq!(world.store.operator_acts(), before, "no operator acted");
}
