//! The values that the pages of the portal show. The types hold no name of a node, no resolved address, no
//! header value, no name of an operator and no reason that was written for operators, so that no template
//! can show one.

use hapax_core::Timestamp;
use hapax_core::delivery::{DeliveryId, DeliveryStatus, EndpointStanding};
use hapax_core::endpoint::{DisabledBy, EndpointId, EndpointRecord};
use hapax_core::store::{DeliveryAttempt, DeliveryDetail, Plan, PlanState, PlanWork};

use super::super::delivery_figures::DeliveryFigures;

/// An endpoint.
pub(super) struct EndpointView {
    pub(super) id: EndpointId,
    pub(super) url: String,
    pub(super) description: Option<String>,
    pub(super) status: &'static str,
    pub(super) since: Option<Timestamp>,
    /// The meaning of the status for deliveries, unless the endpoint is active.
    pub(super) note: &'static str,
    pub(super) is_disabled: bool,
    /// Whether the sender disabled the endpoint, so that only the sender can enable it.
    pub(super) is_disabled_by_sender: bool,
    pub(super) types: Vec<String>,
    pub(super) signing: &'static str,
    pub(super) public_key: Option<String>,
    /// The names of its custom headers.
    pub(super) headers: Vec<String>,
    pub(super) created_at: Timestamp,
}

impl From<EndpointRecord> for EndpointView {
    fn from(record: EndpointRecord) -> Self {
        let disabled_by = record.disabled.as_ref().map(|disabled| disabled.by);
        let is_disabled_by_sender = disabled_by == Some(DisabledBy::Operator);
        let (status, note) = match record.standing() {
            EndpointStanding::Active => ("active", ""),
            EndpointStanding::Failing => (
                "failing",
                "It failed several times in a row. Its deliveries are held, and one of them is tried from time to \
                 time. It becomes active as soon as one succeeds.",
            ),
            EndpointStanding::Disabled if is_disabled_by_sender => (
                "disabled",
                "The sender disabled it: ask them to enable it. Its deliveries are held until then. None is lost.",
            ),
            EndpointStanding::Disabled => {
                ("disabled", "Its deliveries are held until it is enabled. None is lost.")
            }
            EndpointStanding::Deleted => ("removed", "Its open deliveries are cancelled."),
        };
        let settings = record.settings;
        Self {
            id: record.id,
            url: settings.url,
            description: settings.description,
            status,
            since: record.disabled.as_ref().map(|disabled| disabled.at),
            note,
            is_disabled: record.disabled.is_some(),
            is_disabled_by_sender,
            types: settings.types.into(),
            signing: settings.signing.as_str(),
            public_key: settings.public_key,
            headers: settings.header_names,
            created_at: record.created_at,
        }
    }
}

/// A delivery.
pub(super) struct DeliveryView {
    pub(super) id: DeliveryId,
    pub(super) message: String,
    pub(super) message_type: String,
    pub(super) endpoint: EndpointId,
    pub(super) url: String,
    pub(super) status: DeliveryStatus,
    /// An explanation of the status, if the word alone is not clear.
    pub(super) note: &'static str,
    pub(super) attempt: u32,
    pub(super) created_at: Timestamp,
    pub(super) due_at: Option<Timestamp>,
    pub(super) finished_at: Option<Timestamp>,
    pub(super) attempts: Vec<AttemptView>,
}

impl From<DeliveryDetail> for DeliveryView {
    fn from(detail: DeliveryDetail) -> Self {
        let note = match detail.status {
            DeliveryStatus::Waiting | DeliveryStatus::Sending | DeliveryStatus::Delivered => "",
            DeliveryStatus::Failed => "the last attempt failed, another one follows",
            DeliveryStatus::Parked => "an earlier delivery under the same key has not ended",
            DeliveryStatus::Held => "the endpoint is disabled or fails",
            DeliveryStatus::Dead => "every attempt failed: it is sent again only on request",
            DeliveryStatus::Cancelled => "it is no longer sent",
        };
        Self {
            id: detail.id,
            message: detail.message,
            message_type: detail.message_type,
            endpoint: detail.endpoint,
            url: detail.url,
            status: detail.status,
            note,
            attempt: detail.attempt,
            created_at: detail.created_at,
            due_at: detail.due_at,
            finished_at: detail.finished_at,
            attempts: detail.attempts.into_iter().map(AttemptView::from).collect(),
        }
    }
}

/// An attempt that ended.
pub(super) struct AttemptView {
    pub(super) n: u32,
    pub(super) at: Timestamp,
    pub(super) took_ms: Option<u64>,
    pub(super) failed: bool,
    pub(super) outcome: String,
    /// The beginning of the endpoint's answer.
    pub(super) answer: Option<String>,
}

impl From<DeliveryAttempt> for AttemptView {
    fn from(attempt: DeliveryAttempt) -> Self {
        Self {
            n: attempt.n,
            at: attempt.at,
            took_ms: attempt.took_ms,
            failed: attempt.error.is_some(),
            outcome: outcome(attempt.status, attempt.took_ms.is_none()),
            answer: attempt.answer,
        }
    }
}

/// How an attempt or a ping ended, in words that say nothing about the network of the sender.
pub(super) fn outcome(status: Option<u16>, is_lost: bool) -> String {
    match (status, is_lost) {
        (Some(status), _) => format!("HTTP {status}"),
        (None, true) => "the outcome is unknown, so it is sent again".to_owned(),
        (None, false) => {
            "no answer: the endpoint could not be reached or did not answer in time".to_owned()
        }
    }
}

/// How the newest deliveries of an endpoint went.
pub(super) fn figures(deliveries: &[DeliveryView]) -> DeliveryFigures {
    let answered = deliveries.iter().flat_map(|it| &it.attempts).filter(|it| !it.failed);
    let took_ms = answered.filter_map(|attempt| attempt.took_ms);
    DeliveryFigures::of(deliveries.iter().map(|it| it.status), took_ms)
}

/// A plan to send deliveries again.
pub(super) struct PlanView {
    pub(super) id: uuid::Uuid,
    pub(super) endpoint: Option<EndpointId>,
    pub(super) state: &'static str,
    pub(super) is_running: bool,
    pub(super) total: u64,
    pub(super) taken: u64,
    pub(super) sent: u64,
    pub(super) skipped: u64,
    pub(super) created_at: Timestamp,
    pub(super) ended_at: Option<Timestamp>,
}

impl From<Plan> for PlanView {
    fn from(plan: Plan) -> Self {
        Self {
            id: plan.id.0,
            endpoint: match &plan.work {
                PlanWork::Deliveries(work) => Some(work.endpoint),
                PlanWork::Events(_) => None,
            },
            state: plan.state.as_str(),
            is_running: plan.state == PlanState::Running,
            total: plan.total,
            taken: plan.done + plan.skipped,
            sent: plan.done,
            skipped: plan.skipped,
            created_at: plan.created_at,
            ended_at: plan.ended_at,
        }
    }
}
