//! The history of one event as a page shows it: one summary sentence, and one short line for each step. The
//! sentences of [`story`](super::story) say the same at length.

use hapax_core::Timestamp;
use hapax_core::delivery::DeliveryStatus;
use hapax_core::job::Phase;
use hapax_core::store::{Decision, ReviewReason, Status};
use jiff::SignedDuration;

use super::acted_on;
use crate::api::{Arrival, Attempt, Event, Job, PublishedDelivery};
use crate::format;
use crate::format::url_part;

/// Jobs that the summary names; the table of jobs has all.
const JOBS_NAMED_MAX: usize = 3;

/// A signed time that differs by more than this is not explained by clock skew.
const SKEW_MAX: SignedDuration = SignedDuration::from_mins(5);

/// One step of the history.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) at: Timestamp,
    pub(crate) text: String,
    /// Whether something failed.
    pub(crate) is_bad: bool,
    /// The page that shows more.
    pub(crate) page: Option<String>,
}

impl Step {
    fn new(at: Timestamp, text: String) -> Self {
        Self { at, text, is_bad: false, page: None }
    }
}

/// The steps from the first arrival on, in order.
pub(crate) fn timeline(event: &Event) -> Vec<Step> {
    let mut steps = arrivals(event);
    for job in &event.jobs {
        steps.extend(job.attempts.iter().map(|one| attempt(job, one)));
    }
    for message in &event.messages {
        let page =
            format!("/messages/{}?tenant={}", url_part(&message.id), url_part(&message.tenant));
        let text = format!("published {}, message {}", message.r#type, message.id);
        steps.push(Step { page: Some(page.clone()), ..Step::new(message.created_at, text) });
        for delivery in &message.deliveries {
            steps.push(delivered(delivery, message.created_at));
            steps.extend(delivery.actions.iter().map(|one| Step::new(one.at, acted_on(one))));
        }
        if message.has_more_deliveries {
            let text =
                format!("… more deliveries of message {}, which is {}", message.id, message.status);
            steps.push(Step { page: Some(page), ..Step::new(message.created_at, text) });
        }
    }
    steps.extend(event.actions.iter().map(|one| Step::new(one.at, acted_on(one))));
    // The sort is stable: the steps of one instant stay in the order in which they happened.
    steps.sort_by_key(|step| step.at);
    steps
}

/// How often the event arrived, and its outcome, in one sentence.
pub(crate) fn summary(event: &Event, now: Timestamp) -> String {
    let first = event.summary.received_at;
    let last = event.arrivals.iter().map(|arrival| arrival.received_at).max().unwrap_or(first);
    let came = match (event.summary.arrival_count, event.summary.conflict_count) {
        (0 | 1, _) => "Came once".to_owned(),
        (count, 0) => {
            format!("Came {count} times in {} with the same bytes", format::between(first, last))
        }
        (count, conflicts) => format!(
            "Came {count} times in {}, {conflicts} of them with other bytes, which never run",
            format::between(first, last)
        ),
    };
    format!("{came}; {}.", jobs_summary(event, now))
}

fn jobs_summary(event: &Event, now: Timestamp) -> String {
    if event.jobs.is_empty() {
        return match event.summary.status {
            Status::Review => format!("it waits for review because {}", review_reason(event)),
            Status::Discarded => "an operator rejected it, so no handler ran".to_owned(),
            Status::Processed | Status::Stale => {
                format!("it ended as {}; its history was pruned", event.summary.status.as_str())
            }
            Status::Ignored
            | Status::Dead
            | Status::Failed
            | Status::Held
            | Status::Processing
            | Status::Received => "no handler was configured for it, so none ran".to_owned(),
        };
    }
    let mut fates: Vec<_> =
        event.jobs.iter().take(JOBS_NAMED_MAX).map(|job| job_summary(job, now)).collect();
    if let Some(more) = event.jobs.len().checked_sub(JOBS_NAMED_MAX).filter(|more| *more > 0) {
        fates.push(format::count(more as u64, "more job"));
    }
    fates.join(", ")
}

fn job_summary(job: &Job, now: Timestamp) -> String {
    // A forced run hides the state of the run before it, whose effects have happened.
    let handler = match job.run {
        0 | 1 => job.handler.to_string(),
        run => format!("{} (run {run}, forced by an operator)", job.handler),
    };
    let attempts = format::count(u64::from(job.attempt), "attempt");
    let because = job.error.as_ref().map(|error| format!(": {error}")).unwrap_or_default();
    let resource = job.resource.as_deref().unwrap_or("the same resource");
    let due = match job.due_at {
        Some(due) if due > now => format!("due in {}", format::between(due, now)),
        Some(_) | None => "due now".to_owned(),
    };
    match job.status {
        Phase::Done => {
            let result =
                job.result.as_ref().map(|result| format!(": {result}")).unwrap_or_default();
            match job.run {
                0 | 1 => format!("{handler} was done once{result}"),
                _forced => format!("{handler} was done{result}"),
            }
        }
        Phase::Stale => {
            format!("{handler} did nothing, because a newer version of {resource} was applied")
        }
        Phase::Dead => format!("{handler} gave up after {attempts}{because}"),
        Phase::Leased => format!("{handler} is running"),
        Phase::Held => format!("{handler} waits for an earlier event of {resource}"),
        Phase::Parked => format!("{handler} waits for another job of {resource}"),
        Phase::Review => format!("{handler} waits for review{because}"),
        Phase::Discarded => format!("{handler} will not run: its job was discarded"),
        Phase::Ready if job.attempt == 0 => format!("{handler} has not started, {due}"),
        Phase::Ready => format!("{handler} failed {attempts}, the next one is {due}{because}"),
    }
}

fn arrivals(event: &Event) -> Vec<Step> {
    let Some(first) = event.arrivals.first() else { return Vec::new() };
    let at = first.received_at;
    let mut steps = vec![
        Step::new(at, format!("received{}, request {}", from(first), first.request_id)),
        Step::new(at, verified(first)),
        Step {
            is_bad: first.decision == Decision::Conflict,
            ..Step::new(at, decided(event, first))
        },
    ];
    let shown = event.arrivals.len() as u64;
    let mut not_shown = event.summary.arrival_count.saturating_sub(shown);
    let mut before = Some(at);
    for arrival in &event.arrivals[1..] {
        let is_conflict = arrival.decision == Decision::Conflict;
        // Every conflict is kept. So the copies that are not kept came before the first plain copy
        // that is kept.
        if not_shown > 0 && !is_conflict {
            let copies = if not_shown == 1 { "copy" } else { "copies" };
            let text = format!("… {not_shown} more {copies} before the next, only counted");
            steps.push(Step::new(arrival.received_at, text));
            (not_shown, before) = (0, None);
        }
        let what = if is_conflict { "copy with other bytes" } else { "copy, same bytes" };
        let gap = before.map(|before| {
            format!(", {} after the previous one", format::between(before, arrival.received_at))
        });
        let secret = match (&arrival.secret, &first.secret) {
            (Some(used), Some(known)) if used != known => format!(", secret {used}"),
            (_, _) => String::new(),
        };
        let text = format!(
            "{what}{}{secret}{}: did nothing, request {}",
            from(arrival),
            gap.unwrap_or_default(),
            arrival.request_id
        );
        steps.push(Step { is_bad: is_conflict, ..Step::new(arrival.received_at, text) });
        before = Some(arrival.received_at);
    }
    if not_shown > 0 {
        let text = format!("… {}, only counted", format::count(not_shown, "more arrival"));
        steps.push(Step::new(before.unwrap_or(at), text));
    }
    steps
}

fn from(arrival: &Arrival) -> String {
    arrival.remote.map(|remote| format!(" from {remote}")).unwrap_or_default()
}

fn verified(arrival: &Arrival) -> String {
    let scheme = arrival.scheme.as_ref().map(|scheme| format!(": {scheme}")).unwrap_or_default();
    let secret = arrival.secret.as_ref().map(|secret| format!(", secret {secret}"));
    let skew =
        arrival.signed_at.map(|signed_at| format!(", {}", skew(signed_at, arrival.received_at)));
    format!("verified{scheme}{}{}", secret.unwrap_or_default(), skew.unwrap_or_default())
}

/// The difference between the signed time of an arrival and the server's time.
pub(crate) fn skew(signed_at: Timestamp, received_at: Timestamp) -> String {
    let skew = signed_at.duration_since(received_at);
    let span = format::span(skew);
    match (skew.abs() > SKEW_MAX, skew.is_negative()) {
        (false, true) => format!("clock skew -{span}"),
        (false, false) => format!("clock skew +{span}"),
        (true, true) => format!("signed {span} before it arrived"),
        (true, false) => format!("signed {span} ahead of the server's clock"),
    }
}

fn decided(event: &Event, first: &Arrival) -> String {
    if first.decision == Decision::Review {
        return format!("kept for review because {}", review_reason(event));
    }
    // A replay or an approval may have created the jobs later.
    match (event.actions.is_empty(), event.jobs.len()) {
        (true, 0) if event.summary.status == Status::Ignored => {
            "accepted, no handler was configured for it".to_owned()
        }
        (true, jobs @ 1..) => format!("accepted, {} created", format::count(jobs as u64, "job")),
        (_, _) => "accepted".to_owned(),
    }
}

/// Why the event is or was in review.
fn review_reason(event: &Event) -> &'static str {
    match event.summary.review {
        Some(ReviewReason::Late) => "it was signed before the accepted time window",
        Some(ReviewReason::Replay) => "the same signed bytes had arrived under another id",
        Some(ReviewReason::Conflict) => "its key had arrived with different bytes",
        None => "it could not be accepted automatically",
    }
}

fn attempt(job: &Job, attempt: &Attempt) -> Step {
    let Attempt { run, attempt: number, worker, .. } = attempt;
    let run = match run {
        0 | 1 => String::new(),
        run => format!(" of run {run}"),
    };
    let took = attempt.ended_at.map(|ended| format::between(attempt.started_at, ended));
    let took = took.map(|took| format!(" in {took}")).unwrap_or_default();
    let answer = match (attempt.status, attempt.answer.as_deref()) {
        (Some(status), Some(answer)) => format!(", HTTP {status} \"{answer}\""),
        (Some(status), None) => format!(", HTTP {status}"),
        (None, _) => String::new(),
    };
    // The error of an HTTP handler repeats the answer.
    let error = match (&attempt.error, &attempt.answer) {
        (Some(error), Some(answer)) if error.ends_with(answer.as_str()) => String::new(),
        (Some(error), _) => format!(": {error}"),
        (None, _) => String::new(),
    };
    let is_last = job.attempts.last() == Some(attempt);
    let result = job.result.as_ref().filter(|_| is_last && attempt.outcome == "done");
    let result = result.map(|result| format!(" → {result}")).unwrap_or_default();
    let by = if worker.is_empty() { String::new() } else { format!(", by {worker}") };
    let text = match attempt.outcome.as_str() {
        "done" => format!("done{took}{result}{answer}{by}"),
        "lost" => format!("lost, its outcome was never reported{error}{by}"),
        other => format!("{other}{took}{answer}{error}{by}"),
    };
    Step {
        is_bad: attempt.outcome != "done",
        ..Step::new(
            attempt.ended_at.unwrap_or(attempt.started_at),
            format!("{}, attempt {number}{run}: {text}", job.handler),
        )
    }
}

fn delivered(delivery: &PublishedDelivery, published_at: Timestamp) -> Step {
    let attempts = format::count(u64::from(delivery.attempt), "attempt");
    let reason = delivery.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
    let what = match delivery.status {
        DeliveryStatus::Delivered => format!("delivered after {attempts}"),
        DeliveryStatus::Waiting | DeliveryStatus::Sending => "under way".to_owned(),
        DeliveryStatus::Failed => format!("failed {attempts} so far, retried{reason}"),
        DeliveryStatus::Held => format!("held{reason}"),
        DeliveryStatus::Parked => format!("parked{reason}"),
        DeliveryStatus::Dead => format!("dead after {attempts}{reason}"),
        DeliveryStatus::Cancelled => format!("cancelled{reason}"),
    };
    Step {
        at: delivery.finished_at.unwrap_or(published_at),
        text: format!("→ {}: {what}", delivery.url),
        is_bad: matches!(delivery.status, DeliveryStatus::Dead | DeliveryStatus::Failed),
        page: Some(format!("/deliveries/{}", delivery.id)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::{event_with, job, now};
    use super::*;

    fn shown(changes: serde_json::Value) -> (String, Vec<String>) {
        let event = event_with(changes);
        let steps = timeline(&event);
        let first = event.summary.received_at;
        let line = |step: &Step| format!("{} {}", format::between(first, step.at), step.text);
        (summary(&event, now()), steps.iter().map(line).collect())
    }

    #[test]
    fn an_event_with_copies_a_failure_a_message_and_a_replay_reads_in_order() {
        let request = "01958d0e-0000-7000-8000-000000000001";
        let arrival = |time: &str, decision: &str| {
            json!({
                "decision": decision, "received_at": format!("2026-03-01T{time}Z"), "request_id": request,
                "remote": "3.1.2.4", "scheme": "stripe", "secret": "env:STRIPE_SECRET",
                "signed_at": "2026-03-01T11:59:58Z",
            })
        };
        let attempts = json!([
            { "run": 1, "attempt": 1, "started_at": "2026-03-01T12:00:01.469Z",
              "ended_at": "2026-03-01T12:00:01.500Z", "outcome": "failed", "status": 500,
              "answer": "card declined", "error": "HTTP 500: card declined", "worker": "" },
            { "run": 1, "attempt": 2, "started_at": "2026-03-01T12:00:07Z",
              "ended_at": "2026-03-01T12:00:07.020Z", "outcome": "done", "error": null, "worker": "" },
        ]);
        let (summary, lines) = shown(json!({
            "arrival_count": 4,
            "arrivals": [
                arrival("12:00:00", "accepted"), arrival("12:00:01", "duplicate"),
                arrival("12:00:02", "duplicate"), arrival("12:05:00", "conflict"),
            ],
            "conflict_count": 1,
            "jobs": [job("done", json!({ "result": "fee 50", "attempts": attempts }))],
            "messages": [{
                "id": "msg_1", "tenant": "default", "type": "fee.charged",
                "created_at": "2026-03-01T12:00:07Z", "status": "delivered",
                "deliveries": [{
                    "id": request, "url": "https://shop.example/in", "status": "delivered",
                    "reason": null, "attempt": 2, "finished_at": "2026-03-01T12:00:09Z",
                }],
            }],
            "actions": [{ "action": "replay", "who": "ops (anna)", "reason": "asked", "at": "2026-03-01T12:09:00Z" }],
        }));
        assert_eq!(
            summary,
            "Came 4 times in 5 minutes, 1 of them with other bytes, which never run; fee was done once: fee 50."
        );
        assert_eq!(
            lines,
            [
                &format!("0 ms received from 3.1.2.4, request {request}"),
                "0 ms verified: stripe, secret env:STRIPE_SECRET, clock skew -2.0 s",
                "0 ms accepted",
                &format!(
                    "1.0 s copy, same bytes from 3.1.2.4, 1.0 s after the previous one: did nothing, request {request}"
                ),
                "1.5 s fee, attempt 1: failed in 31 ms, HTTP 500 \"card declined\"",
                &format!(
                    "2.0 s copy, same bytes from 3.1.2.4, 1.0 s after the previous one: did nothing, request {request}"
                ),
                "7.0 s published fee.charged, message msg_1",
                "7.0 s fee, attempt 2: done in 20 ms → fee 50",
                "9.0 s → https://shop.example/in: delivered after 2 attempts",
                &format!(
                    "5 minutes copy with other bytes from 3.1.2.4, 4 minutes after the previous one: did nothing, request {request}"
                ),
                "9 minutes ops (anna) replayed it (reason: \"asked\")",
            ]
        );
    }

    #[test]
    fn the_exact_number_of_copies_that_are_not_kept_stands_in_front_of_the_kept_ones() {
        let arrival = |time: &str| super::super::tests::arrival(time, "env:STRIPE_SECRET");
        let (summary, lines) = shown(json!({
            "arrival_count": 1000,
            "arrivals": [arrival("12:00:00"), arrival("12:04:00"), arrival("12:05:00")],
            "status": "ignored",
        }));
        assert_eq!(
            summary,
            "Came 1000 times in 5 minutes with the same bytes; no handler was configured for it, so none ran."
        );
        assert_eq!(lines[2], "0 ms accepted, no handler was configured for it");
        assert_eq!(lines[3], "4 minutes … 997 more copies before the next, only counted");
        assert!(lines[4].starts_with("4 minutes copy, same bytes: did nothing"), "{}", lines[4]);
        assert!(lines[5].contains("60 s after the previous one"), "{}", lines[5]);
    }

    #[test]
    fn a_run_that_an_operator_forced_is_named_in_every_state() {
        let summary_of = |status: &str, more| shown(json!({ "jobs": [job(status, more)] })).0;
        assert_eq!(
            summary_of("done", json!({ "run": 2, "result": "fee 50" })),
            "Came once; fee (run 2, forced by an operator) was done: fee 50."
        );
        let due = json!({ "run": 2, "attempt": 0, "due_at": "2026-03-01T12:13:00Z", "finished_at": null });
        assert_eq!(
            summary_of("ready", due),
            "Came once; fee (run 2, forced by an operator) has not started, due in 3 minutes."
        );
    }

    #[test]
    fn deliveries_that_are_not_shown_are_mentioned() {
        let message = |has_more: bool| {
            json!([{
                "id": "msg_1", "tenant": "default", "type": "fee.charged", "status": "dead",
                "created_at": "2026-03-01T12:00:07Z", "deliveries": [],
                "has_more_deliveries": has_more,
            }])
        };
        let steps = |has_more| timeline(&event_with(json!({ "messages": message(has_more) })));
        assert_eq!(steps(true).len(), steps(false).len() + 1);
        let last = steps(true).pop().expect("a step");
        assert_eq!(last.text, "… more deliveries of message msg_1, which is dead");
        assert_eq!(last.page.as_deref(), Some("/messages/msg_1?tenant=default"));
    }

    #[test]
    fn what_waits_says_when_it_is_due() {
        let open = json!({ "attempt": 3, "due_at": "2026-03-01T12:13:00Z", "error": "no such table", "finished_at": null });
        let (summary, _) = shown(json!({ "jobs": [job("ready", open)], "status": "failed" }));
        assert_eq!(
            summary,
            "Came once; fee failed 3 attempts, the next one is due in 3 minutes: no such table."
        );
        let (summary, lines) = shown(json!({ "status": "review", "review": "late" }));
        assert_eq!(
            summary,
            "Came once; it waits for review because it was signed before the accepted time window."
        );
        assert_eq!(lines.len(), 3);
    }
}
