//! How many attempts ended how, and how long they took.

use metrics::{Counter, Histogram, counter, histogram};

use super::Ended;

#[derive(Debug)]
pub(super) struct Counts {
    pub(super) done: Counter,
    pub(super) guarded: Counter,
    pub(super) failed: Counter,
    pub(super) lost: Counter,
    pub(super) seconds: Histogram,
}

impl Counts {
    pub(super) fn new(handler: &str) -> Self {
        let count = |outcome: &'static str| counter!("hapax_jobs_total", "handler" => handler.to_owned(), "outcome" => outcome);
        Self {
            done: count("done"),
            guarded: count("guarded"),
            failed: count("failed"),
            lost: count("lost"),
            seconds: histogram!("hapax_handler_seconds", "handler" => handler.to_owned()),
        }
    }

    pub(super) fn of(&self, ended: &Ended) -> &Counter {
        match ended {
            Ended::Done => &self.done,
            Ended::Guarded => &self.guarded,
            Ended::Failed(_) => &self.failed,
            Ended::Lost => &self.lost,
        }
    }
}
