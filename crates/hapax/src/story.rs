//! The history of one event in plain sentences, for `hapax explain` and for the page of the event. The
//! sentences answer a customer's question "what happened to my payment?".

mod timeline;

use hapax_core::Timestamp;
use hapax_core::delivery::DeliveryStatus;
use hapax_core::job::Phase;
use hapax_core::store::{ReviewReason, Status};

use crate::api::{Action, Attempt, Event, Job, PublishedDelivery};
use crate::format;

pub(crate) use timeline::{Step, skew, summary, timeline};

/// The sentences in order: arrivals, verification, state, jobs with their attempts, published
/// messages, and actions of operators.
pub(crate) fn story(event: &Event, now: Timestamp) -> Vec<String> {
    let mut story = vec![arrivals_sentence(event)];
    story.extend(bytes_differed(event));
    story.extend(verified(event));
    story.extend(state(event));
    story.extend(other_id_sentence(event));
    for job in &event.jobs {
        story.push(job_sentence(job, now));
        story.extend(paused(job).map(|text| format!("  {text}")));
        story.extend(job.attempts.iter().map(attempt));
    }
    for message in &event.messages {
        let time = format::at(message.created_at);
        let (kind, id) = (&message.r#type, &message.id);
        let of_tenant = match message.tenant == event.summary.tenant {
            true => String::new(),
            false => format!(" of tenant {}", message.tenant),
        };
        story.push(format!("A handler published {kind} (message {id}{of_tenant}) at {time}."));
        for delivery in &message.deliveries {
            story.push(outcome(delivery));
            story.extend(delivery.actions.iter().map(|action| format!("  {}", acted(action))));
        }
        if message.has_more_deliveries {
            let for_tenant = match message.tenant.as_str() {
                "default" => String::new(),
                tenant => format!(" --tenant {tenant}"),
            };
            story.push(format!(
                "Not all of its deliveries are listed here. It is {}: hapax messages show {id}{for_tenant}",
                message.status
            ));
        }
    }
    story.extend(event.actions.iter().map(acted));
    story
}

/// Notes for the operator, in addition to the summary and the jobs of an event.
pub(crate) fn notes(event: &Event) -> Vec<String> {
    other_id_sentence(event).into_iter().chain(event.jobs.iter().filter_map(paused)).collect()
}

/// The sentence about an operator's act on the event or delivery of the previous sentence.
fn acted(action: &Action) -> String {
    let (what, reason) = act(action);
    format!("{what} at {}{reason}.", format::at(action.at))
}

/// An operator's act, without its time.
fn acted_on(action: &Action) -> String {
    let (what, reason) = act(action);
    format!("{what}{reason}")
}

fn act(action: &Action) -> (String, String) {
    let done = match action.action.as_str() {
        "replay" => "replayed",
        "approve" => "approved",
        "reject" => "rejected",
        "discard" => "discarded",
        "cancel" => "cancelled",
        "skip" => "skipped",
        other => other,
    };
    let reason = action.reason.as_ref().map(|reason| format!(" (reason: \"{reason}\")"));
    (format!("{} {done} it", action.who), reason.unwrap_or_default())
}

fn arrivals_sentence(event: &Event) -> String {
    let what = match &event.summary.event_type {
        Some(kind) => format!("{} ({kind})", event.summary.event_id),
        None => event.summary.event_id.clone(),
    };
    let from = match event.summary.tenant.as_str() {
        "default" => event.summary.source.clone(),
        tenant => format!("{} of tenant {tenant}", event.summary.source),
    };
    let first = event.summary.received_at;
    let last = event.arrivals.iter().map(|arrival| arrival.received_at).max().unwrap_or(first);
    let often = match event.summary.arrival_count {
        0 | 1 => format!("arrived once, at {}", format::at(first)),
        count => format!(
            "arrived {count} times over {}, first at {}, last at {}",
            format::between(first, last),
            format::at(first),
            format::at(last),
        ),
    };
    format!("{what} from {from} {often}. Its id in Hapax is {}.", event.summary.id)
}

fn bytes_differed(event: &Event) -> Option<String> {
    let jobs = match event.jobs.len() {
        0 => String::new(),
        jobs => format!(" with {}", format::count(jobs as u64, "job")),
    };
    match (event.summary.arrival_count, event.summary.conflict_count) {
        (0 | 1, _) => None,
        (_, 0) => Some(format!("All copies had the same bytes, so they count as one event{jobs}.")),
        (_, 1) => Some(
            "1 copy had different bytes under the same id. It is stored for inspection and never \
             runs."
                .to_owned(),
        ),
        (_, count) => Some(format!(
            "{count} copies had different bytes under the same id. They are stored for inspection \
             and never run."
        )),
    }
}

fn verified(event: &Event) -> Option<String> {
    let first = event.arrivals.first()?;
    let mut secrets: Vec<&str> = Vec::new();
    for secret in event.arrivals.iter().filter_map(|arrival| arrival.secret.as_deref()) {
        if !secrets.contains(&secret) {
            secrets.push(secret);
        }
    }
    let scheme = first.scheme.as_ref().map(|scheme| format!(" ({scheme})")).unwrap_or_default();
    let which = match secrets.as_slice() {
        [] => "The signature was valid".to_owned(),
        [one] => format!("The signature{scheme} matched the secret {one}"),
        several => format!(
            "The signatures{scheme} matched the secrets {}: the secret was rotated in between",
            several.join(" and ")
        ),
    };
    let signed = if event.summary.arrival_count > 1 { "The first copy" } else { "It" };
    let signed = first.signed_at.map(|signed_at| {
        let gap = format::between(first.received_at, signed_at);
        match signed_at <= first.received_at {
            true => format!(". {signed} was signed {gap} before it arrived"),
            false => format!(
                ". {signed} was signed {gap} ahead of the server's clock: one of the two clocks is \
                 wrong"
            ),
        }
    });
    Some(format!("{which}{}.", signed.unwrap_or_default()))
}

fn state(event: &Event) -> Option<String> {
    let why = match event.summary.review {
        Some(ReviewReason::Late) => "it was signed before the accepted time window",
        Some(ReviewReason::Replay) => "the same signed bytes had arrived under another id",
        Some(ReviewReason::Conflict) => "its key had arrived with different bytes",
        None => "it could not be accepted automatically",
    };
    match event.summary.status {
        // If the event has jobs, the sentence of each job reports its state.
        Status::Review | Status::Discarded if !event.jobs.is_empty() => None,
        Status::Review => Some(format!(
            "It waits for review because {why}. No handler has run. `hapax events approve {0}` \
             creates its jobs; `hapax events reject {0}` discards it.",
            event.summary.id
        )),
        Status::Discarded => Some("An operator rejected it, so no handler ran.".to_owned()),
        Status::Ignored => Some("No handler was configured for it, so none ran.".to_owned()),
        _ if event.summary.review.is_some() => {
            Some(format!("It was first held for review because {why}, and released later."))
        }
        _ => None,
    }
}

fn other_id_sentence(event: &Event) -> Option<String> {
    let id = event.summary.came_under.as_ref()?;
    Some(format!(
        "It arrived under the id {id}. That id is not signed, so it stays free for the event that it \
         belongs to. This event has an id of its own."
    ))
}

fn job_sentence(job: &Job, now: Timestamp) -> String {
    let handler = &job.handler;
    let run = match job.run {
        0 | 1 => String::new(),
        run => format!(" (run {run}, forced by an operator)"),
    };
    let subject = format!("Handler {handler}{run}");
    let due = job.due_at.map_or_else(|| "at an unknown time".to_owned(), |due| until(due, now));
    let ended = job.finished_at.map(|time| format!(" at {}", format::at(time))).unwrap_or_default();
    let attempts = format::count(u64::from(job.attempt), "attempt");
    let because = job.error.as_ref().map(|error| format!(": {error}")).unwrap_or_default();
    match job.status {
        Phase::Done => {
            let result = job.result.as_ref().map(|result| format!(", with result \"{result}\""));
            format!("{subject} finished{ended} after {attempts}{}.", result.unwrap_or_default())
        }
        Phase::Stale => format!(
            "{subject} did nothing{ended}: a newer version of {} was already applied.",
            job.resource.as_deref().unwrap_or("the same resource")
        ),
        Phase::Dead => format!(
            "{subject} gave up{ended} after {attempts}{because}. `hapax dead replay {0}` runs it \
             again; `hapax dead discard {0}` discards it.",
            job.id
        ),
        Phase::Leased => format!("{subject} is running; its lease ends {due}."),
        Phase::Held => format!(
            "{subject} waits for an earlier event of {}. If that event does not arrive, the rule \
             `on_gap` applies {due}.",
            job.resource.as_deref().unwrap_or("the same resource")
        ),
        Phase::Review => format!(
            "{subject} waits for review{because}. `hapax events approve {0}` runs it anyway; \
             `hapax events reject {0}` discards it.",
            job.event_id
        ),
        Phase::Discarded => {
            format!("{subject} will not run: an operator discarded its job{ended}.")
        }
        Phase::Parked => format!(
            "{subject} waits for another job of {} to end.",
            job.resource.as_deref().unwrap_or("the same resource")
        ),
        Phase::Ready if job.attempt == 0 => format!("{subject} has not started; it is due {due}."),
        Phase::Ready => format!(
            "{subject} has not succeeded in {attempts}{because}. The next attempt is due {due}."
        ),
    }
}

/// Why a job that is due does not run.
fn paused(job: &Job) -> Option<String> {
    let since = format::at(job.handler_paused_at?);
    let (source, handler) = (&job.source, &job.handler);
    Some(format!(
        "The handler has been paused since {since}: the job waits, and nothing is counted meanwhile. \
         `hapax handlers resume {source}/{handler}` resumes it."
    ))
}

/// The sentence about the endpoint and the status of a delivery.
fn outcome(delivery: &PublishedDelivery) -> String {
    let (url, attempts) = (&delivery.url, format::count(u64::from(delivery.attempt), "attempt"));
    let reason = delivery.reason.as_deref().unwrap_or("no reason is recorded");
    let id = delivery.id;
    match delivery.status {
        DeliveryStatus::Delivered => match delivery.finished_at {
            Some(at) => format!("{url} got it at {} after {attempts}.", format::at(at)),
            None => format!("{url} got it after {attempts}."),
        },
        DeliveryStatus::Waiting | DeliveryStatus::Sending => {
            format!("Its delivery to {url} is under way.")
        }
        DeliveryStatus::Failed => {
            format!("Its delivery to {url} failed {attempts} so far ({reason}) and is retried.")
        }
        DeliveryStatus::Held => {
            format!("Its delivery to {url} is held: {reason}.")
        }
        DeliveryStatus::Parked => format!("Its delivery to {url} is parked: {reason}."),
        DeliveryStatus::Dead => format!(
            "Its delivery to {url} is a dead letter after {attempts}: {reason}. To send it again: hapax \
             deliveries replay {id}"
        ),
        DeliveryStatus::Cancelled => format!("Its delivery to {url} was cancelled: {reason}."),
    }
}

fn until(due: Timestamp, now: Timestamp) -> String {
    match due <= now {
        true => "now".to_owned(),
        false => format!("in {}, at {}", format::between(due, now), format::at(due)),
    }
}

fn attempt(attempt: &Attempt) -> String {
    let Attempt { run, attempt: number, worker, .. } = attempt;
    let which = match run {
        0 | 1 => format!("Attempt {number}"),
        run => format!("Attempt {number} of run {run}"),
    };
    let began = format::at(attempt.started_at);
    let lasted = attempt.ended_at.map(|ended| format::between(attempt.started_at, ended));
    let lasted = lasted.map(|lasted| format!(" after {lasted}")).unwrap_or_default();
    let error = attempt.error.as_ref().map(|error| format!(": {error}")).unwrap_or_default();
    let ended = match attempt.outcome.as_str() {
        "done" => format!("succeeded{lasted}"),
        "failed" => format!("failed{lasted}{error}"),
        "lost" => format!(
            "was lost{error}: its process ended or its lease expired before it reported an outcome"
        ),
        other => format!("ended as {other}{lasted}{error}"),
    };
    let by = if worker.is_empty() { String::new() } else { format!(" by {worker}") };
    format!(
        "  {which}{by} started at {began} and {ended}.{}",
        answered(attempt).unwrap_or_default()
    )
}

/// The app's answer, unless the error already contains it.
fn answered(attempt: &Attempt) -> Option<String> {
    let status = attempt.status?;
    let in_error =
        |answer: &str| attempt.error.as_ref().is_some_and(|error| error.ends_with(answer));
    match attempt.answer.as_deref() {
        Some(answer) if in_error(answer) => None,
        Some(answer) => Some(format!(" The app answered HTTP {status}: \"{answer}\".")),
        None if attempt.error.is_some() => None,
        None => Some(format!(" The app answered HTTP {status} without a body.")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const EVENT: &str = "01958d0e-0000-7000-8000-000000000001";
    const JOB: &str = "01958d0e-0000-7000-8000-000000000002";

    pub(super) fn now() -> Timestamp {
        "2026-03-01T12:10:00Z".parse().unwrap()
    }

    pub(super) fn event_with(changes: serde_json::Value) -> Event {
        let mut event = json!({
            "id": EVENT, "event_id": "evt_1", "tenant": "default", "source": "stripe",
            "event_type": "payout.paid", "occurred_at": null,
            "received_at": "2026-03-01T12:00:00Z", "status": "processed", "review": null,
            "arrival_count": 1, "conflict_count": 0, "processed_at": null, "result": null,
            "arrivals": [arrival("12:00:00", "env:STRIPE_SECRET")], "jobs": [], "attempts": [], "messages": [],
            "actions": [], "headers": [], "body": "{}",
        });
        event.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        serde_json::from_value(event).unwrap()
    }

    fn explained(changes: serde_json::Value) -> Vec<String> {
        story(&event_with(changes), now())
    }

    pub(super) fn arrival(time: &str, secret: &str) -> serde_json::Value {
        json!({
            "decision": "accepted", "received_at": format!("2026-03-01T{time}Z"), "request_id": EVENT,
            "remote": null, "scheme": "stripe", "secret": secret, "signed_at": "2026-03-01T11:59:58Z",
        })
    }

    pub(super) fn job(status: &str, changes: serde_json::Value) -> serde_json::Value {
        let mut job = json!({
            "id": JOB, "event": EVENT, "event_id": "evt_1", "tenant": "default", "source": "stripe",
            "handler": "fee", "steps": 2, "lost": 0, "fence": 2, "idempotency_key": "fee",
            "status": status, "run": 1, "attempt": 2, "due_at": null, "result": null,
            "error": null, "finished_at": "2026-03-01T12:00:07Z", "resource": null,
            "attempts": [],
        });
        job.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        job
    }

    #[test]
    fn a_duplicated_event_that_failed_once_is_explained_from_arrival_to_effect() {
        let attempts = json!([
            { "run": 1, "attempt": 1, "started_at": "2026-03-01T12:00:00Z",
              "ended_at": "2026-03-01T12:00:01.500Z", "outcome": "failed",
              "error": "connection refused", "worker": "sql" },
            { "run": 1, "attempt": 2, "started_at": "2026-03-01T12:00:07Z",
              "ended_at": "2026-03-01T12:00:07.020Z", "outcome": "done",
              "error": null, "worker": "sql" },
        ]);
        let story = explained(json!({
            "arrival_count": 3,
            "arrivals": [arrival("12:00:00", "env:OLD"), arrival("12:05:00", "env:NEW")],
            "jobs": [job("done", json!({ "result": "50", "attempts": attempts }))],
            "actions": [{ "action": "replay", "who": "ops", "reason": "asked by support",
                          "at": "2026-03-01T12:09:00Z" }],
        }));
        assert_eq!(
            story,
            [
                "evt_1 (payout.paid) from stripe arrived 3 times over 5 minutes, first at \
                 2026-03-01T12:00:00Z, last at 2026-03-01T12:05:00Z. Its id in Hapax is \
                 01958d0e-0000-7000-8000-000000000001.",
                "All copies had the same bytes, so they count as one event with 1 job.",
                "The signatures (stripe) matched the secrets env:OLD and env:NEW: the secret was \
                 rotated in between. The first copy was signed 2.0 s before it arrived.",
                "Handler fee finished at 2026-03-01T12:00:07Z after 2 attempts, with result \"50\".",
                "  Attempt 1 by sql started at 2026-03-01T12:00:00Z and failed after 1.5 s: \
                 connection refused.",
                "  Attempt 2 by sql started at 2026-03-01T12:00:07Z and succeeded after 20 ms.",
                "ops replayed it at 2026-03-01T12:09:00Z (reason: \"asked by support\").",
            ]
        );
    }

    #[test]
    fn a_published_message_is_explained_with_its_deliveries_and_what_operators_did() {
        let story = explained(json!({ "messages": [{
            "id": "m1", "tenant": "acme", "type": "fee.charged", "status": "delivered",
            "created_at": "2026-03-01T12:00:01Z",
            "deliveries": [{
                "id": JOB, "url": "https://example.com/in", "status": "delivered", "reason": null,
                "attempt": 2, "finished_at": "2026-03-01T12:00:09Z",
                "actions": [{ "action": "replay", "who": "ops", "reason": "asked by support",
                              "at": "2026-03-01T12:00:08Z" }],
            }],
        }] }));
        assert_eq!(
            story[2..],
            [
                "A handler published fee.charged (message m1 of tenant acme) at 2026-03-01T12:00:01Z.",
                "https://example.com/in got it at 2026-03-01T12:00:09Z after 2 attempts.",
                "  ops replayed it at 2026-03-01T12:00:08Z (reason: \"asked by support\").",
            ]
        );
    }

    #[test]
    fn the_sentence_of_an_attempt_contains_the_app_s_answer() {
        let attempt = |outcome: &str, error: Option<&str>, answer: Option<&str>| {
            json!({ "run": 1, "attempt": 1, "started_at": "2026-03-01T12:00:00Z",
                    "ended_at": "2026-03-01T12:00:00.020Z", "outcome": outcome, "error": error,
                    "worker": "", "status": 200, "answer": answer })
        };
        let said = |attempt: serde_json::Value| {
            explained(json!({ "jobs": [job("done", json!({ "attempts": [attempt] }))] }))
                .pop()
                .unwrap()
        };
        let done = said(attempt("done", None, Some("fee created")));
        assert!(done.ends_with("20 ms. The app answered HTTP 200: \"fee created\"."), "{done}");
        let empty = said(attempt("done", None, None));
        assert!(empty.ends_with("20 ms. The app answered HTTP 200 without a body."), "{empty}");
        let failed = said(attempt("failed", Some("HTTP 500: boom"), Some("boom")));
        assert!(failed.ends_with("failed after 20 ms: HTTP 500: boom."), "{failed}");
        let longer = said(attempt("failed", Some("HTTP 500: boom"), Some("{\"error\":\"boom\"}")));
        assert!(longer.contains("HTTP 500: boom. The app answered HTTP 200: "), "{longer}");
    }

    #[test]
    fn a_sentence_about_waiting_names_the_time_or_the_next_command() {
        let last = |changes: serde_json::Value| explained(changes).pop().unwrap();
        let again = json!({ "due_at": "2026-03-01T12:15:00Z", "error": "timed out" });
        assert_eq!(
            last(json!({ "status": "failed", "jobs": [job("ready", again)] })),
            "Handler fee has not succeeded in 2 attempts: timed out. The next attempt is due in 5 \
             minutes, at 2026-03-01T12:15:00Z."
        );
        let fresh = json!({ "attempt": 0, "due_at": "2026-03-01T12:00:00Z" });
        assert_eq!(
            last(json!({ "status": "received", "jobs": [job("ready", fresh)] })),
            "Handler fee has not started; it is due now."
        );
        let review = last(json!({ "status": "review", "review": "late" }));
        assert!(review.starts_with("It waits for review because it was signed before"), "{review}");
        let replay = json!({ "status": "review", "review": "replay", "came_under": "evt_2" });
        let replay = explained(replay);
        assert!(replay[2].contains("because the same signed bytes had arrived"), "{replay:?}");
        assert!(replay[2].contains(&format!("`hapax events approve {EVENT}`")), "{replay:?}");
        assert!(replay[3].starts_with("It arrived under the id evt_2."), "{replay:?}");
        let held = json!({ "attempt": 0, "due_at": "2026-03-01T12:15:00Z" });
        assert_eq!(
            last(json!({ "status": "held", "jobs": [job("held", held)] })),
            "Handler fee waits for an earlier event of the same resource. If that event does not \
             arrive, the rule `on_gap` applies in 5 minutes, at 2026-03-01T12:15:00Z."
        );
        let why = json!({ "error": "its predecessor did not arrive in time" });
        let review = last(json!({ "status": "review", "jobs": [job("review", why)] }));
        assert!(review.contains("waits for review: its predecessor"), "{review}");
        assert!(review.contains("`hapax events approve evt_1`"), "{review}");
        let refused =
            explained(json!({ "status": "discarded", "jobs": [job("discarded", json!({}))] }));
        assert_eq!(refused.len(), 3, "one sentence says it: {refused:?}");
        assert!(refused[2].ends_with("discarded its job at 2026-03-01T12:00:07Z."), "{refused:?}");
        let dead = last(json!({ "jobs": [job("dead", json!({ "error": "no such table" }))] }));
        let replay = format!("after 2 attempts: no such table. `hapax dead replay {JOB}`");
        assert!(dead.contains(&replay), "{dead}");
    }
}
