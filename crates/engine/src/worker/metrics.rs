//! The number of attempts by outcome, and how long they took.

use hapax_core::store::HandlerRef;
use metrics::{Counter, Histogram, counter, histogram};

use super::AttemptEnd;

#[derive(Debug)]
pub(super) struct WorkerMetrics {
    pub(super) done: Counter,
    pub(super) guarded: Counter,
    pub(super) failed: Counter,
    pub(super) lost: Counter,
    pub(super) seconds: Histogram,
}

impl WorkerMetrics {
    pub(super) fn new(of: &HandlerRef) -> Self {
        let (source, handler) = (of.source.to_string(), of.handler.to_string());
        let count = |outcome: &'static str| {
            counter!("hapax_jobs_total", "source" => source.clone(), "handler" => handler.clone(),
                "outcome" => outcome)
        };
        Self {
            done: count("done"),
            guarded: count("guarded"),
            failed: count("failed"),
            lost: count("lost"),
            seconds: histogram!("hapax_handler_seconds", "source" => source.clone(),
                "handler" => handler.clone()),
        }
    }

    pub(super) fn of(&self, ended: &AttemptEnd) -> &Counter {
        match ended {
            AttemptEnd::Done => &self.done,
            AttemptEnd::Guarded => &self.guarded,
            AttemptEnd::Failed { .. } => &self.failed,
            AttemptEnd::Lost => &self.lost,
        }
    }
}
