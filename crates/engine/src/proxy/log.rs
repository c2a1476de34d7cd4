//! The log lines of a proxy: its answers, and errors of its upstream. The lines never contain a key, a
//! caller, a path or a body.

use hapax_layer::IdempotencyOutcome;
use http::StatusCode;
use tracing::{error, info, warn};

use super::ProxyContext;
use crate::limits::LOG_LINES_PER_SECOND;
use crate::log_budget::LogBudget;

/// The log of one proxy, with a budget of lines for each kind.
#[derive(Debug)]
pub(super) struct ProxyLog {
    proxy: Box<str>,
    budgets: [LogBudget; LineKind::ALL.len()],
}

/// Lines that share a budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LineKind {
    Passed,
    Fresh,
    Replay,
    InProgress,
    Mismatch,
    OverQuota,
    Refused,
    Unavailable,
    /// Errors of the upstream have a budget of their own, so that the answers that they cause
    /// cannot use it up.
    Upstream,
}

impl LineKind {
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
        let budgets = LineKind::ALL.map(|_| LogBudget::new(LOG_LINES_PER_SECOND));
        Self { proxy: proxy.into(), budgets }
    }

    pub(super) fn proxy(&self) -> &str {
        &self.proxy
    }

    /// Logs the answer to a request.
    pub(super) fn answered(
        &self,
        call: &ProxyContext,
        outcome: Option<IdempotencyOutcome>,
        status: StatusCode,
    ) {
        let kind = LineKind::of(outcome);
        if !self.budget(kind).admit(call.received_at) {
            return;
        }
        let (proxy, status) = (self.proxy(), status.as_u16());
        let decision = outcome.map_or(PASSED, IdempotencyOutcome::as_str);
        let (request_id, remote) = (call.request_id.uuid, call.peer.ip());
        match kind {
            LineKind::Unavailable => error!(
                %request_id, proxy, decision, status, %remote,
                "{proxy} cannot reserve a key or store an answer: {status}"
            ),
            LineKind::Passed
            | LineKind::Fresh
            | LineKind::Replay
            | LineKind::InProgress
            | LineKind::Mismatch
            | LineKind::OverQuota
            | LineKind::Refused
            | LineKind::Upstream => {
                info!(%request_id, proxy, decision, status, %remote, "{decision} at {proxy}: {status}");
            }
        }
    }

    /// Logs an error of the upstream.
    pub(super) fn upstream(&self, call: &ProxyContext, what: &str, error: &str) {
        if self.budget(LineKind::Upstream).admit(call.received_at) {
            let (request_id, proxy) = (call.request_id.uuid, self.proxy());
            warn!(%request_id, proxy, error, "{what} the upstream of {proxy}: {error}");
        }
    }

    pub(super) fn log_suppressed_lines(&self) {
        let proxy = self.proxy();
        for kind in LineKind::ALL {
            match self.budget(kind).take_suppressed() {
                0 => {}
                more => {
                    info!(proxy, more, "and {more} more lines of this kind at {proxy}: {kind:?}")
                }
            }
        }
    }

    fn budget(&self, kind: LineKind) -> &LogBudget {
        &self.budgets[kind as usize]
    }
}
