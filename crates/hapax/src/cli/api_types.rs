//! The fields of API answers that the command line prints, and how it formats times and durations.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde::Deserialize;

/// One page of a list; items keep every field for `--json`.
#[derive(Debug, Deserialize)]
pub(super) struct Page {
    pub(super) items: Vec<serde_json::Value>,
    #[serde(default)]
    pub(super) next: Option<String>,
}

/// An event, in a list or alone.
#[derive(Debug, Deserialize)]
pub(super) struct Event {
    pub(super) id: String,
    pub(super) event_id: String,
    pub(super) tenant: String,
    pub(super) source: String,
    pub(super) event_type: Option<String>,
    pub(super) occurred_at: Option<Timestamp>,
    pub(super) received_at: Timestamp,
    pub(super) status: String,
    pub(super) review: Option<String>,
    pub(super) came_under: Option<String>,
    pub(super) arrival_count: u64,
    pub(super) conflict_count: u64,
    pub(super) result: Option<String>,
    #[serde(default)]
    pub(super) arrivals: Vec<Arrival>,
    #[serde(default)]
    pub(super) jobs: Vec<Job>,
    #[serde(default)]
    pub(super) messages: Vec<Message>,
    #[serde(default)]
    pub(super) actions: Vec<Action>,
    #[serde(default)]
    pub(super) headers: Vec<(String, String)>,
    pub(super) body: Option<String>,
    pub(super) body_base64: Option<String>,
}

/// One arrival.
#[derive(Debug, Deserialize)]
pub(super) struct Arrival {
    pub(super) decision: String,
    pub(super) received_at: Timestamp,
    pub(super) remote: Option<String>,
    pub(super) secret: usize,
    pub(super) signed_at: Option<Timestamp>,
}

/// A job.
#[derive(Debug, Deserialize)]
pub(super) struct Job {
    pub(super) id: String,
    pub(super) event_id: String,
    pub(super) source: String,
    pub(super) handler: String,
    pub(super) status: String,
    pub(super) run: u32,
    pub(super) attempt: u32,
    pub(super) due_at: Option<Timestamp>,
    pub(super) result: Option<String>,
    pub(super) error: Option<String>,
    pub(super) finished_at: Option<Timestamp>,
    pub(super) resource: Option<String>,
    #[serde(default)]
    pub(super) attempts: Vec<Attempt>,
}

/// An attempt that ended.
#[derive(Debug, Deserialize)]
pub(super) struct Attempt {
    pub(super) attempt: u32,
    pub(super) run: u32,
    pub(super) started_at: Timestamp,
    pub(super) ended_at: Option<Timestamp>,
    pub(super) outcome: String,
    pub(super) error: Option<String>,
    pub(super) worker: String,
    pub(super) status: Option<u16>,
    pub(super) answer: Option<String>,
}

/// An action of an operator.
#[derive(Debug, Deserialize)]
pub(super) struct Action {
    pub(super) action: String,
    pub(super) who: String,
    pub(super) reason: Option<String>,
    pub(super) at: Timestamp,
}

/// A message that was published.
#[derive(Debug, Deserialize)]
pub(super) struct Message {
    pub(super) id: String,
    pub(super) r#type: String,
    pub(super) created_at: Timestamp,
}

/// The result of a replay for one job.
#[derive(Debug, Deserialize)]
pub(super) struct Replayed {
    pub(super) event_id: String,
    pub(super) handler: String,
    pub(super) effect: String,
    pub(super) detail: Option<String>,
}

/// Formats an instant: UTC, to the second.
pub(super) fn at(time: Timestamp) -> String {
    let seconds = Timestamp::from_second(time.as_second()).unwrap_or(time);
    seconds.to_string()
}

/// Formats a count: `1 source`, `2 sources`.
pub(super) fn count(count: u64, noun: &str) -> String {
    match count {
        1 => format!("1 {noun}"),
        count => format!("{count} {noun}s"),
    }
}

/// Formats the time between two instants, in either order.
pub(super) fn between(one: Timestamp, other: Timestamp) -> String {
    span(one.duration_since(other))
}

/// Formats a duration in the largest suitable unit.
pub(super) fn span(span: SignedDuration) -> String {
    let span = Duration::from_millis(u64::try_from(span.abs().as_millis()).unwrap_or(u64::MAX));
    let seconds = span.as_secs();
    match seconds {
        0 => format!("{} ms", span.as_millis()),
        1..10 => format!("{:.1} s", span.as_secs_f64()),
        10..120 => format!("{seconds} s"),
        120..7_200 => count(seconds / 60, "minute"),
        7_200..172_800 => count(seconds / 3_600, "hour"),
        _ => count(seconds / 86_400, "day"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_formatted_in_its_largest_suitable_unit() {
        let check = |ms: i64, said: &str| assert_eq!(span(SignedDuration::from_millis(ms)), said);
        check(0, "0 ms");
        check(-350, "350 ms");
        check(1_250, "1.2 s");
        check(119_000, "119 s");
        check(300_000, "5 minutes");
        check(7_200_000, "2 hours");
        check(259_200_000, "3 days");
    }
}
