//! The numbers and words that stand for phases and statuses in columns, the same in every database. Each
//! dialect has its own SQL that ranks statuses.

use hapax_core::job::Phase;
use hapax_core::store::{EventPlan, Status};

/// The column `state` of a job.
pub(crate) const READY: i64 = 0;
pub(crate) const LEASED: i64 = 1;
pub(crate) const DONE: i64 = 2;
pub(crate) const STALE: i64 = 3;
pub(crate) const DEAD: i64 = 4;
pub(crate) const HELD: i64 = 5;
pub(crate) const PARKED: i64 = 6;
pub(crate) const REVIEW: i64 = 7;
pub(crate) const DISCARDED: i64 = 8;

/// A job's phase from its column. An unknown number counts as dead, so that it is shown to an
/// operator.
pub(crate) fn phase_of(state: i64) -> Phase {
    match state {
        READY => Phase::Ready,
        LEASED => Phase::Leased,
        DONE => Phase::Done,
        STALE => Phase::Stale,
        HELD => Phase::Held,
        PARKED => Phase::Parked,
        REVIEW => Phase::Review,
        DISCARDED => Phase::Discarded,
        _ => Phase::Dead,
    }
}

/// The column of a job's phase.
pub(crate) fn state_of(phase: Phase) -> i64 {
    match phase {
        Phase::Ready => READY,
        Phase::Leased => LEASED,
        Phase::Done => DONE,
        Phase::Stale => STALE,
        Phase::Dead => DEAD,
        Phase::Held => HELD,
        Phase::Parked => PARKED,
        Phase::Review => REVIEW,
        Phase::Discarded => DISCARDED,
    }
}

/// The status of an event, from the rank that a database gave its jobs.
pub(crate) fn ranked(rank: Option<i64>) -> Status {
    match rank {
        None => Status::Ignored,
        Some(0) => Status::Review,
        Some(1) => Status::Discarded,
        Some(2) => Status::Dead,
        Some(3) => Status::Failed,
        Some(4) => Status::Held,
        Some(5) => Status::Processing,
        Some(6) => Status::Received,
        Some(8) => Status::Stale,
        Some(_) => Status::Processed,
    }
}

/// A status from the column `pruned`; an unknown word counts as processed.
pub(crate) fn status_of(word: &str) -> Status {
    match word {
        "ignored" => Status::Ignored,
        "stale" => Status::Stale,
        "discarded" => Status::Discarded,
        _processed => Status::Processed,
    }
}

/// The text that a column stores for a plan over events.
pub(crate) fn json_of_plan(plan: &EventPlan) -> String {
    serde_json::to_string(plan).expect("names and times are JSON")
}

/// A plan over events from its column; `None` if the column was changed by hand.
pub(crate) fn plan_of_json(text: &str) -> Option<EventPlan> {
    serde_json::from_str(text).ok()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Every `state = 1 /* leased */` of a text: the number, and the comment behind it.
    fn numbers(text: &str) -> Vec<(i64, String)> {
        let mut found = Vec::new();
        for (at, word) in text.match_indices("state ") {
            let rest = text[at + word.len()..].trim_start_matches("NOT ");
            let values = match rest.split_once(' ') {
                Some(("=" | "<>", value)) => &value[..value.find('\n').unwrap_or(value.len())],
                Some(("IN", list)) => list.trim_start_matches('(').split(')').next().unwrap_or(""),
                _ => continue,
            };
            let list = rest.starts_with("IN");
            for value in values.split(',').take(if list { usize::MAX } else { 1 }) {
                let value = value.trim();
                let end =
                    value.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(value.len());
                let Ok(number) = value[..end].parse() else { continue };
                let comment = value[end..].trim_start().strip_prefix("/*");
                let comment =
                    comment.and_then(|rest| rest.split_once("*/")).map_or("", |(name, _)| name);
                found.push((number, comment.trim().to_owned()));
            }
        }
        found
    }

    fn check(path: &Path, seen: &mut usize) {
        if path.is_dir() {
            for entry in std::fs::read_dir(path).expect("reads") {
                check(&entry.expect("reads").path(), seen);
            }
            return;
        }
        if path.ends_with("tests.rs") || path.ends_with("open.rs") {
            return;
        }
        let text = std::fs::read_to_string(path).expect("reads");
        for (number, name) in numbers(&text) {
            *seen += 1;
            let of_job = format!("{:?}", phase_of(number)).to_lowercase();
            let of_event = ["open", "review", "discarded"].get(number as usize).copied();
            let of_delivery = ["ready", "leased", "delivered", "dead", "cancelled", "parked"];
            let of_delivery = of_delivery.get(number as usize).copied();
            assert!(
                name == of_job || [of_event, of_delivery].contains(&Some(&*name)),
                "{}: {number} is called {name:?}, not {of_job}",
                path.display()
            );
        }
    }

    #[test]
    fn the_comment_beside_a_state_of_sqlite_is_its_name() {
        // The statements contain the numbers, because a partial index is used only for a query that contains
        // its number. A number without a name, or with the wrong one, misleads its reader.
        let mut seen = 0;
        check(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/src/sqlite")), &mut seen);
        assert!(seen > 40, "only {seen} were found");
    }
}
