//! The log lines of a proxy: its answers, and errors of its upstream. They never contain a key, a caller,
//! a path or a body.

use hapax_layer::IdempotencyOutcome;
use http::StatusCode;
use tracing::{error, info, warn};

use super::Call;
use crate::limits::LOG_LINES_PER_SECOND;
use crate::log_budget::LogBudget;

/// The log of one proxy, with a budget of lines for each kind.
#[derive(Debug)]
pub(super) struct ProxyLog {
    proxy: Box<str>,
    budgets: [LogBudget; Lane::ALL.len()],
}

/// Lines that share a budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lane {
    Passed,
    Fresh,
    Replay,
    InProgress,
    Mismatch,
    OverQuota,
    Refused,
    Unavailable,
    /// Errors of the upstream: a budget of their own, so that the answers they cause cannot use it
    /// up.
    Upstream,
}

impl Lane {
    const ALL: [Self; 9] = [
        Self::Passed,
        Self::Fresh,
        Self::Replay,
        Self::InProgress,
        Self::Mismatch,
        Self::OverQuota,
        Self::Refused,
        Self::Unavailable,
        Self::Upstream,
    ];

    fn of(outcome: Option<IdempotencyOutcome>) -> Self {
        match outcome {
            None => Self::Passed,
            Some(IdempotencyOutcome::Fresh) => Self::Fresh,
            Some(IdempotencyOutcome::Replay) => Self::Replay,
            Some(IdempotencyOutcome::InProgress) => Self::InProgress,
            Some(IdempotencyOutcome::Mismatch) => Self::Mismatch,
            Some(IdempotencyOutcome::OverQuota) => Self::OverQuota,
            Some(IdempotencyOutcome::Refused) => Self::Refused,
            Some(IdempotencyOutcome::Unavailable) => Self::Unavailable,
        }
    }
}

/// The decision in log lines for a request without a key.
const PASSED: &str = "passed";

impl ProxyLog {
    pub(super) fn new(proxy: &str) -> Self {
        let budgets = Lane::ALL.map(|_| LogBudget::new(LOG_LINES_PER_SECOND));
        Self { proxy: proxy.into(), budgets }
    }

    pub(super) fn proxy(&self) -> &str {
        &self.proxy
    }

    /// Logs the answer to a request.
    pub(super) fn answered(
        &self,
        call: &Call,
        outcome: Option<IdempotencyOutcome>,
        status: StatusCode,
    ) {
        let lane = Lane::of(outcome);
        if !self.budget(lane).admit(call.received_at) {
            return;
        }
        let (proxy, status) = (self.proxy(), status.as_u16());
        let decision = outcome.map_or(PASSED, IdempotencyOutcome::as_str);
        let (request_id, remote) = (call.request_id.uuid, call.peer.ip());
        match lane {
            Lane::Unavailable => error!(
                %request_id, proxy, decision, status, %remote,
                "{proxy} cannot reserve a key or store an answer: {status}"
            ),
            Lane::Passed
            | Lane::Fresh
            | Lane::Replay
            | Lane::InProgress
            | Lane::Mismatch
            | Lane::OverQuota
            | Lane::Refused
            | Lane::Upstream => {
                info!(%request_id, proxy, decision, status, %remote, "{decision} at {proxy}: {status}");
            }
        }
    }

    /// Logs an error of the upstream.
    pub(super) fn upstream(&self, call: &Call, what: &str, error: &str) {
        if self.budget(Lane::Upstream).admit(call.received_at) {
            let (request_id, proxy) = (call.request_id.uuid, self.proxy());
            warn!(%request_id, proxy, error, "{what} the upstream of {proxy}: {error}");
        }
    }

    pub(super) fn say_held_back(&self) {
        let proxy = self.proxy();
        for lane in Lane::ALL {
            match self.budget(lane).take_held_back() {
                0 => {}
                more => {
                    info!(proxy, more, "and {more} more lines of this kind at {proxy}: {lane:?}")
                }
            }
        }
    }

    fn budget(&self, lane: Lane) -> &LogBudget {
        &self.budgets[lane as usize]
    }
}
