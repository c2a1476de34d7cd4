//! The life of a job, case by case: written with its event, claimed, settled through its fence,
//! lost, retried, a dead letter. The first comment of each case says how it tries to break the
//! store.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::Tenant;
use hapax_core::handler::{Dialect, SqlProgram};
use hapax_core::job::{Fence, LOST_ALONE_MAX, Phase, Retry, WorkLocation};
use hapax_core::limits::{ERROR_CHARS_MAX, RESULT_CHARS_MAX};
use hapax_core::store::{
    Claim, ClaimAsk, HandlerAnswer, HandlerSpec, Held, JobFilter, NewJob, NewMessage, Outcome, Ran,
    ReplayEffect, Settlement, SqlAsk, SqlRun, Status, TriedJob, TriedVerdict, Verdict, Wake,
};

use crate::harness::{
    FOREVER, LEASE, Replay, Sender, Working, World, body, done, failed, handler, ids, job, spec,
};

pub(crate) async fn a_job_is_written_with_its_event_and_only_once<S: Working>(world: World<S>) {
    // A thousand copies at the same instant, each with its jobs.
    world.announce([spec("fee")]).await;
    let (sender, now) = (Sender::plain(), world.clock.now());
    let tasks: Vec<_> = (0..1_000)
        .map(|_| {
            let ingest = sender.ingest_for(&body("evt_1"), now, now, &[job("fee")]);
            let store = Arc::clone(&world.store);
            tokio::spawn(async move { store.ingest(ingest).await.expect("ingests").remove(0) })
        })
        .collect();
    for task in tasks {
        task.await.expect("no panic");
    }
    let all = JobFilter { limit: 100, ..JobFilter::default() };
    assert_eq!(world.store.jobs(all).await.expect("reads").items.len(), 1);
    assert_eq!(world.event("evt_1").await.summary.status, Status::Received);
    let claim = world.claim_one("fee").await;
    assert_eq!((claim.attempt, claim.run), (1, 1));
    assert_eq!(&claim.event.body[..], body("evt_1").as_bytes());
    assert_eq!(claim.event.headers, "content-type: application/json");
    assert_eq!(claim.event.id, world.event("evt_1").await.summary.id);
    assert_eq!(claim.idempotency_key, world.job("evt_1", "fee").await.idempotency_key);
    assert!(world.claim("fee", 10).await.is_empty());
}

pub(crate) async fn every_event_of_one_body_has_its_own_job<S: Working>(world: World<S>) {
    // A batch whose second element is known already: the jobs must not be assigned to the wrong
    // event.
    world.announce([spec("fee")]).await;
    let (sender, now) = (Sender::of_several(), world.clock.now());
    let batch = |ids: [&str; 2]| {
        let events = ids.map(body).join(",");
        sender.ingest_for(&format!(r#"{{"events":[{events}]}}"#), now, now, &[job("fee")])
    };
    world.store.ingest(batch(["a", "b"])).await.expect("ingests");
    world.store.ingest(batch(["b", "c"])).await.expect("ingests");
    assert_eq!(world.do_all("fee").await, ["a", "b", "c"]);
}

pub(crate) async fn a_duplicate_gets_the_outcome_of_the_work<S: Working>(world: World<S>) {
    // A stale cache entry would report "received" for a processed event.
    world.announce([spec("fee")]).await;
    let id = world.accept("evt_1", &[job("fee")]).await;
    let outcome = async || match world.arrive(&Sender::plain(), "evt_1", &[job("fee")]).await {
        Verdict::Duplicate(known) => {
            assert_eq!(known.id, id);
            (known.status, known.result.as_deref().map(str::to_owned))
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(outcome().await, (Status::Received, None));
    let claim = world.claim_one("fee").await;
    assert_eq!(outcome().await, (Status::Processing, None));
    world.pass(3);
    let finished = world.clock.now();
    world.settle(&claim, done("fee of 50")).await;
    assert_eq!(outcome().await, (Status::Processed, Some("fee of 50".into())));
    let summary = world.event("evt_1").await.summary;
    assert_eq!(summary.processed_at, Some(finished));
    assert_eq!(summary.result.as_deref(), Some("fee of 50"));
}

pub(crate) async fn a_result_is_a_line_not_a_document<S: Working>(world: World<S>) {
    // The result has letters of several bytes: the cut must not be in the middle of one.
    world.announce([spec("fee")]).await;
    world.accept("evt_1", &[job("fee")]).await;
    world.settle(&world.claim_one("fee").await, done(&"ß".repeat(1_000))).await;
    assert_eq!(world.job("evt_1", "fee").await.result, Some("ß".repeat(200)));
}

pub(crate) async fn two_handlers_have_their_own_jobs_retries_and_dead_letters<S: Working>(
    world: World<S>,
) {
    // A failing job must never make the other run again.
    world.announce([spec("fee"), spec("mail")]).await;
    world.accept("evt_1", &[job("fee"), job("mail")]).await;
    let (fee, mail) = (world.claim_one("fee").await, world.claim_one("mail").await);
    assert_ne!(fee.job, mail.job);
    assert_eq!(world.settle(&fee, done("paid")).await, Settlement::Recorded);
    assert_eq!(world.event("evt_1").await.summary.status, Status::Processing);
    assert_eq!(world.event("evt_1").await.summary.processed_at, None);
    assert_eq!(world.settle(&mail, failed(Retry::Never)).await, Settlement::Recorded);
    assert_eq!(world.event("evt_1").await.summary.status, Status::Dead);
    world.pass(86_400);
    assert!(world.claim("fee", 10).await.is_empty());
    let phases = world.event("evt_1").await.jobs.into_iter().map(|job| job.phase);
    assert_eq!(phases.collect::<Vec<_>>(), [Phase::Done, Phase::Dead]);
    let dead = JobFilter { phase: Some(Phase::Dead), limit: 10, ..JobFilter::default() };
    let dead = world.store.jobs(dead).await.expect("reads").items;
    assert_eq!(dead.iter().map(|job| job.id).collect::<Vec<_>>(), [mail.job]);
    let keys: HashSet<_> =
        world.event("evt_1").await.jobs.into_iter().map(|job| job.idempotency_key).collect();
    assert_eq!(keys.len(), 2);
}

pub(crate) async fn only_announced_handlers_are_claimed<S: Working>(world: World<S>) {
    // A node that does not know a handler must leave its jobs to one that does.
    world.accept("evt_1", &[job("fee")]).await;
    assert!(world.claim("fee", 10).await.is_empty());
    world.announce([spec("fee")]).await;
    assert_eq!(world.claim("fee", 10).await.len(), 1);
    assert!(world.claim("mail", 10).await.is_empty());
}

pub(crate) async fn a_claim_counts_before_the_work<S: Working>(world: World<S>) {
    // The process may die with the first instruction of the handler.
    world.announce([spec("fee")]).await;
    world.accept("evt_1", &[job("fee")]).await;
    let before = world.job("evt_1", "fee").await;
    assert_eq!((before.progress.attempt, before.phase), (0, Phase::Ready));
    let claim = world.claim_one("fee").await;
    let after = world.job("evt_1", "fee").await;
    assert_eq!((after.progress.attempt, after.phase), (1, Phase::Leased));
    assert!(after.fence > before.fence);
    assert_eq!(after.fence, claim.fence);
    assert_eq!(after.due_at, Some(claim.leased_until));
}

pub(crate) async fn jobs_come_in_due_order_and_then_in_the_order_of_arrival<S: Working>(
    world: World<S>,
) {
    // A limit in the middle must not select the newest first.
    world.announce([spec("fee")]).await;
    for id in ["a", "b", "c", "d"] {
        world.accept(id, &[job("fee")]).await;
    }
    let mut claims = world.claim("fee", 3).await;
    assert_eq!(ids(&claims), ["a", "b", "c"]);
    claims.extend(world.claim("fee", 3).await);
    for (claim, wait) in claims.iter().zip([30, 20, 40, 20]) {
        world.settle(claim, failed(Retry::In(Duration::from_secs(wait)))).await;
    }
    world.pass(60);
    assert_eq!(ids(&world.claim("fee", 10).await), ["b", "d", "a", "c"]);
}

pub(crate) async fn the_first_attempt_waits_as_well_where_the_schedule_says_so<S: Working>(
    world: World<S>,
) {
    // The schedule names the wait before each attempt, the first included.
    let mut patient = spec("fee");
    patient.policy.retry = vec![Duration::from_secs(100)];
    world.announce([patient]).await;
    world.accept("evt_1", &[job("fee")]).await;
    world.pass(79);
    assert!(world.claim("fee", 10).await.is_empty());
    world.pass(42);
    world.claim_one("fee").await;
}

pub(crate) async fn jobs_that_came_together_do_not_begin_together<S: Working>(world: World<S>) {
    // Thirty jobs arrive at the same instant, for a handler that waits before its first attempt. If
    // all began at once, they would overload an app that was given time to settle. A job that can never run
    // is dead at once, without a wait.
    let mut patient = spec("fee");
    patient.policy.retry = vec![Duration::from_secs(1_000)];
    world.announce([patient]).await;
    let mut waits = Vec::new();
    let begun = world.clock.now();
    for n in 0..30 {
        let id = format!("evt_{n}");
        world.accept(&id, &[job("fee")]).await;
        let due = world.job(&id, "fee").await.due_at.expect("it waits");
        waits.push(due.duration_since(begun).as_secs());
    }
    waits.sort_unstable();
    assert!((800..=1_200).contains(&waits[0]) && (800..=1_200).contains(&waits[29]), "{waits:?}");
    waits.dedup();
    assert!(waits.len() > 10, "{waits:?}");
    let hopeless = NewJob { hopeless: Some("no resource".into()), ..job("fee") };
    world.accept("hopeless", &[hopeless]).await;
    assert_eq!(world.job("hopeless", "fee").await.finished_at, Some(begun));
    let late = world.arrive_late("late", &[job("fee")]).await;
    let approved = world.store.approve(late, vec![job("fee")], world.by("known")).await;
    approved.expect("approves");
    let due = world.job("late", "fee").await.due_at.expect("it waits");
    assert!((800..=1_200).contains(&due.duration_since(begun).as_secs()), "{due}");
}

pub(crate) async fn a_late_worker_cannot_settle_a_reclaimed_job<S: Working>(world: World<S>) {
    // The worker slept past its lease, and wakes when another has the job.
    world.announce([spec("fee")]).await;
    world.accept("evt_1", &[job("fee")]).await;
    let late = world.claim_one("fee").await;
    world.pass(LEASE + 2);
    let second = world.claim_one("fee").await;
    assert_eq!(second.job, late.job);
    assert!(second.fence > late.fence);
    let publish = vec![message("m1")];
    let outcome = Outcome::Done { result: Some("late".into()), publish, answer: None };
    assert_eq!(world.settle(&late, outcome).await, Settlement::Lost);
    assert_eq!(world.settle(&late, failed(Retry::Never)).await, Settlement::Lost);
    let renewed = world.store.renew(late.job, late.fence, Duration::from_secs(60)).await;
    assert_eq!(renewed.expect("renews"), Held::Lost);
    world.store.give_back(vec![(late.job, late.fence)]).await.expect("gives back");
    assert!(!world.is_done(&late).await);
    let job = world.job("evt_1", "fee").await;
    assert_eq!((job.phase, job.fence, job.progress.attempt), (Phase::Leased, second.fence, 2));
    assert!(world.event("evt_1").await.messages.is_empty());
    assert_eq!(world.settle(&second, done("second")).await, Settlement::Recorded);
    assert_eq!(world.settle(&late, done("late")).await, Settlement::Lost);
    assert_eq!(world.job("evt_1", "fee").await.result.as_deref(), Some("second"));
}

pub(crate) async fn a_slow_worker_is_still_done_until_the_next_claim<S: Working>(world: World<S>) {
    // The effects of the attempt are committed. A timeout of the caller, or an expired lease, must
    // not run them a second time.
    world.announce([spec("fee")]).await;
    for id in ["expired", "failed"] {
        world.accept(id, &[job("fee")]).await;
    }
    let claims = world.claim("fee", 10).await;
    assert_eq!(world.settle(&claims[1], failed(Retry::Schedule)).await, Settlement::Recorded);
    world.pass(LEASE);
    // This claim notices that the lease is over; the backoff keeps it from taking the job.
    assert!(world.claim("fee", 10).await.is_empty());
    for (claim, id) in claims.iter().zip(["expired", "failed"]) {
        assert_eq!(world.settle(claim, done("after all")).await, Settlement::Recorded, "{id}");
        let job = world.job(id, "fee").await;
        assert_eq!(job.phase, Phase::Done);
        assert_eq!(job.attempts.last().map(|note| &*note.outcome), Some("done"), "{id}");
    }
    assert!(world.claim_next("fee").await.is_empty());
}

pub(crate) async fn done_is_terminal_and_idempotent_under_its_fence<S: Working>(world: World<S>) {
    // The answer to the first "done" was lost, so it is repeated; and a failure is reported after
    // it.
    world.announce([spec("fee")]).await;
    world.accept("evt_1", &[job("fee")]).await;
    let claim = world.claim_one("fee").await;
    assert!(!world.is_done(&claim).await);
    let said = |id: &str| Outcome::Done {
        result: Some("first".into()),
        publish: vec![message(id)],
        answer: None,
    };
    assert_eq!(world.settle(&claim, said("m1")).await, Settlement::Recorded);
    assert!(world.is_done(&claim).await);
    let once = world.event("evt_1").await;
    for _ in 0..3 {
        world.pass(LEASE);
        assert_eq!(world.settle(&claim, said("m2")).await, Settlement::AlreadyDone);
        assert_eq!(world.settle(&claim, failed(Retry::Schedule)).await, Settlement::AlreadyDone);
        let renewed = world.store.renew(claim.job, claim.fence, Duration::from_secs(60)).await;
        assert_eq!(renewed.expect("renews"), Held::Lost);
        world.store.give_back(vec![(claim.job, claim.fence)]).await.expect("gives back");
        assert!(world.claim("fee", 10).await.is_empty());
    }
    assert_eq!(world.event("evt_1").await, once);
}

pub(crate) async fn failed_attempts_follow_the_schedule_and_then_the_job_dies<S: Working>(
    world: World<S>,
) {
    // No attempt is earlier than the schedule allows, and there are no more attempts than the
    // schedule has steps.
    world.announce([spec("fee")]).await;
    world.accept("evt_1", &[job("fee")]).await;
    for (attempt, waits) in [(1, Some((47, 73))), (2, Some((239, 361))), (3, None)] {
        let claim = world.claim_one("fee").await;
        assert_eq!(claim.attempt, attempt);
        assert_eq!(world.settle(&claim, failed(Retry::Schedule)).await, Settlement::Recorded);
        let once = world.job("evt_1", "fee").await;
        assert_eq!(world.settle(&claim, failed(Retry::Schedule)).await, Settlement::Lost);
        assert_eq!(world.job("evt_1", "fee").await, once, "said twice, counted once");
        let Some((too_soon, by_then)) = waits else { break };
        assert_eq!(world.event("evt_1").await.summary.status, Status::Failed);
        let hint = world.next_due("fee").await;
        assert!(hint.is_some() && hint <= once.due_at, "a hint may be early, never late");
        world.pass(too_soon);
        assert!(world.claim("fee", 10).await.is_empty(), "±20 % and no more");
        world.pass(by_then - too_soon);
    }
    let job = world.job("evt_1", "fee").await;
    assert_eq!((job.phase, job.due_at), (Phase::Dead, None));
    assert_eq!(job.finished_at, Some(world.clock.now()));
    assert_eq!(job.error.as_deref(), Some("the till is closed"));
    assert_eq!((job.progress.attempt, job.progress.steps, job.progress.lost), (3, 3, 0));
    let outcomes = job.attempts.iter().map(|note| (note.attempt, note.outcome.as_str()));
    assert_eq!(outcomes.collect::<Vec<_>>(), [(1, "failed"), (2, "failed"), (3, "failed")]);
    assert!(job.attempts.iter().all(|note| note.worker == "worker-1" && note.ended_at.is_some()));
    assert_eq!(world.event("evt_1").await.summary.status, Status::Dead);
    assert!(world.claim_next("fee").await.is_empty());
}

pub(crate) async fn an_error_and_a_result_have_the_same_bound_on_every_store<S: Working>(
    world: World<S>,
) {
    // A store that cuts earlier than the others would show another error for the same attempt.
    world.announce([spec("fee")]).await;
    world.accept("evt_1", &[job("fee")]).await;
    world.accept("evt_2", &[job("fee")]).await;
    let [first, second] = &world.claim("fee", 10).await[..] else { panic!("two jobs are due") };
    let error = "é".repeat(ERROR_CHARS_MAX + 100);
    let failed = Outcome::Failed { error: error.clone(), retry: Retry::Never, answer: None };
    assert_eq!(world.settle(first, failed).await, Settlement::Recorded);
    assert_eq!(world.settle(second, done(&error)).await, Settlement::Recorded);
    let chars = |text: Option<String>| text.map(|text| text.chars().count());
    let mut detail = world.job("evt_1", "fee").await;
    assert_eq!(chars(detail.error), Some(ERROR_CHARS_MAX));
    assert_eq!(chars(detail.attempts.remove(0).error), Some(ERROR_CHARS_MAX));
    assert_eq!(chars(world.job("evt_2", "fee").await.result), Some(RESULT_CHARS_MAX));
}

pub(crate) async fn a_failure_may_set_the_next_attempt_or_forbid_it<S: Working>(world: World<S>) {
    // An app that asks for a retry in an hour must get one then, and likewise an app that asks for
    // a second.
    world.announce([spec("fee")]).await;
    for id in ["exact", "least", "never"] {
        world.accept(id, &[job("fee")]).await;
    }
    let claims = world.claim("fee", 10).await;
    let hour = Duration::from_secs(3_600);
    let retries = [Retry::In(Duration::from_secs(1)), Retry::NotBefore(hour), Retry::Never];
    for (claim, retry) in claims.iter().zip(retries) {
        world.settle(claim, failed(retry)).await;
    }
    assert_eq!(world.job("never", "fee").await.phase, Phase::Dead);
    world.pass(1);
    assert_eq!(ids(&[world.claim_one("fee").await]), ["exact"]);
    assert_eq!(world.do_all("fee").await, [""; 0]);
    world.pass(3_600 - 2);
    assert!(!ids(&world.claim("fee", 10).await).contains(&"least"));
    world.pass(1);
    world.claim_next("fee").await;
    assert_eq!(world.job("least", "fee").await.progress.attempt, 2);
}

pub(crate) async fn an_expired_lease_is_claimable_again_and_counted_as_lost<S: Working>(
    world: World<S>,
) {
    // The worker died: it must not use a step of the schedule, and no other process releases the
    // job.
    world.announce([spec("fee")]).await;
    world.accept("evt_1", &[job("fee")]).await;
    let first = world.claim_one("fee").await;
    world.pass(LEASE - 1);
    assert!(world.claim("fee", 10).await.is_empty(), "the lease still holds");
    world.pass(3);
    let second = world.claim_one("fee").await;
    assert_eq!((second.job, second.attempt), (first.job, 2));
    let job = world.job("evt_1", "fee").await;
    assert_eq!((job.progress.steps, job.progress.lost), (0, 1));
    let outcomes: Vec<_> =
        job.attempts.iter().map(|note| (&*note.outcome, note.ended_at)).collect();
    assert_eq!(outcomes, [("lost", None)]);
    assert_eq!(world.settle(&second, done("at last")).await, Settlement::Recorded);
    assert_eq!(world.job("evt_1", "fee").await.attempts.len(), 2);
}

pub(crate) async fn a_job_that_was_lost_is_claimed_alone_from_then_on<S: Working>(world: World<S>) {
    // One of three jobs killed the process. Whichever it was, it must not harm the others again.
    world.announce([spec("fee")]).await;
    for id in ["a", "b", "c"] {
        world.accept(id, &[job("fee")]).await;
    }
    assert_eq!(world.claim("fee", 10).await.len(), 3);
    world.pass(LEASE + 2);
    for id in ["d", "e", "f"] {
        world.accept(id, &[job("fee")]).await;
    }
    let mut alone = Vec::new();
    let mut together = 0;
    loop {
        let claims = world.claim("fee", 10).await;
        let lost = async |job| world.job_by_id(job).await.progress.lost > 0;
        match claims.as_slice() {
            [] => break,
            [one] if lost(one.job).await => alone.push(one.event.key.event_id.to_string()),
            several => {
                for claim in several {
                    assert!(!lost(claim.job).await, "among {:?}", ids(several));
                }
                together += several.len();
            }
        }
    }
    alone.sort();
    assert_eq!((alone, together), (vec!["a".into(), "b".into(), "c".into()], 3));
}

pub(crate) async fn jobs_that_were_lost_together_do_not_come_due_together<S: Working>(
    world: World<S>,
) {
    // The poisonous job must not run alongside the same other jobs at the same instant again.
    const JOBS: usize = 32;
    world.announce([spec("fee")]).await;
    for n in 0..JOBS {
        world.accept(&format!("evt_{n}"), &[job("fee")]).await;
    }
    assert_eq!(world.claim("fee", JOBS).await.len(), JOBS);
    world.pass(LEASE);
    assert!(world.claim("fee", JOBS).await.is_empty(), "they back off");
    // At the middle of their backoff some jobs are due and some are not, except in one of two
    // billion runs.
    world.pass(1);
    let mut due = 0;
    while !world.claim("fee", JOBS).await.is_empty() {
        due += 1;
    }
    assert!((1..JOBS).contains(&due), "{due} of {JOBS} are due");
    world.pass(1);
    while !world.claim("fee", JOBS).await.is_empty() {
        due += 1;
    }
    assert_eq!(due, JOBS);
}

pub(crate) async fn a_job_lost_alone_five_times_is_buried_by_the_claim<S: Working>(
    world: World<S>,
) {
    // An event that aborts the process every time must not do so for ever.
    world.announce([spec("fee")]).await;
    world.accept("poison", &[job("fee")]).await;
    let mut claims = 0;
    let mut gap = 0;
    loop {
        let before = world.clock.now();
        if world.claim_next("fee").await.is_empty() {
            break;
        }
        let waited = world.clock.now().as_second() - before.as_second();
        assert!(waited >= gap, "it backs off: {waited} s after {gap} s");
        gap = waited;
        claims += 1;
        assert!(claims < 20, "it is never buried");
        world.pass(LEASE);
    }
    assert_eq!(claims, 1 + LOST_ALONE_MAX, "once in company, five times alone");
    let job = world.job("poison", "fee").await;
    assert_eq!((job.phase, job.progress.steps), (Phase::Dead, 0));
    assert_eq!(job.progress.lost, 1 + LOST_ALONE_MAX);
    assert_eq!(world.event("poison").await.summary.status, Status::Dead);
}

pub(crate) async fn a_lost_call_is_neither_claimed_alone_nor_buried<S: Working>(world: World<S>) {
    // Neither a called app nor an external worker can end this process, so their jobs are not suspected after a
    // crash. A suspected job is claimed alone, and is dead after a few losses.
    for workplace in [WorkLocation::Called, WorkLocation::Pulled] {
        let name = format!("{workplace:?}");
        world.announce([HandlerSpec { workplace, ..spec(&name) }]).await;
        for n in 0..3 {
            world.accept(&format!("{name}{n}"), &[job(&name)]).await;
        }
        for attempt in 1..10 {
            let claims = world.claim(&name, 10).await;
            assert_eq!(claims.len(), 3, "{name}, attempt {attempt}");
            assert!(claims.iter().all(|claim| !claim.alone && claim.attempt == attempt));
            // The lease ends, and then the longest backoff with its jitter.
            world.pass(LEASE + 400);
        }
        for claim in world.claim(&name, 10).await {
            assert_eq!(world.settle(&claim, done("at last")).await, Settlement::Recorded);
        }
    }
}

pub(crate) async fn a_guessed_fence_settles_nothing<S: Working>(world: World<S>) {
    // A worker that guesses a fence must not settle a job that was not claimed: new, given back, or
    // replayed.
    world.announce([spec("fee")]).await;
    let guesses = async |step: &str| {
        let seen = world.job("evt_1", "fee").await;
        for fence in seen.fence.0 - 1..=seen.fence.0 + 1 {
            let held = world.store.settle(seen.id, Fence(fence), done("a guess")).await;
            assert_eq!(held.expect("answers"), Settlement::Lost, "{step}: {fence}");
        }
        assert_eq!(world.job("evt_1", "fee").await.phase, Phase::Ready, "{step}");
    };
    let id = world.accept("evt_1", &[job("fee")]).await;
    guesses("new").await;
    let claim = world.claim_one("fee").await;
    world.store.give_back(vec![(claim.job, claim.fence)]).await.expect("gives back");
    guesses("given back").await;
    let claim = world.claim_one("fee").await;
    assert_eq!(world.settle(&claim, failed(Retry::Never)).await, Settlement::Recorded);
    assert_eq!(world.replay(id, &[job("fee")], Replay::Plain).await, [ReplayEffect::WouldRun]);
    guesses("replayed").await;
    let claim = world.claim_one("fee").await;
    assert_eq!(world.settle(&claim, done("by its right")).await, Settlement::Recorded);
}

pub(crate) async fn a_job_given_back_is_uncounted<S: Working>(world: World<S>) {
    // Several restarts must not use up a job's attempts.
    world.announce([spec("fee")]).await;
    world.accept("evt_1", &[job("fee")]).await;
    let mut last = None;
    for _ in 0..20 {
        let claim = world.claim_one("fee").await;
        assert_eq!(claim.attempt, 1);
        assert!(last.replace(claim.fence) < Some(claim.fence), "fences only grow");
        world.store.give_back(vec![(claim.job, claim.fence)]).await.expect("gives back");
        let job = world.job("evt_1", "fee").await;
        assert_eq!((job.phase, job.progress.attempt, job.progress.lost), (Phase::Ready, 0, 0));
        assert!(job.attempts.is_empty());
        assert_eq!(world.settle(&claim, failed(Retry::Never)).await, Settlement::Lost);
        assert_eq!(world.settle(&claim, done("unbegun")).await, Settlement::Lost);
    }
    assert_eq!(world.event("evt_1").await.summary.status, Status::Received);
}

pub(crate) async fn a_hurried_event_is_due_at_once_and_nothing_else_is<S: Working>(
    world: World<S>,
) {
    // The sender of a failed event retries. Other jobs must not become due, and a done job must not
    // run again.
    world.announce([spec("fee"), spec("mail")]).await;
    let hurried = world.accept("evt_1", &[job("fee"), job("mail")]).await;
    world.accept("evt_2", &[job("fee")]).await;
    assert_eq!(world.do_all("mail").await, ["evt_1"]);
    for claim in world.claim("fee", 10).await {
        world.settle(&claim, failed(Retry::Schedule)).await;
    }
    assert!(world.claim("fee", 10).await.is_empty());
    world.store.hurry(hurried).await.expect("hurries");
    let claim = world.claim_one("fee").await;
    assert_eq!((ids(std::slice::from_ref(&claim)), claim.attempt), (vec!["evt_1"], 2));
    world.store.hurry(hurried).await.expect("hurries");
    assert!(world.claim("fee", 10).await.is_empty(), "a running one is left alone");
    assert!(world.claim("mail", 10).await.is_empty());
}

pub(crate) async fn renewing_extends_the_lease_of_its_holder<S: Working>(world: World<S>) {
    // Work that takes ten times the lease, and renews it in time.
    world.announce([spec("fee")]).await;
    world.accept("evt_1", &[job("fee")]).await;
    let claim = world.claim_one("fee").await;
    let lease = Duration::from_secs(LEASE.unsigned_abs());
    for _ in 0..10 {
        world.pass(LEASE - 1);
        assert!(world.claim("fee", 10).await.is_empty());
        let renewed = world.store.renew(claim.job, claim.fence, lease).await;
        assert_eq!(renewed.expect("renews"), Held::Kept);
    }
    assert_eq!(world.settle(&claim, done("slowly")).await, Settlement::Recorded);
    assert_eq!(world.job("evt_1", "fee").await.progress.lost, 0);
}

pub(crate) async fn a_noisy_tenant_does_not_starve_the_others<S: Working>(world: World<S>) {
    // A hundred jobs of one tenant are due before the single job of each other tenant.
    world.announce([spec("fee")]).await;
    let noisy = Sender::of("noisy", "shop");
    for n in 0..100 {
        world.arrive(&noisy, &format!("noise_{n}"), &[job("fee")]).await;
    }
    for tenant in ["a", "z"] {
        world.pass(1);
        let id = format!("quiet_{tenant}");
        world.arrive(&Sender::of(tenant, "shop"), &id, &[job("fee")]).await;
    }
    let claims = world.claim("fee", 10).await;
    assert_eq!(claims.len(), 10);
    let quiet = ids(&claims).iter().filter(|id| id.starts_with("quiet")).count();
    assert_eq!(quiet, 2, "{:?}", ids(&claims));
    // The jobs are then claimed one by one.
    for tenant in ["b", "y"] {
        world.arrive(&Sender::of(tenant, "shop"), tenant, &[job("fee")]).await;
    }
    let mut seen = HashSet::new();
    for _ in 0..3 {
        seen.extend(world.claim("fee", 1).await.into_iter().map(|claim| claim.event.key.tenant));
    }
    assert_eq!(seen, HashSet::from(["b", "noisy", "y"].map(Tenant::new)));
}

pub(crate) async fn a_lost_job_gets_its_turn_beside_a_backlog_of_others<S: Working>(
    world: World<S>,
) {
    // The lost job can only be claimed alone, and there are always several others that can be
    // claimed together.
    world.announce([spec("fee")]).await;
    world.arrive(&Sender::of("a", "shop"), "lost", &[job("fee")]).await;
    world.claim_one("fee").await;
    world.pass(LEASE + 2);
    for n in 0..50 {
        world.arrive(&Sender::of("a", "shop"), &format!("a_{n}"), &[job("fee")]).await;
        world.arrive(&Sender::of("b", "shop"), &format!("b_{n}"), &[job("fee")]).await;
    }
    for _ in 0..4 {
        if ids(&world.claim("fee", 5).await) == ["lost"] {
            return;
        }
    }
    panic!("the lost job waits behind all others");
}

pub(crate) async fn a_hopeless_job_is_buried_at_once_and_says_why<S: Working>(world: World<S>) {
    // The order value of a job is missing. The job cannot run or wait, and must not disappear.
    world.announce([spec("fee"), spec("mail")]).await;
    let why = "no number at /version".to_owned();
    let hopeless = NewJob { hopeless: Some(why.clone()), ..job("fee") };
    world.accept("evt_1", &[hopeless, job("mail")]).await;
    let buried = world.job("evt_1", "fee").await;
    assert_eq!((buried.phase, buried.error), (Phase::Dead, Some(why)));
    assert_eq!(buried.progress.attempt, 0);
    assert!(world.claim("fee", 10).await.is_empty());
    assert_eq!(world.claim("mail", 10).await.len(), 1, "its neighbour runs");
    assert_eq!(world.event("evt_1").await.summary.status, Status::Dead);
}

fn message(id: &str) -> NewMessage {
    NewMessage::new("fee.charged", serde_json::json!({"amount": 50})).with_id(id)
}

pub(crate) async fn messages_are_published_with_done_or_not_at_all<S: Working>(world: World<S>) {
    // A worker that lost its fence must not publish its messages, and a retry must not publish them
    // twice.
    world.announce([spec("fee")]).await;
    for id in ["evt_1", "evt_2"] {
        world.accept(id, &[job("fee")]).await;
    }
    let said = |ids: &[&str]| Outcome::Done {
        result: None,
        publish: ids.iter().map(|id| message(id)).collect(),
        answer: None,
    };
    let late = world.claim("fee", 1).await.remove(0);
    world.pass(LEASE + 2);
    let claims = [world.claim("fee", 1).await, world.claim("fee", 1).await].concat();
    assert_eq!(world.settle(&late, said(&["m0"])).await, Settlement::Lost);
    assert!(world.event("evt_1").await.messages.is_empty());
    let unnamed = NewMessage { id: None, ..message("") };
    let outcome =
        Outcome::Done { result: None, publish: vec![message("m1"), unnamed], answer: None };
    let first = claims.iter().find(|claim| claim.job == late.job).expect("claimed again");
    assert_eq!(world.settle(first, outcome).await, Settlement::Recorded);
    let messages = world.event("evt_1").await.messages;
    assert_eq!(messages.len(), 2);
    assert!(messages.iter().all(|note| note.r#type == "fee.charged" && !note.id.is_empty()));
    // The same id from another event is the same message.
    let other = claims.iter().find(|claim| claim.job != late.job).expect("the other");
    assert_eq!(world.settle(other, said(&["m1", "m2", "m2"])).await, Settlement::Recorded);
    let published = world.event("evt_2").await.messages;
    assert_eq!(published.iter().map(|note| &*note.id).collect::<Vec<_>>(), ["m2"]);
}

pub(crate) async fn a_message_that_names_no_tenant_is_of_its_events<S: Working>(world: World<S>) {
    // Events of two tenants publish under the same message id: neither may use up the other's id.
    world.announce([spec("fee")]).await;
    for tenant in ["acme", "globex"] {
        world.arrive(&Sender::of(tenant, "shop"), tenant, &[job("fee")]).await;
    }
    let named = NewMessage { tenant: Some("initech".into()), ..message("m2") };
    let publish = vec![message("m1"), named];
    for claim in world.claim("fee", 2).await {
        let said = Outcome::Done { result: None, publish: publish.clone(), answer: None };
        assert_eq!(world.settle(&claim, said).await, Settlement::Recorded);
    }
    let mut published = Vec::new();
    for tenant in ["acme", "globex"] {
        let messages = world.event(tenant).await.messages;
        published.extend(messages.into_iter().map(|note| note.id));
    }
    published.sort();
    assert_eq!(published, ["m1", "m1", "m2"], "theirs each, and the named tenant's once");
}

pub(crate) async fn a_waiting_worker_is_notified_of_new_jobs<S: Working>(world: World<S>) {
    // A worker that waits only for the hint must not miss an arrival.
    world.announce([spec("fee")]).await;
    let fee = [job("fee")];
    let notified = async {
        tokio::join!(world.arrival("fee"), world.accept("evt_1", &fee));
    };
    tokio::time::timeout(crate::harness::FOREVER, notified).await.expect("notified");
    // The worker requested the hint, and the event arrived while the worker was still claiming
    // other work.
    let fee_handler = handler("fee");
    let hint = world.store.wait(&fee_handler, FOREVER..=FOREVER);
    world.accept("evt_2", &fee).await;
    assert_eq!(hint.await, Wake::Arrived);
    let hint = world.next_due("fee").await;
    assert!(hint.is_some_and(|due| due <= world.clock.now()), "{hint:?}");
}

pub(crate) async fn jobs_are_listed_from_new_to_old_and_filtered<S: Working>(world: World<S>) {
    // No job may be skipped or shown twice where one page ends and the next begins.
    world.announce([spec("fee"), spec("mail")]).await;
    for n in 0..7 {
        let tenant = if n % 2 == 0 { "even" } else { "odd" };
        let jobs = [job("fee"), job("mail")];
        world.arrive(&Sender::of(tenant, "shop"), &format!("evt_{n}"), &jobs).await;
    }
    let list = async |filter: JobFilter| {
        let mut found = Vec::new();
        let mut filter = JobFilter { limit: 3, ..filter };
        loop {
            let page = world.store.jobs(filter.clone()).await.expect("reads");
            assert!(page.items.len() <= 3);
            found.extend(page.items.into_iter().map(|job| (job.event_id, job.handler)));
            match page.next {
                Some(next) => filter.before = Some(next),
                None => return found,
            }
        }
    };
    let all = list(JobFilter::default()).await;
    assert_eq!(all.iter().collect::<HashSet<_>>().len(), 14);
    assert_eq!(all.len(), 14);
    assert!(all.iter().map(|(id, _)| id).rev().is_sorted(), "newest first: {all:?}");
    let fee = || Some(handler("fee").handler);
    assert_eq!(list(JobFilter { handler: fee(), ..JobFilter::default() }).await.len(), 7);
    let odd = JobFilter { tenant: Some(Tenant::new("odd")), ..JobFilter::default() };
    assert_eq!(list(odd).await.len(), 6);
    assert_eq!(world.claim("fee", 2).await.len(), 2);
    let leased = JobFilter { phase: Some(Phase::Leased), ..JobFilter::default() };
    assert_eq!(list(leased).await.len(), 2);
}

fn program() -> Arc<SqlProgram> {
    // The same text in every dialect.
    Arc::new(SqlProgram::parse("SELECT 'ok'", Dialect::Sqlite).expect("parses"))
}

/// Runs one claim of an `sql` handler alone.
pub(crate) async fn run_claimed<S: Working>(world: &World<S>, claim: &Claim) -> Ran {
    let run = SqlRun {
        job: claim.job,
        fence: claim.fence,
        program: program(),
        timeout: crate::harness::FOREVER,
        current: Some("{}".into()),
    };
    world.store.run_claimed(run).await.expect("runs")
}

/// Runs an `sql` handler until no job is due; returns how many were done.
pub(crate) async fn run_sql<S: Working>(world: &World<S>, name: &str) -> usize {
    let program = program();
    let mut done = 0;
    loop {
        let claim = ClaimAsk { handler: handler(name), limit: 16, worker: "sql".into() };
        let ask = SqlAsk { claim, program: program.clone(), timeout: crate::harness::FOREVER };
        let ran = world.store.run_sql(ask).await.expect("runs");
        if ran.is_idle() {
            return done;
        }
        if let Some(claim) = &ran.alone {
            done += usize::from(run_claimed(world, claim).await == Ran::Done);
        }
        assert_eq!(ran.failed, 0);
        assert_eq!(ran.events.len(), ran.done + ran.guarded, "each is named");
        done += ran.done;
    }
}

pub(crate) async fn sql_work_is_claimed_and_done_in_one_step<S: Working>(world: World<S>) {
    // There are more jobs than one call takes, of several tenants, and copies in between.
    world.announce([spec("fee")]).await;
    for n in 0..50 {
        let sender = Sender::of(["a", "b", "c"][n % 3], "shop");
        world.arrive(&sender, &format!("evt_{n}"), &[job("fee")]).await;
        world.arrive(&sender, &format!("evt_{n}"), &[job("fee")]).await;
    }
    assert_eq!(run_sql(&world, "fee").await, 50);
    for n in 0..50 {
        let job = world.job(&format!("evt_{n}"), "fee").await;
        assert_eq!((job.phase, job.progress.attempt), (Phase::Done, 1));
        assert_eq!(job.attempts.len(), 1);
    }
    assert_eq!(run_sql(&world, "fee").await, 0);
}

pub(crate) async fn sql_work_that_was_lost_is_handed_out_by_itself_and_not_begun<S: Working>(
    world: World<S>,
) {
    // The lost job may end the process, so its worker must be able to ensure that no other job runs
    // alongside it.
    world.announce([spec("fee")]).await;
    world.accept("lost", &[job("fee")]).await;
    world.claim_one("fee").await;
    world.pass(LEASE + 2);
    world.accept("other", &[job("fee")]).await;
    let mut handed_out = Vec::new();
    for _ in 0..2 {
        let claim = ClaimAsk { handler: handler("fee"), limit: 16, worker: "sql".into() };
        let ask = SqlAsk { claim, program: program(), timeout: crate::harness::FOREVER };
        let ran = world.store.run_sql(ask).await.expect("runs");
        match ran.alone {
            None => assert_eq!((ran.done, ran.events.len()), (1, 1)),
            Some(claim) => {
                assert_eq!((ran.done, ran.failed, ran.events.len()), (0, 0, 0));
                assert_eq!((&*claim.event.key.event_id, claim.attempt), ("lost", 2));
                assert_eq!(world.job("lost", "fee").await.phase, Phase::Leased);
                handed_out.push(claim);
            }
        }
    }
    assert_eq!(handed_out.len(), 1);
    assert_eq!(run_claimed(&world, &handed_out[0]).await, Ran::Done);
    for id in ["lost", "other"] {
        assert_eq!(world.job(id, "fee").await.phase, Phase::Done, "{id}");
    }
}

pub(crate) async fn events_that_sql_work_ended_are_named<S: Working>(world: World<S>) {
    // A synchronous request waits for exactly one of these events.
    world.announce([spec("fee")]).await;
    let mut accepted = Vec::new();
    for n in 0..5 {
        accepted.push(world.accept(&format!("evt_{n}"), &[job("fee")]).await);
    }
    let claim = ClaimAsk { handler: handler("fee"), limit: 16, worker: "sql".into() };
    let ask = SqlAsk { claim, program: program(), timeout: crate::harness::FOREVER };
    let ran = world.store.run_sql(ask).await.expect("runs");
    assert_eq!((ran.done, ran.events), (5, accepted));
    let succeeded = TriedJob {
        received_at: world.event("evt_0").await.summary.received_at,
        attempt: 1,
        steps: 0,
        run: 1,
        verdict: TriedVerdict::Succeeded,
    };
    assert_eq!(ran.tried, vec![succeeded; 5]);
}

pub(crate) async fn a_claim_says_how_many_attempts_failed_before_it<S: Working>(world: World<S>) {
    // A lost attempt is not a failure, so it is not counted.
    world.announce([spec("fee")]).await;
    world.accept("evt_1", &[job("fee")]).await;
    let mut seen = Vec::new();
    for wait in [60, 300] {
        let claim = world.claim_one("fee").await;
        seen.push((claim.attempt, claim.steps));
        world.settle(&claim, failed(Retry::Schedule)).await;
        world.pass(2 * wait);
    }
    let lost = world.claim_one("fee").await;
    seen.push((lost.attempt, lost.steps));
    world.pass(LEASE + 600);
    let last = world.claim_one("fee").await;
    seen.push((last.attempt, last.steps));
    assert_eq!(seen, [(1, 0), (2, 1), (3, 2), (4, 2)]);
    assert!(spec("fee").policy.ends_with(last.steps, Retry::Schedule));
    assert!(!spec("fee").policy.ends_with(1, Retry::Schedule));
    world.settle(&last, failed(Retry::Schedule)).await;
    assert_eq!(world.job("evt_1", "fee").await.phase, Phase::Dead);
}

pub(crate) async fn a_claimed_job_is_run_by_itself_under_its_fence_and_once<S: Working>(
    world: World<S>,
) {
    // The worker was paused past its lease while it fetched the object, and another worker claimed
    // the job.
    world.announce([spec("fee")]).await;
    world.accept("evt_1", &[job("fee")]).await;
    let late = world.claim_one("fee").await;
    assert!(!late.alone);
    world.pass(LEASE + 10);
    let next = world.claim_one("fee").await;
    assert!(next.alone, "it was lost before");
    assert_eq!(run_claimed(&world, &late).await, Ran::Lost);
    assert_eq!(world.job("evt_1", "fee").await.phase, Phase::Leased);
    assert_eq!(run_claimed(&world, &next).await, Ran::Done);
    assert_eq!(run_claimed(&world, &next).await, Ran::Done, "the answer was lost");
    assert_eq!(run_claimed(&world, &late).await, Ran::Lost);
    let job = world.job("evt_1", "fee").await;
    assert_eq!((job.phase, job.progress.attempt), (Phase::Done, 2));
    let outcomes: Vec<_> = job.attempts.iter().map(|note| &*note.outcome).collect();
    assert_eq!(outcomes, ["lost", "done"]);
    assert_eq!(world.event("evt_1").await.summary.status, Status::Processed);
    // A job that was given back or settled is not run either.
    world.accept("evt_2", &[crate::harness::job("fee")]).await;
    let claim = world.claim_one("fee").await;
    world.store.give_back(vec![(claim.job, claim.fence)]).await.expect("gives back");
    assert_eq!(run_claimed(&world, &claim).await, Ran::Lost);
    let claim = world.claim_one("fee").await;
    world.settle(&claim, failed(Retry::Schedule)).await;
    assert_eq!(run_claimed(&world, &claim).await, Ran::Lost);
    assert_eq!(world.job("evt_2", "fee").await.phase, Phase::Ready);
}

pub(crate) async fn the_answer_of_the_app_is_kept_with_its_attempt<S: Working>(world: World<S>) {
    // The job fails, is done, is forced to run again, and is done before its answer arrives.
    world.announce([spec("fee")]).await;
    let id = world.accept("evt_1", &[job("fee")]).await;
    let said = |status, body: &str| Some(HandlerAnswer { status, body: body.into() });
    let done = |answer| Outcome::Done { result: None, publish: Vec::new(), answer };
    let claim = world.claim_one("fee").await;
    let failed = Outcome::Failed {
        error: "HTTP 500".into(),
        retry: Retry::In(Duration::ZERO),
        answer: said(500, "boom"),
    };
    assert_eq!(world.settle(&claim, failed).await, Settlement::Recorded);
    let claim = world.claim_one("fee").await;
    assert_eq!(world.settle(&claim, done(said(201, "made"))).await, Settlement::Recorded);
    let answers = || async {
        let attempts = world.job("evt_1", "fee").await.attempts;
        attempts.into_iter().map(|note| note.answer).collect::<Vec<_>>()
    };
    assert_eq!(answers().await, [said(500, "boom"), said(201, "made")]);
    // A repeated "done" changes nothing.
    assert_eq!(world.settle(&claim, done(said(200, "other"))).await, Settlement::AlreadyDone);
    assert_eq!(answers().await, [said(500, "boom"), said(201, "made")]);
    world.replay(id, &[job("fee")], Replay::Force).await;
    let claim = world.claim_one("fee").await;
    assert_eq!(world.settle(&claim, done(None)).await, Settlement::Recorded);
    assert_eq!(answers().await, [said(500, "boom"), said(201, "made"), None]);
    // The app had completed the job itself, and answers now.
    assert_eq!(world.settle(&claim, done(said(204, ""))).await, Settlement::AlreadyDone);
    assert_eq!(answers().await, [said(500, "boom"), said(201, "made"), said(204, "")]);
}

pub(crate) async fn a_job_that_the_app_completed_is_done_although_its_answer_says_failed<
    S: Working,
>(
    world: World<S>,
) {
    // The app commits "done" with its effects and then answers 500. A recorded failure would run the
    // effects again; a void one would lose the answer.
    world.announce([spec("fee")]).await;
    world.accept("evt_1", &[job("fee")]).await;
    let claim = world.claim_one("fee").await;
    assert_eq!(world.settle(&claim, done("by the app")).await, Settlement::Recorded);
    let once = world.job("evt_1", "fee").await;
    let answer = |body: &str| Some(HandlerAnswer { status: 500, body: body.into() });
    let failed = |body| Outcome::Failed {
        error: "HTTP 500".into(),
        retry: Retry::Never,
        answer: answer(body),
    };
    for body in ["boom", "again"] {
        assert_eq!(world.settle(&claim, failed(body)).await, Settlement::AlreadyDone);
        let now = world.job("evt_1", "fee").await;
        let notes = now.attempts.iter().map(|note| (&*note.outcome, note.answer.clone()));
        assert_eq!(notes.collect::<Vec<_>>(), [("done", answer("boom"))]);
        assert_eq!((now.phase, &now.result, &now.error), (once.phase, &once.result, &once.error));
        assert_eq!((now.progress, now.finished_at), (once.progress, once.finished_at));
    }
    assert!(world.claim_next("fee").await.is_empty());
}

pub(crate) async fn a_request_that_was_never_sent_uses_no_step<S: Working>(world: World<S>) {
    // Requests that never left occur more often than the schedule has steps. Afterwards all steps
    // of the schedule are left.
    world.announce([spec("fee")]).await;
    let event = world.accept("evt_1", &[job("fee")]).await;
    let mut waits = Vec::new();
    for attempt in 1..=5 {
        let claim = world.claim_next("fee").await.remove(0);
        let before = world.clock.now();
        assert_eq!(world.settle(&claim, failed(Retry::Unsent)).await, Settlement::Recorded);
        let job = world.job("evt_1", "fee").await;
        assert_eq!(
            (job.phase, job.progress.attempt, job.progress.steps),
            (Phase::Ready, attempt, 0)
        );
        assert_eq!(world.event("evt_1").await.summary.status, Status::Received);
        assert_eq!(job.attempts.last().expect("noted").outcome, "failed");
        waits.push(job.due_at.expect("due").duration_since(before).as_millis());
    }
    for (wait, doubled) in waits.iter().zip([1_000, 2_000, 4_000, 8_000, 16_000]) {
        assert!((doubled * 8 / 10..=doubled * 12 / 10).contains(wait), "{waits:?}");
    }
    for steps in 1..=3 {
        let claim = world.claim_next("fee").await.remove(0);
        assert!(!claim.alone);
        world.settle(&claim, failed(Retry::Schedule)).await;
        let job = world.job("evt_1", "fee").await;
        assert_eq!((job.progress.steps, job.phase == Phase::Dead), (steps, steps == 3));
    }
    // The attempts before a replay do not count as unsent ones, and neither do those of an earlier run.
    for (replay, first) in [(Replay::Plain, 9), (Replay::Force, 1)] {
        let effects = world.replay(event, &[job("fee")], replay).await;
        assert_eq!(effects, [ReplayEffect::WouldRun]);
        for (attempt, doubled) in [(first, 1_000), (first + 1, 2_000)] {
            let claim = world.claim_next("fee").await.remove(0);
            let before = world.clock.now();
            assert_eq!(world.settle(&claim, failed(Retry::Unsent)).await, Settlement::Recorded);
            let job = world.job("evt_1", "fee").await;
            assert_eq!(
                (job.phase, job.progress.attempt, job.progress.steps),
                (Phase::Ready, attempt, 0)
            );
            let wait = job.due_at.expect("due").duration_since(before).as_millis();
            assert!((doubled * 8 / 10..=doubled * 12 / 10).contains(&wait), "{attempt}: {wait} ms");
        }
        let claim = world.claim_next("fee").await.remove(0);
        assert_eq!(world.settle(&claim, done("at last")).await, Settlement::Recorded);
    }
}
